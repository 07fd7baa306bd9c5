"""hub/modeling_nanoresformer.py: an exported variant does in transformers what it does here."""

import copy

import checkpoints
import pytest
import torch
from accelerate import init_empty_weights
from checkpoints import assert_equal_logits, assert_same_model, load_remote, transformers
from conftest import raises_one_line
from programs import BYTES, ours, tokens
from transformers import AutoTokenizer, DynamicCache
from variants import GPT2, RES, SV, greedy

from hub.convert import export
from model import GPT

quiet = checkpoints.quiet

GREEDY = dict(do_sample=False, eos_token_id=None, max_new_tokens=12)
CODE = {
    'SVFormer GQA, scaled': dict(SV, n_kv_head=2, rope_scaling=(8.0, 1.0, 4.0, 16)),
    'NeuTRENO': dict(neutreno=0.4, dropout=0.1),
    'DenseFormer, tied': dict(denseformer=True, tie_embeddings=True),
    'what crosses the layers': dict(
        RES, residual_weights='relu', attn_res=True, output_gate=True, x0_residual=True
    ),
    'gpt2 ResFormer, tied': dict(RES, **GPT2, tie_embeddings=True),
    'the family': dict(
        v_residual='token',
        residual_layers=(0, 2),
        residual_weights='head',
        share_k=(0, 1, 1),
        x0_residual=True,
        qk_norm=True,
    ),
}


def through(folder, model, **options):
    """A model as transformers loads its export."""
    export(model, BYTES, folder)
    return load_remote(folder, **options)


@pytest.fixture(scope='module', params=CODE)
def pair(request, tmp_path_factory):
    """(our model, its export as transformers loads it)."""
    model = ours(**CODE[request.param])
    folder = tmp_path_factory.mktemp('variant')
    theirs, info = through(folder, model, output_loading_info=True)
    assert not any(info.values()), info
    assert theirs.config.model_type == 'nanoresformer' and not theirs.training
    return model, theirs


@pytest.fixture(scope='module')
def svformer(tmp_path_factory):
    model = ours(**SV)
    folder = tmp_path_factory.mktemp('svformer')
    theirs = through(folder, model, attn_implementation='sdpa')  # the one that it has
    return model, theirs, folder


@pytest.fixture
def theirs(svformer):
    return svformer[1]


@torch.no_grad()
def test_a_variant_gives_the_same_logits_and_loss(pair):
    model, theirs = pair
    assert_equal_logits(model, theirs, tolerance=1e-5)
    idx = tokens()
    labels = idx.clone()
    labels[0, 5:9] = labels[1, :3] = -100  # transformers' mark for what does not count
    targets = torch.where(labels == -100, -1, labels)[:, 1:].contiguous()
    _, expected = model(idx[:, :-1], targets)
    loss = theirs(input_ids=idx, labels=labels).loss
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    # As Trainer calls it when it accumulates gradients: divided by the tokens of all micro-batches.
    counted = (targets != -1).sum().item()
    part = theirs(input_ids=idx, labels=labels, num_items_in_batch=3 * counted).loss
    assert 3 * part == pytest.approx(expected.item(), abs=1e-5)


# --- generate() ----------------------------------------------------------------------------------


def test_greedy_generation_gives_the_same_tokens_and_allocates_the_same_cache(pair):
    model, theirs = pair
    idx = tokens(T=7)
    options = dict(attention_mask=torch.ones_like(idx), return_dict_in_generate=True)
    made = theirs.generate(idx, **GREEDY, **options)
    assert torch.equal(made.sequences, greedy(model, idx, 12))
    assert torch.equal(made.sequences, theirs.generate(idx, **GREEDY, use_cache=False))

    # The last token is never fed in again.
    past = made.past_key_values
    (tokens_so_far,) = past.layers
    assert tokens_so_far.cache.nbytes == model.new_cache(2, 7 + 12 - 1).nbytes
    assert int(tokens_so_far.cache.position) == past.get_seq_length() == 7 + 12 - 1


def test_beam_search_with_the_cache_equals_that_without(pair):
    _, theirs = pair
    idx = tokens(T=7)
    beams = dict(num_beams=3, num_return_sequences=2, **GREEDY)
    cached = theirs.generate(idx, use_cache=True, **beams)
    assert torch.equal(cached, theirs.generate(idx, use_cache=False, **beams))
    # The beams did go apart.
    assert cached.shape == (4, 19) and not torch.equal(cached[::2], theirs.generate(idx, **GREEDY))


