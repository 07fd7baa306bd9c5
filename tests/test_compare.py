"""compare.py: arms, rates, seeds and plan; what it trains, collects, refuses and reports."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import comparisons
import pytest
import runs
import scipy.stats
from comparisons import (
    ARMS,
    best_at,
    collect,
    compare_command,
    finished,
    folder_of,
    make_plan,
    pretend,
    pretend_all,
    scatter,
)
from conftest import (
    assert_one_line,
    contents,
    read_json,
    write_dataset,
    write_json,
)

import compare
import train
from comparison import charts, launch, record, report, verdict
from comparison.assemble import arm_of, compare_runs
from comparison.plan import Plan, Run
from comparison.record import code_state, contents_of, hash_of, write_plan
from comparison.results import Results, next_rate, planned_steps
from comparison.runs import read_state
from lib.data import Dataset
from lib.files import as_json, locked
from lib.rundir import code_fingerprint
from model import GPT

place = comparisons.place

RATES = '--rates=(1e-2, 2e-2, 4e-2)'


def contrast_of(comparison):
    (contrast,) = comparison['contrasts'].values()
    return contrast


def folders_of(plan):
    return sorted(str(log.parent) for log in plan.folder.glob('*/log.jsonl'))


def not_finite(folder):
    path = folder / 'log.jsonl'
    path.write_text(re.sub(r'"mean": [\d.]+', '"mean": null', path.read_text()))


# --- arms and plan --------------------------------------------------------------------------------


def test_a_plan_from_python_is_that_of_the_command_line(place):
    """Of a config file that an arm names, the wiring counts, what is no default of training, not the size."""
    (place / 'wiring.py').write_text(
        "v_residual, n_layer, weight_decay = True, 5, 0.1\nlearning_rate, optimizer = 1.0, 'muon'\n"
    )
    slow = {'learning_rate': 5e-3, 'residual_lambda': (5.0, 1.0), 'v_residual': True}
    slow['optimizer'] = 'muon'
    arms = {'vanilla': {}, 'slow': slow | {'seed_offset': 50}}
    options = compare.CompareConfig(seeds=(1, 2))
    ours = Plan(arms, Path('out/compare/small'), {'weight_decay': 0.2}, ['small.py'], options)
    text = 'slow: learning_rate=5e-3 wiring.py --residual_lambda=(5.0, 1.0) seed_offset=50'
    plan = make_plan(f'--arms=vanilla; {text}', '--weight_decay=0.2', '--seeds=2')
    assert contents_of(ours) == contents_of(plan)
    # The config may be edited while runs are trained: it is read once.
    with open('small.py', 'a') as file:
        file.write('learning_rate = weight_decay = 1.0\n')
    run = Results(ours).test_runs('slow')[2]
    assert run == Run('slow', 5e-3, 52)

    settings, config = ours.configs(run)
    assert (settings.seed, settings.weight_decay, config.n_layer) == (52, 0.2, 2)
    assert (settings.learning_rate, settings.min_lr) == (5e-3, 5e-4)  # the config's ratio
    assert (settings.eval_iters, settings.eval_interval) == (0, 0)
    assert settings.out_dir == 'out/compare/small/slow_lr0.005_seed52'


AMBIGUOUS = '--arms=c; a: dropout=0.1; b-c: dropout=0.2; a-b: dropout=0.3'


@pytest.mark.parametrize(
    'words, names',
    [
        (['--arms=vanilla'], 'two arms'),
        (['--arms=vanilla; vanilla: share_v=True'], 'two arms are named vanilla'),
        (['--arms=vanilla; Mine: share_v=True; mine: v_residual=True'], 'Mine and mine'),
        (['--arms=vanilla; a b: share_v=True'], 'a b'),
        (['--arms=vanilla; a: share_v'], 'key=value'),
        (['--arms=vanilla, a: share_v=True'], "', a:'"),
        (['--arms=vanilla; a: share_v=True, typo.py'], "', typo.py'"),
        (['--arms=vanilla; a: seed=3'], 'arm a: seed'),
        (['--arms=vanilla; a: n_kv_head=2'], 'seed_offset'),  # what the default stands for
        (['--arms=vanilla; a: block_size=16'], 'block_size=16'),
        (['--arms=vanilla; a: share_v=True v_residual=True'], 'arm a: '),
        (['--arms=vanilla; a: typo.py'], 'residual_lamda'),
        (['--arms=vanilla; a: dropout=0.1 --dropout=0.2'], 'arm a: dropout is given twice'),
        ([ARMS, '--contrasts=svformer-mine'], 'svformer-mine'),
        ([ARMS, '--contrasts=(svformer-resformer)-(resformer-vanilla)'], 'is A-B in 0 ways'),
        ([AMBIGUOUS, '--contrasts=a-b-c'], 'in 2 ways'),
        ([ARMS, '--seeds=0'], 'seeds'),
        ([ARMS, '--seeds=1337'], '--seeds=(1337,)'),
        ([ARMS, '--seeds=(1, 1)'], 'seeds=(1, 1)'),
        ([ARMS, '--rates=(1e-3,)'], 'learning_rate'),
        ([ARMS, '--tuning_seeds=(7, 8)'], '--rates'),
        ([ARMS, "--rates=(1e-3, 'x')"], 'rates='),
        ([ARMS, '--rates=(1e-3, 2e-3)', '--learning_rate=1'], 'learning_rate'),
        (['--arms=vanilla; a: seed_offset=100', RATES, '--seeds=3'], '101, 102'),
        (['--arms=v; a: seed_offset=50; b: seed_offset=51'], 'seed_offset=50 and 51'),
        (['--arms=vanilla; a: seed_offset=x'], 'seed_offset=x'),
        ([ARMS, '--judgement=dunnet'], "judgement='dunnet'"),
        ([ARMS, '--judgement=dunnett'], 'vanilla and resformer share seeds'),
        (
            [ARMS, '--judgement=dunnett', '--contrasts=svformer-resformer'],
            'drop svformer-resformer',
        ),
        ([ARMS, '--name=../../../evil'], '../../../evil'),
        ([ARMS, '--name=/evil'], '/evil'),
        ([ARMS, '--dataset=nothing'], 'data/nothing'),
        ([ARMS, '--lr_decay_iters=2'], 'warmup_iters=3'),
        ([ARMS, '--gpus=2'], 'gradient_accumulation_steps=1'),
        (['tuned.py', ARMS], "init_from='.'"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_written(place, words, names):
    Path('typo.py').write_text('residual_lamda = (5.0, 1.0)\n')
    Path('tuned.py').write_text("init_from = '.'\n")
    assert_one_line(compare_command(*words)[0], names)
    assert not Path('out').exists()


def test_arms_may_name_their_dataset_and_their_least_rate(place):
    write_dataset(Path('data/other'))
    plan = make_plan('--arms=a: dataset=other; b: dataset=other min_lr=0')
    assert plan.data == Dataset('other').fingerprint() != Dataset('chain').fingerprint()
    least, own = (plan.configs(plan.example(arm))[0].min_lr for arm in 'ab')
    assert own == 0 < least


def test_an_arm_may_differ_in_how_it_rounds_alone(place):
    plan = finished('--arms=vanilla; half: dtype=bfloat16', '--seeds=3')
    assert contents_of(plan)['arms']['half']['differs'] == {'dtype': 'bfloat16'}
    runs.edit_config(folder_of(plan, 'vanilla', 1), dtype='bfloat16')
    assert collect(plan)['problems'] == {}  # of the baseline, it is the machine's choice
    runs.edit_config(folder_of(plan, 'half', 1), dtype='float32')
    assert 'dtype' in collect(plan)['problems']['half_lr0.02_seed1']


def written_plan(*words):
    """The file of the plan that a command writes."""
    assert compare_command(*words, '--print=True')[0] == 0
    return Path('out/compare/small/plan.json')


def test_the_plan_comes_first_and_takes_only_more_seeds(place):
    path = written_plan(ARMS, '--seeds=2')
    before = read_json(path)
    assert before['plan']['contrasts'] == ['resformer-vanilla', 'svformer-vanilla']
    assert before['plan']['settings']['data'] and before['commit']

    for words, name in (
        ([ARMS, '--seeds=(1, 3)'], 'seeds was [1, 2], not [1, 3]'),
        ([ARMS, '--seeds=2', '--weight_decay=0.3'], 'weight_decay'),
        ([ARMS, '--seeds=2', '--contrasts=svformer-resformer'], 'contrasts'),
        ([ARMS.replace('share_v', 'share_k'), '--seeds=2'], 'differs of svformer'),
        ([ARMS, '--seeds=2', '--dtype=bfloat16'], 'rounding was'),
    ):
        status, _ = compare_command(*words)
        assert f'{path} is another plan: {name}' in status and '--name' in status
    assert read_json(path) == before

    # What only the older or the newer code knows is no change of the plan.
    del before['hash'], before['plan']['settings']['grad_clip']
    before['plan'] |= {'equal': 'steps', 'settings': before['plan']['settings'] | {'gone': 1}}
    write_json(path, before | {'hash': hash_of(before)})
    status, _ = compare_command(ARMS, '--seeds=2', '--grad_clip=0.5')
    assert 'grad_clip was 1.0, not 0.5' in status  # its default then
    assert 'the plan had 1, 2 before' in report.markdown(collect(finished()))
    # The plan stays as it was written.
    now = read_json(path)
    assert now['earlier_seeds'] == [[1, 2]] and len(now['extensions']) == 1
    assert [now[name] for name in ('date', 'runs_before')] == [before['date'], 0]
    assert written_plan(ARMS, '--seeds=(3, 2, 1)').read_text() == path.read_text()


@pytest.mark.parametrize(
    'old, new, words',
    [
        ('{', '', 'is damaged'),
        ('"seed_offset"', '"seed_of_set"', 'is damaged'),
        ('"metric": "', '"metric": "another ', 'was edited'),
        ('"diff": "', '"diff": "another ', 'was edited'),
    ],
)
def test_a_plan_that_is_damaged_or_was_edited_is_refused(place, old, new, words):
    path = written_plan(ARMS)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    status, _ = compare_command(ARMS, '--print=True')
    assert_one_line(status, path, words, 'move it away')


def test_another_level_is_another_plan_and_other_words_of_a_rule_are_shown(place, monkeypatch):
    written_plan(ARMS)
    with monkeypatch.context() as patch:
        patch.setitem(verdict.RULES, 'paired', 'heads or tails')
        compare_command(ARMS, '--print=True')
    text = Path('out/compare/small/report.md').read_text()
    assert '- rule: heads or tails' in text
    assert f'- rule, in the words of the plan: {verdict.RULE}' in text
    monkeypatch.setattr(record, 'LEVEL', 0.2)
    assert_one_line(compare_command(ARMS, '--print=True')[0], 'level was 0.05, not 0.2')


def test_the_code_of_a_plan_is_the_commit_and_what_differs_from_it(tmp_path, monkeypatch):
    """In Python files: tests and pages decide nothing, nor do git's settings here."""
    names = ('model.py', 'tests/test_a.py', 'README.md')
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('before\n')
    who = '-c user.name=a -c user.email=a'
    settings = [f'config {name}' for name in ('color.ui always', 'diff.external false')]
    for command in ('init -q', 'add .', f'{who} commit -qm first', *settings):
        subprocess.run(['git', *command.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr('lib.rundir.ROOT', tmp_path)
    monkeypatch.setenv('GIT_DIR', 'another')
    clean = code_state()
    assert len(clean['commit']) == 40 and clean['diff'] == ''
    for name in (*names, 'idée.py', 'idea.txt'):
        (tmp_path / name).write_bytes(b'after \xff\n')
    changed = code_state()
    assert changed['commit'] == clean['commit']
    assert re.findall(r'^\+\+\+ b/(.*)$', changed['diff'], re.M) == ['model.py', 'idée.py']
    assert changed['diff'].count('\n+after \N{REPLACEMENT CHARACTER}\n') == 2


PROGRAM = 'x = 1  # a\n\ny = f"""\n\n{x} # b"""\nz = (1,\n     # c\n     2)\n'
NO_CODE = ('tests/a/b.py', 'data/a.py', 'out/a.py', 'results/a/a.py', 'README.md', 'lib/mine.pyc')
NO_CODE += ('lib/._data.py', '.a/a.py', 'env/lib/a.py', 'other/a.py')


@pytest.mark.parametrize(
    'name, text, counts',
    [
        *((name, 'new', True) for name in ('mine.py', 'hub/mine.py', 'lib/idea/gate.py')),
        *((name, 'new', False) for name in NO_CODE),
        ('train.py', '\n# d\n' + PROGRAM.replace('  # a\n', '\r\n').replace('# c', '# e'), False),
        ('train.py', PROGRAM.replace('# b', '# c'), True),
        ('train.py', PROGRAM.replace('f"""\n', 'f"""'), True),
        ('train.py', 'x = "# a', True),
    ],
)
def test_the_code_of_a_run_is_what_python_could_import_without_comments(
    tmp_path, monkeypatch, name, text, counts
):
    """The same for each version of Python."""
    monkeypatch.setattr('lib.rundir.ROOT', tmp_path)
    files = {'train.py': PROGRAM, 'lib/data.py': '', 'env/pyvenv.cfg': '', 'other/.git': ''}
    (tmp_path / 'lib').mkdir()
    for link in ('lib/.#data.py', 'lib/above'):
        (tmp_path / link).symlink_to('..')
    for path, content in [*files.items(), (name, text)]:
        before = code_fingerprint()
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content, newline='')
    assert before == 'ff426767d9b4' and (code_fingerprint() != before) == counts


def edited(monkeypatch):
    """Let model.py have been edited since the last command."""
    monkeypatch.setattr('comparison.plan.code_fingerprint', lambda: 'edited')


def test_seeds_of_edited_code_join_a_plan_only_where_the_user_says_so(place, monkeypatch):
    plan = make_plan(ARMS, '--seeds=3')
    write_plan(plan)
    pretend_all(plan)
    edited(monkeypatch)
    status, _ = compare_command(ARMS, '--seeds=4', '--print=True')
    assert_one_line(status, 'plan.json', f'code was {plan.code}', '--name', '--mixed_code=True')

    words = (ARMS, '--seeds=4', '--mixed_code=True')
    finished(*words)
    status, text = compare_command(*words)
    assert status == 0
    first = text.splitlines()[0]
    assert f'different code: 9 of {plan.code}; 3 of edited' in first
    for name in ('report.md', 'report.html'):
        page = Path('out/compare/small', name).read_text()
        assert page.index('3 of edited') < page.index('against vanilla')
        assert 'code of some runs: another one, edited' in page


@pytest.mark.parametrize('what', ['code', 'data', 'failed'])
def test_runs_are_not_started_once_code_or_data_were_edited(place, monkeypatch, what):
    main = train.main

    def train_and_edit():
        main()
        write_dataset(place / 'data' / 'chain') if what == 'data' else edited(monkeypatch)
        if what == 'failed':
            (place / 'out/compare/small/vanilla_lr0.02_seed1/log.jsonl').unlink()
            sys.exit('error: no memory')

    monkeypatch.setattr(train, 'main', train_and_edit)
    words = (ARMS, '--seeds=1')
    assert_one_line(compare_command(*words)[0], 'edited', 'not started: 2', '--mixed_code=True')
    plan = make_plan(*words)
    problems = read_json(plan.folder / 'report.json')['problems']
    missing = [name for name in problems if problems[name] == 'missing']
    assert missing == ['resformer_lr0.02_seed1', 'svformer_lr0.02_seed1']


def test_a_run_of_other_code_is_foreign_to_its_plan(place):
    """Also one that was interrupted, and went on with other code."""
    plan = finished()
    whole, half = (folder_of(plan, 'svformer', seed) for seed in (1, 2))
    runs.edit_config(whole, code='other')
    log = half / 'log.jsonl'
    log.write_text('{"step": 9, "before": {"code": "other"}}\n' + log.read_text())
    problems = collect(plan)['problems']
    assert list(problems) == [whole.name, half.name]
    assert 'by other code, other, not' in problems[whole.name]
    assert f'other, then {plan.code}, not' in problems[half.name]
    assert '--mixed_code=True' in problems[half.name]
    mixed = make_plan(ARMS, '--seeds=3', '--mixed_code=True')
    assert collect(mixed)['code'] == {'other': 1, f'other, then {plan.code}': 1, plan.code: 7}


def test_existing_runs_of_different_code_are_kept_apart_unless_the_user_says_so(place):
    """Of older runs, which do not say their code, the commit counts."""
    plan = finished('--arms=vanilla; mine: share_v=True', '--seeds=3', mine=-0.3)
    mine, vanilla = folders_of(plan)[:3], folders_of(plan)[3:]
    for folder in mine:
        runs.edit_config(folder, code=None, commit='older')
    reason = contrast_of(compare_runs([*vanilla, *mine], 'a'))['reason']
    assert 'differ in code' in reason and '--mixed_code=True' in reason
    assert contrast_of(compare_runs([*vanilla, *mine], 'a', mixed_code=True))['verdict'] == 'better'
    for folder in vanilla:  # which do not say theirs
        runs.edit_config(folder, code=None)
    assert contrast_of(compare_runs([*vanilla, *mine], 'a'))['verdict'] == 'better'
    runs.edit_config(mine[0], code='newer')
    assert 'differ in code' in contrast_of(compare_runs([*vanilla, *mine], 'a'))['reason']


# --- rates ----------------------------------------------------------------------------------------


def test_each_arm_goes_on_at_its_own_best_rate(place):
    best = {'vanilla': 2e-2, 'resformer': 4e-2, 'svformer': 1e-2}
    plan = make_plan(ARMS, '--seeds=3', '--rates=(1e-2, 2e-2)')
    results = pretend_all(plan, best_at(best))
    assert {arm: results.rate(arm) for arm in best} == best
    # The best of two is at an edge: one more step, once.
    sweeps = {arm: results.tune(arm) for arm in best}
    assert list(sweeps['vanilla']['trials']) == [1e-2, 2e-2, 4e-2]
    assert list(sweeps['svformer']['trials']) == [5e-3, 1e-2, 2e-2]
    assert [arm for arm, sweep in sweeps.items() if sweep['edge']] == ['resformer']
    assert 'best learning rate of resformer, 0.04, is at the edge' in report.markdown(collect(plan))
    assert next_rate([1.5e-3, 3e-3, 6e-3], 6e-3) == 1.2e-2
    for run in results.all_runs():
        assert (run.seed in plan.tuning_seeds) != (run.seed in plan.seeds)
    # Each arm has three rates with two tuning seeds, and three test seeds.
    assert len(planned_steps(results)) == len(results.all_runs()) == 27


@pytest.mark.parametrize(
    'reason, rate',
    [('killed by SIGKILL', None), (f'20 steps in a row {train.NOT_FINITE}', 2e-2)],
)
def test_a_tuning_run_that_was_killed_says_nothing_about_its_rate(place, reason, rate):
    """One that training gave up has lost."""
    plan = make_plan(ARMS, '--seeds=3', RATES)
    pretend_all(plan, best_at(dict.fromkeys(plan.arms, 2e-2)))
    folder = plan.folder / f'svformer_lr{0.02 if rate is None else 0.04}_seed102'
    (folder / 'log.jsonl').unlink()
    launch.failure_file(folder).write_text(f'{reason}\n')
    results = Results(plan)
    assert [results.rate(arm) for arm in plan.arms] == [2e-2, 2e-2, rate]
    comparison = collect(plan)
    assert bool(comparison['problems']) == (rate is None)
    if rate is None:
        text = comparison['contrasts']['svformer-vanilla']['reason']
        assert f'{folder.name} is failed: killed by SIGKILL' in text

    # A killed one is tried again first: neither another rate, nor test runs at one that is not the best.
    Path(folder, 'log.jsonl').write_text('')
    assert [job.folder for job in results.jobs()] == [folder] * (rate is None)


def test_where_every_rate_diverged_there_is_nothing_to_wait_for(place, capsys):
    words = ('--arms=vanilla; mine: share_v=True', '--seeds=3', RATES)
    plan = make_plan(*words)
    for run in Results(plan).all_runs():
        not_finite(pretend(plan, run, 2.0))
    reason = 'the learning rate of mine is not known, because none of its --rates'
    assert reason in contrast_of(collect(plan))['reason']
    assert compare_command(*words, '--print=True') == (0, '')
    assert reason in capsys.readouterr().err
    assert compare_command(*words)[0] == 1


# --- what has arrived -----------------------------------------------------------------------------

TWO_BY_TWO = '--arms=vanilla; v: v_residual=True; norm: embed_norm=True; both: v_residual=True embed_norm=True'
LEADS = 'both-norm v-vanilla (both-norm)-(v-vanilla)'


def test_a_contrast_may_be_the_difference_of_two_leads(place):
    """Does an idea still help where something else is on, too?"""
    gains = {'vanilla': 0.0, 'v': -0.4, 'norm': -0.3, 'both': -0.5}
    words = (TWO_BY_TWO, '--seeds=4', f'--contrasts={LEADS}')
    plan = finished(*words, **gains)
    comparison = collect(plan)
    *_, contrast = comparison['contrasts'].values()
    for seed in plan.seeds:
        loss = {arm: scatter(seed, arm) + gain for arm, gain in gains.items()}
        expected = loss['both'] - loss['norm'] - loss['v'] + loss['vanilla']
        assert contrast['differences'][seed] == pytest.approx(expected)
    text = report.markdown(comparison)
    assert (
        f'(both-norm) is higher than (v-vanilla) by {contrast["mean"]:.4f} nats: less is gained'
        in text
    )
    lead = comparison['contrasts']['both-norm']['mean']
    assert f'Differences of losses {report.signed(lead)} and' in text

    shutil.rmtree(folder_of(plan, 'norm', 2))
    *_, contrast = collect(plan)['contrasts'].values()
    assert (
        contrast['verdict'] == 'undecided' and 'norm_lr0.02_seed2 is missing' in contrast['reason']
    )

    # Both lose, and the one with the norm less.
    gains |= {'v': 0.4, 'both': -0.1}
    lost = finished(*words, '--name=lost', **gains)
    assert 'nats: less is lost there' in report.headline(collect(lost))


def test_the_report_shows_where_an_arm_leads(place):
    plan = finished('--arms=vanilla; mine: share_v=True', '--seeds=3')
    leads = [0.5, -0.1, 0.2]
    for seed, lead in zip(plan.seeds, leads, strict=True):
        for arm, loss in {'vanilla': 2.0, 'mine': 2.0 + lead}.items():
            log = folder_of(plan, arm, seed) / 'log.jsonl'
            log.write_text(log.read_text().replace('"Domain"', f'"Code": {loss}, "Domain"'))
    low, high = scipy.stats.ttest_1samp(leads, 0).confidence_interval()
    ends = f'{report.signed(low)} to {report.signed(high)}'
    text = report.markdown(collect(plan))
    assert f'| mine | Code | +0.2000 | {ends} |' in text and '| mine | mean |' not in text


def test_leads_of_different_code_or_texts_have_no_verdict(place):
    plan = finished(TWO_BY_TWO, '--seeds=4')
    folders = sorted(folders_of(plan), reverse=True)
    with_norm = [folder for folder in folders if '/norm' in folder or '/both' in folder]
    for folder in with_norm:  # extended by a step, with another rate there
        log = Path(folder, 'log.jsonl')
        last = json.dumps({'step': 31, 'val': read_state(folder).losses})
        log.write_text(log.read_text() + RESUMED + last + '\n')
        runs.edit_config(folder, max_iters=31)
    for changed in ('', 'code', 'data'):
        for folder in folders:
            runs.edit_config(folder, code='abc', data='abc')
            runs.edit_config(folder, **{changed: 'def'} if changed and folder in with_norm else {})
        *_, contrast = compare_runs(folders, 'leads', LEADS)['contrasts'].values()
        assert changed in contrast['reason'] and bool(contrast['reason']) == bool(changed)
        assert contrast['seeds_needed'] is None or not changed


def test_many_independent_arms_are_judged_together_where_the_user_says_so(place):
    """By Dunnett's test and, before its correction, by Welch's, as scipy has them, planned or not."""
    arms = [f'a{i}: neutreno=0.{i} seed_offset={100 * i}' for i in range(1, 4)]
    words = (f'--arms=vanilla; {"; ".join(arms)}', '--seeds=4', '--judgement=dunnett')
    plan = finished(*words, a3=-0.05)
    folders = sorted(folders_of(plan), key=lambda name: 'vanilla' not in name)
    planned, existing = collect(plan), compare_runs(folders, 'a', judgement='dunnett')
    control, *others = (list(arm['losses'].values()) for arm in planned['arms'].values())
    test = scipy.stats.dunnett(*others, control=control, random_state=0)
    ends = test.confidence_interval(0.95)
    for comparison in (planned, existing):
        contrasts = list(comparison['contrasts'].values())
        assert [c['p_holm'] for c in contrasts] == pytest.approx(test.pvalue)
        assert [c['high_holm'] for c in contrasts] == pytest.approx(ends.high)
        assert [c['verdict'] for c in contrasts] == ['undecided', 'undecided', 'better']
        welch = scipy.stats.ttest_ind(others[2], control, equal_var=False).confidence_interval()
        assert (contrasts[2]['low'], contrasts[2]['high']) == pytest.approx(tuple(welch))
        assert report.arm_table(comparison)[1][-4:] == ['1', '2', '3', '4']
        # What is of single seeds would need pairs.
        assert not report.domain_table(comparison)[-1] and not comparison['curves']
        text = report.markdown(comparison)
        assert "both by Dunnett's test" in text and 'rule: Every arm against' in text
    # Arms may be of different numbers.
    fewer = compare_runs(folders[1:], 'a', judgement='dunnett')
    assert fewer['contrasts']['a3-vanilla']['verdict'] == 'better'

    assert_one_line(compare_command(*words[:2])[0], 'judgement was dunnett, not paired')

    planned['arms']['vanilla']['sd'] = 1.0
    (caution,) = [note for note in report.cautions(planned) if 'scatters' in note]
    assert caution.startswith('vanilla scatters ')
    shutil.rmtree(folder_of(plan, 'a3', 303))
    for contrast in collect(plan)['contrasts'].values():
        assert contrast['verdict'] == 'undecided' and 'a3_lr0.02_seed303' in contrast['reason']


def test_every_bad_run_is_named_and_the_others_stand(place, monkeypatch):
    arms = '; '.join(f'a{i}: neutreno=0.{i}' for i in range(1, 9))
    words = (f'--arms=vanilla; {arms}', '--seeds=3')
    plan = finished(*words)
    folders = {arm: plan.folder / f'{arm}_lr0.02_seed2' for arm in plan.arms}
    logs = {arm: folder / 'log.jsonl' for arm, folder in folders.items()}
    logs['a1'].write_text(logs['a1'].read_text()[:-60])  # the last line cut
    shutil.rmtree(folders['a2'])
    for arm in ('a3', 'a8'):
        lines = logs[arm].read_text().splitlines(keepends=True)
        logs[arm].write_text(''.join(lines[:12]))
    runs.edit_config(folders['a4'], my_flag=True, my_other_flag=False)  # a fork's
    logs['a5'].write_text('')
    (folders['a5'] / 'failed.txt').write_text('CUDA out of memory\n- **Better\x1b[2J')
    not_finite(folders['a6'])
    (folders['a8'] / 'failed.txt').write_text(f'20 steps {train.NOT_FINITE}\n')  # it gave up

    comparison = collect(plan)
    names = {
        'a1': 'not a line of a training log',
        'a2': 'a2_lr0.02_seed2 is missing',
        'a3': 'step 11 of 30',
        'a4': 'my_flag=True, not None',
        'a5': 'CUDA out of memory',
        'a6': 'diverged',
        'a8': 'diverged',
    }
    for arm, text in names.items():
        contrast = comparison['contrasts'][f'{arm}-vanilla']
        assert contrast['verdict'] == 'undecided' and text in contrast['reason']
    assert comparison['contrasts']['a7-vanilla']['p_holm'] is not None
    assert {name.split('_')[0] for name in comparison['problems']} == set(names)
    # Trained again is what can be; a foreign run is never touched.
    wanted = {job.folder.name.split('_')[0] for job in Results(plan).jobs()}
    assert wanted == {'a1', 'a2', 'a3', 'a5'}

    monkeypatch.setattr(launch, 'launch', lambda *words: set())  # no run arrives
    status, text = compare_command(*words)
    assert status == 1 and 'Not finished' in text
    for name in ('report.md', 'report.html'):
        page = Path('out/compare/small', name).read_text()
        assert 'my_flag=True' in page and 'a2_lr0.02_seed2: missing' in page
    for shown in (text, Path('out/compare/small/report.md').read_text()):  # a line is ours
        assert r'failed: CUDA out of memory\n- **Better\x1b[2J' in shown


def test_where_the_data_are_not_the_plan_says_what_they_were_or_runs_are_compared_in_them(place):
    plan = make_plan(ARMS, '--seeds=3')
    write_plan(plan)
    pretend_all(plan)
    for run in folders_of(plan):
        runs.edit_config(run, data='other')
    shutil.rmtree('data')
    assert compare_command(ARMS, '--seeds=3', '--print=True')[0] == 0
    problems = read_json('out/compare/small/report.json')['problems']
    assert len(problems) == 9 and all('other data' in one for one in problems.values())

    (plan.folder / 'plan.json').unlink()
    runs.edit_config(folder_of(plan, 'svformer', 1), data='another')
    contrast = collect(make_plan(ARMS, '--seeds=3'))['contrasts']['svformer-vanilla']
    assert contrast['verdict'] == 'undecided' and 'differ in data' in contrast['reason']


# --- runs that exist ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'word, arm, folder',
    [
        ('out/window_512', 'window_512', 'out/window_512'),
        ('out/a_10M_lr7.5e-05_seed3/', 'a_10M', 'out/a_10M_lr7.5e-05_seed3/'),
        ('mine=out/x_seed3', 'mine', 'out/x_seed3'),
        ('out/x=1/b_seed3', 'b', 'out/x=1/b_seed3'),
        ('link_seed3', 'link', 'link_seed3'),
    ],
)
def test_the_arm_of_an_existing_run_is_its_folders_name_unless_it_is_given(here, word, arm, folder):
    Path('link_seed3').symlink_to('job103')
    assert arm_of(word) == (arm, folder)


