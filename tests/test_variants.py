"""
What must hold for every architecture of model.py; `-k NAME` runs all of it for one variant.

Each is what tests/reference.py computes, trainable, usable under DDP, the same when it is decoded with a
cache (and so causal) or trained with activation checkpointing, and starts with the weights that it
shares with the others. Those that together have every setting on compile to one graph. That each of its
settings does something is in test_config.py.
"""

import pytest
import reference
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from variants import (
    CLA,
    GPT2,
    RES,
    SIZE,
    VARIANTS,
    config_of,
    covering,
    greedy,
    in_chunks,
    make,
    tokens,
    uncovered,
)

from model import GPT, GPTConfig
from train import TrainConfig, checkpoint_blocks, make_optimizers

B, T = 2, 11
every_variant = pytest.mark.parametrize('name', VARIANTS)


def batch(targets_seed=1):
    idx, targets = tokens(B, T), tokens(B, T, seed=targets_seed)
    targets[0, 3] = targets[1, :2] = -1
    return idx, targets


def loss_and_gradients(model, call=None):
    model.zero_grad(set_to_none=True)
    _, loss = (model if call is None else call)(*batch())
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close(ours, theirs, tolerance):
    """Each tensor's error, relative to the largest of theirs, is at most the tolerance."""
    for name in theirs:
        # The gradient of a key's bias is 0: what is left of it is rounding.
        error = (ours[name] - theirs[name]).norm() / (theirs[name].norm() + 1e-2)
        assert error <= tolerance, f'{name}: relative error {error:.2e}'


def test_the_variants_cover_every_value_of_every_setting():
    todo = uncovered()
    if todo:  # it is for whoever adds a setting to say
        pytest.skip('\n'.join(todo))


# --- torch.compile: first, because these take longest, so that others fill the time beside them -----


def compiled_equals_eager(model, backend):
    torch._dynamo.reset()
    loss, gradients = loss_and_gradients(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled_loss, compiled_gradients = loss_and_gradients(model, compiled)
    assert compiled_loss == pytest.approx(loss, abs=1e-5)
    assert_close(compiled_gradients, gradients, 1e-4)


@pytest.mark.parametrize(
    'name, backend, dtype',
    [
        ('ResFormer', 'inductor', torch.float32),
        ('everything', 'aot_eager', torch.float32),
        ('learned', 'aot_eager', torch.float16),
        ('cross NeuTRENO DenseFormer', 'aot_eager', torch.float32),
    ],
)
def test_a_few_compile_to_a_forward_and_a_backward_graph(name, backend, dtype):
    with torch.autocast('cpu', dtype=dtype, enabled=dtype != torch.float32):
        compiled_equals_eager(make(name, n_layer=2), backend)


@pytest.mark.parametrize('name', covering())
def test_it_compiles_to_one_graph(name):
    compiled_equals_eager(make(name), 'eager')


def test_activation_checkpointing_compiles_to_one_graph():
    model = make('cross from all, GQA')
    checkpoint_blocks(model)
    compiled_equals_eager(model, 'aot_eager')


# --- what it computes ----------------------------------------------------------------------------


@every_variant
def test_logits_loss_and_gradients_equal_the_reference(name):
    model = make(name)
    idx, targets = batch()
    weights = {key: p.detach().double().requires_grad_() for key, p in model.named_parameters()}
    expected = reference.logits(model.config, weights, idx)
    assert expected.std() > 0.3  # else 2e-4 would say little
    different = 'model.py computes something else than tests/reference.py, for which see there: {}'
    logits = model(idx)[0].double()
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0, msg=different.format)

    rows, labels = expected.flatten(0, 1), targets.flatten()
    expected_loss = F.cross_entropy(rows, labels, ignore_index=-1)
    expected_loss.backward()
    unread = [key for key, w in weights.items() if w.grad is None]
    assert not unread, f'tests/reference.py, which has the documented names, lacks {unread}'
    loss, gradients = loss_and_gradients(model)
    assert loss == pytest.approx(expected_loss.item(), abs=1e-5)
    assert_close(gradients, {key: w.grad for key, w in weights.items()}, 1e-4)


@every_variant
def test_a_text_in_chunks_through_the_cache_gives_the_logits_of_the_full_forward(name):
    model = make(name, n_layer=4).double()
    idx = tokens(B, 24)
    with torch.no_grad():
        cache = model.new_cache(B, 26)
        logits = in_chunks(model, idx, (7, 1, 11, 1, 4), cache)
        torch.testing.assert_close(logits, model(idx)[0], rtol=0, atol=1e-10)
        without = greedy(model, idx[:, :9], 12)
        assert torch.equal(greedy(model, idx[:, :9], 12, model.new_cache(B, 21)), without)

    c = model.config
    own = {(p, n): reference.own_heads(c, p, n) for p in 'kv' for n in range(c.n_layer)}
    assert sorted(cache.tensors) == [key for key in own if own[key]]  # borrowers have none
    assert cache.nbytes == sum(own.values()) * B * 26 * c.head_size * 8


