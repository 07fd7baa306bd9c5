"""lib/outside.py: checkpoints of transformers, from a folder or the hub, become a GPT, or are refused."""

import shutil
from dataclasses import asdict
from unittest.mock import Mock

import checkpoints
import pytest
import torch
from checkpoints import (
    FORMATS,
    SCALING,
    assert_equal_logits,
    assert_same_model,
    edit,
    theirs,
    transformers,
    written,
)
from conftest import raises_one_line
from huggingface_hub.utils import filter_repo_objects
from programs import BYTES, MALICE, Evil, cut, ours, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from variants import SV

from hub.convert import export
from lib.outside import load_hub as load

quiet = checkpoints.quiet

LARGE_BASE = {'rope_type': 'default', 'rope_theta': 500000.0}
LLAMA3 = {**SCALING, 'rope_theta': 500000.0}
NARROW = dict(tie_word_embeddings=False, n_inner=40, layer_norm_epsilon=0.1)
CHECKPOINTS = {
    'Llama GQA': ('llama', dict(num_key_value_heads=2)),
    'Llama MQA tied': ('llama', dict(num_key_value_heads=1, tie_word_embeddings=True)),
    'Llama with another epsilon and base': (
        'llama',
        dict(rms_norm_eps=0.1, rope_parameters=LARGE_BASE),
    ),
    'Llama scaled as Llama 3': ('llama', dict(num_key_value_heads=2, rope_parameters=LLAMA3)),
    'Mistral': ('mistral', {}),
    'GPT-2': ('gpt2', {}),
    'GPT-2 untied, narrow, large epsilon': ('gpt2', NARROW),
}


@pytest.mark.parametrize('name', CHECKPOINTS)
def test_a_checkpoint_of_transformers_gives_its_logits(name, tmp_path):
    kind, changes = CHECKPOINTS[name]
    model = written(tmp_path, kind, **changes)
    gpt = load(tmp_path)
    assert_equal_logits(gpt, model)
    assert not gpt.training and gpt.config.block_size == 24
    tied = changes.get('tie_word_embeddings', kind == 'gpt2')
    assert tied == (gpt.lm_head.weight is gpt.transformer.wte.weight)


@pytest.mark.parametrize('key', ['rope_type', 'type'])
def test_llama3_scaling_is_read_in_its_older_spellings(key, tmp_path):
    model = written(tmp_path, rope_parameters=LLAMA3)
    scaling = dict(SCALING)
    scaling[key] = scaling.pop('rope_type')
    edit(tmp_path, rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling)
    assert_equal_logits(load(tmp_path), model)


def test_mistrals_window_bounds_the_positions_and_its_defaults_are_transformers(tmp_path):
    model = written(tmp_path / 'short', 'mistral', sliding_window=8)
    assert_equal_logits(load(tmp_path / 'short'), model, T=8)
    with raises_one_line('block_size=8'):
        load(tmp_path / 'short')(tokens(T=9))

    heads = dict(num_attention_heads=16, num_key_value_heads=8)
    model = written(tmp_path / 'long', 'mistral', **heads, max_position_embeddings=5000)
    edit(tmp_path / 'long', sliding_window=None, num_key_value_heads=None)  # None drops the key
    gpt = load(tmp_path / 'long')
    config = transformers.AutoConfig.from_pretrained(tmp_path / 'long')
    assert gpt.config.block_size == config.sliding_window == 4096
    assert_equal_logits(gpt, model)


# --- names and files -----------------------------------------------------------------------------

TABLES = {
    'llama': {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(4)},
    'gpt2': {
        'transformer.h.0.attn.bias': torch.ones(1, 1, 24, 24).tril(),
        'transformer.h.1.attn.masked_bias': torch.tensor(-1e4),
    },
}


@pytest.mark.parametrize('kind', TABLES)
def test_names_without_the_prefix_and_tables_of_old_checkpoints_are_read_over(kind, tmp_path):
    model = written(tmp_path, kind)
    path = tmp_path / 'model.safetensors'
    state = {**load_file(path), **TABLES[kind]}
    save_file({name.removeprefix('transformer.'): t for name, t in state.items()}, path)
    assert_equal_logits(load(tmp_path), model)


