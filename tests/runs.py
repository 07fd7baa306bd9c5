"""Runs of train.py, in this process or in others, and what to compare them by."""

import contextlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, assert_one_line, contents, read_json, write_json
from torch.distributed import TCPStore

import train
from lib.rundir import checkpoints
from model import GPT, GPTConfig

TINY = dict(
    dataset='tiny',
    n_layer=2,
    n_head=2,
    n_embd=32,
    block_size=32,
    vocab_size=64,
    batch_size=4,
    device='cpu',
    gradient_accumulation_steps=2,
    eval_iters=2,
    eval_interval=6,
    max_iters=12,
    warmup_iters=3,
    learning_rate=1e-2,
    lr_decay_iters=12,
    save_steps=(6,),
    compile=False,
)


# Options with which command_line() leaves the model to a checkpoint.
NO_MODEL = dict.fromkeys(('n_layer', 'n_head', 'n_embd', 'block_size', 'vocab_size'))


def command_line(out_dir, options):
    settings = {**TINY, 'out_dir': out_dir, **options}
    return [f'--{name}={value}' for name, value in settings.items() if value is not None]


# --- in this process -----------------------------------------------------------------------------


def call(main, *words):
    """A program's main() with a command line. Returns (exit status or message, stdout)."""
    out = io.StringIO()
    argv = sys.argv
    sys.argv = ['program', *map(str, words)]
    try:
        with contextlib.redirect_stdout(out):
            main()
        return 0, out.getvalue()
    except SystemExit as exit:
        return exit.code, out.getvalue()
    finally:
        sys.argv = argv


def succeed(main, *words):
    """What a program's main() prints on stdout, which must end well."""
    status, out = call(main, *words)
    assert status == 0, status
    return out


def here(out_dir, **options):
    """train.py, where the random state is anything. Returns (exit status or message, stdout)."""
    torch.seed()
    return call(train.main, *command_line(out_dir, options))


def good(out_dir, **options):
    status, text = here(out_dir, **options)
    assert status == 0, status
    return text


# --- in a forked process: almost as good as a new one, and there at once --------------------------

FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload(['pytest', 'torch._dynamo', 'train', 'prepare_slimpajama'])


def fork(function, *args, **environment):
    """A function in a process of its own, with its own output, environment and signals.

    It is forked from a server that has imported torch and has computed nothing. The function must be
    one that can be imported.
    """
    folder = Path(tempfile.mkdtemp())
    args = (function, args, environment, folder)
    process = FORKS.Process(target=run_fork, args=args, daemon=True)
    with pytest.MonkeyPatch.context() as patch:  # for the server, when it starts
        patch.setenv('PYTHONPATH', str(ROOT))
        process.start()
    process.folder = folder
    return process


def run_fork(function, args, environment, folder):
    os.setsid()
    os.environ.update(environment)
    for stream, name in ((sys.stdout, 'out'), (sys.stderr, 'err')):
        with open(folder / name, 'w') as file:
            os.dup2(file.fileno(), stream.fileno())
    function(*args)


def finish(process):
    """(exit status, stdout, stderr) of what fork() began."""
    process.join(150)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail('no process may hang')
    out, err = ((process.folder / name).read_text() for name in ('out', 'err'))
    shutil.rmtree(process.folder)
    return process.exitcode, out, err


def run_main(main, *words):
    """A program's main() with a command line, in a process of its own."""
    sys.argv = ['program', *words]
    main()


