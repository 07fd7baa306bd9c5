"""
What runs say of every claim that the paper prints: they agree, contradict it, or decide nothing.

A claim says which of two models has the lower loss, entropy, and so on (figures.py). It is tested by all
runs of the two models, seed by seed. The verdict is that of compare.py: differences per seed, a t test,
and Holm over a family of contrasts, trained or not: those that the paper first prints with one figure,
one table or the text of one version, as far as models of this size could show them.

    agrees       decided, with the printed sign
    contradicts  decided, with the other sign
    undecided    the runs are there, and too few or too noisy, or the claim has a caveat
    untestable   there are no such runs

A pool is {arm of the paper: {seed: run}}, a run a State of comparison.runs. Reports are what
paper.analyze says of the inside of runs: {analysis: {name of a run's folder: report}}.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from comparison import charts
from comparison.logs import renewed
from comparison.report import code_text, interval, p_text
from comparison.runs import ROUNDING, difference, disagreement, finished_runs
from comparison.verdict import describe, half_width, judge, paired
from lib.files import unreadable
from lib.tables import markdown_table
from model import GPTConfig
from paper import losses
from paper.analyze import ANALYSES, ATTENDED, EQ_3, EQ_6, PROJECTED
from paper.figures import (
    CLAIMS,
    LENGTHS,
    METRICS,
    NAMES,
    PAPER,
    SIGNS,
    Arm,
    R,
    S,
)

# {verdict: how a headline counts it}
VERDICTS = {
    'agrees': 'in agreement',
    'contradicts': 'contradicted',
    'undecided': 'undecided',
    'untestable': 'not tested here',
}

# --- runs -----------------------------------------------------------------------------------------

# Runs that are compared may differ in their models, each at its own learning rate.
OWN = {'learning_rate', *vars(GPTConfig())} - GPTConfig().shape().keys()


def read_pool(folders, scale, mixed_code=False):
    """The pool of finished runs of one scale, found by what they are, in the order of NAMES.

    Raises ValueError for a run that has not finished, for a model or a length that the paper does not
    have, and for two runs of one arm that differ in more than their seeds and, with mixed_code, their code.
    """
    models = {key_of(Arm(model).configs(PAPER)[1]): model for model in NAMES}
    lengths = dict(zip(scale.lengths, LENGTHS, strict=True))
    runs, pool = finished_runs(folders, ['code'] * mixed_code), {}
    for first, seeds in losses.arms_of({folder: run.facts for folder, run in runs.items()}).items():
        run = runs[first]
        model, length = models.get(key_of(run.model)), lengths.get(run.model.block_size)
        if not model or not length:
            raise ValueError(f'{first} is no model of the paper, or of no length of this scale')
        arm = Arm(model, length=length)
        for other in pool.get(arm, {}).values():
            raise ValueError(disagreement(run, other, ('seed',)))
        pool[arm] = {seed: runs[folder] for seed, folder in seeds.items()}
    return {arm: pool[arm] for model in NAMES for arm in pool if arm.model == model}


def key_of(config):
    """A model's wiring as text. Sizes differ in their heads: what counts is the share of KV heads."""
    variant = config.variant() | {'n_kv_head': config.kv_heads / config.n_head}
    return json.dumps(variant, sort_keys=True)


def pairs_of(pool, ours, theirs, but=()):
    """{seed: (our run, theirs)} of the seeds that both arms have. Raises ValueError where the two differ
    in more than their models, learning rates and what is in `but`."""
    pairs = paired(pool.get(ours, {}), pool.get(theirs, {}))
    for pair in pairs.values():
        words = disagreement(*pair, OWN.union(but))
        if words:
            raise ValueError(f'{words}, so the two cannot be compared')
    return dict(sorted(pairs.items()))


def read_reports(folder):
    """The reports of a folder's <analysis>.json; {} without a folder. Raises OSError or ValueError."""
    reports = {}
    for kind in ANALYSES if folder else ():
        path = Path(folder, f'{kind}.json')
        with unreadable(f'{path} is damaged'):
            runs = json.loads(path.read_text())['runs']
            reports[kind] = {Path(run).name: report for run, report in runs.items()}
        if len(reports[kind]) < len(runs):
            raise ValueError(f'{path} has two runs of one name')
    return reports


