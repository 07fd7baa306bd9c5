"""train.py --init_from=FOLDER: training goes on from a checkpoint of transformers."""

import re
from pathlib import Path

import checkpoints
import pytest
from checkpoints import SCALING, written
from programs import BYTES
from runs import evaluations, good, here, newest, refused

import hub.convert
from lib.rundir import checkpoints as checkpoints_of
from model import GPT, GPTConfig

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


def evaluated(init_from, **options):
    """The line that --eval_only prints."""
    status, out = here('out/refused', init_from=init_from, eval_only=True, **options)
    assert status == 0, status
    return out


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
    checkpoint = newest(first)
    model = GPT(GPTConfig(**checkpoint['model_config']))
    model.load_state_dict(checkpoint['model'])
    hub.convert.export(model, BYTES, folder)
    line = evaluated(folder, **changes)
    assert line == evaluated(checkpoints_of(first)[0], **changes)

    good(second, **changes, init_from=folder, max_iters=1, eval_interval=1)
    logged = [entry['val']['mean'] for entry in evaluations(second)]
    assert f'{logged[0]:.4f}' in line and logged[-1] < logged[0]
    if name == 'SVFormer':
        refused(folder, 'c_attn', init_from=folder)


OTHERS = [
    ('llama', dict(rope_parameters=LLAMA3), ['--rope_theta=500000.0', '--rope_scaling=']),
    ('llama', dict(num_attention_heads=4, num_key_value_heads=2), ['--n_head=4', '--n_kv_head=2']),
    ('llama', dict(hidden_size=64), ['--n_embd=64', '--n_inner=112']),  # it would follow n_embd
    ('gpt2', GPT2, ['--arch=gpt2', '--n_inner=128', '--tie_embeddings=True']),
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
