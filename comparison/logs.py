"""
The files of a run as they are: config.json and log.jsonl, from its folder or from a pack.

A run that has no folder any more is read from a pack beside where its folder was: runs_1.tar.xz,
runs_2.tar.xz, ..., which comparison/pack.py has made, with the same files under the same names. What the
files say of a run is in runs.py; nothing here needs torch.
"""

import functools
import io
import json
import lzma
import posixpath
import re
import tarfile
from pathlib import Path

from lib.files import first_line, unreadable

PACKS = 'runs_*.tar.xz'


def text_of_run(run, name):
    """The text of a file of a run; None where there is none."""
    run = Path(run)
    return text_in(run.parent, f'{run.name}/{name}')


def text_in(folder, name):
    """The text of a file of a folder of runs, from the folder or from a pack in it; None where there is
    none."""
    path = Path(folder, name)
    if path.exists():
        return path.read_text(errors='replace')
    files = {}
    for pack in sorted(Path(folder).glob(PACKS), key=pack_number):
        files |= read_pack(pack)
    return files.get(name)


def pack_number(pack):
    """Of runs_12.tar.xz, 12."""
    return int(re.search(r'\d*(?=\.tar)', pack.name)[0] or 0)


@functools.cache  # a pack is never rewritten
def read_pack(path):
    """{run/file: text} of a pack. ValueError where it is damaged."""
    try:
        contents = lzma.decompress(path.read_bytes())  # all of it, which checks its sum
        with tarfile.open(fileobj=io.BytesIO(contents)) as pack:
            # Whoever packs by hand packs folders, too.
            files = [m for m in pack if m.isfile()]
            return {
                posixpath.normpath(m.name): pack.extractfile(m).read().decode(errors='replace')
                for m in files
            }
    except (lzma.LZMAError, tarfile.TarError) as error:
        raise ValueError(f'{path} is damaged: {first_line(error)}') from error


def named_runs(words):
    """The folders of the runs that words of a command line name; a pack stands for all its runs."""
    runs = []
    for path in map(Path, words):
        is_pack = path.name.endswith('.tar.xz')
        if is_pack and not path.match(PACKS):
            raise ValueError(
                f'{path} is read as a pack only under a name like runs_1.tar.xz; rename it'
            )
        files = read_pack(path) if is_pack else {}
        logs = [path.parent / name for name in files if name.endswith('log.jsonl')]
        runs += [log.parent for log in logs] or [path]
    return tuple(map(str, runs))


def entries_of(log, path):
    """The lines of a log.jsonl, its text, as [{'step': ...}]. ValueError names a damaged line."""
    entries = []
    for number, line in enumerate(log.splitlines(), 1):
        with unreadable(f'{path}, line {number}: not a line of a training log'):
            entry = json.loads(line)
            kinds = {'step': int, 'loss': int | float | None, 'changed': dict | None}
            if not all(isinstance(entry.get(name), kind) for name, kind in kinds.items()):
                raise TypeError(f'not {", ".join(kinds)}')
            entries.append(entry)
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
    return renewed(config)


# {setting of an older run: what it is called now}, where its value is the same. renewed() has the others.
RENAMED = {
    'residual_gate_inputs': 'gate_inputs',
    'residual_gate_bias': 'gate_bias',
    'residual_gate_rank': 'gate_rank',
}


def renewed(values):
    """The settings of a run in today's names: until November 2026, other fields said who shares and how
    something is mixed."""
    values = {RENAMED.get(name, name): value for name, value in values.items()}
    source = values.pop('residual_from', 'first')
    learned, gate = values.pop('residual_learned', False), values.pop('residual_gate', '')
    if learned or gate:
        values['residual_weights'] = 'learned' if learned else gate
    for part in 'qkv':
        share, residual = f'share_{part}', f'{part}_residual'
        every, owners = values.pop(f'{share}_every', 0), values.pop(f'{share}_from', ())
        if every or owners:
            values[share] = owners or (every if values.get(share) else False)
        if values.get(residual) and source != 'first':
            values[residual] = source
    return values
