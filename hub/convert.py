"""
Models of Hugging Face in (Llama, Mistral, GPT-2; a folder or a hub id), and runs out.

$ python -m hub.convert import FOLDER_OR_ID --to=out/name
$ python train.py config/yours.py --init_from=out/name/ckpt_0.pt     # goes on from its weights
$ python -m hub.convert export out/run --to=folder

In: `transformers` reads a checkpoint, and its weights become those of an ordinary run, with its
tokenizer.json beside them. What this model does not compute is refused. Out: for
AutoModelForCausalLM.from_pretrained(folder). Vanilla is a plain LlamaForCausalLM (gpt2:
GPT2LMHeadModel). Every other variant takes its code along, model.py and modeling_nanoresformer.py,
and loads with trust_remote_code=True.
"""

import contextlib
import os
import pickle
import shutil
import typing
from dataclasses import asdict, dataclass
from pathlib import Path

from configurator import choose, convert

import torch

from lib import tokenizer as tokenizers
from lib.files import locked, one_line_errors, write_json
from lib.hub import hub_error
from lib.machine import Machine
from lib.rundir import provenance, save_checkpoint, spelled_out
from lib.trained import check_ids, load_run
from model import GPT, GPTConfig, refuse, rope_tables

# What a variant takes along, as it stands here.
HERE = Path(__file__).parent
CODE = (HERE.parent / 'model.py', HERE / 'modeling_nanoresformer.py')
TRIED_WITH = ['transformers 4.57.6', 'transformers 5.23.0', 'transformers 5.24.0']


@dataclass
class ConvertConfig:
    source: tuple = ()  # to import: a folder or a hub id; to export: a run or a checkpoint file
    to: str = ''  # the folder to write, a new or an empty one
    tokenizer: str = ''  # as in prepare_slimpajama.py; '': that of the source


def empty_folder(to):
    """The Path `to`, which holds nothing yet; it need not exist."""
    path = Path(to)
    if not to or path.is_file() or any(path.glob('*')):
        raise ValueError(f'--to={to} must be a new or an empty folder')
    return path


@contextlib.contextmanager
def held_folder(to):
    """The folder `to`, which holds nothing yet, and to which no other process writes meanwhile."""
    folder = empty_folder(to)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, 'writing to', '--to'):
        yield empty_folder(to)  # another process may have been faster


# --- in ------------------------------------------------------------------------------------------


def import_checkpoint(source, to, tokenizer=''):
    """Write a checkpoint of transformers, from a folder or a hub id, as the folder of a run at step 0.

    tokenizer: where to find it; '': beside the weights. Raises ValueError for a model that GPT does not
    compute, and OSError for what transformers cannot read; nothing is written then.
    """
    config, weights, eot = read_transformers(source)
    encoder = tokenizers.load(tokenizer) if tokenizer else own_tokenizer(source, eot)
    check_ids(encoder, config)
    trained = {name: getattr(encoder, name) for name in ('name', 'sha256', 'n_vocab', 'eot')}
    made = provenance(Machine('cpu'))
    checkpoint = {
        'model': weights,
        'optimizer': {'state': {}},
        'scaler': {},
        'step': 0,
        'settings': {'dataset': ''},
        'model_config': asdict(config),
        'data': {'row': 0, 'sha256': {}, 'tokenizer': trained},
        'skipped': [0, 0],
        'origin': str(source),
        'wandb_id': None,
        'provenance': made,
    }
    with held_folder(to) as folder:
        (folder / 'tokenizer.json').write_bytes(encoder.as_file())
        write_json(folder / 'config.json', {**asdict(config), 'origin': str(source), **made})
        # Last: without a checkpoint, the folder is no run.
        save_checkpoint(folder, checkpoint)


