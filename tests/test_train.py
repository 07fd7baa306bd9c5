"""train.py: a run is a function of its settings, however often it stopped."""

import dataclasses
import math
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from runs import (
    TINY,
    assert_close_losses,
    assert_same_run,
    command_line,
    evaluations,
    finish,
    good,
    load,
    log,
    losses,
    newest,
    read_config,
    same,
    snapshot,
    start,
    steps_of_checkpoints,
    training_steps,
)
from torch import nn
from variants import VARIANTS, config_of, tokens

import train
from data import Dataset, validation_batches
from machine import Machine, Signals
from model import GPT, MLP, GPTConfig
from rundir import FACTS

# --- what a run writes ---------------------------------------------------------------------------


def test_the_loss_falls_and_every_step_is_logged(whole):
    steps = training_steps(whole)
    assert [entry['step'] for entry in steps] == list(range(12))
    assert steps[0]['loss'] > 4.1 and steps[-1]['loss'] < steps[0]['loss'] - 0.5  # ln 64 = 4.16
    for entry in steps:
        assert entry['tokens'] == (entry['step'] + 1) * 4 * 2 * 32
        assert entry['grad_norm'] > 0 and entry['tok_per_s'] > 0

    assert [entry['step'] for entry in evaluations(whole)] == [0, 6, 12]
    for entry in evaluations(whole):
        val = entry['val']
        assert list(val) == ['A', 'B', 'C', 'mean']
        assert val['mean'] == pytest.approx((val['A'] + val['B'] + val['C']) / 3)


def test_the_terminal_shows_the_numbers_of_the_log(work):
    lines = good('out/printed', log_interval=1).splitlines()
    shown = [line.split(' | ') for line in lines if line.startswith('step ')]
    for entry, words in zip(log('out/printed'), shown, strict=True):
        step = f'step {entry["step"]}'
        if 'val' in entry:
            assert words == [step, f'validation loss {entry["val"]["mean"]:.4f}']
            continue
        loss, lr, norm = (entry[name] for name in ('loss', 'lr', 'grad_norm'))
        assert words[:4] == [step, f'loss {loss:.4f}', f'lr {lr:.2e}', f'norm {norm:.3f}']
        speed = float(words[4].removesuffix(' tok/s').replace(',', ''))
        assert speed == pytest.approx(entry['tok_per_s'], abs=1)


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
    assert config['commit'] and config['cpu'] and config['threads'] == 1
    # All else in it would be taken for the settings of a fork.
    settings = {
        field.name for kind in (train.TrainConfig, GPTConfig) for field in dataclasses.fields(kind)
    }
    assert set(config) <= settings | FACTS


def test_a_checkpoint_loads_with_weights_only_and_has_no_wrapper_prefixes(whole):
    checkpoint = newest(whole)
    model = GPT(GPTConfig(**checkpoint['model_config']))
    assert set(checkpoint['model']) == set(model.state_dict())
    assert checkpoint['step'] == 12 and checkpoint['data']['row'] == 12 * 8
    assert checkpoint['settings']['learning_rate'] == 1e-2 and checkpoint['wandb_id'] is None


def test_checkpoints_are_written_every_save_interval_at_save_steps_and_at_the_end(work):
    options = dict(save_interval=3, save_steps=(1,), keep_checkpoints=9)
    good('out/saved', max_iters=7, **options)
    assert steps_of_checkpoints('out/saved') == [7, 6, 3, 1]
    good('out/end', max_iters=2, save_interval=0, save_steps=())
    assert sorted(os.listdir('out/end')) == ['ckpt_2.pt', 'config.json', 'log.jsonl']


def test_with_an_eval_interval_of_zero_only_the_end_is_evaluated(work):
    good('out/sparse', max_iters=7, eval_interval=0, log_interval=3, save_steps=())
    entries = [(entry['step'], 'val' in entry) for entry in log('out/sparse')]
    assert entries == [(0, False), (3, False), (6, False), (7, True)]


def test_learned_mixing_weights_are_logged_at_evaluations(work):
    learned = dict(v_residual=True, residual_learned=True, denseformer=True)
    good('out/mixing', max_iters=2, eval_interval=2, **learned)
    first, last = (entry['mixing'] for entry in evaluations('out/mixing'))
    assert first['transformer.h.1.attn.residual_lambda'] == [0.5, 0.5]
    assert first['transformer.dwa.1'] == [0.0, 0.0, 1.0]
    assert last.keys() == first.keys() and last != first


