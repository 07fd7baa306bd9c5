"""
Preparation and training killed at random moments, by hand: the end must be the same as without.

$ python tests/soak.py --kills=20 --seed=1          # some minutes; a failure prints the seed and keeps the folder
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runs import assert_same_run, command_line, log

ROOT = Path(__file__).parent.parent


def survive(command, kills, chance, finished):
    """Run a command until it ends by itself, `kills` times killed within `chance` seconds after a start."""
    killed, statuses = 0, {}
    while True:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if killed < kills:
            time.sleep(chance())
            number = random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            if process.poll() is None:
                os.kill(process.pid, number)
                killed += 1
        _, err = process.communicate()
        statuses[process.returncode] = statuses.get(process.returncode, 0) + 1
        if process.returncode == 0:
            if killed >= kills:
                return statuses
            shutil.rmtree(finished)  # too quick for the number of kills: from the start again
        elif process.returncode > 0 and process.returncode != 75:
            raise SystemExit(f'exit status {process.returncode}: {err}')


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument('--kills', type=int, default=20)
    parser.add_argument('--seed', type=int, default=int(time.time()))
    options = parser.parse_args()
    print('seed', options.seed, flush=True)
    random.seed(options.seed)
    os.chdir(folder := tempfile.mkdtemp(prefix='soak'))
    print('in', folder, flush=True)

    prepare = [
        sys.executable,
        ROOT / 'prepare_slimpajama.py',
        '--source=stdlib',
        '--tokenizer=bytes',
        '--tokens=0',
    ]
    started = time.time()
    subprocess.run(
        [*prepare, '--out=data/whole'],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    seconds = time.time() - started
    statuses = survive(
        [*prepare, '--out=data/killed'],
        options.kills,
        lambda: random.uniform(0.2, seconds + 0.5),
        'data/killed',
    )
    files = [
        sorted(
            path.relative_to(f'data/{name}')
            for path in Path('data', name).rglob('*')
            if path.is_file()
        )
        for name in ('whole', 'killed')
    ]
    assert files[0] == files[1], files
    for path in files[0]:
        assert Path('data/whole', path).read_bytes() == Path('data/killed', path).read_bytes(), path
    print(
        f'preparation: {options.kills} kills, exit statuses {statuses}: the same {len(files[0])} files',
        flush=True,
    )

    settings = dict(
        dataset='whole',
        vocab_size=320,
        max_iters=1500,
        lr_decay_iters=1500,
        eval_interval=50,
        dropout=0.1,
        init_from='auto',
    )
    started = time.time()
    subprocess.run(
        [sys.executable, ROOT / 'train.py', *command_line('out/whole', settings)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.time() - started
    statuses = survive(
        [sys.executable, ROOT / 'train.py', *command_line('out/killed', settings)],
        options.kills,
        lambda: random.uniform(0.5, max(4, seconds / 3)),
        'out/killed',
    )
    assert_same_run('out/whole', 'out/killed')
    steps = sum('loss' in entry for entry in log('out/killed'))
    print(
        f'training: {options.kills} kills, exit statuses {statuses}: the same log of {steps} steps and weights'
    )
    shutil.rmtree(folder)


if __name__ == '__main__':
    main()
