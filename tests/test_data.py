"""data.py: a row is a pure function of (seed, row number); what does not match meta.json is refused."""
import hashlib
import json
import os
import random
import shutil
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import Dataset, Loader, TrainingRows, validation_batches

BLOCK = 8
SPLITS = {'train': {'A': 500, 'B': 300, 'C': 100}, 'validation': {'A': 200, 'B': 90, 'C': 5}}


@pytest.fixture
def tiny(prepared):
    prepared('tiny', SPLITS)
    return Dataset('tiny')


def sizes_only(sizes):
    """A dataset of which only the number of sequences per domain is asked."""
    return SimpleNamespace(meta={'splits': {'train': {d: {'tokens': n * BLOCK + 1} for d, n in sizes.items()}}},
                           folder='data/sizes_only', sequences=lambda split, domain, block_size: sizes[domain])


def first_rows(dataset, n, seed=0, weights=None, start=0):
    rows = TrainingRows(dataset, BLOCK, seed, weights, warn=lambda message: None)
    rows.seek(start)
    return [rows.next() for _ in range(n)]


# which sequence is row r

def test_a_row_is_a_function_of_seed_and_row_number_alone(tiny):
    expected = first_rows(tiny, 300)
    assert first_rows(tiny, 300) == expected
    for start in (0, 1, 7, 63, 150, 299):
        assert first_rows(tiny, 300 - start, start=start) == expected[start:]
    rows = TrainingRows(tiny, BLOCK, 0, warn=lambda message: None)
    for r in (250, 3, 3, 120, 119, 0):  # forwards and backwards
        rows.seek(r)
        assert rows.next() == expected[r]


def test_the_order_is_fixed_for_ever():
    """A change here breaks every resume of every run there is."""
    found = first_rows(sizes_only({'A': 5, 'B': 3}), 10, seed=1337, weights={'A': 0.7, 'B': 0.3})
    assert found == [('A', 16), ('B', 0), ('A', 32), ('A', 0), ('A', 8), ('B', 16), ('A', 24), ('A', 0),
                     ('B', 8), ('A', 32)]


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
    total, counts = sum(weights.values()), Counter()
    for n in range(1, 500):
        counts[rows.domains[rows.next_domain()]] += 1
        assert all(abs(counts[d] - n * weights[d] / total) <= 1 for d in weights), n


def test_shares_stay_within_one_row_over_many_rows_of_the_papers_mixture():
    weights = {'CommonCrawl': 0.5, 'C4': 0.2, 'Github': 0.1, 'Book': 0.05, 'ArXiv': 0.05, 'Wikipedia': 0.05,
               'StackExchange': 0.05}
    rows = TrainingRows(sizes_only(dict.fromkeys(weights, 10)), BLOCK, 0, weights)
    for n in range(1, 40_001):
        rows.next_domain()
        assert max(abs(count - n * weight) for count, weight in zip(rows.counts, rows.weights, strict=True)) <= 1


def test_without_weights_each_domain_comes_by_its_number_of_tokens(tiny):
    counts = Counter(domain for domain, _ in first_rows(tiny, 900))
    assert all(abs(counts[domain] - tokens) <= 1 for domain, tokens in SPLITS['train'].items())


def test_an_epoch_brings_every_sequence_once_and_the_next_epoch_another_order():
    sizes = {'A': 37, 'B': 5, 'C': 1}
    starts = {domain: [] for domain in sizes}
    for domain, start in first_rows(sizes_only(sizes), 500, weights={'A': 5, 'B': 3, 'C': 1}):
        starts[domain].append(start)
    for domain, size in sizes.items():
        epochs = [starts[domain][i:i + size] for i in range(0, len(starts[domain]), size)]
        assert len(epochs) > 5
        for epoch in epochs[:-1]:
            assert sorted(epoch) == [i * BLOCK for i in range(size)]
        assert len(set(epochs[-1])) == len(epochs[-1])
    assert starts['A'][:37] != starts['A'][37:74]


def test_another_seed_gives_another_order_of_the_same_domains():
    dataset = sizes_only({'A': 40, 'B': 40})
    one, two = first_rows(dataset, 40, seed=1), first_rows(dataset, 40, seed=2)
    assert one != two and [d for d, _ in one] == [d for d, _ in two]
    assert [s for d, s in one if d == 'A'] != [s for d, s in one if d == 'B']  # nor do domains share one


