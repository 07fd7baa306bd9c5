"""bench.py: what a table holds, what is refused, and what survives a failure."""

import json
import os
import re
import shlex
import sys
import weakref
from types import SimpleNamespace

import programs
import pytest
import torch
from conftest import ROOT
from programs import assert_one_line, program
from runs import finish, ranks, start

import bench
import levers
from configurator import configure
from hub.convert import llama_settings
from machine import Machine
from model import GPT, GPTConfig, refuse

TINY = [
    '--n_layer=4',
    '--n_head=2',
    '--n_embd=16',
    '--block_size=16',
    '--vocab_size=320',
    '--compile=False',
    '--device=cpu',
    '--batch_size=2',
    '--eval_iters=1',
]
DECODE = [
    'decode',
    '--n_layer=2',
    '--n_embd=32',
    '--n_head=2',
    '--vocab_size=64',
    '--block_size=32',
    '--device=cpu',
    '--compile=False',
]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')


def run(*words):
    """bench.py with these arguments, in this process; returns what it printed."""
    status, out, _ = program(bench.main, *words)
    assert status == 0, status
    return out


def assert_refused(*words, because):
    status, _, err = program(bench.main, *words)
    assert_one_line(status, because)
    assert err == ''


def table(*words):
    """The numbers of a table of training steps, made in this process."""
    settings, config = configure(bench.BenchConfig, GPTConfig, argv=[*TINY, '--warmup=1', *words])
    return bench.bench_training(settings, config)


def read_rows(path):
    return json.loads(path.read_text())['rows']


# --- training ------------------------------------------------------------------------------------


def test_bench_reports_every_row_and_writes_json(work):
    names = ['vanilla', 'resformer', 'svformer', 'gqa+q_residual=True:eager']
    options = ['--rounds=3', '--warmup=1', '--real_data=True', '--dataset=tiny', '--n_head=4']
    out = run(*TINY, f'--variants={",".join(names)}', *options, '--out=results/bench.json')

    rows = read_rows(work / 'results/bench.json')
    assert [row['name'] for row in rows] == names
    for row in rows:
        assert len(row['seconds']) == 3 and row['tok_per_s'] > 0 and row['mfu'] is None
    assert rows[0]['speed_relative_to'] == {'vanilla': 1.0}
    assert 'waiting for data' in out


def test_speed_relative_to_a_row_is_its_seconds_over_ours():
    vanilla, slow = bench.Row('vanilla', None), bench.Row('slow', None)
    vanilla.seconds, slow.seconds = [1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 4.0, 2.0]
    slow.waiting, slow.flops, slow.kernel = [0.1, 0.2, 0.3, 0.2], 600.0, 'flash'
    report = slow.report(1000, 1e6, {'vanilla': vanilla})
    assert report['speed_relative_to'] == {'vanilla': 0.5}
    assert report['tok_per_s'] == 500 and report['ms_per_step'] == 2000
    assert report['mfu'] == pytest.approx(600 * 500 / 1e6)
    assert report['spread'] == pytest.approx(0.5 / 2)  # quartiles 2 and 2.5
    assert report['attention_kernel'] == 'flash'


def test_the_training_table_has_the_numbers_of_the_json(capsys):
    rows = [bench.Row('vanilla', None), bench.Row('slow', None)]
    for row, seconds in zip(rows, ([0.1, 0.1, 0.11], [0.4, 0.4, 0.5]), strict=True):
        row.seconds, row.waiting, row.first = seconds, [0.0], 7 * seconds[2]
        row.flops, row.peak, row.kernel = 600.0, round(2**31 * seconds[2]), 'flash'
    reports = [row.report(1000, 1e7, {'vanilla': rows[0]}) for row in rows]
    bench.print_training({'device': 'some'}, reports, SimpleNamespace(real_data=False))

    head, _, *lines = programs.table(capsys.readouterr().out)
    for report, line in zip(reports, lines, strict=True):
        assert dict(zip(head, line, strict=True)) == {
            'row': report['name'],
            'ms/step': f'{report["ms_per_step"]:,.1f}',
            'spread': f'{report["spread"]:.1%}',
            'first step s': f'{report["first_step_s"]:.1f}',
            'tok/s': f'{report["tok_per_s"]:,.0f}',
            'MFU': f'{report["mfu"]:.1%}',
            'peak GiB': f'{report["peak_gib"]:.2f}',
            'x vanilla': f'{report["speed_relative_to"]["vanilla"]:.3f}',
        }
    assert lines[1] == ['slow', '400.0', '12.5%', '3.5', '2,500', '15.0%', '1.00', '0.250']


