"""
The statistics of a comparison: what differences per seed can say, and what they cannot.

The unit is the seed. Two arms of one seed share initial weights and batches, so that their difference
is one number per seed, and these numbers are independent of each other; steps and windows of one run
are not. A contrast is the list of its differences, and its verdict follows from a rule that is fixed
before the first result:

    t test      two-sided, of the differences against 0, with n - 1 degrees of freedom
    Holm        over all contrasts, finished or not
    verdict     `better` or `worse` where p after Holm is at most 0.05, else `undecided`
    nothing     is decided by two seeds or fewer, or before every planned seed has finished

Where a plan says so, Dunnett's test judges many independent arms against one baseline instead.

The t test assumes symmetric differences. What it costs where they are not is in
results/verdict/README.md. From six seeds on, the p value of a test that assumes symmetry but not
normality (all flips of their signs) stands beside.

Everything here is a pure function of numbers. scipy is imported where it is used; training does not need
it.
"""

import bisect
import functools
import math
import statistics

import numpy as np

LEVEL = 0.05  # of all contrasts together (family-wise)
POWER = 0.8  # the probability with which smallest_difference() is found
LEAST_SEEDS = 3  # fewer never give a verdict
MOST_SEEDS = 1000  # more are not counted: nobody will train them

LEAST_FLIPPED = 6  # with five seeds, the p of sign_flip() is never below 2/32

RULE = (
    'Per contrast, the differences of each test seed: a two-sided t test of their mean against 0 '
    f"(n - 1 degrees of freedom), Holm's correction over all contrasts, verdict at {LEVEL:.0%}; none "
    f'with fewer than {LEAST_SEEDS} seeds, none before every test seed of both arms has finished. '
    'The t test assumes symmetric differences. Where no arm is better, this rule calls with 3, 5 '
    'and 8 seeds 5, 5 and 5% of contrasts better or worse by mistake if the differences are normal, '
    '16, 18 and 17% if they are lognormal, and 10, 14 and 12% if one run in five sticks and loses 5 '
    'standard deviations (results/verdict/README.md).'
)

DUNNETT = (
    "Every arm against the baseline by Dunnett's test: two-sided, the variance between seeds pooled over "
    f'all arms, p and intervals for all of them together, verdict at {LEVEL:.0%}; none with fewer than '
    f'{LEAST_SEEDS} seeds, none before every test seed of every arm has finished. It takes the arms for '
    'independent, and their losses for normal with one variance.'
)
RULES = {'paired': RULE, 'dunnett': DUNNETT}


def distributions():
    """scipy.stats, which takes a while to import."""
    import scipy.stats

    return scipy.stats


# --- the test -------------------------------------------------------------------------------------


def paired(ours, theirs):
    """{seed: (ours, theirs)} of the seeds that both have; ours, theirs: {seed: anything}."""
    return {seed: (ours[seed], theirs[seed]) for seed in ours if seed in theirs}


def t_test(differences, level=LEVEL):
    """(mean, standard deviation, half width of the interval, p) of two differences or more.

    The interval is one of 95%, unless another level than 5% is given.

    p is two-sided, against a mean of 0. Where all differences are equal, it is 0, or 1 if they are 0.
    """
    mean, sd = statistics.fmean(differences), statistics.stdev(differences)
    error = sd / math.sqrt(len(differences))
    student = distributions().t(len(differences) - 1)
    half_width = float(student.ppf(1 - level / 2)) * error
    p = 2 * float(student.sf(abs(mean) / error)) if error else float(mean == 0)
    return mean, sd, half_width, p


def holm(p):
    """(p after Holm's correction, the factor by which it multiplies), (m,) each, in the order given.

    The smallest p is multiplied by m, the next by m - 1, and so on; none is below one before it. A
    missing p is passed as 1. An interval at the level LEVEL / factor is corrected as the p is: it
    excludes 0 where the corrected p is below LEVEL.
    """
    p = np.asarray(p, dtype=float)
    m = len(p)
    order = np.argsort(p, kind='stable')
    ranks = np.argsort(order)
    scaled = p[order] * np.arange(m, 0, -1)
    adjusted = np.minimum(1.0, np.maximum.accumulate(scaled))[ranks]
    factors = np.divide(adjusted, p, out=np.ones_like(p), where=p > 0)
    return adjusted, np.maximum(factors, m - ranks)


def sign_flip(differences):
    """The two-sided p of a mean among those of all flips of the differences' signs."""
    test = distributions().permutation_test(
        (differences,),
        np.mean,
        permutation_type='samples',
        n_resamples=2**16,  # all of them, up to 16 seeds
        random_state=0,
    )
    return float(test.pvalue)


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
    from scipy.optimize import brentq

    return brentq(lambda size: expected_power(size, 1.0, n, level, n) - POWER, 0, 1e4, rtol=1e-4)


def smallest_difference(sd, n, contrasts=1):
    """The true difference that n seeds, scattering by sd, find with 80% probability.

    The level is that of Holm's first step, LEVEL / contrasts, which every contrast can count on.
    """
    return sd * smallest_in_sd(n, LEVEL / contrasts)


def seeds_needed(difference, sd, n, contrasts=1):
    """Seeds with which a difference like the observed one is found with 80% probability.

    sd was measured with n seeds. None where there is no difference, or MOST_SEEDS would not do.
    """

    def chance(seeds):
        return expected_power(difference, sd, seeds, LEVEL / contrasts, n)

    seeds = range(LEAST_SEEDS, MOST_SEEDS + 1)
    first = bisect.bisect_left(seeds, POWER, key=chance)
    return seeds[first] if difference and first < len(seeds) else None


