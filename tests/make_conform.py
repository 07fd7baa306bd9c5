"""
Makes hub/conform.npz: what tests/reference.py computes for each variant of the conformance kit, in
float64, and what it computes with each of the mistakes.

$ python tests/make_conform.py

A mistake is a change of some functions of reference.py. It is kept for a variant if it shows there.
Of model.py, only the names, shapes and defaults of parameters and settings are used.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import reference
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from hub.conform import CHUNKS, FIXTURE, TOLERANCE, B, T, formula, some_numbers, text
from model import GATES, GPT, GPTConfig

SIZE = dict(block_size=32, vocab_size=31, n_layer=4, n_head=2, n_embd=16, n_inner=24)
# With 2 heads, a wrong order of the KV heads could not be seen.
GQA = dict(n_head=4, n_kv_head=2)
RES = dict(v_residual=True)
SV = dict(share_v=True)
KEYS2 = dict(share_k=2)
LEARNED = dict(residual_weights='learned')
HEAD_GATE = dict(residual_weights='head')
CHANNEL_GATE = dict(residual_weights='channel', gate_rank=4)
TABLES = dict(v_residual='token', residual_layers=(1, 3))

VARIANTS = {
    'vanilla': {},
    'gqa': GQA,
    'resformer': RES,
    'resformer-gqa': dict(RES, **GQA),
    'resformer-constant': dict(RES, residual_lambda=(2.0, 0.5)),
    'resformer-learned': dict(RES, **LEARNED),
    'resformer-sparse': dict(RES, residual_layers=(2, 3)),
    'resformer-previous': dict(v_residual='previous'),
    'resformer-all': dict(v_residual='all'),
    'resformer-identity': dict(RES, residual_map='identity'),
    'resformer-cross': dict(RES, residual_map='cross'),
    'key-residual': dict(LEARNED, k_residual=True),
    'residuals-learned': dict(RES, **LEARNED, q_residual=True, k_residual='previous'),
    'svformer': SV,
    'svformer-gqa': dict(SV, **GQA),
    'svformer-cla': dict(SV, **KEYS2),
    'svformer-cla-gqa': dict(SV, **KEYS2, **GQA),
    'neutreno': dict(neutreno=0.4),
    'neutreno-resformer': dict(RES, neutreno=0.2),
    'owner-map': dict(share_k=(0, 1, 1, 1), share_v=2),
    'fused-kv': dict(share_k=(0, 1, 1, 1), share_v=(0, 1, 0, 0)),
    'half-heads': dict(SV, share_v_heads=1),
    'token': TABLES,
    'token-alone': dict(TABLES, residual_lambda=(0.7, 0.0)),
    'token-head-gate': dict(TABLES, **HEAD_GATE, gate_inputs=12, residual_lambda=(3.0, 1.0)),
    'token-channel-gate': dict(TABLES, **CHANNEL_GATE),
    'first-token': dict(LEARNED, v_residual='first+token', residual_layers=(0, 1, 3)),
    'x0-values': dict(
        HEAD_GATE,
        v_residual='x0',
        residual_layers=(1, 3),
        gate_inputs=12,
        residual_lambda=(2.0, 1.0),
    ),
    'anchor': dict(v_residual='anchor', residual_layers=(1, 2, 3), residual_lambda=(0.7, 0.4)),
    'head-gate': dict(RES, **HEAD_GATE, gate_bias=True),
    'channel-gate': dict(RES, **CHANNEL_GATE),
    'x0': dict(x0_residual=True),
    'exclusive': dict(GQA, exclusive=True),
}
# Mixings of one source, in layer 1. (Mixing keys is mixing values.)
MIXINGS = (
    *('resformer', 'resformer-constant', 'resformer-learned', 'head-gate', 'channel-gate'),
    *('token', 'token-head-gate', 'token-channel-gate'),
)
MIXING = 'transformer.h.1.'
# Where a detached source shows.
DETACHED = [f'gradient of transformer.h.0.attn.{part}.proj.weight' for part in 'qkv']

# --- the mistakes ---------------------------------------------------------------------------------

# Their functions take the place of those of reference.py, of which `right` keeps the right ones.
right = SimpleNamespace(**vars(reference))
TIMES = [t for size in CHUNKS for t in range(size)]  # as if each chunk were a text of its own
CHUNK = torch.tensor([i for i, size in enumerate(CHUNKS) for _ in range(size)])


def detached_layers(part):
    """No gradient reaches the values (or keys, or queries) of earlier layers."""

    def mix_and_rotate(config, weights, n, x, embedding, raw, attended):
        for heads in raw[part][:n] + attended[part][:n]:
            heads[:] = [t.detach() for t in heads]
        right.mix_and_rotate(config, weights, n, x, embedding, raw, attended)

    return mix_and_rotate


def unmixed(*inputs):
    *_, own = inputs
    return own


def summed(*inputs):
    *_, sources, own = inputs
    return own + sum(sources)


def divided(config, weights, n, *others):
    """The paper's layer n, counted from 1, divides by n."""
    if config.residual_weights == 'learned' or config.residual_lambda:
        return right.mixture(config, weights, n, *others)
    return summed(*others) / (n + 1)


