"""
How models are wired, drawn from model.wire(): whose queries, keys and values a layer uses (Fig. 2).

A layer is a row. A filled box is a tensor that the layer projects, a ring one that it does not; a line or
an arrow comes from its source. An open box is an output, of attention or of a block.

$ python -m paper.wiring vanilla vanilla+n_layer=4+v_residual=all out/svformer_82m

A word is a model of config/, with +setting=value, or the folder of a run. --out=FILE.png, .svg or .pdf is
the picture.
"""

from dataclasses import dataclass

from comparison.charts import picture
from comparison.runs import gpt_config, read_run_config
from configurator import configure
from lib.files import one_line_errors
from model import wire
from paper.draw import save
from paper.figures import PAPER, Arm

# What an arrow does: its line style, and its line in the legend.
KINDS = {
    'borrow': ('-', 'borrowed'),
    'join': ('-', 'some heads borrowed'),
    'mix': ('-', "mixed into the layer's own"),
    'attend': (':', 'attended to as well (Eq. 2)'),
    'add': ('--', "added to attention's output (Eq. 6)"),
    'pull': ('-.', "minus the layer's own, added to the output (Eq. 8)"),
    'enter': ('-', 'mixed into what the block reads'),
    'average': ('-', "averaged with the block's output"),
}
GOALS = {'add': 'out', 'pull': 'out'}  # columns in which arrows end, where that is not their own
COLUMNS = {'q': '#E69F00', 'k': '#009E73', 'v': '#0072B2', 'out': '#999999', 'block': '#CC79A7'}

# The fields of GPTConfig that arrows() draws, and those that move no tensor between layers.
DRAWN = set(
    'v_residual q_residual k_residual residual_layers residual_map share_q share_k share_v '
    'share_v_heads neutreno denseformer x0_residual'.split()
)
OF_ONE_LAYER = set(
    'n_kv_head arch rope_theta rope_scaling norm_eps dropout tie_embeddings embed_norm residual_lambda '
    'residual_weights gate_inputs gate_bias gate_rank exclusive qk_norm'.split()
)


# Words for the sources that are no layers.
OUTER = {'ve': 'token', 'vx': 'x_0'}


@dataclass(frozen=True)
class Arrow:
    kind: str  # of KINDS
    part: str  # of the source: q, k or v; block: the output of a block
    source: int | str  # a layer (0-based), or the word of a source that is no layer
    layer: int  # that uses it


def arrows(config):
    """Every Arrow of a GPTConfig, layer by layer."""
    result = []
    for n, layer in enumerate(wire(config)):
        uses = []  # (kind, part, source)
        for part in layer.parts:
            if part.owner != n:
                uses.append(('borrow', part.name, part.owner))
            uses += [('join', *lender) for lender in part.joins]
            uses += [('mix', *source) for source in part.sources]
        uses += [('add', *source) for source in layer.added]
        for keys in layer.reads.values():  # with residual_map='cross', those of sources, too
            uses += [('attend', *source) for source in keys[:-1]]
        if layer.neutreno:
            uses.append(('pull', 'v', 0))
        if config.x0_residual:
            uses.append(('enter', 'block', 'x_0'))
        if config.denseformer:
            uses += [('average', 'block', source) for source in ('emb', *range(n))]
        result += [Arrow(*use, n) for use in dict.fromkeys(uses)]
    return result


def not_drawn(config):
    """In words, the settings of a model that its arrows do not show, such as those of a fork."""
    unknown = config.variant().keys() - DRAWN - OF_ONE_LAYER
    return ', '.join(f'not drawn: {name}={getattr(config, name)}' for name in sorted(unknown))


# --- the drawing ----------------------------------------------------------------------------------


