"""Decoding: the KV cache and compiled decoding against the forward pass over the whole text, and
sampling against its slow, obvious version."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from conftest import raises_one_line
from variants import SIZE, greedy, in_chunks, make, tokens

from model import GPT, GPTConfig, attend, attend_one
from sample import draw_token

B, T = 3, 24
few_variants = pytest.mark.parametrize('name', ['NeuTRENO on CLA', 'gpt2 CLA GQA', 'everything'])


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def prefilled(model, idx, max_len):
    cache = model.new_cache(idx.size(0), max_len)
    model(idx, cache=cache)
    return cache


def assert_near(ours, expected):
    """No logit is off by more than rounding, relative to the largest."""
    assert ours.shape == expected.shape
    error = ((ours - expected).abs().max() / expected.abs().max()).item()
    assert error <= 1e-5, f'relative error {error:.2e}'


# --- the cache (test_variants.py decodes every variant with it) --------------------------------------


@few_variants
def test_kernels_may_store_the_heads_of_a_position_side_by_side(monkeypatch, name):
    """As those of CUDA do: the result has the shape (B, heads, T, hs), but not its order."""
    attention = F.scaled_dot_product_attention

    def side_by_side(q, k, v, mask, *args, **options):
        # Query heads that share keys share the mask of many tokens, too: a copy for each could be
        # larger than the cache.
        assert mask is None or q.size(2) <= 4 or mask.size(0) == q.size(2) in (7, 11)
        result = attention(q, k, v, mask, *args, **options).transpose(1, 2).contiguous()
        return result.transpose(1, 2)

    model = make(name)
    idx = tokens(B, T)
    expected = model(idx)[0]
    monkeypatch.setattr(F, 'scaled_dot_product_attention', side_by_side)
    assert_near(model(idx)[0], expected)
    assert_near(in_chunks(model, idx, (7, 1, 11, 1, 4), model.new_cache(B, T)), expected)


@few_variants
def test_after_a_cache_come_the_last_logits_and_the_loss_of_the_whole_text(name):
    model = make(name)
    idx, targets = tokens(B, T), tokens(B, T, seed=1)
    logits = model(idx)[0]
    with torch.enable_grad():
        cache = prefilled(model, idx[:, :12], T)
    assert not any(tensor.requires_grad for tensor in cache.tensors.values())
    loss = model(idx[:, 12:20], targets[:, 12:20], cache)[1]
    expected = F.cross_entropy(logits[:, 12:20].flatten(0, 1), targets[:, 12:20].flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_near(in_chunks(model, idx[:, 20:], (3, 1), cache, last_only=True), logits[:, [22, 23]])


def test_the_cache_has_the_type_of_the_weights_or_the_given_one_and_meta_holds_no_memory():
    model = make('SVFormer')
    single, half = model.new_cache(2, 20), model.new_cache(2, 20, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in half.tensors.values()} == {torch.bfloat16}
    assert single.nbytes == 2 * half.nbytes == 2 * model.bfloat16().new_cache(2, 20).nbytes
    cache = GPT.without_weights(GPTConfig(**SIZE)).new_cache(2 * 10**9, 32)  # tens of terabytes
    assert cache.nbytes == 2 * 3 * 32 * 32 * 4 * 2 * 10**9
    assert all(tensor.is_meta for tensor in (*cache.tensors.values(), cache.position))


@pytest.mark.parametrize(
    'dtype, of_cache', [('autocast', None), ('autocast', 'bf16'), ('fp32', 'bf16'), ('bf16', None)]
)
def test_a_cache_in_half_precision_gives_almost_the_same_logits(dtype, of_cache):
    model = make('everything')
    idx = tokens(B, T)
    expected = model(idx)[0]
    if dtype == 'bf16':
        model.bfloat16()
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=dtype == 'autocast'):
        cache = model.new_cache(B, T + 3, torch.bfloat16 if of_cache else None)
        logits = in_chunks(model, idx, (7, 1, 11, 1, 4), cache)
    assert logits.dtype == (torch.float32 if dtype == 'fp32' else torch.bfloat16)
    assert (logits - expected).norm() / expected.norm() < 5e-2


@pytest.mark.parametrize('name', ['vanilla', 'gpt2', 'SVFormer GQA'])
def test_tokens_that_do_not_fit_are_refused_and_leave_the_cache_as_it_was(name):
    model = make(name)
    idx = tokens(B, T)
    cache = prefilled(model, idx[:, :12], 16)
    for too_many in (5, 12):
        with pytest.raises(ValueError, match=rf'{too_many} .*max_len=16\b.* 12\b'):
            model(tokens(B, too_many, seed=1), cache=cache)
    for rows, length in ((1, 1), (2, 3), (4, 1)):  # of another batch size
        with pytest.raises((ValueError, RuntimeError)):
            model(tokens(rows, length), cache=cache)
    assert cache.position.item() == 12
    assert_near(in_chunks(model, idx[:, 12:16], (1, 3), cache), model(idx[:, :16])[0][:, 12:])
    with raises_one_line('max_len=33 is more than block_size=32'):
        model.new_cache(1, 33)


@pytest.mark.parametrize(
    'name, backend',
    [
        ('SVFormer CLA keys GQA', 'eager'),
        ('cross from all, GQA', 'aot_eager'),
        ('cross from all, GQA', 'as on CUDA'),
        ('half of the heads GQA, CLA keys', 'as on CUDA'),
    ],
)
def test_a_compiled_model_decodes_without_recompiling_and_refuses_what_does_not_fit(
    name, backend, monkeypatch
):
    torch._dynamo.reset()
    if backend == 'as on CUDA':

        def as_on_cuda(q, k, v, dropout=0.0, mask=None):
            if mask is None or q.size(2) > 1:
                return attend(q, k, v, dropout, mask)
            return attend_one(q, k, v, mask)

        monkeypatch.setattr('model.attend', as_on_cuda)
        backend = 'eager'
    model = make(name)
    idx = tokens(B, T)
    expected = model(idx)[0]
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    first = prefilled(model, idx[:, :7], 20)
    logits = [compiled(idx[:, 7:8], cache=first)[0]]
    with torch._dynamo.config.patch(error_on_recompile=True):
        logits += [compiled(idx[:, t : t + 1], cache=first)[0] for t in range(8, 17)]
        # The cache of another text: the same shapes, other tensors.
        second = prefilled(model, idx[:, :12], 20)
        again = in_chunks(compiled, idx[:, 12:15], 1, second)
    assert_near(torch.cat(logits, dim=1), expected[:, 7:17])
    assert_near(again, expected[:, 12:15])
    assert_near(model(idx[:, 17:20], cache=first)[0], expected[:, 17:20])  # eager goes on
    with pytest.raises(RuntimeError, match='max_len'):
        compiled(idx[:, :1], cache=first)


@pytest.mark.parametrize('length', [2048, 16384])
@pytest.mark.parametrize('group', [1, 2, 8])
def test_one_query_in_float16_is_at_most_as_wrong_as_by_torchs_attention(group, length):
    mask = torch.arange(length)[None] < length - 5
    for deviation in (1, 8):  # of the scores
        q = (deviation * torch.randn(1, 8, 1, 64)).half()
        k, v = torch.randn(2, 1, 8 // group, length, 64).half()
        expected = attend(q.float(), k.float(), v.float(), mask=mask)
        ours, torchs = attend_one(q, k, v, mask), attend(q, k, v, mask=mask)
        assert (ours - expected).norm() <= 1.5 * (torchs - expected).norm()


def test_a_compiled_model_takes_a_prompt_in_chunks():
    """Each query must be kept from rows that are not filled, and from later queries' rows, of every
    layer's keys."""
    torch._dynamo.reset()
    model = make('cross from all, GQA')
    idx = tokens(B, T)
    compiled = torch.compile(model, fullgraph=True, backend='eager')
    assert_near(in_chunks(compiled, idx, (8, 8, 8), model.new_cache(B, T + 3)), model(idx)[0])


