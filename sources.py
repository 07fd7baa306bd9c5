"""
Sources of documents: a hub repository, a folder of rows in SlimPajama's form or of plain text, and
Python's own library. All of them become a list of units; a unit's documents are read by one worker.

>>> units, shares = find_units('stdlib', revision='', weights={}, seed=1337)
>>> domain, text = next(units[0].read())                # the first unit's first document
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
import time
from pathlib import Path
from typing import NamedTuple

from configurator import first_line
from tokenizer import HUB_ID

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

# Bytes in a line of .jsonl, characters in a row. SlimPajama's longest books have some 10 MB.
MAX_LINE = 64 * 2**20

# Bytes of a hub file that are asked for at a time: they bound the memory, and what a lost connection
# costs.
RANGE = 8 * 2**20
# A range that does not come is asked for again after 1, 2, 4, ... 32 seconds. Each time, the hub's own
# client tries twice: it waits a second in between, or as long as a server that limits the rate says.
RETRIES = 6
# After these HTTP statuses it is not: no access, or not there.
FINAL_STATUSES = (401, 403, 404)


class Unit(NamedTuple):
    name: str  # path within the source: decides its place in the order and its documents' shuffling
    split: str  # 'train', 'validation', or 'hash': each document's hash decides
    size: int  # bytes in the source
    read: object  # () -> iterator over (domain, text); picklable


# ---- Units ---------------------------------------------------------------------------------------


def find_units(source, revision, weights, seed):
    """Return the units of a source in reading order, and the share of each domain.

    source: a hub repository, read at `revision`, a folder, or 'stdlib'.
    weights: {domain: weight}; {}: Table 2, or for plain text each domain's share of the bytes.
    Units of the validation split come before those of training. The shares, {domain: share}, add
    up to 1. Raises ValueError if the source or the weights do not fit, OSError if the hub cannot be
    read.
    """
    # Either a list of units in SlimPajama's form, or {domain: units} of plain text.
    rows = []
    texts = {}
    if source == 'stdlib':
        texts = stdlib_units(seed)
    elif os.path.isdir(source):
        paths = visible_files(source)
        rows = folder_units(source, paths)
        if not rows:
            texts = text_folder_units(source, paths, seed)
        elif len(rows) < len(paths):
            print(
                f'{rows[0].name} makes {source} a folder of rows: its {len(paths) - len(rows):,} other '
                'files are not read'
            )
    elif HUB_ID.fullmatch(source):
        rows = hub_units(source, revision)
    else:
        raise ValueError(
            f"no source {source!r}: give an existing folder, a hub repository, or 'stdlib'"
        )

    natural = {domain: sum(unit.size for unit in units) for domain, units in texts.items()}
    if not natural:
        natural = TABLE_2
    weights = weights or natural
    missing = [domain for domain in weights if domain not in natural]
    if missing:
        raise ValueError(
            f'--weights names {missing[0]!r}, which the source lacks: it has {", ".join(natural)}'
        )

    units = [unit for unit in rows if unit.split != 'test']
    if len(units) < len(rows):
        print(
            f'not read, for their split is test: {len(rows) - len(units):,} of {len(rows):,} files'
        )
    for domain in weights:
        units += texts.get(domain, [])

    splits = {unit.split for unit in units}
    if not splits - {'validation'}:
        raise ValueError(
            f'{source} has no training file: wanted .jsonl, .jsonl.zst, .parquet or plain text'
        )
    if 'validation' not in splits:
        units = [unit._replace(split='hash') for unit in units]

    units.sort(key=functools.partial(reading_order, seed))
    total = sum(weights.values())
    return units, {domain: weight / total for domain, weight in weights.items()}


def reading_order(seed, unit):
    """Validation first, and the files of each split in an order that the seed decides."""
    return unit.split != 'validation', hash_fraction(seed, unit.name), unit.name


def hash_fraction(seed, text):
    """A number in [0, 1) that depends on (seed, text) only."""
    raw = text.encode('utf-8', 'surrogatepass')
    digest = hashlib.blake2b(raw, digest_size=8, salt=seed.to_bytes(16, 'little')).digest()
    return int.from_bytes(digest, 'little') / 2**64


def visible_files(root):
    """The files of a folder in the order of their paths, without hidden files and folders.

    Raises OSError for a folder that cannot be read, ValueError for one that is a link, because links
    may lead in a circle, and for a link to a file that is gone.
    """
    paths = []
    for folder, folders, names in os.walk(root, onerror=refuse_folder):
        # In place: os.walk() goes on with what is left.
        folders[:] = [name for name in folders if not name.startswith('.')]
        for path in [Path(folder, name) for name in folders]:
            if path.is_symlink():
                raise ValueError(
                    f'{path} is a link to a folder, and those are not followed: '
                    'put the folder itself there, or remove the link'
                )
        for path in [Path(folder, name) for name in names if not name.startswith('.')]:
            if path.is_file():
                paths.append(path)
            elif not path.exists():
                raise ValueError(
                    f'{path} is a link to a file that does not exist: bring the file back, or remove '
                    'the link'
                )
    return sorted(paths)


def refuse_folder(error):
    raise error


def folder_units(root, paths):
    """The units of a folder in SlimPajama's form; none where no file has one of its suffixes."""
    units = []
    for path in paths:
        reader = row_reader(path.name)
        if reader:
            name = path.relative_to(root).as_posix()
            read = functools.partial(documents, reader, functools.partial(open, path, 'rb'))
            units.append(Unit(name, split_of(name), path.stat().st_size, read))
    return units


