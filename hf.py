"""
Hugging Face checkpoints in (Llama, Mistral, GPT-2; a folder or a hub id) and out.

$ python hf.py export --out_dir=out/run --to=folder       # for AutoModelForCausalLM.from_pretrained(folder)
$ python train.py config/yours.py --init_from=folder      # goes on from a checkpoint's weights

Out: vanilla is a plain LlamaForCausalLM (gpt2: GPT2LMHeadModel). Every other variant takes its code along, model.py and
modeling_nanoresformer.py, and loads with trust_remote_code=True. In: weights_only, always; no file can run code.
"""
import json
import math
import shutil
import sys
import zipfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from configurator import configure, convert, one_line_errors
from model import GPT, GPTConfig, rope_tables

VARIANT = [f.name for f in fields(GPTConfig) if f.name.startswith(  # what transformers' own models do not have
    ('q_', 'k_', 'v_', 'residual_', 'share_', 'neutreno', 'denseformer'))]
MARK = 'nanoresformer_export'  # in config.json: this folder may be replaced
CODE = 'model.py', 'modeling_nanoresformer.py'
FILES = {'config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json', *CODE}
CONV1D = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')  # transformers keeps GPT-2's matrices transposed


# --- in --------------------------------------------------------------------------------------------------------------

def load(path_or_hub_id):
    """A GPT with a checkpoint's weights, in fp32."""
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
    """(GPTConfig, our state dict) of a checkpoint. One tensor of it is in memory twice, never more. Raises ValueError
    for models and files that are not what this reads, OSError where they cannot be had."""
    folder = fetch(path_or_hub_id)
    config = read_config(folder)
    with torch.device('meta'):
        shapes = {name: t.shape for name, t in GPT(config).state_dict().items()}
    tensors, state = Tensors(folder, 'transformer.' if config.arch == 'gpt2' else 'model.'), {}
    for name, parts in layout(config).items():
        transposed, found = config.arch == 'gpt2' and name.endswith(CONV1D), []
        for theirs, rows in parts:
            t, shape = tensors.take(theirs), (rows or shapes[name][0], *shapes[name][1:])
            if tuple(t.shape) != (shape[::-1] if transposed else shape):
                raise ValueError(f'{folder}: {theirs} ({name}) is {tuple(t.shape)}; config.json says otherwise')
            found.append(t)
        t = torch.cat(found).float()
        state[name] = t.T.contiguous() if transposed else t
    if config.tie_embeddings:
        head = state['lm_head.weight'] = state['transformer.wte.weight']
        if 'lm_head.weight' in tensors.names and not torch.equal(tensors.take('lm_head.weight').float(), head):
            raise ValueError(f'{folder}: lm_head.weight is not the embedding, though config.json ties them; which one '
                             'counts depends on the version of transformers: say "tie_word_embeddings": false there')
    # Tables that old checkpoints carry along are not weights.
    left = [name for name in tensors.names if not name.endswith(('rotary_emb.inv_freq', 'attn.bias', 'masked_bias'))]
    if left:
        raise ValueError(f'{folder} has weights that this model has no place for: {", ".join(sorted(left)[:3])}')
    return config, state


def fetch(path_or_hub_id):
    """The folder of a checkpoint; a hub id is downloaded, safetensors where there are any."""
    folder = Path(path_or_hub_id)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import HfApi, snapshot_download
        files = HfApi().list_repo_files(str(path_or_hub_id))
        weights = '*.safetensors*' if any(name.endswith('.safetensors') for name in files) else '*.bin*'
        return Path(snapshot_download(str(path_or_hub_id), allow_patterns=['*.json', weights]))
    except Exception as error:  # the hub's client, and the one below it, have many ways to fail
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(f'{path_or_hub_id} is not a folder, and cannot be had from the hub ({reason})') from error


