"""What bounds memory and keeps half precision honest on a GPU, as far as a CPU can tell."""

from types import SimpleNamespace

import pytest
import torch
from runs import good, here, read_config
from torch._functorch import config as functorch_config
from torch.utils._python_dispatch import TorchDispatchMode

import model as model_py
import train
from model import GPTConfig, LinearCrossEntropy


def plain_loss(x, weight, targets):
    return torch.nn.functional.cross_entropy(
        x @ weight.T, targets, ignore_index=-1, reduction='sum'
    )


class Chunks(TorchDispatchMode):
    """Notes the rows of each chunk of logits: the loss takes one logsumexp() of it."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.logsumexp.default:
            self.rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('rows', [1, 4, 5, 32, 33, 100, 1001])
def test_the_loss_has_at_most_eight_chunks(monkeypatch, rows):
    """More would bound no memory: the compiler keeps most of them."""
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 4)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(23, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(-1, 23, (rows,), generator=generator)
    with Chunks() as chunks:
        ours = LinearCrossEntropy.apply(x, weight, targets, True)
    assert sum(chunks.rows) == rows
    assert len(chunks.rows) <= 8
    assert (len(chunks.rows) > 1) == (rows > 4)
    assert all(size >= 4 for size in chunks.rows[:-1])

    theirs = plain_loss(x, weight, targets)
    torch.testing.assert_close(ours, theirs)
    gradients = torch.autograd.grad(theirs, (x, weight))
    torch.testing.assert_close(torch.autograd.grad(ours, (x, weight)), gradients)


def test_a_learned_weight_has_a_finite_gradient_in_float16():
    """Its gradient is a sum over all positions, far beyond what a half-precision number holds."""
    config = GPTConfig(n_layer=2, v_residual=True, residual_learned=True, vocab_size=64, n_embd=64)
    attention = model_py.GPT(config).transformer.h[1].attn
    shape = (4, 8, 1024, 8)
    source, own = torch.full(shape, 2.0).half(), torch.full(shape, 3.0).half()
    mixed = attention.mix('v', own, [source], None)
    assert mixed.dtype == torch.float16
    mixed.float().sum().backward()
    gradient, elements = attention.residual_lambda.grad.tolist(), source.numel()
    assert gradient == [2.0 * elements, 3.0 * elements]
    assert min(gradient) > torch.finfo(torch.float16).max


def test_running_out_of_memory_is_one_line_that_names_the_settings(work, monkeypatch):
    def run_out(*args):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 8 GiB.\nmore lines')

    monkeypatch.setattr(train, 'train', run_out)
    status, _ = here('out/too_large')
    assert '\n' not in status
    words = (
        'CUDA out of memory',
        'batch_size',
        'activation_memory_budget',
        'activation_checkpointing',
    )
    assert all(word in status for word in words)


def test_the_budget_reaches_the_compiler(monkeypatch):
    monkeypatch.setattr(torch, 'compile', lambda model, **options: (model, options))
    settings = train.TrainConfig(activation_memory_budget=0.9)
    with functorch_config.patch(activation_memory_budget=1.0):
        compiled = train.compile_model('model', settings, fullgraph=True)
        assert functorch_config.activation_memory_budget == 0.9
    assert compiled == ('model', {'fullgraph': True})


@pytest.mark.parametrize(
    'attention, dropout, asked_for',
    [('auto', 0.0, 'auto'), ('auto', 0.1, 'flash'), ('cudnn', 0.1, 'cudnn')],
)
def test_with_dropout_cudnn_is_left_out_unless_it_is_asked_for(
    work, monkeypatch, attention, dropout, asked_for
):
    """It would round the probability to sixteenths."""
    asked = []

    def machine(*args, **options):
        asked.append(options['attention'])
        raise ValueError('that is all')

    monkeypatch.setattr(train, 'Machine', machine)
    here('out/dropout', attention=attention, dropout=dropout)
    assert asked == [asked_for]


def test_in_fp32_on_cuda_shared_keys_are_repeated_with_the_same_result(monkeypatch):
    """There, torch would take the kernel that holds all attention weights."""
    on_cuda = dict(is_cuda=True, dtype=torch.float32)
    assert model_py.lacks_gqa(SimpleNamespace(**on_cuda))
    assert not model_py.lacks_gqa(SimpleNamespace(**{**on_cuda, 'dtype': torch.float16}))
    assert not model_py.lacks_gqa(torch.zeros(1))

    config = GPTConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, block_size=16, vocab_size=64)
    model = model_py.GPT(config)
    idx = torch.randint(64, (2, 16))
    heads = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(q, k, v, **options):
        heads.append((k.size(1), options['enable_gqa']))
        return attention(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', noted)
    losses, gradients = [], []
    for lacks in (False, True):
        monkeypatch.setattr(model_py, 'lacks_gqa', lambda q, lacks=lacks: lacks)
        _, loss = model(idx, idx)
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert heads == 2 * [(2, True)] + 2 * [(4, False)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


def test_a_run_says_which_attention_kernel_it_has(work):
    """None on a CPU; on CUDA, what torch chooses for its shape."""
    good('out/kernel', max_iters=1, save_steps=())
    config = read_config('out/kernel')
    assert config['attention'] == 'auto'
    assert config['attention_kernel'] is None
