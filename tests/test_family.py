"""The family of value residuals, beyond what tests/test_variants.py checks of every variant."""

import pytest
import reference
import torch
from variants import KEYS2, RES, SIZE, SV, config_of, make, tokens

from lib.rundir import load_state, optimizer_state
from model import GPT, GPTConfig
from train import TrainConfig, check_rates, make_optimizer

B, T = 2, 11


# --- how it starts ------------------------------------------------------------------------------


def test_a_gate_of_zeros_is_resformer():
    plain, gated = (
        GPT(GPTConfig(**SIZE, **RES, **gate)) for gate in ({}, dict(residual_gate='head'))
    )
    for ours, theirs in zip(gated(tokens(B, T)), plain(tokens(B, T)), strict=True):
        assert ours is theirs or torch.equal(ours, theirs)


def test_a_channel_gate_starts_as_rwkvs():
    attention = GPT(config_of('vanilla', **RES, residual_gate='channel')).transformer.h[1].attn
    assert not attention.gate_down.weight.any()
    D = len(attention.gate_bias)
    for c in (0, 5, D - 1):
        expected = 0.73 - 0.4 * (c / (D - 1) - 0.5)
        assert attention.gate_bias[c].item() == pytest.approx(expected)
    up = attention.gate_up.weight.double()
    short = up @ up.T if up.size(0) < up.size(1) else up.T @ up
    torch.testing.assert_close(short, 0.01 * torch.eye(len(short)).double(), atol=1e-7, rtol=0)


def test_the_heads_that_a_borrower_keeps_start_as_vanillas_first_ones():
    """Also where torch draws fewer numbers otherwise than the first of more: their number is odd."""
    size = {**SIZE, 'n_embd': 20, 'arch': 'gpt2'}
    half = GPT(GPTConfig(**size, **SV, share_v_heads=1)).transformer.h[1].attn.c_attn.weight
    whole = GPT(GPTConfig(**size)).transformer.h[1].attn.c_attn.weight
    assert torch.equal(half, whole[:55])


# --- SVFormer without a value cache ---------------------------------------------------------------


@pytest.mark.parametrize(
    'settings',
    [
        SV,
        dict(SV, **KEYS2, n_kv_head=2),
        dict(share_v_from=(0, 0, 0), embed_norm=True, x0_residual=True),
    ],
    ids=str,
)
def test_values_looked_up_by_token_decode_as_cached_ones(settings):
    model = make(**settings).eval().double()
    compiled = torch.compile(model, fullgraph=True, backend='eager')
    idx = tokens(B, 20)
    plain, by_token = (model.new_cache(B, 20, values=values) for values in ('cached', 'token'))
    with torch.no_grad():
        for chunk in idx.split((7, 1, 11, 1), dim=1):
            expected, _ = model(chunk, cache=plain)
            act = compiled if chunk.size(1) == 1 else model
            logits, _ = act(chunk, cache=by_token)
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    c = model.config
    keys = sum(tensor.nbytes for (part, _), tensor in plain.tensors.items() if part == 'k')
    assert by_token.nbytes == keys + B * 20 * 4
    assert by_token.table_nbytes == c.vocab_size * c.kv_heads * c.head_size * 8


def test_the_table_is_made_once_and_again_after_a_change():
    model = make(**SV).eval()
    first = model.value_table(torch.float32)
    assert model.new_cache(B, 4, values='token').table is first
    with torch.no_grad():
        model.transformer.wte.weight += 1
    assert not torch.equal(model.value_table(torch.float32), first)


@pytest.mark.parametrize(
    'settings',
    [
        {},
        dict(SV, share_v_every=2),
        dict(SV, share_v_heads=2),
        dict(SV, arch='gpt2'),
        dict(SV, **RES, residual_from='token', residual_layers=(0,)),
    ],
    ids=str,
)
def test_values_by_token_are_refused_where_v_1_is_no_table(settings):
    with pytest.raises(ValueError, match="values='token'"):
        make(**settings).eval().new_cache(B, 4, values='token')
    with pytest.raises(ValueError, match='model.eval'):
        make(**SV).train().new_cache(B, 4, values='token')


