"""
Inference: the KV cache, compiled decoding, sampling and Llama 3's RoPE. Each against its slow, obvious version: the
forward pass over the whole text, a loop over sorted tokens, one frequency at a time.
"""
import dataclasses
import itertools
import json
import math
from collections import Counter
from fractions import Fraction

import pytest
import reference
import torch
import torch.nn.functional as F
from test_variants import VARIANTS

from model import GPT, GPTConfig

SIZE = dict(block_size=32, vocab_size=61, n_layer=4, n_head=4, n_embd=32, n_inner=48)
B, T = 3, 24
ROPE = (8.0, 1.0, 4.0, 100)  # of head size 8's wavelengths one is kept, one blended, two are stretched
VARIANTS = VARIANTS | {
    'llama3 RoPE': dict(rope_scaling=ROPE),
    'llama3 RoPE ResFormer GQA': dict(rope_scaling=ROPE, v_residual=True, n_kv_head=2),
    'cross from previous, GQA': dict(v_residual=True, residual_map='cross', residual_from='previous', n_kv_head=2),
    'first queries, all values': dict(share_q=True, v_residual=True, residual_from='all'),
    'queries every 2, query residual': dict(share_q=True, share_q_every=2, q_residual=True),
}
every_variant = pytest.mark.parametrize('name', VARIANTS)
FEW = ['vanilla', 'NeuTRENO on CLA', 'cross from all, GQA', 'gpt2 CLA GQA', 'everything']
few_variants = pytest.mark.parametrize('name', FEW)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def make(name='vanilla', **size):
    """A model with weights far from their start."""
    return reference.perturb(GPT(GPTConfig(**{**SIZE, **size, **VARIANTS[name]})))


def tokens(*shape, seed=0):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def prefilled(model, idx, max_len, **options):
    cache = model.new_cache(idx.size(0), max_len, **options)
    model(idx, cache=cache)
    return cache


def in_chunks(model, idx, chunks, cache, **options):
    """The logits of idx, a chunk of the given lengths at a time, behind what the cache has seen."""
    return torch.cat([model(chunk, cache=cache, **options)[0] for chunk in idx.split(chunks, dim=1)], dim=1)


def assert_near(ours, expected, tolerance):
    """No logit is off by more than the tolerance, relative to the largest."""
    assert ours.shape == expected.shape
    error = ((ours - expected).abs().max() / expected.abs().max()).item()
    assert error <= tolerance, f'relative error {error:.2e}'


# --------------------------------------------------------------------------------------------------------------------
# exact


@every_variant
def test_a_text_in_chunks_through_the_cache_gives_the_logits_of_the_full_forward(name):
    model, idx = make(name), tokens(B, T)
    for dtype, tolerance, *chunkings in (
            (torch.float32, 1e-5, (14,) + 10 * (1,), (7, 1, 11, 1, 4), (1, 7, 1, 15)),
            (torch.float64, 1e-12, (1, 7, 1, 12, 1, 1, 1))):
        expected = model.to(dtype)(idx)[0]
        for room, chunks in enumerate(chunkings):
            cache = model.new_cache(B, T + room)
            assert_near(in_chunks(model, idx, chunks, cache), expected, tolerance)
            assert cache.position.item() == T


@every_variant
def test_last_only_gives_the_last_position_of_every_chunk(name):
    model, idx, chunks = make(name), tokens(B, T), (9, 1, 6, 1, 1, 6)
    ends = torch.tensor(list(itertools.accumulate(chunks))) - 1
    cached = in_chunks(model, idx, chunks, model.new_cache(B, T + 3), last_only=True)
    assert_near(cached, model(idx)[0][:, ends], 1e-5)


