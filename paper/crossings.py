"""
Whether a run is overtaken by its baseline, and when (Fig. 11): from the logs of the two.

A run is overtaken if two witnesses say so: its mean difference to the baseline over its last steps is
above 0, with its whole 95% interval, and so is the difference of the validation losses at the end.
This is said of two runs, not of two models: another seed may say something else.
"""

from dataclasses import asdict, dataclass

import numpy as np

from comparison.runs import read_entries, read_run_config
from comparison.verdict import LEVEL, distributions
from paper import losses

TAIL = 2000  # steps of that mean; of a shorter run, its last half
# The blocks into which steps are cut must outlast the memory of the noise. Those of 2,000 steps have
# 200 steps. Those of a short run may be too short, and its intervals then too narrow.
BLOCKS = 10
RESAMPLES = 2000  # of the bootstrap
FIT = 1000  # points through which a crossing is predicted, the paper's number; or the last half
HORIZON = 2  # a crossing is predicted no later than at twice the steps of the run


@dataclass
class Crossing:
    """Whether a run is overtaken by its baseline, and when.

    overtaken    behind at the end, after it was ahead: `step` is the first step behind
    never ahead  behind at the end, and never before ahead by more than the noise
    predicted    not overtaken, but a line through the last differences crosses 0 at `step`
    not overtaken
    """

    kind: str
    step: float | None
    steps: int  # that both runs have taken
    mean: float  # of the last differences, in nats
    interval: tuple | None  # the 95% interval of that mean; None: too few steps for one
    validation: float | None  # validation loss minus the baseline's at the end; None: not evaluated


def crossings_of(pairs, window):
    """[{'length', 'tokens', and a Crossing}] of [(baseline, run)]; tokens: of the whole run."""
    points = []
    for baseline, run in pairs:
        length = read_run_config(run, 'block_size')['block_size']
        found = crossing(baseline, run, window)
        tokens = found.steps * losses.tokens_per_step(run)
        points.append({'length': length, 'tokens': tokens, **asdict(found)})
    return points


def crossing(baseline, run, window):
    """The Crossing of a run; its step is read from differences that are means over `window` steps."""
    steps, difference = losses.differences(baseline, run, window)
    last = int(steps[-1])
    tail = difference[steps > last - tail_of(last + 1)]
    interval = block_interval(tail)
    validation = validation_difference(baseline, run, last)

    is_behind = interval is not None and interval[0] > 0
    if is_behind and validation is not None and validation > 0:
        step = first_step_behind(*losses.smoothed(steps, difference, window))
        kind = 'overtaken'
        if step is None or not was_ahead(difference[steps < step]):
            kind, step = 'never ahead', None
    else:
        step = predicted_step(steps, difference)
        kind = 'not overtaken' if step is None else 'predicted'
    return Crossing(kind, step, last + 1, float(tail.mean()), interval, validation)


def describe(point):
    """What crossings_of() has of a pair, in words, with the numbers behind them."""
    end = f'{point["tokens"]:,} tokens'
    words = {
        'overtaken': f'overtaken at step {point["step"]}',
        'never ahead': 'behind, and never ahead',
        'not overtaken': f'not overtaken by {end}',
        'predicted': f'not overtaken by {end}, predicted for step {point["step"] or 0:,.0f}',
    }
    interval = 'too few steps for an interval'
    if point['interval']:
        low, high = point['interval']
        interval = f'95% interval {low:+.4f} to {high:+.4f}'
    validation = 'not evaluated at the end'
    if point['validation'] is not None:
        validation = f'validation loss {point["validation"]:+.4f}'
    mean = f'mean of the last {tail_of(point["steps"]):,} steps {point["mean"]:+.4f}'
    return f'{words[point["kind"]]} ({mean}, {interval}; {validation})'


def tail_of(steps):
    """How many of its last steps decide whether a run of so many is overtaken."""
    return min(TAIL, steps // 2)


# --- noise that hangs together --------------------------------------------------------------------


def block_means(values):
    """The means of BLOCKS parts of a series, one after the other; None if it is too short."""
    if len(values) < 2 * BLOCKS:
        return None
    return np.array([block.mean() for block in np.array_split(values, BLOCKS)])


def block_interval(values):
    """The 95% interval (low, high) of the mean of an autocorrelated series; None if it is too short.

    Whole blocks are drawn with replacement, so that what hangs together stays together. A few blocks
    are a small sample: an error is measured in the standard errors of its own resample (bootstrap-t),
    or the interval would be too narrow. The same series always has the same interval.
    """
    means = block_means(values)
    if means is None:
        return None
    center, error = means.mean(), standard_error(means)
    drawn = means[np.random.default_rng(0).integers(BLOCKS, size=(RESAMPLES, BLOCKS))]
    errors = standard_error(drawn)
    # A resample that drew one block again and again has no error of its own.
    is_usable = errors > 0
    if not is_usable.any():
        return float(center), float(center)
    t = (drawn.mean(axis=1) - center)[is_usable] / errors[is_usable]
    low, high = np.quantile(t, [LEVEL / 2, 1 - LEVEL / 2])
    return float(center - high * error), float(center - low * error)


def standard_error(means):
    """Of the mean over the last dimension."""
    return means.std(axis=-1, ddof=1) / np.sqrt(means.shape[-1])


# --- the second witness, and the step -------------------------------------------------------------


def validation_difference(baseline, run, last):
    """Validation loss minus the baseline's, of the same step, `last` or later; None without one."""
    theirs, ours = validation_losses(baseline), validation_losses(run)
    steps = [step for step in ours.keys() & theirs.keys() if step >= last]
    if not steps:
        return None
    return ours[max(steps)] - theirs[max(steps)]


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


def was_ahead(difference):
    """Whether a series is below 0 beyond its noise."""
    interval = block_interval(difference)
    return interval is not None and interval[1] < 0


def predicted_step(steps, difference):
    """Where a line through the last FIT points, or the last half if that is fewer, crosses 0.

    None where it does not surely rise, crosses 0 in the past, or only beyond HORIZON.
    """
    points = min(FIT, max(2, len(steps) // 2))
    steps, difference = steps[-points:], difference[-points:]
    if not surely_rises(steps, difference):
        return None
    slope, intercept = np.polyfit(steps, difference, 1)
    step = float(-intercept / slope)
    return step if steps[-1] < step <= HORIZON * (steps[-1] + 1) else None


def surely_rises(steps, difference):
    """Whether the 95% interval of the slope, of a line through the means of blocks, is above 0."""
    x, y = block_means(steps), block_means(difference)
    if y is None:
        return False
    fit = distributions().linregress(x, y)
    quantile = distributions().t(BLOCKS - 2).ppf(1 - LEVEL / 2)
    return fit.slope > quantile * fit.stderr
