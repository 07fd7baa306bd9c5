"""
The plots of a comparison, each as the text of an SVG whose colors follow the page's light or dark.

Colors are placeholders here, which svg() replaces by the page's CSS variables: --ink for text and
axes, --faint for grids, --c0 for the baseline and --c1, --c2, ... for the other arms.
"""

import functools
import io
import math
import re
import textwrap

import numpy as np

from comparison.verdict import describe, half_width

INK, FAINT = '#010101', '#020202'
MINUS, TIMES = '\N{MINUS SIGN}', '\N{MULTIPLICATION SIGN}'
COLORS = 9  # --c0 to --c8
LINES = ('-', '--', ':', '-.')
WIDTH = 4.2  # inches; the page scales them
SIZE = (7.4, 3.7)  # of curves: in a README, their letters are as large as the text's
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
    'font.size': 10,
    'axes.formatter.useoffset': False,
}


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise OSError('drawing needs matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')
    matplotlib.rcParams['axes.formatter.min_exponent'] = 3  # a log axis says 2.5, not 2.5 x 10^0
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


def looks(arms):
    """{arm: its color and line}; no two of 36 are alike. An arm whose name goes on from another's, such
    as vanilla_norm from vanilla, has that one's color in another line."""
    bases = {name: [other for other in arms if name.startswith(f'{other}_')] for name in arms}
    result, free = {}, []
    for name in sorted(arms, key=lambda name: len(bases[name])):
        free = free or [(line, color(index)) for line in LINES for index in range(COLORS)]
        of_bases = [result[base]['color'] for base in bases[name]]
        line, shade = next((one for one in free if one[1] in of_bases), free[0])
        free.remove((line, shade))
        result[name] = {'color': shade, 'linestyle': line}
    return result


def signed(value, digits=4):
    return '' if value is None else f'{value:+.{digits}f}'.replace('-', MINUS)


def seeds_text(count):
    return '1 seed' if count == 1 else f'{count} seeds'


# --- the plots ------------------------------------------------------------------------------------


@styled
def forest(contrasts, arms):
    """A row per contrast: a dot per seed, the mean, its 95% interval, corrected where it can be."""
    rows = [c for c in contrasts.values() if c['seeds']]
    if not rows:
        return ''
    look = looks(arms)
    drawing, axes = rows_of((WIDTH, 0.95 + 0.5 * len(rows)), len(rows))
    axes.set_title('Difference of validation loss (nats)')
    axes.grid(linewidth=0.6)
    for y, c in enumerate(rows):
        shade = look[c['ours']]['color'] if c['ours'] in arms else INK  # of a lead
        draw_row(axes, y, c, shade, (c['low_holm'], c['high_holm']))
        # Above its row, where a long name takes nothing from the plot.
        name = f'{c["ours"]} {MINUS} {c["theirs"]}'
        axes.text(0, y - 0.25, name, transform=axes.get_yaxis_transform(), fontsize=9)
    axes.set_yticks([])
    axes.locator_params(axis='x', nbins=5)
    axes.set_xlabel('below 0 is better; small dots are seeds')
    return svg(drawing, 'Differences with intervals')


def rows_of(size, count):
    """(figure, its axes) for draw_row(), with a line at 0 and the first row at the top."""
    drawing, axes = pyplot().subplots(figsize=size, layout='constrained')
    axes.axvline(0, color=color(0), linewidth=1.2)
    axes.set_ylim(count - 0.5, -0.6)
    return drawing, axes


def draw_row(axes, y, numbers, shade, interval, sign=1, label=None):
    """A dot per seed, the interval and the mean of verdict.describe()'s numbers."""
    dots = [sign * value for value in numbers['differences'].values()]
    axes.plot(dots, [y + 0.2] * len(dots), 'o', color=shade, markersize=3, alpha=0.6)
    if None not in interval:
        axes.plot([sign * end for end in interval], [y, y], color=shade, linewidth=2)
    axes.plot(sign * numbers['mean'], y, 'D', color=shade, markersize=6, label=label)


def picture(title, size=SIZE, **options):
    """(figure, its axes), as many as the options of matplotlib's subplots() say."""
    figure, axes = pyplot().subplots(figsize=size, layout='constrained', **options)
    figure.suptitle(title, fontsize=11)
    for ax in np.ravel(axes):
        ax.grid(linewidth=0.4)
    return figure, axes


# Of a legend beside the axes, where it hides nothing.
BESIDE = {'loc': 'center left', 'bbox_to_anchor': (1.05, 0.5), 'frameon': False}


