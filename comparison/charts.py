"""
The plots of a comparison, each as the text of an SVG whose colors follow the page's light or dark.

Colors are placeholders here, which svg() replaces by the page's CSS variables: --ink for text and
axes, --faint for grids, --c0 for the baseline and --c1, --c2, ... for the other arms.
"""

import functools
import io
import math
import re

INK, FAINT = '#010101', '#020202'
MINUS, TIMES = '\N{MINUS SIGN}', '\N{MULTIPLICATION SIGN}'
COLORS = 9  # --c0 to --c8; more arms begin again, dashed
WIDTH, HEIGHT = 4.6, 3.2  # inches; the page scales them
STYLE = {
    'svg.fonttype': 'none',
    'svg.hashsalt': 'comparison',  # the same drawing is the same text
    'text.color': INK,
    'axes.labelcolor': INK,
    'axes.edgecolor': INK,
    'axes.titlesize': 'medium',
    'axes.titlelocation': 'left',
    'axes.spines.top': False,
    'axes.spines.right': False,
    'xtick.color': INK,
    'ytick.color': INK,
    'grid.color': FAINT,
    'font.size': 9,
    'axes.formatter.useoffset': False,
    'axes.formatter.min_exponent': 3,
}


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise OSError('drawing needs matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')
    import matplotlib.pyplot

    return matplotlib.pyplot


def styled(draw):
    """Let a plot be drawn in this page's style, and leave matplotlib's own as it is for others."""

    @functools.wraps(draw)
    def drawn(*args):
        with pyplot().rc_context(STYLE):
            return draw(*args)

    return drawn


def color(index):
    """The placeholder of --c<index>."""
    return f'#03{index % COLORS:02x}03'


def figure(height=HEIGHT, title=''):
    drawing, axes = pyplot().subplots(figsize=(WIDTH, height), layout='constrained')
    axes.set_title(title)
    axes.set_axisbelow(True)
    axes.grid(linewidth=0.6)
    return drawing, axes


def svg(drawing, label):
    """The figure as an <svg> element for a page; label: what it shows, for screen readers."""
    text = io.StringIO()
    drawing.savefig(text, format='svg', transparent=True, metadata={'Date': None, 'Creator': None})
    pyplot().close(drawing)
    content = text.getvalue()
    content = content[content.index('<svg') :]
    content = re.sub(r'<metadata>.*?</metadata>', '', content, flags=re.DOTALL)
    content = re.sub(r'<style type="text/css">.*?</style>', '', content, flags=re.DOTALL)
    content = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', '', content, count=1)
    content = content.replace('<svg ', f'<svg role="img" aria-label="{label}" ', 1)
    content = content.replace(INK, 'var(--ink)').replace(FAINT, 'var(--faint)')
    for index in range(COLORS):
        content = content.replace(color(index), f'var(--c{index})')
    # matplotlib names its own font first; the page has one.
    return re.sub(r'font: ([\d.]+px) [^;\"]*', r'font-size: \1; font-family: inherit', content)


def zero_line(axes, vertical=False):
    line = axes.axvline if vertical else axes.axhline
    line(0, color=color(0), linewidth=1.2)


