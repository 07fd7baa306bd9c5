"""On a GPU, FP16, its kernels, the compiler, CUDA graphs and NCCL give what a CPU gives in fp32."""

import copy
import subprocess
import sys

import pytest
import torch
from accidents import at_call
from conftest import ROOT, write_dataset
from runs import command_line, good, training_steps
from variants import VARIANTS

import train
from bench import DecodeConfig
from lib.machine import Machine
from model import GPT, GPTConfig, attend
from train import TrainConfig, checkpoint_blocks, compile_model, leave_out_wrong_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')

# Heads of 32, which every attention kernel takes.
SIZE = dict(n_layer=4, n_head=4, n_embd=128, block_size=256, vocab_size=512)
DECODED = ['vanilla', 'SVFormer', 'CLA GQA', 'cross']
TRAINED = [*DECODED, 'ResFormer', 'NeuTRENO GQA', 'x0 embedding norm DenseFormer', 'learned']
FIELDS = {**VARIANTS, 'CLA GQA': {**VARIANTS['CLA'], 'n_kv_head': 2}}


def model_of(variant):
    return GPT(GPTConfig(**SIZE | FIELDS[variant]))


@pytest.mark.parametrize('how', ['eager', 'compiled', 'checkpointed'])
@pytest.mark.parametrize('variant', TRAINED)
def test_losses_and_gradients_in_float16_are_those_of_float32_on_the_cpu(variant, how):
    torch.compiler.reset()
    leave_out_wrong_kernels()
    reference = model_of(variant)
    model = copy.deepcopy(reference).cuda()
    x, y = torch.randint(512, (2, 4, 256))
    _, expected = reference(x, y)
    expected.backward()

    if how == 'checkpointed':
        checkpoint_blocks(model)
    call = model if how == 'eager' else torch.compile(model, fullgraph=True)
    scaler = torch.amp.GradScaler('cuda')
    x, y = x.cuda(), y.cuda()
    with torch.autocast('cuda', dtype=torch.float16):
        _, loss = call(x, y)
    scaler.scale(loss).backward()

    assert loss.item() == pytest.approx(expected.item(), abs=5e-3)
    for name, p in model.named_parameters():
        gradient = (p.grad / scaler.get_scale()).cpu()
        wanted = reference.get_parameter(name).grad
        assert (gradient - wanted).norm() < 0.03 * wanted.norm() + 1e-6, name


@pytest.mark.parametrize('variant', FIELDS)
def test_compiled_gradients_are_eager_ones(variant):
    """With the settings that training compiles with: see train.compile_model()."""
    torch.compiler.reset()
    eager = model_of(variant).cuda()
    compiled = copy.deepcopy(eager)
    x, y = torch.randint(512, (2, 4, 256), device='cuda')
    eager(x, y)[1].backward()
    compile_model(compiled, TrainConfig())(x, y)[1].backward()
    for name, p in compiled.named_parameters():
        wanted = eager.get_parameter(name).grad
        assert (p.grad - wanted).norm() < 1e-3 * wanted.norm() + 1e-5, name


@pytest.fixture
def attention_of_decoding():
    """The kernels that bench.py decode, sample.py and evaluate.py leave in."""
    Machine(attention=DecodeConfig().attention)
    yield
    Machine()


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-3), ('float16', 5e-3)])
@pytest.mark.parametrize('variant', DECODED)
def test_decoding_with_cuda_graphs_is_the_full_forward_pass(
    variant, dtype, tolerance, attention_of_decoding
):
    """Also in half precision, for which alone there is flash attention."""
    torch.compiler.reset()
    model = model_of(variant).to('cuda', getattr(torch, dtype)).eval()
    idx = torch.randint(512, (2, 40), device='cuda')
    one_token = torch.compile(model, mode='reduce-overhead')
    cache = model.new_cache(2, 40)
    with torch.no_grad():
        expected, _ = model(idx)
        model(idx[:, :30], cache=cache)
        for t in range(30, 40):
            token = idx[:, t : t + 1]
            logits, _ = one_token(token, cache=cache, last_only=True)
            torch.testing.assert_close(logits[:, 0], expected[:, t], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
@pytest.mark.parametrize('kv_heads', [8, 2])
def test_no_attention_of_a_whole_text_holds_all_its_weights(dtype, kv_heads):
    """Neither in the kernel that is chosen, nor in the memory that a forward pass takes."""
    machine = Machine(dtype=dtype)
    assert machine.attention_kernel(8, kv_heads, 64, 2048) not in ('math', 'unknown')
    q = torch.randn(1, 8, 2048, 64, dtype=getattr(torch, dtype), device='cuda')
    k = q[:, :kv_heads].contiguous()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(q, k, k)
    weights = 8 * 2048 * 2048 * 2  # bytes in half precision
    assert torch.cuda.max_memory_allocated() - before < weights


@pytest.mark.parametrize('launcher', [[], ['-m', 'torch.distributed.run', '--nproc_per_node=1']])
def test_a_run_learns_stops_and_resumes(here, launcher):
    splits = {'train': {'A': 90000}, 'validation': {'A': 3000}}
    write_dataset(here / 'data' / 'tiny', splits)
    options = dict(
        n_embd=64,
        block_size=64,
        batch_size=8,
        gradient_accumulation_steps=2,
        lr_decay_iters=20,
        device='auto',
        compile=True,
    )

    def losses(out_dir, **changes):
        """{step: loss} of a run of train.py, in its log."""
        words = command_line(out_dir, options | changes)
        command = [sys.executable, *launcher, ROOT / 'train.py', *words]
        subprocess.run(command, check=True, timeout=300)
        return {entry['step']: entry['loss'] for entry in training_steps(out_dir)}

    whole = losses('out/whole', max_iters=20)
    losses('out/parts', max_iters=10)
    parts = losses('out/parts', max_iters=20, init_from='resume')
    assert whole[19] < whole[0] - 0.5
    assert parts.keys() == whole.keys()
    for step in whole:
        assert parts[step] == pytest.approx(whole[step], abs=1e-2)
    assert Machine().dtype == 'float16'


def test_no_step_waits_for_the_device(here, monkeypatch):
    """From the second one, until the last one is read and a checkpoint is written."""
    write_dataset(here / 'data' / 'tiny')

    def switch(mode):
        return lambda *args: torch.cuda.set_sync_debug_mode(mode)

    step, checkpoint = train.train_step, train.Reporter.checkpoint
    monkeypatch.setattr(train, 'train_step', at_call(2, step, switch('error')))
    monkeypatch.setattr(train.Reporter, 'checkpoint', at_call(1, checkpoint, switch('default')))
    good('out/x', device='cuda', optimizer='muon', max_iters=4, eval_interval=0, save_steps=())
