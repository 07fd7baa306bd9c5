"""
Numbers on the pages of claims, deep, rates, embedding, start, family, real, lasting, long, larger and
speed, computed again from the kept logs and analyses.

Logs are read through comparison/runs.py, which knows how they are packed; everything else is numpy and
scipy. The verdicts are also computed by the page's own command.
"""

import functools
import itertools
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from conftest import ROOT, read_json
from runs import succeed

from comparison.logs import named_runs, text_in
from comparison.record import read_plan
from comparison.runs import read_state
from paper import judge, losses, reproduce
from paper.figures import NAMES, SCALES

RESULTS = ROOT / 'results'
CLAIMS, LONG, RATES = RESULTS / 'claims', RESULTS / 'long', RESULTS / 'rates'
MAPPINGS = ('A_n (V_n + V_n-1), Eq. 3', 'A_n V_n + V_n-1, Eq. 6')


def page(topic):
    return (RESULTS / topic / 'README.md').read_text()


@functools.cache
def claims_of(topic):
    """{label: row} of the paper's claims, tested or not."""
    return {row['label']: row for row in read_json(RESULTS / topic / 'verdicts.json')['rows']}


def judged_claims(topic):
    return {label: row for label, row in claims_of(topic).items() if row['numbers']}


@functools.cache
def read(folder):
    """(training losses of each logged step, validation loss at the end) of a kept run."""
    run = read_state(folder)
    training, interval = run.training(), run.config['log_interval']
    assert run.kind == 'finished' and list(training) == [i * interval for i in range(len(training))]
    return np.array(list(training.values())), run.loss


@functools.cache
def analyzed(path):
    """{name of a run: {series: its mean}} of a kept analysis."""
    result = {}
    for run, one in read_json(path)['runs'].items():
        series = one['series'].items()
        means = {name: np.array(numbers['mean'], float) for name, numbers in series}
        assert result.setdefault(Path(run).name, means) is means
    return result


def final(folder):
    return read(folder)[1]


def early(folder):
    training, _ = read(folder)
    return training[: -(-len(training) // 10)].mean()


def rounded(path):
    """A file's text; the last digits of a p value differ from one processor to another."""
    number = re.compile(r'\d+\.\d{9,}(e-\d+)?')
    return number.sub(lambda found: f'{float(found[0]):.9g}', path.read_text())


@pytest.mark.parametrize('topic', ['embedding', 'family', 'lasting', 'real', 'start'])
def test_what_a_pages_own_program_imports_is_there(topic):
    programs = re.findall(r"python - <<'END'\n(.*?)\nEND\n", page(topic), re.S)
    assert programs
    for line in re.findall('^(?:from|import) .*', '\n'.join(programs), re.M):
        exec(line, {})


def test_every_kept_plan_is_as_it_was_written():
    """Also those with the hash of older code, in a folder or in a pack."""
    folders = {path.parent for path in RESULTS.rglob('runs_*.tar.xz')} | {RESULTS / 'ideas'}
    plans = [folder for folder in folders if text_in(folder, 'plan.json') is not None]
    plans.remove(LASTING)  # a plan of its own kind
    for folder in plans:
        assert read_plan(folder / 'plan.json')['plan']['arms']
    assert len(plans) == 9


@pytest.mark.parametrize(
    'packs, tuning, tests',
    [
        ('start/*/*.xz', 42, 72),
        ('claims/start/*/*.xz', 36, 126),
        ('family/runs_*.xz start/start_norm/*.xz', 40, 119),
        ('family/modern/*.xz start/start/*.xz', 44, 72),
    ],
)
def test_runs_that_share_a_verdict_share_code_and_data_and_started_well(packs, tuning, tests):
    paths = itertools.chain.from_iterable(map(RESULTS.glob, packs.split()))
    states = [read_state(run) for run in named_runs(paths)]
    for name in ('commit', 'data'):
        assert len({state.config[name] for state in states}) == 1
    assert not any('before' in entry for state in states for entry in state.entries)  # resumed

    losses = {}
    for state in states:
        if state.config['seed'] not in (101, 102):
            model, _ = state.folder.name.split('_seed')
            losses.setdefault(model, []).append(state.loss)
    count = sum(map(len, losses.values()))
    assert (len(states) - count, count) == (tuning, tests)
    assert all(max(values) < np.median(values) + 0.15 for values in losses.values())


# --- claims and deep ------------------------------------------------------------------------------


@pytest.mark.parametrize('topic', ['claims', 'claims/start', 'deep'])
def test_the_verdicts_follow_from_the_kept_logs_and_analyses(topic, tmp_path, monkeypatch):
    """By the page's command, which is looked up on the page."""
    monkeypatch.chdir(ROOT)
    (line,) = re.findall(r'^python -m paper.reproduce claims (.*)$', page(topic), re.M)
    runs, *words = shlex.split(line, comments=True)
    folders = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(runs))
    words = [f'--out={tmp_path}/of_5.1M' if '--out' in word else word for word in words]
    out = succeed(reproduce.main, 'claims', *folders, *words)
    for ending in ('.md', '.svg', '.json'):
        kept, made = RESULTS / topic / f'verdicts{ending}', tmp_path / f'of_5.1M{ending}'
        assert not kept.exists() or rounded(kept) == rounded(made)
    verdicts = (tmp_path / 'of_5.1M.md').read_text()
    for row in out.replace(verdicts, '').splitlines():  # the tables of losses and of differences
        assert not row.startswith('| ') or row in page(topic), row


@pytest.mark.parametrize('topic', ['claims', 'claims/start'])
def test_every_tested_contrast_of_losses_is_that_of_the_runs_that_it_names(topic):
    measures = {'validation loss': final, 'early loss': early}
    checked = 0
    for row in judged_claims(topic).values():
        if row['metric'] not in measures:
            continue
        numbers, half = row['numbers'], len(row['runs']) // 2
        values = [measures[row['metric']](RESULTS / topic / 'main' / run) for run in row['runs']]
        difference = np.subtract(values[:half], values[half:])
        assert list(numbers['differences'].values()) == pytest.approx(difference.tolist())
        assert numbers['mean'] == pytest.approx(difference.mean())
        test = scipy.stats.ttest_1samp(difference, 0)
        interval = numbers['low'], numbers['high']
        assert interval == pytest.approx(test.confidence_interval(0.95))
        assert numbers['p'] == pytest.approx(test.pvalue)
        checked += 1
    assert checked == 23


def holm(p):
    order = np.argsort(p)
    scaled = np.array(p)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1, np.maximum.accumulate(scaled))
    return corrected


