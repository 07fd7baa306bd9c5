"""comparison/launch.py: trainings side by side, as processes that start, end, fail and are interrupted."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import comparisons
import forked
import pytest
import runs
import torch
from comparisons import make_place
from conftest import raises_one_line

import compare
from comparison import launch
from lib.files import locked

place = comparisons.place

# --- where they run -------------------------------------------------------------------------------


def test_on_a_cpu_each_core_that_this_process_may_use_trains_with_one_thread(monkeypatch):
    """A Mac's GPU takes one run at a time."""
    assert launch.find_slots('cpu', 3) == [{'OMP_NUM_THREADS': '1'}] * 3
    monkeypatch.setattr(launch.os, 'sched_getaffinity', lambda process: {3, 5, 7})
    assert len(launch.find_slots('cpu')) == 3
    monkeypatch.delattr(launch.os, 'sched_getaffinity')
    monkeypatch.setattr(launch.os, 'cpu_count', lambda: 4)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    assert [len(launch.find_slots(device)) for device in ('cpu', 'mps', 'auto')] == [4, 1, 1]
    with raises_one_line('sees no GPU'):
        launch.find_slots('cpu', gpus=2)


def test_a_slot_has_one_training_and_no_gpu_is_shared_while_another_idles(tmp_path, monkeypatch):
    begun, naps, ends = [], [], {'0': 1, '1': 1, '2': 9}
    # A cluster's variables are those of another job.
    of_clusters = {'RANK', 'LOCAL_WORLD_SIZE', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID', 'PET_NNODES'}
    for name in (*of_clusters, 'OTHER_RANK'):
        monkeypatch.setenv(name, '1')

    def start(words, env, **options):
        assert 'OTHER_RANK' in env and not of_clusters & env.keys()
        gpu, end = env['CUDA_VISIBLE_DEVICES'], ends.get(words[-1], 9)
        begun.append((len(naps), words[-1], gpu))
        return SimpleNamespace(poll=lambda: 0 if len(naps) >= end else None, returncode=0)

    monkeypatch.setattr(launch.subprocess, 'Popen', start)
    monkeypatch.setattr(launch.time, 'sleep', naps.append)
    jobs = [launch.Job([name], tmp_path / name) for name in '01234']
    slots = [{'CUDA_VISIBLE_DEVICES': gpu} for gpu in '454']
    launch.launch(lambda: jobs, slots, 1, lambda running: None)
    assert begun[:3] == [(0, '0', '4'), (0, '1', '5'), (0, '2', '4')]
    assert begun[3:] == [(1, '3', '5'), (1, '4', '4')]


@pytest.mark.parametrize('is_finished', [False, True])
def test_when_another_process_has_left_a_folder_what_is_left_is_trained(
    tmp_path, monkeypatch, capsys, is_finished
):
    """As after a compare.py that was killed, and whose trainings went on, to their end or not."""
    started, looks, holding = [], [], contextlib.ExitStack()
    job = launch.Job([], tmp_path, SimpleNamespace(poll=lambda: 0, returncode=0))
    # Its end leaves no slot free until the second look.
    poll = lambda: 0 if len(looks) > 1 else None  # noqa: E731
    other = launch.Job([], tmp_path / 'other', SimpleNamespace(poll=poll, returncode=0))
    monkeypatch.setattr(launch, 'start', lambda *words: started.append(len(looks)))

    def wait(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            holding.close()

    monkeypatch.setattr(launch.time, 'sleep', wait)
    with holding:
        holding.enter_context(locked(tmp_path, 'training in'))
        jobs = lambda: [other] if is_finished and len(looks) == 3 else [job, other]  # noqa: E731
        launch.launch(jobs, [{}], 1, lambda running: None)
    assert started == [0] + [3] * (not is_finished) and not launch.failure_file(tmp_path).exists()
    assert (
        capsys.readouterr().err.count(f'waiting for another process that trains in {tmp_path}') == 1
    )


def test_the_gpus_that_the_environment_lists_are_dealt_out(monkeypatch):
    name = 'CUDA_VISIBLE_DEVICES'

    def gpus(*words, **options):
        return [slot[name] for slot in launch.find_slots(*words, **options)]

    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 4)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.delenv(name, raising=False)
    assert gpus('auto') == ['0', '1', '2', '3']
    monkeypatch.setenv(name, '4,5,6,7')
    assert gpus('auto') == ['4', '5', '6', '7']
    assert gpus('cuda', gpus=2) == ['4,5', '6,7']
    assert len(launch.find_slots('auto', jobs=2)) == 2
    # More trainings than GPUs share them.
    assert gpus('auto', jobs=6) == list('456745')


# --- how they end ---------------------------------------------------------------------------------


def test_ctrl_c_stops_a_training_that_has_only_just_started(tmp_path, monkeypatch):
    """And one that cannot save itself has failed."""
    process = Mock(returncode=1)

    def start(job, gpus):
        job.process = process
        job.folder.mkdir()
        (job.folder / 'train.log').write_text('error: cannot write ckpt_4.pt\n')
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, 'start', start)
    jobs = [launch.Job([], tmp_path / name) for name in ('mine', 'never')]
    with pytest.raises(KeyboardInterrupt):
        launch.launch(lambda: jobs, [{}, {}], 1, lambda running: None)
    assert process.method_calls == [call.terminate(), call.wait()] and jobs[1].process is None
    assert 'cannot write ckpt_4.pt' in launch.failure_file(tmp_path / 'mine').read_text()


