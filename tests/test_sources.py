"""lib/sources.py: which files of a source are read, as which split and domain, and how the hub is read."""

import errno
import os
import sys
import types
from pathlib import Path

import pytest
from conftest import contents, raises_one_line
from documents import make_source, read_meta, settings, texts_of, write_rows

from lib import sources
from lib.data import Dataset
from prepare_slimpajama import prepare

pytestmark = pytest.mark.usefixtures('here')

# ---- Folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'split, names',
    {
        'train': 'train/chunk1/example_train_0.jsonl.zst data/train-00000-of-00048.parquet '
        'testimony.jsonl trainees/contest.jsonl train/test.jsonl books/0.jsonl',
        'validation': 'validation/chunk1/example_holdout_0.jsonl.zst data/validation-00000.parquet '
        'val.jsonl valid/0.jsonl c4_dev.jsonl Eval.jsonl',
        'test': 'test/chunk1/example_holdout_0.jsonl.zst data/test0.jsonl test/train.jsonl',
    }.items(),
)
def test_whole_words_of_a_path_name_its_split(split, names):
    assert {sources.split_of(name) for name in names.split()} == {split}


def test_folders_of_any_language_are_domains_and_never_merge():
    names = ['中文', '日本', 'हिन्दी', 'café']
    for name in names:
        (Path('raw') / name).mkdir(parents=True)
        for n in range(3):
            (Path('raw') / name / f'{n}.txt').write_text(f'{name} {n}')
    out = Path('data/out')
    weights = {name: 1 + n for n, name in enumerate(names)}
    prepare(settings('raw', out, tokens=1000, weights=weights))
    for name in names:
        texts = texts_of(out / 'train' / f'{name}.bin')
        assert len(texts) == 2 and all(text.startswith(name) for text in texts)

    # And training accepts them.
    Dataset(out.absolute()).verify()

    for name in ('a b', 'a;b'):
        (Path('two') / name).mkdir(parents=True)
        (Path('two') / name / '1.txt').write_text('a text')
    with pytest.raises(ValueError, match="'a;b' .*'a_b'"):
        sources.find_units('two', '', {}, 1)


@pytest.mark.parametrize('target', ['raw', 'gone'])
def test_links_that_would_be_passed_over_are_refused(target, tmp_path):
    make_source(files=1, count=3)
    Path('raw/more').symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match='raw/more is a link'):
        sources.find_units('raw', '', {}, 1)


def test_a_folder_that_cannot_be_read_is_refused(monkeypatch):
    make_source(files=1, count=3)
    real = os.scandir

    def scandir(path):
        # The superuser, who may run this, can read every folder.
        if path.endswith('chunk1'):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    monkeypatch.setattr(os, 'scandir', scandir)
    with pytest.raises(PermissionError, match='chunk1'):
        sources.find_units('raw', '', {}, 1)


@pytest.mark.parametrize('names, refused', [(['train', 'val'], True), (['dev', 'test'], False)])
def test_splits_of_plain_text_are_not_taken_for_domains(names, refused, tmp_path):
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / 'a.txt').write_text('text')
    if not refused:  # domains may have such names
        assert set(sources.find_units('.', '', {}, 1)[1]) == set(names)
        return
    with pytest.raises(ValueError, match='train and val'):
        sources.find_units('.', '', {}, 1)


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
    prepare(settings('some/where', revision='v2', tokens=0))
    assert waits == [1, 1, 2]
    assert len(hub.downloads) == len(source) + 3 and set(hub.downloads) == set(source)
    prepare(settings(out='local', tokens=0))
    assert without_meta('out') == without_meta('local')


def test_a_hub_that_stays_away_is_given_up_after_the_promised_time(hub, waits):
    make_source(files=1, count=3, validation=False)
    hub.failures = [503] * 100
    with pytest.raises(ValueError, match='example_0.jsonl: the hub fails, .*503'):
        prepare(settings('some/where', revision='v2'))
    assert waits == [1, 2, 4, 8, 16, 32]


def test_a_branch_that_moves_on_is_read_at_the_commit_of_the_start(hub, waits):
    make_source()
    hub.failures = [0, 0, 0] + [401] * 7
    with pytest.raises(ValueError, match='401'):
        prepare(settings('some/where', revision='v2'))
    answer = hub.answer
    hub.answer = lambda request: 1 / 0 if request.url.path.endswith('/v2') else answer(request)
    prepare(settings('some/where', revision='v2'))
    assert read_meta('out')['revision'] == 'c0ffee'
    # A complete one asks the hub nothing.
    hub.commit = 'decaf'
    prepare(settings('some/where', revision='v2'))


def test_a_hub_that_has_no_rows_or_cannot_be_listed_is_one_line(hub):
    make_source('.txt', files=1, count=3)
    with pytest.raises(ValueError, match='some/where has no training file'):
        prepare(settings('some/where', revision='v2'))
    with raises_one_line('no folder some/where here'):
        prepare(settings('some/where', revision='v3'))


def test_lone_surrogates_of_rows_become_replacement_characters():
    write_rows(Path('raw/train.jsonl'), [('C4', 'a\ud800b'), ('C4', 'c')])
    prepare(settings(tokens=0))
    texts = texts_of('out/train/C4.bin')
    assert texts + texts_of('out/validation/C4.bin') in (
        ['a\ufffdb', 'c'],
        ['c', 'a\ufffdb'],
    )


def test_a_package_that_is_missing_is_one_line(monkeypatch):
    make_source('.parquet', files=1, count=3)
    for name in ('pyarrow', 'pyarrow.parquet'):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match='parquet: .*pyarrow'):
        prepare(settings())
