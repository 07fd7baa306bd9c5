"""Documents in SlimPajama's form, for the tests of preparation, and what must come of them: the slow,
obvious way."""

import collections
import gzip
import hashlib
import json
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, read_json

from lib import tokenizer
from lib.data import Dataset
from lib.sources import TABLE_2
from prepare_slimpajama import PrepareConfig, prepare

WORDS = (
    'the of naïve e\u0301 value résidual 日本 😀 <|endoftext|> x=1; \t \n  learning transformer'
).split(' ')


def make_documents(count, seed):
    rng = random.Random(seed)
    documents = []
    for _ in range(count):
        domain = rng.choices(list(TABLE_2), weights=[5, 4, 3, 2, 2, 2, 2])[0]
        text = ' '.join(rng.choices(WORDS, k=rng.randint(0, 60)))
        documents.append((domain, text))
    return documents


def write_rows(path, documents):
    """Documents, (domain, text), in SlimPajama's form, as the name's suffix says."""
    rows = []
    for domain, text in documents:
        rows.append({'text': text, 'meta': {'redpajama_set_name': f'RedPajama{domain}'}})
    write_records(path, rows)


def write_records(path, rows):
    """Rows, {column: value}, in the form that the name's suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith('.parquet'):
        pyarrow = pytest.importorskip('pyarrow')
        parquet = pytest.importorskip('pyarrow.parquet')
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return

    data = ''.join(json.dumps(row) + '\n' for row in rows).encode()
    if path.name.endswith(('.zst', '.zstd')):
        data = pytest.importorskip('zstandard').compress(data)
    if path.name.endswith('.gz'):
        data = gzip.compress(data)
    path.write_bytes(data)


def make_source(suffix='.jsonl', validation=True, files=5, count=60):
    """{name: documents} of a new source, of which the test split is left out."""
    source = {}
    for n in range(files):
        source[f'train/chunk1/example_{n}{suffix}'] = make_documents(count, n)
    if validation:
        source[f'validation/chunk1/example_holdout_0{suffix}'] = make_documents(count, 99)

    for name, documents in source.items():
        write_rows(Path('raw', name), documents)
    write_rows(Path(f'raw/test/example_0{suffix}'), make_documents(5, 100))
    return source


def settings(source='raw', out='out', **changes):
    options = {'tokens': 20_000, 'workers': 1, 'tokenizer': 'bytes', **changes}
    return PrepareConfig(source=str(source), out=str(out), **options)


def run_prepare(*places, **changes):
    prepare(settings(*places, **changes))


# ---- What is expected ----------------------------------------------------------------------------


def recompute(source, weights, tokens, seed=1337, val_fraction=0.005):
    """{(split, domain): [ids of each document]}: the contract, written the slow way."""
    total = sum(weights.values())
    goals = {domain: tokens * weight / total or 1e18 for domain, weight in weights.items()}
    result = collections.defaultdict(list)
    trained, held_out = set(), set()
    has_validation = any(name.startswith('validation') for name in source)

    def place(name):
        return not name.startswith('validation'), fraction(seed, name)

    for name in sorted(source, key=place):
        documents = [(domain, text) for domain, text in source[name] if text]
        random.Random(f'{seed} {name} 0').shuffle(documents)
        for domain, text in documents:
            if domain not in weights:
                continue
            split = 'validation' if name.startswith('validation') else 'train'
            if split == 'train' and sum(map(len, result['train', domain])) >= goals[domain]:
                continue
            if not has_validation:
                if not result['validation', domain] and text not in trained:
                    held_out.add(text)
                if text in held_out or fraction(seed, text) < val_fraction:
                    split = 'validation'
                else:
                    trained.add(text)
            result[split, domain].append(ids_of(text))
    return result


def fraction(seed, text):
    salt = seed.to_bytes(16, 'little')
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, 'little') / 2**64


def ids_of(text):
    return [*unicodedata.normalize('NFC', text).encode(), 256]


def assert_equals(out, expected):
    """That `out` holds these documents, {(split, domain): [ids of each]}, and nothing else."""
    expected = {
        f'{split}/{domain}.bin': texts for (split, domain), texts in expected.items() if texts
    }
    entries = dict(Dataset(out.absolute()).files())  # which have the sizes of their files
    assert entries.keys() == expected.keys()
    files = contents(out)
    assert files.keys() == {'meta.json', 'tokenizer.json', *expected}
    for name, documents in expected.items():
        assert np.frombuffer(files[name], '<u2').tolist() == sum(documents, [])
        assert entries[name]['sha256'] == hashlib.sha256(files[name]).hexdigest()
        assert entries[name]['documents'] == len(documents)


def read_meta(out):
    return read_json(Path(out, 'meta.json'))


def without_meta(out):
    return {name: raw for name, raw in contents(out).items() if name != 'meta.json'}


def texts_of(file):
    """The documents of a .bin file of bytes, of which none spells <|endoftext|>."""
    return tokenizer.load('bytes').decode(np.fromfile(file, '<u2')).split(tokenizer.EOT)[:-1]
