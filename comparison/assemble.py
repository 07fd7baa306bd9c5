"""
From runs to everything that a report shows: losses, verdicts, domains, costs and curves, as one dict.

compare_plan() is for a plan and its runs, compare_runs() for runs that exist without one.
"""

import itertools
import os
import re
import statistics
from dataclasses import dataclass, field

from comparison import measures
from comparison.plan import TEXT, all_contrasts, changes, contrast_name, parse_contrasts
from comparison.runs import ROUNDING, difference, gpt_config, read_state, same_but_seeds
from comparison.verdict import describe, judge, paired, paired_differences
from model import GPTConfig

# --- the comparison -------------------------------------------------------------------------------


@dataclass
class ArmRuns:
    """An arm and its runs, planned or not."""

    facts: dict  # of one of them
    config: GPTConfig
    rate: float | None  # the learning rate; None while it is not known
    states: dict = field(default_factory=dict)  # {seed: State}

    @property
    def tokens_per_step(self):
        rows = self.facts['gradient_accumulation_steps'] * self.facts['batch_size']
        return rows * self.facts['block_size']

    def losses(self, domain='mean'):
        """{seed: validation loss} of the runs that have finished."""
        return {s: x.losses[domain] for s, x in self.states.items() if domain in x.losses}


def compare_plan(results, record, timing):
    """Everything the report shows of a planned comparison.

    record: what plan.json holds. timing: from measures.measure_times(), or None.
    """
    plan = results.plan
    arms = {}
    for name in plan.arms:
        rate = results.rate(name)
        states = {seed: results.state(run) for seed, run in results.test_runs(name).items()}
        own = plan.facts(plan.example(name))
        arms[name] = ArmRuns(own, plan.own[name][1], rate, states)

    problems = results.problems()
    incomplete = {}
    for pair in plan.contrasts:
        runs = [run for arm in pair for run in results.test_runs(arm).values()]
        reasons = [problems[name] for name in pair if name in problems]
        reasons += [f'{run.name} is {problems[run.name]}' for run in runs if run.name in problems]
        if reasons:
            incomplete[contrast_name(*pair)] = reasons[0]
    states = [results.state(run) for run in results.all_runs()]
    title = plan.folder.name
    comparison = assemble(title, arms, plan.contrasts, incomplete, timing, problems, states)
    tuning = {arm: results.tune(arm) for arm in plan.arms if plan.rates}
    return comparison | {'plan': record, 'tuning': tuning, 'replaced': plan.replaced}


def assemble(title, arms, contrasts, incomplete, timing, problems, states):
    """Losses, verdicts, domains, costs and curves of arms, {name: ArmRuns}.

    incomplete: {contrast: why it has no verdict}. problems: {run or arm: why it has not finished}.
    states: of all runs, also of those that no arm has.
    """
    baseline = next(iter(arms))
    differences, domains = {}, {}
    finished = [state for arm in arms.values() for state in arm.states.values()]
    names = dict.fromkeys(name for state in finished for name in state.losses)
    for ours, theirs in contrasts:
        key = contrast_name(ours, theirs)
        by_domain = {}
        for domain in names:
            pair = (arms[name].losses(domain) for name in (ours, theirs))
            by_domain[domain] = paired_differences(*pair)
        differences[key] = by_domain.pop('mean', {})
        domains[key] = {domain: describe(values) for domain, values in by_domain.items()}
    verdicts = judge(differences, incomplete)
    for ours, theirs in contrasts:
        verdict = verdicts[contrast_name(ours, theirs)]
        pairs = paired(arms[ours].losses(), arms[theirs].losses()).values()
        losses = [mean_and_sd(each) for each in zip(*pairs, strict=True)]
        verdict |= {'ours': ours, 'theirs': theirs, 'losses': losses}
    table = {name: arm_numbers(arm, arms[baseline]) for name, arm in arms.items()}
    for name in table:
        table[name] |= measures.step_time(timing, name, baseline)
    return {
        'title': title,
        'plan': None,
        'tuning': {},
        'replaced': None,
        'problems': problems,
        'seconds': sum(map(measures.seconds_of, states)),
        'provenance': origins(states),
        'baseline': baseline,
        'arms': table,
        'contrasts': verdicts,
        'domains': domains,
        'timing': timing,
        'evaluation': describe_evaluation(arms[baseline].facts),
        'curves': measures.relative_curves(arms, baseline),
        'mixing': {name: measures.mixing_weights(arm) for name, arm in arms.items()},
    }


