"""
A Llama-like GPT in which layers may use the values (or keys, or queries) of earlier layers. One file, no globals.

The wiring of a model is three questions per layer, asked separately of q, k and v:
  1. Where does it come from?   Projected here (the layer *owns* it) or borrowed, attended as it is, from its owner.
  2. What is mixed into it?     Nothing, or the raw projections of earlier layers (its *sources*); only owners mix.
  3. What happens at attention? See residual_map and neutreno in GPTConfig; DenseFormer acts between the blocks.

Layer 1 to 4 of    vanilla    ResFormer       SVFormer    CLA
                     v1        v1──┬──┬──┐     v1          v1  k1
                     v2        v2<─┘  │  │     │           │   │
                     v3        v3<────┘  │     │           v3  k3
                     v4        v4<───────┘     │           │   │
(vN: layer N owns its values; │: it borrows those above; <: it mixes the source into its own.)

Two kinds of tensors travel down the layers. *Raw*: as projected, unmixed, before RoPE; sources are raw. *Attended*:
mixed and rotated; attention and borrowers read it. The paper: Value Residual Learning (ResFormer, SVFormer).
"""
import hashlib
import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    block_size: int = 2048  # longest sequence
    vocab_size: int = 50304  # GPT-NeoX's 50,277 ids, padded to a multiple of 128
    n_layer: int = 8  # blocks
    n_head: int = 8  # query heads
    n_embd: int = 512  # width
    n_kv_head: int = 0  # key and value heads; 0: n_head, fewer: GQA, 1: MQA
    n_inner: int = 0  # FFN width; 0: 3.5 n_embd for llama (Table 4), 4 n_embd for gpt2
    arch: str = 'llama'  # RMSNorm, SwiGLU, RoPE, no biases; or gpt2: LayerNorm, GELU, learned positions, biases
    rope_theta: float = 10000.0  # RoPE's base
    rope_scaling: tuple = ()  # llama3's (factor, low_freq, high_freq, original_length), for checkpoints from outside
    norm_eps: float = 1e-5  # epsilon of the norms
    dropout: float = 0.0  # on embeddings, attention weights and block outputs
    tie_embeddings: bool = False  # lm_head shares wte's weight
    v_residual: bool = False  # ResFormer (Eq. 7): V_n <- (V_1 + V_n) / 2 for n >= 2
    q_residual: bool = False  # the same mixing on queries, before RoPE (Fig. 6)
    k_residual: bool = False  # the same mixing on keys, before RoPE (Fig. 6)
    residual_from: str = 'first'  # the sources: first, previous or all earlier layers (Fig. 8, Eq. 5)
    residual_lambda: tuple = ()  # fixed weights (each source, own); empty: the mean over the sources and own
    residual_learned: bool = False  # the weights are parameters, one per source and own
    residual_layers: tuple = ()  # 0-based layers that mix (Sparse ResFormer); empty: all but the first
    residual_map: str = 'current'  # values are mapped by current (Eq. 4), identity (Eq. 6) or cross (Eq. 2) attention
    share_q: bool = False  # borrow the queries of an earlier layer (Fig. 13)
    share_k: bool = False  # borrow the keys of an earlier layer (Figs. 4, 13; with share_v: CLA)
    share_v: bool = False  # SVFormer (Eq. 10): every layer attends with V_1
    share_q_every: int = 0  # m: each run of m layers shares its first layer's; 0: all share layer 1's
    share_k_every: int = 0  # likewise for keys
    share_v_every: int = 0  # likewise for values (Fig. 14)
    neutreno: float = 0.0  # NeuTRENO's lambda: U_n += lambda (V_1 - values attended with) (Eq. 8)
    denseformer: bool = False  # learned average over the embedding and all block outputs, after every block

    def __post_init__(self):
        for name in ('residual_lambda', 'residual_layers', 'rope_scaling'):
            setattr(self, name, tuple(getattr(self, name)))  # JSON has lists
        for name, allowed in (('arch', ('llama', 'gpt2')), ('residual_from', ('first', 'previous', 'all')),
                              ('residual_map', ('current', 'identity', 'cross'))):
            refuse(getattr(self, name) not in allowed, f'{name}={getattr(self, name)!r} is not one of {allowed}')
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_kv_head', 'n_inner'):
            least = getattr(GPTConfig, name) > 0
            refuse(getattr(self, name) < least, f'{name}={getattr(self, name)} must be at least {least:d}')
        refuse(not 0 <= self.dropout < 1, f'dropout={self.dropout} must be at least 0 and less than 1')
        refuse(self.n_embd % self.n_head, f'n_embd={self.n_embd} is not divisible by n_head={self.n_head}')
        refuse(self.n_head % self.kv_heads, f'n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}')
        refuse(self.arch == 'llama' and self.head_size % 2,
               f'n_embd={self.n_embd} / n_head={self.n_head} is odd, but RoPE rotates pairs')
        for name in ('rope_theta', 'rope_scaling'):
            refuse(self.arch == 'gpt2' and getattr(self, name) != getattr(GPTConfig, name),
                   f"{name} does nothing with arch='gpt2'; drop one")
        refuse(self.rope_scaling and ([type(x) in (int, float) and x > 0 for x in self.rope_scaling] != [True] * 4
                                      or self.rope_scaling[1] >= self.rope_scaling[2]),
               f'rope_scaling={self.rope_scaling} must be (factor, low_freq < high_freq, original_length), positive')

        residuals = [f'{part}_residual' for part in 'qkv' if getattr(self, f'{part}_residual')]
        for name in ('residual_from', 'residual_lambda', 'residual_learned', 'residual_layers', 'residual_map'):
            refuse(not residuals and getattr(self, name) != getattr(GPTConfig, name),
                   f'{name} does nothing without v_residual, q_residual or k_residual; turn one on or drop {name}')
        refuse(self.residual_lambda and [type(w) in (int, float) for w in self.residual_lambda] != [True, True],
               f'residual_lambda={self.residual_lambda} must be two weights: (each source, own)')
        refuse(self.residual_learned and len(residuals) > 1,
               f'residual_learned goes with one residual, not {" and ".join(residuals)}; keep one of them')
        for name in ('residual_lambda', 'residual_learned'):
            refuse(self.residual_map != 'current' and getattr(self, name),
                   f'{name} does nothing with residual_map={self.residual_map!r}; drop one')
        refuse(self.residual_map != 'current' and not self.v_residual,
               f'residual_map={self.residual_map!r} maps values: it needs v_residual=True')
        for part in 'qkv':
            share, every = getattr(self, f'share_{part}'), getattr(self, f'share_{part}_every')
            refuse(every and not share, f'share_{part}_every does nothing without share_{part}=True')
            refuse(every == 1 or every < 0, f'share_{part}_every={every} must be 0 (whole depth) or at least 2')
            refuse(share and self.n_layer == 1, f'share_{part} does nothing with n_layer=1; drop one')
            whole = share and (every == 0 or every >= self.n_layer)
            refuse(whole and f'{part}_residual' in residuals, f'{part}_residual does nothing with share_{part} over '
                   f'the whole depth: only the first layer has its own; drop one or set share_{part}_every')
            refuse(whole and part == 'v' and self.neutreno,
                   'neutreno is zero with share_v over the whole depth: V_1 - V_1; drop one or set share_v_every')
        refuse(self.neutreno and self.n_layer == 1, 'neutreno does nothing with n_layer=1; drop one')
        wire(self)  # refuses wirings that leave a layer or a residual with nothing to do

    head_size = property(lambda self: self.n_embd // self.n_head)
    kv_heads = property(lambda self: self.n_kv_head or self.n_head)
    ffn_width = property(lambda self: self.n_inner or (7 if self.arch == 'llama' else 8) * self.n_embd // 2)


def refuse(condition, message):
    if condition:
        raise ValueError(message)


def wire(config):
    """The wiring as data. Of each layer n, by part:
    owner    layer that projects it; {'q': n, 'k': n, 'v': n} in a vanilla Transformer
    sources  layers, owners all, whose raw tensors are mixed in
    pairs    (owner of k, owner of v) it attends with: its own, and with residual_map='cross' its sources' before that
    raw, attended    the tensors it reads, its own among them: {(part, layer)}"""
    layers = []
    for n in range(config.n_layer):
        owner, sources = {}, {}
        before = {'first': range(1), 'previous': range(n - 1, n), 'all': range(n)}[config.residual_from]
        for part in 'qkv':
            every = getattr(config, f'share_{part}_every') or config.n_layer
            owner[part] = n - n % every if getattr(config, f'share_{part}') else n
            mixes = n in config.residual_layers if config.residual_layers else n > 0 and owner[part] == n
            sources[part] = []
            if mixes and getattr(config, f'{part}_residual'):
                refuse(n == 0, 'residual_layers names layer 0, which has no earlier layer to mix in')
                refuse(owner[part] != n, f'residual_layers names layer {n}, which borrows its {part} from layer '
                       f'{owner[part]} (share_{part}); name layers that project their own')
                sources[part] = [layers[s].owner[part] for s in before]
        refuse(n not in owner.values(), f'layer {n} would project none of q, k, v; turn off share_q, share_k or '
               'share_v, or set its share_*_every')
        cross = before if config.residual_map == 'cross' and sources['v'] else []
        pairs = [(o['k'], o['v']) for o in (*(layers[s].owner for s in cross), owner)]
        raw = {(part, s) for part in 'qkv' for s in (n, *sources[part])} | ({('v', 0)} if config.neutreno else set())
        attended = {*owner.items(), *(('k', k) for k, _ in pairs), *(('v', v) for _, v in pairs)}
        layers.append(SimpleNamespace(owner=owner, sources=sources, pairs=pairs, raw=raw, attended=attended))
    for n in config.residual_layers:
        refuse(n not in range(config.n_layer),
               f'residual_layers names layer {n}; the layers are 0 to {config.n_layer - 1}')
    for part in 'qkv':
        refuse(getattr(config, f'{part}_residual') and not any(w.sources[part] for w in layers),
               f'{part}_residual does nothing with n_layer={config.n_layer}: no layer has a source')
    return layers


class Attention(nn.Module):
    """Causal self-attention of layer `n`. Rows of c_attn: q, then k, then v, of those it owns."""

    def __init__(self, config, n):
        super().__init__()
        layers = wire(config)
        self.n, self.wiring, self.head_size, self.dropout = n, layers[n], config.head_size, config.dropout
        self.residual_map, self.neutreno = config.residual_map, config.neutreno if n else 0.0
        self.owned = [part for part in 'qkv' if layers[n].owner[part] == n]
        # What no later layer reads is dropped, so that its memory can be freed.
        self.last_raw, self.last_attended = (sorted(getattr(layers[n], kind).difference(
            *(getattr(w, kind) for w in layers[n + 1:]))) for kind in ('raw', 'attended'))

        bias = config.arch == 'gpt2'
        heads = {'q': config.n_head, 'k': config.kv_heads, 'v': config.kv_heads}
        self.rows = [heads[part] * self.head_size for part in self.owned]
        self.c_attn = nn.Linear(config.n_embd, sum(self.rows), bias=bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=bias)

        n_sources = max(len(sources) for sources in self.wiring.sources.values())
        uniform = 1 / (n_sources + 1)
        source, own = config.residual_lambda or (uniform, uniform)
        self.weights = [float(source)] * n_sources + [float(own)]
        learned = config.residual_learned and n_sources
        self.residual_lambda = nn.Parameter(torch.tensor(self.weights)) if learned else None

    def mix(self, own, sources):
        """Weighted sum of raw tensors: this layer's own and its sources' (Eq. 7; Eq. 5 where the source is not V_1)."""
        weights, mixed = self.weights, own
        if self.residual_lambda is not None:  # in fp32: a half-precision product would round the weights, too
            weights, mixed = self.residual_lambda, own.to(self.residual_lambda.dtype)
        mixed = weights[-1] * mixed
        for weight, source in zip(weights[:-1], sources, strict=True):
            mixed = mixed + weight * source
        return mixed.type_as(own)

    def forward(self, x, rope, raw, attended, cache, mask):
        B, T, C = x.size()
        owner, sources, pairs = self.wiring.owner, self.wiring.sources, self.wiring.pairs
        for part, t in zip(self.owned, self.c_attn(x).split(self.rows, dim=2), strict=True):
            t = t.view(B, T, -1, self.head_size).transpose(1, 2)  # (B, nh or n_kv_head, T, hs)
            raw[part, self.n] = t
            if sources[part] and (part != 'v' or self.residual_map == 'current'):
                t = self.mix(t, [raw[part, s] for s in sources[part]])
            attended[part, self.n] = t if part == 'v' or rope is None else rotate(t, *rope)
            if cache is not None and part != 'q':
                cache.append(part, self.n, attended[part, self.n])

        dropout = self.dropout if self.training else 0.0
        seen = attended if cache is None else cache
        keys, values = [seen['k', k] for k, _ in pairs], [seen['v', v] for _, v in pairs]
        y = attend_cross(attended['q', owner['q']], keys, values, dropout, mask)  # (B, nh, T, hs)
        added = []
        if self.residual_map == 'identity' and sources['v']:
            added.append(sum(raw['v', s] for s in sources['v']) / len(sources['v']))
        if self.neutreno:
            added.append(self.neutreno * (raw['v', 0] - attended['v', owner['v']]))
        for t in added:  # to each of the query heads that share it
            y = y + t.repeat_interleave(y.size(1) // t.size(1), dim=1)
        for tensors, last in ((raw, self.last_raw), (attended, self.last_attended)):
            for pair in last:
                tensors.pop(pair, None)
        return F.dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)), dropout)


