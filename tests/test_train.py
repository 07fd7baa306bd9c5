"""train.py: a run is a function of its settings, however often it stopped and on however many processes."""
import ast
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from runs import (
    TINY,
    assert_same_run,
    command_line,
    finish,
    good,
    load,
    log,
    losses,
    same,
    snapshot,
    start,
    torchrun,
)

import train
from data import Dataset
from model import GPT, GPTConfig

# what a run writes

def test_the_loss_falls_and_every_step_is_logged(whole):
    entries = log(whole)
    steps = [e for e in entries if 'loss' in e]
    assert [e['step'] for e in steps] == list(range(12)) and [e['step'] for e in entries if 'val' in e] == [0, 6, 12]
    assert steps[0]['loss'] > 4.1 and steps[-1]['loss'] < steps[0]['loss'] - 0.5  # ln 64 = 4.16
    for e in steps:
        assert e['tokens'] == (e['step'] + 1) * 4 * 2 * 32 and e['grad_norm'] > 0 and e['tok_per_s'] > 0
    for e in entries:
        if 'val' in e:
            assert list(e['val']) == ['A', 'B', 'C', 'mean']
            assert e['val']['mean'] == pytest.approx(sum(e['val'][d] for d in 'ABC') / 3)


def test_the_first_lines_and_config_json_say_what_produced_the_run(work):
    text = good('out/said', max_iters=1, v_residual=True)
    said = json.loads(Path('out/said/config.json').read_text())
    for name, value in {**TINY, 'max_iters': 1, 'v_residual': True, 'save_steps': [6], 'out_dir': 'out/said',
                        'torch': str(torch.__version__), 'dtype': 'float32', 'world_size': 1}.items():
        assert said[name] == value and re.search(rf'^{name} +{re.escape(str(TINY.get(name, value)))}', text, re.M) or \
            name in ('max_iters', 'out_dir')
    assert said['commit'] and said['device'] == 'cpu'


def test_a_checkpoint_loads_with_weights_only_and_has_no_wrapper_prefixes(whole):
    checkpoint = load(Path(whole, 'ckpt.pt'))
    assert set(checkpoint['model']) == set(GPT(GPTConfig(**checkpoint['model_config'])).state_dict())
    assert checkpoint['step'] == 12 and checkpoint['data']['row'] == 12 * 8
    assert checkpoint['settings']['learning_rate'] == 1e-2 and checkpoint['wandb_id'] is None


def test_a_checkpoint_is_written_at_every_evaluation_and_at_the_end_and_save_steps_are_kept(work, monkeypatch):
    written = []
    save = train.save_checkpoint
    monkeypatch.setattr(train, 'save_checkpoint', lambda folder, checkpoint, keep, names: (
        written.append((checkpoint['step'], names[:1])), save(folder, checkpoint, keep, names)))
    good('out/kept', max_iters=5, eval_interval=2, save_steps=(1, 4))
    assert [step for step, _ in written] == [0, 1, 2, 4, 5]
    assert [names for _, names in written if names != ['ckpt_best.pt']] == [['ckpt_1.pt'], ['ckpt_4.pt']]
    steps = {'ckpt.pt': 5, 'ckpt.pt.1': 4, 'ckpt_1.pt': 1, 'ckpt_4.pt': 4}
    assert sorted(os.listdir('out/kept')) == sorted([*steps, 'ckpt_best.pt', 'config.json', 'log.jsonl'])
    assert {name: load(f'out/kept/{name}')['step'] for name in steps} == steps
    values = {e['step']: e['val']['mean'] for e in log('out/kept') if 'val' in e}
    assert list(values) == [0, 2, 4, 5]
    best = load('out/kept/ckpt_best.pt')
    assert best['step'] == min(values, key=values.get) and best['best'] == min(values.values())


def test_log_interval_and_an_eval_interval_of_zero(work):
    good('out/sparse', max_iters=7, eval_interval=0, log_interval=3, save_steps=())
    assert [(e['step'], 'val' in e) for e in log('out/sparse')] == [(0, False), (3, False), (6, False), (7, True)]


