"""
Token files -> batches. Row r of a run, a sequence of block_size + 1 tokens, is a pure function of (seed, r): the data
order does not depend on the number of GPUs, on the batch size or on how often a run was resumed.

A dataset is what prepare_slimpajama.py writes: data/<dataset>/<split>/<Domain>.bin and meta.json.

At the end: the files that a run writes, checkpoints and log.
"""
import collections
import contextlib
import datetime
import fcntl
import hashlib
import itertools
import json
import math
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

FORMAT = 1
MIXING = 'residual_lambda', '.dwa.'  # learned mixing weights: may be missing in a checkpoint, and are logged


class Dataset:
    """A prepared dataset, its files checked against meta.json. Raises FileNotFoundError or ValueError."""

    def __init__(self, name):
        self.folder = Path('data', name)
        again = f'delete {self.folder} and prepare it again'
        try:
            self.meta = json.loads((self.folder / 'meta.json').read_text())
            version = self.meta['format']
        except FileNotFoundError:
            raise FileNotFoundError(f'no prepared dataset in {self.folder}; prepare it with: python '
                                    f'prepare_slimpajama.py --source=... --out={self.folder}') from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{self.folder}/meta.json is damaged ({error}); {again}') from None
        if version != FORMAT:
            raise ValueError(f'{self.folder}/meta.json has format {version}, this program reads {FORMAT}; {again}')
        try:
            validation = {domain: found['tokens'] for domain, found in self.meta['splits']['validation'].items()}
            kinds = {'name': str, 'sha256': str, 'n_vocab': int, 'tokens': int, 'bytes': int}
            known = [(self.meta['tokenizer'], ('name', 'sha256', 'n_vocab'))]
            known += [(entry, ('tokens', 'bytes', 'sha256')) for _, entry in self.files()]
            if wrong := [name for entry, names in known for name in names if type(entry[name]) is not kinds[name]]:
                raise TypeError(f'{wrong[0]} is not of its type')
            self.meta['splits']['train'].keys()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'{self.folder}/meta.json is damaged ({error}); {again}') from None
        if min(validation.values(), default=0) < 2:
            raise ValueError(f'{self.folder} has validation domains without a token to predict: {validation}')
        for path, expected in self.files():
            size = path.stat().st_size if path.exists() else -1
            if size != 2 * expected['tokens']:
                found = 'is missing' if size < 0 else f'has {size:,} bytes, not {2 * expected["tokens"]:,}'
                raise ValueError(f'{path} {found}; {again}')

    def files(self):
        return [(self.folder / split / f'{domain}.bin', expected)
                for split, domains in self.meta['splits'].items() for domain, expected in domains.items()]

    def hashes(self):
        return {f'{path.parent.name}/{path.name}': expected['sha256'] for path, expected in self.files()}

    def verify(self, force=False):
        """Compare each file's sha256 with meta.json's, once: what was found right is remembered with size and time."""
        memory = self.folder / 'verified.json'
        try:
            known = dict(json.loads(memory.read_text()))
        except (OSError, ValueError, TypeError):
            known = {}
        fresh = {}
        for path, expected in self.files():
            stat = path.stat()
            mark = [stat.st_size, stat.st_mtime_ns, expected['sha256']]
            if force or known.get(str(path.relative_to(self.folder))) != mark:
                with open(path, 'rb') as f:
                    found = hashlib.file_digest(f, 'sha256').hexdigest()
                if found != expected['sha256']:
                    raise ValueError(f'{path} was altered: its sha256 is {found[:12]}..., meta.json says '
                                     f'{expected["sha256"][:12]}...; delete {self.folder} and prepare it again')
            fresh[str(path.relative_to(self.folder))] = mark
        if fresh != known:
            try:
                temporary = memory.with_suffix(f'.{os.getpid()}')
                temporary.write_text(json.dumps(fresh))
                temporary.replace(memory)
            except OSError:
                pass  # a read-only dataset is checked at every start

    def read(self, split, domain, start, count):
        """`count` tokens from `start` on, as int64; fewer at the end of the file."""
        path = self.folder / split / f'{domain}.bin'  # read, not mapped: a map grows in resident size by all it read
        tokens = np.fromfile(path, dtype='<u2', count=count, offset=2 * start)
        if len(tokens) < min(count, self.meta['splits'][split][domain]['tokens'] - start):
            raise ValueError(f'{path} was cut off while it was in use')
        return tokens.astype(np.int64)

    def sequences(self, split, domain, block_size):
        """How many sequences of block_size predictions a domain holds, without overlap."""
        return (self.meta['splits'][split][domain]['tokens'] - 1) // block_size


