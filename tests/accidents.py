"""
Accidents in the middle of a run; the tests look at what is left of it.

Each replaces a function of the program, and then starts it.
"""

import functools
import itertools
import math
import multiprocessing
import os
import signal
import sys

import torch
from runs import run_main
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import train
from lib import data, logs


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def be_told_to_stop(*args):
    os.kill(os.getpid(), signal.SIGTERM)


def at_call(number, function, act):
    """The function; its call of this number acts first."""
    calls = itertools.count(1)

    def call(*args, **options):
        if next(calls) == number:
            act(*args)
        return function(*args, **options)

    return call


def spoiled(spoil, steps):
    """train_step() of a model that is spoiled at these steps, counted from the first one that is taken.

    spoil: hooks something into the model, and returns the hook.
    """
    step = train.train_step
    calls = itertools.count()

    def step_or_spoil(model, *rest):
        if next(calls) not in steps:
            return step(model, *rest)
        hook = spoil(model)
        try:
            return step(model, *rest)
        finally:
            hook.remove()

    return step_or_spoil


def not_a_number(model):
    return model.register_forward_hook(lambda module, args, out: (None, out[1] * math.nan))


def infinite(model):
    """With a finite gradient."""
    return model.register_forward_hook(lambda module, args, out: (None, out[1] + math.inf))


def infinite_for_muon(model):
    """With finite gradients for AdamW."""
    return model.transformer.h[0].mlp.c_fc.weight.register_hook(lambda grad: grad * math.inf)


def overflowing(model):
    """All gradients are finite, but their norm is not."""
    return model.lm_head.weight.register_hook(lambda grad: grad * 1e30)


# --- training ------------------------------------------------------------------------------------


def die_before_flush():
    """The checkpoint of step 6 is written, and not yet on the disk."""

    def prepare_to_die(*args):
        os.fsync = at_call(2, os.fsync, die)  # log, then checkpoint

    train.train_step = at_call(6, train.train_step, prepare_to_die)


def die_before_rename(name='ckpt_6.pt'):
    """A file, such as the checkpoint of step 6, is on the disk, and has not got its name."""
    replace = os.replace

    def replace_or_die(source, target):
        if str(target).endswith(name):
            die()
        replace(source, target)

    os.replace = replace_or_die


def die_in_an_evaluation():
    """In the middle of the last evaluation, the third."""
    batches = train.validation_batches
    domains = 3
    train.validation_batches = at_call(3 * domains, batches, die)


def die_in_an_append():
    """Half of the log line of step 9 is written."""
    write = logs.Log.write

    def half_a_line(log, entry):
        log.file.write('{"step": 9, "lo')
        log.file.flush()
        die()

    dying = at_call(10, write, half_a_line)

    def write_or_die(log, entry):
        return (dying if 'loss' in entry else write)(log, entry)

    logs.Log.write = write_or_die


def die_then_be_preempted():
    """One process dies in its fourth step; restarted, another is told to stop in its fourth step."""
    restarts, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']
    if (restarts, rank) == ('0', '1'):
        train.train_step = at_call(4, train.train_step, die)
    if (restarts, rank) == ('1', '0'):
        train.train_step = at_call(4, train.train_step, be_told_to_stop)


def be_preempted_in_an_evaluation():
    """One process is told to stop while it evaluates step 6 of its second domain."""
    if os.environ['RANK'] == '1':
        train.validation_batches = at_call(5, train.validation_batches, be_told_to_stop)


def lose_a_loss():
    """In the fourth step of one process the loss is no number."""
    if os.environ['RANK'] == '1':
        train.train_step = spoiled(not_a_number, {3})


def lose_a_disk():
    """One process cannot read the training data."""
    read = data.Dataset.read

    def fail(dataset, split, *rest):
        if split == 'train':
            raise OSError('the disk of this machine is gone')
        return read(dataset, split, *rest)

    if os.environ['RANK'] == '1':
        data.Dataset.read = fail


def be_interrupted():
    """Ctrl-C before the first step."""
    train.Dataset = lambda name: os.kill(os.getpid(), signal.SIGINT)


def lose_its_reader():
    """Nobody reads the output any more from the fourth step on, like `| head`."""
    reader, writer = os.pipe()
    speak_to(writer)
    train.train_step = at_call(4, train.train_step, lambda *args: os.close(reader))


def have_no_room_for_output():
    """The disk of the output's file is full."""
    speak_to(os.open('/dev/full', os.O_WRONLY))


def speak_to(handle):
    sys.stdout, sys.stderr = (open(handle, 'w', closefd=False) for _ in range(2))


def have_no_terminal():
    """The output was closed before the start, as by `>&- 2>&-`."""
    sys.stdout = sys.stderr = None


def compile_without_inductor():
    """No accident: graphs are traced and cut as always, and run as they are."""

    def traced(graph, inputs):
        print('a graph, with gradients:', torch.is_grad_enabled())
        return aot_eager(graph, inputs)

    torch.compile = functools.partial(torch.compile, backend=traced)


def be_elsewhere():
    """One process is on a machine that does not share out_dir."""
    if os.environ['RANK'] == '1':
        os.chdir('apart')


def train_with(accident, *words):
    """train.py with a command line, and an accident."""
    accident()
    run_main(train.main, *words)


def torchrun(accident, restarts, *words):
    """What `torchrun --standalone --nproc_per_node=2` does, but that its processes are forked, and have
    nothing to import."""
    multiprocessing.current_process().daemon = False  # it has children
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend='c10d',
        rdzv_endpoint='localhost:0',
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method='fork',
    )
    elastic_launch(config, train_with)(accident, *words)