def legend(axes):
    """Above the axes, where it hides no curve, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    longest = max(map(len, labels))
    axes.figure.legend(
        handles,
        labels,
        loc='outside upper left',
        ncols=max(1, min(4, 62 // (longest + 7))),
        frameon=False,
        fontsize=8,
    )


def line_style(index):
    return {'color': color(index), 'linestyle': '-' if index < COLORS else '--'}


# --- the plots ------------------------------------------------------------------------------------


@styled
def forest(contrasts, arms):
    """A row per contrast: a dot per seed, the mean, its 95% interval."""
    rows = [(name, c) for name, c in contrasts.items() if c['seeds']]
    if not rows:
        return ''
    drawing, axes = figure(0.95 + 0.42 * len(rows), 'Difference of validation loss (nats)')
    zero_line(axes, vertical=True)
    for y, (_, c) in enumerate(rows):
        shade = color(arms.index(c['ours']))
        values = list(c['differences'].values())
        axes.plot(values, [y + 0.18] * len(values), 'o', color=shade, markersize=3, alpha=0.6)
        if c['low'] is not None:
            axes.plot([c['low'], c['high']], [y, y], color=shade, linewidth=2)
        axes.plot(c['mean'], y, 'D', color=shade, markersize=6)
    names = [f'{c["ours"]} {MINUS} {c["theirs"]}' for _, c in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.grid(False, axis='y')
    axes.tick_params(axis='y', length=0)
    axes.locator_params(axis='x', nbins=5)
    axes.set_xlabel('\N{LEFTWARDS ARROW} lower is better; small dots are seeds')
    return svg(drawing, 'Differences with intervals')


def curve_limits(axes, curves, begin):
    """Limits from [(x, y)] where x is at least a share `begin` of the end: the first steps, where
    losses fall by nats, must not squeeze the rest."""
    inside = [0.0]
    for x, y in curves:
        inside += [value for mark, value in zip(x, y, strict=True) if mark >= begin * x[-1]]
    margin = 0.08 * (max(inside) - min(inside)) or 0.01
    axes.set_ylim(min(inside) - margin, max(inside) + margin)


def logarithmic_axis(axes, label):
    axes.set_xscale('log')
    low, high = axes.get_xlim()
    if 1e-3 < low and high < 1e5:
        axes.xaxis.set_major_formatter(lambda x, position: f'{x:,g}')
    axes.set_xlabel(label)


@styled
def relative_curves(curves, arms):
    """Training loss minus the baseline's: seeds thin, mean thick, its 95% interval as a band.

    With more than two arms, a panel for each.
    """
    if not curves:
        return ''
    panels = [[name] for name in curves] if len(curves) > 2 else [list(curves)]
    rows, columns = math.ceil(len(panels) / 2), min(2, len(panels))
    height = HEIGHT if rows == 1 else 0.6 + 1.6 * rows
    drawing, grid = pyplot().subplots(
        rows,
        columns,
        figsize=(WIDTH, height),
        layout='constrained',
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    title = 'Training loss minus the baseline\N{RIGHT SINGLE QUOTATION MARK}s (nats)'
    if len(panels) > 1:
        drawing.suptitle(title, x=0.02, ha='left', fontsize=10)
    else:
        grid[0, 0].set_title(title)
    lines = []
    for axes, names in zip(grid.flat, panels, strict=False):
        axes.grid(linewidth=0.6)
        zero_line(axes)
        for name in names:
            lines += relative_curve(axes, curves[name], name, line_style(arms.index(name)))
        if len(panels) > 1:
            axes.set_title(names[0], fontsize=9)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    curve_limits(grid[0, 0], lines, 0.03)
    # The lowest panel of each column has the labels.
    for axes in grid.flat[max(0, len(panels) - columns) : len(panels)]:
        logarithmic_axis(axes, 'step')
        axes.tick_params(labelbottom=True)
    if len(panels) == 1:
        legend(grid[0, 0])
    return svg(drawing, 'Training loss relative to the baseline, over steps')


def relative_curve(axes, curve, name, style):
    """One arm; returns [(steps, values)] of its seeds."""
    steps = [step + 1 for step in curve['steps']]
    if curve['half']:
        pairs = list(zip(curve['mean'], curve['half'], strict=True))
        low, high = [m - h for m, h in pairs], [m + h for m, h in pairs]
        axes.fill_between(steps, low, high, color=style['color'], alpha=0.18, linewidth=0)
    for values in curve['seeds'].values():
        axes.plot(steps, values, linewidth=0.6, alpha=0.5, **style)
    axes.plot(steps, curve['mean'], linewidth=1.8, label=name, **style)
    return [(steps, values) for values in curve['seeds'].values()]


@styled
def equal_cost_curves(curves, arms, kind, per_step):
    """The mean curves against the baseline's loss at equal time or FLOPs. per_step: {arm: cost}."""
    curves = {name: curve for name, curve in curves.items() if kind in curve}
    ratios = [curve[kind]['ratio'] for curve in curves.values()]
    if not curves or max(abs(ratio - 1) for ratio in ratios) < 0.002:
        return ''
    title = {'time': 'The same at equal training time', 'flops': 'The same at equal FLOPs'}[kind]
    drawing, axes = figure(title=f'{title} (nats)')
    zero_line(axes)
    lines = []
    for name, curve in curves.items():
        points = curve[kind]
        cost = [step * per_step[name] for step in points['steps']]
        label = f'{name} ({TIMES}{points["ratio"]:.2f})'
        axes.plot(cost, points['mean'], linewidth=1.8, label=label, **line_style(arms.index(name)))
        lines.append((cost, points['mean']))
    curve_limits(axes, lines, 0.1)
    label = {'time': 'seconds', 'flops': 'training FLOPs'}[kind]
    logarithmic_axis(axes, label)
    legend(axes)
    return svg(drawing, title)


