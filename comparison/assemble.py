"""
From runs to everything that a report shows: losses, verdicts, costs and curves, as one dict.

compare_plan() is for a plan and its runs, compare_runs() for runs that exist without one.
"""

import itertools
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch

from comparison.curves import measure_curves, smoothing
from comparison.plan import TEXT, all_contrasts, changes, contrast_name, parse_contrasts
from comparison.runs import ROUNDING, by_seed, disagreement, read_state, same_but_seeds
from comparison.verdict import describe, judge, paired
from model import GPT, GPTConfig

# --- the comparison -------------------------------------------------------------------------------


@dataclass
class ArmRuns:
    """An arm and its runs, planned or not."""

    facts: dict  # of one of them
    config: GPTConfig
    rate: float | None  # the learning rate; None while it is not known
    states: dict = field(default_factory=dict)  # {seed: State}

    def finished(self):
        """{seed: State} of the runs that have finished."""
        return {seed: state for seed, state in self.states.items() if state.kind == 'finished'}

    def losses(self):
        """{seed: validation loss} of the runs that have finished."""
        return {seed: state.loss for seed, state in self.finished().items()}


def compare_plan(results, record):
    """Everything the report shows of a planned comparison; record: what plan.json holds."""
    plan = results.plan
    arms = {}
    for name in plan.arms:
        states = {seed: results.state(run) for seed, run in results.test_runs(name).items()}
        own = plan.facts(plan.example(name))
        _, config = plan.own[name]
        arms[name] = ArmRuns(own, config, results.rate(name), states)

    problems = results.problems()
    incomplete = {}
    for pair in plan.contrasts:
        unknown = [problems[name] for name in pair if name in problems]  # their learning rates
        reasons = [*unknown, unfinished(*(arms[name] for name in pair))]
        incomplete[contrast_name(*pair)] = reasons[0]
    states = [results.state(run) for run in results.all_runs()]
    comparison = assemble(plan.folder.name, arms, plan.contrasts, incomplete, problems, states)
    tuning = {arm: results.tune(arm) for arm in plan.arms if plan.rates}
    return comparison | {'plan': record, 'tuning': tuning}


def unfinished(*arms):
    """The first of the arms' runs that has not finished, and why; '' where all have."""
    states = [state for arm in arms for state in arm.states.values()]
    reasons = [f'{state.folder} is {state.reason}' for state in states if state.kind != 'finished']
    return reasons[0] if reasons else ''


def assemble(title, arms, contrasts, incomplete, problems, states):
    """Losses, verdicts, costs and curves of arms, {name: ArmRuns}.

    incomplete: {contrast: why it has no verdict, or ''}. problems: {run or arm: why it has not finished}.
    states: of all runs, also of those that no arm has.
    """
    baseline = next(iter(arms))
    pairs = {}
    for ours, theirs in contrasts:
        pairs[contrast_name(ours, theirs)] = paired(arms[ours].losses(), arms[theirs].losses())
    differences = {}
    for key, losses in pairs.items():
        differences[key] = {seed: ours - theirs for seed, (ours, theirs) in losses.items()}
    verdicts = judge(differences, incomplete)
    for ours, theirs in contrasts:
        key = contrast_name(ours, theirs)
        each = [describe(dict(enumerate(one))) for one in zip(*pairs[key].values(), strict=True)]
        losses = [(numbers['mean'], numbers['sd']) for numbers in each]
        verdicts[key] |= {'ours': ours, 'theirs': theirs, 'losses': losses}
    return {
        'title': title,
        'plan': None,
        'tuning': {},
        'problems': problems,
        'provenance': origins(states),
        'baseline': baseline,
        'arms': {name: arm_numbers(arm, arms[baseline]) for name, arm in arms.items()},
        'contrasts': verdicts,
        'evaluation': describe_evaluation(arms[baseline].facts),
        'curves': relative_curves(arms, baseline),
        'mixing': {name: mixing_weights(arm) for name, arm in arms.items()},
        'seconds': sum(map(seconds_of, states)),
    }


