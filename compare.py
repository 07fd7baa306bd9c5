"""
Does it help? Arms x seeds -> a verdict with its uncertainty, and a report.

$ python compare.py config/demo.py --name=first --arms="vanilla; resformer: v_residual=True" --seeds=5
$ python compare.py config/demo.py --name=tuned --seeds=5 --rates="(1e-3, 2e-3, 4e-3)" \\
      --arms="vanilla; mine: v_residual=previous"   # each at its best learning rate
$ python compare.py config/demo.py --name=again --arms="vanilla; again: seed_offset=1000"   # with itself
$ python compare.py ... --print=True                 # the commands still to be run, for any scheduler
$ python compare.py out/vanilla_82m out/resformer_82m mine=out/first mine=out/second  # runs that exist

Each arm is trained with each seed as an ordinary run in out/compare/<name>/, and evaluated at its end
on the whole validation split, unless --eval_iters or --eval_interval is given. Runs that finished or
diverged stay as they are, others are resumed. Ctrl-C saves everything, and the same command goes on,
also with more seeds; any other change that decides a result needs another --name. So does edited code
(a .py file outside tests/ and results/, but for its comments), unless --mixed_code=True lets runs of
different code share a verdict; the report begins with it.

The arm of a run that exists is its folder's name without _lr<rate> and _seed<n>, unless ARM=FOLDER
names it; the first is the baseline. --tuning_seeds says which seeds have only chosen a learning rate;
without it, the plan.json beside a run does.

The report is out/compare/<name>/report.html; beside it are report.md, report.json and each plot as an
SVG. The exit status is 1 where a run has not finished.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from configurator import configure, sort_arguments

from comparison import charts, launch, report
from comparison.arms import parse_arms
from comparison.assemble import compare_plan, compare_runs
from comparison.plan import Plan, check_training
from comparison.record import write_plan
from comparison.results import Results, train_plan
from comparison.verdict import distributions
from lib.files import as_json, is_plain, json_text, locked, one_line_errors
from model import GPTConfig
from train import TrainConfig

# Where comparisons are, each in a folder of its own.
COMPARISONS = Path('out', 'compare')


@dataclass
class CompareConfig:
    arms: str = ''  # 'vanilla; mine: v_residual=True neutreno=0.2; ...': the first is the baseline
    seeds: int | tuple = 5  # test seeds: 1 to 5, or a tuple of them
    rates: tuple = ()  # learning rates that every arm tries on the tuning seeds; (): untuned
    tuning_seeds: tuple = (101, 102)  # no test seed is among them; of `runs`, those that only tuned
    contrasts: str = ''  # besides each arm against the baseline: 'mine-resformer, (a-b)-(c-d)'
    name: str = ''  # its folder in out/compare; '': named for the config, or 'runs'
    jobs: int = 0  # trainings at a time; 0: one per core, or per GPU
    gpus: int = 1  # GPUs of each training, by torchrun
    print: bool = False  # write the commands still to be run, one per line, and train nothing
    judgement: str = 'paired'  # or dunnett: arms with seeds of their own, all against the first
    mixed_code: bool = False  # let runs of different code share a verdict
    runs: tuple = ()  # folders of runs that exist, or ARM=FOLDER; the first arm is the baseline

    def __post_init__(self):
        if self.jobs < 0 or self.gpus < 1:
            raise ValueError('jobs must be at least 0, and gpus at least 1')


def folder_of(name):
    """The folder of a comparison, which lies in out/compare."""
    path = Path(name)
    if '..' in path.parts or not path.parts or not all(map(is_plain, path.parts)):
        raise ValueError(f'name={name!r} must be a folder in {COMPARISONS} that any page can show')
    return COMPARISONS / path


def plan_of(options, files, given):
    """The Plan of a command line with these config files and {setting: its text}."""
    if 'tuning_seeds' in given and not options.rates:
        raise ValueError('tuning_seeds choose between rates; give --rates, too')
    common = {name: value for name, value in given.items() if name not in vars(options)}
    if not files and not options.name:
        raise ValueError('give a config file for all arms, such as config/demo.py, or --name')
    arms = parse_arms(options.arms)
    if len(arms) < 2:
        raise ValueError(
            'give at least two arms, separated by semicolons: --arms="vanilla; mine: v_residual=True"'
        )
    folder = folder_of(options.name or '_'.join(Path(path).stem for path in files))
    return Plan(arms, folder, common, files, options)


def compare_arms(options, files, given):
    """Train arms, or print their commands. Returns (what the report shows, its folder)."""
    plan = plan_of(options, files, given)
    results = Results(plan)
    if plan.replaced:
        print(
            f'eval_iters=0 in place of {plan.replaced}: each run is evaluated on the whole validation split; '
            f'--eval_iters={plan.replaced} keeps it',
            file=sys.stderr,
        )
    if not options.print:
        check_training(plan, options.gpus)
        slots = launch.find_slots(plan.settings.device, options.jobs, options.gpus)
    plan.folder.mkdir(parents=True, exist_ok=True)
    with locked(plan.folder, 'comparing in', '--name'):
        record = write_plan(plan)
        # Where the data are not, the plan says which they were.
        plan.data = plan.data or record['plan']['settings'].get('data')
        try:
            if options.print:
                # Those that depend on results come later.
                for job in results.jobs():
                    print(launch.shell_line(job.arguments, plan.settings.device, options.gpus))
            else:
                train_plan(results, slots, options.gpus)
        finally:
            comparison = compare_plan(results, record)
            write_report(plan.folder, comparison)
    return comparison, plan.folder


# Options that say something of runs that exist.
OF_EXISTING = ('name', 'contrasts', 'tuning_seeds', 'judgement', 'mixed_code')


def compare_existing(options, given):
    """Compare runs that exist. Returns (what the report shows, its folder)."""
    for key in given:
        if key not in OF_EXISTING:
            raise ValueError(
                f'--{key} is for runs to be trained, but these words are taken for runs that exist: '
                'not all of them are config files, which end with .py'
            )
    folder = folder_of(options.name or 'runs')
    seeds = options.tuning_seeds if 'tuning_seeds' in given else None
    comparison = compare_runs(
        options.runs,
        folder.name,
        options.contrasts,
        seeds,
        options.mixed_code,
        options.judgement,
    )
    if (folder / 'plan.json').exists():
        raise ValueError(f'{folder} holds a planned comparison; give another --name')
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, 'comparing in', '--name'):
        write_report(folder, comparison)
    return comparison, folder


def write_report(folder, comparison):
    """Write report.md, .html and .json, and its plots."""
    numbers = {name: value for name, value in comparison.items() if name != 'curves'}
    plots = report.draw(comparison)
    texts = {
        'report.json': json_text(as_json(numbers)),
        'report.md': report.markdown(comparison),
        'report.html': report.html(comparison, plots),
    }
    texts |= {f'{name}.svg': plot for name, plot in plots.items() if plot}
    report.write_together({folder / name: text for name, text in texts.items()})
    for name, plot in plots.items():
        if not plot:  # there may be one of an earlier report
            (folder / f'{name}.svg').unlink(missing_ok=True)


def main():
    argv = sys.argv[1:]
    with one_line_errors(interrupts=False):
        words, flags = sort_arguments(argv)
        # If one word is no .py file, all are runs: among a stranger's, a .py file must not be executed.
        plain = '' if all(word.endswith('.py') for word in words) else 'runs'
        options, _, _ = configure(CompareConfig, TrainConfig, GPTConfig, doc=__doc__, plain=plain)
        given = dict(flag[2:].split('=', 1) for flag in flags)
        # Better to fail now than after hours of training.
        distributions()
        charts.pyplot()
        if options.runs:
            comparison, folder = compare_existing(options, given)
        elif argv:
            comparison, folder = compare_arms(options, words, given)
        else:
            print((__doc__ or '').strip())  # None: python -OO
            sys.exit(2)
    where = sys.stderr if options.print else sys.stdout
    print(f'{report.headline(comparison)}\nwrote {folder}/report.html', file=where)
    sys.exit(1 if comparison['problems'] and not options.print else 0)


if __name__ == '__main__':
    words = shlex.join(['python', 'compare.py', *sys.argv[1:]])
    note = f'every run saves itself, and the same command goes on:\n{words}'
    with launch.ends_when_interrupted(note):
        main()
