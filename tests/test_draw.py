"""python -m paper.draw: numbers from the logs of runs (paper/losses.py), and what is drawn of them."""

import dataclasses
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from programs import assert_one_line, program
from runs import good, log
from variants import VARIANTS, config_of

from model import GPTConfig
from paper import draw, losses
from rundir import read_losses


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    yield
    draw.pyplot().close('all')


def write_log(folder, entries):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(entry) + '\n' for entry in entries]
    (folder / 'log.jsonl').write_text(''.join(lines))


def write_run(folder, values, val=None, **config):
    """A finished run as train.py leaves it, with a training loss per step. Returns its folder."""
    entries = [{'step': step, 'loss': loss} for step, loss in enumerate(values)]
    last = val or values[-1]
    entries.append({'step': len(values), 'val': {'Domain': last, 'mean': last}})
    write_log(folder, entries)
    (folder / 'config.json').write_text(json.dumps(config))
    return folder


@pytest.fixture(scope='module')
def trained(work):
    """Two finished runs of 12 steps, by train.py."""
    good('out/vanilla')
    good('out/resformer', v_residual=True)
    return 'out/vanilla', 'out/resformer'


# --- relative losses ------------------------------------------------------------------------------


def test_relative_loss_is_the_mean_difference_to_the_baseline(trained):
    vanilla, resformer = (
        [entry['loss'] for entry in log(run) if 'loss' in entry] for run in trained
    )
    steps, values = losses.relative(*trained, 5)
    assert list(steps) == list(range(4, 12))
    for step, value in zip(steps, values, strict=True):
        window = slice(step - 4, step + 1)
        assert value == pytest.approx(np.mean(resformer[window]) - np.mean(vanilla[window]))


def test_draw_writes_a_picture_and_a_table(trained):
    words = ['relative', *trained, '--window=4', '--out=a/b.png']
    status, out, _ = program(draw.main, *words)
    assert status == 0
    assert Path('a/b.png').read_bytes().startswith(b'\x89PNG')
    assert re.search(r'\| out/resformer \| [+-]\d\.\d{4} \|', out)


def test_a_table_is_empty_where_a_run_has_no_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranges = {'whole': range(200), 'short': range(120), 'late': range(100, 200)}
    for name, steps in ranges.items():
        write_log(tmp_path / name, [{'step': s, 'loss': s / 100} for s in steps])
    status, out, _ = program(draw.main, 'relative', *ranges, '--window=1')
    assert status == 0
    rows = [line.strip('|').split('|') for line in out.splitlines() if line.startswith('|')]
    steps = [' step 20 ', ' step 50 ', ' step 100 ', ' step 149 ', ' step 199 ']
    assert rows[0] == [' run ', *steps]
    filled = [[bool(cell.strip()) for cell in row[1:]] for row in rows[2:]]
    assert filled == [[True, True, True, False, False], [False, False, True, True, True]]


@pytest.mark.parametrize(
    'line', ['[1, 2]', '{"loss": 1}', '{"step": 1, "loss": "x"}', '{"step": 1, "lo', '\xff']
)
def test_a_line_that_is_none_of_a_log_is_named(tmp_path, line):
    text = '{"step": 0, "loss": 1}\n' + line + '\n'
    (tmp_path / 'log.jsonl').write_text(text, encoding='latin-1')
    with pytest.raises(ValueError, match=f'{tmp_path}/log.jsonl, line 2: not '):
        read_losses(tmp_path)


def test_losses_that_are_not_finite_are_left_out(tmp_path):
    for name, odd in (('a', '3'), ('b', 'NaN'), ('c', 'null')):
        lines = [f'{{"step": {s}, "loss": {odd if s == 15 else 3}}}\n' for s in range(20)]
        (tmp_path / name).mkdir()
        (tmp_path / name / 'log.jsonl').write_text(''.join(lines))
    _, axes = draw.pyplot().subplots()
    curves = draw.relative_axes(axes, tmp_path / 'a', [tmp_path / 'b', tmp_path / 'c'], 2)
    for steps, values in curves.values():
        assert 15 not in steps and np.isfinite(values).all()


def test_an_early_lead_is_in_the_picture(tmp_path):
    """A tenth of 4,000 steps holds it; only the outermost of the first steps may lie outside."""
    steps = np.arange(4000)
    lead = -0.12 * np.exp(-(((steps - 200) / 80) ** 2)) - 0.01 + (steps < 30)
    base = write_run(tmp_path / 'base', [5.0] * 4000)
    run = write_run(tmp_path / 'run', (5 + lead).tolist())
    _, axes = draw.pyplot().subplots()
    draw.relative_axes(axes, base, [run], 1)
    low, high = axes.get_ylim()
    assert low < lead.min() and high < 0.5


