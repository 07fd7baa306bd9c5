"""
Throughput, side by side: training steps of the variants and of Hugging Face's Llama; decoding with the KV cache.

$ python bench.py                                                                  # 82M: vanilla, ResFormer, SVFormer
$ python bench.py config/vanilla_180m.py --variants=all --peers=hf --out=results/bench.json
$ python bench.py --batch_size=2 --block_size=512 --peers=hf                       # a size for two CPU cores
$ python bench.py decode --batch_sizes="(1, 32)" --contexts="(2048, 65536)" --block_size=65536

A row's unit is the step that train.py takes: forward, backward, scaler, clipping, AdamW. Rows take turns (A B C A B C),
so that whatever else the machine does hits all of them; ratios are medians over rounds of one row against another.
A variant is what config/NAME_82m.py changes besides the shape, which the command line's config gives to all rows, and
more flags, as in vanilla+q_residual=True; NAME:eager is not compiled.
"""
import functools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from configurator import configure, one_line_errors
from data import Dataset, Loader, TrainingRows
from model import GPT, GPTConfig
from train import Machine, TrainConfig, make_optimizer, provenance, train_step

SHAPE = ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_inner')  # what all rows share
VARIANTS = {path.stem.removesuffix('_82m'): path for path in sorted(Path(__file__).parent.glob('config/*_82m.py'))}


@dataclass
class BenchConfig(TrainConfig):
    variants: str = 'vanilla,resformer,svformer'  # config/NAME_82m.py's, or all; NAME+flag=value; NAME:eager
    peers: str = ''  # hf: transformers' Llama of the same shape, compiled and uncompiled
    micro_steps: int = 1  # micro-batches a step, in place of gradient_accumulation_steps
    rounds: int = 10  # timed steps of each row
    warmup: int = 3  # untimed steps before; the first compiles
    real_data: bool = False  # batches of the dataset, and the time spent waiting for them
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


def build(name, settings, config):
    """(model, GPT of its shape to count FLOPs with, whether it is to be compiled) of a row's name."""
    kind, _, eager = name.partition(':')
    kind, *flags = kind.split('+')
    if kind == 'hf':
        with torch.device('meta'):
            counted = GPT(config)
        return HuggingFaceLlama(config), counted, settings.compile and not eager
    if kind not in VARIANTS:
        raise ValueError(f'no variant {kind!r}; there are {", ".join(VARIANTS)}')
    flags = [f'{name}={getattr(config, name)}' for name in SHAPE] + flags
    _, variant = configure(TrainConfig, GPTConfig, argv=[str(VARIANTS[kind]), *(f'--{flag}' for flag in flags)])
    model = GPT(variant, settings.seed)
    return model, model, settings.compile and not eager


class Row:
    """One line of the training table: a model, its optimizer, its times."""

    def __init__(self, name, settings, config, machine):
        before = allocated(machine)
        model, counted, compiled = build(name, settings, config)
        self.name, self.machine, self.settings = name, machine, settings
        self.flops = counted.flops_per_token(config.block_size)
        model.to(machine.device)
        self.optimizer, self.scaler = make_optimizer(model, settings), machine.scaler()
        self.model = torch.compile(model) if compiled else model
        self.static = allocated(machine) - before
        self.seconds, self.waiting, self.peak, self.problem = [], [], None, None

    def step(self, next_batch, timed):
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
        start = now(self.machine)
        train_step(self.model, self.optimizer, self.scaler, self.machine, batch, self.settings.grad_clip)
        elapsed = now(self.machine) - start
        if self.machine.kind == 'cuda':
            # The optimizer's state comes with the first step: from then on it belongs to this row, too.
            self.peak = torch.cuda.max_memory_allocated() - others
            self.static = allocated(self.machine) - others
        if timed:
            self.seconds.append(elapsed)
            self.waiting.append(waited / elapsed)

    def report(self, tokens, peak_flops, reference):
        """The numbers of a row; `reference`: {name: row} to compare with."""
        median, spread = middle(self.seconds)
        ratios = {name: statistics.median(a / b for a, b in zip(row.seconds, self.seconds, strict=True))
                  for name, row in reference.items()}
        return {'name': self.name, 'ms_per_step': 1e3 * median, 'spread': spread,
                'tok_per_s': tokens / median, 'mfu': self.flops * tokens / median / peak_flops if peak_flops else None,
                'peak_gib': self.peak / 2**30 if self.peak else None, 'speed_relative_to': ratios,
                'waiting_for_data': statistics.median(self.waiting), 'seconds': self.seconds}


def now(machine):
    """Wall-clock seconds after everything given to the device has finished."""
    if machine.kind == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter()


def allocated(machine):
    return torch.cuda.memory_allocated() if machine.kind == 'cuda' else 0


def names(settings):
    variants = list(VARIANTS) if settings.variants == 'all' else settings.variants.split(',')
    if settings.peers not in ('', 'hf'):
        raise ValueError(f"peers={settings.peers!r} is not '' or 'hf'")
    return variants + (['hf', 'hf:eager'] if settings.peers else [])


