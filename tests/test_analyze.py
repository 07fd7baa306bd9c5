"""analyze.py: each analysis against a slow direct formula, whatever the batches; runs, texts and Hugging Face folders;
what it writes, what it leaves as it was, and what it refuses."""
import contextlib
import functools
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from conftest import ROOT, write_dataset
from runs import ENVIRONMENT, good
from torch.utils._python_dispatch import TorchDispatchMode

import analyze
import model as architecture
import plot
import tokenizer
from model import GPT, GPTConfig
from train import Machine, TrainConfig

SIZE = dict(block_size=24, vocab_size=61, n_layer=3, n_head=4, n_embd=16, n_inner=20)
B, T = 3, 19
RES, SV, CLA = dict(v_residual=True), dict(share_v=True), dict(share_k=True, share_k_every=2, share_v=True,
                                                               share_v_every=2)
VARIANTS = {
    'vanilla': {},
    'ResFormer': RES,
    'ResFormer from all, learned': dict(RES, residual_from='all', residual_learned=True),
    'SVFormer': SV,
    'GQA': dict(n_kv_head=2),
    'MQA SVFormer': dict(SV, n_kv_head=1),
    'gpt2': dict(arch='gpt2'),
    'gpt2 ResFormer GQA': dict(RES, arch='gpt2', n_kv_head=2),
    'cross': dict(RES, residual_map='cross'),
    'cross from all, GQA': dict(RES, residual_map='cross', residual_from='all', n_kv_head=2),
    'cross sparse, first keys': dict(RES, residual_map='cross', residual_layers=(2,), share_k=True),
    'identity': dict(RES, residual_map='identity'),
    'CLA': CLA,
    'ResFormer CLA': dict(RES, **CLA),
    'first queries': dict(share_q=True),
    'query and key residual': dict(q_residual=True, k_residual=True),
    'NeuTRENO': dict(neutreno=0.4),
    'NeuTRENO GQA': dict(neutreno=0.4, n_kv_head=2),
}
KINDS = ('entropy', 'similarity', 'spectrum', 'mapping')
every_kind = pytest.mark.parametrize('kind', KINDS)


@functools.cache
def small(name, **size):
    return reference.perturb(GPT(GPTConfig(**{**SIZE, **size, **VARIANTS[name]})), seed=1).eval()


def tokens(seed=0):
    return torch.randint(SIZE['vocab_size'], (B, T), generator=torch.Generator().manual_seed(seed))


def analyzed(kind, model, idx):
    with torch.no_grad():
        return {name: t.numpy() for name, t in analyze.ANALYSES[kind](model, idx).items()}


def assert_close(found, expected, rtol=1e-5):
    """NaN equals NaN; 1e-5 of the value, or of 1 where it is smaller."""
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(np.array(found[name], dtype=float), np.array(expected[name], dtype=float), rtol=rtol,
                                   atol=rtol, err_msg=name)


# ---------------------------------------------------------------------------------------------------------------------
# the four analyses: loops over tokens, on what tests/reference.py computes of one sequence in float64

def inside(model, row):
    """(hidden states of the layers, raw, attended) of one sequence; lists over layers, as in reference.py."""
    config, weights = model.config, {name: t.double() for name, t in model.state_dict().items()}
    x = weights['transformer.wte.weight'][row]
    if config.arch == 'gpt2':
        x = x + weights['transformer.wpe.weight'][:len(row)]
    raw, attended, hidden = {'q': [], 'k': [], 'v': []}, {'q': [], 'k': [], 'v': []}, []
    for n in range(config.n_layer):
        name = f'transformer.h.{n}'
        normed = reference.norm(config, weights, f'{name}.ln_1', x)
        x = x + reference.attention(config, weights, n, normed, raw, attended)
        x = x + reference.mlp(config, weights, f'{name}.mlp', reference.norm(config, weights, f'{name}.ln_2', x))
        hidden.append(x)
    return hidden, raw, attended


def read_layers(config, n):
    """Whose keys layer n attends to: its own and, with cross attention, its sources'."""
    mixes = n in config.residual_layers if config.residual_layers else n >= 1
    if config.residual_map != 'cross' or not mixes:
        return [n]
    return {'first': [0], 'previous': [n - 1], 'all': list(range(n))}[config.residual_from] + [n]


def softmax(scores):
    """Of a list of numbers."""
    e = [math.exp(s - max(scores)) for s in scores]
    return [x / sum(e) for x in e]


