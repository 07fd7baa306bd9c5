"""
Hugging Face checkpoints in: Llama, Mistral, GPT-2, and every variant that hub/convert.py exports, from
a folder or a hub id.

>>> model = load('folder')

Weights are read as tensors and nothing else, and code that lies beside them is never run.
"""

import json
import math
import typing
import zipfile
from pathlib import Path

import torch

from configurator import convert, first_line
from model import GPT, GPTConfig, rope_tables

# --- a checkpoint --------------------------------------------------------------------------------


def holds_weights(path):
    """Whether a path is a folder with a checkpoint of Hugging Face."""
    if not path.is_dir():
        return False
    return any(path.glob('*.safetensors*')) or any(path.glob('pytorch_model*.bin*'))


def load(path_or_hub_id):
    """A GPT with a checkpoint's weights, in fp32. Errors are those of read()."""
    config, state = read(path_or_hub_id)
    with torch.device('meta'):
        model = GPT(config)
    model.load_state_dict(state, assign=True)
    if config.arch == 'llama':
        model.cos, model.sin = rope_tables(config)
    if config.tie_embeddings:
        model.lm_head.weight = model.transformer.wte.weight
    return model.eval()


def read(path_or_hub_id):
    """(GPTConfig, our state dict) of a checkpoint. One tensor at a time is in memory twice.

    Raises ValueError for models that GPT does not compute and for damaged files, OSError if they
    cannot be read or downloaded.
    """
    folder = fetch(path_or_hub_id)
    kind, config = read_config(folder)
    tensors = Tensors(folder, 'transformer.' if kind == 'gpt2' else 'model.')
    with torch.device('meta'):
        shapes = {name: t.shape for name, t in GPT(config).state_dict().items()}

    state = {}
    names = variant_layout(config, shapes) if kind == VARIANT else layout(config)
    for name, parts in names.items():
        transposed = is_transposed(kind, name)
        state[name] = read_weight(tensors, name, parts, shapes[name], transposed)
    if config.tie_embeddings:
        state['lm_head.weight'] = state['transformer.wte.weight']
        check_tied_head(tensors, state['lm_head.weight'])
    check_leftover(tensors)
    return config, state


def fetch(path_or_hub_id):
    """The folder of a checkpoint. A hub id is downloaded, or if the hub fails, read from its cache."""
    name = str(path_or_hub_id)
    folder = Path(name)
    if folder.is_dir():
        return folder
    try:
        return download(name)
    except Exception as error:  # the hub's client, and the one below it, have many ways to fail
        raise OSError(
            f'{name} is not a folder, and it could not be downloaded from the hub ({first_line(error)}); '
            'download it once and give its folder'
        ) from error


# What is downloaded of a hub repository, besides its .json files: weights that weight_files() reads,
# and no others, such as the copy of all weights in Mistral's consolidated.safetensors.
SAFETENSORS = 'model*.safetensors*'
BIN = 'pytorch_model*.bin*'


def download(name):
    """The folder of a hub repository, with the safetensors of its root, else with its .bin files."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        files = HfApi().list_repo_files(name)
    except Exception:
        folder = downloaded_before(name)
        if folder is None:
            raise
        return folder
    has_safetensors = {'model.safetensors', 'model.safetensors.index.json'} & set(files)
    weights = SAFETENSORS if has_safetensors else BIN
    return Path(snapshot_download(name, allow_patterns=['*.json', weights]))


def downloaded_before(name):
    """The folder of a hub repository in the hub's cache; None where its weights are not there."""
    from huggingface_hub import snapshot_download

    # The hub's client checks that no file of these patterns is missing. Of a repository with .bin
    # files, those are not checked.
    patterns = ['*.json', SAFETENSORS]
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except Exception:
        return None
    return folder if holds_weights(folder) else None


def read_weight(tensors, name, parts, shape, transposed):
    """The weight `name` of ours, joined from its parts, {their name: rows}."""
    pieces = []
    for theirs, rows in parts.items():
        expected = (rows or shape[0], *shape[1:])
        if transposed:
            expected = expected[::-1]
        t = tensors.take(theirs)
        if tuple(t.shape) != expected:
            raise ValueError(
                f'{tensors.folder}: {theirs} ({name}) is {tuple(t.shape)}; its config.json says '
                f'{expected}'
            )
        pieces.append(t)
    weight = torch.cat(pieces).float()
    return weight.T.contiguous() if transposed else weight


