"""What bounds memory and keeps half precision honest on a GPU, as far as a CPU can tell."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_one_line
from runs import here
from torch._functorch import config as functorch_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from variants import SIZE, config_of, make, tokens

import model as model_py
import train
from model import GPT, GPTConfig, LinearCrossEntropy

# --- the loss ------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Notes the rows of each chunk of logits (the loss takes one logsumexp() of it), and the largest
    tensor."""

    def __init__(self):
        super().__init__()
        self.rows, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._log_softmax.default:
            self.rows.append(len(args[0]))
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize('rows', [1, 4, 5, 33, 100, 1001])
def test_the_loss_is_cross_entropy_in_at_most_eight_chunks(monkeypatch, rows):
    """More would bound no memory: the compiler keeps most of them."""
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 4)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(23, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(-1, 23, (rows,), generator=generator)
    with Seen() as seen:
        ours = LinearCrossEntropy.apply(x, weight, targets, True)
    assert sum(seen.rows) == rows
    assert len(seen.rows) <= 8
    assert (len(seen.rows) > 1) == (rows > 4)

    theirs = F.cross_entropy(x @ weight.T, targets, ignore_index=-1, reduction='sum')
    torch.testing.assert_close(ours, theirs)
    gradients = torch.autograd.grad(theirs, (x, weight))
    torch.testing.assert_close(torch.autograd.grad(ours, (x, weight)), gradients)


def test_logits_of_all_positions_never_exist_in_training_nor_with_last_only(monkeypatch):
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 16)
    model = GPT(GPTConfig(**{**SIZE, 'vocab_size': 2003}))
    idx = tokens(4, 24)
    with Seen() as seen:
        model(idx)
    assert seen.largest == 4 * 24 * 2003  # the probe sees it where it does exist
    with Seen() as seen:
        model(idx, idx)[1].backward()
        model(idx, last_only=True)
    # lm_head's weight and gradient; the logits would be three times that.
    assert seen.largest == 2003 * 32


def relative_error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    'dtype, scale, gain, tolerance',
    [
        (torch.bfloat16, 2**20, 1, 4e-2),
        (torch.float16, 2**20, 1, 1e-2),
        (torch.float16, 2**8, 40, 1e-2),
    ],
)
def test_the_loss_under_autocast_survives_a_huge_scale(dtype, scale, gain, tolerance, monkeypatch):
    """With the scaler's factor, or the sum over rows that push the same row of lm_head, past FP16's
    largest number, 65,504."""
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 4000)
    model = GPT(config_of('tied embeddings'))
    model.transformer.ln_f.weight.data.fill_(gain)
    idx, targets = tokens(128, 24), tokens(128, 24, seed=1)
    if gain > 1:
        targets[:] = 5
    with torch.autocast('cpu', dtype=dtype):
        _, loss = model(idx, targets)
    expected = F.cross_entropy(model(idx)[0].flatten(0, 1), targets.flatten())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    scaled = gradients(model, loss * scale) / scale
    assert relative_error(scaled, gradients(model, expected)) < tolerance  # false for nan


def test_a_learned_weight_has_a_finite_gradient_in_float16():
    """Its gradient is a sum over all positions, far beyond what a half-precision number holds."""
    part = GPT(config_of('learned')).transformer.h[1].attn.v
    shape = (4, 8, 1024, 8)
    source, own = torch.full(shape, 2.0).half(), torch.full(shape, 3.0).half()
    mixed = part.mix(own, [source], own)
    assert mixed.dtype == torch.float16
    mixed.float().sum().backward()
    gradient, elements = part.residual_lambda.grad.tolist(), source.numel()
    assert gradient == [2.0 * elements, 3.0 * elements]
    assert min(gradient) > torch.finfo(torch.float16).max


# --- attention -----------------------------------------------------------------------------------


def test_in_fp32_on_cuda_shared_keys_are_repeated_with_the_same_result(monkeypatch):
    """There, torch would take the kernel that holds all attention weights."""
    on_cuda = dict(is_cuda=True, dtype=torch.float32)
    assert model_py.lacks_gqa(SimpleNamespace(**on_cuda))
    assert not model_py.lacks_gqa(SimpleNamespace(**{**on_cuda, 'dtype': torch.float16}))
    assert not model_py.lacks_gqa(torch.zeros(1))

    heads = []
    attention = F.scaled_dot_product_attention

    def noted(q, k, v, *others, enable_gqa):
        heads.append((k.size(1), enable_gqa))
        return attention(q, k, v, *others, enable_gqa=enable_gqa)

    monkeypatch.setattr(F, 'scaled_dot_product_attention', noted)
    model = make('GQA', n_layer=2)
    idx = tokens(2, 16)
    results = []
    for lacks in (False, True):
        monkeypatch.setattr(model_py, 'lacks_gqa', lambda q, lacks=lacks: lacks)
        results.append(gradients(model, model(idx, idx)[1]))
    assert heads == 2 * [(2, True)] + 2 * [(4, False)]
    torch.testing.assert_close(*results)


# --- in training ---------------------------------------------------------------------------------


NO_MEMORY = torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 8 GiB.\nmore lines')
NO_COMPILER = RuntimeError("InvalidCxxCompiler: No working C++ compiler in (None, 'g++')\nmore")


LESS = ('batch_size', 'activation_checkpointing', 'activation_memory_budget')


@pytest.mark.parametrize(
    'fail, words',
    [
        (NO_MEMORY, ('memory', 'ocate', *LESS)),
        (lambda *args: torch.empty(2**50), ('memory', 'ocate', *LESS)),
        (NO_COMPILER, ('C++ compiler', '--compile=False')),
    ],
)
def test_what_a_machine_lacks_is_one_line_that_names_the_settings(work, monkeypatch, fail, words):
    monkeypatch.setattr(train, 'train', Mock(side_effect=fail))
    assert_one_line(here('out/too_large')[0], *words)


def test_the_budget_reaches_the_compiler(monkeypatch):
    monkeypatch.setattr(torch, 'compile', lambda model: f'compiled {model}')
    settings = train.TrainConfig(activation_memory_budget=0.9)
    with functorch_config.patch(activation_memory_budget=1.0):
        compiled = train.compile_model('model', settings)
        assert functorch_config.activation_memory_budget == 0.9
    assert compiled == 'compiled model'


@pytest.mark.parametrize(
    'attention, dropout, kernel',
    [('auto', 0.0, 'auto'), ('auto', 0.1, 'flash'), ('cudnn', 0.1, 'cudnn')],
)
def test_with_dropout_cudnn_is_left_out_unless_it_is_asked_for(attention, dropout, kernel):
    """It would round the probability to sixteenths."""
    settings = train.TrainConfig(attention=attention)
    assert train.attention_setting(settings, GPTConfig(dropout=dropout)) == kernel
