"""evaluate.py loss: against a slow, obvious loop over the windows, its table, and what it refuses."""

import functools
import math
import statistics
from pathlib import Path

import byte_runs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from byte_runs import RESFORMER, write_byte_dataset
from conftest import assert_one_line, read_json
from programs import program as call_program
from programs import table
from runs import newest, ranks, run_main, succeed

import evaluate
from lib.data import Dataset
from lib.machine import Machine
from lib.rundir import checkpoints
from lib.trained import load_run
from paper import analyze

trained = byte_runs.trained
run = byte_runs.run


program = functools.partial(call_program, evaluate.main)


def compared(*runs, **options):
    """The reports of evaluate.py loss."""
    settings = evaluate.LossConfig(**options)
    machine = Machine('cpu', settings.dtype)
    return {run: evaluate.run_losses(run, settings, machine) for run in runs}


def read_reports(path):
    return read_json(path)['runs']


# --- losses --------------------------------------------------------------------------------------


@torch.no_grad()
def slow_windows(run, dataset):
    """{domain: [(summed loss, predictions) of each window of its validation split]}, one at a time."""
    model, _, _ = load_run(run)
    T = model.config.block_size
    windows = {}
    for path in sorted(Path('data', dataset, 'validation').glob('*.bin')):
        tokens = torch.from_numpy(np.fromfile(path, '<u2').astype(np.int64))
        windows[path.stem] = []
        for begin in range(0, len(tokens) - 1, T):
            y = tokens[begin + 1 : begin + T + 1]
            x = tokens[begin : begin + len(y)]
            loss = F.cross_entropy(model(x[None])[0][0].double(), y, reduction='sum')
            windows[path.stem].append((loss.item(), len(y)))
    return windows


def loss_and_error(windows):
    """The mean over all tokens, and its standard error, where a window's tokens come together; None
    of one window."""
    n = len(windows)
    tokens = sum(count for _, count in windows)
    mean = sum(loss for loss, _ in windows) / tokens
    squares = [(loss - count * mean) ** 2 for loss, count in windows]
    return mean, math.sqrt(n / (n - 1) * sum(squares)) / tokens if n > 1 else None


@pytest.mark.parametrize('dataset', ['bytes', 'short'])
def test_losses_are_those_of_a_slow_loop_over_the_windows(run, dataset):
    """Domains of `short` have one window."""
    out = run('loop', dataset, **RESFORMER)
    report = compared(out)[out]
    files = Dataset(dataset).meta['splits']['validation']
    windows = slow_windows(out, dataset)
    # The last window is short in A, and in bytes none in B (it is full), and of one prediction in C.
    lasts = {'bytes': [699 % 32, 32, 1], 'short': [699 % 32, 20, 1]}
    assert [windows[domain][-1][1] for domain in 'ABC'] == lasts[dataset]

    assert list(report['domains']) == list('ABC')
    for domain, entry in report['domains'].items():
        loss, error = loss_and_error(windows[domain])
        predictions = files[domain]['tokens'] - 1  # the first token is not predicted
        bits = loss * predictions / math.log(2) / files[domain]['bytes']
        assert entry == {
            'loss': pytest.approx(loss, abs=1e-5),
            'standard_error': error and pytest.approx(error, abs=1e-5),
            'bits_per_byte': pytest.approx(bits, abs=1e-5),
            'tokens': predictions,
        }
    entries = report['domains'].values()
    errors = [entry['standard_error'] for entry in entries]
    error = None if None in errors else pytest.approx(math.hypot(*errors) / 3)
    assert report['mean']['standard_error'] == error
    for name in ('loss', 'bits_per_byte'):
        mean = statistics.fmean(entry[name] for entry in entries)
        assert report['mean'][name] == pytest.approx(mean, abs=1e-12)
    assert (report['block_size'], report['dataset'], report['step']) == (32, f'data/{dataset}', 1)


@torch.no_grad()
def slow_classes(run):
    """{(class, domain): losses of its targets}, by a look at all that stands before a target."""
    model, _, _ = load_run(run)
    losses = {}
    for path in Path('data/repeats/validation').iterdir():
        tokens = np.fromfile(path, '<u2').tolist()
        for begin in range(0, len(tokens) - 1, 32):
            window = tokens[begin : begin + 33]
            logits, _ = model(torch.tensor([window[:-1]]))
            each = F.cross_entropy(logits[0], torch.tensor(window[1:]), reduction='none')
            for i, loss in enumerate(each.tolist(), 1):
                pair = window[i - 2 : i]
                followers = [window[j] for j in range(2, i) if window[j - 2 : j] == pair]
                name = 'copy' if window[i] in followers else 'misled' if followers else 'rest'
                losses.setdefault((name, path.stem), []).append(loss)
    return losses