def test_existing_runs_are_judged_as_their_plan_judges_them(place):
    best = {'vanilla': 1e-2, 'resformer': 2e-2, 'svformer': 4e-2}
    contrasts = '--contrasts=svformer-resformer'
    plan = make_plan(ARMS, contrasts, '--seeds=(1, 2, 3)', RATES)
    pretend_all(plan, best_at(best))
    planned, folders = collect(plan), sorted(folders_of(plan), key=lambda name: 'van' not in name)
    options = (contrasts, '--tuning_seeds=(101, 102)')
    text = runs.succeed(compare.main, *folders, *options)
    assert text.endswith('wrote out/compare/runs/report.html\n')
    found = read_json('out/compare/runs/report.json')
    for name in ('contrasts', 'tuning'):
        assert found[name] == as_json(planned[name])
    for plot in ('forest', 'rates', 'relative'):
        assert Path(f'out/compare/runs/{plot}.svg').read_text().startswith('<svg')

    def status(*words):
        return runs.call(compare.main, *words)[0]

    assert_one_line(status(*folders, '--tuning_seeds=(101,)'), 'arm vanilla', 'learning_rate')
    assert_one_line(status(*folders[1:], *options), 'arm vanilla', '[(101, 102), (102,)]')
    pretend(plan, Run('vanilla', 5e-3, 101), 1.0)
    assert_one_line(status(*folders, *options), 'arm vanilla', '0.01, but its best one is 0.005')
    tests = [name for name in folders if name.endswith(('seed1', 'seed2', 'seed3'))]
    trials = [name for name in folders if 'svformer' in name and '_seed10' in name]
    for words, untuned in (
        (tests, 'vanilla, resformer, svformer'),
        ([*tests, *trials, options[1]], 'vanilla, resformer'),
    ):
        assert status(*words) == 0
        text = Path('out/compare/runs/report.md').read_text()
        assert f'the learning rates of {untuned} were not tuned' in text
        assert 'at rates that were not tuned (0.02, 0.01)' in text


