"""What several rooms' tests share: the repository on the path, one thread, small prepared datasets, a small run."""
import hashlib
import json
import os
import shutil
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


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    """One folder for all tests of a module, with data/tiny in it; each test has an out_dir of its own."""
    import runs
    folder, before = tmp_path_factory.mktemp('train'), os.getcwd()
    os.chdir(folder)
    write_dataset(folder / 'data' / 'tiny', {'train': runs.TRAIN, 'validation': runs.VALIDATION})
    yield folder
    os.chdir(before)


@pytest.fixture(scope='module')
def whole(work):
    """12 steps in one go, checkpoints at 0, 6 (kept) and 12. Returns its out_dir."""
    import runs
    runs.good('out/whole')
    return 'out/whole'


@pytest.fixture
def half(whole):
    """half(name) is a copy of the whole run as it was when it had written its checkpoint at step 6."""
    import runs

    def half(name, **changes):
        shutil.copytree(whole, name)
        os.replace(Path(name, 'ckpt_6.pt'), Path(name, 'ckpt.pt'))
        Path(name, 'ckpt.pt.1').unlink()
        Path(name, 'ckpt_best.pt').unlink()
        if changes:
            torch.save({**runs.load(Path(name, 'ckpt.pt')), **changes}, Path(name, 'ckpt.pt'))
        return name
    return half
