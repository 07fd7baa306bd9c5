"""
evaluate.py tasks: log-likelihoods against a slow loop, scores against lm-evaluation-harness's own
wrapper of transformers' Llama, and the table.
"""

import functools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import byte_runs
import numpy as np
import pytest
import task_items
import torch
from byte_runs import RESFORMER, random_model
from programs import BYTES, small_bpe, table
from programs import program as call_program
from task_items import ITEMS, PUBLISHED, needs_published, publish, set_whole

import evaluate
import tasks
from hub.convert import export
from machine import Machine
from rundir import load_run

harness = task_items.harness
published = task_items.published
program = functools.partial(call_program, evaluate.main, 'tasks')


trained = byte_runs.trained
run = byte_runs.run


# --- log-likelihoods -----------------------------------------------------------------------------


def make_lm(model, batch_size, encoder=BYTES):
    settings = evaluate.TasksConfig(batch_size=batch_size)
    return evaluate.make_lm(model, encoder, settings, Machine('cpu'))


@torch.no_grad()
def slow_loglikelihood(model, context, continuation):
    """(log-probability, whether each token is the likeliest): one token after the other.

    Each is predicted from the text before it, of which the model sees the last block_size tokens of
    the whole.
    """
    text = (context + continuation)[-model.config.block_size - 1 :]
    total, is_greedy = 0.0, True
    for end in range(max(1, len(text) - len(continuation)), len(text)):
        logits = model(torch.tensor([text[:end]]))[0][0, -1, :257].double()
        total += logits.log_softmax(dim=0)[text[end]].item()
        if logits.argmax().item() != text[end]:
            is_greedy = False
    return total, is_greedy


@torch.no_grad()
def likeliest(model, context, count):
    """The `count` tokens that continue a context greedily."""
    text = list(context)
    for _ in range(count):
        logits = model(torch.tensor([text]))[0][0, -1, :257]
        text.append(logits.argmax().item())
    return text[len(context) :]


@pytest.fixture(scope='module')
def padded():
    """A model of 20 positions that finds the ids of the padding likelier than any other."""
    model = random_model(block_size=20)
    with torch.no_grad():
        model.lm_head.weight[257:] = 2 * model.lm_head.weight[:15]

    logits = model(torch.arange(20)[None])[0]
    assert (logits.argmax(dim=-1) >= 257).float().mean() > 0.2
    return model


@pytest.fixture(scope='module')
def requests(padded):
    """[(context, continuation)] in no order, some of them twice.

    Contexts and continuations of every length about block_size, none too, and likeliest
    continuations, also with one token changed and after another context.
    """
    rng = random.Random(0)

    def ids(count):
        return [rng.randrange(257) for _ in range(count)]

    pairs = []
    for context in (1, 2, 7, 19, 20, 21, 50):
        for count in (0, 1, 2, 13, 19, 20, 21, 22, 40):
            pairs.append((ids(context), ids(count)))
    for context, count in ((1, 1), (1, 19), (5, 4), (12, 8), (19, 1)):
        text = ids(context)
        best = likeliest(padded, text, count)
        other_end = [*best[:-1], (best[-1] + 1) % 257]
        other_start = [(text[0] + 1) % 257, *text[1:]]
        pairs += [(text, best), (text, other_end), (other_start, best)]
    pairs += pairs[::9]
    rng.shuffle(pairs)
    return pairs


@pytest.mark.parametrize('batch_size', [1, 3, 64, 500])
def test_loglikelihoods_are_those_of_a_slow_loop_in_any_batch(
    harness, padded, requests, batch_size
):
    lm = make_lm(padded, batch_size)
    answers = lm._loglikelihood_tokens([(None, *pair) for pair in requests], disable_tqdm=True)
    expected = [slow_loglikelihood(padded, *pair) for pair in requests]
    values = [value for value, _ in answers]
    assert values == pytest.approx([value for value, _ in expected], abs=1e-3)

    greedy = [is_greedy for _, is_greedy in answers]
    assert greedy == [is_greedy for _, is_greedy in expected]

    has_continuation = [bool(continuation) for _, continuation in requests]
    of_some = {answer for answer, some in zip(greedy, has_continuation, strict=True) if some}
    assert of_some == {True, False}
    for answer, some in zip(answers, has_continuation, strict=True):
        assert some or answer == (0.0, True)


