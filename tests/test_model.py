"""
The vanilla Transformer of model.py, written twice elsewhere (transformers' Llama and GPT-2), and what every variant
builds on: initial weights, the chunked loss, generation, the counts of parameters and FLOPs.
"""
import math

import pytest
import reference
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import model as model_py
from model import GPT, GPTConfig

SIZE = dict(block_size=24, vocab_size=61, n_layer=3, n_head=4, n_embd=32, n_inner=48)


def make(**settings):
    """A model with weights far from their start."""
    return reference.perturb(GPT(GPTConfig(**{**SIZE, **settings})))


def tokens(*shape, vocab_size=61, seed=0):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def targets_of(*shape):
    targets = tokens(*shape, seed=1)
    targets[torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.2] = -1
    return targets


def relative_error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


# --------------------------------------------------------------------------------------------------------------------
# forward


@pytest.mark.parametrize('n_kv_head', [0, 2, 1])
@pytest.mark.parametrize('tie_embeddings', [False, True])
def test_logits_equal_transformers_llama(n_kv_head, tie_embeddings):
    transformers = pytest.importorskip('transformers')
    ours = make(n_kv_head=n_kv_head, tie_embeddings=tie_embeddings)
    c, kv = ours.config, n_kv_head or 4
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.n_inner, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=kv, max_position_embeddings=c.block_size,
        rms_norm_eps=c.norm_eps, tie_word_embeddings=tie_embeddings, attention_bias=False, mlp_bias=False)).eval()
    weights = {'model.embed_tokens.weight': ours.transformer.wte.weight, 'lm_head.weight': ours.lm_head.weight,
               'model.norm.weight': ours.transformer.ln_f.weight}
    for n, block in enumerate(ours.transformer.h):
        q, k, v = block.attn.c_attn.weight.split([32, 8 * kv, 8 * kv])
        gate, up = block.mlp.c_fc.weight.chunk(2)
        for name, p in (('self_attn.q_proj', q), ('self_attn.k_proj', k), ('self_attn.v_proj', v),
                        ('self_attn.o_proj', block.attn.c_proj.weight), ('mlp.gate_proj', gate), ('mlp.up_proj', up),
                        ('mlp.down_proj', block.mlp.c_proj.weight), ('input_layernorm', block.ln_1.weight),
                        ('post_attention_layernorm', block.ln_2.weight)):
            weights[f'model.layers.{n}.{name}.weight'] = p
    theirs.load_state_dict(weights)
    idx = tokens(2, 24)
    torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, atol=1e-5, rtol=0)


def test_logits_equal_transformers_gpt2():
    transformers = pytest.importorskip('transformers')
    ours = make(arch='gpt2')
    c = ours.config
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head,
        n_inner=c.n_inner, layer_norm_epsilon=c.norm_eps, tie_word_embeddings=False)).eval()
    conv1d = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')  # theirs are stored (in, out)
    theirs.load_state_dict({name: p.T if name.endswith(conv1d) else p for name, p in ours.state_dict().items()})
    idx = tokens(2, 24)
    torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize('setting', ['v_residual', 'share_v'])
def test_resformer_averages_with_the_first_values_and_svformer_attends_with_them(setting, monkeypatch):
    """Seen from inside: the outputs of c_attn, and what arrives at attention."""
    model, projected, attended_with = make(**{setting: True}), [], []
    attend = model_py.attend
    monkeypatch.setattr(model_py, 'attend', lambda q, k, v, *rest: attended_with.append(v) or attend(q, k, v, *rest))
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda module, args, output: projected.append(output))
    model(tokens(2, 10))

    assert [p.size(2) for p in projected] == ([96] * 3 if setting == 'v_residual' else [96, 64, 64])
    first, *others = (p[..., 64:].view(2, 10, -1, 8).transpose(1, 2) for p in projected)
    assert torch.equal(attended_with[0], first)
    for own, v in zip(others, attended_with[1:], strict=True):
        torch.testing.assert_close(v, (first + own) / 2 if setting == 'v_residual' else first)