@styled
def domain_differences(domains, contrasts, arms):
    """Per domain: mean difference and 95% interval of each contrast."""
    rows = {name: d for name, d in domains.items() if any(x['seeds'] for x in d.values())}
    names = list(next(iter(rows.values()), {}))
    if len(names) < 2:
        return ''
    height = 0.9 + len(names) * max(0.26, 0.13 * len(rows))
    drawing, axes = figure(height, 'Per domain')
    zero_line(axes, vertical=True)
    for i, (contrast, by_domain) in enumerate(rows.items()):
        c = contrasts[contrast]
        shade = line_style(arms.index(c['ours']))['color']
        offset = (i + 0.5) / len(rows) * 0.7 - 0.35
        label = f'{c["ours"]} {MINUS} {c["theirs"]}'
        marker = 'o' if c['theirs'] == arms[0] else 's'
        for y, domain in enumerate(names):
            numbers = by_domain[domain]
            if numbers['low'] is not None:
                ends = [numbers['low'], numbers['high']]
                axes.plot(ends, [y + offset] * 2, color=shade, linewidth=1.2, alpha=0.8)
            if numbers['seeds']:
                axes.plot(
                    numbers['mean'], y + offset, marker, color=shade, markersize=4, label=label
                )
                label = None
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(False, axis='y')
    axes.tick_params(axis='y', length=0)
    axes.locator_params(axis='x', nbins=5)
    axes.set_xlabel('nats')
    legend(axes)
    return svg(drawing, 'Differences per domain')


@styled
def rate_sweep(tuning, arms):
    """Validation loss against learning rate on the tuning seeds; the chosen rate is ringed."""
    drawing, axes = figure(title='Learning rate, on the tuning seeds')
    ticks = set()
    for name, sweep in tuning.items():
        shade = color(arms.index(name))
        rates, means = [], []
        for rate, trial in sweep['trials'].items():
            losses = [loss for loss in trial['losses'].values() if math.isfinite(loss)]
            axes.plot([rate] * len(losses), losses, 'o', color=shade, markersize=2.5, alpha=0.5)
            if trial['complete'] and math.isfinite(trial['mean']):
                rates.append(rate)
                means.append(trial['mean'])
        if not rates:
            continue
        ticks.update(rates)
        axes.plot(rates, means, '-o', markersize=4, label=name, color=shade)
        if sweep['best'] is not None:
            lowest = sweep['trials'][sweep['best']]['mean']
            axes.plot(sweep['best'], lowest, 'o', color=shade, markersize=11, fillstyle='none')
    if not ticks:
        pyplot().close(drawing)
        return ''
    axes.set_xscale('log')
    axes.set_xticks(sorted(ticks), [f'{rate:g}' for rate in sorted(ticks)])
    axes.minorticks_off()
    axes.set_xlabel('learning rate; ring: chosen')
    axes.set_ylabel('validation loss (nats)')
    legend(axes)
    return svg(drawing, 'Loss against learning rate')


@styled
def gradient_norms(norms, arms):
    if not norms:
        return ''
    drawing, axes = figure(title='Gradient norm, mean over seeds')
    for name, curve in norms.items():
        steps = [step + 1 for step in curve['steps']]
        axes.plot(steps, curve['mean'], linewidth=1.4, label=name, **line_style(arms.index(name)))
    axes.set_yscale('log')
    logarithmic_axis(axes, 'step')
    legend(axes)
    return svg(drawing, 'Gradient norms')
