"""The KV cache and compiled decoding, against the forward pass over the whole text."""

import itertools
import math
from fractions import Fraction

import pytest
import reference
import torch
import torch.nn.functional as F
import variants
from variants import CLA, RES, SIZE, SV, VARIANTS, config_of, tokens

from model import GPT, GPTConfig

B, T = 3, 24
CHUNKS = (7, 1, 11, 1, 4)
every_variant = pytest.mark.parametrize('name', VARIANTS)
few_variants = pytest.mark.parametrize(
    'name', ['vanilla', 'NeuTRENO on CLA', 'cross from all, GQA', 'gpt2 CLA GQA', 'everything']
)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def make(name='vanilla', **size):
    return variants.make(name, **{'n_layer': 4, **size})


def prefilled(model, idx, max_len):
    cache = model.new_cache(idx.size(0), max_len)
    model(idx, cache=cache)
    return cache


def in_chunks(model, idx, chunks, cache, **options):
    """The logits of idx, a chunk of the given lengths at a time, behind what the cache has seen."""
    logits = [model(chunk, cache=cache, **options)[0] for chunk in idx.split(chunks, dim=1)]
    return torch.cat(logits, dim=1)


def assert_near(ours, expected, tolerance):
    """No logit is off by more than the tolerance, relative to the largest."""
    assert ours.shape == expected.shape
    error = ((ours - expected).abs().max() / expected.abs().max()).item()
    assert error <= tolerance, f'relative error {error:.2e}'


# --- exact ---------------------------------------------------------------------------------------

CHUNKINGS = [
    (torch.float32, 1e-5, (14,) + 10 * (1,)),
    (torch.float32, 1e-5, CHUNKS),
    (torch.float32, 1e-5, (1, 7, 1, 15)),
    (torch.float64, 1e-12, (1, 7, 1, 12, 1, 1, 1)),
]


@every_variant
def test_a_text_in_chunks_through_the_cache_gives_the_logits_of_the_full_forward(name):
    model = make(name)
    idx = tokens(B, T)
    for room, (dtype, tolerance, chunks) in enumerate(CHUNKINGS):
        expected = model.to(dtype)(idx)[0]
        cache = model.new_cache(B, T + room)
        assert_near(in_chunks(model, idx, chunks, cache), expected, tolerance)
        assert cache.position.item() == T


@few_variants
def test_kernels_may_store_the_heads_of_a_position_side_by_side(monkeypatch, name):
    """As those of CUDA do: the result has the shape (B, heads, T, hs), but not its order."""
    attention = F.scaled_dot_product_attention

    def side_by_side(*args, **options):
        result = attention(*args, **options).transpose(1, 2).contiguous()
        return result.transpose(1, 2)

    model = make(name)
    idx = tokens(B, T)
    expected = model(idx)[0]
    monkeypatch.setattr(F, 'scaled_dot_product_attention', side_by_side)
    assert_near(model(idx)[0], expected, 1e-5)
    assert_near(in_chunks(model, idx, CHUNKS, model.new_cache(B, T)), expected, 1e-5)


@every_variant
def test_last_only_gives_the_last_position_of_every_chunk(name):
    model = make(name)
    idx = tokens(B, T)
    chunks = (9, 1, 6, 1, 1, 6)
    ends = torch.tensor(list(itertools.accumulate(chunks))) - 1
    cached = in_chunks(model, idx, chunks, model.new_cache(B, T + 3), last_only=True)
    assert_near(cached, model(idx)[0][:, ends], 1e-5)


