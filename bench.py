"""
Throughput, side by side: training steps of the variants and of Hugging Face's Llama; decoding with the KV cache.

$ python bench.py                                                                  # 82M: vanilla, ResFormer, SVFormer
$ python bench.py config/vanilla_180m.py --variants=all --peers=hf --out=results/bench.json
$ python bench.py --batch_size=2 --block_size=512 --peers=hf                       # a size for two CPU cores
$ python bench.py decode --batch_sizes="(1, 32)" --contexts="(2048, 65536)" --block_size=65536

A row's unit is the step that train.py takes: forward, backward, scaler, clipping, AdamW. Rows take turns (A B C A B C),
so that whatever else the machine does hits all of them; ratios are medians over rounds of one row against another.
A variant is what config/NAME_82m.py changes besides the shape, which the command line's config gives to all rows, and
more flags, as in vanilla+q_residual=True. Levers come after colons, as in vanilla:flash:chunk=8192:
eager                   not compiled
mode=reduce-overhead    torch.compile's mode: this one is CUDA graphs; max-autotune-no-cudagraphs
flash, cudnn, efficient the attention kernel
chunk=8192              rows of logits that are in memory at once
checkpointed            train.py's --activation_checkpointing
ddp-first               under torchrun: compile what DistributedDataParallel has wrapped, not the other way round
bucket=100, static      under torchrun: DistributedDataParallel's buckets of 100 MB; its static_graph
"""
import contextlib
import functools
import gc
import json
import os
import re
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import model as model_file
from configurator import configure, one_line_errors
from data import Dataset, Loader, TrainingRows
from model import GPT, GPTConfig
from train import Machine, TrainConfig, checkpoint_blocks, distribute, make_optimizer, provenance, train_step

SHAPE = ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_inner')  # what all rows share
VARIANTS = {path.stem.removesuffix('_82m'): path for path in sorted(Path(__file__).parent.glob('config/*_82m.py'))}


@dataclass
class BenchConfig(TrainConfig):
    variants: str = 'vanilla,resformer,svformer'  # config/NAME_82m.py's, or all; NAME+flag=value; NAME:lever
    peers: str = ''  # hf: transformers' Llama of the same shape, compiled and uncompiled
    micro_steps: int = 1  # micro-batches a step, in place of gradient_accumulation_steps
    rounds: int = 10  # timed steps of each row
    warmup: int = 3  # untimed steps before; the first compiles
    real_data: bool = False  # batches of the dataset, and the time spent waiting for them
    profile: str = ''  # a folder for a trace of one more step of each row; prints its ten costliest kernels
    out: str = ''  # write the table's numbers here, as JSON


class HuggingFaceLlama(nn.Module):
    """transformers' Llama behind our call, loss as it computes it."""

    def __init__(self, config):
        super().__init__()
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError:
            raise OSError('--peers=hf needs transformers: pip install -r requirements-dev.txt') from None
        self.llama = LlamaForCausalLM(LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.n_embd, intermediate_size=config.ffn_width,
            num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.block_size, rms_norm_eps=config.norm_eps, use_cache=False))

    def forward(self, idx, targets):
        return None, self.llama(input_ids=idx, labels=targets, use_cache=False).loss


KERNELS = {'flash': SDPBackend.FLASH_ATTENTION, 'cudnn': SDPBackend.CUDNN_ATTENTION,
           'efficient': SDPBackend.EFFICIENT_ATTENTION}


class Levers:
    """What a row's name asks for after its first colon."""

    def __init__(self, words):
        self.name, flags = ':'.join(words), {'eager', 'checkpointed', 'ddp-first', 'static', *KERNELS}
        modes, values = torch._inductor.list_mode_options(), {}
        for word in words:
            name, _, value = word.partition('=')
            if name in ('chunk', 'bucket') and value.isdecimal() and int(value) or name == 'mode' and value in modes:
                values[name] = value
            elif word not in flags:
                raise ValueError(f'no lever {word!r}; there are {", ".join(sorted(flags))}, chunk=N, bucket=N and '
                                 f'mode={" or ".join(modes)}')
        self.eager, self.ddp_first, self.checkpointed = (n in words for n in ('eager', 'ddp-first', 'checkpointed'))
        self.kernels = [KERNELS[word] for word in words if word in KERNELS]
        self.mode, self.chunk = values.get('mode'), int(values.get('chunk', model_file.LOSS_CHUNK))
        self.ddp = {'bucket_cap_mb': int(values.get('bucket', 25)), 'static_graph': 'static' in words}

    def compile(self, model, settings):
        if self.eager or not settings.compile:
            return model
        # What is compiled with equal options is shared by all rows: so, an option of no effect that tells them apart.
        options = torch._inductor.list_mode_options(self.mode) if self.mode else {}
        options = {**options, 'trace.debug_dir': self.name}
        return torch.compile(model, options=options)

    @contextlib.contextmanager
    def pulled(self):
        """While a row takes a step: others in the same process have theirs."""
        before, model_file.LOSS_CHUNK = model_file.LOSS_CHUNK, self.chunk
        try:
            with sdpa_kernel(self.kernels) if self.kernels else contextlib.nullcontext():
                yield
        finally:
            model_file.LOSS_CHUNK = before


