"""
Sources of documents: a hub repository, a folder of rows or of plain text, and Python's own library.
All of them become a list of units; a unit's documents are read by one worker.

>>> units, shares, revision = find_units('stdlib', revision='', weights={}, seed=1337)
>>> domain, text = next(documents(units[0], scratch='.'))       # the first unit's first document
"""

import collections
import contextlib
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

from lib.files import first_line, is_domain, printable
from lib.hub import HUB_ID, hub_error

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

# What names a split: a folder, or a file whose whole name is the word or, as the hub names its own, the
# word before a number (data/validation-00000-of-00001.parquet).
SPLIT = re.compile(
    r'(?:^|/)(?:(?P<train>train)|(?P<test>test)|(?P<validation>validation|valid|val|dev))'
    r'(?:/|(?:\.|-\d)[^/]*$)',
    re.IGNORECASE,
)

# The endings of the files that are read, which say what they hold: rows (.zst, .zstd and .gz: of JSON
# lines), or plain text. A source is read as the first of these kinds that it has: other files describe
# rows in .json, and the README of some may be a .txt.
KINDS = ('.parquet', '.jsonl', '.zst', '.zstd', '.gz'), ('.json',), ('.txt',)

# How pyarrow calls what an ending says.
COMPRESSIONS = {'.zst': 'zstd', '.zstd': 'zstd', '.gz': 'gzip'}

# Bytes in a line of .jsonl, and on average in four rows of .parquet. SlimPajama's longest books have some 10 MB.
MAX_LINE = 64 * 2**20

# Bytes: a shorter text is not cut.
LEAST_CUT = 2**14

# Seconds after which a file that the hub does not give is asked for again, on top of what the hub's
# own client tries.
WAITS = (1, 2, 4, 8, 16, 32)


class Unit(NamedTuple):
    name: str  # path within the source: decides its place in the order and its documents' shuffling
    domain: str  # '': SlimPajama's, whose rows name their domains
    split: str  # 'train', 'validation', or 'hash': each document's hash decides
    read: object  # (path, domain) -> iterator over (domain, text); picklable
    paths: tuple  # of its files; () on the hub
    size: int  # bytes
    hub: tuple = ()  # (repository, commit), from which the file is downloaded


# ---- Units ---------------------------------------------------------------------------------------


def find_units(source, revision, weights, seed, column='text'):
    """Return the units of a source in reading order, the share of each domain, and the revision.

    source: a hub repository, read at `revision`, a folder, or 'stdlib'. The revision that comes back
    is the hub repository's commit, because the name of a branch may soon mean another one.
    weights: {domain: weight}; {}: Table 2 for SlimPajama, else each domain's share of the bytes.
    column: of the rows, which has the text.
    Units of the validation split come before those of training. The shares, {domain: share}, add
    up to 1. Raises ValueError if the source or the weights do not fit, OSError if the hub cannot be
    read.
    """
    commit = ''
    if source == 'stdlib':
        units = stdlib_units(seed)
    elif os.path.isdir(source):
        units = file_units(source, list_folder(source), commit, seed, column)
    elif HUB_ID.fullmatch(source) and not os.path.exists(source):
        sizes, commit = list_hub(source, revision)
        units = file_units(source, sizes, commit, seed, column)
    else:
        raise ValueError(
            f"no source {source!r}: give an existing folder, a hub repository, or 'stdlib'"
        )

    natural = natural_weights(units)
    weights = weights or natural
    for domain in weights:
        if domain not in natural:
            raise ValueError(
                f'--weights names {domain!r}, which the source lacks: it has {", ".join(natural)}'
            )
        if not natural[domain]:
            names = [unit.name for unit in units if unit.domain == domain]
            raise ValueError(
                f'the domain {domain} has nothing to train on: its files, such as {names[0]}, are of '
                'validation or empty; move them to the folder of the domain that they belong to, or choose '
                'domains with --weights'
            )
    units = [unit for unit in units if unit.domain in ('', *weights)]
    # Where no name of a domain says validation, each document's hash decides.
    held_out = {unit.domain for unit in units if unit.split == 'validation'}
    units = [unit if unit.domain in held_out else unit._replace(split='hash') for unit in units]
    if all(unit.split == 'validation' for unit in units):
        raise ValueError(f'{source} has no training file')
    # Validation first, and the files of each split in an order that the seed decides.
    units.sort(key=lambda unit: (unit.split != 'validation', *seeded_place(seed, unit.name)))
    total = sum(weights.values())
    return units, {domain: weight / total for domain, weight in weights.items()}, commit


