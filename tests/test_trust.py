"""Whatever happens to a run, nothing is lost and nothing strange is written: results/trust."""

import functools
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import accidents
import pytest
import torch
from accidents import at_call, be_told_to_stop, not_a_number, spoiled, train_with
from conftest import assert_one_line
from runs import (
    FORKS,
    assert_same,
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
    newest,
    read_config,
    refused,
    steps_of_checkpoints,
    training_steps,
    write_log,
)

import train
from comparison.runs import read_state
from lib import rundir
from lib.files import locked
from lib.logs import Log
from lib.machine import INTERRUPTED
from lib.muon import Muon
from lib.rundir import checkpoints

# --- kills ---------------------------------------------------------------------------------------


def meet(accident, out_dir, **options):
    """A training that meets with an accident: (exit status, stdout, stderr)."""
    return finish(fork(train_with, accident, *command_line(out_dir, options)))


# The steps of the checkpoints that a kill at that moment leaves.
KILLS = {
    accidents.die_before_flush: [3],
    accidents.die_before_rename: [3],
    accidents.die_in_an_append: [9, 6],
    accidents.die_in_an_evaluation: [12, 9],
}


@pytest.mark.parametrize('accident', KILLS)
def test_training_killed_and_continued_by_the_same_command_is_bitwise_equal(whole, accident):
    name = f'out/{accident.__name__}'
    options = dict(init_from='auto', save_steps=(), save_interval=3)
    status, _, err = meet(accident, name, **options)
    assert status == -signal.SIGKILL, err
    assert steps_of_checkpoints(name) == KILLS[accident]
    good(name, **options)
    assert_same_run(name, whole)
    assert not list(Path(name).glob('*.tmp'))


@pytest.mark.parametrize(
    'init_from, file',
    [
        ('out/whole/ckpt_6.pt', 'log.jsonl'),
        ('auto', 'config.json'),
        ('resume', 'log.jsonl'),
        ('resume', 'config.json'),
    ],
)
def test_a_start_that_is_killed_is_repeated_by_its_command(half, init_from, file):
    name = f'out/{Path(init_from).name} {file}'
    if init_from == 'resume':
        half(name)
    options = dict(init_from=init_from, max_iters=8)
    accident = functools.partial(accidents.die_before_rename, file)
    status, _, err = meet(accident, name, **options)
    assert status == -signal.SIGKILL, err
    good(name, **options)
    assert [entry['step'] for entry in training_steps(name)] == list(range(8))


# --- signals -------------------------------------------------------------------------------------


def signalled(monkeypatch, number, last_step, out_dir, **options):
    """(exit status, output) of a run that gets a signal in the middle of a step."""

    def send(*args):
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', at_call(last_step + 1, train.train_step, send))
        return here(out_dir, **options)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_step_saves_and_exits_with_status_75(monkeypatch, whole, number):
    name = f'out/{number.name}'
    before = signal.getsignal(number)
    # Also between two lines of the log.
    status, text = signalled(monkeypatch, number, 4, name, log_interval=5)
    assert status == INTERRUPTED == 75 and 'interrupted at step 5; the run is saved' in text
    assert signal.getsignal(number) == before
    assert steps_of_checkpoints(name) == [5]
    good(name, init_from='resume')
    assert 'train 10' in losses(name)
    for key, loss in losses(name).items():
        assert losses(whole)[key] == loss


def test_under_nohup_a_hang_up_stops_nothing(monkeypatch, work):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    status, _ = signalled(monkeypatch, signal.SIGHUP, 2, 'out/nohup', max_iters=4)
    assert status == 0 and signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


@pytest.mark.parametrize('accident', [accidents.lose_its_reader, accidents.have_no_room_for_output])
def test_where_nobody_reads_what_is_printed_the_run_is_saved_and_ends(whole, accident):
    name = f'out/{accident.__name__}'
    status, _, _ = meet(accident, name)
    assert status == 75 and len(steps_of_checkpoints(name)) == 1
    good(name, init_from='auto')
    assert_same_run(name, whole)


def test_a_run_without_a_terminal_goes_on(whole):
    assert meet(accidents.have_no_terminal, 'out/no terminal')[0] == 0
    assert_same_run('out/no terminal', whole)


