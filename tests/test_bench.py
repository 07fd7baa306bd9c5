"""bench.py: what a table holds, what is refused, and what survives a failure."""

import re
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import assert_one_line, read_json
from programs import program, table
from runs import ranks, run_main
from torch.optim import AdamW

import bench
import train
from hub.convert import llama_settings
from lib.machine import Machine
from lib.muon import Muon
from model import GPTConfig

SHAPE = dict(n_layer=4, n_head=2, n_embd=16, block_size=16, vocab_size=320)
ROUNDS = ['--device=cpu', '--rounds=2', '--warmup=1']
TINY = [*(f'--{name}={value}' for name, value in SHAPE.items()), *ROUNDS, '--batch_size=2']
DECODE = ['decode', *TINY[:-1], '--contexts=(8, 16)']
EAGER = '--compile=False'


def run(*words):
    """What bench.py with these arguments, in this process, prints on stdout and stderr."""
    status, out, err = program(bench.main, *words)
    assert status == 0, status
    return out, err


def read_rows(path):
    return read_json(path)['rows']


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that ran, cut into forward and backward as for inductor, without its code generation,
    which takes most of the time."""
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition

    ran = []

    def compile_fx(graph, inputs, **options):
        call = aot_eager_decomp_partition(graph, inputs)

        def run(*args):
            ran.append(graph)
            return call(*args)

        return run

    if not torch.cuda.is_available():
        monkeypatch.setattr('torch._inductor.compile_fx.compile_fx', compile_fx)
    names = ('recompile_limit', 'accumulated_recompile_limit', 'automatic_dynamic_shapes')
    torch.compiler.reset()
    with torch._dynamo.config.patch({name: getattr(torch._dynamo.config, name) for name in names}):
        bench.compile_rows_apart()
        yield ran
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(bench, 'NEW_TOKENS', 4)


# --- training ------------------------------------------------------------------------------------


def test_whatever_was_imported_before_nothing_is_compiled_to_wrong_kernels(graphs):
    from torch._inductor import config

    def compile_model():
        train.compile_model(torch.nn.Linear(1, 1), train.TrainConfig(compile=True))

    for prepare in (compile_model, bench.compile_rows_apart):
        with config.patch({'triton.mix_order_reduction': True}):
            prepare()
            assert not config.triton.mix_order_reduction


def test_the_table_and_the_json_have_every_row(work):
    names = ['vanilla', 'svformer', 'gqa+n_kv_head=1+q_residual=True', 'vanilla+mode=default']
    out, err = run(*TINY, EAGER, f'--variants={",".join(names)}', '--out=results/bench.json')
    # Long before the table, each row's first step is told.
    assert re.findall(r'(\S+): [\d.]+ s\n', err) == names
    rows = read_rows(work / 'results/bench.json')
    assert [row['name'] for row in rows] == names
    assert all(len(row['seconds']) == 2 and row['tok_per_s'] > 0 for row in rows)
    for row, (name, ms, _, _, speed, mfu, peak, ratio) in zip(rows, table(out)[2:], strict=True):
        assert (name, mfu, peak) == (row['name'], 'n/a', 'n/a')
        assert (ms, speed) == (f'{row["ms_per_step"]:,.1f}', f'{row["tok_per_s"]:,.0f}')
        assert ratio == f'{row["x vanilla"]:.3f}'


def test_the_numbers_follow_from_the_seconds():
    settings = bench.BenchConfig(batch_size=3, micro_steps=2)
    rows = [bench.Row(name, settings, GPTConfig(**SHAPE)) for name in ('vanilla', 'b')]
    for row, seconds in zip(rows, ([1.0] * 4, [2.0, 2.0, 4.0, 2.0]), strict=True):
        row.machine = SimpleNamespace(world_size=8, peak_flops=lambda: 1e4)
        row.seconds, row.flops_per_token = seconds, 100
    _, slow = bench.compared(rows)
    tokens = 8 * 3 * 2 * 16
    assert slow['tok_per_s'] == tokens / 2 and slow['x vanilla'] == 0.5
    assert slow['mfu'] == pytest.approx(100 * tokens / 2 / 8 / 1e4)
    assert slow['spread'] == 0.5 / 2  # quartiles 2 and 2.5


def test_a_step_has_as_many_micro_batches_as_are_counted(monkeypatch):
    monkeypatch.setattr(bench, 'train_step', Mock())
    row = bench.Row('vanilla', bench.BenchConfig(micro_steps=3), GPTConfig(**SHAPE))
    row.parts, row.machine = (None, [], None), Machine('cpu')
    row.act(None)
    assert bench.train_step.call_args.args[5:] == (3, train.TrainConfig.grad_clip)


def test_what_decodes_follows_from_the_seconds_of_its_last_tokens():
    config = GPTConfig(**SHAPE)
    row = bench.Decoder(
        'vanilla', bench.DecodeConfig(), config, batch=3, context=bench.NEW_TOKENS + 8
    )
    row.prefill, row.seconds = [4.0, 2.0], [0.5]
    row.parts = None, None, SimpleNamespace(nbytes=7)
    numbers = row.numbers(0.5)
    assert numbers['prefill_tok_per_s'] == 3 * 8 / 2 and numbers['cache_bytes'] == 7
    assert numbers['tok_per_s'] == 3 * bench.NEW_TOKENS / 0.5
    assert numbers['ms_per_token'] == 500 / bench.NEW_TOKENS


def test_a_step_that_takes_minutes_on_a_cpu_is_announced(capsys):
    for batch_size, is_said in ((32, True), (1, False)):
        settings = bench.BenchConfig(batch_size=batch_size)
        bench.check_start(settings, GPTConfig(), Machine('cpu'))
        assert ('--batch_size=1' in capsys.readouterr().err) == is_said


def test_of_all_variants_those_that_cannot_have_the_shape_are_left_out(capsys):
    settings, machine = bench.BenchConfig(variants='all', compile=False), Machine('cpu')
    names = [name for name, *_ in bench.row_recipes(settings, GPTConfig(**SHAPE), machine)]
    left_out = re.findall('^note: left out (.+?):', capsys.readouterr().err, re.M)
    assert {*names, *left_out} == {*bench.VARIANTS} and 'vanilla' in names and 'gqa' in left_out


def test_two_processes_count_the_tokens_of_both_and_print_one_table(work):
    options = ['--variants=svformer', '--profile=both', '--out=two.json']
    (first, out, err), second = ranks(2, run_main, bench.main, *TINY, EAGER, *options)
    assert first == second[0] == 0, err
    assert out.count('ms_per_step') == 1 and second[1] == ''
    (row,) = read_rows(work / 'two.json')
    assert row['tok_per_s'] * row['ms_per_step'] / 1e3 == pytest.approx(2 * 2 * 16)


# --- the peer ------------------------------------------------------------------------------------


def test_the_peer_is_timed_compiled_and_not(work):
    pytest.importorskip('transformers')
    shape, machine = GPTConfig(**SHAPE), Machine('cpu')
    settings = bench.BenchConfig(variants='vanilla', peers='hf', activation_memory_budget=0.9)
    rows = bench.row_recipes(settings, shape, machine)
    compiled = {name: own.compile for name, own, _, _ in rows}
    assert compiled == {'vanilla': True, 'hf': True, 'hf+compile=False': False}
    assert bench.read_name('hf+n_kv_head=1', settings, shape)[1].n_kv_head == 1
    name = 'vanilla+v_residual=first+token+residual_layers=(1,)'
    _, both, _ = bench.read_name(name, settings, shape)
    assert (both.v_residual, both.residual_layers) == ('first+token', (1,))

    run(*TINY, EAGER, '--variants=vanilla', '--peers=hf', '--n_layer=1', '--out=hf.json')
    ours, theirs = read_rows(work / 'hf.json')
    assert theirs['name'] == 'hf' and ours['x vanilla'] == theirs['x hf'] == 1
    assert ours['x hf'] > 0 and theirs['x vanilla'] > 0


def test_the_peer_is_llama_of_our_shape_without_a_mask_compiled_or_not():
    """A mask keeps the fast kernels away, and the comparison would not be like against like."""
    transformers = pytest.importorskip('transformers')
    config = GPTConfig(**{**SHAPE, 'n_layer': 1})
    theirs = bench.HuggingFaceLlama(config)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_settings(config)))
    plain.load_state_dict(theirs.llama.state_dict())
    calls = []

    def compiler(graph, inputs):
        for node in graph.graph.nodes:
            if getattr(node.target, '__name__', '') == 'scaled_dot_product_attention':
                calls.append((node.kwargs['attn_mask'], node.kwargs['is_causal']))
        return graph

    x = torch.arange(16).view(2, 8)
    _, eager = theirs(x, x)
    _, compiled = torch.compile(theirs, backend=compiler)(x, x)
    assert calls == [(None, True)]
    torch.testing.assert_close([eager, compiled], 2 * [plain(input_ids=x, labels=x).loss])


# --- a row's own settings ------------------------------------------------------------------------


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_step_of(name, machine, config, batch):
    """(what an update of plain SGD leaves in the weights, bytes kept for the backward pass)"""
    row = bench.Row(name, *bench.read_name(name, bench.BenchConfig(), config))
    row.build(machine)
    model, _, scaler = row.parts
    row.parts = model, [torch.optim.SGD(model.parameters(), 1.0, fused=True)], scaler
    before = weights(model)
    kept = []

    def keep(tensor):
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        row.step(batch)
    return weights(model) - before, sum(kept)


OWN = ['compile=False', 'activation_memory_budget=0.9']
ON_GPU = torch.cuda.is_available()
OF_GPUS = ['attention=flash', 'attention=cudnn', 'mode=max-autotune']


def test_a_row_has_the_optimizer_of_its_variant_unless_told_otherwise():
    kinds = {
        ('vanilla', ''): [AdamW],
        ('vanilla+optimizer=muon', 'adamw'): [AdamW, Muon],
        ('modern', ''): [AdamW, Muon],
        ('modern', 'adamw'): [AdamW],
        ('modern+optimizer=adamw', ''): [AdamW],
    }
    machine = Machine('cpu')
    for (name, optimizer), kind in kinds.items():
        settings = bench.BenchConfig(compile=False, optimizer=optimizer)
        row = bench.Row(name, *bench.read_name(name, settings, GPTConfig(**SHAPE)))
        row.build(machine)
        _, optimizers, _ = row.parts
        assert list(map(type, optimizers)) == kind, name


@pytest.mark.parametrize('variant', ['neutreno_resformer'] + ['cla_gqa'] * ON_GPU)
def test_every_setting_of_a_row_takes_the_same_step(graphs, variant):
    """Loss and gradients: what an update leaves in the weights, to a part of the largest change. No two
    rows share compiled code, and a budget keeps less for the backward pass."""
    machine = Machine()
    width = 512 if ON_GPU else 32  # cuDNN's kernels do not take a head size of 4
    config = GPTConfig(n_layer=2, vocab_size=96, n_head=8, n_embd=width, block_size=32)
    x, y = torch.randint(96, (2, 3, 32), device=machine.device)
    expected, most = train_step_of(variant, machine, config, (x, y))
    of_vanilla = set(graphs)
    for setting in OWN + OF_GPUS * ON_GPU:
        graphs.clear()
        change, kept = train_step_of(f'{variant}+{setting}', machine, config, (x, y))
        tolerance = 2e-2 if ON_GPU else 1e-5
        assert (change - expected).abs().max() < tolerance * expected.abs().max(), setting
        assert not of_vanilla & set(graphs)
        if setting.startswith('activation'):
            assert kept < most, setting


def test_the_peak_of_a_row_with_cuda_graphs_has_what_the_graphs_hold(monkeypatch):
    """Tensors within a graph are not allocated anew when it runs: torch's own peak lacks them."""
    segments = [
        {'segment_pool_id': (0, 0), 'total_size': 1000, 'allocated_size': 0},
        {'segment_pool_id': (0, 1), 'total_size': 500, 'allocated_size': 300},
        {'segment_pool_id': (0, 2), 'total_size': 70, 'allocated_size': 0},
    ]
    monkeypatch.setattr(torch.cuda, 'memory_snapshot', lambda: segments)
    assert bench.idle_in_graphs() == 270