@pytest.mark.parametrize('form', FORMATS)
def test_every_file_format_gives_the_same_weights(form, tmp_path):
    model = written(tmp_path, tie_word_embeddings=True)  # a .bin names the tied weight twice
    expected = load(tmp_path)
    FORMATS[form](tmp_path, model)
    assert not (tmp_path / 'model.safetensors').exists()
    assert_same_model(load(tmp_path), expected)


@pytest.mark.parametrize('form', FORMATS)
def test_what_lies_beside_a_checkpoint_is_named_and_not_read(form, tmp_path, capsys):
    """Weights of another model, under names that come first, last, or as a shard of another save."""
    model = written(tmp_path / 'new')
    FORMATS[form](tmp_path / 'new', model)
    others = ['a.safetensors', 'model-00009-of-00009.safetensors', 'model.fp16.safetensors']
    others += ['pytorch_model-00002-of-00002.bin', 'pytorch_model.ema.bin']
    if form == 'sharded safetensors':  # which come first
        others += ['pytorch_model.bin']
    older = {name: t + 1 for name, t in model.state_dict().items()}
    for name in others:
        write = save_file if name.endswith('.safetensors') else torch.save
        write(older, tmp_path / 'new' / name)
    assert_equal_logits(load(tmp_path / 'new'), model)
    assert_equal_logits(
        load(tmp_path / 'new'), AutoModelForCausalLM.from_pretrained(tmp_path / 'new')
    )
    notes = capsys.readouterr().out.splitlines()
    assert len(notes) == 2 and all(name in notes[0] for name in others)


def test_an_index_that_names_no_files_is_refused_by_name(tmp_path):
    FORMATS['sharded bin'](tmp_path, written(tmp_path))
    for text in ('[]', '{"weight_map": {"a": 1}}', '{"weight_map"'):
        (tmp_path / 'pytorch_model.bin.index.json').write_text(text)
        assert_refused(tmp_path, 'pytorch_model.bin.index.json')


@pytest.mark.parametrize('which', ['embedding', 'head', 'both'])
@pytest.mark.parametrize('kind', ['gpt2', 'mistral', 'SVFormer'])
def test_tied_weights_are_read_by_either_name_or_both(kind, which, tmp_path):
    if kind == 'SVFormer':
        model = ours(**SV, tie_embeddings=True)
        export(model, BYTES, tmp_path)
        expected = model(tokens())[0]
    else:
        expected = written(tmp_path, kind, tie_word_embeddings=True)(tokens()).logits
    embedding, head = {
        'gpt2': ('transformer.wte.weight', 'lm_head.weight'),
        'mistral': ('model.embed_tokens.weight', 'lm_head.weight'),
        'SVFormer': ('model.transformer.wte.weight', 'model.lm_head.weight'),
    }[kind]
    path = tmp_path / 'model.safetensors'
    state = load_file(path)
    weight = state.pop(embedding)
    names = {'embedding': [embedding], 'head': [head], 'both': [embedding, head]}[which]
    save_file({**state, **{name: weight.clone() for name in names}}, path)
    gpt = load(tmp_path)
    torch.testing.assert_close(gpt(tokens())[0], expected, atol=1e-4, rtol=0)
    assert gpt.lm_head.weight is gpt.transformer.wte.weight


@pytest.mark.parametrize('kind', ['llama', 'mistral', 'gpt2'])
def test_a_config_that_lacks_its_length_has_that_of_transformers(kind, tmp_path):
    name = 'n_positions' if kind == 'gpt2' else 'max_position_embeddings'
    lengths = {'n_positions': 1024} if kind == 'gpt2' else {}  # a table has one
    written(tmp_path, kind, **lengths)
    edit(tmp_path, **{name: None})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert load(tmp_path).config.block_size == getattr(config, name)


