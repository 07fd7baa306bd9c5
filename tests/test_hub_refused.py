"""hub/read.py: what GPT does not compute, and files that are damaged or evil, are refused."""

import contextlib
import json
from dataclasses import asdict

import checkpoints
import pytest
import torch
from checkpoints import FORMATS, assert_equal_logits, edit, written
from programs import BYTES, MALICE, Evil, cut, ours
from safetensors.torch import load_file, save_file

from hub.convert import export
from hub.read import load
from rundir import load_checkpoint, load_run

quiet = checkpoints.quiet


def assert_refused(folder, *words):
    """load() raises a ValueError of one line that has these words in it; no other kind."""
    with pytest.raises(ValueError) as caught:
        load(folder)
    message = str(caught.value)
    assert type(caught.value) is ValueError and '\n' not in message
    for word in words:
        assert str(word) in message, message
    assert 'weights_only' not in message  # torch's advice to try it without


# --- config.json ---------------------------------------------------------------------------------

YARN = {'rope_type': 'yarn', 'factor': 4.0}
LINEAR = {'rope_type': 'linear', 'factor': 4.0}
OLD_LINEAR = {'type': 'linear', 'factor': 4.0}
HALF_LLAMA3 = {'rope_type': 'llama3', 'factor': 4.0}


def old_rope(scaling):
    return dict(rope_parameters=None, rope_scaling=scaling)


NOT_COMPUTED = [
    ('llama', dict(model_type='qwen2'), ['qwen2', 'only llama, mistral and gpt2']),
    ('llama', dict(model_type='bert'), ['bert']),
    ('llama', dict(model_type=None), ['config.json', 'model_type']),
    ('llama', dict(model_type=['llama']), ["['llama']"]),
    ('llama', dict(attention_bias=True), ['attention_bias=True']),
    ('llama', dict(mlp_bias=True), ['mlp_bias=True']),
    ('llama', dict(head_dim=16), ['head_dim=16']),
    ('mistral', dict(head_dim=16), ['head_dim=16']),
    ('llama', dict(hidden_act='gelu'), ["hidden_act='gelu'"]),
    ('llama', dict(rope_parameters=YARN), ["'yarn'"]),
    ('llama', dict(rope_parameters=LINEAR), ["'linear'"]),
    ('llama', old_rope(OLD_LINEAR), ["'linear'"]),
    ('llama', old_rope(YARN), ["'yarn'"]),
    ('llama', old_rope(HALF_LLAMA3), ['low_freq_factor']),
    ('llama', dict(hidden_size=None), ['hidden_size']),
    ('llama', dict(num_attention_heads=5, head_dim=None), ['n_head=5']),
    ('gpt2', dict(scale_attn_by_inverse_layer_idx=True), ['scale_attn_by_inverse_layer_idx=True']),
    ('gpt2', dict(reorder_and_upcast_attn=True), ['reorder_and_upcast_attn']),
    ('gpt2', dict(scale_attn_weights=False), ['scale_attn_weights']),
    ('gpt2', dict(activation_function='relu'), ["'relu'"]),
    ('gpt2', dict(n_positions=None), ['n_positions']),
]


@pytest.mark.parametrize('kind, changes, words', NOT_COMPUTED, ids=str)
def test_a_model_that_is_not_what_gpt_computes_is_refused_by_what_differs(
    kind, changes, words, tmp_path
):
    written(tmp_path, kind)
    assert_refused(edit(tmp_path, **changes), *words)


WRONG_KINDS = [
    ('hidden_size', '32'),
    ('hidden_size', -32),
    ('num_attention_heads', 0),
    ('vocab_size', [96]),
    ('num_hidden_layers', True),
    ('max_position_embeddings', 64.5),
    ('max_position_embeddings', 0),
    ('rms_norm_eps', '1e-5'),
    ('rms_norm_eps', None),
    ('rms_norm_eps', 0.0),
    ('tie_word_embeddings', 'yes'),
    ('rope_parameters', 'default'),
    ('rope_theta', 0.0),
    ('rope_theta', 'x'),
    ('rope_theta', None),
]


@pytest.mark.parametrize('name, value', WRONG_KINDS, ids=str)
def test_a_config_with_a_value_of_a_wrong_kind_is_refused_by_name(name, value, tmp_path):
    written(tmp_path)
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    config[name] = value
    if name == 'rope_theta':
        config['rope_parameters'] = {'rope_theta': config.pop(name)}
    path.write_text(json.dumps(config))
    assert_refused(tmp_path, name, value)


