"""
A slow, obvious second implementation of every variant, written from the paper's equations.

It computes one sequence, one head and one T x T attention matrix at a time, without a fused operation,
in the precision of the weights that it is given (use float64). It reads weights by their documented
names and shares no code with model.py.

Its lists are indexed by layer and have an entry for every layer, also for those that borrow:
raw[part][n] are the projections of layer n, unmixed and before RoPE (of its owner, if it borrows),
attended[part][n] is what layer n attends with. An entry is a list over heads of (T, hs) matrices.
"""

import math

import torch

# What is mixed into layer n of L: of these layers the earlier ones; 'token', a row of the layer's table;
# 'x0', the layer's projection of x_0; 'anchor', one projection of x_0 for all layers.
SOURCES = {
    'token': lambda n, L: ['token'],
    'first+token': lambda n, L: [0, 'token'],
    'x0': lambda n, L: ['x0'],
    'anchor': lambda n, L: ['anchor'],
    'first': lambda n, L: [0],
    'previous': lambda n, L: [n - 1],
    'all': lambda n, L: list(range(n)),
}


def perturb(model, seed=0):
    """Move every weight away from where it starts, so that nothing hides behind ones and zeros.

    That is norms, biases, lambdas, DenseFormer weights, and attention, which starts almost uniform.
    Returns the model.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.empty_like(p).normal_(0.0, 0.25, generator=generator)
    return model


def logits(config, weights, idx):
    """(B, T, V) logits of idx (B, T); weights maps parameter names to tensors."""
    head = weights['transformer.wte.weight' if config.tie_embeddings else 'lm_head.weight']
    rows = []
    for tokens in idx:
        hidden, _, _ = layers(config, weights, tokens)
        rows.append(norm(config, weights, 'transformer.ln_f', hidden[-1]) @ head.T)
    return torch.stack(rows)


def layers(config, weights, tokens):
    """(hidden states after each layer, raw, attended) of a sequence."""
    T = len(tokens)
    x = weights['transformer.wte.weight'][tokens]
    x0 = over_rms(config, x)
    if config.embed_norm:
        x = x0
    if config.arch == 'gpt2':
        x = x + weights['transformer.wpe.weight'][:T]

    raw = {'q': [], 'k': [], 'v': []}
    attended = {'q': [], 'k': [], 'v': []}
    history, added, hidden = [x], [], []
    for n in range(config.n_layer):
        name = f'transformer.h.{n}'
        if config.x0_residual:
            r, s = weights[f'transformer.x0.{n}']
            x = r * x + s * x0
        entering = x
        added = added or [x]  # the embedding as block 0 gets it, then what each block adds
        normed = norm(config, weights, f'{name}.ln_1', x)
        x = x + attention(config, weights, n, normed, (tokens, x0), raw, attended)
        x = x + mlp(config, weights, f'{name}.mlp', norm(config, weights, f'{name}.ln_2', x))
        if config.denseformer:
            history.append(x)
            alpha = weights[f'transformer.dwa.{n}']
            assert len(alpha) == len(history) == n + 2
            x = torch.zeros_like(x)
            for i in range(n + 2):
                x = x + alpha[i] * history[i]
        if config.attn_res:
            added.append(x - entering)
            x = over_depth(config, weights[f'transformer.depth_queries.{n}'], added)
        hidden.append(x)
    return hidden, raw, attended


def over_depth(config, query, added):
    """What each position reads of what blocks added, (T, C): one softmax over blocks."""
    scores = torch.stack([over_rms(config, u) @ query for u in added], dim=1)
    A = softmax(scores)  # (T, blocks)
    return sum(A[:, i : i + 1] * u for i, u in enumerate(added))


def attention(config, weights, n, x, embedding, raw, attended):
    """The output of layer n's attention for x (T, C); what it projects is added to raw and attended.

    embedding: the tokens and x_0, which sources that are no layers follow from.
    """
    project(config, weights, n, x, raw)
    mix_and_rotate(config, weights, n, x, embedding, raw, attended)
    outputs = [attend(config, n, h, raw, attended) for h in range(config.n_head)]
    if config.output_gate:
        gates = x @ weights[f'transformer.h.{n}.attn.gate.weight'].T
        outputs = [U * sigmoid(gates[:, h : h + 1]) for h, U in enumerate(outputs)]
    return linear(weights, f'transformer.h.{n}.attn.c_proj', torch.cat(outputs, dim=1))


def project(config, weights, n, x, raw):
    """Raw: projected here, head by head, or the owner's. Nobody reads values whose weight is 0."""
    hs = config.n_embd // config.n_head
    for part in 'qkv':
        name = f'transformer.h.{n}.attn.{part}.proj'
        own = own_heads(config, part, n)
        is_projected = own > 0 and not has_no_weight(config, part, n)
        assert is_projected == (f'{name}.weight' in weights)
        columns = [None] * own
        if is_projected:
            projected = linear(weights, name, x)
            assert projected.shape[1] == own * hs, f'{name} has rows that nobody uses'
            columns = [projected[:, h * hs : (h + 1) * hs] for h in range(own)]
        raw[part].append(columns + raw_or_attended_of_owner(config, part, n, raw, own))


