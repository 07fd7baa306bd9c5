"""
Throughput and memory, side by side: training steps of the variants and of Hugging Face's Llama, and
decoding with the KV cache.

The 82M vanilla, ResFormer and SVFormer; all variants of another size, and transformers' Llama; a
size for two CPU cores; decoding:
$ python bench.py
$ python bench.py config/vanilla_180m.py --variants=all --peers=hf --out=results/bench.json
$ python bench.py --batch_size=2 --block_size=512 --peers=hf
$ python bench.py decode --batch_sizes="(1, 32)" --contexts="(2048, 65536)" --block_size=65536

A row is a variant, config/NAME_82m.py without its shape: all rows have the shape of the command
line. A + changes a field or a setting for one row alone, as in

--variants=vanilla,vanilla+q_residual=True,vanilla+compile=False,vanilla+attention=flash

Rows take turns (A B C A B C), so that whatever else the machine does hits all of them. Each row times
the step that train.py takes: forward and backward of each micro-batch (--micro_steps), scaler, clipping,
and the optimizer of its config. When decoding, it times the prefill of all but the last 32 tokens, which
is never compiled, and then those tokens, one by one, by default in CUDA graphs.

The names of the numbers are those of --out:

spread      interquartile range / median of a row's times
x NAME      speed relative to the row NAME, median over rounds
peak_gib    of tensors, a prefill's included; with CUDA graphs also the pool that all graphs of this
            process share

--out is written after each round: if a bench is interrupted, it holds the rounds that have finished.
--profile=FOLDER traces one more step of each row and prints its costliest kernels.
"""

import copy
import gc
import re
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from configurator import choose, configure

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as functorch_config
from tqdm import tqdm

from lib.files import first_line, one_line_errors
from lib.machine import ATTENTION, Machine, is_out_of_memory
from lib.rundir import provenance
from lib.tables import check_out, markdown_table, save_numbers
from model import GPT, GPTConfig, refuse
from train import (
    TrainConfig,
    attention_setting,
    distribute,
    leave_out_wrong_kernels,
    make_optimizers,
    train_step,
)

# {variant: its config file}
VARIANTS = {
    path.stem.removesuffix('_82m'): str(path)
    for path in sorted(Path(__file__).parent.glob('config/*_82m.py'))
}

# --- settings ------------------------------------------------------------------------------------


@dataclass
class TableConfig:
    """What training and decoding both have."""

    variants: str = 'vanilla,resformer,svformer'  # config/NAME_82m.py, or all; +setting=value
    rounds: int = 10  # timed steps of each row
    warmup: int = 3  # untimed steps before; the first compiles
    out: str = ''  # write the table's numbers here, as JSON
    profile: str = ''  # a folder for a trace of one more step; prints the costliest kernels
    device: str = 'auto'  # cuda, cuda:1, cpu, mps; auto: a GPU where there is one
    dtype: str = 'auto'  # float16, bfloat16, float32; auto: float16 on CUDA, else float32
    compile: bool = True  # torch.compile
    mode: str = 'default'  # of torch.compile, such as max-autotune-no-cudagraphs
    attention: str = 'auto'  # on CUDA: flash, cudnn; auto: torch's (flash with dropout)

    def __post_init__(self):
        refuse(self.rounds < 1, f'rounds={self.rounds} must be at least 1')
        refuse(self.warmup < 0, f'warmup={self.warmup} must be at least 0')
        choices = {'mode': torch._inductor.list_mode_options(), 'attention': ATTENTION}
        for name, allowed in choices.items():
            value = getattr(self, name)
            refuse(value not in allowed, f'{name}={value!r} is not one of {", ".join(allowed)}')
        refuse(
            self.mode != type(self).mode and not self.compile,
            f'mode={self.mode} does nothing with compile=False; drop one of them',
        )


