"""
Measurements of arms and their runs: cost, step time, curves, skipped steps.

Nothing here judges: steps of one run are not independent of each other, and verdicts come from
verdict.py alone.
"""

import contextlib
import json
import math
import statistics
import sys
import time

import numpy as np
import torch

from bench import Row, attempt, compile_rows_apart
from comparison.plan import decisive_settings
from comparison.verdict import LEAST_SEEDS, t_test
from files import write_json
from machine import Machine
from model import GPT

WARMUP, ROUNDS, SECONDS = 2, 30, 30  # untimed steps, timed ones at most, and time for all of them
POINTS = 150  # of a curve that is drawn

# Settings that decide no result, but how long a step takes.
SPEED = 'device dtype compile attention activation_memory_budget activation_checkpointing'.split()
# Settings that decide results, but not how long a step takes: compare.py chooses them run by run.
SCHEDULE = 'seed learning_rate min_lr max_iters lr_decay_iters'.split()

# --- cost -----------------------------------------------------------------------------------------


def of_model(config):
    """What an arm costs, counted: parameters, training FLOPs a token, bytes of KV cache a token."""
    with torch.device('meta'):
        model = GPT(config)
        cache = model.new_cache(1, config.block_size, torch.float16)
    return {
        'parameters': model.num_params(non_embedding=False),
        'without_embeddings': model.num_params(),
        'flops_per_token': model.flops_per_token(config.block_size),
        'cache_bytes_per_token': cache.nbytes / config.block_size,
    }


def measure_steps(configs, path, gpus=1, code=''):
    """Step times of arms on this machine, measured in turns: {'seconds': {arm: [...]}, ...}.

    configs: {arm: (TrainConfig, GPTConfig)}. gpus: of each training; what one of them computes in a
    step is timed, without the communication between them. code: a text that is another where the
    code is. The result is kept in `path`: where the same arms were measured on the same machine
    with the same code before, it is taken from there.
    """
    settings = next(iter(configs.values()))[0]
    machine = Machine(settings.device, settings.dtype, tf32=True, attention=settings.attention)
    if machine.kind == 'cpu':
        torch.set_num_threads(1)  # as the runs have
    where = {'device': machine.name(), 'dtype': machine.dtype, 'torch': str(torch.__version__)}
    about = {**timed_settings(configs, gpus), **where, 'code': code}
    timing = read_timing(path, configs, gpus)
    if timing and timing['about'] == about:
        return timing

    print(f'measuring the step times of {", ".join(configs)}', file=sys.stderr)
    seconds, problems, peaks = time_steps(configs, machine, gpus)
    one_of_many = f', as one of {gpus} GPUs and without their communication' if gpus > 1 else ''
    timing = {
        'how': f'{machine.name()}, whole steps, measured in turns{one_of_many}',
        'about': about,
        'seconds': seconds,
        'problems': problems,
        'peak_bytes': peaks,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, timing)
    return timing


def read_timing(path, configs, gpus=1):
    """The step times that measure_steps() has kept in `path`, on whatever machine and with whatever
    code; None where they are not those of these arms with these settings."""
    if not path.exists():
        return None
    with contextlib.suppress(ValueError, LookupError, TypeError):  # damaged
        timing = json.loads(path.read_text())
        about = timing['about']
        wanted = timed_settings(configs, gpus)
        if all(about[name] == value for name, value in wanted.items()):
            return timing
    return None


def timed_settings(configs, gpus):
    """What decides how long steps take, besides the machine and the code, as JSON has it."""
    arms = {}
    for name, (settings, config) in configs.items():
        values = decisive_settings(settings, config)
        values |= {key: getattr(settings, key) for key in SPEED}
        arms[name] = {key: value for key, value in values.items() if key not in SCHEDULE}
    return {'arms': arms, 'gpus': gpus}


