"""
python -m paper.analyze: runs, texts and Hugging Face folders; what it writes, draws and refuses.
test_analyze.py has the analyses themselves.
"""

import contextlib
import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from conftest import ROOT, write_dataset
from programs import assert_one_line
from programs import program as call_program
from runs import finish, good, newest, start
from test_analyze import KINDS, analyzed, assert_close, every_kind, inside

import tokenizer
from hub.read import load as load_hub
from machine import Machine
from model import GPT, GPTConfig
from paper import analyze, draw

CPU = Machine('cpu')
BYTES = tokenizer.load('bytes')

# At 16 tokens these hold 43 (without a rest), 18 and 1 sequences.
VALIDATION = {'A': 688, 'B': 300, 'C': 20}
RUN = dict(block_size=16, vocab_size=257, n_layer=3, n_head=4, n_embd=16, n_inner=20)
MODELS = {
    'vanilla': {},
    'resformer': dict(v_residual=True, dropout=0.2),
    'svformer': dict(share_v=True),
    'short': dict(block_size=8),
    'flat': dict(n_layer=1),
    'vanilla2': {},
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """data/bytes; data/other, of another tokenizer; out/trained, a run of train.py; and a run of each
    of MODELS, as train.py would have written it."""
    folder = tmp_path_factory.mktemp('analyze')
    before = os.getcwd()
    os.chdir(folder)
    for name, sha256 in (('bytes', BYTES.sha256), ('other', '1' * 64)):
        splits = {'train': {'A': 3000}, 'validation': VALIDATION}
        meta = write_dataset(folder / 'data' / name, splits, n_vocab=257)
        meta['tokenizer'] = {'name': 'bytes', 'sha256': sha256, 'n_vocab': 257}
        (folder / 'data' / name / 'meta.json').write_text(json.dumps(meta))
    size = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=257)
    steps = dict(max_iters=2, eval_interval=2, warmup_iters=1, lr_decay_iters=2, save_steps=())
    good('out/trained', dataset='bytes', **size, **steps)
    checkpoint = newest('out/trained')
    for seed, (name, fields) in enumerate(MODELS.items()):
        config = GPTConfig(**{**RUN, **fields})
        model = reference.perturb(GPT(config), seed)
        Path('out', name).mkdir()
        new = {'model': model.state_dict(), 'model_config': config.__dict__}
        new['settings'] = {**checkpoint['settings'], 'seed': seed}
        torch.save({**checkpoint, **new}, f'out/{name}/ckpt.pt')
    yield folder
    os.chdir(before)


