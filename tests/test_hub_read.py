"""hub/read.py: checkpoints of transformers, from a folder or the hub, become a GPT."""

import functools
import json
import os
import shutil
import socket

import checkpoints
import pytest
import torch
from checkpoints import (
    FORMATS,
    SCALING,
    assert_equal_logits,
    assert_same_weights,
    edit,
    theirs,
    transformers,
    written,
)
from conftest import ROOT
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from programs import BYTES, tokens
from runs import finish, start
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hub.convert import export, load
from model import GPT, GPTConfig

quiet = checkpoints.quiet

LARGE_BASE = {'rope_type': 'default', 'rope_theta': 500000.0}
LLAMA3 = {**SCALING, 'rope_theta': 500000.0}
NARROW = dict(tie_word_embeddings=False, n_inner=40, layer_norm_epsilon=0.1)
CHECKPOINTS = {
    'Llama': ('llama', {}),
    'Llama GQA': ('llama', dict(num_key_value_heads=2)),
    'Llama MQA tied': ('llama', dict(num_key_value_heads=1, tie_word_embeddings=True)),
    'Llama with a small epsilon and a large base': (
        'llama',
        dict(rms_norm_eps=1e-6, rope_parameters=LARGE_BASE),
    ),
    'Llama with a large epsilon': ('llama', dict(rms_norm_eps=0.1)),
    'Llama scaled as Llama 3': ('llama', dict(num_key_value_heads=2, rope_parameters=LLAMA3)),
    'Mistral': ('mistral', {}),
    'GPT-2': ('gpt2', {}),
    'GPT-2 untied, narrow, large epsilon': ('gpt2', NARROW),
}


@pytest.mark.parametrize('name', CHECKPOINTS)
def test_a_checkpoint_of_transformers_gives_its_logits(name, tmp_path):
    kind, changes = CHECKPOINTS[name]
    model = written(tmp_path, kind, **changes)
    ours = load(tmp_path)
    config = ours.config
    assert_equal_logits(ours, model)
    assert not ours.training and config.block_size == 24

    epsilon = changes.get('rms_norm_eps', changes.get('layer_norm_epsilon', 1e-5))
    base = changes.get('rope_parameters', {}).get('rope_theta', 10000.0)
    assert (config.norm_eps, config.rope_theta) == (epsilon, base)

    tied = changes.get('tie_word_embeddings', kind == 'gpt2')
    shares = ours.lm_head.weight is ours.transformer.wte.weight
    assert config.tie_embeddings == tied == shares


@pytest.mark.parametrize('form', ['rope_parameters', 'rope_scaling', 'rope_scaling, named type'])
def test_llama3_scaling_is_read_in_all_its_spellings(form, tmp_path):
    model = written(tmp_path, rope_parameters=LLAMA3)
    if form != 'rope_parameters':
        scaling = dict(SCALING)
        if 'type' in form:
            scaling['type'] = scaling.pop('rope_type')
        edit(tmp_path, rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling)
    ours = load(tmp_path)
    assert (ours.config.rope_theta, ours.config.rope_scaling) == (500000.0, (8.0, 1.0, 4.0, 16))
    assert_equal_logits(ours, model)

    # The scaling does something here.
    plain = load(edit(tmp_path, rope_parameters=None, rope_theta=500000.0, rope_scaling=None))
    assert (plain(tokens())[0] - ours(tokens())[0]).abs().max() > 0.01


def test_mistrals_window_bounds_the_positions(tmp_path):
    model = written(tmp_path, 'mistral', sliding_window=8)
    ours = load(tmp_path)
    assert ours.config.block_size == 8
    assert_equal_logits(ours, model, T=8)
    with torch.no_grad():  # beyond it another function is computed
        full = theirs('mistral')(tokens(T=12)).logits
        difference = (model(tokens(T=12)).logits - full).abs().amax(dim=(0, 2))
        assert difference[:8].max() < 1e-4 and difference[8:].min() > 0.01
    with pytest.raises(ValueError, match='block_size=8'):
        ours(tokens(T=9))


