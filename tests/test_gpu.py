"""On a GPU: FP16, flash attention, the compiler, CUDA graphs and NCCL give what fp32 on the CPU gives."""
import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, write_dataset

from model import GPT, GPTConfig
from train import Machine, TrainConfig, checkpoint_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
SIZE = dict(n_layer=4, n_head=4, n_embd=128, block_size=256, vocab_size=512)
VARIANTS = {'vanilla': {}, 'resformer': dict(v_residual=True), 'svformer': dict(share_v=True),
            'cla_gqa': dict(share_k=True, share_v=True, share_k_every=2, share_v_every=2, n_kv_head=2),
            'cross': dict(v_residual=True, residual_map='cross'), 'neutreno': dict(neutreno=0.4),
            'denseformer': dict(denseformer=True), 'learned': dict(v_residual=True, residual_learned=True)}


@pytest.mark.parametrize('how', ['eager', 'compiled', 'checkpointed'])
@pytest.mark.parametrize('variant', VARIANTS)
def test_losses_and_gradients_in_float16_are_those_of_float32_on_the_cpu(variant, how):
    torch.compiler.reset()
    reference = GPT(GPTConfig(**SIZE, **VARIANTS[variant]))
    model = copy.deepcopy(reference).cuda()
    x, y = torch.randint(512, (2, 4, 256))
    _, expected = reference(x, y)
    expected.backward()
    if how == 'checkpointed':
        checkpoint_blocks(model)
    call = model if how == 'eager' else torch.compile(model, fullgraph=True)
    scaler = torch.amp.GradScaler('cuda')
    with torch.autocast('cuda', dtype=torch.float16):
        _, loss = call(x.cuda(), y.cuda())
    scaler.scale(loss).backward()
    assert loss.item() == pytest.approx(expected.item(), abs=5e-3)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        found, wanted = (p.grad / scaler.get_scale()).cpu().flatten(), q.grad.flatten()
        assert (found - wanted).norm() < 0.03 * wanted.norm() + 1e-6, name


@pytest.mark.parametrize('variant', ['vanilla', 'svformer', 'cla_gqa', 'cross'])
def test_decoding_with_cuda_graphs_is_the_full_forward_pass(variant):
    torch.compiler.reset()
    model = GPT(GPTConfig(**SIZE, **VARIANTS[variant])).cuda().eval()
    idx = torch.randint(512, (2, 40), device='cuda')
    one_token = torch.compile(model, mode='reduce-overhead')
    cache = model.new_cache(2, 40)
    with torch.no_grad():
        expected = model(idx)[0]
        model(idx[:, :30], cache=cache)
        for t in range(30, 40):
            found = one_token(idx[:, t:t + 1], cache=cache, last_only=True)[0]
            torch.testing.assert_close(found[:, 0], expected[:, t], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('launcher', [[], ['-m', 'torch.distributed.run', '--nproc_per_node=1']])
def test_a_run_learns_stops_and_resumes(tmp_path, launcher):
    write_dataset(tmp_path / 'data' / 'tiny', {'train': {'A': 90000}, 'validation': {'A': 3000}})
    options = dict(dataset='tiny', n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=64, batch_size=8,
                   gradient_accumulation_steps=2, warmup_iters=3, learning_rate=1e-2, eval_iters=2, lr_decay_iters=20)

    def train(**changes):
        words = [f'--{k}={v}' for k, v in {**options, **changes}.items()]
        done = subprocess.run([sys.executable, *launcher, str(ROOT / 'train.py'), *words], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in Path(tmp_path, changes['out_dir'], 'log.jsonl').read_text().splitlines()]

    whole = train(out_dir='out/whole', max_iters=20)
    train(out_dir='out/parts', max_iters=10)
    parts = train(out_dir='out/parts', max_iters=20, init_from='resume')
    losses, again = ({e['step']: e['loss'] for e in log if 'loss' in e} for log in (whole, parts))
    assert losses[19] < losses[0] - 0.5 and losses.keys() == again.keys()
    assert all(again[step] == pytest.approx(losses[step], abs=1e-2) for step in losses)
    assert Machine(TrainConfig()).dtype == 'float16'
