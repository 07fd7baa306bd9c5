"""
Checkpoints from outside, in Hugging Face's form: Llama, Mistral, GPT-2, and every variant that
hub/convert.py exports. They come from a folder or a hub id.

>>> model = load_hub('folder')

Weights are read as tensors and nothing else, and code that lies beside them is never run.
"""

import contextlib
import json
import typing
import zipfile
from pathlib import Path

import torch

from configurator import convert
from lib.files import first_line
from model import GPT, GPTConfig, rope_tables

# A checkpoint's weights are in the first of these files that is there or, without it, in the shards
# that its index names: what transformers reads.
FILES = ('model.safetensors', 'pytorch_model.bin')

# --- a checkpoint --------------------------------------------------------------------------------


def holds_weights(path):
    """Whether a path is a folder with a checkpoint of Hugging Face."""
    return path.is_dir() and bool(weight_files(path))


def load_hub(path_or_hub_id, warn=print):
    """A GPT with a checkpoint's weights, in fp32. One tensor at a time is in memory twice.

    Weights that lie beside them, such as shards of an earlier save, are not read; `warn` names them.

    Raises ValueError for models that GPT does not compute and for files that are damaged or missing,
    OSError for a hub id that cannot be downloaded.
    """
    folder = fetch(path_or_hub_id)
    kind, config = read_config(folder / 'config.json')
    model = GPT.without_weights(config)
    wanted = model.state_dict()

    tensors = read_tensors(folder, 'transformer.' if kind == 'gpt2' else 'model.', warn)
    places = layout(kind, config)
    head = 'model.lm_head.weight' if kind == VARIANT else 'lm_head.weight'
    if config.tie_embeddings:
        (embedding,) = [name for name, ours in places.items() if ours == ['transformer.wte.weight']]
        if embedding not in tensors and head in tensors:  # stored by one of its two names
            tensors[embedding] = tensors.pop(head)
    state = {}
    for theirs, ours in places.items():
        rows = [len(wanted[name]) for name in ours]
        shape = sum(rows), *wanted[ours[0]].shape[1:]
        flips = is_flipped(kind, theirs)
        weight = take(folder, tensors, theirs, shape[::-1] if flips else shape).float()
        weight = weight.t() if flips else weight
        for name, part in zip(ours, weight.split(rows), strict=True):
            state[name] = part.contiguous()
    if config.tie_embeddings:
        state['lm_head.weight'] = state['transformer.wte.weight']
    check_leftover(folder, tensors, head, state['lm_head.weight'])

    model.load_state_dict(state, assign=True)
    if config.tie_embeddings:
        model.lm_head.weight = model.transformer.wte.weight
    if config.arch == 'llama':
        model.cos, model.sin = rope_tables(config)
    return model.eval()


def fetch(path_or_hub_id):
    """The folder of a checkpoint. A hub id is downloaded, or if the hub fails, read from its cache."""
    folder = Path(path_or_hub_id)
    if folder.is_dir():
        return folder
    name = str(path_or_hub_id)
    try:
        from huggingface_hub import snapshot_download

        for file in FILES:
            folder = Path(snapshot_download(name, allow_patterns=['*.json', file]))
            shards = [path.name for path in weight_files(folder)]
            if shards:
                return Path(snapshot_download(name, allow_patterns=['*.json', *shards]))
    except Exception as error:  # the hub's client, and the one below it, have many ways to fail
        raise OSError(
            f'{name} is not a folder, and it could not be downloaded from the hub ({first_line(error)}); '
            'download it once and give its folder'
        ) from error
    return folder


def take(folder, tensors, name, shape):
    """Take a tensor of this shape out of `tensors`."""
    if name not in tensors:
        raise ValueError(f'{folder} lacks {name}')
    t = tensors.pop(name)
    if t.shape != shape or not t.is_floating_point() or t.itemsize == 1:
        raise ValueError(
            f'{folder}: {name} is {tuple(t.shape)} of {t.dtype}; its config.json says {shape}, and '
            'only floating point numbers of 16 bits or more are read'
        )
    return t


def check_leftover(folder, tensors, head, weight):
    """Refuse tensors that no place was found for. A head that is tied, to `weight`, may be there, too."""
    # Tables that old checkpoints carry along are not weights.
    tables = ('.rotary_emb.inv_freq', '.attn.bias', '.attn.masked_bias')
    for name, t in tensors.items():
        if name == head and not torch.equal(t.float(), weight):
            raise ValueError(
                f'{folder}: {name} is not the embedding, though config.json ties them; which one '
                'counts depends on the version of transformers. If it is the head, write '
                '"tie_word_embeddings": false there'
            )
        if name != head and not name.endswith(tables):
            raise ValueError(f'{folder} has a weight that this model has no place for: {name}')


# --- its config.json -----------------------------------------------------------------------------

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

# Fields that a config.json may leave out, and transformers' defaults where ours are others or none.
OPTIONAL = ('n_kv_head', 'n_inner', 'rope_theta', 'rope_scaling', 'norm_eps', 'tie_embeddings')
DEFAULTS = {
    'llama': {'max_position_embeddings': 2048, 'rms_norm_eps': 1e-6},
    'mistral': {
        'max_position_embeddings': 131072,
        'rms_norm_eps': 1e-6,
        'num_key_value_heads': 8,
        'sliding_window': 4096,
    },
    'gpt2': {'n_positions': 1024, 'tie_word_embeddings': True},
}

