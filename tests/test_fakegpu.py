"""tests/fakegpu.py, its page and the configs' comments: what is quoted is what was measured."""

import json
import re

import fakegpu
import pytest
from conftest import ROOT

from configurator import configure
from model import GPTConfig
from train import TrainConfig

RESULTS = ROOT / 'results/fakegpu'
TABLES = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob('torch_*.json'))}
NEWEST = TABLES['torch_2.13']['rows']


def test_every_row_is_a_command_line_of_train():
    for what, words in fakegpu.all_rows().values():
        assert what in ('train', 'ddp', 'decode')
        configure(TrainConfig, GPTConfig, argv=[word for word in words if word != '--graphs'])


@pytest.mark.parametrize('table', TABLES)
def test_every_row_is_measured_and_none_is_recompiled(table):
    rows = TABLES[table]['rows']
    assert set(rows) == set(fakegpu.all_rows())
    for name, row in rows.items():
        assert 'problem' not in row, name
        assert row.get('recompiled', 0) == 0, name


@pytest.mark.parametrize('table', TABLES)
def test_the_page_has_the_table_that_was_measured(capsys, table):
    fakegpu.print_table(fakegpu.FakeConfig(out=str(RESULTS / f'{table}.json')))
    assert capsys.readouterr().out.strip() in (RESULTS / 'README.md').read_text()


def test_the_table_names_the_problem_of_a_row(capsys, tmp_path):
    rows = {'a': {'problem': 'no such kernel'}, 'b': {'batch': 2, 'length': 8, 'step_gib': 1.26}}
    path = tmp_path / 'table.json'
    path.write_text(json.dumps({'torch': '2', 'device': 'none', 'rows': rows}))
    fakegpu.print_table(fakegpu.FakeConfig(out=str(path)))
    out = capsys.readouterr().out
    assert '| a | no such kernel |' in out and '| b | 2 x 8 |  |  | 1.3 |' in out


def test_the_memory_that_a_config_names_is_that_of_its_row():
    quoted = 0
    for path in (ROOT / 'config').glob('*.py'):
        comment = ' '.join(re.findall(r'^# (.*)$', path.read_text(), re.M))
        for size, name in re.findall(r'([\d.]+) GiB[^`]*?`([^`]+)`', comment):
            assert f'{NEWEST[name]["step_gib"]:.1f}' == size, path
            quoted += 1
    assert quoted > 20