def test_learned_mixing_weights_are_logged_at_evaluations(work):
    good('out/mixing', max_iters=2, v_residual=True, residual_learned=True, denseformer=True, eval_interval=2)
    first, last = (e['mixing'] for e in log('out/mixing') if 'val' in e)
    assert first['transformer.h.1.attn.residual_lambda'] == [0.5, 0.5]
    assert first['transformer.dwa.1'] == [0.0, 0.0, 1.0] and last.keys() == first.keys() and last != first


def test_the_validation_loss_is_the_mean_over_tokens_of_a_slow_evaluation(work):
    config = GPTConfig(**{k: v for k, v in TINY.items() if hasattr(GPTConfig, k)})
    settings = train.TrainConfig(**{k: v for k, v in {**TINY, 'eval_iters': 7}.items() if not hasattr(GPTConfig, k)})
    model, dataset = GPT(config, seed=3), Dataset('tiny')
    model.lm_head.weight.data *= 20  # rows differ
    found = train.evaluate(model, dataset, settings, train.Machine(settings))
    assert model.training
    for domain, rows in (('B', 9), ('C', 1)):  # not a multiple of the batch of 2; a row of 20 tokens
        tokens = torch.from_numpy(dataset.read('validation', domain, 0, 9999))
        losses = []
        for row in range(rows):
            x, y = (tokens[row * 32 + shift:(row + 1) * 32 + shift] for shift in (0, 1))
            logits, _ = model(x[None, :len(y)])
            losses += (-logits[0].log_softmax(dim=-1)[range(len(y)), y]).tolist()
        assert len(losses) == {'B': 288, 'C': 19}[domain]
        assert found[domain] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert found['mean'] == pytest.approx((found['A'] + found['B'] + found['C']) / 3)


@pytest.mark.parametrize('seed', [0, -1, 10**20])
def test_any_integer_is_a_seed(work, seed):
    good(f'out/seed{seed}', seed=seed, dropout=0.1, max_iters=1)
    assert load(f'out/seed{seed}/ckpt.pt')['settings']['seed'] == seed


def test_eval_only_prints_the_losses_and_writes_nothing(whole, work):
    before = snapshot('out')
    text = good(whole, init_from='resume', eval_only=True)
    assert f'mean {log(whole)[-1]["val"]["mean"]:.4f}' in text and snapshot('out') == before


# resuming

@pytest.mark.parametrize('options', [
    dict(dtype='float32', dropout=0.2), dict(dtype='bfloat16', v_residual=True, residual_learned=True),
    dict(dtype='float16', dropout=0.2), dict(dtype='float16', share_v=True)], ids=str)
def test_resume_is_bitwise_equal(work, options):
    name = '-'.join(map(str, options.values()))
    good(f'out/{name}', **options)
    good(f'out/{name}-resumed', **options, max_iters=6)
    good(f'out/{name}-resumed', **options, init_from='resume')
    assert_same_run(f'out/{name}', f'out/{name}-resumed')
    assert (load(f'out/{name}/ckpt.pt')['scaler'] != {}) == (options['dtype'] == 'float16')


def test_resume_after_a_kill_is_bitwise_equal(work):
    """Killed between two checkpoints; the log ends in half a line."""
    options = dict(max_iters=150, eval_interval=40, lr_decay_iters=150, save_steps=())
    process = start('-u', ROOT / 'train.py', *command_line('out/killed', options))
    for line in process.stdout:
        if line.startswith('step 100 '):
            break
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert load('out/killed/ckpt.pt')['step'] == 80 and log('out/killed')[-1]['step'] >= 100
    with open('out/killed/log.jsonl', 'a') as f:
        f.write('{"step": 123, "lo')
    Path('out/killed/ckpt.tmp').write_bytes(b'half a checkpoint')
    good('out/killed', **options, init_from='resume')
    good('out/unkilled', **options)
    assert_same_run('out/killed', 'out/unkilled')
    assert not Path('out/killed/ckpt.tmp').exists()