def time_steps(configs, machine, gpus=1):
    """({arm: [seconds]}, {arm: problem}, {arm: bytes}), by bench.py's rows.

    They take turns, A B C A B C, so that whatever else the machine does hits all arms. If one
    fails, the others are still timed. A step has all micro-batches that one of `gpus` has in
    training: however long it is, the few that are timed here are few beside those of a training.
    """
    compile_rows_apart()
    rows = []
    batches = {}
    for name, (settings, config) in configs.items():
        micro_steps = max(1, settings.gradient_accumulation_steps // gpus)
        row = Row(name, settings, config, micro_steps=micro_steps)
        # An arm may have a dtype and an attention kernel of its own.
        device = str(machine.device)
        own = Machine(device, settings.dtype, tf32=True, attention=settings.attention)
        attempt(row, row.build, own)
        rows.append(row)
        size = (2, settings.batch_size, config.block_size)
        generator = torch.Generator().manual_seed(0)
        batch = torch.randint(config.vocab_size, size, generator=generator).to(machine.device)
        batches[name] = tuple(batch)

    start = time.monotonic()
    for number in range(WARMUP + ROUNDS):
        for row in rows:
            attempt(row, row.step, batches[row.name], number >= WARMUP)
        if number >= WARMUP + 4 and time.monotonic() - start > SECONDS:
            break
    seconds = {row.name: [] if row.problem else row.seconds for row in rows}
    problems = {row.name: row.problem for row in rows if row.problem}
    for row in rows:
        row.drop()
    if machine.kind == 'cuda':
        torch.cuda.empty_cache()  # the trainings that follow need it
    return seconds, problems, {row.name: row.peak for row in rows}


def step_time(timing, name, baseline):
    """{'ms': median step, 'ratio': to the baseline's, its 'quartiles', 'peak_bytes'}; None where unknown."""
    seconds = timing['seconds'] if timing else {}
    own, other = seconds.get(name), seconds.get(baseline)
    result = dict.fromkeys(('ms', 'ratio', 'quartiles', 'peak_bytes'))
    if own:
        result['ms'] = 1e3 * statistics.median(own)
        result['peak_bytes'] = timing.get('peak_bytes', {}).get(name)
    # Runs that were trained one after the other may have met a busy machine and an idle one: without
    # turns, there is no ratio.
    was_in_turns = own and other and 'about' in timing
    if was_in_turns:
        ratios = [a / b for a, b in zip(own, other, strict=True)]
        low, result['ratio'], high = statistics.quantiles(ratios, n=4)
        if name != baseline:
            result['quartiles'] = [low, high]
    return result


# --- from the logs --------------------------------------------------------------------------------


def training(entries):
    return [entry for entry in entries if entry.get('loss') is not None]


def seconds_of(entries):
    """How long a run has trained, by its log; 0 if the log does not say."""
    seconds = 0.0
    tokens = 0
    for entry in training(entries):
        if entry.get('tok_per_s') and entry.get('tokens'):
            seconds += (entry['tokens'] - tokens) / entry['tok_per_s']
            tokens = entry['tokens']
    return seconds


def logged_seconds(states):
    """Median seconds per step of each run."""
    medians = []
    for state in states:
        steps = []
        for entry in training(state.entries):
            if entry.get('tok_per_s') and entry.get('tokens'):
                steps.append(entry['tokens'] / (entry['step'] + 1) / entry['tok_per_s'])
        if steps:
            medians.append(statistics.median(steps))
    return medians


def trouble(states):
    """{'skipped': steps without a finite gradient, 'spikes': of the training loss}, over all runs."""
    skipped, spikes = 0, 0
    for state in states:
        skipped += max((entry.get('skipped') or 0 for entry in state.entries), default=0)
        spikes += len([entry for entry in state.entries if entry.get('spike')])
    return {'skipped': skipped, 'spikes': spikes}


def series(state, name):
    """(steps, values) of what a run logged while training, as arrays."""
    pairs = [(e['step'], e[name]) for e in training(state.entries) if e.get(name) is not None]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps, dtype=float), np.array(values, dtype=float)


def trailing_mean(steps, values, planned):
    """Means over a fiftieth of the `planned` steps, each placed at its last step: it uses no later
    one. A run that is still under way is smoothed as it will be at its end; nothing is left of one
    that has logged less than that.
    """
    if not len(steps):
        return steps, values
    points_of_all_steps = len(steps) * planned / (steps[-1] + 1)
    window = max(1, int(points_of_all_steps / 50))
    if len(steps) < window:
        return steps[:0], values[:0]
    means = np.convolve(values, np.ones(window) / window, mode='valid')
    return steps[window - 1 :], means


def smooth_series(state, name, planned):
    """trailing_mean() of a run's series()."""
    return trailing_mean(*series(state, name), planned)


def logarithmic(steps):
    """Up to POINTS of a run's steps, evenly spaced on a logarithmic axis."""
    if len(steps) <= POINTS:
        return steps
    marks = np.geomspace(steps[0] + 1, steps[-1] + 1, POINTS) - 1
    return np.unique(steps[np.searchsorted(steps, marks).clip(max=len(steps) - 1)])


