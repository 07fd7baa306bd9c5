"""
The pictures and tables of the paper's figures, drawn from the numbers that reproduce.py writes.

They need no run: `python -m paper.reproduce redraw fig6 --scale=tiny` draws results/tiny/fig6.json.
"""

import functools
from dataclasses import replace
from pathlib import Path

import evaluate
from files import write_whole
from paper import analyze, draw, losses, runs, wiring
from paper.figures import FIGURES, NAMES, number_of
from paper.numbers import TABLE_1, TABLE_5
from paper.runs import PAPER, SCALES, Run, folder
from tables import markdown_table

# --- a figure -------------------------------------------------------------------------------------


def draw_figure(name, entries, scale):
    """Draw a figure and write its tables; entries: the 'panels' of its JSON file.

    Tables, analyses and wirings have files of their own; the other panels share a picture.
    """
    figure = FIGURES[name]
    out = Path('results', scale.name, name)
    alone, shared = [], []
    for entry in entries:
        panel = panel_of(name, entry)
        if panel.how in TABLES:
            table = TABLES[panel.how](panel, entry['numbers'], scale)
            title = title_of(name, figure.title, scale)
            write_whole(out.with_suffix('.md'), f'# {title}\n\n{table}')
        elif panel.how in analyze.ANALYSES or panel.how == 'wiring':
            alone.append((panel, entry['numbers']))
        else:
            shared.append((panel, entry['numbers']))

    is_only = len(alone) + bool(shared) == 1
    for panel, numbers in alone:
        title = title_of(name, figure.title if is_only else panel.title, scale)
        path = out if is_only else out.with_name(f'{name}_{panel.how}')
        draw.save(draw_alone(figure, panel, numbers, title, scale), path.with_suffix('.png'))
    if shared:
        panel, _ = shared[0]
        title = panel.title if panel.title and len(shared) == 1 else figure.title
        picture = draw_shared(figure, shared, title_of(name, title, scale), scale)
        draw.save(picture, out.with_suffix('.png'))


def panel_of(name, entry):
    """The Panel that an entry of a JSON file has the numbers of."""
    for panel in FIGURES[name].panels:
        if (panel.how, panel.title) == (entry['how'], entry.get('title', '')):
            return panel
    raise ValueError(
        f'the numbers of {name} are of a panel that it no longer has: {entry["how"]} '
        f'{entry.get("title", "")!r}; python -m paper.reproduce {name} makes them anew'
    )


def title_of(name, what, scale):
    title = f'{number_of(name)}: {what}'
    if not FIGURES[name].runs():  # it is the same at every scale
        return title
    return f'{title} ({scale.name}, one seed)'


# --- pictures -------------------------------------------------------------------------------------


def draw_alone(figure, panel, numbers, title, scale):
    if panel.how == 'wiring':
        return wiring.figure_of(draw.pyplot(), wired(panel), title)
    names = names_of(figure, panel, scale)
    return analyze.figure_of({'analysis': panel.how, 'runs': numbers}, title, names)


def wired(panel):
    """{name: GPTConfig} of the models that Fig. 2 draws, with as many layers as its drawings need."""
    configs = {}
    for run in panel.runs:
        _, config = runs.configs_of(run, PAPER)
        configs[NAMES[run.model]] = replace(config, n_layer=4)
    return configs


def draw_shared(figure, panels, title, scale):
    """One picture of panels, one below the other; panels: [(Panel, numbers)]."""
    width, height = draw.SIZE
    options = {'figsize': (width, height * len(panels) + 0.3), 'squeeze': False}
    picture, axes = draw.pyplot().subplots(len(panels), layout='constrained', **options)
    # Curves in one picture share their limits, so that they can be compared.
    limits = [
        draw.limits_of(numbers) for panel, numbers in panels if panel.how in ('relative', 'pairs')
    ]
    if limits:
        limits = min(low for low, _ in limits), max(high for _, high in limits)
    for (panel, numbers), ax in zip(panels, axes[:, 0], strict=True):
        draw_panel(ax, figure, panel, numbers, scale, limits)
        if len(panels) > 1:
            ax.set_title(panel.title, fontsize=10, loc='left', pad=10)
    picture.suptitle(title, fontsize=11)
    return picture


