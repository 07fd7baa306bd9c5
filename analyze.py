"""
What happens inside: the paper's analyses (Figs. 1, 3, 9, 15) of runs, or of a Hugging Face checkpoint.

$ python analyze.py entropy --out_dir=out/vanilla_82m out/resformer_82m out/svformer_82m --out=results/entropy
$ python analyze.py similarity --hf=FOLDER_OR_HUB_ID --text=book.txt --sequences=100
$ python analyze.py spectrum --out_dir=out/vanilla_82m out/resformer_82m --sequences=100
$ python analyze.py mapping --out_dir=out/vanilla_82m

entropy     of token importance, the column means of the attention matrix over heads and queries (Eq. 11), in nats
similarity  mean cosine of pairs of tokens, of each layer's hidden states, keys and values as attended with (Eq. 13)
spectrum    eigenvalues of V^T V / T, heads concatenated, of projected values and of those attended with (Eq. 12)
mapping     cosine of attention over the keys of this and the previous layer (Eq. 2) to A_n (V_n + V_n-1) (Eq. 3) and
            to A_n V_n + V_n-1 (Eq. 6), heads concatenated, before c_proj

Everything is computed per sequence, then averaged over sequences. Writes <out>.json, <out>.png and <out>.pdf.
"""
import contextlib
import json
import math
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import model as architecture
import plot
from configurator import configure, one_line_errors
from data import Dataset
from sample import load_run
from train import Machine, TrainConfig, provenance

BLOCK = 2**24  # attention weights in memory at once: 64 MB


@dataclass
class AnalyzeConfig:
    out_dir: str = ''  # the first run; others follow as plain arguments
    hf: str = ''  # a Hugging Face folder or hub id instead, read with its own tokenizer (needs --text)
    dataset: str = ''  # a folder in data/, whose validation split is read; '': the one the run was trained on
    text: str = ''  # a text file to read instead
    sequences: int = 1000  # how many, evenly spaced
    length: int = 2048  # tokens of a sequence; at most the model's block_size
    batch_size: int = 4  # sequences at once; it changes nothing but the speed
    device: str = 'auto'  # as in train.py
    out: str = ''  # where to write, without ending; '': results/<analysis>

    def __post_init__(self):
        for name, least in (('sequences', 1), ('length', 2), ('batch_size', 1)):
            if getattr(self, name) < least:
                raise ValueError(f'{name}={getattr(self, name)} must be at least {least}')
        if self.hf and (self.out_dir or not self.text):
            raise ValueError('--hf reads a --text with its own tokenizer, and goes without --out_dir')


