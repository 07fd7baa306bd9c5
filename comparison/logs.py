"""
The files of a run as they are: config.json and log.jsonl. What they say of a run is in runs.py; nothing
here needs torch.
"""

import json
from pathlib import Path

from lib.files import unreadable
from lib.logs import parse_line


def text_of_run(run, name):
    """The text of a file of a run; None where there is none."""
    path = Path(run, name)
    return path.read_text(errors='replace') if path.exists() else None


def entries_of(log, path):
    """The lines of a log.jsonl, its text, as [{'step': ...}]. ValueError names a damaged line."""
    entries = []
    for number, line in enumerate(log.splitlines(), 1):
        with unreadable(f'{path}, line {number}: not a line of a training log'):
            entries.append(parse_line(line))
    return entries


def read_run_config(run, *needed):
    """The settings of a run, {} where it has no config.json. Raises OSError or ValueError if one
    of those `needed` is missing or no number."""
    path = Path(run, 'config.json')
    text = text_of_run(run, 'config.json')
    if text is None and needed:
        raise FileNotFoundError(f'there is no {path}')
    with unreadable(f'{path} does not say {", ".join(needed) or "settings"}'):
        config = dict(json.loads(text or '{}'))
        for name in needed:
            float(config[name])
    return config