def check_tied_head(tensors, embedding):
    """A checkpoint may hold a tied head as well, but then it must equal the embedding."""
    name = 'lm_head.weight'
    if name in tensors.places and not torch.equal(tensors.take(name).float(), embedding):
        raise ValueError(
            f'{tensors.folder}: {name} is not the embedding, though config.json ties them; which '
            'one counts depends on the version of transformers. If it is the head, write '
            '"tie_word_embeddings": false there'
        )


def check_leftover(tensors):
    # Tables that old checkpoints carry along are not weights.
    tables = ('.rotary_emb.inv_freq', '.attn.bias', '.attn.masked_bias')
    names = sorted(name for name in tensors.places if not name.endswith(tables))
    if names:
        raise ValueError(
            f'{tensors.folder} has weights that this model has no place for: {", ".join(names[:3])}'
        )


# --- its config.json -----------------------------------------------------------------------------

# GPTConfig's fields in the config.json of a Llama (and a Mistral), of a GPT-2, and of both.
LLAMA = {
    'block_size': 'max_position_embeddings',
    'n_layer': 'num_hidden_layers',
    'n_head': 'num_attention_heads',
    'n_kv_head': 'num_key_value_heads',
    'n_embd': 'hidden_size',
    'n_inner': 'intermediate_size',
    'norm_eps': 'rms_norm_eps',
    'rope_theta': 'rope_theta',
}
GPT2 = {
    'block_size': 'n_positions',
    'n_layer': 'n_layer',
    'n_head': 'n_head',
    'n_embd': 'n_embd',
    'n_inner': 'n_inner',
    'norm_eps': 'layer_norm_epsilon',
}
BOTH = {
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

# What a config.json means if it does not name these. None: as if our field were 0.
LLAMA_DEFAULTS = {
    'num_key_value_heads': None,
    'rope_theta': 10000.0,
    'rope_scaling': None,
    'rope_parameters': None,
    'tie_word_embeddings': False,
}
MISTRAL_DEFAULTS = {**LLAMA_DEFAULTS, 'num_key_value_heads': 8, 'sliding_window': 4096}
GPT2_DEFAULTS = {'n_inner': None, 'layer_norm_epsilon': 1e-5, 'tie_word_embeddings': True}
DEFAULTS = {'llama': LLAMA_DEFAULTS, 'mistral': MISTRAL_DEFAULTS, 'gpt2': GPT2_DEFAULTS}
MAY_BE_NONE = ('num_key_value_heads', 'n_inner')

# The only values of these that GPT computes; the first is transformers' default.
LLAMA_COMPUTED = {
    'hidden_act': ('silu',),
    'attention_bias': (False,),
    'mlp_bias': (False,),
}
GPT2_COMPUTED = {
    'activation_function': ('gelu_new', 'gelu_pytorch_tanh'),
    'scale_attn_weights': (True,),
    'scale_attn_by_inverse_layer_idx': (False,),
    'reorder_and_upcast_attn': (False,),
    'add_cross_attention': (False,),
}
COMPUTED = {'llama': LLAMA_COMPUTED, 'mistral': LLAMA_COMPUTED, 'gpt2': GPT2_COMPUTED}

# The model_type of a variant that hub/convert.py exports.
VARIANT = 'nanoresformer'


class Settings:
    """The values of a config.json. One that does not fit raises a ValueError that names it."""

    def __init__(self, folder, values):
        self.path = folder / 'config.json'
        self.values = values

    def __getitem__(self, name):
        if name not in self.values:
            raise ValueError(f'{self.path} lacks {name!r}')
        return self.values[name]

    def take(self, name, hint):
        """A value of type `hint`; a number must be positive."""
        value = convert(self[name], hint, f'{self.path}: {name}')
        if hint in (int, float) and not 0 < value < math.inf:
            raise ValueError(f'{self.path}: {name}={value} must be positive')
        return value

    def expect(self, name, *allowed):
        """Refuse a value that is not allowed. If there is none, the first allowed one counts."""
        value = self.values.get(name, allowed[0])
        if value not in allowed:
            choice = ' or '.join(map(repr, allowed))
            raise ValueError(f'{self.path}: {name}={value!r}, but GPT computes only {choice}')


def read_config(folder):
    """(model_type, GPTConfig) of a checkpoint; ValueError where GPT does not compute what its
    config.json says."""
    try:
        values = json.loads((folder / 'config.json').read_text())
        kind = values['model_type']
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'{folder} has no config.json that names its model_type: not a Hugging Face checkpoint, '
            'or half of one'
        ) from error
    if kind == VARIANT:
        return kind, variant_config(Settings(folder, values))
    if kind not in ('llama', 'mistral', 'gpt2'):
        raise ValueError(
            f'{folder} is a {kind}; only llama, mistral and gpt2 are read, and what hub.convert exported'
        )

    settings = Settings(folder, {**DEFAULTS[kind], **values})
    for name, allowed in COMPUTED[kind].items():
        settings.expect(name, *allowed)
    if kind == 'mistral':
        bound_positions(settings)
    if kind == 'gpt2':
        return kind, GPTConfig(arch='gpt2', **take_fields(settings, GPT2))

    scaling = read_rope(settings)
    config = GPTConfig(rope_scaling=scaling, **take_fields(settings, LLAMA))
    settings.expect('head_dim', None, config.head_size)
    return kind, config


