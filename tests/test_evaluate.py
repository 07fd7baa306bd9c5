"""evaluate.py: losses against a slow, obvious loop over the windows, the table, and the command line."""

import contextlib
import functools
import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import byte_runs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from byte_runs import RESFORMER, random_model, write_byte_dataset
from programs import BYTES, assert_one_line, table
from programs import program as call_program
from runs import newest, ranks

import evaluate
import tokenizer
from data import Dataset
from hub.convert import export
from machine import Machine
from rundir import load_run

trained = byte_runs.trained
run = byte_runs.run


program = functools.partial(call_program, evaluate.main)


def run_evaluate(*words):
    """evaluate.py in a process of its own, for runs.ranks."""
    status, out, err = program(*words)
    print(out, err)
    assert status == 0, status


def compared(*runs, **options):
    """The numbers of evaluate.py loss, without what is of the moment."""
    settings = evaluate.LossConfig(device='cpu', **options)
    machine = Machine('cpu', settings.dtype)
    return timeless(evaluate.compare_losses(runs, settings, machine))


def timeless(numbers):
    return {name: value for name, value in numbers.items() if name != 'load'}


def read_numbers(path):
    return timeless(json.loads(Path(path).read_text(), parse_constant=pytest.fail))


# --- losses --------------------------------------------------------------------------------------


@torch.no_grad()
def slow_windows(run, dataset):
    """{domain: a list of losses for each window of its validation split}, a window at a time."""
    model, _, _ = load_run(run)
    T = model.config.block_size
    losses = {}
    for path in sorted(Path('data', dataset, 'validation').glob('*.bin')):
        tokens = torch.from_numpy(np.fromfile(path, '<u2').astype(np.int64))
        losses[path.stem] = []
        for begin in range(0, len(tokens) - 1, T):
            y = tokens[begin + 1 : begin + T + 1]
            x = tokens[begin : begin + len(y)]
            logits = model(x[None])[0][0].double()
            window = [F.cross_entropy(*pair).item() for pair in zip(logits, y, strict=True)]
            losses[path.stem].append(window)
    return losses


def mean_of_tokens(windows):
    return statistics.fmean(sum(windows, []))


def error_of_tokens(windows):
    """Standard error of the mean over all tokens, where a window's tokens come together."""
    mean = mean_of_tokens(windows)
    residuals = [sum(window) - len(window) * mean for window in windows]
    n = len(windows)
    return math.sqrt(n / (n - 1) * sum(x * x for x in residuals)) / len(sum(windows, []))


VARIANTS = {
    'vanilla': {},
    'ResFormer': RESFORMER,
    'gpt2 tied': dict(arch='gpt2', tie_embeddings=True),
    'DenseFormer': dict(denseformer=True),
}


@pytest.mark.parametrize('changes', VARIANTS.values(), ids=VARIANTS)
def test_losses_are_those_of_a_slow_loop_over_the_windows(run, changes):
    out = run('loop', **changes)
    report = compared(out)['runs'][out]
    meta = json.loads(Path('data/bytes/meta.json').read_text())

    windows = slow_windows(out, 'bytes')
    # The last window is short in A, none in B (it is full), and of one prediction in C.
    assert [len(windows[domain][-1]) for domain in 'ABC'] == [699 % 32, 32, 1]

    assert list(report['domains']) == list('ABC')
    for domain, entry in report['domains'].items():
        file = meta['splits']['validation'][domain]
        losses = sum(windows[domain], [])
        assert entry['tokens'] == len(losses) == file['tokens'] - 1  # the first is not predicted
        assert entry['loss'] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
        bits_per_byte = sum(losses) / math.log(2) / file['bytes']
        assert entry['bits_per_byte'] == pytest.approx(bits_per_byte, abs=1e-5)
        error = error_of_tokens(windows[domain])
        assert entry['standard_error'] == pytest.approx(error, abs=1e-5)

    domains = report['domains'].values()
    errors = [entry['standard_error'] for entry in domains]
    assert report['mean']['standard_error'] == pytest.approx(math.hypot(*errors) / 3)
    for name in ('loss', 'bits_per_byte'):
        mean = sum(entry[name] for entry in domains) / 3
        assert report['mean'][name] == pytest.approx(mean, abs=1e-12)
    assert (report['block_size'], report['dataset']) == (32, 'data/bytes')
    assert report['step'] == newest(out)['step'] == 1


