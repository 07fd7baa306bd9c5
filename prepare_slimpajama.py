"""
Raw documents -> token files, one per domain and split, in the proportions of the paper's Table 2.

20B tokens of SlimPajama from the Hugging Face hub:
$ python prepare_slimpajama.py

A local copy, or a part of one:
$ python prepare_slimpajama.py --source=raw/slimpajama --tokenizer=raw/tokenizer.json \
      --tokens=2e9 --out=data/sp2b

All of your own texts (0 tokens: everything), and Python's own library, which needs no download:
$ python prepare_slimpajama.py --source=my_texts --tokenizer=bytes --tokens=0 --out=data/mine
$ python prepare_slimpajama.py --source=stdlib --tokenizer=bytes --tokens=0 --out=data/stdlib

A source is one of these:
- a hub repository or a folder of .jsonl, .jsonl.zst or .parquet files in SlimPajama's form,
  {"text", "meta": {"redpajama_set_name"}}. The first of the words train, validation (or valid, val,
  dev, eval) and test in a file's path names its split, and without one it is train; test is left
  out.
- a folder of plain text files, whose first-level sub-folders are the domains. The text is read as
  UTF-8, other bytes become U+FFFD; hidden, empty and binary files (with a NUL byte in the first
  8 KB) are skipped. A file of more than a twentieth of its domain, or of more than 4 MB, is cut at
  line ends, so that one long file can be split, too.
- 'stdlib', this Python's own library.

Without a validation split, a document is validation when hash(seed, text) < val_fraction, and each
domain's first one always is.

What is written: <out>/<split>/<Domain>.bin (little-endian uint16 ids, each document followed by
<|endoftext|>), tokenizer.json (a copy; for bytes, one that describes them), and last meta.json,
whose presence means complete. Files are read in seeded order, their documents are shuffled (in
blocks of 64M characters), and each domain is filled up to its share of --tokens. The result does not
depend on --workers or on interruptions.
"""

import collections
import contextlib
import copy
import errno
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import struct
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

import sources
import tokenizer
from configurator import configure, first_line, one_line_errors
from files import DATASET_FORMAT, locked, sha256_of, sync_folder, write_json, write_whole

# Characters shuffled together, of one to four bytes each in memory: they bound a worker's memory,
# whatever the size of a file.
BLOCK = 64 * 2**20

# The state is saved this often: it costs a flush of every token file, and a crash repeats what came
# after it.
SAVE_SECONDS = 5

# What precedes a document's ids in a spill file: domain, tokens, bytes of text, validation or not.
RECORD = struct.Struct('<qqq?')

# Once per process.
load_tokenizer = functools.cache(tokenizer.load)


@dataclass
class Settings:
    source: str = 'cerebras/SlimPajama-627B'  # hub repository, local folder, or 'stdlib'
    revision: str = 'main'  # of the hub repository; the commit that it is at the start is read
    out: str = 'data/slimpajama'  # folder for the token files
    tokenizer: str = 'EleutherAI/gpt-neox-20b'  # tokenizer.json, its folder, hub id, or 'bytes'
    tokens: int = 20_000_000_000  # training tokens in all domains together; 0: everything
    weights: dict = field(default_factory=dict)  # {domain: weight}; {}: Table 2, or natural shares
    val_fraction: float = 0.005  # of the documents, where the source has no validation split
    workers: int = 0  # processes; 0: one per CPU that this process may use
    seed: int = 1337  # of the order of files and documents

    def __post_init__(self):
        negative = min(self.tokens, self.workers, self.seed) < 0
        if negative or not 0 <= self.val_fraction < 1:
            raise ValueError(
                '--tokens, --workers and --seed must be 0 or more, and --val_fraction in [0, 1)'
            )
        for weight in self.weights.values():
            if not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(f'--weights must be positive numbers, not {self.weights}')
        if not self.tokens and len(set(self.weights.values())) > 1:
            raise ValueError(
                '--weights divide --tokens, and --tokens=0 takes everything: give equal weights, which '
                'choose the domains, and give train.py these as --domain_weights'
            )


# ---- The worker: one unit -> one spill file, so that its memory and the parent's are bounded -----


