"""compare.py: what it does where runs, files, processes or plans are not as they should be."""

import math
import re
from pathlib import Path

import comparisons
import pytest
from comparisons import ARMS, collect, compare_command, make_plan, pretend, pretend_all, scatter

import compare
import train
from comparison import launch, report
from comparison.assemble import compare_plan, compare_runs, group_name
from comparison.plan import CompareConfig
from comparison.results import Results
from comparison.runs import State, read_state

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


def diverge(plan):
    """Let every tuning run of a plan end with a loss that is not finite."""
    for run in Results(plan).all_runs():
        path = pretend(plan, run, 2.0) / 'log.jsonl'
        path.write_text(re.sub(r'"mean": [\d.]+', '"mean": null', path.read_text()))


def test_where_every_rate_diverged_there_is_nothing_to_wait_for(place, capsys):
    words = ('--arms=vanilla; mine: share_v=True', '--seeds=3', RATES)
    plan = make_plan(*words)
    diverge(plan)
    comparison = collect(plan)
    assert comparison['finished']
    reason = 'no learning rate of mine ends with a finite loss'
    assert reason in comparison['contrasts']['mine-vanilla']['reason']
    assert compare_command(*words, '--print=True') == (0, '')
    text = capsys.readouterr().err
    assert reason in text and 'call again' not in text


@pytest.mark.parametrize('kind', ['foreign', 'failed'])
def test_an_arm_whose_tuning_cannot_go_on_is_not_finished(place, capsys, kind):
    words = ['--arms=vanilla; mine: share_v=True', '--seeds=3', RATES]
    plan = make_plan(*words)
    pretend_all(plan, best_at_twice_1e_2)
    if kind == 'failed':
        fail(plan.folder / 'mine_lr0.02_seed101', 'killed by SIGKILL')
    else:
        words.append('--max_iters=40')
    _, text = compare_command(*words, '--watch=True')  # returns: nobody trains
    assert 'small: vanilla, mine (not finished)\n' in text
    _, text = compare_command(*words, '--print=True')
    assert ('mine_lr0.02_seed101' in text) == (kind == 'failed')
    text = capsys.readouterr().err
    assert f'because mine_lr0.02_seed101 is {kind}' in text or 'is foreign' in text
    assert 'call again' not in text


# --- config files ---------------------------------------------------------------------------------


@pytest.mark.parametrize('text', ['learning_rate =', 'learning_rate = 1.0'])
def test_a_config_file_that_is_edited_meanwhile_changes_no_run(place, text):
    """Neither half of it, nor all of it: compare.py asks for its runs every second."""
    words = ('--arms=vanilla; mine: share_v=True', '--seeds=2')
    plan = make_plan(*words)
    names = [job.name for job in Results(plan).jobs()]
    settings = plan.settings_of(Results(plan).all_runs()[-1])

    plan = make_plan(*words)
    with open('small.py', 'a') as file:
        file.write(f'{text}\n')
    results = Results(plan)
    assert [job.name for job in results.jobs()] == names
    assert plan.settings_of(results.all_runs()[-1]) == settings


def test_the_steps_of_an_arm_are_not_those_of_another_whose_name_begins_alike(place):
    arms = '--arms=vanilla; mine: share_v=True; mine_lr2: share_v=True learning_rate=2e-3'
    plan = make_plan(arms, '--seeds=1', '--equal=flops')
    of_vanilla, _, of_mine_lr2 = Results(plan).all_runs()
    for run, begun in ((of_mine_lr2, {'mine_lr2'}), (of_vanilla, {'mine_lr2', 'vanilla'})):
        pretend(plan, run, 2.0)
        assert {arm for arm in plan.arms if plan.has_begun(arm)} == begun

    plan.write({'tuning': 0, 'test': 2})
    plan.share_budget({'vanilla': 3.0, 'mine': 1.0, 'mine_lr2': 1.0})
    plan.keep_steps()
    assert plan.steps == {'vanilla': 30, 'mine': 90, 'mine_lr2': 30}


# --- runs that exist ------------------------------------------------------------------------------


