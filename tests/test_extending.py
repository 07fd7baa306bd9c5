"""What a fork of model.py relies on: the source that the README adds, and the list of variants."""

import re
from dataclasses import dataclass

import pytest
import reference
import torch
import variants
from conftest import ROOT
from programs import import_file
from variants import SIZE, SV2, in_chunks, tokens

from model import SOURCES, GPTConfig

B, T = 2, 11


@pytest.fixture
def patched(tmp_path):
    """A copy of model.py with the line of the README's patch, below the line that is above it there."""
    (patch,) = re.findall(r'```diff\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)
    above, added = re.search(r'^ (.*\n)\+(.*\n)', patch, re.M).groups()
    source = (ROOT / 'model.py').read_text()
    assert source.count(above) == 1
    (tmp_path / 'model.py').write_text(source.replace(above, above + added))
    return import_file(tmp_path / 'model.py')


@pytest.mark.parametrize(
    'settings',
    [
        dict(v_residual='mirror', residual_weights='learned'),
        dict(v_residual='mirror', residual_map='cross'),
        dict(SV2, v_residual='mirror'),
        dict(q_residual='mirror', k_residual='mirror', residual_lambda=(0.4, 0.7)),
    ],
    ids=str,
)
def test_the_source_of_the_readme_is_one_line(settings, patched, monkeypatch):
    mirror = lambda n, L: [L - 1 - n] if n >= L / 2 else []  # noqa: E731
    monkeypatch.setitem(reference.SOURCES, 'mirror', mirror)
    model = patched.GPT(patched.GPTConfig(**{**SIZE, 'n_layer': 5, **settings}))
    reference.perturb(model)
    idx = tokens(B, T)
    weights = {key: p.detach().double() for key, p in model.named_parameters()}
    expected = reference.logits(model.config, weights, idx)
    logits = model(idx)[0]
    torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-4)
    decoded = in_chunks(model, idx, (5, 1, 5), model.new_cache(B, T))
    torch.testing.assert_close(decoded, logits, atol=1e-4, rtol=1e-4)
    model(idx, idx)[1].backward()
    assert all(p.grad.count_nonzero() for p in model.parameters())


def test_a_setting_without_a_variant_is_told_where_to_add_one(monkeypatch):
    before = variants.uncovered()
    monkeypatch.setitem(SOURCES, 'opposite', lambda n, L: [0])

    @dataclass
    class Fork(GPTConfig):
        my_number: float = 0.5
        my_switch: bool = False

    monkeypatch.setattr(variants, 'GPTConfig', Fork)
    added = [line for line in variants.uncovered() if line not in before]
    source, *of_q_and_k, number, switch = added
    assert "v_residual='opposite'" in source and len(of_q_and_k) == 2
    assert 'my_number=0.5' in number and 'my_switch=True' in switch
    assert 'tests/variants.py' in source and 'tests/reference.py' in source