@pytest.mark.parametrize('step, eval_interval', [(6, 6), (12, 0)])
def test_a_run_stopped_between_two_batches_of_an_evaluation_is_saved_and_then_only_evaluates(
    monkeypatch, whole, step, eval_interval
):
    name = f'out/evaluating {step}'
    options = dict(eval_interval=eval_interval, save_steps=(), max_iters=step)
    batches = train.validation_batches

    def signalled_batches(*args):
        for number, batch in enumerate(batches(*args)):
            if len(training_steps(name)) == step and number == 1:
                be_told_to_stop()
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(train, 'validation_batches', signalled_batches)
        status, text = here(name, **options)
    assert status == 75 and f'interrupted at step {step}; the run is saved' in text
    assert steps_of_checkpoints(name) == [step]

    before = log(name)
    text = good(name, init_from='auto', **options, log_interval=7)
    *kept, resumed, _ = log(name)
    assert kept == before and f'finished at step {step}' in text
    # What made this evaluation is in config.json, and what was before it in the log.
    assert 'log_interval' in resumed['changed']
    assert read_config(name)['log_interval'] == 7
    assert losses(name)[f'validation {step}'] == losses(whole)[f'validation {step}']


def test_a_finished_run_whose_extension_took_no_step_is_finished_by_its_first_command(
    whole, monkeypatch
):
    shutil.copytree(whole, 'out/extended')
    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', Mock(side_effect=OSError('killed')))
        assert here('out/extended', init_from='resume', max_iters=14)[0] == 'error: killed'
    assert read_state('out/extended').kind == 'unfinished'
    good('out/extended', init_from='auto')
    ours, theirs = read_state('out/extended'), read_state(whole)
    assert ours.kind == 'finished' and ours.facts == theirs.facts


def test_a_resumption_that_saved_nothing_is_forgotten_also_where_it_evaluated(half, monkeypatch):
    name = half('out/forgotten')
    (evaluated,) = (entry for entry in evaluations(name) if entry['step'] == 6)
    write_log(Path(name), [entry for entry in log(name) if entry != evaluated])
    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', Mock(side_effect=OSError('killed')))
        assert here(name, init_from='resume', learning_rate=2e-2)[0] == 'error: killed'
    assert 'val' in log(name)[-1] and 'learning_rate' in log(name)[-2]['changed']
    good(name, init_from='resume')
    entries = log(name)
    (place,) = (i for i, entry in enumerate(entries) if 'changed' in entry)
    assert 'learning_rate' not in entries[place]['changed'] and 'val' in entries[place + 1]
    assert [entry['step'] for entry in evaluations(name)].count(6) == 1


def test_a_run_shortened_to_an_evaluation_of_other_text_is_evaluated_again(half, whole):
    name = half('out/short')
    good(name, init_from='resume', max_iters=6, eval_iters=0)
    *_, last = evaluations(name)
    (before,) = (entry for entry in evaluations(whole) if entry['step'] == 6)
    assert last['step'] == 6 and last['val'] != before['val']
    ended = log(name)
    good(name, init_from='resume', max_iters=6, eval_iters=0)
    assert log(name) == ended


# --- the log -------------------------------------------------------------------------------------


def test_a_finished_run_whose_last_line_is_lost_is_evaluated_again(whole):
    shutil.copytree(whole, 'out/cut')
    path = Path('out/cut/log.jsonl')
    path.write_text(path.read_text()[:-60])
    good('out/cut', init_from='auto')
    assert history(log('out/cut')) == history(log(whole))


def test_a_damaged_line_of_the_log_is_left_out_and_the_others_stay(whole, capsys):
    shutil.copytree(whole, 'out/lines')
    path = Path('out/lines/log.jsonl')
    lines = path.read_text().splitlines()
    strange = ['{"step": 1, "lo', '3', '[]', 'null', '{"stdp": 3}', '{"step": "3"}', '\x00']
    path.write_text('\n'.join([*lines[:3], *strange, *lines[3:], '{"step": 12, "los']))
    good('out/lines', init_from='resume', max_iters=14)
    assert log('out/lines')[: len(lines)] == log(whole)
    assert capsys.readouterr().err.count('damaged line') == len(strange) + 1


# --- checkpoints ---------------------------------------------------------------------------------


def test_what_a_run_was_told_to_keep_stays_when_it_is_resumed_with_other_save_steps(work):
    options = dict(eval_interval=0, save_interval=1, keep_checkpoints=1)
    good('out/told', max_iters=4, save_steps=(1, 2, 7), **options)
    for max_iters in (6, 9):
        good('out/told', max_iters=max_iters, save_steps=(5,), init_from='resume', **options)
    assert steps_of_checkpoints('out/told') == [9, 5, 2, 1]


def damaged(content, kind):
    half = len(content) // 2
    flipped = bytes([content[half] ^ 1])
    return {
        'one bit': content[:half] + flipped + content[half + 1 :],
        'truncated': content[:half],
        'text': b'hello',
    }[kind]


