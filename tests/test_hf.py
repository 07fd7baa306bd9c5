"""Hugging Face checkpoints in and out: hf.py, train.py --init_from=FOLDER, and sample.py on what they make."""
import contextlib
import functools
import io
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import ROOT, write_dataset
from runs import ENVIRONMENT, TINY, finish, good, here, load, log, refused, start

import data
import evaluate
import hf
import sample
import tokenizer
import train
from model import GPT, GPTConfig

transformers = pytest.importorskip('transformers')
from huggingface_hub import HfApi  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

BYTES = tokenizer.load('bytes')
NEOX = ROOT.parent / 'shared' / 'data' / 'tokenizer' / 'tokenizer.json'


@pytest.fixture(scope='module', autouse=True)
def quiet(tmp_path_factory):
    """transformers keeps its copies of exported code, and its advice, out of everybody's way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('transformers.dynamic_module_utils.HF_MODULES_CACHE', str(tmp_path_factory.mktemp('modules')))
        patch.setattr(sys, 'path', [*sys.path])
        patch.setattr('transformers.utils.logging._tqdm_active', False)
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        yield
        transformers.logging.set_verbosity(verbosity)


# ---------------------------------------------------------------------------------------------------------------------
# in

SCALING = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
           'original_max_position_embeddings': 16}
LLAMA = dict(vocab_size=96, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4,
             max_position_embeddings=24, rms_norm_eps=1e-5)
GPT2 = dict(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=24)
MISTRAL = dict(LLAMA, num_key_value_heads=2, sliding_window=None)
CLASSES = {'llama': (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA),
           'mistral': (transformers.MistralConfig, transformers.MistralForCausalLM, MISTRAL),
           'gpt2': (transformers.GPT2Config, transformers.GPT2LMHeadModel, GPT2)}


def theirs(kind='llama', **changes):
    """A model of transformers, none of whose weights is zero, one, or near it by chance."""
    config, model, size = CLASSES[kind]
    torch.manual_seed(0)
    return reference.perturb(model(config(**{**size, **changes}))).eval()


def written(folder, kind='llama', **changes):
    """A checkpoint of transformers in `folder`; returns its model."""
    model = theirs(kind, **changes)
    model.save_pretrained(folder)
    return model


def edit(path, **changes):
    """Change config.json (None drops a key); returns its folder."""
    old = json.loads((path / 'config.json').read_text())
    new = {k: v for k, v in {**old, **changes}.items() if k not in changes or v is not None}
    (path / 'config.json').write_text(json.dumps(new))
    return path


def tokens(B=2, T=24, vocabulary=96, seed=0):
    return torch.randint(vocabulary, (B, T), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def assert_equal_logits(ours, theirs, T=24, tolerance=1e-4):
    idx = tokens(T=T)
    expected = theirs(idx).logits
    assert expected.std() > 0.3  # nothing to compare where everything is zero
    assert (ours(idx)[0] - expected).abs().max() < tolerance


def assert_same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


CHECKPOINTS = {
    'Llama': ('llama', {}),
    'Llama GQA': ('llama', dict(num_key_value_heads=2)),
    'Llama MQA tied': ('llama', dict(num_key_value_heads=1, tie_word_embeddings=True)),
    'Llama with a small epsilon and a large base': (
        'llama', dict(rms_norm_eps=1e-6, rope_parameters={'rope_type': 'default', 'rope_theta': 500000.0})),
    'Llama with a large epsilon': ('llama', dict(rms_norm_eps=0.1)),
    'Llama scaled as Llama 3': (
        'llama', dict(num_key_value_heads=2, rope_parameters={**SCALING, 'rope_theta': 500000.0})),
    'Mistral': ('mistral', {}),
    'GPT-2': ('gpt2', {}),
    'GPT-2 untied, narrow, large epsilon': (
        'gpt2', dict(tie_word_embeddings=False, n_inner=40, layer_norm_epsilon=0.1)),
}


@pytest.mark.parametrize('name', CHECKPOINTS)
def test_a_checkpoint_of_transformers_gives_its_logits(name, tmp_path):
    kind, changes = CHECKPOINTS[name]
    model = written(tmp_path, kind, **changes)
    ours = GPT.from_pretrained(tmp_path)
    assert_equal_logits(ours, model)
    assert not ours.training and ours.config.block_size == 24
    assert ours.config.norm_eps == changes.get('rms_norm_eps', changes.get('layer_norm_epsilon', 1e-5))
    assert ours.config.rope_theta == changes.get('rope_parameters', {}).get('rope_theta', 10000.0)
    tied = changes.get('tie_word_embeddings', kind == 'gpt2')
    assert ours.config.tie_embeddings == tied == (ours.lm_head.weight is ours.transformer.wte.weight)


@pytest.mark.parametrize('form', ['rope_parameters', 'rope_scaling', 'rope_scaling, named type'])
def test_llama3_scaling_is_read_in_all_its_spellings(form, tmp_path):
    model = written(tmp_path, rope_parameters={**SCALING, 'rope_theta': 500000.0})
    if form != 'rope_parameters':
        scaling = dict(SCALING)
        if 'type' in form:
            scaling['type'] = scaling.pop('rope_type')
        edit(tmp_path, rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling)
    ours = hf.load(tmp_path)
    assert (ours.config.rope_theta, ours.config.rope_scaling) == (500000.0, (8.0, 1.0, 4.0, 16))
    assert_equal_logits(ours, model)
    plain = hf.load(edit(tmp_path, rope_parameters=None, rope_theta=500000.0, rope_scaling=None))
    assert (plain(tokens())[0] - ours(tokens())[0]).abs().max() > 0.01  # the scaling does something here


def test_mistrals_window_bounds_the_positions(tmp_path):
    model = written(tmp_path, 'mistral', sliding_window=8)
    ours = hf.load(tmp_path)
    assert ours.config.block_size == 8
    assert_equal_logits(ours, model, T=8)
    with torch.no_grad():  # beyond it another function is computed
        full = theirs('mistral')(tokens(T=12)).logits
        difference = (model(tokens(T=12)).logits - full).abs().amax(dim=(0, 2))
        assert difference[:8].max() < 1e-4 and difference[8:].min() > 0.01
    with pytest.raises(ValueError, match='block_size=8'):
        ours(tokens(T=9))


def test_keys_that_a_mistral_lacks_mean_what_they_mean_to_transformers(tmp_path):
    model = written(tmp_path, 'mistral', num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=5000)
    ours = hf.load(edit(tmp_path, sliding_window=None, num_key_value_heads=None))  # None drops the key
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.config.block_size == theirs.sliding_window == 4096
    assert ours.config.n_kv_head == theirs.num_key_value_heads == 8
    assert_equal_logits(ours, model)


@pytest.mark.parametrize('kind', ['llama', 'gpt2'])
def test_a_head_that_is_not_the_embedding_is_not_dropped_where_the_config_ties_them(kind, tmp_path):
    model = written(tmp_path, kind, tie_word_embeddings=False)
    edit(tmp_path, tie_word_embeddings=True)
    assert_refused(tmp_path, tmp_path, 'lm_head.weight', '"tie_word_embeddings": false')
    assert_equal_logits(hf.load(edit(tmp_path, tie_word_embeddings=False)), model)


def test_names_without_the_prefix_are_gpt2s_too(tmp_path):
    model = written(tmp_path / 'with', 'gpt2')
    model.transformer.save_pretrained(tmp_path / 'without')
    assert 'wte.weight' in load_file(tmp_path / 'without/model.safetensors')
    assert 'transformer.wte.weight' in load_file(tmp_path / 'with/model.safetensors')
    assert_equal_logits(hf.load(tmp_path / 'without'), model)


@pytest.mark.parametrize('kind, tables', [
    ('llama', {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(4)}),
    ('gpt2', {'transformer.h.0.attn.bias': torch.ones(1, 1, 24, 24).tril(),
              'transformer.h.1.attn.masked_bias': torch.tensor(-1e4)})])
def test_tables_of_old_checkpoints_are_passed_over(kind, tables, tmp_path):
    model = written(tmp_path, kind)
    save_file({**load_file(tmp_path / 'model.safetensors'), **tables}, tmp_path / 'model.safetensors')
    assert_equal_logits(hf.load(tmp_path), model)


def as_bin(folder, model, shards=1, **options):
    """pytorch_model.bin, as older versions of transformers wrote it, in place of safetensors."""
    (folder / 'model.safetensors').unlink()
    state = dict(model.state_dict())
    if shards == 1:
        return torch.save(state, folder / 'pytorch_model.bin', **options)
    files = [f'pytorch_model-{i:05}-of-{shards:05}.bin' for i in range(1, shards + 1)]
    where = {name: files[i % shards] for i, name in enumerate(state)}
    for file in files:
        torch.save({name: t for name, t in state.items() if where[name] == file}, folder / file, **options)
    index = {'metadata': {'total_size': 0}, 'weight_map': where}
    (folder / 'pytorch_model.bin.index.json').write_text(json.dumps(index))


FORMATS = {
    'sharded safetensors': lambda folder, model: [shutil.rmtree(folder), model.save_pretrained(
        folder, max_shard_size='20KB')],
    'bin': as_bin,
    'bin from before zip': functools.partial(as_bin, _use_new_zipfile_serialization=False),
    'sharded bin': functools.partial(as_bin, shards=3),
}


@pytest.mark.parametrize('kind', ['llama', 'gpt2'])
@pytest.mark.parametrize('form', FORMATS)
def test_every_file_format_gives_the_same_weights(form, kind, tmp_path):
    model = written(tmp_path, kind, tie_word_embeddings=True)  # a .bin names the tied weight twice
    expected = hf.load(tmp_path)
    FORMATS[form](tmp_path, model)
    assert not (tmp_path / 'model.safetensors').exists()
    assert len(list(tmp_path.glob('*.index.json'))) == form.startswith('sharded')
    assert len(list(tmp_path.glob('*.safetensors'))) > 2 or 'bin' in form
    assert_same_weights(hf.load(tmp_path), expected)


def test_safetensors_are_preferred_where_there_are_both(tmp_path):
    model = written(tmp_path)
    expected = hf.load(tmp_path)
    torch.save({name: torch.zeros_like(t) for name, t in model.state_dict().items()}, tmp_path / 'pytorch_model.bin')
    assert_same_weights(hf.load(tmp_path), expected)


@pytest.mark.parametrize('kind', ['llama', 'gpt2'])
def test_a_checkpoint_in_half_precision_is_read_exactly(kind, tmp_path):
    theirs(kind).to(torch.bfloat16).save_pretrained(tmp_path)
    ours = hf.load(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_equal_logits(ours, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


MEASURE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import hf
torch.set_num_threads(1)

def anonymous():  # bytes of this process's own; pages of a file that is mapped are the system's to drop
    resident, shared = map(int, open('/proc/self/statm').read().split()[1:3])
    return (resident - shared) * os.sysconf('SC_PAGE_SIZE')

class Watch(TorchDispatchMode):
    peak = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.peak = max(self.peak, anonymous())
        return result

for folder in sys.argv[3:]:
    hf.load(sys.argv[2])
    before = anonymous()
    with Watch() as watch:
        model = hf.load(folder)
    size = sum(p.nbytes for p in model.parameters())
    print((watch.peak - before) / size, (anonymous() - before) / size)
    del model
"""


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='no /proc: memory is not measured')
def test_reading_takes_the_memory_of_the_weights_once(tmp_path):
    with torch.device('meta'):
        big = GPT(GPTConfig(vocab_size=320, n_layer=10, n_head=8, n_embd=384, block_size=16))
    big = big.to_empty(device='cpu')  # 72 MB
    for p in big.parameters():
        p.data.fill_(1.0)
    hf.export(big, BYTES, tmp_path / 'safetensors')
    shutil.copytree(tmp_path / 'safetensors', tmp_path / 'bin', ignore=shutil.ignore_patterns('*.safetensors'))
    torch.save(load_file(tmp_path / 'safetensors/model.safetensors'), tmp_path / 'bin/pytorch_model.bin')
    del big
    written(tmp_path / 'small')
    (tmp_path / 'measure.py').write_text(MEASURE)
    status, out, err = finish(start(tmp_path / 'measure.py', ROOT, *(tmp_path / f for f in ('small', 'safetensors',
                                                                                           'bin'))))
    assert status == 0, err
    for line in out.splitlines():
        peak, final = map(float, line.split())
        assert 0.9 < final < 1.1 and peak < 1.2, out
    assert len(out.splitlines()) == 2