def test_the_spread_of_two_times_is_not_wider_than_they_are():
    assert bench.middle([1.0, 2.0]) == (1.5, pytest.approx(0.5 / 1.5))
    assert bench.middle([3.0]) == (3.0, 0)


def test_decoding_speed_is_tokens_of_all_texts_and_relative_to_vanilla():
    decoder = SimpleNamespace(name='slow', problem=None, kernels={'prefill': 'flash'})
    vanilla, slow = (bench.Trial(decoder, batch=4, context=64) for _ in range(2))
    vanilla.decode, slow.decode = [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]
    slow.prefill, slow.cache = [0.01, 0.02, 0.03], SimpleNamespace(nbytes=77)
    report = slow.report(vanilla)
    assert report['speed_relative_to_vanilla'] == 0.5
    assert report['tok_per_s'] == 4 / 2.0 and report['ms_per_token'] == 2000
    assert report['prefill_tok_per_s'] == pytest.approx(50)
    assert report['attention_kernels'] == {'prefill': 'flash'}


@pytest.mark.parametrize(
    'setting, chosen', [('auto', 'flash'), ('cudnn', 'cudnn'), ('flash', 'flash')]
)
def test_decoding_is_timed_with_the_attention_of_the_programs_that_decode(setting, chosen):
    assert bench.DecodeConfig(attention=setting).attention == chosen


@pytest.mark.parametrize(
    'variant, word',
    [
        ('resformr', 'resformr'),
        ('vanilla+v_residul=True', 'v_residual'),
        ('vanilla+batch_size=64', 'batch_size is the same in all rows; set it with --batch_size'),
        ('vanilla+learning_rate=1', 'learning_rate is the same in all rows'),
        ('vanilla+block_size=4096', 'block_size is the same in all rows'),
    ],
)
def test_bench_refuses_an_unknown_variant_in_one_line(work, variant, word):
    assert_refused(*TINY, f'--variants=vanilla,{variant}', because=word)


def test_the_row_that_a_note_advises_has_all_fields_of_the_config(capsys):
    """Also where a value has commas."""
    fields = dict(v_residual=True, residual_layers=(5, 6, 7))
    bench.start(bench.BenchConfig(device='cpu', compile=False), GPTConfig(**fields))
    note = capsys.readouterr().err
    advice = shlex.split(note.partition('residual_layers: ')[2])
    (settings,) = configure(bench.BenchConfig, argv=[*advice, '--peers=hf'])
    name, *peers = bench.row_names(settings)
    assert peers == ['hf', 'hf:eager']
    assert levers.read_name(name, GPTConfig()).config == GPTConfig(**fields)


def test_of_all_variants_those_that_cannot_have_the_shape_are_left_out(capsys):
    shape = GPTConfig(n_layer=4, n_head=2, n_embd=16)
    machine = Machine('cpu')
    settings = bench.BenchConfig(variants='all')
    names = [name for name, _ in bench.recipes(settings, shape, machine)]
    notes = capsys.readouterr().err
    assert 'note: left out gqa: n_head=2' in notes
    left_out = [note.removeprefix('note: left out ') for note in notes.splitlines()]
    assert {*names, *(words.partition(':')[0] for words in left_out)} == {*levers.VARIANTS}
    assert 'vanilla' in names and 'gqa' not in names


