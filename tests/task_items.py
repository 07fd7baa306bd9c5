"""Items of the zero-shot tasks, laid out as they were published, and what the harness asks of each."""

import functools
import json

import pytest
from conftest import SHARED

from lib import tasks

PUBLISHED = SHARED / 'eval'
needs_published = pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason='needs the published sets, ../shared/data/eval'
)


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
        openbookqa('The "sun" is', ['a star', "a bird's", 'a car', 'one'], 'A'),
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
