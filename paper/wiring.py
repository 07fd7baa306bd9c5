"""
How models are wired, drawn from model.wire(): whose queries, keys and values a layer uses (Fig. 2).

A layer is a row. A filled box is a tensor that the layer projects; a ring on a line is one that it
borrows from the box at the line's upper end; an arrow brings a source to where it is used. An outlined
box is an output, of attention or of a block.
"""

from dataclasses import dataclass

from model import wire

# --- wiring as arrows -----------------------------------------------------------------------------

# What an arrow does: its line style, and its line in the legend.
KINDS = {
    'borrow': ('-', 'borrowed'),
    'mix': ('-', "mixed into the layer's own"),
    'attend': ((0, (1, 1)), 'attended to as well (Eq. 2)'),
    'add': ((0, (4, 1.5)), "added to attention's output (Eq. 6)"),
    'pull': ((0, (4, 1, 1, 1)), "minus the layer's own, added to the output (Eq. 8)"),
    'average': ('-', "averaged with the block's output"),
}

# Kinds whose arrows end at attention's output.
AT_OUTPUT = ('add', 'pull')

EMBEDDING = 'emb'
OUTPUTS = ('u', 'x')  # of attention, of a block


@dataclass(frozen=True)
class Arrow:
    kind: str  # of KINDS
    part: str  # of the source: q, k or v; x: the output of a block
    source: int | str  # a layer (0-based), or the word of a source that is no layer
    layer: int  # that uses it


def arrows(config):
    """Every Arrow of a GPTConfig, layer by layer."""
    result = []
    for n, layer in enumerate(wire(config)):
        for part, owner in layer.owner.items():
            if owner != n:
                result.append(Arrow('borrow', part, owner, n))
        for part, sources in layer.sources.items():
            result += [Arrow('mix', part, source, n) for _, source in sources]
        result += [Arrow('add', part, source, n) for part, source in layer.added]
        for part, keys in layer.reads.items():  # with residual_map='cross', those of sources, too
            result += [Arrow('attend', part, source, n) for _, source in keys[:-1]]
        if layer.neutreno:
            result.append(Arrow('pull', 'v', 0, n))
        if config.denseformer:
            result += [Arrow('average', 'x', source, n) for source in (EMBEDDING, *range(n))]
    return list(dict.fromkeys(result))


# --- places ---------------------------------------------------------------------------------------

# In the unit of the drawing, a row is 1 high.
HALF = 0.29  # half of a box
LANE = 0.17  # between the lines that run down beside a column
WORDS = 0.68  # above the first layer: the sources that are no layers
NAMES = {'q': 'q', 'k': 'k', 'v': 'v', 'u': 'out', 'x': 'block'}
COLORS = {'q': '#E69F00', 'k': '#009E73', 'v': '#0072B2', 'u': '#999999', 'x': '#CC79A7'}


def lanes_of(every, part):
    """{(kind, source): lane} of the arrows that start in a column and run down beside it.

    One source has one line for all layers that use it. Lines that share a row have different lanes;
    those that start higher are further out, where they cross fewer others.
    """
    ends = {}
    for arrow in every:
        if arrow.part == part and arrow.kind != 'borrow':
            ends[arrow.kind, arrow.source] = max(
                arrow.layer, ends.get((arrow.kind, arrow.source), 0)
            )
    spans = [(row_of(source), end, (kind, source)) for (kind, source), end in ends.items()]
    result, taken = {}, []
    for start, end, key in sorted(spans, key=lambda span: (-span[0], span[1], str(span[2]))):
        lane = 0
        while any(at == lane and start <= b and a <= end for at, a, b in taken):
            lane += 1
        taken.append((lane, start, end))
        result[key] = lane
    return result


def row_of(source):
    """The row of a source; what is no layer stands above the first one."""
    return source if isinstance(source, int) else -1


def columns_of(every):
    """({column: its x}, {column: its lanes}, the width of the drawing) of a model's arrows."""
    kinds = {arrow.kind for arrow in every}
    parts = ['q', 'k', 'v']
    if kinds & set(AT_OUTPUT):
        parts.append('u')
    if 'average' in kinds:
        parts.append('x')
    places, lanes, x = {}, {}, 0.0
    for part in parts:
        places[part] = x
        lanes[part] = lanes_of(every, part)
        beside = 1 + max(lanes[part].values(), default=-1)
        x += 2 * HALF + 0.3 + LANE * beside + 0.06
    return places, lanes, x


# --- drawing --------------------------------------------------------------------------------------

INCHES = 0.4  # of a unit
LETTER = 0.19  # of a model's name, in units
PER_ROW = 5  # models side by side
GAP = 0.9  # between models
HEAD = 1.9  # of a model's name and the names of its columns


def figure_of(plt, configs, title=''):
    """The figure of {name: GPTConfig}; plt: matplotlib.pyplot. A name may have several lines."""
    models = {name: (config, arrows(config)) for name, config in configs.items()}
    rows = [list(models)[i : i + PER_ROW] for i in range(0, len(models), PER_ROW)]
    figure = plt.figure()
    axes = figure.add_axes((0, 0, 1, 1))
    width = depth = 0.0
    for names in rows:
        head = HEAD + 0.5 * max(name.count('\n') for name in names)
        left = 0.0
        for name in names:
            left += draw_model(axes, left, -depth - head, *models[name], name) + GAP
        width = max(width, left - GAP)
        depth += head + max(models[name][0].n_layer for name in names)

    kinds = {}  # {kind: parts that have arrows of it}
    for _, every in models.values():
        for arrow in every:
            kinds.setdefault(arrow.kind, set()).add(arrow.part)
    add_legend(plt, figure, axes, kinds, width, depth, title)
    return figure


