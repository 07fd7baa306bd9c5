"""GPTConfig: a setting that changes nothing or contradicts another is refused by name."""

import dataclasses
import json
import random

import pytest
import reference
from conftest import raises_one_line
from variants import KEYS2, RELU, RES, SIZE, SV, SV2, VARIANTS, config_of, tokens

from model import GPT, GPTConfig

NAN, INFINITE = float('nan'), float('inf')
NEUTRAL = dict(residual_lambda=(0.0, 1.0))

# Settings, and words of the message that refuses them.
REFUSED = [
    # What does nothing: a few, for their words; the rule has a test of its own.
    (dict(residual_layers=(1,)), 'residual_layers'),
    (dict(RES, share_v=3), 'v_residual'),
    (NEUTRAL, 'residual_lambda nothing'),
    (dict(RES, residual_layers=(1,), residual_weights='channel', gate_bias=True), 'gate_bias'),
    (dict(arch='gpt2', rope_theta=500.0), 'rope_theta'),
    # contradictions
    (dict(RES, gate_inputs=4), 'gate_inputs'),
    (dict(RES, residual_weights='head', gate_rank=4), 'gate_rank'),
    (dict(SV2, share_q=True, share_k=True), 'share_q share_k share_v'),
    (dict(RES, residual_layers=(0, 1)), 'residual_layers 0'),
    (dict(RES, residual_layers=(3,)), 'residual_layers 3'),
    (dict(RES, residual_layers=(True,)), 'residual_layers True'),
    (dict(RES, residual_layers=(1, 2, 1)), 'residual_layers 1'),
    (dict(RES, k_residual=True, **KEYS2, residual_layers=(1,)), 'residual_layers share_k'),
    # contradictions of the family
    (dict(share_v=(0, 0)), 'share_v 3 layers'),
    (dict(share_v=1), 'share_v 1'),
    (dict(share_v=(0, 0, 1)), 'share_v'),
    (dict(share_v=(0, 2, 2)), 'share_v'),
    (dict(share_v=(0, 1, 2)), 'share_v'),
    (dict(SV, share_v_heads=4), 'share_v_heads 4'),
    (
        dict(RES, share_v=(0, 1, 1), share_v_heads=1, residual_map='cross'),
        'residual_map share_v_heads',
    ),
    (dict(v_residual='token'), 'v_residual residual_layers'),
    (dict(k_residual='token', residual_layers=(1,)), 'k_residual token'),
    (
        dict(v_residual='token', residual_layers=(1,), residual_map='identity'),
        'residual_map',
    ),
    (dict(RES, residual_map='cross', residual_weights='head'), 'residual_map residual_weights'),
    (dict(RES, residual_map='cross', residual_lambda=(2.0, 1.0)), 'residual_map residual_lambda'),
    (dict(RES, residual_weights='channel', residual_lambda=(2.0, 1.0)), 'residual_lambda'),
    (dict(v_residual='all', residual_weights='channel'), 'channel all'),
    (dict(attn_res=True, denseformer=True), 'attn_res denseformer'),
    # own weight 0: nobody has the values that are read
    (dict(v_residual='previous', residual_lambda=(1.0, 0.0)), 'residual_lambda'),
    (
        dict(
            v_residual='token',
            residual_layers=(0,),
            residual_lambda=(1.0, 0.0),
            neutreno=0.4,
            n_layer=1,
        ),
        'residual_lambda',
    ),
    (
        dict(RES, q_residual=True, k_residual=True, residual_lambda=(1.0, 0.0)),
        'none of q, k, v',
    ),
    # a weight of 0 for ever: vanilla, and a table or a gate without a gradient
    (dict(NEUTRAL, q_residual=True), 'residual_lambda q_residual'),
    (
        dict(v_residual='token', residual_layers=(1,), residual_lambda=(0.0, 2.0)),
        'residual_lambda v_residual',
    ),
    (dict(RELU, residual_lambda=(0.0, 2.0)), 'residual_lambda'),
    (dict(RES, residual_weights='head', gate_inputs=33), 'gate_inputs 33'),
    # out of range
    (dict(n_embd=30), 'n_embd n_head'),
    (dict(n_embd=36), 'n_embd n_head'),
    (dict(n_kv_head=3), 'n_head n_kv_head'),
    (dict(n_kv_head=-2), 'n_kv_head -2'),
    (dict(dropout=1.0), 'dropout 1.0'),
    (dict(n_layer=30_000), 'n_layer 30000'),
    (dict(rope_theta=NAN), 'rope_theta nan'),
    (dict(RES, residual_lambda=(INFINITE, 1.0)), 'residual_lambda inf'),
    (dict(RES, residual_lambda=(1.0, 1.0, 1.0)), 'residual_lambda source own'),
    (dict(v_residual='last'), 'v_residual first previous all'),
    (dict(rope_scaling=(8.0, 4.0, 4.0, 8192)), 'rope_scaling'),
    (dict(rope_scaling=('8', 1.0, 4.0, 8192)), 'rope_scaling'),
]