@pytest.fixture
def at(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def report(kind, *names, **settings):
    """analyze.analyze() of runs."""
    paths = [f'out/{name}' for name in names]
    with contextlib.redirect_stderr(io.StringIO()):  # progress
        return analyze.analyze(kind, paths, analyze.AnalyzeConfig(**settings), CPU)


def run_model(name):
    checkpoint = newest(f'out/{name}')
    model = GPT(GPTConfig(**checkpoint['model_config']))
    model.load_state_dict(checkpoint['model'])
    return model.eval()


def validation_windows(T):
    """All sequences of T tokens of the validation split, by domain, read without data.py."""
    windows = []
    for domain in VALIDATION:
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


def watched(patch, kind):
    """The sequences that the analysis is given, one list for each call."""
    calls = []
    original = analyze.ANALYSES[kind]

    def spy(model, idx):
        calls.append(idx.tolist())
        return original(model, idx)

    patch.setitem(analyze.ANALYSES, kind, spy)
    return calls


@every_kind
def test_means_and_standard_errors_are_those_over_sequences(kind, at):
    """Dropout, of which the ResFormer has some, is off."""
    numbers = report(kind, 'vanilla', 'resformer', 'svformer', sequences=7, batch_size=3)
    idx = torch.tensor(spaced(validation_windows(16), 7))
    assert list(numbers['runs']) == ['out/vanilla', 'out/resformer', 'out/svformer']
    assert numbers['analysis'] == kind
    for run, one in numbers['runs'].items():
        assert (one['sequences'], one['length']) == (7, 16)
        assert one['config']['v_residual'] == ('resformer' in run)
        expected = analyzed(kind, run_model(run[4:]), idx)
        assert list(one['series']) == list(expected)
        for name, values in expected.items():
            assert_close(one['series'][name], summary(values))


@every_kind
def test_results_do_not_depend_on_the_batch_size(kind, at):
    by_size = {}
    for size in (1, 3, 100):
        numbers = report(kind, 'resformer', sequences=8, batch_size=size)
        by_size[size] = numbers['runs']['out/resformer']
    for other in (by_size[3], by_size[100]):
        assert other['sequences'] == by_size[1]['sequences'] == 8
        for name, series in by_size[1]['series'].items():
            assert_close(other['series'][name], series)


def test_the_error_of_one_sequence_is_zero(at):
    one = report('entropy', 'vanilla', sequences=1)['runs']['out/vanilla']
    assert one['sequences'] == 1
    assert one['series']['entropy']['standard_error'] == [0, 0, 0]


@pytest.mark.parametrize('count', [2, 5, 9, 61, 62, 1000])
def test_sequences_are_evenly_spaced_over_all_domains_and_the_same_for_all_runs(
    count, at, monkeypatch
):
    windows = validation_windows(16)
    assert len(windows) == 43 + 18 + 1
    calls = watched(monkeypatch, 'entropy')
    numbers = report('entropy', 'vanilla', 'svformer', sequences=count, batch_size=100)
    first, second = calls
    assert first == second
    assert first == spaced(windows, count)
    assert first[0] == windows[0] and first[-1] == windows[-1]
    assert all(one['sequences'] == min(count, 62) for one in numbers['runs'].values())


def test_a_length_is_cut_to_the_models_and_a_shorter_one_is_taken(at, monkeypatch):
    calls = watched(monkeypatch, 'entropy')
    numbers = report('entropy', 'short', 'vanilla', sequences=3)
    assert [numbers['runs'][f'out/{name}']['length'] for name in ('short', 'vanilla')] == [8, 16]
    report('entropy', 'vanilla', sequences=3, length=8)
    assert calls == [spaced(validation_windows(length), 3) for length in (8, 16, 8)]


def test_a_text_is_read_in_windows_and_the_rest_is_left(at, monkeypatch, tmp_path):
    text = 'né, the theory of the other thing 😀. ' * 5 + 'x'
    path = tmp_path / 'a.txt'
    path.write_text(text)
    calls = watched(monkeypatch, 'entropy')
    windows = whole_windows(np.frombuffer(text.encode(), dtype=np.uint8), 16)
    assert len(text.encode()) % 16 and len(windows) == 12
    report('entropy', 'vanilla', 'trained', text=str(path), batch_size=100)
    report('entropy', 'vanilla', text=str(path), sequences=4)
    assert calls == [windows, windows, spaced(windows, 4)]


# --- the command line -----------------------------------------------------------------------------


def program(*words):
    return call_program(analyze.main, *words)


def subprogram(*words, cwd):
    """(exit status, stdout, stderr) of python -m paper.analyze in a process of its own."""
    with contextlib.chdir(cwd):
        return finish(start('-m', 'paper.analyze', *words, PYTHONPATH=str(ROOT)))


def no_constant(name):
    pytest.fail(f'{name} is not JSON')


def assert_pictures(stem):
    png = Path(f'{stem}.png').read_bytes()
    assert png.startswith(b'\x89PNG') and len(png) > 5000
    assert Path(f'{stem}.pdf').read_bytes().startswith(b'%PDF')


def test_the_command_writes_numbers_and_figures_of_all_runs(folder, tmp_path):
    stem = tmp_path / 'new' / 'an.entropy'
    words = ['out/vanilla', 'out/resformer', f'--out={stem}', '--sequences=6', '--device=cpu']
    status, _, err = subprogram('entropy', *words, cwd=folder)
    assert status == 0, err
    names = sorted(path.name for path in stem.parent.iterdir())
    assert names == ['an.entropy.json', 'an.entropy.pdf', 'an.entropy.png']
    assert_pictures(stem)
    numbers = json.loads(Path(f'{stem}.json').read_text(), parse_constant=no_constant)
    assert numbers['analysis'] == 'entropy' and numbers['device'] == 'cpu'
    assert numbers['torch'] == torch.__version__
    assert list(numbers['runs']) == ['out/vanilla', 'out/resformer']
    with contextlib.chdir(folder):
        for run, one in numbers['runs'].items():
            model = run_model(run[4:])
            rows = spaced(validation_windows(16), 6)
            values = [slow_importance_entropy(model, row) for row in rows]
            assert_close(one['series']['entropy'], summary(values))


def slow_importance_entropy(model, row):
    """The entropy of each layer, from reference.py's matrices."""
    _, _, attended = inside(model, torch.tensor(row))
    result = []
    for n in range(model.config.n_layer):
        matrices = []
        for q, k in zip(attended['q'][n], attended['k'][n], strict=True):
            scores = reference.causal(q @ k.T / math.sqrt(q.shape[1]))
            matrices.append(reference.softmax(scores))
        a = torch.stack(matrices).mean(dim=(0, 1))
        result.append(-(a * a.log()).sum().item())
    return result


@pytest.mark.parametrize('kind', KINDS[1:])
def test_every_kind_writes_numbers_and_figures_of_all_runs(kind, at, tmp_path):
    """--out_dir names a run, too; it comes first."""
    stem = tmp_path / kind
    words = ['--out_dir=out/vanilla', 'out/svformer', f'--out={stem}', '--sequences=3']
    status, out, _ = program(kind, *words, '--device=cpu')
    assert status == 0 and f'{stem}.png' in out
    assert_pictures(stem)
    numbers = json.loads(Path(f'{stem}.json').read_text())
    again = report(kind, 'vanilla', 'svformer', sequences=3)
    assert list(numbers['runs']) == list(again['runs'])
    for run in again['runs']:
        for name, series in again['runs'][run]['series'].items():
            assert_close(numbers['runs'][run]['series'][name], series)


@every_kind
def test_the_numbers_are_json_of_which_any_reader_makes_the_same(kind, at, tmp_path):
    """A layer that has no number (the first of a mapping, SVFormer's later projections) is null: NaN
    is not JSON."""
    words = ['out/svformer', f'--out={tmp_path}/x', '--sequences=2', '--device=cpu']
    assert program(kind, *words)[0] == 0
    json.loads((tmp_path / 'x.json').read_text(), parse_constant=no_constant)


def test_without_out_the_files_go_to_results(at):
    assert program('entropy', '--out_dir=out/trained', '--sequences=2', '--device=cpu')[0] == 0
    assert_pictures('results/entropy')
    numbers = json.loads(Path('results/entropy.json').read_text())
    assert numbers['runs']['out/trained']['sequences'] == 2


def test_measurements_are_not_made_in_tf32(at, monkeypatch):
    """Machine's own default; a program of training asks for it."""
    machines = []

    def machine(*args, **options):
        machines.append((args, options))
        return CPU

    monkeypatch.setattr(analyze, 'Machine', machine)
    assert program('entropy', 'out/trained', '--sequences=2', '--device=cpu')[0] == 0
    assert machines == [(('cpu',), {})]


# --- figures --------------------------------------------------------------------------------------


def curves(ax):
    return [line for line in ax.get_lines() if len(line.get_ydata()) > 2]


def look(line):
    return line.get_color(), line.get_linestyle(), line.get_marker(), line.get_alpha()


def expected_curve(kind, series):
    """The last curve of a figure: of the last series, over layers."""
    if kind == 'entropy':
        return series['entropy']['mean']
    if kind == 'similarity':
        return series['values']['mean']
    if kind == 'spectrum':
        return [row[0] for row in series['values attended with']['mean']]
    return list(series.values())[1]['mean']


@every_kind
def test_a_figure_shows_every_run_and_can_be_drawn_from_the_file(kind, at, tmp_path):
    numbers = report(kind, 'vanilla', 'svformer', sequences=3)
    figure = analyze.figure_of(json.loads(json.dumps(numbers)), 'fig0: a title (tiny)')
    title, of_bands = figure.get_suptitle().splitlines()
    assert title == 'fig0: a title (tiny)' and of_bands.endswith('over sequences')
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    for name in ('vanilla', 'svformer'):
        assert any(text.startswith(name) for text in texts), texts
    number = {'entropy': 1, 'similarity': 3, 'spectrum': 3, 'mapping': 2}[kind]
    drawn = [line.get_ydata() for ax in figure.axes for line in curves(ax)]
    assert len(drawn) == 2 * number
    expected = expected_curve(kind, numbers['runs']['out/svformer']['series'])
    np.testing.assert_array_equal(drawn[-1], np.array(expected, dtype=float))
    if kind == 'mapping':
        assert 'vanilla $A_{n}$ ($V_{n}$ + $V_{n-1}$), Eq. 3' in texts
    if kind == 'entropy':
        lines = figure.axes[0].get_lines()
        assert any(set(line.get_ydata()) == {analyze.uniform_entropy(16)} for line in lines)
    draw.pyplot().close(figure)


@every_kind
def test_two_runs_of_one_model_look_different(kind, at):
    """draw.styles: a model has its color, runs of one model differ in their dashes."""
    figure = analyze.figure_of(report(kind, 'vanilla', 'vanilla2', sequences=2))
    for ax in figure.axes:
        looks = [look(line)[:3] for line in ax.get_lines()]
        assert len(set(looks)) == len(looks), looks
    draw.pyplot().close(figure)


@every_kind
def test_many_runs_are_all_seen_and_told_apart(kind, at):
    """Nine runs, five of a kind, two of one name: the legend is beside the axes, no two curves look
    alike."""
    config = GPTConfig(**RUN).__dict__
    numbers = report(kind, 'vanilla', sequences=3)
    one = numbers['runs'].pop('out/vanilla')
    fields = {'a/vanilla': {}, 'b/vanilla': {}, 'mha': dict(n_kv_head=RUN['n_head'])}
    fields['svformer'] = dict(share_v=True)
    fields |= {f'other{i}': dict(q_residual=True) for i in range(5)}
    for run, changes in fields.items():
        numbers['runs'][run] = {**one, 'config': {**config, **changes}}
    figure = analyze.figure_of(numbers)
    legend = figure.legends[0]
    figure.draw_without_rendering()
    assert all(ax.get_window_extent().height > 150 and not ax.get_legend() for ax in figure.axes)
    assert legend.get_window_extent().y1 <= min(ax.get_tightbbox().y0 for ax in figure.axes)
    texts = [text.get_text() for text in legend.get_texts()]
    assert len(set(texts)) == len(texts)
    assert texts[0].startswith('a/vanilla') and any('b/vanilla' in text for text in texts)
    looks = [look(line) for line in figure.axes[0].get_lines()]
    assert len(set(looks)) == len(looks) >= len(curves(figure.axes[0])) >= 9
    for ax in figure.axes:
        assert all(tick == int(tick) for tick in ax.get_xticks())
    draw.pyplot().close(figure)


def test_an_error_as_large_as_its_eigenvalue_does_not_stretch_the_axis(at):
    numbers = report('spectrum', 'vanilla', sequences=3)
    for series in numbers['runs']['out/vanilla']['series'].values():
        error = [[(1 - 1e-6) * value for value in layer] for layer in series['mean']]
        series['standard_error'] = error
    for ax in analyze.figure_of(numbers).axes:
        drawn = ax.get_lines()[0].get_ydata()
        assert ax.get_ylim()[0] > 0.1 * np.nanmin(drawn)
    draw.pyplot().close('all')


@every_kind
def test_runs_of_several_seeds_are_one_curve_whose_error_is_over_seeds(kind, at):
    numbers = report(kind, 'vanilla', 'vanilla2', 'svformer', sequences=3)
    pooled = analyze.over_seeds(numbers)
    assert list(pooled['runs']) == ['vanilla, 2 seeds', 'SVFormer']
    assert analyze.figure_of(pooled).get_suptitle().endswith('over seeds')
    for name, series in pooled['runs']['vanilla, 2 seeds']['series'].items():
        of_runs = [
            np.array(numbers['runs'][f'out/{run}']['series'][name]['mean'], dtype=float)
            for run in ('vanilla', 'vanilla2')
        ]
        np.testing.assert_allclose(series['mean'], (of_runs[0] + of_runs[1]) / 2)
        expected = abs(of_runs[0] - of_runs[1]) / 2  # the standard error of two numbers
        np.testing.assert_allclose(series['standard_error'], expected, atol=1e-12)

    numbers['runs']['out/vanilla2']['config']['norm_eps'] = 1e-6
    with pytest.raises(ValueError, match='vanilla is there with several sizes or settings'):
        analyze.over_seeds(numbers)


def test_a_report_says_of_which_run_and_step_it_is(at):
    (found,) = report('entropy', 'vanilla2', sequences=2)['runs'].values()
    checkpoint = newest('out/vanilla2')
    assert found['step'] == checkpoint['step'] > 0
    for name in ('seed', 'learning_rate', 'max_iters', 'dataset'):
        assert found['settings'][name] == checkpoint['settings'][name]
    assert found['settings']['n_layer'] == checkpoint['model_config']['n_layer']


def seed_report(seed, **changes):
    """The report of a run with a mean of its own; changes: of its settings."""
    series = {'entropy': {'mean': [3.0, 2.0 + seed], 'standard_error': [0.1, 0.1]}}
    report = {'series': series, 'length': 8, 'config': vars(GPTConfig()), 'step': 20}
    return report | {'settings': {'seed': seed, 'learning_rate': 6e-3, **changes}}


def pooled(**reports):
    return analyze.over_seeds({'analysis': 'entropy', 'runs': reports})


def test_runs_that_are_not_seeds_of_one_model_are_not_pooled():
    assert list(pooled(a=seed_report(1), b=seed_report(2))['runs']) == ['vanilla, 2 seeds']
    for other, message in (
        (seed_report(1), 'a and b have the same numbers'),
        (seed_report(2) | {'settings': seed_report(1)['settings']}, 'a and b have the same seed'),
        (seed_report(2) | {'step': 10}, 'a is at step 20, b at step 10'),
        (seed_report(2, learning_rate=3e-3), 'a has learning_rate=0.006 and b has 0.003'),
    ):
        with pytest.raises(ValueError, match=message):
            pooled(a=seed_report(1), b=other)


def test_older_reports_which_do_not_say_their_seed_are_runs_and_none_counts_twice():
    older = {name: seed_report(seed) for seed, name in enumerate('ab')}
    for report in older.values():
        del report['step'], report['settings']
    numbers = pooled(**older)
    assert list(numbers['runs']) == ['vanilla, 2 runs']
    assert analyze.figure_of(numbers).get_suptitle().endswith('over runs')
    with pytest.raises(ValueError, match='a and c have the same numbers'):
        pooled(**older, c=older['a'])


# --- Hugging Face ---------------------------------------------------------------------------------

WORDS = (
    'the theory of the other thing that one has or had of it and that one theory has of the other one'
).split()
SIZES = dict(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=44,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=24,
    bos_token_id=0,
    eos_token_id=0,
)


@pytest.fixture(scope='module')
def transformers():
    hub = pytest.importorskip('transformers')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('transformers.utils.logging._tqdm_active', False)
        verbosity = hub.logging.get_verbosity()
        hub.logging.set_verbosity_error()
        yield hub
        hub.logging.set_verbosity(verbosity)


def hub_model(transformers, kind, folder, **changes):
    """A random checkpoint in `folder`, whose attention is far from uniform.

    Returned with eager attention.
    """
    config = getattr(transformers, f'{kind}Config')
    model = getattr(transformers, f'{kind}ForCausalLM')
    torch.manual_seed(0)
    theirs = model(config(**{**SIZES, **changes}, attn_implementation='eager'))
    theirs = reference.perturb(theirs).eval()
    theirs.save_pretrained(folder)
    return theirs


def words_tokenizer(folder):
    """A vocabulary of words, with <s> before a text, as Llama's tokenizer has it. Returns text -> ids."""
    tokenizers = pytest.importorskip('tokenizers')
    fast = pytest.importorskip('transformers').PreTrainedTokenizerFast
    vocabulary = ['<s>', '<unk>', *sorted(set(WORDS))]
    ids = {word: i for i, word in enumerate(vocabulary)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token='<unk>'))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single='<s> $A', special_tokens=[('<s>', 0)]
    )
    fast(tokenizer_object=words, bos_token='<s>', unk_token='<unk>').save_pretrained(folder)
    return lambda text: words.encode(text).ids