@pytest.mark.parametrize('arch', ['llama', 'gpt2'])
def test_no_position_sees_a_later_one(arch):
    model, idx = make(arch=arch), tokens(2, 24)
    for t in (1, 12, 23):
        changed = idx.clone()
        changed[:, t:] = tokens(2, 24 - t, seed=t)
        torch.testing.assert_close(model(changed)[0][:, :t], model(idx)[0][:, :t], atol=1e-6, rtol=0)
        torch.testing.assert_close(model(idx[:, :t])[0], model(idx)[0][:, :t], atol=1e-4, rtol=0)


def test_last_only_gives_the_last_position():
    model, idx = make(), tokens(2, 9)
    logits, loss = model(idx, last_only=True)
    assert logits.shape == (2, 1, 61) and loss is None
    torch.testing.assert_close(logits, model(idx)[0][:, -1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize('arch', ['llama', 'gpt2'])
def test_more_tokens_than_block_size_are_refused(arch):
    model = make(arch=arch)
    with pytest.raises(ValueError, match='25.*block_size=24'):
        model(tokens(1, 25))


def test_dropout_acts_in_training_only():
    model, without, idx = make(dropout=0.2), make(), tokens(2, 24)
    assert torch.equal(model.eval()(idx)[0], without(idx)[0])
    model.train()
    torch.manual_seed(0)
    first = model(idx)[0]
    assert not torch.equal(first, model(idx)[0])
    torch.manual_seed(0)
    assert torch.equal(first, model(idx)[0])


# --------------------------------------------------------------------------------------------------------------------
# initial weights


@pytest.mark.parametrize('arch', ['llama', 'gpt2'])
def test_initial_weights_follow_the_table(arch):
    model = GPT(GPTConfig(block_size=256, vocab_size=512, n_layer=8, n_head=4, n_embd=64, arch=arch))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            start = torch.zeros_like(p) if name.endswith('bias') else torch.ones_like(p)
            assert torch.equal(p, start), f'{name} starts at {p[:3].tolist()}'
        else:
            std = 0.02 / math.sqrt(2 * 8) if arch == 'gpt2' and name.endswith('c_proj.weight') else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name


@pytest.mark.parametrize('arch', ['llama', 'gpt2'])
def test_initial_weights_are_those_of_the_seed_whatever_the_global_one(arch):
    config = GPTConfig(**SIZE, arch=arch)
    torch.manual_seed(1)
    first = GPT(config, seed=5)
    torch.manual_seed(2)
    again, other = GPT(config, seed=5), GPT(config, seed=6)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() == 1 or not torch.isclose(a, c).float().mean() > 0.01, name


# --------------------------------------------------------------------------------------------------------------------
# loss


def plain_loss(model, idx, targets):
    return F.cross_entropy(model(idx)[0].flatten(0, 1).double(), targets.flatten(), ignore_index=-1)


def backward(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize('chunk', [7, 1, 46, 1000])  # 46 rows: six chunks and a ragged one, ...
@pytest.mark.parametrize('tie_embeddings', [False, True])
def test_chunked_loss_and_gradients_equal_cross_entropy(dtype, tolerance, chunk, tie_embeddings, monkeypatch):
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', chunk)
    model, idx, targets = make(tie_embeddings=tie_embeddings).to(dtype), tokens(2, 23), targets_of(2, 23)
    expected = plain_loss(model, idx, targets)
    logits, loss = model(idx, targets)
    assert logits is None and loss.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    assert relative_error(backward(model, loss), backward(model, expected)) < tolerance
    with torch.no_grad():
        assert model(idx, targets)[1].item() == loss.item()


@pytest.mark.parametrize('dtype, tolerance', [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
def test_chunked_loss_and_gradients_equal_cross_entropy_under_autocast(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 7)
    model, idx, targets = make(), tokens(2, 23), targets_of(2, 23)
    with torch.autocast('cpu', dtype=dtype):
        expected, (_, loss) = plain_loss(model, idx, targets), model(idx, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    assert relative_error(backward(model, loss), backward(model, expected)) < tolerance
    assert relative_error(backward(model, loss := model(idx, targets)[1]),
                          backward(model, plain_loss(model, idx, targets))) < 1e-5  # and without, again


def test_fp16_gradients_survive_a_huge_loss_scale(monkeypatch):
    """With the scaler's factor past FP16's largest number, 65,504."""
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 1000)
    model, idx, targets = GPT(GPTConfig(**SIZE)), tokens(128, 24), targets_of(128, 24)
    expected = backward(model, model(idx, targets)[1])
    with torch.autocast('cpu', dtype=torch.float16):
        loss = model(idx, targets)[1]
    scaled = backward(model, loss * 2.0 ** 20)
    assert scaled.isfinite().all()
    assert relative_error(scaled / 2 ** 20, expected) < 1e-2


def test_fp16_loss_gradients_do_not_overflow_in_the_sum_over_rows():
    """4,096 rows that all push the same row of lm_head, whose gradient is about 4,096 * 30 before the loss scale."""
    generator = torch.Generator().manual_seed(0)
    x = (30 + torch.randn(4096, 8, generator=generator)).requires_grad_()
    weight = (0.02 * torch.randn(64, 8, generator=generator)).requires_grad_()
    targets = torch.full((4096,), 5)
    with torch.autocast('cpu', dtype=torch.float16):
        total = model_py.LinearCrossEntropy.apply(x, weight, targets, True)
    ours = torch.autograd.grad(total * 2.0 ** 20, (x, weight))
    theirs = torch.autograd.grad(F.cross_entropy(x @ weight.T, targets, reduction='sum'), (x, weight))
    for grad, expected in zip(ours, theirs, strict=True):
        assert relative_error(grad / 2 ** 20, expected) < 1e-2  # false for nan


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel] + [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)])
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
    assert seen.numel == 2003 * 32  # lm_head's weight and gradient; the logits would be three times that
    with LargestTensor() as seen:
        model(idx, last_only=True)
    assert seen.numel <= 2003 * 32


# --------------------------------------------------------------------------------------------------------------------
# generation


def test_greedy_generation_equals_an_argmax_loop_and_slides_past_block_size():
    model, idx = make(), tokens(2, 20)
    expected = idx
    for _ in range(10):
        new = model(expected[:, -24:])[0][:, -1].argmax(dim=-1, keepdim=True)
        expected = torch.cat((expected, new), dim=1)
    assert torch.equal(model.generate(idx, 10, temperature=0, use_cache=False), expected)
    assert torch.equal(model.generate(idx, 10, top_k=1, use_cache=False), expected)
    assert torch.equal(model.generate(idx, 4, temperature=0), expected[:, :24])
    with pytest.raises(ValueError, match='max_len=30 is more than block_size=24'):
        model.generate(idx, 10)
    longer = torch.cat((tokens(2, 9, seed=3), idx), dim=1)  # starts longer than block_size
    assert torch.equal(model.generate(longer, 1, temperature=0, use_cache=False)[:, -1:],
                       model(longer[:, -24:])[0][:, -1].argmax(dim=-1, keepdim=True))


def test_sampling_is_reproducible_and_keeps_the_prompt():
    model, idx = make(), tokens(2, 5)
    first, again, other = (model.generate(idx, 12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first.shape == (2, 17) and torch.equal(first[:, :5], idx)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_samples_follow_temperature_and_top_k():
    model, idx = make(), tokens(1, 5).expand(4000, 5)
    generator = torch.Generator().manual_seed(0)
    logits = model(idx[:1])[0][0, -1]
    for options, expected in (
            ({}, logits), (dict(temperature=0.5), logits / 0.5), (dict(top_k=500), logits),
            (dict(temperature=2.0, top_k=3), (logits / 2).where(logits >= logits.topk(3).values[-1], -torch.inf))):
        new = model.generate(idx, 1, generator=generator, **options)[:, -1]
        counts, expected = new.bincount(minlength=61), F.softmax(expected, dim=-1)
        assert counts[expected == 0].sum() == 0
        assert (counts / 4000 - expected).abs().max() < 0.04  # 5 standard deviations


# --------------------------------------------------------------------------------------------------------------------
# counts


@pytest.mark.parametrize('millions, settings', [
    (2, dict(n_layer=4, n_head=2, n_embd=16)), (82, {}), (180, dict(n_layer=12, n_head=12, n_embd=768)),
    (468, dict(n_layer=24, n_head=16, n_embd=1024)), (78, dict(arch='gpt2'))])
def test_sizes_are_those_of_the_paper(millions, settings):
    """Table 4, FFN widths by default; Fig. 12d's GPT-2 has 8 layers, width 512."""
    with torch.device('meta'):
        model = GPT(GPTConfig(**settings))
    assert round(model.num_params(non_embedding=False) / 1e6) == millions
    c, outside = model.config, 2 + (model.config.arch == 'gpt2') * 2048 / 50304
    assert model.num_params(non_embedding=False) - model.num_params() == outside * c.vocab_size * c.n_embd


def test_num_params_counts_a_tied_embedding_once_and_borrowers_have_fewer():
    tied, vanilla, svformer = make(tie_embeddings=True), make(), make(share_v=True)
    assert vanilla.num_params(False) - tied.num_params(False) == 61 * 32
    assert vanilla.num_params() == tied.num_params()
    assert vanilla.num_params() - svformer.num_params() == 2 * 32 * 32


@pytest.mark.parametrize('settings', [
    {}, dict(n_kv_head=2), dict(arch='gpt2'), dict(tie_embeddings=True), dict(v_residual=True), dict(share_v=True),
    dict(share_k=True, share_k_every=2, share_v=True, share_v_every=2), dict(neutreno=0.4, denseformer=True),
    dict(v_residual=True, residual_map='identity', residual_from='all'), dict(v_residual=True, residual_map='cross'),
    dict(v_residual=True, residual_map='cross', residual_from='all', residual_layers=(2,))], ids=str)
def test_flops_per_token_are_those_that_torch_counts(settings, monkeypatch):
    """torch counts the matmuls of one forward and backward pass, here with attention as two plain matmuls (the fused
    backward computes one of them twice). It counts more only where residual_map is 'cross': with P layers' keys there
    are P * T of them per query, and the unmasked trick of attend_cross has P * T queries too where T would do."""
    def attend(q, k, v, dropout=0.0, mask=None):
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
        scores = (q @ k.transpose(2, 3) / math.sqrt(q.size(3))).masked_fill(
            torch.ones(q.size(2), q.size(2), dtype=torch.bool).triu(1), -torch.inf)
        return F.softmax(scores, dim=-1) @ v

    model, idx, targets = make(**settings), tokens(2, 20), targets_of(2, 20)
    expected = model(idx, targets)[1]
    monkeypatch.setattr(model_py, 'attend', attend)
    monkeypatch.setattr(model_py, 'LOSS_CHUNK', 11)
    with FlopCounterMode(display=False) as counter:
        loss = model(idx, targets)[1]
        loss.backward()
    torch.testing.assert_close(loss, expected)

    extra = 0
    if settings.get('residual_map') == 'cross':
        layers = [1 + (n if settings.get('residual_from') == 'all' else 1) for n in
                  settings.get('residual_layers', (1, 2))]
        extra = sum(3 * 4 * (P * P - P) * 20 * 32 for P in layers)
    assert counter.get_total_flops() == 40 * (model.flops_per_token(20) + extra)
