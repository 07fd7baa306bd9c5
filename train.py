"""
Train a GPT of model.py on a dataset of prepare_slimpajama.py.

$ python train.py config/demo.py                                # one process: GPU, or CPU
$ torchrun --nproc_per_node=8 train.py config/resformer_82m.py  # 8 GPUs
$ torchrun --nproc_per_node=8 --shutdown-timeout=300 train.py config/vanilla_468m.py   # see below
$ python train.py --out_dir=out/demo --init_from=resume         # go on where it stopped
$ python train.py --help                                        # every setting

One run at a constant rate can be finished at several lengths. Copy its folder as it was at a
checkpoint, and resume the copy with a cooldown:

    mkdir out/run_6000; cp out/run/{config.json,log.jsonl,ckpt_5000.pt} out/run_6000
    python train.py --init_from=resume --out_dir=out/run_6000 --cooldown_iters=1000 --max_iters=6000

SIGTERM, Ctrl-C and a hang-up stop a run after its step, under torchrun after the next one (on GPUs one
and two steps later than that), and so does output that can no longer be printed, as after `| head`. The
run is saved, and the same command with --init_from=resume goes on.

After SIGTERM, torchrun gives its processes 30 seconds to finish their step and to write a checkpoint,
which at 468M has 5.6 GB. --shutdown-timeout gives them longer (torch 2.13; 2.11 has no such option).
A run that is killed while it writes a checkpoint is resumed from the one before.
"""

import contextlib
import datetime
import functools
import itertools
import math
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

from configurator import configure, fits

import torch
from torch._functorch import config as functorch_config
from torch.nn.parallel import DistributedDataParallel

from lib.data import Dataset, TrainingRows, micro_batches, validation_batches
from lib.files import caution_about, is_plain, locked, mute, one_line_errors
from lib.machine import INTERRUPTED, Machine, Signals, advise_on_memory
from lib.muon import Muon
from lib.rundir import (
    RunFolder,
    checkpoints,
    code_fingerprint,
    load_checkpoint,
    now,
    optimizer_state,
    provenance,
)
from model import GPT, SHAPE, GPTConfig, refuse

# --- settings ------------------------------------------------------------------------------------


@dataclass
class TrainConfig:
    out_dir: str = 'out/run'  # checkpoint, log.jsonl and config.json go here
    init_from: str = 'scratch'  # scratch, resume, auto (resume if it can), a checkpoint or its run
    seed: int = 1337  # of the initial weights, the data order and dropout
    # data
    dataset: str = 'slimpajama'  # a folder in data/
    domain_weights: dict = field(default_factory=dict)  # {domain: weight}; {}: as prepared
    verify_data: bool = False  # compare the sha256 of the token files, not only their sizes
    # a step is gradient_accumulation_steps * batch_size * block_size tokens, on any number of GPUs
    gradient_accumulation_steps: int = 32  # micro-batches a step, over all GPUs
    batch_size: int = 32  # sequences in a micro-batch
    # the optimizer and its schedule (Section 4.1 and Table 4)
    optimizer: str = 'adamw'  # or muon: for the matrices of attention and MLP, AdamW for the rest
    max_iters: int = 10000  # steps
    learning_rate: float = 6e-4  # after warm-up
    min_lr: float = 6e-5  # at the end
    warmup_iters: int = 120  # linear warm-up from 1e-7
    lr_decay_iters: int = 0  # where the cosine ends; 0: max_iters
    cooldown_iters: int = 0  # linear to min_lr in as many last steps, constant before; 0: cosine
    decay_lr: bool = True  # False: learning_rate throughout, without warm-up
    table_rate: float = 1.0  # times the learning rate, for token tables (v_residual)
    weight_decay: float = 0.1  # on matrices and embeddings
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    grad_clip: float = 1.0  # gradient norm; 0: no clipping
    # evaluation, log, checkpoints
    eval_interval: int = 1000  # steps between evaluations; 0: at the end only
    eval_iters: int = 20  # validation batches per domain; 0: the whole validation split
    log_interval: int = 1  # steps between log lines
    save_interval: int = 1000  # steps between checkpoints; 0: at the end only
    keep_checkpoints: int = 2  # the newest ones stay
    save_steps: tuple = ()  # other steps with a checkpoint, all of which stay
    max_skipped: int = 20  # stop after so many steps in a row without a finite gradient; 0: never
    wandb_log: bool = False  # log to Weights & Biases too
    wandb_project: str = 'nanoresformer'  # its project
    wandb_run_name: str = ''  # its run; '': out_dir's name
    # machine
    device: str = 'auto'  # cuda, cuda:1, cpu, mps; auto: a GPU where there is one
    dtype: str = 'auto'  # float16, bfloat16, float32; auto: float16 on CUDA, else float32
    compile: bool = True  # torch.compile
    attention: str = 'auto'  # on CUDA: flash, cudnn; auto: torch's (flash with dropout), logged
    activation_memory_budget: float = 1.0  # compiled: share of activations stored; less: recomputed
    activation_checkpointing: bool = False  # for long sequences: store less, compute it again
    backend: str = 'auto'  # of torch.distributed: nccl, gloo; auto: nccl on CUDA, else gloo

    def __post_init__(self):
        for (low, high), names in RANGES.items():
            for name in names.split():
                value = getattr(self, name)
                refuse(not low <= value <= high, f'{name}={value} is not between {low} and {high}')
        refuse(not self.out_dir, "out_dir='' names no folder; leave it out, or name one")
        refuse(
            not (self.out_dir.isprintable() and is_plain(Path(self.out_dir).name)),
            f'out_dir={self.out_dir!r} is not UTF-8, or a log or a picture cannot show it; name another '
            'folder',
        )
        for name, allowed in ALLOWED.items():
            value = getattr(self, name)
            refuse(value not in allowed, f'{name}={value!r} is not one of {allowed}')
        budget = self.activation_memory_budget
        refuse(
            budget < 1 and not self.compile,
            f'activation_memory_budget={budget} does nothing with compile=False; '
            'give --activation_memory_budget=1, or compile',
        )
        refuse(
            not all(fits(step, int) and step >= 0 for step in self.save_steps),
            f'save_steps={self.save_steps} are not all whole numbers from 0 on',
        )

    @property
    def rows_per_step(self):
        return self.gradient_accumulation_steps * self.batch_size


