"""
The compute multiplier: how much more compute the baseline needs for the loss of an arm.

Where a comparison has the baseline's model at several sizes or numbers of tokens, each of its seeds gives
a curve, the loss over training FLOPs. Between two points it is a line over the FLOPs' logarithm; beyond
them nothing is said. No law with constants to be fitted is assumed. The FLOPs at which the curve has an
arm's loss, divided by the arm's own FLOPs, are the multiplier.
"""

import math

import numpy as np

from comparison.plan import COMPARABLE
from comparison.runs import ROUNDING, difference
from comparison.verdict import describe
from model import GPTConfig

# Facts in which one model at two sizes or numbers of tokens may differ.
LADDER = {
    *GPTConfig().shape(),
    *'max_iters lr_decay_iters warmup_iters cooldown_iters learning_rate seed'.split(),
    *'resumed batch_size gradient_accumulation_steps'.split(),
    *ROUNDING,
}


def multipliers(arms, numbers, baseline):
    """{arm: multiplier()} of the arms of other models than the baseline's, where their losses may be
    compared with its; {} without a curve.

    arms: {name: ArmRuns} of assemble.py. numbers: {name: its line in the tables}.
    """
    base = arms[baseline]
    comparable = {}
    for name, arm in arms.items():
        other = difference(arm.facts, base.facts, only=COMPARABLE)
        if arm.config and not other:  # the FLOPs of older settings are not known
            comparable[name] = arm
    same = [name for name in comparable if not difference(arms[name].facts, base.facts, LADDER)]
    # Of two at one size and length, such as under other seeds, the first is the point.
    points = {numbers[name]['flops']: numbers[name] for name in reversed(same)}
    curve = [points[flops] for flops in sorted(points)]
    if len(curve) < 2:
        return {}
    return {name: multiplier(numbers[name], curve) for name in comparable if name not in same}


def multiplier(numbers, curve):
    """{'mean', 'low', 'high': the multiplier of FLOPs and its 95% interval over seeds, or None,
    'reason': why there is none}. curve: the baseline's numbers, from few FLOPs to many."""
    ratios, flops = {}, np.log([point['flops'] for point in curve])
    nothing = {'mean': None, 'low': None, 'high': None}
    for seed, loss in numbers['losses'].items():
        losses = [point['losses'].get(seed) for point in curve]
        if None in losses:
            continue
        if (np.diff(losses) >= 0).any():
            return nothing | {'reason': f"the baseline's loss does not fall in seed {seed}"}
        if not losses[-1] <= loss <= losses[0]:
            return nothing | {'reason': f"beyond the baseline's losses in seed {seed}"}
        # np.interp wants rising losses.
        needed = np.interp(loss, losses[::-1], flops[::-1])
        ratios[seed] = float(needed - math.log(numbers['flops']))
    if not ratios:
        return nothing | {'reason': 'no seed has finished at every point'}
    described = describe(ratios)
    logs = {name: described[name] for name in nothing}
    return {name: None if x is None else math.exp(x) for name, x in logs.items()} | {'reason': ''}