@dataclass
class BenchConfig(TableConfig):
    peers: str = ''  # hf: transformers' Llama of the same shape, compiled and uncompiled
    batch_size: int = 32  # sequences of each process in a micro-batch
    micro_steps: int = 1  # micro-batches of each process in a step, as training accumulates them
    optimizer: str = ''  # adamw, muon; '': the variant's own, as modern's, else adamw
    activation_memory_budget: float = 1.0  # compiled: share of activations stored; less: recomputed

    def __post_init__(self):
        super().__post_init__()
        refuse(self.micro_steps < 1, f'micro_steps={self.micro_steps} must be at least 1')
        refuse(self.peers not in ('', 'hf'), f"peers={self.peers!r} is not '' or 'hf'")
        self.training()

    @property
    def rows_per_step(self):
        return self.batch_size * self.micro_steps

    def training(self):
        """The settings of a training that takes such steps. Refuses what training would."""
        shared = {
            name: value
            for name, value in vars(self).items()
            if hasattr(TrainConfig, name) and value != ''
        }
        return TrainConfig(**shared)


@dataclass
class DecodeConfig(TableConfig):
    mode: str = 'reduce-overhead'  # of torch.compile; this one uses CUDA graphs
    # As in sample.py, because cuDNN's plans anew for each shape. It acts in the prefill, and where decoding
    # is not compiled; compiled, one new token attends without such a kernel, see model.attend_one().
    attention: str = 'flash'
    batch_sizes: tuple = (1, 8)  # texts decoded at once
    contexts: tuple = (2048,)  # tokens of a text at the end; block_size at most

    def __post_init__(self):
        super().__post_init__()
        for name in ('batch_sizes', 'contexts'):
            sizes = getattr(self, name)
            are_counts = all(type(size) is int and size >= 1 for size in sizes)
            refuse(
                not sizes or not are_counts,
                f'{name}={sizes} must be whole numbers of at least 1, such as "(1, 8)"',
            )


# Settings that a row may have for itself, besides the fields that make its variant.
OF_ROWS = ('compile', 'mode', 'attention', 'activation_memory_budget', 'optimizer')
# Those that say how to compile: a row that is not compiled does not take them from the command line.
OF_COMPILER = ('mode', 'activation_memory_budget')

PREFILL_CHUNK = 2048  # tokens of a prefill's forward pass
NEW_TOKENS = 32  # tokens that are decoded and timed, the last ones of the context

# --- a row's name --------------------------------------------------------------------------------


def row_names(settings):
    """The names of a table's rows; a comma in parentheses belongs to a value."""
    names = list(VARIANTS)
    if settings.variants != 'all':
        names = re.split(r',(?![^(]*\))', settings.variants)
    if getattr(settings, 'peers', ''):
        # Without the compiler, both would be the same.
        names += ['hf', 'hf+compile=False'] if settings.compile else ['hf']
    return names


def read_name(name, settings, shape):
    """(a row's settings, its GPTConfig, what makes its model).

    Raises ValueError for a variant, field or setting that does not exist, or that a row cannot have.
    """
    kind, *changes = re.split(r'\+(?=\w+=)', name)  # a value may hold a +, as first+token
    is_peer = kind == 'hf' and isinstance(settings, BenchConfig)
    refuse(
        not is_peer and kind not in VARIANTS,
        f'no variant {kind!r}; there are {", ".join(VARIANTS)}',
    )
    options = {**asdict(settings), **shape.shape()}
    for change in changes:
        field = change.partition('=')[0]
        refuse(
            field in options.keys() - OF_ROWS,
            f'{name}: {field} is the same in all rows; set it with --{field}',
        )
    left_out = OF_COMPILER if 'compile=False' in changes else ()
    words = [VARIANTS['vanilla' if is_peer else kind]]
    for field, value in options.items():
        if field not in left_out and value != '':  # optimizer='' is the variant's own
            words.append(f'--{field}={value}')
    words += [f'--{change}' for change in changes]
    try:
        own, config = configure(type(settings), GPTConfig, argv=words, ignored=[TrainConfig])
        if is_peer:
            check_peer(own, config)
    except ValueError as error:
        raise ValueError(f'{name}: {error}') from error
    return own, config, HuggingFaceLlama if is_peer else GPT


