"""
A Llama-like GPT in which layers may use the values (or keys, or queries) of earlier layers.

The wiring of a model is three questions per layer, asked separately of q, k and v:
  1. Where does it come from?   Projected here (the layer *owns* it), or borrowed from its owner.
  2. What is mixed into it?     Nothing, or raw tensors of earlier layers, its *sources*.
  3. What happens at attention? See residual_map and neutreno in GPTConfig.

Layers 1 to 4 of   vanilla    ResFormer       SVFormer    CLA
                     v1        v1──┬──┬──┐     v1          v1  k1
                     v2        v2<─┘  │  │     │           │   │
                     v3        v3<────┘  │     │           v3  k3
                     v4        v4<───────┘     │           │   │
(vN: layer N owns its values; │: it borrows those above; <: it mixes the source into its own.)

Two kinds of tensors travel down the layers. *Raw*: as projected, unmixed, before RoPE; sources are
raw. *Attended*: mixed and rotated; attention and borrowers read it.

The paper: Zhou et al., Value Residual Learning, arXiv:2410.17897 (ResFormer, SVFormer).
"""

import collections
import copy
import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import nn


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
    qk_norm: bool = False  # RMSNorm of each head's q and k before RoPE, and a learned gain of q
    exclusive: bool = False  # a head's output without what lies along its own value (2603.09078)
    # residuals: what is mixed into v, q or k
    v_residual: bool = False  # ResFormer (Eq. 7): V_n <- (V_1 + V_n) / 2 for n >= 2
    q_residual: bool = False  # the same mixing on queries, before RoPE (Fig. 6)
    k_residual: bool = False  # the same mixing on keys, before RoPE (Fig. 6)
    residual_from: str = 'first'  # the sources, a name in SOURCES (Fig. 8, Eq. 5)
    residual_lambda: tuple = ()  # weights (each source, own); empty: the mean of all
    residual_learned: bool = False  # the weights are parameters, which start from these
    residual_layers: tuple = ()  # layers (0-based) that mix, as in Sparse ResFormer; (): all but 0
    residual_map: str = 'current'  # values mapped by current (Eq. 4), identity (6), cross (2)
    residual_gate: str = ''  # weights of v from x, per token: head (nanochat) or channel (RWKV-7)
    residual_gate_inputs: int = 0  # of head: how many channels of x it reads; 0: all
    residual_gate_bias: bool = False  # of head: with a bias
    residual_gate_rank: int = 32  # of channel: its inner width
    # sharing: what is borrowed
    share_q: bool = False  # borrow the queries of an earlier layer (Fig. 13)
    share_k: bool = False  # borrow the keys of an earlier layer (Figs. 4, 13; with share_v: CLA)
    share_v: bool = False  # SVFormer (Eq. 10): every layer attends with V_1
    share_q_every: int = 0  # m: each m layers share their first layer's; 0: all share layer 1's
    share_k_every: int = 0  # likewise for keys
    share_v_every: int = 0  # likewise for values (Fig. 14)
    share_q_from: tuple = ()  # instead: for each layer, the layer that owns its queries
    share_k_from: tuple = ()  # likewise for keys
    share_v_from: tuple = ()  # likewise for values
    share_v_heads: int = 0  # borrow this many value heads, the last ones; 0: all (SkipV1Former)
    # the other models that the paper compares with
    neutreno: float = 0.0  # NeuTRENO's lambda: U_n += lambda (V_1 - values attended with) (Eq. 8)
    denseformer: bool = False  # after each block, a learned average of all block outputs

    def __post_init__(self):
        self.prepare()
        check(self)

    @classmethod
    def saved(cls, values):
        """The config of a checkpoint or an import, {field: value}. Settings of it may change nothing:
        other versions of this code accepted them."""
        config = cls()
        unknown = values.keys() - vars(config).keys()
        refuse(
            unknown, f'GPTConfig has no {", ".join(sorted(unknown))}: a field of another model.py'
        )
        vars(config).update(values)
        config.prepare()
        return config

    def prepare(self):
        """Refuse what no model can be made of. Take a value as the default where it equals what the
        default stands for."""
        for name, value in vars(self).items():
            if isinstance(value, list):  # JSON has no tuples
                setattr(self, name, tuple(value))
        check_ranges(self)
        check_contradictions(self)
        if self.n_kv_head == self.n_head:
            self.n_kv_head = 0
        if self.residual_gate_inputs == self.n_embd:
            self.residual_gate_inputs = 0
        switches = {f'share_{part}_every': [f'share_{part}'] for part in 'qkv'}
        switches |= dict.fromkeys(('residual_lambda', 'residual_layers'), RESIDUALS)
        for name, others in switches.items():
            is_read = any(getattr(self, other) for other in others)
            if is_read and not acts(self, name):
                setattr(self, name, getattr(type(self), name))

    def shape(self):
        """{field: value} of the fields that say how large the model is."""
        return {name: getattr(self, name) for name in SHAPE}

    def variant(self):
        """{field: value} of every other field that is not its default: what makes it this model."""
        others = [f for f in fields(self) if f.name not in SHAPE]
        return {f.name: value for f in others if (value := getattr(self, f.name)) != f.default}

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


SHAPE = ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_inner')
RESIDUALS = ('v_residual', 'q_residual', 'k_residual')

# --- the wiring ----------------------------------------------------------------------------------

