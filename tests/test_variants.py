"""
Every architecture variant of model.py against tests/reference.py, and the promises each must keep: exact, causal,
trainable, one graph, usable under DDP, and equal to the vanilla Transformer where its setting is neutral.
"""
import dataclasses
import datetime
import os

import pytest
import reference
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from model import GPT, GPTConfig

SIZE = dict(block_size=16, vocab_size=61, n_layer=3, n_head=4, n_embd=32, n_inner=40)
B, T = 2, 11

RES, SV, CLA = dict(v_residual=True), dict(share_v=True), dict(share_k=True, share_k_every=2, share_v=True,
                                                               share_v_every=2)
KEYS2 = dict(share_k=True, share_k_every=2)
GPT2 = dict(arch='gpt2')
VARIANTS = {
    # the baselines
    'vanilla': {},
    'GQA': dict(n_kv_head=2),
    'MQA': dict(n_kv_head=1),
    'gpt2': GPT2,
    'gpt2, odd head size, n_inner 0': dict(GPT2, n_embd=20, n_inner=0),
    'tied embeddings': dict(tie_embeddings=True),
    'other theta and epsilon, n_inner 0': dict(rope_theta=100.0, norm_eps=1e-2, n_inner=0),
    # ResFormer and SVFormer, alone and with what shrinks the cache (Fig. 10)
    'ResFormer': RES,
    'ResFormer GQA': dict(RES, n_kv_head=2),
    'ResFormer CLA': dict(RES, **CLA),
    'ResFormer sharing the first keys': dict(RES, share_k=True),
    'SVFormer': SV,
    'SVFormer GQA': dict(SV, n_kv_head=2),
    'SVFormer CLA keys': dict(SV, **KEYS2),
    'SVFormer CLA keys GQA': dict(SV, **KEYS2, n_kv_head=2),
    'SVFormer 4 anchors of 8 layers': dict(SV, share_v_every=2, n_layer=8),
    'SVFormer 2 anchors': dict(SV, share_v_every=2, n_layer=4),
    'SVFormer ragged last run': dict(SV, share_v_every=3, n_layer=5),
    'CLA': CLA,
    # what else can be shared (Fig. 13, Fig. 4)
    'first queries': dict(share_q=True),
    'first keys': dict(share_k=True),
    'first queries and keys': dict(share_q=True, share_k=True),
    'queries every 2': dict(share_q=True, share_q_every=2, n_kv_head=2),
    # NeuTRENO, DenseFormer
    'NeuTRENO': dict(neutreno=0.4),
    'NeuTRENO GQA': dict(neutreno=0.4, n_kv_head=2),
    'NeuTRENO on ResFormer': dict(RES, neutreno=0.2),
    'NeuTRENO on ResFormer from all': dict(RES, residual_from='all', neutreno=0.2),
    'NeuTRENO on CLA': dict(CLA, neutreno=0.4),
    'DenseFormer': dict(denseformer=True),
    'DenseFormer ResFormer': dict(RES, denseformer=True),
    # which projections and which layers (Figs. 6, 8)
    'query residual': dict(q_residual=True),
    'key residual': dict(k_residual=True),
    'all three residuals': dict(RES, q_residual=True, k_residual=True),
    'ResFormer, keys from CLA with residual': dict(RES, **KEYS2, k_residual=True),
    'from previous': dict(RES, residual_from='previous'),
    'from all': dict(RES, residual_from='all'),
    'keys from previous': dict(k_residual=True, residual_from='previous'),
    'from previous, a borrower': dict(RES, residual_from='previous', share_v=True, share_v_every=2, n_layer=5),
    'from all, some borrowers': dict(RES, residual_from='all', share_v=True, share_v_every=2, n_layer=5),
    # the weights of the mixture
    'constant lambda': dict(RES, residual_lambda=(2.0, 1.0)),
    'constant lambda, from all': dict(RES, residual_from='all', residual_lambda=(0.3, 0.6)),
    'constant lambda on q, k, v': dict(RES, q_residual=True, k_residual=True, residual_lambda=(0.7, 0.2)),
    'sparse': dict(RES, residual_layers=(2,)),
    'sparse lambda 5': dict(RES, residual_layers=(2,), residual_lambda=(5.0, 1.0)),
    'learned': dict(RES, residual_learned=True),
    'learned sparse': dict(RES, residual_learned=True, residual_layers=(1,)),
    'learned from all': dict(RES, residual_learned=True, residual_from='all'),
    'learned from a constant': dict(RES, residual_learned=True, residual_lambda=(2.0, 1.0)),
    'learned keys from previous': dict(k_residual=True, residual_learned=True, residual_from='previous'),
    'learned CLA': dict(RES, **CLA, residual_learned=True),
    # the values' own map (Fig. 7)
    'identity': dict(RES, residual_map='identity'),
    'identity from all, GQA': dict(RES, residual_map='identity', residual_from='all', n_kv_head=2),
    'identity from previous, a borrower': dict(RES, **CLA, residual_map='identity', residual_from='previous',
                                               n_layer=5),
    'identity sparse, key residual': dict(RES, residual_map='identity', residual_layers=(2,), k_residual=True),
    'cross': dict(RES, residual_map='cross'),
    'cross GQA': dict(RES, residual_map='cross', n_kv_head=2),
    'cross from all, GQA': dict(RES, residual_map='cross', residual_from='all', n_kv_head=2),
    'cross sparse, key residual': dict(RES, residual_map='cross', residual_layers=(2,), k_residual=True),
    'cross from all, sharing the first keys': dict(RES, residual_map='cross', residual_from='all', share_k=True),
    'cross from all, ragged sharing': dict(RES, **KEYS2, share_v=True, share_v_every=3, residual_map='cross',
                                           residual_from='all', n_layer=5),
    'cross NeuTRENO DenseFormer': dict(RES, residual_map='cross', neutreno=0.4, denseformer=True),
    # the other architecture, and everything at once
    'gpt2 ResFormer': dict(RES, **GPT2),
    'gpt2 SVFormer': dict(SV, **GPT2),
    'gpt2 CLA GQA': dict(CLA, **GPT2, n_kv_head=2),
    'gpt2 NeuTRENO DenseFormer': dict(GPT2, neutreno=0.4, denseformer=True),
    'gpt2 cross': dict(RES, **GPT2, residual_map='cross'),
    'everything': dict(RES, q_residual=True, k_residual=True, **KEYS2, share_v=True,
                       share_v_every=4, residual_from='all', residual_lambda=(0.4, 0.7), residual_layers=(4,),
                       n_layer=5, n_kv_head=2, neutreno=0.3, denseformer=True, tie_embeddings=True),
}
every_variant = pytest.mark.parametrize('name', VARIANTS)


