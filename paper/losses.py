"""
What the paper's figures show of training: numbers from the logs of runs.

A run is the folder that train.py wrote. Losses are in nats per token.
"""

import numpy as np
import torch

from model import GPT
from rundir import gpt_config, read_losses, read_run_config


def model_config(run, *needed):
    """The GPTConfig of a run's config.json, which must say what is `needed`."""
    return gpt_config(read_run_config(run, *needed), run)


# --- relative to a baseline -----------------------------------------------------------------------


def differences(baseline, run, window):
    """(steps, loss - baseline's loss) of the steps that both have; there must be `window` of them."""
    base, losses = read_losses(baseline), read_losses(run)
    steps = sorted(losses.keys() & base.keys())
    if len(steps) < window:
        raise ValueError(
            f'{run} and {baseline} have {len(steps)} steps in common, fewer than --window={window}'
        )
    return np.array(steps), np.array([losses[step] - base[step] for step in steps])


def relative(baseline, run, window):
    """(steps, differences()), each a mean over `window` points.

    The mean belongs to the last of them: a point uses no later steps.
    """
    steps, difference = differences(baseline, run, window)
    return steps[window - 1 :], running_mean(difference, window)


def running_mean(values, window):
    return np.convolve(values, np.ones(window) / window, mode='valid')


def final_difference(baseline, run, window):
    """The mean of differences() over the last `window` steps."""
    _, difference = differences(baseline, run, window)
    return float(difference[-window:].mean())


def early_difference(baseline, run):
    """The mean of differences() over the first tenth of the steps."""
    steps, difference = differences(baseline, run, 1)
    return float(difference[steps < (steps[-1] + 1) / 10].mean())


def critical_step(baseline, run, window):
    """(the step from which on `run` is behind, whether the logs reach it).

    If they do, it follows the step where the sum of the smoothed differences is lowest, which a few
    points beyond 0 do not move. If not, it is where a line through the last half of the curve meets
    0, or through its last 1,000 points (the paper's number) if those are fewer. The step is None if
    the run was never ahead, or if its curve does not rise.
    """
    steps, difference = relative(baseline, run, window)
    lead = np.cumsum(difference)
    last = int(lead.argmin())
    if lead[last] >= 0:
        return None, False
    if last < len(steps) - 1:
        return int(steps[last + 1]), True
    half = min(1000, max(2, len(steps) // 2))
    slope, intercept = np.polyfit(steps[-half:], difference[-half:], 1)
    if slope <= 0:
        return None, False
    return float(-intercept / slope), False


# --- loss against size ----------------------------------------------------------------------------


def last_loss(run, window):
    """The mean training loss of the last `window` logged steps."""
    losses = list(read_losses(run).values())[-window:]
    if len(losses) < window:
        raise ValueError(f'{run} has {len(losses)} logged steps, fewer than --window={window}')
    return float(np.mean(losses))


def parameters_of(run):
    """All weights of a run's model, from its config.json."""
    config = model_config(run, 'n_layer', 'n_head', 'n_embd', 'vocab_size')
    with torch.device('meta'):
        return GPT(config).num_params(non_embedding=False)


def power_law(parameters, losses):
    """(a, b) of loss = a * parameters ** -b, by least squares of the logarithms."""
    slope, intercept = np.polyfit(np.log(parameters), np.log(losses), 1)
    return float(np.exp(intercept)), float(-slope)


def tokens_saved(baseline, run, window):
    """The share of its steps that `run` can do without and still reach the baseline's last loss.

    None where it does not reach that loss.
    """
    target = last_loss(baseline, window)
    losses = list(read_losses(run).values())
    hits = np.flatnonzero(running_mean(losses, window) <= target)
    if not len(hits):
        return None
    return 1 - (hits[0] + window) / len(losses)


def savings(models, name, window):
    """What a model saves at the loss of the largest vanilla model.

    models: {name: {'parameters', 'loss', 'runs', 'power_law'}}, each list from small to large.
    Returns shares, None where they cannot be read, and under 'why' the reason.
    """
    base, other = models['vanilla'], models[name]
    why = []
    for model in ('vanilla', name):
        _, exponent = models[model]['power_law']
        if exponent <= 0:
            why.append(f"{model}'s loss does not fall with size here")
    if why:
        return {'parameters_saved': None, 'tokens_saved': None, 'why': '; '.join(why)}

    parameters = None
    a, b = other['power_law']
    sizes = np.log(other['parameters'])
    needed = np.log(a / base['loss'][-1]) / b  # log of the parameters that reach that loss
    if sizes[0] <= needed <= sizes[-1]:
        parameters = float(1 - np.exp(needed) / base['parameters'][-1])
    else:
        why.append(f'{name} reaches that loss outside the range of the fit')

    tokens = tokens_saved(base['runs'][-1], other['runs'][-1], window)
    if tokens is None:
        why.append(f'the largest {name} does not reach that loss')
    return {'parameters_saved': parameters, 'tokens_saved': tokens, 'why': '; '.join(why)}
