"""Whatever happens to a run, nothing is lost and nothing strange is written: results/trust."""

import itertools
import json
import math
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from accidents import train_with, with_loss
from conftest import ROOT
from runs import (
    FORKS,
    assert_same_run,
    command_line,
    evaluations,
    finish,
    fork,
    good,
    here,
    history,
    load,
    log,
    losses,
    same,
    steps_of_checkpoints,
    training_steps,
)

import train
from files import locked
from machine import INTERRUPTED
from rundir import Log, checkpoints

# --- kills ---------------------------------------------------------------------------------------

# Which checkpoints a kill at that moment leaves, and their steps.
KILLS = {
    'before flush': {'ckpt.pt': 0, 'ckpt_best.pt': 0},
    'before the first rename': {'ckpt_best.pt': 0},
    'before rename': {'ckpt.pt.1': 0, 'ckpt_best.pt': 6},
    'in the middle of an append': {'ckpt.pt': 6, 'ckpt.pt.1': 0, 'ckpt_best.pt': 6},
}


@pytest.mark.parametrize('keep', [1, 2])
@pytest.mark.parametrize('moment', KILLS)
def test_training_killed_and_continued_by_the_same_command_is_bitwise_equal(whole, moment, keep):
    name = f'out/{moment} {keep}'
    options = dict(init_from='auto', save_steps=(), keep_checkpoints=keep)
    status, _, err = finish(fork(train_with, moment, *command_line(name, options)))
    assert status == -signal.SIGKILL, err
    left = dict(KILLS[moment])
    if keep == 1 and 'ckpt.pt' in left:
        left.pop('ckpt.pt.1', None)
    assert {path.name: load(path)['step'] for path in checkpoints(name)} == left
    good(name, **options)
    assert_same_run(name, whole)
    assert not Path(name, 'ckpt.tmp').exists()


# --- preemption ----------------------------------------------------------------------------------


def send(number):
    os.kill(os.getpid(), number)


def signalled(monkeypatch, number, last_step, out_dir, **options):
    """(exit status, output) of a run that gets a signal in the middle of a step."""
    step = train.train_step
    calls = itertools.count()

    def signalled_step(*args):
        if next(calls) == last_step:
            send(number)
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', signalled_step)
        return here(out_dir, **options)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_exits_with_status_75(monkeypatch, whole, number):
    name = f'out/{number.name}'
    before = signal.getsignal(number)
    status, text = signalled(monkeypatch, number, 4, name)
    assert status == INTERRUPTED == 75 and 'interrupted at step 5; the run is saved' in text
    assert signal.getsignal(number) == before
    assert load(f'{name}/ckpt.pt')['step'] == 5 and log(name)[-1]['step'] == 4
    good(name, init_from='resume')
    assert_same_run(name, whole)


def test_sigusr1_saves_once_and_goes_on(monkeypatch, whole):
    status, _ = signalled(monkeypatch, signal.SIGUSR1, 8, 'out/usr1', keep_checkpoints=9)
    assert status == 0
    assert steps_of_checkpoints(checkpoints('out/usr1')) == [12, 9, 6, 0, 12]
    assert_same_run('out/usr1', whole)


@pytest.mark.parametrize(
    'number, saved', [(signal.SIGTERM, [6, 0]), (signal.SIGUSR1, [9, 6, 0])], ids=str
)
def test_a_signal_between_the_look_at_the_signals_and_their_clearing_is_not_lost(
    monkeypatch, work, number, saved
):
    tensor = torch.tensor
    looks = itertools.count()

    def signalled_tensor(value, *args, **options):
        result = tensor(value, *args, **options)
        is_look = isinstance(value, tuple) and [type(flag) for flag in value] == [bool, bool]
        if is_look and next(looks) == 4:
            send(number)
        return result

    name = f'out/between {number.name}'
    monkeypatch.setattr(torch, 'tensor', signalled_tensor)
    status, _ = here(name, eval_interval=9, max_iters=9, save_steps=(), keep_checkpoints=9)
    assert status == (75 if number == signal.SIGTERM else 0)
    kept = [path for path in checkpoints(name) if path.name != 'ckpt_best.pt']
    assert steps_of_checkpoints(kept) == saved


def test_a_signal_is_heeded_at_the_next_log_line(monkeypatch, work):
    status, _ = signalled(monkeypatch, signal.SIGTERM, 5, 'out/later', log_interval=4)
    assert status == 75 and load('out/later/ckpt.pt')['step'] == 9


