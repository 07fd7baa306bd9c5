"""
What a GPU would compile, launch and allocate, found out without one.

A stand-in for NVIDIA's driver and runtime lies under the CUDA build of torch: every kernel is
compiled, the caching allocator counts every byte, attention kernels are chosen as on the real device.
Nothing is computed and nothing is timed, so there is no speed and no value in these tables.

$ FOLDER/python tests/fakegpu.py rows                                   # the names of all rows
$ FOLDER/python tests/fakegpu.py measure --out=results/fakegpu/torch_2.13.json    # all that are missing
$ FOLDER/python tests/fakegpu.py measure --only=82m --out=...           # rows whose name has 82m in it
$ FOLDER/python tests/fakegpu.py table --out=...                        # the JSON as a table
$ TORCH_CUDNN_SDPA_DEPRIORITIZED= FOLDER/python tests/fakegpu.py kernels  # attention kernels, as on a GPU
FOLDER/python is the stand-in's interpreter. Each row is a process of its own, so that one that fails
loses no other, and is written as soon as it is measured.
"""

import contextlib
import ctypes
import json
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from configurator import choose, configure  # noqa: E402
from lib.files import first_line, one_line_errors, write_whole  # noqa: E402
from lib.machine import Machine  # noqa: E402
from lib.tables import markdown_table  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from train import (  # noqa: E402
    TrainConfig,
    attention_setting,
    checkpoint_blocks,
    compile_model,
    distribute,
    make_optimizers,
    train_step,
)

GIB = 2**30


@dataclass
class FakeConfig:
    out: str = 'results/fakegpu/table.json'  # the rows measured so far
    only: str = ''  # part of the names of the rows to measure


def all_rows():
    """{name: (what, arguments of train.py)}"""
    rows = {}

    def add(name, config, *options, what='train'):
        files = [str(ROOT / f'config/{file}.py') for file in config.split()]
        rows[name] = (what, [*files, *options])

    checkpointed = '--activation_checkpointing=True'
    for path in [*sorted(ROOT.glob('config/*_82m.py')), ROOT / 'config/gpt2_78m.py']:
        add(f'82m {path.stem.rpartition("_")[0]}', path.stem)
    for size in ('180m', '468m'):
        for name in ('vanilla', 'resformer'):
            add(f'{size} {name}', f'{name}_{size}')
    add('468m vanilla, budget 1', 'vanilla_468m', '--activation_memory_budget=1')
    # What fits a smaller GPU.
    for size, batches in (('180m', (16,)), ('468m', (16, 8))):
        for batch in batches:
            add(f'{size} vanilla, batch {batch}', f'vanilla_{size}', f'--batch_size={batch}')
        add(f'{size} vanilla checkpointed', f'vanilla_{size}', checkpointed)
    for length in (512, 2048, 8192, 32000, 64000):
        for name in ('vanilla', 'svformer'):
            config = f'{name}_82m'
            if length != 2048:
                config += f' seq_{length}'
                add(f'{length} {name}', config)
            add(f'{length} {name} checkpointed', config, checkpointed)
    add('82m vanilla eager', 'vanilla_82m', '--compile=False')
    for size in ('82m', '180m', '468m'):
        add(f'{size} vanilla, DDP of 8', f'vanilla_{size}', what='ddp')
    add('468m vanilla, batch 16, DDP of 8', 'vanilla_468m', '--batch_size=16', what='ddp')
    for name in ('vanilla', 'svformer', 'cla', 'svformer_gqa'):
        add(f'decoding {name}', f'{name}_82m', what='decode')
        add(f'decoding {name}, CUDA graphs', f'{name}_82m', what='decode in graphs')
    return rows


# --- one row --------------------------------------------------------------------------------------


def launches():
    """Launches so far of (matrix products, Triton kernels), which the stand-in counts."""
    counter = ctypes.CDLL(os.environ['LD_PRELOAD'].split(':')[0])
    return [counter.shim_count(1), counter.shim_count(2)]