def has_no_weight(config, part, n):
    """Whether the weight of a layer's own q, k or v in its mixture is 0 for ever."""
    mixes = mixed_in(config, part, n) and config.residual_map == 'current'
    is_fixed = config.residual_weights != 'learned'
    return mixes and is_fixed and tuple(config.residual_lambda[1:]) == (0,)


def raw_or_attended_of_owner(config, part, n, tensors, own):
    """What a borrower borrows, behind its `own` heads: those of its owner, at the same places."""
    return tensors[part][owner(config, part, n)][own:] if own < heads(config, part) else []


def mixed_in(config, part, n):
    """The sources of layer n's own q, k or v."""
    return sources_of(config, part, n) if owner(config, part, n) == n else []


def mix_and_rotate(config, weights, n, x, embedding, raw, attended):
    """Attended: the owner's, as it is; or mixed, normed, then rotated."""
    hs = config.n_embd // config.n_head
    for part in 'qkv':
        mixes = mixed_in(config, part, n)
        if part == 'v' and config.residual_map != 'current':
            mixes = []  # at attention
        result = []
        for h in range(own_heads(config, part, n)):
            own = raw[part][n][h]
            if mixes:
                tensors = []
                for source in mixes:
                    if isinstance(source, int):
                        tensors.append(raw[part][source][h])
                    else:
                        tensors.append(outer(weights, n, source, embedding, hs)[h])
                is_gated = part == 'v' and config.residual_weights in GATES
                mix = gated if is_gated else mixture
                own = mix(config, weights, n, h, part, x, tensors, own)
            if config.qk_norm and part != 'v':
                own = over_rms(config, own)
            if config.qk_norm and part == 'q':
                own = own * weights[f'transformer.h.{n}.attn.q.gain'][h]
            if config.arch == 'llama' and part != 'v':
                own = rope(config, own)
            result.append(own)
        own = len(result)
        attended[part].append(result + raw_or_attended_of_owner(config, part, n, attended, own))


def outer(weights, n, source, embedding, hs):
    """The heads, of size hs, of a source that is no layer."""
    tokens, x0 = embedding
    if source == 'token':
        rows = weights[f'transformer.ve.{n}.weight'][tokens]
    else:
        name = 'anchor' if source == 'anchor' else f'vx.{n}'
        rows = x0 @ weights[f'transformer.{name}.weight'].T
    return rows.split(hs, dim=1)


def attend(config, n, h, raw, attended):
    """Attention of head h; grouped query heads read the same key and value head."""
    hs = config.n_embd // config.n_head
    g = h // (config.n_head // heads(config, 'v'))
    sources = mixed_in(config, 'v', n)
    maps = config.residual_map if sources else 'current'
    layers = sources + [n] if maps == 'cross' else [n]

    scores = []
    for layer in layers:
        products = attended['q'][n][h] @ attended['k'][layer][g].T
        scores.append(causal(products / math.sqrt(hs)))
    A = softmax(torch.cat(scores, dim=1))  # (T, T), or (T, layers * T) in Eq. 2
    U = A @ torch.cat([attended['v'][layer][g] for layer in layers])
    if config.exclusive:
        v = attended['v'][n][g]
        share = (U * v).sum(dim=1) / (v * v).sum(dim=1).clamp(min=1e-12)
        U = U - share[:, None] * v
    if maps == 'identity':  # Eq. 6, with the mean in place of the sum
        U = U + sum(raw['v'][s][g] for s in sources) / len(sources)
    if config.neutreno:  # Eq. 8's V_1 - V'_n
        U = U + config.neutreno * (raw['v'][0][g] - attended['v'][n][g])
    return U


def heads(config, part):
    return config.n_head if part == 'q' else config.n_kv_head or config.n_head


def own_heads(config, part, n):
    """How many heads of a part layer n projects: all, none, or all but those that it borrows."""
    if owner(config, part, n) == n:
        return heads(config, part)
    if part == 'v' and config.share_v_heads:
        return heads(config, part) - config.share_v_heads
    return 0


def sources_of(config, part, n):
    """The layers that layer n mixes in, if it has a residual."""
    residual = getattr(config, f'{part}_residual')
    if not residual:
        return []
    name = 'first' if residual is True else residual
    assert name in SOURCES, (
        f'{part}_residual={name!r} is unknown here: add what it means, from the equations, to SOURCES '
        'in tests/reference.py'
    )
    if config.residual_layers and n not in config.residual_layers:
        return []
    sources = SOURCES[name](n, config.n_layer)
    return [source for source in sources if isinstance(source, str) or 0 <= source < n]


