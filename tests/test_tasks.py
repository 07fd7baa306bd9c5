"""
evaluate.py tasks: what is asked of each item, log-likelihoods against a slow loop, the table, and
damaged files.
"""

import functools
import json
import random
import statistics
import sys
from pathlib import Path

import byte_runs
import pytest
import torch
from byte_runs import RESFORMER, random_model
from conftest import SHARED, assert_one_line, raises_one_line, read_json
from programs import BYTES, table
from programs import program as call_program
from runs import succeed

import evaluate
from lib import tasks
from lib.machine import Machine

program = functools.partial(call_program, evaluate.main, 'tasks')

trained = byte_runs.trained
run = byte_runs.run

PUBLISHED = SHARED / 'eval'


@pytest.fixture(scope='module')
def harness():
    """lm-evaluation-harness, less slow: it compiles the same template once, and does not describe the
    machine."""
    reason = 'lm_eval is not installed: pip install -r requirements-dev.txt'
    pytest.importorskip('lm_eval', reason=reason)
    import lm_eval.evaluator
    import lm_eval.utils

    compiled = functools.cache(lm_eval.utils.env.from_string)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.evaluator, 'add_env_info', lambda results: None)
        patch.setattr(lm_eval.utils.env, 'from_string', compiled)
        yield


# --- items, as they were published ---------------------------------------------------------------

# An item is (its content, the (context, continuation) pairs to score, the index of the right one).


def pairs(context, *choices):
    return [(context, f' {choice}') for choice in choices]


def hellaswag(activity, context, endings, label, **halves):
    """halves: ctx_a and ctx_b, which a preprocessed file lacks."""
    item = {
        'ind': 0,
        'activity_label': activity,
        'ctx': context,
        **halves,
        'split': 'val',
        'label': label,
        'endings': endings,
    }
    if halves:
        context = f'{halves["ctx_a"]} {halves["ctx_b"].capitalize()}'
    return item, pairs(f'{activity}: {context}', *endings), int(label)


def question(stem, texts, labels, answer):
    choices = [{'text': text, 'label': label} for text, label in zip(texts, labels, strict=True)]
    return {'id': 'x', 'question': {'stem': stem, 'choices': choices}, 'answerKey': answer}


def openbookqa(stem, texts, answer):
    item = question(stem, texts, 'ABCD', answer)
    return item, pairs(stem, *texts), 'ABCD'.index(answer)


def arc(stem, texts, labels, answer):
    context = f'Question: {stem}\nAnswer:'
    return question(stem, texts, labels, answer), pairs(context, *texts), labels.index(answer)


def winogrande(before, options, after, answer):
    item = {'qID': 'x', 'sentence': f'{before} _ {after}', 'answer': answer}
    item['option1'], item['option2'] = options
    return item, [(f'{before} {option}', f' {after}') for option in options], '12'.index(answer)


def piqa(goal, solutions, label):
    item = {'id': 'x', 'goal': goal}
    item['sol1'], item['sol2'] = solutions
    return (item, label), pairs(f'Question: {goal}\nAnswer:', *solutions), label


ENDINGS = ['sings loudly.', "doesn't look.", 'adds flour.', 'leaves "now".']
ANIMALS = ['a bird', 'a cow', 'a fish', 'a tree']
BOX = "The cup isn't in the box as the"
ITEMS = {
    'hellaswag': [
        hellaswag(
            'Baking bread',
            'A woman kneads dough. she',
            ENDINGS,
            2,
            ctx_a='A woman kneads dough.',
            ctx_b='she',
        ),
        hellaswag('Surfing', 'Waves come. A man', ['paddles.', 'sits.', 'eats.', 'né 日本.'], '0'),
    ],
    'openbookqa': [
        openbookqa('Ice is', ['hot', 'cold', 'dry', 'loud'], 'B'),
    ],
    'winogrande': [
        winogrande('Ann beat Bea since', ['Ann', 'Bea'], 'was fast.', '1'),
        winogrande(BOX, ['cup', 'box'], 'is small.', '2'),
    ],
    'arc_challenge': [
        arc('Which melts?', ['ice', 'iron', 'oak'], 'ABC', 'C'),
        arc('Which burns?', ['ice', 'iron', 'oak', 'sea'], '1234', '3'),
        arc('Which?', list('vwxyz'), 'ABCDE', 'E'),
    ],
    'arc_easy': [
        arc('What flies?', ANIMALS, 'ABCD', 'A'),
        arc('What swims?', ANIMALS, '1234', '3'),
    ],
    'piqa': [
        piqa('boil "eggs"', ["don't use water", 'use water'], 1),
        piqa('dry', ['a towel ', 'rain, 3\\4 wet'], 0),
        piqa('café', ['tea', 'coffee'], 1),
    ],
}


