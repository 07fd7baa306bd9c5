"""
Throughput, side by side: training steps of the variants and of Hugging Face's Llama, and decoding
with the KV cache.

The 82M vanilla, ResFormer and SVFormer; all variants of another size, and transformers' Llama; a
size for two CPU cores; decoding:
$ python bench.py
$ python bench.py config/vanilla_180m.py --variants=all --peers=hf --out=results/bench.json
$ python bench.py --batch_size=2 --block_size=512 --peers=hf
$ python bench.py decode --batch_sizes="(1, 32)" --contexts="(2048, 65536)" --block_size=65536

Each row times the step that train.py takes: forward, backward, scaler, clipping, AdamW. Rows take
turns (A B C A B C), so that whatever else the machine does hits all of them; ratios are medians
over rounds of one row against another. --out is written again after each round: if a bench is
interrupted, it holds the rounds that have finished. --profile=FOLDER traces one more step of each row
and prints where its time goes, beside what was expected before any GPU was seen.

Decoding on a GPU means CUDA graphs. Unless --attention=cudnn asks for it, cuDNN's attention is left
out, as in sample.py. Only the decoding is compiled, not the prefill before it.

A variant is config/NAME_82m.py without its shape: all rows take theirs from the command line's
config. A + adds a field, as in vanilla+q_residual=True. Levers come after colons, as in
vanilla:flash:chunk=8192:
eager                   not compiled
mode=reduce-overhead    a mode of torch.compile, such as max-autotune-no-cudagraphs; this one uses
                        CUDA graphs, which cannot sum gradients over several micro-steps
budget=0.9              the compiler stores this share of what the backward pass reads, and
                        recomputes the rest
flash, cudnn, efficient the attention kernel
chunk=8192              rows of logits that are in memory at once
checkpointed            train.py's --activation_checkpointing
half                    the residual stream in half precision, too, instead of in fp32
ddp-first               under torchrun: compile what DistributedDataParallel has wrapped, not the
                        other way round
ddp-whole               under torchrun: compile one graph, rather than one for each bucket of
                        DistributedDataParallel, whose sums then no longer overlap with the backward pass
bucket=100, static      under torchrun: DistributedDataParallel's buckets of 100 MB; static_graph,
                        which cannot sum gradients over several micro-steps either
"""

import contextlib
import copy
import gc
import os
import shlex
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config

from configurator import choose, first_line, one_line_errors
from data import Dataset, Loader, TrainingRows
from kernel_times import (
    NAMES,
    expected_by_class,
    kernels,
    print_classes,
    print_costliest,
    spent_by_class,
)
from levers import OF_COMPILER, OF_DDP, VARIANTS, halve_residual_stream, read_name, split_names
from machine import Machine, check_compiler
from model import GPT, GPTConfig, refuse
from rundir import check_out, provenance, save_numbers
from tables import markdown_row, markdown_table
from train import (
    TrainConfig,
    attention_setting,
    checkpoint_blocks,
    distribute,
    make_optimizer,
    train_step,
)

# --- settings ------------------------------------------------------------------------------------


@dataclass
class BenchConfig(TrainConfig):
    variants: str = 'vanilla,resformer,svformer'  # config/NAME_82m.py, or all; +field=value; :lever
    peers: str = ''  # hf: transformers' Llama of the same shape, compiled and uncompiled
    micro_steps: int = 1  # micro-batches a step, in place of gradient_accumulation_steps
    rounds: int = 10  # timed steps of each row
    warmup: int = 3  # untimed steps before; the first compiles
    real_data: bool = False  # batches of the dataset, and the time spent waiting for them
    profile: str = ''  # a folder for a trace of one more step; prints the costliest kernels
    out: str = ''  # write the table's numbers here, as JSON

    def __post_init__(self):
        super().__post_init__()
        refuse(min(self.micro_steps, self.rounds) < 1, 'micro_steps and rounds must be at least 1')
        refuse(self.warmup < 0, f'warmup={self.warmup} must be at least 0')
        refuse(self.peers not in ('', 'hf'), f"peers={self.peers!r} is not '' or 'hf'")