def variant_config(settings):
    """The GPTConfig of a variant: its config.json has all fields, under our names."""
    hints = typing.get_type_hints(GPTConfig)
    fields = settings.take('gpt', dict)
    foreign = fields.keys() - hints.keys()
    if foreign:
        raise ValueError(
            f'{settings.path}: GPTConfig has no {", ".join(sorted(foreign))}; the model was exported '
            'with another model.py, and only that one computes it'
        )
    for name, value in fields.items():
        fields[name] = convert(value, hints[name], f'{settings.path}: {name}')
    return GPTConfig(**fields)


def take_fields(settings, names):
    """{field of GPTConfig: value} of the fields in `names`."""
    hints = typing.get_type_hints(GPTConfig)
    fields = {}
    for field, name in {**names, **BOTH}.items():
        if name in MAY_BE_NONE and settings[name] is None:
            continue
        fields[field] = settings.take(name, hints[field])
    return fields


def bound_positions(settings):
    """Allow positions only within the window, where sliding attention is causal attention."""
    name = 'max_position_embeddings'
    positions = settings.take(name, int)
    window = settings.take('sliding_window', int | None)
    settings.values[name] = min(positions, window or positions)


def read_rope(settings):
    """GPTConfig's rope_scaling. RoPE's base, wherever it stands, moves to rope_theta."""
    rope = {}
    for name in ('rope_scaling', 'rope_parameters'):  # older and newer transformers
        rope |= settings.take(name, dict | None) or {}
    if 'rope_theta' in rope:
        settings.values['rope_theta'] = rope['rope_theta']

    kind = rope.get('rope_type', rope.get('type', 'default'))
    if kind == 'default':
        return ()
    if kind != 'llama3':
        raise ValueError(f"{settings.path}: RoPE scaled as {kind!r}; only llama3's is computed")
    scaling = Settings(settings.path.parent, rope)
    return tuple(scaling[name] for name in ROPE_SCALING)


# --- the names of its weights --------------------------------------------------------------------

# The modules of a block, and Llama's modules whose rows each one joins. GPT-2 has our names.
BLOCK = {
    'ln_1': ['input_layernorm'],
    'attn.c_attn': ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'],
    'attn.c_proj': ['self_attn.o_proj'],
    'ln_2': ['post_attention_layernorm'],
    'mlp.c_fc': ['mlp.gate_proj', 'mlp.up_proj'],
    'mlp.c_proj': ['mlp.down_proj'],
}


def layout(config):
    """Our weights in transformers' names: {ours: {theirs: its rows, or None for all of ours}}.

    It lists the weights of transformers' model, not of ours: a weight that only ours has, such as
    one that a fork adds, is not in it.
    """
    return gpt2_layout(config) if config.arch == 'gpt2' else llama_layout(config)


