"""lib/sources.py: which files of a source are read, as which split and domain, and how the hub is read."""

import errno
import json
import os
import sys
import types
from pathlib import Path

import pytest
from conftest import contents, raises_one_line
from documents import (
    assert_equals,
    make_source,
    read_meta,
    recompute,
    run_prepare,
    texts_of,
    without_meta,
    write_records,
    write_rows,
)

from lib import sources
from lib.data import Dataset
from lib.hub import hub_error
from lib.sources import TABLE_2

pytestmark = pytest.mark.usefixtures('here')


def find_units(source):
    return sources.find_units(source, '', {}, 1)


# ---- Folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'split, names',
    {
        'train': 'train/chunk1/example_train_0.jsonl.zst data/train-00000-of-00048.parquet testimony.txt '
        'train/test.jsonl books/0.jsonl latest/0.txt dev.to/0.txt test-driven.txt c4-validation.0.json',
        'validation': 'validation/chunk1/example_holdout_0.jsonl.zst data/validation-00000-of-1.parquet '
        'val.jsonl valid/test.jsonl de/dev/0.txt Dev/0.txt',
        'test': 'test/chunk1/example_holdout_0.jsonl.zst data/test-0.parquet test/train.jsonl test.txt TEST/0.txt',
    }.items(),
)
def test_a_folder_or_a_file_named_as_a_split_says_it(split, names):
    assert {sources.split_of(name) for name in names.split()} == {split}


def test_folders_of_any_language_are_domains_and_never_merge():
    names = ['中文', 'हिन्दी', 'a b', 'a;b']
    write_texts('raw', [f'{name}/{n}.txt' for name in names for n in range(3)])
    out = Path('data/out')
    run_prepare('raw', out, tokens=0, val_fraction=0)
    for name in names:
        texts = texts_of(out / 'train' / f'{name}.bin')
        assert len(texts) == 2 and all(text.startswith(name) for text in texts)

    # And training accepts them.
    Dataset(out.absolute()).verify()


@pytest.mark.parametrize('target', ['raw', 'gone'])
def test_links_that_would_be_passed_over_are_refused(target, tmp_path):
    make_source(files=1, count=3)
    Path('raw/more').symlink_to(tmp_path / target)
    with raises_one_line('raw/more is a link'):
        find_units('raw')


def test_a_folder_that_cannot_be_read_is_refused(monkeypatch):
    make_source(files=1, count=3)
    real = os.scandir

    def scandir(path):
        # The superuser, who may run this, can read every folder.
        if path.endswith('chunk1'):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    monkeypatch.setattr(os, 'scandir', scandir)
    with raises_one_line('chunk1', of=OSError):
        find_units('raw')


def write_texts(folder, names):
    """Files that hold their own names."""
    for name in names:
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_each_split_and_domain_has_the_texts_of_its_folders(capsys):
    files = {
        'train/de/a.txt': 'train/de.bin',
        'train/b.txt': 'train/raw.bin',
        'valid/de/c.txt': 'validation/de.bin',
        'de/validation/d.txt': 'validation/de.bin',
        'val.txt': 'validation/raw.bin',
    }
    write_texts('raw', [*files, 'test/de/e.txt'])
    run_prepare(tokens=0)
    found = {}
    for path in Path('out').glob('*/*.bin'):
        found |= dict.fromkeys(texts_of(path), path.relative_to('out').as_posix())
    assert found == files
    assert 'such as test/de/e.txt: of the test split' in capsys.readouterr().out


def test_a_domain_without_a_file_for_validation_gives_some_documents():
    write_texts('raw', ['de/a.txt', 'de/dev.txt', *(f'en/{n}.txt' for n in range(9))])
    run_prepare(tokens=0)
    assert texts_of('out/validation/de.bin') == ['de/dev.txt']
    assert len(texts_of('out/validation/en.bin')) == 1 and len(texts_of('out/train/en.bin')) == 8


def test_every_file_is_in_a_unit_and_domains_weigh_as_many_bytes():
    write_texts('raw', ['de/a.txt', 'en/b.txt', 'en/c.txt', 'en/d.txt'])
    for path in Path('raw').rglob('*.txt'):
        path.write_bytes(b'x' * 2**21)
    units, weights, _ = find_units('raw')
    assert sorted(path.name for unit in units for path in unit.paths) == [
        f'{c}.txt' for c in 'abcd'
    ]
    assert len(units) > 2 and weights == {'de': 0.25, 'en': 0.75}