# --- which tokens follow -------------------------------------------------------------------------


@few_variants
def test_without_a_cache_the_last_block_size_tokens_are_the_context(name):
    model = make(name)
    idx = text = tokens(B, 28)
    for _ in range(8):
        likeliest = model(text[:, -32:])[0][:, -1].argmax(dim=-1, keepdim=True)
        text = torch.cat((text, likeliest), dim=1)
    assert torch.equal(greedy(model, idx, 8), text)


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
        dict(temperature=0.5, top_p=0.9),
        dict(temperature=2.0, top_k=3),
        dict(top_k=12, top_p=0.8),
        dict(top_k=500),
    ],
    ids=str,
)
def test_samples_follow_temperature_top_k_and_top_p(options):
    """4,000 of each of two texts: none from outside the nucleus, and each as often as it should."""
    logits = make(n_layer=1)(tokens(2, 5))[0][:, -1]
    n = 4000
    generator = torch.Generator().manual_seed(0)  # test_sample.py has its seed
    new = draw_token(logits.repeat_interleave(n, dim=0), generator=generator, **options)
    nuclei = [nucleus_of(row, **options) for row in logits]
    for samples, expected in zip(new.view(2, n).tolist(), nuclei, strict=True):
        counts = Counter(samples)
        assert counts.keys() <= expected.keys()
        for token, p in expected.items():
            assert abs(counts[token] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 2, (token, p)
