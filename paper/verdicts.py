"""
What kept runs say of every claim that the paper prints: they agree, contradict it, or decide nothing.

$ python -m paper.verdicts plan fig6 fig7                      # the command that trains what they need
$ python -m paper.verdicts out/compare/claims/*_seed[1-5] --analyses=FOLDER --out=FOLDER/verdicts
$ python -m paper.verdicts draw fig6 fig7 out/compare/claims/*_seed[1-5] --out=FOLDER

A claim says which of two models has the lower loss, entropy, and so on (claims.py). It is tested by
all runs of the two models that share everything but the seed and each model's own learning rate; if
several groups of runs have both models, the one with the most seeds in common counts. The verdict is
that of compare.py: differences per seed, a t test, and Holm over a family of contrasts, trained or
not: those that the paper first prints with one figure, one table or the text of one version, as far as
models of this size could show them.

    agrees       decided, with the printed sign
    contradicts  decided, with the other sign
    undecided    the runs are there, and too few or too noisy
    untestable   there are no such runs

--analyses is a folder with entropy.json, spectrum.json, similarity.json and mapping.json, as
paper.analyze writes them, for claims on what happens inside a model. Runs are found in them by the
name of their folder. Writes <out>.json, <out>.md and <out>.svg.

draw makes <out>/<figure>.png of the figures that compare models (seeds.py); a model without runs is left
out of them.
"""

import json
import re
import shlex
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

from comparison import charts
from comparison.report import standalone
from comparison.verdict import half_width
from configurator import choose, one_line_errors, read_settings
from files import write_whole
from paper import draw, seeds
from paper.claims import CLAIMS, METRICS
from paper.figures import FIGURES, NAMES, V, number_of
from paper.judging import (
    LARGER,
    MISSING,
    VERDICTS,
    beyond,
    measure_of,
    read_analyses,
    read_groups,
    rows_of,
)
from paper.runs import PAPER, Run, configs_of
from tables import markdown_table

SIZE = Path('config/claims.py')  # for which command() plans


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
        known = [*FIGURES, *sorted({claim.figure for claim in CLAIMS} - FIGURES.keys())]
        for name in self.names:
            if name not in known:
                raise ValueError(f'no figure {name!r}; there are {", ".join(known)}')


@dataclass
class DrawConfig:
    names: tuple = ()  # figures, and folders of finished runs
    out: str = '.'  # the folder of the pictures

    def __post_init__(self):
        figures, folders = self.figures(), self.folders()
        if not figures or not folders or not set(figures) <= set(seeds.DRAWN):
            raise ValueError(
                f'give figures, of {", ".join(seeds.DRAWN)}, and folders of finished runs'
            )

    def figures(self):
        return [name for name in self.names if name in FIGURES]

    def folders(self):
        return [name for name in self.names if name not in FIGURES]


# --- the table and the picture --------------------------------------------------------------------


def count_verdicts(rows):
    return {word: sum(row.verdict == word for row in rows) for word in VERDICTS}


def headline(rows):
    counts = count_verdicts(rows)
    words = [f'{counts[word]} {text}' for word, text in VERDICTS.items()]
    return f'{len(rows)} contrasts that the paper prints: {", ".join(words)}'


def markdown(rows):
    """A table of the tested claims, what its numbers are of, and a list of the others."""
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
    tested = []
    for row in in_order(rows):
        if row.numbers:
            where = '; '.join(row.where)
            tested.append([row.label(), where, *number_cells(row.numbers), row.verdict])
    lines += [markdown_table(head, tested, (0, 1, len(head) - 1)), '']

    lines += [
        'What is compared (the validation loss where a row names nothing; losses in nats per token):',
        '',
    ]
    for metric in dict.fromkeys(measure_of(row.metric) for row in rows if row.numbers):
        lines.append(f'- {metric}: {METRICS[metric]}')

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
LABEL_WIDTH = 52  # letters on a line


@charts.styled
def forest(rows):
    """The tested claims by verdict: a dot per seed, the mean and its interval, right of 0 where as
    printed.

    Losses share an axis in nats. What was found inside models has many units: there, each row is drawn
    in halves of its interval, so that 0 lies outside where |mean| > 1; one seed has none and is only in
    the table. Below, what was not tested.
    """
    tested = [row for row in rows if row.numbers]
    of_losses = [row for row in tested if measure_of(row.metric) in LOSSES]
    inside = [row for row in tested if row not in of_losses and row.numbers['low'] is not None]
    parts = [part for part in (of_losses, inside) if part]
    if not parts:
        return ''
    footer = untested_lines(rows)
    heights = [ROW_HEIGHT * len(under_headings(part)) + 0.55 for part in parts]
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


def under_headings(rows):
    """The rows of each verdict below that verdict in capitals."""
    lines = []
    for verdict in VERDICTS:
        of_verdict = [row for row in rows if row.verdict == verdict]
        if of_verdict:
            lines += [verdict.upper(), *of_verdict]
    return lines


