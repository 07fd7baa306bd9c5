"""reproduce.py's table of runs, and the figures of plot.py that it draws."""
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, write_dataset
from runs import finish, load, log, start
from test_tools import program

import analyze
import plot
import reproduce
from configurator import configure
from model import GPTConfig
from reproduce import CLAIMS, FIGURES, SCALES, Run
from train import Machine, TrainConfig

CPU = Machine(TrainConfig(device='cpu', compile=False))
EVERY = list(dict.fromkeys(run for figure in FIGURES.values() for run in reproduce.needed(figure)))


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    yield
    plot.pyplot().close('all')


def write_run(folder, losses, val=None, **config):
    """A finished run as train.py leaves it, with a training loss per step."""
    folder.mkdir(parents=True)
    lines = [{'step': step, 'loss': loss} for step, loss in enumerate(losses)]
    lines.append({'step': len(losses), 'val': {'Domain': val or losses[-1], 'mean': val or losses[-1]}})
    (folder / 'log.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    (folder / 'config.json').write_text(json.dumps(config))
    return folder


def write_finished(run, losses, scale='tiny', top='out', val=None):
    """In the folder where reproduce.py looks for it, with the settings that it asks for."""
    return write_run(Path(top, scale, run.name(SCALES[scale])), losses, val=val,
                     **reproduce.as_json(*reproduce.configured(run, scale)))


def test_every_figure_and_table_of_the_paper_is_there():
    assert list(FIGURES) == ['table1', 'table5', 'fig1', *(f'fig{n}' for n in range(3, 12)),
                             *(f'fig12{part}' for part in 'abcd'), 'fig13', 'fig14', 'fig15']


@pytest.mark.parametrize('scale', ['paper', 'small', 'tiny'])
def test_every_run_of_every_scale_is_one_that_train_accepts(scale):
    names = {}
    for run in EVERY:
        settings, config = configure(TrainConfig, GPTConfig, argv=[
            f'--{name}={value}' for name, value in run.settings(scale).items()])
        tokens = settings.rows_per_step * config.block_size
        assert 0.97 < tokens / SCALES[scale].tokens <= 1, run  # constant tokens a step
        names.setdefault(run.name(SCALES[scale]), set()).add(f'{settings} {config}')
    told_apart = [setting for found in names.values() for setting in found]
    assert len(names) == len(told_apart) == len(set(told_apart))  # one folder for one set of settings, and the reverse


@pytest.mark.parametrize('index, length, batch, rows', [
    (1, 512, 128, 4096), (2, 2048, 32, 1024), (3, 8192, 8, 256), (4, 32000, 2, 64), (5, 64000, 1, 32)])
def test_the_papers_batches_are_table_3s(index, length, batch, rows):
    values = Run('svformer', length=index).settings('paper')
    assert (values['block_size'], values['batch_size'], values['gradient_accumulation_steps']) == (length, batch, 32)
    assert values['batch_size'] * 32 == rows and values['share_v'] is True


def test_a_variants_wiring_is_its_config_files_and_its_flags_come_on_top():
    assert Run('neutreno').settings('tiny')['neutreno'] == 0.4
    assert Run('gpt2+v_residual=True').settings('tiny') | {'arch': 'gpt2', 'v_residual': 'True'} == Run(
        'gpt2+v_residual=True').settings('tiny')
    values = Run('vanilla', '468m', rate=2, warmup=1).settings('paper')
    assert (values['n_layer'], values['n_head'], values['n_embd']) == (24, 16, 1024)
    assert (values['learning_rate'], values['min_lr'], values['warmup_iters']) == (1e-4, 1e-5, 1200)


def test_only_a_run_with_its_last_evaluation_is_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = reproduce.ReproduceConfig()
    assert not reproduce.finished(Run(), settings)
    write_finished(Run(), [3.0] * 60)
    assert not reproduce.finished(Run(), settings)  # 60 of 120 steps
    path = write_finished(Run('resformer'), [3.0] * 120) / 'log.jsonl'
    assert reproduce.finished(Run('resformer'), settings)
    path.write_text(path.read_text()[:-20])  # cut by a crash
    assert not reproduce.finished(Run('resformer'), settings)
    path.write_text('[1]')
    assert not reproduce.finished(Run('resformer'), settings)


@pytest.mark.parametrize('name, value', [
    ('learning_rate', 1e-3), ('dataset', 'mine'), ('n_layer', 2), ('max_iters', 9)])
def test_a_run_of_other_settings_is_neither_reused_nor_overwritten(tmp_path, monkeypatch, name, value):
    monkeypatch.chdir(tmp_path)
    settings, (tiny, size) = reproduce.ReproduceConfig(), (SCALES['tiny'], SCALES['tiny'].sizes['82m'])
    path = write_finished(Run(), [3.0] * 120)
    config = json.loads((path / 'config.json').read_text())
    for free in (dict(device='cuda', compile=True, dtype='float16', out_dir='x'), dict(config)):
        (path / 'config.json').write_text(json.dumps({**config, **free}))
        assert reproduce.finished(Run(), settings)
    monkeypatch.setitem(size if name == 'n_layer' else tiny.settings, name, value)
    assert not reproduce.finished(Run(), settings)
    monkeypatch.setattr('sys.argv', ['reproduce.py', 'fig3', '--device=cpu'])
    monkeypatch.setattr(reproduce, 'train', lambda *_: pytest.fail('it would be overwritten'))
    with pytest.raises(SystemExit, match=f'error: out/tiny/vanilla is a run with {name}=.*, not {value!r}'):
        reproduce.main()


def test_an_interrupted_training_is_saved_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / 'data/stdlib', {'train': {'A': 20000}, 'validation': {'A': 2000}}, n_vocab=257)
    run, saved = Path('out/tiny/vanilla'), 0
    for interrupt in (lambda process: process.terminate(),  # it alone; Ctrl-C reaches its trainings, too
                      lambda process: os.killpg(process.pid, signal.SIGINT)):
        process, deadline = start(ROOT / 'reproduce.py', 'fig3', '--device=cpu'), time.time() + 120
        while not (run / 'log.jsonl').exists() or (run / 'log.jsonl').read_text().count('"loss"') < saved + 2:
            assert time.time() < deadline and process.poll() is None
            time.sleep(0.1)
        interrupt(process)
        status, _, err = finish(process)
        assert status == 75 and len(err.splitlines()) == 1 and 'same command' in err
        before, saved = saved, load(run / 'ckpt.pt')['step']
        assert saved > before and [entry['step'] for entry in log(run) if 'loss' in entry] == list(range(saved))
        assert 'interrupted, and saved' in (run / 'train.log').read_text()