def p_after_holm(leads):
    """{contrast: p} of {contrast: differences}."""
    p = [scipy.stats.ttest_1samp(each, 0).pvalue for each in leads.values()]
    return dict(zip(leads, holm(p), strict=True))


def minus(ours, theirs):
    """Differences of the seeds that both have, the first ones."""
    both = min(len(ours), len(theirs))
    return ours[:both] - theirs[:both]


def named(model):
    """What the pages call a model, with the norm or without."""
    name, _, norm = model.partition('_')
    return NAMES[name] + ', norm' * bool(norm)


def leads_of(losses):
    """{contrast: differences} of three models, {model: losses}, without and with the norm."""
    leads = {}
    for norm in ('', '_norm'):
        for pair in (('resformer', 'vanilla'), ('svformer', 'vanilla'), ('svformer', 'resformer')):
            ours, theirs = (model + norm for model in pair)
            leads[f'{named(ours)} - {named(theirs)}'] = minus(losses[ours], losses[theirs])
    for name in (NAMES['resformer'], NAMES['svformer']):
        change = minus(leads[f'{name}, norm - vanilla, norm'], leads[f'{name} - vanilla'])
        leads[f"{name}'s lead with the norm - that without"] = change
    return leads


def row_of(text, name, differences, p_holm, digits):
    """The row of a contrast in a page's table, which begins and ends as it should."""
    n = len(differences)
    flips = np.stack(np.meshgrid(*[[-1, 1]] * n), axis=-1).reshape(-1, n)
    # The share of flips that give a mean at least as far from 0.
    p = np.mean(np.abs(flips @ differences) >= abs(differences.sum()) * (1 - 1e-12))
    verdict = 'undecided' if p_holm > 0.05 else 'better' if differences.mean() < 0 else 'worse'
    below = f'{sum(differences < 0)} of {n}'
    start = re.escape(f'| {name} | {differences.mean():+.4f} | ')
    end = re.escape(f' | {p_holm:.{digits}f} | {p:.4f} | {below} | {verdict} |')
    (row,) = re.findall(f'^{start}.*{end}$', text, re.M)
    return row


def cells_of(losses):
    """Mean, standard deviation and each of the losses, as a table's cells."""
    return ' | '.join(f'{x:.4f}' for x in (losses.mean(), losses.std(ddof=1), *losses))


def cells_of_rates(losses):
    """A model's losses at several rates, as a table's cells: the lowest is bold."""
    cells = [f'{loss:.4f}' for loss in losses]
    best = np.argmin(losses)
    return [*cells[:best], f'**{cells[best]}**', *cells[best + 1 :]]


@pytest.mark.parametrize('topic', ['claims', 'claims/start'])
def test_holm_within_each_figure(topic):
    """What this size could test and was not trained counts in its figure with p = 1."""
    families = {}
    for row in claims_of(topic).values():
        if row['numbers'] or row['reason'].startswith('no such runs'):
            families.setdefault(row['figure'], []).append(row['numbers'])
    for family in families.values():
        corrected = holm([numbers.get('p', 1.0) for numbers in family])
        for numbers, p in zip(family, corrected, strict=True):
            assert not numbers or numbers['p_holm'] == pytest.approx(p)


