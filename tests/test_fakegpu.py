"""tests/fakegpu.py, its page and the configs' comments: what is quoted is what was measured."""

import re

import fakegpu
import pytest
from conftest import ROOT, read_json

from configurator import configure
from model import GPTConfig
from train import TrainConfig

RESULTS = ROOT / 'results/fakegpu'
TABLES = {path.stem: read_json(path) for path in sorted(RESULTS.glob('torch_*.json'))}
# Some rows were counted again when q, k and v had become matrices of their own.
AGAIN = read_json(RESULTS / 'parts_2.13.json')['rows']
NEWEST = TABLES['torch_2.13']['rows'] | AGAIN
NUMBER = r'(\d+\.\d)'


def test_every_row_is_a_command_line_of_train():
    for _, words in fakegpu.all_rows().values():
        configure(TrainConfig, GPTConfig, argv=words)


@pytest.mark.parametrize('table', TABLES)
def test_no_row_has_a_problem_or_is_recompiled(table):
    rows = TABLES[table]['rows']
    for name, row in rows.items():
        assert 'problem' not in row, name
        assert row.get('recompiled', 0) == 0, name


@pytest.mark.parametrize('table', TABLES)
def test_the_table_is_what_was_measured(capsys, table):
    fakegpu.print_table(fakegpu.FakeConfig(out=str(RESULTS / f'{table}.json')))
    assert capsys.readouterr().out == (RESULTS / f'{table}.md').read_text()
    assert fakegpu.all_rows().keys() >= TABLES[table]['rows'].keys()


@pytest.mark.parametrize(
    'size, checkpointed',
    [
        ('82m', '2048 vanilla checkpointed'),
        ('180m', '180m vanilla checkpointed'),
        ('468m', '468m vanilla checkpointed'),
    ],
)
def test_the_memory_that_a_config_names_is_that_of_its_rows(size, checkpointed):
    text = (ROOT / f'config/vanilla_{size}.py').read_text()
    comment = ' '.join(re.findall(r'^# (.*)$', text, re.M))
    quoted = {
        rf'A step takes {NUMBER} GiB of a GPU': f'{size} vanilla',
        rf'{NUMBER} of each of eight': f'{size} vanilla, DDP of 8',
        rf'with batch_size=16 {NUMBER}': f'{size} vanilla, batch 16',
        rf'with 8 {NUMBER}': f'{size} vanilla, batch 8',
        rf'checkpointed {NUMBER}': checkpointed,
        rf'without this, a step takes {NUMBER} GiB': f'{size} vanilla, budget 1',
    }
    for pattern, row in quoted.items():
        found = re.search(pattern, comment)
        assert bool(found) == (row in NEWEST), pattern
        if found:
            assert found[1] == f'{NEWEST[row]["step_gib"]:.1f}', pattern
