"""
A plan as a file, plan.json: written before the first result, and then compared with.

It holds everything that decides a result, the commit, the work tree's diff, and a hash of all. It does not
change: the same plan may get more seeds, and any other comparison is one of another name. Runs of
different code are of different comparisons, unless mixed_code is given.
"""

import hashlib
import json
from pathlib import Path

from comparison.arms import contrast_name
from comparison.plan import changes
from comparison.runs import MIXED_CODE, ROUNDING, difference, facts
from comparison.verdict import LEVEL, RULES
from lib.files import as_json, unreadable, write_json
from lib.rundir import ask_git, commit_of, now

METRIC = 'validation loss at the end of training, mean over domains (nats per token)'
# Facts that differ from run to run, from arm to arm, or from machine to machine.
VARYING = ('seed', 'learning_rate', 'resumed', 'domains', *ROUNDING)


def contents_of(plan):
    """What decides the results of a plan, as JSON."""
    base = plan.arm_facts(plan.baseline)
    arms = {}
    for name, arm in plan.arms.items():
        differs = changes(plan.arm_facts(name), base)
        rate = None if plan.rates else plan.own_rate(name)
        arms[name] = {'differs': differs, 'rate': rate, 'seed_offset': arm.seed_offset}
    return as_json(
        {
            'metric': METRIC,
            'baseline': plan.baseline,
            'arms': arms,
            'contrasts': [contrast_name(*pair) for pair in plan.contrasts],
            'seeds': plan.seeds,
            'rates': plan.rates,
            'tuning_seeds': plan.tuning_seeds,
            'level': LEVEL,
            'judgement': plan.judgement,
            'rule': RULES[plan.judgement],
            'rounding': plan.rounding(plan.baseline),
            'settings': {name: base[name] for name in base if name not in VARYING},
        }
    )


def write_plan(plan):
    """Write plan.json, or read it where the same plan is there. Returns what it holds.

    Raises ValueError where it is another plan, damaged or edited. More seeds are the same plan: it stays
    as it was written, and says which there were before, and when and at which code they were added.
    """
    path = plan.folder / 'plan.json'
    contents = contents_of(plan)
    if path.exists():
        record = read_plan(path)
        check_same_plan(record['plan'], contents, path, ['code'] * plan.mixed_code)
        before = record['plan']['seeds']
        if set(before) == set(contents['seeds']):
            return record
        record['plan']['seeds'] = contents['seeds']
        record['earlier_seeds'].append(before)
        record.setdefault('extensions', []).append(date_and_code())
    else:
        begun = len(list(plan.folder.glob('*/log.jsonl')))
        record = {**date_and_code(), 'runs_before': begun, 'earlier_seeds': [], 'plan': contents}
    record['hash'] = hash_of(record)
    write_json(path, record)
    return record


def read_plan(path):
    """What a plan.json holds. Raises ValueError if it is damaged, or not as it was written."""
    advice = 'move it away, to write the plan again'
    with unreadable(f'{path} is damaged', advice):
        record = json.loads(path.read_text(errors='replace'))
        deciding_values(record['plan'])
        stated = record['hash']
    if stated != hash_of(record):
        raise ValueError(
            f'{path} was edited: its hash is not {stated} any more; restore it, or {advice}'
        )
    return record


def tuning_seeds_beside(folder):
    """The seeds that only choose rates by the plan.json beside a run, or beside what is a link to it."""
    seeds = set()
    for run in (Path(folder).absolute(), Path(folder).resolve()):
        path = run.parent / 'plan.json'
        if path.exists():
            with unreadable(
                f'{path} is damaged', '--tuning_seeds says which seeds have only tuned'
            ):
                seeds.update(json.loads(path.read_text(errors='replace'))['plan']['tuning_seeds'])
    return seeds


def hash_of(record):
    rest = {name: value for name, value in record.items() if name != 'hash'}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:12]


def check_same_plan(old, new, path, but):
    """Raise ValueError where two plans differ, but for more seeds and what is in `but`."""
    # A setting that was taken away since does not count, and one that was added had its default.
    known = facts({}) | old['settings']
    settings = {name: known.get(name) for name in new['settings']}
    if set(old['seeds']) <= set(new['seeds']):
        but = [*but, 'seeds']
    other = difference(deciding_values(old | {'settings': settings}), deciding_values(new), but)
    if other:
        name, before, now = other
        mixed = f'; {MIXED_CODE}' if name == 'code' else ''
        raise ValueError(
            f'{path} is another plan: {name} was {before}, not {now}; give another --name{mixed}'
        )


def deciding_values(contents):
    """{name: value} of all in a plan that decides its results."""
    arms = contents['arms']
    values = {'arms': list(arms)}
    for name, arm in arms.items():
        values |= {f'{key} of {name}': arm[key] for key in ('differs', 'rate', 'seed_offset')}
    values |= contents['settings']
    for name in ('contrasts', 'rates', 'seeds', 'tuning_seeds', 'level', 'judgement', 'rounding'):
        values[name] = contents[name]
    return values


def date_and_code():
    return {'date': now(), **code_state()}


# As git prints it, whatever its settings are here.
DIFF = (
    '-c core.quotePath=false diff --no-ext-diff --no-textconv --no-color --src-prefix=a/ --dst-prefix=b/'
).split()


def code_state():
    """The commit, and the diff of the work tree's Python files: the idea is a change of the code."""
    paths = ['--', '*.py', ':!tests']
    diff, _ = ask_git(*DIFF, 'HEAD', *paths)
    names, _ = ask_git('ls-files', '-z', '--others', '--exclude-standard', *paths)
    for name in filter(None, names.split(b'\0')):
        diff += ask_git(*DIFF, '--no-index', '/dev/null', name)[0]
    return {'commit': commit_of('rev-parse', 'HEAD'), 'diff': diff.decode(errors='replace')}
