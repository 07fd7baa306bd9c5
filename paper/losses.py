"""
Numbers from the logs of runs: differences of training losses, fits over sizes, and whether and when a
run is overtaken by its baseline.

A run is a State of comparison.runs, a pair (ours, theirs) two runs that share their settings, but for
the model and its learning rate. Losses are in nats per token.
"""

import math
from dataclasses import dataclass

import numpy as np

from comparison.curves import pair_series, smoothed
from comparison.runs import by_seed, same_but_seeds
from comparison.verdict import LEVEL, distributions


def arms_of(facts):
    """{run: {seed: run}} of runs that differ in nothing but their seeds, under the first one's name.

    facts: {run: its facts}. Raises ValueError for two runs of one seed.
    """
    return {first: by_seed(runs, facts) for first, runs in same_but_seeds(facts).items()}


# --- training losses ------------------------------------------------------------------------------


def late_difference(ours, theirs, window):
    return float(smoothed(*pair_series(ours, theirs), window)[1][-1])


def early_difference(ours, theirs):
    """The mean difference over the first tenth of the steps."""
    steps, values = pair_series(ours, theirs)
    is_early = steps < (steps[-1] + 1) / 10
    if is_early.sum() < 2:  # with only the first step, it would compare untrained models
        raise ValueError(
            f'{ours.folder} and {theirs.folder} have logged {is_early.sum()} steps of their first tenth '
            'in common; an early difference takes 2'
        )
    return float(values[is_early].mean())


# --- loss against size (Fig. 5) -------------------------------------------------------------------


def last_loss(run, window):
    """The mean training loss of the last `window` steps, as far as they were logged."""
    return float(means_of(run, window)[-1])


def means_of(run, window):
    losses = run.training()
    return smoothed(np.array(list(losses)), list(losses.values()), window)[1]


MIN_POINTS = 3  # of a fit: a curve of two parameters goes through any two points


def power_law(parameters, losses):
    """(a, b) of loss = a * parameters ** -b, by least squares of the logarithms; None where there are
    too few sizes, or where the loss does not fall with them."""
    if len(set(parameters)) < MIN_POINTS:
        return None
    slope, intercept = np.polyfit(np.log(parameters), np.log(losses), 1)
    return (float(np.exp(intercept)), float(-slope)) if slope < 0 else None


def tokens_saved(ours, theirs, window):
    """The share of its steps that a run can do without and still end at the baseline's last loss.

    The paper's way, on one run's middle: a run needs its steps until no mean over `window` of them is
    above that loss any more. The first mean below it would not do, because noise touches a loss long
    before the run stays there. None where the run ends above that loss.

    The learning rate has not decayed in the middle: trained for fewer steps, the run might save more.
    """
    means = means_of(ours, window)
    # Means of the same losses may differ in their last bits.
    is_above = means > last_loss(theirs, window) * (1 + 1e-9)
    if is_above[-1]:
        return None
    steps = len(ours.training())
    needed = 1 + max(np.flatnonzero(is_above), default=-1) + steps - len(means) + 1
    return float(1 - needed / steps)


def parameters_saved(ours, theirs):
    """(share, '') or (None, why not): of the parameters of the largest baseline, by ours' power law.

    ours, theirs: [(parameters, loss)], from small to large.
    """
    losses = [loss for _, loss in theirs]
    if losses != sorted(losses, reverse=True):
        # Then the largest baseline is no reference.
        return None, "vanilla's loss does not fall at every size"
    law = power_law(*zip(*ours, strict=True))
    if not law:
        return None, 'no power law'
    a, b = law
    needed = (a / losses[-1]) ** (1 / b)  # parameters that reach that loss
    if not ours[0][0] <= needed <= ours[-1][0]:
        return None, 'that loss is reached outside the range of the fit'
    return float(1 - needed / theirs[-1][0]), ''


# --- whether a run is overtaken (Fig. 11) ---------------------------------------------------------