# --- the verdict ----------------------------------------------------------------------------------


def decide(mean, p):
    """`better` (a lower loss), `worse` or `undecided`, from a corrected p of at least LEAST_SEEDS seeds."""
    if p <= LEVEL:
        return 'better' if mean < 0 else 'worse'
    return 'undecided'


def describe(differences):
    """The numbers of one contrast, {seed: difference}; those that take more seeds are None."""
    values = list(differences.values())
    numbers = dict.fromkeys(('mean', 'sd', 'low', 'high', 'p'))
    if values:
        numbers['mean'] = statistics.fmean(values)
    if len(values) >= 2:
        mean, sd, half, p = t_test(values)
        numbers |= {'sd': sd, 'low': mean - half, 'high': mean + half, 'p': p}
    return {'differences': differences, 'seeds': len(values), **numbers}


def welch(ours, control):
    """As describe(), of {seed: loss} less the mean loss of an independent baseline, {seed: loss}: interval
    and p are Welch's."""
    control = list(control.values())
    base = np.mean(control) if control else None
    numbers = describe({seed: float(loss - base) for seed, loss in ours.items() if control})
    if min(len(ours), len(control)) < 2:
        return numbers | dict.fromkeys(('low', 'high', 'p'))
    test = distributions().ttest_ind(list(ours.values()), control, equal_var=False)
    low, high = test.confidence_interval(1 - LEVEL)
    return numbers | {'low': float(low), 'high': float(high), 'p': float(test.pvalue)}


# What verdict_of() and judge_together() say before anything is known.
UNDECIDED = {
    **dict.fromkeys('p_holm low_holm high_holm p_flip smallest seeds_needed'.split()),
    'verdict': 'undecided',
    'reason': '',
    'rests_on': (),
}


def judge(contrasts, incomplete=None):
    """The verdict on every contrast of a plan.

    contrasts: {name: {seed: difference}}. incomplete: {name: why no verdict can be given yet, or ''}.
    Returns {name: numbers}: those of describe() and verdict_of().
    """
    incomplete = incomplete or {}
    results = {name: describe(differences) for name, differences in contrasts.items()}
    p = []
    for name, result in results.items():
        is_usable = result['seeds'] >= 2 and not incomplete.get(name)
        p.append(result['p'] if is_usable else 1.0)
    for (name, result), p_holm, factor in zip(results.items(), *holm(p), strict=True):
        result |= verdict_of(result, incomplete.get(name, ''), p_holm, factor, len(p))
    return results


def judge_together(losses, incomplete):
    """As judge(), of independent arms against the first by Dunnett's test, which needs all of them: its p
    and its intervals stand in the place of those after Holm.

    losses: {arm: {seed: loss}}, the baseline first. incomplete: as in judge(), of the contrasts of the
    other arms in their order. Returns {contrast: numbers}, those of welch() and verdict_of().
    """
    control, *others = losses.values()
    unfinished = next(filter(None, incomplete.values()), '')
    least = min(map(len, losses.values()))
    if least < LEAST_SEEDS:
        unfinished = unfinished or f'{least} of at least {LEAST_SEEDS} seeds'
    results = {}
    for (name, reason), ours in zip(incomplete.items(), others, strict=True):
        results[name] = welch(ours, control) | UNDECIDED | {'reason': reason or unfinished}
    if unfinished:
        return results

    samples = [list(each.values()) for each in others]
    test = distributions().dunnett(*samples, control=list(control.values()), random_state=0)
    ends = test.confidence_interval(1 - LEVEL)
    for result, *numbers in zip(results.values(), test.pvalue, ends.low, ends.high, strict=True):
        p, low, high = map(float, numbers)
        result |= {'p_holm': p, 'low_holm': low, 'high_holm': high}
        result['verdict'] = decide(result['mean'], p)
    return results


def verdict_of(result, reason, p_holm, factor, contrasts):
    """What judge() adds to describe().

    `verdict`, `reason` (why undecided), `p_holm` with `low_holm` and `high_holm`, corrected alike,
    `p_flip` of sign_flip(), `rests_on`: seeds without one of which it would be undecided, `smallest`:
    what an undecided contrast could have seen, and the `seeds_needed` by its difference.
    """
    added = UNDECIDED | {'reason': reason}
    if reason:
        return added
    n, mean, sd = result['seeds'], result['mean'], result['sd']
    values = list(result['differences'].values())
    if n >= 2:
        _, _, half, _ = t_test(values, LEVEL / factor)
        added |= {'p_holm': float(p_holm), 'low_holm': mean - half, 'high_holm': mean + half}
    if n >= LEAST_FLIPPED:
        added['p_flip'] = sign_flip(values)

    if n < LEAST_SEEDS:
        added['reason'] = f'{n} of at least {LEAST_SEEDS} seeds'
    elif not any(values):
        added['reason'] = 'the losses are the same in every seed: nothing was changed'
    elif (verdict := decide(mean, p_holm)) != 'undecided':
        added['verdict'] = verdict
        added['rests_on'] = seeds_rested_on(result['differences'], factor)
    else:
        added['smallest'] = float(smallest_difference(sd, n, contrasts))
        added['seeds_needed'] = seeds_needed(mean, sd, n, contrasts)
    return added


def seeds_rested_on(differences, factor):
    """The seeds of a decided contrast without one of which it would be undecided, at the same correction."""
    if len(differences) <= LEAST_SEEDS:  # fewer seeds decide nothing
        return list(differences)
    seeds = []
    for seed in differences:
        _, _, _, p = t_test([value for other, value in differences.items() if other != seed])
        if p * factor > LEVEL:
            seeds.append(seed)
    return seeds