@pytest.mark.parametrize(
    'first, words',
    [(4.0, 'the last checkpoint is of step 0'), (math.nan, 'no checkpoint has been written')],
)
def test_an_interrupted_run_whose_loss_is_not_finite_says_what_is_saved(
    monkeypatch, work, first, words
):
    values = itertools.chain([first], itertools.repeat(math.nan))
    monkeypatch.setattr(train, 'evaluate', lambda *args: {'mean': next(values)})
    options = dict(eval_interval=2, save_steps=())
    status, text = signalled(monkeypatch, signal.SIGTERM, 1, f'out/unsaved {first}', **options)
    assert status == 75 and f'interrupted at step 2; {words}\n' in text


def test_a_run_shortened_to_the_step_of_its_interruption_is_evaluated_there_once(monkeypatch, work):
    options = dict(eval_interval=0, save_steps=())
    signalled(monkeypatch, signal.SIGTERM, 3, 'out/shortened', **options)
    assert evaluations('out/shortened') == []
    for _ in range(2):
        text = good('out/shortened', init_from='resume', max_iters=4, **options)
        assert 'finished at step 4' in text
        assert [entry['step'] for entry in evaluations('out/shortened')] == [4]
    assert load('out/shortened/ckpt.pt')['step'] == load('out/shortened/ckpt_best.pt')['step'] == 4


# --- checkpoints ---------------------------------------------------------------------------------


def test_the_last_checkpoints_are_kept_and_the_best(work):
    def steps():
        return {path.name: load(path)['step'] for path in checkpoints('out/keep')}

    options = dict(eval_interval=1, save_steps=())
    good('out/keep', max_iters=5, keep_checkpoints=3, **options)
    assert steps() == {'ckpt.pt': 5, 'ckpt.pt.1': 4, 'ckpt.pt.2': 3, 'ckpt_best.pt': 5}
    good('out/keep', max_iters=6, keep_checkpoints=1, init_from='resume', **options)
    assert steps() == {'ckpt.pt': 6, 'ckpt_best.pt': 6}