def test_the_clock_waits_until_the_device_has_done_its_work(monkeypatch):
    """Work is only queued on a GPU: without waiting, the clock would time the queueing."""
    waits = []
    monkeypatch.setattr(torch.accelerator, 'synchronize', lambda: waits.append('waited'))
    seconds = bench.stopwatch(SimpleNamespace(kind='cuda'))
    assert len(waits) == 1  # for the work of before
    assert seconds() >= 0 and len(waits) == 2


# --- decoding ------------------------------------------------------------------------------------


def test_decoding_reports_every_size_and_its_cache(work):
    tensors = {'vanilla': 8, 'svformer': 5}  # k and v of four layers; four k and one v
    variants = f'--variants={",".join(tensors)}'
    out, _ = run(*DECODE, EAGER, '--batch_sizes=(1, 2)', variants, '--out=decode.json')
    rows = read_rows(work / 'decode.json')
    assert [(row['name'], row['batch'], row['context']) for row in rows] == [
        (name, batch, context) for context in (8, 16) for batch in (1, 2) for name in tensors
    ]
    for row in rows:
        size = row['batch'] * row['context'] * 16 * 4
        assert row['cache_bytes'] == tensors[row['name']] * size
        assert f'| {row["prefill_tok_per_s"]:,.0f} | {row["ms_per_token"]:.2f} |' in out
        assert f'| {row["cache_bytes"]:,} |' in out


