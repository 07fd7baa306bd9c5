"""train.py on several processes: the same run on any number, and no process waits for a lost one."""

import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import accidents
import pytest
import torch
from accidents import torchrun, train_with
from conftest import ROOT, contents, write_dataset
from runs import (
    assert_close_losses,
    assert_same_run,
    command_line,
    finish,
    fork,
    good,
    good_ranks,
    log,
    losses,
    newest,
    ranks,
    run_main,
    training_steps,
)
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

import train
from lib.files import locked

# --- the same run --------------------------------------------------------------------------------


def test_two_processes_reproduce_one_and_either_resumes_the_other(half, whole):
    good_ranks('out/two')
    assert_close_losses('out/two', whole)
    for ours, theirs in zip(log('out/two'), log(whole), strict=True):
        assert ours.get('grad_norm', 0) == pytest.approx(theirs.get('grad_norm', 0), abs=1e-4)
    assert newest('out/two')['data'] == newest(whole)['data']

    for name, first, go_on in (('two-one', 'out/two', good), ('one-two', whole, good_ranks)):
        go_on(half(f'out/{name}', first), init_from='resume')
        assert_close_losses(f'out/{name}', whole)


def test_a_run_of_two_processes_resumes_on_two_bit_for_bit(half):
    good_ranks('out/two-whole', dropout=0.2)
    good_ranks(half('out/two-two', 'out/two-whole'), dropout=0.2, init_from='resume')
    assert_same_run('out/two-two', 'out/two-whole')


def test_each_process_drops_other_units_at_each_step_and_with_each_seed():
    numbers = set()
    for seed, step, rank in itertools.product((1, 2), range(3), range(4)):
        machine = SimpleNamespace(world_size=4, rank=rank)
        train.seed_step(step, train.TrainConfig(seed=seed), machine)
        numbers.add(torch.rand(1).item())
    assert len(numbers) == 24


def test_a_run_goes_on_with_three_and_then_four_processes_on_two_machines(work):
    options = dict(
        gradient_accumulation_steps=12,
        batch_size=1,
        eval_interval=0,
        eval_iters=0,
        save_steps=(),
        init_from='auto',
    )
    good('out/one', **options, max_iters=4)
    good_ranks('out/many', 3, **options, max_iters=2)
    good_ranks('out/many', 4, nodes=2, **options, max_iters=4)
    ours, theirs = losses('out/many'), losses('out/one')
    assert [*theirs] == [f'train {step}' for step in range(4)] + ['validation 4']
    for key, loss in theirs.items():
        assert ours[key] == pytest.approx(loss, abs=1e-5), key


@pytest.mark.skipif(not shutil.which('g++'), reason='no compiler')
def test_compile_under_ddp_gives_the_same_losses_and_a_checkpoint_without_prefixes(work):
    table = dict(v_residual='token', residual_layers='(0,)')
    model = dict(n_layer=1, **table, residual_weights='head', x0_residual=True, exclusive=True)
    good('out/eager', **model)
    words = command_line('out/compiled', dict(model, compile=True))
    for status, out, err in ranks(2, train_with, accidents.compile_without_inductor, *words):
        assert status == 0, err
        assert 'a graph, with gradients: True' in out and 'FutureWarning' not in err
    assert_close_losses('out/compiled', 'out/eager')
    assert newest('out/compiled')['model'].keys() == newest('out/eager')['model'].keys()


def test_a_loss_that_is_not_finite_in_one_process_skips_the_step_in_all(work):
    words = command_line('out/lone', dict(dtype='float16', eval_interval=0, save_steps=()))
    for status, _, err in ranks(2, train_with, accidents.lose_a_loss, *words):
        assert status == 0, err
    entries = training_steps('out/lone')
    assert [entry['grad_norm'] is None for entry in entries] == [n == 3 for n in range(12)]
    assert newest('out/lone')['skipped'] == [1, 0] and entries[-1]['loss'] < 4
    assert entries[-1]['scale'] == 2.0**15


@pytest.mark.skipif(not hasattr(LaunchConfig, 'shutdown_timeout'), reason='torch 2.11 lacks it')
def test_torchrun_takes_the_command_lines_that_train_begins_with():
    lines = re.findall(r'^\$ torchrun (.*?)(?:  |$)', train.__doc__, re.M)
    options = [get_args_parser().parse_args(line.split()) for line in lines]
    assert [option.shutdown_timeout for option in options] == [None, 300]
    for option in options:
        assert (ROOT / option.training_script).exists()
        assert (ROOT / option.training_script_args[0]).exists()