@pytest.mark.parametrize('log', ['', '{"step": 0, "lo'])
def test_a_run_that_has_just_begun_does_not_refuse_the_others(place, log):
    plan = make_plan(ARMS, '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    folders = sorted(str(path.parent) for path in plan.folder.glob('*/log.jsonl'))
    begun = 'out/compare/small/svformer_lr0.02_seed3'
    Path(begun, 'log.jsonl').write_text(log)
    comparison = compare_runs(CompareConfig(runs=tuple(folders)))
    assert list(comparison['problems']) == [begun]
    decided = {name: c['p_holm'] is not None for name, c in comparison['contrasts'].items()}
    resformer = 'resformer_lr0.02'
    assert decided == {f'svformer_lr0.02-{resformer}': False, f'vanilla_lr0.02-{resformer}': True}

    Path(begun, 'config.json').unlink()
    with pytest.raises(ValueError, match=f'{begun}: .*(log is still empty|config.json)'):
        compare_runs(CompareConfig(runs=tuple(folders)))


@pytest.mark.parametrize(
    'names, expected',
    [
        ([('window_512', 1)], 'window_512'),
        ([('window_512_seed3', 3)], 'window_512'),
        ([('window_512_3', 3)], 'window_512'),
        ([('mine_s12', 2)], 'mine_s12'),
        ([('mine', 1)], 'mine'),
        ([('mine_s01', 1), ('mine_s02', 2)], 'mine'),
        ([('mine1', 1), ('mine12', 12)], 'mine'),
        ([('window_1024', 1), ('window_1024-seed2', 2)], 'window_1024'),
        ([('mine_seed1', 101), ('mine_seed2', 102)], 'mine'),
        ([('a', 1), ('b', 2)], 'a'),
    ],
)
def test_only_a_seed_is_cut_off_the_name_of_a_run(names, expected):
    states = [State(Path(name), 'finished', config={'seed': seed}) for name, seed in names]
    assert group_name(states, {}) == expected


# --- reports --------------------------------------------------------------------------------------


def test_there_is_a_report_at_every_stage(place):
    """Among them: the baseline and its ladder have finished, and a slower arm has no seed yet."""
    words = ('--seeds=1', '--tuning_seeds=(101,)', '--rates=(1e-2, 2e-2)', '--baseline_steps=(15,)')
    plan = make_plan('--arms=vanilla; mine: neutreno=0.4', *words)
    record = plan.write({})
    timing = {'how': 'by hand', 'about': {}, 'seconds': {'vanilla': [1.0] * 4, 'mine': [1.1] * 4}}
    results = Results(plan)
    stages = 0
    while missing := [run for run in results.all_runs() if results.state(run).kind == 'missing']:
        compare.write_report(plan.folder, compare_plan(plan, results, record, timing))
        first = max(missing, key=lambda run: run.arm)
        pretend(plan, first, scatter(first.seed, first.arm))
        stages += 1
    comparison = compare_plan(plan, results, record, timing)
    compare.write_report(plan.folder, comparison)
    assert comparison['finished'] and stages == 9


def test_a_report_that_cannot_be_drawn_ends_no_training(place, monkeypatch, capsys):
    """The last report is another matter: there, somebody waits for it."""
    ticks = []

    def launch_one(jobs, slots, gpus, tick):
        plan = make_plan(ARMS, '--seeds=1')
        pretend(plan, Results(plan).all_runs()[0], 2.0)
        monkeypatch.setattr(compare.time, 'monotonic', lambda: math.inf)
        tick([])
        ticks.append(capsys.readouterr().err)

    def html(comparison):
        raise TypeError('two\nlines')

    monkeypatch.setattr(launch, 'launch', launch_one)
    monkeypatch.setattr(report, 'html', html)
    with pytest.raises(TypeError):
        compare_command(ARMS, '--seeds=1')
    assert 'warning: cannot draw the report: TypeError: two\n' in ticks[0]


def test_a_report_claims_nothing_of_steps_before_a_run_has_finished(place):
    plan = make_plan(ARMS, '--seeds=1')
    claim = 'no step was skipped'
    assert claim not in report.markdown(collect(plan))
    pretend(plan, Results(plan).all_runs()[0], 2.0)
    assert claim in report.markdown(collect(plan))


def test_the_logs_of_runs_under_way_are_read_when_one_of_them_ends(place, monkeypatch):
    plan = make_plan('--arms=vanilla; mine: share_v=True', '--seeds=2')
    jobs = Results(plan).jobs()
    reads, shown = [], []

    def count(folder, *wanted):
        reads.append(folder.name)
        return read_state(folder, *wanted)

    monkeypatch.setattr('comparison.results.read_state', count)
    watcher = compare.Watcher(Results(plan), lambda: None)
    watcher.progress.show = lambda *numbers: shown.append(numbers)

    def tick(running):
        reads.clear()
        watcher.last_look = -math.inf
        watcher.tick(running)
        return len(reads), shown[-1]

    assert tick(jobs[:2])[1] == (0, 4, 0, 120)
    first = Results(plan).all_runs()[0]
    log = pretend(plan, first, 2.0) / 'log.jsonl'
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(''.join(lines[:20]))
    assert tick(jobs[:2]) == (0, (0, 4, 19, 120))
    log.write_text(''.join(lines))
    number, numbers = tick(jobs[1:3])
    assert number > 0 and numbers == (1, 4, 30, 120)