def build(name, settings, config):
    """(model, GPT of its shape to count FLOPs with, levers) of a row's name."""
    kind, *words = name.split(':')
    kind, *flags = kind.split('+')
    if kind == 'hf':
        with torch.device('meta'):
            counted = GPT(config)
        levers = Levers(words)
        if levers.checkpointed:
            raise ValueError('checkpointed is a lever of our own rows, not of hf')
        return HuggingFaceLlama(config), counted, levers
    if kind not in VARIANTS:
        raise ValueError(f'no variant {kind!r}; there are {", ".join(VARIANTS)}')
    flags = [f'{name}={getattr(config, name)}' for name in SHAPE] + flags
    _, variant = configure(TrainConfig, GPTConfig, argv=[str(VARIANTS[kind]), *(f'--{flag}' for flag in flags)])
    model = GPT(variant, settings.seed)
    return model, model, Levers(words)


class Row:
    """One line of the training table: a model, its optimizer, its times."""

    def __init__(self, name, problem=None):
        self.name, self.problem = name, problem

    def build(self, settings, config, machine):
        before = allocated(machine)
        model, counted, self.levers = build(self.name, settings, config)
        self.machine, self.settings = machine, settings
        self.flops = counted.flops_per_token(config.block_size)
        model.to(machine.device)
        self.optimizer, self.scaler = make_optimizer(model, settings), machine.scaler()
        if self.levers.checkpointed:
            checkpoint_blocks(model)
        if self.levers.ddp_first:
            self.model = self.levers.compile(distribute(model, machine, **self.levers.ddp), settings)
        else:
            self.model = distribute(self.levers.compile(model, settings), machine, **self.levers.ddp)
        self.static = allocated(machine) - before
        self.seconds, self.waiting, self.peak, self.first = [], [], None, None

    def step(self, next_batch, timed=False):
        waited = 0.0

        def batch():
            nonlocal waited
            start = time.perf_counter()
            x, y = next_batch()
            waited += time.perf_counter() - start
            return x, y

        others = allocated(self.machine) - self.static
        if self.machine.kind == 'cuda':
            torch.cuda.reset_peak_memory_stats()
        with self.levers.pulled():
            seconds = stopwatch(self.machine)
            train_step(self.model, self.optimizer, self.scaler, self.machine, batch, self.settings.grad_clip)
            elapsed = seconds()
        if self.machine.kind == 'cuda':
            # The optimizer's state comes with the first step: from then on it belongs to this row, too.
            self.peak = torch.cuda.max_memory_allocated() - others
            self.static = allocated(self.machine) - others
        self.first = self.first or elapsed
        if timed:
            self.seconds.append(elapsed)
            self.waiting.append(waited / elapsed)

    def profile(self, next_batch, folder):
        """Trace a step into folder/<name>.json, and print its ten costliest kernels."""
        from torch.profiler import ProfilerActivity, profile
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.machine.kind == 'cuda')
        with profile(activities=kinds) as trace:
            self.step(next_batch)
        Path(folder).mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(Path(folder, f'{self.name.replace(":", "-")}.json')))
        by = 'self_device_time_total' if self.machine.kind == 'cuda' else 'self_cpu_time_total'
        ours = torch.autograd.DeviceType.CUDA if self.machine.kind == 'cuda' else torch.autograd.DeviceType.CPU
        events = sorted((event for event in trace.key_averages() if event.device_type == ours  # no time counted twice
                         and not event.is_user_annotation), key=lambda event: -getattr(event, by))
        total = sum(getattr(event, by) for event in events)
        print(f'\n| {self.name}: kernel | ms | share | calls |\n|---|---:|---:|---:|')
        for event in events[:10]:
            spent = getattr(event, by)
            print(f'| `{event.key[:90]}` | {spent / 1e3:,.1f} | {spent / total:.1%} | {event.count} |')

    def report(self, tokens, peak_flops, reference):
        """The numbers of a row; `reference`: {name: row} to compare with."""
        median, spread = middle(self.seconds)
        ratios = {name: statistics.median(a / b for a, b in zip(row.seconds, self.seconds, strict=True))
                  for name, row in reference.items()}
        return {'name': self.name, 'ms_per_step': 1e3 * median, 'spread': spread,
                'tok_per_s': tokens / median, 'mfu': self.flops * tokens / median / peak_flops if peak_flops else None,
                'peak_gib': self.peak / 2**30 if self.peak else None, 'speed_relative_to': ratios,
                'first_step_s': self.first, 'waiting_for_data': statistics.median(self.waiting),
                'seconds': self.seconds}


