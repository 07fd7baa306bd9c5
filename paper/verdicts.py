"""
What kept runs say of every claim that the paper prints: they agree, contradict it, or decide nothing.

$ python -m paper.verdicts plan fig6 fig7                      # the command that trains what they need
$ python -m paper.verdicts out/compare/claims/*_seed[1-5] --analyses=FOLDER --out=FOLDER/verdicts

A claim says which of two models has the lower loss, entropy, and so on (claims.py). It is tested by
all runs of the two models that share everything but the seed and each model's own learning rate; if
several groups of runs have both models, the one with the most seeds in common counts. The verdict is
that of compare.py: differences per seed, a t test, Holm over the claims of one figure.

    agrees       decided, with the printed sign
    contradicts  decided, with the other sign
    undecided    the runs are there, and too few or too noisy
    untestable   there are no such runs

--analyses is a folder with entropy.json, spectrum.json, similarity.json and mapping.json, as
paper.analyze writes them, for claims on what happens inside a model. Runs are found in them by the
name of their folder. Writes <out>.json, <out>.md and <out>.svg.
"""

import json
import re
import shlex
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from comparison import charts
from comparison.plan import decisive_settings
from comparison.report import standalone
from comparison.results import read_state
from comparison.verdict import judge
from configurator import choose, one_line_errors, read_settings
from files import write_whole
from model import GPTConfig
from paper import analyze, insides
from paper.claims import BASES, CLAIMS, METRICS, NAMES, SIGNS
from paper.figures import FIGURES, V
from paper.runs import PAPER, Run, configs_of
from rundir import gpt_config
from train import TrainConfig

SIZE = Path('config/claims.py')  # for which command() plans

# {verdict: how a headline counts it}
VERDICTS = {
    'agrees': 'agree',
    'contradicts': 'contradict',
    'undecided': 'undecided',
    'untestable': 'not tested here',
}

# Why a contrast is not tested.
LARGER = 'larger models, longer sequences or other measurements are needed'
MISSING = 'the runs are missing'


@dataclass
class VerdictsConfig:
    names: tuple = ()  # folders of finished runs
    analyses: str = ''  # a folder with <analysis>.json of those runs
    out: str = 'verdicts'  # where to write, without ending

    def __post_init__(self):
        if not self.names:
            raise ValueError('name the folders of runs')


@dataclass
class PlanConfig:
    names: tuple = ()  # figures whose claims are to be tested; (): all of them

    def __post_init__(self):
        for name in self.names:
            if name not in FIGURES:
                raise ValueError(f'no figure {name!r}; there are {", ".join(FIGURES)}')


# --- runs -----------------------------------------------------------------------------------------


@dataclass
class Kept:
    """A finished run: its log, and what was found inside its model."""

    name: str  # of its folder
    seed: int
    rate: float
    losses: dict  # of the last evaluation
    training: list  # training losses, step by step
    series: dict = field(default_factory=dict)  # {analysis: {series: array (layers, ...)}}


def read_groups(folders, analyses):
    """{settings but for seed and rate, as text: {variant, as text: {seed: Kept}}} of finished runs.

    Raises ValueError for a run that has not finished, and for two of the same group, variant and seed.
    """
    groups = {}
    for folder in map(Path, folders):
        state = read_state(folder)
        if state.kind != 'finished':
            raise ValueError(f'{folder} is {state.kind}: {state.detail or "it has no log"}')
        config = gpt_config(state.config, folder)
        group = groups.setdefault(common_settings(state.config, config), {})
        seeds = group.setdefault(as_key(config), {})
        kept = keep(state, analyses)
        if kept.seed in seeds:
            raise ValueError(f'{folder} and {seeds[kept.seed].name} have the same model and seed')
        seeds[kept.seed] = kept
    return groups


def as_key(config):
    """A model's wiring as text. Sizes differ in their heads: what counts is the share of KV heads."""
    variant = config.variant() | {'n_kv_head': config.kv_heads / config.n_head}
    return json.dumps(variant, sort_keys=True)


