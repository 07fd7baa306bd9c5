"""rundir.py: which checkpoints a folder holds, its log, its settings, and what produced it."""

import errno
import json
import math
import os
import platform
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from runs import command_line, load

import rundir
import tokenizer
from comparison.runs import read_entries
from configurator import configure
from data import Dataset
from machine import Machine
from model import GPTConfig
from rundir import (
    Log,
    check_resume,
    check_tokenizer,
    checkpoints,
    find_weights,
    kept_checkpoints,
    load_checkpoint,
    name_misfits,
    nothing_to_resume,
    provenance,
    save_checkpoint,
)
from train import TrainConfig


def test_checkpoints_come_newest_first_and_the_best_last(tmp_path):
    assert checkpoints(tmp_path) == []
    resumable = ['ckpt.pt', 'ckpt.pt.1', 'ckpt.pt.2', 'ckpt.pt.10', 'ckpt_best.pt']
    others = ['ckpt_6.pt', 'ckpt.tmp', 'damaged_ckpt.pt', 'ckpt.pt.old', 'log.jsonl']
    for name in sorted(resumable + others):
        (tmp_path / name).write_text('')
    assert [path.name for path in checkpoints(tmp_path)] == resumable


@pytest.mark.parametrize('error', [PermissionError(13, 'no'), OSError(5, 'I/O'), MemoryError()])
def test_a_checkpoint_that_cannot_be_read_just_now_is_not_called_damaged(
    tmp_path, monkeypatch, error
):
    """Called so, it would be set aside, and the run would go on from an older one."""

    def read(path):
        raise error

    monkeypatch.setattr(rundir, 'read_checkpoint', read)
    for name in ('ckpt.pt', 'ckpt.pt.1'):
        (tmp_path / name).touch()
    with pytest.raises(type(error)):
        load_checkpoint(tmp_path)


def test_kept_checkpoints_are_those_of_save_steps_and_none_to_resume(tmp_path):
    assert (
        nothing_to_resume(tmp_path) == f'there is no {tmp_path}/ckpt.pt: nothing to resume or load'
    )
    for name in ('ckpt_6.pt', 'ckpt_10.pt', 'ckpt_best.pt', 'ckpt_old.pt', 'ckpt.pt.1'):
        (tmp_path / name).write_text('')
    assert [path.name for path in kept_checkpoints(tmp_path)] == ['ckpt_10.pt', 'ckpt_6.pt']
    assert f'--init_from={tmp_path}/ckpt_10.pt and another --out_dir' in nothing_to_resume(tmp_path)


@pytest.mark.parametrize(
    'names, named',
    [(['ckpt_best.pt', 'ckpt_500.pt'], 'ckpt_best.pt'), (['ckpt.pt.1'], 'ckpt.pt.1')],
)
def test_a_folder_without_its_newest_checkpoint_names_another(tmp_path, names, named):
    with pytest.raises(FileNotFoundError, match='ckpt.pt: nothing to resume or load$'):
        find_weights(tmp_path)
    for name in names:
        (tmp_path / name).write_text('')
    with pytest.raises(FileNotFoundError, match=f'no .*/ckpt.pt; .*, such as {tmp_path}/{named}$'):
        find_weights(tmp_path)


def test_a_checkpoint_that_a_live_run_renames_is_found_under_its_new_name(whole, monkeypatch):
    listed = [Path(whole, 'gone.pt'), Path(whole, 'ckpt.pt')]
    monkeypatch.setattr(rundir, 'checkpoints', lambda folder: listed)
    warnings = []
    assert load_checkpoint(whole, warnings.append)['path'] == listed[1] and not warnings
    listed.pop()
    for path in (whole, listed[0]):
        with pytest.raises(FileNotFoundError, match='there is no out/whole/gone.pt'):
            load_checkpoint(path)


def test_a_lack_of_memory_is_not_a_checkpoint_that_does_not_fit():
    with pytest.raises(torch.OutOfMemoryError), name_misfits('out/a/ckpt.pt'):
        raise torch.OutOfMemoryError('CUDA out of memory')
    with (
        pytest.raises(ValueError, match='out/a/ckpt.pt does not fit'),
        name_misfits('out/a/ckpt.pt'),
    ):
        raise RuntimeError('size mismatch')


def test_a_setting_that_an_older_checkpoint_lacks_has_its_default(whole):
    settings, config = configure(TrainConfig, GPTConfig, argv=command_line(whole, {}))
    checkpoint = load_checkpoint(whole)
    del checkpoint['settings']['max_skipped']
    before = dict(checkpoint['settings'])
    assert check_resume(checkpoint, settings, config, Dataset('tiny')) == {}
    assert checkpoint['settings'] == before
    settings.max_skipped = 3
    changed = check_resume(checkpoint, settings, config, Dataset('tiny'))
    assert changed == {'max_skipped': [TrainConfig.max_skipped, 3]}


def refuse_links(*args):
    raise PermissionError(errno.EPERM, 'Operation not permitted')


def fill_the_disk(source, target):
    target.write_bytes(b'half of it')
    raise OSError(errno.ENOSPC, 'No space left on device')