def read_config(folder):
    """The GPTConfig of a checkpoint's config.json, or ValueError if that describes something GPT does not compute."""
    try:
        theirs = json.loads((folder / 'config.json').read_text())
        kind = theirs['model_type']
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{folder} has no config.json that names its model_type: not a Hugging Face checkpoint, or '
                         'half of one') from error
    if kind not in ('llama', 'mistral', 'gpt2'):
        raise ValueError(f'{folder} is a {kind}; only llama, mistral and gpt2 are read')

    def given(name, hint, *default, source=theirs):
        """A value, refused by its own name where it is of another type, or a number that is not positive."""
        value = source.get(name, *default) if default else source[name]
        value = convert(value, hint, f'{folder}/config.json: {name}')
        if hint in (int, float) and not 0 < value < math.inf:
            raise ValueError(f'{folder}/config.json: {name}={value} must be positive')
        return value

    def expect(name, *allowed):
        if theirs.get(name, allowed[0]) not in allowed:
            raise ValueError(f'{folder}: {name}={theirs[name]!r} is not what GPT computes ({allowed[-1]!r})')

    try:
        if kind == 'gpt2':
            for name in ('scale_attn_by_inverse_layer_idx', 'reorder_and_upcast_attn', 'add_cross_attention'):
                expect(name, False)
            expect('scale_attn_weights', True)
            expect('activation_function', 'gelu_new', 'gelu_pytorch_tanh')
            return GPTConfig(
                arch='gpt2', block_size=given('n_positions', int), vocab_size=given('vocab_size', int),
                n_layer=given('n_layer', int), n_head=given('n_head', int), n_embd=given('n_embd', int),
                n_inner=given('n_inner', int | None, None) or 0, norm_eps=given('layer_norm_epsilon', float, 1e-5),
                tie_embeddings=given('tie_word_embeddings', bool, True))
        expect('hidden_act', 'silu')
        expect('attention_bias', False)
        expect('mlp_bias', False)
        old, new = (given(name, dict | None, None) or {} for name in ('rope_scaling', 'rope_parameters'))
        rope, scaling = {**old, **new}, ()
        rope_type = rope.get('rope_type', rope.get('type', 'default'))
        if rope_type == 'llama3':
            scaling = tuple(rope[name] for name in ('factor', 'low_freq_factor', 'high_freq_factor',
                                                    'original_max_position_embeddings'))
        elif rope_type != 'default':
            raise ValueError(f"{folder}: RoPE scaled as {rope_type!r}; only llama3's scaling is computed")
        positions, kv_heads = given('max_position_embeddings', int), None
        if kind == 'mistral':  # within its window, and no further, attention that slides is causal attention
            positions, kv_heads = min(positions, given('sliding_window', int | None, 4096) or positions), 8
        config = GPTConfig(
            block_size=positions, vocab_size=given('vocab_size', int), n_layer=given('num_hidden_layers', int),
            n_head=given('num_attention_heads', int), n_embd=given('hidden_size', int),
            n_inner=given('intermediate_size', int), norm_eps=given('rms_norm_eps', float), rope_scaling=scaling,
            n_kv_head=given('num_key_value_heads', int | None, kv_heads) or 0,
            rope_theta=given('rope_theta', float, 10000.0, source={**theirs, **rope}),
            tie_embeddings=given('tie_word_embeddings', bool, False))
        expect('head_dim', None, config.head_size)
        return config
    except KeyError as error:
        raise ValueError(f'{folder}/config.json lacks {error}') from error


