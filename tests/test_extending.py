"""What a fork of model.py relies on: a source, weights, an idea after attention, parameters of its own."""

import importlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest
import reference
import torch
import variants
from conftest import ROOT
from programs import import_file
from test_family import by_torch, step
from torch import nn
from variants import RES, SIZE, tokens

import model as model_py
from lib.rundir import load_weights
from model import GPT, GPTConfig, make, normal
from train import TrainConfig, make_optimizer

B, T = 2, 11


def decoded(model, idx):
    cache = model.new_cache(B, T)
    return torch.cat([model(chunk, cache=cache)[0] for chunk in idx.split((5, 1, 5), dim=1)], dim=1)


# --- three ideas, each a patch of model.py ---------------------------------------------------------


@pytest.fixture
def patched(tmp_path, request):
    """A copy of model.py with a patch of tests/patches."""
    (tmp_path / 'model.py').write_text((ROOT / 'model.py').read_text())
    patch = ROOT / f'tests/patches/{request.param}.patch'
    done = subprocess.run(['git', 'apply', patch], cwd=tmp_path, capture_output=True, text=True)
    assert not done.returncode, f'renew {patch}, for it no longer applies: {done.stderr}'
    return import_file(tmp_path / 'model.py')


def trained_and_decoded(patched, **settings):
    """A model of a patch, after the checks that hold for each of them."""
    model = patched.GPT(patched.GPTConfig(**{**SIZE, 'n_layer': 5, **settings}))
    idx = tokens(B, T)
    # Twice: in a product that starts neutral, one factor waits for the other's first step.
    for _ in range(2):
        model.zero_grad()
        model(idx, idx)[1].backward()
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
    assert all(p.grad.count_nonzero() for p in model.parameters())
    torch.testing.assert_close(decoded(model, idx), model(idx)[0], atol=1e-4, rtol=1e-4)
    return model


@pytest.mark.parametrize('patched', ['source'], indirect=True)
@pytest.mark.parametrize(
    'settings',
    [
        dict(RES, residual_learned=True),
        dict(RES, residual_map='cross'),
        dict(RES, **variants.SV2),
        dict(q_residual=True, k_residual=True, residual_lambda=(0.4, 0.7)),
    ],
    ids=str,
)
def test_a_source_is_one_line(patched, settings, monkeypatch):
    monkeypatch.setitem(reference.SOURCES, 'mirror', patched.SOURCES['mirror'])
    model = trained_and_decoded(patched, **settings, residual_from='mirror')
    weights = {key: p.detach().double() for key, p in model.named_parameters()}
    expected = reference.logits(model.config, weights, tokens(B, T))
    torch.testing.assert_close(model(tokens(B, T))[0].double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize('patched', ['heads'], indirect=True)
@pytest.mark.parametrize('more', [{}, dict(residual_from='all')], ids=str)
def test_weights_per_head_start_neutral_and_are_refused_where_they_weigh_nothing(patched, more):
    idx = tokens(B, T)
    plain, weighed = (
        patched.GPT(patched.GPTConfig(**SIZE, **RES, **more, residual_heads=heads))
        for heads in (False, True)
    )
    assert torch.equal(plain(idx)[0], weighed(idx)[0])
    trained_and_decoded(patched, **RES, **more, n_kv_head=2, residual_heads=True)
    with torch.autocast('cpu', dtype=torch.float16):
        weighed(idx, idx)[1].backward()
    for settings, name in (({}, 'v_residual'), (dict(RES, residual_map='cross'), 'residual_map')):
        with pytest.raises(ValueError, match=f'residual_heads.*{name}'):
            patched.GPTConfig(**SIZE, **settings, residual_heads=True)


@pytest.mark.parametrize('patched', ['centered'], indirect=True)
def test_an_idea_after_attention(patched):
    model = trained_and_decoded(patched, centered=True, n_kv_head=2)
    seen = {}
    attention = model.transformer.h[2].attn
    attention.c_proj.register_forward_pre_hook(lambda module, args: seen.update(y=args[0]))
    model(tokens(B, T))
    assert seen['y'].view(B, T, 4, 8).mean(dim=2).abs().max() < 1e-5


# --- four ideas of the family, as a fork would have tried them before they were here ------------------

BEFORE = '4e5ae60'  # the last commit without them
# {patch: (most lines that it adds or removes, its settings, what they are called today)}
IDEAS = {
    'half_heads': (15, dict(share_v_heads=2), dict(share_v=True, share_v_heads=2)),
    'gated_tables': (
        12,
        dict(RES, residual_from='token', residual_layers=(0, 2)),
        dict(
            residual_gate='head',
            residual_gate_inputs=12,
            residual_lambda=(3.0, 1.0),
        ),
    ),
    'x0_exclusive': (8, dict(x0_residual=True, exclusive=True, norm_eps=1e-7), {}),
    'muon': (40, {}, {}),
}


@pytest.fixture
def forked(tmp_path, monkeypatch, request):
    """(the modules model and train of that commit with a patch of tests/patches_family, the patch)."""
    patch = ROOT / f'tests/patches_family/{request.param}.patch'
    words = [
        'git',
        'archive',
        '--output',
        tmp_path / 'tree.tar',
        BEFORE,
        'lib',
        'model.py',
        'train.py',
    ]
    done = subprocess.run([*words, 'configurator.py'], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f'this clone has no commit {BEFORE}: {done.stderr}')
    shutil.unpack_archive(tmp_path / 'tree.tar', tmp_path)
    subprocess.run(['git', 'apply', patch], cwd=tmp_path, check=True)
    ours = {'lib', 'model', 'train', 'configurator'}
    for name in [name for name in sys.modules if name.partition('.')[0] in ours]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module('model'), importlib.import_module('train'), patch.read_text()
    for name in [name for name in sys.modules if name.partition('.')[0] in ours]:
        del sys.modules[name]


def documented(weights):
    """The weights of a patched model under today's names."""
    result = {}
    for name, weight in weights.items():
        if name == 'x0':
            result |= {f'transformer.x0.{n}': pair for n, pair in enumerate(weight)}
        result[re.sub(r'h\.(\d)\.attn\.ve', r've.\1', name)] = weight
    return result


@pytest.mark.parametrize('forked, idea', [(name, name) for name in IDEAS], indirect=['forked'])
def test_an_idea_of_the_family_took_few_lines_trains_and_is_the_reference(forked, idea):
    model_of_fork, train, patch = forked
    most, settings, today = IDEAS[idea]
    changed = re.findall(r'^(?:\+(?!\+\+ )|-(?!-- ))', patch, re.M)
    assert len(changed) <= most

    model = trained_and_decoded(model_of_fork, **settings)
    weights = {key: p.detach().double() for key, p in model.named_parameters()}
    config = GPTConfig(**{**SIZE, 'n_layer': 5, **settings, **today})
    expected = reference.logits(config, documented(weights), tokens(B, T))
    torch.testing.assert_close(model(tokens(B, T))[0].double(), expected, atol=2e-4, rtol=1e-4)

    model = model_of_fork.GPT(model_of_fork.GPTConfig(**{**SIZE, **settings}))
    optimizers = {'optimizer': 'muon'} if idea == 'muon' else {}
    optimizer = train.make_optimizer(model, train.TrainConfig(learning_rate=1e-2, **optimizers))
    losses = []
    for _ in range(8):
        loss = model(tokens(B, T), tokens(B, T, seed=1))[1]
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize('forked', ['muon'], indirect=True)
def test_muon_as_a_fork_is_torchs_for_each_block_of_rows_and_can_be_resumed(forked):
    """Its blocks: q, k and v of c_attn, and other matrices whole."""
    model_of_fork, train, _ = forked
    settings = train.TrainConfig(optimizer='muon', learning_rate=0.02, weight_decay=0.3)
    config = model_of_fork.GPTConfig(**SIZE)
    model, again = model_of_fork.GPT(config), model_of_fork.GPT(config)
    optimizer, resumed = (train.make_optimizer(each, settings) for each in (model, again))
    matrices = {n: p for n, p in model.named_parameters() if '.h.' in n and p.dim() == 2}
    theirs = by_torch(
        model, {n: [32] * 3 if 'c_attn' in n else [len(p)] for n, p in matrices.items()}
    )
    for _ in range(3):
        expected = theirs(step(model, optimizer))
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, expected[name], msg=name)

    again.load_state_dict(model.state_dict())
    checkpoint = {'path': 'x', 'optimizer': optimizer.state_dict(), 'scaler': {}}
    sys.modules['lib.rundir'].load_state(resumed, None, checkpoint)
    step(model, optimizer)
    step(again, resumed)
    for name, p in model.named_parameters():
        assert torch.equal(p, again.get_parameter(name)), name