STARTS = ('scratch', 'resume', 'auto')  # values of init_from that are no path


# {(lowest, highest value): settings}
RANGES = {
    (1, math.inf): 'gradient_accumulation_steps batch_size log_interval keep_checkpoints',
    (0, math.inf): (
        'eval_interval save_interval eval_iters grad_clip weight_decay learning_rate min_lr '
        'warmup_iters lr_decay_iters cooldown_iters max_skipped table_rate'
    ),
    (0, 1): 'activation_memory_budget',
    (1, 10**9): 'max_iters',
}
ALLOWED = {'optimizer': ('adamw', 'muon'), 'backend': ('auto', 'nccl', 'gloo')}


def settings_of(checkpoint):
    """The TrainConfig of the run that wrote a checkpoint; what it lacks is as by default. It is not
    checked: the run may have begun with a file that is gone. Refuses an imported model."""
    path = checkpoint['path']
    refuse(
        not checkpoint['data']['sha256'],
        f'{path} was imported, and is no run to resume; start one elsewhere with --init_from={path}',
    )
    settings = TrainConfig()
    vars(settings).update(checkpoint['settings'])
    return settings


def settings_beneath(given):
    """{name: value} of the checkpoint that a run begins with. configure() lets files and options, `given`,
    replace them. A run that is resumed has all its settings, one that takes weights those of the model."""
    init_from = given.get('init_from', 'scratch')
    # auto: its command is the one that began the run, with all its settings.
    if init_from in ('scratch', 'auto'):
        return {}

    # No warning of a damaged file: start_run() loads the checkpoint again, and warns.
    if init_from != 'resume':
        return asdict(load_checkpoint(init_from).config)
    out_dir = given.get('out_dir', TrainConfig.out_dir)
    # Whoever trains here may be about to write its last checkpoint. Shared: torchrun's processes all
    # read it.
    is_there = os.path.isdir(out_dir)
    with locked(out_dir, 'training in', shared=True) if is_there else contextlib.nullcontext():
        checkpoint = load_checkpoint(out_dir)
    saved = asdict(settings_of(checkpoint)) | asdict(checkpoint.config)
    return saved | {'out_dir': out_dir}


# --- one step ------------------------------------------------------------------------------------


