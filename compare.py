"""
Does it help? Arms x seeds -> a verdict with its uncertainty, and a report.

$ python compare.py config/demo.py --arms="vanilla; resformer: v_residual=True" --seeds=5
$ python compare.py config/demo.py --arms="vanilla; mine: residual_from=previous v_residual=True" \\
      --rates="(1e-3, 2e-3, 4e-3)" --seeds=5         # every arm at its own best learning rate
$ python compare.py ... --print=True                 # the commands still to be run, for any scheduler
$ python compare.py ... --watch=True                 # train nothing, redraw the report as runs arrive
$ python compare.py out/demo/vanilla out/demo/resformer out/demo/svformer     # runs that exist

Each arm is trained with each seed as an ordinary run in out/compare/<name>/; finished runs are
reused, others resumed. Ctrl-C saves everything, and the same command goes on. A machine that fails
takes its runs with it: they are saved when they end or are stopped, and with --eval_interval=1000 every
1,000 steps, too. The report is out/compare/<name>/report.html; beside it are report.md, report.json and
forest.svg.
"""

import datetime
import json
import shlex
import sys
import time

from comparison import charts, launch, measures, report
from comparison.assemble import compare_plan, compare_runs, folder_of_runs, problems
from comparison.plan import CompareConfig, Plan, Run, code_state, hash_of, same_code
from comparison.results import Results
from comparison.runs import as_json
from comparison.verdict import distributions
from configurator import configure, first_line, one_line_errors
from files import locked, write_whole
from model import GPTConfig
from train import TrainConfig


