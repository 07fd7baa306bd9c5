"""train.py: a run is a function of its settings, however often it stopped."""

import contextlib
import dataclasses
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from configurator import configure

import pytest
import torch
from conftest import ROOT, contents
from runs import (
    NO_MODEL,
    TINY,
    assert_close_losses,
    assert_same,
    assert_same_run,
    command_line,
    evaluations,
    good,
    load,
    log,
    losses,
    model_of,
    newest,
    read_config,
    steps_of_checkpoints,
    succeed,
    training_steps,
)

import train
from lib.data import Dataset, TrainingRows
from lib.machine import Machine, Signals
from lib.rundir import FACTS
from model import GPT, GPTConfig

# --- what a run writes ---------------------------------------------------------------------------


def test_the_loss_falls_and_every_step_is_logged(whole):
    steps = training_steps(whole)
    assert [entry['step'] for entry in steps] == list(range(12))
    assert steps[0]['loss'] > 4.1 and steps[-1]['loss'] < steps[0]['loss'] - 0.5  # ln 64 = 4.16
    for entry in steps:
        assert entry['tokens'] == (entry['step'] + 1) * 2 * 4 * 32
        assert entry['grad_norm'] > 0 and entry['tok_per_s'] > 0
        schedule = train.TrainConfig(warmup_iters=3, max_iters=12, learning_rate=1e-2)
        assert entry['lr'] == train.learning_rate(entry['step'], schedule)

    assert [entry['step'] for entry in evaluations(whole)] == [0, 6, 12]
    for entry in evaluations(whole):
        val = entry['val']
        assert list(val) == ['A', 'B', 'C', 'mean']
        assert val['mean'] == pytest.approx((val['A'] + val['B'] + val['C']) / 3)


def test_the_first_lines_and_config_json_say_what_produced_the_run(work):
    text = good('out/said', max_iters=1, v_residual=True)
    config = read_config('out/said')
    produced_by = {
        **TINY,
        'max_iters': 1,
        'v_residual': True,
        'save_steps': (6,),
        'out_dir': 'out/said',
        'torch': str(torch.__version__),
        'dtype': 'float32',
        'world_size': 1,
        'device': 'cpu',
    }
    for name, value in produced_by.items():
        assert config[name] == (list(value) if isinstance(value, tuple) else value)
        assert re.search(rf'^{name} +{re.escape(str(value))}$', text, re.M)
    assert all(config[name] for name in ('commit', 'cpu', 'numpy', 'python', 'started', 'ended'))
    assert config['threads'] == 1 and config['load'] >= 0
    assert (
        'C (20). Each domain that has any is 33%' in config['caution'] and config['caution'] in text
    )
    # All else in it would be taken for the settings of a fork.
    settings = {
        field.name for kind in (train.TrainConfig, GPTConfig) for field in dataclasses.fields(kind)
    }
    assert set(config) <= settings | FACTS


def test_a_seed_decides_the_weights_and_the_data(work):
    good('out/seeded', seed=2, max_iters=1, save_steps=(0,))
    start = load('out/seeded/ckpt_0.pt')
    model = GPT(GPTConfig(**start['model_config']), seed=2)
    assert_same(start['model'], model.state_dict())
    rows = torch.from_numpy(TrainingRows(Dataset('tiny'), 32, 2).batch(8))
    loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())[1].item()
    assert training_steps('out/seeded')[0]['loss'] == pytest.approx(loss, abs=1e-5)


def test_muon_warms_up_and_its_gradients_are_unscaled(whole):
    options = dict(optimizer='muon', dtype='float16', max_iters=1, save_steps=(0,))
    good('out/warming', **options)
    before, after = (load(f'out/warming/ckpt_{n}.pt')['model'] for n in (0, 1))
    (step,) = training_steps('out/warming')
    assert step['grad_norm'] == pytest.approx(training_steps(whole)[0]['grad_norm'], rel=1e-2)
    assert all((after[name] - w).abs().max() < 1e-6 for name, w in before.items())  # rate 1e-7


def test_checkpoints_are_written_every_save_interval_at_save_steps_and_at_the_end(work):
    options = dict(save_interval=3, save_steps=(1,), keep_checkpoints=9)
    good('out/saved', max_iters=7, **options)
    assert steps_of_checkpoints('out/saved') == [7, 6, 3, 1]
    options = dict(save_interval=0, save_steps=(), eval_interval=0, log_interval=3)
    good('out/end', max_iters=4, **options)
    assert sorted(os.listdir('out/end')) == ['ckpt_4.pt', 'config.json', 'log.jsonl']
    entries = [(entry['step'], 'val' in entry) for entry in log('out/end')]
    assert entries == [(0, False), (3, False), (4, True)]


