"""compare.py: what it does where runs, files, processes or plans are not as they should be."""

import math

import comparisons
from comparisons import ARMS, collect, make_plan, pretend_all, scatter

import train
from comparison import launch, report

place = comparisons.place

RATES = '--rates=(1e-2, 2e-2, 4e-2)'


def best_at_twice_1e_2(run):
    return scatter(run.seed, run.arm) + abs(math.log(run.rate / 2e-2))


def fail(folder, reason):
    """The folder of a run that failed before its first step."""
    (folder / 'log.jsonl').unlink()
    launch.failure_file(folder).write_text(f'{reason}\n')


# --- tuning ---------------------------------------------------------------------------------------


def test_a_tuning_run_that_was_killed_says_nothing_about_its_rate(place):
    plan = make_plan(ARMS, '--seeds=3', RATES)
    results = pretend_all(plan, best_at_twice_1e_2)
    fail(plan.folder / 'svformer_lr0.02_seed102', 'killed by SIGKILL')
    assert [results.rate(arm) for arm in plan.arms] == [2e-2, 2e-2, None]
    reason = collect(plan)['contrasts']['svformer-vanilla']['reason']
    assert 'svformer_lr0.02_seed102 is failed: killed by SIGKILL; the same command' in reason


def test_a_tuning_run_that_train_gave_up_has_lost(place):
    plan = make_plan(ARMS, '--seeds=3', RATES)
    results = pretend_all(plan, best_at_twice_1e_2)
    settings, _ = plan.configs(results.tuning_runs('svformer', 4e-2)[0])
    fail(plan.folder / 'svformer_lr0.04_seed102', train.gave_up(7, 20, settings))
    assert results.rate('svformer') == 2e-2
    assert '| svformer |' in report.markdown(collect(plan)) and results.jobs()


def test_runs_of_another_length_choose_no_rate(place):
    pretend_all(make_plan(ARMS, '--seeds=3', RATES), best_at_twice_1e_2)
    plan = make_plan(ARMS, '--seeds=3', '--rates=(1e-2, 2e-2, 4e-2, 8e-2)', '--max_iters=40')
    results = pretend_all(plan, best_at_twice_1e_2)
    assert {results.rate(arm) for arm in plan.arms} == {None}
    text = report.markdown(collect(plan))
    assert 'is foreign: a run with max_iters=30, not 40; delete its folder, or give' in text
