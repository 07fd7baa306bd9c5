"""hub/conform.py: our own model passes, and each mistake in it is found and named."""

import json
from unittest import mock

import make_conform
import numpy as np
import pytest
from conftest import ROOT, assert_one_line
from ports import Ours, mixing_of
from programs import patched_model
from runs import call, succeed

import model as model_py
from hub import conform

CASES = conform.read_fixture()
PATCHES = sorted(path.stem for path in (ROOT / 'tests/patches').glob('mistake_*.patch'))
# What the kit says of the mistakes that it finds by a rule, and where these are.
LEARNED = ('resformer-learned', 'key-residual')
RULES = {
    'cached': ('unlike the same model without its cache', ('vanilla', 'resformer-cross')),
    'needless cache': ('a cache where none is needed', ('svformer', 'owner-map', 'half-heads')),
    'unread': ('nothing reads', LEARNED),
    'no gradient': ('no gradient', LEARNED),
}


def check(port, level, variant, capsys):
    """How many checks of a port fail, and what the kit says."""
    failures = conform.check_port(conform.OBSERVE[level], port, variant, CASES[level][variant])
    return failures, capsys.readouterr().out


def check_module(module, level, variant, capsys):
    """check() of a model.py."""
    port = type('Port', (Ours,), {'module': module})
    if level == 'mixing':
        port = mixing_of(CASES[level][variant].config, module)
    return check(port, level, variant, capsys)


@pytest.mark.parametrize('level, variant', [(level, v) for level in CASES for v in CASES[level]])
def test_our_model_passes_every_check(level, variant, capsys):
    failures, said = check_module(model_py, level, variant, capsys)
    assert failures == 0 and 'not checked' not in said, said


@pytest.mark.parametrize('name', PATCHES)
def test_each_mistake_is_named(name, tmp_path, capsys):
    """`for p in tests/patches/*.patch; do git apply --check $p; done` says which no longer apply."""
    module = patched_model(name, tmp_path)
    mistake = name.removeprefix('mistake_').replace('_', ' ')
    if mistake in RULES:
        words, variants = RULES[mistake]
        cases = [('model', variant) for variant in variants]
    else:
        words = conform.MISTAKES[mistake]
        cases = [
            (lv, v) for lv in CASES for v, case in CASES[lv].items() if mistake in case.mistakes
        ]
        if mistake == 'detached':  # outside of mix()
            cases = [case for case in cases if case[0] == 'model']
    assert cases
    for level, variant in cases:
        failures, said = check_module(module, level, variant, capsys)
        assert failures and words in said and 'unknown' not in said, said


def test_the_mistake_that_a_page_shows(tmp_path, capsys):
    _, said = check_module(
        patched_model('mistake_detached', tmp_path), 'model', 'resformer', capsys
    )
    assert said in (ROOT / 'docs/use.md').read_text()


@pytest.mark.parametrize(
    'name, words',
    [
        ('unknown_norm', 'nothing reads transformer.h.0.ln_1.weight'),
        ('unknown_rope', 'unknown'),
        ('unknown_swiglu', 'unknown'),
    ],
)
def test_other_mistakes_are_found_and_not_misnamed(name, words, tmp_path, capsys):
    """They were written before the kit had a table of mistakes."""
    module = patched_model(name, tmp_path)
    for variant in ('resformer-learned', 'svformer-cla-gqa'):
        failures, said = check_module(module, 'model', variant, capsys)
        assert failures and words in said, said
        assert not any(words in said for words in conform.MISTAKES.values()), said


class InBytes(Ours):
    def decode(self, chunks):
        logits, numbers = super().decode(chunks)
        return logits, 4 * numbers


class OtherShape(Ours):
    def values(self, ids):
        return [t.swapaxes(1, 2) for t in super().values(ids)]


class HalfPrecision(Ours):
    def __init__(self, config, weights):
        super().__init__(config, {name: w.astype(np.float16) for name, w in weights.items()})


class KeptValues(Ours):
    """Those of the first call are there for ever."""

    kept = ()

    def values(self, ids):
        self.kept = self.kept or super().values(ids)
        return self.kept


class KeptGradients(Ours):
    def gradients(self, ids, targets):
        with mock.patch.object(self.model, 'zero_grad'):
            return super().gradients(ids, targets)


class ByLength(Ours):
    """What was made of a chunk is there for the next one of its length."""

    def decode(self, chunks):
        made = {}
        return super().decode([made.setdefault(c.shape[1], c) for c in chunks])


class OtherGradients(Ours):
    """Those of the head are three times too large, and the embedding has none."""

    def gradients(self, ids, targets):
        gradients = super().gradients(ids, targets)
        gradients['lm_head.weight'] *= 3
        return gradients | {'transformer.wte.weight': None}


