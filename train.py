"""
Train a GPT of model.py on a dataset of prepare_slimpajama.py.

$ python train.py config/demo.py                                                    # one process: GPU, or CPU
$ torchrun --nproc_per_node=8 train.py config/resformer_82m.py                      # 8 GPUs
$ python train.py config/demo.py --init_from=resume                                 # go on where it stopped
$ python train.py --help                                                            # every setting
"""
import contextlib
import datetime
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configurator import configure, one_line_errors
from data import (
    MIXING,
    Dataset,
    Loader,
    Log,
    TrainingRows,
    check_resume,
    checkpoints,
    load_checkpoint,
    load_state,
    load_weights,
    lock,
    provenance,
    save_checkpoint,
    set_aside_newer,
    stranger,
    validation_batches,
)
from model import GPT, GPTConfig, refuse

INTERRUPTED = 75  # exit status after SIGTERM or SIGINT: saved, to be resumed (EX_TEMPFAIL)


@dataclass
class TrainConfig:
    out_dir: str = 'out/run'  # checkpoint, log.jsonl and config.json go here
    init_from: str = 'scratch'  # scratch; resume; auto: resume if there is a run; a ckpt.pt or HF folder: its weights
    seed: int = 1337  # of the initial weights, the data order and dropout
    # data
    dataset: str = 'slimpajama'  # a folder in data/
    domain_weights: dict = field(default_factory=dict)  # {domain: weight}; {}: as prepared
    verify_data: bool = False  # compare the token files' sha256 again, though it was found right before
    # a step is gradient_accumulation_steps * batch_size * block_size tokens, on any number of GPUs
    gradient_accumulation_steps: int = 32  # micro-batches a step, over all GPUs
    batch_size: int = 32  # sequences in a micro-batch
    # AdamW and its schedule (Section 4.1 and Table 4)
    max_iters: int = 10000  # steps
    learning_rate: float = 6e-4  # after warm-up
    min_lr: float = 6e-5  # at the end of the cosine
    warmup_iters: int = 120  # linear warm-up from 1e-7
    lr_decay_iters: int = 0  # where the cosine ends; 0: max_iters
    decay_lr: bool = True  # False: learning_rate throughout
    weight_decay: float = 0.1  # on matrices and embeddings
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    grad_clip: float = 1.0  # gradient norm; 0: no clipping
    # evaluation, log, checkpoints
    eval_interval: int = 1000  # steps from one evaluation and checkpoint to the next
    eval_iters: int = 20  # validation batches per domain
    eval_only: bool = False  # evaluate and exit
    log_interval: int = 1  # steps from one log line, and one look at the signals, to the next
    keep_checkpoints: int = 2  # ckpt.pt, and those before it as ckpt.pt.1, ...; besides, ckpt_best.pt
    save_steps: tuple = ()  # steps whose checkpoints are kept, as ckpt_<step>.pt
    max_skipped: int = 20  # stop after so many steps in a row without a finite gradient; 0: never
    eval_tasks: str = ''  # zero-shot tasks to evaluate at the end, as in evaluate.py tasks --tasks=...
    eval_data_dir: str = ''  # where their data are, as in evaluate.py; '': the hub
    wandb_log: bool = False  # log to Weights & Biases too
    wandb_project: str = 'nanoresformer'  # its project
    wandb_run_name: str = ''  # its run; '': out_dir's name
    # machine
    device: str = 'auto'  # cuda, cuda:1, cpu, mps; auto: a GPU where there is one
    dtype: str = 'auto'  # float16 (with a gradient scaler), bfloat16, float32; auto: float16 on CUDA, else float32
    compile: bool = True  # torch.compile
    activation_checkpointing: bool = False  # for long sequences: keep only what blocks pass on, compute the rest again
    backend: str = 'auto'  # of torch.distributed: nccl, gloo; auto: nccl on CUDA, else gloo

    def __post_init__(self):
        positive = 'gradient_accumulation_steps batch_size max_iters eval_iters log_interval keep_checkpoints'
        others = 'grad_clip weight_decay learning_rate min_lr warmup_iters lr_decay_iters max_skipped'
        for least, names in ((1, positive), (0, others)):
            for name in names.split():
                refuse(getattr(self, name) < least, f'{name}={getattr(self, name)} must be at least {least}')
        if self.dtype not in ('auto', 'float16', 'bfloat16', 'float32'):
            raise ValueError(f"dtype={self.dtype!r} is not one of 'auto', 'float16', 'bfloat16', 'float32'")
        if self.init_from == 'auto':
            self.init_from = 'resume' if checkpoints(self.out_dir) else 'scratch'
        if self.init_from not in ('scratch', 'resume') and not os.path.exists(self.init_from):
            raise ValueError(f"init_from={self.init_from!r} is not 'scratch', 'resume', 'auto', a checkpoint file or a "
                             'Hugging Face folder')
        refuse(self.eval_tasks and not importlib.util.find_spec('lm_eval'), 'eval_tasks: first, pip install lm_eval')

    rows_per_step = property(lambda self: self.gradient_accumulation_steps * self.batch_size)


