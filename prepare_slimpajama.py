"""
Raw documents -> token files, one per domain and split, in the proportions of the paper's Table 2.

$ python prepare_slimpajama.py                                  # 20B tokens of SlimPajama from the Hugging Face hub
$ python prepare_slimpajama.py --source=raw/slimpajama --tokenizer=raw/tokenizer.json --tokens=2e9 --out=data/sp2b
$ python prepare_slimpajama.py --source=my_texts --tokenizer=bytes --tokens=0 --out=data/mine   # 0: everything
$ python prepare_slimpajama.py --source=stdlib --tokenizer=bytes --tokens=0 --out=data/stdlib   # needs no download

A source is a hub repository or a folder of .jsonl, .jsonl.zst or .parquet files in SlimPajama's form ({"text", "meta":
{"redpajama_set_name"}}; paths that start with train, validation or test say the split, test is left out); or a folder
of plain text files, whose first-level sub-folders are the domains; or 'stdlib', this Python's own library. Without a
validation split, a document is validation when hash(seed, text) < val_fraction, and each domain's first one always is.
Plain text is read as UTF-8 (other bytes become U+FFFD); hidden, empty and binary files (a NUL byte) are skipped. A
text file over a twentieth of its domain is cut at line ends, so that one long file can be split, too.
Written are <out>/<split>/<Domain>.bin (little-endian uint16 ids, each document followed by <|endoftext|>), a copy of
tokenizer.json, and last meta.json, whose presence means complete. Files come in seeded order, documents shuffled in
each (in blocks of 64 MB), and each domain is filled up to its share of --tokens, whatever --workers and interruptions.
"""
import collections
import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import struct
import sysconfig
import threading
import time
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

import tokenizer
from configurator import configure, one_line_errors

TABLE_2 = {'CommonCrawl': 0.5, 'C4': 0.2, 'Github': 0.1, 'Book': 0.05, 'ArXiv': 0.05, 'Wikipedia': 0.05,
           'StackExchange': 0.05}  # as printed
BLOCK = 64 * 2**20     # characters shuffled together: bounds a worker's memory, whatever the size of a file
MAX_LINE = 64 * 2**20  # bytes in a line of .jsonl, characters in a row; SlimPajama's longest books have some 10 MB
RECORD = struct.Struct('<qqq?')  # in front of a document's ids in a spill file: domain, tokens, bytes, validation?
load_tokenizer = functools.cache(tokenizer.load)  # once per process
RETRIES = 6            # a hub file that yields nothing new: waits of 1, 2, 4, ... 32 seconds, then give up


@dataclass
class Settings:
    source: str = 'cerebras/SlimPajama-627B'      # hub repository, local folder, or 'stdlib'
    revision: str = 'main'                        # of the hub repository
    out: str = 'data/slimpajama'                  # folder for the token files
    tokenizer: str = 'EleutherAI/gpt-neox-20b'    # tokenizer.json, folder with one, hub id, or 'bytes'
    tokens: int = 20_000_000_000                  # training tokens in all domains together; 0: everything
    weights: dict = field(default_factory=dict)   # {domain: weight}; {}: Table 2, or natural shares for plain text
    val_fraction: float = 0.005                   # of the documents, where the source has no validation split
    workers: int = 0                              # processes; 0: one per core
    seed: int = 1337                              # of the order of files and documents

    def __post_init__(self):
        if min(self.tokens, self.workers, self.seed) < 0 or not 0 <= self.val_fraction < 1:
            raise ValueError('--tokens, --workers and --seed must be 0 or more, and --val_fraction in [0, 1)')
        if not all(isinstance(w, int | float) and 0 < w < math.inf for w in self.weights.values()):
            raise ValueError(f'--weights must be positive numbers, not {self.weights}')


# ---- Sources. All of them become a list of units; a unit's documents are read by one worker.
class Unit(NamedTuple):
    name: str          # path within the source: decides its place in the order and the shuffling of its documents
    split: str         # 'train', 'validation', or 'hash': each document's hash decides
    size: int          # bytes in the source
    read: object       # () -> iterator over (domain, text); picklable


