"""
The six zero-shot tasks of the paper's Table 1, as lm-evaluation-harness defines them: its prompts, its
scoring. evaluate.py runs models on them.

Their items come from the Hugging Face hub, or from a folder --data_dir with one folder per task, which
holds the files as they were first published (see PUBLISHED).
"""

import difflib
import functools
import json
from pathlib import Path

# The files of each task, and how many items they hold when they are whole. A second file has the labels.
PUBLISHED = {
    'hellaswag': (('hellaswag_val_preprocessed.jsonl',), 10042),
    'openbookqa': (('test.jsonl',), 500),
    'winogrande': (('dev.jsonl',), 1267),
    'arc_challenge': (('ARC-Challenge-Test.jsonl',), 1172),
    'arc_easy': (('ARC-Easy-Test.jsonl',), 2376),
    'piqa': (('dev.jsonl', 'dev-labels.lst'), 1838),
}

TASKS = tuple(PUBLISHED)  # in the order of Table 1's columns


def check_names(names, data_dir):
    """Raise ValueError for tasks that do not exist, or that `data_dir`, if there is one, cannot hold."""
    unknown = [name for name in names if name not in PUBLISHED]
    if data_dir and unknown:
        raise ValueError(
            f'{", ".join(map(repr, unknown))} cannot be read from {data_dir}; '
            f'only {", ".join(PUBLISHED)} can'
        )
    if unknown:
        check_known(unknown)


def check_known(names):
    """Raise ValueError for names that lm-evaluation-harness does not know, or that are no task of
    multiple choice. It takes a while to ask.

    What the index does not say, such as the metrics of a task, harness_tasks() finds out.
    """
    try:
        known = task_manager().task_index
    except ImportError:
        return  # whoever needs it says so
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, [*PUBLISHED, *known], n=1)
            hint = f'; did you mean {close[0]!r}?' if close else ''
            raise ValueError(f'lm-evaluation-harness has no task {name!r}{hint}')
        entry = known[name]
        if entry.kind.name in ('GROUP', 'TAG'):
            raise ValueError(f'{name} is a group of tasks; name the tasks that are in it')
        if entry.cfg and 'output_type' in entry.cfg:
            check_output_type(name, entry.cfg['output_type'])


@functools.cache
def task_manager():
    """lm-evaluation-harness's index of its 14,000 files, which takes some 10 seconds to build."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def check_output_type(name, output_type):
    if output_type != 'multiple_choice':
        raise ValueError(
            f'{name} asks for {output_type}; only tasks that let a model choose among given answers '
            'can be evaluated here'
        )


# --- published files -> rows of the datasets that the harness reads ------------------------------


def read_items(task, data_dir):
    """The items of a task as rows for the harness's definition of it, [{column: value}].

    If a file is missing or damaged, raises FileNotFoundError or ValueError that names it.
    """
    names, _ = PUBLISHED[task]
    columns = [read_lines(task, data_dir, name) for name in names]
    paths = ' or '.join(str(Path(data_dir, task, name)) for name in names)
    rows = []
    for number, (line, *label) in enumerate(zip(*columns, strict=True), 1):
        try:
            rows.append(to_row(task, json.loads(line), *label))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'{paths}, item {number}: not as published, perhaps half a download '
                f'({type(error).__name__}: {error}); download it again'
            ) from None
    return rows


def read_lines(task, data_dir, name):
    names, items = PUBLISHED[task]
    path = Path(data_dir, task, name)
    if not path.is_file():
        needed = ', '.join(f'{task}/{name}' for name in names)
        raise FileNotFoundError(f'there is no {path}: --data_dir needs {needed}')
    lines = [line for line in path.read_text(errors='replace').split('\n') if line.strip()]
    if len(lines) != items:
        raise ValueError(
            f'{path} has {len(lines)} lines instead of {items}: perhaps half a download; '
            'download it again'
        )
    return lines


def to_row(task, item, label=None):
    """A published item as a row of the dataset that the harness reads.

    label: the item's line in the file of labels, where the task has one. Raises ValueError where
    the right answer is not one of the choices, and KeyError where something is missing.
    """
    if task == 'hellaswag':
        # Preprocessed as the harness does it, except for capitals in the context's second half.
        row = {
            'ctx_a': item['ctx'],
            'ctx_b': '',
            'activity_label': item['activity_label'],
            'endings': item['endings'],
            'label': str(item['label']),
        }
        answer = row['label']
        choices = [str(n) for n in range(len(row['endings']))]
    elif task == 'piqa':
        row = {name: item[name] for name in ('goal', 'sol1', 'sol2')}
        row['label'] = int(label)
        answer = row['label']
        choices = [0, 1]
    elif task == 'winogrande':
        row = {name: item[name] for name in ('sentence', 'option1', 'option2', 'answer')}
        answer = row['answer']
        choices = ['1', '2']
    else:
        texts_and_labels = item['question']['choices']
        row = {
            'question_stem' if task == 'openbookqa' else 'question': item['question']['stem'],
            'answerKey': item['answerKey'],
            'choices': {
                name: [choice[name] for choice in texts_and_labels] for name in ('text', 'label')
            },
        }
        answer = row['answerKey']
        choices = row['choices']['label']

    if answer not in choices:
        raise ValueError(f'the answer {answer!r} is not one of {choices}')
    return row


# --- the harness's tasks -------------------------------------------------------------------------


def harness_tasks(names, data_dir, folder):
    """The harness's tasks of these names, on the data of the hub or of `data_dir`.

    names: those that check_names() lets through. Local data go through files in `folder`, which must outlive
    the tasks. Raises ValueError for a name that is not a task of multiple choice, ConnectionError where
    the hub cannot be reached.
    """
    import datasets

    datasets.disable_progress_bars()
    manager = task_manager()
    specs = names
    if data_dir:
        specs = []
        for name in names:
            definition = manager.task_index[name].yaml_path
            rows = read_items(name, data_dir)
            specs.append(write_local_task(name, definition, rows, Path(folder)))
    tasks = manager.load(specs)['tasks']
    for name, task in tasks.items():
        check_output_type(name, task.OUTPUT_TYPE)
        if 'acc' not in task.aggregation():
            raise ValueError(f'{name} has no accuracy; only tasks with acc can be evaluated here')
    return list(tasks.values())


def write_local_task(name, definition, rows, folder):
    """Write a task of the harness's definition, but on these rows. Returns the path of its file."""
    data = folder / f'{name}.jsonl'
    data.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    splits = ('train', 'validation', 'test')
    task = {
        'include': str(definition),
        'dataset_path': 'json',
        'dataset_name': None,
        'dataset_kwargs': {
            'data_files': dict.fromkeys(splits, str(data)),
            'cache_dir': str(folder),
        },
    }
    path = folder / f'{name}.yaml'
    path.write_text(json.dumps(task))  # JSON is YAML
    return str(path)
