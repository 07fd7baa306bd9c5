"""compare.py: curves and domains relative to the baseline; a report's numbers, and what it owns up to."""

import json
import math
import statistics
from pathlib import Path

import comparisons
import numpy as np
import pytest
from comparisons import collect, make_plan, pretend, pretend_all

from comparison import charts, launch, measures, report, verdict
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
    at, means = measures.trailing_mean(steps, values, 100)
    assert at.tolist() == steps[1:].tolist()
    assert means.tolist() == [(values[i] + values[i - 1]) / 2 for i in range(1, 100)]

    # Of every tenth step that was logged, and of a run that has got half as far.
    for every, planned in ((10, 1000), (1, 200)):
        at, means = measures.trailing_mean(every * steps, values, planned)
        window = planned // every // 50
        assert at[0] == every * (window - 1)
        assert means[0] == pytest.approx(values[:window].mean())


def break_off(folder, step, failure=''):
    """Leave the log of a run up to this step, as if it were under way or had failed."""
    log = folder / 'log.jsonl'
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(''.join(lines[:step]))
    if failure:
        launch.failure_file(folder).write_text(failure)


def test_a_run_under_way_is_smoothed_as_the_finished_baseline_is(place):
    """Where both fall fast, means over other windows would differ by more than the models do."""
    plan = make_plan(ARMS, '--seeds=1', '--max_iters=200')
    pretend(plan, Run('vanilla', 2e-2, 1), 2.0)
    run = Run('better', 2e-2, 1)
    pretend(plan, run, 1.8)
    break_off(plan.run_folder(run), 60)
    curve = collect(plan)['curves']['better']
    assert curve['steps'][-1] == 59
    assert curve['mean'] == pytest.approx([-0.2] * len(curve['steps']))

    break_off(plan.run_folder(run), 3)  # fewer steps than the four of a mean
    assert not collect(plan)['curves']


def test_a_baseline_seed_that_broke_off_does_not_end_the_curves_at_equal_cost(place):
    plan = make_plan(ARMS, '--seeds=3')
    pretend_all(plan, lambda run: LOSSES[run.arm][run.seed])
    whole = collect(plan)['curves']['better']['flops']['steps']
    break_off(plan.run_folder(Run('vanilla', 2e-2, 3)), 10, failure='no memory')
    curve = collect(plan)['curves']['better']
    assert list(curve['seeds']) == [1, 2]
    assert curve['flops']['steps'] == whole


def test_gradient_norms_are_means_over_seeds(place):
    plan = make_plan(ARMS, '--seeds=2')
    for arm, norm in (('vanilla', 1.0), ('better', 3.0)):
        for seed in (1, 2):
            pretend(plan, Run(arm, 2e-2, seed), 2.0, norm=norm * seed)
    states = {arm: {'states': {}} for arm in plan.arms}
    for run in Results(plan).all_runs():
        states[run.arm]['states'][run.seed] = Results(plan).state(run)
    table = dict.fromkeys(states, {'steps': 30})
    curves = measures.gradient_norms(states, table)
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


# --- numbers in the report ------------------------------------------------------------------------


def cells(table):
    """{first cell of a row: {column: cell}} of a report's table, with a plain minus."""
    _, head, rows = table
    rows = [[cell.replace(report.MINUS, '-') for cell in row] for row in rows]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


@pytest.fixture
def three_arms(place):
    """Of two contrasts, one is decided, and one is not."""
    losses = {**LOSSES, 'unsure': {1: 1.9, 2: 2.15, 3: 2.1}}
    plan = make_plan(f'{ARMS}; unsure: v_residual=True', '--seeds=3')
    pretend_all(plan, lambda run: losses[run.arm][run.seed])
    return collect(plan)


def test_a_report_of_known_losses_has_these_numbers(compared):
    text = report.markdown(compared).replace(report.MINUS, '-')
    assert (
        'better is better than vanilla by 0.2000 nats.** Difference -0.2000, 95% interval (of this '
        'contrast alone) -0.2248 to -0.1752, p 0.0008 after Holm, 3 seeds.'
    ) in text
    assert '| vanilla |  | 0.02 | 30 | 3 | 2.1000 | 0.1000 |' in text
    assert '| better | share_v=True | 0.02 | 30 | 3 | 1.9000 | 0.1100 |' in text
    assert 'better is better than vanilla by 0.2000 nats.' in report.headline(compared)


