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

import hashlib
import math
from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    """Raises ValueError for settings that do nothing or contradict each other: see check()."""

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
    # residuals: what is mixed into v, q or k
    v_residual: bool = False  # ResFormer (Eq. 7): V_n <- (V_1 + V_n) / 2 for n >= 2
    q_residual: bool = False  # the same mixing on queries, before RoPE (Fig. 6)
    k_residual: bool = False  # the same mixing on keys, before RoPE (Fig. 6)
    residual_from: str = 'first'  # the sources, a name in SOURCES (Fig. 8, Eq. 5)
    residual_lambda: tuple = ()  # weights (each source, own); empty: the mean of all
    residual_learned: bool = False  # the weights are parameters, which start from these
    residual_layers: tuple = ()  # layers (0-based) that mix, as in Sparse ResFormer; (): all but 0
    residual_map: str = 'current'  # values mapped by current (Eq. 4), identity (6), cross (2)
    # sharing: what is borrowed
    share_q: bool = False  # borrow the queries of an earlier layer (Fig. 13)
    share_k: bool = False  # borrow the keys of an earlier layer (Figs. 4, 13; with share_v: CLA)
    share_v: bool = False  # SVFormer (Eq. 10): every layer attends with V_1
    share_q_every: int = 0  # m: each m layers share their first layer's; 0: all share layer 1's
    share_k_every: int = 0  # likewise for keys
    share_v_every: int = 0  # likewise for values (Fig. 14)
    # the other models that the paper compares with
    neutreno: float = 0.0  # NeuTRENO's lambda: U_n += lambda (V_1 - values attended with) (Eq. 8)
    denseformer: bool = False  # after each block, a learned average of all block outputs

    def __post_init__(self):
        for field in fields(self):
            if isinstance(field.default, tuple):  # JSON has lists
                setattr(self, field.name, tuple(getattr(self, field.name)))
        check(self)

    def shape(self):
        """{field: value} of the fields that say how large the model is."""
        return {name: getattr(self, name) for name in SHAPE}

    def variant(self):
        """{field: value} of every other field that is not its default: what makes it this model."""
        values = asdict(self)
        return {
            name: value
            for name, value in values.items()
            if name not in SHAPE and value != getattr(type(self), name)
        }

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

# Fields that, with the shape, a checkpoint's weights cannot be used without: with other values of
# these, even its embeddings and projections would mean something else.
BASE = ('arch', 'n_kv_head', 'rope_theta', 'rope_scaling', 'norm_eps', 'tie_embeddings')

# Parameters that a checkpoint may lack, because they start neutral or as the settings say.
MAY_BE_MISSING = ('.residual_lambda', '.dwa.', '.mixing.')

# Parameters that are small, and of interest enough to be logged at every evaluation.
LOGGED = ('.residual_lambda', '.dwa.')


# --- the wiring ----------------------------------------------------------------------------------

# residual_from: which layers are the sources of layer n >= 1 (0-based) in a model of L layers. A word
# in place of a layer is a source of another kind: let hidden() put its tensor, (B, heads, T, hs), into
# raw[part, word]. A table of values needs keep_init and a standard deviation of its own: values start
# at about 0.02 sqrt(n_embd), embeddings at 0.02.
SOURCES = {
    'first': lambda n, L: [0],  # ResFormer (Eq. 7)
    'previous': lambda n, L: [n - 1],  # Fig. 8
    'all': lambda n, L: list(range(n)),  # Eq. 5
}


def wire(config):
    """The wiring as data, for each layer n:

    owner    {part: layer that projects it}; {'q': n, 'k': n, 'v': n} in a vanilla Transformer
    sources  {part: keys of the raw tensors that are mixed in}, such as ('v', 0)
    pairs    (owner of k, owner of v) of each set of keys and values that it attends to: its own
             and, before them, with residual_map='cross', those of its sources
    raw, attended    keys (part, layer) of the tensors that it reads, its own among them
    """
    layers = []
    for n in range(config.n_layer):
        before = SOURCES[config.residual_from](n, config.n_layer) if n > 0 else []
        owner, sources = {}, {}
        for part in 'qkv':
            owner[part] = owner_of(config, part, n)
            sources[part] = []
            if mixes(config, part, n):
                sources[part] = [raw_key(layers, part, s) for s in before]

        owners = [owner]
        if config.residual_map == 'cross' and sources['v']:
            owners = [layers[s].owner for s in before] + owners
        pairs = [(o['k'], o['v']) for o in owners]

        raw = {(part, n) for part in 'qkv' if owner[part] == n}
        for part in 'qkv':
            raw.update(sources[part])
        if config.neutreno:
            raw.add(('v', 0))

        attended = set(owner.items())
        for k, v in pairs:
            attended.update([('k', k), ('v', v)])

        wiring = dict(owner=owner, sources=sources, pairs=pairs, raw=raw, attended=attended)
        layers.append(SimpleNamespace(**wiring))
    return layers