def common_settings(values, config):
    """What the runs of a contrast must share: all that decides a result but the variant, the seed and
    the learning rate, which each model has its own."""
    defaults = decisive_settings(TrainConfig(), GPTConfig())
    own = {'seed', 'learning_rate', 'min_lr', *asdict(config)} - config.shape().keys()
    return json.dumps(
        {name: values.get(name, value) for name, value in defaults.items() if name not in own},
        sort_keys=True,
    )


def keep(state, analyses):
    losses = [entry['loss'] for entry in state.entries if entry.get('loss') is not None]
    series = {}
    for kind, runs in analyses.items():
        if state.folder.name in runs:
            series[kind] = runs[state.folder.name]
    seed, rate = state.config['seed'], state.config['learning_rate']
    return Kept(state.folder.name, seed, rate, state.losses, losses, series)


def read_analyses(folder):
    """{analysis: {name of a run's folder: {series: array (layers, ...)}}}; {} without a folder."""
    analyses = {}
    for kind in analyze.ANALYSES if folder else ():
        path = Path(folder, f'{kind}.json')
        if not path.exists():
            continue
        analyses[kind] = {}
        for run, report in json.loads(path.read_text())['runs'].items():
            analyses[kind][Path(run).name] = insides.as_arrays(report)
    return analyses


# --- what a claim comes to, for one seed ----------------------------------------------------------

# Each gives our metric minus theirs, or, for a claim about one model, the metric itself.


def validation_loss(ours, theirs):
    return ours.losses['mean'] - theirs.losses['mean']


def early_loss(ours, theirs):
    tenth = len(ours.training) // 10
    return float(np.mean(ours.training[:tenth]) - np.mean(theirs.training[:tenth]))


def inside(metric):
    """The difference of what an analysis found inside two models."""
    kind, difference = insides.DIFFERENCES[metric]
    return lambda ours, theirs: float(difference(ours.series[kind], theirs.series[kind]))


# {metric: (the difference of one seed, the analysis that it needs)}. A loss at the end is judged by the
# validation loss, as in compare.py, also where the paper draws the training loss.
DIFFERENCES = {
    'final loss': (validation_loss, None),
    'validation loss': (validation_loss, None),
    'early loss': (early_loss, None),
    **{metric: (inside(metric), kind) for metric, (kind, _) in insides.DIFFERENCES.items()},
}

# --- rows: one for each contrast that the paper prints, however often it does ---------------------


@dataclass
class Row:
    """A contrast, all places where the paper prints it, and what the runs say."""

    figure: str  # where it is first printed; its family for Holm's correction
    ours: str
    sign: str
    theirs: str
    metric: str
    where: list
    says: list
    basis: str
    verdict: str = 'untestable'
    reason: str = ''  # why it is undecided or untestable
    lacks: str = ''  # LARGER or MISSING, where it is untestable
    numbers: dict = field(default_factory=dict)  # of comparison.verdict.judge()
    runs: list = field(default_factory=list)  # folders' names
    rates: dict = field(default_factory=dict)  # {model: learning rates}

    def label(self):
        """The contrast in words."""
        word = SIGNS[self.sign]
        if self.ours == self.theirs:
            return f'{self.metric}: {self.ours} {word} 0'
        what = '' if measure_of(self.metric) == 'validation loss' else f'{self.metric}: '
        return f'{what}{self.ours} {word} {self.theirs}'


def measure_of(metric):
    """The metric by which a claim is judged here."""
    return 'validation loss' if metric == 'final loss' else metric


def describe_run(run):
    """A claim's Run in words: its model, and its size, length, rate or warm-up if they are unusual."""
    words = [NAMES[run.model]]
    if run.size != Run.size:
        words.append(run.size.upper())
    if run.scaled_length(PAPER) != PAPER.length:
        words.append(f'{run.length:,} tokens')
    if run.rate:
        words.append(f'rate {PAPER.rates[run.rate]:g}')
    return ', '.join(words)