class Tensors:
    """A checkpoint's tensors by name, read one at a time."""

    def __init__(self, folder, prefix):
        self.folder, self.prefix, self.names = folder, prefix, {}  # name -> open file
        for stem in ('model.safetensors', 'pytorch_model.bin'):
            index = folder / f'{stem}.index.json'
            if index.exists():
                try:
                    files = sorted({folder / name for name in json.loads(index.read_text())['weight_map'].values()})
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f'{index} is damaged ({type(error).__name__})') from error
            elif (folder / stem).exists():
                files = [folder / stem]
            else:
                continue
            for path in files:
                opened = self.open(path)
                self.names.update((key if key.startswith((prefix, 'lm_head.')) else prefix + key, (opened, key))
                                  for key in opened.keys())
            return
        raise ValueError(f'{folder} has neither model.safetensors nor pytorch_model.bin')

    @staticmethod
    def open(path):
        try:
            if path.suffix == '.safetensors':
                from safetensors import safe_open
                return safe_open(path, 'pt')
            tensors = torch.load(path, map_location='cpu', weights_only=True, mmap=zipfile.is_zipfile(path))
            if not all(isinstance(name, str) and isinstance(t, torch.Tensor) for name, t in tensors.items()):
                raise TypeError
            return tensors
        except FileNotFoundError:
            raise ValueError(f'{path} is missing, though the index names it: did a download stop half way?') from None
        except Exception as error:  # safetensors, zip, pickle: each has its own
            raise ValueError(f'{path} is damaged, or holds more than tensors ({type(error).__name__})') from error

    def take(self, name):
        if name not in self.names:
            raise ValueError(f'{self.folder} lacks {name}')
        opened, key = self.names.pop(name)
        t = opened[key] if isinstance(opened, dict) else opened.get_tensor(key)
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f'{self.folder}: {name} is {t.dtype}; what is quantized, or no real number, is not read')
        return t


def layout(config):
    """Our parameters in transformers' names: {ours: [(theirs, rows)]}; their rows, joined, are ours."""
    if config.arch == 'gpt2':
        with torch.device('meta'):
            ours = [name for name, _ in GPT(config).named_parameters()]  # the same names
        return {name: [(name, None)] for name in ours}
    C, F, kv = config.n_embd, config.ffn_width, config.kv_heads * config.head_size
    names = {'transformer.wte.weight': [('model.embed_tokens.weight', None)]}
    for n in range(config.n_layer):
        ours, theirs = f'transformer.h.{n}.', f'model.layers.{n}.'
        names |= {ours + name: [(f'{theirs}{part}.weight', rows) for part, rows in parts.items()] for name, parts in (
            ('ln_1.weight', {'input_layernorm': None}),
            ('attn.c_attn.weight', {'self_attn.q_proj': C, 'self_attn.k_proj': kv, 'self_attn.v_proj': kv}),
            ('attn.c_proj.weight', {'self_attn.o_proj': None}),
            ('ln_2.weight', {'post_attention_layernorm': None}),
            ('mlp.c_fc.weight', {'mlp.gate_proj': F, 'mlp.up_proj': F}),
            ('mlp.c_proj.weight', {'mlp.down_proj': None}))}
    names['transformer.ln_f.weight'] = [('model.norm.weight', None)]
    return names if config.tie_embeddings else {**names, 'lm_head.weight': [('lm_head.weight', None)]}


# --- out -------------------------------------------------------------------------------------------------------------

@dataclass
class ExportConfig:
    out_dir: str = 'out/run'  # a run's folder, or one checkpoint file
    to: str = ''  # the folder to write: a new or empty one, or an export to replace
    tokenizer: str = ''  # as in prepare_slimpajama.py; '': the one of the run's dataset

    def __post_init__(self):
        if not self.to or Path(self.to).exists() and not replaceable(Path(self.to)):
            raise ValueError(f'--to={self.to} must be a new or empty folder, or one that an export made, to replace it')


