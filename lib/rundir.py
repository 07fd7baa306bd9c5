"""
A run's folder: what train.py writes there and resumes from.

ckpt_<step>.pt   checkpoints
log.jsonl        what lib/logs.py says
config.json      settings, GPTConfig, origin (scratch, or whose weights came first) and provenance
failed.txt       why training was given up, if it was; compare.py writes other reasons there

For use, lib/trained.py loads a run's model with its tokenizer; comparison/runs.py reads its log.
"""

import contextlib
import datetime
import functools
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import textwrap
import tokenize
import zipfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from lib.files import (
    first_line,
    locked,
    whole_file,
    write_json,
    write_whole,
)
from lib.logs import Log, read_log
from lib.machine import is_out_of_memory
from model import SHAPE, GPTConfig

ROOT = Path(__file__).parents[1]

# --- the folder ----------------------------------------------------------------------------------


class RunFolder:
    """The folder of a run that is trained. Its first process holds it, and alone writes to it.

    entries: those of its log that stay when the run goes on. log: a Log, as soon as it has begun.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.entries = []
        self.damaged = []
        self.log = None

    @contextlib.contextmanager
    def held(self):
        """Hold the folder, which is made if it is missing. Raises OSError if another process holds it.

        Nothing in it may be read before: the other process may be about to write its last checkpoint.
        A folder that was made and is still empty at the end is removed.
        """
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise OSError(f'out_dir={self.path} is a file, or a link that leads nowhere') from None
        with locked(self.path, 'training in'):
            try:
                yield
            finally:
                for path in made:
                    with contextlib.suppress(OSError):  # it is not empty
                        path.rmdir()

    def newest(self, warn):
        """The newest Checkpoint that is whole. Newer, damaged files get the suffix .damaged as soon as the
        run goes on."""
        checkpoint = load_checkpoint(self.path, warn)
        self.damaged = checkpoint['damaged']
        self.entries = read_log(self.path / 'log.jsonl', checkpoint['step'], warn)
        return checkpoint

    def has_ended(self, step, settings):
        """Whether the run is evaluated at its last step, this one, and config.json has the same max_iters,
        eval_iters and batch_size as these settings."""
        described = {}
        with contextlib.suppress(OSError, ValueError):
            described = json.loads((self.path / 'config.json').read_bytes())
        of_the_end = ('max_iters', 'eval_iters', 'batch_size')
        is_as_described = all(described.get(name) == getattr(settings, name) for name in of_the_end)
        return step == settings.max_iters and is_as_described and self.has_evaluation(step)

    def has_evaluation(self, step):
        return any(is_evaluation(entry, step) for entry in self.entries)

    def forget_resumption(self, step):
        """Forget what a resumption wrote that began at this step and saved no other: its entry, and an
        evaluation."""
        for i, entry in enumerate(self.entries):
            if entry['step'] == step and 'changed' in entry:
                del self.entries[i:]
                return

    def check_unused(self, first_save=None):
        """ValueError where a new run would write over another one.

        first_save: of a command that is given again, where its run saves first. Of a run that died before,
        nothing is lost when it begins again.
        """
        has_log, has_config = ((self.path / name).exists() for name in ('log.jsonl', 'config.json'))
        is_taken = bool(checkpoints(self.path)) or has_log or has_config
        if first_save and has_log:  # a run writes its log before config.json
            entries = read_log(self.path / 'log.jsonl')
            is_taken = any(entry['step'] >= first_save for entry in entries)
        if is_taken:
            raise ValueError(
                f'{self.path} already holds a run, or the log of one whose checkpoints are gone; continue it '
                'with --init_from=resume, choose another --out_dir, or delete it'
            )

    def begin(self):
        """Let the run begin, or go on."""
        for path in self.damaged:
            path.rename(f'{path}.damaged')
        failure_file(self.path).unlink(missing_ok=True)
        self.log = Log(self.path / 'log.jsonl', self.entries)

    def describe(self, facts):
        """Write config.json."""
        write_json(self.path / 'config.json', facts)

    def save(self, parts):
        """Write a checkpoint, and delete those that its settings do not keep."""
        # Log lines first, then the checkpoint: the log then lacks none of the checkpoint's steps.
        self.log.flush()
        save_checkpoint(self.path, parts)
        settings = parts['settings']
        for path in checkpoints(self.path)[settings['keep_checkpoints'] :]:
            if step_of(path) not in settings['save_steps']:
                path.unlink()

    def give_up(self, error):
        write_whole(failure_file(self.path), f'{error}\n')


def is_evaluation(entry, step):
    return 'val' in entry and entry['step'] == step


def failure_file(folder):
    return folder / 'failed.txt'


def checkpoints(folder):
    """The checkpoint files of a run, the highest step first."""
    paths = [path for path in Path(folder).glob('ckpt*.pt') if step_of(path) is not None]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path):
    """The step of a checkpoint, which its name says; None for another file."""
    name = re.fullmatch(r'ckpt_(\d+)\.pt', path.name)
    return int(name[1]) if name else None


# --- checkpoint files ----------------------------------------------------------------------------


def save_checkpoint(folder, parts):
    """Write ckpt_<step>.pt whole or not at all. Raises OSError if it cannot be written."""
    path = folder / f'ckpt_{parts["step"]}.pt'
    try:
        for left in folder.glob('ckpt_*.tmp'):  # by a killed process
            left.unlink()
        with whole_file(path) as file:
            torch.save(parts, file)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise OSError(f'cannot write {path}: {first_line(reason)}') from error


def candidates(path):
    """The checkpoint files in a run's folder, the highest step first, or this one file. Where there is
    none, raises FileNotFoundError, which names the runs that are near."""
    path = Path(path)
    paths = checkpoints(path) if path.is_dir() else [path]
    if paths and path.exists():
        return paths
    folder = path if path.is_dir() else path.parent
    runs = sorted(child.name for child in folder.glob('*') if checkpoints(child))
    names = textwrap.shorten(', '.join(runs) or 'none', 200, placeholder=' ...')
    raise FileNotFoundError(
        f'no checkpoint to resume or load in {path} (runs in {folder}: {names}); '
        'hub.convert imports a Hugging Face folder'
    )


def load_checkpoint(path, warn=lambda message: None):
    """The Checkpoint in a file or, of a run's folder, in its newest file that is whole.

    Raises FileNotFoundError or ValueError where there is none, and OSError where the newest one
    cannot be read.
    """
    damaged = {}
    paths = candidates(path)
    for candidate in paths:
        try:
            parts = read_checkpoint(candidate)
        except ValueError as error:
            damaged[candidate] = error
            continue
        if step_of(candidate) not in (None, parts['step']):
            raise ValueError(
                f'{candidate} holds step {parts["step"]}; name it ckpt_{parts["step"]}.pt, or delete it'
            )
        if any('.attn.c_attn.' in name for name in parts['model']):
            raise ValueError(
                f'{candidate} has the weights of an older model.py, whose q, k and v are one matrix; '
                'commit 01bd433 reads it'
            )
        for error in damaged.values():
            warn(f'warning: {error}; going on from {candidate}, step {parts["step"]}')
        return Checkpoint(parts, path=candidate, damaged=list(damaged))
    raise damaged[paths[0]]


def read_checkpoint(path):
    """What a checkpoint file holds. Raises ValueError if it is damaged or foreign.

    OSError and MemoryError say nothing of the file, which may be whole: no permission, a network disk
    that fails, too little memory.
    """
    if not path.is_file():
        raise ValueError(f'{path} is no file, or a link that leads nowhere')
    try:
        # torch.load does not look at the checksums.
        if zipfile.ZipFile(path).testzip():
            raise zipfile.BadZipFile
        # weights_only: a file from a stranger must not run code.
        load = functools.partial(torch.load, path, map_location='cpu', weights_only=True)
        try:
            parts = load(mmap=True)
        except RuntimeError:  # too little memory, or a network disk that maps no files
            parts = load()
    except (OSError, MemoryError):
        raise
    except Exception as error:  # zip, pickle and torch each raise their own
        if is_out_of_memory(error):
            raise
        # torch's own advice, to trust the file, is bad advice.
        reason = type(error).__name__
        raise ValueError(f'{path} is damaged, or no checkpoint of train.py ({reason})') from None
    if not isinstance(parts, dict) or 'model_config' not in parts:
        raise ValueError(f'{path} is no checkpoint of train.py')
    return parts


# --- from a checkpoint into a run ----------------------------------------------------------------

# Fields that, with the shape, a checkpoint's weights cannot be used without: with other values of
# these, even its embeddings and projections would mean something else.
BASE = ('arch', 'n_kv_head', 'rope_theta', 'rope_scaling', 'norm_eps', 'tie_embeddings')


class Checkpoint(dict):
    """What Reporter.checkpoint() of train.py wrote, the 'path' of its file, and under 'damaged' the newer
    files that are damaged. Its methods raise a ValueError that names the file where something does not
    fit."""

    @property
    def config(self):
        return GPTConfig.saved(self['model_config'])

    def differences(self, config):
        """{field of GPTConfig: (the checkpoint's value, another one's)}, where they differ."""
        theirs, ours = spelled_out(self.config), spelled_out(config)
        return {name: (value, ours[name]) for name, value in theirs.items() if value != ours[name]}

    def check_tokenizer(self, sha256, owner):
        """Refuse another tokenizer than that of training. owner: whose it is."""
        if self['data']['tokenizer']['sha256'] != sha256:
            raise ValueError(
                f'{self["path"]} was trained with another tokenizer than that of {owner}'
            )

    def check_data(self, dataset, advice=''):
        """Refuse a dataset of other token files."""
        if self['data']['sha256'] != dataset.hashes():
            raise ValueError(
                f'{self["path"]} was trained on other data than {dataset.folder} now holds{advice}'
            )

    def load_weights(self, model):
        """Take over the weights; mixing weights that the checkpoint lacks keep their initial values.

        Refuses those that would mean something else in this model, which the shapes of the tensors
        alone do not show.
        """
        needed = {*SHAPE, *BASE}
        if model.config.arch == 'llama':
            needed.remove('block_size')  # without learned positions, it only limits them
        different = self.differences(model.config)
        flags = [f'--{name}={different[name][0]}' for name in different if name in needed]
        if flags:
            raise ValueError(
                f'{self["path"]} does not fit this model; its weights need {" ".join(flags)}'
            )

        theirs, ours = self['model'], model.state_dict()
        wrong = [
            name for name in theirs if name not in ours or theirs[name].shape != ours[name].shape
        ]
        wrong += [name for name in ours if name not in theirs and not model.needs[name].optional]
        if wrong:
            names = textwrap.shorten(', '.join(wrong), 200, placeholder=' ...')
            raise ValueError(
                f'{self["path"]} does not fit this model: {names} (unknown, missing, or of another shape; '
                'one may be missing where model.py makes it with optional=True)'
            )
        model.load_state_dict(theirs, strict=False)

    def load_state(self, optimizers, scaler):
        """Take over the optimizers' moments and the loss scale. weight_decay and the betas stay those of
        the settings, which may have changed."""
        owned = by_name(optimizers)
        for name, state in self['optimizer']['state'].items():
            p, owner = owned[name]
            # Without this check, AdamW would write past the end of moments that are too small.
            if {tensor.shape for kind, tensor in state.items() if kind != 'step'} != {p.shape}:
                raise ValueError(f'{self["path"]} has moments of {name} that do not have its shape')
            # Copies: the checkpoint's own are its file's, which would stay on the disk when it is
            # deleted.
            owner.state[p] = {kind: tensor.to(p, copy=True) for kind, tensor in state.items()}
        if self['scaler']:
            scaler.load_state_dict(self['scaler'])


def spelled_out(config):
    """{field: value}, where 0 does not stand for what follows from other fields."""
    return {**asdict(config), 'n_inner': config.ffn_width, 'n_kv_head': config.kv_heads}


def optimizer_state(optimizers):
    """{parameter's name: its state in its optimizer}"""
    owned = by_name(optimizers)
    return {name: owner.state[p] for name, (p, owner) in owned.items() if p in owner.state}


def by_name(optimizers):
    """{parameter's name: (the parameter, its optimizer)}"""
    owned = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, p in zip(group['param_names'], group['params'], strict=True):
                owned[name] = p, optimizer
    return owned


# --- provenance ----------------------------------------------------------------------------------

# What a config.json holds beside the settings of a run: provenance(), and what training found out.
FACTS = frozenset(
    'commit code started ended device cpu threads load dtype world_size torch cudnn numpy python '
    'attention_kernel origin data caution '
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
    """What git says. A copy without .git, as on a borrowed machine, takes it from the environment; else
    it is unknown, and why."""
    output, reason = ask_git(*words)
    return output.decode().strip() or os.environ.get('COMMIT') or f'unknown: {reason}'


# A hook of git's, or a shell that works on another repository, sets these.
OTHER_REPOSITORY = {'GIT_DIR', 'GIT_WORK_TREE', 'GIT_INDEX_FILE', 'GIT_COMMON_DIR'}


def ask_git(*words):
    """(the bytes that git prints about this code, why it prints nothing). They are empty where there is no
    git, no repository, or another user's."""
    environment = {name: os.environ[name] for name in os.environ.keys() - OTHER_REPOSITORY}
    try:
        done = subprocess.run(['git', *words], cwd=ROOT, env=environment, capture_output=True)
    except OSError as error:
        return b'', str(error)
    return done.stdout, first_line(done.stderr.decode(errors='replace'))


def code_fingerprint():
    """What the code of a training is, as 12 hex digits: the text of all Python files that it could import.

    So an edit changes it, whether or not it is committed, and a commit of pages or tests does not.
    """
    digest = hashlib.sha256()
    for name in sorted(code_files()):
        text = without_comments((ROOT / name).read_bytes())
        digest.update(f'{name}\n'.encode() + text + b'\0')
    return digest.hexdigest()[:12]


NOT_CODE = {'tests', 'results', 'data', 'out'}
# What environments and other repositories have in their folders.
OF_OTHERS = {'pyvenv.cfg', 'conda-meta', '.git'}


def code_files():
    """The names of the Python files of this code, as in lib/data.py. A name that begins with a dot is an
    editor's or a system's, and a link to a folder above leads in a circle."""
    for folder, subfolders, names in os.walk(ROOT, followlinks=True):
        path = Path(folder)
        inside = path.relative_to(ROOT)
        is_of_others = OF_OTHERS & {*names, *subfolders} or path.resolve() in path.parents
        is_other = is_of_others or path.name.startswith('.') or inside.as_posix() in NOT_CODE
        if is_other and path != ROOT:
            subfolders.clear()
            continue
        for name in names:
            is_python = name.endswith('.py') and not name.startswith('.')
            if is_python and os.path.isfile(path / name):
                yield (inside / name).as_posix()


@functools.cache  # a training asks twice
def without_comments(source):
    """The bytes of a Python file without comments and blank lines; all of them where it is not Python."""
    try:
        file = io.StringIO(source.decode('utf-8-sig'), newline=None)
        parts = list(tokenize.generate_tokens(file.readline))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return source
    lines, of_strings = file.getvalue().split('\n'), set()
    for part in parts:
        row, column = part.start
        # Nothing but strings goes on in another row; since Python 3.12, an f-string is many parts.
        of_strings.update(range(row, part.end[0]))
        if part.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
    code = [line for row, line in enumerate(lines, 1) if line.strip() or row in of_strings]
    return '\n'.join(code).encode()


def cpu_name():
    """The processor's model and number of cores."""
    name = platform.machine()
    with contextlib.suppress(OSError):  # Linux only
        models = re.findall(r'^model name\s*: (.*)$', Path('/proc/cpuinfo').read_text(), re.M)
        if models:
            name = models[0]
    return f'{name}, {os.cpu_count()} cores'
