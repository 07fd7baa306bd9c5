"""
The paper's tables and figures as data: the runs behind each, and what the paper says it shows.

Tables, figures and equations are numbered as in the first version, arXiv:2410.17897v1 (October 2024).
Sentences of the text were read in its revision of November 2024, which numbers figures differently:
Figs. 3 to 8 there are 4 to 11, Figs. 9 to 14 are 12 to 17. `v5` is the version of June 2025.
"""

import itertools
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

# --- claims ---------------------------------------------------------------------------------------

# Signs of a claim: how our metric compares with theirs, as printed.
SIGNS = {'<': 'below', '>': 'above', '>=': 'not below'}

# How a claim is known to be printed.
BASES = {
    'text': 'a sentence says so',
    'table': 'a table has the numbers',
    'figure': 'a figure shows it; no sentence that says so has been read',
}

# What a claim is about.
METRICS = {
    'final loss': 'training loss at the end',
    'early loss': 'training loss in the first tenth of the steps',
    'lead': "training loss at the end, minus vanilla's in the same setting",
    'critical step': 'step at which it is overtaken by vanilla',
    'validation loss': 'validation loss, mean of the domains',
    'accuracy': 'zero-shot accuracy, mean of the tasks',
    'entropy': 'entropy of token importance, deeper half of the layers',
    'entropy with depth': 'entropy of token importance, deeper half minus layer 1',
    'mapping': "cosine to cross-layer attention's output: Eq. 6 minus Eq. 3, layers 2 and up",
    'eigenvalue': 'largest eigenvalue of the values attended with: share of layers, minus one half',
    'similarity': 'mean cosine of hidden states, mean of the layers',
}


@dataclass(frozen=True)
class Claim:
    """What the paper prints: the metric of `ours` is below, above or not below that of `theirs`.

    A Run says of which model, size, sequence length and learning rate. In `entropy with depth` and
    `mapping`, ours equals theirs: such a metric is a difference within one run.
    """

    figure: str  # of FIGURES, from whose runs it can be tested; '': from none of them
    where: str  # the place where it is printed
    says: str  # the claim in our words
    ours: Run
    sign: str  # of SIGNS
    theirs: Run
    metric: str = 'final loss'  # of METRICS
    basis: str = 'text'  # of BASES

    def contrast(self):
        """The two arms, as models: settings on top of vanilla, without size and length."""
        return self.ours.model, self.theirs.model


def statement(figure, where, says, *contrasts, metric='final loss', basis='text', **more):
    """A Claim for each contrast (ours, sign, theirs) of one statement of the paper.

    Ours and theirs are Runs, or models at the size or length in `more`.
    """
    result = []
    for ours, sign, theirs in contrasts:
        pair = [arm if isinstance(arm, Run) else Run(arm, **more) for arm in (ours, theirs)]
        result.append(Claim(figure, where, says, pair[0], sign, pair[1], metric, basis))
    return result


def with_lambda(value):
    """V_n + lambda V_1 in place of their mean."""
    return f'resformer+residual_lambda=({value},1.0)'


