"""The family of value residuals, beyond what tests/test_variants.py checks of every variant."""

import copy

import pytest
import reference
import torch
from variants import KEYS2, RES, SIZE, SV, config_of, make, tokens

from lib.rundir import load_state, optimizer_state
from model import GPT, GPTConfig
from train import TrainConfig, check_rates, make_optimizer

B, T = 2, 11


# --- the same as others' code ---------------------------------------------------------------------


def mixed_values(model, idx):
    """What layer 2 mixes: (its normed input, its own raw values, V_1, the values it attends with)."""
    seen = {}
    block = model.transformer.h[2]
    block.attn.c_attn.register_forward_hook(lambda module, args, out: seen.update(x=args[0]))
    block.register_forward_hook(lambda module, args, out: seen.update(raw=out[1], attended=out[2]))
    block.attn.wiring.attended_later += [('v', 2)]
    for layer in model.transformer.h:
        layer.attn.wiring.raw_later += [('v', 0), ('v', 2)]
    model(idx)
    return seen['x'], seen['raw']['v', 2], seen['raw'].get(('v', 0)), seen['attended']['v', 2]


def test_a_head_gate_is_nanochats():
    """nanochat's gate: 3 * sigmoid(Linear(12 -> kv heads)(x[..., :12])); v + gate * ve, v as (B, T, h, d)."""
    settings = dict(RES, residual_gate='head', residual_gate_inputs=12, residual_lambda=(3.0, 1.0))
    tables = dict(residual_from='token', residual_layers=(2,))
    model = make(**settings, **tables, n_kv_head=2)
    idx = tokens(B, T)
    x, own, _, attended = mixed_values(model, idx)
    gate = 3 * torch.sigmoid(x[..., :12] @ model.transformer.h[2].attn.gate.weight.T)
    ve = model.transformer.ve['2'](idx).view(B, T, 2, 8)
    v = own.transpose(1, 2) + gate.unsqueeze(-1) * ve
    torch.testing.assert_close(attended.transpose(1, 2), v)


def test_a_head_gate_is_x_transformers_with_the_sign_turned():
    """x-transformers: mix = sigmoid(to_value_residual_mix(x)) per head; v = v_1.lerp(v, mix)."""
    model = make(**RES, residual_gate='head', residual_gate_bias=True)
    x, own, first, attended = mixed_values(model, tokens(B, T))
    gate = model.transformer.h[2].attn.gate
    mix = torch.sigmoid(torch.nn.functional.linear(x, -gate.weight, -gate.bias))
    mix = mix.transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(attended, first.lerp(own, mix))


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


def by_torch(model, rows):
    """The same steps by torch.optim.Muon, for the blocks of {name: numbers of rows}, and by AdamW: a
    function of {name: gradient} that gives {name: weight}."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    blocks = {name: weights[name].split(numbers) for name, numbers in rows.items()}
    matrices = [block for name in blocks for block in blocks[name]]
    muon = torch.optim.Muon(matrices, 0.02, 0.3, adjust_lr_fn='match_rms_adamw')
    others = [name for name in weights if name not in rows]
    decay = [name for name in others if name.endswith(('wte.weight', 'lm_head.weight'))]
    groups = [
        {'params': [weights[name] for name in decay], 'weight_decay': 0.3},
        {'params': [weights[name] for name in others if name not in decay], 'weight_decay': 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)

    def step(gradients):
        for name, gradient in gradients.items():
            parts = blocks.get(name, [weights[name]])
            for part, g in zip(parts, gradient.split([len(part) for part in parts]), strict=True):
                part.grad = g.clone()
        muon.step()
        adamw.step()
        return weights

    return step


def test_muon_is_torchs_for_each_matrix_and_adamw_for_the_rest():
    model = make('SVFormer GQA')
    rows = {}
    for name, p in model.named_parameters():
        if 'c_attn' in name:
            n = int(name.split('.')[2])
            own = [reference.own_heads(model.config, part, n) for part in 'qkv']
            rows[name] = [8 * heads for heads in own if heads]
        elif name.endswith(('c_proj.weight', 'c_fc.weight')):
            rows[name] = [len(p) // 2] * 2 if 'c_fc' in name else [len(p)]
    optimizer, theirs = muon(model), by_torch(model, rows)
    for _ in range(3):
        expected = theirs(step(model, optimizer))
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, expected[name], msg=name)


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


def test_muon_leaves_everything_alone_where_the_scaler_found_an_infinite_gradient():
    model = make('head gate')
    optimizer = muon(model)
    step(model, optimizer)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    idx = tokens(B, T)
    model(idx, idx)[1].backward()
    model.transformer.h[1].attn.c_attn.weight.grad[0, 0] = float('inf')
    scaler = torch.amp.GradScaler('cpu', init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[0][name]), name
    for i, state in optimizer.state_dict()['state'].items():
        for kind, tensor in state.items():
            assert torch.equal(tensor, before[1]['state'][i][kind]), (i, kind)
