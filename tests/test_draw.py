"""Numbers from the logs of runs (paper/losses.py), and the pictures of them."""

import numpy as np
import pytest
from comparisons import write_arm
from conftest import raises_one_line
from runs import write_log, write_run

from comparison import charts
from comparison.curves import measure_curves
from comparison.results import sweep
from comparison.runs import read_state
from comparison.verdict import judge
from paper import draw, figures, losses, reproduce


def state(folder, values, **config):
    """A finished run with a training loss per step, as comparison.runs reads it."""
    return read_state(write_run(folder, list(values), **config))


# --- curves ---------------------------------------------------------------------------------------


def test_a_curve_is_the_mean_of_a_window_and_ends_with_the_validation_loss(tmp_path):
    rng = np.random.default_rng(0)
    base, other = rng.normal(3, 0.1, 40), rng.normal(2.9, 0.1, 40)
    pair = state(tmp_path / 'b', other), state(tmp_path / 'a', base)
    (arm,) = measure_curves({'b': {1: pair}}, 5).values()
    assert arm['steps'] == list(range(4, 40))
    expected = [(other - base)[step - 4 : step + 1].mean() for step in arm['steps']]
    assert arm['curves'][1] == pytest.approx(expected)
    assert arm['ends'] == {1: pytest.approx(other[-1] - base[-1])}
    (all_of_it,) = measure_curves({'b': {1: pair}}, 99).values()
    assert all_of_it['curves'][1] == pytest.approx([(other - base).mean()])
    assert losses.late_difference(*pair, 10) == pytest.approx((other - base)[-10:].mean())
    assert losses.early_difference(*pair) == pytest.approx((other - base)[:4].mean())
    with raises_one_line('fewer than the 41'):
        losses.late_difference(*pair, 41)


def test_a_window_is_of_steps_also_where_not_every_step_was_logged(tmp_path):
    pair = []
    for name, slope in (('run', 0.01), ('base', 0.0)):
        folder = write_run(tmp_path / name, [3.0] * 400)
        write_log(folder, [{'step': s, 'loss': 3 - slope * s} for s in range(0, 400, 10)])
        pair.append(read_state(folder))
    # The last 50 steps have five logged ones: 350, 360, ..., 390.
    assert losses.late_difference(*pair, 50) == pytest.approx(-3.7)
    assert losses.last_loss(pair[0], 50) == pytest.approx(-0.7)


def test_losses_that_are_not_finite_are_left_out_of_all_seeds(tmp_path):
    base = state(tmp_path / 'base', [3.0] * 20)
    odd = state(tmp_path / 'odd', [2.0] * 15 + [float('nan')] + [2.0] * 4)
    (arm,) = measure_curves({'x': {1: (odd, base), 2: (base, base)}}, 1).values()
    assert 15 not in arm['steps'] and arm['curves'] == {1: [-1.0] * 19, 2: [0.0] * 19}


def test_several_seeds_are_thin_lines_with_their_mean():
    rng = np.random.default_rng(0)
    curves = {seed: rng.normal(0.1, 0.1, 100).tolist() for seed in (1, 2, 3)}
    ends = {seed: curve[-1] for seed, curve in curves.items()}
    arms = {'mine': {'steps': list(range(100)), 'curves': curves, 'ends': ends, 'end': 'e'}}
    figure = charts.curves_picture(arms, {'mine': 'me'}, charts.looks(list(arms)), 'vanilla', 5)
    left, right = figure.axes
    widths = [line.get_linewidth() for line in left.lines if len(line.get_ydata()) > 2]
    assert widths == [0.5] * 3 + [1.8]
    mean = np.mean(list(curves.values()), axis=0)
    np.testing.assert_allclose(left.lines[-1].get_ydata(), mean)
    _, text = (text.get_text() for text in right.get_legend().get_texts())
    assert text.startswith(charts.signed(mean[-1], 3)) and '±' in text and text.endswith('me')
    assert right.get_xlabel() == '3 seeds\n95% intervals,\nuncorrected'
    # Whatever lies behind the first fifth can be seen.
    low, high = left.get_ylim()
    assert low <= np.min([each[20:] for each in curves.values()])
    assert high >= np.max([each[20:] for each in curves.values()])


def test_names_and_colors_are_the_papers_and_no_two_look_alike():
    runs = ['out/vanilla_lr0.006_seed1', 'out/resformer_seed2', 'out/deep/mine']
    labels, look = draw.labels_and_looks(runs)
    assert list(labels.values()) == ['vanilla', 'ResFormer', 'mine']
    assert look[runs[1]]['color'] == draw.COLORS[figures.R]
    labels, _ = draw.labels_and_looks(['a/vanilla_seed1', 'b/vanilla_seed1'])
    assert len(set(labels.values())) == 2


