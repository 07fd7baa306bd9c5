"""
Figures from the logs of runs.

$ python plot.py relative out/demo/vanilla out/demo/resformer out/demo/svformer --window=10 --out=out/demo/relative.png
$ python plot.py bars out/demo/vanilla out/demo/resformer out/demo/svformer --window=20 --out=out/demo/bars.png
$ python plot.py scaling out/vanilla_82m out/vanilla_180m out/resformer_82m out/resformer_180m --window=50
$ python plot.py critical out/vanilla_512 out/svformer_512 out/vanilla_2048 out/svformer_2048 --window=100
"""
import argparse
import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np

from configurator import one_line_errors

# Okabe and Ito's colors, which color-blind readers can tell apart; a model has the same one in every figure.
COLORS = {'Transformer': '#000000', 'ResFormer': '#D55E00', 'SVFormer': '#0072B2', 'NeuTRENO': '#009E73',
          'DenseFormer': '#CC79A7', 'CLA': '#56B4E9', 'GQA': '#E69F00', 'other': '#888888'}


def read_entries(run):
    """The lines of a run's log.jsonl, [{'step': ...}]; one that is none is an error that names it."""
    path, entries = Path(run, 'log.jsonl'), []
    for number, line in enumerate(path.read_text(errors='replace').splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError:
            raise ValueError(f'{path}, line {number}: not JSON') from None
        if not isinstance(entry, dict) or not isinstance(entry.get('step'), int) or not isinstance(
                entry.get('loss'), int | float | None):
            raise ValueError(f'{path}, line {number}: not a line of a training log')
        entries.append(entry)
    return entries


def read_log(run):
    """The training loss of a run, {step: loss}, where it is finite."""
    losses = {entry['step']: entry['loss'] for entry in read_entries(run)
              if entry.get('loss') is not None and math.isfinite(entry['loss'])}
    if not losses:
        raise ValueError(f"{Path(run, 'log.jsonl')} holds no training loss yet")
    return losses


def read_config(run, *needed):
    """The settings of a run, {} where it has no config.json; without those `needed` it is an error."""
    path = Path(run, 'config.json')
    if not path.exists() and not needed:
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f'{path}: not JSON') from None
    if not isinstance(config, dict):
        raise ValueError(f'{path} holds no settings')
    if missing := [name for name in needed if name not in config]:
        raise ValueError(f'{path} does not say {missing[0]}')
    return config


def model_name(config):
    """The paper's name for a run's architecture, from its config."""
    for name, there in (('CLA', config.get('share_k') and config.get('share_v')), ('SVFormer', config.get('share_v')),
                        ('NeuTRENO', config.get('neutreno')), ('ResFormer', config.get('v_residual')),
                        ('DenseFormer', config.get('denseformer')),
                        ('GQA', config.get('n_kv_head', 0) not in (0, config.get('n_head')))):
        if there:
            return name
    plain = not any(v for k, v in config.items() if k.startswith(('share_', 'q_residual', 'k_residual')))
    return 'Transformer' if plain else 'other'


def labels(runs):
    """{run: as much of the end of its path as tells it from the others}"""
    parts = {run: Path(run).absolute().parts for run in runs}
    found = {}
    for run, own in parts.items():
        depth = next((n for n in range(1, len(own)) if sum(p[-n:] == own[-n:] for p in parts.values()) == 1), len(own))
        found[run] = '/'.join(own[-depth:])
    return found


def differences(baseline, run, window):
    """(steps, loss - baseline's loss) of the steps that both have, which must be `window` at least."""
    base, losses = read_log(baseline), read_log(run)
    steps = sorted(losses.keys() & base.keys())
    if len(steps) < window:
        raise ValueError(f'{run} and {baseline} have {len(steps)} steps in common, fewer than --window={window}')
    return np.array(steps), np.array([losses[step] - base[step] for step in steps])


