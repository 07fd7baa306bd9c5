"""
python -m paper.analyze: runs and texts; what it writes, draws and refuses.
test_analyze.py has the analyses themselves.
"""

import contextlib
import io
import math
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from byte_runs import SIZE, train_once
from conftest import assert_one_line, raises_one_line, read_json
from programs import program, run_with
from runs import model_of, succeed
from test_analyze import analyzed, assert_close, every_kind

from lib.data import Dataset
from lib.files import locked
from lib.machine import Machine
from model import GPT, GPTConfig
from paper import analyze

CPU = Machine('cpu')

MODELS = {
    'vanilla_seed0': {},
    'vanilla_seed1': {},
    'resformer': dict(v_residual=True, dropout=0.2),
    'short': dict(block_size=8),
    'flat': dict(n_layer=1),
}


@pytest.fixture(scope='module', autouse=True)
def models(work):
    """data/bytes, and a run of each of MODELS, as train.py would have written it."""
    checkpoint = train_once()
    for seed, (name, fields) in enumerate(MODELS.items()):
        config = GPTConfig(**{**SIZE, 'n_layer': 3, **fields})
        model = reference.perturb(GPT(config), seed)
        settings = {**checkpoint['settings'], 'seed': seed}
        run_with(model, 'out/trained', f'out/{name}', settings=settings)


def report(kind, *names, **settings):
    """analyze.analyze() of runs."""
    options = analyze.AnalyzeConfig(tuple(f'out/{name}' for name in names), **settings)
    with contextlib.redirect_stderr(io.StringIO()):  # progress
        return analyze.analyze(kind, options, CPU)


def run_model(name):
    return model_of(f'out/{name}').eval()


def validation_windows(T):
    """All sequences of T tokens of the validation split, by domain, read without lib/data.py."""
    windows = []
    for domain in 'ABC':
        ids = np.fromfile(f'data/bytes/validation/{domain}.bin', dtype='<u2')
        windows += whole_windows(ids.astype(np.int64), T)
    return windows


