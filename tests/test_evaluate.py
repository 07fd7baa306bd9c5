"""evaluate.py: losses against a slow, obvious loop; tasks against items written out by hand, and against the harness's
own wrapper of transformers' Llama."""
import contextlib
import io
import json
import math
import random
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import ROOT, write_dataset
from runs import finish, good, load, start, torchrun

import evaluate
import hf
import tokenizer
from configurator import configure
from model import GPT, GPTConfig
from train import TrainConfig

BYTES = tokenizer.load('bytes')
PUBLISHED = ROOT.parent / 'shared' / 'data' / 'eval'
SIZE = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=272)  # 257 ids and a padding
RESFORMER = dict(v_residual=True)


def program(*arguments):
    """(exit status or message, stdout, stderr) of evaluate.py in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, 'argv', ['evaluate.py', *map(str, arguments)])
        try:
            evaluate.main()
            status = 0
        except SystemExit as exit:
            status = exit.code
    return status, out.getvalue(), err.getvalue()


def assert_one_line(status, *words):
    assert isinstance(status, str) and status.startswith('error: ') and '\n' not in status, status
    for word in words:
        assert str(word) in status, status


def retokenized(folder, known):
    """Make `known` the tokenizer of a dataset of write_dataset, whose token ids were random anyway."""
    meta = json.loads((folder / 'meta.json').read_text())
    meta['tokenizer'] = {'name': known.name, 'sha256': known.sha256, 'n_vocab': known.n_vocab}
    for i, entry in enumerate(meta['splits']['validation'].values()):
        entry['bytes'] = 3 * entry['tokens'] + i
    (folder / 'meta.json').write_text(json.dumps(meta))


def made(**changes):
    """A model whose predictions are far from uniform."""
    return reference.perturb(GPT(GPTConfig(**{**SIZE, **changes}))).eval()


@pytest.fixture(scope='module')
def trained(work):
    """data/bytes, whose domains end with a short window, with none, and with a window of one prediction; data/short,
    one of whose domains has a single window; and train.py's checkpoint of a run of one step. Returns the checkpoint."""
    train = {'A': 5000}
    write_dataset(Path('data/bytes'), {'train': train, 'validation': {'A': 700, 'B': 321, 'C': 130}}, n_vocab=257)
    write_dataset(Path('data/short'), {'train': train, 'validation': {'A': 700, 'B': 21, 'C': 2}}, n_vocab=257)
    for name in ('bytes', 'short'):
        retokenized(Path('data', name), BYTES)
    good('out/trained', **SIZE, dataset='bytes', max_iters=1, save_steps=())
    return load('out/trained/ckpt.pt')


@pytest.fixture
def run(trained):
    """run(name, **changes): a run of train.py with other weights. Returns its out_dir."""
    def run(name, dataset='bytes', **changes):
        model, folder = made(**changes), Path('out', name)
        folder.mkdir(exist_ok=True)
        torch.save({**trained, 'model': model.state_dict(), 'model_config': asdict(model.config),
                    'settings': {**trained['settings'], 'dataset': dataset}}, folder / 'ckpt.pt')
        return str(folder)
    return run


def compared(*runs, **settings):
    settings = evaluate.LossConfig(device='cpu', **settings)
    return evaluate.compare_losses(runs, settings, settings.machine())


# --- losses ----------------------------------------------------------------------------------------------------------

@torch.no_grad()
def slow_windows(run, name):
    """{domain: a list of losses for each window of a dataset's validation split}, a window at a time."""
    model, _, _ = evaluate.load_run(run)
    T, losses = model.config.block_size, {}
    for path in sorted(Path('data', name, 'validation').glob('*.bin')):
        tokens = torch.from_numpy(np.fromfile(path, '<u2').astype(np.int64))
        losses[path.stem] = []
        for begin in range(0, len(tokens) - 1, T):
            y = tokens[begin + 1:begin + T + 1]
            x = tokens[begin:begin + len(y)]
            logits = model(x[None])[0][0].double()
            losses[path.stem].append([F.cross_entropy(*pair).item() for pair in zip(logits, y, strict=True)])
    return losses


def error_of_the_mean(values):
    return statistics.stdev(values) / len(values) ** 0.5


@pytest.mark.parametrize('changes', [{}, RESFORMER, dict(arch='gpt2', tie_embeddings=True), dict(denseformer=True)],
                         ids=['vanilla', 'ResFormer', 'gpt2 tied', 'DenseFormer'])
def test_losses_are_those_of_a_slow_loop_over_the_windows(run, changes):
    out = run('loop', **changes)
    report = compared(out)['runs'][out]
    meta, windows = json.loads(Path('data/bytes/meta.json').read_text()), slow_windows(out, 'bytes')
    assert [len(windows[domain][-1]) for domain in 'ABC'] == [699 % 32, 32, 1]  # short, none, one prediction
    assert list(report['domains']) == list('ABC')
    for domain, found in report['domains'].items():
        entry, losses = meta['splits']['validation'][domain], sum(windows[domain], [])
        assert found['tokens'] == len(losses) == entry['tokens'] - 1  # the first token is not predicted
        assert found['loss'] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
        assert found['bits_per_byte'] == pytest.approx(sum(losses) / math.log(2) / entry['bytes'], abs=1e-5)
        assert found['standard_error'] == pytest.approx(error_by_tokens(windows[domain]), abs=1e-5)
    errors = [d['standard_error'] for d in report['domains'].values()]
    assert report['mean']['standard_error'] == pytest.approx(math.hypot(*errors) / 3)
    for key in ('loss', 'bits_per_byte'):
        assert report['mean'][key] == pytest.approx(sum(d[key] for d in report['domains'].values()) / 3, abs=1e-12)
    assert (report['block_size'], report['dataset'], report['paper']) == (32, 'data/bytes', None)
    assert report['step'] == load(f'{out}/ckpt.pt')['step'] == 1


def error_by_tokens(windows):
    """Standard error of the mean over all tokens, where a window's tokens come together."""
    losses = sum(windows, [])
    off = [sum(window) - len(window) * statistics.fmean(losses) for window in windows]
    n = len(windows)
    return math.sqrt(n / (n - 1) * sum(x * x for x in off)) / len(losses)


def test_a_standard_error_is_the_usual_one_and_a_short_window_hardly_counts():
    sums = np.random.RandomState(0).randn(9) + 3
    usual = evaluate.standard_error(256 * sums, np.full(9, 256.0))
    assert usual == pytest.approx(error_of_the_mean(sums.tolist()))
    short = evaluate.standard_error(np.append(256 * sums, 30.0), np.append(np.full(9, 256.0), 1.0))
    assert short == pytest.approx(usual, rel=0.01)


