"""
From runs to everything that a report shows: losses, verdicts, domains, costs and curves, as one dict.

compare_plan() is for a plan and its runs, compare_runs() for runs that exist without one.
"""

import itertools
import os
import re
import statistics
from pathlib import Path

from comparison import measures
from comparison.plan import (
    COMPARISONS,
    Run,
    contrast_name,
    parse_contrasts,
    recorded_settings,
    settings_difference,
    text_difference,
)
from comparison.results import different_data
from comparison.runs import (
    BROKEN,
    ROUNDING,
    WAITING,
    changes_on_the_way,
    gpt_config,
    has_file,
    read_state,
    same_value,
)
from comparison.verdict import describe, judge, paired_differences, worth_of_cost

# --- the comparison -------------------------------------------------------------------------------


def compare_plan(plan, results, record, timing):
    """Everything the report shows of a planned comparison.

    record: what plan.json holds. timing: from measures.measure_steps(), or None.
    """
    arms = {name: planned_arm(plan, results, name) for name in plan.arms}
    incomplete = {}
    for ours, theirs in plan.contrasts:
        reason = why_incomplete(arms, ours, theirs, len(plan.options.seeds))
        if reason:
            incomplete[contrast_name(ours, theirs)] = reason
    comparison = assemble(arms, plan.contrasts, incomplete, timing)

    states = {run.name: results.state(run) for run in results.all_runs()}
    sweeps = {}
    if plan.options.rates:
        sweeps = {arm: results.tune(arm) for arm in plan.arms}
    waiting = any(state.kind in WAITING for state in states.values())
    tuned = all(sweep['complete'] for sweep in sweeps.values())
    ladder = ladder_losses(results, arms[plan.baseline])
    steps = arms[plan.baseline]['settings']['max_iters']
    for arm in comparison['arms'].values():
        arm['worth_of_cost'] = None
        # At equal time or FLOPs, an arm has paid already, with its number of steps.
        if arm['ratio'] and plan.options.equal == 'steps':
            budget = arm['ratio'] * arm['steps'] / steps
            arm['worth_of_cost'] = worth_of_cost(budget, ladder, steps)
    return comparison | {
        'title': plan.folder.name,
        'plan': record,
        'tuning': sweeps,
        'equal': plan.options.equal,
        'problems': problems(states),
        'waiting': waiting,  # for runs that may still come by themselves
        'finished': tuned and not waiting,
        'seconds': sum(measures.seconds_of(state.entries) for state in states.values()),
        'provenance': origins(states.values()),
    }


def planned_arm(plan, results, name):
    """What assemble() needs to know of an arm."""
    rate = results.rate(name)
    example = Run(name, rate or 1.0, plan.options.seeds[0])
    runs = results.test_runs(name)
    return {
        'words': ' '.join(plan.arms[name].words),
        'from_files': plan.arms[name].from_files,
        'settings': plan.settings_of(example),
        'rate': rate,
        'no_rate': results.why_no_rate(name) or f'the learning rate of {name} is not known yet',
        'states': {seed: results.state(run) for seed, run in runs.items()},
        'cost': measures.of_model(plan.configs(example)[1]),
    }


def ladder_losses(results, baseline):
    """{steps: mean loss} of the baseline's runs of different lengths that have all finished."""
    states = {baseline['settings']['max_iters']: list(baseline['states'].values())}
    for steps, runs in results.ladder_runs().items():
        states[steps] = [results.state(run) for run in runs.values()]
    ladder = {}
    for steps, each in states.items():
        if each and all(state.kind == 'finished' for state in each):
            ladder[steps] = statistics.fmean(state.loss for state in each)
    return ladder


def why_incomplete(arms, ours, theirs, seeds):
    """Why a contrast has no verdict yet; '' where every test seed of both arms has finished."""
    for name in (ours, theirs):
        if not arms[name]['states']:
            return arms[name]['no_rate']
        for seed, state in arms[name]['states'].items():
            if state.kind in BROKEN:
                return f'{name} with seed {seed} is {state.kind}: {state.detail}'
    complete = 0
    for seed in arms[ours]['states']:
        if all(arms[name]['states'][seed].kind == 'finished' for name in (ours, theirs)):
            complete += 1
    return f'{complete} of {seeds} seeds have finished' if complete < seeds else ''


