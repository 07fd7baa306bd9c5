"""The pictures of the paper that compare.py does not draw, and how each model looks in all of them."""

import re
from dataclasses import asdict
from pathlib import Path

import numpy as np

from comparison import charts
from comparison.charts import BESIDE, picture, pyplot
from paper import figures, losses
from paper.figures import R, S, V

# A model that several figures show has the same color in each.
MODELS = (V, R, S, 'neutreno', 'denseformer', 'cla', 'gqa')
COLORS = dict(zip(MODELS, charts.COLORS, strict=False))


def labels_and_looks(runs):
    """({run: a name that no other has}, {run: line settings}), of folders or checkpoints of runs."""
    short = {}
    for run in runs:
        path = Path(run)
        folder = path.parent if path.suffix == '.pt' else path
        short[run] = re.sub(r'(_lr[\d.e-]+)?(_seed\d+)?$', '', folder.name)
    if len(set(short.values())) < len(short):
        short = {run: run for run in runs}
    words = {figures.Arm(model).name: name for model, name in figures.NAMES.items()}
    labels = {run: words.get(name, name) for run, name in short.items()}
    look = charts.looks(list(short.values()), COLORS)
    return labels, {run: look[name] for run, name in short.items()}


# --- losses by size, and crossings ----------------------------------------------------------------


def scaling_picture(models, window, title):
    """Loss against parameters, and a power law where there is one.

    models: {model: {'parameters', 'loss', 'power_law'}}, each from small to large.
    """
    figure, axes = picture(title)
    for name, model in models.items():
        color, name = COLORS[name], figures.NAMES[name]
        parameters = model['parameters']
        label, line = f'{name}: no power law', ':'
        if model['power_law']:
            a, b = model['power_law']
            label, line = f'{name}: {a:.3g} $N^{{{-b:+.3g}}}$', 'none'
            x = np.geomspace(parameters[0], parameters[-1], 50)
            axes.plot(x, a * x**-b, color=color)
        axes.plot(parameters, model['loss'], 'o', linestyle=line, color=color, label=label)
    axes.set(xscale='log', yscale='log', xlabel='parameters N')
    axes.set_ylabel(f'training loss (nats)\nmean of the last {window} steps')
    axes.legend(**BESIDE)
    return figure


def crossing_picture(points, color, title=''):
    """The step at which a run is overtaken, against sequence length, and an exponential through them.

    points: [{'length', and a losses.Crossing}]. A run that is not overtaken is at the end of its training.
    """
    figure, axes = picture(title)
    lengths = [point['length'] for point in points]
    ends = [point['steps'] for point in points]
    axes.plot(lengths, ends, '_', color='#BBBBBB', markersize=22, label='end of training')
    for marker, kind in zip('osv^', losses.KINDS, strict=True):
        places = [(p['length'], place_of(p)) for p in points if p['kind'] == kind]
        if places:
            axes.plot(*zip(*places, strict=True), marker, color=color, markersize=8, label=kind)

    # The paper's law: longer sequences postpone the crossing.
    known = [(p['length'], np.log(p['step'])) for p in points if p['kind'] == 'overtaken']
    if len({length for length, _ in known}) >= losses.MIN_POINTS:
        slope, intercept = np.polyfit(*zip(*known, strict=True), 1)
        if slope > 0:
            x = np.linspace(min(lengths), max(lengths), 50)
            label = f'{np.exp(intercept):.3g} exp({slope:.3g} T)'
            axes.plot(x, np.exp(intercept + slope * x), '--', color=color, label=label)

    axes.set_xscale('log')
    axes.set_xticks(lengths, [f'{length:,}' for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel('sequence length T (tokens)')
    axes.set_ylabel('step at which it is overtaken')
    axes.legend(**BESIDE)
    return figure


def place_of(point):
    if point['kind'] == 'never ahead':
        return 0
    return point['step'] or point['steps']


def measure_critical(pairs, smooth):
    """[{'length', and a losses.Crossing}] of [(ours, theirs)], ready for JSON."""
    points = []
    for pair in pairs:
        found = losses.crossing(*pair, smooth)
        length = pair[0].facts['block_size']
        points.append({'length': length, 'words': str(found), **asdict(found)})
    return points


# --- matplotlib -----------------------------------------------------------------------------------


def save(figure, out):
    """Write a picture; without an ending, it is a PNG."""
    out = Path(out)
    if not out.suffix:
        out = out.with_suffix('.png')
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    pyplot().close(figure)
    print(f'\nwrote {out}')