def bytes_tokenizer(folder):
    """Bytes, as hub.convert exports them."""
    (folder / 'tokenizer.json').write_text(json.dumps(BYTES.json(), ensure_ascii=False))
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'bos_token': tokenizer.EOT,
        'eos_token': tokenizer.EOT,
    }
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    return lambda text: list(text.encode())


@pytest.mark.parametrize(
    'kind, changes, tokenizer_of, length, sequences',
    [
        pytest.param('Llama', {}, words_tokenizer, 24, 1000, id='llama, words'),
        pytest.param(
            'Llama', dict(num_key_value_heads=4), bytes_tokenizer, 20, 5, id='llama, bytes'
        ),
        pytest.param(
            'Mistral', dict(sliding_window=None), bytes_tokenizer, 24, 1000, id='mistral, bytes'
        ),
        pytest.param(
            'Mistral', dict(sliding_window=16), words_tokenizer, 16, 6, id='mistral, window, words'
        ),
    ],
)
def test_a_folders_entropy_is_that_of_transformers_attentions(
    kind, changes, tokenizer_of, length, sequences, transformers, tmp_path
):
    theirs = hub_model(transformers, kind, tmp_path / 'hf', **changes)
    encode = tokenizer_of(tmp_path / 'hf')
    text = ' '.join(WORDS * 8)
    (tmp_path / 'text.txt').write_text(text)
    words = [f'--hf={tmp_path}/hf', f'--text={tmp_path}/text.txt', f'--out={tmp_path}/x']
    words += [f'--sequences={sequences}', f'--length={length if length == 20 else 2048}']
    assert program('entropy', *words, '--device=cpu')[0] == 0
    one = json.loads((tmp_path / 'x.json').read_text())['runs'][f'{tmp_path}/hf']

    windows = spaced(whole_windows(np.array(encode(text)), length), sequences)
    assert len(windows) > 4 and (one['sequences'], one['length']) == (len(windows), length)
    values = []
    with torch.no_grad():
        for row in windows:
            attentions = theirs(torch.tensor([row]), output_attentions=True).attentions
            # Each is (1, heads, queries, keys).
            importance = [a[0].double().mean(dim=(0, 1)) for a in attentions]
            values.append([-(a * a.log()).sum().item() for a in importance])
    assert np.std(values) > 0.01
    assert abs(np.mean(values) - analyze.uniform_entropy(length)) > 0.01
    assert_close(one['series']['entropy'], summary(values))


