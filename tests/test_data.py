"""data.py: a row is a pure function of (seed, row number); what meta.json belies is refused."""

import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import Dataset, Loader, TrainingRows, validation_batches, windows

BLOCK = 8
SPLITS = {'train': {'A': 500, 'B': 300, 'C': 100}, 'validation': {'A': 200, 'B': 90, 'C': 5}}


@pytest.fixture
def tiny(prepared):
    prepared('tiny', SPLITS)
    return Dataset('tiny')


def sizes_only(sizes):
    """A dataset that only knows the number of sequences per domain."""
    domains = {domain: {'tokens': n * BLOCK + 1} for domain, n in sizes.items()}
    return SimpleNamespace(
        meta={'splits': {'train': domains}},
        folder='data/sizes_only',
        sequences=lambda split, domain, block_size: sizes[domain],
    )


def silent(message):
    pass


def first_rows(dataset, n, seed=0, weights=None, start=0):
    rows = TrainingRows(dataset, BLOCK, seed, weights, warn=silent)
    rows.seek(start)
    return [rows.next() for _ in range(n)]


# --- which sequence is row r ---------------------------------------------------------------------


def test_a_row_is_a_function_of_seed_and_row_number_alone(tiny):
    expected = first_rows(tiny, 300)
    assert first_rows(tiny, 300) == expected
    for start in (0, 1, 7, 63, 150, 299):
        assert first_rows(tiny, 300 - start, start=start) == expected[start:]
    rows = TrainingRows(tiny, BLOCK, 0, warn=silent)
    for r in (250, 3, 3, 120, 119, 0):  # forwards and backwards
        rows.seek(r)
        assert rows.next() == expected[r]


def test_the_order_is_fixed_for_ever():
    """A change here breaks every resume of every run there is."""
    dataset = sizes_only({'A': 5, 'B': 3})
    rows = first_rows(dataset, 10, seed=1337, weights={'A': 0.7, 'B': 0.3})
    assert ''.join(domain for domain, _ in rows) == 'ABAAABAABA'
    assert [start for _, start in rows] == [16, 0, 32, 0, 8, 16, 24, 0, 8, 32]


def test_rows_do_not_depend_on_the_global_random_state_or_on_the_order_of_the_weights(tiny):
    np.random.seed(1)
    expected = first_rows(tiny, 50, weights={'A': 2, 'C': 1})
    np.random.seed(2)
    assert first_rows(tiny, 50, weights={'C': 0.25, 'A': 0.5, 'B': 0}) == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 100), st.floats(1e-6, 1.0)), min_size=1, max_size=12))
def test_each_domain_is_within_one_row_of_its_share_after_any_number_of_rows(weights):
    weights = {f'd{i}': weight for i, weight in enumerate(weights)}
    rows = TrainingRows(sizes_only(dict.fromkeys(weights, 10)), BLOCK, 0, weights)
    total = sum(weights.values())
    counts = Counter()
    for n in range(1, 500):
        counts[rows.domains[rows.next_domain()]] += 1
        assert all(abs(counts[d] - n * weights[d] / total) <= 1 for d in weights), n


def test_shares_stay_within_one_row_over_many_rows_of_the_papers_mixture():
    small = dict.fromkeys(('Book', 'ArXiv', 'Wikipedia', 'StackExchange'), 0.05)
    weights = {'CommonCrawl': 0.5, 'C4': 0.2, 'Github': 0.1, **small}
    rows = TrainingRows(sizes_only(dict.fromkeys(weights, 10)), BLOCK, 0, weights)
    for n in range(1, 40_001):
        rows.next_domain()
        for count, weight in zip(rows.counts, rows.weights, strict=True):
            assert abs(count - n * weight) <= 1


def test_without_weights_each_domain_comes_by_its_number_of_tokens(tiny):
    counts = Counter(domain for domain, _ in first_rows(tiny, 900))
    assert all(abs(counts[domain] - tokens) <= 1 for domain, tokens in SPLITS['train'].items())


def test_an_epoch_brings_every_sequence_once_and_the_next_epoch_another_order():
    sizes = {'A': 37, 'B': 5, 'C': 1}
    starts = {domain: [] for domain in sizes}
    for domain, start in first_rows(sizes_only(sizes), 500, weights={'A': 5, 'B': 3, 'C': 1}):
        starts[domain].append(start)
    for domain, size in sizes.items():
        epochs = [starts[domain][i : i + size] for i in range(0, len(starts[domain]), size)]
        assert len(epochs) > 5
        for epoch in epochs[:-1]:
            assert sorted(epoch) == [i * BLOCK for i in range(size)]
        assert len(set(epochs[-1])) == len(epochs[-1])
    assert starts['A'][:37] != starts['A'][37:74]