def normalized(config, weights, n, h, part, x, sources, own):
    total = right.mixture(config, weights, n, h, part, x, [1.0] * len(sources), 1.0)
    return right.mixture(config, weights, n, h, part, x, sources, own) / total


def previous_of(config, part, n):
    sources = right.sources_of(config, part, n)
    return [n - 1] if sources == [0] else sources


def turned(config, weights):
    """A config and weights whose mixing weights are in the opposite order."""
    config = GPTConfig.saved(vars(config))
    config.residual_lambda = config.residual_lambda[::-1]
    names = [name for name in weights if name.endswith('residual_lambda')]
    return config, weights | {name: weights[name].flip(0) for name in names}


def swapped_mixture(config, weights, n, *tensors):
    return right.mixture(*turned(config, weights), n, *tensors)


def swapped_gated(config, weights, n, h, part, x, sources, own):
    if config.residual_lambda:
        return right.gated(*turned(config, weights), n, h, part, x, sources, own)
    g = right.gate(config, weights, n, h, x)
    return (1 - g) * sum(sources) / len(sources) + g * own


def own_gated(config, weights, n, h, part, x, sources, own):
    """The gate of the source weighs the layer's own values."""
    if not config.residual_lambda:
        return swapped_gated(config, weights, n, h, part, x, sources, own)
    s, o = config.residual_lambda
    return o * sum(sources) + s * right.gate(config, weights, n, h, x) * own


def mixing_after_rope(config, weights, n, x, embedding, raw, attended):
    """Rotated keys, and sources that are not."""
    right.mix_and_rotate(config, weights, n, x, embedding, raw, attended)
    layers = reference.mixed_in(config, 'k', n)
    for h, own in enumerate(raw['k'][n] if layers else ()):
        sources = [raw['k'][s][h] for s in layers]
        own = right.rope(config, own)
        attended['k'][n][h] = right.mixture(config, weights, n, h, 'k', x, sources, own)


def attend_mixed_after_cache(config, n, h, raw, attended):
    """The cache holds what is not mixed; only the tokens of this chunk are."""
    if config.exclusive or config.residual_map != 'current':
        return right.attend(config, n, h, raw, attended)
    g = reference.kv_head(config, h)
    q, k, v = attended['q'][n][h], attended['k'][n][g], attended['v'][n][g]
    past_k = right.rope(config, raw['k'][n][g])
    is_now = CHUNK[:, None] == CHUNK
    scores = torch.where(is_now, q @ k.T, q @ past_k.T) / math.sqrt(q.shape[1])
    A = reference.softmax(reference.causal(scores))
    U = (A * is_now) @ v + (A * ~is_now) @ raw['v'][n][g]
    return U + config.neutreno * reference.above_own(n, g, raw, attended)


def mixing_that_keeps_its_result(config, weights, n, x, embedding, raw, attended):
    """What later layers mix in is what this layer attends with."""
    if n:
        raw['v'][n - 1] = attended['v'][n - 1]
    right.mix_and_rotate(config, weights, n, x, embedding, raw, attended)


def mixing_in_place(config, weights, n, x, embedding, raw, attended):
    """The mixture is written over its sources. A borrower rotates the keys that it borrows again."""
    right.mix_and_rotate(config, weights, n, x, embedding, raw, attended)
    if config.residual_map == 'current':
        for s in reference.mixed_in(config, 'v', n):
            if isinstance(s, int):
                raw['v'][s] = attended['v'][n]
    owner = reference.owner(config, 'k', n)
    if owner != n:
        rotated = [right.rope(config, k) for k in attended['k'][owner]]
        attended['k'][owner] = attended['k'][n] = rotated


