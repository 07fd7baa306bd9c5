"""
Raw documents -> token files, one per domain and split, in the proportions of the paper's Table 2.

20B tokens of SlimPajama from the Hugging Face hub:
$ python prepare_slimpajama.py

A local copy, or a part of one:
$ python prepare_slimpajama.py --source=FOLDER --tokenizer=tokenizer.json --tokens=2e9 --out=data/2b

All of your own texts (0 tokens: everything), and Python's own library, which needs no download:
$ python prepare_slimpajama.py --source=my_texts --tokenizer=bytes --tokens=0 --out=data/mine
$ python prepare_slimpajama.py --source=stdlib --tokenizer=bytes --tokens=0 --out=data/stdlib

A source is one of these:
- a hub repository or a folder of rows with a text: .parquet, .jsonl or .json (one object a line), also
  compressed, .jsonl.zst or .json.gz. --text_column names the text's column. SlimPajama's rows say their
  domain, {"text", "meta": {"redpajama_set_name"}}; that of other rows is the first folder of their
  file's path.
- a folder of plain text, .txt in UTF-8, whose first-level sub-folders are the domains. A file of more
  than a twentieth of its domain, or of more than 4 MB, is cut at line ends (if it has 16 KB), so that
  one long file can be split, too. The cut counts characters: in Chinese, a part has three times the bytes.
- 'stdlib', this Python's own library.

A file's ending says what it holds. Hidden files and those with another ending are not read, nor is a
.json beside other rows, or a .txt beside rows; where such files have more bytes than those that are
read, the source is refused. A folder named train, validation (valid, val, dev) or test says the split of
what is in it, and is no domain; so does a file named validation.jsonl or, as on the hub,
validation-00000-of-00001.parquet. What says nothing is for training; test is left out.

Where a domain has no validation file (of SlimPajama: where there is none), a document is validation
when hash(seed, text) < val_fraction, and each domain's first one always is (the first whose text is not
trained on as another domain's), with all its copies in such domains. Unless --val_fraction is given, it
is 0.005, or of plain text more, up to 0.1, so that the smallest domain has some 10,000 tokens.

What is written: <out>/<split>/<Domain>.bin (little-endian uint16 ids, each document followed by
<|endoftext|>), tokenizer.json (a copy; for bytes, one that describes them), and last meta.json,
whose presence means complete. Files are read in seeded order, their documents are shuffled (in
blocks of 64M characters), and each domain is filled up to its share of --tokens. Until then,
<out>/.pieces holds a piece for each file that is finished, from which the same command goes on. The
result does not depend on --workers or on interruptions.
"""

import array
import collections
import contextlib
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
import threading
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from configurator import configure

import numpy as np
from tqdm import tqdm

from lib import sources, tokenizer
from lib.files import (
    DATASET_FORMAT,
    ENOUGH,
    caution_about,
    first_line,
    locked,
    one_line_errors,
    sha256_of,
    sync_folder,
    unreadable,
    write_json,
    write_whole,
)

# Characters shuffled together, of one to four bytes each in memory: they bound a worker's memory
# but for some 100 bytes a document, whatever the size of a file.
BLOCK = 64 * 2**20

# What a piece says of each document, in the order of their ids: the number of its domain, ids, bytes
# of text, and the text's sources.hash_fraction().
DOCUMENT = np.dtype([('domain', 'i4'), ('tokens', 'i8'), ('bytes', 'i8'), ('place', 'f8')])

SPLITS = ('train', 'validation')

# Once per process.
loaded_tokenizer = functools.cache(tokenizer.load)