def check_peer(settings, config):
    import transformers  # noqa: F401, here rather than when rows are timed

    from hub.convert import LLAMA

    ours = [name for name in config.variant() if name not in LLAMA]
    if settings.optimizer == 'muon':
        ours.append('optimizer')
    refuse(ours, f"hf is transformers' Llama, which has no {', '.join(ours)} of ours; drop it")


def row_recipes(settings, shape, machine):
    """[(name, settings, GPTConfig, what makes the model)] of a table's rows.

    Of all variants, those that cannot have this shape are left out.
    """
    rows = []
    for name in row_names(settings):
        try:
            rows.append((name, *read_name(name, settings, shape)))
        except ValueError as error:
            if settings.variants != 'all' or name not in VARIANTS:
                raise
            machine.warn(f'note: left out {error}')
    return rows


class HuggingFaceLlama(nn.Module):
    """transformers' Llama behind our call, with the loss as it computes it.

    Under torch.compile, transformers would attend with a mask of all pairs of tokens, which flash and
    cuDNN's kernels do not take (transformers issue 48925). For an attention of a name that it does
    not know, it makes no mask; then its own function calls the causal kernel, compiled or not.
    """

    def __init__(self, config):
        super().__init__()
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        from hub.convert import llama_settings

        settings = LlamaConfig(**llama_settings(config), use_cache=False)
        self.llama = LlamaForCausalLM(settings)
        AttentionInterface.register('causal', sdpa_attention_forward)
        self.llama.set_attn_implementation('causal')

    def forward(self, idx, targets):
        return None, self.llama(input_ids=idx, labels=targets, use_cache=False).loss


# --- time and memory -----------------------------------------------------------------------------


def stopwatch(machine):
    """Start a clock. The function returned waits for the device and gives the seconds since then."""

    def now():
        if machine.kind != 'cpu':  # which has always done what it was given
            torch.accelerator.synchronize()
        return time.perf_counter()

    began = now()
    return lambda: now() - began


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
    segments = torch.cuda.memory_snapshot()
    pools = [segment for segment in segments if tuple(segment['segment_pool_id']) != (0, 0)]
    return sum(segment['total_size'] - segment['allocated_size'] for segment in pools)


# --- a row ---------------------------------------------------------------------------------------


