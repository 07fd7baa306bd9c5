"""
Packs runs for keeping: the log.jsonl and config.json of each, the failed.txt of one that diverged, and
the plan.json beside them.

$ python -m comparison.pack out/compare/NAME/*_seed* --to=results/TOPIC

comparison/runs.py reads runs from results/TOPIC/runs_<k>.tar.xz as from their folders. A pack has at
most 1 MiB and is never rewritten: later runs go into further ones. The same runs give the same bytes.
A name stands for one run: another run of a packed name is refused.
"""

import io
import itertools
import tarfile
from dataclasses import dataclass
from pathlib import Path

from comparison.logs import PACKS, pack_number, read_pack, text_in, text_of_run
from comparison.record import check_same_plan, read_plan
from comparison.runs import read_state
from configurator import configure
from lib.files import locked, one_line_errors, write_whole
from lib.rundir import failure_file

LIMIT = 2**20  # bytes of a pack


@dataclass
class PackConfig:
    runs: tuple = ()  # their folders, which stay as they are
    to: str = ''  # where the packs go


FAILURE = failure_file(Path()).name


def check_command(runs, to):
    """Refuse what is not the runs of one folder and one plan, finished or diverged, and packs without a place."""
    if not runs or not to:
        raise ValueError('name the folders of finished runs, and where the packs go: --to=FOLDER')
    for run in runs:
        state = read_state(run)
        if state.kind != 'finished' and not state.has_diverged:
            raise ValueError(f'{run} is not a finished run')
        if run.parent != runs[0].parent:
            raise ValueError(
                f'{runs[0]} and {run} are in two folders; pack the runs of each into a folder of its own'
            )
    # A plan says which runs have only chosen learning rates; it may have had other seeds before.
    here = runs[0].parent
    plans = [text_in(folder, 'plan.json') for folder in (to, here)]
    if None not in plans and plans[0] != plans[1]:
        kept, ours = (read_plan(Path(folder, 'plan.json'))['plan'] for folder in (to, here))
        check_same_plan(kept, ours, Path(to, 'plan.json'), ['seeds'], '--to')


def add(runs, to):
    """Write runs into new packs of a folder."""
    packs = {path: read_pack(path) for path in to.glob(PACKS)}
    for run, (path, files) in itertools.product(runs, packs.items()):
        for name in ('config.json', 'log.jsonl', FAILURE):
            if files.get(f'{run.name}/{name}') not in (None, text_of_run(run, name)):
                raise ValueError(f'{path} holds another run of the name {run.name}; rename {run}')
    last = max(map(pack_number, packs), default=0)
    for number, contents in enumerate(compress(runs), last + 1):
        write_whole(to / f'runs_{number}.tar.xz', contents)


def compress(runs):
    """[the bytes of a pack]: as many as it takes to keep each within the limit."""
    folder = runs[0].parent
    paths = list(folder.glob('plan.json'))
    for run in runs:
        paths += [run / 'config.json', run / 'log.jsonl', *run.glob(FAILURE)]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w:xz', preset=9) as pack:
        for path in paths:
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
        runs = sorted({Path(run) for run in settings.runs})
        check_command(runs, settings.to)
        to = Path(settings.to)
        to.mkdir(parents=True, exist_ok=True)
        with locked(to, 'packing into', setting='--to'):
            add(runs, to)


if __name__ == '__main__':
    main()
