"""lib/files.py: a file is there whole or not at all, and one process at a time writes a folder."""

import errno
import fcntl
import os
import sys

import pytest
from conftest import raises_one_line
from runs import finish, fork

from lib import files


def test_contents_then_name_then_folder_reach_the_disk(tmp_path, monkeypatch):
    calls = []
    replace = os.replace
    monkeypatch.setattr(os, 'fsync', lambda file: calls.append(os.fstat(file).st_ino))
    monkeypatch.setattr(os, 'replace', lambda *paths: calls.append('rename') or replace(*paths))
    files.write_whole(tmp_path / 'a', 'text')
    assert calls == [(tmp_path / 'a').stat().st_ino, 'rename', tmp_path.stat().st_ino]


def test_a_file_system_that_does_not_flush_folders_writes_whole_files(tmp_path, monkeypatch):
    sync = os.fsync

    def of_files(handle):
        if os.fstat(handle).st_ino == tmp_path.stat().st_ino:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(handle)

    monkeypatch.setattr(os, 'fsync', of_files)
    files.write_whole(tmp_path / 'a', 'text')
    assert (tmp_path / 'a').read_text() == 'text'


@pytest.mark.parametrize('moment', ['fsync', 'replace'])
def test_a_write_that_fails_leaves_the_file_before_and_nothing_else(tmp_path, monkeypatch, moment):
    path = tmp_path / 'a'
    files.write_whole(path, 'old')

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, moment, full)
    with raises_one_line('No space left', path, of=OSError):
        files.write_whole(path, 'new')
    assert path.read_text() == 'old'
    assert os.listdir(tmp_path) == ['a']


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, capsys):
    def unsupported(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, 'flock', unsupported)
    with files.locked(tmp_path, 'training in'):
        pass
    assert capsys.readouterr().err.startswith(f'warning: cannot lock {tmp_path} (')


def speak_into_a_closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = open(writer, 'w')
    with files.one_line_errors():
        print('a line')


def test_a_program_whose_output_nobody_reads_ends_without_a_word():
    """With the status that a shell gives to a death by SIGPIPE."""
    assert finish(fork(speak_into_a_closed_pipe)) == (141, '', '')


def test_a_missing_package_is_one_line_and_a_mistake_in_an_import_keeps_its_place():
    with pytest.raises(SystemExit, match='no_such_package.*pip install'), files.one_line_errors():
        import no_such_package  # noqa: F401
    with pytest.raises(ModuleNotFoundError), files.one_line_errors():
        import config.no_such_file  # noqa: F401