def natural_weights(units):
    """{domain: bytes for training}, or Table 2 for SlimPajama."""
    weights = dict.fromkeys(sorted({unit.domain for unit in units}), 0)
    if '' in weights:
        return TABLE_2
    for unit in units:
        if unit.split == 'train':
            weights[unit.domain] += unit.size
    return weights


def seeded_place(seed, name):
    """What to sort names by, for an order that the seed decides."""
    return hash_fraction(seed, name), name


def hash_fraction(seed, text):
    """A number in [0, 1) that depends on (seed, text) only."""
    raw = text.encode('utf-8', 'surrogatepass')
    digest = hashlib.blake2b(raw, digest_size=8, salt=seed.to_bytes(16, 'little')).digest()
    return int.from_bytes(digest, 'little') / 2**64


def list_folder(root):
    """{name: bytes} of a folder's files, without hidden files and folders.

    Raises OSError for a folder that cannot be read, ValueError for one that is a link, because links
    may lead in a circle, and for a link to a file that is gone.
    """
    sizes = {}
    for folder, folders, names in os.walk(root, onerror=refuse_folder):
        # In place: os.walk() goes on with what is left.
        folders[:] = [name for name in folders if not name.startswith('.')]
        for name in folders + names:
            if name.startswith('.'):
                continue
            path = Path(folder, name)
            if path.is_symlink() and not path.is_file():
                raise ValueError(
                    f'{path} is a link to a folder, which is not followed, or to nothing: '
                    'put there what it should lead to, or remove it'
                )
            if path.is_file():
                sizes[path.relative_to(root).as_posix()] = path.stat().st_size
    return sizes


def refuse_folder(error):
    raise error


def file_units(source, sizes, commit, seed, column):
    """The units of a source's files, {name: bytes}; those of the hub have a commit."""
    files = files_to_read(source, sizes, is_text_read=not commit)
    for name in files:
        if not name.isprintable():  # such as one that is not UTF-8
            raise ValueError(f'{name!r} of {source} has a name that cannot be shown: rename it')
    splits = {name: split_of(name) for name in files}
    tell_unread([name for name in splits if splits[name] == 'test'], 'of the test split')
    splits = {name: split for name, split in splits.items() if split != 'test'}
    if not all(name.endswith('.txt') for name in splits):
        return row_units(source, splits, sizes, commit, column)
    if column != 'text':
        raise ValueError(f'--text_column={column}, but {source} has plain text and no rows')
    return text_folder_units(source, splits, seed)


def files_to_read(source, sizes, is_text_read):
    """The names of the files that are read, of the first kind that the source has.

    Raises ValueError if other files have more bytes: what they hold may be what was meant.
    """
    kinds = KINDS if is_text_read else KINDS[:-1]
    for endings in kinds:
        files = [name for name in sizes if name.endswith(endings)]
        if files:
            break
    unread = sizes.keys() - files
    size = sum(sizes[name] for name in files)
    size_unread = sum(sizes[name] for name in unread)
    if size_unread > size:
        raise ValueError(
            f'{len(unread):,} files of {source}, such as {max(unread, key=sizes.get)}, are not read, and '
            f'have more bytes ({size_unread:,}) than those that are ({size:,}): of '
            f'{"; ".join(map(", ".join, kinds))}, a source is read as the first kind that it has; convert '
            'them to it, or move them away, into a --source of their own'
        )
    tell_unread(unread, f'not {", ".join(endings)}')
    return files


def tell_unread(names, why):
    if names:
        print(f'{len(names):,} files are not read, such as {printable(min(names))}: {why}')


def split_of(name):
    """The split that a path names first, such as 'train/chunk1/example_0.jsonl.zst'; else 'train'."""
    match = SPLIT.search(name)
    return match.lastgroup if match else 'train'