class TrainingRows:
    """Which sequence is row r. After any n rows each domain has had n times its weight, within one row; no sequence
    comes twice within an epoch of its domain; each epoch has its own order.

    weights: {domain: weight}, any positive numbers; {}: each domain by its number of tokens."""

    def __init__(self, dataset, block_size, seed, weights=None, warn=print):
        self.dataset, self.block_size, self.seed, self.warn = dataset, block_size, seed, warn
        train = dataset.meta['splits']['train']
        weights = weights or {domain: found['tokens'] for domain, found in train.items()}
        for domain, weight in weights.items():
            if domain not in train:
                raise ValueError(f'domain_weights names {domain!r}; {dataset.folder} has {", ".join(train)}')
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float('inf'):
                raise ValueError(f'domain_weights gives {domain} {weight!r}; a weight is a number, 0 or more')
        if not any(weights.values()):
            raise ValueError('domain_weights are all 0; give at least one domain a positive weight')
        self.domains = [domain for domain in sorted(weights) if weights[domain] > 0]
        total = sum(weights.values())
        self.weights = [weights[domain] / total for domain in self.domains]
        self.sizes = [dataset.sequences('train', domain, block_size) for domain in self.domains]
        for domain, size in zip(self.domains, self.sizes, strict=True):
            if size < 1:
                raise ValueError(f'{domain} in {dataset.folder} is shorter than one sequence of block_size={block_size}'
                                 ' + 1 tokens; prepare more, lower block_size, or leave it out with domain_weights')
        self.row, self.counts = 0, [0] * len(self.domains)
        self.orders = {}  # domain number -> (epoch, its permutation)
        self.warned = set()

    def seek(self, row):
        """Go to a row, by counting from the start: about a second for a million rows."""
        if row < self.row:
            self.row, self.counts = 0, [0] * len(self.domains)
        while self.row < row:
            self.next_domain()

    def next_domain(self):
        """The chairman assignment (Tijdeman 1980): among the domains that lag enough, the one that is due first. It
        keeps every domain within 1 - 1 / (2k - 2) rows of its share, k domains."""
        self.row += 1
        k = len(self.domains)
        slack = 1 / (2 * k - 2) if k > 1 else 0.0
        best, earliest = 0, float('inf')
        for i, weight in enumerate(self.weights):
            lag = self.row * weight - self.counts[i]
            due = (1 - slack - lag) / weight
            if lag >= slack - 1e-9 and due < earliest:
                best, earliest = i, due
        self.counts[best] += 1
        return best

    def next(self):
        """(domain, first token) of the next row."""
        i = self.next_domain()
        epoch, index = divmod(self.counts[i] - 1, self.sizes[i])
        if self.orders.get(i, (None,))[0] != epoch:
            key = [self.seed % 2**32, zlib.crc32(self.domains[i].encode()), epoch]
            order = np.arange(self.sizes[i], dtype=np.uint32)
            np.random.RandomState(key).shuffle(order)  # not default_rng: numpy promises never to change this stream
            self.orders[i] = epoch, order
        if epoch and i not in self.warned:
            self.warned.add(i)
            self.warn(f'warning: {self.domains[i]} starts epoch {epoch + 1} at row {self.row - 1:,}: its '
                      f'{self.sizes[i]:,} sequences repeat')
        return self.domains[i], int(self.orders[i][1][index]) * self.block_size

    def batch(self, size):
        """The next `size` rows, (size, block_size + 1) int64."""
        rows = [self.next() for _ in range(size)]
        return np.stack([self.dataset.read('train', d, start, self.block_size + 1) for d, start in rows])