def test_a_variant_that_cannot_have_the_shape_is_named(work):
    assert_refused(*TINY, '--variants=vanilla,gqa', because='gqa: n_head=2')


def test_without_the_compiler_the_peer_is_timed_once():
    settings = bench.BenchConfig(compile=False, peers='hf', variants='vanilla')
    assert bench.row_names(settings) == ['vanilla', 'hf:eager']


def test_names_are_parted_at_the_commas_between_them():
    names = ['cla', 'vanilla+v_residual=True+residual_lambda=(2.0, 1.0):eager', 'gqa:chunk=8']
    assert levers.split_names(','.join(names)) == names


def test_bench_of_two_processes_counts_the_tokens_of_both_and_prints_one_table(work):
    options = ['--rounds=2', '--warmup=1', '--out=two.json']
    options += ['--real_data=True', '--dataset=tiny']
    variants = '--variants=vanilla,vanilla:ddp-first,vanilla:ddp-whole,vanilla:bucket=1:static'
    launcher = ['-m', 'torch.distributed.run', '--nproc_per_node=2']
    status, out, err = finish(start(*launcher, ROOT / 'bench.py', *TINY, variants, *options))
    assert status == 0, err

    numbers = json.loads((work / 'two.json').read_text())
    assert numbers['world_size'] == 2 and out.count('ms/step') == 1
    for row in numbers['rows']:
        assert row['tok_per_s'] * row['ms_per_step'] / 1e3 == pytest.approx(2 * 2 * 16)


def test_the_peer_in_bench_has_our_shape():
    pytest.importorskip('transformers')
    config = GPTConfig(block_size=32, vocab_size=64, n_layer=2, n_head=4, n_embd=32, n_kv_head=2)
    theirs = levers.HuggingFaceLlama(config)
    assert sum(p.numel() for p in theirs.parameters()) == GPT(config).num_params(False)


def test_the_peer_attends_without_a_mask_compiled_or_not():
    """A mask keeps the fast kernels away, and the comparison would not be like against like."""
    transformers = pytest.importorskip('transformers')
    config = GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=2, n_embd=16)
    theirs = levers.HuggingFaceLlama(config)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_settings(config)))
    plain.load_state_dict(theirs.llama.state_dict())
    calls = []

    def compiler(graph, inputs):
        for node in graph.graph.nodes:
            if getattr(node.target, '__name__', '') == 'scaled_dot_product_attention':
                calls.append((node.kwargs['attn_mask'], node.kwargs['is_causal']))
        return graph

    x = torch.arange(16).view(2, 8)
    _, eager = theirs(x, x)
    _, compiled = torch.compile(theirs, backend=compiler)(x, x)
    assert calls == [(None, True)]
    torch.testing.assert_close([eager, compiled], 2 * [plain(input_ids=x, labels=x).loss])


def test_a_step_on_mps_is_timed_until_the_device_has_done_it(monkeypatch):
    """Work is only queued there: without waiting, the clock would time the queueing."""
    waits = []
    monkeypatch.setattr(torch.mps, 'synchronize', lambda: waits.append('waited'))
    machine = Machine('cpu')
    bench.stopwatch(machine)()
    assert waits == []
    machine.kind = 'mps'
    seconds = bench.stopwatch(machine)
    assert len(waits) == 1  # for the work of before
    assert seconds() >= 0 and len(waits) == 2


@pytest.mark.parametrize('number, is_noted', [(4, True), (2, False), (32, False)])
def test_an_ignored_number_of_micro_steps_is_noted(capsys, number, is_noted):
    """Not train.py's default, which nobody has set."""
    settings = bench.BenchConfig(gradient_accumulation_steps=number, micro_steps=2)
    bench.note_ignored(settings, Machine('cpu'))
    err = capsys.readouterr().err
    assert ('gradient_accumulation_steps=4 does nothing here' in err) == is_noted
    assert err.count('\n') == is_noted