def find_units(settings):
    """The units of a source in reading order (validation, then train), and {domain: share}, which adds up to 1."""
    source, plain, found = settings.source, {}, []
    if source == 'stdlib':
        plain = stdlib_units(settings.seed)
    elif os.path.isdir(source):
        paths = sorted(Path(folder, name) for folder, _, names in os.walk(source) for name in names)
        paths = [p for p in paths if p.is_file() and not any(n.startswith('.') for n in p.relative_to(source).parts)]
        found = [(p.relative_to(source).as_posix(), p.stat().st_size, functools.partial(documents, rows, str(p)))
                 for p in paths for suffix, rows in ROWS.items() if p.name.endswith(suffix)]
        if not found:
            plain = folder_units(source, paths, settings.seed)
    elif re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', source):
        found = [(path, size, functools.partial(documents, hub_rows, source, settings.revision, path))
                 for path, size in list_hub(source, settings.revision) if path.endswith(tuple(ROWS))]
    else:
        raise ValueError(f"no source {source!r}: give a folder that is there, a hub repository, or 'stdlib'")
    known = {domain: sum(unit.size for unit in units) for domain, units in plain.items()} or TABLE_2
    weights = settings.weights or known
    if missing := [domain for domain in weights if domain not in known]:
        raise ValueError(f'--weights names {missing[0]!r}, which the source lacks: it has {", ".join(known)}')
    units = [unit for domain in weights for unit in plain.get(domain, [])]
    for name, size, read in found:  # 'train/chunk1/example_train_0.jsonl.zst', 'data/train-00000-of-00048.parquet'
        split = (re.findall(r'(?:^|/)(train|validation|test)', name) or ['train'])[0]
        units += [Unit(name, split, size, read)] * (split != 'test')
    splits = {unit.split for unit in units}
    if not splits - {'validation'}:
        raise ValueError(f'{source} has no training file: wanted .jsonl, .jsonl.zst, .parquet or plain text')
    if 'validation' not in splits:
        units = [unit._replace(split='hash') for unit in units]
    units.sort(key=lambda unit: (unit.split != 'validation', digest(settings.seed, unit.name), unit.name))
    return units, {domain: weight / sum(weights.values()) for domain, weight in weights.items()}


def digest(seed, text):
    """A number in [0, 1) that depends on (seed, text) only."""
    raw = hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=8, salt=seed.to_bytes(16, 'little'))
    return int.from_bytes(raw.digest(), 'little') / 2**64


def folder_units(root, paths, seed):
    """{domain: units} of a tree of plain text."""
    files, binary = {}, 0
    for path in paths:
        with open(path, 'rb') as f:
            head = f.read(8192)
        binary += b'\0' in head
        if head and b'\0' not in head:
            inside = path.relative_to(root).parts
            domain = inside[0] if len(inside) > 1 else Path(root).resolve().name
            files.setdefault(re.sub(r'[^A-Za-z0-9_.-]|^\.', '_', domain), []).append(path)
    if binary:
        print(f'skipped {binary:,} binary files')
    return {domain: text_units(domain, root, files[domain], seed) for domain in sorted(files)}


def stdlib_units(seed):
    """{domain: units} of Python's own library: its sources, without tests, and the topics behind help()."""
    root = sysconfig.get_paths()['stdlib']
    left_out = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'pydoc_data'}
    paths = [p for p in Path(root).rglob('*.py') if not left_out & set(p.relative_to(root).parts)]
    size = sum(len(text) for _, text in read_topics())
    return {'Source': text_units('Source', root, paths, seed),
            'Topics': [Unit('pydoc_data/topics.py', 'hash', size, read_topics)]}


