"""Pictures and tables, drawn from the numbers that paper/reproduce.py keeps (paper/pictures.py)."""

import json
import shutil

import numpy as np
import pytest
from programs import assert_one_line, program
from test_reproduce import CPU, TINY, write_finished

from model import GPTConfig
from paper import analyze, draw, figures, pictures, reproduce
from paper.figures import FIGURES
from paper.runs import SCALES

pytestmark = pytest.mark.usefixtures('figures_closed')

CURVES = ('relative', 'pairs')


def made(name, monkeypatch):
    """Reproduce a figure from finished runs of random losses. Returns its titles."""
    rng = np.random.default_rng(0)
    for i, run in enumerate(FIGURES[name].runs()):
        write_finished(run, (rng.normal(3.0 - 0.1 * i, 0.01, 120)).tolist())
    titles = []
    save = draw.save

    def remember(figure, out):
        titles.append(title_of(figure))
        save(figure, out)

    monkeypatch.setattr(pictures.draw, 'save', remember)
    reproduce.reproduce(name, reproduce.ReproduceConfig(), CPU)
    return titles


def title_of(figure):
    """Its own, or where that is a text like others, the one that starts with the figure's number."""
    texts = [figure.get_suptitle(), *(text.get_text() for text in figure.texts)]
    return next(text for text in texts if text.startswith('Fig. '))


def of_runs(how):
    return [
        (name, panel)
        for name, figure in FIGURES.items()
        for panel in figure.panels
        if panel.how in how
    ]


@pytest.mark.parametrize('name', ['fig2', 'fig4', 'fig5', 'fig11'])
def test_a_figure_is_drawn_from_its_file_as_from_its_runs(here, monkeypatch, name):
    made(name, monkeypatch)
    picture = here / f'results/tiny/{name}.png'
    before = picture.read_bytes()
    picture.unlink()
    if FIGURES[name].runs():
        shutil.rmtree('out')
    assert program(reproduce.main, 'redraw', name)[0] == 0
    assert picture.read_bytes() == before


def test_numbers_of_another_panel_or_of_other_runs_are_not_drawn(here, monkeypatch):
    made('fig6', monkeypatch)
    path = here / 'results/tiny/fig6.json'
    kept = json.loads(path.read_text())
    (panel,) = kept['panels']
    curve = next(iter(panel['numbers'].values()))
    for change in ({'how': 'bars'}, {'title': 'another'}, {'numbers': {'out/tiny/gone': curve}}):
        path.write_text(json.dumps({**kept, 'panels': [{**panel, **change}]}))
        status, _, _ = program(reproduce.main, 'redraw', 'fig6')
        assert_one_line(status, 'error: not drawn: fig6: ')


def test_every_picture_has_a_title_of_its_own_that_names_its_figure():
    titles = {}
    for name, figure in FIGURES.items():
        alone = [
            panel for panel in figure.panels if panel.how not in (*CURVES, 'scaling', 'critical')
        ]
        several = len(alone) + (len(alone) < len(figure.panels)) > 1
        if len(figure.panels) > 1:
            assert all(panel.title for panel in figure.panels), name
        assert not several or len({panel.title for panel in figure.panels}) == len(figure.panels)
        titles[pictures.title_of(name, figure.title, TINY)] = name
    assert len(titles) == len(FIGURES)
    assert pictures.title_of('fig12a', 'x', TINY) == 'Fig. 12a: x (tiny, one seed)'
    assert pictures.title_of('fig2', 'x', TINY) == 'Fig. 2: x'


def test_two_pictures_of_one_figure_have_two_titles(here, monkeypatch):
    def entropies(how, runs, *_):
        series = {'entropy': {'mean': [5.0, 4.0], 'standard_error': [0.1, 0.1]}}
        report = {'series': series, 'sequences': 2, 'length': 8, 'config': vars(GPTConfig())}
        return {'runs': dict.fromkeys(runs, report)}

    monkeypatch.setattr(analyze, 'analyze', entropies)
    monkeypatch.setattr(reproduce, 'against_the_paper', lambda *_: [])
    titles = made('fig1', monkeypatch)
    assert len(set(titles)) == 2 and all(title.startswith('Fig. 1: ') for title in titles)
    assert {path.name for path in here.glob('results/tiny/*.png')} == {
        'fig1.png',
        'fig1_entropy.png',
    }


@pytest.mark.parametrize('scale', SCALES.values(), ids=SCALES)
def test_every_curve_has_a_name_that_no_other_of_its_panel_has(scale):
    for name, panel in of_runs((*CURVES, *analyze.ANALYSES)):
        names = pictures.names_of(FIGURES[name], panel, scale)
        drawn = panel.runs[1::2] if panel.how == 'pairs' else panel.runs
        assert len(names) == len(set(names.values())) == len(drawn), (name, names)
        for words in names.values():
            assert 'Transformer' not in words and '=' not in words and '_' not in words


def test_a_curve_is_named_after_what_tells_it_from_the_others():
    def names(name, which=0):
        figure = FIGURES[name]
        return list(pictures.names_of(figure, figure.panels[which], TINY).values())

    assert names('fig4')[1:] == ['keys shared', 'values shared', 'both shared (CLA)']
    assert names('fig5')[0] == '128 tokens'
    assert names('fig5', 2)[-1] == '1.7M parameters'
    assert names('fig10')[0] == 'SVFormer, 256 tokens'
    assert names('fig12a')[0] == 'learning rate 0.003'
    assert names('fig14')[1:] == ['four anchors', 'two anchors', 'one anchor']


def test_the_zero_line_says_whose_loss_it_is():
    def baseline(name):
        return pictures.baseline_of(FIGURES[name].panels[0])

    assert baseline('fig6') == 'vanilla'
    assert baseline('fig11') == 'vanilla, same setting'
    assert baseline('fig12d') == 'its own baseline'


def test_the_words_of_the_list_of_figures_are_the_readmes():
    assert '| fig2 | ' in figures.table() and 'no run needed' in figures.table()
    assert figures.table().count('no run needed') == 1