# The only values of these that GPT computes; the first is transformers' default. Biases, cross
# attention and wider heads show in the weights.
COMPUTED = {
    'hidden_act': ('silu',),
    'activation_function': ('gelu_new', 'gelu_pytorch_tanh'),
    'scale_attn_weights': (True,),
    'scale_attn_by_inverse_layer_idx': (False,),
    'transformers_weights': (None,),  # files of other names
}

# The model_type of a variant that hub/convert.py exports.
VARIANT = 'nanoresformer'


def read_config(path):
    """(model_type, GPTConfig) of a config.json. ValueError where GPT does not compute what it says."""
    with file_named(path):
        values = json.loads(path.read_text())
        kind = values.get('model_type')
        if kind == VARIANT:
            fields = values['gpt']
            return kind, make_config(fields, {name: name for name in fields})

        if kind not in ('llama', 'mistral', 'gpt2'):
            raise ValueError(
                f'model_type={kind!r}; only llama, mistral and gpt2 are read, and what hub.convert '
                'exported'
            )
        values = DEFAULTS[kind] | values
        for name, allowed in COMPUTED.items():
            value = values.get(name, allowed[0])
            if value not in allowed:
                choice = ' or '.join(map(repr, allowed))
                raise ValueError(f'{name}={value!r}, but GPT computes only {choice}')
        if kind == 'gpt2':
            return kind, make_config(values, GPT2, arch='gpt2')

        config = make_config(values | read_rope(values), LLAMA)
        if kind == 'mistral' and values['sliding_window'] is not None:
            # Within its window, sliding attention is causal attention.
            window = convert(values['sliding_window'], int, 'sliding_window')
            config.block_size = min(config.block_size, window)
        return kind, config


def make_config(values, names, **fields):
    """The GPTConfig of a config.json's values. names: {field: its name there}"""
    hints = typing.get_type_hints(GPTConfig)
    for field, name in names.items():
        if field not in hints:
            raise ValueError(f'GPTConfig has no {field}: a field of another model.py')
        if values.get(name) is not None:
            fields[field] = convert(values[name], hints[field], name)
        elif field not in OPTIONAL:
            raise ValueError(f'it lacks {name!r}')
    return GPTConfig(**fields)


def read_rope(values):
    """A Llama's rope_theta and rope_scaling, as GPTConfig has them, wherever they stand."""
    rope = {'rope_theta': values.get('rope_theta')}
    for name in ('rope_scaling', 'rope_parameters'):  # older and newer transformers
        rope |= convert(values.get(name), dict | None, name) or {}
    kind = rope.get('rope_type', rope.get('type', 'default'))
    if kind not in ('default', 'llama3'):
        raise ValueError(f"RoPE scaled as {kind!r}; only llama3's is computed")
    scaling = [rope.get(name) for name in ROPE_SCALING] if kind == 'llama3' else ()
    return {'rope_theta': rope['rope_theta'], 'rope_scaling': scaling}


# --- the names of its weights --------------------------------------------------------------------

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


# --- its tensors ---------------------------------------------------------------------------------


def read_tensors(folder, prefix, warn):
    """A checkpoint's tensors by name, {name: tensor}. The pages of its files are mapped, not read.

    Names without `prefix` get it: some checkpoints of GPT-2 have none.
    """
    paths = weight_files(folder)
    if not paths:
        raise ValueError(f'{folder} has neither {" nor ".join(FILES)}, nor an index of shards')
    others = {
        path for kind in ('*.safetensors', 'pytorch_model*.bin') for path in folder.glob(kind)
    }
    others = sorted(path.name for path in others - set(paths))
    if others:
        warn(f'note: of the weights in {folder}, these are not read: {", ".join(others)}')
    tensors = {}
    for path in paths:
        with file_named(path):
            for name, t in read_file(path).items():
                has_prefix = name.startswith((prefix, 'lm_head.'))
                tensors[name if has_prefix else prefix + name] = t.detach()
    return tensors


def weight_files(folder):
    """The files that hold a checkpoint's weights, shards of which may be missing; [] without any."""
    for name in FILES:
        if (folder / name).exists():
            return [folder / name]
        index = folder / f'{name}.index.json'
        if index.exists():
            with file_named(index):
                shards = set(json.loads(index.read_text())['weight_map'].values())
                return [folder / shard for shard in sorted(shards)]
    return []


def read_file(path):
    """{name: tensor} of one file."""
    if path.suffix == '.safetensors':
        from safetensors.torch import load_file

        return load_file(path)
    mmap = zipfile.is_zipfile(path)  # older than torch 1.6: not a zip file
    return torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)


@contextlib.contextmanager
def file_named(path):
    """Turn what a file that does not fit raises into a ValueError of one line that names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f'{path}: {first_line(error)}') from error
    except Exception as error:  # safetensors, zip and pickle each raise their own
        # torch's own advice, to trust the file, is bad advice.
        raise ValueError(
            f'{path} is damaged, or not what it should be ({type(error).__name__})'
        ) from error