def test_another_seed_gives_another_order_of_the_same_domains():
    dataset = sizes_only({'A': 40, 'B': 40})
    one = first_rows(dataset, 40, seed=1)
    two = first_rows(dataset, 40, seed=2)
    assert one != two and [d for d, _ in one] == [d for d, _ in two]
    # Nor do two domains share an order.
    assert [s for d, s in one if d == 'A'] != [s for d, s in one if d == 'B']


def test_a_second_epoch_is_said_once_per_domain(tiny):
    messages = []
    rows = TrainingRows(tiny, BLOCK, 0, {'A': 1, 'C': 1}, warn=messages.append)
    for _ in range(200):  # A has 62 sequences, C 12
        rows.next()
    assert len(messages) == 2
    assert 'C is in epoch 2 at row 25' in messages[0] and 'A is in epoch 2' in messages[1]


def test_a_run_that_is_resumed_within_a_second_epoch_says_in_which_it_is():
    messages = []
    rows = TrainingRows(sizes_only({'A': 10}), BLOCK, 0, warn=messages.append)
    rows.seek(37)
    rows.next()
    assert messages == ['warning: A is in epoch 4 at row 37: its 10 sequences repeat']


# --- tokens --------------------------------------------------------------------------------------


def test_batches_equal_a_slow_reading_of_the_files(tiny):
    loader = Loader(TrainingRows(tiny, BLOCK, 3), batch_size=4, accumulation=2)
    for row in range(0, 40, 4):
        x, y = loader.next()
        assert x.shape == y.shape == (4, BLOCK) and x.dtype == y.dtype == torch.int64
        for b, (domain, start) in enumerate(first_rows(tiny, 4, seed=3, start=row)):
            data = (tiny.folder / 'train' / f'{domain}.bin').read_bytes()
            data = data[2 * start : 2 * (start + BLOCK + 1)]
            tokens = [low + 256 * high for low, high in zip(data[::2], data[1::2], strict=True)]
            assert x[b].tolist() == tokens[:-1] and y[b].tolist() == tokens[1:]  # shifted by one
    loader.close()


def test_ids_up_to_65535_are_read(prepared):
    tokens = np.arange(65536 - BLOCK - 1, 65536)
    prepared('wide', {'train': {'A': tokens}, 'validation': {'A': tokens}}, n_vocab=65536)
    assert Dataset('wide').read('train', 'A', 0, BLOCK + 1).tolist() == tokens.tolist()


@pytest.mark.parametrize('first_step', [0, 3])
@pytest.mark.parametrize('world_size', [1, 2, 3, 4])
def test_the_order_is_the_same_for_any_number_of_processes_and_after_a_resume(
    tiny, world_size, first_step
):
    accumulation, batch_size, steps = 12, 2, 4
    per_step = accumulation * batch_size
    rows = TrainingRows(tiny, BLOCK, 5, warn=silent)
    rows.seek(first_step * per_step)
    expected = torch.from_numpy(rows.batch(steps * per_step)).view(-1, batch_size, BLOCK + 1)
    for rank in range(world_size):
        rows = TrainingRows(tiny, BLOCK, 5, warn=silent)
        loader = Loader(rows, batch_size, accumulation, first_step, rank, world_size)
        for m in range(rank, steps * accumulation, world_size):
            x, y = loader.next()
            assert torch.equal(x, expected[m, :, :-1]) and torch.equal(y, expected[m, :, 1:])
        loader.close()


def test_the_order_does_not_depend_on_how_a_step_is_split_into_micro_batches(tiny):
    def step(batch_size, accumulation):
        loader = Loader(TrainingRows(tiny, BLOCK, 5), batch_size, accumulation)
        batches = [loader.next()[0] for _ in range(accumulation)]
        loader.close()
        return torch.cat(batches)

    assert torch.equal(step(2, 6), step(4, 3)) and torch.equal(step(2, 6), step(1, 12))


# --- validation ----------------------------------------------------------------------------------


