"""
A Llama-like GPT in which layers may use the values (or keys, or queries) of earlier layers.

Layer n of a Transformer projects its values from its input H: V_n = H W_n. The paper's two models change
that in layers 2 and up, and nothing else:

  ResFormer   V_n = (V_1 + H W_n) / 2    v_residual=True   (Eq. 7)   Part.mix()
  SVFormer    V_n = V_1                  share_v=True      (Eq. 10)  Part.forward()

All attend alike, U_n = softmax(Q_n K_n^T / sqrt(d)) V_n (attend()). Queries and keys can be mixed and
shared, too. So the wiring of a model answers three questions per layer, 1 and 2 for each of q, k and v:
  1. Where does it come from?  Projected here (the layer *owns* it), or borrowed: see owner_of().
  2. What is mixed into it?    *Sources*, raw tensors of earlier layers: see SOURCES. Weights: wire_part().
  3. What acts at attention?   residual_map, exclusive and others: wire_attention(), Attention.after().
wire_part() says 1 and 2, as data, of each Part of a layer. What else connects layers: GPT.connect().

Layers 1 to 4 of   vanilla    ResFormer       SVFormer    CLA
                     v1        v1──┬──┬──┐     v1          v1  k1
                     v2        v2<─┘  │  │     │           │   │
                     v3        v3<────┘  │     │           v3  k3
                     v4        v4<───────┘     │           │   │
(vN: layer N owns its values; │: it borrows those above; <: it mixes the source into its own.)
Text and equations count layers from 1, as the paper does, the code from 0: V_1 is raw['v', 0].

Two kinds of q, k and v travel down the layers, in two dicts by (part, layer). *Raw*: as projected,
unmixed, before RoPE; sources are raw. *Attended*: as attention and borrowers read them, after mixing and,
of q and k, qk_norm and RoPE. What a layer borrows is its owner's tensor. A KV cache has the attended keys
and values of owners alone: SVFormer's has the keys of all layers, and V_1.

An idea of yours: a source made of earlier layers is a line of SOURCES, and nothing else. A gate of sources is
a line of GATES, if a Linear of x makes its logits. What changes attention's output is a setting, and an `if`
in Attention.after(). docs/ideas.md says what else an idea may need.

The paper: Zhou et al., Value Residual Learning, arXiv:2410.17897.
"""

import copy
import hashlib
import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

SHAPE = ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_inner')


@dataclass
class GPTConfig:
    """Raises ValueError for a setting that changes nothing or contradicts another: see check()."""

    # shape
    block_size: int = 2048  # longest sequence
    vocab_size: int = 50304  # GPT-NeoX's 50,277 ids, padded to a multiple of 128
    n_layer: int = 8  # blocks
    n_head: int = 8  # query heads
    n_embd: int = 512  # width
    n_kv_head: int = 0  # key and value heads; 0: n_head, fewer: GQA, 1: MQA
    n_inner: int = 0  # FFN width; 0: 3.5 n_embd for llama (Table 4), 4 n_embd for gpt2
    # the architecture around attention
    arch: str = 'llama'  # RMSNorm, SwiGLU, RoPE; or gpt2: LayerNorm, GELU, positions, biases
    rope_theta: float = 10000.0  # RoPE's base
    rope_scaling: tuple = ()  # llama3's (factor, low_freq, high_freq, original_length)
    norm_eps: float = 1e-5  # epsilon of the norms
    dropout: float = 0.0  # on embeddings, attention weights, and what attention and MLP add
    tie_embeddings: bool = False  # lm_head shares wte's weight
    embed_norm: bool = False  # RMSNorm without weights after wte (nanochat, modded-nanogpt)
    x0_residual: bool = False  # before each block x <- r x + s x_0, with learned r, s (nanochat)
    attn_res: bool = False  # a block reads a softmax mean of what those before added (2603.15031)
    qk_norm: bool = False  # RMSNorm of each head's q and k before RoPE, and a learned gain of q
    exclusive: bool = False  # a head's output without what lies along its own value (2603.09078)
    output_gate: bool = False  # a head's output times sigmoid(W x) (2505.06708)
    # residuals: what is mixed into v, q or k
    v_residual: bool | str = False  # True: the first layer's; or a name in SOURCES, OUTER_SOURCES
    q_residual: bool | str = False  # the same mixing on queries, before RoPE (Fig. 6)
    k_residual: bool | str = False  # the same mixing on keys, before RoPE (Fig. 6)
    residual_weights: str = 'fixed'  # or learned, or of v a name in GATES
    residual_lambda: tuple = ()  # the weights, (each source, own); empty: the mean of all
    residual_layers: tuple = ()  # layers (from 0) that mix; (): all but 0; OUTER_SOURCES need it
    residual_map: str = 'current'  # sources attended by: current (Eq. 4), identity (6), cross (2)
    gate_inputs: int = 0  # of head and relu: how many channels of x they read; 0: all
    gate_bias: bool = False  # of head: W x + b in place of W x
    gate_rank: int = 32  # of channel: its inner width
    # sharing: True: all layers use the first one's; m: every m layers use their first one's; a tuple
    # of 0-based layers: each layer's owner, such as (0, 0, 2)
    share_q: bool | int | tuple = False  # borrow the queries of an earlier layer (Fig. 13)
    share_k: bool | int | tuple = False  # the keys (Figs. 4, 13); 2, with share_v=2: CLA
    share_v: bool | int | tuple = False  # the values: SVFormer (Eq. 10, Fig. 14)
    share_v_heads: int = 0  # borrow this many value heads, the last ones; 0: all (SkipV1Former)
    # the other models that the paper compares with
    neutreno: float = 0.0  # NeuTRENO's lambda: U_n += lambda (V_1 - values attended with) (Eq. 8)
    denseformer: bool = False  # after each block, a learned average of all block outputs

    def __post_init__(self):
        normalize(self)
        check(self)

    def shape(self):
        """{field: value} of the fields that say how large a model is; n_kv_head makes a variant of it."""
        return {name: getattr(self, name) for name in SHAPE}

    def variant(self):
        """{field: value} of every other field that is not its default: what makes it this model."""
        return {
            name: value
            for name, value in vars(self).items()
            if name not in SHAPE and value != getattr(type(self), name)
        }

    @property
    def has_biases(self):
        return self.arch == 'gpt2'

    @property
    def head_size(self):
        return self.n_embd // self.n_head

    @property
    def kv_heads(self):
        return self.n_kv_head or self.n_head

    @property
    def ffn_width(self):
        if self.n_inner:
            return self.n_inner
        return 7 * self.n_embd // 2 if self.arch == 'llama' else 4 * self.n_embd

    @classmethod
    def saved(cls, values):
        """The config of a checkpoint or an import, {field: value}. It is not checked for settings that
        do nothing: other versions of this code accepted some."""
        config = cls()
        unknown = ', '.join(sorted(values.keys() - vars(config).keys()))
        refuse(unknown, f'GPTConfig has no {unknown}: a field of another model.py')
        vars(config).update(values)
        normalize(config)
        return config


