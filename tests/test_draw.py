"""python -m paper.draw: numbers from the logs of runs (paper/losses.py), and what is drawn of them."""

import dataclasses
import os
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from programs import assert_one_line, program
from runs import good, log, read_config, write_log, write_run
from variants import VARIANTS, config_of

from model import GPTConfig
from paper import crossings, draw, losses

pytestmark = pytest.mark.usefixtures('figures_closed')


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


@pytest.mark.parametrize('name, value', [('seed', 2), ('max_iters', 50), ('block_size', 64)])
def test_runs_that_differ_in_more_than_their_models_and_rates_are_refused(tmp_path, name, value):
    rate = {'learning_rate': 1.0, 'min_lr': 0.1}
    base = write_run(tmp_path / 'base', [5.0] * 20, **rate)
    twice = {'learning_rate': 2.0, 'min_lr': 0.2, 'share_v': True}
    run = write_run(tmp_path / 'run', [4.0] * 20, **twice)
    assert losses.final_difference(base, run, 5) == -1
    write_run(run, [4.0] * 20, **twice, **{name: value})
    for measure in (losses.final_difference, losses.relative, crossings.crossing):
        with pytest.raises(ValueError, match=f'has {name}={value} and .* cannot be compared'):
            measure(base, run, 5)
    with pytest.raises(ValueError, match=f'has {name}={value} and .* cannot be compared'):
        losses.early_difference(base, run)


def test_a_fit_over_sizes_is_of_runs_that_differ_in_nothing_else(tmp_path):
    models = {'vanilla': ({}, lambda n: falling_to(9 * n**-0.1))}
    *others, last = write_sizes(tmp_path, models)
    shape = read_config(last)
    for changes in ({'gradient_accumulation_steps': 2}, {'batch_size': 2}):
        write_run(Path(last), [3.0] * 100, **{**shape, **changes})
        with pytest.raises(ValueError, match='has tokens of a step=16 and .* has 8'):
            draw.scaling_of([*others, last], 10)
    write_run(Path(last), [3.0] * 100, **shape, weight_decay=0.5)
    with pytest.raises(ValueError, match='has weight_decay=0.5 and .* has 0.1'):
        draw.scaling_of([*others, last], 10)


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


def test_losses_that_are_not_finite_are_left_out(tmp_path):
    for name, odd in (('a', '3'), ('b', 'NaN'), ('c', 'null')):
        lines = [f'{{"step": {s}, "loss": {odd if s == 15 else 3}}}\n' for s in range(20)]
        (tmp_path / name).mkdir()
        (tmp_path / name / 'log.jsonl').write_text(''.join(lines))
    curves = draw.curves_of(
        [(tmp_path / 'a', tmp_path / 'b'), (tmp_path / 'a', tmp_path / 'c')], 2, 2
    )
    for curve in curves.values():
        assert 15 not in curve['steps'] and np.isfinite(curve['difference']).all()


def drawn(curves, configs=None, ordered=False):
    """Axes with curves."""
    configs = configs or dict.fromkeys(curves, GPTConfig())
    names = {run: Path(run).name for run in curves}
    _, axes = draw.pyplot().subplots()
    draw.curve_axes(axes, curves, draw.looks(configs, names, ordered), 'vanilla', 5, 5)
    return axes


def test_an_early_lead_is_in_the_picture(tmp_path):
    """A tenth of 4,000 steps holds it; only the outermost of the first steps may lie outside."""
    steps = np.arange(4000)
    lead = -0.12 * np.exp(-(((steps - 200) / 80) ** 2)) - 0.01 + (steps < 30)
    base = write_run(tmp_path / 'base', [5.0] * 4000)
    run = write_run(tmp_path / 'run', (5 + lead).tolist())
    low, high = drawn(draw.curves_of([(base, run)], 1, 1)).get_ylim()
    assert low < lead.min() and high < 0.5


