"""config/: the paper's sizes (Table 4) and sequence lengths (Table 3), and that every file is read."""

import pytest
import torch
from conftest import ROOT

from configurator import configure
from model import GPT, GPTConfig
from train import TrainConfig


def read(*names):
    return configure(TrainConfig, GPTConfig, argv=[str(ROOT / 'config' / name) for name in names])


@pytest.mark.parametrize(
    'size, shape, millions',
    [
        ('2m', (4, 2, 16, 56), 1.6),
        ('82m', (8, 8, 512, 1792), 82),
        ('180m', (12, 12, 768, 2688), 180),
        ('468m', (24, 16, 1024, 3584), 468),
    ],
)
@pytest.mark.parametrize(
    'name, fields',
    [('vanilla', {}), ('resformer', {'v_residual': True}), ('svformer', {'share_v': True})],
)
def test_configs_are_the_papers(size, shape, millions, name, fields):
    settings, config = read(f'{name}_{size}.py')
    assert (config.n_layer, config.n_head, config.n_embd, config.ffn_width) == shape
    assert config.variant() == fields

    layers, _, width, ffn = shape
    blocks = layers * (4 * width**2 + 3 * width * ffn + 2 * width)
    weights = blocks + width + 2 * config.vocab_size * width
    assert weights / 1e6 == pytest.approx(millions, abs=0.6)
    with torch.device('meta'):
        vanilla = GPT(GPTConfig(**config.shape()))
    assert vanilla.num_params(False) == weights

    assert settings.rows_per_step * config.block_size == 2**21
    assert settings.out_dir == f'out/{name}_{size}'
    assert (settings.learning_rate, settings.min_lr) == (6e-4, 6e-5)
    assert (settings.warmup_iters, settings.max_iters) == (120, 10000)


@pytest.mark.parametrize(
    'length, batch, sequences',
    [(512, 128, 4096), (8192, 8, 256), (32000, 2, 64), (64000, 1, 32)],
)
def test_overlays_are_table_3(length, batch, sequences):
    settings, config = read('svformer_82m.py', f'seq_{length}.py')
    assert config.block_size == length
    assert (settings.batch_size, settings.rows_per_step) == (batch, sequences)
    assert config.share_v and config.n_embd == 512


def test_every_config_can_be_read():
    for path in (ROOT / 'config').glob('*.py'):
        read(path.name)