def test_a_training_that_fails_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / 'data/stdlib', {'train': {'A': 2000}, 'validation': {'A': 2000}}, n_vocab=257)
    done = program('reproduce.py', 'fig3', '--device=cpu', cwd=tmp_path)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and 'prepare more' in done.stderr


def test_a_figure_that_fails_keeps_no_other_from_being_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn = []

    def draw(name, *_):
        if name in ('table1', 'fig9'):
            raise OSError('no data')
        drawn.append(name)
    monkeypatch.setattr(reproduce, 'reproduce', draw)
    monkeypatch.setattr(reproduce, 'finished', lambda *_: True)
    monkeypatch.setattr('sys.argv', ['reproduce.py', 'all', '--device=cpu'])
    with pytest.raises(SystemExit, match='error: not drawn: table1: no data; fig9: no data'):
        reproduce.main()
    assert drawn == [name for name in FIGURES if name not in ('table1', 'fig9')]


def test_bars_are_mean_differences_of_the_last_steps(tmp_path):
    rng = np.random.default_rng(0)
    base, other = rng.normal(3, 0.1, 40), rng.normal(2.9, 0.1, 40)
    a, b = write_run(tmp_path / 'a', base.tolist()), write_run(tmp_path / 'b', other.tolist())
    mean, error = plot.final_differences(a, [b], 10)[b]
    d = (other - base)[-10:]
    assert mean == pytest.approx(d.mean()) and error == pytest.approx(np.std(d, ddof=1) / 10 ** 0.5)
    with pytest.raises(ValueError, match='fewer than --window=41'):
        plot.final_differences(a, [b], 41)


