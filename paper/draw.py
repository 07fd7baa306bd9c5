"""
Drawings from the logs of runs, and of how models are wired.

$ python -m paper.draw relative out/demo/vanilla out/demo/resformer out/demo/svformer --window=10
$ python -m paper.draw scaling out/vanilla_{2m,82m,180m} out/resformer_{2m,82m,180m} --window=50
$ python -m paper.draw critical out/vanilla_512 out/svformer_512 out/vanilla_2048 out/svformer_2048
$ python -m paper.draw wiring vanilla resformer+residual_from=all out/demo/svformer --layers=4

relative  smoothed training loss of each run minus that of the first (Figs. 1, 4 to 8, 10 to 14)
scaling   loss against parameters, fitted power laws, savings at equal loss (Fig. 5)
critical  each run relative to the one before it, and whether and when that overtakes it, by sequence
          length (Fig. 11)
wiring    which layers' queries, keys and values a layer uses (Fig. 2): of a model of config/, with
          +setting=value, or of a run

--out=FILE.png, .svg or .pdf is the picture. Whether a difference means anything takes several seeds:
see compare.py.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from comparison import charts
from comparison.report import signed
from configurator import choose, one_line_errors
from paper import crossings, losses, wiring
from paper.runs import PAPER, Run, config_file, configs_of
from tables import markdown_table

# --- names and colors -----------------------------------------------------------------------------

# A model is named after the first family here of which it has all fields.
FAMILIES = {
    'CLA': ('share_k', 'share_v'),
    'SVFormer': ('share_v',),
    'NeuTRENO': ('neutreno',),
    'ResFormer': ('v_residual',),
    'DenseFormer': ('denseformer',),
    'GQA': ('n_kv_head',),
}

# Fields that may differ within a family, and among vanilla models.
DETAILS = set(
    'arch rope_theta rope_scaling norm_eps dropout tie_embeddings embed_norm residual_from '
    'residual_lambda residual_learned residual_layers residual_map share_q_every share_k_every '
    'share_v_every'.split()
)

# Fields that make no family of their own and do not change a model's family; and the color that they
# give to a model of no family.
ABLATIONS = {
    'q_residual': 'queries',
    'share_q': 'queries',
    'k_residual': 'keys',
    'share_k': 'keys',
}

# Okabe and Ito's colors, and two of Tol's, which color-blind readers can tell apart. A family has the
# same one in every figure.
COLORS = {
    'vanilla': '#000000',
    'ResFormer': '#D55E00',
    'SVFormer': '#0072B2',
    'NeuTRENO': '#009E73',
    'DenseFormer': '#CC79A7',
    'CLA': '#56B4E9',
    'GQA': '#E69F00',
    'queries': '#882255',
    'keys': '#999933',
    'other': '#888888',
}

# Dashes tell runs of one color apart.
DASHES = ('-', '--', ':', '-.')


def model_name(config):
    """The paper's name for a GPTConfig's architecture.

    A model that the paper does not have, such as one with a field that a fork added, is named by its
    own settings.
    """
    variant = config.variant()
    if config.kv_heads == config.n_head:
        variant.pop('n_kv_head', None)

    family_fields = {name for names in FAMILIES.values() for name in names}
    if variant.keys() <= family_fields | DETAILS | ABLATIONS.keys():
        for family, names in FAMILIES.items():
            if all(name in variant for name in names):
                return family
    if variant.keys() <= DETAILS:
        return 'vanilla'
    settings = [name if value is True else f'{name}={value}' for name, value in variant.items()]
    return ', '.join(settings)


def color_of(config):
    name = model_name(config)
    if name in COLORS:
        return COLORS[name]
    parts = {ABLATIONS.get(field) for field in config.variant().keys() - DETAILS}
    for part in ('queries', 'keys'):
        if parts == {part}:
            return COLORS[part]
    return COLORS['other']


def styles(configs):
    """{run: matplotlib's line settings} of {run: GPTConfig}.

    A model has its color. Runs of one color differ in their dashes and, beyond four, in strength.
    """
    counts = dict.fromkeys(COLORS.values(), 0)
    result = {}
    for run, config in configs.items():
        color = color_of(config)
        strength, dashes = divmod(counts[color], len(DASHES))
        result[run] = {'color': lighter(color, 1 / (1 + strength)), 'linestyle': DASHES[dashes]}
        counts[color] += 1
    return result


def shades(configs):
    """Like styles(), for runs of one model in order, such as by size: ever stronger."""
    strengths = np.linspace(1.0, 0.45, len(configs))[::-1]  # a single one has the full color
    result = {}
    for (run, config), strength in zip(configs.items(), strengths, strict=True):
        result[run] = {'color': lighter(color_of(config), strength), 'linestyle': '-'}
    return result


def lighter(color, strength):
    """A color '#RRGGBB' mixed with white; strength 1 is the color itself.

    Lines of a mixed color do not shine through each other, as transparent ones do.
    """
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    mixed = [round(255 + strength * (channel - 255)) for channel in channels]
    return '#' + ''.join(f'{channel:02X}' for channel in mixed)


def looks(configs, names, ordered=False):
    """{run: its line settings, and its name as 'label'}; ordered: runs of one model, in an order."""
    settings = shades(configs) if ordered else styles(configs)
    return {run: {**settings[run], 'label': names[run]} for run in configs}


def labels(runs):
    """{run: as much of the end of its path as tells it from the others}"""
    parts = {run: Path(run).absolute().parts for run in runs}
    result = {}
    for run, own in parts.items():
        depth = 1
        while depth < len(own) and sum(p[-depth:] == own[-depth:] for p in parts.values()) > 1:
            depth += 1
        result[run] = '/'.join(own[-depth:])
    return result


# --- numbers: what the axes below draw, ready for JSON --------------------------------------------


def curves_of(pairs, smooth, window):
    """{run: its curve} of [(baseline, run)], each a mean over `smooth` points.

    A curve is {'steps', 'difference', 'final'}; final is the mean of the last `window` steps.
    """
    result = {}
    for baseline, run in pairs:
        steps, values = losses.relative(baseline, run, smooth)
        final = losses.final_difference(baseline, run, window)
        result[run] = {'steps': steps.tolist(), 'difference': values.tolist(), 'final': final}
    return result


def scaling_of(runs, window):
    """{model: {'parameters', 'loss', 'runs', ...}} of runs of several sizes, from small to large.

    A model has a 'power_law' or says under 'no_law' why not; all but vanilla have losses.savings().
    Raises ValueError where two wirings have one name, where a run has not finished, and where the
    runs differ in more than their models, sizes and learning rates.
    """
    points, wirings = {}, {}
    for run in runs:
        config = losses.model_config(run)
        name = model_name(config)
        # These two follow the number of heads and of layers.
        wired = {**config.variant(), 'n_kv_head': None, 'residual_layers': None}
        if wirings.setdefault(name, wired) != wired:
            raise ValueError(f'{run} and another run are both {name}, but differ in their wiring')
        losses.check_sizes(runs[0], run)
        losses.check_finished(run)
        point = losses.parameters_of(run), losses.last_loss(run, window), str(run)
        points.setdefault(name, []).append(point)

    models = {}
    for name, of_model in points.items():
        parameters, loss, names = zip(*sorted(of_model), strict=True)
        models[name] = {'parameters': parameters, 'loss': loss, 'runs': names}
        models[name]['no_law'] = losses.why_no_law(parameters, loss)
        if not models[name]['no_law']:
            models[name]['power_law'] = losses.power_law(parameters, loss)
    for name in models:
        if name != 'vanilla' and 'vanilla' in models:
            models[name].update(losses.savings(models, name, window))
    return models


def in_pairs(items):
    """[a, b, c, d] -> [(a, b), (c, d)]"""
    return list(zip(items[::2], items[1::2], strict=True))


# --- axes: each function draws numbers on them ----------------------------------------------------

SIZE = (7.4, 3.4)  # of one axes, in inches: in a README, its letters are as large as the text's
FONT = 9
# Of a legend beside the axes, where the names of curves are, too.
BESIDE = {'loc': 'center left', 'bbox_to_anchor': (1.01, 0.5), 'frameon': False, 'fontsize': FONT}


def curve_axes(axes, curves, look, baseline, smooth, window, limits=None):
    """Each curve, and where it ends its name and its difference at the end.

    curves: from curves_of() with the same `smooth` and `window`. look: {run: line settings}, from
    looks(). baseline: what the zero line is. limits: of the y axis.
    """
    for run, curve in curves.items():
        axes.plot(curve['steps'], curve['difference'], **look[run])
    axes.axhline(0, color=COLORS['vanilla'], linewidth=1)
    axes.set_ylim(limits or limits_of(curves))
    axes.margins(x=0)
    axes.grid(alpha=0.3)
    words = f'step (curves: mean of {smooth} steps; numbers: mean of the last {window})'
    axes.set_xlabel(words, fontsize=FONT)
    axes.set_ylabel(f'training loss minus\n{baseline} (nats)', fontsize=FONT)
    say_what_is_better(axes)

    ends = [(0.0, baseline, {'color': COLORS['vanilla'], 'linestyle': '-'})]
    for run, curve in curves.items():
        words = f'{signed(curve["final"], 3)}  {look[run]["label"]}'
        ends.append((curve['difference'][-1], words, look[run]))
    end_labels(axes, ends)


def say_what_is_better(axes):
    note = {'color': '#777777', 'fontsize': FONT, 'transform': axes.transAxes, 'ha': 'right'}
    axes.text(0.99, 0.02, 'below 0: better', **note)


def limits_of(curves):
    """The limits of an axis of curves over steps.

    The first steps, where all losses fall by nats, would squeeze the rest: up to 1% of a curve's
    points above and below may lie outside, all of them in its first tenth.
    """
    low = high = 0.0
    for curve in curves.values():
        values = np.array(curve['difference'])
        later = values[len(values) // 10 :]
        low = min(low, later.min(), np.quantile(values, 0.01))
        high = max(high, later.max(), np.quantile(values, 0.99))
    margin = 0.1 * (high - low) or 1.0
    return low - margin, high + margin


def end_labels(axes, ends, gap=0.06):
    """Names beside the right ends of curves, where they hide none, moved apart if they overlap.

    ends: [(y, name, line settings)]. gap: between the axes and the names, as a share of the axes.
    """
    low, high = axes.get_ylim()
    # The height of the axes alone, without the words around them.
    rows = axes.get_subplotspec().get_gridspec().nrows
    inches = axes.get_figure().get_figheight() / rows - 0.9
    line_height = 1.4 * FONT / 72 / inches * (high - low)
    places = spread([y for y, _, _ in ends], line_height)
    beside = axes.get_yaxis_transform()
    for (y, name, look), place in zip(ends, places, strict=True):
        line = {'arrowstyle': '-', 'linewidth': 1.5, 'shrinkA': 2, 'shrinkB': 0, 'relpos': (0, 0.5)}
        line |= {'color': look['color'], 'linestyle': look['linestyle']}
        text = {'va': 'center', 'fontsize': FONT, 'annotation_clip': False, 'arrowprops': line}
        frame = {'xycoords': beside, 'textcoords': beside}
        axes.annotate(name, xy=(1.0, y), xytext=(1 + gap, place), **frame, **text)


def spread(values, gap):
    """Places at least `gap` apart, in the order of the values and as near to them as can be.

    Without the gaps, the places only have to rise: neighbors that fall are pooled to their mean.
    """
    order = np.argsort(values, kind='stable')
    pools = []
    for rank, i in enumerate(order):
        pools.append([values[i] - rank * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    places = np.empty(len(values))
    rising = [np.mean(pool) for pool in pools for _ in pool]
    for rank, i in enumerate(order):
        places[i] = rising[rank] + rank * gap
    return places.tolist()


def scaling_axes(axes, models, window):
    """Loss against parameters, and a power law where there is one; models: from scaling_of()."""
    for name, model in models.items():
        color = COLORS.get(name, COLORS['other'])
        parameters = model['parameters']
        label = f'{name}: no power law,\n{model["no_law"]}'
        line = {'linestyle': ':'}
        if not model['no_law']:
            a, b = model['power_law']
            label = f'{name}: {a:.3g} $N^{{{-b:+.3g}}}$'
            line = {'linestyle': 'none'}
            x = np.geomspace(min(parameters), max(parameters), 50)
            axes.plot(x, a * x**-b, color=color)
        axes.plot(parameters, model['loss'], marker='o', color=color, label=label, **line)
    axes.set_xscale('log')
    axes.set_yscale('log')
    axes.set_xlabel('parameters N', fontsize=FONT)
    axes.set_ylabel(f'training loss (nats)\nmean of the last {window} steps', fontsize=FONT)
    axes.grid(alpha=0.3, which='both')
    axes.legend(**BESIDE)


# How a crossings.Crossing is drawn: marker, whether it is filled, what the legend says.
MARKERS = {
    'overtaken': ('o', True, 'overtaken'),
    'predicted': ('o', False, 'not overtaken:\npredicted'),
    'not overtaken': ('^', False, 'not overtaken by\nthe end of training'),
    'never ahead': ('v', False, 'behind, and\nnever ahead'),
}


def critical_axes(axes, points, color):
    """The step at which a run is overtaken, against sequence length; points: from crossings_of().

    A run that is not overtaken is at the end of its training.
    """
    for kind, (marker, is_filled, label) in MARKERS.items():
        of_kind = [point for point in points if point['kind'] == kind]
        if of_kind:
            x = [point['length'] for point in of_kind]
            y = [place_of(point) for point in of_kind]
            face = color if is_filled else 'white'
            look = {'color': color, 'markerfacecolor': face, 'markersize': 8, 'linestyle': 'none'}
            axes.plot(x, y, marker=marker, label=label, **look)
    lengths = [point['length'] for point in points]
    ends = [point['steps'] for point in points]
    tokens = {point['tokens'] for point in points}
    label = 'end of training'
    if len(tokens) == 1:
        label += f':\n{tokens.pop():,} tokens'
    # As wide as a marker, at each length: the pairs need not have the same number of steps.
    look = {'color': '#BBBBBB', 'markersize': 22, 'linestyle': 'none', 'zorder': 0}
    axes.plot(lengths, ends, marker='_', label=label, **look)

    draw_exponential(axes, points, color)

    axes.set_xscale('log')
    axes.set_xticks(lengths, [f'{length:,}' for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * max(*ends, *[place_of(point) for point in points]))
    axes.set_xlabel('sequence length T (tokens)', fontsize=FONT)
    axes.set_ylabel('step at which it is overtaken', fontsize=FONT)
    axes.grid(alpha=0.3)
    axes.legend(**BESIDE)


def draw_exponential(axes, points, color):
    """The paper's law through the known crossings: longer sequences postpone them.

    Nothing is drawn where they are too few, or where the step does not rise with the length.
    """
    known = [point for point in points if point['kind'] == 'overtaken']
    lengths = [point['length'] for point in known]
    if len(set(lengths)) < losses.MIN_POINTS:
        return
    logarithms = [np.log(point['step']) for point in known]
    slope, intercept = np.polyfit(lengths, logarithms, 1)
    if slope <= 0:
        return
    x = np.linspace(min(lengths), max(lengths), 50)
    label = f'{np.exp(intercept):.3g} exp({slope:.3g} T)'
    axes.plot(x, np.exp(intercept + slope * x), '--', color=color, label=label)


def place_of(point):
    if point['kind'] == 'never ahead':
        return 0
    return point['step'] or point['steps']


def legend_below(figure, axes, inches):
    """The legend of `axes` below all of a figure, `inches` wide. Returns its height in inches."""
    handles, names = axes.get_legend_handles_labels()
    shown = [re.sub('[${}_]', '', name) for name in names]  # without a formula's markup
    longest = max(map(len, shown))
    columns = max(1, int(inches / (0.5 + 0.07 * longest)))
    place = {'loc': 'outside lower center', 'ncols': columns}
    figure.legend(handles, names, frameon=False, fontsize=FONT, **place)
    return 0.2 * math.ceil(len(names) / columns)


# --- matplotlib -----------------------------------------------------------------------------------


def pyplot():
    plot = charts.pyplot()
    plot.rcParams['axes.formatter.min_exponent'] = 2  # a log axis says 2.5, not 2.5 x 10^0
    return plot


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


def draw_relative(settings):
    check_runs(settings, 'relative')
    baseline, *runs = settings.runs
    names = labels(settings.runs)
    configs = {run: losses.model_config(run) for run in runs}
    curves = curves_of([(baseline, run) for run in runs], settings.window, settings.window)
    figure, axes = pyplot().subplots(figsize=SIZE, layout='constrained')
    look = looks(configs, names)
    curve_axes(axes, curves, look, names[baseline], settings.window, settings.window)
    print(f'Training loss minus that of {baseline}, mean of {settings.window} steps\n')
    print_curves(curves)
    return figure


def print_curves(curves):
    """A table of curves at five steps; a cell is empty where a run has no value."""
    every_step = np.unique(np.concatenate([curve['steps'] for curve in curves.values()]))
    shares = np.array([0.1, 0.25, 0.5, 0.75, 1.0])
    marks = every_step[np.round(shares * (len(every_step) - 1)).astype(int)]
    rows = []
    for run, curve in curves.items():
        steps = curve['steps']
        cells = []
        for mark in marks:
            inside = steps[0] <= mark <= steps[-1]
            last = np.searchsorted(steps, mark, side='right') - 1
            cells.append(f'{curve["difference"][last]:+.4f}' if inside else '')
        rows.append([str(run), *cells])
    head = ['run', *(f'step {mark}' for mark in marks)]
    print(markdown_table(head, rows))


def draw_scaling(settings):
    check_runs(settings, 'scaling')
    models = scaling_of(settings.runs, settings.window)
    for name, model in models.items():
        points = zip(model['parameters'], model['loss'], strict=True)
        words = [f'{n:,} parameters {loss:.4f}' for n, loss in points]
        if model['no_law']:
            words.append(f'no power law: {model["no_law"]}')
        words += savings_in_words(model)
        print(f'{name}: {", ".join(words)}')
    figure, axes = pyplot().subplots(figsize=SIZE, layout='constrained')
    scaling_axes(axes, models, settings.window)
    return figure


def savings_in_words(model):
    """What losses.savings() says of a model of scaling_of(): each saving, and why one has none."""
    kinds = {'parameters_saved': 'parameters', 'tokens_saved': 'tokens'}
    words, unknown = [], []
    for key, what in kinds.items():
        share = model.get(key)
        if share is None:
            unknown.append(what)
        else:
            words.append(f'{what} saved: {share:.1%}')
    if model.get('why'):
        words.append(f'no saving of {" or ".join(unknown)} can be read: {model["why"]}')
    return words


def draw_critical(settings):
    check_runs(settings, 'critical')
    if len(settings.runs) % 2:
        raise ValueError('critical takes pairs: BASELINE RUN BASELINE RUN ...')
    pairs = in_pairs(settings.runs)
    points = crossings.crossings_of(pairs, settings.window)
    for point in points:
        print(f'{point["length"]} tokens: {crossings.describe(point)}')

    curves = curves_of(pairs, settings.window, settings.window)
    configs = {run: losses.model_config(run) for run in curves}
    longest = max(curve['steps'][-1] for curve in curves.values())
    names = {}
    for run, config in configs.items():
        names[run] = f'{config.block_size:,} tokens'
        last = curves[run]['steps'][-1]
        if last < longest:
            names[run] += f' ({last + 1:,} steps)'
    width, height = SIZE
    figure, (above, below) = pyplot().subplots(2, figsize=(width, 2 * height), layout='constrained')
    look = looks(configs, names, ordered=True)
    baselines = {model_name(losses.model_config(baseline)) for baseline, _ in pairs}
    baseline = baselines.pop() if len(baselines) == 1 else 'the baseline'
    curve_axes(above, curves, look, baseline, settings.window, settings.window)
    critical_axes(below, points, color_of(losses.model_config(settings.runs[1])))
    return figure


def check_runs(settings, kind):
    if len(settings.runs) < 2:
        raise ValueError(f'{kind} needs a baseline and at least one other run')


def draw_wiring(settings):
    if not settings.runs:
        raise ValueError('wiring needs a model, such as resformer, or the folder of a run')
    configs = {}
    for word in settings.runs:
        config = wired_config(word)
        if settings.layers:
            config = replace(config, n_layer=settings.layers)
        configs[word] = config
    return wiring.figure_of(pyplot(), configs)


def wired_config(word):
    """The GPTConfig of a run's folder, or of a model of config/, with +setting=value."""
    if Path(word, 'config.json').exists():
        return losses.model_config(word)
    model, *flags = word.split('+')
    if not config_file(model).exists():
        raise ValueError(f'{model} is neither the folder of a run nor a model of config/')
    for flag in flags:
        if '=' not in flag:
            raise ValueError(f'{word}: {flag} has no value; give it as {flag}=VALUE')
    _, config = configs_of(Run(word), PAPER)
    return config


DRAWINGS = {
    'relative': draw_relative,
    'scaling': draw_scaling,
    'critical': draw_critical,
    'wiring': draw_wiring,
}


def main():
    with one_line_errors(ValueError, OSError):
        modes = dict.fromkeys(DRAWINGS, (DrawConfig,))
        kind, (settings,) = choose(modes, __doc__, plain='runs')
        save(DRAWINGS[kind](settings), settings.out or f'{kind}.png')


if __name__ == '__main__':
    main()
