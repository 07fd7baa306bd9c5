"""
Every architecture variant of model.py against tests/reference.py, and what each must keep.

Each is exact, causal, trainable, one graph, usable under DDP, and equal to the vanilla Transformer
where its setting is neutral.
"""

import dataclasses
import datetime

import pytest
import reference
import torch
import torch.distributed as dist
import torch.nn.functional as F
from runs import ranks
from torch.nn.parallel import DistributedDataParallel
from variants import RES, SIZE, VARIANTS, config_of, uncovered

from model import GPT, GPTConfig

B, T = 2, 11
every_variant = pytest.mark.parametrize('name', VARIANTS)


def perturbed(config):
    return reference.perturb(GPT(config))


def batch(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    idx, targets = torch.randint(config.vocab_size, (2, B, T), generator=generator)
    targets[0, 3] = targets[1, :2] = -1
    return idx, targets


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close(ours, theirs, tolerance):
    """Each tensor's error, relative to the largest of theirs, is at most the tolerance."""
    for name in theirs:
        error = (ours[name] - theirs[name]).norm() / (theirs[name].norm() + 1e-3)
        assert error <= tolerance, f'{name}: relative error {error:.2e}'


def test_the_variants_cover_every_value_of_every_setting():
    todo = uncovered()
    assert not todo, '\n'.join(todo)
    assert len(VARIANTS) >= 45


@every_variant
def test_every_setting_of_a_variant_does_something(name):
    """Without it, the model has other parameters or other logits, or it is refused."""
    config = config_of(name)
    idx, _ = batch(config)
    logits = perturbed(config)(idx)[0]
    for field, value in config.variant().items():
        default = getattr(GPTConfig, field)
        try:
            other = perturbed(dataclasses.replace(config, **{field: default}))
        except ValueError:
            continue
        same = torch.equal(other(idx)[0], logits)
        assert not same, f'{field}={value!r} gives the same logits as {default!r}'


# --- exact ---------------------------------------------------------------------------------------


@every_variant
def test_logits_loss_and_gradients_equal_the_reference(name):
    config = config_of(name)
    model = perturbed(config)
    idx, targets = batch(config)
    weights = {key: p.detach().double().requires_grad_() for key, p in model.named_parameters()}

    expected = reference.logits(config, weights, idx)
    assert expected.std() > 0.3  # else 2e-4 would say little
    logits = model(idx)[0].double()
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0, msg=not_the_reference)

    rows, labels = expected.flatten(0, 1), targets.flatten()
    expected_loss = F.cross_entropy(rows, labels, ignore_index=-1)
    loss = model(idx, targets)[1]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-5)

    loss.backward()
    expected_loss.backward()
    assert_close(grads(model), {key: w.grad for key, w in weights.items()}, 1e-4)


def not_the_reference(difference):
    return (
        'model.py computes something else than tests/reference.py, which says, independently of it and '
        f'from the equations, what every variant computes: {difference}'
    )


@every_variant
def test_no_position_sees_a_later_one(name):
    config = config_of(name)
    model = perturbed(config)
    idx, _ = batch(config)
    changed = idx.clone()
    changed[:, 6] = (idx[:, 6] + 1) % config.vocab_size
    before, after = model(idx)[0], model(changed)[0]
    torch.testing.assert_close(after[:, :6], before[:, :6], atol=1e-6, rtol=0)
    for t in range(6, T):  # and every later position sees the change
        assert not torch.allclose(after[:, t], before[:, t], atol=1e-4)


# --- weights and training ------------------------------------------------------------------------


def documented_shapes(c):
    """{parameter: shape}. A borrower has no rows for what it borrows; residual_lambda and dwa exist
    only where they are learned."""
    C, V = c.n_embd, c.vocab_size
    kv_width = C // c.n_head * reference.heads(c, 'k')
    wide = c.n_inner or {'llama': 3.5, 'gpt2': 4}[c.arch] * C
    shapes = {
        'transformer.wte.weight': (V, C),
        'transformer.ln_f.weight': (C,),
        'lm_head.weight': (V, C),
    }
    if c.tie_embeddings:
        del shapes['lm_head.weight']
    if c.arch == 'gpt2':
        shapes['transformer.wpe.weight'] = (c.block_size, C)

    for n in range(c.n_layer):
        h = f'transformer.h.{n}'
        widths = {'q': C, 'k': kv_width, 'v': kv_width}
        owned = [part for part in 'qkv' if reference.owner(c, part, n) == n]
        shapes[f'{h}.ln_1.weight'] = (C,)
        shapes[f'{h}.attn.c_attn.weight'] = (sum(widths[part] for part in owned), C)
        shapes[f'{h}.attn.c_proj.weight'] = (C, C)
        shapes[f'{h}.ln_2.weight'] = (C,)
        shapes[f'{h}.mlp.c_fc.weight'] = (2 * wide if c.arch == 'llama' else wide, C)
        shapes[f'{h}.mlp.c_proj.weight'] = (C, wide)
        sources = reference.sources_of(c, n)
        mixes = any(getattr(c, f'{part}_residual') for part in owned)
        if c.residual_learned and sources and mixes:
            shapes[f'{h}.attn.residual_lambda'] = (len(sources) + 1,)
        if c.denseformer:
            shapes[f'transformer.dwa.{n}'] = (n + 2,)

    if c.arch == 'gpt2':
        for name, shape in list(shapes.items()):
            if '.ln_' in name or '.attn.' in name or '.mlp.' in name:
                shapes[name.replace('weight', 'bias')] = shape[:1]
    return shapes