def test_what_holm_would_leave_over_all_claims():
    def differences(rows):
        return {label: [*row['numbers']['differences'].values()] for label, row in rows.items()}

    over_all = p_after_holm(differences(judged_claims('claims')))
    (survivor,) = [label for label, p in over_all.items() if p <= 0.05]
    assert len(over_all) == 29 and 'eigenvalue, attended' in survivor
    assert 'Over all 29 rows, one survives' in page('claims')

    finals = {
        label: row
        for label, row in judged_claims('claims/start').items()
        if row['metric'] == 'validation loss'
    }
    over_all = p_after_holm(differences(finals))
    decided = ('agrees', 'contradicts')
    (lost,) = [x for x, p in over_all.items() if p > 0.05 and finals[x]['verdict'] in decided]
    assert lost == 'ResFormer below cross-layer attention'
    assert finals[lost]['numbers']['rests_on'] == [24]
    text = page('claims/start')
    assert f'only that same verdict becomes undecided (p = {over_all[lost]:.4f})' in text
    verdicts = [row['verdict'] for row in finals.values()]
    counts = [verdicts.count(word) for word in (*decided, 'undecided')]
    words = '{} come out as printed, {} come out against it, and {} are undecided.'
    assert f'Of {len(finals)} contrasts' in text and words.format(*counts) in text


def test_the_rates_of_the_claims_are_those_of_the_lower_losses_of_their_tuning_runs():
    text, folder = page('claims/start'), CLAIMS / 'start'
    table = text[text.index('## Rates') : text.index('## The plan')]
    pool = judge.read_pool(named_runs((folder / 'main').glob('*.xz')), SCALES['claims'])
    tuned = {arm: runs for arm, runs in pool.items() if f'| {arm} |' in table}
    assert len(pool) == 21 and len(tuned) == table.count('**') // 2 == 18
    for arm, runs in tuned.items():
        (chosen,) = {run.folder.name.split('_seed')[0] for run in runs.values()}
        model, _ = chosen.split('_lr')
        tried = [f'{model}_lr{rate}' for rate in ('0.006', '0.012')]
        losses = [final(folder / 'tuning' / f'{name}_seed101') for name in tried]
        assert f'| {arm} | {" | ".join(cells_of_rates(losses))} |' in table
        assert chosen == tried[np.argmin(losses)]


def test_how_the_leads_shrink_on_a_baseline_that_starts():
    """The last 50 steps before a step have five log lines."""

    def lead(ours, theirs, step):
        seeds = range(21, 27)
        folder = CLAIMS / 'start/main'
        of_seed = [
            read(folder / f'{ours}_seed{s}')[0] - read(folder / f'{theirs}_seed{s}')[0]
            for s in seeds
        ]
        last = step // 10 + 1
        return f'{abs(np.mean(of_seed, axis=0)[last - 5 : last].mean()):.3f}'

    vanilla, resformer, dense = 'vanilla_lr0.012', 'resformer_lr0.006', 'denseformer_lr0.006'
    text = page('claims/start')
    for words, ours, theirs, *steps in (
        ('from {} at step 300 to {} in the last 50 steps', resformer, vanilla, 300, 1240),
        ('that of DenseFormer from {} at step 320 to {}.', dense, vanilla, 320, 1240),
        ('{} at step 300 and {} at step 700', dense, resformer, 300, 700),
        ("NeuTRENO's, {} at step 110,", 'neutreno_lr0.012', vanilla, 110),
        ('from step 900 on ({}, then {})', 'svformer_lr0.012', vanilla, 900, 1240),
    ):
        assert words.format(*(lead(ours, theirs, step) for step in steps)) in text


def test_what_lies_inside_the_models_is_in_the_kept_analyses():
    def series(kind, model, seed, name):
        runs = analyzed(CLAIMS / 'analyses' / f'{kind}.json')
        return runs[f'{model}_lr0.006_seed{seed}'][name]

    def both(kind, name, seed):
        return [series(kind, model, seed, name) for model in ('resformer', 'vanilla')]

    values = {}
    for seed in range(1, 6):
        resformer, vanilla = both('entropy', 'entropy', seed)
        attended = np.divide(*both('spectrum', 'values attended with', seed))[:, 0]
        projected = np.divide(*both('spectrum', 'projected values', seed))[:, 0]
        three, six = (series('mapping', 'vanilla', seed, name) for name in MAPPINGS)
        values[seed] = {
            'entropy': vanilla[4:].mean() - resformer[4:].mean(),
            'entropy with depth': vanilla[4:].mean() - vanilla[0],
            'eigenvalue, attended': np.median(np.log(attended)),
            'eigenvalue, projected': np.median(np.log(projected)),
            'mapping': np.mean(six[1:] - three[1:]),
            'similarity': np.subtract(*both('similarity', 'hidden states', seed)).mean(),
        }
    for metric in values[1]:
        (row,) = [row for row in judged_claims('claims').values() if row['metric'] == metric]
        expected = [of_seed[metric] for of_seed in values.values()]
        assert list(row['numbers']['differences'].values()) == pytest.approx(expected), metric


