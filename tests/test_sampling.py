"""Generation and sampling, each against its slow, obvious version."""

import math
from collections import Counter

import pytest
import torch
from variants import VARIANTS, make, tokens

B = 3


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# --- which tokens follow -------------------------------------------------------------------------


@pytest.mark.parametrize('name', VARIANTS)
def test_greedy_generation_gives_the_same_tokens_with_and_without_a_cache(name):
    model = make(name, n_layer=4)
    idx = tokens(B, 9)
    cached = model.generate(idx, 12, temperature=0)
    assert cached.shape == (B, 21) and torch.equal(cached[:, :9], idx)
    assert torch.equal(cached, model.generate(idx, 12, temperature=0, use_cache=False))


@pytest.mark.parametrize(
    'name', ['vanilla', 'NeuTRENO on CLA', 'cross from all, GQA', 'gpt2 CLA GQA', 'everything']
)
@pytest.mark.parametrize('length', [28, 40])  # grows past block_size, or begins beyond it
def test_without_a_cache_the_last_block_size_tokens_are_the_context(name, length):
    model = make(name)
    idx = text = tokens(B, length)
    for _ in range(8):
        likeliest = model(text[:, -32:])[0][:, -1].argmax(dim=-1, keepdim=True)
        text = torch.cat((text, likeliest), dim=1)
    assert torch.equal(model.generate(idx, 8, temperature=0, use_cache=False), text)
    assert torch.equal(model.generate(idx, 8, top_k=1, use_cache=False), text)
    with pytest.raises(ValueError, match=f'max_len={length + 8} is more than block_size=32'):
        model.generate(idx, 8, temperature=0)


def test_stream_yields_the_tokens_of_generate_one_by_one():
    model = make('ResFormer GQA')
    idx = tokens(B, 9)
    options = dict(temperature=0.9, top_k=20, top_p=0.8)
    expected = model.generate(idx, 12, **options, generator=generator())[:, 9:]
    for cache in (model.new_cache(B, 21), None):
        stream = model.stream(idx, 12, cache, **options, generator=generator())
        new = [next(stream) for _ in range(3)]
        # No token is computed before it is asked for.
        assert cache is None or cache.position.item() == 9 + 2
        new += stream
        assert [tuple(t.shape) for t in new] == [(B, 1)] * 12
        assert torch.equal(torch.cat(new, dim=1), expected)


def test_stream_continues_what_the_cache_has_seen():
    model = make('SVFormer GQA')
    idx = tokens(B, 9)
    cache = model.new_cache(B, 21)
    model(idx[:, :6], cache=cache)
    new = model.stream(idx[:, 6:], 12, temperature=0, cache=cache)
    assert torch.equal(torch.cat((idx, *new), dim=1), model.generate(idx, 12, temperature=0))


# --- which are likely ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    'options', [{}, dict(top_p=0.7), dict(top_k=9, top_p=0.9), dict(use_cache=False)], ids=str
)
def test_samples_are_those_of_the_generators_seed(options):
    model = make()
    idx = tokens(B, 5)

    def sample(seed):
        return model.generate(idx, 15, generator=generator(seed), **options)

    first = sample(1)
    assert torch.equal(first, sample(1)) and not torch.equal(first, sample(2))
    torch.manual_seed(3)
    assert torch.equal(first, sample(1))  # and of nothing else


def nucleus_of(logits, temperature=1.0, top_k=None, top_p=None):
    """{token: probability}, the slow way.

    From the likeliest on, until there are top_k tokens, and of these until they have top_p.
    """
    odds = {}
    for token, logit in enumerate(logits.double().tolist()):
        odds[token] = math.exp(logit / temperature)
    likeliest = sorted(odds, key=odds.get, reverse=True)[: top_k or None]
    total = sum(odds[token] for token in likeliest)
    nucleus = []
    mass = 0.0
    for token in likeliest:
        nucleus.append(token)
        mass += odds[token]
        if top_p and mass / total >= top_p:
            break
    return {token: odds[token] / mass for token in nucleus}


@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(top_p=1.0),
        dict(top_p=0.3),
        dict(top_p=0.6),
        dict(top_p=0.9),
        dict(temperature=0.5),
        dict(temperature=0.5, top_p=0.9),
        dict(temperature=2.0, top_p=0.5),
        dict(temperature=2.0, top_k=3),
        dict(top_k=5),
        dict(top_k=5, top_p=1.0),
        dict(top_k=8, top_p=0.6),
        dict(top_k=12, top_p=0.8),
        dict(top_k=3, top_p=0.999),
        dict(top_k=500),
        dict(top_k=100, top_p=0.6),
        dict(top_k=0, top_p=0.6),
    ],
    ids=str,
)
def test_samples_follow_temperature_top_k_and_top_p(options):
    """4,000 of each of two texts: none from outside the nucleus, and each as often as it should."""
    model = make(n_layer=1)
    texts = tokens(2, 5)
    n = 4000
    new = model.generate(texts.repeat_interleave(n, dim=0), 1, generator=generator(), **options)
    nuclei = [nucleus_of(logits, **options) for logits in model(texts)[0][:, -1]]
    for samples, expected in zip(new[:, -1].view(2, n).tolist(), nuclei, strict=True):
        counts = Counter(samples)
        assert counts.keys() <= expected.keys()
        for token, p in expected.items():
            assert abs(counts[token] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 2, (token, p)
    # Each row has a nucleus of its own.
    assert nuclei[0].keys() != nuclei[1].keys() or len(nuclei[0]) == 61


def test_top_p_of_one_changes_nothing_and_a_tiny_one_is_greedy():
    model = make()
    idx = tokens(200, 5)
    plain = model.generate(idx, 10, generator=generator())
    assert torch.equal(plain, model.generate(idx, 10, top_p=1.0, generator=generator()))
    greedy = model.generate(idx, 10, temperature=0)
    assert torch.equal(model.generate(idx, 10, top_p=1e-6), greedy)
    assert torch.equal(model.generate(idx, 10, top_k=7, top_p=1e-6), greedy)
    assert torch.equal(model.generate(idx, 10, top_p=1e-50), greedy)  # 0 in single precision


@pytest.mark.parametrize('temperature', [0, 1])
def test_logits_that_are_not_finite_are_refused(temperature):
    """At temperature 0, they would be token 0 for ever."""
    model = make()
    idx = tokens(B, 5)
    model.lm_head.weight[3] = math.nan
    with pytest.raises(ValueError, match='logits are not finite'):
        model.generate(idx, 2, temperature)


@pytest.mark.parametrize('temperature', [1e-5, 1e-40, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    model = make()
    idx = tokens(B, 5)
    greedy = model.generate(idx, 10, temperature=0)
    assert torch.equal(model.generate(idx, 10, temperature), greedy)
    assert torch.equal(model.generate(idx, 10, temperature, top_k=5, top_p=0.9), greedy)


@pytest.mark.parametrize(
    'name, value',
    [
        ('temperature', -1.0),
        ('temperature', math.nan),
        ('top_k', -1),
        ('top_p', 0.0),
        ('top_p', -1.0),
        ('top_p', 1.5),
        ('top_p', math.nan),
    ],
)
def test_ways_to_sample_that_make_no_sense_are_refused_at_once(name, value):
    with pytest.raises(ValueError, match=f'{name}={value}'):
        make(n_layer=1).generate(tokens(B, 5), 4, **{name: value})