@every_variant
def test_parameter_names_and_shapes_are_the_documented_ones(name):
    config = config_of(name)
    model = GPT(config)
    shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
    expected = documented_shapes(config)
    assert shapes == expected, (
        'a checkpoint has other parameters than documented: if they are meant to be there, add their '
        'names and shapes to documented_shapes() in tests/test_variants.py'
    )
    assert set(model.state_dict()) == set(expected) | {'lm_head.weight'}


@every_variant
def test_trains_and_every_parameter_gets_a_gradient(name):
    config = config_of(name)
    model = GPT(config)
    idx, targets = batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    without_gradient = set(blocks(model))
    for step in range(4):
        loss = model(idx, targets)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        # In a product that starts neutral, one factor waits for the other's first step.
        if step < 2:
            gradients = blocks(model, lambda p: p.grad)
            without_gradient -= {key for key, grad in gradients.items() if grad.count_nonzero()}
        optimizer.step()
        losses.append(loss.item())
    assert not without_gradient, f'no gradient in two steps: {sorted(without_gradient)}'
    assert losses[3] < losses[2] < losses[1] < losses[0]


def blocks(model, of=lambda p: p):
    """{name: tensor} of each parameter, c_attn's matrix in its blocks of q, k and v rows."""
    tensors = {}
    for key, p in model.named_parameters():
        if not key.endswith('c_attn.weight'):
            tensors[key] = of(p)
            continue
        n = int(key.split('.')[2])
        owned = [part for part in 'qkv' if reference.owner(model.config, part, n) == n]
        rows = [reference.heads(model.config, part) for part in owned]
        hs = model.config.n_embd // model.config.n_head
        for part, block in zip(owned, of(p).split([hs * r for r in rows]), strict=True):
            tensors[f'{key}, {part} rows'] = block
    return tensors


def test_residual_weights_start_uniform_or_as_given_and_denseformer_from_the_identity():
    cases = {
        'learned': [0.5, 0.5],
        'learned from all': [1 / 3] * 3,
        'learned from a constant': [2.0, 1.0],
    }
    for name, expected in cases.items():
        weights = GPT(config_of(name)).get_parameter('transformer.h.2.attn.residual_lambda')
        torch.testing.assert_close(weights.data, torch.tensor(expected))
    assert GPT(config_of('DenseFormer')).get_parameter('transformer.dwa.2').tolist() == [0, 0, 0, 1]


def test_variants_share_every_initial_weight_they_have_in_common():
    """Also the q, k and v row blocks of c_attn, where a layer owns only some of them."""
    first = {}
    for name in VARIANTS:
        same_size = {**VARIANTS[name], 'n_kv_head': 0, 'n_inner': 40, 'n_embd': 32}
        model = GPT(GPTConfig(**{**SIZE, **same_size}))
        matrices = {key: block for key, block in blocks(model).items() if block.dim() == 2}
        for key, block in matrices.items():
            other, weight = first.setdefault((model.config.arch, key), (name, block))
            assert torch.equal(block, weight), (
                f'{key} starts otherwise in {name!r} than in {other!r}: init_weights() in model.py '
                'draws a matrix from (seed, name, block) alone'
            )

    # And no two matrices start alike.
    rows = [w[0].tolist() for (arch, _), (_, w) in first.items() if arch == 'llama' and w.any()]
    assert len({*map(tuple, rows)}) == len(rows) > 30


# --- neutral settings recover the vanilla Transformer bit for bit ----------------------------------

NEUTRAL = dict(residual_lambda=(0.0, 1.0))
LEARNED = dict(RES, **NEUTRAL, residual_learned=True)


