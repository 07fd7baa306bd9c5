"""
The paper's tables, figures and claims: plans and trains the missing runs, judges and draws them.

$ python -m paper.reproduce list                       # what there is, what it needs, how long it takes
$ python -m paper.reproduce fig6 --scale=tiny          # one of them, or several; all: every one
$ python -m paper.reproduce fig6 --scale=claims --seeds=5
$ python -m paper.reproduce all --scale=tiny --jobs=2  # two trainings at a time
$ python -m paper.reproduce fig6 --scale=paper         # by torchrun on this machine's GPUs (--gpus=8)
$ python -m paper.reproduce redraw fig6 --scale=tiny   # from its numbers in results/, without any run
$ python -m paper.reproduce fig6 RUNS --out=FOLDER     # from runs that exist, without training
$ python -m paper.reproduce claims RUNS --analyses=FOLDER --out=FOLDER/verdicts

The data of scale tiny are data/stdlib, as `make demo` prepares them.
A run is kept in out/<scale>/<arm>_lr<rate>_seed<seed>: finished ones are reused, unfinished ones go on.
Results are in results/<scale>/. After SIGTERM or Ctrl-C the runs are saved, and the same command goes on.
One seed gives no verdict.

`claims` writes the verdict on every claim of the paper as <out>.md, .json and .svg, and prints the losses
and all differences of losses. --analyses is a folder with entropy.json, spectrum.json, similarity.json and
mapping.json, as paper.analyze writes them, for claims on what happens inside a model. Runs are found in
them by the name of their folder.
"""

import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import evaluate
from comparison import launch
from comparison.charts import curves_picture, looks
from comparison.curves import measure_curves
from comparison.plan import Plan, check_training
from comparison.results import Results, train_plan
from configurator import choose
from lib.files import as_json, one_line_errors, unreadable, write_json, write_whole
from lib.machine import Machine
from lib.rundir import provenance
from lib.tables import markdown_table
from model import GPT
from paper import analyze, draw, judge, losses, wiring
from paper.figures import CLAIMS, FIGURES, NAMES, PAPER, SCALES, R, V, number_of


@dataclass
class ReproduceConfig:
    words: tuple = ()  # figures, as the list names them, or all; and runs that exist
    scale: str = 'tiny'  # paper, claims or tiny
    seeds: int = 1  # runs of each arm: seeds 1, 2, ...
    jobs: int = 0  # trainings at a time; 0: one per core, or per GPU
    gpus: int = 8  # processes of torchrun, scale=paper
    device: str = 'auto'  # as in train.py
    data_dir: str = ''  # the zero-shot tasks' files, for table1, as in evaluate.py; '': the hub
    analyses: str = ''  # a folder of analyses of runs that exist
    mixed_code: bool = False  # as in compare.py
    out: str = ''  # where to write what runs that exist show; '': here

    def __post_init__(self):
        if self.scale not in SCALES:
            raise ValueError(f'scale={self.scale!r} is not one of {", ".join(SCALES)}')

    def figures(self):
        """The figures that the words name; every one where they name none."""
        names = [word for word in self.words if word in FIGURES]
        return list(FIGURES) if 'all' in self.words or not self.words else names

    def folders(self):
        return tuple(word for word in self.words if word not in (*FIGURES, 'all'))


# --- runs -----------------------------------------------------------------------------------------


def comparisons_of(names, settings):
    """[({arm's name: Arm}, its comparison.results.Results)] of figures: a comparison per length."""
    scale = SCALES[settings.scale]
    by_length = {}
    for name in names:
        for arm in FIGURES[name].runs(scale):
            by_length.setdefault(arm.length, {})[arm.name] = arm
    comparisons = []
    for arms in by_length.values():
        wanted = {name: arm.settings(scale) for name, arm in arms.items()}
        (dataset,) = {own['dataset'] for own in wanted.values()}
        plan = Plan(
            wanted,
            Path('out', scale.name),
            common={'device': settings.device, 'dataset': dataset},
            seeds=settings.seeds,
            mixed_code=settings.mixed_code,
        )
        comparisons.append((arms, Results(plan)))
    return comparisons


def train_missing(comparisons, settings):
    """Train what is missing. Raises OSError naming what has not finished."""
    gpus = settings.gpus if settings.scale == 'paper' else 1
    for _, results in comparisons:
        check_training(results.plan, gpus)
    problems = {}
    for _, results in comparisons:
        train_plan(results, settings.jobs, gpus)
        problems |= results.problems()
    if problems:
        words = [f'{run}: {problem}' for run, problem in problems.items()]
        raise OSError(f'{"; ".join(words)} (each run has its output in train.log)')


def pool_of(comparisons):
    """{arm: {seed: State}} of the runs of comparisons that have finished."""
    pool = {}
    for arms, results in comparisons:
        for name, arm in arms.items():
            for seed, run in results.test_runs(name).items():
                state = results.state(run)
                if state.kind == 'finished':
                    pool.setdefault(arm, {})[seed] = state
    return pool


