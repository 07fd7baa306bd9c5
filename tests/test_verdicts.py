"""The paper's claims as data (paper/figures.py), and what runs say of them (paper/judge.py)."""

import shutil
from dataclasses import asdict, replace

import pytest
from comparisons import write_arm
from conftest import raises_one_line
from runs import edit_config

from comparison.runs import facts, read_state
from lib.files import as_json
from paper import judge
from paper.figures import CLAIMS, FIGURES, METRICS, NAMES, SCALES, SIGNS, Arm, Claim, R, S, V

CLAIMS_SIZE = SCALES['claims']
SEEDS = range(1, 6)
BELOW = Claim('fig1', 'Fig. 1', 'ResFormer is below vanilla', Arm(R), '<', Arm(V))
ABOVE = Claim('fig1', 'Section 1', 'vanilla is above SVFormer', Arm(V), '>', Arm(S))
NOT_BELOW = Claim('fig6', 'Fig. 6', 'no gain', Arm(S), '>=', Arm(R))


def write_runs(folder, model, losses, **at):
    """A finished run of 20 steps for each seed, {seed: validation loss}."""
    arm = Arm(model, **at)
    paths = []
    for seed, loss in losses.items():
        values = [3.0, 3.0, *[loss] * 18]
        paths.append(write_arm(folder, arm, CLAIMS_SIZE, values, seed, max_iters=20))
    return paths


def scattered(mean):
    return {seed: mean + 0.001 * (seed - 3) for seed in SEEDS}


def alternating(mean, noise=0.001):
    """Differences to scattered() that do not have one sign where the means are near."""
    return {seed: mean + noise * (-1) ** seed for seed in SEEDS}


def rows_of(claims, folders):
    return judge.claim_rows(claims, judge.read_pool(folders, CLAIMS_SIZE), {})


# --- claims and figures as data -------------------------------------------------------------------


def test_every_claim_is_explained_and_of_arms_that_its_figure_has():
    for claim in CLAIMS:
        assert claim.metric in METRICS and claim.sign in SIGNS and claim.where and claim.says
        pair = {claim.ours, claim.theirs}
        if claim.figure in FIGURES:
            assert pair <= set(FIGURES[claim.figure].runs()), claim
        for arm in pair:
            assert str(arm).startswith(NAMES[arm.model])
    assert {claim.metric for claim in CLAIMS} == set(METRICS)
    assert {claim.figure for claim in CLAIMS} - FIGURES.keys() == {'the revision', 'v5'}
    signs = {}
    for claim in CLAIMS:
        key = (claim.ours, claim.theirs, claim.metric)
        assert signs.setdefault(key, claim.sign) == claim.sign, claim
        assert claim.ours == claim.theirs or (claim.theirs, claim.ours, claim.metric) not in signs


# --- verdicts -------------------------------------------------------------------------------------


def test_the_verdict_is_the_sign_of_a_difference_that_is_decided(tmp_path, monkeypatch):
    folders = write_runs(tmp_path, V, scattered(2.0)) + write_runs(tmp_path, R, alternating(1.9))
    folders += write_runs(tmp_path, S, alternating(2.0, 0.1))
    below, above, not_below = rows_of([BELOW, ABOVE, NOT_BELOW], folders)
    assert (below.verdict, above.verdict) == ('agrees', 'undecided')
    assert below.runs == [f'{model}_lr0.006_seed{seed}' for model in (R, V) for seed in SEEDS]
    # In the picture, an interval includes 0 where nothing is decided; uncorrected, it need not.
    monkeypatch.setattr(judge.charts, 'forest', lambda rows, *_, **__: rows)
    numbers = above.numbers | {'low': -0.3, 'high': -0.1, 'low_holm': -0.4, 'high_holm': 0.1}
    drawn = judge.claims_plot([below, replace(above, numbers=numbers)])
    assert [low > 0 or high < 0 for *_, (low, high) in drawn] == [True, False]
    for sign, verdict in (('>', 'contradicts'), ('>=', 'contradicts'), ('<', 'agrees')):
        (row,) = rows_of([Claim('fig1', '', '', Arm(R), sign, Arm(V))], folders)
        assert row.verdict == verdict
    caveat = Claim('fig1', '', '', Arm(R), '<', Arm(V), caveat='too short')
    (row,) = rows_of([caveat], folders)
    assert (row.verdict, row.reason) == ('undecided', 'too short')
    assert row.numbers['p'] == below.numbers['p'] and 'too short' in judge.claims_table([row])