class Row:
    """A line of the training table: a model that takes training steps, and their times.

    settings: a BenchConfig; make: what makes the model of a GPTConfig.
    """

    COLUMNS = {
        'name': '',
        'ms_per_step': ',.1f',
        'spread': '.1%',
        'first_step_s': '.1f',
        'tok_per_s': ',.0f',
        'mfu': '.1%',
        'peak_gib': '.2f',
    }

    def __init__(self, name, settings, config, make=GPT):
        self.name = name
        self.about = {'name': name}
        self.settings = settings
        self.config = config
        self.make = make
        self.options = dict(torch._inductor.list_mode_options(settings.mode))
        self.problem = None
        self.seconds = []  # of each timed step
        self.first = None  # seconds of the first step, which compiles
        self.peak = None  # bytes on the GPU
        self.parts = None  # what is large: the model and what goes with it

    def build(self, machine):
        before = allocated(machine)
        self.machine = copy.copy(machine)
        self.machine.attention = attention_setting(self.settings, self.config)
        self.prepare(self.make(self.config).to(machine.device))
        self.static = allocated(machine) - before

    def prepare(self, model):
        # Which weights decay does not change the time, so a peer has one group.
        optimizers = [torch.optim.AdamW(model.parameters(), fused=True)]
        if isinstance(model, GPT):
            optimizers = make_optimizers(model, self.settings.training())
        compiled = distribute(self.compiled(model), self.machine)
        self.parts = compiled, optimizers, self.machine.scaler()
        counted = GPT.without_weights(self.config)
        self.flops_per_token = counted.flops_per_token(self.config.block_size)

    def compiled(self, model):
        if not self.settings.compile:
            return model
        # Rows with equal options would share the code that was compiled for the first of them, whatever
        # their kernels and budgets are. This option only tells them apart.
        return torch.compile(model, options={**self.options, 'trace.debug_dir': self.name})

    def step(self, batch, timed=False):
        """Act once on a batch, and note the time and the peak of memory."""
        on_gpu = self.machine.kind == 'cuda'
        others = allocated(self.machine) - self.static
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.machine.choose_kernels()
        seconds = self.act(batch)
        if on_gpu:
            # The optimizer's state comes with the first step: from then on it belongs to this row.
            self.peak = torch.cuda.max_memory_allocated() - others
            self.static = allocated(self.machine) - others
            if self.settings.compile and self.options.get('triton.cudagraphs'):
                self.peak += idle_in_graphs()

        self.first = self.first or seconds
        if timed:
            self.seconds.append(seconds)

    def act(self, batch):
        """Take a training step on (x, y). Returns its seconds."""
        # Read by the compiler: in each row's first step.
        functorch_config.activation_memory_budget = self.settings.activation_memory_budget
        model, optimizers, scaler = self.parts
        seconds = stopwatch(self.machine)
        micro_steps, clip = self.settings.micro_steps, TrainConfig.grad_clip
        train_step(model, optimizers, scaler, self.machine, lambda: batch, micro_steps, clip)
        return seconds()

    def profile(self, batch, folder):
        """Trace a step into a file of the folder, and print its ten costliest kernels.

        All processes take the step, but only the first writes and prints.
        """
        with torch.profiler.profile() as trace:
            self.step(batch)
        if not self.machine.is_first:
            return
        name = '_'.join(map(str, self.about.values()))
        trace.export_chrome_trace(f'{folder}/{name}.json')
        kind = 'device' if self.machine.kind == 'cuda' else 'cpu'
        kernels = trace.key_averages().table(sort_by=f'self_{kind}_time_total', row_limit=10)
        print(f'\n{name}\n{kernels}')

    def report(self):
        """{name in the JSON: value}."""
        if self.problem:
            return {**self.about, 'problem': self.problem}
        low, median, high = np.percentile(self.seconds, (25, 50, 75))
        return {
            **self.about,
            **self.numbers(median),
            'spread': (high - low) / median,
            'first_step_s': self.first,
            'peak_gib': self.peak / 2**30 if self.peak else None,
            'seconds': self.seconds,
        }

    def numbers(self, seconds):
        """What follows from the median seconds of a step: of all processes together."""
        processes = self.machine.world_size
        tokens = processes * self.settings.rows_per_step * self.config.block_size
        speed = tokens / seconds
        peak_flops = self.machine.peak_flops()
        flops = self.flops_per_token * speed / processes
        mfu = flops / peak_flops if peak_flops else None
        return {'ms_per_step': 1e3 * seconds, 'tok_per_s': speed, 'mfu': mfu}


