"""
Drawings of the losses of runs, and of how models are wired.

$ python -m paper.draw relative out/demo/vanilla out/demo/resformer out/demo/svformer --window=10
$ python -m paper.draw wiring vanilla resformer+residual_from=all out/demo/svformer --layers=4

relative  training loss minus that of the first run's model, and the validation loss at the end (Figs. 1,
          4 to 8, 10 to 14). Runs that differ only in their seeds are one curve, their mean
wiring    which layers' queries, keys and values a layer uses (Fig. 2): of a model of config/, with
          +setting=value, or of a run

--out=FILE.png, .svg or .pdf is the picture. Whether a difference means anything takes several seeds:
see compare.py.
"""

import itertools
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from comparison.charts import BESIDE, curves_picture, picture, pyplot
from comparison.curves import measure_curves
from comparison.runs import finished_runs, gpt_config, named_runs, read_run_config
from comparison.verdict import paired
from configurator import choose, one_line_errors
from paper import figures, losses, wiring
from paper.figures import R, S, V

# Okabe and Ito's colors and two of Tol's, which color-blind readers can tell apart. A model that several
# figures show has the same one in each.
COLORS = {
    V: '#000000',
    R: '#D55E00',
    S: '#0072B2',
    'neutreno': '#009E73',
    'denseformer': '#CC79A7',
    'cla': '#56B4E9',
    'gqa': '#E69F00',
}
OTHERS = ('#882255', '#999933', *list(COLORS.values())[3:], '#888888')
DASHES = ('-', '--', ':', '-.')


def looks(models):
    """{model: matplotlib's line settings}; no two are alike."""
    free = [color for color in OTHERS if color not in map(COLORS.get, models)]
    others = itertools.cycle(itertools.product(DASHES, free))
    result = {}
    for model in models:
        dashes, color = ('-', COLORS[model]) if model in COLORS else next(others)
        result[model] = {'color': color, 'linestyle': dashes}
    return result


def labels_and_looks(runs):
    """({run: a name that no other has}, {run: line settings}), of folders or checkpoints of runs."""
    short = {}
    for run in runs:
        path = Path(run)
        folder = path.parent if path.suffix == '.pt' else path
        short[run] = re.sub(r'(_lr[\d.e-]+)?(_seed\d+)?$', '', folder.name)
    if len(set(short.values())) < len(short):
        short = {run: str(run) for run in runs}
    words = {figures.Arm(model).name: name for model, name in figures.NAMES.items()}
    labels = {run: words.get(name, name) for run, name in short.items()}
    look = looks(short.values())
    return labels, {run: look[name] for run, name in short.items()}


# --- losses by size, and crossings ----------------------------------------------------------------


def scaling_picture(models, window, title=''):
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
    axes.set_xscale('log')
    axes.set_yscale('log')
    axes.set_xlabel('parameters N')
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


# --- the program ----------------------------------------------------------------------------------


@dataclass
class DrawConfig:
    runs: tuple = ()  # folders of runs: a baseline, then the runs to compare with it
    window: int = 10  # steps in a running mean (the paper: 10, 50 or 100)
    layers: int = 0  # of a wiring; 0: those that the model has
    out: str = ''  # the picture; the ending chooses PNG, SVG or PDF; '': relative.png, ...

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f'window={self.window} must be at least 1')
        if self.layers < 0:
            raise ValueError(f'layers={self.layers} must not be negative')
        if not self.runs:
            raise ValueError('name folders of runs, the baseline first, or models for a wiring')


def draw_relative(settings):
    runs = finished_runs(named_runs(settings.runs))
    arms = losses.arms_of({name: run.facts for name, run in runs.items()})
    baseline, *others = arms
    pairs = {}
    for name in others:
        losses.check_pair(runs[name], runs[baseline], {'seed'})
        both = paired(arms[name], arms[baseline])
        if not both:
            raise ValueError(f'{name} and {baseline} have no seed in common')
        pairs[name] = {seed: (runs[ours], runs[theirs]) for seed, (ours, theirs) in both.items()}
    if not pairs:
        raise ValueError('relative needs a baseline and at least one other model')
    curves = measure_curves(pairs, settings.window)
    labels, look = labels_and_looks(arms)
    return curves_picture(curves, labels, look, labels[baseline], settings.window)


def draw_wiring(settings):
    configs = {}
    for word in settings.runs:
        config = wired_config(word)
        configs[word] = replace(config, n_layer=settings.layers or config.n_layer)
    return wiring.figure_of(configs)


def wired_config(word):
    """The GPTConfig of a run's folder, or of a model of config/, with +setting=value."""
    settings = read_run_config(word)
    if settings:
        return gpt_config(settings, word)
    try:
        return figures.Arm(word).configs(figures.PAPER)[1]
    except FileNotFoundError:
        text = f'{word} is neither the folder of a run nor a model of config/, such as resformer'
        raise ValueError(text) from None


DRAWINGS = {'relative': draw_relative, 'wiring': draw_wiring}


def main():
    with one_line_errors():
        modes = dict.fromkeys(DRAWINGS, (DrawConfig,))
        kind, (settings,) = choose(modes, __doc__, plain='runs')
        save(DRAWINGS[kind](settings), settings.out or f'{kind}.png')


if __name__ == '__main__':
    main()