def draw_rows(axes, rows):
    lines = under_headings(rows)
    axes.axvline(0, color=charts.INK, linewidth=1.0)
    axes.set_axisbelow(True)
    axes.grid(axis='x', linewidth=0.6)
    of_losses = measure_of(rows[0].metric) in LOSSES
    for y, row in enumerate(lines):
        if isinstance(row, str):
            continue
        shade = charts.color(COLORS[row.verdict])
        numbers = row.numbers
        unit = 1.0 if of_losses else half_width(numbers)
        direction = (-1 if row.sign == '<' else 1) / unit
        dots = [direction * value for value in numbers['differences'].values()]
        axes.plot(dots, [y + 0.22] * len(dots), 'o', color=shade, markersize=2.5, alpha=0.6)
        if numbers['low'] is not None:
            interval = [direction * numbers['low'], direction * numbers['high']]
            axes.plot(interval, [y, y], color=shade, linewidth=2)
        axes.plot(direction * numbers['mean'], y, 'D', color=shade, markersize=5)
        count = f'   {numbers["seeds"]}'
        axes.text(1, y, count, va='center', fontsize=8, transform=axes.get_yaxis_transform())
    labels = [line if isinstance(line, str) else on_lines(line.label()) for line in lines]
    axes.set_yticks(range(len(lines)), labels, linespacing=1.0)
    for label in axes.get_yticklabels():
        verdict = label.get_text().lower()
        if verdict in COLORS:
            label.set_color(charts.color(COLORS[verdict]))
    axes.set_ylim(len(lines) - 0.5, -0.6)
    axes.tick_params(axis='y', length=0)
    axes.locator_params(axis='x', nbins=6)
    label = 'difference / half of its 95% interval'
    if of_losses:
        label = 'difference of losses (nats)'
    axes.set_xlabel(label)
    left, right = '\N{LEFTWARDS ARROW} against the paper', 'as printed \N{RIGHTWARDS ARROW}'
    axes.text(0, -0.75, left, ha='left', fontsize=8, transform=axes.get_yaxis_transform())
    axes.text(1, -0.75, right, ha='right', fontsize=8, transform=axes.get_yaxis_transform())
    axes.text(1, -0.75, '   seeds', ha='left', fontsize=8, transform=axes.get_yaxis_transform())


def on_lines(label):
    return textwrap.fill(label, LABEL_WIDTH)


def untested_lines(rows):
    """What was not tested, in lines for the foot of the picture."""
    lines = []
    for lacks in (MISSING, LARGER):
        figures = [row.figure for row in rows if row.lacks == lacks]
        if figures:
            names = ', '.join(name_of(figure) for figure in dict.fromkeys(figures))
            text = f'{len(figures)} are not tested because {lacks}: {names}.'
            lines += textwrap.wrap(text, 125, break_on_hyphens=False)
    return lines


def name_of(figure):
    """Fig. 12a of fig12a, the text of v5 of v5. No line is broken before its number."""
    if figure not in FIGURES:
        return f'the text of\N{NO-BREAK SPACE}{figure}'
    return number_of(figure).replace(' ', '\N{NO-BREAK SPACE}')


# --- a plan that tests claims ----------------------------------------------------------------------


def command(figures):
    """The command line of compare.py whose runs test the claims of some figures, as far as runs of
    one size and length can. Raises ValueError where they cannot."""
    claims = [claim for claim in CLAIMS if not figures or claim.figure in figures]
    claims = [claim for claim in claims if not beyond(claim)]
    if not claims:
        raise ValueError(
            'no runs of one size and length can test the claims of these figures; name others'
        )
    arms, contrasts = {V: arm_of(V)}, []
    for claim in claims:
        pair = [claim.ours.model, claim.theirs.model]
        arms |= {model: arm_of(model) for model in pair}
        if V not in pair:
            contrasts.append('-'.join(arm_name(model) for model in pair))
    if len(arms) < 2:
        raise ValueError(
            'these claims are about vanilla alone, and a plan takes two models: name more'
        )
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


def print_plan(settings):
    print(command(settings.names))


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


def draw_figures(settings):
    groups = read_groups(settings.folders(), {})
    for name in settings.figures():
        arms = seeds.measure(name, groups)
        if not arms:
            raise ValueError(f'no runs of {name}: vanilla and another model, with a seed in common')
        draw.save(seeds.picture_of(name, arms), Path(settings.out, f'{name}.png'))
        _, _, models = seeds.models_of(name)
        missing = [NAMES[run.model] for run in models if run not in arms]
        if missing:
            print(f'without {", ".join(missing)}: no runs')


def main():
    with one_line_errors(ValueError, OSError):
        modes = {'': (VerdictsConfig,), 'plan': (PlanConfig,), 'draw': (DrawConfig,)}
        mode, (settings,) = choose(modes, __doc__, plain='names')
        actions = {'': write_verdicts, 'plan': print_plan, 'draw': draw_figures}
        actions[mode](settings)


if __name__ == '__main__':
    main()