class Decoder(Row):
    """A line of the decoding table: a model that continues `batch` texts until each has `context`
    tokens. Its weights are in half precision on a GPU. settings: a DecodeConfig."""

    COLUMNS = {
        'name': '',
        'batch': '',
        'context': ',',
        'prefill_tok_per_s': ',.0f',
        'ms_per_token': '.2f',
        'spread': '.1%',
        'tok_per_s': ',.0f',
        'cache_bytes': ',',
        'peak_gib': '.2f',
    }

    def __init__(self, name, settings, config, batch, context):
        super().__init__(name, settings, config)
        self.about |= {'batch': batch, 'context': context}
        self.prefill = []  # seconds of each round

    def prepare(self, model):
        model = model.to(getattr(torch, self.machine.dtype)).eval()
        size = self.about['batch'], self.about['context']
        cache = model.new_cache(*size)
        self.parts = model, self.compiled(model), cache

    @torch.no_grad()
    def act(self, idx):
        """Prefill all but the last NEW_TOKENS of the texts, and decode those. Returns the seconds of those.

        The prefill is not compiled: a program that decodes would compile for every length of text.
        """
        model, one_token, cache = self.parts
        cache.position.zero_()
        prompt, rest = idx[:, :-NEW_TOKENS], idx[:, -NEW_TOKENS:]
        seconds = stopwatch(self.machine)
        for chunk in prompt.split(PREFILL_CHUNK, dim=1):
            model(chunk, cache=cache, last_only=True)
        self.prefill.append(seconds())

        seconds = stopwatch(self.machine)
        for token in rest.split(1, dim=1):
            logits, _ = one_token(token, cache=cache, last_only=True)
            logits.argmax(dim=-1)
        return seconds()

    def numbers(self, seconds):
        batch, context = self.about['batch'], self.about['context']
        prompts = batch * (context - NEW_TOKENS)
        prefill = np.median(self.prefill[-len(self.seconds) :])
        _, _, cache = self.parts
        return {
            'prefill_tok_per_s': prompts / prefill,
            'ms_per_token': 1e3 * seconds / NEW_TOKENS,
            'tok_per_s': batch * NEW_TOKENS / seconds,
            'cache_bytes': cache.nbytes,
        }


# --- a table -------------------------------------------------------------------------------------


def compile_rows_apart():
    """Let the compiler make code of its own for every row and size.

    To the compiler, all rows are one piece of code. It would stop compiling it after a few of them,
    and the second batch size or length would be compiled for any size, which is slower.
    """
    leave_out_wrong_kernels()
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
        if is_out_of_memory(error) and dist.is_initialized():
            # The other processes wait in this row's all-reduce, and would for an hour.
            raise OSError(f'{row.name}: {problem}') from error

    # Past the `except`, and not before, nothing holds the failed step's tensors any more.
    row.parts = None
    row.problem = problem
    gc.collect()  # its parts refer to each other
    torch.cuda.empty_cache()


def time_groups(groups, settings, about, machine):
    """Time rows and print a table for each group of them. Returns the numbers of all.

    groups: [(rows that take turns, their batch)].
    """
    rounds = range(-settings.warmup, settings.rounds)
    numbers = {**about, 'settings': asdict(settings), 'rows': []}
    if machine.is_first:
        print('  '.join(f'{name}={value}' for name, value in about.items()))
    for rows, batch in groups:
        finished = numbers['rows']
        for row in rows:
            attempt(row, row.build, machine)
        steps = [(round_, row) for round_ in rounds for row in rows]
        bar = tqdm(steps, disable=None if machine.is_first else True)
        for round_, row in bar:
            bar.set_postfix_str(row.name)
            timed = round_ >= 0
            attempt(row, row.step, batch, timed)
            if machine.is_first and round_ == rounds[0] and not row.problem:
                bar.write(f'{row.name}: {row.first:.1f} s', file=sys.stderr)
            if timed and row is rows[-1]:
                reports = compared(rows)
                numbers['rows'] = finished + reports
                save_numbers(numbers, settings, machine)

        if machine.is_first:
            print_rows(rows[0].COLUMNS, reports)
        for row in rows:
            # At the end, because there may not be enough time for it.
            if settings.profile and not row.problem:
                row.profile(batch, settings.profile)
            row.parts = None
        gc.collect()
    return numbers


