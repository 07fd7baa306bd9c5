"""
Sources of documents: a hub repository, a folder of rows in SlimPajama's form or of plain text, and
Python's own library. All of them become a list of units; a unit's documents are read by one worker.

>>> units, shares, revision = find_units('stdlib', revision='', weights={}, seed=1337)
>>> domain, text = next(documents(units[0], scratch='.'))       # the first unit's first document
"""

import functools
import hashlib
import io
import itertools
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from configurator import first_line
from lib.tokenizer import HUB_ID

# The paper's Table 2, as printed.
TABLE_2 = {
    'CommonCrawl': 0.5,
    'C4': 0.2,
    'Github': 0.1,
    'Book': 0.05,
    'ArXiv': 0.05,
    'Wikipedia': 0.05,
    'StackExchange': 0.05,
}

# The words in a path that name its split.
SPLITS = {
    'train': 'train',
    'validation': 'validation',
    'valid': 'validation',
    'val': 'validation',
    'dev': 'validation',
    'eval': 'validation',
    'test': 'test',
}

# What is replaced in the name of a folder that becomes a domain and the name of its token files: of
# ASCII all but letters, digits and _.-, a dot in front, and what is no text (lone surrogates).
UNSAFE = re.compile(r'[^A-Za-z0-9_.\-\u00a1-\ud7ff\ue000-\U0010ffff]|^\.')

# Bytes in a line of .jsonl, and on average in four rows of .parquet. SlimPajama's longest books have some 10 MB.
MAX_LINE = 64 * 2**20

# Seconds after which a file that the hub does not give is asked for again, on top of what the hub's
# own client tries.
WAITS = (1, 2, 4, 8, 16, 32)


class Unit(NamedTuple):
    name: str  # path within the source: decides its place in the order and its documents' shuffling
    split: str  # 'train', 'validation', or 'hash': each document's hash decides
    read: object  # path -> iterator over (domain, text); picklable
    paths: tuple = ()  # of its files; () on the hub, where read() takes a folder for them
    size: int = 0  # bytes of plain text


# ---- Units ---------------------------------------------------------------------------------------


def find_units(source, revision, weights, seed):
    """Return the units of a source in reading order, the share of each domain, and the revision.

    source: a hub repository, read at `revision`, a folder, or 'stdlib'. The revision that comes back
    is the hub repository's commit, because the name of a branch may soon mean another one.
    weights: {domain: weight}; {}: Table 2, or for plain text each domain's share of the bytes.
    Units of the validation split come before those of training. The shares, {domain: share}, add
    up to 1. Raises ValueError if the source or the weights do not fit, OSError if the hub cannot be
    read.
    """
    files = []  # names
    texts = {}  # {domain: units of plain text}
    commit = ''
    if source == 'stdlib':
        texts = stdlib_units(seed)
    elif os.path.isdir(source):
        files = list_folder(source)
    elif HUB_ID.fullmatch(source):
        files, commit = list_hub(source, revision)
    else:
        raise ValueError(
            f"no source {source!r}: give an existing folder, a hub repository, or 'stdlib'"
        )

    rows = [row_unit(source, name, commit) for name in files if name.endswith(SUFFIXES)]
    units = [unit for unit in rows if unit.split != 'test']
    if rows and len(units) < len(files):
        unread = len(files) - len(units)
        print(
            f'{unread:,} of {len(files):,} files are not read: they are of the test split or no rows'
        )
    if files and not rows and not commit:
        texts = text_folder_units(source, files, seed)

    natural = {domain: sum(unit.size for unit in units) for domain, units in texts.items()}
    natural = natural or TABLE_2
    weights = weights or natural
    for domain in weights:
        if domain not in natural:
            raise ValueError(
                f'--weights names {domain!r}, which the source lacks: it has {", ".join(natural)}'
            )
        units += texts.get(domain, [])

    splits = {unit.split for unit in units}
    if not splits - {'validation'}:
        raise ValueError(
            f'{source} has no training file: wanted .jsonl, .jsonl.zst, .parquet or plain text'
        )
    if 'validation' not in splits:
        units = [unit._replace(split='hash') for unit in units]

    # Validation first, and the files of each split in an order that the seed decides.
    units.sort(key=lambda unit: (unit.split != 'validation', *seeded_place(seed, unit.name)))
    total = sum(weights.values())
    return units, {domain: weight / total for domain, weight in weights.items()}, commit


def is_here(source):
    return source == 'stdlib' or os.path.isdir(source)


