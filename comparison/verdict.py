"""
The statistics of a comparison: what differences per seed can say, and what they cannot.

The unit is the seed. Two arms of one seed share initial weights and batches, so that their difference
is one number per seed, and these numbers are independent of each other; steps and windows of one run
are not. A contrast is the list of its differences, and its verdict follows from a rule that is fixed
before the first result:

    t test      two-sided, of the differences against 0, with n - 1 degrees of freedom
    Holm        over all contrasts of the plan, finished or not
    verdict     `better` or `worse` where p after Holm is at most 0.05, else `undecided`
    nothing     is decided by two seeds or fewer, or before every planned seed has finished

Everything here is a pure function of numbers. Arrays may have leading axes: a simulation of 10,000
comparisons is one call. scipy is imported where it is used; training does not need it.
"""

import functools
import math

import numpy as np

LEVEL = 0.05  # of all contrasts together (family-wise)
POWER = 0.8  # the probability with which outlook()'s smallest difference is found
LEAST_SEEDS = 3  # fewer never give a verdict
MOST_SEEDS = 1000  # more are not counted: nobody will train them

RULE = (
    'Per contrast, the differences of each test seed: a two-sided t test of their mean against 0 '
    f'(n - 1 degrees of freedom), Holm over all contrasts of the plan, verdict at {LEVEL:.0%}; none '
    f'with fewer than {LEAST_SEEDS} seeds, none before every test seed of both arms has finished.'
)


def distributions():
    """scipy.stats, or one line that says how to get it."""
    try:
        import scipy.stats
    except ImportError:
        raise OSError('a verdict needs scipy: pip install scipy') from None
    return scipy.stats


# --- the test -------------------------------------------------------------------------------------


def paired_differences(ours, theirs):
    """{seed: ours - theirs} of the seeds that both have; ours, theirs: {seed: loss}."""
    return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}


def t_test(differences):
    """(mean, standard deviation, half width of the 95% interval, p) of differences (..., n), n >= 2.

    p is two-sided, against a mean of 0. Where all differences are equal, it is 0, or 1 if they are 0.
    """
    differences = np.asarray(differences, dtype=float)
    n = differences.shape[-1]
    mean = differences.mean(axis=-1)
    sd = differences.std(axis=-1, ddof=1)
    error = sd / math.sqrt(n)

    with np.errstate(divide='ignore', invalid='ignore'):
        t = np.where(mean == 0, 0.0, np.abs(mean) / error)
    student = distributions().t(n - 1)
    half_width = student.ppf(1 - LEVEL / 2) * error
    return mean, sd, half_width, 2 * student.sf(t)


def holm(p):
    """p values (..., m) after Holm's correction, in the order given; a missing one is passed as 1.

    The smallest is multiplied by m, the next by m - 1, and so on; none is below one before it.
    """
    p = np.asarray(p, dtype=float)
    m = p.shape[-1]
    order = np.argsort(p, axis=-1, kind='stable')
    scaled = np.take_along_axis(p, order, axis=-1) * np.arange(m, 0, -1)
    monotone = np.minimum(1.0, np.maximum.accumulate(scaled, axis=-1))
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, monotone, axis=-1)
    return adjusted


# --- what could have been seen --------------------------------------------------------------------


def power(difference, sd, n, level=LEVEL):
    """Probability that a t test of n differences, scattering by sd, finds a true difference.

    From the noncentral t distribution; the arguments may be arrays.
    """
    stats = distributions()
    critical = stats.t.ppf(1 - level / 2, n - 1)
    noncentrality = np.abs(difference) / sd * np.sqrt(n)
    above = stats.nct.sf(critical, n - 1, noncentrality)
    below = stats.nct.cdf(-critical, n - 1, noncentrality)
    # Where scipy's series gives up, the outcome is certain: far above, and not below.
    return np.nan_to_num(above, nan=1.0) + np.nan_to_num(below, nan=0.0)


@functools.cache
def plausible_scales(seeds):
    """(true standard deviation / measured one, weight), (200,) each, as far as `seeds` can tell."""
    # Quantiles, denser where the measured one is far too small: that tail decides.
    middles = (np.arange(200) + 0.5) / 200
    scales = np.sqrt((seeds - 1) / distributions().chi2.ppf(middles**3, seeds - 1))
    weights = middles**2
    return scales, weights / weights.sum()


def expected_power(difference, sd, n, level, measured_with):
    """power(), averaged over what the true standard deviation may be.

    With few seeds the measured one is often far too small. Taking it for the true one would promise
    too much: at three seeds, a power of 80% would really be 60%.
    """
    scales, weights = plausible_scales(measured_with)
    return float(weights @ power(difference, sd * scales, n, level))


