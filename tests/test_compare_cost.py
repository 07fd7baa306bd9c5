"""compare.py: what an arm costs: step times, equal budgets, and what the cost would have bought."""

import json
import math
from pathlib import Path

import comparisons
import pytest
import runs
from comparisons import ARMS, make_plan, pretend, pretend_all, scatter

import bench
import compare
from comparison import measures, report
from comparison.assemble import compare_plan
from comparison.plan import Run
from comparison.results import Results

place = comparisons.place


def test_a_step_is_timed_with_all_its_micro_batches(place, monkeypatch):
    clock = [0]

    def one_second_per_micro_batch(model, optimizer, scaler, machine, batch, micro_steps, clip):
        clock[0] += micro_steps

    def stopwatch(machine):
        begin = clock[0]
        return lambda: clock[0] - begin

    monkeypatch.setattr(bench, 'train_step', one_second_per_micro_batch)
    monkeypatch.setattr(bench, 'stopwatch', stopwatch)
    words = ['--arms=vanilla; big: gradient_accumulation_steps=4', '--seeds=3']
    study = compare.Study(make_plan(*words, '--equal=time'))
    study.share_budget(may_measure=True)
    steps = [study.plan.max_iters(Run(arm, 1.0, 1)) for arm in ('vanilla', 'big')]
    assert steps == [30, 30 // 4]
    timing = measures.measure_steps(study.timed_configs(), place / 'four.json', gpus=4)
    assert set(timing['seconds']['vanilla'] + timing['seconds']['big']) == {1}

    plan = make_plan(*words)
    results = pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    comparison = compare_plan(plan, results, plan.write({}), study.timing)
    text = report.markdown(comparison).replace(report.TIMES, 'x')
    cost = 'a step takes 4.00 times as long (quartiles 4.00 to 4.00), x4.000 FLOPs, x4.000 tokens'
    assert cost in text and '(x4.000) |' in text
    assert comparison['curves']['big']['flops']['ratio'] == 4


def test_an_arm_is_timed_in_its_own_precision_and_with_its_own_kernels(place, monkeypatch):
    chosen, steps = [], []

    def step(model, optimizer, scaler, machine, *rest):
        steps.append((machine.dtype, chosen[-1]))

    monkeypatch.setattr(bench, 'train_step', step)
    choose = lambda machine: chosen.append(machine.attention)  # noqa: E731
    monkeypatch.setattr(measures.Machine, 'choose_kernels', choose)
    arms = '--arms=vanilla; half: share_v=True dtype=bfloat16; drop: dropout=0.1'
    study = compare.Study(make_plan(arms, '--seeds=3'))
    measures.measure_steps(study.timed_configs(), place / 'timing.json')
    each = [('float32', 'auto'), ('bfloat16', 'auto'), ('float32', 'flash')]
    assert steps[:6] == each + each


@pytest.fixture
def timings(monkeypatch):
    """The arms that were timed, one list each time; any step takes a second."""
    calls = []

    def time_steps(configs, machine, gpus=1):
        calls.append(list(configs))
        return {name: [1.0] * 4 for name in configs}, {}, dict.fromkeys(configs)

    monkeypatch.setattr(measures, 'time_steps', time_steps)
    return calls


def test_step_times_are_kept_for_the_same_settings_and_code(place, timings):
    path = place / 'timing.json'

    def measure(*words, code='a'):
        configs = compare.Study(make_plan(ARMS, *words)).timed_configs()
        assert measures.measure_steps(configs, path, code=code)
        return len(timings)

    assert [measure(), measure(), measure('--learning_rate=1e-2')] == [1, 1, 1]
    assert [measure(code='b'), measure('--batch_size=4', code='b')] == [2, 3]
    assert measure('--batch_size=4', '--dtype=bfloat16', code='b') == 4
    others = compare.Study(make_plan(ARMS, '--batch_size=4')).timed_configs()
    assert measures.read_timing(path, others) is None


@pytest.mark.parametrize('equal', ['steps', 'time'])
def test_only_who_trains_measures_and_all_show_the_cost(place, timings, monkeypatch, equal):
    words = ['small.py', '--arms=vanilla; mine: share_v=True', '--seeds=1', f'--equal={equal}']
    status, _ = runs.call(compare.main, *words, '--print=True')
    assert not timings and (status == 0 or 'start the training first' in status)
    assert runs.call(compare.main, *words)[0] == 0
    monkeypatch.setattr(compare, 'code_state', lambda: {'commit': 'later', 'diff': ''})
    for more in (['--print=True'], ['--watch=True'], []):
        Path('out/compare/small/report.md').unlink()
        assert runs.call(compare.main, *words, *more)[0] == 0
        assert 'whole steps, measured in turns' in Path('out/compare/small/report.md').read_text()
    assert timings == [['vanilla', 'mine']]


def test_an_arm_that_is_added_leaves_the_steps_of_the_others(place, monkeypatch):
    seconds = {'vanilla': 1.0, 'mine': 2.0, 'other': 4.0}

    def time_steps(configs, machine, gpus=1):
        return {name: [seconds[name]] * 4 for name in configs}, {}, dict.fromkeys(configs)

    def steps_of(*arms, max_iters=30):
        words = f'--arms=vanilla; {"; ".join(arms)}', f'--max_iters={max_iters}', '--equal=time'
        study = compare.Study(make_plan(*words))
        study.share_budget(may_measure=True)
        for job in Results(study.plan).jobs():
            run = next(run for run in Results(study.plan).all_runs() if run.name == job.name)
            pretend(study.plan, run, 2.0)
        study.plan.write(study.results.counts())
        return {arm: study.plan.max_iters(Run(arm, 2e-2, 1)) for arm in study.plan.arms}

    monkeypatch.setattr(measures, 'time_steps', time_steps)
    mine, other = 'mine: share_v=True', 'other: neutreno=0.4'
    assert steps_of(mine) == {'vanilla': 30, 'mine': 15}
    seconds['mine'] = 3.0  # a busy neighbor
    # And the code has a setting that it had not when the plan was written.
    plan = place / 'out/compare/small/plan.json'
    contents = json.loads(plan.read_text())
    assert contents['plan']['settings'].pop('denseformer') is False
    plan.write_text(json.dumps(contents))
    assert steps_of(mine, other) == {'vanilla': 30, 'mine': 15, 'other': 7}
    # Another model of that name is timed, and so is the same one in runs of another length.
    assert steps_of('mine: v_residual=True', other)['mine'] == 10
    assert steps_of(mine, other, max_iters=60)['mine'] == 20


def test_equal_time_goes_by_the_ratio_that_the_report_shows(place):
    """Of steps that were timed side by side: a busy moment hits both arms."""
    plan = make_plan('--arms=vanilla; mine: share_v=True', '--seeds=1', '--equal=time')
    seconds = {'vanilla': [1.0, 1.0, 3.0], 'mine': [2.0, 6.0, 3.0]}  # medians: 1 and 3
    timing = {'how': 'by hand', 'about': {}, 'seconds': seconds}
    plan.share_budget(compare.costs_of_steps(plan, timing))
    assert {arm: plan.max_iters(Run(arm, 1.0, 1)) for arm in plan.arms} == {
        'vanilla': 30,
        'mine': 15,
    }
    comparison = compare_plan(plan, Results(plan), plan.write({}), timing)
    assert comparison['arms']['mine']['ratio'] == 2


def test_equal_flops_gives_a_cheaper_arm_more_steps(place):
    plan = make_plan(ARMS, '--equal=flops', '--max_iters=300')
    plan.share_budget(compare.costs_of_steps(plan))
    steps = {arm: plan.max_iters(Run(arm, 1.0, 1)) for arm in plan.arms}
    assert steps['vanilla'] == steps['resformer'] == 300 < steps['svformer']
    cost = compare_plan(plan, Results(plan), plan.write({}), None)['arms']
    for arm in steps:
        spent = steps[arm] * cost[arm]['cost']['flops_per_token']
        assert spent <= 300 * cost['vanilla']['cost']['flops_per_token'] * (1 + 1e-9)


def test_what_extra_cost_is_worth_comes_from_whole_runs_alone(place):
    plan = make_plan('--arms=vanilla; mine: neutreno=0.4', '--seeds=3', '--baseline_steps=(15,)')

    def loss(run):
        shorter = 0.2 if run.steps == 15 else 0.0
        return scatter(run.seed) + shorter - 0.1 * (run.arm == 'mine')

    results = pretend_all(plan, loss)
    assert (plan.folder / 'vanilla_lr0.02_steps15_seed1').exists()
    timing = {'how': 'by hand', 'about': {}, 'seconds': {'vanilla': [1.0] * 4, 'mine': [1.1] * 4}}
    comparison = compare_plan(plan, results, plan.write({}), timing)
    worth = comparison['arms']['mine']['worth_of_cost']
    assert math.isclose(worth, 0.2 * math.log2(1.1), rel_tol=1e-6)
    assert f'about {worth:.4f} nats, 28% of the gain' in report.markdown(comparison)
    # At equal time, the steps that it lacks are the price: it is not charged twice.
    plan.options.equal = 'time'
    text = report.markdown(compare_plan(plan, results, plan.write({}), timing))
    assert 'at equal time, it was trained' in text and 'that time would gain' not in text


def test_the_baselines_other_lengths_have_the_seeds_of_its_own(place):
    arms = '--arms=vanilla: seed_offset=50; mine: share_v=True seed_offset=50'
    results = Results(make_plan(arms, '--seeds=2', '--baseline_steps=(15,)'))
    ladder = {seed: (run.seed, run.steps) for seed, run in results.ladder_runs()[15].items()}
    assert ladder == {1: (51, 15), 2: (52, 15)}
    assert [run.seed for run in results.test_runs('vanilla').values()] == [51, 52]
