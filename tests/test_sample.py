"""sample.py: text from runs, as a person sees it."""

import io
import math
import re
import shutil
import sys
from pathlib import Path

import programs
import pytest
import reference
import torch
from conftest import assert_one_line, raises_one_line
from programs import BYTES, MALICE, Evil, ours, program, run_with, small_bpe
from runs import newest, succeed

import compare
import evaluate
import sample
import train
from hub import convert
from lib.rundir import checkpoints
from lib.trained import load_run
from model import GPT, GPTConfig
from paper import analyze

trained = programs.trained


def sampled(out_dir, start, *flags):
    """sample.py at temperature 0: (exit status or message, stdout, stderr)."""
    words = f'--out_dir={out_dir}', f'--start={start}', '--temperature=0', '--device=cpu', *flags
    return program(sample.main, *words)


def said(*words):
    """What sample.py prints where nothing is wrong."""
    status, out, _ = sampled(*words)
    assert status == 0, status
    return out


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


# --- a run ---------------------------------------------------------------------------------------


def test_one_sample_is_the_greedy_continuation_and_the_cache_is_told(trained):
    model, _, _ = load_run(trained)
    out_dir = run_with(reference.perturb(model), trained, 'out/random')
    ids = torch.tensor([list(b'def ')])
    for new_tokens in (1, 99):
        status, out, err = sampled(out_dir, 'def ', f'--max_new_tokens={new_tokens}')
        room = min(new_tokens, 32 - 4)
        tokens = model.generate(ids, room, lambda logits: logits[:, :257].argmax(-1, keepdim=True))
        made = [*(token.item() for token in tokens), BYTES.eot]
        text = BYTES.decode(made[: made.index(BYTES.eot)])
        assert (status, out) == (0, f'def {text}\n')
        nbytes = model.new_cache(1, 4 + room).nbytes
        assert re.fullmatch(rf'[\d,]+ tokens/s, cache {nbytes:,} bytes .*\n', err), err


def test_the_text_appears_character_by_character_none_of_them_broken_and_ends_at_endoftext(
    trained, monkeypatch
):
    model = parrot(SCRIPT, 3)
    with torch.no_grad():  # the padding is likelier than any token
        model.lm_head.weight[257:] = 9 * model.lm_head.weight.sum(0)
    out_dir = run_with(model, trained, 'out/parrot')
    generate = GPT.generate
    screens = []  # what was on the screen each time that a token was made

    def watched(*args):
        for new in generate(*args):
            screens.append(sys.stdout.getvalue())
            yield new

    monkeypatch.setattr(GPT, 'generate', watched)
    assert said(out_dir, 'abc') == f'abc{SAYS}\n'
    raw = SAYS.encode()
    whole = ['abc' + raw[:n].decode(errors='ignore') for n in range(len(raw) + 1)]
    assert screens == ['', *whole[1:]]  # and none beyond <|endoftext|>


@pytest.mark.parametrize(
    'start, after, raw',
    [
        ('', 1, SCRIPT),  # a document begins
        ('<|endoftext|>', 1, SCRIPT),
        ('a<|endoftext|>bc', 4, SCRIPT),  # one token of four
        # bytes that are no text are printed as decoded
        ('a', 1, [*b'n\xc3', BYTES.eot]),
        ('a', 1, [*b'\xe2\x82x\xf0\x9f\x98', BYTES.eot]),
        ('a', 1, [*b'\xef\xbf\xbdx', BYTES.eot]),
    ],
    ids=str,
)
def test_a_prompt_is_followed_by_what_the_model_says_until_endoftext(trained, start, after, raw):
    out_dir = run_with(parrot(raw, after), trained, 'out/parrots')
    text = BYTES.decode(raw[: raw.index(BYTES.eot)])
    assert said(out_dir, start) == f'{start}{text}\n'


def test_characters_that_the_terminal_does_not_know_are_question_marks(trained, monkeypatch):
    out_dir = run_with(parrot(SCRIPT, 3), trained, 'out/ascii')
    screen = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
    monkeypatch.setattr(sys, 'stdout', screen)
    words = f'--out_dir={out_dir}', '--start=abc', '--temperature=0', '--device=cpu'
    monkeypatch.setattr(sys, 'argv', ['sample.py', *words])
    sample.main()
    screen.flush()
    assert screen.buffer.getvalue() == b'abcn? ???\n'


def test_the_likeliest_token_is_drawn_where_the_settings_leave_no_other(trained):
    """Also where top_p is 0 in single precision, and where logits divided by the temperature overflow."""
    greedy = said(trained, 'def ')
    for limit in ('top_k=1', 'top_p=1e-9', 'top_p=1e-50', 'temperature=1e-5', 'temperature=1e-40'):
        _, out, _ = program(
            sample.main, f'--out_dir={trained}', '--start=def ', '--device=cpu', f'--{limit}'
        )
        assert out == greedy