@contextlib.contextmanager
def watch(model, see):
    """Call see(layer, q, keys, values) where a layer attends; shapes as in model.attend_cross, which it gives."""
    original, calls = architecture.attend_cross, 0

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
    """Call see(layer, output) after each of the modules."""
    hooks = [module.register_forward_hook(lambda _, args, output, n=n: see(n, output))
             for n, module in enumerate(modules)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def joined(t):
    """(B, heads, T, hs) -> (B, T, heads * hs)"""
    return t.transpose(1, 2).flatten(2)


# --- the four analyses: each gives {name: (B, layers, ...) float64} of a batch idx (B, T) ----------------------------

def entropy(model, idx):
    found = {}

    def see(layer, q, keys, values):
        found[layer] = torch.special.entr(importance(q, keys)).sum(dim=1)
    with watch(model, see):
        model(idx, last_only=True)
    return {'entropy': stack(found, model)}


def importance(q, keys):
    """Mean over heads and queries of the attention that each token gets, (B, T); q (B, nh, T, hs), keys a list of
    (B, n_kv_head, T, hs). Attention is computed anew, some queries at a time: all of it would not fit."""
    B, nh, T, hs = q.size()
    k = torch.cat(keys, dim=2).float()  # (B, n_kv_head, P * T, hs)
    S, groups = k.size(2), k.size(1)
    columns, times = torch.zeros(B, S, dtype=torch.float64, device=q.device), torch.arange(T, device=q.device)
    step = max(1, BLOCK // (B * nh * S))
    for rows in times.split(step):
        scores = q[:, :, rows].float().view(B, groups, -1, hs) @ k.transpose(2, 3) / math.sqrt(hs)
        scores = scores.view(B, nh, len(rows), S).masked_fill(times.repeat(len(keys)) > rows[:, None], -torch.inf)
        columns += scores.softmax(dim=3).sum(dim=(1, 2))
    return columns.view(B, len(keys), T).sum(dim=1) / (nh * T)


def uniform_entropy(T):
    """The entropy of token importance where every token attends alike to all tokens up to itself."""
    columns = (1 / torch.arange(1, T + 1, dtype=torch.float64)).flip(0).cumsum(0).flip(0) / T
    return torch.special.entr(columns).sum().item()


def similarity(model, idx):
    found = {'hidden states': {}, 'keys': {}, 'values': {}}

    def see(layer, q, keys, values):
        found['keys'][layer], found['values'][layer] = (mean_cosine(joined(t[-1])) for t in (keys, values))
    with watch(model, see), outputs_of(model.transformer.h, lambda layer, x: found['hidden states'].update(
            {layer: mean_cosine(x)})):
        model(idx, last_only=True)
    return {name: stack(layers, model) for name, layers in found.items()}


def mean_cosine(x):
    """Mean cosine over pairs of different tokens of x (B, T, C): the sum of the unit vectors, squared, has them all."""
    unit = F.normalize(x.double(), dim=2)
    T = x.size(1)
    return (unit.sum(dim=1).square().sum(dim=1) - T) / (T * (T - 1))


def spectrum(model, idx):
    found = {'projected values': {}, 'values attended with': {}}

    def eigenvalues(v):  # (B, T, C) -> (B, C), the largest first
        v = v.double()
        return torch.linalg.eigvalsh(v.transpose(1, 2) @ v / v.size(1)).flip(1)

    def projected(layer, output):
        attn = model.transformer.h[layer].attn
        if 'v' in attn.owned:
            found['projected values'][layer] = eigenvalues(output[..., -attn.rows[-1]:])

    def see(layer, q, keys, values):
        found['values attended with'][layer] = eigenvalues(joined(values[-1]))
    with watch(model, see), outputs_of([block.attn.c_attn for block in model.transformer.h], projected):
        model(idx, last_only=True)
    return {name: stack(layers, model) for name, layers in found.items()}


def mapping(model, idx):
    if len(model.transformer.h) < 2:
        raise ValueError('mapping compares a layer with the one before: the model has a single layer')
    found, before = {'A_n (V_n + V_n-1), Eq. 3': {}, 'A_n V_n + V_n-1, Eq. 6': {}}, {}

    def see(layer, q, keys, values):
        k, v = keys[-1], values[-1]
        if before:
            cross = joined(attend_cross(q, [before['k'], k], [before['v'], v]))
            identity = before['v'].repeat_interleave(q.size(1) // v.size(1), dim=1)
            for name, other in zip(found, (architecture.attend(q, k, v + before['v']),
                                           architecture.attend(q, k, v) + identity), strict=True):
                found[name][layer] = F.cosine_similarity(cross.double(), joined(other).double(), dim=2).mean(dim=1)
        before.update(k=k, v=v)
    with watch(model, see) as attend_cross:
        model(idx, last_only=True)
    return {name: stack(layers, model) for name, layers in found.items()}


def stack(found, model):
    """{layer: (B, ...)} -> (B, layers, ...); layers that have none are NaN."""
    like = next(iter(found.values()))
    return torch.stack([found.get(n, torch.full_like(like, torch.nan)) for n in range(len(model.transformer.h))],
                       dim=1)


ANALYSES = {f.__name__: f for f in (entropy, similarity, spectrum, mapping)}


# --- runs, sequences, files ------------------------------------------------------------------------------------------

def load(run, settings):
    """(model, a list of rows of token ids as arrays) of a run, or of --hf."""
    if settings.hf:
        model = architecture.GPT.from_pretrained(run)
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise OSError('--hf reads text with the tokenizer of transformers: pip install transformers') from None
        try:
            tokenizer, checkpoint = AutoTokenizer.from_pretrained(run), None
        except Exception as error:  # each kind of tokenizer has its own
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f'{run} has no tokenizer that transformers can load: {reason}') from error
    else:
        model, tokenizer, checkpoint = load_run(run)
    T = min(settings.length, model.config.block_size)
    if settings.text:
        text = Path(settings.text).read_text()
        ids = np.asarray(tokenizer(text)['input_ids'] if settings.hf else tokenizer.encode(text))
        windows = [ids[i:i + T] for i in range(0, len(ids) - T + 1, T)]
        where = settings.text
    else:
        dataset = Dataset(settings.dataset or (checkpoint['settings']['dataset'] if checkpoint else ''))
        if dataset.meta['tokenizer']['sha256'] != tokenizer.sha256:
            raise ValueError(f'{run} was trained with another tokenizer than that of {dataset.folder}')
        windows = [(domain, row) for domain, entry in dataset.meta['splits']['validation'].items()
                   for row in range(entry['tokens'] // T)]
        where = dataset.folder
    if not windows:
        raise ValueError(f'{where} has not one sequence of {T} tokens; give a shorter --length')
    chosen = [windows[i] for i in np.unique(np.linspace(0, len(windows) - 1, settings.sequences).astype(int))]
    rows = chosen if settings.text else [dataset.read('validation', domain, row * T, T) for domain, row in chosen]
    if (highest := max(int(row.max()) for row in rows)) >= model.config.vocab_size:
        raise ValueError(f'{where} has the token id {highest}, {run} knows {model.config.vocab_size} ids')
    return model, [np.asarray(row, dtype=np.int64) for row in rows]


def analyze(kind, runs, settings, machine):
    """{run: {name: {'mean': (layers, ...), 'standard_error': ...}}} and more about each run, ready for JSON."""
    reports = {}
    for run in runs:
        model, rows = load(run, settings)
        model.to(machine.device).eval()
        parts = []
        with torch.no_grad():
            for first in tqdm(range(0, len(rows), settings.batch_size), desc=str(run), unit='batch'):
                batch = np.stack(rows[first:first + settings.batch_size])
                parts.append({name: t.cpu() for name, t in ANALYSES[kind](
                    model, torch.from_numpy(batch).to(machine.device)).items()})
        series = {}
        for name in parts[0]:
            values = torch.cat([part[name] for part in parts]).numpy()  # (sequences, layers, ...)
            error = values.std(axis=0, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else np.zeros_like(values[0])
            series[name] = {'mean': values.mean(axis=0).tolist(), 'standard_error': error.tolist()}
        reports[str(run)] = {'series': series, 'sequences': len(rows), 'length': len(rows[0]),
                             'config': asdict(model.config)}
    numbers = {'analysis': kind, **provenance(machine), 'runs': reports}
    return json.loads(json.dumps(numbers), parse_constant=lambda name: None)  # JSON has no NaN


def draw(numbers, title=''):
    """The figure of analyze()'s numbers: one curve per run, mean and standard error over sequences."""
    kind, runs = numbers['analysis'], numbers['runs']
    names = list(next(iter(runs.values()))['series'])
    panels = {'spectrum': ('projected values, layer 1', 'projected values', 'values attended with'),
              'mapping': ('',), 'entropy': ('',)}.get(kind, names)
    width = 4 * max(len(panels), 1.4)
    figure, axes = plot.pyplot().subplots(1, len(panels), squeeze=False, layout='constrained')
    styles, labels = plot.styles({run: report['config'] for run, report in runs.items()}), plot.labels(runs)
    for ax, panel in zip(axes[0], panels, strict=True):
        for run, report in runs.items():
            if kind == 'spectrum':
                s = report['series'][panel.partition(',')[0]]
                mean, error = np.array(s['mean'], dtype=float), np.array(s['standard_error'], dtype=float)
                mean, error = (mean[0], error[0]) if 'layer 1' in panel else (mean[:, 0], error[:, 0])
                curves = {'': (mean, error)}
            else:
                chosen = names if panel == '' else [panel]
                curves = {name if len(chosen) > 1 else '': tuple(np.array(report['series'][name][key], dtype=float)
                          for key in ('mean', 'standard_error')) for name in chosen}
            for i, (name, (mean, error)) in enumerate(curves.items()):
                name = re.sub(r'([AV])_(n(-1)?)', r'$\1_{\2}$', name)
                if 'layer 1' in panel:  # values are float32: an eigenvalue below its precision is rounding, or zero
                    mean = np.where(mean > np.finfo(np.float32).eps * mean[0], mean, np.nan)
                x = np.arange(1, len(mean) + 1)
                ax.plot(x, mean, marker='' if 'layer 1' in panel else '.x'[i], label=f'{labels[run]} {name}'.strip(),
                        **styles[run])
                low = mean - error
                if kind == 'spectrum':  # a log axis has no 0
                    low = np.maximum(low, np.nanmin(mean) / 2)
                ax.fill_between(x, low, mean + error, color=styles[run]['color'], alpha=0.2, linewidth=0)
        if kind == 'entropy':
            for T in sorted({report['length'] for report in runs.values()}):
                ax.axhline(uniform_entropy(T), color='#BBBBBB', linewidth=1, label=f'uniform attention, {T} tokens')
        ax.set_title(panel, fontsize=10)
        ax.xaxis.set_major_locator(plot.pyplot().MaxNLocator(integer=True))
        ax.set_xlabel('index of the eigenvalue' if 'layer 1' in panel else 'layer')
        ax.set_ylabel({'entropy': 'entropy of token importance (nats)', 'similarity': 'mean cosine of pairs of tokens',
                       'mapping': "cosine to cross-layer attention's output",
                       'spectrum': 'eigenvalue' if 'layer 1' in panel else 'largest eigenvalue'}[kind])
        if kind == 'spectrum':
            ax.set_yscale('log')
        ax.grid(alpha=0.3)
    figure.set_size_inches(width, 3.6 + plot.legend(figure, axes[0][0], width, loc='outside lower center'))
    figure.suptitle(title or kind, fontsize=10)
    return figure


def main():
    with one_line_errors(ValueError, OSError):
        kind = sys.argv[1] if len(sys.argv) > 1 else ''
        if kind not in ANALYSES:
            print(__doc__.strip())
            sys.exit(0 if kind in ('--help', '-h') else 2)
        (settings,) = configure(AnalyzeConfig, argv=[a for a in sys.argv[2:] if a.startswith('-')])
        runs = [settings.hf or settings.out_dir, *(a for a in sys.argv[2:] if not a.startswith('-'))]
        if not runs[0]:
            raise ValueError('give --out_dir=RUN [RUN ...] or --hf=FOLDER')
        machine = Machine(TrainConfig(device=settings.device, compile=False))
        torch.set_float32_matmul_precision('highest')  # no TF32: these are measurements
        numbers = analyze(kind, runs, settings, machine)
        out = Path(settings.out or f'results/{kind}')
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_name(out.name + '.json').write_text(json.dumps(numbers, indent=1) + '\n')
        figure = draw(numbers)
        for ending in ('.png', '.pdf'):
            plot.save(figure, out.with_name(out.name + ending))


if __name__ == '__main__':
    main()