def bench_training(settings, config):
    machine = Machine(settings)
    machine.micro_steps = settings.micro_steps
    config = GPTConfig(**{name: getattr(config, name) for name in SHAPE})
    rows = [Row(name, settings, config, machine) for name in names(settings)]
    if settings.real_data:
        dataset = TrainingRows(Dataset(settings.dataset), config.block_size, settings.seed, settings.domain_weights)
        loader = Loader(dataset, settings.batch_size, settings.micro_steps, device=machine.device)
        next_batch = loader.next
    else:
        size = (settings.batch_size, config.block_size)
        fixed = [torch.randint(config.vocab_size, size, device=machine.device) for _ in range(2)]

        def next_batch():
            return fixed

    for timed, count in ((False, settings.warmup), (True, settings.rounds)):
        for _ in range(count):
            for row in rows:
                if row.problem:
                    continue
                try:
                    row.step(next_batch, timed)
                except torch.OutOfMemoryError:
                    row.problem = 'out of memory'
                    row.model = row.optimizer = None
                    torch.cuda.empty_cache()

    tokens = settings.micro_steps * settings.batch_size * config.block_size
    whole = {row.name: row for row in rows if not row.problem}
    reference = {name: whole[name] for name in ('vanilla', 'hf', 'hf:eager') if name in whole}
    reports = [row.report(tokens, machine.peak_flops(), reference) for row in whole.values()]
    shape = {name: getattr(config, name) for name in SHAPE}
    about = {**provenance(machine), 'compile': settings.compile, 'batch_size': settings.batch_size, **shape}
    print('  '.join(f'{k}={v}' for k, v in about.items()) + '\n')
    print('| row | ms/step | spread | tok/s | MFU | peak GiB | ' + ' | '.join(f'x {name}' for name in reference) + ' |')
    print('|---|---:|---:|---:|---:|---:|' + '---:|' * len(reference))
    for r in reports:
        print(f'| {r["name"]} | {r["ms_per_step"]:,.1f} | {r["spread"]:.1%} | {r["tok_per_s"]:,.0f} | '
              f'{cell(r["mfu"], ".1%")} | {cell(r["peak_gib"], ".2f")} | '
              + ' | '.join(f'{ratio:.3f}' for ratio in r['speed_relative_to'].values()) + ' |')
    for row in rows:
        if row.problem:
            print(f'| {row.name} | {row.problem} |')
    print('\nspread: interquartile range / median; x NAME: speed relative to NAME, median over rounds')
    if settings.real_data:
        print(f'waiting for data: {max(r["waiting_for_data"] for r in reports):.2%} of a step, the worst row')
        loader.close()
    return {**about, 'settings': asdict(settings), 'rows': reports}


@dataclass
class DecodeConfig(BenchConfig):
    batch_sizes: tuple = (1, 8)  # texts decoded at once
    contexts: tuple = (2048,)  # tokens of a text at the end; block_size at most
    new_tokens: int = 32  # timed tokens, the last ones of the context
    chunk: int = 2048  # tokens of a prefill's forward pass
    memory_gib: float = 0.0  # also the largest batch that fits into this much of a GPU's memory, and its speed


class Decoder:
    """One line of the decoding table: a model with its weights in half precision on a GPU, and one cache."""

    def __init__(self, name, settings, config, machine):
        before = allocated(machine)
        model, _, compiled = build(name, settings, config)
        self.name, self.settings, self.machine = name, settings, machine
        self.model = model.to(machine.device, getattr(torch, machine.dtype)).eval()
        mode = 'reduce-overhead' if machine.kind == 'cuda' else None  # CUDA graphs
        self.one_token = torch.compile(self.model, mode=mode) if compiled else self.model
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
        start = now(self.machine)
        for chunk in self.idx[:, :prompt].split(self.settings.chunk, dim=1):
            self.model(chunk, cache=self.cache, last_only=True)
        middle_ = now(self.machine)
        for t in range(prompt, self.context):
            self.one_token(self.idx[:, t:t + 1], cache=self.cache, last_only=True)[0].argmax(dim=-1)
        end = now(self.machine)
        if timed:
            self.prefill.append((middle_ - start) / (self.batch * prompt))
            self.decode.append((end - middle_) / self.settings.new_tokens)
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
        """Whether a batch can be decoded to the end of its context. The cache is not filled, only there."""
        try:
            self.start(batch, context)
            self.cache.position.fill_(context - 1)
            with torch.no_grad():
                self.model(self.idx[:, -1:], cache=self.cache, last_only=True)
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
    machine = Machine(settings)
    config = GPTConfig(**{name: getattr(config, name) for name in SHAPE})
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
    return {**about, 'settings': asdict(settings), 'rows': reports}


def cell(value, form):
    return 'n/a' if value is None else format(value, form)


def middle(times):
    """(median, interquartile range / median) of a list of seconds."""
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [median] * 3
    return median, (quartiles[2] - quartiles[0]) / median


def main():
    torch._dynamo.config.recompile_limit = 64  # the variants are one piece of code to the compiler
    with one_line_errors(ValueError, OSError):
        decode = sys.argv[1:2] == ['decode']
        settings, config = configure(DecodeConfig if decode else BenchConfig, GPTConfig, argv=sys.argv[1 + decode:])
        numbers = (bench_decode if decode else bench_training)(settings, config)
        if settings.out:
            Path(settings.out).write_text(json.dumps(numbers, indent=1) + '\n')


if __name__ == '__main__':
    main()
