"""Small checkpoints of transformers, and what to compare models by."""

import sys

import pytest
import reference
import torch
from conftest import read_json, write_json
from programs import tokens
from runs import assert_same

transformers = pytest.importorskip('transformers')

LLAMA = dict(
    vocab_size=260,
    hidden_size=32,
    intermediate_size=44,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=24,
    rms_norm_eps=1e-5,
)
GPT2 = dict(vocab_size=260, n_embd=32, n_layer=3, n_head=4, n_positions=24)
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


def written(folder, kind='llama', **changes):
    """A checkpoint of transformers in `folder`; returns its model, none of whose weights is zero, one,
    or near it by chance."""
    config, kind_of_model, size = CLASSES[kind]
    torch.manual_seed(0)
    model = reference.perturb(kind_of_model(config(**{**size, **changes}))).eval()
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
