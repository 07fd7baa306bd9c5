"""What several rooms' tests share: the repository on the path, one thread, and small prepared datasets."""
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


def write_dataset(folder, splits, n_vocab=64, seed=0):
    """Write splits, {split: {domain: number of tokens, or the tokens}}, as prepare_slimpajama.py does. Returns meta."""
    random = np.random.RandomState(seed)
    meta = {'format': 1, 'tokenizer': {'name': 'test', 'sha256': '0' * 64, 'n_vocab': n_vocab}, 'seed': seed,
            'splits': {}}
    for split, domains in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        meta['splits'][split] = {}
        for domain, tokens in domains.items():
            if isinstance(tokens, int):  # half of all tokens are 1: something to learn
                tokens = random.randint(0, n_vocab, tokens) * random.randint(0, 2, tokens) + 1
            data = (np.asarray(tokens) % n_vocab).astype('<u2').tobytes()
            (folder / split / f'{domain}.bin').write_bytes(data)
            meta['splits'][split][domain] = {'documents': 1, 'tokens': len(data) // 2, 'bytes': len(data),
                                             'sha256': hashlib.sha256(data).hexdigest(), 'sources': []}
    (folder / 'meta.json').write_text(json.dumps(meta))
    return meta


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """prepared(name, splits, ...) writes tmp_path/data/<name>; the test runs in tmp_path."""
    monkeypatch.chdir(tmp_path)
    return lambda name, splits, **options: write_dataset(tmp_path / 'data' / name, splits, **options)