def seeded_place(seed, name):
    """What to sort names by, for an order that the seed decides."""
    return hash_fraction(seed, name), name


def hash_fraction(seed, text):
    """A number in [0, 1) that depends on (seed, text) only."""
    raw = text.encode('utf-8', 'surrogatepass')
    digest = hashlib.blake2b(raw, digest_size=8, salt=seed.to_bytes(16, 'little')).digest()
    return int.from_bytes(digest, 'little') / 2**64


def list_folder(root):
    """The names of a folder's files, without hidden files and folders.

    Raises OSError for a folder that cannot be read, ValueError for one that is a link, because links
    may lead in a circle, and for a link to a file that is gone.
    """
    found = []
    for folder, folders, names in os.walk(root, onerror=refuse_folder):
        # In place: os.walk() goes on with what is left.
        folders[:] = [name for name in folders if not name.startswith('.')]
        for path in [Path(folder, name) for name in folders + names]:
            if path.is_symlink() and not path.is_file():
                raise ValueError(
                    f'{path} is a link to a folder, which is not followed, or to nothing: '
                    'put there what it should lead to, or remove it'
                )
            if path.is_file() and not path.name.startswith('.'):
                found.append(path.relative_to(root).as_posix())
    return found


def refuse_folder(error):
    raise error


def row_unit(source, name, commit):
    """A file in SlimPajama's form, of the hub if there is a commit."""
    if commit:
        return Unit(name, split_of(name), functools.partial(read_hub, source, commit, name))
    return Unit(name, split_of(name), read_rows, (Path(source, name),))


def split_of(name):
    """The split that a path names, such as 'train/chunk1/example_0.jsonl.zst' or 'data/dev-00.jsonl';
    'train' where it names none.

    Words are runs of letters. A folder decides before the files in it, and the first word that names
    a split before the others.
    """
    for word in re.findall('[a-z]+', name.lower()):
        if word in SPLITS:
            return SPLITS[word]
    return 'train'


def text_folder_units(root, names, seed):
    """{domain: units} of a folder of plain text, whose first-level sub-folders are the domains."""
    files = {}
    binary = 0
    for name in sorted(names):
        with open(Path(root, name), 'rb') as file:
            head = file.read(8192)
        if b'\0' in head:
            binary += 1
        elif head:
            folder, slash, _ = name.partition('/')
            folder = folder if slash else Path(root).resolve().name
            files.setdefault(folder, []).append(name)
    if binary:
        print(f'skipped {binary:,} binary files')

    splits = [folder for folder in files if folder.lower() in SPLITS]
    if len(splits) > 1 and 'train' in splits:
        raise ValueError(
            f'the sub-folders of plain text are domains, and {root} has {" and ".join(splits)}: '
            'all of it would be trained on; give the train folder alone as --source, or rename them'
        )

    units = {}
    for folder in sorted(files):
        domain = UNSAFE.sub('_', folder)
        if domain in units:
            raise ValueError(
                f'{folder!r} and another folder of {root} would both be the domain {domain!r}: '
                'rename one'
            )
        units[domain] = text_units(domain, root, files[folder], seed)
    return {domain: units[domain] for domain in sorted(units)}


def stdlib_units(seed):
    """{domain: units} of Python's own library: its sources, without tests, and help()'s topics."""
    root = Path(sysconfig.get_paths()['stdlib'])
    skip = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'pydoc_data'}
    names = []
    for path in root.rglob('*.py'):
        path = path.relative_to(root)
        if skip.isdisjoint(path.parts):
            names.append(path.as_posix())
    topics = 'pydoc_data/topics.py'
    size = sum(len(text) for _, text in read_topics())
    return {
        'Source': text_units('Source', root, names, seed),
        'Topics': [Unit(topics, 'hash', read_topics, (root / topics,), size)],
    }