def test_the_start_of_a_second_epoch_is_said_once_per_domain(tiny):
    said = []
    rows = TrainingRows(tiny, BLOCK, 0, {'A': 1, 'C': 1}, warn=said.append)
    for _ in range(200):  # A has 62 sequences, C 12
        rows.next()
    assert len(said) == 2 and 'C starts epoch 2' in said[0] and 'A starts epoch 2' in said[1]


# tokens

def test_batches_equal_a_slow_reading_of_the_files(tiny):
    rows = TrainingRows(tiny, BLOCK, 3)
    loader = Loader(rows, batch_size=4, accumulation=2)
    for row, (x, y) in zip(range(0, 40, 4), iter(loader.next, None), strict=False):
        assert x.shape == y.shape == (4, BLOCK) and x.dtype == y.dtype == torch.int64
        for b, (domain, start) in enumerate(first_rows(tiny, 4, seed=3, start=row)):
            raw = (tiny.folder / 'train' / f'{domain}.bin').read_bytes()
            tokens = [raw[2 * i] + 256 * raw[2 * i + 1] for i in range(start, start + BLOCK + 1)]  # little-endian
            assert x[b].tolist() == tokens[:-1] and y[b].tolist() == tokens[1:]  # shifted by one
    loader.close()


def test_ids_up_to_65535_are_read(prepared):
    tokens = np.arange(65536 - BLOCK - 1, 65536)
    prepared('wide', {'train': {'A': tokens}, 'validation': {'A': tokens}}, n_vocab=65536)
    assert Dataset('wide').read('train', 'A', 0, BLOCK + 1).tolist() == tokens.tolist()


@pytest.mark.parametrize('first_step', [0, 3])
@pytest.mark.parametrize('world_size', [1, 2, 3, 4])
def test_the_order_is_the_same_for_any_number_of_processes_and_after_a_resume(tiny, world_size, first_step):
    accumulation, batch_size, steps = 12, 2, 4
    per_step = accumulation * batch_size
    rows = TrainingRows(tiny, BLOCK, 5, warn=lambda message: None)
    rows.seek(first_step * per_step)
    expected = torch.from_numpy(rows.batch(steps * per_step)).view(steps * accumulation, batch_size, BLOCK + 1)
    for rank in range(world_size):
        loader = Loader(TrainingRows(tiny, BLOCK, 5, warn=lambda message: None), batch_size, accumulation, first_step,
                        rank, world_size)
        for m in range(rank, steps * accumulation, world_size):
            x, y = loader.next()
            assert torch.equal(x, expected[m, :, :-1]) and torch.equal(y, expected[m, :, 1:])
        loader.close()


def test_the_order_does_not_depend_on_how_a_step_is_split_into_micro_batches(tiny):
    def step(batch_size, accumulation):
        loader = Loader(TrainingRows(tiny, BLOCK, 5), batch_size, accumulation)
        found = torch.cat([loader.next()[0] for _ in range(accumulation)])
        loader.close()
        return found
    assert torch.equal(step(2, 6), step(4, 3)) and torch.equal(step(2, 6), step(1, 12))


# validation

def counted(dataset, domain, batch_size, iters, world_size=1):
    """The counted (inputs, target) pairs of all ranks, as a multiset."""
    found = Counter()
    for rank in range(world_size):
        for x, y in validation_batches(dataset, domain, BLOCK, batch_size, iters, rank, world_size):
            assert x.shape == y.shape == (batch_size, BLOCK)
            for b in range(batch_size):
                n = int((y[b] != -1).sum())
                inputs, targets = x[b, :n].tolist(), y[b, :n].tolist()
                assert -1 not in targets and (y[b, n:] == -1).all() and inputs[1:] == targets[:-1]
                found[tuple(inputs), tuple(targets)] += bool(n)
    return +found


@pytest.mark.parametrize('domain', ['A', 'B', 'C'])
def test_validation_counts_the_same_targets_for_any_number_of_processes_and_batch_size(tiny, domain):
    expected = counted(tiny, domain, 4, 3)
    assert expected == counted(tiny, domain, 4, 3)
    for world_size in (2, 3, 5):
        assert counted(tiny, domain, 4, 3, world_size) == expected
    for batch_size, iters in ((1, 12), (2, 6), (3, 4), (12, 1)):
        assert counted(tiny, domain, batch_size, iters) == expected
    rows = {'A': 12, 'B': 11, 'C': 1}[domain]  # 24, 11 and, of 5 tokens, 0 whole rows
    assert sum(expected.values()) == rows


