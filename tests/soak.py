"""
A comparison, killed and damaged at random, by hand: nothing that was saved may be lost, the end must be
the same as without, and exit statuses must be true.

$ python tests/soak.py --kills=200 --cuts=50 --disks=20 --seed=1    # 11 minutes

A failure prints what was found, and keeps the folder. Needs Linux, and root for the full disks.
"""

import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from conftest import ROOT, mount, unmount, write_dataset  # isort: skip; it says where all others are

from configurator import configure

from runs import FORKS, TINY, assert_same, finish, fork, history, newest

from comparison import launch
from comparison.runs import read_state
from lib.logs import read_log
from lib.machine import INTERRUPTED
from lib.rundir import checkpoints, read_checkpoint, step_of

# Checkpoints are written and the whole validation split is evaluated so often that many a kill comes
# in the middle of one of them.
SETTINGS = dict(
    TINY,
    dropout=0.1,
    max_iters=60,
    lr_decay_iters=60,
    gradient_accumulation_steps=2,
    save_interval=3,
    eval_interval=10,
    eval_iters=0,
    save_steps=(),
)
WHOLE = Path('out/compare/whole')
TRAINING = 'soak training'  # its name among the processes
RUNS = 2  # two arms, one seed


@dataclass
class Soak:
    kills: int = 6  # of a comparison
    cuts: int = 4  # log and checkpoint files that are cut off
    disks: int = 2  # comparisons on a disk that is too small
    seed: int = 0  # of what happens, and when; 0: another one each time


# --- processes that have nothing to import -------------------------------------------------------


def run_program(path, words):
    """A program as from the command line; compare.py forks its trainings."""
    sys.argv = [path, *words]
    launch.subprocess = SimpleNamespace(Popen=Training, STDOUT=None)
    runpy.run_path(str(ROOT / path), run_name='__main__')


def start(name):
    """Start or continue a comparison."""
    flags = [f'--{key}={value}' for key, value in SETTINGS.items()]
    flags += ['--arms=vanilla; resformer: v_residual=True', '--seeds=1', '--jobs=1']
    return fork(run_program, 'compare.py', [f'--name={name}', *flags])


class Training:
    """What compare.py asks of a subprocess.Popen."""

    def __init__(self, words, env, stdout, **options):
        multiprocessing.current_process().daemon = False  # it may have children
        args = (words[2:], env, stdout.fileno())
        self.process = multiprocessing.get_context('fork').Process(target=train, args=args)
        self.process.start()
        self.terminate, self.wait = self.process.terminate, self.process.join

    def poll(self):
        return self.process.exitcode

    returncode = property(poll)


def train(words, env, log):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    Path('/proc/self/comm').write_text(TRAINING)
    os.environ.update(env)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 999)  # among them the lock of the comparison
    run_program('train.py', words)


# --- what must hold after whatever happened ------------------------------------------------------


def lines(run, step):
    """The log of a run up to a step, without its speed and without how it was interrupted."""
    return history(read_log(Path(run, 'log.jsonl'), step))


def saved(folder):
    """{run: the step that it has reached on the disk}"""
    runs = {path.parent.name for path in folder.glob('*/ckpt_*.pt')}
    return {run: step_of(checkpoints(folder / run)[0]) for run in runs}


def check(folder, status, before=()):
    """Whatever a comparison's folder holds is whole and true. Returns saved().

    before: saved() of earlier; status: how the comparison ended.
    """
    now = saved(folder)
    for run, step in dict(before).items():
        assert now.get(run, -1) >= step, f'{run} was saved at step {step}, and is at {now.get(run)}'
    for run, step in now.items():
        for path in checkpoints(folder / run):
            read_checkpoint(path)
        said = (folder / run / 'train.log').read_text()
        for claim in re.findall(r'(?:interrupted|finished) at step (\d+)', said):
            assert step >= int(claim), f'{run} said that it was saved at step {claim}'
        ours, theirs = lines(folder / run, step), lines(WHOLE / run, step)
        unevaluated = [entry for entry in theirs if entry['step'] < step]
        assert ours in (theirs, unevaluated), f'the log of {run} is not what it was'
    if status == 0:
        assert len(finished(folder)) == RUNS, 'status 0, and not all runs have finished'
        for run in now:
            assert_same_weights(folder / run)
    return now


def finished(folder):
    return [run for run in saved(folder) if read_state(folder / run).kind == 'finished']


def assert_same_weights(run):
    ours, theirs = newest(run), newest(WHOLE / run.name)
    for part in ('model', 'optimizer', 'step'):
        assert_same(ours[part], theirs[part])


# --- kills ---------------------------------------------------------------------------------------


def trainings():
    """The process ids of the trainings in this folder."""
    pids = []
    for path in Path('/proc').glob('[0-9]*'):
        try:
            here = os.readlink(path / 'cwd') == os.getcwd()
            if here and (path / 'comm').read_text().strip() == TRAINING:
                pids.append(int(path.name))
        except OSError:  # it has ended
            continue
    return pids


def send(number, pids):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def strike(process):
    """Stop a comparison in one of four ways. Returns (the way, the exit statuses that are then true)."""
    running = trainings()
    way = random.choice(['all', 'compare alone', 'SIGTERM', 'a training'])
    if way == 'SIGTERM' or (way == 'a training' and not running):
        send(signal.SIGTERM, [process.pid])
        return 'SIGTERM', (INTERRUPTED, -signal.SIGTERM)
    if way == 'a training':
        send(signal.SIGKILL, running)
        return way, (1,)
    send(signal.SIGKILL, [process.pid])
    return way, (-signal.SIGKILL,)  # soak_kills() ends the trainings


