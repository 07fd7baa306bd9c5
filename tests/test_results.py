"""What results/claims says follows from the logs that lie beside it."""

import functools
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from comparison.runs import named_runs
from paper import crossings, differences, verdicts
from paper.figures import NAMES

CLAIMS = Path(__file__).parent.parent / 'results' / 'claims'
MAIN = [Path(run) for run in sorted(named_runs(CLAIMS.glob('main/runs_*')))]
PAGE = (CLAIMS / 'README.md').read_text()
PRINTED = {row['label']: row for row in json.loads((CLAIMS / 'verdicts.json').read_text())['rows']}


def test_the_verdicts_follow_from_the_kept_logs_and_analyses(tmp_path):
    out = tmp_path / 'verdicts'
    runs = tuple(map(str, MAIN))
    verdicts.write_verdicts(verdicts.VerdictsConfig(runs, str(CLAIMS / 'analyses'), str(out)))
    for ending in ('.md', '.svg'):
        path = CLAIMS / f'verdicts{ending}'
        assert path.read_text() == out.with_suffix(ending).read_text()
    for again in json.loads(out.with_suffix('.json').read_text())['rows']:
        printed = PRINTED[again['label']]
        for name, value in again.pop('numbers').items():
            expected = printed['numbers'][name]
            is_number = isinstance(value, float | dict)
            assert value == (pytest.approx(expected) if is_number else expected)
        assert again == {name: printed[name] for name in again}


def test_the_tables_of_losses_are_those_of_the_kept_logs():
    arms = differences.arms_of(MAIN)
    assert differences.loss_table(arms) in PAGE
    assert differences.difference_table(arms) in PAGE


# --- the same numbers, read and computed without any code of ours ---------------------------------


@functools.cache
def packed(folder):
    """{name: bytes} of the files in a folder's packs."""
    files = {}
    for path in folder.glob('runs_*.tar.xz'):
        with tarfile.open(path) as pack:
            files |= {member.name: pack.extractfile(member).read() for member in pack}
    return files


def log_of(run):
    lines = packed(run.parent)[f'{run.name}/log.jsonl'].splitlines()
    return [json.loads(line) for line in lines]


def read(folder):
    """(training losses, {domain: validation loss}) of a run's log."""
    lines = log_of(folder)
    training = [line['loss'] for line in lines if line.get('loss') is not None]
    (last,) = [line['val'] for line in lines if 'val' in line and line['step'] == 1250]
    return np.array(training), last


def cells(numbers, form='{:+.4f}'):
    """Numbers in cells of a table; None is an empty one."""
    return ' | '.join('' if number is None else form.format(number) for number in numbers)


def final(model, seed):
    return read(folder_of(model, seed))[1]['mean']


def early(model, seed):
    training, _ = read(folder_of(model, seed))
    assert len(training) == 1250
    return training[:125].mean()


def late(model, seed):
    training, _ = read(folder_of(model, seed))
    return training[-50:].mean()


def folder_of(model, seed):
    (folder,) = [run for run in MAIN if re.fullmatch(f'{model}_lr[^_]*_seed{seed}', run.name)]
    return folder


def deep_entropy(model, seed):
    layers = entropy_of_layers(model, seed)
    return np.mean(layers[4:])


def entropy_of_layers(model, seed):
    runs = json.loads((CLAIMS / 'analyses' / 'entropy.json').read_text())['runs']
    (run,) = [run for run in runs if Path(run).name == folder_of(model, seed).name]
    return runs[run]['series']['entropy']['mean']


def check(label, ours, theirs=None):
    """Differences, mean, interval and p before correction of a printed row. Returns their number."""
    numbers = PRINTED[label]['numbers']
    ours, theirs = np.array(ours), np.array(theirs if theirs is not None else 0.0)
    difference = ours - theirs
    assert list(numbers['differences'].values()) == pytest.approx(difference.tolist())
    assert numbers['mean'] == pytest.approx(difference.mean())
    low, high = scipy.stats.ttest_1samp(difference, 0).confidence_interval(0.95)
    assert (numbers['low'], numbers['high']) == pytest.approx((low, high))
    assert numbers['p'] == pytest.approx(scipy.stats.ttest_1samp(difference, 0).pvalue)
    return len(difference) + 4