def assemble(arms, contrasts, incomplete, timing):
    """Losses, verdicts, domains, costs and curves of arms, {name: see planned_arm()}.

    incomplete: {contrast: why it has no verdict}.
    """
    losses = {name: losses_of(arm, 'mean') for name, arm in arms.items()}
    differences = {}
    domains = {}
    for ours, theirs in contrasts:
        key = contrast_name(ours, theirs)
        differences[key] = paired_differences(losses[ours], losses[theirs])
        domains[key] = {}
        for domain in domains_of(arms):
            pair = [losses_of(arms[name], domain) for name in (ours, theirs)]
            domains[key][domain] = describe(paired_differences(*pair))
    verdicts = judge(differences, incomplete)
    for ours, theirs in contrasts:
        verdicts[contrast_name(ours, theirs)] |= {'ours': ours, 'theirs': theirs}

    baseline = next(iter(arms))
    table = {}
    for name, arm in arms.items():
        step_time = measures.step_time(timing, name, baseline)
        table[name] = {**arm_numbers(arm, losses[name]), **step_time}
    return {
        'baseline': baseline,
        'arms': table,
        'contrasts': verdicts,
        'domains': domains,
        'timing': timing,
        'evaluation': describe_evaluation(arms[baseline]['settings']),
        'settings': settings_that_differ(arms),
        'curves': measures.relative(arms, table, baseline),
        'norms': measures.gradient_norms(arms, table),
    }


def losses_of(arm, domain):
    """{seed: validation loss} of the runs that have finished; domain: or 'mean'."""
    losses = {}
    for seed, state in arm['states'].items():
        if domain in state.losses:
            losses[seed] = state.losses[domain]
    return losses


def domains_of(arms):
    names = {}
    for arm in arms.values():
        for state in arm['states'].values():
            names |= state.losses
    return [name for name in names if name != 'mean']


def arm_numbers(arm, losses):
    """An arm's line in the tables."""
    settings = arm['settings']
    values = list(losses.values())
    rows = settings['gradient_accumulation_steps'] * settings['batch_size']
    tokens = rows * settings['block_size']
    return {
        'words': arm['words'],
        'from_files': arm.get('from_files', {}),
        'rate': arm['rate'],
        'steps': settings['max_iters'],
        'tokens_per_step': tokens,
        'flops_per_step': arm['cost']['flops_per_token'] * tokens,
        'losses': losses,
        'mean': statistics.fmean(values) if values else None,
        'sd': statistics.stdev(values) if len(values) > 1 else None,
        'cost': arm['cost'],
        **measures.trouble(arm['states'].values()),
    }


def settings_that_differ(arms):
    """{setting: {arm: value}}; None for an arm without a setting that a fork has added."""
    rates_are_known = all(arm['rate'] is not None for arm in arms.values())
    names = set().union(*(arm['settings'] for arm in arms.values())) - {'seed'}
    if not rates_are_known:
        names -= {'learning_rate', 'min_lr'}
    result = {}
    for name in sorted(names):
        values = {arm: data['settings'].get(name) for arm, data in arms.items()}
        first = next(iter(values.values()))
        if not all(same_value(value, first) for value in values.values()):
            result[name] = values
    return result


def describe_evaluation(settings):
    iters = settings['eval_iters']
    if not iters:
        return 'on the whole validation split'
    rows = iters * settings['batch_size']
    length = settings['block_size']
    return f'on up to {rows:,} sequences of {length:,} tokens per domain (eval_iters={iters})'


def problems(states):
    """{run: what is wrong with it}, for those that will not simply finish."""
    texts = {}
    for name, state in states.items():
        if state.kind in BROKEN:
            texts[name] = f'{state.kind}: {state.detail}'
    return texts


# What a run was made with.
ORIGINS = 'commit device cpu threads world_size torch load dtype compile attention_kernel'.split()


def origins(states):
    """{fact: values}: what the runs were made with, from their config.json and their logs."""
    facts = {}
    for state in states:
        # A run that was resumed has one config.json, of its newest part.
        parts = [entry['before'] for entry in state.entries if entry.get('before')]
        for part in (*parts, state.config):
            for name in ORIGINS:
                value = part.get(name)
                if value is not None and value not in facts.setdefault(name, []):
                    facts[name].append(value)
    return {name: sorted(values, key=str) for name, values in facts.items()}


# --- runs that exist ------------------------------------------------------------------------------


def group_runs(folders):
    """Group runs whose settings differ only in the seed: {arm: {'settings', 'states': [State]}}.

    Among the settings is `origin`: scratch, or whose weights a run began with.
    """
    states = []
    for folder in folders:
        if not has_file(folder, 'log.jsonl'):
            raise FileNotFoundError(f'{folder} is not a run: it has no log.jsonl')
        state = read_state(Path(folder))
        if not state.config:
            raise ValueError(f'{folder}: {state.detail}')
        states.append(state)

    groups = grouped(states)
    if len(groups) < 2:
        # Then they may be about how a run rounds.
        groups = grouped(states, ROUNDING)
    if len(groups) < 2:
        raise ValueError('these runs differ in nothing but their seeds: nothing to compare')
    arms = {}
    for group in groups:
        arms[group_name(group['states'], arms)] = group
    return arms


