"""The family of value residuals, beyond what tests/test_variants.py checks of every variant."""

import pytest
import torch
from conftest import raises_one_line
from runs import assert_same
from variants import RES, SIZE, SV, config_of, make, tokens

from lib.rundir import Checkpoint, optimizer_state
from model import GPT, GPTConfig
from train import TrainConfig, make_optimizers

B, T = 2, 11


# --- how it starts ------------------------------------------------------------------------------


def test_a_gate_of_zeros_is_resformer():
    plain, gated = (
        GPT(GPTConfig(**SIZE, **RES, **gate)) for gate in ({}, dict(residual_weights='head'))
    )
    for ours, theirs in zip(gated(tokens(B, T)), plain(tokens(B, T)), strict=True):
        assert ours is theirs or torch.equal(ours, theirs)


def test_a_channel_gate_starts_as_rwkvs():
    part = GPT(config_of('vanilla', **RES, residual_weights='channel')).transformer.h[1].attn.v
    assert not part.gate_down.weight.any()
    D = len(part.gate_bias)
    for c in (0, 5, D - 1):
        expected = 0.73 - 0.4 * (c / (D - 1) - 0.5)
        assert part.gate_bias[c].item() == pytest.approx(expected)
    up = part.gate_up.weight.double()
    short = up @ up.T if up.size(0) < up.size(1) else up.T @ up
    torch.testing.assert_close(short, 0.01 * torch.eye(len(short)).double(), atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    'name, part, std',
    [
        ('tables', '.ve.', 64**-0.5),
        ('projections of x0', '.vx.', 0.02),
        ('relu gate', 'v.gate', 0.02),
        ('output gate GQA', 'attn.gate', 0.02),
    ],
)
def test_a_matrix_of_the_family_starts_as_wide_as_it_should(name, part, std):
    model = GPT(config_of(name, n_embd=64))
    drawn = [p for key, p in model.named_parameters() if part in key and p.dim() == 2]
    assert drawn and all(p.std().item() == pytest.approx(std, rel=0.25) for p in drawn)


def test_the_gain_of_normed_queries_starts_as_nanochats():
    assert GPT(config_of('vanilla', qk_norm=True)).transformer.h[0].attn.q.gain.unique() == 1.44


def test_the_heads_that_a_borrower_keeps_start_as_vanillas_first_ones():
    """Also where torch draws fewer numbers otherwise than the first of more: their number is odd."""
    size = {**SIZE, 'n_embd': 20, 'arch': 'gpt2'}
    half = GPT(GPTConfig(**size, **SV, share_v_heads=1)).transformer.h[1].attn.v.proj.weight
    whole = GPT(GPTConfig(**size)).transformer.h[1].attn.v.proj.weight
    assert torch.equal(half, whole[:15])


def test_what_decays_what_is_logged_and_what_is_muons():
    """A sample of each kind of parameter; bare numbers and vectors do not decay."""
    model = GPT(
        config_of(
            'V_1 and tables, learned', x0_residual=True, denseformer=True, qk_norm=True, arch='gpt2'
        )
    )
    names = ('head gate from all GQA', 'channel gate', 'relu gate', 'output gate GQA')
    gates = [GPT(config_of(name)) for name in names]
    anchors = [GPT(config_of(name)) for name in ('anchor', 'projections of x0')]
    needs = {}
    for each in (model, *gates, *anchors):
        needs |= each.needs
    decaying = {name for name in needs if needs[name].decay}
    tables = {'transformer.wte.weight', 'transformer.wpe.weight', 'lm_head.weight'}
    muons = {name for name in needs if needs[name].muon}
    assert decaying == muons | tables
    endings = ('proj.weight', 'c_fc.weight', 'c_gate.weight', 'anchor.weight', 'vx.0.weight')
    assert all(name.endswith((*endings, 'vx.2.weight')) for name in muons) and len(muons) == 24
    logged = {name for name in needs if needs[name].logged}
    words = ('residual_lambda', '.dwa.', '.x0.')
    assert logged == {name for name in needs if any(word in name for word in words)}
    assert logged == {name for name in needs if needs[name].optional}


# --- Muon ------------------------------------------------------------------------------------------


def muon(model, **settings):
    settings = {'optimizer': 'muon', 'learning_rate': 0.02, 'weight_decay': 0.3, **settings}
    return make_optimizers(model, TrainConfig(**settings))


def step(model, optimizers):
    """Take a step. Returns {name: gradient}."""
    idx = tokens(B, T)
    model(idx, idx)[1].backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return gradients


def test_muon_is_torchs_for_each_matrix_bit_for_bit_and_adamw_for_the_rest():
    model = make('SVFormer GQA')
    matrix = model.transformer.h[1].mlp.c_fc.weight
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    matrices, decay, plain = [], [], []
    for name, weight in weights.items():
        kinds = (
            (('proj.weight', 'c_gate.weight', 'c_fc.weight'), matrices),
            (('wte.weight', 'lm_head.weight'), decay),
            ('', plain),
        )
        next(kind for ending, kind in kinds if name.endswith(ending)).append(weight)
    groups = [{'params': decay, 'weight_decay': 0.3}, {'params': plain, 'weight_decay': 0.0}]
    theirs = [
        torch.optim.Muon(matrices, 0.02, 0.3, adjust_lr_fn='match_rms_adamw'),
        torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8, fused=True),
    ]
    ours = muon(model)
    for is_trained in (True, False, True):  # the second time, a matrix has no gradient
        matrix.requires_grad_(is_trained)
        for name, gradient in step(model, ours).items():
            weights[name].grad = gradient
        for optimizer in theirs:
            optimizer.step()
        assert_same(dict(model.named_parameters()), weights)


@pytest.mark.parametrize('kind', ['adamw', 'muon'])
def test_an_optimizers_state_must_have_its_weights_shape_and_its_settings_are_those_of_now(kind):
    model, again = make('head gate'), make('head gate')
    optimizers = muon(model, optimizer=kind)
    others = muon(again, optimizer=kind, weight_decay=0.7)
    step(model, optimizers)
    state = optimizer_state(optimizers)
    checkpoint = Checkpoint(path='x', optimizer={'state': state}, scaler={})
    checkpoint.load_state(others, None)
    assert len(state) == len(list(model.parameters()))
    assert_same(optimizer_state(others), state)
    name, moments = next(iter(state.items()))
    for kind in moments.keys() - {
        'step'
    }:  # AdamW would write past the end of one that is too small
        checkpoint['optimizer'] = {'state': {name: moments | {kind: torch.ones(2)}}}
        with raises_one_line('moments of', name):
            checkpoint.load_state(others, None)
    # What the settings say now, not what they said when the checkpoint was written.
    groups = [group for optimizer in others for group in optimizer.param_groups]
    assert {group['weight_decay'] for group in groups} == {0.7, 0.0}
