"""Runs of train.py in one process or several, and what to compare them by: shared by test_train and test_mistakes."""
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import train

TRAIN = {'A': 5000, 'B': 3000, 'C': 1500}
VALIDATION = {'A': 700, 'B': 300, 'C': 20}
TINY = dict(dataset='tiny', n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64, batch_size=2, device='cpu',
            gradient_accumulation_steps=4, eval_iters=2, eval_interval=6, max_iters=12, warmup_iters=3,
            learning_rate=1e-2, lr_decay_iters=12, save_steps=(6,), compile=False)


def command_line(out_dir, options):
    return [f'--{k}={v}' for k, v in {**TINY, 'out_dir': out_dir, **options}.items()]


def here(out_dir, **options):
    """train.py in this process, whose random state is anything; returns (exit status or message, stdout)."""
    torch.seed()
    out, argv = io.StringIO(), sys.argv
    sys.argv = ['train.py', *command_line(out_dir, options)]
    try:
        with contextlib.redirect_stdout(out):
            train.main()
        return 0, out.getvalue()
    except SystemExit as exit:
        return exit.code, out.getvalue()
    finally:
        sys.argv = argv


def good(out_dir, **options):
    status, text = here(out_dir, **options)
    assert status == 0, status
    return text


ENVIRONMENT = {**{k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}, 'OMP_NUM_THREADS': '1'}


def start(*words, **environment):
    return subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env={**ENVIRONMENT, **environment}, start_new_session=True)


def finish(process):
    try:
        out, err = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:  # no process may hang
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def torchrun(out_dir, processes=2, program=ROOT / 'train.py', **options):
    return finish(start('-m', 'torch.distributed.run', f'--nproc_per_node={processes}', program,
                        *command_line(out_dir, options)))


def log(out_dir):
    lines = Path(out_dir, 'log.jsonl').read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]  # NaN is not JSON


def history(out_dir, skip=('tok_per_s', 'mfu')):
    """The log, less what depends on the machine's speed and on having been resumed."""
    return [{k: v for k, v in entry.items() if k not in skip} for entry in log(out_dir) if 'changed' not in entry]


def losses(out_dir, start=0):
    return {f'{kind} {e["step"]}': e['loss'] if kind == 'train' else e['val']['mean'] for e in log(out_dir)
            for kind in ('train', 'validation') if ('loss' if kind == 'train' else 'val') in e and e['step'] >= start}


def load(path):
    return torch.load(path, map_location='cpu', weights_only=True)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same_run(a, b):
    """Bit for bit: every logged number, the weights, AdamW's and the scaler's state."""
    assert history(a) == history(b)
    one, two = load(Path(a, 'ckpt.pt')), load(Path(b, 'ckpt.pt'))
    for part in ('model', 'optimizer', 'scaler', 'step', 'data', 'model_config'):
        assert same(one[part], two[part]), part


def snapshot(*folders):
    return {path: path.read_bytes() for folder in folders for path in sorted(Path(folder).rglob('*')) if path.is_file()
            and path.name != 'verified.json'}


def refused(*words, out_dir='out/refused', **options):
    """The program's one line, having made sure that it wrote, changed and deleted nothing."""
    before = snapshot('.')
    status, _ = here(out_dir, **options)
    after = snapshot('.')
    shutil.rmtree('out/refused', ignore_errors=True)
    assert isinstance(status, str) and status.startswith('error: ') and '\n' not in status, status
    for word in words:
        assert str(word) in status, status
    assert after == before
    return status
