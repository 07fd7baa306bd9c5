"""
The paper's tables and figures: trains the missing runs, analyzes, draws, and sets the results
beside the paper's.

$ python -m paper.reproduce list                       # what there is, what it needs, how long it takes
$ python -m paper.reproduce fig6 --scale=tiny          # one of them, or several; all: every one
$ python -m paper.reproduce all --scale=tiny --jobs=2  # two trainings at a time
$ python -m paper.reproduce fig6 --scale=paper         # by torchrun on this machine's GPUs (--gpus=8)
$ python -m paper.reproduce redraw fig6 --scale=tiny   # from its numbers in results/, without any run

A run is kept in out/<scale>/<name>: finished ones are reused, unfinished ones go on. Results are in
results/<scale>/. After SIGTERM or Ctrl-C the runs are saved, and the same command goes on.

A figure is drawn from one seed, which decides nothing: for verdicts see compare.py.
"""

import functools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import evaluate
from comparison import launch
from configurator import choose, one_line_errors
from files import write_json
from machine import Machine
from paper import analyze, crossings, draw, losses, runs, wiring
from paper.figures import FIGURES
from paper.findings import against_the_paper
from paper.pictures import draw_figure, panel_folders, smoothing, wired
from paper.runs import PAPER, SCALES, Run, folder
from rundir import provenance
from train import TrainConfig


@dataclass
class ReproduceConfig:
    figures: tuple = ()  # which, as the list names them; all: every one
    scale: str = 'tiny'  # paper, small or tiny
    jobs: int = 1  # trainings at a time (not for paper)
    gpus: int = 8  # processes of torchrun, scale=paper
    device: str = 'auto'  # as in train.py
    data_dir: str = ''  # the zero-shot tasks' files, for table1, as in evaluate.py; '': the hub
    tok_per_s: float = 0.0  # throughput of vanilla_82m.py on 8 GPUs, for the times of the list

    def __post_init__(self):
        if self.scale not in SCALES:
            raise ValueError(f'scale={self.scale!r} is not one of {", ".join(SCALES)}')
        if self.jobs < 1 or self.gpus < 1:
            raise ValueError('jobs and gpus must be at least 1')
        if self.tok_per_s < 0:
            raise ValueError(f'tok_per_s={self.tok_per_s} must not be negative')
        for name in self.figures:
            if name not in FIGURES and self.figures != ('all',):
                raise ValueError(
                    f'no figure {name!r}; there are {", ".join(FIGURES)}, or all of them: all'
                )

    def names(self):
        return list(FIGURES) if self.figures in ((), ('all',)) else list(self.figures)


# --- panels: the numbers of each, ready for JSON --------------------------------------------------


def measure(panel, scale, settings, machine):
    """The numbers of a panel, from its runs, which have finished."""
    if panel.how == 'loss':
        return measure_losses(panel, scale, machine)
    if panel.how == 'tasks':
        return measure_tasks(panel, scale, settings.data_dir, machine)
    if panel.how in analyze.ANALYSES:
        sizes = {'sequences': scale.sequences, 'length': scale.length, 'batch_size': 10}
        options = analyze.AnalyzeConfig(**sizes)
        return analyze.analyze(panel.how, panel_folders(panel, scale), options, machine)['runs']

    paths = panel_folders(panel, scale)
    smooth = smoothing(scale)
    if panel.how == 'relative':
        baseline, *others = paths
        return draw.curves_of([(baseline, run) for run in others], smooth, scale.window)
    if panel.how == 'pairs':
        return draw.curves_of(draw.in_pairs(paths), smooth, scale.window)
    if panel.how == 'scaling':
        return draw.scaling_of(paths, scale.window)
    if panel.how == 'critical':
        return crossings.crossings_of(draw.in_pairs(paths), smooth)
    assert panel.how == 'wiring', panel.how
    configs = wired(panel)
    return {name: [asdict(arrow) for arrow in wiring.arrows(c)] for name, c in configs.items()}


def measure_losses(panel, scale, machine):
    """The validation losses, each pair of runs on the same windows."""
    reports = {}
    for pair in draw.in_pairs(panel_folders(panel, scale)):
        numbers = evaluate.compare_losses(pair, evaluate.LossConfig(batch_size=32), machine)
        evaluate.print_losses(numbers)
        reports |= numbers['runs']
    return {'runs': reports}


def measure_tasks(panel, scale, data_dir, machine):
    """The zero-shot accuracies; their standard errors are over items."""
    limit = 0 if scale is PAPER else 200
    options = evaluate.TasksConfig(data_dir=data_dir, limit=limit)
    numbers, _ = evaluate.evaluate_tasks(panel_folders(panel, scale), options, machine)
    evaluate.print_tasks(numbers)
    for report in numbers['runs'].values():
        errors = [score['acc_stderr'] for score in report['tasks'].values()]
        report['average_stderr'] = float(np.linalg.norm(errors)) / len(errors)
    return {name: numbers[name] for name in ('limit', 'data', 'runs')}


# --- a figure -------------------------------------------------------------------------------------


