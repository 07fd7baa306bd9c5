"""tasks.py: what is asked of each item, against questions written out by hand, and damaged files."""

import collections
import functools
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import byte_runs
import numpy as np
import pytest
import task_items
from byte_runs import random_model
from programs import BYTES, assert_one_line
from programs import program as call_program
from task_items import ITEMS, PUBLISHED, needs_published, pairs, set_whole

import evaluate
import tasks
from machine import Machine

harness = task_items.harness
published = task_items.published
program = functools.partial(call_program, evaluate.main, 'tasks')


trained = byte_runs.trained
run = byte_runs.run


# --- what is asked, and what counts as right -----------------------------------------------------


def judged(data_dir, items, limit=0):
    """(report, samples) of a judge who finds the right continuation of each item, and no other, likely.

    items: {task: [(item, pairs, index of the right pair)]}
    """
    from lm_eval.api.model import LM

    right = set()
    for expected in items.values():
        right.update(choices[index] for _, choices, index in expected)

    class Judge(LM):
        lengths = collections.defaultdict(lambda: (1, 1))

        def loglikelihood(self, requests, disable_tqdm=False):
            return [(0.0 if request.args in right else -9.0, False) for request in requests]

        loglikelihood_rolling = generate_until = None

    settings = evaluate.TasksConfig(tasks=','.join(items), data_dir=str(data_dir), limit=limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, 'load_run', lambda *args: (random_model(), BYTES, None))
        patch.setattr(evaluate, 'make_lm', lambda *_: Judge())
        numbers, samples = evaluate.evaluate_tasks(['judge'], settings, Machine('cpu'))
    assert (numbers['limit'], numbers['data']) == (limit, data_dir.name)
    return numbers['runs']['judge'], samples['judge']


def assert_asked(report, samples, items):
    """Each item was asked as written here, and the right answer is the one that counts."""
    for task, expected in items.items():
        answers = sorted(samples[task], key=lambda sample: sample['doc_id'])
        arguments = [[tuple(pair) for pair in sample['arguments']] for sample in answers]
        assert arguments == [choices for _, choices, _ in expected]
        assert [sample['acc'] for sample in answers] == [1.0] * len(expected), task
        score = report['tasks'][task]
        assert score['acc'] == 1.0 and score['items'] == len(expected)
        assert score.get('acc_norm', 1.0) == 1.0
        assert ('acc_norm' in score) == (task != 'winogrande')


def test_items_are_asked_and_scored_by_the_harnesss_definitions(harness, published):
    report, samples = judged(published, ITEMS)
    assert list(report['tasks']) == list(tasks.TASKS) == list(ITEMS)
    assert_asked(report, samples, ITEMS)
    assert report['average'] == 1.0
    chances = [report['tasks'][task]['chance'] for task in ITEMS]
    assert chances == pytest.approx([0.25, 0.25, 0.5, (1 / 3 + 1 / 4 + 1 / 5) / 3, 0.25, 0.5])


def test_wrong_answers_are_counted(harness, published):
    """The judge takes the other solution of the last two items for right, and no task for more than another."""
    wrong = ITEMS['piqa'][:1]
    for item, choices, label in ITEMS['piqa'][1:]:
        wrong.append((item, choices, 1 - label))
    report, samples = judged(published, {'piqa': wrong, 'winogrande': ITEMS['winogrande']})
    assert [sample['acc'] for sample in samples['piqa']] == [1.0, 0.0, 0.0]
    assert report['average'] == pytest.approx(2 / 3)
    score = report['tasks']['piqa']
    assert score['acc'] == pytest.approx(1 / 3)
    assert score['acc_stderr'] == pytest.approx(statistics.stdev([1, 0, 0]) / 3**0.5)


@pytest.mark.parametrize('limit, items', [(1, 1), (2, 2), (3, 3), (50, 3)])
def test_a_limit_takes_the_first_items(harness, published, limit, items):
    report, samples = judged(published, {'arc_challenge': ITEMS['arc_challenge']}, limit)
    assert [sample['doc_id'] for sample in samples['arc_challenge']] == list(range(items))
    score = report['tasks']['arc_challenge']
    assert score['items'] == items
    assert score['chance'] == pytest.approx(np.mean([1 / 3, 1 / 4, 1 / 5][:items]))


def test_tasks_are_loaded_once_before_the_first_run(harness, published, monkeypatch):
    calls = []

    def record(name, result):
        return lambda *words: calls.append(name) or result(*words)

    monkeypatch.setattr(evaluate, 'harness_tasks', record('tasks', tasks.harness_tasks))
    monkeypatch.setattr(
        evaluate, 'load_run', record('run', lambda *_: (random_model(), BYTES, None))
    )
    settings = evaluate.TasksConfig(tasks='piqa', data_dir=str(published), limit=1)
    evaluate.evaluate_tasks(['one', 'two'], settings, Machine('cpu'))
    assert calls == ['tasks', 'run', 'run']