# --- accidents -----------------------------------------------------------------------------------


def torchrun_with(accident, out_dir, restarts=0, **options):
    """Two processes that meet with an accident, and that torchrun starts again.

    In the environment is the setting that results/trust says a restart needs.
    """
    words = command_line(out_dir, options)
    environment = {'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'}
    return finish(fork(torchrun, accident, restarts, *words, **environment))


def test_torchrun_replaces_dead_and_preempted_processes_and_the_run_goes_on(whole):
    """One dies; the next time, one is told to stop, and all stop at the same step."""
    options = dict(init_from='auto', save_interval=2, save_steps=())
    accident = accidents.die_then_be_preempted
    status, out, err = torchrun_with(accident, 'out/restarted', restarts=2, **options)
    assert status == 0, err
    # The one that dies may be told by the other, whose connection to it breaks.
    died, *_, preempted = re.findall(r'failed \(exitcode: (-?\d+)\)', err)
    assert died in ('-9', '1') and preempted == '75', err
    assert out.count('interrupted at step 6; the run is saved') == 1
    for key, loss in losses(whole).items():
        assert losses('out/restarted')[key] == pytest.approx(loss, abs=1e-5), key


def test_a_signal_to_one_process_in_an_evaluation_stops_all(work):
    words = command_line('out/evaluating', dict(save_steps=()))
    for status, _, err in ranks(2, train_with, accidents.be_preempted_in_an_evaluation, *words):
        assert status == 75, err
    assert newest('out/evaluating')['step'] == 6


def test_an_error_in_one_process_alone_is_told_and_ends_all(work):
    status, out, err = torchrun_with(accidents.lose_a_disk, 'out/lonely')
    errors = [line for line in (out + err).splitlines() if line.startswith('error: ')]
    assert status and errors == ['error: the disk of this machine is gone'], err


# --- mistakes ------------------------------------------------------------------------------------


def one_line(results):
    """What several processes say that have all failed."""
    assert all(status for status, _, _ in results)
    (line,) = ''.join(err for _, _, err in results).splitlines()
    assert line.startswith('error: ')
    return line


def test_a_mistake_of_all_processes_is_one_line_and_no_process_waits(work):
    write_dataset(Path('data/altered'))
    path = Path('data/altered/train/A.bin')
    path.write_bytes(path.read_bytes()[:-2] + b'\1\1')
    before = contents('.')
    words = command_line('out/refused', dict(dataset='altered', verify_data=True))
    results = ranks(2, run_main, train.main, *words)
    assert str(path) in one_line(results)
    results = ranks(
        2, run_main, train.main, *command_line('out/refused', dict(gradient_accumulation_steps=5))
    )
    line = one_line(results)
    assert 'gradient_accumulation_steps=5' in line and '2 processes; 4 is' in line
    assert contents('.') == before


def one_line_apart(*words):
    """What they say where one is on a machine that does not share out_dir."""
    return one_line(ranks(2, train_with, accidents.be_elsewhere, *words))


def test_machines_that_would_train_different_runs_are_refused(half):
    """They have another step, another log, other data, or another config file."""
    name = half('out/unshared')
    shutil.copytree('data', 'apart/data')
    for path, rate in (('mine.py', 0.01), ('apart/mine.py', 0.02)):
        Path(path).write_text(f'learning_rate = {rate}')
    words = command_line(name, {'init_from': 'auto'})
    line = one_line_apart(*words)
    assert 'step is 6 and 0;' in line and 'out_dir' in line

    # Without the log, one would evaluate once more, and wait for the other.
    shutil.copytree(name, f'apart/{name}', dirs_exist_ok=True)
    Path('apart', name, 'log.jsonl').unlink()
    assert 'evaluated is True and False;' in one_line_apart(*words)

    words = [word for word in command_line('out/new', {}) if 'learning_rate' not in word]
    assert 'learning_rate is 0.01 and 0.02;' in one_line_apart('mine.py', *words)

    write_dataset(Path('apart/data/tiny'), seed=1)
    assert 'data is' in one_line_apart(*words)


def test_a_folder_that_another_process_holds_is_refused_and_no_process_waits(whole):
    with locked(whole, 'training in'):
        results = ranks(2, run_main, train.main, *command_line(whole, dict(init_from='auto')))
    assert whole in one_line(results)
