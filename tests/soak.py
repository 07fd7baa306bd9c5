"""
Preparation, training and comparison, killed and damaged at random, by hand: nothing that was saved may
be lost, the end must be the same as without, and exit statuses must be true.

$ python tests/soak.py --kills=200 --cuts=50 --disks=20 --seed=1    # hours; the defaults take minutes

A failure prints the seed and keeps the folder. Needs Linux, and root for the full disks.
"""

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT
from runs import TINY, history, newest, same, snapshot

from configurator import configure
from lib.machine import INTERRUPTED
from lib.rundir import steps_of

PREPARE = [ROOT / 'prepare_slimpajama.py', '--source=stdlib', '--tokenizer=bytes', '--tokens=0']
# Checkpoints are written and the whole validation split is evaluated so often that many a kill comes
# in the middle of one of them.
SETTINGS = dict(
    TINY,
    dataset='whole',
    vocab_size=320,
    dropout=0.1,
    max_iters=120,
    lr_decay_iters=120,
    save_interval=15,
    eval_interval=40,
    eval_iters=100,
    save_steps=(),
)


@dataclass
class Soak:
    kills: int = 6  # of preparation, and again of a comparison
    cuts: int = 4  # log and checkpoint files that are cut off
    disks: int = 2  # comparisons on a disk that is too small
    seed: int = 0  # of what happens, and when; 0: another one each time


def compare(name):
    """The command of a comparison of two arms with two seeds."""
    arms = '--arms=vanilla; resformer: v_residual=True'
    flags = [f'--{key}={value}' for key, value in SETTINGS.items()]
    return [ROOT / 'compare.py', arms, '--seeds=2', f'--name={name}', '--timing=False', *flags]


def start(command):
    words = [sys.executable, *map(str, command)]
    return subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def run(command, expected=0):
    """Run a command to its end. Returns how many seconds it took."""
    began = time.time()
    process = start(command)
    _, err = process.communicate()
    if process.returncode != expected:
        raise SystemExit(f'exit status {process.returncode}, not {expected}: {err.decode()}')
    return time.time() - began


# --- kills ---------------------------------------------------------------------------------------


def others():
    """The processes that work in this folder, besides this one: {pid: its command line}."""
    result = {}
    for path in Path('/proc').glob('[0-9]*'):
        try:
            if os.readlink(path / 'cwd') == os.getcwd() and int(path.name) != os.getpid():
                result[int(path.name)] = (path / 'cmdline').read_text()
        except OSError:  # it has ended
            continue
    return result


def send(number, pids):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def strike(process):
    """Stop a program in one of three ways. Returns the exit statuses that are then true."""
    way = random.choice(['the machine', 'the program', 'a training'])
    trainings = [pid for pid, words in others().items() if 'train.py' in words]
    if way == 'the machine':
        send(signal.SIGKILL, others())
        return (-signal.SIGKILL,)
    if way == 'the program' or not trainings:
        send(signal.SIGTERM, [process.pid])
        return INTERRUPTED, -signal.SIGTERM
    send(signal.SIGKILL, [random.choice(trainings)])
    return (1,)


def saved(out):
    """The step that each run in a folder has reached on the disk."""
    runs = {path.parent for path in Path(out).glob('*/ckpt_*.pt')}
    return {run: max(steps_of(run).values()) for run in runs}


def survive(command, kills, longest, out):
    """Run a command until it ends by itself, having been struck `kills` times, each time within
    `longest` seconds after its start. Returns {exit status: how often}."""
    statuses = Counter()
    struck = 0
    before = {}
    while True:
        process = start(command)
        allowed = (0,)
        if struck < kills:
            time.sleep(random.uniform(0.2, longest))
            if process.poll() is None:
                allowed = (0, *strike(process))  # 0: it had just ended
                struck += 1
        _, err = process.communicate()
        send(signal.SIGKILL, others())
        while others():
            time.sleep(0.1)
        status = process.returncode
        statuses[status] += 1
        if status not in allowed:
            raise SystemExit(f'exit status {status}, not one of {allowed}: {err.decode()}')
        after = saved(out)
        for path, step in before.items():
            assert after[path] >= step, f'{path} was saved at step {step}, and is at {after[path]}'
        before = after
        if status == 0 and struck >= kills:
            return dict(statuses)
        if status == 0:
            shutil.rmtree(out)  # too quick for the number of kills: from the start again
            before = {}