def stopwatch(machine):
    """A function that gives the device's seconds from here to its call: by events on its stream, if it has one."""
    if machine.kind != 'cuda':
        start = time.perf_counter()
        return lambda: time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()

    def seconds():
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    return seconds


def allocated(machine):
    return torch.cuda.memory_allocated() if machine.kind == 'cuda' else 0


def names(settings):
    variants = list(VARIANTS) if settings.variants == 'all' else settings.variants.split(',')
    if settings.peers not in ('', 'hf'):
        raise ValueError(f"peers={settings.peers!r} is not '' or 'hf'")
    return variants + (['hf', 'hf:eager'] if settings.peers else [])


def shape_of(config):
    shape = GPTConfig(**{name: getattr(config, name) for name in SHAPE})
    for name, value in asdict(config).items():
        if value != getattr(shape, name):
            print(f'note: all rows share the shape, but not {name}: --variants=vanilla+{name}={value}', file=sys.stderr)
    return shape


def attempt(row, act, *args):
    """Let a row do something. Where it fails, nothing stays of it but its problem: too little memory, or a kernel that
    this device does not take, must not lose the other rows."""
    try:
        return act(*args)
    except RuntimeError as error:
        name, problem = row.name, (str(error).strip() or type(error).__name__).splitlines()[0][:100]
        traceback.print_exc()
    vars(row).clear()
    row.__init__(name, problem)
    gc.collect()  # its parts refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write(settings, numbers):
    """The table's numbers as JSON. ValueError where no row has any."""
    if settings.out and os.environ.get('RANK', '0') == '0':
        Path(settings.out).write_text(json.dumps(numbers, indent=1) + '\n')
    if all('problem' in row for row in numbers['rows']):
        raise ValueError(f'no row could be timed: {numbers["rows"][0]["problem"]}')
    return numbers


def bench_training(settings, config):
    machine, config = Machine(settings), shape_of(config)
    machine.micro_steps = settings.micro_steps
    rows = [Row(name) for name in names(settings)]
    for row in rows:
        attempt(row, row.build, settings, config, machine)
    micro_batches = settings.micro_steps * machine.world_size  # of a step, over all processes
    fixed = torch.randint(config.vocab_size, (2, settings.batch_size, config.block_size), device=machine.device)
    loader = Loader(TrainingRows(Dataset(settings.dataset), config.block_size, settings.seed, settings.domain_weights),
                    settings.batch_size, micro_batches, rank=machine.rank, world_size=machine.world_size,
                    device=machine.device) if settings.real_data else None
    next_batch = loader.next if loader else lambda: fixed
    for timed, count in ((False, settings.warmup), (True, settings.rounds)):
        for _ in range(count):
            for row in rows:
                if not row.problem:
                    attempt(row, row.step, next_batch, timed)

    tokens = micro_batches * settings.batch_size * config.block_size
    whole = {row.name: row for row in rows if not row.problem}
    reference = {name: whole[name] for name in ('vanilla', 'hf', 'hf:eager') if name in whole}
    peak = machine.peak_flops() and machine.peak_flops() * machine.world_size
    reports = [{'name': row.name, 'problem': row.problem} if row.problem else row.report(tokens, peak, reference)
               for row in rows]
    about = {**provenance(machine), 'compile': settings.compile, 'batch_size': settings.batch_size,
             **{name: getattr(config, name) for name in SHAPE}}
    print('  '.join(f'{k}={v}' for k, v in about.items()) + '\n')
    columns = ['row', 'ms/step', 'spread', 'first step s', 'tok/s', 'MFU', 'peak GiB', *(f'x {n}' for n in reference)]
    print(f'| {" | ".join(columns)} |\n|---|{"---:|" * (len(columns) - 1)}')
    for r in reports:
        if 'problem' in r:
            print(f'| {r["name"]} | {r["problem"]} |')
            continue
        cells = [r['name'], f'{r["ms_per_step"]:,.1f}', f'{r["spread"]:.1%}', f'{r["first_step_s"]:.1f}',
                 f'{r["tok_per_s"]:,.0f}', cell(r['mfu'], '.1%'), cell(r['peak_gib'], '.2f'),
                 *(f'{ratio:.3f}' for ratio in r['speed_relative_to'].values())]
        print(f'| {" | ".join(cells)} |')
    print('\nspread: interquartile range / median; x NAME: speed relative to NAME, median over rounds')
    if loader and whole:
        waiting = max(r['waiting_for_data'] for r in reports if 'problem' not in r)
        print(f'waiting for data: {waiting:.2%} of a step, the worst row')
    numbers = write(settings, {**about, 'settings': asdict(settings), 'rows': reports})
    for row in whole.values() if settings.profile else ():  # at the end: it may take longer than there is time
        row.profile(next_batch, settings.profile)
    if loader:
        loader.close()
    return numbers


