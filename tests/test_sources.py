"""sources.py: which files of a source are read, as which split and domain, and how the hub is read."""

import errno
import os
import sys
import types

import pytest
from conftest import contents
from documents import make_source, read_meta, settings, texts_of, write_rows

import sources
from data import Dataset, TrainingRows
from prepare_slimpajama import prepare

# ---- Folders -------------------------------------------------------------------------------------


SPLIT_OF = {
    'train/chunk1/example_train_0.jsonl.zst': 'train',
    'validation/chunk1/example_holdout_0.jsonl.zst': 'validation',
    'test/chunk1/example_holdout_0.jsonl.zst': 'test',
    'data/train-00000-of-00048.parquet': 'train',
    'data/validation-00000-of-00001.parquet': 'validation',
    'data/test0.jsonl': 'test',
    'val.jsonl': 'validation',
    'valid/0.jsonl': 'validation',
    'c4_dev.jsonl': 'validation',
    'Eval.jsonl': 'validation',
    'testimony.jsonl': 'train',
    'trainees/contest.jsonl': 'train',
    'train/test.jsonl': 'train',
    'test/train.jsonl': 'test',
    'books/0.jsonl': 'train',
}


@pytest.mark.parametrize('name', SPLIT_OF)
def test_whole_words_of_a_path_name_its_split(name):
    assert sources.split_of(name) == SPLIT_OF[name]


def test_the_files_of_each_split_are_counted(tmp_path, capsys):
    make_source(tmp_path / 'raw')
    prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    text = capsys.readouterr().out
    assert 'not read, for their split is test: 1 of 7 files\n' in text
    assert '6 files (5 train, 1 validation); needs about' in text


def test_a_domain_of_one_long_document_that_misses_its_share_is_noted(tmp_path, capsys):
    documents = [('C4', 'a short one')] * 3000 + [('Book', 'x' * 1500)] * 20
    write_rows(tmp_path / 'raw' / 'train.jsonl', documents)
    for tokens, notes in ((2_000, 2), (20_000, 0)):
        weights = {'C4': 9, 'Book': 1}
        prepare(settings(tmp_path / 'raw', tmp_path / f'{tokens}', tokens, weights=weights))
        text = capsys.readouterr().err
        assert text.count('note: ') == notes
        assert ('note: Book has 45% of the tokens, not 10%' in text) == (notes > 0)


def test_files_that_are_not_read_are_counted(tmp_path, capsys):
    make_source(tmp_path / 'raw', files=1, count=3)
    (tmp_path / 'raw' / 'notes.txt').write_text('a text')
    prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=0))
    assert 'makes' in (text := capsys.readouterr().out)
    assert 'a folder of rows: its 1 other files are not read' in text


def test_folders_of_any_language_are_domains_and_never_merge(tmp_path, monkeypatch):
    names = ['中文', '日本', 'हिन्दी', 'café']
    for name in names:
        (tmp_path / 'raw' / name).mkdir(parents=True)
        for n in range(3):
            (tmp_path / 'raw' / name / f'{n}.txt').write_text(f'{name} {n}')
    out = tmp_path / 'data' / 'out'
    weights = {name: 1 + n for n, name in enumerate(names)}
    prepare(settings(tmp_path / 'raw', out, tokens=1000, weights=weights))
    for name in names:
        texts = texts_of(out / 'train' / f'{name}.bin')
        assert len(texts) == 2 and all(text.startswith(name) for text in texts)

    # And training accepts them.
    monkeypatch.chdir(tmp_path)
    dataset = Dataset('out')
    dataset.verify()
    assert sorted(TrainingRows(dataset, 4, 1, weights).domains) == sorted(names)

    for name in ('a b', 'a;b'):
        (tmp_path / 'two' / name).mkdir(parents=True)
        (tmp_path / 'two' / name / '1.txt').write_text('a text')
    with pytest.raises(ValueError, match="'a b' and 'a;b' of .* both be the domain 'a_b': rename"):
        prepare(settings(tmp_path / 'two', tmp_path / 'out2'))


