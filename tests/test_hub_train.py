"""train.py --init_from=FOLDER: training goes on from a checkpoint of transformers."""

import re
import shutil
from pathlib import Path

import checkpoints
import pytest
from checkpoints import SCALING, written
from conftest import raises_one_line, write_dataset
from programs import BYTES, small_bpe
from runs import evaluations, good, model_of, refused

import hub.convert
from lib.rundir import checkpoints as checkpoints_of
from lib.trained import load_run

quiet = checkpoints.quiet

# The shape of runs.TINY.
SOURCE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
)
GPT2 = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)
LLAMA3 = {**SCALING, 'rope_theta': 500000.0}


@pytest.fixture(scope='module', autouse=True)
def tokenizer_file(work):
    """data/tiny says that its tokenizer is the one that exports here have."""
    (work / 'data/tiny/tokenizer.json').write_bytes(BYTES.as_file())


def evaluated(init_from, **options):
    """The losses before the first step."""
    good('out/evaluated', init_from=init_from, max_iters=1, eval_interval=1, **options)
    losses = evaluations('out/evaluated')[0]['val']
    shutil.rmtree('out/evaluated')
    return losses


EXPORTS = {
    'Llama scaled, GQA tied': dict(
        rope_theta=500000.0, rope_scaling=(8.0, 1.0, 4.0, 16), n_kv_head=1, tie_embeddings=True
    ),
    'gpt2': dict(arch='gpt2'),
    'SVFormer': dict(share_v=True),
}


@pytest.mark.parametrize('name', EXPORTS)
def test_training_from_a_folder_begins_with_its_loss_and_goes_on(work, name):
    changes = EXPORTS[name]
    first, folder, second = f'out/{name}', f'from/{name}', f'out/{name}, on'
    good(first, **changes, max_iters=2)
    hub.convert.export(model_of(first), BYTES, folder)
    losses = evaluated(folder, **changes)
    assert losses == evaluated(checkpoints_of(first)[0], **changes)

    good(second, **changes, init_from=folder, max_iters=1, eval_interval=1)
    logged = [entry['val'] for entry in evaluations(second)]
    assert logged[0] == losses and logged[-1]['mean'] < losses['mean']
    if name == 'SVFormer':
        refused(folder, 'attn.v.proj', init_from=folder)


def other_dataset(name, encoder):
    """data/tiny, as if it had been prepared with another tokenizer."""
    folder = Path('data', name)
    write_dataset(folder, sha256=encoder.sha256)
    (folder / 'tokenizer.json').write_bytes(encoder.as_file())
    return folder


def test_an_export_is_refused_on_data_of_another_tokenizer_as_its_run_is(work):
    good('out/first', max_iters=1)
    model = model_of('out/first')
    hub.convert.export(model, BYTES, 'from/export')
    encoder = small_bpe(work / 'bpe')
    dataset = other_dataset('other', encoder)
    for source in ('out/first', 'from/export'):
        refused(source, 'another tokenizer', 'data/other', init_from=source, dataset='other')
    hub.convert.export(model, encoder, 'from/bpe')
    refused('from/bpe', 'another tokenizer', 'data/tiny', init_from='from/bpe')
    evaluated('from/bpe', dataset='other')
    with raises_one_line('from/bpe', 'another tokenizer', 'bytes'):
        load_run('from/bpe', 'bytes')
    (dataset / 'tokenizer.json').unlink()  # meta.json still says which one it was
    evaluated('from/bpe', dataset='other')
    refused('from/export', 'another tokenizer', init_from='from/export', dataset='other')
    Path('from/export/tokenizer.json').unlink()  # now it does not say
    evaluated('from/export', dataset='other')


def test_a_run_goes_on_from_its_checkpoint_whatever_weights_lie_beside_it(work):
    good('out/both', max_iters=1)
    written(Path('out/both'))
    good('out/both', init_from='resume')
    evaluated('out/both')


OTHERS = [
    ('llama', dict(rope_parameters=LLAMA3), ['--rope_theta=500000.0', '--rope_scaling=']),
    ('llama', dict(num_attention_heads=4, num_key_value_heads=2), ['--n_head=4', '--n_kv_head=2']),
    ('llama', dict(hidden_size=64), ['--n_embd=64', '--n_inner=112']),  # it would follow n_embd
    ('gpt2', GPT2, ['--n_inner=128', '--arch=gpt2', '--tie_embeddings=True']),
]


@pytest.mark.parametrize('kind, changes, words', OTHERS, ids=str)
def test_another_model_than_asked_for_is_refused_with_the_flags_that_mend_it(
    work, kind, changes, words
):
    folder = Path('from', re.sub(r'\W+', '-', str(changes))[:80])
    source = SOURCE if kind == 'llama' else {}
    written(folder, kind, **{**source, **changes})
    message = refused(folder, *words, init_from=folder)
    flags = dict(re.findall(r'--(\w+)=(\([^)]*\)|\S+)', message))
    evaluated(folder, **flags)