def test_a_standard_error_is_the_usual_one_and_a_short_window_hardly_counts():
    sums = np.random.RandomState(0).randn(9) + 3
    usual = evaluate.standard_error(256 * sums, np.full(9, 256.0))
    assert usual == pytest.approx(statistics.stdev(sums.tolist()) / len(sums) ** 0.5)

    longer = np.append(np.full(9, 256.0), 1.0)
    with_short = evaluate.standard_error(np.append(256 * sums, 30.0), longer)
    assert with_short == pytest.approx(usual, rel=0.01)


def test_differences_to_the_first_run_are_paired_window_by_window(run):
    outs = run('first'), run('second', **RESFORMER), run('third', arch='gpt2')
    reports = compared(*outs)['runs']
    assert list(reports) == list(outs) and 'minus_first' not in reports[outs[0]]

    base = slow_windows(outs[0], 'bytes')
    for out in outs[1:]:
        minus = reports[out]['minus_first']
        windows = slow_windows(out, 'bytes')
        errors, losses = [], []
        for domain in 'ABC':
            pairs = zip(windows[domain], base[domain], strict=True)
            paired = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
            errors.append(error_of_tokens(paired))
            losses.append(mean_of_tokens(windows[domain]) - mean_of_tokens(base[domain]))
            expected = {'loss': losses[-1], 'standard_error': errors[-1]}
            assert minus[domain] == pytest.approx(expected, abs=1e-5)
        expected = {'loss': sum(losses) / 3, 'standard_error': math.hypot(*errors) / 3}
        assert minus['mean'] == pytest.approx(expected, abs=1e-5)


def test_a_run_minus_itself_is_nothing_without_an_error(run):
    outs = run('one'), run('same')

    minus = compared(*outs)['runs'][outs[1]]['minus_first']
    nothing = {'loss': 0.0, 'standard_error': 0.0}
    assert all(minus[name] == nothing for name in (*'ABC', 'mean'))


def test_a_domain_of_one_window_has_a_loss_and_no_standard_error(run):
    outs = run('few', dataset='short'), run('others', dataset='short', **RESFORMER)
    reports = compared(*outs)['runs']

    windows = slow_windows(outs[0], 'short')
    domains = reports[outs[0]]['domains']
    minus = reports[outs[1]]['minus_first']

    assert [domains[domain]['tokens'] for domain in 'BC'] == [20, 1]
    for domain in 'BC':
        loss = statistics.fmean(windows[domain][0])
        assert domains[domain]['loss'] == pytest.approx(loss, abs=1e-5)
        assert domains[domain]['standard_error'] is minus[domain]['standard_error'] is None

    assert domains['A']['standard_error'] > 0 and minus['A']['standard_error'] > 0
    mean = reports[outs[0]]['mean']
    assert minus['mean']['standard_error'] is mean['standard_error'] is None

    status, out, _ = program('loss', f'--out_dir={outs[0]}', outs[1], '--device=cpu')
    assert status == 0 and f'| {domains["C"]["loss"]:.4f} |' in out


def numbers_of(report):
    """All numbers of a report, by their path."""
    if isinstance(report, int | float):
        return {'': report}

    numbers = {}
    if isinstance(report, dict):
        for name, part in report.items():
            for path, number in numbers_of(part).items():
                numbers[f'{name}/{path}'] = number
    return numbers


def test_losses_do_not_depend_on_the_batch_size_and_repeat_digit_by_digit(run):
    outs = run('batches'), run('more batches', **RESFORMER)
    reports = {size: compared(*outs, batch_size=size) for size in (1, 3, 64)}

    assert compared(*outs, batch_size=3) == reports[3]
    for size in (1, 64):
        assert numbers_of(reports[size]) == pytest.approx(numbers_of(reports[3]), abs=1e-6)


def test_two_processes_and_one_give_the_same_losses(run):
    outs = run('alone'), run('together', **RESFORMER)
    words = ['loss', f'--out_dir={outs[0]}', outs[1], '--batch_size=4', '--out=two.json']

    processes = ranks(2, run_evaluate, *words, '--device=cpu')
    for status, _, err in processes:
        assert status == 0, err

    tables = [out.count('| A |') for _, out, _ in processes]
    assert tables == [1, 0]  # only the first process prints

    one, two = compared(*outs, batch_size=4), read_numbers('two.json')
    assert (one.pop('world_size'), two.pop('world_size')) == (1, 2)
    assert len(numbers_of(one)) > 30
    assert numbers_of(two) == pytest.approx(numbers_of(one), abs=1e-9)