def text_units(domain, root, names, seed):
    """Shuffle a domain's files, and deal them out to units of about 4 MB."""
    names = sorted(names, key=functools.partial(seeded_place, seed))
    size = sum(Path(root, name).stat().st_size for name in names)
    number = min(size // 2**22 + 1, len(names))
    # A document is a twentieth of its domain at most, so that one long file can be split, too.
    longest = min(max(size // 20, 2**14), 2**22)
    read = functools.partial(read_text, domain, longest)

    units = []
    for first in range(number):
        paths = tuple(Path(root, name) for name in names[first::number])
        units.append(Unit(names[first], 'hash', read, paths, size // number))
    return units


# ---- Documents: iterators over (domain, text), whose ValueErrors and OSErrors name the line ------


def documents(unit, scratch):
    """The documents of a unit. A file of the hub is downloaded into the folder `scratch` meanwhile.

    Raises ValueError, which names the unit and the line.
    """
    try:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            for path in unit.paths or [folder]:
                yield from unit.read(path)
    except (ValueError, OSError, ImportError) as error:
        raise ValueError(f'{unit.name}: {first_line(error)}') from error


def read_text(domain, longest, path):
    """A plain text file, cut at line ends where it is longer than `longest` characters."""
    with open(path, encoding='utf-8', errors='replace', newline='') as file:
        while piece := file.read(longest) + file.readline(longest):
            yield domain, piece


def read_topics(path=None):
    from pydoc_data.topics import topics

    return (('Topics', text) for text in topics.values())


def read_rows(path):
    """A .jsonl, .jsonl.zst or .parquet file in SlimPajama's form."""
    rows = parquet_rows if path.name.endswith('.parquet') else jsonl_rows
    for where, row in rows(path):
        match row:
            case {'text': str(text), 'meta': {'redpajama_set_name': str(name)}}:
                pass
            case _:
                form = '{"text": ..., "meta": {"redpajama_set_name": ...}}'
                raise ValueError(f'{where} is not {form}')
        domain = name.removeprefix('RedPajama')
        if domain not in TABLE_2:
            expected = ', '.join(TABLE_2)
            raise ValueError(f'{where}: unknown domain {name!r}, expected RedPajama + {expected}')
        yield domain, text


# Not with the package datasets: it takes a third more CPU time from text to tokens, silently
# shortens a .zst file that was cut off at a line's end, and takes a column of dates for dates.

SUFFIXES = ('.jsonl', '.jsonl.zst', '.parquet')


def jsonl_rows(path):
    with open_lines(path) as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE:
                raise ValueError(f'line {number} is longer than {MAX_LINE >> 20} MB')
            if line.isspace():
                continue

            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f'line {number} is broken JSON ({error})') from error
            yield f'line {number}', row


def open_lines(path):
    """A .jsonl or .jsonl.zst file, open for reading bytes."""
    if path.name.endswith('.jsonl'):
        return open(path, 'rb')
    # Even without a row, a zstd file has a header.
    if not path.stat().st_size:
        raise ValueError('the file is empty: its download was interrupted')
    # Not the package zstandard, which does not notice that a file was cut off.
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression='zstd'))


def parquet_rows(path):
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        columns = table.schema_arrow.names
        missing = {'text', 'meta'} - set(columns)
        if missing:
            raise ValueError(f'no column {min(missing)}: it has {", ".join(columns)}')

        number = 0
        # Few rows at a time, because each may be long.
        for batch in table.iter_batches(batch_size=4, columns=['text', 'meta']):
            if batch.nbytes > 4 * MAX_LINE:
                where = f'row {number + 1}, or one of the next three,'
                raise ValueError(f'{where} is longer than {MAX_LINE >> 20} MB')
            for row in batch.to_pylist():
                number += 1
                yield f'row {number}', row


# ---- The hub -------------------------------------------------------------------------------------


def list_hub(source, revision):
    """The names of the files of a hub repository, and the commit that `revision` is now."""
    try:
        from huggingface_hub import HfApi

        # Without `expand`, the hub lists all files.
        commit = HfApi().dataset_info(source, revision=revision, expand=['sha']).sha
        tree = HfApi().list_repo_tree(source, repo_type='dataset', revision=commit, recursive=True)
        # Folders have no size.
        return [entry.path for entry in tree if hasattr(entry, 'size')], commit
    except Exception as error:
        raise OSError(
            f'no folder {source} here, and the hub cannot list it ({first_line(error)})'
        ) from error


def read_hub(source, commit, name, folder):
    """A file of a hub repository in SlimPajama's form, which is downloaded into `folder`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    place = {'repo_type': 'dataset', 'revision': commit, 'local_dir': folder}
    for wait in (*WAITS, None):
        try:
            path = hf_hub_download(source, name, **place)
            break
        except Exception as error:  # whatever the hub's client and its HTTP library may raise
            reason = first_line(error)
            if wait is None:
                raise OSError(f'the hub fails, after {len(WAITS)} retries: {reason}') from error
            print(f'warning: the hub fails ({reason}); trying again', file=sys.stderr)
        time.sleep(wait)
    yield from read_rows(Path(path))
