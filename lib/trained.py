"""
A trained model for use: of a run's folder, of one of its checkpoints, or of a Hugging Face folder.

>>> model, tokenizer, checkpoint = load_run('out/run')
"""

from pathlib import Path

from lib import tokenizer as tokenizers
from lib.data import dataset_folder
from lib.outside import holds_weights, load_hub
from lib.rundir import (
    build_config,
    check_tokenizer,
    checkpoints,
    load_checkpoint,
    name_misfits,
    no_checkpoint,
)
from model import GPT


def load_run(path, tokenizer=''):
    """(model, tokenizer, checkpoint) of a run's folder, a checkpoint file or a Hugging Face folder.

    A Hugging Face folder has no checkpoint: None. tokenizer: where to find it; '': where the run's
    dataset is. Raises ValueError or OSError if something is missing, or if the tokenizer is not the
    one that the model was trained with.
    """
    path = Path(path)
    checkpoint = None
    weights = find_weights(path)
    if weights.is_dir():
        model = load_hub(path)
        encoder = tokenizers.load(tokenizer or path)
        if tokenizer and (path / 'tokenizer.json').exists():
            check_tokenizer(path, tokenizers.load(path).sha256, encoder.sha256, tokenizer)
    else:
        checkpoint = load_checkpoint(weights)
        with name_misfits(path):
            encoder = load_tokenizer(path, checkpoint, tokenizer)
            model = GPT(build_config(checkpoint['model_config'], weights))
            model.load_state_dict(checkpoint['model'])

    if encoder.n_vocab > model.config.vocab_size:
        raise ValueError(
            f'{path}: its tokenizer has {encoder.n_vocab:,} ids, '
            f'the model {model.config.vocab_size:,}'
        )
    return model.eval(), encoder, checkpoint


def find_weights(path):
    """What load_run() reads: a checkpoint file, or a Hugging Face folder. FileNotFoundError if it is
    missing."""
    path = Path(path)
    paths = checkpoints(path)
    if paths:
        return paths[0]
    if path.is_file() or holds_weights(path):
        return path
    raise FileNotFoundError(no_checkpoint(path))


def load_tokenizer(path, checkpoint, where):
    """The tokenizer that a checkpoint was trained with, from `where` or from its dataset's folder."""
    trained = checkpoint['data']['tokenizer']
    if not where:
        folder = dataset_folder(checkpoint['settings']['dataset'])
        where = 'bytes' if trained['name'] == 'bytes' else folder / 'tokenizer.json'
    encoder = tokenizers.load(where)
    check_tokenizer(path, trained['sha256'], encoder.sha256, encoder.path)
    return encoder