def test_a_byte_order_mark_is_no_text():
    for name, text in (('texts/a.txt', 'a \ufeff'), ('rows/a.jsonl', '{"text": "a \ufeff"}')):
        path = Path(name)
        path.parent.mkdir()
        path.write_text(f'\ufeff{text}')
        (unit,), _, _ = find_units(path.parent)
        assert [text for _, text in sources.documents(unit, None)] == ['a \ufeff']


# ---- What is read, and as what -----------------------------------------------------------------------


@pytest.mark.parametrize('ending', ['.json', '.json.gz', '.zst', '.jsonl.zstd', '.parquet'])
def test_an_ending_says_how_rows_are_written(ending):
    source = make_source(ending, files=1, count=20)
    run_prepare(tokens=0)
    assert_equals(Path('out'), recompute(source, TABLE_2, 0))


@pytest.mark.parametrize(
    'read, unread',
    [
        ('a.parquet', ['dataset_infos.json', 'README.txt', 'LICENSE']),
        ('a.json', ['requirements.txt']),
        ('de/a.txt', ['README.md']),
    ],
)
def test_what_describes_a_source_is_not_read_and_named(read, unread, capsys):
    write_texts('raw', [*unread, '.git/config'])
    Path('raw/.#a.txt').symlink_to('gone')  # as an editor locks a file
    write_records(Path('raw', read), [{'text': 'a' * 99}])
    (unit,), _, _ = find_units('raw')
    assert unit.name == read
    assert f'{len(unread)} files are not read, such as {min(unread)}' in capsys.readouterr().out