def tokenize_unit(unit, room, spill, tokenizer_path, seed, val_fraction):
    """Write the documents of `unit` to the file `spill`, each as RECORD and ids, in shuffled order.

    room: {domain: training tokens still wanted}, an upper bound, because units before this one may
    still be on their way. The parent decides where a domain ends; the worker stops once every
    domain certainly has enough. Returns None, or a message about what is wrong with the unit;
    the parent ignores it if it has enough tokens before that point.
    """
    encoder = load_tokenizer(tokenizer_path)
    domains = list(room)
    domains_met = set()
    room = dict(room)
    if unit.split == 'validation':
        room = dict.fromkeys(room, math.inf)

    blocks = shuffled_blocks(unit, seed)
    with open(spill, 'wb') as file:
        while any(tokens > 0 for tokens in room.values()):
            try:
                block = next(blocks, None)
            except (ValueError, OSError) as error:
                return f'{unit.name}: {first_line(error)}'
            if block is None:
                break

            for domain, text in block:
                if room.get(domain, 0) <= 0:
                    continue
                ids = encoder.encode(text)
                tokens = len(ids) + 1
                validation = is_validation(unit, text, seed, val_fraction)
                file.write(RECORD.pack(domains.index(domain), tokens, utf8_size(text), validation))
                file.write(ids.astype('<u2').tobytes())
                file.write(encoder.eot.to_bytes(2, 'little'))

                # A domain's first document may become validation, see merge().
                if domain in domains_met and not validation:
                    room[domain] -= tokens
                domains_met.add(domain)
            # Before the next one is made, so that there is only one at a time.
            del block
    return None


def shuffled_blocks(unit, seed):
    """A unit's (domain, text) without empty documents, in lists of about BLOCK, each shuffled."""
    documents = ((domain, text) for domain, text in unit.read() if text)
    for number in itertools.count():
        block = []
        size = 0
        for domain, text in documents:
            block.append((domain, text))
            # 200 is what Python spends on a string, however short.
            size += len(text) + 200
            if size >= BLOCK:
                break
        if not block:
            return

        random.Random(f'{seed} {unit.name} {number}').shuffle(block)
        yield block


def is_validation(unit, text, seed, val_fraction):
    if unit.split == 'hash':
        return sources.hash_fraction(seed, text) < val_fraction
    return unit.split == 'validation'


def utf8_size(text):
    return len(text) if text.isascii() else len(text.encode('utf-8', 'replace'))


def start_worker():
    # The parent handles Ctrl-C, and a killed parent must leave no worker behind.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=die_with_parent, daemon=True).start()


def die_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


# ---- The parent: merge the spill files strictly in order, and be ready to be killed at any moment


class Plan(NamedTuple):
    """What a preparation works from; all of it follows from the settings and the source."""

    settings: Settings
    out: Path
    revision: str  # of a hub repository, its commit
    units: list
    shares: dict  # {domain: share}, which add up to 1
    goals: dict  # {domain: training tokens}, infinite where everything is wanted
    encoder: object
    names: object  # the sha256 of the units' names, see hash_of_source()


def prepare(settings):
    """Make the dataset settings.out, or continue it, or find it complete.

    Raises ValueError or OSError, with one line that says why.
    """
    out = Path(settings.out)
    source = Path(settings.source)
    if source.is_dir() and source.resolve() in out.resolve().parents:
        raise ValueError(
            f'--out={out} is inside --source={source}, and what is written there would be read as '
            'text: choose a folder outside'
        )
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, 'writing to', setting='--out'):
        previous = read_state(settings, out)
        shutil.rmtree(out / '.spill', ignore_errors=True)
        if (out / 'meta.json').exists():
            # An earlier call may have been killed before it could do this.
            (out / 'progress.json').unlink(missing_ok=True)
            check_complete(out, previous)
            print(f'{out} is complete: nothing to do')
            return

        try:
            fill(settings, out, previous)
        except KeyboardInterrupt:
            message = 'interrupted: progress is kept, the same command goes on from here'
            raise SystemExit(message) from None
        except BrokenProcessPool as error:
            raise OSError(
                'a worker died (out of memory?): progress is kept, try again with fewer --workers'
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                f'no space left in {out}: progress is kept; make room, then run the same command'
            ) from error