def test_only_the_first_process_asks_what_produced_the_run(monkeypatch):
    monkeypatch.setattr(train, 'provenance', lambda machine: pytest.fail('asked'))
    start_at_0 = train.Start(None, None, None, None, None)
    machine = SimpleNamespace(is_first=False)
    assert not train.Reporter(train.TrainConfig(), GPTConfig(), machine, start_at_0).active


def split(options):
    """(TrainConfig, GPTConfig) of settings."""
    shape = {field.name for field in dataclasses.fields(GPTConfig)}
    ours = {name: value for name, value in options.items() if name not in shape}
    theirs = {name: value for name, value in options.items() if name in shape}
    return train.TrainConfig(**ours), GPTConfig(**theirs)


@pytest.mark.parametrize(
    'eval_iters, tokens_counted',
    [
        # 9 rows of B are no multiple of the batch of 2; the one row of C has 20 tokens.
        (7, {'B': 9 * 32, 'C': 19}),
        # Every token of the validation split but each file's first.
        (0, {'A': 699, 'B': 299, 'C': 19}),
    ],
)
def test_the_validation_loss_is_the_mean_over_tokens_of_a_slow_evaluation(
    work, eval_iters, tokens_counted
):
    settings, config = split({**TINY, 'eval_iters': eval_iters})
    dataset = Dataset('tiny')
    model = GPT(config, seed=3)
    model.lm_head.weight.data *= 20  # rows differ
    with Signals() as signals:
        result = train.evaluate(model, dataset, settings, Machine('cpu'), signals)
    assert model.training
    for domain, count in tokens_counted.items():
        text = torch.from_numpy(dataset.read('validation', domain, 0, 9999))[: count + 1]
        slow = []
        for first in range(0, count, 32):
            x, y = text[first:-1][:32], text[first + 1 :][:32]
            logits, _ = model(x[None])
            slow += (-logits[0].log_softmax(dim=-1)[range(len(y)), y]).tolist()
        assert len(slow) == count
        assert result[domain] == pytest.approx(sum(slow) / count, abs=1e-5)
    assert result['mean'] == pytest.approx((result['A'] + result['B'] + result['C']) / 3)


def test_half_the_batch_and_twice_the_iterations_evaluate_the_same_text(work):
    """As the advice says that a run gets which has too little memory."""
    assert 'double gradient_accumulation_steps and eval_iters' in train.LESS_MEMORY
    dataset = Dataset('tiny')
    texts = []
    for batch_size, iters in ((4, 3), (2, 6)):
        batches = list(validation_batches(dataset, 'A', 32, batch_size, iters))
        assert len(batches) == iters
        texts.append(torch.cat([x for x, _ in batches]))
    assert torch.equal(*texts)


@pytest.mark.parametrize('seed', [0, -1, 10**20])
def test_any_integer_is_a_seed(work, seed):
    good(f'out/seed{seed}', seed=seed, dropout=0.1, max_iters=1)
    assert newest(f'out/seed{seed}')['settings']['seed'] == seed


def test_eval_only_prints_the_losses_and_writes_nothing(whole, work):
    before = snapshot('out')
    text = good(whole, init_from='resume', eval_only=True)
    assert f'mean {evaluations(whole)[-1]["val"]["mean"]:.4f}' in text
    assert snapshot('out') == before


# --- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'options',
    [
        dict(dtype='float32', dropout=0.2),
        dict(dtype='bfloat16', v_residual=True, residual_learned=True),
        dict(dtype='float16', dropout=0.2),
        dict(dtype='float16', share_v=True),
    ],
    ids=str,
)
def test_resume_is_bitwise_equal(work, options):
    name = 'out/' + '-'.join(map(str, options.values()))
    good(name, **options)
    good(f'{name}-resumed', **options, max_iters=6)
    good(f'{name}-resumed', **options, init_from='resume')
    assert_same_run(name, f'{name}-resumed')
    assert (newest(name)['scaler'] != {}) == (options['dtype'] == 'float16')


def test_a_forks_random_numbers_are_those_of_the_seed_and_the_step(work, monkeypatch):
    """They are repeated on resume, though there is no dropout."""
    forward = MLP.forward

    def noisy(mlp, x):
        noise = torch.rand(x.shape) if mlp.training else 0
        return forward(mlp, x) + noise

    monkeypatch.setattr(MLP, 'forward', noisy)
    good('out/noisy')
    good('out/noisy-resumed', max_iters=6)
    good('out/noisy-resumed', init_from='resume')
    assert_same_run('out/noisy', 'out/noisy-resumed')