# ---------------------------------------------------------------------------------------------------------------------
# refused


def assert_refused(folder, *words):
    """hf.load raises a ValueError of one line that has these words in it; no other kind."""
    with pytest.raises(ValueError) as caught:
        hf.load(folder)
    message = str(caught.value)
    assert type(caught.value) is ValueError and '\n' not in message
    for word in words:
        assert str(word) in message, message
    assert 'weights_only' not in message  # torch's advice to try it without


@pytest.mark.parametrize('kind, changes, words', [
    ('llama', dict(model_type='qwen2'), ['qwen2', 'only llama, mistral and gpt2']),
    ('llama', dict(model_type='bert'), ['bert']),
    ('llama', dict(model_type=None), ['config.json', 'model_type']),
    ('llama', dict(attention_bias=True), ['attention_bias=True']),
    ('llama', dict(mlp_bias=True), ['mlp_bias=True']),
    ('llama', dict(head_dim=16), ['head_dim=16']),
    ('mistral', dict(head_dim=16), ['head_dim=16']),
    ('llama', dict(hidden_act='gelu'), ["hidden_act='gelu'"]),
    ('llama', dict(rope_parameters={'rope_type': 'yarn', 'factor': 4.0}), ["'yarn'"]),
    ('llama', dict(rope_parameters={'rope_type': 'linear', 'factor': 4.0}), ["'linear'"]),
    ('llama', dict(rope_parameters=None, rope_scaling={'type': 'linear', 'factor': 4.0}), ["'linear'"]),
    ('llama', dict(rope_parameters=None, rope_scaling={'rope_type': 'yarn', 'factor': 4.0}), ["'yarn'"]),
    ('llama', dict(rope_parameters=None, rope_scaling={'rope_type': 'llama3', 'factor': 4.0}), ['low_freq_factor']),
    ('llama', dict(hidden_size=None), ['hidden_size']),
    ('llama', dict(num_attention_heads=5, head_dim=None), ['n_head=5']),
    ('gpt2', dict(scale_attn_by_inverse_layer_idx=True), ['scale_attn_by_inverse_layer_idx=True']),
    ('gpt2', dict(reorder_and_upcast_attn=True), ['reorder_and_upcast_attn']),
    ('gpt2', dict(scale_attn_weights=False), ['scale_attn_weights']),
    ('gpt2', dict(activation_function='relu'), ["'relu'"]),
    ('gpt2', dict(n_positions=None), ['n_positions']),
], ids=str)
def test_a_model_that_is_not_what_gpt_computes_is_refused_by_what_differs(kind, changes, words, tmp_path):
    written(tmp_path, kind)
    assert_refused(edit(tmp_path, **changes), *words)


@pytest.mark.parametrize('name, value', [
    ('hidden_size', '32'), ('hidden_size', -32), ('num_attention_heads', 0), ('vocab_size', [96]),
    ('num_hidden_layers', True), ('max_position_embeddings', 64.5), ('max_position_embeddings', 0),
    ('rms_norm_eps', '1e-5'), ('rms_norm_eps', None), ('rms_norm_eps', 0.0), ('tie_word_embeddings', 'yes'),
    ('rope_parameters', 'default'), ('rope_theta', 0.0), ('rope_theta', 'x'), ('rope_theta', None)], ids=str)