def make_optimizers(model, settings):
    """[AdamW], or [AdamW, Muon] with optimizer='muon'. What each parameter needs of them is said in
    model.py, by needs_of(). Each must skip a step by its found_inf, as torch's fused ones do."""
    # {(rate, decay): the group of the parameters that need them}, and Muon's by shape, too
    adamw, muon = {}, {}
    for name, p in model.named_parameters():
        needs = model.needs[name]
        rate = getattr(settings, needs.rate) if needs.rate else 1.0
        decay = settings.weight_decay if needs.decay else 0.0
        empty = {'params': [], 'rate': rate, 'weight_decay': decay}
        if needs.muon and settings.optimizer == 'muon':
            group = muon.setdefault((rate, decay, p.shape), empty)
        else:
            group = adamw.setdefault((rate, decay), empty)
        group['params'].append((name, p))

    lr = settings.learning_rate
    betas = (settings.beta1, settings.beta2)
    optimizers = [torch.optim.AdamW([*adamw.values()], lr, betas, eps=1e-8, fused=True)]
    if muon:
        # With this step size, AdamW's learning rates serve.
        optimizers.append(Muon([*muon.values()], lr, adjust_lr_fn='match_rms_adamw'))
    return optimizers


def checkpoint_blocks(model):
    """Let each block store only its input and the tensors that later layers read.

    The backward pass runs the block again: less memory, about a third more computation.
    """

    checkpoint = torch.utils.checkpoint.checkpoint
    for block in model.transformer.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def attention_setting(settings, config):
    """The attention kernel of a run: with dropout, flash in place of torch's own choice.

    Some of cuDNN's kernels round the probability to sixteenths. torch 2.13 leaves them out unless
    that is exact, but torch 2.11 takes them (pytorch pull request 174245).
    """
    if config.dropout and settings.attention == 'auto':
        return 'flash'
    return settings.attention


def leave_out_wrong_kernels():
    """Let the compiler not fuse reductions of weights: to be called before anything is compiled.

    On CUDA and by default in torch 2.13, fused ones are silently wrong for some shapes (pytorch issue
    193061). This may go when tests/test_gpu.py, which compares all compiled gradients with eager ones,
    has passed on a GPU without it.
    """
    from torch._inductor import config  # takes a second, and not every run compiles

    config.triton.mix_order_reduction = False


def compile_model(model, settings):
    """The model, compiled if the settings say so.

    With an activation_memory_budget below 1, the compiler stores less for the backward pass and
    recomputes the rest, the cheapest first: norms and SwiGLU before any matrix product.
    """
    if not settings.compile:
        return model
    leave_out_wrong_kernels()
    functorch_config.activation_memory_budget = settings.activation_memory_budget
    return torch.compile(model)


def distribute(model, machine):
    """The model; under torchrun, wrapped in DistributedDataParallel."""
    if not machine.distributed:
        return model
    # torch 2.13 calls broadcast_buffers old. Its new name starts otherwise, and 2.11 does not know it.
    warnings.filterwarnings('ignore', '.*broadcast_buffers', FutureWarning)
    return DistributedDataParallel(
        model,
        device_ids=[machine.device] if machine.kind == 'cuda' else None,
        gradient_as_bucket_view=True,
        # The compiler cuts the model where a bucket is full, and what crosses a cut is stored. Torch's
        # 25 MiB cut each block of 468M twice, which takes 15 GiB more (results/fakegpu).
        bucket_cap_mb=100,
        broadcast_buffers=False,  # RoPE's tables are constants: do not send them at every step
    )


def learning_rate(step, settings):
    """Linear from 1e-7 at step 0 to learning_rate at warmup_iters, then cosine to min_lr at
    lr_decay_iters, or constant and, in the last cooldown_iters, linear to min_lr at max_iters."""
    if not settings.decay_lr:
        return settings.learning_rate
    warmup = settings.warmup_iters
    if step < warmup:
        return 1e-7 + (settings.learning_rate - 1e-7) * step / warmup
    if settings.cooldown_iters:
        fallen = max(0.0, 1 - (settings.max_iters - step) / settings.cooldown_iters)
        return settings.learning_rate - fallen * (settings.learning_rate - settings.min_lr)
    end = settings.lr_decay_iters or settings.max_iters
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_lr + cosine * (settings.learning_rate - settings.min_lr)