def test_a_checkpoint_in_half_precision_is_read_exactly(tmp_path):
    theirs().to(torch.bfloat16).save_pretrained(tmp_path)
    gpt = load(tmp_path)
    assert {p.dtype for p in gpt.parameters()} == {torch.float32}
    assert_equal_logits(gpt, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


# --- the hub, which no test may need -------------------------------------------------------------


def test_a_hub_that_fails_is_one_line(monkeypatch):
    for error in (OSError('first line\nsecond line'), RuntimeError()):
        monkeypatch.setattr('huggingface_hub.snapshot_download', Mock(side_effect=error))
        with raises_one_line('someone/something'):
            load('someone/something')


def test_from_the_hub_come_json_and_the_weights_that_are_read(monkeypatch, tmp_path):
    """A repository without safetensors is asked for a .bin; nothing else is downloaded."""
    source, cache = tmp_path / 'source', tmp_path / 'cache'
    model = written(source)
    FORMATS['bin'](source, model)
    cache.mkdir()
    others = ['args.bin', 'adapter_model.safetensors', 'consolidated.safetensors', 'README.md']
    for name in others:
        (source / name).touch()

    def download(name, allow_patterns):
        assert name == 'someone/something'
        files = [path.name for path in source.iterdir()]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            shutil.copy(source / file, cache)
        return str(cache)

    monkeypatch.setattr('huggingface_hub.snapshot_download', download)
    assert_equal_logits(load('someone/something'), model)
    files = {path.name for path in cache.iterdir()}
    assert files == {'config.json', 'generation_config.json', 'pytorch_model.bin'}


# --- refused -------------------------------------------------------------------------------------


def assert_refused(folder, *words):
    """load() raises a ValueError of one line that names the folder and has these words in it."""
    with raises_one_line(folder, *words) as caught:
        load(folder)
    message = str(caught.value)
    assert 'weights_only' not in message  # torch's advice to try it without
    return message


YARN = dict(rope_parameters={'rope_type': 'yarn', 'factor': 4.0})
OLD_LINEAR = dict(rope_parameters=None, rope_scaling={'type': 'linear', 'factor': 4.0})
HALF_LLAMA3 = dict(rope_parameters={'rope_type': 'llama3', 'factor': 4.0})
NOT_COMPUTED = [
    ('llama', dict(model_type='qwen2'), ['qwen2', 'llama, mistral and gpt2']),
    ('llama', YARN, ["'yarn'"]),
    ('llama', OLD_LINEAR, ["'linear'"]),
    ('llama', HALF_LLAMA3, ['rope_scaling']),
    ('llama', dict(hidden_size=None), ['hidden_size']),
    ('llama', dict(hidden_size='32'), ['hidden_size', '32']),
    ('llama', dict(num_attention_heads=5), ['n_head=5']),
    ('gpt2', dict(scale_attn_weights=False), ['scale_attn_weights']),
    ('gpt2', dict(activation_function='relu'), ["'relu'"]),
    ('mistral', dict(transformers_weights='other.safetensors'), ["'other.safetensors'"]),
]


@pytest.mark.parametrize('kind, changes, words', NOT_COMPUTED, ids=str)
def test_a_config_that_is_not_what_gpt_computes_is_refused_by_what_differs(
    kind, changes, words, tmp_path
):
    written(tmp_path, kind)
    assert_refused(edit(tmp_path, **changes), 'config.json', *words)


WRONG_VARIANTS = [
    (dict(n_layer='3'), ['n_layer', "'3'"]),
    (dict(n_layer=4), ['model.transformer.h.3.ln_1.weight']),
    (dict(share_v=False), ['model.transformer.h.1.attn.v.proj.weight']),
]


@pytest.mark.parametrize('changes, words', WRONG_VARIANTS, ids=str)
def test_a_variant_whose_config_does_not_fit_is_refused_by_what_differs(changes, words, tmp_path):
    model = ours(share_v=True)
    export(model, BYTES, tmp_path)
    fields = asdict(model.config)
    edit(tmp_path, gpt={**fields, **changes})
    assert_refused(tmp_path, *words)
    # A field that an older export lacks has its default.
    del fields['residual_map']
    assert load(edit(tmp_path, gpt=fields)).config == model.config


def test_a_head_that_is_not_the_embedding_is_not_dropped_where_the_config_ties_them(tmp_path):
    model = written(tmp_path, tie_word_embeddings=False)
    edit(tmp_path, tie_word_embeddings=True)
    assert_refused(tmp_path, 'lm_head.weight', '"tie_word_embeddings": false')
    assert_equal_logits(load(edit(tmp_path, tie_word_embeddings=False)), model)


def test_missing_files_are_refused_by_name(tmp_path):
    FORMATS['sharded bin'](tmp_path, written(tmp_path))
    for shard in sorted(tmp_path.glob('*-of-*')):
        whole = shard.read_bytes()
        shard.unlink()
        assert_refused(tmp_path, shard.name)
        shard.write_bytes(whole)
    (tmp_path / 'pytorch_model.bin.index.json').unlink()
    assert_refused(tmp_path, 'model.safetensors', 'pytorch_model.bin', 'index')
    (tmp_path / 'config.json').unlink()
    assert_refused(tmp_path, 'config.json')


@pytest.mark.parametrize('text', ['{"model_type": {', '[]'])
def test_a_damaged_config_is_refused(text, tmp_path):
    written(tmp_path)
    (tmp_path / 'config.json').write_text(text)
    assert_refused(tmp_path, 'config.json')


@pytest.mark.parametrize('form', ['safetensors', *FORMATS])
@pytest.mark.parametrize('part', [0.98, 0.001, 0])
def test_a_truncated_file_is_refused(form, part, tmp_path):
    model = written(tmp_path)
    if form in FORMATS:
        FORMATS[form](tmp_path, model)
    path = max(path for path in tmp_path.iterdir() if path.suffix in ('.safetensors', '.bin'))
    cut(path, part)
    assert_refused(tmp_path, path.name)


def layer(n, name):
    return f'model.layers.{n}.{name}.weight'


# {name: tensor}, None drops it. The first is named.
GATE, UP = layer(0, 'mlp.gate_proj'), layer(0, 'mlp.up_proj')
WRONG = {
    'lacks a matrix': {layer(2, 'mlp.up_proj'): None},
    'a bias': {'model.layers.0.self_attn.q_proj.bias': torch.ones(32)},
    'matrix transposed': {layer(0, 'mlp.down_proj'): torch.ones(44, 32)},
    'gate shorter, up longer': {GATE: torch.ones(43, 32), UP: torch.ones(45, 32)},
    'integers': {'model.norm.weight': torch.ones(32, dtype=torch.int8)},
    'eight bits': {'model.norm.weight': torch.ones(32).to(torch.float8_e4m3fn)},
    'a gpt2 matrix not transposed': {'transformer.h.0.attn.c_attn.weight': torch.ones(96, 32)},
    'almost the name of a table': {'transformer.h.3.attn.c_attn.bias': torch.ones(96)},
}


@pytest.mark.parametrize('name', WRONG)
def test_weights_that_are_not_the_models_are_refused_by_name(name, tmp_path):
    changes = WRONG[name]
    word = next(iter(changes))
    kind, shape = 'llama', dict(num_key_value_heads=2)
    if word.startswith('transformer.'):
        kind, shape = 'gpt2', {}
    written(tmp_path, kind, **shape)
    path = tmp_path / 'model.safetensors'
    state = {**load_file(path), **changes}
    save_file({name: t for name, t in state.items() if t is not None}, path)
    assert_refused(tmp_path, word)


def test_a_bin_file_with_other_things_than_tensors_by_name_is_refused(tmp_path):
    FORMATS['bin'](tmp_path, written(tmp_path))
    torch.save([1], tmp_path / 'pytorch_model.bin')
    assert_refused(tmp_path, 'pytorch_model.bin')


@pytest.mark.parametrize('kind', MALICE)
def test_a_file_that_would_run_code_is_refused_and_not_run(kind, tmp_path):
    folder, marker = tmp_path / 'bin', tmp_path / 'marker'
    FORMATS['bin'](folder, written(folder))
    path = folder / 'pytorch_model.bin'
    MALICE[kind](Evil(marker), path)
    assert_refused(folder, 'pytorch_model.bin')
    assert not marker.exists()