def text_units(domain, root, paths, seed):
    """Shuffle a domain's files, and deal them out to units of about 4 MB."""
    files = sorted((digest(seed, name), name, path) for path in paths for name in [path.relative_to(root).as_posix()])
    size = sum(path.stat().st_size for path in paths)
    longest = min(max(size // 20, 2**14), 2**22)
    number = min(size // 2**22 + 1, len(files))
    return [Unit(files[i][1], 'hash', size // number, functools.partial(
        read_text, domain, [path for _, _, path in files[i::number]], longest)) for i in range(number)]


# ---- Readers: iterators over (domain, text). Their ValueErrors and OSErrors name the line.
def read_text(domain, paths, longest):
    for path in paths:
        with open(path, encoding='utf-8', errors='replace', newline='') as f:
            while piece := f.read(longest) + f.readline(longest):
                yield domain, piece


def read_topics():
    from pydoc_data.topics import topics
    return (('Topics', text) for text in topics.values())


def documents(rows, *args):
    """(domain, text) of each (where, row in SlimPajama's form) that the generator `rows` yields."""
    for where, row in rows(*args):
        match row:
            case {'text': str(text), 'meta': {'redpajama_set_name': str(name)}} if len(text) <= MAX_LINE:
                domain = name.removeprefix('RedPajama')
            case _:
                raise ValueError(f'{where} is not {{"text": ..., "meta": {{"redpajama_set_name": ...}}}}, or too long')
        if domain not in TABLE_2:
            raise ValueError(f'{where}: unknown domain {name!r}, expected RedPajama + {", ".join(TABLE_2)}')
        yield domain, text


def jsonl_rows(path):
    import pyarrow  # not zstandard: that takes a file that was cut off for a whole one
    stream = pyarrow.input_stream(path, compression='zstd') if path.endswith('.zst') else open(path, 'rb')
    with stream, io.BufferedReader(stream) as f:
        for number, line in enumerate(iter(lambda: f.readline(MAX_LINE + 1), b''), 1):
            if len(line) > MAX_LINE:
                raise ValueError(f'line {number} is longer than {MAX_LINE >> 20} MB')
            if not line.isspace():
                try:
                    yield f'line {number}', json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f'line {number} is broken JSON ({error})') from error


def parquet_rows(path):
    import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(path) as file:
        if missing := {'text', 'meta'} - set(file.schema_arrow.names):
            raise ValueError(f'no column {min(missing)}: it has {", ".join(file.schema_arrow.names)}')
        numbers = itertools.count(1)
        for batch in file.iter_batches(batch_size=4, columns=['text', 'meta']):  # few: each may be long
            if batch.nbytes > 4 * MAX_LINE:
                raise ValueError(f'row {next(numbers)}, or one of the next three, is longer than {MAX_LINE >> 20} MB')
            yield from ((f'row {next(numbers)}', row) for row in batch.to_pylist())


def hub_rows(source, revision, path):
    """Stream a file of a hub repository. When the connection fails: wait, open it again, go on at the same row."""
    read = failures = 0
    while True:
        try:
            for row in itertools.islice(open_hub(source, revision, path), read, None):
                yield f'row {read + 1}', row
                read, failures = read + 1, 0
            return
        except Exception as error:  # whatever the hub's client and its HTTP library may raise
            failures += 1
            if failures > RETRIES:
                raise OSError(f'the hub fails, after {RETRIES} retries: {first_line(error)}') from error
            time.sleep(2 ** (failures - 1))


def open_hub(source, revision, path):
    from datasets import load_dataset
    return load_dataset(source, revision=revision, data_files=path, split='train', streaming=True)


def list_hub(source, revision):
    """[(path, bytes)] of a dataset repository."""
    try:
        from huggingface_hub import HfApi
        tree = HfApi().list_repo_tree(source, repo_type='dataset', revision=revision, recursive=True)
        return [(entry.path, entry.size) for entry in tree if hasattr(entry, 'size')]
    except Exception as error:
        raise OSError(f'no folder {source} here, and the hub cannot list it ({first_line(error)})') from error


ROWS = {'.jsonl': jsonl_rows, '.jsonl.zst': jsonl_rows, '.parquet': parquet_rows}


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---- The worker: one unit -> one spill file, which the parent merges: so both processes' memory is bounded.
def tokenize_unit(unit, room, spill, tokenizer_path, seed, val_fraction):
    """Write the documents of `unit` to the file `spill`, each as RECORD and ids, in shuffled order. Returns None, or
    what is wrong with the unit: no error if the parent turns out to have enough before it gets there.
    `room` is {domain: training tokens still wanted}, an upper bound, because units before this one may still be on
    their way. The parent decides where a domain ends; the worker stops when there is surely no need for more."""
    encoder, domains, seen = load_tokenizer(tokenizer_path), list(room), set()
    left = {domain: math.inf if unit.split == 'validation' else tokens for domain, tokens in room.items()}
    blocks = shuffled_blocks(unit, seed)
    with open(spill, 'wb') as f:
        while any(tokens > 0 for tokens in left.values()):
            try:
                block = next(blocks, None)
            except (ValueError, OSError) as error:
                return f'{unit.name}: {first_line(error)}'
            if block is None:
                return None
            for domain, text in block:
                if left.get(domain, 0) <= 0:
                    continue
                validation = unit.split == 'validation' or unit.split == 'hash' and digest(seed, text) < val_fraction
                ids = encoder.encode(text)
                size = len(text) if text.isascii() else len(text.encode('utf-8', 'replace'))
                f.write(RECORD.pack(domains.index(domain), len(ids) + 1, size, validation))
                f.write(ids.astype('<u2').tobytes() + encoder.eot.to_bytes(2, 'little'))
                if not validation and domain in seen:  # the first one may become validation, see merge()
                    left[domain] -= len(ids) + 1
                seen.add(domain)


def shuffled_blocks(unit, seed):
    """Lists of (domain, text), without empty documents: the unit's, shuffled within blocks of about BLOCK."""
    pairs = (pair for pair in unit.read() if pair[1])
    for number in itertools.count():
        block, size = [], 0
        for domain, text in pairs:
            block.append((domain, text))
            size += len(text) + 200  # what Python spends on a string, however short
            if size >= BLOCK:
                break
        if not block:
            return
        random.Random(f'{seed} {unit.name} {number}').shuffle(block)
        yield block


def start_worker():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, and a killed parent must leave no worker
    threading.Thread(target=lambda: multiprocessing.parent_process().join() or os._exit(1), daemon=True).start()


# ---- The parent: start workers, merge what they return strictly in order, and be ready to be killed at any moment.
def prepare(settings):
    """Make the dataset settings.out, or continue it, or find it complete. ValueError, OSError: one line says why."""
    out = Path(settings.out)
    asked = {key: value for key, value in asdict(settings).items() if key not in ('out', 'workers')}
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = os.open(out, os.O_RDONLY)
        stack.callback(os.close, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process, however that ends
        except OSError as error:
            if isinstance(error, BlockingIOError):  # some network file systems have no locks
                raise OSError(f'another process is writing to {out}') from error
        try:
            saved = next((json.loads(path.read_text()) for path in (out / 'meta.json', out / 'progress.json')
                          if path.exists()), None)
            changed = [key for key in asked if saved is not None and saved['asked'][key] != asked[key]]
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f'{out} has a damaged meta.json or progress.json ({error}): delete {out}') from error
        if changed:
            raise ValueError(f'{out} was begun with --{changed[0]}={saved["asked"][changed[0]]}: keep the settings, '
                             f'choose another --out, or delete {out}')
        shutil.rmtree(out / '.spill', ignore_errors=True)
        if (out / 'meta.json').exists():
            (out / 'progress.json').unlink(missing_ok=True)  # killed between the two
            print(f'{out} is complete: nothing to do')
            return
        try:
            fill(settings, out, asked, saved)
        except KeyboardInterrupt:
            raise SystemExit('interrupted: progress is kept, the same command goes on from here') from None
        except BrokenProcessPool as error:
            raise OSError('a worker died (out of memory?): progress is kept, try again with fewer --workers') from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(f'no space left in {out}: progress is kept; make room, then run the same command') from error


def fill(settings, out, asked, saved):
    units, shares = find_units(settings)
    encoder = load_tokenizer(settings.tokenizer)
    source = hashlib.sha256(json.dumps([unit[:3] for unit in units]).encode()).hexdigest()
    counts = {split: {domain: dict.fromkeys(('documents', 'tokens', 'bytes', 'files'), 0) for domain in shares}
              for split in ('train', 'validation')}
    state = {'asked': asked, 'done': 0, 'source': source, 'tokenizer': encoder.sha256, 'counts': counts}
    if saved:
        if changed := [key for key in ('source', 'tokenizer') if saved[key] != state[key]]:
            raise ValueError(f'--{changed[0]} has changed since {out} was begun: delete {out} to start again')
        state = saved
        print(f'continuing after {state["done"]:,} of {len(units):,} files')
    elif any(not path.name.startswith(('.', 'progress.json')) for path in out.iterdir()):
        raise ValueError(f'{out} holds other files: choose another --out, or delete it')
    counts, done = state['counts'], state['done']
    wanted = {d: settings.tokens and max(round(settings.tokens * share), 1) or math.inf for d, share in shares.items()}
    # A guess from the files' sizes, on the high side: 4 bytes of text per compressed byte, 3.5 per token
    sizes, per_token = collections.Counter(), 1 if encoder.name == 'bytes' else 3.5
    for unit in units:
        sizes[unit.split] += unit.size * (4 if unit.name.endswith(('.zst', '.parquet')) else 1) / per_token
    train = min(sizes['train'] + sizes['hash'], settings.tokens or math.inf)
    written = sum(n['tokens'] for domains in counts.values() for n in domains.values())
    expected = max(int(train + (sizes['validation'] or train * settings.val_fraction)) - written, 0)
    need, free = f'{2 * expected / 1e9:,.2f} GB', shutil.disk_usage(out).free
    print(f'{len(units):,} files; needs about {need} in {out}, where {free / 1e9:,.2f} GB are free', flush=True)
    if free < 2 * expected:
        raise OSError(f'not enough space for {need} in {out}: make room, choose another --out or fewer --tokens')
    save(out / 'progress.json', state)  # before the first token: from here on the folder is ours
    with contextlib.ExitStack() as stack:
        parts = open_parts(out, counts, stack)
        (out / '.spill').mkdir()
        stack.callback(shutil.rmtree, out / '.spill', ignore_errors=True)
        workers = min(settings.workers or os.cpu_count(), len(units))
        if workers > 1:
            pool = ProcessPoolExecutor(workers, multiprocessing.get_context('spawn'), initializer=start_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
        bar = stack.enter_context(tqdm(total=expected, unit='tok', unit_scale=True, mininterval=1))
        pending, ahead, text_bytes = collections.deque(), done, 0
        while done < len(units):
            unit, spill = units[done], out / '.spill' / str(done)
            room = {domain: wanted[domain] - n['tokens'] for domain, n in counts['train'].items()}
            if unit.split != 'validation' and max(room.values()) <= 0:
                break
            while ahead < len(units) and len(pending) < (workers + 1 if workers > 1 else 1):
                task = functools.partial(tokenize_unit, units[ahead], room, out / '.spill' / str(ahead),
                                         str(encoder.path or 'bytes'), settings.seed, settings.val_fraction)
                pending.append(pool.submit(task).result if workers > 1 else task)
                ahead += 1
            error = pending.popleft()()
            tokens, size = merge(unit, spill, parts, counts, wanted)
            short = any(n['tokens'] < wanted[domain] for domain, n in counts['train'].items())
            if error and (short or unit.split == 'validation'):
                raise ValueError(f'{error} (the {done:,} files before it are kept)')
            spill.unlink()
            for part in parts.values():
                part.flush()
                os.fsync(part.fileno())
            state['done'] = done = done + 1
            save(out / 'progress.json', state)
            bar.update(tokens)
            text_bytes += size
            bar.set_postfix_str(f'{text_bytes / 1e6 / bar.format_dict["elapsed"]:.1f} MB/s' + ''.join(
                f' {d} {n["tokens"] / wanted[d]:.0%}' for d, n in counts['train'].items() if settings.tokens))
    finish(settings, out, units, shares, wanted, encoder, state)


def merge(unit, spill, parts, counts, wanted):
    """Append a spill file's documents to the token files, each domain until it is full; the document that crosses the
    border is kept whole. Returns the tokens and the bytes of text added."""
    domains, added, sums = list(counts['train']), set(), [0, 0]
    with open(spill, 'rb') as f:
        while head := f.read(RECORD.size):
            number, tokens, size, validation = RECORD.unpack(head)
            domain = domains[number]
            if unit.split != 'validation' and counts['train'][domain]['tokens'] >= wanted[domain]:
                f.seek(2 * tokens, os.SEEK_CUR)
                continue
            if unit.split == 'hash' and not counts['validation'][domain]['documents']:
                validation = True  # at least one per domain
            split = 'validation' if validation else 'train'
            parts[split, domain].write(f.read(2 * tokens))
            n = counts[split][domain]
            n.update(documents=n['documents'] + 1, tokens=n['tokens'] + tokens, bytes=n['bytes'] + size,
                     files=n['files'] + ((split, domain) not in added))
            added.add((split, domain))
            sums = [sums[0] + tokens, sums[1] + size]
    return sums


def open_parts(out, counts, stack):
    """{(split, domain): file to append to}, each cut to the length that `counts` knows of."""
    parts = {}
    for split, domain in itertools.product(counts, counts['train']):
        path = out / split / f'{domain}.bin.part'
        path.parent.mkdir(exist_ok=True)
        if path.with_suffix('').exists():  # killed while finishing
            os.replace(path.with_suffix(''), path)
        parts[split, domain] = part = stack.enter_context(open(path, 'ab'))
        size = 2 * counts[split][domain]['tokens']
        if part.tell() < size:
            raise ValueError(f'{path} is shorter than {out}/progress.json says: delete {out} and start again')
        part.truncate(size)
    return parts


def finish(settings, out, units, shares, wanted, encoder, state):
    """Give the token files their names, write meta.json, and print what there is."""
    train, validation = (state['counts'][split] for split in ('train', 'validation'))
    for domain in shares:
        if domain in settings.weights and not train[domain]['documents'] + validation[domain]['documents']:
            raise ValueError(f'--weights names {domain!r}, which the source lacks: delete {out} and leave it out')
        if units[0].split == 'hash' and validation[domain]['documents'] and not train[domain]['documents']:
            raise ValueError(f'{domain} has one document only, and validation takes it: add more, and delete {out}')
    if not any(n['documents'] for n in train.values()):
        raise ValueError(f'{settings.source} has no document to train on')
    splits = {}
    for split, domain in itertools.product(state['counts'], shares):
        part, n = out / split / f'{domain}.bin.part', state['counts'][split][domain]
        if not n['documents']:
            part.unlink()
            continue
        with open(part, 'rb') as f:
            splits.setdefault(split, {})[domain] = {**n, 'sha256': hashlib.file_digest(f, 'sha256').hexdigest()}
        os.replace(part, part.with_suffix(''))
    if encoder.path:
        save(out / 'tokenizer.json', encoder.path.read_bytes())
    save(out / 'meta.json', {
        'format': 1, 'source': settings.source, 'revision': settings.revision, 'seed': settings.seed,
        'weights': shares, 'tokens': settings.tokens, 'asked': state['asked'],
        'tokenizer': {key: getattr(encoder, key) for key in ('name', 'sha256', 'n_vocab', 'eot')},
        'files': [state['done'], len(units)], 'splits': splits})
    (out / 'progress.json').unlink()
    total = sum(n['tokens'] for n in train.values())
    print(f'{"domain":14}{"documents":>12}{"tokens":>16}{"wanted":>16}{"share":>8}{"wanted":>8}{"validation":>14}')
    for domain, n in train.items():
        want = f'{wanted[domain]:,}' if settings.tokens else 'all'
        dry = '  ran dry: the source has no more' if settings.tokens and n['tokens'] < wanted[domain] else ''
        print(f'{domain:14}{n["documents"]:12,}{n["tokens"]:16,}{want:>16}{n["tokens"] / total:8.1%}'
              f'{shares[domain]:8.1%}{validation[domain]["tokens"]:14,}{dry}')
    print(f'{out} is complete')


def save(path, data):
    """Write bytes, or a value as JSON, so that the file is there whole or not at all, even when the power fails."""
    temporary = path.with_name(f'{path.name}.tmp')
    with open(temporary, 'wb') as f:
        f.write(data if isinstance(data, bytes) else (json.dumps(data, indent=1) + '\n').encode())
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


if __name__ == '__main__':
    with one_line_errors(ValueError, OSError):
        (settings,) = configure(Settings)
        prepare(settings)