def hub_units(source, revision):
    """The units of a hub repository in SlimPajama's form."""
    units = []
    for name, size in list_hub(source, revision):
        reader = row_reader(name)
        if reader:
            open_file = functools.partial(open_hub, source, revision, name, size)
            read = functools.partial(documents, reader, open_file)
            units.append(Unit(name, split_of(name), size, read))
    return units


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


def text_folder_units(root, paths, seed):
    """{domain: units} of a folder of plain text, whose first-level sub-folders are the domains."""
    files = {}
    binary = 0
    for path in paths:
        with open(path, 'rb') as file:
            head = file.read(8192)
        if b'\0' in head:
            binary += 1
        elif head:
            inside = path.relative_to(root).parts
            folder = inside[0] if len(inside) > 1 else Path(root).resolve().name
            files.setdefault(folder, []).append(path)

    if binary:
        print(f'skipped {binary:,} binary files')

    splits = [folder for folder in files if folder.lower() in SPLITS]
    if len(splits) > 1 and 'train' in splits:
        raise ValueError(
            f'the sub-folders of plain text are domains, and {root} has {" and ".join(sorted(splits))}: '
            'all of it would be trained on; give the train folder alone as --source, or rename them'
        )

    folders = {}
    for folder in sorted(files):
        domain = UNSAFE.sub('_', folder)
        if domain in folders:
            raise ValueError(
                f'the folders {folders[domain]!r} and {folder!r} of {root} would both be the domain '
                f'{domain!r}: rename one'
            )
        folders[domain] = folder
    return {
        domain: text_units(domain, root, files[folders[domain]], seed) for domain in sorted(folders)
    }


def stdlib_units(seed):
    """{domain: units} of Python's own library: its sources, without tests, and help()'s topics."""
    root = sysconfig.get_paths()['stdlib']
    skip = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'pydoc_data'}
    paths = [
        path for path in Path(root).rglob('*.py') if skip.isdisjoint(path.relative_to(root).parts)
    ]
    size = sum(len(text) for _, text in read_topics())
    return {
        'Source': text_units('Source', root, paths, seed),
        'Topics': [Unit('pydoc_data/topics.py', 'hash', size, read_topics)],
    }