@pytest.mark.parametrize('settings, words', REFUSED, ids=str)
def test_useless_or_contradictory_settings_are_refused_by_name(settings, words):
    with raises_one_line(*words.split()) as caught:
        GPTConfig(**{**SIZE, **settings})
    assert caught.type is ValueError


@pytest.mark.parametrize(
    'settings, same',
    [
        (dict(n_kv_head=4), {}),
        (dict(gate_inputs=32), {}),
        (dict(RES, residual_lambda=(0.5, 0.5)), RES),
        (dict(RES, residual_layers=(2, 1)), RES),
        (dict(share_v=3), SV),
        (dict(share_v=(0, 0, 0)), SV),
        (dict(v_residual='first'), RES),
        (dict(v_residual=1), RES),
        (dict(RELU, residual_lambda=(1.0, 1.0)), RELU),
    ],
    ids=str,
)
def test_two_spellings_of_one_model_both_work(settings, same):
    ours, theirs = (GPTConfig(**{**SIZE, **each}) for each in (settings, same))
    assert outcome(vars(ours)) == outcome(vars(theirs))


def drawn_settings(draw):
    """Those of two variants, of which some are left out."""
    one, other = draw.choices([*VARIANTS.values()], k=2)
    settings = {**one, **other}
    for name in draw.sample([*settings], k=len(settings) // 3):
        del settings[name]
    return settings | {'n_layer': draw.choice((1, 3, 3, 5))}


def outcome(settings):
    """The parameters and the logits of a model, whether its settings do something or not."""
    config = GPTConfig.saved({**SIZE, 'n_embd': 16, 'n_inner': 8, **settings})
    model = reference.perturb(GPT(config))
    names = [name for name, _ in model.named_parameters()]
    return names, model(tokens(1, 6))[0].tolist()


def test_the_rule_refuses_a_setting_if_and_only_if_it_changes_nothing():
    draw = random.Random(0)
    refused = accepted = 0
    for settings in [*VARIANTS.values(), *(drawn_settings(draw) for _ in range(120))]:
        try:
            config = GPTConfig(**{**SIZE, 'n_embd': 16, 'n_inner': 8, **settings})
            idle = set()
        except ValueError as refusal:
            idle = {str(refusal).split('=')[0]} & settings.keys()
            if 'does nothing' not in str(refusal) or not idle:
                continue  # a contradiction
        whole = outcome(settings)
        for name in idle or config.variant():
            without = {key: value for key, value in settings.items() if key != name}
            try:
                changes = outcome(without) != whole
            except ValueError:
                continue
            # These may say what their default stands for.
            may_be_idle = not idle and name in ('residual_lambda', 'residual_layers')
            assert changes == (not idle) or may_be_idle, (settings, name)
            refused += bool(idle)
            accepted += not idle
    assert refused > 20 and accepted > 20


def test_a_saved_config_may_hold_what_does_nothing_but_no_other_field():
    saved = GPTConfig.saved({**SIZE, **SV, 'v_residual': True, 'residual_layers': []})
    assert saved.v_residual and saved.residual_layers == ()
    with raises_one_line('my_idea', of=ValueError):
        GPTConfig.saved({**SIZE, 'my_idea': 1})
    with raises_one_line('n_layer', of=ValueError):
        GPTConfig.saved({**SIZE, 'n_layer': 0})


@pytest.mark.parametrize('name', VARIANTS)
def test_shape_and_variant_together_are_the_config(name):
    config = config_of(name)
    shape, variant = config.shape(), config.variant()
    assert list(shape) == ['block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_inner']
    assert variant == {key: VARIANTS[name][key] for key in VARIANTS[name] if key not in shape}
    assert GPTConfig(**shape, **variant) == config
    assert GPTConfig.saved(json.loads(json.dumps(dataclasses.asdict(config)))) == config