def test_each_size_has_one_graph_which_decodes_every_token(graphs, monkeypatch):
    """And the prefill, in chunks of any length, is not compiled."""
    monkeypatch.setattr(bench, 'PREFILL_CHUNK', 3)
    sizes = ['--n_layer=1', '--contexts=(16,)', '--batch_sizes=(1, 2)']
    run(*DECODE, *sizes, '--variants=vanilla')
    assert len(graphs) == 2 * 3 * 4 and len(set(graphs)) == 2


def test_several_processes_do_not_decode(monkeypatch):
    monkeypatch.setenv('RANK', '0')
    assert_one_line(program(bench.main, *DECODE)[0], 'decode', 'torchrun')


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    'words, named',
    [
        (['--variants=vanilla,resformr'], ['resformr', 'resformer']),
        (['--variants=vanilla+v_residul=True'], ['vanilla+', 'v_residul', "'v_residual'"]),
        (['--variants=vanilla+batch_size=64'], ['--batch_size']),
        (['--variants=vanilla,gqa'], ['gqa', 'n_head=2']),
        (['--variants=vanilla+attention=flsh'], ['flsh', 'flash', 'cudnn']),
        (['--variants=vanilla+compile=False+mode=max-autotune'], ['mode', 'compile']),
        (['--compile=False', '--activation_memory_budget=0.9'], ['memory_budget', 'compile']),
        (['--variants=hf+share_v=True'], ['hf', 'share_v']),
        (['--variants=hf+optimizer=muon'], ['hf', 'optimizer']),
        (['--v_residual=True'], ['v_residual', '--variants=vanilla+']),
        (['--learning_rate=1e-3'], ["unknown setting 'learning_rate'"]),  # a config may hold it
        (['--out=data'], ['data', 'folder']),
        (['--profile=a_file'], ['a_file']),
        ([*DECODE, '--contexts=(64,)'], ['contexts', 'block_size=16']),
        ([*DECODE, '--batch_sizes=(0,)'], ['batch_sizes=(0,)']),
        ([*DECODE, '--variants=hf'], ['hf', 'vanilla']),
        ([*DECODE, '--variants=vanilla+optimizer=muon'], ['optimizer']),
    ],
)
def test_a_mistake_is_one_line(work, words, named):
    if 'hf' in words[0]:
        pytest.importorskip('transformers')
    (work / 'a_file').write_text('')
    mode = [] if words[0] == 'decode' else TINY
    status, _, err = program(bench.main, *mode, *words)
    assert_one_line(status, *named)
    assert err == ''


