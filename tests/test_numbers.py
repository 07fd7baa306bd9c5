"""paper/numbers.py: the numbers that the paper prints, and the sizes of its models."""

from model import GPTConfig
from paper.numbers import TABLE_1, TABLE_5
from paper.runs import SIZES, shape
from tasks import TASKS


def test_the_sizes_are_those_of_table_4():
    sizes = {}
    for size in SIZES:
        config = GPTConfig(**shape(size))
        sizes[size] = (config.n_layer, config.n_head, config.n_embd, config.ffn_width)
    assert sizes == {
        '2m': (4, 2, 16, 56),
        '82m': (8, 8, 512, 1792),
        '180m': (12, 12, 768, 2688),
        '468m': (24, 16, 1024, 3584),
    }


def test_table_5_is_the_papers():
    assert {key: f'{loss:.4f}' for key, loss in TABLE_5.items()} == {
        ('vanilla', '82m'): '2.7389',
        ('vanilla', '180m'): '2.5015',
        ('vanilla', '468m'): '2.2806',
        ('resformer', '82m'): '2.7117',
        ('resformer', '180m'): '2.4692',
        ('resformer', '468m'): '2.2537',
    }


def row(*key):
    """A row of Table 1 as printed, in the order of its columns."""
    scores = TABLE_1[key]
    columns = [*TASKS, 'average']
    assert set(scores) <= set(columns)
    return ' '.join(f'{scores[name]:.3f}' if name in scores else '-' for name in columns)


def test_table_1_is_the_papers_and_has_the_tasks_of_evaluate_py():
    assert len(TABLE_1) == 4
    assert row('vanilla', '82m', 2048) == '0.263 0.142 0.492 0.199 0.331 0.572 0.333'
    assert row('resformer', '82m', 2048) == '0.273 0.148 0.512 0.182 0.414 0.604 0.355'
    assert row('vanilla', '82m', 64000) == '- - - - - - 0.328'
    assert row('resformer', '82m', 64000) == '- - - - - - 0.350'
