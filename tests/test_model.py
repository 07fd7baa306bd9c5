"""
The vanilla Transformer of model.py, and what every variant builds on.

That is: the same model written twice elsewhere (transformers' Llama and GPT-2), initial weights, the
chunked loss, the counts of parameters and FLOPs.
"""

import collections
import math

import pytest
import reference
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from variants import CLA, RES, SV

import model as model_py
from model import GPT, GPTConfig, rope_tables

SIZE = dict(block_size=24, vocab_size=61, n_layer=3, n_head=4, n_embd=32, n_inner=48)
SMALL = torch.float32, 1e-5
both_architectures = pytest.mark.parametrize('arch', ['llama', 'gpt2'])


def make(**settings):
    """A model with weights far from their start."""
    return reference.perturb(GPT(GPTConfig(**{**SIZE, **settings})))


def tokens(*shape, seed=0):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))


def targets_of(*shape):
    targets = tokens(*shape, seed=1)
    ignored = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.2
    targets[ignored] = -1
    return targets


def relative_error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


# --- forward -------------------------------------------------------------------------------------


@pytest.mark.parametrize('n_kv_head', [0, 2, 1])
@pytest.mark.parametrize('tie_embeddings', [False, True])
def test_logits_equal_transformers_llama(n_kv_head, tie_embeddings):
    transformers = pytest.importorskip('transformers')
    ours = make(n_kv_head=n_kv_head, tie_embeddings=tie_embeddings)
    c = ours.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.n_embd,
        intermediate_size=c.n_inner,
        num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head,
        num_key_value_heads=n_kv_head or 4,
        max_position_embeddings=c.block_size,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=tie_embeddings,
        attention_bias=False,
        mlp_bias=False,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.load_state_dict(as_llama(ours))
    idx = tokens(2, 24)
    # Processors round sums in different orders: up to 1.7e-5 was seen.
    torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, atol=3e-5, rtol=0)


def as_llama(model):
    """Our weights under the names of transformers' Llama."""
    weights = {
        'model.embed_tokens.weight': model.transformer.wte.weight,
        'lm_head.weight': model.lm_head.weight,
        'model.norm.weight': model.transformer.ln_f.weight,
    }
    kv_width = 8 * model.config.kv_heads
    for n, block in enumerate(model.transformer.h):
        q, k, v = block.attn.c_attn.weight.split([32, kv_width, kv_width])
        gate, up = block.mlp.c_fc.weight.chunk(2)
        layer = {
            'self_attn.q_proj': q,
            'self_attn.k_proj': k,
            'self_attn.v_proj': v,
            'self_attn.o_proj': block.attn.c_proj.weight,
            'mlp.gate_proj': gate,
            'mlp.up_proj': up,
            'mlp.down_proj': block.mlp.c_proj.weight,
            'input_layernorm': block.ln_1.weight,
            'post_attention_layernorm': block.ln_2.weight,
        }
        for name, p in layer.items():
            weights[f'model.layers.{n}.{name}.weight'] = p
    return weights


def test_logits_equal_transformers_gpt2():
    transformers = pytest.importorskip('transformers')
    ours = make(arch='gpt2')
    c = ours.config
    config = transformers.GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.block_size,
        n_embd=c.n_embd,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_inner=c.n_inner,
        layer_norm_epsilon=c.norm_eps,
        tie_word_embeddings=False,
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    transposed = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')  # theirs are stored (in, out)
    weights = ours.state_dict()
    for name in weights:
        if name.endswith(transposed):
            weights[name] = weights[name].T
    theirs.load_state_dict(weights)
    idx = tokens(2, 24)
    torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize('setting', ['v_residual', 'share_v'])
def test_resformer_averages_with_the_first_values_svformer_attends_with_them(setting, monkeypatch):
    """Seen from inside: the outputs of c_attn, and what arrives at attention."""
    model = make(**{setting: True})
    projected, attended_with = [], []
    attend = model_py.attend

    def watching(q, k, v, *rest):
        attended_with.append(v)
        return attend(q, k, v, *rest)

    monkeypatch.setattr(model_py, 'attend', watching)
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda module, args, out: projected.append(out))
    model(tokens(2, 10))

    widths = [96, 96, 96] if setting == 'v_residual' else [96, 64, 64]
    assert [p.size(2) for p in projected] == widths
    first, *others = (p[..., 64:].view(2, 10, -1, 8).transpose(1, 2) for p in projected)
    assert torch.equal(attended_with[0], first)
    for own, v in zip(others, attended_with[1:], strict=True):
        torch.testing.assert_close(v, (first + own) / 2 if setting == 'v_residual' else first)