# residual_from: the sources of layer n (0-based) in a model of L layers, which are layers before it. A
# word in place of a layer is a source of another kind: let hidden() put its tensor, (B, heads, T, hs),
# into raw[part, word].
SOURCES = {
    'first': lambda n, L: range(n)[:1],  # ResFormer (Eq. 7)
    'previous': lambda n, L: range(n)[-1:],  # Fig. 8
    'all': lambda n, L: range(n),  # Eq. 5
    # A row of the layer's own table, looked up by token: value embeddings (nanochat, modded-nanogpt).
    'token': lambda n, L: [f'token {n}'],
    'first+token': lambda n, L: [*range(n)[:1], f'token {n}'],
}

# residual_gate: the settings that each gate reads. See Attention.gated().
GATES = {
    '': (),
    'head': ('residual_gate_inputs', 'residual_gate_bias', 'residual_lambda'),
    'channel': ('residual_gate_rank',),
}


@dataclass
class Layer:
    """How layer n is wired. A key, (part, layer), names a raw or an attended tensor."""

    n: int
    owner: dict  # {part: the layer whose q, k or v it attends with}; vanilla: itself
    heads: dict  # {part: the number of heads that it projects}; 0: it borrows them
    joins: dict  # {part: key of the tensor whose last heads it borrows beside its own}
    sources: dict  # {part: keys of the raw tensors that are mixed into its own}, such as ('v', 0)
    weights: list  # of each source in this mixture, then of its own; []: nothing is mixed
    learned: bool  # whether these weights are parameters, which start there
    gate: dict  # {setting: value} of what makes the weights of v follow from x; {}: they do not
    reads: dict  # {k, v: keys of what it attends to}: with the cross map its sources', then its own
    added: list  # keys of the raw values whose mean is added to attention's output
    neutreno: float  # how much of V_1 - V_n is added to it
    raw_later: list = ()  # keys of the raw tensors that later layers read
    attended_later: list = ()  # likewise of the attended ones


def wire(config):
    """The wiring of a model as data: a Layer for each layer."""
    layers = [wire_layer(config, n) for n in range(config.n_layer)]
    raw, attended = set(), set()
    for layer in reversed(layers):
        layer.raw_later = sorted(raw, key=str)  # a source need not be a layer number
        layer.attended_later = sorted(attended)
        joined = layer.joins.values()
        raw.update(layer.added, joined, *layer.sources.values())
        if layer.neutreno:
            raw.add(('v', 0))
        attended.update(layer.owner.items(), joined, *layer.reads.values())
    return layers


def wire_layer(config, n):
    """Layer n, but for what later layers read."""
    owners = {part: owners_of(config, part) for part in 'qkv'}
    heads = {'q': config.n_head, 'k': config.kv_heads, 'v': config.kv_heads}
    heads = {part: heads[part] if owners[part][n] == n else 0 for part in 'qkv'}
    joins = {}
    if config.share_v_heads:  # a borrower, too, attends with values of its own
        if not heads['v']:
            heads['v'] = config.kv_heads - config.share_v_heads
            joins['v'] = 'v', owners['v'][n]
        owners['v'] = {layer: layer for layer in range(config.n_layer)}

    def keys(part, layers):
        # A source that is no layer has no owner.
        return [(part, owners[part].get(layer, layer)) for layer in layers]

    sources = {part: sources_of(config, part, n) for part in 'qkv'}
    of_values = {config.residual_map: sources['v']}
    sources['v'] = of_values.get('current', [])  # those that are mixed in before attention
    count = max(len(layers) for layers in sources.values())
    uniform = 1 / (count + 1)
    source, own = config.residual_lambda or (uniform, uniform)
    weights = [float(source)] * count + [float(own)]
    gate = GATES[config.residual_gate] if sources['v'] and not config.residual_learned else ()
    # NeuTRENO's V_1 - V_n is zero where nothing is mixed into V_1, and where all layers attend with it.
    differs = (n > 0 or sources['v']) and any(owners['v'].values())
    return Layer(
        n,
        owner={part: owners[part][n] for part in 'qkv'},
        heads=heads,
        joins=joins,
        sources={part: keys(part, sources[part]) for part in 'qkv'},
        weights=weights if count else [],
        learned=config.residual_learned and count > 0,
        gate={name: getattr(config, name) for name in gate},
        reads={part: keys(part, (*of_values.get('cross', ()), n)) for part in 'kv'},
        added=keys('v', of_values.get('identity', ())),
        neutreno=config.neutreno if differs else 0.0,
    )


def owners_of(config, part):
    """{layer: the one whose q, k or v it borrows; itself if it borrows none}."""
    every = 1
    if getattr(config, f'share_{part}'):
        every = getattr(config, f'share_{part}_every') or config.n_layer
    owners = {n: n - n % every for n in range(config.n_layer)}
    return owners | dict(enumerate(getattr(config, f'share_{part}_from')))


def sources_of(config, part, n):
    """The sources of layer n for its q, k or v. Only a layer that projects its own has any."""
    every = () if 'token' in config.residual_from else range(config.n_layer)  # tables are named
    is_named = n in (config.residual_layers or every)
    mixes = getattr(config, f'{part}_residual') and owners_of(config, part)[n] == n and is_named
    # The source's weight is 0 for ever.
    is_idle = config.residual_lambda == (0, 1) and not config.residual_learned
    if not mixes or is_idle:
        return []
    return list(SOURCES[config.residual_from](n, config.n_layer))


# --- the model -----------------------------------------------------------------------------------


@dataclass
class Needs:
    """What a parameter needs, said where it is made; GPT.needs has it by the parameter's name."""

    # It starts as draw(tensor, generator=...) makes it, seeded by (seed, name, block). None: as made.
    draw: Callable | None = None
    blocks: dict = field(default_factory=dict)  # {block: its rows}; {}: all rows are one block
    drawn: int = 0  # a block of fewer rows than these takes the first of them
    muon: tuple = ()  # rows of each matrix that Muon updates, if it is chosen; (): AdamW's
    rate: str = ''  # the setting that multiplies its learning rate
    decay: bool = False  # weight decay pulls it to zero
    logged: bool = False  # at every evaluation, for few numbers of interest
    optional: bool = False  # a checkpoint may lack it: it starts neutral, or as the settings say


