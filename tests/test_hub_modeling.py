"""hub/modeling_nanoresformer.py: an exported variant does in transformers what it does here."""

import contextlib
import io

import checkpoints
import pytest
import torch
from checkpoints import assert_equal_logits, transformers
from conftest import ROOT
from programs import BYTES, ours, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from variants import CLA, GPT2, RES, SV

from hub.convert import export

quiet = checkpoints.quiet

GREEDY = dict(do_sample=False, eos_token_id=None)
LLAMA3 = dict(rope_scaling=(8.0, 1.0, 4.0, 16), rope_theta=500000.0)
LEARNED = dict(RES, residual_learned=True)
CODE = {
    'ResFormer': RES,
    'SVFormer': SV,
    'SVFormer GQA, scaled': dict(SV, n_kv_head=2, **LLAMA3),
    'CLA': CLA,
    'NeuTRENO': dict(neutreno=0.4, dropout=0.1),
    'DenseFormer, tied': dict(denseformer=True, tie_embeddings=True),
    'learned': LEARNED,
    'learned sparse': dict(LEARNED, residual_layers=(2,), residual_lambda=(2.0, 1.0)),
    'cross': dict(RES, residual_map='cross', residual_from='all'),
    'identity': dict(RES, residual_map='identity'),
    'shared queries': dict(share_q=True),
    'gpt2 ResFormer': dict(RES, **GPT2),
    'gpt2 GQA': dict(GPT2, n_kv_head=2),
}