def test_a_lead_is_a_difference_of_differences_of_each_seed(tmp_path):
    pool = {}
    for rate in (0, 1):
        folders = write_runs(tmp_path, V, scattered(2.0 + 0.1 * rate), rate=rate)
        folders += write_runs(tmp_path, S, scattered(1.8), rate=rate)
        for arm, runs in judge.read_pool(folders, CLAIMS_SIZE).items():
            pool[Arm(arm.model, rate=rate)] = runs
    lead = Claim('fig12a', '', '', Arm(S, rate=1), '<', Arm(S), metric='lead')
    (row,) = judge.claim_rows([lead], pool, {})
    assert row.numbers['differences'] == pytest.approx(dict.fromkeys(SEEDS, -0.1))


def test_a_contrast_that_several_figures_print_stays_in_the_family_of_the_first(tmp_path):
    folders = write_runs(tmp_path, V, scattered(2.0)) + write_runs(tmp_path, R, alternating(1.9))
    pool = judge.read_pool(folders, CLAIMS_SIZE)
    of_all = {row.label(): row for row in judge.claim_rows(CLAIMS, pool, {})}
    for figure in ('fig1', 'fig5', 'fig6'):
        (row,) = [row for row in judge.figure_rows(figure, pool, {}) if row.numbers]
        assert row == of_all['ResFormer below vanilla'] and row.numbers['p_holm'] > row.numbers['p']


# --- which runs -----------------------------------------------------------------------------------


def test_arms_are_found_by_what_runs_are_whatever_their_folders_are_called(tmp_path):
    folders = write_runs(tmp_path, V, scattered(2.0)) + write_runs(
        tmp_path, S, {1: 2.0}, length=512
    )
    folders[0].rename(tmp_path / 'mine')
    pool = judge.read_pool([tmp_path / 'mine', *folders[1:]], CLAIMS_SIZE)
    expected = {Arm(V): [*SEEDS], Arm(S, length=512): [1]}
    assert {arm: list(seeds) for arm, seeds in pool.items()} == expected


@pytest.mark.parametrize(
    'more, words',
    [
        ({}, 'one model with one seed'),
        ({'seed': 9, 'learning_rate': 3e-3, 'min_lr': 3e-4}, 'learning_rate'),
        ({'seed': 9, 'residual_layers': [5], 'v_residual': True}, 'no model of the paper'),
        ({'seed': 9, 'block_size': 99}, 'length'),
        ({'seed': 9, 'max_iters': 30}, 'unfinished'),
    ],
)
def test_a_run_that_is_no_further_seed_of_its_arm_is_refused(tmp_path, more, words):
    (path,) = write_runs(tmp_path, V, {1: 2.0})
    copy = shutil.copytree(path, tmp_path / 'copy')
    edit_config(copy, **more)
    with raises_one_line(words):
        judge.read_pool([path, copy], CLAIMS_SIZE)


def test_runs_of_one_seed_must_have_seen_the_same_data_and_settings(tmp_path):
    folders = write_runs(tmp_path, V, {1: 2.0}) + write_runs(tmp_path, R, {1: 1.9})
    edit_config(folders[0], origin='other/ckpt.pt')
    with raises_one_line('origin'):
        rows_of([BELOW], folders)


# --- what happens inside --------------------------------------------------------------------------


def test_an_analysis_of_another_run_of_that_name_or_of_an_earlier_step_is_refused(tmp_path):
    """Comparisons at one learning rate name their runs alike. Older analyses state the model alone."""
    (folder,) = write_runs(tmp_path, V, {1: 2.0})
    run = read_state(folder)
    config = as_json(asdict(run.model))

    def series(**stated):
        report = {'series': {'entropy': {'mean': [4.0, 3.0]}}, 'config': config, **stated}
        return judge.series_of({'entropy': {folder.name: report}}, 'entropy', run)

    own = facts(run.config)
    for stated in ({}, {'settings': own, 'step': 20}):
        assert list(series(**stated)['entropy']) == [4.0, 3.0]
    for changes, step, word in (({'seed': 2}, 20, 'seed=2'), ({}, 10, 'step=10')):
        with raises_one_line(word):
            series(settings={**own, **changes}, step=step)


def test_a_damaged_analysis_and_one_with_two_runs_of_a_name_are_named(tmp_path):
    texts = ('{', '{}', '[]', '{"runs": {"a/ckpt.pt": {}, "b/ckpt.pt": {}}}')
    for text in texts:
        (tmp_path / 'entropy.json').write_text(text)
        with raises_one_line('entropy.json'):
            judge.read_reports(tmp_path)
    with pytest.raises(FileNotFoundError):
        judge.read_reports(tmp_path / 'nowhere')