@dataclass
class DecodeConfig(BenchConfig):
    batch_sizes: tuple = (1, 8)  # texts decoded at once
    contexts: tuple = (2048,)  # tokens of a text at the end; block_size at most
    new_tokens: int = 32  # timed tokens, the last ones of the context
    prefill_chunk: int = 2048  # tokens of a prefill's forward pass
    memory_gib: float = 0.0  # also time the largest batch that fits into this much of a GPU

    def __post_init__(self):
        super().__post_init__()
        if self.attention == 'auto':
            self.attention = 'flash'  # as sample.py and evaluate.py do: cuDNN plans for each shape
        refuse(
            min(self.prefill_chunk, self.new_tokens) < 1,
            'prefill_chunk and new_tokens must be at least 1',
        )
        for name in ('batch_sizes', 'contexts'):
            sizes = getattr(self, name)
            are_counts = all(type(size) is int and size >= 1 for size in sizes)
            refuse(
                not sizes or not are_counts,
                f'{name}={sizes} must be whole numbers of at least 1, such as "(1, 8)"',
            )
        refuse(self.memory_gib < 0, f'memory_gib={self.memory_gib} must be at least 0')
        for name in OF_TRAINING_STEPS.split():
            value = getattr(self, name)
            refuse(
                value != getattr(BenchConfig, name),
                f'{name}={value} does nothing in bench.py decode, which takes no training steps',
            )


# What only training steps have. So is batch_size, but training's configs set it.
OF_TRAINING_STEPS = 'micro_steps real_data profile activation_checkpointing'


# --- what both tables are made of ----------------------------------------------------------------


def start(settings, config):
    """(Machine, the GPTConfig whose shape all rows have) of a bench."""
    machine = Machine(
        settings.device,
        settings.dtype,
        settings.backend,
        tf32=True,
        attention=settings.attention,
    )
    functorch_config.activation_memory_budget = settings.activation_memory_budget
    machine.agree(compiler_problem(settings, machine))
    if settings.profile:
        Path(settings.profile).mkdir(parents=True, exist_ok=True)
    if settings.out:
        check_out(settings.out)
        Path(settings.out).parent.mkdir(parents=True, exist_ok=True)
    variant = config.variant()
    if variant and machine.is_first:
        fields = [f'{name}={value}' for name, value in variant.items()]
        advice = shlex.quote(f'--variants=vanilla+{"+".join(fields)}')
        print(
            f'note: all rows share the shape, but not {", ".join(variant)}: {advice}',
            file=sys.stderr,
        )
    return machine, GPTConfig(**config.shape())


def compiler_problem(settings, machine):
    """The error of a process that cannot compile, which must end them all; None where it can."""
    try:
        if settings.compile:
            check_compiler(machine)
    except ValueError as error:
        return error
    return None


def row_names(settings):
    names = list(VARIANTS)
    if settings.variants != 'all':
        names = split_names(settings.variants)
    if settings.peers:
        # Without the compiler, both would be the same.
        names += ['hf', 'hf:eager'] if settings.compile else ['hf:eager']
    return names


def recipes(settings, shape, machine):
    """[(name, Recipe)] of the table's rows. Of all variants, those that cannot have this shape are left
    out."""
    result = []
    for name in row_names(settings):
        try:
            result.append((name, read_name(name, shape)))
        except ValueError as error:
            if settings.variants != 'all' or name not in VARIANTS:
                raise
            machine.warn(f'note: left out {error}')
    return result


def compile_rows_apart():
    """Let the compiler make code of its own for every row and size.

    To the compiler, all rows are one piece of code. It would stop compiling it after a few of them,
    and the second batch size or length would be compiled for any size, which is slower.
    """
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    torch._dynamo.config.automatic_dynamic_shapes = False


