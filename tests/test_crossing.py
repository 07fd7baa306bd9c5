"""Whether a run is overtaken by its baseline (paper/crossings.py), and how it is drawn and told."""

import json

import numpy as np
import pytest
from runs import write_run

from paper import crossings, draw

pytestmark = pytest.mark.usefixtures('figures_closed')


def noise(rng, steps, memory=0.9, scale=0.02):
    """An AR(1) series around 0, from its stationary start."""
    values = rng.normal(0, scale, steps)
    values[0] /= np.sqrt(1 - memory**2)
    for i in range(1, steps):
        values[i] += memory * values[i - 1]
    return values


def write_pair(tmp_path, difference, validation=None, **config):
    """(a baseline, a run that differs from it by `difference` step by step)."""
    name = len(list(tmp_path.iterdir()))
    shared = {key: value for key, value in config.items() if key != 'share_v'}
    base = write_run(tmp_path / f'base{name}', [5.0] * len(difference), val=5.0, **shared)
    last = 5.0 + (difference[-1] if validation is None else validation)
    curve = (5 + np.asarray(difference)).tolist()
    return base, write_run(tmp_path / f'run{name}', curve, val=last, **config)


# --- the interval ---------------------------------------------------------------------------------


def test_the_interval_covers_the_truth_in_95_of_100_series():
    rng = np.random.default_rng(0)
    truth, count, inside, narrow = 0.01, 400, 0, 0
    for _ in range(count):
        series = truth + noise(rng, 2000)
        low, high = crossings.block_interval(series)
        inside += low <= truth <= high
        # What treats the steps as independent is sure of itself far too often.
        error = series.std(ddof=1) / np.sqrt(len(series))
        narrow += abs(series.mean() - truth) <= 1.96 * error
    monte_carlo = 3 * np.sqrt(0.95 * 0.05 / count)
    assert abs(inside / count - 0.95) < monte_carlo
    assert narrow / count < 0.6


def test_the_same_series_has_the_same_interval_and_a_constant_one_no_width():
    series = noise(np.random.default_rng(1), 500)
    assert crossings.block_interval(series) == crossings.block_interval(series.copy())
    assert crossings.block_interval(np.full(100, -0.5)) == pytest.approx((-0.5, -0.5))
    assert crossings.block_interval(np.zeros(19)) is None  # blocks of a step or two say nothing


def test_the_last_2000_steps_decide_and_of_a_shorter_run_its_last_half():
    assert [crossings.tail_of(steps) for steps in (10_000, 4000, 3000, 120)] == [
        2000,
        2000,
        1500,
        60,
    ]


# --- overtaken, or not ----------------------------------------------------------------------------


def crosses(s):
    return s - 30.5


def stays_below(s):
    return -1 + 0 * s


def stays_above(s):
    return 1 + 0 * s


def dips_on_the_way(s):
    return np.select([s < 2, s < 40, s < 45], [0.1, -1, 0.5], 0.4)


def peaks_on_the_way(s):
    return np.where((s > 20) & (s < 25), 1, (s - 150) / 100)


def will_cross(s):
    return (s - 150) / 100


def will_cross_much_later(s):
    return (s - 250) / 100


def falls(s):
    return -s


@pytest.mark.parametrize(
    'difference, kind, step',
    [
        (crosses, 'overtaken', 31),
        (stays_below, 'not overtaken', None),
        (stays_above, 'never ahead', None),
        (dips_on_the_way, 'overtaken', 40),
        (peaks_on_the_way, 'predicted', 150),
        (will_cross, 'predicted', 150),
        (will_cross_much_later, 'not overtaken', None),  # beyond twice the 100 steps
        (falls, 'not overtaken', None),
    ],
)
def test_a_crossing_is_found_where_there_is_one(tmp_path, difference, kind, step):
    found = crossings.crossing(*write_pair(tmp_path, difference(np.arange(100.0))), 1)
    assert (found.kind, found.steps) == (kind, 100)
    assert (found.step is None) == (step is None)
    tolerance = 0 if kind == 'overtaken' else 1e-6
    assert step is None or found.step == pytest.approx(step, abs=tolerance)


def test_two_witnesses_are_needed(tmp_path):
    """The training losses of the last steps, beyond their noise, and the validation loss."""
    difference = np.linspace(-0.1, 0.1, 200)
    assert crossings.crossing(*write_pair(tmp_path, difference, 0.1), 1).kind == 'overtaken'
    disagrees = crossings.crossing(*write_pair(tmp_path, difference, -0.01), 1)
    assert disagrees.kind == 'not overtaken' and disagrees.interval[0] > 0

    noisy = difference / 50 + noise(np.random.default_rng(0), 200)
    unsure = crossings.crossing(*write_pair(tmp_path, noisy, 0.1), 1)
    assert unsure.kind != 'overtaken' and unsure.interval[0] < 0 < unsure.interval[1]


def test_a_crossing_in_noise_is_found_and_noise_alone_is_rarely_one(tmp_path):
    rng = np.random.default_rng(2)
    ramp = np.linspace(-0.1, 0.1, 4000)
    wrong = 0
    for _ in range(20):
        found = crossings.crossing(*write_pair(tmp_path, ramp + noise(rng, 4000, scale=0.005)), 10)
        assert found.kind == 'overtaken' and abs(found.step - 2000) < 200
        level = crossings.crossing(*write_pair(tmp_path, noise(rng, 4000), validation=0.01), 10)
        wrong += level.kind in ('overtaken', 'never ahead')
    # Each may be wrong with 2.5%: three of twenty happen once in 77 times.
    assert wrong < 3


