"""
Hugging Face checkpoints in (Llama, Mistral, GPT-2, our exports; a folder or a hub id) and out.

$ python -m hub.convert export --out_dir=out/run --to=folder
$ python train.py config/yours.py --init_from=folder       # goes on from a checkpoint's weights

Out: for AutoModelForCausalLM.from_pretrained(folder). Vanilla is a plain LlamaForCausalLM (gpt2:
GPT2LMHeadModel). Every other variant takes its code along, model.py and modeling_nanoresformer.py,
and loads with trust_remote_code=True. In: only tensors are read; no file can run code, not even an
export's own.

>>> model = load('folder')
"""

import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from configurator import choose
from lib.files import one_line_errors, write_json
from lib.outside import GPT2, LLAMA, ROPE_SCALING, VARIANT, is_flipped, layout
from lib.outside import load_hub as load
from lib.rundir import spelled_out
from lib.trained import load_run
from model import GPTConfig, acts, change

__all__ = ['export', 'llama_settings', 'load']

# What a variant takes along, as it stands here.
HERE = Path(__file__).parent
CODE = (HERE.parent / 'model.py', HERE / 'modeling_nanoresformer.py')
TRIED_WITH = ['transformers 4.57.6', 'transformers 5.23.0', 'transformers 5.24.0']

# Models of transformers, and the fields of GPTConfig that they can express. Any other field that
# differs from its default makes a variant. Dropout acts in training only, so an export may lose it:
# Llama has none in some places where GPT has it.
PLAIN = {'llama': 'LlamaForCausalLM', 'gpt2': 'GPT2LMHeadModel'}
EXPRESSIBLE = {'llama': {*LLAMA, 'dropout'}, 'gpt2': {*GPT2, 'arch', 'dropout'}}


@dataclass
class ExportConfig:
    out_dir: str = 'out/run'  # a run's folder, or one checkpoint file
    to: str = ''  # the folder to write, a new or an empty one
    tokenizer: str = ''  # as in prepare_slimpajama.py; '': the one of the run's dataset


def check_empty(to):
    path = Path(to)
    if not to or path.is_file() or any(path.glob('*')):
        raise ValueError(f'--to={to} must be a new or an empty folder')


def export(model, tokenizer, to):
    """Write `model` and its tokenizer as a Hugging Face folder, whole or not at all.

    Raises ValueError if one of its weights would be lost or `to` holds anything, and OSError if the
    folder cannot be written. `to` is then as it was.
    """
    check_empty(to)
    config = without_idle(model.config)
    # Whether a model of transformers computes the same.
    is_plain = {*config.shape(), *config.variant()} <= EXPRESSIBLE[config.arch]
    settings = plain_settings(config) if is_plain else remote_settings(config)
    state = rename_weights(model, settings['model_type'])
    settings['dtype'] = 'float32'
    settings['bos_token_id'] = settings['eos_token_id'] = tokenizer.eot

    to = Path(to).resolve()
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f'{to.name}.', dir=to.parent) as ours:
        whole = Path(ours, 'whole')  # `ours` itself only its owner may read
        whole.mkdir()
        write_json(whole / 'config.json', settings)
        write_tokenizer(whole, tokenizer, config.block_size)
        if not is_plain:
            for path in CODE:
                shutil.copy(path, whole)
        write_weights(whole / 'model.safetensors', state)
        os.sync()  # else `to` could be half of it when the power fails
        try:
            os.replace(whole, to)
        except OSError:
            check_empty(to)  # something came there in the meantime
            raise


def without_idle(config):
    """The config without what does nothing, which an older checkpoint may hold and no reader accepts."""
    for name in config.variant():
        if not acts(config, name):
            config = change(config, name, getattr(GPTConfig, name))
    return config


# --- config.json ---------------------------------------------------------------------------------


def plain_settings(config):
    """The config.json of a plain model."""
    kind = {'model_type': config.arch, 'architectures': [PLAIN[config.arch]]}
    if config.arch == 'llama':
        return {**kind, **llama_settings(config)}
    dropout = dict.fromkeys(('embd_pdrop', 'attn_pdrop', 'resid_pdrop'), config.dropout)
    return {**kind, **rename(config, GPT2), **dropout, 'activation_function': 'gelu_new'}


def llama_settings(config):
    """Keyword arguments of the transformers.LlamaConfig that equals this vanilla GPTConfig."""
    settings = {'hidden_act': 'silu', **rename(config, LLAMA)}
    scaling = settings.pop('rope_scaling')
    if scaling:
        numbers = dict(zip(ROPE_SCALING, scaling, strict=True))
        settings['rope_scaling'] = {'rope_type': 'llama3', **numbers}
    return settings


def rename(config, names):
    """{transformers' name: value} of the fields in `names`."""
    fields = spelled_out(config)
    return {theirs: fields[ours] for ours, theirs in names.items()}


def remote_settings(config):
    """The config.json of a variant; modeling_nanoresformer.py reads it."""
    return {
        'model_type': VARIANT,
        'architectures': ['NanoResFormerForCausalLM'],
        'gpt': asdict(config),
        'auto_map': {
            'AutoConfig': 'modeling_nanoresformer.NanoResFormerConfig',
            'AutoModelForCausalLM': 'modeling_nanoresformer.NanoResFormerForCausalLM',
        },
        'tried_with': TRIED_WITH,
        'vocab_size': config.vocab_size,
        'tie_word_embeddings': config.tie_embeddings,
    }


# --- the other files -----------------------------------------------------------------------------


def rename_weights(model, kind):
    """{their name: tensor}. ValueError where a weight has no place, or a place no weight."""
    weights = dict(model.state_dict())
    if model.config.tie_embeddings:
        del weights['lm_head.weight']
    names = layout(kind, model.config)
    odd = sorted(weights.keys() ^ {name for ours in names.values() for name in ours})
    if odd:
        raise ValueError(
            f'{PLAIN.get(kind, "the GPT of model.py")} and this model differ in the weights '
            f'{", ".join(odd[:3])}; write what makes them into model.py, with a field of GPTConfig '
            'that is off by default: with it on, an export takes that file along'
        )

    state = {}
    for theirs, ours in names.items():
        weight = torch.cat([weights[name] for name in ours])
        weight = weight.t() if is_flipped(kind, theirs) else weight
        state[theirs] = weight.cpu().contiguous()
    return state


def write_weights(path, state):
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(state, path, metadata={'format': 'pt'})
    except SafetensorError as error:  # the disk is full, say
        raise OSError(f'cannot write {path}: {error}') from error


def write_tokenizer(folder, tokenizer, block_size):
    (folder / 'tokenizer.json').write_bytes(tokenizer.as_file())
    eot = tokenizer.decode([tokenizer.eot])
    settings = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'bos_token': eot,
        'eos_token': eot,
        'model_max_length': block_size,
        'clean_up_tokenization_spaces': False,
        # transformers 4 would add token_type_ids, which generate() refuses.
        'model_input_names': ['input_ids', 'attention_mask'],
    }
    write_json(folder / 'tokenizer_config.json', settings)


def main():
    with one_line_errors():
        _, (settings,) = choose({'export': (ExportConfig,)}, __doc__)
        check_empty(settings.to)  # before it takes a while
        model, tokenizer, _ = load_run(settings.out_dir, settings.tokenizer)
        export(model, tokenizer, settings.to)
    print(f'wrote {settings.to}')


if __name__ == '__main__':
    main()