# --- what fails ----------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU has it')
def test_a_kernel_that_the_device_lacks_does_not_lose_the_other_rows(work):
    out = run(*TINY, '--variants=vanilla:cudnn,vanilla', '--rounds=1', '--warmup=1')
    assert re.search(r'^\| vanilla:cudnn \| \D+ \|$', out, re.M) and '| vanilla | ' in out


@pytest.mark.parametrize('where', ['build', 'step'])
def test_a_row_that_runs_out_of_memory_does_not_lose_the_others(monkeypatch, capsys, where):
    whole = getattr(bench.Row, where)
    weights = []

    def full(row, *args):
        if row.name == 'svformer:checkpointed':
            if row.model is not None:
                weights.extend(map(weakref.ref, row.model.parameters()))
            raise torch.OutOfMemoryError('out of memory: tried\nall of it')
        return whole(row, *args)

    monkeypatch.setattr(bench.Row, where, full)
    numbers = table('--rounds=1', '--variants=vanilla,svformer:checkpointed,resformer')
    assert [('problem' in row, row['name']) for row in numbers['rows']] == [
        (False, 'vanilla'),
        (True, 'svformer:checkpointed'),
        (False, 'resformer'),
    ]
    assert '| svformer:checkpointed | out of memory: tried |' in capsys.readouterr().out
    assert bool(weights) == (where == 'step')
    assert not any(weight() is not None for weight in weights)


@pytest.mark.parametrize(
    'error, problem',
    [(AssertionError(), 'AssertionError'), (KeyError('x0'), "'x0'"), (OSError('no g++'), 'no g++')],
)
def test_whatever_a_row_raises_does_not_lose_the_others(monkeypatch, error, problem):
    """Inductor raises AssertionError, for example."""
    step = bench.Row.step

    def broken(row, *args):
        if row.name == 'svformer':
            raise error
        return step(row, *args)

    monkeypatch.setattr(bench.Row, 'step', broken)
    rows = table('--rounds=2', '--variants=svformer,vanilla')['rows']
    assert rows[0] == {'name': 'svformer', 'problem': problem}
    assert len(rows[1]['seconds']) == 2


def test_hugging_faces_llama_is_a_row_of_the_table(tmp_path):
    pytest.importorskip('transformers')
    words = ['--variants=vanilla', '--peers=hf', '--rounds=1', '--warmup=1']
    run(*TINY, *words, f'--out={tmp_path}/hf.json')
    rows = read_rows(tmp_path / 'hf.json')
    assert [row['name'] for row in rows] == ['vanilla', 'hf:eager']
    for row in rows:
        assert 'problem' not in row and list(row['speed_relative_to']) == ['vanilla', 'hf:eager']


def test_bench_without_a_row_that_can_be_timed_is_one_line(monkeypatch):
    def full(row, *args):
        raise torch.OutOfMemoryError('out of memory: tried\nall of it')

    monkeypatch.setattr(bench.Row, 'build', full)
    with pytest.raises(ValueError, match='no row could be timed: out of memory: tried$'):
        table('--rounds=1')


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit])
def test_an_interrupted_bench_leaves_the_rounds_that_were_finished(tmp_path, monkeypatch, error):
    step = bench.Row.step

    def interrupted(row, *args):
        if row.name == 'resformer' and len(row.seconds) == 2:
            raise error
        return step(row, *args)

    monkeypatch.setattr(bench.Row, 'step', interrupted)
    with pytest.raises(error):
        table('--rounds=5', '--variants=vanilla,resformer', f'--out={tmp_path}/bench.json')
    rows = read_rows(tmp_path / 'bench.json')
    assert [len(row['seconds']) for row in rows] == [2, 2]