@few_variants
def test_a_cached_text_is_a_prefix_of_the_loss(name):
    model, idx, targets = make(name), tokens(B, T), tokens(B, T, seed=1)
    targets[0, 15] = -1
    cache = prefilled(model, idx[:, :12], T)
    expected = F.cross_entropy(model(idx)[0][:, 12:].flatten(0, 1), targets[:, 12:].flatten(), ignore_index=-1)
    assert model(idx[:, 12:], targets[:, 12:], cache)[1].item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_rows_of_a_batch_do_not_see_each_other():
    model, idx = make('cross from all, GQA'), tokens(B, T)
    together = in_chunks(model, idx, (9, 1, 1, 13), model.new_cache(B, T))
    for row in range(B):
        alone = in_chunks(model, idx[row:row + 1], (9, 1, 1, 13), model.new_cache(1, T))
        assert_near(together[row:row + 1], alone, 1e-5)


def test_the_cache_keeps_no_graph_of_gradients():
    model, idx = make('learned from all'), tokens(B, T)
    with torch.enable_grad():
        cache = prefilled(model, idx[:, :10], T)
        logits = in_chunks(model, idx[:, 10:], (1, 13), cache)
    assert logits.requires_grad and not any(tensor.requires_grad for tensor in cache.tensors.values())
    assert_near(logits, model(idx)[0][:, 10:], 1e-5)


# --------------------------------------------------------------------------------------------------------------------
# size


@every_variant
def test_only_layers_that_own_keys_or_values_have_a_cache_of_them(name):
    c = GPTConfig(**{**SIZE, **VARIANTS[name]})
    cache = GPT(c).new_cache(B, 20)
    expected = {(part, n) for part in 'kv' for n in range(c.n_layer) if reference.owner(c, part, n) == n}
    shape = B, c.n_kv_head or c.n_head, 20, c.n_embd // c.n_head
    assert {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in cache.tensors.items()} == {
        key: (shape, torch.float32) for key in expected}
    assert cache.nbytes == len(expected) * math.prod(shape) * 4


@pytest.mark.parametrize('L', [8, 4])
def test_the_caches_of_vanilla_svformer_and_cla_have_exactly_the_sizes_of_the_paper(L):
    def nbytes(**settings):
        model = GPT(GPTConfig(**{**SIZE, 'n_layer': L, 'n_head': 8, **settings}))
        return model.new_cache(2, 20).nbytes

    vanilla, every_2 = nbytes(), dict(share_k=True, share_k_every=2, share_v=True, share_v_every=2)
    assert vanilla == 2 * L * 2 * 20 * 32 * 4
    assert Fraction(nbytes(share_v=True), vanilla) == Fraction(L + 1, 2 * L)
    assert Fraction(nbytes(**every_2), vanilla) == Fraction(1, 2)
    assert Fraction(nbytes(share_v=True, n_kv_head=2), vanilla) == Fraction(L + 1, 8 * L)
    assert nbytes(v_residual=True) == nbytes(v_residual=True, residual_map='cross', residual_from='all') == vanilla


def test_the_cache_has_the_type_of_the_weights_or_the_given_one():
    model = make('SVFormer')
    single, half = model.new_cache(2, 20), model.new_cache(2, 20, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in half.tensors.values()} == {torch.bfloat16}
    assert single.nbytes == 2 * half.nbytes == 2 * model.bfloat16().new_cache(2, 20).nbytes


def test_a_cache_on_the_meta_device_has_its_size_but_no_memory():
    on_cpu = GPT(GPTConfig(**SIZE)).new_cache(2, 32)
    with torch.device('meta'):
        model = GPT(GPTConfig(**SIZE))
    cache = model.new_cache(2 * 10 ** 9, 32)  # 65 TB
    assert cache.nbytes == 10 ** 9 * on_cpu.nbytes
    assert all(tensor.is_meta for tensor in (*cache.tensors.values(), cache.position))


# --------------------------------------------------------------------------------------------------------------------
# compiled decoding