def rows_of(claims, groups):
    """[Row] of the claims, tested by groups of runs; see read_groups()."""
    rows, tested = {}, {}
    for claim in claims:
        ours, theirs = describe_run(claim.ours), describe_run(claim.theirs)
        key = ours, theirs, measure_of(claim.metric)
        row = rows.get(key)
        if row:
            if row.sign != claim.sign:
                raise ValueError(f'the paper prints {row.label()} with two signs')
            row.where.append(claim.where)
            row.says.append(claim.says)
            continue
        row = Row(
            claim.figure or 'text alone',
            ours,
            claim.sign,
            theirs,
            claim.metric,
            [claim.where],
            [claim.says],
            BASES[claim.basis],
        )
        rows[key] = row
        row.reason = beyond(claim)
        if row.reason:
            row.lacks = LARGER
            continue
        pairs = find_pairs(claim, groups)
        if pairs:
            tested[key] = pairs
        else:
            row.lacks = MISSING
            row.reason = why_no_pair(claim, groups)

    for figure in dict.fromkeys(row.figure for row in rows.values()):
        family = {key: tested[key] for key in tested if rows[key].figure == figure}
        judge_family(rows, family)
    return list(rows.values())


def beyond(claim):
    """Why no runs of the usual size and length could test a claim, or ''."""
    if claim.metric not in DIFFERENCES:
        return f'needs {METRICS[claim.metric]}'
    for run in (claim.ours, claim.theirs):
        unusual = describe_run(run).removeprefix(NAMES[run.model]).removeprefix(', ')
        if unusual:
            return f'no runs with {unusual}'
    return ''


def find_pairs(claim, groups):
    """{seed: (our Kept, their Kept)} of the group of runs with the most seeds in common."""
    best = {}
    for variants in groups.values():
        ours, theirs = (variants.get(variant_of(run), {}) for run in (claim.ours, claim.theirs))
        pairs = {seed: (ours[seed], theirs[seed]) for seed in ours if seed in theirs}
        pairs = {seed: pair for seed, pair in pairs.items() if has_analysis(claim, pair)}
        if len(pairs) > len(best):
            best = pairs
    return best


def has_analysis(claim, pair):
    """Whether both runs of a pair have the analysis that the claim is about, if any."""
    _, analysis = DIFFERENCES[claim.metric]
    return not analysis or all(analysis in run.series for run in pair)


def why_no_pair(claim, groups):
    trained = {variant for variants in groups.values() for variant in variants}
    missing = {}
    for run in (claim.ours, claim.theirs):
        if variant_of(run) not in trained:
            missing[NAMES[run.model]] = True
    if missing:
        return f'no runs of {" and ".join(missing)}'
    _, analysis = DIFFERENCES[claim.metric]
    return f'no analysis of {analysis}' if analysis else 'no runs with the same settings and seeds'


def variant_of(run):
    _, config = configs_of(run, PAPER)
    return as_key(config)


def judge_family(rows, family):
    """Give the rows of one figure their numbers and verdicts."""
    differences = {}
    for key, pairs in family.items():
        difference, _ = DIFFERENCES[rows[key].metric]
        differences[key] = {seed: difference(*pair) for seed, pair in sorted(pairs.items())}
    for key, numbers in judge(differences).items():
        row, pairs = rows[key], family[key]
        row.numbers = numbers
        row.reason = numbers['reason']
        row.verdict = against_the_sign(numbers['verdict'], row.sign)
        for name, kept in zip(
            (row.ours, row.theirs), zip(*pairs.values(), strict=True), strict=True
        ):
            row.rates[name] = sorted({run.rate for run in kept})
            row.runs += [run.name for run in kept if run.name not in row.runs]


def against_the_sign(verdict, sign):
    """agrees, contradicts or undecided, from compare's `better` (lower), `worse` or `undecided`."""
    if verdict == 'undecided':
        return verdict
    below_is_printed = sign == '<'
    return 'agrees' if (verdict == 'better') == below_is_printed else 'contradicts'


# --- the table and the picture --------------------------------------------------------------------


def count_verdicts(rows):
    return {word: sum(row.verdict == word for row in rows) for word in VERDICTS}