def test_differences_to_the_first_run_are_paired_window_by_window(run):
    outs = run('first'), run('second', **RESFORMER), run('third', arch='gpt2')
    reports = compared(*outs)['runs']
    assert list(reports) == list(outs) and 'minus_first' not in reports[outs[0]]
    base = slow_windows(outs[0], 'bytes')
    for out in outs[1:]:
        found, windows, errors, losses = reports[out]['minus_first'], slow_windows(out, 'bytes'), [], []
        for domain in 'ABC':
            errors.append(error_by_tokens([[a - b for a, b in zip(*pair, strict=True)]
                                           for pair in zip(windows[domain], base[domain], strict=True)]))
            losses.append(np.mean(sum(windows[domain], [])) - np.mean(sum(base[domain], [])))
            assert found[domain] == pytest.approx({'loss': losses[-1], 'standard_error': errors[-1]}, abs=1e-5)
        assert found['mean'] == pytest.approx(
            {'loss': sum(losses) / 3, 'standard_error': math.hypot(*errors) / 3}, abs=1e-5)


def test_a_run_minus_itself_is_nothing_without_an_error(run):
    outs = run('one'), run('same')
    found = compared(*outs)['runs'][outs[1]]['minus_first']
    assert all(found[name] == {'loss': 0.0, 'standard_error': 0.0} for name in (*'ABC', 'mean'))


def test_a_domain_of_one_window_has_a_loss_and_no_standard_error(run):
    outs = run('few', dataset='short'), run('others', dataset='short', **RESFORMER)
    reports, windows = compared(*outs)['runs'], slow_windows(outs[0], 'short')
    domains, minus = reports[outs[0]]['domains'], reports[outs[1]]['minus_first']
    assert [domains[d]['tokens'] for d in 'BC'] == [20, 1]
    for domain in 'BC':
        assert domains[domain]['loss'] == pytest.approx(statistics.fmean(windows[domain][0]), abs=1e-5)
        assert domains[domain]['standard_error'] is minus[domain]['standard_error'] is None
    assert domains['A']['standard_error'] > 0 and minus['A']['standard_error'] > 0
    assert minus['mean']['standard_error'] is reports[outs[0]]['mean']['standard_error'] is None
    status, out, _ = program('loss', f'--out_dir={outs[0]}', outs[1], '--device=cpu')
    assert status == 0 and f'| {domains["C"]["loss"]:.4f} |' in out


def numbers(report):
    """All numbers of a report, by their path."""
    if isinstance(report, dict):
        return {f'{key}/{path}': n for key, part in report.items() for path, n in numbers(part).items()}
    return {'': report} if isinstance(report, int | float) else {}


def test_losses_do_not_depend_on_the_batch_size_and_repeat_digit_by_digit(run):
    outs = run('batches'), run('more batches', **RESFORMER)
    found = {size: compared(*outs, batch_size=size) for size in (1, 3, 64)}
    assert compared(*outs, batch_size=3) == found[3]
    for size in (1, 64):
        assert numbers(found[size]) == pytest.approx(numbers(found[3]), abs=1e-6)


def test_two_processes_and_one_give_the_same_losses(run):
    outs = run('alone'), run('together', **RESFORMER)
    status, out, err = finish(start(
        '-m', 'torch.distributed.run', '--nproc_per_node=2', ROOT / 'evaluate.py', 'loss', f'--out_dir={outs[0]}',
        outs[1], '--batch_size=4', '--out=two.json', '--device=cpu'))
    assert status == 0, err
    one, two = compared(*outs, batch_size=4), json.loads(Path('two.json').read_text())
    assert (one.pop('world_size'), two.pop('world_size')) == (1, 2) and len(numbers(one)) > 30
    assert numbers(two) == pytest.approx(numbers(one), abs=1e-9)
    assert out.count('| A |') == 1  # only the first process prints


@pytest.mark.parametrize('processes', [1, 2, 3])
def test_the_progress_bar_ends_with_the_last_window(run, monkeypatch, processes):
    """In the first process, which shows it for all."""
    done, settings = [], evaluate.LossConfig(device='cpu', batch_size=4)
    bar = SimpleNamespace(update=done.append)
    monkeypatch.setattr(evaluate, 'tqdm', lambda total, **_: done.append(-total) or contextlib.nullcontext(bar))
    machine = settings.machine()
    machine.world_size = processes
    evaluate.domain_losses(made(), evaluate.Dataset('bytes'), settings, machine)
    assert sum(done) == 0 and len(done) > 1


def test_a_lower_precision_changes_the_losses_little(run):
    out = run('rounded')
    exact, rounded = (compared(out, dtype=dtype)['runs'][out] for dtype in ('float32', 'bfloat16'))
    for domain in 'ABC':
        assert 0 < abs(rounded['domains'][domain]['loss'] - exact['domains'][domain]['loss']) < 0.05


def table(text):
    """The cells of the table in a program's output."""
    rows = [line[1:-1].split('|') for line in text.splitlines() if line.startswith('|')]
    assert len({len(row) for row in rows}) == 1, text
    return [[cell.strip() for cell in row] for row in rows]


def test_the_table_has_the_numbers_of_the_json_side_by_side(run):
    outs = run('left'), run('right', **RESFORMER)
    status, out, _ = program('loss', f'--out_dir={outs[0]}', outs[1], '--out=losses.json', '--device=cpu')
    assert status == 0 and 'Table 5' not in out
    written = json.loads(Path('losses.json').read_text(), parse_constant=pytest.fail)
    assert written == compared(*outs) and written['commit'] and written['device'] == 'cpu'
    head, _, *rows = table(out)
    assert head == ['domain', f'{outs[0]}, step 1', 'bits/byte', f'{outs[1]}, step 1', 'bits/byte', 'minus first']
    first, second = (written['runs'][out] for out in outs)
    for row, domain in zip(rows[:-1], 'ABC', strict=True):
        a, b, minus = first['domains'][domain], second['domains'][domain], second['minus_first'][domain]
        assert row == [domain, f'{a["loss"]:.4f} ± {a["standard_error"]:.4f}', f'{a["bits_per_byte"]:.4f}',
                       f'{b["loss"]:.4f} ± {b["standard_error"]:.4f}', f'{b["bits_per_byte"]:.4f}',
                       f'{minus["loss"]:+.4f} ± {minus["standard_error"]:.4f}']
    a, b, minus = first['mean'], second['mean'], second['minus_first']['mean']
    assert rows[-1] == ['mean', f'{a["loss"]:.4f} ± {a["standard_error"]:.4f}', f'{a["bits_per_byte"]:.4f}',
                        f'{b["loss"]:.4f} ± {b["standard_error"]:.4f}', f'{b["bits_per_byte"]:.4f}',
                        f'{minus["loss"]:+.4f} ± {minus["standard_error"]:.4f}']


