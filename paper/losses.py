"""
What the paper's figures show of training: numbers from the logs of runs.

A run is the folder that train.py wrote. Losses are in nats per token.
"""

import itertools
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from comparison.plan import recorded_settings, settings_difference
from comparison.runs import gpt_config, read_losses, read_run_config, read_state
from model import GPT


def model_config(run, *needed):
    """The GPTConfig of a run's config.json, which must say what is `needed`."""
    return gpt_config(read_run_config(run, *needed), run)


def common_settings(values, config):
    """{name: value} of what runs that are compared must share: all that decides a result but the
    variant, the seed and the learning rate, which each model has its own. The share of the rate that
    is left at the end is the same for all, as in compare.py.

    values: of a config.json; config: its GPTConfig.
    """
    own = {'seed', 'learning_rate', 'min_lr', *asdict(config)} - config.shape().keys()
    recorded = recorded_settings(values)
    shared = {name: value for name, value in recorded.items() if name not in own}
    return {**shared, 'min_lr / learning_rate': min_lr_share(recorded)}


def min_lr_share(settings):
    """min_lr as a share of the learning rate; the last bits of a product do not tell runs apart."""
    rate = settings['learning_rate']
    return float(f'{settings["min_lr"] / rate:.6g}') if rate else 0.0


def shared_settings(run):
    """common_settings() of a run, and its seed."""
    values = read_run_config(run)
    return {**common_settings(values, gpt_config(values, run)), 'seed': values.get('seed')}


def check_pair(baseline, run):
    """Raise ValueError where two runs differ in more than their models and learning rates."""
    check_same(run, shared_settings(run), baseline, shared_settings(baseline))


# Sizes may differ in these, but see the same tokens in a step.
OF_SIZE = {'n_layer', 'n_head', 'n_embd', 'n_inner', 'batch_size', 'gradient_accumulation_steps'}


def check_sizes(baseline, run):
    """check_pair() of runs of which the sizes may differ, too."""
    check_same(run, settings_of_any_size(run), baseline, settings_of_any_size(baseline))


def settings_of_any_size(run):
    shared = shared_settings(run)
    values = {name: value for name, value in shared.items() if name not in OF_SIZE}
    return {**values, 'tokens of a step': tokens_per_step(run)}


def check_same(run, ours, baseline, theirs):
    difference = settings_difference(ours, theirs)
    if difference:
        name, value, other = difference
        raise ValueError(
            f'{run} has {name}={value!r} and {baseline} has {other!r}, so the two cannot be compared'
        )


def tokens_per_step(run):
    names = ('gradient_accumulation_steps', 'batch_size', 'block_size')
    config = read_run_config(run, *names)
    return math.prod(config[name] for name in names)


# --- relative to a baseline -----------------------------------------------------------------------


def differences(baseline, run, window):
    """(steps, loss - baseline's loss) of the steps that both have.

    Raises ValueError where that are fewer than `window`, and where the two runs differ in more than
    their models and learning rates.
    """
    check_pair(baseline, run)
    base, losses = read_losses(baseline), read_losses(run)
    steps = sorted(losses.keys() & base.keys())
    if len(steps) < points_in(steps, window):
        raise ValueError(
            f'{run} and {baseline} have {len(steps)} steps in common, fewer than the {window} of a mean'
        )
    return np.array(steps), np.array([losses[step] - base[step] for step in steps])