def test_the_power_law_is_recovered():
    n = np.array([1e6, 1e7, 1e8])
    assert plot.power_law(n, 12 * n ** -0.07) == pytest.approx((12, 0.07))


def test_savings_at_equal_loss(tmp_path):
    """ResFormer's loss is vanilla's at 20% more parameters, and is ahead in time by a quarter of the steps."""
    shape = dict(n_head=2, vocab_size=64, block_size=8)
    law, runs, sizes = (9.0, 0.1), [], (16, 32, 64)
    for n_embd in sizes:
        config = dict(shape, n_embd=n_embd, n_layer=2)
        for model, wiring, factor in (('vanilla', {}, 1.0), ('resformer', dict(v_residual=True), 1.2)):
            folder = tmp_path / f'{model}_{n_embd}'
            folder.mkdir()
            (folder / 'config.json').write_text(json.dumps({**config, **wiring}))
            last = law[0] * (factor * plot.parameters_of(folder)) ** -law[1]
            (folder / 'log.jsonl').write_text(''.join(
                json.dumps({'step': s, 'loss': last + max(0, 75 - s - 25 * (factor == 1))}) + '\n' for s in range(100)))
            runs.append(folder)
    _, axes = plot.pyplot().subplots()
    found = plot.scaling_axes(axes, [str(run) for run in runs], 10)
    assert found['Transformer']['power_law'] == pytest.approx(law)
    assert found['ResFormer']['parameters_saved'] == pytest.approx(1 - 1 / 1.2) and not found['ResFormer']['why']
    assert axes.get_legend().get_texts()[0].get_text() == 'Transformer: 9 $N^{-0.1}$'
    assert plot.tokens_saved(runs[0], runs[0], 10) == pytest.approx(1 - 60 / 100)  # its own last loss, from step 50 on


@pytest.mark.parametrize('vanilla, resformer, why, line', [
    ([3.0, 3.1], [2.9, 2.7], "Transformer's loss does not fall with size here",
     "n/a of the parameters (paper: 13-16%) and n/a of the tokens (paper: 15-20%): undecided, Transformer's loss does"),
    ([3.0, 2.9], [2.5, 2.6], "ResFormer's loss does not fall with size here", 'n/a of the tokens'),
    ([3.0, 2.9], [2.8, 2.7], 'ResFormer reaches that loss outside the range of the fit', '80% of the tokens'),
    ([3.0, 2.7], [3.1, 2.8], 'ResFormer reaches that loss outside the range of the fit; the largest ResFormer '
     'does not reach that loss', 'n/a of the tokens'),
    ([3.0, 2.8], [2.9, 2.7], '', 'saves 30% of the parameters (paper: 13-16%) and 80% of the tokens')])
def test_no_saving_is_read_where_it_cannot_be(tmp_path, vanilla, resformer, why, line):
    found, n = {}, (1e6, 2e6)
    for name, losses in (('Transformer', vanilla), ('ResFormer', resformer)):
        folders = [write_run(tmp_path / f'{name}{i}', [loss] * 50) for i, loss in enumerate(losses)]
        found[name] = {'parameters': n, 'loss': losses, 'runs': folders, 'power_law': plot.power_law(n, losses)}
    saved = plot.savings(found, 'ResFormer', 10)
    assert saved['why'] == why
    text, = reproduce.compare('fig1', reproduce.Figure('', []), {'panels': [
        {'how': 'scaling', 'numbers': {'ResFormer': saved}}]}, reproduce.ReproduceConfig())
    assert line in text and ('undecided' in text) == bool(why)
    assert (saved['parameters_saved'] is None) == bool(why)
    assert (saved['tokens_saved'] is None) == ('n/a of the tokens' in text)


def test_one_size_is_drawn_without_a_fit(tmp_path, recwarn):
    shape = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=8)
    runs = [write_run(tmp_path / name, [3.0] * 9, **shape, **wiring) for name, wiring in (
        ('a', {}), ('b', {}), ('c', dict(v_residual=True)))]
    _, axes = plot.pyplot().subplots()
    found = plot.scaling_axes(axes, runs, 2)
    assert len(found['Transformer']['loss']) == 2 and 'power_law' not in found['Transformer'] and not recwarn.list
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ['Transformer', 'ResFormer']


