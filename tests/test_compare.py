"""compare.py: arms, rates, seeds and plan; what it trains, collects, refuses and reports."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import comparisons
import pytest
import runs
from comparisons import (
    ARMS,
    chain,
    collect,
    compare_command,
    make_plan,
    pretend,
    pretend_all,
    scatter,
)
from conftest import write_dataset

import compare
import train
from comparison import launch, report
from comparison import plan as plans
from comparison.assemble import compare_plan, compare_runs
from comparison.plan import CompareConfig, Run, parse_arms
from comparison.results import Results, next_rate
from comparison.runs import read_state
from files import locked

place = comparisons.place

AMBIGUOUS = '--arms=c; a: dropout=0.1; b-c: dropout=0.2; a-b: dropout=0.3'

# --- arms and plan --------------------------------------------------------------------------------


def test_arms_are_names_with_settings(place):
    (place / 'wiring.py').write_text('neutreno = 0.4\nn_layer = 5\n')
    text = 'vanilla; a: residual_lambda=(5.0, 1.0) v_residual=True; b: wiring.py --norm_eps=1e-6'
    arms = parse_arms(text)
    assert arms['vanilla'].flags == []
    assert arms['a'].flags == ['--residual_lambda=(5.0, 1.0)', '--v_residual=True']
    # Of a config file the wiring, not the size.
    assert arms['b'].flags == ['--neutreno=0.4', '--norm_eps=1e-6']
    assert arms['b'].from_files == {'wiring.py': {'neutreno': 0.4}}


def test_a_misspelt_setting_in_the_file_of_an_arm_is_refused(place):
    (place / 'mine.py').write_text('v_residual = True\nresidual_lamda = (5.0, 1.0)\n')
    with pytest.raises(ValueError, match="unknown setting 'residual_lamda' .*'residual_lambda'"):
        parse_arms('vanilla; mine: mine.py')


def test_a_run_is_what_train_would_be_told(place):
    plan = make_plan('--arms=vanilla; slow: learning_rate=5e-3', '--weight_decay=0.2', '--seeds=3')
    settings, config = plan.configs(Run('slow', plan.own_rate('slow'), 2))
    assert (settings.seed, settings.weight_decay, config.n_embd) == (2, 0.2, 32)
    assert (settings.learning_rate, settings.min_lr) == (5e-3, 5e-4)  # the config's ratio
    assert (settings.eval_iters, settings.eval_interval) == (0, 0)
    assert settings.out_dir == 'out/compare/small/slow_lr0.005_seed2'


@pytest.mark.parametrize(
    'words, message',
    [
        (['--arms=vanilla'], 'at least two'),
        (['--arms=vanilla; vanilla: share_v=True'], 'two arms are named vanilla'),
        (['--arms=vanilla; a b: share_v=True'], 'is not a name'),
        (['--arms=vanilla; a: share_v'], 'neither key=value nor'),
        (['--arms=vanilla; a: shared_v=True'], "unknown setting 'shared_v'"),
        (['--arms=vanilla; a: seed=3'], 'compare.py chooses it'),
        (['--arms=vanilla; a: weight_decay=0.1'], 'have the same settings'),
        (['--arms=vanilla; a: device=cpu'], 'have the same settings'),
        (['--arms=vanilla; a: block_size=16'], 'those of different texts'),
        (['--arms=vanilla; a: share_v=True v_residual=True'], 'arm a: '),
        (['--arms=vanilla; a: no.py'], "no config file 'no.py'"),
        ([ARMS, '--contrasts=svformer-mine'], 'is not ARM-ARM'),
        ([ARMS, '--seed=3'], 'chosen by compare.py'),
        ([ARMS, '--seeds=0'], 'at least 1'),
        ([ARMS, '--seeds=(1, 1)'], 'names one twice'),
        ([ARMS, '--equal=money'], 'equal='),
        ([ARMS, '--rates=(1e-3,)'], 'a single rate, so there is nothing to tune'),
        (['--arms=vanilla; a: learning_rate=1', '--rates=(1e-3, 2e-3)'], 'tuned with --rates'),
        (['--arms=vanilla; a: seed_offset=2'], 'must exceed the test seeds'),
        (['--arms=v; a: seed_offset=50; b: seed_offset=51'], 'would belong to two pairs'),
        (['--arms=vanilla; a: seed_offset=x'], 'which is added to every test seed'),
        ([ARMS, '--rates=(1e-3, 2e-3)', '--learning_rate=1'], 'tuned with --rates'),
        ([ARMS, '--baseline_steps=(30,)'], 'must differ from max_iters'),
        ([ARMS, '--baseline_steps=(15,)', '--equal=flops'], 'with equal=flops no arm costs extra'),
        ([AMBIGUOUS, '--contrasts=a-b-c'], "'a-b-c' may be a against b-c, or a-b against c"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_written(place, words, message):
    status, _ = compare_command(*words)
    assert isinstance(status, str) and status.startswith('error: ') and '\n' not in status
    assert message in status
    assert not Path('out').exists()


def test_an_arm_may_differ_in_how_it_rounds_alone(place):
    plan = make_plan('--arms=vanilla; half: dtype=bfloat16; compiled: compile=True')
    assert plan.contents()['arms']['half']['differs'] == {'dtype': 'bfloat16'}
    assert plan.contents()['arms']['compiled']['differs'] == {'compile': True}
    assert '--dtype=bfloat16' in plan.arguments(Run('half', 1e-3, 1))


def test_an_arm_cannot_be_tuned_on_its_test_seeds(place):
    for seeds, tuning in (('102', '(101, 102)'), ('(7, 9)', '(8, 9)')):
        with pytest.raises(ValueError, match='would both choose the rates and judge'):
            make_plan(ARMS, f'--seeds={seeds}', f'--tuning_seeds={tuning}', '--rates=(1e-3, 2e-3)')
    with pytest.raises(ValueError, match='a test seed is a tuning seed'):
        arms = '--arms=vanilla; again: seed_offset=100'
        make_plan(arms, '--seeds=3', '--rates=(1e-3, 2e-3)')
    plan = make_plan(ARMS, '--seeds=3', '--rates=(1e-2, 2e-2, 4e-2)')
    results = pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    for run in results.all_runs():
        tuned = run.seed in plan.options.tuning_seeds
        assert tuned != (run.seed in plan.options.seeds)


def test_each_arm_goes_on_at_its_own_best_rate(place):
    best = {'vanilla': 2e-2, 'resformer': 4e-2, 'svformer': 1e-2}

    def loss(run):
        return scatter(run.seed) + abs(math.log(run.rate / best[run.arm]))

    plan = make_plan(ARMS, '--seeds=3', '--rates=(1e-2, 2e-2)')
    results = pretend_all(plan, loss)
    assert {arm: results.rate(arm) for arm in best} == best
    # The best of two is at an edge: one more step, once.
    sweeps = {arm: results.tune(arm) for arm in best}
    assert list(sweeps['vanilla']['trials']) == [1e-2, 2e-2, 4e-2]
    assert list(sweeps['resformer']['trials']) == [1e-2, 2e-2, 4e-2]
    assert list(sweeps['svformer']['trials']) == [5e-3, 1e-2, 2e-2]
    assert [arm for arm, sweep in sweeps.items() if sweep['edge']] == ['resformer']
    text = report.markdown(compare_plan(plan, results, plan.write({}), None))
    assert 'best learning rate of resformer, 0.04, is at the edge' in text
    assert next_rate([1.5e-3, 3e-3, 6e-3], 6e-3) == 1.2e-2


def test_the_plan_comes_first_and_its_changes_are_shown(place):
    plan = make_plan(ARMS, '--seeds=3')
    record = plan.write(Results(plan).counts())
    assert record['plan']['contrasts'] == ['resformer-vanilla', 'svformer-vanilla']
    assert 'diff' in record and record['commit']
    # Before any result, it may change without a word.
    plan = make_plan(ARMS, '--seeds=4')
    record = plan.write(Results(plan).counts())
    assert record['history'] == []
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    assert plan.write(Results(plan).counts()) == record
    # min_lr is a share of each run's rate.
    lower = make_plan(ARMS, '--seeds=4', '--min_lr=0.0').contents()
    shares = {f'min_lr_share.{arm}': [0.1, 0.0] for arm in plan.arms}
    assert plans.plan_changes(plan.contents(), lower) == shares
    # A setting that train.py has learned since is no change of the plan.
    path = plan.folder / 'plan.json'
    older = json.loads(path.read_text())
    del older['plan']['settings']['grad_clip']
    del older['plan']['min_lr_share']
    path.write_text(json.dumps(older))
    assert plan.write(Results(plan).counts())['history'] == []

    later = make_plan(ARMS, '--seeds=5', '--contrasts=svformer-resformer')
    results = pretend_all(later, lambda run: scatter(run.seed, run.arm))
    record = later.write({'tuning': 0, 'test': 12})
    (entry,) = record['history']
    assert entry['changes']['seeds'] == [[1, 2, 3, 4], [1, 2, 3, 4, 5]]
    text = report.markdown(compare_plan(later, results, record, None))
    assert 'was changed at' in text and 'after 12 test runs' in text


def test_a_second_process_leaves_the_plan_alone(place):
    plan = make_plan(ARMS, '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    plan.write(Results(plan).counts())
    before = (plan.folder / 'plan.json').read_bytes()
    with locked(plan.folder, 'comparing in'):
        for more in ([], ['--print=True']):
            status, _ = compare_command(ARMS, '--seeds=9', *more)
            assert 'another process is comparing in' in status
        assert compare_command(ARMS, '--seeds=3', '--watch=True')[0] == 0
        assert 'seeds differ' in compare_command(ARMS, '--seeds=9', '--watch=True')[0]
    assert (plan.folder / 'plan.json').read_bytes() == before


def test_the_code_of_a_plan_is_the_commit_and_what_differs_from_it(tmp_path, monkeypatch):
    """In the programs' own files: tests, paper and results decide nothing."""

    def git(*words):
        subprocess.run(['git', *words], cwd=tmp_path, check=True, capture_output=True)

    git('init', '-q')
    for name in ('model.py', 'tests/test_a.py', 'README.md'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('before\n')
    git('add', '.')
    git('-c', 'user.name=a', '-c', 'user.email=a', 'commit', '-qm', 'first')
    monkeypatch.setattr(plans, 'ROOT', tmp_path)
    clean = plans.code_state()
    assert len(clean['commit']) == 40 and clean['diff'] == ''

    for name in ('model.py', 'tests/test_a.py', 'README.md', 'idea.py', 'idea.txt'):
        (tmp_path / name).write_text('after\n')
    changed = plans.code_state()
    assert changed['commit'] == clean['commit']
    assert re.findall(r'^\+\+\+ b/(.*)$', changed['diff'], re.M) == ['model.py', 'idea.py']
    assert changed['diff'].count('+after') == 2


def test_the_end_of_the_cosine_moves_with_the_number_of_steps(place):
    plan = make_plan(ARMS, '--lr_decay_iters=24', '--baseline_steps=(15,)')
    runs_of_vanilla = [run for run in Results(plan).all_runs() if run.arm == 'vanilla']
    ends = {plan.max_iters(run): plan.configs(run)[0].lr_decay_iters for run in runs_of_vanilla}
    assert ends == {30: 24, 15: 12}

    arms = '--arms=vanilla: max_iters=60 lr_decay_iters=60; resformer: v_residual=True max_iters=60'
    plan = make_plan(arms, '--baseline_steps=(120,)')
    ladder = [run for run in Results(plan).all_runs() if run.steps]
    assert {plan.configs(run)[0].lr_decay_iters for run in ladder} == {120}


def test_code_that_changes_between_two_trainings_is_written_down(place, monkeypatch):
    code = {'commit': 'abc', 'diff': ''}
    plan = make_plan(ARMS, '--seeds=1')

    def edit_after_the_first_training(jobs, *more):
        pretend(plan, Run('vanilla', 0.02, 1), 2.0)
        code['diff'] = '+ an idea'
        jobs()

    for module in (plans, compare):
        monkeypatch.setattr(module, 'code_state', lambda: dict(code))
    monkeypatch.setattr(launch, 'launch', edit_after_the_first_training)
    assert compare_command(ARMS, '--seeds=1')[0] == 0
    record = plans.read_plan(plan.folder / 'plan.json')
    (change,) = record['code_changes']
    assert (record['diff'], change['diff'], change['results']['test']) == ('+ an idea', '', 1)
    assert 'uncommitted changes are no longer' in (plan.folder / 'report.md').read_text()


# --- what has arrived -----------------------------------------------------------------------------


def test_every_bad_run_is_named_and_the_others_stand(place):
    arms = '; '.join(f'a{i}: neutreno=0.{i}' for i in range(1, 8))
    plan = make_plan(f'--arms=vanilla; {arms}', '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    folders = {arm: plan.folder / f'{arm}_lr0.02_seed2' for arm in plan.arms}
    log = folders['a1'] / 'log.jsonl'
    log.write_text(log.read_text()[:-60])  # the last line cut
    shutil.rmtree(folders['a2'])
    lines = (folders['a3'] / 'log.jsonl').read_text().splitlines(keepends=True)
    (folders['a3'] / 'log.jsonl').write_text(''.join(lines[:12]))
    runs.edit_config(folders['a4'], weight_decay=0.3)
    (folders['a5'] / 'log.jsonl').write_text('')
    (folders['a5'] / 'failed.txt').write_text('CUDA out of memory\n')
    text = (folders['a6'] / 'log.jsonl').read_text()
    (folders['a6'] / 'log.jsonl').write_text(re.sub(r'"mean": [\d.]+', '"mean": null', text))

    comparison = collect(plan)
    reasons = {name: c['reason'] for name, c in comparison['contrasts'].items()}
    assert 'damaged' in reasons['a1-vanilla'] and 'not JSON' in reasons['a1-vanilla']
    assert reasons['a2-vanilla'] == reasons['a3-vanilla'] == '2 of 3 seeds have finished'
    assert 'foreign: a run with weight_decay=0.3, not 0.1' in reasons['a4-vanilla']
    assert 'CUDA out of memory' in reasons['a5-vanilla']
    assert 'diverged' in reasons['a6-vanilla']
    for i in range(1, 7):
        assert comparison['contrasts'][f'a{i}-vanilla']['verdict'] == 'undecided'
    assert comparison['contrasts']['a7-vanilla']['p_holm'] is not None
    assert not comparison['finished']
    assert {name.split('_')[0] for name in comparison['problems']} == {'a1', 'a4', 'a5', 'a6'}
    for text in (report.markdown(comparison), report.html(comparison)):
        assert 'CUDA out of memory' in text and 'weight_decay=0.3' in text

    # Trained again is what can be; a foreign run is never touched.
    wanted = {job.name.split('_')[0] for job in Results(plan).jobs()}
    assert wanted == {'a1', 'a2', 'a3', 'a5'}
    assert read_state(folders['a3']).detail == 'step 11 of 30'


def test_a_run_of_a_fork_is_not_taken_for_the_model_without_its_setting(place):
    plan = make_plan('--arms=vanilla; resformer: v_residual=True', '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    folders = sorted(log.parent for log in plan.folder.glob('*/log.jsonl'))
    runs.edit_config(folders[0], my_flag=True, my_other_flag=False)  # off: as if it were not there
    (contrast,) = collect(plan)['contrasts'].values()
    assert 'foreign: a run with my_flag=True, a setting that this code' in contrast['reason']

    arms = compare_runs(CompareConfig(runs=tuple(map(str, folders))))['arms']
    # It is an arm of its own, whose loss is not taken.
    assert sorted(len(arm['losses']) for arm in arms.values()) == [0, 2, 3]


def test_the_last_bits_of_a_rate_do_not_part_the_seeds_of_an_arm(place):
    plan = make_plan('--arms=vanilla; resformer: v_residual=True', '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    folders = sorted(log.parent for log in plan.folder.glob('*/log.jsonl'))
    runs.edit_config(folders[0], min_lr=runs.read_config(folders[0])['min_lr'] * (1 + 1e-15))
    arms = compare_runs(CompareConfig(runs=tuple(map(str, folders))))['arms']
    assert [len(arm['losses']) for arm in arms.values()] == [3, 3]


def test_no_verdict_before_every_planned_seed(place):
    plan = make_plan('--arms=vanilla; better: share_v=True', '--seeds=5')
    gain = {'vanilla': 0.0, 'better': -1.0}
    pretend_all(plan, lambda run: scatter(run.seed, run.arm) + gain[run.arm])
    (contrast,) = collect(plan)['contrasts'].values()
    assert contrast['verdict'] == 'better' and contrast['p_holm'] < 1e-6
    shutil.rmtree(plan.folder / 'better_lr0.02_seed5')
    (contrast,) = collect(plan)['contrasts'].values()
    assert contrast['verdict'] == 'undecided' and contrast['seeds'] == 4
    assert contrast['reason'] == '4 of 5 seeds have finished'


def test_a_diverging_rate_loses_and_an_arm_without_a_rate_is_named(place):
    plan = make_plan(ARMS, '--seeds=3', '--rates=(1e-2, 2e-2, 4e-2)')
    for run in Results(plan).all_runs():
        folder = pretend(plan, run, scatter(run.seed))
        if run.rate > 1e-2 or run.arm == 'svformer':
            text = (folder / 'log.jsonl').read_text()
            (folder / 'log.jsonl').write_text(re.sub(r'"mean": [\d.]+', '"mean": null', text))
    results = Results(plan)
    # 1e-2 is an edge: below it, one more is tried.
    assert list(results.tune('vanilla')['trials']) == [5e-3, 1e-2, 2e-2, 4e-2]
    assert results.rate('svformer') is None
    text = report.markdown(collect(plan))
    assert 'No learning rate of svformer ends with a finite loss: give other --rates.' in text
    assert 'svformer_lr0.01_seed101: diverged' in text


@pytest.mark.parametrize('damage', ['failed', 'damaged'])
def test_a_tuning_run_that_is_tried_again_has_not_lost_yet(place, monkeypatch, damage):
    words = (ARMS, '--seeds=3', '--rates=(1e-2, 2e-2, 4e-2)')
    plan = make_plan(*words)
    for run in Results(plan).all_runs():
        pretend(plan, run, scatter(run.seed) + abs(math.log(run.rate / 2e-2)))
    folder = plan.folder / 'vanilla_lr0.02_seed101'
    text = (folder / 'log.jsonl').read_text()
    (folder / 'log.jsonl').write_text(text[:-9] if damage == 'damaged' else '')
    if damage == 'failed':
        launch.failure_file(folder).write_text('killed by SIGKILL')

    names = []
    monkeypatch.setattr(launch, 'launch', lambda jobs, *more: names.extend(j.name for j in jobs()))
    assert compare_command(*words)[0] == 0
    # Neither another rate, nor test runs at a rate that is not the best.
    assert [name for name in names if name.startswith('vanilla')] == [folder.name]


def test_progress_counts_the_steps_of_each_run(place, capsys):
    plan = make_plan('--arms=vanilla; long: max_iters=60', '--seeds=2', '--baseline_steps=(240,)')
    results = pretend_all(plan, lambda run: scatter(run.seed))
    watcher = compare.Watcher(results, plan.folder.read_text)  # an OSError: it is a folder
    watcher.last_report = -math.inf
    shown = []
    watcher.progress.show = lambda *numbers: shown.append(numbers)
    watcher.tick([])
    assert shown == [(6, 6, 660, 660)]
    assert 'warning: cannot draw the report: IsADirectoryError: ' in capsys.readouterr().err


# --- runs that exist ------------------------------------------------------------------------------


def test_existing_runs_are_grouped_by_all_but_the_seed(place):
    plan = make_plan(ARMS, '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm) - 0.5 * (run.arm == 'resformer'))
    folders = sorted(str(log.parent) for log in plan.folder.glob('*/log.jsonl'))
    folders.sort(key=lambda name: 'vanilla' not in name)
    status, text = runs.call(compare.main, *folders, '--contrasts=svformer_lr0.02-resformer_lr0.02')
    assert status == 0
    comparison = compare_runs(CompareConfig(runs=tuple(folders)))
    assert list(comparison['arms']) == ['vanilla_lr0.02', 'resformer_lr0.02', 'svformer_lr0.02']
    assert comparison['contrasts']['resformer_lr0.02-vanilla_lr0.02']['verdict'] == 'better'
    assert 'not planned as a comparison' in report.markdown(comparison)
    assert Path('out/compare/small_runs/report.html').exists()


def test_runs_that_began_with_other_weights_are_another_arm(place):
    plan = make_plan('--arms=vanilla; b: dropout=0.1', '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    logs = sorted(plan.folder.glob('*/log.jsonl'))
    origins = {'vanilla': {}, 'b': {'dropout': 0.0, 'origin': 'out/first/ckpt.pt'}}
    for log in logs:
        path = log.parent / 'config.json'
        arm = log.parent.name.partition('_')[0]
        path.write_text(json.dumps({**json.loads(path.read_text()), **origins[arm]}))
    comparison = compare_runs(CompareConfig(runs=tuple(str(log.parent) for log in logs)))
    words = {name.partition('_')[0]: arm['words'] for name, arm in comparison['arms'].items()}
    assert words == {'b': '', 'vanilla': 'origin=scratch'}


def test_a_curve_that_ends_early_has_no_value_at_the_end():
    whole = {'steps': list(range(100)), 'mean': [-0.1] * 100}
    short = {'steps': list(range(30)), 'mean': [-0.2] * 30}
    comparison = {'baseline': 'vanilla', 'curves': {'whole': whole, 'short': short}}
    _, head, rows = report.curve_table(comparison)
    assert head[1:] == ['step 5', 'step 10', 'step 25', 'step 50', 'step 74', 'step 99']
    minus = report.MINUS
    assert rows[0][1:] == [f'{minus}0.1000'] * 6
    assert rows[1][1:] == [f'{minus}0.2000'] * 3 + [''] * 3


def test_an_arm_may_be_evaluated_more_often(place):
    plan = make_plan('--arms=vanilla; mine: v_residual=True eval_interval=5', '--seeds=1')
    intervals = [plan.configs(Run(arm, 1e-2, 1))[0].eval_interval for arm in ('vanilla', 'mine')]
    assert intervals == [0, 5]


def test_one_seed_says_what_it_cannot_say(place):
    plan = make_plan(ARMS, '--seeds=1')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    folders = [str(plan.run_folder(Run(arm, 0.02, 1))) for arm in plan.arms]
    status, text = runs.call(compare.main, *folders, '--name=one')
    assert status == 0
    assert 'undecided' in text and 'One seed does not tell' in text
    words = Path('out/compare/one/report.md').read_text()
    assert '1 of at least 3 seeds' in words and 'better than' not in words


def test_existing_runs_that_cannot_be_compared_have_no_verdict(place):
    plan = make_plan('--arms=vanilla; longer: max_iters=40', '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    folders = [str(log.parent) for log in sorted(plan.folder.glob('*/log.jsonl'))]
    (contrast,) = compare_runs(CompareConfig(runs=tuple(folders)))['contrasts'].values()
    assert contrast['verdict'] == 'undecided' and 'they differ in max_iters' in contrast['reason']
    for words, message in (
        ([folders[0]], 'nothing to compare'),
        (['out'], 'is not a run'),
        ([*folders, '--seeds=3'], '--seeds is for runs to be trained'),
        ([*folders, 'small.py'], 'not both'),
        ([*folders, '--name=small'], 'holds a planned comparison'),
    ):
        if words[-1] == '--name=small':
            plan.write({})
        status, _ = runs.call(compare.main, *words)
        assert message in str(status)


def test_existing_runs_must_be_evaluated_on_the_same_texts(place):
    plan = make_plan('--arms=vanilla; b: batch_size=4 gradient_accumulation_steps=2', '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    logs = sorted(plan.folder.glob('*/log.jsonl'))
    different = 'their losses are those of different texts: eval_iters * batch_size=16 and 8'
    for iters, iters_of_b, reason in ((0, 0, ''), (2, 2, different), (2, 4, '')):
        for log in logs:
            is_b = runs.read_config(log.parent)['batch_size'] == 4
            runs.edit_config(log.parent, eval_iters=iters_of_b if is_b else iters)
        options = CompareConfig(runs=tuple(str(log.parent) for log in logs))
        (contrast,) = compare_runs(options)['contrasts'].values()
        assert contrast['reason'].startswith(reason)
        assert (contrast['p_holm'] is None) == bool(reason)


def change_config(folder, **values):
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_runs_must_have_seen_the_same_data(place):
    plan = make_plan('--arms=vanilla; b: share_v=True', '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    logs = sorted(plan.folder.glob('*/log.jsonl'))
    options = CompareConfig(runs=tuple(str(log.parent) for log in logs))
    for others, reason in (('abc', ''), ('def', 'not the same data: ')):
        for log in logs:
            change_config(log.parent, data=others if 'seed3' in str(log) else 'abc')
        (contrast,) = compare_runs(options)['contrasts'].values()
        assert contrast['reason'].startswith(reason) and (contrast['p_holm'] is None) == bool(
            reason
        )

    # A plan knows the data that it trains on. Older runs do not say what theirs were.
    kinds = {}
    for seed, data in ((1, plan.data), (2, 'def')):
        folder = plan.run_folder(Run('b', 0.02, seed))
        change_config(folder, data=data)
        kinds[seed] = read_wanted(plan, Run('b', 0.02, seed))
    assert kinds[1].kind == 'finished'
    assert kinds[2].kind == 'foreign' and 'other data than its dataset now holds' in kinds[2].detail


def test_a_run_says_which_data_it_saw(place):
    status, _ = runs.call(train.main, 'small.py', '--max_iters=1', '--out_dir=out/a')
    assert status == 0
    before = runs.read_config('out/a')['data']
    splits = {
        'train': {'A': chain(20_000, 1), 'B': chain(10_000, 7)},
        'validation': {'A': chain(700, 3), 'B': chain(300, 4)},
    }
    write_dataset(place / 'data' / 'chain', splits)
    status, _ = runs.call(train.main, 'small.py', '--max_iters=1', '--out_dir=out/b')
    assert status == 0
    assert runs.read_config('out/b')['data'] != before


def test_runs_that_were_resumed_with_other_settings_are_not_what_their_settings_say(place):
    plan = make_plan('--arms=vanilla; b: share_v=True', '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    resumed = {'step': 12, 'changed': {'learning_rate': [0.01, 0.02], 'out_dir': ['a', 'b']}}
    resumed |= {'before': {'cpu': 'another'}, 'provenance': {}}
    folders = [plan.run_folder(Run(arm, 0.02, 2)) for arm in plan.arms]
    everything = sorted(str(log.parent) for log in plan.folder.glob('*/log.jsonl'))
    options = CompareConfig(runs=tuple(everything))

    def add(folder):
        log = folder / 'log.jsonl'
        lines = log.read_text().splitlines(keepends=True)
        log.write_text(''.join([*lines[:12], json.dumps(resumed) + '\n', *lines[12:]]))

    add(folders[1])
    comparison = compare_runs(options)
    (contrast,) = comparison['contrasts'].values()
    wanted = f'{folders[1]} was resumed at step 12 with learning_rate=0.02, before 0.01'
    assert contrast['reason'] == wanted and contrast['p_holm'] is None
    assert comparison['provenance']['cpu'] == ['another']
    state = read_wanted(plan, Run('b', 0.02, 2))
    assert (state.kind, state.detail) == ('foreign', wanted.removeprefix(f'{folders[1]} was '))

    # Both runs of the pair, and alike: then they can be compared.
    add(folders[0])
    (contrast,) = compare_runs(options)['contrasts'].values()
    assert contrast['p_holm'] is not None
    # Smaller micro-batches leave a run what it is.
    resumed['changed'] = {'batch_size': [8, 4], 'gradient_accumulation_steps': [1, 2]}
    add(folders[1])
    (contrast,) = compare_runs(options)['contrasts'].values()
    assert contrast['p_holm'] is not None


def test_an_arm_that_is_about_rounding_must_have_rounded_so(place):
    arms = '--arms=vanilla; half: dtype=bfloat16'
    plan = make_plan(arms, '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    change_config(plan.run_folder(Run('vanilla', 0.02, 1)), dtype='bfloat16')
    changed = make_plan(arms.replace('bfloat16', 'float32'), '--seeds=3')
    kinds = {run.name: changed_kind(changed, run) for run in Results(changed).all_runs()}
    # Of the baseline, it is the machine's choice.
    assert {kind for name, kind in kinds.items() if 'vanilla' in name} == {'finished'}
    assert {kind for name, kind in kinds.items() if 'half' in name} == {'foreign'}

    # Runs that exist and differ in nothing else.
    folders = [plan.run_folder(Run(arm, 0.02, seed)) for arm in plan.arms for seed in (2, 3)]
    options = CompareConfig(runs=tuple(map(str, folders)))
    arms = compare_runs(options)['arms']
    assert [arm['words'] for arm in arms.values()] == ['', 'dtype=bfloat16']


def changed_kind(plan, run):
    return read_wanted(plan, run).kind


def read_wanted(plan, run):
    return read_state(plan.run_folder(run), plan.wanted(run), plan.ignored(run))


def test_an_arm_may_weight_the_domains_otherwise(place):
    plan = make_plan("--arms=vanilla; more_a: domain_weights={'A': 0.9, 'B': 0.1}", '--seeds=3')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    (contrast,) = collect(plan)['contrasts'].values()
    assert contrast['p_holm'] is not None


@pytest.mark.parametrize(
    'words, message',
    [
        (['--dataset=nothing'], 'data/nothing'),
        (['--lr_decay_iters=2'], 'lr_decay_iters=2 is not after warmup_iters=3'),
    ],
)
def test_what_every_training_would_refuse_is_refused_before_the_first(place, words, message):
    status, _ = compare_command('--arms=vanilla; b: share_v=True', '--seeds=1', *words)
    assert status.startswith('error: arm vanilla: ') and message in status
    assert not list(Path('out').rglob('log.jsonl'))


def test_gpus_must_share_the_micro_batches_of_every_arm(place):
    plan = make_plan('--arms=vanilla; b: gradient_accumulation_steps=3', '--gpus=2')
    with pytest.raises(ValueError, match='arm vanilla: gradient_accumulation_steps=1 is not div'):
        plan.check_training()
    plan = make_plan('--arms=vanilla; b: gradient_accumulation_steps=3 batch_size=2', '--gpus=1')
    assert plan.check_training() == []


# --- the report -----------------------------------------------------------------------------------


def test_the_report_needs_no_network_and_begins_with_the_verdicts(place):
    plan = make_plan(ARMS, '--seeds=5', '--contrasts=svformer-resformer')
    gains = {'vanilla': 0.0, 'resformer': -0.2, 'svformer': -0.2}
    pretend_all(plan, lambda run: scatter(run.seed, run.arm) + gains[run.arm])
    comparison = collect(plan)
    page, text = report.html(comparison), report.markdown(comparison)
    assert page.count('<svg') >= 4
    for link in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert link.startswith('#'), link
    assert 'Better: resformer against vanilla, svformer against vanilla.' in text
    assert text.index('Better:') < text.index('## Arms')
    assert 'Undecided: svformer against resformer.' in text
    # No color that only one of light and dark could show.
    assert not re.search(r'(?:fill|stroke): #', page)
    assert '<' not in re.sub(r'<[^<>]*>', '', page[page.index('<body') :])


def test_two_processes_write_one_report(place):
    plan = make_plan(ARMS, '--seeds=1', '--name=a/b')
    pretend_all(plan, lambda run: scatter(run.seed, run.arm))
    for name in ('report.json', 'report.md', 'report.html', 'forest.svg'):
        (plan.folder / f'{name}.tmp').mkdir()  # as another process has it open
    _, text = compare_command(ARMS, '--seeds=1', '--name=a/b', '--watch=True')
    assert text.endswith('\nwrote out/compare/a/b/report.html\n')


def test_commands_for_any_scheduler(place):
    words = (ARMS, '--seeds=2', '--rates=(1e-2, 2e-2)', '--print=True')
    status, text = compare_command(*words)
    assert status == 0
    lines = text.splitlines()
    assert len(lines) == len(set(lines)) == 3 * 2 * 2
    assert all(line.startswith('OMP_NUM_THREADS=1 python train.py small.py ') for line in lines)
    status, text = compare_command(*words, '--gpus=8')
    assert '-m torch.distributed.run --standalone --nproc_per_node=8 train.py' in text
    # What has arrived is not asked for again, and nobody waits for it.
    plan = make_plan(*words)
    pretend_all(plan, lambda run: scatter(run.seed))
    assert compare_command(*words) == (0, '')
    status, text = compare_command(*words[:-1], '--watch=True')
    assert status == 0 and 'small: vanilla, resformer, svformer\n' in text


# --- really run -----------------------------------------------------------------------------------


def test_vanilla_is_vanilla_and_a_third_of_the_best_rate_is_worse(place):
    """On a model that is trained for real: again, the same arm under other seeds, is undecided."""
    arms = '--arms=vanilla; again: seed_offset=50; slow: learning_rate=6.7e-3'
    status, text = compare_command(arms, '--seeds=3')
    assert status == 0
    contrasts = json.loads(Path('out/compare/small/report.json').read_text())['contrasts']
    assert contrasts['again-vanilla']['verdict'] == 'undecided'
    assert contrasts['slow-vanilla']['verdict'] == 'worse'
    assert 'slow is worse than vanilla' in text

    # Nothing is left to train, and the report is the same.
    before = runs.snapshot('out/compare/small')
    assert compare_command(arms, '--seeds=3') == (0, text)
    assert runs.snapshot('out/compare/small') == before
