"""
From runs to everything that a report shows: losses, verdicts, costs and curves, as one dict.

compare_plan() is for a plan and its runs, compare_runs() for runs that exist without one.
"""

import itertools
import os
import re
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from comparison.arms import check_name, contrast_name, lead, of_arm, parse_contrasts
from comparison.curves import measure_curves
from comparison.plan import COMPARABLE, changes, check_judgement
from comparison.record import tuning_seeds_beside
from comparison.results import losses_of, sweep
from comparison.runs import ROUNDING, disagreement, parts_of, read_state
from comparison.verdict import describe, judge, judge_together, paired
from model import GPT, GPTConfig

# --- the comparison -------------------------------------------------------------------------------


@dataclass
class ArmRuns:
    """An arm and its runs, planned or not."""

    facts: dict  # of one of them
    config: GPTConfig | None  # None where its settings are not today's
    rate: float | None  # the learning rate; None while it is not known
    states: dict  # {seed: State}
    problem: str = ''  # why its learning rate is not known
    trials: list = field(default_factory=list)  # States of the runs that chose it

    def finished(self):
        """{seed: State} of the runs that have finished."""
        return {seed: state for seed, state in self.states.items() if state.kind == 'finished'}

    def losses(self):
        """{seed: validation loss} of the runs that have finished."""
        return {seed: state.losses['mean'] for seed, state in self.finished().items()}


def compare_plan(results, record):
    """Everything the report shows of a planned comparison; record: what plan.json holds."""
    plan, problems = results.plan, results.problems()
    arms = {}
    for name, own in plan.arms.items():
        states = {}
        for seed, run in results.test_runs(name).items():
            # Of independent arms, no two runs are a pair.
            key = run.seed if plan.judgement == 'dunnett' else seed
            states[key] = results.state(run)
        rate, problem = results.rate(name), problems.get(name, '')
        trials = [results.state(run) for run in results.tuning_runs(name)]
        arms[name] = ArmRuns(plan.arm_facts(name), own.config, rate, states, problem, trials)
    tuning = {arm: results.tune(arm) for arm in arms if plan.rates}
    # Runs may be judged where their data are not, and so nothing has compared them yet.
    verdicts = verdicts_on(arms, plan.contrasts, ['data', 'domains'], plan.judgement)
    comparison = assemble(plan.folder.name, arms, verdicts, problems, tuning)
    return comparison | {'plan': record, 'judgement': plan.judgement}


def verdicts_on(arms, contrasts, shared, judgement):
    """{contrast: its numbers and verdict} of arms, {name: ArmRuns}.

    shared: facts that two arms must share. judgement: one of verdict.RULES.
    """
    independent = judgement == 'dunnett'
    # Of an arm its losses, of a lead the differences of its contrast, which stands before.
    values = {name: arm.losses() for name, arm in arms.items()}
    leads = {lead(*pair): pair for pair in contrasts if pair[0] in arms}
    differences, incomplete, known = {}, {}, {}
    for ours, theirs in contrasts:
        key = contrast_name(ours, theirs)
        pairs = paired(values[ours], values[theirs])
        differences[key] = {seed: a - b for seed, (a, b) in pairs.items()}
        values[lead(ours, theirs)] = differences[key]
        if ours in arms:
            reasons = obstacles(arms[ours], arms[theirs], shared, independent)
        else:
            reasons = obstacles_of_leads(arms, leads[ours], leads[theirs], shared)
        incomplete[key] = next(filter(None, reasons), '')
        losses = []
        for name in (ours, theirs):
            seeds = values[name] if independent else pairs
            numbers = describe({seed: values[name][seed] for seed in seeds})
            losses.append((numbers['mean'], numbers['sd']))
        known[key] = {'ours': ours, 'theirs': theirs, 'losses': losses}
    if independent:
        losses = {name: values[name] for name in arms}
        verdicts, by = judge_together(losses, incomplete), "by Dunnett's test"
    else:
        verdicts, by = judge(differences, incomplete), 'after Holm'
    return {key: numbers | known[key] | {'by': by} for key, numbers in verdicts.items()}