def test_without_links_the_other_names_are_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'link', refuse_links)
    save_checkpoint(tmp_path, {'step': 0}, names=['ckpt_best.pt'])
    save_checkpoint(tmp_path, {'step': 1}, names=['ckpt_best.pt'])
    assert sorted(os.listdir(tmp_path)) == ['ckpt.pt', 'ckpt_best.pt']
    assert load(tmp_path / 'ckpt_best.pt')['step'] == 1


def test_a_disk_that_fills_during_such_a_copy_leaves_the_best_checkpoint_whole(
    tmp_path, monkeypatch
):
    save_checkpoint(tmp_path, {'step': 0}, names=['ckpt_best.pt'])
    monkeypatch.setattr(os, 'link', refuse_links)
    monkeypatch.setattr(shutil, 'copyfile', fill_the_disk)
    with pytest.raises(OSError, match='No space left on device'):
        save_checkpoint(tmp_path, {'step': 1}, names=['ckpt_best.pt'])
    assert sorted(os.listdir(tmp_path)) == ['ckpt.pt', 'ckpt_best.pt']
    assert load(tmp_path / 'ckpt_best.pt')['step'] == 0


def test_what_a_killed_run_left_half_renamed_is_not_written_over(tmp_path, monkeypatch):
    """Its ckpt.tmp is another name of the best checkpoint."""
    save_checkpoint(tmp_path, {'step': 0}, names=['ckpt_best.pt'])
    os.rename(tmp_path / 'ckpt.pt', tmp_path / 'ckpt.tmp')

    def fill_the_disk_at_once(checkpoint, file):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(torch, 'save', fill_the_disk_at_once)
    with pytest.raises(OSError, match='No space left on device'):
        save_checkpoint(tmp_path, {'step': 1})
    assert load(tmp_path / 'ckpt_best.pt')['step'] == 0


# --- the log -------------------------------------------------------------------------------------


def write_log(tmp_path, text):
    (tmp_path / 'log.jsonl').write_text(text)
    return tmp_path


def test_numbers_that_are_not_finite_are_null_in_the_log(tmp_path):
    record = Log(tmp_path / 'log.jsonl')
    record.write({'step': 0, 'loss': math.nan, 'lr': math.inf, 'val': {'A': -math.inf}})
    assert read_entries(tmp_path) == [{'step': 0, 'loss': None, 'lr': None, 'val': {'A': None}}]


def test_a_log_is_cut_at_the_step_where_a_run_goes_on(tmp_path):
    lines = [{'step': 0, 'val': {'mean': 4.0}}, *({'step': n, 'loss': 3.0} for n in range(4))]
    lines.append({'step': 2, 'val': {'mean': 3.0}})
    write_log(tmp_path, ''.join(json.dumps(line) + '\n' for line in lines))
    Log(tmp_path / 'log.jsonl', 2)  # the evaluation of step 2 stays, what came after goes
    assert read_entries(tmp_path) == [*lines[:3], lines[5]]
    Log(tmp_path / 'log.jsonl')  # a new run
    assert read_entries(tmp_path) == []


# --- settings and provenance ---------------------------------------------------------------------


def test_a_checkpoint_whose_config_is_refused_is_named(half):
    checkpoint = load(f'{half("out/odd")}/ckpt.pt')
    checkpoint['model_config']['n_head'] = 3
    checkpoint['data']['tokenizer'] = {'name': 'bytes', 'sha256': tokenizer.Bytes.sha256}
    torch.save(checkpoint, 'out/odd/ckpt.pt')
    with pytest.raises(ValueError, match='^out/odd/ckpt.pt: n_embd'):
        rundir.load_run('out/odd')


def test_another_tokenizer_is_refused_with_both_owners():
    check_tokenizer('out/a', 'same', 'same', 'out/b')
    with pytest.raises(ValueError, match='^out/a was trained with another tokenizer than out/b$'):
        check_tokenizer('out/a', 'one', 'other', 'out/b')


def test_provenance_says_what_produced_a_run():
    facts = provenance(Machine('cpu', 'bfloat16'))
    expected = {
        'device': 'cpu',
        'dtype': 'bfloat16',
        'world_size': 1,
        'threads': 1,
        'torch': torch.__version__,
        'numpy': np.__version__,
        'python': platform.python_version(),
    }
    assert expected.items() <= facts.items()
    assert re.fullmatch(r'\d{4}-\d\d-\d\d', facts['date'])
    assert re.search(r', \d+ cores$', facts['cpu'])
    assert facts['load'] >= 0 and facts['commit']
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize(
    'environment, commit', [({'COMMIT': '1a2b3c4'}, '1a2b3c4'), ({}, 'unknown')]
)
def test_a_copy_without_git_is_told_its_commit(monkeypatch, environment, commit):
    monkeypatch.delenv('COMMIT', raising=False)
    with monkeypatch.context() as patch:
        patch.setenv('PATH', '')
        for name, value in environment.items():
            patch.setenv(name, value)
        assert provenance(Machine('cpu'))['commit'] == commit


def test_the_commit_that_git_names_is_the_one(monkeypatch):
    monkeypatch.setenv('COMMIT', 'another')
    described = provenance(Machine('cpu'))['commit']
    assert described not in ('another', 'unknown') or not (ROOT / '.git').exists()