def attempt(row, act, *args):
    """Let a row do something, unless it failed before. If it fails, only its problem is kept.

    Too little memory, a kernel that this device does not have, or a fault of the compiler must not
    lose the other rows.
    """
    if row.problem:
        return
    try:
        act(*args)
        return
    except Exception as error:
        traceback.print_exc()
        problem = first_line(error)[:100]
        if isinstance(error, torch.OutOfMemoryError) and dist.is_initialized():
            # The other processes wait in this row's all-reduce, and would for an hour.
            raise OSError(f'{row.name}: {problem}') from error

    # Past the `except`, and not before, nothing holds the failed step's tensors any more.
    row.drop()
    row.problem = problem
    gc.collect()  # its parts refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def stopwatch(machine):
    """Start a clock. The function returned gives the device's seconds since then.

    On CUDA, they are measured between two events on its stream.
    """
    machine.synchronize()
    if machine.kind != 'cuda':
        started = time.perf_counter()

        def seconds_on_the_clock():
            machine.synchronize()
            return time.perf_counter() - started

        return seconds_on_the_clock

    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()

    def seconds():
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return seconds


def allocated(machine):
    """Bytes of tensors on this process's GPU; 0 without one."""
    if machine.kind != 'cuda':
        return 0
    # cuBLAS's workspaces are no row's: CUDA graphs free them, and the next row sets them up anew.
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def idle_in_graphs():
    """Bytes that CUDA graphs hold in their pools for tensors within a graph.

    The allocator counts none of them as allocated once the graph is recorded. All graphs of
    a process share a pool.
    """
    idle = 0
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment['segment_pool_id']) != (0, 0):
            idle += segment['total_size'] - segment['allocated_size']
    return idle


def middle(times):
    """(median, interquartile range / median) of a list of seconds."""
    median = statistics.median(times)
    quartiles = [median] * 3
    if len(times) > 1:
        # Inclusive: the other method's quartiles of three times are the extremes, of two beyond both.
        quartiles = statistics.quantiles(times, n=4, method='inclusive')
    return median, (quartiles[2] - quartiles[0]) / median


def speed_relative_to(reference, times):
    """The median over rounds of another row's seconds divided by these."""
    return statistics.median(a / b for a, b in zip(reference, times, strict=True))


def cell(value, form):
    return 'n/a' if value is None else format(value, form)


def print_line(cells):
    print(markdown_row(cells), flush=True)


def print_head(about, columns):
    """What the table was measured with, and the names of its columns."""
    print('  '.join(f'{name}={value}' for name, value in about.items()) + '\n')
    print(markdown_table(columns, []))


def check_any_timed(reports):
    problems = [report['problem'] for report in reports if 'problem' in report]
    if problems and len(problems) == len(reports):
        raise ValueError(f'no row could be timed: {problems[0]}')


# --- training ------------------------------------------------------------------------------------


