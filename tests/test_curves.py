"""compare.py: curves and domains relative to the baseline, and what a report owns up to."""

import json
import math
from pathlib import Path

import comparisons
import numpy as np
import pytest
from comparisons import collect, make_plan, pretend, pretend_all

from comparison import charts, measures, report
from comparison.assemble import compare_runs
from comparison.plan import CompareConfig, Run
from comparison.results import Results

place = comparisons.place

# {arm: its losses, by seed}; those of `better` are below vanilla's by 0.2 on average.
LOSSES = {
    'vanilla': {1: 2.0, 2: 2.1, 3: 2.2},
    'better': {1: 1.79, 2: 1.9, 3: 2.01},
}
ARMS = '--arms=vanilla; better: share_v=True'


@pytest.fixture
def compared(place):
    plan = make_plan(ARMS, '--seeds=3')
    pretend_all(plan, lambda run: LOSSES[run.arm][run.seed])
    return collect(plan)


# --- curves ---------------------------------------------------------------------------------------


def test_a_curve_is_the_arm_minus_the_baseline_of_the_same_seed(compared):
    curve = compared['curves']['better']
    points = len(curve['steps'])
    assert points > 5 and curve['steps'][-1] == 29
    for seed, difference in ((1, -0.21), (2, -0.2), (3, -0.19)):
        assert curve['seeds'][seed] == pytest.approx([difference] * points)
    assert curve['mean'] == pytest.approx([-0.2] * points)
    # Three differences of which the standard deviation is 0.01; the 97.5% quantile of t is 4.303.
    assert curve['half'] == pytest.approx([4.303 * 0.01 / math.sqrt(3)] * points, rel=1e-3)


def test_at_equal_cost_the_baseline_has_gone_on():
    """An arm whose step costs twice as much is 0.1 below a baseline that falls by 0.3 nats with the
    logarithm of the step: at the baseline's step 2 s, it has fallen by 0.3 log 2 more."""
    steps = np.arange(1.0, 401.0)
    slope = measures.BaselineSlope([(steps, 5 - 0.3 * np.log(steps))])
    table = {
        'mine': {'flops_per_step': 3.0, 'ratio': 2.0},
        'vanilla': {'flops_per_step': 2.0, 'ratio': 1.0},
    }
    marks = np.array([10.0, 50.0, 150.0, 300.0])
    curves = measures.at_equal_cost(marks, [-0.1] * 4, slope, table, 'mine', 'vanilla')
    for kind, ratio, reached in (('time', 2.0, 3), ('flops', 1.5, 3)):
        assert curves[kind]['steps'] == marks[:reached].tolist()
        assert curves[kind]['mean'] == pytest.approx([-0.1 + 0.3 * math.log(ratio)] * reached)
        assert curves[kind]['ratio'] == ratio


def test_a_curve_is_smoothed_over_a_fiftieth_of_the_points_before_it():
    steps, values = np.arange(100.0), np.arange(100.0) ** 2
    at, means = measures.trailing_mean(steps, values)
    assert at.tolist() == steps[1:].tolist()
    assert means.tolist() == [(values[i] + values[i - 1]) / 2 for i in range(1, 100)]


def test_gradient_norms_are_means_over_seeds(place):
    plan = make_plan(ARMS, '--seeds=2')
    for arm, norm in (('vanilla', 1.0), ('better', 3.0)):
        for seed in (1, 2):
            pretend(plan, Run(arm, 2e-2, seed), 2.0, norm=norm * seed)
    states = {arm: {'states': {}} for arm in plan.arms}
    for run in Results(plan).all_runs():
        states[run.arm]['states'][run.seed] = Results(plan).state(run)
    curves = measures.gradient_norms(states)
    assert set(curves['vanilla']['mean']) == {1.5} and set(curves['better']['mean']) == {4.5}


# --- domains and the forest -----------------------------------------------------------------------


def test_a_domain_difference_is_the_arm_minus_the_baseline(compared):
    """In the pretended runs, domain A has 1.5 times the mean loss, and B half of it."""
    by_domain = compared['domains']['better-vanilla']
    means = {name: numbers['mean'] for name, numbers in by_domain.items()}
    assert means == pytest.approx({'A': -0.3, 'B': -0.1})
    _, head, rows = report.domain_table(compared)
    assert head[1:3] == ['A', 'B']
    assert rows[0][1].startswith(f'{report.MINUS}0.3000') and '±' in rows[0][1]


def test_pictures_have_dots_and_means_where_the_numbers_are(compared, monkeypatch):
    drawings = []
    monkeypatch.setattr(charts, 'svg', lambda drawing, label: drawings.append(drawing))
    charts.forest(compared['contrasts'], list(compared['arms']))
    charts.domain_differences(compared['domains'], compared['contrasts'], list(compared['arms']))
    forest, domains = (drawing.axes[0] for drawing in drawings)
    assert dots_of(forest, 'o') == pytest.approx([-0.21, -0.2, -0.19])
    assert dots_of(forest, 'D') == pytest.approx([-0.2])
    assert dots_of(domains, 'o')[:2] == pytest.approx([-0.3, -0.1])


def dots_of(axes, marker):
    lines = [line for line in axes.lines if line.get_marker() == marker]
    return [value for line in lines for value in np.atleast_1d(line.get_xdata())]


# --- what a report owns up to ---------------------------------------------------------------------


def change(folder, **values):
    """Other values in a run's config.json."""
    path = folder / 'config.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_report_owns_up_to_skipped_steps_spikes_and_other_machines(place):
    plan = make_plan(ARMS, '--seeds=3')
    plan.write({'tuning': 0, 'test': 0})
    results = pretend_all(plan, lambda run: LOSSES[run.arm][run.seed])
    text = report.markdown(collect(plan))
    assert 'The runs differ' not in text and 'had finished already' not in text

    folder = plan.run_folder(Run('better', 2e-2, 2))
    change(folder, device='NVIDIA H200')
    lines = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    for line in lines[10:30]:
        line |= {'skipped': 3}
    lines[20]['spike'] = True
    (folder / 'log.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))

    (plan.folder / 'plan.json').unlink()
    comparison = collect(plan)
    assert results.counts() == {'tuning': 0, 'test': 6}
    for arm, expected in (('better', (3, 1)), ('vanilla', (0, 0))):
        numbers = comparison['arms'][arm]
        assert (numbers['skipped'], numbers['spikes']) == expected
    text = report.markdown(comparison)
    assert 'The runs differ in device: NVIDIA H200, cpu.' in text
    assert '0 tuning runs and 6 test runs had finished already' in text


def test_of_two_runs_of_one_seed_the_first_counts_and_the_other_is_named(place):
    plan = make_plan(ARMS, '--seeds=3')
    pretend_all(plan, lambda run: LOSSES[run.arm][run.seed])
    folders = [str(plan.run_folder(run)) for run in Results(plan).all_runs()]
    Path('again').mkdir()
    for name in ('config.json', 'log.jsonl'):
        text = (plan.run_folder(Run('better', 2e-2, 1)) / name).read_text()
        (Path('again') / name).write_text(text.replace('"mean": 1.79', '"mean": 9.0'))
    comparison = compare_runs(CompareConfig(runs=(*folders, 'again')))
    (contrast,) = comparison['contrasts'].values()
    assert contrast['differences'][1] == pytest.approx(-0.21)
    assert 'left out: another run of' in comparison['problems']['again']
