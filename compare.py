"""
Does it help? Arms x seeds -> a verdict with its uncertainty, and a report.

$ python compare.py config/demo.py --arms="vanilla; resformer: v_residual=True" --seeds=5
$ python compare.py config/demo.py --arms="vanilla; mine: residual_from=previous v_residual=True" \\
      --rates="(1e-3, 2e-3, 4e-3)" --seeds=5         # every arm at its own best learning rate
$ python compare.py ... --print=True                 # the commands still to be run, for any scheduler
$ python compare.py ... --watch=True                 # train nothing, redraw the report as runs arrive
$ python compare.py out/demo/vanilla out/demo/resformer out/demo/svformer     # runs that exist

Each arm is trained with each seed as an ordinary run in out/compare/<name>/; finished runs are
reused, others resumed. Ctrl-C saves everything, and the same command goes on. The report is
out/compare/<name>/report.html; beside it are report.md, report.json and forest.svg.
"""

import datetime
import json
import shlex
import signal
import statistics
import sys
import time
from pathlib import Path

from comparison import launch, measures, report
from comparison.assemble import compare_plan, compare_runs, problems
from comparison.plan import CompareConfig, Plan, Run, as_json
from comparison.results import Results
from comparison.verdict import distributions
from configurator import configure, one_line_errors
from files import locked, write_whole
from machine import INTERRUPTED
from model import GPTConfig
from train import TrainConfig


def write_report(folder, comparison):
    """Write report.md, .html and .json, and forest.svg; unchanged files are not written again."""
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
        if not path.exists() or path.read_text() != text:
            write_whole(path, text)


def print_commands(results):
    """The commands that can be run now, one per line; those that depend on results come later."""
    plan = results.plan
    for job in results.jobs():
        print(launch.shell_line(job.arguments, plan.options.gpus))
    for name, problem in problems({r.name: results.state(r) for r in results.all_runs()}).items():
        print(f'{name}: {problem}', file=sys.stderr)
    if any(results.rate(arm) is None for arm in plan.arms):
        note = 'more commands follow from the best rates: call again when these have finished'
        print(note, file=sys.stderr)


class Watcher:
    """While trainings run: a line of progress each second, a new report twice a minute."""

    def __init__(self, results, redraw):
        self.results, self.redraw = results, redraw
        self.progress = launch.Progress()
        self.last_look, self.last_report = 0.0, time.monotonic()
        self.runs_in_report = None

    def tick(self, running):
        now = time.monotonic()
        if now - self.last_look < 1:
            return
        self.last_look = now
        results, plan = self.results, self.results.plan
        options = plan.options
        runs = results.all_runs()
        complete = [run for run in runs if results.state(run).kind == 'finished']
        names = {run.name for run in complete}
        steps = sum(plan.max_iters(run) for run in complete)
        steps += sum(launch.last_step(job.folder) for job in running if job.name not in names)

        # The test runs are not all known yet, but their number is.
        tuning = [run for run in runs if options.rates and run.seed in options.tuning_seeds]
        test = len(options.seeds) * (len(plan.arms) + len(options.baseline_steps))
        total = len(tuning) + test
        self.progress.show(len(complete), total, steps, total * plan.settings.max_iters)
        if len(complete) != self.runs_in_report and now - self.last_report > 30:
            self.last_report, self.runs_in_report = now, len(complete)
            self.redraw()


def run_plan(options, argv):
    """Train the missing runs of a plan, unless the options ask only for its commands or report."""
    plan = Plan(options, argv)
    results = Results(plan)
    timing = share_budget(plan) if options.equal != 'steps' else None
    record = plan.write(results.counts(), trains=bool(results.jobs()))

    def redraw():
        comparison = compare_plan(plan, results, record, timing)
        write_report(plan.folder, comparison)
        return comparison

    if options.print:
        print_commands(results)
        return redraw()
    if options.watch:
        return watch(redraw)
    with locked(plan.folder, 'comparing in', '--name'):
        if options.timing and not timing:
            timing = measure(plan)
        watcher = Watcher(results, redraw)
        slots = launch.find_slots(plan.settings.device, options.jobs, options.gpus)
        try:
            launch.launch(results.jobs, slots, options.gpus, watcher.tick)
        finally:
            watcher.progress.close()
            comparison = redraw()
    return comparison


def measure(plan):
    configs = {name: plan.configs(Run(name, plan.own_rate(name), 0)) for name in plan.arms}
    return measures.measure_steps(configs, plan.folder / 'timing.json')


def share_budget(plan):
    """Give each arm the steps that fit the baseline's budget. Returns the timing used, or None."""
    timing, cost = None, {}
    if plan.options.equal == 'time':
        timing = measure(plan)
    for arm in plan.arms:
        settings, config = plan.configs(Run(arm, plan.own_rate(arm), 0))
        if timing:
            if not timing['seconds'][arm]:
                raise ValueError(f'arm {arm} could not be timed: {timing["problems"][arm]}')
            cost[arm] = statistics.median(timing['seconds'][arm])
        else:
            tokens = settings.rows_per_step * config.block_size
            cost[arm] = measures.of_model(config)['flops_per_token'] * tokens
    plan.share_budget(cost)
    return timing


def watch(redraw):
    """Redraw every ten seconds until everything has finished."""
    while True:
        comparison = redraw()
        now = datetime.datetime.now().strftime('%H:%M:%S')
        print(f'{now}  {report.status(comparison)}', flush=True)
        if comparison['finished']:
            return comparison
        time.sleep(10)


def main():
    argv = sys.argv[1:]
    with one_line_errors(ValueError, OSError):
        options, _, _ = configure(CompareConfig, TrainConfig, GPTConfig, plain='runs')
        # Better to fail now than after hours of training.
        distributions()
        report.pyplot()
        if options.runs:
            refuse_options(argv)
            comparison = compare_runs(options)
            folder = Path('out', 'compare', comparison['title'])
            if (folder / 'plan.json').exists():
                raise ValueError(f'{folder} holds a planned comparison; give another --name')
            write_report(folder, comparison)
        elif options.arms:
            comparison = run_plan(options, argv)
            folder = Path('out', 'compare', comparison['title'])
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        main()
    except KeyboardInterrupt:
        words = shlex.join(['python', 'compare.py', *sys.argv[1:]])
        note = 'interrupted: every run is saved, and the same command goes on:'
        print(f'\n{note}\n{words}', file=sys.stderr)
        sys.exit(INTERRUPTED)