def test_learned_mixing_weights_are_logged_at_evaluations(work):
    learned = dict(v_residual=True, residual_weights='learned', denseformer=True)
    good('out/mixing', max_iters=2, eval_interval=2, **learned)
    first, last = (entry['mixing'] for entry in evaluations('out/mixing'))
    assert first['transformer.h.1.attn.v.residual_lambda'] == [0.5, 0.5]
    assert first['transformer.dwa.1'] == [0.0, 0.0, 1.0]
    assert last.keys() == first.keys() and last != first


@pytest.mark.parametrize(
    'eval_iters, starts',
    [
        # 14 of A's 21 rows, evenly spaced; 9 rows of B are no multiple of the batch of 2; the one row of
        # C has 20 tokens.
        (7, {'A': [32 * (i * 20 // 13) for i in range(14)], 'B': range(0, 288, 32), 'C': [0]}),
        # Every token of the validation split but each file's first.
        (0, {'A': range(0, 699, 32), 'B': range(0, 299, 32), 'C': [0]}),
    ],
)
def test_the_validation_loss_is_the_mean_over_tokens_of_a_slow_evaluation(work, eval_iters, starts):
    words = command_line('out/never', {'eval_iters': eval_iters, 'batch_size': 2})
    settings, config = configure(train.TrainConfig, GPTConfig, argv=words)
    dataset = Dataset('tiny')
    model = GPT(config, seed=3)
    model.lm_head.weight.data *= 20  # rows differ
    with contextlib.ExitStack() as closing:
        result = train.evaluate(model, dataset, settings, Machine('cpu'), Signals(closing))
    assert model.training
    for domain, begins in starts.items():
        text = torch.from_numpy(dataset.read('validation', domain, 0, 9999))
        slow = []
        for first in begins:
            x, y = text[first:-1][:32], text[first + 1 :][:32]
            logits, _ = model(x[None])
            slow += (-logits[0].log_softmax(dim=-1)[range(len(y)), y]).tolist()
        assert result[domain] == pytest.approx(sum(slow) / len(slow), abs=1e-5)
    assert result['mean'] == pytest.approx((result['A'] + result['B'] + result['C']) / 3)


# --- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'options',
    [
        dict(dtype='float32', dropout=0.2, seed=-1),
        dict(dtype='bfloat16', seed=10**20, v_residual=True, residual_weights='learned'),
        dict(dtype='float16', dropout=0.2, share_v=True),
        dict(
            optimizer='muon',
            table_rate=2.0,
            qk_norm=True,
            v_residual='first+token',
            residual_weights='head',
            residual_layers='(0, 1)',
        ),
    ],
    ids=str,
)
def test_resume_is_bitwise_equal(work, options):
    name = 'out/' + '-'.join(map(str, options.values()))
    good(name, **options)
    good(f'{name}-resumed', **options, max_iters=6)
    good(f'{name}-resumed', **options, init_from='resume')
    assert_same_run(name, f'{name}-resumed')


def test_resuming_a_finished_run_changes_nothing(whole, monkeypatch):
    before = contents(whole)
    monkeypatch.setattr(train, 'provenance', lambda machine: {'commit': 'a later one'})
    good(whole, init_from='auto')  # as `make demo` does
    assert contents(whole) == before


def changed_in(out_dir):
    """What a run that was resumed once was changed in."""
    (changed,) = (entry['changed'] for entry in log(out_dir) if 'changed' in entry)
    return changed


def test_changes_that_resume_allows_are_logged(half):
    name = half('out/changed')
    changes = {'weight_decay': [0.1, 0.5], 'beta2': [0.95, 0.9], 'batch_size': [4, 2]}
    changes |= {'gradient_accumulation_steps': [2, 4], 'max_iters': [12, 8]}
    new = {setting: after for setting, (_, after) in changes.items()}
    good(name, init_from='resume', **new)
    assert changed_in(name) == {**changes, 'out_dir': ['out/whole', name]}


def test_a_table_at_a_rate_of_zero_stays_as_it_started(work):
    table = dict(v_residual='token', residual_layers='(1,)', table_rate=0.0)
    good('out/table', **table, max_iters=2)
    checkpoint = newest('out/table')
    start = GPT(
        GPTConfig(**checkpoint['model_config']), checkpoint['settings']['seed']
    ).state_dict()
    moved = {name for name, w in checkpoint['model'].items() if not torch.equal(w, start[name])}
    assert moved == start.keys() - {'transformer.ve.1.weight'}


def test_init_from_a_checkpoint_takes_its_weights_and_its_model(whole, capsys):
    # A neutral start: the vanilla model's loss.
    neutral = dict(v_residual=True, residual_weights='learned', residual_lambda=(0.0, 1.0))
    options = dict(warmup_iters=0, seed=7, **neutral)
    path = f'{whole}/ckpt_12.pt'
    good('out/weights', init_from=whole, max_iters=1, **options)
    note = capsys.readouterr().err
    assert path in note and 'residual_lambda' in note and 'v_residual=False, not True' in note
    first = log('out/weights')[0]
    assert first['step'] == 0 and first['val'] == log(whole)[-1]['val']
    moments = newest('out/weights')['optimizer']['state'].values()
    assert {state['step'].item() for state in moments} == {1.0}

    # Resumed, it is still known where it comes from, and what made its first part.
    first_part = read_config('out/weights')
    good('out/weights', init_from='resume', max_iters=2, **options)
    assert read_config('out/weights')['origin'] == newest('out/weights')['origin'] == whole
    assert newest(whole)['origin'] == 'scratch'
    (resumed,) = (entry for entry in log('out/weights') if 'changed' in entry)
    assert resumed['step'] == 1 and resumed['changed']['max_iters'] == [1, 2]
    assert {'started', 'load', 'commit'} <= resumed['before'].keys()
    assert all(first_part[name] == value for name, value in resumed['before'].items())

    # Where nobody says what the model is, the checkpoint does.
    good('out/taken', init_from='out/weights', max_iters=1, warmup_iters=0, **NO_MODEL, dropout=0.1)
    assert 'from out/weights/ckpt_2.pt: ' in (said := capsys.readouterr().err)
    assert "v_residual=True residual_weights='learned'" in said and 'dropout' not in said
    assert evaluations('out/taken')[0]['val'] == evaluations('out/weights')[-1]['val']


def copied(run, step, folder):
    """A copy of a run's folder as it was at a checkpoint, by the commands at the head of train.py."""
    Path(folder).mkdir()
    for name in ('config.json', 'log.jsonl', f'ckpt_{step}.pt'):
        shutil.copy(f'{run}/{name}', folder)


def test_the_cooldown_of_a_copy_is_bitwise_the_run_whose_own_cooldown_begins_there(work):
    options = dict(lr_decay_iters=0, dropout=0.2, dtype='float16', seed=3, v_residual=True)
    good('out/trunk', **options, cooldown_iters=2)
    good('out/straight', **options, cooldown_iters=4, max_iters=10)
    before = contents('out/trunk')
    copied('out/trunk', 6, 'out/copy')
    words = ['--cooldown_iters=4', '--max_iters=10']
    succeed(train.main, '--init_from=resume', '--out_dir=out/copy', *words)
    assert_same_run('out/copy', 'out/straight')
    assert contents('out/trunk') == before

    rates = [entry['lr'] for entry in training_steps('out/copy')]
    assert rates[3:7] == [1e-2] * 4 and steps_of_checkpoints('out/copy') == [10, 6]
    falling = [1e-2 - share * (1e-2 - 6e-5) for share in (0.25, 0.5, 0.75)]
    assert rates[7:] == pytest.approx(falling)
    changed = changed_in('out/copy')
    assert changed['cooldown_iters'] == [2, 4] and changed['max_iters'] == [12, 10]
    assert read_config('out/copy')['origin'] == 'scratch'


# --- memory --------------------------------------------------------------------------------------


def test_half_the_batch_and_twice_as_many_micro_steps_are_the_same_run(work, whole):
    good('out/halved', batch_size=2, gradient_accumulation_steps=4, eval_iters=4)
    assert_close_losses('out/halved', whole)


def test_a_run_with_activation_checkpointing_is_the_same_run(work, whole, monkeypatch):
    checkpoint = mock.Mock(wraps=torch.utils.checkpoint.checkpoint)
    monkeypatch.setattr(torch.utils.checkpoint, 'checkpoint', checkpoint)
    good('out/checkpointed', activation_checkpointing=True)
    assert_close_losses('out/checkpointed', whole)
    assert checkpoint.called


# --- precision -----------------------------------------------------------------------------------


def test_float16_trains(work, whole):
    good('out/fp16', dtype='float16')
    assert_close_losses('out/fp16', whole, tolerance=0.02)
    assert losses('out/fp16') != losses(whole)  # rounded otherwise
    assert {entry['scale'] for entry in training_steps('out/fp16')} == {65536.0}


# --- the schedule and the groups -----------------------------------------------------------------


def test_the_learning_rate_is_the_papers():
    settings = train.TrainConfig()
    rates = {step: train.learning_rate(step, settings) for step in (0, 60, 120, 5060, 10000, 20000)}
    expected = [1e-7, (1e-7 + 6e-4) / 2, 6e-4, (6e-4 + 6e-5) / 2, 6e-5, 6e-5]
    assert list(rates.values()) == pytest.approx(expected)
    for options, step, rate in (
        (dict(decay_lr=False), 3, 6e-4),
        (dict(warmup_iters=0), 0, 6e-4),
        (dict(lr_decay_iters=500), 500, 6e-5),
    ):
        assert train.learning_rate(step, train.TrainConfig(**options)) == pytest.approx(rate)


@pytest.mark.parametrize('grad_clip', [0.0, 0.05, 1000.0])
def test_a_gradient_is_clipped_to_its_norm_and_with_0_not_at_all(work, monkeypatch, grad_clip):
    """Plain gradient descent at rate 1 moves the weights by what is left of the gradient."""

    def descent(model, settings):
        groups = [{'params': [*model.named_parameters()], 'rate': 1.0}]
        return [torch.optim.SGD(groups, fused=True)]

    monkeypatch.setattr(train, 'make_optimizers', descent)
    name = f'out/clipped to {grad_clip}'
    options = dict(max_iters=1, warmup_iters=0, learning_rate=1.0, save_steps=(0,))
    good(name, grad_clip=grad_clip, **options)
    before, after = (load(f'{name}/ckpt_{n}.pt')['model'] for n in (0, 1))
    moved = torch.cat([(after[key] - old).flatten() for key, old in before.items()]).norm().item()
    (step,) = training_steps(name)
    norm = step['grad_norm']  # of the whole gradient
    assert 0.05 < norm < 1000
    assert moved == pytest.approx(min(norm, grad_clip) if grad_clip else norm, rel=1e-4)


# --- speed ---------------------------------------------------------------------------------------


def test_speed_is_that_of_steps_alone_however_many_a_log_line_stands_for(work, monkeypatch):
    """By a clock that knows only that a step takes 2 seconds, and an evaluation 100."""
    now = [0.0]

    def taking(seconds, function):
        def timed(*args):
            now[0] += seconds
            return function(*args)

        return timed

    monkeypatch.setattr(Machine, 'peak_flops', lambda machine: 1e12)
    monkeypatch.setattr('lib.machine.time', SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(train, 'train_step', taking(2, train.train_step))
    monkeypatch.setattr(train, 'evaluate', taking(100, train.evaluate))
    good('out/clock', log_interval=3, eval_interval=4)
    assert [entry['step'] for entry in training_steps('out/clock')] == [0, 3, 6, 9]
    flops = model_of('out/clock').flops_per_token(32)
    for entry in training_steps('out/clock'):
        assert entry['tok_per_s'] == 2 * 4 * 32 / 2
        assert entry['mfu'] == pytest.approx(2 * 4 * 32 / 2 * flops / 1e12)


# --- wandb ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('broken', [False, True])
def test_wandb_gets_the_settings_and_the_log_and_stops_nothing(work, monkeypatch, broken):
    run = mock.Mock(id='abc123')
    run.log.side_effect = RuntimeError('the network is gone') if broken else None
    calls = []
    wandb = SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    name = f'wandb {broken}'
    good(f'out/{name}', wandb_log=True, max_iters=1, wandb_project='p')
    good(work / 'out' / name, wandb_log=True, max_iters=2, init_from='resume')  # the same folder
    assert calls[0]['project'] == 'p' and calls[0]['config']['n_embd'] == 32
    run.define_metric.assert_called_with('*', step_metric='step')
    logged = [
        entry for (entry,), _ in run.log.call_args_list
    ]  # without wandb's own step, which must rise
    assert [entry['step'] for entry in logged] == [0, 0, 1, 1, 2]
    assert 'val/mean' in logged[0] and 'loss' in logged[1]
    # A copy is a run of its own.
    copied(f'out/{name}', 2, f'out/{name}, copied')
    good(f'out/{name}, copied', wandb_log=True, max_iters=3, init_from='resume')
    assert [call['id'] for call in calls] == [None, 'abc123', None]
    assert [call['name'] for call in calls] == [name, name, f'{name}, copied']


# --- the core stands alone -----------------------------------------------------------------------


def other_packages():
    """Every package of the requirements but torch and numpy."""
    text = ''.join((ROOT / f'requirements{kind}.txt').read_text() for kind in ('', '-dev'))
    return {*re.findall(r'^([\w-]+)==', text, flags=re.MULTILINE)} - {'torch', 'numpy'}


def test_training_works_with_no_other_package_than_torch_and_numpy(whole, monkeypatch, capsys):
    """tests/test_house.py sees what is imported at the start; here is what is imported on the way."""
    for name in other_packages():
        monkeypatch.setitem(sys.modules, name, None)
    good('out/core', max_iters=2, wandb_log=True)
    assert 'no wandb' in capsys.readouterr().err
    assert losses('out/core')['train 0'] == losses(whole)['train 0']
