"""levers.py: a lever changes how a step is taken, not what it leaves; and no two rows share code."""

import json
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from runs import ranks
from test_bench import TINY, assert_refused, needs_gpu, read_rows, run, table

import bench
import levers
from machine import Machine
from model import GPTConfig


@pytest.mark.parametrize(
    'lever, word',
    [
        ('flsh', "'flsh'"),
        ('chunk', "'chunk'"),
        ('budget=1', "'budget=1'"),
        ('budget=half', "'budget=half'"),
        ('chunk=0', "'chunk=0'"),
        ('mode=foo', "'mode=foo'"),
        ('bucket=-1', "'bucket=-1'"),
        ('eager:budget=0.9', "budget is the compiler's"),
        ('eager:mode=reduce-overhead', "mode is the compiler's"),
    ],
)
def test_bench_refuses_an_unknown_lever_in_one_line(work, lever, word):
    assert_refused(*TINY, f'--variants=vanilla,vanilla:{lever}', because=word)


@pytest.mark.parametrize(
    'peer, word',
    [
        ('hf:checkpointed', 'checkpointed is a lever of our own'),
        ('hf:half', 'half is a lever of our own'),
        ('hf:chunk=8192', 'chunk is a lever of our own'),
        ('hf+share_v=True', 'no fields of ours'),
    ],
)
def test_bench_refuses_what_only_our_own_rows_have_for_the_peer(work, peer, word):
    pytest.importorskip('transformers')
    assert_refused(*TINY, f'--variants=vanilla,{peer}', because=word)


def test_without_a_bucket_lever_the_buckets_are_those_of_train():
    assert 'bucket_cap_mb' not in levers.Levers([]).ddp
    assert levers.Levers(['bucket=100']).ddp['bucket_cap_mb'] == 100


ALIKE = ['', ':chunk=7', ':checkpointed', ':flash', ':half', ':checkpointed:chunk=40', ':eager']
CUDA_ONLY = [':cudnn', ':efficient', ':budget=0.9', ':mode=max-autotune-no-cudagraphs']

# On a GPU, the kernels of cuDNN and the efficient ones do not take a head size of 4.
SIZES = {
    'cpu': dict(n_head=8, n_embd=32, block_size=32),
    'cuda': dict(n_head=8, n_embd=512, block_size=64),
}


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def change(name, device, dtype, micro_steps, compile, steps=1):
    """What `steps` updates of plain SGD with a row's loss and gradients leave in the weights."""
    settings = bench.BenchConfig(
        dtype=dtype, device=device, compile=compile, micro_steps=micro_steps
    )
    machine = Machine(device, dtype)
    config = GPTConfig(n_layer=4, vocab_size=96, **SIZES[device])
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(96, (2, 3, config.block_size), generator=generator).to(machine.device)

    row = bench.Row(name, bench.read_name(name, config))
    row.build(settings, machine)
    row.optimizer = torch.optim.SGD(row.model.parameters(), 1.0)
    before = weights(row.model)
    for _ in range(steps):
        row.step(lambda: batch, timed=True)
    return weights(row.model) - before


def assert_same_steps(variant, names, tolerance, **options):
    expected = change(variant, **options)
    largest = expected.abs().max()
    assert largest > 1e-3
    for lever in names:
        difference = change(variant + lever, **options) - expected
        assert difference.abs().max() < tolerance * largest, lever


def compile_quickly(patch):
    """The list of graphs that ran, without the code generation, which takes most of the time.

    The graphs are cut into forward and backward as for inductor, and then run as they are.
    """
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition

    ran = []

    def compile_fx(graph, inputs, **options):
        call = aot_eager_decomp_partition(graph, inputs)

        def run(*args):
            ran.append(graph)
            return call(*args)

        return run

    patch.setattr('torch._inductor.compile_fx.compile_fx', compile_fx)
    return ran


@pytest.fixture
def quick_compiler(monkeypatch):
    ran = compile_quickly(monkeypatch)
    torch.compiler.reset()
    yield ran
    torch.compiler.reset()


