"""comparison/curves.py and charts.py: curves of runs, and what a plot shows."""

import numpy as np
import pytest
from runs import write_run

from comparison import charts
from comparison.curves import measure_curves
from comparison.results import sweep
from comparison.runs import read_state
from comparison.verdict import judge


@pytest.fixture(autouse=True)
def figures(monkeypatch):
    """A plot is its figure."""
    monkeypatch.setattr(charts, 'svg', lambda figure, label: figure)


def state(folder, values, **config):
    """A finished run with a training loss per step, as comparison.runs reads it."""
    return read_state(write_run(folder, list(values), **config))


# --- curves ---------------------------------------------------------------------------------------


def test_a_curve_is_the_mean_of_a_fiftieth_of_the_steps_that_were_logged(tmp_path):
    rng = np.random.default_rng(0)
    base, other = rng.normal(3, 0.1, 500), rng.normal(2.9, 0.1, 500)
    pair = state(tmp_path / 'b', other), state(tmp_path / 'a', base)
    for run in pair:
        run.entries = [entry for entry in run.entries if entry['step'] % 2 == 0]
    (arm,) = measure_curves({'b': {1: pair}}).values()
    assert arm['steps'] == list(range(8, 500, 2))
    expected = [(other - base)[step - 8 : step + 1 : 2].mean() for step in arm['steps']]
    assert arm['curves'][1] == pytest.approx(expected)


def test_a_long_curve_has_fewer_points_from_its_beginning_to_its_end(tmp_path):
    pair = state(tmp_path / 'b', np.ones(1200)), state(tmp_path / 'a', np.zeros(1200))
    (arm,) = measure_curves({'b': {1: pair}}).values()
    assert arm['steps'][0] < 30 and arm['steps'][-1] == 1199 and len(arm['steps']) <= 600


def test_losses_that_are_not_finite_are_left_out_of_all_seeds(tmp_path):
    base = state(tmp_path / 'base', [3.0] * 20)
    odd = state(tmp_path / 'odd', [2.0] * 15 + [float('nan')] + [2.0] * 4)
    (arm,) = measure_curves({'x': {1: (odd, base), 2: (base, base)}}).values()
    assert 15 not in arm['steps'] and arm['curves'] == {1: [-1.0] * 19, 2: [0.0] * 19}


def test_several_seeds_are_thin_lines_with_their_mean():
    rng = np.random.default_rng(0)
    curves = {seed: rng.normal(0.1, 0.1, 100).tolist() for seed in (1, 2, 3)}
    measured = {'mine': {'steps': list(range(100)), 'curves': curves}}
    (axes,) = charts.curves_plot(measured, ['vanilla', 'mine']).axes
    widths = [line.get_linewidth() for line in axes.lines if len(line.get_ydata()) > 2]
    assert widths == [0.5] * 3 + [1.8]
    mean = np.mean(list(curves.values()), axis=0)
    np.testing.assert_allclose(axes.lines[-1].get_ydata(), mean)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ['vanilla', 'mine']
    # Whatever lies behind the first fifth can be seen.
    low, high = axes.get_ylim()
    assert low <= np.min([each[20:] for each in curves.values()])
    assert high >= np.max([each[20:] for each in curves.values()])


def test_a_legend_of_many_names_is_not_cut():
    names = [f'arm_{i}' for i in range(39)]
    curves = {name: {'steps': [0, 1], 'curves': {1: [0.1, 0.2]}} for name in names}
    tuning = {name: sweep({1e-3: [4.0], 2e-3: [3.9], 4e-3: [4.0]}) for name in names}
    arms = ['vanilla', *names]
    for figure in (charts.curves_plot(curves, arms), charts.losses_by_rate(tuning, arms)):
        figure.draw_without_rendering()
        legend = figure.axes[0].get_legend().get_window_extent()
        assert 0 <= legend.y0 and legend.y1 <= figure.bbox.y1


def test_every_run_at_the_best_rate_and_beside_it_is_seen():
    found = sweep({1e-3: [9.0, 9.2], 2e-3: [4.1, 4.2], 4e-3: [4.0, 4.1], 8e-3: [4.05, 5.5]})
    low, high = charts.losses_by_rate({'mine': found}, ['mine']).axes[0].get_ylim()
    assert low < 4.0 and 5.5 < high < 9.0


def test_a_forest_says_what_below_0_means_for_losses_and_for_leads():
    contrasts = {}
    for ours, theirs in (('b', 'a'), ('(d-c)', '(b-a)')):
        numbers = judge({'x': {seed: 0.1 * seed for seed in range(3)}})['x']
        contrasts[ours] = {'ours': ours, 'theirs': theirs, **numbers}
    words = []
    for some in ({'b': contrasts['b']}, contrasts):
        words.append(charts.contrasts_plot(some, list('abcd')).axes[0].get_xlabel())
    assert all('below 0 is better' in each for each in words)
    assert ['leads' in each for each in words] == [False, True]