def test_init_from_auto_starts_a_run_and_then_resumes_it(work, whole):
    good('out/auto', init_from='auto', max_iters=6)
    text = good('out/auto', init_from='auto')
    assert 'step 5 ' not in text and 'step 6 ' in text
    assert_same_run('out/auto', whole)


def test_log_lines_past_the_checkpoint_are_cut_on_resume(half, whole):
    name = half('out/cut')
    with open(f'{name}/log.jsonl', 'a') as file:
        file.write('\0\0\0{"step": 13')
    good(name, init_from='resume')
    assert_same_run(name, whole)


def test_resuming_a_finished_run_changes_nothing(whole, monkeypatch):
    before = snapshot(whole)
    monkeypatch.setattr(train, 'provenance', lambda machine: {'commit': 'a later one'})
    good(whole, init_from='auto')  # as `make demo` does
    assert snapshot(whole) == before


def test_config_json_says_what_the_newest_part_of_a_run_was_made_with(half, monkeypatch):
    name = half('out/newest')
    monkeypatch.setattr(train, 'provenance', lambda machine: {'commit': 'a later one'})
    good(name, init_from='resume', max_iters=7)
    config = read_config(name)
    assert (config['commit'], config['max_iters']) == ('a later one', 7)


def test_changes_that_resume_allows_take_effect_and_are_logged(half):
    name = half('out/changed')
    changes = {
        'weight_decay': [0.1, 0.5],
        'beta2': [0.95, 0.9],
        'learning_rate': [0.01, 0.001],
        'batch_size': [2, 1],
        'gradient_accumulation_steps': [4, 8],
        'max_iters': [12, 8],
    }
    new = {setting: after for setting, (_, after) in changes.items()}
    text = good(name, init_from='resume', **new)
    (changed,) = (entry['changed'] for entry in log(name) if 'changed' in entry)
    assert changed == {**changes, 'out_dir': ['out/whole', name]}
    assert 'weight_decay' in text
    groups = newest(name)['optimizer']['param_groups']
    assert [group['weight_decay'] for group in groups] == [0.5, 0.0]
    assert all(tuple(group['betas']) == (0.9, 0.9) for group in groups)


@pytest.mark.parametrize('before, after', [('float32', 'float16'), ('float16', 'bfloat16')])
def test_precision_may_change_on_resume(work, before, after):
    name = f'out/{before}-{after}'
    good(name, dtype=before, max_iters=6)
    good(name, dtype=after, max_iters=8, init_from='resume')
    steps = training_steps(name)
    assert [entry['step'] for entry in steps] == list(range(8))
    assert steps[-1]['scale'] == (65536.0 if after == 'float16' else None)


def test_init_from_a_checkpoint_takes_its_weights_and_nothing_else(whole, capsys):
    # A neutral start: the vanilla model's loss.
    neutral = dict(v_residual=True, residual_learned=True, residual_lambda=(0.0, 1.0))
    good('out/weights', init_from=f'{whole}/ckpt_12.pt', max_iters=1, seed=7, **neutral)
    note = (
        f'note: {whole}/ckpt_12.pt was trained as another model: residual_lambda=(), here (0.0, 1.0); '
        'residual_learned=False, here True; v_residual=False, here True'
    )
    assert note in capsys.readouterr().err
    first = log('out/weights')[0]
    assert first['step'] == 0 and first['val'] == log(whole)[-1]['val']
    checkpoint = newest('out/weights')
    assert checkpoint['step'] == 1
    assert checkpoint['origin'] == f'{whole}/ckpt_12.pt' and newest(whole)['origin'] == 'scratch'
    moments = checkpoint['optimizer']['state'].values()
    assert {state['step'].item() for state in moments} == {1.0}

    # Resumed, it is still known where it comes from, and what made its first part.
    first_part = read_config('out/weights')
    good('out/weights', init_from='resume', max_iters=2, seed=7, **neutral)
    config = read_config('out/weights')
    assert (config['init_from'], config['origin']) == ('resume', f'{whole}/ckpt_12.pt')
    assert newest('out/weights')['origin'] == f'{whole}/ckpt_12.pt'
    (resumed,) = (entry for entry in log('out/weights') if 'provenance' in entry)
    assert resumed['step'] == 1 and resumed['changed'] == {'max_iters': [1, 2]}
    assert resumed['provenance']['commit'] == config['commit']
    assert 'note:' not in capsys.readouterr().err

    # The same model is taken without a note.
    good('out/same', init_from=f'{whole}/ckpt_12.pt', max_iters=1, dropout=0.1)
    assert 'note:' not in capsys.readouterr().err
    assert {'date', 'load', 'commit'} <= resumed['before'].keys()
    assert all(first_part[name] == value for name, value in resumed['before'].items())


