"""python -m hub.convert import: a checkpoint of transformers becomes an ordinary run, or is refused."""

import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import checkpoints
import pytest
import torch
from checkpoints import assert_equal_logits, edit, transformers, written
from conftest import assert_one_line, read_json, write_dataset, write_json
from programs import MALICE, Evil, described, program, small_bpe
from runs import NO_MODEL, evaluations, good, refused, succeed
from safetensors.torch import load_file, save_file

import evaluate
import sample
from hub import convert
from lib import tokenizer
from lib.machine import Machine
from lib.trained import load_run

quiet = checkpoints.quiet

LARGE_BASE = {'rope_type': 'default', 'rope_theta': 500000.0}
LLAMA3 = {
    'rope_type': 'llama3',
    'rope_theta': 500000.0,
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 16,
}
NARROW = dict(tie_word_embeddings=False, n_inner=40, layer_norm_epsilon=0.1)
CHECKPOINTS = {
    'Llama GQA': ('llama', dict(num_key_value_heads=2, rms_norm_eps=0.1)),
    'Llama MQA tied': ('llama', dict(num_key_value_heads=1, tie_word_embeddings=True)),
    'Llama with another base': ('llama', dict(rope_parameters=LARGE_BASE)),
    'Llama scaled as Llama 3': ('llama', dict(rope_parameters=LLAMA3)),
    'Mistral with a window': ('mistral', dict(sliding_window=16)),
    'Mistral with a wide window': ('mistral', dict(sliding_window=99)),
    'GPT-2': ('gpt2', {}),
    'GPT-2 untied, narrow, large epsilon': ('gpt2', NARROW),
}


@pytest.fixture(scope='module')
def bpe(work):
    """A tokenizer of GPT-2's kind, with 260 ids, and one that only pads."""
    path = small_bpe(work / 'bpe').path
    file = read_json(path)
    file['added_tokens'].append({**file['added_tokens'][0], 'content': '[PAD]', 'id': 260})
    write_json(path, file)
    return tokenizer.load(path)


def imported(source, name, *words):
    """The folder of a run, imported from the source."""
    succeed(convert.main, 'import', source, f'--to=out/{name}', *words)
    return f'out/{name}'


def greedy(run, prompt):
    """What sample.py prints."""
    words = f'--out_dir={run}', f'--start={prompt}', '--temperature=0', '--device=cpu'
    status, out, _ = program(sample.main, *words)
    assert status == 0, status
    return out.removesuffix('\n')


@pytest.mark.parametrize('name', CHECKPOINTS)
def test_an_import_has_the_logits_and_the_greedy_text_of_transformers(name, bpe):
    kind, changes = CHECKPOINTS[name]
    source = Path('from', name)
    model = written(source, kind, **changes)
    shutil.copy(bpe.path, source)
    run = imported(source, name)
    gpt, encoder, _ = load_run(run)
    T = gpt.config.block_size
    assert T == min(changes.get('sliding_window', 24), 24) and encoder.sha256 == bpe.sha256
    assert_equal_logits(gpt, model, T)
    tied = changes.get('tie_word_embeddings', kind == 'gpt2')
    assert tied == (gpt.lm_head.weight is gpt.transformer.wte.weight)

    ids = torch.tensor([bpe.encode('the other').tolist()])
    options = dict(do_sample=False, eos_token_id=bpe.eot, max_new_tokens=T - ids.shape[1])
    (made,) = model.generate(ids, **options).tolist()
    assert greedy(run, 'the other') == bpe.decode(made).removesuffix('<|endoftext|>')
    assert_one_line(program(sample.main, f'--out_dir={run}', '--start=[PAD]')[0], 'lacks')