def test_folders_that_would_be_passed_over_are_refused(tmp_path, monkeypatch):
    raw = tmp_path / 'raw'
    make_source(raw, files=1, count=3)
    (raw / 'more').symlink_to(raw)
    with pytest.raises(ValueError, match='raw/more is a link to a folder, .*: put the folder'):
        prepare(settings(raw, tmp_path / 'out'))
    (raw / 'more').rename(raw / '.more')
    prepare(settings(raw, tmp_path / 'out', tokens=0))

    def scandir(path):
        if path.endswith('chunk1'):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real_scandir(path)

    # The superuser, who may run this, can read every folder.
    real_scandir = os.scandir
    monkeypatch.setattr(os, 'scandir', scandir)
    with pytest.raises(PermissionError, match='chunk1'):
        sources.visible_files(str(raw))


# ---- The hub -------------------------------------------------------------------------------------


class FakeHub:
    """What the hub's own client talks to in place of the network: one repository, some/where, whose
    branch v2 is at `commit`, and which has that commit only.

    failures: what becomes of the next ranges that are asked for, one number each: an HTTP status
    from 400 on, or how many bytes are missing in the answer.
    """

    def __init__(self, folder):
        self.folder = folder
        self.commit = 'c0ffee'
        self.failures = []
        self.requests = []

    def answer(self, request):
        import httpx2

        if '/datasets/' not in request.url.path:
            # What the client asks about itself.
            return httpx2.Response(404)
        self.requests.append(f'{request.url.path} {request.headers.get("range", "")}')
        if request.url.path == '/api/datasets/some/where/revision/v2':
            return httpx2.Response(200, json={'id': 'some/where', 'sha': self.commit})
        if request.url.path == '/api/datasets/some/where/tree/c0ffee':
            entries = [{'type': 'directory', 'path': 'train', 'oid': ''}]
            for name, raw in contents(self.folder).items():
                entries.append({'type': 'file', 'path': name, 'size': len(raw), 'oid': ''})
            return httpx2.Response(200, json=entries)

        name = request.url.path.removeprefix('/datasets/some/where/resolve/c0ffee/')
        start, end = request.headers['range'].removeprefix('bytes=').split('-')
        raw = (self.folder / name).read_bytes()[int(start) : int(end) + 1]
        failure = self.failures.pop(0) if self.failures else 0
        if failure >= 400:
            return httpx2.Response(failure, content=b'no')
        return httpx2.Response(206, content=raw[: len(raw) - failure])


@pytest.fixture
def hub(tmp_path, monkeypatch):
    httpx2 = pytest.importorskip('httpx2')
    client = pytest.importorskip('huggingface_hub.utils._http')
    hub = FakeHub(tmp_path / 'raw')
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
    files = contents(out)
    del files['meta.json']
    return files


@pytest.mark.parametrize('suffix', ['.jsonl', '.jsonl.zst', '.parquet'])
def test_hub_files_survive_failures_and_equal_the_local_ones(
    suffix, hub, waits, tmp_path, monkeypatch
):
    make_source(tmp_path / 'raw', suffix)
    (tmp_path / 'raw' / 'README.md').write_text('not data')
    monkeypatch.setattr(sources, 'RANGE', 1000)
    # Of the first range, and of the third one twice.
    hub.failures = [1, 0, 0, 1, 501]
    prepare(settings('some/where', tmp_path / 'out', revision='v2'))
    assert waits == [1, 1, 2]
    # One request for the commit, one for the list, one for each range, and none that is not needed.
    ranges = [request for request in hub.requests if 'bytes=' in request]
    assert len(hub.requests) == len(ranges) + 2
    assert ranges[2] != ranges[3] == ranges[4] == ranges[5] != ranges[6]
    assert not any('README' in request or '/test/' in request for request in ranges)

    prepare(settings(tmp_path / 'raw', tmp_path / 'local'))
    assert without_meta(tmp_path / 'out') == without_meta(tmp_path / 'local')

    hub.failures = [1] * 9
    with pytest.raises(ValueError, match='the hub fails, after 6 retries: .* bytes came, not'):
        prepare(settings('some/where', tmp_path / 'out2', revision='v2'))


