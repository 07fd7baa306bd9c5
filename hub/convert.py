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

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from configurator import choose, one_line_errors
from files import write_json, write_whole
from hub.read import BOTH, GPT2, LLAMA, ROPE_SCALING, VARIANT, is_transposed, layout, load
from model import GPT
from rundir import load_run

__all__ = ['export', 'llama_settings', 'load']

# A key in config.json that says: this folder may be replaced.
MARK = 'nanoresformer_export'

# What a variant takes along, as it stands here.
HERE = Path(__file__).parent
CODE = (HERE.parent / 'model.py', HERE / 'modeling_nanoresformer.py')

WEIGHTS = 'model.safetensors'
CODE_NAMES = {path.name for path in CODE}
FILE_NAMES = {'config.json', WEIGHTS, 'tokenizer.json', 'tokenizer_config.json', *CODE_NAMES}

# Models of transformers, and the fields of GPTConfig that they can express. Any other field that
# differs from its default makes a variant. Dropout acts in training only, so an export may lose it:
# Llama has none in some places where GPT has it.
PLAIN = {'llama': 'LlamaForCausalLM', 'gpt2': 'GPT2LMHeadModel'}
EXPRESSIBLE = {
    'llama': {*LLAMA, *BOTH, 'rope_scaling', 'dropout'},
    'gpt2': {*GPT2, *BOTH, 'arch', 'dropout'},
}


@dataclass
class ExportConfig:
    out_dir: str = 'out/run'  # a run's folder, or one checkpoint file
    to: str = ''  # the folder to write: a new or empty one, or an export to replace
    tokenizer: str = ''  # as in prepare_slimpajama.py; '': the one of the run's dataset

    def __post_init__(self):
        if not self.to or not replaceable(Path(self.to)):
            raise ValueError(
                f'--to={self.to} must be a new or empty folder, or one that an export made, to '
                'replace it'
            )


def replaceable(folder):
    """Whether a folder is new, empty, or an export and no more.

    A folder that transformers saved from an export has the mark, too, but also other files.
    """
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    paths = set(folder.iterdir())
    names = {path.name for path in paths.difference(partial_weights(folder))}
    if 'config.json' not in names or not names <= FILE_NAMES:
        return not paths
    return MARK in (folder / 'config.json').read_text(errors='replace')


def partial_weights(folder):
    """What safetensors was writing when an export was killed: a file such as .tmpAbCdEf."""
    return [*folder.glob('.tmp??????')]


# --- out -----------------------------------------------------------------------------------------


def export(model, tokenizer, to):
    """Write `model` and its tokenizer as a Hugging Face folder.

    Raises ValueError, before anything is written, if one of its weights would be lost, and OSError if
    the folder cannot be written.
    """
    config = model.config
    if is_plain(config):
        code = ()
        settings = plain_settings(config)
        state = plain_state(model)
    else:
        code = CODE
        settings = remote_settings(config)
        state = remote_state(model)

    settings['dtype'] = 'float32'
    settings['bos_token_id'] = settings['eos_token_id'] = tokenizer.eot
    settings[MARK] = True

    # config.json is written first: its mark allows an export that stopped half way to be repeated.
    # The weights of an earlier export go before that, and the new ones come last, so that nobody
    # can load half an export.
    to = Path(to)
    to.mkdir(parents=True, exist_ok=True)
    remove_model(to)
    write_json(to / 'config.json', settings)
    write_tokenizer(to, tokenizer, config.block_size)
    write_model(to, state, code)


def is_plain(config):
    """Whether a model of transformers computes the same as a GPT of this config."""
    fields = {*config.shape(), *config.variant()}
    if config.arch == 'gpt2' and config.kv_heads == config.n_head:
        fields.discard('n_kv_head')
    return fields <= EXPRESSIBLE.get(config.arch, set())


def weights_of(model):
    """{name: tensor}. A tied head is left out: it is the embedding."""
    weights = dict(model.state_dict())
    if model.config.tie_embeddings:
        del weights['lm_head.weight']
    return weights


def check_weights(weights, names, place, advice):
    """Refuse an export in which a weight would have no place, or a place no weight."""
    odd = sorted(weights.keys() ^ names)
    if odd:
        names = ', '.join(odd[:3])
        raise ValueError(f'{place} and this model differ in the weights {names}; {advice}')


