"""
The paper's tables and figures as data: the runs behind each.

Tables, figures and equations are numbered as in the first version, arXiv:2410.17897v1 (October 2024).
What the paper says of them is in claims.py.
"""

from dataclasses import dataclass, field

from paper.runs import LENGTHS, PAPER, SIZES, Run

# --- figures --------------------------------------------------------------------------------------


@dataclass
class Panel:
    """how: what draws it. relative: the first run is the baseline of the others. pairs, critical: a
    baseline, its run, the next baseline, its run, ... The others take runs alone; wiring takes their
    settings, and needs no training."""

    how: str
    runs: list
    title: str = ''  # what is seen, where the figure has several panels


@dataclass
class Figure:
    title: str  # what is seen
    panels: list
    names: dict = field(default_factory=dict)  # {model: its name here}, in place of NAMES
    is_ordered: bool = False  # whether its models are steps of one thing: shades instead of dashes
    has_outside_panel: bool = False  # about checkpoints from elsewhere, which is left out here

    def runs(self):
        """Each run that must be trained, once, in the order of the panels."""
        trained = [panel for panel in self.panels if panel.how != 'wiring']
        return list(dict.fromkeys(run for panel in trained for run in panel.runs))


def runs_of(*models, **more):
    return [Run(model, **more) for model in models]


def against(baseline, *models, **more):
    """Pairs of one baseline and each of the models."""
    return [run for model in models for run in runs_of(baseline, model, **more)]


def at_each(setting, values, *models):
    """The models at each value of a setting: size, length, rate or warmup."""
    return [run for value in values for run in runs_of(*models, **{setting: value})]


def panel_of_curves(*models):
    return [Panel('relative', runs_of(*models))]


V, R, S = 'vanilla', 'resformer', 'svformer'
KEYS_OF_2, VALUES_OF_2 = 'vanilla+share_k=True+share_k_every=2', 'svformer+share_v_every=2'
ON_QUERIES, ON_KEYS = 'vanilla+q_residual=True', 'vanilla+k_residual=True'
IDENTITY, CROSS = 'resformer+residual_map=identity', 'resformer+residual_map=cross'
EQ_6 = 'resformer+residual_map=identity+residual_from=all'
PREVIOUS, ALL = 'resformer+residual_from=previous', 'resformer+residual_from=all'
FIRST_QUERIES, FIRST_KEYS = 'vanilla+share_q=True', 'vanilla+share_k=True'
TWO_ANCHORS, FOUR_ANCHORS = 'svformer+share_v_every=4', VALUES_OF_2
GPT2_R, GPT2_S = 'gpt2+v_residual=True', 'gpt2+share_v=True'
HALF, EIGHTH = (S, 'gqa', 'cla'), ('svformer_gqa', 'mqa', 'cla_gqa')

LAMBDAS = (0.2, 1.0, 2.0, 5.0)


def with_lambda(value):
    """V_n + lambda V_1 in place of their mean."""
    if value == 2.0:
        return 'constant_resformer'
    return f'resformer+residual_lambda=({value},1.0)'


# What a reader calls each model.
NAMES = {
    V: 'vanilla',
    R: 'ResFormer',
    S: 'SVFormer',
    'neutreno': 'NeuTRENO',
    'neutreno_resformer': 'NeuTRENO + ResFormer',
    'denseformer': 'DenseFormer',
    'gqa': 'GQA',
    'cla': 'CLA',
    ON_QUERIES: 'residual on queries',
    ON_KEYS: 'residual on keys',
    IDENTITY: 'identity map',
    EQ_6: 'identity map of all sources (Eq. 6)',
    CROSS: 'cross-layer attention',
    PREVIOUS: 'source: previous layer',
    ALL: 'source: all earlier layers',
    **{with_lambda(value): f'V_n + {value:g} V_1' for value in LAMBDAS},
    'learned_resformer': 'ResFormer, learned weights',
    'sparse_resformer': 'ResFormer, sparse with 5',
    KEYS_OF_2: 'keys shared by twos',
    VALUES_OF_2: 'values shared by twos',
    TWO_ANCHORS: 'SVFormer, two anchors',
    FIRST_QUERIES: "all share the first layer's queries",
    FIRST_KEYS: "all share the first layer's keys",
    'svformer_gqa': 'SVFormer, two KV heads',
    'mqa': 'MQA',
    'cla_gqa': 'CLA, two KV heads',
    'gpt2': 'GPT-2',
}

LONGEST = LENGTHS[-1]

BY_SIZE = at_each('size', SIZES, V, R)
SOME_LENGTHS = (2048, 32000, LONGEST)  # of Fig. 5