def moment(folder, began):
    """What the training that wrote last was doing."""
    if any(modified(path) > began for path in folder.glob('*/ckpt_*.tmp')):
        return 'saving'
    logs = [path for path in folder.glob('*/log.jsonl') if modified(path) > began]
    if not logs:
        return 'starting'
    run = max(logs, key=modified).parent
    *_, last = [{}, *lines(run, SETTINGS['max_iters'])]
    due = 'loss' not in last or (last['step'] + 1) % SETTINGS['eval_interval'] == 0
    return 'evaluating' if due and 'val' not in last else 'training'


def modified(path):
    return path.stat().st_mtime if path.exists() else 0


def soak_kills(kills, longest):
    """Kill a comparison within `longest` seconds after each of its starts; it is begun anew whenever
    it has finished."""
    folder = Path('out/compare/killed')
    statuses, moments = Counter(), Counter()
    before, orphans = {}, set()
    while sum(moments.values()) < kills:
        began = time.time()
        process = start('killed')
        while not (process.folder / 'err').exists():
            time.sleep(0.01)  # it is being forked
        time.sleep(random.uniform(0, longest))
        way, allowed = strike(process)
        when = moment(folder, began)
        status, _, err = finish(process)
        statuses[status] += 1
        if status:
            moments[when] += 1
        # 0: it had just ended, or the training that was killed had.
        assert status in (0, *allowed), f'{way}: status {status}: {err}'
        while way == 'all' and trainings():
            send(signal.SIGKILL, trainings())
        while status == 0 and trainings():  # one that is just leaving
            time.sleep(0.01)
        left = set(trainings()) - orphans
        assert way == 'compare alone' or not left, f'{way}: a training goes on'
        orphans = set(trainings())
        if not orphans:
            before = check(folder, status, before)
            if status == 1:
                assert len(finished(folder)) < RUNS, 'status 1, and all runs have finished'
        if status == 0:
            shutil.rmtree(folder)
            before = {}
    complete_and_check('killed', before)
    print(f'{kills} kills: statuses {dict(statuses)}, in the middle of {dict(moments)}', flush=True)


def complete(name):
    """Continue a comparison to its end."""
    status, _, err = finish(start(name))
    assert status == 0, err


def complete_and_check(name, before):
    complete(name)
    check(Path('out/compare', name), 0, before)


# --- damage and full disks -----------------------------------------------------------------------


def soak_cuts(cuts):
    """Cut a file of a finished comparison, and resume its run, which then is as before, but for lines
    that the cut has taken."""
    folder = Path('out/compare/cut')
    for _ in range(cuts):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(WHOLE, folder)
        kind = random.choice(['log.jsonl', 'ckpt_*.pt'])
        path = random.choice(sorted(folder.glob(f'*/{kind}')))
        content = path.read_bytes()
        size = random.randrange(len(content))
        os.truncate(path, size)
        words = ['--init_from=resume', f'--out_dir={path.parent}']
        status, _, err = finish(fork(run_program, 'train.py', words))
        assert status == 0, err

        run, end = path.parent, SETTINGS['max_iters']
        ours, theirs = lines(run, end), lines(WHOLE / run.name, end)
        cut = content[size:].count(b'\n') if path.suffix == '.jsonl' else 0
        assert ours[-1] == theirs[-1] and all(entry in theirs for entry in ours), path
        assert len(theirs) - len(ours) <= max(0, cut - 1), path  # the evaluation is made again
        assert_same_weights(run)
        complete('cut')
    print(f'{cuts} cuts: every run ended as before', flush=True)


REMOUNT = 32  # MS_REMOUNT


def soak_disks(disks):
    """A comparison on a disk that is too small; then it has room, and goes on."""
    folder = Path('out/compare/full')
    folder.mkdir()
    needed = sum(path.stat().st_size for path in WHOLE.rglob('*')) // 1024
    for _ in range(disks):
        kilobytes = random.randint(50, needed - 1)
        if not mount(folder, kilobytes):
            print('no full disks: a small file system cannot be mounted here; run as root')
            return
        try:
            status, _, err = finish(start('full'))
            assert status == 1 and 'Traceback' not in err, f'{kilobytes} kB: {status}: {err}'
            before = check(folder, status)
            mount(folder, 2**16, REMOUNT)
            complete_and_check('full', before)
        finally:
            unmount(folder)
    print(f'{disks} full disks: status 1, and then the same logs and weights', flush=True)


def main():
    (settings,) = configure(Soak)
    seed = settings.seed or int(time.time())
    random.seed(seed)
    folder = tempfile.mkdtemp(prefix='soak')
    os.chdir(folder)
    FORKS.set_forkserver_preload(['torch._dynamo', 'compare', 'scipy.stats', 'matplotlib.pyplot'])
    print(f'seed {seed}, {settings}, in {folder}', flush=True)
    splits = {'train': {'A': 5000, 'B': 3000}, 'validation': {'A': 3000, 'B': 2000}}
    write_dataset(Path('data/tiny'), splits)
    began = time.time()
    complete('whole')
    seconds = time.time() - began
    print(f'a comparison takes {seconds:.0f} s', flush=True)
    soak_kills(settings.kills, seconds / 3)
    soak_cuts(settings.cuts)
    soak_disks(settings.disks)
    os.chdir('/')
    shutil.rmtree(folder)
    print(f'all of it in {(time.time() - began) / 60:.0f} minutes')


if __name__ == '__main__':
    main()
