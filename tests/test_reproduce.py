"""python -m paper.reproduce: its figures and scales as data, its training, its numbers and pictures."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from byte_runs import write_byte_dataset
from comparisons import launch_here, write_arm
from conftest import assert_one_line, read_json, write_dataset
from programs import program

from comparison import launch
from comparison.runs import facts
from paper import draw, figures, reproduce
from paper.figures import CLAIMS_SIZE, FIGURES, LENGTHS, PAPER, SCALES, TINY, Arm

OUT = Path('out/tiny')
ARMS = list(dict.fromkeys(arm for figure in FIGURES.values() for arm in figure.runs()))


def reproduced(*words):
    return program(reproduce.main, *words, '--device=cpu')


# --- figures and scales ---------------------------------------------------------------------------


def test_every_figure_and_table_of_the_paper_is_there_with_a_title_of_its_own():
    names = 'table1 table5 fig1 fig2 fig3 fig4 fig5 fig6 fig7 fig8 fig9 fig10 fig11 fig12a fig12b '
    names += 'fig12c fig12d fig13 fig14 fig15'
    assert list(FIGURES) == names.split()
    assert len({figure.title for figure in FIGURES.values()}) == len(FIGURES)
    for figure in FIGURES.values():
        assert len({panel.title for panel in figure.panels}) == len(figure.panels)


@pytest.mark.parametrize('scale', SCALES.values(), ids=SCALES)
def test_every_arm_of_every_scale_is_one_that_train_accepts(scale):
    by_name = {}
    arms = [arm for arm in ARMS if scale is not CLAIMS_SIZE or arm.model != 'mqa']
    for arm in arms:
        settings, config = arm.configs(scale)
        paper = arm.configs(PAPER)[1]
        assert config.kv_heads / config.n_head == paper.kv_heads / paper.n_head
        tokens = settings.rows_per_step * config.block_size
        assert 0.97 < tokens / scale.tokens <= 1, arm  # constant tokens a step
        by_name[arm.name] = facts({**vars(settings), **vars(config)})
    assert len(by_name) == len(arms)
    assert len({json.dumps(own, sort_keys=True) for own in by_name.values()}) == len(arms)
    trained = {arm for figure in FIGURES.values() for arm in figure.runs(scale)}
    assert trained == set(arms)
    for figure in FIGURES.values():
        for panel in figure.panels:
            labels = {arm.words(scale) for arm in panel.arms}
            assert len(labels) == len(panel.arms)
            # The paper's sizes are called so at its own scale alone.
            assert scale is PAPER or not any(re.search(r'\d+M', label) for label in labels)


def test_the_papers_scale_is_its_tables_3_and_4():
    rows = []
    for length in LENGTHS:
        settings, config = Arm('svformer', length=length).configs(PAPER)
        assert config.share_v and settings.gradient_accumulation_steps == 32
        rows.append((config.block_size, settings.batch_size, settings.rows_per_step))
    assert rows == [
        (512, 128, 4096),
        (2048, 32, 1024),
        (8192, 8, 256),
        (32000, 2, 64),
        (64000, 1, 32),
    ]
    settings, config = Arm('vanilla', '468m', rate=2, warmup=1).configs(PAPER)
    assert (config.n_layer, config.n_head, config.n_embd) == (24, 16, 1024)
    assert (settings.learning_rate, settings.min_lr, settings.warmup_iters) == (1e-4, 1e-5, 1200)
    assert settings.activation_memory_budget == 0.9


def test_an_arms_wiring_is_its_config_files_and_its_flags_come_on_top():
    _, config = Arm('gpt2+v_residual=True').configs(TINY)
    assert (config.arch, config.v_residual) == ('gpt2', True)
    assert Arm('neutreno').configs(TINY)[1].neutreno == 0.4
    assert Arm('vanilla+n_kv_head=2').configs(PAPER)[1].kv_heads == 2
    _, halved = Arm('gqa').configs(SCALES['claims'])  # of 4 heads in place of 8
    assert halved.kv_heads == 2


# --- training -------------------------------------------------------------------------------------


@pytest.fixture
def short(here, monkeypatch):
    """data/stdlib, and a scale tiny of four steps."""
    monkeypatch.setattr(TINY, 'settings', TINY.settings | {'max_iters': 4, 'eval_iters': 1})
    monkeypatch.setattr(TINY, 'warmups', (1, 2))
    monkeypatch.setattr(TINY, 'window', 2)
    monkeypatch.setitem(TINY.sizes, '82m', dict(n_layer=2, n_head=2, n_embd=16))
    write_byte_dataset(here / 'data/stdlib', {'A': 3000})


def test_a_figure_is_trained_analyzed_drawn_and_judged_and_trained_once(short, monkeypatch):
    """By compare.py's engine, from nothing, with two seeds; then again, from the runs."""
    monkeypatch.setattr(launch, 'launch', launch_here)
    status, out, _ = reproduced('fig9', '--seeds=2')
    assert status == 0, status
    assert Path('results/tiny/fig9.png').stat().st_size > 10_000
    rows = [line for line in out.splitlines() if line.startswith('| ') and '| undecided' in line]
    assert len(rows) == 2 and '2 of at least 3 seeds' in rows[1]
    (panel,) = read_json('results/tiny/fig9.json')['panels']
    runs = [f'{model}_lr0.003_seed{seed}' for model in ('vanilla', 'resformer') for seed in (1, 2)]
    assert [Path(run).name for run in panel['numbers']['runs']] == runs
    before = sorted(Path('out').rglob('*'))
    assert reproduced('fig9')[0] == 0
    assert sorted(Path('out').rglob('*')) == before
    assert not list(Path('out').rglob('plan.json'))


