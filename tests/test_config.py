"""GPTConfig: settings that do nothing or contradict another are refused by name; shape and variant."""

import dataclasses
import json

import pytest
from variants import CLA, KEYS2, RES, SIZE, SV2, VARIANTS, config_of

import model as model_py
from model import GPTConfig, wire

LLAMA3 = (8.0, 1.0, 4.0, 8192)

# Settings, and words of the message that refuses them.
REFUSED = [
    (dict(residual_from='all'), 'residual_from v_residual'),
    (dict(residual_layers=(1,)), 'residual_layers v_residual'),
    (dict(residual_lambda=(2.0, 1.0)), 'residual_lambda v_residual'),
    (dict(residual_learned=True), 'residual_learned v_residual'),
    (dict(residual_map='identity'), 'residual_map v_residual'),
    (dict(share_v=True, residual_from='all'), 'residual_from v_residual'),
    (dict(q_residual=True, residual_map='identity'), 'residual_map v_residual'),
    (dict(k_residual=True, residual_map='cross'), 'residual_map v_residual'),
    (
        dict(RES, residual_map='identity', residual_lambda=(2.0, 1.0)),
        'residual_map residual_lambda',
    ),
    (dict(RES, residual_map='cross', residual_lambda=(2.0, 1.0)), 'residual_map residual_lambda'),
    (dict(RES, residual_map='identity', residual_learned=True), 'residual_map residual_learned'),
    (dict(RES, residual_map='cross', residual_learned=True), 'residual_map residual_learned'),
    (dict(RES, residual_lambda=(2.0,)), 'residual_lambda source own'),
    (dict(RES, residual_lambda=(1.0, 1.0, 1.0)), 'residual_lambda source own'),
    (dict(RES, k_residual=True, residual_learned=True), 'residual_learned v_residual k_residual'),
    (
        dict(q_residual=True, k_residual=True, residual_learned=True),
        'residual_learned q_residual k_residual',
    ),
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
    (dict(SV2, share_q=True, share_k=True), 'share_q share_k share_v'),
    (dict(RES, residual_layers=(0, 1)), 'residual_layers layer.0'),
    (dict(RES, residual_layers=(3,)), 'residual_layers layer.3'),
    (dict(RES, residual_layers=(-1,)), 'residual_layers layer.-1'),
    (dict(RES, residual_layers=(2.0,)), 'residual_layers 2.0 whole.numbers'),
    (dict(RES, residual_layers=(True,)), 'residual_layers True whole.numbers'),
    (dict(RES, residual_layers=('2',)), 'residual_layers whole.numbers'),
    (dict(RES, residual_layers=(1, 2, 1)), 'residual_layers layer.1 once'),
    (dict(RES, **SV2, residual_layers=(1, 2)), 'residual_layers share_v'),
    (dict(RES, k_residual=True, **KEYS2, residual_layers=(1,)), 'residual_layers share_k'),
    (dict(RES, n_layer=1), 'v_residual n_layer'),
    (dict(share_k=True, n_layer=1), 'share_k n_layer'),
    (dict(neutreno=0.4, n_layer=1), 'neutreno n_layer'),
    (dict(n_embd=30), 'n_embd n_head'),
    (dict(n_kv_head=3), 'n_head n_kv_head'),
    (dict(n_kv_head=8), 'n_head n_kv_head'),
    (dict(n_kv_head=-2), 'n_kv_head'),
    (dict(n_embd=36), 'n_embd n_head'),
    (dict(rope_theta=0.0), 'rope_theta 0.0 positive'),
    (dict(rope_theta=float('nan')), 'rope_theta nan positive'),
    (dict(norm_eps=-1.0), 'norm_eps 1.0 0'),
    (dict(arch='gpt2', rope_theta=500.0), 'rope_theta arch'),
    (dict(arch='gpt2', rope_scaling=LLAMA3), 'rope_scaling arch'),
    (dict(arch='bert'), 'arch llama gpt2'),
    (dict(RES, residual_from='last'), 'residual_from first previous all'),
    (dict(RES, residual_map='none'), 'residual_map current identity cross'),
]


