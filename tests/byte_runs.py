"""Runs of small models on random bytes, for the tests of evaluate.py."""

import functools
from pathlib import Path

import pytest
from conftest import write_dataset, write_json
from programs import BYTES, described, ours, run_with
from runs import good, newest

from lib.data import Dataset

# 257 ids and a padding.
SIZE = dict(n_layer=2, n_head=2, n_embd=32, n_inner=0, block_size=32, vocab_size=272)
RESFORMER = dict(v_residual=True)


def random_model(**changes):
    """A model whose predictions are far from uniform."""
    return ours(**{**SIZE, **changes})


def write_byte_dataset(folder, validation, encoder=BYTES):
    """A dataset of random ids of a tokenizer. validation: {domain: number of tokens}"""
    splits = {'train': {'A': 5000}, 'validation': validation}
    meta = write_dataset(folder, splits, **described(encoder))
    for i, entry in enumerate(meta['splits']['validation'].values()):
        entry['bytes'] = 3 * entry['tokens'] + i
    write_json(folder / 'meta.json', meta)


def train_once():
    """Train a run of one step on data/bytes. Returns its checkpoint.

    The domains of data/bytes end with a short window, with none, and with one of one prediction; two
    domains of data/short have a single window.
    """
    write_byte_dataset(Path('data/bytes'), {'A': 700, 'B': 321, 'C': 130})
    write_byte_dataset(Path('data/short'), {'A': 700, 'B': 21, 'C': 2})
    good('out/trained', **SIZE, dataset='bytes', max_iters=1, save_steps=())
    return newest('out/trained')


def write_run(checkpoint, name, dataset='bytes', **changes):
    """The same run with the weights of random_model(**changes). Returns its out_dir."""
    settings = {**checkpoint['settings'], 'dataset': dataset}
    data = {**checkpoint['data'], 'sha256': Dataset(dataset).hashes()}
    model = random_model(**changes)
    return run_with(model, 'out/trained', f'out/{name}', settings=settings, data=data)


@pytest.fixture(scope='module')
def trained(work):
    return train_once()


@pytest.fixture
def run(trained):
    """run(name, **changes): a run with other weights. Returns its out_dir."""
    return functools.partial(write_run, trained)
