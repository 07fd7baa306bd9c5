"""
Drawings from the logs of runs.

$ python -m paper.draw relative out/demo/vanilla out/demo/resformer out/demo/svformer --window=10
$ python -m paper.draw bars out/demo/vanilla out/demo/resformer out/demo/svformer --window=20
$ python -m paper.draw scaling out/vanilla_{82m,180m} out/resformer_{82m,180m} --window=50
$ python -m paper.draw critical out/vanilla_512 out/svformer_512 out/vanilla_2048 out/svformer_2048

relative  smoothed training loss of each run minus that of the first (Figs. 1, 4 to 8, 13, 14)
bars      the same over the last steps, a bar for each run
scaling   loss against parameters, fitted power laws, savings at equal loss (Fig. 5)
critical  the step at which each run is overtaken by the one before it, against length (Fig. 11)

--out=FILE.png or FILE.pdf is the picture. Whether a difference means anything takes several seeds:
see compare.py.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configurator import choose, one_line_errors
from paper import losses
from rundir import read_run_config

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
    'arch rope_theta rope_scaling norm_eps dropout tie_embeddings residual_from residual_lambda '
    'residual_learned residual_layers residual_map share_q_every share_k_every share_v_every'.split()
)

# Fields that make no family of their own and do not change a model's family.
ABLATIONS = {'q_residual', 'k_residual', 'share_q', 'share_k'}

# Okabe and Ito's colors, which color-blind readers can tell apart. A family has the same one in every
# figure.
COLORS = {
    'vanilla': '#000000',
    'ResFormer': '#D55E00',
    'SVFormer': '#0072B2',
    'NeuTRENO': '#009E73',
    'DenseFormer': '#CC79A7',
    'CLA': '#56B4E9',
    'GQA': '#E69F00',
    'other': '#888888',
}

# Dashes tell runs of one color apart, and hatches their bars.
HATCHES = {'-': '', '--': '//', ':': '..', '-.': 'xx'}


def model_name(config):
    """The paper's name for a GPTConfig's architecture.

    A model that the paper does not have, such as one with a field that a fork added, is named by its
    own settings.
    """
    variant = config.variant()
    if config.kv_heads == config.n_head:
        variant.pop('n_kv_head', None)

    family_fields = {name for names in FAMILIES.values() for name in names}
    if variant.keys() <= family_fields | DETAILS | ABLATIONS:
        for family, names in FAMILIES.items():
            if all(name in variant for name in names):
                return family
    if variant.keys() <= DETAILS:
        return 'vanilla'
    settings = [name if value is True else f'{name}={value}' for name, value in variant.items()]
    return ', '.join(settings)


def color_of(config):
    return COLORS.get(model_name(config), COLORS['other'])


def styles(configs):
    """{run: matplotlib's line settings} of {run: GPTConfig}.

    A model has its color. Runs of one color differ in their dashes and, beyond four, in strength.
    """
    counts = dict.fromkeys(COLORS.values(), 0)
    result = {}
    for run, config in configs.items():
        color = color_of(config)
        strength, dashes = divmod(counts[color], len(HATCHES))
        result[run] = {
            'color': color,
            'linestyle': list(HATCHES)[dashes],
            'alpha': 1 / (1 + strength),
        }
        counts[color] += 1
    return result


def shades(configs):
    """Like styles(), for runs of one model in order, such as by size: ever stronger."""
    strengths = np.linspace(0.25, 1.0, len(configs))
    result = {}
    for (run, config), strength in zip(configs.items(), strengths, strict=True):
        result[run] = {'color': color_of(config), 'linestyle': '-', 'alpha': float(strength)}
    return result


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


# --- axes: each function draws on them, and gives the numbers that it drew ------------------------


def relative_axes(axes, baseline, runs, window):
    """Each run minus one baseline: {run: (steps, differences)}."""
    configs = {run: losses.model_config(run) for run in (baseline, *runs)}
    names = labels(configs)
    axes.axhline(0, color=color_of(configs[baseline]), linewidth=1, label=names[baseline])
    axes.set_ylabel(f'training loss relative to\n{names[baseline]} (nats)')
    pairs = [(baseline, run) for run in runs]
    return curves(axes, pairs, window, names, styles(configs))


def pairs_axes(axes, pairs, window):
    """Each run minus a baseline of its own: {run: (steps, differences)}; pairs: [(baseline, run)]."""
    configs = {run: losses.model_config(run) for _, run in pairs}
    one_model = len({model_name(config) for config in configs.values()}) == 1
    style = shades(configs) if one_model else styles(configs)
    axes.axhline(0, color=COLORS['vanilla'], linewidth=1, label='its own baseline')
    axes.set_ylabel('training loss relative to\nits own baseline (nats)')
    return curves(axes, pairs, window, labels(configs), style)


def curves(axes, pairs, window, names, style):
    result = {}
    for baseline, run in pairs:
        result[run] = steps, values = losses.relative(baseline, run, window)
        axes.plot(steps, values, label=names[run], **style[run])
    axes.set_xlabel('step')
    frame(axes, [values for _, values in result.values()])
    return result


def frame(axes, curves):
    """Limits, grid and legend of curves over steps.

    The first steps, where all losses fall by nats, would squeeze the rest: up to 1% of a curve's
    points above and below may lie outside, all of them in its first tenth.
    """
    low = high = 0.0
    for curve in curves:
        later = curve[len(curve) // 10 :]
        low = min(low, later.min(), np.quantile(curve, 0.01))
        high = max(high, later.max(), np.quantile(curve, 0.99))
    margin = 0.1 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    axes.grid(alpha=0.3)
    legend(axes, axes, 4.6, loc='lower left', bbox_to_anchor=(0, 1))


def legend(owner, axes, inches, **place):
    """The legend of `axes` outside of them, where it hides no curve. Returns its height in inches.

    owner: what it belongs to, the axes or their figure. inches: the width that it may take.
    """
    handles, names = axes.get_legend_handles_labels()
    longest = max(
        len(re.sub('[${}_]', '', name)) for name in names
    )  # a formula's markup is not shown
    columns = max(1, int(inches / (0.5 + 0.07 * longest)))
    owner.legend(handles, names, frameon=False, fontsize=8, ncols=columns, **place)
    return 0.18 * math.ceil(len(names) / columns)


def bars_axes(axes, baseline, runs, window):
    """The mean of the last `window` steps, without an error: {run: {'mean': difference}}."""
    configs = {run: losses.model_config(run) for run in (baseline, *runs)}
    style = styles(configs)
    names = labels(configs)
    result = {}
    for i, run in enumerate(runs):
        mean = losses.final_difference(baseline, run, window)
        result[run] = {'mean': mean}
        look = {'color': style[run]['color'], 'hatch': HATCHES[style[run]['linestyle']]}
        axes.barh(i, mean, height=0.6, edgecolor='white', **look)

    axes.axvline(0, color='#000000', linewidth=1)
    axes.set_yticks(range(len(runs)), [names[run].replace('+', '\n+') for run in runs], fontsize=8)
    axes.invert_yaxis()
    axes.locator_params(axis='x', nbins=5)
    axes.set_xlabel(
        f"loss minus {names[baseline]}'s (nats)\nmean of the last {window} steps, one seed"
    )
    axes.grid(alpha=0.3, axis='x')
    return result


def scaling_axes(axes, runs, window):
    """Loss against parameters: {model: {'parameters', 'loss', 'runs', ...}}; see losses.savings()."""
    points, colors = {}, {}
    for run in runs:
        config = losses.model_config(run)
        name = model_name(config)
        colors[name] = color_of(config)
        point = losses.parameters_of(run), losses.last_loss(run, window), run
        points.setdefault(name, []).append(point)

    models = {}
    for name, of_model in points.items():
        parameters, loss, names = zip(*sorted(of_model), strict=True)
        models[name] = {
            'parameters': parameters,
            'loss': loss,
            'runs': [str(run) for run in names],
        }
        label = name
        if len(set(parameters)) > 1:
            a, b = models[name]['power_law'] = losses.power_law(parameters, loss)
            label = f'{name}: {a:.3g} $N^{{{-b:+.3g}}}$'
            x = np.geomspace(min(parameters), max(parameters), 50)
            axes.plot(x, a * x**-b, color=colors[name])
        axes.plot(parameters, loss, 'o', color=colors[name], label=label)

    with_law = [name for name, model in models.items() if 'power_law' in model]
    for name in with_law:
        if name != 'vanilla' and 'vanilla' in with_law:
            models[name].update(losses.savings(models, name, window))
    axes.set_xscale('log')
    axes.set_yscale('log')
    axes.set_xlabel('parameters')
    axes.set_ylabel(f'training loss (nats)\nmean of the last {window} steps')
    axes.legend(framealpha=1, fontsize=8)
    axes.grid(alpha=0.3, which='both')
    return models


def critical_axes(axes, pairs, window):
    """The step at which a run is overtaken, against sequence length; pairs: [(baseline, run)].

    Returns [{'length', 'step', 'crossed'}], see losses.critical_step().
    """
    points = []
    for baseline, run in pairs:
        step, crossed = losses.critical_step(baseline, run, window)
        length = read_run_config(run, 'block_size')['block_size']
        points.append({'length': length, 'step': step, 'crossed': crossed})

    color = color_of(losses.model_config(pairs[0][1]))
    known = [point for point in points if point['step'] and point['step'] > 0]
    for point in known:
        face = color if point['crossed'] else 'none'
        axes.plot(point['length'], point['step'], 'o', color=color, markerfacecolor=face)
    if len(known) > 2:  # an exponential fits any two points
        lengths = [point['length'] for point in known]
        logarithms = [np.log(point['step']) for point in known]
        slope, intercept = np.polyfit(lengths, logarithms, 1)
        x = np.linspace(min(lengths), max(lengths), 50)
        label = f'{np.exp(intercept):.3g} exp({slope:.3g} T)'
        axes.plot(x, np.exp(intercept + slope * x), '--', color=color, label=label)
        axes.legend(framealpha=1, fontsize=8)

    missing = [str(point['length']) for point in points if point not in known]
    if missing:
        axes.set_title(f'no sign of crossing: {", ".join(missing)}', fontsize=8)
    axes.set_xlabel('sequence length T (tokens); hollow: predicted')
    axes.set_ylabel('step at which it is overtaken')
    axes.grid(alpha=0.3)
    return points


# --- matplotlib -----------------------------------------------------------------------------------


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise OSError('plotting needs matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')
    matplotlib.rcParams['axes.formatter.min_exponent'] = 2  # a log axis says 2.5, not 2.5 x 10^0
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure, out):
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    print(f'\nwrote {out}')


# --- the program ----------------------------------------------------------------------------------


@dataclass
class DrawConfig:
    runs: tuple = ()  # folders of runs: a baseline, then the runs to compare with it
    window: int = 10  # steps in a running mean (the paper: 10, 50 or 100)
    out: str = ''  # the picture; the ending chooses PNG or PDF; '': relative.png, bars.png, ...

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f'window={self.window} must be at least 1')


def draw_relative(settings):
    baseline, *runs = settings.runs
    figure, axes = pyplot().subplots(figsize=(6.4, 4), layout='constrained')
    lines = relative_axes(axes, baseline, runs, settings.window)
    print(f'Training loss minus that of {baseline}, mean of {settings.window} steps\n')
    print_curves(lines)
    return figure


def print_curves(lines):
    """A table of curves at five steps; a cell is empty where a run has no value."""
    every_step = np.unique(np.concatenate([steps for steps, _ in lines.values()]))
    shares = np.array([0.1, 0.25, 0.5, 0.75, 1.0])
    marks = every_step[np.round(shares * (len(every_step) - 1)).astype(int)]
    print('| run | ' + ' | '.join(f'step {mark}' for mark in marks) + ' |')
    print('|---|' + '---:|' * len(marks))
    for run, (steps, values) in lines.items():
        cells = []
        for mark in marks:
            inside = steps[0] <= mark <= steps[-1]
            last = np.searchsorted(steps, mark, side='right') - 1
            cells.append(f'{values[last]:+.4f}' if inside else '')
        print(f'| {run} | ' + ' | '.join(cells) + ' |')


def draw_bars(settings):
    baseline, *runs = settings.runs
    size = (6.4, 1 + 0.4 * len(settings.runs))
    figure, axes = pyplot().subplots(figsize=size, layout='constrained')
    for run, difference in bars_axes(axes, baseline, runs, settings.window).items():
        print(f'{run}: {difference["mean"]:+.4f}')
    return figure


def draw_scaling(settings):
    figure, axes = pyplot().subplots(figsize=(5, 4), layout='constrained')
    for name, model in scaling_axes(axes, settings.runs, settings.window).items():
        points = zip(model['parameters'], model['loss'], strict=True)
        words = [f'{n:,} parameters {loss:.4f}' for n, loss in points]
        for key in ('parameters_saved', 'tokens_saved'):
            if model.get(key) is not None:
                words.append(f'{key}: {model[key]:.1%}')
        if model.get('why'):
            words.append(f'no saving can be read: {model["why"]}')
        print(f'{name}: {", ".join(words)}')
    return figure


def draw_critical(settings):
    if len(settings.runs) % 2:
        raise ValueError('critical takes pairs: BASELINE RUN BASELINE RUN ...')
    figure, axes = pyplot().subplots(figsize=(5, 4), layout='constrained')
    pairs = list(zip(settings.runs[::2], settings.runs[1::2], strict=True))
    for point in critical_axes(axes, pairs, settings.window):
        print(f'{point["length"]} tokens: {describe_crossing(point)}')
    return figure


def describe_crossing(point):
    if point['step'] is None:
        return 'no sign of it'
    return f'step {point["step"]:.0f}' + ('' if point['crossed'] else ' (predicted)')


DRAWINGS = {
    'relative': draw_relative,
    'bars': draw_bars,
    'scaling': draw_scaling,
    'critical': draw_critical,
}


def main():
    with one_line_errors(ValueError, OSError):
        modes = dict.fromkeys(DRAWINGS, (DrawConfig,))
        kind, (settings,) = choose(modes, __doc__, plain='runs')
        if len(settings.runs) < 2:
            raise ValueError(f'{kind} needs a baseline and at least one other run')
        save(DRAWINGS[kind](settings), settings.out or f'{kind}.png')


if __name__ == '__main__':
    main()
