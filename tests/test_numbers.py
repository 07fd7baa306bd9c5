"""paper/numbers.py: the numbers that the paper prints, and the models that they are of."""

import pytest
from conftest import ROOT

from configurator import configure
from model import GPTConfig
from paper.numbers import SIZES, TABLE_1, TABLE_5, paper_size, shape
from tasks import TASKS
from train import TrainConfig


@pytest.mark.parametrize(
    'files, expected',
    [
        ('vanilla_82m', ('Transformer', '82M')),
        ('vanilla_180m', ('Transformer', '180M')),
        ('vanilla_468m', ('Transformer', '468M')),
        ('resformer_82m', ('ResFormer', '82M')),
        ('resformer_180m', ('ResFormer', '180M')),
        ('resformer_468m', ('ResFormer', '468M')),
        ('resformer_82m seq_64000', ('ResFormer', '82M')),
        ('svformer_82m', None),
        ('svformer_468m', None),
        ('vanilla_2m', None),
        ('resformer_2m', None),
        ('mini', None),
        ('gqa_82m', None),
        ('gpt2_78m', None),
        ('neutreno_82m', None),
        ('denseformer_82m', None),
        ('learned_resformer_82m', None),
        ('sparse_resformer_82m', None),
        ('constant_resformer_82m', None),
    ],
)
def test_the_papers_sizes_are_recognized(files, expected):
    paths = [str(ROOT / 'config' / f'{name}.py') for name in files.split()]
    _, config = configure(TrainConfig, GPTConfig, argv=paths)
    assert paper_size(config) == expected


def test_a_size_is_recognized_however_it_is_spelled():
    spelled = dict(n_kv_head=8, n_inner=1792, vocab_size=50277, block_size=512, dropout=0.1)
    assert paper_size(GPTConfig(**spelled)) == ('Transformer', '82M')
    for change in (
        dict(n_inner=2048),
        dict(rope_theta=5e5),
        dict(tie_embeddings=True),
        dict(n_layer=9),
    ):
        assert paper_size(GPTConfig(**{**spelled, **change})) is None


def test_the_sizes_are_those_of_table_4():
    sizes = {}
    for size in SIZES:
        config = GPTConfig(**shape(size))
        sizes[size] = (config.n_layer, config.n_head, config.n_embd, config.ffn_width)
    assert sizes == {
        '2M': (4, 2, 16, 56),
        '82M': (8, 8, 512, 1792),
        '180M': (12, 12, 768, 2688),
        '468M': (24, 16, 1024, 3584),
    }


def test_table_5_is_the_papers():
    assert {key: f'{loss:.4f}' for key, loss in TABLE_5.items()} == {
        ('Transformer', '82M'): '2.7389',
        ('Transformer', '180M'): '2.5015',
        ('Transformer', '468M'): '2.2806',
        ('ResFormer', '82M'): '2.7117',
        ('ResFormer', '180M'): '2.4692',
        ('ResFormer', '468M'): '2.2537',
    }


def row(*key):
    """A row of Table 1 as printed, in the order of its columns."""
    scores = TABLE_1[key]
    columns = [*TASKS, 'average']
    assert set(scores) <= set(columns)
    return ' '.join(f'{scores[name]:.3f}' if name in scores else '-' for name in columns)


def test_table_1_is_the_papers_and_has_the_tasks_of_evaluate_py():
    assert len(TABLE_1) == 4
    assert row('Transformer', '82M', 2048) == '0.263 0.142 0.492 0.199 0.331 0.572 0.333'
    assert row('ResFormer', '82M', 2048) == '0.273 0.148 0.512 0.182 0.414 0.604 0.355'
    assert row('Transformer', '82M', 64000) == '- - - - - - 0.328'
    assert row('ResFormer', '82M', 64000) == '- - - - - - 0.350'