@pytest.mark.parametrize('kind', KINDS[1:])
def test_every_kind_reads_a_folder(kind, transformers, tmp_path):
    hub_model(transformers, 'Llama', tmp_path / 'hf')
    bytes_tokenizer(tmp_path / 'hf')
    text = ' '.join(WORDS)
    (tmp_path / 'text.txt').write_text(text)
    words = [f'--hf={tmp_path}/hf', f'--text={tmp_path}/text.txt', f'--out={tmp_path}/x']
    assert program(kind, *words, '--sequences=3', '--device=cpu')[0] == 0
    assert_pictures(tmp_path / 'x')
    model = load_hub(tmp_path / 'hf')
    rows = spaced(whole_windows(np.frombuffer(text.encode(), dtype=np.uint8), 24), 3)
    one = json.loads((tmp_path / 'x.json').read_text())['runs'][f'{tmp_path}/hf']['series']
    for name, values in analyzed(kind, model, torch.tensor(rows)).items():
        assert_close(one[name], summary(values))


# --- mistakes -------------------------------------------------------------------------------------


def files():
    return sorted(str(path) for path in Path('.').rglob('*'))


def assert_refused(*arguments, words=()):
    """In one line, with nothing written."""
    before = files()
    status, _, err = program(*arguments, '--device=cpu')
    assert_one_line(status, *words)
    assert 'Traceback' not in err and files() == before


