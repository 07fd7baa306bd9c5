"""GPTConfig: a setting that changes nothing or contradicts another is refused by name."""

import dataclasses
import json
import random

import pytest
import reference
from conftest import raises_one_line
from variants import KEYS2, RES, SIZE, SV, SV2, VARIANTS, config_of, tokens

import model as model_py
from model import GPT, GPTConfig

NAN, INFINITE = float('nan'), float('inf')
NEUTRAL = dict(residual_lambda=(0.0, 1.0))

# Settings, and words of the message that refuses them.
REFUSED = [
    # What does nothing: a few, for their words; the rule has a test of its own.
    (dict(residual_from='all'), 'residual_from v_residual q_residual k_residual'),
    (dict(q_residual=True, residual_map='identity'), 'residual_map v_residual'),
    (
        dict(RES, k_residual=True, residual_map='cross', residual_lambda=(2.0, 1.0)),
        'residual_map residual_lambda',
    ),
    (dict(RES, **SV, share_v_every=3), 'v_residual share_v'),
    (dict(RES, **NEUTRAL), 'v_residual residual_lambda'),
    (dict(RES, residual_from='all', n_layer=2), 'residual_from n_layer'),
    (dict(arch='gpt2', rope_theta=500.0), 'rope_theta arch'),
    # contradictions
    (dict(RES, k_residual=True, residual_learned=True), 'residual_learned v_residual k_residual'),
    (dict(SV2, share_q=True, share_k=True), 'share_q share_k share_v'),
    (dict(RES, residual_layers=(0, 1)), 'residual_layers 0'),
    (dict(RES, residual_layers=(3,)), 'residual_layers 3'),
    (dict(RES, residual_layers=(True,)), 'residual_layers True'),
    (dict(RES, residual_layers=(1, 2, 1)), 'residual_layers 1'),
    (dict(RES, k_residual=True, **KEYS2, residual_layers=(1,)), 'residual_layers share_k'),
    # contradictions of the family
    (dict(share_v_from=(0, 0)), 'share_v_from 3 layers'),
    (dict(share_v_from=(0, 0, 1)), 'share_v_from'),
    (dict(share_v_from=(0, 2, 2)), 'share_v_from'),
    (dict(share_v_from=(0, 1, 2)), 'share_v_from'),
    (dict(SV, share_v_heads=4), 'share_v_heads 4'),
    (
        dict(RES, share_v_from=(0, 1, 1), share_v_heads=1, residual_layers=(2,)),
        'residual_layers',
    ),
    (
        dict(RES, share_v_from=(0, 1, 1), share_v_heads=1, residual_map='cross'),
        'share_v_heads residual_map',
    ),
    (dict(RES, residual_from='token'), 'residual_layers'),
    (dict(RES, k_residual=True, residual_from='token', residual_layers=(1,)), 'k_residual'),
    (
        dict(RES, residual_from='token', residual_layers=(1,), residual_map='identity'),
        'residual_map',
    ),
    (dict(RES, residual_gate='head', residual_learned=True), 'residual_learned residual_gate'),
    (dict(RES, residual_gate='head', residual_map='cross'), 'residual_gate residual_map'),
    (dict(RES, residual_gate='channel', residual_lambda=(2.0, 1.0)), 'residual_lambda'),
    (dict(RES, residual_gate='channel', residual_from='all'), 'channel all'),
    (dict(RES, residual_gate='head', residual_gate_inputs=33), 'residual_gate_inputs 32'),
    # out of range
    (dict(n_embd=30), 'n_embd n_head'),
    (dict(n_embd=36), 'n_embd n_head'),
    (dict(n_kv_head=3), 'n_head n_kv_head'),
    (dict(n_kv_head=-2), 'n_kv_head -2'),
    (dict(dropout=1.0), 'dropout 1.0'),
    (dict(rope_theta=NAN), 'rope_theta nan'),
    (dict(RES, residual_lambda=(INFINITE, 1.0)), 'residual_lambda inf'),
    (dict(RES, residual_lambda=(1.0, 1.0, 1.0)), 'residual_lambda source own'),
    (dict(RES, residual_from='last'), 'residual_from first previous all'),
    (dict(rope_scaling=(8.0, 4.0, 4.0, 8192)), 'rope_scaling'),
    (dict(rope_scaling=('8', 1.0, 4.0, 8192)), 'rope_scaling'),
]


@pytest.mark.parametrize('settings, words', REFUSED, ids=str)
def test_useless_or_contradictory_settings_are_refused_by_name(settings, words):
    with raises_one_line(*words.split()):
        GPTConfig(**{**SIZE, **settings})


