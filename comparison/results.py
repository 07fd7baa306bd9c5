"""
Which runs of a comparison have finished, and which are still to be trained.

Everything is read from the runs' own folders: nothing is lost when compare.py is killed, and it does
not matter who trained them.
"""

import math
import statistics
from dataclasses import replace

from comparison import launch
from comparison.plan import Run
from comparison.runs import read_state


def different_data(states):
    """Which of these runs saw different data, in words, as far as they say; '' where none did."""
    folders = {}  # by the fingerprint of their data, which older runs lack
    for state in states:
        if 'data' in state.config:
            folders.setdefault(state.config['data'], str(state.folder))
    return f'not the same data: {" and ".join(folders.values())}' if len(folders) > 1 else ''


# --- the runs of a plan ---------------------------------------------------------------------------


class Results:
    """Which runs of a plan have finished, and which are still to be trained."""

    def __init__(self, plan):
        self.plan = plan
        self.cache = {}

    def state(self, run):
        """The State of a run; its folder is read again only where its files have changed."""
        folder = self.plan.run_folder(run)
        stamps = []
        for name in ('log.jsonl', 'config.json', 'failed.txt'):
            path = folder / name
            stamps.append((path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None)
        if run.name in self.cache:
            stamps_before, state = self.cache[run.name]
            if stamps_before == stamps:
                return state
        state = read_state(folder, self.plan.wanted(run), self.plan.ignored(run))
        self.cache[run.name] = stamps, state
        return state

    def tuning_runs(self, arm, rate):
        return [Run(arm, rate, seed) for seed in self.plan.options.tuning_seeds]

    def try_rate(self, arm, rate):
        """{'losses': {seed: loss}, 'mean': ..., 'complete': whether all are there}.

        A run that diverged has an infinite loss. One that was killed, or that is another's, says
        nothing about its rate.
        """
        losses = {}
        for run in self.tuning_runs(arm, rate):
            state = self.state(run)
            if state.kind == 'finished':
                losses[run.seed] = state.loss
            elif state.has_diverged:
                losses[run.seed] = math.inf
        complete = len(losses) == len(self.plan.options.tuning_seeds)
        mean = statistics.fmean(losses.values()) if complete else None
        return {'losses': losses, 'mean': mean, 'complete': complete}

    def tune(self, arm):
        """An arm's rates and the best of them, or None where the rates are given.

        Where the best is the lowest or the highest, one more step of the grid is tried, once.
        """
        rates = sorted(self.plan.options.rates)
        if not rates:
            return None
        trials = {rate: self.try_rate(arm, rate) for rate in rates}
        best = best_rate(trials)
        extension = None
        if best in (rates[0], rates[-1]):
            extension = next_rate(rates, best)
            trials[extension] = self.try_rate(arm, extension)
            best = best_rate(trials)
        edge = best in (min(trials), max(trials))
        return {
            'trials': dict(sorted(trials.items())),
            'complete': all(trial['complete'] for trial in trials.values()),
            'best': best,
            'edge': edge,
            'extension': extension,
        }

    def rate(self, arm):
        """The learning rate of an arm's test runs; None while it is not known."""
        sweep = self.tune(arm)
        return sweep['best'] if sweep else self.plan.own_rate(arm)

    def why_no_rate(self, arm):
        """Why an arm has no learning rate, and what to do; '' where it has one, or only has to wait."""
        sweep = self.tune(arm)
        if not sweep or sweep['best'] is not None:
            return ''
        if sweep['complete']:
            return f'no learning rate of {arm} ends with a finite loss: give other --rates'
        for rate in sweep['trials']:
            for run in self.tuning_runs(arm, rate):
                state = self.state(run)
                if state.kind not in ('failed', 'foreign') or state.has_diverged:
                    continue
                advice = 'the same command tries it again'
                if state.kind == 'foreign':
                    advice = 'delete its folder, or give another --name'
                return (
                    f'the learning rate of {arm} is not known, because {run.name} is {state.kind}: '
                    f'{state.detail}; {advice}'
                )
        return ''

    def test_runs(self, arm):
        """{test seed: Run}; {} while the arm's rate is not known."""
        rate = self.rate(arm)
        if rate is None:
            return {}
        offset = self.plan.arms[arm].seed_offset
        return {seed: Run(arm, rate, seed + offset) for seed in self.plan.options.seeds}

    def ladder_runs(self):
        """{steps: {test seed: Run}} of the baseline, trained shorter or longer."""
        runs = self.test_runs(self.plan.baseline)
        ladder = {}
        for steps in self.plan.options.baseline_steps:
            ladder[steps] = {seed: replace(run, steps=steps) for seed, run in runs.items()}
        return ladder

    def all_runs(self):
        """Every run known so far, in the order of training: seed by seed, all arms of a seed."""
        options = self.plan.options
        runs = []
        if options.rates:
            trials = {arm: self.tune(arm)['trials'] for arm in self.plan.arms}
            rates = sorted(set().union(*trials.values()))
            for seed in options.tuning_seeds:
                for rate in rates:
                    runs += [Run(arm, rate, seed) for arm in trials if rate in trials[arm]]

        test_runs = [self.test_runs(arm) for arm in self.plan.arms]
        test_runs += self.ladder_runs().values()
        for seed in options.seeds:
            runs += [by_seed[seed] for by_seed in test_runs if by_seed]
        return runs

    def jobs(self):
        """The runs still to be trained, as launch.Job.

        A run that failed is tried again; a foreign one is never touched.
        """
        jobs = []
        for run in self.all_runs():
            if self.state(run).kind not in ('finished', 'diverged', 'foreign'):
                folder = self.plan.run_folder(run)
                jobs.append(launch.Job(run.name, self.plan.arguments(run), folder))
        return jobs

    def forget_failures(self):
        """Remove the failures of all runs that jobs() lists: they are tried again.

        A tuning run that was given up would otherwise count as lost while it is trained once more,
        and its arm would go on at a rate that is perhaps not the best.
        """
        for job in self.jobs():
            launch.failure_file(job.folder).unlink(missing_ok=True)

    def counts(self):
        """{'tuning': runs, 'test': runs} that have finished in the comparison's folder, of any plan."""
        tuning_seeds = self.plan.options.tuning_seeds if self.plan.options.rates else ()
        counts = {'tuning': 0, 'test': 0}
        for log in sorted(self.plan.folder.glob('*/log.jsonl')):
            state = read_state(log.parent)
            if state.kind in ('finished', 'diverged'):
                counts['tuning' if state.config['seed'] in tuning_seeds else 'test'] += 1
        return counts


def best_rate(trials):
    """The rate of the lowest mean loss; None while a run is missing, or if every rate diverged."""
    if not all(result['complete'] for result in trials.values()):
        return None
    best = min(trials, key=lambda rate: (trials[rate]['mean'], rate))
    return best if math.isfinite(trials[best]['mean']) else None


def next_rate(rates, edge):
    """One more step of a sorted grid, beyond its edge, by the ratio of its last two."""
    inner = rates[1] if edge == rates[0] else rates[-2]
    return float(f'{edge * edge / inner:.6g}')