def test_an_imported_run_is_evaluated_and_trained_further(bpe):
    write_dataset(Path('data/text'), **described(bpe))
    written(Path('from/tiny'), rope_parameters=LLAMA3)
    run = imported('from/tiny', 'tiny', '--tokenizer=bpe')
    out = succeed(evaluate.main, 'loss', run, '--dataset=text', '--device=cpu')
    assert 'tiny, imported ' in out
    loss = float(re.search(r'mean *\| *([\d.]+)', out)[1])
    assert_one_line(program(evaluate.main, 'loss', run, '--device=cpu')[0], run, '--dataset')

    start = dict(init_from=f'{run}/ckpt_0.pt', dataset='text', **NO_MODEL)
    good('out/further', **start, max_iters=1, warmup_iters=0, eval_interval=1, eval_iters=0)
    first, last = [entry['val']['mean'] for entry in evaluations('out/further')]
    assert first == pytest.approx(loss, abs=1e-4) and last < first

    refused(run, '--n_layer=3', '--rope_theta=500000.0', **start | dict(n_layer=2, rope_theta=1e4))
    refused(run, 'another tokenizer', 'data/tiny', **start | dict(dataset='tiny'))
    refused(run, 'imported', '--init_from', out_dir=run, init_from='resume', dataset='gone')
    refused('no checkpoint', 'from/tiny', 'hub.convert', init_from='from/tiny')


def test_a_tokenizer_of_another_kind_reads_and_writes_as_its_own_library(work):
    """Like Llama's: it marks spaces, drops the first one, and begins a text with a token. What its file
    says of other texts, that they end with a token and have 2, filled up to 4, is not said of a prompt."""
    hf = pytest.importorskip('tokenizers')
    theirs = hf.Tokenizer(hf.models.BPE(unk_token='<unk>'))
    theirs.pre_tokenizer, theirs.decoder = hf.pre_tokenizers.Metaspace(), hf.decoders.Metaspace()
    special = ['<unk>', '</s>', '<s>', '<|im_start|>']
    trainer = hf.trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    theirs.train_from_iterator(['the theory of the other thing that one has'], trainer)
    template = hf.processors.TemplateProcessing
    theirs.post_processor = template(single='<s> $A', special_tokens=[('<s>', 2)])
    ids, marked = (theirs.encode(text).ids for text in ('the thing', 'the<|im_start|>the'))
    assert (ids[0], marked[2]) == (2, 3)
    model, file = written(Path('from/other')), hf.Tokenizer.from_str(theirs.to_str())
    edit(Path('from/other'), eos_token_id=None)
    write_json('from/other/generation_config.json', {'eos_token_id': 1})
    file.post_processor = template('<s> $A </s>', special_tokens=[('<s>', 2), ('</s>', 1)])
    file.enable_truncation(2)
    file.enable_padding(length=4)
    file.save('from/other/tokenizer.json')
    run = imported('from/other', 'other')

    gpt, encoder, _ = load_run(run)
    assert encoder.encode('the thing').tolist() == ids and encoder.eot == 1
    assert sample.prompt_ids('the<|im_start|>the', encoder) == marked
    assert 3 not in encoder.encode('the<|im_start|>the')
    lm = evaluate.make_lm(gpt, encoder, evaluate.TasksConfig(), Machine('cpu'))
    assert lm._encode_pair('the', ' thing') == (ids[:2], ids[2:])  # (asked, scored)
    with torch.no_grad():  # no id beyond the tokenizer's
        model.lm_head.weight[encoder.n_vocab :] = 0
        options = dict(do_sample=False, max_new_tokens=24 - len(ids))
        (made,) = model.generate(torch.tensor([ids]), **options).tolist()
    expected = theirs.decode(made[: made.index(1)] if 1 in made else made, False)
    assert greedy(run, 'the thing') == expected.removeprefix('<s>').strip()

    convert.export(gpt, encoder, Path('back'))  # its end begins no text
    for name in ('config', 'tokenizer_config'):
        assert not [key for key in read_json(f'back/{name}.json') if 'bos' in key]


# --- refused -------------------------------------------------------------------------------------