WRONG_VARIANTS = [
    (dict(n_layer='3'), ['n_layer', "'3'"]),
    (dict(share_v=1), ['share_v', '1']),
    (dict(n_head=5), ['n_head=5']),
    (dict(residual_from='first', gate=True, bias=0), ['GPTConfig has no bias, gate;']),
    (dict(n_layer=4), ['lacks model.transformer.h.3.ln_1.weight']),
    (dict(n_layer=2), ['no place for: model.transformer.h.2.']),
    (dict(share_v=False), ['model.transformer.h.1.attn.c_attn.weight', '(64, 32)', '(96, 32)']),
]


@pytest.mark.parametrize('changes, words', WRONG_VARIANTS, ids=str)
def test_a_variant_whose_config_does_not_fit_is_refused_by_what_differs(changes, words, tmp_path):
    model = ours(share_v=True)
    export(model, BYTES, tmp_path)
    edit(tmp_path, gpt={**asdict(model.config), **changes})
    assert_refused(tmp_path, *words)
    edit(tmp_path, gpt=None)
    assert_refused(tmp_path, "lacks 'gpt'")


def test_a_field_that_an_older_export_lacks_has_its_default(tmp_path):
    model = ours(share_v=True)
    export(model, BYTES, tmp_path)
    fields = asdict(model.config)
    del fields['residual_map']
    edit(tmp_path, gpt=fields)
    assert load(tmp_path).config == model.config


def test_a_folder_without_a_readable_config_is_refused(tmp_path):
    written(tmp_path)
    (tmp_path / 'config.json').write_text('[1, 2')
    assert_refused(tmp_path, 'config.json')
    (tmp_path / 'config.json').write_text('[1, 2]')
    assert_refused(tmp_path, 'config.json')
    (tmp_path / 'config.json').unlink()
    assert_refused(tmp_path, tmp_path, 'config.json')


@pytest.mark.parametrize('kind', ['llama', 'gpt2'])
def test_a_head_that_is_not_the_embedding_is_not_dropped_where_the_config_ties_them(kind, tmp_path):
    model = written(tmp_path, kind, tie_word_embeddings=False)
    edit(tmp_path, tie_word_embeddings=True)
    assert_refused(tmp_path, tmp_path, 'lm_head.weight', '"tie_word_embeddings": false')
    assert_equal_logits(load(edit(tmp_path, tie_word_embeddings=False)), model)


# --- files ---------------------------------------------------------------------------------------


def test_a_folder_without_weights_is_refused(tmp_path):
    written(tmp_path)
    (tmp_path / 'model.safetensors').unlink()
    assert_refused(tmp_path, tmp_path, 'model.safetensors', 'pytorch_model.bin')


@pytest.mark.parametrize('form', ['sharded safetensors', 'sharded bin'])
def test_a_missing_shard_is_refused_by_name(form, tmp_path):
    FORMATS[form](tmp_path, written(tmp_path))
    shard = next(tmp_path.glob('*-of-*'))
    shard.rename(tmp_path / 'elsewhere')
    assert_refused(tmp_path, shard.name, 'missing')
    (tmp_path / 'elsewhere').rename(shard)
    load(tmp_path)
    assert len(list(tmp_path.glob('*.index.json'))) == 1


DAMAGED = [
    '{"weight_map": {',
    '{}',
    '[]',
    '{"weight_map": {"a": 5}}',
    '{"weight_map": {"a": null}}',
]


@pytest.mark.parametrize('text', DAMAGED)
def test_a_damaged_index_is_refused(text, tmp_path):
    FORMATS['sharded safetensors'](tmp_path, written(tmp_path))
    (tmp_path / 'model.safetensors.index.json').write_text(text)
    assert_refused(tmp_path, tmp_path)


@pytest.mark.parametrize('form', ['safetensors', *FORMATS])
@pytest.mark.parametrize('part', [0.98, 0.001, 0])
def test_a_truncated_file_is_refused(form, part, tmp_path):
    model = written(tmp_path)
    if form in FORMATS:
        FORMATS[form](tmp_path, model)
    path = max(path for path in tmp_path.iterdir() if path.suffix in ('.safetensors', '.bin'))
    cut(path, part)
    assert_refused(tmp_path, path.name)


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.int8, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_weights_that_are_no_plain_real_numbers_are_refused(dtype, tmp_path):
    written(tmp_path)
    path = tmp_path / 'model.safetensors'
    state = load_file(path)
    state['model.norm.weight'] = state['model.norm.weight'].to(dtype)
    save_file(state, path)
    assert_refused(tmp_path, 'model.norm.weight', dtype)


def layer(n, name):
    return f'model.layers.{n}.{name}.weight'


