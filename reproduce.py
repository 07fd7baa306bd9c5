"""
The paper's tables and figures: trains what is missing, analyses, draws, and compares with the paper.

$ python reproduce.py --list                           # what there is, what it needs, how long it takes
$ python reproduce.py fig6 --scale=tiny                # one of them; all: every one
$ python reproduce.py all --scale=tiny --jobs=2        # two trainings at a time
$ python reproduce.py fig6 --scale=paper               # as torchrun on this machine's GPUs (--gpus=8)
$ python reproduce.py claims                           # config/claims.py: six models, three seeds, with error bars

A run is kept in out/<scale>/<name>, finished ones are reused and unfinished ones go on. Results: results/<scale>/.
After SIGTERM or Ctrl-C the runs are saved, and the same command goes on.
"""
import concurrent.futures
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch

import analyze
import evaluate
import plot
from configurator import configure, one_line_errors, read_config
from model import GPT, GPTConfig
from train import INTERRUPTED, Machine, TrainConfig, provenance

HERE = Path(__file__).parent
SHAPE = ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_inner')  # not part of a variant
FREE = set('out_dir init_from device dtype compile backend activation_checkpointing verify_data eval_interval '
           'eval_only keep_checkpoints save_steps max_skipped eval_tasks eval_data_dir wandb_log wandb_project '
           'wandb_run_name'.split())  # a run may have them otherwise and still be the same


@dataclass
class Scale:
    """How the paper's experiments are scaled; `settings` is what every run of a scale has."""
    tokens: int  # a step
    seconds: float  # a run on two cores, roughly; 0: not for two cores
    settings: dict
    sizes: dict  # the paper's size -> shape
    lengths: tuple  # Fig. 11's sequence lengths
    length: int  # of all other runs
    rates: tuple  # Fig. 12a
    warmups: tuple  # Fig. 12b
    window: int  # steps whose mean is a run's last loss
    sequences: int  # of an analysis


def shapes(*rows):
    return {size: dict(zip(('n_layer', 'n_head', 'n_embd'), row, strict=True))
            for size, row in zip(('2m', '82m', '180m', '468m'), rows, strict=True)}


SCALES = {
    # Tables 3 and 4; TrainConfig's defaults are the rest
    'paper': Scale(1024 * 2048, 0, dict(dataset='slimpajama', gradient_accumulation_steps=32), shapes(
        (4, 2, 16), (8, 8, 512), (12, 12, 768), (24, 16, 1024)), (512, 2048, 8192, 32000, 64000), 2048,
        (6e-4, 3e-4, 1e-4), (120, 1200), 50, 1000),
    # 16,384 tokens a step, 1,000 steps = 16M bytes: hours on a CPU, minutes on a GPU
    'small': Scale(16384, 2000, dict(
        dataset='stdlib', vocab_size=320, max_iters=1000, warmup_iters=20, learning_rate=2e-3, min_lr=2e-4,
        eval_interval=500, eval_iters=8, gradient_accumulation_steps=1), shapes(
        (4, 4, 64), (8, 8, 128), (12, 8, 192), (16, 8, 256)), (128, 256, 512, 1024, 2048), 512,
        (2e-3, 1e-3, 3.3e-4), (20, 200), 50, 200),
    # 4,096 tokens a step, 120 steps = 0.5M bytes: 20 to 60 seconds on two cores
    'tiny': Scale(4096, 40, dict(
        dataset='stdlib', vocab_size=320, max_iters=120, warmup_iters=10, learning_rate=3e-3, min_lr=3e-4,
        eval_interval=120, eval_iters=4, gradient_accumulation_steps=1, compile=False), shapes(
        (4, 8, 32), (8, 8, 64), (10, 8, 80), (12, 8, 96)), (64, 128, 256, 512, 1024), 256,
        (3e-3, 1.5e-3, 5e-4), (10, 60), 20, 50),
    # The README's figure, on a CPU
    'claims': Scale(4096, 360, {name: value for name, value in read_config(str(HERE / 'config/claims.py')).items()
                                if name not in ('out_dir', 'seed')}, {'82m': {}}, (), 256, (), (), 50, 0)}