def ranks(processes, function, *args, nodes=1):
    """The function in several processes that find each other, as torchrun starts them.

    Returns [(exit status, stdout, stderr)].
    """
    # As in torchrun, the store where they meet is this process's: it chose its port, and has it.
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    forks = []
    for rank in range(processes):
        environment = {
            'RANK': str(rank),
            'LOCAL_RANK': str(rank % (processes // nodes)),
            'WORLD_SIZE': str(processes),
            'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(store.port),
            'TORCHELASTIC_USE_AGENT_STORE': 'True',
            'TORCHELASTIC_RESTART_COUNT': '0',
        }
        forks.append(fork(function, *args, **environment))
    return [finish(process) for process in forks]


def good_ranks(out_dir, processes=2, nodes=1, **options):
    """train.py in several processes."""
    for status, _, err in ranks(
        processes, run_main, train.main, *command_line(out_dir, options), nodes=nodes
    ):
        assert status == 0, err


# --- what a run left ------------------------------------------------------------------------------


def log(out_dir):
    lines = Path(out_dir, 'log.jsonl').read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]  # NaN is not JSON


def history(entries):
    """Lines of a log, less what depends on the machine's speed and on having been resumed."""
    skip = ('tok_per_s', 'mfu', 'seconds')
    entries = [entry for entry in entries if 'changed' not in entry]
    return [{k: v for k, v in entry.items() if k not in skip} for entry in entries]


def training_steps(out_dir):
    return [entry for entry in log(out_dir) if 'loss' in entry]


def evaluations(out_dir):
    return [entry for entry in log(out_dir) if 'val' in entry]


def losses(out_dir):
    """{'train 3': loss, 'validation 6': mean loss, ...}"""
    result = {f'train {entry["step"]}': entry['loss'] for entry in training_steps(out_dir)}
    for entry in evaluations(out_dir):
        result[f'validation {entry["step"]}'] = entry['val']['mean']
    return result


def load(path):
    return torch.load(path, map_location='cpu', weights_only=True)


def newest(out_dir):
    """A run's newest checkpoint."""
    return load(checkpoints(out_dir)[0])


def model_of(out_dir):
    """The model of a run's newest checkpoint."""
    checkpoint = newest(out_dir)
    model = GPT(GPTConfig(**checkpoint['model_config']))
    model.load_state_dict(checkpoint['model'])
    return model


def steps_of_checkpoints(out_dir):
    """The steps of a run's checkpoints, newest first."""
    return [load(path)['step'] for path in checkpoints(out_dir)]


def assert_same(a, b):
    """Bit for bit: tensors and numbers, also in dicts and lists."""
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_same_run(a, b):
    """Bit for bit: every logged number, the weights, AdamW's and the scaler's state."""
    assert history(log(a)) == history(log(b))
    one, two = newest(a), newest(b)
    for part in ('model', 'optimizer', 'scaler'):
        assert_same(one[part], two[part])
    for part in ('step', 'data', 'model_config'):
        assert one[part] == two[part], part


def assert_close_losses(a, b, tolerance=1e-5):
    """The same steps and evaluations, and almost the same losses: the processes differ."""
    ours, theirs = losses(a), losses(b)
    assert ours.keys() == theirs.keys() and len(ours) > 6
    for key in ours:
        assert ours[key] == pytest.approx(theirs[key], abs=tolerance), key


def refused(*words, out_dir='out/refused', **options):
    """The program's one line, having made sure that it wrote, changed and deleted nothing."""
    before = contents('.')
    status, _ = here(out_dir, **options)
    after = contents('.')
    shutil.rmtree('out/refused', ignore_errors=True)
    assert_one_line(status, *words)
    assert after == before


# --- runs that nobody trained ---------------------------------------------------------------------


def write_log(folder, entries):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(entry) + '\n' for entry in entries]
    (folder / 'log.jsonl').write_text(''.join(lines))


def write_run(folder, values, val=None, **config):
    """A finished run as train.py leaves it, with a training loss per step. Returns its folder."""
    entries = [
        {'step': i, 'loss': x, 'tokens': 1000 * (i + 1), 'tok_per_s': 1000.0}
        for i, x in enumerate(values)
    ]
    last = val or values[-1]
    entries.append({'step': len(values), 'val': {'Domain': last, 'mean': last}, 'seconds': 2.0})
    write_log(folder, entries)
    settings = {'gradient_accumulation_steps': 1, 'batch_size': 1, 'max_iters': len(values)}
    settings |= {'seed': 1337, 'learning_rate': 6e-4, **config}
    write_json(folder / 'config.json', settings)
    return folder


def read_config(folder):
    return read_json(Path(folder, 'config.json'))


def edit_config(folder, **changes):
    """Change settings that a run's config.json says it was trained with."""
    write_json(Path(folder, 'config.json'), {**read_config(folder), **changes})