TAIL = 2000  # the last steps, which decide; of a shorter run, its last half
# The blocks into which steps are cut must outlast the memory of the noise. Those of 2,000 steps have
# 200 steps. Those of a short run may be too short, and its intervals then too narrow.
BLOCKS = 10
RESAMPLES = 2000  # of the bootstrap
FIT = 1000  # points through which a crossing is predicted, the paper's number; or the last half
HORIZON = 2  # a crossing is predicted no later than at twice the steps of the run


# {kind of a Crossing: what is said of it}
KINDS = {
    'overtaken': 'overtaken at step {step}',
    'predicted': 'not overtaken by {tokens:,} tokens, predicted for step {step:,.0f}',
    'not overtaken': 'not overtaken by {tokens:,} tokens',
    'never ahead': 'behind, and never ahead',
}


@dataclass
class Crossing:
    """Whether a run is overtaken by its baseline, and when.

    A run is overtaken if two witnesses say so: its mean difference to the baseline over its last steps
    is above 0, with its whole 95% interval, and so is the difference of the validation losses at the
    end. This is said of two runs, not of two models: another seed may say something else.

    overtaken    behind at the end, after it was ahead: `step` is the first step behind
    never ahead  behind at the end, and never before ahead by more than the noise
    predicted    not overtaken, but a line through the last differences crosses 0 at `step`
    not overtaken
    """

    kind: str  # of KINDS
    step: float | None
    steps: int  # that both runs have taken
    tokens: int  # of these steps
    mean: float  # of the last differences, in nats
    interval: tuple | None  # the 95% interval of that mean; None: too few steps for one
    validation: float  # validation loss minus the baseline's at the end

    def __str__(self):
        """In words, with the numbers behind them."""
        words = KINDS[self.kind].format(**vars(self))
        interval = 'too few steps for an interval'
        if self.interval:
            interval = '95% interval {:+.4f} to {:+.4f}'.format(*self.interval)
        mean = f'mean of the last {tail_of(self.steps):,} steps {self.mean:+.4f}'
        return f'{words} ({mean}, {interval}; validation loss {self.validation:+.4f})'


def crossing(ours, theirs, window):
    """The Crossing of a run; its step is read from differences that are means over `window` steps."""
    steps, values = pair_series(ours, theirs)
    count = int(steps[-1]) + 1
    tail = values[steps >= count - tail_of(count)]
    interval = block_interval(tail)
    validation = ours.loss - theirs.loss

    is_behind = interval is not None and interval[0] > 0
    if is_behind and validation > 0:
        step = first_step_behind(*smoothed(steps, values, window))
        kind = 'overtaken'
        if not was_ahead(values[steps < step]):
            kind, step = 'never ahead', None
    else:
        step = predicted_step(steps, values)
        kind = 'not overtaken' if step is None else 'predicted'
    names = ('gradient_accumulation_steps', 'batch_size', 'block_size')
    tokens = count * math.prod(ours.facts[name] for name in names)
    return Crossing(kind, step, count, tokens, float(tail.mean()), interval, validation)


def tail_of(steps):
    """How many of its last steps decide whether a run of so many is overtaken."""
    return min(TAIL, steps // 2)


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


def first_step_behind(steps, difference):
    """The step from which on a run is behind.

    It follows the step where the sum of the differences is lowest, which a few points beyond 0 do not
    move.
    """
    last = int(np.cumsum(difference).argmin())
    return int(steps[min(last + 1, len(steps) - 1)])


def was_ahead(difference):
    """Whether a series is below 0 beyond its noise."""
    interval = block_interval(difference)
    return interval is not None and interval[1] < 0


def predicted_step(steps, difference):
    """Where a line through the last FIT points, or the last half if that is fewer, crosses 0.

    None where it does not surely rise (95%, through the means of blocks), crosses 0 in the past, or
    only beyond HORIZON.
    """
    points = min(FIT, len(steps) // 2)
    steps, difference = steps[-points:], difference[-points:]
    x, y = block_means(steps), block_means(difference)
    if y is None:
        return None
    fit = distributions().linregress(x, y)
    if fit.slope <= 0 or fit.pvalue >= LEVEL:
        return None
    slope, intercept = np.polyfit(steps, difference, 1)
    step = float(-intercept / slope)
    return step if steps[-1] < step <= HORIZON * (steps[-1] + 1) else None
