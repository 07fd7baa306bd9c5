"""
Packs runs for keeping: the log.jsonl and config.json of each, and the plan.json beside them.

$ python -m comparison.pack out/compare/NAME/*_seed* --to=results/TOPIC

comparison/runs.py reads runs from results/TOPIC/runs_<k>.tar.xz as from their folders. A pack has at
most 1 MiB and is never rewritten: later runs go into further ones. The same runs give the same bytes.
"""

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from comparison.runs import read_state
from configurator import configure, one_line_errors
from lib.files import write_whole

LIMIT = 2**20  # bytes of a pack


@dataclass
class PackConfig:
    runs: tuple = ()  # their folders, which stay as they are
    to: str = ''  # where the packs go


def compress(runs):
    """[the bytes of a pack]: as many as it takes to keep each within the limit."""
    folder = runs[0].parent
    paths = [run / name for run in runs for name in ('config.json', 'log.jsonl')]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w:xz', preset=9) as pack:
        for path in [*folder.glob('plan.json'), *paths]:
            contents = path.read_bytes()
            member = tarfile.TarInfo(str(path.relative_to(folder)))  # without a time or an owner
            member.size = len(contents)
            pack.addfile(member, io.BytesIO(contents))
    if buffer.tell() <= LIMIT or len(runs) == 1:
        return [buffer.getvalue()]
    half = len(runs) // 2
    return compress(runs[:half]) + compress(runs[half:])


def main():
    with one_line_errors():
        (settings,) = configure(PackConfig, doc=__doc__, plain='runs')
        runs = sorted(map(Path, settings.runs))
        if not runs:
            raise ValueError('name the folders of finished runs')
        for run in runs:
            if read_state(run).kind not in ('finished', 'diverged'):
                raise ValueError(f'{run} is not a finished run')
        older = list(Path(settings.to).glob('runs_*.tar.xz'))
        for number, contents in enumerate(compress(runs), len(older) + 1):
            write_whole(Path(settings.to, f'runs_{number}.tar.xz'), contents)


if __name__ == '__main__':
    main()
