"""bench.py and its levers: what a table holds, what is refused, and what survives a failure."""

import json
import os
import re
import shlex
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from programs import assert_one_line, program
from runs import finish, ranks, start

import bench
import levers
from configurator import configure
from machine import Machine
from model import GPT, GPTConfig, refuse

TINY = [
    '--n_layer=4',
    '--n_head=2',
    '--n_embd=16',
    '--block_size=16',
    '--vocab_size=320',
    '--compile=False',
    '--device=cpu',
    '--batch_size=2',
    '--gradient_accumulation_steps=1',
    '--eval_iters=1',
]
DECODE = [
    'decode',
    '--n_layer=2',
    '--n_embd=32',
    '--n_head=2',
    '--vocab_size=64',
    '--block_size=32',
    '--device=cpu',
    '--compile=False',
]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')


def run(*words):
    """bench.py with these arguments, in this process; returns what it printed."""
    status, out, _ = program(bench.main, *words)
    assert status == 0, status
    return out


def assert_refused(*words, because):
    status, _, err = program(bench.main, *words)
    assert_one_line(status, because)
    assert err == ''


def table(*words):
    """The numbers of a table of training steps, made in this process."""
    settings, config = configure(bench.BenchConfig, GPTConfig, argv=[*TINY, '--warmup=1', *words])
    return bench.bench_training(settings, config)


def read_rows(path):
    return json.loads(path.read_text())['rows']


# --- training ------------------------------------------------------------------------------------


def test_bench_reports_every_row_and_writes_json(work):
    names = ['vanilla', 'resformer', 'svformer', 'gqa+q_residual=True:eager']
    options = ['--rounds=3', '--warmup=1', '--real_data=True', '--dataset=tiny', '--n_head=4']
    out = run(*TINY, f'--variants={",".join(names)}', *options, '--out=results/bench.json')

    rows = read_rows(work / 'results/bench.json')
    assert [row['name'] for row in rows] == names
    for row in rows:
        assert len(row['seconds']) == 3 and row['tok_per_s'] > 0 and row['mfu'] is None
    assert rows[0]['speed_relative_to'] == {'vanilla': 1.0}
    assert 'waiting for data' in out


@pytest.mark.parametrize(
    'variant, word',
    [
        ('resformr', 'resformr'),
        ('vanilla+v_residul=True', 'v_residual'),
        ('vanilla+batch_size=64', 'batch_size is the same in all rows; set it with --batch_size'),
        ('vanilla+learning_rate=1', 'learning_rate is the same in all rows'),
        ('vanilla+block_size=4096', 'block_size is the same in all rows'),
    ],
)
def test_bench_refuses_an_unknown_variant_in_one_line(work, variant, word):
    assert_refused(*TINY, f'--variants=vanilla,{variant}', because=word)


def test_the_row_that_a_note_advises_has_all_fields_of_the_config(capsys):
    """Also where a value has commas."""
    fields = dict(v_residual=True, residual_layers=(5, 6, 7))
    bench.start(bench.BenchConfig(device='cpu', compile=False), GPTConfig(**fields))
    note = capsys.readouterr().err
    advice = shlex.split(note.partition('residual_layers: ')[2])
    (settings,) = configure(bench.BenchConfig, argv=[*advice, '--peers=hf'])
    name, *peers = bench.row_names(settings)
    assert peers == ['hf', 'hf:eager']
    assert levers.read_name(name, GPTConfig()).config == GPTConfig(**fields)


def test_names_are_parted_at_the_commas_between_them():
    names = ['cla', 'vanilla+v_residual=True+residual_lambda=(2.0, 1.0):eager', 'gqa:chunk=8']
    assert levers.split_names(','.join(names)) == names


