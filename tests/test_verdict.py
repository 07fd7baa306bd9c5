"""The statistics of compare.py: against formulas written here, against scipy, and by simulation."""

import math

import numpy as np
import pytest
import scipy.stats
from scipy import integrate

from comparison import verdict
from comparison.verdict import (
    LEVEL,
    decide,
    describe,
    holm,
    judge,
    paired_differences,
    power,
    seeds_needed,
    smallest_difference,
    t_test,
    worth_of_cost,
)

# Validation losses of seeds 1, 2, 3: results/untuned, 0.52M parameters, 5.1M bytes.
LOGGED = {
    'vanilla': (1.856, 1.805, 1.835),
    'resformer': (1.798, 1.782, 1.777),
    'svformer': (1.776, 1.787, 1.782),
    'neutreno': (1.777, 1.789, 1.771),
    'denseformer': (1.812, 1.797, 1.810),
    'learned': (1.789, 1.771, 1.770),
}
SDS = np.array([np.std(losses, ddof=1) for losses in LOGGED.values()])
COMPARISONS = 10_000


def student_density(t, df):
    constant = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    return constant * (1 + t * t / df) ** (-(df + 1) / 2)


def student_tail(t, df):
    """P(T > t), by integrating the density."""
    return 0.5 - integrate.quad(student_density, 0, t, args=(df,))[0]


def student_quantile(p, df):
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, df) > 1 - p else (low, middle)
    return low


def power_by_integration(difference, sd, n, level):
    """Average over the measured standard deviation of the normal probability to be significant."""
    df, critical = n - 1, student_quantile(1 - level / 2, n - 1)
    shift = difference / sd * math.sqrt(n)

    def integrand(s):  # s: measured / true standard deviation, chi over sqrt(df)
        log_density = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
        density = math.exp(log_density + (df - 1) * math.log(s) - df * s * s / 2)
        above = 0.5 * math.erfc((critical * s - shift) / math.sqrt(2))
        below = 0.5 * math.erfc((critical * s + shift) / math.sqrt(2))
        return density * (above + below)

    return integrate.quad(integrand, 0, 10, limit=200)[0]


# --- against formulas and scipy -------------------------------------------------------------------


@pytest.mark.parametrize('n', [2, 3, 5, 8])
def test_mean_interval_and_p_equal_the_formulas_and_scipy(n):
    values = np.random.default_rng(n).normal(-0.01, 0.02, n).tolist()
    mean = sum(values) / n
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half_width = student_quantile(0.975, n - 1) * sd / math.sqrt(n)
    p = 2 * student_tail(abs(mean) / (sd / math.sqrt(n)), n - 1)

    assert np.allclose(t_test(values), (mean, sd, half_width, p), rtol=1e-6)
    theirs = scipy.stats.ttest_1samp(values, 0.0)
    interval = theirs.confidence_interval(0.95)
    numbers = describe(dict(enumerate(values)))
    assert np.isclose(numbers['p'], theirs.pvalue)
    assert np.allclose((numbers['low'], numbers['high']), interval)


def test_pairs_are_by_seed():
    assert paired_differences({1: 2.0, 2: 3.0, 4: 9.0}, {2: 1.0, 1: 1.5, 3: 0.0}) == {
        1: 0.5,
        2: 2.0,
    }


@pytest.mark.parametrize('m', [1, 2, 5, 10])
def test_holm_equals_its_definition(m):
    random = np.random.default_rng(m)
    for _ in range(50):
        p = random.uniform(0, 0.2, m).round(3)  # with ties
        adjusted = holm(p)
        # Step down: reject the smallest while it is at most level / (how many are left).
        for level in (0.01, 0.05, 0.2):
            rejected, left = set(), m
            for i in sorted(range(m), key=lambda i: p[i]):
                if p[i] * left > level:
                    break
                rejected.add(i)
                left -= 1
            assert {i for i in range(m) if adjusted[i] <= level} == rejected
    rows = random.uniform(0, 1, (7, m))
    assert np.array_equal(holm(rows), np.array([holm(row) for row in rows]))


def test_holm_of_a_worked_example():
    assert np.allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])


@pytest.mark.parametrize('n, level', [(3, 0.05), (3, 0.005), (5, 0.05), (8, 0.01)])
def test_power_equals_an_integral(n, level):
    for difference in (0.0, 0.5, 1.0, 2.0, 4.0, 6.0, 20.0):
        expected = power_by_integration(difference, 1.0, n, level)
        assert abs(float(power(difference, 1.0, n, level)) - expected) < 1e-5
        # The same for differences below zero, and in other units.
        assert np.isclose(power(-difference * 0.03, 0.03, n, level), expected, atol=1e-5)


def test_power_has_no_holes():
    """scipy's noncentral t is NaN in places."""
    grid = power(np.linspace(0, 200, 5001), 1.0, 3)
    assert np.isfinite(grid).all()
    assert (np.diff(grid) > -1e-9).all()


# --- by simulation --------------------------------------------------------------------------------


def simulate(random, seeds, arms, effects):
    """Differences (COMPARISONS, arms - 1, seeds) of arms against the first, as seeds make them: each
    arm scatters by what was logged, and all share what a seed's data and order do."""
    sds = SDS[np.arange(arms) % len(SDS)]
    shared = random.normal(0, 0.02, (COMPARISONS, 1, seeds))
    losses = 1.8 + shared + random.normal(0, 1, (COMPARISONS, arms, seeds)) * sds[:, None]
    losses += np.asarray(effects)[:, None]
    return losses[:, 1:] - losses[:, :1]


def verdicts(differences):
    mean, _, _, p = t_test(differences)
    return decide(mean, holm(p), differences.shape[-1])