@functools.cache
def smallest_in_sd(n, level):
    """smallest_difference() in units of the measured standard deviation."""
    low, high = 0.0, 1.0
    while expected_power(high, 1.0, n, level, n) < POWER:
        low, high = high, 2 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        if expected_power(middle, 1.0, n, level, n) < POWER:
            low = middle
        else:
            high = middle
    return high


def smallest_difference(sd, n, contrasts=1):
    """The true difference that n seeds, scattering by sd, find with 80% probability.

    The level is that of Holm's first step, LEVEL / contrasts, which every contrast can count on.
    """
    return sd * smallest_in_sd(n, LEVEL / contrasts)


def seeds_needed(difference, sd, n, contrasts=1):
    """Seeds with which a difference like the observed one is found with 80% probability.

    sd was measured with n seeds. None where there is no difference, or MOST_SEEDS would not do.
    """

    def enough(seeds):
        return expected_power(difference, sd, seeds, LEVEL / contrasts, n) >= POWER

    if difference == 0 or not enough(MOST_SEEDS):
        return None
    low, high = LEAST_SEEDS - 1, MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


# --- the verdict ----------------------------------------------------------------------------------


def decide(mean, p, seeds):
    """`better` (a lower loss), `worse` or `undecided`, from p after Holm; the arguments may be arrays."""
    decided = (np.asarray(p) <= LEVEL) & (seeds >= LEAST_SEEDS)
    return np.where(decided, np.where(np.asarray(mean) < 0, 'better', 'worse'), 'undecided')


def describe(differences):
    """The numbers of one contrast, {seed: difference}; those that take more seeds are None."""
    n = len(differences)
    numbers = dict.fromkeys(('mean', 'sd', 'low', 'high', 'p'))
    if n:
        numbers['mean'] = float(np.mean(list(differences.values())))
    if n >= 2:
        mean, sd, half_width, p = (float(x) for x in t_test(list(differences.values())))
        numbers |= {'sd': sd, 'low': mean - half_width, 'high': mean + half_width, 'p': p}
    return {'differences': differences, 'seeds': n, **numbers}


def half_width(numbers):
    """Half of the 95% interval, of what describe() gives where it has one."""
    return (numbers['high'] - numbers['low']) / 2


def judge(contrasts, incomplete=None):
    """The verdict on every contrast of a plan.

    contrasts: {name: {seed: difference}}. incomplete: {name: why no verdict can be given yet}.
    Returns {name: numbers}, see describe(), with `p_holm`, `verdict`, `reason` (why undecided), and,
    where undecided, `smallest` and `seeds_needed`.
    """
    incomplete = incomplete or {}
    results = {name: describe(differences) for name, differences in contrasts.items()}
    p = []
    for name, result in results.items():
        usable = result['p'] is not None and name not in incomplete
        p.append(result['p'] if usable else 1.0)
    adjusted = holm(p) if p else []

    for (name, result), p_holm in zip(results.items(), adjusted, strict=True):
        n = result['seeds']
        word, reason = 'undecided', ''
        if name in incomplete:
            reason = incomplete[name]
        elif n < LEAST_SEEDS:
            reason = f'{n} of at least {LEAST_SEEDS} seeds'
        elif result['sd'] == 0 and result['mean'] == 0:
            reason = 'the losses are the same in every seed: nothing was changed'
        else:
            word = str(decide(result['mean'], p_holm, n))
        counts = name not in incomplete and n >= 2
        result |= {'verdict': word, 'reason': reason, 'p_holm': float(p_holm) if counts else None}
        result |= outlook(result, len(results))
    return results


def outlook(result, contrasts):
    """What the seeds of an undecided contrast could have seen, and what its difference would need."""
    n, sd = result['seeds'], result['sd']
    if result['verdict'] != 'undecided' or n < LEAST_SEEDS or not sd:
        return {'smallest': None, 'seeds_needed': None}
    return {
        'smallest': float(smallest_difference(sd, n, contrasts)),
        'seeds_needed': seeds_needed(result['mean'], sd, n, contrasts),
    }


# --- gain and cost --------------------------------------------------------------------------------


def worth_of_cost(ratio, ladder, steps):
    """What the baseline would gain if it had `ratio` times its `steps`, in nats; None where unknown.

    ladder: {steps: loss} of fully decayed runs of the baseline, with different numbers of steps.
    The gain per doubling is that between `steps` and the next number of the ladder on the way to
    ratio * steps; where there is none, the next on the other side. It is extrapolated, however far
    away ratio * steps is.
    """
    if len(ladder) < 2 or steps not in ladder or ratio <= 0:
        return None
    shorter = [other for other in ladder if other < steps]
    longer = [other for other in ladder if other > steps]
    neighbor = min(longer, default=None)
    if shorter and (ratio < 1 or not longer):
        neighbor = max(shorter)
    per_log = (ladder[steps] - ladder[neighbor]) / math.log(neighbor / steps)
    return per_log * math.log(ratio)