def test_each_run_of_a_pair_is_relative_to_its_own_baseline(tmp_path):
    """Runs of one model get ever stronger, those of several models their colors."""
    pairs = []
    for length, base, loss in ((64, 5.0, 4.5), (128, 4.0, 3.8), (256, 3.0, 3.1)):
        vanilla = write_run(tmp_path / f'v{length}', [base] * 20, block_size=length)
        sv = write_run(tmp_path / f's{length}', [loss] * 20, block_size=length, share_v=True)
        pairs.append((vanilla, sv))
    _, axes = draw.pyplot().subplots()
    curves = draw.pairs_axes(axes, pairs, 4)
    ends = [values[-1] for _, values in curves.values()]
    assert ends == pytest.approx([-0.5, -0.2, 0.1])
    alphas = [line.get_alpha() for line in axes.lines[1:]]
    assert alphas == sorted(set(alphas)) and alphas[-1] == 1
    assert {line.get_color() for line in axes.lines[1:]} == {draw.COLORS['SVFormer']}

    resformer = write_run(tmp_path / 'r', [2.9] * 20, v_residual=True)
    _, axes = draw.pyplot().subplots()
    draw.pairs_axes(axes, [pairs[2], (pairs[2][0], resformer)], 4)
    colors = [line.get_color() for line in axes.lines[1:]]
    assert colors == [draw.COLORS['SVFormer'], draw.COLORS['ResFormer']]


# --- bars -----------------------------------------------------------------------------------------


def test_bars_are_mean_differences_of_the_last_steps(tmp_path):
    rng = np.random.default_rng(0)
    base, other = rng.normal(3, 0.1, 40), rng.normal(2.9, 0.1, 40)
    a, b = write_run(tmp_path / 'a', base.tolist()), write_run(tmp_path / 'b', other.tolist())
    expected = (other - base)[-10:].mean()
    assert losses.final_difference(a, b, 10) == pytest.approx(expected)
    with pytest.raises(ValueError, match='fewer than --window=41'):
        losses.final_difference(a, b, 41)
    _, axes = draw.pyplot().subplots()
    assert draw.bars_axes(axes, a, [b], 10) == {b: {'mean': pytest.approx(expected)}}
    # Steps of one run are not independent: there is no error bar over them.
    assert not axes.collections and len(axes.containers) == 1


def test_a_bar_looks_as_its_curve_and_no_late_point_is_cut(tmp_path):
    runs = []
    settings = {'q': dict(q_residual=True), 'k': dict(k_residual=True)}
    for name, last in (('vanilla', 3), ('q', 2.9), ('k', 3.4)):
        curve = np.linspace(4, last, 50).tolist()
        runs.append(write_run(tmp_path / name, curve, **settings.get(name, {})))
    _, (left, right) = draw.pyplot().subplots(1, 2)
    curves = draw.relative_axes(left, runs[0], runs[1:], 5)
    draw.bars_axes(right, runs[0], runs[1:], 5)
    to_rgb = draw.pyplot().matplotlib.colors.to_rgb
    bars = [(bar.get_facecolor()[:3], bool(bar.get_hatch())) for bar in right.patches]
    lines = [(to_rgb(line.get_color()), line.get_linestyle() != '-') for line in left.lines[1:]]
    assert bars == lines and len(set(bars)) == 2
    low, high = left.get_ylim()
    for _, values in curves.values():
        assert low < values[len(values) // 10 :].min() and values.max() < high


# --- loss against size ----------------------------------------------------------------------------


def test_the_power_law_is_recovered():
    n = np.array([1e6, 1e7, 1e8])
    assert losses.power_law(n, 12 * n**-0.07) == pytest.approx((12, 0.07))


def test_savings_at_equal_loss(tmp_path):
    """ResFormer's loss is vanilla's at 20% more parameters. It has its last loss from step 75 on,
    vanilla from step 50 on."""
    a, b = 9.0, 0.1
    models = (('vanilla', {}, 1.0, 50), ('resformer', dict(v_residual=True), 1.2, 75))
    runs = []
    for n_embd in (16, 32, 64):
        shape = dict(n_head=2, vocab_size=64, block_size=8, n_embd=n_embd, n_layer=2)
        for model, wiring, factor, last_step in models:
            folder = write_run(tmp_path / f'{model}_{n_embd}', [1.0], **shape, **wiring)
            last = a * (factor * losses.parameters_of(folder)) ** -b
            curve = [last + max(0, last_step - step) for step in range(100)]
            runs.append(write_run(folder, curve, **shape, **wiring))
    _, axes = draw.pyplot().subplots()
    models = draw.scaling_axes(axes, [str(run) for run in runs], 10)
    assert models['vanilla']['power_law'] == pytest.approx((a, b))
    resformer = models['ResFormer']
    assert resformer['parameters_saved'] == pytest.approx(1 - 1 / 1.2) and not resformer['why']
    assert axes.get_legend().get_texts()[0].get_text() == 'vanilla: 9 $N^{-0.1}$'
    # Its own last loss, from step 50 on.
    assert losses.tokens_saved(runs[0], runs[0], 10) == pytest.approx(1 - 60 / 100)


def test_one_size_is_drawn_without_a_fit(tmp_path, recwarn):
    shape = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=8)
    wirings = {'a': {}, 'b': {}, 'c': dict(v_residual=True)}
    runs = []
    for name, wiring in wirings.items():
        runs.append(write_run(tmp_path / name, [3.0] * 9, **shape, **wiring))
    _, axes = draw.pyplot().subplots()
    models = draw.scaling_axes(axes, runs, 2)
    assert len(models['vanilla']['loss']) == 2 and 'power_law' not in models['vanilla']
    assert not recwarn.list
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ['vanilla', 'ResFormer']