def mixing_without_offset(config, weights, n, *others):
    borrows = any(reference.own_heads(config, p, n) < reference.heads(config, p) for p in 'kv')
    times = TIMES if borrows else None
    with mock.patch.dict(vars(reference), rope=lambda config, x: right.rope(config, x, times)):
        right.mix_and_rotate(config, weights, n, *others)


def gate_of_the_stream():
    """A gate that reads what the norm before attention reads, and a norm that tells it."""
    stream = {}

    def norm(config, weights, name, x):
        stream[name] = x
        return right.norm(config, weights, name, x)

    def gate(config, weights, n, h, x):
        return right.gate(config, weights, n, h, stream[f'transformer.h.{n}.ln_1'])

    return dict(norm=norm, gate=gate)


def gate_of_the_last_channels(config, weights, n, h, x):
    return right.gate(config, weights, n, h, x[:, -config.gate_inputs :])


MISTAKES = {
    'unmixed': dict(mixture=unmixed, gated=unmixed),
    'summed': dict(mixture=summed),
    'divided': dict(mixture=divided),
    'normalized': dict(mixture=normalized),
    'previous': dict(sources_of=previous_of),
    'detached': dict(mix_and_rotate=detached_layers('v')),
    'keys detached': dict(mix_and_rotate=detached_layers('k')),
    'queries detached': dict(mix_and_rotate=detached_layers('q')),
    'swapped': dict(mixture=swapped_mixture, gated=swapped_gated),
    'own weighted': dict(mixture=swapped_mixture, gated=own_gated),
    'mixed after RoPE': dict(mix_and_rotate=mixing_after_rope),
    'source mixed': dict(mix_and_rotate=mixing_that_keeps_its_result),
    'overwritten': dict(mix_and_rotate=mixing_in_place),
    'KV order': dict(kv_head=lambda config, h: h % reference.heads(config, 'v')),
    'NeuTRENO': dict(above_own=lambda n, g, raw, attended: raw['v'][0][g] - raw['v'][n][g]),
    'gate sign': dict(gate=lambda *inputs: 1 - right.gate(*inputs)),
    'gate stream': gate_of_the_stream(),
    'gate channels': dict(gate=gate_of_the_last_channels),
}
# Those that show in decoding alone.
OF_DECODING = {
    'mixed after the cache': dict(attend=attend_mixed_after_cache),
    'RoPE offset': dict(mix_and_rotate=mixing_without_offset),
}
# Those that a mixing can make.
OF_MIXING = (
    *('unmixed', 'summed', 'normalized', 'detached', 'swapped', 'own weighted', 'gate sign'),
    'gate channels',
)

# --- what the reference gives ---------------------------------------------------------------------


def leaves(shapes):
    """{name: a float64 tensor} that will have gradients."""
    return {name: torch.tensor(formula(name, s), requires_grad=True) for name, s in shapes.items()}


def run(config, weights, **functions):
    """(logits (B, T, V), [values of a layer (B, n_kv_head, T, hs)])."""
    texts = []

    def attention(config, weights, n, x, embedding, raw, attended):
        if n == 0:
            texts.append(attended['v'])
        return right.attention(config, weights, n, x, embedding, raw, attended)

    with mock.patch.dict(vars(reference), functions, attention=attention):
        logits = reference.logits(config, weights, torch.tensor(text('ids', config.vocab_size)))
    layers = zip(*texts, strict=True)
    return logits, [torch.stack([torch.stack(heads) for heads in layer]) for layer in layers]


def observe(config, shapes, mistake=''):
    """{check: tensor} of a model, in the order in which a mistake spreads."""
    weights = leaves(shapes)
    logits, values = run(config, weights, **MISTAKES.get(mistake, {}))
    targets = torch.tensor(text('targets', config.vocab_size))
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    result = {f'values of layer {n}': v for n, v in enumerate(values, 1)}
    result['logits'] = logits
    gradients = gradients_of(weights)
    result |= {check: gradient for check, gradient in gradients.items() if is_told(check)}
    if mistake in OF_DECODING:
        logits, _ = run(config, weights, **OF_DECODING[mistake])
    result['logits decoded with a cache'] = logits
    heads = [reference.own_heads(config, part, n) for part in 'kv' for n in range(config.n_layer)]
    result['numbers in the cache'] = torch.tensor(B * T * config.head_size * sum(heads))
    return result | gradients  # whose first ones keep their places


def is_told(check):
    """Whether the file has what mistakes give."""
    return is_whole(check) or check in DETACHED