# --- what fails ----------------------------------------------------------------------------------


def failing(monkeypatch, where, error, fails):
    """Let a method of Row raise for the rows for which fails(row)."""
    whole = getattr(bench.Row, where)

    def method(row, *args):
        if fails(row):
            raise error
        return whole(row, *args)

    monkeypatch.setattr(bench.Row, where, method)


@pytest.mark.parametrize('where', ['build', 'step'])
def test_a_row_that_fails_loses_no_other(work, monkeypatch, where):
    """Decoding loses one size alone."""
    is_cla = lambda row: row.name == 'cla' and row.about.get('batch', 2) == 2  # noqa: E731
    failing(monkeypatch, where, AssertionError('no such kernel\nat all'), is_cla)
    sizes = ['--contexts=(16,)', '--batch_sizes=(1, 2)']
    for words, failed in ((TINY, [1]), ([*DECODE, *sizes], [4])):
        out, _ = run(*words, EAGER, '--variants=vanilla,cla,resformer', '--out=fails.json')
        rows = read_rows(work / 'fails.json')
        assert [i for i, row in enumerate(rows) if 'problem' in row] == failed
        assert ' | no such kernel |' in out


def test_a_row_that_fails_leaves_its_memory_to_the_others():
    row = bench.Row('vanilla', bench.BenchConfig(compile=False), GPTConfig(**SHAPE))
    bench.attempt(row, row.build, Machine('cpu'))
    weights = [weakref.ref(p) for p in row.parts[0].parameters()]
    bench.attempt(row, row.step, 'no batch')
    assert row.problem and not any(weight() is not None for weight in weights)