def test_generate_takes_tokenizers_output_and_a_cache_of_its_own_or_an_empty_one(svformer):
    model, theirs, folder = svformer
    encoder = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # it has no code
    encoded = encoder('né', return_tensors='pt')
    expected = greedy(model, torch.tensor([list('né'.encode())]), 12)
    earlier = theirs(encoded['input_ids'][:, :2], use_cache=True).past_key_values
    for past in (None, DynamicCache(), earlier):
        assert torch.equal(theirs.generate(**encoded, past_key_values=past, **GREEDY), expected)


def test_a_loop_that_keeps_its_own_dynamic_cache_finds_it_filled(theirs):
    idx, past = tokens(T=7), DynamicCache()
    parts = [theirs(part, past_key_values=past).logits for part in idx.split(3, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), theirs(idx).logits)
    assert past.get_seq_length() == 7


def test_candidates_that_generate_rejects_leave_the_cache(svformer):
    """Prompt lookup and an assistant guess tokens ahead, also beyond the last one, and take back those
    that the model would not have said."""
    _, theirs, folder = svformer
    assistant = load_remote(folder)
    greedy = dict(do_sample=False, max_new_tokens=18)  # up to block_size
    for seed in range(8):
        idx = tokens(1, T=6, vocabulary=4, seed=seed)
        expected = theirs.generate(idx, **greedy)
        for guess in (dict(prompt_lookup_num_tokens=4), dict(assistant_model=assistant)):
            assert torch.equal(theirs.generate(idx, **greedy, **guess), expected)


def test_guidance_and_a_prompt_in_chunks_use_the_cache(theirs):
    idx = tokens(T=7)
    expected = theirs.generate(idx, guidance_scale=2.0, use_cache=False, **GREEDY)
    assert torch.equal(theirs.generate(idx, guidance_scale=2.0, **GREEDY), expected)
    expected = theirs.generate(idx, **GREEDY)
    assert torch.equal(theirs.generate(idx, prefill_chunk_size=3, **GREEDY), expected)


# What one does to a cache of two rows and seven tokens, and whose tokens it then holds.
CHANGES = {
    'a copy continued': (lambda past: copy.deepcopy(past).crop(-3), lambda idx: idx),
    'cropped by three': (lambda past: past.crop(-3), lambda idx: idx[:, :4]),
    'cropped to four': (lambda past: past.crop(4), lambda idx: idx[:, :4]),
    'rows exchanged': (
        lambda past: past.reorder_cache(torch.tensor([1, 0])),
        lambda idx: idx.flip(0),
    ),
    'rows repeated': (
        lambda past: past.batch_repeat_interleave(2),
        lambda idx: idx.repeat_interleave(2, dim=0),
    ),
    'a row selected': (
        lambda past: past.batch_select_indices(torch.tensor([1])),
        lambda idx: idx[1:],
    ),
    'reset': (lambda past: past.reset(), lambda idx: idx[:, :0]),
}


@torch.no_grad()
@pytest.mark.parametrize('name', CHANGES)
def test_a_cache_can_be_changed_and_continued(theirs, name):
    change, expected = CHANGES[name]
    idx = tokens(T=7)
    past = theirs(idx).past_key_values  # config.use_cache, as for Llama
    change(past)
    before = expected(idx)
    assert past.get_seq_length() == before.shape[1]
    new = tokens(len(before), T=5, seed=1)
    logits = theirs(new, past_key_values=past).logits
    whole = theirs(torch.cat([before, new], dim=1), use_cache=False)
    assert whole.past_key_values is None
    torch.testing.assert_close(logits, whole.logits[:, -5:], atol=1e-4, rtol=1e-4)


def test_with_a_cache_gradients_are_right_or_missing_never_wrong(theirs):
    idx = tokens()
    (expected,) = torch.autograd.grad(
        theirs(idx, labels=idx, use_cache=False).loss, theirs.model.lm_head.weight
    )
    made = theirs(idx[:, :20], labels=idx[:, :20])
    assert made.past_key_values is not None
    made = theirs(idx, labels=idx, use_cache=True)
    (gradient,) = torch.autograd.grad(made.loss, theirs.model.lm_head.weight)
    assert torch.equal(gradient, expected)
    past = theirs(idx[:, :5]).past_key_values
    assert not theirs(idx[:, 5:], past_key_values=past).logits.requires_grad


def test_logits_and_outputs_come_in_the_forms_that_llama_gives(theirs):
    idx = tokens()
    whole = theirs(idx, use_cache=False).logits
    for keep, rows in ((2, [-2, -1]), (torch.tensor([0, 5]), [0, 5]), (1, [-1])):
        torch.testing.assert_close(theirs(idx, logits_to_keep=keep).logits, whole[:, rows])
    assert torch.equal(theirs(idx, return_dict=False)[0], whole)
    loss, logits, past = theirs(idx, labels=idx, return_dict=False)
    assert torch.equal(logits, whole) and past.get_seq_length() == 24