def test_runs_with_other_windows_or_other_data_have_no_difference(run):
    outs = run('at 32'), run('at 16', block_size=16), run('elsewhere', dataset='short'), run('at 32 too', **RESFORMER)
    status, out, _ = program('loss', f'--out_dir={outs[0]}', *outs[1:], '--out=apart.json', '--device=cpu')
    assert status == 0
    reports = json.loads(Path('apart.json').read_text())['runs']
    assert [out for out in outs if 'minus_first' in reports[out]] == [outs[3]]
    assert [name for name in table(out)[0] if name != 'bits/byte'] == [
        'domain', *(f'{name}, step 1' for name in outs), 'minus first']
    for domain, windows in slow_windows(outs[1], 'bytes').items():
        losses = sum(windows, [])
        assert reports[outs[1]]['domains'][domain]['loss'] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_runs_with_different_domains_share_a_table(run):
    write_dataset(Path('data/other'), {'train': {'A': 5000}, 'validation': {'A': 100, 'Z': 90}}, n_vocab=257)
    retokenized(Path('data/other'), BYTES)
    outs = run('ABC'), run('AZ', dataset='other')
    status, out, _ = program('loss', f'--out_dir={outs[0]}', outs[1], '--device=cpu')
    cells = {row[0]: row[1:] for row in table(out)}
    assert status == 0 and list(cells)[2:] == [*'ABCZ', 'mean']
    assert cells['Z'][:2] == cells['B'][2:] == ['n/a', 'n/a'] and 'n/a' not in cells['A'] + cells['mean']


def pair_tokenizer(folder):
    """A vocabulary of bytes and one pair, laid out like GPT-2's tokenizer.json."""
    file = BYTES.json()
    file |= {'normalizer': None, 'pre_tokenizer': {'type': 'ByteLevel', 'add_prefix_space': False, 'use_regex': True}}
    file['added_tokens'][0]['id'] = 257
    file['model'] |= {'vocab': {**file['model']['vocab'], 'th': 256}, 'merges': ['t h']}
    folder.mkdir()
    (folder / 'tokenizer.json').write_text(json.dumps(file))
    return tokenizer.load(folder)


@pytest.mark.parametrize('which', ['bytes', 'BPE'])
def test_a_hugging_face_folder_is_compared_on_the_dataset_that_is_named(run, tmp_path, which):
    pytest.importorskip('safetensors')
    known = BYTES if which == 'bytes' else pair_tokenizer(tmp_path / 'pairs')
    name, model = f'hf-{which}', made()
    write_dataset(Path('data', name), {'train': {'A': 500}, 'validation': {'A': 100, 'B': 50}}, n_vocab=known.n_vocab)
    retokenized(Path('data', name), known)
    hf.export(model, known, tmp_path / 'export')
    found = compared(tmp_path / 'export', dataset=name)['runs'][str(tmp_path / 'export')]
    for domain, windows in slow_windows(tmp_path / 'export', name).items():
        assert found['domains'][domain]['loss'] == pytest.approx(np.mean(sum(windows, [])), abs=1e-5)
    if which == 'bytes':  # side by side with the run that it came from
        out = run('exported')
        reports = compared(out, tmp_path / 'export', dataset=name)['runs']
        assert reports[str(tmp_path / 'export')]['minus_first']['mean']['loss'] == pytest.approx(0, abs=1e-9)
    assert_one_line(program('loss', f'--out_dir={tmp_path}/export', '--device=cpu')[0], 'export', '--dataset')


def test_a_mistake_about_runs_or_data_is_one_line(run):
    out = run('good')
    arguments = f'--out_dir={out}', '--device=cpu', '--out=never.json'
    assert_one_line(program('loss', '--out_dir=out/none')[0], 'out/none')
    assert_one_line(program('loss', *arguments, 'out/none')[0], 'out/none')
    assert_one_line(program('loss', *arguments, '--dataset=tiny')[0], out, 'another tokenizer', 'data/tiny')
    assert_one_line(program('loss', *arguments, '--dataset=none')[0], 'data/none', 'prepare_slimpajama.py')
    assert_one_line(program('loss', *arguments, '--batch_size=0')[0], 'batch_size=0')
    assert_one_line(program('loss', *arguments, '--device=gpu')[0], "device='gpu'")
    assert_one_line(program('loss', *arguments, '--taskz=piqa')[0], 'taskz')
    path = Path('data/short/validation/C.bin')
    data = path.read_bytes()
    path.write_bytes(data[::-1])
    assert_one_line(program('loss', *arguments, '--dataset=short')[0], path, 'altered')
    path.write_bytes(data)
    assert not Path('never.json').exists()


def test_without_a_mode_the_usage_is_told_and_exit_status_2():
    status, out, err = finish(start(ROOT / 'evaluate.py'))
    assert (status, err) == (2, '') and 'evaluate.py loss --out_dir=' in out and 'evaluate.py tasks --out_dir=' in out
    for mode, expected in (('los', 2), ('--out_dir=out/run', 2), ('--help', 0), ('-h', 0)):
        assert program(mode) == (expected, out, '')
    for mode, setting in (('loss', '--batch_size=32'), ('tasks', '--batch_size=32'), ('tasks', '--limit=0')):
        status, out, _ = program(mode, '--help')
        assert status == 0 and setting in out


# --- the paper's numbers ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize('files, paper', [
    ('vanilla_82m', ('Transformer', '82M')), ('vanilla_180m', ('Transformer', '180M')),
    ('vanilla_468m', ('Transformer', '468M')), ('resformer_82m', ('ResFormer', '82M')),
    ('resformer_180m', ('ResFormer', '180M')), ('resformer_468m', ('ResFormer', '468M')),
    ('resformer_82m seq_64000', ('ResFormer', '82M')), ('svformer_82m', None), ('svformer_468m', None),
    ('vanilla_2m', None), ('resformer_2m', None), ('mini', None), ('gqa_82m', None), ('gpt2_78m', None),
    ('neutreno_82m', None), ('denseformer_82m', None), ('learned_resformer_82m', None), ('sparse_resformer_82m', None),
    ('constant_resformer_82m', None)])
def test_the_papers_sizes_are_recognized(files, paper):
    paths = [str(ROOT / 'config' / f'{name}.py') for name in files.split()]
    _, config = configure(TrainConfig, GPTConfig, argv=paths)
    assert evaluate.paper_size(config) == paper


def test_a_size_is_recognized_however_it_is_spelled():
    spelled = dict(n_kv_head=8, n_inner=1792, vocab_size=50277, block_size=512, dropout=0.1)
    assert evaluate.paper_size(GPTConfig(**spelled)) == ('Transformer', '82M')
    for change in (dict(n_inner=2048), dict(rope_theta=5e5), dict(tie_embeddings=True), dict(n_layer=9)):
        assert evaluate.paper_size(GPTConfig(**{**spelled, **change})) is None


