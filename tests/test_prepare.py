"""prepare_slimpajama.py: bytes on disk equal a slow, obvious recomputation, however the work was split or killed."""
import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest

import prepare_slimpajama as p

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / 'shared' / 'data'
DOMAINS = list(p.TABLE_2)
WORDS = 'the of naïve e\u0301 value résidual 日本 😀 <|endoftext|> x=1; \t \n  learning transformer'.split(' ')


def make_documents(count, seed):
    rng = random.Random(seed)
    return [(rng.choices(DOMAINS, weights=[5, 4, 3, 2, 2, 2, 2])[0],
             ' '.join(rng.choice(WORDS) for _ in range(rng.randint(0, 60)))) for _ in range(count)]


def write_rows(path, rows):
    """Rows (domain, text) in SlimPajama's form, as the name's suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{'text': text, 'meta': {'redpajama_set_name': f'RedPajama{domain}'}} for domain, text in rows]
    data = ''.join(json.dumps(row) + '\n' for row in rows).encode()
    if path.name.endswith('.parquet'):
        pa = pytest.importorskip('pyarrow')
        import pyarrow.parquet
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.name.endswith('.zst'):
        data = pytest.importorskip('zstandard').ZstdCompressor().compress(data)
        path.write_bytes(data)
    else:
        path.write_bytes(data)


def make_source(folder, suffix='.jsonl', validation=True, files=5, count=60):
    """{name: documents} of a new source."""
    source = {f'train/chunk1/example_{n}{suffix}': make_documents(count, n) for n in range(files)}
    if validation:
        source[f'validation/chunk1/example_holdout_0{suffix}'] = make_documents(count, 99)
    for name, rows in source.items():
        write_rows(folder / name, rows)
    write_rows(folder / f'test/example_0{suffix}', make_documents(5, 100))  # left out
    return source


def tokens_of(text):
    return [*unicodedata.normalize('NFC', text).encode(), 256]


def number(seed, text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, salt=seed.to_bytes(16, 'little')).digest(),
                          'little') / 2**64


def recompute(source, weights, tokens, seed=1337, val_fraction=0.005):
    """{(split, domain): [ids of each document]}: the contract, written the slow way."""
    result = {(split, domain): [] for split in ('train', 'validation') for domain in weights}
    wanted = {d: tokens * w / sum(weights.values()) if tokens else 1e18 for d, w in weights.items()}
    has_validation = any(name.startswith('validation') for name in source)
    for name in sorted(source, key=lambda name: (not name.startswith('validation'), number(seed, name))):
        rows = [row for row in source[name] if row[1]]
        random.Random(f'{seed} {name} 0').shuffle(rows)
        for domain, text in rows:
            if domain not in weights:
                continue
            split = 'validation' if name.startswith('validation') else 'train'
            if split == 'train' and sum(map(len, result['train', domain])) >= wanted[domain]:
                continue
            if not has_validation and (number(seed, text) < val_fraction or not result['validation', domain]):
                split = 'validation'
            result[split, domain].append(tokens_of(text))
    return result


def assert_equals(out, expected):
    meta = json.loads((out / 'meta.json').read_text())
    expected = {key: documents for key, documents in expected.items() if documents}
    assert {(split, domain) for split in meta['splits'] for domain in meta['splits'][split]} == set(expected)
    for (split, domain), documents in expected.items():
        file, record = out / split / f'{domain}.bin', meta['splits'][split][domain]
        assert np.fromfile(file, dtype='<u2').tolist() == sum(documents, [])
        assert record['sha256'] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert (record['documents'], record['tokens'] * 2) == (len(documents), file.stat().st_size)
    files = {path.relative_to(out).as_posix() for path in out.rglob('*') if path.is_file()}
    assert files - {'tokenizer.json'} == {'meta.json'} | {f'{split}/{domain}.bin' for split, domain in expected}


def settings(source, out, **changes):
    return p.Settings(**{'source': str(source), 'out': str(out), 'tokenizer': 'bytes', 'tokens': 20_000, 'workers': 1,
                         **changes})


def texts_of(file):
    """The documents of a .bin file of bytes."""
    ids = np.fromfile(file, '<u2')
    return [bytes(piece[:-1].tolist()).decode() for piece in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]]


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


# ---- The same bytes, whatever the way

@pytest.mark.parametrize('suffix', ['.jsonl', '.jsonl.zst', '.parquet'])
@pytest.mark.parametrize('validation', [True, False])
def test_slimpajama_equals_recomputation(suffix, validation, tmp_path):
    source = make_source(tmp_path / 'raw', suffix, validation)
    for tokens, weights in ((20_000, {}), (0, {}), (9_000, {'Book': 3, 'C4': 1.5})):
        out = tmp_path / f'out{tokens}'
        p.prepare(settings(tmp_path / 'raw', out, tokens=tokens, weights=weights, val_fraction=0.1))
        assert_equals(out, recompute(source, weights or p.TABLE_2, tokens, val_fraction=0.1))


def test_text_tree_equals_recomputation(tmp_path):
    root, texts = tmp_path / 'corpus', {'b': [], 'a.1': [], 'corpus': []}
    for domain, folder in (('b', 'b/deep/er'), ('a.1', 'a.1'), ('corpus', '.')):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for n in range(12):
            text = f'{domain} {n}\r\n' + ' '.join(WORDS) * n
            (root / folder / f'{n}.py').write_text(text, newline='')
            texts[domain].append((f'{folder}/{n}.py'.removeprefix('./'), text))
    (root / 'b' / 'binary.png').write_bytes(b'\x89PNG\0\0')
    (root / 'b' / 'empty.txt').write_text('')
    (root / '.git').mkdir()
    (root / '.git' / 'config').write_text('hidden')
    (root / 'b' / 'latin1.txt').write_bytes('caf\xe9'.encode('latin-1'))
    texts['b'].append(('b/latin1.txt', 'caf\ufffd'))

    p.prepare(settings(root, tmp_path / 'out', tokens=0))
    source = {}  # small files of a domain make one unit, with the name of the first in seeded order
    for domain, files in texts.items():
        files = sorted(files, key=lambda file: number(1337, file[0]))
        source[files[0][0]] = [(domain, text) for _, text in files]
    assert_equals(tmp_path / 'out', recompute(source, dict.fromkeys(texts, 1), 0))


def test_one_long_text_file_is_split(tmp_path):
    (tmp_path / 'raw').mkdir()
    lines = [f'line {n} of a play, {"word " * (n % 17)}\n' for n in range(20_000)]
    (tmp_path / 'raw' / 'input.txt').write_text(''.join(lines))
    p.prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=0))
    train, validation = (texts_of(tmp_path / 'out' / split / 'raw.bin') for split in ('train', 'validation'))
    assert 15 < len(train) < 25 and len(validation) == 1
    assert sorted(''.join(train + validation).splitlines(True)) == sorted(lines)


def test_standard_library_needs_nothing(tmp_path, capsys):
    p.prepare(settings('stdlib', tmp_path / 'out', tokens=200_000))
    meta = json.loads((tmp_path / 'out' / 'meta.json').read_text())
    assert list(meta['splits']['train']) == list(meta['splits']['validation']) == ['Source', 'Topics']
    assert {**meta['tokenizer'], 'sha256': 0} == {'name': 'bytes', 'sha256': 0, 'n_vocab': 257, 'eot': 256}
    p.prepare(settings('stdlib', tmp_path / 'out', tokens=200_000))
    assert 'is complete: nothing to do' in capsys.readouterr().out


@pytest.mark.parametrize('validation', [True, False])
def test_any_number_of_workers_gives_the_same_folder(validation, tmp_path):
    make_source(tmp_path / 'raw', validation=validation)
    for workers in (1, 2):
        p.prepare(settings(tmp_path / 'raw', tmp_path / f'out{workers}', workers=workers))
    assert content(tmp_path / 'out1') == content(tmp_path / 'out2')


def test_blocks_bound_memory_and_keep_every_document(tmp_path, monkeypatch):
    source = make_source(tmp_path / 'raw', files=1)
    monkeypatch.setattr(p, 'BLOCK', 5_000)
    p.prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=0))
    got = [text for domain in DOMAINS for text in texts_of(tmp_path / 'out' / 'train' / f'{domain}.bin')]
    documents = source['train/chunk1/example_0.jsonl']
    assert sorted(got) == sorted(unicodedata.normalize('NFC', text) for _, text in documents if text)


@pytest.mark.skipif(not (SHARED / 'slimpajama_mini').exists(), reason='no ../shared/data/slimpajama_mini')
def test_shared_documents_come_out_in_the_paper_s_proportions(tmp_path):
    p.prepare(settings(SHARED / 'slimpajama_mini', tmp_path / 'out', tokenizer=str(SHARED / 'tokenizer'),
                       tokens=400_000))
    meta = json.loads((tmp_path / 'out' / 'meta.json').read_text())
    # MANIFEST.md's count, an <|endoftext|> for each document, and one document that spells it in six tokens
    assert sum(n['tokens'] for n in meta['splits']['validation'].values()) == 1_284_363 + 2_079 + 5
    for domain, share in p.TABLE_2.items():
        assert 0 <= meta['splits']['train'][domain]['tokens'] - share * 400_000 < 40_000
    assert (tmp_path / 'out' / 'tokenizer.json').read_bytes() == (SHARED / 'tokenizer' / 'tokenizer.json').read_bytes()


# ---- Killed and continued

CHILD = """
import os, signal, sys
import prepare_slimpajama as p
replace, calls, last = os.replace, 0, int(sys.argv[1])
def dying_replace(*paths):
    global calls
    calls += 1
    if calls == last:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