def obstacles(ours, theirs, shared, independent=False):
    """Yield why two arms have no verdict, or '': the first reason counts. shared: of SHARED. independent:
    whether their seeds are no pairs."""
    yield ours.problem
    yield theirs.problem
    states = [*ours.states.values(), *theirs.states.values()]
    pairs = list(paired(ours.states, theirs.states).values())
    if independent:
        pairs = [(states[0], state) for state in states]
    if not pairs:
        yield 'they have no test seed in common'
    for state in states:
        if state.kind != 'finished':
            yield f'{state.folder} is {state.reason}'
    for arm in (ours, theirs):
        pairs += [(next(iter(arm.states.values())), state) for state in arm.trials]
    # Every pair is alike in how it was resumed; in all else, any two runs are.
    for pair in pairs:
        yield disagreement(*pair, only=shared)
    for two in itertools.combinations(itertools.chain(*pairs), 2):
        yield disagreement(*two, ['resumed'], shared)
    for one, other in itertools.combinations(states, 2):
        is_same = one.losses == other.losses and one.training() == other.training()
        if is_same and one.config['seed'] != other.config['seed']:
            yield f'{one.folder} and {other.folder} have the same losses, and so are one run of one seed'


def obstacles_of_leads(arms, ours, theirs, shared):
    """As obstacles(), of two leads, each a pair of names in `arms`."""
    for one, other in (ours, theirs):
        yield from obstacles(arms[one], arms[other], shared)
    # A lead after some steps may be compared with one after more, to which a run was extended.
    across = [name for name in shared if name in COMPARABLE]
    for one, other in zip(ours, theirs, strict=True):
        if one != other:
            yield from obstacles(arms[one], arms[other], across)


def assemble(title, arms, verdicts, problems, tuning):
    """Verdicts, losses, costs and curves of arms, {name: ArmRuns}.

    verdicts: verdicts_on() them. problems: {run or arm: why it has not finished}. tuning: {arm:
    results.sweep()}.
    """
    trials = [state for arm in arms.values() for state in arm.trials]
    states = [state for arm in arms.values() for state in arm.states.values()] + trials
    baseline = next(iter(arms))
    numbers = {name: arm_numbers(arm, arms[baseline]) for name, arm in arms.items()}
    return {
        'title': title,
        'plan': None,
        'tuning': tuning,
        'tuning_seeds': sorted({state.config['seed'] for state in trials if state.config}),
        'problems': problems,
        'provenance': origins(states),
        'code': Counter(state.code for state in states if state.code),
        'baseline': baseline,
        'arms': numbers,
        'contrasts': verdicts,
        'evaluation': describe_evaluation(arms[baseline].facts),
        'domains': sorted({name for state in states for name in state.losses} - {'mean'}),
        'curves': curves_of_arms(arms, baseline),
        'seconds': sum(map(seconds_of, states)),
    }


def seconds_of(state):
    """How long a run has trained and been evaluated, as far as its log says."""
    seconds, tokens = 0.0, 0
    for entry in state.entries:
        if 'val' in entry:
            seconds += entry.get('seconds') or 0
        elif entry.get('tok_per_s') and entry.get('tokens'):
            seconds += (entry['tokens'] - tokens) / entry['tok_per_s']
            tokens = entry['tokens']
    return seconds