def printed(function, numbers):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function(numbers)
    return out.getvalue()


def losses_of(paper):
    cell = {'loss': 3.0, 'bits_per_byte': 1.0, 'standard_error': 0.5, 'tokens': 9}
    return {'domains': {'A': cell}, 'mean': cell, 'dataset': 'data/x', 'step': None, 'block_size': 2048, 'paper': paper}


TABLE_5 = {('Transformer', '82M'): '2.7389', ('Transformer', '180M'): '2.5015', ('Transformer', '468M'): '2.2806',
           ('ResFormer', '82M'): '2.7117', ('ResFormer', '180M'): '2.4692', ('ResFormer', '468M'): '2.2537'}


def test_the_papers_table_5_stands_below_the_runs_of_its_sizes():
    runs = {'other': losses_of(None), **{'_'.join(paper): losses_of(paper) for paper in TABLE_5}}
    text = printed(evaluate.print_losses, {'runs': runs})
    assert table(text)[2:] == [['A', *['3.0000 ± 0.5000', '1.0000'] * 7], ['mean', *['3.0000 ± 0.5000', '1.0000'] * 7]]
    lines = [line for line in text.splitlines() if 'paper' in line]
    for line, (paper, loss) in zip(lines, TABLE_5.items(), strict=True):
        for words in ('_'.join(paper) + ': ', loss, ' '.join(paper), 'Table 5', '20B tokens'):
            assert words in line


def scores_of(paper, block_size, names=evaluate.TASKS):
    scores = {name: {'items': 100, 'chance': 0.5 if name in ('winogrande', 'piqa') else 0.25, 'acc': 0.3,
                     'acc_stderr': 0.01} for name in names}
    for name in set(names) - {'winogrande'}:
        scores[name] |= {'acc_norm': 0.4, 'acc_norm_stderr': 0.02}
    return {'tasks': scores, 'average': 0.3, 'block_size': block_size, 'paper': paper}


def test_the_papers_table_1_stands_below_the_runs_of_its_sizes_and_lengths():
    text = printed(evaluate.print_tasks, {'data': 'hub', 'runs': {
        'a': scores_of(('ResFormer', '82M'), 2048), 'b': scores_of(('Transformer', '82M'), 64000),
        'c': scores_of(('ResFormer', '82M'), 512), 'd': scores_of(None, 2048),
        'e': scores_of(('ResFormer', '468M'), 2048), 'f': scores_of(('Transformer', '82M'), 2048)}})
    head, _, *rows = table(text)
    assert head == ['', *evaluate.TASKS, 'average']
    assert [row[0] for row in rows] == ['a, acc', 'a, acc_norm', 'the paper, ResFormer 82M', 'b, acc', 'b, acc_norm',
                                        'the paper, Transformer 82M', *(f'{run}, {kind}' for run in 'cde'
                                                                        for kind in ('acc', 'acc_norm')),
                                        'f, acc', 'f, acc_norm', 'the paper, Transformer 82M', 'chance']
    assert rows[0][1:] == ['0.300 ± 0.010'] * 6 + ['0.300']
    assert rows[1][1:] == ['0.400 ± 0.020'] * 2 + [''] + ['0.400 ± 0.020'] * 3 + ['']
    assert rows[2][1:] == ['0.273', '0.148', '0.512', '0.182', '0.414', '0.604', '0.355']
    assert rows[5][1:] == [''] * 6 + ['0.328']
    assert rows[-2][1:] == ['0.263', '0.142', '0.492', '0.199', '0.331', '0.572', '0.333']
    assert rows[-1][1:] == ['0.250', '0.250', '0.500', '0.250', '0.250', '0.500', '0.333']
    assert 'HellaSwag' not in text


def test_a_table_of_some_tasks_has_the_papers_columns_in_their_places():
    text = printed(evaluate.print_tasks, {'data': 'eval', 'runs': {
        'a': scores_of(('Transformer', '82M'), 2048, ('piqa', 'hellaswag'))}})
    head, _, *rows = table(text)
    assert head[1:3] == ['piqa', 'hellaswag'] and rows[2][1:3] == ['0.572', '0.263']
    assert rows[-1][1:] == ['0.500', '0.250', '0.375']
    assert 'HellaSwag from a preprocessed file' in text  # and so not the hub's


# --- zero-shot tasks -------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def harness():
    """lm-evaluation-harness, which looks for its 14,000 task files once here, not at every evaluation, and does not
    describe the machine."""
    pytest.importorskip('lm_eval', reason='lm_eval is not installed: pip install -r requirements-dev.txt')
    import lm_eval.evaluator
    import lm_eval.tasks
    managers, make = [], lm_eval.tasks.TaskManager

    def once(*args, **options):
        managers[:] = managers or [make()]
        return managers[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.tasks, 'TaskManager', once)
        patch.setattr(lm_eval.evaluator, 'TaskManager', once)
        patch.setattr(lm_eval.evaluator, 'add_env_info', lambda results: None)
        yield


def arc(stem, texts, labels, key):
    choices = [{'text': text, 'label': label} for text, label in zip(texts, labels, strict=True)]
    return {'id': 'x', 'question': {'stem': stem, 'choices': choices}, 'answerKey': key}


def asked(context, *choices):
    return [(context, f' {choice}') for choice in choices]