def test_what_is_asked_of_test_runs_is_asked_of_tuning_runs_whose_seeds_the_plan_names(place):
    plan = make_plan('--arms=vanilla; mine: share_v=True', '--seeds=3', RATES)
    write_plan(plan)
    pretend_all(plan, best_at(dict.fromkeys(plan.arms, 2e-2)))
    folders = sorted(folders_of(plan), reverse=True)
    comparison = compare_runs(folders, 'a')
    assert contrast_of(comparison)['seeds'] == 3 and len(comparison['tuning']) == 2
    assert 'only chose learning rates, and that no verdict counts: 101, 102.' in report.markdown(
        comparison
    )
    best = [folder for folder in folders if 'lr0.02' in folder]
    for number, folder in enumerate(best):
        Path(f'a{number}_seed1').symlink_to(folder)
    links = [f'{"am"["mine" in name]}=a{number}_seed1' for number, name in enumerate(best)]
    for words, seeds, count in (
        (best, None, 3),
        (links, None, 3),
        (best, (), 5),
        (best, (101,), 4),
    ):
        comparison = compare_runs(words, 'a', tuning_seeds=seeds)
        assert contrast_of(comparison)['seeds'] == count and not comparison['tuning']
    trial = plan.folder / 'mine_lr0.04_seed101'
    log = (trial / 'log.jsonl').read_text()
    for name in ('data', 'code', 'resumed'):
        for folder in folders:
            runs.edit_config(folder, data='a', code='a')
        runs.edit_config(trial, **{name: 'b'})
        (trial / 'log.jsonl').write_text(RESUMED * (name == 'resumed') + log)
        reason = contrast_of(compare_runs(folders, 'a'))['reason']
        assert f'{trial} differ in {name}' in reason