# {name: tensor}, None drops it, and a word of the message. With GQA, q has 32 rows, k and v 16.
Q, K = layer(0, 'self_attn.q_proj'), layer(0, 'self_attn.k_proj')
GATE, UP = layer(0, 'mlp.gate_proj'), layer(0, 'mlp.up_proj')
WRONG = {
    'lacks a matrix': ({layer(2, 'mlp.up_proj'): None}, 'model.layers.2.mlp.up_proj.weight'),
    'lacks the head': ({'lm_head.weight': None}, 'lm_head.weight'),
    'one layer more': ({layer(3, 'input_layernorm'): torch.ones(32)}, 'layers.3.input_layernorm'),
    'a bias': ({'model.layers.0.self_attn.q_proj.bias': torch.ones(32)}, 'q_proj.bias'),
    'a name from elsewhere': ({'encoder.weight': torch.ones(3)}, 'encoder.weight'),
    'vocabulary too large': ({'lm_head.weight': torch.ones(97, 32)}, 'lm_head'),
    'matrix transposed': ({layer(0, 'mlp.down_proj'): torch.ones(44, 32)}, 'mlp.c_proj'),
    'norm too long': ({'model.norm.weight': torch.ones(33)}, 'ln_f'),
    'norm a number': ({'model.norm.weight': torch.tensor(1.0)}, 'norm'),
    'queries too wide': ({Q: torch.ones(32, 40)}, 'attn'),
    'gate shorter, up longer': ({GATE: torch.ones(43, 32), UP: torch.ones(45, 32)}, 'mlp'),
    'keys longer, queries shorter': ({Q: torch.ones(16, 32), K: torch.ones(32, 32)}, 'attn'),
}


@pytest.mark.parametrize('name', WRONG)
def test_weights_that_are_not_the_models_are_refused_by_name(name, tmp_path):
    changes, word = WRONG[name]
    written(tmp_path, num_key_value_heads=2)
    path = tmp_path / 'model.safetensors'
    state = {**load_file(path), **changes}
    save_file({name: t for name, t in state.items() if t is not None}, path)
    assert_refused(tmp_path, word)


def test_gpt2s_matrices_of_a_wrong_shape_are_refused(tmp_path):
    written(tmp_path, 'gpt2')
    state = load_file(tmp_path / 'model.safetensors')
    shapes = {
        'transformer.h.0.attn.c_attn.weight': (96, 32),
        'transformer.wpe.weight': (23, 32),
        'transformer.h.2.mlp.c_fc.bias': (127,),
    }
    for name, shape in shapes.items():
        save_file({**state, name: torch.ones(shape)}, tmp_path / 'model.safetensors')
        assert_refused(tmp_path, name)


def test_a_weight_whose_name_ends_almost_like_a_tables_is_refused(tmp_path):
    written(tmp_path, 'gpt2')
    path = tmp_path / 'model.safetensors'
    name = 'transformer.h.3.attn.c_attn.bias'  # a table is attn.bias
    save_file({**load_file(path), name: torch.ones(96)}, path)
    assert_refused(tmp_path, name)


NO_TENSORS = [[1, 2], {'model.norm.weight': [1.0]}, {3: torch.ones(2)}, torch.ones(3)]


@pytest.mark.parametrize('content', NO_TENSORS, ids=str)
def test_a_bin_file_with_other_things_than_tensors_by_name_is_refused(content, tmp_path):
    written(tmp_path)
    (tmp_path / 'model.safetensors').unlink()
    torch.save(content, tmp_path / 'pytorch_model.bin')
    assert_refused(tmp_path, tmp_path)


# --- malice --------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', MALICE)
def test_a_file_that_would_run_code_is_refused_and_not_run(kind, tmp_path):
    one, sharded = tmp_path / 'bin', tmp_path / 'sharded'
    FORMATS['bin'](one, written(one))
    FORMATS['sharded bin'](sharded, written(sharded))
    path = tmp_path / 'run' / 'ckpt.pt'
    path.parent.mkdir()

    marker = tmp_path / 'marker'
    for file in (one / 'pytorch_model.bin', max(sharded.glob('*.bin')), path):
        MALICE[kind](Evil(marker), file)
    assert_refused(one, 'pytorch_model.bin')
    assert_refused(sharded, '-of-')
    for read, where in ((load_run, path), (load_run, path.parent), (load_checkpoint, path)):
        with pytest.raises(ValueError) as caught:
            read(where)
        message = str(caught.value)
        assert 'ckpt.pt' in message and '\n' not in message
        assert 'weights_only' not in message
    assert not marker.exists()

    # The test would notice.
    with contextlib.suppress(Exception):
        torch.load(path, weights_only=False)
    assert marker.exists()


def test_code_beside_a_checkpoint_is_not_run(tmp_path):
    model = written(tmp_path)
    marker = tmp_path / 'marker'
    (tmp_path / 'modeling_evil.py').write_text(f'import os\nos.mkdir({str(marker)!r})\n')
    names = {'AutoConfig': 'modeling_evil.Config', 'AutoModelForCausalLM': 'modeling_evil.Model'}
    edit(tmp_path, auto_map=names)
    assert_equal_logits(load(tmp_path), model)
    assert not marker.exists()
