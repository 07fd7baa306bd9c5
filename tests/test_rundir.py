"""lib/rundir.py: its checkpoints, its log, and what produced a run."""

import os

import pytest
from conftest import ROOT

from lib import rundir
from lib.machine import Machine
from lib.rundir import load_checkpoint, provenance
from train import TrainConfig, settings_of


@pytest.mark.parametrize('error', [PermissionError(13, 'no'), OSError(5, 'I/O'), MemoryError()])
def test_a_checkpoint_that_cannot_be_read_just_now_is_not_called_damaged(
    tmp_path, monkeypatch, error
):
    """Called so, it would be set aside, and the run would go on from an older one."""

    def read(path):
        raise error

    monkeypatch.setattr(rundir, 'read_checkpoint', read)
    for name in ('ckpt_2.pt', 'ckpt_1.pt'):
        (tmp_path / name).touch()
    with pytest.raises(type(error)):
        load_checkpoint(tmp_path, warn=print)


def test_a_setting_that_an_older_checkpoint_lacks_has_its_default(whole):
    checkpoint = load_checkpoint(whole, warn=print)
    del checkpoint['settings']['max_skipped']
    assert settings_of(checkpoint).max_skipped == TrainConfig.max_skipped


def test_the_commit_is_gits_and_without_git_the_environments(monkeypatch):
    monkeypatch.setenv('COMMIT', '1a2b3c4')
    described = provenance(Machine('cpu'))['commit']
    assert described not in ('1a2b3c4', 'unknown') or not (ROOT / '.git').exists()
    monkeypatch.setenv('PATH', '')
    assert provenance(Machine('cpu'))['commit'] == '1a2b3c4'
    monkeypatch.delenv('COMMIT')
    assert provenance(Machine('cpu'))['commit'].startswith('unknown: ')


def test_of_another_users_checkout_it_says_why_the_commit_is_unknown(monkeypatch):
    monkeypatch.delenv('COMMIT', raising=False)
    monkeypatch.setenv('GIT_TEST_ASSUME_DIFFERENT_OWNER', '1')  # git's own tests do so
    for name in ('GIT_CONFIG_GLOBAL', 'GIT_CONFIG_SYSTEM'):
        monkeypatch.setenv(name, os.devnull)
    commit = provenance(Machine('cpu'))['commit']
    assert 'ownership' in commit if (ROOT / '.git').exists() else commit.startswith('unknown: ')
