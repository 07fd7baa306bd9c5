"""The forms of what config.json and log.jsonl hold. A run that is compared may be a stranger's, or edited:
what is read of it is checked here."""

import json

NUMBER = int | float | None  # None: it was not finite
PROVENANCE = {str: str | NUMBER}  # {fact: value}, see lib/rundir.py

# What the fields of a line of a log are.
LINE = {
    'step': int,
    # of a training step
    **dict.fromkeys('loss lr grad_norm tokens tok_per_s mfu scale skipped seconds'.split(), NUMBER),
    # of an evaluation: {domain: loss}, and the learned weights that mix, {parameter: its values}
    'val': {str: NUMBER, 'mean': NUMBER},
    'mixing': dict,
    # where the run was resumed: {setting: [before, now]}, and what made the part before
    'changed': {str: [object, object]},
    'before': PROVENANCE,
}


def parse_line(line):
    """A line of a log as its entry, {'step': 3, ...}. Raises ValueError, LookupError, TypeError or
    RecursionError where it is none."""
    entry = json.loads(line)
    check_types(entry, {name: LINE[name] for name in LINE if name == 'step' or name in entry})
    return entry


def check_types(value, form, name=''):
    """TypeError, LookupError or ValueError where what a file holds, `name`, is not of a form: a type, a
    list of forms, or {key: form}, in which `str` stands for every key."""
    kind = type(form) if isinstance(form, dict | list) else form
    is_huge = isinstance(value, int) and abs(value) >= 2**63
    if is_huge or not isinstance(value, kind):
        raise TypeError(f'{name or "it"} is {str(value)[:60]!r}')
    if isinstance(form, list):
        for each, expected in zip(value, form, strict=True):
            check_types(each, expected, name)
    if isinstance(form, dict):
        for key, expected in form.items():
            for each in value if key is str else [key]:
                check_types(value[each], expected, f'{name} {each}'.strip())