def test_bench_of_two_processes_counts_the_tokens_of_both_and_prints_one_table(work):
    options = ['--rounds=2', '--warmup=1', '--gradient_accumulation_steps=2', '--out=two.json']
    options += ['--real_data=True', '--dataset=tiny']
    variants = '--variants=vanilla,vanilla:ddp-first,vanilla:ddp-whole,vanilla:bucket=1:static'
    launcher = ['-m', 'torch.distributed.run', '--nproc_per_node=2']
    status, out, err = finish(start(*launcher, ROOT / 'bench.py', *TINY, variants, *options))
    assert status == 0, err

    numbers = json.loads((work / 'two.json').read_text())
    assert numbers['world_size'] == 2 and out.count('ms/step') == 1
    for row in numbers['rows']:
        assert row['tok_per_s'] * row['ms_per_step'] / 1e3 == pytest.approx(2 * 2 * 16)


def test_the_peer_in_bench_has_our_shape():
    pytest.importorskip('transformers')
    config = GPTConfig(block_size=32, vocab_size=64, n_layer=2, n_head=4, n_embd=32, n_kv_head=2)
    theirs = levers.HuggingFaceLlama(config)
    assert sum(p.numel() for p in theirs.parameters()) == GPT(config).num_params(False)


# --- levers --------------------------------------------------------------------------------------


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
    row.machine, row.settings = SimpleNamespace(kind='cuda'), bench.BenchConfig()
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
        row.profile(lambda: torch.zeros((2, 2, 16), dtype=torch.int64), tmp_path / 'traces')
        assert (tmp_path / 'traces').exists() == is_first


# --- what fails ----------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU has it')
def test_a_kernel_that_the_device_lacks_does_not_lose_the_other_rows(work):
    out = run(*TINY, '--variants=vanilla:cudnn,vanilla', '--rounds=1', '--warmup=1')
    assert re.search(r'^\| vanilla:cudnn \| \D+ \|$', out, re.M) and '| vanilla | ' in out


@pytest.mark.parametrize('where', ['build', 'step'])
def test_a_row_that_runs_out_of_memory_does_not_lose_the_others(monkeypatch, capsys, where):
    whole = getattr(bench.Row, where)
    weights = []

    def full(row, *args):
        if row.name == 'svformer:checkpointed':
            if row.model is not None:
                weights.extend(map(weakref.ref, row.model.parameters()))
            raise torch.OutOfMemoryError('out of memory: tried\nall of it')
        return whole(row, *args)

    monkeypatch.setattr(bench.Row, where, full)
    numbers = table('--rounds=1', '--variants=vanilla,svformer:checkpointed,resformer')
    assert [('problem' in row, row['name']) for row in numbers['rows']] == [
        (False, 'vanilla'),
        (True, 'svformer:checkpointed'),
        (False, 'resformer'),
    ]
    assert '| svformer:checkpointed | out of memory: tried |' in capsys.readouterr().out
    assert bool(weights) == (where == 'step')
    assert not any(weight() is not None for weight in weights)


@pytest.mark.parametrize(
    'error, problem',
    [(AssertionError(), 'AssertionError'), (KeyError('x0'), "'x0'"), (OSError('no g++'), 'no g++')],
)
def test_whatever_a_row_raises_does_not_lose_the_others(monkeypatch, error, problem):
    """Inductor raises AssertionError, for example."""
    step = bench.Row.step

    def broken(row, *args):
        if row.name == 'svformer':
            raise error
        return step(row, *args)

    monkeypatch.setattr(bench.Row, 'step', broken)
    rows = table('--rounds=2', '--variants=svformer,vanilla')['rows']
    assert rows[0] == {'name': 'svformer', 'problem': problem}
    assert len(rows[1]['seconds']) == 2


def test_bench_without_a_row_that_can_be_timed_is_one_line(monkeypatch):
    def full(row, *args):
        raise torch.OutOfMemoryError('out of memory: tried\nall of it')

    monkeypatch.setattr(bench.Row, 'build', full)
    with pytest.raises(ValueError, match='no row could be timed: out of memory: tried$'):
        table('--rounds=1')


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit])
def test_an_interrupted_bench_leaves_the_rounds_that_were_finished(tmp_path, monkeypatch, error):
    step = bench.Row.step

    def interrupted(row, *args):
        if row.name == 'resformer' and len(row.seconds) == 2:
            raise error
        return step(row, *args)

    monkeypatch.setattr(bench.Row, 'step', interrupted)
    with pytest.raises(error):
        table('--rounds=5', '--variants=vanilla,resformer', f'--out={tmp_path}/bench.json')
    rows = read_rows(tmp_path / 'bench.json')
    assert [len(row['seconds']) for row in rows] == [2, 2]