def test_validation_rows_are_spread_over_the_file(tiny):
    starts = set()
    tokens = tiny.read('validation', 'A', 0, 200)
    for x, _ in validation_batches(tiny, 'A', BLOCK, 2, 3):
        starts |= {next(i for i in range(0, 200, BLOCK) if (tokens[i:i + BLOCK] == row.numpy()).all()) for row in x}
    assert len(starts) == 6 and min(starts) == 0 and max(starts) == 23 * BLOCK


def test_a_domain_shorter_than_a_row_is_padded_with_ignored_targets(tiny):
    (x, y), = validation_batches(tiny, 'C', BLOCK, 3, 2)
    tokens = tiny.read('validation', 'C', 0, 99).tolist()
    assert len(tokens) == 5 and x[0, :4].tolist() == tokens[:4] and y[0].tolist() == tokens[1:] + [-1] * 4
    assert (y[1:] == -1).all()


# checks

def refusal(call, *words):
    with pytest.raises((ValueError, OSError)) as caught:
        call()
    message = str(caught.value)
    assert '\n' not in message
    for word in words:
        assert word in message, message
    return message


def rewrite_meta(folder, change):
    meta = json.loads((folder / 'meta.json').read_text())
    change(meta)
    (folder / 'meta.json').write_text(json.dumps(meta))


def test_a_missing_dataset_names_the_command_that_prepares_it(tiny):
    refusal(lambda: Dataset('nope'), 'data/nope', 'python prepare_slimpajama.py', '--out=data/nope')


@pytest.mark.parametrize('change', ['shorter', 'longer', 'missing'])
def test_a_token_file_of_another_size_is_refused(tiny, change):
    path = tiny.folder / 'train' / 'B.bin'
    data = path.read_bytes()
    path.unlink() if change == 'missing' else path.write_bytes(data[:-2] if change == 'shorter' else data + b'\0')
    refusal(lambda: Dataset('tiny'), 'B.bin', 'missing' if change == 'missing' else '600')


@pytest.mark.parametrize('text', ['', '{"format": 1', '[]', '1', 'null', '\0\0\0', '{"format": 1}',
                                  '{"format": 1, "splits": {"train": 3}}', '{"format": 1, "splits": {}}',
                                  '{"format": 1, "splits": {"train": {"A": {"tokens": 500}}, "validation": {}}}'])
def test_a_damaged_meta_file_is_refused(tiny, text):
    (tiny.folder / 'meta.json').write_text(text)
    refusal(lambda: TrainingRows(Dataset('tiny'), BLOCK, 0), 'meta.json', 'prepare')


def test_another_format_is_refused(tiny):
    rewrite_meta(tiny.folder, lambda meta: meta.update(format=2))
    refusal(lambda: Dataset('tiny'), 'format 2', 'reads 1')


@pytest.mark.parametrize('tokens', [0, 1])
def test_a_validation_domain_with_nothing_to_predict_is_refused_or_skipped(prepared, tokens):
    prepared('empty', {'train': {'A': 100}, 'validation': {'A': 50, 'B': tokens}})
    try:
        dataset = Dataset('empty')
    except ValueError as error:
        assert 'B' in str(error)
    else:
        assert not counted(dataset, 'B', 2, 2)


def test_an_altered_file_of_the_same_size_is_refused(tiny):
    tiny.verify()
    path = tiny.folder / 'train' / 'B.bin'
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    refusal(Dataset('tiny').verify, 'B.bin', 'altered')
    refusal(Dataset('tiny').verify, 'B.bin', 'altered')  # and was not remembered as right


def test_what_was_found_right_is_not_hashed_again_unless_forced(tiny, monkeypatch):
    hashed = []
    digest = hashlib.file_digest

    def counting(f, kind):
        hashed.append(os.path.basename(f.name))
        return digest(f, kind)
    monkeypatch.setattr(hashlib, 'file_digest', counting)
    tiny.verify()
    assert sorted(hashed) == ['A.bin', 'A.bin', 'B.bin', 'B.bin', 'C.bin', 'C.bin']
    hashed.clear()
    Dataset('tiny').verify()
    assert hashed == []
    os.utime(tiny.folder / 'train' / 'C.bin', ns=(5, 5))
    Dataset('tiny').verify()
    assert hashed == ['C.bin']
    hashed.clear()
    Dataset('tiny').verify(force=True)
    assert len(hashed) == 6