def assert_refused(source, *words):
    """An import is one line with these words, and leaves nothing."""
    status, _, _ = program(convert.main, 'import', source, '--to=out/refused', '--tokenizer=bytes')
    assert_one_line(status, *words)
    assert not Path('out/refused').exists()
    assert 'weights_only' not in status  # torch's advice to try it without


YARN = dict(rope_parameters={'rope_type': 'yarn', 'factor': 4.0})
HALF_LLAMA3 = dict(rope_parameters={'rope_type': 'llama3', 'factor': 4.0})
NOT_COMPUTED = [
    ('llama', dict(model_type='qwen2'), ['qwen2', 'llama, mistral and gpt2']),
    ('llama', YARN, ["'yarn'"]),
    ('llama', HALF_LLAMA3, ['low_freq_factor']),
    ('llama', dict(hidden_size='32'), ['hidden_size', '32']),
    ('llama', dict(num_attention_heads=5), ['5']),
    ('llama', dict(attention_bias=True), ['q_proj.bias']),
    ('llama', dict(hidden_act='gelu'), ['hidden_act']),
    ('llama', dict(tie_word_embeddings=True), []),  # which its own head contradicts
    ('llama', dict(head_dim=16), ['q_proj']),
    ('mistral', dict(num_hidden_layers=2**70), ['num_hidden_layers', 'too large']),
    ('llama', dict(num_hidden_layers=4), ['model.layers.3']),
    ('gpt2', dict(scale_attn_weights=False), ['scale_attn_weights']),
    ('gpt2', dict(activation_function='relu'), ["'relu'"]),
    ('gpt2', dict(add_cross_attention=True), ['crossattention']),
    ('gpt2', dict(scale_attn_by_inverse_layer_idx=True), ['inverse_layer_idx']),
]


@pytest.mark.parametrize('kind, changes, words', NOT_COMPUTED, ids=str)
def test_what_gpt_does_not_compute_is_refused_by_its_name(kind, changes, words, work, tmp_path):
    written(tmp_path, kind)
    assert_refused(edit(tmp_path, **changes), tmp_path, *words)


@pytest.mark.parametrize('name', ['model.layers.2.mlp.up_proj.weight', 'model.norm.bias'])
def test_weights_that_are_not_the_models_are_refused_by_name(name, work, tmp_path):
    """transformers draws a weight that the file lacks, and leaves out one that the model lacks."""
    written(tmp_path)
    path = tmp_path / 'model.safetensors'
    state = load_file(path)
    if name in state:
        del state[name]
    else:
        state[name] = torch.ones(32)
    save_file(state, path, metadata={'format': 'pt'})
    assert_refused(tmp_path, tmp_path, name)


def test_what_transformers_cannot_read_is_one_line(work, tmp_path, monkeypatch):
    assert_refused(tmp_path, tmp_path)
    written(tmp_path)
    words = 'import', tmp_path, '--to=out/refused'
    assert_one_line(program(convert.main, *words)[0], tmp_path, '--tokenizer')
    error = OSError('a reason of the hub\nand more')
    fails = Mock(side_effect=error)
    monkeypatch.setattr(transformers.PretrainedConfig, 'get_config_dict', fails)
    assert_refused('some/where', 'some/where', 'a reason of the hub')
    monkeypatch.setitem(sys.modules, 'transformers', None)
    assert_refused(tmp_path, 'transformers', 'pip install')


@pytest.mark.parametrize('kind', MALICE)
def test_code_that_lies_beside_weights_is_not_run(kind, work, tmp_path):
    folder, marker = tmp_path / 'bin', tmp_path / 'marker'
    written(folder)
    names = {'AutoConfig': 'code.Config', 'AutoModelForCausalLM': 'code.Model'}
    edit(folder, auto_map=names)
    (folder / 'code.py').write_text(f'open({str(marker)!r}, "w")')
    (folder / 'model.safetensors').unlink()
    MALICE[kind](Evil(marker), folder / 'pytorch_model.bin')
    assert_refused(folder, folder)
    assert not marker.exists()