# --- refused, not ignored ------------------------------------------------------------------------


def foreign_cache():
    cache = DynamicCache()
    cache.update(torch.ones(2, 4, 3, 8), torch.ones(2, 4, 3, 8), 0)
    return cache


REFUSED = [
    ('padding on the left', dict(attention_mask=torch.tensor([[0] + [1] * 6, [1] * 7]))),
    ('attention_mask', dict(attention_mask=torch.ones(2, 1, 7, 7).tril())),
    ('DynamicCache', dict(past_key_values=foreign_cache())),
    ('not both', dict(past_key_values=DynamicCache(), cache=DynamicCache())),
    ('output_hidden_states', dict(output_hidden_states=True)),
    ('is_causal', dict(is_causal=False)),
    ('inputs_embeds', dict(inputs_embeds=torch.ones(2, 7, 32))),
    ('cu_seq_lens_q', dict(cu_seq_lens_q=torch.tensor([0, 3, 7]))),
    ('position_ids', dict(cache_position=torch.arange(1, 8))),
    ('position_ids', dict(position_ids=torch.arange(5, 12)[None])),
]


def test_what_the_model_does_not_compute_is_refused_not_ignored(svformer):
    model, theirs, folder = svformer
    for word, options in REFUSED:
        with raises_one_line(word):
            theirs(tokens(T=7), **options)
    with raises_one_line('StaticCache'):
        theirs.generate(tokens(T=7), cache_implementation='static', **GREEDY)
    with raises_one_line('vocab_size=260'):
        theirs.resize_token_embeddings(300)
    with pytest.raises(ValueError, match='checkpointing'):
        theirs.gradient_checkpointing_enable()
    with raises_one_line('output_hidden_states'):
        load_remote(folder, output_hidden_states=True)(tokens(T=7))

    # The model is as it was, and so is a cache with which something was refused.
    past = theirs(tokens(T=5), position_ids=torch.arange(5)[None]).past_key_values
    for options in (dict(position_ids=torch.tensor([[0]])), dict(output_attentions=True)):
        with raises_one_line():
            theirs(tokens(T=1), past_key_values=past, **options)
    assert past.get_seq_length() == 5
    theirs(tokens(T=1), past_key_values=past, position_ids=torch.tensor([[5]]))
    assert_same_model(theirs.model, model)


@torch.no_grad()
def test_a_batch_padded_on_the_right_is_scored_and_not_continued(pair):
    _, theirs = pair
    idx = tokens(T=7)
    mask = torch.tensor([[1] * 4 + [0] * 3, [1] * 7])
    padded = theirs(idx, attention_mask=mask).logits
    torch.testing.assert_close(padded[:1, :4], theirs(idx[:1, :4]).logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded[1:], theirs(idx[1:]).logits, atol=1e-5, rtol=1e-5)
    for use_cache in (True, False):
        with raises_one_line('behind the padding'):
            theirs.generate(idx, attention_mask=mask, **GREEDY, use_cache=use_cache)


def test_a_cache_in_training_is_refused_as_it_keeps_no_gradients(theirs):
    try:
        with raises_one_line('use_cache=False'):
            theirs.train()(tokens(), use_cache=True)
    finally:
        theirs.eval()


# --- loading -----------------------------------------------------------------------------------


def test_an_export_names_the_transformers_that_it_was_tried_with(theirs):
    assert f'transformers {transformers.__version__}' in theirs.config.tried_with


def test_a_gpt_is_made_without_memory_as_other_libraries_do_it():
    """They make each parameter again, from what it has for attributes."""
    model = ours(**CODE['the family'])
    with init_empty_weights():
        empty = GPT(model.config)
    assert {p.device.type for p in empty.parameters()} == {'meta'}
    for name, needs in model.needs.items():
        assert empty.needs[name].decay == needs.decay and empty.needs[name].rate == needs.rate
    empty.load_state_dict(model.state_dict(), assign=True)
    assert_same_model(empty, model)


def test_a_variant_loads_in_half_precision_with_exact_rope_tables(svformer):
    model, _, folder = svformer
    theirs = load_remote(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in theirs.parameters()} == {torch.bfloat16}
    assert torch.equal(theirs.model.cos, model.cos) and torch.equal(theirs.model.sin, model.sin)
    made = theirs.generate(tokens(T=7), return_dict_in_generate=True, **GREEDY)
    expected = model.new_cache(2, 18, dtype=torch.bfloat16)
    assert made.past_key_values.layers[0].cache.nbytes == expected.nbytes