def test_a_profile_that_fails_ends_the_bench_with_its_problem(monkeypatch, tmp_path, capsys):
    """The other profiles and the table are there."""

    def broken(row, next_batch, folder):
        if row.name == 'vanilla':
            raise OSError('the disk is full')
        print(f'profile of {row.name} in {folder}')

    monkeypatch.setattr(bench.Row, 'profile', broken)
    words = ['--rounds=1', '--variants=vanilla,svformer', f'--profile={tmp_path}/traces']
    with pytest.raises(ValueError, match='^no profile of vanilla: the disk is full$'):
        table(*words, f'--out={tmp_path}/bench.json')
    assert len(read_rows(tmp_path / 'bench.json')) == 2
    assert f'profile of svformer in {tmp_path}/traces' in capsys.readouterr().out
    assert (tmp_path / 'traces').is_dir()


def test_what_cannot_be_written_is_refused_before_the_first_step(work, monkeypatch):
    monkeypatch.setattr(bench.Row, 'build', None)
    (work / 'file').write_text('')
    assert_refused(*TINY, '--out=data', because='out=data is a folder; name a file')
    assert_refused(*TINY, '--profile=file', because='file')


def bench_where_one_lacks_a_compiler(*words):
    if os.environ['RANK'] == '1':
        bench.check_compiler = lambda machine: refuse(True, 'no compiler')
    sys.argv = ['bench.py', *words]
    bench.main()


def test_a_compiler_that_one_process_lacks_ends_all_with_one_line(work):
    words = [word for word in TINY if 'compile' not in word]
    results = ranks(2, bench_where_one_lacks_a_compiler, *words)
    assert all(status == 1 for status, _, _ in results)
    assert ''.join(err for _, _, err in results) == 'error: no compiler\n'


def test_data_with_more_token_ids_than_the_model_are_refused(work):
    """On a GPU, an id that has no embedding would end the whole bench with a device-side assert."""
    words = ['--real_data=True', '--dataset=tiny', '--vocab_size=40']
    assert_refused(*TINY, *words, because='token ids; vocab_size=40 is less')


def test_data_that_cannot_be_read_end_the_bench(work, monkeypatch):
    """They are not the problem of one row, after which the next one would wait for ever."""

    def unreadable(rows, size):
        raise OSError('A.bin is gone')

    monkeypatch.setattr(bench.TrainingRows, 'batch', unreadable)
    assert_refused(*TINY, '--real_data=True', '--dataset=tiny', because='A.bin is gone')


# --- decoding ------------------------------------------------------------------------------------


def test_bench_decode_reports_every_row_and_cache_bytes(work):
    sizes = ['--contexts=(16, 32)', '--batch_sizes=(1, 2)', '--new_tokens=4', '--prefill_chunk=8']
    options = ['--rounds=2', '--warmup=1', '--variants=vanilla,svformer:eager']
    out = run(*DECODE, *sizes, *options, '--out=decode.json')

    rows = read_rows(work / 'decode.json')
    assert [(row['name'], row['batch'], row['context']) for row in rows] == [
        (name, batch, context)
        for context in (16, 32)
        for batch in (1, 2)
        for name in ('vanilla', 'svformer:eager')
    ]
    for row in rows:
        tensors = 4 if row['name'] == 'vanilla' else 3  # k and v of two layers, or two k and one v
        assert row['cache_bytes'] == tensors * row['batch'] * row['context'] * 32 * 4
        assert len(row['seconds']) == 2 and row['ms_per_token'] > 0
        assert row['attention_kernels'] == {'prefill': None, 'decode': None}  # without a GPU

    head, _, *lines = programs.table(out)
    for row, line in zip(rows, lines, strict=True):
        assert dict(zip(head, line, strict=True)) == {
            'row': row['name'],
            'batch': f'{row["batch"]}',
            'context': f'{row["context"]}',
            'eager prefill tok/s': f'{row["prefill_tok_per_s"]:,.0f}',  # whatever --compile says
            'ms/token': f'{row["ms_per_token"]:.2f}',
            'spread': f'{row["spread"]:.1%}',
            'tok/s': f'{row["tok_per_s"]:,.0f}',
            'x vanilla': f'{row["speed_relative_to_vanilla"]:.3f}',
            'cache bytes': f'{row["cache_bytes"]:,}',
            'peak GiB': 'n/a',  # known on CUDA only
        }


