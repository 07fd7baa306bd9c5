"""
Figures from the logs of runs.

$ python plot.py relative out/demo/vanilla out/demo/resformer out/demo/svformer --window=10 --out=out/demo/relative.png
"""
import argparse
import json
from pathlib import Path

import numpy as np

from configurator import one_line_errors

# Okabe and Ito's colors, which color-blind readers can tell apart; a model has the same one in every figure.
COLORS = {'Transformer': '#000000', 'ResFormer': '#D55E00', 'SVFormer': '#0072B2', 'NeuTRENO': '#009E73',
          'DenseFormer': '#CC79A7', 'CLA': '#56B4E9', 'GQA': '#E69F00', 'other': '#888888'}


def read_log(run):
    """The training loss of a run, {step: loss}."""
    path = Path(run, 'log.jsonl')
    losses = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError:
            raise ValueError(f'{path}, line {number}: not JSON') from None
        if entry.get('loss') is not None:
            losses[entry['step']] = entry['loss']
    if not losses:
        raise ValueError(f'{path} holds no training loss yet')
    return losses


def read_config(run):
    path = Path(run, 'config.json')
    return json.loads(path.read_text()) if path.exists() else {}


def model_name(config):
    """The paper's name for a run's architecture, from its config."""
    for name, there in (('CLA', config.get('share_k') and config.get('share_v')), ('SVFormer', config.get('share_v')),
                        ('NeuTRENO', config.get('neutreno')), ('ResFormer', config.get('v_residual')),
                        ('DenseFormer', config.get('denseformer')), ('GQA', config.get('n_kv_head'))):
        if there:
            return name
    plain = not any(v for k, v in config.items() if k.startswith(('share_', 'q_residual', 'k_residual')))
    return 'Transformer' if plain else 'other'


def relative(baseline, runs, window):
    """{run: (steps, loss - baseline's loss)} over the steps both have, each a mean over `window` points."""
    base = read_log(baseline)
    curves = {}
    for run in runs:
        losses = read_log(run)
        steps = np.array(sorted(losses.keys() & base.keys()))
        if len(steps) < window:
            raise ValueError(f'{run} and {baseline} have {len(steps)} steps in common, fewer than --window={window}')
        difference = np.array([losses[s] - base[s] for s in steps])
        # The mean of window points belongs to their last step: a point never tells of steps still to come.
        curves[run] = steps[window - 1:], np.convolve(difference, np.ones(window) / window, mode='valid')
    return curves


def draw_relative(args):
    curves = relative(args.runs[0], args.runs[1:], args.window)
    steps = next(iter(curves.values()))[0]
    marks = [int(steps[round(f * (len(steps) - 1))]) for f in (0.1, 0.25, 0.5, 0.75, 1.0)]
    print(f'Training loss minus that of {args.runs[0]}, mean of {args.window} steps\n')
    print('| run | ' + ' | '.join(f'step {mark}' for mark in marks) + ' |')
    print('|---|' + '---:|' * len(marks))
    for run, (steps, values) in curves.items():
        at = [values[np.searchsorted(steps, mark, side='right') - 1] for mark in marks]
        print(f'| {run} | ' + ' | '.join(f'{value:+.4f}' for value in at) + ' |')

    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 4), layout='constrained')
    axes.axhline(0, color=COLORS[model_name(read_config(args.runs[0]))], linewidth=1, label=Path(args.runs[0]).name)
    style = styles({run: read_config(run) for run in args.runs})
    for run, (steps, values) in curves.items():
        axes.plot(steps, values, label=Path(run).name, **style[run])
    axes.set_xlabel('step')
    axes.set_ylabel(f'training loss relative to {Path(args.runs[0]).name} (nats)')
    # The first steps, where all losses fall by nats, would squeeze the rest: the axis shows all but 5% of the points.
    shown = np.concatenate([values for _, values in curves.values()])
    low, high = min(0, np.quantile(shown, 0.025)), max(0, np.quantile(shown, 0.975))
    axes.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    save(figure, args.out)


def styles(configs):
    """{run: color and dashes} of {run: config}: a model has its color, runs of one model differ in their dashes."""
    used, found = {}, {}
    for run, config in configs.items():
        color = COLORS[model_name(config)]
        used[color] = used.get(color, -1) + 1
        found[run] = {'color': color, 'linestyle': ('-', '--', ':', '-.')[used[color] % 4]}
    return found


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise OSError('plotting needs matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')
    import matplotlib.pyplot
    return matplotlib.pyplot


def save(figure, out):
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    print(f'\nwrote {out}')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures = parser.add_subparsers(required=True, metavar='relative')
    one = figures.add_parser('relative', help='smoothed training loss of each run minus that of the first (Fig. 5)')
    one.add_argument('runs', nargs='+', metavar='OUT_DIR', help='the baseline, then the runs to compare with it')
    one.add_argument('--window', type=int, default=10, help='points in the running mean (the paper: 10 or 100)')
    one.add_argument('--out', default='relative.png', help='the picture; the ending chooses PNG or PDF')
    one.set_defaults(draw=draw_relative)
    args = parser.parse_args()
    if len(args.runs) < 2:
        parser.error('relative needs a baseline and at least one other run')
    if args.window < 1:
        parser.error('--window must be at least 1')
    with one_line_errors(ValueError, OSError):
        args.draw(args)


if __name__ == '__main__':
    main()