def test_an_early_lead_is_in_the_picture(tmp_path):
    """A tenth of 4,000 steps holds it; only the outermost of the first steps may lie outside."""
    steps = np.arange(4000)
    lead = -0.12 * np.exp(-((steps - 200) / 80) ** 2) - 0.01 + (steps < 30)
    base = write_run(tmp_path / 'base', [5.0] * 4000)
    run = write_run(tmp_path / 'run', (5 + lead).tolist())
    _, axes = plot.pyplot().subplots()
    plot.relative_axes(axes, base, [run], 1)
    low, high = axes.get_ylim()
    assert low < lead.min() and high < 0.5


@pytest.mark.parametrize('difference, expected', [
    (lambda s: s - 30.5, (31, True)), (lambda s: -1 + 0 * s, (None, False)), (lambda s: 1 + 0 * s, (None, False)),
    (lambda s: np.select([s < 2, s < 40, s < 95], [0.1, -1, 0.5], -1), (40, True)),  # a dip at the end
    (lambda s: np.where((s > 40) & (s < 45), 1, (s - 150) / 100), (150, False)),  # and a peak on the way
    (lambda s: (s - 150) / 100, (150, False)), (lambda s: -s, (None, False))])
def test_the_critical_step_is_where_a_run_loses_its_lead_or_will(tmp_path, difference, expected):
    steps = np.arange(100)
    base = write_run(tmp_path / 'base', [5.0] * 100)
    run = write_run(tmp_path / 'run', (5 + difference(steps)).tolist())
    step, crossed = plot.critical_step(base, run, 1)
    assert crossed == expected[1] and (step is None) == (expected[0] is None)
    assert step is None or step == pytest.approx(expected[0], rel=0.05 * (not crossed))


def test_lengths_without_a_crossing_are_named_and_two_points_are_not_fitted(tmp_path):
    steps, pairs = np.arange(100), []
    for length, middle in ((64, None), (128, 20), (256, 40), (512, 60)):
        rise = steps * 0 - 1 if middle is None else steps - middle - 0.5
        pairs.append((write_run(tmp_path / f'v{length}', [5.0] * 100, block_size=length),
                      write_run(tmp_path / f's{length}', (5 + rise).tolist(), block_size=length, share_v=True)))
    for some, curves in ((pairs[:3], 0), (pairs, 1)):
        _, axes = plot.pyplot().subplots()
        found = plot.critical_axes(axes, some, 1)
        assert [f['step'] for f in found] == [None, 21, 41, 61][:len(some)]
        assert axes.get_title() == 'no sign of crossing: 64'
        assert sum(line.get_linestyle() == '--' for line in axes.lines) == curves


