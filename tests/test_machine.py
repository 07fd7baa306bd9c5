"""lib/machine.py: device, precision and kernels on GPUs that are not there."""

import pytest
import torch
from conftest import raises_one_line
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lib.files import one_line_errors
from lib.machine import Machine


@pytest.fixture
def gpu(monkeypatch):
    """gpu(name, bfloat16, count) lets torch see GPUs."""

    def fake(name, bfloat16=True, count=8):
        values = {
            'device_count': count,
            'is_available': True,
            'set_device': None,
            'is_bf16_supported': bfloat16,
            'get_device_name': name,
        }
        for function, value in values.items():
            answer = lambda *args, value=value, **options: value  # noqa: E731
            monkeypatch.setattr(torch.cuda, function, answer)
        monkeypatch.setattr(torch, 'set_float32_matmul_precision', lambda precision: None)

    return fake


def test_bfloat16_on_a_gpu_without_it_is_refused(gpu):
    gpu('Tesla V100', bfloat16=False)
    with raises_one_line('Tesla V100 has no bfloat16; use --dtype=float16'):
        Machine(dtype='bfloat16')
    machine = Machine('cuda:1')
    assert (machine.dtype, machine.device) == ('float16', torch.device('cuda:1'))
    assert machine.peak_flops() == 125e12


@pytest.mark.parametrize('device', ['cuda', 'cuda:1', 'mps', 'xpu', 'gpu'])
def test_a_device_that_is_not_there_is_refused_by_its_name(device, monkeypatch):
    for backend in (torch.cuda, torch.backends.mps):
        monkeypatch.setattr(backend, 'is_available', lambda: False)
    with pytest.raises(ValueError, match=f'device={device}: '):
        Machine(device)


def test_more_gpus_than_there_are_are_refused_by_every_process_alike(gpu, monkeypatch):
    gpu('NVIDIA H200', count=4)
    with raises_one_line('device=cuda:4: torch sees 4 GPUs here, from cuda:0 on'):
        Machine('cuda:4')
    for name, value in (('RANK', '0'), ('WORLD_SIZE', '8'), ('LOCAL_WORLD_SIZE', '8')):
        monkeypatch.setenv(name, value)
    with raises_one_line('device=cuda:7: torch sees 4 GPUs here, from cuda:0 on'):
        Machine()


def test_only_training_multiplies_in_tf32(gpu, monkeypatch):
    gpu('NVIDIA H200')
    asked = []
    monkeypatch.setattr(torch, 'set_float32_matmul_precision', asked.append)
    Machine()
    Machine(tf32=True)
    assert asked == ['highest', 'high']


def test_each_process_has_its_own_gpu(gpu, monkeypatch):
    gpu('NVIDIA H200')
    for name, value in (('RANK', '5'), ('LOCAL_RANK', '1'), ('WORLD_SIZE', '8')):
        monkeypatch.setenv(name, value)
    machine = Machine('cuda')
    assert machine.device == torch.device('cuda:1')
    assert (machine.rank, machine.world_size, machine.is_first) == (5, 8, False)


@pytest.mark.parametrize(
    'name, teraflops',
    [
        ('NVIDIA H200', 989),
        ('NVIDIA H100 PCIe', 756),
        ('NVIDIA H100 80GB HBM3', 989),
        ('NVIDIA GeForce RTX 4090 D', None),
        ('NVIDIA H200 MIG 1g.18gb', None),
        ('NVIDIA A1000', None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet_or_unknown(gpu, name, teraflops):
    gpu(name)
    expected = teraflops and pytest.approx(teraflops * 1e12)
    assert Machine().peak_flops() == expected
    assert Machine(dtype='float32').peak_flops() is None


@pytest.mark.parametrize(
    'attention, kernels',
    [('auto', (True, True)), ('flash', (False, True)), ('cudnn', (True, False))],
)
def test_the_attention_setting_leaves_kernels_out(gpu, attention, kernels):
    gpu('NVIDIA H200')
    try:
        Machine(attention=attention)
        cuda = torch.backends.cuda
        assert (cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled()) == kernels
        # Or code compiled for other kernels would be found in the compiler's cache on disk.
        assert attention in torch.compiler.config.cache_key_tag
    finally:
        Machine()


def test_the_kernel_of_an_attention_is_what_torch_would_choose(monkeypatch):
    def choose(q, k, v, is_causal, enable_gqa):
        assert q.shape == (1, 8, 128, 64) and is_causal
        return {(2, True): 1, (8, False): 3}[k.size(1), enable_gqa]

    machine = Machine('cpu', 'float16')
    assert machine.attention_kernel(8, 2, 64, 128) is None
    machine.kind = 'cuda'  # the tensors stay on the CPU
    monkeypatch.setattr(torch, '_fused_sdp_choice', choose)
    assert machine.attention_kernel(8, 2, 64, 128) == 'flash'
    machine.dtype = 'float32'
    assert machine.attention_kernel(8, 2, 64, 128) == 'cudnn'


@pytest.mark.parametrize('others', ['', '8'])
def test_without_a_rank_a_process_is_alone(monkeypatch, others):
    """Whatever else a scheduler has set."""
    monkeypatch.setenv('RANK', '')
    for name in ('LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'):
        monkeypatch.setenv(name, others)
    machine = Machine('cpu')
    assert (machine.distributed, machine.rank, machine.local_rank) == (False, 0, 0)
    assert machine.world_size == 1
    with pytest.raises(SystemExit, match=r'error: ours\\n'), one_line_errors():
        raise ValueError('ours\n')


def test_torchrun_ends_with_the_line_of_whichever_process_ends_first(monkeypatch, tmp_path):
    path = tmp_path / 'error.json'
    monkeypatch.setenv('TORCHELASTIC_ERROR_FILE', str(path))
    monkeypatch.setenv('RANK', '1')
    monkeypatch.setenv('LOCAL_RANK', '1')  # which is silent itself
    with pytest.raises(SystemExit, match='^1$'), one_line_errors():
        raise ValueError('ours')
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(path))
    assert ': error: ours' in ChildFailedError('train', {1: failure}).format_msg()
