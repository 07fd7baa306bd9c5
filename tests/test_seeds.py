"""Figures of the paper from runs of several seeds (paper/seeds.py)."""

import numpy as np
import pytest
import scipy.stats
from runs import write_run

from comparison.plan import decisive_settings
from configurator import configure
from model import GPTConfig
from paper import judging, seeds, verdicts
from paper.claims import CLAIMS
from paper.figures import FIRST_QUERIES, S, V
from paper.runs import PAPER, Run
from train import TrainConfig

pytestmark = pytest.mark.usefixtures('figures_closed')

STEPS = 120
FLAGS = {V: [], S: ['--share_v=True'], FIRST_QUERIES: ['--share_q=True']}


def random_runs(folder, models, run_seeds, *flags):
    """({(model, seed): its losses}, folders) of finished runs of random losses."""
    random = np.random.default_rng(0)
    losses, folders = {}, []
    folder.mkdir(exist_ok=True)
    for model in models:
        words = [*FLAGS[model], f'--max_iters={STEPS}', *flags]
        values = decisive_settings(*configure(TrainConfig, GPTConfig, argv=words))
        for seed in run_seeds:
            losses[model, seed] = random.normal(3, 0.1, STEPS)
            path = folder / f'{model}_{seed}'
            path.mkdir()
            write_run(path, losses[model, seed].tolist(), **values | {'seed': seed})
            folders.append(path)
    return losses, folders


def test_curves_are_means_of_50_steps_and_ends_are_validation_losses_with_their_interval(tmp_path):
    losses, folders = random_runs(tmp_path, (V, S), (1, 2, 3))
    arms = seeds.measure('fig13', judging.read_groups(folders, {}))
    (arm,) = arms.values()
    assert list(arms) == [Run(S)]

    assert arm['steps'] == list(range(49, STEPS))
    for seed in (1, 2, 3):
        difference = losses[S, seed] - losses[V, seed]
        for i, step in enumerate(arm['steps']):
            expected = sum(difference[step - 49 : step + 1]) / 50
            assert arm['curves'][seed][i] == pytest.approx(expected)

    # write_run() makes the last training loss the validation loss.
    ends = [losses[S, seed][-1] - losses[V, seed][-1] for seed in (1, 2, 3)]
    low, high = scipy.stats.ttest_1samp(ends, 0).confidence_interval(0.95)
    assert list(arm['end']['differences'].values()) == pytest.approx(ends)
    assert (arm['end']['low'], arm['end']['high']) == pytest.approx((low, high))


def test_a_curve_has_the_steps_that_every_seed_has_logged(tmp_path):
    _, folders = random_runs(tmp_path, (V, S), (1, 2))
    log = tmp_path / f'{S}_2' / 'log.jsonl'
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(''.join(lines[:60] + lines[61:]))
    (arm,) = seeds.measure('fig13', judging.read_groups(folders, {})).values()
    assert len(arm['steps']) == len(arm['curves'][1]) == len(arm['curves'][2])
    assert 60 not in arm['steps'] and 61 in arm['steps']


def test_one_group_of_runs_is_drawn_that_with_the_most_models_and_seeds(tmp_path):
    _, few = random_runs(tmp_path / 'few', (V, FIRST_QUERIES), (1, 2, 3), '--beta1=0.5')
    _, more = random_runs(tmp_path / 'more', (V, S), (1, 2, 3, 4))
    arms = seeds.measure('fig13', judging.read_groups(few + more, {}))
    assert list(arms) == [Run(S)] and list(arms[Run(S)]['curves']) == [1, 2, 3, 4]

    _, same = random_runs(tmp_path / 'same', (V, S), (1, 2, 3, 4), '--beta1=0.7')
    with pytest.raises(ValueError, match='2 groups of runs, .* models and seeds of fig13'):
        seeds.measure('fig13', judging.read_groups(few + more + same, {}))


