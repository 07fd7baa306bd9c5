"""config/: the paper's sizes (Table 4) and sequence lengths (Table 3), and that every file is read."""

from configurator import configure

import pytest
from conftest import ROOT

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
    vanilla = GPT.without_weights(GPTConfig(**config.shape()))
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


def test_the_gates_of_others_weigh_as_theirs():
    for name, weights in (('nanochat', (3.0, 1.0)), ('x0_values', (2.0, 1.0))):
        assert read(f'{name}_82m.py')[1].residual_lambda == weights
    for name, weight in (('neutreno', 0.4), ('neutreno_resformer', 0.2)):
        assert read(f'{name}_82m.py')[1].neutreno == weight


def test_every_config_can_be_read():
    for path in (ROOT / 'config').glob('[!_]*.py'):
        read(path.name)


@pytest.mark.parametrize(
    'name, share',
    [
        ('gqa', 1 / 2),
        ('cla', 1 / 2),
        ('fused_kv', 1 / 2),
        ('mqa', 1 / 8),
        ('cla_gqa', 1 / 8),
        ('svformer_gqa', 9 / 64),
    ],
)
def test_the_cache_of_fig_10s_models_is_the_share_that_is_compared(name, share):
    """Half of vanilla's, and an eighth; SVFormer has 8 layers' keys and one layer's values."""
    sizes = []
    for file in ('vanilla_82m.py', f'{name}_82m.py'):
        _, config = read(file)
        sizes.append(GPT.without_weights(config).new_cache(1, 16).nbytes)
    assert sizes[1] / sizes[0] == share


def test_the_revisions_models_have_its_weights():
    fields = ('v_residual', 'residual_lambda', 'residual_weights', 'residual_layers')
    values = {}
    for name in ('constant', 'learned', 'sparse'):
        _, config = read(f'{name}_resformer_82m.py')
        values[name] = tuple(getattr(config, field) for field in fields)
    assert values['constant'] == (True, (2.0, 1.0), 'fixed', ())
    assert values['learned'] == (True, (), 'learned', ())  # they start at 0.5 and 0.5
    assert values['sparse'] == (True, (5.0, 1.0), 'fixed', (5, 6, 7))
