"""Small comparisons for the tests of compare.py: their data, their plans, and runs that pretend."""

import math

from configurator import configure, sort_arguments

import numpy as np
import pytest
import runs
from conftest import write_dataset

import compare
import train
from comparison import launch
from comparison.assemble import compare_plan
from comparison.plan import Run
from comparison.record import write_plan
from comparison.results import Results
from model import GPTConfig
from train import TrainConfig

SIZE = """
dataset = 'chain'
n_layer, n_head, n_embd = 2, 2, 32
block_size, vocab_size = 32, 64
batch_size, gradient_accumulation_steps = 8, 1
max_iters, warmup_iters = 30, 3
learning_rate, min_lr = 2e-2, 2e-3
device, compile = 'cpu', False
"""
ARMS = '--arms=vanilla; resformer: v_residual=True; svformer: share_v=True'


def chain(length, seed):
    """Tokens that mostly follow from the one before: more to learn than there is time for."""
    random = np.random.RandomState(seed)
    following = np.random.RandomState(0).permutation(64)
    tokens = random.randint(0, 64, length)
    for i in np.flatnonzero(random.rand(length) < 0.8):
        tokens[i] = following[tokens[i - 1]]
    return tokens


@pytest.fixture
def place(here, monkeypatch):
    """A folder with small.py and data/chain, in which the test runs; trainings are in this process."""
    make_place(here)
    monkeypatch.setattr(launch, 'launch', launch_here)
    return here


def make_place(folder):
    splits = {
        'train': {'A': chain(20_000, 1), 'B': chain(10_000, 2)},
        'validation': {'A': chain(700, 3), 'B': chain(300, 4)},
    }
    write_dataset(folder / 'data' / 'chain', splits)
    (folder / 'small.py').write_text(SIZE)


def launch_here(jobs, slots, gpus, tick):
    """launch.launch() without processes, which take seconds to start."""
    attempts = set()
    while queue := [job for job in jobs() if job.folder not in attempts]:
        job = queue[0]
        attempts.add(job.folder)
        status, _ = runs.call(train.main, *job.arguments)
        if status:
            job.folder.mkdir(parents=True, exist_ok=True)
            launch.failure_file(job.folder).write_text(str(status).removeprefix('error: '))
    return attempts


def plan_of_line(*argv):
    """The Plan of a command line of compare.py."""
    schemas = compare.CompareConfig, TrainConfig, GPTConfig
    options, _, _ = configure(*schemas, argv=argv)
    files, flags = sort_arguments(argv)
    return compare.plan_of(options, files, dict(flag[2:].split('=', 1) for flag in flags))


def make_plan(*words):
    return plan_of_line('small.py', *words)


def pretend(plan, run, loss):
    """The folder of a run as train.py would have left it."""
    settings, config = plan.configs(run)
    values = [loss + 3 * math.exp(-step / 5) for step in range(settings.max_iters)]
    stated = {**vars(settings), **vars(config), 'code': plan.code, 'device': 'cpu', 'threads': 1}
    return runs.write_run(plan.run_folder(run), values, loss, **stated)


def scatter(seed, name=''):
    random = np.random.default_rng([seed, *name.encode()])
    return 2.0 + 0.01 * random.normal()


def scattered(run):
    """The loss of a run of an arm that gains nothing."""
    return scatter(run.seed, run.arm)


def best_at(rates):
    """loss_of() where each arm has its own best rate, {arm: rate}."""
    return lambda run: scattered(run) + abs(math.log(run.rate / rates[run.arm]))


def finished(*words, **gains):
    """A plan, that of ARMS with three seeds without words, of which every run has arrived; gains: what
    is added to the losses of an arm."""
    plan = make_plan(*words or (ARMS, '--seeds=3'))
    pretend_all(plan, lambda run: scattered(run) + gains.get(run.arm, 0.0))
    return plan


def pretend_all(plan, loss_of=scattered):
    """Train everything that a plan wants, in no time; loss_of(run) is its validation loss."""
    results = Results(plan)
    while jobs := results.jobs():
        known = {plan.run_folder(run): run for run in results.all_runs()}
        for job in jobs:
            pretend(plan, known[job.folder], loss_of(known[job.folder]))
    return results


def folder_of(plan, arm, seed):
    """The folder of an arm's run at the rate of small.py."""
    return plan.run_folder(Run(arm, 0.02, seed))


def compare_command(*words):
    return runs.call(compare.main, 'small.py', *words)


def collect(plan):
    return compare_plan(Results(plan), write_plan(plan))