class Loader:
    """One rank's micro-batches (x, y) on `device`, each (batch_size, block_size) int64, made ahead by a thread.

    A step takes `accumulation` micro-batches in row order; micro-batch m is rank m % world_size's."""
    AHEAD = 4  # micro-batches

    def __init__(self, rows, batch_size, accumulation, first_step=0, rank=0, world_size=1, device='cpu'):
        self.rows, self.batch_size, self.accumulation, self.first_step = rows, batch_size, accumulation, first_step
        self.rank, self.world_size, self.device = rank, world_size, device
        self.queue, self.stopped = queue.Queue(self.AHEAD), threading.Event()
        self.thread = threading.Thread(target=self.produce, daemon=True)
        self.thread.start()

    def produce(self):
        pins = torch.device(self.device).type == 'cuda'
        try:
            if pins:  # a new thread starts on GPU 0, and pinning there would cost every process memory on it
                torch.cuda.set_device(self.device)
            self.rows.seek(self.first_step * self.accumulation * self.batch_size)
            while not self.stopped.is_set():
                for m in range(self.accumulation):
                    if m % self.world_size == self.rank:
                        batch = torch.from_numpy(self.rows.batch(self.batch_size))
                        self.put(batch.pin_memory() if pins else batch)
                    else:
                        for _ in range(self.batch_size):
                            self.rows.next_domain()
        except BaseException as error:  # the training loop raises it; a thread would only print it
            self.put(error)

    def put(self, item):
        while not self.stopped.is_set():
            with contextlib.suppress(queue.Full):
                return self.queue.put(item, timeout=0.1)

    def next(self):
        batch = self.queue.get()
        if isinstance(batch, BaseException):
            raise batch
        batch = batch.to(self.device, non_blocking=True)
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def close(self):
        self.stopped.set()
        self.thread.join()