def domain_of(source, name):
    """The first folder of a file's name that names no split, or else the source's own folder."""
    root = Path(os.path.realpath(source)).name
    folders = [folder for folder in name.split('/')[:-1] if not SPLIT.match(f'{folder}/')]
    domain = [*folders, root][0]
    if not is_domain(domain):
        raise ValueError(
            f'{domain!r} of {source} would be a domain, whose name logs use for something else or cannot '
            'show: rename the folder'
        )
    return domain


def row_units(source, splits, sizes, commit, column):
    """The units of files of rows, {name: split}."""
    read = functools.partial(read_rows, column=column)
    units = []
    for name, split in splits.items():
        paths = () if commit else (Path(source, name),)
        units.append(Unit(name, '', split, read, paths, sizes[name], (source, commit)))
    if is_slimpajama(units, column):
        return units
    return [unit._replace(domain=domain_of(source, unit.name)) for unit in units]


def is_slimpajama(units, column):
    """Whether rows name their domains. The first one of the smallest file tells, because the hub may
    have to send it."""
    for unit in sorted(units, key=lambda unit: unit.size):
        whole = unit._replace(read=lambda path, domain: rows_of(path, column))
        for _, row in documents(whole, scratch=None):
            return set_name(row) is not None
    return False


def text_folder_units(source, splits, seed):
    """The units of files of plain text, {name: split}."""
    groups = collections.defaultdict(list)
    for name, split in splits.items():
        groups[domain_of(source, name), split].append(name)
    units = []
    for (domain, split), names in groups.items():
        units += text_units(domain, source, names, seed, split)
    return units


def stdlib_units(seed):
    """The units of Python's own library: its sources, without tests, and help()'s topics."""
    root = Path(sysconfig.get_paths()['stdlib'])
    skip = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'pydoc_data'}
    paths = [path.relative_to(root) for path in root.rglob('*.py')]
    names = [path.as_posix() for path in paths if skip.isdisjoint(path.parts)]
    topics = 'pydoc_data/topics.py'
    size = sum(len(text) for _, text in read_topics())
    units = text_units('Source', root, names, seed)
    return [*units, Unit(topics, 'Topics', 'train', read_topics, (root / topics,), size)]


