"""sample.py: text from runs and from Hugging Face folders, as a person sees it."""

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import programs
import pytest
import reference
import torch
from conftest import ROOT
from programs import BYTES, MALICE, Evil, assert_one_line, cut, ours, program, run_with, small_bpe
from runs import ENVIRONMENT, newest
from safetensors.torch import load_file
from variants import SV

import evaluate
import sample
from configurator import configure
from hub import convert
from hub.convert import export
from model import GPT, GPTConfig
from trained import load_run

trained = programs.trained


def sampled(out_dir, start, *flags, stdin=''):
    """sample.py at temperature 0: (exit status or message, stdout, stderr)."""
    words = f'--out_dir={out_dir}', f'--start={start}', '--temperature=0', '--device=cpu', *flags
    return program(sample.main, *words, stdin=stdin)


def parrot(says, after):
    """A gpt2 that continues any `after` tokens with the tokens `says`.

    The position alone decides on the next token.
    """
    shape = dict(block_size=32, n_embd=32, n_layer=1, n_head=1, vocab_size=260)
    model = GPT(GPTConfig(arch='gpt2', **shape)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wpe.weight.copy_(torch.eye(32))
        for position, token in enumerate(says, start=after - 1):
            model.lm_head.weight[token, position] += 1
    return model


SAYS = 'né 😀日本'
SCRIPT = [*SAYS.encode(), BYTES.eot, *b'more']


def until(eot, tokens):
    """The tokens before the first <|endoftext|>."""
    return tokens[: tokens.index(eot)] if eot in tokens else tokens


# --- a run ---------------------------------------------------------------------------------------


def test_one_sample_is_printed_as_it_comes_and_is_the_greedy_continuation(trained):
    model, _, _ = load_run(trained)
    out_dir = run_with(reference.perturb(model), trained, 'out/random')
    ids = torch.tensor([list(b'def ')])
    for new_tokens in (1, 20, 99):
        status, out, err = sampled(out_dir, 'def ', f'--max_new_tokens={new_tokens}')
        room = min(new_tokens, 32 - 4)
        made = model.generate(ids, room, temperature=0)[0, 4:].tolist()
        assert (status, out) == (0, 'def ' + BYTES.decode(until(BYTES.eot, made)) + '\n')
        cache = model.new_cache(1, 4 + room)
        assert re.fullmatch(rf'[\d,]+ tokens/s, cache {cache.nbytes:,} bytes .*\n', err), err


def test_the_text_appears_character_by_character_none_of_them_broken_and_ends_at_endoftext(
    trained, monkeypatch
):
    out_dir = run_with(parrot(SCRIPT, 3), trained, 'out/parrot')
    stream = GPT.stream
    screens = []  # what was on the screen each time that a token was made

    def watched(model, *args, **options):
        for new in stream(model, *args, **options):
            screens.append(sys.stdout.getvalue())
            yield new

    monkeypatch.setattr(GPT, 'stream', watched)
    status, out, err = sampled(out_dir, 'abc')
    assert (status, out) == (0, f'abc{SAYS}\n') and 'tokens/s' in err and 'bytes' in err
    raw = SAYS.encode()
    whole = [raw[:n].decode(errors='ignore') for n in range(len(raw) + 1)]
    assert screens == [f'abc{text}' for text in whole]  # and none beyond <|endoftext|>

    status, out, _ = sampled(out_dir, 'abc', '--num_samples=2')
    assert (status, out) == (0, '\n'.join((f'abc{SAYS}', '-' * 80, f'abc{SAYS}', '')))


def test_the_batch_goes_on_as_long_as_another_sample_needs_it():
    """At the token 0 a sample ends. The None would be an error: there is no step after the last end."""
    steps = ([[1], [2]], [[0], [3]], [[9], [4]], [[9], [0]])
    stream = [torch.tensor(tokens) for tokens in steps]
    *_, last = sample.grow([*stream, None], 2, eot=0)
    assert last == [[1], [2, 3, 4]]


NO_TEXT = [b'n\xc3', b'a\xffb\xc3\xa9', b'\xe2\x82x\xf0\x9f\x98', b'\xef\xbf\xbdx', b'\xff\xff']


@pytest.mark.parametrize('raw', NO_TEXT, ids=str)
def test_bytes_that_are_no_text_are_printed_as_decoded(trained, raw):
    out_dir = run_with(parrot([*raw, BYTES.eot], 1), trained, f'out/{raw!r}')
    status, out, _ = sampled(out_dir, 'a')
    assert (status, out) == (0, 'a' + raw.decode(errors='replace') + '\n')


def test_a_dash_reads_the_prompt_from_standard_input(trained):
    """As a process: the text passes through pipes. What it continues ends before echo's line break."""
    out_dir = run_with(parrot(SCRIPT, len('né'.encode())), trained, 'out/pipe')
    words = f'--out_dir={out_dir}', '--start=-', '--temperature=0', '--device=cpu'
    done = subprocess.run(
        [sys.executable, str(ROOT / 'sample.py'), *words],
        input='né\n'.encode(),
        capture_output=True,
        env={**ENVIRONMENT, 'PYTHONUTF8': '1'},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == f'né{SAYS}\n'
    assert done.stderr.count(b'\n') == 1 and b'tokens/s' in done.stderr


def test_characters_that_the_terminal_does_not_know_are_question_marks(trained, monkeypatch):
    out_dir = run_with(parrot(SCRIPT, 3), trained, 'out/ascii')
    terminal = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
    monkeypatch.setattr(sys, 'argv', ['sample.py', f'--out_dir={out_dir}', '--start=abc'])
    sys.argv += ['--temperature=0', '--device=cpu']
    monkeypatch.setattr(sys, 'stdout', terminal)
    sample.main()
    terminal.flush()
    assert terminal.buffer.getvalue() == b'abcn? ???\n'


@pytest.mark.parametrize(
    'text, prompt', [('a', 'a'), ('\na\n', '\na'), ('a\n\n', 'a\n'), ('\n', '')]
)
def test_a_prompt_from_elsewhere_loses_one_line_break_at_its_end(
    text, prompt, monkeypatch, tmp_path
):
    path = tmp_path / 'prompt.txt'
    monkeypatch.setattr(sys, 'stdin', io.StringIO(text))
    assert sample.read_prompt('-') == prompt
    for end in (b'\n', b'\r\n'):
        path.write_bytes(text.encode().replace(b'\n', end))
        assert sample.read_prompt(f'FILE:{path}') == prompt


@pytest.mark.parametrize(
    'typed, prompt',
    [
        (' a ', ' a '),
        ('5', '5'),
        ('None', 'None'),
        ('(1, 2)', '(1, 2)'),
        ('a\n', 'a\n'),
        ('"Hello", he', '"Hello", he'),
        # A Python string, so that a prompt can be spelled with its escapes.
        ('"Hello"', 'Hello'),
        (r'"a\nb"', 'a\nb'),
        ('\'"Hello"\'', '"Hello"'),
    ],
)
def test_a_prompt_on_the_command_line_is_as_typed_unless_it_is_a_python_string(typed, prompt):
    (settings,) = configure(sample.SampleConfig, argv=[f'--start={typed}'])
    assert sample.read_prompt(settings.start) == prompt


def test_without_a_prompt_a_document_begins(trained):
    out_dir = run_with(parrot(SCRIPT, 1), trained, 'out/empty')
    for start in ('', '-'):
        status, out, _ = sampled(out_dir, start)
        assert (status, out) == (0, SAYS + '\n')


def test_sample_continues_the_prompt_reproducibly(trained):
    words = [f'--out_dir={trained}', '--start=def f', '--max_new_tokens=10', '--num_samples=2']
    texts = []
    for seed in ('--seed=1', '--seed=1', '--seed=2'):
        status, out, _ = program(sample.main, *words, '--device=cpu', seed)
        assert status == 0, status
        texts.append(out)
    assert texts[0] == texts[1] and texts[0].count('def f') >= 2
    assert texts[2] != texts[0]


# --- a Hugging Face folder -----------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['gpt2', 'llama'])
def test_a_hugging_face_folder_is_sampled_with_its_own_tokenizer(kind, tmp_path):
    known = small_bpe(tmp_path / 'tokenizer')
    prompt = known.encode('the other').tolist()
    says = known.encode('né 😀日本').tolist()
    model = parrot([*says, known.eot], len(prompt)) if kind == 'gpt2' else ours()
    export(model, known, tmp_path / 'folder')
    status, out, err = sampled(tmp_path / 'folder', 'the other')
    assert status == 0, status

    room = model.config.block_size - len(prompt)
    made = model.generate(torch.tensor([prompt]), room, temperature=0)[0, len(prompt) :].tolist()
    assert out == 'the other' + known.decode(until(known.eot, made)) + '\n'
    assert kind == 'llama' or out == 'the otherné 😀日本\n'
    assert 'tokens/s' in err


@pytest.mark.parametrize('flags', [['--tokenizer=bytes'], []], ids=['bytes named', 'bytes found'])
def test_a_hugging_face_folder_of_bytes_is_sampled(flags, tmp_path):
    export(parrot(SCRIPT, 3), BYTES, tmp_path / 'folder')
    status, out, _ = sampled(tmp_path / 'folder', 'abc', *flags)
    assert (status, out) == (0, f'abc{SAYS}\n')


def test_a_hugging_face_folder_with_a_bin_file_is_sampled(tmp_path):
    folder = tmp_path / 'folder'
    export(parrot(SCRIPT, 3), small_bpe(tmp_path / 'tokenizer'), folder)
    weights = tmp_path / 'weights'
    (folder / 'model.safetensors').rename(weights)
    torch.save(load_file(weights), folder / 'pytorch_model.bin')
    status, out, _ = sampled(folder, 'abc', '--tokenizer=bytes')
    assert (status, out) == (0, f'abc{SAYS}\n')


def test_a_variants_folder_is_sampled_as_its_run(trained, tmp_path):
    model = ours(**SV)
    run = run_with(model, trained, 'out/svformer')
    export(model, BYTES, tmp_path / 'folder')
    status, out, _ = sampled(tmp_path / 'folder', 'abc')
    assert status == 0 and len(out) > len('abc\n')
    assert out == sampled(run, 'abc')[1]


# --- refused -------------------------------------------------------------------------------------


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_in_one_line(trained, tmp_path):
    known = small_bpe(tmp_path / 'tokenizer')
    export(ours(vocab_size=known.n_vocab - 1), known, tmp_path / 'folder')
    run = run_with(ours(vocab_size=256), trained, 'out/few-ids')
    for folder, ids in ((tmp_path / 'folder', known.n_vocab), (run, 257)):
        status, _, _ = sampled(folder, 'the')
        assert_one_line(status, folder, f'{ids} ids', ids - 1)


def test_a_damaged_or_unsafe_checkpoint_is_refused_though_an_older_one_lies_beside_it(
    trained, tmp_path
):
    """An older one is for resuming: its text, export or scores would pass for those of the newest."""
    folder, to, marker = (tmp_path / name for name in ('run', 'to', 'marker'))
    calls = (
        (sample.main, f'--out_dir={folder}', '--device=cpu'),
        (convert.main, 'export', f'--out_dir={folder}', f'--to={to}'),
        (evaluate.main, 'loss', f'--out_dir={folder}', '--device=cpu'),
    )
    for damage in ('truncated', 'unsafe'):
        shutil.copytree(trained, folder, dirs_exist_ok=True)
        path = folder / 'ckpt_2.pt'
        shutil.copy(path, folder / 'ckpt_1.pt')
        if damage == 'truncated':
            cut(path, 0.7)
        else:
            MALICE['torch file'](Evil(marker), path)
        for main, *words in calls:
            assert_one_line(program(main, *words)[0], path, 'damaged')

    shutil.rmtree(folder)
    assert_one_line(program(sample.main, *calls[0][1:])[0], folder)
    assert not marker.exists() and not to.exists()


def test_a_runs_missing_dataset_is_named_and_not_looked_for_on_the_hub(trained, monkeypatch):
    def ask(*args):
        pytest.fail('asked the hub')

    monkeypatch.setattr('huggingface_hub.hf_hub_download', ask)
    run = run_with(ours(), trained, 'out/elsewhere')
    checkpoint = newest(run)
    checkpoint['settings']['dataset'] = 'gone'
    checkpoint['data']['tokenizer'] = {'name': 'gpt2', 'sha256': '0' * 64}
    torch.save(checkpoint, f'{run}/ckpt.pt')
    status, _, _ = sampled(run, '')
    assert_one_line(status, 'data/gone', run)


def test_another_tokenizer_than_the_runs_is_refused_with_its_place(trained, tmp_path):
    run = run_with(ours(), trained, 'out/of-gpt2')
    checkpoint = newest(run)
    checkpoint['data']['tokenizer'] = {'name': 'gpt2', 'sha256': '0' * 64}
    torch.save(checkpoint, f'{run}/ckpt.pt')

    refusal = f'error: {run} was trained with another tokenizer than'
    folder = tmp_path / 'tokenizer'
    path = small_bpe(folder).path
    status, _, _ = sampled(run, '', f'--tokenizer={folder}')
    assert status == f'{refusal} {path}: both are gpt2, but the files differ'
    status, _, _ = sampled(run, '', '--tokenizer=bytes')
    assert status == f'{refusal} bytes'
    status, _, _ = sampled(trained, '', f'--tokenizer={folder}')
    assert status == f'error: {trained} was trained with another tokenizer than {path}'


@pytest.mark.parametrize(
    'word, message',
    [
        ('--out_dir=out/nothing', 'out/nothing'),
        ('--start=FILE:none.txt', 'none.txt'),
        ('--start=FILE:latin.txt', 'latin.txt is not a text file'),
        ('--device=gpu', "device='gpu'"),
        ('--tokenizer=none.json', 'none.json'),
        ('--num_samples=0', 'num_samples'),
    ],
)
def test_sample_refuses_bad_input_in_one_line(trained, word, message):
    Path('latin.txt').write_bytes('né'.encode('latin-1'))
    status, out, _ = program(sample.main, f'--out_dir={trained}', '--device=cpu', word)
    assert_one_line(status, message)
    assert out == ''


@pytest.mark.parametrize('method', ['new_cache', 'forward'])
def test_running_out_of_memory_is_one_line_with_advice(trained, monkeypatch, method):
    def run_out(*args, **options):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 8 GiB.\nmore lines')

    monkeypatch.setattr(GPT, method, run_out)
    status, _, _ = sampled(trained, 'abc')
    assert_one_line(status, 'CUDA out of memory', '--num_samples')


def test_a_model_of_weights_that_are_not_finite_is_one_line(trained):
    model = ours()
    with torch.no_grad():
        model.lm_head.weight.fill_(float('nan'))
    status, _, _ = sampled(run_with(model, trained, 'out/nan'), 'abc')
    assert_one_line(status, 'logits are not finite')


@pytest.mark.parametrize('flag', ['--top_p=0.0', '--top_p=1.5', '--top_k=-1', '--temperature=-1'])
def test_a_way_to_sample_that_makes_no_sense_is_one_line_before_any_text(trained, flag):
    words = f'--out_dir={trained}', '--start=abc', '--device=cpu', flag
    status, out, _ = program(sample.main, *words)
    assert_one_line(status, flag[2:])
    assert out == ''


def test_a_prompt_without_room_for_a_token_is_refused_in_one_line(trained):
    for prompt in ('x' * 32, 'x' * 500):
        status, out, _ = sampled(trained, prompt)
        assert_one_line(status, len(prompt), 32)
        assert out == ''
    status, out, _ = sampled(trained, 'x' * 31)
    assert status == 0 and out.startswith('x' * 31)