def launches_since(before):
    return [after - count for after, count in zip(launches(), before, strict=True)]


@contextlib.contextmanager
def traffic():
    """A list that gets the gigabytes that each compiled kernel reads and writes while it runs, as the
    compiler counts them."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    moved = []
    run = CachingAutotuner.run

    def counted(kernel, *args, **options):
        moved.append(kernel.inductor_meta.get('kernel_num_gb') or 0.0)
        return run(kernel, *args, **options)

    CachingAutotuner.run = counted
    try:
        yield moved
    finally:
        CachingAutotuner.run = run


def peak_of(act):
    """(result, peak GiB) of what act() allocates."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = act()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() / GIB


def graphs_compiled():
    return torch._dynamo.utils.counters['stats']['unique_graphs']


def empty_model(config):
    """A model on the GPU whose weights are what memory holds: its seeded ones take minutes."""
    GPT.init_weights = lambda self, seed: None
    with torch.device('cuda'):
        return GPT(config)


def measure_training(settings, config, distributed):
    # The compiler then notes what each kernel reads and writes.
    torch._inductor.config.benchmark_kernel = True
    if distributed:
        fake_process_group()
    machine = Machine('cuda', 'float16', attention=attention_setting(settings, config))
    model = empty_model(config)
    optimizers, scaler = make_optimizers(model, settings), machine.scaler()
    if settings.activation_checkpointing:
        checkpoint_blocks(model)
    wrapped = distribute(compile_model(model, settings), machine)
    if distributed:
        wrapped.register_comm_hook(None, local_bucket)
    size = (2, settings.batch_size, config.block_size)
    batch = torch.zeros(size, dtype=torch.int64, device='cuda')

    def step():
        train_step(wrapped, optimizers, scaler, machine, lambda: batch, 2, settings.grad_clip)

    step()
    # DistributedDataParallel cuts the graph.
    whole = 1 if settings.compile else 0
    assert distributed or graphs_compiled() == whole, 'the model is not one graph'
    before = launches()
    with traffic() as moved:
        _, peak = peak_of(step)
    numbers = {
        'batch': settings.batch_size,
        'length': config.block_size,
        'launches_of_two_micro_steps': launches_since(before),
        'compiled_gb_of_two_micro_steps': round(sum(moved), 1) if settings.compile else None,
        'step_gib': peak,
        'reserved_gib': torch.cuda.max_memory_reserved() / GIB,
    }
    if not distributed:
        numbers |= peaks_of_parts(wrapped, machine, batch)
        if settings.compile:
            numbers['recompiled'] = recompilations(wrapped, machine, batch, step)
    return numbers


def peaks_of_parts(wrapped, machine, batch):
    """Peak memory of a forward and of a backward pass, each alone."""

    def forward():
        with machine.autocast():
            return wrapped(*batch)[1]

    loss, forward_gib = peak_of(forward)
    _, backward_gib = peak_of(loss.backward)
    wrapped.zero_grad(set_to_none=True)
    return {'forward_gib': forward_gib, 'backward_gib': backward_gib}


def recompilations(wrapped, machine, batch, step):
    """Graphs compiled between training, evaluation with a short last batch, and training again, after
    each of them has been compiled once."""

    @torch.no_grad()
    def evaluate():
        wrapped.eval()
        with machine.autocast():
            wrapped(*batch)
            x, y = batch
            y = y.clone()
            y[1:] = -1  # as lib/data.py pads it
            wrapped(x, y)
        wrapped.train()

    evaluate()
    compiled = graphs_compiled()
    for act in (step, evaluate, step):
        act()
    return graphs_compiled() - compiled


def print_kernels():
    """Which attention kernel each variant gets in FP16. The stand-in itself must run flash instead of
    cuDNN, so this only asks for the choice."""
    machine = Machine('cuda', 'float16')
    print('| row | kernel |\n|---|---|')
    for name, (_, words) in all_rows().items():
        if name.startswith('82m'):
            _, config = configure(TrainConfig, GPTConfig, argv=words)
            shape = (config.n_head, config.kv_heads, config.head_size, config.block_size)
            print(f'| {name} | {machine.attention_kernel(*shape)} |', flush=True)


