"""log.jsonl, the log of a run: one JSON object a line. Nothing here needs torch."""

import json
import math
import os

from lib.files import as_json, check_types, named, write_whole

NUMBER = int | float | None  # None: it was not finite
PROVENANCE = {str: str | NUMBER}  # {fact: value}, see lib/rundir.py

# What the fields of a line are.
LINE = {
    'step': int,
    # of a training step
    **dict.fromkeys('loss lr grad_norm tokens tok_per_s mfu scale skipped seconds'.split(), NUMBER),
    # of an evaluation: {domain: loss}, and the learned weights that mix, {parameter: its values}
    'val': {str: NUMBER, 'mean': NUMBER},
    'mixing': dict,
    # where the run was resumed: {setting: [before, now]}, and what made its parts
    'changed': {str: [object, object]},
    'before': PROVENANCE,
    'provenance': PROVENANCE,
}


def parse_line(line):
    """A line of a log as its entry, {'step': 3, ...}. Raises ValueError, LookupError, TypeError or
    RecursionError where it is none."""
    entry = json.loads(line)
    check_types(entry, {name: LINE[name] for name in LINE if name == 'step' or name in entry})
    return entry


def read_log(path, step=math.inf, warn=lambda message: None):
    """The entries of a log that stay when its run goes on at a step; a damaged one does not."""
    entries = []
    if not path.exists():
        return entries
    for line in path.read_text(errors='replace').splitlines():
        try:
            entry = parse_line(line)
        except (ValueError, LookupError, TypeError, RecursionError):
            # It may be half a line, written when the run died.
            warn(f'warning: {path} had a damaged line, left out now: {line[:60]}')
            continue
        # Evaluations and what is said of a resume come before the step itself.
        if entry['step'] < step or (entry['step'] == step and 'loss' not in entry):
            entries.append(entry)
    return entries


class Log:
    """out_dir/log.jsonl, to write. entries: those that it begins with."""

    def __init__(self, path, entries=()):
        self.path = path
        write_whole(path, ''.join(json.dumps(entry) + '\n' for entry in entries))
        self.file = open(path, 'a', buffering=1)

    def write(self, entry):
        with named(self.path):
            self.file.write(json.dumps(as_json(entry)) + '\n')

    def flush(self):
        os.fsync(self.file)
