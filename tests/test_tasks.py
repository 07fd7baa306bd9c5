"""
evaluate.py tasks: what is asked of each item, log-likelihoods against a slow loop, scores against
lm-evaluation-harness's own wrapper of transformers' Llama, the table, and damaged files.
"""

import functools
import json
import random
import sys
from pathlib import Path

import byte_runs
import pytest
import task_items
import torch
from byte_runs import RESFORMER, random_model
from programs import BYTES, assert_one_line, table
from programs import program as call_program
from task_items import ITEMS, PUBLISHED, needs_published

import evaluate
from hub.convert import export
from lib import tasks
from lib.machine import Machine

harness = task_items.harness
published = task_items.published
program = functools.partial(call_program, evaluate.main, 'tasks')

trained = byte_runs.trained
run = byte_runs.run


# --- what is asked, and what counts as right -----------------------------------------------------


def make_lm(model, batch_size=32):
    settings = evaluate.TasksConfig(batch_size=batch_size)
    return evaluate.make_lm(model, BYTES, settings, Machine('cpu'))


def scored(lm, block_size, data_dir, names=tasks.TASKS, limit=0):
    """({task: its scores}, the harness's output) of an LM."""
    output = tasks.harness(names, str(data_dir), limit)(lm)
    return {name: evaluate.task_scores(output, name, lm, block_size) for name in names}, output


def judged(data_dir, items, limit=0):
    """scored() of a judge who finds the right continuation of each item, and no other, likely.

    items: {task: [(item, pairs, index of the right pair)]}
    """
    right = {choices[index] for expected in items.values() for _, choices, index in expected}
    judge = make_lm(random_model())
    judge.loglikelihood = lambda requests: [(float(r.args in right), False) for r in requests]
    return scored(judge, 32, data_dir, list(items), limit)


def test_items_are_asked_and_scored_by_the_harnesss_definitions(harness, published):
    scores, output = judged(published, ITEMS)
    assert list(scores) == list(tasks.TASKS)
    for task, expected in ITEMS.items():
        answers = sorted(output['samples'][task], key=lambda sample: sample['doc_id'])
        arguments = [[tuple(pair) for pair in sample['arguments']] for sample in answers]
        assert arguments == [choices for _, choices, _ in expected]
        score = scores[task]
        assert score['acc'] == 1.0 and score['items'] == len(expected)
        assert score.get('acc_norm') == (None if task == 'winogrande' else 1.0)
    chances = [score['chance'] for score in scores.values()]
    assert chances == pytest.approx([0.25, 0.25, 0.5, (1 / 3 + 1 / 4 + 1 / 5) / 3, 0.25, 0.5])


def test_wrong_answers_are_counted_and_a_limit_takes_the_first_items(harness, published):
    """The judge takes the other solution of the last two items for right."""
    first, *others = ITEMS['piqa']
    wrong = [first, *((item, choices, 1 - label) for item, choices, label in others)]
    for limit, items in ((0, 3), (2, 2), (1, 1)):
        scores, output = judged(published, {'piqa': wrong}, limit)
        assert [sample['doc_id'] for sample in output['samples']['piqa']] == list(range(items))
        score = scores['piqa']
        assert score['items'] == items and score['acc'] == pytest.approx(1 / items)
        assert ('acc_stderr' in score) == (items > 1)


@needs_published
@pytest.mark.parametrize('task', tasks.TASKS)
def test_the_published_sets_are_read_whole(task):
    assert len(tasks.read_items(task, PUBLISHED)) == tasks.PUBLISHED[task][1]


# --- log-likelihoods -----------------------------------------------------------------------------


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
        is_greedy = is_greedy and logits.argmax().item() == text[end]
    return pytest.approx(total, abs=1e-3), is_greedy


@pytest.mark.parametrize('batch_size', [3, 500])
def test_loglikelihoods_are_those_of_a_slow_loop_in_any_batch(harness, batch_size):
    """Contexts and answers of every length about block_size, in no order, some greedy; the ids of the
    padding are likelier than any other."""
    model = random_model(block_size=20)
    with torch.no_grad():
        model.lm_head.weight[257:] = 2 * model.lm_head.weight[:15]
    rng = random.Random(0)
    pairs = []
    for context in (1, 7, 19, 20, 21, 50):
        for count in (1, 2, 13, 19, 20, 21, 40):
            text = rng.choices(range(257), k=context + count)
            pairs.append((text[:context], text[context:]))
    for context, _ in pairs[::5]:
        logits = model(torch.tensor([context[-20:]]))[0][0, -1, :257]
        pairs.append((context, [logits.argmax().item()]))
    rng.shuffle(pairs)

    lm = make_lm(model, batch_size)
    answers = lm._loglikelihood_tokens([(None, *pair) for pair in pairs], disable_tqdm=True)
    assert answers == [slow_loglikelihood(model, *pair) for pair in pairs]
    assert {is_greedy for _, is_greedy in answers} == {True, False}


def test_log_probabilities_that_are_not_finite_are_refused_and_not_scored(harness):
    """The harness would take the first choice for the model's answer, and count accuracies."""
    model = random_model()
    with torch.no_grad():
        model.transformer.wte.weight[5] = torch.nan
    lm = make_lm(model, 2)
    sound = [(None, [1, 2], [3]), (None, [2], [3, 4])]
    assert len(lm._loglikelihood_tokens(sound, disable_tqdm=True)) == 2
    with pytest.raises(ValueError, match='not finite'):
        lm._loglikelihood_tokens([*sound, (None, [1, 5], [3])], disable_tqdm=True)


