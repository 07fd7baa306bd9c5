"""lib/rundir.py: its checkpoints, its log, and what produced a run."""

import os
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT

from lib.machine import Machine
from lib.rundir import load_checkpoint, provenance
from train import TrainConfig, settings_of

FULL = RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    'error', [PermissionError(13, 'no'), OSError(5, 'I/O'), MemoryError(), FULL]
)
def test_a_checkpoint_that_cannot_be_read_just_now_is_not_called_damaged(whole, monkeypatch, error):
    """Called so, it would be set aside, and the run would go on from an older one."""
    monkeypatch.setattr(torch, 'load', Mock(side_effect=error))
    with pytest.raises(type(error)):
        load_checkpoint(whole, warn=pytest.fail)


def test_a_checkpoint_that_cannot_be_mapped_is_read(whole, monkeypatch):
    load = torch.load

    def without_mmap(*args, mmap=False, **options):
        if mmap:
            raise RuntimeError('unable to mmap 8 bytes from file: No such device (19)')
        return load(*args, **options)

    monkeypatch.setattr(torch, 'load', without_mmap)
    assert load_checkpoint(whole, warn=pytest.fail)['step'] == 12


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