def test_each_run_of_a_pair_is_relative_to_its_own_baseline(tmp_path):
    pairs = []
    for length, base, loss in ((64, 5.0, 4.5), (128, 4.0, 3.8), (256, 3.0, 3.1)):
        vanilla = write_run(tmp_path / f'v{length}', [base] * 20, block_size=length)
        sv = write_run(tmp_path / f's{length}', [loss] * 20, block_size=length, share_v=True)
        pairs.append((vanilla, sv))
    curves = draw.curves_of(pairs, 4, 4)
    ends = [curve['difference'][-1] for curve in curves.values()]
    assert ends == pytest.approx([-0.5, -0.2, 0.1])


def test_runs_of_one_model_in_order_get_ever_stronger_and_others_their_colors():
    sv, resformer = GPTConfig(share_v=True), GPTConfig(v_residual=True)
    curve = {'steps': list(range(20)), 'difference': [0.1] * 20, 'final': 0.1}
    axes = drawn(dict.fromkeys('abc', curve), dict.fromkeys('abc', sv), ordered=True)
    colors = [line.get_color() for line in axes.lines[:3]]
    brightness = [sum(draw.pyplot().matplotlib.colors.to_rgb(color)) for color in colors]
    assert brightness == sorted(set(brightness), reverse=True)
    assert colors[-1] == draw.COLORS['SVFormer']

    axes = drawn(dict.fromkeys('ab', curve), {'a': sv, 'b': resformer})
    colors = [line.get_color() for line in axes.lines[:2]]
    assert colors == [draw.COLORS['SVFormer'], draw.COLORS['ResFormer']]


def test_the_end_of_a_curve_has_its_name_and_its_mean_difference_and_no_error(tmp_path):
    """Steps of one run are not independent: there is no error bar over them."""
    rng = np.random.default_rng(0)
    base, other = rng.normal(3, 0.1, 40), rng.normal(2.9, 0.1, 40)
    a, b = write_run(tmp_path / 'a', base.tolist()), write_run(tmp_path / 'b', other.tolist())
    expected = (other - base)[-10:].mean()
    assert losses.final_difference(a, b, 10) == pytest.approx(expected)
    with pytest.raises(ValueError, match='fewer than the 41 of a mean'):
        losses.final_difference(a, b, 41)

    curves = draw.curves_of([(a, b)], 5, 10)
    assert curves[b]['final'] == pytest.approx(expected)
    axes = drawn(curves)
    texts = [text.get_text() for text in axes.texts]
    assert f'{expected:+.3f}  b'.replace('-', '\N{MINUS SIGN}') in texts and 'vanilla' in texts
    assert not axes.collections and not axes.containers and len(axes.lines) == 2


def test_names_at_the_ends_keep_their_order_and_do_not_overlap():
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = rng.normal(0, 1, rng.integers(1, 9))
        gap = rng.uniform(0, 1)
        places = np.array(draw.spread(list(values), gap))
        order = np.argsort(values)
        assert (np.diff(places[order]) > gap - 1e-9).all()
        # No shift of all together would bring them nearer, nor would moving one that is free.
        assert abs((places - values).mean()) < 1e-9
        free = np.ones(len(values), bool)
        crowded = np.flatnonzero(np.diff(places[order]) < gap + 1e-9)
        free[order[crowded]] = free[order[crowded + 1]] = False
        assert places[free] == pytest.approx(values[free])


# --- loss against size ----------------------------------------------------------------------------


def test_the_power_law_is_recovered():
    n = np.array([1e6, 1e7, 1e8])
    assert losses.power_law(n, 12 * n**-0.07) == pytest.approx((12, 0.07))