@pytest.mark.parametrize(
    'arguments, words',
    [
        ([], ['--out_dir', '--hf']),
        (['--hf=out/vanilla'], ['--hf', '--text']),
        (['--hf=folder', '--dataset=bytes'], ['--hf', '--text']),
        (['--hf=folder', '--text=a.txt', '--out_dir=out/vanilla'], ['--hf', '--out_dir']),
        (['--hf=folder', '--text=a.txt', 'out/vanilla'], ['--hf', 'runs']),
        (['out/vanilla', '--dataset=other'], ['another tokenizer', 'out/vanilla', 'data/other']),
        (['--out_dir=out/vanilla', '--dataset=none'], ['data/none']),
        (['--out_dir=out/vanilla', '--sequences=0'], ['sequences=0']),
        (['--out_dir=out/vanilla', '--sequences=-1'], ['sequences=-1']),
        (['--out_dir=out/vanilla', '--length=1'], ['length=1']),
        (['--out_dir=out/vanilla', '--batch_size=0'], ['batch_size=0']),
        (['--out_dir=out/vanilla', '--sequence=5'], ['sequence', 'sequences']),
        (['--out_dir=out/none'], ['out/none']),
        (['--out_dir=out/vanilla', 'out/none', '--sequences=1'], ['out/none']),
        (['--out_dir=out/vanilla', '--text=none.txt'], ['none.txt']),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(arguments, words, at):
    assert_refused('entropy', *arguments, words=words)


def test_a_text_shorter_than_one_sequence_is_refused_and_one_of_just_its_length_is_not(
    at, tmp_path
):
    text = tmp_path / 'text.txt'
    text.write_text('x' * 15)
    words = ['out/vanilla', f'--text={text}']
    assert_refused('entropy', *words, words=[text, '16', '--length'])
    for content, flags in (('x' * 16, []), ('x' * 15, ['--length=15'])):
        text.write_text(content)
        assert program('entropy', *words, *flags, '--device=cpu', f'--out={tmp_path}/x')[0] == 0
        numbers = json.loads((tmp_path / 'x.json').read_text())
        assert numbers['runs']['out/vanilla']['length'] == len(content)


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(at, transformers, tmp_path):
    hub_model(transformers, 'Llama', tmp_path / 'hf')
    (tmp_path / 'text.txt').write_text(' '.join(WORDS))
    words = [f'--hf={tmp_path}/hf', f'--text={tmp_path}/text.txt']
    assert_refused('entropy', *words, words=['tokenizer'])


def test_a_mapping_of_a_single_layer_is_refused_in_one_line(at):
    assert_refused('mapping', 'out/flat', '--sequences=2', words=['layer'])


def test_a_mistake_has_exit_status_1_and_one_line_on_stderr(folder):
    status, out, err = subprogram('spectrum', '--sequences=3', cwd=folder)
    assert status == 1 and out == ''
    assert err.startswith('error: ') and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    'arguments', [[], ['entropie'], ['--out_dir=out/vanilla'], ['draw', '--out_dir=out/vanilla']]
)
def test_an_unknown_analysis_is_answered_with_the_usage_and_exit_status_2(arguments, at):
    before = files()
    status, out, _ = program(*arguments)
    assert status == 2 and files() == before
    for kind in KINDS:
        assert f'python -m paper.analyze {kind} ' in out


def test_help_is_no_mistake(at):
    assert program('--help')[0] == program('-h')[0] == 0
    status, out, _ = program('entropy', '--help')
    assert status == 0 and '--sequences=1000' in out and '--hf' in out