def owner_of(config, part, n):
    """The layer whose q, k or v layer n attends with."""
    if not getattr(config, f'share_{part}'):
        return n
    every = getattr(config, f'share_{part}_every') or config.n_layer
    return n - n % every


def raw_key(layers, part, source):
    """The key of a source in raw: a borrower's tensor is its owner's. A source that is not a layer,
    such as a table that a fork adds, is stored under its own name."""
    if isinstance(source, int):
        return part, layers[source].owner[part]
    return part, source


def mixes(config, part, n):
    """Whether layer n mixes sources into its q, k or v. Only owners do, and never the first layer."""
    if not getattr(config, f'{part}_residual') or n == 0 or owner_of(config, part, n) != n:
        return False
    return not config.residual_layers or n in config.residual_layers


# --- the model -----------------------------------------------------------------------------------


class Mixing(nn.Module):
    """What a layer mixes into its own projection of one part: a weighted sum (Eq. 7; Eq. 5).

    Parameters that a fork adds to this module keep the values that they are given here. Older
    checkpoints lack them, so let them start at values that change nothing. heads: of the part that is
    mixed, which weights per head or channel need to know.
    """

    def __init__(self, config, n_sources, heads):
        super().__init__()
        uniform = 1 / (n_sources + 1)
        source, own = config.residual_lambda or (uniform, uniform)
        self.fixed = [float(source)] * n_sources + [float(own)]

    def weights(self, x, learned):
        """One weight per source, then this layer's own: numbers, or tensors that broadcast to
        (B, heads, T, hs). x (B, T, C): what the layer projects; learned: its residual_lambda."""
        weights = self.fixed
        if learned is not None:
            weights = learned
        return weights

    def forward(self, own, sources, x, learned=None):
        """own (B, heads, T, hs), sources [(B, heads, T, hs)] -> (B, heads, T, hs)"""
        dtype = own.dtype
        # Not in half precision: a gate's product with a learned weight would be in it, too, and so
        # would the gradient of that weight.
        with torch.autocast(own.device.type, enabled=False):
            weights = self.weights(x, learned)
        if learned is not None:
            # Multiply in fp32. Half precision would also round the weights, and the gradient of a
            # weight, a sum over all positions, would overflow long before any other.
            own = own.to(learned.dtype)
            sources = [source.to(learned.dtype) for source in sources]
        mixed = weights[-1] * own
        for weight, source in zip(weights[:-1], sources, strict=True):
            mixed = mixed + weight * source  # ResFormer: V_n / 2 + V_1 / 2
        return mixed.to(dtype)