@dataclass
class DecodeConfig(BenchConfig):
    batch_sizes: tuple = (1, 8)  # texts decoded at once
    contexts: tuple = (2048,)  # tokens of a text at the end; block_size at most
    new_tokens: int = 32  # timed tokens, the last ones of the context
    chunk: int = 2048  # tokens of a prefill's forward pass
    memory_gib: float = 0.0  # also the largest batch that fits into this much of a GPU's memory, and its speed

    def __post_init__(self):
        super().__post_init__()
        if min(self.chunk, self.new_tokens, *self.batch_sizes) < 1:
            raise ValueError('chunk, new_tokens and batch_sizes must be at least 1')


class Decoder:
    """One line of the decoding table: a model with its weights in half precision on a GPU, and one cache."""

    def __init__(self, name, settings, config, machine):
        before = allocated(machine)
        model, _, levers = build(name, settings, config)
        if used := re.search('checkpointed|ddp-first|static|bucket=|chunk=', name):
            raise ValueError(f'{name}: {used[0]} is a lever of training')
        self.name, self.settings, self.machine, self.levers = name, settings, machine, levers
        self.model = model.to(machine.device, getattr(torch, machine.dtype)).eval()
        if not levers.mode and machine.kind == 'cuda':
            levers.mode = 'reduce-overhead'  # CUDA graphs
        self.one_token = levers.compile(self.model, settings)
        self.static = allocated(machine) - before

    def start(self, batch, context):
        self.batch, self.context, self.peak, self.problem = batch, context, None, None
        self.prefill, self.decode = [], []  # seconds per token, seconds per step
        before = allocated(self.machine)
        self.cache = self.model.new_cache(batch, context)
        self.idx = torch.randint(self.model.config.vocab_size, (batch, context), device=self.machine.device)
        self.with_cache = self.static + allocated(self.machine) - before

    @torch.no_grad()
    def round(self, timed):
        others = allocated(self.machine) - self.with_cache
        if self.machine.kind == 'cuda':
            torch.cuda.reset_peak_memory_stats()
        self.cache.position.zero_()
        prompt = self.context - self.settings.new_tokens
        seconds = stopwatch(self.machine)
        with self.levers.pulled():
            for chunk in self.idx[:, :prompt].split(self.settings.chunk, dim=1):
                self.model(chunk, cache=self.cache, last_only=True)
            prefilled, seconds = seconds(), stopwatch(self.machine)
            for t in range(prompt, self.context):
                self.one_token(self.idx[:, t:t + 1], cache=self.cache, last_only=True)[0].argmax(dim=-1)
            decoded = seconds()
        if timed:
            self.prefill.append(prefilled / (self.batch * prompt))
            self.decode.append(decoded / self.settings.new_tokens)
        if self.machine.kind == 'cuda':
            self.peak = (torch.cuda.max_memory_allocated() - others) / 2**30

    def stop(self):
        self.cache = self.idx = None

    def report(self, vanilla):
        seconds, spread = middle(self.decode)
        return {'name': self.name, 'batch': self.batch, 'context': self.context,
                'prefill_tok_per_s': 1 / statistics.median(self.prefill), 'ms_per_token': 1e3 * seconds,
                'spread': spread, 'tok_per_s': self.batch / seconds, 'cache_bytes': self.cache.nbytes,
                'peak_gib': self.peak, 'seconds': self.decode, 'speed_relative_to_vanilla': statistics.median(
                    a / b for a, b in zip(vanilla.decode, self.decode, strict=True)) if vanilla else None}

    def fits(self, context, batch):
        """Whether a batch can be decoded to the end of its context: its last chunk of a prefill fits, the largest."""
        try:
            self.start(batch, context)
            chunk = self.idx[:, :context - self.settings.new_tokens][:, -self.settings.chunk:]
            self.cache.position.fill_(context - chunk.size(1))
            with torch.no_grad():
                self.model(chunk, cache=self.cache, last_only=True)
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            self.stop()
            torch.cuda.empty_cache()