@dataclass
class PrepareConfig:
    source: str = 'cerebras/SlimPajama-627B'  # hub repository, local folder, or 'stdlib'
    revision: str = 'main'  # of the hub repository; the commit that it is at the start is read
    out: str = 'data/slimpajama'  # folder for the token files
    text_column: str = 'text'  # of rows, which has the text
    tokenizer: str = 'EleutherAI/gpt-neox-20b'  # tokenizer.json, its folder, hub id, or 'bytes'
    tokens: int = 20_000_000_000  # training tokens in all domains together; 0: everything
    weights: dict = field(default_factory=dict)  # {domain: weight}; {}: Table 2, or natural shares
    val_fraction: float | None = None  # of documents, where a domain has no validation file
    workers: int = 0  # processes; 0: one per CPU that this process may use
    seed: int = 1337  # of the order of files and documents, and of which ones are validation

    def __post_init__(self):
        counts = self.tokens, self.workers, self.seed
        if min(counts) < 0 or max(counts) >= 2**64 or not 0 <= (self.val_fraction or 0) < 1:
            raise ValueError(
                '--tokens, --workers and --seed must be 0 or more and below 2**64, and --val_fraction '
                'in [0, 1)'
            )
        self.weights = dict(sorted(self.weights.items()))  # in any order, they are the same
        for weight in self.weights.values():
            if not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(f'--weights must be positive numbers, not {self.weights}')
        if not self.tokens and len(set(self.weights.values())) > 1:
            raise ValueError(
                '--weights divide --tokens, and --tokens=0 takes everything: give equal weights, which '
                'choose the domains, and give train.py these as --domain_weights'
            )


# ---- The worker: one unit -> one piece -----------------------------------------------------------


def make_piece(unit, piece, room, tokenizer_path, sha256, settings):
    """Write the ids of a unit's documents, in shuffled order, to <piece>.ids, and then the table of
    them, DOCUMENT, to `piece`, whose presence means finished.

    room: {domain: training tokens still wanted}, an upper bound, because units before this one may
    still be on their way. append() decides where a domain ends, and which text of each domain becomes
    validation, with all its copies; the worker stops once every domain that the unit may have certainly has
    enough without these. Raises ValueError for a unit that cannot be read.
    """
    if piece.exists():
        return
    encoder = loaded_tokenizer(tokenizer_path)
    if encoder.sha256 != sha256:
        raise ValueError(f'{tokenizer_path} has changed since this began')
    domains = list(room)
    own = [unit.domain] if unit.domain else domains  # those that the unit may have
    places = set()
    longest = 0
    table = bytearray()

    def is_enough():
        return max(room[domain] for domain in own) <= -len(domains) * longest

    # A domain may be full before: then nothing of it is read.
    documents = () if is_enough() else shuffled_documents(unit, settings.seed, piece.parent)

    lengths = np.zeros(encoder.n_vocab, dtype='i8')  # of a token, in bytes
    for i, raw in encoder.token_bytes.items():
        lengths[i] = len(raw)
    with open(piece.with_suffix('.ids'), 'wb') as file:
        for domain, text in documents:
            if room.get(domain, -math.inf) <= -len(domains) * longest:
                continue
            ids = encoder.encode(text)
            size = lengths[ids].sum()  # of the text as the ids spell it, which may be in NFC
            ids = np.append(ids, np.uint16(encoder.eot)).astype('<u2')
            file.write(ids)
            place = sources.hash_fraction(settings.seed, text)
            row = domains.index(domain), len(ids), size, place
            table += np.array(row, DOCUMENT).tobytes()

            validation = unit.split == 'hash' and place < settings.val_fraction
            if unit.split == 'validation' or validation or place in places:
                continue
            places.add(place)
            longest = max(longest, len(ids))
            room[domain] -= len(ids)
            if is_enough():
                break
        file.flush()
        os.fsync(file.fileno())
    write_whole(piece, table)


def shuffled_documents(unit, seed, scratch):
    """A unit's (domain, text) without empty ones, shuffled within blocks of about BLOCK."""
    documents = sources.documents(unit, scratch)
    for number in itertools.count():
        block = []
        size = 0
        for domain, text in documents:
            if not text:
                continue
            block.append((domain, text))
            # 200 is what Python spends on a string, however short.
            size += len(text) + 200
            if size >= BLOCK:
                break
        if not block:
            return

        random.Random(f'{seed} {unit.name} {number}').shuffle(block)
        yield from block