def relative(baseline, runs, window):
    """{run: differences(), each a mean over `window` points}"""
    found = {run: differences(baseline, run, window) for run in runs}
    # The mean of window points belongs to their last step: a point never tells of steps still to come.
    return {run: (steps[window - 1:], np.convolve(difference, np.ones(window) / window, mode='valid'))
            for run, (steps, difference) in found.items()}


def final_differences(baseline, runs, window):
    """{run: (mean, standard error) of its loss minus the baseline's over the last `window` steps both have}."""
    found = {run: differences(baseline, run, window)[1][-window:] for run in runs}
    return {run: (float(d.mean()), float(d.std(ddof=1) / np.sqrt(window)) if window > 1 else 0.0)
            for run, d in found.items()}


def last_loss(run, window):
    """Mean training loss of the last `window` logged steps."""
    losses = list(read_log(run).values())[-window:]
    if len(losses) < window:
        raise ValueError(f'{run} has {len(losses)} logged steps, fewer than --window={window}')
    return float(np.mean(losses))


def power_law(parameters, losses):
    """(a, b) of loss = a * parameters ** -b, by least squares of the logarithms."""
    slope, intercept = np.polyfit(np.log(parameters), np.log(losses), 1)
    return float(np.exp(intercept)), float(-slope)


def parameters_of(run):
    """All weights of a run's model, from its config.json."""
    import torch

    from model import GPT, GPTConfig
    config = read_config(run, 'n_layer', 'n_head', 'n_embd', 'vocab_size')
    try:
        with torch.device('meta'):
            model = GPT(GPTConfig(**{name: value for name, value in config.items() if name in asdict(GPTConfig())}))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{Path(run, 'config.json')}: {error}") from error
    return model.num_params(non_embedding=False)


def tokens_saved(baseline, run, window):
    """The share of its steps that `run` could do without to reach the baseline's last loss; None if it does not."""
    target, losses = last_loss(baseline, window), read_log(run)
    smooth = np.convolve(list(losses.values()), np.ones(window) / window, mode='valid')
    reached = np.flatnonzero(smooth <= target)
    return 1 - (reached[0] + window) / len(losses) if len(reached) else None