# --- where q, k and v come from, and what is mixed into them: questions 1 and 2, as data ------------


def owner_of(config, part, n):
    """The layer whose q, k or v layer n uses: itself, if it borrows none."""
    share = getattr(config, f'share_{part}')
    if isinstance(share, tuple):
        return share[n]
    period = config.n_layer if share is True else share or 1  # off: 1, each layer is its own owner
    return n - n % period


# {name: the layers whose raw tensors layer n (from 0) of L mixes in}. Layer 0 has none: range(0) is empty.
SOURCES = {
    'first': lambda n, L: range(n)[:1],  # Eq. 7
    'previous': lambda n, L: range(n)[-1:],  # Fig. 8
    'all': lambda n, L: range(n),  # Eq. 5
}
# Sources of v that are not layers, or not only. Such a source is a module of `transformer` (a new prefix
# needs a ModuleDict there), called by its path; make_outer_source() makes it, and embed() feeds it.
# residual_layers must name the layers that have one.
OUTER_SOURCES = {
    # A row of the layer's own table, looked up by token: value embeddings (nanochat, modded-nanogpt).
    'token': lambda n, L: [f've.{n}'],
    'first+token': lambda n, L: [*range(n)[:1], f've.{n}'],
    'x0': lambda n, L: [f'vx.{n}'],  # the layer's own projection of x_0 (slowrun)
    'anchor': lambda n, L: ['anchor'],  # one projection of x_0 for all layers (2601.08131)
}


def sources_of(config, part, n):
    """The sources of layer n for its q, k or v. Only a layer that owns its own has any."""
    residual = getattr(config, f'{part}_residual')
    default = () if residual in OUTER_SOURCES else range(config.n_layer)
    is_named = n in (config.residual_layers or default)
    if not residual or not is_named or owner_of(config, part, n) != n:
        return []
    name = residual if isinstance(residual, str) else 'first'
    return list((SOURCES | OUTER_SOURCES)[name](n, config.n_layer))


# {value of residual_weights: (from logits to the gate g, from g to the weight of the layer's own value, the
# settings that it reads)}. Logits start at 0, unless needs_of() says otherwise, as for relu: from 0, an
# activation without a slope there never learns.
GATES = {
    'head': (torch.sigmoid, lambda g: 1 - g, ('gate_inputs', 'gate_bias')),
    'relu': (torch.relu, lambda g: 1.0, ('gate_inputs',)),  # SATFormer (2605.03953)
    'channel': (torch.sigmoid, lambda g: 1 - g, ('gate_rank',)),  # RWKV-7, of one source
}


class Wire(NamedTuple):
    """How a layer gets its q, k or v.

    Of v in layer n > 0: ResFormer Wire(n, heads, True, [0], 'fixed', [0.5, 0.5]),
                         SVFormer  Wire(0, 0, False, [], '', []).
    """

    owner: int  # the layer that has the tensor: itself, if it borrows none
    heads: int  # how many heads it owns; 0: it borrows all
    projects: bool  # whether it has a matrix, W_n
    sources: list  # what is mixed in: layers, or names of other sources
    weighting: str  # how they are weighted, a value of residual_weights; '': nothing is mixed in
    # of each source, and then of H W_n if it projects; empty: a gate makes them
    weights: list


def wire_part(config, part, n):
    """The Wire of layer n's q, k or v."""
    owner = owner_of(config, part, n)
    heads = config.n_head if part == 'q' else config.kv_heads
    if owner != n:  # a borrower owns no heads, or with share_v_heads the first ones
        has_some = part == 'v' and config.share_v_heads
        heads = heads - config.share_v_heads if has_some else 0
    sources = sources_of(config, part, n)
    # Other maps than the current one use them at attention: see wire_attention().
    if not sources or (part == 'v' and config.residual_map != 'current'):
        return Wire(owner, heads, heads > 0, [], '', [])

    weighting = config.residual_weights
    if weighting in GATES and part != 'v':  # gates are of v alone
        weighting = 'fixed'
    count = len(sources)
    projects = True
    weights = [1 / (count + 1)] * (count + 1)  # the mean of all; for ResFormer, 1/2 and 1/2
    if config.residual_lambda:
        source, own = config.residual_lambda
        # A layer whose own weight stays 0 has no matrix. Learned weights only start at these.
        projects = own != 0 or weighting not in ('fixed', *GATES)
        weights = [float(source)] * count + ([float(own)] if projects else [])
    elif weighting in GATES:
        weights = []
    return Wire(owner, heads, projects, sources, weighting, weights)


# --- the model -----------------------------------------------------------------------------------


