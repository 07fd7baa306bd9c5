"""Whatever happens to a run or a preparation, nothing is lost and nothing strange is written: results/trust.md."""
import ctypes
import functools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
from conftest import ROOT, write_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import (
    assert_same_run,
    command_line,
    finish,
    good,
    here,
    history,
    load,
    log,
    losses,
    start,
    torchrun,
)

import data
import prepare_slimpajama
import tokenizer
import train

# A program that meets with an accident in the middle of a run: train.py with one function replaced
DRIVER = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import data, train
case, calls, step = sys.argv.pop(1), {{}}, train.train_step
rank, again = os.environ.get('RANK'), os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') != '0'
replace, fsync, write = os.replace, os.fsync, data.Log.write

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def at(number, what):
    calls[what] = calls.get(what, 0) + 1
    return calls[what] == number

def dying_fsync(file):
    if at(5, 'fsync'):  # log, checkpoint, folder; log: the checkpoint of step 6 is written, and not on the disk
        die()
    fsync(file)

def dying_replace(source, target):
    if str(target).endswith('ckpt.pt') and at(1 if case == 'before the first rename' else 2, 'replace'):
        die()  # the second time, the one before has another name by now
    replace(source, target)

def dying_write(self, entry):
    if 'loss' in entry and at(10, 'write'):
        self.file.write('{{"step": 9, "lo')
        self.file.flush()
        die()
    return write(self, entry)

def eventful_step(model, optimizer, *rest):
    now = at(4, 'step')
    if now and case == 'preempted' and rank == '0':
        os.kill(os.getpid(), signal.SIGTERM)
    if now and case == 'a rank dies' and rank == '1' and not again:
        die()
    if now and case == 'not finite' and rank == '1':
        hook = model.register_forward_hook(lambda module, args, out: (None, out[1] * float('nan')))
        try:
            return step(model, optimizer, *rest)
        finally:
            hook.remove()
    return step(model, optimizer, *rest)

train.train_step = eventful_step
if case == 'before flush':
    os.fsync = dying_fsync
elif case.endswith('rename'):
    os.replace = dying_replace
elif case == 'in the middle of an append':
    data.Log.write = dying_write
train.main()
"""


@pytest.fixture(scope='module')
def driver(work):
    Path('driver.py').write_text(DRIVER)
    return 'driver.py'


def several(driver, case, out_dir, **options):
    """Two processes that torchrun starts again once, with the setting that the README says this needs."""
    words = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', '--max-restarts=1', driver, case]
    return finish(start(*words, *command_line(out_dir, options), TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1'))


# --- kills -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keep', [1, 2])
@pytest.mark.parametrize('moment, whole_ones', [
    ('before flush', {'ckpt.pt': 0, 'ckpt_best.pt': 0}), ('before the first rename', {'ckpt_best.pt': 0}),
    ('before rename', {'ckpt.pt.1': 0, 'ckpt_best.pt': 6}),
    ('in the middle of an append', {'ckpt.pt': 6, 'ckpt.pt.1': 0, 'ckpt_best.pt': 6})])
def test_training_killed_and_continued_by_the_same_command_is_bitwise_equal(driver, whole, moment, whole_ones, keep):
    name, options = f'out/{moment} {keep}', dict(init_from='auto', save_steps=(), keep_checkpoints=keep)
    status, _, err = finish(start(driver, moment, *command_line(name, options)))
    assert status == -signal.SIGKILL, err
    if keep == 1 and 'ckpt.pt' in whole_ones:
        whole_ones = {kept: step for kept, step in whole_ones.items() if kept != 'ckpt.pt.1'}
    assert {path.name: load(path)['step'] for path in data.checkpoints(name)} == whole_ones
    good(name, **options)
    assert_same_run(name, whole)


PREPARE = """
import os, signal, sys
import prepare_slimpajama as p
moment, last, calls = sys.argv[1], int(sys.argv[2]), 0