# --- numbers, ready for JSON ----------------------------------------------------------------------


def measure_panel(panel, pool, settings, machine=None):
    """The numbers of a panel, from a pool of runs; nothing where there are none."""
    scale = SCALES[settings.scale]
    arms = [arm for arm in panel.arms if arm in pool]
    folders = tuple(run.folder for arm in arms for run in pool[arm].values())
    pairs = {}
    for arm in arms:
        # Curves may be of runs that went on with other settings, as those of results/long.
        of_seeds = judge.pairs_of(pool, arm, arm.baseline(), {'resumed'})
        if of_seeds:
            pairs[arm.name] = of_seeds
    if panel.how == 'curves':
        return measure_curves(pairs, scale.window // 2)
    if panel.how == 'critical':
        every = [pair for of_seeds in pairs.values() for pair in of_seeds.values()]
        points = draw.measure_critical(every, scale.window)
        for point in points:
            print(f'{point["length"]} tokens: {point["words"]}')
        return points
    if panel.how == 'scaling':
        return measure_scaling(arms, pool, scale.window)
    if panel.how == 'loss':
        print(judge.loss_table({arm: pool[arm] for arm in arms}))
    if panel.how == 'tasks':
        limit = 0 if scale is PAPER else 200
        options = evaluate.TasksConfig(data_dir=settings.data_dir, limit=limit)
        numbers = evaluate.evaluate_tasks(folders, options, machine)
        evaluate.print_tasks(numbers)
        return numbers['runs']
    if panel.how in analyze.ANALYSES:
        options = analyze.AnalyzeConfig(
            folders, sequences=scale.sequences, length=scale.lengths[1], batch_size=10
        )
        return analyze.analyze(panel.how, options, Machine(settings.device, 'float32'))
    return {}


def measure_scaling(arms, pool, window):
    """{model: {'parameters', 'loss', 'power_law'}}, from small to large, and what ResFormer saves."""
    models, points = {}, {}
    # A law through single runs says nothing.
    is_several = min(len(pool[arm]) for arm in arms) > 1
    for arm in arms:
        runs = list(pool[arm].values())
        size = GPT.without_weights(runs[0].model).num_params(non_embedding=False)
        loss = statistics.fmean(losses.last_loss(run, window) for run in runs)
        points.setdefault(arm.model, []).append((size, loss))
    for model, of_model in points.items():
        parameters, loss = zip(*of_model, strict=True)
        law = losses.power_law(parameters, loss) if is_several else None
        models[model] = {'parameters': parameters, 'loss': loss, 'power_law': law}
    saved, why = None, 'one run of each size has no power law'
    if is_several:
        saved, why = losses.parameters_saved(points[R], points[V])
    pairs = judge.pairs_of(pool, arms[-1], arms[-1].baseline()).values()
    tokens = [losses.tokens_saved(*pair, window) for pair in pairs]
    print(
        f'at equal loss ResFormer saves {in_percent([saved])} of the parameters (the paper: 10% to 16%) '
        f'and {in_percent(tokens)} of the tokens (14% to 20%) where the rate has not decayed yet; {why}'
    )
    return models


def in_percent(shares):
    return 'n/a' if None in shares else f'{statistics.fmean(shares):.0%}'


# --- pictures and tables --------------------------------------------------------------------------


def draw_panel(name, panel, numbers, scale, folder):
    """Draw a panel of a figure into <folder>/<name>.png, or <name>_2.png and so on."""
    figure = FIGURES[name]
    number = figure.panels.index(panel) + 1
    path = Path(folder, name if number == 1 else f'{name}_{number}')
    subject = f'{number_of(name)}: {panel.title or figure.title}'
    title = f'{subject} ({scale.name})'
    if panel.how in ('tasks', 'loss'):  # printed
        return
    if panel.how == 'wiring':
        configs = {}
        for arm in panel.arms:
            _, config = arm.configs(PAPER)
            configs[NAMES[arm.model]] = replace(config, n_layer=4)
        picture = wiring.wiring_figure(configs, subject)
    elif panel.how in analyze.ANALYSES:
        is_several = len(numbers['runs']) > len(panel.arms)
        drawn = analyze.over_seeds(numbers) if is_several else numbers
        picture = analyze.figure_of(drawn, title)
    elif panel.how == 'scaling':
        picture = draw.scaling_picture(numbers, scale.window, title)
    elif panel.how == 'critical':
        picture = draw.crossing_picture(numbers, draw.COLORS[panel.arms[0].model], title)
    else:
        picture = curves_of(panel, numbers, scale, title)
    draw.save(picture, path)


def curves_of(panel, numbers, scale, title):
    arms = [arm for arm in panel.arms if arm.name in numbers]
    baselines = {NAMES[arm.baseline().model] for arm in arms}
    baseline = baselines.pop() if len(baselines) == 1 else 'its own baseline'
    told = {name for arm in arms for name in arm.unusual()}
    labels = {arm.name: arm.words(scale, told) for arm in arms}
    # The baseline is a line, too. Under its full name, no arm looks like a variant of another.
    known = {NAMES[model]: color for model, color in draw.COLORS.items()}
    drawn = looks([baseline, *labels.values()], known)
    look = {arm: drawn[words] for arm, words in labels.items()}
    return curves_picture(numbers, labels, look, baseline, scale.window // 2, title)


# --- the program ----------------------------------------------------------------------------------


def reproduce(name, pool, settings, machine):
    """Measure a figure's runs, which have finished, write the numbers, draw and judge them."""
    scale, entries, reports = SCALES[settings.scale], [], {}
    for panel in FIGURES[name].panels:
        numbers = as_json(measure_panel(panel, pool, settings, machine))
        entries.append({'how': panel.how, 'title': panel.title, 'numbers': numbers})
        if panel.how in analyze.ANALYSES:
            reports[panel.how] = {Path(run).name: one for run, one in numbers['runs'].items()}
    path = Path('results', scale.name, f'{name}.json')
    write_json(path, {'figure': name, **provenance(machine), 'panels': entries})
    redraw(name, scale)
    rows = judge.figure_rows(name, pool, reports)
    if rows:
        print(judge.claims_table(rows, pool))


def redraw(name, scale):
    """Draw a figure from its JSON file."""
    path = Path('results', scale.name, f'{name}.json')
    panels = {(panel.how, panel.title): panel for panel in FIGURES[name].panels}
    advice = f'python -m paper.reproduce {name} makes it anew'
    with unreadable(f'{path} does not hold what {name} draws today', advice):
        # A kept file may lack a panel.
        for entry in json.loads(path.read_text())['panels']:
            panel = panels[entry['how'], entry['title']]
            draw_panel(name, panel, entry['numbers'], scale, path.parent)


def draw_kept(name, pool, settings):
    """Draw the curves of a figure from runs that exist, as far as these have its arms."""
    drawn = 0
    for panel in FIGURES[name].panels:
        if panel.how in ('curves', 'critical'):
            numbers = as_json(measure_panel(panel, pool, settings))
            if numbers:
                draw_panel(name, panel, numbers, SCALES[settings.scale], settings.out)
                drawn += 1
    if not drawn:
        raise ValueError('no runs of a model and its baseline with a seed in common')


def write_claims(pool, settings):
    """The verdict on every claim, from runs that exist, and all differences of their losses."""
    rows = judge.claim_rows(CLAIMS, pool, judge.read_reports(settings.analyses))
    table, picture = judge.claims_table(rows, pool), judge.claims_plot(rows)
    out = Path(settings.out or 'verdicts')
    numbers = {'rows': [{'label': row.label(), **asdict(row)} for row in rows]}
    write_json(out.with_name(f'{out.name}.json'), numbers)
    write_whole(out.with_name(f'{out.name}.md'), table)
    if picture:
        write_whole(out.with_name(f'{out.name}.svg'), picture)
    print(f'{table}\n{judge.loss_table(pool)}\n\n{judge.difference_table(pool)}')


def print_list(settings):
    scale, rows = SCALES[settings.scale], []
    for name in settings.figures():
        figure = FIGURES[name]
        done = sum(map(len, pool_of(comparisons_of([name], settings)).values()))
        arms = [arm.name for arm in figure.runs(scale)]
        runs = f'{done} of {len(arms) * settings.seeds}'
        rows.append([name, runs, figure.title, ' '.join(arms)])
    print(markdown_table(['', 'runs', 'what', 'arms'], rows, (0, 2, 3)))
    print(f'\nA run takes {scale.duration}.')


def each(names, make, *arguments):
    """make(name, *arguments) for each figure; if one fails, the others are still drawn."""
    problems = []
    for name in names:
        try:
            make(name, *arguments)
        except (ValueError, OSError) as error:
            problems.append(f'{name}: {error}')
    if problems:
        raise OSError(f'not drawn: {"; ".join(problems)}')


def main():
    with one_line_errors(interrupts=False):
        modes = dict.fromkeys(('', 'list', 'redraw', 'claims'), (ReproduceConfig,))
        mode, (settings,) = choose(modes, __doc__, plain='words')
        scale, names, folders = SCALES[settings.scale], settings.figures(), settings.folders()
        pool = judge.read_pool(folders, scale, settings.mixed_code)
        if mode == 'list':
            print_list(settings)
        elif mode == 'redraw':
            each(names, redraw, scale)
        elif not settings.words:
            print(__doc__.strip())
            sys.exit(2)
        elif mode == 'claims':
            write_claims(pool, settings)
        elif folders and not names:
            raise ValueError('what of these runs: name figures, all, or the mode claims')
        elif folders:
            each(names, draw_kept, pool, settings)
        else:
            machine, comparisons = Machine(settings.device), comparisons_of(names, settings)
            note = 'what was trained is saved, and the same command goes on'
            with launch.ends_when_interrupted(note):
                train_missing(comparisons, settings)
            each(names, reproduce, pool_of(comparisons), settings, machine)


if __name__ == '__main__':
    main()