@pytest.mark.parametrize(
    'settings, same',
    [
        (dict(n_kv_head=4), {}),
        (dict(RES, residual_lambda=(0.5, 0.5)), RES),
        (dict(RES, residual_layers=(2, 1)), RES),
        (dict(SV, share_v_every=3), SV),
    ],
    ids=str,
)
def test_a_value_that_the_default_stands_for_is_taken_as_the_default(settings, same):
    assert GPTConfig(**{**SIZE, **settings}) == GPTConfig(**{**SIZE, **same})


CHOICES = {
    'arch': ['gpt2'],
    'n_kv_head': [1, 2, 4],
    'rope_theta': [100.0],
    'norm_eps': [1e-2],
    'tie_embeddings': [True],
    'embed_norm': [True],
    'residual_from': ['previous', 'all'],
    'residual_lambda': [(0.5, 0.5), (2.0, 1.0), (0.0, 1.0)],
    'residual_layers': [(1,), (2,), (1, 2)],
    'residual_map': ['identity', 'cross'],
    'neutreno': [0.4],
    'residual_gate': ['head', 'channel'],
    'residual_gate_inputs': [4],
    'residual_gate_rank': [4],
    'share_v_from': [(0, 0, 0), (0, 1, 0)],
    'share_v_heads': [1, 3],
}


def drawn_settings(draw):
    """Some settings at random, mostly of residuals and sharing."""
    settings = {'n_layer': draw.choice((1, 2, 3))}
    for field in dataclasses.fields(GPTConfig):
        values = CHOICES.get(field.name, [True] if field.default is False else [])
        if field.name.endswith('_every'):
            values = [1, 2, 3]
        if values and draw.random() < 0.2:
            settings[field.name] = draw.choice(values)
    return settings


def outcome(settings):
    """The parameters and the logits of a model, whether its settings do something or not."""
    config = GPTConfig.saved({**SIZE, 'n_embd': 16, 'n_inner': 8, **settings})
    model = reference.perturb(GPT(config))
    names = [name for name, _ in model.named_parameters()]
    return names, model(tokens(1, 6))[0].tolist()


def test_the_rule_refuses_a_setting_if_and_only_if_it_changes_nothing():
    draw = random.Random(0)
    refused = accepted = 0
    for _ in range(300):
        settings = drawn_settings(draw)
        try:
            config = GPTConfig(**{**SIZE, 'n_embd': 16, 'n_inner': 8, **settings})
            idle = set()
        except ValueError as refusal:
            idle = {str(refusal).split('=')[0]} & settings.keys()
            if 'does nothing' not in str(refusal) or not idle:
                continue  # a contradiction
        for name in idle or config.variant():
            without = {key: value for key, value in settings.items() if key != name}
            try:
                changes = outcome(without) != outcome(settings)
            except ValueError:
                continue
            assert changes == (not idle), (settings, name)
            refused += bool(idle)
            accepted += not idle
    assert refused > 20 and accepted > 20


def test_a_saved_config_may_hold_what_does_nothing_but_no_other_field():
    saved = GPTConfig.saved({**SIZE, **SV, 'v_residual': True, 'residual_layers': []})
    assert saved.v_residual and saved.residual_layers == ()
    with pytest.raises(ValueError, match='my_idea'):
        GPTConfig.saved({**SIZE, 'my_idea': 1})
    with pytest.raises(ValueError, match='n_layer'):
        GPTConfig.saved({**SIZE, 'n_layer': 0})


def test_a_residual_of_which_no_layer_has_a_source_is_refused(monkeypatch):
    monkeypatch.setitem(model_py.SOURCES, 'nothing', lambda n, L: [])
    with pytest.raises(ValueError, match='k_residual.*residual_from'):
        GPTConfig(**SIZE, k_residual=True, residual_from='nothing')


def test_a_layer_without_a_source_is_refused_where_residual_layers_names_it(opposite):
    settings = dict(SIZE, **RES, n_layer=4, residual_from='opposite')
    assert GPTConfig(**settings, residual_layers=(2, 3)) == GPTConfig(**settings)
    with pytest.raises(ValueError, match='residual_layers.* names 1.*residual_from'):
        GPTConfig(**settings, residual_layers=(1, 3))


@pytest.mark.parametrize('name', VARIANTS)
def test_shape_and_variant_together_are_the_config(name):
    config = config_of(name)
    shape, variant = config.shape(), config.variant()
    assert list(shape) == ['block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_inner']
    assert variant == {key: VARIANTS[name][key] for key in VARIANTS[name] if key not in shape}
    assert GPTConfig(**shape, **variant) == config
    assert GPTConfig.saved(json.loads(json.dumps(dataclasses.asdict(config)))) == config