@pytest.mark.parametrize('batch_size', [1, 4])
def test_padding_to_few_lengths_changes_no_score(harness, monkeypatch, batch_size):
    """Nor at the limit of block_size, which is no multiple."""
    model = random_model(block_size=150)
    rng = random.Random(1)
    pairs = []
    for length in (2, 3, 63, 64, 65, 66, 100, 128, 129, 130, 149, 150, 151, 152, 300):
        text = [rng.randrange(257) for _ in range(length)]
        pairs.append((text[: length // 2], text[length // 2 :]))
    requests = [(None, *pair) for pair in pairs]
    lengths = []
    model.transformer.wte.register_forward_hook(lambda _, args, x: lengths.append(x.size(1)))

    scores = make_lm(model, batch_size)._loglikelihood_tokens(requests, disable_tqdm=True)
    assert set(lengths) == {64, 128, 150}
    monkeypatch.setattr(evaluate, 'PADDED_TO', 1)
    expected = make_lm(model, batch_size)._loglikelihood_tokens(requests, disable_tqdm=True)
    assert lengths[len(lengths) // 2 :] != lengths[: len(lengths) // 2]
    for (value, is_greedy), (wanted, is_best) in zip(scores, expected, strict=True):
        assert value == pytest.approx(wanted, abs=1e-4) and is_greedy == is_best


def test_texts_are_scored_after_their_context_or_the_end_of_a_text(harness, padded):
    # (context, continuation), and what of them the model sees: NFC, and never no context
    cases = [
        (('', 'abc'), ([256], b'abc')),
        (('ab', ' c'), (b'ab', b' c')),
        (('ab ', 'c'), (b'ab', b' c')),
        (('ab', ''), (b'ab', b'')),
        (('', 'né'), ([256], 'né'.encode())),
        (('x' * 30, ' né'), (b'x' * 30, ' né'.encode())),
        (('ab', ' c'), (b'ab', b' c')),
        (('a\u0301', ' e'), ('á'.encode(), b' e')),
    ]
    lm = make_lm(padded, 3)
    texts = [SimpleNamespace(args=text) for text, _ in cases]

    answers = lm.loglikelihood(texts, disable_tqdm=True)
    for answer, (_, pair) in zip(answers, cases, strict=True):
        value, is_greedy = slow_loglikelihood(padded, *map(list, pair))
        assert answer == (pytest.approx(value, abs=1e-4), is_greedy)
    assert lm.eot_token_id == 256


def test_no_request_has_no_answer(harness, padded):
    assert make_lm(padded, 3)._loglikelihood_tokens([], disable_tqdm=True) == []


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_log_probabilities_that_are_not_finite_are_refused_and_not_scored(harness, value):
    """The harness would take the first choice for the model's answer, and count accuracies."""
    model = random_model()
    with torch.no_grad():
        model.transformer.wte.weight[5] = value
    lm = make_lm(model, 2)
    sound = [(None, [1, 2], [3]), (None, [2], [3, 4])]

    assert len(lm._loglikelihood_tokens(sound, disable_tqdm=True)) == 2
    with pytest.raises(ValueError, match='not finite; try --dtype=float32'):
        lm._loglikelihood_tokens([*sound, (None, [1, 5], [3])], disable_tqdm=True)


# --- against the harness's own wrapper -----------------------------------------------------------


def synthetic(task, count):
    """Items of random words, whose contexts have 60 to 200 bytes and whose choices at most 40."""
    rng = random.Random(task)

    def words(least, most):
        lengths = [rng.randint(1, 9) for _ in range(rng.randint(least, most))]
        return ' '.join(''.join(rng.choices('etaoinshr', k=length)) for length in lengths)

    for _ in range(count):
        stem = words(10, 20)
        choices = [words(1, 4) for _ in range(4)]
        answer = rng.randrange(4)
        if task == 'hellaswag':
            yield task_items.hellaswag(words(1, 2), stem, choices, answer)
        elif task == 'winogrande':
            two = [words(1, 1), words(1, 1)]
            yield task_items.winogrande(stem, two, words(1, 4), str(answer % 2 + 1))
        elif task == 'piqa':
            yield task_items.piqa(stem, choices[:2], answer % 2)
        else:
            yield task_items.arc(stem, choices, 'ABCD', 'ABCD'[answer])


def lengths(samples):
    """(bytes of a context, of a continuation) of every choice."""
    result = []
    for answers in samples.values():
        for sample in answers:
            result += [tuple(len(text.encode()) for text in pair) for pair in sample['arguments']]
    return result


def assert_the_wrapper_agrees(run, folder, monkeypatch, data_dir, limit, block_size):
    """The export, scored by the harness's HFLM, has the same log-likelihood of every choice.

    And so the same scores. Returns the samples.
    """
    reason = "the harness's HFLM cannot be imported: pip install accelerate"
    huggingface = pytest.importorskip('lm_eval.models.huggingface', reason=reason)
    from lm_eval import simple_evaluate

    out = run(f'to export at {block_size}', vocab_size=257, block_size=block_size)
    model, encoder, _ = load_run(out)
    export(model, encoder, folder / 'export')
    (folder / 'rows').mkdir()
    local = tasks.harness_tasks(tasks.TASKS, str(data_dir), folder / 'rows')
    monkeypatch.setattr(evaluate, 'harness_tasks', lambda *_: local)

    settings = evaluate.TasksConfig(data_dir=str(data_dir), limit=limit)
    numbers, samples = evaluate.evaluate_tasks([out], settings, Machine('cpu'))
    scores = numbers['runs'][out]['tasks']

    export_folder = str(folder / 'export')
    wrapper = huggingface.HFLM(export_folder, device='cpu', dtype='float32', batch_size=64)
    assert wrapper.max_length == block_size
    manager = tasks.task_manager()
    theirs = simple_evaluate(wrapper, tasks=local, limit=limit, task_manager=manager)

    for task in tasks.TASKS:
        assert scores[task]['items'] == limit
        assert_same_answers(samples[out][task], theirs['samples'][task])
        for metric in ('acc', 'acc_stderr', 'acc_norm', 'acc_norm_stderr'):
            expected = theirs['results'][task].get(f'{metric},none')
            assert scores[task].get(metric) == expected, (task, metric)
        assert 0 < scores[task]['acc'] < 1
    return samples[out]


def assert_same_answers(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine['doc_id'] == other['doc_id'] and mine['arguments'] == other['arguments']
        for [(value, is_greedy)], [(expected, is_best)] in zip(
            mine['resps'], other['resps'], strict=True
        ):
            assert value == pytest.approx(expected, abs=1e-3), mine['arguments']
            assert is_greedy == is_best, mine['arguments']
        for metric in ('acc', 'acc_norm'):
            assert mine.get(metric) == other.get(metric), mine['arguments']


@needs_published
def test_the_published_sets_score_as_with_the_harnesss_own_wrapper(
    harness, run, tmp_path, monkeypatch
):
    samples = assert_the_wrapper_agrees(
        run, tmp_path, monkeypatch, PUBLISHED, limit=200, block_size=1024
    )
    assert max(map(sum, lengths(samples))) <= 1024  # whole


@pytest.mark.parametrize('block_size, is_cut', [(64, True), (512, False)])
def test_small_sets_score_as_with_the_harnesss_own_wrapper(
    harness, run, tmp_path, monkeypatch, block_size, is_cut
):
    data_dir = tmp_path / 'eval'
    for task in tasks.TASKS:
        publish(data_dir, task, list(synthetic(task, 20)))
        set_whole(monkeypatch, task, 20)

    samples = assert_the_wrapper_agrees(
        run, tmp_path, monkeypatch, data_dir, limit=20, block_size=block_size
    )
    assert all(continuation <= 64 for _, continuation in lengths(samples))  # HFLM asserts it
    too_long = [sum(pair) > block_size + 1 for pair in lengths(samples)]
    assert (np.mean(too_long) > 0.5) == is_cut


def test_a_token_across_the_boundary_is_scored_as_with_the_harnesss_own_wrapper(harness, tmp_path):
    """The text is encoded whole. Context and continuation apart would have other tokens."""
    reason = "the harness's HFLM cannot be imported: pip install accelerate"
    huggingface = pytest.importorskip('lm_eval.models.huggingface', reason=reason)
    encoder = small_bpe(tmp_path / 'tokenizer')
    texts = [('t', 'he theory'), ('the other t', 'hing'), ('the ', 'other'), ('the', ' other')]
    for context, continuation in texts[:3]:
        apart = [encoder.encode(context), encoder.encode(continuation)]
        assert encoder.encode(context + continuation).tolist() != np.concatenate(apart).tolist()

    model = random_model(vocab_size=encoder.n_vocab)
    export(model, encoder, tmp_path / 'export')
    wrapper = huggingface.HFLM(str(tmp_path / 'export'), device='cpu', dtype='float32')
    requests = [SimpleNamespace(args=text) for text in texts]
    expected = wrapper.loglikelihood(requests, disable_tqdm=True)
    answers = make_lm(model, 2, encoder).loglikelihood(requests, disable_tqdm=True)
    for (value, is_greedy), (theirs, is_best) in zip(answers, expected, strict=True):
        assert value == pytest.approx(theirs, abs=1e-4) and is_greedy == is_best


# --- the program and its table -------------------------------------------------------------------


def test_a_table_of_tasks_has_the_numbers_of_the_json(harness, run, published):
    outs = run('five'), run('six', **RESFORMER)
    words = [f'--out_dir={outs[0]}', outs[1], f'--data_dir={published}', '--limit=2']
    words += ['--tasks=piqa,winogrande', '--out=tasks.json', '--device=cpu']
    status, out, _ = program(*words)
    assert status == 0, status
    numbers = json.loads(Path('tasks.json').read_text(), parse_constant=pytest.fail)
    assert (numbers['limit'], numbers['data']) == (2, 'eval')
    assert str(published) not in json.dumps(numbers)

    head, _, *rows = table(out)
    assert head == ['', 'piqa', 'winogrande', 'average']
    assert rows[-1] == ['chance', '0.500', '0.500', '0.500']
    for i, name in enumerate(outs):
        report = numbers['runs'][name]
        scores = report['tasks']
        assert [score['items'] for score in scores.values()] == [2, 2]
        assert report['block_size'] == 32
        acc = [f'{score["acc"]:.3f} ± {score["acc_stderr"]:.3f}' for score in scores.values()]
        assert rows[2 * i] == [f'{name}, acc', *acc, f'{report["average"]:.3f}']
        piqa = scores['piqa']
        acc_norm = f'{piqa["acc_norm"]:.3f} ± {piqa["acc_norm_stderr"]:.3f}'
        assert rows[2 * i + 1] == [f'{name}, acc_norm', acc_norm, '', '']

    words = 'over items of one run, not over seeds'
    assert words in out and numbers['standard_errors'] == words


def test_the_folder_of_the_tasks_is_recorded_by_its_name(harness, run, published, monkeypatch):
    out = Path(run('by name')).resolve()
    monkeypatch.chdir(published)
    words = ['--data_dir=.', '--limit=1', '--tasks=piqa', '--out=../name.json']
    assert program(str(out), *words, '--device=cpu')[0] == 0
    assert json.loads(Path('../name.json').read_text())['data'] == 'eval'


def test_a_limit_of_one_item_has_scores_without_a_standard_error(harness, run, published):
    words = [f'--data_dir={published}', '--limit=1', '--tasks=piqa', '--out=one.json']
    status, out, _ = program(run('one item'), *words, '--device=cpu')
    assert status == 0, status

    report = json.loads(Path('one.json').read_text())['runs']['out/one item']
    score = report['tasks']['piqa']
    assert score['items'] == 1 and score['acc'] in (0.0, 1.0)
    assert score.get('acc_stderr') is None
    assert f'{score["acc"]:.3f}' in out


def test_texts_that_are_cut_are_counted_and_told(harness, run, tmp_path, monkeypatch):
    # The model reads 32 tokens and predicts one more. A context has 19 bytes, an answer a space.
    solutions = [['y' * 13, 'y' * 14], ['y' * 31, 'y' * 32]]
    assert len(b'Question: x\nAnswer: ') + 13 == 33
    items = {
        'openbookqa': ITEMS['openbookqa'],
        'piqa': [task_items.piqa('x', texts, 0) for texts in solutions],
    }
    for task, contents in items.items():
        publish(tmp_path / 'eval', task, contents)
        set_whole(monkeypatch, task, len(contents))

    words = [f'--data_dir={tmp_path}/eval', '--tasks=openbookqa,piqa', '--out=cut.json']
    status, out, _ = program(run('reader'), *words, '--device=cpu')
    assert status == 0, status
    scores = json.loads(Path('cut.json').read_text())['runs']['out/reader']['tasks']
    counts = {}
    for task, score in scores.items():
        counts[task] = [score[name] for name in ('choices', 'cut_choices', 'cut_answers')]
    assert counts == {'openbookqa': [12, 0, 0], 'piqa': [4, 3, 1]}

    (line,) = [line for line in out.splitlines() if 'Cut' in line]
    cuts = 'piqa 3 of 4 choices (1 in the answer itself)'
    assert line == f'Cut for out/reader to the last 32 tokens: {cuts}.'


def report_of(names):
    """A report of evaluate_tasks in which every task has the same scores."""
    scores = {}
    for name in names:
        chance = 0.5 if name in ('winogrande', 'piqa') else 0.25
        scores[name] = {'items': 100, 'chance': chance, 'acc': 0.3, 'acc_stderr': 0.01}
        scores[name] |= {'choices': 400, 'cut_choices': 0, 'cut_answers': 0}
        if name != 'winogrande':
            scores[name] |= {'acc_norm': 0.4, 'acc_norm_stderr': 0.02}
    return {'tasks': scores, 'average': 0.3, 'block_size': 2048}


def test_a_table_of_tasks_has_two_rows_per_run_and_one_of_chance(capsys):
    runs = {run: report_of(tasks.TASKS) for run in 'abcdef'}
    evaluate.print_tasks({'data': None, 'runs': runs})

    text = capsys.readouterr().out
    head, _, *rows = table(text)
    assert head == ['', *tasks.TASKS, 'average']
    names = [f'{run}, {metric}' for run in 'abcdef' for metric in ('acc', 'acc_norm')]
    assert [row[0] for row in rows] == [*names, 'chance']
    assert rows[0][1:] == ['0.300 ± 0.010'] * 6 + ['0.300']
    assert rows[1][1:] == ['0.400 ± 0.020'] * 2 + [''] + ['0.400 ± 0.020'] * 3 + ['']
    assert rows[-1][1:] == ['0.250', '0.250', '0.500', '0.250', '0.250', '0.500', '0.333']
    assert 'HellaSwag' not in text and 'Cut' not in text


def test_a_table_of_some_tasks_has_their_columns_in_the_order_of_the_report(capsys):
    evaluate.print_tasks({'data': 'hub', 'runs': {'a': report_of(('piqa', 'hellaswag'))}})
    text = capsys.readouterr().out
    head, _, *rows = table(text)
    assert head[1:3] == ['piqa', 'hellaswag']
    assert rows[-1][1:] == ['0.500', '0.250', '0.375']
    assert 'HellaSwag from a preprocessed file' in text  # of a folder with an odd name