def test_losses_of_other_domains_and_seeds_with_the_same_losses_give_no_verdict(place):
    arms = '--arms=vanilla; mine: share_v=True'
    plan = finished(arms, '--seeds=3', mine=-0.3)
    for log in plan.folder.glob('mine*/log.jsonl'):
        log.write_text(log.read_text().replace('"Domain"', '"Other"'))
    assert "differ in domains: ['Other'] and ['Domain']" in contrast_of(collect(plan))['reason']
    plan = make_plan(arms, '--seeds=3', '--name=b')
    pretend_all(plan, lambda run: 1.5 if run.arm == 'mine' else scatter(run.seed))
    names = 'mine_lr0.02_seed1 and out/compare/b/mine_lr0.02_seed2 have the same losses'
    assert names in contrast_of(collect(plan))['reason']


def test_existing_runs_that_cannot_be_compared_are_refused(place):
    plan = finished()
    write_plan(plan)
    folders = folders_of(plan)
    for words, message in (
        (folders[:3], 'nothing to compare'),
        (['out', *folders], 'out is not a run'),
        ([*folders, '--seeds=3'], '--seeds'),
        ([*folders, 'small.py'], 'small.py'),
        ([*folders, '--name=small'], 'planned comparison'),
        ([*folders, f'resformer={folders[0]}'], 'have one seed'),
        ([folders[3], f'a={folders[0]}', f'a={folders[4]}'], 'arm a: '),
        ([*folders, '--tuning_seeds=(1, 2, 3)'], 'arm resformer: all of its runs'),
        ([folders[0], f'{folders[3]}/../x$\\frac$_seed1'], r'x$\\frac$'),
        ([*folders, '--name=a\nb'], 'name='),
        ([*folders, '--judgement=dunnett'], 'resformer and svformer share seeds'),
    ):
        assert_one_line(runs.call(compare.main, *words)[0], message)