def headline(rows):
    counts = count_verdicts(rows)
    words = [f'{counts[word]} {text}' for word, text in VERDICTS.items()]
    return f'{len(rows)} contrasts that the paper prints: {", ".join(words)}'


def markdown(rows):
    """A table of the tested claims, and a list of the others."""
    lines = [f'{headline(rows)}.', '']
    head = [
        'the paper prints',
        'where',
        'difference',
        '95% interval',
        'p (Holm)',
        'seeds',
        'verdict',
    ]
    lines += [f'| {" | ".join(head)} |', '|---|---|---:|---:|---:|---:|---|']
    for row in in_order(rows):
        if not row.numbers:
            continue
        cells = [row.label(), '; '.join(row.where), *number_cells(row.numbers), row.verdict]
        lines.append(f'| {" | ".join(cells)} |')
    lines += ['', 'Not tested here:', '']
    for row in rows:
        if row.verdict == 'untestable':
            lines.append(f'- {row.label()} ({"; ".join(row.where)}): {row.reason}')
    return '\n'.join(lines) + '\n'


def number_cells(numbers):
    interval = p = ''
    if numbers['low'] is not None:
        interval = f'{numbers["low"]:+.4f} to {numbers["high"]:+.4f}'
    if numbers['p_holm'] is not None:
        p = f'{numbers["p_holm"]:.3g}'
    return [f'{numbers["mean"]:+.4f}', interval, p, str(numbers['seeds'])]


def in_order(rows):
    """Rows by verdict; among equals, in the paper's order."""
    return sorted(rows, key=lambda row: list(VERDICTS).index(row.verdict))


# The two axes of the picture, which have different units.
LOSSES = ('validation loss', 'early loss')
COLORS = {'agrees': 2, 'contradicts': 1, 'undecided': 8}  # of charts.color()
ROW_HEIGHT = 0.27  # inches


@charts.styled
def forest(rows):
    """The tested claims: a dot per seed, the mean and its interval, right of 0 where as printed.

    Losses and what was found inside models have an axis each. Below, what was not tested.
    """
    tested = [row for row in in_order(rows) if row.numbers]
    parts = [
        [row for row in tested if (measure_of(row.metric) in LOSSES) == of_losses]
        for of_losses in (True, False)
    ]
    parts = [part for part in parts if part]
    if not parts:
        return ''
    footer = untested_lines(rows)
    heights = [ROW_HEIGHT * len(part) + 0.55 for part in parts]
    height = sum(heights) + 0.17 * len(footer) + 0.4
    drawing, axes = charts.pyplot().subplots(
        len(parts),
        1,
        figsize=(7.2, height),
        height_ratios=heights,
        squeeze=False,
        layout='constrained',
    )
    for ax, part in zip(axes[:, 0], parts, strict=True):
        draw_rows(ax, part)
    drawing.suptitle(headline(rows), x=0.01, ha='left', fontsize=10)
    drawing.text(0.01, 0.01, '\n'.join(footer), va='bottom', fontsize=7.5, linespacing=1.3)
    # The footer's lines are not part of what is laid out.
    bottom = (0.17 * len(footer) + 0.05) / height
    drawing.get_layout_engine().set(rect=(0.01, bottom, 0.99, 1 - bottom))
    return charts.svg(drawing, 'Claims of the paper and what the runs say')


