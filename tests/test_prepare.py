"""
prepare_slimpajama.py: the bytes on the disk equal a slow, obvious recomputation, however the work was
split or killed; and what is wrong is one line.
"""

import contextlib
import errno
import functools
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
import types
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from accidents import at_call, die
from conftest import ROOT, assert_one_line, assert_words, contents, raises_one_line
from documents import (
    WORDS,
    assert_equals,
    fraction,
    ids_of,
    make_documents,
    make_source,
    read_meta,
    recompute,
    run_prepare,
    settings,
    texts_of,
    without_meta,
    write_records,
    write_rows,
)
from programs import train_bpe
from runs import call

import prepare_slimpajama
from lib import sources, tokenizer
from lib.files import locked
from lib.sources import TABLE_2


@pytest.fixture(autouse=True)
def patient_disk(here, monkeypatch):
    """No power fails here, and waiting for the disk is what would take longest."""
    monkeypatch.setattr(os, 'fsync', lambda file: None)


# ---- The same bytes, whatever the way ------------------------------------------------------------


@pytest.mark.parametrize('validation', [True, False])
def test_rows_equal_recomputation(validation, tmp_path):
    source = make_source(validation=validation)
    tasks = ((20_000, {}), (0, {}), (9_000, {'Book': 3, 'C4': 1.5}), (0, {'Book': 1, 'C4': 1}))
    for number, (tokens, weights) in enumerate(tasks):
        out = tmp_path / f'out{number}'
        run_prepare('raw', out, tokens=tokens, weights=weights, val_fraction=0.1)
        assert_equals(out, recompute(source, weights or TABLE_2, tokens, val_fraction=0.1))


@pytest.mark.parametrize('tokens', [0, 500])
def test_no_validation_document_is_trained_on_in_whatever_file_or_domain_its_copies_are(tokens):
    weights = {'C4': 1, 'Book': 1, 'ArXiv': 1}
    for n in range(9):
        for domain in weights:
            documents = [(domain, f'{m} of {n % 3}') for m in range(9)]
            write_rows(Path(f'raw/train/{n}_{domain}.jsonl'), documents * 2)
    run_prepare(tokens=tokens, weights=weights, val_fraction=0.03)
    texts = {'train': set(), 'validation': set()}
    for path in Path('out').glob('*/*.bin'):
        texts[path.parent.name].update(texts_of(path))
    assert texts['validation'] and texts['validation'].isdisjoint(texts['train'])


def test_a_folder_of_plain_text_equals_recomputation():
    texts = {"b/it's; $(true) #1.txt": 'naïve'}
    for n in range(12):
        for name in (f'b/deep/er/{n}.txt', f'a.1/{n}.txt', f'{n}.txt'):
            texts[name] = f'{name}\r\n' + ' '.join(WORDS) * n
    for name, text in {**texts, 'b/binary.png': '\0', 'b/empty.txt': ''}.items():
        path = Path('corpus', name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline='')
    run_prepare('corpus', tokens=0)
    kept = [each for split in read_meta('out')['splits'].values() for each in split.values()]
    assert sum(each['bytes'] for each in kept) == sum(
        len(ids_of(text)) - 1 for text in texts.values()
    )

    # Small files of a domain make one unit, with the name of the first in seeded order.
    units = {}
    for name in sorted(texts, key=functools.partial(fraction, 1337)):
        domain = name.split('/')[0] if '/' in name else 'corpus'
        units.setdefault(domain, []).append(name)
    source = {names[0]: [(domain, texts[n]) for n in names] for domain, names in units.items()}
    assert_equals(Path('out'), recompute(source, dict.fromkeys(units, 1), 0, val_fraction=0.1))


def test_the_smallest_domain_of_plain_text_gets_ten_thousand_tokens_unless_it_was_begun_otherwise():
    for name, size in (('a/few', 2000), ('b', 9000)):
        for n in range(100):
            write_records(Path(f'raw/{name}/{n}.txt'), [f'{n:0{size - 3}}'])
    stop_halfway(out='older', tokens=0, val_fraction=0.005)
    for out, expected in (('out', 0.05), ('older', 0.005)):
        run_prepare(out=out, tokens=0)
        assert read_meta(out)['asked']['val_fraction'] == expected


