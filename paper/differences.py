"""
What models of several seeds came to: a table of their losses, and one of the differences between them.

$ python -m paper.differences results/claims/main/*

The runs share everything but the model, the seed and each model's own learning rate. Differences are
those of every model to vanilla, that of SVFormer to ResFormer, and those of models that the paper's
claims name, at any size: the mean over the seeds that both models have, ± half of its 95% t interval,
in bold where that excludes 0. Nothing is corrected for their number, and they are no verdicts: see
verdicts.py.
"""

from dataclasses import dataclass

from comparison.verdict import describe, half_width
from configurator import configure, one_line_errors
from paper import losses
from paper.claims import CLAIMS
from paper.figures import NAMES, R, S, V
from paper.judging import early_loss, read_groups, validation_loss, variant_of
from paper.runs import Run
from tables import markdown_table

LAST = 50  # steps of the last training loss


def last_loss(ours, theirs):
    return losses.final_difference(theirs.folder, ours.folder, LAST)


COLUMNS = {
    'training loss, first 10% of steps': early_loss,
    f'training loss, last {LAST} steps': last_loss,
    'validation loss at the end': validation_loss,
}


@dataclass
class DifferencesConfig:
    runs: tuple = ()  # folders of finished runs of one size and length

    def __post_init__(self):
        if not self.runs:
            raise ValueError('name the folders of runs')


def arms_of(folders):
    """{model: {seed: FinishedRun}}, in the order of NAMES. Raises ValueError for runs that cannot be
    compared, and for models that the paper does not have."""
    groups = read_groups(folders, {})
    if len(groups) > 1:
        raise ValueError(
            f'the runs have {len(groups)} different settings: name those of one comparison'
        )
    (variants,) = groups.values()
    arms = {}
    for model in NAMES:
        seeds = variants.pop(variant_of(Run(model)), None)
        if seeds:
            arms[model] = dict(sorted(seeds.items()))
    for seeds in variants.values():
        folder = next(iter(seeds.values())).folder
        raise ValueError(f'{folder} is no model of the paper')
    return arms


def pairs_of(arms):
    """[(model, other)]: each with vanilla, SVFormer with ResFormer, then those of the claims."""
    pairs = [(model, V) for model in arms if model != V] + [(S, R)]
    for claim in CLAIMS:
        ours, theirs = claim.ours.model, claim.theirs.model
        is_new = (ours, theirs) not in pairs and (theirs, ours) not in pairs
        if ours != theirs and is_new:
            pairs.append((ours, theirs))
    return [pair for pair in pairs if arms.keys() >= set(pair)]


def loss_table(arms):
    """Validation losses at the end by seed; means of the seeds that all models have, and of all."""
    every = sorted(set().union(*arms.values()))
    common = [seed for seed in every if all(seed in seeds for seeds in arms.values())]
    rows = []
    for model, seeds in arms.items():
        values = {seed: run.losses['mean'] for seed, run in seeds.items()}
        cells = [f'{values[seed]:.4f}' if seed in values else '' for seed in every]
        means = [mean([values[seed] for seed in common]), mean(list(values.values()))]
        rows.append([NAMES[model], *cells, *means])
    seeds = ', '.join(map(str, common))
    head = [
        'validation loss',
        *(f'seed {seed}' for seed in every),
        f'mean of {seeds}',
        'mean of all',
    ]
    return markdown_table(head, rows)


def mean(values):
    return f'{sum(values) / len(values):.4f}' if values else ''


def difference_table(arms):
    rows = []
    for ours, theirs in pairs_of(arms):
        seeds = sorted(arms[ours].keys() & arms[theirs].keys())
        pairs = {seed: (arms[ours][seed], arms[theirs][seed]) for seed in seeds}
        cells = []
        for difference in COLUMNS.values():
            values = {seed: difference(*pair) for seed, pair in pairs.items()}
            cells.append(in_words(describe(values)))
        each = ' '.join(f'{validation_loss(*pair):+.3f}' for pair in pairs.values())
        rows.append([f'{NAMES[ours]} - {NAMES[theirs]}', str(len(seeds)), *cells, each])
    head = ['difference', 'seeds', *COLUMNS, 'of each seed']
    return markdown_table(head, rows, (0, len(head) - 1))


def in_words(numbers):
    """The mean and half of its interval, in bold where that excludes 0; numbers: of describe()."""
    if numbers['mean'] is None:
        return ''
    text = f'{numbers["mean"]:+.4f}'
    if numbers['low'] is None:
        return text
    half = half_width(numbers)
    text += f' ± {half:.4f}'
    return f'**{text}**' if abs(numbers['mean']) > half else text


def main():
    with one_line_errors(ValueError, OSError):
        (settings,) = configure(DifferencesConfig, plain='runs')
        arms = arms_of(settings.runs)
        print(f'{loss_table(arms)}\n\n{difference_table(arms)}')


if __name__ == '__main__':
    main()
