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

# The layers that are mixed into layer n of L, by residual_from; 'token' is a row of the layer's table.
SOURCES = {
    'token': lambda n, L: ['token'],
    'first+token': lambda n, L: [0, 'token'] if n else ['token'],
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
    return torch.stack([sequence_logits(config, weights, row) for row in idx])


def sequence_logits(config, weights, tokens):
    hidden, _, _ = layers(config, weights, tokens)
    x = norm(config, weights, 'transformer.ln_f', hidden[-1])
    head = weights['transformer.wte.weight' if config.tie_embeddings else 'lm_head.weight']
    return x @ head.T


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
    history, hidden = [x], []
    for n in range(config.n_layer):
        name = f'transformer.h.{n}'
        if config.x0_residual:
            r, s = weights[f'transformer.x0.{n}']
            x = r * x + s * x0
        normed = norm(config, weights, f'{name}.ln_1', x)
        x = x + attention(config, weights, n, normed, tokens, raw, attended)
        x = x + mlp(config, weights, f'{name}.mlp', norm(config, weights, f'{name}.ln_2', x))
        if config.denseformer:
            history.append(x)
            alpha = weights[f'transformer.dwa.{n}']
            assert len(alpha) == len(history) == n + 2
            x = torch.zeros_like(x)
            for i in range(n + 2):
                x = x + alpha[i] * history[i]
        hidden.append(x)
    return hidden, raw, attended


def attention(config, weights, n, x, tokens, raw, attended):
    """The output of layer n's attention for x (T, C); what it projects is added to raw and attended."""
    project(config, weights, n, x, raw)
    mix_and_rotate(config, weights, n, x, tokens, raw, attended)
    outputs = [attend(config, n, h, raw, attended) for h in range(config.n_head)]
    return linear(weights, f'transformer.h.{n}.attn.c_proj', torch.cat(outputs, dim=1))


def project(config, weights, n, x, raw):
    """Raw: projected here or the owner's. The rows of c_attn are q, k, v, of what this layer owns."""
    hs = config.n_embd // config.n_head
    projected = linear(weights, f'transformer.h.{n}.attn.c_attn', x)
    column = 0
    for part in 'qkv':
        own = own_heads(config, part, n)
        columns = []
        for _ in range(own):
            columns.append(projected[:, column : column + hs])
            column += hs
        raw[part].append(columns + raw_or_attended_of_owner(config, part, n, raw, own))
    assert column == projected.shape[1], 'c_attn has rows that nobody uses'


def raw_or_attended_of_owner(config, part, n, tensors, own):
    """What a borrower borrows, behind its `own` heads: those of its owner, at the same places."""
    return tensors[part][owner(config, part, n)][own:] if own < heads(config, part) else []


def mix_and_rotate(config, weights, n, x, tokens, raw, attended):
    """Attended: the owner's, as it is; or mixed, normed, then rotated."""
    sources = sources_of(config, n)
    for part in 'qkv':
        mixes = getattr(config, f'{part}_residual') and sources and owner(config, part, n) == n
        if part == 'v' and config.residual_map != 'current':
            mixes = False  # at attention
        result = []
        for h in range(own_heads(config, part, n)):
            own = raw[part][n][h]
            if mixes:
                tensors = []
                for s in sources:
                    tensors.append(
                        table_row(config, weights, n, h, tokens)
                        if s == 'token'
                        else raw[part][s][h]
                    )
                mix = gated if part == 'v' and config.residual_gate else mixture
                own = mix(config, weights, n, h, x, tensors, own)
            if config.qk_norm and part != 'v':
                own = over_rms(config, own)
            if config.qk_norm and part == 'q':
                own = own * weights[f'transformer.h.{n}.attn.q_gain'][h]
            if config.arch == 'llama' and part != 'v':
                own = rope(config, own)
            result.append(own)
        own = len(result)
        attended[part].append(result + raw_or_attended_of_owner(config, part, n, attended, own))


def table_row(config, weights, n, h, tokens):
    hs = config.n_embd // config.n_head
    return weights[f'transformer.ve.{n}.weight'][tokens][:, h * hs : (h + 1) * hs]


def attend(config, n, h, raw, attended):
    """Attention of head h; grouped query heads read the same key and value head."""
    hs = config.n_embd // config.n_head
    g = kv_head(config, h)
    sources = sources_of(config, n)
    maps = 'current'
    if config.v_residual and sources and owner(config, 'v', n) == n:
        maps = config.residual_map
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
    return U + config.neutreno * above_own(n, g, raw, attended)


def kv_head(config, h):
    return h // (config.n_head // heads(config, 'v'))


def above_own(n, g, raw, attended):
    """NeuTRENO's V_1 - V'_n (Eq. 8)."""
    return raw['v'][0][g] - attended['v'][n][g]


def heads(config, part):
    return config.n_head if part == 'q' else config.n_kv_head or config.n_head


def own_heads(config, part, n):
    """How many heads of a part layer n projects: all, none, or all but those that it borrows."""
    if owner(config, part, n) == n:
        return heads(config, part)
    if part == 'v' and config.share_v_heads:
        return heads(config, part) - config.share_v_heads
    return 0


def sources_of(config, n):
    """The layers that layer n mixes in, if it has a residual."""
    assert config.residual_from in SOURCES, (
        f'residual_from={config.residual_from!r} is unknown here: add what it means, from the equations, '
        'to SOURCES in tests/reference.py'
    )
    if n == 0 and 'token' not in config.residual_from:
        return []
    if config.residual_layers and n not in config.residual_layers:
        return []
    return SOURCES[config.residual_from](n, config.n_layer)


def owner(config, part, n):
    """The layer whose projection layer n uses: by the map, or the first of its run of m layers.

    For m = 0 all layers are one run.
    """
    owners = getattr(config, f'share_{part}_from')
    if owners:
        return owners[n]
    if not getattr(config, f'share_{part}'):
        return n
    m = getattr(config, f'share_{part}_every') or config.n_layer
    return max(start for start in range(0, config.n_layer, m) if start <= n)


def mixture(config, weights, n, h, x, sources, own):
    count = len(sources)
    if config.residual_learned:
        lambdas = weights[f'transformer.h.{n}.attn.residual_lambda']
        assert len(lambdas) == count + 1
    elif config.residual_lambda:
        lambdas = [config.residual_lambda[0]] * count + [config.residual_lambda[1]]
    else:
        lambdas = [1 / (count + 1)] * (count + 1)
    total = lambdas[-1] * own
    for i, source in enumerate(sources):
        total = total + lambdas[i] * source
    return total


def gated(config, weights, n, h, x, sources, own):
    """Head h of the values of layer n, mixed by a gate that follows from x (T, C)."""
    g = gate(config, weights, n, h, x)
    if config.residual_lambda:
        s, o = config.residual_lambda
        return o * own + s * g * sum(sources)
    return own + (sum(sources) / len(sources) - own) * g


def gate(config, weights, n, h, x):
    """(T, 1), or with a gate for each channel (T, hs)."""
    name = f'transformer.h.{n}.attn'
    if config.residual_gate == 'channel':  # RWKV-7
        hs = config.n_embd // config.n_head
        A, B = weights[f'{name}.gate_down.weight'].T, weights[f'{name}.gate_up.weight'].T
        logits = weights[f'{name}.gate_bias'] + (x @ A) @ B
        return 1 / (1 + torch.exp(-logits[:, h * hs : (h + 1) * hs]))
    m = config.residual_gate_inputs or config.n_embd
    logits = x[:, :m] @ weights[f'{name}.gate.weight'][h]
    if config.residual_gate_bias:
        logits = logits + weights[f'{name}.gate.bias'][h]
    return (1 / (1 + torch.exp(-logits)))[:, None]


def over_rms(config, x):
    return x / torch.sqrt((x**2).mean(dim=1, keepdim=True) + config.norm_eps)


def causal(scores):
    time = torch.arange(len(scores))
    # A row is a query, a column a key.
    return scores.masked_fill(time[None, :] > time[:, None], -math.inf)


def softmax(scores):
    e = torch.exp(scores - scores.max(dim=1, keepdim=True).values.detach())
    return e / e.sum(dim=1, keepdim=True)


def rope(config, x, times=None):
    """Rotate the pair (i, i + hs/2) at time t by the angle t * its frequency."""
    T, hs = x.shape
    times = range(T) if times is None else times
    half = hs // 2
    frequencies = rope_frequencies(hs, config.rope_theta, config.rope_scaling)
    angle = torch.tensor([[t * f for f in frequencies] for t in times], dtype=x.dtype)
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
        width = h.shape[1] // 2
        gate, up = h[:, :width], h[:, width:]
        h = gate / (1 + torch.exp(-gate)) * up
    return linear(weights, f'{name}.c_proj', h)


def linear(weights, name, x):
    y = x @ weights[f'{name}.weight'].T
    if f'{name}.bias' in weights:
        y = y + weights[f'{name}.bias']
    return y