def test_without_a_row_that_can_be_timed_the_bench_fails_in_one_line(monkeypatch):
    failing(monkeypatch, 'build', OSError('no such kernel\nat all'), lambda row: True)
    assert_one_line(program(bench.main, *TINY, EAGER)[0], 'no row', 'no such kernel')


def test_memory_that_lacks_in_one_of_several_processes_ends_them_all(monkeypatch):
    """The others would wait in an all-reduce that never comes."""
    failing(monkeypatch, 'step', torch.OutOfMemoryError('out of memory'), lambda row: True)
    monkeypatch.setattr(bench.dist, 'is_initialized', lambda: True)
    status, _, _ = program(bench.main, *TINY, EAGER, '--variants=cla')
    assert_one_line(status, 'cla', 'out of memory')


def test_an_interrupted_bench_leaves_the_rounds_that_were_finished(work, monkeypatch):
    is_third = lambda row: row.name == 'cla' and len(row.seconds) == 2  # noqa: E731
    failing(monkeypatch, 'step', KeyboardInterrupt(), is_third)
    options = ['--rounds=5', '--variants=vanilla,cla', '--out=half.json']
    assert program(bench.main, *TINY, EAGER, *options)[0] == 130
    assert [len(row['seconds']) for row in read_rows(work / 'half.json')] == [2, 2]


# --- a profile -----------------------------------------------------------------------------------


def test_a_profile_has_a_trace_and_the_costliest_kernels_of_each_row(work):
    sizes = ['--contexts=(16,)', '--batch_sizes=(2,)']
    out, _ = run(*DECODE, *sizes, EAGER, '--variants=vanilla,cla', '--profile=traces')
    names = ['vanilla_2_16', 'cla_2_16']
    assert [line for line in out.splitlines() if line in names] == names
    assert out.count('aten::mm') >= 2
    for name in names:
        assert read_json(work / f'traces/{name}.json')['traceEvents']