def test_existing_runs_with_older_settings_count_and_their_names_are_only_shown(place):
    """Or with those of a fork: what such a model costs is not known."""
    plan = finished(ARMS, '--seeds=3', resformer=-0.5)
    folders = folders_of(plan)
    for folder in folders[:3]:
        runs.edit_config(folder, v_residual=True, residual_from='token', residual_gate='')
    comparison = compare_runs(folders[6:] + folders[:3], 'a')
    assert contrast_of(comparison)['verdict'] == 'better'
    ours, theirs = comparison['arms']['resformer'], comparison['arms']['vanilla']
    assert ours['changes'] == {'v_residual': True, 'residual_from': 'token'}
    assert ours['flops'] is ours['parameters'] is None and theirs['flops']
    text = report.markdown(comparison)
    assert '| resformer | older settings | older settings | older settings |' in text
    assert 'Cost: not counted, because of older settings.' in text


RESUMED = '{"step": 12, "changed": {"learning_rate": [0.01, 0.02]}}\n'


@pytest.mark.parametrize(
    'config, lines, reason',
    [
        ({'batch_size': 4, 'eval_iters': 4, 'gradient_accumulation_steps': 2}, '', ''),
        ({'eval_iters': 3}, '', 'eval_iters * batch_size: 24 and 16'),
        ({'max_iters': 29, 'code': 'b'}, '{"step": 29, "val": {"mean": 2.0}}\n', 'max_iters'),
        ({'data': 'def'}, '', 'data'),
        ({}, RESUMED, 'step 12: learning_rate=0.02, before'),
        ({}, RESUMED.replace('learning_rate', 'out_dir'), ''),
    ],
)
def test_a_pair_of_existing_runs_must_be_comparable(place, config, lines, reason):
    """In the text of their losses, their steps, seeds, data, and in how they were resumed."""
    plan = finished(
        '--arms=vanilla; b: share_v=True',
        '--seeds=(20261124, 20261125, 20261126)',
        '--eval_iters=2',
    )
    for folder in folders_of(plan):
        runs.edit_config(folder, data='abc')
        if '/b_' in folder:
            runs.edit_config(folder, **config)
            log = Path(folder, 'log.jsonl')
            log.write_text(lines + log.read_text())
    comparison = compare_runs(sorted(folders_of(plan), reverse=True), 'a')
    contrast = contrast_of(comparison)
    assert reason in contrast['reason'] and (contrast['p_holm'] is None) == bool(reason)