def draw_rows(axes, rows):
    axes.axvline(0, color=charts.INK, linewidth=1.0)
    axes.set_axisbelow(True)
    axes.grid(axis='x', linewidth=0.6)
    for y, row in enumerate(rows):
        shade = charts.color(COLORS[row.verdict])
        direction = -1 if row.sign == '<' else 1
        numbers = row.numbers
        dots = [direction * value for value in numbers['differences'].values()]
        axes.plot(dots, [y + 0.22] * len(dots), 'o', color=shade, markersize=2.5, alpha=0.6)
        if numbers['low'] is not None:
            interval = [direction * numbers['low'], direction * numbers['high']]
            axes.plot(interval, [y, y], color=shade, linewidth=2)
        axes.plot(direction * numbers['mean'], y, 'D', color=shade, markersize=5)
    labels = [f'{row.label()} ({row.verdict}, {row.numbers["seeds"]} seeds)' for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.tick_params(axis='y', length=0)
    axes.locator_params(axis='x', nbins=6)
    of_losses = measure_of(rows[0].metric) in LOSSES
    unit = (
        'difference of losses (nats)' if of_losses else 'difference (nats, cosine, or a logarithm)'
    )
    axes.set_xlabel(unit)
    left, right = '\N{LEFTWARDS ARROW} against the paper', 'as printed \N{RIGHTWARDS ARROW}'
    axes.text(0, -0.75, left, ha='left', fontsize=8, transform=axes.get_yaxis_transform())
    axes.text(1, -0.75, right, ha='right', fontsize=8, transform=axes.get_yaxis_transform())


def untested_lines(rows):
    """What was not tested, in lines for the foot of the picture."""
    lines = []
    for lacks in (MISSING, LARGER):
        figures = [row.figure for row in rows if row.lacks == lacks]
        if figures:
            names = ', '.join(name_of(figure) for figure in dict.fromkeys(figures))
            text = f'{len(figures)} are not tested because {lacks}: {names}.'
            lines += textwrap.wrap(text, 125)
    return lines


def name_of(figure):
    """Fig. 12a of fig12a, Table 1 of table1."""
    return re.sub(r'^fig', 'Fig. ', re.sub(r'^table', 'Table ', figure))


# --- a plan that tests claims ----------------------------------------------------------------------


def command(figures):
    """The command line of compare.py whose runs test the claims of some figures, as far as runs of
    one size and length can. Raises ValueError where they cannot."""
    arms, contrasts = {V: arm_of(V)}, []
    for claim in CLAIMS:
        if beyond(claim) or (figures and claim.figure not in figures):
            continue
        pair = [claim.ours.model, claim.theirs.model]
        arms |= {model: arm_of(model) for model in pair}
        if V not in pair:
            contrasts.append('-'.join(arm_name(model) for model in pair))
    if len(arms) < 2:
        raise ValueError('these claims need other sizes, lengths or measurements')
    words = ['python', 'compare.py', str(SIZE), f'--arms={"; ".join(arms.values())}']
    if contrasts:
        words.append(f'--contrasts={", ".join(dict.fromkeys(contrasts))}')
    return shlex.join(words)


def arm_of(model):
    """A model as an arm of compare.py."""
    kind, *flags = model.split('+')
    _, config = configs_of(Run(model), PAPER)
    if config.kv_heads < config.n_head:
        heads = read_settings(str(SIZE))['n_head']
        flags.append(f'n_kv_head={config.kv_heads * heads // config.n_head}')
    return ' '.join([f'{arm_name(model)}:', f'config/{kind}_82m.py', *flags])


def arm_name(model):
    """resformer_residual_map_cross of resformer+residual_map=cross"""
    return re.sub(r'[^\w.]+', '_', model.replace('=True', '')).strip('_')


# --- the program ----------------------------------------------------------------------------------


def write_verdicts(settings):
    rows = rows_of(CLAIMS, read_groups(settings.names, read_analyses(settings.analyses)))
    table, picture = markdown(rows), forest(rows)
    of_rows = [{'label': row.label(), **asdict(row)} for row in rows]
    numbers = {'verdicts': count_verdicts(rows), 'rows': of_rows}
    texts = {'json': json.dumps(numbers, indent=1) + '\n', 'md': table}
    if picture:
        texts['svg'] = standalone(picture)
    out = Path(settings.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    for ending, text in texts.items():
        write_whole(out.with_name(f'{out.name}.{ending}'), text)
    print(table)


def main():
    with one_line_errors(ValueError, OSError):
        modes = {'': (VerdictsConfig,), 'plan': (PlanConfig,)}
        mode, (settings,) = choose(modes, __doc__, plain='names')
        if mode == 'plan':
            print(command(settings.names))
        else:
            write_verdicts(settings)


if __name__ == '__main__':
    main()