# --- rates ----------------------------------------------------------------------------------------


def test_the_rates_are_chosen_by_the_means_of_both_tuning_seeds():
    text = page('rates')
    best = {'vanilla': 0.006, 'resformer': 0.012, 'svformer': 0.006}
    for model in best:
        means = {}
        for rate in (0.003, 0.006, 0.012, 0.024)[: 4 if model == 'resformer' else 3]:
            values = [final(RATES / f'{model}_lr{rate:g}_seed{seed}') for seed in (101, 102)]
            means[rate] = np.mean(values)
            row = ' | '.join(f'{value:.4f}' for value in (*values, means[rate]))
            assert f'| {NAMES[model]} | {rate:g} | {row} |' in text.replace('**', '')
        assert min(means, key=means.get) == best[model]
        assert f'**{means[best[model]]:.4f}**' in text


# --- embedding ------------------------------------------------------------------------------------

EMBEDDING = RESULTS / 'embedding'


def embedding_losses(model, rate, seeds):
    part = 'e' if model.endswith('_norm') else 't'
    return np.array([final(EMBEDDING / f'{part}/{model}_lr{rate:g}_seed{seed}') for seed in seeds])


def test_the_embeddings_rates_are_those_of_the_lowest_means_of_the_tuning_seeds():
    grid = 0.00075 * 2.0 ** np.arange(5)
    tables = [
        {'vanilla': grid, 'resformer': grid[:4], 'svformer': grid[:4]},
        dict.fromkeys(('vanilla_norm', 'resformer_norm', 'svformer_norm'), grid[1:]),
    ]
    text = page('embedding').replace('**', '')
    for part, table in zip('te', tables, strict=True):
        columns, chosen = [], {}
        for model, rates in table.items():
            columns.append([embedding_losses(model, rate, (101, 102)) for rate in rates])
            chosen[model] = float(rates[np.mean(columns[-1], axis=1).argmin()])
        plan = read_json(EMBEDDING / part / 'plan.json')
        assert plan['before_test_runs']['rates'] == pytest.approx(chosen)
        for row in itertools.zip_longest(*columns, fillvalue=()):
            cells = ['{:.4f}, {:.4f}'.format(*losses) for losses in row if len(losses)]
            assert f'| {" | ".join(cells)} |' in text


def test_the_embeddings_losses_and_leads_are_those_of_the_kept_runs():
    text = page('embedding')
    rates = {'vanilla': 0.006, 'resformer': 0.003, 'svformer': 0.003}
    losses = {}
    for model in rates:
        losses[model] = embedding_losses(model, rates[model], range(3, 11))
        losses[f'{model}_norm'] = embedding_losses(f'{model}_norm', 0.006, range(3, 15))
    for model, values in losses.items():
        rate = f' {rates[model] * 1000:g}e-3 |' if model in rates else ''
        assert f'| {named(model)} |{rate} {cells_of(values)} |' in text

    leads = leads_of(losses)
    for model in rates:
        name = f'{NAMES[model]}, norm - vanilla'
        leads[name] = minus(losses[f'{model}_norm'], losses['vanilla'])
    for name, p_holm in p_after_holm(leads).items():
        row_of(text, name, leads[name], p_holm, digits=3)


def test_what_bad_starts_handicaps_and_too_few_seeds_make_of_the_embeddings_numbers():
    text, tuning = page('embedding'), (101, 102)
    both = [embedding_losses(m, 0.006, range(3, 11)) for m in ('vanilla_norm', 'vanilla')]
    gain = both[1] - both[0]
    without = np.delete(gain, (3, 6))  # seeds 6 and 9
    low, high = scipy.stats.ttest_1samp(without, 0).confidence_interval(0.95)
    assert f'{np.median(gain):.3f}' in text
    assert f'{without.mean():.3f} ± {(high - low) / 2:.3f}' in text

    at_6, at_3 = (embedding_losses('vanilla', rate, tuning).mean() for rate in (0.006, 0.003))
    lead = at_3 - embedding_losses('resformer', 0.003, tuning).mean()
    words = '{:.3f} of the {:.3f} by which ResFormer leads there at 3e-3'
    assert words.format(at_3 - at_6, lead) in page('lasting')

    each = [embedding_losses(m, 0.006, tuning) for m in ('vanilla', 'resformer', 'svformer')]
    scatter = np.sqrt(2 * np.var(each, axis=1, ddof=1).mean())
    seeds = np.arange(3, 40)
    threshold = scipy.stats.t.ppf(1 - 0.05 / 6, seeds - 1)
    power = scipy.stats.nct.sf(threshold, seeds - 1, 0.0752 / scatter * np.sqrt(seeds))
    needed = seeds[np.searchsorted(power, 0.9)]
    assert f'scatters by {scatter:.3f} and needs {needed}.' in text
    ours, theirs = (
        embedding_losses(m, 0.006, range(3, 15)) for m in ('resformer_norm', 'vanilla_norm')
    )
    assert f'with the norm scatters by {np.std(ours - theirs, ddof=1):.3f}' in text