# --- memory --------------------------------------------------------------------------------------


def loss_and_gradients(model, call):
    x, y = tokens(2, 32), tokens(2, 32, seed=1)
    torch.manual_seed(3)
    _, loss = call(x, y)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def assert_checkpointing_changes_nothing(config, compiled=False):
    plain = GPT(config)
    loss, gradients = loss_and_gradients(plain, plain)
    model = call = GPT(config)
    train.checkpoint_blocks(model)
    if compiled:
        torch.compiler.reset()
        call = torch.compile(model, backend='aot_eager', fullgraph=True)
    again, gradients_again = loss_and_gradients(model, call)
    assert again == pytest.approx(loss, abs=1e-6)
    for key, gradient in gradients_again.items():
        torch.testing.assert_close(gradient, gradients[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('name', VARIANTS)
def test_activation_checkpointing_changes_no_loss_and_no_gradient(name):
    assert_checkpointing_changes_nothing(config_of(name, n_layer=4))


def test_activation_checkpointing_repeats_dropout():
    assert_checkpointing_changes_nothing(config_of('gpt2 ResFormer', dropout=0.1))


@pytest.mark.parametrize('name', ['ResFormer CLA', 'cross from all, GQA'])
def test_activation_checkpointing_compiles_to_one_graph(name):
    assert_checkpointing_changes_nothing(config_of(name), compiled=True)


def bytes_saved_for_backward(model):
    """What a forward pass keeps, besides the weights."""
    sizes = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.zeros((2, 64), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(x, x)
    weights = {p.data_ptr() for p in model.parameters()}
    return sum(size for pointer, size in sizes.items() if pointer not in weights)


def test_activation_checkpointing_saves_fewer_bytes_for_the_backward_pass():
    size = dict(n_layer=4, n_head=2, n_embd=32, block_size=64, vocab_size=64)
    model = GPT(GPTConfig(**size, v_residual=True))
    without = bytes_saved_for_backward(model)
    train.checkpoint_blocks(model)
    assert bytes_saved_for_backward(model) < without / 4


def test_a_run_with_activation_checkpointing_is_the_same_run(work, whole):
    good('out/checkpointed', activation_checkpointing=True)
    assert_close_losses('out/checkpointed', whole)


# --- precision -----------------------------------------------------------------------------------


def test_float16_trains(work, whole):
    good('out/fp16', dtype='float16')
    assert_close_losses('out/fp16', whole, tolerance=0.02)
    assert {entry['scale'] for entry in training_steps('out/fp16')} == {65536.0}


def test_float16_skips_a_step_that_overflows(half):
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0**40)
    scaler.scale(torch.zeros(1))
    name = half('out/overflow', scaler=scaler.state_dict())
    before = newest(name)
    good(name, init_from='resume', dtype='float16', max_iters=7)
    last = training_steps(name)[-1]
    assert last['step'] == 6 and last['grad_norm'] is None
    assert last['scale'] == 2.0**39 and math.isfinite(last['loss'])
    after = newest(name)
    assert same(before['model'], after['model'])
    assert same(before['optimizer']['state'], after['optimizer']['state'])


def test_a_diverged_run_still_writes_a_log_of_json(half):
    name = half('out/diverged')
    checkpoint = newest(name)
    checkpoint['model']['lm_head.weight'] *= math.nan
    torch.save(checkpoint, f'{name}/ckpt_6.pt')
    good(name, init_from='resume', max_iters=7)
    assert training_steps(name)[-1]['loss'] is None  # log() accepts no NaN
    assert log(name)[-1]['val'] == {'A': None, 'B': None, 'C': None, 'mean': None}


# --- the schedule and the groups -----------------------------------------------------------------


def test_the_learning_rate_is_the_papers():
    settings = train.TrainConfig()
    rates = [train.learning_rate(step, settings) for step in range(10001)]
    assert rates[0] == 1e-7
    assert rates[60] == pytest.approx((1e-7 + 6e-4) / 2)
    assert rates[120] == 6e-4
    assert rates[5060] == pytest.approx((6e-4 + 6e-5) / 2)
    assert rates[10000] == pytest.approx(6e-5)
    assert all(b > a for a, b in zip(rates[:120], rates[1:121], strict=True))
    assert all(b < a for a, b in zip(rates[120:-1], rates[121:], strict=True))

    assert train.learning_rate(20000, settings) == pytest.approx(6e-5)
    assert train.learning_rate(3, train.TrainConfig(decay_lr=False)) == 6e-4
    assert train.learning_rate(0, train.TrainConfig(warmup_iters=0)) == 6e-4
    assert train.learning_rate(500, train.TrainConfig(lr_decay_iters=500)) == pytest.approx(6e-5)


def test_matrices_decay_and_what_a_fork_adds_beside_them_does_not():
    model = GPT(config_of('gpt2 NeuTRENO DenseFormer'))
    model.gate = nn.Parameter(torch.ones(2, 1, 1))
    decaying, others = train.make_optimizer(model, train.TrainConfig()).param_groups
    assert (decaying['weight_decay'], others['weight_decay']) == (0.1, 0.0)

    matrices = r'.*(wte|wpe|c_attn|c_proj|c_fc)\.weight|lm_head\.weight'
    named = model.named_parameters()
    expected = {name: bool(re.fullmatch(matrices, name)) for name, _ in named}
    assert not expected['gate'] and not expected['transformer.dwa.1']
    ids = {id(parameter) for parameter in decaying['params']}
    decays = {name: id(parameter) in ids for name, parameter in model.named_parameters()}
    assert decays == expected
    assert len(decaying['params']) + len(others['params']) == len(expected)


def test_a_warm_up_that_does_not_end_is_warned_of(work, capsys):
    good('out/warming', max_iters=3, warmup_iters=3)
    expected = 'warning: warmup_iters=3 is not before max_iters=3'
    assert capsys.readouterr().err.count(expected) == 1
    good('out/constant', max_iters=3, warmup_iters=3, decay_lr=False)
    good('out/warmed', max_iters=4, warmup_iters=3)
    assert not capsys.readouterr().err


def test_a_schedule_that_is_not_used_may_contradict_itself():
    options = dict(learning_rate=1e-5, lr_decay_iters=5)
    assert not train.check_schedule(train.TrainConfig(**options, decay_lr=False))
    evaluates = train.TrainConfig(**options, eval_only=True, init_from='resume')
    assert not train.check_schedule(evaluates)


def test_the_rate_in_the_log_and_in_the_optimizer_is_the_schedules(whole):
    settings = train.TrainConfig(warmup_iters=3, max_iters=12, learning_rate=1e-2)
    for entry in training_steps(whole):
        assert entry['lr'] == train.learning_rate(entry['step'], settings)
    for name, last_step in (('ckpt_6.pt', 5), ('ckpt_12.pt', 11)):
        groups = load(f'{whole}/{name}')['optimizer']['param_groups']
        assert [g['lr'] for g in groups] == [train.learning_rate(last_step, settings)] * 2


@pytest.mark.parametrize('grad_clip', [0.0, 0.05, 1000.0])
def test_a_gradient_is_clipped_to_its_norm_and_with_0_not_at_all(grad_clip):
    """Plain gradient descent at rate 1 moves the weights by what is left of the gradient."""
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=61)
    model = GPT(config)
    before = [p.detach().clone() for p in model.parameters()]
    idx = tokens(2, 9)
    _, norm = train.train_step(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        torch.amp.GradScaler('cpu', enabled=False),
        Machine('cpu', 'float32'),
        lambda: (idx[:, :-1], idx[:, 1:]),
        2,
        grad_clip,
    )
    moved = [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]
    moved = torch.cat([change.flatten() for change in moved]).norm().item()
    norm = norm.item()  # of the whole gradient
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

    monkeypatch.setattr(train, 'time', SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(train, 'train_step', taking(2, train.train_step))
    monkeypatch.setattr(train, 'evaluate', taking(100, train.evaluate))
    good('out/clock', log_interval=3, eval_interval=4)
    assert [entry['step'] for entry in training_steps('out/clock')] == [0, 3, 6, 9]
    for entry in training_steps('out/clock'):
        assert entry['tok_per_s'] == 4 * 2 * 32 / 2


def test_mfu_is_of_all_gpus_peak():
    logged = []
    reporter = SimpleNamespace(
        active=True,
        tokens_per_step=1000,
        flops_per_token=600.0,
        peak_flops=1e6,
        machine=SimpleNamespace(world_size=8),
        settings=train.TrainConfig(),
        write=lambda entry: logged.append(entry) or entry,
    )
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    train.Reporter.step(reporter, 0, 3.0, 1.0, 6e-4, scaler, 0, seconds=0.5)
    assert logged[0]['mfu'] == pytest.approx(2000 * 600 / (8 * 1e6))


def test_matrices_and_embeddings_decay_and_every_parameter_is_in_one_group():
    learned = dict(v_residual=True, residual_learned=True, denseformer=True, arch='gpt2')
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64, **learned))
    decay, rest = train.make_optimizer(model, train.TrainConfig()).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(names) == sorted(id(p) for group in (decay, rest) for p in group['params'])
    for p in decay['params']:
        assert re.search(r'(wte|wpe|lm_head|c_attn|c_proj|c_fc)\.weight$', names[id(p)])
    for p in rest['params']:
        assert re.search(r'(ln_\w|residual_lambda|dwa\.\d|\.bias)', names[id(p)])
    assert decay['weight_decay'] == 0.1 and rest['weight_decay'] == 0.0
    assert all(tuple(g['betas']) == (0.9, 0.95) and g['eps'] == 1e-8 for g in (decay, rest))


