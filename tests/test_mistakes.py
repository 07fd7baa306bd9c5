"""train.py: a mistake is one line on stderr and a failure, and loses nothing."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import write_dataset
from runs import (
    assert_same_run,
    good,
    load,
    read_config,
    refused,
    succeed,
)

import train
from lib.rundir import checkpoints


@pytest.fixture(scope='module', autouse=True)
def other_data(work):
    data_copy('otherwise', seed=1)
    data_copy('foreign', sha256='1' * 64)


def data_copy(name, **changes):
    """data/<name>: the tiny dataset again, with changes to write_dataset's arguments."""
    write_dataset(Path('data', name), **changes)
    return name


# --- data ----------------------------------------------------------------------------------------


def test_a_token_file_that_was_changed_is_refused_at_the_start_and_on_resume(work):
    """By its size; by its bytes where that is asked for."""
    path = Path('data', data_copy('bad'), 'train', 'B.bin')
    good('out/bad', dataset='bad', max_iters=6)
    data = path.read_bytes()
    for changed, options in (data[:-2], {}), (data[:-2] + b'\1\1', dict(verify_data=True)):
        path.write_bytes(changed)
        refused('B.bin', dataset='bad', **options)
        refused('B.bin', dataset='bad', init_from='resume', out_dir='out/bad', **options)


def test_data_that_does_not_do_for_the_settings_is_refused(work):
    refused('data/nope', 'tiny', 'prepare_slimpajama.py', dataset='nope')
    path = Path('data', data_copy('old'), 'meta.json')
    text = path.read_text()
    path.write_text(text.replace('"format": 1', '"format": 0'))
    refused('data/old', 'format 0', dataset='old')
    path.write_text(text[:-9])
    refused('data/old/meta.json', 'prepare it again', dataset='old')
    refused('65', 'vocab_size=64', dataset=data_copy('wide', n_vocab=65))
    refused('295', '2,000', gradient_accumulation_steps=500)
    refused("'Boook'", 'A, B, C', domain_weights="{'Boook': 1.0}")


# --- another run ---------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_or_a_part_of_one_is_refused(whole):
    """What is left of the same run, from before its first checkpoint, is replaced."""

    def left(name, log_lines):
        folder = Path(shutil.copytree(whole, name))
        for path in checkpoints(folder):
            path.unlink()
        lines = Path(whole, 'log.jsonl').read_text().splitlines(keepends=True)
        (folder / 'log.jsonl').write_text(''.join(lines[:log_lines]))
        return name

    weights = f'{whole}/ckpt_12.pt'
    refused(whole, '--init_from=resume', out_dir=whole)
    refused(whole, '--init_from=resume', out_dir=whole, init_from=weights)
    for log_lines in (99, 10):  # it has saved at step 6
        finished = left(f'out/without {log_lines}', log_lines)
        refused(finished, 'checkpoints', out_dir=finished, init_from='auto')
    fragment = left('out/fragment', 4)
    refused(fragment, out_dir=fragment)
    refused(fragment, out_dir=fragment, init_from=weights)
    good(fragment, init_from='auto')
    assert_same_run(fragment, whole)
    for file in ('log.jsonl', 'config.json'):
        foreign = Path(f'out/foreign {file}')
        foreign.mkdir()
        (foreign / file).write_text('{"epoch": 1}\n')
        refused(foreign, out_dir=foreign)
    refused(foreign, out_dir=foreign, init_from='auto')


# Options that resume or take weights of the whole run.
RESUME = dict(out_dir='out/whole', init_from='resume')
WEIGHTS = dict(init_from='out/whole/ckpt_12.pt')