def test_force_finds_what_the_memory_hides(tiny):
    tiny.verify()
    path = tiny.folder / 'validation' / 'A.bin'
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    Dataset('tiny').verify()  # size and time are all it looks at
    refusal(lambda: Dataset('tiny').verify(force=True), 'A.bin', 'altered')


@pytest.mark.parametrize('text', ['', '{', '[]', 'null', '{"train/A.bin": 3}'])
def test_a_damaged_memory_of_verification_is_replaced(tiny, text):
    (tiny.folder / 'verified.json').write_text(text)
    tiny.verify()
    assert len(json.loads((tiny.folder / 'verified.json').read_text())) == 6
    assert not [name for name in os.listdir(tiny.folder) if name not in ('meta.json', 'verified.json', 'train',
                                                                         'validation')]


def test_a_dataset_that_cannot_be_written_is_verified_all_the_same(tiny, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError('read-only')
    monkeypatch.setattr(Path, 'write_text', refuse)
    tiny.verify()


@pytest.mark.parametrize('weights, words', [
    ({'A': 1, 'Boook': 1}, ["'Boook'", 'A, B, C']), ({'A': 0, 'B': 0}, ['all 0']), ({'A': -1}, ['A', '-1']),
    ({'A': 'much'}, ['A', "'much'"]), ({'A': True}, ['A', 'True']), ({'A': float('nan')}, ['A', 'nan']),
    ({'A': float('inf')}, ['A', 'inf']), ({3: 1}, ['3', 'A, B, C']),
])
def test_domain_weights_that_name_no_domain_or_no_weight_are_refused(tiny, weights, words):
    refusal(lambda: TrainingRows(tiny, BLOCK, 0, weights), 'domain_weights', *words)


def test_a_domain_shorter_than_a_sequence_is_refused_unless_its_weight_is_zero(prepared):
    prepared('short', {'train': {'A': 100, 'B': BLOCK}, 'validation': {'A': 50}})
    refusal(lambda: TrainingRows(Dataset('short'), BLOCK, 0), 'B', 'block_size=8', 'domain_weights')
    assert TrainingRows(Dataset('short'), BLOCK, 0, {'A': 1, 'B': 0}).domains == ['A']
    prepared('enough', {'train': {'A': 100, 'B': BLOCK + 1}, 'validation': {'A': 50}})
    assert TrainingRows(Dataset('enough'), BLOCK, 0).sizes == [12, 1]


def test_a_domain_without_training_documents_is_left_out(prepared):
    prepared('none', {'train': {'A': 100, 'B': 0}, 'validation': {'A': 50, 'B': 50}})
    dataset = Dataset('none')
    dataset.verify()
    assert TrainingRows(dataset, BLOCK, 0).domains == ['A']


# the thread

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


def test_close_ends_the_thread_even_where_nobody_takes_its_batches(tiny, monkeypatch):
    uncaught = []
    monkeypatch.setattr(threading, 'excepthook', uncaught.append)
    loaders = [Loader(TrainingRows(tiny, BLOCK, 0), 2, 2) for _ in range(3)]
    loaders[1].next()
    broken = Loader(SimpleNamespace(seek=lambda row: None, batch=FailAfter(Loader.AHEAD, tiny)), 2, 2)
    for loader in [*loaders, broken]:
        while not loader.queue.full():
            pass
        loader.close()
        assert not loader.thread.is_alive()
    assert not uncaught


class FailAfter:
    """Batches, and then an error while the queue is full."""

    def __init__(self, n, dataset):
        self.left, self.rows = n, TrainingRows(dataset, BLOCK, 0)

    def __call__(self, size):
        if not self.left:
            raise OSError('the disk is gone')
        self.left -= 1
        return self.rows.batch(size)


def resident():
    with open('/proc/self/statm') as f:
        return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='reads /proc')
def test_resident_memory_does_not_grow_with_what_was_read(prepared):
    n = 24 * 2**20
    prepared('large', {'train': {'A': np.zeros(n, dtype=np.uint16)}, 'validation': {'A': 50}})
    dataset = Dataset('large')
    dataset.read('train', 'A', 0, 1000)
    before, starts = resident(), list(range(0, n, 2**14))
    random.Random(0).shuffle(starts)
    for start in starts:
        dataset.read('train', 'A', start, 2**14)
    assert resident() - before < 12 * 2**20  # of 48 MB read