def test_embed_norm_changes_the_stream_but_hardly_the_first_values():
    """V_1 of llama reads RMSNorm(wte), which a second RMSNorm changes by epsilon alone."""
    plain = make()
    normed = make(embed_norm=True)
    values = []
    for model in (plain, normed):
        attention = model.transformer.h[0].attn
        attention.c_attn.register_forward_hook(lambda module, inputs, y: values.append(y))
    idx = tokens(2, 24)
    logits = [model(idx)[0] for model in (plain, normed)]
    assert relative_error(values[1], values[0]) < 1e-3
    assert relative_error(logits[1], logits[0]) > 0.1


def test_last_only_gives_the_last_position():
    model = make()
    idx = tokens(2, 9)
    logits, loss = model(idx, last_only=True)
    assert logits.shape == (2, 1, 61) and loss is None
    torch.testing.assert_close(logits, model(idx)[0][:, -1:], atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match='last_only is for logits, targets for the loss'):
        model(idx, idx, last_only=True)


def test_hidden_is_what_lm_head_reads():
    model = make()
    idx = tokens(2, 9)
    assert model.hidden(idx).shape == (2, 9, 32)
    assert torch.equal(model.lm_head(model.hidden(idx)), model(idx)[0])
    assert model.hidden(idx, last_only=True).shape == (2, 1, 32)


@both_architectures
def test_more_tokens_than_block_size_are_refused(arch):
    model = make(arch=arch)
    with pytest.raises(ValueError, match='25.*block_size=24'):
        model(tokens(1, 25))


def test_dropout_acts_in_training_only():
    model = make(dropout=0.2)
    idx = tokens(2, 24)
    assert torch.equal(model.eval()(idx)[0], make()(idx)[0])
    model.train()
    torch.manual_seed(0)
    first = model(idx)[0]
    assert not torch.equal(first, model(idx)[0])
    torch.manual_seed(0)
    assert torch.equal(first, model(idx)[0])


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
    model = make(arch=arch, dropout=0.25).train()
    with Dropouts() as dropouts:
        model(tokens(B, T))
    assert dropouts.counts == {
        ((B, T, SIZE['n_embd']), 0.75): 1 + 2 * layers,
        ((B, SIZE['n_head'], T, T), 0.75): layers,
    }


# --- initial weights -----------------------------------------------------------------------------


@both_architectures
def test_initial_weights_follow_the_table(arch):
    size = dict(block_size=256, vocab_size=512, n_layer=8, n_head=4, n_embd=64)
    model = GPT(GPTConfig(**size, arch=arch))
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


@both_architectures
def test_initial_weights_are_those_of_the_seed_whatever_the_global_one(arch):
    config = GPTConfig(**SIZE, arch=arch)
    torch.manual_seed(1)
    first = dict(GPT(config, seed=5).named_parameters())
    torch.manual_seed(2)
    again = dict(GPT(config, seed=5).named_parameters())
    other = dict(GPT(config, seed=6).named_parameters())
    for name, p in first.items():
        assert torch.equal(p, again[name]), name
        assert p.dim() == 1 or not torch.isclose(p, other[name]).float().mean() > 0.01, name


# --- loss ----------------------------------------------------------------------------------------


def plain_loss(model, idx, targets):
    logits = model(idx)[0].flatten(0, 1).double()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1)


def backward(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-12), SMALL], ids=str)
@pytest.mark.parametrize('chunk', [7, 1, 46, 1000])  # 46 rows: six chunks and a ragged one, ...
@pytest.mark.parametrize('tie_embeddings', [False, True])
def test_chunked_loss_and_gradients_equal_cross_entropy(
    dtype, tolerance, chunk, tie_embeddings, monkeypatch
):
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', chunk)
    model = make(tie_embeddings=tie_embeddings).to(dtype)
    idx, targets = tokens(2, 23), targets_of(2, 23)
    expected = plain_loss(model, idx, targets)
    logits, loss = model(idx, targets)
    assert logits is None and loss.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    assert relative_error(backward(model, loss), backward(model, expected)) < tolerance
    with torch.no_grad():
        assert model(idx, targets)[1].item() == loss.item()