def write_sizes(tmp_path, models, widths=(16, 32, 64)):
    """Runs of 100 steps at each width; models: {name: (settings, function from parameters to loss)}."""
    runs = []
    for n_embd in widths:
        shape = dict(n_head=2, vocab_size=64, block_size=8, n_embd=n_embd, n_layer=2)
        for name, (settings, curve_at) in models.items():
            folder = write_run(tmp_path / f'{name}_{n_embd}', [1.0], **shape, **settings)
            curve = curve_at(losses.parameters_of(folder))
            runs.append(str(write_run(folder, curve, **shape, **settings)))
    return runs


def falling_to(loss, last_step=50):
    return [loss + max(0, last_step - step) for step in range(100)]


def test_savings_at_equal_loss(tmp_path):
    """ResFormer's loss is vanilla's at 20% more parameters. It has its last loss from step 75 on,
    vanilla from step 50 on."""
    a, b = 9.0, 0.1
    models = {
        'vanilla': ({}, lambda n: falling_to(a * n**-b, 50)),
        'resformer': (dict(v_residual=True), lambda n: falling_to(a * (1.2 * n) ** -b, 75)),
    }
    runs = write_sizes(tmp_path, models)
    models = draw.scaling_of(runs, 10)
    assert models['vanilla']['power_law'] == pytest.approx((a, b))
    resformer = models['ResFormer']
    assert resformer['parameters_saved'] == pytest.approx(1 - 1 / 1.2) and not resformer['why']
    _, axes = draw.pyplot().subplots()
    draw.scaling_axes(axes, models, 10)
    assert axes.get_legend().get_texts()[0].get_text() == 'vanilla: 9 $N^{-0.1}$'
    # Its own last loss, from step 50 on.
    assert losses.tokens_saved(runs[0], runs[0], 10) == pytest.approx(1 - 60 / 100)


def test_tokens_are_saved_at_the_size_of_the_largest_vanilla_model(tmp_path):
    """A still larger model reaches its loss earlier, however little it is worth."""

    def law(n):
        return falling_to(9 * n**-0.1)

    models = {'vanilla': ({}, law), 'resformer': (dict(v_residual=True), law)}
    runs = write_sizes(tmp_path, models)
    saved = draw.scaling_of(runs, 10)['ResFormer']['tokens_saved']
    larger = write_sizes(tmp_path, {'resformer': models['resformer']}, widths=(128,))
    assert draw.scaling_of([*runs, *larger], 10)['ResFormer']['tokens_saved'] == saved
    without = [run for run in runs if run != str(tmp_path / 'resformer_64')]
    model = draw.scaling_of([*without, *larger], 10)['ResFormer']
    assert model['tokens_saved'] is None
    assert 'there is no ResFormer of the size of the largest vanilla model' in model['why']


def test_a_saving_that_cannot_be_read_is_named():
    parameters, tokens = {'parameters_saved': 0.1}, {'tokens_saved': 0.6}
    none = {'parameters_saved': None, 'tokens_saved': None}
    for model, expected in (
        ({**parameters, **tokens, 'why': ''}, ['parameters saved: 10.0%', 'tokens saved: 60.0%']),
        (
            {**none, **tokens, 'why': 'no law'},
            ['tokens saved: 60.0%', 'no saving of parameters can be read: no law'],
        ),
        ({**none, 'why': 'x'}, ['no saving of parameters or tokens can be read: x']),
        ({}, []),  # vanilla
    ):
        assert draw.savings_in_words(model) == expected


def test_noise_that_touches_a_loss_before_the_run_has_reached_it_saves_nothing(tmp_path):
    """Against itself, each kept run of vanilla saves less than 0.5% of its tokens."""
    for seed in range(1, 6):
        run = ROOT / 'results' / 'claims' / 'main' / f'vanilla_lr0.006_seed{seed}'
        assert losses.tokens_saved(run, run, 50) < 0.005

    falling = np.linspace(4, 3, 100) + 0.1 * np.random.default_rng(0).normal(size=100)
    faster = falling - 0.2
    base = write_run(tmp_path / 'base', falling.tolist())
    run = write_run(tmp_path / 'run', faster.tolist())
    target = falling[-10:].mean()
    needed = 100
    while faster[needed - 10 : needed].mean() <= target:
        needed -= 1
    assert losses.tokens_saved(base, run, 10) == pytest.approx(1 - (needed + 1) / 100)
    assert losses.tokens_saved(run, base, 10) is None


