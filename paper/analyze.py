"""
What happens inside a model: the paper's analyses (Figs. 1, 3, 9, 15) of runs, or of a Hugging Face
checkpoint.

$ python -m paper.analyze entropy out/vanilla_82m out/resformer_82m out/svformer_82m
$ python -m paper.analyze similarity --hf=FOLDER_OR_HUB_ID --text=book.txt --sequences=100
$ python -m paper.analyze spectrum out/vanilla_82m out/resformer_82m --sequences=100
$ python -m paper.analyze mapping out/vanilla_82m --out=results/fig3

entropy     of token importance, the column means of the attention matrix over heads and queries
            (Eq. 11), in nats
similarity  mean cosine of pairs of tokens, of each layer's hidden states, keys and values as attended
            with (Eq. 13)
spectrum    eigenvalues of V^T V / T, heads concatenated, of projected values and of those attended
            with (Eq. 12)
mapping     cosine of attention over the keys of this and the previous layer (Eq. 2) to
            A_n (V_n + V_n-1) (Eq. 3) and to A_n V_n + V_n-1 (Eq. 6), heads concatenated, before c_proj

Everything is computed per sequence, in float32 without TF32, then averaged over sequences. Writes
<out>.json, <out>.png and <out>.pdf.
"""

import contextlib
import itertools
import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import model as architecture
from comparison.plan import recorded_settings, settings_difference
from configurator import choose, first_line, one_line_errors
from data import Dataset
from files import write_json
from hub.read import load as load_hub
from machine import Machine
from paper import draw
from rundir import check_tokenizer, provenance
from trained import load_run

BLOCK = 2**24  # attention weights in memory at once: 64 MB


