"""
Every claim of the paper, tested by runs: read_groups() reads the runs, rows_of() judges the claims.

Which runs test a claim, and what its verdict means, is written at the top of verdicts.py, the program.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from comparison.plan import recorded_settings, settings_difference
from comparison.results import different_data
from comparison.runs import changes_on_the_way, gpt_config, read_state
from comparison.verdict import judge
from configurator import first_line
from model import GPTConfig
from paper import analyze, insides, losses
from paper.claims import BASES, METRICS, SIGNS
from paper.figures import NAMES
from paper.runs import PAPER, configs_of

# {verdict: how a headline counts it}
VERDICTS = {
    'agrees': 'in agreement',
    'contradicts': 'contradicted',
    'undecided': 'undecided',
    'untestable': 'not tested here',
}

# Why a contrast is not tested.
LARGER = 'larger models, longer sequences or other measurements are needed'
MISSING = 'the runs are missing'


# --- runs -----------------------------------------------------------------------------------------


@dataclass
class FinishedRun:
    """A finished run, its last losses, and what was found inside its model."""

    folder: Path
    seed: int
    rate: float
    losses: dict  # of the last evaluation
    series: dict = field(default_factory=dict)  # {analysis: {series: array (layers, ...)}}


def read_groups(folders, analyses):
    """{settings but for seed and rate, as text: {variant, as text: {seed: FinishedRun}}} of finished runs.

    Raises ValueError for a run that has not finished or is not what its settings say, for two of the same
    group, variant and seed, and for two of a group that saw different data.
    """
    groups = {}
    states = {}  # of each group
    for folder in map(Path, folders):
        state = read_state(folder)
        if state.kind != 'finished':
            raise ValueError(f'{folder} is {state.kind}: {state.detail or "it has no log"}')
        changes = changes_on_the_way(state.entries)
        if changes:
            raise ValueError(f'{folder} was resumed at {changes[0]}')
        config = gpt_config(state.config, folder)
        shared = json.dumps(losses.common_settings(state.config, config), sort_keys=True)
        states.setdefault(shared, []).append(state)
        group = groups.setdefault(shared, {})
        seeds = group.setdefault(as_key(config), {})
        run = finished_run(state, config, analyses)
        check_arm(run, seeds)
        seeds[run.seed] = run

    for group in states.values():
        problem = different_data(group)
        if problem:
            raise ValueError(problem)
    return groups


def check_arm(run, others):
    """Raise ValueError where a run is no further seed of `others`, {seed: FinishedRun} of its model."""
    if run.seed in others:
        raise ValueError(
            f'{run.folder} and {others[run.seed].folder} have the same model and seed: name one of them'
        )
    for other in others.values():
        if other.rate != run.rate:
            raise ValueError(
                f'{run.folder} and {other.folder} are the same model at the learning rates {run.rate:g} '
                f'and {other.rate:g}: name the runs of one rate'
            )


def as_key(config):
    """A model's wiring as text. Sizes differ in their heads: what counts is the share of KV heads."""
    variant = config.variant() | {'n_kv_head': config.kv_heads / config.n_head}
    return json.dumps(variant, sort_keys=True)


def finished_run(state, config, analyses):
    series = {}
    for kind, runs in analyses.items():
        analysis = runs.get(state.folder.name)
        if analysis:
            check_analysis(kind, analysis, state, config)
            series[kind] = analysis.series
    seed, rate = state.config['seed'], state.config['learning_rate']
    return FinishedRun(state.folder, seed, rate, state.losses, series)


@dataclass
class Analysis:
    """What an analysis found inside the model of one run."""

    config: GPTConfig
    series: dict  # {series: array (layers, ...)}
    step: int | None  # of the checkpoint; None in older analyses
    settings: dict  # of the run, from comparison.plan.recorded_settings(); {} in older ones


def check_analysis(kind, analysis, state, config):
    """Raise ValueError where an analysis is of another run of that name, as far as it says, or of a
    checkpoint before the last."""
    what = f'the analysis of {kind} for {state.folder.name}'
    if analysis.config != config:
        raise ValueError(f'{what} is of another model than {state.folder}')
    if not analysis.settings:
        return
    difference = settings_difference(
        recorded_settings(analysis.settings), recorded_settings(state.config)
    )
    if difference:
        name, value, own = difference
        raise ValueError(
            f'{what} is of a run with {name}={value!r}, but {state.folder} has {own!r}'
        )
    steps = state.config['max_iters']
    if analysis.step != steps:
        raise ValueError(f'{what} is of step {analysis.step}, but {state.folder} has {steps} steps')


