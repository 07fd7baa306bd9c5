"""train.py: a mistake is one line on stderr and a failure, and loses nothing."""

import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, write_dataset
from programs import Evil
from runs import (
    TRAIN,
    VALIDATION,
    assert_same_run,
    command_line,
    finish,
    good,
    here,
    load,
    refused,
    start,
)


def data_copy(name, **changes):
    """data/<name>: the tiny dataset again, with changes to write_dataset's arguments."""
    splits = {'train': TRAIN, 'validation': VALIDATION}
    write_dataset(Path('data', name), **{'splits': splits, **changes})
    return name


def test_a_mistake_on_the_command_line_is_one_line_and_a_failure(work):
    """The rest of these tests look at sys.exit's argument; here is what a person sees."""
    words = command_line('out/refused', {'learning_rat': 1})
    status, out, err = finish(start(ROOT / 'train.py', *words))
    assert status == 1 and out == '' and err.count('\n') == 1 and err.startswith('error: ')


# --- data ----------------------------------------------------------------------------------------


def test_data_that_is_not_prepared_names_the_command_that_does_it(work):
    refused('data/nope', 'python prepare_slimpajama.py', dataset='nope')


def test_a_truncated_and_an_altered_token_file_are_refused(work):
    path = Path('data', data_copy('bad'), 'train', 'B.bin')
    good('out/bad', dataset='bad', max_iters=6)
    data = path.read_bytes()
    truncated = data[:-2], ['B.bin', '5,998']
    altered = data[:-2] + b'\1\1', ['B.bin', 'altered']
    for bad_data, words in (truncated, altered):
        path.write_bytes(bad_data)
        refused(*words, dataset='bad')
        refused(*words, dataset='bad', init_from='resume', out_dir='out/bad')
    path.write_bytes(data)
    good('out/bad', dataset='bad', max_iters=7, init_from='resume')


def test_verify_data_hashes_what_was_right_before(work):
    path = Path('data', data_copy('touched'), 'train', 'B.bin')
    good('out/touched', dataset='touched', max_iters=1)
    before = path.stat()
    path.write_bytes(path.read_bytes()[:-2] + b'\1\1')
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused('B.bin', 'altered', dataset='touched', verify_data=True)


def test_a_dataset_of_another_format_is_refused(work):
    path = Path('data', data_copy('old'), 'meta.json')
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
    refused('data/old', 'format 0', dataset='old')


def test_a_vocabulary_larger_than_the_models_is_refused(work):
    refused('65', 'vocab_size=64', dataset=data_copy('wide', n_vocab=65))


def test_a_corpus_too_small_for_one_batch_is_refused(work):
    refused('holds 295 sequences', 'takes 1,000', gradient_accumulation_steps=500)


def test_an_unknown_domain_is_refused_with_those_there_are(work):
    refused("'Boook'", 'A, B, C', domain_weights="{'Boook': 1.0}")


# --- another run ---------------------------------------------------------------------------------


@pytest.mark.parametrize('init_from', ['scratch', 'weights.pt', 'out/whole/ckpt_12.pt'])
def test_an_out_dir_that_holds_another_run_is_refused(whole, init_from):
    shutil.copyfile(f'{whole}/ckpt_6.pt', 'weights.pt')
    refused(whole, '--init_from=resume', out_dir=whole, init_from=init_from)


@pytest.mark.parametrize(
    'options, words',
    [
        (dict(n_layer=3), ['n_layer=2', '3']),
        (dict(v_residual=True), ['v_residual=False', 'True']),
        (dict(dropout=0.1), ['dropout=0.0', '0.1']),
        (dict(seed=1), ['seed=1337', '1']),
        (dict(domain_weights="{'A': 1}"), ['domain_weights={}', "{'A': 1}"]),
        (dict(batch_size=4), ['rows_per_step=8', 'not 16']),
        (dict(gradient_accumulation_steps=2), ['rows_per_step=8', 'not 4']),
        (dict(max_iters=11), ['step 12', 'max_iters=11']),
        (dict(dataset='otherwise'), ['data/otherwise']),
        (dict(dataset='retokenized'), ['tokenizer', 'data/retokenized']),
    ],
    ids=str,
)
def test_resuming_as_another_run_is_refused(whole, options, words):
    if options.get('dataset') == 'otherwise':
        data_copy('otherwise', seed=1)
    if options.get('dataset') == 'retokenized':
        path = Path('data', data_copy('retokenized'), 'meta.json')
        path.write_text(path.read_text().replace('0' * 64, '1' * 64))
    refused(*words, out_dir=whole, init_from='resume', **options)


def test_resuming_where_there_is_nothing_is_refused(work):
    refused('nothing to resume', 'out/refused', init_from='resume')


def test_the_folder_of_a_run_is_no_checkpoint_but_has_some(whole):
    refused(
        f'is the folder of a run; give one of its checkpoints, such as {whole}/ckpt_12.pt',
        init_from=whole,
    )


def test_weights_that_do_not_fit_are_refused(whole):
    path = f'{whole}/ckpt_12.pt'
    refused('does not fit', '--n_embd=32', init_from=path, n_embd=64)
    refused('does not fit', '--n_layer=2', init_from=path, n_layer=1)
    refused(
        'does not fit', '--rope_theta=10000.0', init_from=path, rope_theta=5e5
    )  # no shape tells
    refused('does not fit', 'c_attn', init_from=path, share_v=True)


