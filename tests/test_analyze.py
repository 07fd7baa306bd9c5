"""
paper/analyze.py: each analysis against a slow direct formula, whatever the batches, and the model as
it was before. test_analyze_runs.py has the program.
"""

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from variants import SIZE, make, tokens

import model as architecture
from paper import analyze

B, T = 3, 19
NAMES = (
    'vanilla',
    'ResFormer',
    'learned from all',
    'SVFormer',
    'GQA',
    'gpt2',
    'cross',
    'cross from all, GQA',
    'CLA',
    'first queries',
    'NeuTRENO GQA',
    'half of the heads',
    'gpt2 ResFormer',
    'cross sparse, key residual',
    'constant lambda on q, k, v',
)
KINDS = ('entropy', 'similarity', 'spectrum', 'mapping', 'sinks')
every_kind = pytest.mark.parametrize('kind', KINDS)


@functools.cache
def small(name):
    return make(name).eval()


def analyzed(kind, model, idx):
    series = analyze.measure(kind, model, list(idx.numpy()), 2, kind)
    return {name: t.numpy() for name, t in series.items()}


def assert_close(actual, expected, tolerance=1e-5):
    """NaN equals NaN; to 1e-5 of the value, or of 1 where it is smaller."""
    assert actual.keys() == expected.keys()
    for name in expected:
        one, two = (np.array(series[name], dtype=float) for series in (actual, expected))
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance, err_msg=name)


# --- analyses of a sequence: loops over tokens, on what tests/reference.py computes in float64 ---------


def inside(model, row):
    weights = {name: t.double() for name, t in model.state_dict().items()}
    return reference.layers(model.config, weights, row)


def read_layers(config, n):
    """Whose keys layer n attends to: its own and, with cross attention, its sources'."""
    if config.residual_map != 'cross':
        return [n]
    return [*reference.mixed_in(config, 'v', n), n]


def attention(q, keys):
    """The weights of one head's queries (T, hs) for the keys of one or several layers, (T, layers, T)."""
    k = torch.stack(keys)
    scores = torch.einsum('ih,ljh->ilj', q, k) / math.sqrt(q.size(1))
    future = torch.ones(T, T).triu(1).bool()[:, None]
    return scores.masked_fill(future, -math.inf).flatten(1).softmax(1).view_as(scores)