def start_worker():
    # The parent handles Ctrl-C, and a killed parent must leave no worker behind.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=die_with_parent, daemon=True).start()


def die_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


# ---- The parent: pieces, merged in reading order until every domain is full -------------------------------


class Preparation:
    """What a preparation works from; all of it follows from the settings, the source, and what an
    earlier call left, see read_begun()."""

    def __init__(self, settings, begun):
        # Here, because it imports torch, which workers do not need.
        from lib.machine import cores

        self.settings = settings
        self.out = Path(settings.out)
        self.pieces = self.out / '.pieces'  # the folder of the pieces
        self.encoder = loaded_tokenizer(settings.tokenizer)
        self.workers = settings.workers or cores()

        # The commit that was read from the start, whatever the branch holds by now.
        revision = begun.get('revision', settings.revision)
        # {domain: share}, which add up to 1
        self.units, self.shares, commit = sources.find_units(
            settings.source, revision, settings.weights, settings.seed, settings.text_column
        )
        # {domain: training tokens}, infinite where everything is wanted
        self.goals = dict.fromkeys(self.shares, math.inf)
        if settings.tokens:
            for domain, share in self.shares.items():
                self.goals[domain] = max(round(settings.tokens * share), 1)
        if settings.val_fraction is None:
            settings.val_fraction = choose_fraction(self)
        # The settings that decide the bytes, and the commit of a hub repository.
        self.begun = {'asked': deciding_settings(settings), 'revision': commit}


def choose_fraction(plan):
    """The --val_fraction with which the smallest domain of plain text has about ENOUGH validation tokens,
    from 0.005 to 0.1; 0.005 of rows, whose files do not say how much text they have."""
    sizes = collections.Counter()
    for unit in plan.units:
        if unit.split == 'hash' and not unit.hub:
            sizes[unit.domain] += unit.size
    # Of English, some four bytes are a token.
    length = 1 if plan.encoder.name == 'bytes' else 4
    tokens = [min(size / length, plan.goals[domain]) for domain, size in sizes.items()]
    return round(min(max(0.005, ENOUGH / min(tokens, default=math.inf)), 0.1), 3)


def prepare(settings):
    """Make the dataset settings.out, or continue it, or find it complete.

    Raises ValueError or OSError, with one line that says why.
    """
    out = Path(settings.out)
    source = Path(settings.source)
    # Unlike Path.resolve(), it takes links that lead in a circle; mkdir() refuses them.
    if source.is_dir() and source.resolve() in Path(os.path.realpath(out)).parents:
        raise ValueError(
            f'--out={out} is inside --source={source}, and what is written there would be read as '
            'text: choose a folder outside'
        )
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, 'writing to', setting='--out'):
        begun = read_begun(settings, out)
        if 'splits' in begun:
            check_complete(settings, out, begun)
            # An earlier call may have been killed before it could do this.
            shutil.rmtree(out / '.pieces', ignore_errors=True)
            print(f'{out} is complete: nothing to do')
            return
        if not begun and any(not path.name.startswith('.') for path in out.iterdir()):
            raise ValueError(
                f'{out} holds files that this program did not write: choose another --out'
            )
        plan = Preparation(settings, begun)
        # A worker that was killed could not remove what it had downloaded.
        for folder in plan.pieces.glob(f'{sources.DOWNLOAD}*'):
            shutil.rmtree(folder)
        check_space(plan)
        try:
            # From here on the folder is ours.
            write_json(plan.pieces / 'begun.json', plan.begun)
            counts, pieces = merge_pieces(plan)
            finish(plan, counts, pieces)
        except (KeyboardInterrupt, OSError, BrokenProcessPool) as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            reason = 'interrupted' if interrupted else first_line(error)
            raise OSError(
                f'{reason} (what is finished is kept in {out}, and the same command goes on from there)'
            ) from error
        print_shares(plan, counts)