def whole_windows(ids, T):
    return [ids[i * T : (i + 1) * T].tolist() for i in range(len(ids) // T)]


def spaced(windows, count):
    """`count` of them: the first, the last, and those at equal steps between, rounded down."""
    n = len(windows)
    if count >= n:
        return windows
    return [windows[i * (n - 1) // (count - 1)] for i in range(count)]


def summary(values):
    """What the program says of numbers (sequences, layers, ...)."""
    error = np.std(values, axis=0, ddof=1) / math.sqrt(len(values))
    return {'mean': np.mean(values, axis=0), 'standard_error': error}


@every_kind
def test_the_command_writes_means_and_errors_over_evenly_spaced_sequences(kind, tmp_path):
    """Dropout, of which the ResFormer has some, is off. What has no number (the first layer of a mapping)
    is null: NaN is not JSON."""
    idx = torch.tensor(spaced(validation_windows(32), 7))
    words = ['out/vanilla_seed0', 'out/resformer', f'--out={tmp_path}/new/x.y', '--sequences=7']
    succeed(analyze.main, kind, *words, '--batch_size=3', '--device=cpu')
    assert (tmp_path / 'new/x.y.png').read_bytes().startswith(b'\x89PNG')
    numbers = read_json(tmp_path / 'new/x.y.json')
    assert numbers['analysis'] == kind and numbers['device'] == 'cpu' and len(numbers['runs']) == 2
    for run, one in numbers['runs'].items():
        assert (one['sequences'], one['length'], one['step']) == (7, 32, 1)
        assert one['data'] == Dataset('bytes').fingerprint()
        assert one['config']['v_residual'] == one['settings']['v_residual'] == ('res' in run)
        expected = analyzed(kind, run_model(run[4:]), idx)
        for name, values in expected.items():
            assert_close(one['series'][name], summary(values))


def test_a_length_is_cut_to_the_models_and_a_text_is_read_in_whole_windows(tmp_path):
    text = 'né, the theory of the other thing 😀. ' * 5 + 'x'
    (tmp_path / 'a.txt').write_text(text)
    windows = whole_windows(np.frombuffer(text.encode(), dtype=np.uint8), 8)
    assert len(text.encode()) % 8 and len(windows) == 25
    for count in (4, 1000):
        numbers = report('entropy', 'short', text=str(tmp_path / 'a.txt'), sequences=count)
        (one,) = numbers['runs'].values()
        values = analyzed('entropy', run_model('short'), torch.tensor(spaced(windows, count)))
        assert one['length'] == 8
        assert_close(one['series']['entropy'], summary(values['entropy']))
    (one,) = report('entropy', 'flat', sequences=1)['runs'].values()
    assert one['series']['entropy']['standard_error'] == [None]


LAST = {
    'similarity': 'values',
    'spectrum': analyze.ATTENDED,
    'mapping': analyze.EQ_6,
    'sinks': 'peak',
}


@every_kind
def test_runs_of_several_seeds_are_one_curve_whose_error_is_over_seeds(kind):
    numbers = report(kind, 'vanilla_seed0', 'vanilla_seed1', 'resformer', sequences=3)
    pooled = analyze.over_seeds(numbers)
    assert [one['seeds'] for one in pooled['runs'].values()] == [2, 1]
    series = LAST.get(kind, 'entropy')
    *_, single = pooled['runs'].values()
    assert np.isnan(single['series'][series]['standard_error']).all()
    one, two, _ = (
        np.array(run['series'][series]['mean'], dtype=float) for run in numbers['runs'].values()
    )
    both = pooled['runs']['out/vanilla_seed0']['series'][series]
    np.testing.assert_allclose(both['mean'], (one + two) / 2)
    # The standard error of two numbers.
    np.testing.assert_allclose(both['standard_error'], abs(one - two) / 2, atol=1e-12)

    assert 'sequences' in analyze.figure_of(numbers).get_suptitle()
    figure = analyze.figure_of(pooled)
    assert '2 seeds' in figure.get_suptitle()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {'vanilla', 'resformer'} <= {*labels}
    curves = [line for line in figure.axes[-1].get_lines() if len(line.get_ydata()) > 2]
    mean = np.array(both['mean'])
    expected = mean[:, 0] if kind == 'spectrum' else mean
    np.testing.assert_array_equal(curves[0].get_ydata(), expected)

    # Another step of a run is another model.
    numbers['runs']['later'] = {**numbers['runs']['out/vanilla_seed1'], 'step': 20}
    assert len(analyze.over_seeds(numbers)['runs']) == 3
    numbers['runs']['again'] = numbers['runs']['out/resformer']
    with raises_one_line('one seed'):
        analyze.over_seeds(numbers)


# --- texts -----------------------------------------------------------------------------------------

TEXT = 'the theory of the other thing that one has or had of it and that one theory has ' * 3


def test_an_imported_run_has_no_seed_and_reads_a_text_alone(tmp_path):
    run_with(run_model('short'), 'out/trained', 'out/imported', settings={'dataset': ''})
    (tmp_path / 'text.txt').write_text(TEXT)
    numbers = report('entropy', 'imported', text=str(tmp_path / 'text.txt'))
    with raises_one_line('--seeds'):
        analyze.over_seeds(numbers)
    status, _, _ = program(analyze.main, 'entropy', 'out/imported', '--device=cpu')
    assert_one_line(status, 'out/imported', '--text')


def test_tokens_are_explained_of_each_run(tmp_path):
    """In layer 1 the token explains everything."""
    (tmp_path / 'text.txt').write_text(4 * TEXT)
    words = [f'--text={tmp_path}/text.txt', f'--out={tmp_path}/x', '--device=cpu']
    succeed(analyze.main, 'tokens', 'out/vanilla_seed0', 'out/resformer', *words)
    for one in read_json(tmp_path / 'x.json')['runs'].values():
        mean = one['series']['R^2']['mean']
        assert mean[0] == pytest.approx(1) and max(mean[1:]) < 0.99
        assert 0.8 < one['series']['share of positions']['mean'] < 1


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'kind, arguments, words',
    [
        ('entropy', [], ['runs']),
        ('entropy', ['out/flat', '--sequences=0'], ['sequences=0']),
        ('entropy', ['out/none', '--sequences=1'], ['out/none']),
        ('entropy', ['out/flat', '--text=none.txt'], ['none.txt']),
        ('entropy', ['out/flat', '--tokenizer=none.json'], ['none.json']),
        ('entropy', ['out/flat', '--text=short.txt'], ['short.txt', '32', '--length']),
        ('mapping', ['out/flat', '--sequences=2'], ['layer']),
        ('tokens', ['out/flat'], ['20 times', '--sequences']),  # but for a single one
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(kind, arguments, words):
    Path('short.txt').write_text('x' * 15)
    before = sorted(Path('.').rglob('*'))
    status, _, _ = program(analyze.main, kind, *arguments, '--device=cpu')
    assert_one_line(status, *words)
    assert sorted(Path('.').rglob('*')) == before


def test_two_analyses_do_not_write_to_one_place():
    Path('out/entropy.png').touch()
    with locked('out/entropy.png', 'writing'):
        status, _, _ = program(analyze.main, 'entropy', 'out/flat', '--device=cpu')
    assert_one_line(status, 'another process', 'out/entropy.png', '--out')
