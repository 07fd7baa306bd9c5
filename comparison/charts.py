"""
The plots of a comparison, each as the text of an SVG on a white ground of its own, so that any viewer
shows it, on light pages and dark ones. The colors are those of paper/analyze.py's pictures, too.
"""

import functools
import io
import math
import re
import textwrap

import numpy as np

INK, FAINT = '#1c1f23', '#d9dde2'
# Okabe and Ito's colors and two of Tol's, which color-blind readers can tell apart; gray.
COLORS = '#000000 #D55E00 #0072B2 #009E73 #CC79A7 #56B4E9 #E69F00 #882255 #999933 #888888'.split()
MINUS = '\N{MINUS SIGN}'
LINES = ('-', '--', ':', '-.')
WIDTH = 4.2  # inches; the page scales them
SIZE = (7.4, 3.7)  # of plots with a legend: in a README, their letters are as large as the text's
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
    import matplotlib

    matplotlib.use('Agg')
    matplotlib.rcParams['axes.formatter.min_exponent'] = 3  # a log axis says 2.5, not 2.5 x 10^0
    import matplotlib.pyplot

    return matplotlib.pyplot


def styled(draw):
    """Let a plot be drawn in this page's style."""

    @functools.wraps(draw)
    def drawn(*args):
        with pyplot().rc_context(STYLE):
            return draw(*args)

    return drawn


# What matplotlib writes, and a page has no use for: what comes before the <svg>, and its size.
NOT_SHOWN = (
    r'^.*?(?=<svg)',
    r'<metadata>.*?</metadata>',
    r'<style type="text/css">.*?</style>',
    r' width="[\d.]+pt" height="[\d.]+pt"',
)


def svg(drawing, label):
    """The figure as an <svg> element for a page; label: what it shows, for screen readers."""
    text = io.StringIO()
    drawing.savefig(text, format='svg', metadata={'Date': None, 'Creator': None})
    pyplot().close(drawing)
    content = text.getvalue()
    for part in NOT_SHOWN:
        content = re.sub(part, '', content, count=1, flags=re.DOTALL)
    content = content.replace('<svg ', f'<svg role="img" aria-label="{label}" ', 1)
    # matplotlib names its own font first.
    return re.sub(r'font: ([\d.]+px) [^;\"]*', r'font-size: \1; font-family: sans-serif', content)


def looks(arms):
    """{arm: its color and line}; no two of 40 are alike. An arm whose name goes on from another's, such
    as vanilla_norm from vanilla, has that one's color in another line."""
    every = [{'color': shade, 'linestyle': line} for line in LINES for shade in COLORS]
    bases = {name: [other for other in arms if name.startswith(f'{other}_')] for name in arms}
    result, free = {}, list(every)
    for name in sorted(arms, key=lambda name: len(bases[name])):
        free = free or list(every)
        shades = [result[base]['color'] for base in bases[name]]
        result[name] = next((look for look in free if look['color'] in shades), free[0])
        free.remove(result[name])
    return result


def seeds_text(count):
    return '1 seed' if count == 1 else f'{count} seeds'


# --- the plots ------------------------------------------------------------------------------------


@styled
def contrasts_plot(contrasts, arms):
    """A dot per seed, the mean and its corrected interval of each contrast, in the color of its first arm."""
    rows = [contrast for contrast in contrasts.values() if contrast['seeds']]
    if not rows:
        return ''
    look, words = looks(arms), 'below 0 is better; small dots are seeds'
    if not all(contrast['ours'] in arms for contrast in rows):
        words = 'below 0 is better; of two leads: the first is larger\nsmall dots are seeds'
    names = [wrapped(f'{each["ours"]} {MINUS} {each["theirs"]}') for each in rows]
    lines = max(name.count('\n') + 1 for name in names)
    size = WIDTH, 0.95 + (0.35 + 0.15 * lines) * len(rows)
    drawing, axes = picture('Difference of validation loss (nats)', size)
    axes.axvline(0, color=INK, linewidth=1.2)
    axes.set_ylim(len(rows) - 0.5, -0.4 - 0.2 * lines)
    axes.spines['left'].set_visible(False)
    for y, (name, contrast) in enumerate(zip(names, rows, strict=True)):
        shade = look[contrast['ours']]['color'] if contrast['ours'] in arms else INK
        dots = list(contrast['differences'].values())
        axes.plot(dots, [y + 0.2] * len(dots), 'o', color=shade, markersize=3, alpha=0.6)
        interval = contrast['low_holm'], contrast['high_holm']
        if None not in interval:
            axes.plot(interval, [y, y], color=shade, linewidth=2)
        axes.plot(contrast['mean'], y, 'D', color=shade, markersize=6)
        # Above its row, where a long name takes nothing from the plot; no line runs through it.
        ground = {'facecolor': 'white', 'edgecolor': 'none', 'pad': 1}
        axes.text(0, y - 0.25, name, transform=axes.get_yaxis_transform(), fontsize=9, bbox=ground)
    axes.set_yticks([])
    axes.locator_params(axis='x', nbins=5)
    axes.set_xlabel(words)
    return svg(drawing, 'Differences with intervals')