@pytest.mark.parametrize(
    'device, dtype, tolerance',
    [
        ('cpu', 'float32', 1e-5),
        ('cpu', 'float16', 2e-3),
        pytest.param('cuda', 'float16', 2e-2, marks=needs_gpu),
    ],
)
@pytest.mark.parametrize(
    'variant', ['vanilla', 'resformer', 'svformer', 'neutreno_resformer', 'cla_gqa']
)
def test_every_lever_takes_the_same_step(variant, device, dtype, tolerance, monkeypatch):
    """Loss and gradients: what an update leaves in the weights, to a part of the largest change."""
    names = list(ALIKE)
    if device == 'cuda':
        monkeypatch.setattr(torch._dynamo.config, 'recompile_limit', 64)
        torch.compiler.reset()
        names += CUDA_ONLY
    if variant == 'cla_gqa' and ':efficient' in names:
        names.remove(':efficient')  # that kernel has no GQA
    options = dict(device=device, dtype=dtype, micro_steps=2, compile=device == 'cuda')
    assert_same_steps(variant, names, tolerance, **options)


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
@pytest.mark.parametrize('lever, is_half', [('', False), (':half', True)])
def test_half_halves_the_residual_stream_of_every_block(lever, is_half, dtype):
    config = GPTConfig(n_layer=3, vocab_size=96, denseformer=True, **SIZES['cpu'])
    row = bench.Row('denseformer' + lever, bench.read_name('denseformer' + lever, config))
    settings = bench.BenchConfig(dtype=dtype, device='cpu', compile=False)
    row.build(settings, Machine('cpu', dtype))
    streams = []
    for block in row.model.transformer.h:
        block.register_forward_hook(lambda block, args, x: streams.append(x.dtype))
    row.step(lambda: torch.zeros((2, 2, 32), dtype=torch.int64))
    assert streams == 3 * [getattr(torch, dtype) if is_half else torch.float32]


def under_ddp(names):
    """What a step of rows under DistributedDataParallel leaves, in a process of its own.

    Prints the number of graphs that ran and the changes of some weights, for each row.
    """
    ran = compile_quickly(pytest.MonkeyPatch())
    machine = Machine('cpu')
    config = GPTConfig(n_layer=1, n_head=2, n_embd=256, vocab_size=96, block_size=16)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(96, (2, 2, 16), generator=generator)
    for name in names:
        # The same batch each time: several micro-steps leave what one leaves.
        micro_steps = 1 if 'static' in name else 2
        settings = bench.BenchConfig(device='cpu', dtype='float32', micro_steps=micro_steps)
        ran.clear()
        row = bench.Row(name, bench.read_name(name, config))
        row.build(settings, machine)
        row.optimizer = torch.optim.SGD(row.model.parameters(), 1.0)
        before = weights(row.model)
        row.step(lambda: batch)
        print(json.dumps([name, len(set(ran)), (weights(row.model) - before)[::97].tolist()]))
        row.drop()
    machine.close()


def test_every_lever_of_ddp_takes_the_same_step(work):
    """One process has the same buckets and graphs as several, and is soon compiled."""
    levers = ['eager', 'eager:static', 'bucket=1:ddp-first', 'bucket=1:ddp-whole']
    names = [f'vanilla:{lever}' for lever in levers]
    ((status, out, err),) = ranks(1, under_ddp, names)
    assert status == 0, err
    rows = {name: (graphs, change) for name, graphs, change in map(json.loads, out.splitlines())}
    assert list(rows) == names
    expected = torch.tensor(rows['vanilla:eager'][1])
    for name, (_, change) in rows.items():
        difference = torch.tensor(change) - expected
        assert difference.abs().max() < 1e-5 * expected.abs().max(), name
    # One graph where buckets would cut it into several.
    graphs = [graphs for graphs, _ in rows.values()]
    assert graphs[:2] == [0, 0] and graphs[2] > 1 and graphs[3] == 1