def test_a_bar_looks_as_its_curve_and_no_late_point_is_cut(tmp_path):
    runs = [write_run(tmp_path / name, np.linspace(4, last, 50).tolist(), **config) for name, last, config in (
        ('vanilla', 3, {}), ('q', 2.9, dict(q_residual=True)), ('k', 3.4, dict(k_residual=True)))]
    _, (left, right) = plot.pyplot().subplots(1, 2)
    curves = plot.relative_axes(left, runs[0], runs[1:], 5)
    plot.bars_axes(right, runs[0], runs[1:], 5)
    looks = [(bar.get_facecolor()[:3], bool(bar.get_hatch())) for bar in right.patches]
    assert looks == [(plot.pyplot().matplotlib.colors.to_rgb(line.get_color()), line.get_linestyle() != '-')
                     for line in left.lines[1:]] and len(set(looks)) == 2
    low, high = left.get_ylim()
    assert all(low < d[len(d) // 10:].min() and d.max() < high for _, d in curves.values())


def test_the_comparison_states_sign_and_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, loss in (('vanilla', 3.0), ('resformer', 2.9), ('vanilla+q_residual', 3.1), ('vanilla+k_residual', 2.8)):
        write_run(tmp_path / 'out/tiny' / name, [loss] * 120)
    lines = reproduce.compare('fig6', FIGURES['fig6'], {'panels': []}, reproduce.ReproduceConfig())
    assert [line.rpartition(' ')[2] for line in lines] == ['agrees', 'agrees', 'disagrees']
    assert 'resformer minus vanilla: -0.1000 ± 0.0000 over these steps of one seed, not over seeds' in lines[0]
    assert 'below 0 in the paper' in lines[0]


@pytest.mark.parametrize('scatter, verdict', [(0.01, 'agrees'), (1.0, 'undecided')])
def test_a_difference_within_two_standard_errors_is_undecided(tmp_path, monkeypatch, scatter, verdict):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / 'out/tiny/gpt2', [3.0] * 120)
    write_run(tmp_path / 'out/tiny/gpt2+v_residual', [2.95 + scatter * (-1) ** step for step in range(120)])
    line, = reproduce.compare('fig12d', FIGURES['fig12d'], {'panels': []}, reproduce.ReproduceConfig())
    assert line.endswith(f'(below 0 in the paper): {verdict}')


def test_tables_and_entropies_are_compared_with_the_paper():
    settings, V, R = reproduce.ReproduceConfig(), 'out/tiny/vanilla', 'out/tiny/resformer'
    tasks = {V: {'average': 0.3, 'average_stderr': 0.03}, R: {'average': 0.4, 'average_stderr': 0.04}}
    losses = {V: {}, R: {'minus_first': {'mean': {'loss': -0.1, 'standard_error': 0.01}}},
              f'{V}_2m': {}, f'{R}_2m': {'minus_first': {'mean': {'loss': 0.1, 'standard_error': None}}}}
    entropy = {run: {'series': {'entropy': {'mean': [9, 9, value, value], 'standard_error': [9, 9, 0.3, 0.3]}}}
               for run, value in ((V, 3.0), (R, 5.0))}
    lines = [line for name, how, found in (('table1', 'tasks', {'runs': tasks}), ('table5', 'loss', {'runs': losses}),
                                           ('fig1', 'entropy', entropy))
             for line in reproduce.compare(name, FIGURES[name], {'panels': [{'how': how, 'numbers': found}]}, settings)]
    expected = [('accuracy, vanilla minus resformer: -0.1000 ± 0.0500 over items', 'agrees'),
                ('loss, resformer minus vanilla: -0.1000 ± 0.0100 over sequences', 'agrees'),
                ('loss, resformer_2m minus vanilla_2m: +0.1000 ± 0.0000', 'disagrees'),
                ('vanilla minus resformer: -2.0000 ± 0.4243 over sequences', 'agrees')]
    assert all(words in line and line.endswith(f': {end}') for line, (words, end) in zip(lines, expected, strict=True))


def test_claims_are_drawn_from_kept_logs_with_errors_over_seeds(tmp_path, monkeypatch):
    """The logs alone, in results/claims, are enough; every number follows from them."""
    monkeypatch.chdir(tmp_path)
    rng, losses = np.random.default_rng(1), {}
    for run in reproduce.needed(CLAIMS):
        losses[run] = 3 - 0.01 * len(run.model) + 0.01 * run.seed + rng.normal(0, 0.01, 1250)
        logged = losses[run].tolist()
        if run == Run('resformer', seed=2):
            logged[600] = None  # a step that was not finite
        write_finished(run, logged, 'claims', 'results', val=2 + 0.1 * run.seed)
    monkeypatch.setattr('sys.argv', ['reproduce.py', 'claims', '--device=cpu'])
    monkeypatch.setattr(reproduce, 'train', lambda *_: pytest.fail('nothing is to be trained'))
    reproduce.main()
    numbers = json.loads((tmp_path / 'results/claims/claims.json').read_text())['panels'][0]['numbers']
    assert (tmp_path / 'results/claims/claims.png').exists()
    for model in ('resformer', 'denseformer'):
        seeds = [losses[Run(model, seed=s)] - losses[Run(seed=s)] for s in (1, 2, 3)]
        for when, part in (('early', slice(0, 125)), ('final', slice(-50, None))):
            means = [d[part].mean() for d in seeds]
            assert numbers[model][when]['mean'] == pytest.approx(np.mean(means))
            assert numbers[model][when]['standard_error'] == pytest.approx(np.std(means, ddof=1) / 3 ** 0.5)
        assert numbers[model]['validation_loss']['mean'] == pytest.approx(2.2)
    assert numbers['vanilla']['final']['mean'] == 0
    kept = (tmp_path / 'results/claims/claims.json').read_bytes()
    later = {**reproduce.provenance(CPU), 'commit': 'a later one', 'date': 'today'}
    monkeypatch.setattr(reproduce, 'provenance', lambda machine: later)
    reproduce.main()
    assert (tmp_path / 'results/claims/claims.json').read_bytes() == kept  # the same numbers
    path = tmp_path / 'results/claims/vanilla_1/log.jsonl'
    path.write_text(path.read_text()[:-20])
    with pytest.raises(SystemExit, match='error: results/claims/vanilla_1 is not a whole run'):
        reproduce.main()


def test_a_figure_says_what_it_leaves_out_and_that_no_order_is_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(analyze, 'analyze', lambda *_: {'runs': {}})
    monkeypatch.setattr(analyze, 'draw', lambda *_: plot.pyplot().figure())
    reproduce.reproduce('fig3', reproduce.ReproduceConfig(), CPU)
    lines = capsys.readouterr().out.splitlines()
    assert any('left out' in line and 'analyze.py mapping --hf=FOLDER' in line for line in lines)
    assert lines[-1] == 'fig3: there is no order of the paper that is checked'


@pytest.mark.parametrize('arguments, message', [
    (['fig99'], 'fig99'), (['fig6', '--scale=huge'], 'scale'), (['fig6', '--jobs=0'], 'jobs'),
    (['claims', '--scale=paper'], 'scale'), (['--list', 'claims'], 'claims'), (['--list', '--tok_per_s=-5'], '-5'),
    (['fig6', '--scale=small', '--nonsense=1'], 'nonsense'), (['fig6', '--scale=paper'], 'data/slimpajama')])
def test_reproduce_refuses_bad_input_in_one_line(tmp_path, arguments, message):
    done = program('reproduce.py', *arguments, '--device=cpu', cwd=tmp_path)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_the_list_names_every_figure_and_times_only_from_a_given_throughput(tmp_path):
    done = program('reproduce.py', '--list', cwd=tmp_path)
    assert done.returncode == 0 and all(name in done.stdout for name in FIGURES) and ' n/a ' in done.stdout
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert ' task data ' in lines['table1'] and ' nothing ' in lines['fig6'] and '2 cores, tiny' in done.stdout
    for name in ('fig1', 'fig3', 'fig9', 'fig15'):
        assert ' outside weights* ' in lines[name]
    timed = program('reproduce.py', '--list', '--tok_per_s=1e6', cwd=tmp_path)
    # table1 is two runs of 82M: 10,000 steps of 2^21 tokens each at 1M tokens/s, and ResFormer's FLOPs are vanilla's
    assert ' 12 h ' in next(line for line in timed.stdout.splitlines() if line.startswith('table1'))


def test_a_figure_is_trained_drawn_and_compared(tmp_path, monkeypatch):
    """fig6 from nothing, at a scale of four steps; then again, reusing the runs."""
    (tmp_path / 'data').mkdir()
    tiny = SCALES['tiny']
    monkeypatch.setattr(tiny, 'settings', {**tiny.settings, 'max_iters': 4, 'eval_iters': 1, 'warmup_iters': 1})
    monkeypatch.setattr(tiny, 'window', 2)
    monkeypatch.setitem(tiny.sizes, '82m', dict(n_layer=2, n_head=2, n_embd=16))
    monkeypatch.chdir(tmp_path)
    source = tmp_path / 'texts'
    source.mkdir()
    for n in range(3):
        (source / f'{n}.txt').write_text('Some text to learn from, again and again. ' * 2000 + str(n))
    made = program('prepare_slimpajama.py', f'--source={source}', '--tokenizer=bytes', '--tokens=0',
                   '--val_fraction=0.3', '--out=data/stdlib', cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    monkeypatch.setattr('sys.argv', ['reproduce.py', 'fig6', '--device=cpu', '--jobs=2'])
    reproduce.main()
    numbers = json.loads((tmp_path / 'results/tiny/fig6.json').read_text())
    assert (tmp_path / 'results/tiny/fig6.png').exists() and len(numbers['against_the_paper']) == 3
    monkeypatch.setattr(reproduce, 'train', lambda *_: pytest.fail('a finished run is reused'))
    reproduce.main()