def write_report(folder, comparison):
    """Write report.md, .html and .json, and forest.svg; unchanged files are not written again.

    While one process trains, another may watch: both write these files, and no others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {name: value for name, value in comparison.items() if name not in ('curves', 'norms')}
    texts = {
        'report.json': json.dumps(as_json(numbers), indent=1) + '\n',
        'report.md': report.markdown(comparison),
        'report.html': report.html(comparison),
        'forest.svg': report.forest_svg(comparison),
    }
    for name, text in texts.items():
        path = folder / name
        # As long as no contrast has a seed, there is no forest plot.
        if text and (not path.exists() or path.read_text() != text):
            write_whole(path, text, shared=True)


def print_commands(results):
    """The commands that can be run now, one per line; those that depend on results come later."""
    plan = results.plan
    jobs = results.jobs()
    for job in jobs:
        print(launch.shell_line(job.arguments, plan.settings.device, plan.options.gpus))
    states = {run.name: results.state(run) for run in results.all_runs()}
    for name, problem in problems(states).items():
        print(f'{name}: {problem}', file=sys.stderr)
    reasons = {arm: results.why_no_rate(arm) for arm in plan.arms if results.rate(arm) is None}
    for reason in reasons.values():
        if reason:
            print(reason, file=sys.stderr)
    if jobs and '' in reasons.values():
        note = 'more commands follow from the best rates: call again when these have finished'
        print(note, file=sys.stderr)


class Watcher:
    """While trainings run: a line of progress each second, and a new report, at most twice a minute,
    when more of them have finished."""

    def __init__(self, results, redraw):
        self.results = results
        self.redraw = redraw
        self.progress = launch.Progress()
        self.last_look = 0.0
        self.last_report = time.monotonic()
        self.runs_in_report = None
        self.under_way = None  # the names of the jobs at the last look at all runs
        self.complete = []
        self.expected = []

    def tick(self, running):
        now = time.monotonic()
        if now - self.last_look < 1:
            return
        self.last_look = now
        self.look_at_runs({job.name for job in running})
        complete = {run.name for run in self.complete}
        steps = sum(self.results.plan.max_iters(run) for run in self.complete)
        steps += sum(launch.last_step(job.folder) for job in running if job.name not in complete)
        self.progress.show(len(complete), len(self.expected), steps, sum(self.expected))

        if len(complete) != self.runs_in_report and now - self.last_report > 30:
            self.last_report = now
            self.runs_in_report = len(complete)
            try:
                self.redraw()
            except Exception as error:  # no reason to end the trainings; the last report may fail
                text = f'{type(error).__name__}: {first_line(error)}'
                print(f'\nwarning: cannot draw the report: {text}', file=sys.stderr)

    def look_at_runs(self, under_way):
        """Find out which runs have finished, unless the same ones are under way as before.

        A look reads the logs of all that are: every second, that would cost half a core.
        """
        if under_way and under_way == self.under_way:
            return
        results = self.results
        self.under_way = under_way
        self.complete = [r for r in results.all_runs() if results.state(r).kind == 'finished']
        self.expected = self.expected_steps()

    def expected_steps(self):
        """The number of steps of each run: of the tuning runs known so far, and of all test runs.

        The rates of the test runs may not be known yet, but their steps are.
        """
        plan = self.results.plan
        options = plan.options
        steps = []
        for run in self.results.all_runs():
            if options.rates and run.seed in options.tuning_seeds:
                steps.append(plan.max_iters(run))
        for _ in options.seeds:
            steps += [plan.max_iters(Run(arm, 1.0, 0)) for arm in plan.arms]
            steps += options.baseline_steps
        return steps


class Study:
    """A plan, its results, and what plan.json and timing.json beside them hold."""

    def __init__(self, plan):
        self.plan = plan
        self.results = Results(plan)
        self.record = None  # of plan.json
        self.timing = None  # of timing.json

    def redraw(self):
        comparison = compare_plan(self.plan, self.results, self.record, self.timing)
        write_report(self.plan.folder, comparison)
        return comparison

    # --- step times ---

    def timed_configs(self):
        """{arm: (TrainConfig, GPTConfig)}: what is timed of each arm."""
        plan = self.plan
        return {name: plan.configs(Run(name, plan.own_rate(name), 0)) for name in plan.arms}

    def read_times(self):
        """Take the step times from timing.json, wherever they were measured."""
        options = self.plan.options
        if options.timing or options.equal == 'time':
            path = self.plan.folder / 'timing.json'
            self.timing = measures.read_timing(path, self.timed_configs(), options.gpus)

    def measure(self):
        """Measure the step times here, unless timing.json has those of this machine and code."""
        path = self.plan.folder / 'timing.json'
        code = hash_of(code_state())
        self.timing = measures.measure_steps(
            self.timed_configs(), path, self.plan.options.gpus, code
        )

    def share_budget(self, may_measure):
        """Give each arm the steps that --equal asks for.

        Arms that have begun keep their steps, even if the code or the machine has changed since, or
        an arm has been added, with which all are timed again.
        """
        options = self.plan.options
        if options.equal == 'time':
            self.read_times()
            begun = any(self.plan.folder.glob('*/log.jsonl'))
            if may_measure and not (self.timing and begun):
                self.measure()
            if not self.timing:
                raise ValueError(
                    f'equal=time needs step times, and {self.plan.folder}/timing.json has none of '
                    'these arms yet: start the training first, which measures them'
                )
        if options.equal != 'steps':
            self.plan.share_budget(costs_of_steps(self.plan, self.timing))
            self.plan.keep_steps()

    # --- what the command line asks for ---

    def print_commands(self):
        """Write the plan, the report and the commands still to be run. Returns the comparison."""
        self.share_budget(may_measure=False)
        with self.locked():
            self.record = self.plan.write(self.results.counts(), trains=bool(self.results.jobs()))
        self.read_times()
        print_commands(self.results)
        return self.redraw()

    def watch(self):
        """Redraw every ten seconds until no run is missing. Returns the comparison."""
        self.share_budget(may_measure=False)
        self.record = self.plan.written()
        if not self.record:
            with self.locked():
                self.record = self.plan.write(self.results.counts(), trains=False)
        while True:
            # Whoever trains may write both files while this process watches.
            self.record = self.plan.written() or self.record
            self.read_times()
            comparison = self.redraw()
            now = datetime.datetime.now().strftime('%H:%M:%S')
            print(f'{now}  {report.status(comparison)}', flush=True)
            if not comparison['waiting']:
                return comparison
            time.sleep(10)

    def train(self):
        """Train the missing runs. Returns the comparison."""
        options = self.plan.options
        slots = launch.find_slots(self.plan.settings.device, options.jobs, options.gpus)
        with self.locked():
            self.share_budget(may_measure=True)
            for warning in self.plan.check_training():
                print(warning, file=sys.stderr)
            self.results.forget_failures()
            trains = bool(self.results.jobs())
            self.record = self.plan.write(self.results.counts(), trains)
            if options.timing and options.equal != 'time':
                self.read_times()
                if trains or not self.timing:
                    self.measure()
            watcher = Watcher(self.results, self.redraw)
            try:
                launch.launch(self.jobs, slots, options.gpus, watcher.tick)
            finally:
                watcher.progress.close()
                comparison = self.redraw()
        return comparison

    def locked(self):
        self.plan.folder.mkdir(parents=True, exist_ok=True)
        return locked(self.plan.folder, 'comparing in', '--name')

    def jobs(self):
        """The runs still to be trained. Each imports the code as it is when it starts: if that has
        changed since the plan was written, the plan is written again, and says so."""
        jobs = self.results.jobs()
        if jobs and not same_code(self.record, code_state()):
            self.record = self.plan.write(self.results.counts())
        return jobs


def costs_of_steps(plan, timing=None):
    """{arm: what a step costs, in steps of the baseline or in FLOPs}; timing: for --equal=time."""
    cost = {}
    for arm in plan.arms:
        settings, config = plan.configs(Run(arm, plan.own_rate(arm), 0))
        if plan.options.equal == 'time':
            if not timing['seconds'][arm]:
                raise ValueError(f'arm {arm} could not be timed: {timing["problems"][arm]}')
            cost[arm] = measures.step_time(timing, arm, plan.baseline)['ratio']
        else:
            tokens = settings.rows_per_step * config.block_size
            cost[arm] = measures.of_model(config)['flops_per_token'] * tokens
    return cost


def compare_arms(options, argv):
    """Train arms, or only watch them or print their commands. Returns (comparison, its folder)."""
    study = Study(Plan(options, argv))
    if options.print:
        comparison = study.print_commands()
    elif options.watch:
        comparison = study.watch()
    else:
        comparison = study.train()
    return comparison, study.plan.folder


def main():
    argv = sys.argv[1:]
    with one_line_errors(ValueError, OSError):
        options, _, _ = configure(CompareConfig, TrainConfig, GPTConfig, plain='runs')
        # Better to fail now than after hours of training.
        distributions()
        charts.pyplot()
        if options.runs:
            refuse_options(argv)
            comparison = compare_runs(options)
            folder = folder_of_runs(options)
            if (folder / 'plan.json').exists():
                raise ValueError(f'{folder} holds a planned comparison; give another --name')
            write_report(folder, comparison)
        elif options.arms:
            comparison, folder = compare_arms(options, argv)
        else:
            print(__doc__.strip())
            sys.exit(2)
        if not options.print:
            print(f'{report.headline(comparison)}\nwrote {folder}/report.html')


def refuse_options(argv):
    """Refuse settings for runs that exist: they are taken as they are."""
    for argument in argv:
        key = argument[2:].partition('=')[0]
        if argument.startswith('--') and key not in ('name', 'contrasts'):
            raise ValueError(f'--{key} is for runs to be trained; these are taken as they are')
        if argument.endswith('.py'):
            raise ValueError(f'{argument}: give a config file or folders of runs, not both')


if __name__ == '__main__':
    words = shlex.join(['python', 'compare.py', *sys.argv[1:]])
    note = f'every run is saved, and the same command goes on:\n{words}'
    with launch.ends_when_interrupted(note):
        main()
