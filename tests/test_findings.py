"""The paper's claims as data (paper/claims.py), and what a figure's runs say of them (findings.py)."""

import math

import numpy as np
import pytest
from runs import write_run
from test_reproduce import write_finished

from paper import analyze, findings, losses, runs
from paper.claims import BASES, CLAIMS, METRICS, SIGNS
from paper.figures import FIGURES
from paper.numbers import SAVINGS, TABLE_1, TABLE_5
from paper.runs import LENGTHS, SCALES, Run

TINY, PAPER = SCALES['tiny'], SCALES['paper']


# --- the claims -----------------------------------------------------------------------------------


def test_a_claim_is_of_a_metric_a_sign_and_a_basis_that_are_explained():
    assert len(set(CLAIMS)) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.metric in METRICS and claim.sign in SIGNS and claim.basis in BASES, claim
        assert claim.where and claim.says, claim
    assert {claim.metric for claim in CLAIMS} == set(METRICS)
    assert findings.CLAIM_DIFFERENCES.keys() == METRICS.keys() - {'critical step'}


@pytest.mark.parametrize('scale', SCALES.values(), ids=SCALES)
def test_the_runs_of_a_claim_are_runs_of_its_figure(scale):
    for claim in CLAIMS:
        pair = {run.name(scale) for run in (claim.ours, claim.theirs)}
        if claim.figure in FIGURES:
            assert pair <= {run.name(scale) for run in FIGURES[claim.figure].runs()}, claim
        for run in (claim.ours, claim.theirs):
            runs.configs_of(run, scale)  # which train.py accepts


def test_no_two_claims_contradict_each_other():
    signs = {}
    for claim in CLAIMS:
        key = (claim.ours, claim.theirs, claim.metric)
        assert signs.setdefault(key, claim.sign) == claim.sign, claim
        assert claim.ours == claim.theirs or (claim.theirs, claim.ours, claim.metric) not in signs


def test_claims_from_tables_have_the_sign_of_their_numbers():
    count = 0
    for claim in CLAIMS:
        if claim.figure not in ('table1', 'table5'):
            continue
        keys = [(run.model, run.size) for run in (claim.ours, claim.theirs)]
        if claim.figure == 'table1':
            length = claim.ours.length or PAPER.length
            ours, theirs = (TABLE_1[(*key, length)]['average'] for key in keys)
        else:
            ours, theirs = (TABLE_5[key] for key in keys)
        assert (ours > theirs) == (claim.sign == '>') and ours != theirs, claim
        count += 1
    assert count == 5


def test_a_contrast_is_two_models_on_top_of_any_config():
    contrasts = [
        (claim.ours.model, claim.theirs.model) for claim in CLAIMS if claim.figure == 'fig6'
    ]
    assert contrasts == [
        ('resformer', 'vanilla'),
        ('resformer', 'vanilla+q_residual=True'),
        ('resformer', 'vanilla+k_residual=True'),
        ('vanilla+q_residual=True', 'vanilla'),
        ('vanilla+k_residual=True', 'vanilla'),
    ]


# --- what is found --------------------------------------------------------------------------------


def says(name, panels=()):
    return findings.against_the_paper(name, panels, TINY)


def test_a_line_has_the_difference_and_the_papers_sign_and_no_verdict(here):
    values = {
        'vanilla': 3.0,
        'resformer': 2.9,
        'vanilla+q_residual=True': 3.1,
        'vanilla+k_residual=True': 2.8,
    }
    for model, loss in values.items():
        write_finished(Run(model), [loss] * 120)
    start = 'fig6: training loss at the end, '
    assert says('fig6') == [
        f'{start}resformer minus vanilla: -0.1000 (the paper: below 0); one seed: no verdict',
        f'{start}resformer minus vanilla+q_residual: -0.2000 (the paper: below 0); '
        'one seed: no verdict',
        f'{start}resformer minus vanilla+k_residual: +0.1000 (the paper: below 0); '
        'one seed: no verdict',
        f'{start}vanilla+q_residual minus vanilla: +0.1000 (the paper: not below 0); '
        'one seed: no verdict',
        f'{start}vanilla+k_residual minus vanilla: -0.2000 (the paper: not below 0); '
        'one seed: no verdict',
    ]


def test_no_line_agrees_or_disagrees_however_small_the_scatter_over_steps(here):
    for name in ('fig6', 'fig10', 'fig12a', 'fig13', 'fig14'):
        for i, run in enumerate(FIGURES[name].runs()):
            write_finished(run, [3.0 - 0.1 * i] * 120)
        assert says(name)
        for line in says(name):
            assert line.endswith('; one seed: no verdict') and 'agree' not in line
            assert '±' not in line