def test_init_from_auto_starts_a_run_and_then_resumes_it(work, whole):
    good('out/auto', init_from='auto', max_iters=6)
    text = good('out/auto', init_from='auto')
    assert 'step 5 ' not in text and 'step 6 ' in text
    assert_same_run('out/auto', whole)


def test_log_lines_past_the_checkpoint_are_cut_on_resume(half, whole):
    name = half('out/cut')
    with open(f'{name}/log.jsonl', 'a') as f:
        f.write('\0\0\0{"step": 13')
    good(name, init_from='resume')
    assert_same_run(name, whole)


def test_resuming_a_finished_run_changes_nothing(whole):
    before = {path: data for path, data in snapshot(whole).items() if path.name != 'config.json'}
    good(whole, init_from='resume')
    assert {path: data for path, data in snapshot(whole).items() if path.name != 'config.json'} == before


def test_changes_that_resume_allows_take_effect_and_are_logged(half):
    name = half('out/changed')
    text = good(name, init_from='resume', weight_decay=0.5, beta2=0.9, learning_rate=1e-3, batch_size=1, max_iters=8,
                gradient_accumulation_steps=8)
    changed, = (e['changed'] for e in log(name) if 'changed' in e)
    assert changed.pop('out_dir') == ['out/whole', name]
    assert changed == {'weight_decay': [0.1, 0.5], 'beta2': [0.95, 0.9], 'learning_rate': [0.01, 0.001],
                       'batch_size': [2, 1], 'gradient_accumulation_steps': [4, 8], 'max_iters': [12, 8]}
    assert 'weight_decay' in text
    groups = load(f'{name}/ckpt.pt')['optimizer']['param_groups']
    assert [group['weight_decay'] for group in groups] == [0.5, 0.0]
    assert all(tuple(group['betas']) == (0.9, 0.9) for group in groups)


@pytest.mark.parametrize('before, after', [('float32', 'float16'), ('float16', 'bfloat16')])
def test_precision_may_change_on_resume(work, before, after):
    name = f'out/{before}-{after}'
    good(name, dtype=before, max_iters=6)
    good(name, dtype=after, max_iters=8, init_from='resume')
    assert [e['step'] for e in log(name) if 'loss' in e] == list(range(8))
    assert log(name)[-2]['scale'] == (65536.0 if after == 'float16' else None)


def test_init_from_a_checkpoint_takes_its_weights_and_nothing_else(whole):
    good('out/weights', init_from=f'{whole}/ckpt.pt', max_iters=1, v_residual=True, residual_learned=True,
         residual_lambda='(0.0, 1.0)', seed=7)
    first = log('out/weights')[0]
    assert first['step'] == 0 and first['val'] == log(whole)[-1]['val']  # a neutral start: the vanilla model's loss
    checkpoint = load('out/weights/ckpt.pt')
    assert checkpoint['step'] == 1
    assert {state['step'].item() for state in checkpoint['optimizer']['state'].values()} == {1.0}


# several processes

def assert_close(a, b, start=0):
    a, b = losses(a, start), losses(b, start)
    assert a.keys() == b.keys() and len(a) > 6
    for key in a:
        assert a[key] == pytest.approx(b[key], abs=1e-5), key


@pytest.fixture(scope='module')
def two(work):
    """The whole run on two processes. Returns its out_dir."""
    status, out, err = torchrun('out/two')
    assert status == 0, err
    return 'out/two'


def test_two_processes_reproduce_one(two, whole):
    assert_close(two, whole)
    for e, f in zip(log(two), log(whole), strict=True):
        assert e.get('grad_norm', 0) == pytest.approx(f.get('grad_norm', 0), abs=1e-4) and e.get('lr') == f.get('lr')
    one, both = load(f'{whole}/ckpt.pt'), load(f'{two}/ckpt.pt')
    assert one['model'].keys() == both['model'].keys() and one['data'] == both['data']