def check_rates(settings, config):
    """Refuse a learning rate that jumps, rises after its warm-up, never decays, or is nobody's.

    For a run that trains, not for every TrainConfig: compare.py reads the learning_rate of an arm
    before it scales min_lr with it.
    """
    if settings.table_rate != 1:
        rates = {needs.rate for needs in GPT.without_weights(config).needs.values()}
        refuse(
            'table_rate' not in rates,
            f'table_rate={settings.table_rate} does nothing with v_residual={config.v_residual!r}, '
            'which has no table; drop it',
        )
    cooldown = settings.cooldown_iters
    for name, default in (('lr_decay_iters', 0), ('decay_lr', True)):
        value = getattr(settings, name)
        # The value may be the resumed run's own, which nobody typed: the message says how to undo it.
        refuse(
            cooldown and value != default,
            f'cooldown_iters={cooldown} is another schedule than {name}={value}; give '
            f'--{name}={default}, or no cooldown',
        )
    if not settings.decay_lr:
        return
    refuse(
        settings.min_lr > settings.learning_rate,
        f'min_lr={settings.min_lr:g} is above learning_rate={settings.learning_rate:g}, so the rate '
        'would rise after its warm-up; lower min_lr, too',
    )
    end = 'lr_decay_iters' if settings.lr_decay_iters else 'max_iters'
    steps = getattr(settings, end)
    # A cosine needs a step after the warm-up, too.
    refuse(
        settings.warmup_iters + max(1, cooldown) > steps,
        f'warmup_iters={settings.warmup_iters} and cooldown_iters={cooldown} leave the rate no room to '
        f'decay in {end}={steps}; raise {end}, or lower one of them',
    )


def train_step(model, optimizers, scaler, machine, next_batch, micro_steps, grad_clip):
    """Forward, backward and update over this process's micro-batches, without waiting for the device.

    Returns (mean loss, gradient norm), tensors. The norm is the same on all processes. If it is not
    finite, there is no update. A loss that is not finite always makes the norm not finite.
    """
    total = torch.zeros((), device=machine.device)
    for micro in range(micro_steps):
        if machine.distributed:
            # All-reduce with the last backward only. DDP reads this flag in its forward, so set it
            # first.
            model.require_backward_grad_sync = micro == micro_steps - 1
        x, y = next_batch()
        with machine.autocast():
            _, loss = model(x, y)
        poison = 1 + 0 * loss.detach()  # 1, or NaN: an infinite loss may have a finite gradient
        scaler.scale(poison * loss / micro_steps).backward()
        total += loss.detach()

    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    for optimizer in optimizers:
        # It skips the step on the device. scaler.step() would go by its own gradients alone.
        optimizer.found_inf = 1 - norm.isfinite().float()
        # On a Mac, fused AdamW does not look at the flag.
        if machine.kind != 'mps' or norm.isfinite():
            optimizer.step()
    scaler.update()
    model.zero_grad(set_to_none=True)
    return total / micro_steps, norm


@torch.no_grad()
def evaluate(model, dataset, settings, machine, signals):
    """{domain: loss, ..., 'mean': mean over domains}, in nats per token, on the same rows every time.

    None if a signal to stop came, which is looked for after each batch.
    """
    model.eval()
    domains = list(dataset.meta['splits']['validation'])
    sums = torch.zeros(len(domains), 2, device=machine.device)  # loss, tokens
    for i, domain in enumerate(domains):
        batches = validation_batches(
            dataset,
            domain,
            model.config.block_size,
            settings.batch_size,
            settings.eval_iters,
            machine,
        )
        for x, y in batches:
            tokens = (y != -1).sum().item()
            if tokens:
                with machine.autocast():
                    _, loss = model(x.to(machine.device), y.to(machine.device))
                sums[i, 0] += loss * tokens
                sums[i, 1] += tokens
            if machine.any(signals.stop):
                return None
    model.train()

    losses = [loss / tokens for loss, tokens in machine.sum(sums).tolist()]
    result = dict(zip(domains, losses, strict=True))
    result['mean'] = sum(losses) / len(losses)
    return result


# --- the start of a run: everything that can be refused is refused here ---------------------------


class Start:
    """What a run starts from: its first step, unless take_weights() or carry_on() changes that."""

    def __init__(self, settings, config, machine):
        self.settings = settings
        self.config = config
        self.dataset, self.rows = open_dataset(settings, config, machine)
        self.model = GPT(config, settings.seed).to(machine.device)
        self.optimizers = make_optimizers(self.model, settings)
        self.scaler = machine.scaler()
        self.origin = settings.init_from  # scratch, or whose weights the run's first ones were
        self.step = 0
        self.skipped = [0, 0]  # steps: in all, and the last ones in a row
        self.wandb_id = None
        self.resumption = {}  # what the log says of it, where a run is resumed

    def facts(self):
        """{name: value} of all that is known of the run before it is trained."""
        known = {
            'origin': self.origin,
            'data': self.dataset.fingerprint(),
            'caution': caution_about(self.dataset.meta['splits']),
        }
        return asdict(self.settings) | asdict(self.config) | known