def test_losses_early_at_the_end_and_relative_to_vanilla_are_those_of_the_logs(here):
    rng = np.random.default_rng(0)
    curves = {}
    for run in FIGURES['fig11'].runs() + FIGURES['fig12a'].runs():
        if run.name(TINY) not in curves:
            curves[run.name(TINY)] = rng.normal(3, 0.3, 120)
            write_finished(run, curves[run.name(TINY)].tolist())

    def difference(**setting):
        """SVFormer minus vanilla."""
        sv, vanilla = (Run(model, **setting).name(TINY) for model in ('svformer', 'vanilla'))
        return curves[sv] - curves[vanilla]

    lines = says('fig11')
    early, final = lines[: len(LENGTHS)], lines[len(LENGTHS) :]
    for T, line in zip(LENGTHS, early, strict=True):
        assert 'first tenth of the steps, svformer' in line
        assert f': {difference(length=T)[:12].mean():+.4f} (the paper: below 0)' in line
    for T, line in zip(LENGTHS[:-1], final, strict=True):
        assert f': {difference(length=T)[-20:].mean():+.4f} (the paper: above 0)' in line

    leads = [difference(rate=rate)[-20:].mean() for rate in range(3)]
    first, second = says('fig12a')
    assert f': {leads[1] - leads[0]:+.4f} (the paper: below 0)' in first
    assert f': {leads[2] - leads[1]:+.4f} (the paper: below 0)' in second


def folder_of(model, **more):
    return str(runs.folder(Run(model, **more), TINY))


def test_tables_are_compared_with_the_paper():
    averages = {'vanilla': (0.3, 0.03), 'resformer': (0.4, 0.04)}
    tasks = {}
    for model, (average, error) in averages.items():
        for length in (0, 64000):
            entry = {'average': average, 'average_stderr': error}
            tasks[folder_of(model, length=length)] = entry
    lines = says('table1', [{'how': 'tasks', 'numbers': {'runs': tasks}}])
    assert len(lines) == 2
    for line in lines:
        assert ': +0.1000 ± 0.0500 over items (the paper: above 0); one seed: no verdict' in line
    assert 'accuracy, mean of the tasks, resformer minus vanilla:' in lines[0]
    assert 'resformer_T1024 minus vanilla_T1024' in lines[1]

    losses_of = {}
    for size, loss, error in (('82m', -0.1, 0.01), ('180m', 0.2, 0.02), ('468m', 0.1, None)):
        mean = {'loss': loss, 'standard_error': error}
        losses_of[folder_of('resformer', size=size)] = {'minus_first': {'mean': mean}}
    lines = says('table5', [{'how': 'loss', 'numbers': {'runs': losses_of}}])
    expected = [
        'resformer minus vanilla: -0.1000 ± 0.0100 over windows',
        'resformer_180m minus vanilla_180m: +0.2000 ± 0.0200 over windows',
        'resformer_468m minus vanilla_468m: +0.1000 ± 0.0000 over windows',
    ]
    for line, words in zip(lines, expected, strict=True):
        assert words in line and line.endswith('(the paper: below 0); one seed: no verdict')


def analysis(how, **by_model):
    """A panel of an analysis; by_model: {model: {series: (mean, standard error)}}."""
    numbers = {}
    for model, series in by_model.items():
        entry = {}
        for name, (mean, error) in series.items():
            entry[name] = {'mean': mean, 'standard_error': error}
        numbers[folder_of(model)] = {'series': entry}
    return [{'how': how, 'numbers': numbers}]


def test_entropies_are_compared_in_the_deeper_half(here):
    for run in FIGURES['fig1'].panels[0].runs:
        write_finished(run, [3.0] * 120)
    error = [9, 9, 0.3, 0.3]
    vanilla, resformer = ([9, 9, value, value] for value in (3.0, 5.0))
    series = {'vanilla': (vanilla, error), 'resformer': (resformer, error)}
    panels = analysis('entropy', **{model: {'entropy': pair} for model, pair in series.items()})
    lines = [line for line in says('fig1', panels) if 'entropy' in line]
    with_depth, contrast = lines
    assert 'deeper half minus layer 1, vanilla: -6.0000' in with_depth
    assert 'vanilla minus resformer: -2.0000 (the paper: below 0)' in contrast