def counted(dataset, domain, batch_size, iters, world_size=1):
    """How often each pair (inputs, targets) counts, over all ranks."""
    pairs = Counter()
    for rank in range(world_size):
        batches = validation_batches(dataset, domain, BLOCK, batch_size, iters, rank, world_size)
        for x, y in batches:
            assert x.shape == y.shape == (batch_size, BLOCK)
            for b in range(batch_size):
                n = int((y[b] != -1).sum())
                inputs, targets = x[b, :n].tolist(), y[b, :n].tolist()
                assert -1 not in targets and (y[b, n:] == -1).all() and inputs[1:] == targets[:-1]
                if n:
                    pairs[tuple(inputs), tuple(targets)] += 1
    return pairs


# 24, 11 and, of 5 tokens, 0 whole rows.
@pytest.mark.parametrize('domain, rows', [('A', 12), ('B', 11), ('C', 1)])
def test_validation_counts_the_same_targets_for_any_number_of_processes_and_batch_size(
    tiny, domain, rows
):
    expected = counted(tiny, domain, 4, 3)
    assert expected == counted(tiny, domain, 4, 3)
    for world_size in (2, 3, 5):
        assert counted(tiny, domain, 4, 3, world_size) == expected
    for batch_size, iters in ((1, 12), (2, 6), (3, 4), (12, 1)):
        assert counted(tiny, domain, batch_size, iters) == expected
    assert sum(expected.values()) == rows


@pytest.mark.parametrize('world_size', [1, 3])
@pytest.mark.parametrize('domain, rows', [('A', 25), ('B', 12), ('C', 1)])
def test_with_no_number_of_batches_every_token_of_the_split_is_counted_once(
    tiny, domain, rows, world_size
):
    tokens = tiny.read('validation', domain, 0, 9999).tolist()
    expected = Counter()
    for first in range(0, len(tokens) - 1, BLOCK):
        inputs, targets = tokens[first:-1][:BLOCK], tokens[first + 1 :][:BLOCK]
        expected[tuple(inputs), tuple(targets)] += 1
    assert sum(expected.values()) == rows == windows(tiny, domain, BLOCK)
    assert counted(tiny, domain, 4, 0, world_size) == expected


def test_validation_rows_are_spread_over_the_file(tiny):
    tokens = tiny.read('validation', 'A', 0, 200)
    starts = set()
    for x, _ in validation_batches(tiny, 'A', BLOCK, 2, 3):
        for row in x.numpy():
            same = [i for i in range(0, 200, BLOCK) if (tokens[i : i + BLOCK] == row).all()]
            starts.add(same[0])
    assert len(starts) == 6 and min(starts) == 0 and max(starts) == 23 * BLOCK


def test_a_domain_shorter_than_a_row_is_padded_with_ignored_targets(tiny):
    ((x, y),) = validation_batches(tiny, 'C', BLOCK, 3, 2)
    tokens = tiny.read('validation', 'C', 0, 99).tolist()
    assert len(tokens) == 5 and x[0, :4].tolist() == tokens[:4]
    assert y[0].tolist() == tokens[1:] + [-1] * 4 and (y[1:] == -1).all()


# --- checks --------------------------------------------------------------------------------------


def refusal(call, *words):
    with pytest.raises((ValueError, OSError)) as caught:
        call()
    message = str(caught.value)
    assert '\n' not in message
    for word in words:
        assert word in message, message


def open_tiny():
    return Dataset('tiny')


def test_a_missing_dataset_names_the_command_that_prepares_it(tiny):
    command = 'python prepare_slimpajama.py'
    refusal(lambda: Dataset('nope'), 'data/nope', command, '--out=data/nope')


def test_a_path_to_a_dataset_in_place_of_its_name_is_told_the_name(tiny):
    for path in ('data/tiny', './data/tiny/'):
        with pytest.raises(FileNotFoundError, match='give --dataset=tiny$'):
            Dataset(path)
    refusal(lambda: Dataset('data'), '--out=data/data')


@pytest.mark.parametrize('change, word', [('shorter', '600'), ('longer', '600'), ('missing',) * 2])
def test_a_token_file_of_another_size_is_refused(tiny, change, word):
    path = tiny.folder / 'train' / 'B.bin'
    data = path.read_bytes()
    path.unlink()
    if change == 'shorter':
        path.write_bytes(data[:-2])
    if change == 'longer':
        path.write_bytes(data + b'\0')
    refusal(open_tiny, 'B.bin', word)