# --- its parameters ------------------------------------------------------------------------------


@every_variant
def test_each_parameter_is_in_one_group_of_the_optimizer_with_the_decay_that_it_says(name):
    model = GPT(config_of(name))
    (optimizer,) = make_optimizers(model, TrainConfig(weight_decay=0.3, beta1=0.8, beta2=0.7))
    groups = optimizer.param_groups
    assert {group['betas'] for group in groups} == {(0.8, 0.7)}
    decays = [(id(p), group['weight_decay']) for group in groups for p in group['params']]
    named = list(model.named_parameters())
    assert len(decays) == len(named)
    assert dict(decays) == {id(p): 0.3 if model.needs[key].decay else 0.0 for key, p in named}


def parameters(model):
    return dict(model.named_parameters())


@every_variant
def test_it_starts_with_the_weights_that_it_shares_with_vanilla_from_the_seed_alone(name):
    torch.manual_seed(5)
    settings = {**VARIANTS[name], 'n_kv_head': 0, 'n_inner': 40, 'n_embd': 32, 'n_layer': 5}
    config = GPTConfig(**{**SIZE, **settings})
    weights = parameters(GPT(config, seed=2))
    vanilla = parameters(GPT(GPTConfig(**{**SIZE, 'n_layer': 5, 'arch': config.arch}), seed=2))
    for key, weight in weights.items():
        # Where a layer borrows some heads, its own are the first.
        assert torch.equal(weight, vanilla.get(key, weight)[: len(weight)]), (
            f'{key} starts otherwise than in vanilla'
        )
    # No two are drawn alike, and nobody else's random numbers are touched.
    drawn = [w for key, w in weights.items() if key.endswith('.weight') and w.dim() == 2]
    rows = [tuple(w[0].tolist()) for w in drawn if w.any()]
    assert len({*rows}) == len(rows)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    for key, weight in parameters(GPT(config, seed=2)).items():
        assert torch.equal(weight, weights[key]), f'{key} depends on more than the seed'


# --- training ------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def one_process():
    """A process group of this process alone."""
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@every_variant
def test_it_trains_under_ddp_and_every_parameter_gets_a_gradient(name, one_process):
    """DDP refuses a second step after a parameter without a gradient."""
    model = GPT(config_of(name))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    without_gradient = {name for name, _ in model.named_parameters()}
    for step in range(4):
        loss = wrapped(*batch())[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        # In a product that starts neutral, one factor waits for the other's first step.
        if step < 2:
            for key, p in model.named_parameters():
                without_gradient -= {key} if p.grad.count_nonzero() else set()
        optimizer.step()
        losses.append(loss.item())
    assert not without_gradient, f'no gradient in two steps: {sorted(without_gradient)}'
    assert losses[3] < losses[2] < losses[1] < losses[0]


@every_variant
def test_activation_checkpointing_changes_no_bit(name):
    model = make(name, n_layer=4, dropout=0.1)
    torch.manual_seed(3)
    loss, gradients = loss_and_gradients(model)
    checkpoint_blocks(model)
    torch.manual_seed(3)
    again, gradients_again = loss_and_gradients(model)
    assert again == loss
    for key, gradient in gradients.items():
        assert torch.equal(gradients_again[key], gradient), key


@pytest.mark.parametrize(
    'name', ['vanilla', 'SVFormer CLA keys GQA', 'cross from all, ragged sharing', 'everything']
)
def test_only_what_another_layer_reads_is_held(name):
    """Without any of these tensors, a layer lacks one."""
    model = make(name)
    lent = model.lent
    assert bool(lent) == (name != 'vanilla')
    for key in lent:
        model.lent = lent - {key}
        with pytest.raises(KeyError):
            model(tokens(B, T))


# --- what a checkpoint may lack starts where nothing changes, bit for bit --------------------------

LEARNED = dict(RES, residual_weights='learned')


@pytest.mark.parametrize(
    'settings, same',
    [
        (dict(x0_residual=True, embed_norm=True), dict(embed_norm=True)),
        (dict(GPT2, denseformer=True), GPT2),
        (dict(LEARNED, **CLA), dict(RES, **CLA)),
        (dict(LEARNED, residual_lambda=(2.0, 1.0)), dict(RES, residual_lambda=(2.0, 1.0))),
        (dict(LEARNED, k_residual='all', residual_lambda=(0.0, 1.0)), {}),
    ],
    ids=str,
)
def test_a_few_numbers_that_learn_start_where_nothing_changes(settings, same):
    models = [GPT(GPTConfig(**{**SIZE, **each})) for each in (settings, same)]
    learns, plain = (any(needs.optional for needs in model.needs.values()) for model in models)
    assert learns and not plain
    (loss, gradients), (same_loss, same_gradients) = map(loss_and_gradients, models)
    assert loss == same_loss
    assert_close(gradients, same_gradients, 1e-6)
