"""What every architecture of model.py builds on: calls, dropout, first weights, counts."""

import collections
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from variants import RES, SIZE, SV, make, tokens

import model as model_py
from model import GPT, GPTConfig

both_architectures = pytest.mark.parametrize('arch', ['llama', 'gpt2'])


@both_architectures
def test_more_tokens_than_block_size_are_refused(arch):
    with pytest.raises(ValueError, match='33.*block_size=32'):
        make(arch=arch)(tokens(1, 33))


def test_what_stands_in_the_place_of_a_matrix_is_called_with_and_without_gradients():
    """As LoRA's layers do, which are nn.Linear with more."""

    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = GPT(GPTConfig(**SIZE, v_residual=True))
    for block in model.transformer.h:
        for matrix in (block.attn.q.proj, block.attn.v.proj, block.mlp.c_gate):
            matrix.__class__ = Shifted
    idx = tokens(2, 8)
    with torch.no_grad():
        expected = model(idx)[0]
    torch.testing.assert_close(model(idx)[0], expected)


def test_a_second_derivative_of_the_loss_is_refused_rather_than_wrong():
    model = make(n_layer=1)
    _, loss = model(tokens(1, 8), tokens(1, 8, seed=1))
    with pytest.raises(RuntimeError, match='cross_entropy of the logits'):
        torch.autograd.grad(loss, [*model.parameters()], create_graph=True)


class Dropouts(TorchDispatchMode):
    """Counts the dropouts by shape and by the probability that an element is kept."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bernoulli_.float:
            tensor, kept = args
            self.counts[tuple(tensor.shape), kept] += 1
        return func(*args, **(kwargs or {}))


@both_architectures
def test_dropout_is_on_embeddings_attention_weights_and_what_attention_and_mlp_add(arch):
    B, T, layers = 2, 9, SIZE['n_layer']
    model = make(arch=arch, dropout=0.25)
    with Dropouts() as dropouts:
        model(tokens(B, T))
    assert dropouts.counts == {
        ((B, T, SIZE['n_embd']), 0.75): 1 + 2 * layers,
        ((B, SIZE['n_head'], T, T), 0.75): layers,
    }
    without = make(arch=arch)(tokens(B, T))[0]
    assert torch.equal(model.eval()(tokens(B, T))[0], without)


@both_architectures
def test_initial_weights_follow_the_table_and_the_seed(arch):
    size = dict(block_size=256, vocab_size=512, n_layer=8, n_head=4, n_embd=64)
    model, other = (GPT(GPTConfig(**size, arch=arch), seed=seed) for seed in (5, 6))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            start = torch.zeros_like(p) if name.endswith('bias') else torch.ones_like(p)
            assert torch.equal(p, start), f'{name} starts at {p[:3].tolist()}'
            continue
        std = 0.02
        if arch == 'gpt2' and name.endswith('c_proj.weight'):
            std = 0.02 / math.sqrt(2 * 8)
        assert p.std().item() == pytest.approx(std, rel=0.05), name
        assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name
        assert not torch.isclose(p, other.get_parameter(name)).float().mean() > 0.01, name


# --- counts --------------------------------------------------------------------------------------


def test_gpt2_is_of_the_size_of_fig_12d():
    """test_configs.py has the sizes of Table 4."""
    model = GPT.without_weights(GPTConfig(arch='gpt2'))
    c = model.config
    assert round(model.num_params(non_embedding=False) / 1e6) == 78
    rows = 2 * c.vocab_size + c.block_size  # wte, lm_head and wpe
    assert model.num_params(non_embedding=False) - model.num_params() == rows * c.n_embd


def test_num_params_counts_a_tied_embedding_once_and_a_table_of_a_fork_as_an_embedding():
    vanilla, tied = make(), make(tie_embeddings=True)
    assert vanilla.num_params(False) - tied.num_params(False) == 61 * 32
    assert vanilla.num_params() == tied.num_params()
    before, total = vanilla.num_params(), vanilla.num_params(False)
    vanilla.fork_table = torch.nn.Embedding(61, 8)
    assert vanilla.num_params() == before
    assert vanilla.num_params(False) == total + 61 * 8


CROSS = dict(RES, residual_map='cross')


@pytest.mark.parametrize(
    'settings, keys_of_layers',
    [
        (dict(n_kv_head=2), ()),
        (dict(arch='gpt2', tie_embeddings=True), ()),
        (SV, ()),
        (dict(RES, residual_map='identity', neutreno=0.4), ()),
        (dict(RES, residual_weights='head', output_gate=True), ()),
        (CROSS, (2, 2)),
        (dict(residual_map='cross', v_residual='all', residual_layers=(2,)), (3,)),
    ],
    ids=str,
)
def test_flops_per_token_are_those_that_torch_counts(settings, keys_of_layers, monkeypatch):
    """torch counts the matmuls of one forward and backward pass.

    Attention is two plain matmuls here (the fused backward computes one of them twice). torch counts
    more only where residual_map is 'cross': with P layers' keys there are P * T of them per query,
    and the unmasked trick of attend_cross has P * T queries, too, where T would do.
    """
    model = make(**settings)
    idx, targets = tokens(2, 20), tokens(2, 20, seed=1)
    expected = model(idx, targets)[1]
    monkeypatch.setattr(model_py, 'attend', plain_attention)
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 11)
    with FlopCounterMode(display=False) as counter:
        loss = model(idx, targets)[1]
        loss.backward()
    torch.testing.assert_close(loss, expected)
    extra = sum(3 * 4 * (P * P - P) * 20 * 32 for P in keys_of_layers)
    assert counter.get_total_flops() == 40 * (model.flops_per_token(20) + extra)


def test_flops_of_what_is_no_matrix_are_those_that_it_says():
    """As tensors of n_embd numbers a token that are multiplied and added, three times the forward pass."""
    flops = {}
    for name in (None, 'denseformer', 'x0_residual', 'attn_res'):
        config = GPTConfig(**SIZE, **({name: True} if name else {}))
        flops[name] = GPT.without_weights(config).flops_per_token(20) // (3 * 2 * 32)
    plain = flops.pop(None)
    assert {name: count - plain for name, count in flops.items()} == {
        'denseformer': 2 + 3 + 4,
        'x0_residual': 3 * 2,
        'attn_res': 2 * (2 + 3 + 4),
    }


def plain_attention(q, k, v, dropout=0.0, mask=None):
    T, hs = q.shape[2:]
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) / math.sqrt(hs)).masked_fill(future, -torch.inf)
    return F.softmax(scores, dim=-1) @ v
