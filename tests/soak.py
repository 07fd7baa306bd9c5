"""
Preparation and training killed at random moments, by hand: the end must be the same as without.

$ python tests/soak.py --kills=20 --seed=1     # some minutes; a failure prints the seed and keeps the folder
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from conftest import ROOT
from runs import assert_same_run, command_line, snapshot, training_steps

from configurator import configure
from machine import INTERRUPTED

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)


@dataclass
class Soak:
    kills: int = 20  # of each program
    seed: int = 0  # of the moments; 0: another one each time


def run(command):
    """Run a command to its end. Returns how many seconds it took."""
    began = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.time() - began


def survive(command, kills, longest, out):
    """Run a command until it ends by itself, having been killed `kills` times, each time within
    `longest` seconds after its start. Returns {exit status: how often}."""
    statuses = {}
    killed = 0
    while True:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        if killed < kills:
            time.sleep(random.uniform(0.2, longest))
            if process.poll() is None:
                os.kill(process.pid, random.choice(SIGNALS))
                killed += 1
        _, err = process.communicate()
        status = process.returncode
        statuses[status] = statuses.get(status, 0) + 1
        if status == 0 and killed >= kills:
            return statuses
        if status == 0:
            shutil.rmtree(out)  # too quick for the number of kills: from the start again
        elif status > 0 and status != INTERRUPTED:
            raise SystemExit(f'exit status {status}: {err.decode()}')


def soak_preparation(kills):
    options = ['--source=stdlib', '--tokenizer=bytes', '--tokens=0']
    command = [sys.executable, ROOT / 'prepare_slimpajama.py', *options]
    seconds = run([*command, '--out=data/whole'])
    statuses = survive([*command, '--out=data/killed'], kills, seconds + 0.5, 'data/killed')

    whole, killed = snapshot('data/whole'), snapshot('data/killed')
    assert set(whole) == set(killed)
    for path in whole:
        assert whole[path] == killed[path], path
    print(f'preparation: exit statuses {statuses}: the same {len(whole)} files', flush=True)


def soak_training(kills):
    settings = dict(
        dataset='whole',
        vocab_size=320,
        max_iters=1500,
        lr_decay_iters=1500,
        eval_interval=50,
        dropout=0.1,
        init_from='auto',
    )
    program = [sys.executable, ROOT / 'train.py']
    seconds = run([*program, *command_line('out/whole', settings)])
    command = [*program, *command_line('out/killed', settings)]
    statuses = survive(command, kills, max(4, seconds / 3), 'out/killed')
    assert_same_run('out/whole', 'out/killed')
    steps = len(training_steps('out/killed'))
    print(f'training: exit statuses {statuses}: the same log of {steps} steps and weights')


def main():
    (settings,) = configure(Soak)
    seed = settings.seed or int(time.time())
    random.seed(seed)
    folder = tempfile.mkdtemp(prefix='soak')
    os.chdir(folder)
    print(f'seed {seed}, {settings.kills} kills, in {folder}', flush=True)
    soak_preparation(settings.kills)
    soak_training(settings.kills)
    shutil.rmtree(folder)


if __name__ == '__main__':
    main()
