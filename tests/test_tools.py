"""The programs around training: bench.py, the configs, and the README's promises."""
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, write_dataset

from configurator import configure
from model import GPT, GPTConfig
from train import TrainConfig

TINY = ['--n_layer=4', '--n_head=2', '--n_embd=16', '--block_size=16', '--vocab_size=320', '--compile=False',
        '--device=cpu', '--batch_size=2', '--gradient_accumulation_steps=1', '--eval_iters=1']


def program(*arguments, cwd, root=ROOT):
    """Run a root program in `cwd`, as a user does."""
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    return subprocess.run([sys.executable, str(root / arguments[0]), *arguments[1:]], cwd=cwd, env=environment,
                          capture_output=True, text=True)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """A folder with a byte dataset, and two finished runs of 12 steps on it."""
    folder = tmp_path_factory.mktemp('tools')
    texts = folder / 'texts'
    texts.mkdir()
    for i in range(40):
        (texts / f'{i}.txt').write_text(f'def f{i}(x):\n    return x + {i}\n' * 20)
    made = program('prepare_slimpajama.py', '--source=texts', '--tokenizer=bytes', '--tokens=0', '--out=data/tiny',
                   '--workers=1', cwd=folder)
    assert made.returncode == 0, made.stderr
    for name, flag in (('vanilla', '--v_residual=False'), ('resformer', '--v_residual=True')):
        done = program('train.py', *TINY, flag, '--dataset=tiny', '--max_iters=12', f'--out_dir=out/{name}', cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_a_finished_run_is_left_as_it_is(runs):
    """make demo relies on it."""
    before = {p: p.read_bytes() for p in (runs / 'out/vanilla').iterdir() if p.name != 'config.json'}
    done = program('train.py', *TINY, '--dataset=tiny', '--max_iters=12', '--out_dir=out/vanilla', '--init_from=auto',
                   cwd=runs)
    assert done.returncode == 0, done.stderr
    assert before == {p: p.read_bytes() for p in (runs / 'out/vanilla').iterdir() if p.name != 'config.json'}


def test_the_diff_in_the_readme_adds_a_residual_from_the_middle_layer(runs, tmp_path):
    """Its lines are replaced in a copy of the core, which then trains; wire() names the middle layer as the source."""
    diff = re.search(r'```diff\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)[1]
    for name in ('model.py', 'train.py', 'data.py', 'configurator.py'):
        shutil.copy(ROOT / name, tmp_path)
    model = (tmp_path / 'model.py').read_text()
    for old, new in re.findall(r'((?:^-.*\n)+)((?:^\+.*\n)+)', diff, re.M):
        old, new = (''.join(line[1:] + '\n' for line in part.splitlines()) for part in (old, new))
        assert model.count(old) == 1
        model = model.replace(old, new)
    (tmp_path / 'model.py').write_text(model)
    wiring = subprocess.run([sys.executable, '-c', 'from model import *\nprint([w.sources["v"] for w in wire(GPTConfig('
                             'n_layer=6, v_residual=True, residual_from="middle"))])'], cwd=tmp_path,
                            capture_output=True, text=True)
    assert wiring.stdout.strip() == '[[], [], [], [], [3], [3]]'
    done = program('train.py', *TINY, '--dataset=tiny', '--max_iters=2', '--out_dir=out/middle', '--v_residual=True',
                   '--residual_from=middle', cwd=runs, root=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_readme_names_every_config_and_only_flags_that_there_are():
    text = (ROOT / 'README.md').read_text()
    for name in re.findall(r'config/(\w+\.py)', text):
        assert (ROOT / 'config' / name).exists() or name == 'yours.py', name
    for flag in re.findall(r'(--(?:[qkv]_residual|residual_\w+|share_\w+|learning_rate|warmup_iters)=\S+?)`', text):
        values = [] if 'share_' in flag or flag.startswith(('--q', '--k', '--v')) else ['--v_residual=True']
        if 'every' in flag:
            values = [flag.split('_every')[0] + '=True']
        if 'middle' not in flag:
            configure(TrainConfig, GPTConfig, argv=[*values, flag])


@pytest.mark.parametrize('size, shape, millions', [
    ('2m', (4, 2, 16, 56), 1.6), ('82m', (8, 8, 512, 1792), 82), ('180m', (12, 12, 768, 2688), 180),
    ('468m', (24, 16, 1024, 3584), 468)])
@pytest.mark.parametrize('name, fields', [('vanilla', {}), ('resformer', {'v_residual': True}),
                                          ('svformer', {'share_v': True})])
def test_configs_are_the_papers(size, shape, millions, name, fields):
    settings, config = configure(TrainConfig, GPTConfig, argv=[str(ROOT / f'config/{name}_{size}.py')])
    assert (config.n_layer, config.n_head, config.n_embd, config.ffn_width) == shape
    layers, heads, width, ffn = shape
    weights = layers * (4 * width**2 + 3 * width * ffn + 2 * width) + width + 2 * config.vocab_size * width
    assert weights / 1e6 == pytest.approx(millions, abs=0.6)
    if layers * width < 5000:  # the larger ones take long to initialize
        assert GPT(GPTConfig(**{**config.__dict__, 'v_residual': False, 'share_v': False})).num_params(False) == weights
    assert {k: getattr(config, k) for k in ('v_residual', 'share_v') if getattr(config, k)} == fields
    assert settings.rows_per_step * config.block_size == 2**21 and settings.out_dir == f'out/{name}_{size}'
    assert (settings.learning_rate, settings.min_lr) == (6e-4, 6e-5)
    assert (settings.warmup_iters, settings.max_iters) == (120, 10000)


@pytest.mark.parametrize('length, batch, sequences', [(512, 128, 4096), (8192, 8, 256), (32000, 2, 64), (64000, 1, 32)])
def test_overlays_are_table_3(length, batch, sequences):
    paths = [str(ROOT / 'config' / name) for name in ('svformer_82m.py', f'seq_{length}.py')]
    settings, config = configure(TrainConfig, GPTConfig, argv=paths)
    assert (config.block_size, settings.batch_size, settings.rows_per_step) == (length, batch, sequences)
    assert config.share_v and config.n_embd == 512


def test_every_config_can_be_read():
    for path in (ROOT / 'config').glob('*.py'):
        configure(TrainConfig, GPTConfig, argv=[str(path)])


def test_a_prepared_dataset_of_another_format_is_refused(tmp_path):
    meta = write_dataset(tmp_path / 'data/old', {'train': {'A': 400}, 'validation': {'A': 40}})
    (tmp_path / 'data/old/meta.json').write_text(json.dumps({**meta, 'format': 0}))
    done = program('train.py', *TINY, '--dataset=old', cwd=tmp_path)
    assert done.returncode == 1 and 'format 0' in done.stderr


def test_the_readmes_cache_table_is_what_new_cache_allocates():
    rows = re.findall(r'^\| [^|]+ \| (?:`(.*?)`)? ?\| ([\d,]+) \| ([\d,]+) \|$', (ROOT / 'README.md').read_text(), re.M)
    assert len(rows) == 8
    for settings, *sizes in rows:
        for size, shape in zip(sizes, (dict(), dict(n_layer=24, n_head=16, n_embd=1024)), strict=True):
            options = eval(f'dict({settings})', {'n_head': shape.get('n_head', 8)})
            with torch.device('meta'):
                cache = GPT(GPTConfig(**shape, **options)).new_cache(3, 5, torch.float16)
            assert cache.nbytes == 15 * int(size.replace(',', '')), settings