def compiled_decoding_equals_eager(name, backend, max_len, **size):
    torch._dynamo.reset()
    model, idx = make(name, **size), tokens(B, T)
    expected = model(idx)[0]
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    first = prefilled(model, idx[:, :7], max_len)
    logits = [compiled(idx[:, 7:8], cache=first)[0]]
    with torch._dynamo.config.patch(error_on_recompile=True):
        logits += [compiled(idx[:, t:t + 1], cache=first)[0] for t in range(8, 17)]
        second = prefilled(model, idx[:, :12], max_len)  # of another text: same shapes, other tensors
        again = in_chunks(compiled, idx[:, 12:15], 1, second)
    assert_near(torch.cat(logits, dim=1), expected[:, 7:17], 1e-5)
    assert_near(again, expected[:, 12:15], 1e-5)
    assert first.position.item() == 17
    assert_near(model(idx[:, 17:20], cache=first)[0], expected[:, 17:20], 1e-5)  # eager goes on

    full = prefilled(model, tokens(B, max_len), max_len)
    with pytest.raises(RuntimeError, match='max_len'):
        compiled(idx[:, :1], cache=full)


@pytest.mark.parametrize('name', ['vanilla', 'ResFormer', 'SVFormer CLA keys GQA', 'cross from all, GQA',
                                  'NeuTRENO on CLA', 'gpt2', 'everything'])
def test_a_compiled_model_decodes_without_recompiling_and_refuses_what_does_not_fit(name):
    compiled_decoding_equals_eager(name, 'aot_eager', max_len=20, n_layer=3)  # fewer layers compile faster


def test_inductor_decodes_without_recompiling_and_refuses_what_does_not_fit():
    compiled_decoding_equals_eager('SVFormer CLA keys GQA', 'inductor', max_len=32, n_layer=3)


def test_a_compiled_model_takes_a_prompt_in_chunks():
    """Here each query must be kept from the rows that are not filled, and from later queries' in every layer's keys."""
    torch._dynamo.reset()
    model, idx = make('cross from all, GQA', n_layer=3), tokens(B, T)
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    logits = in_chunks(compiled, idx, (8, 8, 8), model.new_cache(B, T + 3))
    assert_near(logits, model(idx)[0], 1e-5)


# --------------------------------------------------------------------------------------------------------------------
# what does not fit


@pytest.mark.parametrize('name', ['vanilla', 'gpt2', 'SVFormer GQA'])
def test_tokens_that_do_not_fit_are_refused_and_leave_the_cache_as_it_was(name):
    model, idx = make(name), tokens(B, T)
    expected, cache = model(idx)[0], prefilled(model, idx[:, :12], 16)
    before = {key: tensor.clone() for key, tensor in cache.tensors.items()}
    for too_many in (5, 12):
        with pytest.raises(ValueError, match=rf'{too_many} .*max_len=16\b.* 12\b'):
            model(tokens(B, too_many, seed=1), cache=cache)
    assert cache.position.item() == 12
    assert all(torch.equal(tensor, before[key]) for key, tensor in cache.tensors.items())
    assert_near(in_chunks(model, idx[:, 12:16], (1, 3), cache), expected[:, 12:16], 1e-5)
    with pytest.raises(ValueError, match=r'1 .*max_len=16\b.* 16\b'):
        model(idx[:, 16:17], cache=cache)


def test_a_prompt_longer_than_an_empty_cache_is_refused():
    model = make()
    with pytest.raises(ValueError, match=r'9 .*max_len=8\b.* 0\b'):
        model(tokens(B, 9), cache=model.new_cache(B, 8))


@pytest.mark.parametrize('name', ['vanilla', 'gpt2'])
def test_a_cache_longer_than_block_size_is_refused(name):
    model = make(name)
    assert model.new_cache(1, 32).max_len == 32
    with pytest.raises(ValueError, match='max_len=33.*block_size=32'):
        model.new_cache(1, 33)


@pytest.mark.parametrize('name', ['vanilla', 'SVFormer', 'MQA'])
@pytest.mark.parametrize('rows', [1, 2, 4])
def test_another_batch_size_is_refused_and_leaves_the_cache_as_it_was(name, rows):
    model, idx = make(name), tokens(B, T)
    cache = prefilled(model, idx[:, :12], 16)
    for length in (1, 3):
        with pytest.raises((ValueError, RuntimeError)):
            model(tokens(rows, length), cache=cache)
    assert_near(model(idx[:, 12:16], cache=cache)[0], model(idx[:, :16])[0][:, 12:], 1e-5)


# --------------------------------------------------------------------------------------------------------------------
# generation