class Part(nn.Module):
    """The queries, keys or values of layer n; part: q, k or v. A borrower has no parameters."""

    def __init__(self, config, part, n):
        super().__init__()
        self.config = config
        self.wire = wire_part(config, part, n)
        self.key = part, n
        self.owner = part, self.wire.owner
        if self.wire.projects:
            width = self.wire.heads * config.head_size
            self.proj = nn.Linear(config.n_embd, width, config.has_biases)
        if config.qk_norm and part == 'q' and self.wire.heads:
            self.gain = nn.Parameter(torch.full((config.n_head,), 1.44))  # nanochat's 1.2 * 1.2
        self.make_weights()

    def forward(self, x, raw, attended, rope, cache):
        """(raw, attended), (B, heads, T, hs) each: the layer's tensor as later layers mix it in, and as it
        attends with it. Arguments as in Attention.forward(); project() has put H W_n into raw."""
        if not self.wire.heads:
            return raw[self.owner], attended[self.owner]  # SVFormer: V_n = V_1
        part, _ = self.key
        own = raw.get(self.key)  # H W_n; None: it has no matrix
        t = own
        if self.wire.sources:
            t = self.mix(own, [raw[part, source] for source in self.wire.sources], x)
        if part != 'v':
            t = self.norm(t)
            t = rotate(t, *rope) if rope else t
        if cache is not None:  # it ignores queries, and a borrower has returned above
            cache.append(self.key, t)
        if self.owner != self.key:  # share_v_heads: the last heads are its owner's
            own = append_lent_heads(own, raw[self.owner])
            t = append_lent_heads(t, attended[self.owner])
        return own, t

    def mix(self, own, sources, x):
        """The weighted sum (Eq. 7, Eq. 5) of the sources and own, H W_n, (B, heads, T, hs) each; own is
        None if the layer has no matrix."""
        tensors = sources if own is None else [*sources, own]
        # Half precision would round a learned weight, and its gradient, a sum over all positions, would
        # overflow long before any other. So learned weights and gates, and products with them, are fp32.
        with torch.autocast(x.device.type, enabled=False):
            weighted = zip(self.weights(x), tensors, strict=True)
            mixed = sum(w * t for w, t in weighted)  # ResFormer: V_1 / 2 + H W_n / 2
        return mixed.to(tensors[-1].dtype)

    def make_weights(self):
        """The parameters of weights(). What they need beyond the default is said in needs_of()."""
        config = self.config
        kind = self.wire.weighting
        if kind == 'learned':
            self.residual_lambda = nn.Parameter(torch.tensor(self.wire.weights))
        elif kind == 'channel':
            width = config.kv_heads * config.head_size
            self.gate_down = nn.Linear(config.n_embd, config.gate_rank, bias=False)
            self.gate_up = nn.Linear(config.gate_rank, width, bias=False)
            # It starts as in RWKV-7. The setting gate_bias is another one, of head gates.
            self.gate_bias = nn.Parameter(0.73 - 0.4 * (torch.linspace(0, 1, width) - 0.5))
        elif kind in GATES:
            inputs = config.gate_inputs or config.n_embd
            self.gate = nn.Linear(inputs, config.kv_heads, config.gate_bias)

    def weights(self, x):
        """The weight of each source, then of the layer's own tensor: numbers, or tensors that broadcast
        to (B, heads, T, hs). x (B, T, C): what the layer projects."""
        kind = self.wire.weighting
        if kind == 'fixed':
            return self.wire.weights
        if kind == 'learned':
            # A 0-d weight would not widen a half-precision tensor that it multiplies.
            return self.residual_lambda[:, None]

        # A gate g for each token and KV head, or channel. x has the weights' type, because autocast is off.
        if kind == 'channel':
            x = x.to(self.gate_down.weight.dtype)
            g = self.gate_up(self.gate_down(x)) + self.gate_bias
        else:
            x = x.to(self.gate.weight.dtype)
            g = self.gate(x[..., : self.gate.in_features])
        activation, leaves, _ = GATES[kind]
        g = activation(g).unflatten(2, (self.config.kv_heads, -1))
        g = g.transpose(1, 2)  # (B, n_kv_head, T, 1 or hs)
        count = len(self.wire.sources)
        if not self.wire.weights:  # v <- g mean(sources) + leaves(g) own
            return [g / count] * count + [leaves(g)]
        # With residual_lambda, (s, o): v <- s g sum(sources) + o own
        of_sources, of_own = self.wire.weights[:count], self.wire.weights[count:]
        return [weight * g for weight in of_sources] + of_own

    def norm(self, t):
        """q or k (B, heads, T, hs) with qk_norm, where it is on."""
        if not self.config.qk_norm:
            return t
        gain = self.gain[:, None, None] if self.key[0] == 'q' else 1.0
        return (rms_norm(self.config, t) * gain).to(t.dtype)


def wire_attention(config, n):
    """(reads, added, neutreno) of layer n, question 3. reads: the layers to whose keys and values it
    attends, itself last. added: sources, whose mean value is added to its output. neutreno: V_1 - V'_n
    times this number is added, too, where V'_n are the values that it attends with."""
    sources = sources_of(config, 'v', n)
    crossed = sources if config.residual_map == 'cross' else []
    added = sources if config.residual_map == 'identity' else []
    # NeuTRENO's V_1 - V'_n is zero where V'_n is V_1 itself, into which nothing is mixed.
    is_borrowed = owner_of(config, 'v', n) == 0 and not config.share_v_heads
    is_zero = (n == 0 or is_borrowed) and not wire_part(config, 'v', 0).sources
    return [*crossed, n], added, 0.0 if is_zero else config.neutreno


class Attention(nn.Module):
    """Causal self-attention of layer n."""

    def __init__(self, config, n):
        super().__init__()
        self.config = config
        self.q = Part(config, 'q', n)
        self.k = Part(config, 'k', n)
        self.v = Part(config, 'v', n)
        self.reads, self.added, self.neutreno = wire_attention(config, n)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, config.has_biases)
        if config.output_gate:
            self.gate = nn.Linear(config.n_embd, config.n_head, bias=False)

    def forward(self, x, raw, attended, rope, cache, mask):
        """x (B, T, C) -> (B, T, C), and raw and attended with what this layer made.

        raw, attended: {(part, layer): (B, heads, T, hs)}, see the top of this file, of this call's tokens:
        mixing is per token, and a cache keeps what was mixed. rope: (cos, sin), (T, hs) each, or () for
        gpt2. cache: a KVCache or None. mask: attend()'s.
        """
        # One product makes q and k, another one v: see project().
        raw = raw | project(x, self.q, self.k) | project(x, self.v)
        attended = attended.copy()
        for part in (self.q, self.k, self.v):
            raw[part.key], attended[part.key] = part(x, raw, attended, rope, cache)
        q, v = attended[self.q.key], attended[self.v.key]

        # Without the cross map, it reads its own keys and values, cached tokens included, and this is
        # attend(). With it, those of its sources come first.
        kv = attended if cache is None else cache
        keys = [kv['k', n] for n in self.reads]
        values = [kv['v', n] for n in self.reads]
        dropout = self.config.dropout if self.training else 0.0
        y = attend_cross(q, keys, values, dropout, mask)  # (B, nh, T, hs)

        y = self.after(y, x, raw, v).transpose(1, 2).flatten(2)  # (B, T, C)
        return F.dropout(self.c_proj(y), self.config.dropout, self.training), raw, attended

    def after(self, y, x, raw, v):
        """What else happens to attention's output y (B, nh, T, hs). x (B, T, C): what the layer projects;
        raw: of earlier layers, what lent_tensors() names; v: the values of this call's tokens that it
        attended with."""
        if self.config.exclusive:
            y = remove_along(y, to_query_heads(v, y))
        # The identity map adds the mean of the source values (Eq. 6), NeuTRENO a part of V_1 - V'_n, where
        # V'_n are the values that this layer attended with (Eq. 8).
        if self.added:
            mean = sum(raw['v', source] for source in self.added) / len(self.added)
            y = y + to_query_heads(mean, y)
        if self.neutreno:
            y = y + to_query_heads(self.neutreno * (raw['v', 0] - v), y)
        if self.config.output_gate:
            y = y * self.gate(x).sigmoid().transpose(1, 2)[..., None]
        return y


