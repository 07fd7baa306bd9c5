"""kernel_times.py: where a step's time goes, and what was expected, without a GPU."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from programs import program
from torch.profiler import ProfilerActivity, profile

import bench
import kernel_times
from model import GPT, GPTConfig

# Names as Hopper's libraries, torch and its compiler give them.
KERNELS = {
    'nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT': 'blocks',
    'void at::native::elementwise_kernel<at::native::clamp_scalar_kernel_impl>': 'elementwise',
    '_amp_foreach_non_finite_check_and_unscale_cuda': 'optimizer',
    'sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1': 'blocks',
    'void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x128_32x3_nn>': 'blocks',
    'void cublasLt::splitKreduce_kernel<32, 16, int, float, __half>': 'blocks',
    'triton_tem_fused_mm_12': 'blocks',
    'cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64': 'attention',
    'void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>': 'attention',
    'fmha_cutlassF_f16_aligned_64x64_rf_sm80': 'attention',
    'triton_per_fused__fused_rms_norm_backward__to_copy_add_view_6': 'elementwise',
    'triton_poi_fused__scaled_dot_product_flash_attention_mm_3': 'elementwise',
    'triton_red_fused__to_copy_arange_eq_exp_logsumexp_mul_ne_split_sub_16': 'elementwise',
    'void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>': 'elementwise',
    'void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>': (
        'optimizer'
    ),
    'ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)': 'other',
    'Memcpy DtoD (Device -> Device)': 'other',
}


@pytest.mark.parametrize('name', KERNELS)
def test_each_kernel_is_of_one_class(name):
    assert kernel_times.class_of(name) == KERNELS[name]


def event(key, device, microseconds, shapes=(), annotation=False):
    return SimpleNamespace(
        key=key,
        device_type=getattr(torch.autograd.DeviceType, device),
        self_device_time_total=microseconds,
        self_cpu_time_total=1e6,
        input_shapes=[list(shape) for shape in shapes],
        is_user_annotation=annotation,
        count=1,
    )


class MadeUp:
    """A trace on a GPU: kernels have names, the operators that launched them have shapes."""

    def key_averages(self, group_by_input_shape=False):
        if group_by_input_shape:
            return [
                event('aten::mm', 'CPU', 400.0, [(4096, 512), (512, 50304)]),
                event('aten::mm', 'CPU', 200.0, [(50304, 4096), (4096, 512)]),
                event('aten::mm', 'CPU', 900.0, [(4096, 512), (512, 1536)]),
                event('aten::add', 'CPU', 50.0, [(4096, 50304)]),
            ]
        return [
            event('aten::mm', 'CPU', 1500.0),
            event('nvjet_hsh_128x256', 'CUDA', 1500.0),
            event('pytorch_flash::flash_fwd_kernel', 'CUDA', 300.0),
            event('triton_poi_fused_add_mm_1', 'CUDA', 150.0),
            event('multi_tensor_apply_kernel<FusedAdam>', 'CUDA', 30.0),
            event('Memset (Device)', 'CUDA', 20.0),
            event('Optimizer.step#AdamW.step', 'CUDA', 30.0, annotation=True),
        ]


def test_products_with_the_vocabulary_are_told_apart_by_their_shapes():
    spent = kernel_times.spent_by_class(MadeUp(), 'cuda', 50304)
    assert spent == {
        'blocks': 900.0,
        'head': 600.0,
        'attention': 300.0,
        'elementwise': 150.0,
        'optimizer': 30.0,
        'other': 20.0,
    }


def test_the_classes_of_a_real_step_are_all_of_its_time():
    config = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=512)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    idx = torch.zeros((2, 64), dtype=torch.int64)
    model(idx, idx)[1].backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        model(idx, idx)[1].backward()
        optimizer.step()

    spent = kernel_times.spent_by_class(trace, 'cpu', 512)
    assert sum(spent.values()) == pytest.approx(
        sum(t for t, _ in kernel_times.kernels(trace, 'cpu'))
    )
    assert all(spent.values()) and min(spent.values()) > 0
    # No other size of this model is 511.
    assert kernel_times.of_head(trace, 'cpu', 511) == 0


def machine(flops, moved):
    return SimpleNamespace(peak_flops=lambda: flops, peak_bytes=lambda: moved)


def expected(flops=989e12, moved=4.8e12, attention='cudnn', steps=1, **fields):
    with torch.device('meta'):
        model = GPT(GPTConfig(**fields))
    numbers = kernel_times.expected_by_class(model, 32, steps, machine(flops, moved), attention)
    return model, numbers


@pytest.mark.parametrize('fields', [{}, dict(share_v=True), dict(n_kv_head=2, n_layer=12)], ids=str)
def test_expected_products_are_the_models_flops(fields):
    """Of attention, flops_per_token() counts the masked half, too, but no scores computed again."""
    model, numbers = expected(**fields)
    flops = 0
    for kind, rate, share in (
        ('blocks', 'blocks', 1),
        ('head', 'head', 1),
        ('attention', 'cudnn', 12 / 7),
    ):
        flops += share * numbers[kind] / 1e6 * kernel_times.REACHED[rate] * 989e12
    assert flops == pytest.approx(32 * 2048 * model.flops_per_token(2048))


@pytest.mark.parametrize('path', sorted(ROOT.glob('results/fakegpu/torch_*.json')), ids=str)
def test_the_expected_bytes_are_those_that_the_compiler_counted(path):
    """In steps of two micro-batches, to 2%."""
    rows = json.loads(path.read_text())['rows']
    compared = 0
    for name, config in (
        ('82m vanilla', {}),
        ('180m vanilla', dict(n_layer=12, n_head=12, n_embd=768)),
        ('468m vanilla, budget 1', dict(n_layer=24, n_head=16, n_embd=1024)),
    ):
        counted = rows.get(name, {}).get('compiled_gb_of_two_micro_steps')
        if counted:
            _, numbers = expected(steps=2, **config)
            moved = numbers['elementwise'] / 1e6 * kernel_times.REACHED['bytes'] * 4.8e12
            assert moved == pytest.approx(counted * 1e9, rel=0.02), name
            compared += 1
    assert compared > 1


def test_two_micro_steps_are_expected_to_take_twice_as_long_but_one_update():
    _, one = expected()
    _, two = expected(steps=2)
    for kind in ('blocks', 'head', 'attention', 'elementwise'):
        assert two[kind] == 2 * one[kind]
    assert two['optimizer'] == one['optimizer']


@pytest.mark.parametrize('attention, milliseconds', [('cudnn', (64, 71)), ('flash', (71, 80))])
def test_the_expectation_is_the_one_that_was_written_down(attention, milliseconds):
    """82M, 32 x 2,048 on an H200: 64 to 71 ms with gaps of 1 to 2 ms; 37 to 40% MFU with flash."""
    _, numbers = expected(attention=attention)
    total = sum(filter(None, numbers.values())) / 1e3 + 1.5
    assert milliseconds[0] <= total <= milliseconds[1]


def test_without_a_data_sheet_nothing_is_expected(capsys):
    _, numbers = expected(flops=None, moved=None, attention=None)
    assert not any(numbers.values())
    kernel_times.print_classes('vanilla', dict.fromkeys(kernel_times.NAMES, 1.0), numbers)
    assert capsys.readouterr().out.count('| n/a | n/a |') == 7


def test_an_unknown_attention_kernel_leaves_the_other_expectations(capsys):
    _, numbers = expected(attention='efficient')
    kernel_times.print_classes('vanilla', dict.fromkeys(kernel_times.NAMES, 1.0), numbers)
    out = capsys.readouterr().out
    assert re.search(r'attention \| .* \| n/a \| n/a \|', out)
    assert re.search(r'vocabulary \| 0.0 \| 16.7% \| 1\d\.\d \| n/a \|', out)


def test_bench_prints_the_classes_of_a_profile(work):
    size = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--vocab_size=320', '--block_size=32']
    options = ['--compile=False', '--device=cpu', '--batch_size=2', '--rounds=1', '--warmup=1']
    words = [*size, *options, '--variants=vanilla,svformer', '--profile=traces']
    status, out, _ = program(bench.main, *words)
    assert status == 0, status
    for name in ('vanilla', 'svformer'):
        table = out.partition(f'| {name}: kernels |')[2].partition('no measurement')[0]
        shares = [float(share) for share in re.findall(r'\| ([\d.]+)% \|', table)]
        assert len(shares) == len(kernel_times.NAMES) + 1
        assert sum(shares[:-1]) == pytest.approx(100, abs=0.5) and shares[-1] == 100


@pytest.mark.parametrize(
    'name, dtype, is_expected',
    [
        ('vanilla', 'float16', True),
        ('vanilla:checkpointed', 'float16', False),
        ('vanilla:budget=0.9', 'float16', False),
        ('vanilla', 'float32', False),
    ],
)
def test_a_row_that_is_not_what_was_counted_has_no_expectation(name, dtype, is_expected):
    row = bench.Row(name, bench.read_name(name, GPTConfig(n_layer=1)))
    row.settings, row.kernel = bench.BenchConfig(), 'flash'
    row.machine = SimpleNamespace(dtype=dtype, **vars(machine(989e12, 4.8e12)))
    assert any(row.expected().values()) == is_expected


@pytest.mark.parametrize(
    'name, compiled',
    [
        ('vanilla:eager', True),
        ('vanilla:half', True),
        ('hf', True),
        ('hf:eager', True),
        ('vanilla', False),
    ],
)
def test_elementwise_kernels_that_were_not_counted_have_no_expectation(name, compiled):
    pytest.importorskip('transformers')
    row = bench.Row(name, bench.read_name(name, GPTConfig(n_layer=1)))
    row.settings, row.kernel = bench.BenchConfig(compile=compiled), 'flash'
    row.machine = SimpleNamespace(dtype='float16', **vars(machine(989e12, 4.8e12)))
    expected = row.expected()
    unknown = [kind for kind, value in expected.items() if value is None]
    assert unknown == ['elementwise', 'other']


def test_a_machine_that_traces_no_kernels_is_told_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, 'kernels', lambda trace, kind: [])
    row = bench.Row('vanilla', None)
    row.machine = SimpleNamespace(kind='cpu', is_first=False)
    monkeypatch.setattr(row, 'step', lambda next_batch: None)
    row.profile(None, tmp_path)
    assert 'vanilla: no kernel was traced; does this machine allow CUPTI' in capsys.readouterr().out
