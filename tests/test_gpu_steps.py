"""tests/gpu.sh without a GPU: its commands, what comes back, and what a second call does."""

import json
import os
import shutil
import subprocess
import sys
import tarfile

import programs
import pytest
from conftest import ROOT
from test_readme import parse

import bench

# In place of Python: notes what it is called with, and writes what train.py and bench.py would.
STUB = f"""#!{sys.executable} -S
import json, os, sys
words = sys.argv[1:]
options = dict(word[2:].split('=', 1) for word in words if word.startswith('--') and '=' in word)
if words[0] == '-c':
    sys.exit(0)
with open(os.environ['CALLS'], 'a') as file:
    file.write(json.dumps(words) + '\\n')
if words[0] == 'train.py':
    os.makedirs(options['out_dir'], exist_ok=True)
    steps = options['max_iters']
    for name in (f'ckpt_{{steps}}.pt', 'config.json', 'log.jsonl'):
        with open(os.path.join(options['out_dir'], name), 'w') as file:
            file.write(json.dumps({{'step': int(steps), 'val': {{}}}}))
elif 'out' in options and 'prepare' not in words[0]:
    with open(options['out'], 'w') as file:
        file.write('{{}}')
sys.exit(1 if os.environ.get('FAILS', 'none of them') in words else 0)
"""


@pytest.fixture
def gpu(tmp_path):
    """gpu(STEP, MINUTES, OUT, NAME=value) runs tests/gpu.sh; returns its exit status and output."""
    stub = tmp_path / 'python'
    stub.write_text(STUB)
    stub.chmod(0o755)

    def gpu(step, minutes, *folders, root=ROOT, **environment):
        settings = {
            'PATH': os.environ['PATH'],
            'PYTHON': str(stub),
            'CALLS': str(tmp_path / 'calls'),
            'RUNS': str(tmp_path / 'runs'),
            'DATASET': 'not_there',
            **environment,
        }
        words = ['bash', root / 'tests/gpu.sh', step, str(minutes), *folders]
        done = subprocess.run(words, cwd=tmp_path, env=settings, capture_output=True, text=True)
        assert 'unbound variable' not in done.stderr + done.stdout
        return done.returncode, done.stdout + done.stderr

    return gpu


def calls(folder):
    """The commands so far, which are forgotten."""
    path = folder / 'calls'
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    path.unlink()
    return [json.loads(line) for line in lines]


def unpacked(path):
    """{name: bytes} of the files in an archive."""
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.isfile()]
        return {m.name.removeprefix('./'): archive.extractfile(m).read() for m in members}


def statuses(path):
    """{step: exit status} that an archive holds, the last one of each step."""
    lines = unpacked(path)['steps.txt'].decode().splitlines()
    return {line.split(':')[0]: int(line.split()[3]) for line in lines}


def check_command(program, words, patch):
    """Let a program take a command line, without doing what it asks for."""
    if program == 'bench.py':
        patch.setattr(bench, 'time_groups', lambda *rest: {'rows': [{}]})
        assert programs.program(bench.main, *words)[0] == 0
    elif words[0] != 'pytest':
        parse([program, *(word for word in words if 'out=' not in word)], patch)
    else:
        assert (ROOT / words[4]).exists()


@pytest.mark.parametrize('rehearsal', ['', '1'])
def test_every_command_is_one_that_its_program_takes(gpu, tmp_path, monkeypatch, rehearsal):
    pytest.importorskip('transformers')
    texts = dict(SOURCE='texts', TOKENIZER='bytes', TASKS='items')
    (tmp_path / 'copy/tests').mkdir(parents=True)
    shutil.copy(ROOT / 'tests/gpu.sh', tmp_path / 'copy/tests')
    root = tmp_path / 'copy'
    # No call of ten minutes is too short for a step.
    status, out = gpu('all', 10, 'out', root=root, REHEARSAL=rehearsal, **texts)
    assert status == 0 and 'not started' not in out
    assert len(statuses(tmp_path / 'out/gpu.tar.gz')) > 20
    assert 'without .git and COMMIT' in out

    monkeypatch.chdir(ROOT)
    for command in calls(tmp_path):
        if 'torch.distributed.run' in command:
            assert '--nproc_per_node=' + ('2' if rehearsal else 'gpu') in command
            command = command[command.index('bench.py') :]
        check_command(command[0], command[1:], monkeypatch)


def test_what_comes_back_is_one_archive(gpu, tmp_path):
    """With what a machine left that died in the middle of a step."""
    (tmp_path / 'out/bench_82m').mkdir(parents=True)
    (tmp_path / 'out/bench_82m/rows.json').write_text('half')
    gpu('bench_82m,train_vanilla', 60, 'out', SOURCE='texts')
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['gpu.tar.gz']
    files = unpacked(tmp_path / 'out/gpu.tar.gz')
    of_training = {f'train_vanilla/{name}' for name in ('log.txt', 'loss.json', 'log.jsonl')}
    of_benches = {'bench_82m/log.txt', 'bench_82m/rows.json', 'bench_82m_interrupted/rows.json'}
    assert {*files} == {'steps.txt', 'train_vanilla/config.json', *of_training, *of_benches}
    assert files['bench_82m_interrupted/rows.json'] == b'half'


def test_all_goes_on_where_an_earlier_call_stopped(gpu, tmp_path):
    """On the same machine or on a new one; what failed is repeated only when it is named."""
    assert gpu('kernels,memory', 60, 'one', FAILS='--rounds=5')[0] == 1
    assert statuses(tmp_path / 'one/gpu.tar.gz') == {'kernels': 1, 'memory': 1}
    first = calls(tmp_path)

    gpu('all', 999, 'two', 'one/gpu.tar.gz')
    after = statuses(tmp_path / 'two/gpu.tar.gz')
    assert after['kernels'] == 1 and after['bench_82m'] == 0
    assert not any(command[:-1] == first[0][:-1] for command in calls(tmp_path))

    gpu('all', 999, 'two')
    assert calls(tmp_path) == []
    assert gpu('kernels', 60, 'two')[0] == 0
    assert len(calls(tmp_path)) == 1
    assert statuses(tmp_path / 'two/gpu.tar.gz') == {**after, 'kernels': 0}


@pytest.mark.parametrize(
    'step, minutes, why',
    [
        ('kernels', 7, 'kernels: not started: it may take 8 minutes'),
        ('train_vanilla', 60, 'train_vanilla: not started: it needs data/not_there, or SOURCE'),
        ('compare', 60, 'compare: not started: it needs the runs of the training steps'),
    ],
)
def test_a_step_that_cannot_end_is_not_started(gpu, tmp_path, step, minutes, why):
    status, out = gpu(step, minutes, 'out')
    assert status == 1 and why in out
    assert calls(tmp_path) == [] and not (tmp_path / 'out/gpu.tar.gz').exists()
