"""
What a wiring learns within a budget, and what it does not: synthetic tasks, fresh samples at every step.

$ python -m paper.synthetic S_3 --length=4 --n_layer=2 --n_head=2 --n_embd=64 \\
      --arms="vanilla; svformer: share_v=True" --rates="(1e-3, 2e-3)" --seeds="(1, 2, 3)"
$ python -m paper.synthetic hops --hops=4 --alphabet=8 --length=48 --n_layer=4 --n_head=4 --n_embd=64

S_3, S_5, A_5, Z_6, Z_60
            the product of the group's elements up to here
hops        hop_k (Sanford et al., 2402.09268): go k times from a token to the one after its last earlier
            occurrence. The first token of a sequence says k, which is 1 to `hops`; no token follows itself
recall      the token after the last earlier occurrence. `length` different tokens are followed by the
            same ones in another order, each of which asks, as in MQAR (2312.04927)
before      of the same sequences, the token before that occurrence

Each sequence begins with a token of its own. Without it, a group's `a a` could not be told from `a`:
the values that a softmax averages would all be equal.

An arm is what differs from the settings of model.GPT on the command line. A run is written to
<out>/<arm>_lr<rate>_seed<seed>.json, with its accuracy on other samples by position (of hops, by k) every
`interval` steps and at the end; one that exists is not made again. <out>/accuracy.png has all runs of the
command.
"""

import functools
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from configurator import choose, configure

import numpy as np
import torch
from torch import nn

from comparison import charts
from comparison.arms import parse_arms
from lib.files import as_json, one_line_errors, whole_file, write_json
from lib.machine import Machine
from lib.rundir import provenance
from model import GPT, GPTConfig, refuse


@dataclass
class SyntheticConfig:
    arms: str = 'vanilla; resformer: v_residual=True; svformer: share_v=True'
    rates: tuple = (1e-3,)  # learning rates
    seeds: tuple = (1,)  # of weights and samples
    length: int = 8  # elements of a product, tokens of hops, different tokens of recall
    alphabet: int = 16  # different tokens of hops
    hops: int = 1  # the largest k
    steps: int = 3000
    batch_size: int = 128  # sequences of a step
    interval: int = 100  # steps between two measurements of the accuracy; one is at the end
    out: str = ''  # a folder; '': out/synthetic/<task>


# The last ones begin sequences. It has room for every group.
VOCABULARY = 128


# --- tasks ----------------------------------------------------------------------------------------


@functools.cache
def group_table(name):
    """(n, n): the number of the product a b, of the numbers a and b of a group's elements."""
    kind, _, n = name.partition('_')
    numbers = torch.arange(int(n))
    if kind == 'Z':
        return (numbers[:, None] + numbers) % int(n)
    every = itertools.permutations(range(int(n)))
    elements = [p for p in every if kind == 'S' or is_even(p)]
    return torch.tensor([[elements.index(compose(a, b)) for b in elements] for a in elements])


def compose(a, b):
    return tuple(a[i] for i in b)


def is_even(permutation):
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


def product_targets(idx, table):
    targets = [torch.full_like(idx[:, 0], -1), idx[:, 1]]
    for element in idx.T[2:]:
        targets.append(table[targets[-1], element])
    return torch.stack(targets, 1)


def hop_targets(idx, k, offset):
    """What k (B, 1) hops lead to from each token of idx (B, T); -1 where they leave the sequence. A hop
    goes to what stands `offset` after the token's last earlier occurrence."""
    places = torch.arange(idx.size(1))
    alike = (idx[:, :, None] == idx[:, None]).tril(-1)
    # 0: there is none, and from 0 none either.
    hop = torch.where(alike, places + offset, 0).amax(-1)
    place = places.expand_as(idx)
    for i in range(int(k.max())):
        place = torch.where(i < k, hop.gather(1, place), place)
    return idx.gather(1, place).where(place > 0, -1)