def grouped(states, more=()):
    """[{'settings', 'states'}] of States with the same settings but the seed; more: names of settings
    that count, too."""
    groups = []
    for state in states:
        settings = recorded_settings(state.config) | {name: state.config.get(name) for name in more}
        del settings['seed']
        for group in groups:
            if settings_difference(group['settings'], settings) is None:
                break
        else:
            group = {'settings': settings, 'states': []}
            groups.append(group)
        group['states'].append(state)
    return groups


def group_name(states, others):
    """What the names of a group's folders have in common, without the seed at their end."""
    names = [state.folder.resolve().name for state in states]
    common = os.path.commonprefix([name_without_seed(state) for state in states])
    common = re.sub(r'[_-](seed|s)?$', '', common)
    for choice in (common, names[0], str(states[0].folder)):
        if choice and choice not in others:
            return choice
    return f'{names[0]} {len(others) + 1}'


def name_without_seed(state):
    """The name of a run's folder: window_512 of window_512_seed3. Another number is no seed."""
    name = state.folder.resolve().name
    seed = state.config['seed']
    return re.sub(rf'([_-]?seed|[_-]s?|)(?<!\d)0*{seed}$', '', name)


def compare_runs(options):
    """Everything the report shows of runs that exist; options: a CompareConfig."""
    groups = group_runs(options.runs)
    base = next(iter(groups.values()))['settings']
    arms = {name: existing_arm(group, base) for name, group in groups.items()}
    contrasts = parse_contrasts(options.contrasts, arms)
    incomplete = {}
    for ours, theirs in contrasts:
        reason = why_incomparable(arms, ours, theirs)
        if reason:
            incomplete[contrast_name(ours, theirs)] = reason

    seconds = {}
    for name, arm in arms.items():
        seconds[name] = measures.logged_seconds(arm['states'].values())
    timing = {'how': 'as logged in each run, not in turns: no ratios', 'seconds': seconds}
    states = [state for group in groups.values() for state in group['states']]
    return assemble(arms, contrasts, incomplete, timing) | {
        'title': default_title(options),
        'plan': None,
        'tuning': {},
        'equal': 'steps',
        'problems': existing_problems(groups, arms),
        'finished': True,
        'seconds': sum(measures.seconds_of(state.entries) for state in states),
        'provenance': origins(states),
    }


def existing_arm(group, base):
    """What assemble() needs to know of an arm; see planned_arm(). base: the baseline's settings."""
    settings, states = group['settings'], {}
    for state in group['states']:
        states.setdefault(state.config['seed'], state)
    words = []
    for name, value in settings.items():
        if not same_value(value, base[name]):
            words.append(f'{name}={value}')
    return {
        'words': ' '.join(words),
        'settings': settings,
        'rate': settings['learning_rate'],
        'states': states,
        'cost': measures.of_model(gpt_config(settings, group['states'][0].folder)),
    }


def existing_problems(groups, arms):
    """{folder: what is wrong with it}: those of problems(), unfinished runs, and runs left out."""
    texts = {}
    for name, group in groups.items():
        for state in group['states']:
            folder, seed = str(state.folder), state.config['seed']
            texts |= problems({folder: state})
            if state.kind == 'unfinished':
                texts[folder] = f'unfinished: {state.detail}'
            if arms[name]['states'][seed] is not state:
                texts[folder] = f'left out: another run of {name} has seed {seed}, too'
    return texts


def why_incomparable(arms, ours, theirs):
    """Why two groups of runs have no verdict, or ''."""
    a, b = arms[ours]['settings'], arms[theirs]['settings']
    difference = text_difference(a, b)
    if difference:
        name, value, other = difference
        return f'their losses are those of different texts: {name}={value!r} and {other!r}'
    if a['max_iters'] != b['max_iters']:
        return f'they differ in max_iters: {a["max_iters"]} and {b["max_iters"]}'
    common = arms[ours]['states'].keys() & arms[theirs]['states'].keys()
    if not common:
        return 'they have no seed in common'
    pairs = [[arms[name]['states'][seed] for name in (ours, theirs)] for seed in common]
    for pair in pairs:
        for state in pair:
            if state.kind != 'finished':
                return f'{state.folder} is {state.kind}: {state.detail}'
        reason = why_not_alike(*pair)
        if reason:
            return reason
    return different_data(itertools.chain(*pairs))


def why_not_alike(ours, theirs):
    """How the settings of one of two runs changed on the way, and not the other's alike; or ''."""
    changes = changes_on_the_way(ours.entries)
    others = changes_on_the_way(theirs.entries)
    if changes == others:
        return ''
    state, words = (ours, changes) if changes else (theirs, others)
    return f'{state.folder} was resumed at {words[0]}'


def folder_of_runs(options):
    """Where the report of runs that exist is written; options: a CompareConfig."""
    return COMPARISONS / default_title(options)


def default_title(options):
    if options.name:
        return options.name
    parents = {Path(run).resolve().parent.name for run in options.runs}
    return f'{parents.pop()}_runs' if len(parents) == 1 else 'runs'
