"""
From runs to everything that a report shows: losses, verdicts, costs and curves, as one dict.

compare_plan() is for a plan and its runs, compare_runs() for runs that exist without one.
"""

import itertools
import re
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from comparison.arms import contrast_name, lead, parse_contrasts
from comparison.compute import multipliers
from comparison.curves import measure_curves, smoothing
from comparison.plan import TEXT, changes
from comparison.record import read_plan
from comparison.results import losses_of, sweep
from comparison.runs import (
    ROUNDING,
    by_seed,
    disagreement,
    parts_of,
    read_state,
    same_but_seeds,
)
from comparison.verdict import describe, judge, judge_together, paired
from model import GPT, GPTConfig

# --- the comparison -------------------------------------------------------------------------------


@dataclass
class ArmRuns:
    """An arm and its runs, planned or not."""

    facts: dict  # of one of them
    config: GPTConfig
    rate: float | None  # the learning rate; None while it is not known
    states: dict  # {seed: State}
    problem: str = ''  # why its learning rate is not known

    def finished(self):
        """{seed: State} of the runs that have finished."""
        return {seed: state for seed, state in self.states.items() if state.kind == 'finished'}

    def losses(self):
        """{seed: validation loss} of the runs that have finished."""
        return {seed: state.loss for seed, state in self.finished().items()}


def compare_plan(results, record):
    """Everything the report shows of a planned comparison; record: what plan.json holds."""
    plan, problems = results.plan, results.problems()
    arms = {}
    for name, own in plan.arms.items():
        states = {seed: results.state(run) for seed, run in results.test_runs(name).items()}
        rate, problem = results.rate(name), problems.get(name, '')
        arms[name] = ArmRuns(plan.arm_facts(name), own.config, rate, states, problem)
    states = [results.state(run) for run in results.all_runs()]
    tuning = {arm: results.tune(arm) for arm in arms if plan.rates}
    # Runs may be judged where their data are not, and so nothing has compared them yet.
    verdicts = verdicts_on(arms, plan.contrasts, ['data'], plan.judgement)
    comparison = assemble(plan.folder.name, arms, verdicts, problems, states, tuning)
    return comparison | {'plan': record}


def verdicts_on(arms, contrasts, shared, judgement='paired'):
    """{contrast: its numbers and verdict} of arms, {name: ArmRuns}.

    shared: facts that two arms must share. judgement: one of verdict.RULES.
    """
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
            reasons = obstacles(arms[ours], arms[theirs], shared)
        else:
            reasons = obstacles_of_leads(arms, leads[ours], leads[theirs], shared)
        incomplete[key] = next(filter(None, reasons), '')
        each = [describe(dict(enumerate(one))) for one in zip(*pairs.values(), strict=True)]
        losses = [(numbers['mean'], numbers['sd']) for numbers in each]
        known[key] = {'ours': ours, 'theirs': theirs, 'losses': losses}
    if judgement == 'dunnett':
        losses = {name: list(values[name].values()) for name in arms}
        verdicts, by = judge_together(differences, losses, incomplete), "by Dunnett's test"
    else:
        verdicts, by = judge(differences, incomplete), 'after Holm'
    return {key: numbers | known[key] | {'by': by} for key, numbers in verdicts.items()}


def obstacles(ours, theirs, shared):
    """Yield why two arms have no verdict, or '': the first reason counts. shared: of SHARED."""
    yield ours.problem
    yield theirs.problem
    pairs = list(paired(ours.states, theirs.states).values())
    if not pairs:
        yield 'they have no test seed in common'
    for state in (*ours.states.values(), *theirs.states.values()):
        if state.kind != 'finished':
            yield f'{state.folder} is {state.reason}'
    for pair in pairs:
        # Every pair is alike in how it was resumed; in all else, all runs are.
        yield disagreement(*pair, only=shared)
        yield disagreement(pairs[0][0], pair[1], ['resumed'], shared)


def obstacles_of_leads(arms, ours, theirs, shared):
    """As obstacles(), of two leads, each a pair of names in `arms`."""
    for one, other in (ours, theirs):
        yield from obstacles(arms[one], arms[other], shared)
    # A lead after some steps may be compared with one after more, to which a run was extended.
    across = [name for name in shared if name not in ('max_iters', 'resumed')]
    for one, other in zip(ours, theirs, strict=True):
        if one != other:
            yield from obstacles(arms[one], arms[other], across)


