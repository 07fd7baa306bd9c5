"""
Curves: the training loss of runs minus that of their baselines.

A pair is (a run, its baseline), two finished States of comparison/runs.py. Losses are in nats per token.
"""

import numpy as np

from comparison.verdict import paired

POINTS = 500  # of a curve, or up to twice as many


def smoothed(ours, theirs):
    """{step: ours - theirs, as the mean over a fiftieth of the steps that both have logged}. A mean belongs
    to its last step: it uses no later ones."""
    pairs = paired(ours.training(), theirs.training())
    steps = list(pairs)
    points = max(1, len(steps) // 50)
    differences = [a - b for a, b in pairs.values()]
    means = np.convolve(differences, np.ones(points) / points, mode='valid')
    return dict(zip(steps[points - 1 :], means.tolist(), strict=True))


def measure_curves(pairs):
    """What charts.curves_plot() shows, {name: {'steps', 'curves': {seed: [...]}}}.

    pairs: {name: {seed: (ours, theirs)}}, runs of as many steps.
    """
    result = {}
    for name, of_seeds in pairs.items():
        curves = {seed: smoothed(*pair) for seed, pair in of_seeds.items()}
        # All take the same steps, but may have logged others of them.
        common = sorted(set.intersection(*map(set, curves.values())))
        common = common[:: -max(1, len(common) // POINTS)][::-1]  # with the last one
        each = {seed: [curve[step] for step in common] for seed, curve in curves.items()}
        result[name] = {'steps': common, 'curves': each}
    return result