# --- wandb ---------------------------------------------------------------------------------------


class FakeRun:
    id = 'abc123'

    def __init__(self, broken=''):
        self.broken = broken
        self.logged = []
        self.finished = False

    def log(self, entry, step):
        if self.broken == 'log':
            raise RuntimeError('the network is gone')
        self.logged.append((step, entry))

    def finish(self):
        if self.broken == 'finish':
            raise RuntimeError('the network is gone')
        self.finished = True


def test_wandb_gets_the_settings_the_log_and_on_resume_the_same_run(work, monkeypatch):
    run = FakeRun()
    calls = []
    wandb = SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    good('out/wandb', wandb_log=True, max_iters=1, wandb_project='p')
    good('out/wandb', wandb_log=True, max_iters=2, init_from='resume')
    names = [(call['id'], call['name']) for call in calls]
    assert names == [(None, 'wandb'), ('abc123', 'wandb')]
    assert calls[0]['project'] == 'p' and calls[0]['config']['n_embd'] == 32 and run.finished
    assert [step for step, _ in run.logged] == [0, 0, 1, 1, 2]
    assert 'val/mean' in run.logged[0][1] and 'loss' in run.logged[1][1]


@pytest.mark.parametrize('fault', ['absent', 'init', 'log', 'finish'])
def test_a_broken_wandb_stops_nothing(work, monkeypatch, fault, capsys):
    def init(**options):
        if fault == 'init':
            raise RuntimeError('no key')
        return FakeRun(fault)

    wandb = None if fault == 'absent' else SimpleNamespace(init=init)
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    good(f'out/wandb-{fault}', wandb_log=True, max_iters=1)
    assert len(log(f'out/wandb-{fault}')) == 3
    assert ('warning: no wandb' in capsys.readouterr().err) == (fault in ('absent', 'init'))


