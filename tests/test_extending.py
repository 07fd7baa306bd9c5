"""What a fork of model.py relies on: a source, weights and an idea after attention are a few lines each."""

from dataclasses import dataclass

import pytest
import reference
import torch
import variants
from conftest import raises_one_line
from programs import patched_model
from variants import RES, SIZE, in_chunks, tokens

from model import GPTConfig

B, T = 2, 11


# --- three ideas, each a patch of model.py ---------------------------------------------------------


def trained_and_decoded(patched, **settings):
    """A model of a patch, after the checks that hold for each of them."""
    model = patched.GPT(patched.GPTConfig(**{**SIZE, 'n_layer': 5, **settings}))
    idx = tokens(B, T)
    # Twice: in a product that starts neutral, one factor waits for the other's first step.
    for _ in range(2):
        model.zero_grad()
        model(idx, idx)[1].backward()
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
    assert all(p.grad.count_nonzero() for p in model.parameters())
    decoded = in_chunks(model, idx, (5, 1, 5), model.new_cache(B, T))
    torch.testing.assert_close(decoded, model(idx)[0], atol=1e-4, rtol=1e-4)
    return model


@pytest.mark.parametrize(
    'settings',
    [
        dict(v_residual='mirror', residual_weights='learned'),
        dict(v_residual='mirror', residual_map='cross'),
        dict(variants.SV2, v_residual='mirror'),
        dict(q_residual='mirror', k_residual='mirror', residual_lambda=(0.4, 0.7)),
    ],
    ids=str,
)
def test_a_source_is_one_line(settings, tmp_path, monkeypatch):
    patched = patched_model('source', tmp_path)
    monkeypatch.setitem(reference.SOURCES, 'mirror', patched.SOURCES['mirror'])
    model = trained_and_decoded(patched, **settings)
    weights = {key: p.detach().double() for key, p in model.named_parameters()}
    expected = reference.logits(model.config, weights, tokens(B, T))
    torch.testing.assert_close(model(tokens(B, T))[0].double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize('source', [True, 'all'])
def test_weights_per_head_start_neutral_and_are_refused_where_they_weigh_nothing(source, tmp_path):
    patched = patched_model('heads', tmp_path)
    idx = tokens(B, T)
    plain, weighed = (
        patched.GPT(patched.GPTConfig(**SIZE, v_residual=source, residual_weights=kind))
        for kind in ('fixed', 'heads')
    )
    assert torch.equal(plain(idx)[0], weighed(idx)[0])
    trained_and_decoded(patched, v_residual=source, n_kv_head=2, residual_weights='heads')
    with torch.autocast('cpu', dtype=torch.float16):
        weighed(idx, idx)[1].backward()
    for settings, name in (({}, 'v_residual'), (dict(RES, residual_map='cross'), 'residual_map')):
        with raises_one_line(name, of=ValueError):
            patched.GPTConfig(**SIZE, **settings, residual_weights='heads')


def test_an_idea_after_attention(tmp_path):
    model = trained_and_decoded(patched_model('centered', tmp_path), centered=True, n_kv_head=2)
    seen = {}
    attention = model.transformer.h[2].attn
    attention.c_proj.register_forward_pre_hook(lambda module, args: seen.update(y=args[0]))
    model(tokens(B, T))
    assert seen['y'].view(B, T, 4, 8).mean(dim=2).abs().max() < 1e-5


# --- the list of variants says what is missing -----------------------------------------------------


def test_a_setting_without_a_variant_is_told_where_to_add_one(opposite, monkeypatch):
    @dataclass
    class Fork(GPTConfig):
        my_number: float = 0.5
        my_switch: bool = False

    monkeypatch.setattr(variants, 'GPTConfig', Fork)
    source, *of_q_and_k, number, switch = variants.uncovered()
    assert "v_residual='opposite'" in source and len(of_q_and_k) == 2
    assert 'my_number=0.5' in number and 'my_switch=True' in switch
    assert 'tests/variants.py' in source and 'tests/reference.py' in source