# --- the report -----------------------------------------------------------------------------------


def test_skipped_steps_are_shown_per_arm_and_said_with_its_verdict(place):
    plan = finished(f'{ARMS} seed_offset=90', '--seeds=3', resformer=-0.3, svformer=0.3)
    folder = folder_of(plan, 'svformer', 92)
    lines = [line | {'skipped': min(line['step'], 26)} for line in runs.log(folder)]
    runs.write_log(folder, lines)
    text = report.markdown(collect(plan))
    (worse,) = re.findall('.*svformer is worse than vanilla.*', text)
    assert 'Skipped optimizer steps of svformer: 26 of 30 in seed 92.' in worse
    assert text.count('Skipped optimizer steps') == 1
    skipped = {row[0]: row[3] for row in report.arm_table(collect(plan))[2]}
    assert skipped == {'vanilla': '0', 'resformer': '0', 'svformer': '26'}


@pytest.fixture
def page(place):
    """(what is shown, report.md, report.html) of a comparison with a longer arm and a given rate."""
    arms = '--arms=vanilla; Res: v_residual=True residual_weights=learned; slow: learning_rate=1e-2'
    plan = finished(arms, '--seeds=6', '--contrasts=slow-Res', Res=-0.2, slow=-0.2)
    comparison = collect(plan)
    return comparison, report.markdown(comparison), report.html(comparison, report.draw(comparison))