class MLP(nn.Module):
    """SwiGLU (llama) or GELU (gpt2)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.n_embd
        width = config.ffn_width
        has_biases = config.has_biases
        if config.arch == 'llama':
            self.c_gate = nn.Linear(C, width, has_biases)
        self.c_fc = nn.Linear(C, width, has_biases)
        self.c_proj = nn.Linear(width, C, has_biases)

    def forward(self, x):
        if self.config.arch == 'llama':
            x = F.silu(self.c_gate(x)) * self.c_fc(x)
        else:
            x = F.gelu(self.c_fc(x), approximate='tanh')
        return F.dropout(self.c_proj(x), self.config.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config, n):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, n)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, raw, attended, rope, cache, mask):
        """As Attention.forward()."""
        y, raw, attended = self.attn(self.ln_1(x), raw, attended, rope, cache, mask)
        x = x + y
        x = x + self.mlp(self.ln_2(x))
        return x, raw, attended


def lent_tensors(config):
    """{(part, layer, or a source's name)} of the tensors that other layers read: what they borrow, mix in
    or attend to."""
    lent = {('v', 0)} if config.neutreno else set()
    for n in range(config.n_layer):
        for part in 'qkv':
            sources = sources_of(config, part, n)
            read = {owner_of(config, part, n), *sources} - {n}
            lent.update((part, other) for other in read)
            if part == 'v' and config.residual_map == 'cross':
                lent.update(('k', source) for source in sources)
    return lent


class GPT(nn.Module):
    @torch.random.fork_rng(devices=[])  # modules draw weights that init_weights() replaces
    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config
        L = config.n_layer
        C = config.n_embd
        self.transformer = nn.ModuleDict(
            {
                'wte': nn.Embedding(config.vocab_size, C),
                'h': nn.ModuleList(Block(config, n) for n in range(L)),
                've': nn.ModuleDict(),  # by layer, see OUTER_SOURCES
                'vx': nn.ModuleDict(),
                'ln_f': make_norm(config),
            }
        )
        self.lent = lent_tensors(config)
        # The sources that are no layers have names, see OUTER_SOURCES, and those that are have numbers.
        self.outer_sources = sorted(source for _, source in self.lent if isinstance(source, str))
        for name in self.outer_sources:
            self.transformer.set_submodule(name, make_outer_source(config, name))
        if config.arch == 'gpt2':
            self.transformer.wpe = nn.Embedding(config.block_size, C)
        else:
            cos, sin = rope_tables(config)
            self.register_buffer('cos', cos, persistent=False)
            self.register_buffer('sin', sin, persistent=False)
        self.multiply_adds = 0  # per token, without those of nn.Linear: for flops_per_token()
        if config.denseformer:
            # Weights over the embedding and the outputs of blocks 0 to n; at first, only block n's.
            self.transformer.dwa = nn.ParameterList(torch.eye(n + 2)[-1] for n in range(L))
            self.multiply_adds += sum((n + 2) * C for n in range(L))
        if config.attn_res:
            self.transformer.depth_queries = nn.ParameterList(torch.zeros(C) for _ in range(L))
            self.multiply_adds += sum(2 * (n + 2) * C for n in range(L))  # scores, and their sum
        if config.x0_residual:
            self.transformer.x0 = nn.ParameterList(torch.tensor([1.0, 0.0]) for _ in range(L))
            self.multiply_adds += L * 2 * C
        self.lm_head = nn.Linear(C, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        self.needs = {name: needs_of(config, name, p) for name, p in self.named_parameters()}
        self.init_weights(seed)

    @classmethod
    def without_weights(cls, config):
        """A model that takes no memory, to count what it has and what it computes."""
        with torch.device('meta'):
            return cls(config)

    @torch.no_grad()
    def init_weights(self, seed):
        """Draw each matrix called `weight` as needs_of() says, and set each `bias` to 0. All else, such
        as norms, lambdas and `gate_bias`, stays as it was made.

        Each matrix has a generator of its own, seeded by (seed, name). So variants of one size start with
        the same shared weights; a matrix of fewer rows has the first ones.
        """
        for name, p in self.named_parameters():
            if name.endswith('.bias'):
                p.zero_()
            if p.dim() == 1 or not name.endswith('.weight'):
                continue
            needs = self.needs[name]
            digest = hashlib.sha256(f'{seed}/{name}'.encode()).digest()
            number = int.from_bytes(digest[:8], 'little', signed=True)
            generator = torch.Generator().manual_seed(number)
            whole = torch.empty(max(needs.rows, len(p)), *p.shape[1:])
            if needs.is_orthogonal:
                nn.init.orthogonal_(whole, needs.std, generator)
            else:
                whole.normal_(0.0, needs.std, generator=generator)
            p.copy_(whole[: len(p)])

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """Next-token logits, or the training loss.

        idx (B, T) int64 -> (logits, None), logits (B, T, V) or, with last_only, (B, 1, V). With
        targets (B, T), -1 ignored: (None, loss), the mean cross entropy in nats, fp32. With a cache
        from new_cache(), idx continues the tokens in the cache, and is added to them.
        """
        x = self.hidden(idx, cache, last_only)
        if targets is None:
            return self.lm_head(x), None
        total = sum_cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten())
        return None, total / (targets != -1).sum()

    def hidden(self, idx, cache=None, last_only=False):
        """lm_head's input: (B, T, C), or (B, 1, C) with last_only. Arguments as in forward()."""
        T = idx.size(1)
        refuse(
            T > self.config.block_size,
            f'{T} tokens are more than block_size={self.config.block_size}',
        )
        positions = slice(T)
        mask = None
        if cache is not None:
            positions, mask = cache.begin(idx)
        x, x0, raw, rope = self.embed(idx, positions)
        attended = {}
        past = {}  # connect()'s
        for n, block in enumerate(self.transformer.h):
            x = self.connect(n, x, x0, past)
            x, raw, attended = block(x, raw, attended, rope, cache, mask)
            for part in 'qkv':  # forget what no other layer reads
                if (part, n) not in self.lent:
                    del raw[part, n], attended[part, n]
        x = self.connect(self.config.n_layer, x, x0, past)
        if last_only:
            x = x[:, -1:]
        x = self.transformer.ln_f(x)
        if cache is not None:
            cache.position += T  # last, so that a call that fails leaves the cache as it was
        return x

    def embed(self, idx, positions):
        """(x, x_0, raw, rope) as the first block gets them: x and x_0, the embedding's RMSNorm,
        (B, T, C); raw has the sources that are no layers. rope: see Attention."""
        config = self.config
        x = self.transformer.wte(idx)
        # As in nanochat, x_0 is normed also where x is not. Where nobody reads it, compiling drops it.
        x0 = rms_norm(config, x)
        if config.embed_norm:
            x = x0
        rope = ()
        if config.arch == 'llama':
            rope = self.cos[positions], self.sin[positions]
        else:
            x = x + self.transformer.wpe.weight[positions]
        x = F.dropout(x, config.dropout, self.training)

        raw = {}
        for name in self.outer_sources:
            module = self.transformer.get_submodule(name)
            # A table is looked up by token, and a projection reads x_0.
            source = module(idx if isinstance(module, nn.Embedding) else x0)
            raw['v', name] = to_heads(config, source)
        return x, x0, raw, rope

    def connect(self, n, x, x0, past):
        """The input of block n, or of ln_f where n is n_layer, (B, T, C). x: what the block before
        returned, or the embedding; x0: embed()'s; past: a dict that lives for one forward pass."""
        # denseformer: past[n] is this x. attn_res, which excludes it: past[0] is the first block's input,
        # past[n] what block n - 1 added to its own, which is past['input'].
        config = self.config
        if config.denseformer:
            past[n] = x
            if n > 0:
                x = sum(w * past[i] for i, w in enumerate(self.transformer.dwa[n - 1]))
        if config.attn_res and n > 0:
            past[n] = x - past['input']  # what the block added
            added = torch.stack([past[i] for i in range(n + 1)])  # (n + 1, B, T, C)
            scores = (rms_norm(config, added) * self.transformer.depth_queries[n - 1]).sum(-1)
            x = (scores.softmax(0)[..., None] * added).sum(0)
        if config.x0_residual and n < config.n_layer:
            r, s = self.transformer.x0[n]
            x = r * x + s * x0
        if config.attn_res:
            past['input'] = x
            past.setdefault(0, x)
        return x

    def new_cache(self, batch_size, max_len, dtype=None):
        """An empty KVCache for max_len tokens, on the model's device; dtype None: the weights'."""
        return make_cache(self, batch_size, max_len, dtype)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, choose, cache=None):
        """Yield the tokens (B, 1) that continue idx (B, T). choose: last logits (B, V) -> tokens (B, 1).

        Without a cache (slow), each token is computed from the last block_size tokens.
        """
        for _ in range(max_new_tokens):
            context = idx[:, -self.config.block_size :] if cache is None else idx
            logits, _ = self(context, cache=cache, last_only=True)
            new = choose(logits[:, -1])
            idx = torch.cat((idx, new), dim=1) if cache is None else new
            yield new

    def num_params(self, non_embedding=True):
        """Number of weights; non_embedding leaves out embedding tables (wte, wpe, ve) and lm_head."""
        tables = [m.weight for m in self.modules() if isinstance(m, nn.Embedding)]
        left_out = {*tables, self.lm_head.weight} if non_embedding else set()
        return sum(weight.numel() for weight in set(self.parameters()) - left_out)

    def flops_per_token(self, seq_len):
        """Training FLOPs per token as in PaLM's appendix B: 3 x the forward pass's.

        A multiply-add counts as 2: one for each weight of an nn.Linear, lm_head's included, and what
        modules say in `multiply_adds`; attention as the full T x T. The extra queries that
        residual_map='cross' computes and discards are not counted.
        """
        keys = sum(len(block.attn.reads) for block in self.transformer.h) * seq_len
        count = 2 * keys * self.config.n_embd
        for module in self.modules():
            count += module.weight.numel() if isinstance(module, nn.Linear) else 0
            count += getattr(module, 'multiply_adds', 0)
        return 3 * 2 * count


# --- attention's mathematics ----------------------------------------------------------------------


def lacks_gqa(q):
    """Whether no fast attention kernel of q's device shares keys among query heads. On CUDA, none in
    fp32 does, and torch would take one that holds all T x T weights in memory."""
    return q.is_cuda and q.dtype == torch.float32


def to_query_heads(t, y):
    """Values t (B, n_kv_head, T, hs), repeated for each of the query heads of y that share them."""
    return t.repeat_interleave(y.size(1) // t.size(1), dim=1)


def attend(q, k, v, dropout=0.0, mask=None):
    """Attention of q (B, nh, T, hs) to k, v (B, n_kv_head, S, hs); all variants call it.

    mask (T, S): True where a query sees a key. Without a mask: causal (S = T), or one query that
    sees all keys (T = 1).
    """
    B, nh, T, hs = q.size()
    group = nh // k.size(1)
    k, v = k.type_as(q), v.type_as(q)  # a cache may have another type
    if T == 1 and mask is not None and q.is_cuda:  # in compiled decoding
        return attend_one(q, k, v, mask)
    is_causal = mask is None and T > 1
    if group > 1 and T == 1:
        # The query heads of a group become rows, so that any kernel reads its keys only once.
        q = q.reshape(B, nh // group, group, hs)
        if mask is not None:
            mask = mask.repeat(group, 1)
    elif group > 1 and (not is_causal or lacks_gqa(q)):  # kernels that share keys take no mask
        k, v = to_query_heads(k, q), to_query_heads(v, q)
    y = F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal, enable_gqa=q.size(1) != k.size(1)
    )
    # Not view(): some kernels on CUDA store the rows of a position side by side.
    return y.reshape(B, nh, T, hs)


def attend_one(q, k, v, mask):
    """attend() of one query, q (B, nh, 1, hs), by sums of products in fp32, which a compiler fuses.

    A kernel that takes a mask has one block a head: 8 of an H100's 132 multiprocessors.
    """
    rows = q.unflatten(1, (k.size(1), -1)).float()  # (B, n_kv_head, group, 1, hs)
    scores = (rows * k.unsqueeze(2)).sum(-1) / math.sqrt(q.size(3))  # (B, n_kv_head, group, S)
    weights = torch.where(mask, scores, -math.inf).softmax(-1)
    y = (weights[..., None] * v.unsqueeze(2)).sum(-2)
    return y.type_as(q).view_as(q)


def attend_cross(q, keys, values, dropout=0.0, mask=None):
    """One softmax over the keys of one or several layers, causal in each (Eq. 2).

    keys and values: lists of (B, n_kv_head, S, hs), one per layer. Over a whole text, the
    keys of several layers are interleaved in time, and each query is placed after all keys of its
    own time: plain causal attention then needs no mask.
    """
    P = len(keys)
    if P == 1:
        return attend(q, *keys, *values, dropout, mask)
    if mask is not None or q.size(2) == 1:
        if mask is not None:
            mask = mask.repeat(1, P)
        return attend(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), dropout, mask)
    k = torch.stack(keys, dim=3).flatten(2, 3)  # (B, n_kv_head, T * P, hs)
    v = torch.stack(values, dim=3).flatten(2, 3)
    return attend(q.repeat_interleave(P, dim=2), k, v, dropout)[:, :, P - 1 :: P]


def remove_along(y, v):
    """y less its component along v, (B, nh, T, hs) each, computed in fp32 at least."""
    wide = torch.promote_types(y.dtype, torch.float32)
    own = y.to(wide)
    unit = F.normalize(v.to(wide), dim=-1, eps=1e-6)
    return (own - (own * unit).sum(-1, keepdim=True) * unit).to(y.dtype)


def project(x, *parts):
    """{key: (B, heads, T, hs)}: what these Parts of a layer, if they have a matrix, project from x (B, T,
    C). In training this is one product, which a GPU computes faster. It is not without gradients, because a
    decoder would copy the weights for each token, nor where something else, such as LoRA, replaces a
    matrix.

    The values have a product of their own: attention saves v for its backward pass, and as a view of one
    product it would keep the raw q and k in memory. A mixed v is a tensor of its own anyway, but with one
    product the kernels of a value residual took longer on an H100 (results/speed).
    """
    parts = [part for part in parts if part.wire.projects]
    matrices = [part.proj for part in parts]
    are_plain = all(type(matrix) is nn.Linear for matrix in matrices)
    if len(matrices) < 2 or not torch.is_grad_enabled() or not are_plain:
        made = [matrix(x) for matrix in matrices]
    else:
        weight = torch.cat([matrix.weight for matrix in matrices])
        bias = None
        if matrices[0].bias is not None:
            bias = torch.cat([matrix.bias for matrix in matrices])
        sizes = [matrix.out_features for matrix in matrices]
        made = F.linear(x, weight, bias).split(sizes, dim=-1)
    return {part.key: to_heads(part.config, t) for part, t in zip(parts, made, strict=True)}


def to_heads(config, t):
    """(B, T, heads * hs) -> (B, heads, T, hs)."""
    return t.unflatten(2, (-1, config.head_size)).transpose(1, 2)


def append_lent_heads(t, whole):
    """t (B, heads, T, hs) and, behind its heads, the last ones of its owner's tensor, `whole`."""
    return torch.cat((t, whole[:, t.size(1) :]), dim=1)


def rms_norm(config, x):
    """x divided by its RMS over the last dimension, without weights."""
    return F.rms_norm(x, x.shape[-1:], eps=config.norm_eps)


def rotate(x, cos, sin):
    """RoPE of x (B, heads, T, hs), by halves as in Hugging Face's Llama; cos and sin are (T, hs)."""
    x1, x2 = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-x2, x1), dim=-1) * sin).type_as(x)