def weights_of(q, keys):
    """Attention of one head's queries (T, hs) over the keys of one or several layers, in one softmax: a list over the
    queries of a list over the layers of a list over the tokens seen."""
    result = []
    for i in range(len(q)):
        seen = [keys_of_layer[:i + 1] @ q[i] / math.sqrt(len(q[i])) for keys_of_layer in keys]
        a = softmax([s for scores in seen for s in scores.tolist()])
        result.append([a[p * (i + 1):(p + 1) * (i + 1)] for p in range(len(keys))])
    return result


def heads_of(config):
    group = config.n_head // (config.n_kv_head or config.n_head)
    return [(h, h // group) for h in range(config.n_head)]


def slow_entropy(config, hidden, raw, attended):
    result = []
    for n in range(config.n_layer):
        importance = [0.0] * T
        for h, g in heads_of(config):
            for parts in weights_of(attended['q'][n][h], [attended['k'][p][g] for p in read_layers(config, n)]):
                for part in parts:
                    for j, a in enumerate(part):
                        importance[j] += a / (config.n_head * T)
        assert sum(importance) == pytest.approx(1)
        result.append(-sum(a * math.log(a) for a in importance))
    return {'entropy': result}


def pairs_cosine(x):
    x = x.numpy()
    return np.mean([x[i] @ x[j] / math.sqrt((x[i] @ x[i]) * (x[j] @ x[j]))
                    for i in range(T) for j in range(T) if i != j])


def slow_similarity(config, hidden, raw, attended):
    return {'hidden states': [pairs_cosine(x) for x in hidden],
            'keys': [pairs_cosine(torch.cat(heads, dim=1)) for heads in attended['k']],
            'values': [pairs_cosine(torch.cat(heads, dim=1)) for heads in attended['v']]}


def eigenvalues(heads):
    v = torch.cat(heads, dim=1).numpy()
    covariance = sum(np.outer(v[t], v[t]) for t in range(T)) / T
    return sorted(np.linalg.eigvals(covariance).real, reverse=True)


def slow_spectrum(config, hidden, raw, attended):
    projected = [eigenvalues(heads) if reference.owner(config, 'v', n) == n else [math.nan] * sum(
        head.shape[1] for head in heads) for n, heads in enumerate(raw['v'])]
    return {'projected values': projected, 'values attended with': [eigenvalues(heads) for heads in attended['v']]}


def slow_mapping(config, hidden, raw, attended):
    eq3, eq6 = [math.nan], [math.nan]
    for n in range(1, config.n_layer):
        rows = {'cross': [], 'eq3': [], 'eq6': []}  # of each head: (T, hs)
        for h, g in heads_of(config):
            q = attended['q'][n][h]
            (k0, v0), (k, v) = ((attended['k'][m][g], attended['v'][m][g]) for m in (n - 1, n))
            one, both = weights_of(q, [k]), weights_of(q, [k0, k])
            rows['cross'].append(torch.stack([sum(both[i][0][j] * v0[j] + both[i][1][j] * v[j] for j in range(i + 1))
                                              for i in range(T)]))
            rows['eq3'].append(torch.stack([sum(one[i][0][j] * (v[j] + v0[j]) for j in range(i + 1))
                                            for i in range(T)]))
            rows['eq6'].append(torch.stack([sum(one[i][0][j] * v[j] for j in range(i + 1)) + v0[i] for i in range(T)]))
        cross, *others = (torch.cat(heads, dim=1).numpy() for heads in rows.values())
        for result, other in zip((eq3, eq6), others, strict=True):
            result.append(np.mean([cross[i] @ other[i] / math.sqrt((cross[i] @ cross[i]) * (other[i] @ other[i]))
                                   for i in range(T)]))
    return {'A_n (V_n + V_n-1), Eq. 3': eq3, 'A_n V_n + V_n-1, Eq. 6': eq6}


SLOW = {'entropy': slow_entropy, 'similarity': slow_similarity, 'spectrum': slow_spectrum, 'mapping': slow_mapping}


@functools.cache
def slow_forward(name):
    return [inside(small(name), row) for row in tokens()[:2]]


@every_kind
@pytest.mark.parametrize('name', VARIANTS)
def test_an_analysis_equals_its_direct_formula(kind, name):
    model = small(name)
    expected = [SLOW[kind](model.config, *parts) for parts in slow_forward(name)]
    assert_close(analyzed(kind, model, tokens()[:2]), {series: [e[series] for e in expected] for series in expected[0]})


def test_only_layers_that_project_values_have_a_spectrum_of_projected_values():
    found = analyzed('spectrum', small('CLA'), tokens())['projected values']
    assert [np.isnan(found[:, n]).all() for n in range(3)] == [False, True, False]
    assert [np.isnan(found[:, n]).any() for n in range(3)] == [False, True, False]


def test_resformers_projected_values_are_not_those_attended_with():
    found = analyzed('spectrum', small('ResFormer'), tokens())
    one, two = found['projected values'], found['values attended with']
    np.testing.assert_allclose(one[:, 0], two[:, 0])  # layer 1 mixes nothing
    assert (abs(one[:, 1:, 0] - two[:, 1:, 0]) > 0.01 * two[:, 1:, 0]).all()


# ---------------------------------------------------------------------------------------------------------------------
# uniform attention

@pytest.mark.parametrize('length', [1, 2, 3, T, 100])
def test_the_entropy_of_uniform_attention_is_the_direct_formula(length):
    importance = [sum(1 / (i + 1) for i in range(j, length)) / length for j in range(length)]
    assert sum(importance) == pytest.approx(1)
    assert analyze.uniform_entropy(length) == pytest.approx(-sum(a * math.log(a) for a in importance), abs=1e-12)
    assert analyze.uniform_entropy(length) <= math.log(length)


@pytest.mark.parametrize('name', ['vanilla', 'GQA', 'gpt2', 'SVFormer', 'cross from all, GQA'])
def test_a_model_without_queries_has_the_entropy_of_uniform_attention(name):
    model = GPT(small(name).config)
    model.load_state_dict(small(name).state_dict())
    with torch.no_grad():
        for block in model.transformer.h:
            for p in block.attn.c_attn.parameters():
                p[:SIZE['n_embd']] = 0
    assert_close(analyzed('entropy', model.eval(), tokens()), {'entropy': np.full((B, 3), analyze.uniform_entropy(T))})


# ---------------------------------------------------------------------------------------------------------------------
# nothing depends on how the work is cut

class Softmaxes(TorchDispatchMode):
    """Sizes of all softmaxes' results."""
    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._softmax.default:
            self.sizes.append(result.numel())
        return result


@pytest.mark.parametrize('name', ['vanilla', 'gpt2 ResFormer GQA', 'cross from all, GQA'])
def test_blocks_of_queries_give_the_same_entropy_and_hold_no_more_weights_than_asked_for(name, monkeypatch):
    model = small(name)
    whole = analyzed('entropy', model, tokens())
    rows = [B * SIZE['n_head'] * T * len(read_layers(model.config, n)) for n in range(3)]  # the weights of one query
    for block in (1, rows[0], 4 * rows[-1] + 1, 7 * rows[0]):
        monkeypatch.setattr(analyze, 'BLOCK', block)
        with Softmaxes() as seen:
            assert_close(analyzed('entropy', model, tokens()), whole, rtol=1e-6)
        assert len(seen.sizes) == sum(math.ceil(T / max(1, block // row)) for row in rows)
        assert max(seen.sizes) <= max(block, *rows) and sum(seen.sizes) == T * sum(rows)


@every_kind
def test_a_sequences_numbers_do_not_depend_on_its_batch(kind):
    for name in ('ResFormer', 'cross'):
        model, idx = small(name), tokens()
        alone = [analyzed(kind, model, row[None]) for row in idx]
        assert_close(analyzed(kind, model, idx), {s: np.concatenate([a[s] for a in alone]) for s in alone[0]})


# ---------------------------------------------------------------------------------------------------------------------
# runs

VALIDATION = {'A': 688, 'B': 300, 'C': 20}  # at 16 tokens 43 (without a rest), 18 and 1 sequences
RUN = dict(block_size=16, vocab_size=257, n_layer=3, n_head=4, n_embd=16, n_inner=20)
MODELS = {'vanilla': {}, 'resformer': dict(RES, dropout=0.2), 'svformer': SV, 'short': dict(block_size=8),
          'flat': dict(n_layer=1), 'vanilla2': {}}
BYTES = tokenizer.load('bytes')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """data/bytes; data/other, of another tokenizer; out/trained, a run of train.py; and a run of each of MODELS, as
    train.py would have written it."""
    folder, before = tmp_path_factory.mktemp('analyze'), os.getcwd()
    os.chdir(folder)
    for name, sha256 in (('bytes', BYTES.sha256), ('other', '1' * 64)):
        meta = write_dataset(folder / 'data' / name, {'train': {'A': 3000}, 'validation': VALIDATION}, n_vocab=257)
        meta['tokenizer'] = {'name': 'bytes', 'sha256': sha256, 'n_vocab': 257}
        (folder / 'data' / name / 'meta.json').write_text(json.dumps(meta))
    good('out/trained', dataset='bytes', n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=257, max_iters=2,
         eval_interval=2, warmup_iters=1, lr_decay_iters=2, save_steps=())
    checkpoint = torch.load('out/trained/ckpt.pt', weights_only=True)
    for seed, (name, fields) in enumerate(MODELS.items()):
        config = GPTConfig(**{**RUN, **fields})
        Path('out', name).mkdir()
        torch.save({**checkpoint, 'model': reference.perturb(GPT(config), seed).state_dict(),
                    'model_config': config.__dict__}, f'out/{name}/ckpt.pt')
    yield folder
    os.chdir(before)


@pytest.fixture
def at(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def report(kind, *names, **settings):
    """analyze.analyze() of runs."""
    with contextlib.redirect_stderr(io.StringIO()):  # progress
        return analyze.analyze(kind, [f'out/{name}' for name in names], analyze.AnalyzeConfig(**settings), CPU)


CPU = Machine(TrainConfig(device='cpu', compile=False))


def run_model(name):
    checkpoint = torch.load(f'out/{name}/ckpt.pt', weights_only=True)
    model = GPT(GPTConfig(**checkpoint['model_config']))
    model.load_state_dict(checkpoint['model'])
    return model.eval()


def validation_windows(T):
    """All sequences of T tokens of the validation split, domain after domain, read without data.py."""
    return [row for domain in VALIDATION for row in whole_windows(
        np.fromfile(f'data/bytes/validation/{domain}.bin', dtype='<u2').astype(np.int64), T)]


def whole_windows(ids, T):
    return [ids[i * T:(i + 1) * T].tolist() for i in range(len(ids) // T)]


def spaced(windows, count):
    """`count` of them, evenly: the first, the last, and those at equal steps between, rounded down."""
    n = len(windows)
    return windows if count >= n else [windows[i * (n - 1) // (count - 1)] for i in range(count)]


def summary(values):
    """What analyze.py says of numbers (sequences, layers, ...)."""
    return {'mean': np.mean(values, axis=0), 'standard_error': np.std(values, axis=0, ddof=1) / math.sqrt(len(values))}


def watched(patch, kind):
    """The sequences that the analysis is given, one list for each call."""
    seen, original = [], analyze.ANALYSES[kind]

    def spy(model, idx):
        seen.append(idx.tolist())
        return original(model, idx)
    patch.setitem(analyze.ANALYSES, kind, spy)
    return seen


@every_kind
def test_means_and_standard_errors_are_those_over_sequences(kind, at):
    """Dropout, of which the ResFormer has some, is off."""
    numbers = report(kind, 'vanilla', 'resformer', 'svformer', sequences=7, batch_size=3)
    idx = torch.tensor(spaced(validation_windows(16), 7))
    assert list(numbers['runs']) == ['out/vanilla', 'out/resformer', 'out/svformer'] and numbers['analysis'] == kind
    for run, found in numbers['runs'].items():
        assert (found['sequences'], found['length']) == (7, 16)
        assert found['config']['v_residual'] == ('resformer' in run)
        expected = {name: summary(t) for name, t in analyzed(kind, run_model(run[4:]), idx).items()}
        assert list(found['series']) == list(expected)
        for name in expected:
            assert_close(found['series'][name], expected[name])


@every_kind
def test_results_do_not_depend_on_the_batch_size(kind, at):
    one, three, everything = (report(kind, 'resformer', sequences=8, batch_size=size)['runs']['out/resformer']
                              for size in (1, 3, 100))
    for other in (three, everything):
        assert other['sequences'] == one['sequences'] == 8
        for name, series in one['series'].items():
            assert_close(other['series'][name], series)


def test_the_error_of_one_sequence_is_zero(at):
    found = report('entropy', 'vanilla', sequences=1)['runs']['out/vanilla']
    assert found['sequences'] == 1 and found['series']['entropy']['standard_error'] == [0, 0, 0]


@pytest.mark.parametrize('count', [2, 5, 9, 61, 62, 1000])
def test_sequences_are_evenly_spaced_over_all_domains_and_the_same_for_all_runs(count, at, monkeypatch):
    windows = validation_windows(16)
    assert len(windows) == 43 + 18 + 1
    seen = watched(monkeypatch, 'entropy')
    numbers = report('entropy', 'vanilla', 'svformer', sequences=count, batch_size=100)
    first, second = seen
    assert first == second
    assert first == spaced(windows, count) and first[0] == windows[0] and first[-1] == windows[-1]
    assert all(found['sequences'] == min(count, 62) for found in numbers['runs'].values())


def test_a_length_is_cut_to_the_models_and_a_shorter_one_is_taken(at, monkeypatch):
    seen = watched(monkeypatch, 'entropy')
    numbers = report('entropy', 'short', 'vanilla', sequences=3)
    assert [numbers['runs'][f'out/{name}']['length'] for name in ('short', 'vanilla')] == [8, 16]
    report('entropy', 'vanilla', sequences=3, length=8)
    assert seen == [spaced(validation_windows(8), 3), spaced(validation_windows(16), 3),
                    spaced(validation_windows(8), 3)]


def test_a_text_is_read_in_windows_and_the_rest_is_left(at, monkeypatch, tmp_path):
    text = 'né, the theory of the other thing 😀. ' * 5 + 'x'
    (tmp_path / 'a.txt').write_text(text)
    seen = watched(monkeypatch, 'entropy')
    windows = whole_windows(np.frombuffer(text.encode(), dtype=np.uint8), 16)
    assert len(text.encode()) % 16 and len(windows) == 12
    report('entropy', 'vanilla', 'trained', text=str(tmp_path / 'a.txt'), batch_size=100)
    report('entropy', 'vanilla', text=str(tmp_path / 'a.txt'), sequences=4)
    assert seen == [windows, windows, spaced(windows, 4)]


# ---------------------------------------------------------------------------------------------------------------------
# attention is only watched

@every_kind
def test_attention_and_the_model_are_as_they_were_after_an_analysis(kind):
    original, model, idx = architecture.attend_cross, small('cross'), tokens()
    with torch.no_grad():
        before = model(idx)[0]
        analyzed(kind, model, idx)
        assert architecture.attend_cross is original and torch.equal(model(idx)[0], before)
    assert not any(module._forward_hooks for module in model.modules())


@every_kind
def test_attention_and_the_model_are_as_they_were_after_an_error(kind):
    original, model, idx = architecture.attend_cross, small('ResFormer'), tokens()
    before = analyzed(kind, model, idx)

    def broken(x):
        raise KeyboardInterrupt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.transformer.h[1].mlp, 'forward', broken)  # half way
        with pytest.raises(KeyboardInterrupt):
            analyzed(kind, model, idx)
    assert architecture.attend_cross is original
    assert not any(module._forward_hooks for module in model.modules())
    assert_close(analyzed(kind, model, idx), before)


def test_attention_is_as_it_was_after_an_error_in_what_watches():
    original = architecture.attend_cross
    with pytest.raises(ZeroDivisionError), analyze.watch(small('vanilla'), lambda *args: 1 / 0):
        small('vanilla')(tokens())
    assert architecture.attend_cross is original


# ---------------------------------------------------------------------------------------------------------------------
# the command line

def program(*arguments):
    """(exit status or message, stdout, stderr) of analyze.py in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, 'argv', ['analyze.py', *map(str, arguments)])
        try:
            analyze.main()
            status = 0
        except SystemExit as exit:
            status = exit.code
    return status, out.getvalue(), err.getvalue()


def subprogram(*arguments, cwd):
    return subprocess.run([sys.executable, str(ROOT / 'analyze.py'), *map(str, arguments)], cwd=cwd, env=ENVIRONMENT,
                          capture_output=True, text=True, timeout=150)


def no_constant(name):
    pytest.fail(f'{name} is not JSON')


def assert_pictures(stem):
    assert Path(f'{stem}.png').read_bytes().startswith(b'\x89PNG') and Path(f'{stem}.png').stat().st_size > 5000
    assert Path(f'{stem}.pdf').read_bytes().startswith(b'%PDF')


def test_the_command_writes_numbers_and_figures_of_all_runs(folder, tmp_path):
    stem = tmp_path / 'new' / 'an.entropy'
    done = subprogram('entropy', '--out_dir=out/vanilla', 'out/resformer', f'--out={stem}', '--sequences=6',
                      '--device=cpu', cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in stem.parent.iterdir()) == ['an.entropy.json', 'an.entropy.pdf', 'an.entropy.png']
    assert_pictures(stem)
    numbers = json.loads(Path(f'{stem}.json').read_text(), parse_constant=no_constant)
    assert numbers['analysis'] == 'entropy' and numbers['device'] == 'cpu' and numbers['torch'] == torch.__version__
    assert list(numbers['runs']) == ['out/vanilla', 'out/resformer']
    with contextlib.chdir(folder):
        for run, found in numbers['runs'].items():
            model = run_model(run[4:])
            values = [slow_importance_entropy(model, row) for row in spaced(validation_windows(16), 6)]
            assert_close(found['series']['entropy'], summary(values))


def slow_importance_entropy(model, row):
    """The entropy of each layer, from reference.py's matrices."""
    _, _, attended = inside(model, torch.tensor(row))
    result = []
    for n in range(model.config.n_layer):
        matrices = [reference.softmax(reference.causal(q @ k.T / math.sqrt(q.shape[1])))
                    for q, k in zip(attended['q'][n], attended['k'][n], strict=True)]
        a = torch.stack(matrices).mean(dim=(0, 1))
        result.append(-(a * a.log()).sum().item())
    return result


@pytest.mark.parametrize('kind', KINDS[1:])
def test_every_kind_writes_numbers_and_figures_of_all_runs(kind, at, tmp_path):
    stem = tmp_path / kind
    status, out, _ = program(kind, '--out_dir=out/vanilla', 'out/svformer', f'--out={stem}', '--sequences=3',
                             '--device=cpu')
    assert status == 0 and f'{stem}.png' in out
    assert_pictures(stem)
    numbers = json.loads(Path(f'{stem}.json').read_text())
    again = report(kind, 'vanilla', 'svformer', sequences=3)
    assert list(numbers['runs']) == list(again['runs'])
    for run in again['runs']:
        for name, series in again['runs'][run]['series'].items():
            assert_close(numbers['runs'][run]['series'][name], series)


@pytest.mark.parametrize('kind', KINDS)
def test_the_numbers_are_json_of_which_any_reader_makes_the_same(kind, at, tmp_path):
    """A layer that has no number (the first of a mapping, SVFormer's later projections) is null: NaN is not JSON."""
    assert program(kind, '--out_dir=out/svformer', f'--out={tmp_path}/x', '--sequences=2', '--device=cpu')[0] == 0
    json.loads((tmp_path / 'x.json').read_text(), parse_constant=no_constant)


@every_kind
def test_a_figure_shows_every_run_and_can_be_drawn_from_the_file(kind, at, tmp_path):
    numbers = report(kind, 'vanilla', 'svformer', sequences=3)
    figure = analyze.draw(json.loads(json.dumps(numbers)), 'fig0: a title (tiny)')
    assert figure.get_suptitle() == 'fig0: a title (tiny)'
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    for name in ('vanilla', 'svformer'):
        assert any(text.startswith(name) for text in texts), texts
    curves = {'entropy': 1, 'similarity': 3, 'spectrum': 3, 'mapping': 2}[kind]
    drawn = [line.get_ydata() for ax in figure.axes for line in ax.get_lines() if len(line.get_ydata()) > 2]
    assert len(drawn) == 2 * curves
    series = numbers['runs']['out/svformer']['series']
    expected = {'entropy': lambda: series['entropy']['mean'], 'similarity': lambda: series['values']['mean'],
                'spectrum': lambda: [row[0] for row in series['values attended with']['mean']],
                'mapping': lambda: list(series.values())[1]['mean']}[kind]()
    np.testing.assert_array_equal(drawn[-1], np.array(expected, dtype=float))
    if kind == 'mapping':
        assert 'vanilla $A_{n}$ ($V_{n}$ + $V_{n-1}$), Eq. 3' in texts
    if kind == 'entropy':
        assert any(set(line.get_ydata()) == {analyze.uniform_entropy(16)} for line in figure.axes[0].get_lines())
    plot.pyplot().close(figure)


@every_kind
def test_two_runs_of_one_model_look_different(kind, at):
    """plot.styles: a model has its color, runs of one model differ in their dashes."""
    figure = analyze.draw(report(kind, 'vanilla', 'vanilla2', sequences=2))
    for ax in figure.axes:
        looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.get_lines()]
        assert len(set(looks)) == len(looks), looks
    plot.pyplot().close(figure)


@every_kind
def test_many_runs_are_all_seen_and_told_apart(kind, at):
    """Nine runs, five of a kind, two of one name: the legend is beside the axes, no two curves look alike."""
    config = GPTConfig(**RUN).__dict__
    found = report(kind, 'vanilla', sequences=3)
    one = found['runs'].pop('out/vanilla')
    for run, fields in {'a/vanilla': {}, 'b/vanilla': {}, 'mha': dict(n_kv_head=RUN['n_head']), 'svformer': SV,
                        **{f'other{i}': dict(q_residual=True) for i in range(5)}}.items():
        found['runs'][run] = {**one, 'config': {**config, **fields}}
    figure = analyze.draw(found)
    legend, curves = figure.legends[0], [line for line in figure.axes[0].get_lines() if len(line.get_ydata()) > 2]
    figure.draw_without_rendering()
    assert all(ax.get_window_extent().height > 150 and not ax.get_legend() for ax in figure.axes)
    assert legend.get_window_extent().y1 <= min(ax.get_tightbbox().y0 for ax in figure.axes)
    texts = [text.get_text() for text in legend.get_texts()]
    assert len(set(texts)) == len(texts) and texts[0].startswith('a/vanilla') and any('b/vanilla' in t for t in texts)
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker(), line.get_alpha())
             for line in figure.axes[0].get_lines()]
    assert len(set(looks)) == len(looks) >= len(curves) >= 9
    for ax in figure.axes:
        assert all(tick == int(tick) for tick in ax.get_xticks())
    plot.pyplot().close(figure)


def test_an_error_as_large_as_its_eigenvalue_does_not_stretch_the_axis(at):
    numbers = report('spectrum', 'vanilla', sequences=3)
    for series in numbers['runs']['out/vanilla']['series'].values():
        series['standard_error'] = [[(1 - 1e-6) * value for value in layer] for layer in series['mean']]
    for ax in analyze.draw(numbers).axes:
        drawn = ax.get_lines()[0].get_ydata()
        assert ax.get_ylim()[0] > 0.1 * np.nanmin(drawn)
    plot.pyplot().close('all')


def test_without_out_the_files_go_to_results(at):
    assert program('entropy', '--out_dir=out/trained', '--sequences=2', '--device=cpu')[0] == 0
    assert_pictures('results/entropy')
    assert json.loads(Path('results/entropy.json').read_text())['runs']['out/trained']['sequences'] == 2


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face

WORDS = 'the theory of the other thing that one has or had of it and that one theory has of the other one '.split()
SIZES = dict(vocab_size=300, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=24, bos_token_id=0, eos_token_id=0)


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
    """A random checkpoint in `folder`, whose attention is far from uniform; returned with eager attention."""
    config, model = {'llama': (transformers.LlamaConfig, transformers.LlamaForCausalLM),
                     'mistral': (transformers.MistralConfig, transformers.MistralForCausalLM)}[kind]
    torch.manual_seed(0)
    theirs = reference.perturb(model(config(**{**SIZES, **changes}, attn_implementation='eager'))).eval()
    theirs.save_pretrained(folder)
    return theirs


def words_tokenizer(folder):
    """A vocabulary of words, with <s> before a text, as Llama's tokenizer has it. Returns text -> ids."""
    tokenizers, fast = pytest.importorskip('tokenizers'), pytest.importorskip('transformers').PreTrainedTokenizerFast
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(['<s>', '<unk>', *sorted(set(WORDS))])}, unk_token='<unk>'))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 0)])
    fast(tokenizer_object=words, bos_token='<s>', unk_token='<unk>').save_pretrained(folder)
    return lambda text: words.encode(text).ids


