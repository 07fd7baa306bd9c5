"""Whatever happens to a preparation, or comes in as data, nothing is lost and nothing is strange."""

import os
import resource
from pathlib import Path

import pytest
from conftest import raises_one_line, write_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import finish, fork

from lib import sources, tokenizer
from lib.data import Dataset, TrainingRows

META = {'redpajama_set_name': 'RedPajamaC4'}


def documents_of(path):
    """The documents of a local file in SlimPajama's form."""
    return sources.read_rows(Path(path))


# --- accidents -----------------------------------------------------------------------------------


def test_a_token_file_cut_off_while_it_is_in_use_is_one_line(work):
    write_dataset(Path('data/cut'), {'train': {'A': 5000}, 'validation': {'A': 300}})
    dataset = Dataset('cut')
    os.truncate('data/cut/train/A.bin', 4000)
    with raises_one_line('data/cut/train/A.bin was cut off'):
        TrainingRows(dataset, 32, seed=1).batch(200)


def test_a_dataset_exchanged_under_a_running_job_is_read_as_it_was_opened(here):
    """By a link that is moved."""
    splits = {'train': {'A': 300}, 'validation': {'A': 90}}
    for seed, name in enumerate(('ours', 'theirs')):
        write_dataset(Path('data', name), splits, seed=seed)
    Path('data/now').symlink_to('ours')
    dataset = Dataset('now')

    def read(dataset=dataset):
        return {split: dataset.read(split, 'A', 8, 50).tolist() for split in splits}

    before = read()
    Path('data/now').unlink()
    Path('data/now').symlink_to('theirs')
    assert read() == before != read(Dataset('now'))


# --- hostile files -------------------------------------------------------------------------------


def read_both(good, bomb, most):
    """Print the error of reading the second file, having made sure of how little memory it takes."""
    sources.MAX_LINE = 2**20

    def read(path):
        return sum(len(text) for _, text in documents_of(path))

    def peak_megabytes():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    assert read(good) == 2
    before = peak_megabytes()
    try:
        read(bomb)
    except ValueError as error:
        print(error)
    growth = peak_megabytes() - before
    assert growth < most, f'{growth} MB'


def test_a_hostile_file_of_a_giant_document_is_refused_in_little_memory(tmp_path):
    zstandard = pytest.importorskip('zstandard')
    text = b'{"text": "%s", "meta": {"redpajama_set_name": "RedPajamaC4"}}\n'
    paths = [tmp_path / 'good.jsonl.zst', tmp_path / 'bomb.jsonl.zst']
    paths[0].write_bytes(zstandard.compress(text % b'ab'))
    paths[1].write_bytes(zstandard.compress(text % (b'a' * 2**28)))
    assert paths[1].stat().st_size < 2**17
    status, out, err = finish(fork(read_both, *map(str, paths), 64))
    assert (status, out) == (0, 'line 1 is longer than 1 MB\n'), err


def test_many_long_rows_of_parquet_made_of_one_text_take_little_memory(tmp_path):
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    paths = [tmp_path / 'good.parquet', tmp_path / 'bomb.parquet']
    for path, text, rows in zip(paths, ('ab', 'a' * 2**23), (1, 40), strict=True):
        indices = pyarrow.array([0] * rows, pyarrow.int32())
        texts = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([text]))
        table = pyarrow.table({'text': texts, 'meta': pyarrow.array([META] * rows)})
        parquet.write_table(table, path, compression='zstd', store_schema=False)
    assert paths[1].stat().st_size < 2**14
    status, out, err = finish(fork(read_both, *map(str, paths), 128))
    message = 'row 1, or one of the next three, is longer than 1 MB\n'
    assert (status, out) == (0, message), err


# --- anything at all -----------------------------------------------------------------------------

BOUNDED = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LINES = [
    b'{"text": "a", "meta": {"redpajama_set_name": "RedPajamaC4"}}',
    b'{"text": "a"}',
    b'[' * 2000,
    b'null',
    b'1e999',
    b'{"text": "\\ud800", "meta": {"redpajama_set_name": "RedPajamaBook"}}',
    b'{"text": 1, "meta": {}}',
    b'\xff',
    b'',
]
LINE = st.one_of(st.binary(max_size=60), st.sampled_from(LINES))


@BOUNDED
@given(st.lists(LINE, max_size=5))
def test_any_bytes_are_documents_or_an_error_that_names_the_line(tmp_path, lines):
    path = tmp_path / 'any.jsonl'
    path.write_bytes(b'\n'.join(lines))
    try:
        for domain, text in documents_of(path):
            assert domain in sources.TABLE_2
            tokenizer.load('bytes').encode(text)
    except ValueError as error:
        assert str(error).startswith('line ')


@BOUNDED
@given(st.binary(max_size=80))
def test_any_bytes_are_no_zstd_or_parquet_file_or_an_error(tmp_path, content):
    pytest.importorskip('pyarrow')
    for name in ('any.jsonl.zst', 'any.parquet'):
        path = tmp_path / name
        path.write_bytes(b'PAR1' + content + b'PAR1' if name == 'any.parquet' else content)
        try:
            assert not list(documents_of(path))
        except (ValueError, OSError):
            pass
