"""
A slow, obvious second implementation of every variant, written from the paper's equations: one sequence, one head and
one T x T attention matrix at a time, no fused operation, in the precision of the weights it is given (use float64).

It reads weights by their documented names and shares no code with model.py. Its lists are indexed by layer and have an
entry for every layer, also for those that borrow: raw[part][n] are the projections of layer n, unmixed and before
RoPE (of its owner, if it borrows), attended[part][n] is what layer n attends with. An entry is a list over heads of
(T, hs) matrices.
"""
import math

import torch


def perturb(model, seed=0):
    """Move every weight away from where it starts, so that nothing hides behind ones and zeros: norms, biases, lambdas,
    DenseFormer weights, and attention, which starts almost uniform. Returns the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.empty_like(p).normal_(0.0, 0.25, generator=generator)
    return model


def logits(config, weights, idx):
    """(B, T, V) logits of idx (B, T); weights maps parameter names to tensors."""
    return torch.stack([sequence_logits(config, weights, row) for row in idx])


def sequence_logits(config, weights, tokens):
    T = len(tokens)
    embedding = weights['transformer.wte.weight']
    x = embedding[tokens]
    if config.arch == 'gpt2':
        x = x + weights['transformer.wpe.weight'][:T]
    raw, attended = {'q': [], 'k': [], 'v': []}, {'q': [], 'k': [], 'v': []}
    history = [x]
    for n in range(config.n_layer):
        name = f'transformer.h.{n}'
        x = x + attention(config, weights, n, norm(config, weights, f'{name}.ln_1', x), raw, attended)
        x = x + mlp(config, weights, f'{name}.mlp', norm(config, weights, f'{name}.ln_2', x))
        if config.denseformer:
            history.append(x)
            alpha = weights[f'transformer.dwa.{n}']
            assert len(alpha) == len(history) == n + 2
            x = torch.zeros_like(x)
            for i in range(n + 2):
                x = x + alpha[i] * history[i]
    x = norm(config, weights, 'transformer.ln_f', x)
    return x @ (embedding if config.tie_embeddings else weights['lm_head.weight']).T


def attention(config, weights, n, x, raw, attended):
    n_kv, hs = config.n_kv_head or config.n_head, config.n_embd // config.n_head
    heads = {'q': config.n_head, 'k': n_kv, 'v': n_kv}
    sources = {'first': [0], 'previous': [n - 1], 'all': list(range(n))}[config.residual_from]
    has_residual = n in config.residual_layers if config.residual_layers else n >= 1

    # 1. Raw: projected here or the owner's. The rows of c_attn are q, k, v, of what this layer owns.
    projected = linear(weights, f'transformer.h.{n}.attn.c_attn', x)
    column = 0
    for part in 'qkv':
        if owner(config, part, n) == n:
            columns = [projected[:, column + h * hs:column + (h + 1) * hs] for h in range(heads[part])]
            column += heads[part] * hs
            raw[part].append(columns)
        else:
            raw[part].append(raw[part][owner(config, part, n)])
    assert column == projected.shape[1], 'c_attn has rows that nobody uses'

    # 2. Attended: the owner's, as it is; or mixed (values only if mapped by the current attention), then rotated.
    for part in 'qkv':
        if owner(config, part, n) != n:
            attended[part].append(attended[part][owner(config, part, n)])
            continue
        mixes = getattr(config, f'{part}_residual') and has_residual
        if part == 'v' and config.residual_map != 'current':
            mixes = False
        result = []
        for h in range(heads[part]):
            own = raw[part][n][h]
            if mixes:
                own = mixture(config, weights, n, [raw[part][s][h] for s in sources], own)
            if config.arch == 'llama' and part != 'v':
                own = rope(own, config.rope_theta)
            result.append(own)
        attended[part].append(result)

    # 3. Attention, head by head; grouped query heads read the same key and value head.
    maps = config.residual_map if config.v_residual and has_residual and owner(config, 'v', n) == n else 'current'
    layers = sources + [n] if maps == 'cross' else [n]
    outputs = []
    for h in range(config.n_head):
        g = h // (config.n_head // n_kv)
        scores = [causal(attended['q'][n][h] @ attended['k'][layer][g].T / math.sqrt(hs)) for layer in layers]
        A = softmax(torch.cat(scores, dim=1))  # (T, T), or (T, layers * T) in Eq. 2
        U = A @ torch.cat([attended['v'][layer][g] for layer in layers])
        if maps == 'identity':  # Eq. 6, with the mean in place of the sum
            U = U + sum(raw['v'][s][g] for s in sources) / len(sources)
        U = U + config.neutreno * (raw['v'][0][g] - attended['v'][n][g])  # Eq. 8
        outputs.append(U)
    return linear(weights, f'transformer.h.{n}.attn.c_proj', torch.cat(outputs, dim=1))


def owner(config, part, n):
    """The layer whose projection layer n uses: the first of its run of m layers, all layers being one run for m = 0."""
    if not getattr(config, f'share_{part}'):
        return n
    m = getattr(config, f'share_{part}_every') or config.n_layer
    return max(start for start in range(0, config.n_layer, m) if start <= n)


def mixture(config, weights, n, sources, own):
    if config.residual_learned:
        lambdas = weights[f'transformer.h.{n}.attn.residual_lambda']
        assert len(lambdas) == len(sources) + 1
    elif config.residual_lambda:
        lambdas = [config.residual_lambda[0]] * len(sources) + [config.residual_lambda[1]]
    else:
        lambdas = [1 / (len(sources) + 1)] * (len(sources) + 1)
    total = lambdas[-1] * own
    for i, source in enumerate(sources):
        total = total + lambdas[i] * source
    return total


def causal(scores):
    time = torch.arange(len(scores))
    return scores.masked_fill(time[None, :] > time[:, None], -math.inf)  # row: query, column: key


def softmax(scores):
    e = torch.exp(scores - scores.max(dim=1, keepdim=True).values.detach())
    return e / e.sum(dim=1, keepdim=True)


def rope(x, theta):
    """Rotate the pair (i, i + hs/2) at time t by the angle t * theta^(-2i / hs)."""
    T, hs = x.shape
    half = hs // 2
    angle = torch.tensor([[t * theta ** (-2 * i / hs) for i in range(half)] for t in range(T)], dtype=x.dtype)
    a, b = x[:, :half], x[:, half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=1)


def norm(config, weights, name, x):
    if config.arch == 'gpt2':
        centered = x - x.mean(dim=1, keepdim=True)
        variance = (centered ** 2).mean(dim=1, keepdim=True)
        return centered / torch.sqrt(variance + config.norm_eps) * weights[f'{name}.weight'] + weights[f'{name}.bias']
    return x / torch.sqrt((x ** 2).mean(dim=1, keepdim=True) + config.norm_eps) * weights[f'{name}.weight']


def mlp(config, weights, name, x):
    h = linear(weights, f'{name}.c_fc', x)
    if config.arch == 'gpt2':
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3)))
    else:
        width = h.shape[1] // 2
        gate, up = h[:, :width], h[:, width:]
        h = gate / (1 + torch.exp(-gate)) * up
    return linear(weights, f'{name}.c_proj', h)


def linear(weights, name, x):
    y = x @ weights[f'{name}.weight'].T
    return y + weights[f'{name}.bias'] if f'{name}.bias' in weights else y