def test_evaluation_is_the_same_on_one_and_two_processes(two, whole):
    first, reference = log(two)[0]['val'], log(whole)[0]['val']  # at step 0 the weights are the same
    assert all(first[d] == pytest.approx(reference[d], abs=1e-6) for d in reference)


def test_a_run_of_two_processes_resumes_on_one(two, whole):
    shutil.copytree(two, 'out/two-one')
    os.replace('out/two-one/ckpt_6.pt', 'out/two-one/ckpt.pt')
    good('out/two-one', init_from='resume')
    assert_close('out/two-one', whole)


def test_a_run_of_one_process_resumes_on_two(half, whole):
    name = half('out/one-two')
    status, out, err = torchrun(name, init_from='resume')
    assert status == 0, err
    assert_close(name, whole)


def test_two_nodes_reproduce_one(whole):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    nodes = [start('-m', 'torch.distributed.run', '--nnodes=2', '--nproc_per_node=1', '--rdzv_backend=c10d',
                   f'--rdzv_endpoint=127.0.0.1:{port}', '--rdzv_id=test', ROOT / 'train.py',
                   *command_line('out/nodes', {})) for _ in range(2)]
    for status, _, err in map(finish, nodes):
        assert status == 0, err
    assert_close('out/nodes', whole)


@pytest.mark.skipif(not any(map(shutil.which, ('g++', 'c++', 'clang++'))), reason='no C++ compiler')
def test_compile_under_ddp_gives_the_same_losses_and_a_checkpoint_without_prefixes(work):
    good('out/eager', n_layer=1)
    status, out, err = torchrun('out/compiled', compile=True, n_layer=1)
    assert status == 0, err
    found, expected = losses('out/compiled'), losses('out/eager')
    for key in expected:
        assert found[key] == pytest.approx(expected[key], abs=1e-3), key
    assert load('out/compiled/ckpt.pt')['model'].keys() == load('out/eager/ckpt.pt')['model'].keys()


# memory

VARIANTS = {'vanilla': {}, 'resformer': dict(v_residual=True), 'svformer': dict(share_v=True),
            'previous': dict(v_residual=True, residual_from='previous'),
            'all': dict(q_residual=True, residual_from='all'),
            'identity': dict(v_residual=True, residual_map='identity'),
            'cross': dict(v_residual=True, residual_map='cross', residual_from='all'),
            'learned': dict(v_residual=True, residual_learned=True), 'neutreno': dict(v_residual=True, neutreno=0.2),
            'cla': dict(share_k=True, share_v=True, share_k_every=2, share_v_every=2, n_kv_head=1),
            'denseformer': dict(denseformer=True), 'gpt2': dict(arch='gpt2', v_residual=True, dropout=0.1)}


@pytest.mark.parametrize('variant', VARIANTS)
def test_activation_checkpointing_changes_no_loss_and_no_gradient(variant):
    config = GPTConfig(n_layer=4, n_head=2, n_embd=32, block_size=32, vocab_size=64, **VARIANTS[variant])
    x, y = torch.randint(64, (2, 2, 32), generator=torch.Generator().manual_seed(2))
    found = []
    compiled = ['compiled'] if variant in ('resformer', 'cross', 'cla') else []  # the compiler takes its time
    for how in ('plain', 'checkpointed', *compiled):
        model = GPT(config)
        if how != 'plain':
            train.checkpoint_blocks(model)
        torch.manual_seed(3)
        torch.compiler.reset()
        call = torch.compile(model, backend='aot_eager', fullgraph=True) if how == 'compiled' else model
        _, loss = call(x, y)
        loss.backward()
        found.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][1][name], rtol=1e-4, atol=1e-6)