# --- the core stands alone -----------------------------------------------------------------------

ALONE = """
import importlib.machinery, sys
OTHERS = sys.argv.pop(1).split()

class Block:
    # torch asks whether some of these packages are there, and only then imports them.
    def find_spec(self, name, path=None, target=None):
        if name in OTHERS or name.partition('.')[0] in OTHERS:
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise ModuleNotFoundError(f'No module named {spec.name!r}', name=spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Block())
import train
train.main()
"""
CORE = 'configurator data files machine model rundir tokenizer train'
FOLDERS = 'comparison hub.convert hub.modeling_nanoresformer paper'


def other_packages():
    """Every package of the requirements but torch and numpy."""
    text = ''.join((ROOT / f'requirements{kind}.txt').read_text() for kind in ('', '-dev'))
    names = re.findall(r'^([\w-]+)==', text, flags=re.MULTILINE)
    assert {'torch', 'numpy', 'tqdm', 'wandb', 'pytest'} <= set(names)
    return set(names) - {'torch', 'numpy'}


def test_training_works_from_the_core_alone_with_no_other_package(whole):
    ours = {path.stem for path in ROOT.glob('*.py')} - set(CORE.split())
    words = command_line('out/core', {'max_iters': 2, 'wandb_log': True})
    blocked = ' '.join([FOLDERS, *other_packages(), *ours])
    status, _, err = finish(start('-c', ALONE, blocked, *words, PYTHONPATH=str(ROOT)))
    assert status == 0, err
    assert 'No module named' in err and len(log('out/core')) == 4
    assert losses('out/core')['train 0'] == losses(whole)['train 0']