# A task's items as published, each with the (context, continuation) pairs to score and the index of the right one
ITEMS = {
    'hellaswag': [
        ({'ind': 0, 'activity_label': 'Baking bread', 'ctx': 'A woman kneads dough. she', 'split': 'val', 'label': 2,
          'endings': ['sings loudly.', "doesn't look.", 'adds flour.', 'leaves "now".']},
         asked('Baking bread: A woman kneads dough. she', 'sings loudly.', "doesn't look.", 'adds flour.',
               'leaves "now".'), 2),
        ({'ind': 1, 'activity_label': 'Surfing', 'ctx': 'Waves come. A man', 'split': 'val', 'label': '0',
          'endings': ['paddles.', 'sits.', 'eats.', 'né 日本.']},
         asked('Surfing: Waves come. A man', 'paddles.', 'sits.', 'eats.', 'né 日本.'), 0),
        ({'ind': 2, 'activity_label': 'Chess', 'ctx': 'Two people sit', 'split': 'val', 'label': 3,
          'endings': ['a.', 'b.', 'c.', 'd.']}, asked('Chess: Two people sit', 'a.', 'b.', 'c.', 'd.'), 3)],
    'openbookqa': [
        (arc('Ice is', ['hot', 'cold', 'dry', 'loud'], 'ABCD', 'B'), asked('Ice is', 'hot', 'cold', 'dry', 'loud'), 1),
        (arc('The "sun" is', ['a star', "a bird's", 'a car', 'one'], 'ABCD', 'A'),
         asked('The "sun" is', 'a star', "a bird's", 'a car', 'one'), 0),
        (arc('Grass?', ['1', '2', '3', '4'], 'ABCD', 'D'), asked('Grass?', '1', '2', '3', '4'), 3)],
    'winogrande': [
        ({'qID': 'x', 'sentence': 'Ann beat Bea since _ was fast.', 'option1': 'Ann', 'option2': 'Bea', 'answer': '1'},
         [('Ann beat Bea since Ann', ' was fast.'), ('Ann beat Bea since Bea', ' was fast.')], 0),
        ({'qID': 'y', 'sentence': "The cup isn't in the box as the _ is small.", 'option1': 'cup', 'option2': 'box',
          'answer': '2'}, [("The cup isn't in the box as the cup", ' is small.'),
                           ("The cup isn't in the box as the box", ' is small.')], 1),
        ({'qID': 'z', 'sentence': 'Cy fed Di, _ ate.', 'option1': 'Cy', 'option2': 'Di', 'answer': '2'},
         [('Cy fed Di, Cy', ' ate.'), ('Cy fed Di, Di', ' ate.')], 1)],
    'arc_challenge': [
        (arc('Which melts?', ['ice', 'iron', 'oak'], 'ABC', 'C'),
         asked('Question: Which melts?\nAnswer:', 'ice', 'iron', 'oak'), 2),
        (arc('Which burns?', ['ice', 'iron', 'oak', 'sea'], '1234', '3'),
         asked('Question: Which burns?\nAnswer:', 'ice', 'iron', 'oak', 'sea'), 2),
        (arc('Which?', list('vwxyz'), 'ABCDE', 'E'), asked('Question: Which?\nAnswer:', *'vwxyz'), 4)],
    'arc_easy': [
        (arc('What flies?', ['a bird', 'a cow', 'a fish', 'a tree'], 'ABCD', 'A'),
         asked('Question: What flies?\nAnswer:', 'a bird', 'a cow', 'a fish', 'a tree'), 0),
        (arc('What swims?', ['a bird', 'a cow', 'a fish', 'a tree'], '1234', '3'),
         asked('Question: What swims?\nAnswer:', 'a bird', 'a cow', 'a fish', 'a tree'), 2),
        (arc('What moos?', ['a bird', 'a cow', 'a fish', 'a tree'], 'ABCD', 'B'),
         asked('Question: What moos?\nAnswer:', 'a bird', 'a cow', 'a fish', 'a tree'), 1)],
    'piqa': [
        (({'id': 'x', 'goal': 'boil "eggs"', 'sol1': "don't use water", 'sol2': 'use water'}, 1),
         asked('Question: boil "eggs"\nAnswer:', "don't use water", 'use water'), 1),
        (({'id': 'y', 'goal': 'dry', 'sol1': 'a towel ', 'sol2': 'rain, 3\\4 wet'}, 0),
         asked('Question: dry\nAnswer:', 'a towel ', 'rain, 3\\4 wet'), 0),
        (({'id': 'z', 'goal': 'café', 'sol1': 'tea', 'sol2': 'coffee'}, 1),
         asked('Question: café\nAnswer:', 'tea', 'coffee'), 1)]}


def publish(folder, task, items):
    """Write a task's items as they are published. Returns its folder."""
    folder = Path(folder, task)
    folder.mkdir(parents=True)
    (name, *labels), _ = evaluate.FILES[task]
    raws = [raw for raw, *_ in items]
    if labels:
        (folder / labels[0]).write_text(''.join(f'{label}\n' for _, label in raws))
        raws = [raw for raw, _ in raws]
    (folder / name).write_text(''.join(json.dumps(raw, ensure_ascii=False) + '\n' for raw in raws))
    return folder


def whole(patch, **counts):
    """The number of items of whole sets, for a test's small ones."""
    for task, count in counts.items():
        patch.setitem(evaluate.FILES, task, (evaluate.FILES[task][0], count))


@pytest.fixture
def published(tmp_path, monkeypatch):
    """The folder with all of ITEMS."""
    for task, items in ITEMS.items():
        publish(tmp_path / 'eval', task, items)
        whole(monkeypatch, **{task: len(items)})
    return tmp_path / 'eval'


def judged(data_dir, items, limit=0):
    """(scores, samples) by task of a judge who finds the right continuation of items, {task: [(.., pairs, gold)]}, and
    no other, likely."""
    from lm_eval.api.model import LM
    right = {pairs[gold] for each in items.values() for _, pairs, gold in each}

    class Judge(LM):
        def loglikelihood(self, requests, disable_tqdm=False):
            return [(0.0 if request.args in right else -9.0, False) for request in requests]

        loglikelihood_rolling = generate_until = None

    settings = evaluate.TasksConfig(device='cpu', tasks=','.join(items), data_dir=str(data_dir), limit=limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, 'load_run', lambda run: (made(), BYTES, None))
        patch.setattr(evaluate, 'make_lm', lambda *_: Judge())
        numbers, samples = evaluate.evaluate_tasks(['judge'], settings, settings.machine())
    assert (numbers['limit'], numbers['data']) == (limit, data_dir.name)
    return numbers['runs']['judge'], samples['judge']


def assert_asked(report, samples, items):
    """Each item was asked as written here, and the right answer is the one that counts."""
    for task, expected in items.items():
        found = sorted(samples[task], key=lambda sample: sample['doc_id'])
        arguments = [[tuple(pair) for pair in sample['arguments']] for sample in found]
        assert arguments == [pairs for _, pairs, _ in expected]
        assert [sample['acc'] for sample in found] == [1.0] * len(expected), task
        score = report['tasks'][task]
        assert score['acc'] == 1.0 and score['items'] == len(expected)
        assert score.get('acc_norm', 1.0) == 1.0 and ('acc_norm' in score) == (task != 'winogrande')


def test_items_are_asked_and_scored_by_the_harnesss_definitions(harness, published):
    report, samples = judged(published, ITEMS)
    assert list(report['tasks']) == list(evaluate.TASKS) == list(ITEMS)
    assert_asked(report, samples, ITEMS)
    assert report['average'] == 1.0
    chances = [report['tasks'][task]['chance'] for task in ITEMS]
    assert chances == pytest.approx([0.25, 0.25, 0.5, (1 / 3 + 1 / 4 + 1 / 5) / 3, 0.25, 0.5])


