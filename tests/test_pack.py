"""Runs that are packed for keeping: comparison/pack.py writes them, comparison/runs.py reads them."""

import os
import random
import shutil
import tarfile

import runs
from conftest import assert_one_line, contents, raises_one_line

import train
from comparison import pack
from comparison.logs import named_runs, read_pack
from comparison.runs import read_state
from lib.files import locked

NAMES = ('a_seed1', 'a_seed2', 'b_seed1')


def write_runs(folder):
    """Three finished runs, and their plan."""
    for i, name in enumerate(NAMES):
        losses = [random.random() for _ in range(100)]
        runs.write_run(folder / name, losses, seed=i)
    (folder / 'plan.json').write_text('{}')
    return [folder / name for name in NAMES]


def packed(*folders, to):
    runs.succeed(pack.main, *folders, f'--to={to}')


def test_packed_runs_are_read_as_from_their_folders(tmp_path, monkeypatch):
    folders = write_runs(tmp_path / 'kept')
    before = [read_state(folder) for folder in folders]
    monkeypatch.setattr(pack, 'LIMIT', 3000)  # so that one pack does not hold them all
    for to, given in (('kept', folders), ('again', reversed(folders))):
        packed(*given, to=tmp_path / to)
        os.utime(folders[0] / 'log.jsonl', (0, 0))
    packs = sorted(tmp_path.glob('kept/runs_*'))
    assert len(packs) == 2
    assert all(read_pack(path)['plan.json'] == '{}' for path in packs)
    assert [path.read_bytes() for path in packs] == [
        path.read_bytes() for path in sorted(tmp_path.glob('again/*'))
    ]

    # Later runs go into another pack.
    packed(folders[0], to=tmp_path / 'kept')
    assert (tmp_path / 'kept/runs_3.tar.xz').exists()

    for folder in folders:
        shutil.rmtree(folder)
    assert named_runs([str(folders[0]), *map(str, packs)]) == tuple(map(str, folders[:1] + folders))
    for state, folder in zip(before, folders, strict=True):
        again = read_state(folder)
        assert again.kind == 'finished'
        assert vars(again) == vars(state)


def assert_refused(*words, to, expected):
    before = contents(to)
    assert_one_line(runs.call(pack.main, *words, f'--to={to}')[0], *expected)
    assert contents(to) == before


def test_no_pack_replaces_another_and_a_name_stands_for_one_run(tmp_path):
    first, second, third = write_runs(tmp_path / 'ours')
    to = tmp_path / 'kept'
    for folder in (first, second):
        packed(folder, to=to)
    assert_one_line(runs.call(pack.main, first)[0], '--to')
    (to / 'runs_1.tar.xz').unlink()
    with locked(to, 'packing into'):
        assert_refused(third, to=to, expected=[to, '--to'])
    packed(third, to=to)
    assert sorted(contents(to)) == ['runs_2.tar.xz', 'runs_3.tar.xz']

    theirs = write_runs(tmp_path / 'theirs')
    assert_refused(theirs[2], to=to, expected=['runs_3.tar.xz', theirs[2]])
    assert_refused(first, theirs[0], to=to, expected=[first, theirs[0]])


def test_a_run_that_diverged_is_packed_with_the_reason(tmp_path):
    folder, *_ = write_runs(tmp_path)
    lines = (folder / 'log.jsonl').read_text().splitlines(keepends=True)
    (folder / 'log.jsonl').write_text(''.join(lines[:-1]))
    (folder / 'failed.txt').write_text(f'20 steps in a row {train.NOT_FINITE}\n')
    before = read_state(folder)
    assert before.has_diverged
    packed(folder, to=tmp_path)
    shutil.rmtree(folder)
    assert vars(read_state(folder)) == vars(before)


def test_what_is_no_file_in_a_pack_made_by_hand_is_passed_over(tmp_path):
    folder, *_ = write_runs(tmp_path)
    (folder / 'notes').mkdir()
    (folder / 'latest').symlink_to('nowhere')
    os.mkfifo(folder / 'pipe')
    before = read_state(folder)
    with tarfile.open(tmp_path / 'runs_1.tar.xz', 'w:xz') as pack:
        pack.add(folder, f'./{folder.name}')  # as tar c ./* packs
    with raises_one_line('runs_1.tar.xz; rename'):
        named_runs([tmp_path / 'mine.tar.xz'])
    shutil.rmtree(folder)
    assert vars(read_state(folder)) == vars(before)


def test_an_unfinished_run_and_a_damaged_pack_are_named(tmp_path):
    folder, *_ = write_runs(tmp_path)
    packed(folder, to=tmp_path)
    (folder / 'log.jsonl').write_text('{"step": 0, "loss": 3.0}\n')
    assert_one_line(runs.call(pack.main, folder, f'--to={tmp_path}')[0], folder.name)
    shutil.rmtree(folder)
    path = tmp_path / 'runs_1.tar.xz'
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole[:999] + b'\0' + whole[1000:]):
        path.write_bytes(damaged)
        read_pack.cache_clear()
        with raises_one_line(path.name):
            read_state(folder)