# --- the list of variants says what is missing -----------------------------------------------------


def test_a_setting_without_a_variant_is_told_where_to_add_one(opposite, monkeypatch):
    @dataclass
    class Fork(GPTConfig):
        my_number: float = 0.5
        my_switch: bool = False

    monkeypatch.setattr(variants, 'GPTConfig', Fork)
    source, number, switch = variants.uncovered()
    assert "residual_from='opposite'" in source
    assert 'my_number=0.5' in number and 'my_switch=True' in switch
    assert 'tests/variants.py' in source and 'tests/reference.py' in source


# --- parameters of a fork ------------------------------------------------------------------------


def test_a_parameter_gets_what_it_needs(monkeypatch):
    """A matrix of its own in each MLP, which no checkpoint may lack."""
    vanilla = GPT(GPTConfig(**SIZE))

    class MLP(model_py.MLP):
        def __init__(self, config):
            super().__init__(config)
            needs = dict(draw=normal(0.5), rate='grad_clip', decay=False)
            self.idea = make(nn.Linear, 64, 64, True, **needs)

    monkeypatch.setattr(model_py, 'MLP', MLP)
    fork = GPT(GPTConfig(**SIZE), seed=5)
    ideas = [block.mlp.idea for block in fork.transformer.h]
    for idea in ideas:
        assert idea.weight.std().item() == pytest.approx(0.5, rel=0.1)
        assert not idea.bias.any()
    assert not torch.equal(ideas[0].weight, ideas[1].weight)

    settings = TrainConfig(learning_rate=1e-2, grad_clip=3.0)
    optimizer = make_optimizer(fork, settings)
    groups = {id(p): group for group in optimizer.param_groups for p in group['params']}
    assert len(groups) == len(list(fork.parameters()))
    for name, p in fork.named_parameters():
        group = groups[id(p)]
        assert group['rate'] == (3.0 if 'idea' in name else 1.0)
        if 'idea' in name:
            assert group['weight_decay'] == 0.0

    checkpoint = {'path': 'old.pt', 'model': vanilla.state_dict(), 'model_config': SIZE}
    with pytest.raises(ValueError, match='old.pt.*mlp.idea'):
        load_weights(fork, checkpoint)
