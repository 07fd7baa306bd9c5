"""
A trained model for use: of a run's folder, or of one of its checkpoints.

>>> model, tokenizer, checkpoint = load_run('out/run')
"""

import sys

from lib import tokenizer as tokenizers
from lib.data import Dataset, dataset_folder
from lib.rundir import load_checkpoint
from model import GPT


def load_run(path, tokenizer=''):
    """(model, tokenizer, checkpoint) of a run's folder or a checkpoint file.

    tokenizer: where to find it; '': in the run's folder, if it was imported, or where its dataset is.
    Raises ValueError or OSError if something is missing, or if the tokenizer is not the one that the
    model was trained with.
    """
    checkpoint = load_checkpoint(path, lambda message: print(message, file=sys.stderr))
    encoder = load_tokenizer(checkpoint, tokenizer)
    model = GPT(checkpoint.config)
    checkpoint.load_weights(model)
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise ValueError(f'{checkpoint["path"]}: {name} is not finite; use an older checkpoint')
    check_ids(encoder, model.config)
    return model.eval(), encoder, checkpoint


def load_tokenizer(checkpoint, where):
    """The tokenizer that a checkpoint was trained with, from `where`; '': from where it is kept."""
    trained = checkpoint['data']['tokenizer']
    where = where or kept_tokenizer(checkpoint)
    if trained['name'] == tokenizers.Foreign.name:
        encoder = tokenizers.Foreign(tokenizers.find_file(where), trained['eot'])
    else:
        encoder = tokenizers.load(where)
    checkpoint.check_tokenizer(encoder.sha256, encoder.path)
    return encoder


def check_ids(encoder, config):
    """Refuse a tokenizer whose texts have ids that a model lacks. Other special tokens, such as those that
    pad, may lie beyond its rows."""
    if encoder.n_text > config.vocab_size:
        raise ValueError(
            f'{encoder.path} has {encoder.n_text:,} ids, the model {config.vocab_size:,}: give --tokenizer '
            'the one that it was trained with'
        )


def kept_tokenizer(checkpoint):
    own = checkpoint['path'].with_name('tokenizer.json')  # of a run that was imported
    if own.exists():
        return own
    if checkpoint['data']['tokenizer']['name'] == 'bytes':
        return 'bytes'
    return dataset_folder(checkpoint['settings']['dataset']) / 'tokenizer.json'


def dataset_of(checkpoint, name):
    """The Dataset of a name; '': the one that a checkpoint was trained on, which must be as it was."""
    own = checkpoint['settings']['dataset']
    if not (name or own):
        raise ValueError(
            f'{checkpoint["path"]} was imported, and has no dataset: give one with --dataset, or '
            'paper.analyze a --text'
        )
    dataset = Dataset(name or own)
    checkpoint.check_tokenizer(dataset.meta['tokenizer']['sha256'], dataset.folder)
    if not name:
        checkpoint.check_data(dataset, f'; to read it nevertheless, give --dataset={own}')
    return dataset
