"""
What happens inside a model: the paper's analyses (Figs. 1, 3, 9, 15) of runs, also of imported ones
(hub/convert.py), and two of our own.

$ python -m paper.analyze entropy out/vanilla_82m out/resformer_82m out/svformer_82m
$ python -m paper.analyze similarity out/imported --text=book.txt --sequences=100
$ python -m paper.analyze spectrum out/vanilla_82m out/resformer_82m --sequences=100
$ python -m paper.analyze mapping out/vanilla_82m --out=out/fig3
$ python -m paper.analyze tokens out/vanilla_82m
$ python -m paper.analyze sinks out/vanilla_82m out/resformer_82m

entropy     of token importance, the column means of the attention matrix over heads and queries
            (Eq. 11), in nats; its JSON also has the importance of a sequence's first token
similarity  mean cosine of pairs of tokens, of each layer's hidden states, keys and values as attended
            with (Eq. 13)
spectrum    eigenvalues of V^T V / T, heads concatenated, of projected values and of those attended
            with (Eq. 12)
mapping     cosine of attention over the keys of this and the previous layer (Eq. 2) to
            A_n (V_n + V_n-1) (Eq. 3) and to A_n V_n + V_n-1 (Eq. 6), heads concatenated, before c_proj
tokens      how much of each layer's projected values the token alone explains: R^2 of the tokens' mean
            values, heads concatenated. Half of the sequences give the means, the others are judged
sinks       of each head, the token of the first half of a sequence that gets most attention: how often
            it is a sink, how small its value is (a drain), how large the residual stream is there (a
            peak) and anywhere (massive activations), and the loss's gradient for its value

Everything is computed per sequence, in float32 without TF32, then averaged over sequences. With
--seeds=True, the runs of a model are one curve, and its error is over seeds. Writes <out>.json and
<out>.png.
"""

import contextlib
import itertools
import math
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from configurator import choose

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import model as architecture
from comparison import charts
from comparison.assemble import arm_of
from comparison.runs import difference, facts
from lib.files import as_json, locked, one_line_errors, sha256_of, whole_file, write_json
from lib.machine import Machine
from lib.rundir import provenance
from lib.trained import dataset_of, load_run
from model import attend, attend_cross, to_query_heads


@dataclass
class AnalyzeConfig:
    runs: tuple = ()  # folders of runs
    text: str = ''  # a text file to read; '': the validation split of a dataset
    dataset: str = ''  # a folder in data/; '': the one the run was trained on
    tokenizer: str = ''  # as in prepare_slimpajama.py; '': the one of the run's dataset
    sequences: int = 1000  # how many, evenly spaced
    length: int = 2048  # tokens of a sequence; at most the model's block_size
    batch_size: int = 4  # sequences at once; it changes nothing but the speed
    device: str = 'auto'  # as in train.py
    seeds: bool = False  # draw the runs of a model as one curve, with the standard error over them
    out: str = ''  # where to write, without ending; '': out/<analysis>

    def __post_init__(self):
        if self.sequences < 1 or self.length < 2 or self.batch_size < 1:
            raise ValueError(
                f'sequences={self.sequences} and batch_size={self.batch_size} must be at least 1, and '
                f'length={self.length} at least 2'
            )
        if not self.runs:
            raise ValueError('name the folders of runs')


# --- watching a forward pass ----------------------------------------------------------------------