def start_run(settings, config, machine, folder):
    """The Start of a run in this folder, once all processes agree that it can start."""
    # What fails in one process stops all: the others would wait for it.
    with machine.together():
        first_save = None
        if settings.init_from == 'auto':
            settings.init_from = 'resume' if checkpoints(folder.path) else 'scratch'
            saves = (settings.save_interval, *settings.save_steps, settings.max_iters)
            first_save = min(step for step in saves if step > 0)
        start = Start(settings, config, machine)
        if settings.init_from == 'resume':
            carry_on(folder.newest(machine.warn), start, folder)
        else:
            folder.check_unused(first_save)
            if settings.init_from != 'scratch':
                take_weights(load_checkpoint(settings.init_from, machine.warn), start, machine.warn)
        plan = {
            'code': code_fingerprint(),
            'step': start.step,
            'evaluated': folder.has_evaluation(start.step),
            **start.facts(),
        }
        del plan['out_dir']  # which may be spelled in two ways
    plans = machine.gather(plan)
    with machine.together():
        check_alike(plans)
    return start


def check_alike(plans):
    """Refuse processes that would go different ways: each machine reads files of its own."""
    first, *others = plans
    for name, other in itertools.product(first, others):
        refuse(
            other[name] != first[name],
            f'processes would go different ways: {name} is {first[name]!r} and {other[name]!r}; out_dir '
            'must be shared by all machines, and each must have the same code, config files and data',
        )


def open_dataset(settings, config, machine):
    """(Dataset, TrainingRows), checked against the settings."""
    dataset = Dataset(settings.dataset)
    if settings.verify_data and machine.local_rank == 0:  # once per machine
        dataset.verify()

    ids = dataset.meta['tokenizer']['n_vocab']
    refuse(
        ids > config.vocab_size,
        f'{dataset.folder} has {ids:,} token ids; vocab_size={config.vocab_size:,} is less',
    )
    rows = TrainingRows(
        dataset, config.block_size, settings.seed, settings.domain_weights, machine.warn
    )
    sequences = sum(rows.sizes.values())
    refuse(
        sequences < settings.rows_per_step,
        f'{dataset.folder} holds {sequences:,} sequences of {config.block_size} tokens, a '
        f'step takes {settings.rows_per_step:,}; prepare more, or lower gradient_accumulation_steps',
    )
    return dataset, rows


def take_weights(checkpoint, start, warn):
    """Begin a run with the weights of another one's checkpoint."""
    checkpoint.check_tokenizer(start.dataset.meta['tokenizer']['sha256'], start.dataset.folder)
    checkpoint.load_weights(start.model)
    different = checkpoint.differences(start.config)
    # Settings without which the same weights compute something else, changed on purpose.
    for name, (before, new) in different.items():
        if name not in (*SHAPE, 'dropout'):
            warn(f'note: {checkpoint["path"]} was trained with {name}={before!r}, not {new!r}')
    words = [f'from {checkpoint["path"]}:']
    for name, value in asdict(start.config).items():
        if name not in different and value != getattr(GPTConfig, name):
            words.append(f'{name}={value!r}')
    warn(' '.join(words))


def check_same_run(checkpoint, old, start):
    """Refuse settings with which it would be another run than with the `old` ones. Returns the changes
    that are allowed, {name: [old, new]}."""
    settings, dataset = start.settings, start.dataset
    path, step = checkpoint['path'], checkpoint['step']
    must_match = checkpoint.differences(start.config)  # {name: (old, new)}
    # The optimizer has a state to go on with; seed and domain_weights decide the order of the data.
    for name in ('optimizer', 'seed', 'domain_weights'):
        must_match[name] = getattr(old, name), getattr(settings, name)
    # A step keeps its rows, which may be cut into other micro-batches.
    rows = 'gradient_accumulation_steps * batch_size'
    must_match[rows] = old.rows_per_step, settings.rows_per_step
    for name, (before, new) in must_match.items():
        refuse(
            before != new,
            f'{path} is a run with {name}={before!r}, not {new!r}; carry it on with its own settings, '
            'or start another out_dir',
        )
    checkpoint.check_tokenizer(dataset.meta['tokenizer']['sha256'], dataset.folder)
    checkpoint.check_data(dataset)
    refuse(
        step > settings.max_iters,
        f'{path} is at step {step}, past max_iters={settings.max_iters}; raise max_iters',
    )

    changed = {}
    for name, value in asdict(settings).items():
        if getattr(old, name) != value and name != 'init_from':
            changed[name] = [getattr(old, name), value]
    return changed