class Attention(nn.Module):
    """Causal self-attention of layer n. Rows of c_attn: q, then k, then v, if it owns them."""

    def __init__(self, config, n):
        super().__init__()
        layers = wire(config)
        self.n = n
        self.wiring = layers[n]
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.residual_map = config.residual_map
        self.neutreno = config.neutreno if n > 0 else 0.0

        # Projections of the parts that this layer owns.
        heads = {'q': config.n_head, 'k': config.kv_heads, 'v': config.kv_heads}
        self.owned = [part for part in 'qkv' if self.wiring.owner[part] == n]
        self.rows = [heads[part] * self.head_size for part in self.owned]
        bias = config.arch == 'gpt2'
        self.c_attn = nn.Linear(config.n_embd, sum(self.rows), bias=bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=bias)

        # Mixing of the parts that have sources. Identity and cross maps use theirs at attention.
        self.mixing = nn.ModuleDict()
        for part, sources in self.wiring.sources.items():
            if sources and (part != 'v' or self.residual_map == 'current'):
                self.mixing[part] = Mixing(config, len(sources), heads[part])
        self.residual_lambda = None
        if config.residual_learned and self.mixing:
            (mixing,) = self.mixing.values()
            self.residual_lambda = nn.Parameter(torch.tensor(mixing.fixed))

        # Tensors that no later layer reads are dropped after this one, to free their memory.
        later = layers[n + 1 :]
        last_raw = self.wiring.raw.difference(*(w.raw for w in later))
        self.last_raw = sorted(last_raw, key=str)  # a source need not be a layer number
        self.last_attended = sorted(self.wiring.attended.difference(*(w.attended for w in later)))

    def forward(self, x, rope, raw, attended, cache, mask):
        """x (B, T, C) -> (B, T, C)

        rope: (cos, sin), (T, hs) each, or None. raw, attended: {(part, layer): (B, heads, T, hs)}, see
        the top of this file; both are changed in place. cache: a KVCache or None. mask: attend()'s.
        """
        B, T, C = x.size()
        owner, sources, pairs = self.wiring.owner, self.wiring.sources, self.wiring.pairs

        # Project the parts that this layer owns. With v_residual (ResFormer), q_residual or
        # k_residual, mix their sources into them.
        for part, t in zip(self.owned, self.c_attn(x).split(self.rows, dim=2), strict=True):
            t = t.view(B, T, -1, self.head_size).transpose(1, 2)  # (B, nh or n_kv_head, T, hs)
            raw[part, self.n] = t
            if part in self.mixing:
                tensors = [raw[key] for key in sources[part]]
                t = self.mixing[part](t, tensors, x, self.residual_lambda)
            if part != 'v' and rope is not None:
                t = rotate(t, *rope)
            attended[part, self.n] = t
            if cache is not None and part != 'q':
                cache.append(part, self.n, t)

        # Attend with the owners' tensors: in SVFormer, owner['v'] is layer 0 everywhere.
        dropout = self.dropout if self.training else 0.0
        kv = attended if cache is None else cache
        keys = [kv['k', k] for k, _ in pairs]
        values = [kv['v', v] for _, v in pairs]
        y = attend_cross(attended['q', owner['q']], keys, values, dropout, mask)  # (B, nh, T, hs)

        # The identity map adds the mean of the source values (Eq. 6), NeuTRENO V_1 - V_n (Eq. 8).
        if self.residual_map == 'identity' and sources['v']:
            mean = sum(raw[key] for key in sources['v']) / len(sources['v'])
            y = y + to_query_heads(mean, y)
        if self.neutreno:
            difference = raw['v', 0] - attended['v', owner['v']]
            y = y + to_query_heads(self.neutreno * difference, y)

        for key in self.last_raw:
            del raw[key]
        for key in self.last_attended:
            del attended[key]
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """SwiGLU (llama; rows of c_fc: gate, then up) or GELU (gpt2)."""

    def __init__(self, config):
        super().__init__()
        self.swiglu = config.arch == 'llama'
        self.dropout = config.dropout
        width = config.ffn_width
        bias = config.arch == 'gpt2'
        self.c_fc = nn.Linear(config.n_embd, 2 * width if self.swiglu else width, bias=bias)
        self.c_proj = nn.Linear(width, config.n_embd, bias=bias)

    def forward(self, x):
        x = self.c_fc(x)
        if self.swiglu:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        else:
            x = F.gelu(x, approximate='tanh')
        return F.dropout(self.c_proj(x), self.dropout, self.training)


def norm(config):
    kind = nn.RMSNorm if config.arch == 'llama' else nn.LayerNorm
    return kind(config.n_embd, eps=config.norm_eps)