def test_targets_that_copy_and_misled_ones_are_scored_apart(run):
    """As a slow look finds them; where there are none, there is no loss."""
    write_byte_dataset(Path('data/repeats'), {'A': 400, 'B': [*range(43), 40, 41, 42]})
    out = run('apart', 'repeats', **RESFORMER)
    classes = compared(out, repeats=True)[out]['classes']
    slow = slow_classes(out)
    assert slow.keys() == {(name, 'A') for name in classes} | {('rest', 'B'), ('copy', 'B')}
    for (name, domain), losses in slow.items():
        entry = classes[name]['domains'][domain]
        loss = pytest.approx(statistics.fmean(losses), abs=1e-5)
        assert (entry['tokens'], entry['loss']) == (len(losses), loss)
    assert classes['misled']['mean']['loss'] == classes['misled']['domains']['A']['loss']
    assert 'B' not in classes['misled']['domains']
    # One target in one window says nothing of its error.
    assert classes['copy']['domains']['B']['standard_error'] is None

    head, _, row, *_ = table(succeed(evaluate.main, 'loss', out, '--repeats=True', '--device=cpu'))
    assert head[2:] == 'bits/byte rest targets misled targets copy targets'.split()
    assert row[4::2] == [str(classes[name]['domains']['A']['tokens']) for name in head[3::2]]


def test_losses_depend_on_no_batch_size_nor_number_of_processes_and_repeat_exactly(run):
    out = run('together', **RESFORMER)
    words = ['loss', out, '--batch_size=4', '--out=two.json', '--device=cpu']
    processes = ranks(2, run_main, evaluate.main, *words)
    for status, _, err in processes:
        assert status == 0, err
    # Only the first process prints.
    assert [text.count('| A |') for _, text, _ in processes] == [1, 0]

    reports = compared(out, batch_size=4)
    assert reports == compared(out, batch_size=4)
    loss = reports[out]['mean']['loss']
    assert read_reports('two.json')[out]['mean']['loss'] == pytest.approx(loss, abs=1e-9)
    assert compared(out, batch_size=64)[out]['mean']['loss'] == pytest.approx(loss, abs=1e-6)


def test_a_lower_precision_changes_the_losses_little(run):
    out = run('rounded')
    exact = compared(out, dtype='float32')[out]['mean']['loss']
    rounded = compared(out, dtype='bfloat16')[out]['mean']['loss']
    assert 0 < abs(rounded - exact) < 0.05


# --- which runs, on which data -------------------------------------------------------------------


def test_another_dataset_of_the_same_name_is_refused_unless_it_is_named(run):
    write_byte_dataset(Path('data/remade'), {'A': 100})
    out = run('of_the_old_data', dataset='remade')
    before = compared(out)[out]
    write_byte_dataset(Path('data/remade'), {'A': 101})
    for main, mode in ((evaluate.main, 'loss'), (analyze.main, 'entropy')):
        status, _, _ = call_program(main, mode, out, '--device=cpu')
        assert_one_line(status, out, 'data/remade', '--dataset=remade')
    after = compared(out, dataset='remade')[out]
    assert before['dataset'] == after['dataset'] and before['data'] != after['data']


def test_a_run_that_fails_is_named_and_those_before_it_are_kept(run):
    outs = run('sound'), run('overflowed')
    checkpoint = newest(outs[1])
    checkpoint['model']['lm_head.weight'].fill_(3e38)
    torch.save(checkpoint, checkpoints(outs[1])[0])
    status, _, _ = program('loss', *outs, '--out=finite.json', '--device=cpu')
    assert_one_line(status, 'not finite', '--dtype=float32')
    assert list(read_reports('finite.json')) == [outs[0]]


def test_a_mistake_about_runs_or_data_is_one_line(run):
    words = ['loss', str(run('good')), '--device=cpu', '--out=never.json']
    mistakes = {
        '--out=data': ['--out=data'],
        '--dataset=tiny': ['out/good', 'tokenizer', 'data/tiny'],
        '--dataset=none': ['data/none'],
        '--batch_size=0': ['batch_size=0'],
    }
    for word, names in mistakes.items():
        assert_one_line(program(*words, word)[0], *names)
    assert_one_line(program('loss', '--device=cpu')[0], 'out/run')

    path = Path('data/short/validation/C.bin')
    data = path.read_bytes()
    path.write_bytes(data[::-1])
    assert_one_line(program(*words, '--dataset=short')[0], path)
    path.write_bytes(data)
    assert not Path('never.json').exists()


# --- the table -----------------------------------------------------------------------------------


def test_the_table_has_the_numbers_of_the_json_side_by_side(run):
    outs = run('left'), run('right', 'short', **RESFORMER)
    checkpoint = newest(outs[1])
    checkpoint['settings']['max_iters'] = 100_000
    torch.save(checkpoint, checkpoints(outs[1])[0])
    text = succeed(evaluate.main, 'loss', *outs, '--out=losses.json', '--device=cpu')
    reports = read_reports('losses.json')
    assert reports == compared(*outs)
    # They are no spread between seeds, for which people take them.
    errors = 'over windows of one run, not over seeds'
    assert errors in text and f'"{errors}"' in Path('losses.json').read_text()

    head, _, *rows = table(text)
    first, second = 'left, step 1 of 1', 'right, step 1 of 100,000'
    assert head[1:] == [first, 'bits/byte', second, 'bits/byte']
    assert [row[0] for row in rows] == [*'ABC', 'mean']
    for name, *row in rows:
        cells = []
        for out in outs:
            entry = {**reports[out]['domains'], 'mean': reports[out]['mean']}[name]
            error = entry['standard_error']
            plus_minus = '' if error is None else f' ± {error:.4f}'
            cells += [f'{entry["loss"]:.4f}{plus_minus}', f'{entry["bits_per_byte"]:.4f}']
        assert row == cells
    assert 'did not read the same text' in text