def carry_on(checkpoint, start, folder):
    """Fill `start` with what a run's checkpoint and its log say, or refuse to go on as another run."""
    old, settings, step = settings_of(checkpoint), start.settings, checkpoint['step']
    # Steps of save_steps that are past stay among them, and so their checkpoints are kept.
    passed = {kept for kept in old.save_steps if kept <= step}
    settings.save_steps = tuple(sorted(passed | {*settings.save_steps}))
    changed = check_same_run(checkpoint, old, start)
    # {setting: [before, now]}, and what made the run up to the checkpoint
    start.resumption = {'step': step, 'changed': changed, 'before': checkpoint['provenance']}
    if not folder.has_ended(step, settings):
        folder.forget_resumption(step)
        if step == settings.max_iters:
            # It may have been evaluated here on another text, or on less of it.
            folder.entries = [entry for entry in folder.entries if entry['step'] < step]
    checkpoint.load_weights(start.model)
    checkpoint.load_state(start.optimizers, start.scaler)
    start.step, start.skipped = step, checkpoint['skipped']
    start.origin = checkpoint['origin']
    # In another folder, it is a copy, and a run of its own to wandb: the first one may go on, too.
    if Path(old.out_dir).resolve() == Path(settings.out_dir).resolve():
        start.wandb_id = checkpoint['wandb_id']


# --- what a run says and writes, on its first process ---------------------------------------------


class Reporter:
    """The terminal, the log, the checkpoints and wandb."""

    def __init__(self, start, folder, machine, signals):
        settings, config = start.settings, start.config
        self.start = start
        self.settings = settings
        self.folder = folder
        self.machine = machine
        self.signals = signals
        self.provenance = provenance(machine)
        self.provenance['attention_kernel'] = machine.attention_kernel(
            config.n_head, config.kv_heads, config.head_size, config.block_size
        )
        self.peak_flops = machine.peak_flops()
        self.flops_per_token = start.model.flops_per_token(config.block_size)
        everything = start.facts() | self.provenance
        for name, value in everything.items():
            self.say(f'{name:28} {value}')
        inner, total = start.model.num_params(), start.model.num_params(non_embedding=False)
        self.say(f'{inner:,} parameters without embeddings, {total:,} with\n')
        if start.resumption:
            self.say(f'resumed; settings that changed: {start.resumption["changed"]}')

        folder.begin()
        # Each start or resumption begins a new part of the run. config.json describes the newest part,
        # and the log those before. A finished run that is resumed has no new part, unless it is to end
        # otherwise than was planned: at another step (its max_iters was lowered to this one, or it was to
        # be extended), or evaluated with another eval_iters or batch_size.
        self.description = {}  # of the new part; {}: there is none
        if not folder.has_ended(start.step, settings):
            self.description = everything
            folder.describe(everything)
            if start.resumption:
                folder.log.write(start.resumption)
        self.tracker = self.start_wandb(everything) if settings.wandb_log else None

    def start_wandb(self, everything):
        """Its run; None if there is none."""
        try:
            import wandb

            run = wandb.init(
                project=self.settings.wandb_project,
                name=self.settings.wandb_run_name or self.folder.path.name,
                config=everything,
                id=self.start.wandb_id,
                resume='allow',
                dir=self.settings.out_dir,
            )
            # wandb's own step never goes back, as that of a run does where it is resumed.
            run.define_metric('*', step_metric='step')
            return run
        except Exception as error:  # a tracker must never stop training
            self.machine.warn(f'warning: no wandb: {error}')

    def say(self, words):
        """Print a line. If that fails, because nobody reads it any more, let the run stop."""
        try:
            print(words, flush=True)
        except OSError:
            mute(sys.stdout)
            self.signals.stop = True

    def write(self, entry):
        self.folder.log.write(entry)
        if self.tracker:
            values = {f'val/{domain}': loss for domain, loss in entry.get('val', {}).items()}
            with contextlib.suppress(Exception):  # never fatal
                self.tracker.log({**(values or entry), 'step': entry['step']})

    def evaluation(self, step, losses, seconds):
        entry = {'step': step, 'val': losses, 'seconds': round(seconds, 3)}
        model = self.start.model
        named = model.named_parameters()
        mixing = {name: p.tolist() for name, p in named if model.needs[name].logged}
        if mixing:
            entry['mixing'] = mixing
        self.write(entry)
        self.say(f'step {step} | validation loss {losses["mean"]:.4f}')

    def step(self, step, loss, norm, lr, scale, skipped, seconds):
        """Log one step; seconds: the time that it took."""
        tokens = self.settings.rows_per_step * self.start.config.block_size
        speed = tokens / seconds
        mfu = None
        if self.peak_flops:
            mfu = speed * self.flops_per_token / self.machine.world_size / self.peak_flops
        entry = {
            'step': step,
            'loss': loss,
            'lr': lr,
            'grad_norm': norm,
            'tokens': (step + 1) * tokens,
            'tok_per_s': round(speed, 1),
            'mfu': mfu,
            'scale': scale if self.start.scaler.is_enabled() else None,
            'skipped': skipped,
        }
        self.write(entry)

        share = f'MFU {mfu:.1%}' if mfu else 'MFU n/a'
        steps_left = self.settings.max_iters - step - 1
        left = datetime.timedelta(seconds=round(seconds * steps_left))
        self.say(
            f'step {step} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.3f} | skipped {skipped} | '
            f'{speed:,.0f} tok/s | {share} | {left} left'
        )

    def checkpoint(self, step, skipped):
        """Write the checkpoint of a step. skipped: [steps in all, the last ones in a row]."""
        start = self.start
        parts = {
            'model': start.model.state_dict(),
            'optimizer': {'state': optimizer_state(start.optimizers)},
            'scaler': start.scaler.state_dict(),
            'step': step,
            'settings': asdict(self.settings),
            'model_config': asdict(start.config),
            'data': {
                'row': step * self.settings.rows_per_step,
                'sha256': start.dataset.hashes(),
                'tokenizer': start.dataset.meta['tokenizer'],
            },
            'skipped': skipped,
            'origin': start.origin,
            'wandb_id': self.tracker.id if self.tracker else start.wandb_id,
            'provenance': self.provenance,
        }
        self.folder.save(parts)

    def finish(self, step, interrupted):
        if self.description:
            self.folder.describe(self.description | {'ended': now()})
        if interrupted:
            self.say(f'interrupted at step {step}; the run is saved')
        else:
            self.say(f'finished at step {step}')