def test_one_long_text_file_is_split():
    Path('raw').mkdir()
    lines = [f'line {n} of a play, {"word " * (n % 17)}\n' for n in range(20_000)]
    Path('raw/input.txt').write_text(''.join(lines))
    run_prepare(tokens=0)
    train = texts_of('out/train/raw.bin')
    validation = texts_of('out/validation/raw.bin')
    assert 15 < len(train) < 25 and len(validation) == 1
    assert sorted(''.join(train + validation).splitlines(True)) == sorted(lines)


def test_the_standard_library_needs_nothing_and_is_prepared_once(capsys):
    run_prepare('stdlib', tokens=200_000)
    meta = read_meta('out')
    assert [list(meta['splits'][split]) for split in meta['splits']] == [['Source', 'Topics']] * 2
    # The folder's tokenizer.json is that of bytes.
    assert tokenizer.load('out').name == 'bytes' == meta['tokenizer']['name']
    before = contents('out')
    run_prepare('stdlib', tokens=200_000)
    assert 'complete' in capsys.readouterr().out.splitlines()[-1]
    assert contents('out') == before


def test_blocks_bound_the_memory_and_keep_every_document(monkeypatch):
    documents = make_documents(200, seed=3)
    read = []
    monkeypatch.setattr(prepare_slimpajama, 'BLOCK', 5_000)
    monkeypatch.setattr(sources, 'documents', lambda *_: (read.append(d) or d for d in documents))
    unit = types.SimpleNamespace(name='one')
    shuffled = prepare_slimpajama.shuffled_documents(unit, 1, scratch=None)
    first = next(shuffled)
    # Python spends some 200 bytes on a document, however short.
    assert sum(len(text) + 200 for _, text in read[:-1]) < 5_000
    assert sorted([first, *shuffled]) == sorted(d for d in documents if d[1])


# ---- Killed, interrupted, and continued ----------------------------------------------------------


