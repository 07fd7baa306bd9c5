"""rundir.py: which checkpoints a folder holds, its log, its settings, and what produced it."""

import json
import math
import platform
import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from runs import command_line, newest

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
    load_checkpoint,
    name_misfits,
    provenance,
    read_log,
)
from train import TrainConfig


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
        load_checkpoint(tmp_path)


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


# --- the log -------------------------------------------------------------------------------------


def write_log(tmp_path, text):
    (tmp_path / 'log.jsonl').write_text(text)
    return tmp_path


def test_numbers_that_are_not_finite_are_null_in_the_log(tmp_path):
    record = Log(tmp_path / 'log.jsonl')
    record.write({'step': 0, 'loss': math.nan, 'lr': math.inf, 'val': {'A': -math.inf}})
    assert read_entries(tmp_path) == [{'step': 0, 'loss': None, 'lr': None, 'val': {'A': None}}]


def test_a_log_is_cut_at_the_step_where_a_run_goes_on(tmp_path):
    lines = [
        {'step': 0, 'val': {'A': 4.0, 'mean': 4.0}},
        *({'step': n, 'loss': 3.0} for n in range(4)),
    ]
    lines.append({'step': 2, 'val': {'A': 3.0, 'mean': 3.0}})
    write_log(tmp_path, ''.join(json.dumps(line) + '\n' for line in lines))
    path = tmp_path / 'log.jsonl'
    Log(path, read_log(path, 2))  # the evaluation of step 2 stays, what came after goes
    assert read_entries(tmp_path) == [*lines[:3], lines[5]]
    Log(path)  # a new run
    assert read_entries(tmp_path) == []


# --- settings and provenance ---------------------------------------------------------------------


def test_a_checkpoint_whose_config_is_refused_is_named(half):
    checkpoint = newest(f'{half("out/odd")}')
    checkpoint['model_config']['n_head'] = 3
    checkpoint['data']['tokenizer'] = {'name': 'bytes', 'sha256': tokenizer.Bytes.sha256}
    torch.save(checkpoint, 'out/odd/ckpt_6.pt')
    with pytest.raises(ValueError, match='^out/odd/ckpt_6.pt: n_embd'):
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