def test_an_undecided_contrast_says_what_these_seeds_would_find_and_how_many_it_needs(three_arms):
    differences = [-0.1, 0.05, -0.1]
    mean, sd = statistics.mean(differences), statistics.stdev(differences)
    half = 4.3027 * sd / math.sqrt(3)  # the 97.5% quantile of t
    smallest = verdict.smallest_difference(sd, 3, contrasts=2)
    needed = verdict.seeds_needed(mean, sd, 3, contrasts=2)
    assert needed > 10 and f'{smallest:.4f}' != f'{sd:.4f}'
    p = three_arms['contrasts']['unsure-vanilla']['p_holm']

    text = report.markdown(three_arms).replace(report.MINUS, '-')
    assert (
        f'unsure against vanilla: undecided.** Difference {mean:.4f}, 95% interval (of this contrast '
        f'alone) {mean - half:.4f} to +{mean + half:.4f}, p {p:.4f} after Holm, 3 seeds. These seeds '
        f'would find a difference of {smallest:.4f} with 80% probability; one as large as the '
        f'observed one would need about {needed} seeds.'
    ) in text


def test_no_number_of_seeds_is_promised_for_a_difference_that_none_would_find():
    contrast = {'reason': '', 'seeds': 3, 'smallest': 0.5, 'seeds_needed': None}
    assert report.outlook(contrast) == (
        'These seeds would find a difference of 0.5000 with 80% probability; one as large as the '
        'observed one would need more than 1,000 seeds.'
    )


def test_the_table_of_contrasts_has_each_number_in_its_column(three_arms):
    shown = cells(report.contrast_table(three_arms))
    assert list(shown) == ['better - vanilla', 'unsure - vanilla']
    better, unsure = three_arms['contrasts'].values()
    assert better['p_holm'] == 2 * better['p'] and unsure['p_holm'] == unsure['p']
    for c in (better, unsure):
        assert f', p {c["p_holm"]:.4f} after Holm, ' in report.evidence(c)
        name = f'{c["ours"]} - vanilla'
        assert shown[name] == {
            'contrast': name,
            'verdict': c['verdict'],
            'difference': f'{c["mean"]:+.4f}',
            '95% interval, alone': f'{c["low"]:+.4f} to {c["high"]:+.4f}',
            'p': f'{c["p"]:.4f}',
            'p, Holm': f'{c["p_holm"]:.4f}',
            **{f'seed {seed}': f'{d:+.4f}' for seed, d in c['differences'].items()},
        }


def test_the_table_of_rates_has_the_mean_of_each_and_the_chosen_one_bold(place):
    """The tuning loss of an arm, by rate, a little higher for the second of its two seeds."""
    losses = {
        'vanilla': {1e-2: 2.3, 2e-2: 2.1, 4e-2: 2.2},
        'better': {1e-2: 1.9, 2e-2: 1.8, 4e-2: math.nan},
    }
    plan = make_plan(ARMS, '--seeds=3', '--rates=(1e-2, 2e-2, 4e-2)', '--tuning_seeds=(101, 102)')
    pretend_all(plan, lambda run: losses[run.arm][run.rate] + 0.02 * (run.seed == 102))
    compared = collect(plan)
    shown = cells(report.tuning_table(compared))
    assert shown == {
        'vanilla': {'arm': 'vanilla', '0.01': '2.3100', '0.02': '**2.1100**', '0.04': '2.2100'},
        'better': {'arm': 'better', '0.01': '1.9100', '0.02': '**1.8100**', '0.04': 'diverged'},
    }
    assert '<b>1.8100</b>' in report.html(compared)


def test_the_table_of_costs_has_each_number_in_its_column(compared):
    measured = {
        'vanilla': {'ms': 20.0, 'ratio': 1.0, 'peak_bytes': 2**30},
        'better': {'ms': 25.0, 'ratio': 1.25, 'peak_bytes': 3 * 2**29},
    }
    for name, values in measured.items():
        compared['arms'][name] |= values
    shown = cells(report.cost_table(compared))
    flops = compared['arms']['vanilla']['flops_per_step']
    for name, arm in compared['arms'].items():
        cost = arm['cost']
        assert shown[name] == {
            'arm': name,
            'parameters': f'{cost["parameters"]:,}',
            'FLOPs/token': f'{cost["flops_per_token"]:.4g}',
            'FLOPs/step': f'{arm["flops_per_step"]:.4g} (×{arm["flops_per_step"] / flops:.3f})',
            'KV cache bytes/token': f'{cost["cache_bytes_per_token"]:,.0f}',
            'ms/step': f'{arm["ms"]:.1f}',
            'time': f'×{arm["ratio"]:.3f}',
            'peak GiB': f'{arm["peak_bytes"] / 2**30:.2f}',
        }
    # SVFormer's second layer has no values of its own: 32 x 32 weights less, half of its cache.
    vanilla, better = (compared['arms'][name]['cost'] for name in ('vanilla', 'better'))
    assert vanilla['parameters'] - better['parameters'] == 32 * 32
    assert better['cache_bytes_per_token'] == 3 / 4 * vanilla['cache_bytes_per_token']


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