# --- the critical step ----------------------------------------------------------------------------


def crosses(s):
    return s - 30.5


def stays_below(s):
    return -1 + 0 * s


def stays_above(s):
    return 1 + 0 * s


def dips_at_the_end(s):
    return np.select([s < 2, s < 40, s < 95], [0.1, -1, 0.5], -1)


def peaks_on_the_way(s):
    return np.where((s > 40) & (s < 45), 1, (s - 150) / 100)


def will_cross(s):
    return (s - 150) / 100


def falls(s):
    return -s


@pytest.mark.parametrize(
    'difference, expected',
    [
        (crosses, (31, True)),
        (stays_below, (None, False)),
        (stays_above, (None, False)),
        (dips_at_the_end, (40, True)),
        (peaks_on_the_way, (150, False)),
        (will_cross, (150, False)),
        (falls, (None, False)),
    ],
)
def test_the_critical_step_is_where_a_run_loses_its_lead_or_will(tmp_path, difference, expected):
    steps = np.arange(100)
    base = write_run(tmp_path / 'base', [5.0] * 100)
    run = write_run(tmp_path / 'run', (5 + difference(steps)).tolist())
    step, crossed = losses.critical_step(base, run, 1)
    expected_step, expected_crossed = expected
    assert crossed == expected_crossed and (step is None) == (expected_step is None)
    tolerance = 0 if crossed else 0.05
    assert step is None or step == pytest.approx(expected_step, rel=tolerance)


def test_lengths_without_a_crossing_are_named_and_two_points_are_not_fitted(tmp_path):
    steps = np.arange(100)
    pairs = []
    for length, middle in ((64, None), (128, 20), (256, 40), (512, 60)):
        rise = steps * 0 - 1 if middle is None else steps - middle - 0.5
        curve = (5 + rise).tolist()
        vanilla = write_run(tmp_path / f'v{length}', [5.0] * 100, block_size=length)
        sv = write_run(tmp_path / f's{length}', curve, block_size=length, share_v=True)
        pairs.append((vanilla, sv))
    for some, fits in ((pairs[:3], 0), (pairs, 1)):
        _, axes = draw.pyplot().subplots()
        points = draw.critical_axes(axes, some, 1)
        assert [point['step'] for point in points] == [None, 21, 41, 61][: len(some)]
        assert axes.get_title() == 'no sign of crossing: 64'
        assert sum(line.get_linestyle() == '--' for line in axes.lines) == fits


# --- names and colors -----------------------------------------------------------------------------


def test_runs_of_one_name_have_the_end_of_the_path_that_tells_them_apart():
    assert draw.labels(['out/a/vanilla', 'out/b/vanilla', 'resformer', '.']) == {
        'out/a/vanilla': 'a/vanilla',
        'out/b/vanilla': 'b/vanilla',
        'resformer': 'resformer',
        '.': os.path.basename(os.getcwd()),
    }