class Block(nn.Module):
    def __init__(self, config, n):
        super().__init__()
        self.ln_1 = norm(config)
        self.attn = Attention(config, n)
        self.ln_2 = norm(config)
        self.mlp = MLP(config)

    def forward(self, x, rope, raw, attended, cache, mask):
        """As Attention.forward()."""
        x = x + self.attn(self.ln_1(x), rope, raw, attended, cache, mask)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config
        # A module that keeps its own initial values may draw them: they follow from the seed, too.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)
            self.make_modules(config)
        self.init_weights(seed)

    def make_modules(self, config):
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                h=nn.ModuleList(Block(config, n) for n in range(config.n_layer)),
                ln_f=norm(config),
            )
        )
        if config.arch == 'gpt2':
            self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            cos, sin = rope_tables(config)
            self.register_buffer('cos', cos, persistent=False)
            self.register_buffer('sin', sin, persistent=False)
        if config.denseformer:
            # Weights over the embedding and the outputs of blocks 0 to n; at first, only block n's.
            averages = [torch.eye(n + 2)[-1] for n in range(config.n_layer)]
            self.transformer.dwa = nn.ParameterList(averages)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def init_weights(self, seed):
        """Embeddings and linear layers start random, everything else as its module made it.

        wte, wpe, lm_head, c_attn, c_fc, c_proj   N(0, 0.02)
        c_proj of gpt2                            N(0, 0.02 / sqrt(2 n_layer))
        their biases                              zero
        norms, residual_lambda, dwa, mixing       as made: one, neutral, or the given weights

        Each matrix has a generator of its own, seeded by (seed, name, part); in c_attn, the q rows,
        k rows and v rows each have one. So variants of one size start with the same shared weights.
        A module with keep_init=True keeps its own initial values.
        """
        own_init = [name for name, module in self.named_modules() if keeps_init(module)]
        for name, p in self.named_parameters():
            parent = self.get_submodule(name.rpartition('.')[0])
            is_random = isinstance(parent, nn.Linear | nn.Embedding)
            if not is_random or any(name.startswith(f'{other}.') for other in own_init):
                continue
            if name.endswith('.bias'):
                p.zero_()
                continue

            blocks, parts = [p], ['']
            if name.endswith('c_attn.weight'):
                attn = self.get_submodule(name.removesuffix('.c_attn.weight'))
                blocks, parts = p.split(attn.rows), attn.owned
            std = 0.02
            if self.config.arch == 'gpt2' and name.endswith('c_proj.weight'):
                std = 0.02 / math.sqrt(2 * self.config.n_layer)
            for block, part in zip(blocks, parts, strict=True):
                digest = hashlib.sha256(f'{seed}/{name}/{part}'.encode()).digest()
                number = int.from_bytes(digest[:8], 'little', signed=True)
                generator = torch.Generator().manual_seed(number)
                block.copy_(torch.empty(block.shape).normal_(0.0, std, generator=generator))

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """Next-token logits, or the training loss.

        idx (B, T) int64 -> (logits, None), logits (B, T, V) or, with last_only, (B, 1, V). With
        targets (B, T), -1 ignored: (None, loss), the mean cross entropy in nats, fp32. With a cache
        from new_cache(), idx continues the tokens in the cache, and is added to them.
        """
        refuse(
            last_only and targets is not None,
            'last_only is for logits, targets for the loss; drop one',
        )
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
            positions, mask = cache.begin(T)

        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.embed_norm:
            x = F.rms_norm(x, (self.config.n_embd,), eps=self.config.norm_eps)
        rope = None
        if self.config.arch == 'llama':
            rope = self.cos[positions], self.sin[positions]
        else:
            x = x + self.transformer.wpe.weight[positions]
        x = F.dropout(x, self.config.dropout, self.training)

        raw, attended = {}, {}  # see the top of this file
        outputs = [x]  # of the embedding and the blocks
        for n, block in enumerate(self.transformer.h):
            x = block(x, rope, raw, attended, cache, mask)
            if self.config.denseformer:
                outputs.append(x)
                weights = self.transformer.dwa[n]
                x = sum(w * output for w, output in zip(weights, outputs, strict=True))
        if last_only:
            x = x[:, -1:]
        x = self.transformer.ln_f(x)
        if cache is not None:
            cache.position += T
        return x

    def new_cache(self, batch_size, max_len, dtype=None):
        """An empty KVCache for max_len tokens, on the model's device; dtype None: the weights'."""
        weight = self.lm_head.weight
        return KVCache(self.config, batch_size, max_len, dtype or weight.dtype, weight.device)

    def stream(
        self,
        idx,
        max_new_tokens,
        temperature=1.0,
        top_k=None,
        top_p=None,
        cache=None,
        generator=None,
    ):
        """Yield the tokens (B, 1) that continue idx (B, T), as sample() chooses them.

        Without a cache (slow), each token is computed from the last block_size tokens. Raises
        ValueError where the first logits are not finite.
        """
        top_k = 0 if top_k is None else top_k
        top_p = 1.0 if top_p is None else top_p
        refuse(not temperature >= 0, f'temperature={temperature} must be 0 or more')
        refuse(top_k < 0, f'top_k={top_k} must be 0 or more')
        refuse(not 0 < top_p <= 1, f'top_p={top_p} must be above 0 and at most 1')

        @torch.no_grad()
        def tokens(idx):
            for i in range(max_new_tokens):
                context = idx if cache else idx[:, -self.config.block_size :]
                logits, _ = self(context, cache=cache, last_only=True)
                # Once, because a GPU has to be waited for.
                broken = i == 0 and not logits.isfinite().all()
                refuse(broken, 'the logits are not finite: the weights are damaged, or overflow')
                new = sample(logits[:, -1].float(), temperature, top_k, top_p, generator)
                idx = new if cache else torch.cat((idx, new), dim=1)
                yield new

        return tokens(idx)

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
        new = self.stream(idx, max_new_tokens, temperature, top_k, top_p, cache, generator)
        return torch.cat((idx, *new), dim=1)

    def mixing_weights(self):
        """{name: list} of the learned mixing weights, for the log."""
        return {
            name: p.tolist()
            for name, p in self.named_parameters()
            if any(part in name for part in LOGGED)
        }

    def num_params(self, non_embedding=True):
        """Number of weights; non_embedding leaves out embedding tables (wte, wpe) and lm_head."""
        weights = set(self.parameters())
        if non_embedding:
            tables = [module for module in self.modules() if isinstance(module, nn.Embedding)]
            weights -= {module.weight for module in (*tables, self.lm_head)}
        return sum(weight.numel() for weight in weights)

    def flops_per_token(self, seq_len):
        """Training FLOPs per token as in PaLM's appendix B: 3 x the forward pass's matmuls.

        A weight counts as 2, lm_head's included, and attention as the full T x T. The extra queries
        that residual_map='cross' computes and discards are not counted.
        """
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        keys = sum(len(block.attn.wiring.pairs) * seq_len for block in self.transformer.h)
        return 3 * (2 * weights + 4 * keys * self.config.n_embd)