def test_a_branch_that_moves_on_is_read_at_the_commit_of_the_start(hub, waits, tmp_path):
    make_source(tmp_path / 'raw')
    hub.failures = [0, 0, 0, 401]
    with pytest.raises(ValueError, match='the 3 files before it are kept'):
        prepare(settings('some/where', tmp_path / 'out', revision='v2'))
    # The fake hub would not find the files at this one.
    hub.commit = 'decaf'
    prepare(settings('some/where', tmp_path / 'out', revision='v2'))
    assert read_meta(tmp_path / 'out')['revision'] == 'c0ffee'
    assert read_meta(tmp_path / 'out')['asked']['revision'] == 'v2'


def test_a_hub_that_stays_away_is_given_up_after_the_promised_time(
    hub, waits, tmp_path, monkeypatch
):
    client_waits = []
    client_time = types.SimpleNamespace(sleep=client_waits.append)
    monkeypatch.setattr('huggingface_hub.utils._http.time', client_time)
    make_source(tmp_path / 'raw', files=1, count=3, validation=False)
    hub.failures = [503] * 100
    with pytest.raises(ValueError, match='the hub fails, after 6 retries'):
        prepare(settings('some/where', tmp_path / 'out', revision='v2'))
    assert waits == [1, 2, 4, 8, 16, 32]
    assert client_waits == [1] * 7
    assert 100 - len(hub.failures) == 14


def test_what_is_wrong_with_a_hub_file_is_what_is_wrong_with_a_local_one(hub, waits, tmp_path):
    path = tmp_path / 'raw' / 'train.jsonl'
    path.parent.mkdir()
    row = '{"text": "%s", "meta": {"redpajama_set_name": "RedPajamaC4"}}\n'
    texts = [row % 'a\\ud800b', row % 'c']
    path.write_text(''.join(texts))
    prepare(settings('some/where', tmp_path / 'out', revision='v2'))
    prepare(settings(tmp_path / 'raw', tmp_path / 'local'))
    assert without_meta(tmp_path / 'out') == without_meta(tmp_path / 'local')

    path.write_text(''.join([*texts, '{"text": ']))
    for out, source in (('out2', 'some/where'), ('local2', tmp_path / 'raw')):
        with pytest.raises(ValueError, match='train.jsonl: line 3 is broken JSON'):
            prepare(settings(source, tmp_path / out, revision='v2'))
    assert waits == []


@pytest.mark.parametrize('status', sources.FINAL_STATUSES)
def test_a_refusal_is_not_tried_again(status, hub, waits, tmp_path):
    make_source(tmp_path / 'raw', files=1, count=3)
    hub.failures = [status]
    with pytest.raises(ValueError, match='the hub refuses some/where at c0ffee: .*') as error:
        prepare(settings('some/where', tmp_path / 'out', revision='v2'))
    assert str(status) in str(error.value) and waits == []


def test_a_package_that_is_missing_is_one_line(tmp_path, monkeypatch):
    make_source(tmp_path / 'raw', '.parquet', files=1, count=3)
    for name in ('pyarrow', 'pyarrow.parquet'):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match='pyarrow.*; pip install pyarrow'):
        prepare(settings(tmp_path / 'raw', tmp_path / 'out'))


# ---- Folders that are not what they seem ---------------------------------------------------------


def test_a_link_to_a_file_that_is_gone_is_refused(tmp_path):
    make_source(tmp_path / 'raw', files=1, count=3)
    (tmp_path / 'raw' / 'train' / 'more.jsonl').symlink_to(tmp_path / 'gone')
    with pytest.raises(ValueError, match='more.jsonl is a link to a file that does not exist'):
        sources.find_units(str(tmp_path / 'raw'), '', {}, 1)


@pytest.mark.parametrize('names, refused', [(['train', 'val'], True), (['dev', 'test'], False)])
def test_splits_of_plain_text_are_not_taken_for_domains(names, refused, tmp_path):
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / 'a.txt').write_text('text')
    if not refused:  # domains may have such names
        assert set(sources.find_units(str(tmp_path), '', {}, 1)[1]) == set(names)
        return
    with pytest.raises(ValueError, match='has train and val: all of it would be trained on'):
        sources.find_units(str(tmp_path), '', {}, 1)