class Row:
    """One line of the training table: a model, its optimizer, its times."""

    def __init__(self, name, recipe):
        self.name = name
        self.recipe = recipe
        self.problem = None
        self.drop()

        self.seconds = []  # of each timed step
        self.waiting = []  # the share of them that was spent waiting for data
        self.first = None  # seconds of the first step, which compiles
        self.peak = None  # bytes on the GPU

    def drop(self):
        """Let go of everything that is large."""
        self.model = self.optimizer = self.scaler = None

    def build(self, settings, machine):
        before = allocated(machine)
        self.settings = settings
        config, levers = self.recipe.config, self.recipe.levers
        self.flops = self.recipe.flops_per_token()
        self.machine = copy.copy(machine)
        self.machine.attention = attention_setting(settings, config)  # dropout decides, too
        with self.pulled():
            self.kernel = self.machine.attention_kernel(
                config.n_head, config.kv_heads, config.head_size, config.block_size
            )

        model = self.recipe.make(settings.seed).to(machine.device)
        self.optimizer = make_optimizer(model, settings)
        self.scaler = machine.scaler()
        if levers.checkpointed or settings.activation_checkpointing:
            checkpoint_blocks(model)
        if levers.half:
            halve_residual_stream(model, getattr(torch, machine.dtype))
        if levers.ddp_first:
            self.model = levers.compile(distribute(model, machine, **levers.ddp), settings)
        else:
            self.model = distribute(levers.compile(model, settings), machine, **levers.ddp)
        self.static = allocated(machine) - before

    def pulled(self):
        """A context in which this row's levers are pulled, and its kernels chosen."""
        self.machine.choose_kernels()
        return self.recipe.levers.pulled()

    def step(self, next_batch, timed=False):
        waited = 0.0

        def batch():
            nonlocal waited
            begin = time.perf_counter()
            x, y = next_batch()
            waited += time.perf_counter() - begin
            return x, y

        others = allocated(self.machine) - self.static
        if self.machine.kind == 'cuda':
            torch.cuda.reset_peak_memory_stats()
        with self.pulled():
            seconds = stopwatch(self.machine)
            train_step(
                self.model,
                self.optimizer,
                self.scaler,
                self.machine,
                batch,
                self.settings.micro_steps,
                self.settings.grad_clip,
            )
            elapsed = seconds()
        if self.machine.kind == 'cuda':
            # The optimizer's state comes with the first step: from then on it belongs to this row.
            self.peak = torch.cuda.max_memory_allocated() - others
            self.static = allocated(self.machine) - others
            if self.recipe.levers.graphs:
                self.peak += idle_in_graphs()

        self.first = self.first or elapsed
        if timed:
            self.seconds.append(elapsed)
            self.waiting.append(waited / elapsed)

    def profile(self, next_batch, folder):
        """Trace a step into folder/<name>.json; print its ten costliest kernels, and their classes.

        All processes take the step, but only the first writes its trace.
        """
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.machine.kind == 'cuda':
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, record_shapes=True) as trace:
            self.step(next_batch)
        if self.machine.is_first:
            trace.export_chrome_trace(str(Path(folder, f'{self.name.replace(":", "-")}.json')))
        kind = self.machine.kind
        if not kernels(trace, kind):
            print(f'\n{self.name}: no kernel was traced; does this machine allow CUPTI to profile?')
            return
        print_costliest(self.name, trace, kind)
        spent = spent_by_class(trace, kind, self.recipe.config.vocab_size)
        print_classes(self.name, spent, self.expected())

    def expected(self):
        """{class of kernels: microseconds} expected of a step, from counted FLOPs and bytes; None where
        what is counted, a step in half precision that computes nothing twice, is not this row's."""
        settings, config, levers = self.settings, self.recipe.config, self.recipe.levers
        recomputes = (
            levers.checkpointed
            or 'budget' in levers.values
            or settings.activation_checkpointing
            or settings.activation_memory_budget < 1
        )
        if recomputes or self.machine.dtype == 'float32':
            return dict.fromkeys(NAMES)
        with torch.device('meta'):
            model = GPT(config)
        expected = expected_by_class(
            model, settings.batch_size, settings.micro_steps, self.machine, self.kernel
        )
        is_compiled = settings.compile and not levers.eager
        if levers.half or not is_compiled or self.recipe.kind == 'hf':
            # Their bytes were counted in our own compiled step, with its residual stream in fp32.
            expected['elementwise'] = None
        return expected

    def report(self, tokens, peak_flops, references):
        """The numbers of a row. references: {name: row} to compare with."""
        if self.problem:
            return {'name': self.name, 'problem': self.problem}
        median, spread = middle(self.seconds)
        speed = tokens / median
        ratios = {}
        for name, other in references.items():
            ratios[name] = speed_relative_to(other.seconds, self.seconds)
        return {
            'name': self.name,
            'ms_per_step': 1e3 * median,
            'spread': spread,
            'tok_per_s': speed,
            'mfu': self.flops * speed / peak_flops if peak_flops else None,
            'peak_gib': self.peak / 2**30 if self.peak else None,
            'attention_kernel': self.kernel,
            'speed_relative_to': ratios,
            'first_step_s': self.first,
            'waiting_for_data': statistics.median(self.waiting),
            'seconds': self.seconds,
        }