@pytest.mark.parametrize('damage', ['one bit', 'truncated', 'missing'])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(work, whole, damage, capsys):
    name = f'out/{damage}'
    good(name, max_iters=9, eval_interval=3, save_steps=(6,))
    newest = Path(name, 'ckpt.pt')
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.unlink()
    if damage == 'one bit':
        newest.write_bytes(content)
    if damage == 'truncated':
        newest.write_bytes(content[: len(content) // 2])

    good(name, init_from='auto')
    text = capsys.readouterr().err
    is_damaged = damage != 'missing'
    assert ('warning: ' in text and 'damaged' in text) == is_damaged
    assert Path(name, 'damaged_ckpt.pt').exists() == is_damaged  # not in the place of a whole one
    assert steps_of_checkpoints(checkpoints(name)) == [12, 6, 12]
    assert losses(name).items() >= losses(whole).items()
    assert training_history(name, 7) == training_history(whole, 7)


def training_history(name, first):
    return [entry for entry in history(name) if entry['step'] >= first and 'loss' in entry]


def test_the_best_checkpoint_is_the_last_resort(work, whole, capsys):
    good('out/resort', max_iters=9, eval_interval=3, save_steps=())
    for path in checkpoints('out/resort')[:-1]:
        path.unlink()
        path.write_bytes(b'damaged')
    good('out/resort', init_from='auto')
    assert 'going on from out/resort/ckpt_best.pt, step 9' in capsys.readouterr().err
    assert losses('out/resort').items() >= losses(whole).items()


ONE = torch.ones(1)
SMALL_MOMENTS = {0: {'step': torch.ones(()), 'exp_avg': ONE, 'exp_avg_sq': ONE}}
FOREIGN = {
    'no step': dict(step=None),
    'step': dict(step='7'),
    'negative step': dict(step=-3),
    'no scaler': dict(scaler=None),
    'settings': dict(settings={}),
    'data': dict(data={}),
    'data within': dict(data={'tokenizer': 3}),
    'config': dict(model_config=3),
    'unknown field': dict(model_config={'evil': 1}),
    'wrong field': dict(model_config={'n_head': 'many'}),
    'weight': dict(model={'lm_head.weight': 3}),
    'moments': dict(optimizer={'state': SMALL_MOMENTS}),
    'moment': dict(optimizer={'state': {0: {'exp_avg': 3}}}),
    'parameter': dict(optimizer={'state': {99: {}}}),
    'optimizer': dict(optimizer={}),
}


@pytest.mark.parametrize('change', FOREIGN)
def test_a_checkpoint_of_another_make_is_one_line(work, whole, change):
    name = f'out/foreign {change}'
    Path(name).mkdir()
    checkpoint = {**load(f'{whole}/ckpt_6.pt'), **FOREIGN[change]}
    checkpoint = {key: value for key, value in checkpoint.items() if value is not None}
    torch.save(checkpoint, f'{name}/ckpt.pt')
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
    assert log('out/lines')[: len(lines)] == log(whole)
    assert capsys.readouterr().err.count('damaged line') == 8


def test_a_strangers_checkpoint_does_not_run_code_wherever_it_is_loaded():
    """Each torch.load says weights_only, and nothing unpickles by itself."""
    for path in itertools.chain(*(ROOT.glob(f'{folder}*.py') for folder in ('', '*/'))):
        source = path.read_text()
        if path.parent.name == 'tests':
            continue
        assert source.count('torch.load(') == source.count('weights_only=True'), path
        for word in ('import pickle', 'pickle.load', 'allow_pickle'):
            assert word not in source, path


# --- numbers -------------------------------------------------------------------------------------


def spoil(monkeypatch, steps, change):
    """Let these steps, counted from the first one that is taken, have another loss."""
    step = train.train_step
    spoilt = with_loss(change, step)
    calls = itertools.count()

    def step_or_spoil(*args):
        return (spoilt if next(calls) in steps else step)(*args)

    monkeypatch.setattr(train, 'train_step', step_or_spoil)


def not_a_number(loss):
    return loss * math.nan


def infinite(loss):
    return loss + math.inf  # with a finite gradient


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('change', [not_a_number, infinite])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(work, monkeypatch, dtype, change):
    name = f'out/{change.__name__}-{dtype}'
    spoil(monkeypatch, {3, 5}, change)
    good(name, dtype=dtype, max_iters=8, eval_interval=0, save_steps=(3, 4))
    before, after = load(f'{name}/ckpt_3.pt'), load(f'{name}/ckpt_4.pt')
    assert same(before['model'], after['model'])
    steps = training_steps(name)
    assert [entry['loss'] is None for entry in steps] == [n in (3, 5) for n in range(8)]
    assert [entry['skipped'] for entry in steps] == [0, 0, 0, 1, 1, 2, 2, 2]
    if change is not_a_number:
        assert steps[3]['grad_norm'] is None and steps[5]['grad_norm'] is None
    assert load(f'{name}/ckpt.pt')['skipped'] == [2, 0] and log(name)[-1]['val']['mean'] < 5


def test_too_many_such_steps_in_a_row_stop_the_run_and_name_the_last_checkpoint(work, monkeypatch):
    spoil(monkeypatch, {1, 2, *range(4, 99)}, not_a_number)
    status, _ = here('out/stopped', max_skipped=3, eval_interval=2, max_iters=50)
    assert status.startswith('error: 3 steps in a row, up to step 6,')
    assert 'out/stopped/ckpt.pt' in status
    checkpoint = load('out/stopped/ckpt.pt')
    assert checkpoint['step'] == 6 and checkpoint['skipped'] == [4, 2]
    assert all(value.isfinite().all() for value in checkpoint['model'].values())


def test_a_run_that_stops_before_its_first_checkpoint_names_none(work, monkeypatch):
    spoil(monkeypatch, range(99), not_a_number)
    status, _ = here('out/nothing', max_skipped=2, eval_interval=0, save_steps=())
    assert status.startswith('error: 2 steps in a row, up to step 1,')
    assert 'no checkpoint has been written yet' in status and '.pt' not in status


def test_max_skipped_of_zero_never_stops_a_run(work, monkeypatch):
    spoil(monkeypatch, range(3), not_a_number)
    good('out/never', max_skipped=0, max_iters=4)
    assert [entry['skipped'] for entry in training_steps('out/never')] == [1, 2, 3, 3]


def test_a_diverged_run_keeps_the_checkpoint_that_was_good(work):
    name = 'out/diverged'
    options = dict(eval_interval=5, max_iters=200, save_steps=())
    status, _ = here(name, dtype='float16', learning_rate=1e6, warmup_iters=5, **options)
    assert status.startswith('error: 20 steps in a row') and f'{name}/ckpt.pt' in status, status
    validation = {entry['step']: entry['val']['mean'] for entry in log(name) if 'val' in entry}
    step = load(f'{name}/ckpt.pt')['step']
    assert validation[step] is not None
    assert step < max(validation) and validation[max(validation)] is None


def test_the_scale_of_float16_has_a_floor(work, monkeypatch):
    spoil(monkeypatch, range(19), not_a_number)
    good('out/floor', dtype='float16', max_iters=22, eval_interval=0, save_steps=())
    scales = [entry['scale'] for entry in training_steps('out/floor')]
    assert scales[:3] == [2.0**15, 2.0**14, 2.0**13] and min(scales) == scales[-1] == 1.0


def test_a_spike_of_the_loss_is_flagged_also_across_a_resume(tmp_path):
    path = tmp_path / 'log.jsonl'
    values = [3 - n / 100 + n % 5 / 20 for n in range(60)]
    values[40], values[50] = 4.0, math.nan
    record = Log(path)
    for step, loss in enumerate(values):
        record.write({'step': step, 'loss': loss})
    whole = path.read_text()
    assert [json.loads(line)['step'] for line in whole.splitlines() if 'spike' in line] == [40]
    resumed = Log(path, 40)
    assert resumed.write({'step': 40, 'loss': 4.0})
    for step in range(41, 60):
        assert not resumed.write({'step': step, 'loss': values[step]})
    assert path.read_text() == whole


# --- the world -----------------------------------------------------------------------------------


def hold(folder, held):
    with locked(folder, 'training in'):
        held.set()
        signal.pause()


def test_a_second_run_on_a_folder_is_refused_and_a_dead_ones_lock_is_none(work, whole):
    shutil.copytree(whole, 'out/held')
    message = 'error: another process is training in out/held; choose another --out_dir'
    with locked('out/held', 'training in'):
        status, _ = here('out/held', init_from='resume')
        assert status == message
        assert log('out/held') == log(whole)
        assert here('out/held', init_from='resume', eval_only=True)[0] == 0
    good('out/held', init_from='resume')

    held = FORKS.Event()
    holder = fork(hold, 'out/held', held)
    assert held.wait(100)
    assert here('out/held', init_from='resume')[0] == message
    holder.process.kill()
    finish(holder)
    good('out/held', init_from='resume')


@pytest.mark.parametrize('before', ['nothing', 'half of it'])
def test_nothing_in_a_folder_is_read_before_it_is_locked(half, whole, monkeypatch, before):
    """Another process writes its last checkpoint and leaves, just before this one gets the lock."""
    name = f'out/left {before}'
    if before == 'half of it':
        half(name)

    def locked_late(folder, *args):
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        return locked(folder, *args)

    monkeypatch.setattr('rundir.locked', locked_late)
    good(name, init_from='auto')
    # Trained again, they would have another speed.
    assert training_steps(name) == training_steps(whole)
    assert load(f'{name}/ckpt.pt')['step'] == 12


def test_a_refused_start_leaves_no_folder(work):
    assert here('out/no run/at all', dataset='nope')[0].startswith('error: ')
    assert not Path('out/no run').exists()


@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='no /proc')
def test_an_out_dir_that_cannot_be_written_is_one_line(work):
    status, _ = here('/proc/no such run')
    assert status.startswith('error: ') and '/proc' in status and '\n' not in status


def test_a_log_that_cannot_grow_stops_the_run_with_its_checkpoint_whole(half, whole):
    name = half('out/full log')
    path = Path(name, 'log.jsonl')
    # So long that it meets the limit before the checkpoint does.
    line = json.dumps({'step': 0, 'note': 'x' * 1000}) + '\n'
    path.write_text(line * (2 * Path(name, 'ckpt.pt').stat().st_size // 1000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 500, hard))
    try:
        status, _ = here(name, init_from='resume')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status.startswith('error: ') and 'too large' in status and '\n' not in status
    assert load(f'{name}/ckpt.pt')['step'] == 6
    good(name, init_from='resume')
    assert [entry for entry in history(name) if 'note' not in entry] == history(whole)[-7:]


def test_a_disk_that_is_really_full_is_one_line_and_nothing_is_lost(small_disk, whole):
    filler = small_disk / 'filler'
    filler.write_bytes(bytes(2**19))
    out = small_disk / 'out'
    status, _ = here(out, init_from='auto')
    assert status.startswith('error: cannot write ') and 'No space left' in status
    filler.unlink()
    good(out, init_from='auto', keep_checkpoints=1)
    assert_same_run(out, whole)