@dataclass
class AnalyzeConfig:
    runs: tuple = ()  # folders of runs
    out_dir: str = ''  # one more folder of a run, before those
    hf: str = ''  # a Hugging Face folder or hub id instead, with its own tokenizer (needs --text)
    dataset: str = ''  # in data/, whose validation split is read; '': the one it was trained on
    text: str = ''  # a text file to read instead
    tokenizer: str = ''  # as in prepare_slimpajama.py; '': the one of the run's dataset
    sequences: int = 1000  # how many, evenly spaced
    length: int = 2048  # tokens of a sequence; at most the model's block_size
    batch_size: int = 4  # sequences at once; it changes nothing but the speed
    device: str = 'auto'  # as in train.py
    seeds: bool = False  # draw the runs of a model as one curve, with the standard error over them
    out: str = ''  # where to write, without ending; '': results/<analysis>

    def __post_init__(self):
        for name, least in (('sequences', 1), ('length', 2), ('batch_size', 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f'{name}={value} must be at least {least}')
        if self.hf and (self.out_dir or self.runs or self.tokenizer or not self.text):
            raise ValueError(
                '--hf reads a --text with its own tokenizer, and goes without --tokenizer, --out_dir '
                'and runs'
            )

    def all_runs(self):
        if self.hf:
            return [self.hf]
        runs = [run for run in (self.out_dir, *self.runs) if run]
        if not runs:
            raise ValueError('name the folders of runs (or --out_dir=RUN), or --hf=FOLDER')
        return runs


# --- watching a forward pass ----------------------------------------------------------------------


@contextlib.contextmanager
def watch(model, see):
    """Call see(layer, q, keys, values) where a layer attends; shapes as in model.attend_cross().

    Yields the original function.
    """
    original = architecture.attend_cross
    calls = 0

    def attend_cross(q, keys, values, *args):
        nonlocal calls
        see(calls % len(model.transformer.h), q, keys, values)
        calls += 1
        return original(q, keys, values, *args)

    architecture.attend_cross = attend_cross
    try:
        yield original
    finally:
        architecture.attend_cross = original


@contextlib.contextmanager
def outputs_of(modules, see):
    """Call see(layer, output) after each of the modules, one per layer."""

    def hook(layer):
        return lambda module, args, output: see(layer, output)

    handles = [module.register_forward_hook(hook(n)) for n, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def join_heads(t):
    """(B, heads, T, hs) -> (B, T, heads * hs)"""
    return t.transpose(1, 2).flatten(2)


def stack(by_layer, model):
    """{layer: (B, ...)} -> (B, layers, ...); layers that have none are NaN."""
    nothing = torch.full_like(next(iter(by_layer.values())), torch.nan)
    layers = range(len(model.transformer.h))
    return torch.stack([by_layer.get(n, nothing) for n in layers], dim=1)


# --- the four analyses: each gives {series: (B, layers, ...) float64} of a batch idx (B, T) -------


def entropy(model, idx):
    entropies = {}

    def see(layer, q, keys, values):
        entropies[layer] = torch.special.entr(importance(q, keys)).sum(dim=1)

    with watch(model, see):
        model(idx, last_only=True)
    return {'entropy': stack(entropies, model)}


def importance(q, keys):
    """The mean over heads and queries of the attention that each token gets, (B, T), float64.

    q (B, nh, T, hs), keys: a list of (B, n_kv_head, T, hs). Attention is computed anew, for some
    queries at a time: all of it would not fit.
    """
    B, nh, T, hs = q.size()
    k = torch.cat(keys, dim=2).float()  # (B, n_kv_head, S, hs)
    groups, S = k.size(1), k.size(2)
    times = torch.arange(T, device=q.device)
    key_times = times.repeat(len(keys))  # (S,)
    columns = torch.zeros(B, S, dtype=torch.float64, device=q.device)
    for rows in times.split(max(1, BLOCK // (B * nh * S))):
        some = q[:, :, rows].float().view(B, groups, -1, hs)
        scores = some @ k.transpose(2, 3) / math.sqrt(hs)
        scores = scores.view(B, nh, len(rows), S)
        scores = scores.masked_fill(key_times > rows[:, None], -torch.inf)
        columns += scores.softmax(dim=3).sum(dim=(1, 2))
    return columns.view(B, len(keys), T).sum(dim=1) / (nh * T)


def uniform_entropy(T):
    """The entropy of token importance if each token attends equally to all tokens up to itself."""
    weights = 1 / torch.arange(1, T + 1, dtype=torch.float64)  # that each query gives to a token
    columns = weights.flip(0).cumsum(0).flip(0) / T
    return torch.special.entr(columns).sum().item()


def similarity(model, idx):
    series = {'hidden states': {}, 'keys': {}, 'values': {}}

    def see(layer, q, keys, values):
        series['keys'][layer] = mean_cosine(join_heads(keys[-1]))
        series['values'][layer] = mean_cosine(join_heads(values[-1]))

    def see_output(layer, output):
        x, _, _ = output
        series['hidden states'][layer] = mean_cosine(x)

    with watch(model, see), outputs_of(model.transformer.h, see_output):
        model(idx, last_only=True)
    return {name: stack(layers, model) for name, layers in series.items()}


def mean_cosine(x):
    """The mean cosine over pairs of different tokens of x (B, T, C).

    The squared norm of the sum of the unit vectors adds up all of them, and T ones.
    """
    unit = F.normalize(x.double(), dim=2)
    T = x.size(1)
    return (unit.sum(dim=1).square().sum(dim=1) - T) / (T * (T - 1))


PROJECTED, ATTENDED = 'projected values', 'values attended with'


def spectrum(model, idx):
    series = {PROJECTED: {}, ATTENDED: {}}

    def see_projection(layer, output):
        attn = model.transformer.h[layer].attn
        if 'v' in attn.rows:  # its rows are the last
            series[PROJECTED][layer] = eigenvalues(output[..., -attn.rows['v'] :])

    def see(layer, q, keys, values):
        series[ATTENDED][layer] = eigenvalues(join_heads(values[-1]))

    projections = [block.attn.c_attn for block in model.transformer.h]
    with watch(model, see), outputs_of(projections, see_projection):
        model(idx, last_only=True)
    return {name: stack(layers, model) for name, layers in series.items()}


def eigenvalues(v):
    """Those of v^T v / T, the largest first: (B, T, C) -> (B, C)."""
    v = v.double()
    return torch.linalg.eigvalsh(v.transpose(1, 2) @ v / v.size(1)).flip(1)


EQ_3, EQ_6 = 'A_n (V_n + V_n-1), Eq. 3', 'A_n V_n + V_n-1, Eq. 6'


def mapping(model, idx):
    if len(model.transformer.h) < 2:
        raise ValueError(
            'mapping compares a layer with the one before: the model has a single layer'
        )
    series = {EQ_3: {}, EQ_6: {}}
    before = None  # k and v of the previous layer

    def see(layer, q, keys, values):
        nonlocal before
        k, v = keys[-1], values[-1]
        if before:
            k_before, v_before = before
            cross = join_heads(attend_cross(q, [k_before, k], [v_before, v])).double()
            identity = architecture.to_query_heads(v_before, q)
            approximations = {
                EQ_3: architecture.attend(q, k, v + v_before),
                EQ_6: architecture.attend(q, k, v) + identity,
            }
            for name, y in approximations.items():
                cosines = F.cosine_similarity(cross, join_heads(y).double(), dim=2)
                series[name][layer] = cosines.mean(dim=1)
        before = k, v

    with watch(model, see) as attend_cross:
        model(idx, last_only=True)
    return {name: stack(layers, model) for name, layers in series.items()}


ANALYSES = {
    'entropy': entropy,
    'similarity': similarity,
    'spectrum': spectrum,
    'mapping': mapping,
}

# --- models and the sequences that they read ------------------------------------------------------


def load(run, settings):
    """(model, rows, checkpoint) of a run, or of --hf, which has no checkpoint: None.

    rows: the sequences to read, int64 arrays of T ids.
    """
    if settings.hf:
        model, encode = open_hub(run)
        checkpoint = None
    else:
        model, tokenizer, checkpoint = load_run(run, settings.tokenizer)
        encode = tokenizer.encode
    T = min(settings.length, model.config.block_size)
    if settings.text:
        origin = settings.text
        rows = text_rows(Path(origin).read_text(), encode, T, settings.sequences)
    else:
        dataset = open_dataset(run, tokenizer, checkpoint, settings)
        origin = dataset.folder
        rows = dataset_rows(dataset, T, settings.sequences)

    if not rows:
        raise ValueError(f'{origin} has not one sequence of {T} tokens; give a shorter --length')
    highest = max(int(row.max()) for row in rows)
    if highest >= model.config.vocab_size:
        raise ValueError(
            f'{origin} contains the token id {highest}, but {run} has only {model.config.vocab_size} ids'
        )
    return model, rows, checkpoint


def open_hub(path):
    """(model, function from text to token ids) of a Hugging Face folder or hub id."""
    model = load_hub(path)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise OSError(
            '--hf reads text with the tokenizer of transformers: pip install transformers'
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # each kind of tokenizer raises its own
        raise ValueError(
            f'{path} has no tokenizer that transformers can load: {first_line(error)}'
        ) from error
    return model, lambda text: tokenizer(text)['input_ids']


def open_dataset(run, tokenizer, checkpoint, settings):
    """The Dataset that a run is to read, of its own tokenizer."""
    if not settings.dataset and checkpoint is None:
        raise ValueError(f'{run} is not a run of train.py: say which --dataset or --text')
    dataset = Dataset(settings.dataset or checkpoint['settings']['dataset'])
    sha256 = dataset.meta['tokenizer']['sha256']
    check_tokenizer(run, tokenizer.sha256, sha256, f'that of {dataset.folder}')
    return dataset


def text_rows(text, encode, T, count):
    ids = np.asarray(encode(text), dtype=np.int64)
    return [ids[start : start + T] for start in evenly(range(0, len(ids) - T + 1, T), count)]


def dataset_rows(dataset, T, count):
    """Rows of the validation split, over all domains."""
    places = []
    for domain, entry in dataset.meta['splits']['validation'].items():
        places += [(domain, row * T) for row in range(entry['tokens'] // T)]
    chosen = evenly(places, count)
    return [dataset.read('validation', domain, start, T) for domain, start in chosen]


def evenly(items, count):
    """`count` of the items at most, evenly spaced, the first and the last among them."""
    if not items:
        return []
    indices = np.unique(np.linspace(0, len(items) - 1, count).astype(int))
    return [items[i] for i in indices]


# --- numbers and figures --------------------------------------------------------------------------


def analyze(kind, runs, settings, machine):
    """What an analysis says of runs, ready for JSON.

    {'analysis': kind, ..., 'runs': {run: {'series': {name: {'mean', 'standard_error'}}, ...}}}; means
    (layers, ...) and their standard errors are over sequences. A run of train.py has its 'step' and its
    'settings', too.
    """
    reports = {}
    for run in runs:
        model, rows, checkpoint = load(run, settings)
        model.to(machine.device).eval()
        series = {}
        for name, values in measure(kind, model, rows, settings.batch_size, str(run)).items():
            series[name] = summary(values)
        reports[str(run)] = {
            'series': series,
            'sequences': len(rows),
            'length': len(rows[0]),
            'config': asdict(model.config),
            **run_of(checkpoint),
        }
    numbers = {'analysis': kind, **provenance(machine), 'runs': reports}
    # JSON has no NaN: it becomes null.
    return json.loads(json.dumps(numbers), parse_constant=lambda name: None)


def run_of(checkpoint):
    """Which run a checkpoint is of, and how far it was trained: {'step', 'settings'}; {} without one."""
    if checkpoint is None:
        return {}
    values = {**checkpoint['settings'], **checkpoint['model_config']}
    values['origin'] = checkpoint.get('origin')
    return {'step': checkpoint['step'], 'settings': recorded_settings(values)}


@torch.no_grad()
def measure(kind, model, rows, batch_size, label=''):
    """{series: (sequences, layers, ...)} of an analysis, on the model's device."""
    device = model.lm_head.weight.device
    batches = []
    for first in tqdm(range(0, len(rows), batch_size), desc=label, unit='batch'):
        idx = torch.from_numpy(np.stack(rows[first : first + batch_size])).to(device)
        batch = ANALYSES[kind](model, idx)
        batches.append({name: values.cpu() for name, values in batch.items()})
    return {name: torch.cat([batch[name] for batch in batches]).numpy() for name in batches[0]}


def summary(values):
    """Mean and standard error over the first dimension, as lists; one sequence has the error 0."""
    error = np.zeros_like(values[0])
    if len(values) > 1:
        error = values.std(axis=0, ddof=1) / math.sqrt(len(values))
    return {'mean': values.mean(axis=0).tolist(), 'standard_error': error.tolist()}


FIRST_LAYER = f'{PROJECTED}, layer 1'
TITLES = {
    'entropy': 'Entropy of token importance',
    'similarity': 'Similarity of tokens',
    'mapping': 'Two approximations of cross-layer attention',
    'spectrum': 'Eigenvalues of the values',
}
Y_LABELS = {
    'entropy': 'entropy of token importance (nats)',
    'similarity': 'mean cosine of pairs of tokens',
    'mapping': "cosine to cross-layer attention's output",
    'spectrum': 'largest eigenvalue',
}


def panels_of(kind, names):
    """{title: the series in it} of an analysis's figure."""
    if kind == 'similarity':
        return {name: [name] for name in names}
    if kind == 'spectrum':
        return {FIRST_LAYER: [PROJECTED], PROJECTED: [PROJECTED], ATTENDED: [ATTENDED]}
    return {'': names}


def curve_of(kind, title, series):
    """(mean, error) of a curve in a panel: over layers, or over the eigenvalues of the first one."""
    mean = np.array(series['mean'], dtype=float)
    error = np.array(series['standard_error'], dtype=float)
    if title == FIRST_LAYER:
        # Values are float32: below its precision, an eigenvalue is rounding, or zero.
        precision = np.finfo(np.float32).eps * mean[0, 0]
        return np.where(mean[0] > precision, mean[0], np.nan), error[0]
    if kind == 'spectrum':
        return mean[:, 0], error[:, 0]
    return mean, error


def over_seeds(numbers):
    """analyze()'s numbers with one report for all runs of a model, under the model's name.

    Means are over runs, and so are standard errors: the spread of seeds, not of sequences. Raises
    ValueError where the runs of a model are not further seeds of one another. A report that does not
    say its seed makes them `runs`.
    """
    by_model = {}
    for run, report in numbers['runs'].items():
        name = draw.model_name(architecture.GPTConfig(**report['config']))
        by_model.setdefault(name, {})[run] = report
    known = all('settings' in report for report in numbers['runs'].values())
    what = 'seeds' if known else 'runs'
    pooled = {}
    for name, reports in by_model.items():
        for pair in itertools.combinations(reports.items(), 2):
            check_seeds(name, *pair)
        first, *others = reports.values()
        series = {}
        for key in first['series']:
            means = [report['series'][key]['mean'] for report in reports.values()]
            series[key] = summary(np.array(means, dtype=float))
        label = f'{name}, {len(reports)} {what}' if others else name
        pooled[label] = {**first, 'series': series}
    return {**numbers, 'errors_over': what, 'runs': pooled}


def check_seeds(name, one, other):
    """Raise ValueError where two (run, report) of a model are not two seeds of it, as far as they say."""
    (run, report), (again, later) = one, other
    if report['config'] != later['config']:
        raise ValueError(f'--seeds=True: {name} is there with several sizes or settings')
    if report['series'] == later['series']:
        raise ValueError(f'--seeds=True: {run} and {again} have the same numbers: name one of them')
    if not ('settings' in report and 'settings' in later):
        return
    if report['step'] != later['step']:
        raise ValueError(
            f'--seeds=True: {run} is at step {report["step"]}, {again} at step {later["step"]}'
        )
    ours, theirs = report['settings'], later['settings']
    if ours['seed'] == theirs['seed']:
        raise ValueError(f'--seeds=True: {run} and {again} have the same seed: name one of them')
    difference = settings_difference({**ours, 'seed': theirs['seed']}, theirs)
    if difference:
        name, value, other_value = difference
        raise ValueError(
            f'--seeds=True: {run} has {name}={value!r} and {again} has {other_value!r}: they are not '
            'seeds of one model'
        )


def figure_of(numbers, title='', names=None):
    """The figure of analyze()'s or over_seeds()'s numbers: a curve per report, its mean and error.

    names: {run: its name in the legend}, of every run; None: the ends of their paths.
    """
    kind, reports = numbers['analysis'], numbers['runs']
    configs = {run: architecture.GPTConfig(**report['config']) for run, report in reports.items()}
    looks = draw.looks(configs, names or draw.labels(reports))
    panels = panels_of(kind, list(next(iter(reports.values()))['series']))
    width = 3.1 * max(len(panels), 2)
    figure, axes = draw.pyplot().subplots(1, len(panels), squeeze=False, layout='constrained')
    # Panels of one quantity share its axis, so that they can be compared.
    of_layers = [ax for ax, panel in zip(axes[0], panels, strict=True) if panel != FIRST_LAYER]
    for ax in of_layers[1:]:
        ax.sharey(of_layers[0])
    for ax, (panel, series) in zip(axes[0], panels.items(), strict=True):
        draw_panel(ax, kind, panel, series, reports, looks)
    for ax in of_layers[1:]:
        ax.tick_params(which='both', labelleft=False)
    of_layers[0].set_ylabel(Y_LABELS[kind], fontsize=draw.FONT)
    height = 3.5 + draw.legend_below(figure, axes[0][0], width)
    figure.set_size_inches(width, height)
    of_bands = f'bands: one standard error over {numbers.get("errors_over", "sequences")}'
    figure.suptitle(f'{title or TITLES[kind]}\n{of_bands}', fontsize=11)
    return figure


def draw_panel(ax, kind, title, names, reports, looks):
    of_eigenvalues = title == FIRST_LAYER
    for run, report in reports.items():
        look = looks[run]
        for name, marker in zip(names, '.x', strict=False):
            mean, error = curve_of(kind, title, report['series'][name])
            low = mean - error
            if kind == 'spectrum':  # a log axis has no 0
                low = np.maximum(low, np.nanmin(mean) / 2)
            formula = re.sub(r'([AV])_(n(-1)?)', r'$\1_{\2}$', name)
            label = f'{look["label"]} {formula}' if len(names) > 1 else look['label']
            marker = '' if of_eigenvalues else marker
            x = np.arange(1, len(mean) + 1)
            ax.plot(x, mean, marker=marker, **{**look, 'label': label})
            band = {'color': look['color'], 'alpha': 0.2, 'linewidth': 0}
            ax.fill_between(x, low, mean + error, **band)

    if kind == 'entropy':
        for T in sorted({report['length'] for report in reports.values()}):
            label = f'uniform attention, {T} tokens'
            ax.axhline(uniform_entropy(T), color='#BBBBBB', linewidth=1, label=label)
    ax.set_title(title, fontsize=10)
    ax.xaxis.set_major_locator(draw.pyplot().MaxNLocator(integer=True))
    ax.set_xlabel('layer', fontsize=draw.FONT)
    if of_eigenvalues:
        ax.set_xlabel('index of the eigenvalue', fontsize=draw.FONT)
        ax.set_ylabel('eigenvalue', fontsize=draw.FONT)
    if kind == 'spectrum':
        ax.set_yscale('log')
    ax.grid(alpha=0.3)


def main():
    with one_line_errors(ValueError, OSError):
        modes = dict.fromkeys(ANALYSES, (AnalyzeConfig,))
        kind, (settings,) = choose(modes, __doc__, plain='runs')
        runs = settings.all_runs()
        numbers = analyze(kind, runs, settings, Machine(settings.device))
        out = Path(settings.out or f'results/{kind}')
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out.with_name(f'{out.name}.json'), numbers)
        if settings.seeds:
            drawn = over_seeds(numbers)
            figure = figure_of(drawn, names={name: name for name in drawn['runs']})
        else:
            figure = figure_of(numbers)
        for ending in ('png', 'pdf'):
            draw.save(figure, out.with_name(f'{out.name}.{ending}'))


if __name__ == '__main__':
    main()