def test_two_wirings_of_one_name_are_not_fitted_together(tmp_path):
    def law(n):
        return falling_to(9 * n**-0.1)

    models = {'resformer': (dict(v_residual=True), law)}
    models['learned'] = dict(v_residual=True, residual_learned=True), law
    with pytest.raises(ValueError, match='are both ResFormer, but differ in their wiring'):
        draw.scaling_of(write_sizes(tmp_path, models), 10)


def test_the_loss_of_a_size_is_that_of_a_finished_run(tmp_path):
    def law(n):
        return falling_to(9 * n**-0.1)

    runs = write_sizes(tmp_path, {'vanilla': ({}, law)})
    assert draw.scaling_of(runs, 10)['vanilla']['loss']
    log = Path(runs[1], 'log.jsonl')
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(''.join(lines[:61]))
    with pytest.raises(ValueError, match='vanilla_32 is unfinished: step 60 of 100'):
        draw.scaling_of(runs, 10)


def test_a_window_is_of_steps_also_where_not_every_step_was_logged(tmp_path):
    folders = []
    for name, loss in (('base', 3.0), ('run', 2.0)):
        folder = write_run(tmp_path / name, [loss] * 40)
        entries = [{'step': step, 'loss': loss - 0.01 * step} for step in range(0, 400, 10)]
        if name == 'base':
            entries = [{**entry, 'loss': 3.0} for entry in entries]
        write_log(folder, entries)
        folders.append(folder)
    # The last 50 steps have five logged ones: 350, 360, ..., 390.
    expected = np.mean([2.0 - 0.01 * step - 3.0 for step in range(350, 400, 10)])
    assert losses.final_difference(*folders, 50) == pytest.approx(expected)
    assert losses.last_loss(folders[1], 50) == pytest.approx(expected + 3)
    steps, values = losses.relative(*folders, 50)
    assert steps[0] == 40 and values[-1] == pytest.approx(expected)
    expected = np.mean([2.0 - 0.01 * step - 3.0 for step in range(0, 40, 10)])
    assert losses.early_difference(*folders) == pytest.approx(expected)

    for folder in folders:
        write_log(folder, [{'step': step, 'loss': 3.0} for step in range(0, 400, 100)])
    with pytest.raises(ValueError, match='1 steps of their first tenth'):
        losses.early_difference(*folders)


def test_no_power_law_is_drawn_where_the_loss_does_not_fall_with_size(tmp_path):
    models = {
        'vanilla': ({}, lambda n: falling_to(2 * n**0.01)),
        'resformer': (dict(v_residual=True), lambda n: falling_to(9 * n**-0.1)),
    }
    models = draw.scaling_of(write_sizes(tmp_path, models), 10)
    assert 'power_law' not in models['vanilla'] and 'power_law' in models['ResFormer']
    assert models['vanilla']['no_law'] == 'loss does not fall with size'
    _, axes = draw.pyplot().subplots()
    draw.scaling_axes(axes, models, 10)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts[0] == 'vanilla: no power law,\nloss does not fall with size'
    # Fitted curves have fifty points, the runs three.
    fitted = [line.get_color() for line in axes.lines if len(line.get_xdata()) > 3]
    assert fitted == [draw.COLORS['ResFormer']]


