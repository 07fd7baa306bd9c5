"""python -m paper.reproduce: its runs, its training, its figures; test_findings.py has what it says."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from conftest import ROOT, write_dataset
from programs import assert_one_line, program
from runs import finish, log, newest, read_config, start, write_run

from machine import Machine
from paper import analyze, figures, reproduce, runs
from paper.figures import FIGURES
from paper.runs import SCALES, Run

pytestmark = pytest.mark.usefixtures('figures_closed')

CPU = Machine('cpu')
TINY, PAPER = SCALES['tiny'], SCALES['paper']
EVERY = list(dict.fromkeys(run for figure in FIGURES.values() for run in figure.runs()))


def as_json(run, scale):
    """What config.json says of a run that train.py makes with these settings."""
    settings, config = runs.configs_of(run, scale)
    return json.loads(json.dumps({**vars(settings), **vars(config)}))


def write_finished(run, values, scale=TINY):
    """A run in the folder where it is looked for, with the settings that it is to have."""
    return write_run(runs.folder(run, scale), values, **as_json(run, scale))


# --- the tables of figures and of runs ------------------------------------------------------------


def test_every_figure_and_table_of_the_paper_is_there():
    names = ['table1', 'table5', *(f'fig{n}' for n in range(1, 12))]
    names += [*(f'fig12{part}' for part in 'abcd'), 'fig13', 'fig14', 'fig15']
    assert list(FIGURES) == names


def test_the_readme_has_the_table_of_the_figures_and_their_runs():
    text = (ROOT / 'paper' / 'README.md').read_text()
    assert figures.table() in text, 'put this into paper/README.md:\n' + figures.table()


@pytest.mark.parametrize('scale', SCALES.values(), ids=SCALES)
def test_every_run_of_every_scale_is_one_that_train_accepts(scale):
    names = {}
    for run in EVERY:
        settings, config = runs.configs_of(run, scale)
        tokens = settings.rows_per_step * config.block_size
        assert 0.97 < tokens / scale.tokens <= 1, run  # constant tokens a step
        names.setdefault(run.name(scale), set()).add(f'{settings} {config}')
    # One folder for one set of settings, and the reverse.
    told_apart = [setting for settings in names.values() for setting in settings]
    assert len(names) == len(told_apart) == len(set(told_apart))


@pytest.mark.parametrize(
    'length, batch, rows',
    [(512, 128, 4096), (2048, 32, 1024), (8192, 8, 256), (32000, 2, 64), (64000, 1, 32)],
)
def test_the_papers_batches_are_table_3s(length, batch, rows):
    values = Run('svformer', length=length).settings(PAPER)
    assert (values['block_size'], values['batch_size']) == (length, batch)
    assert values['gradient_accumulation_steps'] == 32
    assert values['batch_size'] * 32 == rows and values['share_v'] is True


def test_a_variants_wiring_is_its_config_files_and_its_flags_come_on_top():
    assert Run('neutreno').settings(TINY)['neutreno'] == 0.4
    values = Run('gpt2+v_residual=True').settings(TINY)
    assert (values['arch'], values['v_residual']) == ('gpt2', 'True')
    values = Run('vanilla', '468m', rate=2, warmup=1).settings(PAPER)
    assert (values['n_layer'], values['n_head'], values['n_embd']) == (24, 16, 1024)
    assert (values['learning_rate'], values['min_lr']) == (1e-4, 1e-5)
    assert values['warmup_iters'] == 1200


# --- which runs are trained -----------------------------------------------------------------------


def test_only_a_run_with_its_last_evaluation_is_finished(here):
    assert not runs.is_finished(Run(), TINY)
    write_finished(Run(), [3.0] * 60)
    assert not runs.is_finished(Run(), TINY)  # 60 of 120 steps
    resformer = Run('resformer')
    path = write_finished(resformer, [3.0] * 120) / 'log.jsonl'
    assert runs.is_finished(resformer, TINY)
    path.write_text(path.read_text()[:-20])  # cut by a crash
    assert not runs.is_finished(resformer, TINY)
    path.write_text('[1]')
    assert not runs.is_finished(resformer, TINY)


@pytest.mark.parametrize(
    'name, value',
    [('learning_rate', 1e-3), ('dataset', 'mine'), ('n_layer', 2), ('max_iters', 9)],
)
def test_a_run_of_other_settings_is_neither_reused_nor_overwritten(here, monkeypatch, name, value):
    path = write_finished(Run(), [3.0] * 120) / 'config.json'
    config = json.loads(path.read_text())
    incidental = dict(device='cuda', compile=True, dtype='float16', out_dir='x', log_interval=5)
    for changes in (incidental, {}):
        path.write_text(json.dumps({**config, **changes}))
        assert runs.is_finished(Run(), TINY)
    monkeypatch.setitem(TINY.sizes['82m'] if name == 'n_layer' else TINY.settings, name, value)
    assert not runs.is_finished(Run(), TINY)
    monkeypatch.setattr(runs, 'train', lambda *_: pytest.fail('it would be overwritten'))
    status, _, _ = program(reproduce.main, 'fig3', '--device=cpu')
    assert_one_line(status, f'out/tiny/vanilla is a run with {name}=', f', not {value!r}')


def test_an_interrupted_training_is_saved_and_goes_on(here):
    splits = {'train': {'A': 20000}, 'validation': {'A': 2000}}
    write_dataset(here / 'data/stdlib', splits, n_vocab=257)
    run, saved = Path('out/tiny/vanilla'), 0

    def it_alone(process):
        process.terminate()

    def all_of_it(process):  # as Ctrl-C in a terminal
        os.killpg(process.pid, signal.SIGINT)

    for interrupt in (it_alone, all_of_it):
        words = ['-m', 'paper.reproduce', 'fig3', '--device=cpu']
        process = start(*words, PYTHONPATH=str(ROOT))
        while steps_logged(run) < saved + 2:
            assert process.poll() is None
            time.sleep(0.1)
        interrupt(process)
        status, _, err = finish(process)
        assert status == 75 and len(err.splitlines()) == 1 and 'same command' in err, err
        before, saved = saved, newest(run)['step']
        steps = [entry['step'] for entry in log(run) if 'loss' in entry]
        assert saved > before and steps == list(range(saved))
        assert '; the run is saved' in (run / 'train.log').read_text()


def steps_logged(run):
    path = run / 'log.jsonl'
    return path.read_text().count('"loss"') if path.exists() else 0


def test_the_standard_library_is_prepared_once(here, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        write_dataset(here / 'data/stdlib', {'train': {'A': 20}, 'validation': {'A': 20}})

    monkeypatch.setattr(runs.subprocess, 'run', run)
    for _ in range(2):
        runs.prepare(TINY)
    ((_, script, *words),) = commands
    assert Path(script) == ROOT / 'prepare_slimpajama.py' and Path(script).exists()
    assert '--source=stdlib' in words and '--out=data/stdlib' in words


def test_a_preparation_that_fails_is_one_line(here, monkeypatch):
    command = [runs.sys.executable, '-c', 'raise SystemExit(3)']
    run = runs.subprocess.run
    monkeypatch.setattr(runs.subprocess, 'run', lambda _, **options: run(command, **options))
    monkeypatch.setattr(runs, 'train', lambda *_: pytest.fail('there is nothing to train on'))
    status, _, _ = program(reproduce.main, 'fig3', '--device=cpu')
    assert_one_line(status, 'data/stdlib could not be prepared', 'exit status 3')


def test_a_training_that_fails_is_one_line(here):
    splits = {'train': {'A': 2000}, 'validation': {'A': 2000}}
    write_dataset(here / 'data/stdlib', splits, n_vocab=257)
    status, _, err = program(reproduce.main, 'fig9', '--device=cpu')
    assert_one_line(status, 'prepare more', 'out/tiny/vanilla', 'out/tiny/resformer', 'train.log')
    assert not err


# --- figures --------------------------------------------------------------------------------------


def test_a_figure_that_fails_keeps_no_other_from_being_drawn(here, monkeypatch):
    drawn = []

    def draw(name, *_):
        if name in ('table1', 'fig9'):
            raise OSError('no data')
        drawn.append(name)

    monkeypatch.setattr(reproduce, 'reproduce', draw)
    monkeypatch.setattr(runs, 'is_finished', lambda *_: True)
    status, _, _ = program(reproduce.main, 'all', '--device=cpu')
    assert_one_line(status, 'error: not drawn: table1: no data; fig9: no data')
    assert drawn == [name for name in FIGURES if name not in ('table1', 'fig9')]


def test_the_same_numbers_keep_the_commit_and_date_that_they_came_from(here, monkeypatch):
    for i, run in enumerate(FIGURES['fig6'].runs()):
        write_finished(run, [3.0 - 0.1 * i] * 120)
    monkeypatch.setattr(runs, 'train', lambda *_: pytest.fail('nothing is to be trained'))
    assert program(reproduce.main, 'fig6', '--device=cpu')[0] == 0
    path = here / 'results/tiny/fig6.json'
    assert path.with_suffix('.png').exists()
    before = path.read_bytes()

    later = {**reproduce.provenance(CPU), 'commit': 'a later one', 'date': 'today', 'load': 99}
    monkeypatch.setattr(reproduce, 'provenance', lambda machine: later)
    assert program(reproduce.main, 'fig6', '--device=cpu')[0] == 0
    assert path.read_bytes() == before

    write_finished_again(Run('resformer'), [2.0] * 120)
    assert program(reproduce.main, 'fig6', '--device=cpu')[0] == 0
    assert json.loads(path.read_text())['commit'] == 'a later one'


def write_finished_again(run, values):
    folder = runs.folder(run, TINY)
    write_run(folder, values, **read_config(folder))


def test_a_figure_says_what_it_leaves_out_and_that_no_claim_is_checked(here, monkeypatch, capsys):
    monkeypatch.setattr(analyze, 'analyze', lambda *_: {'runs': {}})
    monkeypatch.setattr(reproduce, 'draw_figure', lambda *_: None)
    monkeypatch.setattr(reproduce, 'against_the_paper', lambda *_: [])
    reproduce.reproduce('fig3', reproduce.ReproduceConfig(), CPU)
    lines = capsys.readouterr().out.splitlines()
    command = 'python -m paper.analyze mapping --hf=FOLDER'
    assert any('left out' in line and command in line for line in lines)
    assert lines[-1] == 'fig3: there is no claim of the paper that is checked'


LOSS = {'mean': {'loss': 2.75}}
RUNS_OF_TABLE_5 = {str(runs.folder(run, TINY)): dict(LOSS) for run in FIGURES['table5'].runs()}


def test_table_5_is_written_beside_the_papers_numbers(here, monkeypatch, capsys):
    def compare_losses(pair, settings, machine):
        vanilla, resformer = pair
        minus = {'mean': {'loss': -0.1, 'standard_error': 0.01}}
        reports = {vanilla: LOSS, resformer: LOSS | {'minus_first': minus}}
        return {'date': 'today', 'runs': reports}

    monkeypatch.setattr(reproduce.evaluate, 'compare_losses', compare_losses)
    monkeypatch.setattr(reproduce.evaluate, 'print_losses', lambda numbers: None)
    reproduce.reproduce('table5', reproduce.ReproduceConfig(), CPU)
    rows = (here / 'results/tiny/table5.md').read_text().splitlines()
    assert '| vanilla | 2.7500 |  | 2.7389 |' in rows
    assert '| resformer_468m | 2.7500 | -0.1000 ± 0.0100 | 2.2537 |' in rows
    assert '| vanilla_2m | 2.7500 |  |  |' in rows  # which the paper does not print
    numbers = json.loads((here / 'results/tiny/table5.json').read_text())
    assert list(numbers['panels'][0]['numbers']) == ['runs']
    assert len(numbers['against_the_paper']) == 3


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['fig99'], 'fig99'),
        (['fig6', '--scale=huge'], 'scale'),
        (['fig6', '--jobs=0'], 'jobs'),
        (['all', 'fig6'], "'all'"),
        (['list', 'fig99'], 'fig99'),
        (['list', '--tok_per_s=-5'], '-5'),
        (['redraw', 'fig6'], 'results/tiny/fig6.json'),
        (['fig6', '--scale=small', '--nonsense=1'], 'nonsense'),
        (['fig6', '--scale=paper'], 'data/slimpajama'),
    ],
)
def test_reproduce_refuses_bad_input_in_one_line(here, arguments, message):
    status, _, err = program(reproduce.main, *arguments, '--device=cpu')
    assert_one_line(status, message)
    assert not err


def test_a_damaged_file_of_numbers_is_named(here):
    path = here / 'results/tiny/fig6.json'
    path.parent.mkdir(parents=True)
    path.write_text('{"panels": ')
    status, *_ = program(reproduce.main, 'redraw', 'fig6')
    assert_one_line(status, 'results/tiny/fig6.json is damaged')


def test_without_a_figure_the_usage_is_printed_with_exit_status_2(here):
    status, out, _ = program(reproduce.main)
    assert status == 2 and 'python -m paper.reproduce list' in out


def test_the_list_names_every_figure_and_times_only_from_a_given_throughput(here):
    status, out, _ = program(reproduce.main, 'list')
    assert status == 0 and all(name in out for name in FIGURES) and ' n/a ' in out
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert ' task data ' in lines['table1'] and ' nothing ' in lines['fig6']
    assert '2 cores, tiny' in out
    for name in ('fig1', 'fig3', 'fig15'):
        assert ' outside weights* ' in lines[name]
    assert ' nothing ' in lines['fig9']
    _, timed, _ = program(reproduce.main, 'list', 'fig9', '--tok_per_s=1e6')
    # Two runs of 82M: 10,000 steps of 2^21 tokens each at 1M tokens/s; ResFormer's FLOPs are
    # vanilla's.
    assert ' 12 h ' in next(line for line in timed.splitlines() if line.startswith('fig9'))
    assert 'fig6' not in timed


def test_a_figure_is_trained_drawn_and_compared(here, monkeypatch):
    """fig6 from nothing, at a scale of four steps; then again, reusing the runs."""
    short = {'max_iters': 4, 'eval_iters': 1, 'warmup_iters': 1}
    monkeypatch.setattr(TINY, 'settings', {**TINY.settings, **short})
    monkeypatch.setattr(TINY, 'window', 2)
    monkeypatch.setitem(TINY.sizes, '82m', dict(n_layer=2, n_head=2, n_embd=16))
    splits = {'train': {'A': 200_000}, 'validation': {'A': 10_000}}
    write_dataset(here / 'data/stdlib', splits, n_vocab=257)
    status, out, _ = program(reproduce.main, 'fig6', '--device=cpu', '--jobs=2')
    assert status == 0 and '4 runs to train' in out
    numbers = json.loads((here / 'results/tiny/fig6.json').read_text())
    picture = here / 'results/tiny/fig6.png'
    assert picture.exists() and len(numbers['against_the_paper']) == 5
    monkeypatch.setattr(runs, 'train', lambda *_: pytest.fail('a finished run is reused'))
    assert program(reproduce.main, 'fig6', '--device=cpu')[0] == 0
