"""log.jsonl, the log of a run: one JSON object a line. Nothing here needs torch."""

import json
import math
import os

from lib.files import as_json, named, write_whole


def read_log(path, step=math.inf, warn=lambda message: None):
    """The entries of a log that stay when its run goes on at a step; a damaged one does not."""
    entries = []
    if not path.exists():
        return entries
    for line in path.read_text(errors='replace').splitlines():
        try:
            entry = json.loads(line)
            # Evaluations and what is said of a resume come before the step itself.
            stays = entry['step'] < step or (entry['step'] == step and 'loss' not in entry)
        except (ValueError, LookupError, TypeError, RecursionError):
            # It may be half a line, written when the run died.
            warn(f'warning: {path} had a damaged line, left out now: {line[:60]!r}')
            continue
        if stays:
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