@pytest.mark.parametrize('limit', ['--top_k=0', '--top_k=50'])
def test_a_seed_says_what_is_sampled(trained, limit):
    words = [f'--out_dir={trained}', '--start=def f', '--max_new_tokens=10', limit]
    texts = []
    for seed in ('--seed=1', '--seed=1', '--seed=2'):
        texts.append(succeed(sample.main, *words, '--device=cpu', seed))
    assert texts[0] == texts[1] != texts[2]


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', MALICE)
def test_an_unsafe_checkpoint_and_code_among_runs_are_refused_by_every_program(
    trained, tmp_path, kind
):
    folder, to, marker = tmp_path / 'unsafe', tmp_path / 'to', tmp_path / 'marker'
    shutil.copytree(trained, folder)
    path, code = checkpoints(folder)[0], tmp_path / 'vanilla_notes.py'
    MALICE[kind](Evil(marker), path)
    code.write_text(f'open({str(marker)!r}, "w")')
    readers = (
        (convert.main, 'export', f'--to={to}'),
        (evaluate.main, 'loss', '--device=cpu'),
        (analyze.main, 'entropy', '--device=cpu'),
    )
    calls = [(*call, each) for call in readers for each in (path, code)]
    calls += [(sample.main, f'--out_dir={path}'), (compare.main, trained, code)]
    calls.append((train.main, '--dataset=bytes', '--device=cpu', f'--init_from={path}'))
    for main, *words in calls:
        status, _, _ = program(main, *words)
        assert_one_line(status, str(words[-1]).split('=')[-1])
        assert 'weights_only' not in status  # torch's advice to try it with False
    assert not marker.exists() and not to.exists()


def test_where_no_checkpoint_is_every_program_says_the_same_and_which_runs_are_near(trained):
    shutil.copytree(trained, 'out/compare/mine')
    Path('out/compare/empty').mkdir()
    for name, near in (('', 'mine)'), ('/nothing', 'mine)'), ('/empty', 'none)')):
        place = f'out/compare{name}'
        messages = {sampled(place, '')[0]}
        for mode in ('loss', 'tasks'):
            messages.add(program(evaluate.main, mode, place, '--device=cpu')[0])
        (message,) = messages
        assert_one_line(message, place, near)


def test_a_tokenizer_that_is_not_the_models_is_refused_in_one_line(trained, tmp_path):
    known = small_bpe(tmp_path / 'tokenizer')
    few = run_with(ours(vocab_size=256), trained, 'out/few-ids')
    assert_one_line(sampled(few, 'the')[0], 'bytes', 257, 256)

    foreign = run_with(ours(), trained, 'out/of-gpt2')
    checkpoint = newest(foreign)
    checkpoint['settings']['dataset'] = 'gone'
    checkpoint['data']['tokenizer'] = {'name': 'gpt2', 'sha256': '0' * 64}
    torch.save(checkpoint, checkpoints(foreign)[0])
    assert_one_line(
        sampled(foreign, '', f'--tokenizer={tmp_path}/tokenizer')[0], foreign, known.path
    )
    assert_one_line(sampled(foreign, '', '--tokenizer=bytes')[0], foreign, 'bytes')

    # Its name is not taken for that of a repository on the hub.
    assert_one_line(sampled(foreign, '')[0], 'data/gone/tokenizer.json', '--tokenizer')


def test_weights_that_are_not_finite_are_refused_where_a_model_is_loaded(trained):
    checkpoint = newest(trained)
    name = 'transformer.h.1.mlp.c_proj.weight'
    checkpoint['model'][name][0] = math.nan
    torch.save(checkpoint, 'out/broken.pt')
    with raises_one_line('out/broken.pt', name):
        load_run('out/broken.pt')


MISTAKES = [
    (['--tokenizer=none.json'], 'none.json'),
    (['--max_new_tokens=0'], 'max_new_tokens=0'),
    (['--temperature=-1'], 'temperature=-1'),
    (['--top_k=-1'], 'top_k=-1'),
    (['--top_p=0'], 'top_p=0'),
    (['--top_p=1.5'], 'top_p=1.5'),
    ([f'--start={"x" * 32}'], '32'),
    # Settings that do nothing.
    (['--temperature=0', '--top_p=0.5'], 'top_p'),
    (['--temperature=0', '--seed=1'], 'seed'),
]


@pytest.mark.parametrize('flags, word', MISTAKES, ids=str)
def test_a_mistake_is_one_line_before_any_text(trained, flags, word):
    words = f'--out_dir={trained}', '--start=abc', '--device=cpu', *flags
    status, out, _ = program(sample.main, *words)
    assert_one_line(status, word)
    assert out == ''


def test_a_model_that_overflows_and_too_little_memory_are_one_line(trained, monkeypatch):
    model = ours()
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    status, out, _ = sampled(run_with(model, trained, 'out/large'), 'abc')
    assert_one_line(status, 'not finite')
    assert out == ''

    def run_out(*args, **options):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 8 GiB.\nmore lines')

    monkeypatch.setattr(GPT, 'forward', run_out)
    assert_one_line(sampled(trained, 'abc')[0], 'CUDA out of memory', '--max_new_tokens')