def mixing_weights(arm):
    """{seed: {layer: (sum of the sources' weights, the layer's own weight)}}, as learned at the end.

    Of every logged parameter with a layer's number in its name and at least two weights, of which
    the last is the layer's own.
    """
    weights = {}
    for seed, state in arm.finished().items():
        logged = [entry['mixing'] for entry in state.entries if entry.get('mixing')]
        layers = {}
        for name, values in logged[-1].items() if logged else ():
            number = re.search(r'\.(\d+)(\.|$)', name)
            if number and isinstance(values, list) and len(values) > 1:
                *sources, own = values
                layers[int(number[1])] = [sum(sources), own]
        if layers:
            weights[seed] = dict(sorted(layers.items()))
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
    entries = [entry for state in arm.states.values() for entry in state.entries]
    speeds = [entry['tok_per_s'] for entry in entries if entry.get('tok_per_s')]
    return {
        'changes': changes(facts, base.facts) | rates,
        'rate': arm.rate,
        'steps': facts['max_iters'],
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
    if not rows:
        return 'on the whole validation split'
    return f'on up to {rows:,} sequences of {length:,} tokens per domain'


# What a run was made with.
ORIGINS = 'commit device cpu threads world_size torch dtype compile attention_kernel'.split()


def origins(states):
    """{fact: values}: what the runs were made with, from their config.json and their logs."""
    values = {}
    for state in states:
        # A run that was resumed has one config.json, of its newest part.
        parts = [entry['before'] for entry in state.entries if entry.get('before')]
        for part, name in itertools.product((*parts, state.config), ORIGINS):
            if part.get(name) is not None and part[name] not in values.setdefault(name, []):
                values[name].append(part[name])
    return {name: sorted(each, key=str) for name, each in values.items()}


def relative_curves(arms, baseline):
    """measure_curves() of the finished runs of all arms but the baseline."""
    pairs = {}
    for name in arms:
        both = paired(arms[name].finished(), arms[baseline].finished())
        both = {seed: pair for seed, pair in both.items() if all(x.training() for x in pair)}
        if both and name != baseline:
            pairs[name] = both
    return measure_curves(pairs, smoothing(arms[baseline].facts['max_iters']))


# --- runs that exist ------------------------------------------------------------------------------


def compare_runs(folders, title, contrasts=''):
    """Everything the report shows of runs that exist; contrasts: text, as in --contrasts."""
    states = {}
    for folder in folders:
        state = states[folder] = read_state(folder)
        if not state.config:
            raise ValueError(f'{folder} is not a run: {state.reason}')
    facts = {folder: state.facts for folder, state in states.items()}
    # These only a pair of runs must share. And runs that differ in nothing else may be about how a
    # run rounds.
    but = ('resumed', 'data')
    groups = same_but_seeds(facts, (*but, *ROUNDING))
    if len(groups) < 2:
        groups = same_but_seeds(facts, but)
    if len(groups) < 2:
        raise ValueError('these runs differ in nothing but their seeds: nothing to compare')

    arms, problems = {}, {}
    for first, runs in groups.items():
        own = {seed: states[run] for seed, run in by_seed(runs, facts).items()}
        name = arm_name(first, facts[first]['seed'])
        name = str(first) if name in arms else name
        rate = facts[first]['learning_rate']
        arms[name] = ArmRuns(facts[first], states[first].model, rate, own)
        unfinished = [run for run in runs if states[run].kind != 'finished']
        problems |= {str(run): states[run].reason for run in unfinished}

    pairs = all_contrasts(arms, parse_contrasts(contrasts, arms))
    incomplete = {}
    for pair in pairs:
        reason = why_incomparable(*(arms[name] for name in pair))
        incomplete[contrast_name(*pair)] = reason
    return assemble(title, arms, pairs, incomplete, problems, states.values())


def arm_name(folder, seed):
    """The name of a run's folder, without the seed at its end."""
    return re.sub(rf'[_-](seed)?0*{seed}$', '', Path(folder).resolve().name)


# Facts that two runs of different arms must share, too.
SHARED = (*TEXT, 'max_iters', 'data', 'resumed')


def why_incomparable(ours, theirs):
    """Why two arms of existing runs have no verdict, or ''."""
    reason = unfinished(ours, theirs)
    pairs = list(paired(ours.states, theirs.states).values())
    for pair in pairs:
        # Every pair is alike in how it was resumed; in all else, all runs are.
        reason = reason or disagreement(*pair, only=SHARED)
        reason = reason or disagreement(pairs[0][0], pair[1], ['resumed'], SHARED)
    return reason if pairs else 'they have no seed in common'