def keeps_init(module):
    return isinstance(module, Mixing) or getattr(module, 'keep_init', False)


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
    if mask is None and T > 1:
        if group > 1 and lacks_gqa(q):
            k, v = to_query_heads(k, q), to_query_heads(v, q)
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=k.size(1) != nh
        )
    if group > 1:
        # The query heads of a group become rows, so that any kernel reads its keys only once.
        q = q.reshape(B, nh // group, group * T, hs)
        if mask is not None:
            mask = mask.repeat(group, 1)
    # Not view(): some kernels on CUDA store the rows of a position side by side.
    return F.scaled_dot_product_attention(q, k, v, mask, dropout).reshape(B, nh, T, hs)


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

    def __init__(self, config, batch_size, max_len, dtype, device):
        refuse(
            max_len > config.block_size,
            f'max_len={max_len} is more than block_size={config.block_size}: '
            'only without a cache can generation go on, with the last block_size tokens',
        )
        self.max_len = self.end = max_len
        shape = batch_size, config.kv_heads, max_len, config.head_size
        self.tensors = {}
        for n, wiring in enumerate(wire(config)):
            for part in 'kv':
                if wiring.owner[part] == n:
                    self.tensors[part, n] = torch.zeros(shape, dtype=dtype, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # tokens so far
        for tensor in (*self.tensors.values(), self.position):  # CUDA graphs may write to them
            torch._dynamo.mark_static_address(tensor, guard=False)

    @property
    def nbytes(self):
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def begin(self, T):
        """Prepare for T more tokens; returns their positions (T,) and the mask for attend()."""
        device = self.position.device
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
            if self.end == T or T == 1:
                return self.positions, None
        return self.positions, torch.arange(self.end, device=device) <= self.positions[:, None]

    def append(self, part, layer, t):
        """Store t (B, n_kv_head, T, hs) at the positions that begin() gave."""
        tensor = self.tensors[part, layer]
        tensor.index_copy_(2, self.positions, t.detach().to(tensor.dtype))

    def __getitem__(self, key):
        return self.tensors[key][:, :, : self.end]


def sample(logits, temperature, top_k, top_p, generator):
    """One token per row of logits (B, V) -> (B, 1).

    It is drawn from the top_k likeliest (0: all), and among these from the fewest that have top_p of
    the probability. At temperature 0, it is the likeliest.
    """
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
MOST_CHUNKS = 8


def rows_per_chunk(rows):
    """How many of the loss's rows are computed at once.

    At most 8 chunks: with more, the compiler fuses the sum of the chunks' weight gradients, and
    for it keeps the logits of most chunks (82M, 32 x 2,048: 18.7 GiB with 16 chunks, 14.4 with 8).
    """
    return max(LOSS_CHUNK, math.ceil(rows / MOST_CHUNKS))


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
            size = rows_per_chunk(len(x))
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

# Settings that choose the weights of a mixture. They go with residual_map='current' only.
WEIGHT_SETTINGS = (
    'residual_lambda',
    'residual_learned',
)
# Settings that do nothing without a residual.
RESIDUAL_SETTINGS = (
    'residual_from',
    'residual_layers',
    'residual_map',
    *WEIGHT_SETTINGS,
)


def check(config):
    """Raise ValueError for settings that do nothing or contradict each other; say what to do."""
    check_shape(config)
    check_residuals(config)
    check_sources(config)
    for part in 'qkv':
        check_sharing(config, part)
    refuse(
        config.neutreno and config.n_layer == 1,
        'neutreno does nothing with n_layer=1; drop it or use more layers',
    )
    check_wiring(config)


def is_default(config, name):
    return getattr(config, name) == getattr(GPTConfig, name)


def check_choice(config, name, allowed):
    value = getattr(config, name)
    refuse(value not in allowed, f'{name}={value!r} is not one of {tuple(allowed)}')


def are_numbers(values, count):
    return len(values) == count and all(type(value) in (int, float) for value in values)


def check_shape(config):
    check_choice(config, 'arch', ('llama', 'gpt2'))
    for name in (*SHAPE, 'n_kv_head'):
        least = 1 if getattr(GPTConfig, name) > 0 else 0
        value = getattr(config, name)
        refuse(value < least, f'{name}={value} must be at least {least}')
    refuse(
        not 0 < config.rope_theta < math.inf,
        f'rope_theta={config.rope_theta} must be a positive number',
    )
    refuse(
        not 0 <= config.norm_eps < math.inf,
        f'norm_eps={config.norm_eps} must be a number, 0 or more',
    )
    refuse(
        not 0 <= config.dropout < 1,
        f'dropout={config.dropout} must be at least 0 and less than 1',
    )
    refuse(
        config.n_embd % config.n_head,
        f'n_embd={config.n_embd} is not divisible by n_head={config.n_head}',
    )
    refuse(
        config.n_head % config.kv_heads,
        f'n_head={config.n_head} is not divisible by n_kv_head={config.n_kv_head}',
    )
    refuse(
        config.arch == 'llama' and config.head_size % 2,
        f'n_embd={config.n_embd} / n_head={config.n_head} is odd, but RoPE rotates pairs',
    )

    for name in ('rope_theta', 'rope_scaling'):
        refuse(
            config.arch == 'gpt2' and not is_default(config, name),
            f"{name} does nothing with arch='gpt2'; drop one",
        )
    scaling = config.rope_scaling
    if scaling:
        is_positive = are_numbers(scaling, 4) and all(value > 0 for value in scaling)
        refuse(
            not is_positive or scaling[1] >= scaling[2],
            f'rope_scaling={scaling} must be (factor, low_freq < high_freq, original_length), '
            'positive',
        )


def check_residuals(config):
    check_choice(config, 'residual_from', SOURCES)
    check_choice(config, 'residual_map', ('current', 'identity', 'cross'))
    names = [f'{part}_residual' for part in 'qkv']
    residuals = [name for name in names if getattr(config, name)]
    for name in RESIDUAL_SETTINGS:
        refuse(
            not residuals and not is_default(config, name),
            f'{name} does nothing without v_residual, q_residual or k_residual; turn one on or '
            f'drop {name}',
        )
    weights = config.residual_lambda
    refuse(
        weights and not are_numbers(weights, 2),
        f'residual_lambda={weights} must be two weights: (each source, own)',
    )
    refuse(
        config.residual_learned and len(residuals) > 1,
        f'residual_learned goes with one residual, not {" and ".join(residuals)}; keep one of them',
    )
    for name in WEIGHT_SETTINGS:
        refuse(
            config.residual_map != 'current' and not is_default(config, name),
            f'{name} does nothing with residual_map={config.residual_map!r}; drop one',
        )
    refuse(
        config.residual_map != 'current' and not config.v_residual,
        f'residual_map={config.residual_map!r} maps values: it needs v_residual=True',
    )


def check_sources(config):
    """Refuse a residual_from whose sources a layer cannot read."""
    name = config.residual_from
    for n in range(1, config.n_layer):
        for source in SOURCES[name](n, config.n_layer):
            is_layer = isinstance(source, int)
            refuse(
                is_layer and not 0 <= source < n,
                f'residual_from={name!r} gives layer {n} the source {source}, which is not an earlier layer',
            )
            refuse(
                not is_layer and config.residual_map == 'cross',
                f"residual_map='cross' attends to keys of layers, but residual_from={name!r} has the "
                f'source {source!r}, which is not a layer',
            )


def check_sharing(config, part):
    share = getattr(config, f'share_{part}')
    every = getattr(config, f'share_{part}_every')
    refuse(every and not share, f'share_{part}_every does nothing without share_{part}=True')
    refuse(
        every == 1 or every < 0,
        f'share_{part}_every={every} must be 0 (whole depth) or at least 2',
    )
    refuse(
        share and config.n_layer == 1,
        f'share_{part} does nothing with n_layer=1; drop it or use more layers',
    )
    whole_depth = share and not any(owner_of(config, part, n) for n in range(config.n_layer))
    refuse(
        whole_depth and getattr(config, f'{part}_residual'),
        f'{part}_residual does nothing with share_{part} over the whole depth: only the first layer '
        f'has its own; drop one or set share_{part}_every',
    )
    refuse(
        whole_depth and part == 'v' and config.neutreno,
        'neutreno is zero with share_v over the whole depth: V_1 - V_1; drop one or set '
        'share_v_every',
    )


def check_wiring(config):
    """Refuse wirings that leave a layer or a residual with nothing to do."""
    layers = wire(config)
    residuals = [part for part in 'qkv' if getattr(config, f'{part}_residual')]
    for n, wiring in enumerate(layers):
        refuse(
            n not in wiring.owner.values(),
            f'layer {n} would project none of q, k, v; turn off share_q, share_k or share_v, or '
            'set its share_*_every',
        )
    check_residual_layers(config, layers, residuals)
    for part in residuals:
        refuse(
            not any(wiring.sources[part] for wiring in layers),
            f'{part}_residual does nothing: with n_layer={config.n_layer} and '
            f'residual_from={config.residual_from!r}, no layer has a source',
        )


def check_residual_layers(config, layers, residuals):
    """Refuse a residual_layers that names what is no layer, or a layer without a residual."""
    numbers = config.residual_layers
    for n in numbers:
        refuse(
            type(n) is not int,
            f'residual_layers={numbers} names {n!r}, which is not a layer; give whole numbers from 0',
        )
        refuse(
            numbers.count(n) > 1,
            f'residual_layers={numbers} names layer {n} more than once; name it once',
        )
        refuse(
            n not in range(config.n_layer),
            f'residual_layers names layer {n}; the layers are 0 to {config.n_layer - 1}',
        )
        refuse(n == 0, 'residual_layers names layer 0, which has no earlier layer to mix in')
        for part in residuals:
            owner = layers[n].owner[part]
            refuse(
                owner != n,
                f'residual_layers names layer {n}, which borrows its {part} from layer {owner} '
                f'(share_{part}); name layers that project their own',
            )
            refuse(
                not layers[n].sources[part],
                f'residual_layers names layer {n}, which gets no source with '
                f'residual_from={config.residual_from!r}; name layers that get one',
            )