@few_variants
def test_a_cached_text_is_a_prefix_of_the_loss(name):
    model = make(name)
    idx, targets = tokens(B, T), tokens(B, T, seed=1)
    targets[0, 15] = -1
    logits = model(idx)[0][:, 12:].flatten(0, 1)
    expected = F.cross_entropy(logits, targets[:, 12:].flatten(), ignore_index=-1)
    cache = prefilled(model, idx[:, :12], T)
    loss = model(idx[:, 12:], targets[:, 12:], cache)[1]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_rows_of_a_batch_do_not_see_each_other():
    model = make('cross from all, GQA')
    idx = tokens(B, T)
    together = in_chunks(model, idx, (9, 1, 1, 13), model.new_cache(B, T))
    for row in range(B):
        alone = in_chunks(model, idx[row : row + 1], (9, 1, 1, 13), model.new_cache(1, T))
        assert_near(together[row : row + 1], alone, 1e-5)


def test_the_cache_keeps_no_graph_of_gradients():
    model = make('learned from all')
    idx = tokens(B, T)
    with torch.enable_grad():
        cache = prefilled(model, idx[:, :10], T)
        logits = in_chunks(model, idx[:, 10:], (1, 13), cache)
    assert logits.requires_grad
    assert not any(tensor.requires_grad for tensor in cache.tensors.values())
    assert_near(logits, model(idx)[0][:, 10:], 1e-5)


# --- size ----------------------------------------------------------------------------------------


@every_variant
def test_only_layers_that_own_keys_or_values_have_a_cache_of_them(name):
    c = config_of(name, n_layer=4)
    cache = GPT(c).new_cache(B, 20)
    shape = (B, c.n_kv_head or c.n_head, 20, c.n_embd // c.n_head)
    expected = {}
    for part, n in itertools.product('kv', range(c.n_layer)):
        if reference.owner(c, part, n) == n:
            expected[part, n] = shape, torch.float32
    tensors = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in cache.tensors.items()}
    assert tensors == expected
    assert cache.nbytes == len(expected) * math.prod(shape) * 4


@pytest.mark.parametrize('L', [8, 4])
def test_the_caches_of_vanilla_svformer_and_cla_have_exactly_the_sizes_of_the_paper(L):
    def nbytes(**settings):
        config = GPTConfig(**{**SIZE, 'n_layer': L, 'n_head': 8, **settings})
        return GPT(config).new_cache(2, 20).nbytes

    vanilla = nbytes()
    assert vanilla == 2 * L * 2 * 20 * 32 * 4
    assert Fraction(nbytes(**SV), vanilla) == Fraction(L + 1, 2 * L)
    assert Fraction(nbytes(**CLA), vanilla) == Fraction(1, 2)
    assert Fraction(nbytes(**SV, n_kv_head=2), vanilla) == Fraction(L + 1, 8 * L)
    assert nbytes(**RES) == vanilla
    assert nbytes(**RES, residual_map='cross', residual_from='all') == vanilla


def test_the_cache_has_the_type_of_the_weights_or_the_given_one():
    model = make('SVFormer')
    single, half = model.new_cache(2, 20), model.new_cache(2, 20, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in half.tensors.values()} == {torch.bfloat16}
    assert single.nbytes == 2 * half.nbytes == 2 * model.bfloat16().new_cache(2, 20).nbytes


def test_a_cache_on_the_meta_device_has_its_size_but_no_memory():
    on_cpu = GPT(GPTConfig(**SIZE)).new_cache(2, 32)
    with torch.device('meta'):
        model = GPT(GPTConfig(**SIZE))
    cache = model.new_cache(2 * 10**9, 32)  # tens of terabytes
    assert cache.nbytes == 10**9 * on_cpu.nbytes
    assert all(tensor.is_meta for tensor in (*cache.tensors.values(), cache.position))


# --- compiled decoding ---------------------------------------------------------------------------