def wiring_figure(configs, title=''):
    """The figure of {name: GPTConfig}."""
    depth = max(config.n_layer for config in configs.values())
    size = (2.1 * len(configs), 0.45 * depth + 1.9)
    figure, grid = picture(title, size, ncols=len(configs), squeeze=False)
    legend = {}
    for axes, (name, config) in zip(grid[0], configs.items(), strict=True):
        axes.set_axis_off()
        draw_model(axes, config)
        words = name.replace('+', '\n+')  # in a narrow column
        axes.set_title(f'{words}\n{not_drawn(config)}'.strip(), fontsize=10)
        axes.set_ylim(depth - 0.5, -1.6)
        handles, labels = axes.get_legend_handles_labels()
        legend = dict(zip(labels, handles, strict=True)) | legend
    figure.legend(legend.values(), legend, loc='outside lower center', ncols=3, frameon=False)
    return figure


def draw_model(axes, config):
    """Draw a model, its first layer at the top."""
    every = arrows(config)
    used = {'q', 'k', 'v'}
    for arrow in every:
        used |= {arrow.part, GOALS.get(arrow.kind, arrow.part)}
    places = {part: x for x, part in enumerate(part for part in COLUMNS if part in used)}
    projected = {part.key for layer in wire(config) for part in layer.parts if part.projects}
    for part, x in places.items():
        color = COLUMNS[part]
        axes.text(x, -1.2, part, ha='center', color=color)
        for n in range(config.n_layer):
            look = {'marker': 's', 's': 110, 'facecolor': 'white'}
            if (part, n) in projected:
                look['facecolor'] = color
            elif part in 'qkv':
                look = {'s': 50, 'facecolor': 'white', 'zorder': 3}
            axes.scatter(x, n, edgecolor=color, **look)
    for n in range(config.n_layer):
        axes.text(-0.6, n, n + 1, ha='right', va='center', color='#777777', fontsize=9)
    for arrow in every:
        draw_arrow(axes, places, arrow)
    axes.set_xlim(-0.9, len(COLUMNS))


def draw_arrow(axes, places, arrow):
    """From the source's box to the layer that uses it; longer arrows bend further."""
    x, goal = places[arrow.part], places[GOALS.get(arrow.kind, arrow.part)]
    row, bend = arrow.source, 0.0
    if isinstance(row, str):
        row = -0.8
        axes.text(
            x,
            row,
            OUTER.get(arrow.source.partition('.')[0], arrow.source),
            ha='center',
            va='center',
            fontsize=8,
        )
    if arrow.kind != 'borrow' and arrow.layer - row > 1 or arrow.kind == 'attend':
        bend = -0.35
    dashes, words = KINDS[arrow.kind]
    look = {'color': COLUMNS[arrow.part], 'linestyle': dashes}
    is_line = arrow.kind in ('borrow', 'join')
    marker = {'marker': 'o', 'fillstyle': 'none'} if is_line else {'marker': '>'}
    axes.plot([], [], label=words, **marker, **look)  # for the legend
    look |= {
        'shrinkA': 5,
        'shrinkB': 5,
        'arrowstyle': '-' if is_line else '-|>',
        'connectionstyle': f'arc3,rad={bend}',
    }
    axes.annotate('', xy=(goal, arrow.layer), xytext=(x, row), arrowprops=look)


# --- the program ----------------------------------------------------------------------------------


@dataclass
class WiringConfig:
    models: tuple = ()  # of config/, or folders of runs
    out: str = 'wiring.png'  # the picture; the ending chooses PNG, SVG or PDF

    def __post_init__(self):
        if not self.models:
            raise ValueError('name models of config/, such as resformer, or folders of runs')


def config_of(word):
    """The GPTConfig of a run's folder, or of a model of config/, with +setting=value."""
    settings = read_run_config(word)
    if settings:
        return gpt_config(settings, word)
    try:
        return Arm(word).configs(PAPER)[1]
    except FileNotFoundError:
        text = f'{word} is neither the folder of a run nor a model of config/, such as resformer'
        raise ValueError(text) from None


def main():
    with one_line_errors():
        (settings,) = configure(WiringConfig, doc=__doc__, plain='models')
        save(wiring_figure({word: config_of(word) for word in settings.models}), settings.out)


if __name__ == '__main__':
    main()