def arm_numbers(arm, base):
    """An arm's line in the tables."""
    losses = arm.losses()
    mean, sd = mean_and_sd(losses.values())
    cost = measures.of_model(arm.config)
    rates = {'learning_rate': arm.rate} if arm.rate not in (base.rate, None) else {}
    return {
        'changes': changes(arm.facts, base.facts) | rates,
        'rate': arm.rate,
        'steps': arm.facts['max_iters'],
        'tokens_per_step': arm.tokens_per_step,
        'flops_per_step': cost['flops_per_token'] * arm.tokens_per_step,
        'losses': losses,
        'mean': mean,
        'sd': sd,
        'cost': cost,
        **measures.trouble(arm.states.values()),
    }


def mean_and_sd(values):
    """(mean, standard deviation), each None where there are too few values."""
    values = list(values)
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def describe_evaluation(own):
    rows, length = own['eval_iters * batch_size'], own['block_size']
    if not rows:
        return 'on the whole validation split'
    return f'on up to {rows:,} sequences of {length:,} tokens per domain'


# What a run was made with.
ORIGINS = 'commit device cpu threads world_size torch load dtype compile attention_kernel'.split()


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


# --- runs that exist ------------------------------------------------------------------------------


def compare_runs(folders, title, contrasts=''):
    """Everything the report shows of runs that exist; contrasts: text, as in --contrasts."""
    states = []
    for folder in folders:
        states.append(read_state(folder))
        if not states[-1].config:
            raise ValueError(f'{folder} is not a run: {states[-1].detail or "it has no log.jsonl"}')
    # Runs that differ in nothing else may be about how a run rounds.
    groups = group_runs(states, ROUNDING)
    if len(groups) < 2:
        groups = group_runs(states)
    if len(groups) < 2:
        raise ValueError('these runs differ in nothing but their seeds: nothing to compare')

    arms, problems = {}, {}
    for group in groups:
        first = group[0]
        config = gpt_config(first.config, first.folder)
        name = group_name(group, arms)
        arm = arms[name] = ArmRuns(first.facts, config, first.facts['learning_rate'])
        for state in group:
            if state.kind != 'finished':
                problems[str(state.folder)] = f'{state.kind}: {state.detail}'
            if arm.states.setdefault(state.config['seed'], state) is not state:
                seed = state.config['seed']
                text = f'left out: another run of {name} has seed {seed}, too'
                problems[str(state.folder)] = text

    pairs = all_contrasts(arms, parse_contrasts(contrasts, arms))
    incomplete = {}
    for ours, theirs in pairs:
        reason = why_incomparable(arms[ours], arms[theirs])
        if reason:
            incomplete[contrast_name(ours, theirs)] = reason
    timing = measures.logged_times(arms)
    return assemble(title, arms, pairs, incomplete, timing, problems, states)


def group_runs(states, but=()):
    """[[State]] of the same facts, but for their seeds and what only a pair of them must share."""
    facts = {number: state.facts for number, state in enumerate(states)}
    groups = same_but_seeds(facts, ('resumed', 'data', *but)).values()
    return [[states[number] for number in group] for group in groups]


def group_name(states, others):
    """What the names of a group's folders have in common, without the seed at their end."""
    names = [state.folder.resolve().name for state in states]
    bare = []
    for name, state in zip(names, states, strict=True):
        # window_512 of window_512_seed3; another number is no seed.
        seed = rf'([_-]?seed|[_-]s?|)(?<!\d)0*{state.config["seed"]}$'
        bare.append(re.sub(seed, '', name))
    common = re.sub(r'[_-](seed|s)?$', '', os.path.commonprefix(bare))
    for choice in (common, names[0], str(states[0].folder)):
        if choice and choice not in others:
            return choice
    return f'{names[0]} {len(others) + 1}'


# Facts that two runs of different arms must share, too.
SHARED = (*TEXT, 'max_iters', 'data', 'resumed')


def why_incomparable(ours, theirs):
    """Why two arms of existing runs have no verdict, or ''."""
    pairs = list(paired(ours.states, theirs.states).values())
    for pair in pairs:
        for state in pair:
            if state.kind != 'finished':
                return f'{state.folder} is {state.kind}: {state.detail}'
        one, other = (state.facts for state in pair)
        # Every pair is alike in how it was resumed; in all else, all runs are.
        found = difference(one, other, only=SHARED)
        found = found or difference(pairs[0][0].facts, other, ['resumed'], SHARED)
        if found:
            folders = ' and '.join(str(state.folder) for state in pair)
            name, value, other_value = found
            return f'{folders} differ in {name}: {value!r} and {other_value!r}'
    return '' if pairs else 'they have no seed in common'