def test_the_report_begins_with_the_verdicts_and_what_the_arms_changed(page):
    comparison, text, html = page
    for whole in (text, html[html.index('<body') :]):
        changed = whole.index(
            'Res (v_residual=True residual_weights=learned); slow (learning_rate=0.01)'
        )
        assert (
            changed
            < whole.index('mean over domains: Domain.')
            < whole.index('Res is better than vanilla')
            < whole.index('Before you believe')
        )
    undecided = comparison['contrasts']['slow-Res']
    needed = undecided['seeds_needed']
    assert f'would find a difference of {undecided["smallest"]:.4f} with 80% probability' in text
    assert f'would need about {needed} seeds, {needed - 6} more.' in text or needed is None
    vanilla = comparison['arms']['vanilla']
    assert vanilla['cache_bytes_per_token'] == 2 * 2 * 32 * 2
    _, config = make_plan(ARMS).configs(Run('vanilla', 0.02, 1))
    model = GPT(config)
    assert vanilla['parameters'] == sum(p.numel() for p in model.parameters())
    assert vanilla['flops'] == model.flops_per_token(32) * 8 * 32 * vanilla['steps']
    # The loss itself, the spread between seeds, interval and p corrected alike, and the cost.
    contrast = comparison['contrasts']['Res-vanilla']
    losses = [scatter(seed, 'Res') - 0.2 for seed in range(1, 7)]
    assert f'Validation loss {statistics.fmean(losses):.4f} against' in text
    assert f'between seeds {statistics.stdev(losses):.4f} and' in text
    assert 'both after Holm' in text
    assert f'{report.signed(contrast["low_holm"])} to' in text
    assert 'by flips of signs' in text
    # 8 rows of 32 tokens in each of 30 steps, and the parameters of vanilla with two more or none.
    short = f'30 steps, 7,680 tokens, {7680 / vanilla["parameters"]:.2g} per parameter'
    assert f'slow against Res at rates that were not tuned (0.01, 0.02) after {short}: und' in text
    assert f'by {-contrast["mean"]:.4f} nats after {short}.' in text
    assert text.count(f'- Short runs, such as those of vanilla: {short}. Leads change') == 1
    assert report.how_short(vanilla | {'tokens': 5 * vanilla['parameters']}) == ''
    assert '| contrast | verdict | difference | 95% interval after Holm | p after Holm |' in text
    # A column without a cell is left out.
    for one in comparison['contrasts'].values():
        one['p_flip'] = None
    assert 'by flips of signs' not in report.markdown(comparison)
    assert 'Cost: the same matmul FLOPs, the same KV cache, +2 parameters.' in text
    # 8 rows of 32 tokens, at 1,000 tokens a second.
    assert comparison['arms']['Res']['ms_per_step'] == pytest.approx(256)