def compared(rows):
    """The reports of rows, each with its speed relative to vanilla and to the peers."""
    reports = [row.report() for row in rows]
    for reference in rows:
        is_reference = reference.name == 'vanilla' or reference.make is HuggingFaceLlama
        if reference.problem or not is_reference:
            continue
        for row, report in zip(rows, reports, strict=True):
            if not row.problem:
                ratios = [a / b for a, b in zip(reference.seconds, row.seconds, strict=True)]
                report[f'x {reference.name}'] = np.median(ratios)
    return reports


def print_rows(columns, reports):
    """columns: {name in a report: its format}; a row that failed has its problem instead."""
    for report in reports:
        columns = columns | {name: '.3f' for name in report if name.startswith('x ')}
    lines = []
    for report in reports:
        cells = []
        for name, form in columns.items():
            if name in report:
                value = report[name]
                cells.append('n/a' if value is None else format(value, form))
        lines.append([*cells, report['problem']] if 'problem' in report else cells)
    print('\n' + markdown_table(list(columns), lines), flush=True)


def decoding_groups(settings, shape, recipes, machine):
    """The rows of each context and batch size, and their texts."""
    for context in settings.contexts:
        for batch in settings.batch_sizes:
            rows = [Decoder(*recipe[:3], batch, context) for recipe in recipes]
            idx = torch.randint(shape.vocab_size, (batch, context), device=machine.device)
            yield rows, idx


# --- the program ---------------------------------------------------------------------------------


def check_start(settings, shape, machine):
    """Refuse what would fail later, or do nothing."""
    variant = ', '.join(shape.variant())
    refuse(
        variant,
        f'all rows share the shape alone, so {variant} would do nothing; for a row of that model, '
        'write --variants=vanilla+NAME=VALUE',
    )
    if isinstance(settings, DecodeConfig):
        refuse(
            machine.distributed,
            'each process would decode the same by itself; start bench.py decode without torchrun',
        )
        refuse(
            min(settings.contexts) <= NEW_TOKENS or max(settings.contexts) > shape.block_size,
            f'contexts={settings.contexts} must be above {NEW_TOKENS}, the tokens that are decoded, '
            f'and at most block_size={shape.block_size}',
        )
    elif machine.kind == 'cpu':
        counted = GPT.without_weights(shape).flops_per_token(shape.block_size)
        if counted * settings.rows_per_step * shape.block_size > 1e13:
            machine.warn(
                'note: a step of this size takes minutes on a CPU; try --n_layer=4 --batch_size=1 '
                '--block_size=512'
            )
    if settings.profile:
        Path(settings.profile).mkdir(parents=True, exist_ok=True)
    if settings.out:
        check_out(settings.out)


def bench(settings, shape):
    """Time the rows of a table, print and write it. Returns its numbers."""
    machine = Machine(settings.device, settings.dtype, tf32=True, attention=settings.attention)
    check_start(settings, shape, machine)
    recipes = row_recipes(settings, shape, machine)
    machine.join()
    if isinstance(settings, DecodeConfig):
        groups = decoding_groups(settings, shape, recipes, machine)
    else:
        rows = [Row(*recipe) for recipe in recipes]
        size = (2, settings.batch_size, shape.block_size)
        groups = [(rows, torch.randint(shape.vocab_size, size, device=machine.device))]

    about = {**provenance(machine), **shape.shape()}
    numbers = time_groups(groups, settings, about, machine)
    # The group of the processes must end after the rows: where the last DistributedDataParallel ends
    # it, gloo's thread and Python may wait for each other for ever.
    machine.close()
    problems = [report.get('problem') for report in numbers['rows']]
    refuse(all(problems), f'no row could be timed: {problems[0]}')
    return numbers


def main():
    compile_rows_apart()
    modes = {'': (BenchConfig, GPTConfig), 'decode': (DecodeConfig, GPTConfig)}
    with one_line_errors():
        _, (settings, shape) = choose(modes, __doc__, ignored=[TrainConfig])
        bench(settings, shape)


if __name__ == '__main__':
    main()