def test_the_first_layer_of_three_runs_attends_as_no_others_does():
    runs = analyzed(EMBEDDING / 'entropy.json')
    first = {run: series['entropy'][0] for run, series in runs.items()}
    stuck = [f'vanilla_lr0.006_seed{seed}' for seed in (6, 9)] + ['vanilla_lr0.012_seed102']
    apart = [first.pop(run) for run in stuck]
    text = page('embedding')
    assert '{:.2f}, {:.2f} and {:.2f} nats'.format(*apart) in text
    assert f'In all {len(first)} other runs' in text
    assert f'between {min(first.values()):.2f} and {max(first.values()):.2f}' in text
    # Of 256 queries, the i-th spreads its attention over i tokens.
    importance = np.cumsum(1 / np.arange(256, 0, -1)) / 256
    uniform = -(importance * np.log(importance)).sum()
    assert f'over the past has {uniform:.2f}' in text and f'token alone {np.log(256):.2f}' in text


# --- start ----------------------------------------------------------------------------------------

START = RESULTS / 'start'


def tuned_scatter(folder, models, columns, text):
    """The standard deviation of a difference of two models, by the rule of the plans: from the best rate
    of each model and its neighbors. Checks a page's table of means.

    models: {the name of runs: the page's}; columns: the rates of the table.
    """
    runs, scatter = ' '.join(named_runs(folder.glob('*.xz'))), []
    for name, words in models.items():
        rates = sorted(float(r) for r in re.findall(rf'\b{name}_lr([\d.]+)_seed101', runs))
        trials = [
            [final(folder / f'{name}_lr{rate:g}_seed{seed}') for seed in (101, 102)]
            for rate in rates
        ]
        means = np.mean(trials, axis=1)
        best = means.argmin()
        cells = dict(zip(rates, cells_of_rates(means), strict=True))
        row = ' | '.join(cells.get(rate, '') for rate in columns)
        assert f'| {words} | {row} |' in text
        scatter += list(np.var(trials, axis=1, ddof=1)[max(0, best - 1) : best + 2])
    return np.sqrt(2 * np.mean(scatter))


def half_widths(sd, seeds):
    """Of the 95% interval of a difference, as expected."""
    return scipy.stats.t.ppf(0.975, seeds - 1) * sd / np.sqrt(seeds)


@pytest.mark.parametrize('part', ['start', 'start_norm'])
def test_the_rates_and_seeds_of_start_follow_from_its_tuning_runs(part):
    """By the rule of its plan: 90% power for 0.03 without the norm, intervals of 0.010 with it."""
    text, norm = page('start'), part.removeprefix('start')
    models = {f'{name}{norm}': named(name + norm) for name in ('vanilla', 'resformer', 'svformer')}
    sd = tuned_scatter(START / part, models, (0.003, 0.006, 0.012, 0.024), text)
    if norm:
        seeds = np.arange(8, 31)
        enough = half_widths(sd, seeds) <= 0.010
    else:
        seeds = np.arange(8, 21)
        threshold = scipy.stats.t.ppf(1 - 0.05 / 16, seeds - 1)
        enough = scipy.stats.nct.sf(threshold, seeds - 1, 0.03 / sd * np.sqrt(seeds)) >= 0.9
    assert f'by {sd:.4f}, and so {seeds[enough][0]} seeds' in text


def test_the_losses_and_leads_of_start_are_those_of_the_kept_runs():
    text, losses = page('start'), {}
    for model, rate in {'vanilla': 0.012, 'resformer': 0.006, 'svformer': 0.012}.items():
        for norm, seeds in (('', range(21, 32)), ('_norm', range(21, 34))):
            run = f'start{norm}/{model}{norm}_lr{rate:g}_seed'
            values = np.array([final(START / f'{run}{seed}') for seed in seeds])
            losses[model + norm] = values
            assert f'| {named(model + norm)} | {cells_of(values)} |' in text
    leads = leads_of(losses)
    for name, p_holm in p_after_holm(leads).items():
        row = row_of(text, name, leads[name], p_holm, digits=4)
        low, high = scipy.stats.ttest_1samp(leads[name], 0).confidence_interval(0.95)
        assert f' | {low:+.4f} to {high:+.4f} | ' in row


def test_start_quotes_the_leads_of_the_embeddings_page_beside_its_own():
    texts = page('embedding'), page('start')
    for model, norm in itertools.product(('ResFormer', 'SVFormer'), ('', ', norm')):
        name = f'{model}{norm} - vanilla{norm}'
        row = rf'^\| {name} \| (\S+) \|.* (\S+ to \S+) \| [\d.]+ \| [\d.]+ \| \d+ of \d+ \|'
        leads = [re.search(row, text, re.M).groups() for text in texts]
        cells = ' | '.join(f'{lead} ({interval})' for lead, interval in leads)
        assert f'| {name} | {cells} |' in texts[1]