@pytest.mark.parametrize(
    'text',
    [
        '',
        '{"format": 1',
        '[]',
        '1',
        'null',
        '\0\0\0',
        '{"format": 1}',
        '{"format": 1, "splits": {"train": 3}}',
        '{"format": 1, "splits": {}}',
        '{"format": 1, "splits": {"train": {"A": {"tokens": 500}}, "validation": {}}}',
    ],
)
def test_a_damaged_meta_file_is_refused(tiny, text):
    (tiny.folder / 'meta.json').write_text(text)
    refusal(lambda: TrainingRows(open_tiny(), BLOCK, 0), 'meta.json', 'prepare')


def test_a_meta_file_that_lacks_something_says_what(tiny):
    path = tiny.folder / 'meta.json'
    meta = json.loads(path.read_text())
    del meta['splits']['train']['B']['tokens']
    path.write_text(json.dumps(meta))
    refusal(open_tiny, "meta.json is damaged (KeyError: 'tokens')")
    path.write_text('{}')
    refusal(open_tiny, "meta.json is damaged (KeyError: 'format')")


def test_another_format_is_refused(tiny):
    path = tiny.folder / 'meta.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'format': 2}))
    refusal(open_tiny, 'format 2', 'reads 1')


@pytest.mark.parametrize('tokens', [0, 1])
def test_a_validation_domain_with_nothing_to_predict_is_refused(prepared, tokens):
    prepared('empty', {'train': {'A': 100}, 'validation': {'A': 50, 'B': tokens}})
    refusal(lambda: Dataset('empty'), 'data/empty', "'B'", str(tokens))


@pytest.mark.parametrize('train', [{}, {'A': 0}])
def test_an_empty_training_split_is_refused_as_such(prepared, train):
    prepared('untrained', {'train': train, 'validation': {'A': 50}})
    dataset = Dataset('untrained')  # there is something to evaluate on
    for weights in ({}, {'A': 1}):
        refusal(
            lambda weights=weights: TrainingRows(dataset, BLOCK, 0, weights),
            'data/untrained has no training tokens',
        )