def test_wrong_answers_are_counted(harness, published):
    """The judge takes the other solution of the last two items for right, and no task for more than another."""
    wrong = [ITEMS['piqa'][0], *((raw, pairs, 1 - gold) for raw, pairs, gold in ITEMS['piqa'][1:])]
    report, samples = judged(published, {'piqa': wrong, 'winogrande': ITEMS['winogrande']})
    assert [sample['acc'] for sample in samples['piqa']] == [1.0, 0.0, 0.0]
    assert report['tasks']['piqa']['acc'] == pytest.approx(1 / 3) and report['average'] == pytest.approx(2 / 3)
    assert report['tasks']['piqa']['acc_stderr'] == pytest.approx(error_of_the_mean([1, 0, 0]))


@pytest.mark.parametrize('limit, items', [(1, 1), (2, 2), (3, 3), (50, 3)])
def test_a_limit_takes_the_first_items(harness, published, limit, items):
    report, samples = judged(published, {'arc_challenge': ITEMS['arc_challenge']}, limit)
    assert [sample['doc_id'] for sample in samples['arc_challenge']] == list(range(items))
    assert report['tasks']['arc_challenge']['items'] == items
    assert report['tasks']['arc_challenge']['chance'] == pytest.approx(np.mean([1 / 3, 1 / 4, 1 / 5][:items]))


needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason='needs the published sets, ../shared/data/eval')

# The number of an item in its file, what is asked, and the answer's index: read off the files
FOUND = {
    'hellaswag': (0, asked(
        'Roof shingle removal: A man is sitting on a roof. he', 'is using wrap to wrap a pair of skis.',
        'is ripping level tiles off.', "is holding a rubik's cube.", 'starts pulling up roofing on a roof.'), 3),
    'openbookqa': (1, asked('There is most likely going to be fog around:', 'a marsh', 'a tundra', 'the plains',
                            'a desert'), 0),
    'winogrande': (0, [(f'Sarah was a much better surgeon than Maria so {name}', ' always got the easier cases.')
                       for name in ('Sarah', 'Maria')], 1),
    'arc_challenge': (0, asked(
        'Question: An astronomer observes that a planet rotates faster after a meteorite impact. Which is the most '
        'likely effect of this increase in rotation?\nAnswer:', 'Planetary density will decrease.',
        'Planetary years will become longer.', 'Planetary days will become shorter.',
        'Planetary gravity will become stronger.'), 2),
    'arc_easy': (1, asked(
        'Question: Which piece of safety equipment is used to keep mold spores from entering the respiratory system?'
        '\nAnswer:', 'safety goggles', 'breathing mask', 'rubber gloves', 'lead apron'), 1),
    'piqa': (1, asked('Question: dresser\nAnswer:', 'replace drawer with bobby pin ',
                      'finish, woodgrain with  bobby pin '), 1)}


@needs_published
def test_published_items_are_asked_as_their_files_say(harness, tmp_path, monkeypatch):
    for task, (number, _, _) in FOUND.items():
        (tmp_path / task).mkdir()
        for name in evaluate.FILES[task][0]:
            line = (PUBLISHED / task / name).read_text().split('\n')[number]
            (tmp_path / task / name).write_text(line + '\n')
        whole(monkeypatch, **{task: 1})
    report, samples = judged(tmp_path, {task: [found] for task, found in FOUND.items()})
    assert_asked(report, samples, {task: [found] for task, found in FOUND.items()})


@needs_published
@pytest.mark.parametrize('task', evaluate.TASKS)
def test_the_published_sets_are_read_whole_and_every_answer_is_a_choice(task):
    rows = evaluate.read_items(task, PUBLISHED)
    assert len(rows) == evaluate.FILES[task][1]
    for row in rows:
        if task == 'hellaswag':
            assert int(row['label']) in range(4) and len(row['endings']) == 4
        elif task == 'piqa':
            assert row['label'] in (0, 1) and row['sol1'] and row['sol2']
        elif task == 'winogrande':
            assert row['answer'] in ('1', '2') and row['sentence'].count('_') == 1
        else:
            assert row['answerKey'] in row['choices']['label']
            assert len(row['choices']['text']) == len(row['choices']['label']) >= 3


# --- mistakes about tasks

@pytest.mark.parametrize('task', evaluate.TASKS)
@pytest.mark.parametrize('damage, words', [
    ('cut in a line', 'half a download'), ('cut in a character', ''), ('a line less', 'has 2 '), ('empty', 'has 0 '),
    ('a line more', 'has 4 '), ('no file', '--data_dir'), ('no folder', '--data_dir')])
def test_a_damaged_set_is_refused_in_one_line_that_names_it(published, task, damage, words):
    path = published / task / evaluate.FILES[task][0][0]
    data = path.read_bytes().replace(b'}\n', ', "note": "é"}\n'.encode())
    path.write_bytes(data)
    assert len(evaluate.read_items(task, published)) == 3
    lines = data.splitlines(keepends=True)
    if damage == 'no folder':
        path.parent.rename(published / 'elsewhere')
    elif damage == 'no file':
        path.unlink()
    else:
        path.write_bytes({'cut in a line': data[:-12], 'cut in a character': data[:-4], 'empty': b'',
                          'a line less': b''.join(lines[:2]), 'a line more': data + lines[0]}[damage])
    with pytest.raises((ValueError, OSError)) as error:
        evaluate.read_items(task, published)
    message = str(error.value)
    assert '\n' not in message and str(path) in message and words in message, message


def test_piqa_without_its_labels_or_with_too_few_is_refused(published):
    path = published / 'piqa' / 'dev-labels.lst'
    path.write_text('1\n0\n')
    with pytest.raises(ValueError, match=f'{path} has 2 lines, the set 3'):
        evaluate.read_items('piqa', published)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f'there is no {path}'):
        evaluate.read_items('piqa', published)


@pytest.mark.parametrize('task, old, new, words', [
    ('piqa', '0', '2', 'answer 2 '), ('piqa', '0', '-1', 'answer -1 '), ('piqa', '0', 'x', "'x'"),
    ('winogrande', '"answer": "2"', '"answer": ""', "answer '' "), ('winogrande', '"answer": "2"', '"answer": 2', ''),
    ('openbookqa', '"answerKey": "A"', '"answerKey": "Z"', "answer 'Z' "),
    ('arc_easy', '"answerKey": "3"', '"answerKey": "E"', "answer 'E' "),
    ('hellaswag', '"label": "0"', '"label": 4', "answer '4' "), ('hellaswag', '"endings"', '"ends"', "'endings'"),
    ('openbookqa', '"question"', '"problem"', "'question'")])