def read_analyses(folder):
    """{analysis: {name of a run's folder: Analysis}}; {} without a folder.

    Raises FileNotFoundError where the folder has no analysis, ValueError for a damaged one.
    """
    analyses = {}
    for kind in analyze.ANALYSES if folder else ():
        path = Path(folder, f'{kind}.json')
        if path.exists():
            analyses[kind] = read_analysis(path, kind)
    if folder and not analyses:
        names = ', '.join(f'{kind}.json' for kind in analyze.ANALYSES)
        raise FileNotFoundError(f'{folder} has none of {names}')
    return analyses


def read_analysis(path, kind):
    found = {}
    try:
        reports = json.loads(path.read_text())['runs']
        for run, report in reports.items():
            name = Path(run).name
            if name in found:
                raise ValueError(f'it has two runs named {name}')
            config, series = GPTConfig(**report['config']), insides.as_arrays(report)
            missing = [
                series_name for series_name in insides.SERIES[kind] if series_name not in series
            ]
            if missing:
                raise ValueError(f'{run} has no series {missing[0]!r}')
            found[name] = Analysis(config, series, report.get('step'), report.get('settings') or {})
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f'{path}: {first_line(error)}') from error
    return found


# --- what a claim comes to, for one seed ----------------------------------------------------------

# Each gives our metric minus theirs, or, for a claim about one model, the metric itself.


def validation_loss(ours, theirs):
    return ours.losses['mean'] - theirs.losses['mean']


def early_loss(ours, theirs):
    return losses.early_difference(theirs.folder, ours.folder)


def inside_of_seed(metric):
    """The difference of what an analysis found inside two models."""
    kind, difference = insides.DIFFERENCES[metric]
    return lambda ours, theirs: float(difference(ours.series[kind], theirs.series[kind]))


# {metric: (the difference of one seed, the analysis that it needs)}. A loss at the end is judged by the
# validation loss, as in compare.py, also where the paper draws the training loss.
SEED_DIFFERENCES = {
    'final loss': (validation_loss, None),
    'validation loss': (validation_loss, None),
    'early loss': (early_loss, None),
    **{metric: (inside_of_seed(metric), kind) for metric, (kind, _) in insides.DIFFERENCES.items()},
}

# --- rows: one for each contrast that the paper prints, however often it does ---------------------


@dataclass
class Row:
    """A contrast, all places where the paper prints it, and what the runs say."""

    figure: str  # of the claim that first prints it, or a table or version. Its family for Holm
    ours: str
    sign: str
    theirs: str
    metric: str
    where: list
    says: list
    basis: str
    verdict: str = 'untestable'
    reason: str = ''  # why it is undecided or untestable
    lacks: str = ''  # LARGER or MISSING, where it is untestable
    numbers: dict = field(default_factory=dict)  # of comparison.verdict.judge()
    runs: list = field(default_factory=list)  # folders' names
    rates: dict = field(default_factory=dict)  # {model: learning rates}

    def label(self):
        """The contrast in words; of the inside of a model, the claim's own."""
        if self.metric in insides.DIFFERENCES:
            return f'{self.says[0]} ({self.metric})'
        what = '' if measure_of(self.metric) == 'validation loss' else f'{self.metric}: '
        return f'{what}{self.ours} {SIGNS[self.sign]} {self.theirs}'


def measure_of(metric):
    """The metric by which a claim is judged here."""
    return 'validation loss' if metric == 'final loss' else metric


def describe_run(run):
    """A claim's Run in words: its model, and what is unusual about it."""
    return ', '.join([NAMES[run.model], *unusual_words(run)])


def unusual_words(run):
    """A Run's size, length, rate and warm-up in words, where they are not the usual ones."""
    forms = {'size': '{}', 'length': '{:,} tokens', 'rate': 'rate {:g}', 'warmup': 'warm-up {:,}'}
    values = run.unusual(PAPER)
    if 'size' in values:
        values['size'] = values['size'].upper()
    return [forms[what].format(value) for what, value in values.items()]