def replaceable(folder):
    """Empty, or an export and no more: what transformers saves of one has the mark, too, but also other files."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {''}
    ours = 'config.json' in names and names <= FILES
    return not names or ours and MARK in (folder / 'config.json').read_text(errors='replace')


def export(model, tokenizer, to):
    """Write `model` and its tokenizer as a Hugging Face folder."""
    from safetensors.torch import save_file
    config, to = model.config, Path(to)
    state = {name: t.detach().cpu() for name, t in model.state_dict().items()}
    if config.tie_embeddings:
        del state['lm_head.weight']
    common = {'vocab_size': config.vocab_size, 'tie_word_embeddings': config.tie_embeddings, 'dtype': 'float32',
              'bos_token_id': tokenizer.eot, 'eos_token_id': tokenizer.eot}
    plain = all(getattr(config, name) == getattr(GPTConfig, name) for name in VARIANT)
    plain = plain and not (config.arch == 'gpt2' and config.kv_heads != config.n_head)
    to.mkdir(parents=True, exist_ok=True)
    for old in (*CODE, 'model.safetensors'):  # unlinked, not written over: another process may have it mapped
        (to / old).unlink(missing_ok=True)
    if not plain:
        theirs = {'model_type': 'nanoresformer', 'architectures': ['NanoResFormerForCausalLM'], 'gpt': asdict(config),
                  'auto_map': {'AutoConfig': 'modeling_nanoresformer.NanoResFormerConfig',
                               'AutoModelForCausalLM': 'modeling_nanoresformer.NanoResFormerForCausalLM'}}
        state = {f'model.{name}': t.contiguous() for name, t in state.items()}
        for name in CODE:
            shutil.copy(Path(__file__).with_name(name), to)
    else:
        if config.arch == 'gpt2':
            theirs = {'model_type': 'gpt2', 'architectures': ['GPT2LMHeadModel'], 'n_positions': config.block_size,
                      'n_layer': config.n_layer, 'n_head': config.n_head, 'n_embd': config.n_embd,
                      'n_inner': config.ffn_width, 'layer_norm_epsilon': config.norm_eps,
                      'activation_function': 'gelu_new',
                      **{f'{name}_pdrop': config.dropout for name in ('embd', 'attn', 'resid')}}
        else:
            theirs = {'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], 'hidden_act': 'silu',
                      'max_position_embeddings': config.block_size, 'num_hidden_layers': config.n_layer,
                      'num_attention_heads': config.n_head, 'num_key_value_heads': config.kv_heads,
                      'hidden_size': config.n_embd, 'intermediate_size': config.ffn_width,
                      'rms_norm_eps': config.norm_eps, 'rope_theta': config.rope_theta}
            if config.rope_scaling:
                names = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'
                theirs['rope_scaling'] = {'rope_type': 'llama3', **dict(zip(names, config.rope_scaling, strict=True))}
        theirs_state = {}
        for ours, parts in layout(config).items():
            t = state[ours].T if config.arch == 'gpt2' and ours.endswith(CONV1D) else state[ours]
            rows = [len(t)] if len(parts) == 1 else [rows for _, rows in parts]
            theirs_state |= {name: part.contiguous() for (name, _), part in zip(parts, t.split(rows), strict=True)}
        state = theirs_state
    save_file(state, to / 'model.safetensors', metadata={'format': 'pt'})
    (to / 'config.json').write_text(json.dumps({**theirs, **common, MARK: True}, indent=1) + '\n')
    if tokenizer.path:
        shutil.copy(tokenizer.path, to / 'tokenizer.json')
    else:
        (to / 'tokenizer.json').write_text(json.dumps(tokenizer.json(), ensure_ascii=False))
    eot = tokenizer.decode([tokenizer.eot])
    (to / 'tokenizer_config.json').write_text(json.dumps({
        'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': eot, 'eos_token': eot,
        'model_max_length': config.block_size, 'clean_up_tokenization_spaces': False}, indent=1) + '\n')


def main():
    with one_line_errors(ValueError, OSError):
        if sys.argv[1:2] != ['export']:
            print(__doc__.strip())
            sys.exit(0 if sys.argv[1:2] in (['--help'], ['-h']) else 2)
        (settings,) = configure(ExportConfig, argv=sys.argv[2:])
        from sample import load_run
        model, tokenizer, _ = load_run(settings.out_dir, settings.tokenizer)
        export(model, tokenizer, settings.to)
    print(f'wrote {settings.to}')


if __name__ == '__main__':
    main()