def assemble(title, arms, verdicts, problems, states, tuning):
    """Verdicts, losses, costs and curves of arms, {name: ArmRuns}.

    verdicts: verdicts_on() them. problems: {run or arm: why it has not finished}. states: of all runs,
    also of those that no arm has. tuning: {arm: results.sweep()}.
    """
    baseline = next(iter(arms))
    numbers = {name: arm_numbers(arm, arms[baseline]) for name, arm in arms.items()}
    return {
        'title': title,
        'plan': None,
        'tuning': tuning,
        'problems': problems,
        'provenance': origins(states),
        'code': Counter(state.code for state in states if state.config and state.code),
        'baseline': baseline,
        'arms': numbers,
        'multipliers': multipliers(arms, numbers, baseline),
        'contrasts': verdicts,
        'evaluation': describe_evaluation(arms[baseline].facts),
        'curves': curves_of_arms(arms, baseline),
        'mixing': {name: learned_weights(arm) for name, arm in arms.items()},
        'seconds': sum(map(seconds_of, states)),
    }


def learned_weights(arm):
    """{seed: {layer: (sum of the sources' weights, the layer's own weight)}} of values, as learned at
    the end."""
    weights = {}
    for seed, state in arm.finished().items():
        last = {}
        for entry in state.entries:
            last = entry.get('mixing') or last
        layers = {}
        for name, values in last.items():
            # In older logs the layer, not its v, has the weights.
            number = re.search(r'\.h\.(\d+)\.attn\.(v\.)?residual_lambda$', name)
            if number:
                *sources, own = values
                layers[int(number[1])] = [sum(sources), own]
        if layers:
            weights[seed] = layers
    return weights


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
    model, length = GPT.without_weights(arm.config), arm.config.block_size
    tokens = facts['gradient_accumulation_steps'] * facts['batch_size'] * length
    skipped, speeds = {}, []
    for seed, state in arm.states.items():
        # How many of its steps had no update, because their gradient was not finite.
        steps = max((entry.get('skipped') or 0 for entry in state.entries), default=0)
        if steps:
            skipped[seed] = steps
        speeds += [entry['tok_per_s'] for entry in state.entries if entry.get('tok_per_s')]
    return {
        'changes': changes(facts, base.facts) | rates,
        'rate': arm.rate,
        'steps': facts['max_iters'],
        'skipped': skipped,
        'losses': numbers['differences'],
        'mean': numbers['mean'],
        'sd': numbers['sd'],
        'parameters': model.num_params(non_embedding=False),
        'flops': model.flops_per_token(length) * tokens * facts['max_iters'],
        'cache_bytes_per_token': model.new_cache(1, length, torch.float16).nbytes / length,
        'ms_per_step': 1e3 * tokens / statistics.median(speeds) if speeds else None,
    }


def describe_evaluation(own):
    rows, length = own['eval_iters * batch_size'], own['block_size']
    text = f'up to {rows:,} sequences of {length:,} tokens per domain'
    if not rows:
        text = 'the whole validation split'
    return f'on {text} of {own["dataset"]}'


# What a run was made with.
ORIGINS = 'commit code device cpu threads world_size torch dtype compile attention_kernel'.split()


def origins(states):
    """{fact: values}: what the runs were made with, from their config.json and their logs."""
    values = {}
    for state in states:
        for part, name in itertools.product(parts_of(state.config, state.entries), ORIGINS):
            if part.get(name) is not None:
                values.setdefault(name, set()).add(part[name])
    return {name: sorted(each, key=str) for name, each in values.items()}


def curves_of_arms(arms, baseline):
    """measure_curves() of the finished runs of all arms but the baseline."""
    pairs = {}
    for name, arm in arms.items():
        both = paired(arm.finished(), arms[baseline].finished())
        both = {seed: pair for seed, pair in both.items() if all(x.training() for x in pair)}
        if both and name != baseline:
            pairs[name] = both
    return measure_curves(pairs, smoothing(arms[baseline].facts['max_iters']))


# --- runs that exist ------------------------------------------------------------------------------

