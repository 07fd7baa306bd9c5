"""
Other projects' models as ports of these variants, and how an adapter for hub/conform.py looks.

$ git clone --depth 1 https://github.com/lucidrains/x-transformers $PORTS/x-transformers
$ pip install x-transformers                             # for what it needs
$ git clone --depth 1 https://github.com/karpathy/nanochat $PORTS/nanochat
$ git clone --depth 1 https://github.com/fla-org/flash-linear-attention $PORTS/flash-linear-attention
$ git clone --depth 1 https://github.com/Zcchill/Value-Residual-Learning $PORTS/Value-Residual-Learning
$ PORTS=folder PYTHONPATH=tests python -m hub.conform foreign_ports:nanochat

Their code runs as it stands there. hub/PORTING.md says what was found.
"""

import __future__

import ast
import importlib
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hub.convert import export, llama_settings
from lib import tokenizer
from lib.outside import VARIANT, layout
from model import GPT, GPTConfig

PORTS = Path(os.environ.get('PORTS', 'ports'))


class Absent(OSError):
    pass


def source_of(project, *folder):
    """The folder of a project. Raises Absent where there is none."""
    root = PORTS / project
    if not root.is_dir():
        raise Absent(f'{root} is absent; tests/foreign_ports.py says how to get it')
    return root.joinpath(*folder)


def imported(name, folder):
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


# --- mixings -------------------------------------------------------------------------------------


class Given(nn.Module):
    """In place of a projection: gives the tensor that it holds."""

    def forward(self, x):
        return self.tensor


def mixing(compute):
    """compute(own, source, x, weights) of tensors as a mixing of arrays, with its gradients."""

    def mix(own, source, x, weights):
        arrays = {'own': own, 'source': source, 'x': x, **weights}
        leaves = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
        named = {name: leaves[name] for name in weights}
        values = compute(leaves['own'], leaves['source'], leaves['x'], named)

        def backward(gradient):
            gradients = torch.autograd.grad(
                values, leaves.values(), torch.tensor(gradient), allow_unused=True
            )
            found = zip(leaves, gradients, strict=True)
            return {name: g.numpy() for name, g in found if g is not None}

        return values.detach().numpy(), backward

    return mix


def has_gate(weights, *names):
    return set(names) == {name for name in weights if '.gate' in name}


def has_lambda(weights, *values):
    return np.array_equal(weights.get('attn.v.residual_lambda', torch.tensor([])).detach(), values)


def to_rows(heads):
    """(B, heads, T, hs) as the (B, T, heads hs) of a projection."""
    return heads.transpose(1, 2).flatten(2)


@mixing
def x_transformers(own, source, x, weights):
    """add_value_residual, learned_value_residual_mix. Its gate weights the own values."""
    x_t = imported('x_transformers.x_transformers', source_of('x-transformers'))
    _, heads, _, hs = own.shape
    gate = {}
    is_learned = has_gate(weights, 'attn.v.gate.weight', 'attn.v.gate.bias')
    if is_learned:
        gate['to_value_residual_mix.0.weight'] = -weights['attn.v.gate.weight']
        gate['to_value_residual_mix.0.bias'] = -weights['attn.v.gate.bias']
    elif not has_lambda(weights, 0.5, 0.5):
        raise NotImplementedError
    attention = x_t.Attention(
        x.shape[-1],
        dim_head=hs,
        heads=heads,
        causal=True,
        learned_value_residual_mix=is_learned,
    ).double()
    attention.to_v = Given()
    attention.to_v.tensor = to_rows(own)
    seen = []
    attention.attend.register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    torch.func.functional_call(attention, gate, x, {'value_residual': source})
    return seen[0]


