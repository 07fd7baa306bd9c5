"""paper/wiring.py: the arrows of Fig. 2 are the wiring of the model, and every arrow is drawn."""

import pytest
import reference
from programs import assert_one_line, program
from variants import VARIANTS, config_of

from model import SOURCES, GPTConfig
from paper import draw, wiring
from paper.wiring import EMBEDDING, Arrow

pytestmark = pytest.mark.usefixtures('figures_closed')


def arrows_by_hand(config):
    """What a layer uses of others, layer by layer from the equations; it shares no code with wire()."""
    expected = set()
    for n in range(config.n_layer):
        owners = {part: reference.owner(config, part, n) for part in 'qkv'}
        for part, owner in owners.items():
            if owner != n:
                expected.add(Arrow('borrow', part, owner, n))
                continue
            if not getattr(config, f'{part}_residual'):
                continue
            for source in reference.sources_of(config, n):
                own = {p: reference.owner(config, p, source) for p in 'qkv'}
                if part != 'v' or config.residual_map == 'current':
                    expected.add(Arrow('mix', part, own[part], n))
                elif config.residual_map == 'identity':
                    expected.add(Arrow('add', 'v', own['v'], n))
                else:
                    expected |= {Arrow('attend', p, own[p], n) for p in 'kv'}
        if config.neutreno and n > 0:
            expected.add(Arrow('pull', 'v', 0, n))
        if config.denseformer:
            earlier = [EMBEDDING, *range(n)]
            expected |= {Arrow('average', 'x', source, n) for source in earlier}
    return expected


@pytest.mark.parametrize('name', VARIANTS)
def test_the_arrows_are_the_wiring_of_an_independent_rule(name):
    config = config_of(name)
    assert set(wiring.arrows(config)) == arrows_by_hand(config)


def test_the_drawing_of_a_few_models_is_as_one_would_draw_it():
    def arrows(**settings):
        return {(a.kind, a.part, a.source, a.layer) for a in wiring.arrows(GPTConfig(**settings))}

    assert arrows(n_layer=4) == set()
    assert arrows(n_layer=3, v_residual=True) == {('mix', 'v', 0, 1), ('mix', 'v', 0, 2)}
    assert arrows(n_layer=3, share_v=True) == {('borrow', 'v', 0, 1), ('borrow', 'v', 0, 2)}
    previous = arrows(n_layer=3, v_residual=True, residual_from='previous')
    assert previous == {('mix', 'v', 0, 1), ('mix', 'v', 1, 2)}


def lines_of(config):
    """The points of the lines of a drawn model, rounded: [((x, y), ...)]."""
    _, axes = draw.pyplot().subplots()
    wiring.draw_model(axes, 0.0, 0.0, config, wiring.arrows(config), 'model')
    return axes, [[(round(x, 6), round(y, 6)) for x, y in line.get_xydata()] for line in axes.lines]


@pytest.mark.parametrize(
    'name', ['ResFormer', 'from all', 'CLA', 'cross', 'everything', 'DenseFormer']
)
def test_every_arrow_ends_at_its_layer_and_every_owner_has_a_box(name):
    config = config_of(name)
    every = wiring.arrows(config)
    axes, lines = lines_of(config)
    heads = [text for text in axes.texts if getattr(text, 'arrow_patch', None)]
    rings = [line for line in axes.lines if line.get_marker() == 'o' and line.get_markersize() == 7]
    borrowed = [arrow for arrow in every if arrow.kind == 'borrow']
    assert len(rings) == len(borrowed)
    assert len(heads) == len(every) - len(borrowed)
    rows = sorted(round(0.13 - head.xy[1], 6) for head in heads)
    assert rows == sorted(arrow.layer for arrow in every if arrow.kind != 'borrow')

    boxes = 3 * config.n_layer - len(borrowed)
    columns, _, _ = wiring.columns_of(every)
    boxes += config.n_layer * (len(columns) - 3)  # of attention's outputs, and of blocks
    boxes += bool(config.denseformer)  # of the embedding
    assert len(axes.patches) == boxes


@pytest.mark.parametrize(
    'name', ['from all', 'from previous', 'cross from all, GQA', 'DenseFormer']
)
def test_lines_that_run_down_side_by_side_do_not_touch(name):
    every = wiring.arrows(config_of(name, n_layer=8))
    for part in 'qkvx':
        lanes = wiring.lanes_of(every, part)
        spans = []
        for (kind, source), lane in lanes.items():
            ends = [a.layer for a in every if (a.kind, a.part, a.source) == (kind, part, source)]
            spans.append((lane, wiring.row_of(source), max(ends)))
        for i, (lane, start, end) in enumerate(spans):
            for other, a, b in spans[:i]:
                assert lane != other or end < a or b < start


def test_a_source_that_is_no_layer_stands_above_the_first_one(monkeypatch):
    monkeypatch.setitem(SOURCES, 'first', lambda n, L: ['table'])
    config = GPTConfig(n_layer=3, v_residual=True)
    assert {a.source for a in wiring.arrows(config)} == {'table'}
    axes, _ = lines_of(config)
    (text,) = [text for text in axes.texts if text.get_text() == 'table']
    assert text.get_position()[1] > 0.5


def test_the_wiring_of_models_and_of_runs_is_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run/config.json').write_text('{"n_layer": 3, "share_v": true}')
    words = ['vanilla', 'resformer+residual_from=all', 'run', '--layers=4', '--out=wiring.svg']
    assert program(draw.main, 'wiring', *words)[0] == 0
    assert (tmp_path / 'wiring.svg').read_text().startswith('<?xml')


@pytest.mark.parametrize(
    'words, message',
    [
        ([], 'such as resformer'),
        (['resfrmer'], 'resfrmer'),
        (['resformer+residual_from=nowhere'], 'residual_from'),
        (['sparse_resformer', '--layers=4'], 'residual_layers'),
    ],
)
def test_a_model_that_there_is_not_is_refused_in_one_line(words, message):
    status, _, _ = program(draw.main, 'wiring', *words)
    assert_one_line(status, message)