def series_of(reports, kind, run):
    """{series: array (layers, ...)} of what an analysis says of a run; None where it says nothing.

    Raises ValueError where it is of another run of that name, or of a checkpoint before the last.
    """
    report = reports.get(kind, {}).get(run.folder.name)
    if not report:
        return None
    stated = renewed(report.get('settings', report['config']))  # older ones state their model alone
    steps = run.facts['max_iters']
    # A checkpoint does not know how the machine rounded.
    found = difference(stated, run.facts, ('resumed', *ROUNDING), stated)
    if not found and report.get('step', steps) != steps:
        found = 'step', report['step'], steps
    if found:
        raise ValueError(
            f'the analysis of {kind} for {run.folder.name} is of another run than {run.folder}: it has '
            '{}={!r}, not {!r}'.format(*found)
        )
    means = {name: values['mean'] for name, values in report['series'].items()}
    return {name: np.array(mean, dtype=float) for name, mean in means.items()}


# --- what a claim comes to, for one seed ----------------------------------------------------------


def validation_loss(ours, theirs):
    return ours.loss - theirs.loss


def deeper_half(series):
    layers = series['entropy']
    return layers[len(layers) // 2 :].mean()


def eigenvalue(values):
    """The logarithm of the ratio of the largest eigenvalues, ours / theirs, median of the layers.

    values: projected or attended with. The paper does not say which; a mean of two values, with which
    ResFormer attends, has the smaller ones by construction. Above 0, ours is larger in most layers. The
    share of these layers would be too coarse a number: three seeds of eight layers easily agree on it
    exactly.
    """
    return lambda ours, theirs: np.median(np.log(ours[values][:, 0] / theirs[values][:, 0]))


# {metric: ours minus theirs, of two runs}. A loss at the end is judged by the validation loss, as in
# compare.py, also where the paper draws the training loss.
OF_RUNS = {'validation loss': validation_loss, 'early loss': losses.early_difference}

# {metric: (analysis, ours minus theirs, of two series_of())}; two are about our model alone.
INSIDE = {
    'entropy': ('entropy', lambda ours, theirs: deeper_half(ours) - deeper_half(theirs)),
    'entropy with depth': ('entropy', lambda ours, _: deeper_half(ours) - ours['entropy'][0]),
    'mapping': ('mapping', lambda ours, _: np.nanmean(ours[EQ_6] - ours[EQ_3])),
    'eigenvalue, attended': ('spectrum', eigenvalue(ATTENDED)),
    'eigenvalue, projected': ('spectrum', eigenvalue(PROJECTED)),
    'similarity': (
        'similarity',
        lambda ours, theirs: np.mean(ours['hidden states'] - theirs['hidden states']),
    ),
}

JUDGED = (*OF_RUNS, *INSIDE, 'lead')


def claim_difference(claim, seed, pair, pool, reports):
    """The difference of one seed; None where runs or reports are missing."""
    if claim.metric in OF_RUNS:
        return OF_RUNS[claim.metric](*pair)
    if claim.metric in INSIDE:
        kind, minus = INSIDE[claim.metric]
        ours, theirs = (series_of(reports, kind, run) for run in pair)
        return float(minus(ours, theirs)) if ours and theirs else None
    baselines = [pool.get(arm.baseline(), {}).get(seed) for arm in (claim.ours, claim.theirs)]
    if not all(baselines):
        return None
    ours, theirs = map(validation_loss, pair, baselines)
    return ours - theirs  # of two leads


# --- rows: one for each contrast that the paper prints, however often it does ---------------------


@dataclass
class ClaimRow:
    """A contrast, all places where the paper prints it, and what the runs say."""

    figure: str  # of the claim that first prints it, or a version of the paper. Its family for Holm
    ours: str
    theirs: str
    metric: str
    sign: str
    caveat: str
    where: list
    says: list
    verdict: str = 'untestable'
    reason: str = ''  # why it is undecided or untestable
    numbers: dict = field(default_factory=dict)  # of comparison.verdict.judge()
    runs: list = field(default_factory=list)  # folders' names

    def label(self):
        """The contrast in words; of the inside of a model, the claim's own."""
        if self.metric in INSIDE:
            return f'{self.says[0]} ({self.metric})'
        what = '' if self.metric == 'validation loss' else f'{self.metric}: '
        return f'{what}{self.ours} {SIGNS[self.sign]} {self.theirs}'


MISSING = 'no such runs, or none with the same seeds, or no analyses of them'


def claim_rows(claims, pool, reports):
    """[ClaimRow] of the claims, tested by a pool."""
    groups = {}
    for claim in claims:
        groups.setdefault(claim.contrast, []).append(claim)
    rows, values = {}, {}
    for key, group in groups.items():
        claim = group[0]
        where, says = [each.where for each in group], [each.says for each in group]
        row = rows[key] = ClaimRow(claim.figure, *key, claim.sign, claim.caveat, where, says)
        pairs = {}
        if claim.metric in JUDGED:
            pairs = pairs_of(pool, claim.ours, claim.theirs)
        each = {s: claim_difference(claim, s, pair, pool, reports) for s, pair in pairs.items()}
        values[key] = {seed: value for seed, value in each.items() if value is not None}
        sides = zip(*(pairs[seed] for seed in values[key]), strict=True)
        row.runs = list(dict.fromkeys(run.folder.name for runs in sides for run in runs))
        if not values[key]:
            row.reason = why_larger(claim) or MISSING
    # What runs of this size could test counts for Holm, whether or not it was trained.
    families = {key: row.figure for key, row in rows.items() if row.reason in ('', MISSING)}
    for key, numbers in judge({key: values[key] for key in families}, families=families).items():
        if values[key]:
            give_verdict(rows[key], numbers)
    return list(rows.values())


def figure_rows(name, pool, reports):
    """The rows that a figure prints. One that an earlier figure prints, too, stays in that one's family."""
    printed = {claim.contrast for claim in CLAIMS if claim.figure == name}
    rows = claim_rows(CLAIMS, pool, reports)
    return [row for row in rows if (row.ours, row.theirs, row.metric) in printed]


def why_larger(claim):
    """Why no runs of the usual size and length could test a claim, or ''."""
    if claim.metric not in JUDGED:
        return f'no verdict is given on {METRICS[claim.metric]}'
    for arm in (claim.ours, claim.theirs):
        if arm.unusual():
            return f'no runs of {str(arm)}'
    return ''


def give_verdict(row, numbers):
    row.numbers = numbers
    row.reason = numbers['reason']
    row.verdict = 'undecided'
    if numbers['verdict'] != 'undecided':
        is_printed = (numbers['verdict'] == 'better') == (row.sign == '<')
        row.verdict = 'agrees' if is_printed else 'contradicts'
        if row.caveat:
            row.verdict, row.reason = 'undecided', row.caveat


# --- tables ---------------------------------------------------------------------------------------


def claims_headline(rows):
    counts = {word: sum(row.verdict == word for row in rows) for word in VERDICTS}
    words = [f'{counts[word]} {text}' for word, text in VERDICTS.items()]
    return f'{len(rows)} contrasts that the paper prints: {", ".join(words)}'


def in_order(rows):
    """Rows by verdict; among equals, in the paper's order."""
    return sorted(rows, key=lambda row: list(VERDICTS).index(row.verdict))


def claims_table(rows, pool=()):
    """A table of the tested claims, what its numbers are of, and a list of the others.

    pool: the runs, of which it says first whether one code has trained them all.
    """
    codes = Counter(run.code for arm in pool for run in pool[arm].values() if run.code)
    tested = [row for row in in_order(rows) if row.numbers]
    head = [
        'the paper prints',
        'where',
        'difference',
        '95% interval (Holm)',
        'p (Holm)',
        'seeds',
        'verdict',
    ]
    cells = []
    for row in tested:
        numbers = row.numbers
        verdict = f'{row.verdict}: {row.caveat or row.reason}'.removesuffix(': ')
        if numbers['rests_on'] and not row.caveat:
            verdict += f', but not without seed {" or ".join(map(str, numbers["rests_on"]))}'
        cells.append(
            [
                row.label(),
                '; '.join(row.where),
                charts.signed(numbers['mean']),
                interval(numbers),
                p_text(numbers['p_holm']),
                str(numbers['seeds']),
                verdict,
            ]
        )
    metrics = dict.fromkeys(row.metric for row in tested)
    untestable = [row for row in rows if row.verdict == 'untestable']
    lines = [f'{claims_headline(rows)}. {code_text(codes)}'.rstrip(), '']
    if tested:
        lines += [
            markdown_table(head, cells, (0, 1, len(head) - 1)),
            '',
            'What is compared (losses in nats per token; the validation loss where a row names nothing):',
            '',
            *(f'- {metric}: {METRICS[metric]}' for metric in metrics),
            '',
        ]
    if untestable:
        rest = [f'- {row.label()} ({"; ".join(row.where)}): {row.reason}' for row in untestable]
        lines += ['Not tested here:', '', *rest]
    return '\n'.join(lines) + '\n'


LAST = 50  # steps of the last training loss

COLUMNS = {
    'training loss, first 10% of steps': losses.early_difference,
    f'training loss, last {LAST} steps': lambda *pair: losses.late_difference(*pair, LAST),
    'validation loss at the end': validation_loss,
}


def loss_table(pool):
    """Validation losses at the end by seed; means of the seeds that all models have, and of all."""
    every = sorted(set().union(*pool.values()))
    common = [seed for seed in every if all(seed in seeds for seeds in pool.values())]
    rows = []
    for arm, runs in pool.items():
        cells = [f'{runs[seed].loss:.4f}' if seed in runs else '' for seed in every]
        for seeds in (common, runs):
            cells.append(f'{np.mean([runs[seed].loss for seed in seeds]):.4f}' if seeds else '')
        rows.append([str(arm), *cells])
    seeds = [f'seed {seed}' for seed in every]
    means = [f'mean of {", ".join(map(str, common))}', 'mean of all']
    return markdown_table(['validation loss', *seeds, *means], rows)


def difference_table(pool):
    """Each arm minus vanilla, SVFormer minus ResFormer, and what claims contrast: means over the seeds
    that both have, with half of the 95% interval, in bold where that excludes 0 before any correction."""
    contrasts = [(arm, arm.baseline()) for arm in pool] + [(Arm(S), Arm(R))]
    contrasts += [(Arm(c.ours.model), Arm(c.theirs.model)) for c in CLAIMS]
    rows, seen = [], []
    for ours, theirs in contrasts:
        pairs = pairs_of(pool, ours, theirs)
        if ours == theirs or not pairs or {ours, theirs} in seen:
            continue
        seen.append({ours, theirs})
        columns = []
        for column in COLUMNS.values():
            columns.append({seed: column(*pair) for seed, pair in pairs.items()})
        each = ' '.join(f'{value:+.3f}' for value in columns[-1].values())
        cells = [in_words(describe(values)) for values in columns]
        rows.append([f'{ours} - {theirs}', str(len(pairs)), *cells, each])
    head = ['difference', 'seeds', *COLUMNS, 'of each seed']
    return markdown_table(head, rows, (0, len(head) - 1))


def in_words(numbers):
    text = f'{numbers["mean"]:+.4f}'
    if numbers['low'] is None:
        return text
    text += f' ± {half_width(numbers):.4f}'
    return f'**{text}**' if numbers['low'] * numbers['high'] > 0 else text


# --- the picture ----------------------------------------------------------------------------------

# {verdict: its color}
SHADES = {'agrees': '#0072B2', 'contradicts': '#D55E00', 'undecided': '#888888'}


@charts.styled
def claims_plot(rows):
    """The tested claims on losses by verdict, right of 0 where as printed. What was found inside models
    has many units, and is in the table alone."""
    shown = []
    for row in in_order(rows):
        if row.numbers and row.metric not in INSIDE:
            sign = -1 if row.sign == '<' else 1
            each = {seed: sign * value for seed, value in row.numbers['differences'].items()}
            name = f'{row.label()}, {charts.seeds_text(row.numbers["seeds"])}: {row.verdict}'
            if row.caveat:
                name += ' (the table says why)'
            # Corrected as the verdict is: where it includes 0, nothing is decided.
            ends = row.numbers['low_holm'], row.numbers['high_holm']
            if None not in ends:
                ends = [sign * end for end in ends]
            shown.append((name, SHADES[row.verdict], describe(each), ends))
    words = 'above 0 is as the paper prints it; small dots are seeds'
    title = "Difference of losses (nats), intervals after Holm's correction"
    return charts.forest(shown, title, words, width=6) if shown else ''