def test_keys_that_a_mistral_lacks_mean_what_they_mean_to_transformers(tmp_path):
    heads = dict(num_attention_heads=16, num_key_value_heads=8)
    model = written(tmp_path, 'mistral', **heads, max_position_embeddings=5000)
    edit(tmp_path, sliding_window=None, num_key_value_heads=None)  # None drops the key
    ours = load(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.config.block_size == config.sliding_window == 4096
    assert ours.config.n_kv_head == config.num_key_value_heads == 8
    assert_equal_logits(ours, model)


def test_a_whole_number_may_be_spelled_as_a_float(tmp_path):
    model = written(tmp_path)
    assert_equal_logits(load(edit(tmp_path, hidden_size=32.0)), model)


# --- names and files -----------------------------------------------------------------------------


def test_names_without_the_prefix_are_gpt2s_too(tmp_path):
    model = written(tmp_path / 'with', 'gpt2')
    model.transformer.save_pretrained(tmp_path / 'without')
    assert 'wte.weight' in load_file(tmp_path / 'without/model.safetensors')
    assert 'transformer.wte.weight' in load_file(tmp_path / 'with/model.safetensors')
    assert_equal_logits(load(tmp_path / 'without'), model)


TABLES = {
    'llama': {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(4)},
    'gpt2': {
        'transformer.h.0.attn.bias': torch.ones(1, 1, 24, 24).tril(),
        'transformer.h.1.attn.masked_bias': torch.tensor(-1e4),
    },
}


@pytest.mark.parametrize('kind', TABLES)
def test_tables_of_old_checkpoints_are_passed_over(kind, tmp_path):
    model = written(tmp_path, kind)
    path = tmp_path / 'model.safetensors'
    save_file({**load_file(path), **TABLES[kind]}, path)
    assert_equal_logits(load(tmp_path), model)


@pytest.mark.parametrize('kind', ['llama', 'gpt2'])
@pytest.mark.parametrize('form', FORMATS)
def test_every_file_format_gives_the_same_weights(form, kind, tmp_path):
    model = written(tmp_path, kind, tie_word_embeddings=True)  # a .bin names the tied weight twice
    expected = load(tmp_path)
    FORMATS[form](tmp_path, model)
    assert not (tmp_path / 'model.safetensors').exists()
    assert len(list(tmp_path.glob('*.index.json'))) == form.startswith('sharded')
    assert len(list(tmp_path.glob('*.safetensors'))) > 2 or 'bin' in form
    assert_same_weights(load(tmp_path), expected)


def test_safetensors_are_preferred_where_there_are_both(tmp_path):
    model = written(tmp_path)
    expected = load(tmp_path)
    zeros = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    torch.save(zeros, tmp_path / 'pytorch_model.bin')
    assert_same_weights(load(tmp_path), expected)


@pytest.mark.parametrize('kind', ['llama', 'gpt2'])
def test_a_checkpoint_in_half_precision_is_read_exactly(kind, tmp_path):
    theirs(kind).to(torch.bfloat16).save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_equal_logits(ours, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


MEASURE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from hub.read import load
torch.set_num_threads(1)

def anonymous():  # bytes of this process's own; pages of a mapped file are the system's to drop
    resident, shared = map(int, open('/proc/self/statm').read().split()[1:3])
    return (resident - shared) * os.sysconf('SC_PAGE_SIZE')

class Watch(TorchDispatchMode):
    peak = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.peak = max(self.peak, anonymous())
        return result

for folder in sys.argv[3:]:
    load(sys.argv[2])
    before = anonymous()
    with Watch() as watch:
        model = load(folder)
    size = sum(p.nbytes for p in model.parameters())
    print((watch.peak - before) / size, (anonymous() - before) / size)
    del model
"""


@pytest.mark.skipif(
    not os.path.exists('/proc/self/statm'), reason='no /proc: memory is not measured'
)
def test_reading_takes_the_memory_of_the_weights_once(tmp_path):
    with torch.device('meta'):
        big = GPT(GPTConfig(vocab_size=320, n_layer=10, n_head=8, n_embd=384, block_size=16))
    big = big.to_empty(device='cpu')  # 72 MB
    for p in big.parameters():
        p.data.fill_(1.0)

    one, other = tmp_path / 'safetensors', tmp_path / 'bin'
    export(big, BYTES, one)
    del big
    shutil.copytree(one, other, ignore=shutil.ignore_patterns('*.safetensors'))
    torch.save(load_file(one / 'model.safetensors'), other / 'pytorch_model.bin')
    written(tmp_path / 'small')

    script = tmp_path / 'measure.py'
    script.write_text(MEASURE)
    status, out, err = finish(start(script, ROOT, tmp_path / 'small', one, other))
    assert status == 0, err
    for line in out.splitlines():
        peak, final = map(float, line.split())
        assert 0.9 < final < 1.1 and peak < 1.2, out
    assert len(out.splitlines()) == 2


# --- the hub, which no test may need -------------------------------------------------------------


def assert_not_to_be_had(name='someone/something'):
    with pytest.raises(OSError) as caught:
        load(name)
    message = str(caught.value)
    assert name in message and '\n' not in message, message
    return message


ERRORS = [
    OSError('first line\nsecond line'),
    ValueError('not a repo id'),
    RuntimeError(),
    ImportError('no hub'),
]


@pytest.mark.parametrize('error', ERRORS, ids=repr)
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
        address = f'http://127.0.0.1:{deaf.getsockname()[1]}'
        client = functools.partial(HfApi, endpoint=address)
        monkeypatch.setattr('huggingface_hub.HfApi', client)
        assert_not_to_be_had()


def test_in_offline_mode_a_hub_id_is_one_line(monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    assert 'offline' in assert_not_to_be_had().lower()


@pytest.mark.parametrize('name', ['no/such/folder/anywhere', 'not a hub id', 'a?b'])
def test_what_is_neither_a_folder_nor_a_hub_id_is_one_line(name, monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    assert_not_to_be_had(name)


# Files of a repository, and those of them that hold its weights.
REPOSITORIES = {
    'safetensors': (
        ['model.safetensors', 'pytorch_model.bin', 'consolidated.safetensors', 'onnx/model.bin'],
        ['model.safetensors'],
    ),
    'sharded safetensors': (
        ['consolidated.safetensors', 'model-1-of-1.safetensors', 'model.safetensors.index.json'],
        ['model-1-of-1.safetensors', 'model.safetensors.index.json'],
    ),
    'bin': (
        ['adapter_model.safetensors', 'pytorch_model.bin', 'small/model.safetensors', 'args.bin'],
        ['pytorch_model.bin'],
    ),
    'sharded bin': (
        ['original/all.bin', 'pytorch_model-1-of-1.bin', 'pytorch_model.bin.index.json'],
        ['pytorch_model-1-of-1.bin', 'pytorch_model.bin.index.json'],
    ),
}


@pytest.mark.parametrize('form', REPOSITORIES)
def test_from_the_hub_come_json_and_the_weights_that_are_read(form, monkeypatch, tmp_path):
    files, weights = REPOSITORIES[form]
    files = ['README.md', 'config.json', *files]
    downloaded = []

    def download(name, allow_patterns):
        assert name == 'someone/something'
        downloaded.extend(filter_repo_objects(files, allow_patterns=allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(HfApi, 'list_repo_files', lambda self, name, **options: files)
    monkeypatch.setattr('huggingface_hub.snapshot_download', download)
    model = written(tmp_path)
    assert_equal_logits(load('someone/something'), model)
    assert downloaded == ['config.json', *weights]


def cached(cache, model, form):
    """someone/something, as an earlier download left it in the hub's cache."""
    commit = '0' * 40
    repository = cache / 'models--someone--something'
    snapshot = repository / 'snapshots' / commit
    model.save_pretrained(snapshot)
    if form in FORMATS:
        FORMATS[form](snapshot, model)
    (repository / 'refs').mkdir()
    (repository / 'refs/main').write_text(commit)

    # The repository also has files that were not downloaded.
    files = [path.name for path in snapshot.iterdir()] + ['README.md', 'consolidated.safetensors']
    entries = {file: {'size': 1, 'blob_id': ''} for file in files}
    (repository / 'trees').mkdir()
    listing = {'format_version': 1, 'files': entries}
    (repository / 'trees' / f'{commit}.json').write_text(json.dumps(listing))
    return snapshot


@pytest.mark.parametrize('form', ['safetensors', 'bin'])
def test_in_offline_mode_an_earlier_download_is_read(form, monkeypatch, tmp_path):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path))
    model = theirs()
    snapshot = cached(tmp_path, model, form)
    assert_equal_logits(load('someone/something'), model)

    # Without its weights, as where only its tokenizer was downloaded, it is no checkpoint.
    for path in [*snapshot.glob('*.safetensors'), *snapshot.glob('*.bin')]:
        path.unlink()
    assert 'offline' in assert_not_to_be_had().lower()