def test_a_config_with_a_value_of_a_wrong_kind_is_refused_by_name(name, value, tmp_path):
    written(tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    changed = {'rope_parameters': {'rope_theta': value}} if name == 'rope_theta' else {name: value}
    (tmp_path / 'config.json').write_text(json.dumps({**config, **changed}))
    assert_refused(tmp_path, name, value)


def test_a_whole_number_may_be_spelled_as_a_float(tmp_path):
    model = written(tmp_path)
    assert_equal_logits(hf.load(edit(tmp_path, hidden_size=32.0)), model)


@pytest.mark.parametrize('dtype', [torch.int8, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_weights_that_are_no_plain_real_numbers_are_refused(dtype, tmp_path):
    written(tmp_path)
    state = load_file(tmp_path / 'model.safetensors')
    save_file({**state, 'model.norm.weight': state['model.norm.weight'].to(dtype)}, tmp_path / 'model.safetensors')
    assert_refused(tmp_path, 'model.norm.weight', dtype)


def test_a_folder_without_a_readable_config_is_refused(tmp_path):
    written(tmp_path)
    (tmp_path / 'config.json').write_text('[1, 2')
    assert_refused(tmp_path, 'config.json')
    (tmp_path / 'config.json').write_text('[1, 2]')
    assert_refused(tmp_path, 'config.json')
    (tmp_path / 'config.json').unlink()
    assert_refused(tmp_path, tmp_path, 'config.json')


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
    hf.load(tmp_path)
    (index,) = tmp_path.glob('*.index.json')


@pytest.mark.parametrize('text', ['{"weight_map": {', '{}', '[]', '{"weight_map": {"a": 5}}',
                                  '{"weight_map": {"a": null}}'])
def test_a_damaged_index_is_refused(text, tmp_path):
    FORMATS['sharded safetensors'](tmp_path, written(tmp_path))
    (tmp_path / 'model.safetensors.index.json').write_text(text)
    assert_refused(tmp_path, tmp_path)


def cut(path, part):
    content = path.read_bytes()
    path.write_bytes(content[:int(len(content) * part)])


@pytest.mark.parametrize('form', ['safetensors', *FORMATS])
@pytest.mark.parametrize('part', [0.98, 0.001, 0])
def test_a_truncated_file_is_refused(form, part, tmp_path):
    model = written(tmp_path)
    FORMATS.get(form, lambda *args: None)(tmp_path, model)
    path = max(path for path in tmp_path.iterdir() if path.suffix in ('.safetensors', '.bin'))
    cut(path, part)
    assert_refused(tmp_path, path.name)


def q(name, layer=0):
    return f'model.layers.{layer}.self_attn.{name}_proj.weight'


WRONG = {  # {name: tensor}, None drops it; GQA: q has 32 rows, k and v 16
    'lacks a matrix': ({'model.layers.2.mlp.up_proj.weight': None}, 'model.layers.2.mlp.up_proj.weight'),
    'lacks the head': ({'lm_head.weight': None}, 'lm_head.weight'),
    'one layer more': ({'model.layers.3.input_layernorm.weight': torch.ones(32)}, 'layers.3.input_layernorm'),
    'a bias': ({'model.layers.0.self_attn.q_proj.bias': torch.ones(32)}, 'q_proj.bias'),
    'a name from elsewhere': ({'encoder.weight': torch.ones(3)}, 'encoder.weight'),
    'vocabulary too large': ({'lm_head.weight': torch.ones(97, 32)}, 'lm_head'),
    'matrix transposed': ({'model.layers.0.mlp.down_proj.weight': torch.ones(44, 32)}, 'mlp.c_proj'),
    'norm too long': ({'model.norm.weight': torch.ones(33)}, 'ln_f'),
    'norm a number': ({'model.norm.weight': torch.tensor(1.0)}, 'norm'),
    'queries too wide': ({q('q'): torch.ones(32, 40)}, 'attn'),
    'gate shorter, up longer': ({'model.layers.0.mlp.gate_proj.weight': torch.ones(43, 32),
                                 'model.layers.0.mlp.up_proj.weight': torch.ones(45, 32)}, 'mlp'),
    'keys longer, queries shorter': ({q('q'): torch.ones(16, 32), q('k'): torch.ones(32, 32)}, 'attn'),
}


@pytest.mark.parametrize('name', WRONG)
def test_weights_that_are_not_the_models_are_refused_by_name(name, tmp_path):
    changes, word = WRONG[name]
    written(tmp_path, num_key_value_heads=2)
    state = {**load_file(tmp_path / 'model.safetensors'), **changes}
    save_file({k: t for k, t in state.items() if t is not None}, tmp_path / 'model.safetensors')
    assert_refused(tmp_path, word)


def test_gpt2s_matrices_of_a_wrong_shape_are_refused(tmp_path):
    written(tmp_path, 'gpt2')
    state = load_file(tmp_path / 'model.safetensors')
    for name, wrong in (('transformer.h.0.attn.c_attn.weight', torch.ones(96, 32)),
                        ('transformer.wpe.weight', torch.ones(23, 32)),
                        ('transformer.h.2.mlp.c_fc.bias', torch.ones(127))):
        save_file({**state, name: wrong}, tmp_path / 'model.safetensors')
        assert_refused(tmp_path, name)


@pytest.mark.parametrize('content', [[1, 2], {'model.norm.weight': [1.0]}, {3: torch.ones(2)}, torch.ones(3)], ids=str)
def test_a_bin_file_with_other_things_than_tensors_by_name_is_refused(content, tmp_path):
    written(tmp_path)
    (tmp_path / 'model.safetensors').unlink()
    torch.save(content, tmp_path / 'pytorch_model.bin')
    assert_refused(tmp_path, tmp_path)


class Evil:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


MALICE = {
    'pickle': lambda evil, path: path.write_bytes(pickle.dumps({'model.norm.weight': evil}, 2)),
    'torch file': lambda evil, path: torch.save({'model.norm.weight': evil}, path),
    'torch file from before zip': lambda evil, path: torch.save({'model.norm.weight': evil}, path,
                                                                _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize('kind', MALICE)
def test_a_file_that_would_run_code_is_refused_and_not_run(kind, tmp_path):
    marker, evil = tmp_path / 'marker', Evil(tmp_path / 'marker')
    FORMATS['bin'](tmp_path / 'bin', written(tmp_path / 'bin'))
    FORMATS['sharded bin'](tmp_path / 'sharded', written(tmp_path / 'sharded'))
    path = tmp_path / 'run' / 'ckpt.pt'
    path.parent.mkdir()
    for file in (tmp_path / 'bin/pytorch_model.bin', max((tmp_path / 'sharded').glob('*.bin')), path):
        MALICE[kind](evil, file)
    assert_refused(tmp_path / 'bin', 'pytorch_model.bin')
    assert_refused(tmp_path / 'sharded', '-of-')
    for read, where in ((sample.load_run, path), (sample.load_run, path.parent), (train.load_checkpoint, path)):
        with pytest.raises(ValueError) as caught:
            read(where)
        assert 'ckpt.pt' in str(caught.value) and '\n' not in str(caught.value)
        assert 'weights_only' not in str(caught.value)
    assert not marker.exists()
    with contextlib.suppress(Exception):  # the test would notice
        torch.load(path, weights_only=False)
    assert marker.exists()


def test_code_beside_a_checkpoint_is_not_run(tmp_path):
    model, marker = written(tmp_path), tmp_path / 'marker'
    (tmp_path / 'modeling_evil.py').write_text(f'import os\nos.mkdir({str(marker)!r})\n')
    edit(tmp_path, auto_map={'AutoConfig': 'modeling_evil.Config', 'AutoModelForCausalLM': 'modeling_evil.Model'})
    assert_equal_logits(hf.load(tmp_path), model)
    assert not marker.exists()


# ---------------------------------------------------------------------------------------------------------------------
# the hub, which no test may need


def assert_not_to_be_had(name='someone/something'):
    with pytest.raises(OSError) as caught:
        hf.load(name)
    message = str(caught.value)
    assert name in message and '\n' not in message, message
    return message


@pytest.mark.parametrize('error', [OSError('first line\nsecond line'), ValueError('not a repo id'), RuntimeError(),
                                   ImportError('no hub')], ids=repr)
def test_a_hub_that_fails_is_one_line(error, monkeypatch):
    def fail(*args, **options):
        raise error
    monkeypatch.setattr(HfApi, 'list_repo_files', fail)
    message = assert_not_to_be_had()
    assert (str(error).splitlines() or [type(error).__name__])[0] in message


def test_without_a_network_a_hub_id_is_one_line(monkeypatch):
    """The hub's own client, of whatever version, against a port where nobody listens."""
    monkeypatch.setattr('time.sleep', lambda seconds: None)  # it tries again and again
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    with socket.socket() as deaf:
        deaf.bind(('127.0.0.1', 0))
        monkeypatch.setattr('huggingface_hub.HfApi', functools.partial(
            HfApi, endpoint=f'http://127.0.0.1:{deaf.getsockname()[1]}'))
        assert_not_to_be_had()


def test_in_offline_mode_a_hub_id_is_one_line(monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    assert 'offline' in assert_not_to_be_had().lower()


@pytest.mark.parametrize('name', ['no/such/folder/anywhere', 'not a hub id', 'a?b'])
def test_what_is_neither_a_folder_nor_a_hub_id_is_one_line(name, monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    assert_not_to_be_had(name)


@pytest.mark.parametrize('files, weights', [(['model.safetensors', 'pytorch_model.bin'], '*.safetensors*'),
                                            (['pytorch_model.bin', 'config.json'], '*.bin*')])
def test_from_the_hub_come_json_and_safetensors_or_else_bin(files, weights, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(HfApi, 'list_repo_files', lambda self, name, **options: files)
    monkeypatch.setattr('huggingface_hub.snapshot_download',
                        lambda name, allow_patterns: asked.append((name, allow_patterns)) or str(tmp_path))
    model = written(tmp_path)
    assert_equal_logits(GPT.from_pretrained('someone/something'), model)
    assert asked == [('someone/something', ['*.json', weights])]


# ---------------------------------------------------------------------------------------------------------------------
# out

SIZE = dict(block_size=24, vocab_size=260, n_layer=3, n_head=4, n_embd=32, n_inner=40)
PLAIN = {
    'GQA': dict(n_kv_head=2),
    'tied': dict(tie_embeddings=True, norm_eps=1e-6, rope_theta=500000.0),
    'llama3 scaling': dict(rope_scaling=(8.0, 1.0, 4.0, 16), n_kv_head=1),
    'Table 4 width': dict(n_inner=0, dropout=0.1),
    'gpt2': dict(arch='gpt2', norm_eps=1e-3),
    'gpt2 tied': dict(arch='gpt2', tie_embeddings=True, n_inner=0, dropout=0.1),
}
RES, SV = dict(v_residual=True), dict(share_v=True)
CODE = {
    'ResFormer': RES,
    'SVFormer': SV,
    'SVFormer GQA, scaled': dict(SV, n_kv_head=2, rope_scaling=(8.0, 1.0, 4.0, 16), rope_theta=500000.0),
    'CLA': dict(share_k=True, share_k_every=2, share_v=True, share_v_every=2),
    'NeuTRENO': dict(neutreno=0.4, dropout=0.1),
    'DenseFormer, tied': dict(denseformer=True, tie_embeddings=True),
    'learned': dict(RES, residual_learned=True),
    'learned sparse': dict(RES, residual_learned=True, residual_layers=(2,), residual_lambda=(2.0, 1.0)),
    'cross': dict(RES, residual_map='cross', residual_from='all'),
    'identity': dict(RES, residual_map='identity'),
    'shared queries': dict(share_q=True),
    'gpt2 ResFormer': dict(RES, arch='gpt2'),
    'gpt2 GQA': dict(arch='gpt2', n_kv_head=2),
}


def ours(**changes):
    return reference.perturb(GPT(GPTConfig(**{**SIZE, **changes}))).eval()


@pytest.mark.parametrize('name', PLAIN)
def test_vanilla_goes_out_as_what_transformers_knows_and_comes_back(name, tmp_path):
    model = ours(**PLAIN[name])
    hf.export(model, BYTES, tmp_path)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    arch = model.config.arch
    assert type(theirs) is (transformers.GPT2LMHeadModel if arch == 'gpt2' else transformers.LlamaForCausalLM)
    assert not any(info.values()), info
    assert not list(tmp_path.glob('*.py'))
    assert_equal_logits(model, theirs)
    assert theirs.generation_config.eos_token_id == BYTES.eot
    if arch == 'gpt2':
        assert theirs.config.embd_pdrop == theirs.config.attn_pdrop == theirs.config.resid_pdrop == model.config.dropout
    back = hf.load(tmp_path)
    assert_same_weights(back, model)
    assert torch.equal(back(tokens())[0], model(tokens())[0])
    expected = {**model.config.__dict__, 'n_kv_head': model.config.kv_heads, 'n_inner': model.config.ffn_width,
                'dropout': 0.0}
    assert {**back.config.__dict__, 'n_kv_head': back.config.kv_heads} == expected


@pytest.fixture(scope='module', params=CODE)
def pair(request, tmp_path_factory):
    """(our model, its export as transformers loads it)."""
    folder = tmp_path_factory.mktemp('variant')
    model = ours(**CODE[request.param])
    hf.export(model, BYTES, folder)
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(info.values()), info
    assert theirs.config.model_type == 'nanoresformer'
    for name in ('model.py', 'modeling_nanoresformer.py'):
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()
    return model, theirs, folder


def test_a_variant_goes_out_with_its_code_and_gives_the_same_logits(pair):
    model, theirs, _ = pair
    assert not theirs.training
    assert_equal_logits(model, theirs, tolerance=1e-5)


def test_the_loss_of_labels_is_the_training_loss(pair):
    model, theirs, _ = pair
    idx = tokens()
    labels = idx.clone()
    with torch.no_grad():
        expected = model(idx[:, :-1], idx[:, 1:].contiguous())[1]
        assert theirs(idx, labels=labels).loss == pytest.approx(expected.item(), abs=1e-5)
        labels[0, 5:9] = labels[1, :3] = -100  # transformers' mark for what does not count
        targets = torch.where(labels == -100, -1, labels)[:, 1:].contiguous()
        expected = model(idx[:, :-1], targets)[1]
        assert theirs(input_ids=idx, labels=labels).loss == pytest.approx(expected.item(), abs=1e-5)


def test_greedy_generation_gives_the_same_tokens_and_allocates_the_same_cache(pair):
    model, theirs, _ = pair
    idx = tokens(T=7)
    made = theirs.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=12, do_sample=False,
                           eos_token_id=None, return_dict_in_generate=True)
    assert torch.equal(made.sequences, model.generate(idx, 12, temperature=0))
    # the last token is never fed in again
    assert made.past_key_values.cache.nbytes == model.new_cache(2, 7 + 12 - 1).nbytes
    assert int(made.past_key_values.cache.position) == made.past_key_values.get_seq_length() == 7 + 12 - 1
    uncached = theirs.generate(idx, max_new_tokens=12, do_sample=False, eos_token_id=None, use_cache=False)
    assert torch.equal(made.sequences, uncached)


def test_beam_search_with_the_cache_equals_that_without(pair):
    _, theirs, _ = pair
    idx = tokens(T=7)
    cached, uncached = (theirs.generate(idx, max_new_tokens=12, num_beams=3, num_return_sequences=2, do_sample=False,
                                        eos_token_id=None, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached, uncached)
    greedy = theirs.generate(idx, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert cached.shape == (4, 19) and not torch.equal(cached[::2], greedy)  # the beams did go apart


def test_sampling_gives_as_many_sequences_as_asked_for(pair):
    _, theirs, _ = pair
    idx = tokens(T=7)
    torch.manual_seed(0)
    made = theirs.generate(idx, max_new_tokens=12, do_sample=True, top_k=0, temperature=2.0, num_return_sequences=2,
                           eos_token_id=None)
    assert torch.equal(made[:, :7], idx.repeat_interleave(2, dim=0))
    assert made.shape == (4, 19) and not torch.equal(made[0], made[1])


def test_a_padding_mask_is_refused_not_ignored(pair):
    _, theirs, _ = pair
    idx, mask = tokens(), torch.ones(2, 24, dtype=torch.int64)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match='padding'):
        theirs(idx, attention_mask=mask)
    with pytest.raises(ValueError, match='padding'):
        theirs.generate(idx[:, :7], attention_mask=mask[:, :7], max_new_tokens=2)


@torch.no_grad()
@pytest.mark.parametrize('empty', [False, True], ids=['no cache', 'empty cache'])
def test_the_ordinary_decoding_loop_gives_the_logits_of_the_whole_text(pair, empty):
    _, theirs, _ = pair
    idx = tokens()
    past, logits = transformers.DynamicCache() if empty else None, []
    for chunk in idx.split((7, 1, 10, 1, 5), dim=1):
        made = theirs(chunk, past_key_values=past, use_cache=True)
        past = made.past_key_values
        logits.append(made.logits)
    assert (torch.cat(logits, dim=1) - theirs(idx).logits).abs().max() < 1e-4
    assert past.get_seq_length() == 24 and theirs(idx).past_key_values is None


def test_generate_takes_an_empty_cache_of_transformers_and_its_own_of_an_earlier_call(pair):
    _, theirs, _ = pair
    idx, options = tokens(T=7), dict(do_sample=False, eos_token_id=None)
    expected = theirs.generate(idx, max_new_tokens=10, **options)
    assert torch.equal(theirs.generate(idx, past_key_values=transformers.DynamicCache(), max_new_tokens=10, **options),
                       expected)
    past = theirs(idx[:, :4], use_cache=True).past_key_values
    assert torch.equal(theirs.generate(idx, past_key_values=past, max_new_tokens=10, **options), expected)


def test_a_foreign_cache_and_positions_out_of_order_are_refused_not_ignored(pair):
    _, theirs, _ = pair
    idx, foreign = tokens(T=7), transformers.DynamicCache()
    foreign.update(torch.ones(2, 4, 3, 8), torch.ones(2, 4, 3, 8), 0)
    for use_cache in (True, False):
        with pytest.raises(ValueError, match='DynamicCache'):
            theirs(idx, past_key_values=foreign, use_cache=use_cache)
    for wrong in (torch.arange(5, 12)[None], torch.arange(7).flip(0)[None], torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2),
                  torch.stack((torch.arange(7), torch.arange(1, 8))), torch.arange(8)[None]):
        with pytest.raises(ValueError, match='position_ids must be 0 to 6'):
            theirs(idx, position_ids=wrong)
    past = theirs(idx, position_ids=torch.arange(7)[None], use_cache=True).past_key_values
    with pytest.raises(ValueError, match='position_ids must be 7 to 7'):
        theirs(idx[:, :1], position_ids=torch.tensor([[0]]), past_key_values=past)
    theirs(idx[:, :1], position_ids=torch.tensor([[7]]), past_key_values=past)


def test_a_cache_in_training_is_refused_as_it_keeps_no_gradients(pair):
    _, theirs, _ = pair
    try:
        with pytest.raises(ValueError, match='use_cache=False'):
            theirs.train()(tokens(), use_cache=True)
    finally:
        theirs.eval()


def test_trainers_gradient_accumulation_is_that_of_one_batch(tmp_path):
    pytest.importorskip('accelerate')
    hf.export(ours(**SV), BYTES, tmp_path / 'export')
    norms, rows = [], [dict(input_ids=row, labels=row) for row in tokens(8, 12, vocabulary=250)]
    for batch, accumulation in ((8, 1), (2, 4)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / 'export', trust_remote_code=True)
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path / 'out'), per_device_train_batch_size=batch, report_to=[], save_strategy='no',
            gradient_accumulation_steps=accumulation, max_steps=1, learning_rate=1e-9, logging_steps=1,
            disable_tqdm=True, use_cpu=True)
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        norms.append([trainer.state.log_history[0][key] for key in ('loss', 'grad_norm')])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_svformers_exported_cache_is_smaller(tmp_path):
    sizes = {}
    for name, changes in (('ResFormer', RES), ('SVFormer', SV)):
        hf.export(ours(**changes), BYTES, tmp_path / name)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True)
        made = theirs.generate(tokens(T=7), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        sizes[name] = made.past_key_values.cache.nbytes
    assert sizes['SVFormer'] == sizes['ResFormer'] * 4 // 6  # 3 of keys and 1 of values; 3 of each


def test_a_variant_loads_in_half_precision_with_exact_rope_tables(tmp_path):
    model = ours(**SV)
    hf.export(model, BYTES, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, dtype=torch.bfloat16)
    assert {p.dtype for p in theirs.parameters()} == {torch.bfloat16}
    assert torch.equal(theirs.model.cos, model.cos) and torch.equal(theirs.model.sin, model.sin)
    made = theirs.generate(tokens(T=7), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert made.past_key_values.cache.nbytes == model.new_cache(2, 11, dtype=torch.bfloat16).nbytes


def test_what_transformers_saves_of_a_variant_loads_again(tmp_path):
    model = ours(**SV, tie_embeddings=True)
    hf.export(model, BYTES, tmp_path / 'ours')
    AutoModelForCausalLM.from_pretrained(tmp_path / 'ours', trust_remote_code=True).save_pretrained(tmp_path / 'theirs')
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / 'theirs', trust_remote_code=True)
    assert torch.equal(theirs(tokens()).logits, model(tokens())[0])


def test_what_the_exported_tokenizer_returns_can_be_given_to_generate(tmp_path):
    hf.export(ours(**SV), BYTES, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    encoded = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)('né', return_tensors='pt')
    made = theirs.generate(**encoded, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(made, theirs.model.generate(torch.tensor([list('né'.encode())]), 5, temperature=0))


def test_candidates_that_generate_rejects_leave_the_cache(tmp_path):
    """Prompt lookup guesses tokens ahead, and takes back those that the model would not have said."""
    hf.export(ours(**SV), BYTES, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    idx, options = torch.tensor([[1, 2, 3, 1, 2, 3]]), dict(max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert torch.equal(theirs.generate(idx, prompt_lookup_num_tokens=3, **options), theirs.generate(idx, **options))


TEXTS = ['Hello world', '  two  spaces \n\n\tand tabs\r\n', 'e\u0301 n\u0303', 'x' * 300, '\x00\x07', '\ufffd', ' ', '',
         'naïve Å “quotes” … 日本語 한국어 😀👨\u200d👩\u200d👧',
         "don't we'll  'S", 'def f(x):\n        return x  # 1234']


@pytest.mark.parametrize('model', [dict(), dict(arch='gpt2'), SV], ids=['llama', 'gpt2', 'SVFormer'])
@pytest.mark.parametrize('which', ['bytes', pytest.param('gpt-neox', marks=pytest.mark.skipif(
    not NEOX.exists(), reason='no ../shared/data/tokenizer: the real GPT-NeoX vocabulary is not tested'))])
def test_the_exported_tokenizer_is_ours(which, model, tmp_path):
    known = tokenizer.load(NEOX if which == 'gpt-neox' else 'bytes')
    hf.export(ours(**model), known, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    assert theirs.eos_token_id == theirs.bos_token_id == known.eot and len(theirs) == known.n_vocab
    assert theirs.model_max_length == 24
    for text in TEXTS:
        ids = known.encode(text).tolist()
        assert theirs(text)['input_ids'] == ids, repr(text)
        assert theirs.decode(ids) == known.decode(ids), repr(text)
    if which == 'gpt-neox':
        assert (tmp_path / 'tokenizer.json').read_bytes() == NEOX.read_bytes()


# ---------------------------------------------------------------------------------------------------------------------
# the program


@pytest.fixture(scope='module')
def trained(work):
    """out/run: two steps of a ResFormer on bytes, by train.py."""
    write_dataset(Path('data/bytes'), {'train': {'A': 3000}, 'validation': {'A': 300}}, n_vocab=257)
    meta = json.loads(Path('data/bytes/meta.json').read_text())
    meta['tokenizer'] = {'name': 'bytes', 'sha256': BYTES.sha256, 'n_vocab': BYTES.n_vocab}
    Path('data/bytes/meta.json').write_text(json.dumps(meta))
    good('out/run', dataset='bytes', vocab_size=320, max_iters=2, v_residual=True)
    return 'out/run'


def checkpoint(trained, name, model):
    """A run's folder like `trained`, with another model in it."""
    Path(name).mkdir(parents=True)
    torch.save({**load(f'{trained}/ckpt.pt'), 'model': model.state_dict(), 'model_config': model.config.__dict__},
               f'{name}/ckpt.pt')
    return name


def program(main, *arguments, stdin='', stdout=None):
    """(exit status or message, stdout, stderr) of a program's main() in this process."""
    out, err = stdout or io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, 'argv', ['program.py', *map(str, arguments)])
        patch.setattr(sys, 'stdin', io.StringIO(stdin))
        try:
            main()
            status = 0
        except SystemExit as exit:
            status = exit.code
    return status, out.getvalue(), err.getvalue()


def assert_one_line(status, *words):
    assert isinstance(status, str) and status.startswith('error: ') and '\n' not in status, status
    for word in words:
        assert str(word) in status, status


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_run_is_exported_and_exported_again_into_the_same_folder(trained, tmp_path):
    folder = tmp_path / 'a' / 'b'
    status, out, _ = program(hf.main, 'export', f'--out_dir={trained}', f'--to={folder}')
    assert status == 0 and str(folder) in out
    first = contents(folder)
    assert program(hf.main, 'export', f'--out_dir={trained}/ckpt.pt', f'--to={folder}')[0] == 0
    assert contents(folder) == first
    model, _, _ = sample.load_run(trained)
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert torch.equal(theirs(tokens()).logits, model(tokens())[0])


def test_an_export_of_another_kind_replaces_one(tmp_path):
    for changes in (SV, {}, RES, dict(arch='gpt2')):
        model = ours(**changes)
        hf.export(model, BYTES, tmp_path)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
        assert_equal_logits(model, theirs)


def test_only_an_export_is_replaced_and_no_other_checkpoint(trained, tmp_path):
    export = f'--out_dir={trained}', f'--to={tmp_path}/to'
    assert program(hf.main, 'export', *export)[0] == 0
    first, to = contents(tmp_path / 'to'), tmp_path / 'to'

    def assert_left_alone():
        before = contents(to)
        assert_one_line(program(hf.main, 'export', *export)[0], f'--to={to}', 'empty')
        assert contents(to) == before
        shutil.rmtree(to)
    AutoModelForCausalLM.from_pretrained(to, trust_remote_code=True).save_pretrained(to)  # trained further, say
    assert_left_alone()
    written(to)
    assert_left_alone()
    written(to)
    (to / 'generation_config.json').unlink()  # no name is left that an export does not write
    assert_left_alone()
    FORMATS['sharded safetensors'](to, written(to))
    assert_left_alone()
    to.mkdir()
    assert program(hf.main, 'export', *export)[0] == 0 and contents(to) == first


def test_a_folder_with_other_files_is_refused_and_left_alone(trained, tmp_path):
    for name, files in (('notes', ['notes.txt']), ('run', ['ckpt.pt', 'config.json']),
                        ('kept', ['ckpt_6.pt', 'config.json'])):
        folder = tmp_path / name
        folder.mkdir()
        for file in files:
            (folder / file).write_text('mine')
        status, _, _ = program(hf.main, 'export', f'--out_dir={trained}', f'--to={folder}')
        assert_one_line(status, f'--to={folder}')
        assert contents(folder) == {file: b'mine' for file in files}
    (tmp_path / 'file').write_text('mine')
    assert_one_line(program(hf.main, 'export', f'--out_dir={trained}', f'--to={tmp_path}/file')[0], '--to')
    assert_one_line(program(hf.main, 'export', f'--out_dir={trained}')[0], '--to')
    assert_one_line(program(hf.main, 'export', f'--out_dir={trained}', '--too=there')[0], 'too')


def test_an_export_into_the_folder_that_it_reads_is_refused_or_leaves_it_whole(tmp_path):
    model = ours()
    hf.export(model, small_bpe(tmp_path / 'tokenizer'), tmp_path / 'folder')
    before = contents(tmp_path / 'folder')
    status, _, _ = program(hf.main, 'export', f'--out_dir={tmp_path}/folder', f'--to={tmp_path}/folder')
    if status != 0:
        assert_one_line(status)
        assert contents(tmp_path / 'folder') == before
    assert_same_weights(hf.load(tmp_path / 'folder'), model)


def test_a_mistake_of_the_export_is_one_line_and_exit_status_1(tmp_path):
    status, out, err = finish(start(ROOT / 'hf.py', 'export', f'--out_dir={tmp_path}/none', f'--to={tmp_path}/to'))
    assert (status, out, err.count('\n')) == (1, '', 1) and err.startswith('error: ') and 'none' in err
    assert not (tmp_path / 'to').exists()


def test_without_a_command_the_usage_is_told_and_exit_status_2():
    status, out, err = finish(start(ROOT / 'hf.py'))
    assert (status, err) == (2, '') and 'python hf.py export' in out
    assert program(hf.main, 'import') == (2, out, '') and program(hf.main, '--help') == (0, out, '')


# ---------------------------------------------------------------------------------------------------------------------
# train.py --init_from=FOLDER

SOURCE = dict(vocab_size=64, hidden_size=32, intermediate_size=112, num_hidden_layers=2, num_attention_heads=2,
              max_position_embeddings=32)  # runs.TINY


def evaluation(status_and_out):
    status, out = status_and_out
    assert status == 0, status
    return out


@torch.no_grad()
def loss_line(model):
    """What --eval_only must print, from the logits of transformers' model."""
    dataset, losses = data.Dataset('tiny'), {}
    for domain in dataset.meta['splits']['validation']:
        total = count = 0
        for x, y in data.validation_batches(dataset, domain, 32, TINY['batch_size'], TINY['eval_iters'], 0, 1):
            logits = model(x).logits
            total += F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction='sum').item()
            count += (y != -1).sum().item()
        losses[domain] = total / count
    return {**losses, 'mean': sum(losses.values()) / len(losses)}


def parsed(line):
    words = line.split()
    return dict(zip(words[::2], map(float, words[1::2]), strict=True))


@pytest.mark.parametrize('name, changes, flags', [
    ('Llama', {}, {}),
    ('Llama GQA tied', dict(num_key_value_heads=1, tie_word_embeddings=True), dict(n_kv_head=1, tie_embeddings=True)),
    ('Llama scaled', dict(rope_parameters={**SCALING, 'rope_theta': 500000.0}, max_position_embeddings=64),
     dict(rope_theta=500000.0, rope_scaling='(8.0,1.0,4.0,16)')),
])
def test_training_from_a_folder_begins_with_its_loss(work, name, changes, flags):
    model = written(Path('from', name), **{**SOURCE, **changes})
    line = evaluation(here('out/refused', init_from=f'from/{name}', eval_only=True, **flags))
    assert parsed(line) == pytest.approx(loss_line(model), abs=2e-4)
    assert max(parsed(line).values()) > 4.3  # log 64 is 4.16: these are the weights, not a new model's


def test_training_from_an_export_begins_with_its_loss(whole):
    folder = Path('from/export')
    model = GPT(GPTConfig(**load(f'{whole}/ckpt.pt')['model_config']))
    model.load_state_dict(load(f'{whole}/ckpt.pt')['model'])
    hf.export(model, BYTES, folder)
    line = evaluation(here('out/refused', init_from=folder, eval_only=True))
    assert line == evaluation(here('out/refused', init_from=f'{whole}/ckpt.pt', eval_only=True))
    final = [entry['val'] for entry in log(whole) if 'val' in entry][-1]
    assert parsed(line) == pytest.approx(final, abs=6e-5)


def test_training_goes_on_from_a_folder(work):
    written(Path('from/to-train'), **SOURCE)
    good('out/from-folder', init_from='from/to-train', max_iters=2, eval_interval=1)
    before = parsed(evaluation(here('out/refused', init_from='from/to-train', eval_only=True)))
    logged = [entry['val']['mean'] for entry in log('out/from-folder') if 'val' in entry]
    assert logged[0] == pytest.approx(before['mean'], abs=6e-5) and logged[-1] < logged[0]
    good('out/from-folder', init_from='resume', max_iters=3, eval_interval=1)


@pytest.mark.parametrize('kind, changes, words', [
    ('llama', dict(rms_norm_eps=1e-6), ['--norm_eps=1e-06']),
    ('llama', dict(rope_parameters={'rope_type': 'default', 'rope_theta': 500000.0}), ['--rope_theta=500000.0']),
    ('llama', dict(rope_parameters={**SCALING, 'rope_theta': 10000.0}), ['--rope_scaling=']),
    ('llama', dict(num_hidden_layers=3), ['--n_layer=3']),
    ('llama', dict(num_attention_heads=4), ['--n_head=4']),
    ('llama', dict(num_key_value_heads=1), ['--n_kv_head=1']),
    ('llama', dict(intermediate_size=44), ['--n_inner=44']),
    ('llama', dict(hidden_size=64, intermediate_size=44), ['--n_embd=64', '--n_inner=44']),
    ('llama', dict(vocab_size=96), ['--vocab_size=96']),
    ('llama', dict(tie_word_embeddings=True), ['--tie_embeddings=True']),
    ('gpt2', dict(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32), ['--arch=gpt2', '--n_inner=128']),
], ids=str)
def test_another_model_than_asked_for_is_refused_with_the_flags_that_mend_it(work, kind, changes, words):
    folder = Path('from', re.sub(r'\W+', '-', str(changes))[:80])
    written(folder, kind, **{**(SOURCE if kind == 'llama' else {}), **changes})
    message = refused(folder, *words, init_from=folder)
    flags = dict(re.findall(r'--(\w+)=(\([^)]*\)|\S+)', message))
    evaluation(here('out/refused', init_from=folder, eval_only=True, **flags))


@pytest.mark.parametrize('changes', [dict(hidden_size=64), dict(num_attention_heads=4, num_key_value_heads=2)], ids=str)
def test_the_flags_that_mend_it_name_what_they_would_change_by_default(work, changes):
    """n_inner follows n_embd, n_kv_head follows n_head: equal before, they are not when the flags are given."""
    folder = Path('from', 'default' + '-'.join(changes))
    written(folder, **{**SOURCE, **changes})
    flags = dict(re.findall(r'--(\w+)=(\S+)', refused(folder, init_from=folder)))
    evaluation(here('out/refused', init_from=folder, eval_only=True, **flags))


def test_a_folder_with_fewer_positions_or_fewer_ids_is_refused(work):
    written(Path('from/short'), **{**SOURCE, 'max_position_embeddings': 16})
    refused('from/short', '16', 'block_size=32', init_from='from/short')
    written(Path('from/few'), **{**SOURCE, 'vocab_size': 32})
    refused('from/few', '--vocab_size=32', init_from='from/few')
    refused('from/short', 'config.json', init_from=shutil.copytree(
        'from/short', 'from/short-of-config', ignore=shutil.ignore_patterns('config.json')))


def test_a_folder_of_gpt2_with_another_number_of_positions_is_refused(work):
    flags = dict(arch='gpt2', tie_embeddings=True)
    for positions in (16, 64):
        written(Path(f'from/gpt2-{positions}'), 'gpt2', vocab_size=64, n_embd=32, n_layer=2, n_head=2,
                n_positions=positions)
        refused(f'from/gpt2-{positions}', str(positions), init_from=f'from/gpt2-{positions}', **flags)


def test_a_neutral_learned_residual_begins_where_vanilla_ended(work):
    model = written(Path('from/vanilla'), **SOURCE)
    neutral = dict(v_residual=True, residual_learned=True, residual_lambda=(0.0, 1.0))
    lines = [evaluation(here('out/refused', init_from='from/vanilla', eval_only=True, **options))
             for options in ({}, neutral, dict(v_residual=True))]
    assert lines[0] == lines[1] != lines[2]
    vanilla = GPT.from_pretrained('from/vanilla')
    residual = GPT(GPTConfig(**{**vanilla.config.__dict__, **neutral})).eval()
    data.load_weights(residual, {'model': vanilla.state_dict(), 'model_config': vanilla.config.__dict__, 'path': ''})
    assert torch.equal(residual(tokens(vocabulary=64))[0], vanilla(tokens(vocabulary=64))[0])
    assert_equal_logits(lambda idx: residual(idx % 64), lambda idx: model(idx % 64))


# ---------------------------------------------------------------------------------------------------------------------
# sample.py


def small_bpe(folder):
    """A vocabulary of 300 ids, laid out like GPT-2's tokenizer.json."""
    hub = pytest.importorskip('tokenizers')
    t = hub.Tokenizer(hub.models.BPE())
    t.pre_tokenizer, t.decoder = hub.pre_tokenizers.ByteLevel(add_prefix_space=False), hub.decoders.ByteLevel()
    alphabet = hub.pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(['the theory of the other thing, né 😀 日本 '] * 9, hub.trainers.BpeTrainer(
        vocab_size=259, show_progress=False, initial_alphabet=alphabet))
    t.add_special_tokens(['<|endoftext|>'])
    folder.mkdir()
    t.save(str(folder / 'tokenizer.json'))
    return tokenizer.load(folder)


def parrot(says, after):
    """A gpt2 that continues any `after` tokens with the tokens `says`: position p alone decides on the next one."""
    model = GPT(GPTConfig(arch='gpt2', block_size=32, n_embd=32, n_layer=1, n_head=1, vocab_size=260)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wpe.weight.copy_(torch.eye(32))
        for position, token in enumerate(says, start=after - 1):
            model.lm_head.weight[token, position] += 1
    return model


SAYS = 'né 😀日本'
SCRIPT = [*SAYS.encode(), BYTES.eot, *b'more']


class Screen(io.StringIO):
    """Standard output that remembers what was on it each time that a token was made."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def watch(self, monkeypatch):
        stream = GPT.stream

        def watched(model, *args, **options):
            for new in stream(model, *args, **options):
                self.seen.append(self.getvalue())
                yield new
        monkeypatch.setattr(GPT, 'stream', watched)
        return self


def test_one_sample_is_printed_as_it_comes_and_is_the_greedy_continuation(trained):
    model, _, _ = sample.load_run(trained)
    reference.perturb(model)
    out_dir = checkpoint(trained, 'out/random', model)
    ids = torch.tensor([list(b'def ')])
    for new_tokens in (1, 20, 99):
        status, out, err = program(sample.main, f'--out_dir={out_dir}', '--start=def ', '--temperature=0',
                                   f'--max_new_tokens={new_tokens}', '--device=cpu')
        made = model.generate(ids, min(new_tokens, 32 - 4), temperature=0)[0, 4:].tolist()
        made = made[:made.index(BYTES.eot)] if BYTES.eot in made else made
        assert (status, out) == (0, 'def ' + BYTES.decode(made) + '\n')
        cache = model.new_cache(1, 4 + min(new_tokens, 28))
        assert re.fullmatch(rf'[\d,]+ tokens/s, cache {cache.nbytes:,} bytes .*\n', err), err


def test_the_text_appears_character_by_character_none_of_them_broken_and_ends_at_endoftext(trained, monkeypatch):
    out_dir = checkpoint(trained, 'out/parrot', parrot(SCRIPT, 3))
    screen = Screen().watch(monkeypatch)
    status, out, err = program(sample.main, f'--out_dir={out_dir}', '--start=abc', '--temperature=0', '--device=cpu',
                               stdout=screen)
    assert (status, out) == (0, f'abc{SAYS}\n') and 'tokens/s' in err and 'bytes' in err
    before = [f'abc{SAYS.encode()[:n].decode(errors="ignore")}' for n in range(len(SAYS.encode()) + 1)]
    assert screen.seen == before  # and none beyond <|endoftext|>
    status, out, _ = program(sample.main, f'--out_dir={out_dir}', '--start=abc', '--temperature=0', '--num_samples=2',
                             '--device=cpu')
    assert (status, out) == (0, '\n'.join((f'abc{SAYS}', '-' * 80, f'abc{SAYS}', '')))


@pytest.mark.parametrize('raw', [b'n\xc3', b'a\xffb\xc3\xa9', b'\xe2\x82x\xf0\x9f\x98', b'\xef\xbf\xbdx', b'\xff\xff'],
                         ids=str)
def test_bytes_that_are_no_text_are_printed_as_decoded(trained, raw):
    out_dir = checkpoint(trained, f'out/{raw!r}', parrot([*raw, BYTES.eot], 1))
    status, out, _ = program(sample.main, f'--out_dir={out_dir}', '--start=a', '--temperature=0', '--device=cpu')
    assert (status, out) == (0, 'a' + raw.decode(errors='replace') + '\n')


def test_a_dash_reads_the_prompt_from_standard_input(trained):
    """As a process: the text passes through pipes."""
    out_dir = checkpoint(trained, 'out/pipe', parrot(SCRIPT, len('né\n'.encode())))
    done = subprocess.run([sys.executable, str(ROOT / 'sample.py'), f'--out_dir={out_dir}', '--start=-',
                           '--temperature=0', '--device=cpu'], input='né\n'.encode(), capture_output=True,
                          env={**ENVIRONMENT, 'PYTHONUTF8': '1'})
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == f'né\n{SAYS}\n'
    assert done.stderr.count(b'\n') == 1 and b'tokens/s' in done.stderr
    Path('prompt.txt').write_text('né\n')
    for start_, stdin in (('-', 'né\n'), ('FILE:prompt.txt', '')):
        assert program(sample.main, f'--out_dir={out_dir}', f'--start={start_}', '--temperature=0', '--device=cpu',
                       stdin=stdin)[:2] == (0, f'né\n{SAYS}\n')


def test_without_a_prompt_a_document_begins(trained):
    out_dir = checkpoint(trained, 'out/empty', parrot(SCRIPT, 1))
    for start_, stdin in (('', ''), ('-', '')):
        status, out, _ = program(sample.main, f'--out_dir={out_dir}', f'--start={start_}', '--temperature=0',
                                 '--device=cpu', stdin=stdin)
        assert (status, out) == (0, SAYS + '\n')


@pytest.mark.parametrize('kind', ['gpt2', 'llama'])
def test_a_hugging_face_folder_is_sampled_with_its_own_tokenizer(kind, tmp_path):
    known = small_bpe(tmp_path / 'tokenizer')
    prompt, says = known.encode('the other').tolist(), known.encode('né 😀日本').tolist()
    model = parrot([*says, known.eot], len(prompt)) if kind == 'gpt2' else ours()
    hf.export(model, known, tmp_path / 'folder')
    status, out, err = program(sample.main, f'--out_dir={tmp_path}/folder', '--start=the other', '--temperature=0',
                               '--device=cpu')
    assert status == 0, status
    made = model.generate(torch.tensor([prompt]), model.config.block_size - len(prompt), temperature=0)
    made = made[0, len(prompt):].tolist()
    assert out == 'the other' + known.decode(made[:made.index(known.eot)] if known.eot in made else made) + '\n'
    assert kind == 'llama' or out == 'the otherné 😀日本\n'
    assert 'tokens/s' in err


@pytest.mark.parametrize('flags', [['--tokenizer=bytes'], []], ids=['bytes named', 'bytes found'])
def test_a_hugging_face_folder_of_bytes_is_sampled(flags, tmp_path):
    hf.export(parrot(SCRIPT, 3), BYTES, tmp_path / 'folder')
    status, out, _ = program(sample.main, f'--out_dir={tmp_path}/folder', '--start=abc', '--temperature=0',
                             '--device=cpu', *flags)
    assert (status, out) == (0, f'abc{SAYS}\n')


def test_a_hugging_face_folder_with_a_bin_file_is_sampled(tmp_path):
    model = parrot(SCRIPT, 3)
    hf.export(model, small_bpe(tmp_path / 'tokenizer'), tmp_path / 'folder')
    (tmp_path / 'folder/model.safetensors').rename(tmp_path / 'weights')
    torch.save(load_file(tmp_path / 'weights'), tmp_path / 'folder/pytorch_model.bin')
    status, out, _ = program(sample.main, f'--out_dir={tmp_path}/folder', '--start=abc', '--temperature=0',
                             '--device=cpu', '--tokenizer=bytes')
    assert (status, out) == (0, f'abc{SAYS}\n')


def test_a_variants_folder_is_refused_in_one_line(tmp_path):
    hf.export(ours(**SV), small_bpe(tmp_path / 'tokenizer'), tmp_path / 'folder')
    assert_one_line(program(sample.main, f'--out_dir={tmp_path}/folder', '--device=cpu')[0], 'nanoresformer')


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_in_one_line(trained, tmp_path):
    known = small_bpe(tmp_path / 'tokenizer')
    hf.export(ours(vocab_size=known.n_vocab - 1), known, tmp_path / 'folder')
    run = checkpoint(trained, 'out/few-ids', ours(vocab_size=256))
    for folder, ids in ((f'{tmp_path}/folder', known.n_vocab), (run, 257)):
        status, _, _ = program(sample.main, f'--out_dir={folder}', '--start=the', '--device=cpu')
        assert_one_line(status, folder, f'{ids} ids', ids - 1)


def test_a_damaged_or_unsafe_checkpoint_is_refused_though_an_older_one_lies_beside_it(trained, tmp_path):
    """An older one is for resuming: its text, export or scores would pass for those of the newest."""
    for damage in (lambda path: cut(path, 0.7), lambda path: MALICE['torch file'](Evil(tmp_path / 'marker'), path)):
        folder = Path(shutil.copytree(trained, tmp_path / 'run', dirs_exist_ok=True))
        shutil.copy(folder / 'ckpt.pt', folder / 'ckpt.pt.1')
        damage(folder / 'ckpt.pt')
        for main, *words in ((sample.main, f'--out_dir={folder}', '--device=cpu'),
                             (hf.main, 'export', f'--out_dir={folder}', f'--to={tmp_path}/to'),
                             (evaluate.main, 'loss', f'--out_dir={folder}', '--device=cpu')):
            assert_one_line(program(main, *words)[0], folder / 'ckpt.pt', 'damaged')
    (folder / 'ckpt.pt').unlink()
    assert_one_line(program(sample.main, f'--out_dir={folder}', '--device=cpu')[0], folder / 'ckpt.pt')
    assert not (tmp_path / 'marker').exists() and not (tmp_path / 'to').exists()


def test_a_runs_missing_dataset_is_named_and_not_looked_for_on_the_hub(trained, monkeypatch):
    monkeypatch.setattr('huggingface_hub.hf_hub_download', lambda *args: pytest.fail('asked the hub'))
    run = Path(checkpoint(trained, 'out/elsewhere', ours()), 'ckpt.pt')
    old = load(run)
    torch.save({**old, 'settings': {**old['settings'], 'dataset': 'gone'},
                'data': {**old['data'], 'tokenizer': {'name': 'gpt2', 'sha256': '0' * 64}}}, run)
    assert_one_line(program(sample.main, f'--out_dir={run.parent}', '--device=cpu')[0], 'data/gone', run.parent)


@pytest.mark.parametrize('flag', ['--top_p=0.0', '--top_p=1.5', '--top_k=-1', '--temperature=-1'])
def test_a_way_to_sample_that_makes_no_sense_is_one_line_before_any_text(trained, flag):
    status, out, _ = program(sample.main, f'--out_dir={trained}', '--start=abc', '--device=cpu', flag)
    assert_one_line(status, flag[2:])
    assert out == ''


def test_a_prompt_without_room_for_a_token_is_refused_in_one_line(trained):
    for prompt in ('x' * 32, 'x' * 500):
        status, out, _ = program(sample.main, f'--out_dir={trained}', f'--start={prompt}', '--device=cpu')
        assert_one_line(status, len(prompt), 32)
        assert out == ''
    status, out, _ = program(sample.main, f'--out_dir={trained}', f'--start={"x" * 31}', '--device=cpu')
    assert status == 0 and out.startswith('x' * 31)
