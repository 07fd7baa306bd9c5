"""
The runs behind the paper's figures, at three scales: their settings, their folders, their training.

A run is kept in out/<scale>/<name>. Finished runs are reused, unfinished ones go on.
"""

import functools
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from comparison import launch
from comparison.plan import read_wiring
from comparison.runs import ROUNDING, facts, read_state
from configurator import configure, read_settings
from data import dataset_folder
from model import GPTConfig
from train import INCIDENTAL, TrainConfig

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / 'config'

# Table 4's sizes, of which config/vanilla_<size>.py says what they are, and the sequence lengths of
# Table 3.
SIZES = ('2m', '82m', '180m', '468m')
VANILLA = read_settings(str(CONFIG / 'vanilla_82m.py'))
OTHER_LENGTHS = [read_settings(str(path))['block_size'] for path in CONFIG.glob('seq_*.py')]
LENGTHS = tuple(sorted([VANILLA['block_size'], *OTHER_LENGTHS]))

# --- scales ---------------------------------------------------------------------------------------


@dataclass
class Scale:
    """How the paper's experiments are scaled."""

    name: str
    tokens: int  # a step
    seconds: float  # a run on two cores, roughly; 0: not for two cores
    settings: dict  # what every run has
    sizes: dict  # {size of the paper: shape}
    lengths: tuple  # in place of LENGTHS, where lengths are compared
    length: int  # of all other runs
    rates: tuple  # learning rates of Fig. 12a, the usual one first
    warmups: tuple  # warm-ups of Fig. 12b, the usual one first
    window: int  # steps whose mean is a run's last loss
    sequences: int  # of an analysis


def shape(size):
    """{field of GPTConfig: value} of one of SIZES, from its config file."""
    settings = read_settings(str(CONFIG / f'vanilla_{size}.py'))
    names = {field.name for field in fields(GPTConfig)}
    return {name: value for name, value in settings.items() if name in names}


def shapes(*rows):
    """{size of the paper: shape}; rows: layers, heads and width, from small to large."""
    names = ('n_layer', 'n_head', 'n_embd')
    return {size: dict(zip(names, row, strict=True)) for size, row in zip(SIZES, rows, strict=True)}


# The values that the paper does not give for Figs. 12a and 12b are ours. Settings that a
# scale does not give are TrainConfig's defaults, which are the paper's.
PAPER = Scale(
    name='paper',
    tokens=VANILLA['gradient_accumulation_steps'] * VANILLA['batch_size'] * VANILLA['block_size'],
    seconds=0,
    settings={name: VANILLA[name] for name in ('dataset', 'gradient_accumulation_steps')},
    sizes={size: shape(size) for size in SIZES},
    lengths=LENGTHS,
    length=VANILLA['block_size'],
    rates=(VANILLA['learning_rate'], 3e-4, 1e-4),
    warmups=(VANILLA['warmup_iters'], 1200),
    window=50,
    sequences=1000,
)

# 16,384 tokens a step, 1,000 steps = 16M bytes: hours on a CPU, minutes on a GPU.
SMALL = Scale(
    name='small',
    tokens=16384,
    seconds=2000,
    settings=dict(
        dataset='stdlib',
        vocab_size=320,
        max_iters=1000,
        warmup_iters=20,
        learning_rate=2e-3,
        min_lr=2e-4,
        eval_interval=500,
        eval_iters=8,
        gradient_accumulation_steps=1,
    ),
    sizes=shapes((4, 4, 64), (8, 8, 128), (12, 8, 192), (16, 8, 256)),
    lengths=(128, 256, 512, 1024, 2048),
    length=512,
    rates=(2e-3, 1e-3, 3.3e-4),
    warmups=(20, 200),
    window=50,
    sequences=200,
)

# 4,096 tokens a step, 120 steps = 0.5M bytes: 20 to 60 seconds on two cores.
TINY = Scale(
    name='tiny',
    tokens=4096,
    seconds=40,
    settings=dict(
        dataset='stdlib',
        vocab_size=320,
        max_iters=120,
        warmup_iters=10,
        learning_rate=3e-3,
        min_lr=3e-4,
        eval_interval=120,
        eval_iters=4,
        gradient_accumulation_steps=1,
        compile=False,
    ),
    sizes=shapes((4, 8, 32), (8, 8, 64), (10, 8, 80), (12, 8, 96)),
    lengths=(64, 128, 256, 512, 1024),
    length=256,
    rates=(3e-3, 1.5e-3, 5e-4),
    warmups=(10, 60),
    window=20,
    sequences=50,
)

SCALES = {scale.name: scale for scale in (PAPER, SMALL, TINY)}

# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    model: str = 'vanilla'  # the wiring of config/<model>_82m.py, and +setting=value of train.py
    size: str = '82m'  # of SIZES
    length: int = 0  # of LENGTHS, where lengths are compared; 0: the usual one
    rate: int = 0  # index into the scale's rates
    warmup: int = 0  # index into the scale's warm-ups

    def name(self, scale):
        """The name of its folder; one run has one name."""
        forms = {'size': '{}', 'length': 'T{}', 'rate': 'lr{:g}', 'warmup': 'warmup{}'}
        parts = [self.model.replace('=True', '')]
        parts += [forms[what].format(value) for what, value in self.unusual(scale).items()]
        return '_'.join(parts)

    def unusual(self, scale):
        """{what: value} of its size, length, rate and warm-up where they are not the usual ones."""
        values = {}
        if self.size != Run.size:
            values['size'] = self.size
        length = self.scaled_length(scale)
        if length != scale.length:
            values['length'] = length
        if self.rate:
            values['rate'] = scale.rates[self.rate]
        if self.warmup:
            values['warmup'] = scale.warmups[self.warmup]
        return values

    def scaled_length(self, scale):
        if not self.length:
            return scale.length
        return scale.lengths[LENGTHS.index(self.length)]

    def settings(self, scale):
        """{name: value} of train.py's settings; those after a + of the model are text."""
        model, *flags = self.model.split('+')
        values = {**scale.settings, **scale.sizes[self.size], **wiring_of(model)}
        length = self.scaled_length(scale)
        micro_steps = values['gradient_accumulation_steps']
        values |= {'block_size': length, 'batch_size': scale.tokens // length // micro_steps}
        if scale is PAPER:
            values |= memory_settings(self.size)
        if self.rate:
            rate = scale.rates[self.rate]
            values |= {'learning_rate': rate, 'min_lr': rate / 10}
        if self.warmup:
            values['warmup_iters'] = scale.warmups[self.warmup]
        return values | dict(flag.split('=', 1) for flag in flags)


@functools.cache
def wiring_of(model):
    """{field of GPTConfig: value} that makes a model, from its config file."""
    return read_wiring(str(config_file(model)))


def config_file(model):
    return CONFIG / ('gpt2_78m.py' if model == 'gpt2' else f'{model}_82m.py')


@functools.cache
def memory_settings(size):
    """{name: value} with which config/vanilla_<size>.py lets the paper's batch fit its GPU."""
    values = read_settings(str(CONFIG / f'vanilla_{size}.py'))
    return {name: values[name] for name in values if name in INCIDENTAL and name != 'out_dir'}


def configs_of(run, scale):
    """The run's (TrainConfig, GPTConfig)."""
    flags = [f'--{name}={value}' for name, value in run.settings(scale).items()]
    return configure(TrainConfig, GPTConfig, argv=flags)


def folder(run, scale):
    return Path('out', scale.name, run.name(scale))


def state_of(run, scale):
    """What the run's folder holds: a comparison.results.State."""
    settings, config = configs_of(run, scale)
    return read_state(folder(run, scale), facts(asdict(settings) | asdict(config)), ROUNDING)


def is_finished(run, scale):
    """Whether its folder holds the last evaluation of a run with these very settings."""
    return state_of(run, scale).kind in ('finished', 'diverged')


def check_own(run, scale):
    """Raise ValueError where its folder holds another run, which must not be overwritten."""
    state = state_of(run, scale)
    if state.kind == 'foreign':
        raise ValueError(f'{state.folder} is {state.detail}; move it away, or delete it')


# --- training -------------------------------------------------------------------------------------


def train(runs, scale, jobs=1, gpus=1, device='auto'):
    """Train runs to their end, `jobs` at a time; at scale paper one at a time on `gpus` GPUs.

    If one fails, the others are still trained, and then OSError is raised. KeyboardInterrupt lets
    every training save itself, and is raised again.
    """
    environment = {}
    if scale is PAPER:
        jobs = 1
    else:
        gpus = 1
    if jobs > 1:
        threads = max(1, launch.cores() // jobs)
        environment['OMP_NUM_THREADS'] = os.environ.get('OMP_NUM_THREADS', str(threads))
    trainings = [job_of(run, scale, device) for run in runs]
    steps = scale.settings.get('max_iters', TrainConfig.max_iters)
    progress = launch.Progress(sys.stdout)

    def show(running):
        ended = sum(job.process is not None for job in trainings) - len(running)
        taken = ended * steps + sum(launch.last_step(job.folder) for job in running)
        progress.show(ended, len(trainings), taken, len(trainings) * steps)

    try:
        launch.launch(lambda: trainings, [environment] * jobs, gpus, show)
    finally:
        progress.close()

    problems = []
    for run in runs:
        state = state_of(run, scale)
        if state.kind not in ('finished', 'diverged'):
            problems.append(f'{state.folder} is {state.kind}: {state.detail}')
    if problems:
        raise OSError(f'{"; ".join(problems)} (each one has its output in train.log)')


def job_of(run, scale, device):
    values = run.settings(scale) | {
        'out_dir': folder(run, scale),
        'init_from': 'auto',
        'device': device,
    }
    arguments = [f'--{name}={value}' for name, value in values.items()]
    return launch.Job(run.name(scale), arguments, folder(run, scale))


def prepare(scale):
    """Prepare the dataset if it is the standard library; any other must exist already.

    Raises OSError if it cannot be prepared, or does not exist.
    """
    dataset = scale.settings['dataset']
    if (dataset_folder(dataset) / 'meta.json').exists():
        return
    if dataset != 'stdlib':
        raise FileNotFoundError(f'there is no data/{dataset}: see prepare_slimpajama.py')
    command = [sys.executable, str(ROOT / 'prepare_slimpajama.py'), '--source=stdlib']
    command += ['--tokenizer=bytes', '--tokens=0', '--out=data/stdlib']
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        raise OSError(
            f'data/{dataset} could not be prepared: prepare_slimpajama.py ended with exit status '
            f'{error.returncode}; what it said stands above'
        ) from error