def test_the_page_needs_no_network_fits_light_and_dark_and_a_phone(page):
    comparison, _, html = page
    for link in re.findall(r'(?:src|href)="([^"]*)"', html):
        assert link.startswith('#'), link
    # A plot stands on a ground of its own, and each of its colors is one that any viewer knows.
    for plot in re.findall(r'<svg.*?</svg>', html, re.DOTALL):
        ground = re.search(r'<path d="([^"]*)" style="fill: #ffffff"', plot)
        width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', plot).groups()
        assert f'L {width.rstrip("0")} {height}'.split()[1] in ground[1] and 'var(' not in plot
    assert '<' not in re.sub(r'<[^<>]*>', '', html[html.index('<body') :])

    # What to know before stands before the plots, tables after them.
    note, plot, table = (html.index(word) for word in (report.CAUTIONS, 'plot scroll"', '<table'))
    assert note < plot < table

    # Tables and curves scroll by themselves, and can be read.
    assert '.scroll { overflow-x: auto' in html
    assert html.count('<table') == html.count('<div class="scroll"><table') == 4
    _, forest, *others = html.split('<svg')
    assert len(others) == html.count('<div class="plot scroll"><svg') == 1
    assert '<div class="plot scroll">' in forest and 'below 0 is better' in forest
    (wide,) = re.findall(r'\.plot svg {[^}]* min-width: (\d+)px', html)
    for plot, width in [(forest, 390 - 32), *((plot, wide) for plot in others)]:
        (size,) = re.findall(r'viewBox="0 0 ([\d.]+) ', plot)
        least = min(map(float, re.findall(r'font-size: ([\d.]+)px', plot)))
        assert least * float(width) / float(size) > 10  # pixels


def test_all_time_is_shown_and_a_replaced_setting_is_said(page, capsys):
    comparison, text, _ = page
    assert comparison['seconds'] == 18 * (30 + 2) and 'evaluation took' in text
    Path('small.py').write_text(Path('small.py').read_text() + 'eval_iters = 7\n')
    assert compare_command(ARMS, '--print=True', '--name=b')[0] == 0
    assert '--eval_iters=7 keeps it' in capsys.readouterr().err
    compare_command(ARMS, '--print=True', '--name=c', '--eval_iters=7')
    assert 'in place of' not in capsys.readouterr().err


def test_a_curve_is_the_arm_minus_the_baseline_of_the_same_seed(place):
    """One that takes more steps than the baseline has no curve."""
    plan = make_plan('--arms=vanilla; mine: v_residual=True; longer: max_iters=60', '--seeds=3')
    pretend_all(plan, lambda run: 2.0 + run.seed * (0.1 if run.arm == 'vanilla' else 0.3))
    (mine,) = collect(plan)['curves'].values()
    for seed in (1, 2, 3):
        assert mine['curves'][seed] == pytest.approx([0.2 * seed] * 30)


def test_no_two_arms_look_alike_and_one_named_after_another_has_its_color():
    look = charts.looks(['vanilla_norm', 'vanilla', 'mine', 'mine_norm'])
    assert look['vanilla_norm'] == look['vanilla'] | {'linestyle': '--'}
    assert look['mine_norm'] == look['mine'] | {'linestyle': '--'}
    names = [f'a{"_b" * n}' for n in range(6)] + [f'c{n}' for n in range(20)]
    assert len({tuple(one.values()) for one in charts.looks(names).values()}) == len(names)


def test_a_disk_that_is_full_keeps_the_report_that_was_there_and_two_do_not_mix(place, monkeypatch):
    first, second = finished(ARMS, '--seeds=3'), finished(ARMS, '--seeds=4', '--name=b')
    runs.succeed(compare.main, *folders_of(first))
    folder = Path('out/compare/runs')
    before, sync = contents(folder), os.fsync

    def full(handle):
        if len(list(folder.glob('*.tmp'))) == 3:
            raise OSError(28, 'No space left on device')
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr('lib.files.os.fsync', full)
        assert_one_line(runs.call(compare.main, *folders_of(second))[0], 'No space', folder)
    for words in (folders_of(second), ['small.py', ARMS, '--name=runs']):
        with locked(folder, 'comparing in'):
            assert_one_line(runs.call(compare.main, *words)[0], 'another process', '--name')
    assert contents(folder) == before


def test_there_is_a_report_at_every_stage(place):
    words = ('--seeds=1', '--tuning_seeds=(101,)', '--rates=(1e-2, 2e-2)')
    plan = make_plan('--arms=vanilla; mine: neutreno=0.4', *words)
    results = Results(plan)
    plan.folder.mkdir(parents=True)
    older = plan.folder / 'relative.svg'
    older.write_text('<svg>')
    stages = 0
    while jobs := results.jobs():
        compare.write_report(plan.folder, collect(plan))
        assert stages or not older.exists()
        known = {plan.run_folder(run): run for run in results.all_runs()}
        pretend(plan, known[jobs[-1].folder], scatter(stages))
        stages += 1
    compare.write_report(plan.folder, collect(plan))
    assert collect(plan)['problems'] == {} and stages == 8


def test_commands_for_any_scheduler(place):
    words = (ARMS, '--seeds=2', '--rates=(1e-2, 2e-2)', '--print=True')
    status, text = compare_command(*words)
    lines = text.splitlines()
    assert status == 0 and len(lines) == len(set(lines)) == 3 * 2 * 2
    assert all(line.startswith('OMP_NUM_THREADS=1 python train.py --') for line in lines)
    text = compare_command(*words, '--gpus=8', '--gradient_accumulation_steps=8', '--name=b')[1]
    assert '-m torch.distributed.run --standalone --nproc_per_node=8 train.py' in text
    # What has arrived is not asked for again.
    finished(*words)
    assert compare_command(*words) == (0, '')


# --- really run -----------------------------------------------------------------------------------


def test_vanilla_is_vanilla_and_a_third_of_the_best_rate_is_worse(place):
    """On a model that is trained for real: again, the same arm under other seeds, is undecided."""
    words = '--arms=vanilla; again: seed_offset=50; slow: learning_rate=6.7e-3', '--seeds=3'
    status, text = compare_command(*words)
    assert status == 0
    contrasts = read_json('out/compare/small/report.json')['contrasts']
    assert contrasts['again-vanilla']['verdict'] == 'undecided'
    assert contrasts['again-vanilla']['reason'] == ''  # such as that the losses are the same
    assert contrasts['slow-vanilla']['verdict'] == 'worse'
    assert 'slow is worse than vanilla by' in text
    assert 'A (700), B (300). Each' in Path('out/compare/small/report.md').read_text()
    data = make_plan(*words).data
    assert data == runs.read_config('out/compare/small/vanilla_lr0.02_seed1')['data']
    assert text.endswith('\nwrote out/compare/small/report.html\n')

    # Nothing is left to train, and the report is the same.
    before = contents('out/compare/small')
    assert compare_command(*words) == (0, text)
    after = contents('out/compare/small')
    assert {name: data for name, data in after.items() if name in before} == before