def publish(folder, task, items):
    """Write a task's items as they are published."""
    folder = folder / task
    folder.mkdir(parents=True)
    (name, *labels), _ = tasks.PUBLISHED[task]
    contents = [item for item, _, _ in items]
    if labels:
        (folder / labels[0]).write_text(''.join(f'{label}\n' for _, label in contents))
        contents = [item for item, _ in contents]
    lines = [json.dumps(item, ensure_ascii=False) for item in contents]
    (folder / name).write_text('\n'.join(lines) + '\n')


@pytest.fixture
def published(tmp_path, monkeypatch):
    """The folder with all of ITEMS."""
    for task, items in ITEMS.items():
        publish(tmp_path / 'eval', task, items)
        names, _ = tasks.PUBLISHED[task]
        monkeypatch.setitem(tasks.PUBLISHED, task, (names, len(items)))
    return tmp_path / 'eval'


# --- what is asked, and what counts as right -----------------------------------------------------


def make_lm(model, batch_size=32):
    settings = evaluate.TasksConfig(batch_size=batch_size)
    return evaluate.make_lm(model, BYTES, settings, Machine('cpu'))


def test_items_are_asked_and_scored_by_the_harnesss_definitions(harness, published):
    """The judge finds the right continuation of each item, and no other, likely."""
    right = {choices[index] for expected in ITEMS.values() for _, choices, index in expected}
    judge = make_lm(random_model())
    judge.loglikelihood = lambda requests: [(float(r.args in right), False) for r in requests]
    output = tasks.harness(tasks.TASKS, str(published))(judge)
    scores = {task: evaluate.task_scores(output, task, judge, 32) for task in tasks.TASKS}
    for task, expected in ITEMS.items():
        answers = sorted(output['samples'][task], key=lambda sample: sample['doc_id'])
        arguments = [[tuple(pair) for pair in sample['arguments']] for sample in answers]
        assert arguments == [choices for _, choices, _ in expected]
        score = scores[task]
        assert score['acc'] == 1.0 and score['items'] == len(expected)
        assert score.get('acc_norm') == (None if task == 'winogrande' else 1.0)
    chances = [score['chance'] for score in scores.values()]
    assert chances == pytest.approx([0.25, 0.25, 0.5, (1 / 3 + 1 / 4 + 1 / 5) / 3, 0.25, 0.5])


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason='needs the published sets, ../shared/data/eval')
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
    texts = []
    for context in (1, 19, 20, 21):
        for count in (1, 2, 20, 21, 40):
            text = rng.choices(range(257), k=context + count)
            texts.append((text[:context], text[context:]))
    for context, _ in texts[::5]:
        logits = model(torch.tensor([context[-20:]]))[0][0, -1, :257]
        texts.append((context, [logits.argmax().item()]))
    rng.shuffle(texts)

    lm = make_lm(model, batch_size)
    answers = lm._loglikelihood_tokens([(None, *pair) for pair in texts], disable_tqdm=True)
    assert answers == [slow_loglikelihood(model, *pair) for pair in texts]
    assert {is_greedy for _, is_greedy in answers} == {True, False}


# --- the program ---------------------------------------------------------------------------------