# --- as a model of transformers ------------------------------------------------------------------


def plain_settings(config):
    """The config.json of a plain model."""
    kind = {'model_type': config.arch, 'architectures': [PLAIN[config.arch]]}
    if config.arch == 'gpt2':
        return {**kind, **gpt2_settings(config)}
    return {**kind, **llama_settings(config)}


def llama_settings(config):
    """Keyword arguments of the transformers.LlamaConfig that equals this vanilla GPTConfig."""
    settings = {'hidden_act': 'silu', **rename(config, LLAMA)}
    if config.rope_scaling:
        numbers = dict(zip(ROPE_SCALING, config.rope_scaling, strict=True))
        settings['rope_scaling'] = {'rope_type': 'llama3', **numbers}
    return {**settings, **rename(config, BOTH)}


def gpt2_settings(config):
    """Likewise for transformers.GPT2Config."""
    return {
        **rename(config, GPT2),
        'activation_function': 'gelu_new',
        'embd_pdrop': config.dropout,
        'attn_pdrop': config.dropout,
        'resid_pdrop': config.dropout,
        **rename(config, BOTH),
    }


def rename(config, names):
    """{transformers' name: value} of the fields in `names`."""
    fields = asdict(config)
    # Ours may be 0, which means that they follow from other fields.
    fields['n_kv_head'] = config.kv_heads
    fields['n_inner'] = config.ffn_width
    return {theirs: fields[ours] for ours, theirs in names.items()}


def plain_state(model):
    """The weights under transformers' names."""
    config = model.config
    weights = weights_of(model)
    names = layout(config)
    advice = (
        'make what adds them a field of GPTConfig that is off by default: with it on, an export '
        'takes its code along'
    )
    check_weights(weights, names.keys(), PLAIN[config.arch], advice)

    state = {}
    for ours, parts in names.items():
        weight = weights[ours]
        if is_transposed(config.arch, ours):
            weight = weight.T
        rows = [number or len(weight) for number in parts.values()]
        for theirs, part in zip(parts, weight.split(rows), strict=True):
            state[theirs] = part.cpu().contiguous()
    return state


# --- as a variant, with its code -----------------------------------------------------------------


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
        **rename(config, BOTH),
    }


def remote_state(model):
    """The weights under the names that modeling_nanoresformer.py gives them."""
    with torch.device('meta'):
        names = weights_of(GPT(model.config)).keys()
    weights = weights_of(model)
    advice = 'write into model.py what makes them: an export takes that file along'
    check_weights(weights, names, 'the GPT of model.py', advice)
    return {f'model.{name}': t.cpu().contiguous() for name, t in weights.items()}


# --- the files -----------------------------------------------------------------------------------


def remove_model(to):
    # Unlinked, not written over: another process may have it mapped.
    for name in (WEIGHTS, *CODE_NAMES):
        (to / name).unlink(missing_ok=True)
    for path in partial_weights(to):
        path.unlink()


def write_model(to, state, code):
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for path in code:
        shutil.copy(path, to)
    try:
        save_file(state, to / WEIGHTS, metadata={'format': 'pt'})
    except SafetensorError as error:  # the disk is full, say
        raise OSError(f'cannot write {to / WEIGHTS}: {error}') from error


def write_tokenizer(to, tokenizer, block_size):
    # Read first, and not copied: its file may lie in `to`.
    write_whole(to / 'tokenizer.json', tokenizer.as_file())

    eot = tokenizer.decode([tokenizer.eot])
    settings = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'bos_token': eot,
        'eos_token': eot,
        'model_max_length': block_size,
        'clean_up_tokenization_spaces': False,
    }
    write_json(to / 'tokenizer_config.json', settings)


def main():
    with one_line_errors(ValueError, OSError):
        _, (settings,) = choose({'export': (ExportConfig,)}, __doc__)
        model, tokenizer, _ = load_run(settings.out_dir, settings.tokenizer)
        export(model, tokenizer, settings.to)
    print(f'wrote {settings.to}')


if __name__ == '__main__':
    main()
