"""
The paper's tables and figures: trains the missing runs, analyzes, draws, and sets the results
beside the paper's.

$ python -m paper.reproduce list                       # what there is, what it needs, how long it takes
$ python -m paper.reproduce fig6 --scale=tiny          # one of them, or several; all: every one
$ python -m paper.reproduce all --scale=tiny --jobs=2  # two trainings at a time
$ python -m paper.reproduce fig6 --scale=paper         # by torchrun on this machine's GPUs (--gpus=8)

A run is kept in out/<scale>/<name>: finished ones are reused, unfinished ones go on. Results are in
results/<scale>/. After SIGTERM or Ctrl-C the runs are saved, and the same command goes on.

A figure is drawn from one seed, which decides nothing: for verdicts see compare.py.
"""

import functools
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import evaluate
from configurator import choose, one_line_errors
from files import write_whole
from machine import INTERRUPTED, Machine
from model import GPT
from paper import analyze, draw, runs
from paper.figures import FIGURES
from paper.findings import against_the_paper
from paper.numbers import TABLE_1, TABLE_5, paper_size
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


# --- panels: each draws on axes and gives the numbers that it drew --------------------------------


def draw_panel(panel, axes, scale):
    paths = folders(panel, scale)
    baseline, *others = paths
    smooth = max(2, scale.window // 2)
    if panel.how == 'bars':
        return draw.bars_axes(axes, baseline, others, scale.window)
    if panel.how == 'scaling':
        return draw.scaling_axes(axes, paths, scale.window)
    if panel.how == 'critical':
        return draw.critical_axes(axes, in_pairs(paths), smooth)
    if panel.how == 'pairs':
        curves = draw.pairs_axes(axes, in_pairs(paths), smooth)
    else:
        curves = draw.relative_axes(axes, baseline, others, smooth)
    return {
        run: {'steps': steps.tolist(), 'difference': values.tolist()}
        for run, (steps, values) in curves.items()
    }


def folders(panel, scale):
    return [str(folder(run, scale)) for run in panel.runs]


def in_pairs(items):
    """[a, b, c, d] -> [(a, b), (c, d)]"""
    return list(zip(items[::2], items[1::2], strict=True))


def draw_panels(panels, title, scale, out):
    """Panels side by side, in one picture. Returns [{'how', 'numbers'}]."""
    size = (5.2 * len(panels), 4.2)
    options = {'figsize': size, 'squeeze': False, 'layout': 'constrained'}
    figure, axes = draw.pyplot().subplots(1, len(panels), **options)
    numbers, curves = [], []
    for panel, ax in zip(panels, axes[0], strict=True):
        numbers.append({'how': panel.how, 'numbers': draw_panel(panel, ax, scale)})
        if panel.how in ('relative', 'pairs'):
            curves.append(ax)

    # Curves side by side share their limits, so that they can be compared.
    limits = [ax.get_ylim() for ax in curves]
    for ax in curves:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    figure.suptitle(title, fontsize=10)
    draw.save(figure, out)
    return numbers


def draw_analysis(name, panel, scale, machine, out):
    """An analysis has a picture of its own. Returns {'how', 'numbers'}."""
    what = FIGURES[name].title
    if len(FIGURES[name].panels) > 1:
        what = panel.how
        out = out.with_name(f'{name}_{what}')
    settings = analyze.AnalyzeConfig(sequences=scale.sequences, length=scale.length, batch_size=10)
    numbers = analyze.analyze(panel.how, folders(panel, scale), settings, machine)
    figure = analyze.figure_of(numbers, f'{name}: {what} ({scale.name})')
    draw.save(figure, out.with_name(f'{out.name}.png'))
    print(
        f"{name}: the paper's panel of other checkpoints is left out; python -m paper.analyze "
        f'{panel.how} --hf=FOLDER --text=FILE draws it'
    )
    return {'how': panel.how, 'numbers': numbers['runs']}


# --- tables ---------------------------------------------------------------------------------------


def loss_table(panel, scale, settings, machine):
    """(numbers, Markdown) of the validation losses, each pair of runs on the same windows."""
    paths = folders(panel, scale)
    reports, rows = {}, []
    for pair in in_pairs(paths):
        numbers = evaluate.compare_losses(pair, evaluate.LossConfig(batch_size=32), machine)
        evaluate.print_losses(numbers)
        reports |= numbers['runs']
    for run, path in zip(panel.runs, paths, strict=True):
        report = reports[path]
        minus = ''
        if 'minus_first' in report:
            mean = report['minus_first']['mean']
            minus = evaluate.pm(mean['loss'], mean['standard_error'], '+')
        paper = TABLE_5.get(table_key(run), '')
        rows.append([Path(path).name, f'{report["mean"]["loss"]:.4f}', minus, str(paper)])
    head = ['run', 'loss (nats)', 'minus vanilla, ± s.e. over windows', 'the paper']
    return {'runs': reports}, markdown(head, rows)


def tasks_table(panel, scale, settings, machine):
    """(numbers, Markdown) of the zero-shot accuracies."""
    paths = folders(panel, scale)
    limit = 0 if scale is PAPER else 200
    options = evaluate.TasksConfig(data_dir=settings.data_dir, limit=limit)
    numbers, _ = evaluate.evaluate_tasks(paths, options, machine)
    evaluate.print_tasks(numbers)
    reports, rows = numbers['runs'], []
    for run, path in zip(panel.runs, paths, strict=True):
        report = reports[path]
        scores = report['tasks'].values()
        errors = [score['acc_stderr'] for score in scores]
        report['average_stderr'] = float(np.linalg.norm(errors)) / len(errors)
        cells = [accuracy(score['acc'], score['acc_stderr']) for score in scores]
        cells.append(accuracy(report['average'], report['average_stderr']))
        paper = TABLE_1.get((*table_key(run), run.length or PAPER.length), {})
        rows.append([Path(path).name, *cells, str(paper.get('average', ''))])
    tasks = reports[paths[0]]['tasks']
    head = ['acc ± s.e. over items', *tasks, 'average', 'the paper']
    return {name: numbers[name] for name in ('limit', 'data', 'runs')}, markdown(head, rows)


def accuracy(value, error):
    return evaluate.pm(value, error, digits=3)


def table_key(run):
    """The (model, size) under which Tables 1 and 5 have a run; () where they do not."""
    _, config = runs.configs_of(run, PAPER)
    return paper_size(config) or ()


def markdown(head, rows):
    lines = [head, ['---', *['---:'] * (len(head) - 1)], *rows]
    return ''.join(f'| {" | ".join(cells)} |\n' for cells in lines)


TABLES = {'loss': loss_table, 'tasks': tasks_table}

# --- a figure -------------------------------------------------------------------------------------


def reproduce(name, settings, machine):
    """Draw a figure from its runs, which have finished, and write its numbers."""
    figure, scale = FIGURES[name], SCALES[settings.scale]
    origin = provenance(machine)
    out = Path('results', scale.name, name)
    out.parent.mkdir(parents=True, exist_ok=True)
    title = f'{name}: {figure.title} ({scale.name})'

    # Tables and analyses first, each with a file of its own; then the panels that share a picture.
    panels, pictures = [], []
    for panel in figure.panels:
        if panel.how in TABLES:
            numbers, text = TABLES[panel.how](panel, scale, settings, machine)
            panels.append({'how': panel.how, 'numbers': numbers})
            write_whole(out.with_suffix('.md'), f'# {title}\n\n{text}')
        elif panel.how in analyze.ANALYSES:
            panels.append(draw_analysis(name, panel, scale, machine, out))
        else:
            pictures.append(panel)
    if pictures:
        panels += draw_panels(pictures, title, scale, out.with_suffix('.png'))

    lines = against_the_paper(name, panels, scale)
    for line in lines or [f'{name}: there is no claim of the paper that is checked']:
        print(line)
    numbers = {
        'figure': name,
        'title': figure.title,
        'scale': scale.name,
        **origin,
        'panels': panels,
        'against_the_paper': lines,
    }
    write_numbers(out.with_suffix('.json'), numbers, origin)


def write_numbers(path, numbers, origin):
    """Write numbers to a JSON file. The same numbers as before keep the origin that they have there."""
    new = json.loads(json.dumps(numbers))
    old = json.loads(path.read_text()) if path.exists() else {}
    if old | origin != new:
        write_whole(path, json.dumps(new, indent=1) + '\n')


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
        row = (name, len(every), done, gpus, here, besides(figure), figure.title)
        print('{:8} {:>5} {:>5}  {:>14}  {:>14}  {:18}  {}'.format(*row))
    print(
        '\n8 GPUs: give --tok_per_s, the throughput of config/vanilla_82m.py there (bench.py measures '
        'it).\n2 cores: an estimate, the runs times the usual seconds of one, finished ones included.'
        '\n* for one panel, which is left out: python -m paper.analyze ... --hf=FOLDER draws it.'
    )


def besides(figure):
    """What a figure needs apart from its runs."""
    hows = {panel.how for panel in figure.panels}
    if 'tasks' in hows:
        return 'task data'
    return 'outside weights*' if hows & analyze.ANALYSES.keys() else 'nothing'


def hours(run, tok_per_s):
    """Hours of a run at the paper's scale, if vanilla at 82M has this throughput; time ~ FLOPs."""
    tokens = PAPER.tokens * TrainConfig.max_iters
    return flops(run) / flops(Run()) * tokens / tok_per_s / 3600


@functools.cache
def flops(run):
    """Training FLOPs per token at the paper's scale."""
    _, config = runs.configs_of(run, PAPER)
    with torch.device('meta'):
        return GPT(config).flops_per_token(config.block_size)


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
        modes = dict.fromkeys(('', 'list'), (ReproduceConfig,))
        mode, (settings,) = choose(modes, __doc__, plain='figures')
        if mode == 'list':
            print_list(settings.names(), settings)
            return
        if not settings.figures:
            print(__doc__.strip())
            sys.exit(2)
        machine = Machine(settings.device)
        train_missing(settings.names(), SCALES[settings.scale], settings)

        problems = []
        for name in settings.names():  # if one fails, the others are still drawn
            try:
                reproduce(name, settings, machine)
            except (ValueError, OSError) as error:
                problems.append(f'{name}: {error}')
        if problems:
            raise OSError(f'not drawn: {"; ".join(problems)}')


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        main()
    except KeyboardInterrupt:
        print(
            'interrupted: what was trained is saved, and the same command goes on', file=sys.stderr
        )
        sys.exit(INTERRUPTED)