def bench_where_one_lacks_a_compiler(*words):
    if os.environ['RANK'] == '1':
        bench.check_compiler = lambda machine: refuse(True, 'no compiler')
    sys.argv = ['bench.py', *words]
    bench.main()


def test_a_compiler_that_one_process_lacks_ends_all_with_one_line(work):
    words = [word for word in TINY if 'compile' not in word]
    results = ranks(2, bench_where_one_lacks_a_compiler, *words)
    assert all(status == 1 for status, _, _ in results)
    assert ''.join(err for _, _, err in results) == 'error: no compiler\n'


def test_data_that_cannot_be_read_end_the_bench(work, monkeypatch):
    """They are not the problem of one row, after which the next one would wait for ever."""

    def unreadable(rows, size):
        raise OSError('A.bin is gone')

    monkeypatch.setattr(bench.TrainingRows, 'batch', unreadable)
    assert_refused(*TINY, '--real_data=True', '--dataset=tiny', because='A.bin is gone')


# --- decoding ------------------------------------------------------------------------------------


def test_bench_decode_reports_every_row_and_cache_bytes(work):
    sizes = ['--contexts=(16, 32)', '--batch_sizes=(1, 2)', '--new_tokens=4', '--chunk=8']
    options = ['--rounds=2', '--warmup=1', '--variants=vanilla,svformer:eager']
    out = run(*DECODE, *sizes, *options, '--out=decode.json')

    rows = read_rows(work / 'decode.json')
    assert [(row['name'], row['batch'], row['context']) for row in rows] == [
        (name, batch, context)
        for context in (16, 32)
        for batch in (1, 2)
        for name in ('vanilla', 'svformer:eager')
    ]
    for row in rows:
        tensors = 4 if row['name'] == 'vanilla' else 3  # k and v of two layers, or two k and one v
        assert row['cache_bytes'] == tensors * row['batch'] * row['context'] * 32 * 4
        assert len(row['seconds']) == 2 and row['ms_per_token'] > 0
        assert f'| {row["cache_bytes"]:,} |' in out


@pytest.mark.parametrize(
    'arguments, word',
    [
        (['--contexts=(64,)'], 'block_size=32'),
        (['--contexts=(16,)', '--new_tokens=16'], 'new_tokens=16'),
        (['--contexts=(16,)', '--new_tokens=4', '--memory_gib=1'], 'memory_gib needs a GPU'),
        (['--chunk=0'], 'chunk'),
        (['--batch_sizes=(0,)'], 'batch_sizes'),
        (['--new_tokens=0'], 'new_tokens'),
        (['--warmup=-20'], 'warmup=-20 must be at least 0'),
        (['--peers=hf', '--contexts=(16,)', '--new_tokens=4'], 'bench.py decode has no peers'),
        (['--memory_gib=-1'], 'memory_gib=-1.0 must be at least 0'),
        (['--micro_steps=2'], 'micro_steps=2 does nothing in bench.py decode'),
        (['--real_data=True'], 'real_data=True does nothing in bench.py decode'),
        (['--profile=traces'], 'profile=traces does nothing in bench.py decode'),
        (
            ['--activation_checkpointing=True'],
            'activation_checkpointing=True does nothing in bench.py decode',
        ),
        (['--contexts=(16,)', '--new_tokens=4', '--variants=vanilla:checkpointed'], 'checkpointed'),
        (['--contexts=(16,)', '--new_tokens=4', '--variants=vanilla:budget=0.9'], 'budget'),
        (['--contexts=(16,)', '--new_tokens=4', '--variants=vanilla:half'], 'half'),
        (['--contexts=(16,)', '--new_tokens=4', '--variants=vanilla:ddp-whole'], 'ddp-whole'),
    ],
)
def test_bench_decode_refuses_bad_input_in_one_line(work, arguments, word):
    assert_refused(*DECODE, *arguments, because=word)