def test_a_task_that_is_defined_with_examples_is_asked_without_them(
    harness, published, monkeypatch
):
    def with_examples(*words):
        made = tasks.harness_tasks(*words)
        for task in made:
            task.set_config(key='num_fewshot', value=2)
        return made

    monkeypatch.setattr(evaluate, 'harness_tasks', with_examples)
    items = {'piqa': ITEMS['piqa']}
    assert_asked(*judged(published, items), items)


SURGEON = 'Sarah was a much better surgeon than Maria so'

# The number of an item in its published file, what is asked, and the index of the answer: read off
# the files.
FROM_THE_FILES = {
    'hellaswag': (
        0,
        pairs(
            'Roof shingle removal: A man is sitting on a roof. he',
            'is using wrap to wrap a pair of skis.',
            'is ripping level tiles off.',
            "is holding a rubik's cube.",
            'starts pulling up roofing on a roof.',
        ),
        3,
    ),
    'openbookqa': (
        1,
        pairs(
            'There is most likely going to be fog around:',
            'a marsh',
            'a tundra',
            'the plains',
            'a desert',
        ),
        0,
    ),
    'winogrande': (
        0,
        [
            (f'{SURGEON} Sarah', ' always got the easier cases.'),
            (f'{SURGEON} Maria', ' always got the easier cases.'),
        ],
        1,
    ),
    'arc_challenge': (
        0,
        pairs(
            'Question: An astronomer observes that a planet rotates faster after a meteorite impact. '
            'Which is the most likely effect of this increase in rotation?\nAnswer:',
            'Planetary density will decrease.',
            'Planetary years will become longer.',
            'Planetary days will become shorter.',
            'Planetary gravity will become stronger.',
        ),
        2,
    ),
    'arc_easy': (
        1,
        pairs(
            'Question: Which piece of safety equipment is used to keep mold spores from entering the '
            'respiratory system?\nAnswer:',
            'safety goggles',
            'breathing mask',
            'rubber gloves',
            'lead apron',
        ),
        1,
    ),
    'piqa': (
        1,
        pairs(
            'Question: dresser\nAnswer:',
            'replace drawer with bobby pin ',
            'finish, woodgrain with  bobby pin ',
        ),
        1,
    ),
}


@needs_published
def test_published_items_are_asked_as_their_files_say(harness, tmp_path, monkeypatch):
    for task, (number, _, _) in FROM_THE_FILES.items():
        (tmp_path / task).mkdir()
        for name in tasks.PUBLISHED[task][0]:
            line = (PUBLISHED / task / name).read_text().split('\n')[number]
            (tmp_path / task / name).write_text(line + '\n')
        set_whole(monkeypatch, task, 1)
    expected = {task: [item] for task, item in FROM_THE_FILES.items()}
    report, samples = judged(tmp_path, expected)
    assert_asked(report, samples, expected)


@needs_published
@pytest.mark.parametrize('task', tasks.TASKS)
def test_the_published_sets_are_read_whole_and_every_answer_is_a_choice(task):
    rows = tasks.read_items(task, PUBLISHED)
    assert len(rows) == tasks.PUBLISHED[task][1]
    for row in rows:
        if task == 'hellaswag':
            assert int(row['label']) in range(4) and len(row['endings']) == 4
        elif task == 'piqa':
            assert row['label'] in (0, 1) and row['sol1'] and row['sol2']
        elif task == 'winogrande':
            assert row['answer'] in ('1', '2') and row['sentence'].count('_') == 1
        else:
            choices = row['choices']
            assert row['answerKey'] in choices['label']
            assert len(choices['text']) == len(choices['label']) >= 3


# --- mistakes ------------------------------------------------------------------------------------


def damage_file(path, damage):
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    if damage == 'no folder':
        path.parent.rename(path.parent.with_name('elsewhere'))
    elif damage == 'no file':
        path.unlink()
    else:
        contents = {
            'cut in a line': data[:-12],
            'cut in a character': data[:-4],
            'empty': b'',
            'a line less': b''.join(lines[:2]),
            'a line more': data + lines[0],
        }
        path.write_bytes(contents[damage])


@pytest.mark.parametrize('task', tasks.TASKS)
@pytest.mark.parametrize(
    'damage, words',
    [
        ('cut in a line', 'half a download'),
        ('cut in a character', ''),
        ('a line less', 'has 2 '),
        ('empty', 'has 0 '),
        ('a line more', 'has 4 '),
        ('no file', '--data_dir'),
        ('no folder', '--data_dir'),
    ],
)
def test_a_damaged_set_is_refused_in_one_line_that_names_it(published, task, damage, words):
    path = published / task / tasks.PUBLISHED[task][0][0]
    path.write_bytes(path.read_bytes().replace(b'}\n', ', "note": "é"}\n'.encode()))
    assert len(tasks.read_items(task, published)) == 3
    damage_file(path, damage)
    with pytest.raises((ValueError, OSError)) as error:
        tasks.read_items(task, published)
    message = str(error.value)
    assert '\n' not in message and str(path) in message and words in message, message