@pytest.mark.parametrize(
    'sizes, words',
    [
        ({'de/a.txt': 1, 'en/b.txt': 1, 'valid.txt': 1}, ['domain raw', 'valid.txt', 'move them']),
        ({'de/a.txt': 1, 'notes/b.txt': 0}, ['domain notes', 'notes/b.txt', 'empty']),
        # names that logs or reports cannot show, or use for something else
        ({'en/b.txt': 1, 'one\u2028two/a.txt': 1}, ['one\\u2028two', 'rename']),
        ({'en/b.txt': 1, 'train/mean/a.txt': 1}, ["'mean' of raw", 'rename']),
        ({'en/b.txt': 1, 'en/caf\udce9/c.txt': 1}, ['caf\\udce9', 'rename']),
        ({'en/a.jsonl': 0}, ['domain en', 'en/a.jsonl', 'empty']),
        # most of it would not be read
        ({'dataset_info.json': 9, 'data-0.arrow': 99}, ['data-0.arrow', 'not read', '.jsonl']),
        ({'README.txt': 9, 'books.jsonl.xz': 99}, ['books.jsonl.xz', 'not read', '.jsonl']),
        ({'a.jsonl': 9, 'a.txt': 99}, ['a.txt', 'not read', '.jsonl']),
        ({'notes.md': 99}, ['notes.md', 'not read', '.jsonl']),
    ],
    ids=ascii,
)
def test_a_source_that_training_could_not_use_is_refused_before_it_is_read(sizes, words):
    for name, size in sizes.items():
        path = Path('raw', name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    with raises_one_line(*words):
        run_prepare()
    assert not Path('out/.pieces').exists()


def test_text_that_is_not_utf_8_is_refused_by_its_file():
    write_texts('raw', [f'{n}.txt' for n in range(9)])
    Path('raw/3.txt').write_bytes('caf\xe9'.encode('latin-1'))
    with raises_one_line('raw/3.txt:', 'utf-8'):
        run_prepare()


def write_plain_rows(path, column, texts):
    """Rows of a text and of what nobody asks for. Parquet has a date beyond Python's, too."""
    more = {'when': 1, 'meta': {'url': 'x'}}
    if path.suffix == '.parquet':
        far = pytest.importorskip('pyarrow').scalar(2**50, 'timestamp[s]')
        more = {'when': far, 'meta': {'crawled': far}}
    write_records(path, [{**more, column: text} for text in texts])
    if path.suffix == '.jsonl':
        path.write_bytes(path.read_bytes()[:-1])  # the last line need not end


@pytest.mark.parametrize('suffix', ['.jsonl', '.parquet'])
@pytest.mark.parametrize('column', ['text', 'content'])
@pytest.mark.parametrize('on_hub', [False, True])
def test_rows_without_a_domain_have_their_folder_s(suffix, column, on_hub, hub):
    texts = {'train': ['eins', 'zwei', '', None], 'validation': ['drei']}
    for split, words in texts.items():
        write_plain_rows(Path(f'raw/de/{split}-0{suffix}'), column, words)
        write_plain_rows(Path(f'raw/{split}-1{suffix}'), column, [*words, 'one'])
    source, root = ('some/where', 'where') if on_hub else ('raw', 'raw')
    run_prepare(source, revision='v2', tokens=0, text_column=column)
    for split, words in texts.items():
        for domain, more in (('de', []), (root, ['one'])):
            found = texts_of(f'out/{split}/{domain}.bin')
            assert sorted(found) == sorted([word for word in words if word] + more)


def test_a_missing_column_is_named_with_those_that_are_there():
    for suffix, other in (('.jsonl', '.parquet'), ('.parquet', '.jsonl')):
        write_plain_rows(Path(f'raw{suffix}/a{suffix}'), 'content', ['a', 'b'])
        write_plain_rows(Path(f'raw{suffix}/b{other}'), 'text', ['a', 'b'])
        with raises_one_line(f'a{suffix}', '(there are when, meta, content)', '--text_column'):
            run_prepare(f'raw{suffix}', out=f'out{suffix}')
    write_texts('prose', ['a.txt'])
    with raises_one_line('--text_column=content', 'prose'):
        run_prepare('prose', text_column='content')


@pytest.mark.parametrize('suffix', ['.jsonl', '.parquet'])
def test_a_domain_that_is_spelled_as_json_within_a_row_is_read(suffix):
    source = make_source(suffix, files=2, count=30)
    for name, documents in source.items():
        rows = []
        for domain, text in documents:
            meta = json.dumps({'redpajama_set_name': f'RedPajama{domain}'})
            rows.append({'meta': meta, 'text': text})
        write_records(Path('raw', name), rows)
    run_prepare(tokens=0)
    assert_equals(Path('out'), recompute(source, TABLE_2, 0))


# ---- The hub -------------------------------------------------------------------------------------


class FakeHub:
    """What the hub's own client talks to in place of the network: one repository, some/where, whose
    branch v2 is at `commit`, and which has that commit only.

    failures: what becomes of the next downloads: an HTTP status from 400 on, how many bytes are missing,
    or the name of an error of status 403.
    """

    def __init__(self, folder):
        self.folder = folder
        self.commit = 'c0ffee'
        self.failures = []
        self.downloads = []

    def answer(self, request):
        import httpx2

        path = request.url.path
        if path in (f'/api/datasets/some/where/revision/{name}' for name in ('v2', self.commit)):
            return httpx2.Response(200, json={'id': 'some/where', 'sha': self.commit})
        if path == f'/api/datasets/some/where/tree/{self.commit}':
            entries = [{'type': 'directory', 'path': 'train', 'oid': ''}]
            for name, raw in contents(self.folder).items():
                entries.append({'type': 'file', 'path': name, 'size': len(raw), 'oid': ''})
            return httpx2.Response(200, json=entries)
        head, _, name = path.partition(f'/datasets/some/where/resolve/{self.commit}/')
        if head or not name:
            # What the client asks about itself, and another commit.
            return httpx2.Response(404)

        raw = (self.folder / name).read_bytes()
        if request.method == 'HEAD':
            size = {'Content-Length': str(len(raw))}
            return httpx2.Response(
                200, headers={'ETag': '"e"', 'X-Repo-Commit': self.commit, **size}
            )
        self.downloads.append(name)
        failure = self.failures.pop(0) if self.failures else 0
        if isinstance(failure, str):
            return httpx2.Response(403, headers={'X-Error-Code': failure})
        if failure >= 400:
            return httpx2.Response(failure, content=b'no')
        return httpx2.Response(200, content=raw[: len(raw) - failure])


@pytest.fixture
def hub(monkeypatch):
    httpx2 = pytest.importorskip('httpx2')
    client = pytest.importorskip('huggingface_hub.utils._http')
    hub = FakeHub(Path('raw'))
    transport = httpx2.MockTransport(hub.answer)
    before = client._GLOBAL_CLIENT_FACTORY
    client.set_client_factory(lambda: httpx2.Client(transport=transport))
    yield hub
    client.set_client_factory(before)


@pytest.fixture
def waits(monkeypatch):
    """The seconds that the retries have waited, without the waiting."""
    waits = []
    monkeypatch.setattr(sources, 'time', types.SimpleNamespace(sleep=waits.append))
    return waits


@pytest.mark.parametrize('suffix', ['.jsonl', '.jsonl.zst', '.parquet'])
def test_hub_files_survive_failures_and_equal_the_local_ones(suffix, hub, waits):
    source = make_source(suffix)
    Path('raw/README.md').write_text('not data')
    # Of the first download, and of the third one twice.
    hub.failures = [1, 0, 501, 1]
    run_prepare('some/where', revision='v2', tokens=0)
    assert waits == [1, 1, 2]
    # The smallest is read twice: at the start its first row says that they are SlimPajama's.
    assert len(hub.downloads) == len(source) + 4 and set(hub.downloads) == set(source)
    run_prepare(out='local', tokens=0)
    assert without_meta('out') == without_meta('local')


def test_a_hub_that_stays_away_is_given_up_after_the_promised_time(hub, waits):
    make_source(files=1, count=3, validation=False)
    hub.failures = [503] * 100
    with raises_one_line('example_0.jsonl: the hub fails,', '503', of=OSError):
        run_prepare('some/where', revision='v2')
    assert waits == [1, 2, 4, 8, 16, 32]


def test_a_hub_that_refuses_is_not_asked_again_and_its_reason_is_told(hub, waits):
    make_source(files=1, count=3, validation=False)
    for failure, words in (('GatedRepo', 'gated'), ('RepoNotFound', 'Not Found'), (410, '410')):
        hub.failures = [failure]
        with raises_one_line('example_0.jsonl', words, of=OSError):
            run_prepare('some/where', revision='v2')
        assert waits == [] and hub.failures == []
    for status in (408, 429):
        error = OSError('why')
        error.response = types.SimpleNamespace(status_code=status)
        assert hub_error(error) == ('why', True)
    assert hub_error(TimeoutError()) == ('TimeoutError', True)


def test_a_branch_that_moves_on_is_read_at_the_commit_of_the_start(hub, waits):
    make_source()
    hub.failures = [0, 0, 0] + [503] * 100
    with raises_one_line('503', 'the same command goes on', of=OSError):
        run_prepare('some/where', revision='v2')
    hub.failures = []
    answer = hub.answer
    hub.answer = lambda request: 1 / 0 if request.url.path.endswith('/v2') else answer(request)
    run_prepare('some/where', revision='v2')
    assert read_meta('out')['revision'] == 'c0ffee'
    # A complete one asks the hub nothing.
    hub.commit = 'decaf'
    run_prepare('some/where', revision='v2')


def test_a_hub_that_has_no_rows_or_cannot_be_listed_is_one_line(hub):
    make_source('.txt', files=1, count=3)
    with raises_one_line('some/where', 'not read'):
        run_prepare('some/where', revision='v2')
    with raises_one_line('no folder some/where here'):
        run_prepare('some/where', revision='v3')


def test_lone_surrogates_of_rows_become_replacement_characters():
    write_rows(Path('raw/train.jsonl'), [('C4', 'a\ud800b'), ('C4', 'c')])
    run_prepare(tokens=0)
    texts = texts_of('out/train/C4.bin') + texts_of('out/validation/C4.bin')
    assert sorted(texts) == ['a\ufffdb', 'c']


def test_a_package_that_is_missing_is_one_line(monkeypatch):
    make_source('.parquet', files=1, count=3)
    for name in ('pyarrow', 'pyarrow.parquet'):
        monkeypatch.setitem(sys.modules, name, None)
    with raises_one_line('parquet:', 'pyarrow', of=ValueError):
        run_prepare()
