"""
prepare_slimpajama.py and sources.py: bytes on disk equal a slow, obvious recomputation, however the
work was split or killed.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import types
import unicodedata
from pathlib import Path

import pytest
from conftest import contents
from documents import (
    WORDS,
    assert_equals,
    fraction,
    make_documents,
    make_source,
    read_meta,
    recompute,
    settings,
    texts_of,
    write_rows,
)

import prepare_slimpajama
import sources
import tokenizer
from prepare_slimpajama import prepare
from sources import TABLE_2

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / 'shared' / 'data'
MINI = SHARED / 'slimpajama_mini'


@pytest.fixture(autouse=True)
def patient_disk(monkeypatch):
    """No power fails here, and waiting for the disk is what would take longest."""
    monkeypatch.setattr(os, 'fsync', lambda file: None)


# ---- The same bytes, whatever the way ------------------------------------------------------------


@pytest.mark.parametrize('suffix', ['.jsonl', '.jsonl.zst', '.parquet'])
@pytest.mark.parametrize('validation', [True, False])
def test_slimpajama_equals_recomputation(suffix, validation, tmp_path):
    raw = tmp_path / 'raw'
    source = make_source(raw, suffix, validation)
    tasks = ((20_000, {}), (0, {}), (9_000, {'Book': 3, 'C4': 1.5}), (0, {'Book': 1, 'C4': 1}))
    for number, (tokens, weights) in enumerate(tasks):
        out = tmp_path / f'out{number}'
        prepare(settings(raw, out, tokens, weights=weights, val_fraction=0.1))
        assert_equals(out, recompute(source, weights or TABLE_2, tokens, val_fraction=0.1))


def test_text_tree_equals_recomputation(tmp_path):
    root = tmp_path / 'corpus'
    texts = {'b': [], 'a.1': [], 'corpus': []}
    for domain, folder in (('b', 'b/deep/er'), ('a.1', 'a.1'), ('corpus', '.')):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for n in range(12):
            text = f'{domain} {n}\r\n' + ' '.join(WORDS) * n
            path = root / folder / f'{n}.py'
            path.write_text(text, newline='')
            texts[domain].append((path.relative_to(root).as_posix(), text))

    (root / 'b' / 'binary.png').write_bytes(b'\x89PNG\0\0')
    (root / 'b' / 'empty.txt').write_text('')
    (root / '.git').mkdir()
    (root / '.git' / 'config').write_text('hidden')
    (root / 'b' / 'latin1.txt').write_bytes('caf\xe9'.encode('latin-1'))
    texts['b'].append(('b/latin1.txt', 'caf\ufffd'))

    prepare(settings(root, tmp_path / 'out', tokens=0))

    # Small files of a domain make one unit, with the name of the first in seeded order.
    source = {}
    for domain, files in texts.items():
        files.sort(key=lambda file: fraction(1337, file[0]))
        first_name = files[0][0]
        source[first_name] = [(domain, text) for _, text in files]
    assert_equals(tmp_path / 'out', recompute(source, dict.fromkeys(texts, 1), 0))


def test_one_long_text_file_is_split(tmp_path):
    raw = tmp_path / 'raw'
    raw.mkdir()
    lines = [f'line {n} of a play, {"word " * (n % 17)}\n' for n in range(20_000)]
    (raw / 'input.txt').write_text(''.join(lines))

    prepare(settings(raw, tmp_path / 'out', tokens=0))
    train = texts_of(tmp_path / 'out' / 'train' / 'raw.bin')
    validation = texts_of(tmp_path / 'out' / 'validation' / 'raw.bin')
    assert 15 < len(train) < 25
    assert len(validation) == 1
    assert sorted(''.join(train + validation).splitlines(True)) == sorted(lines)


def test_standard_library_needs_nothing(tmp_path, capsys):
    out = tmp_path / 'out'
    prepare(settings('stdlib', out, tokens=200_000))
    meta = read_meta(out)
    for split in ('train', 'validation'):
        assert list(meta['splits'][split]) == ['Source', 'Topics']
    del meta['tokenizer']['sha256']
    assert meta['tokenizer'] == {'name': 'bytes', 'n_vocab': 257, 'eot': 256}
    # The folder's tokenizer.json is that of bytes.
    assert tokenizer.load(out).name == 'bytes'

    prepare(settings('stdlib', out, tokens=200_000))
    assert 'is complete: nothing to do' in capsys.readouterr().out


@pytest.mark.parametrize('validation', [True, False])
def test_any_number_of_workers_gives_the_same_folder(validation, tmp_path):
    make_source(tmp_path / 'raw', validation=validation)
    for workers in (1, 2):
        prepare(settings(tmp_path / 'raw', tmp_path / f'out{workers}', workers=workers))
    assert contents(tmp_path / 'out1') == contents(tmp_path / 'out2')


def test_as_many_workers_as_the_process_was_given_cpus(tmp_path, monkeypatch):
    make_source(tmp_path / 'raw', files=3, count=3)
    open_workers = prepare_slimpajama.open_workers
    numbers = []

    def record(number):
        numbers.append(number)
        return open_workers(1)

    monkeypatch.setattr(prepare_slimpajama, 'open_workers', record)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda process: {5}, raising=False)
    prepare(settings(tmp_path / 'raw', tmp_path / 'out', workers=0))
    # A system that cannot say has as many as the machine.
    monkeypatch.delattr(os, 'sched_getaffinity')
    monkeypatch.setattr(os, 'cpu_count', lambda: 3)
    prepare(settings(tmp_path / 'raw', tmp_path / 'out2', workers=0))
    assert numbers == [1, 3]


def test_a_slow_file_does_not_idle_the_other_workers(tmp_path, monkeypatch):
    make_source(tmp_path / 'raw', files=11, count=3)
    events = []

    @contextlib.contextmanager
    def record(number):
        def submit(task):
            events.append('submit')
            return lambda: events.append('wait') or task()

        yield submit

    monkeypatch.setattr(prepare_slimpajama, 'open_workers', record)
    prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=0, workers=2))
    assert events[:10] == ['submit'] * 8 + ['wait', 'submit']


def test_a_block_ends_with_the_document_that_fills_it(monkeypatch):
    monkeypatch.setattr(prepare_slimpajama, 'BLOCK', 5_000)
    documents = make_documents(200, seed=3)
    unit = types.SimpleNamespace(name='one', read=lambda: iter(documents))
    blocks = list(prepare_slimpajama.shuffled_blocks(unit, seed=1))
    assert len(blocks) > 3
    for block in blocks[:-1]:
        lengths = [len(text) for _, text in block]
        assert sum(lengths) < 5_000 + max(lengths)
    # Python spends some memory on a document, however short.
    assert max(len(block) for block in blocks) < 100

    shuffled = [document for block in blocks for document in block]
    assert sorted(shuffled) == sorted((domain, text) for domain, text in documents if text)


def test_blocks_keep_every_document(tmp_path, monkeypatch):
    source = make_source(tmp_path / 'raw', files=1)
    monkeypatch.setattr(prepare_slimpajama, 'BLOCK', 5_000)
    prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=0))

    texts = []
    for domain in TABLE_2:
        texts += texts_of(tmp_path / 'out' / 'train' / f'{domain}.bin')
    documents = source['train/chunk1/example_0.jsonl']
    expected = [unicodedata.normalize('NFC', text) for _, text in documents if text]
    assert sorted(texts) == sorted(expected)


@pytest.mark.skipif(not MINI.exists(), reason='no ../shared/data/slimpajama_mini')
def test_shared_documents_come_out_in_the_paper_s_proportions(tmp_path):
    out = tmp_path / 'out'
    prepare(settings(MINI, out, tokens=400_000, tokenizer=SHARED / 'tokenizer'))
    splits = read_meta(out)['splits']

    # MANIFEST.md's count, an <|endoftext|> for each document, and one document that spells it in
    # six tokens.
    validation_tokens = sum(entry['tokens'] for entry in splits['validation'].values())
    assert validation_tokens == 1_284_363 + 2_079 + 5
    for domain, share in TABLE_2.items():
        assert 0 <= splits['train'][domain]['tokens'] - share * 400_000 < 40_000

    original = SHARED / 'tokenizer' / 'tokenizer.json'
    assert (out / 'tokenizer.json').read_bytes() == original.read_bytes()


# ---- Killed and continued ------------------------------------------------------------------------

# For each (number, settings) of its argument: prepare in a process that dies before that rename.
DYING = """
import os, signal, sys
import prepare_slimpajama