def read_transformers(source):
    """(GPTConfig, {our name: tensor in fp32}, id of the token that ends a text) of a checkpoint."""
    with said_of(source):
        from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

        raw, _ = PretrainedConfig.get_config_dict(source)
        kind, eot = raw.get('model_type'), raw.get('eos_token_id')
        refuse(
            kind not in ('llama', 'mistral', 'gpt2'),
            f'model_type={kind!r}; only llama, mistral and gpt2 are imported',
        )
        theirs = AutoConfig.from_pretrained(source, trust_remote_code=False)
        config = read_config(theirs.to_dict())
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=theirs,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused here, by name
            trust_remote_code=False,
        )
        # Where the files lack a weight, transformers draws one. A masked_bias of old GPT-2 is a constant.
        odd = {*info['missing_keys'], *info['unexpected_keys']}
        odd |= {name for name, *shapes in info['mismatched_keys']}
        odd = sorted(name for name in odd if not name.endswith('.attn.masked_bias'))
        refuse(odd, f'config.json and the weights differ in {", ".join(odd[:3])}')
        weights = our_weights(model.state_dict(), kind, config)
        check_logits(model, config, weights)
        if eot is None:  # as in the file; transformers has a default
            eot = model.generation_config.eos_token_id
    return config, weights, eot[0] if isinstance(eot, list) else eot


@contextlib.contextmanager
def said_of(source):
    """Turn whatever is raised, by transformers or here, into one line that names the source."""
    try:
        yield
    except ModuleNotFoundError:
        raise
    except ValueError as error:
        raise ValueError(f'{source}: {hub_error(error)[0]}') from error
    except pickle.UnpicklingError as error:  # torch's own advice, to trust the file, is bad advice
        raise ValueError(
            f'{source}: a file is damaged, or holds other things than weights'
        ) from error
    except Exception as error:  # the libraries below transformers each raise their own
        reason = f'{type(error).__name__}: {hub_error(error)[0]}'
        raise OSError(f'{source} cannot be imported ({reason})') from error


def own_tokenizer(source, eot):
    """The tokenizer beside a checkpoint's weights, whose texts end with the id `eot`."""
    path = tokenizers.find_file(source)
    try:
        return tokenizers.load(path)
    except ValueError:
        return tokenizers.Foreign(path, eot)


def read_config(values):
    """The GPTConfig of a config of transformers, as a dict. ValueError for what GPT does not compute."""
    for name, allowed in COMPUTED.items():
        value = values.get(name, allowed[0])
        choice = ' or '.join(map(repr, allowed))
        refuse(value not in allowed, f'{name}={value!r}, but GPT computes only {choice}')
    if values['model_type'] == 'gpt2':
        return make_config(values, GPT2, arch='gpt2')
    config = make_config(values | read_rope(values), LLAMA)
    window = values.get('sliding_window')
    if window is not None:  # within its window, sliding attention is causal attention
        config.block_size = min(config.block_size, window)
    return config


def make_config(values, names, **fields):
    """The GPTConfig of a config's values. names: {field: its name there}"""
    hints = typing.get_type_hints(GPTConfig)
    for field, name in names.items():
        value = values[name]
        if value is not None:  # it follows from others, as here
            refuse(isinstance(value, int) and value >= 2**31, f'{name}={value} is too large')
            fields[field] = convert(value, hints[field], name)
    return GPTConfig(**fields)


def read_rope(values):
    """A Llama's rope_theta and rope_scaling, as GPTConfig has them, wherever they stand."""
    rope = {'rope_theta': values.get('rope_theta')}
    for name in ('rope_scaling', 'rope_parameters'):  # transformers 4 and 5
        rope |= values.get(name) or {}
    kind = rope.get('rope_type', 'default')
    refuse(
        kind not in ('default', 'llama3'),
        f"RoPE scaled as {kind!r}; only llama3's is computed",
    )
    scaling = [rope.get(name) for name in ROPE_SCALING] if kind == 'llama3' else ()
    return {'rope_theta': rope['rope_theta'], 'rope_scaling': scaling}


def our_weights(theirs, kind, config):
    """{our name: tensor} of the weights of a model of transformers, {their name: tensor}."""
    weights = {}
    for name, ours in layout(kind, config).items():
        weight = theirs.pop(name)
        weight = weight.t() if is_flipped(kind, name) else weight
        for our, part in zip(ours, weight.chunk(len(ours)), strict=True):
            weights[our] = part.contiguous()
    if config.tie_embeddings:
        weights['lm_head.weight'] = theirs.pop('lm_head.weight')
    refuse(theirs, f'it has weights that GPT has not: {", ".join(theirs)[:200]}')
    return weights