def test_activation_checkpointing_saves_fewer_bytes_for_the_backward_pass():
    config = GPTConfig(n_layer=4, n_head=2, n_embd=32, block_size=64, vocab_size=64, v_residual=True)
    x = torch.zeros((2, 64), dtype=torch.int64)
    sizes = []
    for checkpointed in (False, True):
        model, kept = GPT(config), {}
        if checkpointed:
            train.checkpoint_blocks(model)
        weights = {p.data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t, kept=kept: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t,
                lambda t: t):
            model(x, x)
        sizes.append(sum(size for pointer, size in kept.items() if pointer not in weights))
    assert sizes[1] < sizes[0] / 4


def test_a_run_with_activation_checkpointing_is_the_same_run(work, whole):
    good('out/checkpointed', activation_checkpointing=True)
    for key, value in losses(whole).items():
        assert losses('out/checkpointed')[key] == pytest.approx(value, abs=1e-5), key


# precision

def test_float16_trains(work, whole):
    good('out/fp16', dtype='float16')
    found = losses('out/fp16')
    assert all(found[key] == pytest.approx(value, abs=0.02) for key, value in losses(whole).items())
    assert {e['scale'] for e in log('out/fp16') if 'loss' in e} == {65536.0}


def test_float16_skips_a_step_that_overflows(half):
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0**40)
    scaler.scale(torch.zeros(1))
    name = half('out/overflow', scaler=scaler.state_dict())
    before = load(f'{name}/ckpt.pt')
    good(name, init_from='resume', dtype='float16', max_iters=7)
    step = [e for e in log(name) if 'loss' in e][-1]
    assert step['step'] == 6 and step['grad_norm'] is None and step['scale'] == 2.0**39 and math.isfinite(step['loss'])
    after = load(f'{name}/ckpt.pt')
    assert same(before['model'], after['model'])
    assert same(before['optimizer']['state'], after['optimizer']['state'])


def test_a_diverged_run_still_writes_a_log_of_json(half):
    name = half('out/diverged')
    weights = load(f'{name}/ckpt.pt')
    weights['model']['lm_head.weight'] *= math.nan
    torch.save(weights, f'{name}/ckpt.pt')
    good(name, init_from='resume', max_iters=7)
    assert [e['loss'] for e in log(name) if 'loss' in e][-1] is None  # log() accepts no NaN
    assert log(name)[-1]['val'] == {'A': None, 'B': None, 'C': None, 'mean': None}


# the schedule and the groups

def test_the_learning_rate_is_the_papers():
    settings = train.TrainConfig()
    rates = [train.learning_rate(step, settings) for step in range(10001)]
    assert rates[0] == 1e-7 and rates[60] == pytest.approx((1e-7 + 6e-4) / 2) and rates[120] == 6e-4
    assert rates[10000] == pytest.approx(6e-5) and rates[5060] == pytest.approx((6e-4 + 6e-5) / 2)
    assert all(b > a for a, b in zip(rates[:120], rates[1:121], strict=True))
    assert all(b < a for a, b in zip(rates[120:-1], rates[121:], strict=True))
    assert train.learning_rate(20000, settings) == pytest.approx(6e-5)
    assert train.learning_rate(3, train.TrainConfig(decay_lr=False)) == 6e-4
    assert train.learning_rate(0, train.TrainConfig(warmup_iters=0)) == 6e-4
    assert train.learning_rate(500, train.TrainConfig(lr_decay_iters=500)) == pytest.approx(6e-5)


def test_the_logged_rate_is_the_schedules(whole):
    settings = train.TrainConfig(warmup_iters=3, max_iters=12, learning_rate=1e-2)
    for e in log(whole):
        assert 'loss' not in e or e['lr'] == train.learning_rate(e['step'], settings)