def test_mapping_spectrum_and_similarity_are_compared_over_layers():
    mean, error = [None, 0.9, 0.8], [None, 0.1, 0.1]
    eq6 = [None, 0.5, 0.6]
    series = {analyze.EQ_3: (mean, error), analyze.EQ_6: (eq6, error)}
    (line,) = says('fig3', analysis('mapping', vanilla=series))
    assert 'Eq. 6 minus Eq. 3, layers 2 and up, vanilla: -0.3000 (the paper: below 0)' in line

    none = [[0, 0]] * 4
    vanilla = [[4, 1], [3, 1], [2, 1], [1, 1]]
    larger, doubled = [[5, 0], [4, 0], [3, 0], [0.1, 0]], [[8, 0], [6, 0], [4, 0], [2, 0]]
    vanilla = {analyze.ATTENDED: (vanilla, none), analyze.PROJECTED: (vanilla, none)}
    resformer = {analyze.ATTENDED: (larger, none), analyze.PROJECTED: (doubled, none)}
    attended, projected = says('fig9', analysis('spectrum', vanilla=vanilla, resformer=resformer))
    middle = (math.log(5 / 4) + math.log(4 / 3)) / 2
    assert f'resformer minus vanilla: {middle:+.4f} (the paper: above 0)' in attended
    assert f'resformer minus vanilla: {math.log(2):+.4f} (the paper: above 0)' in projected

    vanilla, resformer = ({'hidden states': ([a, 0.6], [0, 0])} for a in (0.5, 0.2))
    (line,) = says('fig15', analysis('similarity', vanilla=vanilla, resformer=resformer))
    assert 'hidden states, mean of the layers, resformer minus vanilla: -0.1500' in line


FALLS = "vanilla's loss does not fall at every size"
NO_LAW = 'ResFormer: loss does not fall with size'
OUTSIDE = 'ResFormer reaches that loss outside the range of the fit'
PRINTED = 'of the parameters (the paper: 10% to 16%) and '


@pytest.mark.parametrize(
    'vanilla, resformer, why, line',
    [
        (
            [3.0, 3.1, 3.2],
            [2.9, 2.8, 2.7],
            FALLS,
            f'n/a {PRINTED}n/a of the tokens (the paper: 14%',
        ),
        # It falls from the smallest to the largest, but not at every size.
        (
            [3.0, 2.7, 2.8],
            [2.9, 2.8, 2.7],
            FALLS,
            f'n/a {PRINTED}n/a of the tokens (the paper: 14%',
        ),
        ([3.0, 2.9, 2.8], [2.5, 2.6, 2.7], NO_LAW, '80% of the tokens'),
        ([3.0, 2.95, 2.9], [2.8, 2.75, 2.7], OUTSIDE, '80% of the tokens'),
        (
            [3.0, 2.8, 2.6],
            [3.1, 2.95, 2.8],
            f'{OUTSIDE}; ResFormer of that size does not reach that loss',
            'n/a of the tokens',
        ),
        ([3.0, 2.9, 2.8], [2.9, 2.8, 2.7], '', f'saves 50% {PRINTED}80% of the tokens'),
    ],
)
def test_no_saving_is_read_where_it_cannot_be(tmp_path, vanilla, resformer, why, line):
    models = {}
    for name, values in (('vanilla', vanilla), ('ResFormer', resformer)):
        folders = []
        for i, loss in enumerate(values):
            folders.append(write_run(tmp_path / f'{name}{i}', [loss] * 50))
        models[name] = {'parameters': (1e6, 2e6, 4e6), 'loss': values, 'runs': folders}
    saved = losses.savings(models, 'ResFormer', 10)
    assert saved['why'] == why
    text = findings.describe_savings(saved)
    assert line in text and text.endswith(f'one seed: no verdict{", " * bool(why)}{why}')
    assert (saved['parameters_saved'] is None) == bool(why)
    assert (saved['tokens_saved'] is None) == ('n/a of the tokens' in text)


def test_crossings_are_told_for_every_length_without_a_verdict():
    common = {'tokens': 640, 'steps': 100, 'mean': 0.5, 'interval': (0.25, 0.75), 'validation': 0.5}
    points = [
        {'length': 64, 'kind': 'overtaken', 'step': 21, **common},
        {'length': 128, 'kind': 'predicted', 'step': 160.4, **common},
        {'length': 256, 'kind': 'not overtaken', 'step': None, **common},
        {'length': 512, 'kind': 'never ahead', 'step': None, **common},
    ]
    witnesses = (
        '(mean of the last 50 steps +0.5000, 95% interval +0.2500 to +0.7500; '
        'validation loss +0.5000)'
    )
    assert findings.describe_crossings(points) == (
        f'SVFormer by sequence length: 64: overtaken at step 21 {witnesses}; '
        f'128: not overtaken by 640 tokens, predicted for step 160 {witnesses}; '
        f'256: not overtaken by 640 tokens {witnesses}; '
        f'512: behind, and never ahead {witnesses} '
        '(the paper: overtaken, the later, the longer the sequence); one seed: no verdict'
    )


def test_the_savings_are_those_that_the_versions_of_the_paper_print():
    assert sorted(SAVINGS.values()) == [(0.104, 0.136), (0.133, 0.154), (0.161, 0.203)]
