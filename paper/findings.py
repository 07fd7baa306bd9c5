"""
What the runs of a figure show, in words, beside what the paper prints of it.

Each model has one run, so one seed, which decides nothing: a line says how large the difference is
here and which sign it has in the paper, but gives no verdict. compare.py does, from several seeds.
"""

from dataclasses import replace

import numpy as np

from paper import crossings, insides, losses
from paper.claims import CLAIMS, METRICS, SIGNS
from paper.numbers import SAVINGS
from paper.runs import folder

# --- what a claim comes to: (a difference, its error in words) ------------------------------------

# claim: a claims.Claim whose runs have finished. panels: {how: the numbers of that panel}.


def final_loss(claim, scale, panels):
    return losses.final_difference(*claim_folders(claim, scale), scale.window), ''


def early_loss(claim, scale, panels):
    return losses.early_difference(*claim_folders(claim, scale)), ''


def claim_folders(claim, scale):
    """(theirs, ours): the baseline comes first."""
    return folder(claim.theirs, scale), folder(claim.ours, scale)


def lead(claim, scale, panels):
    leads = []
    for run in (claim.ours, claim.theirs):
        vanilla = folder(replace(run, model='vanilla'), scale)
        leads.append(losses.final_difference(vanilla, folder(run, scale), scale.window))
    return leads[0] - leads[1], ''


def validation_loss(claim, scale, panels):
    report = panels['loss']['runs'][str(folder(claim.ours, scale))]
    mean = report['minus_first']['mean']
    return mean['loss'], f'± {mean["standard_error"] or 0:.4f} over windows'


def accuracy(claim, scale, panels):
    reports = panels['tasks']['runs']
    theirs, ours = (reports[str(path)] for path in claim_folders(claim, scale))
    error = np.hypot(ours['average_stderr'], theirs['average_stderr'])
    return ours['average'] - theirs['average'], f'± {error:.4f} over items'


def inside_of_claim(metric):
    """The difference of what an analysis found inside two models."""
    kind, difference = insides.DIFFERENCES[metric]

    def of_claim(claim, scale, panels):
        reports = [panels[kind][str(folder(run, scale))] for run in (claim.ours, claim.theirs)]
        return difference(*map(insides.as_arrays, reports)), ''

    return of_claim


# All of claims.METRICS but the critical step, which describe_crossings() reports as a whole.
CLAIM_DIFFERENCES = {
    'final loss': final_loss,
    'overtaken': final_loss,
    'early loss': early_loss,
    'lead': lead,
    'validation loss': validation_loss,
    'accuracy': accuracy,
    **{metric: inside_of_claim(metric) for metric in insides.DIFFERENCES},
}

# --- in words -------------------------------------------------------------------------------------

ONE_SEED = 'one seed: no verdict'


def against_the_paper(name, panels, scale):
    """One line for each claim of a figure; panels: [{'how', 'numbers'}]."""
    panels = {panel['how']: panel['numbers'] for panel in panels}
    lines = []
    for claim in CLAIMS:
        if claim.figure == name and claim.metric in CLAIM_DIFFERENCES:
            lines.append(describe(claim, scale, panels))
    if 'ResFormer' in panels.get('scaling', {}):
        lines.append(describe_savings(panels['scaling']['ResFormer']))
    if 'critical' in panels:
        lines.append(describe_crossings(panels['critical']))
    return [f'{name}: {line}' for line in lines]


def describe(claim, scale, panels):
    difference, error = CLAIM_DIFFERENCES[claim.metric](claim, scale, panels)
    names = [claim.ours.name(scale)]
    if claim.theirs != claim.ours:
        names.append(claim.theirs.name(scale))
    number = f'{difference:+.4f} {error}'.strip()
    paper = f'the paper: {SIGNS[claim.sign]} 0'
    return f'{METRICS[claim.metric]}, {" minus ".join(names)}: {number} ({paper}); {ONE_SEED}'


def describe_savings(saved):
    """saved: from losses.savings()."""
    words = []
    for i, what in enumerate(('parameters', 'tokens')):
        share = saved[f'{what}_saved']
        here = 'n/a' if share is None else f'{share:.0%}'
        low, *_, high = sorted(version[i] for version in SAVINGS.values())
        words.append(f'{here} of the {what} (the paper: {low:.0%} to {high:.0%})')
    words[-1] += ' where its learning rate has not decayed yet'
    why = f', {saved["why"]}' if saved['why'] else ''
    return f'at equal loss ResFormer saves {" and ".join(words)}; {ONE_SEED}{why}'


def describe_crossings(points):
    """points: from crossings.crossings_of()."""
    words = [f'{point["length"]}: {crossings.describe(point)}' for point in points]
    paper = 'the paper: overtaken, the later, the longer the sequence'
    return f'SVFormer by sequence length: {"; ".join(words)} ({paper}); {ONE_SEED}'