@pytest.mark.parametrize('name', ['fig6', 'fig7', 'fig13'])
def test_each_line_of_a_figure_has_a_color_of_its_own_and_the_baseline_has_black(name):
    (panel,) = figures.FIGURES[name].panels
    curve = {'steps': [0, 1], 'curves': {1: [0.1, 0.2]}, 'ends': {1: 0.2}, 'end': 'e'}
    numbers = dict.fromkeys([arm.name for arm in panel.arms], curve)
    figure = reproduce.curves_of(panel, numbers, figures.SCALES['tiny'], '')
    baseline, *lines = figure.axes[1].get_legend().get_lines()
    colors = {line.get_color() for line in lines}
    assert len(colors) == len(lines) == len(panel.arms)
    assert baseline.get_color() == charts.INK and not colors & {charts.INK, charts.COLORS[0]}


def test_every_run_at_the_best_rate_and_beside_it_is_seen(monkeypatch):
    monkeypatch.setattr(charts, 'svg', lambda figure, label: figure)
    found = sweep({1e-3: [9.0, 9.2], 2e-3: [4.1, 4.2], 4e-3: [4.0, 4.1], 8e-3: [4.05, 5.5]})
    low, high = charts.losses_by_rate({'mine': found}, ['mine']).axes[0].get_ylim()
    assert low < 4.0 and 5.5 < high < 9.0


def test_a_forest_says_what_below_0_means_for_losses_and_for_leads(monkeypatch):
    monkeypatch.setattr(charts, 'svg', lambda figure, label: figure)
    contrasts = {}
    for ours, theirs in (('b', 'a'), ('(d-c)', '(b-a)')):
        numbers = judge({'x': {seed: 0.1 * seed for seed in range(3)}})['x']
        contrasts[ours] = {'ours': ours, 'theirs': theirs, **numbers}
    words = []
    for some in ({'b': contrasts['b']}, contrasts):
        words.append(charts.contrasts_plot(some, list('abcd')).axes[0].get_xlabel())
    assert all('below 0 is better' in each for each in words)
    assert ['leads' in each for each in words] == [False, True]


# --- loss against size ----------------------------------------------------------------------------


def test_a_power_law_is_recovered_and_is_of_three_sizes_with_falling_losses():
    n = np.array([1e6, 1e7, 1e8])
    assert losses.power_law(n, 12 * n**-0.07) == pytest.approx((12, 0.07))
    assert losses.power_law(n[:2], 12 * n[:2] ** -0.07) is None
    assert losses.power_law(n, 2 * n**0.01) is None


@pytest.mark.parametrize('seeds', [(1,), (1, 2)])
def test_no_power_law_goes_through_single_runs(tmp_path, seeds):
    scale, pool = figures.SCALES['claims'], {}
    _, panel, _ = figures.FIGURES['fig5'].panels
    arms = panel.arms
    for arm in arms:
        values = [3 - 0.1 * figures.SIZES.index(arm.size)] * 20
        folders = [write_arm(tmp_path, arm, scale, values, seed, max_iters=20) for seed in seeds]
        pool[arm] = dict(zip(seeds, map(read_state, folders), strict=True))
    models = reproduce.measure_scaling(arms, pool, 5)
    assert [bool(model['power_law']) for model in models.values()] == [len(seeds) > 1] * 2


@pytest.mark.parametrize(
    'vanilla, resformer, saved, why',
    [
        ([3.0, 2.7, 2.8], [2.9, 2.8, 2.7], None, 'does not fall'),
        ([3.0, 2.9, 2.8], [2.5, 2.6, 2.7], None, 'no power law'),
        ([3.0, 2.95, 2.9], [2.8, 2.75, 2.7], None, 'outside'),
        ([3.0, 2.9, 2.8], [2.9, 2.8, 2.7], 0.5, ''),
    ],
)
def test_parameters_are_saved_where_it_can_be_said(vanilla, resformer, saved, why):
    sizes = (1e6, 2e6, 4e6)
    pairs = [list(zip(sizes, values, strict=True)) for values in (resformer, vanilla)]
    share, reason = losses.parameters_saved(*pairs)
    assert (share is None) == (saved is None) and why in reason
    assert saved is None or share == pytest.approx(saved, abs=0.01)


def test_noise_that_touches_a_loss_before_the_run_has_reached_it_saves_no_tokens(tmp_path):
    falling = np.linspace(4, 3, 100) + 0.1 * np.random.default_rng(0).normal(size=100)
    base, run = state(tmp_path / 'base', falling), state(tmp_path / 'run', falling - 0.2)
    needed = 100
    while (falling - 0.2)[needed - 10 : needed].mean() <= falling[-10:].mean():
        needed -= 1
    assert losses.tokens_saved(run, base, 10) == pytest.approx(1 - (needed + 1) / 100)
    assert losses.tokens_saved(base, run, 10) is None