@pytest.mark.parametrize('kind', ['one bit', 'truncated', 'text'])
def test_a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_one_before(
    work, whole, kind, capsys
):
    name = f'out/{kind}'
    shutil.copytree(whole, name)
    path = Path(name, 'ckpt_12.pt')
    content = damaged(path.read_bytes(), kind)
    path.write_bytes(content)
    good(name, init_from='auto')
    assert 'ckpt_12.pt' in capsys.readouterr().err
    assert Path(name, 'ckpt_12.pt.damaged').read_bytes() == content
    assert_same_run(name, whole)

    for path in checkpoints(name):
        path.write_bytes(content)
    status, _ = here(name, init_from='auto')
    assert_one_line(status, f'{name}/ckpt_12.pt')


def test_a_link_that_leads_nowhere_hides_no_checkpoint_before_it(half, whole, capsys):
    name = half('out/linked')
    Path(name, 'ckpt_9.pt').symlink_to('/unmounted/ckpt_9.pt')
    good(name, init_from='auto')
    assert 'ckpt_9.pt' in capsys.readouterr().err
    assert Path(name, 'ckpt_9.pt.damaged').is_symlink()
    assert_same_run(name, whole)


def test_a_checkpoint_under_another_steps_name_is_refused(half):
    name = half('out/renamed')
    shutil.copy(f'{name}/ckpt_6.pt', f'{name}/ckpt_11.pt')
    status, _ = here(name, init_from='resume')
    assert_one_line(status, f'{name}/ckpt_11.pt', 'step 6', 'ckpt_6.pt')
    assert steps_of_checkpoints(name) == [6, 6]


def test_a_checkpoint_with_q_k_and_v_in_one_matrix_is_refused_by_the_commit_that_reads_it(whole):
    checkpoint = newest(whole)
    checkpoint['model']['transformer.h.0.attn.c_attn.weight'] = torch.ones(96, 32)
    checkpoint['model_config']['residual_from'] = 'first'
    torch.save(checkpoint, 'out/old.pt')
    refused('out/old.pt', 'commit 01bd433', init_from='out/old.pt')


# --- numbers -------------------------------------------------------------------------------------


def waiting(step):
    """step() of an optimizer, which is called only where the processor has seen that nothing is infinite."""

    def step_or_not(optimizer):
        if not optimizer.__dict__.pop('found_inf'):
            step(optimizer)

    return step_or_not


