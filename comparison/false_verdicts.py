"""
What the rule of verdict.py calls better or worse by mistake, where no arm is better: by simulation.

$ python -m comparison.false_verdicts        # the table of results/verdict/README.md, in ten seconds

Each comparison is one contrast whose true mean difference is 0, of 3, 5 or 8 seeds:

    normal       as the t test takes them for
    lognormal    exp(N(0, 1)) less its mean: most differences lie to one side, and a few far to the other
    sticking     N(0, 1), and in one run of five 5 more, less the mean: a run that sticks loses much
"""

import math

import numpy as np

from comparison.verdict import decide, t_test
from configurator import configure
from lib.files import one_line_errors
from lib.tables import markdown_table

SEEDS = (3, 5, 8)
COMPARISONS = 200_000


def gaussian(random, shape):
    return random.normal(size=shape)


def lognormal(random, shape):
    return random.lognormal(size=shape) - math.exp(0.5)


def sticking(random, shape):
    sticks = random.random(shape) < 0.2
    return random.normal(size=shape) + 5 * sticks - 1


DISTRIBUTIONS = {'normal': gaussian, 'lognormal': lognormal, 'sticking': sticking}


def false_verdicts(distribution, seeds, comparisons=COMPARISONS):
    """The shares of comparisons that the rule calls (better, worse)."""
    random = np.random.default_rng(0)
    mean, _, _, p = t_test(distribution(random, (comparisons, seeds)))
    words = decide(mean, p, seeds)
    return (words == 'better').mean(), (words == 'worse').mean()


def main():
    with one_line_errors():
        configure(doc=__doc__)
    rows = []
    for name, distribution in DISTRIBUTIONS.items():
        row = [name]
        for seeds in SEEDS:
            better, worse = false_verdicts(distribution, seeds)
            row.append(f'{better + worse:.1%} (better {better:.1%}, worse {worse:.1%})')
        rows.append(row)
    print(markdown_table(['differences', *(f'{seeds} seeds' for seeds in SEEDS)], rows))


if __name__ == '__main__':
    main()