def compiled_decoding_equals_eager(name, backend, max_len):
    torch._dynamo.reset()
    model = make(name, n_layer=3)  # fewer layers compile faster
    idx = tokens(B, T)
    expected = model(idx)[0]
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    first = prefilled(model, idx[:, :7], max_len)
    logits = [compiled(idx[:, 7:8], cache=first)[0]]
    with torch._dynamo.config.patch(error_on_recompile=True):
        logits += [compiled(idx[:, t : t + 1], cache=first)[0] for t in range(8, 17)]
        # The cache of another text: the same shapes, other tensors.
        second = prefilled(model, idx[:, :12], max_len)
        again = in_chunks(compiled, idx[:, 12:15], 1, second)
    assert_near(torch.cat(logits, dim=1), expected[:, 7:17], 1e-5)
    assert_near(again, expected[:, 12:15], 1e-5)
    assert first.position.item() == 17
    assert_near(model(idx[:, 17:20], cache=first)[0], expected[:, 17:20], 1e-5)  # eager goes on

    full = prefilled(model, tokens(B, max_len), max_len)
    with pytest.raises(RuntimeError, match='max_len'):
        compiled(idx[:, :1], cache=full)


@pytest.mark.parametrize(
    'name, backend',
    [
        ('vanilla', 'eager'),
        ('ResFormer', 'eager'),
        ('SVFormer CLA keys GQA', 'inductor'),
        ('cross from all, GQA', 'eager'),
        ('NeuTRENO on CLA', 'eager'),
        ('gpt2', 'eager'),
        ('everything', 'aot_eager'),
    ],
)
def test_a_compiled_model_decodes_without_recompiling_and_refuses_what_does_not_fit(name, backend):
    compiled_decoding_equals_eager(name, backend, max_len=32 if backend == 'inductor' else 20)


def test_a_compiled_model_takes_a_prompt_in_chunks():
    """Each query must be kept from rows that are not filled, and from later queries' rows.

    That holds for every layer's keys.
    """
    torch._dynamo.reset()
    model = make('cross from all, GQA', n_layer=3)
    idx = tokens(B, T)
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    logits = in_chunks(compiled, idx, (8, 8, 8), model.new_cache(B, T + 3))
    assert_near(logits, model(idx)[0], 1e-5)


# --- what does not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['vanilla', 'gpt2', 'SVFormer GQA'])
def test_tokens_that_do_not_fit_are_refused_and_leave_the_cache_as_it_was(name):
    model = make(name)
    idx = tokens(B, T)
    expected = model(idx)[0]
    cache = prefilled(model, idx[:, :12], 16)
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
    model = make(name)
    idx = tokens(B, T)
    cache = prefilled(model, idx[:, :12], 16)
    for length in (1, 3):
        with pytest.raises((ValueError, RuntimeError)):
            model(tokens(rows, length), cache=cache)
    assert_near(model(idx[:, 12:16], cache=cache)[0], model(idx[:, :16])[0][:, 12:], 1e-5)


# --- half precision ------------------------------------------------------------------------------


def relative_error(ours, expected):
    return ((ours.double() - expected.double()).norm() / expected.double().norm()).item()


@few_variants
@pytest.mark.parametrize('dtype', [None, torch.bfloat16], ids=str)
def test_a_cache_under_bf16_autocast_gives_the_logits_of_the_full_forward(name, dtype):
    model = make(name)
    idx = tokens(B, T)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        expected = model(idx)[0]
        logits = in_chunks(model, idx, CHUNKS, model.new_cache(B, T + 3, dtype))
    assert logits.dtype == expected.dtype == torch.bfloat16
    assert relative_error(logits, expected) < 3e-2


@few_variants
def test_a_bf16_cache_under_a_fp32_model_gives_almost_the_same_logits(name):
    model = make(name)
    idx = tokens(B, T)
    logits = in_chunks(model, idx, CHUNKS, model.new_cache(B, T + 3, torch.bfloat16))
    assert logits.dtype == torch.float32
    assert 1e-5 < relative_error(logits, model(idx)[0]) < 5e-2


def test_a_bf16_model_generates_with_and_without_a_cache():
    model = make('ResFormer').bfloat16()
    idx = tokens(B, T)
    logits = in_chunks(model, idx, CHUNKS, model.new_cache(B, T))
    assert relative_error(logits, model(idx)[0]) < 3e-2
    for use_cache in (True, False):
        text = model.generate(idx, 5, top_p=0.9, use_cache=use_cache)
        assert text.shape == (B, T + 5)