def test_the_sinks_of_start_are_those_that_were_measured():
    rows = analyzed(START / 'sinks.json')
    for run, s in rows.items():
        cells = [f'{s["sink rate"].max():.3f}', f'{s["sink rate of position 0"].max():.3f}']
        cells += [f'{s[key].min():.2f} to {s[key].max():.2f}' for key in ('drain', 'peak')]
        cells.append(f'{s["massive"].max():.1f}')
        model, _, _ = run.partition('_lr')
        assert f'| {named(model)} | {" | ".join(cells)} |' in page('start')
    assert len(rows) == 6


# --- real -----------------------------------------------------------------------------------------


def real_series(kind, sequences):
    path = RESULTS / 'real' / f'{kind}.json'
    (run,) = read_json(path)['runs'].values()
    assert run['sequences'] == sequences and run['length'] == 1024
    (series,) = analyzed(path).values()
    return series


def check_real_table(columns, layers, last):
    """Rows of some layers, counted from 1, and of the mean of the last ones, from one on."""
    rows = {layer: slice(layer - 1, layer) for layer in layers}
    rows[f'mean of {last} to 30'] = slice(last - 1, 30)
    for name, part in rows.items():
        cells = [form.format(values[part].mean()) for values, form in columns]
        line = ' | '.join(cell.replace('nan', '').removesuffix('.') for cell in cells)
        assert f'| {name} | {line} |' in page('real'), line


def test_a_real_models_table_is_what_its_analyses_say():
    kinds = ('entropy', 'tokens', 'similarity', 'mapping', 'spectrum')
    entropy, tokens, similarity, mapping, spectrum = (real_series(kind, 200) for kind in kinds)
    eigenvalues = spectrum['projected values']
    largest = eigenvalues[:, 0]
    columns = [
        (entropy['entropy'], '{:.2f}'),
        (entropy['first token'], '{:.3f}'),
        (tokens['R^2'], '{:.3f}'),
        (similarity['hidden states'], '{:.3f}'),
        (largest, '{:#.3g}'),
        (largest / eigenvalues.sum(axis=1), '{:.2f}'),
        *((mapping[name], '{:.3f}') for name in MAPPINGS),
    ]
    check_real_table(columns, (1, 2, 3, 4, 8, 12, 16, 20, 24, 26, 28, 30), last=16)


def test_the_page_of_a_real_model_has_the_sinks_that_were_measured():
    """Its first token is one: almost all sinks of layers 13 to 30 are, and their values are drained."""
    mean = real_series('sinks', 8)
    rate, of_first = mean['sink rate'], mean['sink rate of position 0']
    assert of_first[12:].sum() > 0.98 * rate[12:].sum() > 0.98 * 0.4 * 18
    assert not of_first[:12].any() and not rate[[0, 1, 2, 9, 10, 11]].any()
    assert mean['drain'][12:].max() < 0.43 and mean['peak'][12:].min() > 11

    forms = ['{:.2f}', '{:.2f}', '{:.2f}', '{:#.3g}', '{:#.3g}', '{:.0f}']
    names = ('sink rate', 'sink rate of position 0', 'drain', 'peak', 'gradient', 'massive')
    columns = [(mean[name], form) for name, form in zip(names, forms, strict=True)]
    check_real_table(columns, (1, 2, 3, 4, 8, 12, 13, 16, 20, 24, 26, 28, 30), last=13)


# --- family ---------------------------------------------------------------------------------------

FAMILY = RESULTS / 'family'


def test_the_rates_of_the_family_are_those_of_the_lower_losses_of_its_tuning_runs():
    table = re.findall(r'^\| (\w+) \| (\S+\d{4}\**) \| (\S+\d{4}\**) \|$', page('family'), re.M)
    assert len(table) == 10
    for name, *cells in table:
        losses = [final(FAMILY / f'{name}_lr{rate}_seed101') for rate in ('0.006', '0.012')]
        assert cells == cells_of_rates(losses)


MODERN = {
    'modern': 'modern',
    'resformer_modern': 'ResFormer, modern',
    'first_token_modern': 'first_token, modern',
}


def test_the_rates_and_seeds_of_modern_follow_from_its_tuning_runs():
    text = page('family')
    sd = tuned_scatter(FAMILY / 'modern', MODERN, (0.006, 0.012, 0.024, 0.048), text)
    widths = half_widths(sd, np.arange(8, 14))
    assert min(widths) > 0.010
    assert f'scatters by {sd:.4f}' in text and f'to be ± {widths[-1]:.3f}' in text