def test_twenty_numbers_and_more_computed_again_from_the_logs():
    seeds = PRINTED['ResFormer below vanilla']['numbers']['differences']
    count = check(
        'ResFormer below vanilla',
        [final('resformer', seed) for seed in seeds],
        [final('vanilla', seed) for seed in seeds],
    )
    count += check(
        'early loss: SVFormer below vanilla',
        [early('svformer', seed) for seed in seeds],
        [early('vanilla', seed) for seed in seeds],
    )
    count += check(
        'attention concentrates less in ResFormer than in vanilla (entropy)',
        [deep_entropy('vanilla', seed) for seed in seeds],
        [deep_entropy('resformer', seed) for seed in seeds],
    )
    assert count >= 20


def test_every_loss_at_the_end_is_the_difference_of_the_runs_that_a_row_names():
    of_losses = [r for r in PRINTED.values() if r['metric'] in ('final loss', 'validation loss')]
    tested = [row for row in of_losses if row['numbers']]
    assert len(tested) >= 5
    for row in tested:
        half = len(row['runs']) // 2
        losses = [read(CLAIMS / 'main' / run)[1]['mean'] for run in row['runs']]
        check(row['label'], losses[:half], losses[half:])


def test_every_difference_of_the_table_computed_again():
    """Rows are read back from the page, and models found by the names of their runs."""
    names = {NAMES[model]: model.partition('+')[0] for model in NAMES if '+' not in model}
    rows = re.findall(r'^\| (.+) - (.+) \| (\d) \| (.+) \| (.+) \| (.+) \| (.+) \|$', PAGE, re.M)
    checked = 0
    for ours, theirs, seeds, *columns, each in rows:
        if ours not in names or theirs not in names:
            continue
        pairs = [(names[ours], names[theirs], seed) for seed in range(1, int(seeds) + 1)]
        for column, measure in zip(columns, (early, late, final), strict=True):
            values = [measure(a, seed) - measure(b, seed) for a, b, seed in pairs]
            low, high = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
            text = f'{np.mean(values):+.4f} ± {(high - low) / 2:.4f}'
            assert column == (f'**{text}**' if low * high > 0 else text)
        assert each == ' '.join(f'{value:+.3f}' for value in values)
        checked += 1
    assert checked >= 10


def test_losses_of_the_domains_and_their_mean_are_those_of_one_evaluation():
    for run in MAIN:
        _, losses = read(run)
        domains = [loss for name, loss in losses.items() if name != 'mean']
        assert len(domains) == 7
        assert losses['mean'] == pytest.approx(np.mean(domains))


# --- the rates ------------------------------------------------------------------------------------

RATES = CLAIMS.parent / 'rates'


def rate_loss(model, rate, seed):
    return read(RATES / f'{model}_lr{rate:g}_seed{seed}')[1]['mean']


def test_the_rates_are_chosen_by_the_means_of_both_tuning_seeds():
    page = (RATES / 'README.md').read_text()
    means = {}
    grids = dict.fromkeys(('vanilla', 'resformer', 'svformer'), (0.003, 0.006, 0.012))
    grids['resformer'] += (0.024,)
    for model, grid in grids.items():
        for rate in grid:
            losses = [rate_loss(model, rate, seed) for seed in (101, 102)]
            means[model, rate] = np.mean(losses)
            row = cells((*losses, np.mean(losses)), '{:.4f}')
            assert f'| {NAMES[model]} | {rate:g} | {row} |' in page.replace('**', '')
    for model, best in (('vanilla', 0.006), ('resformer', 0.012), ('svformer', 0.006)):
        assert min(grids[model], key=lambda rate: means[model, rate]) == best
        assert f'**{means[model, best]:.4f}**' in page


@pytest.mark.parametrize('theirs', ['resformer', 'vanilla', 'svformer', 'neutreno'])
def test_resformer_at_the_rate_of_two_tuning_seeds(theirs):
    differences = [
        rate_loss('resformer', 0.012, seed) - final(theirs, seed) for seed in range(1, 6)
    ]
    low, high = scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    each = ' '.join(f'{difference:+.3f}' for difference in differences)
    row = f'| {NAMES[theirs]} at 6e-3 | {np.mean(differences):+.4f} ± {(high - low) / 2:.4f} | {each} |'
    assert row in (RATES / 'README.md').read_text().replace('**', '')