@mixing
def nanochat(own, source, x, weights):
    """Value embeddings: a row of a table, times a gate of each head."""
    gpt = imported('nanochat.gpt', source_of('nanochat'))
    B, heads, T, hs = own.shape
    C = x.shape[-1]
    if not has_gate(weights, 'attn.v.gate.weight') or not has_lambda(weights, 3, 1):
        raise NotImplementedError
    config = SimpleNamespace(n_head=C // hs, n_kv_head=heads, n_embd=C, n_layer=2)
    attention = gpt.CausalSelfAttention(config, layer_idx=1).double()
    attention.c_v = Given()
    attention.c_v.tensor = to_rows(own)
    seen = []

    def attend(q, k, v, **options):
        seen.append(v)
        return q

    gpt.flash_attn = SimpleNamespace(flash_attn_func=attend)
    no_turn = torch.ones(1, T, 1, hs // 2), torch.zeros(1, T, 1, hs // 2)
    gate = {'ve_gate.weight': weights['attn.v.gate.weight']}
    torch.func.functional_call(attention, gate, (x, to_rows(source), no_turn, (T, 0), None))
    return seen[0].transpose(1, 2)


def run_statement(path, start, scope):
    """Run the one statement of a source file that starts so, for a file whose imports need a GPU."""
    nodes = ast.walk(ast.parse(path.read_text()))
    texts = [ast.unparse(node) for node in nodes if isinstance(node, ast.stmt)]
    (text,) = [text for text in texts if text.startswith(start)]
    exec(compile(text, path, 'exec', flags=__future__.annotations.compiler_flag), scope)


@mixing
def rwkv7(own, source, x, weights):
    """flash-linear-attention's RWKV-7. What its gate reads, the token-shifted x, is x here."""
    layers = source_of('flash-linear-attention', 'fla', 'layers')
    if not has_gate(
        weights, 'attn.v.gate_down.weight', 'attn.v.gate_up.weight', 'attn.v.gate_bias'
    ):
        raise NotImplementedError
    scope = {'nn': nn, 'torch': torch}
    run_statement(layers / 'rwkv6.py', 'class LoRA(', scope)
    rank, C = weights['attn.v.gate_down.weight'].shape
    lora = scope['LoRA'](C, own.shape[1] * own.shape[3], rank, activation=None).double()
    named = {
        'lora.0.weight': weights['attn.v.gate_down.weight'],
        'lora.2.weight': weights['attn.v.gate_up.weight'],
        'lora.2.bias': weights['attn.v.gate_bias'],
    }
    scope['self'] = SimpleNamespace(v_lora=partial(torch.func.functional_call, lora, named))
    scope.update(v=to_rows(own), v_first=to_rows(source), xv=x)
    run_statement(layers / 'rwkv7.py', 'v = torch.lerp(v, v_first', scope)
    return scope['v'].unflatten(2, (own.shape[1], -1)).transpose(1, 2)


# --- whole models --------------------------------------------------------------------------------


class Port:
    """A causal language model of transformers, or one like it, with the weights of a variant."""

    kind = 'llama'  # the model_type whose names its weights have

    def __init__(self, model, config, weights):
        self.model = model.double().eval()
        names = layout(self.kind, GPTConfig(**vars(config)))
        self.parameters = {names[name][0]: p for name, p in model.named_parameters()}
        for name, p in self.parameters.items():
            p.data.copy_(torch.tensor(weights[name]))

    def __call__(self, ids):
        return self.model(torch.tensor(ids), use_cache=False).logits.detach().numpy()

    def gradients(self, ids, targets):
        self.model.zero_grad()
        logits = self.model(torch.tensor(ids), use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten()).backward()
        return {name: p.grad.numpy() for name, p in self.parameters.items()}

    @torch.no_grad()
    def decode(self, chunks):
        cache, logits = self.new_cache(), []
        for chunk in chunks:
            made = self.model(torch.tensor(chunk), past_key_values=cache, use_cache=True)
            cache = made.past_key_values
            logits.append(made.logits)
        return torch.cat(logits, dim=1).numpy(), self.numbers(cache)

    def new_cache(self):
        return DynamicCache()

    def numbers(self, cache):
        return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


def variant_of(config):
    """{setting: value} of what makes this model, but for GQA, which every Llama has."""
    variant = GPTConfig(**vars(config)).variant()
    return {name: value for name, value in variant.items() if name != 'n_kv_head'}


def llama(config, weights):
    """transformers' LlamaForCausalLM."""
    if variant_of(config):
        raise NotImplementedError
    settings = LlamaConfig(**llama_settings(GPTConfig(**vars(config))))
    return Port(LlamaForCausalLM(settings), config, weights)


# The authors' modules, and what each of them is here.
AUTHORS = {
    'baseline': {},
    'resformer': {'v_residual': True},
    'svformer': {'share_v': True},
    'NeuTRENO_lambda04': {'neutreno': 0.4},
    'NeuTRENO_resformer': {'neutreno': 0.2, 'v_residual': True},
}


def authors(config, weights):
    """src/modeling of the paper's repository."""
    names = [name for name, variant in AUTHORS.items() if variant == variant_of(config)]
    if not names:
        raise NotImplementedError
    gpt = GPTConfig(**vars(config))
    folder = source_of('Value-Residual-Learning', 'src', 'modeling')
    module = imported(f'modeling_llama_{names[0]}', folder)
    settings = LlamaConfig(**llama_settings(gpt), attn_implementation='eager')
    settings.rope_scaling = None
    settings.rope_theta = gpt.rope_theta
    settings.pretraining_tp = 1
    # transformers 5 has this table without plain RoPE, which the authors' version looked up there.
    angles = gpt.rope_theta ** (-torch.arange(0, gpt.head_size, 2) / gpt.head_size)
    plain = {'default': lambda config, device=None: (angles, 1.0)}
    with mock.patch.dict(ROPE_INIT_FUNCTIONS, plain):
        model = module.LlamaForCausalLM(settings)
    return Port(model, config, weights)


class Export(Port):
    """What hub.convert writes, as AutoModelForCausalLM loads it."""

    kind = VARIANT

    def __init__(self, config, weights):
        if not variant_of(config):  # it goes out as transformers' own Llama
            raise NotImplementedError
        gpt = GPT(GPTConfig(**vars(config)))
        with tempfile.TemporaryDirectory() as folder:
            export(gpt, tokenizer.load('bytes'), f'{folder}/export')
            model = AutoModelForCausalLM.from_pretrained(f'{folder}/export', trust_remote_code=True)
        super().__init__(model, config, weights)

    def new_cache(self):
        return None

    def numbers(self, cache):
        tensors = cache.cache.tensors.values()
        return sum(tensor[:, :, : cache.get_seq_length()].numel() for tensor in tensors)