os.replace = dying_replace
p.prepare(p.Settings(**eval(sys.argv[2])))
"""


def test_killed_before_any_rename_and_continued_is_byte_identical(tmp_path):
    make_source(tmp_path / 'raw', validation=False, files=3)
    p.prepare(settings(tmp_path / 'raw', tmp_path / 'whole'))
    kwargs = {'source': str(tmp_path / 'raw'), 'tokenizer': 'bytes', 'tokens': 20_000, 'workers': 1}
    for last in (1, 2, 3, 5, 6, 12, 18, 19):  # progress.json; files; token files; meta.json
        out = tmp_path / f'out{last}'
        command = [sys.executable, '-c', CHILD, str(last), repr({**kwargs, 'out': str(out)})]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL and not (out / 'meta.json').exists(), (last, done.stderr)
        p.prepare(settings(tmp_path / 'raw', out))
        assert content(out) == content(tmp_path / 'whole'), last


def test_killed_workers_and_all_continue_byte_identically(tmp_path):
    make_source(tmp_path / 'raw', files=12, count=3000)
    p.prepare(settings(tmp_path / 'raw', tmp_path / 'whole', tokens=0))
    command = [sys.executable, 'prepare_slimpajama.py', f'--source={tmp_path}/raw', f'--out={tmp_path}/out',
               '--tokenizer=bytes', '--tokens=0', '--workers=2']
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        progress = tmp_path / 'out' / 'progress.json'
        while not (progress.exists() and json.loads(progress.read_text())['done'] >= 2):
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
    assert not (tmp_path / 'out' / 'meta.json').exists()
    with open(tmp_path / 'out' / 'train' / 'C4.bin.part', 'ab') as f:
        f.write(b'half-written')
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and 'continuing after' in done.stdout, done.stderr
    assert content(tmp_path / 'out') == content(tmp_path / 'whole')


def stopped(tmp_path, monkeypatch):
    """A source whose preparation stopped half-way, because the disk was full; returns the message."""
    make_source(tmp_path / 'raw')
    save, calls = p.save, iter(range(4))

    def full(path, data):
        if next(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(path, data)
    with monkeypatch.context() as m, pytest.raises(OSError) as error:
        m.setattr(p, 'save', full)
        p.prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    return str(error.value)


def test_full_disk_is_one_line_and_progress_is_kept(tmp_path, monkeypatch, capsys):
    assert 'no space left' in stopped(tmp_path, monkeypatch)
    p.prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    assert 'continuing after 2 of 6 files' in capsys.readouterr().out
    p.prepare(settings(tmp_path / 'raw', tmp_path / 'whole'))
    assert content(tmp_path / 'out') == content(tmp_path / 'whole')


def test_other_settings_or_changed_files_are_refused(tmp_path, monkeypatch):
    stopped(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r'begun with --seed=1337.*choose another --out, or delete'):
        p.prepare(settings(tmp_path / 'raw', tmp_path / 'out', seed=1))
    part = tmp_path / 'out' / 'validation' / 'C4.bin.part'
    whole = part.read_bytes()
    part.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match='C4.bin.part is shorter than'):
        p.prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    part.write_bytes(whole)
    write_rows(tmp_path / 'raw' / 'train' / 'new.jsonl', make_documents(5, 7))
    with pytest.raises(ValueError, match='--source has changed since'):
        p.prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    (tmp_path / 'raw' / 'train' / 'new.jsonl').unlink()
    p.prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    with pytest.raises(ValueError, match='begun with --tokens=20000'):
        p.prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=5))
    with pytest.raises(ValueError, match='holds other files'):
        p.prepare(settings(tmp_path / 'raw', tmp_path / 'raw'))


# ---- Bad input: one line that says where

def broken(text):
    return lambda raw: (raw / 'train' / 'chunk1' / 'example_2.jsonl').write_text('{"text": "a", "meta": '
                        '{"redpajama_set_name": "RedPajamaC4"}}\n' + text)


def cut_short(raw):
    write_rows(raw / 'train' / 'z.jsonl.zst', make_documents(50, 1))
    data = (raw / 'train' / 'z.jsonl.zst').read_bytes()
    (raw / 'train' / 'z.jsonl.zst').write_bytes(data[:len(data) // 2])


def other_columns(raw):
    pa = pytest.importorskip('pyarrow')
    import pyarrow.parquet
    pyarrow.parquet.write_table(pa.table({'content': ['a']}), raw / 'train' / 'z.parquet')


BAD = {
    r'example_2.jsonl: line 2 is broken JSON': broken('{"text": '),
    r'example_2.jsonl: line 2 is not \{"text"': broken('{"text": "a"}'),
    r'example_2.jsonl: line 3 is not \{"text"': broken('\n[1, 2]'),
    r"example_2.jsonl: line 2: unknown domain 'RedPajama../../x'": broken(
        '{"text": "a", "meta": {"redpajama_set_name": "RedPajama../../x"}}'),
    r'example_2.jsonl: line 2 is longer than': broken('"' + 'x' * 20_000),
    r'z.jsonl.zst: Truncated': cut_short,
    r'z.jsonl.zst: .*ZSTD': lambda raw: (raw / 'train' / 'z.jsonl.zst').write_bytes(b'not zstd at all'),
    r'z.parquet: no column meta: it has content': other_columns,
}


@pytest.mark.parametrize('message', BAD)
def test_bad_input_says_file_and_line(message, tmp_path, monkeypatch):
    make_source(tmp_path / 'raw')
    BAD[message](tmp_path / 'raw')
    monkeypatch.setattr(p, 'MAX_LINE', 10_000)
    with pytest.raises(ValueError, match=message) as error:
        p.prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=0))
    assert '\n' not in str(error.value) and not (tmp_path / 'out' / 'meta.json').exists()


@pytest.mark.parametrize('changes, message', [
    ({'source': 'no/such/folder'}, "no source 'no/such/folder'"),
    ({'weights': {'Books': 1}}, "--weights names 'Books', which the source lacks: it has CommonCrawl"),
    ({'weights': {'Book': 0}}, '--weights must be positive numbers'),
    ({'tokens': -1}, '--tokens, --workers and --seed must be 0 or more'),
    ({'tokenizer': 'none'}, 'no tokenizer at none'),
])
def test_bad_settings_are_one_line_and_exit_status_1(changes, message, tmp_path):
    make_source(tmp_path / 'raw', files=1, count=3)
    options = {'source': tmp_path / 'raw', 'out': tmp_path / 'out', 'tokenizer': 'bytes', **changes}
    done = subprocess.run([sys.executable, 'prepare_slimpajama.py', *(f'--{k}={v}' for k, v in options.items())],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith('error: ') and message in done.stderr, done.stderr
    assert done.stderr.count('\n') == 1


def test_folders_without_usable_documents_are_refused(tmp_path):
    (tmp_path / 'raw').mkdir()
    with pytest.raises(ValueError, match='no training file'):
        p.prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    (tmp_path / 'raw' / 'a.txt').write_text('only one document')
    with pytest.raises(ValueError, match='raw has one document only'):
        p.prepare(settings(tmp_path / 'raw', tmp_path / 'out2'))
    write_rows(tmp_path / 'rows' / 'train.jsonl', [('C4', 'a'), ('C4', 'b')])
    with pytest.raises(ValueError, match="--weights names 'Book', which the source lacks"):
        p.prepare(settings(tmp_path / 'rows', tmp_path / 'out3', weights={'C4': 1, 'Book': 1}))


def test_space_and_dry_domains_are_reported(tmp_path, monkeypatch, capsys):
    make_source(tmp_path / 'raw')
    with monkeypatch.context() as m, pytest.raises(OSError, match='not enough space for 0.00 GB'):
        m.setattr(p.shutil, 'disk_usage', lambda path: p.shutil._ntuple_diskusage(10, 9, 1))
        p.prepare(settings(tmp_path / 'raw', tmp_path / 'out'))
    p.prepare(settings(tmp_path / 'raw', tmp_path / 'out', tokens=60_000))
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert 'ran dry' in lines['CommonCrawl'] and '30,000' in lines['CommonCrawl'] and 'ran dry' not in lines['ArXiv']


# ---- The hub

def test_hub_stream_survives_failures_and_equals_the_local_files(tmp_path, monkeypatch):
    source, waits, failures = make_source(tmp_path / 'raw'), [], [0, 7, 7]

    def open_hub(repository, revision, path):
        assert (repository, revision) == ('some/where', 'v2')
        for number, (domain, text) in enumerate(source[path]):
            if failures and number == failures[0]:
                failures.pop(0)
                raise ConnectionError('reset')
            yield {'text': text, 'meta': {'redpajama_set_name': f'RedPajama{domain}'}}
    monkeypatch.setattr(p, 'list_hub', lambda *_: [('README.md', 9), ('test/a.jsonl', 9), *((n, 9) for n in source)])
    monkeypatch.setattr(p, 'open_hub', open_hub)
    monkeypatch.setattr(p.time, 'sleep', waits.append)
    p.prepare(settings('some/where', tmp_path / 'out', revision='v2'))
    assert waits == [1, 1, 2] and not failures  # the second failure came after new rows
    p.prepare(settings(tmp_path / 'raw', tmp_path / 'local'))
    mine, local = content(tmp_path / 'out'), content(tmp_path / 'local')
    assert {k: v for k, v in mine.items() if k != 'meta.json'} == {k: v for k, v in local.items() if k != 'meta.json'}

    failures += [0] * 9
    with pytest.raises(ValueError, match='example_.*the hub fails, after 6 retries: reset'):
        p.prepare(settings('some/where', tmp_path / 'out2', revision='v2'))