# --- the loop -------------------------------------------------------------------------------------


def train(settings, config, machine, micro_steps, closing):
    """Train until max_iters or a signal. Returns whether it was interrupted.

    micro_steps: this process's share of gradient_accumulation_steps.
    """
    folder = RunFolder(settings.out_dir)
    with machine.together():
        if machine.is_first:
            closing.enter_context(folder.held())
    start = start_run(settings, config, machine, folder)
    if settings.activation_checkpointing:
        checkpoint_blocks(start.model)
    compiled = compile_model(start.model, settings)
    wrapped = distribute(compiled, machine)
    signals = Signals(closing)
    reporter = None
    if machine.is_first:
        reporter = Reporter(start, folder, machine, signals)
    batches = micro_batches(start.rows, settings, machine, start.step)
    next_batch = functools.partial(next, batches)
    step, skipped = start.step, start.skipped
    saved = step if settings.init_from == 'resume' else None
    evaluated = step if folder.has_evaluation(step) else None
    unread = None  # the newest step, whose numbers are read when the next one has been launched
    all_stop = False  # whether any process was told to, as all know since the last reading

    while True:
        last = step == settings.max_iters
        stop = all_stop if machine.distributed else signals.stop
        is_due = step > 0 and at_interval(step, settings.save_interval)
        saves = step != saved and (is_due or step in settings.save_steps or stop or last)
        evaluates = step != evaluated and (last or at_interval(step, settings.eval_interval))

        launched = None
        if not (saves or evaluates or stop or last):
            launched = launch_step(step, start, wrapped, machine, next_batch, micro_steps, signals)
            step += 1
        if unread:
            all_stop, skipped = read(unread, skipped, start, machine, reporter)
        unread = launched

        # Save first: what is saved cannot be lost while it is evaluated.
        if saves:
            if reporter:
                reporter.checkpoint(step, skipped)
            saved = step
        if stop:
            break
        if evaluates:
            began = time.perf_counter()
            losses = evaluate(compiled, start.dataset, settings, machine, signals)
            if losses is None:
                all_stop = True
                continue  # to save and to stop
            if reporter:
                reporter.evaluation(step, losses, time.perf_counter() - began)
            evaluated = step
        if last:
            break

    # Leave together: soon after the first process has left, torchrun kills the others.
    machine.gather(step)
    if reporter:
        reporter.finish(step, interrupted=stop)
    return stop