def watch(model, idx, targets=None):
    """[layer] of a model that reads idx (B, T): what each layer works with.

    q and keys are what it attends with, as model.attend_cross() gets them, k and v its own keys and
    values among these. projected, (B, T, any), are the values that it projects, before any are mixed in;
    it may project none, so that the last dimension is 0. x and y, (B, T, C), are what the block gets and
    gives. With targets (B, T), gradient is that of their loss for v, through this layer's attention
    alone, though other layers may share v.
    """
    nothing = torch.empty(*idx.shape, 0, device=idx.device)
    layers = [SimpleNamespace(projected=nothing) for _ in model.transformer.h]
    waiting = iter(layers)

    def spy(q, keys, values, *args):
        values = [v.view_as(v) for v in values]
        layer = next(waiting)
        layer.q, layer.keys, layer.k, layer.v = q, keys, keys[-1], values[-1]
        return attend_cross(q, keys, values, *args)

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(mock.patch.object(architecture, 'attend_cross', spy))
        for block, layer in zip(model.transformer.h, layers, strict=True):

            def keep_stream(block, args, out, layer=layer):
                layer.x, layer.y = args[0], out[0]

            def keep_projected(proj, args, out, layer=layer):
                layer.projected = out

            hooks.enter_context(block.register_forward_hook(keep_stream))
            if block.attn.v.wire.projects:
                hooks.enter_context(block.attn.v.proj.register_forward_hook(keep_projected))
        hooks.enter_context(torch.set_grad_enabled(targets is not None))
        _, loss = model(idx, targets, last_only=targets is None)

    if targets is not None:
        gradients = torch.autograd.grad(loss, [layer.v for layer in layers])
        for layer, gradient in zip(layers, gradients, strict=True):
            layer.gradient = gradient
    return layers


def join_heads(t):
    """(B, heads, T, hs) -> (B, T, heads * hs)"""
    return t.transpose(1, 2).flatten(2)


def stack(layers):
    """[(B, ...)] -> (B, layers, ...)"""
    return torch.stack(layers, dim=1)


# --- analyses of each sequence: {series: (B, layers, ...) float64} of a batch's layers -------------


def entropy(layers):
    # (B, T) of each layer
    importance = [column_sums(layer).mean(dim=1) / layer.q.size(2) for layer in layers]
    return {
        'entropy': stack([torch.special.entr(each).sum(dim=1) for each in importance]),
        'first token': stack([each[:, 0] for each in importance]),
    }


def column_sums(layer):
    """The attention that each token gets from all queries of a head, (B, nh, T), float64.

    What a head gives is its matrix times its values. So the sum of a column of the matrix is the gradient
    of the sum of what the head gives.
    """
    keys = [to_query_heads(k, layer.q) for k in layer.keys]
    values = [torch.zeros_like(k, requires_grad=True) for k in keys]
    with torch.enable_grad():
        total = attend_cross(layer.q, keys, values)[..., 0].sum()
        columns = torch.autograd.grad(total, values)
    return sum(each[..., 0].double() for each in columns)


def uniform_entropy(T):
    """The entropy of token importance if each token attends equally to all tokens up to itself."""
    # The last query, and the last token, first.
    weights = 1 / torch.arange(T, 0, -1, dtype=torch.float64)  # that each query gives to a token
    importance = weights.cumsum(0) / T
    return torch.special.entr(importance).sum().item()


def similarity(layers):
    return {
        'hidden states': stack([mean_cosine(layer.y) for layer in layers]),
        'keys': stack([mean_cosine(join_heads(layer.k)) for layer in layers]),
        'values': stack([mean_cosine(join_heads(layer.v)) for layer in layers]),
    }


def mean_cosine(x):
    """The mean cosine over pairs of different tokens of x (B, T, C).

    The squared norm of the sum of the unit vectors adds up all of them, and T ones.
    """
    unit = F.normalize(x.double(), dim=2)
    T = x.size(1)
    return (unit.sum(dim=1).square().sum(dim=1) - T) / (T * (T - 1))


PROJECTED, ATTENDED = 'projected values', 'values attended with'


def spectrum(layers):
    projected = [eigenvalues(layer.projected).T for layer in layers]
    attended = [eigenvalues(join_heads(layer.v)) for layer in layers]
    # A layer may have fewer than another: NaN. (C, layers, B)
    padded = pad_sequence(projected, padding_value=torch.nan)
    return {PROJECTED: padded.transpose(0, 2), ATTENDED: stack(attended)}


def eigenvalues(v):
    """Those of v^T v / T, the largest first: (B, T, C) -> (B, C)."""
    v = v.double()
    return torch.linalg.eigvalsh(v.transpose(1, 2) @ v / v.size(1)).flip(1)


EQ_3, EQ_6 = 'A_n (V_n + V_n-1), Eq. 3', 'A_n V_n + V_n-1, Eq. 6'