def test_each_model_at_its_own_rate():
    """Holm's correction of the three contrasts, by hand."""
    losses = {
        model: [final(model, seed) for seed in range(1, 6)] for model in ('vanilla', 'svformer')
    }
    losses['resformer'] = [rate_loss('resformer', 0.012, seed) for seed in range(1, 6)]
    pairs = ('svformer', 'vanilla'), ('resformer', 'vanilla'), ('svformer', 'resformer')
    p = [scipy.stats.ttest_rel(losses[ours], losses[theirs]).pvalue for ours, theirs in pairs]
    assert p == sorted(p)
    corrected = np.maximum.accumulate(np.multiply(p, (3, 2, 1)))
    page = (RATES / 'README.md').read_text()
    words = (
        'SVFormer is better than vanilla (p {:.3f} after Holm). ResFormer against vanilla (p {:.3f}) '
        'and SVFormer against ResFormer (p {:.3f}) are undecided.'
    )
    assert words.format(*corrected) in page


# --- the longer run -------------------------------------------------------------------------------

LONG = CLAIMS.parent / 'long'


def read_long(name):
    """([training loss of each step], {step: validation loss}) of a run of results/long."""
    lines = log_of(LONG / name)
    training = {line['step']: line['loss'] for line in lines if line.get('loss') is not None}
    assert sorted(training) == list(range(len(training)))
    validation = {line['step']: line['val']['mean'] for line in lines if 'val' in line}
    return np.array([training[step] for step in sorted(training)]), validation


def test_the_numbers_of_the_longer_runs_are_those_of_their_logs():
    page = (LONG / 'README.md').read_text()
    edges = [(0, 1172), (1250, 2000), (2000, 4000), (4000, 6000), (6000, 8000), (8000, 9719)]
    edges += [(9719, 11719), (12919, 12969)]
    steps = (2000, 4000, 6000, 8000, 10000, 11719, 12969)
    for length, suffix in ((64, ''), (256, '_cooldown'), (1024, '')):
        vanilla, losses = read_long(f'vanilla_{length}{suffix}')
        svformer, our_losses = read_long(f'svformer_{length}{suffix}')
        difference = svformer - vanilla
        means = [
            difference[first:last].mean() if last <= len(difference) else None
            for first, last in edges
        ]
        assert f'| {length:,} bytes | {cells(means)} |' in page
        theirs, ours = ([val.get(step) for step in steps] for val in (losses, our_losses))
        minus = [a - b if a and b else None for a, b in zip(ours, theirs, strict=True)]
        rows = [
            f'| vanilla, {length:,} bytes | {cells(theirs, "{:.4f}")} |',
            f'| SVFormer, {length:,} bytes | {cells(ours, "{:.4f}")} |',
            f'| difference | {cells(minus)} |',
        ]
        assert '\n'.join(rows) in page


@pytest.mark.parametrize(
    'length, steps, best, at, step, words',
    [
        (64, 11719, -0.175, 156, 1473, 'by {:.4f} (95% interval {:.4f} to {:.4f}) at 64 bytes'),
        (256, 11719, -0.104, 234, 1597, 'by {:.4f} (95% interval {:.4f} to {:.4f}) at 256'),
        (1024, 4000, -0.078, 310, 885, 'by {:.4f} (95% interval {:.4f} to {:.4f}) at 1,024'),
    ],
)
def test_the_step_at_which_svformer_is_overtaken(length, steps, best, at, step, words):
    page = (LONG / 'README.md').read_text()
    vanilla, losses = read_long(f'vanilla_{length}')
    svformer, our_losses = read_long(f'svformer_{length}')
    # Where means of 100 steps have the lowest sum, the lead ends.
    means = np.convolve(svformer - vanilla, np.full(100, 0.01), mode='valid')
    assert means.argmin() + 99 == at and means.min() == pytest.approx(best, abs=5e-4)
    assert np.cumsum(means).argmin() + 100 == step
    assert f'{step:,}' in page and f'{step * 4096 / 1e6:.1f}M bytes' in page
    assert f'{our_losses[steps] - losses[steps]:.3f}' in page

    found = crossings.crossing(LONG / f'vanilla_{length}', LONG / f'svformer_{length}', 100)
    assert (found.kind, found.step) == ('overtaken', step)
    assert words.format(found.mean, *found.interval) in page


def test_the_cooldown_goes_on_from_the_longer_run():
    for model in ('vanilla', 'svformer'):
        whole, _ = read_long(f'{model}_256_cooldown')
        constant, _ = read_long(f'{model}_256')
        assert np.array_equal(constant, whole[:11719])