def test_an_item_without_a_right_answer_is_refused_by_file_and_item(published, task, old, new, words):
    path = published / task / evaluate.FILES[task][0][-1]
    lines = path.read_text().splitlines()
    assert old in lines[1]
    lines[1] = lines[1].replace(old, new)
    path.write_text('\n'.join(lines) + '\n')
    with pytest.raises(ValueError) as error:
        evaluate.read_items(task, published)
    message = str(error.value)
    assert str(path) in message and 'item 2: ' in message and words in message and '\n' not in message, message


def test_tasks_under_torchrun_are_refused_in_one_line(monkeypatch):
    """Every process would score everything."""
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert_one_line(program('tasks', '--device=cpu')[0], 'torchrun')
    monkeypatch.setenv('LOCAL_RANK', '1')
    assert program('tasks', '--device=cpu')[0] == 1


def test_a_mistake_about_tasks_is_one_line(harness, run, published, monkeypatch):
    out = run('asked')
    arguments = f'--out_dir={out}', '--device=cpu', '--out=never.json'
    local = f'--data_dir={published}'
    assert_one_line(program('tasks', *arguments, local, '--tasks=piqa,pika')[0], 'pika', 'piqa')
    assert_one_line(program('tasks', *arguments, '--tasks=piqa,pika')[0], 'pika', 'lm-evaluation-harness')
    assert_one_line(program('tasks', *arguments, local, '--tasks=')[0])
    assert_one_line(program('tasks', '--out_dir=out/none', local)[0], 'out/none')
    assert_one_line(program('tasks', *arguments, f'--data_dir={published}/none')[0], f'{published}/none')
    (published / 'piqa' / 'dev.jsonl').write_text('{"goal": ')
    assert_one_line(program('tasks', *arguments, local, '--tasks=piqa')[0], published / 'piqa' / 'dev.jsonl')

    def no_hub(*args):
        raise ConnectionError("Couldn't reach\nthe hub")
    monkeypatch.setattr(evaluate, 'harness_tasks', no_hub)
    assert_one_line(program('tasks', *arguments, '--tasks=piqa')[0], 'hub', '--data_dir')
    assert not Path('never.json').exists()


def test_without_the_harness_one_line_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, 'lm_eval', None)
    assert_one_line(program('tasks', f'--out_dir={run("unasked")}', '--device=cpu')[0], 'pip install lm_eval')


# --- log-likelihoods

def make_lm(model, batch_size):
    settings = evaluate.TasksConfig(device='cpu', batch_size=batch_size)
    return evaluate.make_lm(model, BYTES, settings, settings.machine())


@torch.no_grad()
def slow_loglikelihood(model, context, continuation):
    """(log-probability, whether each token is the likeliest): one token after the other, each from the text before it,
    of which the model sees the last block_size tokens of the whole."""
    text, total, greedy = (context + continuation)[-model.config.block_size - 1:], 0.0, True
    for end in range(max(1, len(text) - len(continuation)), len(text)):
        logits = model(torch.tensor([text[:end]]))[0][0, -1, :257].double()
        total += logits.log_softmax(dim=0)[text[end]].item()
        greedy = greedy and logits.argmax().item() == text[end]
    return total, greedy


@torch.no_grad()
def likeliest(model, context, count):
    text = list(context)
    for _ in range(count):
        text.append(model(torch.tensor([text]))[0][0, -1, :257].argmax().item())
    return text[len(context):]


@pytest.fixture(scope='module')
def padded():
    """A model of 20 positions that finds the ids of the padding likelier than any other."""
    model = made(block_size=20)
    with torch.no_grad():
        model.lm_head.weight[257:] = 2 * model.lm_head.weight[:15]
    logits = model(torch.arange(20)[None])[0]
    assert (logits.argmax(dim=-1) >= 257).float().mean() > 0.2
    return model


@pytest.fixture(scope='module')
def requests(padded):
    """Requests in no order: every length of context and continuation about block_size, likeliest continuations, those
    but for one token, no continuation at all, and some twice."""
    rng = random.Random(0)

    def ids(count):
        return [rng.randrange(257) for _ in range(count)]
    found = [(ids(context), ids(count)) for context in (1, 2, 7, 19, 20, 21, 50)
             for count in (0, 1, 2, 13, 19, 20, 21, 22, 40)]
    for context, count in ((1, 1), (1, 19), (5, 4), (12, 8), (19, 1)):
        text = ids(context)
        best = likeliest(padded, text, count)
        found += [(text, best), (text, [*best[:-1], (best[-1] + 1) % 257]), ([(text[0] + 1) % 257, *text[1:]], best)]
    found += found[::9]
    rng.shuffle(found)
    return found


@pytest.mark.parametrize('batch_size', [1, 3, 64, 500])
def test_loglikelihoods_are_those_of_a_slow_loop_in_any_batch(harness, padded, requests, batch_size):
    found = make_lm(padded, batch_size)._loglikelihood_tokens([(None, *request) for request in requests],
                                                              disable_tqdm=True)
    expected = [slow_loglikelihood(padded, *request) for request in requests]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for (_, continuation), (_, greedy) in zip(requests, expected, strict=True) if continuation} == {
        True, False}
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert all(answer == (0.0, True) for request, answer in zip(requests, found, strict=True) if not request[1])


def test_texts_are_scored_after_their_context_or_the_end_of_a_text(harness, padded):
    texts = [('', 'abc'), ('ab', ' c'), ('ab ', 'c'), ('ab', ''), ('', 'né'), ('x' * 30, ' né'), ('ab', ' c'),
             ('a\u0301', ' e')]
    expected = [([256], b'abc'), (b'ab', b' c'), (b'ab', b' c'), (b'ab', b''), ([256], 'né'.encode()),
                (b'x' * 30, ' né'.encode()), (b'ab', b' c'), ('á'.encode(), b' e')]  # NFC
    lm = make_lm(padded, 3)
    found = lm.loglikelihood([SimpleNamespace(args=text) for text in texts], disable_tqdm=True)
    for answer, request in zip(found, expected, strict=True):
        value, greedy = slow_loglikelihood(padded, *map(list, request))
        assert answer == (pytest.approx(value, abs=1e-4), greedy)
    assert lm.eot_token_id == 256


def test_no_request_has_no_answer(harness, padded):
    assert make_lm(padded, 3)._loglikelihood_tokens([], disable_tqdm=True) == []


# --- against the harness's own wrapper

def synthetic(task, count):
    """Items of random words, whose contexts have 60 to 200 bytes and whose choices at most 40."""
    rng = random.Random(task)

    def words(least, most):
        return ' '.join(''.join(rng.choices('etaoinshr', k=rng.randint(1, 9))) for _ in range(rng.randint(least, most)))
    for _ in range(count):
        stem, choices, gold = words(10, 20), [words(1, 4) for _ in range(4)], rng.randrange(4)
        if task == 'hellaswag':
            raw = {'activity_label': words(1, 2), 'ctx': stem, 'endings': choices, 'label': gold}
        elif task == 'winogrande':
            raw = {'sentence': f'{stem} _ {words(1, 4)}', 'option1': words(1, 1), 'option2': words(1, 1),
                   'answer': str(gold % 2 + 1)}
        elif task == 'piqa':
            raw = {'goal': stem, 'sol1': choices[0], 'sol2': choices[1]}, gold % 2
        else:
            raw = arc(stem, choices, 'ABCD', 'ABCD'[gold])
        yield raw, None, None


