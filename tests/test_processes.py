"""train.py on several processes: the same run on any number, and no process waits for a lost one."""

import itertools
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accidents import train_with
from conftest import ROOT, write_dataset
from runs import (
    TRAIN,
    VALIDATION,
    assert_close_losses,
    assert_same_run,
    command_line,
    finish,
    good,
    good_ranks,
    log,
    losses,
    newest,
    ranks,
    run_train,
    snapshot,
    start,
    training_steps,
)
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

import train
from files import locked

# --- the same run --------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def two(work):
    """The out_dir of the whole run on two processes."""
    good_ranks('out/two')
    return 'out/two'


def test_two_processes_reproduce_one(two, whole):
    assert_close_losses(two, whole)
    for ours, theirs in zip(log(two), log(whole), strict=True):
        assert ours.get('grad_norm', 0) == pytest.approx(theirs.get('grad_norm', 0), abs=1e-4)
        assert ours.get('lr') == theirs.get('lr')
    one, both = newest(whole), newest(two)
    assert one['model'].keys() == both['model'].keys() and one['data'] == both['data']


def test_evaluation_is_the_same_on_one_and_two_processes(two, whole):
    # At step 0 the weights are the same.
    ours, theirs = log(two)[0]['val'], log(whole)[0]['val']
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_a_run_of_two_processes_resumes_on_one(two, whole):
    shutil.copytree(two, 'out/two-one')
    os.remove('out/two-one/ckpt_12.pt')
    good('out/two-one', init_from='resume')
    assert_close_losses('out/two-one', whole)


def test_a_run_of_one_process_resumes_on_two(half, whole):
    name = half('out/one-two')
    good_ranks(name, init_from='resume')
    assert_close_losses(name, whole)


def test_a_run_of_two_processes_resumes_on_two_bit_for_bit(work):
    good_ranks('out/two-whole', dropout=0.2)
    shutil.copytree('out/two-whole', 'out/two-two')
    os.remove('out/two-two/ckpt_12.pt')
    good_ranks('out/two-two', dropout=0.2, init_from='resume')
    assert_same_run('out/two-two', 'out/two-whole')


def test_each_process_drops_other_units_at_each_step_and_with_each_seed():
    numbers = set()
    for seed, step, rank in itertools.product((1, 2), range(3), range(4)):
        machine = SimpleNamespace(world_size=4, rank=rank)
        train.seed_step(step, train.TrainConfig(seed=seed), machine)
        numbers.add(torch.rand(1).item())
    assert len(numbers) == 24


def test_two_nodes_reproduce_one(whole):
    good_ranks('out/nodes', nodes=2)
    assert_close_losses('out/nodes', whole)


def test_a_run_goes_on_with_three_and_then_four_processes(work):
    options = dict(
        gradient_accumulation_steps=12,
        batch_size=1,
        eval_interval=0,
        save_steps=(),
        init_from='auto',
    )
    good('out/one', **options, max_iters=4)
    for processes, steps in ((3, 2), (4, 4)):
        good_ranks('out/many', processes, **options, max_iters=steps)
    ours, theirs = training_steps('out/many'), training_steps('out/one')
    assert [entry['step'] for entry in ours] == [0, 1, 2, 3]
    for entry, expected in zip(ours, theirs, strict=True):
        assert entry['loss'] == pytest.approx(expected['loss'], abs=1e-5)


@pytest.mark.skipif(not shutil.which('g++'), reason='no compiler')
def test_compile_under_ddp_gives_the_same_losses_and_a_checkpoint_without_prefixes(work):
    good('out/eager', n_layer=1)
    good_ranks('out/compiled', compile=True, n_layer=1)
    assert_close_losses('out/compiled', 'out/eager', tolerance=1e-3)
    keys = newest('out/eager')['model'].keys()
    assert newest('out/compiled')['model'].keys() == keys


def test_a_loss_that_is_not_finite_in_one_process_skips_the_step_in_all(work):
    words = command_line('out/lone', dict(eval_interval=0, save_steps=()))
    for status, _, err in ranks(2, train_with, 'not finite', *words):
        assert status == 0, err
    entries = training_steps('out/lone')
    assert [entry['grad_norm'] is None for entry in entries] == [n == 3 for n in range(12)]
    assert newest('out/lone')['skipped'] == [1, 0] and entries[-1]['loss'] < 4