def fake_process_group():
    """Eight processes, of which only this one exists."""
    import torch.testing._internal.distributed.fake_pg as fake_pg

    os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='8')
    store = fake_pg.FakeStore()
    torch.distributed.init_process_group('fake', rank=0, world_size=8, store=store)


def local_bucket(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def measure_decoding(config, graphs):
    model = empty_model(config).half().eval()
    options = {'mode': 'reduce-overhead'} if graphs else {}
    one_token = torch.compile(model, fullgraph=True, **options)
    cache = model.new_cache(8, config.block_size)
    prompt = torch.zeros((8, 128), dtype=torch.int64, device='cuda')

    def decode():
        one_token(prompt[:, :1], cache=cache, last_only=True)

    with torch.no_grad():
        model(prompt, cache=cache, last_only=True)
        for _ in range(3):
            decode()
        compiled, before = graphs_compiled(), launches()
        _, peak = peak_of(decode)
        counts = launches_since(before)
        decode()
    return {
        'batch': 8,
        'length': config.block_size,
        'launches_per_token': counts,
        'step_gib': peak,
        'recompiled': graphs_compiled() - compiled,
    }


def measure(row):
    what, words = all_rows()[row]
    settings, config = configure(TrainConfig, GPTConfig, argv=words)
    if what.startswith('decode'):
        return measure_decoding(config, graphs='graphs' in what)
    return measure_training(settings, config, distributed=what == 'ddp')


# --- all rows ------------------------------------------------------------------------------------


def measure_all(settings):
    out = Path(settings.out)
    table = {'torch': torch.__version__, 'device': torch.cuda.get_device_name(), 'rows': {}}
    if out.exists():
        table = json.loads(out.read_text())
    for name in all_rows():
        is_missing = 'problem' in table['rows'].get(name, ['problem'])
        if is_missing and settings.only in name:
            table['rows'][name] = measure_apart(name)
            write_whole(out, json.dumps(table, indent=1) + '\n')
            print(name, table['rows'][name], flush=True)


def measure_apart(name):
    """A row's numbers from a process of its own, or its problem."""
    with ProcessPoolExecutor(1, get_context('spawn')) as process:
        try:
            return process.submit(measure, name).result()
        except Exception as error:
            traceback.print_exc()
            return {'problem': first_line(error)[:300]}


def print_table(settings):
    table = json.loads(Path(settings.out).read_text())
    print(f'torch {table["torch"]}, {table["device"]}\n')
    columns = ['row', 'batch x length', 'forward', 'backward', 'step GiB', 'reserved']
    columns += ['products', 'Triton', 'GB', 'recompiled']
    lines = []
    for name in all_rows():
        row = table['rows'].get(name, {'problem': 'not measured yet'})
        if 'problem' in row:
            lines.append([name, row['problem']])
            continue
        counts = row.get('launches_of_two_micro_steps') or row.get('launches_per_token')
        cells = [name, f'{row["batch"]} x {row["length"]:,}']
        for key in ('forward_gib', 'backward_gib', 'step_gib', 'reserved_gib'):
            cells.append(f'{row[key]:.1f}' if key in row else '')
        cells += [str(count) for count in counts]
        cells.append(str(row.get('compiled_gb_of_two_micro_steps') or ''))
        cells.append(str(row.get('recompiled', '')))
        lines.append(cells)
    print(markdown_table(columns, lines, text_columns=(0, 1)))


def main():
    with one_line_errors():
        modes = {mode: (FakeConfig,) for mode in ('rows', 'measure', 'kernels', 'table')}
        mode, (settings,) = choose(modes, __doc__)
        if mode == 'rows':
            print('\n'.join(all_rows()))
        elif mode == 'kernels':
            print_kernels()
        elif mode == 'table':
            print_table(settings)
        else:
            measure_all(settings)


if __name__ == '__main__':
    main()