def test_a_run_that_was_not_evaluated_at_its_end_is_not_overtaken(tmp_path):
    base, run = write_pair(tmp_path, np.linspace(-1, 1, 200))
    log = run / 'log.jsonl'
    *steps, _ = log.read_text().splitlines(keepends=True)
    early = json.dumps({'step': 190, 'val': {'mean': 9.0}}) + '\n'
    for other in (run, base):
        (other / 'log.jsonl').write_text(''.join([*steps, early]))
    found = crossings.crossing(base, run, 1)
    assert found.validation is None and found.kind == 'not overtaken'


def test_the_prediction_of_a_crossing_is_not_made_from_noise(tmp_path):
    """A line through noise rises in every second run; one that meets 0 within the horizon is common."""
    rng = np.random.default_rng(3)
    level = [-0.01 + rng.normal(0, 0.02, 400) for _ in range(30)]
    lines = [np.polyfit(np.arange(200, 400), series[200:], 1) for series in level]
    assert sum(400 < -low / slope <= 800 for slope, low in lines if slope > 0) > 3
    kinds = [crossings.crossing(*write_pair(tmp_path, series), 1).kind for series in level]
    assert kinds.count('predicted') <= 2

    rises = np.linspace(-0.1, -0.02, 400) + rng.normal(0, 0.02, 400)
    assert crossings.crossing(*write_pair(tmp_path, rises), 1).kind == 'predicted'


def test_a_lead_of_a_few_steps_is_no_lead(tmp_path):
    difference = np.r_[-1e-4, np.ones(99)]
    assert crossings.crossing(*write_pair(tmp_path, difference), 1).kind == 'never ahead'
    noisy = np.r_[noise(np.random.default_rng(4), 200) - 0.001, np.ones(200)]
    assert crossings.crossing(*write_pair(tmp_path, noisy), 1).kind == 'never ahead'


# --- drawn, and told ------------------------------------------------------------------------------


def points_of(tmp_path, middles, steps=100):
    """Crossings at sequence lengths 64, 128, ... of differences that rise through 0 in the middle."""
    pairs = []
    for i, middle in enumerate(middles):
        rise = np.arange(steps) - middle - 0.5 if middle else -np.ones(steps)
        config = {'block_size': 64 * 2**i, 'batch_size': 2, 'share_v': True}
        pairs.append(write_pair(tmp_path, rise, **config))
    return crossings.crossings_of(pairs, 1)


def test_only_three_known_crossings_are_fitted_and_each_kind_has_a_marker(tmp_path):
    cases = ((None, 20, 30, 130), 0), ((None, 20, 30, 40), 1), ((None, 40, 30, 20), 0)
    for middles, fits in cases:
        points = points_of(tmp_path, middles)
        expected = [None if middle is None else middle + 1 for middle in middles]
        assert [point['step'] and round(point['step']) for point in points][:3] == expected[:3]
        _, axes = draw.pyplot().subplots()
        draw.critical_axes(axes, points, '#0072B2')
        assert sum(line.get_linestyle() == '--' for line in axes.lines) == fits
        texts = [text.get_text().replace('\n', ' ') for text in axes.get_legend().get_texts()]
        assert 'not overtaken by the end of training' in texts
        assert ('not overtaken: predicted' in texts) == (130 in middles)
        assert 'end of training' in texts
        filled = [line.get_markerfacecolor() for line in axes.lines if line.get_marker() == 'o']
        assert filled == (['#0072B2', 'white'] if 130 in middles else ['#0072B2'])


def test_a_run_that_is_not_overtaken_is_drawn_at_the_end_of_its_training(tmp_path):
    points = points_of(tmp_path, [None])
    _, axes = draw.pyplot().subplots()
    draw.critical_axes(axes, points, '#0072B2')
    (marker,) = [line for line in axes.lines if line.get_marker() == '^']
    assert list(marker.get_ydata()) == [100]
    texts = [text.get_text().replace('\n', ' ') for text in axes.get_legend().get_texts()]
    assert 'end of training: 12,800 tokens' in texts


def test_pairs_of_other_lengths_may_have_another_number_of_steps(tmp_path):
    long, short = points_of(tmp_path, [20], 100), points_of(tmp_path, [20, 20], 60)[1:]
    _, axes = draw.pyplot().subplots()
    draw.critical_axes(axes, long + short, '#0072B2')
    (ends,) = [line for line in axes.lines if line.get_marker() == '_']
    assert list(ends.get_xdata()) == [64, 128] and list(ends.get_ydata()) == [100, 60]


def test_a_curve_that_ends_before_the_others_says_where(tmp_path, capsys):
    runs = []
    for length, steps in ((64, 100), (128, 60)):
        rise = np.arange(steps) - 20.5
        runs += write_pair(tmp_path, rise, block_size=length, share_v=True)
    figure = draw.draw_critical(draw.DrawConfig(tuple(map(str, runs)), window=1))
    words = [text.get_text().split('  ')[-1] for text in figure.axes[0].texts]
    assert '64 tokens' in words and '128 tokens (60 steps)' in words


def test_words_give_the_tokens_and_both_witnesses(tmp_path):
    overtaken, predicted, never = points_of(tmp_path, [20, 130, None])
    words = crossings.describe(overtaken)
    assert words.startswith(
        'overtaken at step 21 (mean of the last 50 steps +54.0000, 95% interval +'
    )
    assert words.endswith('; validation loss +78.5000)')
    words = crossings.describe(predicted)
    assert words.startswith('not overtaken by 25,600 tokens, predicted for step 130 (')
    words = crossings.describe(never)
    assert words == (
        'not overtaken by 51,200 tokens (mean of the last 50 steps -1.0000, '
        '95% interval -1.0000 to -1.0000; validation loss -1.0000)'
    )