def rope_tables(config):
    """RoPE's cos and sin, (block_size, hs) each.

    Llama 3's scaling stretches wavelengths longer than original_length / low_freq by `factor`, leaves
    those shorter than original_length / high_freq alone, and blends in between.
    """
    inverse = config.rope_theta ** (
        -torch.arange(0, config.head_size, 2).float() / config.head_size
    )
    if config.rope_scaling:
        factor, low, high, length = config.rope_scaling
        turns = length * inverse / (2 * math.pi)
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
        inverse = inverse * (unscaled + (1 - unscaled) / factor)
    angles = torch.outer(torch.arange(config.block_size).float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


# --- parameters -----------------------------------------------------------------------------------


def make_norm(config):
    kind = nn.RMSNorm if config.arch == 'llama' else nn.LayerNorm
    return kind(config.n_embd, eps=config.norm_eps)


def make_outer_source(config, name):
    """A source that is no layer: a table, (vocab_size, n_kv_head * hs), or a projection of x_0."""
    width = config.kv_heads * config.head_size
    if name.startswith('ve.'):
        return nn.Embedding(config.vocab_size, width)
    return nn.Linear(config.n_embd, width, bias=False)


@dataclass
class Needs:
    """What a parameter needs; GPT.needs has it by the parameter's name."""

    std: float = 0.02  # it starts at N(0, std)
    is_orthogonal: bool = False  # with std as its gain
    rows: int = 0  # it is the first rows of a matrix of so many, if it has fewer (share_v_heads)
    decay: bool = False  # weight decay pulls it to zero
    muon: bool = False  # a matrix that Muon updates, if it is chosen
    rate: str = ''  # the setting that multiplies its learning rate
    logged: bool = False  # at every evaluation, for few numbers of interest
    optional: bool = False  # a checkpoint may lack it: it starts neutral, or as the settings say


def needs_of(config, name, p):
    """The Needs of a parameter. By default a matrix starts at N(0, 0.02) and decays, and in blocks is
    Muon's, and no vector decays. `special` lists what needs something else, by a part of its name; where
    two of them fit, the later one wins."""
    is_matrix = p.dim() > 1
    needs = dict(decay=is_matrix, muon=is_matrix and '.h.' in name)
    # At first, such a parameter is neutral, or a weight that the settings say.
    neutral = dict(logged=True, optional=True, decay=False, muon=False)
    gpt2_std = 0.02 / math.sqrt(2 * config.n_layer)
    # sigmoid(0) = 1/2: at first, a head gate weighs as a fixed residual does. From 0, a ReLU would never learn.
    gate_std = 0.02 if config.residual_weights == 'relu' else 0.0
    special = {
        'c_proj': dict(std=gpt2_std if config.arch == 'gpt2' else 0.02),
        'v.proj': dict(rows=config.kv_heads * config.head_size),
        '.ve.': dict(std=config.n_embd**-0.5, decay=False, rate='table_rate'),
        '.vx.': dict(muon=True),
        '.anchor.': dict(muon=True),
        'attn.gate.': dict(decay=False, muon=False),  # output_gate
        '.v.gate': dict(std=gate_std, decay=False, muon=False),  # gate, gate_down, gate_up
        '.gate_up.': dict(std=0.1, is_orthogonal=True),
        '.residual_lambda': neutral,
        '.dwa.': neutral,
        '.x0.': neutral,
    }
    for words, others in special.items():
        if words in name:
            needs |= others
    return Needs(**needs)


# --- the cache ------------------------------------------------------------------------------------


@dataclass(eq=False)
class KVCache:
    """The attended keys and values of the tokens so far: (B, heads, max_len, hs) for each layer, of the
    heads that it owns. What it borrows is stored once, at its owner.

    The position is a tensor, so that a compiled model decodes without recompiling. In a compiled
    model, attention reads all max_len rows under a mask; otherwise it reads only the filled ones.
    """

    max_len: int
    tensors: dict  # {(part, layer): (B, heads, max_len, hs)}, of layers that own heads
    owners: dict  # {(part, layer): (part, its owner)}
    position: torch.Tensor  # tokens so far, (1,)

    def __post_init__(self):
        for tensor in (*self.tensors.values(), self.position):  # CUDA graphs may write to them
            torch._dynamo.mark_static_address(tensor, guard=False)

    @property
    def nbytes(self):
        """Bytes of keys and values."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def begin(self, idx):
        """Prepare for idx (B, T), more tokens; returns their positions (T,) and the mask for attend()."""
        T = idx.size(1)
        self.positions = self.position + torch.arange(T, device=idx.device)
        if torch.compiler.is_compiling():
            # No Python number may depend on the position.
            self.end = self.max_len
            torch._assert_async(
                self.positions[-1] < self.end, 'more tokens than the cache has room for: max_len'
            )
        else:
            self.end = int(self.position) + T
            refuse(
                self.end > self.max_len,
                f'{T} more tokens do not fit into a cache of max_len={self.max_len}, which holds '
                f'{self.end - T}',
            )
            # One query sees all keys, and a first call (T = end) is causal: attend() needs no mask.
            if T in (1, self.end):
                return self.positions, None
        return self.positions, torch.arange(self.end, device=idx.device) <= self.positions[:, None]

    def append(self, key, t):
        """Store keys or values t (B, heads, T, hs) at the positions that begin() gave. Queries are not
        stored."""
        if key in self.tensors:
            tensor = self.tensors[key]
            tensor.index_copy_(2, self.positions, t.detach().to(tensor.dtype))

    def __getitem__(self, key):
        owner = self.owners[key]
        if key not in self.tensors:
            return self[owner]
        t = self.tensors[key][:, :, : self.end]
        return t if key == owner else append_lent_heads(t, self[owner])


def make_cache(model, batch_size, max_len, dtype):
    """An empty KVCache, as in GPT.new_cache()."""
    config = model.config
    refuse(
        max_len > config.block_size,
        f'max_len={max_len} is more than block_size={config.block_size}: '
        'only without a cache can generation go on, with the last block_size tokens',
    )
    zeros = model.lm_head.weight.new_zeros
    parts = [part for block in model.transformer.h for part in (block.attn.k, block.attn.v)]
    tensors = {}
    for part in parts:
        if part.wire.heads:
            shape = batch_size, part.wire.heads, max_len, config.head_size
            tensors[part.key] = zeros(shape, dtype=dtype)
    owners = {part.key: part.owner for part in parts}
    return KVCache(max_len, tensors, owners, zeros(1, dtype=torch.int64))


# --- the loss -------------------------------------------------------------------------------------


LOSS_CHUNK = 4096  # rows at least; at 50,304 ids their fp32 logits take 824 MB


# With more chunks than this, the compiler fuses the sum of their weight gradients, and for it keeps the
# logits of most of them (82M, 32 x 2,048: 18.7 GiB with 16 chunks, 14.4 with 8).
MOST_CHUNKS = 8


class LinearCrossEntropy(torch.autograd.Function):
    """Sum over rows of the cross entropy of x @ weight.T, in chunks.

    The (N, V) logits never exist at once. A chunk's logits become its gradients right away, so that
    nothing is computed twice (as in Liger's fused kernel). FP16-safe: the loss scale is applied
    in backward, in fp32.

    x (N, C), weight (V, C), targets (N,) int64 with -1 ignored; want_grad: whether gradients are
    wanted, which forward() itself cannot see; returns a fp32 scalar (float64 for float64 inputs).
    """

    @staticmethod
    def forward(ctx, x, weight, targets, want_grad):
        kind = x.device.type
        dtype = x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(kind, enabled=False):
            w = weight.to(dtype)
            total = torch.zeros((), dtype=wide, device=x.device)
            grad_x = []
            grad_w = torch.zeros(weight.shape if want_grad else 0, dtype=wide, device=x.device)
            size = max(LOSS_CHUNK, math.ceil(len(x) / MOST_CHUNKS))
            for xc, tc in zip(x.split(size), targets[:, None].split(size), strict=True):
                xc = xc.to(dtype)
                counted = (tc != -1).to(wide)
                log_p = F.log_softmax(xc @ w.T, dim=1, dtype=wide)
                # Not total -=: when torch 2.11 compiles it, a result computed in place silently
                # loses its gradient.
                total = total - (log_p.gather(1, tc.clamp(min=0)) * counted).sum()
                if want_grad:
                    # Not a scatter: this comparison fuses when compiled.
                    hit = torch.arange(len(w), device=x.device) == tc
                    grad = log_p.exp_().sub_(hit.to(wide)).mul_(counted).to(dtype)
                    grad_x.append(grad @ w)
                    # / 64, undone below, so that an FP16 sum over rows stays finite.
                    grad_w += (grad.T @ (xc / 64)).to(wide)
        ctx.save_for_backward(torch.cat(grad_x) if grad_x else None, grad_w.mul_(64))
        ctx.dtypes = x.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # it would silently be wrong
            raise RuntimeError(
                'the loss has no second derivative; take cross_entropy of the logits'
            )
        grad_x, grad_w = ctx.saved_tensors
        # The product with a scalar has the tensor's type: in FP16 the loss scale would overflow.
        grad_x = grad_x.to(grad.dtype)
        x_dtype, weight_dtype = ctx.dtypes
        return (grad * grad_x).to(x_dtype), (grad * grad_w).to(weight_dtype), None, None


def sum_cross_entropy(x, weight, targets):
    """LinearCrossEntropy, with gradients where they are wanted."""
    return LinearCrossEntropy.apply(x, weight, targets, torch.is_grad_enabled())


# --- what is refused ------------------------------------------------------------------------------


def refuse(condition, message):
    if condition:
        raise ValueError(message)


RESIDUALS = ('v_residual', 'q_residual', 'k_residual')
# {value of residual_map or residual_weights: settings that may not be on with it}
EXCLUDES = {
    'identity': ('residual_lambda', 'residual_weights'),
    'cross': ('residual_lambda', 'residual_weights', 'share_v_heads'),
    'channel': ('residual_lambda',),
}
# {setting that is a number: its least value}, 1 where its default is 1 or more, else 0.
LEAST = {
    f.name: min(int(f.default), 1) for f in fields(GPTConfig) if type(f.default) in (int, float)
}
LEAST['neutreno'] = -1e300  # it may be negative
# signature() compares these settings by the wires that they make, those of a gate by value where it is
# used, and all others by value. One of yours belongs here if the wiring or a gate of GATES alone reads it.
WIRED = {
    *RESIDUALS,
    *(
        'residual_weights residual_lambda residual_layers residual_map '
        'gate_inputs gate_bias gate_rank '
        'share_q share_k share_v share_v_heads neutreno'
    ).split(),
}


def choices(name):
    """All values of a setting that is one of a few; None for another setting."""
    if name in RESIDUALS:
        return False, True, *SOURCES, *(OUTER_SOURCES if name == 'v_residual' else ())
    return {
        'arch': ('llama', 'gpt2'),
        'residual_map': ('current', 'identity', 'cross'),
        'residual_weights': ('fixed', 'learned', *GATES),
    }.get(name)


def is_sharing(share, n_layer):
    if not isinstance(share, tuple):
        return isinstance(share, bool) or share > 1
    are_owners = [type(o) is int and 0 <= o <= n and share[o] == o for n, o in enumerate(share)]
    return all(are_owners) and len(share) == n_layer and share != tuple(range(n_layer))


def are_numbers(values, count):
    are_finite = [type(value) in (int, float) and math.isfinite(value) for value in values]
    return all(are_finite) and len(values) == count


def check_ranges(config):
    below = {
        'dropout': 1,
        'n_layer': 1001,
        'gate_inputs': config.n_embd + 1,
        'share_v_heads': config.kv_heads,
    }
    for name, value in vars(config).items():
        allowed = choices(name)
        refuse(allowed and value not in allowed, f'{name}={value!r} is not one of {allowed}')
        if isinstance(value, int | float):
            low = LEAST.get(name, 0)
            high = below.get(name, math.inf)
            refuse(not low <= value < high, f'{name}={value} must be {low} or more, below {high}')

    n_embd, n_head, n_kv_head = config.n_embd, config.n_head, config.kv_heads
    refuse(n_embd % n_head, f'n_embd={n_embd} is not divisible by n_head={n_head}')
    refuse(n_head % n_kv_head, f'n_head={n_head} is not divisible by n_kv_head={n_kv_head}')
    is_odd = config.arch == 'llama' and config.head_size % 2
    refuse(is_odd, f'n_embd={n_embd} / n_head={n_head} is odd, but RoPE rotates pairs')
    for part in 'qkv':
        share = getattr(config, f'share_{part}')
        refuse(
            not is_sharing(share, config.n_layer),
            f'share_{part}={share} must be True, how many layers share (2 or more), or, for each of '
            f'the {config.n_layer} layers, its owner: itself or an earlier layer that names itself',
        )
    refuse(
        config.residual_lambda and not are_numbers(config.residual_lambda, 2),
        f'residual_lambda={config.residual_lambda} must be two weights: (each source, own)',
    )
    scaling = config.rope_scaling
    is_scaling = are_numbers(scaling, 4) and min(scaling) > 0 and scaling[1] < scaling[2]
    refuse(
        scaling and not is_scaling,
        f'rope_scaling={scaling} must be (factor, low_freq < high_freq, original_length), positive',
    )


def wires_of(config):
    """{(part, n): its Wire}"""
    layers = range(config.n_layer)
    return {(part, n): wire_part(config, part, n) for n in layers for part in 'qkv'}


def check_contradictions(config):
    """Refuse what no wiring can be made of."""
    for setting in ('residual_map', 'residual_weights'):
        value = getattr(config, setting)
        for name in EXCLUDES.get(value, ()):
            refuse(name in config.variant(), f'{setting}={value} excludes {name}; drop one of them')
    refuse(
        config.v_residual in OUTER_SOURCES and config.residual_map != 'current',
        f'v_residual={config.v_residual!r} is no layer, and goes with residual_map=current alone; drop '
        'one of them',
    )
    refuse(
        config.attn_res and config.denseformer,
        'attn_res and denseformer exclude each other; drop one of them',
    )
    wires = wires_of(config)
    # The keys of the raw tensors that are read: as sources, by who borrows some heads, and by NeuTRENO.
    read = {('v', 0)} if config.neutreno else set()
    for (part, n), wire in wires.items():
        read.update((part, source) for source in wire.sources)
        if wire.heads and wire.owner != n:
            read.add((part, wire.owner))
    for (part, n), wire in wires.items():
        refuse(
            not any(wires[other, n].projects for other in 'qkv'),
            f'layer {n} would project none of q, k, v; turn off share_q, share_k or share_v',
        )
        refuse(
            (part, n) in read and not wires[part, wire.owner].projects,
            f'with residual_lambda={config.residual_lambda}, layer {n} has no {part} of its own, which '
            'would be read; name other sources or residual_layers',
        )
        refuse(
            wire.weighting == 'channel' and len(wire.sources) > 1,
            f'residual_weights=channel is for one source, and layer {n} has {len(wire.sources)} with '
            f'v_residual={config.v_residual!r}',
        )
    layers = config.residual_layers
    for n in layers:
        is_layer = type(n) is int and n in range(config.n_layer) and layers.count(n) == 1
        for part in 'qkv':
            residual = getattr(config, f'{part}_residual')
            refuse(
                residual and not (is_layer and sources_of(config, part, n)),
                f'residual_layers={layers} names {n!r}; name, once each, layers that project their own '
                f'{part} (share_{part}) and get a source ({part}_residual={residual!r})',
            )


def normalize(config):
    """Refuse what no model can be made of. What says the same as 0 becomes 0."""
    for name, value in vars(config).items():
        if isinstance(value, list):  # JSON has no tuples
            setattr(config, name, tuple(value))
    check_ranges(config)
    check_contradictions(config)
    if config.n_kv_head == config.n_head:
        config.n_kv_head = 0
    if config.gate_inputs == config.n_embd:
        config.gate_inputs = 0


def signature(config):
    """All that a model is made of: how its layers are wired, and the settings that are read."""
    wires = wires_of(config)
    read = vars(config).keys() - WIRED
    if config.arch == 'gpt2':
        read -= {'rope_theta', 'rope_scaling'}
    for wire in wires.values():
        if wire.weighting in GATES:
            read.update(GATES[wire.weighting][2])
    attention = [wire_attention(config, n) for n in range(config.n_layer)]
    return wires, attention, {name: getattr(config, name) for name in read}


def changes_the_model(config, name):
    """Whether a setting changes what a model is made of, compared with its default."""
    plain = copy.copy(config)  # a copy is not checked
    setattr(plain, name, getattr(type(config), name))
    return signature(config) != signature(plain)


def check(config):
    """The one rule: a setting that is on must change what a model is made of. Weights and layers of
    residuals may also spell out their default."""
    is_outer = config.v_residual in OUTER_SOURCES
    refuse(
        is_outer and not config.residual_layers,
        f'v_residual={config.v_residual!r} needs residual_layers: name the layers that have the source',
    )
    residuals = [name for name in RESIDUALS if getattr(config, name)]
    free = ('residual_lambda', 'residual_layers') if residuals else ()
    for name, value in config.variant().items():
        refuse(
            name not in free and not changes_the_model(config, name),
            f'{name}={value!r} does nothing beside the other settings; drop it, or give '
            f'--{name}={getattr(GPTConfig, name)}',
        )
    # With sources of weight 0, (0, 1) is vanilla and refused, and (0, 0.5) scales a layer's own values and
    # is allowed, unless a source or a gate has parameters: they would get no gradient. Learned weights
    # only start there.
    weights = config.residual_lambda
    has_parameters = is_outer or config.residual_weights in GATES
    refuse(
        weights[:1] == (0,)
        and config.residual_weights in ('fixed', *GATES)
        and (has_parameters or weights[1] == 1),
        f'residual_lambda={weights} gives the sources of {" and ".join(residuals)} the weight 0 for ever; '
        'give them another',
    )