def parameter(data, **needs):
    """An nn.Parameter and what it needs."""
    p = nn.Parameter(data)
    p.needs = Needs(**needs)
    return p


def neutral(numbers):
    """The parameter of a few weights that start where nothing changes, or as the settings say."""
    return parameter(torch.tensor(numbers), logged=True, optional=True)


def normal(std):
    return functools.partial(nn.init.normal_, std=std)


def make(kind, *shape, draw=None, decay=True, **needs):
    """An nn.Linear or an nn.Embedding and what its weight needs. It starts at N(0, 0.02) unless
    `draw` says otherwise, a bias at zero."""
    module = kind(*shape, device='meta')  # else torch would draw values that nobody uses
    module.weight = parameter(
        torch.empty(module.weight.shape), draw=draw or normal(0.02), decay=decay, **needs
    )
    if getattr(module, 'bias', None) is not None:
        module.bias = parameter(torch.zeros(module.bias.shape), **needs | {'muon': ()})
    return module


def make_c_proj(config, width):
    std = 0.02 / math.sqrt(2 * config.n_layer) if config.arch == 'gpt2' else 0.02
    C = config.n_embd
    return make(nn.Linear, width, C, config.arch == 'gpt2', draw=normal(std), muon=(C,))


def make_table(config):
    """A value for each token, (vocab_size, n_kv_head * hs)."""
    shape = config.vocab_size, config.kv_heads * config.head_size
    draw = normal(config.n_embd**-0.5)
    return make(nn.Embedding, *shape, draw=draw, decay=False, rate='table_rate')


class Attention(nn.Module):
    """Causal self-attention of a layer. Rows of c_attn: q, then k, then v, of the heads it projects."""

    def __init__(self, config, wiring):
        super().__init__()
        self.config = config
        self.wiring = wiring
        heads = wiring.heads
        C, hs, kv_heads = config.n_embd, config.head_size, config.kv_heads
        self.rows = {part: heads[part] * hs for part in 'qkv' if heads[part]}
        rows = sum(self.rows.values())
        self.c_attn = make(
            nn.Linear,
            C,
            rows,
            config.arch == 'gpt2',
            blocks=self.rows,
            drawn=kv_heads * hs,  # also of v where it projects fewer heads
            muon=(*self.rows.values(),),
        )
        self.c_proj = make_c_proj(config, C)
        if config.qk_norm and heads['q']:
            self.q_gain = parameter(torch.full((config.n_head,), 1.44))
        gate = config.residual_gate if wiring.gate else ''
        if gate == 'head':
            inputs, bias = config.residual_gate_inputs or C, config.residual_gate_bias
            self.gate = make(nn.Linear, inputs, kv_heads, bias, draw=normal(0.0), decay=False)
        if gate == 'channel':
            rank = config.residual_gate_rank
            width = kv_heads * hs
            near_zero = functools.partial(nn.init.orthogonal_, gain=0.1)
            self.gate_down = make(nn.Linear, C, rank, False, draw=normal(0.0), decay=False)
            self.gate_up = make(nn.Linear, rank, width, False, draw=near_zero, decay=False)
            self.gate_bias = parameter(0.73 - 0.4 * (torch.linspace(0, 1, width) - 0.5))
        if wiring.learned:
            self.residual_lambda = neutral(wiring.weights)

    def forward(self, x, raw, attended, rope, cache, mask):
        """x (B, T, C) -> (B, T, C), and raw and attended as the next layer gets them.

        raw, attended: {(part, layer): (B, heads, T, hs)}, see the top of this file. rope: (cos, sin),
        (T, hs) each, or None. cache: a KVCache or None. mask: attend()'s.
        """
        B, T, C = x.size()
        config, wiring, n = self.config, self.wiring, self.wiring.n
        raw, attended = dict(raw), dict(attended)  # the caller keeps its own

        # Project the parts that this layer owns, and mix their sources into them.
        projected = self.c_attn(x).split(list(self.rows.values()), dim=2)
        for part, t in zip(self.rows, projected, strict=True):
            t = to_heads(config, t)  # (B, nh or n_kv_head, T, hs)
            raw[part, n] = join(t, raw, wiring.joins.get(part))
            if wiring.sources[part]:
                t = self.mix(part, t, [raw[key] for key in wiring.sources[part]], x)
            if config.qk_norm and part != 'v':
                gain = self.q_gain[:, None, None] if part == 'q' else 1.0
                t = (rms_norm(config, t) * gain).to(t.dtype)
            if part != 'v' and rope is not None:
                t = rotate(t, *rope)
            attended[part, n] = join(t, attended, wiring.joins.get(part))
            if cache is not None:
                cache.append((part, n), t)

        # Attend with the owners' tensors: in SVFormer, owner['v'] is layer 0 everywhere.
        dropout = config.dropout if self.training else 0.0
        kv = attended if cache is None else cache
        keys, values = ([kv[key] for key in wiring.reads[part]] for part in 'kv')
        q = attended['q', wiring.owner['q']]
        v = attended['v', wiring.owner['v']]  # of this call's tokens alone
        y = attend_cross(q, keys, values, dropout, mask)  # (B, nh, T, hs)

        if config.exclusive:
            y = without(y, to_query_heads(v, y))

        # The identity map adds the mean of the source values (Eq. 6), NeuTRENO V_1 - V'_n, V'_n the
        # values that this layer attended with (Eq. 8).
        if wiring.added:
            mean = sum(raw[key] for key in wiring.added) / len(wiring.added)
            y = y + to_query_heads(mean, y)
        if wiring.neutreno:
            y = y + to_query_heads(wiring.neutreno * (raw['v', 0] - v), y)

        y = y.transpose(1, 2).reshape(B, T, C)
        y = F.dropout(self.c_proj(y), config.dropout, self.training)
        raw = {key: t for key, t in raw.items() if key in wiring.raw_later}
        attended = {key: t for key, t in attended.items() if key in wiring.attended_later}
        return y, raw, attended

    def mix(self, part, own, sources, x):
        """The layer's own projection of a part and its sources, (B, heads, T, hs) each, as their
        weighted sum (Eq. 7, Eq. 5)."""
        # Half precision would round a learned weight, and the gradient of one, a sum over all
        # positions, would overflow long before any other. So whatever has weights is multiplied in
        # their type.
        with torch.autocast(own.device.type, enabled=False):
            *of_sources, of_own = self.weights(part, x)
            mixed = of_own * own
            for weight, source in zip(of_sources, sources, strict=True):
                mixed = mixed + weight * source  # ResFormer: V_n / 2 + V_1 / 2
        return mixed.to(own.dtype)

    def weights(self, part, x):
        """One weight per source, then the layer's own: numbers, or tensors that broadcast to
        (B, heads, T, hs). x (B, T, C): what the layer projects."""
        if self.wiring.learned:
            return self.residual_lambda[:, None]
        if part == 'v' and self.wiring.gate:
            return self.gated(x)
        return self.wiring.weights

    def gated(self, x):
        """The weights of v from a gate g of each token, between 0 and 1.

        head: g = sigmoid(W x + b) for each KV head. The sources' mean has g and the layer's own value
        1 - g, or, with residual_lambda (s, o), each source s g and the layer's own value o.
        channel: g = sigmoid(b + (x A) B) for each channel, of the one source; 1 - g for its own.
        """
        x = x.to(self.c_attn.weight.dtype)  # autocast is off
        config = self.config
        if config.residual_gate == 'head':
            logits = self.gate(x[..., : self.gate.in_features])
        else:
            logits = self.gate_up(self.gate_down(x)) + self.gate_bias
        gates = logits.sigmoid().unflatten(2, (config.kv_heads, -1))
        g = gates.transpose(1, 2)  # (B, n_kv_head, T, 1 or hs)
        count = len(self.wiring.sources['v'])
        if config.residual_lambda:
            source, own = config.residual_lambda
            return [source * g] * count + [own]
        return [g / count] * count + [1 - g]