def test_the_table_has_the_numbers_of_the_json_and_cuts_are_told(harness, run, published):
    name = run('asked', **RESFORMER)
    words = [name, f'--data_dir={published}', '--tasks=piqa,winogrande', '--out=tasks.json']
    out = succeed(evaluate.main, 'tasks', *words, '--device=cpu')
    numbers = read_json('tasks.json')
    assert str(published) not in json.dumps(numbers)
    errors = 'over items of one run, not over seeds'
    assert errors in out and numbers['standard_errors'] == errors

    report = numbers['runs'][name]
    assert report['data'] == 'eval'
    rows = [['', 'asked, acc', 'asked, acc_norm', 'chance']]
    for task, score in report['tasks'].items():
        cells = []
        for metric in ('acc', 'acc_norm')[: 1 if task == 'winogrande' else 2]:
            cells.append(f'{score[metric]:.3f} ± {score[f"{metric}_stderr"]:.3f}')
        rows.append([task, *cells, *[''] * (2 - len(cells)), '0.500'])
    average = statistics.fmean(score['acc'] for score in report['tasks'].values())
    rows.append(['average', f'{average:.3f}', '', '0.500'])
    head, _, *body = table(out)
    assert [head, *body] == rows
    assert 'asked: step 1 of 1.' in out
    cuts = {task: score['cut_choices'] for task, score in report['tasks'].items()}
    assert f'asked saw the last 32 tokens only of some choices: {cuts}' in out
    assert cuts['piqa'] > 0


def test_a_mistake_is_one_line(harness, run, published, monkeypatch):
    words = [str(run('to ask')), '--device=cpu', '--out=never.json']
    local = f'--data_dir={published}'
    assert_one_line(program(*words, local, '--tasks=piqa,pika')[0], 'pika', 'piqa')
    assert_one_line(program(*words, f'--data_dir={published}/none')[0], f'{published}/none')
    assert_one_line(program('--device=cpu', '--runs=()')[0], 'runs')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'lm_eval', None)
        assert_one_line(program(*words, local)[0], 'lm_eval', 'pip install')
    monkeypatch.setenv('RANK', '0')
    monkeypatch.setenv('WORLD_SIZE', '2')  # every process would score everything
    assert_one_line(program(*words, local)[0], 'torchrun')
    assert not Path('never.json').exists()


def in_line_2(old, new):
    def change(data):
        lines = data.splitlines(keepends=True)
        assert old in lines[1]
        lines[1] = lines[1].replace(old, new)
        return b''.join(lines)

    return change


def test_a_preprocessed_hellaswag_serves_where_the_published_one_is_missing(published):
    folder = published / 'hellaswag'
    before = tasks.read_items('hellaswag', published)
    (folder / 'hellaswag_val.jsonl').rename(folder / 'hellaswag_val_preprocessed.jsonl')
    assert tasks.read_items('hellaswag', published) == before


# {the damage: (a file, what becomes of its bytes, a word of the message)}; 3 items are whole.
DAMAGES = {
    'cut in a line': ('piqa/dev.jsonl', lambda data: data[:-12], 'item 3'),
    'a line less': ('piqa/dev.jsonl', lambda data: data[: data.rindex(b'\n', 0, -1)], '2 lines'),
    'no such solution': ('piqa/dev-labels.lst', in_line_2(b'0', b'2'), 'item 2'),
    'no such option': ('winogrande/dev.jsonl', in_line_2(b'"2"', b'""'), 'item 2'),
    'no such choice': (
        'arc_easy/ARC-Easy-Test.jsonl',
        in_line_2(b'"answerKey": "3"', b'"answerKey": "E"'),
        'item 2',
    ),
    'no endings': (
        'hellaswag/hellaswag_val.jsonl',
        in_line_2(b'"endings"', b'"ends"'),
        'item 2',
    ),
}


@pytest.mark.parametrize('name, change, word', DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_set_is_refused_in_one_line_that_names_it(published, name, change, word):
    path = published / name
    path.write_bytes(change(path.read_bytes()))
    with raises_one_line(path, word):
        tasks.read_items(path.parent.name, published)


def test_a_byte_order_mark_before_a_published_file_is_harmless(published):
    for name in tasks.TASKS:
        items = tasks.read_items(name, published)
        for path in (published / name).iterdir():
            path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes())
        assert tasks.read_items(name, published) == items