def check_logits(theirs, config, weights):
    """Refuse a model that transformers computes otherwise than GPT, whatever its config.json says."""
    ours = GPT.without_weights(config).eval()
    # In their memory, which may be tens of GB. What shares or computes weights then needs to be told.
    ours.load_state_dict(weights, assign=True)
    if config.tie_embeddings:
        ours.lm_head.weight = ours.transformer.wte.weight
    if config.arch == 'llama':
        ours.cos, ours.sin = rope_tables(config)
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(config.vocab_size, (1, min(config.block_size, 64)), generator=generator)
    with torch.no_grad():
        expected = theirs(idx).logits
        difference = (ours(idx)[0] - expected).abs().max()
    refuse(
        not difference < 1e-3 * expected.std(),
        f'transformers computes other logits than GPT: they differ by up to {difference:.1e}',
    )


# --- out -----------------------------------------------------------------------------------------


def export(model, tokenizer, to):
    """Write `model` and its tokenizer as a Hugging Face folder.

    Raises ValueError if one of its weights would be lost or `to` holds anything, and OSError if the
    folder cannot be written.
    """
    config = model.config
    # Whether a model of transformers computes the same.
    is_plain = {*config.shape(), *config.variant()} <= EXPRESSIBLE[config.arch]
    settings = plain_settings(config) if is_plain else remote_settings(config)
    state = rename_weights(model, settings['model_type'])
    settings['dtype'] = 'float32'
    settings |= dict.fromkeys(
        [f'{role}_token_id' for role in roles_of_eot(tokenizer)], tokenizer.eot
    )

    with held_folder(to) as folder:
        write_json(folder / 'config.json', settings)
        write_tokenizer(folder, tokenizer, config.block_size)
        if not is_plain:
            for path in CODE:
                shutil.copy(path, folder)
        # Last: without weights, nobody loads the folder.
        write_weights(folder / 'model.safetensors', state)


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
    os.sync()  # a file has its length before its bytes: after a power failure, zeros would be loaded


def write_tokenizer(folder, tokenizer, block_size):
    (folder / 'tokenizer.json').write_bytes(tokenizer.as_file())
    eot = tokenizer.decode([tokenizer.eot]).removeprefix(' ')  # WordPiece puts one before it
    settings = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        **{f'{role}_token': eot for role in roles_of_eot(tokenizer)},
        'model_max_length': block_size,
        'clean_up_tokenization_spaces': False,
        # transformers 4 would add token_type_ids, which generate() refuses.
        'model_input_names': ['input_ids', 'attention_mask'],
    }
    write_json(folder / 'tokenizer_config.json', settings)


def roles_of_eot(tokenizer):
    """What transformers calls the token that ends a text. Ours begins one, too, but the texts of a
    tokenizer of another kind may begin otherwise."""
    return ['eos'] if tokenizer.name == tokenizers.Foreign.name else ['bos', 'eos']


# --- what transformers has -----------------------------------------------------------------------

# GPTConfig's fields in the config.json of a Llama (and a Mistral), and of a GPT-2.
LLAMA = {
    'block_size': 'max_position_embeddings',
    'n_layer': 'num_hidden_layers',
    'n_head': 'num_attention_heads',
    'n_kv_head': 'num_key_value_heads',
    'n_embd': 'hidden_size',
    'n_inner': 'intermediate_size',
    'norm_eps': 'rms_norm_eps',
    'rope_theta': 'rope_theta',
    'rope_scaling': 'rope_scaling',
    'vocab_size': 'vocab_size',
    'tie_embeddings': 'tie_word_embeddings',
}
GPT2 = {
    'block_size': 'n_positions',
    'n_layer': 'n_layer',
    'n_head': 'n_head',
    'n_embd': 'n_embd',
    'n_inner': 'n_inner',
    'norm_eps': 'layer_norm_epsilon',
    'vocab_size': 'vocab_size',
    'tie_embeddings': 'tie_word_embeddings',
}

# GPTConfig.rope_scaling, number by number.
ROPE_SCALING = (
    'factor',
    'low_freq_factor',
    'high_freq_factor',
    'original_max_position_embeddings',
)