@contextlib.contextmanager
def batches(settings, shape, machine):
    """A function that gives the next (x, y): of the dataset, or the same random ones every time."""
    if not settings.real_data:
        size = (2, settings.batch_size, shape.block_size)
        fixed = torch.randint(shape.vocab_size, size, device=machine.device)
        yield lambda: fixed
        return

    dataset = Dataset(settings.dataset)
    dataset.check_vocabulary(shape.vocab_size)
    rows = TrainingRows(dataset, shape.block_size, settings.seed, settings.domain_weights)
    loader = Loader(
        rows,
        settings.batch_size,
        settings.micro_steps * machine.world_size,
        rank=machine.rank,
        world_size=machine.world_size,
        device=machine.device,
    )

    def next_batch():
        try:
            return loader.next()
        except Exception as error:
            # The row that happens to ask is not at fault: no other row gets a batch either.
            sys.exit(f'error: {first_line(error)}')

    try:
        yield next_batch
    finally:
        loader.close()


def bench_training(settings, config):
    """Time training steps, and print and write the table. Returns its numbers."""
    machine, shape = start(settings, config)
    note_ignored(settings, machine)
    rows = [Row(name, recipe) for name, recipe in recipes(settings, shape, machine)]
    for row in rows:
        check_levers(row, settings, machine)
    about = {
        **provenance(machine),
        'compile': settings.compile,
        'batch_size': settings.batch_size,
        **shape.shape(),
    }
    with batches(settings, shape, machine) as next_batch:
        for row in rows:
            attempt(row, row.build, settings, machine)
        for round_ in range(-settings.warmup, settings.rounds):
            timed = round_ >= 0
            for row in rows:
                attempt(row, row.step, next_batch, timed)
            if timed:
                reports = report_all(rows, settings, shape, machine)
                numbers = {**about, 'settings': asdict(settings), 'rows': reports}
                save_numbers(numbers, settings, machine)

        print_training(about, reports, settings)
        check_any_timed(reports)
        # At the end, because there may not be enough time for it.
        problems = profile_all(rows, next_batch, settings.profile) if settings.profile else []
    # The group of the processes must end after the rows: where the last DistributedDataParallel ends
    # it, gloo's thread and Python may wait for each other for ever.
    for row in rows:
        row.drop()
    gc.collect()
    machine.close()
    refuse(problems, f'no profile of {"; ".join(problems)}')
    return numbers


def profile_all(rows, next_batch, folder):
    """Trace a step of each row that was timed. Returns the problems of those that have no profile."""
    timed = [row for row in rows if not row.problem]
    for row in timed:
        attempt(row, row.profile, next_batch, folder)
    return [f'{row.name}: {row.problem}' for row in timed if row.problem]


def note_ignored(settings, machine):
    """Say that a step has micro_steps, where somebody has set train.py's number for it."""
    number = settings.gradient_accumulation_steps
    if number not in (settings.micro_steps, BenchConfig.gradient_accumulation_steps):
        machine.warn(
            f'note: gradient_accumulation_steps={number} does nothing here; a step has --micro_steps='
            f'{settings.micro_steps} in each process'
        )


def check_levers(row, settings, machine):
    """Refuse what a row's levers cannot do with these settings; name those that do nothing."""
    levers, micro_steps = row.recipe.levers, settings.micro_steps
    refuse(
        'static' in levers.values and micro_steps > 1,
        f'{row.name}: a static graph cannot sum gradients over micro_steps={micro_steps}; use 1, or '
        'drop static',
    )
    refuse(
        levers.graphs and settings.compile and micro_steps > 1,
        f'{row.name}: CUDA graphs overwrite the loss of the micro-step before, but micro_steps='
        f'{micro_steps}; use 1, or drop the mode',
    )
    refuse(
        settings.activation_checkpointing and row.recipe.kind == 'hf',
        f'{row.name}: activation_checkpointing is of our own rows; drop it, or --peers',
    )
    idle = {}
    if not machine.distributed:
        idle |= dict.fromkeys(OF_DDP, 'without torchrun')
    if not settings.compile:
        idle |= dict.fromkeys(OF_COMPILER, 'with compile=False')
    for name, where in idle.items():
        if name in levers.values and machine.is_first:
            print(f'note: {row.name}: {name} does nothing {where}', file=sys.stderr)


