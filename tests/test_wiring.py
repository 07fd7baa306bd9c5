"""paper/wiring.py: the arrows of Fig. 2 are the wiring of the model, and every arrow is drawn."""

import dataclasses

import pytest
import reference
from conftest import assert_one_line
from programs import program
from runs import succeed
from variants import VARIANTS, config_of

from model import GPT, GPTConfig
from paper import wiring
from paper.wiring import Arrow


def arrows_by_hand(config):
    """What a layer uses of others, layer by layer from the equations; it shares no code with wire()."""
    expected = set()
    for n in range(config.n_layer):
        owners = {part: reference.owner(config, part, n) for part in 'qkv'}
        for part, owner in owners.items():
            if owner != n:
                kind = 'join' if reference.own_heads(config, part, n) else 'borrow'
                expected.add(Arrow(kind, part, owner, n))
                continue
            for source in reference.sources_of(config, part, n):
                if isinstance(source, str):
                    words = {'token': f've.{n}', 'x0': f'vx.{n}'}
                    expected.add(Arrow('mix', part, words.get(source, source), n))
                    continue
                own = {p: reference.owner(config, p, source) for p in 'qkv'}
                if config.share_v_heads:  # it has heads of its own
                    own['v'] = source
                if part != 'v' or config.residual_map == 'current':
                    expected.add(Arrow('mix', part, own[part], n))
                elif config.residual_map == 'identity':
                    expected.add(Arrow('add', 'v', own['v'], n))
                else:
                    expected |= {Arrow('attend', p, own[p], n) for p in 'kv'}
        tables = reference.sources_of(config, 'v', 0)
        attends_to_first = reference.owner(config, 'v', n) == 0
        if config.share_v_heads and n > 0:  # not with its own heads
            attends_to_first = False
        if config.neutreno and (tables or not attends_to_first):
            expected.add(Arrow('pull', 'v', 0, n))
        if config.x0_residual:
            expected.add(Arrow('enter', 'block', 'x_0', n))
        if config.denseformer:
            earlier = ['emb', *range(n)]
            expected |= {Arrow('average', 'block', source, n) for source in earlier}
    return expected


@pytest.mark.parametrize('name', VARIANTS)
def test_the_arrows_are_the_wiring_of_an_independent_rule(name):
    config = config_of(name)
    assert set(wiring.arrows(config)) == arrows_by_hand(config)


@pytest.mark.parametrize(
    'name', ['ResFormer', 'CLA', 'cross', 'everything', 'tables alone', 'DenseFormer']
)
def test_every_arrow_is_drawn_and_what_is_projected_has_a_box(name):
    config = config_of(name)
    every = wiring.arrows(config)
    axes = wiring.wiring_figure({'model': config}).axes[0]
    drawn = [text.arrow_patch for text in axes.texts if getattr(text, 'arrow_patch', None)]
    assert len(drawn) == len(every)
    filled, rings = 0, 0
    for points in axes.collections:
        is_ring = points.get_sizes()[0] == 50
        rings += is_ring * len(points.get_offsets())
        filled += (not is_ring) * len(points.get_offsets())
    names = {name for name, _ in GPT.without_weights(config).named_parameters()}
    parts = [f'transformer.h.{n}.attn.{part}.' for n in range(config.n_layer) for part in 'qkv']
    projected = sum(f'{part}proj.weight' in names for part in parts)
    assert rings == 3 * config.n_layer - projected
    assert filled >= projected


@dataclasses.dataclass
class Forked(GPTConfig):
    residual_twist: str = ''

    def variant(self):
        gate = {'residual_twist': self.residual_twist} if self.residual_twist else {}
        return super().variant() | gate


def test_a_setting_that_the_drawing_does_not_know_is_named_in_it():
    plain, gated = Forked(v_residual=True), Forked(v_residual=True, residual_twist='hard')
    figure = wiring.wiring_figure({'plain': plain, 'gated': gated})
    assert [axes.get_title() for axes in figure.axes] == [
        'plain',
        'gated\nnot drawn: residual_twist=hard',
    ]
    for name in VARIANTS:  # a new field of GPTConfig belongs into DRAWN or OF_ONE_LAYER
        assert not wiring.not_drawn(config_of(name))


def test_a_source_that_is_no_layer_stands_above_the_first_one():
    axes = wiring.wiring_figure({'model': config_of('tables')}).axes[0]
    places = [text.get_position()[1] for text in axes.texts if text.get_text() == 'token']
    assert places and max(places) < 0


def test_the_wiring_of_models_and_of_runs_is_drawn(here):
    (here / 'run').mkdir()
    (here / 'run/config.json').write_text('{"n_layer": 3, "share_v": true}')
    words = ['vanilla', 'vanilla+n_layer=4+v_residual=all', 'run', '--out=wiring.svg']
    succeed(wiring.main, *words)
    assert (here / 'wiring.svg').read_text().startswith('<?xml')


@pytest.mark.parametrize(
    'words, message',
    [
        ([], 'name models'),
        (['resfrmer'], 'resfrmer'),
        (['vanilla+v_residual=nowhere'], 'v_residual'),
        (['sparse_resformer+n_layer=4'], 'residual_layers'),
    ],
)
def test_a_model_that_there_is_not_is_refused_in_one_line(words, message):
    status, _, _ = program(wiring.main, *words)
    assert_one_line(status, message)