def is_whole(check):
    """Whether the file has all numbers of a check. Of others, it has a sample."""
    return is_of_mixing(check) or not check.endswith('.weight')


def is_of_mixing(name):
    return any(word in name for word in ('residual_lambda', '.gate', '.x0.'))


def observe_mixing(config, shapes, mistake=''):
    """{check: tensor} of the mixing of layer 1's values, see hub/conform.py."""
    shape = B, config.kv_heads, T, config.head_size
    weights = leaves(shapes)
    inputs = leaves({'own': shape, 'source': shape, 'x': (B, T, config.n_embd)})
    own, source, x = inputs.values()
    if mistake == 'detached':
        source = source.detach()
    is_gated = config.residual_weights in GATES
    named = {MIXING + name: weight for name, weight in weights.items()}
    with mock.patch.dict(vars(reference), MISTAKES.get(mistake, {})):
        mix = reference.gated if is_gated else reference.mixture
        heads = [
            mix(config, named, 1, h, 'v', x[b], [source[b, h]], own[b, h])
            for b in range(B)
            for h in range(config.kv_heads)
        ]
    values = torch.stack(heads).view(shape)
    values.backward(torch.tensor(formula('gradient', shape)))
    result = {'values': values}
    result |= gradients_of(inputs | weights)
    if not is_gated:
        del result['gradient of x']
    return result


def gradients_of(leaves):
    return {
        f'gradient of {name}': torch.zeros_like(t) if t.grad is None else t.grad
        for name, t in leaves.items()
    }


# --- the file -------------------------------------------------------------------------------------

# {level: (variants, what it gives, mistakes)}
LEVELS = {
    'model': (VARIANTS, observe, (*MISTAKES, *OF_DECODING)),
    'mixing': (MIXINGS, observe_mixing, OF_MIXING),
}


def make_case(level, name, mistakes):
    """What the index says of a variant, and its numbers."""
    config = GPTConfig(**SIZE | VARIANTS[name])
    parameters = GPT.without_weights(config).named_parameters()
    shapes = {name: tuple(p.shape) for name, p in parameters}
    constant = ()
    if level == 'mixing':
        prefix = len(MIXING)
        shapes = {
            n[prefix:]: s for n, s in shapes.items() if n.startswith(MIXING) and is_of_mixing(n)
        }
        constant = config.residual_lambda
        if config.residual_weights == 'fixed':
            constant = constant or (0.5, 0.5)
    observe = LEVELS[level][1]

    def arrays(*mistake):
        return {check: t.detach().numpy() for check, t in observe(config, shapes, *mistake).items()}

    if config.residual_lambda[1:] == (0,):  # these mistakes need values of its own in each layer
        mistakes = ()
    expected = arrays()
    numbers = [a.ravel() if is_whole(check) else some_numbers(a) for check, a in expected.items()]
    seen = {}
    for mistake in mistakes:
        wrong = arrays(mistake)
        checks = [c for c in filter(is_told, expected) if shows(wrong[c], expected[c])]
        if checks:
            seen[mistake] = checks
            numbers += [some_numbers(wrong[check]) for check in checks]
    case = {
        'config': vars(config) | {'n_kv_head': config.kv_heads},
        'weights': shapes,
        'constant': constant,
        'checks': {check: array.shape for check, array in expected.items()},
        'mistakes': seen,
        'sizes': [len(array) for array in numbers],
    }
    # Of 16 bits each, so that the file is small.
    mantissas, exponents = np.frexp(np.concatenate(numbers))
    return case, np.ldexp(np.round(mantissas * 2**16) / 2**16, exponents).astype(np.float32)


def shows(wrong, expected):
    """Whether what a mistake gives can be told from what is right, by far."""
    return (
        abs(some_numbers(wrong) - some_numbers(expected)).max()
        > 10 * TOLERANCE * abs(expected).max()
    )


def main():
    torch.set_num_threads(1)  # the matrices are tiny: more threads take ten times as long
    index, arrays = {}, {}
    for level, (names, _, mistakes) in LEVELS.items():
        index[level] = {}
        for name in names:
            case, arrays[f'{level}/{name}'] = make_case(level, name, mistakes)
            index[level][name] = case
            print(f'{level} {name}: {", ".join(case["mistakes"])}')
    np.savez_compressed(FIXTURE, index=json.dumps(index).encode(), **arrays)


if __name__ == '__main__':
    main()