class MLP(nn.Module):
    """SwiGLU (llama; rows of c_fc: gate, then up) or GELU (gpt2)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        width, bias = config.ffn_width, config.arch == 'gpt2'
        parts = 2 if config.arch == 'llama' else 1
        # Muon takes gate and up for two matrices.
        self.c_fc = make(nn.Linear, config.n_embd, parts * width, bias, muon=(width,) * parts)
        self.c_proj = make_c_proj(config, width)

    def forward(self, x):
        x = self.c_fc(x)
        if self.config.arch == 'llama':
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        else:
            x = F.gelu(x, approximate='tanh')
        return F.dropout(self.c_proj(x), self.config.dropout, self.training)


def norm(config):
    kind = nn.RMSNorm if config.arch == 'llama' else nn.LayerNorm
    return kind(config.n_embd, eps=config.norm_eps)


def rms_norm(config, x):
    """x divided by its RMS over the last dimension, without weights."""
    return F.rms_norm(x, x.shape[-1:], eps=config.norm_eps)


class Block(nn.Module):
    def __init__(self, config, wiring):
        super().__init__()
        self.ln_1 = norm(config)
        self.attn = Attention(config, wiring)
        self.ln_2 = norm(config)
        self.mlp = MLP(config)

    def forward(self, x, *others):
        """As Attention.forward()."""
        y, raw, attended = self.attn(self.ln_1(x), *others)
        x = x + y
        x = x + self.mlp(self.ln_2(x))
        return x, raw, attended


class GPT(nn.Module):
    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config
        self.wiring = wire(config)
        self.table = None, None  # value_table()'s: (what it was made of, the table)
        self.transformer = nn.ModuleDict(
            {
                'wte': make(nn.Embedding, config.vocab_size, config.n_embd),
                'h': nn.ModuleList(Block(config, layer) for layer in self.wiring),
                'ln_f': norm(config),
            }
        )
        if config.arch == 'gpt2':
            self.transformer.wpe = make(nn.Embedding, config.block_size, config.n_embd)
        else:
            for name, table in zip(('cos', 'sin'), rope_tables(config), strict=True):
                self.register_buffer(name, table, persistent=False)
        if config.denseformer:
            # Weights over the embedding and the outputs of blocks 0 to n; at first, only block n's.
            averages = [neutral([0.0] * (n + 1) + [1.0]) for n in range(config.n_layer)]
            self.transformer.dwa = nn.ParameterList(averages)
        if config.x0_residual:
            weights = [neutral([1.0, 0.0]) for _ in range(config.n_layer)]  # r, s
            self.transformer.x0 = nn.ParameterList(weights)
        has_tables = 'token' in config.residual_from
        tables = [layer.n for layer in self.wiring if layer.sources['v'] and has_tables]
        self.transformer.ve = nn.ModuleDict({str(n): make_table(config) for n in tables})
        self.lm_head = make(nn.Linear, config.n_embd, config.vocab_size, False)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        needs = {name: getattr(p, 'needs', Needs()) for name, p in self.named_parameters()}
        self.needs = collections.defaultdict(Needs, needs)
        self.init_weights(seed)

    @classmethod
    def without_weights(cls, config):
        """A model that takes no memory, to count what it has and what it computes."""
        with torch.device('meta'):
            return cls(config)

    @torch.no_grad()
    def init_weights(self, seed):
        """Draw what starts random; everything else is as its module made it.

        wte, wpe, lm_head, c_attn, c_fc, c_proj   N(0, 0.02)
        c_proj of gpt2                            N(0, 0.02 / sqrt(2 n_layer))
        their biases, gates                       zero; a channel gate as RWKV-7's
        ve                                        N(0, 1 / sqrt(n_embd))
        norms, residual_lambda, dwa, x0           one, the given weights, the last block's output

        Each block of rows, such as those of q, k and v in c_attn, has a generator of its own, seeded
        by (seed, name, block). So variants of one size start with the same shared weights.
        """
        for name, p in self.named_parameters():
            needs = self.needs[name]
            if needs.draw is None:
                continue
            blocks = needs.blocks or {'': len(p)}
            for block, rows in zip(blocks, p.split(list(blocks.values())), strict=True):
                digest = hashlib.sha256(f'{seed}/{name}/{block}'.encode()).digest()
                number = int.from_bytes(digest[:8], 'little', signed=True)
                generator = torch.Generator().manual_seed(number)
                whole = torch.empty(max(needs.drawn, len(rows)), *rows.shape[1:])
                rows.copy_(needs.draw(whole, generator=generator)[: len(rows)])

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """Next-token logits, or the training loss.

        idx (B, T) int64 -> (logits, None), logits (B, T, V) or, with last_only, (B, 1, V). With
        targets (B, T), -1 ignored: (None, loss), the mean cross entropy in nats, fp32. With a cache
        from new_cache(), idx continues the tokens in the cache, and is added to them.
        """
        x = self.hidden(idx, cache, last_only)
        if targets is None:
            return self.lm_head(x), None
        total = LinearCrossEntropy.apply(
            x.flatten(0, 1), self.lm_head.weight, targets.flatten(), torch.is_grad_enabled()
        )
        return None, total / (targets != -1).sum()

    def hidden(self, idx, cache=None, last_only=False):
        """lm_head's input: (B, T, C), or (B, 1, C) with last_only. Arguments as in forward()."""
        T = idx.size(1)
        refuse(
            T > self.config.block_size,
            f'{T} tokens are more than block_size={self.config.block_size}',
        )
        positions, mask = slice(T), None
        if cache is not None:
            positions, mask = cache.begin(idx)

        x, x0 = self.embed(idx)  # (B, T, C) each
        rope = None
        if self.config.arch == 'llama':
            rope = self.cos[positions], self.sin[positions]
        else:
            x = x + self.transformer.wpe.weight[positions]
        x = F.dropout(x, self.config.dropout, self.training)

        # See the top of this file. Each layer drops the tensors that no later one reads.
        raw, attended = {}, {}
        for n, table in self.transformer.ve.items():
            raw['v', f'token {n}'] = to_heads(self.config, table(idx))
        outputs = [x]  # of the embedding and the blocks
        for n, block in enumerate(self.transformer.h):
            x = self.with_x0(n, x, x0)
            x, raw, attended = block(x, raw, attended, rope, cache, mask)
            if self.config.denseformer:
                outputs.append(x)
                weights = self.transformer.dwa[n]
                x = sum(w * output for w, output in zip(weights, outputs, strict=True))
        if last_only:
            x = x[:, -1:]
        x = self.transformer.ln_f(x)
        if cache is not None:
            cache.finish(T)
        return x

    def embed(self, idx):
        """The embedding of idx, before positions, and x_0, which is its RMSNorm; None if it is not read."""
        config = self.config
        x = self.transformer.wte(idx)
        x0 = rms_norm(config, x) if config.embed_norm or config.x0_residual else None
        return (x0 if config.embed_norm else x), x0

    def with_x0(self, n, x, x0):
        """What block n reads."""
        if not self.config.x0_residual:
            return x
        r, s = self.transformer.x0[n]
        return r * x + s * x0

    def new_cache(self, batch_size, max_len, dtype=None, values='cached'):
        """An empty KVCache for max_len tokens, on the model's device; dtype None: the weights'.

        values='token': SVFormer's without values, which are looked up by token in value_table().
        """
        return KVCache(self, batch_size, max_len, dtype or self.lm_head.weight.dtype, values)

    @torch.no_grad()
    def value_table(self, dtype):
        """V_1 of every token, (vocab_size, n_kv_head * hs): of llama it depends on the token alone.
        Made once, and again when a weight has changed. Raises ValueError for other models."""
        depends = self.config.arch != 'llama' or self.wiring[0].sources['v']
        refuse(
            depends or any(layer.owner['v'] for layer in self.wiring),
            "values='token' is for llama whose layers all attend with V_1 (share_v over the whole "
            'depth), and which mixes nothing into it',
        )
        refuse(self.training, "values='token' is for decoding: call model.eval() first")
        versions = [dtype, *((p.data_ptr(), p._version) for p in self.parameters())]
        if self.table[0] != versions:
            block, wte = self.transformer.h[0], self.transformer.wte.weight
            x, x0 = self.embed(torch.arange(len(wte), device=wte.device))
            x = block.ln_1(self.with_x0(0, x, x0))
            rows = block.attn.c_attn.weight[-block.attn.rows['v'] :]
            self.table = versions, F.linear(x, rows).to(dtype)
        return self.table[1]

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, cache=None, **how):
        """Yield the tokens (B, 1) that continue idx (B, T). how: the options of sample().

        Without a cache (slow), each token is computed from the last block_size tokens. Raises
        ValueError where the first logits are not finite.
        """
        for i in range(max_new_tokens):
            context = idx if cache else idx[:, -self.config.block_size :]
            logits, _ = self(context, cache=cache, last_only=True)
            # Once, because a GPU has to be waited for.
            broken = i == 0 and not logits.isfinite().all()
            refuse(broken, 'the logits are not finite: the weights are damaged, or overflow')
            new = sample(logits[:, -1].float(), **how)
            idx = new if cache else torch.cat((idx, new), dim=1)
            yield new

    def generate(
        self,
        idx,
        max_new_tokens,
        temperature=1.0,
        top_k=None,
        top_p=None,
        use_cache=True,
        generator=None,
    ):
        """Continue idx (B, T) as stream() does. Returns (B, T + max_new_tokens)."""
        cache = None
        if use_cache:
            cache = self.new_cache(idx.size(0), idx.size(1) + max_new_tokens)
        how = dict(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        return torch.cat((idx, *self.stream(idx, max_new_tokens, cache, **how)), dim=1)

    def num_params(self, non_embedding=True):
        """Number of weights; non_embedding leaves out embedding tables (wte, wpe, ve) and lm_head."""
        weights = set(self.parameters())
        if non_embedding:
            tables = {m.weight for m in self.modules() if isinstance(m, nn.Embedding)}
            weights -= {*tables, self.lm_head.weight}
        return sum(weight.numel() for weight in weights)

    def flops_per_token(self, seq_len):
        """Training FLOPs per token as in PaLM's appendix B: 3 x the forward pass's matmuls.

        A weight counts as 2, lm_head's included, and attention as the full T x T. The extra queries
        that residual_map='cross' computes and discards are not counted.
        """
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        keys = sum(len(layer.reads['v']) * seq_len for layer in self.wiring)
        return 3 * (2 * weights + 4 * keys * self.config.n_embd)


def refuse(condition, message):
    if condition:
        raise ValueError(message)


# --- attention -----------------------------------------------------------------------------------


def attend(q, k, v, dropout=0.0, mask=None):
    """Attention of q (B, nh, T, hs) to k, v (B, n_kv_head, S, hs); all variants call it.

    mask (T, S): True where a query sees a key. Without a mask: causal (S = T), or one query that
    sees all keys (T = 1).
    """
    B, nh, T, hs = q.size()
    group = nh // k.size(1)
    k, v = k.type_as(q), v.type_as(q)  # a cache may have another type
    is_causal = mask is None and T > 1
    if is_causal and group > 1 and lacks_gqa(q):
        k, v = to_query_heads(k, q), to_query_heads(v, q)
    if not is_causal and group > 1:
        # The query heads of a group become rows, so that any kernel reads its keys only once.
        q = q.reshape(B, nh // group, group * T, hs)
        if mask is not None:
            mask = mask.repeat(group, 1)
    y = F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal, enable_gqa=q.size(1) != k.size(1)
    )
    # Not view(): some kernels on CUDA store the rows of a position side by side.
    return y.reshape(B, nh, T, hs)


def lacks_gqa(q):
    """Whether no fast attention kernel of q's device shares keys among query heads. On CUDA, none in
    fp32 does, and torch would take one that holds all T x T weights in memory."""
    return q.is_cuda and q.dtype == torch.float32


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


def without(y, v):
    """y less its component along v, (B, nh, T, hs) each, computed in fp32 at least."""
    wide = torch.promote_types(y.dtype, torch.float32)
    own, unit = y.to(wide), F.normalize(v.to(wide), dim=-1, eps=1e-6)
    return (own - (own * unit).sum(-1, keepdim=True) * unit).to(y.dtype)


def join(t, tensors, key):
    """t (B, heads, T, hs), with the further heads of another tensor behind its own, unless key is None."""
    return t if key is None else torch.cat((t, tensors[key][:, t.size(1) :]), dim=1)


def to_heads(config, t):
    """(B, T, heads * hs) -> (B, heads, T, hs)."""
    return t.unflatten(2, (-1, config.head_size)).transpose(1, 2)


def to_query_heads(t, y):
    """Values t (B, n_kv_head, T, hs), repeated for each of the query heads of y that share them."""
    return t.repeat_interleave(y.size(1) // t.size(1), dim=1)


def rotate(x, cos, sin):
    """RoPE, by halves as in Hugging Face's Llama; cos and sin are (T, hs)."""
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


# --- decoding ------------------------------------------------------------------------------------


class KVCache:
    """The attended keys and values of the tokens so far: (B, n_kv_head, max_len, hs) for each layer
    that owns them; borrowers have none.

    The position is a tensor, so that a compiled model decodes without recompiling. In a compiled
    model, attention reads all max_len rows under a mask; otherwise it reads only the filled ones.
    """

    def __init__(self, model, batch_size, max_len, dtype, values):
        longest = model.config.block_size
        refuse(
            max_len > longest,
            f'max_len={max_len} is more than block_size={longest}: '
            'only without a cache can generation go on, with the last block_size tokens',
        )
        refuse(values not in ('cached', 'token'), f"values={values!r} is not 'cached' or 'token'")
        self.max_len = self.end = max_len
        self.config, self.wiring = model.config, model.wiring
        self.tensors = {}
        zeros = model.lm_head.weight.new_zeros
        parts = 'kv'
        self.table = zeros(0)
        self.values = None  # the table's rows of the tokens so far, during a step
        if values == 'token':
            parts = 'k'
            self.table = model.value_table(dtype)
            self.tensors['ids', 0] = zeros(batch_size, max_len, dtype=torch.int32)
        for layer in model.wiring:
            for part in parts:
                shape = batch_size, layer.heads[part], max_len, model.config.head_size
                if layer.heads[part]:
                    self.tensors[part, layer.n] = zeros(shape, dtype=dtype)
        self.position = zeros(1, dtype=torch.int64)  # tokens so far
        for tensor in (*self.tensors.values(), self.position):  # CUDA graphs may write to them
            torch._dynamo.mark_static_address(tensor, guard=False)

    @property
    def nbytes(self):
        """Bytes of keys and values; of keys and token ids, where values are looked up."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def table_nbytes(self):
        return self.table.nbytes

    def begin(self, idx):
        """Prepare for idx (B, T), more tokens; returns their positions (T,) and the mask for attend()."""
        T, device, mask = idx.size(1), idx.device, None
        self.positions = self.position + torch.arange(T, device=device)
        if torch.compiler.is_compiling():
            # No Python number may depend on the position.
            self.end = self.max_len
            has_room = self.positions[-1] < self.end
            torch._assert_async(has_room, 'more tokens than the cache has room for: max_len')
        else:
            self.end = int(self.position) + T
            refuse(
                self.end > self.max_len,
                f'{T} more tokens do not fit into a cache of max_len={self.max_len}, which holds '
                f'{self.end - T}',
            )
        if T not in (1, self.end) or torch.compiler.is_compiling():
            mask = torch.arange(self.end, device=device) <= self.positions[:, None]
        if len(self.table):
            ids = self.tensors['ids', 0]
            ids.index_copy_(1, self.positions, idx.int())
            self.values = to_heads(self.config, F.embedding(ids[:, : self.end], self.table))
        return self.positions, mask

    def finish(self, T):
        self.position += T
        self.values = None

    def append(self, key, t):
        """Store t (B, heads, T, hs) at the positions that begin() gave, unless it is a query or a value
        that is looked up."""
        if key in self.tensors:
            tensor = self.tensors[key]
            tensor.index_copy_(2, self.positions, t.detach().to(tensor.dtype))

    def __getitem__(self, key):
        if key not in self.tensors:
            return self.values
        part, n = key
        return join(self.tensors[key][:, :, : self.end], self, self.wiring[n].joins.get(part))


def sample(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """One token per row of logits (B, V) -> (B, 1).

    It is drawn from the top_k likeliest (None or 0: all), and among these from the fewest that have top_p of
    the probability. At temperature 0, it is the likeliest.
    """
    top_k = top_k or 0
    top_p = 1.0 if top_p is None else top_p
    refuse(not temperature >= 0, f'temperature={temperature} must be 0 or more')
    refuse(top_k < 0, f'top_k={top_k} must be 0 or more')
    refuse(not 0 < top_p <= 1, f'top_p={top_p} must be above 0 and at most 1')
    if temperature < 1e-6:  # logits divided by less may overflow
        return logits.argmax(dim=-1, keepdim=True)
    probs = F.softmax(logits / temperature, dim=-1)
    if not top_k and top_p == 1:
        return torch.multinomial(probs, 1, generator=generator)

    V = probs.size(-1)
    probs, order = probs.topk(min(top_k or V, V))
    if top_p < 1:
        # A token stays if the likelier ones together have less than top_p, and the likeliest one even
        # where top_p rounds to 0.
        before = probs.cumsum(dim=-1) - probs
        total = probs.sum(dim=-1, keepdim=True)
        probs = probs.masked_fill((before > 0) & (before >= top_p * total), 0.0)
    return order.gather(1, torch.multinomial(probs, 1, generator=generator))


# --- the loss ------------------------------------------------------------------------------------

LOSS_CHUNK = 4096  # rows; at 50,304 ids a chunk's fp32 logits take 824 MB
# With more chunks, the compiler fuses the sum of their weight gradients, and for it keeps the logits of
# most of them (82M, 32 x 2,048: 18.7 GiB with 16 chunks, 14.4 with 8).
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
                logits = (xc @ w.T).to(wide)
                lse = logits.logsumexp(dim=1, keepdim=True)
                target_logits = logits.gather(1, tc.clamp(min=0))
                # Not total +=: when torch 2.11 compiles it, a result computed in place silently
                # loses its gradient.
                total = total + ((lse - target_logits) * counted).sum()
                if want_grad:
                    # Not a scatter: this comparison fuses when compiled.
                    hit = torch.arange(len(w), device=x.device) == tc
                    softmax = logits.sub_(lse).exp_()
                    grad = softmax.sub_(hit.to(wide)).mul_(counted).to(dtype)
                    grad_x.append(grad @ w)
                    # / 64, undone below, so that an FP16 sum over rows stays finite.
                    grad_w += (grad.T @ (xc / 64)).to(wide)
        ctx.save_for_backward(torch.cat(grad_x) if grad_x else None, grad_w.mul_(64))
        ctx.dtypes = x.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        # The product with a scalar has the tensor's type: in FP16 the loss scale would overflow.
        grad_x = grad_x.to(grad.dtype)
        x_dtype, weight_dtype = ctx.dtypes
        return (grad * grad_x).to(x_dtype), (grad * grad_w).to(weight_dtype), None, None


# --- what is refused -----------------------------------------------------------------------------

# The least value of a setting.
LEAST = {f.name: min(f.default, 1) for f in fields(GPTConfig) if type(f.default) is int}
LEAST |= {'rope_theta': 1, 'norm_eps': 0, 'dropout': 0}
CHOICES = {
    'arch': ('llama', 'gpt2'),
    'residual_from': SOURCES,
    'residual_map': ('current', 'identity', 'cross'),
    'residual_gate': GATES,
}
# Read by wire() alone: what they change is what they change in the wiring.
WIRED = (*RESIDUALS, 'neutreno') + tuple(
    f.name for f in fields(GPTConfig) if f.name.startswith(('residual_', 'share_'))
)


def check(config):
    """The one rule: a setting that is on changes what a model is made of."""
    for name, value in config.variant().items():
        if acts(config, name):
            continue
        idle = f'{name}={value!r} does nothing'
        for other, blamed in (config.variant() | config.shape()).items():
            without = change(config, other, getattr(type(config), other))
            refuse(acts(without, name), f'{idle} with {other}={blamed!r}; drop one of them')
        switches = [f.name for f in fields(config) if f.default is False]
        switches = [switch for switch in switches if acts(change(config, switch, True), name)]
        advice = f'turn on {" or ".join(switches)}, or drop it' if switches else 'drop it'
        raise ValueError(f'{idle}: {advice}')


def acts(config, name):
    """Whether a setting changes what a model is made of, compared with its default."""
    without = change(config, name, getattr(type(config), name))
    return ingredients(config) != ingredients(without)


def ingredients(config):
    """All that a model is made of: its wiring, and the other fields that are read."""
    unread = WIRED
    if config.arch == 'gpt2':
        unread += ('rope_theta', 'rope_scaling')
    others = {name: value for name, value in vars(config).items() if name not in unread}
    return wire(config), others


def change(config, name, value):
    """The config with another value, which is not checked."""
    config = copy.copy(config)
    setattr(config, name, value)
    return config


def check_ranges(config):
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        refuse(value not in choices, f'{name}={value!r} is not one of {tuple(choices)}')
    for name, value in vars(config).items():
        is_broken = isinstance(value, float) and not math.isfinite(value)
        refuse(is_broken, f'{name}={value} must be finite')
    for name, least in LEAST.items():
        value = getattr(config, name)
        refuse(value < least, f'{name}={value} must be at least {least}')
    refuse(config.dropout >= 1, f'dropout={config.dropout} must be less than 1')

    n_embd, n_head, n_kv_head = config.n_embd, config.n_head, config.kv_heads
    refuse(n_embd % n_head, f'n_embd={n_embd} is not divisible by n_head={n_head}')
    refuse(n_head % n_kv_head, f'n_head={n_head} is not divisible by n_kv_head={n_kv_head}')
    is_odd = config.arch == 'llama' and config.head_size % 2
    refuse(is_odd, f'n_embd={n_embd} / n_head={n_head} is odd, but RoPE rotates pairs')
    inputs, heads = config.residual_gate_inputs, config.share_v_heads
    refuse(inputs > n_embd, f'residual_gate_inputs={inputs} are more than n_embd={n_embd}')
    refuse(heads >= n_kv_head, f'share_v_heads={heads} must be fewer than {n_kv_head} value heads')
    for part in 'qkv':
        owners = getattr(config, f'share_{part}_from')
        refuse(
            owners and not is_owner_map(owners, config.n_layer),
            f'share_{part}_from={owners} must name, for each of the {config.n_layer} layers, itself or '
            'an earlier layer that names itself',
        )
    weights, scaling = config.residual_lambda, config.rope_scaling
    refuse(
        weights and not are_numbers(weights, 2),
        f'residual_lambda={weights} must be two weights: (each source, own)',
    )
    is_positive = are_numbers(scaling, 4) and min(scaling) > 0
    refuse(
        scaling and not (is_positive and scaling[1] < scaling[2]),
        f'rope_scaling={scaling} must be (factor, low_freq < high_freq, original_length), positive',
    )


def is_owner_map(owners, n_layer):
    are_owners = [type(o) is int and 0 <= o <= n and owners[o] == o for n, o in enumerate(owners)]
    return all(are_owners) and len(owners) == n_layer


def are_numbers(values, count):
    are_finite = [type(value) in (int, float) and math.isfinite(value) for value in values]
    return all(are_finite) and len(values) == count


# {setting=value: what may not be on with it}
EXCLUDED = {
    'residual_map=identity': {'residual_lambda'},
    'residual_map=cross': {'residual_lambda', 'share_v_heads'},
    'residual_gate=channel': {
        'residual_lambda',
        'residual_from=all',
        'residual_from=first+token',
    },
    'residual_from=token': {'q_residual', 'k_residual', 'residual_map'},
    'residual_from=first+token': {'q_residual', 'k_residual', 'residual_map'},
}


def check_contradictions(config):
    """Refuse what wire() has no answer to."""
    residuals = [name for name in RESIDUALS if getattr(config, name)]
    refuse(
        config.residual_learned and len(residuals) > 1,
        f'residual_learned goes with one residual, not with {" and ".join(residuals)}; keep one',
    )
    on = {f'{name}={value}' for name, value in config.variant().items()} | config.variant().keys()
    for one in on & EXCLUDED.keys():
        for other in on & EXCLUDED[one]:
            raise ValueError(f'{one} and {other} exclude each other; drop one')
    refuse(
        'token' in config.residual_from and not config.residual_layers,
        f'residual_from={config.residual_from!r} needs residual_layers: the layers that have a table',
    )
    for n in range(config.n_layer):
        refuse(
            not any(wire_layer(config, n).heads.values()),
            f'layer {n} would project none of q, k, v; turn off share_q, share_k or share_v, or '
            'set its share_*_every',
        )
    layers = config.residual_layers
    for n in layers:
        is_layer = type(n) is int and n in range(config.n_layer) and layers.count(n) == 1
        for name in residuals:
            part = name[0]
            refuse(
                not is_layer or not sources_of(config, part, n),
                f'residual_layers={layers} names {n!r}; name, once each, layers that project their own '
                f'{part} (share_{part}) and get a source (residual_from={config.residual_from!r})',
            )