def largest(fits):
    """The largest batch for which fits(batch), by doubling and bisection; 0 if not even one does."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        between = (low + high) // 2
        low, high = (between, high) if fits(between) else (low, between)
    return low


def bench_decode(settings, config):
    machine, config = Machine(settings), shape_of(config)
    for context in settings.contexts:
        if not settings.new_tokens < context <= config.block_size:
            raise ValueError(f'contexts={settings.contexts} must be above new_tokens={settings.new_tokens} and at most '
                             f'block_size={config.block_size}')
    if settings.peers or settings.memory_gib and machine.kind != 'cuda':
        raise ValueError('bench.py decode has no peers, and memory_gib needs a GPU')
    rows = [Decoder(name, settings, config, machine) for name in names(settings)]
    about = {**provenance(machine), 'compile': settings.compile, **{name: getattr(config, name) for name in SHAPE}}
    print('  '.join(f'{k}={v}' for k, v in about.items()) + '\n')
    print('| row | batch | context | prefill tok/s | ms/token | spread | tok/s | x vanilla | cache bytes | peak GiB |')
    print('|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|')
    reports = []

    def measure(decoders, batch_of, context):
        for row in decoders:
            try:
                row.start(batch_of[row.name], context)
            except torch.OutOfMemoryError:
                row.problem = 'out of memory'
        for timed in [False] * settings.warmup + [True] * settings.rounds:
            for row in decoders:
                try:
                    if not row.problem:
                        row.round(timed)
                except torch.OutOfMemoryError:
                    row.problem = 'out of memory'
                    row.stop()
        vanilla = next((row for row in decoders if row.name == 'vanilla' and not row.problem), None)
        for row in decoders:
            if row.problem:
                print(f'| {row.name} | {row.batch} | {row.context:,} | {row.problem} |')
                reports.append({name: getattr(row, name) for name in ('name', 'batch', 'context', 'problem')})
                continue
            r = row.report(vanilla)
            reports.append(r)
            print(f'| {row.name} | {row.batch} | {row.context:,} | {r["prefill_tok_per_s"]:,.0f} | '
                  f'{r["ms_per_token"]:.2f} | {r["spread"]:.1%} | {r["tok_per_s"]:,.0f} | '
                  f'{cell(r["speed_relative_to_vanilla"], ".3f")} | {r["cache_bytes"]:,} | '
                  f'{cell(r["peak_gib"], ".2f")} |', flush=True)
            row.stop()

    for context in settings.contexts:
        for batch in settings.batch_sizes:
            measure(rows, dict.fromkeys((row.name for row in rows), batch), context)
        if settings.memory_gib:  # each row alone on the GPU, with the largest batch that it takes
            for row in rows:
                others = allocated(machine) - row.static
                limit = settings.memory_gib * 2**30 + others
                torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
                batch = largest(functools.partial(row.fits, context))
                if batch:
                    measure([row], {row.name: batch}, context)
            torch.cuda.set_per_process_memory_fraction(1.0)
    print('\nspread: interquartile range / median; x vanilla: decoding speed, median over rounds')
    return write(settings, {**about, 'settings': asdict(settings), 'rows': reports})


def cell(value, form):
    return 'n/a' if value is None else format(value, form)


def middle(times):
    """(median, interquartile range / median) of a list of seconds."""
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [median] * 3
    return median, (quartiles[2] - quartiles[0]) / median


def main():
    torch._dynamo.config.recompile_limit = 64  # the variants are one piece of code to the compiler
    quiet = open(os.devnull, 'w') if os.environ.get('RANK', '0') != '0' else None  # one table is enough
    with one_line_errors(ValueError, OSError), contextlib.redirect_stdout(quiet or sys.stdout):
        decode = sys.argv[1:2] == ['decode']
        settings, config = configure(DecodeConfig if decode else BenchConfig, GPTConfig, argv=sys.argv[1 + decode:])
        (bench_decode if decode else bench_training)(settings, config)


if __name__ == '__main__':
    main()