def attend(q, k, v, dropout=0.0, mask=None):
    """Attention of q (B, nh, T, hs) to k, v (B, n_kv_head, S, hs); all variants call it. Without a mask (T, S), True
    where a query sees a key: causal (S = T; flash on a GPU), or one query that sees all keys (T = 1)."""
    B, nh, T, hs = q.size()
    group, k, v = nh // k.size(1), k.type_as(q), v.type_as(q)  # a cache may have another type
    if mask is None and T > 1:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=group > 1)
    if group > 1:  # the query heads of a group become rows: its keys are read once, by any kernel
        q = q.reshape(B, nh // group, group * T, hs)
        mask = mask if mask is None else mask.repeat(group, 1)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout).view(B, nh, T, hs)


def attend_cross(q, keys, values, dropout=0.0, mask=None):
    """One softmax over the keys of one or several layers, causal in each (Eq. 2). With several layers' keys interleaved
    in time, and each query standing behind all keys of its own time, plain causal attention does it without a mask."""
    P = len(keys)
    if P == 1:
        return attend(q, *keys, *values, dropout, mask)
    if mask is not None or q.size(2) == 1:
        return attend(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), dropout,
                      mask if mask is None else mask.repeat(1, P))
    k, v = (torch.stack(parts, dim=3).flatten(2, 3) for parts in (keys, values))  # (B, n_kv_head, T * P, hs)
    return attend(q.repeat_interleave(P, dim=2), k, v, dropout)[:, :, P - 1::P]


