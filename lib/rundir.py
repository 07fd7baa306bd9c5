"""
A run's folder: what train.py writes there and resumes from.

ckpt_<step>.pt   checkpoints
failed.txt       why training was given up, if it was; compare.py writes other reasons there
log.jsonl        one JSON object per line: training steps, evaluations; where the run was resumed, the
                 changed settings and the provenance, before and after
config.json      settings, GPTConfig, origin (scratch, or whose weights came first) and provenance

For use, lib/trained.py loads a run's model with its tokenizer; comparison/runs.py reads its log.
"""

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from lib.files import as_json, first_line, locked, whole_file
from lib.logs import read_log
from model import SHAPE, GPTConfig

# Fields that, with the shape, a checkpoint's weights cannot be used without: with other values of
# these, even its embeddings and projections would mean something else.
BASE = ('arch', 'n_kv_head', 'rope_theta', 'rope_scaling', 'norm_eps', 'tie_embeddings')

ROOT = Path(__file__).parents[1]

# --- the folder ----------------------------------------------------------------------------------


@contextlib.contextmanager
def locked_run(folder):
    """Hold a run's folder, which is made if it is missing. Raises OSError if another process holds it.

    Nothing in it may be read before: the other process may be about to write its last checkpoint.
    A folder that was made and is still empty at the end is removed.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise OSError(f'out_dir={folder} is a file, or a link that leads nowhere') from None
    with locked(folder, 'training in'):
        try:
            yield
        finally:
            for path in made:
                with contextlib.suppress(OSError):  # it is not empty
                    path.rmdir()


def failure_file(folder):
    return folder / 'failed.txt'


def check_unused(folder, run, first_save):
    """ValueError where a new run would write over results, whatever else its folder lacks.

    A run that died in its first step, perhaps for lack of memory, left none, nor did the same run when
    it died before its first checkpoint. run: {name: value} of all in its config.json that decides its
    numbers. first_save: the step of its first checkpoint.
    """
    advice = 'choose another --out_dir, or delete it'
    if checkpoints(folder):
        raise ValueError(
            f'{folder} already holds a run; continue it with --init_from=resume, {advice}'
        )
    path, log = folder / 'config.json', folder / 'log.jsonl'
    entries = read_log(log)
    lines = log.read_bytes().splitlines() if log.exists() else []
    took_no_step = len(lines) == sum('val' in entry for entry in entries)
    if took_no_step and (log.exists() or not path.exists()):
        return
    theirs = {}
    with contextlib.suppress(ValueError, TypeError, OSError):
        theirs = dict(json.loads(path.read_text()))
    for name, value in as_json(run).items():
        if theirs.get(name) != value:
            raise ValueError(
                f'{folder} holds the config.json or the log.jsonl of something else, with '
                f'{name}={theirs.get(name)!r}, not {value!r}; {advice}'
            )
    if any(entry['step'] >= first_save for entry in entries):
        raise ValueError(
            f'{folder} holds the log of a run whose checkpoints are gone, and which would begin again; '
            f'{advice}'
        )


# --- checkpoints ---------------------------------------------------------------------------------


def checkpoints(folder):
    """The checkpoints of a run, the highest step first."""
    paths = [path for path in Path(folder).glob('ckpt*.pt') if step_of(path) is not None]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path):
    """The step of a checkpoint, which its name says; None for another file."""
    name = re.fullmatch(r'ckpt_(\d+)\.pt', path.name)
    return int(name[1]) if name else None


def no_checkpoint(path):
    return f'{path} has no checkpoint: nothing to resume or load (hub.convert imports a Hugging Face folder)'


def save_checkpoint(folder, checkpoint):
    """Write ckpt_<step>.pt whole or not at all. Raises OSError if it cannot be written."""
    path = folder / f'ckpt_{checkpoint["step"]}.pt'
    try:
        for left in folder.glob('ckpt_*.tmp'):  # by a killed process
            left.unlink()
        with whole_file(path) as file:
            torch.save(checkpoint, file)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise OSError(f'cannot write {path}: {first_line(reason)}') from error


def prune_checkpoints(folder, settings):
    """Delete a run's checkpoints but for the newest keep_checkpoints, those of save_steps, and the one
    with the lowest validation loss in its log."""
    entries = read_log(folder / 'log.jsonl')
    losses = {entry['step']: entry['val']['mean'] for entry in entries if 'val' in entry}
    paths = checkpoints(folder)
    evaluated = [step for step in map(step_of, paths) if losses.get(step) is not None]
    best = min(evaluated, key=losses.get, default=None)
    for path in paths[settings.keep_checkpoints :]:
        if step_of(path) not in (*settings.save_steps, best):
            path.unlink()


def load_checkpoint(path, warn=print):
    """A checkpoint's dict, with the file that it is from under 'path' and, under 'damaged', the newer
    files that are damaged.

    path: a checkpoint file, or a run's folder, of which the newest whole checkpoint is loaded.
    Raises FileNotFoundError or ValueError where there is none, and OSError where the newest one
    cannot be read.
    """
    path = Path(path)
    candidates = checkpoints(path) if path.is_dir() else [path]
    if not candidates or not path.exists():
        raise FileNotFoundError(no_checkpoint(path))

    damaged = {}
    for candidate in candidates:
        try:
            checkpoint = read_checkpoint(candidate)
        except FileNotFoundError:
            damaged[candidate] = f'{candidate} is a link that leads nowhere'
            continue
        except (OSError, MemoryError):
            # The file may be whole: no permission, a network disk that fails, too little memory.
            raise
        except Exception as error:  # zip, pickle and torch each raise their own
            # torch's own advice, to trust the file, is bad advice.
            damaged[candidate] = (
                f'{candidate} is not a checkpoint of train.py, or damaged ({type(error).__name__})'
            )
            continue
        if step_of(candidate) not in (None, checkpoint['step']):
            raise ValueError(
                f'{candidate} holds step {checkpoint["step"]}; name it ckpt_{checkpoint["step"]}.pt, or '
                'delete it'
            )
        weights = checkpoint.get('model')
        if isinstance(weights, dict) and any('.attn.c_attn.' in str(name) for name in weights):
            raise ValueError(
                f'{candidate} has the weights of an older model.py, whose q, k and v are one matrix; '
                'commit 01bd433 reads it'
            )
        for message in damaged.values():
            warn(f'warning: {message}; going on from {candidate}, step {checkpoint["step"]}')
        return {**checkpoint, 'path': candidate, 'damaged': list(damaged)}
    raise ValueError(damaged[candidates[0]])


def read_checkpoint(path):
    """The dict in a checkpoint file. A damaged or foreign file may raise any exception."""
    # torch.load does not look at the checksums.
    if zipfile.ZipFile(path).testzip():
        raise ValueError
    # weights_only: a file from a stranger must not run code.
    checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    if type(checkpoint['step']) is not int or checkpoint['step'] < 0:
        raise ValueError
    return checkpoint


@contextlib.contextmanager
def name_misfits(path):
    """Turn any error from a checkpoint that does not fit into a ValueError that names its file."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError that is not the checkpoint's fault
        raise
    except (LookupError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
        raise ValueError(f'{path} does not fit: {reason}') from error


# --- from a checkpoint into a run ----------------------------------------------------------------


def config_differences(checkpoint, config):
    """{field of GPTConfig: (a checkpoint's value, another one's)}, where they differ."""
    theirs = spelled_out(build_config(checkpoint['model_config'], checkpoint['path']))
    ours = spelled_out(config)
    return {name: (value, ours[name]) for name, value in theirs.items() if value != ours[name]}


def spelled_out(config):
    """{field: value}, where 0 does not stand for what follows from other fields."""
    return {**asdict(config), 'n_inner': config.ffn_width, 'n_kv_head': config.kv_heads}


def check_tokenizer(user, sha256, other_sha256, owner):
    """ValueError where `user`, trained with one tokenizer, meets another, that of `owner`."""
    if sha256 != other_sha256:
        raise ValueError(f'{user} was trained with another tokenizer than {owner}')


def compare_tokenizers(checkpoint, dataset):
    """ValueError where a checkpoint was trained with another tokenizer than a dataset's."""
    ours, theirs = checkpoint['data']['tokenizer'], dataset.meta['tokenizer']
    owner = f'that of {dataset.folder}'
    check_tokenizer(checkpoint['path'], ours['sha256'], theirs['sha256'], owner)


def compare_data(checkpoint, dataset, advice=''):
    """ValueError where a checkpoint was trained on other token files than a dataset's."""
    if checkpoint['data']['sha256'] != dataset.hashes():
        raise ValueError(
            f'{checkpoint["path"]} was trained on other data than {dataset.folder} now holds{advice}'
        )


def load_weights(model, checkpoint):
    """Take over a checkpoint's weights; mixing weights that it lacks keep their initial values.

    Raises ValueError if they do not fit, or if they would mean something else in this model, which
    the shapes of the tensors alone do not show.
    """
    path = checkpoint['path']
    # block_size only limits positions; wpe, where there is one, has a shape.
    needed = config_differences(checkpoint, model.config).keys() & {*SHAPE, *BASE} - {'block_size'}
    # Where they are not given, these follow from the width and the heads.
    for name, follows in (('n_embd', 'n_inner'), ('n_head', 'n_kv_head')):
        if name in needed:
            needed.add(follows)
    theirs = spelled_out(build_config(checkpoint['model_config'], path))
    flags = [f'--{name}={value}' for name, value in theirs.items() if name in needed]
    if flags:
        raise ValueError(f'{path} does not fit this model; its weights need {" ".join(flags)}')

    missing, unexpected = model.load_state_dict(checkpoint['model'], strict=False)
    wrong = unexpected + [name for name in missing if not model.needs[name].optional]
    if wrong:
        names = textwrap.shorten(', '.join(wrong), 200, placeholder=' ...')
        raise ValueError(
            f'{path} does not fit this model: {names} (a weight may be missing where model.py makes it '
            'with optional=True)'
        )


def optimizer_state(model, optimizers):
    """{parameter's name: its state in its optimizer}"""
    named = owners(model, optimizers)
    return {name: owner.state[p] for name, (p, owner) in named.items() if p in owner.state}


def owners(model, optimizers):
    """{parameter's name: (the parameter, its optimizer)}"""
    by_parameter = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            by_parameter |= dict.fromkeys(group['params'], optimizer)
    return {name: (p, by_parameter[p]) for name, p in model.named_parameters()}


def load_state(model, optimizers, scaler, checkpoint):
    """The optimizers' moments and the loss scale.

    weight_decay and the betas stay those of the settings, which may have changed.
    """
    named = owners(model, optimizers)
    for name, state in checkpoint['optimizer']['state'].items():
        p, owner = named[name]
        shapes = {'step': (), 'exp_avg': p.shape, 'exp_avg_sq': p.shape}
        if isinstance(owner, torch.optim.Muon):
            shapes = {'momentum_buffer': p.shape}
        # Without this check, AdamW would write past the end of moments that are too small.
        if shapes != {kind: tensor.shape for kind, tensor in state.items()}:
            raise ValueError(
                f'{checkpoint["path"]} has optimizer moments that do not match its weights'
            )
        # Copies: the checkpoint's own are its file's, which would stay on the disk when it is deleted.
        owner.state[p] = {kind: tensor.to(p, copy=True) for kind, tensor in state.items()}
    if checkpoint['scaler']:  # empty where the run was not in float16
        scaler.load_state_dict(checkpoint['scaler'])


# --- provenance ---------------------------------------------------------------------------------


def build_config(fields, path):
    """The GPTConfig of these fields. ValueError names `path`, where they are from."""
    try:
        return GPTConfig.saved(fields)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from error


# What a config.json holds beside the settings of a run: provenance(), and what training found out.
FACTS = frozenset(
    'commit code started ended device cpu threads load dtype world_size torch cudnn numpy python '
    'attention_kernel origin data '
    'date'.split()  # of older runs, in place of started
)


def provenance(machine):
    """What produced a run: commit, code, versions, hardware, and how busy it was."""
    versions = {'torch': str(torch.__version__)}
    if machine.kind == 'cuda':
        versions['cudnn'] = torch.backends.cudnn.version()
    return {
        'commit': commit_of('describe', '--always', '--dirty'),
        'code': code_fingerprint(),
        'started': now(),
        'device': machine.name(),
        'cpu': cpu_name(),
        'threads': torch.get_num_threads(),
        'load': round(os.getloadavg()[0], 2),
        'dtype': machine.dtype,
        'world_size': machine.world_size,
        **versions,
        'numpy': np.__version__,
        'python': sys.version.split()[0],
    }


def now():
    """The time to the second, with its offset from UTC."""
    return datetime.datetime.now().astimezone().isoformat(' ', 'seconds')


def commit_of(*words):
    """What git says. A copy without .git, as on a borrowed machine, takes it from the environment."""
    return git(*words).strip() or os.environ.get('COMMIT') or 'unknown'


def git(*words):
    """What git prints about this code; '' where there is no git, or no repository."""
    with contextlib.suppress(OSError):
        return subprocess.run(['git', *words], cwd=ROOT, capture_output=True, text=True).stdout
    return ''


def code_fingerprint():
    """What the code of a training is, as 12 hex digits: the text of all Python files but the tests.

    So an edit changes it, whether or not it is committed, and a commit of pages or tests does not.
    """
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob('*.py'), *ROOT.glob('*/*.py')]):
        if path.parent.name != 'tests':
            digest.update(f'{path.relative_to(ROOT).as_posix()}\n'.encode())
            digest.update(path.read_bytes() + b'\0')
    return digest.hexdigest()[:12]


def cpu_name():
    """The processor's model and number of cores."""
    name = platform.machine()
    with contextlib.suppress(OSError):  # Linux only
        models = re.findall(r'^model name\s*: (.*)$', Path('/proc/cpuinfo').read_text(), re.M)
        if models:
            name = models[0]
    return f'{name}, {os.cpu_count()} cores'