@pytest.mark.parametrize('processes', [1, 2, 3])
def test_the_progress_bar_ends_with_the_last_window(run, monkeypatch, processes):
    """In the first process, which shows it for all."""
    updates = []

    def bar(total, **_):
        updates.append(-total)
        return contextlib.nullcontext(SimpleNamespace(update=updates.append))

    monkeypatch.setattr(evaluate, 'tqdm', bar)

    machine = Machine('cpu')
    machine.world_size = processes
    settings = evaluate.LossConfig(batch_size=4)
    evaluate.domain_losses(random_model(), evaluate.Dataset('bytes'), settings, machine)
    assert sum(updates) == 0 and len(updates) > 1


def test_a_lower_precision_changes_the_losses_little(run):
    out = run('rounded')
    exact = compared(out, dtype='float32')['runs'][out]['domains']
    rounded = compared(out, dtype='bfloat16')['runs'][out]['domains']

    for domain in 'ABC':
        assert 0 < abs(rounded[domain]['loss'] - exact[domain]['loss']) < 0.05


def test_a_run_whose_losses_are_not_finite_is_refused_and_not_written(run):
    """JSON has no NaN."""
    outs = run('sound'), run('overflowed')
    checkpoint = newest(outs[1])
    checkpoint['model']['transformer.wte.weight'][1, 0] = math.nan
    torch.save(checkpoint, f'{outs[1]}/ckpt.pt')

    status, _, _ = program('loss', *outs, '--out=finite.json', '--device=cpu')
    assert_one_line(status, outs[1], 'not finite', '--dtype=float32')
    assert list(read_numbers('finite.json')['runs']) == [outs[0]]


# --- which runs, on which data -------------------------------------------------------------------


@pytest.mark.parametrize('words', ['--out_dir={0} {1} {2}', '{0} {1} {2}', '{1} {2} --out_dir={0}'])
def test_the_first_run_is_out_dir_and_the_others_are_plain_arguments(run, words):
    outs = run('A'), run('B'), run('C')
    words = words.format(*outs).split()
    status, out, _ = program('loss', *words, '--device=cpu', '--out=order.json')
    assert status == 0, status

    assert list(read_numbers('order.json')['runs']) == list(outs)
    assert out.count('minus first') == 2


def test_without_a_run_it_is_the_one_that_train_py_writes_by_default(run):
    status, _, _ = program('loss', '--device=cpu')
    assert_one_line(status, 'there is no out/run')

    out = run('run')
    assert program('loss', '--device=cpu', '--out=default.json')[0] == 0
    assert list(read_numbers('default.json')['runs']) == [out]


def test_a_config_file_is_no_run(run):
    out = run('with a file')
    Path('how.py').write_text('batch_size, device = 0, "cpu"\n')
    assert_one_line(program('loss', out, 'how.py')[0], 'batch_size=0')
    assert program('loss', out, 'how.py', '--batch_size=3')[0] == 0


def test_runs_with_other_windows_or_other_data_have_no_difference(run):
    outs = [
        run('at 32'),
        run('at 16', block_size=16),
        run('elsewhere', dataset='short'),
        run('at 32 too', **RESFORMER),
    ]

    words = [f'--out_dir={outs[0]}', *outs[1:], '--out=apart.json', '--device=cpu']
    status, out, _ = program('loss', *words)
    assert status == 0
    reports = read_numbers('apart.json')['runs']
    assert [out for out in outs if 'minus_first' in reports[out]] == [outs[3]]

    head = [name for name in table(out)[0] if name != 'bits/byte']
    assert head == ['domain', *(f'{name}, step 1' for name in outs), 'minus first']

    for domain, windows in slow_windows(outs[1], 'bytes').items():
        loss = reports[outs[1]]['domains'][domain]['loss']
        assert loss == pytest.approx(mean_of_tokens(windows), abs=1e-5)


def pair_tokenizer(folder):
    """A vocabulary of bytes and one pair, laid out like GPT-2's tokenizer.json."""
    file = BYTES.json()
    file['normalizer'] = None
    file['pre_tokenizer'] = {'type': 'ByteLevel', 'add_prefix_space': False, 'use_regex': True}
    file['added_tokens'][0]['id'] = 257
    file['model']['vocab'] = {**file['model']['vocab'], 'th': 256}
    file['model']['merges'] = ['t h']
    folder.mkdir()
    (folder / 'tokenizer.json').write_text(json.dumps(file))
    return tokenizer.load(folder)