def rotate(x, cos, sin):
    """RoPE, by halves as in Hugging Face's Llama; cos and sin are (T, hs)."""
    x1, x2 = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-x2, x1), dim=-1) * sin).type_as(x)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.swiglu, self.dropout = config.arch == 'llama', config.dropout
        width, bias = config.ffn_width, config.arch == 'gpt2'
        self.c_fc = nn.Linear(config.n_embd, 2 * width if self.swiglu else width, bias=bias)  # rows: gate, up
        self.c_proj = nn.Linear(width, config.n_embd, bias=bias)

    def forward(self, x):
        x = self.c_fc(x)
        if self.swiglu:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        else:
            x = F.gelu(x, approximate='tanh')
        return F.dropout(self.c_proj(x), self.dropout if self.training else 0.0)


class Block(nn.Module):
    def __init__(self, config, n):
        super().__init__()
        self.ln_1 = norm(config)
        self.attn = Attention(config, n)
        self.ln_2 = norm(config)
        self.mlp = MLP(config)

    def forward(self, x, rope, raw, attended, cache, mask):
        x = x + self.attn(self.ln_1(x), rope, raw, attended, cache, mask)
        x = x + self.mlp(self.ln_2(x))
        return x


def norm(config):
    return (nn.RMSNorm if config.arch == 'llama' else nn.LayerNorm)(config.n_embd, eps=config.norm_eps)


