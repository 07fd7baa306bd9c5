"""What a fork of model.py relies on: a source, weights of a mixture, another kind of source."""

import json
from dataclasses import asdict, dataclass

import pytest
import reference
import torch
import variants
from torch import nn
from variants import RES, SIZE, SV2, VARIANTS, config_of, tokens

import model as model_py
from model import GPT, GPTConfig, Mixing
from rundir import load_weights

B, T = 2, 11


def logits_in_chunks(model, idx):
    cache = model.new_cache(B, T)
    return torch.cat([model(chunk, cache=cache)[0] for chunk in idx.split((5, 1, 5), dim=1)], dim=1)


# --- another source ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'settings',
    [
        RES,
        dict(RES, residual_learned=True),
        dict(RES, residual_map='identity', residual_layers=(3,)),
        dict(RES, residual_map='cross'),
        dict(RES, **SV2),
        dict(q_residual=True, k_residual=True, residual_lambda=(0.4, 0.7)),
    ],
    ids=str,
)
def test_a_source_is_one_line_in_sources_and_one_in_the_reference(opposite, settings):
    config = GPTConfig(**{**SIZE, **settings, 'n_layer': 5, 'residual_from': 'opposite'})
    model = reference.perturb(GPT(config))
    idx = tokens(B, T)
    weights = {key: p.detach().double() for key, p in model.named_parameters()}
    expected = reference.logits(config, weights, idx)
    torch.testing.assert_close(model(idx)[0].double(), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(logits_in_chunks(model, idx).double(), expected, atol=2e-4, rtol=0)

    learned = [name for name in weights if name.endswith('residual_lambda')]
    if config.residual_learned:
        assert learned == [f'transformer.h.{n}.attn.residual_lambda' for n in (3, 4)]
    model(idx, idx)[1].backward()
    assert all(p.grad.count_nonzero() for p in model.parameters())


def test_a_value_without_a_variant_is_told_where_to_add_one(opposite):
    (todo,) = [line for line in variants.uncovered() if 'opposite' in line]
    assert todo.startswith("no variant has residual_from='opposite': add one to VARIANTS")
    assert 'tests/variants.py' in todo and 'tests/reference.py' in todo


def test_a_field_without_a_variant_is_told_where_to_add_one(monkeypatch):
    @dataclass
    class Fork(GPTConfig):
        my_number: float = 0.5
        my_switch: bool = False

    monkeypatch.setattr(variants, 'GPTConfig', Fork)
    number, switch = [line for line in variants.uncovered() if 'my_' in line]
    assert number.startswith('every variant has my_number=0.5: add one with another value')
    assert switch.startswith('no variant has my_switch=True: add one to VARIANTS')


def test_a_tuple_of_a_fork_survives_json():
    """Else a run's config.json would be another model than the run."""

    @dataclass
    class Fork(GPTConfig):
        my_layers: tuple = ()

    config = Fork(my_layers=(1, 2))
    assert Fork(**json.loads(json.dumps(asdict(config)))) == config
    assert Fork(**json.loads(json.dumps(asdict(Fork())))).variant() == {}


def test_a_field_that_accepts_any_word_is_told_how_to_refuse(monkeypatch):
    @dataclass
    class Fork(GPTConfig):
        my_word: str = 'a'

    monkeypatch.setattr(variants, 'GPTConfig', Fork)
    with pytest.raises(AssertionError, match=r"call check_choice\(config, 'my_word'"):
        variants.uncovered()


# --- other weights of the mixture ----------------------------------------------------------------


class Gate(Mixing):
    """Weights from x, a gate per channel; at first those of ResFormer."""

    def __init__(self, config, n_sources, heads):
        super().__init__(config, n_sources, heads)
        self.head_size = config.head_size
        self.gate = nn.Linear(config.n_embd, heads * config.head_size)
        nn.init.zeros_(self.gate.weight)
        nn.init.ones_(self.gate.bias)

    def weights(self, x, learned):
        gate = (self.gate(x) - 1).sigmoid().unflatten(2, (-1, self.head_size)).transpose(1, 2)
        return [1 - gate, gate]


@pytest.fixture
def gated(monkeypatch):
    """A ResFormer with that gate."""
    monkeypatch.setattr(model_py, 'Mixing', Gate)
    return GPT(GPTConfig(**SIZE, **RES, n_kv_head=2))


def test_a_mixing_module_keeps_its_own_initial_values_and_starts_neutral(gated, monkeypatch):
    for n in (1, 2):
        gate = gated.get_submodule(f'transformer.h.{n}.attn.mixing.v.gate')
        assert not gate.weight.any() and (gate.bias == 1).all()
    monkeypatch.undo()
    resformer = GPT(GPTConfig(**SIZE, **RES, n_kv_head=2))
    idx = tokens(B, T)
    torch.testing.assert_close(gated(idx)[0], resformer(idx)[0])


@pytest.mark.parametrize('part', 'qkv')
@pytest.mark.parametrize('kv_heads', [1, 2])
def test_a_mixing_module_knows_the_heads_of_its_part(part, kv_heads, monkeypatch):
    monkeypatch.setattr(model_py, 'Mixing', Gate)
    config = GPTConfig(**SIZE, n_kv_head=kv_heads, **{f'{part}_residual': True})
    gated = GPT(config)
    gate = gated.get_submodule(f'transformer.h.1.attn.mixing.{part}.gate')
    assert gate.out_features == reference.heads(config, part) * config.head_size
    gated(tokens(B, T))


def test_a_mixing_module_trains_compiles_and_decodes(gated):
    idx = tokens(B, T)
    gated(idx, idx)[1].backward()
    assert all(p.grad.count_nonzero() for p in gated.parameters())
    reference.perturb(gated)
    expected = gated(idx)[0]
    torch.testing.assert_close(logits_in_chunks(gated, idx), expected, atol=1e-4, rtol=0)
    torch._dynamo.reset()
    compiled = torch.compile(gated, fullgraph=True, backend='eager')
    torch.testing.assert_close(compiled(idx)[0], expected, atol=1e-4, rtol=0)


def test_a_checkpoint_may_lack_a_mixing_modules_weights(gated, monkeypatch):
    monkeypatch.undo()
    vanilla = GPT(GPTConfig(**SIZE, n_kv_head=2), seed=5)
    checkpoint = {
        'path': 'out/vanilla/ckpt.pt',
        'model': vanilla.state_dict(),
        'model_config': {**SIZE, 'n_kv_head': 2},
    }
    load_weights(gated, checkpoint)
    assert torch.equal(gated.lm_head.weight, vanilla.lm_head.weight)
    assert (gated.transformer.h[2].attn.mixing['v'].gate.bias == 1).all()

    # What is no mixture may not be missing.
    del checkpoint['model']['lm_head.weight']
    message = (
        r'vanilla/ckpt.pt does not fit this model: lm_head.weight \(.*MAY_BE_MISSING in model.py\)$'
    )
    with pytest.raises(ValueError, match=message):
        load_weights(gated, checkpoint)


def test_the_log_gets_the_learned_weights_and_no_matrix_of_a_fork(gated):
    assert gated.mixing_weights() == {}
    learned = GPT(config_of('learned sparse')).mixing_weights()
    assert learned == {'transformer.h.1.attn.residual_lambda': [0.5, 0.5]}
    averages = GPT(config_of('DenseFormer')).mixing_weights()
    assert list(averages) == [f'transformer.dwa.{n}' for n in range(3)]
    assert averages['transformer.dwa.1'] == [0.0, 0.0, 1.0]


# --- initial values of a fork's module -----------------------------------------------------------


@pytest.mark.parametrize('keep_init', [True, False])
def test_a_module_keeps_its_initial_values_where_it_says_so(keep_init):
    model = GPT(GPTConfig(**SIZE))
    model.idea = nn.Sequential(nn.Linear(4, 4))
    model.idea.keep_init = keep_init
    nn.init.zeros_(model.idea[0].weight)
    nn.init.ones_(model.idea[0].bias)
    model.init_weights(seed=1)
    assert model.idea[0].weight.any() == (not keep_init)
    assert model.idea[0].bias.any() == keep_init


# --- what is kept, and how long ------------------------------------------------------------------


def kept_after_each_block(model, insert=None):
    """([keys of raw after block n], [keys of attended after block n]) of one forward pass.

    insert: what to put into raw at the start.
    """
    raw, attended = [], []

    def before(block, args):
        args[2].update(insert or {})

    def after(block, args, output):
        raw.append(set(args[2]))
        attended.append(set(args[3]))

    model.transformer.h[0].register_forward_pre_hook(before)
    for block in model.transformer.h:
        block.register_forward_hook(after)
    model(tokens(B, T))
    return raw, attended


@pytest.mark.parametrize('name', VARIANTS)
def test_a_tensor_is_dropped_after_its_last_reader(name):
    config = config_of(name)
    raw, attended = kept_after_each_block(GPT(config))
    for n in range(config.n_layer):
        assert raw[n] == raw_read_later(config, n)
        assert attended[n] == attended_read_later(config, n)
    assert raw[-1] == attended[-1] == set()


def raw_read_later(c, n):
    """Keys of the raw tensors of layers 0 to n that layers after n read."""
    keys = set()
    for later in range(n + 1, c.n_layer):
        for part in 'qkv':
            if getattr(c, f'{part}_residual') and reference.owner(c, part, later) == later:
                sources = reference.sources_of(c, later)
                keys.update((part, reference.owner(c, part, s)) for s in sources)
        if c.neutreno:
            keys.add(('v', 0))
    # A source that is no layer is there from the start.
    return {(part, source) for part, source in keys if not isinstance(source, int) or source <= n}


def attended_read_later(c, n):
    """Keys of the attended tensors of layers 0 to n that layers after n read."""
    keys = set()
    for later in range(n + 1, c.n_layer):
        keys.add(('q', reference.owner(c, 'q', later)))
        layers = [later]
        if c.residual_map == 'cross' and reference.owner(c, 'v', later) == later:
            layers += reference.sources_of(c, later)
        for layer in layers:
            keys.update((part, reference.owner(c, part, layer)) for part in 'kv')
    return {(part, layer) for part, layer in keys if layer <= n}


def test_a_source_that_is_no_layer_is_mixed_in_and_dropped_after_its_last_reader(monkeypatch):
    monkeypatch.setitem(model_py.SOURCES, 'table', lambda n, L: ['table'])
    config = GPTConfig(**SIZE, **RES, residual_from='table', residual_layers=(1,))
    model = GPT(config)
    assert model.transformer.h[1].attn.wiring.sources['v'] == [('v', 'table')]
    vanilla_logits = GPT(GPTConfig(**SIZE))(tokens(B, T))[0]

    table = torch.ones(B, config.n_head, T, config.head_size)
    logits = []
    model.register_forward_hook(lambda module, args, out: logits.append(out[0]))
    raw, _ = kept_after_each_block(model, insert={('v', 'table'): table})
    assert raw == [{('v', 'table')}, set(), set()]
    assert not torch.allclose(logits[0], vanilla_logits, atol=1e-3)


# --- random values of a fork's own ----------------------------------------------------------------


class LowRankGate(Mixing):
    """One factor is zero, so that it starts neutral; the other is random, or it could not learn."""

    def __init__(self, config, n_sources, heads):
        super().__init__(config, n_sources, heads)
        self.down = nn.Linear(config.n_embd, 2, bias=False)
        self.up = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.up.weight)


def test_random_values_of_a_mixing_follow_from_the_seed_alone(monkeypatch):
    monkeypatch.setattr(model_py, 'Mixing', LowRankGate)
    config = GPTConfig(**{**SIZE, **RES})
    name = 'transformer.h.1.attn.mixing.v.down.weight'
    torch.manual_seed(5)
    one = GPT(config, seed=1).state_dict()[name]
    after = torch.rand(3)
    again = GPT(config, seed=1).state_dict()[name]
    other = GPT(config, seed=2).state_dict()[name]
    assert torch.equal(one, again)
    assert not torch.equal(one, other)

    # Nobody else's random numbers are touched.
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), after)