def bytes_tokenizer(folder):
    """Bytes, as hf.export writes them."""
    (folder / 'tokenizer.json').write_text(json.dumps(BYTES.json(), ensure_ascii=False))
    (folder / 'tokenizer_config.json').write_text(json.dumps({
        'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': tokenizer.EOT, 'eos_token': tokenizer.EOT}))
    return lambda text: list(text.encode())


@pytest.mark.parametrize('kind, changes, tokenizer_of, length, sequences', [
    ('llama', {}, words_tokenizer, 24, 1000), ('llama', dict(num_key_value_heads=4), bytes_tokenizer, 20, 5),
    ('mistral', dict(sliding_window=None), bytes_tokenizer, 24, 1000),
    ('mistral', dict(sliding_window=16), words_tokenizer, 16, 6)],
    ids=['llama, words', 'llama, bytes', 'mistral, bytes', 'mistral with a window, words'])
def test_a_folders_entropy_is_that_of_transformers_attentions(kind, changes, tokenizer_of, length, sequences,
                                                              transformers, tmp_path):
    theirs = hub_model(transformers, kind, tmp_path / 'hf', **changes)
    encode = tokenizer_of(tmp_path / 'hf')
    text = ' '.join(WORDS * 8)
    (tmp_path / 'text.txt').write_text(text)
    status, _, _ = program('entropy', f'--hf={tmp_path}/hf', f'--text={tmp_path}/text.txt', f'--sequences={sequences}',
                           f'--length={length if length == 20 else 2048}', '--device=cpu', f'--out={tmp_path}/x')
    assert status == 0
    found = json.loads((tmp_path / 'x.json').read_text())['runs'][f'{tmp_path}/hf']

    windows = spaced(whole_windows(np.array(encode(text)), length), sequences)
    assert len(windows) > 4 and (found['sequences'], found['length']) == (len(windows), length)
    values = []
    with torch.no_grad():
        for row in windows:
            attentions = theirs(torch.tensor([row]), output_attentions=True).attentions
            importance = [a[0].double().mean(dim=(0, 1)) for a in attentions]  # (heads, queries, keys)
            values.append([-(a * a.log()).sum().item() for a in importance])
    assert np.std(values) > 0.01 and abs(np.mean(values) - analyze.uniform_entropy(length)) > 0.01
    assert_close(found['series']['entropy'], summary(values))