def die_before_rename(last, settings):
    replace = os.replace
    count = 0

    def dying_replace(*paths):
        nonlocal count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)

    os.replace = dying_replace
    prepare_slimpajama.SAVE_SECONDS = 0
    prepare_slimpajama.prepare(prepare_slimpajama.Settings(**settings))

for last, settings in eval(sys.argv[1]):
    child = os.fork()
    if not child:
        die_before_rename(last, settings)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, last
"""


def test_killed_before_any_rename_and_continued_is_byte_identical(tmp_path):
    raw = tmp_path / 'raw'
    make_source(raw, validation=False, files=3)
    prepare(settings(raw, tmp_path / 'whole'))

    # Of progress.json, at the start, after a unit and at the end; of the token files; of
    # tokenizer.json; of meta.json.
    renames = (1, 2, 3, 5, 6, 12, 19, 20, 21)
    tasks = [(last, vars(settings(raw, tmp_path / f'out{last}'))) for last in renames]
    command = [sys.executable, '-c', DYING, repr(tasks)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    whole = contents(tmp_path / 'whole')
    for last in renames:
        out = tmp_path / f'out{last}'
        assert not (out / 'meta.json').exists(), last
        prepare(settings(raw, out))
        assert contents(out) == whole, last


def test_killed_workers_and_all_continue_byte_identically(tmp_path, capsys):
    raw = tmp_path / 'raw'
    out = tmp_path / 'out'
    make_source(raw, files=12, count=1500)
    prepare(settings(raw, tmp_path / 'whole', tokens=0))

    options = [f'--source={raw}', f'--out={out}', '--tokenizer=bytes', '--tokens=0', '--workers=2']
    code = 'import prepare_slimpajama as p; p.SAVE_SECONDS = 0; p.main()'
    command = [sys.executable, '-c', code, *options]
    quiet = {'stdout': subprocess.PIPE, 'stderr': subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, **quiet) as process:
        while units_done(out) < 2:
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
        process.communicate(timeout=60)  # its workers have its stdout, too: until they have ended
    assert not (out / 'meta.json').exists()
    with open(out / 'train' / 'C4.bin.part', 'ab') as file:
        file.write(b'half-written')

    prepare(settings(raw, out, tokens=0, workers=2))
    assert 'continuing after' in capsys.readouterr().out
    assert contents(out) == contents(tmp_path / 'whole')


def units_done(out):
    progress = out / 'progress.json'
    return json.loads(progress.read_text())['done'] if progress.exists() else 0


def test_tokens_are_on_the_disk_before_the_state_that_counts_them(tmp_path, monkeypatch):
    make_source(tmp_path / 'raw', files=1)
    safe = {}
    states = 0

    def fsync(file):
        path = os.readlink(f'/proc/self/fd/{file}')
        safe[path] = os.fstat(file).st_size

    def replace(source, target):
        nonlocal states
        assert safe[str(source)] == os.stat(source).st_size
        if target.name == 'progress.json':
            states += 1
            for split, domains in json.loads(source.read_text())['counts'].items():
                for domain, entry in domains.items():
                    path = tmp_path / 'out' / split / f'{domain}.bin.part'
                    assert safe.get(str(path), 0) == 2 * entry['tokens']
        rename(source, target)

    if not os.path.isdir('/proc/self/fd'):
        pytest.skip('needs /proc')
    rename = os.replace
    monkeypatch.setattr(os, 'fsync', fsync)
    monkeypatch.setattr(os, 'replace', replace)
    monkeypatch.setattr(prepare_slimpajama, 'SAVE_SECONDS', 0)
    prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=0))
    # At the start, after each of two files, and at the end.
    assert states == 4


def test_many_small_files_are_not_each_saved_and_the_hash_is_the_slow_one(tmp_path, monkeypatch):
    source = make_source(tmp_path / 'raw', files=30, count=2)
    states = []
    write_json = prepare_slimpajama.write_json

    def record(path, value):
        states.append(json.loads(json.dumps(value)))
        write_json(path, value)

    monkeypatch.setattr(prepare_slimpajama, 'write_json', record)
    monkeypatch.setattr(prepare_slimpajama, 'SAVE_SECONDS', 600)
    prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=0))
    *states, _meta = states
    assert [state['done'] for state in states] == [0, len(source)]

    units, _ = sources.find_units(str(tmp_path / 'raw'), '', {}, 1337)
    for state in states:
        names = [[unit.name, unit.split] for unit in units]
        sizes = [(tmp_path / 'raw' / unit.name).stat().st_size for unit in units[: state['done']]]
        slow = hashlib.sha256(json.dumps([names, sizes]).encode()).hexdigest()
        assert state['source'] == slow


@pytest.mark.parametrize('error', [KeyboardInterrupt, BrokenPipeError])
def test_an_interruption_in_the_middle_of_a_file_keeps_those_before_it(
    error, tmp_path, monkeypatch, capsys
):
    raw, out = tmp_path / 'raw', tmp_path / 'out'
    make_source(raw)
    merge = prepare_slimpajama.merge
    units = []

    def interrupted(*args):
        units.append(merge(*args))
        if len(units) == 4:
            raise error
        return units[-1]

    with monkeypatch.context() as patch, pytest.raises((SystemExit, BrokenPipeError)):
        patch.setattr(prepare_slimpajama, 'merge', interrupted)
        patch.setattr(prepare_slimpajama, 'SAVE_SECONDS', 600)
        prepare(settings(raw, out))
    prepare(settings(raw, out))
    assert 'continuing after 3 of 6 files' in capsys.readouterr().out
    prepare(settings(raw, tmp_path / 'whole'))
    assert contents(out) == contents(tmp_path / 'whole')


def stop_halfway(tmp_path, monkeypatch):
    """Prepare a source until the disk is full, at the fourth state. Returns the message."""
    make_source(tmp_path / 'raw')
    write_json = prepare_slimpajama.write_json
    count = 0

    def full(path, data):
        nonlocal count
        count += 1
        if count >= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_json(path, data)

    with monkeypatch.context() as patch, pytest.raises(OSError) as error:
        patch.setattr(prepare_slimpajama, 'write_json', full)
        patch.setattr(prepare_slimpajama, 'SAVE_SECONDS', 0)
        prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    return str(error.value)


def test_full_disk_is_one_line_and_progress_is_kept(tmp_path, monkeypatch, capsys):
    assert 'no space left' in stop_halfway(tmp_path, monkeypatch)
    prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    assert 'continuing after 2 of 6 files' in capsys.readouterr().out

    prepare(settings(tmp_path / 'raw', tmp_path / 'whole'))
    assert contents(tmp_path / 'out') == contents(tmp_path / 'whole')


def test_other_settings_or_changed_files_are_refused(tmp_path, monkeypatch):
    raw = tmp_path / 'raw'
    out = tmp_path / 'out'
    stop_halfway(tmp_path, monkeypatch)
    with pytest.raises(
        ValueError, match=r'begun with --seed=1337.*choose another --out, or delete'
    ):
        prepare(settings(raw, out, seed=1))

    part = out / 'validation' / 'C4.bin.part'
    whole = part.read_bytes()
    part.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match='C4.bin.part is shorter than'):
        prepare(settings(raw, out))
    part.write_bytes(whole)

    new = raw / 'train' / 'new.jsonl'
    write_rows(new, make_documents(5, 7))
    with pytest.raises(ValueError, match='--source has changed since'):
        prepare(settings(raw, out))
    new.unlink()

    # The same folder, spelled in another way.
    prepare(settings(f'{os.path.relpath(raw)}/', out))
    with pytest.raises(ValueError, match='begun with --tokens=20000'):
        prepare(settings(raw, out, tokens=5))
    with pytest.raises(ValueError, match='holds files that this program did not write'):
        prepare(settings(raw, raw))


def test_a_damaged_file_may_be_replaced_but_not_one_that_was_read(tmp_path, capsys):
    raw, out = tmp_path / 'raw', tmp_path / 'out'
    make_source(raw)
    names = [unit.name for unit in sources.find_units(str(raw), '', {}, 1337)[0]]
    read, damaged = raw / names[0], raw / names[-1]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match='the 5 files before it are kept'):
        prepare(settings(raw, out, tokens=0))
    damaged.write_bytes(whole)

    before = read.read_bytes()
    read.write_bytes(before + b' ')
    with pytest.raises(ValueError, match='--source has changed since'):
        prepare(settings(raw, out, tokens=0))
    read.write_bytes(before)
    prepare(settings(raw, out, tokens=0))
    assert 'continuing after 5 of 6 files' in capsys.readouterr().out
    prepare(settings(raw, tmp_path / 'at_once', tokens=0))
    assert contents(out) == contents(tmp_path / 'at_once')


def test_whoever_is_interrupted_does_not_wait_for_the_workers():
    """They would take ten minutes."""
    with pytest.raises(KeyboardInterrupt):
        with prepare_slimpajama.open_workers(2) as submit:
            assert submit(functools.partial(int, 3))() == 3
            submit(functools.partial(time.sleep, 600))
            raise KeyboardInterrupt


def test_one_process_at_a_time_writes_a_folder(tmp_path):
    make_source(tmp_path / 'raw', files=1, count=3)
    out = tmp_path / 'out'
    out.mkdir()
    with prepare_slimpajama.locked(out, 'writing to', setting='--out'):
        with pytest.raises(OSError, match=f'another process is writing to {out}; .* another --out'):
            prepare(settings(tmp_path / 'raw', out))
    assert not list(out.iterdir())


# ---- Bad input: one line that says where ---------------------------------------------------------


def second_line(text):
    """What writes a training file whose first line is good, and the second is `text`."""
    good = '{"text": "a", "meta": {"redpajama_set_name": "RedPajamaC4"}}\n'
    return lambda train: (train / 'chunk1' / 'example_2.jsonl').write_text(good + text)


def cut_off(train):
    path = train / 'z.jsonl.zst'
    write_rows(path, make_documents(50, 1))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def empty(train):
    (train / 'z.jsonl.zst').touch()


def other_compression(train):
    (train / 'z.jsonl.zst').write_bytes(b'not zstd at all')


def other_columns(train):
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    parquet.write_table(pyarrow.table({'content': ['a']}), train / 'z.parquet')


BAD = {
    r'example_2.jsonl: line 2 is broken JSON': second_line('{"text": '),
    r'example_2.jsonl: line 2 is not \{"text"': second_line('{"text": "a"}'),
    r'example_2.jsonl: line 3 is not \{"text"': second_line('\n[1, 2]'),
    r"example_2.jsonl: line 2: unknown domain 'RedPajama../../x'": second_line(
        '{"text": "a", "meta": {"redpajama_set_name": "RedPajama../../x"}}'
    ),
    r'example_2.jsonl: line 2 is longer than': second_line('"' + 'x' * 20_000),
    r'z.jsonl.zst: Truncated': cut_off,
    r'z.jsonl.zst: the file is empty': empty,
    r'z.jsonl.zst: .*ZSTD': other_compression,
    r'z.parquet: no column meta: it has content': other_columns,
}


@pytest.mark.parametrize('message', BAD)
def test_bad_input_says_file_and_line(message, tmp_path, monkeypatch):
    make_source(tmp_path / 'raw')
    BAD[message](tmp_path / 'raw' / 'train')
    monkeypatch.setattr(sources, 'MAX_LINE', 10_000)
    with pytest.raises(ValueError, match=message) as error:
        prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=0))
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'out' / 'meta.json').exists()


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'source': 'no/such/folder'}, "no source 'no/such/folder'"),
        (
            {'weights': {'Books': 1}},
            "--weights names 'Books', which the source lacks: it has CommonCrawl",
        ),
        ({'weights': {'Book': 0}}, '--weights must be positive numbers'),
        ({'weights': {'Book': 1, 'C4': 2}, 'tokens': 0}, 'give train.py these as --domain_weights'),
        ({'tokens': -1}, '--tokens, --workers and --seed must be 0 or more'),
        ({'tokenizer': 'none'}, 'no tokenizer at none'),
    ],
)
def test_bad_settings_are_one_line_and_exit_status_1(changes, message, tmp_path):
    make_source(tmp_path / 'raw', files=1, count=3)
    options = {'source': tmp_path / 'raw', 'out': tmp_path / 'out', 'tokenizer': 'bytes', **changes}
    arguments = [f'--{name}={value}' for name, value in options.items()]
    command = [sys.executable, 'prepare_slimpajama.py', *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith('error: ') and message in done.stderr, done.stderr
    assert done.stderr.count('\n') == 1


def test_folders_without_usable_documents_are_refused(tmp_path):
    raw = tmp_path / 'raw'
    raw.mkdir()
    with pytest.raises(ValueError, match='no training file'):
        prepare(settings(raw, tmp_path / 'out'))

    (raw / 'a.txt').write_text('only one document')
    with pytest.raises(ValueError, match='raw has one document only'):
        prepare(settings(raw, tmp_path / 'out2'))

    write_rows(tmp_path / 'split' / 'train' / '0.jsonl', [('C4', 'a'), ('Github', 'b')])
    write_rows(tmp_path / 'split' / 'validation' / '0.jsonl', [('C4', 'c')])
    with pytest.raises(ValueError, match='validation files of .*split have no document of Github'):
        prepare(settings(tmp_path / 'split', tmp_path / 'out4', weights={'Github': 1}))
    assert units_done(tmp_path / 'out4') == 1  # nothing was read but the validation file


def test_a_folder_for_the_tokens_among_the_texts_is_refused(tmp_path):
    raw = tmp_path / 'raw'
    write_rows(raw / 'train.jsonl', [('C4', 'a'), ('C4', 'b')])
    with pytest.raises(ValueError, match='out is inside --source=.*raw'):
        prepare(settings(raw, raw / 'out'))
    assert not (raw / 'out').exists()


def test_a_damaged_dataset_is_not_called_complete(tmp_path):
    make_source(tmp_path / 'raw', files=1)
    out = tmp_path / 'out'
    prepare(settings(tmp_path / 'raw', out))
    file, meta = out / 'train' / 'C4.bin', out / 'meta.json'
    whole = file.read_bytes()

    file.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match='C4.bin is not as .*meta.json says: delete '):
        prepare(settings(tmp_path / 'raw', out))
    file.unlink()
    with pytest.raises(ValueError, match='C4.bin is not as .*meta.json says: delete '):
        prepare(settings(tmp_path / 'raw', out))

    file.write_bytes(whole)
    meta.write_text(json.dumps({**json.loads(meta.read_text()), 'format': 99}))
    with pytest.raises(ValueError, match='has format 99, and this program writes format 1'):
        prepare(settings(tmp_path / 'raw', out))


@pytest.mark.parametrize('changes', [{'done': 'x'}, {'source': None}])
def test_a_state_of_another_version_is_one_line(changes, tmp_path, monkeypatch):
    stop_halfway(tmp_path, monkeypatch)
    path = tmp_path / 'out' / 'progress.json'
    state = {**json.loads(path.read_text()), **changes}
    # None: an entry that is not there.
    path.write_text(json.dumps({key: value for key, value in state.items() if value is not None}))
    with pytest.raises(ValueError, match='progress.json that is damaged, or of another version'):
        prepare(settings(tmp_path / 'raw', tmp_path / 'out'))


def test_token_files_are_on_the_disk_under_their_names_before_meta_json(tmp_path, monkeypatch):
    make_source(tmp_path / 'raw', files=1)
    synced = []

    def sync_folder(folder):
        assert not (tmp_path / 'out' / 'meta.json').exists()
        synced.append((folder.name, sorted(path.suffix for path in folder.iterdir())))

    monkeypatch.setattr(prepare_slimpajama, 'sync_folder', sync_folder)
    prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    assert synced == [('train', ['.bin'] * 7), ('validation', ['.bin'] * 7)]


def test_space_and_dry_domains_are_reported(tmp_path, monkeypatch, capsys):
    raw = tmp_path / 'raw'
    make_source(raw)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=1))
        with pytest.raises(OSError, match='not enough space for 0.00 GB'):
            prepare(settings(raw, tmp_path / 'out'))
        # Everything of some domains: the files do not say how much that is.
        prepare(settings(raw, tmp_path / 'some', tokens=0, weights={'Wikipedia': 1}))
        assert 'note: that may not be enough' in capsys.readouterr().err

    prepare(settings(raw, tmp_path / 'out', tokens=60_000))
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert 'ran dry' in lines['CommonCrawl'] and '30,000' in lines['CommonCrawl']
    assert 'ran dry' not in lines['ArXiv']


def test_space_for_the_files_on_their_way_is_needed_too(tmp_path, monkeypatch):
    make_source(tmp_path / 'raw')
    request = settings(tmp_path / 'raw', tmp_path / 'out', workers=2)
    plan = prepare_slimpajama.make_plan(request, tmp_path, None)
    estimate = prepare_slimpajama.estimate_tokens(plan, prepare_slimpajama.first_state(plan))
    room = types.SimpleNamespace(free=2 * estimate)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: room)
    with pytest.raises(OSError, match='not enough space'):
        prepare(request)


def test_the_table_has_the_numbers_of_meta_json(tmp_path, capsys):
    make_source(tmp_path / 'raw')
    prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    meta = read_meta(tmp_path / 'out')
    train, validation = meta['splits']['train'], meta['splits']['validation']
    total = sum(entry['tokens'] for entry in train.values())

    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines['domain'] == 'domain documents tokens wanted share wanted validation'.split()
    for domain, entry in train.items():
        documents, tokens, share = entry['documents'], entry['tokens'], meta['weights'][domain]
        counts = [f'{n:,}' for n in (documents, tokens, round(meta['tokens'] * share))]
        shares = [f'{tokens / total:.1%}', f'{share:.1%}']
        last = f'{validation[domain]["tokens"]:,}'
        assert lines[domain][:7] == [domain, *counts, *shares, last]
    assert train.keys() == TABLE_2.keys()


@pytest.mark.parametrize('tokens, remark', [(20, 'ran dry'), (0, 'the source has none')])
@pytest.mark.parametrize('weights', [{}, {'C4': 1, 'Book': 1}])
def test_a_domain_that_the_source_lacks_is_reported_at_the_end(
    weights, tokens, remark, tmp_path, capsys
):
    write_rows(tmp_path / 'raw' / 'train.jsonl', [('C4', 'a'), ('C4', 'b')])
    prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=tokens, weights=weights))
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert remark in lines['Book'] and 'the source has none' not in lines['C4']
    assert list(read_meta(tmp_path / 'out')['splits']['train']) == ['C4']