def test_matrices_and_embeddings_decay_and_every_parameter_is_in_one_group():
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64, v_residual=True,
                          residual_learned=True, denseformer=True, arch='gpt2'))
    decay, rest = (group for group in train.make_optimizer(model, train.TrainConfig()).param_groups)
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(names) == sorted(id(p) for group in (decay, rest) for p in group['params'])
    for p in decay['params']:
        assert re.search(r'(wte|wpe|lm_head|c_attn|c_proj|c_fc)\.weight$', names[id(p)])
    for p in rest['params']:
        assert re.search(r'(ln_\w|residual_lambda|dwa\.\d|\.bias)', names[id(p)])
    assert decay['weight_decay'] == 0.1 and rest['weight_decay'] == 0.0
    assert all(tuple(g['betas']) == (0.9, 0.95) and g['eps'] == 1e-8 for g in (decay, rest))


# wandb

class FakeRun:
    id = 'abc123'

    def __init__(self, broken=()):
        self.broken, self.logged, self.finished = broken, [], False

    def log(self, entry, step):
        if 'log' in self.broken:
            raise RuntimeError('the network is gone')
        self.logged.append((step, entry))

    def finish(self):
        if 'finish' in self.broken:
            raise RuntimeError('the network is gone')
        self.finished = True


def test_wandb_gets_the_settings_the_log_and_on_resume_the_same_run(work, monkeypatch):
    run, calls = FakeRun(), []
    monkeypatch.setitem(sys.modules, 'wandb', SimpleNamespace(init=lambda **options: calls.append(options) or run))
    good('out/wandb', wandb_log=True, max_iters=1, wandb_project='p')
    good('out/wandb', wandb_log=True, max_iters=2, init_from='resume')
    assert [(call['id'], call['name']) for call in calls] == [(None, 'wandb'), ('abc123', 'wandb')]
    assert calls[0]['project'] == 'p' and calls[0]['config']['n_embd'] == 32 and run.finished
    assert [step for step, _ in run.logged] == [0, 0, 1, 1, 2]
    assert 'val/mean' in run.logged[0][1] and 'loss' in run.logged[1][1]


@pytest.mark.parametrize('fault', ['absent', 'init', 'log', 'finish'])
def test_a_broken_wandb_stops_nothing(work, monkeypatch, fault, capsys):
    def init(**options):
        if fault == 'init':
            raise RuntimeError('no key')
        return FakeRun([fault])
    monkeypatch.setitem(sys.modules, 'wandb', None if fault == 'absent' else SimpleNamespace(init=init))
    good(f'out/wandb-{fault}', wandb_log=True, max_iters=1)
    assert len(log(f'out/wandb-{fault}')) == 3
    assert ('warning: no wandb' in capsys.readouterr().err) == (fault in ('absent', 'init'))


# the core stands alone

CORE = {'model.py': {'torch'}, 'data.py': {'numpy', 'torch'}, 'configurator.py': set(),
        'train.py': {'numpy', 'torch', 'model', 'data', 'configurator'}}


@pytest.mark.parametrize('name', CORE)
def test_the_core_imports_only_what_the_design_allows(name):
    found = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module.partition('.')[0])
    lazy = {'train.py': {'wandb'}, 'model.py': {'hf'}}.get(name, set())
    assert found - set(sys.stdlib_module_names) - lazy <= CORE[name]
    top = {word for line in (ROOT / name).read_text().splitlines() if line.startswith(('import ', 'from '))
           for word in re.findall(r'^\w+ (\w+)', line)}
    assert not top & lazy  # imported only where it is used


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {'wandb', 'datasets', 'transformers', 'matplotlib', 'tiktoken', 'zstandard',
                                      'pyarrow', 'huggingface_hub', 'safetensors', 'lm_eval', 'hf'}:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Block())
import train
train.main()
"""


def test_training_works_from_the_core_alone_with_no_other_package(work):
    os.mkdir('core')
    for name in CORE:
        shutil.copy(ROOT / name, 'core')
    Path('core/block.py').write_text(BLOCK)
    status, out, err = finish(start('core/block.py', *command_line('out/core', {'max_iters': 2, 'wandb_log': True})))
    assert status == 0, err
    assert 'No module named' in err and len(log('out/core')) == 4
