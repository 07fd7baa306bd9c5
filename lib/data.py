"""
Token files -> batches. Row r of a run, a sequence of block_size + 1 tokens, is a pure function of
(seed, r): the data order does not depend on the number of GPUs, on the batch size or on how often a
run was resumed.

A dataset is what prepare_slimpajama.py writes: data/<dataset>/<split>/<Domain>.bin and meta.json.
"""

import hashlib
import itertools
import json
import os
import zlib
from pathlib import Path

import numpy as np
import torch

from lib.files import (
    DATASET_FORMAT,
    is_domain,
    sha256_of,
    unreadable,
)


def dataset_folder(name):
    """Where the dataset of a name lies."""
    return Path('data', name)


class Dataset:
    """A prepared dataset, the sizes of its files checked against meta.json.

    It reads the files that it has opened at its start, even where others take their places. Raises
    FileNotFoundError where there is none, ValueError where it is damaged.
    """

    def __init__(self, name):
        self.folder = dataset_folder(name)
        self.advice = f'delete {self.folder} and prepare it again'
        path = self.folder / 'meta.json'
        if not path.exists():
            others = sorted(other.parent.name for other in Path('data').glob('*/meta.json'))
            raise FileNotFoundError(
                f'no prepared dataset in {self.folder} (in data: {", ".join(others) or "none"}); prepare it '
                f'with: python prepare_slimpajama.py --source=... --tokenizer=... --out={self.folder}'
            )
        with unreadable(f'{path} cannot be used', self.advice):
            self.meta = json.loads(path.read_bytes())
            self.check_meta()
        self.check_splits()
        self.opened = {}  # {'train/A.bin': the file}
        for name, entry in self.files():
            self.opened[name] = file = open(self.folder / name, 'rb')
            size, expected = os.fstat(file.fileno()).st_size, 2 * entry['tokens']
            if size != expected:
                raise ValueError(f'{file.name} has {size:,} bytes, not {expected:,}; {self.advice}')

    def check_meta(self):
        if self.meta['format'] != DATASET_FORMAT:
            raise ValueError(f'format {self.meta["format"]}, this program reads {DATASET_FORMAT}')
        for name, entry in self.files():
            if not is_domain(Path(name).stem):
                raise ValueError(
                    f'{name!r}: logs use its name for something else, or cannot show it'
                )
            if name.startswith('validation/') and (entry['tokens'] < 2 or entry['bytes'] < 1):
                raise ValueError(
                    f'{name} has {entry["tokens"]} tokens of {entry["bytes"]} bytes, and none to predict'
                )

    def check_splits(self):
        splits = self.meta['splits']
        # An empty training split may be evaluated on.
        if 'train' not in splits or not splits.get('validation'):
            names = [split for split in splits if splits[split]]
            raise ValueError(
                f'{self.folder} needs the splits train and validation, and meta.json names '
                f'{" and ".join(names) or "none"} with text: prepare it from more, or add what is missing'
            )

    def files(self):
        """(name, such as train/A.bin, its entry in meta.json) of each token file."""
        for split, domains in self.meta['splits'].items():
            for domain, entry in domains.items():
                yield f'{split}/{domain}.bin', entry

    def hashes(self):
        return {name: entry['sha256'] for name, entry in self.files()}

    def fingerprint(self):
        """One short word for all token files: where it is the same, so are they."""
        text = json.dumps(self.hashes(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def verify(self):
        """Compare the sha256 of each file with meta.json's."""
        for name, entry in self.files():
            path, expected = self.folder / name, entry['sha256']
            sha256 = sha256_of(path)
            if sha256 != expected:
                raise ValueError(
                    f'{path} was altered: its sha256 is {sha256[:12]}..., meta.json says '
                    f'{expected[:12]}...; {self.advice}'
                )

    def read(self, split, domain, start, count):
        """`count` tokens from `start` on, as int64; fewer at the end of the file."""
        file = self.opened[f'{split}/{domain}.bin']
        # Read, not mapped: whatever is read through a memory map stays in its resident size.
        data = os.pread(file.fileno(), 2 * count, 2 * start)
        tokens = np.frombuffer(data, dtype='<u2')
        available = self.meta['splits'][split][domain]['tokens'] - start
        if len(tokens) < min(count, available):
            raise ValueError(f'{file.name} was cut off while it was in use')
        highest = tokens.max(initial=0)
        n_vocab = self.meta['tokenizer']['n_vocab']
        if highest >= n_vocab:
            raise ValueError(
                f'{file.name} has the id {highest}, and n_vocab in meta.json is {n_vocab}: correct either'
            )
        return tokens.astype(np.int64)

    def sequences(self, split, domain, block_size):
        """How many sequences of block_size predictions a domain holds, without overlap."""
        return (self.meta['splits'][split][domain]['tokens'] - 1) // block_size


class TrainingRows:
    """Says which sequence each row of a run is.

    After any n rows each domain has had n times its weight, within one row. No sequence comes twice
    within an epoch of its domain, and each epoch has its own order.

    weights: {domain: weight}, numbers, 0 or more; {}: each domain by its number of tokens.
    Raises ValueError for a weight that is not such a number or whose domain does not exist, for a
    domain that is shorter than one row, and for a dataset without training tokens.
    """

    def __init__(self, dataset, block_size, seed, weights=None, warn=print):
        self.dataset = dataset
        self.block_size = block_size
        self.seed = seed
        self.warn = warn

        domains = dataset.meta['splits']['train']
        tokens = {domain: entry['tokens'] for domain, entry in domains.items()}
        if not any(tokens.values()):
            raise ValueError(f'{dataset.folder} has no training tokens; prepare it from more text')
        weights = weights or tokens
        check_weights(weights, domains, dataset.folder)
        total = sum(weights.values())
        self.shares = {d: weights[d] / total for d in sorted(weights) if weights[d] > 0}
        self.sizes = {d: dataset.sequences('train', d, block_size) for d in self.shares}
        for domain, size in self.sizes.items():
            if size < 1:
                raise ValueError(
                    f'{domain} in {dataset.folder} is shorter than one sequence of '
                    f'block_size={block_size} + 1 tokens; prepare more, lower block_size, or leave '
                    'it out with domain_weights'
                )

        self.row = 0
        self.counts = dict.fromkeys(self.shares, 0)  # rows so far
        self.orders = {}  # domain -> (epoch, its permutation)

    def seek(self, row):
        """Go on to a row, by counting: two seconds for a million rows."""
        while self.row < row:
            self.next_domain()

    def next_domain(self):
        """The next row's domain, by the chairman assignment (Tijdeman 1980).

        Among the domains that lag enough, it takes the one that is due first. That keeps every domain
        within 1 - 1 / (2k - 2) rows of its share, k being the number of domains.
        """
        self.row += 1
        k = len(self.shares)
        slack = 1 / (2 * k - 2) if k > 1 else 0.0
        best, earliest = next(iter(self.shares)), float('inf')
        for domain, share in self.shares.items():
            lag = self.row * share - self.counts[domain]
            due = (1 - slack - lag) / share
            if lag >= slack - 1e-9 and due < earliest:
                best, earliest = domain, due
        self.counts[best] += 1
        return best

    def next(self):
        """(domain, first token) of the next row."""
        domain = self.next_domain()
        epoch, index = divmod(self.counts[domain] - 1, self.sizes[domain])
        return domain, int(self.order(domain, epoch)[index]) * self.block_size

    def order(self, domain, epoch):
        """The permutation of a domain's sequences in an epoch."""
        before, permutation = self.orders.get(domain, (None, None))
        if epoch != before:
            size = self.sizes[domain]
            if epoch and not before:
                self.warn(
                    f'warning: {domain} is in epoch {epoch + 1} at row {self.row - 1:,}: '
                    f'its {size:,} sequences repeat'
                )
            key = [self.seed % 2**32, zlib.crc32(domain.encode()), epoch]
            permutation = np.arange(size, dtype=np.uint32)
            # Not default_rng: numpy promises never to change the stream of a RandomState.
            np.random.RandomState(key).shuffle(permutation)
            self.orders[domain] = epoch, permutation
        return permutation

    def batch(self, size):
        """The next `size` rows, (size, block_size + 1) int64."""
        rows = []
        for _ in range(size):
            domain, start = self.next()
            rows.append(self.dataset.read('train', domain, start, self.block_size + 1))
        return np.stack(rows)


def check_weights(weights, domains, folder):
    numbers = [w for w in weights.values() if type(w) in (int, float) and w >= 0]
    is_complete = len(numbers) == len(weights) and weights.keys() <= domains.keys()
    if not is_complete or not 0 < sum(numbers) < float('inf'):
        raise ValueError(
            f'domain_weights={weights} must be numbers of 0 or more, of a sum above 0 and finite, for '
            f'domains of {folder}: {", ".join(domains)}'
        )


def micro_batches(rows, settings, machine, first_step=0):
    """Yield one rank's micro-batches (x, y) on its device, each (batch_size, block_size) int64, without end.

    A step takes gradient_accumulation_steps micro-batches in row order, a multiple of the machine's
    world_size; micro-batch m is rank m % world_size's. While one is read, a GPU goes on with what it was
    given before.
    """
    size = settings.batch_size
    first_row = first_step * settings.rows_per_step + machine.rank * size
    is_cuda = machine.device.type == 'cuda'
    for row in itertools.count(first_row, machine.world_size * size):
        rows.seek(row)
        batch = torch.from_numpy(rows.batch(size))
        if is_cuda:
            batch = batch.pin_memory()
        # Only from pinned memory: elsewhere, such as on a Mac, the copy may read what is freed meanwhile.
        batch = batch.to(machine.device, non_blocking=is_cuda)
        yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def windows(dataset, domain, block_size):
    """How many windows of block_size predictions cover a domain of the validation split; the last one
    may be shorter."""
    tokens = dataset.meta['splits']['validation'][domain]['tokens']
    return -(-(tokens - 1) // block_size)


def read_windows(dataset, domain, rows, block_size, size=0):
    """Windows `rows` of a domain's validation split as (x, y), int64.

    Each of shape (max(len(rows), size), block_size). Where a window is short, or there are fewer
    than `size` windows, the targets are -1.
    """
    shape = (max(len(rows), size), block_size)
    x = torch.zeros(shape, dtype=torch.int64)
    y = torch.full(shape, -1)
    for i, row in enumerate(rows):
        tokens = dataset.read('validation', domain, int(row) * block_size, block_size + 1)
        tokens = torch.from_numpy(tokens)
        x[i, : len(tokens) - 1] = tokens[:-1]
        y[i, : len(tokens) - 1] = tokens[1:]
    return x, y


def validation_batches(dataset, domain, block_size, batch_size, iters, machine):
    """Yield (x, y) of the same validation rows every time; batch j is rank j % world_size's.

    They are up to `iters` batches of full windows, evenly spaced over the domain's file; with
    iters=0, all windows. Every batch has batch_size rows, so that a compiled model sees one shape.
    All ranks get as many: the targets of a batch that only fills up the number are all -1.
    """
    if iters:
        full = max(1, dataset.sequences('validation', domain, block_size))
        rows = np.linspace(0, full - 1, min(full, iters * batch_size)).astype(int)
    else:
        rows = np.arange(windows(dataset, domain, block_size))
    for first in range(0, len(rows), machine.world_size * batch_size):
        batch = rows[first + machine.rank * batch_size :][:batch_size]
        yield read_windows(dataset, domain, batch, block_size, size=batch_size)