def report_all(rows, settings, shape, machine):
    whole = {row.name: row for row in rows if not row.problem}
    references = {name: whole[name] for name in ('vanilla', 'hf', 'hf:eager') if name in whole}
    micro_batches = settings.micro_steps * machine.world_size  # of a step, over all processes
    tokens = micro_batches * settings.batch_size * shape.block_size
    peak_flops = machine.peak_flops()
    if peak_flops:
        peak_flops *= machine.world_size
    return [row.report(tokens, peak_flops, references) for row in rows]


def print_training(about, reports, settings):
    whole = [report for report in reports if 'problem' not in report]
    references = whole[0]['speed_relative_to'] if whole else []
    columns = ['row', 'ms/step', 'spread', 'first step s', 'tok/s', 'MFU', 'peak GiB']
    print_head(about, columns + [f'x {name}' for name in references])
    for report in reports:
        if 'problem' in report:
            print_line([report['name'], report['problem']])
            continue
        cells = [
            report['name'],
            f'{report["ms_per_step"]:,.1f}',
            f'{report["spread"]:.1%}',
            f'{report["first_step_s"]:.1f}',
            f'{report["tok_per_s"]:,.0f}',
            cell(report['mfu'], '.1%'),
            cell(report['peak_gib'], '.2f'),
        ]
        print_line(cells + [f'{ratio:.3f}' for ratio in report['speed_relative_to'].values()])

    print('\nspread: interquartile range / median')
    print('x NAME: speed relative to NAME, median over rounds')
    print(
        'peak GiB: of tensors; with CUDA graphs also the pool that all graphs of this table share'
    )
    if settings.real_data and whole:
        waiting = max(report['waiting_for_data'] for report in whole)
        print(f'waiting for data: {waiting:.2%} of a step, the worst row')


# --- decoding ------------------------------------------------------------------------------------


class Decoder:
    """A row of the decoding table: a model, with its weights in half precision on a GPU."""

    def __init__(self, name, recipe):
        self.name = name
        self.recipe = recipe
        self.problem = None
        self.drop()
        lever = self.recipe.levers.of_training()
        refuse(lever, f'{name}: {lever} is a lever of training')

    def drop(self):
        self.model = self.one_token = None

    def build(self, settings, machine):
        before = allocated(machine)
        self.settings = settings
        self.machine = machine
        model = self.recipe.make(settings.seed)
        self.model = model.to(machine.device, getattr(torch, machine.dtype)).eval()
        config, levers = self.recipe.config, self.recipe.levers
        if machine.kind == 'cuda' and not levers.mode:
            levers.mode = 'reduce-overhead'  # CUDA graphs
        shape = (config.n_head, config.kv_heads, config.head_size, config.block_size)
        with levers.pulled():
            self.kernels = {
                'prefill': machine.attention_kernel(*shape),
                'decode': machine.attention_kernel(*shape, queries=1),
            }
        self.one_token = levers.compile(self.model, settings)
        self.static = allocated(machine) - before