@pytest.mark.parametrize(
    'spoil, dtype, optimizer, scale',
    [
        (not_a_number, 'float32', 'adamw', None),
        (accidents.infinite, 'float16', 'adamw', 2.0**14),
        (accidents.infinite_for_muon, 'float16', 'muon', 2.0**14),
        (accidents.overflowing, 'float16', 'muon', 2.0**16),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(
    work, monkeypatch, spoil, dtype, optimizer, scale
):
    name = f'out/{spoil.__name__}-{dtype}-{optimizer}'
    step = train.train_step
    options = dict(dtype=dtype, optimizer=optimizer, max_iters=8, eval_interval=0)
    monkeypatch.setattr(train, 'train_step', spoiled(spoil, {3, 5}))
    good(name, **options, save_steps=(3, 4))
    before, after = load(f'{name}/ckpt_3.pt'), load(f'{name}/ckpt_4.pt')
    assert_same(before['model'], after['model'])
    assert_same(before['optimizer'], after['optimizer'])
    steps = training_steps(name)
    assert [entry['grad_norm'] is None for entry in steps] == [n in (3, 5) for n in range(8)]
    assert [entry['skipped'] for entry in steps] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert newest(name)['skipped'] == [2, 0] and log(name)[-1]['val']['mean'] < 5
    assert steps[-1]['scale'] == scale

    monkeypatch.setattr(torch.optim.AdamW, 'step', waiting(torch.optim.AdamW.step))
    monkeypatch.setattr(Muon, 'step', waiting(torch.optim.Muon.step))
    monkeypatch.setattr(train, 'train_step', step)
    monkeypatch.setattr(train, 'train_step', spoiled(spoil, {3, 5}))
    good(f'{name}-waiting', **options, save_steps=(3, 4))
    assert_same_run(f'{name}-waiting', name)


def test_too_many_such_steps_in_a_row_stop_the_run_and_name_its_checkpoints(work, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train, 'train_step', spoiled(not_a_number, {1, 2, *range(4, 99)}))
        options = dict(max_skipped=3, save_interval=2, save_steps=(7,))
        status, _ = here('out/stopped', log_interval=9, **options)
    assert status.startswith('error: 3 steps in a row, up to step 6,')
    assert 'out/stopped/ckpt_6.pt' in status and 'out/stopped/ckpt_4.pt' in status
    assert newest('out/stopped')['skipped'] == [4, 2]
    assert all(value.isfinite().all() for value in newest('out/stopped')['model'].values())
    assert read_state('out/stopped').kind == 'diverged'  # whoever started it
    good('out/stopped', init_from='resume', log_interval=9, **options)
    assert read_state('out/stopped').kind == 'finished'

    monkeypatch.setattr(train, 'train_step', spoiled(not_a_number, range(3)))
    status, _ = here('out/nothing', max_skipped=2, eval_interval=0, save_steps=())
    assert 'no checkpoint has been written yet' in status and '.pt' not in status
    good('out/never', max_skipped=0, max_iters=4)


def test_the_scale_of_float16_has_a_floor(work, monkeypatch):
    monkeypatch.setattr(train, 'train_step', spoiled(not_a_number, range(19)))
    options = dict(eval_interval=0, save_steps=(), gradient_accumulation_steps=1)
    good('out/floor', dtype='float16', max_iters=22, **options)
    scales = [entry['scale'] for entry in training_steps('out/floor')]
    assert scales[:3] == [2.0**15, 2.0**14, 2.0**13] and min(scales) == scales[-1] == 1.0


# --- the world -----------------------------------------------------------------------------------


def hold(folder, held):
    with locked(folder, 'training in'):
        held.set()
        signal.pause()


def test_a_second_run_on_a_folder_is_refused_and_a_dead_ones_lock_is_none(work, whole):
    shutil.copytree(whole, 'out/held')
    held = FORKS.Event()
    holder = fork(hold, 'out/held', held)
    assert held.wait(100)
    status, _ = here('out/held', init_from='resume')
    assert_one_line(status, 'another process', 'out/held')
    # Nor are the settings read of a run that may yet write them.
    with pytest.raises(OSError, match='another process'):
        train.settings_beneath(dict(init_from='resume', out_dir='out/held'))
    holder.kill()
    finish(holder)
    good('out/held', init_from='resume')


def test_nothing_in_a_folder_is_taken_over_before_it_is_locked(half, whole, monkeypatch):
    """Another process writes its last checkpoint and leaves, just before this one gets the lock."""
    name = half('out/left')

    def locked_late(folder, *args):
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        return locked(folder, *args)

    monkeypatch.setattr('lib.rundir.locked', locked_late)
    good(name, init_from='auto')
    # Trained again, they would have another speed.
    assert training_steps(name) == training_steps(whole)


def test_an_out_dir_that_is_no_folder_is_refused_and_a_refused_start_leaves_none(work):
    assert_one_line(here('out/no run/at all', dataset='nope')[0])
    assert not Path('out/no run').exists()
    Path('given').mkdir()
    assert_one_line(here('given', dataset='nope')[0])
    assert Path('given').is_dir()
    Path('dangling').symlink_to('nowhere')
    Path('round').symlink_to('round')
    for out_dir in ('dangling', 'round', 'round/run', 'data/tiny/meta.json', '/proc/no such run'):
        status, _ = here(out_dir)
        assert_one_line(status, out_dir)
        assert 'Errno 17' not in status


def test_a_disk_that_is_really_full_is_one_line_and_nothing_is_lost(whole, monkeypatch):
    def open_full(path, mode):
        return open('/dev/full' if path.name == 'ckpt_8.pt.tmp' else path, mode)

    options = dict(init_from='auto', keep_checkpoints=1, save_steps=(), save_interval=4)
    with monkeypatch.context() as patch:
        patch.setattr('lib.files.open', open_full, raising=False)
        status, _ = here('out/full disk', **options)
    assert_one_line(status, 'cannot write out/full disk/ckpt_8.pt', 'No space left')
    good('out/full disk', **options)
    assert_same_run('out/full disk', whole)


def test_a_log_that_cannot_grow_is_one_line_and_what_was_saved_goes_on(half, whole, monkeypatch):
    class FullLog(Log):
        def __init__(self, *args):
            super().__init__(*args)
            self.file = open('/dev/full', 'w', buffering=1)

    name = half('out/full log')
    with monkeypatch.context() as patch:
        patch.setattr(rundir, 'Log', FullLog)
        status, _ = here(name, init_from='resume')
    assert status == f"error: [Errno 28] No space left on device: '{name}/log.jsonl'"
    good(name, init_from='resume')
    assert_same_run(name, whole)


def test_ctrl_c_before_the_first_step_is_no_stack_trace(work):
    status, _, err = meet(accidents.be_interrupted, 'out/early')
    assert (status, err) == (130, '')