def test_piqa_without_its_labels_or_with_too_few_is_refused(published):
    path = published / 'piqa' / 'dev-labels.lst'
    path.write_text('1\n0\n')
    with pytest.raises(ValueError, match=f'{path} has 2 lines instead of 3'):
        tasks.read_items('piqa', published)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f'there is no {path}'):
        tasks.read_items('piqa', published)


@pytest.mark.parametrize(
    'task, old, new, words',
    [
        ('piqa', '0', '2', 'answer 2 '),
        ('piqa', '0', '-1', 'answer -1 '),
        ('piqa', '0', 'x', "'x'"),
        ('winogrande', '"answer": "2"', '"answer": ""', "answer '' "),
        ('winogrande', '"answer": "2"', '"answer": 2', ''),
        ('openbookqa', '"answerKey": "A"', '"answerKey": "Z"', "answer 'Z' "),
        ('arc_easy', '"answerKey": "3"', '"answerKey": "E"', "answer 'E' "),
        ('hellaswag', '"label": "0"', '"label": 4', "answer '4' "),
        ('hellaswag', '"endings"', '"ends"', "'endings'"),
        ('openbookqa', '"question"', '"problem"', "'question'"),
    ],
)
def test_an_item_without_a_right_answer_is_refused_by_file_and_item(
    published, task, old, new, words
):
    path = published / task / tasks.PUBLISHED[task][0][-1]
    lines = path.read_text().splitlines()
    assert old in lines[1]
    lines[1] = lines[1].replace(old, new)
    path.write_text('\n'.join(lines) + '\n')
    with pytest.raises(ValueError) as error:
        tasks.read_items(task, published)
    message = str(error.value)
    assert str(path) in message and 'item 2: ' in message, message
    assert words in message and '\n' not in message, message


def test_tasks_under_torchrun_are_refused_in_one_line(monkeypatch):
    """Every process would score everything."""
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert_one_line(program('--device=cpu')[0], 'torchrun')
    monkeypatch.setenv('LOCAL_RANK', '1')
    assert program('--device=cpu')[0] == 1


def test_a_mistake_about_tasks_is_one_line(harness, run, published, monkeypatch):
    words = [f'--out_dir={run("asked")}', '--device=cpu', '--out=never.json']
    local = f'--data_dir={published}'
    assert_one_line(program(*words, local, '--tasks=piqa,pika')[0], 'pika', 'piqa')
    assert_one_line(program(*words, '--tasks=piqa,pika')[0], 'pika', 'lm-evaluation-harness')
    assert_one_line(program(*words, local, '--tasks=')[0])
    assert_one_line(program('--out_dir=out/none', local)[0], 'out/none')
    assert_one_line(program(*words, f'--data_dir={published}/none')[0], f'{published}/none')
    path = published / 'piqa' / 'dev.jsonl'
    path.write_text('{"goal": ')
    assert_one_line(program(*words, local, '--tasks=piqa')[0], path)

    def no_hub(*args):
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(evaluate, 'harness_tasks', no_hub)
    assert_one_line(program(*words, '--tasks=piqa')[0], 'hub', '--data_dir')
    assert not Path('never.json').exists()


@pytest.mark.parametrize('kind', ['loglikelihood', 'generate_until'])
def test_a_task_without_given_answers_is_refused_by_name(harness, monkeypatch, kind):
    piqa = SimpleNamespace(OUTPUT_TYPE='multiple_choice', aggregation=lambda: {'acc': None})
    other = SimpleNamespace(OUTPUT_TYPE=kind)
    manager = SimpleNamespace(load=lambda names: {'tasks': {'piqa': piqa, 'other': other}})
    monkeypatch.setattr(tasks, 'task_manager', lambda: manager)
    with pytest.raises(ValueError, match=f'^other asks for {kind}; only tasks .* given answers'):
        tasks.harness_tasks(['piqa', 'other'], '', None)


@pytest.mark.parametrize(
    'name, reason',
    [
        ('mmlu', 'is a group'),
        ('ai2_arc', 'is a group'),
        ('gsm8k', 'asks for generate_until'),
        ('lambada_openai', 'asks for loglikelihood'),
    ],
)
def test_what_is_no_task_of_choices_is_refused_before_a_training(harness, name, reason):
    tasks.check_names(['sciq', 'piqa'], '')
    with pytest.raises(ValueError, match=f'{name} {reason}'):
        tasks.check_names(['sciq', name], '')


def test_a_task_without_accuracy_is_refused_by_name(harness, monkeypatch):
    odd = SimpleNamespace(OUTPUT_TYPE='multiple_choice', aggregation=lambda: {'pct': None})
    manager = SimpleNamespace(load=lambda names: {'tasks': {'odd': odd}})
    monkeypatch.setattr(tasks, 'task_manager', lambda: manager)
    with pytest.raises(ValueError, match='^odd has no accuracy; only tasks with acc'):
        tasks.harness_tasks(['odd'], '', None)


def test_without_the_harness_one_line_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, 'lm_eval', None)
    status, _, _ = program(f'--out_dir={run("unasked")}', '--device=cpu')
    assert_one_line(status, 'pip install lm_eval')