def read_state(settings, out):
    """What an earlier call left in meta.json or progress.json, or None. Refuses other settings."""
    request = deciding_settings(settings)
    state = None
    changes = []
    try:
        for path in (out / 'meta.json', out / 'progress.json'):
            if path.exists():
                state = json.loads(path.read_text())
                break
        if state is not None:
            asked = state['asked']
            changes = [name for name in request if not same(name, asked[name], request[name])]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(
            f'{out} has a damaged meta.json or progress.json ({error}): delete {out}'
        ) from error

    if changes:
        begun_with = f'--{changes[0]}={state["asked"][changes[0]]}'
        raise ValueError(
            f'{out} was begun with {begun_with}: keep the settings, choose another --out, '
            f'or delete {out}'
        )
    return state


def same(name, before, now):
    """Whether two values of a setting mean the same; a path may be spelled in several ways."""
    if name in ('source', 'tokenizer'):
        return os.path.abspath(before) == os.path.abspath(now)
    return before == now


def check_complete(out, meta):
    """Refuse a dataset whose token files are not as its meta.json says. Their contents are not read:
    training does that."""
    if meta['format'] != DATASET_FORMAT:
        raise ValueError(
            f'{out} has format {meta["format"]}, and this program writes format {DATASET_FORMAT}: '
            f'delete {out}, or choose another --out'
        )
    for split, domains in meta['splits'].items():
        for domain, entry in domains.items():
            path = final_path(out, split, domain)
            if not path.exists() or path.stat().st_size != 2 * entry['tokens']:
                raise ValueError(
                    f'{path} is not as {out}/meta.json says: delete {out}, and prepare it again'
                )


def deciding_settings(settings):
    """The settings that decide which bytes are written."""
    values = asdict(settings)
    del values['out'], values['workers']
    return values


def fill(settings, out, previous):
    """Write the token files, from the start or from the state that an earlier call left."""
    plan = make_plan(settings, out, previous)
    state = first_state(plan)
    if previous:
        if previous.keys() != state.keys() or not isinstance(previous['done'], int):
            raise ValueError(
                f'{out} has a progress.json that is damaged, or of another version of this program: '
                f'delete {out} to start again'
            )
        state['source'] = hash_of_source(plan, previous['done'])
        for name in ('source', 'tokenizer'):
            if previous[name] != state[name]:
                raise ValueError(
                    f'--{name} has changed since {out} was begun: delete {out} to start again'
                )
        state = previous
        print(f'continuing after {state["done"]:,} of {len(plan.units):,} files')
    elif any(not path.name.startswith(('.', 'progress.json')) for path in out.iterdir()):
        raise ValueError(f'{out} holds files that this program did not write: choose another --out')

    estimate = estimate_tokens(plan, state)
    check_space(plan, estimate)
    # Before the first token: from here on the folder is ours.
    save_state(plan, state, parts={})
    write_tokens(plan, state, estimate)
    finish(plan, state)
    print_table(plan, state)


def make_plan(settings, out, previous):
    if previous and 'revision' in previous:
        # The commit that was read from the start, whatever the branch holds by now.
        revision = previous['revision']
    else:
        revision = sources.commit_of(settings.source, settings.revision)
    units, shares = sources.find_units(settings.source, revision, settings.weights, settings.seed)
    encoder = load_tokenizer(settings.tokenizer)

    goals = dict.fromkeys(shares, math.inf)
    if settings.tokens:
        for domain, share in shares.items():
            goals[domain] = max(round(settings.tokens * share), 1)

    # Once: a source may have 90,000 units.
    names = json.dumps([(unit.name, unit.split) for unit in units])
    names_hash = hashlib.sha256(f'[{names}, '.encode())
    return Plan(settings, out, revision, units, shares, goals, encoder, names_hash)


def hash_of_source(plan, done):
    """The sha256 of all units' names, and of the sizes of those that have been read: a damaged one
    after them may still be replaced."""
    sizes = [unit.size for unit in plan.units[:done]]
    whole = plan.names.copy()
    whole.update(f'{json.dumps(sizes)}]'.encode())
    return whole.hexdigest()


def first_state(plan):
    """What progress.json says before the first unit is done."""
    counts = {}
    for split in ('train', 'validation'):
        counts[split] = {}
        for domain in plan.shares:
            counts[split][domain] = {'documents': 0, 'tokens': 0, 'bytes': 0, 'files': 0}
    return {
        'asked': deciding_settings(plan.settings),
        'revision': plan.revision,
        'done': 0,  # units
        'source': hash_of_source(plan, 0),
        'tokenizer': plan.encoder.sha256,
        'counts': counts,
    }