@pytest.mark.parametrize('which', ['bytes', 'BPE'])
def test_a_hugging_face_folder_is_compared_on_the_dataset_that_is_named(run, tmp_path, which):
    pytest.importorskip('safetensors')
    encoder = BYTES if which == 'bytes' else pair_tokenizer(tmp_path / 'pairs')
    name, folder = f'hub-{which}', str(tmp_path / 'export')
    write_byte_dataset(Path('data', name), {'A': 100, 'B': 50}, encoder)

    export(random_model(), encoder, folder)
    report = compared(folder, dataset=name)['runs'][folder]
    for domain, windows in slow_windows(folder, name).items():
        loss = report['domains'][domain]['loss']
        assert loss == pytest.approx(mean_of_tokens(windows), abs=1e-5)

    if which == 'bytes':  # side by side with the run that it came from
        reports = compared(run('exported'), folder, dataset=name)['runs']
        minus = reports[folder]['minus_first']['mean']['loss']
        assert minus == pytest.approx(0, abs=1e-9)

    status, _, _ = program('loss', f'--out_dir={folder}', '--device=cpu')
    assert_one_line(status, 'export', '--dataset')


def test_another_dataset_of_the_same_name_is_refused_unless_it_is_named(run):
    write_byte_dataset(Path('data/remade'), {'A': 100})
    out = run('of the old data', dataset='remade')
    before = compared(out)['runs'][out]

    write_byte_dataset(Path('data/remade'), {'A': 101})
    status, _, _ = program('loss', out, '--device=cpu')
    assert_one_line(status, out, 'other data', 'data/remade', '--dataset=remade')
    after = compared(out, dataset='remade')['runs'][out]
    assert before['dataset'] == after['dataset'] and before['data'] != after['data']
    assert after['data'] == Dataset('remade').fingerprint()

    checkpoint = newest(out)
    del checkpoint['data']['sha256']  # as an older version wrote it
    torch.save(checkpoint, f'{out}/ckpt.pt')
    assert compared(out)['runs'][out] == after


def test_a_missing_run_is_found_before_the_first_is_evaluated(run, monkeypatch):
    monkeypatch.setattr(evaluate, 'run_losses', lambda *args: pytest.fail('evaluated'))
    status, _, _ = program('loss', run('good'), 'out/typo', '--device=cpu')
    assert_one_line(status, 'there is no out/typo')


def test_running_out_of_memory_is_one_line_with_advice(run, monkeypatch):
    def run_out(*args):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 8 GiB.\nmore lines')

    monkeypatch.setattr(evaluate, 'domain_losses', run_out)
    status, _, _ = program('loss', run('large'), '--device=cpu')
    assert_one_line(status, 'CUDA out of memory', '--batch_size')


def test_what_was_evaluated_before_a_failure_is_kept(run, monkeypatch, tmp_path):
    run_losses = evaluate.run_losses

    def fail_the_second_time(name, *args):
        if not Path(tmp_path, 'n.json').exists():
            return run_losses(name, *args)
        raise ValueError('the disk is gone')

    monkeypatch.setattr(evaluate, 'run_losses', fail_the_second_time)
    words = [run('good'), run('better'), '--device=cpu', f'--out={tmp_path}/n.json']
    status, _, _ = program('loss', *words)
    assert_one_line(status, 'the disk is gone')
    (report,) = read_numbers(tmp_path / 'n.json')['runs'].values()
    assert report['mean']['loss'] > 0


def test_a_mistake_about_runs_or_data_is_one_line(run):
    out = run('good')
    words = ['loss', f'--out_dir={out}', '--device=cpu', '--out=never.json']
    assert_one_line(program('loss', '--out_dir=out/none')[0], 'out/none')
    assert_one_line(program(*words, 'out/none')[0], 'out/none')
    assert_one_line(program(*words, '--out=none/x.json')[0], 'none', '--out')
    assert_one_line(program(*words, '--out=data')[0], '--out=data is a folder')

    status, _, _ = program(*words, '--dataset=tiny')
    assert_one_line(status, out, 'another tokenizer', 'data/tiny')
    status, _, _ = program(*words, '--dataset=none')
    assert_one_line(status, 'data/none', 'prepare_slimpajama.py')

    assert_one_line(program(*words, '--batch_size=0')[0], 'batch_size=0')
    assert_one_line(program(*words, '--device=gpu')[0], "device='gpu'")
    assert_one_line(program(*words, '--taskz=piqa')[0], 'taskz')

    path = Path('data/short/validation/C.bin')
    data = path.read_bytes()
    path.write_bytes(data[::-1])
    assert_one_line(program(*words, '--dataset=short')[0], path, 'altered')
    path.write_bytes(data)
    assert not Path('never.json').exists()