@pytest.mark.skipif(not hasattr(LaunchConfig, 'shutdown_timeout'), reason='torch 2.11 lacks it')
def test_torchrun_takes_the_command_lines_that_train_begins_with():
    lines = re.findall(r'^\$ torchrun (.*?)(?:  |$)', train.__doc__, re.M)
    options = [get_args_parser().parse_args(line.split()) for line in lines]
    assert [option.shutdown_timeout for option in options] == [None, 300]
    for option in options:
        assert (ROOT / option.training_script).exists()
        assert (ROOT / option.training_script_args[0]).exists()


# --- torchrun, and mistakes ----------------------------------------------------------------------


def torchrun_with(case, out_dir, restarts=0, **options):
    """Two processes that meet with an accident, and that torchrun starts again.

    In the environment is the setting that the README says a restart needs.
    """
    words = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    words += [f'--max-restarts={restarts}', ROOT / 'tests' / 'accidents.py', case]
    words += command_line(out_dir, options)
    return finish(start(*words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1'))


def test_torchrun_replaces_dead_and_preempted_processes_and_the_run_goes_on(whole):
    """One dies; the next time, one is told to stop, and all stop at the same step."""
    options = dict(init_from='auto', eval_interval=2, save_steps=())
    case = 'death, then preemption'
    status, out, err = torchrun_with(case, 'out/restarted', restarts=2, **options)
    assert status == 0, err
    assert err.count('(exitcode: -9)') == 1 and '(exitcode: 75)' in err, err
    assert out.count('interrupted at step 6; the run is saved') == 1
    for key, loss in losses(whole).items():
        assert losses('out/restarted')[key] == pytest.approx(loss, abs=1e-5), key


def test_an_error_in_one_process_alone_is_told_and_ends_all(work):
    status, out, err = torchrun_with('a lost disk', 'out/lonely')
    errors = [line for line in (out + err).splitlines() if line.startswith('error: ')]
    assert status and errors == ['error: the disk of this machine is gone'], err


def test_a_mistake_of_all_processes_is_one_line_and_no_process_waits(work):
    splits = {'train': TRAIN, 'validation': VALIDATION}
    write_dataset(Path('data/altered'), splits)
    path = Path('data/altered/train/A.bin')
    path.write_bytes(path.read_bytes()[:-2] + b'\1\1')
    before = snapshot('.')
    results = ranks(2, run_train, *command_line('out/refused', dict(dataset='altered')))
    assert all(status for status, _, _ in results)
    (line,) = ''.join(err for _, _, err in results).splitlines()
    assert line.startswith('error: data/altered/train/A.bin was altered')
    assert snapshot('.') == before


def test_machines_that_do_not_share_out_dir_are_refused(half):
    """Rather than start at different steps."""
    name = half('out/unshared')
    os.mkdir('apart')
    shutil.copytree('data', 'apart/data')
    words = command_line(name, dict(init_from='auto'))
    results = ranks(2, train_with, 'folders apart', *words)
    assert all(status for status, _, _ in results)
    (line,) = ''.join(err for _, _, err in results).splitlines()
    ways = "['resume from step 6', 'scratch from step 0']"
    assert (
        line == f'error: processes would go different ways, {ways}: out_dir must be shared by all'
    )
    assert 'step 6 ' not in ''.join(out for _, out, _ in results)


def test_a_folder_that_another_process_holds_is_refused_and_no_process_waits(whole):
    with locked(whole, 'training in'):
        results = ranks(2, run_train, *command_line(whole, dict(init_from='auto')))
    assert all(status for status, _, _ in results)
    (line,) = ''.join(err for _, _, err in results).splitlines()
    assert line == f'error: another process is training in {whole}; choose another --out_dir'


@pytest.mark.parametrize(
    'steps, processes, nearest', [(4, 3, 3), (5, 3, 6), (1, 2, 2), (32, 5, 30)]
)
def test_an_accumulation_the_processes_do_not_divide_names_the_nearest_that_they_do(
    steps, processes, nearest
):
    settings = train.TrainConfig(gradient_accumulation_steps=steps)
    with pytest.raises(ValueError, match=f'{processes} processes; {nearest} is '):
        train.share_of_micro_steps(settings, processes)


def test_an_accumulation_the_processes_do_not_divide_is_refused_once(work):
    options = dict(gradient_accumulation_steps=5)
    results = ranks(2, run_train, *command_line('out/undivided', options))
    assert all(status == 1 for status, _, _ in results)
    (line,) = ''.join(err for _, _, err in results).splitlines()
    assert line.startswith('error: gradient_accumulation_steps=5 is not divisible by 2 processes')
    assert not Path('out/undivided').exists()