@pytest.mark.parametrize('block_size', [32, 1024])
def test_texts_score_as_with_the_harnesss_own_wrapper(harness, published, tmp_path, block_size):
    """The export, scored by the harness's HFLM, has the same log-likelihood of every choice, and so the
    same scores. 32 positions cut some of the texts."""
    reason = "the harness's HFLM cannot be imported: pip install accelerate"
    huggingface = pytest.importorskip('lm_eval.models.huggingface', reason=reason)
    model = random_model(vocab_size=257, block_size=block_size)
    export(model, BYTES, tmp_path / 'export')
    scores, output = scored(make_lm(model), block_size, published)
    wrapper = huggingface.HFLM(str(tmp_path / 'export'), device='cpu', dtype='float32')
    theirs = tasks.harness(tasks.TASKS, str(published))(wrapper)
    for task in tasks.TASKS:
        for mine, other in zip(output['samples'][task], theirs['samples'][task], strict=True):
            assert mine['arguments'] == other['arguments']
            for [answer], [(value, is_best)] in zip(mine['resps'], other['resps'], strict=True):
                assert answer == (pytest.approx(value, abs=1e-3), is_best)
        for metric in ('acc', 'acc_stderr', 'acc_norm', 'acc_norm_stderr'):
            expected = theirs['results'][task].get(f'{metric},none')
            assert scores[task].get(metric) == expected, (task, metric)
    cuts = [score['cut_choices'] for score in scores.values()]
    assert any(cuts) == (block_size == 32) and not all(cuts)


# --- the program ---------------------------------------------------------------------------------


def test_the_table_has_the_numbers_of_the_json_and_cuts_are_told(harness, run, published):
    outs = run('five'), run('six', **RESFORMER)
    words = [str(outs[0]), outs[1], f'--data_dir={published}', '--limit=2']
    words += ['--tasks=piqa,winogrande', '--out=tasks.json', '--device=cpu']
    status, out, _ = program(*words)
    assert status == 0, status
    numbers = json.loads(Path('tasks.json').read_text(), parse_constant=pytest.fail)
    assert (numbers['limit'], numbers['data']) == (2, 'eval')
    assert str(published) not in json.dumps(numbers)
    errors = 'over items of one run, not over seeds'
    assert errors in out and numbers['standard_errors'] == errors

    head, _, *rows = table(out)
    metrics = [f'{name}, {metric}' for name in outs for metric in ('acc', 'acc_norm')]
    assert head == ['', *metrics, 'chance']
    reports = [numbers['runs'][name] for name in outs]
    for task, *row, chance in rows[:2]:
        cells = []
        for report in reports:
            score = report['tasks'][task]
            for metric in ('acc', 'acc_norm'):
                if metric in score:
                    cells.append(f'{score[metric]:.3f} ± {score[metric + "_stderr"]:.3f}')
                else:
                    cells.append('')
        assert row == cells and chance == '0.500'
    averages = [cell for report in reports for cell in (f'{report["average"]:.3f}', '')]
    assert rows[2] == ['average', *averages, '0.500']
    for name, report in zip(outs, reports, strict=True):
        (line,) = [line for line in out.splitlines() if line.startswith(f'{name} saw')]
        for task, score in report['tasks'].items():
            assert f"'{task}': {score['cut_choices']}" in line
        assert 'last 32 tokens' in line and report['tasks']['piqa']['cut_choices'] > 0


def test_a_mistake_is_one_line(harness, run, published, monkeypatch):
    words = [str(run('asked')), '--device=cpu', '--out=never.json']
    local = f'--data_dir={published}'
    assert_one_line(program(*words, local, '--tasks=piqa,pika')[0], 'pika', 'piqa')
    assert_one_line(program('out/none', local)[0], 'out/none')
    assert_one_line(program(*words, f'--data_dir={published}/none')[0], f'{published}/none')
    assert_one_line(program(*words, '--limit=-1')[0], 'limit=-1')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'lm_eval', None)
        assert_one_line(program(*words, local)[0], 'pip install lm_eval')
    monkeypatch.setenv('WORLD_SIZE', '2')  # every process would score everything
    assert_one_line(program(*words, local)[0], 'torchrun')
    assert not Path('never.json').exists()


# {the damage: (what becomes of a file's bytes, a word of the message)}; 3 items are whole.
DAMAGES = {
    'cut in a line': (lambda data: data[:-12], 'item 3'),
    'a line less': (lambda data: data[: data.rindex(b'\n', 0, -1)], '2 lines'),
    'gone': (None, ''),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_set_is_refused_in_one_line_that_names_it(published, damage):
    change, word = DAMAGES[damage]
    path = published / 'piqa/dev.jsonl'
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises((ValueError, OSError)) as error:
        tasks.read_items('piqa', published)
    message = str(error.value)
    assert '\n' not in message and str(path) in message and word in message, message


WRONG_ITEMS = [
    ('piqa', '0', '2'),
    ('winogrande', '"answer": "2"', '"answer": ""'),
    ('openbookqa', '"answerKey": "A"', '"answerKey": "Z"'),
    ('arc_easy', '"answerKey": "3"', '"answerKey": "E"'),
    ('hellaswag', '"label": "0"', '"label": 4'),
    ('hellaswag', '"endings"', '"ends"'),
]


@pytest.mark.parametrize('task, old, new', WRONG_ITEMS)
def test_an_item_without_a_right_answer_is_refused_by_file_and_item(published, task, old, new):
    path = published / task / tasks.PUBLISHED[task][0][-1]
    lines = path.read_text().splitlines()
    assert old in lines[1]
    lines[1] = lines[1].replace(old, new)
    path.write_text('\n'.join(lines) + '\n')
    with pytest.raises(ValueError) as error:
        tasks.read_items(task, published)
    message = str(error.value)
    assert str(path) in message and 'item 2' in message and '\n' not in message, message