def text_units(domain, root, paths, seed):
    """Shuffle a domain's files, and deal them out to units of about 4 MB."""
    names = {path.relative_to(root).as_posix(): path for path in paths}
    order = sorted(names, key=lambda name: (hash_fraction(seed, name), name))

    size = sum(path.stat().st_size for path in paths)
    number = min(size // 2**22 + 1, len(order))
    # A document is a twentieth of its domain at most, so that one long file can be split, too.
    longest = min(max(size // 20, 2**14), 2**22)

    units = []
    for first in range(number):
        hand = order[first::number]
        read = functools.partial(read_text, domain, [names[name] for name in hand], longest)
        units.append(Unit(hand[0], 'hash', size // number, read))
    return units


# ---- Documents: iterators over (domain, text), whose ValueErrors and OSErrors name the line ------


def read_text(domain, paths, longest):
    """Plain text files, cut at line ends where they are longer than `longest` characters."""
    for path in paths:
        with open(path, encoding='utf-8', errors='replace', newline='') as file:
            while piece := file.read(longest) + file.readline(longest):
                yield domain, piece


def read_topics():
    from pydoc_data.topics import topics

    return (('Topics', text) for text in topics.values())


def documents(rows, open_file):
    """The documents of the rows in SlimPajama's form that `rows` finds in the file `open_file()`."""
    with open_file() as file:
        for where, row in rows(file):
            match row:
                case {'text': str(text), 'meta': {'redpajama_set_name': str(name)}}:
                    pass
                case _:
                    form = '{"text": ..., "meta": {"redpajama_set_name": ...}}'
                    raise ValueError(f'{where} is not {form}')
            if len(text) > MAX_LINE:
                raise ValueError(f'{where} has a text of more than {MAX_LINE:,} characters')

            domain = name.removeprefix('RedPajama')
            if domain not in TABLE_2:
                domains = ', '.join(TABLE_2)
                raise ValueError(
                    f'{where}: unknown domain {name!r}, expected RedPajama + {domains}'
                )
            yield domain, text


# ---- Rows: iterators over (where, row) of a file that is open for reading bytes ------------------


def row_reader(name):
    """The function that reads a file of this name, or None."""
    for suffix, reader in ROWS.items():
        if name.endswith(suffix):
            return reader
    return None


def jsonl_rows(file):
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


def zst_rows(file):
    # Even without a row, a zstd file has a header.
    if not file.peek(1):
        raise ValueError('the file is empty: its download was interrupted')
    # Not the package zstandard, which does not notice that a file was cut off.
    stream = import_pyarrow().input_stream(file, compression='zstd')
    with stream, io.BufferedReader(stream) as lines:
        yield from jsonl_rows(lines)


def parquet_rows(file):
    with import_pyarrow().parquet.ParquetFile(file) as table:
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


def import_pyarrow():
    # Plain text and .jsonl need no package.
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise OSError(f'{first_line(error)}; pip install pyarrow') from error
    return pyarrow


ROWS = {'.jsonl': jsonl_rows, '.jsonl.zst': zst_rows, '.parquet': parquet_rows}


# ---- The hub -------------------------------------------------------------------------------------


def commit_of(source, revision):
    """The commit that `revision` of a hub repository is now, because the name of a branch may soon mean
    another one; of other sources, `revision` itself."""
    if source == 'stdlib' or os.path.isdir(source) or not HUB_ID.fullmatch(source):
        return revision
    try:
        from huggingface_hub import HfApi

        # Without `expand`, the hub lists all files.
        return HfApi().dataset_info(source, revision=revision, expand=['sha']).sha
    except Exception as error:
        raise no_hub(source, error) from error


def no_hub(source, error):
    reason = first_line(error)
    return OSError(f'no folder {source} here, and the hub cannot list it ({reason})')


def list_hub(source, revision):
    """[(path, bytes)] of a dataset repository."""
    try:
        from huggingface_hub import HfApi

        api = HfApi()
        tree = api.list_repo_tree(source, repo_type='dataset', revision=revision, recursive=True)
        # Folders have no size.
        return [(entry.path, entry.size) for entry in tree if hasattr(entry, 'size')]
    except Exception as error:
        raise no_hub(source, error) from error


def open_hub(source, revision, path, size):
    """A file of a hub repository, of `size` bytes, open for reading."""
    return io.BufferedReader(HubFile(source, revision, path, size), RANGE)


class HubFile(io.RawIOBase):
    """A file of a hub repository, read range by range.

    When the connection fails: wait, and ask for the same range again.
    """

    def __init__(self, source, revision, path, size):
        self.source = source
        self.revision = revision
        self.path = path
        self.size = size
        self.place = 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}
        self.place = origin[whence] + offset
        return self.place

    def readinto(self, buffer):
        count = min(len(buffer), RANGE, self.size - self.place)
        if count <= 0:
            return 0
        buffer[:count] = self.fetch(self.place, self.place + count)
        self.place += count
        return count

    def fetch(self, start, end):
        """Bytes `start` to `end`, however often that takes, within RETRIES."""
        failures = 0
        while True:
            try:
                return fetch_range(self.source, self.revision, self.path, start, end)
            except Exception as error:  # whatever the hub's client and its HTTP library may raise
                reason = first_line(error)
                if status_of(error) in FINAL_STATUSES:
                    raise OSError(
                        f'the hub refuses {self.source} at {self.revision}: {reason}'
                    ) from error
                failures += 1
                if failures > RETRIES:
                    raise OSError(f'the hub fails, after {RETRIES} retries: {reason}') from error
                if failures == 1:
                    print(f'warning: the hub fails ({reason}); trying again', file=sys.stderr)
                time.sleep(2 ** (failures - 1))


def status_of(error):
    """The HTTP status of an error of the hub's client; None where it has none."""
    return getattr(getattr(error, 'response', None), 'status_code', None)


def fetch_range(source, revision, path, start, end):
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    # Not HfFileSystem, which lists a file's whole folder before it opens the file.
    url = hf_hub_url(source, path, repo_type='dataset', revision=revision)
    # A server that compresses on the way sends the whole file in place of a range.
    headers = {
        **build_hf_headers(),
        'Range': f'bytes={start}-{end - 1}',
        'Accept-Encoding': 'identity',
    }
    # One more time is enough here, because fetch() retries, too.
    response = http_backoff('GET', url, headers=headers, timeout=30, max_retries=1)
    hf_raise_for_status(response)
    if len(response.content) != end - start:
        raise OSError(f'{len(response.content):,} bytes came, not {end - start:,}')
    return response.content