FIGURES = {
    'table1': Figure(
        'Zero-shot tasks', [Panel('tasks', runs_of(V, R) + runs_of(V, R, length=LONGEST))]
    ),
    'table5': Figure('Validation loss, mean of the domains', [Panel('loss', BY_SIZE)]),
    'fig1': Figure(
        'Models compared, and attention entropy',
        [
            Panel(
                'relative',
                runs_of(V, R, 'neutreno', 'neutreno_resformer', 'denseformer'),
                'Models compared',
            ),
            Panel(
                'entropy',
                runs_of(V, R, 'neutreno', 'denseformer', S),
                'How evenly attention is spread over tokens',
            ),
        ],
        has_outside_panel=True,
    ),
    'fig2': Figure(
        'Whose queries, keys and values a layer uses',
        [Panel('wiring', runs_of(V, 'neutreno', 'denseformer', R, S))],
    ),
    'fig3': Figure(
        'Cross-layer attention and its approximations',
        [Panel('mapping', runs_of(V))],
        has_outside_panel=True,
    ),
    'fig4': Figure(
        'Sharing keys or values every two layers',
        panel_of_curves(V, KEYS_OF_2, VALUES_OF_2, 'cla'),
        {KEYS_OF_2: 'keys shared', VALUES_OF_2: 'values shared', 'cla': 'both shared (CLA)'},
    ),
    'fig5': Figure(
        'ResFormer by sequence length and by size',
        [
            Panel('pairs', at_each('length', SOME_LENGTHS, V, R), 'ResFormer by sequence length'),
            Panel('scaling', BY_SIZE, 'Loss by size'),
            Panel('pairs', BY_SIZE, 'ResFormer by size'),
        ],
    ),
    'fig6': Figure(
        'Residual on queries, keys or values',
        panel_of_curves(V, ON_QUERIES, ON_KEYS, R),
        {ON_QUERIES: 'queries', ON_KEYS: 'keys', R: 'values (ResFormer)'},
    ),
    'fig7': Figure(
        'How the source values are mapped',
        panel_of_curves(V, R, IDENTITY, EQ_6, CROSS),
        {
            R: 'current (ResFormer)',
            IDENTITY: 'identity',
            EQ_6: 'identity, all layers',
            CROSS: 'cross',
        },
    ),
    'fig8': Figure(
        'Which layers are the source',
        panel_of_curves(V, R, PREVIOUS, ALL),
        {R: 'first (ResFormer)', PREVIOUS: 'previous', ALL: 'all earlier'},
    ),
    'fig9': Figure('Spectra of the values', [Panel('spectrum', runs_of(V, R))]),
    'fig10': Figure(
        'Less KV cache: half, and an eighth',
        [
            Panel(
                'pairs', against(V, *HALF) + against(V, *HALF, length=LONGEST), 'Half the KV cache'
            ),
            Panel('pairs', against(V, *EIGHTH, length=LONGEST), 'An eighth of the KV cache'),
        ],
        {'svformer_gqa': 'SVFormer', 'mqa': 'MQA', 'cla_gqa': 'CLA'},
    ),
    'fig11': Figure(
        'SVFormer by sequence length',
        [
            Panel('pairs', at_each('length', LENGTHS, V, S), 'SVFormer by sequence length'),
            Panel(
                'critical', at_each('length', LENGTHS, V, S), 'Whether vanilla overtakes SVFormer'
            ),
        ],
    ),
    'fig12a': Figure(
        'SVFormer by learning rate',
        [Panel('pairs', at_each('rate', (0, 1, 2), V, S))],
    ),
    'fig12b': Figure(
        'SVFormer by warm-up',
        [Panel('pairs', at_each('warmup', (0, 1), V, S))],
    ),
    'fig12c': Figure(
        'SVFormer by size',
        [Panel('pairs', at_each('size', SIZES, V, S))],
    ),
    'fig12d': Figure(
        "On GPT-2's architecture",
        [Panel('pairs', against(V, S) + against('gpt2', GPT2_S, GPT2_R))],
        {S: 'SVFormer on Llama', GPT2_S: 'SVFormer on GPT-2', GPT2_R: 'ResFormer on GPT-2'},
    ),
    'fig13': Figure(
        "All layers use the first layer's queries, keys or values",
        panel_of_curves(V, FIRST_QUERIES, FIRST_KEYS, S),
        {FIRST_QUERIES: 'queries', FIRST_KEYS: 'keys', S: 'values (SVFormer)'},
    ),
    'fig14': Figure(
        "SVFormer's anchors: layers that have their own values",
        panel_of_curves(V, FOUR_ANCHORS, TWO_ANCHORS, S),
        {FOUR_ANCHORS: 'four anchors', TWO_ANCHORS: 'two anchors', S: 'one anchor'},
        is_ordered=True,
    ),
    'fig15': Figure(
        'Similarity of tokens', [Panel('similarity', runs_of(V, R, S))], has_outside_panel=True
    ),
}


def number_of(name):
    """Fig. 12a of fig12a, Table 1 of table1."""
    return name.replace('fig', 'Fig. ').replace('table', 'Table ')


# --- the table of runs ----------------------------------------------------------------------------


def table():
    """A Markdown table of the figures and their runs, as paper/README.md has it."""
    lines = ['| figure | what | runs |', '|---|---|---|']
    for name, figure in FIGURES.items():
        words = describe(figure.runs() or figure.panels[0].runs)
        note = '' if figure.runs() else '; drawn from `wire()`, no run needed'
        lines.append(f'| {name} | {figure.title} | {words}{note} |')
    return '\n'.join(lines) + '\n'


def describe(runs):
    """Models, and the sizes, lengths, learning rates and warm-ups in which they differ."""
    words = [f'`{model}`' for model in dict.fromkeys(run.model for run in runs)]
    text = ' · '.join(words)
    lengths = {run.length or PAPER.length for run in runs}
    settings = {
        'size': [size for size in SIZES if size in {run.size for run in runs}],
        'length': [f'{length:,}' for length in sorted(lengths)],
        'learning rate': [f'{PAPER.rates[i]:g}' for i in sorted({run.rate for run in runs})],
        'warm-up': [f'{PAPER.warmups[i]:,}' for i in sorted({run.warmup for run in runs})],
    }
    for name, values in settings.items():
        if len(values) > 1:
            text += f'; {name} {", ".join(values)}'
    return text