def read_begun(settings, out):
    """What an earlier call left: meta.json of a complete dataset, or Preparation.begun, or {}.

    Refuses other settings.
    """
    begun = {}
    for path in (out / '.pieces' / 'begun.json', out / 'meta.json'):
        if not path.exists():
            continue
        with unreadable(f'{path} is damaged', f'delete {out}'):
            begun = json.loads(path.read_bytes())
            # Older datasets do not say it.
            before = {'text_column': 'text', **begun['asked']}
            if settings.val_fraction is None:  # what was chosen then
                settings.val_fraction = before['val_fraction']
            now = deciding_settings(settings)
            changed = [name for name in now if now[name] != before[name]]
        if changed:
            raise ValueError(
                f'{out} was begun with --{changed[0]}={before[changed[0]]}: keep the settings, '
                f'choose another --out, or delete {out}'
            )
    return begun


def deciding_settings(settings):
    """The settings that decide which bytes are written."""
    values = asdict(settings)
    del values['out'], values['workers']
    # Without a slash at the end.
    for name in ('source', 'tokenizer'):
        values[name] = str(Path(values[name]))
    return values


def check_complete(settings, out, meta):
    """Refuse a dataset whose token files are not as its meta.json says, and one whose source is here
    and has changed. The contents of token files are not read: training does that with --verify_data=True."""
    # Here, because it imports torch, which workers do not need.
    from lib.data import Dataset

    Dataset(out.absolute())
    # A commit of the hub does not change, and older datasets have no fingerprint.
    is_here = settings.source == 'stdlib' or os.path.isdir(settings.source)
    if is_here and 'fingerprint' in meta:
        print(f'{out} is here: comparing {settings.source} with what was read')
        pieces = units_and_pieces(Preparation(settings, meta))
        *_, (_, last) = itertools.islice(pieces, meta['files'][0])
        if last.name != meta['fingerprint']:
            raise ValueError(
                f'the files of --source={settings.source} or --tokenizer={settings.tokenizer} have '
                f'changed since {out} was made: delete {out}, or choose another --out'
            )


def check_space(plan):
    """Refuse a disk without room for the pieces and for the token files that are made of them."""
    tokens = plan.settings.tokens
    # Two bytes a token, twice. Without --tokens, what it takes is not known before it is read.
    needed = 4 * tokens
    need = f'{needed / 1e9:,.2f} GB, and what validation takes,' if tokens else 'an unknown part'
    # Pieces of an earlier call are used again, and its token files are written anew.
    present = [*plan.pieces.glob('*.ids'), *plan.out.glob('*/*.bin')]
    space = shutil.disk_usage(plan.out).free + sum(path.stat().st_size for path in present)
    splits = collections.Counter()
    for unit in plan.units:
        splits[unit.split] += len(unit.paths) or 1
    print(
        f'{splits.total():,} files, {splits["validation"]:,} of them validation (in a domain without '
        f'any, {plan.settings.val_fraction} of the documents are); needs {need} of the '
        f'{space / 1e9:,.2f} GB that are free in {plan.out}, its own files included'
    )
    if space < needed:
        raise OSError(
            f'not enough space for {need} in {plan.out}: make room, choose another --out '
            'or fewer --tokens (0: all that the source holds)'
        )