@pytest.mark.parametrize('kind', KINDS[1:])
def test_every_kind_reads_a_folder(kind, transformers, tmp_path):
    hub_model(transformers, 'llama', tmp_path / 'hf')
    bytes_tokenizer(tmp_path / 'hf')
    (tmp_path / 'text.txt').write_text(' '.join(WORDS))
    assert program(kind, f'--hf={tmp_path}/hf', f'--text={tmp_path}/text.txt', '--sequences=3', '--device=cpu',
                   f'--out={tmp_path}/x')[0] == 0
    assert_pictures(tmp_path / 'x')
    model = GPT.from_pretrained(tmp_path / 'hf')
    rows = spaced(whole_windows(np.frombuffer(' '.join(WORDS).encode(), dtype=np.uint8), 24), 3)
    found = json.loads((tmp_path / 'x.json').read_text())['runs'][f'{tmp_path}/hf']['series']
    for name, values in analyzed(kind, model, torch.tensor(rows)).items():
        assert_close(found[name], summary(values))


# ---------------------------------------------------------------------------------------------------------------------
# mistakes

def files():
    return sorted(str(p) for p in Path('.').rglob('*'))


def assert_refused(*arguments, words=()):
    """In one line, with nothing written."""
    before = files()
    status, out, err = program(*arguments, '--device=cpu')
    assert isinstance(status, str) and status.startswith('error: ') and '\n' not in status, status
    assert 'Traceback' not in err and files() == before
    for word in words:
        assert str(word) in status, status