def test_the_rows_end_before_the_group_of_the_processes(monkeypatch):
    """Or a DistributedDataParallel ends it, and gloo's thread and Python may wait for each other."""
    build = bench.Row.build
    models, alive = [], []

    def noted(row, *args):
        build(row, *args)
        models.append(weakref.ref(row.model))

    def close(machine):
        alive.extend(model() for model in models)

    monkeypatch.setattr(bench.Row, 'build', noted)
    monkeypatch.setattr(bench.Machine, 'close', close)
    table('--rounds=1', '--variants=vanilla,resformer')
    assert alive == [None, None]


@pytest.mark.parametrize(
    'name, words',
    [
        ('vanilla:budget=0.9', 'budget does nothing with compile=False'),
        ('vanilla:mode=max-autotune', 'mode does nothing with compile=False'),
        ('vanilla:bucket=100', 'bucket does nothing without torchrun'),
        ('vanilla:chunk=8', ''),
    ],
)
def test_a_lever_that_does_nothing_here_is_named(capsys, name, words):
    row = bench.Row(name, bench.read_name(name, GPTConfig()))
    settings = bench.BenchConfig(compile=False)
    bench.check_levers(row, settings, SimpleNamespace(distributed=False, is_first=True))
    assert capsys.readouterr().err == (f'note: {name}: {words}\n' if words else '')


def test_cuda_graphs_with_several_micro_steps_are_refused():
    name = 'vanilla:mode=reduce-overhead'
    row = bench.Row(name, bench.read_name(name, GPTConfig()))
    with pytest.raises(ValueError, match='micro_steps=2; use 1, or drop the mode'):
        bench.check_levers(row, bench.BenchConfig(micro_steps=2), Machine('cpu'))


def test_the_compiler_makes_code_for_each_size_and_row():
    shapes = []

    def compiler(graph, inputs):
        shapes.append([tuple(x.shape) for x in inputs])
        return graph.forward

    names = ('recompile_limit', 'accumulated_recompile_limit', 'automatic_dynamic_shapes')
    before = {name: getattr(torch._dynamo.config, name) for name in names}
    with torch._dynamo.config.patch(before):
        bench.compile_rows_apart()
        double = torch.compile(lambda x: 2 * x, backend=compiler)
        for size in range(2, 14):
            double(torch.ones(size))
    assert shapes == [[(size,)] for size in range(2, 14)]


def test_the_compilers_cache_on_disk_tells_levers_apart(monkeypatch, tmp_path):
    from torch._dynamo.utils import counters

    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path))
    hits = []
    for words in ([], [], ['flash'], ['flash']):
        torch.compiler.reset()
        counters.clear()
        with levers.Levers(words).pulled():
            torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
        hits.append(counters['aot_autograd']['autograd_cache_hit'])
    assert hits == [0, 1, 0, 1]
    torch.compiler.reset()


def test_memory_that_lacks_in_one_of_several_processes_ends_them_all(monkeypatch, capsys):
    """The others would wait in an all-reduce that never comes."""

    def lacks():
        raise torch.OutOfMemoryError('CUDA out of memory')

    row = bench.Row('large', None)
    bench.attempt(row, lacks)
    assert row.problem == 'CUDA out of memory'
    row.problem = None
    monkeypatch.setattr(bench.dist, 'is_initialized', lambda: True)
    with pytest.raises(OSError, match='large: CUDA out of memory'):
        bench.attempt(row, lacks)


def test_a_static_graph_with_several_micro_steps_is_refused(work):
    words = ['--variants=vanilla,vanilla:static', '--micro_steps=2']
    assert_refused(*TINY, *words, because='micro_steps=2')


@needs_gpu
@pytest.mark.parametrize('variant', ['vanilla', 'neutreno_resformer', 'cla_gqa'])
def test_cuda_graphs_take_the_same_steps(variant):
    """With one micro-step: at a second one, the graph would overwrite the gradients of the first.

    The first step warms up, the second is recorded, and the others are replayed.
    """
    torch.compiler.reset()
    options = dict(device='cuda', dtype='float16', micro_steps=1, compile=True, steps=4)
    assert_same_steps(variant, [':mode=reduce-overhead'], 2e-2, **options)