# --- the machine -----------------------------------------------------------------------------------------------------

class Machine:
    """Where this process runs: rank, world size, device, precision."""

    def __init__(self, settings):
        self.rank, self.local_rank, self.world_size = (
            int(os.environ.get(name, default)) for name, default in (('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)))
        self.distributed = 'RANK' in os.environ  # under torchrun
        self.is_first = self.rank == 0
        there = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available(), 'cpu': True}
        kind = settings.device if settings.device != 'auto' else next(name for name in there if there[name])
        self.kind, _, index = kind.partition(':')
        if not there.get(self.kind) or index and not index.isdigit():
            raise ValueError(f'device={kind!r}, but torch {torch.__version__} sees only '
                             f'{" and ".join(name for name in there if there[name])} here')
        if self.kind == 'cuda':
            kind = f'cuda:{self.local_rank if self.distributed else index or 0}'
        self.device = torch.device(kind)
        self.dtype = settings.dtype
        if self.dtype == 'auto':
            self.dtype = 'float16' if self.kind == 'cuda' else 'float32'
        if self.kind == 'cuda':
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision('high')  # TF32, where float32 is asked for
            if self.dtype == 'bfloat16' and not torch.cuda.is_bf16_supported(including_emulation=False):
                raise ValueError(f'{torch.cuda.get_device_name(self.device)} has no bfloat16; use --dtype=float16')
        elif self.kind == 'cpu' and settings.compile and not any(map(shutil.which, ('g++', 'c++', 'clang++'))):
            raise ValueError('compile=True on a CPU needs a C++ compiler; install g++ or use --compile=False')
        if settings.gradient_accumulation_steps % self.world_size:
            n = max(1, round(settings.gradient_accumulation_steps / self.world_size)) * self.world_size
            raise ValueError(f'gradient_accumulation_steps={settings.gradient_accumulation_steps} counts over all '
                             f'{self.world_size} processes and is not divisible by them; the nearest that is: {n}')
        self.micro_steps = settings.gradient_accumulation_steps // self.world_size
        if self.distributed:
            backend = settings.backend if settings.backend != 'auto' else 'nccl' if self.kind == 'cuda' else 'gloo'
            dist.init_process_group(backend, device_id=self.device if backend == 'nccl' else None,
                                    timeout=datetime.timedelta(hours=1))  # one process alone verifies the dataset

    def autocast(self):
        if self.dtype == 'float32':
            return contextlib.nullcontext()
        return torch.autocast(self.kind, dtype=getattr(torch, self.dtype))

    def scaler(self):
        return torch.amp.GradScaler(self.kind, enabled=self.dtype == 'float16')

    def sum(self, tensor):
        """The sum over all processes, in place."""
        if self.distributed:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, outcome):
        """Raise the first error of any process in all of them, so that none waits for one that has left; and refuse
        to start where one would resume and another would not."""
        outcomes = [outcome]
        if self.distributed:
            outcomes = [None] * self.world_size
            dist.all_gather_object(outcomes, outcome)
        error = next((outcome for outcome in outcomes if isinstance(outcome, Exception)), None)
        if not error and len(set(outcomes)) > 1:
            error = ValueError(f'processes would start at different steps, {outcomes}: out_dir must be shared by all')
        if error:
            raise error if self.is_first else SystemExit(1)  # one line is enough

    def name(self):
        return torch.cuda.get_device_name(self.device) if self.kind == 'cuda' else self.kind

    def peak_flops(self):
        """Dense half-precision tensor FLOP/s of one GPU, from the data sheets; None where unknown."""
        peaks = {'B200': 2250e12, 'H[12]00 NVL': 835e12, 'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12,
                 'A100': 312e12, 'L40S': 362e12, 'RTX 4090': 165e12, 'RTX 3090': 71e12, 'V100': 125e12, 'T4': 65e12}
        if self.kind != 'cuda' or self.dtype == 'float32' or re.search('MIG|Laptop|Ti$|D$', self.name()):
            return None  # those are slices of, or other than, what they are called
        return next((peak for name, peak in peaks.items() if re.search(rf'\b{name}\b', self.name())), None)


# --- one step --------------------------------------------------------------------------------------------------------

def make_optimizer(model, settings):
    """AdamW, fused; matrices and embeddings decay, norms, biases and mixing weights do not."""
    params = list(model.parameters())
    groups = [{'params': [p for p in params if p.dim() >= 2], 'weight_decay': settings.weight_decay},
              {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}]
    assert sum(len(group['params']) for group in groups) == len(params)
    return torch.optim.AdamW(groups, settings.learning_rate, (settings.beta1, settings.beta2), eps=1e-8, fused=True)


def checkpoint_blocks(model):
    """Let each block keep its input only, and what later layers read of it; its backward pass runs it again."""
    def checkpointed(forward):
        def run(x, rope, raw, attended, cache, mask):
            def pure(x, raw, attended):  # a second run must find what the first one found
                raw, attended = dict(raw), dict(attended)
                return forward(x, rope, raw, attended, cache, mask), raw, attended
            x, *after = torch.utils.checkpoint.checkpoint(pure, x, dict(raw), dict(attended), use_reentrant=False)
            for tensors, new in zip((raw, attended), after, strict=True):
                tensors.clear()
                tensors.update(new)
            return x
        return run
    for block in model.transformer.h:
        block.forward = checkpointed(block.forward)


def distribute(model, machine, **options):
    if not machine.distributed:
        return model
    return DistributedDataParallel(model, device_ids=[machine.device] if machine.kind == 'cuda' else None,
                                   gradient_as_bucket_view=True, **options,
                                   broadcast_buffers=False)  # they are constants: RoPE's tables, at every micro-step


def learning_rate(step, settings):
    """Linear from 1e-7 at step 0 to learning_rate at warmup_iters, cosine to min_lr at lr_decay_iters."""
    if not settings.decay_lr:
        return settings.learning_rate
    end = settings.lr_decay_iters or settings.max_iters
    if step < settings.warmup_iters:
        return 1e-7 + (settings.learning_rate - 1e-7) * step / settings.warmup_iters
    progress = min(1.0, (step - settings.warmup_iters) / max(1, end - settings.warmup_iters))
    return settings.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (settings.learning_rate - settings.min_lr)


def train_step(model, optimizer, scaler, machine, next_batch, grad_clip):
    """Forward, backward and update over this process's micro-batches. Returns (mean loss, gradient norm), tensors.
    No update where the norm is not finite, as it is with every loss that is not; it is the same on all processes."""
    total = torch.zeros((), device=machine.device)
    for micro in range(machine.micro_steps):
        if machine.distributed:
            # All-reduce with the last backward only. DDP reads this in its forward, so it must be set before.
            model.require_backward_grad_sync = micro == machine.micro_steps - 1
        x, y = next_batch()
        with machine.autocast():
            _, loss = model(x, y)
        poison = 1 + 0 * loss.detach()  # 1, or NaN: a loss may be infinite and its gradient not
        scaler.scale(poison * loss / machine.micro_steps).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    if scaler.is_enabled() or norm.isfinite():  # the scaler skips such steps itself, without waiting for the device
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total / machine.micro_steps, norm


@torch.no_grad()
def evaluate(model, dataset, settings, machine):
    """{domain: loss, ..., 'mean': mean over domains}, in nats per token, on the same rows every time."""
    model.eval()
    domains = list(dataset.meta['splits']['validation'])
    sums = torch.zeros(len(domains), 2, device=machine.device)  # loss, tokens
    for i, domain in enumerate(domains):
        for x, y in validation_batches(dataset, domain, model.config.block_size, settings.batch_size,
                                       settings.eval_iters, machine.rank, machine.world_size):
            x, y = x.to(machine.device), y.to(machine.device)
            with machine.autocast():
                _, loss = model(x, y)
            tokens = (y != -1).sum()
            sums[i] += torch.stack((loss * tokens, tokens))
    model.train()
    losses = [loss / tokens for loss, tokens in machine.sum(sums).tolist()]
    return {**dict(zip(domains, losses, strict=True)), 'mean': sum(losses) / len(losses)}


class Signals:
    """SIGTERM, SIGINT: finish the step, save, stop. SIGUSR1: save and go on. The handlers before come back at exit."""

    def __enter__(self):
        self.come = []
        numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
        self.before = {number: signal.signal(number, lambda n, frame: self.come.append(n)) for number in numbers}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def take(self):
        """(save?, stop?), each signal once, whenever it comes."""
        come, self.come = self.come, []
        return bool(come), any(number != signal.SIGUSR1 for number in come)


# --- the run ---------------------------------------------------------------------------------------------------------

def start_wandb(settings, everything, run_id):
    try:  # a tracker must never stop training
        import wandb
        return wandb.init(project=settings.wandb_project, name=settings.wandb_run_name or Path(settings.out_dir).name,
                          config=everything, id=run_id, resume='allow', dir=settings.out_dir)
    except Exception as error:
        print(f'warning: no wandb: {error}', file=sys.stderr)


def prepare_run(settings, config, machine):
    """Everything that can be refused is refused here, before a file is written. Returns (dataset, rows, checkpoint)."""
    dataset = Dataset(settings.dataset)
    if machine.local_rank == 0:  # once per machine
        dataset.verify(force=settings.verify_data)
    vocabulary = dataset.meta['tokenizer']['n_vocab']
    if vocabulary > config.vocab_size:
        raise ValueError(f'{dataset.folder} has {vocabulary:,} token ids; vocab_size={config.vocab_size:,} is less')
    warn = print if machine.is_first else lambda message: None
    rows = TrainingRows(dataset, config.block_size, settings.seed, settings.domain_weights, warn)
    if sum(rows.sizes) < settings.rows_per_step:
        raise ValueError(f'{dataset.folder} holds {sum(rows.sizes):,} sequences of {config.block_size} tokens, a step '
                         f'takes {settings.rows_per_step:,}; prepare more, or lower gradient_accumulation_steps')
    out = Path(settings.out_dir)
    if settings.init_from != 'resume' and not settings.eval_only and any(out.glob('ckpt*.pt*')):
        raise ValueError(f'{settings.out_dir} already holds a run; continue it with --init_from=resume, choose '
                         'another --out_dir, or delete it')
    if settings.init_from == 'scratch':
        return dataset, rows, None
    if settings.init_from != 'resume' and Path(settings.init_from).is_dir():
        theirs = GPT.from_pretrained(settings.init_from)
        if theirs.config.block_size < config.block_size:
            raise ValueError(f'{settings.init_from} takes {theirs.config.block_size} positions, not '
                             f'block_size={config.block_size}')
        return dataset, rows, {'model': theirs.state_dict(), 'model_config': asdict(theirs.config),
                               'path': settings.init_from}
    return dataset, rows, load_checkpoint(out if settings.init_from == 'resume' else settings.init_from, warn)


def run(settings, config, machine, closing):
    """Returns whether it was interrupted."""
    try:
        dataset, rows, checkpoint = prepare_run(settings, config, machine)
        out, resume, changed = Path(settings.out_dir), settings.init_from == 'resume', {}
        model = GPT(config, settings.seed).to(machine.device)
        optimizer, scaler = make_optimizer(model, settings), machine.scaler()
        if checkpoint:
            with stranger(checkpoint['path']):
                if resume:
                    changed = check_resume(checkpoint, settings, config, dataset)
                load_weights(model, checkpoint)
                if resume:
                    load_state(optimizer, scaler, checkpoint)
        if machine.is_first and not settings.eval_only:
            out.mkdir(parents=True, exist_ok=True)
            closing.enter_context(lock(out))
        outcome = start = checkpoint['step'] if resume else 0
    except (ValueError, OSError) as error:
        outcome = error
    machine.agree(outcome)

    if resume and machine.is_first and not settings.eval_only:
        set_aside_newer(checkpoint['path'])
    state = checkpoint if resume else {}
    wandb_id, best = state.get('wandb_id'), state.get('best', math.inf)
    skips = torch.tensor(state.get('skipped', (0, 0)), device=machine.device)  # all, and the last ones in a row
    del checkpoint, state  # twice the optimizer's memory otherwise
    if settings.activation_checkpointing:
        checkpoint_blocks(model)
    compiled = torch.compile(model) if settings.compile else model
    trained = distribute(compiled, machine)

    if settings.eval_only:
        losses = evaluate(compiled, dataset, settings, machine)
        if machine.is_first:
            print('  '.join(f'{domain} {loss:.4f}' for domain, loss in losses.items()))
        return
    origin = provenance(machine)
    everything = {**asdict(settings), **asdict(config), **origin}
    log = tracker = None
    if machine.is_first:
        print('\n'.join(f'{name:28} {value}' for name, value in everything.items()))
        print(f'{model.num_params():,} parameters without embeddings, {model.num_params(False):,} with\n')
        log = Log(out / 'log.jsonl', start if resume else None)
        (out / 'config.json').write_text(json.dumps(everything, indent=1) + '\n')
        if changed:
            print('resumed with other settings:', changed)
            log.write({'step': start, 'changed': changed})
        if settings.wandb_log:
            tracker = start_wandb(settings, everything, wandb_id)
            wandb_id = tracker.id if tracker else wandb_id

    def report(entry):
        spike = log.write(entry)
        if tracker:
            flat = {f'val/{k}': v for k, v in entry['val'].items()} if 'val' in entry else entry
            with contextlib.suppress(Exception):  # never fatal
                tracker.log(flat, step=entry['step'])
        return spike

    signals, save, stop = closing.enter_context(Signals()), False, False
    loader = Loader(rows, settings.batch_size, settings.gradient_accumulation_steps, start, machine.rank,
                    machine.world_size, machine.device)
    tokens_per_step = settings.rows_per_step * config.block_size
    flops, peak = model.flops_per_token(config.block_size), machine.peak_flops()
    clock, steps_timed, seconds = time.perf_counter(), 0, None
    for step in range(start, settings.max_iters + 1):
        last = step == settings.max_iters
        evaluates = last or (settings.eval_interval > 0 and step % settings.eval_interval == 0)
        if (evaluates or save or step in settings.save_steps) and not (resume and step == start):
            losses = evaluate(compiled, dataset, settings, machine) if evaluates else None
            names = [f'ckpt_{step}.pt'] * (step in settings.save_steps)
            if losses and losses['mean'] < best:
                best, names = losses['mean'], [*names, 'ckpt_best.pt']
            if machine.is_first:
                if losses:
                    mixing = {name: p.tolist() for name, p in model.named_parameters()
                              if any(part in name for part in MIXING)}
                    report({'step': step, 'val': losses, **({'mixing': mixing} if mixing else {})})
                    print(f'step {step} | validation loss {losses["mean"]:.4f}')
                os.fsync(log.file)  # lines first, checkpoint then: no step of it can be missing
                if losses and not math.isfinite(losses['mean']):
                    print('warning: that is not finite: no checkpoint, the ones before stay', file=sys.stderr)
                else:
                    data = {'row': step * settings.rows_per_step, 'sha256': dataset.hashes(),
                            'tokenizer': {k: dataset.meta['tokenizer'][k] for k in ('name', 'sha256')}}
                    save_checkpoint(out, {
                        'model': model.state_dict(), 'optimizer': optimizer.state_dict(),
                        'scaler': scaler.state_dict(), 'step': step, 'settings': asdict(settings),
                        'model_config': asdict(config), 'data': data, 'best': best, 'skipped': skips.tolist(),
                        'wandb_id': wandb_id, 'provenance': origin}, settings.keep_checkpoints, names)
            save, clock, steps_timed = False, time.perf_counter(), 0
        if last or stop:
            break
        if config.dropout:  # its random numbers follow from the step, so that resuming repeats them
            torch.manual_seed(((settings.seed * 1_000_003 + step) * machine.world_size + machine.rank) % 2**63)
        lr = learning_rate(step, settings)
        for group in optimizer.param_groups:
            group['lr'] = lr
        loss, norm = train_step(trained, optimizer, scaler, machine, loader.next, settings.grad_clip)
        steps_timed += 1
        skipped = ~norm.isfinite()
        skips = torch.stack((skips[0] + skipped, (skips[1] + 1) * skipped))
        if step % settings.log_interval == 0:
            asked = torch.tensor(signals.take(), device=machine.device)
            loss, save, stop = machine.sum(torch.cat((loss[None], asked))).tolist()  # waits for the device
            loss /= machine.world_size
            total, in_a_row = skips.tolist()
            if scaler.is_enabled() and scaler.get_scale() < 1:  # a floor: below it, gradients vanish
                scaler.update(1.0)
            if machine.is_first:
                seconds = (time.perf_counter() - clock) / steps_timed
                speed = tokens_per_step / seconds
                mfu = flops * speed / machine.world_size / peak if peak else None
                spike = report({'step': step, 'loss': loss, 'lr': lr, 'grad_norm': norm.item(),
                                'tokens': (step + 1) * tokens_per_step, 'tok_per_s': round(speed, 1), 'mfu': mfu,
                                'scale': scaler.get_scale() if scaler.is_enabled() else None, 'skipped': total})
                left = datetime.timedelta(seconds=round(seconds * (settings.max_iters - step - 1)))
                print(f'step {step} | loss {loss:.4f} | lr {lr:.2e} | norm {norm.item():.3f} | ' +
                      (f'scale {scaler.get_scale():g} | ' if scaler.is_enabled() else '') +
                      ('loss spike | ' if spike else '') + (f'{total} steps skipped | ' if total else '') +
                      f'{speed:,.0f} tok/s | MFU {f"{mfu:.1%}" if mfu else "n/a"} | {left} left', flush=True)
            if settings.max_skipped and in_a_row >= settings.max_skipped:
                machine.agree(FloatingPointError(
                    f'{in_a_row} steps in a row, up to step {step}, had a loss or gradient that is not finite, and '
                    f'were skipped; resume {out}/ckpt.pt, the last checkpoint, with other settings, or start from '
                    f'{out}/ckpt_best.pt'))
            clock, steps_timed = time.perf_counter(), 0
    loader.close()
    machine.agree(step)  # leave together: torchrun kills those that have not finished soon after the first one left
    if machine.is_first:
        print(f'finished at step {step}' if last else f'interrupted, and saved, at step {step}')
    with contextlib.suppress(Exception):  # there may be none
        tracker.finish()
    return not last


def main():
    with one_line_errors(ValueError, OSError):  # alike on every process
        settings, config = configure(TrainConfig, GPTConfig)
        machine = Machine(settings)
    errors = one_line_errors(ValueError, OSError, FloatingPointError, everywhere=True)
    with errors, contextlib.ExitStack() as closing:
        interrupted = run(settings, config, machine, closing)
        if machine.distributed:
            dist.destroy_process_group()
    if interrupted:
        sys.exit(INTERRUPTED)
    if settings.eval_tasks and not settings.eval_only and machine.is_first:  # a program of its own, on one device
        options = {'out_dir': settings.out_dir, 'tasks': settings.eval_tasks, 'data_dir': settings.eval_data_dir,
                   'device': settings.device, 'dtype': settings.dtype, 'out': f'{settings.out_dir}/tasks.json'}
        command = [sys.executable, Path(__file__).with_name('evaluate.py'), 'tasks']
        alone = {name: value for name, value in os.environ.items() if name not in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')}
        sys.exit(subprocess.run(command + [f'--{k}={v}' for k, v in options.items()], env=alone).returncode)


if __name__ == '__main__':
    main()