def tokens_of_source(plan):
    """{split: tokens}, a guess: a compressed byte holds 4 bytes of text, and a token takes 3.5."""
    bytes_per_token = 1 if plan.encoder.name == 'bytes' else 3.5
    tokens = collections.Counter()
    for unit in plan.units:
        compressed = unit.name.endswith(('.zst', '.parquet'))
        size = 4 * unit.size if compressed else unit.size
        tokens[unit.split] += size / bytes_per_token
    return tokens


def estimate_tokens(plan, state):
    """A guess of the tokens still to be written, from the sizes of the files, on the high side."""
    tokens = tokens_of_source(plan)
    train = tokens['train'] + tokens['hash']
    if plan.settings.tokens:
        train = min(train, plan.settings.tokens)
    validation = tokens['validation'] or train * plan.settings.val_fraction

    present = 0
    for domains in state['counts'].values():
        present += sum(entry['tokens'] for entry in domains.values())
    return max(int(train + validation) - present, 0)


def check_space(plan, estimate):
    # Beside the token files, each unit on its way has a spill file. A token takes two bytes.
    spilled = sum(tokens_of_source(plan).values()) / len(plan.units) * look_ahead(plan)
    needed = 2 * (estimate + spilled)
    need = f'{needed / 1e9:,.2f} GB'
    free = shutil.disk_usage(plan.out).free
    available = f'{free / 1e9:,.2f} GB'
    files = f'{len(plan.units):,} files'
    splits = collections.Counter(unit.split for unit in plan.units)
    if 'hash' not in splits:
        files += f' ({splits["train"]:,} train, {splits["validation"]:,} validation)'
    print(f'{files}; needs about {need} in {plan.out}, where {available} are free', flush=True)
    if free >= needed:
        return
    if not plan.settings.tokens:
        # Rows do not say beforehand how much of them --weights chooses.
        print(
            'note: that may not be enough; if the disk becomes full, make room, and the same command '
            'goes on from there',
            file=sys.stderr,
        )
        return
    raise OSError(
        f'not enough space for {need} in {plan.out}: make room, choose another --out '
        'or fewer --tokens'
    )


def write_tokens(plan, state, estimate):
    """Tokenize the units from state['done'] on, and append them to the token files.

    However this ends, the units that were done by then are on the disk, and the state says so.
    """
    out = plan.out
    depth = look_ahead(plan)

    with contextlib.ExitStack() as stack:
        parts = open_parts(out, state['counts'], stack)
        stack.callback(save_state, plan, state, parts)
        (out / '.spill').mkdir()
        stack.callback(shutil.rmtree, out / '.spill', ignore_errors=True)
        submit = stack.enter_context(open_workers(number_of_workers(plan)))
        bar = stack.enter_context(tqdm(total=estimate, unit='tok', unit_scale=True, mininterval=1))

        # For each submitted unit, from state['done'] on: a function that waits for its result.
        results = collections.deque()
        text_bytes = 0
        began = time.monotonic()
        next_save = began + SAVE_SECONDS
        while state['done'] < len(plan.units):
            done = state['done']
            unit = plan.units[done]
            # A copy, because an interruption in the middle of a unit must leave the state as it is.
            counts = copy.deepcopy(state['counts'])
            if unit.split != 'validation' and is_full(plan, counts):
                break
            if unit.split == 'train':
                # The validation files have been read: better now than after hours.
                check_validation(plan, counts)

            # Keep each worker busy.
            while len(results) < depth and done + len(results) < len(plan.units):
                results.append(submit(task(plan, counts, done + len(results))))

            wait = results.popleft()
            error = wait()
            spill = spill_path(plan, done)
            tokens, size = merge(unit, spill, parts, counts, plan.goals)
            if error and (unit.split == 'validation' or not is_full(plan, counts)):
                raise ValueError(f'{error} (the {done:,} files before it are kept)')
            spill.unlink()

            # In one call, which no Ctrl-C can cut in two.
            state.update(done=done + 1, counts=counts)
            if time.monotonic() >= next_save:
                save_state(plan, state, parts)
                next_save = time.monotonic() + SAVE_SECONDS

            bar.update(tokens)
            text_bytes += size
            speed = text_bytes / 1e6 / (time.monotonic() - began)
            bar.set_postfix_str(f'{speed:.1f} MB/s{domain_progress(plan, counts)}')


