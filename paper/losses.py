"""
What the paper's figures show of training: numbers from the logs of runs.

A run is the folder that train.py wrote. Losses are in nats per token.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from model import GPT
from rundir import gpt_config, read_entries, read_losses, read_run_config


def model_config(run, *needed):
    """The GPTConfig of a run's config.json, which must say what is `needed`."""
    return gpt_config(read_run_config(run, *needed), run)


# --- relative to a baseline -----------------------------------------------------------------------


def differences(baseline, run, window):
    """(steps, loss - baseline's loss) of the steps that both have; there must be `window` of them."""
    base, losses = read_losses(baseline), read_losses(run)
    steps = sorted(losses.keys() & base.keys())
    if len(steps) < points_in(steps, window):
        raise ValueError(
            f'{run} and {baseline} have {len(steps)} steps in common, fewer than --window={window}'
        )
    return np.array(steps), np.array([losses[step] - base[step] for step in steps])


def points_in(steps, window):
    """How many of the logged steps lie in `window` steps: fewer where not every step was logged."""
    if len(steps) < 2:
        return window
    interval = int(np.median(np.diff(steps)))
    return max(1, window // interval)


def relative(baseline, run, window):
    """(steps, differences()), each a mean over `window` steps, as far as they were logged.

    The mean belongs to the last of them: a point uses no later steps.
    """
    steps, difference = differences(baseline, run, window)
    points = points_in(steps, window)
    return steps[points - 1 :], running_mean(difference, points)


def running_mean(values, window):
    return np.convolve(values, np.ones(window) / window, mode='valid')


def final_difference(baseline, run, window):
    """The mean of differences() over the last `window` steps."""
    steps, difference = differences(baseline, run, window)
    return float(difference[-points_in(steps, window) :].mean())


EARLY_POINTS = 2  # with only the first step logged, it would compare untrained models


def early_difference(baseline, run):
    """The mean of differences() over the first tenth of the steps."""
    steps, difference = differences(baseline, run, 1)
    is_early = steps < (steps[-1] + 1) / 10
    if is_early.sum() < EARLY_POINTS:
        raise ValueError(
            f'{run} and {baseline} have logged {is_early.sum()} steps of their first tenth in common; '
            f'an early difference takes {EARLY_POINTS}'
        )
    return float(difference[is_early].mean())


# --- overtaken, or not ----------------------------------------------------------------------------

# A run is overtaken if two witnesses say so: its mean difference to the baseline over its last steps
# is above 0, with its whole 95% interval, and so is the difference of the validation losses.
TAIL = 2000  # steps of that mean; of a shorter run, its last half
# The blocks into which these steps are cut must outlast the memory of the noise. Those of 2,000 steps
# have 200 steps. Those of a short run may be too short, and its interval then too narrow.
BLOCKS = 10
RESAMPLES = 2000  # of the bootstrap
FIT = 1000  # points through which a crossing is predicted, the paper's number; or the last half
HORIZON = 2  # a crossing is predicted no later than at twice the steps of the run


@dataclass
class Crossing:
    """Whether a run is overtaken by its baseline, and when.

    overtaken    behind at the end, after it was ahead: `step` is the first step behind
    never ahead  behind at the end, and in sum never ahead before
    predicted    not overtaken, but a line through the last differences crosses 0 at `step`
    not overtaken
    """

    kind: str
    step: float | None
    steps: int  # that both runs have taken
    mean: float  # of the last differences, in nats
    interval: tuple | None  # the 95% interval of that mean; None: too few steps for one
    validation: float | None  # validation loss minus the baseline's at the end; None: not evaluated


def crossing(baseline, run, window):
    """The Crossing of a run; its step is read from differences that are means over `window` steps."""
    steps, difference = differences(baseline, run, window)
    last = steps[-1]
    first = last - tail_of(last + 1)
    tail = difference[steps > first]
    interval = block_interval(tail, BLOCKS)
    validation = validation_difference(baseline, run, first)

    smooth_steps, smooth = relative(baseline, run, window)
    kind, step = 'not overtaken', None
    is_behind = interval is not None and interval[0] > 0
    if is_behind and validation is not None and validation > 0:
        step = first_step_behind(smooth_steps, smooth)
        kind = 'never ahead' if step is None else 'overtaken'
    else:
        step = predicted_step(smooth_steps, smooth)
        if step is not None:
            kind = 'predicted'
    return Crossing(kind, step, int(last) + 1, float(tail.mean()), interval, validation)


def tail_of(steps):
    """How many of its last steps decide whether a run of so many is overtaken."""
    return min(TAIL, steps // 2)


def block_interval(values, blocks):
    """The 95% interval (low, high) of the mean of an autocorrelated series; None if it is too short.

    Whole blocks are drawn with replacement, so that what hangs together stays together. A few blocks
    are a small sample: an error is measured in the standard errors of its own resample (bootstrap-t),
    or the interval would be too narrow. The same series always has the same interval.
    """
    if len(values) < 2 * blocks:
        return None
    means = np.array([block.mean() for block in np.array_split(values, blocks)])
    center, error = means.mean(), standard_error(means)
    drawn = means[np.random.default_rng(0).integers(blocks, size=(RESAMPLES, blocks))]
    errors = standard_error(drawn)
    # A resample that drew one block again and again has no error of its own.
    is_usable = errors > 0
    if not is_usable.any():
        return float(center), float(center)
    t = (drawn.mean(axis=1) - center)[is_usable] / errors[is_usable]
    low, high = np.quantile(t, [0.025, 0.975])
    return float(center - high * error), float(center - low * error)


def standard_error(means):
    """Of the mean over the last dimension."""
    return means.std(axis=-1, ddof=1) / np.sqrt(means.shape[-1])


def validation_difference(baseline, run, after):
    """Validation loss minus the baseline's, at the last step where both have one.

    None where that step does not come after step `after`.
    """
    base, losses = validation_losses(baseline), validation_losses(run)
    steps = [step for step in losses.keys() & base.keys() if step > after]
    if not steps:
        return None
    return losses[max(steps)] - base[max(steps)]


def validation_losses(run):
    """{step: mean of the domains' validation losses}, where it is finite."""
    result = {}
    for entry in read_entries(run):
        loss = entry.get('val', {}).get('mean')
        if loss is not None and np.isfinite(loss):
            result[entry['step']] = loss
    return result


def first_step_behind(steps, difference):
    """The step from which on a run is behind, None where it was never ahead.

    It follows the step where the sum of the differences is lowest, which a few points beyond 0 do not
    move.
    """
    lead = np.cumsum(difference)
    last = int(lead.argmin())
    if lead[last] >= 0:
        return None
    return int(steps[min(last + 1, len(steps) - 1)])


def predicted_step(steps, difference):
    """Where a line through the last FIT points, or the last half if that is fewer, crosses 0.

    None where it does not rise, crosses 0 in the past, or only beyond HORIZON.
    """
    points = min(FIT, max(2, len(steps) // 2))
    slope, intercept = np.polyfit(steps[-points:], difference[-points:], 1)
    if slope <= 0:
        return None
    step = float(-intercept / slope)
    return step if steps[-1] < step <= HORIZON * (steps[-1] + 1) else None


def tokens_per_step(run):
    names = ('gradient_accumulation_steps', 'batch_size', 'block_size')
    config = read_run_config(run, *names)
    return math.prod(config[name] for name in names)


# --- loss against size ----------------------------------------------------------------------------


def last_loss(run, window):
    """The mean training loss of the last `window` steps, as far as they were logged."""
    losses = read_losses(run)
    points = points_in(list(losses), window)
    if len(losses) < points:
        raise ValueError(f'{run} has {len(losses)} logged steps, fewer than --window={window}')
    return float(np.mean(list(losses.values())[-points:]))


def parameters_of(run):
    """All weights of a run's model, from its config.json."""
    config = model_config(run, 'n_layer', 'n_head', 'n_embd', 'vocab_size')
    with torch.device('meta'):
        return GPT(config).num_params(non_embedding=False)


MIN_POINTS = 3  # of a fit: a curve of two parameters goes through any two points


def power_law(parameters, losses):
    """(a, b) of loss = a * parameters ** -b, by least squares of the logarithms."""
    slope, intercept = np.polyfit(np.log(parameters), np.log(losses), 1)
    return float(np.exp(intercept)), float(-slope)


def why_no_law(parameters, losses):
    """Why these points have no power law that is to be believed; '' if they have one."""
    if len(set(parameters)) < MIN_POINTS:
        return f'fewer than {MIN_POINTS} sizes'
    _, exponent = power_law(parameters, losses)
    return '' if exponent > 0 else 'loss does not fall with size'


def falls_at_every_size(parameters, losses):
    """Whether each larger model has the lower loss; both from small to large."""
    points = zip(parameters, losses, strict=True)
    return all(later < earlier for (n, earlier), (m, later) in itertools.pairwise(points) if m > n)


def tokens_saved(baseline, run, window):
    """The share of its steps that `run` can do without and still reach the baseline's last loss.

    The paper's way, on one run's middle: it understates the saving, because the learning rate has not
    decayed yet where the run first reaches that loss. None where it does not reach it.
    """
    target = last_loss(baseline, window)
    losses = read_losses(run)
    points = points_in(list(losses), window)
    hits = np.flatnonzero(running_mean(list(losses.values()), points) <= target)
    if not len(hits):
        return None
    return 1 - (hits[0] + points) / len(losses)


def savings(models, name, window):
    """What a model saves at the loss of the largest vanilla model.

    models: {name: {'parameters', 'loss', 'runs'}}, each list from small to large. Returns shares, None
    where they cannot be read, and under 'why' the reason.
    """
    base, other = models['vanilla'], models[name]
    nothing = {'parameters_saved': None, 'tokens_saved': None}
    if len(set(base['parameters'])) < 2:
        return {**nothing, 'why': 'vanilla has a single size'}
    if not falls_at_every_size(base['parameters'], base['loss']):
        # Then the largest vanilla model is no reference.
        return {**nothing, 'why': "vanilla's loss does not fall at every size"}

    parameters, why = parameters_saved(base, other, name)
    tokens = tokens_saved(base['runs'][-1], other['runs'][-1], window)
    reasons = [why] if why else []
    if tokens is None:
        reasons.append(f'the largest {name} does not reach that loss')
    return {'parameters_saved': parameters, 'tokens_saved': tokens, 'why': '; '.join(reasons)}


def parameters_saved(base, other, name):
    """(share or None, why there is none)"""
    why = why_no_law(other['parameters'], other['loss'])
    if why:
        return None, f'{name}: {why}'
    a, b = power_law(other['parameters'], other['loss'])
    sizes = np.log(other['parameters'])
    needed = np.log(a / base['loss'][-1]) / b  # log of the parameters that reach that loss
    if not sizes[0] <= needed <= sizes[-1]:
        return None, f'{name} reaches that loss outside the range of the fit'
    return float(1 - np.exp(needed) / base['parameters'][-1]), ''