@pytest.mark.parametrize(
    'name, graphs',
    [
        ('vanilla', False),
        ('vanilla:mode=reduce-overhead', True),
        ('vanilla:mode=max-autotune', True),
        ('vanilla:mode=max-autotune-no-cudagraphs', False),
    ],
)
def test_the_peak_of_a_row_with_cuda_graphs_has_what_the_graphs_hold(monkeypatch, name, graphs):
    """Tensors within a graph are not allocated anew when it runs: torch's own peak lacks them."""
    segments = [
        {'segment_pool_id': (0, 0), 'total_size': 1000, 'allocated_size': 0},
        {'segment_pool_id': (0, 1), 'total_size': 500, 'allocated_size': 300},
        {'segment_pool_id': (0, 2), 'total_size': 70, 'allocated_size': 0},
    ]
    answers = {
        'memory_snapshot': segments,
        'max_memory_allocated': 10_000,
        'memory_allocated': 4000,
        'reset_peak_memory_stats': None,
    }
    for function, answer in answers.items():
        monkeypatch.setattr(torch.cuda, function, lambda answer=answer: answer)
    monkeypatch.setattr(torch._C, '_cuda_clearCublasWorkspaces', lambda: None, raising=False)
    monkeypatch.setattr(bench, 'stopwatch', lambda machine: lambda: 1.0)
    monkeypatch.setattr(bench, 'train_step', lambda *args: None)
    row = bench.Row(name, bench.read_name(name, GPTConfig()))
    row.machine = SimpleNamespace(kind='cuda', choose_kernels=lambda: None)
    row.settings = bench.BenchConfig()
    row.static = 4000
    row.step(None)
    assert row.peak == 10_000 + graphs * 270


def test_rows_with_other_levers_share_no_compiled_code(work, quick_compiler, monkeypatch):
    size = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--vocab_size=64', '--block_size=16']
    options = ['--batch_size=2', '--device=cpu', '--rounds=1', '--warmup=2', '--profile=traces']
    names = ['vanilla', 'vanilla:checkpointed', 'vanilla:chunk=8', 'vanilla:budget=0.9']
    graphs = {name: set() for name in names}
    step = bench.Row.step

    def noted(row, *args, **options):
        quick_compiler.clear()
        step(row, *args, **options)
        graphs[row.name].update(quick_compiler)

    monkeypatch.setattr(bench.Row, 'step', noted)
    out = run(*size, *options, f'--variants={",".join(names)}', '--out=levers.json')
    assert all(graphs.values())
    assert len(set.union(*graphs.values())) == sum(map(len, graphs.values()))
    for name in names:
        assert (work / f'traces/{name.replace(":", "-")}.json').exists()
    assert len(re.findall(r'^\| `', out, re.M)) == 10 * len(names)  # ten kernels each
    for row in read_rows(work / 'levers.json'):
        assert row['first_step_s'] > row['ms_per_step'] / 1e3


def test_a_budget_takes_the_same_step_with_less_in_memory(quick_compiler):
    """Memory: what the forward pass keeps for the backward pass."""
    kept = []

    def keep(tensor):
        kept.append(tensor.nbytes)
        return tensor

    options = dict(device='cpu', dtype='float32', micro_steps=2, compile=True)
    changes, sizes = {}, {}
    for lever in ('', ':budget=0.9'):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            changes[lever] = change('neutreno_resformer' + lever, **options)
        sizes[lever] = sum(kept)

    difference = changes[':budget=0.9'] - changes['']
    assert difference.abs().max() < 1e-5 * changes[''].abs().max()
    assert sizes[':budget=0.9'] < sizes['']


def test_only_the_first_process_writes_the_trace_of_a_profile(tmp_path):
    config = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=16, vocab_size=64)
    for is_first in (False, True):
        machine = Machine('cpu')
        machine.is_first = is_first
        row = bench.Row('vanilla', bench.read_name('vanilla', config))
        row.build(bench.BenchConfig(device='cpu', compile=False, batch_size=2), machine)
        row.profile(lambda: torch.zeros((2, 2, 16), dtype=torch.int64), tmp_path)
        assert (tmp_path / 'vanilla.json').exists() == is_first