def arm_numbers(arm, base):
    """An arm's line in the tables: its losses, and what it costs, counted."""
    facts, numbers = arm.facts, describe(arm.losses())
    rates = {'learning_rate': arm.rate} if arm.rate not in (base.rate, None) else {}
    tokens = facts['gradient_accumulation_steps'] * facts['batch_size'] * facts['block_size']
    skipped, speeds = {}, []
    for state in arm.states.values():
        # How many of its steps had no update, because their gradient was not finite.
        steps = max((entry.get('skipped') or 0 for entry in state.entries), default=0)
        if steps:
            skipped[state.config['seed']] = steps
        speeds += [entry['tok_per_s'] for entry in state.entries if entry.get('tok_per_s')]
    return {
        'changes': changes(facts, base.facts) | rates,
        'rate': arm.rate,
        'steps': facts['max_iters'],
        'tokens': tokens * facts['max_iters'],
        'skipped': skipped,
        'losses': numbers['differences'],
        'mean': numbers['mean'],
        'sd': numbers['sd'],
        'leads': {} if arm is base else leads_by_domain(arm, base),
        **counted(arm.config, tokens * facts['max_iters']),
        'ms_per_step': 1e3 * tokens / statistics.median(speeds) if speeds else None,
    }


def leads_by_domain(arm, base):
    """{domain: the numbers of a contrast with the baseline, uncorrected}; arms that share no seed have none."""
    differences = {}
    for seed, (ours, theirs) in paired(arm.finished(), base.finished()).items():
        for domain, (a, b) in paired(ours.losses, theirs.losses).items():
            if domain != 'mean':
                differences.setdefault(domain, {})[seed] = a - b
    return {domain: describe(each) for domain, each in differences.items()}


def counted(config, tokens):
    """What a model costs, counted; None where its config is not known."""
    if config is None:
        return dict.fromkeys(('parameters', 'flops', 'cache_bytes_per_token'))
    model, length = GPT.without_weights(config), config.block_size
    return {
        'parameters': model.num_params(non_embedding=False),
        'flops': model.flops_per_token(length) * tokens,
        'cache_bytes_per_token': model.new_cache(1, length, torch.float16).nbytes / length,
    }


def describe_evaluation(own):
    rows, length = own['eval_iters * batch_size'], own['block_size']
    text = f'up to {rows:,} sequences of {length:,} tokens per domain'
    if not rows:
        text = 'the whole validation split'
    return f'on {text} of {own["dataset"]}'


# What a run was made with.
ORIGINS = (
    'commit code device cpu threads world_size torch dtype compile attention_kernel caution'.split()
)


def origins(states):
    """{fact: values}: what the runs were made with, from their config.json and their logs."""
    values = {}
    for state in states:
        for part, name in itertools.product(parts_of(state.config, state.entries), ORIGINS):
            if part.get(name) is not None:
                values.setdefault(name, set()).add(part[name])
    return {name: sorted(each, key=str) for name, each in values.items()}


def curves_of_arms(arms, baseline):
    """measure_curves() of the finished runs of all arms but the baseline that take as many steps: a run's
    middle is not compared with another's end."""
    base, pairs = arms[baseline], {}
    for name, arm in arms.items():
        both = paired(arm.finished(), base.finished())
        # Runs that logged other steps have no curve.
        both = {
            seed: pair for seed, pair in both.items() if paired(*(run.training() for run in pair))
        }
        if both and name != baseline and arm.facts['max_iters'] == base.facts['max_iters']:
            pairs[name] = both
    return measure_curves(pairs)


# --- runs that exist ------------------------------------------------------------------------------

# Facts that two runs of different arms must share, too.
SHARED = (*COMPARABLE, 'max_iters', 'resumed')
# Facts in which the test runs of an arm may differ. Other data or code
# leave it without a verdict, and a pair must agree in `resumed`.
OWN = ('seed', 'resumed', 'data', 'code', *ROUNDING)