def test_what_to_do_after_an_interruption_is_said(short, monkeypatch):
    """test_launch.py has the trainings, which save themselves."""

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, 'launch', interrupted)
    monkeypatch.setattr(launch.signal, 'signal', lambda *ignored: None)
    status, _, err = reproduced('fig3')
    assert status == 75 and 'same command' in err


def test_a_training_that_fails_is_one_line(here):
    splits = {'train': {'A': 2000}, 'validation': {'A': 2000}}
    write_dataset(here / 'data/stdlib', splits, n_vocab=257)
    status, _, _ = reproduced('fig9')
    assert_one_line(status, 'vanilla_lr0.003_seed1', 'resformer_lr0.003_seed1', 'train.log')


# --- numbers and pictures -------------------------------------------------------------------------


def finished_runs(name):
    """Random finished runs of a figure."""
    rng = np.random.default_rng(0)
    for i, arm in enumerate(FIGURES[name].runs()):
        write_arm(OUT, arm, TINY, rng.normal(3.0 - 0.1 * i, 0.01, 120).tolist())


@pytest.fixture
def titles(monkeypatch):
    """Titles of the pictures that are saved."""
    result, save = [], draw.save

    def remember(figure, out):
        result.append(figure.get_suptitle())
        save(figure, out)

    monkeypatch.setattr(draw, 'save', remember)
    return result


@pytest.mark.parametrize('name', ['table5', 'fig2', 'fig5', 'fig10', 'fig11', 'fig12d'])
def test_a_figure_is_drawn_from_its_file_as_from_its_runs(here, titles, name):
    finished_runs(name)
    write_dataset(here / 'data/stdlib', {'train': {'A': 20}, 'validation': {'A': 20}}, n_vocab=257)
    status, out, _ = reproduced(name)
    assert status == 0, status
    made = {path: path.read_bytes() for path in Path('results/tiny').iterdir()}
    assert len(made) == 1 + len(FIGURES[name].panels) * (name != 'table5')
    for path in made:
        if path.suffix != '.json':
            path.unlink()
    assert reproduced('redraw', name)[0] == 0
    assert {path: path.read_bytes() for path in Path('results/tiny').iterdir()} == made
    assert all(title.startswith(figures.number_of(name)) for title in titles)
    if name == 'fig5':
        assert 'of the parameters (the paper: 10% to 16%)' in out


def test_figures_are_of_runs_that_exist(here, titles):
    """Without training, from any folder."""
    finished_runs('fig13')
    Path('out/tiny').rename('kept')
    folders = [str(path) for path in Path('kept').iterdir()]
    assert reproduced('fig13', *folders, '--out=made')[0] == 0
    assert titles == ["Fig. 13: All layers use the first layer's queries, keys or values (tiny)"]
    status, _, _ = reproduced('fig6', *folders)
    assert_one_line(status, 'fig6')
    assert_one_line(reproduced(*folders)[0], 'claims')


@pytest.mark.parametrize(
    'arguments, words',
    [
        (['fig99'], ['fig99']),
        (['fig3'], ['data/stdlib', 'prepare_slimpajama.py']),  # before the first training
        (['fig6', '--scale=huge'], ['scale']),
        (['redraw', 'fig6'], ['results/tiny/fig6.json']),
        (['fig6', '--scale=claims'], ['data/slimpajama_mini_bytes']),
        (['claims', 'out/nothing'], ['out/nothing']),
    ],
)
def test_a_mistake_is_one_line(here, arguments, words):
    status, _, _ = reproduced(*arguments)
    assert_one_line(status, *words)
    assert not Path('out').exists()


def test_the_list_names_every_figure_and_without_one_the_usage_is_printed(here):
    finished_runs('fig3')
    status, out, _ = reproduced('list')
    assert status == 0 and '| fig3 | 1 of 1 |' in out and '| fig6 | 1 of 4 |' in out
    assert all(f'| {name} |' in out for name in FIGURES)
    assert 'about 1 min on one core' in out
    assert 'takes hours on eight GPUs' in reproduced('list', '--scale=paper')[1]
    status, out, _ = program(reproduce.main)
    assert status == 2 and 'python -m paper.reproduce list' in out