@every_variant
def test_greedy_generation_gives_the_same_tokens_with_and_without_a_cache(name):
    model, idx = make(name), tokens(B, 9)
    cached = model.generate(idx, 12, temperature=0)
    assert cached.shape == (B, 21) and torch.equal(cached[:, :9], idx)
    assert torch.equal(cached, model.generate(idx, 12, temperature=0, use_cache=False))


@few_variants
def test_without_a_cache_the_last_block_size_tokens_are_the_context(name):
    model, idx = make(name), tokens(B, 28)
    text = idx
    for _ in range(8):
        text = torch.cat((text, model(text[:, -32:])[0][:, -1].argmax(dim=-1, keepdim=True)), dim=1)
    assert torch.equal(model.generate(idx, 8, temperature=0, use_cache=False), text)
    with pytest.raises(ValueError, match='max_len=36.*block_size=32'):
        model.generate(idx, 8, temperature=0)


def test_stream_yields_the_tokens_of_generate_one_by_one():
    model, idx = make('ResFormer GQA'), tokens(B, 9)
    options = dict(temperature=0.9, top_k=20, top_p=0.8)
    expected = model.generate(idx, 12, **options, generator=generator())[:, 9:]
    for cache in (model.new_cache(B, 21), None):
        stream = model.stream(idx, 12, **options, cache=cache, generator=generator())
        new = [next(stream) for _ in range(3)]
        assert cache is None or cache.position.item() == 9 + 2  # no token is computed before it is asked for
        new += stream
        assert [tuple(t.shape) for t in new] == [(B, 1)] * 12
        assert torch.equal(torch.cat(new, dim=1), expected)


def test_stream_continues_what_the_cache_has_seen():
    model, idx = make('SVFormer GQA'), tokens(B, 9)
    cache = prefilled(model, idx[:, :6], 21)
    new = list(model.stream(idx[:, 6:], 12, temperature=0, cache=cache))
    assert torch.equal(torch.cat((idx, *new), dim=1), model.generate(idx, 12, temperature=0))