def wrapped(name):
    """A name in lines that are no wider than a plot."""
    return textwrap.fill(name, 50, break_on_hyphens=False)


def picture(title, size=SIZE, **options):
    """(figure, its axes), as many as the options of matplotlib's subplots() say."""
    figure, axes = pyplot().subplots(figsize=size, layout='constrained', **options)
    figure.suptitle(title, fontsize=11)
    for ax in np.ravel(axes):
        ax.grid(linewidth=0.4)
    return figure, axes


# Of a legend beside the axes, where it hides nothing.
BESIDE = {'loc': 'center left', 'bbox_to_anchor': (1.05, 0.5), 'frameon': False}


def size_beside(names):
    """The size of a plot that has these names in a legend beside it, which must not be cut."""
    width, height = SIZE
    return width, max(height, 0.6 + 0.22 * len(names))


@styled
def curves_plot(curves, arms):
    """The curve of each seed, thin, and the mean.

    curves: of curves.measure_curves(). arms: all names; that of the baseline, the zero line, is the first.
    """
    if not curves:
        return ''
    baseline, look = arms[0], looks(arms)
    drawing, axes = picture('Training loss relative to the baseline', size_beside(arms))
    axes.axhline(0, color=INK, linewidth=1, label=baseline)
    shown = [0.0]
    for name, arm in curves.items():
        each = list(arm['curves'].values())
        # Not the first tenth of the steps, where losses differ by more than they ever will again.
        shown += np.ravel([curve[len(curve) // 10 :] for curve in each]).tolist()
        if len(each) > 1:
            axes.plot(arm['steps'], np.transpose(each), linewidth=0.5, alpha=0.4, **look[name])
        axes.plot(arm['steps'], np.mean(each, axis=0), linewidth=1.8, label=name, **look[name])
    show_all(axes, shown)
    axes.margins(x=0)
    axes.set_xlabel('step (curves: means over a fiftieth of the steps)')
    axes.set_ylabel(f'{wrapped(f"loss minus {baseline} (nats)")}\nbelow 0: better')
    axes.legend(**BESIDE)
    return svg(drawing, 'Training loss relative to the baseline, over steps')


def show_all(axes, values):
    """Let the y axis show these values, with a margin; others are cut off."""
    margin = 0.1 * (max(values) - min(values)) or 1.0
    axes.set_ylim(min(values) - margin, max(values) + margin)


@styled
def losses_by_rate(tuning, arms):
    """A line per arm: the mean of its tuning runs at each learning rate, and a dot for each run."""
    known = {name: sweep for name, sweep in tuning.items() if sweep['best'] is not None}
    if not known:
        return ''
    title = 'Validation loss by learning rate (dots: runs, diamonds: the best)'
    drawing, axes = picture(title, size_beside(known))
    shown = []
    for name, sweep in known.items():
        look = looks(arms)[name]
        rates, means = list(sweep['means']), list(sweep['means'].values())
        best = rates.index(sweep['best'])
        axes.plot(rates, means, marker='D', markevery=[best], markersize=7, label=name, **look)
        for rate, losses in sweep['trials'].items():
            dots = {'color': look['color'], 'markersize': 3, 'alpha': 0.6}
            axes.plot([rate] * len(losses), losses, 'o', **dots)
            # What is further than a step from the best rate, or has diverged, may lie outside.
            if abs(rates.index(rate) - best) <= 1:
                shown += filter(math.isfinite, losses)
    show_all(axes, shown)
    axes.set_xscale('log')
    every = sorted({rate for sweep in known.values() for rate in sweep['means']})
    axes.set_xticks(every, [f'{rate:g}' for rate in every])
    axes.minorticks_off()
    axes.set_xlabel('learning rate')
    axes.set_ylabel('nats')
    axes.legend(**BESIDE)
    return svg(drawing, 'Validation loss of each arm by learning rate')
