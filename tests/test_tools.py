"""The programs around training: plot.py, sample.py, bench.py, the configs, and the README's promises."""
import json
import os
import re
import shutil
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from conftest import ROOT, write_dataset

import bench
import plot
from configurator import configure
from model import GPT, GPTConfig
from train import TrainConfig

TINY = ['--n_layer=4', '--n_head=2', '--n_embd=16', '--block_size=16', '--vocab_size=320', '--compile=False',
        '--device=cpu', '--batch_size=2', '--gradient_accumulation_steps=1', '--eval_iters=1']


def program(*arguments, cwd, root=ROOT):
    """Run a root program in `cwd`, as a user does."""
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    return subprocess.run([sys.executable, str(root / arguments[0]), *arguments[1:]], cwd=cwd, env=environment,
                          capture_output=True, text=True)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """A folder with a byte dataset, and two finished runs of 12 steps on it."""
    folder = tmp_path_factory.mktemp('tools')
    texts = folder / 'texts'
    texts.mkdir()
    for i in range(40):
        (texts / f'{i}.txt').write_text(f'def f{i}(x):\n    return x + {i}\n' * 20)
    made = program('prepare_slimpajama.py', '--source=texts', '--tokenizer=bytes', '--tokens=0', '--out=data/tiny',
                   '--workers=1', cwd=folder)
    assert made.returncode == 0, made.stderr
    for name, flag in (('vanilla', '--v_residual=False'), ('resformer', '--v_residual=True')):
        done = program('train.py', *TINY, flag, '--dataset=tiny', '--max_iters=12', f'--out_dir=out/{name}', cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_relative_loss_is_the_mean_difference_to_the_baseline(runs):
    losses = [[json.loads(line)['loss'] for line in open(runs / f'out/{name}/log.jsonl') if '"loss"' in line]
              for name in ('vanilla', 'resformer')]
    steps, values = plot.relative(runs / 'out/vanilla', [str(runs / 'out/resformer')], 5)[str(runs / 'out/resformer')]
    assert list(steps) == list(range(4, 12))
    for step, value in zip(steps, values, strict=True):
        window = range(step - 4, step + 1)
        assert value == pytest.approx(np.mean([losses[1][s] for s in window]) - np.mean([losses[0][s] for s in window]))


def test_plot_writes_a_picture_and_a_table(runs):
    done = program('plot.py', 'relative', 'out/vanilla', 'out/resformer', '--window=4', '--out=a/b.png', cwd=runs)
    assert done.returncode == 0, done.stderr
    assert (runs / 'a/b.png').read_bytes().startswith(b'\x89PNG')
    assert re.search(r'\| out/resformer \| [+-]\d\.\d{4} \|', done.stdout)


def test_a_table_is_empty_where_a_run_has_no_value(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, steps in (('whole', range(200)), ('short', range(120)), ('late', range(100, 200))):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'log.jsonl').write_text(''.join(f'{{"step": {s}, "loss": {s / 100}}}\n' for s in steps))
    monkeypatch.setattr('sys.argv', ['plot.py', 'relative', 'whole', 'short', 'late', '--window=1'])
    plot.main()
    rows = [line.strip('|').split('|') for line in capsys.readouterr().out.splitlines() if line.startswith('|')]
    assert rows[0] == [' run ', ' step 20 ', ' step 50 ', ' step 100 ', ' step 149 ', ' step 199 ']
    assert [[bool(cell.strip()) for cell in row[1:]] for row in rows[2:]] == [
        [True, True, True, False, False], [False, False, True, True, True]]


@pytest.mark.parametrize('line', ['[1, 2]', '{"loss": 1}', '{"step": 1, "loss": "x"}', '{"step": 1, "lo', '\xff'])
def test_a_line_that_is_none_of_a_log_is_named(tmp_path, line):
    (tmp_path / 'log.jsonl').write_text('{"step": 0, "loss": 1}\n' + line + '\n', encoding='latin-1')
    with pytest.raises(ValueError, match=f'{tmp_path}/log.jsonl, line 2: not '):
        plot.read_log(tmp_path)


@pytest.mark.parametrize('kind, config, message', [
    ('relative', '[]', 'a/config.json holds no settings'), ('relative', '{', 'a/config.json: not JSON'),
    ('scaling', None, 'a/config.json'), ('critical', None, 'b/config.json'), ('critical', '{}', 'say block_size'),
    ('scaling', '{"n_layer": 2, "n_head": 3, "n_embd": 8, "vocab_size": 8}', 'a/config.json: n_embd')])
def test_a_config_that_does_not_say_what_is_asked_of_it_is_named(tmp_path, monkeypatch, kind, config, message):
    monkeypatch.chdir(tmp_path)
    for name in 'ab':
        (tmp_path / name).mkdir()
        (tmp_path / name / 'log.jsonl').write_text(''.join(f'{{"step": {s}, "loss": 3}}\n' for s in range(20)))
        if config is not None:
            (tmp_path / name / 'config.json').write_text(config)
    monkeypatch.setattr('sys.argv', ['plot.py', kind, 'a', 'b', '--window=2'])
    with pytest.raises(SystemExit, match=message):
        plot.main()


def test_losses_that_are_not_finite_are_left_out(tmp_path):
    for name, odd in (('a', '3'), ('b', 'NaN'), ('c', 'null')):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'log.jsonl').write_text(''.join(
            f'{{"step": {s}, "loss": {odd if s == 15 else 3}}}\n' for s in range(20)))
    _, axes = plot.pyplot().subplots()
    for steps, values in plot.relative_axes(axes, tmp_path / 'a', [tmp_path / 'b', tmp_path / 'c'], 2).values():
        assert 15 not in steps and np.isfinite(values).all()