def draw_panel(axes, figure, panel, numbers, scale, limits):
    if panel.how == 'scaling':
        draw.scaling_axes(axes, numbers, scale.window)
        return
    configs = configs_by_folder(panel, scale)
    if panel.how == 'critical':
        *_, config = configs.values()
        draw.critical_axes(axes, numbers, draw.color_of(config))
        return
    drawn = {run: configs[run] for run in numbers}
    names = names_of(figure, panel, scale)
    families = {draw.model_name(config) for config in drawn.values()}
    is_ordered = len(families) == 1 and (panel.how == 'pairs' or figure.is_ordered)
    look = draw.looks(drawn, names, is_ordered)
    draw.curve_axes(axes, numbers, look, baseline_of(panel), smoothing(scale), scale.window, limits)


def smoothing(scale):
    """Steps whose mean is a point of a curve."""
    return max(2, scale.window // 2)


# --- names ----------------------------------------------------------------------------------------


def panel_folders(panel, scale):
    return [str(folder(run, scale)) for run in panel.runs]


def configs_by_folder(panel, scale):
    return {str(folder(run, scale)): runs.configs_of(run, scale)[1] for run in panel.runs}


def names_of(figure, panel, scale):
    """{folder of a run: its name}: the model, and the settings in which the runs differ."""
    models = {**NAMES, **figure.names}
    drawn = panel.runs[1::2] if panel.how == 'pairs' else panel.runs
    of_settings = {run: settings_in_words(run, scale) for run in drawn}
    differing = [len(set(column)) > 1 for column in zip(*of_settings.values(), strict=True)]
    several_models = len({run.model for run in drawn}) > 1

    result = {}
    for run, words in of_settings.items():
        parts = [text for text, differs in zip(words, differing, strict=True) if differs]
        if several_models or not parts:
            parts.insert(0, models[run.model])
        result[str(folder(run, scale))] = ', '.join(parts)
    return result


def settings_in_words(run, scale):
    """(size, length, learning rate, warm-up) of a run; its size is vanilla's."""
    return (
        f'{vanilla_parameters(run.size, scale.name) / 1e6:.2g}M parameters',
        f'{run.scaled_length(scale):,} tokens',
        f'learning rate {scale.rates[run.rate]:g}',
        f'{scale.warmups[run.warmup]:,} warm-up steps',
    )


@functools.cache
def vanilla_parameters(size, scale_name):
    """All weights of vanilla at a size."""
    _, config = runs.configs_of(Run('vanilla', size), SCALES[scale_name])
    return losses.without_weights(config).num_params(non_embedding=False)


def baseline_of(panel):
    """What the zero line of curves is."""
    if panel.how == 'relative':
        return NAMES[panel.runs[0].model]
    baselines = panel.runs[::2]
    if len({run.model for run in baselines}) > 1:
        return 'its own baseline'
    name = NAMES[baselines[0].model]
    return name if len(set(baselines)) == 1 else f'{name}, same setting'


# --- tables ---------------------------------------------------------------------------------------


def loss_table(panel, numbers, scale):
    rows = []
    for run, path in zip(panel.runs, panel_folders(panel, scale), strict=True):
        report = numbers['runs'][path]
        minus = ''
        if 'minus_first' in report:
            mean = report['minus_first']['mean']
            minus = evaluate.pm(mean['loss'], mean['standard_error'], '+')
        paper = TABLE_5.get((run.model, run.size), '')
        rows.append([Path(path).name, f'{report["mean"]["loss"]:.4f}', minus, str(paper)])
    head = ['run', 'loss (nats)', 'minus vanilla, ± s.e. over windows', 'the paper']
    return markdown_table(head, rows) + '\n'


def tasks_table(panel, numbers, scale):
    reports, rows = numbers['runs'], []
    paths = panel_folders(panel, scale)
    for run, path in zip(panel.runs, paths, strict=True):
        report = reports[path]
        scores = report['tasks'].values()
        cells = [accuracy(score['acc'], score['acc_stderr']) for score in scores]
        cells.append(accuracy(report['average'], report['average_stderr']))
        paper = TABLE_1.get((run.model, run.size, run.length or PAPER.length), {})
        rows.append([Path(path).name, *cells, str(paper.get('average', ''))])
    tasks = reports[paths[0]]['tasks']
    head = ['acc ± s.e. over items', *tasks, 'average', 'the paper']
    return markdown_table(head, rows) + '\n'


def accuracy(value, error):
    return evaluate.pm(value, error, digits=3)


TABLES = {'loss': loss_table, 'tasks': tasks_table}