def config_of(name, **size):
    return GPTConfig(**{**SIZE, **size, **VARIANTS[name]})


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
    """Each tensor's error, relative to the largest of the theirs, is at most the tolerance."""
    for name in theirs:
        error = (ours[name] - theirs[name]).norm() / (theirs[name].norm() + 1e-3)
        assert error <= tolerance, f'{name}: relative error {error:.2e}'


# --------------------------------------------------------------------------------------------------------------------
# exact


def test_the_variants_cover_every_field():
    sizes_and_elsewhere = {'block_size', 'vocab_size', 'n_head', 'dropout', 'rope_scaling'}
    fields = {field.name for field in dataclasses.fields(GPTConfig)}
    assert fields - sizes_and_elsewhere == set().union(*VARIANTS.values())
    assert len(VARIANTS) >= 45


@every_variant
def test_logits_loss_and_gradients_equal_the_reference(name):
    config = config_of(name)
    model = perturbed(config)
    idx, targets = batch(config)
    weights = {key: p.detach().double().requires_grad_() for key, p in model.named_parameters()}

    expected = reference.logits(config, weights, idx)
    assert expected.std() > 0.3  # else 2e-4 would say little
    torch.testing.assert_close(model(idx)[0].double(), expected, atol=2e-4, rtol=0)

    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss = model(idx, targets)[1]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-5)

    loss.backward()
    expected_loss.backward()
    assert_close(grads(model), {key: w.grad for key, w in weights.items()}, 1e-4)