def test_weights_of_another_tokenizer_are_refused(whole):
    path = Path('data', data_copy('foreign'), 'meta.json')
    path.write_text(path.read_text().replace('0' * 64, '2' * 64))
    refused('another tokenizer', 'data/foreign', init_from=f'{whole}/ckpt_12.pt', dataset='foreign')


def test_a_model_that_was_not_trained_is_not_evaluated(work):
    for init_from in ('scratch', 'auto'):
        refused('--init_from=resume', init_from=init_from, eval_only=True, out_dir='out/nothing')


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'options, words',
    [
        (dict(init_from='scrach'), ["init_from='scrach'", "'resume'"]),
        (dict(dtype='fp8'), ["dtype='fp8'", "'bfloat16'"]),
        (dict(residual_from='second', v_residual=True), ["residual_from='second'", 'previous']),
        (dict(device='cuda:x'), ["'cuda:x'"]),
        (dict(device='gpu'), ["'gpu'"]),
        (dict(device='meta'), ["'meta'"]),
        (dict(device='cpu:x'), ["'cpu:x'"]),
        (dict(gradient_accumulation_steps=0), ['gradient_accumulation_steps=0']),
        (dict(batch_size=-1), ['batch_size=-1']),
        (dict(learning_rate='fast'), ['--learning_rate', "'fast'"]),
        (dict(learning_rat=1), ["'learning_rate'"]),
        (dict(beta1=2.0), ['2.0']),
        (dict(grad_clip=-1.0), ['grad_clip=-1.0']),
        (dict(eval_iters=-1), ['eval_iters=-1']),
        (dict(eval_interval=-5), ['eval_interval=-5']),
        (dict(save_steps="('100',)"), ["save_steps=('100',)", "'100'", 'whole numbers']),
        (dict(save_steps='(5, 2.5)'), ['2.5', 'whole numbers']),
        (dict(save_steps='(-1,)'), ['save_steps=(-1,)']),
        (dict(learning_rate=3e-5), ['min_lr=6e-05', 'learning_rate=3e-05', 'lower min_lr']),
        (dict(lr_decay_iters=3), ['lr_decay_iters=3', 'warmup_iters=3']),
        (dict(n_kv_head=-1), ['n_kv_head=-1']),
        (dict(n_inner=-4), ['n_inner=-4']),
        (dict(v_residual=True, residual_lambda='(None, 1)'), ['residual_lambda']),
        (dict(dropout=1.5), ['dropout']),
        (dict(n_head=5), ['n_embd=32', 'n_head=5']),
        (dict(attention='fast'), ["attention='fast'", 'auto', 'flash', 'cudnn']),
        (
            dict(activation_memory_budget=1.5),
            ['activation_memory_budget=1.5', 'between', '0 and 1'],
        ),
        (
            dict(compile=False, activation_memory_budget=0.9),
            ['activation_memory_budget=0.9 does nothing with compile=False'],
        ),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_before_anything_is_written(work, options, words):
    refused(*words, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is one')
def test_a_device_that_is_not_there_is_refused(work):
    refused("device='cuda'", 'cpu', device='cuda')


def test_without_a_compiler_compile_is_refused(work, monkeypatch):
    monkeypatch.setenv('PATH', '')
    monkeypatch.delenv('CXX', raising=False)
    refused('compile=True needs a C++ compiler', '--compile=False', compile=True)


# --- checkpoints and disks -----------------------------------------------------------------------


def damage(path, kind):
    data = bytearray(path.read_bytes())
    if kind == 'truncated':
        path.write_bytes(data[: len(data) // 2])
    elif kind == 'one bit':
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif kind == 'empty':
        path.write_bytes(b'')
    elif kind == 'text':
        path.write_text('hello')
    elif kind == 'pickle that runs code':
        path.write_bytes(pickle.dumps(Evil('run by a checkpoint')))
    else:
        contents = {
            'torch file that runs code': {**load(path), 'model': Evil('run by a checkpoint')},
            'a list': [1, 2],
            'another dict': {'a': 1},
            'nothing': {},
            'no state_dict': {**load(path), 'model': [1]},
        }
        torch.save(contents[kind], path)


@pytest.mark.parametrize(
    'kind',
    [
        'truncated',
        'one bit',
        'empty',
        'text',
        'pickle that runs code',
        'torch file that runs code',
        'a list',
        'another dict',
        'nothing',
        'no state_dict',
    ],
)
def test_a_damaged_or_malicious_checkpoint_is_refused_and_not_run(half, kind):
    path = Path(half(f'out/{kind}'), 'ckpt_6.pt')
    damage(path, kind)
    messages = [
        refused(kind, out_dir=path.parent, init_from='resume'),
        refused(path, init_from=path),
    ]
    for message in messages:
        assert 'weights_only' not in message  # torch's advice to try it with False
    assert not Path('run by a checkpoint').exists()


def test_a_full_disk_leaves_the_old_checkpoint_whole(half, whole):
    name = half('out/full')
    path = Path(name, 'ckpt_6.pt')
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ: writing more is an OSError.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        status, _ = here(name, init_from='resume')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status.startswith(f'error: cannot write {name}/ckpt_12.pt: ') and '\n' not in status
    assert '--init_from=resume' in status and 'File too large' in status
    assert path.read_bytes() == before and not list(Path(name).glob('*.tmp'))
    good(name, init_from='resume')
    assert_same_run(name, whole)