def test_a_rate_of_tables_is_for_tables():
    with pytest.raises(ValueError, match='table_rate'):
        check_rates(TrainConfig(table_rate=2.0), GPTConfig())
    model = GPT(config_of('tables'))
    groups = make_optimizer(model, TrainConfig(table_rate=2.0)).param_groups
    rates = {id(p): group['rate'] for group in groups for p in group['params']}
    for name, p in model.named_parameters():
        assert rates[id(p)] == (2.0 if '.ve.' in name else 1.0), name


# --- Muon ------------------------------------------------------------------------------------------


def muon(model, **settings):
    settings = {'optimizer': 'muon', 'learning_rate': 0.02, 'weight_decay': 0.3, **settings}
    return make_optimizer(model, TrainConfig(**settings))


def step(model, optimizer):
    """Take a step. Returns {name: gradient}."""
    idx = tokens(B, T)
    model(idx, idx)[1].backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return gradients


def test_muon_is_torchs_for_each_matrix_and_adamw_for_the_rest():
    model = make('SVFormer GQA')
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    blocks = {}  # of rows, each a matrix of its own
    for name, weight in weights.items():
        rows = [len(weight)]
        if 'c_attn' in name:
            n = int(name.split('.')[2])
            own = [reference.own_heads(model.config, part, n) for part in 'qkv']
            rows = [8 * heads for heads in own if heads]
        if name.endswith('c_fc.weight'):
            rows = [len(weight) // 2] * 2
        blocks[name] = weight.split(rows)

    of_muon = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')
    matrices = [block for name in weights if name.endswith(of_muon) for block in blocks[name]]
    decay, plain = [], []
    for name in weights:
        if not name.endswith(of_muon):
            (decay if name.endswith(('wte.weight', 'lm_head.weight')) else plain).extend(
                blocks[name]
            )
    groups = [{'params': decay, 'weight_decay': 0.3}, {'params': plain, 'weight_decay': 0.0}]
    theirs = [
        torch.optim.Muon(matrices, 0.02, 0.3, adjust_lr_fn='match_rms_adamw'),
        torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8),
    ]
    ours = muon(model)
    for _ in range(3):
        for name, gradient in step(model, ours).items():
            rows = [len(block) for block in blocks[name]]
            for block, g in zip(blocks[name], gradient.split(rows), strict=True):
                block.grad = g.clone()
        for optimizer in theirs:
            optimizer.step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, weights[name], msg=name)


@pytest.mark.parametrize('kind', ['adamw', 'muon'])
def test_the_state_of_an_optimizer_is_taken_by_name_and_by_number_as_older_versions_wrote_it(kind):
    model, again = make('head gate'), make('head gate')
    optimizer = muon(model, optimizer=kind)
    other = muon(again, optimizer=kind, weight_decay=0.7)
    step(model, optimizer)
    expected = optimizer_state(model, optimizer)
    for state in (expected, optimizer.state_dict()['state']):
        load_state(again, other, None, {'path': 'x', 'optimizer': {'state': state}, 'scaler': {}})
        for name, tensors in optimizer_state(again, other).items():
            for key, tensor in tensors.items():
                assert torch.equal(tensor, expected[name][key]), (name, key)
    name, moments = next(iter(expected.items()))
    for absent in moments:  # AdamW would write past the end of one that is too small
        lacking = {name: {key: t for key, t in moments.items() if key != absent}}
        with pytest.raises(ValueError, match='moments'):
            load_state(again, other, None, {'path': 'x', 'optimizer': {'state': lacking}})
    # What the settings say now, not what they said when the checkpoint was written.
    assert {group['weight_decay'] for group in other.param_groups} == {0.7, 0.0}
