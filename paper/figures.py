"""
The paper's tables and figures as data: the runs behind each.

Tables, figures and equations are numbered as in the first version, arXiv:2410.17897v1 (October 2024).
What the paper says of them is in claims.py.
"""

from dataclasses import dataclass

from paper.runs import LENGTHS, PAPER, SIZES, Run

# --- figures --------------------------------------------------------------------------------------


@dataclass
class Panel:
    """how: what draws it. relative, bars: the first run is the baseline of the others. pairs,
    critical: a baseline, its run, the next baseline, its run, ... The others take runs alone."""

    how: str
    runs: list


@dataclass
class Figure:
    title: str
    panels: list

    def runs(self):
        """Each run once, in the order of the panels."""
        return list(dict.fromkeys(run for panel in self.panels for run in panel.runs))


def runs(*models, **more):
    return [Run(model, **more) for model in models]


def against(baseline, *models, **more):
    """Pairs of one baseline and each of the models."""
    return [run for model in models for run in runs(baseline, model, **more)]


def at_each(setting, values, *models):
    """The models at each value of a setting: size, length, rate or warmup."""
    return [run for value in values for run in runs(*models, **{setting: value})]


def curves_and_bars(*models):
    return [Panel('relative', runs(*models)), Panel('bars', runs(*models))]


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

LONGEST = LENGTHS[-1]

BY_SIZE = at_each('size', SIZES, V, R)
SOME_LENGTHS = (2048, 32000, LONGEST)  # of Fig. 5

FIGURES = {
    'table1': Figure('Zero-shot tasks', [Panel('tasks', runs(V, R) + runs(V, R, length=LONGEST))]),
    'table5': Figure('Validation loss, mean of the domains', [Panel('loss', BY_SIZE)]),
    'fig1': Figure(
        'Models compared, and attention entropy',
        [
            Panel('relative', runs(V, R, 'neutreno', 'neutreno_resformer', 'denseformer')),
            Panel('entropy', runs(V, R, 'neutreno', 'denseformer', S)),
        ],
    ),
    'fig3': Figure('Cross-layer attention and its approximations', [Panel('mapping', runs(V))]),
    'fig4': Figure(
        'Sharing keys or values every two layers', curves_and_bars(V, KEYS_OF_2, VALUES_OF_2, 'cla')
    ),
    'fig5': Figure(
        'ResFormer by sequence length and by size',
        [
            Panel('pairs', at_each('length', SOME_LENGTHS, V, R)),
            Panel('scaling', BY_SIZE),
            Panel('pairs', BY_SIZE),
        ],
    ),
    'fig6': Figure(
        'Residual on queries, keys or values', curves_and_bars(V, ON_QUERIES, ON_KEYS, R)
    ),
    'fig7': Figure(
        'How the source values are mapped', curves_and_bars(V, R, IDENTITY, EQ_6, CROSS)
    ),
    'fig8': Figure('Which layers are the source', curves_and_bars(V, R, PREVIOUS, ALL)),
    'fig9': Figure('Spectra of the values', [Panel('spectrum', runs(V, R))]),
    'fig10': Figure(
        'Less KV cache: half, and an eighth',
        [
            Panel('pairs', against(V, *HALF) + against(V, *HALF, length=LONGEST)),
            Panel('pairs', against(V, *EIGHTH, length=LONGEST)),
        ],
    ),
    'fig11': Figure(
        'SVFormer by sequence length',
        [
            Panel('pairs', at_each('length', LENGTHS, V, S)),
            Panel('critical', at_each('length', LENGTHS, V, S)),
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
        "GPT-2's architecture", [Panel('pairs', against(V, S) + against('gpt2', GPT2_S, GPT2_R))]
    ),
    'fig13': Figure(
        'Sharing all of the first queries, keys or values',
        curves_and_bars(V, FIRST_QUERIES, FIRST_KEYS, S),
    ),
    'fig14': Figure("SVFormer's anchors", curves_and_bars(V, S, TWO_ANCHORS, FOUR_ANCHORS)),
    'fig15': Figure('Similarity of tokens', [Panel('similarity', runs(V, R, S))]),
}

# --- the table of runs ----------------------------------------------------------------------------


def table():
    """A Markdown table of the figures and their runs, as paper/README.md has it."""
    lines = ['| figure | what | runs |', '|---|---|---|']
    for name, figure in FIGURES.items():
        lines.append(f'| {name} | {figure.title} | {describe(figure.runs())} |')
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
