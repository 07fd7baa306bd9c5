"""
A figure of the paper from runs of several seeds: the curve of each, their mean, and where they end.

Curves are of the training loss, relative to vanilla's of the same seed. Beside them stands what a
verdict is made of: the validation loss at the end, a dot per seed, its mean and its 95% interval.
"""

import functools

import numpy as np

from comparison.report import seeds_text, signed
from comparison.verdict import describe, half_width
from paper import draw, losses
from paper.figures import FIGURES, NAMES, number_of
from paper.judging import fullest, pairs_in, validation_loss
from paper.runs import PAPER, configs_of

SMOOTH = 50  # steps whose mean is a point of a curve
# The share of the steps that does not decide the limits of the picture: in the first steps, losses
# differ by more than they ever will again.
BEGIN = 0.2


def models_of(name):
    """(title, baseline, [other models]) of a figure that compares models; None of any other.

    Models are Runs of the usual size and length: what else a panel has is left out.
    """
    figure = FIGURES[name]
    for panel in figure.panels:
        usual = [run for run in panel.runs if not run.unusual(PAPER)]
        if panel.how == 'relative':
            baselines = usual[:1]
        elif panel.how == 'pairs':
            baselines = usual[::2]
        else:
            continue
        others = [run for run in dict.fromkeys(usual) if run not in baselines]
        # A panel with one other model compares sizes, lengths or rates.
        if len(set(baselines)) == 1 and len(others) > 1:
            return panel.title or figure.title, baselines[0], others
    return None


DRAWN = [name for name in FIGURES if models_of(name)]

# --- numbers --------------------------------------------------------------------------------------


def measure(name, groups):
    """{model, a Run: {'steps', 'curves': {seed: [...]}, 'end': numbers of verdict.describe()}}

    groups: of judging.read_groups(), of which one is drawn. Models without runs are left out.
    """
    return {run: measure_model(pairs) for run, pairs in find_runs(name, groups).items()}


def find_runs(name, groups):
    """{model: {seed: (its FinishedRun, the baseline's)}} of the group with the most models and seeds."""
    _, baseline, others = models_of(name)
    candidates = []
    for variants in groups.values():
        pairs = {run: pairs_in(variants, run, baseline) for run in others}
        candidates.append({run: of_seeds for run, of_seeds in pairs.items() if of_seeds})
    return fullest(candidates, models_and_runs, f'models and seeds of {name}')


def models_and_runs(pairs):
    return len(pairs), sum(map(len, pairs.values()))


def measure_model(pairs):
    """What measure() has of a model; pairs: {seed: (its FinishedRun, the baseline's)}."""
    curves, ends = {}, {}
    for seed, (ours, theirs) in pairs.items():
        curves[seed] = losses.relative(theirs.folder, ours.folder, SMOOTH)
        ends[seed] = validation_loss(ours, theirs)
    # All take the same steps, but may have logged others of them.
    steps = functools.reduce(np.intersect1d, [logged for logged, _ in curves.values()])
    shared = {seed: values[np.isin(logged, steps)] for seed, (logged, values) in curves.items()}
    return {'steps': steps.tolist(), 'curves': shared, 'end': describe(ends)}


# --- the picture ----------------------------------------------------------------------------------


def picture_of(name, arms):
    """The curves, and beside them where they end; arms: from measure()."""
    title, baseline, _ = models_of(name)
    names = {run: FIGURES[name].names.get(run.model, NAMES[run.model]) for run in arms}
    configs = {run: configs_of(run, PAPER)[1] for run in arms}
    look = draw.looks(configs, names, FIGURES[name].is_ordered)

    width, height = draw.SIZE
    picture, (left, right) = draw.pyplot().subplots(
        1,
        2,
        figsize=(width, height + 0.3),
        width_ratios=(4, 1),
        sharey=True,
        layout='constrained',
    )
    left.set_ylim(limits_of(arms.values()))
    for axes in (left, right):
        axes.axhline(0, color=draw.COLORS['vanilla'], linewidth=1)
        axes.grid(alpha=0.3)
    for run, arm in arms.items():
        draw_curves(left, arm, look[run])
    left.margins(x=0)
    left.set_xlabel(f'step (thin: each seed; mean of {SMOOTH} steps)', fontsize=draw.FONT)
    left.set_ylabel(f'loss minus {NAMES[baseline.model]} (nats)', fontsize=draw.FONT)
    left.set_title('training loss', fontsize=draw.FONT)
    draw.say_what_is_better(left)

    ends = [(0.0, NAMES[baseline.model], {'color': draw.COLORS['vanilla'], 'linestyle': '-'})]
    counts = {arm['end']['seeds'] for arm in arms.values()}
    for column, (run, arm) in enumerate(arms.items()):
        words = f'{draw_end(right, column, arm["end"], look[run])}  {look[run]["label"]}'
        if len(counts) > 1:
            words += f', {seeds_text(arm["end"]["seeds"])}'
        ends.append((arm['end']['mean'], words, look[run]))
    right.set_xlim(-0.7, len(arms) - 0.3)
    right.set_xticks([])
    below = [] if counts == {1} else ['95% interval']
    if len(counts) == 1:
        below.append(seeds_text(*counts))
    right.set_xlabel('\n'.join(below), fontsize=draw.FONT)
    right.set_title('validation loss', fontsize=draw.FONT)
    draw.end_labels(right, ends, gap=0.3)
    picture.suptitle(f'{number_of(name)}: {title}', fontsize=11)
    return picture


def limits_of(arms):
    shown = [0.0]
    for arm in arms:
        begin = int(BEGIN * len(arm['steps']))
        shown += [value for curve in arm['curves'].values() for value in curve[begin:]]
        shown += arm['end']['differences'].values()
        if arm['end']['low'] is not None:
            shown += [arm['end']['low'], arm['end']['high']]
    margin = 0.05 * (max(shown) - min(shown))
    return min(shown) - margin, max(shown) + margin


def draw_curves(axes, arm, look):
    faint = {'color': draw.lighter(look['color'], 0.4), 'linestyle': look['linestyle']}
    for values in arm['curves'].values():
        axes.plot(arm['steps'], values, linewidth=0.5, zorder=1.5, **faint)
    mean = np.mean(list(arm['curves'].values()), axis=0)
    axes.plot(arm['steps'], mean, linewidth=1.8, zorder=2.5, **look)


def draw_end(axes, x, end, look):
    """Seeds, mean and interval in a column of their own. Returns them as text."""
    color = look['color']
    dots = list(end['differences'].values())
    axes.plot([x - 0.25] * len(dots), dots, 'o', color=color, markersize=2.5, alpha=0.6)
    axes.plot(x, end['mean'], 'D', color=color, markersize=4)
    words = signed(end['mean'], 3)
    if end['low'] is not None:
        axes.plot([x, x], [end['low'], end['high']], color=color, linewidth=1.5)
        words += f' ± {half_width(end):.3f}'
    return words