def dying(function, before=lambda *args: None):
    def call(*args):
        global calls
        calls += 1
        if calls == last:
            before(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return call

class Part:
    def __init__(self, file):
        self.write = dying(file.write, lambda ids: (file.write(ids[:len(ids) // 2 | 1]), file.flush()))
        self.flush, self.fileno = file.flush, file.fileno

if moment == 'before flush':
    os.fsync = dying(os.fsync)
elif moment == 'before rename':
    os.replace = dying(os.replace)
else:
    open_parts = p.open_parts
    p.open_parts = lambda *args: {key: Part(file) for key, file in open_parts(*args).items()}
p.prepare(p.Settings(**eval(sys.argv[3])))
"""


@pytest.mark.parametrize('moment, last', [('before flush', 40), ('before rename', 3),
                                          ('in the middle of an append', 150)])
def test_preparation_killed_and_continued_has_the_same_bytes(tmp_path, moment, last):
    lines = [json.dumps({'text': f'{n} résidual ' * (n % 40 + 1), 'meta': {'redpajama_set_name': f'RedPajama{domain}'}})
             for n in range(60) for domain in prepare_slimpajama.TABLE_2]
    (tmp_path / 'raw').mkdir()
    for n in range(3):
        Path(tmp_path, 'raw', f'part {n}.jsonl').write_text('\n'.join(lines[n::3]))
    options = dict(source=str(tmp_path / 'raw'), tokenizer='bytes', tokens=0, workers=1)
    prepare_slimpajama.prepare(prepare_slimpajama.Settings(**options, out=str(tmp_path / 'whole')))
    options['out'] = str(tmp_path / 'killed')
    done = subprocess.run([sys.executable, '-c', PREPARE, moment, str(last), repr(options)], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL and not (tmp_path / 'killed' / 'meta.json').exists(), done.stderr
    prepare_slimpajama.prepare(prepare_slimpajama.Settings(**options))
    one, other = ({path.relative_to(folder): path.read_bytes() for path in folder.rglob('*') if path.is_file()}
                  for folder in (tmp_path / 'killed', tmp_path / 'whole'))
    assert one == other


# --- preemption ------------------------------------------------------------------------------------------------------

def signalled(monkeypatch, number, last_step, out_dir, **options):
    """(exit status, output) of a run that gets a signal in the middle of a step."""
    step, calls = train.train_step, iter(range(last_step + 1))

    def signalled_step(*args):
        if next(calls, None) == last_step:
            os.kill(os.getpid(), number)
        return step(*args)
    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', signalled_step)
        return here(out_dir, **options)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_exits_with_status_75(monkeypatch, whole, number):
    name, before = f'out/{number.name}', signal.getsignal(number)
    status, text = signalled(monkeypatch, number, 4, name)
    assert status == train.INTERRUPTED == 75 and 'interrupted, and saved, at step 5' in text
    assert signal.getsignal(number) == before
    assert load(f'{name}/ckpt.pt')['step'] == 5 and log(name)[-1]['step'] == 4
    good(name, init_from='resume')
    assert_same_run(name, whole)


def test_sigusr1_saves_once_and_goes_on(monkeypatch, whole):
    status, _ = signalled(monkeypatch, signal.SIGUSR1, 8, 'out/usr1', keep_checkpoints=9)
    assert status == 0
    assert [load(path)['step'] for path in data.checkpoints('out/usr1')] == [12, 9, 6, 0, 12]
    assert_same_run('out/usr1', whole)


@pytest.mark.parametrize('number, saved', [(signal.SIGTERM, [6, 0]), (signal.SIGUSR1, [9, 6, 0])])
def test_a_signal_between_the_look_at_the_signals_and_their_clearing_is_not_lost(monkeypatch, work, number, saved):
    tensor, calls, name = torch.tensor, iter(range(10**9)), f'out/between {number.name}'

    def signalled_tensor(value, *args, **kwargs):
        made = tensor(value, *args, **kwargs)
        if isinstance(value, tuple) and list(map(type, value)) == [bool, bool] and next(calls) == 4:
            os.kill(os.getpid(), number)
        return made
    monkeypatch.setattr(torch, 'tensor', signalled_tensor)
    status, _ = here(name, eval_interval=9, max_iters=9, save_steps=(), keep_checkpoints=9)
    assert status == (75 if number == signal.SIGTERM else 0)
    assert [load(path)['step'] for path in data.checkpoints(name) if path.name != 'ckpt_best.pt'] == saved


def test_a_signal_is_heeded_at_the_next_log_line(monkeypatch, work):
    status, _ = signalled(monkeypatch, signal.SIGTERM, 5, 'out/later', log_interval=4)
    assert status == 75 and load('out/later/ckpt.pt')['step'] == 9


def test_one_signalled_process_stops_all_at_the_same_step_and_a_restart_goes_on(driver, whole):
    """torchrun starts all processes again, as after a failure, and --init_from=auto resumes."""
    status, out, err = several(driver, 'preempted', 'out/preempted', init_from='auto', save_steps=())
    # The restarted processes count their steps anew, and so are preempted again: at step 8, for good.
    assert status == 1 and 'exitcode: 75' in err.replace('  :', ':').replace(' :', ':'), err
    assert out.count('interrupted, and saved, at step 4') == 1
    assert out.count('interrupted, and saved, at step 8') == 1
    good('out/preempted', init_from='auto')
    for key, value in losses(whole).items():
        assert losses('out/preempted')[key] == pytest.approx(value, abs=1e-5), key


def test_a_dead_process_is_replaced_by_torchrun_and_the_run_goes_on(driver, whole):
    status, out, err = several(driver, 'a rank dies', 'out/dead', init_from='auto', eval_interval=2, save_steps=())
    assert status == 0, err
    for key, value in losses(whole).items():
        assert losses('out/dead')[key] == pytest.approx(value, abs=1e-5), key


def test_a_run_goes_on_with_three_and_then_four_processes(work):
    options = dict(gradient_accumulation_steps=12, batch_size=1, max_iters=4, eval_interval=0, save_steps=())
    good('out/one', **options)
    for processes, steps in ((3, 2), (4, 4)):
        status, _, err = torchrun('out/many', processes, **{**options, 'max_iters': steps, 'init_from': 'auto',
                                                            'lr_decay_iters': 12})
        assert status == 0, err
    found = {e['step']: e['loss'] for e in log('out/many') if 'loss' in e}
    assert found == pytest.approx({e['step']: e['loss'] for e in log('out/one') if 'loss' in e}, abs=1e-5)


# --- checkpoints -----------------------------------------------------------------------------------------------------

def test_the_last_checkpoints_are_kept_and_the_best(work):
    good('out/keep', max_iters=5, eval_interval=1, save_steps=(), keep_checkpoints=3)
    assert [(path.name, load(path)['step']) for path in data.checkpoints('out/keep')] == [
        ('ckpt.pt', 5), ('ckpt.pt.1', 4), ('ckpt.pt.2', 3), ('ckpt_best.pt', 5)]
    good('out/keep', max_iters=6, eval_interval=1, save_steps=(), keep_checkpoints=1, init_from='resume')
    assert [(path.name, load(path)['step']) for path in data.checkpoints('out/keep')] == [
        ('ckpt.pt', 6), ('ckpt_best.pt', 6)]


@pytest.mark.parametrize('damage', ['one bit', 'truncated', 'missing'])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(work, whole, damage):
    name = f'out/{damage}'
    good(name, max_iters=9, eval_interval=3, save_steps=(6,))
    newest = Path(name, 'ckpt.pt')
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.unlink()
    if damage != 'missing':
        newest.write_bytes(content if damage == 'one bit' else content[:len(content) // 2])
    text = good(name, init_from='auto')
    assert ('warning: ' in text and 'damaged' in text) == (damage != 'missing')
    assert Path(name, 'damaged_ckpt.pt').exists() == (damage != 'missing')  # not in the place of a whole one
    assert [load(path)['step'] for path in data.checkpoints(name)] == [12, 6, 12]
    assert load(f'{name}/ckpt.pt')['step'] == 12 and losses(name).items() >= losses(whole).items()
    assert [e for e in history(name) if e['step'] > 6 and 'loss' in e] == [
        e for e in history(whole) if e['step'] > 6 and 'loss' in e]


def test_the_best_checkpoint_is_the_last_resort(work, whole):
    good('out/resort', max_iters=9, eval_interval=3, save_steps=())
    for path in data.checkpoints('out/resort')[:-1]:
        path.unlink()
        path.write_bytes(b'damaged')
    assert 'going on from out/resort/ckpt_best.pt, step 9' in good('out/resort', init_from='auto')
    assert losses('out/resort').items() >= losses(whole).items()


FOREIGN = {
    'no step': dict(step=None), 'step': dict(step='7'), 'negative step': dict(step=-3), 'no scaler': dict(scaler=None),
    'settings': dict(settings={}), 'data': dict(data={}), 'data within': dict(data={'tokenizer': 3}),
    'config': dict(model_config=3), 'unknown field': dict(model_config={'evil': 1}),
    'wrong field': dict(model_config={'n_head': 'many'}), 'weight': dict(model={'lm_head.weight': 3}),
    'moments': dict(optimizer={'state': {0: {'step': torch.ones(()), 'exp_avg': torch.ones(1), 'exp_avg_sq':
                                             torch.ones(1)}}}),
    'moment': dict(optimizer={'state': {0: {'exp_avg': 3}}}), 'parameter': dict(optimizer={'state': {99: {}}}),
    'optimizer': dict(optimizer={})}


@pytest.mark.parametrize('change', FOREIGN)
def test_a_checkpoint_of_another_make_is_one_line(work, whole, change):
    name = f'out/foreign {change}'
    Path(name).mkdir()
    checkpoint = {**load(f'{whole}/ckpt_6.pt'), **FOREIGN[change]}
    torch.save({key: value for key, value in checkpoint.items() if value is not None}, f'{name}/ckpt.pt')
    status, _ = here(name, init_from='resume')
    assert isinstance(status, str) and status.startswith('error: ') and '\n' not in status, status
    assert f'{name}/ckpt.pt' in status and os.listdir(name) == ['ckpt.pt']


def test_a_damaged_line_of_the_log_is_left_out_and_the_others_stay(work, whole, capsys):
    shutil.copytree(whole, 'out/lines')
    path = Path('out/lines/log.jsonl')
    lines = path.read_text().splitlines()
    strange = ['{"step": 1, "lo', '3', '[]', 'null', '{"stdp": 3}', '{"step": "3"}', '\x00']
    path.write_text('\n'.join([*lines[:3], *strange, *lines[3:], '{"step": 12, "los']))
    good('out/lines', init_from='resume', max_iters=14)
    assert log('out/lines')[:len(lines)] == log(whole)
    assert capsys.readouterr().err.count('damaged line') == 8


# --- numbers ---------------------------------------------------------------------------------------------------------

def poisoned(monkeypatch, steps):
    """Let these steps, counted from the first one that is taken, have a loss of NaN."""
    step, calls = train.train_step, iter(range(10**9))

    def poisoned_step(model, *rest):
        if next(calls) not in steps:
            return step(model, *rest)
        hook = model.register_forward_hook(lambda module, args, out: (None, out[1] * math.nan))
        try:
            return step(model, *rest)
        finally:
            hook.remove()
    monkeypatch.setattr(train, 'train_step', poisoned_step)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(work, monkeypatch, dtype):
    name = f'out/nan-{dtype}'
    poisoned(monkeypatch, {3, 5})
    good(name, dtype=dtype, max_iters=8, eval_interval=0, save_steps=(3, 4))
    before, after = load(f'{name}/ckpt_3.pt'), load(f'{name}/ckpt_4.pt')
    assert all(torch.equal(before['model'][key], after['model'][key]) for key in before['model'])
    entries = {e['step']: e for e in log(name) if 'loss' in e}
    assert [e['loss'] is None and e['grad_norm'] is None for e in entries.values()] == [s in (3, 5) for s in range(8)]
    assert [e['skipped'] for e in entries.values()] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert load(f'{name}/ckpt.pt')['skipped'] == [2, 0] and log(name)[-1]['val']['mean'] < 5


def test_too_many_such_steps_in_a_row_stop_the_run_and_name_the_last_checkpoint(work, monkeypatch):
    poisoned(monkeypatch, {1, 2, *range(4, 99)})
    status, _ = here('out/stopped', max_skipped=3, eval_interval=2, max_iters=50)
    assert status.startswith('error: 3 steps in a row, up to step 6,') and 'out/stopped/ckpt.pt' in status
    checkpoint = load('out/stopped/ckpt.pt')
    assert checkpoint['step'] == 6 and checkpoint['skipped'] == [4, 2]
    assert all(value.isfinite().all() for value in checkpoint['model'].values())


def test_a_diverged_run_keeps_the_checkpoint_that_was_good(work):
    status, _ = here('out/diverged', dtype='float16', learning_rate=1e6, warmup_iters=5, eval_interval=5, max_iters=200,
                     save_steps=())
    assert status.startswith('error: 20 steps in a row') and 'out/diverged/ckpt.pt' in status, status
    validation = {e['step']: e['val']['mean'] for e in log('out/diverged') if 'val' in e}
    step = load('out/diverged/ckpt.pt')['step']
    assert validation[step] is not None and step < max(validation) and validation[max(validation)] is None


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_an_infinite_loss_with_a_finite_gradient_is_skipped_too(work, monkeypatch, dtype):
    step, calls = train.train_step, iter(range(10**9))

    def infinite_step(model, *rest):
        hook = model.register_forward_hook(lambda module, args, out: (None, out[1] + math.inf))
        try:
            return step(model, *rest)
        finally:
            hook.remove()
    monkeypatch.setattr(train, 'train_step', lambda *args: (infinite_step if next(calls) == 3 else step)(*args))
    name = f'out/inf-{dtype}'
    good(name, dtype=dtype, max_iters=6, eval_interval=0, save_steps=(3, 4))
    before, after = load(f'{name}/ckpt_3.pt'), load(f'{name}/ckpt_4.pt')
    assert all(torch.equal(before['model'][key], after['model'][key]) for key in before['model'])
    assert [e['skipped'] for e in log(name) if 'loss' in e] == [0, 0, 0, 1, 1, 1]


def test_the_scale_of_float16_has_a_floor(work, monkeypatch):
    poisoned(monkeypatch, range(19))
    good('out/floor', dtype='float16', max_iters=22, eval_interval=0, save_steps=())
    scales = [e['scale'] for e in log('out/floor') if 'loss' in e]
    assert scales[:3] == [2.0**15, 2.0**14, 2.0**13] and min(scales) == scales[-1] == 1.0


def test_a_loss_that_is_not_finite_in_one_process_skips_the_step_in_all(driver):
    status, _, err = several(driver, 'not finite', 'out/lone', eval_interval=0, save_steps=())
    assert status == 0, err
    entries = [e for e in log('out/lone') if 'loss' in e]
    assert [e['grad_norm'] is None for e in entries] == [e['step'] == 3 for e in entries]
    assert load('out/lone/ckpt.pt')['skipped'] == [1, 0] and entries[-1]['loss'] < 4


def test_a_spike_of_the_loss_is_flagged_also_across_a_resume(tmp_path):
    path = tmp_path / 'log.jsonl'
    record, whole = data.Log(path), []
    values = [3 - n / 100 + n % 5 / 20 for n in range(60)]
    values[40], values[50] = 4.0, math.nan
    for step, loss in enumerate(values):
        record.write({'step': step, 'loss': loss})
    whole = path.read_text()
    assert [json.loads(line)['step'] for line in whole.splitlines() if 'spike' in line] == [40]
    resumed = data.Log(path, 40)
    assert resumed.write({'step': 40, 'loss': 4.0})
    for step in range(41, 60):
        assert not resumed.write({'step': step, 'loss': values[step]})
    assert path.read_text() == whole


# --- the world -------------------------------------------------------------------------------------------------------

def test_a_second_run_on_a_folder_is_refused_and_a_dead_ones_lock_is_none(work, whole):
    shutil.copytree(whole, 'out/held')
    with data.lock('out/held'):
        status, _ = here('out/held', init_from='resume')
        assert status == 'error: another process is training in out/held; choose another --out_dir'
        assert log('out/held') == log(whole)
        assert here('out/held', init_from='resume', eval_only=True)[0] == 0
    good('out/held', init_from='resume')
    holder = start('-c', f'import sys, time; sys.path.insert(0, {str(ROOT)!r}); import data\n'
                         'with data.lock("out/held"): print("held", flush=True); time.sleep(60)')
    assert holder.stdout.readline() == 'held\n'
    assert 'another process' in here('out/held', init_from='resume')[0]
    holder.kill()
    finish(holder)
    good('out/held', init_from='resume')


@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='no /proc')
def test_an_out_dir_that_cannot_be_written_is_one_line(work):
    status, _ = here('/proc/no such run')
    assert status.startswith('error: ') and '/proc' in status and '\n' not in status


def test_a_log_that_cannot_grow_stops_the_run_with_one_line_and_its_checkpoint_whole(half, whole):
    name, (soft, hard) = half('out/full log'), resource.getrlimit(resource.RLIMIT_FSIZE)
    size = Path(name, 'ckpt.pt').stat().st_size
    with open(f'{name}/log.jsonl', 'w') as f:  # so long that it meets the limit before the checkpoint does
        f.write((json.dumps({'step': 0, 'note': 'x' * 1000}) + '\n') * (2 * size // 1000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (Path(name, 'log.jsonl').stat().st_size + 500, hard))
    try:
        status, _ = here(name, init_from='resume')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status.startswith('error: ') and 'too large' in status and '\n' not in status
    assert load(f'{name}/ckpt.pt')['step'] == 6
    good(name, init_from='resume')
    assert [e for e in history(name) if 'note' not in e] == history(whole)[-7:]


def test_documents_of_any_bytes_and_files_of_any_name_are_prepared(tmp_path):
    raw = tmp_path / 'a raw corpus'
    (raw / 'one domain').mkdir(parents=True)
    (raw / 'one domain' / 'a file.txt').write_bytes(b'caf\xe9 \xff\xfe \xed\xa0\x80 end')
    (raw / 'one domain' / 'nul.bin').write_bytes(b'ab\0cd')
    (raw / 'one domain' / 'empty').write_bytes(b'')
    (raw / 'one domain' / "it's; $(true) #1.txt").write_bytes('naïve'.encode())
    prepare_slimpajama.prepare(prepare_slimpajama.Settings(
        source=str(raw), out=str(tmp_path / 'an out'), tokenizer='bytes', tokens=0, workers=1, val_fraction=0.0))
    found = {path.relative_to(tmp_path / 'an out').as_posix(): path.read_bytes()[::2].partition(b'\0')[0]
             for path in (tmp_path / 'an out').rglob('*.bin')}
    assert set(found) == {'train/one_domain.bin', 'validation/one_domain.bin'}
    texts = {b'caf\xef\xbf\xbd \xef\xbf\xbd\xef\xbf\xbd \xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd end', 'naïve'.encode()}
    assert set(found.values()) == texts  # <|endoftext|> is 256, whose low byte is 0


HOSTILE = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
import prepare_slimpajama as p
p.MAX_LINE = 2**20
def read(path):
    try:
        return sum(len(text) for _, text in p.documents(p.ROWS['.' + path.partition('.')[2]], path))
    except ValueError as error:
        return error
assert read(sys.argv[1]) == 2
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(read(sys.argv[2]), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_hostile_file_of_a_giant_document_is_refused_in_little_memory(tmp_path):
    zstandard = pytest.importorskip('zstandard')
    text = b'{"text": "%s", "meta": {"redpajama_set_name": "RedPajamaC4"}}\n'
    (tmp_path / 'good.jsonl.zst').write_bytes(zstandard.compress(text % b'ab'))
    (tmp_path / 'bomb.jsonl.zst').write_bytes(zstandard.compress(text % (b'a' * 2**28)))
    assert (tmp_path / 'bomb.jsonl.zst').stat().st_size < 2**17
    done = subprocess.run([sys.executable, '-c', HOSTILE, 'good.jsonl.zst', 'bomb.jsonl.zst'], cwd=tmp_path,
                          capture_output=True, text=True)
    message, _, megabytes = done.stdout.strip().rpartition(' ')
    assert message == 'line 1 is longer than 1 MB' and int(megabytes) < 64, done.stdout + done.stderr


def test_many_long_rows_of_parquet_made_of_one_text_take_little_memory(tmp_path):
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    meta = {'redpajama_set_name': 'RedPajamaC4'}
    for name, text, rows in (('good', 'ab', 1), ('bomb', 'a' * 2**23, 40)):
        texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array([text]))
        table = pyarrow.table({'text': texts, 'meta': pyarrow.array([meta] * rows)})
        parquet.write_table(table, tmp_path / f'{name}.parquet', compression='zstd', store_schema=False)
    assert (tmp_path / 'bomb.parquet').stat().st_size < 2**14
    done = subprocess.run([sys.executable, '-c', HOSTILE, 'good.parquet', 'bomb.parquet'], cwd=tmp_path,
                          capture_output=True, text=True)
    message, _, megabytes = done.stdout.strip().rpartition(' ')
    assert message == 'row 1, or one of the next three, is longer than 1 MB' and int(megabytes) < 128, done.stderr


@pytest.mark.parametrize('name', ['meta.json', 'progress.json'])
@pytest.mark.parametrize('content', ['', '{"asked"', '3', '[]', '{}', '{"asked": 3}', '{"asked": {}}'])
def test_a_damaged_state_of_preparation_is_one_line(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match='has a damaged meta.json or progress.json .*: delete '):
        prepare_slimpajama.prepare(prepare_slimpajama.Settings('stdlib', out=str(tmp_path), tokenizer='bytes'))


def test_a_token_file_cut_off_while_it_is_in_use_is_one_line(work):
    write_dataset(Path('data/cut'), {'train': {'A': 5000}, 'validation': {'A': 300}})
    dataset = data.Dataset('cut')
    os.truncate('data/cut/train/A.bin', 4000)
    with pytest.raises(ValueError, match='data/cut/train/A.bin was cut off'):
        data.TrainingRows(dataset, 32, seed=1).batch(200)


def test_a_row_of_parquet_that_is_too_long_is_refused(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    meta = {'redpajama_set_name': 'RedPajamaC4'}
    parquet.write_table(pyarrow.Table.from_pylist(
        [{'text': 'short', 'meta': meta}, {'text': 'x' * 2000, 'meta': meta}]), tmp_path / 'a.parquet')
    monkeypatch.setattr(prepare_slimpajama, 'MAX_LINE', 1000)
    with pytest.raises(ValueError, match='row 2 is not .*, or too long'):
        list(prepare_slimpajama.documents(prepare_slimpajama.parquet_rows, str(tmp_path / 'a.parquet')))


def mounted(folder):
    """Whether a file system of 1 MiB, in memory, could be mounted here."""
    folder.mkdir()
    return not ctypes.CDLL(None).mount(b'tmpfs', bytes(folder), b'tmpfs', 0, b'size=1m')


@pytest.mark.parametrize('program', ['preparation', 'training'])
def test_a_disk_that_is_really_full_is_one_line_and_nothing_is_lost(work, whole, tmp_path, program):
    if not sys.platform.startswith('linux') or not mounted(tmp_path / 'disk'):
        pytest.skip('cannot mount a small file system here: run as root')
    out = tmp_path / 'disk' / 'out'
    try:
        (tmp_path / 'disk' / 'filler').write_bytes(bytes(2**19 if program == 'training' else 2**20 - 40960))
        if program == 'training':
            status, _ = here(out, init_from='auto')
            assert status.startswith('error: cannot write ') and 'No space left' in status
        else:
            (tmp_path / 'raw').mkdir()
            for n in range(50):
                (tmp_path / 'raw' / f'{n}.txt').write_text(f'{n} ' * 500)
            command = [sys.executable, ROOT / 'prepare_slimpajama.py', f'--source={tmp_path / "raw"}', f'--out={out}',
                       '--tokenizer=bytes', '--tokens=0', '--workers=1', '--val_fraction=0.1']
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith('error: ')
            assert 'space' in done.stderr
        (tmp_path / 'disk' / 'filler').unlink()
        if program == 'training':
            good(out, init_from='auto', keep_checkpoints=1)
            assert_same_run(out, whole)
        else:
            subprocess.run(command, check=True, capture_output=True)
            subprocess.run([*command[:3], f'--out={tmp_path / "whole"}', *command[4:]], check=True, capture_output=True)
            for path in (tmp_path / 'whole').rglob('*.bin'):
                assert (out / path.relative_to(tmp_path / 'whole')).read_bytes() == path.read_bytes()
    finally:
        ctypes.CDLL(None).umount(bytes(tmp_path / 'disk'))


# --- anything at all -------------------------------------------------------------------------------------------------

BOUNDED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LINE = st.one_of(st.binary(max_size=60), st.sampled_from([
    b'{"text": "a", "meta": {"redpajama_set_name": "RedPajamaC4"}}', b'{"text": "a"}', b'[' * 2000, b'null', b'1e999',
    b'{"text": "\\ud800", "meta": {"redpajama_set_name": "RedPajamaBook"}}', b'{"text": 1, "meta": {}}', b'\xff', b'']))


@BOUNDED
@given(st.lists(LINE, max_size=5))
def test_any_bytes_are_documents_or_an_error_that_names_the_line(tmp_path, lines):
    path = tmp_path / 'any.jsonl'
    path.write_bytes(b'\n'.join(lines))
    try:
        for domain, text in prepare_slimpajama.documents(prepare_slimpajama.jsonl_rows, str(path)):
            assert domain in prepare_slimpajama.TABLE_2
            tokenizer.load('bytes').encode(text)
    except ValueError as error:
        assert str(error).startswith('line ')


@BOUNDED
@given(st.binary(max_size=80))
def test_any_bytes_are_no_zstd_or_parquet_file_or_an_error(tmp_path, content):
    pytest.importorskip('pyarrow')
    for suffix, rows in (('.jsonl.zst', prepare_slimpajama.jsonl_rows), ('.parquet', prepare_slimpajama.parquet_rows)):
        path = tmp_path / f'any{suffix}'
        path.write_bytes(content)
        try:
            assert not list(prepare_slimpajama.documents(rows, str(path)))
        except (ValueError, OSError):
            pass


JSON = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)), lambda inner:
                    st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)))


@BOUNDED
@given(st.data())
def test_any_damage_to_a_dataset_is_refused_or_harmless(tmp_path, monkeypatch, data_):
    monkeypatch.chdir(tmp_path)
    meta = write_dataset(Path('data/any'), {'train': {'A': 300}, 'validation': {'A': 40}})
    place, key = meta, None
    for _ in range(data_.draw(st.integers(1, 4))):  # some value in meta.json becomes another
        if not isinstance(place if key is None else place[key], dict):
            break
        place = place if key is None else place[key]
        key = data_.draw(st.sampled_from(sorted(place)))
    place[key] = data_.draw(JSON)
    Path('data/any/meta.json').write_text(json.dumps(meta))
    extra = data_.draw(st.binary(max_size=3))
    Path('data/any/train/A.bin').write_bytes(Path('data/any/train/A.bin').read_bytes() + extra)
    try:
        dataset = data.Dataset('any')
        dataset.verify()
        rows = data.TrainingRows(dataset, 16, 0)
        assert rows.batch(3).shape == (3, 17) and not extra
    except (ValueError, OSError):
        pass


LOAD = functools.cache(tokenizer.load)


@BOUNDED
@given(st.text(max_size=60), st.sampled_from(['bytes', str(ROOT.parent / 'shared' / 'data' / 'tokenizer')]))
def test_any_text_comes_back_from_its_ids(text, name):
    if name != 'bytes' and not os.path.isdir(name):
        return
    known = LOAD(name)
    ids = known.encode(text)
    assert ids.dtype.name == 'uint16' and known.eot not in ids and (len(ids) == 0 or ids.max() < known.n_vocab)
    assert known.decode(ids) == unicodedata.normalize('NFC', text)


def test_a_stranger_s_checkpoint_does_not_run_code_wherever_it_is_loaded(work):
    """Each torch.load says weights_only, and nothing unpickles by itself."""
    for path in ROOT.glob('*.py'):
        source = path.read_text()
        assert source.count('torch.load(') == source.count('weights_only=True'), path
        assert 'import pickle' not in source and 'pickle.load' not in source and 'allow_pickle' not in source, path