def merge_pieces(plan):
    """Write the token files from pieces, in reading order, until every domain is full.

    Returns {(split, domain): documents, tokens, bytes of text, pieces that they come from}, pieces.
    """
    counts = collections.defaultdict(collections.Counter)
    pieces = []
    trained, held_out = array.array('d'), set()
    total = plan.settings.tokens or None
    with (
        contextlib.ExitStack() as stack,
        open_workers(plan.workers) as submit,
        tqdm(total=total, unit='tok', unit_scale=True, disable=None) as bar,
        heartbeat(bar, plan.pieces),
    ):
        files = {}
        for target, path in token_files(plan).items():
            path.parent.mkdir(exist_ok=True)
            files[target] = stack.enter_context(open(path, 'wb'))

        for unit, piece, wait in submit_units(plan, counts, submit):
            if max(room(plan, counts).values()) <= 0:
                break
            if unit.split == 'train':
                # The validation files have been read: better now than after hours.
                check_documents(plan, counts, 'validation')
            wait()
            pieces.append(piece)
            append(plan, counts, files, unit, piece, trained, held_out)
            bar.update(sum(counts['train', domain]['tokens'] for domain in plan.shares) - bar.n)
        check_documents(plan, counts, 'train')
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return counts, pieces


@contextlib.contextmanager
def heartbeat(bar, pieces, seconds=10):
    """Let the bar say every few seconds how many tokens the pieces have, however long one takes."""
    over = threading.Event()

    def beat():
        while not over.wait(seconds):
            tokens = sum(path.stat().st_size for path in pieces.glob('*.ids')) // 2
            bar.set_postfix_str(f'{tokens:,} in pieces')

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def append(plan, counts, files, unit, piece, trained, held_out):
    """Append the documents of a piece to the token files and to `counts`, each domain's until it is
    full; the document that crosses the border is kept whole.

    trained: the places of texts that are trained on, as long as a domain has no validation document;
    held_out: of those that became one.
    """
    domains = list(plan.shares)
    is_lacking = not all(counts['validation', domain] for domain in domains)
    targets = set()
    with open(piece.with_suffix('.ids'), 'rb') as file:
        for number, tokens, size, place in np.fromfile(piece, DOCUMENT).tolist():
            ids = file.read(2 * tokens)
            domain = domains[number]
            if counts['train', domain]['tokens'] >= plan.goals[domain]:
                continue
            validation = unit.split == 'validation'
            if unit.split == 'hash':
                # At least one text of each domain is validation, and then all its copies are.
                if not counts['validation', domain] and place not in trained:
                    held_out.add(place)
                validation = place < plan.settings.val_fraction or place in held_out
            if not validation and is_lacking:
                trained.append(place)
            target = 'validation' if validation else 'train', domain
            files[target].write(ids)
            targets.add(target)
            counts[target].update(documents=1, tokens=tokens, bytes=size)
    for target in targets:
        counts[target]['files'] += 1


def submit_units(plan, counts, submit):
    """(unit, its piece, a function that waits until the piece is finished), in reading order, while
    those after it are worked on. `counts` says what is merged by then."""
    # With fewer ahead, a slow unit would idle the workers that are done with those after it; with more,
    # more may be made in vain.
    ahead = 4 * plan.workers if plan.workers > 1 else 1
    running = collections.deque()
    for unit, piece in units_and_pieces(plan):
        wanted = room(plan, counts)
        known = plan.encoder.path, plan.encoder.sha256
        task = functools.partial(make_piece, unit, piece, wanted, *known, plan.settings)
        running.append((unit, piece, submit(task)))
        if len(running) == ahead:
            yield running.popleft()
    yield from running


def units_and_pieces(plan):
    """(unit, where its piece is), in reading order. The piece's name stands for the tokenizer, for the
    names of all files, and for the contents of those up to its own: pieces of others are not found,
    and made again."""
    names = [(unit.name, unit.split) for unit in plan.units]
    digest = hashlib.sha256(json.dumps([names, plan.shares, plan.encoder.sha256]).encode())
    for number, unit in enumerate(plan.units):
        for path in unit.paths:
            digest.update(sha256_of(path).encode())
        yield unit, plan.pieces / f'{number:06}_{digest.hexdigest()[:24]}'