@pytest.mark.parametrize(
    'arguments, word',
    [
        (['--contexts=(64,)'], 'block_size=32'),
        (['--contexts=(16,)', '--new_tokens=16'], 'new_tokens=16'),
        (['--contexts=(16,)', '--new_tokens=4', '--memory_gib=1'], 'memory_gib needs a GPU'),
        (['--prefill_chunk=0'], 'prefill_chunk'),
        (['--batch_sizes=(0,)'], 'batch_sizes=(0,) must be whole numbers of at least 1'),
        (["--batch_sizes=('16',)"], "batch_sizes=('16',) must be whole numbers"),
        (['--batch_sizes=()'], 'batch_sizes=() must be whole numbers'),
        (["--contexts=('a',)"], "contexts=('a',) must be whole numbers"),
        (['--contexts=(16.0,)', '--new_tokens=4'], 'contexts=(16.0,) must be whole numbers'),
        (['--contexts=()'], 'contexts=() must be whole numbers'),
        (['--new_tokens=0'], 'new_tokens'),
        (['--warmup=-20'], 'warmup=-20 must be at least 0'),
        (['--peers=hf', '--contexts=(16,)', '--new_tokens=4'], 'bench.py decode has no peers'),
        (['--memory_gib=-1'], 'memory_gib=-1.0 must be at least 0'),
        (['--micro_steps=2'], 'micro_steps=2 does nothing in bench.py decode'),
        (['--real_data=True'], 'real_data=True does nothing in bench.py decode'),
        (['--profile=traces'], 'profile=traces does nothing in bench.py decode'),
        (
            ['--activation_checkpointing=True'],
            'activation_checkpointing=True does nothing in bench.py decode',
        ),
        (['--contexts=(16,)', '--new_tokens=4', '--variants=vanilla:checkpointed'], 'checkpointed'),
        (['--contexts=(16,)', '--new_tokens=4', '--variants=vanilla:budget=0.9'], 'budget'),
        (['--contexts=(16,)', '--new_tokens=4', '--variants=vanilla:half'], 'half'),
        (['--contexts=(16,)', '--new_tokens=4', '--variants=vanilla:ddp-whole'], 'ddp-whole'),
    ],
)
def test_bench_decode_refuses_bad_input_in_one_line(work, arguments, word):
    assert_refused(*DECODE, *arguments, because=word)


@pytest.mark.parametrize('where', ['start', 'round'])
def test_whatever_a_decoder_raises_does_not_lose_the_others(work, monkeypatch, where):
    """Nor does it lose the decoder's own rows with other batches."""
    whole = getattr(bench.Trial, where)

    def broken(trial, *args):
        if trial.name == 'svformer' and trial.batch == 2:
            raise AssertionError('no such\nkernel')
        return whole(trial, *args)

    monkeypatch.setattr(bench.Trial, where, broken)
    options = ['--contexts=(16,)', '--batch_sizes=(1, 2, 3)', '--new_tokens=4', '--rounds=1']
    out = run(*DECODE, *options, '--variants=vanilla,svformer', '--out=broken.json')
    problems = [row.get('problem') for row in read_rows(work / 'broken.json')]
    assert problems == [None, None, None, 'no such', None, None]
    assert '| svformer | 2 | 16 | no such |' in out


def bench_of(*words):
    sys.argv = ['bench.py', *words]
    bench.main()


def test_several_processes_do_not_decode(work):
    results = ranks(2, bench_of, *DECODE, '--contexts=(16,)', '--new_tokens=4', '--rounds=1')
    assert all(status == 1 for status, _, _ in results)
    errors = ''.join(err for _, _, err in results)
    assert_one_line(errors.strip(), 'start bench.py decode without torchrun')