def owner(config, part, n):
    """The layer whose projection layer n uses: by the map, or the first of its run of m layers."""
    share = getattr(config, f'share_{part}')
    if isinstance(share, tuple):
        return share[n]
    m = {False: 1, True: config.n_layer}[share] if isinstance(share, bool) else share
    return max(start for start in range(0, config.n_layer, m) if start <= n)


def mixture(config, weights, n, h, part, x, sources, own):
    count = len(sources)
    if config.residual_weights == 'learned':
        lambdas = weights[f'transformer.h.{n}.attn.{part}.residual_lambda']
        assert len(lambdas) == count + 1
    elif config.residual_lambda:
        lambdas = [config.residual_lambda[0]] * count + [config.residual_lambda[1]]
    else:
        lambdas = [1 / (count + 1)] * (count + 1)
    total = 0 if own is None else lambdas[-1] * own
    for i, source in enumerate(sources):
        total = total + lambdas[i] * source
    return total


def gated(config, weights, n, h, part, x, sources, own):
    """Head h of the values of layer n, mixed by a gate that follows from x (T, C)."""
    g = gate(config, weights, n, h, x)
    if config.residual_lambda:
        s, o = config.residual_lambda
        own_share = 0 if own is None else o * own
        return own_share + s * g * sum(sources)
    own_share = own if config.residual_weights == 'relu' else own * (1 - g)
    return own_share + g * sum(sources) / len(sources)


def gate(config, weights, n, h, x):
    """(T, 1), or with a gate for each channel (T, hs)."""
    activation, logits = GATES[config.residual_weights]
    return activation(logits(config, weights, f'transformer.h.{n}.attn.v', h, x))


def logits_of_channels(config, weights, name, h, x):
    hs = config.n_embd // config.n_head
    A, B = weights[f'{name}.gate_down.weight'].T, weights[f'{name}.gate_up.weight'].T
    return (weights[f'{name}.gate_bias'] + (x @ A) @ B)[:, h * hs : (h + 1) * hs]


def logits_of_head(config, weights, name, h, x):
    m = config.gate_inputs or config.n_embd
    logits = x[:, :m] @ weights[f'{name}.gate.weight'][h]
    if config.gate_bias:
        logits = logits + weights[f'{name}.gate.bias'][h]
    return logits[:, None]


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


# {residual_weights: what a gate is of its logits, and these}
GATES = {
    'head': (sigmoid, logits_of_head),
    'relu': (lambda x: x.clamp(min=0), logits_of_head),  # SATFormer
    'channel': (sigmoid, logits_of_channels),  # RWKV-7
}


def over_rms(config, x):
    return x / torch.sqrt((x**2).mean(dim=1, keepdim=True) + config.norm_eps)


def causal(scores):
    time = torch.arange(len(scores))
    # A row is a query, a column a key.
    return scores.masked_fill(time[None, :] > time[:, None], -math.inf)


def softmax(scores):
    e = torch.exp(scores - scores.max(dim=1, keepdim=True).values.detach())
    return e / e.sum(dim=1, keepdim=True)


def rope(config, x):
    """Rotate the pair (i, i + hs/2) at time t by the angle t * its frequency."""
    T, hs = x.shape
    half = hs // 2
    frequencies = rope_frequencies(hs, config.rope_theta, config.rope_scaling)
    angle = torch.tensor([[t * f for f in frequencies] for t in range(T)], dtype=x.dtype)
    a, b = x[:, :half], x[:, half:]
    rotated = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat(rotated, dim=1)


def rope_frequencies(head_size, theta, scaling):
    """theta^(-2i / hs) for each pair, after Llama 3's scaling, which goes by wavelengths."""
    frequencies = []
    for i in range(head_size // 2):
        frequency = theta ** (-2 * i / head_size)
        if scaling:
            factor, low_freq, high_freq, original_length = scaling
            wavelength = 2 * math.pi / frequency
            if wavelength > original_length / low_freq:
                frequency = frequency / factor
            elif wavelength >= original_length / high_freq:
                smooth = (original_length / wavelength - low_freq) / (high_freq - low_freq)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    return frequencies


def norm(config, weights, name, x):
    weight = weights[f'{name}.weight']
    if config.arch == 'gpt2':
        centered = x - x.mean(dim=1, keepdim=True)
        variance = (centered**2).mean(dim=1, keepdim=True)
        return centered / torch.sqrt(variance + config.norm_eps) * weight + weights[f'{name}.bias']
    return over_rms(config, x) * weight


def mlp(config, weights, name, x):
    h = linear(weights, f'{name}.c_fc', x)
    if config.arch == 'gpt2':
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    else:
        gate = linear(weights, f'{name}.c_gate', x)
        h = gate * sigmoid(gate) * h
    return linear(weights, f'{name}.c_proj', h)


def linear(weights, name, x):
    y = x @ weights[f'{name}.weight'].T
    if f'{name}.bias' in weights:
        y = y + weights[f'{name}.bias']
    return y
