"""tests/gpu.sh without a GPU: its commands, what comes back, and what a second call does."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile

import pytest
from conftest import ROOT

import bench
import evaluate
import levers
import prepare_slimpajama
from configurator import configure
from model import GPTConfig
from paper import analyze
from train import TrainConfig

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
    for name in ('ckpt_400.pt', 'config.json', 'log.jsonl'):
        with open(os.path.join(options['out_dir'], name), 'w') as file:
            file.write('{{"step": 400, "val": {{}}}}')
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


def all_steps():
    words = ['bash', ROOT / 'tests/gpu.sh', 'list']
    lines = subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[0]: int(line.split()[1]) for line in lines}


def launched(command):
    """A command without the launcher of several processes."""
    if 'torch.distributed.run' in command:
        return command[command.index('bench.py') :]
    return command


def names_of_rows(words):
    """The rows of a call of bench.py, having checked that there are such settings and such rows."""
    schema = bench.BenchConfig
    if words[0] == 'decode':
        schema = bench.DecodeConfig
        words = words[1:]
    settings, config = configure(schema, GPTConfig, argv=words)
    names = bench.row_names(settings)
    for name in names:
        levers.read_name(name, GPTConfig(**config.shape()))
    return names


def test_every_command_is_one_that_its_program_takes(gpu, tmp_path, monkeypatch):
    pytest.importorskip('transformers')
    status, out = gpu('all', 999, 'out', SOURCE='texts', TOKENIZER='bytes', TASKS='items')
    assert status == 0, out
    commands = calls(tmp_path)
    assert statuses(tmp_path / 'out/gpu.tar.gz') == dict.fromkeys(all_steps(), 0)

    monkeypatch.chdir(ROOT)
    rows = set()
    for program, *words in map(launched, commands):
        if program == 'bench.py':
            rows.update(names_of_rows(words))
            if '--profile' in ' '.join(words):
                # A row that recomputes has no expectation to print beside its profile.
                settings, _ = configure(bench.BenchConfig, GPTConfig, argv=words)
                assert settings.activation_memory_budget == 1
        elif program == 'train.py':
            configure(TrainConfig, GPTConfig, argv=words)
        elif program == 'prepare_slimpajama.py':
            configure(prepare_slimpajama.Settings, argv=words)
        elif program == 'evaluate.py':
            schema = {'loss': evaluate.LossConfig, 'tasks': evaluate.TasksConfig}[words[0]]
            configure(schema, argv=[w for w in words[1:] if 'out=' not in w], plain='runs')
        elif words[0] == 'paper.analyze':
            assert words[1] in analyze.__doc__
            configure(analyze.AnalyzeConfig, argv=words[2:], plain='runs')
        else:
            assert (program, words[0]) == ('-m', 'pytest')
            assert all((ROOT / word).exists() for word in words if word.endswith('.py'))
    assert rows > {*levers.VARIANTS, 'hf', 'hf:eager', 'vanilla:cudnn', 'vanilla:budget=0.9'}
    pulled = {name.partition('=')[0] for row in rows for name in row.split(':')[1:]}
    assert pulled == {*levers.FLAGS, 'chunk', 'budget', 'mode', 'bucket'}


def copied(folder):
    """A folder that has nothing but the script."""
    (folder / 'copy/tests').mkdir(parents=True)
    shutil.copy(ROOT / 'tests/gpu.sh', folder / 'copy/tests')
    return folder / 'copy'


def test_every_bench_of_a_rehearsal_is_one_that_can_start(gpu, tmp_path, monkeypatch):
    """Its small sizes come on top of each step's own settings."""
    pytest.importorskip('transformers')
    others = ('train', 'compare', 'correctness')
    steps = [name for name in all_steps() if not name.startswith(others)]
    status, out = gpu(','.join(steps), 999, 'out', root=copied(tmp_path), REHEARSAL='1')
    assert status == 0, out
    commands = [launched(command) for command in calls(tmp_path)]
    assert len(commands) == len(steps)
    monkeypatch.chdir(ROOT)
    for program, *words in commands:
        assert program == 'bench.py' and names_of_rows(words)


def test_what_comes_back_is_one_archive(gpu, tmp_path):
    gpu('bench_82m,train_vanilla', 60, 'out', SOURCE='texts')
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['gpu.tar.gz']
    names = set(unpacked(tmp_path / 'out/gpu.tar.gz'))
    assert names == {
        'steps.txt',
        'bench_82m/log.txt',
        'bench_82m/rows.json',
        'train_vanilla/log.txt',
        'train_vanilla/loss.json',
        'train_vanilla/log.jsonl',
        'train_vanilla/config.json',
    }


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


def test_a_step_that_does_not_fit_is_not_started(gpu, tmp_path):
    status, out = gpu('kernels', 7, 'out')
    # Whole minutes that are left, the seconds until now subtracted.
    assert status == 1 and re.search(
        r'kernels: not started: it may take 8 minutes, [67] are left', out
    )
    assert calls(tmp_path) == [] and not (tmp_path / 'out/gpu.tar.gz').exists()


def test_without_data_the_benches_run_and_training_waits(gpu, tmp_path):
    status, out = gpu('all', 999, 'out')
    assert status == 1
    assert 'train_vanilla: not started: it needs data/not_there, or SOURCE' in out
    assert 'compare: not started: it needs the runs of the training steps' in out
    done = statuses(tmp_path / 'out/gpu.tar.gz')
    waiting = {name for name in all_steps() if name.startswith('train_')} | {'compare'}
    assert set(done) == set(all_steps()) - waiting and set(done.values()) == {0}


def test_what_a_machine_left_when_it_died_is_kept(gpu, tmp_path):
    (tmp_path / 'out/kernels').mkdir(parents=True)
    (tmp_path / 'out/kernels/rows.json').write_text('half')
    gpu('kernels', 60, 'out')
    assert unpacked(tmp_path / 'out/gpu.tar.gz')['kernels_interrupted/rows.json'] == b'half'


def test_the_step_of_several_processes_has_one_per_gpu_or_as_many_as_are_asked_for(gpu, tmp_path):
    gpu('ddp', 60, 'out')
    gpu('ddp', 60, 'out', PROCESSES='3')
    counts = [[word for word in words if 'nproc' in word] for words in calls(tmp_path)]
    assert counts == [['--nproc_per_node=gpu'], ['--nproc_per_node=3']]


def test_a_copy_without_git_asks_for_its_commit(gpu, tmp_path):
    warning = 'without .git and COMMIT'
    assert warning not in gpu('kernels', 60, 'out')[1]

    # Were a folder above it a repository, git would name that one's commit.
    copy = dict(root=copied(tmp_path), GIT_CEILING_DIRECTORIES=str(tmp_path))
    assert warning in gpu('kernels', 60, 'out', **copy)[1]
    assert warning not in gpu('kernels', 60, 'out', COMMIT='1a2b3c4', **copy)[1]


@pytest.mark.parametrize(
    'words, message',
    [
        (('kernel', 9, 'out'), 'there is no step kernel'),
        (('all', 9, 'out', 'none.tar.gz'), 'there is no none.tar.gz'),
        (('all', 9), 'What a GPU is wanted for'),
    ],
)
def test_a_wrong_call_says_what_is_wrong(gpu, words, message):
    status, out = gpu(*words)
    assert status == 2 and message in out


def test_no_call_of_ten_minutes_is_too_short_for_a_step():
    assert max(all_steps().values()) <= 9