def lengths(samples):
    """(bytes of a context, of a continuation) of every choice."""
    return [tuple(len(text.encode()) for text in pair) for each in samples.values() for sample in each
            for pair in sample['arguments']]


def assert_the_wrapper_agrees(run, tmp_path, monkeypatch, data_dir, limit, block_size):
    """The same log-likelihood of every choice, and so the same scores, from the export by the harness's HFLM. Returns
    the samples."""
    huggingface = pytest.importorskip('lm_eval.models.huggingface', reason='the harness\'s HFLM cannot be imported: '
                                      'pip install accelerate')
    from lm_eval import simple_evaluate
    out = run(f'to export at {block_size}', vocab_size=257, block_size=block_size)
    model, known, _ = evaluate.load_run(out)
    hf.export(model, known, tmp_path / 'export')
    (tmp_path / 'rows').mkdir()
    tasks = evaluate.harness_tasks(evaluate.TASKS, str(data_dir), tmp_path / 'rows')
    monkeypatch.setattr(evaluate, 'harness_tasks', lambda *_: tasks)
    settings = evaluate.TasksConfig(device='cpu', data_dir=str(data_dir), limit=limit)
    numbers, samples = evaluate.evaluate_tasks([out], settings, settings.machine())
    ours, scores = samples[out], numbers['runs'][out]['tasks']
    wrapper = huggingface.HFLM(str(tmp_path / 'export'), device='cpu', dtype='float32', batch_size=64)
    assert wrapper.max_length == block_size
    found = simple_evaluate(wrapper, tasks=tasks, limit=limit)
    for task in evaluate.TASKS:
        assert len(ours[task]) == len(found['samples'][task]) == scores[task]['items'] == limit
        for mine, theirs in zip(ours[task], found['samples'][task], strict=True):
            assert mine['doc_id'] == theirs['doc_id'] and mine['arguments'] == theirs['arguments']
            for [(value, greedy)], [(expected, best)] in zip(mine['resps'], theirs['resps'], strict=True):
                assert value == pytest.approx(expected, abs=1e-3) and greedy == best, (task, mine['doc_id'])
            for metric in ('acc', 'acc_norm'):
                assert mine.get(metric) == theirs.get(metric), (task, mine['doc_id'])
        for key in ('acc', 'acc_stderr', 'acc_norm', 'acc_norm_stderr'):
            assert scores[task].get(key) == found['results'][task].get(f'{key},none'), (task, key)
        assert 0 < scores[task]['acc'] < 1
    return ours


@needs_published
def test_the_published_sets_score_as_with_the_harnesss_own_wrapper(harness, run, tmp_path, monkeypatch):
    samples = assert_the_wrapper_agrees(run, tmp_path, monkeypatch, PUBLISHED, limit=200, block_size=1024)
    assert max(map(sum, lengths(samples))) <= 1024  # whole


@pytest.mark.parametrize('block_size, cut', [(64, True), (512, False)])
def test_small_sets_score_as_with_the_harnesss_own_wrapper(harness, run, tmp_path, monkeypatch, block_size, cut):
    for task in evaluate.TASKS:
        publish(tmp_path / 'eval', task, list(synthetic(task, 20)))
        whole(monkeypatch, **{task: 20})
    samples = assert_the_wrapper_agrees(run, tmp_path, monkeypatch, tmp_path / 'eval', limit=20, block_size=block_size)
    assert all(continuation <= 64 for _, continuation in lengths(samples))  # HFLM asserts it
    assert (np.mean([sum(pair) > block_size + 1 for pair in lengths(samples)]) > 0.5) == cut


def test_a_table_of_tasks_has_the_numbers_of_the_json(harness, run, published):
    outs = run('five'), run('six', **RESFORMER)
    status, out, err = program('tasks', f'--out_dir={outs[0]}', outs[1], f'--data_dir={published}', '--limit=2',
                               '--tasks=piqa,winogrande', '--out=tasks.json', '--device=cpu')
    assert status == 0, status
    written = json.loads(Path('tasks.json').read_text(), parse_constant=pytest.fail)
    assert (written['limit'], written['data']) == (2, 'eval') and str(published) not in json.dumps(written)
    head, _, *rows = table(out)
    assert head == ['', 'piqa', 'winogrande', 'average'] and rows[-1] == ['chance', '0.500', '0.500', '0.500']
    for i, name in enumerate(outs):
        report = written['runs'][name]
        piqa, winogrande = report['tasks']['piqa'], report['tasks']['winogrande']
        assert (piqa['items'], winogrande['items'], report['block_size'], report['paper']) == (2, 2, 32, None)
        assert rows[2 * i] == [f'{name}, acc', *(f'{s["acc"]:.3f} ± {s["acc_stderr"]:.3f}' for s in (piqa, winogrande)),
                               f'{report["average"]:.3f}']
        assert rows[2 * i + 1] == [f'{name}, acc_norm', f'{piqa["acc_norm"]:.3f} ± {piqa["acc_norm_stderr"]:.3f}', '',
                                   '']


def test_a_limit_of_one_item_has_scores_without_a_standard_error(harness, run, published):
    status, out, _ = program('tasks', f'--out_dir={run("one item")}', f'--data_dir={published}', '--limit=1',
                             '--tasks=piqa', '--out=one.json', '--device=cpu')
    assert status == 0, status
    score = json.loads(Path('one.json').read_text())['runs']['out/one item']['tasks']['piqa']
    assert score['items'] == 1 and score['acc'] in (0.0, 1.0) and score.get('acc_stderr') is None
    assert f'{score["acc"]:.3f}' in out


def test_training_on_two_processes_ends_with_the_table_of_tasks(harness, trained, tmp_path):
    publish(tmp_path / 'eval', 'openbookqa', 500 // 2 * ITEMS['openbookqa'][:2])
    status, out, err = torchrun('out/then tasks', **SIZE, dataset='bytes', max_iters=1, eval_tasks='openbookqa',
                                eval_data_dir=tmp_path / 'eval')
    assert status == 0, err
    score = json.loads(Path('out/then tasks/tasks.json').read_text())['runs']['out/then tasks']['tasks']['openbookqa']
    assert score['items'] == 500 and f'{score["acc"]:.3f}' in out