def text_units(domain, root, names, seed, split='train'):
    """Shuffle a domain's files of a split, and deal them out to units of about 4 MB."""
    names = sorted(names, key=functools.partial(seeded_place, seed))
    size = sum(Path(root, name).stat().st_size for name in names)
    number = min(size // 2**22 + 1, len(names))
    # A document is a twentieth of its domain at most, so that one long file can be split, too.
    longest = min(max(size // 20, LEAST_CUT), 2**22)
    read = functools.partial(read_text, longest=longest)

    units = []
    for first in range(number):
        paths = tuple(Path(root, name) for name in names[first::number])
        units.append(Unit(names[first], domain, split, read, paths, size // number))
    return units


# ---- Documents: iterators over (domain, text), whose ValueErrors and OSErrors name the line ------


DOWNLOAD = 'download.'  # how the folders begin in which files of the hub are downloaded


def documents(unit, scratch):
    """The documents of a unit. A file of the hub is downloaded into the folder `scratch` meanwhile.

    Raises ValueError, which names the file and the line, or ConnectionError where the hub fails.
    """
    name = unit.name
    try:
        with tempfile.TemporaryDirectory(prefix=DOWNLOAD, dir=scratch) as folder:
            for path in unit.paths or [download_rows(unit, folder)]:
                name = path if unit.paths else unit.name
                yield from unit.read(path, unit.domain)
    except ConnectionError as error:
        raise ConnectionError(f'{name}: {error}') from error
    except (ValueError, OSError, ImportError, OverflowError) as error:
        raise ValueError(f'{name}: {first_line(error)}') from error


def read_text(path, domain, longest):
    """A file of plain text, in UTF-8, cut at line ends where it is longer than `longest` characters."""
    with open(path, encoding='utf-8-sig', newline='') as file:
        while piece := file.read(longest) + file.readline(longest):
            yield domain, piece


def read_topics(path='', domain=''):
    from pydoc_data.topics import topics

    return ((domain, text) for text in topics.values())


def read_rows(path, domain='', column='text'):
    """A file of rows. domain: of all of them; '': SlimPajama's, whose rows name it."""
    for where, row in rows_of(path, column):
        yield domain or table_2_domain(where, row), row[column]


def table_2_domain(where, row):
    name = set_name(row)
    if name is None:
        form = '{"text": ..., "meta": {"redpajama_set_name": ...}}'
        raise ValueError(f'{where} is not {form}, as the others are')
    domain = str(name).removeprefix('RedPajama')
    if domain not in TABLE_2:
        expected = ', '.join(TABLE_2)
        raise ValueError(f'{where}: unknown domain {name!r}, expected RedPajama + {expected}')
    return domain


def set_name(row):
    """What a row of SlimPajama calls its domain, else None."""
    meta = row.get('meta')
    if isinstance(meta, str):
        # As its parquet mirrors have it.
        with contextlib.suppress(ValueError, RecursionError):
            meta = json.loads(meta)
    return meta.get('redpajama_set_name') if isinstance(meta, dict) else None


def rows_of(path, column):
    """(where it is, row) of each row of a .parquet file or one of JSON lines, all with a text."""
    rows = parquet_rows(path, column) if path.name.endswith('.parquet') else jsonl_rows(path)
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(
                f'{where} is a list or a value: write one {{"{column}": "..."}} a line'
            )
        if column in row and row[column] is None:
            continue  # a row without a text
        if not isinstance(row.get(column), str):
            raise ValueError(f'{where}: {no_text(column, row)}')
        yield where, row


def no_text(column, names):
    return (
        f'no text in column {column} (there are {", ".join(names)}): --text_column names it for all files; '
        'where they differ, rename it in some of them'
    )


# Not with the package datasets: it takes a third more CPU time from text to tokens, silently
# shortens a .zst file that was cut off at a line's end, and takes a column of dates for dates.


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
    """A file of lines, compressed as its name says, open for reading bytes."""
    if path.suffix not in COMPRESSIONS:
        return open(path, 'rb')
    # Even without a row, a compressed file has a header.
    if not path.stat().st_size:
        raise ValueError('the file is empty: its download was interrupted')
    # Not the package zstandard, which does not notice that a file was cut off.
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, COMPRESSIONS[path.suffix]))


def parquet_rows(path, column):
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        names = table.schema_arrow.names
        if column not in names:
            raise ValueError(no_text(column, names))
        # Of a struct, no more than is needed: another field may hold what Python has no type for.
        needed = (column, 'meta', 'meta.redpajama_set_name')
        columns = [leaf.path for leaf in table.schema if leaf.path in needed]

        number = 0
        # Few rows at a time, because each may be long.
        for batch in table.iter_batches(batch_size=4, columns=columns):
            if batch.nbytes > 4 * MAX_LINE:
                raise ValueError(
                    f'row {number + 1}, or one of the next three, is longer than {MAX_LINE >> 20} MB'
                )
            for row in batch.to_pylist():
                number += 1
                yield f'row {number}', row


# ---- The hub -------------------------------------------------------------------------------------


def list_hub(source, revision):
    """{name: bytes} of the files of a hub repository, and the commit that `revision` is now."""
    print(f'asking the hub for the files of {source}, and for a row')
    try:
        from huggingface_hub import HfApi

        # Without `expand`, the hub lists all files.
        commit = HfApi().dataset_info(source, revision=revision, expand=['sha']).sha
        tree = HfApi().list_repo_tree(source, repo_type='dataset', revision=commit, recursive=True)
        # Folders have no size.
        return {entry.path: entry.size for entry in tree if hasattr(entry, 'size')}, commit
    except Exception as error:
        raise OSError(
            f'no folder {source} here, and the hub cannot list it: {hub_error(error)[0]}'
        ) from error


def download_rows(unit, folder):
    """The path of a unit's file, which is downloaded from the hub into `folder`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    source, commit = unit.hub
    for wait in (*WAITS, None):
        try:
            path = hf_hub_download(
                source, unit.name, repo_type='dataset', revision=commit, local_dir=folder
            )
            return Path(path)
        except Exception as error:  # whatever the hub's client and its HTTP library may raise
            reason, may_pass = hub_error(error)
            if not may_pass:
                raise ConnectionError(f'the hub refuses: {reason}') from error
            if wait is None:
                message = f'the hub fails, after {len(WAITS)} retries: {reason}'
                raise ConnectionError(message) from error
            print(f'warning: the hub fails ({reason}); trying again', file=sys.stderr)
        time.sleep(wait)