# Facts that two runs of different arms must share, too.
SHARED = (*TEXT, 'max_iters', 'code', 'data', 'resumed')


def compare_runs(folders, title, contrasts='', tuning_seeds=None, mixed_code=False):
    """Everything the report shows of runs that exist; contrasts: text, as in --contrasts.

    tuning_seeds: of runs that choose the learning rate of their arm; None: as the plan beside them says.
    Without any, runs at two rates are of two arms. mixed_code: whether runs of different code may share a
    verdict.
    """
    states = {folder: read_state(folder) for folder in folders}
    for folder, state in states.items():
        if not state.config:
            raise ValueError(f'{folder} is not a run: {state.reason}')
    facts = {folder: state.facts for folder, state in states.items()}
    if tuning_seeds is None:
        tuning_seeds = planned_tuning_seeds(facts)
    # These only a pair of runs must share. And runs that differ in nothing else may be about how a
    # run rounds, or about a change of the code.
    but = ('resumed', 'data', *(['learning_rate'] if tuning_seeds else []))
    ignored = (*ROUNDING, 'code') if mixed_code else ROUNDING
    shared = [name for name in SHARED if name not in ignored]
    groups = same_but_seeds(facts, (*but, *ignored))
    if len(groups) < 2:
        groups, ignored = same_but_seeds(facts, but), ()
    if len(groups) < 2:
        raise ValueError('these runs differ in nothing but their seeds: nothing to compare')

    arms, problems, tuning = {}, {}, {}
    for first, runs in groups.items():
        rate, seed = facts[first]['learning_rate'], facts[first]['seed']
        name = arm_name(first, seed)
        if tuning_seeds:
            name = name.removesuffix(f'_lr{rate:g}')
        if name in arms:
            name = first
        if tuning_seeds:
            tuning[name], own = split_tuning(runs, facts, states, tuning_seeds)
            rate = tuning[name]['best']
        else:
            own = by_seed(runs, facts)
        own = {seed: states[run] for seed, run in own.items()}
        # Several runs share a code that was ignored only by chance.
        alike = {fact: value for fact, value in facts[first].items() if fact not in ignored}
        arms[name] = ArmRuns(alike, states[first].model, rate, own)
        for state in own.values():
            if state.kind != 'finished':
                problems[str(state.folder)] = state.reason

    verdicts = verdicts_on(arms, parse_contrasts(contrasts, arms), shared)
    return assemble(title, arms, verdicts, problems, states.values(), tuning)


def planned_tuning_seeds(facts):
    """The seeds of those runs by which the plan beside them has chosen a learning rate."""
    seeds = set()
    for folder in {Path(run).parent for run in facts}:
        if (folder / 'plan.json').exists():
            planned = read_plan(folder / 'plan.json')['plan']['tuning_seeds']
            here = {own['seed'] for run, own in facts.items() if Path(run).parent == folder}
            seeds |= here & {*planned}
    return sorted(seeds)


def split_tuning(runs, facts, states, tuning_seeds):
    """(results.sweep() of an arm's tuning runs, {seed: test run at the best rate}).

    Raises ValueError where a tuning run is missing, and for a test run at another rate.
    """
    by_rate = {}
    for run in runs:
        by_rate.setdefault(facts[run]['learning_rate'], []).append(run)
    trials, tests = {}, {}
    for rate, same in by_rate.items():
        tests[rate] = by_seed(same, facts)
        for seed in tuning_seeds:
            if seed not in tests[rate]:
                raise ValueError(
                    f'{same[0]}: there is no run at this rate with tuning seed {seed}; name all runs but '
                    'those of this rate'
                )
        trials[rate] = losses_of([states[tests[rate].pop(seed)] for seed in tuning_seeds])
    tuned = sweep(trials)
    if tuned['best'] is None:
        raise ValueError(f'{runs[0]}: its arm has no best rate, for a tuning run has not finished')
    at_its_best = tests.pop(tuned['best'])
    for own in tests.values():
        for run in own.values():
            raise ValueError(f'{run}: the best rate of its arm is {tuned["best"]:g}; leave it out')
    return tuned, at_its_best


def arm_name(folder, seed):
    """The name of a run's folder, without the seed at its end."""
    return re.sub(rf'[_-](seed)?0*{seed}$', '', Path(folder).resolve().name)
