"""hub/conform.py: our own model passes, and each mistake in it is found and named."""

import json

import make_conform
import numpy as np
import pytest
from conftest import ROOT, assert_one_line
from ports import Ours, mixing_of
from programs import patched_model

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


def check(module, level, variant, capsys):
    """How many checks of a model.py fail, and what the kit says."""
    case = CASES[level][variant]
    port = type('Port', (Ours,), {'module': module})
    if level == 'mixing':
        port = mixing_of(case.config, module)
    failures = conform.check_port(conform.OBSERVE[level], port, variant, case)
    return failures, capsys.readouterr().out


@pytest.mark.parametrize('level, variant', [(level, v) for level in CASES for v in CASES[level]])
def test_our_model_passes_every_check(level, variant, capsys):
    failures, said = check(model_py, level, variant, capsys)
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
        failures, said = check(module, level, variant, capsys)
        assert failures and words in said and 'unknown' not in said, said


def test_the_mistake_that_the_readme_shows(tmp_path, capsys):
    _, said = check(patched_model('mistake_detached', tmp_path), 'model', 'resformer', capsys)
    assert said in (ROOT / 'README.md').read_text()


@pytest.mark.parametrize('name', ['unknown_norm', 'unknown_rope', 'unknown_swiglu'])
def test_other_mistakes_are_found_and_called_unknown(name, tmp_path, capsys):
    """They were written before the kit had a table of mistakes."""
    module = patched_model(name, tmp_path)
    for variant in ('resformer-learned', 'svformer-cla-gqa'):
        failures, said = check(module, 'model', variant, capsys)
        assert failures and 'unknown' in said, said
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


@pytest.mark.parametrize(
    'port, words',
    [
        (InBytes, 'more than vanilla'),
        (OtherShape, 'got (2, 10, 2, 8), so that nothing'),
        (HalfPrecision, 'less than fp32'),
    ],
)
def test_a_mistake_of_the_port_alone_is_told_as_such(port, words, capsys):
    case = CASES['model']['resformer']
    assert conform.check_port(conform.observe_model, port, 'resformer', case)
    assert words in capsys.readouterr().out


def detached(own, source, x, weights):
    """What the mixing of the values of ResFormer would give with a detached source."""
    values, backward = mixing_of(CASES['mixing']['resformer'].config)(own, source, x, weights)
    return values, lambda gradient: backward(gradient) | {'source': None}


def raises(own, source, x, weights):
    raise RuntimeError


# --- the program ----------------------------------------------------------------------------------


def run(monkeypatch, capsys, *words):
    """(status or message, what it printed) of the program."""
    monkeypatch.setattr('sys.argv', ['conform.py', *words])
    with pytest.raises(SystemExit) as exit:
        conform.main()
    return exit.value.code, capsys.readouterr().out


@pytest.mark.parametrize(
    'port, status, words',
    [
        ('ports:Ours', 0, ['resformer: 8 of 8 checks pass']),
        (
            'ports:logits_alone',
            0,
            ['resformer: 1 of 1 checks passes; not checked:', 'W_V', 'cache'],
        ),
        ('ports:nothing', 1, ['not checked', 'have them: resformer']),
        ('test_conform:raises', 1, ['resformer: fails, for the port raises an error']),
        ('test_conform:detached', 1, ['resformer: 1 of 3 checks fails', 'a detached V_1']),
    ],
)
def test_the_status_says_whether_all_that_was_checked_passes(
    port, status, words, monkeypatch, capsys
):
    code, said = run(monkeypatch, capsys, port, '--variant=resformer')
    assert code == status and all(word in said for word in words), said


@pytest.mark.parametrize(
    'words, named',
    [
        ([], 'module:function'),
        (['nix:build'], "'nix'"),
        (['ports:nix'], "'nix'"),
        (['ports:logits_alone', '--variant=resfomer'], "'resfomer'"),
        (['test_conform:run'], 'config and weights'),
    ],
)
def test_a_wrong_name_is_one_line(words, named, monkeypatch, capsys):
    code, _ = run(monkeypatch, capsys, *words)
    assert_one_line(code, named)


def test_the_file_of_numbers_is_what_the_reference_computes():
    """If not, run `python tests/make_conform.py`."""
    assert conform.FIXTURE.stat().st_size <= 500_000
    with np.load(conform.FIXTURE) as file:
        index = json.loads(str(file['index']))
        for level, (names, *_) in make_conform.LEVELS.items():
            assert list(index[level]) == list(names)
            for name, kept in index[level].items():
                mistakes = kept['mistakes'] if name == 'svformer-cla-gqa' else []
                case, numbers, rows = make_conform.make_case(level, name, mistakes)
                case['mistakes'] = kept['mistakes']
                assert json.loads(json.dumps(case)) == kept
                close = dict(rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(numbers, file[f'{level}/{name}'], **close)
                if mistakes:
                    np.testing.assert_allclose(rows, file[f'{level}/{name}/mistakes'], **close)
