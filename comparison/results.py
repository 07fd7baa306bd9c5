"""
Which runs of a plan have finished, at which learning rates arms go on, and the training of the rest.

    results = Results(plan)
    results.state(run)           what a run's folder holds
    results.rate(arm)            the learning rate of an arm's test runs; None while it is not known
    results.test_runs(arm)       {test seed: Run}
    train_plan(results, slots)   train what is missing; Ctrl-C saves, and the next call goes on
    results.problems()           {run or arm: why it has not finished}

Everything is read from the runs' own folders: nothing is lost when compare.py is killed, and it does
not matter who trained them.
"""

import math
import statistics
import sys

from tqdm import tqdm

from comparison import launch
from comparison.plan import Run
from comparison.runs import MIXED_CODE, difference, read_state


class Results:
    """Which runs of a plan have finished, and which are still to be trained."""

    def __init__(self, plan):
        self.plan = plan
        self.finished = {}  # {name of a run: State}; its files do not change any more

    def state(self, run):
        """The State of a run."""
        if run.name not in self.finished:
            state = read_state(self.plan.run_folder(run))
            foreign = foreign_text(state, self.plan.facts(run), self.plan.ignored(run.arm))
            if foreign:
                state.kind, state.detail = 'foreign', foreign
            if state.kind != 'finished':
                return state
            self.finished[run.name] = state
        return self.finished[run.name]

    # --- rates ---

    def try_rate(self, arm, rate):
        """losses_of() an arm's tuning runs at a rate."""
        return losses_of(self.state(Run(arm, rate, seed)) for seed in self.plan.tuning_seeds)

    def tune(self, arm):
        """sweep() of an arm's tuning runs, of a plan with rates.

        Where the best is the lowest or the highest, one more step of the grid is tried, once.
        """
        rates = self.plan.rates
        trials = {rate: self.try_rate(arm, rate) for rate in rates}
        tuned = sweep(trials)
        if tuned['edge']:
            extension = next_rate(rates, tuned['best'])
            trials[extension] = self.try_rate(arm, extension)
        return sweep(trials)

    def rate(self, arm):
        """The learning rate of an arm's test runs; None while it is not known."""
        if self.plan.rates:
            return self.tune(arm)['best']
        return self.plan.own_rate(arm)

    # --- runs ---

    def test_runs(self, arm):
        """{test seed: Run}; {} while the arm's rate is not known."""
        rate = self.rate(arm)
        if rate is None:
            return {}
        runs = [Run(arm, rate, seed) for seed in self.plan.test_seeds(arm)]
        return dict(zip(self.plan.seeds, runs, strict=True))

    def tuning_runs(self, arm):
        """The runs that choose an arm's rate, as far as they are known."""
        rates = self.tune(arm)['trials'] if self.plan.rates else ()
        return [Run(arm, rate, seed) for seed in self.plan.tuning_seeds for rate in rates]

    def all_runs(self):
        """Every run known so far, in the order of training: seed by seed, all arms of a seed."""
        tuning, tests = [], []
        for arm in self.plan.arms:
            tuning += self.tuning_runs(arm)
            tests += self.test_runs(arm).items()
        tuning.sort(key=lambda run: run.seed)
        tests.sort(key=lambda test: test[0])
        return tuning + [run for _, run in tests]

    def jobs(self):
        """The runs still to be trained, as launch.Job.

        A run that failed is tried again; one that diverged or is foreign is never touched.
        """
        jobs = []
        for run in self.all_runs():
            if self.state(run).kind not in ('finished', 'diverged', 'foreign'):
                folder = self.plan.run_folder(run)
                jobs.append(launch.Job(self.plan.arguments(run), folder))
        return jobs

    def problems(self):
        """{run or arm: why it has not finished}. A rate at which tuning diverges is no problem."""
        texts, untuned = {}, {}
        for run in self.all_runs():
            state = self.state(run)
            is_tuning = run.seed in self.plan.tuning_seeds
            if state.kind == 'finished' or (is_tuning and state.kind == 'diverged'):
                continue
            texts[run.name] = state.reason
            if state.kind == 'foreign':
                texts[run.name] += '; delete its folder, or give another --name'
            if is_tuning:
                untuned.setdefault(run.arm, f'{run.name} is {texts[run.name]}')
        for arm in self.plan.arms:
            if self.rate(arm) is None:
                reason = untuned.get(arm, 'none of its --rates ends with a finite loss')
                texts[arm] = f'the learning rate of {arm} is not known, because {reason}'
        return texts