@every_variant
def test_no_position_sees_a_later_one(name):
    config = config_of(name)
    model, (idx, _) = perturbed(config), batch(config)
    changed = idx.clone()
    changed[:, 6] = (idx[:, 6] + 1) % config.vocab_size
    before, after = model(idx)[0], model(changed)[0]
    torch.testing.assert_close(after[:, :6], before[:, :6], atol=1e-6, rtol=0)
    for t in range(6, T):  # and every later position sees the change
        assert not torch.allclose(after[:, t], before[:, t], atol=1e-4)


# --------------------------------------------------------------------------------------------------------------------
# weights and training


@every_variant
def test_parameter_names_and_shapes_are_the_documented_ones(name):
    """A borrower has no rows for what it borrows; residual_lambda and dwa exist only where they are learned."""
    c = config_of(name)
    C, V = c.n_embd, c.vocab_size
    hs, kv = C // c.n_head, c.n_kv_head or c.n_head
    wide = c.n_inner or {'llama': 3.5, 'gpt2': 4}[c.arch] * C
    expected = {'transformer.wte.weight': (V, C), 'transformer.ln_f.weight': (C,), 'lm_head.weight': (V, C)}
    if c.tie_embeddings:
        del expected['lm_head.weight']
    if c.arch == 'gpt2':
        expected |= {'transformer.wpe.weight': (c.block_size, C), 'transformer.ln_f.bias': (C,)}
    for n in range(c.n_layer):
        h = f'transformer.h.{n}'
        rows = sum({'q': C, 'k': kv * hs, 'v': kv * hs}[part] for part in 'qkv' if reference.owner(c, part, n) == n)
        shapes = {'attn.c_attn': (rows, C), 'attn.c_proj': (C, C), 'mlp.c_proj': (C, wide),
                  'mlp.c_fc': (2 * wide if c.arch == 'llama' else wide, C), 'ln_1': (C,), 'ln_2': (C,)}
        for part, shape in shapes.items():
            expected[f'{h}.{part}.weight'] = shape
            if c.arch == 'gpt2':
                expected[f'{h}.{part}.bias'] = shape[:1]
        mixes = (n in c.residual_layers if c.residual_layers else n > 0) and any(
            getattr(c, f'{part}_residual') and reference.owner(c, part, n) == n for part in 'qkv')
        if c.residual_learned and mixes:
            expected[f'{h}.attn.residual_lambda'] = (1 + (n if c.residual_from == 'all' else 1),)
        if c.denseformer:
            expected[f'transformer.dwa.{n}'] = (n + 2,)
    model = GPT(c)
    assert {key: tuple(p.shape) for key, p in model.named_parameters()} == expected
    assert set(model.state_dict()) == set(expected) | {'lm_head.weight'}


@every_variant
def test_trains_and_every_parameter_gets_a_gradient(name):
    config = config_of(name)
    model, (idx, targets) = GPT(config), batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(4):
        loss = model(idx, targets)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if step == 0:
            for key, p in model.named_parameters():
                qkv = key.endswith('c_attn.weight')
                blocks = p.grad.split(model.get_submodule(key[:-len('.c_attn.weight')]).rows) if qkv else [p.grad]
                assert all(block.count_nonzero() for block in blocks), f'{key} gets no gradient'
        optimizer.step()
        losses.append(loss.item())
    assert losses[3] < losses[2] < losses[1] < losses[0]


def test_residual_weights_start_from_the_uniform_or_given_ones_and_denseformer_from_the_identity():
    for name, expected in (('learned', [0.5, 0.5]), ('learned from all', [1 / 3] * 3),
                           ('learned from a constant', [2.0, 1.0])):
        weights = GPT(config_of(name)).get_parameter('transformer.h.2.attn.residual_lambda')
        torch.testing.assert_close(weights.data, torch.tensor(expected))
    assert GPT(config_of('DenseFormer')).get_parameter('transformer.dwa.2').tolist() == [0, 0, 0, 1]