def validation_batches(dataset, domain, block_size, batch_size, iters, rank=0, world_size=1, split='validation'):
    """The same rows every time: up to `iters` batches of a domain, evenly spaced over its file, batch j for rank
    j % world_size. Yields (x, y); what is missing to a full batch or a full row has target -1."""
    whole = max(1, dataset.sequences(split, domain, block_size))
    rows = np.unique(np.linspace(0, whole - 1, min(whole, iters * batch_size)).astype(int))
    for j in range(rank, -(-len(rows) // batch_size), world_size):
        x = torch.zeros((batch_size, block_size), dtype=torch.int64)
        y = torch.full((batch_size, block_size), -1)
        for i, row in enumerate(rows[j * batch_size:(j + 1) * batch_size]):
            tokens = torch.from_numpy(dataset.read(split, domain, row * block_size, block_size + 1))
            x[i, :len(tokens) - 1], y[i, :len(tokens) - 1] = tokens[:-1], tokens[1:]
        yield x, y


# --- what a run writes ------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def lock(folder):
    """Hold a run's folder, at most until this process ends, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f'another process is training in {folder}; choose another --out_dir') from None
    except OSError as error:  # some network file systems have no locks
        print(f'warning: cannot lock {folder} ({error}); let no other run write to it', file=sys.stderr)
    try:
        yield
    finally:
        os.close(handle)


def checkpoints(folder):
    """A run's checkpoints to resume from, newest first: ckpt.pt, ckpt.pt.1, ..., and at the very last ckpt_best.pt."""
    ages = {'ckpt.pt': 0, 'ckpt_best.pt': math.inf}
    numbered = (path for path in Path(folder).glob('ckpt.pt.*') if path.suffix[1:].isdecimal())
    ages.update((path.name, int(path.suffix[1:])) for path in numbered)
    return [Path(folder, name) for name in sorted(ages, key=ages.get) if Path(folder, name).exists()]


def save_checkpoint(folder, checkpoint, keep=1, names=()):
    """Write, flush, rename: a crash or a full disk leaves the checkpoints before whole, of which the last keep - 1 stay
    as ckpt.pt.1, ckpt.pt.2, ... `names`: other names of the new one, which stay, too."""
    older = [path for path in checkpoints(folder) if path.name != 'ckpt_best.pt']
    path, temporary = folder / 'ckpt.pt', folder / 'ckpt.tmp'
    try:
        with open(temporary, 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        for name in names:  # before the renaming: a run killed in between comes here again
            (folder / name).unlink(missing_ok=True)
            try:
                os.link(temporary, folder / name)
            except OSError:  # a file system without links
                shutil.copyfile(temporary, folder / name)
        for i, old in reversed(list(enumerate(older, 1))):
            os.replace(old, folder / f'ckpt.pt.{i}')
        os.replace(temporary, path)
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)  # the names, too
        os.close(handle)
        for i in range(keep, len(older) + 1):  # only now: there was never one less
            (folder / f'ckpt.pt.{i}').unlink()
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        temporary.unlink(missing_ok=True)
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        old = '; the one before is whole: continue with --init_from=resume' if older else ''
        raise OSError(f'cannot write {path}: {str(reason).splitlines()[0]}{old}') from error


def load_checkpoint(path, warn=print):
    """A checkpoint's dict, and under 'path' where it is from; a run's folder gives its newest one that is whole."""
    path, failure = Path(path), None
    for candidate in checkpoints(path) or [path / 'ckpt.pt'] if path.is_dir() else [path]:
        try:
            # torch.load does not look at the check sums. weights_only: a file from a stranger must not run code.
            if zipfile.ZipFile(candidate).testzip():
                raise ValueError
            checkpoint = torch.load(candidate, map_location='cpu', weights_only=True, mmap=True)
            parts = [checkpoint[name] for name in ('model', 'optimizer', 'scaler', 'settings', 'model_config', 'data')]
            if not all(isinstance(part, dict) for part in parts) or type(checkpoint['step']) is not int:
                raise TypeError
        except FileNotFoundError:
            raise FileNotFoundError(f'there is no {candidate}: nothing to resume or load') from None
        except Exception as error:  # zip, pickle and torch each have their own; torch's advice to trust it is bad
            failure = failure or ValueError(
                f'{candidate} is not a checkpoint of train.py, or damaged ({type(error).__name__})')
        else:
            if failure:
                warn(f'warning: {failure}; going on from {candidate}, step {checkpoint["step"]}')
            return {**checkpoint, 'path': candidate}
    raise failure


def set_aside_newer(path):
    """Give the checkpoints newer than this one, which are damaged, names that save_checkpoint() does not know: they
    would take the places of whole ones."""
    for newer in itertools.takewhile(lambda other: other != path, checkpoints(path.parent)):
        os.replace(newer, newer.with_name(f'damaged_{newer.name}'))


@contextlib.contextmanager
def stranger(path):
    """Whatever a checkpoint that is whole but not ours breaks, when it is taken apart here, is a ValueError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
        raise ValueError(f'{path} does not fit: {reason}') from error


def check_resume(checkpoint, settings, config, dataset):
    """Refuse to resume as another run. Returns the settings that changed, {name: [old, new]}."""
    path, old = checkpoint['path'], checkpoint['settings']
    old['rows_per_step'] = old['gradient_accumulation_steps'] * old['batch_size']
    model_config = {**asdict(type(config)()), **checkpoint['model_config']}  # fields that came later
    for name, value in asdict(config).items():
        if model_config[name] != value:
            raise ValueError(f'{path} is a run with {name}={model_config[name]!r}, not {value!r}; resume with its own '
                             'settings, or start another out_dir')
    if checkpoint['data']['tokenizer']['sha256'] != dataset.meta['tokenizer']['sha256']:
        raise ValueError(f'{path} was trained with another tokenizer than that of {dataset.folder}')
    if checkpoint['data']['sha256'] != dataset.hashes():
        raise ValueError(f'{path} was trained on other data than {dataset.folder} now holds')
    for name in ('seed', 'domain_weights', 'rows_per_step'):
        if old[name] != getattr(settings, name):
            raise ValueError(f'{path} is a run with {name}={old[name]!r}, not {getattr(settings, name)!r}: its data '
                             'order would change (rows_per_step is gradient_accumulation_steps * batch_size)')
    if not 0 <= checkpoint['step'] <= settings.max_iters:
        raise ValueError(f'{path} is at step {checkpoint["step"]}, max_iters={settings.max_iters} lies before it')
    return {name: [old.get(name), value] for name, value in asdict(settings).items()
            if old.get(name) != value and name not in ('init_from', 'eval_only')}


def load_weights(model, checkpoint):
    """A checkpoint's weights; learned mixing weights that it lacks stay as they start. Refused where they would mean
    something else in this model, which the shapes alone do not tell."""
    path = checkpoint['path']
    theirs, ours = ({**asdict(c), 'n_kv_head': c.kv_heads, 'n_inner': c.ffn_width}
                    for c in (type(model.config)(**checkpoint['model_config']), model.config))
    shape = 'arch vocab_size n_layer n_head n_embd n_kv_head n_inner rope_theta rope_scaling norm_eps tie_embeddings'
    follows = {'n_inner': 'n_embd', 'n_kv_head': 'n_head'}  # where they are 0
    if flags := [f'--{name}={theirs[name]}' for name in shape.split()
                 if any(theirs[n] != ours[n] for n in (name, follows.get(name, name)))]:
        raise ValueError(f'{path} does not fit this model; it needs {" ".join(flags)}')
    missing, unexpected = model.load_state_dict(checkpoint['model'], strict=False)
    wrong = unexpected + [name for name in missing if not any(part in name for part in MIXING)]
    if wrong:
        raise ValueError(f'{path} does not fit this model: {", ".join(wrong[:3])}{" ..." if len(wrong) > 3 else ""}')


def load_state(optimizer, scaler, checkpoint):
    """AdamW's moments and the loss scale; weight_decay and betas are those of the settings, which may have changed."""
    params = [p for group in optimizer.param_groups for p in group['params']]
    for i, state in checkpoint['optimizer']['state'].items():  # AdamW itself would write past the end of smaller ones
        shapes = {'step': (), 'exp_avg': params[i].shape, 'exp_avg_sq': params[i].shape}
        if {name: tensor.shape for name, tensor in state.items()} != shapes:
            raise ValueError(f'{checkpoint["path"]} has moments that are not of its weights')
    optimizer.load_state_dict({**optimizer.state_dict(), 'state': checkpoint['optimizer']['state']})
    if checkpoint['scaler']:  # empty where the run was not in float16
        scaler.load_state_dict(checkpoint['scaler'])


class Log:
    """out_dir/log.jsonl, one object per line. On resume, what lies past the checkpoint's step is cut."""

    def __init__(self, path, step=None):
        lines, self.recent = [], collections.deque(maxlen=100)
        if step is not None and path.exists():
            for line in path.read_text(errors='replace').splitlines():
                try:
                    entry = json.loads(line)
                    kept = entry['step'] < step or (entry['step'] == step and 'loss' not in entry)
                except (ValueError, TypeError, LookupError):  # such as the one being written when the run died
                    print(f'warning: {path} had a damaged line, left out now: {line[:60]}', file=sys.stderr)
                    continue
                if kept:
                    lines.append(line + '\n')
                    self.recent.append(entry.get('loss'))
        temporary = path.with_suffix('.tmp')
        with open(temporary, 'w') as f:
            f.write(''.join(lines))
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        self.file = open(path, 'a', buffering=1)

    def write(self, entry):
        """Write a line. A loss six standard deviations above the mean of the last ones gets "spike": true; returns
        whether."""
        before = [loss for loss in self.recent if isinstance(loss, float)]
        if 'loss' in entry and len(before) >= 20:
            if entry['loss'] > statistics.mean(before) + 6 * statistics.stdev(before):
                entry['spike'] = True
        entry = json.loads(json.dumps(entry), parse_constant=lambda name: None)  # JSON has no NaN
        self.recent.append(entry.get('loss'))
        self.file.write(json.dumps(entry) + '\n')
        return 'spike' in entry


def provenance(machine):
    """What produced a run: commit, versions, device."""
    commit = ''
    with contextlib.suppress(OSError):  # no git here
        commit = subprocess.run(['git', 'describe', '--always', '--dirty'], cwd=Path(__file__).parent,
                                capture_output=True, text=True).stdout.strip()
    return {'commit': commit or 'unknown', 'date': datetime.date.today().isoformat(), 'device': machine.name(),
            'dtype': machine.dtype, 'world_size': machine.world_size, 'torch': str(torch.__version__),
            'numpy': np.__version__, 'python': sys.version.split()[0]}