@pytest.mark.parametrize('arguments, words', [
    ([], ['--out_dir', '--hf']),
    (['out/vanilla'], ['--out_dir', '--hf']),
    (['--hf=out/vanilla'], ['--hf', '--text']),
    (['--hf=folder', '--dataset=bytes'], ['--hf', '--text']),
    (['--hf=folder', '--text=a.txt', '--out_dir=out/vanilla'], ['--hf', '--out_dir']),
    (['--out_dir=out/vanilla', '--dataset=other'], ['another tokenizer', 'out/vanilla', 'data/other']),
    (['--out_dir=out/vanilla', '--dataset=none'], ['data/none']),
    (['--out_dir=out/vanilla', '--sequences=0'], ['sequences=0']),
    (['--out_dir=out/vanilla', '--sequences=-1'], ['sequences=-1']),
    (['--out_dir=out/vanilla', '--length=1'], ['length=1']),
    (['--out_dir=out/vanilla', '--batch_size=0'], ['batch_size=0']),
    (['--out_dir=out/vanilla', '--sequence=5'], ['sequence', 'sequences']),
    (['--out_dir=out/none'], ['out/none']),
    (['--out_dir=out/vanilla', 'out/none', '--sequences=1'], ['out/none']),
    (['--out_dir=out/vanilla', '--text=none.txt'], ['none.txt']),
])
def test_a_mistake_is_one_line_and_writes_nothing(arguments, words, at):
    assert_refused('entropy', *arguments, words=words)