class Trial:
    """A Decoder at one batch size and context: a cache, and the times of its rounds."""

    def __init__(self, decoder, batch, context):
        self.decoder = decoder
        self.name = decoder.name
        self.problem = decoder.problem
        self.batch = batch
        self.context = context
        self.drop()

        self.prefill = []  # seconds per token of each timed round
        self.decode = []  # seconds per step
        self.peak = None  # bytes on the GPU

    def drop(self):
        self.cache = self.idx = None

    def start(self):
        """Allocate the cache and the text."""
        machine, model = self.decoder.machine, self.decoder.model
        before = allocated(machine)
        size = (self.batch, self.context)
        self.cache = model.new_cache(*size)
        self.idx = torch.randint(model.config.vocab_size, size, device=machine.device)
        self.with_cache = self.decoder.static + allocated(machine) - before

    @torch.no_grad()
    def round(self, timed):
        """Prefill all but the last new_tokens of the context, and decode those one by one.

        The prefill is never compiled: a program that decodes would compile for every length of text.
        """
        machine, settings = self.decoder.machine, self.decoder.settings
        others = allocated(machine) - self.with_cache
        if machine.kind == 'cuda':
            torch.cuda.reset_peak_memory_stats()
        self.cache.position.zero_()
        prompt = self.context - settings.new_tokens
        seconds = stopwatch(machine)
        with self.decoder.recipe.levers.pulled():
            for chunk in self.idx[:, :prompt].split(settings.prefill_chunk, dim=1):
                self.decoder.model(chunk, cache=self.cache, last_only=True)
            prefilled = seconds()

            if machine.kind == 'cuda' and not timed:
                # The untimed rounds make the CUDA graphs, in a pool of their own. torch 2.11 does
                # not give it the memory that the prefill has left free.
                torch.cuda.empty_cache()
            seconds = stopwatch(machine)
            for t in range(prompt, self.context):
                token = self.idx[:, t : t + 1]
                logits, _ = self.decoder.one_token(token, cache=self.cache, last_only=True)
                logits.argmax(dim=-1)
            decoded = seconds()

        if timed:
            self.prefill.append(prefilled / (self.batch * prompt))
            self.decode.append(decoded / settings.new_tokens)
        if machine.kind == 'cuda':
            self.peak = torch.cuda.max_memory_allocated() - others
            if self.decoder.recipe.levers.graphs:
                self.peak += idle_in_graphs()

    def grow(self):
        """Take the largest batch with which a whole round fits; 0 where not even one text does.

        Whole rounds compile for every batch. Bisection tries many batches, and only the last chunk
        of a prefill, which takes the most memory. But the compiler and the CUDA graphs need memory,
        too: the batch shrinks until there is enough for all.
        """
        self.batch = largest(self.fits)
        while self.batch and not self.has_room(self.two_rounds):
            self.batch = int(0.95 * self.batch)

    def fits(self, batch):
        """Whether the last chunk of a prefill of this batch fits."""
        self.batch = batch
        return self.has_room(self.prefill_last_chunk)

    @torch.no_grad()
    def prefill_last_chunk(self):
        settings = self.decoder.settings
        prompt = self.idx[:, : self.context - settings.new_tokens]
        chunk = prompt[:, -settings.prefill_chunk :]
        self.cache.position.fill_(self.context - chunk.size(1))
        self.decoder.model(chunk, cache=self.cache, last_only=True)

    def two_rounds(self):
        """The first round makes the CUDA graphs; the second one prefills beside what they hold."""
        self.round(timed=False)
        self.round(timed=False)

    def has_room(self, act):
        """Whether there is enough memory to start and then to act. Lets go of the cache again."""
        try:
            self.start()
            act()
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            self.drop()
            gc.collect()
            torch.cuda.empty_cache()

    def report(self, vanilla):
        """The numbers of a trial. vanilla: the trial to compare with, or None."""
        numbers = {'name': self.name, 'batch': self.batch, 'context': self.context}
        if self.problem:
            return {**numbers, 'problem': self.problem}
        seconds, spread = middle(self.decode)
        return {
            **numbers,
            'prefill_tok_per_s': 1 / statistics.median(self.prefill),
            'ms_per_token': 1e3 * seconds,
            'spread': spread,
            'tok_per_s': self.batch / seconds,
            'attention_kernels': self.decoder.kernels,
            'cache_bytes': self.cache.nbytes,
            'peak_gib': self.peak / 2**30 if self.peak else None,
            'seconds': self.decode,
            'speed_relative_to_vanilla': (
                speed_relative_to(vanilla.decode, self.decode) if vanilla else None
            ),
        }