def mapping(layers):
    if len(layers) < 2:
        raise ValueError(
            'mapping compares a layer with the one before: the model has a single layer'
        )
    by_equation = {EQ_3: [], EQ_6: []}
    for before, layer in itertools.pairwise(layers):
        q, k, v = layer.q, layer.k, layer.v
        cross = join_heads(attend_cross(q, [before.k, k], [before.v, v])).double()
        approximations = {
            EQ_3: attend(q, k, v + before.v),
            EQ_6: attend(q, k, v) + to_query_heads(before.v, q),
        }
        for name, y in approximations.items():
            cosines = F.cosine_similarity(cross, join_heads(y).double(), dim=2)
            by_equation[name].append(cosines.mean(dim=1))
    # The first layer has none before it: NaN.
    return {name: F.pad(stack(y), (1, 0), value=torch.nan) for name, y in by_equation.items()}


SINK = 0.3  # a share of attention


def sinks(layers):
    """Of each head, s is the position in the first half of the sequence that gets most attention, as a
    mean over the queries that can see it; of equals the first. A norm at s is compared with the mean
    norm at all other positions.

    sink rate  whether s gets more than SINK (Gu et al., arXiv:2410.10781); also whether position 0 does
    drain      norm of the value that the layer attends with (Guo et al., arXiv:2410.13835)
    peak       norm of what the block gets (the same)
    gradient   norm of the training loss's gradient for that value, through this layer's attention
    massive    what the block gets: the largest activation over the median, of an even number the lower
               one (Sun et al., arXiv:2402.17762)

    All without dropout, as means over heads (B, layers) and, but for massive, by head (B, layers, nh).
    """
    sums = stack([column_sums(layer) for layer in layers])
    queries = torch.arange(sums.size(3), 0, -1, device=sums.device)  # that see a position
    alpha = sums / queries  # (B, layers, nh, T)
    most, s = alpha[..., : (len(queries) + 1) // 2].max(dim=3)
    by_head = {
        'sink rate': (most > SINK).double(),
        'sink rate of position 0': (alpha[..., 0] > SINK).double(),
        'drain': over_others(s, [layer.v for layer in layers]),
        'peak': over_others(s, [layer.x[:, None] for layer in layers]),
        'gradient': over_others(s, [layer.gradient for layer in layers]),
    }
    sizes = (layer.x.double().abs().flatten(1) for layer in layers)
    massive = [each.amax(dim=1) / each.median(dim=1).values for each in sizes]
    series = {'massive': stack(massive)}
    for name, t in by_head.items():
        series |= {name: t.mean(dim=2), f'{name}, by head': t}
    return series


def over_others(s, layers):
    """The norms at positions s (B, layers, nh) over their means at all others, (B, layers, nh).

    layers: of each, (B, heads, T, any); the nh heads may share one.
    """
    norms = stack([t.double().norm(dim=3) for t in layers])
    norms = norms.repeat_interleave(s.size(2) // norms.size(2), dim=2)
    at_s = norms.gather(3, s[..., None])[..., 0]
    return at_s * (norms.size(3) - 1) / (norms.sum(dim=3) - at_s)


FORMULAS = {
    'entropy': entropy,
    'similarity': similarity,
    'spectrum': spectrum,
    'mapping': mapping,
    'sinks': sinks,
}

# --- one of all sequences: half of them say what the other half is measured by --------------------

OFTEN = 20  # a token has a mean if it occurs that often
EXPLAINED, COVERED = 'R^2', 'share of positions'


def tokens(model, rows, batch_size, label=''):
    """{series: (half of the rows, ...)}: R^2 by layer, and the share of the positions that it is about.

    In every second row, the first one included, each token that occurs there OFTEN times gets the mean
    of its values, and all these tokens together get one mean. In the other rows, over the positions of
    these tokens, R^2 = 1 - sum |v - the token's mean|^2 / sum |v - the one mean|^2. The mean over rows
    is this R^2, and the standard error is that of a ratio of sums.
    """
    fitted, held_out = rows[::2], rows[1::2]
    ids = torch.from_numpy(np.concatenate(fitted)).to(model.lm_head.weight.device)
    counts = ids.bincount(minlength=model.config.vocab_size)
    often = counts >= OFTEN  # (vocabulary,)
    if often.sum() < 2 or not held_out:
        raise ValueError(
            f'of the tokens, fewer than two occur {OFTEN} times in half of the sequences; '
            'give more --sequences'
        )
    place = often.cumsum(0) - 1  # among the tokens that occur often
    counts = counts[often, None]

    sums = {}  # {layer: (tokens that occur often, C)}
    for idx in batches(model, fitted, batch_size, f'{label}, means'):
        known = often[idx]  # (B, T)
        for n, layer in enumerate(watch(model, idx)):
            v = layer.projected
            zeros = v.new_zeros(len(counts), v.size(2), dtype=torch.float64)
            sums.setdefault(n, zeros).index_add_(0, place[idx[known]], v[known].double())

    parts = []  # of each batch: what the tokens leave, what there is, which positions are judged
    for idx in batches(model, held_out, batch_size, label):
        known = often[idx]
        left, total = [], []
        for n, layer in enumerate(watch(model, idx)):
            v, means = layer.projected, sums[n] / counts
            mean = sums[n].sum(dim=0) / counts.sum()
            left.append(squares(v - means[place[idx]], known))
            total.append(squares(v - mean, known))
        parts.append([stack(left), stack(total), known.double().mean(dim=1)])

    left, total, covered = map(torch.cat, zip(*parts, strict=True))
    ratio = left.sum(dim=0) / total.sum(dim=0)  # NaN of a layer that projects nothing
    explained = 1 - ratio - (left - ratio * total) / total.mean(dim=0)
    return {EXPLAINED: explained, COVERED: covered}


def squares(t, known):
    """The sum of t^2 over the known positions of each sequence: (B, T, C), (B, T) -> (B,)"""
    return (t.square().sum(dim=2) * known).sum(dim=1)


# --- models and the sequences that they read ------------------------------------------------------


def model_and_rows(run, settings):
    """(model, rows, data, checkpoint) of a run. rows: the sequences to read, int64 arrays of T ids; data:
    the fingerprint of where they are from."""
    model, tokenizer, checkpoint = load_run(run, settings.tokenizer)
    T = min(settings.length, model.config.block_size)
    if settings.text:
        origin, data = settings.text, sha256_of(settings.text)[:12]
        text = Path(origin).read_text('utf-8-sig')
        ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
        count = len(ids) // T
        rows = evenly(ids[: count * T].reshape(count, T), settings.sequences)
    else:
        dataset = dataset_of(checkpoint, settings.dataset)
        origin, data = dataset.folder, dataset.fingerprint()
        rows = dataset_rows(dataset, T, settings.sequences)
    if not rows:
        raise ValueError(f'{origin} has not one sequence of {T} tokens; give a shorter --length')
    return model, rows, data, checkpoint


def dataset_rows(dataset, T, count):
    """Rows of the validation split, over all domains."""
    places = []
    for domain, entry in dataset.meta['splits']['validation'].items():
        places += [(domain, row * T) for row in range(entry['tokens'] // T)]
    return [dataset.read('validation', *place, T) for place in evenly(places, count)]


def evenly(items, count):
    """`count` of the items at most, evenly spaced, the first and the last among them."""
    n = len(items)
    return [items[i] for i in np.linspace(0, n - 1, min(count, n)).astype(int)]


# --- numbers and figures --------------------------------------------------------------------------


def analyze(kind, settings, machine):
    """What an analysis says of the runs of an AnalyzeConfig, ready for JSON.

    {'analysis': kind, ..., 'runs': {run: {'series': {name: {'mean', 'standard_error'}}, ...}}}; means
    (layers, ...) and their standard errors are over sequences. A run that was not imported has its
    'step' and its 'settings', too.
    """
    reports = {}
    for run in settings.runs:
        model, rows, data, checkpoint = model_and_rows(run, settings)
        model.to(machine.device)
        series = measure(kind, model, rows, settings.batch_size, str(run))
        report = {'series': {name: summary(values) for name, values in series.items()}}
        report |= {'sequences': len(rows), 'length': len(rows[0]), 'config': asdict(model.config)}
        report['data'] = data
        if 'seed' in checkpoint['settings']:  # it was not imported
            values = checkpoint['settings'] | checkpoint['model_config']
            values['origin'] = checkpoint.get('origin')
            report |= {'step': checkpoint['step'], 'settings': facts(values)}
        reports[str(run)] = report
    return as_json({'analysis': kind, **provenance(machine), 'runs': reports})


@torch.no_grad()
def measure(kind, model, rows, batch_size, label):
    """{series: (sequences, layers, ...)} of an analysis, on the model's device."""
    if kind == 'tokens':
        return tokens(model, rows, batch_size, label)
    parts = []
    for idx in batches(model, rows, batch_size, label):
        targets = F.pad(idx[:, 1:], (0, 1), value=-1) if kind == 'sinks' else None
        parts.append(FORMULAS[kind](watch(model, idx, targets)))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def batches(model, rows, batch_size, label):
    """The rows as (B, T) on the model's device, with a bar of progress."""
    for first in tqdm(range(0, len(rows), batch_size), desc=label, unit='batch', disable=None):
        some = np.stack(rows[first : first + batch_size])
        yield torch.from_numpy(some).to(model.lm_head.weight.device)


def summary(values):
    """Mean and standard error over the first dimension, as lists; a single one has the error 0 / 0."""
    error = values.std(dim=0, correction=0) / math.sqrt(len(values) - 1)
    return {'mean': values.mean(dim=0).tolist(), 'standard_error': error.tolist()}


def over_seeds(numbers):
    """analyze()'s numbers with one report for the runs of a model, which has the first one's name. Means
    are over runs, and so are standard errors, the spread of seeds, not of sequences: a model with one
    run has none.
    """
    reports, pooled = numbers['runs'], {}
    for first, seeds in models_of(reports).items():
        series = {}
        for name in reports[first]['series']:
            means = [reports[run]['series'][name]['mean'] for run in seeds.values()]
            series[name] = summary(torch.tensor(np.array(means, dtype=float)))
        pooled[first] = {**reports[first], 'series': series, 'seeds': len(seeds)}
    return {**numbers, 'runs': pooled}


def models_of(reports):
    """{run: {seed: run}} of runs that differ in nothing but their seeds, under the first of them.

    Raises ValueError for two runs of one seed, and for a run without one.
    """
    models, stated = {}, {}
    for run, report in reports.items():
        if 'settings' not in report:
            raise ValueError(f'{run} has no seed, for it was imported: leave out --seeds')
        # Where a run stopped is among its facts: another step makes another model.
        own = stated[run] = report['settings'] | {'step': report['step']}
        alike = (first for first in models if not difference(stated[first], own, ('seed',)))
        seeds = models.setdefault(next(alike, run), {})
        other = seeds.setdefault(own['seed'], run)
        if other != run:
            raise ValueError(f'{run} and {other} are one model with one seed: name one of them')
    return models


# --- figures --------------------------------------------------------------------------------------

FIRST_LAYER = f'{PROJECTED}, layer 1'
# {analysis: (title, y label, {panel: its series})}
PANELS = {
    'entropy': (
        'Entropy of token importance',
        'entropy of token importance (nats)',
        {'': 'entropy'},
    ),
    'similarity': (
        'Similarity of tokens',
        'mean cosine of pairs of tokens',
        {name: name for name in ('hidden states', 'keys', 'values')},
    ),
    'mapping': (
        'Two approximations of cross-layer attention',
        "cosine to cross-layer attention's output",
        {EQ_3: EQ_3, EQ_6: EQ_6},
    ),
    'spectrum': (
        'Eigenvalues of the values',
        'eigenvalue',
        {FIRST_LAYER: PROJECTED, PROJECTED: PROJECTED, ATTENDED: ATTENDED},
    ),
    'tokens': (
        'How much of the values the token alone explains',
        'R² on sequences that gave no means',
        {'': EXPLAINED},
    ),
    'sinks': (
        'Attention sinks, and norms at them over norms elsewhere',
        'share of heads',
        {'sink rate': 'sink rate', 'drain: |value|': 'drain', 'peak: |block input|': 'peak'},
    ),
}
LOGARITHMIC = (FIRST_LAYER, PROJECTED, ATTENDED, 'drain: |value|', 'peak: |block input|')


def figure_of(numbers):
    """The figure of analyze()'s or over_seeds()'s numbers: a curve per report, its mean and error."""
    kind, reports = numbers['analysis'], numbers['runs']
    title, y_label, panels = PANELS[kind]
    labels = labels_of(reports)
    looks = charts.looks(list(labels.values()))
    seeds = sorted({report['seeds'] for report in reports.values() if 'seeds' in report})
    over = ' or '.join(map(charts.seeds_text, seeds)) or 'sequences, not over models'
    title = f'{title}\nbands: one standard error over {over}'
    size = (3.1 * max(len(panels), 2), 4.2)
    # One quantity has one axis.
    is_shared = kind not in ('spectrum', 'sinks')
    figure, axes = charts.picture(title, size, ncols=len(panels), sharey=is_shared)
    axes = np.ravel(axes)  # of one panel, too
    if kind == 'spectrum':
        axes[2].sharey(axes[1])
        axes[1].set_ylabel('largest eigenvalue')
    for ax, (panel, series) in zip(axes, panels.items(), strict=True):
        if panel in LOGARITHMIC:
            ax.set_yscale('log')
        for run, report in reports.items():
            mean, error = curve_of(panel, report['series'][series])
            label, look = labels[run], looks[labels[run]]
            x = np.arange(1, len(mean) + 1)
            ax.plot(x, mean, marker='.', label=textwrap.fill(label, 28), **look)
            band = {'color': look['color'], 'alpha': 0.2, 'linewidth': 0}
            ax.fill_between(x, mean - error, mean + error, **band)
        ax.set_title(panel, fontsize=10)
        ax.set_xlabel('index of the eigenvalue' if panel == FIRST_LAYER else 'layer')
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel(y_label)
    if kind == 'entropy':
        for T in sorted({report['length'] for report in reports.values()}):
            label = f'uniform attention, {T} tokens'
            axes[0].axhline(uniform_entropy(T), color='#BBBBBB', linewidth=1, label=label)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc='outside lower center', ncols=2, frameon=False)
    return figure


def labels_of(runs):
    """{run: its arm}; where two are of one arm, {run: run}."""
    labels = {}
    for run in runs:
        path = Path(run)
        folder = path.parent if path.suffix == '.pt' else path
        labels[run], _ = arm_of(str(folder))
    if len({*labels.values()}) == len(labels):
        return labels
    return {run: run.replace('$', r'\$') for run in runs}


def curve_of(panel, series):
    """(mean, error) of a curve in a panel: over layers, or over the eigenvalues of the first one."""
    mean, error = (np.array(series[name], dtype=float) for name in ('mean', 'standard_error'))
    if panel == FIRST_LAYER:
        # Values are float32: below its precision, an eigenvalue is rounding, or zero.
        precision = np.finfo(np.float32).eps * mean[0, 0]
        return np.where(mean[0] > precision, mean[0], np.nan), error[0]
    if mean.ndim > 1:  # the largest eigenvalue
        return mean[:, 0], error[:, 0]
    return mean, error


def main():
    with one_line_errors():
        modes = dict.fromkeys(PANELS, (AnalyzeConfig,))
        kind, (settings,) = choose(modes, __doc__, plain='runs')
        # Names that no picture can show are refused before any work.
        labels_of(settings.runs)
        charts.pyplot()
        out = settings.out or f'out/{kind}'
        with held_picture(out) as picture:
            numbers = analyze(kind, settings, Machine(settings.device, 'float32'))
            write_json(f'{out}.json', numbers)
            figure = figure_of(over_seeds(numbers) if settings.seeds else numbers)
            with whole_file(picture) as file:
                figure.savefig(file, format='png', dpi=150)
        print(f'\nwrote {picture}')


@contextlib.contextmanager
def held_picture(out):
    """The path <out>.png, which no other process writes meanwhile. Raises OSError if one does."""
    picture = Path(f'{out}.png')
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.touch()
    with locked(picture, 'writing', '--out'):
        try:
            yield picture
        finally:
            if not picture.stat().st_size:  # the analysis failed
                picture.unlink()


if __name__ == '__main__':
    main()