def prepare_and_die(name, last):
    """Prepare in a process of its own that is killed at a call of os.<name>. Its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        setattr(os, name, at_call(last, getattr(os, name), die))
        run_prepare()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize('name', ['replace', 'mkdir', 'unlink', 'fsync'])
def test_killed_again_and_again_it_ends_with_the_same_bytes(name):
    make_source(validation=False, files=3)
    run_prepare(out='whole')
    kills = 0
    while (status := prepare_and_die(name, last=kills + 1)) != 0:
        assert status == -signal.SIGKILL
        kills += 1
    assert kills > 1
    assert contents('out') == contents('whole')


def test_killed_with_its_workers_it_goes_on():
    make_source(files=12, count=1500)
    options = dict(tokens=1_000_000, workers=2)
    words = [f'--{name}={value}' for name, value in vars(settings(**options)).items()]
    command = [sys.executable, ROOT / 'prepare_slimpajama.py', *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        while len(finished(Path('out'))) < 2:
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert process.wait(0.01) is None
        process.kill()
        process.communicate(timeout=60)  # its workers have its stderr, too: until they have ended
    assert not Path('out/meta.json').exists()
    assert_continues(**options)


def assert_continues(tokens=20_000, workers=1):
    """That the same command makes what it makes at once, and makes no piece twice."""
    before = finished(Path('out'))
    stop_halfway(tokens=tokens, workers=workers)
    assert before.items() <= finished(Path('out')).items()
    run_prepare(tokens=tokens, workers=workers)
    run_prepare(out='whole', tokens=tokens)
    assert contents('out') == contents('whole')


def finished(out):
    """{name: when it was written} of the finished pieces."""
    paths = [path for path in out.glob('.pieces/0*') if not path.suffix]
    return {path.name: path.stat().st_mtime_ns for path in paths}


def stop_halfway(error=KeyboardInterrupt, step='finish', **options):
    """Prepare until all pieces are merged, or the first is written (step='write_whole') or merged
    (step='append'). The message."""

    def fail(*arguments):
        raise error

    with pytest.MonkeyPatch.context() as patch, raises_one_line() as raised:
        patch.setattr(prepare_slimpajama, step, fail)
        run_prepare(**options)
    return str(raised.value)


@pytest.mark.parametrize(
    'step, error',
    [
        ('write_whole', BrokenProcessPool('died')),
        ('append', OSError(errno.ENOSPC, 'No space left')),
        ('finish', KeyboardInterrupt()),
    ],
)
def test_whatever_interrupts_it_is_one_line_and_it_goes_on(step, error):
    make_source()
    message = stop_halfway(error, step)
    assert_words(message, str(error) or 'interrupted', 'kept in out,')
    assert 'KeyboardInterrupt' not in message
    assert_continues()


def test_whoever_is_interrupted_does_not_wait_for_the_workers():
    """They would take ten minutes."""
    with pytest.raises(KeyboardInterrupt):
        with prepare_slimpajama.open_workers(2) as submit:
            assert submit(functools.partial(int, 3))() == 3
            submit(functools.partial(time.sleep, 600))
            raise KeyboardInterrupt


def test_what_is_finished_is_on_the_disk(monkeypatch):
    """Ids before the table that says that they are there, token files before meta.json."""
    if not os.path.isdir('/proc/self/fd'):
        pytest.skip('needs /proc')
    make_source(files=2)
    safe = {}
    rename = os.replace
    renamed = []

    def fsync(file):
        safe[os.readlink(f'/proc/self/fd/{file}')] = os.fstat(file).st_size

    def replace(source, target):
        needed = [source, *target.parent.glob(f'{target.name}.ids')]
        if target.name == 'meta.json':
            needed += target.parent.glob('*/*.bin')
            assert {str(path.parent) for path in needed} < set(safe)
        assert all(safe[str(path)] == path.stat().st_size for path in needed)
        renamed.append(len(needed))
        rename(source, target)

    monkeypatch.setattr(os, 'fsync', fsync)
    monkeypatch.setattr(os, 'replace', replace)
    run_prepare(out=Path('out').absolute(), tokens=0)
    # begun.json, three pieces, tokenizer.json and meta.json.
    assert renamed == [1, 2, 2, 2, 1, 15]


# ---- Other settings, another source --------------------------------------------------------------


@pytest.mark.parametrize('complete', [False, True])
def test_other_settings_are_refused(complete):
    make_source()
    if complete:
        run_prepare()
    else:
        stop_halfway()
    for changes, words in (({'seed': 1}, '--seed=1337'), ({'tokens': 5}, '--tokens=20000')):
        with raises_one_line(f'out was begun with {words}'):
            run_prepare(**changes)
    # The same folder, with a slash.
    run_prepare('raw/')
    with raises_one_line('files that this program did not write'):
        run_prepare(out='raw')


def replace_a_letter(raw):
    path = min((raw / 'train').rglob('example_*'))
    path.write_bytes(path.read_bytes().replace(b'o', b'a', 1))


def remove_a_file(raw):
    min((raw / 'train').rglob('example_*')).unlink()


CHANGES = [replace_a_letter, remove_a_file]


@pytest.mark.parametrize('change', CHANGES)
def test_an_exchanged_source_is_not_called_complete(change):
    make_source()
    run_prepare(tokens=0)
    before = contents('out')
    # The same contents at another time are the same source, and one that is gone is not another one.
    for path in Path('raw').rglob('*.jsonl'):
        path.write_bytes(path.read_bytes())
    run_prepare(tokens=0)
    Path('raw').rename('away')
    run_prepare(tokens=0)
    Path('away').rename('raw')

    change(Path('raw'))
    with raises_one_line('--source=', 'changed since out'):
        run_prepare(tokens=0)
    assert contents('out') == before


@pytest.mark.parametrize('change', CHANGES)
def test_pieces_of_an_exchanged_source_are_made_again(change):
    make_source()
    stop_halfway(tokens=0)
    change(Path('raw'))
    run_prepare(tokens=0)
    run_prepare(out='whole', tokens=0)
    assert contents('out') == contents('whole')


def test_pieces_of_another_tokenizer_in_the_same_place_are_made_again():
    make_source()
    one, two = (train_bpe(Path(name), [name * 9], 260) for name in ('one', 'twenty'))
    place = Path(shutil.copytree(one, 'tokenizer'))
    stop_halfway(tokens=0, tokenizer=str(place))
    shutil.copytree(two, place, dirs_exist_ok=True)
    prepare_slimpajama.loaded_tokenizer.cache_clear()  # as in another process
    run_prepare(tokens=0, tokenizer=str(place))
    run_prepare(out='whole', tokens=0, tokenizer=str(two))
    assert without_meta('out') == without_meta('whole')


def test_files_of_a_domain_that_is_full_are_not_read(monkeypatch):
    for n in range(20):
        write_records(Path(f'raw/web/{n}.jsonl'), [{'text': f'{n} {m}' * 9} for m in range(9)])
    write_records(Path('raw/wiki/0.jsonl'), [{'text': c} for c in 'abc'])
    read, documents = [], sources.documents

    def spy(unit, scratch):
        read.append(unit.domain)
        yield from documents(unit, scratch)

    monkeypatch.setattr(sources, 'documents', spy)
    run_prepare(tokens=1000, weights={'wiki': 1, 'web': 1})
    assert 1 < read.count('web') < 10


def test_a_damaged_dataset_is_not_called_complete():
    make_source(files=1)
    run_prepare()
    Path('out/train/C4.bin').unlink()
    with raises_one_line('C4.bin'):
        run_prepare()


@pytest.mark.parametrize('content', ['{"asked"', '3', '{"asked": 3}', '{"asked": {}}'])
@pytest.mark.parametrize('name', ['meta.json', '.pieces/begun.json'])
def test_damaged_notes_are_one_line(name, content, tmp_path):
    Path('.pieces').mkdir()
    (tmp_path / name).write_text(content)
    with raises_one_line(name):
        run_prepare('stdlib', tmp_path)


def test_damaged_pieces_are_refused():
    make_source()
    stop_halfway(tokens=0)
    path = min(Path('out/.pieces').glob('*.ids'))
    path.write_bytes(path.read_bytes()[:-2])
    with raises_one_line('.pieces is damaged: delete out,', of=ValueError):
        run_prepare(tokens=0)
    assert not Path('out/meta.json').exists()
    shutil.rmtree('out')
    run_prepare(tokens=0)


def test_one_process_at_a_time_writes_a_folder():
    make_source(files=1, count=3)
    Path('out').mkdir()
    with locked('out', 'writing to'):
        with raises_one_line('another --out'):
            run_prepare()
    assert contents('out') == {}


# ---- Bad input: one line that says where ---------------------------------------------------------


def second_line(text):
    """What writes a training file whose first line is good, and the second is `text`."""
    good = '{"text": "a", "meta": {"redpajama_set_name": "RedPajamaC4"}}\n'
    return lambda train: (train / 'example_2.jsonl').write_text(good + text)


def cut_off(train):
    """At the end of a line, so that nothing but the end of the stream is missing."""
    path = train / 'z.jsonl.zst'
    rows = [('C4', f'{n:090}') for n in range(9000)]
    write_rows(path, rows)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


BAD = {
    'example_2.jsonl: line 2 ... JSON': second_line('{"text": '),
    'example_2.jsonl: line 2 ... "text"': second_line('{"text": "a"}'),
    'example_2.jsonl: line 3 ... "text"': second_line('\n[1, 2]'),
    "example_2.jsonl: line 2: ... 'RedPajama../../x'": second_line(
        '{"text": "a", "meta": {"redpajama_set_name": "RedPajama../../x"}}'
    ),
    'example_2.jsonl: line 2 is longer': second_line('"' + 'x' * 20_000),
    'z.jsonl.zst: Truncated': cut_off,
    'z.jsonl.zst: ... empty': lambda train: (train / 'z.jsonl.zst').touch(),
    'z.jsonl.zst: ... ZSTD': lambda train: (train / 'z.jsonl.zst').write_bytes(b'not zstd at all'),
}


@pytest.mark.parametrize('message', BAD)
def test_bad_input_says_file_and_line(message, monkeypatch):
    make_source()
    BAD[message](Path('raw/train'))
    monkeypatch.setattr(sources, 'MAX_LINE', 10_000)
    with raises_one_line(*message.split(' ... '), of=ValueError):
        run_prepare(tokens=0)
    assert not Path('out/meta.json').exists()


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'source': 'no/such/folder'}, ['no/such/folder']),
        ({'weights': {'Books': 1}}, ['--weights', 'Books', 'CommonCrawl']),
        ({'weights': {'Book': 0}}, ['--weights']),
        ({'weights': {'Book': 1, 'C4': 2}, 'tokens': 0}, ['--weights', '--domain_weights']),
        ({'tokens': -1}, ['--tokens']),
        ({'seed': 2**64}, ['--seed']),
        ({'out': 'circle'}, ['circle']),
        ({'source': 'circle'}, ['circle']),
        ({'source': 'raw/a.txt'}, ["no source 'raw/a.txt'", 'folder']),
    ],
)
def test_bad_settings_are_one_line(changes, words):
    make_source(files=1, count=3)
    Path('raw/a.txt').touch()
    Path('circle').symlink_to('circle')
    options = {'source': 'raw', 'out': 'out', 'tokenizer': 'bytes', **changes}
    arguments = [f'--{name}={value}' for name, value in options.items()]
    status, _ = call(prepare_slimpajama.main, *arguments)
    assert_one_line(status, *words)


def test_folders_without_usable_documents_are_refused(capsys):
    raw = Path('raw')
    raw.mkdir()
    with raises_one_line('raw has no training file'):
        run_prepare(raw, 'out')
    (raw / 'a.txt').write_text('only one document')
    with raises_one_line('raw has too few documents', of=ValueError):
        run_prepare(raw, 'out2')

    write_rows(Path('split/train/0.jsonl'), [('C4', 'a'), ('Github', 'b')])
    write_rows(Path('split/validation/0.jsonl'), [('C4', 'c')])
    with raises_one_line('split has no validation document of Github', of=ValueError):
        run_prepare('split', 'out3', weights={'Github': 1})
    # Nothing was read but the validation file.
    assert len(finished(Path('out3'))) == 1
    run_prepare('split', 'out4')
    assert 'validation tokens: C4 (2), Github (0).' in capsys.readouterr().out

    with raises_one_line('out is inside --source=raw'):
        run_prepare(raw, raw / 'out')
    assert not (raw / 'out').exists()


# ---- What is told --------------------------------------------------------------------------------


def test_a_disk_without_room_is_refused(monkeypatch):
    make_source()
    free = 0
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=free))
    with raises_one_line('space', 'in out: ', '--tokens', of=OSError):
        run_prepare()
    assert not Path('out/.pieces').exists()
    # Pieces and token files take two bytes a token each. How much everything is, is not known before.
    free = 4 * 20_000
    run_prepare()
    free = 0
    run_prepare(out='some', tokens=0, weights={'Wikipedia': 1})


def test_an_interrupted_preparation_fits_the_disk_that_it_fitted_before(monkeypatch):
    make_source()

    def disk_usage(path):
        used = sum(path.stat().st_size for path in Path('out').rglob('*.*'))
        return types.SimpleNamespace(free=4 * 20_000 + 20_000 - used)

    monkeypatch.setattr(shutil, 'disk_usage', disk_usage)
    stop_halfway()
    # As a worker that was killed leaves it.
    Path('out/.pieces/download.x').mkdir()
    Path('out/.pieces/download.x/a.part').write_bytes(bytes(100_000))
    run_prepare()
    assert Path('out/meta.json').exists()


def test_a_file_that_takes_long_shows_that_it_goes_on(tmp_path):
    said = queue.Queue()
    bar = types.SimpleNamespace(set_postfix_str=said.put)
    (tmp_path / '000000_a.ids').write_bytes(bytes(2468))
    with prepare_slimpajama.heartbeat(bar, tmp_path, seconds=0):
        assert '1,234' in said.get(timeout=60)


def test_the_table_has_the_numbers_of_meta_json(capsys):
    make_source()
    run_prepare(tokens=60_000)
    text = capsys.readouterr().out
    assert '6 files, 1 of them validation' in text
    rows = {line.split()[0]: line.split() for line in text.splitlines()}
    assert rows['CommonCrawl'][-1] == 'more'  # the source has none
    for domain, entry in read_meta('out')['splits']['train'].items():
        assert rows[domain][1:3] == [f'{entry["documents"]:,}', f'{entry["tokens"]:,}']