@pytest.mark.parametrize(
    'options, words',
    [
        # another run than the one that is resumed
        (RESUME | dict(n_layer=3), ['n_layer=2', '3']),
        (RESUME | dict(seed=1), ['seed=1337', '1']),
        (RESUME | dict(optimizer='muon'), ['optimizer', 'adamw', 'muon']),
        (RESUME | dict(domain_weights="{'A': 1}"), ['domain_weights={}', "{'A': 1}"]),
        (RESUME | dict(batch_size=8), ['gradient_accumulation_steps * batch_size=8', '16']),
        (RESUME | dict(max_iters=11), ['step 12', 'max_iters=11']),
        (RESUME | dict(dataset='otherwise'), ['data/otherwise']),
        (RESUME | dict(dataset='foreign'), ['tokenizer', 'data/foreign']),
        (dict(init_from='resume'), ['no checkpoint to resume', 'out/refused']),
        # weights of another model
        (WEIGHTS | dict(dataset='foreign'), ['tokenizer', 'data/foreign']),
        (WEIGHTS | dict(n_embd=64), ['does not fit', '--n_embd=32']),
        (WEIGHTS | dict(rope_theta=5e5), ['--rope_theta=10000.0']),  # no shape tells
        (WEIGHTS | dict(share_v=True), ['does not fit', 'attn.v.proj']),
        (WEIGHTS | dict(v_residual='token', residual_layers=(1,)), ['transformer.ve.1']),
        # settings that cannot be
        (dict(init_from='scrach'), ['no checkpoint', 'scrach']),
        (dict(init_from='/dev/zero'), ['/dev/zero is no file']),
        (dict(out_dir=''), ["out_dir=''"]),
        (dict(out_dir='out/caf\udce9'), ['out_dir', 'UTF-8']),
        (dict(out_dir='out/r$\\frac$_seed1'), ['out_dir', 'picture']),
        (dict(max_iters=10**12), ['max_iters=1000000000000', '1000000000']),
        (dict(dtype='fp8'), ["dtype='fp8'", "'bfloat16'"]),
        (dict(gradient_accumulation_steps=0), ['gradient_accumulation_steps=0']),
        (dict(beta1=2.0), ['2.0']),
        (dict(save_steps='(6, 7.5)'), ['save_steps=(6, 7.5)']),
        (dict(save_steps='(-6,)'), ['save_steps=(-6,)']),
        (dict(learning_rate=3e-5), ['min_lr=6e-05', 'learning_rate=3e-05']),
        (dict(lr_decay_iters=3), ['warmup_iters=3', 'lr_decay_iters=3']),
        (dict(lr_decay_iters=0, max_iters=3), ['warmup_iters=3', 'max_iters=3']),
        (dict(cooldown_iters=2), ['cooldown_iters=2', 'lr_decay_iters=12']),
        (dict(cooldown_iters=2, lr_decay_iters=0, decay_lr=False), ['decay_lr=False']),
        (
            dict(cooldown_iters=10, lr_decay_iters=0),
            ['warmup_iters=3', 'cooldown_iters=10', 'max_iters=12'],
        ),
        (dict(attention='fast'), ["attention='fast'", 'auto', 'flash', 'cudnn']),
        (dict(table_rate=2.0), ['table_rate']),
        (dict(activation_memory_budget=0.9), ['activation_memory_budget=0.9', 'compile=False']),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_written(whole, options, words):
    refused(*words, **options)


def test_weights_of_a_run_that_goes_on_are_judged_before_the_optimizers_state(half):
    """As where model.py has one parameter less than before."""
    name = half('out/gone')
    checkpoint = load(f'{name}/ckpt_6.pt')
    for part in (checkpoint['model'], checkpoint['optimizer']['state']):
        part['transformer.gone'] = next(iter(part.values()))
    first, weight = next(iter(checkpoint['model'].items()))
    checkpoint['model'][first] = weight[:1]  # of another shape
    torch.save(checkpoint, f'{name}/ckpt_6.pt')
    words = f'does not fit this model: {first}, transformer.gone'
    refused(words, out_dir=name, init_from='resume')


# --- not mistakes ---------------------------------------------------------------------------------


def test_a_schedule_that_is_not_used_may_contradict_itself(work):
    good('out/constant', max_iters=1, warmup_iters=3, lr_decay_iters=0, decay_lr=False)


def test_a_run_goes_on_with_its_own_settings_under_those_that_are_given(half):
    name = half('out/own')
    words = [f'--out_dir={name}', '--init_from=resume', '--log_interval=2']
    succeed(train.main, *words)
    before, after = read_config('out/whole'), read_config(name)
    changed = {key for key in before if before[key] != after[key]}
    assert changed - {'started', 'ended', 'load', 'commit'} == {
        'out_dir',
        'init_from',
        'log_interval',
    }
    shutil.rmtree(name)