def test_runs_of_one_name_have_the_end_of_the_path_that_tells_them_apart():
    assert plot.labels(['out/a/vanilla', 'out/b/vanilla', 'resformer', '.']) == {
        'out/a/vanilla': 'a/vanilla', 'out/b/vanilla': 'b/vanilla', 'resformer': 'resformer',
        '.': os.path.basename(os.getcwd())}


def test_as_many_key_heads_as_heads_is_no_gqa():
    assert plot.model_name({'n_head': 8, 'n_kv_head': 8}) == plot.model_name({'n_head': 8, 'n_kv_head': 0})
    assert plot.model_name({'n_head': 8, 'n_kv_head': 2}) == 'GQA'


@pytest.mark.parametrize('arguments, message', [
    (['out/vanilla', 'out/nothing'], 'out/nothing'),
    (['out/vanilla', 'out/resformer', '--window=99'], 'fewer than --window=99'),
    (['out/vanilla'], 'needs a baseline and at least one other run'),
])
def test_plot_refuses_bad_input_in_one_line(runs, arguments, message):
    done = program('plot.py', 'relative', *arguments, cwd=runs)
    assert done.returncode != 0 and message in done.stderr and 'Traceback' not in done.stderr


def test_sample_continues_the_prompt_reproducibly(runs):
    command = ['sample.py', '--out_dir=out/resformer', '--start=def f', '--max_new_tokens=10', '--num_samples=2']
    first, second = (program(*command, cwd=runs) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout and first.stdout.count('def f') >= 2
    other = program(*command, '--seed=2', cwd=runs)
    assert other.stdout != first.stdout


@pytest.mark.parametrize('arguments, message', [
    (['--out_dir=out/nothing'], 'out/nothing'),
    (['--out_dir=out/resformer', '--start=FILE:none.txt'], 'none.txt'),
    (['--out_dir=out/resformer', '--temperature=-1'], 'temperature'),
    (['--out_dir=out/resformer', '--device=gpu'], "device='gpu'"),
    (['--out_dir=out/resformer', '--tokenizer=none.json'], 'none.json'),
])
def test_sample_refuses_bad_input_in_one_line(runs, arguments, message):
    done = program('sample.py', *arguments, cwd=runs)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_finished_run_is_left_as_it_is(runs):
    """make demo relies on it."""
    before = {p: p.read_bytes() for p in (runs / 'out/vanilla').iterdir() if p.name != 'config.json'}
    done = program('train.py', *TINY, '--dataset=tiny', '--max_iters=12', '--out_dir=out/vanilla', '--init_from=auto',
                   cwd=runs)
    assert done.returncode == 0, done.stderr
    assert before == {p: p.read_bytes() for p in (runs / 'out/vanilla').iterdir() if p.name != 'config.json'}


def test_the_diff_in_the_readme_adds_a_residual_from_the_middle_layer(runs, tmp_path):
    """Its lines are replaced in a copy of the core, which then trains; wire() names the middle layer as the source."""
    diff = re.search(r'```diff\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)[1]
    for name in ('model.py', 'train.py', 'data.py', 'configurator.py'):
        shutil.copy(ROOT / name, tmp_path)
    model = (tmp_path / 'model.py').read_text()
    for old, new in re.findall(r'((?:^-.*\n)+)((?:^\+.*\n)+)', diff, re.M):
        old, new = (''.join(line[1:] + '\n' for line in part.splitlines()) for part in (old, new))
        assert model.count(old) == 1
        model = model.replace(old, new)
    (tmp_path / 'model.py').write_text(model)
    wiring = subprocess.run([sys.executable, '-c', 'from model import *\nprint([w.sources["v"] for w in wire(GPTConfig('
                             'n_layer=6, v_residual=True, residual_from="middle"))])'], cwd=tmp_path,
                            capture_output=True, text=True)
    assert wiring.stdout.strip() == '[[], [], [], [], [3], [3]]'
    done = program('train.py', *TINY, '--dataset=tiny', '--max_iters=2', '--out_dir=out/middle', '--v_residual=True',
                   '--residual_from=middle', cwd=runs, root=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_readme_names_every_config_and_only_flags_that_there_are():
    text = (ROOT / 'README.md').read_text()
    for name in re.findall(r'config/(\w+\.py)', text):
        assert (ROOT / 'config' / name).exists() or name == 'yours.py', name
    for flag in re.findall(r'(--(?:[qkv]_residual|residual_\w+|share_\w+|learning_rate|warmup_iters)=\S+?)`', text):
        values = [] if 'share_' in flag or flag.startswith(('--q', '--k', '--v')) else ['--v_residual=True']
        if 'every' in flag:
            values = [flag.split('_every')[0] + '=True']
        if 'middle' not in flag:
            configure(TrainConfig, GPTConfig, argv=[*values, flag])


@pytest.mark.parametrize('size, shape, millions', [
    ('2m', (4, 2, 16, 56), 1.6), ('82m', (8, 8, 512, 1792), 82), ('180m', (12, 12, 768, 2688), 180),
    ('468m', (24, 16, 1024, 3584), 468)])
@pytest.mark.parametrize('name, fields', [('vanilla', {}), ('resformer', {'v_residual': True}),
                                          ('svformer', {'share_v': True})])
def test_configs_are_the_papers(size, shape, millions, name, fields):
    settings, config = configure(TrainConfig, GPTConfig, argv=[str(ROOT / f'config/{name}_{size}.py')])
    assert (config.n_layer, config.n_head, config.n_embd, config.ffn_width) == shape
    layers, heads, width, ffn = shape
    weights = layers * (4 * width**2 + 3 * width * ffn + 2 * width) + width + 2 * config.vocab_size * width
    assert weights / 1e6 == pytest.approx(millions, abs=0.6)
    if layers * width < 5000:  # the larger ones take long to initialize
        assert GPT(GPTConfig(**{**config.__dict__, 'v_residual': False, 'share_v': False})).num_params(False) == weights
    assert {k: getattr(config, k) for k in ('v_residual', 'share_v') if getattr(config, k)} == fields
    assert settings.rows_per_step * config.block_size == 2**21 and settings.out_dir == f'out/{name}_{size}'
    assert (settings.learning_rate, settings.min_lr) == (6e-4, 6e-5)
    assert (settings.warmup_iters, settings.max_iters) == (120, 10000)


@pytest.mark.parametrize('length, batch, sequences', [(512, 128, 4096), (8192, 8, 256), (32000, 2, 64), (64000, 1, 32)])
def test_overlays_are_table_3(length, batch, sequences):
    paths = [str(ROOT / 'config' / name) for name in ('svformer_82m.py', f'seq_{length}.py')]
    settings, config = configure(TrainConfig, GPTConfig, argv=paths)
    assert (config.block_size, settings.batch_size, settings.rows_per_step) == (length, batch, sequences)
    assert config.share_v and config.n_embd == 512


def test_every_config_can_be_read():
    for path in (ROOT / 'config').glob('*.py'):
        configure(TrainConfig, GPTConfig, argv=[str(path)])


def test_bench_reports_every_row_and_writes_json(runs):
    done = program('bench.py', *TINY, '--variants=vanilla,resformer,svformer,gqa+q_residual=True:eager', '--rounds=3',
                   '--warmup=1', '--real_data=True', '--dataset=tiny', '--n_head=4', '--out=bench.json', cwd=runs)
    assert done.returncode == 0, done.stderr
    rows = json.loads((runs / 'bench.json').read_text())['rows']
    assert [row['name'] for row in rows] == ['vanilla', 'resformer', 'svformer', 'gqa+q_residual=True:eager']
    assert all(len(row['seconds']) == 3 and row['tok_per_s'] > 0 and row['mfu'] is None for row in rows)
    assert rows[0]['speed_relative_to'] == {'vanilla': 1.0}
    assert 'waiting for data' in done.stdout


@pytest.mark.parametrize('variant, word', [('resformr', 'resformr'), ('vanilla+v_residul=True', 'v_residual')])
def test_bench_refuses_an_unknown_variant_in_one_line(runs, variant, word):
    done = program('bench.py', *TINY, f'--variants={variant}', cwd=runs)
    assert done.returncode == 1 and word in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize('lever, word', [
    ('flsh', "'flsh'"), ('chunk', "'chunk'"), ('budget=1', "'budget=1'"), ('chunk=0', "'chunk=0'"),
    ('mode=foo', "'mode=foo'"), ('bucket=-1', "'bucket=-1'")])
def test_bench_refuses_an_unknown_lever_in_one_line(runs, lever, word):
    done = program('bench.py', *TINY, f'--variants=vanilla:{lever}', cwd=runs)
    assert done.returncode == 1 and word in done.stderr and len(done.stderr.strip().splitlines()) == 1


LEVERS = '', ':chunk=7', ':checkpointed', ':flash', ':checkpointed:chunk=40', ':eager'


@pytest.mark.parametrize('device, dtype, tolerance, levers', [
    ('cpu', 'float32', 1e-5, LEVERS), ('cpu', 'float16', 2e-3, LEVERS),
    pytest.param('cuda', 'float16', 2e-2, (*LEVERS, ':cudnn', ':efficient', ':mode=reduce-overhead',
                                           ':mode=max-autotune-no-cudagraphs'), marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason='needs a GPU'))])
@pytest.mark.parametrize('variant', ['vanilla', 'resformer', 'svformer', 'neutreno_resformer', 'cla_gqa'])
def test_every_lever_takes_the_same_step(variant, device, dtype, tolerance, levers):
    """Loss and gradients: what an update of plain SGD leaves in the weights, to a part of their largest change."""
    settings = bench.BenchConfig(dtype=dtype, device=device, compile=device == 'cuda')
    config, machine = GPTConfig(n_layer=4, n_head=8, n_embd=32, block_size=32, vocab_size=96), bench.Machine(settings)
    machine.micro_steps = 2
    batch = torch.randint(96, (2, 3, 32), generator=torch.Generator().manual_seed(1)).to(device)
    after = {}
    for lever in levers:
        row = bench.Row(variant + lever)
        row.build(settings, config, machine)
        row.optimizer = torch.optim.SGD(row.model.parameters(), 1.0)
        before = torch.cat([p.detach().flatten() for p in row.model.parameters()])
        row.step(lambda: batch, timed=True)
        after[lever] = torch.cat([p.detach().flatten() for p in row.model.parameters()]) - before
    largest = after[''].abs().max()
    assert largest > 1e-3
    for lever, change in after.items():
        assert (change - after['']).abs().max() < tolerance * largest, lever


def test_rows_with_other_levers_share_no_compiled_code(runs):
    done = program('bench.py', '--n_layer=1', '--n_head=2', '--n_embd=32', '--vocab_size=64', '--block_size=16',
                   '--batch_size=2', '--device=cpu', '--rounds=1', '--warmup=2', '--profile=traces',
                   '--variants=vanilla,vanilla:checkpointed,vanilla:chunk=8', '--out=levers.json', cwd=runs)
    assert done.returncode == 0, done.stderr
    compiled = [set(re.findall(r'CompiledFxGraph (\w+)', (runs / f'traces/{name}.json').read_text()))
                for name in ('vanilla', 'vanilla-checkpointed', 'vanilla-chunk=8')]
    assert all(compiled) and not compiled[0] & compiled[1] and not compiled[0] & compiled[2]
    assert len(re.findall(r'^\| `', done.stdout, re.M)) == 30  # ten kernels each
    rows = json.loads((runs / 'levers.json').read_text())['rows']
    assert all(row['first_step_s'] > row['ms_per_step'] / 1e3 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU has it')
def test_a_kernel_that_the_device_lacks_does_not_lose_the_other_rows(runs):
    done = program('bench.py', *TINY, '--variants=vanilla:cudnn,vanilla', '--rounds=1', '--warmup=1', cwd=runs)
    assert done.returncode == 0, done.stderr
    assert re.search(r'^\| vanilla:cudnn \| \D+ \|$', done.stdout, re.M) and '| vanilla | ' in done.stdout


@pytest.mark.parametrize('where', ['build', 'step'])
def test_a_row_that_runs_out_of_memory_does_not_lose_the_others(monkeypatch, capsys, where):
    whole = getattr(bench.Row, where)

    def full(row, *args):
        if row.name == 'svformer:checkpointed':
            weights.extend(map(weakref.ref, getattr(row, 'model', torch.nn.Module()).parameters()))
            raise torch.OutOfMemoryError('out of memory: tried\nall of it')
        return whole(row, *args)
    weights = []
    monkeypatch.setattr(bench.Row, where, full)
    found = bench.bench_training(*configure(bench.BenchConfig, GPTConfig, argv=[
        *TINY, '--rounds=1', '--warmup=1', '--variants=vanilla,svformer:checkpointed,resformer']))
    assert [('problem' in row, row['name']) for row in found['rows']] == [
        (False, 'vanilla'), (True, 'svformer:checkpointed'), (False, 'resformer')]
    assert '| svformer:checkpointed | out of memory: tried |' in capsys.readouterr().out
    assert bool(weights) == (where == 'step') and not any(weight() is not None for weight in weights)


def test_bench_without_a_row_that_can_be_timed_is_one_line(monkeypatch):
    def full(row, *args):
        raise torch.OutOfMemoryError('out of memory: tried\nall of it')
    monkeypatch.setattr(bench.Row, 'build', full)
    with pytest.raises(ValueError, match='no row could be timed: out of memory: tried$'):
        bench.bench_training(*configure(bench.BenchConfig, GPTConfig, argv=[*TINY, '--rounds=1']))


def test_bench_of_two_processes_counts_the_tokens_of_both_and_prints_one_table(runs):
    words = ['-m', 'torch.distributed.run', '--nproc_per_node=2', str(ROOT / 'bench.py'), *TINY, '--rounds=2',
             '--gradient_accumulation_steps=2', '--warmup=1', '--real_data=True',
             '--variants=vanilla,vanilla:ddp-first,vanilla:bucket=1:static', '--dataset=tiny', '--out=two.json']
    done = subprocess.run([sys.executable, *words], cwd=runs, capture_output=True, text=True,
                          env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stderr
    found = json.loads((runs / 'two.json').read_text())
    assert found['world_size'] == 2 and done.stdout.count('ms/step') == 1
    for row in found['rows']:
        assert row['tok_per_s'] * row['ms_per_step'] / 1e3 == pytest.approx(2 * 2 * 16)


def test_the_peer_in_bench_has_our_shape():
    pytest.importorskip('transformers')
    config = GPTConfig(block_size=32, vocab_size=64, n_layer=2, n_head=4, n_embd=32, n_kv_head=2)
    assert (sum(p.numel() for p in bench.HuggingFaceLlama(config).parameters()) == GPT(config).num_params(False))


def test_a_prepared_dataset_of_another_format_is_refused(tmp_path):
    meta = write_dataset(tmp_path / 'data/old', {'train': {'A': 400}, 'validation': {'A': 40}})
    (tmp_path / 'data/old/meta.json').write_text(json.dumps({**meta, 'format': 0}))
    done = program('train.py', *TINY, '--dataset=old', cwd=tmp_path)
    assert done.returncode == 1 and 'format 0' in done.stderr


def test_the_readmes_cache_table_is_what_new_cache_allocates():
    rows = re.findall(r'^\| [^|]+ \| (?:`(.*?)`)? ?\| ([\d,]+) \| ([\d,]+) \|$', (ROOT / 'README.md').read_text(), re.M)
    assert len(rows) == 8
    for settings, *sizes in rows:
        for size, shape in zip(sizes, (dict(), dict(n_layer=24, n_head=16, n_embd=1024)), strict=True):
            options = eval(f'dict({settings})', {'n_head': shape.get('n_head', 8)})
            with torch.device('meta'):
                cache = GPT(GPTConfig(**shape, **options)).new_cache(3, 5, torch.float16)
            assert cache.nbytes == 15 * int(size.replace(',', '')), settings


DECODE = ['bench.py', 'decode', '--n_layer=2', '--n_embd=32', '--n_head=2', '--vocab_size=64', '--block_size=32']


def test_bench_decode_reports_every_row_and_cache_bytes(runs):
    done = program(*DECODE, '--contexts=(16, 32)', '--batch_sizes=(1, 2)', '--new_tokens=4', '--chunk=8', '--rounds=2',
                   '--warmup=1', '--variants=vanilla,svformer:eager', '--compile=False', '--out=decode.json', cwd=runs)
    assert done.returncode == 0, done.stderr
    rows = json.loads((runs / 'decode.json').read_text())['rows']
    assert [(r['name'], r['batch'], r['context']) for r in rows] == [
        (name, batch, context) for context in (16, 32) for batch in (1, 2) for name in ('vanilla', 'svformer:eager')]
    for r in rows:
        tensors = 4 if r['name'] == 'vanilla' else 3  # k and v of two layers, or two k and one v
        assert r['cache_bytes'] == tensors * r['batch'] * r['context'] * 32 * 4
        assert len(r['seconds']) == 2 and r['ms_per_token'] > 0 and f'| {r["cache_bytes"]:,} |' in done.stdout


@pytest.mark.parametrize('arguments, word', [
    (['--contexts=(64,)'], 'block_size=32'), (['--contexts=(16,)', '--new_tokens=16'], 'new_tokens=16'),
    (['--contexts=(16,)', '--new_tokens=4', '--memory_gib=1'], 'memory_gib needs a GPU'),
    (['--chunk=0'], 'chunk'), (['--batch_sizes=(0,)'], 'batch_sizes'), (['--new_tokens=0'], 'new_tokens'),
    (['--contexts=(16,)', '--new_tokens=4', '--variants=vanilla:checkpointed'], 'checkpointed')])
def test_bench_decode_refuses_bad_input_in_one_line(runs, arguments, word):
    done = program(*DECODE, '--device=cpu', '--compile=False', *arguments, cwd=runs)
    assert done.returncode == 1 and word in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize('most', [0, 1, 2, 3, 7, 8, 100])
def test_the_largest_batch_is_found_by_bisection(most):
    assert bench.largest(lambda batch: batch <= most) == most