@pytest.mark.parametrize('seeds', [3, 5, 8])
def test_identical_arms_are_told_apart_in_at_most_5_percent(seeds):
    random = np.random.default_rng(seeds)
    rates = []
    for contrasts in range(1, 11):
        differences = simulate(random, seeds, contrasts + 1, np.zeros(contrasts + 1))
        rates.append((verdicts(differences) != 'undecided').any(axis=-1).mean())
    # One contrast is wrong in 5% exactly, of which 10,000 comparisons show 5% +- 0.22%.
    error = math.sqrt(LEVEL * (1 - LEVEL) / COMPARISONS)
    assert max(rates) <= LEVEL + 3 * error, rates
    assert np.mean(rates) <= LEVEL, rates


@pytest.mark.parametrize('seeds', [3, 5, 8])
@pytest.mark.parametrize('contrasts', [1, 3, 10])
def test_the_smallest_difference_is_found_in_80_percent(seeds, contrasts):
    random = np.random.default_rng(seeds)
    sd = math.hypot(SDS[0], SDS[1])
    effects = np.zeros(contrasts + 1)
    effects[1] = -smallest_difference(sd, seeds, contrasts)
    words = verdicts(simulate(random, seeds, contrasts + 1, effects))[:, 0]
    assert (words == 'better').mean() >= 0.8
    assert not (words == 'worse').any()


@pytest.mark.parametrize('seeds', [3, 5, 8])
def test_the_smallest_difference_holds_where_the_scatter_is_only_measured(seeds):
    """Stated from the scatter of one comparison, found in another: the measured one may be too small."""
    random = np.random.default_rng(seeds)
    sd = math.hypot(SDS[0], SDS[1])
    measured = t_test(random.normal(0, sd, (COMPARISONS, seeds)))[1]
    stated = smallest_difference(measured, seeds)
    _, _, _, p = t_test(random.normal(0, sd, (COMPARISONS, seeds)) - stated[:, None])
    assert (p <= LEVEL).mean() >= 0.8 - 3 * math.sqrt(0.16 / COMPARISONS)
    # Taking the measured scatter for the true one would promise too much.
    naive = measured * integrate_smallest(seeds)
    _, _, _, p = t_test(random.normal(0, sd, (COMPARISONS, seeds)) - naive[:, None])
    assert (p <= LEVEL).mean() < 0.75


def integrate_smallest(n):
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, 1.0, n) < 0.8 else (low, middle)
    return high


def test_seeds_needed_are_the_fewest_that_do():
    sd, n = 0.03, 5
    for difference in (0.02, -0.035, 0.1):
        needed = seeds_needed(difference, sd, n, contrasts=2)
        assert needed > verdict.LEAST_SEEDS or abs(difference) > 0.05
        for seeds, enough in ((needed, True), (needed - 1, False)):
            chance = verdict.expected_power(difference, sd, seeds, LEVEL / 2, n)
            assert (chance >= 0.8) == enough or needed == verdict.LEAST_SEEDS
    assert seeds_needed(0.0, sd, n) is None
    assert seeds_needed(1e-5, sd, n) is None


# --- verdicts -------------------------------------------------------------------------------------


def seeds(*values):
    return dict(enumerate(values, 1))


def test_words_of_verdicts():
    results = judge(
        {
            'a': seeds(-0.10, -0.11, -0.12, -0.10),
            'b': seeds(0.10, 0.11, 0.12, 0.10),
            'c': seeds(0.01, -0.02, 0.01, -0.01),
            'd': seeds(0.0, 0.0, 0.0),
        }
    )
    assert [result['verdict'] for result in results.values()] == [
        'better',
        'worse',
        'undecided',
        'undecided',
    ]
    assert results['c']['smallest'] > 0.01
    assert results['a']['smallest'] is None
    assert 'nothing was changed' in results['d']['reason']


@pytest.mark.parametrize('values', [(), (-0.5,), (-0.5, -0.5000001)])
def test_two_seeds_never_give_a_verdict(values):
    result = judge({'a': seeds(*values)})['a']
    assert result['verdict'] == 'undecided'
    assert result['reason'] == f'{len(values)} of at least 3 seeds'
    assert result['smallest'] is None


def test_an_unfinished_contrast_has_no_verdict_and_still_counts_for_holm():
    clear = seeds(-0.10, -0.13, -0.12)
    alone = judge({'a': clear})['a']
    both = judge({'a': clear, 'b': seeds(-0.5, -0.51, -0.52)}, {'b': '3 of 5 seeds have finished'})
    assert both['b']['verdict'] == 'undecided'
    assert both['b']['p_holm'] is None
    assert both['b']['reason'] == '3 of 5 seeds have finished'
    assert np.isclose(both['a']['p_holm'], 2 * alone['p_holm'])


def test_what_extra_cost_is_worth():
    # 0.2 nats from 100 steps to 200, and 0.1 from 200 to 400.
    ladder = {400: 1.7, 100: 2.0, 200: 1.8}
    assert np.isclose(worth_of_cost(2.0, ladder, 200), 0.1)
    assert np.isclose(worth_of_cost(1.1, ladder, 400), 0.1 * math.log2(1.1))
    # What lies between the run and its budget decides, not the longest runs.
    assert np.isclose(worth_of_cost(1.2, ladder, 100), 0.2 * math.log2(1.2))
    assert np.isclose(worth_of_cost(0.9, ladder, 200), 0.2 * math.log2(0.9))
    assert np.isclose(worth_of_cost(0.9, ladder, 100), 0.2 * math.log2(0.9))
    assert worth_of_cost(1.1, {400: 2.0}, 400) is None
    assert worth_of_cost(1.1, ladder, 300) is None