@pytest.mark.parametrize('where', ['start', 'round'])
def test_whatever_a_decoder_raises_does_not_lose_the_others(work, monkeypatch, where):
    """Nor does it lose the decoder's own rows with other batches."""
    whole = getattr(bench.Trial, where)

    def broken(trial, *args):
        if trial.name == 'svformer' and trial.batch == 2:
            raise AssertionError('no such\nkernel')
        return whole(trial, *args)

    monkeypatch.setattr(bench.Trial, where, broken)
    options = ['--contexts=(16,)', '--batch_sizes=(1, 2, 3)', '--new_tokens=4', '--rounds=1']
    out = run(*DECODE, *options, '--variants=vanilla,svformer', '--out=broken.json')
    problems = [row.get('problem') for row in read_rows(work / 'broken.json')]
    assert problems == [None, None, None, 'no such', None, None]
    assert '| svformer | 2 | 16 | no such |' in out


def test_a_decoder_that_cannot_be_built_does_not_lose_the_others(work, monkeypatch):
    build = bench.Decoder.build

    def broken(decoder, *args):
        if decoder.name == 'svformer':
            raise torch.OutOfMemoryError('out of memory')
        return build(decoder, *args)

    monkeypatch.setattr(bench.Decoder, 'build', broken)
    options = ['--contexts=(16,)', '--batch_sizes=(1,)', '--new_tokens=4', '--rounds=1']
    run(*DECODE, *options, '--variants=vanilla,svformer', '--out=unbuilt.json')
    problems = [row.get('problem') for row in read_rows(work / 'unbuilt.json')]
    assert problems == [None, 'out of memory']


def test_an_interrupted_bench_decode_leaves_the_rows_that_were_finished(work, monkeypatch):
    round_ = bench.Trial.round

    def interrupted(trial, timed):
        if trial.batch == 2:
            raise KeyboardInterrupt
        return round_(trial, timed)

    monkeypatch.setattr(bench.Trial, 'round', interrupted)
    options = ['--contexts=(16,)', '--batch_sizes=(1, 2)', '--new_tokens=4', '--rounds=1']
    with pytest.raises(KeyboardInterrupt):
        run(*DECODE, *options, '--variants=vanilla,svformer', '--out=half.json')
    assert [row['batch'] for row in read_rows(work / 'half.json')] == [1, 1]


def test_a_decoder_that_cannot_be_built_keeps_its_line_in_a_given_memory():
    config = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=16, vocab_size=64)
    decoder = bench.Decoder('vanilla', bench.read_name('vanilla', config))
    decoder.problem = 'out of memory'
    (report,) = bench.measure_largest(decoder, 16, bench.DecodeConfig(memory_gib=1), None)
    assert report == {'name': 'vanilla', 'batch': 1, 'context': 16, 'problem': 'out of memory'}


@pytest.mark.parametrize('gib, share', [(10, 0.125), (200, 1.0)])
def test_a_memory_of_more_than_the_gpu_has_is_all_of_it(monkeypatch, gib, share):
    shares = []
    monkeypatch.setattr(bench, 'allocated', lambda machine: 0)
    monkeypatch.setattr(bench.Trial, 'grow', lambda trial: setattr(trial, 'batch', 0))
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda: (0, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, 'set_per_process_memory_fraction', shares.append)
    decoder = SimpleNamespace(name='vanilla', problem=None, static=0)
    settings = bench.DecodeConfig(memory_gib=gib)
    assert bench.measure_largest(decoder, 16, settings, None) == []
    assert shares == [share, 1.0]


@pytest.mark.parametrize('most', [0, 1, 2, 3, 7, 8, 100])
def test_the_largest_batch_is_found_by_bisection(most):
    assert bench.largest(lambda batch: batch <= most) == most