def largest(fits):
    """The largest batch for which fits(batch), by doubling and bisection; 0 if even 1 does not."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        between = (low + high) // 2
        if fits(between):
            low = between
        else:
            high = between
    return low


def bench_decode(settings, config):
    """Time prefill and decoding, and print and write the table. Returns its numbers."""
    machine, shape = start(settings, config)
    if machine.distributed:
        message = (
            'each process would decode the same by itself; start bench.py decode without torchrun'
        )
        machine.agree(ValueError(message))
    for context in settings.contexts:
        refuse(
            not settings.new_tokens < context <= shape.block_size,
            f'contexts={settings.contexts} must be above new_tokens={settings.new_tokens} and at '
            f'most block_size={shape.block_size}',
        )
    refuse(settings.peers, 'bench.py decode has no peers')
    refuse(settings.memory_gib and machine.kind != 'cuda', 'memory_gib needs a GPU')
    if settings.batch_size != BenchConfig.batch_size and machine.is_first:
        print('note: decoding takes --batch_sizes, and no batch_size', file=sys.stderr)
    decoders = [Decoder(name, recipe) for name, recipe in recipes(settings, shape, machine)]
    for decoder in decoders:
        attempt(decoder, decoder.build, settings, machine)

    about = {**provenance(machine), 'compile': settings.compile, **shape.shape()}
    columns = ['row', 'batch', 'context', 'eager prefill tok/s', 'ms/token', 'spread', 'tok/s']
    print_head(about, [*columns, 'x vanilla', 'cache bytes', 'peak GiB'])
    numbers = {**about, 'settings': asdict(settings), 'rows': []}
    for reports in measure_all(decoders, settings, machine):
        numbers['rows'] += reports
        save_numbers(numbers, settings, machine)
    print('\nspread: interquartile range / median')
    print('x vanilla: decoding speed relative to vanilla, median over rounds')
    print('peak GiB: of tensors, and the pool that all CUDA graphs of this table share')
    check_any_timed(numbers['rows'])
    machine.close()
    return numbers


def measure_all(decoders, settings, machine):
    """Yield the reports of all decoders at each context and batch size."""
    for context in settings.contexts:
        for batch in settings.batch_sizes:
            yield measure([Trial(decoder, batch, context) for decoder in decoders], settings)
        if settings.memory_gib:
            for decoder in decoders:
                yield measure_largest(decoder, context, settings, machine)


def measure(trials, settings):
    """The reports of trials that take turns; prints a line for each."""
    for trial in trials:
        attempt(trial, trial.start)
    for round_ in range(-settings.warmup, settings.rounds):
        for trial in trials:
            attempt(trial, trial.round, round_ >= 0)

    vanilla = next((t for t in trials if t.name == 'vanilla' and not t.problem), None)
    reports = [trial.report(vanilla) for trial in trials]
    for trial, report in zip(trials, reports, strict=True):
        print_decoding(report)
        trial.drop()
    return reports


def measure_largest(decoder, context, settings, machine):
    """The report, in a list, of one decoder with the largest batch that fits into memory_gib of the GPU."""
    trial = Trial(decoder, 1, context)
    if decoder.problem:
        return measure([trial], settings)  # its line says so

    others = allocated(machine) - decoder.static
    limit = settings.memory_gib * 2**30 + others
    share = limit / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    try:
        attempt(trial, trial.grow)
        if not trial.batch and not trial.problem:
            trial.problem = f'not one text fits into {settings.memory_gib:g} GiB'
        return measure([trial], settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def print_decoding(report):
    cells = [report['name'], str(report['batch']), f'{report["context"]:,}']
    if 'problem' in report:
        print_line([*cells, report['problem']])
        return
    cells += [
        f'{report["prefill_tok_per_s"]:,.0f}',
        f'{report["ms_per_token"]:.2f}',
        f'{report["spread"]:.1%}',
        f'{report["tok_per_s"]:,.0f}',
        cell(report['speed_relative_to_vanilla'], '.3f'),
        f'{report["cache_bytes"]:,}',
        cell(report['peak_gib'], '.2f'),
    ]
    print_line(cells)


# --- the program ---------------------------------------------------------------------------------


def main():
    compile_rows_apart()
    modes = {'': (BenchConfig, GPTConfig), 'decode': (DecodeConfig, GPTConfig)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_line_errors(ValueError, OSError))
        if os.environ.get('RANK', '0') != '0':  # one table is enough
            quiet = stack.enter_context(open(os.devnull, 'w'))
            stack.enter_context(contextlib.redirect_stdout(quiet))
        mode, (settings, config) = choose(modes, __doc__)
        if mode == 'decode':
            bench_decode(settings, config)
        else:
            bench_training(settings, config)


if __name__ == '__main__':
    main()
