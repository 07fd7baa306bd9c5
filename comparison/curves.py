"""
Curves: the training loss of runs minus that of their baselines.

A pair is (a run, its baseline), two finished States of comparison/runs.py. Losses are in nats per token.
"""

import numpy as np

POINTS = 500  # of a curve, or up to twice as many


def pair_series(ours, theirs):
    """(steps, ours - theirs) of the steps that both have logged."""
    a, b = ours.training(), theirs.training()
    steps = sorted(a.keys() & b.keys())
    if not steps:
        raise ValueError(f'{ours.folder} and {theirs.folder} have no step in common')
    return np.array(steps), np.array([a[step] - b[step] for step in steps])


def smoothed(steps, values):
    """(steps, means over a fiftieth of them). A mean belongs to its last step: it uses no later ones."""
    points = max(1, len(steps) // 50)
    return steps[points - 1 :], np.convolve(values, np.ones(points) / points, mode='valid')


def measure_curves(pairs):
    """What charts.curves_plot() shows, {name: {'steps', 'curves': {seed: [...]}}}.

    pairs: {name: {seed: (ours, theirs)}}, runs of as many steps.
    """
    result = {}
    for name, of_seeds in pairs.items():
        curves = {}
        for seed, pair in of_seeds.items():
            steps, values = smoothed(*pair_series(*pair))
            curves[seed] = dict(zip(steps.tolist(), values.tolist(), strict=True))
        # All take the same steps, but may have logged others of them.
        common = sorted(set.intersection(*map(set, curves.values())))
        common = common[:: -max(1, len(common) // POINTS)][::-1]  # with the last one
        each = {seed: [curve[step] for step in common] for seed, curve in curves.items()}
        result[name] = {'steps': common, 'curves': each}
    return result