def test_without_a_mode_the_usage_is_told_and_exit_status_2():
    status, out, err = program()
    assert (status, err) == (2, '')
    assert 'evaluate.py loss --out_dir=' in out and 'evaluate.py tasks --out_dir=' in out
    for mode, expected in (('los', 2), ('--out_dir=out/run', 2), ('--help', 0), ('-h', 0)):
        assert program(mode) == (expected, out, '')
    for mode, setting in (('loss', '--dataset='), ('tasks', '--limit=0')):
        status, out, _ = program(mode, '--help')
        assert status == 0 and '--batch_size=32' in out and setting in out


# --- the table -----------------------------------------------------------------------------------


def test_the_table_has_the_numbers_of_the_json_side_by_side(run):
    outs = run('left'), run('right', **RESFORMER)
    words = ['loss', f'--out_dir={outs[0]}', outs[1], '--out=losses.json', '--device=cpu']

    status, out, _ = program(*words)
    assert status == 0 and 'Table 5' not in out

    numbers = read_numbers('losses.json')
    assert numbers == compared(*outs) and numbers['commit'] and numbers['device'] == 'cpu'

    head, _, *rows = table(out)
    assert head == [
        'domain',
        f'{outs[0]}, step 1',
        'bits/byte',
        f'{outs[1]}, step 1',
        'bits/byte',
        'minus first',
    ]
    assert [row[0] for row in rows] == [*'ABC', 'mean']

    first, second = (numbers['runs'][out] for out in outs)
    for row in rows:
        minus = second['minus_first'][row[0]]
        cells = []
        for report in (first, second):
            entry = {**report['domains'], 'mean': report['mean']}[row[0]]
            cells.append(f'{entry["loss"]:.4f} ± {entry["standard_error"]:.4f}')
            cells.append(f'{entry["bits_per_byte"]:.4f}')
        cells.append(f'{minus["loss"]:+.4f} ± {minus["standard_error"]:.4f}')
        assert row[1:] == cells


def test_the_output_says_of_what_the_standard_errors_are(run):
    """They are no spread between seeds, for which people take them."""
    status, out, _ = program('loss', run('errors'), '--out=errors.json', '--device=cpu')
    assert status == 0

    words = 'over windows of one run, not over seeds'
    assert words in out and read_numbers('errors.json')['standard_errors'] == words


def test_runs_with_different_domains_share_a_table(run):
    write_byte_dataset(Path('data/other'), {'A': 100, 'Z': 90})

    outs = run('ABC'), run('AZ', dataset='other')
    status, out, _ = program('loss', f'--out_dir={outs[0]}', outs[1], '--device=cpu')
    cells = {row[0]: row[1:] for row in table(out)}
    assert status == 0 and list(cells)[2:] == [*'ABCZ', 'mean']
    assert cells['Z'][:2] == cells['B'][2:] == ['n/a', 'n/a']
    assert 'n/a' not in cells['A'] + cells['mean']

    # A difference where two runs share a dataset, and none where the third has a domain of its own.
    status, out, _ = program('loss', outs[0], run('same data'), outs[1], '--device=cpu')
    cells = {row[0]: row[1:] for row in table(out)}
    assert status == 0 and cells['Z'][4] == 'n/a' and cells['A'][4] != 'n/a'


def test_a_table_takes_any_number_of_runs_with_or_without_a_step(capsys):
    cell = {'loss': 3.0, 'bits_per_byte': 1.0, 'standard_error': 0.5, 'tokens': 9}
    report = {'domains': {'A': cell}, 'mean': cell, 'step': None, 'block_size': 2048}
    evaluate.print_losses({'runs': {f'run {i}': report for i in range(7)}})

    head, _, *rows = table(capsys.readouterr().out)
    assert head[1::2] == [f'run {i}' for i in range(7)]
    cells = ['3.0000 ± 0.5000', '1.0000'] * 7
    assert rows == [['A', *cells], ['mean', *cells]]