def test_the_losses_and_leads_over_modern_are_those_of_the_kept_runs():
    text, losses = page('family'), {}
    rates = {'modern': 0.012, 'resformer_modern': 0.024, 'first_token_modern': 0.024}
    for (name, rate), words in zip(rates.items(), MODERN.values(), strict=True):
        runs = [FAMILY / f'modern/{name}_lr{rate:g}_seed{seed}' for seed in range(21, 34)]
        losses[words] = np.array([final(run) for run in runs])
        assert f'| {words} | {cells_of(losses[words])} |' in text
    modern, resformer, first_token = losses.values()
    plain = [
        np.array([final(START / f'start/{name}_seed{seed}') for seed in range(21, 32)])
        for name in ('resformer_lr0.006', 'vanilla_lr0.012')
    ]
    leads = {
        'ResFormer, modern - modern': resformer - modern,
        'first_token, modern - modern': first_token - modern,
        'first_token, modern - ResFormer, modern': first_token - resformer,
        "ResFormer's lead over modern - that over vanilla": minus(
            resformer - modern, plain[0] - plain[1]
        ),
    }
    for name, p_holm in p_after_holm(leads).items():
        row = row_of(text, name, leads[name], p_holm, digits=4)
        low, high = scipy.stats.ttest_1samp(leads[name], 0).confidence_interval(0.95)
        assert f' | {low:+.4f} to {high:+.4f} | ' in row


def family_losses():
    """{model: losses of its test runs}; vanilla's are those of the start page."""
    vanilla = 'start_norm/vanilla_norm_lr0.012_seed'
    losses = {'vanilla': [final(START / f'{vanilla}{seed}') for seed in range(21, 34)]}
    rows = re.findall(r'^\| (\w+) \| (\S+\d{4}\**) \| \S+\d{4}\** \|$', page('family'), re.M)
    for n, (name, at_6e3) in enumerate(rows, 1):
        rate = '0.006' if at_6e3.startswith('**') else '0.012'
        seeds = range(1000 * n + 21, 1000 * n + 29)
        losses[name] = [final(FAMILY / f'{name}_lr{rate}_seed{seed}') for seed in seeds]
    return {name: np.array(values) for name, values in losses.items()}


def test_the_verdicts_on_the_family_are_dunnetts_of_the_kept_runs():
    text, losses = page('family'), family_losses()
    vanilla, *others = losses.values()
    freedom = sum(map(len, losses.values())) - len(losses)
    pooled = np.sqrt(sum(((v - v.mean()) ** 2).sum() for v in losses.values()) / freedom)
    numbers = f'{vanilla.mean():.4f} and a standard deviation of {vanilla.std(ddof=1):.4f}'
    assert f'with a mean of {numbers}' in text and f'scatters by {pooled:.4f}' in text

    # Dunnett's distribution, drawn: the largest t of ten means that share vanilla's and the deviation.
    rng, draws = np.random.default_rng(0), 400_000
    deviation = np.sqrt(rng.chisquare(freedom, draws) / freedom)
    error = np.sqrt(1 / 8 + 1 / 13)
    shared = rng.normal(size=draws) / np.sqrt(13)
    own = rng.normal(size=(len(others), draws)) / np.sqrt(8)
    largest = np.abs(own - shared).max(0) / error / deviation
    half = np.quantile(largest, 0.95) * error * pooled

    for name, values in list(losses.items())[1:]:
        assert f'| {name} | {cells_of(values)} |' in text
        mean = values.mean() - vanilla.mean()
        start = re.escape(f'| {name} | {mean:+.4f} | ')
        row = rf'^{start}(\S+) to (\S+) \| (\S+) \| (\w+) \|$'
        ((low, high, p, verdict),) = re.findall(row, text, re.M)
        assert abs(float(low) - (mean - half)) < 3e-4 and abs(float(high) - (mean + half)) < 3e-4
        drawn = (largest > abs(mean) / error / pooled).mean()
        assert abs(float(p) - drawn) < 0.005
        assert verdict == ('undecided' if float(p) >= 0.05 else 'better' if mean < 0 else 'worse')


def test_a_table_of_tokens_against_as_many_other_parameters_is_welchs_test():
    token, wide = (family_losses()[name] for name in ('token', 'wide'))
    variances = [losses.var(ddof=1) / 8 for losses in (token, wide)]
    freedom = 7 * sum(variances) ** 2 / sum(v**2 for v in variances)
    mean, error = token.mean() - wide.mean(), np.sqrt(sum(variances))
    half = scipy.stats.t.ppf(0.975, freedom) * error
    p = 2 * scipy.stats.t.sf(abs(mean) / error, freedom)
    said = f'{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f}, p = {p:.4f})'
    assert f'`token` - `wide` is {said}' in page('family')


# --- lasting --------------------------------------------------------------------------------------

LASTING = RESULTS / 'lasting'
# The step at which each cooldown begins, and its last one.
COOLDOWNS = {'2.5M': (610, 732), '5M': (1221, 1465), '10M': (2441, 2929), '20M': (4883, 5860)}