def relative(arms, table, baseline):
    """{arm: curve} of the training loss minus the baseline's of the same seed, smoothed.

    A curve: {'steps', 'seeds': {seed: [...]}, 'mean', 'half': half width of the 95% t interval or
    None}, and under 'time' and 'flops' the mean at equal cost. Where an arm has another number of
    steps, both are taken at the same share of their schedules.
    """
    base = arms[baseline]
    smooth = {}
    for seed, state in base['states'].items():
        smooth[seed] = smooth_series(state, 'loss', table[baseline]['steps'])
    # A seed that broke off would end the slope of all others.
    slope = BaselineSlope([smooth[seed] for seed in paired_seeds(base['states'], base['states'])])
    curves = {}
    for name, arm in arms.items():
        if name == baseline:
            continue
        stretch = table[baseline]['steps'] / table[name]['steps']
        pairs = {}
        for seed in paired_seeds(arm['states'], base['states']):
            steps, values = smooth_series(arm['states'][seed], 'loss', table[name]['steps'])
            if len(steps) > 1 and len(smooth[seed][0]) > 1:
                pairs[seed] = (steps * stretch, values), smooth[seed]
        if not pairs:
            continue

        # The steps that all seeds have, of the first one's log.
        end = min(min(ours[0][-1], theirs[0][-1]) for ours, theirs in pairs.values())
        begin = max(max(ours[0][0], theirs[0][0]) for ours, theirs in pairs.values())
        grid = next(iter(pairs.values()))[0][0]
        marks = logarithmic(grid[(grid >= begin) & (grid <= end)])
        if len(marks) < 2:
            continue

        each = {}
        for seed, (ours, theirs) in pairs.items():
            each[seed] = np.interp(marks, *ours) - np.interp(marks, *theirs)
        curves[name] = summary(marks, each)
        if stretch == 1:
            curves[name] |= at_equal_cost(marks, curves[name]['mean'], slope, table, name, baseline)
    return curves


def paired_seeds(ours, theirs):
    """The seeds that have finished in both arms; if none has yet, those under way."""
    both = [seed for seed in ours if seed in theirs]
    complete = [s for s in both if ours[s].kind == 'finished' and theirs[s].kind == 'finished']
    return complete or both


def summary(marks, each):
    values = np.array(list(each.values()))
    half = None
    if len(values) >= LEAST_SEEDS:
        half = t_test(values.T)[2].tolist()
    return {
        'steps': marks.tolist(),
        'seeds': {seed: curve.tolist() for seed, curve in each.items()},
        'mean': values.mean(axis=0).tolist(),
        'half': half,
    }


def at_equal_cost(marks, mean, slope, table, name, baseline):
    """The mean curve against the baseline at the step that it reaches for the same time or FLOPs.

    The pairing by batches is kept: the difference at the same step, plus how far the baseline falls
    between that step and the one it reaches, from a line through its mean curve nearby.
    """
    flops = table[name]['flops_per_step'] / table[baseline]['flops_per_step']
    ratios = {'time': table[name]['ratio'], 'flops': flops}
    result = {}
    for kind, ratio in ratios.items():
        if ratio is None:
            continue
        inside = (marks > 0) & (marks * ratio <= slope.end)
        steps = marks[inside]
        change = np.array([slope.at(step) - slope.at(step * ratio) for step in steps])
        values = np.array(mean)[inside] + change
        result[kind] = {'steps': steps.tolist(), 'mean': values.tolist(), 'ratio': ratio}
    return result


class BaselineSlope:
    """The baseline's mean training loss as a smooth function of the step."""

    def __init__(self, curves):
        curves = [curve for curve in curves if len(curve[0]) > 1]
        self.end = min((curve[0][-1] for curve in curves), default=0)
        if curves:
            steps = curves[0][0]
            self.steps = steps[(steps > 0) & (steps <= self.end)]
            self.values = np.mean([np.interp(self.steps, *curve) for curve in curves], axis=0)

    def at(self, step):
        """A line through the points within a fifth of the step, over its logarithm."""
        near = np.abs(np.log(self.steps / step)) <= math.log(1.2)
        if near.sum() < 3:
            return float(np.interp(step, self.steps, self.values))
        slope, level = np.polyfit(np.log(self.steps[near] / step), self.values[near], 1)
        return float(level)


def gradient_norms(arms, table):
    """{arm: {'steps', 'mean'}}: the gradient norm, smoothed, mean over seeds."""
    curves = {}
    for name, arm in arms.items():
        seeds = paired_seeds(arm['states'], arm['states'])
        planned = table[name]['steps']
        each = [smooth_series(arm['states'][seed], 'grad_norm', planned) for seed in seeds]
        each = [curve for curve in each if len(curve[0]) > 1]
        if each:
            end = min(curve[0][-1] for curve in each)
            steps = each[0][0]
            marks = logarithmic(steps[steps <= end])
            mean = np.mean([np.interp(marks, *curve) for curve in each], axis=0)
            curves[name] = {'steps': marks.tolist(), 'mean': mean.tolist()}
    return curves