@pytest.mark.parametrize(
    'setting',
    [
        dict(denseformer=True),
        dict(RES, **NEUTRAL),
        LEARNED,
        dict(LEARNED, residual_from='all'),
        dict(NEUTRAL, q_residual=True, k_residual=True, residual_from='previous'),
        dict(LEARNED, denseformer=True, residual_layers=(2,)),
    ],
    ids=str,
)
@pytest.mark.parametrize('base', [{}, dict(arch='gpt2', n_kv_head=2)], ids=str)
def test_neutral_settings_recover_vanilla_bit_for_bit(setting, base):
    vanilla = GPT(GPTConfig(**SIZE, **base))
    variant = GPT(GPTConfig(**SIZE, **base, **setting))
    idx, targets = batch(vanilla.config)
    assert torch.equal(variant(idx)[0], vanilla(idx)[0])
    losses = vanilla(idx, targets)[1], variant(idx, targets)[1]
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    assert_close(grads(variant), grads(vanilla), 1e-6)


# --- torch.compile -------------------------------------------------------------------------------

# With the faster of its two ways to part the forward graph from the backward one.
AOT = 'aot_eager_default_partitioner'
NEEDS_A_THIRD_LAYER = {
    'residual_layers',
    'residual_from',
    'share_q_every',
    'share_k_every',
    'share_v_every',
}


def compiled_equals_eager(name, backend):
    torch._dynamo.reset()
    # Fewer layers compile faster.
    layers = 3 if NEEDS_A_THIRD_LAYER & set(VARIANTS[name]) else 2
    config = config_of(name, n_layer=layers)
    model = perturbed(config)
    idx, targets = batch(config)
    loss = model(idx, targets)[1]
    loss.backward()
    expected = grads(model)
    model.zero_grad(set_to_none=True)

    compiled_loss = torch.compile(model, fullgraph=True, backend=backend)(idx, targets)[1]
    compiled_loss.backward()
    assert compiled_loss.item() == pytest.approx(loss.item(), abs=1e-5)
    assert_close(grads(model), expected, 1e-4)


@every_variant
def test_compiles_to_one_graph(name):
    compiled_equals_eager(name, 'eager')


def settings_of(names):
    """The settings that are not their default in one of these variants; a word is one of its own."""
    settings = set()
    for name in names:
        for field, value in config_of(name).variant().items():
            settings.add(f'{field}={value}' if isinstance(value, str) else field)
    return settings


def variants_with_every_setting():
    """Few variants that have every setting between them: the one with most that are missing comes
    next."""
    chosen, missing = [], settings_of(VARIANTS)
    while missing:
        best = max(VARIANTS, key=lambda name: len(missing & settings_of([name])))
        chosen.append(best)
        missing -= settings_of([best])
    return chosen


@pytest.mark.parametrize('name', variants_with_every_setting())
def test_every_setting_compiles_to_a_forward_and_a_backward_graph(name):
    """It takes three times as long as one graph, and is the same code for most variants."""
    compiled_equals_eager(name, AOT)


def test_compiles_to_one_graph_under_fp16_autocast():
    with torch.autocast('cpu', dtype=torch.float16):
        compiled_equals_eager('learned CLA', AOT)


@pytest.mark.parametrize('name', ['ResFormer', 'SVFormer CLA keys GQA', 'cross'])
def test_inductor_equals_eager(name):
    compiled_equals_eager(name, 'inductor')


# --- data parallel -------------------------------------------------------------------------------


def test_every_variant_trains_under_ddp_with_equal_gradients():
    for status, _, err in ranks(2, ddp_worker):
        assert status == 0, err


def ddp_worker():
    torch.set_num_threads(1)
    dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=120))
    for name in VARIANTS:
        check_ddp(name, dist.get_rank())
    dist.destroy_process_group()


def check_ddp(name, rank):
    config = config_of(name)
    model, local = DistributedDataParallel(GPT(config)), GPT(config)
    idx, targets = batch(config, seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):  # a parameter without a gradient fails at the second
        optimizer.zero_grad(set_to_none=True)
        model(idx, targets)[1].backward()
        mine = torch.cat([p.grad.flatten() for p in model.parameters()])
        theirs = mine.clone()
        dist.broadcast(theirs, src=0)
        assert torch.equal(mine, theirs), f'{name}: gradients differ between the ranks'
        if step == 0:
            local(idx, targets)[1].backward()
            alone = torch.cat([p.grad.flatten() for p in local.parameters()])
            assert not torch.allclose(mine, alone, rtol=1e-3), f'{name}: nothing was averaged'
            dist.all_reduce(alone)
            torch.testing.assert_close(mine, alone / 2, msg=lambda text: f'{name}: {text}')
        optimizer.step()