def rows_of(claims, groups):
    """[Row] of the claims, tested by groups of runs; see read_groups()."""
    rows, tested = {}, {}
    for claim in claims:
        ours, theirs = describe_run(claim.ours), describe_run(claim.theirs)
        key = ours, theirs, measure_of(claim.metric)
        row = rows.get(key)
        if row:
            if row.sign != claim.sign:
                raise ValueError(f'the paper prints {row.label()} with two signs')
            row.where.append(claim.where)
            row.says.append(claim.says)
            continue
        row = Row(
            claim.figure,
            ours,
            claim.sign,
            theirs,
            claim.metric,
            [claim.where],
            [claim.says],
            BASES[claim.basis],
        )
        rows[key] = row
        row.reason = beyond(claim)
        if row.reason:
            row.lacks = LARGER
            continue
        _, analysis = SEED_DIFFERENCES[claim.metric]
        pairs = find_pairs(claim.ours, claim.theirs, groups, analysis)
        if pairs:
            tested[key] = pairs
        else:
            row.lacks = MISSING
            row.reason = why_no_pair(claim, groups)

    for figure in dict.fromkeys(row.figure for row in rows.values()):
        # What runs of this size could test counts for Holm, whether or not it was trained.
        family = [key for key in rows if rows[key].figure == figure and rows[key].lacks != LARGER]
        judge_family(rows, {key: tested.get(key, {}) for key in family})
    return list(rows.values())


def beyond(claim):
    """Why no runs of the usual size and length could test a claim, or ''."""
    if claim.metric not in SEED_DIFFERENCES:
        return f'needs {METRICS[claim.metric]}'
    for run in (claim.ours, claim.theirs):
        unusual = unusual_words(run)
        if unusual:
            return f'no runs with {", ".join(unusual)}'
    return ''


def find_pairs(ours, theirs, groups, analysis=None):
    """{seed: (our FinishedRun, theirs)} of the group of runs with the most seeds in common.

    ours, theirs: claims' Runs. analysis: what both must have been analyzed for, if anything.
    """
    candidates = [pairs_in(variants, ours, theirs, analysis) for variants in groups.values()]
    return fullest(candidates, len, f'seeds of {describe_run(ours)} and {describe_run(theirs)}')


def fullest(candidates, size, what):
    """What the group of runs with the most has; {} where no group has anything.

    candidates: a dict per group, whose size(dict) says how much it has of `what`. Raises ValueError
    if several groups have the most: which of them counts would be a choice.
    """
    found = [candidate for candidate in candidates if candidate]
    most = max(map(size, found), default=0)
    best = [candidate for candidate in found if size(candidate) == most]
    if len(best) > 1:
        raise ValueError(
            f'{len(best)} groups of runs, with different settings, have equally many {what}: name the '
            'runs of one group'
        )
    return best[0] if best else {}


def pairs_in(variants, ours, theirs, analysis=None):
    """find_pairs() of one group of runs; variants: one of read_groups()'s values."""
    our_runs, their_runs = (variants.get(variant_of(run), {}) for run in (ours, theirs))
    pairs = {}
    for seed in sorted(our_runs.keys() & their_runs.keys()):
        pair = our_runs[seed], their_runs[seed]
        if not analysis or all(analysis in run.series for run in pair):
            pairs[seed] = pair
    return pairs


def why_no_pair(claim, groups):
    trained = {variant for variants in groups.values() for variant in variants}
    missing = {}
    for run in (claim.ours, claim.theirs):
        if variant_of(run) not in trained:
            missing[NAMES[run.model]] = True
    if missing:
        return f'no runs of {" and ".join(missing)}'
    _, analysis = SEED_DIFFERENCES[claim.metric]
    return f'no analysis of {analysis}' if analysis else 'no runs with the same settings and seeds'


def variant_of(run):
    _, config = configs_of(run, PAPER)
    return as_key(config)


def judge_family(rows, family):
    """Give the rows of one figure their numbers and verdicts."""
    differences = {}
    for key, pairs in family.items():
        difference, _ = SEED_DIFFERENCES[rows[key].metric]
        differences[key] = {seed: difference(*pair) for seed, pair in pairs.items()}
    for key, numbers in judge(differences).items():
        row, pairs = rows[key], family[key]
        if not pairs:
            continue
        row.numbers = numbers
        row.reason = numbers['reason']
        row.verdict = against_the_sign(numbers['verdict'], row.sign)
        ours, theirs = zip(*pairs.values(), strict=True)
        for name, runs in ((row.ours, ours), (row.theirs, theirs)):
            row.rates[name] = sorted({run.rate for run in runs})
            names = [run.folder.name for run in runs]
            row.runs += [name for name in names if name not in row.runs]


def against_the_sign(verdict, sign):
    """agrees, contradicts or undecided, from compare's `better` (lower), `worse` or `undecided`."""
    if verdict == 'undecided':
        return verdict
    below_is_printed = sign == '<'
    return 'agrees' if (verdict == 'better') == below_is_printed else 'contradicts'