def reproduce(name, settings, machine):
    """Measure a figure's runs, which have finished, write the numbers, and draw them."""
    figure, scale = FIGURES[name], SCALES[settings.scale]
    origin = provenance(machine)
    entries = []
    for panel in figure.panels:
        numbers = measure(panel, scale, settings, machine)
        entries.append({'how': panel.how, 'title': panel.title, 'numbers': numbers})
    entries = json.loads(json.dumps(entries))  # as redraw() will read them

    if figure.has_outside_panel:
        kinds = [panel.how for panel in figure.panels if panel.how in analyze.ANALYSES]
        print(
            f"{name}: the paper's panel of other checkpoints is left out; python -m paper.analyze "
            f'{kinds[0]} --hf=FOLDER --text=FILE draws it'
        )

    lines = against_the_paper(name, entries, scale)
    for line in lines or [f'{name}: there is no claim of the paper that is checked']:
        print(line)
    numbers = {
        'figure': name,
        'title': figure.title,
        'scale': scale.name,
        **origin,
        'panels': entries,
        'against_the_paper': lines,
    }
    path = file_of(name, scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_numbers(path, numbers, origin)
    draw_figure(name, entries, scale)


def file_of(name, scale):
    return Path('results', scale.name, f'{name}.json')


def redraw(name, scale):
    """Draw a figure again from its JSON file."""
    path = file_of(name, scale)
    numbers = read_numbers(path)
    try:
        draw_figure(name, numbers['panels'], scale)
    except (LookupError, TypeError) as error:
        raise ValueError(f'{path} does not hold what {name} draws today: {error!r}') from error


def read_numbers(path):
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f'{path} is damaged: {error}') from error


def write_numbers(path, numbers, origin):
    """Write numbers to a JSON file. The same numbers as before keep the origin that they have there."""
    new = json.loads(json.dumps(numbers))
    old = read_numbers(path) if path.exists() else {}
    if old | origin != new:
        write_json(path, new)


# --- the list -------------------------------------------------------------------------------------


def print_list(names, settings):
    scale = SCALES[settings.scale]
    heads = ('', 'runs', 'done', '8 GPUs, paper', f'2 cores, {scale.name}', 'besides runs', 'what')
    print('{:8} {:>5} {:>5}  {:>14}  {:>14}  {:18}  {}'.format(*heads))
    for name in names:
        figure = FIGURES[name]
        every = {run.name(scale): run for run in figure.runs()}.values()
        done = sum(runs.is_finished(run, scale) for run in every)
        gpus = here = 'n/a'
        if settings.tok_per_s:
            gpus = f'{sum(hours(run, settings.tok_per_s) for run in every):,.0f} h'
        if scale.seconds:
            here = f'~{len(every) * scale.seconds / 60:,.0f} min'
        row = (name, len(every), done, gpus, here, besides(name), figure.title)
        print('{:8} {:>5} {:>5}  {:>14}  {:>14}  {:18}  {}'.format(*row))
    print(
        '\n8 GPUs: give --tok_per_s, the throughput of config/vanilla_82m.py there (bench.py measures '
        'it).\n2 cores: an estimate, the runs times the usual seconds of one, finished ones included.'
        '\n* for one panel, which is left out: python -m paper.analyze ... --hf=FOLDER draws it.'
    )


def besides(name):
    """What a figure needs apart from its runs."""
    if any(panel.how == 'tasks' for panel in FIGURES[name].panels):
        return 'task data'
    return 'outside weights*' if FIGURES[name].has_outside_panel else 'nothing'


def hours(run, tok_per_s):
    """Hours of a run at the paper's scale, if vanilla at 82M has this throughput; time ~ FLOPs."""
    tokens = PAPER.tokens * TrainConfig.max_iters
    return flops(run) / flops(Run()) * tokens / tok_per_s / 3600


@functools.cache
def flops(run):
    """Training FLOPs per token at the paper's scale."""
    _, config = runs.configs_of(run, PAPER)
    return losses.without_weights(config).flops_per_token(config.block_size)


# --- the program ----------------------------------------------------------------------------------


def train_missing(names, scale, settings):
    missing = {}
    for name in names:
        for run in FIGURES[name].runs():
            if not runs.is_finished(run, scale):
                missing[folder(run, scale)] = run
    for run in missing.values():
        runs.check_own(run, scale)
    print(f'{len(missing)} runs to train')
    if missing:
        runs.prepare(scale)
        runs.train(missing.values(), scale, settings.jobs, settings.gpus, settings.device)


def main():
    with one_line_errors(ValueError, OSError):
        modes = dict.fromkeys(('', 'list', 'redraw'), (ReproduceConfig,))
        mode, (settings,) = choose(modes, __doc__, plain='figures')
        if mode == 'list':
            print_list(settings.names(), settings)
            return
        if not settings.figures:
            print(__doc__.strip())
            sys.exit(2)
        if mode == 'redraw':
            each(settings, redraw, SCALES[settings.scale])
            return
        machine = Machine(settings.device)
        train_missing(settings.names(), SCALES[settings.scale], settings)
        each(settings, reproduce, settings, machine)


def each(settings, make, *arguments):
    """make(name, *arguments) for each figure; if one fails, the others are still drawn."""
    problems = []
    for name in settings.names():
        try:
            make(name, *arguments)
        except (ValueError, OSError) as error:
            problems.append(f'{name}: {error}')
    if problems:
        raise OSError(f'not drawn: {"; ".join(problems)}')


if __name__ == '__main__':
    with launch.ends_when_interrupted('what was trained is saved, and the same command goes on'):
        main()