def test_all_lengths_of_a_run_of_lasting_share_one_training_as_planned():
    plan = read_json(LASTING / 'plan.json')
    for run in named_runs(LASTING.glob('runs_*.tar.xz')):
        arm, size, seed = Path(run).name.rsplit('_', 2)
        state, planned = read_state(run), plan['arms'][arm]
        words = [f'{name}={value}' for name, value in state.model.variant().items()]
        assert words == planned['words'].split()
        first, last = COOLDOWNS[size]
        longest = read(LASTING / f'{arm}_20M_{seed}')[0]
        training = read(run)[0]
        assert len(training) == last and (training[:first] == longest[:first]).all()
        lr = [entry['lr'] for entry in state.entries if 'lr' in entry]
        assert set(lr[25 : first + 1]) == {planned['rate']}
        assert lr[-1] == pytest.approx(planned['rate'] / 10, rel=1e-2)
        assert state.config['seed'] in plan['seeds']
        assert plan['commit'].startswith(state.config['commit'])


def test_the_losses_and_leads_of_lasting_are_those_of_the_kept_runs():
    kept = {Path(run).name: final(run) for run in named_runs(LASTING.glob('runs_*.tar.xz'))}
    text, leads = page('lasting'), {}

    def losses(model, norm, size):
        values = np.array([kept[f'{model}{norm}_{size}_seed{seed}'] for seed in range(3, 8)])
        row = f'| {named(model + norm)} | {size} | {cells_of(values)} |'
        assert row in text
        return values

    for norm in ('_norm', ''):
        by_size = {}
        for size in COOLDOWNS:
            lead = losses('resformer', norm, size) - losses('vanilla', norm, size)
            interval = scipy.stats.ttest_1samp(lead, 0).confidence_interval(0.95)
            cells = ' | '.join(f'{x:+.4f}' for x in lead)
            row = '{} | {:+.4f} | {:+.4f} to {:+.4f} | {} |'
            assert row.format(size, lead.mean(), *interval, cells) in text
            by_size[size] = lead
        leads['lead', norm] = by_size['20M']
        leads['change', norm] = by_size['20M'] - by_size['2.5M']
    for key, p in p_after_holm(leads).items():
        start = re.escape(f'| {leads[key].mean():+.4f} | ')
        end = re.escape(f' | {p:.3f} | {sum(leads[key] < 0)} of 5 |')
        assert re.search(start + '.*' + end, text), key


# --- long -----------------------------------------------------------------------------------------


@pytest.mark.parametrize('length, step', [(64, 1473), (256, 1597), (1024, 885)])
def test_the_step_at_which_svformer_is_overtaken(length, step):
    pair = [LONG / f'{model}_{length}' for model in ('svformer', 'vanilla')]
    # Where means of 100 steps have the lowest sum, the lead ends.
    means = np.convolve(read(pair[0])[0] - read(pair[1])[0], np.full(100, 0.01), mode='valid')
    assert np.cumsum(means).argmin() + 100 == step
    text = page('long')
    assert f'{step:,}' in text and f'{step * 4096 / 1e6:.1f}M bytes' in text
    assert f'{final(pair[0]) - final(pair[1]):.3f}' in text

    found = losses.crossing(*map(read_state, pair), 100)
    assert (found.kind, found.step) == ('overtaken', step)
    words = 'by {:.4f} (95% interval {:.4f} to {:.4f}) at {:,}'
    assert words.format(found.mean, *found.interval, length) in text


# --- larger and speed: on a GPU -------------------------------------------------------------------


def test_larger_prints_the_losses_of_its_finished_runs():
    finals = {Path(run).name: final(run) for run in named_runs((RESULTS / 'larger').rglob('*.xz'))}
    rows = re.findall(r'^\| (\w+)(, norm)? ((?:\| [\d.* ]*){4})\|$', page('larger'), re.M)
    assert len(rows) == 6
    for model, norm, cells in rows:
        arm = model.lower() + norm.replace(', ', '_')
        names = [f'{arm}_lr{rate}_seed101' for rate in ('0.002', '0.004', '0.008', '0.016')]
        losses = [finals.pop(name) for name in names if name in finals]
        expected = cells_of_rates(losses) + [''] * (4 - len(losses))
        assert [cell.strip() for cell in cells.split('|')[1:]] == expected
    assert len(finals) == 5
    assert all(f'{loss:.4f}' in page('larger') for loss in finals.values())


def test_the_table_of_an_h100_is_what_the_bench_wrote():
    rows = re.findall(r'^\| (\d+)M \| (\S+) \| (.*?) \|$', page('speed'), re.M)
    assert len(rows) == 7
    for size, name, cells in rows:
        numbers = read_json(RESULTS / f'speed/{size}m_gpu.json')
        (row,) = (row for row in numbers['rows'] if row['name'] == name)
        expected = [f'{row["ms_per_step"]:.1f}', f'{row["spread"]:.1%}']
        expected += [f'{row["tok_per_s"]:,.0f}', f'{row["mfu"]:.1%}', f'{row["peak_gib"]:.2f}']
        expected += [f'{row[key]:.3f}' for key in row if key.startswith('x ')]
        assert [cell.strip() for cell in cells.split('|') if cell.strip()] == expected