class SomeGradients(Ours):
    """Of two weights, one by a wrong name, a number of which differs where the kit has no number."""

    def gradients(self, ids, targets):
        gradient = super().gradients(ids, targets)['transformer.h.2.mlp.c_proj.weight']
        return {'transformer.h.2.mlp.c_proj.weight': gradient, 'h.2.mlp.weight': gradient}


@pytest.mark.parametrize(
    'port, words',
    [
        (InBytes, ['bytes of fp32']),
        (OtherShape, ['got (2, 10, 2, 8), so that nothing']),
        (HalfPrecision, ['less than fp32']),
        (KeptValues, ['values of layer 1 ', 'kept from one call to the next']),
        (KeptGradients, ['gradient', 'kept from one call to the next']),
        (ByLength, ['decoded', 'unlike the same model without its cache']),
        (OtherGradients, ['gradient of transformer.wte', 'no gradient', 'also wrong', 'lm_head']),
    ],
)
def test_a_mistake_of_the_port_alone_is_told_as_such(port, words, capsys):
    failures, said = check(port, 'model', 'resformer', capsys)
    assert failures and all(word in said for word in words), said


def test_what_is_given_and_what_is_compared_are_told_apart(capsys):
    failures, said = check(SomeGradients, 'model', 'resformer', capsys)
    weights = CASES['model']['resformer'].weights
    assert not failures and f'the gradients of {len(weights) - 1} weights' in said
    assert 'unknown here: gradient of h.2.mlp.weight' in said


@pytest.mark.parametrize(
    'variant, numbers, words',
    [
        ('resformer-gqa', lambda right, layer: 2 * right, 'for each query head'),
        ('resformer', lambda right, layer: right + layer, 'V_1 kept twice'),
        ('svformer-cla', lambda right, layer: right + layer, 'V_1 kept twice'),
        ('half-heads', lambda right, layer: 8 * layer, 'where none is needed'),
        ('svformer-gqa', lambda right, layer: 8 * right, 'bytes of fp64'),
        ('owner-map', lambda right, layer: 11 * layer, 'unknown'),
    ],
)
def test_a_cache_of_the_wrong_size_is_explained(variant, numbers, words, capsys):
    case = CASES['model'][variant]
    layer = case.expected['values of layer 1'].size
    wrong = numbers(case.expected['numbers in the cache'], layer)
    decode = mock.patch.object(Ours, 'decode', lambda *_: (case.expected['logits'], wrong))
    with decode:
        failures, said = check(Ours, 'model', variant, capsys)
    assert failures == 1 and words in said


def weighted(weights_of):
    """A port of ResFormer with other weights (source, own) in layer n, counted from 1."""
    config = CASES['model']['resformer-learned'].config

    def build(_, weights):
        named = CASES['model']['resformer-learned'].weights
        new = {n: weights_of(int(n.split('.')[2]) + 1) for n in named if n not in weights}
        return Ours(config, weights | {name: np.array(w, float) for name, w in new.items()})

    return build


@pytest.mark.parametrize(
    'variant, weights_of, words',
    [
        ('resformer', lambda n: (1, 1), 'weights (1, 1)'),
        ('resformer', lambda n: (1 / n, 1 / n), "the layer's number"),
        ('resformer', lambda n: (0, 1), 'what vanilla gives'),
        ('resformer-constant', lambda n: (0.8, 0.2), 'the sum of the weights'),
    ],
)
def test_likely_weights_are_named(variant, weights_of, words, capsys):
    failures, said = check(weighted(weights_of), 'model', variant, capsys)
    assert failures and words in said and 'nothing reads' not in said, said


@pytest.mark.parametrize(
    'variant, other',
    [
        ('neutreno-resformer', 'resformer'),
        ('resformer-constant', 'resformer-previous'),
        ('exclusive', 'gqa'),
    ],
)
def test_a_variant_that_is_taken_for_another_is_named(variant, other, capsys):
    def build(config, weights):
        return Ours(CASES['model'][other].config, weights)

    failures, said = check(build, 'model', variant, capsys)
    assert failures and f'which is what {other} gives' in said


def over_length(own, source, x, weights):
    """The weights' length is 1."""
    s, o = weights['attn.v.residual_lambda']
    return (s * source + o * own) / np.hypot(s, o)


def of_the_first(own, source, x, weights, first=[]):  # noqa: B006
    first.append(source)
    s, o = weights['attn.v.residual_lambda']
    return s * first[0] + o * own