@pytest.mark.parametrize('widths, reason', [((16,), 'fewer than 3 sizes'), ((16, 32), 'fewer')])
def test_one_or_two_sizes_are_drawn_without_a_fit(tmp_path, recwarn, widths, reason):
    models = {
        'a': ({}, lambda n: falling_to(9 * n**-0.1)),
        'b': ({}, lambda n: falling_to(9 * n**-0.1)),
        'c': (dict(v_residual=True), lambda n: falling_to(8 * n**-0.1)),
    }
    models = draw.scaling_of(write_sizes(tmp_path, models, widths), 2)
    assert len(models['vanilla']['loss']) == 2 * len(widths)
    assert 'power_law' not in models['vanilla'] and models['vanilla']['no_law'].startswith(reason)
    assert models['ResFormer']['parameters_saved'] is None
    _, axes = draw.pyplot().subplots()
    draw.scaling_axes(axes, models, 2)
    assert not recwarn.list and len(axes.lines) == 2


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


@pytest.mark.parametrize('part, letter', [('queries', 'q'), ('keys', 'k')])
def test_models_that_change_queries_or_keys_alone_have_the_color_of_that_part(part, letter):
    for field in (f'{letter}_residual', f'share_{letter}'):
        assert draw.color_of(GPTConfig(**{field: True})) == draw.COLORS[part]
    by_twos = {f'share_{letter}': True, f'share_{letter}_every': 2}
    assert draw.color_of(GPTConfig(**by_twos)) == draw.COLORS[part]
    assert draw.color_of(GPTConfig(q_residual=True, share_k=True)) == draw.COLORS['other']


@pytest.mark.parametrize(
    'wiring', [{}, dict(v_residual=True), dict(share_v=True), dict(share_k=True)]
)
def test_a_field_that_a_fork_added_is_never_taken_for_a_model_of_the_paper(wiring):
    plain, gated = Forked(**wiring), Forked(**wiring, residual_gate='head')
    assert draw.model_name(plain) == draw.model_name(GPTConfig(**wiring))
    assert 'residual_gate=head' in draw.model_name(gated)
    assert draw.color_of(gated) == draw.COLORS['other'] != draw.color_of(plain)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'kind, config, message',
    [
        ('relative', '[]', 'b/config.json holds no settings'),
        ('relative', '{', 'b/config.json: not JSON'),
        ('scaling', None, 'a/config.json'),
        ('critical', None, 'b/config.json'),
        ('critical', '{}', 'say block_size'),
        ('critical', '{"block_size": 8}', 'say gradient_accumulation_steps'),
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
        (['out/vanilla', 'out/resformer', '--window=99'], 'fewer than the 99'),
        (['out/vanilla', 'out/resformer', '--window=0'], 'window=0'),
        (['out/vanilla'], 'needs a baseline and at least one other run'),
        (['out/vanilla', 'out/resformer', '--layers=-1'], 'layers=-1'),
    ],
)
def test_draw_refuses_bad_input_in_one_line(trained, arguments, message):
    status, _, err = program(draw.main, 'relative', *arguments)
    assert_one_line(status, message)
    assert 'Traceback' not in err


@pytest.mark.parametrize(
    'word, message',
    [
        (
            'out/no_such_run',
            'out/no_such_run is neither the folder of a run nor a model of config/',
        ),
        ('resformer+residual_from', 'residual_from has no value; give it as residual_from=VALUE'),
    ],
)
def test_a_word_that_is_no_model_is_refused(word, message):
    status, *_ = program(draw.main, 'wiring', word)
    assert_one_line(status, message)


def test_the_picture_that_the_program_names_is_the_one_it_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, written in (('plain', 'plain.png'), ('drawing.svg', 'drawing.svg')):
        _, out, _ = program(draw.main, 'wiring', 'vanilla', '--layers=2', f'--out={name}')
        assert f'wrote {written}\n' in out and Path(written).exists()


def test_an_unknown_drawing_is_answered_with_the_usage_and_exit_status_2():
    status, out, _ = program(draw.main, 'pie', 'out/vanilla')
    assert status == 2
    for kind in draw.DRAWINGS:
        assert f'python -m paper.draw {kind} ' in out
