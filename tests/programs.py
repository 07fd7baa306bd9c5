"""Programs called in this process, and small models, runs and damages to call them with."""

import contextlib
import importlib.util
import io
import os
import pickle
from pathlib import Path

import pytest
import reference
import torch
import variants
from conftest import SHARED, write_dataset
from runs import call, good, newest

from lib import tokenizer
from model import GPT, GPTConfig

BYTES = tokenizer.load('bytes')
NEOX = SHARED / 'tokenizer' / 'tokenizer.json'
needs_neox = pytest.mark.skipif(
    not NEOX.exists(),
    reason='no ../shared/data/tokenizer: the real GPT-NeoX vocabulary is not tested',
)
SIZE = {**variants.SIZE, 'block_size': 24, 'vocab_size': 260}


def program(main, *words):
    """(exit status or message, stdout, stderr) of a program's main()."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        status, out = call(main, *words)
    assert '\r' not in err.getvalue(), 'a bar of progress is for terminals'
    return status, out, err.getvalue()


def table(text):
    """The cells of the table in a program's output."""
    rows = [line[1:-1].split('|') for line in text.splitlines() if line.startswith('|')]
    assert len({len(row) for row in rows}) == 1, text
    return [[cell.strip() for cell in row] for row in rows]


def import_file(path):
    """A Python file as a module of its own, such as another model.py."""
    spec = importlib.util.spec_from_file_location('a_fork', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- models and tokenizers -----------------------------------------------------------------------


def ours(**changes):
    """A small GPT, none of whose weights is zero, one, or near it by chance."""
    config = GPTConfig(**{**SIZE, **changes})
    return reference.perturb(GPT(config)).eval()


def tokens(B=2, T=24, vocabulary=96, **options):
    return variants.tokens(B, T, vocabulary=vocabulary, **options)


def train_bpe(folder, texts, size, neox=False):
    """Write a vocabulary, laid out like GPT-2's or GPT-NeoX's tokenizer.json. Returns its folder."""
    hf = pytest.importorskip('tokenizers')
    bpe = hf.Tokenizer(hf.models.BPE())
    bpe.normalizer = hf.normalizers.NFC() if neox else None
    bpe.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=['<|endoftext|>', '<|padding|>'] if neox else [],
        show_progress=False,
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    if neox:
        bpe.add_tokens([hf.AddedToken(' ' * n, normalized=True) for n in range(24, 1, -1)])
    else:
        bpe.add_special_tokens(['<|endoftext|>'])
    folder.mkdir()
    bpe.save(str(folder / 'tokenizer.json'))
    return folder


def described(encoder):
    """What a dataset's meta.json says of its tokenizer."""
    return {'name': encoder.name, 'sha256': encoder.sha256, 'n_vocab': encoder.n_text}


def small_bpe(folder):
    """A tokenizer of 260 ids, like GPT-2's."""
    texts = ['the theory of the other thing, né 😀 日本 '] * 9
    return tokenizer.load(train_bpe(folder, texts, 259))


# --- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def trained(work):
    """out/run: two steps of a ResFormer on bytes, by train.py."""
    splits = {'train': {'A': 3000}, 'validation': {'A': 300}}
    write_dataset(Path('data/bytes'), splits, **described(BYTES))
    good('out/run', dataset='bytes', vocab_size=320, max_iters=2, v_residual=True)
    return 'out/run'


def run_with(model, trained, name, **changes):
    """A run's folder like `trained`, with another model, and other parts, in its checkpoint."""
    Path(name).mkdir(parents=True, exist_ok=True)
    new = {'model': model.state_dict(), 'model_config': vars(model.config), **changes}
    checkpoint = {**newest(trained), **new}
    torch.save(checkpoint, f'{name}/ckpt_{checkpoint["step"]}.pt')
    return name


# --- damages -------------------------------------------------------------------------------------


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def evil_pickle(evil, path):
    path.write_bytes(pickle.dumps({'model.norm.weight': evil}, 2))


def evil_torch_file(evil, path):
    """Where there is a checkpoint, it stays whole but for its model."""
    whole = torch.load(path, weights_only=True) if path.exists() else {}
    torch.save({**whole, 'model': evil, 'model.norm.weight': evil}, path)


MALICE = {
    'pickle': evil_pickle,
    'torch file': evil_torch_file,
}
