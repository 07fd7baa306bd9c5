"""comparison/runs.py: what is read of a run's folder, its facts, and what tells two runs apart."""

import pytest
from conftest import write_json
from runs import write_run

from comparison.runs import difference, facts, read_state

SETTINGS = {'learning_rate': 0.1, 'min_lr': 0.01, 'eval_iters': 2, 'batch_size': 8, 'seed': 1}


@pytest.mark.parametrize(
    'line',
    [
        '[1, 2]',
        '{"loss": 1}',
        '{"step": 1, "loss": "x"}',
        '{"step": 1, "changed": 3}',
        '{"step": 1, "lo',
        '',
        'null',
        '\xff',
    ],
)
def test_a_line_that_is_none_of_a_log_is_named(tmp_path, line):
    write_json(tmp_path / 'config.json', SETTINGS | {'max_iters': 3})
    text = f'{{"step": 0, "loss": 1}}\n{line}\n{{"step": 1}}'
    (tmp_path / 'log.jsonl').write_text(text, encoding='latin-1')  # in which \xff is no UTF-8
    state = read_state(tmp_path)
    assert state.reason.startswith(f'damaged: {tmp_path}/log.jsonl, line 2: not ')


@pytest.mark.parametrize('text', ['{"seed": 3}', '{', '[1]'])
def test_a_run_whose_settings_cannot_be_read_is_damaged(tmp_path, text):
    (tmp_path / 'log.jsonl').write_text('')
    assert 'config.json' in read_state(tmp_path).reason
    (tmp_path / 'config.json').write_text(text)
    assert read_state(tmp_path).reason.startswith(f'damaged: {tmp_path}/config.json does not say ')


@pytest.mark.parametrize(
    'wrong',
    [
        {'min_lr': '6e-5'},
        {'batch_size': None},
        {'eval_iters': [2]},
        {'n_embd': 2**70},
        {'commit': ['1a2b']},
    ],
    ids=str,
)
def test_a_setting_of_another_type_is_a_damaged_run(tmp_path, wrong):
    write_run(tmp_path, [2.0, 1.0], **wrong)
    state = read_state(tmp_path)
    assert state.kind == 'damaged' and next(iter(wrong)) in state.detail
    write_run(tmp_path, [2.0, 1.0], min_lr=2**80, eval_iters=2**80)
    assert read_state(tmp_path).facts['eval_iters * batch_size'] == 2**80


def test_a_loss_that_is_stored_as_an_integer_is_finite(tmp_path):
    state = read_state(write_run(tmp_path, [2, 1]))
    assert (state.kind, state.losses['mean']) == ('finished', 1)


def test_code_that_is_said_by_a_number_is_that_number(tmp_path):
    assert read_state(write_run(tmp_path, [2, 1], code=5)).facts['code'] == '5'


# --- facts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'values, name',
    [
        ({}, None),
        ({'out_dir': 'elsewhere', 'log_interval': 7, 'commit': 'abc'}, None),
        ({'v_residual': False, 'fork': 0}, None),  # a default, and what is off in a fork
        ({'learning_rate': 0.1 + 1e-15, 'min_lr': 0.1 * 0.1}, None),
        ({'data': 'abc', 'dtype': 'float16'}, None),  # which the other does not record
        ({'seed': 2}, 'seed'),
        ({'v_residual': True}, 'v_residual'),
        ({'fork': 1}, 'fork'),
        ({'min_lr': 0.02}, 'min_lr / learning_rate'),
        ({'origin': 'out/a/ckpt_6.pt'}, 'origin'),
    ],
)
def test_two_runs_differ_in_what_decides_their_numbers(values, name):
    ours, theirs = facts(SETTINGS), facts({**SETTINGS, **values})
    found = difference(ours, theirs)
    assert (found and found[0]) == name
    assert difference(ours, theirs, but=[name]) is None