@pytest.mark.parametrize('options', [{}, dict(top_p=0.7), dict(top_k=9, top_p=0.9), dict(use_cache=False)], ids=str)
def test_samples_are_those_of_the_generators_seed(options):
    model, idx = make(), tokens(B, 5)
    first, again, other = (model.generate(idx, 15, generator=generator(seed), **options) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.manual_seed(3)
    assert torch.equal(model.generate(idx, 15, generator=generator(1), **options), first)  # and of nothing else


def kept(logits, temperature=1.0, top_k=None, top_p=None):
    """{token: probability}, the slow way: from the likeliest on, until top_k tokens or top_p of what these have."""
    odds = {token: math.exp(logit / temperature) for token, logit in enumerate(logits.double().tolist())}
    likeliest = sorted(odds, key=odds.get, reverse=True)[:top_k or None]
    total = sum(odds[token] for token in likeliest)
    nucleus, mass = [], 0.0
    for token in likeliest:
        nucleus.append(token)
        mass += odds[token]
        if top_p and mass / total >= top_p:
            break
    return {token: odds[token] / mass for token in nucleus}


@pytest.mark.parametrize('options', [
    {}, dict(top_p=1.0), dict(top_p=0.3), dict(top_p=0.6), dict(top_p=0.9), dict(temperature=0.5, top_p=0.9),
    dict(temperature=2.0, top_p=0.5), dict(top_k=5), dict(top_k=5, top_p=1.0), dict(top_k=8, top_p=0.6),
    dict(top_k=12, top_p=0.8), dict(top_k=3, top_p=0.999), dict(top_k=100, top_p=0.6), dict(top_k=0, top_p=0.6),
], ids=str)
def test_samples_follow_temperature_top_k_and_top_p(options):
    """4,000 of each of two texts: none from outside the nucleus, and each token of it as often as it should."""
    model, texts, n = make(n_layer=1), tokens(2, 5), 4000
    new = model.generate(texts.repeat_interleave(n, dim=0), 1, generator=generator(), **options)
    nuclei = [kept(logits, **options) for logits in model(texts)[0][:, -1]]
    for samples, expected in zip(new[:, -1].view(2, n).tolist(), nuclei, strict=True):
        counts = Counter(samples)
        assert counts.keys() <= expected.keys()
        for token, p in expected.items():
            assert abs(counts[token] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 2, (token, p)
    assert nuclei[0].keys() != nuclei[1].keys() or len(nuclei[0]) == 61  # each row has a nucleus of its own


def test_top_p_of_one_changes_nothing_and_a_tiny_one_is_greedy():
    model, idx = make(), tokens(200, 5)
    plain, one = (model.generate(idx, 10, top_p=top_p, generator=generator()) for top_p in (None, 1.0))
    assert torch.equal(plain, one)
    assert torch.equal(model.generate(idx, 10, top_p=1e-6), model.generate(idx, 10, temperature=0))
    assert torch.equal(model.generate(idx, 10, top_k=7, top_p=1e-6), model.generate(idx, 10, temperature=0))


@pytest.mark.parametrize('options', [
    dict(temperature=-1.0), dict(temperature=math.nan), dict(top_k=-1), dict(top_p=0.0), dict(top_p=-1.0),
    dict(top_p=1.5), dict(top_p=math.nan)], ids=str)
def test_ways_to_sample_that_make_no_sense_are_refused_at_once(options):
    model, ((name, value),) = make(n_layer=1), options.items()
    for call in (model.generate, model.stream):  # stream(): before the first token is asked for
        with pytest.raises(ValueError, match=f'{name}={value}'):
            call(tokens(B, 5), 4, **options)


@pytest.mark.parametrize('temperature', [1e-5, 1e-40, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    model, idx = make(), tokens(B, 5)
    for options in ({}, dict(top_k=5, top_p=0.9)):
        assert torch.equal(model.generate(idx, 10, temperature, **options), model.generate(idx, 10, temperature=0))


# --------------------------------------------------------------------------------------------------------------------
# half precision


def relative_error(ours, expected):
    return ((ours.double() - expected.double()).norm() / expected.double().norm()).item()


@few_variants
@pytest.mark.parametrize('dtype', [None, torch.bfloat16], ids=str)
def test_a_cache_under_bf16_autocast_gives_the_logits_of_the_full_forward(name, dtype):
    model, idx = make(name), tokens(B, T)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        expected = model(idx)[0]
        logits = in_chunks(model, idx, (7, 1, 11, 1, 4), model.new_cache(B, T + 3, dtype=dtype))
    assert logits.dtype == expected.dtype == torch.bfloat16
    assert relative_error(logits, expected) < 3e-2


@few_variants
def test_a_bf16_cache_under_a_fp32_model_gives_almost_the_same_logits(name):
    model, idx = make(name), tokens(B, T)
    logits = in_chunks(model, idx, (7, 1, 11, 1, 4), model.new_cache(B, T + 3, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert 1e-5 < relative_error(logits, model(idx)[0]) < 5e-2


def test_a_bf16_model_generates_with_and_without_a_cache():
    model, idx = make('ResFormer').bfloat16(), tokens(B, T)
    logits = in_chunks(model, idx, (7, 1, 11, 1, 4), model.new_cache(B, T))
    assert relative_error(logits, model(idx)[0]) < 3e-2
    for use_cache in (True, False):
        assert model.generate(idx, 5, top_p=0.9, use_cache=use_cache, generator=generator()).shape == (B, T + 5)


# --------------------------------------------------------------------------------------------------------------------
# Llama 3's RoPE


def llama3_frequencies(head_size, theta, factor, low_freq, high_freq, original_length):
    """One at a time, by wavelength. Returns them and what was done to each."""
    frequencies, done = [], []
    for i in range(head_size // 2):
        frequency = theta ** (-2 * i / head_size)
        wavelength = 2 * math.pi / frequency
        if wavelength < original_length / high_freq:
            done.append('kept')
        elif wavelength > original_length / low_freq:
            done.append('stretched')
            frequency = frequency / factor
        else:
            done.append('blended')
            smooth = (original_length / wavelength - low_freq) / (high_freq - low_freq)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    return frequencies, done


@pytest.mark.parametrize('theta, n_embd, scaling', [
    (500000.0, 128, (8.0, 1.0, 4.0, 8192)), (500000.0, 64, (32, 1, 4, 8192)),  # Llama 3.1 8B and 3.2 1B
    (10000.0, 8, ROPE), (10000.0, 16, (2.5, 0.5, 3.0, 77))])
def test_rope_scaling_is_that_of_llama3(theta, n_embd, scaling):
    size = dict(SIZE, block_size=100, n_layer=1, n_head=1, n_embd=n_embd, rope_theta=theta)
    model, plain = GPT(GPTConfig(**size, rope_scaling=scaling)), GPT(GPTConfig(**size))
    frequencies, done = llama3_frequencies(n_embd, theta, *scaling)
    assert set(done) == {'kept', 'blended', 'stretched'}
    for i, what in enumerate(done):
        for column in (i, i + n_embd // 2):
            angles = [t * frequencies[i] for t in range(100)]
            for table, function in ((model.cos, math.cos), (model.sin, math.sin)):
                expected = torch.tensor([function(angle) for angle in angles])
                torch.testing.assert_close(table[:, column], expected, atol=2e-5, rtol=0)
            assert torch.equal(model.sin[:, column], plain.sin[:, column]) == (what == 'kept')


@pytest.mark.parametrize('name', ['llama3 RoPE', 'llama3 RoPE ResFormer GQA'])
def test_logits_with_rope_scaling_equal_the_reference(name, monkeypatch):
    def rope(x, theta):
        frequencies, _ = llama3_frequencies(x.shape[1], theta, *ROPE)
        angle = torch.tensor([[t * frequency for frequency in frequencies] for t in range(len(x))], dtype=x.dtype)
        a, b = x.chunk(2, dim=1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=1)

    model, idx = make(name), tokens(B, T)
    weights = {key: p.double() for key, p in model.named_parameters()}
    plain = reference.logits(model.config, weights, idx)
    monkeypatch.setattr(reference, 'rope', rope)
    expected = reference.logits(model.config, weights, idx)
    assert (expected - plain).abs().max() > 0.1
    assert_near(model(idx)[0].double(), expected, 1e-4)


def test_rope_scaling_does_nothing_to_short_wavelengths_or_with_factor_1():
    plain = GPT(GPTConfig(**SIZE))
    for scaling in ((8.0, 1.0, 4.0, 10 ** 6), (1.0, 1.0, 4.0, 100)):
        model = GPT(GPTConfig(**SIZE, rope_scaling=scaling))
        torch.testing.assert_close(model.cos, plain.cos, atol=1e-5, rtol=0)
        torch.testing.assert_close(model.sin, plain.sin, atol=1e-5, rtol=0)


def test_rope_scaling_comes_back_from_json_as_it_was():
    config = GPTConfig(**SIZE, rope_scaling=ROPE)
    assert GPTConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize('scaling', [
    (8.0,), (8.0, 1.0, 4.0), (8.0, 1.0, 4.0, 8192, 1), (8.0, 4.0, 4.0, 8192), (8.0, 4.0, 1.0, 8192),
    (0.0, 1.0, 4.0, 8192), (8.0, 0.0, 4.0, 8192), (8.0, -1.0, 4.0, 8192), (8.0, 1.0, 4.0, -8192), (8.0, 1.0, 4.0, 0),
    (math.nan, 1.0, 4.0, 8192), ('8', 1.0, 4.0, 8192), (True, 1.0, 4.0, 8192), (None, 1.0, 4.0, 8192)], ids=str)
def test_a_wrong_rope_scaling_is_refused(scaling):
    with pytest.raises(ValueError, match='rope_scaling=.*factor, low_freq < high_freq, original_length'):
        GPTConfig(**SIZE, rope_scaling=scaling)


def test_rope_scaling_is_refused_with_learned_positions():
    with pytest.raises(ValueError, match='rope_scaling.*arch'):
        GPTConfig(**SIZE, arch='gpt2', rope_scaling=ROPE)