CLAIMS = [
    # ResFormer and the others
    *statement(
        'table1',
        'Table 1',
        'ResFormer answers 0.355 of the questions, vanilla 0.333',
        (R, '>', V),
        metric='accuracy',
        basis='table',
    ),
    *statement(
        'table1',
        'Table 1',
        'ResFormer answers 0.350 of the questions, vanilla 0.328, trained at length 64,000',
        (R, '>', V),
        metric='accuracy',
        basis='table',
        length=LONGEST,
    ),
    *statement(
        'table5',
        'Table 5',
        'ResFormer is below vanilla at every size, and in every domain',
        *[(Run(R, size), '<', Run(V, size)) for size in ('82m', '180m', '468m')],
        metric='validation loss',
        basis='table',
    ),
    *statement(
        'fig1',
        'abstract, Section 4.2, Fig. 1 left',
        'ResFormer is better than vanilla, NeuTRENO and DenseFormer',
        (R, '<', V),
        (R, '<', 'neutreno'),
        (R, '<', 'denseformer'),
    ),
    *statement(
        'fig1',
        'Section 4.2, Fig. 1 left',
        'NeuTRENO on top of ResFormer is better still',
        ('neutreno_resformer', '<', R),
    ),
    *statement(
        'fig5',
        'Section 4.2, Fig. 5 left',
        'ResFormer is below vanilla throughout training, at every sequence length',
        *[(Run(R, length=T), '<', Run(V, length=T)) for T in SOME_LENGTHS],
    ),
    # attention concentration and what goes with it
    *statement(
        'fig1',
        'Section 4.5, Fig. 1 middle',
        'attention concentrates more and more with depth in vanilla',
        (V, '<', V),
        metric='entropy with depth',
    ),
    *statement(
        'fig1',
        'abstract, Section 4.5, Fig. 1 middle',
        'attention concentrates less in ResFormer than in vanilla',
        (V, '<', R),
        metric='entropy',
    ),
    *statement(
        'fig3',
        'Section 3.2, Fig. 3',
        "the layer's own attention matrix approximates cross-layer attention better than the identity",
        (V, '<', V),
        metric='mapping',
    ),
    *statement(
        'fig9',
        'Section 4.5, Fig. 9',
        'the values of most layers have larger eigenvalues in ResFormer',
        (R, '>', V),
        metric='eigenvalue',
    ),
    *statement(
        'fig15',
        'Fig. 15 left',
        'tokens are less alike in ResFormer than in vanilla',
        (R, '<', V),
        metric='similarity',
        basis='figure',
    ),
    # ablations of ResFormer
    *statement(
        'fig6',
        'Section 4.3, Fig. 6',
        'only a residual on values helps',
        (R, '<', V),
        (R, '<', ON_QUERIES),
        (R, '<', ON_KEYS),
        (ON_QUERIES, '>=', V),
        (ON_KEYS, '>=', V),
    ),
    *statement(
        'fig7',
        'Section 4.3, Fig. 7',
        'the identity map does poorly (source: the first layer; Eq. 6 as printed)',
        (R, '<', IDENTITY),
        (R, '<', EQ_6),
    ),
    *statement(
        'fig7',
        'Section 4.3, Fig. 7',
        'ResFormer ends even below cross-layer attention',
        (R, '<', CROSS),
    ),
    *statement(
        'fig8',
        'Section 4.3, Fig. 8',
        'the first layer is a better source than the previous one or all earlier ones',
        (R, '<', PREVIOUS),
        (R, '<', ALL),
    ),
    *statement(
        '',
        'revision, Fig. 8 and Section 4.2',
        'V_n + lambda V_1 is better than vanilla at any lambda, and best at 2',
        (with_lambda(0.2), '<', V),
        (with_lambda(2.0), '<', with_lambda(1.0)),
        (with_lambda(2.0), '<', with_lambda(5.0)),
    ),
    *statement(
        '',
        'v5, validation losses at 82M: 2.712, 2.705, 2.700, 2.687',
        'learned weights are better than uniform ones, constant (2, 1) better, sparse with 5 best',
        ('learned_resformer', '<', R),
        ('constant_resformer', '<', 'learned_resformer'),
        ('sparse_resformer', '<', 'constant_resformer'),
        metric='validation loss',
        basis='table',
    ),
    # SVFormer
    *statement(
        'fig4',
        'Section 3.5, Fig. 4',
        'sharing the values of every two layers costs less than sharing their keys',
        (VALUES_OF_2, '<', KEYS_OF_2),
    ),
    *statement(
        'fig10',
        'abstract, Section 4.6, Fig. 10',
        'at length 64,000 SVFormer is better than GQA and CLA',
        (S, '<', 'gqa'),
        (S, '<', 'cla'),
        length=LONGEST,
    ),
    *statement(
        'fig10',
        'Section 4.6, Fig. 10',
        'at length 2,048 SVFormer is worse than GQA',
        (S, '>', 'gqa'),
    ),
    *statement(
        'fig11',
        'abstract, Section 4.6, Fig. 11 left',
        'SVFormer learns faster than vanilla at first',
        *[(Run(S, length=T), '<', Run(V, length=T)) for T in LENGTHS],
        metric='early loss',
    ),
    *statement(
        'fig11',
        'Section 4.6, Fig. 11',
        'SVFormer is overtaken by vanilla in the end (at length 64,000: predicted, after training)',
        *[(Run(S, length=T), '>', Run(V, length=T)) for T in LENGTHS[:-1]],
    ),
    *statement(
        'fig11',
        'Section 4.6, Fig. 11 right',
        'the longer the sequence, the later is SVFormer overtaken',
        *[
            (Run(S, length=shorter), '<', Run(S, length=longer))
            for shorter, longer in itertools.pairwise(LENGTHS)
        ],
        metric='critical step',
    ),
    *statement(
        'fig12a',
        'Section 4.7, Fig. 12a',
        'SVFormer gains more from a smaller learning rate than vanilla does',
        (Run(S, rate=1), '<', Run(S)),
        (Run(S, rate=2), '<', Run(S, rate=1)),
        metric='lead',
    ),
    *statement(
        'fig13',
        'Section 4.8, Fig. 13',
        "sharing all of the first layer's queries or keys costs much; similar to Fig. 4",
        (FIRST_QUERIES, '>', V),
        (FIRST_KEYS, '>', V),
        (S, '<', FIRST_QUERIES),
        (S, '<', FIRST_KEYS),
    ),
    *statement(
        'fig14',
        'Section 4.8, Fig. 14',
        'the more anchors, the better is SVFormer',
        (TWO_ANCHORS, '<', S),
        (FOUR_ANCHORS, '<', TWO_ANCHORS),
    ),
]

# What ResFormer saves at equal loss, by version of the paper: shares of (parameters, tokens).
SAVINGS = {'revision': (0.104, 0.136), 'v4': (0.133, 0.154), 'v5': (0.161, 0.203)}


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