def foreign_text(state, wanted, but):
    """In words, how a run differs from the one that is wanted; '' where it does not."""
    other = difference(state.facts, wanted, but) if state.config else None
    if not other:
        return ''
    name, value, expected = other
    if name == 'data':
        return f'it was trained on other data than {wanted["dataset"]} now holds'
    if name == 'code':
        return f'it was trained by other code, {value}, not {expected}; {MIXED_CODE}'
    return f'a run with {name}={value!r}, not {expected!r}'


def losses_of(states):
    """[the loss of each tuning run at a rate]; None unless all are there.

    A run that diverged has an infinite loss. One that was killed, or that is another's, says nothing
    about its rate.
    """
    losses = []
    for state in states:
        if state.kind not in ('finished', 'diverged'):
            return None
        losses.append(math.inf if state.kind == 'diverged' else state.losses['mean'])
    return losses


def sweep(trials):
    """What is known of an arm's rates, {rate: losses_of() its tuning runs}.

    `trials` in order, their `means`, the `best` rate, that of the lowest mean, and whether it is at the
    `edge`. The best is None while a run is missing, or if every rate diverged.
    """
    trials = dict(sorted(trials.items()))
    means = {rate: losses and statistics.fmean(losses) for rate, losses in trials.items()}
    best = None
    if None not in means.values() and min(means.values()) < math.inf:
        best = min(means, key=means.get)
    edge = best in (min(trials), max(trials))
    return {'trials': trials, 'means': means, 'best': best, 'edge': edge}


def next_rate(rates, edge):
    """One more step of a sorted grid, beyond its edge, by the ratio of its last two."""
    inner = rates[1] if edge == rates[0] else rates[-2]
    return float(f'{edge * edge / inner:.6g}')


# --- training -------------------------------------------------------------------------------------


def train_plan(results, slots, gpus=1):
    """Train the missing runs of a plan, with a line of progress.

    slots: launch.find_slots(). gpus: of each training. If one fails, the others are still trained: ask
    results.problems(). KeyboardInterrupt lets every training save itself, and is raised again.
    ValueError where code or data were edited before all had started.
    """
    plan = results.plan
    # A log file takes a line a minute.
    interval = 1 if sys.stderr.isatty() else 60
    bar = tqdm(unit='step', desc='runs', mininterval=interval)
    expected = []

    def jobs_left():
        expected[:] = planned_steps(results)
        bar.total = sum(expected)
        # Who edits the code or the data lets those under way end, and starts no other.
        return results.jobs() if plan.is_unchanged() else []

    def tick(running):
        finished = [state.config['max_iters'] for state in results.finished.values()]
        bar.set_description(f'{len(finished)} of {len(expected)} runs', refresh=False)
        steps = sum(finished) + sum(launch.last_step(job.folder) for job in running)
        bar.update(steps - bar.n)

    with bar:
        attempts = launch.launch(jobs_left, slots, gpus, tick)
    left = [job for job in results.jobs() if job.folder not in attempts]
    if left and not plan.is_unchanged():
        raise ValueError(
            f'code or data were edited (runs that were not started: {len(left)}); restore them, or give '
            f'another --name; {MIXED_CODE}'
        )


def planned_steps(results):
    """The steps of each run of a plan, as far as they can be foreseen: a grid of rates may be extended."""
    plan = results.plan
    steps = []
    for arm, own in plan.arms.items():
        runs = len(results.tuning_runs(arm)) + len(plan.seeds)
        steps += [own.training.max_iters] * runs
    return steps