def alter(path, byte):
    """Change a bit of a file, and nothing of what its size and time say."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_an_altered_file_of_the_same_size_is_refused(tiny):
    tiny.verify()
    path = tiny.folder / 'train' / 'B.bin'
    alter(path, 100)
    os.utime(path, ns=(1, 1))
    refusal(open_tiny().verify, 'B.bin', 'altered')
    refusal(open_tiny().verify, 'B.bin', 'altered')  # and was not remembered as right


def test_what_was_right_is_not_hashed_again_unless_forced(tiny, monkeypatch):
    names = []
    digest = hashlib.file_digest

    def counting(file, kind):
        names.append(os.path.basename(file.name))
        return digest(file, kind)

    def hashed(dataset, **options):
        names.clear()
        dataset.verify(**options)
        return sorted(names)

    monkeypatch.setattr(hashlib, 'file_digest', counting)
    assert hashed(tiny) == ['A.bin', 'A.bin', 'B.bin', 'B.bin', 'C.bin', 'C.bin']
    assert hashed(open_tiny()) == []
    os.utime(tiny.folder / 'train' / 'C.bin', ns=(5, 5))
    assert hashed(open_tiny()) == ['C.bin']
    assert len(hashed(open_tiny(), force=True)) == 6


def test_force_finds_what_the_memory_hides(tiny):
    tiny.verify()
    alter(tiny.folder / 'validation' / 'A.bin', 0)
    open_tiny().verify()  # size and time are all it looks at
    refusal(lambda: open_tiny().verify(force=True), 'A.bin', 'altered')


@pytest.mark.parametrize('text', ['', '{', '[]', 'null', '{"train/A.bin": 3}'])
def test_a_damaged_memory_of_verification_is_replaced(tiny, text):
    before = {*os.listdir(tiny.folder), 'verified.json'}
    (tiny.folder / 'verified.json').write_text(text)
    tiny.verify()
    assert len(json.loads((tiny.folder / 'verified.json').read_text())) == 6
    assert set(os.listdir(tiny.folder)) == before


def test_a_dataset_that_cannot_be_written_is_verified_all_the_same(tiny, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError('read-only')

    before = os.listdir(tiny.folder)
    monkeypatch.setattr(os, 'replace', refuse)
    tiny.verify()
    assert os.listdir(tiny.folder) == before
    alter(tiny.folder / 'train' / 'A.bin', 0)
    refusal(open_tiny().verify, 'A.bin', 'altered')


def test_one_split_may_be_verified_alone_and_the_other_is_not_forgotten(tiny):
    tiny.verify(['validation'])
    memory = tiny.folder / 'verified.json'
    assert {name.split('/')[0] for name in json.loads(memory.read_text())} == {'validation'}
    alter(tiny.folder / 'train' / 'A.bin', 0)
    tiny.verify(['validation'])
    refusal(open_tiny().verify, 'A.bin', 'altered')
    alter(tiny.folder / 'train' / 'A.bin', 0)  # back again
    tiny.verify()
    tiny.verify(['validation'])
    assert len(json.loads(memory.read_text())) == 6


@pytest.mark.parametrize(
    'weights, words',
    [
        ({'A': 1, 'Boook': 1}, ["'Boook'", 'A, B, C']),
        ({'A': 0, 'B': 0}, ['all 0']),
        ({'A': -1}, ['A', '-1']),
        ({'A': 'much'}, ['A', "'much'"]),
        ({'A': True}, ['A', 'True']),
        ({'A': float('nan')}, ['A', 'nan']),
        ({'A': float('inf')}, ['A', 'inf']),
        ({3: 1}, ['3', 'A, B, C']),
    ],
)
def test_domain_weights_that_name_no_domain_or_no_weight_are_refused(tiny, weights, words):
    refusal(lambda: TrainingRows(tiny, BLOCK, 0, weights), 'domain_weights', *words)


def test_a_domain_shorter_than_a_sequence_is_refused_unless_its_weight_is_zero(prepared):
    def rows(name, *weights):
        return TrainingRows(Dataset(name), BLOCK, 0, *weights)

    prepared('short', {'train': {'A': 100, 'B': BLOCK}, 'validation': {'A': 50}})
    refusal(lambda: rows('short'), 'B', 'block_size=8', 'domain_weights')
    assert rows('short', {'A': 1, 'B': 0}).domains == ['A']
    prepared('enough', {'train': {'A': 100, 'B': BLOCK + 1}, 'validation': {'A': 50}})
    assert rows('enough').sizes == [12, 1]


def test_a_domain_without_training_documents_is_left_out(prepared):
    prepared('none', {'train': {'A': 100, 'B': 0}, 'validation': {'A': 50, 'B': 50}})
    dataset = Dataset('none')
    dataset.verify()
    assert TrainingRows(dataset, BLOCK, 0).domains == ['A']


# --- the thread ----------------------------------------------------------------------------------


def test_an_error_in_the_loaders_thread_reaches_the_training_loop(tiny):
    loader = Loader(TrainingRows(tiny, BLOCK, 0), 2, 2)
    shutil.rmtree(tiny.folder)
    with pytest.raises((ValueError, OSError)):
        for _ in range(20):
            loader.next()
    loader.close()


def test_a_file_cut_while_it_is_read_is_an_error_not_a_wrong_batch(tiny):
    rows = TrainingRows(tiny, BLOCK, 0)
    for domain in 'ABC':
        (tiny.folder / 'train' / f'{domain}.bin').write_bytes(b'\0\0')
    with pytest.raises((ValueError, OSError)):
        rows.batch(8)


class FailingRows:
    """As many batches as the queue takes, and then an error."""

    def __init__(self, dataset):
        self.left = Loader.AHEAD
        self.rows = TrainingRows(dataset, BLOCK, 0)

    def seek(self, row):
        pass

    def batch(self, size):
        if not self.left:
            raise OSError('the disk is gone')
        self.left -= 1
        return self.rows.batch(size)


def test_close_ends_the_thread_even_where_nobody_takes_its_batches(tiny, monkeypatch):
    uncaught = []
    monkeypatch.setattr(threading, 'excepthook', uncaught.append)
    loaders = [Loader(TrainingRows(tiny, BLOCK, 0), 2, 2) for _ in range(3)]
    loaders[1].next()
    for loader in [*loaders, Loader(FailingRows(tiny), 2, 2)]:
        deadline = time.monotonic() + 60
        while not loader.queue.full():
            assert time.monotonic() < deadline, 'its thread has ended'
            pass
        loader.close()
        assert not loader.thread.is_alive()
    assert not uncaught


def resident():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='reads /proc')
def test_resident_memory_does_not_grow_with_what_was_read(prepared):
    n = 24 * 2**20
    prepared('large', {'train': {'A': np.zeros(n, dtype=np.uint16)}, 'validation': {'A': 50}})
    dataset = Dataset('large')
    starts = list(range(0, n, 2**14))
    random.Random(0).shuffle(starts)
    dataset.read('train', 'A', 0, 1000)
    before = resident()
    for start in starts:
        dataset.read('train', 'A', start, 2**14)
    assert resident() - before < 12 * 2**20  # of 48 MB read
