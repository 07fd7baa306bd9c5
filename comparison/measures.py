"""
Measurements of arms and their runs: cost, step time, curves, mixing weights, skipped steps.

Nothing here judges: steps of one run are not independent of each other, and verdicts come from
verdict.py alone.
"""

import json
import re
import statistics
import sys
import time

import torch

from bench import Row, attempt, compile_rows_apart
from comparison.curves import measure_curves, smoothing
from comparison.verdict import paired
from lib.files import write_json
from lib.machine import Machine
from model import GPT

WARMUP, ROUNDS, SECONDS = 2, 30, 30  # untimed steps, timed ones at most, and time for all of them

# --- cost -----------------------------------------------------------------------------------------


def of_model(config):
    """What an arm costs, counted: parameters, training FLOPs a token, bytes of KV cache a token."""
    model = GPT.without_weights(config)
    cache = model.new_cache(1, config.block_size, torch.float16)
    return {
        'parameters': model.num_params(non_embedding=False),
        'flops_per_token': model.flops_per_token(config.block_size),
        'cache_bytes_per_token': cache.nbytes / config.block_size,
    }


def read_times(plan):
    """The step times that measure_times() has kept; None where there are none of these arms."""
    path = plan.folder / 'timing.json'
    try:
        timing = json.loads(path.read_text())
        return timing if list(timing['seconds']) == list(plan.arms) else None
    except (OSError, ValueError, LookupError, TypeError):  # missing, or damaged
        return None


def measure_times(plan, gpus=1):
    """Step times of a plan's arms on this machine, measured in turns and kept in timing.json.

    {'how', 'seconds': {arm: [...]}, 'problems': {arm: ...}, 'peak_bytes': {arm: ...}}; gpus: of each
    training. What one of them computes in a step is timed, without the communication between them.
    """
    settings = plan.settings
    machine = Machine(settings.device, settings.dtype, tf32=True)
    if machine.kind == 'cpu':
        torch.set_num_threads(1)  # as the runs have
    print(f'measuring the step times of {", ".join(plan.arms)}', file=sys.stderr)
    rows = time_steps(plan, machine, gpus)
    one_of_many = f', as one of {gpus} GPUs and without their communication' if gpus > 1 else ''
    timing = {
        'how': f'{machine.name()}, whole steps, measured in turns{one_of_many}',
        'seconds': {row.name: [] if row.problem else row.seconds for row in rows},
        'problems': {row.name: row.problem for row in rows if row.problem},
        'peak_bytes': {row.name: row.peak for row in rows},
        'in_turns': True,
    }
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_json(plan.folder / 'timing.json', timing)
    return timing


def time_steps(plan, machine, gpus):
    """bench.py's rows, one for each arm, after their steps.

    They take turns, A B C A B C, so that whatever else the machine does hits all arms. If one
    fails, the others are still timed. A step has all micro-batches that one of `gpus` has in
    training: however long it is, the few that are timed here are few beside those of a training.
    """
    compile_rows_apart()
    rows, batches = [], []
    for arm, (settings, config) in plan.own.items():
        micro_steps = max(1, settings.gradient_accumulation_steps // gpus)
        row = Row(arm, settings, config, micro_steps=micro_steps)
        # An arm may have a dtype of its own.
        own = Machine(str(machine.device), settings.dtype, tf32=True)
        attempt(row, row.build, own)
        rows.append(row)
        size = (2, settings.batch_size, config.block_size)
        generator = torch.Generator().manual_seed(0)
        batch = torch.randint(config.vocab_size, size, generator=generator)
        batches.append(tuple(batch.to(machine.device)))

    start = time.monotonic()
    for number in range(WARMUP + ROUNDS):
        for row, batch in zip(rows, batches, strict=True):
            attempt(row, row.step, batch, number >= WARMUP)
        if number >= WARMUP + 4 and time.monotonic() - start > SECONDS:
            break
    for row in rows:
        row.drop()
    if machine.kind == 'cuda':
        torch.cuda.empty_cache()  # the trainings that follow need it
    return rows


def step_time(timing, name, baseline):
    """{'ms': median step, 'ratio': to the baseline's, its 'quartiles', 'peak_bytes'}; None where unknown."""
    result = dict.fromkeys(('ms', 'ratio', 'quartiles', 'peak_bytes'))
    own, other = (timing['seconds'].get(arm) if timing else None for arm in (name, baseline))
    if own:
        result['ms'] = 1e3 * statistics.median(own)
        result['peak_bytes'] = timing['peak_bytes'].get(name)
    if own and other and timing['in_turns']:
        ratios = [a / b for a, b in zip(own, other, strict=True)]
        low, result['ratio'], high = statistics.quantiles(ratios, n=4)
        result['quartiles'] = [low, high] if name != baseline else None
    return result


# --- from the logs --------------------------------------------------------------------------------


def seconds_of(state):
    """How long a run has trained, and been evaluated where its log says so; 0 if the log does not say."""
    seconds, tokens = 0.0, 0
    for entry in state.entries:
        if 'val' in entry:
            seconds += entry.get('seconds') or 0
        elif entry.get('tok_per_s') and entry.get('tokens'):
            seconds += (entry['tokens'] - tokens) / entry['tok_per_s']
            tokens = entry['tokens']
    return seconds


def logged_times(arms):
    """What measure_times() gives, from the logs of runs that exist.

    Those runs may have met a busy machine and an idle one: without turns, there is no ratio.
    """
    seconds = {}
    for name, arm in arms.items():
        entries = [entry for state in arm.states.values() for entry in state.entries]
        speeds = [entry['tok_per_s'] for entry in entries if entry.get('tok_per_s')]
        seconds[name] = [arm.tokens_per_step / speed for speed in speeds]
    how = 'as logged in each run, not in turns: no ratios'
    return {'how': how, 'seconds': seconds, 'problems': {}, 'peak_bytes': {}, 'in_turns': False}


def trouble(states):
    """{'skipped': steps without a finite gradient, 'spikes': of the training loss}, over all runs."""
    skipped, spikes = 0, 0
    for state in states:
        skipped += max((entry.get('skipped') or 0 for entry in state.entries), default=0)
        spikes += len([entry for entry in state.entries if entry.get('spike')])
    return {'skipped': skipped, 'spikes': spikes}


def relative_curves(arms, baseline):
    """measure_curves() of the finished runs of all arms but the baseline."""
    finished = {}
    for name, arm in arms.items():
        states = arm.states.items()
        finished[name] = {s: x for s, x in states if x.kind == 'finished' and x.training()}
    zero = finished.pop(baseline)
    pairs = {name: paired(own, zero) for name, own in finished.items() if own.keys() & zero.keys()}
    return measure_curves(pairs, smoothing(arms[baseline].facts['max_iters']))


def mixing_weights(arm):
    """{seed: {layer: (sum of the sources' weights, the layer's own weight)}}, as learned at the end.

    Of every logged parameter with a layer's number in its name and at least two weights, of which
    the last is the layer's own.
    """
    weights = {}
    for seed, state in arm.states.items():
        logged = [entry['mixing'] for entry in state.entries if entry.get('mixing')]
        layers = {}
        for name, values in logged[-1].items() if logged else ():
            number = re.search(r'\.(\d+)(\.|$)', name)
            if number and isinstance(values, list) and len(values) > 1:
                *sources, own = values
                layers[int(number[1])] = [sum(sources), own]
        if layers and state.kind == 'finished':
            weights[seed] = dict(sorted(layers.items()))
    return weights
