"""Whether a run is overtaken by its baseline (paper/losses.py), and how it is drawn and told."""

import numpy as np
import pytest
from runs import write_run

from comparison.runs import read_state
from paper import draw, losses


def noise(rng, steps, memory=0.9, scale=0.02):
    """An AR(1) series around 0, from its stationary start."""
    values = rng.normal(0, scale, steps)
    values[0] /= np.sqrt(1 - memory**2)
    for i in range(1, steps):
        values[i] += memory * values[i - 1]
    return values


def write_pair(tmp_path, difference, validation=None, **config):
    """(a run that differs from its baseline by `difference` step by step, the baseline)."""
    name = len(list(tmp_path.iterdir()))
    base = write_run(tmp_path / f'base{name}', [5.0] * len(difference), val=5.0, **config)
    last = 5.0 + (difference[-1] if validation is None else validation)
    curve = (5 + np.asarray(difference)).tolist()
    run = write_run(tmp_path / f'run{name}', curve, val=last, share_v=True, **config)
    return read_state(run), read_state(base)


# --- the interval ---------------------------------------------------------------------------------


def test_the_interval_covers_the_truth_in_95_of_100_series():
    rng = np.random.default_rng(0)
    truth, count, inside, narrow = 0.01, 200, 0, 0
    for _ in range(count):
        series = truth + noise(rng, 2000)
        low, high = losses.block_interval(series)
        inside += low <= truth <= high
        # What treats the steps as independent is sure of itself far too often.
        error = series.std(ddof=1) / np.sqrt(len(series))
        narrow += abs(series.mean() - truth) <= 1.96 * error
    monte_carlo = 3 * np.sqrt(0.95 * 0.05 / count)
    assert abs(inside / count - 0.95) < monte_carlo
    assert narrow / count < 0.6
    assert losses.block_interval(np.zeros(19)) is None  # blocks of a step or two say nothing


# --- overtaken, or not ----------------------------------------------------------------------------


STEPS = np.arange(100.0)


@pytest.mark.parametrize(
    'difference, kind, step',
    [
        (STEPS - 30.5, 'overtaken', 31),
        (np.full(100, -1.0), 'not overtaken', None),
        (np.full(100, 1.0), 'never ahead', None),
        (np.select([STEPS < 2, STEPS < 40, STEPS < 45], [0.1, -1, 0.5], 0.4), 'overtaken', 40),
        (np.where((STEPS > 20) & (STEPS < 25), 1, (STEPS - 150) / 100), 'predicted', 150),
        ((STEPS - 150) / 100, 'predicted', 150),
        ((STEPS - 250) / 100, 'not overtaken', None),  # beyond twice the 100 steps
        (-STEPS, 'not overtaken', None),
        (np.r_[-1e-4, np.ones(99)], 'never ahead', None),  # a lead of a step is no lead
    ],
)
def test_a_crossing_is_found_where_there_is_one(tmp_path, difference, kind, step):
    found = losses.crossing(*write_pair(tmp_path, difference), 1)
    assert (found.kind, found.steps) == (kind, 100)
    assert found.step == (step and pytest.approx(step, abs=1e-6))


def test_two_witnesses_are_needed(tmp_path):
    """The training losses of the last steps, beyond their noise, and the validation loss."""
    difference = np.linspace(-0.1, 0.1, 200)
    assert losses.crossing(*write_pair(tmp_path, difference, 0.1), 1).kind == 'overtaken'
    disagrees = losses.crossing(*write_pair(tmp_path, difference, -0.01), 1)
    assert disagrees.kind == 'not overtaken' and disagrees.interval[0] > 0

    noisy = difference / 50 + noise(np.random.default_rng(0), 200)
    unsure = losses.crossing(*write_pair(tmp_path, noisy, 0.1), 1)
    assert unsure.kind != 'overtaken' and unsure.interval[0] < 0 < unsure.interval[1]


def test_noise_alone_is_rarely_a_crossing(tmp_path):
    rng = np.random.default_rng(2)
    ramp = np.linspace(-0.1, 0.1, 2000) + noise(rng, 2000, scale=0.005)
    found = losses.crossing(*write_pair(tmp_path, ramp), 10)
    assert found.kind == 'overtaken' and abs(found.step - 1000) < 150
    pairs = [write_pair(tmp_path, noise(rng, 1000), validation=0.01) for _ in range(20)]
    kinds = [losses.crossing(*pair, 10).kind for pair in pairs]
    # Each may be wrong with 2.5%: three of twenty happen once in 77 times.
    assert kinds.count('overtaken') + kinds.count('never ahead') < 3


def test_the_prediction_of_a_crossing_is_not_made_from_noise(tmp_path):
    """A line through noise rises in every second run."""
    rng = np.random.default_rng(3)
    level = [-0.01 + rng.normal(0, 0.02, 400) for _ in range(30)]
    kinds = [losses.crossing(*write_pair(tmp_path, series), 1).kind for series in level]
    assert kinds.count('predicted') <= 2
    rises = np.linspace(-0.1, -0.02, 400) + rng.normal(0, 0.02, 400)
    assert losses.crossing(*write_pair(tmp_path, rises), 1).kind == 'predicted'


# --- drawn, and told ------------------------------------------------------------------------------


def points_of(tmp_path, middles):
    """Crossings at sequence lengths 64, 128, ... of differences that rise through 0 in the middle."""
    pairs = []
    for i, middle in enumerate(middles):
        rise = STEPS - middle - 0.5 if middle else -np.ones(100)
        pairs.append(write_pair(tmp_path, rise, block_size=64 * 2**i, batch_size=2))
    return draw.measure_critical(pairs, 1)


@pytest.mark.parametrize('last, is_fitted', [(130, False), (40, True), (15, False)])
def test_only_three_rising_crossings_are_fitted_and_each_kind_has_a_marker(
    tmp_path, last, is_fitted
):
    points = points_of(tmp_path, (None, 20, 30, last))
    axes = draw.crossing_picture(points, '#0072B2').axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert any(line.get_linestyle() == '--' for line in axes.lines) == is_fitted
    # A run that is not overtaken is drawn at the end of its training.
    assert list(lines['not overtaken'].get_ydata()) == [100]
    assert list(lines['overtaken'].get_ydata())[:2] == [21, 31]
    assert ('predicted' in lines) == (last == 130)


def test_words_give_the_tokens_and_both_witnesses(tmp_path):
    overtaken, predicted, never = (point['words'] for point in points_of(tmp_path, [20, 130, None]))
    assert 'overtaken at step 21 ' in overtaken and 'last 50 steps +54.0000' in overtaken
    assert '95% interval +' in overtaken and 'validation loss +78.5000' in overtaken
    assert 'not overtaken by 25,600 tokens, predicted for step 130 ' in predicted
    assert 'not overtaken by 51,200 tokens (' in never and 'validation loss -1.0000' in never