def curves_picture(arms, labels, look, baseline, smooth, title=''):
    """The curve of each seed, thin, and the mean; beside them where they end, with 95% intervals.

    arms: from curves.measure_curves(). labels, look: {name: ...}. baseline: what the zero line is.
    """
    figure, (left, right) = picture(title, ncols=2, width_ratios=(5, 1), sharey=True)
    left.axhline(0, color=INK, linewidth=1)
    right.axhline(0, color=INK, linewidth=1, label=baseline)
    shown = [0.0]
    for column, (name, arm) in enumerate(arms.items()):
        each = list(arm['curves'].values())
        # Not the first tenth of the steps, where losses differ by more than they ever will again.
        shown += np.ravel([curve[len(curve) // 10 :] for curve in each]).tolist()
        shown += arm['ends'].values()
        if len(each) > 1:
            left.plot(arm['steps'], np.transpose(each), linewidth=0.5, alpha=0.4, **look[name])
        left.plot(arm['steps'], np.mean(each, axis=0), linewidth=1.8, **look[name])
        draw_end(right, column, describe(arm['ends']), labels[name], look[name])
    show_all(left, shown)
    left.margins(x=0)
    left.set_xlabel(f'step (curves: mean of {smooth} steps)')
    left.set_ylabel(f'loss minus {baseline} (nats)\nbelow 0: better')
    left.set_title('training loss', fontsize=10)
    right.set_title(next(iter(arms.values()))['end'], fontsize=10)
    counts = sorted({len(arm['ends']) for arm in arms.values()})
    right.set_xlabel(' or '.join(map(seeds_text, counts)))
    right.set_xlim(-0.7, len(arms) - 0.3)
    right.set_xticks([])
    right.legend(**BESIDE)
    return figure


def draw_end(axes, x, end, label, look):
    """Seeds, mean and interval in a column of their own; end: from verdict.describe()."""
    words = signed(end['mean'], 3)
    if end['low'] is not None:
        words += f' ± {half_width(end):.3f}'
        axes.plot([x, x], [end['low'], end['high']], color=look['color'])
    dots = list(end['differences'].values())
    axes.plot([x - 0.25] * len(dots), dots, 'o', color=look['color'], markersize=2.5, alpha=0.6)
    axes.plot(x, end['mean'], 'D', markersize=4, color=look['color'])
    axes.plot([], [], label=textwrap.fill(f'{words}  {label}', 30), **look)


def show_all(axes, values):
    """Let the y axis show these values, with a margin, and what else there is as far as it goes."""
    margin = 0.1 * (max(values) - min(values)) or 1.0
    axes.set_ylim(min(values) - margin, max(values) + margin)


@styled
def relative_curves(curves, arms, smooth):
    """curves_picture() of a comparison's arms, of which the first is the baseline."""
    if not curves:
        return ''
    labels = dict(zip(curves, curves, strict=True))
    drawing = curves_picture(curves, labels, looks(arms), arms[0], smooth)
    return svg(drawing, 'Training loss relative to the baseline, over steps')


@styled
def losses_by_rate(tuning, arms):
    """A line per arm: the mean of its tuning runs at each learning rate, and a dot for each run."""
    known = {name: sweep for name, sweep in tuning.items() if sweep['best'] is not None}
    if not known:
        return ''
    drawing, axes = picture('Validation loss by learning rate (dots: runs, diamonds: the best)')
    ends = []
    for name, sweep in known.items():
        look = looks(arms)[name]
        rates, means = map(list, (sweep['means'], sweep['means'].values()))
        best = rates.index(sweep['best'])
        axes.plot(rates, means, marker='D', markevery=[best], markersize=7, label=name, **look)
        for rate, losses in sweep['trials'].items():
            dots = {'color': look['color'], 'markersize': 3, 'alpha': 0.6}
            axes.plot([rate] * len(losses), losses, 'o', **dots)
        ends += means[max(0, best - 1) : best + 2]
    # What is further than a step from the best rate, or has diverged, may lie outside.
    show_all(axes, [loss for loss in ends if math.isfinite(loss)])
    axes.set_xscale('log')
    rates = sorted({rate for sweep in known.values() for rate in sweep['means']})
    axes.set_xticks(rates, [f'{rate:g}' for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel('learning rate')
    axes.set_ylabel('nats')
    axes.legend(**BESIDE)
    return svg(drawing, 'Validation loss of each arm by learning rate')


@styled
def mixing_weights(mixing, arms):
    """The mixing weights that layers have learned: a color per arm, a line per seed."""
    mixing = {name: seeds for name, seeds in mixing.items() if seeds}
    if not mixing:
        return ''
    drawing, axes = picture('Learned mixing weights (dots: sources, squares: own)')
    for name, seeds in mixing.items():
        look = {'color': looks(arms)[name]['color'], 'markersize': 3, 'linewidth': 1}
        axes.plot([], [], label=name, **look)
        for layers in seeds.values():
            _, own = axes.plot(list(layers), list(layers.values()), '-o', **look)
            own.set(linestyle='--', marker='s')
    axes.set_xlabel('layer')
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(**BESIDE)
    return svg(drawing, 'Learned mixing weights by layer, a line per seed')
