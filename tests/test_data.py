"""lib/data.py: a row is a pure function of (seed, row number); what meta.json belies is refused."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import raises_one_line
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data import Dataset, TrainingRows, micro_batches
from lib.sources import TABLE_2
from train import TrainConfig

BLOCK = 8
SPLITS = {'train': {'A': 500, 'B': 300, 'C': 100}, 'validation': {'A': 200, 'B': 90, 'C': 5}}


@pytest.fixture
def tiny(prepared):
    prepared('tiny', SPLITS)
    return Dataset('tiny')


def sizes_only(sizes):
    """A dataset that only knows the number of sequences per domain."""
    return SimpleNamespace(
        meta={'splits': {'train': {domain: {'tokens': n} for domain, n in sizes.items()}}},
        folder='data/sizes_only',
        sequences=lambda split, domain, block_size: sizes[domain],
    )


def batches_of(dataset, seed=0, accumulation=2, first_step=0, rank=0, world_size=1):
    shape = dict(batch_size=2, gradient_accumulation_steps=accumulation)
    settings = TrainConfig(**shape, max_iters=first_step + 4)
    rows = TrainingRows(dataset, BLOCK, seed)
    machine = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device('cpu'))
    return micro_batches(rows, settings, machine, first_step)


def first_rows(dataset, n, seed=0, weights=None, start=0):
    rows = TrainingRows(dataset, BLOCK, seed, weights)
    rows.seek(start)
    return [rows.next() for _ in range(n)]


# --- which sequence is row r ---------------------------------------------------------------------


def test_without_weights_domains_are_mixed_as_they_were_prepared(tiny):
    expected = {'A': 5 / 9, 'B': 3 / 9, 'C': 1 / 9}
    assert TrainingRows(tiny, BLOCK, 0).shares == pytest.approx(expected)


def test_the_order_is_fixed_for_ever():
    """A change here breaks every resume of every run there is."""
    dataset = sizes_only({'A': 5, 'B': 3})
    rows = first_rows(dataset, 10, seed=1337, weights={'A': 0.7, 'B': 0.3})
    assert ''.join(domain for domain, _ in rows) == 'ABAAABAABA'
    assert [start for _, start in rows] == [16, 0, 32, 0, 8, 16, 24, 0, 8, 32]

    rows = first_rows(sizes_only(dict.fromkeys(TABLE_2, 99)), 40, weights=TABLE_2)
    letters = dict(zip(sorted(TABLE_2), 'ABCDEFG', strict=True))
    order = ''.join(letters[domain] for domain, _ in rows)
    assert order == 'DCDEDCDADBDCDFDGDECDDCDEDCDADBDCDFDGDECD'


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 100), st.floats(1e-6, 1.0)), min_size=1, max_size=12))
def test_each_domain_is_within_one_row_of_its_share_after_any_number_of_rows(weights):
    weights = {f'd{i}': weight for i, weight in enumerate(weights)}
    rows = TrainingRows(sizes_only(dict.fromkeys(weights, 10)), BLOCK, 0, weights)
    total = sum(weights.values())
    counts = Counter()
    for n in range(1, 500):
        counts[rows.next_domain()] += 1
        assert all(abs(counts[d] - n * weights[d] / total) <= 1 for d in weights), n


def test_an_epoch_brings_every_sequence_once_and_another_epoch_or_seed_another_order():
    dataset, weights = sizes_only({'A': 37, 'B': 5}), {'A': 5, 'B': 3}
    rows = first_rows(dataset, 296, weights=weights)
    assert rows != first_rows(dataset, 296, seed=1, weights=weights)
    for domain, size in (('A', 37), ('B', 5)):
        starts = [start for each, start in rows if each == domain]
        epochs = np.array(starts[: 5 * size]).reshape(5, size)
        assert (np.sort(epochs) == np.arange(size) * BLOCK).all()
        assert len(np.unique(epochs, axis=0)) == 5


def test_a_second_epoch_is_said_once_per_domain(tiny):
    messages = []
    rows = TrainingRows(tiny, BLOCK, 0, {'A': 1, 'C': 1}, warn=messages.append)
    for _ in range(200):  # A has 62 sequences, C 12
        rows.next()
    assert len(messages) == 2
    assert 'C is in epoch 2 at row 25' in messages[0] and 'A is in epoch 2' in messages[1]


# --- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize('world_size, first_step', [(1, 0), (2, 3), (3, 0), (4, 3)])
def test_the_order_is_the_same_for_any_number_of_processes_and_after_a_resume(
    tiny, world_size, first_step
):
    texts = []
    for domain, start in first_rows(tiny, 96, 5, start=first_step * 24):
        text = np.fromfile(tiny.folder / 'train' / f'{domain}.bin', dtype='<u2')
        texts.append(text[start:][: BLOCK + 1].tolist())
    expected = torch.tensor(texts).view(48, 2, BLOCK + 1)  # micro-batches, of 12 to a step
    for rank in range(world_size):
        batches = batches_of(tiny, 5, 12, first_step, rank, world_size)
        for m in range(rank, 48, world_size):
            x, y = next(batches)
            assert torch.equal(x, expected[m, :, :-1]) and torch.equal(y, expected[m, :, 1:])


# --- checks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'splits, words',
    [
        ({'train': {'A': 50}, 'validation': {}}, ['train and validation', 'names train with text']),
        ({'validation': {'A': 50}}, ['train and validation', 'names validation']),
        ({'val': {}}, ['none']),
        ({'train': {'mean': 50}, 'validation': {'A': 50}}, ['train/mean.bin', 'name']),
        ({'train': {'a\x1b[2Jb': 50}, 'validation': {'A': 50}}, ['a\\x1b[2Jb.bin', 'name']),
        # nothing to predict
        ({'train': {'A': 100}, 'validation': {'A': 50, 'B': 1}}, ['B.bin', 1]),
    ],
)
def test_a_dataset_made_by_hand_without_what_training_needs_is_refused(prepared, splits, words):
    prepared('by_hand', splits)
    with raises_one_line('data/by_hand', *words):
        Dataset('by_hand')


def test_ids_beyond_the_vocabulary_are_refused_when_they_are_read(tiny):
    tiny.meta['tokenizer']['n_vocab'] = 40
    for split in SPLITS:
        with raises_one_line(f'data/tiny/{split}/A.bin', 'n_vocab', 40):
            tiny.read(split, 'A', 0, 99)


@pytest.mark.parametrize('train', [{}, {'A': 0}])
def test_an_empty_training_split_is_refused_as_such(prepared, train):
    prepared('untrained', {'train': train, 'validation': {'A': 50}})
    dataset = Dataset('untrained')  # there is something to evaluate on
    with raises_one_line('data/untrained has no training tokens'):
        TrainingRows(dataset, BLOCK, 0)


@pytest.mark.parametrize(
    'weights',
    [
        {'A': 0, 'B': 0},
        {'A': -1, 'B': 2},
        {'A': 'much'},
        {'A': float('nan')},
        {'A': 1.7e308, 'C': 1e308},
    ],
)
def test_domain_weights_that_are_no_weights_are_refused(tiny, weights):
    with raises_one_line(f'domain_weights={weights}', 'finite', 'A, B, C'):
        TrainingRows(tiny, BLOCK, 0, weights)


def test_a_domain_shorter_than_a_sequence_is_refused_unless_its_weight_is_zero(prepared):
    def rows(name, *weights):
        return TrainingRows(Dataset(name), BLOCK, 0, *weights)

    prepared('short', {'train': {'A': 100, 'B': BLOCK}, 'validation': {'A': 50}})
    with raises_one_line('B', 'block_size=8', 'domain_weights'):
        rows('short')
    assert list(rows('short', {'A': 1, 'B': 0}).shares) == ['A']
    # A domain without training documents is left out.
    prepared('none', {'train': {'A': 100, 'B': 0}, 'validation': {'A': 50, 'B': 50}})
    assert list(rows('none').shares) == ['A']
