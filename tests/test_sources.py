"""lib/sources.py: which files of a source are read, as which split and domain, and how the hub is read."""

import errno
import gzip
import json
import os
import sys
import types
from pathlib import Path

import pytest
from conftest import contents, raises_one_line
from documents import make_source, read_meta, run_prepare, texts_of, write_records, write_rows

from lib import sources
from lib.data import Dataset

pytestmark = pytest.mark.usefixtures('here')


def find_units(source):
    return sources.find_units(source, '', {}, 1)


# ---- Folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'split, names',
    {
        'train': 'train/chunk1/example_train_0.jsonl.zst data/train-00000-of-00048.parquet '
        'testimony.jsonl trainees/contest.jsonl train/test.jsonl books/0.jsonl latest/household.txt',
        'validation': 'validation/chunk1/example_holdout_0.jsonl.zst data/validation-00000.parquet '
        'val.jsonl valid/0.jsonl c4_dev.jsonl Eval.jsonl wiki.heldout.tokens held-out/a valset.txt',
        'test': 'test/chunk1/example_holdout_0.jsonl.zst data/test0.jsonl test/train.jsonl myTest.txt',
    }.items(),
)
def test_whole_words_of_a_path_name_its_split(split, names):
    assert {sources.split_of(name) for name in names.split()} == {split}


def test_folders_of_any_language_are_domains_and_never_merge():
    names = ['中文', '日本', 'हिन्दी', 'café']
    write_texts('raw', [f'{name}/{n}.txt' for name in names for n in range(3)])
    out = Path('data/out')
    weights = {name: 1 + n for n, name in enumerate(names)}
    run_prepare('raw', out, tokens=1000, weights=weights)
    for name in names:
        texts = texts_of(out / 'train' / f'{name}.bin')
        assert len(texts) == 2 and all(text.startswith(name) for text in texts)

    # And training accepts them.
    Dataset(out.absolute()).verify()

    write_texts('two', ['a b/1.txt', 'a;b/1.txt'])
    with raises_one_line("'a;b'", "'a_b'"):
        find_units('two')


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


@pytest.mark.parametrize(
    'train, validation, left_out',
    [
        (['a.txt', 'de/b.train.txt'], ['holdout.md', 'de/Dev/c.txt'], ['de/test_set.txt']),
        (
            ['training/de/a.txt', 'training/b.txt'],
            ['hold-out/de/c.txt', 'hold-out/e.txt'],
            ['TEST/de/d.txt'],
        ),
        (['de/a.txt', 'de/b.txt', 'c.txt', 'd.txt'], [], ['myTest.log']),
    ],
)
def test_plain_text_that_a_path_holds_out_is_never_trained_on(train, validation, left_out, capsys):
    write_texts('raw', train + validation + left_out)
    run_prepare(tokens=0)
    texts = {'train': set(), 'validation': set()}
    for path in Path('out').glob('*/*.bin'):
        assert path.stem in ('de', 'raw')
        texts[path.parent.name].update(texts_of(path))
    if validation:
        assert texts == {'train': set(train), 'validation': set(validation)}
    else:
        assert texts['train'] | texts['validation'] == set(train)
    assert f'such as {left_out[0]}: of the test split' in capsys.readouterr().out


def test_where_nothing_else_is_to_be_trained_on_the_names_of_splits_are_domains():
    write_texts('raw', ['dev/a.txt', 'test/a.txt'])
    assert set(find_units('raw')[1]) == {'dev', 'test'}


def test_a_domain_without_a_file_for_validation_gives_some_documents():
    write_texts('raw', ['de/a.txt', 'de/dev.txt', *(f'en/{n}.txt' for n in range(9))])
    run_prepare(tokens=0)
    assert texts_of('out/validation/de.bin') == ['de/dev.txt']
    assert len(texts_of('out/validation/en.bin')) == 1 and len(texts_of('out/train/en.bin')) == 8


@pytest.mark.parametrize(
    'names, words',
    [
        (['de/a.txt', 'en/b.txt', 'valid.txt'], ['domain raw', 'valid.txt', 'rename']),
        (['mean/a.jsonl', 'en/b.jsonl'], ["'mean' of raw", 'rename']),
        (['en/b.txt', 'train/mean/a.txt'], ["'mean' of raw", 'rename']),
    ],
)
def test_domains_that_training_could_not_use_are_refused(names, words):
    write_texts('raw', names)
    for name in names:
        if name.endswith('.jsonl'):
            Path('raw', name).write_text('{"text": "a"}')
    with raises_one_line(*words):
        find_units('raw')


def test_a_byte_order_mark_is_no_text():
    Path('raw').mkdir()
    Path('raw/a.txt').write_bytes('\ufeffa \ufeff'.encode())
    Path('raw/b.txt').write_text('b')
    write_rows(Path('rows/c.jsonl'), [('C4', 'c')] * 3)
    Path('rows/c.jsonl').write_bytes(b'\xef\xbb\xbf' + Path('rows/c.jsonl').read_bytes())
    run_prepare(tokens=0)
    texts = [text for path in Path('out').glob('*/raw.bin') for text in texts_of(path)]
    assert sorted(texts) == ['a \ufeff', 'b']
    run_prepare('rows', 'out2', tokens=0)
    assert texts_of('out2/train/C4.bin') == ['c'] * 2


# ---- What holds rows, and which ------------------------------------------------------------------