@dataclass(frozen=True)
class Run:
    model: str = 'vanilla'  # config/NAME_82m.py's wiring, and more flags: vanilla+q_residual=True
    size: str = '82m'
    length: int = 0  # index into the scale's lengths, plus one; 0: the usual length
    rate: int = 0  # index into the scale's rates
    warmup: int = 0  # index into the scale's warmups
    seed: int = 0  # 0: the usual one

    def name(self, scale):
        parts = [self.model.replace('=True', ''), *([self.size] if self.size != '82m' else [])]
        usual = not self.length or scale.lengths[self.length - 1] == scale.length  # one run, one name
        parts += [] if usual else [f'T{scale.lengths[self.length - 1]}']
        parts += [f'lr{scale.rates[self.rate]:g}'] if self.rate else []
        parts += [f'warmup{scale.warmups[self.warmup]}'] if self.warmup else []
        return '_'.join(parts + ([str(self.seed)] if self.seed else []))

    def settings(self, scale_name):
        """{name: value} of train.py's settings."""
        scale = SCALES[scale_name]
        model, *flags = self.model.split('+')
        wiring = {f.name for f in fields(GPTConfig)} - set(SHAPE)
        file = HERE / 'config' / ('gpt2_78m.py' if model == 'gpt2' else f'{model}_82m.py')
        values = {**scale.settings, **scale.sizes[self.size],
                  **{key: value for key, value in read_config(str(file)).items() if key in wiring}}
        length = scale.lengths[self.length - 1] if self.length else scale.length
        steps = scale.settings['gradient_accumulation_steps']
        values |= dict(block_size=length, batch_size=scale.tokens // length // steps)
        if self.rate:
            values |= dict(learning_rate=scale.rates[self.rate], min_lr=scale.rates[self.rate] / 10)
        if self.seed:
            values['seed'] = self.seed
        if self.warmup:
            values['warmup_iters'] = scale.warmups[self.warmup]
        return values | {key: value for key, _, value in (flag.partition('=') for flag in flags)}


def runs(*models, **more):
    return [Run(model, **more) for model in models]


V, R, S = 'vanilla', 'resformer', 'svformer'
SIZES = [Run(model, size) for size in ('2m', '82m', '180m', '468m') for model in (V, R)]


@dataclass
class Figure:
    """`panels`: [(how, runs)], the first run of a panel is its baseline. `expect`: pairs (a, b), a's loss (or what the
    analysis says of its deeper half) is below b's in the paper."""
    title: str
    panels: list
    expect: list = ()


FIGURES = {
    'table1': Figure('Zero-shot tasks', [('tasks', runs(V, R))], [(V, R)]),  # accuracy, not loss
    'table5': Figure('Validation loss, mean of the domains', [('loss', SIZES)]),
    'fig1': Figure('Scaling, and entropy of token importance', [('scaling', SIZES), (
        'entropy', runs(V, R, 'neutreno', 'denseformer', S))], [(V, R)]),
    'fig3': Figure('Cross-layer attention and its approximations', [('mapping', runs(V))]),
    'fig4': Figure('Sharing keys or values every two layers', [(how, runs(
        V, 'vanilla+share_k=True+share_k_every=2', 'svformer+share_v_every=2')) for how in ('relative', 'bars')],
        [(V, 'svformer+share_v_every=2')]),
    'fig5': Figure('ResFormer against the others, and its scaling', [
        ('relative', runs(V, R, 'neutreno', 'neutreno_resformer', 'denseformer')), ('scaling', SIZES)],
        [(R, V), (R, 'neutreno'), ('denseformer', V), ('neutreno', V)]),
    'fig6': Figure('Residual on queries, keys or values', [(how, runs(
        V, 'vanilla+q_residual=True', 'vanilla+k_residual=True', R)) for how in ('relative', 'bars')],
        [(R, V), (R, 'vanilla+q_residual=True'), (R, 'vanilla+k_residual=True')]),
    'fig7': Figure('How the source values are mapped', [(how, runs(
        V, R, 'resformer+residual_map=identity', 'resformer+residual_map=identity+residual_from=all',
        'resformer+residual_map=cross')) for how in ('relative', 'bars')],
        [(R, 'resformer+residual_map=identity'), (R, V)]),
    'fig8': Figure('Which layers are the source', [(how, runs(
        V, R, 'resformer+residual_from=previous', 'resformer+residual_from=all')) for how in ('relative', 'bars')],
        [(R, 'resformer+residual_from=previous'), (R, V)]),
    'fig9': Figure("Spectra of the values", [('spectrum', runs(V, R))]),
    'fig10': Figure('Less KV cache: half, and an eighth', [
        ('bars', runs(V, 'gqa', 'cla', S)), ('bars', runs(V, 'mqa', 'cla_gqa', 'svformer_gqa'))],
        [(V, 'cla'), (V, 'mqa'), ('svformer_gqa', 'cla_gqa')]),
    'fig11': Figure('Sequence length', [
        ('critical', [Run(model, length=i) for i in range(1, 6) for model in (V, S)]),
        *(('relative', [Run(V, length=i), Run(S, length=i)]) for i in (1, 5))]),
    'fig12a': Figure('Learning rate', [('relative', [Run(V, rate=i), Run(S, rate=i)]) for i in range(3)]),
    'fig12b': Figure('Warm-up', [('relative', [Run(V, warmup=i), Run(S, warmup=i)]) for i in range(2)]),
    'fig12c': Figure('Size', [('relative', [Run(V, size), Run(S, size)]) for size in ('2m', '82m', '180m', '468m')]),
    'fig12d': Figure("GPT-2's architecture", [('relative', runs('gpt2', 'gpt2+v_residual=True', 'gpt2+share_v=True'))],
                     [('gpt2+v_residual=True', 'gpt2')]),
    'fig13': Figure('Sharing all of the first queries, keys or values', [(how, runs(
        V, 'vanilla+share_q=True', 'vanilla+share_k=True', S)) for how in ('relative', 'bars')],
        [(S, 'vanilla+share_q=True'), (S, 'vanilla+share_k=True')]),
    'fig14': Figure("SVFormer's anchors", [(how, runs(
        V, S, 'svformer+share_v_every=4', 'svformer+share_v_every=2')) for how in ('relative', 'bars')],
        [('svformer+share_v_every=4', S), ('svformer+share_v_every=2', 'svformer+share_v_every=4')]),
    'fig15': Figure('Similarity of tokens', [('similarity', runs(V, R, S))])}
CLAIMS = Figure('Three seeds on real text', [('seeds', [Run(model, seed=seed) for seed in (1, 2, 3) for model in (
    V, R, S, 'neutreno', 'denseformer', 'learned_resformer')])])


@dataclass
class ReproduceConfig:
    scale: str = 'tiny'  # paper, small or tiny; claims has a scale of its own
    jobs: int = 1  # trainings at a time (not for paper)
    gpus: int = 8  # processes of torchrun, scale=paper
    device: str = 'auto'  # as in train.py
    data_dir: str = ''  # the zero-shot tasks' files, for table1, as in evaluate.py; '': the hub
    tok_per_s: float = 0.0  # --list: training throughput of the 82M model on 8 GPUs, to say how long things take

    def __post_init__(self):
        if self.scale not in ('paper', 'small', 'tiny'):
            raise ValueError(f'scale={self.scale!r} is not one of paper, small, tiny')
        if self.jobs < 1 or self.gpus < 1:
            raise ValueError('jobs and gpus must be at least 1')
        if self.tok_per_s < 0:
            raise ValueError(f'tok_per_s={self.tok_per_s} must not be negative')


def folder(run, settings):
    """Where a run is; for a figure drawn from logs alone, the log kept in results/ will do."""
    out, kept = (Path(top, settings.scale, run.name(SCALES[settings.scale])) for top in ('out', 'results'))
    return kept if settings.scale == 'claims' and (kept / 'log.jsonl').exists() else out


def needed(figure):
    return list(dict.fromkeys(run for _, panel in figure.panels for run in panel))


def configured(run, scale_name):
    """The run's (TrainConfig, GPTConfig)."""
    return configure(TrainConfig, GPTConfig, argv=[f'--{k}={v}' for k, v in run.settings(scale_name).items()])


def as_json(*configs):
    return json.loads(json.dumps({name: value for config in configs for name, value in asdict(config).items()}))


def other(run, settings):
    """How a run's folder holds another run than the one asked for, in a setting that decides its numbers, or ''."""
    path = folder(run, settings)
    if not (log := path / 'log.jsonl').exists() or not log.stat().st_size:
        return ''
    # A setting that a config.json lacks came later, with a default that changed nothing.
    there = as_json(TrainConfig(), GPTConfig()) | plot.read_config(path, 'max_iters')
    return next((f'{path} is a run with {name}={there[name]!r}, not {value!r}'
                 for name, value in as_json(*configured(run, settings.scale)).items()
                 if name not in FREE and there[name] != value), '')


def finished(run, settings):
    """Whether a run has its last evaluation, of the settings that it is to have."""
    try:
        steps = configured(run, settings.scale)[0].max_iters
        return not other(run, settings) and any(
            'val' in entry and entry['step'] == steps for entry in plot.read_entries(folder(run, settings)))
    except (ValueError, OSError):  # no log, or a line cut by a crash
        return False


def train(run, settings, stop):
    """Train or go on; once the event `stop` is set, save and return."""
    out = folder(run, settings)
    command = ['train.py', *(f'--{name}={value}' for name, value in run.settings(settings.scale).items()),
               f'--out_dir={out}', '--init_from=auto', f'--device={settings.device}']
    start, environment = [sys.executable], dict(os.environ)
    if settings.scale == 'paper':
        start = [sys.executable, '-m', 'torch.distributed.run', f'--nproc_per_node={settings.gpus}']
    elif settings.jobs > 1:
        environment.setdefault('OMP_NUM_THREADS', str(max(1, (os.cpu_count() or 1) // settings.jobs)))
    out.mkdir(parents=True, exist_ok=True)
    with open(out / 'train.log', 'a') as log:  # not a pipe, at which a training would die with this process
        child = subprocess.Popen([*start, str(HERE / command[0]), *command[1:]], env=environment, stdout=log,
                                 stderr=subprocess.STDOUT)
        while child.poll() is None:
            if stop.wait(0.1):
                child.terminate()
                child.wait()
                return
    if child.returncode:
        lines = (out / 'train.log').read_text(errors='replace').strip().splitlines()
        raise OSError(f'{shlex.join(command)} failed: {(lines or ["no message"])[-1]}')
    if not finished(run, settings):
        raise OSError(f'{out} has been trained, but its log is damaged; delete it, to train it again')
    print(f'trained {out}', flush=True)


def prepare(settings):
    dataset = SCALES[settings.scale].settings['dataset']
    if not Path('data', dataset, 'meta.json').exists():
        if dataset != 'stdlib':
            raise FileNotFoundError(f'there is no data/{dataset}: see prepare_slimpajama.py')
        subprocess.run([sys.executable, str(HERE / 'prepare_slimpajama.py'), '--source=stdlib', '--tokenizer=bytes',
                        '--tokens=0', '--out=data/stdlib'], check=True, stdout=subprocess.DEVNULL)


# --- panels: each draws on axes (or a figure of its own) and gives the numbers it drew --------------------------------

def draw_panel(how, panel, axes, settings, machine):
    scale, folders = SCALES[settings.scale], [str(folder(run, settings)) for run in panel]
    if how == 'relative':
        curves = plot.relative_axes(axes, folders[0], folders[1:], max(2, scale.window // 2))
        return {run: {'steps': steps.tolist(), 'difference': d.tolist()} for run, (steps, d) in curves.items()}
    if how == 'bars':
        return plot.bars_axes(axes, folders[0], folders[1:], scale.window)
    if how == 'scaling':
        return plot.scaling_axes(axes, folders, scale.window)
    if how == 'critical':
        pairs = list(zip(folders[::2], folders[1::2], strict=True))
        return plot.critical_axes(axes, pairs, max(2, scale.window // 2))
    if how == 'seeds':
        return draw_seeds(panel, axes, settings)
    if how == 'loss':
        numbers, head = {'runs': {}}, ['± s.e. over sequences', 'loss (nats)', 'minus vanilla']
        for pair in zip(folders[::2], folders[1::2], strict=True):  # of one size
            part = evaluate.compare_losses(pair, evaluate.LossConfig(batch_size=32), machine)
            evaluate.print_losses(part)
            numbers = part | {'runs': numbers['runs'] | part['runs']}
        rows = [[Path(run).name, f'{r["mean"]["loss"]:.4f}', evaluate.pm(*r['minus_first']['mean'].values(), '+')
                 if 'minus_first' in r else ''] for run, r in numbers['runs'].items()]
    else:
        numbers, _ = evaluate.evaluate_tasks(folders, evaluate.TasksConfig(
            data_dir=settings.data_dir, limit=0 if settings.scale == 'paper' else 200), machine)
        evaluate.print_tasks(numbers)
        every, head = list(numbers['runs'].values()), ['acc ± s.e. over items', *(Path(run).name for run in folders)]
        for r in every:
            errors = [s['acc_stderr'] for s in r['tasks'].values()]
            r['average_stderr'] = float(np.linalg.norm(errors)) / len(errors)
        rows = [[task, *(evaluate.pm(r['tasks'][task]['acc'], r['tasks'][task]['acc_stderr'], digits=3)
                         for r in every)] for task in every[0]['tasks']]
        rows.append(['average', *(evaluate.pm(r['average'], r['average_stderr'], digits=3) for r in every)])
    axes.axis('off')
    table = axes.table(rows, colLabels=head, loc='center', cellLoc='center')
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.scale(1, 1.8)
    return numbers


def draw_seeds(panel, axes, settings):
    models = {model: [(folder(Run(V, seed=run.seed), settings), folder(run, settings))
                      for run in panel if run.model == model] for model in dict.fromkeys(run.model for run in panel)}
    found = plot.seeds_axes(axes, models, SCALES[settings.scale].window)
    axes.set_xlabel(f'step ({SCALES[settings.scale].tokens:,} tokens each)')
    print('\n| model | seeds | first 10% of steps | last 50 steps | validation loss |\n|---|---:|---:|---:|---:|')
    for model, f in found.items():
        print(f'| {model} | {f["seeds"]} | ' + ' | '.join(evaluate.pm(
            f[k]['mean'], f[k]['standard_error'], '' if k == 'validation_loss' else '+')
            for k in ('early', 'final', 'validation_loss')) + ' |')
    return found


def reproduce(name, settings, machine):
    figure, scale = FIGURES.get(name, CLAIMS), SCALES[settings.scale]
    out = Path('results', settings.scale, name)
    out.parent.mkdir(parents=True, exist_ok=True)
    origin = provenance(machine)
    numbers = {'figure': name, 'title': figure.title, 'scale': settings.scale, **origin, 'panels': []}
    title = f'{name}: {figure.title} ({settings.scale})'
    drawable = [(how, panel) for how, panel in figure.panels if how not in analyze.ANALYSES]
    for how, panel in figure.panels:
        if how in analyze.ANALYSES:
            asked = analyze.AnalyzeConfig(sequences=scale.sequences, length=scale.length, batch_size=10)
            found = analyze.analyze(how, [str(folder(run, settings)) for run in panel], asked, machine)
            plot.save(analyze.draw(found, title), out.with_name(f'{name}.png' if not drawable else f'{name}_{how}.png'))
            numbers['panels'].append({'how': how, 'numbers': found['runs']})
            print(f"{name}: the paper's panel of other checkpoints is left out; python analyze.py {how} --hf=FOLDER "
                  '--text=FILE draws it')
    if drawable:
        drawing, axes = plot.pyplot().subplots(1, len(drawable), figsize=(5.2 * len(drawable), 4.2), squeeze=False,
                                               layout='constrained')
        for (how, panel), ax in zip(drawable, axes[0], strict=True):
            numbers['panels'].append({'how': how, 'numbers': draw_panel(how, panel, ax, settings, machine)})
        curves = [ax for (how, _), ax in zip(drawable, axes[0], strict=True) if how == 'relative']
        for ax in curves:  # side by side to be compared
            low, high = zip(*(c.get_ylim() for c in curves), strict=True)
            ax.set_ylim(min(low), max(high))
        drawing.suptitle(title, fontsize=10)
        plot.save(drawing, out.with_suffix('.png'))
    numbers['against_the_paper'] = compare(name, figure, numbers, settings)
    path, text = out.with_suffix('.json'), json.dumps(numbers, indent=1)
    old = json.loads(path.read_text()) if path.exists() else {}
    if old | origin != json.loads(text):  # the same numbers keep the commit and date that they came from
        path.write_text(text + '\n')
    for line in numbers['against_the_paper'] or [f'{name}: there is no order of the paper that is checked']:
        print(line)


def compare(name, figure, numbers, settings):
    """One line for each order the paper reports: whether it is found here."""
    by_model, lines = {run.model: str(folder(run, settings)) for run in needed(figure) if run.size == '82m'}, []
    panels, window = {panel['how']: panel['numbers'] for panel in numbers['panels']}, SCALES[settings.scale].window

    def order(what, low, high, difference, error, over):
        error = error or 0.0  # one sequence has none
        verdict = 'undecided' if abs(difference) < 2 * error else 'agrees' if difference < 0 else 'disagrees'
        lines.append(f'{name}: {what}, {Path(low).name} minus {Path(high).name}: {difference:+.4f} ± {error:.4f} over '
                     f'{over} of one seed, not over seeds (below 0 in the paper): {verdict}')

    for low, high in ((by_model[a], by_model[b]) for a, b in figure.expect):
        if 'entropy' in panels:
            a, b = (np.array(list(panels['entropy'][run]['series']['entropy'].values())) for run in (low, high))
            deep = slice(a.shape[1] // 2, None)  # the error is as if layers erred together: not too small
            order('entropy of the deeper half', low, high, (a - b)[0, deep].mean(), np.hypot(a, b)[1, deep].mean(),
                  'sequences')
        elif 'tasks' in panels:
            a, b = (panels['tasks']['runs'][run] for run in (low, high))
            order('average accuracy', low, high, a['average'] - b['average'],
                  np.hypot(a['average_stderr'], b['average_stderr']), 'items')
        else:
            difference, error = plot.final_differences(high, [low], window)[low]
            order(f'loss of the last {window} steps', low, high, difference, error, 'these steps')
    for run, report in panels.get('loss', {'runs': {}})['runs'].items():
        if 'minus_first' in report:
            order('validation loss', run, run.replace(R, V), *report['minus_first']['mean'].values(), 'sequences')
    if saved := panels.get('scaling', {}).get('ResFormer'):
        shares = [saved['parameters_saved'], saved['tokens_saved']]
        verdict = 'undecided' if None in shares else 'agrees' if min(shares) > 0 else 'disagrees'
        parameters, tokens = ('n/a' if value is None else f'{value:.0%}' for value in shares)
        lines.append(f'{name}: at equal loss ResFormer saves {parameters} of the parameters (paper: 13-16%) and '
                     f'{tokens} of the tokens (paper: 15-20%): {verdict}' + bool(saved['why']) * f', {saved["why"]}')
    if found := panels.get('critical'):
        steps = [f['step'] for f in found]
        verdict = 'undecided' if None in steps else 'agrees' if steps == sorted(steps) else 'disagrees'
        lines.append(f'{name}: SVFormer is overtaken at ' + ', '.join(
            f'{f["length"]}: ' + ('no sign of it' if f['step'] is None else f'step {f["step"]:.0f}' + (
                not f['crossed']) * ' (predicted)') for f in found)
            + f' (paper: the later, the longer the sequence): {verdict}')
    return lines


def list_figures(names, settings):
    scale = SCALES[settings.scale]
    print(f'{"":8} {"runs":>5} {"done":>5}  {"8 GPUs, paper":>14}  {f"2 cores, {settings.scale}":>14}  '
          f'{"besides runs":18}  what')
    for name in names:
        every, hows, hours, here = needed(FIGURES[name]), {how for how, _ in FIGURES[name].panels}, 'n/a', 'n/a'
        if settings.tok_per_s:  # a run's time goes with its FLOPs
            tokens = SCALES['paper'].tokens * TrainConfig.max_iters
            hours = f'{sum(flops(run) / flops(Run()) for run in every) * tokens / settings.tok_per_s / 3600:,.0f} h'
        if scale.seconds:
            here = f'~{len(every) * scale.seconds / 60:,.0f} min'
        besides = ('task data' if 'tasks' in hows else
                   'outside weights*' if hows & analyze.ANALYSES.keys() else 'nothing')
        done = sum(finished(run, settings) for run in every)
        print(f'{name:8} {len(every):>5} {done:>5}  {hours:>14}  {here:>14}  {besides:18}  {FIGURES[name].title}')
    print('\n8 GPUs: give --tok_per_s, the throughput of config/vanilla_82m.py there (bench.py measures one).\n'
          '2 cores: an estimate, the runs times the usual seconds of one, finished ones included.\n'
          '* for one panel, which is left out: python analyze.py ... --hf=FOLDER draws it.')


def flops(run):
    """Training FLOPs per token of a run at the paper's scale."""
    _, config = configured(run, 'paper')
    with torch.device('meta'):
        return GPT(config).flops_per_token(config.block_size)


def main():
    with one_line_errors(ValueError, OSError):
        asked = [argument for argument in sys.argv[1:] if not argument.startswith('-')]
        listing = '--list' in sys.argv[1:]
        (settings,) = configure(ReproduceConfig, argv=[a for a in sys.argv[1:] if a.startswith('-') and a != '--list'])
        if not asked and not listing:
            print(__doc__.strip())
            sys.exit(2)
        names = list(FIGURES) if asked == ['all'] else asked
        if names == ['claims'] and not listing:
            if any(argument.startswith('--scale') for argument in sys.argv):
                raise ValueError('claims has a scale of its own: it goes without --scale')
            settings.scale = 'claims'
        elif unknown := [name for name in names if name not in FIGURES]:
            raise ValueError(f'no figure {unknown[0]!r}; there are {", ".join(FIGURES)}, and claims, alone, '
                             'without --list')
        if listing:
            list_figures(names or FIGURES, settings)
            return
        machine = Machine(TrainConfig(device=settings.device, compile=False))
        missing = {folder(run, settings): run for name in names for run in needed(FIGURES.get(name, CLAIMS))
                   if not finished(run, settings)}
        for path, run in missing.items():
            if why := other(run, settings) or f'{path} is not a whole run' * (path.parts[0] == 'results'):
                raise ValueError(f'{why}; move it away, or delete it')
        if missing:
            prepare(settings)
        print(f'{len(missing)} runs to train')
        stop = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1 if settings.scale == 'paper' else settings.jobs) as pool:
            try:
                list(pool.map(lambda run: train(run, settings, stop), missing.values()))
            except BaseException:
                stop.set()
                raise
        failed = []
        for name in names:  # one that fails keeps no other from being drawn
            try:
                reproduce(name, settings, machine)
            except (ValueError, OSError) as error:
                failed.append(f'{name}: {error}')
        if failed:
            raise OSError('not drawn: ' + '; '.join(failed))


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        main()
    except KeyboardInterrupt:
        print('interrupted: what was trained is saved, and the same command goes on', file=sys.stderr)
        sys.exit(INTERRUPTED)
