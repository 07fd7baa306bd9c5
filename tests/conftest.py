"""What the tests of several rooms share: the path, one thread, small datasets, and a small run."""

import contextlib
import gc
import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

# Before torch and numpy are imported, here and in every process that a test starts.
os.environ['OMP_NUM_THREADS'] = '1'

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / 'shared' / 'data'
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)
# A shell starts its background jobs with SIGINT ignored, and nohup ignores SIGHUP. What the tests start
# would inherit that, and a test of Ctrl-C would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
gc.set_threshold(50_000, 20, 20)  # the compiler makes many objects: an eighth less time


def pytest_configure(config):
    """Hypothesis draws the same examples each time: no test fails because of an unrelated change."""
    if config.pluginmanager.hasplugin('hypothesispytest'):  # a GPU machine may not have it
        import hypothesis

        hypothesis.settings.register_profile('same', derandomize=True, deadline=None)
        hypothesis.settings.load_profile('same')


def pytest_collection_finish():
    """What is imported by now stays: a garbage collection need not look at it again."""
    gc.freeze()


def read_json(path):
    return json.loads(Path(path).read_text(), parse_constant=pytest.fail)  # NaN is not JSON


def write_json(path, value):
    Path(path).write_text(json.dumps(value))


SPLITS = {
    'train': {'A': 5000, 'B': 3000, 'C': 1500},
    'validation': {'A': 700, 'B': 300, 'C': 20},
}


def write_dataset(folder, splits=SPLITS, seed=0, **tokenizer):
    """Write a dataset as prepare_slimpajama.py does. Returns what meta.json says.

    splits: {split: {domain: number of tokens, or the tokens themselves}}
    tokenizer: what meta.json says of it, where it is not the one that no file describes
    """
    random = np.random.RandomState(seed)
    tokenizer = {'name': 'test', 'sha256': '0' * 64, 'n_vocab': 64, **tokenizer}
    assert tokenizer.keys() == {'name', 'sha256', 'n_vocab'}
    n_vocab = tokenizer['n_vocab']
    meta = {'format': 1, 'tokenizer': tokenizer, 'seed': seed, 'splits': {}}
    for split, domains in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        meta['splits'][split] = {}
        for domain, tokens in domains.items():
            if isinstance(tokens, int):
                # Half of all tokens are 1: something to learn.
                tokens = random.randint(0, n_vocab, tokens) * random.randint(0, 2, tokens) + 1
            data = (np.asarray(tokens) % n_vocab).astype('<u2').tobytes()
            (folder / split / f'{domain}.bin').write_bytes(data)
            meta['splits'][split][domain] = {
                'documents': 1,
                'tokens': len(data) // 2,
                'bytes': len(data),
                'sha256': hashlib.sha256(data).hexdigest(),
                'sources': [],
            }
    write_json(folder / 'meta.json', meta)
    return meta


def contents(folder):
    """{path within the folder: bytes} of all files."""
    folder = Path(folder)
    files = [path for path in folder.rglob('*') if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def assert_words(message, *words):
    """A message is one line, and has these words, in this order."""
    assert message and '\n' not in message, message
    rest = message
    for word in words:
        _, found, rest = rest.partition(str(word))
        assert found, f'{word!r} is not there, or not in its place: {message}'


def assert_one_line(status, *words):
    """A program ended with an error message of one line that has these words."""
    assert isinstance(status, str) and status.startswith('error: '), status
    assert_words(status, *words)


@contextlib.contextmanager
def raises_one_line(*words, of=(ValueError, OSError)):
    """What is done here is refused with a message of one line that has these words, in this order."""
    with pytest.raises(of) as caught:
        yield caught
    assert_words(str(caught.value), *words)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The empty folder in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prepared(here):
    """prepared(name, splits) writes data/<name> where the test runs."""
    return lambda name, splits: write_dataset(here / 'data' / name, splits)


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    """One folder for all tests of a module, with data/tiny in it; each test has its own out_dir."""
    folder = tmp_path_factory.mktemp('train')
    before = os.getcwd()
    os.chdir(folder)
    write_dataset(folder / 'data' / 'tiny')
    yield folder
    os.chdir(before)


@pytest.fixture(scope='module')
def whole(work):
    """The out_dir of 12 steps in one go, with checkpoints at 6 and 12."""
    import runs

    runs.good('out/whole')
    return 'out/whole'


@pytest.fixture
def half(whole):
    """half(name) is a copy of the whole run, or of another one of 12 steps, as it was after its
    checkpoint at step 6."""

    def half(name, run=whole):
        shutil.copytree(run, name)
        Path(name, 'ckpt_12.pt').unlink()
        return name

    return half


@pytest.fixture(autouse=True)
def figures_closed():
    """Close, after a test, the figures that it drew."""
    yield
    if 'matplotlib.pyplot' in sys.modules:  # it takes a while, and few tests draw
        sys.modules['matplotlib.pyplot'].close('all')
