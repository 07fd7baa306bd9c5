"""What kept runs say of the paper's claims (paper/verdicts.py)."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from runs import edit_config, read_config, write_run

from comparison import charts
from comparison.plan import CompareConfig, Plan, decisive_settings, recorded_settings
from comparison.runs import gpt_config
from configurator import configure
from model import GPTConfig
from paper import insides, judging, verdicts
from paper.claims import CLAIMS, SIGNS, Claim
from paper.figures import FIGURES, NAMES, R, S, V
from paper.runs import Run
from train import TrainConfig

ROOT = Path(__file__).parent.parent
SEEDS = range(1, 6)
BELOW = Claim('fig1', 'Fig. 1', 'ResFormer is below vanilla', Run(R), '<', Run(V))
ABOVE = Claim('fig1', 'Section 1', 'vanilla is above SVFormer', Run(V), '>', Run(S))
NOT_BELOW = Claim('fig6', 'Fig. 6', 'no gain', Run(S), '>=', Run(R))


def write_runs(folder, model, losses, early=(), rate=6e-3, data='', **more):
    """A finished run for each seed, {seed: validation loss}, of ten training steps."""
    flags = {V: {}, R: {'v_residual': True}, S: {'share_v': True}}[model]
    words = [f'--{name}={value}' for name, value in {**flags, 'max_iters': 20, **more}.items()]
    settings, config = configure(TrainConfig, GPTConfig, argv=words)
    facts = {'data': data} if data else {}
    paths = []
    for seed, loss in losses.items():
        values = decisive_settings(settings, config)
        values |= {'seed': seed, 'learning_rate': rate, 'min_lr': rate / 10, **facts}
        path = folder / f'{model}_{rate:g}_{more.get("eval_iters", 0)}_seed{seed}'
        path.mkdir()
        first = list(early[seed]) if early else [3.0, 3.0]
        paths.append(write_run(path, first + [loss] * 18, **values))
    return paths


def scattered(mean, noise=0.001):
    return {seed: mean + noise * (seed - 3) for seed in SEEDS}


def rows_of(claims, folders, analyses=None):
    return judging.rows_of(claims, judging.read_groups(folders, analyses or {}))


def test_the_verdict_is_the_sign_of_a_difference_that_is_decided(tmp_path):
    folders = write_runs(tmp_path, V, scattered(2.0))
    folders += write_runs(tmp_path, R, {seed: 1.9 + 0.002 * (seed % 2) for seed in SEEDS})
    folders += write_runs(tmp_path, S, {seed: 2.0 + 0.1 * (-1) ** seed for seed in SEEDS})
    below, above, not_below = rows_of([BELOW, ABOVE, NOT_BELOW], folders)
    assert (below.verdict, above.verdict) == ('agrees', 'undecided')
    assert below.runs == [f'{model}_0.006_0_seed{seed}' for model in (R, V) for seed in SEEDS]
    assert below.rates == {'ResFormer': [6e-3], 'vanilla': [6e-3]}

    opposite = Claim('fig1', 'Fig. 1', 'the reverse', Run(R), '>', Run(V))
    (row,) = rows_of([opposite], folders)
    assert row.verdict == 'contradicts'


def test_not_below_is_contradicted_by_what_is_below_and_agrees_with_what_is_above(tmp_path):
    folders = write_runs(tmp_path, R, scattered(2.0))
    folders += write_runs(tmp_path, S, {seed: 1.9 + 0.002 * (seed % 2) for seed in SEEDS})
    assert rows_of([NOT_BELOW], folders)[0].verdict == 'contradicts'
    reverse = Claim('fig6', 'Fig. 6', 'no gain', Run(R), '>=', Run(S))
    assert rows_of([reverse], folders)[0].verdict == 'agrees'


def test_runs_must_be_what_their_settings_say_and_have_seen_the_same_data(tmp_path):
    folders = write_runs(tmp_path, V, scattered(2.0), data='abc')
    folders += write_runs(tmp_path, R, scattered(1.9))  # as older runs, which do not say
    assert len(judging.read_groups(folders, {})) == 1
    edit_config(folders[1], data='def')
    with pytest.raises(ValueError, match=f'not the same data: {folders[0]} and {folders[1]}'):
        judging.read_groups(folders, {})

    log = folders[-1] / 'log.jsonl'
    log.write_text('{"step": 0, "changed": {"weight_decay": [0.3, 0.1]}}\n' + log.read_text())
    with pytest.raises(
        ValueError, match=f'{folders[-1]} was resumed at step 0 with weight_decay=0.1'
    ):
        judging.read_groups(folders, {})


def test_holm_counts_the_claims_of_one_figure_trained_or_not(tmp_path):
    random = np.random.default_rng(0)
    losses = {
        model: dict(zip(SEEDS, 2 + 0.02 * random.normal(size=5), strict=True)) for model in 'VRS'
    }
    folders = write_runs(tmp_path, V, losses['V'])
    folders += write_runs(tmp_path, R, losses['R'])
    folders += write_runs(tmp_path, S, losses['S'])
    untrained = Claim('fig1', 'Fig. 1', '', Run('neutreno'), '<', Run(V))
    too_large = Claim('fig1', 'Fig. 1', '', Run(R, '468m'), '<', Run(V, '468m'))
    rows = rows_of([BELOW, ABOVE, NOT_BELOW, untrained, too_large], folders)

    p = []
    for ours, theirs in ('RV', 'VS', 'SR'):
        p.append(
            scipy.stats.ttest_rel(list(losses[ours].values()), list(losses[theirs].values())).pvalue
        )
    small, large = sorted(p[:2])
    # Three count in Fig. 1, the untrained one with p = 1.
    holm = {small: 3 * small, large: max(3 * small, 2 * large)}
    expected = [min(1, holm[p[0]]), min(1, holm[p[1]]), p[2]]
    assert [row.numbers['p_holm'] for row in rows[:3]] == pytest.approx(expected)
    assert [row.numbers for row in rows[3:]] == [{}, {}]
    assert [row.lacks for row in rows[3:]] == [judging.MISSING, judging.LARGER]


def test_claims_of_a_text_without_a_figure_are_a_family_of_their_version():
    rows = judging.rows_of(CLAIMS, {})
    families = {row.figure for row in rows if not row.figure.startswith(('fig', 'table'))}
    assert families == {'the revision', 'v5'}
    assert {claim.figure for claim in CLAIMS} <= {*FIGURES, *families}


def test_two_groups_with_as_many_seeds_are_refused_in_any_order(tmp_path):
    folders = []
    for batches in (4, 8):
        for model in (V, R):
            folders += write_runs(tmp_path, model, scattered(2.0), eval_iters=batches)
    for order in (folders, folders[::-1]):
        with pytest.raises(ValueError, match='2 groups of runs, .* seeds of ResFormer and van'):
            rows_of([BELOW], order)


def test_a_run_is_described_by_what_is_unusual():
    assert judging.describe_run(Run(V)) == 'vanilla'
    assert judging.describe_run(Run(V, '468m', warmup=1)) == 'vanilla, 468M, warm-up 1,200'


def test_two_analyses_of_runs_with_one_name_are_refused(tmp_path):
    series = {'entropy': {'mean': [4.0, 3.0]}}
    report = {'series': series, 'config': asdict(GPTConfig())}
    runs = {f'{name}/ckpt_120.pt': report for name in ('one', 'other')}
    (tmp_path / 'entropy.json').write_text(json.dumps({'runs': runs}))
    with pytest.raises(ValueError, match='entropy.json: it has two runs named ckpt_120.pt'):
        judging.read_analyses(tmp_path)


def test_a_folder_without_analyses_and_a_damaged_one_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='has none of entropy.json, similarity.json'):
        judging.read_analyses(tmp_path)
    for text in ('{', '{}', '[]', '{"runs": {"a": {}}}'):
        (tmp_path / 'mapping.json').write_text(text)
        with pytest.raises(ValueError, match='mapping.json: '):
            judging.read_analyses(tmp_path)
    (tmp_path / 'mapping.json').unlink()
    write_analysis(tmp_path, 'similarity', {'run': {'keys': [0.5, 0.5]}}, GPTConfig())
    with pytest.raises(ValueError, match="similarity.json: .*run has no series 'hidden states'"):
        judging.read_analyses(tmp_path)


def test_an_analysis_of_another_model_with_the_same_name_is_refused(tmp_path):
    """Comparisons at two sizes name their runs alike."""
    folders = write_runs(tmp_path, V, scattered(2.0), n_layer=6)
    write_analysis(tmp_path, 'entropy', {folders[0].name: {'entropy': [4.0, 3.0]}}, GPTConfig())
    with pytest.raises(ValueError, match='analysis of entropy .* is of another model'):
        judging.read_groups(folders, judging.read_analyses(tmp_path))


def test_an_analysis_of_another_run_of_that_name_or_of_an_earlier_step_is_refused(tmp_path):
    """Comparisons at one learning rate name their runs alike."""
    (folder,) = write_runs(tmp_path, V, {1: 2.0})
    config = read_config(folder)
    settings = recorded_settings(config)

    def read(**facts):
        series = {'entropy': {'mean': [4.0, 3.0]}}
        report = {'series': series, 'config': asdict(gpt_config(config, folder)), **facts}
        text = json.dumps({'runs': {f'elsewhere/{folder.name}': report}})
        (tmp_path / 'entropy.json').write_text(text)
        return judging.read_groups([folder], judging.read_analyses(tmp_path))

    for facts in ({}, {'step': 20, 'settings': settings}):  # {}: as older files
        ((arms,),) = (group.values() for group in read(**facts).values())
        assert list(arms[1].series['entropy']['entropy']) == [4.0, 3.0]
    with pytest.raises(ValueError, match='of a run with seed=2, but .*_seed1 has 1'):
        read(step=20, settings={**settings, 'seed': 2})
    with pytest.raises(ValueError, match='of a run with dataset=.*, but'):
        read(step=20, settings={**settings, 'dataset': 'another'})
    with pytest.raises(ValueError, match='is of step 10, but .* has 20 steps'):
        read(step=10, settings=settings)


def test_seeds_at_several_learning_rates_are_no_arm(tmp_path):
    folders = write_runs(tmp_path, V, {1: 2.0, 2: 2.0})
    folders += write_runs(tmp_path, V, {101: 2.0}, rate=3e-3)
    with pytest.raises(
        ValueError, match='at the learning rates 0.003 and 0.006: name the runs of one'
    ):
        judging.read_groups(folders, {})


def test_only_runs_that_share_their_settings_are_compared_and_most_seeds_count(tmp_path):
    few = {seed: 2.0 for seed in (1, 2)}
    folders = write_runs(tmp_path, V, few, eval_iters=4)
    folders += write_runs(tmp_path, R, scattered(1.5), eval_iters=8)
    (row,) = rows_of([BELOW], folders)
    assert row.verdict == 'untestable'
    assert row.reason == 'no runs with the same settings and seeds'

    folders += write_runs(tmp_path, R, few, eval_iters=4)
    folders += write_runs(tmp_path, V, scattered(1.6), eval_iters=8, rate=3e-3)
    (row,) = rows_of([BELOW], folders)
    assert row.numbers['seeds'] == 5
    assert row.rates == {'ResFormer': [6e-3], 'vanilla': [3e-3]}


def test_runs_whose_rates_fall_to_another_share_are_another_group(tmp_path):
    folders = write_runs(tmp_path, V, scattered(2.0)) + write_runs(tmp_path, R, scattered(1.5))
    for folder in folders[:2]:
        edit_config(folder, min_lr=read_config(folder)['learning_rate'])
    (row,) = rows_of([BELOW], folders)
    assert list(row.numbers['differences']) == [3, 4, 5]


def test_each_learning_rate_has_its_own_end_in_proportion(tmp_path):
    folders = write_runs(tmp_path, V, {1: 2.0}, rate=3e-3)
    folders += write_runs(tmp_path, R, {1: 1.5}, rate=7e-3)
    folders += write_runs(tmp_path, S, {1: 1.5}, rate=2e-3 / 3)
    assert len(judging.read_groups(folders, {})) == 1


def test_runs_that_began_with_other_weights_are_another_group(tmp_path):
    folders = write_runs(tmp_path, V, scattered(2.0)) + write_runs(tmp_path, R, scattered(1.5))
    for folder in folders[:2]:
        edit_config(folder, origin='other/ckpt.pt')
    (row,) = rows_of([BELOW], folders)
    assert list(row.numbers['differences']) == [3, 4, 5]


def test_a_contrast_that_is_printed_twice_is_one_row(tmp_path):
    again = Claim('fig5', 'Fig. 5', 'once more', Run(R), '<', Run(V), metric='validation loss')
    (row,) = rows_of([BELOW, again], write_runs(tmp_path, V, scattered(2.0)))
    assert row.where == ['Fig. 1', 'Fig. 5']
    assert row.reason == 'no runs of ResFormer'
    with pytest.raises(ValueError, match='two signs'):
        rows_of([BELOW, Claim('fig5', '', '', Run(R), '>', Run(V))], [])


def test_the_early_loss_is_the_mean_of_the_first_tenth(tmp_path):
    early = {seed: (3.0 + seed, 5.0) for seed in SEEDS}
    folders = write_runs(tmp_path, V, scattered(2.0), early)
    early = {seed: (2.0 + seed, 4.0) for seed in SEEDS}
    folders += write_runs(tmp_path, R, scattered(2.0), early)
    claim = Claim('fig11', 'Fig. 11', 'faster', Run(R), '<', Run(V), metric='early loss')
    (row,) = rows_of([claim], folders)
    assert row.numbers['differences'] == pytest.approx(dict.fromkeys(SEEDS, -1.0))


def write_analysis(folder, kind, series, *configs):
    """{run: {name: values of its layers}} as paper.analyze writes it; configs: of the runs."""
    runs = {}
    for (run, means), config in zip(series.items(), configs, strict=True):
        of_series = {name: {'mean': mean} for name, mean in means.items()}
        runs[f'elsewhere/{run}'] = {'series': of_series, 'config': asdict(config)}
    (folder / f'{kind}.json').write_text(json.dumps({'runs': runs}))


def test_what_happens_inside_a_model_is_read_from_its_analysis(tmp_path):
    folders = write_runs(tmp_path, V, scattered(2.0)) + write_runs(tmp_path, R, scattered(2.0))
    layers, configs = {}, []
    for seed in SEEDS:
        configs += [GPTConfig(), GPTConfig(v_residual=True)]
        layers[f'vanilla_0.006_0_seed{seed}'] = {'entropy': [4.0, 3.0, 2.0, 1.0 + 0.01 * seed]}
        layers[f'resformer_0.006_0_seed{seed}'] = {'entropy': [4.0, 3.0, 3.0, 3.0]}
    write_analysis(tmp_path, 'entropy', layers, *configs)
    claims = [claim for claim in CLAIMS if claim.metric in ('entropy', 'entropy with depth')]
    depth, difference = rows_of(claims, folders, judging.read_analyses(tmp_path))
    expected = {seed: 1.5 + 0.005 * seed - 4 for seed in SEEDS}
    assert depth.numbers['differences'] == pytest.approx(expected)
    expected = {seed: 1.5 + 0.005 * seed - 3 for seed in SEEDS}
    assert difference.numbers['differences'] == pytest.approx(expected)
    assert (depth.verdict, difference.verdict) == ('agrees', 'agrees')

    depth, difference = rows_of(claims, folders)
    assert depth.reason == 'no analysis of entropy'


def test_every_claim_has_a_row_and_a_label_that_a_reader_understands():
    rows = rows_of(CLAIMS, [])
    assert sum(len(row.where) for row in rows) == len(CLAIMS)
    assert {row.verdict for row in rows} == {'untestable'}
    for claim in CLAIMS:
        assert {claim.ours.model, claim.theirs.model} <= NAMES.keys()
    labels = [row.label() for row in rows]
    assert len(set(labels)) == len(labels)
    for row in rows:
        is_inside = row.metric in insides.DIFFERENCES
        words = [row.says[0], row.metric] if is_inside else [SIGNS[row.sign]]
        assert all(word in row.label() for word in words)
        assert row.reason and row.lacks
    assert all(row.label() in verdicts.markdown(rows) for row in rows)
    assert verdicts.forest(rows) == ''


def test_the_program_writes_a_table_the_numbers_and_a_picture(tmp_path, monkeypatch, capsys):
    folders = write_runs(tmp_path, V, scattered(2.0))
    folders += write_runs(tmp_path, R, {seed: 1.9 + 0.002 * (seed % 2) for seed in SEEDS})
    out = tmp_path / 'made' / 'verdicts'
    words = ['paper.verdicts', *map(str, folders), f'--out={out}']
    monkeypatch.setattr('sys.argv', words)
    verdicts.main()
    assert 'ResFormer below vanilla' in capsys.readouterr().out
    numbers = json.loads(out.with_suffix('.json').read_text())
    assert numbers['verdicts']['agrees'] == 1
    picture = out.with_suffix('.svg').read_text()
    assert 'ResFormer below vanilla' in picture and 'prefers-color-scheme' in picture
    table = out.with_suffix('.md').read_text()
    assert '| ResFormer below vanilla |' in table and 'no runs of DenseFormer' in table


def test_in_the_picture_what_is_as_printed_lies_right_of_0(tmp_path):
    folders = write_runs(tmp_path, V, scattered(2.0))
    folders += write_runs(tmp_path, R, {seed: 1.9 + 0.002 * (seed % 2) for seed in SEEDS})
    folders += write_runs(tmp_path, S, scattered(1.8, 0.002))
    against = Claim('fig1', 'Fig. 1', '', Run(R), '<', Run(S))
    drawing, axes = charts.pyplot().subplots()
    verdicts.draw_rows(axes, rows_of([BELOW, ABOVE, against], folders))
    dots = [line.get_xdata() for line in axes.lines if line.get_marker() == 'o']
    assert [len(values) for values in dots] == [5, 5, 5]
    below, above, contradicted = (np.array(values) for values in dots)
    assert (below > 0.08).all() and (above > 0.18).all() and (contradicted < -0.08).all()
    charts.pyplot().close(drawing)


def test_what_has_no_interval_is_not_drawn_in_halves_of_it(tmp_path, monkeypatch):
    folders = write_runs(tmp_path, V, {1: 2.0, 2: 2.0}) + write_runs(tmp_path, R, {1: 1.9})
    layers = {folder.name: {'entropy': [4.0, 3.0 + i]} for i, folder in enumerate(folders)}
    configs = [GPTConfig(), GPTConfig(), GPTConfig(v_residual=True)]
    write_analysis(tmp_path, 'entropy', layers, *configs)
    claims = [claim for claim in CLAIMS if claim.metric in ('entropy', 'entropy with depth')]
    rows = rows_of([BELOW, *claims], folders, judging.read_analyses(tmp_path))
    loss, depth, entropy = rows
    assert [row.numbers['seeds'] for row in rows] == [1, 2, 1]
    assert entropy.label() in verdicts.markdown(rows)

    parts = []
    monkeypatch.setattr(verdicts, 'draw_rows', lambda axes, part: parts.append(part))
    verdicts.forest(rows)
    assert parts == [[loss], [depth]]


def test_the_planned_command_is_one_that_compare_accepts_and_its_runs_test_the_claims(monkeypatch):
    monkeypatch.chdir(ROOT)
    usual = [claim for claim in CLAIMS if not judging.beyond(claim)]
    for figures in ((), ('fig6',), ('fig10',)):
        _, program, *argv = shlex.split(verdicts.command(figures))
        assert program == 'compare.py'
        options, _, _ = configure(CompareConfig, TrainConfig, GPTConfig, argv=argv)
        plan = Plan(options, argv)
        wirings = {name: judging.as_key(plan.configure(name)[1]) for name in plan.arms}
        tested = {(wirings[ours], wirings[theirs]) for ours, theirs in plan.contrasts}
        for claim in usual:
            ours, theirs = (judging.variant_of(run) for run in (claim.ours, claim.theirs))
            if ours != theirs and (not figures or claim.figure in figures):
                assert (ours, theirs) in tested or (theirs, ours) in tested

    with pytest.raises(ValueError, match='no runs of one size and length can test'):
        verdicts.command(['fig12a'])
    with pytest.raises(ValueError, match='about vanilla alone'):
        verdicts.command(['fig3'])
    assert 'learned_resformer-resformer' in verdicts.command(verdicts.PlanConfig(('v5',)).names)
    with pytest.raises(ValueError, match="no figure 'fig99'; there are table1"):
        verdicts.PlanConfig(('fig99',))


def test_runs_that_cannot_be_used_are_refused(tmp_path, monkeypatch, capsys):
    (path,) = write_runs(tmp_path, V, {1: 2.0})
    copy = tmp_path / 'copy'
    copy.mkdir()
    write_run(copy, [3.0] * 20, **read_config(path))
    with pytest.raises(ValueError, match='have the same model and seed'):
        judging.read_groups([path, copy], {})
    (copy / 'log.jsonl').write_text('{"step": 0, "loss": 3.0}\n')
    with pytest.raises(ValueError, match='is unfinished: step 0 of 20'):
        judging.read_groups([copy], {})
    monkeypatch.setattr('sys.argv', ['paper.verdicts'])
    with pytest.raises(SystemExit, match='name the folders of runs'):
        verdicts.main()