@pytest.mark.parametrize(
    'mix, words, others',
    [
        (over_length, '0.5827 times what is right', 'nothing reads'),
        (lambda own, *others: own, 'no mixing at all', 'unknown'),
        (of_the_first, 'fails', 'passes'),
    ],
)
def test_a_wrong_mixing_is_named_or_unknown(mix, words, others, capsys):
    failures, said = check(mix, 'mixing', 'resformer-learned', capsys)
    assert failures == 1 and words in said and others not in said, said


def test_a_mistake_that_explains_only_later_checks_is_not_named(capsys):
    case = CASES['model']['resformer']
    of_layer, numbers = next(iter(case.mistakes['detached'].items()))
    gradient = case.expected[of_layer].copy()
    gradient.flat[conform.places(gradient.size)] = numbers

    class Port(Ours):
        def values(self, ids):
            return [2 * t for t in super().values(ids)]

        def gradients(self, ids, targets):
            return {of_layer.removeprefix('gradient of '): gradient}

    failures, said = check(Port, 'model', 'resformer', capsys)
    assert failures and '2 times what is right' in said
    assert of_layer in said and 'detached' not in said, said


def detached(own, source, x, weights):
    """What the mixing of the values of ResFormer would give with a detached source."""
    values, backward = mixing_of(CASES['mixing']['resformer'].config)(own, source, x, weights)
    return values, lambda gradient: backward(gradient) | {'source': None}


def raises(own, source, x, weights):
    raise RuntimeError


def misspelt(config, weights):
    raise AssertionError


misspelt.variants = 'vanilla,resfomer'


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'port, status, words',
    [
        ('ports:Ours', 0, ['resformer: 46 of 46 checks pass']),
        (
            'ports:logits_alone',
            0,
            ['resformer: 1 of 1 checks passes; not checked:', 'gradients', 'cache'],
        ),
        ('ports:nothing', 1, ['not checked', 'have them: resformer']),
        ('test_conform:raises', 1, ['resformer: fails, for the port raises an error']),
        ('ports:leaves', 1, ['resformer: fails, for the port raises an error: SystemExit']),
        ('test_conform:detached', 1, ['resformer: 1 of 3 checks fails', 'a detached V_1']),
    ],
)
def test_the_status_says_whether_all_that_was_checked_passes(port, status, words):
    code, said = call(conform.main, port, '--variant=resformer')
    assert code == status and all(word in said for word in words), said


@pytest.mark.parametrize(
    'words, named',
    [
        ([], 'module:function'),
        (['nix:build'], "'nix'"),
        (['ports:nix'], "'nix'"),
        (['ports:logits_alone', '--variant=resfomer'], "'resfomer'"),
        (['test_conform:weighted'], 'config and weights'),
        (['test_conform:misspelt'], "'resfomer'"),
        (['leaves_early:build'], 'leaves_early:build: SystemExit'),
    ],
)
def test_a_wrong_name_is_one_line(words, named, monkeypatch, tmp_path):
    (tmp_path / 'leaves_early.py').write_text('raise SystemExit(0)')
    monkeypatch.syspath_prepend(tmp_path)
    code, _ = call(conform.main, *words)
    assert_one_line(code, named)


def test_a_port_lists_its_variants_in_one_line():
    _, said = call(conform.main, 'ports:leaves', '--variant=vanilla,gqa,x0')
    assert 'vanilla: fails' in said and 'does not have them: gqa, x0\n' in said


def test_a_variant_alone_shows_what_a_port_is_given():
    said = succeed(conform.main, '--variant=svformer-gqa')
    case = CASES['model']['svformer-gqa']
    for name in ('norm_eps', 'rope_theta', 'n_kv_head', 'share_v'):
        assert f'  {name} = {getattr(case.config, name)!r}\n' in said
    assert all(f'  {name} {weight.shape}\n' in said for name, weight in case.weights.items())
    assert 'v_residual' not in said


def test_the_file_of_numbers_is_what_the_reference_computes():
    """If not, run `python tests/make_conform.py`."""
    assert conform.FIXTURE.stat().st_size <= 330_000
    with np.load(conform.FIXTURE) as file:
        index = json.loads(file['index'].item())
        for level, (names, *_) in make_conform.LEVELS.items():
            assert list(index[level]) == list(names)
            for name, kept in index[level].items():
                mistakes = kept['mistakes'] if name == 'svformer-cla-gqa' else {}
                case, numbers = make_conform.make_case(level, name, mistakes)
                assert case['mistakes'] == mistakes
                case['mistakes'], case['sizes'] = kept['mistakes'], kept['sizes']
                assert json.loads(json.dumps(case)) == kept
                found = file[f'{level}/{name}'][: len(numbers)]
                np.testing.assert_allclose(numbers, found, rtol=4e-5, atol=1e-6)