HALVES = [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)]


@pytest.mark.parametrize('dtype, tolerance', HALVES, ids=str)
def test_chunked_loss_equals_cross_entropy_under_autocast(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 7)
    model = make()
    idx, targets = tokens(2, 23), targets_of(2, 23)
    with torch.autocast('cpu', dtype=dtype):
        expected = plain_loss(model, idx, targets)
        _, loss = model(idx, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    assert relative_error(backward(model, loss), backward(model, expected)) < tolerance

    # And without autocast, again.
    ours = backward(model, model(idx, targets)[1])
    assert relative_error(ours, backward(model, plain_loss(model, idx, targets))) < 1e-5


def test_fp16_gradients_survive_a_huge_loss_scale(monkeypatch):
    """With the scaler's factor past FP16's largest number, 65,504."""
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 1000)
    model = GPT(GPTConfig(**SIZE))
    idx, targets = tokens(128, 24), targets_of(128, 24)
    expected = backward(model, model(idx, targets)[1])
    with torch.autocast('cpu', dtype=torch.float16):
        loss = model(idx, targets)[1]
    scaled = backward(model, loss * 2.0**20)
    assert scaled.isfinite().all()
    assert relative_error(scaled / 2**20, expected) < 1e-2


def test_fp16_loss_gradients_do_not_overflow_in_the_sum_over_rows():
    """4,096 rows push the same row of lm_head: its gradient is 4,096 * 30 before the loss scale."""
    generator = torch.Generator().manual_seed(0)
    x = (30 + torch.randn(4096, 8, generator=generator)).requires_grad_()
    weight = (0.02 * torch.randn(64, 8, generator=generator)).requires_grad_()
    targets = torch.full((4096,), 5)
    with torch.autocast('cpu', dtype=torch.float16):
        total = model_py.LinearCrossEntropy.apply(x, weight, targets, True)
    expected = F.cross_entropy(x @ weight.T, targets, reduction='sum')
    ours = torch.autograd.grad(total * 2.0**20, (x, weight))
    theirs = torch.autograd.grad(expected, (x, weight))
    for grad, expected in zip(ours, theirs, strict=True):
        assert relative_error(grad / 2**20, expected) < 1e-2  # false for nan


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def test_logits_of_all_positions_never_exist_in_training_nor_with_last_only(monkeypatch):
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 16)
    model = GPT(GPTConfig(**{**SIZE, 'vocab_size': 2003}))
    idx = tokens(4, 24)
    with LargestTensor() as seen:
        model(idx)
    assert seen.numel == 4 * 24 * 2003  # the probe sees it where it does exist
    with LargestTensor() as seen:
        model(idx, idx)[1].backward()
    # lm_head's weight and gradient; the logits would be three times that.
    assert seen.numel == 2003 * 32
    with LargestTensor() as seen:
        model(idx, last_only=True)
    assert seen.numel <= 2003 * 32


# --- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'millions, settings',
    [
        (2, dict(n_layer=4, n_head=2, n_embd=16)),
        (82, {}),
        (180, dict(n_layer=12, n_head=12, n_embd=768)),
        (468, dict(n_layer=24, n_head=16, n_embd=1024)),
        (78, dict(arch='gpt2')),
    ],
)
def test_sizes_are_those_of_the_paper(millions, settings):
    """Table 4, FFN widths by default; Fig. 12d's GPT-2 has 8 layers, width 512."""
    with torch.device('meta'):
        model = GPT(GPTConfig(**settings))
    c = model.config
    assert round(model.num_params(non_embedding=False) / 1e6) == millions
    rows = 2 * c.vocab_size  # wte and lm_head
    if c.arch == 'gpt2':
        rows += c.block_size
    assert model.num_params(non_embedding=False) - model.num_params() == rows * c.n_embd


