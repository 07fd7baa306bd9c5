"""
Every claim that the paper prints, as data, with the place where it is printed.

Figures and equations are numbered as in the first version, arXiv:2410.17897v1 (October 2024).
Sentences of the text were read in its revision of November 2024, which numbers figures differently:
Figs. 3 to 8 there are 4 to 11, Figs. 9 to 14 are 12 to 17. `v5` is the version of June 2025.
"""

import itertools
from dataclasses import dataclass

from paper.figures import (
    ALL,
    CROSS,
    EQ_6,
    FIRST_KEYS,
    FIRST_QUERIES,
    FOUR_ANCHORS,
    IDENTITY,
    KEYS_OF_2,
    LONGEST,
    ON_KEYS,
    ON_QUERIES,
    PREVIOUS,
    SOME_LENGTHS,
    TWO_ANCHORS,
    VALUES_OF_2,
    R,
    S,
    V,
    with_lambda,
)
from paper.runs import LENGTHS, Run

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
    'overtaken': 'training loss at the end of runs in which vanilla has had time to catch up',
    'critical step': 'step at which it is overtaken by vanilla',
    'validation loss': 'validation loss at the end, mean of the domains',
    'accuracy': 'zero-shot accuracy, mean of the tasks',
    'entropy': 'entropy of token importance, deeper half of the layers',
    'entropy with depth': 'entropy of token importance, deeper half minus layer 1',
    'mapping': "cosine to cross-layer attention's output: Eq. 6 minus Eq. 3, layers 2 and up",
    'eigenvalue, attended': 'largest eigenvalue of the values attended with, log of the ratio, median '
    'of the layers',
    'eigenvalue, projected': 'largest eigenvalue of the values as projected, log of the ratio, median '
    'of the layers',
    'similarity': 'mean cosine of hidden states, mean of the layers',
}


@dataclass(frozen=True)
class Claim:
    """What the paper prints: the metric of `ours` is below, above or not below that of `theirs`.

    A Run says of which model, size, sequence length and learning rate. In `entropy with depth` and
    `mapping`, ours equals theirs: such a metric is a difference within one run.
    """

    figure: str  # of figures.FIGURES, whose runs can test it; or a later version of the paper
    where: str  # the place where it is printed
    says: str  # the claim in our words
    ours: Run
    sign: str  # of SIGNS
    theirs: Run
    metric: str = 'final loss'  # of METRICS
    basis: str = 'text'  # of BASES


def statement(figure, where, says, *contrasts, metric='final loss', basis='text', **more):
    """A Claim for each contrast (ours, sign, theirs) of one statement of the paper.

    Ours and theirs are Runs, or models at the size or length in `more`.
    """
    result = []
    for ours, sign, theirs in contrasts:
        pair = [arm if isinstance(arm, Run) else Run(arm, **more) for arm in (ours, theirs)]
        result.append(Claim(figure, where, says, pair[0], sign, pair[1], metric, basis))
    return result


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
        'table5',
        'Table 5',
        'ResFormer is below vanilla at every size, and in every domain',
        *[(Run(R, size), '<', Run(V, size)) for size in ('82m', '180m', '468m')],
        metric='validation loss',
        basis='table',
    ),
    *statement(
        'fig5',
        'Section 4.2, Fig. 5 left',
        'ResFormer is below vanilla throughout training, so also at the end, at every sequence length',
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
        metric='eigenvalue, attended',
    ),
    *statement(
        'fig9',
        'Section 4.5, Fig. 9',
        'the values of most layers have larger eigenvalues in ResFormer',
        (R, '>', V),
        metric='eigenvalue, projected',
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
        'the revision',
        'the revision, Fig. 8 and Section 4.2',
        'V_n + lambda V_1 is better than vanilla at any lambda, and best at 2',
        (with_lambda(0.2), '<', V),
        (with_lambda(2.0), '<', with_lambda(1.0)),
        (with_lambda(2.0), '<', with_lambda(5.0)),
    ),
    *statement(
        'v5',
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
        metric='overtaken',
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