def critical_step(baseline, run, window):
    """(step from which on `run` loses what it was ahead, True): after the sum of its smoothed differences is lowest,
    which a few points beyond 0 do not move. Not yet: where the line through the curve's last half meets 0, and False
    (the paper: through the last 1,000 points). (None, False): it was never ahead, or the curve does not rise."""
    steps, difference = relative(baseline, [run], window)[run]
    lead = np.cumsum(difference)
    last = int(lead.argmin())
    if lead[last] >= 0:
        return None, False
    if last < len(steps) - 1:
        return int(steps[last + 1]), True
    half = min(1000, max(2, len(steps) // 2))
    slope, intercept = np.polyfit(steps[-half:], difference[-half:], 1)
    return (float(-intercept / slope), False) if slope > 0 else (None, False)


def savings(models, name, window):
    """What a model saves at the largest Transformer's loss: shares, and why where one of them cannot be read (None)."""
    base, other = models['Transformer'], models[name]
    why = [f"{model}'s loss does not fall with size here" for model in ('Transformer', name)
           if models[model]['power_law'][1] <= 0]
    parameters = tokens = None
    if not why:
        (a, b), n = other['power_law'], np.log(other['parameters'])
        needed = np.log(a / base['loss'][-1]) / b  # log of the parameters that reach that loss
        if n[0] <= needed <= n[-1]:
            parameters = float(1 - np.exp(needed) / base['parameters'][-1])
        else:
            why.append(f'{name} reaches that loss outside the range of the fit')
        if (tokens := tokens_saved(base['runs'][-1], other['runs'][-1], window)) is None:
            why.append(f'the largest {name} does not reach that loss')
    return {'parameters_saved': parameters, 'tokens_saved': tokens, 'why': '; '.join(why)}


# --- drawing: each takes axes, and gives the numbers it drew ----------------------------------------------------------

def relative_axes(axes, baseline, runs, window):
    curves, names = relative(baseline, runs, window), labels([baseline, *runs])
    axes.axhline(0, color=COLORS[model_name(read_config(baseline))], linewidth=1, label=names[baseline])
    style = styles({run: read_config(run) for run in (baseline, *runs)})
    for run, (steps, values) in curves.items():
        axes.plot(steps, values, label=names[run], **style[run])
    axes.set_xlabel('step')
    axes.set_ylabel(f'training loss relative to\n{names[baseline]} (nats)')
    frame(axes, [values for _, values in curves.values()])
    return curves


def seeds_axes(axes, models, window):
    """Loss minus that of the baseline with the same seed, mean and standard error over seeds, early (the first 10% of
    the steps) and at the end; models: {name: [(baseline, run) of each seed]}."""
    found, edges, style = {}, [], styles({name: read_config(pairs[0][1]) for name, pairs in models.items()})
    for name, pairs in models.items():
        each = [differences(base, run, window) for base, run in pairs]
        last = [[entry['val']['mean'] for entry in read_entries(run) if 'val' in entry][-1] for _, run in pairs]
        found[name] = {'seeds': len(pairs)}
        for what, values in (('early', [d[steps < (steps[-1] + 1) / 10].mean() for steps, d in each]),
                             ('final', [d[-window:].mean() for _, d in each]), ('validation_loss', last)):
            error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
            found[name][what] = {'mean': float(np.mean(values)), 'standard_error': error,
                                 'of_each_seed': [float(value) for value in values]}
        curves = [dict(zip(*relative(base, [run], window)[run], strict=True)) for base, run in pairs]
        steps = sorted(set.intersection(*map(set, curves)))
        values = np.array([[curve[step] for step in steps] for curve in curves])
        mean = values.mean(axis=0)
        error = values.std(axis=0, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0 * mean
        axes.plot(steps, mean, label=name, **style[name])
        axes.fill_between(steps, mean - error, mean + error, color=style[name]['color'], alpha=0.2, linewidth=0)
        edges += [mean - error, mean + error]
    axes.set_ylabel("training loss minus vanilla's (nats)")
    frame(axes, edges)
    return found


def frame(axes, curves):
    """Limits, grid and legend of curves over steps. The first steps, where all losses fall by nats, would squeeze the
    rest: of its first 10%, up to 1% of a curve's points may lie outside."""
    low = min(0, *(min(c[len(c) // 10:].min(), np.quantile(c, 0.01)) for c in curves))
    high = max(0, *(max(c[len(c) // 10:].max(), np.quantile(c, 0.99)) for c in curves))
    margin = 0.1 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    axes.grid(alpha=0.3)
    legend(axes, axes, 4.6, loc='lower left', bbox_to_anchor=(0, 1))


def legend(owner, axes, inches, **place):
    """The legend of `axes`, outside of them, where it hides no curve; owner: the axes, or their figure. Returns its
    height in inches."""
    handles, names = axes.get_legend_handles_labels()
    longest = max(len(re.sub('[${}_]', '', name)) for name in names)  # not seen in formulas
    columns = max(1, int(inches / (0.5 + 0.07 * longest)))
    owner.legend(handles, names, frameon=False, fontsize=8, ncols=columns, **place)
    return 0.18 * math.ceil(len(names) / columns)


def bars_axes(axes, baseline, runs, window):
    found = final_differences(baseline, runs, window)
    style = styles({run: read_config(run) for run in (baseline, *runs)})  # as its curve: dashes become a hatch
    for i, (run, (mean, error)) in enumerate(found.items()):
        axes.barh(i, mean, xerr=error, color=style[run]['color'], height=0.6, edgecolor='white',
                  hatch={'-': '', '--': '//', ':': '..', '-.': 'xx'}[style[run]['linestyle']])
    axes.axvline(0, color='#000000', linewidth=1)
    names = labels([baseline, *runs])
    axes.set_yticks(range(len(found)), [names[run].replace('+', '\n+') for run in found], fontsize=8)
    axes.invert_yaxis()
    axes.locator_params(axis='x', nbins=5)
    axes.set_xlabel(f"loss minus {names[baseline]}'s (nats)\nmean and standard error of the last {window} steps")
    axes.grid(alpha=0.3, axis='x')
    return {run: {'mean': mean, 'standard_error': error} for run, (mean, error) in found.items()}


def scaling_axes(axes, runs, window):
    """Loss against parameters; models are told apart by their names."""
    models = {}
    for run in runs:
        models.setdefault(model_name(read_config(run)), []).append((parameters_of(run), last_loss(run, window), run))
    found = {}
    for name, points in models.items():
        n, loss, names = zip(*sorted(points), strict=True)
        found[name], label = {'parameters': n, 'loss': loss, 'runs': [str(run) for run in names]}, name
        if len(set(n)) > 1:
            a, b = found[name]['power_law'] = power_law(n, loss)
            x, label = np.geomspace(min(n), max(n), 50), f'{name}: {a:.3g} $N^{{{-b:+.3g}}}$'
            axes.plot(x, a * x ** -b, color=COLORS[name])
        axes.plot(n, loss, 'o', color=COLORS[name], label=label)
    for name, other in found.items():
        if name != 'Transformer' and 'power_law' in found.get('Transformer', {}) and 'power_law' in other:
            other.update(savings(found, name, window))
    axes.set_xscale('log')
    axes.set_yscale('log')
    axes.set_xlabel('parameters')
    axes.set_ylabel(f'training loss (nats)\nmean of the last {window} steps')
    axes.legend(framealpha=1, fontsize=8)
    axes.grid(alpha=0.3, which='both')
    return found


def critical_axes(axes, pairs, window):
    """The step at which a run is overtaken by its baseline against sequence length; pairs: [(baseline, run)]."""
    found = []
    for baseline, run in pairs:
        step, crossed = critical_step(baseline, run, window)
        found.append({'length': read_config(run, 'block_size')['block_size'], 'step': step, 'crossed': crossed})
    color = COLORS[model_name(read_config(pairs[0][1]))]
    known = [f for f in found if f['step'] and f['step'] > 0]
    for f in known:
        axes.plot(f['length'], f['step'], 'o', color=color, markerfacecolor=color if f['crossed'] else 'none')
    if len(known) > 2:  # two points are on any exponential
        slope, intercept = np.polyfit([f['length'] for f in known], [np.log(f['step']) for f in known], 1)
        x = np.linspace(min(f['length'] for f in known), max(f['length'] for f in known), 50)
        axes.plot(x, np.exp(intercept + slope * x), '--', color=color,
                  label=f'{np.exp(intercept):.3g} exp({slope:.3g} T)')
        axes.legend(framealpha=1, fontsize=8)
    if missing := [str(f['length']) for f in found if f not in known]:
        axes.set_title(f'no sign of crossing: {", ".join(missing)}', fontsize=8)
    axes.set_xlabel('sequence length T (tokens); hollow: predicted')
    axes.set_ylabel('step at which it is overtaken')
    axes.grid(alpha=0.3)
    return found


def draw_relative(args):
    figure, axes = pyplot().subplots(figsize=(6.4, 4), layout='constrained')
    curves = relative_axes(axes, args.runs[0], args.runs[1:], args.window)
    steps = np.unique(np.concatenate([steps for steps, _ in curves.values()]))
    marks = [int(steps[round(f * (len(steps) - 1))]) for f in (0.1, 0.25, 0.5, 0.75, 1.0)]
    print(f'Training loss minus that of {args.runs[0]}, mean of {args.window} steps\n')
    print('| run | ' + ' | '.join(f'step {mark}' for mark in marks) + ' |')
    print('|---|' + '---:|' * len(marks))
    for run, (steps, values) in curves.items():
        cells = [f'{values[np.searchsorted(steps, mark, side="right") - 1]:+.4f}' if steps[0] <= mark <= steps[-1]
                 else '' for mark in marks]
        print(f'| {run} | ' + ' | '.join(cells) + ' |')
    return figure


def draw_bars(args):
    figure, axes = pyplot().subplots(figsize=(6.4, 1 + 0.4 * len(args.runs)), layout='constrained')
    for run, d in bars_axes(axes, args.runs[0], args.runs[1:], args.window).items():
        print(f'{run}: {d["mean"]:+.4f} ± {d["standard_error"]:.4f}')
    return figure


def draw_scaling(args):
    figure, axes = pyplot().subplots(figsize=(5, 4), layout='constrained')
    for name, f in scaling_axes(axes, args.runs, args.window).items():
        saved = {key: f'{f[key]:.1%}' for key in ('parameters_saved', 'tokens_saved') if f.get(key) is not None}
        print(f'{name}: ' + ', '.join(f'{n:,} parameters {loss:.4f}' for n, loss in zip(
            f['parameters'], f['loss'], strict=True)), *(f'{key}: {value}' for key, value in saved.items()),
              *([f'no saving can be read: {f["why"]}'] if f.get('why') else []), sep=', ')
    return figure


def draw_critical(args):
    if len(args.runs) % 2:
        raise ValueError('critical takes pairs: BASELINE RUN BASELINE RUN ...')
    figure, axes = pyplot().subplots(figsize=(5, 4), layout='constrained')
    for f in critical_axes(axes, list(zip(args.runs[::2], args.runs[1::2], strict=True)), args.window):
        print(f'{f["length"]} tokens: ' + ('no crossing' if f['step'] is None else f'step {f["step"]:.0f}'
                                           + ('' if f['crossed'] else ' (predicted)')))
    return figure


def styles(configs):
    """{run: color and dashes} of {run: config}: a model has its color, runs of one model differ in their dashes, and
    after four of them in their strength."""
    used, found = {}, {}
    for run, config in configs.items():
        color = COLORS[model_name(config)]
        used[color] = used.get(color, -1) + 1
        found[run] = {'color': color, 'linestyle': ('-', '--', ':', '-.')[used[color] % 4],
                      'alpha': 1 / (1 + used[color] // 4)}
    return found


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise OSError('plotting needs matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')
    matplotlib.rcParams['axes.formatter.min_exponent'] = 2  # a log axis says 2.5, not 2.5 x 10^0
    import matplotlib.pyplot
    return matplotlib.pyplot


def save(figure, out):
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    print(f'\nwrote {out}')


FIGURES = {  # name: (what it draws, help)
    'relative': (draw_relative, 'smoothed training loss of each run minus that of the first (Fig. 5)'),
    'bars': (draw_bars, 'the same over the last steps, as bars (ablations)'),
    'scaling': (draw_scaling, 'loss against parameters, fitted power laws, savings at equal loss (Figs. 1, 5)'),
    'critical': (draw_critical, 'step at which it is overtaken, against sequence length: BASELINE RUN ... (Fig. 11)')}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures = parser.add_subparsers(required=True, metavar='|'.join(FIGURES))
    for name, (draw, text) in FIGURES.items():
        one = figures.add_parser(name, help=text)
        one.add_argument('runs', nargs='+', metavar='OUT_DIR', help='the baseline, then the runs to compare with it')
        one.add_argument('--window', type=int, default=10, help='steps in the running mean (the paper: 10, 50 or 100)')
        one.add_argument('--out', default=f'{name}.png', help='the picture; the ending chooses PNG or PDF')
        one.set_defaults(draw=draw, name=name)
    args = parser.parse_args()
    if len(args.runs) < 2:
        parser.error(f'{args.name} needs a baseline and at least one other run')
    if args.window < 1:
        parser.error('--window must be at least 1')
    with one_line_errors(ValueError, OSError):
        save(args.draw(args), args.out)


if __name__ == '__main__':
    main()