@pytest.mark.parametrize(
    'text, status, free, reason',
    [
        ('step 1\nerror: no memory\nerror: no memory\n=====\n', 1, 2**30, 'no memory'),
        ('  File "a.py"\ntorch.SomeError: bad\nstep 9\n', 1, 2**30, 'torch.SomeError: bad'),
        ('x.ChildFailedError: \n', 1, 2**30, 'exit status 1 without a message'),
        ('[rank0]: aError: b\nx.ChildFailedError: \n', 1, 2**30, 'aError: b'),
        (
            '[rank0]: aError: b\nx.ChildFailedError: \n  traceback : Signal 9 (SIGKILL) received by PID 8\n',
            1,
            2**30,
            'Signal 9 (SIGKILL)',
        ),
        ('step 15\n', 1, 100, 'exit status 1 without a message; its disk has 100 bytes left'),
        (
            'a.SignalException: Process 9 got signal: 15\n',
            1,
            2**30,
            None,
        ),  # torchrun was interrupted
        ('error: earlier\n', -9, 2**30, 'killed by SIGKILL, perhaps for lack of memory'),
    ],
)
def test_the_reason_of_a_failure_is_no_line_of_its_log(
    tmp_path, monkeypatch, text, status, free, reason
):
    """Of this attempt, its error; a full disk is named."""
    monkeypatch.setattr(launch.shutil, 'disk_usage', lambda folder: SimpleNamespace(free=free))
    before = 'error: of an earlier attempt\n'
    (tmp_path / 'train.log').write_text(before + text)
    process = SimpleNamespace(returncode=status)
    launch.record(launch.Job([], tmp_path, process, log_start=len(before)))
    path = launch.failure_file(tmp_path)
    assert path.read_text() == f'{reason}\n' if reason else not path.exists()


def test_a_disk_too_full_for_the_reason_of_a_failure_ends_no_other_training(
    tmp_path, monkeypatch, capsys
):
    full = OSError(28, 'No space left on device')
    (tmp_path / 'train.log').write_text('')
    monkeypatch.setattr(launch, 'write_whole', Mock(side_effect=full))
    launch.record(launch.Job([], tmp_path, SimpleNamespace(returncode=1)))
    assert f'{tmp_path.name}: exit status 1' in capsys.readouterr().err


def without_times(folder):
    """A report's text without its costs, dates, and which code the tests are part of."""
    text = (folder / 'report.md').read_text()
    text = re.sub(r'## Cost.*?##', '##', text, flags=re.S)
    return re.sub(
        r'plan: \w+, written \d{4}-\d\d-\d\d \d\d:\d\d:\d\d|- code: .*\n|- training and .*\n',
        '',
        text,
    )


def test_killed_and_started_again_the_report_is_the_same(place, tmp_path_factory, monkeypatch):
    """With its training, as if the machine had crashed, and interrupted; one arm fails, and the other
    stands."""
    words = ['small.py', '--seeds=1', '--max_iters=60', '--arms=vanilla; broken: vocab_size=63']
    assert runs.call(compare.main, *words)[0] == 1
    whole = without_times(Path('out/compare/small'))

    other = tmp_path_factory.mktemp('killed')
    monkeypatch.chdir(other)
    make_place(other)
    folder = Path('out/compare/small')
    step = 0
    for number, kill, ends in (
        (signal.SIGKILL, os.killpg, -9),
        (signal.SIGTERM, os.kill, 75),
        (None, None, 1),
    ):
        process = runs.fork(forked.run_program, 'compare.py', [*words, '--jobs=1'])
        last = step + 5  # it begins again
        while number and step <= last and process.is_alive():
            time.sleep(0.02)
            step = launch.last_step(folder / 'vanilla_lr0.02_seed1')
        if number:
            kill(process.pid, number)
        status, _, err = runs.finish(process)
        assert status == ends, err
        assert ('the same command goes on' in err) == (number == signal.SIGTERM)
    assert without_times(folder) == whole
    assert 'broken_lr0.02_seed1: failed: ' in whole and 'vocab_size=63' in whole