def add_legend(plt, figure, axes, kinds, width, depth, title):
    """The legend below the drawing, the title above it, and the figure as large as all of them."""
    handles = legend_of(plt, kinds)
    longest = max(len(handle.get_label()) for handle in handles)
    inches = (width + 1.2) * INCHES
    columns = max(1, int(inches / (0.6 + 0.068 * longest)))
    legend_height = 0.22 * -(-len(handles) // columns) + 0.2
    title_height = 0.35 if title else 0.0
    height = depth * INCHES + legend_height + title_height

    figure.set_size_inches(inches, height)
    axes.set_position((0, legend_height / height, 1, depth * INCHES / height))
    axes.set_axis_off()
    axes.set_xlim(-0.9, width + 0.3)
    axes.set_ylim(-depth, 0)
    place = {'loc': 'lower center', 'ncols': columns, 'frameon': False, 'fontsize': 9}
    place['handlelength'] = 3  # a whole period of each dash
    figure.legend(handles=handles, **place)
    if title:
        figure.text(0.5, 1 - 0.22 / height, title, ha='center', va='center', fontsize=10)


def draw_model(axes, left, top, config, every, name):
    """Draw a model with its first layer at `top`. Returns the width."""
    places, lanes, width = columns_of(every)
    width = max(width, LETTER * max(len(line) for line in name.splitlines()))
    axes.text(left - HALF, top + 1.4, name, va='bottom', fontsize=10, linespacing=1.1)
    for part, x in places.items():
        axes.text(left + x, top + 1.1, NAMES[part], ha='center', va='center', fontsize=9)
    for n in range(config.n_layer):
        look = {'ha': 'right', 'va': 'center', 'color': '#777777', 'fontsize': 9}
        axes.text(left - HALF - 0.12, top - n, n + 1, **look)

    borrowed = {(arrow.part, arrow.layer) for arrow in every if arrow.kind == 'borrow'}
    for arrow in every:
        if arrow.kind == 'borrow':
            draw_borrowing(axes, left + places[arrow.part], top, arrow)
    for part, x in places.items():
        words = {arrow.source for arrow in every if arrow.part == part} - {*range(config.n_layer)}
        if words:
            draw_box(axes, left + x, top + WORDS, part, ', '.join(sorted(words)))
        for n in range(config.n_layer):
            if (part, n) not in borrowed:
                draw_box(axes, left + x, top - n, part)
        for (kind, source), lane in lanes[part].items():
            layers = [a.layer for a in every if (a.kind, a.part, a.source) == (kind, part, source)]
            draw_lane(axes, left, top, places, (kind, part, source), lane, sorted(layers))
    return width


def draw_box(axes, x, y, part, text=''):
    from matplotlib.patches import FancyBboxPatch

    color = COLORS[part]
    look = {'boxstyle': 'round,pad=0,rounding_size=0.1', 'edgecolor': color, 'linewidth': 1.3}
    face, ink = color, 'white'
    if part in OUTPUTS:
        face, ink = 'white', color
    corner = (x - HALF, y - HALF)
    axes.add_patch(FancyBboxPatch(corner, 2 * HALF, 2 * HALF, facecolor=face, **look))
    axes.text(x, y, text, ha='center', va='center', fontsize=7, color=ink)


def draw_borrowing(axes, x, top, arrow):
    """A line down from the owner to a ring."""
    color = COLORS[arrow.part]
    axes.plot([x, x], [top - row_of(arrow.source), top - arrow.layer], color=color, linewidth=1.5)
    ring = {'marker': 'o', 'markersize': 7, 'markerfacecolor': 'white', 'markeredgewidth': 1.5}
    axes.plot([x], [top - arrow.layer], color=color, zorder=3, **ring)


def draw_lane(axes, left, top, places, line, lane, layers):
    """One source's line: out of its box, down beside the column, with an arrow into each layer.

    It leaves the lower half of a box and enters the upper half, so that both can be told apart.
    """
    kind, part, source = line
    dashes, _ = KINDS[kind]
    look = {'color': COLORS[part], 'linewidth': 1.3, 'linestyle': dashes}
    edge = left + places[part] + HALF
    x = edge + 0.26 + LANE * lane
    row = -source if isinstance(source, int) else WORDS
    start = top + row - 0.13
    axes.plot([edge, x, x], [start, start, top - layers[-1] + 0.13], **look)

    goal = edge
    if kind in AT_OUTPUT:
        goal = left + places['u'] - HALF
    for layer in layers:
        y = top - layer + 0.13
        axes.plot([x, goal], [y, y], **look)
        tip = {'arrowstyle': '-|>', 'color': COLORS[part], 'shrinkA': 0, 'shrinkB': 0}
        outside = goal + (0.12 if goal < x else -0.12)
        axes.annotate('', xy=(goal, y), xytext=(outside, y), arrowprops=tip, zorder=4)
        if layer != layers[-1]:
            axes.plot([x], [y], marker='o', markersize=2.5, color=COLORS[part])


def legend_of(plt, kinds):
    """Handles for what is in the drawing, in color where one color alone has it."""
    line = plt.matplotlib.lines.Line2D
    gray = '#555555'
    box = {'marker': 's', 'markersize': 8, 'linestyle': 'none', 'color': gray}
    handles = [line([], [], label='projected in this layer', **box)]
    for kind, (dashes, text) in KINDS.items():
        if kind not in kinds:
            continue
        color = gray
        if len(kinds[kind]) == 1:
            (part,) = kinds[kind]
            color = COLORS[part]
        look = {'linestyle': dashes, 'color': color, 'label': text}
        if kind == 'borrow':
            look |= {'marker': 'o', 'markerfacecolor': 'white'}
        else:
            look |= {'marker': '<', 'markevery': [0], 'markersize': 5}
        handles.append(line([], [], **look))
    return handles