@pytest.mark.parametrize(
    'name', ['rows', 'rows.txt', 'x/a.JSON', 'a.ndjson', 'a.json.gz', 'a.json.zst']
)
def test_rows_are_rows_whatever_their_file_is_called(name, capsys):
    documents = [('C4', 'a b'), ('Book', 'c'), ('C4', 'd'), ('Book', '{')]
    path = Path('raw', name)
    write_rows(path, documents)
    if name.endswith('.gz'):
        path.write_bytes(gzip.compress(path.read_bytes()))
    write_texts('raw', ['NOTES.md'])
    run_prepare(tokens=0, weights={'C4': 1, 'Book': 1})
    read = []
    for path in Path('out').glob('*/*.bin'):
        read += [(path.stem, text) for text in texts_of(path)]
    assert sorted(read) == sorted(documents)
    assert 'such as NOTES.md: rows and plain text' in capsys.readouterr().out


def test_a_few_rows_among_plain_text_are_left_out_by_name(capsys):
    write_texts('raw', [f'{n}.py' for n in range(30)])
    Path('raw/messages').write_text('{\n "lang": "en",\n "text": "Hello"\n}')
    Path('raw/settings').write_text('{\n "lang": "en"\n}')
    units, _, _ = find_units('raw')
    names = {path.name for unit in units for path in unit.paths}
    assert 'messages' not in names and 'settings' in names and len(names) == 31
    assert 'such as messages: rows and plain text' in capsys.readouterr().out


@pytest.mark.parametrize(
    'text, word',
    [('[{"text": "a"}, {"text": "b"}]', 'a list'), ('{\n "text": "a"\n}', 'broken JSON')],
)
def test_json_that_is_not_one_object_a_line_is_refused(text, word):
    Path('raw').mkdir()
    Path('raw/all').write_text(text)
    with raises_one_line('all: line 1', word):
        run_prepare()


def test_one_short_text_or_file_of_rows_beside_the_folders_is_left_out_by_name(capsys):
    write_texts('raw', [f'{domain}/{n}.txt' for domain in ('wiki', 'books') for n in range(20)])
    Path('raw/README.md').write_text('What these are.')
    Path('raw/books/fixture.jsonl').write_text('{"text": "a"}')
    units, shares, _ = find_units('raw')
    assert list(shares) == ['books', 'wiki'] and sum(len(unit.paths) for unit in units) == 40
    out = capsys.readouterr().out
    assert 'such as README.md: the only text' in out and 'such as books/fixture.jsonl: rows' in out

    # But not one that is named as validation: it is in the wrong place.
    Path('raw/README.md').rename('raw/validation.txt')
    with raises_one_line('raw', 'validation.txt', 'move them'):
        find_units('raw')


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
    for suffix, words in (
        ('.jsonl', ['line 1', '--text_column']),
        ('.parquet', ['--text_column', 'content']),
    ):
        write_plain_rows(Path(f'raw{suffix}/a{suffix}'), 'content', ['a', 'b'])
        with raises_one_line(f'a{suffix}', *words):
            run_prepare(f'raw{suffix}')
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
    make_source(suffix, files=2, count=30, folder=Path('usual'))
    run_prepare('usual', 'usual_out', tokens=0)
    assert without_meta('out') == without_meta('usual_out')


# ---- The hub -------------------------------------------------------------------------------------


class FakeHub:
    """What the hub's own client talks to in place of the network: one repository, some/where, whose
    branch v2 is at `commit`, and which has that commit only.

    failures: what becomes of the next downloads, one number each: an HTTP status from 400 on, or how
    many bytes are missing.
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


def without_meta(out):
    return {name: raw for name, raw in contents(out).items() if name != 'meta.json'}


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


def test_a_branch_that_moves_on_is_read_at_the_commit_of_the_start(hub, waits):
    make_source()
    hub.failures = [0, 0, 0] + [401] * 7
    with raises_one_line('401', 'the same command goes on', of=OSError):
        run_prepare('some/where', revision='v2')
    answer = hub.answer
    hub.answer = lambda request: 1 / 0 if request.url.path.endswith('/v2') else answer(request)
    run_prepare('some/where', revision='v2')
    assert read_meta('out')['revision'] == 'c0ffee'
    # A complete one asks the hub nothing.
    hub.commit = 'decaf'
    run_prepare('some/where', revision='v2')


def test_a_hub_that_has_no_rows_or_cannot_be_listed_is_one_line(hub):
    make_source('.txt', files=1, count=3)
    with raises_one_line('some/where has no training file'):
        run_prepare('some/where', revision='v2')
    with raises_one_line('no folder some/where here'):
        run_prepare('some/where', revision='v3')


def test_lone_surrogates_of_rows_become_replacement_characters():
    write_rows(Path('raw/train.jsonl'), [('C4', 'a\ud800b'), ('C4', 'c')])
    run_prepare(tokens=0)
    texts = texts_of('out/train/C4.bin')
    assert texts + texts_of('out/validation/C4.bin') in (
        ['a\ufffdb', 'c'],
        ['c', 'a\ufffdb'],
    )


def test_a_package_that_is_missing_is_one_line(monkeypatch):
    make_source('.parquet', files=1, count=3)
    for name in ('pyarrow', 'pyarrow.parquet'):
        monkeypatch.setitem(sys.modules, name, None)
    with raises_one_line('parquet:', 'pyarrow', of=ValueError):
        run_prepare()
