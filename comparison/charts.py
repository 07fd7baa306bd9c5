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
WIDTH, HEIGHT = 4.2, 3.0  # inches; the page scales them
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


def line_style(index):
    return {'color': color(index), 'linestyle': '-' if index < COLORS else '--'}


# --- the plots ------------------------------------------------------------------------------------


@styled
def forest(contrasts, arms):
    """A row per contrast: a dot per seed, the mean, its 95% interval, corrected where it can be."""
    rows = [c for c in contrasts.values() if c['seeds']]
    if not rows:
        return ''
    drawing, axes = rows_of((WIDTH, 0.95 + 0.5 * len(rows)), len(rows))
    axes.set_title('Difference of validation loss (nats)')
    axes.grid(linewidth=0.6)
    for y, c in enumerate(rows):
        draw_row(axes, y, c, color(arms.index(c['ours'])), (c['low_holm'], c['high_holm']))
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
    zero_line(axes, vertical=True)
    axes.set_ylim(count - 0.5, -0.6)
    return drawing, axes


def draw_row(axes, y, numbers, shade, interval, sign=1, label=None):
    """A dot per seed, the interval and the mean of verdict.describe()'s numbers."""
    dots = [sign * value for value in numbers['differences'].values()]
    axes.plot(dots, [y + 0.2] * len(dots), 'o', color=shade, markersize=3, alpha=0.6)
    if None not in interval:
        axes.plot([sign * end for end in interval], [y, y], color=shade, linewidth=2)
    axes.plot(sign * numbers['mean'], y, 'D', color=shade, markersize=6, label=label)


def panels(count, title):
    """(figure, grid of axes), two in a row at most, with one title; axes that are not used are gone."""
    rows, columns = math.ceil(count / 2), min(2, count)
    drawing, grid = pyplot().subplots(
        rows,
        columns,
        figsize=(WIDTH, HEIGHT if rows == 1 else 0.6 + 1.7 * rows),
        layout='constrained',
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    drawing.suptitle(title, x=0.02, ha='left', fontsize=10)
    for axes in grid.flat:
        axes.grid(linewidth=0.6)
        axes.tick_params(labelbottom=True)
    for axes in grid.flat[count:]:
        axes.remove()
    return drawing, grid


@styled
def relative_curves(curves, arms):
    """Training loss minus the baseline's: seeds thin, mean thick, its 95% interval as a band.

    A panel for each arm.
    """
    if not curves:
        return ''
    title = 'Training loss minus the baseline\N{RIGHT SINGLE QUOTATION MARK}s (nats)'
    drawing, grid = panels(len(curves), title)
    late = [0.0]
    for axes, (name, curve) in zip(grid.flat, curves.items(), strict=False):
        style, steps = line_style(arms.index(name)), curve['steps']
        zero_line(axes)
        if curve['half']:
            pairs = list(zip(curve['mean'], curve['half'], strict=True))
            low, high = [m - h for m, h in pairs], [m + h for m, h in pairs]
            axes.fill_between(steps, low, high, color=style['color'], alpha=0.18, linewidth=0)
        for values in curve['seeds'].values():
            axes.plot(steps, values, linewidth=0.6, alpha=0.5, **style)
            # The first steps, where losses fall by nats, must not squeeze the rest.
            late += [
                value for step, value in zip(steps, values, strict=True) if step > steps[-1] / 10
            ]
        axes.plot(steps, curve['mean'], linewidth=1.8, **style)
        axes.set_title(name, fontsize=9)
        axes.set_xscale('log')
        axes.xaxis.set_major_formatter(lambda x, position: f'{x:,g}')
        axes.set_xlabel('step')
    margin = 0.08 * (max(late) - min(late)) or 0.01
    axes.set_ylim(min(late) - margin, max(late) + margin)
    return svg(drawing, 'Training loss relative to the baseline, over steps')


@styled
def mixing_weights(mixing, arms):
    """The mixing weights that layers have learned: a panel per arm, a line per seed."""
    mixing = {name: seeds for name, seeds in mixing.items() if seeds}
    if not mixing:
        return ''
    drawing, grid = panels(len(mixing), 'Learned mixing weights (dots: sources, squares: own)')
    for axes, (name, seeds) in zip(grid.flat, mixing.items(), strict=False):
        shade = color(arms.index(name))
        for layers in seeds.values():
            sources, own = zip(*layers.values(), strict=True)
            axes.plot(list(layers), sources, '-o', color=shade, markersize=3, linewidth=1)
            axes.plot(list(layers), own, '--s', color=color(0), markersize=3, linewidth=1)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel('layer')
        axes.xaxis.get_major_locator().set_params(integer=True)
    return svg(drawing, 'Learned mixing weights by layer, a line per seed')