def number_of_workers(plan):
    return min(plan.settings.workers or available_cpus(), len(plan.units))


def look_ahead(plan):
    """How many units are on their way at a time.

    They are merged in order. With fewer, one that is slow would idle the workers that are done with
    those after it; with more, spill files would take more of the disk.
    """
    workers = number_of_workers(plan)
    return min(4 * workers, len(plan.units)) if workers > 1 else 1


def available_cpus():
    """How many CPUs this process may use; a batch system or a container may have bound it to some. A
    limit on CPU time, such as docker's --cpus, is not seen: give --workers."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def save_state(plan, state, parts):
    """Write progress.json, after the tokens that it counts."""
    for part in parts.values():
        part.flush()
        os.fsync(part.fileno())
    state['source'] = hash_of_source(plan, state['done'])
    write_json(plan.out / 'progress.json', state)


def open_parts(out, counts, stack):
    """{(split, domain): file to append to}, each cut to the length that `counts` knows of."""
    parts = {}
    for split, domain in itertools.product(counts, counts['train']):
        path = part_path(out, split, domain)
        path.parent.mkdir(exist_ok=True)
        final = final_path(out, split, domain)
        if final.exists():
            # The process was killed in finish().
            os.replace(final, path)

        part = stack.enter_context(open(path, 'ab'))
        size = 2 * counts[split][domain]['tokens']
        if part.tell() < size:
            raise ValueError(
                f'{path} is shorter than {out}/progress.json says: delete {out} and start again'
            )
        part.truncate(size)
        parts[split, domain] = part
    return parts


def final_path(out, split, domain):
    return out / split / f'{domain}.bin'


def part_path(out, split, domain):
    """Of a token file that is still written to."""
    return out / split / f'{domain}.bin.part'


@contextlib.contextmanager
def open_workers(number):
    """A function that submits a task, and returns a function that waits for its result.

    With one worker, this process does the task itself, when it is asked for the result.
    """
    if number == 1:
        yield lambda task: task
        return

    others = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context('spawn')
    pool = ProcessPoolExecutor(number, spawn, initializer=start_worker)
    try:
        yield lambda task: pool.submit(task).result
    except BaseException:
        # What they are at would be thrown away, and may take long: a large file, a hub that fails.
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def task(plan, counts, number):
    """The work on unit `number`, as a function without arguments; picklable."""
    room = {
        domain: plan.goals[domain] - entry['tokens'] for domain, entry in counts['train'].items()
    }
    return functools.partial(
        tokenize_unit,
        plan.units[number],
        room,
        spill_path(plan, number),
        str(plan.encoder.path or 'bytes'),
        plan.settings.seed,
        plan.settings.val_fraction,
    )


def spill_path(plan, number):
    return plan.out / '.spill' / str(number)


def is_full(plan, counts):
    """Whether every domain has the training tokens that are wanted."""
    return all(counts['train'][domain]['tokens'] >= plan.goals[domain] for domain in plan.shares)


def merge(unit, spill, parts, counts, goals):
    """Append a spill file's documents to the token files, each domain until it is full.

    The document that crosses the border is kept whole. Updates `counts`, and returns the tokens
    and the bytes of text that it has added.
    """
    domains = list(counts['train'])
    targets = set()  # the token files that hold a document of this unit
    added_tokens = 0
    added_bytes = 0
    with open(spill, 'rb') as file:
        while head := file.read(RECORD.size):
            number, tokens, size, validation = RECORD.unpack(head)
            domain = domains[number]
            full = counts['train'][domain]['tokens'] >= goals[domain]
            if full and unit.split != 'validation':
                file.seek(2 * tokens, os.SEEK_CUR)
                continue

            # At least one document of each domain is validation.
            if unit.split == 'hash' and not counts['validation'][domain]['documents']:
                validation = True
            split = 'validation' if validation else 'train'
            parts[split, domain].write(file.read(2 * tokens))

            entry = counts[split][domain]
            entry['documents'] += 1
            entry['tokens'] += tokens
            entry['bytes'] += size
            if (split, domain) not in targets:
                entry['files'] += 1
                targets.add((split, domain))
            added_tokens += tokens
            added_bytes += size
    return added_tokens, added_bytes


def domain_progress(plan, counts):
    """How much of its tokens each domain has, for the progress bar."""
    if not plan.settings.tokens:
        return ''
    text = ''
    for domain, entry in counts['train'].items():
        text += f' {domain} {entry["tokens"] / plan.goals[domain]:.0%}'
    return text


# ---- The end -------------------------------------------------------------------------------------


def finish(plan, state):
    """Give the token files their names, and write meta.json."""
    out = plan.out
    settings = plan.settings
    encoder = plan.encoder
    check_documents(plan, state['counts'])

    splits = {}
    for split, domain in itertools.product(state['counts'], plan.shares):
        part = part_path(out, split, domain)
        entry = state['counts'][split][domain]
        if entry['documents']:
            splits.setdefault(split, {})[domain] = {**entry, 'sha256': sha256_of(part)}
            os.replace(part, final_path(out, split, domain))
        else:
            part.unlink()
    # On the disk before the meta.json that says so.
    for split in state['counts']:
        sync_folder(out / split)

    write_whole(out / 'tokenizer.json', encoder.as_file())
    meta = {
        'format': DATASET_FORMAT,
        'source': settings.source,
        'revision': plan.revision,
        'seed': settings.seed,
        'weights': plan.shares,
        'tokens': settings.tokens,
        'asked': state['asked'],
        'tokenizer': {
            'name': encoder.name,
            'sha256': encoder.sha256,
            'n_vocab': encoder.n_vocab,
            'eot': encoder.eot,
        },
        'files': [state['done'], len(plan.units)],
        'splits': splits,
    }
    write_json(out / 'meta.json', meta)
    (out / 'progress.json').unlink()


def check_documents(plan, counts):
    """Refuse a dataset without training data, and a domain with validation data only."""
    train = counts['train']
    validation = counts['validation']
    for domain in plan.shares:
        in_train = train[domain]['documents']
        in_validation = validation[domain]['documents']
        if plan.units[0].split == 'hash' and in_validation and not in_train:
            raise ValueError(
                f'{domain} has one document only, and validation takes it: '
                f'add more, and delete {plan.out}'
            )

    if not any(entry['documents'] for entry in train.values()):
        raise ValueError(f'{plan.settings.source} has no document to train on')


def check_validation(plan, counts):
    """Refuse validation files without a document of the domains that are wanted."""
    if not any(entry['documents'] for entry in counts['validation'].values()):
        raise ValueError(
            f'the validation files of {plan.settings.source} have no document of '
            f'{", ".join(plan.shares)}: leave them out, so that documents of the training files are '
            f'held out in their place, and delete {plan.out}'
        )


def print_table(plan, state):
    train = state['counts']['train']
    validation = state['counts']['validation']
    total = sum(entry['tokens'] for entry in train.values())

    head = f'{"domain":14}{"documents":>12}{"tokens":>16}{"wanted":>16}{"share":>8}{"wanted":>8}'
    print(f'{head}{"validation":>14}')
    for domain, entry in train.items():
        documents = entry['documents']
        tokens = entry['tokens']
        wanted = 'all'
        remark = ''
        if plan.settings.tokens:
            wanted = f'{plan.goals[domain]:,}'
            if tokens < plan.goals[domain]:
                remark = '  ran dry: the source has no more'
        elif not documents:
            remark = '  the source has none'
        row = f'{domain:14}{documents:12,}{tokens:16,}{wanted:>16}{tokens / total:8.1%}'
        row += f'{plan.shares[domain]:8.1%}{validation[domain]["tokens"]:14,}'
        print(f'{row}{remark}')
    if plan.settings.tokens:
        print_shares_missed(plan, train, total)
    print(f'{plan.out} is complete')


def print_shares_missed(plan, train, total):
    """A note on each domain whose share of the tokens is off by more than a tenth of them all: a long
    document alone may fill a small domain several times."""
    for domain, wanted in plan.shares.items():
        share = train[domain]['tokens'] / total
        if abs(share - wanted) > 0.1:
            print(
                f'note: {domain} has {share:.0%} of the tokens, not {wanted:.0%}, because domains run '
                'dry, or because their last documents are kept whole: prepare more --tokens of a '
                'larger source, or give train.py the shares as --domain_weights',
                file=sys.stderr,
            )


def main():
    with one_line_errors(ValueError, OSError):
        (settings,) = configure(Settings)
        prepare(settings)


if __name__ == '__main__':
    main()