def launch_step(step, start, model, machine, next_batch, micro_steps, signals):
    """Let the device train a step, without waiting for it. Returns what read() waits for."""
    settings, scaler = start.settings, start.scaler
    seed_step(step, settings, machine)
    lr = learning_rate(step, settings)
    for optimizer in start.optimizers:
        for group in optimizer.param_groups:
            group['lr'] = lr * group['rate']
    began = machine.moment()
    loss, norm = train_step(
        model, start.optimizers, scaler, machine, next_batch, micro_steps, settings.grad_clip
    )
    scale = scaler.scale(torch.ones_like(norm)).clamp(min=1)  # below 1, gradients vanish
    scaler.update(scale)
    loss, told = machine.sum(torch.stack([loss, torch.full_like(loss, signals.stop)]))
    numbers = torch.stack([loss / machine.world_size, norm, scale, told])
    # Into pinned memory, but by CUDA alone: elsewhere nothing says when the copy is complete.
    numbers = numbers.to('cpu', non_blocking=machine.kind == 'cuda')
    return step, lr, numbers, began, machine.moment()


def read(unread, skipped, start, machine, reporter):
    """Wait for the numbers of a step, and log it. Returns whether a process was told to stop, and how many
    steps were skipped, counted on: [in all, the last ones in a row]."""
    step, lr, numbers, began, ended = unread
    seconds = machine.seconds_between(began, ended)
    loss, norm, scale, told = numbers.tolist()
    in_all, in_a_row = skipped
    if math.isfinite(norm):
        in_a_row = 0
    else:
        in_all += 1
        in_a_row += 1
    settings = start.settings
    if reporter and step % settings.log_interval == 0:
        reporter.step(step, loss, norm, lr, scale, in_all, seconds)
    if settings.max_skipped and in_a_row >= settings.max_skipped:
        error = too_many_skipped(step, in_a_row, settings)
        with machine.together():  # every process raises it, and the first one says it
            if reporter:
                reporter.folder.give_up(error)
            raise error
    return told > 0, [in_all, in_a_row]


def at_interval(step, interval):
    """Whether a step is a multiple of an interval; of 0, none is."""
    return interval > 0 and step % interval == 0


def seed_step(step, settings, machine):
    """Let the model's random numbers, such as dropout's, follow from the step, so that a resumed run
    repeats them."""
    number = (settings.seed * 1_000_003 + step) * machine.world_size + machine.rank
    torch.manual_seed(number % 2**63)


def share_of_micro_steps(settings, processes):
    """How many of a step's micro-batches each process has."""
    total = settings.gradient_accumulation_steps
    nearest = max(1, round(total / processes)) * processes
    refuse(
        total % processes,
        f'gradient_accumulation_steps={total} is not divisible by {processes} processes; {nearest} is '
        '(change batch_size, too, so that a step keeps its tokens)',
    )
    return total // processes


# How compare.py tells a training that diverged from one that was killed or is mistaken.
NOT_FINITE = 'had a loss or gradient that is not finite'


def too_many_skipped(step, skipped, settings):
    """The error that gives up a training, with advice."""
    paths = checkpoints(settings.out_dir)
    advice = (
        'no checkpoint has been written yet: start again with other settings and another out_dir'
    )
    if paths:
        advice = f'resume {paths[0]}, the last checkpoint, with other settings'
    if len(paths) > 1:
        advice += f', or start another run from {paths[-1]}'
    return FloatingPointError(
        f'{skipped} steps in a row, up to step {step}, {NOT_FINITE}, and were skipped; {advice}'
    )


LESS_MEMORY = (
    'Halve batch_size, and double gradient_accumulation_steps and eval_iters: the same step, the same '
    'data order and the same validation text. Or set '
    '--activation_checkpointing=True or, where the run is compiled, --activation_memory_budget=0.9.'
)


def main():
    with one_line_errors():  # the same on every process
        settings, config = configure(TrainConfig, GPTConfig, doc=__doc__, under=settings_beneath)
        attention = attention_setting(settings, config)
        machine = Machine(settings.device, settings.dtype, tf32=True, attention=attention)
        micro_steps = share_of_micro_steps(settings, machine.world_size)
        check_rates(settings, config)
        machine.join(settings.backend)
    with (
        one_line_errors(everywhere=True),
        advise_on_memory(LESS_MEMORY),
        contextlib.ExitStack() as closing,
    ):
        interrupted = train(settings, config, machine, micro_steps, closing)
        machine.close()
    if interrupted:
        sys.exit(INTERRUPTED)


if __name__ == '__main__':
    main()
