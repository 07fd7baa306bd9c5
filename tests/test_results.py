"""results/: a page beside logs or numbers says where they come from, and its tables are its reports'."""

import re

import pytest
from conftest import ROOT
from runs import succeed
from test_readme import typed

import compare

PAGES = sorted(ROOT.glob('results/*/README.md'))
MEASURED = [path for path in PAGES if len([*path.parent.iterdir()]) > 1]
REPORTS = [
    pytest.param(path, name, id=name)
    for path in PAGES
    for name in sorted({*re.findall(r'<!-- report (\w+) -->', path.read_text())})
]


@pytest.mark.parametrize('path', MEASURED, ids=lambda path: path.parent.name)
def test_a_page_beside_logs_or_numbers_names_commit_date_and_hardware(path):
    text = path.read_text()
    assert re.search(r'commits? [0-9a-f]{7}', text, re.I)
    assert re.search(r'20\d\d-\d\d-\d\d|\d \w+ 20\d\d', text)
    assert re.search('AMD|Apple|Intel|NVIDIA', text)


@pytest.mark.parametrize('path, name', REPORTS)
def test_each_table_between_two_marks_is_what_the_report_prints(path, name, here, monkeypatch):
    """By the commands on the page, which unpack its runs."""
    monkeypatch.setattr('comparison.charts.svg', lambda figure, label: '')  # which take long
    text = path.read_text()
    blocks = re.findall(r'^```\n(.*?)^```$', text, re.M | re.S)
    (code,) = (block for block in blocks if 'tar xf' in block and f'--name={name} ' in block)
    (here / 'results').symlink_to(ROOT / 'results')
    for _, *words in typed(code):
        succeed(compare.main, *words)
    report = (here / f'out/compare/{name}/report.md').read_text()
    for table in re.findall(rf'<!-- report {name} -->\n(.*?)<!-- end -->', text, re.S):
        assert table in report