def points_in(steps, window):
    """How many of the logged steps lie in `window` steps: fewer where not every step was logged."""
    if len(steps) < 2:
        return window
    interval = int(np.median(np.diff(steps)))
    return max(1, window // interval)


def relative(baseline, run, window):
    """(steps, differences()), each a mean over `window` steps, as far as they were logged.

    The mean belongs to the last of them: a point uses no later steps.
    """
    return smoothed(*differences(baseline, run, window), window)


def smoothed(steps, difference, window):
    """(steps, means over `window` steps), as relative() has them of a series that is already read."""
    points = points_in(steps, window)
    return steps[points - 1 :], running_mean(difference, points)


def running_mean(values, window):
    return np.convolve(values, np.ones(window) / window, mode='valid')


def final_difference(baseline, run, window):
    """The mean of differences() over the last `window` steps."""
    steps, difference = differences(baseline, run, window)
    return float(difference[-points_in(steps, window) :].mean())


EARLY_POINTS = 2  # with only the first step logged, it would compare untrained models


def early_difference(baseline, run):
    """The mean of differences() over the first tenth of the steps."""
    steps, difference = differences(baseline, run, 1)
    is_early = steps < (steps[-1] + 1) / 10
    if is_early.sum() < EARLY_POINTS:
        raise ValueError(
            f'{run} and {baseline} have logged {is_early.sum()} steps of their first tenth in common; '
            f'an early difference takes {EARLY_POINTS}'
        )
    return float(difference[is_early].mean())


# --- loss against size ----------------------------------------------------------------------------


def check_finished(run):
    """Raise ValueError where a run has not been evaluated at its end: until then, its learning rate
    has not decayed, and its loss is no loss of that size."""
    state = read_state(Path(run))
    if state.kind not in ('finished', 'diverged'):
        raise ValueError(f'{run} is {state.kind}: {state.detail}')


def last_loss(run, window):
    """The mean training loss of the last `window` steps, as far as they were logged."""
    points, losses = points_and_losses(run, window)
    return float(np.mean(losses[-points:]))


def points_and_losses(run, window):
    """(how many of its logged steps lie in `window` steps, all training losses of a run)"""
    losses = read_losses(run)
    points = points_in(list(losses), window)
    if len(losses) < points:
        raise ValueError(f'{run} has {len(losses)} logged steps, fewer than the {window} of a mean')
    return points, list(losses.values())


def parameters_of(run):
    """All weights of a run's model, from its config.json."""
    config = model_config(run, 'n_layer', 'n_head', 'n_embd', 'vocab_size')
    return without_weights(config).num_params(non_embedding=False)


def without_weights(config):
    """The model of a GPTConfig, to count what it has and what it computes."""
    with torch.device('meta'):
        return GPT(config)


MIN_POINTS = 3  # of a fit: a curve of two parameters goes through any two points


def power_law(parameters, losses):
    """(a, b) of loss = a * parameters ** -b, by least squares of the logarithms."""
    slope, intercept = np.polyfit(np.log(parameters), np.log(losses), 1)
    return float(np.exp(intercept)), float(-slope)


def why_no_law(parameters, losses):
    """Why these points have no power law that is to be believed; '' if they have one."""
    if len(set(parameters)) < MIN_POINTS:
        return f'fewer than {MIN_POINTS} sizes'
    _, exponent = power_law(parameters, losses)
    return '' if exponent > 0 else 'loss does not fall with size'


def falls_at_every_size(parameters, losses):
    """Whether each larger model has the lower loss; both from small to large."""
    points = zip(parameters, losses, strict=True)
    return all(later < earlier for (n, earlier), (m, later) in itertools.pairwise(points) if m > n)


ROUNDING = 1e-9  # relative: means of the same losses may differ in their last bits


def tokens_saved(baseline, run, window):
    """The share of its steps that `run` can do without and still end at the baseline's last loss.

    The paper's way, on one run's middle: a run needs its steps until no mean over `window` of them is
    above that loss any more. The first mean below it would not do, because noise touches a loss long
    before the run stays there. None where the run ends above that loss.

    The learning rate has not decayed in the middle: trained for fewer steps, the run might save more.
    """
    target = last_loss(baseline, window)
    points, losses = points_and_losses(run, window)
    is_above = running_mean(losses, points) > target * (1 + ROUNDING)
    if is_above[-1]:
        return None
    last_above = max(np.flatnonzero(is_above), default=-1)
    return float(1 - (last_above + 1 + points) / len(losses))


def savings(models, name, window):
    """What a model saves at the loss of the largest vanilla model.

    models: {name: {'parameters', 'loss', 'runs'}}, each list from small to large. Returns shares, None
    where they cannot be read, and under 'why' the reason.
    """
    base, other = models['vanilla'], models[name]
    nothing = {'parameters_saved': None, 'tokens_saved': None}
    if len(set(base['parameters'])) < 2:
        return {**nothing, 'why': 'vanilla has a single size'}
    if not falls_at_every_size(base['parameters'], base['loss']):
        # Then the largest vanilla model is no reference.
        return {**nothing, 'why': "vanilla's loss does not fall at every size"}

    parameters, why = parameters_saved(base, other, name)
    reasons = [why] if why else []
    tokens = None
    largest = base['runs'][-1]
    shape = model_config(largest).shape()
    same_shape = [run for run in other['runs'] if model_config(run).shape() == shape]
    if not same_shape:
        reasons.append(f'there is no {name} of the size of the largest vanilla model')
    else:
        tokens = tokens_saved(largest, same_shape[-1], window)
        if tokens is None:
            reasons.append(f'{name} of that size does not reach that loss')
    return {'parameters_saved': parameters, 'tokens_saved': tokens, 'why': '; '.join(reasons)}


def parameters_saved(base, other, name):
    """(share or None, why there is none)"""
    why = why_no_law(other['parameters'], other['loss'])
    if why:
        return None, f'{name}: {why}'
    a, b = power_law(other['parameters'], other['loss'])
    sizes = np.log(other['parameters'])
    needed = np.log(a / base['loss'][-1]) / b  # log of the parameters that reach that loss
    if not sizes[0] <= needed <= sizes[-1]:
        return None, f'{name} reaches that loss outside the range of the fit'
    return float(1 - np.exp(needed) / base['parameters'][-1]), ''