def test_as_many_key_heads_as_heads_is_no_gqa():
    mha, default, gqa = (GPTConfig(n_head=8, n_kv_head=heads) for heads in (8, 0, 2))
    assert draw.model_name(mha) == draw.model_name(default) == 'vanilla'
    assert draw.model_name(gqa) == 'GQA'


@pytest.mark.parametrize(
    'name, expected',
    [
        ('vanilla', 'vanilla'),
        ('gpt2', 'vanilla'),
        ('ResFormer', 'ResFormer'),
        ('learned from all', 'ResFormer'),
        ('cross GQA', 'ResFormer'),
        ('SVFormer', 'SVFormer'),
        ('SVFormer CLA keys GQA', 'CLA'),
        ('CLA', 'CLA'),
        ('MQA', 'GQA'),
        ('NeuTRENO on ResFormer', 'NeuTRENO'),
        ('DenseFormer', 'DenseFormer'),
        ('key residual', 'k_residual'),
        ('queries every 2, query residual', 'q_residual, share_q, share_q_every=2'),
    ],
)
def test_a_model_is_named_after_the_paper_or_by_its_settings(name, expected):
    assert sorted(draw.model_name(config_of(name)).split(', ')) == sorted(expected.split(', '))


def test_every_variant_is_known_to_the_drawings():
    """A new setting of GPTConfig belongs into DETAILS, ABLATIONS or FAMILIES of paper/draw.py, or its
    models are grey."""
    grey = {'q_residual', 'k_residual', 'share_q', 'share_k'}
    for name in VARIANTS:
        config = config_of(name)
        label = draw.model_name(config)
        known = label in draw.COLORS or grey & config.variant().keys()
        assert known, (
            f'{label} would be grey: name its setting in DETAILS, ABLATIONS or FAMILIES of paper/draw.py'
        )


@dataclasses.dataclass
class Forked(GPTConfig):
    residual_gate: str = ''

    def variant(self):
        gate = {'residual_gate': self.residual_gate} if self.residual_gate else {}
        return super().variant() | gate


@pytest.mark.parametrize('wiring', [{}, dict(v_residual=True), dict(share_v=True)])
def test_a_field_that_a_fork_added_is_never_taken_for_a_model_of_the_paper(wiring):
    plain, gated = Forked(**wiring), Forked(**wiring, residual_gate='head')
    assert draw.model_name(plain) == draw.model_name(GPTConfig(**wiring))
    assert 'residual_gate=head' in draw.model_name(gated)
    assert draw.color_of(gated) == draw.COLORS['other'] != draw.color_of(plain)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'kind, config, message',
    [
        ('relative', '[]', 'a/config.json holds no settings'),
        ('relative', '{', 'a/config.json: not JSON'),
        ('scaling', None, 'a/config.json'),
        ('critical', None, 'b/config.json'),
        ('critical', '{}', 'say block_size'),
        (
            'scaling',
            '{"n_layer": 2, "n_head": 3, "n_embd": 8, "vocab_size": 8}',
            'a/config.json: n_embd',
        ),
    ],
)
def test_a_config_that_does_not_say_what_is_asked_of_it_is_named(
    tmp_path, monkeypatch, kind, config, message
):
    monkeypatch.chdir(tmp_path)
    for name in 'ab':
        write_log(tmp_path / name, [{'step': s, 'loss': 3} for s in range(20)])
        if config is not None:
            (tmp_path / name / 'config.json').write_text(config)
    status, _, _ = program(draw.main, kind, 'a', 'b', '--window=2')
    assert_one_line(status, message)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['out/vanilla', 'out/nothing'], 'out/nothing'),
        (['out/vanilla', 'out/resformer', '--window=99'], 'fewer than --window=99'),
        (['out/vanilla', 'out/resformer', '--window=0'], 'window=0'),
        (['out/vanilla'], 'needs a baseline and at least one other run'),
    ],
)
def test_draw_refuses_bad_input_in_one_line(trained, arguments, message):
    status, _, err = program(draw.main, 'relative', *arguments)
    assert_one_line(status, message)
    assert 'Traceback' not in err


def test_an_unknown_drawing_is_answered_with_the_usage_and_exit_status_2():
    status, out, _ = program(draw.main, 'pie', 'out/vanilla')
    assert status == 2
    for kind in draw.DRAWINGS:
        assert f'python -m paper.draw {kind} ' in out