def test_num_params_counts_a_tied_embedding_once_and_borrowers_have_fewer():
    vanilla = make()
    tied = make(tie_embeddings=True)
    svformer = make(share_v=True)
    assert vanilla.num_params(False) - tied.num_params(False) == 61 * 32
    assert vanilla.num_params() == tied.num_params()
    assert vanilla.num_params() - svformer.num_params() == 2 * 32 * 32


def test_num_params_leaves_out_a_table_that_a_fork_adds():
    model = make()
    before, total = model.num_params(), model.num_params(False)
    model.value_table = torch.nn.Embedding(61, 8)
    assert model.num_params() == before
    assert model.num_params(False) == total + 61 * 8


CROSS = dict(RES, residual_map='cross')


@pytest.mark.parametrize(
    'settings, keys_of_layers',
    [
        ({}, ()),
        (dict(n_kv_head=2), ()),
        (dict(arch='gpt2'), ()),
        (dict(tie_embeddings=True), ()),
        (RES, ()),
        (SV, ()),
        (CLA, ()),
        (dict(neutreno=0.4, denseformer=True), ()),
        (dict(RES, residual_map='identity', residual_from='all'), ()),
        (CROSS, (2, 2)),
        (dict(CROSS, residual_from='all', residual_layers=(2,)), (3,)),
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
    idx, targets = tokens(2, 20), targets_of(2, 20)
    expected = model(idx, targets)[1]
    monkeypatch.setattr(model_py, 'attend', plain_attention)
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 11)
    with FlopCounterMode(display=False) as counter:
        loss = model(idx, targets)[1]
        loss.backward()
    torch.testing.assert_close(loss, expected)

    extra = sum(3 * 4 * (P * P - P) * 20 * 32 for P in keys_of_layers)
    assert counter.get_total_flops() == 40 * (model.flops_per_token(20) + extra)


def plain_attention(q, k, v, dropout=0.0, mask=None):
    T, hs = q.shape[2:]
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) / math.sqrt(hs)).masked_fill(future, -torch.inf)
    return F.softmax(scores, dim=-1) @ v


# --- Llama 3's RoPE ------------------------------------------------------------------------------

SCALING = (8.0, 1.0, 4.0, 100)


@pytest.mark.parametrize(
    'theta, n_embd, scaling',
    [
        (500000.0, 128, (8.0, 1.0, 4.0, 8192)),  # Llama 3.1 8B
        (500000.0, 64, (32, 1, 4, 8192)),  # Llama 3.2 1B
        (10000.0, 8, SCALING),
        (10000.0, 16, (2.5, 0.5, 3.0, 77)),
    ],
)
def test_rope_scaling_is_that_of_llama3(theta, n_embd, scaling):
    size = dict(SIZE, block_size=100, n_layer=1, n_head=1, n_embd=n_embd, rope_theta=theta)
    cos, sin = rope_tables(GPTConfig(**size, rope_scaling=scaling))
    _, plain_sin = rope_tables(GPTConfig(**size))
    frequencies, effects = reference.rope_frequencies(n_embd, theta, scaling)
    assert set(effects) == {'kept', 'blended', 'stretched'}
    for i, effect in enumerate(effects):
        angles = [t * frequencies[i] for t in range(100)]
        for column in (i, i + n_embd // 2):
            expected_cos = torch.tensor([math.cos(angle) for angle in angles])
            expected_sin = torch.tensor([math.sin(angle) for angle in angles])
            torch.testing.assert_close(cos[:, column], expected_cos, atol=2e-5, rtol=0)
            torch.testing.assert_close(sin[:, column], expected_sin, atol=2e-5, rtol=0)
            is_plain = torch.equal(sin[:, column], plain_sin[:, column])
            assert is_plain == (effect == 'kept')


def test_rope_scaling_changes_the_logits():
    idx = tokens(2, 24)
    difference = make(rope_scaling=SCALING)(idx)[0] - make()(idx)[0]
    assert difference.abs().max() > 0.1


def test_rope_scaling_does_nothing_to_short_wavelengths_or_with_factor_1():
    plain = rope_tables(GPTConfig(**SIZE))
    for scaling in ((8.0, 1.0, 4.0, 10**6), (1.0, 1.0, 4.0, 100)):
        scaled = rope_tables(GPTConfig(**SIZE, rope_scaling=scaling))
        torch.testing.assert_close(scaled, plain, atol=1e-5, rtol=0)