def test_a_picture_names_each_model_its_mean_and_its_interval(tmp_path):
    losses, folders = random_runs(tmp_path, (V, S, FIRST_QUERIES), (1, 2, 3))
    picture = seeds.picture_of('fig13', seeds.measure('fig13', judging.read_groups(folders, {})))
    left, right = picture.axes
    words = [text.get_text() for text in right.texts]
    for model, name in ((S, 'values (SVFormer)'), (FIRST_QUERIES, 'queries')):
        ends = [losses[model, seed][-1] - losses[V, seed][-1] for seed in (1, 2, 3)]
        half = scipy.stats.sem(ends) * scipy.stats.t(2).ppf(0.975)
        expected = f'{np.mean(ends):+.3f} ± {half:.3f}  {name}'.replace('-', '\N{MINUS SIGN}')
        assert expected in words
    assert 'vanilla' in words
    assert '3 seeds' in right.get_xlabel()
    # Whatever lies behind the first fifth of the curves can be seen, as can every dot.
    low, high = left.get_ylim()
    assert right.get_ylim() == (low, high)
    for axes in (left, right):
        for line in axes.lines:
            x, y = np.array(line.get_xdata()), np.array(line.get_ydata(), float)
            later = y[len(y) // 5 :] if len(x) > 10 else y
            assert low <= later.min() and later.max() <= high


def test_where_models_have_different_seeds_each_says_how_many(tmp_path):
    _, folders = random_runs(tmp_path, (V, S), (1, 2, 3))
    _, more = random_runs(tmp_path, (FIRST_QUERIES,), (2, 3))
    picture = seeds.picture_of(
        'fig13', seeds.measure('fig13', judging.read_groups(folders + more, {}))
    )
    _, right = picture.axes
    words = [text.get_text() for text in right.texts]
    assert any(word.endswith('values (SVFormer), 3 seeds') for word in words)
    assert any(word.endswith('queries, 2 seeds') for word in words)
    assert 'seeds' not in right.get_xlabel()


def test_one_seed_has_no_interval(tmp_path):
    _, folders = random_runs(tmp_path, (V, S), (1,))
    picture = seeds.picture_of('fig13', seeds.measure('fig13', judging.read_groups(folders, {})))
    _, right = picture.axes
    assert not any('±' in text.get_text() for text in right.texts)
    assert right.get_xlabel() == '1 seed'


def test_figures_that_compare_models_have_every_arm_that_their_claims_are_about():
    assert seeds.DRAWN == ['fig1', 'fig4', 'fig6', 'fig7', 'fig8', 'fig10', 'fig13', 'fig14']
    for name in seeds.DRAWN:
        _, baseline, models = seeds.models_of(name)
        assert baseline == Run(V)
        losses_of = [c for c in CLAIMS if c.figure == name and c.metric == 'final loss']
        for claim in losses_of:
            for run in (claim.ours, claim.theirs):
                assert run.unusual(PAPER) or run in (baseline, *models)


def test_the_program_draws_what_it_has_runs_of(tmp_path, monkeypatch, capsys):
    _, folders = random_runs(tmp_path, (V, FIRST_QUERIES), (1, 2, 3))
    words = ['paper.verdicts', 'draw', 'fig13', *map(str, folders), f'--out={tmp_path / "made"}']
    monkeypatch.setattr('sys.argv', words)
    verdicts.main()
    assert (tmp_path / 'made' / 'fig13.png').stat().st_size > 10_000
    assert "without all share the first layer's keys, SVFormer: no runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['fig13'], 'give figures, of fig1, fig4, .*, and folders of finished runs'),
        (['fig3', 'vanilla_1'], 'give figures, of fig1, fig4, .*, and folders of finished runs'),
        (['fig13', 'nowhere'], 'nowhere is missing: it has no log'),
        (['fig13', 'vanilla_1'], 'no runs of fig13: vanilla and another model, with a seed in'),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch, words, message):
    random_runs(tmp_path, (V,), (1,))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('sys.argv', ['paper.verdicts', 'draw', *words])
    with pytest.raises(SystemExit, match=message):
        verdicts.main()