# The only values of these that GPT computes; the first is transformers' default. What else differs
# shows in the weights, such as wider heads and biases, or in the logits.
COMPUTED = {
    'hidden_act': ('silu',),
    'activation_function': ('gelu_new', 'gelu_pytorch_tanh'),
    'scale_attn_weights': (True,),
    'scale_attn_by_inverse_layer_idx': (False,),
    'quantization_config': (None,),
}

# The model_type of a variant.
VARIANT = 'nanoresformer'

# Models of transformers, and the fields of GPTConfig that they can express. Any other field that
# differs from its default makes a variant. Dropout acts in training only, so an export may lose it:
# Llama has none in some places where GPT has it.
PLAIN = {'llama': 'LlamaForCausalLM', 'gpt2': 'GPT2LMHeadModel'}
EXPRESSIBLE = {'llama': {*LLAMA, 'dropout'}, 'gpt2': {*GPT2, 'arch', 'dropout'}}

# The modules of a block, and Llama's names of them. GPT-2 has our names, but for PROJECTIONS, whose rows
# are one matrix there.
BLOCK = {
    'ln_1': 'input_layernorm',
    'attn.q.proj': 'self_attn.q_proj',
    'attn.k.proj': 'self_attn.k_proj',
    'attn.v.proj': 'self_attn.v_proj',
    'attn.c_proj': 'self_attn.o_proj',
    'ln_2': 'post_attention_layernorm',
    'mlp.c_gate': 'mlp.gate_proj',
    'mlp.c_fc': 'mlp.up_proj',
    'mlp.c_proj': 'mlp.down_proj',
}
PROJECTIONS = ['attn.q.proj', 'attn.k.proj', 'attn.v.proj']


def layout(kind, config):
    """A checkpoint's weights in our names: {theirs: those of ours whose rows it has}.

    A tied head is left out. Of a model_type of transformers, it lists what transformers' model has,
    not ours: a weight that only ours has, such as one that a fork adds, is not in it.
    """
    if kind == VARIANT:
        names = GPT.without_weights(config).state_dict()
        if config.tie_embeddings:
            del names['lm_head.weight']
        return {f'model.{name}': [name] for name in names}
    names = gpt2_layout(config) if kind == 'gpt2' else llama_layout(config)
    if not config.tie_embeddings:
        names['lm_head.weight'] = ['lm_head.weight']
    return names


def llama_layout(config):
    names = {
        'model.embed_tokens.weight': ['transformer.wte.weight'],
        'model.norm.weight': ['transformer.ln_f.weight'],
    }
    for n in range(config.n_layer):
        for ours, theirs in BLOCK.items():
            names[f'model.layers.{n}.{theirs}.weight'] = [f'transformer.h.{n}.{ours}.weight']
    return names


def gpt2_layout(config):
    modules = ['ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp.c_proj']
    blocks = [f'transformer.h.{n}.{module}' for n in range(config.n_layer) for module in modules]
    names = ['transformer.wte.weight', 'transformer.wpe.weight']
    for module in ('transformer.ln_f', *blocks):
        names += [f'{module}.weight', f'{module}.bias']
    places = {}
    for theirs in names:
        parts = PROJECTIONS if 'c_attn' in theirs else ['attn.c_attn']
        places[theirs] = [theirs.replace('attn.c_attn', part) for part in parts]
    return places


def is_flipped(kind, name):
    """Whether transformers keeps a weight transposed: GPT-2's linear layers in its blocks."""
    return kind == 'gpt2' and name.endswith(('c_attn.weight', 'c_proj.weight', 'c_fc.weight'))


def main():
    with one_line_errors():
        modes = dict.fromkeys(('import', 'export'), (ConvertConfig,))
        mode, (settings,) = choose(modes, __doc__, plain='source')
        refuse(len(settings.source) != 1, f'{mode} takes one source, not {len(settings.source)}')
        (source,) = settings.source
        empty_folder(settings.to)  # before it takes a while
        if mode == 'import':
            import_checkpoint(source, settings.to, settings.tokenizer)
        else:
            model, tokenizer, _ = load_run(source, settings.tokenizer)
            export(model, tokenizer, settings.to)
    print(f'wrote {settings.to}')


if __name__ == '__main__':
    main()