def test_a_decoder_that_cannot_be_built_does_not_lose_the_others(work, monkeypatch):
    build = bench.Decoder.build

    def broken(decoder, *args):
        if decoder.name == 'svformer':
            raise torch.OutOfMemoryError('out of memory')
        return build(decoder, *args)

    monkeypatch.setattr(bench.Decoder, 'build', broken)
    options = ['--contexts=(16,)', '--batch_sizes=(1,)', '--new_tokens=4', '--rounds=1']
    run(*DECODE, *options, '--variants=vanilla,svformer', '--out=unbuilt.json')
    problems = [row.get('problem') for row in read_rows(work / 'unbuilt.json')]
    assert problems == [None, 'out of memory']


def test_an_interrupted_bench_decode_leaves_the_rows_that_were_finished(work, monkeypatch):
    round_ = bench.Trial.round

    def interrupted(trial, timed):
        if trial.batch == 2:
            raise KeyboardInterrupt
        return round_(trial, timed)

    monkeypatch.setattr(bench.Trial, 'round', interrupted)
    options = ['--contexts=(16,)', '--batch_sizes=(1, 2)', '--new_tokens=4', '--rounds=1']
    with pytest.raises(KeyboardInterrupt):
        run(*DECODE, *options, '--variants=vanilla,svformer', '--out=half.json')
    assert [row['batch'] for row in read_rows(work / 'half.json')] == [1, 1]


def test_a_decoder_that_cannot_be_built_keeps_its_line_in_a_given_memory():
    config = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=16, vocab_size=64)
    decoder = bench.Decoder('vanilla', bench.read_name('vanilla', config))
    decoder.problem = 'out of memory'
    (report,) = bench.measure_largest(decoder, 16, bench.DecodeConfig(memory_gib=1), None)
    assert report == {'name': 'vanilla', 'batch': 1, 'context': 16, 'problem': 'out of memory'}


@pytest.mark.parametrize('gib, share', [(10, 0.125), (200, 1.0)])
def test_a_memory_of_more_than_the_gpu_has_is_all_of_it(monkeypatch, gib, share):
    shares = []
    monkeypatch.setattr(bench, 'allocated', lambda machine: 0)
    monkeypatch.setattr(bench.Trial, 'grow', lambda trial: setattr(trial, 'batch', 0))
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda: (0, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, 'set_per_process_memory_fraction', shares.append)
    decoder = SimpleNamespace(name='vanilla', problem=None, static=0)
    settings = bench.DecodeConfig(memory_gib=gib)
    (report,) = bench.measure_largest(decoder, 16, settings, None)
    assert report['problem'] == f'not one text fits into {gib} GiB'
    assert shares == [share, 1.0]


@pytest.mark.parametrize('most, taken', [(100, 32), (24, 24), (1, 1), (0, 0)])
def test_the_largest_batch_is_one_with_which_a_whole_round_fits(monkeypatch, most, taken):
    """Compiled decoding takes memory that the last chunk of a prefill does not show."""
    whole = bench.Trial.round

    def full(trial, timed):
        if trial.batch > most:
            raise torch.OutOfMemoryError('out of memory')
        whole(trial, timed)

    monkeypatch.setattr(bench.Trial, 'fits', lambda trial, batch: batch <= 32)
    monkeypatch.setattr(bench.Trial, 'round', full)
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda: (0, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, 'set_per_process_memory_fraction', lambda share: None)
    settings = bench.DecodeConfig(
        device='cpu', compile=False, memory_gib=1, new_tokens=2, rounds=1, warmup=0
    )
    config = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, vocab_size=64)
    machine = Machine('cpu')
    decoder = bench.Decoder('vanilla', bench.read_name('vanilla', config))
    decoder.build(settings, machine)

    (report,) = bench.measure_largest(decoder, 8, settings, machine)
    assert report['batch'] == taken
    assert report.get('problem') == (None if taken else 'not one text fits into 1 GiB')


@pytest.mark.parametrize('most', [0, 1, 2, 3, 7, 8, 100])
def test_the_largest_batch_is_found_by_bisection(most):
    assert bench.largest(lambda batch: batch <= most) == most