def rope_tables(config):
    """RoPE's cos and sin, (block_size, hs) each. Llama 3's scaling stretches wavelengths longer than original_length /
    low_freq by `factor`, leaves those shorter than original_length / high_freq, and blends in between."""
    inverse = config.rope_theta ** (-torch.arange(0, config.head_size, 2).float() / config.head_size)
    if config.rope_scaling:
        factor, low, high, length = config.rope_scaling
        kept = ((length * inverse / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        inverse = inverse * (kept + (1 - kept) / factor)
    angles = torch.outer(torch.arange(config.block_size).float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


class KVCache:
    """Keys and values of the tokens so far, as attended with: (B, n_kv_head, max_len, hs) for each layer that owns
    them; borrowers have none. Its place in the text is a tensor, so that a compiled model decodes without recompiling:
    compiled, attention reads all max_len rows under a mask; not compiled, only those that are filled."""

    def __init__(self, config, batch_size, max_len, dtype, device):
        refuse(max_len > config.block_size, f'max_len={max_len} is more than block_size={config.block_size}: '
               'only without a cache can generation go on, with the last block_size tokens')
        self.max_len = self.end = max_len
        shape = batch_size, config.kv_heads, max_len, config.head_size
        self.tensors = {(part, n): torch.zeros(shape, dtype=dtype, device=device)
                        for n, wiring in enumerate(wire(config)) for part in 'kv' if wiring.owner[part] == n}
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # tokens so far
        for tensor in (*self.tensors.values(), self.position):  # CUDA graphs may write to them
            torch._dynamo.mark_static_address(tensor, guard=False)

    nbytes = property(lambda self: sum(tensor.nbytes for tensor in self.tensors.values()))

    def begin(self, T):
        """Make ready for T more tokens; returns their positions (T,) and the mask for attend()."""
        self.positions = self.position + torch.arange(T, device=self.position.device)
        if torch.compiler.is_compiling():  # no Python number may depend on the position
            self.end = self.max_len
            torch._assert_async(self.positions[-1] < self.end, 'more tokens than the cache has room for: max_len')
        else:
            self.end = int(self.position) + T
            refuse(self.end > self.max_len, f'{T} more tokens do not fit into a cache of max_len={self.max_len}, which '
                   f'holds {self.end - T}')
            if self.end == T or T == 1:
                return self.positions, None
        return self.positions, torch.arange(self.end, device=self.position.device) <= self.positions[:, None]

    def append(self, part, layer, t):
        self.tensors[part, layer].index_copy_(2, self.positions, t.detach().to(self.tensors[part, layer].dtype))

    def __getitem__(self, pair):
        return self.tensors[pair][:, :, :self.end]


class GPT(nn.Module):
    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            h=nn.ModuleList(Block(config, n) for n in range(config.n_layer)),
            ln_f=norm(config),
        ))
        if config.arch == 'gpt2':
            self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            for name, table in zip(('cos', 'sin'), rope_tables(config), strict=True):
                self.register_buffer(name, table, persistent=False)
        if config.denseformer:  # weights over the embedding and the outputs of blocks 0 to n
            self.transformer.dwa = nn.ParameterList(torch.eye(n + 2)[-1] for n in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """embeddings, lm_head, c_attn, c_fc, c_proj   N(0, 0.02)
        c_proj of gpt2                              N(0, 0.02 / sqrt(2 n_layer))
        norms, biases, residual_lambda, dwa         as made: one, zero, and the neutral or given weights
        Each matrix, and the q, k and v rows of c_attn apart, has a generator of its own, seeded by (seed, name, block):
        variants of one size share every initial weight that they have in common."""
        for name, p in self.named_parameters():
            if p.dim() < 2:
                if name.endswith('.bias'):
                    p.zero_()  # nn.Linear's is random
                continue
            blocks, parts = [p], ['']
            if name.endswith('c_attn.weight'):
                attn = self.get_submodule(name.removesuffix('.c_attn.weight'))
                blocks, parts = p.split(attn.rows), attn.owned
            gpt2_out = self.config.arch == 'gpt2' and name.endswith('c_proj.weight')
            std = 0.02 / math.sqrt(2 * self.config.n_layer) if gpt2_out else 0.02
            for block, part in zip(blocks, parts, strict=True):
                digest = hashlib.sha256(f'{seed}/{name}/{part}'.encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], 'little', signed=True))
                block.copy_(torch.empty(block.shape).normal_(0.0, std, generator=generator))

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """Next-token logits, or the training loss. idx (B, T) int64 -> (logits, None), logits (B, T, V) or, with
        last_only, (B, 1, V). With targets (B, T), -1 ignored: (None, loss), the mean cross entropy in nats, fp32.
        With a cache of new_cache(), idx continues what the cache has seen, and is added to it."""
        T = idx.size(1)
        refuse(T > self.config.block_size, f'{T} tokens are more than block_size={self.config.block_size}')
        refuse(last_only and targets is not None, 'last_only is for logits, targets for the loss; drop one')
        rows, mask = (slice(T), None) if cache is None else cache.begin(T)
        x = self.transformer.wte(idx)  # (B, T, C)
        rope = (self.cos[rows], self.sin[rows]) if self.config.arch == 'llama' else None
        if rope is None:
            x = x + self.transformer.wpe.weight[rows]
        x = F.dropout(x, self.config.dropout if self.training else 0.0)

        raw, attended, outputs = {}, {}, [x]  # see the top of this file
        for n, block in enumerate(self.transformer.h):
            x = block(x, rope, raw, attended, cache, mask)
            if self.config.denseformer:
                outputs.append(x)
                x = sum(weight * output for weight, output in zip(self.transformer.dwa[n], outputs, strict=True))
        x = self.transformer.ln_f(x[:, -1:] if last_only else x)
        if cache is not None:
            cache.position += T
        if targets is None:
            return self.lm_head(x), None
        total = LinearCrossEntropy.apply(x.flatten(0, 1), self.lm_head.weight, targets.flatten(),
                                         torch.is_grad_enabled())
        return None, total / (targets != -1).sum()

    def new_cache(self, batch_size, max_len, dtype=None):
        """An empty KVCache for max_len tokens, on the model's device; dtype: that of the weights."""
        weight = self.lm_head.weight
        return KVCache(self.config, batch_size, max_len, dtype or weight.dtype, weight.device)

    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, cache=None, generator=None):
        """Yield the tokens (B, 1) that continue idx (B, T): sampled from the top_k likeliest, of these from the fewest
        with top_p of the probability; at temperature 0 the likeliest. Uncached (slow): after the last block_size."""
        refuse(not (temperature >= 0 and (top_k or 0) >= 0 and 0 < (1 if top_p is None else top_p) <= 1),
               f'temperature={temperature}, top_k={top_k} must be 0 or more, top_p={top_p} above 0 and at most 1')

        @torch.no_grad()
        def tokens(idx):
            for _ in range(max_new_tokens):
                context = idx if cache else idx[:, -self.config.block_size:]
                logits = self(context, cache=cache, last_only=True)[0][:, -1].float()
                if temperature < 1e-6:  # what is divided by less may overflow
                    new = logits.argmax(dim=-1, keepdim=True)
                else:
                    probs, order = F.softmax(logits / temperature, dim=-1), None
                    if top_k or (top_p or 1) < 1:  # a token stays if those before it have less than top_p
                        probs, order = probs.topk(min(top_k or probs.size(-1), probs.size(-1)))
                        probs = probs * (probs.cumsum(dim=-1) - probs < (top_p or 2) * probs.sum(dim=-1, keepdim=True))
                    new = torch.multinomial(probs, 1, generator=generator)
                    new = new if order is None else order.gather(1, new)
                idx = new if cache else torch.cat((idx, new), dim=1)
                yield new
        return tokens(idx)

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=True, generator=None):
        """Continue idx (B, T) as stream() does. Returns (B, T + max_new_tokens)."""
        cache = self.new_cache(idx.size(0), idx.size(1) + max_new_tokens) if use_cache else None
        return torch.cat((idx, *self.stream(idx, max_new_tokens, temperature, top_k, top_p, cache, generator)), dim=1)

    @classmethod
    def from_pretrained(cls, path_or_hub_id):
        """A Llama, Mistral or GPT-2 checkpoint of Hugging Face, from a folder or the hub."""
        return __import__('hf').load(path_or_hub_id)  # lazily: hf.py imports this file

    def num_params(self, non_embedding=True):
        """Number of weights; non_embedding leaves out wte, wpe and lm_head."""
        outside = ('transformer.wte.', 'transformer.wpe.', 'lm_head.') if non_embedding else ()
        return sum(p.numel() for name, p in self.named_parameters() if not name.startswith(outside))

    def flops_per_token(self, seq_len):
        """Training FLOPs per token as in PaLM's appendix B: 3 x the forward pass's matmuls (2 per weight), lm_head
        included, attention counted as full T x T (what residual_map='cross' computes more than it needs is not)."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        keys = sum(len(block.attn.wiring.pairs) * seq_len for block in self.transformer.h)
        return 3 * (2 * weights + 4 * keys * self.config.n_embd)


LOSS_CHUNK = 4096  # rows; at 50,304 ids a chunk's fp32 logits take 824 MB


class LinearCrossEntropy(torch.autograd.Function):
    """Sum over rows of the cross entropy of x @ weight.T, in chunks: the (N, V) logits never exist at once. A chunk's
    logits become its gradients right away, so that nothing is computed twice (as in Liger's fused kernel). FP16-safe:
    the loss scale comes in backward, in fp32.

    x (N, C), weight (V, C), targets (N,) int64 with -1 ignored; returns a fp32 scalar (float64 for float64 inputs)."""
    @staticmethod
    def forward(ctx, x, weight, targets, want_grad):
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(kind, enabled=False):
            w = weight.to(dtype)
            total = torch.zeros((), dtype=wide, device=x.device)
            grad_x, grad_w = [], torch.zeros(weight.shape if want_grad else 0, dtype=wide, device=x.device)
            for xc, tc in zip(x.split(LOSS_CHUNK), targets[:, None].split(LOSS_CHUNK), strict=True):
                xc, counted = xc.to(dtype), (tc != -1).to(wide)
                logits = (xc @ w.T).to(wide)
                lse = logits.logsumexp(dim=1, keepdim=True)
                # Not total +=: compiled by torch 2.11, a result made in place loses its gradient, silently.
                total = total + ((lse - logits.gather(1, tc.clamp(min=0))) * counted).sum()
                if want_grad:
                    hit = torch.arange(len(w), device=x.device) == tc  # not a scatter: this fuses when compiled
                    grad = logits.sub_(lse).exp_().sub_(hit.to(wide)).mul_(counted).to(dtype)
                    grad_x.append(grad @ w)
                    grad_w += (grad.T @ (xc / 64)).to(wide)  # / 64, undone below: a FP16 sum over rows stays finite
        ctx.save_for_backward(torch.cat(grad_x) if grad_x else None, grad_w.mul_(64))
        ctx.dtypes = x.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        grad_x = grad_x.to(grad.dtype)  # a scalar takes the other's type: in FP16 the loss scale would overflow
        return (grad * grad_x).to(ctx.dtypes[0]), (grad * grad_w).to(ctx.dtypes[1]), None, None