def test_variants_share_every_initial_weight_they_have_in_common(monkeypatch):
    """Also the q, k and v row blocks of c_attn, where a layer owns only some of them."""
    def blocks(name):
        model = GPT(GPTConfig(**{**SIZE, **VARIANTS[name], 'n_kv_head': 0, 'n_inner': 40}))
        found = {}
        for key, p in model.named_parameters():
            if key.endswith('c_attn.weight'):
                n = int(key.split('.')[2])
                owned = [part for part in 'qkv' if reference.owner(model.config, part, n) == n]
                found |= {f'{key} {part}': block for part, block in zip(owned, p.chunk(len(owned)), strict=True)}
            elif p.dim() == 2:
                found[key] = p
        return found

    monkeypatch.setitem(VARIANTS, 'vanilla', dict(n_layer=8))
    vanilla = blocks('vanilla')
    for a, matrix in vanilla.items():
        assert not any(torch.equal(matrix, other) for b, other in vanilla.items() if a != b)
    for name in VARIANTS:
        if VARIANTS[name].get('arch') != 'gpt2':
            for key, block in blocks(name).items():
                assert torch.equal(block, vanilla[key]), f'{name}: {key}'


# --------------------------------------------------------------------------------------------------------------------
# neutral settings recover the vanilla Transformer bit for bit


@pytest.mark.parametrize('setting', [
    dict(denseformer=True),
    dict(RES, residual_lambda=(0.0, 1.0)),
    dict(RES, residual_lambda=(0.0, 1.0), residual_learned=True),
    dict(RES, residual_lambda=(0.0, 1.0), residual_learned=True, residual_from='all'),
    dict(q_residual=True, k_residual=True, residual_lambda=(0.0, 1.0), residual_from='previous'),
    dict(denseformer=True, **RES, residual_lambda=(0.0, 1.0), residual_learned=True, residual_layers=(2,)),
], ids=str)
@pytest.mark.parametrize('base', [{}, dict(arch='gpt2', n_kv_head=2)], ids=str)
def test_neutral_settings_recover_vanilla_bit_for_bit(setting, base):
    vanilla, variant = GPT(GPTConfig(**SIZE, **base)), GPT(GPTConfig(**SIZE, **base, **setting))
    idx, targets = batch(vanilla.config)
    assert torch.equal(variant(idx)[0], vanilla(idx)[0])
    losses = vanilla(idx, targets)[1], variant(idx, targets)[1]
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    ours = grads(variant)
    assert_close(ours, grads(vanilla), 1e-6)


# --------------------------------------------------------------------------------------------------------------------
# torch.compile


def compiled_equals_eager(name, backend):
    torch._dynamo.reset()
    needs_a_third_layer = ('residual_layers', 'residual_from', 'share_q_every', 'share_k_every', 'share_v_every')
    config = config_of(name, n_layer=3 if set(needs_a_third_layer) & set(VARIANTS[name]) else 2)  # fewer compile faster
    model, (idx, targets) = perturbed(config), batch(config)
    loss = model(idx, targets)[1]
    loss.backward()
    expected = grads(model)
    model.zero_grad(set_to_none=True)

    compiled_loss = torch.compile(model, fullgraph=True, backend=backend)(idx, targets)[1]
    compiled_loss.backward()
    assert compiled_loss.item() == pytest.approx(loss.item(), abs=1e-5)
    assert_close(grads(model), expected, 1e-4)


@every_variant
def test_compiles_to_one_graph_forward_and_backward(name):
    # aot_eager with the faster of its two ways to part the forward graph from the backward one
    compiled_equals_eager(name, 'aot_eager_default_partitioner')


def test_compiles_to_one_graph_under_fp16_autocast():
    with torch.autocast('cpu', dtype=torch.float16):
        compiled_equals_eager('learned CLA', 'aot_eager_default_partitioner')


@pytest.mark.parametrize('name', ['ResFormer', 'SVFormer CLA keys GQA', 'cross'])
def test_inductor_equals_eager(name):
    compiled_equals_eager(name, 'inductor')


# --------------------------------------------------------------------------------------------------------------------
# settings that do nothing or contradict another


