"""The statistics of compare.py: against formulas written here, against scipy, and by simulation."""

import math

import numpy as np
import pytest
import scipy.stats

from comparison import verdict
from comparison.verdict import (
    LEVEL,
    describe,
    holm,
    judge,
    power,
    seeds_needed,
    smallest_difference,
)

COMPARISONS = 10_000


# --- against formulas and scipy -------------------------------------------------------------------


@pytest.mark.parametrize('n', [2, 3, 5, 8])
def test_mean_interval_and_p_equal_scipys(n):
    values = np.random.default_rng(n).normal(-0.01, 0.02, n).tolist()
    theirs = scipy.stats.ttest_1samp(values, 0.0)
    numbers = describe(dict(enumerate(values)))
    assert np.isclose(numbers['p'], theirs.pvalue) and np.isclose(numbers['mean'], np.mean(values))
    assert np.isclose(numbers['sd'], np.std(values, ddof=1))
    assert np.allclose((numbers['low'], numbers['high']), theirs.confidence_interval(0.95))


@pytest.mark.parametrize('m', [1, 2, 5, 10])
def test_holm_equals_its_definition(m):
    random = np.random.default_rng(m)
    rows = random.uniform(0, 0.2, (50, m)).round(3)  # with ties
    for p in rows:
        adjusted, factors = holm(p)
        # Step down: reject the smallest while it is at most level / (how many are left).
        for level in (0.01, 0.05, 0.2):
            rejected = set()
            for i in np.argsort(p, kind='stable'):
                if p[i] * (m - len(rejected)) > level:
                    break
                rejected.add(i)
            assert set(np.flatnonzero(adjusted <= level)) == rejected
        # An interval at level / factor excludes 0 where p <= level / factor: in the same cases.
        assert np.array_equal(p <= LEVEL / factors * (1 + 1e-12), adjusted <= LEVEL * (1 + 1e-12))


def test_power_has_no_holes():
    """scipy's noncentral t is NaN in places."""
    grid = power(np.linspace(0, 200, 5001), 1.0, 3)
    assert np.isfinite(grid).all()
    assert (np.diff(grid) > -1e-9).all()


# --- by simulation --------------------------------------------------------------------------------


@pytest.mark.parametrize('seeds', [3, 5, 8])
def test_the_smallest_difference_holds_where_the_scatter_is_only_measured(seeds):
    """Stated from the scatter of one comparison, found in another: the measured one may be too small."""
    random = np.random.default_rng(seeds)
    sd = 0.03
    measured = random.normal(0, sd, (COMPARISONS, seeds)).std(axis=1, ddof=1)
    stated = smallest_difference(measured, seeds, contrasts=2)
    found = random.normal(0, sd, (COMPARISONS, seeds)) - stated[:, None]
    p = scipy.stats.ttest_1samp(found, 0, axis=1).pvalue
    assert (p <= LEVEL / 2).mean() == pytest.approx(0.8, abs=3 * math.sqrt(0.16 / COMPARISONS))


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
    c = results['c']
    assert c['smallest'] == smallest_difference(c['sd'], 4, contrasts=4)
    assert c['seeds_needed'] == seeds_needed(c['mean'], c['sd'], 4, 4)
    assert results['a']['smallest'] is None
    assert 'nothing was changed' in results['d']['reason']


@pytest.mark.parametrize('values', [(), (-0.5,), (-0.5, -0.5000001)])
def test_two_seeds_never_give_a_verdict(values):
    result = judge({'a': seeds(*values)})['a']
    assert result['verdict'] == 'undecided'
    assert result['reason'] == f'{len(values)} of at least 3 seeds'
    assert result['smallest'] is None


def test_holm_counts_what_has_not_finished():
    clear = seeds(-0.10, -0.13, -0.12)
    alone = judge({'a': clear})['a']
    contrasts = {'a': clear, 'b': seeds(-0.5, -0.51, -0.52)}
    both = judge(contrasts, {'b': '3 of 5 seeds have finished'})
    assert both['b']['verdict'] == 'undecided' and both['b']['p_holm'] is None
    assert both['b']['reason'] == '3 of 5 seeds have finished'
    assert np.isclose(both['a']['p_holm'], 2 * alone['p_holm'])


def test_the_interval_is_corrected_as_the_p_is():
    contrasts = {
        'a': seeds(-0.10, -0.13, -0.12),
        'b': seeds(-0.1, -0.2, -0.3),
        'c': seeds(0, 1, -1),
    }
    for name, result in judge(contrasts).items():
        assert (result['p_holm'] <= LEVEL) == (result['low_holm'] * result['high_holm'] > 0)
        assert result['low_holm'] < result['low'] or name == 'c'


def test_a_verdict_says_on_which_seed_it_rests():
    """And from six seeds on, which share of all flips of signs has as large a mean."""
    far = judge({'a': seeds(-0.10, -0.11, -0.12, -0.10, -0.09, -0.11)})['a']
    assert far['verdict'] == 'better' and far['rests_on'] == [] and far['p_flip'] == 2 / 64
    values = seeds(-0.30, -0.42, -0.31, 0.05, 0.02, -0.01, -0.35)
    close = judge({'a': values})['a']
    assert close['verdict'] == 'better' and close['rests_on']
    for seed in values:
        left = {other: value for other, value in values.items() if other != seed}
        assert (judge({'a': left})['a']['verdict'] == 'undecided') == (seed in close['rests_on'])
    assert judge({'a': seeds(-0.1, -0.11, -0.12)})['a']['rests_on'] == [1, 2, 3]

    # What one contrast survives, three may not, after the correction.
    values = seeds(-0.10, -0.14, -0.12, -0.05)
    assert judge({'a': values})['a']['rests_on'] == [1, 3]
    assert judge(dict.fromkeys('abc', values))['a']['rests_on'] == [1, 2, 3]
