"""
Throughput, side by side: training steps of the variants and of Hugging Face's Llama; preparation and tokenizers.

$ python bench.py                                                                  # 82M: vanilla, ResFormer, SVFormer
$ python bench.py config/vanilla_180m.py --variants=all --peers=hf --out=results/bench.json
$ python bench.py --batch_size=2 --block_size=512 --peers=hf                       # a size for two CPU cores
$ python bench.py prepare --source=FOLDER --tokenizer=FILE                         # text to tokens, on one core

A row's unit is the step that train.py takes: forward, backward, scaler, clipping, AdamW. Rows take turns (A B C A B C),
so that whatever else the machine does hits all of them; ratios are medians over rounds of one row against another.
A variant is what config/NAME_82m.py changes besides the shape, which the command line's config gives to all rows, and
more flags, as in vanilla+q_residual=True; NAME:eager is not compiled.
"""
import contextlib
import json
import os
import statistics
import sys
import tempfile
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


class Row:
    """One line of the table: a model, its optimizer, its times."""

    def __init__(self, name, settings, config, machine):
        kind, _, eager = name.partition(':')
        kind, *flags = kind.split('+')
        before = allocated(machine)
        if kind == 'hf':
            model = HuggingFaceLlama(config)
            with torch.device('meta'):  # ours of its shape, to count its FLOPs
                flops_of = GPT(config)
        elif kind in VARIANTS:
            flags = [f'{name}={getattr(config, name)}' for name in SHAPE] + flags
            _, variant = configure(TrainConfig, GPTConfig,
                                   argv=[str(VARIANTS[kind]), *(f'--{flag}' for flag in flags)])
            model = flops_of = GPT(variant, settings.seed)
        else:
            raise ValueError(f'no variant {kind!r}; there are {", ".join(VARIANTS)}')
        self.name, self.machine, self.settings = name, machine, settings
        self.flops = flops_of.flops_per_token(config.block_size)
        model.to(machine.device)
        self.optimizer, self.scaler = make_optimizer(model, settings), machine.scaler()
        self.model = torch.compile(model) if settings.compile and not eager else model
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


@dataclass
class PrepareConfig:
    source: str = ''  # as in prepare_slimpajama.py
    tokenizer: str = ''  # as in prepare_slimpajama.py
    megabytes: int = 16  # of text, from the start of the source
    rounds: int = 5  # timed passes of each row
    out: str = ''  # write the table's numbers here, as JSON


def bench_prepare(settings):
    """Text to token files on one core, all of it, against tokenizers' encoding alone."""
    import prepare_slimpajama as prepare
    import tokenizer
    try:
        import tokenizers
    except ImportError:
        raise OSError('bench.py prepare needs tokenizers: pip install -r requirements-dev.txt') from None
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'  # read at the first batch

    if not settings.source or not settings.tokenizer:
        raise ValueError('bench.py prepare needs --source and --tokenizer, as prepare_slimpajama.py does')
    asked = prepare.Settings(source=settings.source, tokenizer=settings.tokenizer)
    ours, units = tokenizer.load(settings.tokenizer), prepare.find_units(asked)[0]
    if ours.path is None:
        raise ValueError('--tokenizer=bytes has nothing to compare with; give a tokenizer.json')
    theirs = tokenizers.Tokenizer.from_file(str(ours.path))
    pairs, size = [], 0
    for pair in (pair for unit in units for pair in unit.read()):
        pairs.append(pair)
        size += len(pair[1].encode())
        if size > settings.megabytes * 1e6:
            break
    texts = [text for _, text in pairs]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, 'source', 'train')
        source.mkdir(parents=True)
        with open(source / '0.jsonl', 'w') as f:
            for domain, text in pairs:
                f.write(json.dumps({'text': text, 'meta': {'redpajama_set_name': domain}}) + '\n')

        def whole():
            with tempfile.TemporaryDirectory() as out, open(os.devnull, 'w') as quiet, \
                    contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                prepare.prepare(prepare.Settings(source=str(source.parent), tokenizer=settings.tokenizer, tokens=0,
                                                 out=out + '/out', workers=1))

        rows = {'prepare_slimpajama.py: read, shuffle, tokenize, write': whole,
                'tokenizer.py: encode': lambda: ours.encode_batch(texts),
                'tokenizers: encode': lambda: theirs.encode_batch(texts, add_special_tokens=False)}
        seconds = {name: [] for name in rows}
        for round_ in range(settings.rounds + 1):
            for name, work in rows.items():
                start = time.perf_counter()
                work()
                if round_:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
    peer = seconds['tokenizers: encode']
    print(f'{len(texts):,} documents, {size / 1e6:.1f} MB, one core\n\n| row | MB/s | spread | x tokenizers |')
    print('|---|---:|---:|---:|')
    reports = []
    for name, times in seconds.items():
        median, spread = middle(times)
        ratio = statistics.median(b / a for a, b in zip(times, peer, strict=True))
        reports.append({'name': name, 'mb_per_s': size / 1e6 / median, 'spread': spread, 'ratio': ratio})
        print(f'| {name} | {size / 1e6 / median:.1f} | {spread:.1%} | {ratio:.2f} |')
    return {'documents': len(texts), 'bytes': size, 'rows': reports}


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


def cell(value, form):
    return 'n/a' if value is None else format(value, form)


def middle(times):
    """(median, interquartile range / median) of a list of seconds."""
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [median] * 3
    return median, (quartiles[2] - quartiles[0]) / median


def main():
    with one_line_errors(ValueError, OSError):
        if sys.argv[1:2] == ['prepare']:
            (settings,) = configure(PrepareConfig, argv=sys.argv[2:])
            numbers = bench_prepare(settings)
        else:
            settings, config = configure(BenchConfig, GPTConfig)
            numbers = bench_training(settings, config)
        if settings.out:
            Path(settings.out).write_text(json.dumps(numbers, indent=1) + '\n')


if __name__ == '__main__':
    main()