def test_a_text_shorter_than_one_sequence_is_refused_and_one_of_just_its_length_is_not(at, tmp_path):
    text = tmp_path / 'text.txt'
    text.write_text('x' * 15)
    assert_refused('entropy', '--out_dir=out/vanilla', f'--text={text}', words=[text, '16', '--length'])
    for content, flags in (('x' * 16, []), ('x' * 15, ['--length=15'])):
        text.write_text(content)
        assert program('entropy', '--out_dir=out/vanilla', f'--text={text}', *flags, '--device=cpu',
                       f'--out={tmp_path}/x')[0] == 0
        assert json.loads((tmp_path / 'x.json').read_text())['runs']['out/vanilla']['length'] == len(content)


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(at, transformers, tmp_path):
    hub_model(transformers, 'llama', tmp_path / 'hf')
    (tmp_path / 'text.txt').write_text(' '.join(WORDS))
    assert_refused('entropy', f'--hf={tmp_path}/hf', f'--text={tmp_path}/text.txt', words=['tokenizer'])


def test_a_mapping_of_a_single_layer_is_refused_in_one_line(at):
    assert_refused('mapping', '--out_dir=out/flat', '--sequences=2', words=['layer'])


def test_a_mistake_has_exit_status_1_and_one_line_on_stderr(folder):
    done = subprogram('spectrum', '--sequences=3', cwd=folder)
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr.startswith('error: ') and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize('arguments', [[], ['entropie'], ['--out_dir=out/vanilla'], ['draw', '--out_dir=out/vanilla']])
def test_an_unknown_analysis_is_answered_with_the_usage_and_exit_status_2(arguments, at):
    before = files()
    status, out, err = program(*arguments)
    assert status == 2 and files() == before
    for kind in KINDS:
        assert f'python analyze.py {kind} ' in out


def test_help_is_no_mistake(at):
    assert program('--help')[0] == program('-h')[0] == 0
    status, out, _ = program('entropy', '--help')
    assert status == 0 and '--sequences=1000' in out and '--hf' in out