@pytest.mark.parametrize('settings, names', [
    (dict(residual_from='all'), 'residual_from v_residual'),
    (dict(residual_layers=(1,)), 'residual_layers v_residual'),
    (dict(residual_lambda=(2.0, 1.0)), 'residual_lambda v_residual'),
    (dict(residual_learned=True), 'residual_learned v_residual'),
    (dict(residual_map='identity'), 'residual_map v_residual'),
    (dict(share_v=True, residual_from='all'), 'residual_from v_residual'),
    (dict(q_residual=True, residual_map='identity'), 'residual_map v_residual'),
    (dict(k_residual=True, residual_map='cross'), 'residual_map v_residual'),
    (dict(RES, residual_map='identity', residual_lambda=(2.0, 1.0)), 'residual_map residual_lambda'),
    (dict(RES, residual_map='cross', residual_lambda=(2.0, 1.0)), 'residual_map residual_lambda'),
    (dict(RES, residual_map='identity', residual_learned=True), 'residual_map residual_learned'),
    (dict(RES, residual_map='cross', residual_learned=True), 'residual_map residual_learned'),
    (dict(RES, residual_lambda=(2.0,)), 'residual_lambda source own'),
    (dict(RES, residual_lambda=(1.0, 1.0, 1.0)), 'residual_lambda source own'),
    (dict(RES, k_residual=True, residual_learned=True), 'residual_learned v_residual k_residual'),
    (dict(q_residual=True, k_residual=True, residual_learned=True), 'residual_learned q_residual k_residual'),
    (dict(RES, share_v=True), 'v_residual share_v'),
    (dict(RES, share_v=True, share_v_every=3), 'v_residual share_v'),
    (dict(q_residual=True, share_q=True), 'q_residual share_q'),
    (dict(k_residual=True, share_k=True), 'k_residual share_k'),
    (dict(share_q_every=2), 'share_q_every share_q'),
    (dict(share_k_every=2), 'share_k_every share_k'),
    (dict(share_v_every=2), 'share_v_every share_v'),
    (dict(share_v=True, share_v_every=-2), 'share_v_every -2'),
    (dict(share_v=True, neutreno=0.4), 'neutreno share_v'),
    (dict(share_v=True, share_v_every=4, neutreno=0.4), 'neutreno share_v'),
    (dict(share_q=True, share_k=True, share_v=True), 'share_q share_k share_v'),
    (dict(share_q=True, share_k=True, share_v=True, share_v_every=2), 'share_q share_k share_v'),
    (dict(RES, residual_layers=(0, 1)), 'residual_layers layer.0'),
    (dict(RES, residual_layers=(3,)), 'residual_layers layer.3'),
    (dict(RES, residual_layers=(-1,)), 'residual_layers layer.-1'),
    (dict(RES, share_v=True, share_v_every=2, residual_layers=(1, 2)), 'residual_layers share_v'),
    (dict(RES, k_residual=True, **KEYS2, residual_layers=(1,)), 'residual_layers share_k'),
    (dict(RES, n_layer=1), 'v_residual n_layer'),
    (dict(n_embd=30), 'n_embd n_head'),
    (dict(n_kv_head=3), 'n_head n_kv_head'),
    (dict(n_kv_head=8), 'n_head n_kv_head'),
    (dict(n_kv_head=-2), 'n_kv_head'),
    (dict(n_embd=36), 'n_embd n_head'),
    (dict(arch='gpt2', rope_theta=500.0), 'rope_theta arch'),
    (dict(arch='bert'), 'arch llama gpt2'),
    (dict(RES, residual_from='last'), 'residual_from first previous all'),
    (dict(RES, residual_map='none'), 'residual_map current identity cross'),
], ids=str)
def test_useless_or_contradictory_settings_are_refused_by_name(settings, names):
    in_any_order = ''.join(rf'(?=.*{word}\b)' for word in names.split())
    with pytest.raises(ValueError, match='(?s)^' + in_any_order):
        GPTConfig(**{**SIZE, **settings})


# --------------------------------------------------------------------------------------------------------------------
# data parallel


def ddp_worker(rank, rendezvous):
    torch.set_num_threads(1)
    os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
    dist.init_process_group('gloo', init_method=f'file://{rendezvous}', rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=120))
    for name in VARIANTS:
        config = config_of(name)
        model, local = DistributedDataParallel(GPT(config)), GPT(config)
        (idx, targets), optimizer = batch(config, seed=rank), torch.optim.SGD(model.parameters(), lr=0.1)
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
                torch.testing.assert_close(mine, alone / 2, msg=lambda text, name=name: f'{name}: {text}')
            optimizer.step()
    dist.destroy_process_group()


def test_every_variant_trains_under_ddp_with_equal_gradients(tmp_path):
    torch.multiprocessing.spawn(ddp_worker, args=(tmp_path / 'rendezvous',), nprocs=2)