@contextlib.contextmanager
def open_workers(number):
    """A function that submits a task, and returns a function that waits for its result.

    With one worker, this process does the task itself, when it is asked for the result.
    """
    if number == 1:
        yield lambda task: task
        return

    spawn = multiprocessing.get_context('spawn')
    pool = ProcessPoolExecutor(number, spawn, initializer=start_worker)
    try:
        yield lambda task: pool.submit(task).result
    finally:
        # What they are still at is not needed, and may take long: a large file, a hub that fails.
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(cancel_futures=True)


def room(plan, counts):
    """{domain: training tokens that are still wanted}; validation is read before any are there."""
    return {domain: goal - counts['train', domain]['tokens'] for domain, goal in plan.goals.items()}


# ---- The end -------------------------------------------------------------------------------------


def finish(plan, counts, pieces):
    """Write meta.json, after all that it describes is on the disk, and remove the pieces."""
    print('checking what was written')
    splits = collections.defaultdict(dict)
    for (split, domain), path in token_files(plan).items():
        entry = counts[split, domain]
        if path.stat().st_size != 2 * entry['tokens']:
            raise ValueError(
                f'{plan.pieces} is damaged: delete {plan.out}, and run the same command'
            )
        if entry:
            splits[split][domain] = {**entry, 'sha256': sha256_of(path)}
        else:
            path.unlink()
        sync_folder(path.parent)

    encoder = plan.encoder
    write_whole(plan.out / 'tokenizer.json', encoder.as_file())
    tokenizer_facts = {name: getattr(encoder, name) for name in ('name', 'sha256', 'eot')}
    tokenizer_facts['n_vocab'] = encoder.n_text
    meta = {
        'format': DATASET_FORMAT,
        **plan.begun,
        'fingerprint': pieces[-1].name,
        'seed': plan.settings.seed,
        'weights': plan.shares,
        'tokenizer': tokenizer_facts,
        'files': [len(pieces), len(plan.units)],
        'splits': splits,
    }
    write_json(plan.out / 'meta.json', meta)
    print(caution_about(splits) or '')
    shutil.rmtree(plan.pieces)


def token_files(plan):
    """{(split, domain): path}"""
    targets = itertools.product(SPLITS, plan.shares)
    return {(split, domain): plan.out / split / f'{domain}.bin' for split, domain in targets}


def check_documents(plan, counts, split):
    """Refuse a source without a document of a split, and a domain all of whose documents are held out."""
    if split == 'train' and any(unit.split == 'hash' for unit in plan.units):
        for domain in plan.shares:
            if counts['validation', domain] and not counts['train', domain]:
                raise ValueError(
                    f'{domain} has too few documents, and validation takes them all: add more, or '
                    'leave it out with --weights'
                )
    if not any(counts[split, domain] for domain in plan.shares):
        raise ValueError(
            f'{plan.settings.source} has no {split} document of {", ".join(plan.shares)}: choose other '
            f'--weights, or another --source, where files of validation may be left out'
        )


def print_shares(plan, counts):
    total = sum(counts['train', domain]['tokens'] for domain in plan.shares)
    print(f'{"domain":14}{"documents":>12}{"tokens":>16}{"share":>8}{"validation":>14}')
    for domain in plan.shares:
        train = counts['train', domain]
        held_out = counts['validation', domain]
        wanted = plan.goals[domain] if plan.settings.tokens else 1
        remark = '  the source has no more' if train['tokens'] < wanted else ''
        row = f'{domain:14}{train["documents"]:12,}{train["tokens"]:16,}{train["tokens"] / total:8.1%}'
        print(f'{row}{held_out["tokens"]:14,}{remark}')
    print(f'{plan.out} is complete')


def main():
    with one_line_errors():
        (settings,) = configure(PrepareConfig, doc=__doc__)
        prepare(settings)


if __name__ == '__main__':
    main()
