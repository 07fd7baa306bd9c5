"""paper/README.md: each table and figure of the paper is there, with a command that can be typed."""

import re

import pytest
from comparisons import plan_of_line
from conftest import ROOT
from test_readme import parse, typed

PAGE = (ROOT / 'paper/README.md').read_text()
CODE = re.findall('`([^`]*(?:python|torchrun) [^`]*)`', PAGE)
START, FULL_SIZE = 'config/start.py', 'config/vanilla_82m.py'
COMMANDS = [words for code in CODE for words in typed(code)]
COMPARISONS = {words[2]: words[1:] for words in COMMANDS if words[0] == 'compare.py'}
OTHERS = [words for words in COMMANDS if words[0] != 'compare.py']


def test_every_table_and_figure_has_a_row_and_each_comparison_a_name_of_its_own():
    first_cells = ' '.join(re.findall(r'^\| ([^|]+) \|', PAGE, re.M))
    assert {int(n) for n in re.findall(r'Fig. (\d+)', first_cells)} == {*range(1, 16)}
    assert all(f'Table {n}' in first_cells for n in (1, 2, 5)) and 'Tables 3, 4' in first_cells
    assert len(COMPARISONS) + len(OTHERS) == len(COMMANDS) > 30


@pytest.mark.parametrize('config', [START, FULL_SIZE])
@pytest.mark.parametrize('name', COMPARISONS)
def test_a_figure_is_a_plan_of_compare_at_every_size(name, config, monkeypatch):
    """Which refuses arms and contrasts that are none, or that cannot be compared."""
    monkeypatch.chdir(ROOT)
    plan = plan_of_line(*[config if word == START else word for word in COMPARISONS[name]])
    training, model = plan.configs(plan.example('vanilla'))
    assert f'--name={plan.folder.name}' == name and plan.baseline == 'vanilla'
    assert config != START or training.rows_per_step * model.block_size == 4096


@pytest.mark.parametrize('words', OTHERS, ids=' '.join)
def test_a_command_is_one_that_its_program_takes(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    parse(words, monkeypatch)
