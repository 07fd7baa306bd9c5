"""
What the paper says of the inside of a model, as numbers: one for two models of a seed.

series: {name: array (layers, ...)}, the means over sequences of one analysis of one model, as
paper.analyze writes them. A difference is ours minus theirs.
"""

import numpy as np

from paper import analyze


def deeper_half(layers):
    return layers[len(layers) // 2 :]


def entropy(ours, theirs):
    """Of token importance, in the deeper half of the layers."""
    return deeper_half(ours['entropy']).mean() - deeper_half(theirs['entropy']).mean()


def entropy_with_depth(ours, theirs):
    """Of our model alone: the deeper half minus layer 1."""
    layers = ours['entropy']
    return deeper_half(layers).mean() - layers[0]


def mapping(ours, theirs):
    """Of our model alone: how much better Eq. 6 approximates cross-layer attention than Eq. 3."""
    return np.nanmean(ours[analyze.EQ_6] - ours[analyze.EQ_3])


def eigenvalue(values):
    """The logarithm of the ratio of the largest eigenvalues, ours / theirs, median of the layers.

    values: projected or attended with. The paper does not say which; a mean of two values, with which
    ResFormer attends, has the smaller ones by construction. Above 0, ours is larger in most layers. The
    share of these layers would be too coarse a number: three seeds of eight layers easily agree on it
    exactly.
    """

    def of_models(ours, theirs):
        ratios = ours[values][:, 0] / theirs[values][:, 0]
        return np.median(np.log(ratios))

    return of_models


def similarity(ours, theirs):
    return np.mean(ours['hidden states'] - theirs['hidden states'])


# {metric of claims.METRICS: (its analysis, the difference)}
DIFFERENCES = {
    'entropy': ('entropy', entropy),
    'entropy with depth': ('entropy', entropy_with_depth),
    'mapping': ('mapping', mapping),
    'eigenvalue, attended': ('spectrum', eigenvalue(analyze.ATTENDED)),
    'eigenvalue, projected': ('spectrum', eigenvalue(analyze.PROJECTED)),
    'similarity': ('similarity', similarity),
}


# {analysis: the series of it that the differences read}
SERIES = {
    'entropy': ['entropy'],
    'mapping': [analyze.EQ_3, analyze.EQ_6],
    'spectrum': [analyze.ATTENDED, analyze.PROJECTED],
    'similarity': ['hidden states'],
}


def as_arrays(report):
    """The series of one run in analyze()'s numbers."""
    means = {name: values['mean'] for name, values in report['series'].items()}
    return {name: np.array(mean, dtype=float) for name, mean in means.items()}