def heads_of(config):
    """[(query head, its key head)]"""
    group = config.n_head // (config.n_kv_head or config.n_head)
    return [(h, h // group) for h in range(config.n_head)]


def slow_entropy(config, hidden, raw, attended):
    result = {'entropy': [], 'first token': []}
    for n in range(config.n_layer):
        heads = []
        for h, g in heads_of(config):
            keys = [attended['k'][layer][g] for layer in read_layers(config, n)]
            heads.append(attention(attended['q'][n][h], keys))
        importance = torch.stack(heads).sum(dim=2).mean(dim=(0, 1))
        assert importance.sum() == pytest.approx(1)
        result['entropy'].append(-(importance * importance.log()).sum())
        result['first token'].append(importance[0])
    return result


def cosine(a, b):
    return a @ b / math.sqrt((a @ a) * (b @ b))


def pairs_cosine(x):
    x = x.numpy()
    return np.mean([cosine(x[i], x[j]) for i in range(T) for j in range(T) if i != j])


def slow_similarity(config, hidden, raw, attended):
    return {
        'hidden states': [pairs_cosine(x) for x in hidden],
        'keys': [pairs_cosine(torch.cat(heads, dim=1)) for heads in attended['k']],
        'values': [pairs_cosine(torch.cat(heads, dim=1)) for heads in attended['v']],
    }


def eigenvalues(heads):
    v = torch.cat(heads, dim=1).numpy()
    covariance = sum(np.outer(v[t], v[t]) for t in range(T)) / T
    return sorted(np.linalg.eigvals(covariance).real, reverse=True)


def slow_spectrum(config, hidden, raw, attended):
    projected = []
    for n, heads in enumerate(raw['v']):
        own = reference.own_heads(config, 'v', n)
        values = eigenvalues(heads[:own]) if own else []
        missing = config.head_size * (len(heads) - own)
        projected.append(values + [math.nan] * missing)
    attended_with = [eigenvalues(heads) for heads in attended['v']]
    return {'projected values': projected, 'values attended with': attended_with}


def slow_mapping(config, hidden, raw, attended):
    names = ('A_n (V_n + V_n-1), Eq. 3', 'A_n V_n + V_n-1, Eq. 6')
    result = {name: [math.nan] for name in names}
    for n in range(1, config.n_layer):
        outputs = [[], [], []]  # of the heads: Eqs. 2, 3, 6
        for h, g in heads_of(config):
            q, (k, v) = attended['q'][n][h], (attended[part][n][g] for part in 'kv')
            before_k, before_v = (attended[part][n - 1][g] for part in 'kv')
            both, one = attention(q, [before_k, k]), attention(q, [k])[:, 0]
            outputs[0].append(both[:, 0] @ before_v + both[:, 1] @ v)
            outputs[1].append(one @ (v + before_v))
            outputs[2].append(one @ v + before_v)
        cross, *others = (torch.cat(heads, dim=1).numpy() for heads in outputs)
        for name, other in zip(names, others, strict=True):
            result[name].append(np.mean([cosine(cross[i], other[i]) for i in range(T)]))
    return result


def inside_and_gradients(model, row):
    """What layers attend with, what their blocks get, and the gradient of the training loss for what
    each of their heads gives."""
    weights = {name: t.double().requires_grad_() for name, t in model.state_dict().items()}
    norm, attend = reference.norm, reference.attend
    streams, outputs = [], []

    def seen_norm(config, weights, name, x):
        if name.endswith('ln_1'):
            streams.append(x)
        return norm(config, weights, name, x)

    def seen_attend(*args):
        outputs.append(attend(*args))
        return outputs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, 'norm', seen_norm)
        patch.setattr(reference, 'attend', seen_attend)
        hidden, _, attended = reference.layers(model.config, weights, row)
    x = norm(model.config, weights, 'transformer.ln_f', hidden[-1])
    probabilities = (x @ weights['lm_head.weight'].T).softmax(dim=1)
    loss = -sum(probabilities[t, row[t + 1]].log() for t in range(T - 1)) / (T - 1)
    gradients = torch.stack(torch.autograd.grad(loss, outputs))
    return attended, streams, gradients.unflatten(0, (model.config.n_layer, -1))


def over_others(s, vectors):
    norms = [math.sqrt((vector**2).sum().item()) for vector in vectors]
    others = [norms[j] for j in range(len(norms)) if j != s]
    return norms[s] / np.mean(others)


def slow_sinks(config, attended, streams, gradients):
    names = ('sink rate', 'sink rate of position 0', 'drain', 'peak', 'gradient')
    by_head = {name: [[] for _ in streams] for name in names}
    massive = []
    for n, x in enumerate(streams):
        matrices = {}
        for h, g in heads_of(config):
            keys = [attended['k'][layer][g] for layer in read_layers(config, n)]
            matrices[h] = attention(attended['q'][n][h], keys)
        for h, g in heads_of(config):
            A = matrices[h].sum(dim=1)
            alpha = [A[j:, j].mean().item() for j in range(T)]
            s = max((j for j in range(T) if j < T / 2), key=lambda j: alpha[j])
            # The chain rule: its own keys and values are the last that a layer attends to.
            of_values = sum(
                matrices[other][:, -1].T @ gradients[n][other]
                for other, its in heads_of(config)
                if its == g
            )
            values = attended['v'][n][g]
            numbers = [alpha[s] > 0.3, alpha[0] > 0.3]
            numbers += [over_others(s, vectors) for vectors in (values, x, of_values)]
            for name, number in zip(names, numbers, strict=True):
                by_head[name][n].append(float(number))
        sizes = sorted(x.abs().flatten().tolist())
        massive.append(sizes[-1] / sizes[(len(sizes) - 1) // 2])
    means = {name: np.mean(heads, axis=1) for name, heads in by_head.items()}
    by_head = {f'{name}, by head': heads for name, heads in by_head.items()}
    return {**means, **by_head, 'massive': massive}


SLOW = {
    'sinks': slow_sinks,
    'entropy': slow_entropy,
    'similarity': slow_similarity,
    'spectrum': slow_spectrum,
    'mapping': slow_mapping,
}


@functools.cache
def slow_forward(name, forward):
    return [forward(small(name), row) for row in tokens(B, T)[:2]]


@every_kind
@pytest.mark.parametrize('name', NAMES)
def test_an_analysis_equals_its_direct_formula(kind, name):
    model = small(name)
    forward = inside_and_gradients if kind == 'sinks' else inside
    each = [SLOW[kind](model.config, *parts) for parts in slow_forward(name, forward)]
    expected = {series: [one[series] for one in each] for series in each[0]}
    assert_close(analyzed(kind, model, tokens(B, T)[:2]), expected)


# --- sinks by construction ------------------------------------------------------------------------


def attending(targets):
    """A layer with two heads, where query i of the first attends to position targets[i] alone, and one of
    the second to itself. At position j, what has a norm is j + 1 long."""
    T = len(targets)
    one_hot = torch.eye(T)
    growing = torch.arange(1.0, T + 1)[None, :, None]
    layer = SimpleNamespace(x=growing, v=growing[None], gradient=growing[None])
    layer.q = 1000 * torch.stack((one_hot[targets], one_hot))[None]
    layer.keys = [one_hot[None, None]]
    return layer


@pytest.mark.parametrize(
    'targets, s, is_sink, is_first_one',
    [
        ([0, 1, 2, 2, 2], 2, True, False),  # 2 is in the first half of 5
        ([0, 1, 2, 3, 3, 3], 2, False, False),  # and 3 not in that of 6
        ([0, 0, 0, 3, 3, 5, 6, 7], 3, True, True),  # 2 of 5 queries are more than 3 of 8
        ([0, 0, 2, 2, 0, 5], 0, True, True),  # 3 of 6 are as many as 2 of 4: the first
        ([0, 0, 0, 3, 4, 5, 6, 7, 8, 9], 0, False, False),  # 3 of 10 are not more than 0.3
    ],
)
def test_a_sink_is_what_most_of_the_queries_that_see_it_attend_to(
    targets, s, is_sink, is_first_one
):
    T = len(targets)
    last = (T - 1) // 2  # of the first half: that of the head that attends to itself
    growing = np.arange(1, T + 1)[:, None]
    expected = {
        'sink rate': [is_sink, 1 / (T - last) > 0.3],
        'sink rate of position 0': [is_first_one, False],
        'drain': [over_others(each, growing) for each in (s, last)],
    }
    actual = analyze.sinks([attending(targets)])
    assert_close({name: actual[f'{name}, by head'][0, 0] for name in expected}, expected)


# --- tokens: means over loops, and the weight of a sequence by its effect -------------------------


@pytest.mark.parametrize('name', ['vanilla', 'gpt2 ResFormer', 'CLA'])
def test_tokens_equals_its_direct_formula(name):
    """The last layers' values are almost noise to the tokens' means: R^2 may be below 0."""
    model = small(name)
    texts = np.random.default_rng(0).geometric(0.2, size=(15, T))  # many of few
    # (sequences, layers, T, C)
    values = []
    for row in texts:
        layers = inside(model, torch.from_numpy(row))[1]['v']
        values.append(np.stack([torch.cat(heads, dim=1).numpy() for heads in layers]))
    values = np.stack(values)
    fitted, held_out = slice(0, None, 2), slice(1, None, 2)
    counts = np.bincount(texts[fitted].ravel())
    often = np.flatnonzero(counts >= 20)
    is_often = np.isin(texts, often)
    assert 0 < len(often) < np.count_nonzero(counts)

    expected = []
    for n in range(SIZE['n_layer']):
        v, seen = values[:, n], texts[fitted]
        means = {t: v[fitted][seen == t].mean(axis=0) for t in often}
        mean = v[fitted][is_often[fitted]].mean(axis=0)
        of_token = np.array([[means.get(t, mean) for t in row] for row in texts])
        left, total = (
            (((v - each) ** 2).sum(axis=2) * is_often)[held_out].sum(axis=1)
            for each in (of_token, mean)
        )
        r2 = 1 - left.sum() / total.sum()
        # How R^2 moves if a sequence is there a little more than once.
        more = 1 + 1e-6 * np.eye(len(left))
        moved = (1 - more @ left / (more @ total) - r2) / 1e-6
        is_own = reference.owner(model.config, 'v', n) == n
        expected.append(r2 + len(moved) * moved if is_own else np.full(len(moved), np.nan))
    shares = is_often[held_out].mean(axis=1)
    result = {'R^2': np.transpose(expected), 'share of positions': shares}

    for batch_size in (1, 4):
        series = analyze.measure('tokens', model, list(texts), batch_size, 'tokens')
        actual = {name: t.numpy() for name, t in series.items()}
        assert_close(actual, result)
    is_of_token_alone = model.config.arch == 'llama'  # gpt2 adds the position
    assert np.allclose(actual['R^2'][:, 0], 1, atol=1e-9) == is_of_token_alone


# --- uniform attention ----------------------------------------------------------------------------


def test_the_entropy_of_uniform_attention_equals_its_definition():
    columns = [sum(1 / (i + 1) for i in range(j, T)) / T for j in range(T)]
    uniform = -sum(a * math.log(a) for a in columns)
    assert analyze.uniform_entropy(T) == pytest.approx(uniform, abs=1e-12)


# --- attention is only watched --------------------------------------------------------------------


def test_attention_and_the_model_are_as_they_were_even_after_an_error():
    original, model, idx = architecture.attend_cross, small('ResFormer'), tokens(B, T)
    before = analyzed('mapping', model, idx)

    def broken(x):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.transformer.h[1].mlp, 'forward', broken)  # half way
        with pytest.raises(KeyboardInterrupt):
            analyzed('mapping', model, idx)
    assert architecture.attend_cross is original
    assert not any(module._forward_hooks for module in model.modules())
    assert_close(analyzed('mapping', model, idx), before)