def compare_runs(
    words, title, contrasts='', tuning_seeds=None, mixed_code=False, judgement='paired'
):
    """Everything the report shows of runs that exist.

    words: of the command line, see arm_of(); the first arm is the baseline. contrasts: text, as in
    --contrasts. tuning_seeds: of runs that have only chosen the learning rate of their arm; None: those of
    the plan.json beside a run. mixed_code: whether runs of different code may share a verdict.
    judgement: one of verdict.RULES.
    """
    by_arm = {}
    for word in words:
        name, folder = arm_of(word)
        state = read_state(folder)
        if not state.config:
            raise ValueError(f'{folder} is not a run: {state.reason}')
        if mixed_code:
            state.facts['code'] = None  # as of a run that does not record it
        seeds = tuning_seeds_beside(folder) if tuning_seeds is None else tuning_seeds
        tests, tuned = by_arm.setdefault(name, ([], []))
        (tuned if state.config['seed'] in seeds else tests).append(state)
    if len(by_arm) < 2:
        raise ValueError(
            f'all runs are of arm {name}: nothing to compare; NAME={words[-1]} names another'
        )

    arms, tuning = {}, {}
    for name, (tests, tuned) in by_arm.items():
        with of_arm(name):
            arms[name], trials = existing_arm(tests, tuned)
        if trials:
            tuning[name] = trials
    pairs = parse_contrasts(contrasts, arms)
    check_judgement(judgement, pairs, {name: arm.states for name, arm in arms.items()})
    problems = {
        str(state.folder): state.reason
        for arm in arms.values()
        for state in arm.states.values()
        if state.kind != 'finished'
    }
    verdicts = verdicts_on(arms, pairs, SHARED, judgement)
    comparison = assemble(title, arms, verdicts, problems, tuning)
    return comparison | {'judgement': judgement}


def arm_of(word):
    """(arm, folder) of a run as it is named: NAME=FOLDER, or FOLDER, whose name without `_lr<rate>` and
    `_seed<n>` is then that of the arm."""
    name, equals, folder = word.partition('=')
    if not equals or '/' in name:
        folder = word
        name = re.sub(r'(_lr[\d.e+-]+)?(_seed\d+)?$', '', Path(os.path.abspath(word)).name)
    check_name(name)
    return name, folder


def existing_arm(tests, tuned):
    """(ArmRuns, results.sweep() of its tuning runs; None where they tried no two rates) of all runs of an
    arm: those that test it, and those that only tuned.

    Raises ValueError where they are not those of one arm, or not at its best rate.
    """
    if not tests:
        raise ValueError(
            'all of its runs only tuned, by --tuning_seeds or the plan.json beside them; '
            '--tuning_seeds=() takes them for test runs'
        )
    first, own, trials = tests[0], {}, {}
    for state in tests:
        add_run(own, state, first, OWN)
    for state in tuned:
        runs = trials.setdefault(state.config['learning_rate'], {})
        add_run(runs, state, first, (*OWN, 'learning_rate'))

    rate = first.config['learning_rate']
    arm = ArmRuns(first.facts, first.model, rate, own, trials=tuned)
    return arm, tuned_by(trials, rate) if len(trials) > 1 else None


def add_run(runs, state, first, but):
    """Add a run to others of its arm, {seed: State}. It must agree with the arm's first run, except in
    these facts."""
    other = disagreement(first, state, but)
    if other:
        raise ValueError(
            f'{other}; mine={state.folder} makes it another arm, --tuning_seeds one that only tuned'
        )
    seed = state.config['seed']
    if seed in runs:
        raise ValueError(f'{runs[seed].folder} and {state.folder} have one seed; name one of them')
    runs[seed] = state


def tuned_by(trials, rate):
    """results.sweep() of tuning runs, {rate: {seed: State}}, which must have chosen this rate."""
    seeds = {tuple(sorted(states)) for states in trials.values()}
    if len(seeds) > 1:
        raise ValueError(f'its rates were tried on different --tuning_seeds: {sorted(seeds)}')
    tuned = sweep({rate: losses_of(states.values()) for rate, states in trials.items()})
    if tuned['best'] != rate:
        raise ValueError(
            f'its test runs have learning rate {rate:g}, but its best one is {tuned["best"]} (None: '
            'tuning runs have not finished, or diverged at every rate)'
        )
    return tuned
