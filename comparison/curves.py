"""
Curves: the training loss of runs minus that of their baselines, and the difference at their ends.

A pair is (a run, its baseline), two finished States of comparison/runs.py. Losses are in nats per token.
"""

import numpy as np

POINTS = 500  # of a curve, at most


def pair_series(ours, theirs):
    """(steps, ours - theirs) of the steps that both have logged.

    A baseline of another number of steps is taken at the same share of them.
    """
    a, b = ours.training(), theirs.training()
    ratio = theirs.config['max_iters'] / ours.config['max_iters']
    if ratio != 1:
        shares = np.interp(ratio * np.array(list(a)), list(b), list(b.values()))
        b = dict(zip(a, shares, strict=True))
    steps = sorted(a.keys() & b.keys())
    if not steps:
        raise ValueError(f'{ours.folder} and {theirs.folder} have no step in common')
    return np.array(steps), np.array([a[step] - b[step] for step in steps])


def gap_of(steps):
    """How many steps lie between two that were logged, as a rule."""
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1


def smoothed(steps, values, window):
    """(steps, means over `window` steps). A mean belongs to its last step: it uses no later ones."""
    # Fewer points lie in the window where not every step was logged.
    points = max(1, window // gap_of(steps))
    return steps[points - 1 :], np.convolve(values, np.ones(points) / points, mode='valid')


def smoothing(steps):
    """Over how many of its steps the curves of a comparison are smoothed."""
    return max(1, steps // 50)


def measure_curves(pairs, smooth):
    """What charts.curves_plot() shows; pairs: {name: {seed: (ours, theirs)}}.

    {name: {'steps', 'curves': {seed: [...]}, 'ends': {seed: difference of validation losses}}}; a point of
    a curve is a mean of `smooth` steps, or of all that a shorter run has.
    """
    result = {}
    for name, of_seeds in pairs.items():
        curves, ends = {}, {}
        for seed, (ours, theirs) in of_seeds.items():
            steps, values = pair_series(ours, theirs)
            # Of a short run, or one that logged few steps, the window is all of it.
            steps, values = smoothed(steps, values, min(smooth, len(steps) * gap_of(steps)))
            curves[seed] = dict(zip(steps.tolist(), values.tolist(), strict=True))
            ends[seed] = ours.loss - theirs.loss
        # All take the same steps, but may have logged others of them.
        common = sorted(set.intersection(*map(set, curves.values())))
        common = common[:: -max(1, len(common) // POINTS)][::-1]  # with the last one
        each = {seed: [curve[step] for step in common] for seed, curve in curves.items()}
        result[name] = {'steps': common, 'curves': each, 'ends': ends}
    return result
