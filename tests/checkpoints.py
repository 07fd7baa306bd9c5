"""Small checkpoints of transformers in every file format, and what to compare models by."""

import shutil
import sys

import pytest
import reference
import torch
from conftest import read_json, write_json
from programs import tokens
from runs import assert_same

transformers = pytest.importorskip('transformers')

SCALING = {
    'rope_type': 'llama3',
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 16,
}
LLAMA = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=44,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=24,
    rms_norm_eps=1e-5,
)
GPT2 = dict(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=24)
MISTRAL = dict(LLAMA, num_key_value_heads=2, sliding_window=None)
CLASSES = {
    'llama': (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA),
    'mistral': (transformers.MistralConfig, transformers.MistralForCausalLM, MISTRAL),
    'gpt2': (transformers.GPT2Config, transformers.GPT2LMHeadModel, GPT2),
}


@pytest.fixture(scope='module', autouse=True)
def quiet(tmp_path_factory):
    """transformers keeps its copies of exported code, and its advice, out of everybody's way."""
    modules = str(tmp_path_factory.mktemp('modules'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('transformers.dynamic_module_utils.HF_MODULES_CACHE', modules)
        patch.setattr(sys, 'path', [*sys.path])
        patch.setattr('transformers.utils.logging._tqdm_active', False)
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        yield
        transformers.logging.set_verbosity(verbosity)

    # The next file of tests has another folder for them.
    for name in list(sys.modules):
        if name.partition('.')[0] == 'transformers_modules':
            del sys.modules[name]


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


def load_remote(folder, **options):
    """An export as transformers loads it, with its own code."""
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, trust_remote_code=True, **options)


def edit(folder, **changes):
    """Change config.json (None drops a key); returns its folder."""
    path = folder / 'config.json'
    config = read_json(path)
    for name, value in changes.items():
        config[name] = value
        if value is None:
            del config[name]
    write_json(path, config)
    return folder


@torch.no_grad()
def assert_equal_logits(ours, theirs, T=24, tolerance=1e-4):
    idx = tokens(T=T)
    expected = theirs(idx).logits
    assert expected.std() > 0.3  # nothing to compare where everything is zero
    assert (ours(idx)[0] - expected).abs().max() < tolerance


def assert_same_model(a, b):
    """The same weights, and the same logits."""
    assert_same(a.state_dict(), b.state_dict())
    assert torch.equal(a(tokens())[0], b(tokens())[0])


# --- file formats, in place of model.safetensors -------------------------------------------------


def sharded_safetensors(folder, model):
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size='20KB')


def one_bin(folder, model, **options):
    (folder / 'model.safetensors').unlink()
    torch.save(dict(model.state_dict()), folder / 'pytorch_model.bin', **options)


def one_old_bin(folder, model):
    one_bin(folder, model, _use_new_zipfile_serialization=False)


def sharded_bin(folder, model, shards=3):
    (folder / 'model.safetensors').unlink()
    files = [f'pytorch_model-{i:05}-of-{shards:05}.bin' for i in range(1, shards + 1)]
    parts = {file: {} for file in files}
    where = {}
    for i, (name, t) in enumerate(model.state_dict().items()):
        where[name] = files[i % shards]
        parts[where[name]][name] = t
    for file, part in parts.items():
        torch.save(part, folder / file)
    index = {'metadata': {'total_size': 0}, 'weight_map': where}
    write_json(folder / 'pytorch_model.bin.index.json', index)


FORMATS = {
    'sharded safetensors': sharded_safetensors,
    'bin': one_bin,
    'bin from before zip': one_old_bin,
    'sharded bin': sharded_bin,
}