@pytest.mark.parametrize('settings, words', REFUSED, ids=str)
def test_useless_or_contradictory_settings_are_refused_by_name(settings, words):
    in_any_order = ''.join(rf'(?=.*{word}\b)' for word in words.split())
    with pytest.raises(ValueError, match='^' + in_any_order):
        GPTConfig(**{**SIZE, **settings})


@pytest.mark.parametrize(
    'scaling',
    [
        (8.0,),
        (8.0, 1.0, 4.0),
        (8.0, 1.0, 4.0, 8192, 1),
        (8.0, 4.0, 4.0, 8192),
        (8.0, 4.0, 1.0, 8192),
        (0.0, 1.0, 4.0, 8192),
        (8.0, 0.0, 4.0, 8192),
        (8.0, -1.0, 4.0, 8192),
        (8.0, 1.0, 4.0, -8192),
        (8.0, 1.0, 4.0, 0),
        (float('nan'), 1.0, 4.0, 8192),
        ('8', 1.0, 4.0, 8192),
        (True, 1.0, 4.0, 8192),
        (None, 1.0, 4.0, 8192),
    ],
    ids=str,
)
def test_a_wrong_rope_scaling_is_refused(scaling):
    message = 'rope_scaling=.*factor, low_freq < high_freq, original_length'
    with pytest.raises(ValueError, match=message):
        GPTConfig(**SIZE, rope_scaling=scaling)


def test_a_layer_without_a_source_is_refused_where_residual_layers_names_it(opposite):
    settings = dict(SIZE, **RES, n_layer=4, residual_from='opposite')
    sources = [layer.sources['v'] for layer in wire(GPTConfig(**settings))]
    assert sources == [[], [], [('v', 1)], [('v', 0)]]
    assert GPTConfig(**settings, residual_layers=(2, 3))
    message = "residual_layers names layer 1, which gets no source with residual_from='opposite'"
    with pytest.raises(ValueError, match=message):
        GPTConfig(**settings, residual_layers=(1, 3))


def test_a_residual_of_which_no_layer_has_a_source_is_refused(monkeypatch):
    monkeypatch.setitem(model_py.SOURCES, 'nothing', lambda n, L: [])
    message = "k_residual does nothing: with n_layer=3 and residual_from='nothing', no layer has"
    with pytest.raises(ValueError, match=message):
        GPTConfig(**SIZE, k_residual=True, residual_from='nothing')


@pytest.mark.parametrize('source', [1, 2, -1])
def test_a_source_that_is_no_earlier_layer_is_refused(monkeypatch, source):
    monkeypatch.setitem(model_py.SOURCES, 'later', lambda n, L: [source])
    message = (
        f"residual_from='later' gives layer 1 the source {source}, which is not an earlier layer"
    )
    with pytest.raises(ValueError, match=message):
        GPTConfig(**SIZE, **RES, residual_from='later')


def test_a_source_that_is_no_layer_has_no_keys_to_attend_to(monkeypatch):
    monkeypatch.setitem(model_py.SOURCES, 'table', lambda n, L: ['table'])
    assert GPTConfig(**SIZE, **RES, residual_from='table')
    with pytest.raises(ValueError, match="residual_map='cross'.* residual_from='table'"):
        GPTConfig(**SIZE, **RES, residual_from='table', residual_map='cross')


@pytest.mark.parametrize('name', VARIANTS)
def test_shape_and_variant_together_are_the_config(name):
    config = config_of(name)
    shape, variant = config.shape(), config.variant()
    assert list(shape) == ['block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_inner']
    assert not shape.keys() & variant.keys()
    assert GPTConfig(**shape, **variant) == config
    assert variant == {key: VARIANTS[name][key] for key in VARIANTS[name] if key not in shape}


def test_a_new_field_is_part_of_the_variant_by_itself():
    @dataclasses.dataclass
    class Fork(GPTConfig):
        my_idea: float = 0.0

    assert Fork(**SIZE, my_idea=2.0).variant() == {'my_idea': 2.0}
    assert Fork(**SIZE).variant() == {} and Fork(**SIZE).shape() == GPTConfig(**SIZE).shape()


def test_a_config_comes_back_from_json_as_it_was():
    config = GPTConfig(
        **SIZE,
        **CLA,
        **RES,
        rope_scaling=LLAMA3,
        residual_lambda=(2.0, 1.0),
        residual_layers=(2,),
    )
    assert GPTConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