def load_export(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def through(folder, model, **options):
    """A model as transformers loads its export."""
    export(model, BYTES, folder)
    return load_export(folder, **options)


@pytest.fixture(scope='module', params=CODE)
def pair(request, tmp_path_factory):
    """(our model, its export as transformers loads it)."""
    folder = tmp_path_factory.mktemp('variant')
    model = ours(**CODE[request.param])
    theirs, info = through(folder, model, output_loading_info=True)
    assert not any(info.values()), info
    assert theirs.config.model_type == 'nanoresformer'
    for path in (ROOT / 'model.py', ROOT / 'hub/modeling_nanoresformer.py'):
        assert (folder / path.name).read_bytes() == path.read_bytes()
    return model, theirs


def test_a_variant_goes_out_with_its_code_and_gives_the_same_logits(pair):
    model, theirs = pair
    assert not theirs.training
    assert_equal_logits(model, theirs, tolerance=1e-5)


@torch.no_grad()
def test_the_loss_of_labels_is_the_training_loss(pair):
    model, theirs = pair
    idx = tokens()
    labels = idx.clone()
    _, expected = model(idx[:, :-1], idx[:, 1:].contiguous())
    assert theirs(idx, labels=labels).loss == pytest.approx(expected.item(), abs=1e-5)

    labels[0, 5:9] = labels[1, :3] = -100  # transformers' mark for what does not count
    targets = torch.where(labels == -100, -1, labels)[:, 1:].contiguous()
    _, expected = model(idx[:, :-1], targets)
    assert theirs(input_ids=idx, labels=labels).loss == pytest.approx(expected.item(), abs=1e-5)


# --- generate() ----------------------------------------------------------------------------------


def test_greedy_generation_gives_the_same_tokens_and_allocates_the_same_cache(pair):
    model, theirs = pair
    idx = tokens(T=7)
    options = dict(attention_mask=torch.ones_like(idx), return_dict_in_generate=True)
    made = theirs.generate(idx, max_new_tokens=12, **GREEDY, **options)
    assert torch.equal(made.sequences, model.generate(idx, 12, temperature=0))

    # The last token is never fed in again.
    past = made.past_key_values
    assert past.cache.nbytes == model.new_cache(2, 7 + 12 - 1).nbytes
    assert int(past.cache.position) == past.get_seq_length() == 7 + 12 - 1
    uncached = theirs.generate(idx, max_new_tokens=12, **GREEDY, use_cache=False)
    assert torch.equal(made.sequences, uncached)


def test_beam_search_with_the_cache_equals_that_without(pair):
    _, theirs = pair
    idx = tokens(T=7)
    beams = dict(max_new_tokens=12, num_beams=3, num_return_sequences=2, **GREEDY)
    cached = theirs.generate(idx, use_cache=True, **beams)
    uncached = theirs.generate(idx, use_cache=False, **beams)
    assert torch.equal(cached, uncached)

    # The beams did go apart.
    greedy = theirs.generate(idx, max_new_tokens=12, **GREEDY)
    assert cached.shape == (4, 19) and not torch.equal(cached[::2], greedy)


def test_sampling_gives_as_many_sequences_as_asked_for(pair):
    _, theirs = pair
    idx = tokens(T=7)
    torch.manual_seed(0)
    options = dict(do_sample=True, top_k=0, temperature=2.0, eos_token_id=None)
    made = theirs.generate(idx, max_new_tokens=12, num_return_sequences=2, **options)

    assert torch.equal(made[:, :7], idx.repeat_interleave(2, dim=0))
    assert made.shape == (4, 19) and not torch.equal(made[0], made[1])


def test_generate_takes_an_empty_cache_of_transformers_and_its_own_of_an_earlier_call(pair):
    _, theirs = pair
    idx = tokens(T=7)
    expected = theirs.generate(idx, max_new_tokens=10, **GREEDY)
    earlier = theirs(idx[:, :4], use_cache=True).past_key_values

    for past in (DynamicCache(), earlier):
        made = theirs.generate(idx, past_key_values=past, max_new_tokens=10, **GREEDY)
        assert torch.equal(made, expected)


def test_what_the_exported_tokenizer_returns_can_be_given_to_generate(tmp_path):
    theirs = through(tmp_path, ours(**SV))
    encoder = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    encoded = encoder('né', return_tensors='pt')
    made = theirs.generate(**encoded, max_new_tokens=5, **GREEDY)

    idx = torch.tensor([list('né'.encode())])
    expected = theirs.model.generate(idx, 5, temperature=0)
    assert torch.equal(made, expected)


def test_candidates_that_generate_rejects_leave_the_cache(tmp_path):
    """Prompt lookup guesses tokens ahead, and takes back those that the model would not have said."""
    theirs = through(tmp_path, ours(**SV))
    idx = torch.tensor([[1, 2, 3, 1, 2, 3]])
    expected = theirs.generate(idx, max_new_tokens=10, **GREEDY)
    made = theirs.generate(idx, prompt_lookup_num_tokens=3, max_new_tokens=10, **GREEDY)
    assert torch.equal(made, expected)


# --- caches, positions and padding ---------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize('argument', [-3, 4])
def test_a_cache_is_cut_as_both_versions_of_transformers_ask_for_it(tmp_path, argument):
    """-3: 3 tokens fewer (transformers 5); 4: the first 4 stay (transformers 4)."""
    theirs = through(tmp_path, ours(**SV))
    idx = tokens(T=7)
    past = theirs(idx, use_cache=True).past_key_values
    past.crop(argument)
    assert past.get_seq_length() == 4
    continued = theirs(idx[:, 4:], past_key_values=past, use_cache=True).logits
    torch.testing.assert_close(continued, theirs(idx).logits[:, 4:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize('empty', [False, True], ids=['no cache', 'empty cache'])
def test_the_ordinary_decoding_loop_gives_the_logits_of_the_whole_text(pair, empty):
    _, theirs = pair
    idx = tokens()
    past = DynamicCache() if empty else None
    logits = []
    for chunk in idx.split((7, 1, 10, 1, 5), dim=1):
        made = theirs(chunk, past_key_values=past, use_cache=True)
        past = made.past_key_values
        logits.append(made.logits)

    whole = theirs(idx)
    assert (torch.cat(logits, dim=1) - whole.logits).abs().max() < 1e-4
    assert past.get_seq_length() == 24
    assert whole.past_key_values is None


def test_a_padding_mask_is_refused_not_ignored(pair):
    _, theirs = pair
    idx = tokens()
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, :3] = 0

    with pytest.raises(ValueError, match='padding'):
        theirs(idx, attention_mask=mask)
    with pytest.raises(ValueError, match='padding'):
        theirs.generate(idx[:, :7], attention_mask=mask[:, :7], max_new_tokens=2)


WRONG_POSITIONS = [
    torch.arange(5, 12)[None],
    torch.arange(7).flip(0)[None],
    torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2),
    torch.stack((torch.arange(7), torch.arange(1, 8))),
    torch.arange(8)[None],
]


def test_a_foreign_cache_and_positions_out_of_order_are_refused_not_ignored(pair):
    _, theirs = pair
    idx = tokens(T=7)
    foreign = DynamicCache()
    foreign.update(torch.ones(2, 4, 3, 8), torch.ones(2, 4, 3, 8), 0)
    for use_cache in (True, False):
        with pytest.raises(ValueError, match='DynamicCache'):
            theirs(idx, past_key_values=foreign, use_cache=use_cache)

    for wrong in WRONG_POSITIONS:
        with pytest.raises(ValueError, match='position_ids must be 0 to 6'):
            theirs(idx, position_ids=wrong)

    right = torch.arange(7)[None]
    past = theirs(idx, position_ids=right, use_cache=True).past_key_values
    new = idx[:, :1]
    with pytest.raises(ValueError, match='position_ids must be 7 to 7'):
        theirs(new, position_ids=torch.tensor([[0]]), past_key_values=past)
    theirs(new, position_ids=torch.tensor([[7]]), past_key_values=past)


def test_a_cache_in_training_is_refused_as_it_keeps_no_gradients(pair):
    _, theirs = pair
    try:
        with pytest.raises(ValueError, match='use_cache=False'):
            theirs.train()(tokens(), use_cache=True)
    finally:
        theirs.eval()


def test_svformers_exported_cache_is_smaller(tmp_path):
    sizes = {}
    for name, changes in (('ResFormer', RES), ('SVFormer', SV)):
        theirs = through(tmp_path / name, ours(**changes))
        options = dict(do_sample=False, return_dict_in_generate=True)
        made = theirs.generate(tokens(T=7), max_new_tokens=5, **options)
        sizes[name] = made.past_key_values.cache.nbytes
    assert sizes['SVFormer'] == sizes['ResFormer'] * 4 // 6  # 3 of keys and 1 of values; 3 of each


# --- loading, saving, training -------------------------------------------------------------------


def test_a_variant_loads_in_half_precision_with_exact_rope_tables(tmp_path):
    model = ours(**SV)
    theirs = through(tmp_path, model, dtype=torch.bfloat16)
    assert {p.dtype for p in theirs.parameters()} == {torch.bfloat16}
    assert torch.equal(theirs.model.cos, model.cos)
    assert torch.equal(theirs.model.sin, model.sin)

    options = dict(do_sample=False, return_dict_in_generate=True)
    made = theirs.generate(tokens(T=7), max_new_tokens=5, **options)
    expected = model.new_cache(2, 11, dtype=torch.bfloat16)
    assert made.past_key_values.cache.nbytes == expected.nbytes


def test_what_transformers_saves_of_a_variant_loads_again(tmp_path):
    model = ours(**SV, tie_embeddings=True)
    through(tmp_path / 'ours', model).save_pretrained(tmp_path / 'theirs')
    theirs = load_export(tmp_path / 'theirs')
    assert torch.equal(theirs(tokens()).logits, model(tokens())[0])


def test_trainers_gradient_accumulation_is_that_of_one_batch(tmp_path):
    pytest.importorskip('accelerate')
    export(ours(**SV), BYTES, tmp_path / 'export')
    rows = [dict(input_ids=row, labels=row) for row in tokens(8, 12, vocabulary=250)]
    norms = []
    for batch, accumulation in ((8, 1), (2, 4)):
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path / 'out'),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            learning_rate=1e-9,
            logging_steps=1,
            report_to=[],
            save_strategy='no',
            disable_tqdm=True,
            use_cpu=True,
        )
        model = load_export(tmp_path / 'export')
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        norms.append([trainer.state.log_history[0][key] for key in ('loss', 'grad_norm')])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