def soak_preparation(kills):
    seconds = run([*PREPARE, '--out=data/whole'])
    statuses = survive([*PREPARE, '--out=data/killed'], kills, seconds, 'data/killed')
    whole, killed = snapshot('data/whole'), snapshot('data/killed')
    assert whole == killed
    print(f'preparation: exit statuses {statuses}: the same {len(whole)} files', flush=True)


def assert_same(run, whole):
    """The same log and weights; a log that was cut may lack lines."""
    ours, theirs = history(run), history(whole)
    assert all(entry in theirs for entry in ours), run
    assert ours[-1] == theirs[-1], run
    for part in ('model', 'optimizer', 'step'):
        assert same(newest(run)[part], newest(whole)[part]), run
    return len(theirs) - len(ours)


def soak_comparison(kills):
    seconds = run(compare('whole'))
    statuses = survive(compare('killed'), kills, seconds / 2, 'out/compare/killed')
    for run_folder in saved('out/compare/whole'):
        assert not assert_same(Path('out/compare/killed', run_folder.name), run_folder)
    print(f'comparison: exit statuses {statuses}: the same logs and weights', flush=True)


# --- damage and full disks -----------------------------------------------------------------------


def soak_cuts(cuts):
    """Cut a file of a finished comparison, continue its run, and compare again."""
    for _ in range(cuts):
        shutil.rmtree('out/compare/cut', ignore_errors=True)
        shutil.copytree('out/compare/whole', 'out/compare/cut')
        kind = random.choice(['log.jsonl', 'ckpt_*.pt'])
        path = random.choice(sorted(Path('out/compare/cut').glob(f'*/{kind}')))
        size = random.randrange(path.stat().st_size)
        os.truncate(path, size)
        run([ROOT / 'train.py', '--init_from=resume', f'--out_dir={path.parent}'])
        lost = assert_same(path.parent, Path('out/compare/whole', path.parent.name))
        run(compare('cut'))
        print(f'{path.parent.name}/{path.name} cut to {size} bytes: {lost} lines lost', flush=True)


def mount(folder, megabytes, flags=0):
    data = f'size={megabytes}m'.encode()
    if ctypes.CDLL(None).mount(b'tmpfs', bytes(folder.absolute()), b'tmpfs', flags, data):
        raise SystemExit('cannot mount a small file system here: run as root')


REMOUNT = 32  # MS_REMOUNT


def soak_disks(disks):
    folder = Path('out/compare/full')
    folder.mkdir()
    for _ in range(disks):
        megabytes = random.randint(1, 6)
        mount(folder, megabytes)
        run(compare('full'), expected=1)
        before = saved(folder)
        mount(folder, 64, REMOUNT)
        run(compare('full'))
        for path, step in before.items():
            assert saved(folder)[path] >= step
        for whole in saved('out/compare/whole'):
            assert not assert_same(folder / whole.name, whole)
        ctypes.CDLL(None).umount2(bytes(folder.absolute()), 0)
        print(f'a disk of {megabytes} MB: status 1, and then the same logs and weights', flush=True)


def main():
    (settings,) = configure(Soak)
    seed = settings.seed or int(time.time())
    random.seed(seed)
    folder = tempfile.mkdtemp(prefix='soak')
    os.chdir(folder)
    print(f'seed {seed}, {settings}, in {folder}', flush=True)
    soak_preparation(settings.kills)
    soak_comparison(settings.kills)
    soak_cuts(settings.cuts)
    soak_disks(settings.disks)
    shutil.rmtree(folder)


if __name__ == '__main__':
    main()
