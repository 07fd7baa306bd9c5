"""
The six zero-shot tasks of the paper's Table 1, as lm-evaluation-harness defines them: its prompts, its
scoring. evaluate.py runs models on them.

Their items come from the Hugging Face hub, or from a folder --data_dir with one folder per task, which
holds the files as they were first published (see PUBLISHED).
"""

import functools
import json
import logging
from pathlib import Path

from lib.files import unreadable

# The files of each task, and how many items they hold when they are whole. A second file has the labels.
PUBLISHED = {
    'hellaswag': (('hellaswag_val.jsonl',), 10042),
    'openbookqa': (('test.jsonl',), 500),
    'winogrande': (('dev.jsonl',), 1267),
    'arc_challenge': (('ARC-Challenge-Test.jsonl',), 1172),
    'arc_easy': (('ARC-Easy-Test.jsonl',), 2376),
    'piqa': (('dev.jsonl', 'dev-labels.lst'), 1838),
}

TASKS = tuple(PUBLISHED)  # in the order of Table 1's columns


# --- the harness's tasks -------------------------------------------------------------------------


def harness(names, data_dir):
    """lm-evaluation-harness's simple_evaluate(), to be called with an LM, on the tasks of these names.

    Their items are those of the hub or of `data_dir`. Raises OSError or ValueError where they are
    missing or damaged.
    """
    import datasets
    import lm_eval.tasks

    specs = names
    if data_dir:
        specs = [{'task': name, 'custom_dataset': splits(name, data_dir)} for name in names]
    datasets.disable_progress_bars()
    # It warns of items that are not the hub's.
    logging.getLogger('lm_eval').setLevel(logging.ERROR)
    # It has 14,000 files of tasks; only the folders of these are read.
    home = Path(lm_eval.tasks.__file__).parent
    folders = [home / folder for folder in sorted({name.partition('_')[0] for name in names})]
    manager = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
    tasks = manager.load({'group': 'zero-shot', 'task': specs})['tasks']
    return functools.partial(
        lm_eval.simple_evaluate,
        tasks=list(tasks.values()),
        num_fewshot=0,
        task_manager=manager,
    )


def splits(task, data_dir):
    """A function that gives the harness the splits of a task: all hold the items of `data_dir`."""
    from datasets import Dataset

    items = Dataset.from_list(read_items(task, data_dir))
    return lambda **options: dict.fromkeys(('train', 'validation', 'test'), items)


# --- published files -> rows of the datasets that the harness reads ------------------------------


def read_items(task, data_dir):
    """The items of a task as rows for the harness's definition of it, [{column: value}].

    If a file is missing or damaged, raises FileNotFoundError or ValueError that names it.
    """
    names, count = PUBLISHED[task]
    paths = [Path(data_dir, task, name) for name in names]
    preprocessed = Path(data_dir, task, 'hellaswag_val_preprocessed.jsonl')
    if preprocessed.is_file() and not paths[0].is_file():
        paths = [preprocessed]
    columns = []
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f'there is no {path}, which --data_dir needs')
        text = path.read_text('utf-8-sig', errors='replace')
        lines = [line for line in text.split('\n') if line.strip()]
        if len(lines) != count:
            raise ValueError(
                f'{path} has {len(lines)} lines instead of {count}: perhaps half a download; '
                'download it again'
            )
        columns.append(lines)

    rows = []
    for number, (line, *label) in enumerate(zip(*columns, strict=True), 1):
        place = f'{" or ".join(map(str, paths))}, item {number}'
        with unreadable(f'{place}: not as published, perhaps half a download', 'download it again'):
            rows.append(to_row(task, json.loads(line), *label))
    return rows


def to_row(task, item, label=None):
    """A published item as a row of the dataset that the harness reads.

    label: the item's line in the file of labels, where the task has one. Raises ValueError where
    the right answer is not one of the choices, and KeyError where something is missing.
    """
    if task == 'hellaswag':
        row = {name: item[name] for name in ('activity_label', 'endings')}
        # What others have preprocessed has the context in one piece, which lacks a capital then.
        row |= {'ctx_a': item.get('ctx_a', item['ctx']), 'ctx_b': item.get('ctx_b', '')}
        row['label'] = int(item['label'])
        range(len(row['endings'])).index(row['label'])
    elif task == 'piqa':
        row = {name: item[name] for name in ('goal', 'sol1', 'sol2')}
        row['label'] = (0, 1).index(int(label))
    elif task == 'winogrande':
        row = {name: item[name] for name in ('sentence', 'option1', 'option2', 'answer')}
        ('1', '2').index(row['answer'])
    else:
        question = item['question']
        stem = 'question_stem' if task == 'openbookqa' else 'question'
        row = {stem: question['stem'], 'answerKey': item['answerKey'], 'choices': {}}
        for name in ('text', 'label'):
            row['choices'][name] = [choice[name] for choice in question['choices']]
        row['choices']['label'].index(row['answerKey'])
    return row