def draw_samples(task, settings, count, generator):
    """(idx, targets, slots), each (count, T); the target -1 is none. By slot, accuracy is measured."""
    most = settings.hops if task == 'hops' else 1
    k = torch.randint(most, (count, 1), generator=generator) + 1
    if task in ('recall', 'before'):
        tokens = torch.rand(count, 2, settings.length, generator=generator).argsort().flatten(1)
    elif task == 'hops':
        # No token follows itself: from the second of two, every hop would lead to it again.
        strides = torch.randint(1, settings.alphabet, (count, settings.length), generator=generator)
        tokens = strides.cumsum(1) % settings.alphabet
    else:
        shape = count, settings.length
        tokens = torch.randint(len(group_table(task)), shape, generator=generator)
    idx = torch.cat([VOCABULARY - k, tokens], 1)
    slots = (k if task == 'hops' else torch.arange(idx.size(1))).expand_as(idx)
    if '_' in task:
        return idx, product_targets(idx, group_table(task)), slots
    return idx, hop_targets(idx, k, -1 if task == 'before' else 1), slots


# --- runs -----------------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model, idx, targets, slots):
    """The share of targets that a model finds, by slot; NaN where a slot has none."""
    hits = model(idx)[0].argmax(-1) == targets
    slots = slots[targets != -1]
    return (slots.bincount(hits[targets != -1].double()) / slots.bincount()).tolist()


def learn(task, settings, config, rate, seed):
    """{step: accuracy()} of a model that is trained."""
    tests = draw_samples(task, settings, 1000, torch.Generator().manual_seed(-1 - seed))
    idx = tests[0]
    refuse(
        idx[:, 1:].max() >= idx[:, 0].min(),
        f'more than {VOCABULARY} different tokens; lower --length, --alphabet or --hops',
    )
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config, seed)
    torch.manual_seed(seed)  # of dropout
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95), fused=True)
    # A warm-up over a tenth of the steps, and a cosine to nothing.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, settings.steps, pct_start=0.1, cycle_momentum=False
    )
    curve = {}
    for step in range(1, settings.steps + 1):
        idx, targets, _ = draw_samples(task, settings, settings.batch_size, generator)
        _, loss = model(idx, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % settings.interval == 0 or step == settings.steps:
            model.eval()
            curve[step] = accuracy(model, *tests)
            model.train()
    return curve


def check_same(path, kept, run):
    """Refuse to take the run that a file holds for one of other settings."""
    run = as_json(run)
    of_command = 'arms', 'rates', 'seeds', 'out'
    different = [name for name in run if name not in of_command and kept.get(name) != run[name]]
    names = ', '.join(different)
    refuse(different, f'{path} is a run with another {names}; name another --out, or delete it')


def main():
    with one_line_errors():
        tasks = 'S_3 S_5 A_5 Z_6 Z_60 hops recall before'.split()
        schemas = SyntheticConfig, GPTConfig
        task, (settings, _) = choose(dict.fromkeys(tasks, schemas), __doc__)
        arms = parse_arms(settings.arms)
        out = Path(settings.out or f'out/synthetic/{task}')
        figure, axes = charts.picture(f'{task}: accuracy at the end, mean over seeds')
        common = [f'--vocab_size={VOCABULARY}', '--block_size=256', *sys.argv[2:]]
        models = {}
        for arm, changes in arms.items():
            flags = [f'--{name}={value}' for name, value in changes.items()]
            own, models[arm] = configure(*schemas, argv=common + flags)
            refuse(own != settings, f'arm {arm} changes more than the model')
        for (arm, config), rate in itertools.product(models.items(), settings.rates):
            ends = []
            for seed in settings.seeds:
                path = out / f'{arm}_lr{rate:g}_seed{seed}.json'
                run = asdict(settings) | {'task': task, 'rate': rate, 'seed': seed}
                run['model'] = asdict(config)
                if not path.exists():
                    run |= provenance(Machine('cpu'))
                    begin = time.process_time()
                    run['accuracy'] = learn(task, settings, config, rate, seed)
                    run['cpu_seconds'] = round(time.process_time() - begin)
                    write_json(path, as_json(run))
                kept = json.loads(path.read_text())
                check_same(path, kept, run)
                *_, end = kept['accuracy'].values()
                ends.append(end)
            axes.plot(np.mean(np.array(ends, dtype=float), 0), marker='.', label=f'{arm}, {rate:g}')
        axes.set_xlabel('k' if task == 'hops' else 'position')
        axes.legend()
        with whole_file(out / 'accuracy.png') as file:
            figure.savefig(file, format='png', dpi=150)


if __name__ == '__main__':
    main()