def llama_layout(config):
    kv = config.kv_heads * config.head_size
    rows = {
        'self_attn.q_proj': config.n_embd,
        'self_attn.k_proj': kv,
        'self_attn.v_proj': kv,
        'mlp.gate_proj': config.ffn_width,
        'mlp.up_proj': config.ffn_width,
    }
    names = {'transformer.wte.weight': {'model.embed_tokens.weight': None}}
    for n in range(config.n_layer):
        for module, parts in BLOCK.items():
            theirs = {f'model.layers.{n}.{part}.weight': rows.get(part) for part in parts}
            names[f'transformer.h.{n}.{module}.weight'] = theirs
    names['transformer.ln_f.weight'] = {'model.norm.weight': None}
    if not config.tie_embeddings:
        names['lm_head.weight'] = {'lm_head.weight': None}
    return names


def gpt2_layout(config):
    modules = [f'transformer.h.{n}.{module}' for n in range(config.n_layer) for module in BLOCK]
    names = ['transformer.wte.weight', 'transformer.wpe.weight']
    for module in (*modules, 'transformer.ln_f'):
        names += [f'{module}.weight', f'{module}.bias']
    if not config.tie_embeddings:
        names.append('lm_head.weight')
    return {name: {name: None} for name in names}


def variant_layout(config, names):
    """Likewise in an export's names, which are ours with a prefix. A tied head is left out."""
    result = {name: {f'model.{name}': None} for name in names}
    if config.tie_embeddings:
        del result['lm_head.weight']
    return result


def is_transposed(kind, name):
    """Whether transformers keeps a matrix of ours transposed: GPT-2's linear layers in its blocks."""
    matrices = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')
    return kind == 'gpt2' and name.endswith(matrices)


# --- its tensors ---------------------------------------------------------------------------------


class Tensors:
    """A checkpoint's tensors by name, read one at a time, each once.

    places: {name: (open file, key there)} of those not yet taken. Names without `prefix` get it: some
    checkpoints of GPT-2 have none.
    """

    def __init__(self, folder, prefix):
        self.folder = folder
        self.places = {}
        for path in weight_files(folder):
            file = open_tensors(path)
            for key in file.keys():
                has_prefix = key.startswith((prefix, 'lm_head.'))
                name = key if has_prefix else prefix + key
                self.places[name] = file, key

    def take(self, name):
        if name not in self.places:
            raise ValueError(f'{self.folder} lacks {name}')
        file, key = self.places.pop(name)
        t = file[key] if isinstance(file, dict) else file.get_tensor(key)
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(
                f'{self.folder}: {name} is {t.dtype}; only floating point numbers of 16 bits or '
                'more are read'
            )
        return t


def weight_files(folder):
    """The files that hold a checkpoint's weights."""
    for name in ('model.safetensors', 'pytorch_model.bin'):
        index = folder / f'{name}.index.json'
        if index.exists():
            try:
                file_of = json.loads(index.read_text())['weight_map']
                return sorted({folder / file for file in file_of.values()})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f'{index} is damaged ({type(error).__name__})') from error
        if (folder / name).exists():
            return [folder / name]
    raise ValueError(f'{folder} has neither model.safetensors nor pytorch_model.bin')


def open_tensors(path):
    """An open safetensors file, or {name: tensor} of a file of torch's, whose pages are mapped."""
    try:
        if path.suffix == '.safetensors':
            from safetensors import safe_open

            return safe_open(path, 'pt')
        mmap = zipfile.is_zipfile(path)  # older than torch 1.6: not a zip file
        tensors = torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)
        for name, t in tensors.items():
            if not isinstance(name, str) or not isinstance(t, torch.Tensor):
                raise TypeError
        return tensors
    except FileNotFoundError:
        raise ValueError(
            f'{path} is missing, though the index names it: did a download stop half way?'
        ) from None
    except Exception as error:  # safetensors, zip and pickle each raise their own
        raise ValueError(
            f'{path} is damaged, or holds more than tensors ({type(error).__name__})'
        ) from error
