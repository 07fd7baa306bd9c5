"""What a fork of model.py relies on: the source that the README adds, and the list of variants."""

import re
import subprocess
from dataclasses import dataclass

import pytest
import reference
import torch
import variants
from conftest import ROOT
from programs import import_file
from variants import SIZE, SV2, in_chunks, tokens

from model import GPTConfig

B, T = 2, 11


@pytest.fixture
def patched(tmp_path):
    """A copy of model.py with the README's patch."""
    (tmp_path / 'model.py').write_text((ROOT / 'model.py').read_text())
    (patch,) = re.findall(r'```diff\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)
    subprocess.run(['git', 'apply'], cwd=tmp_path, input=patch, text=True, check=True)
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
    monkeypatch.setitem(reference.SOURCES, 'mirror', patched.SOURCES['mirror'])
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


def test_a_setting_without_a_variant_is_told_where_to_add_one(opposite, monkeypatch):
    @dataclass
    class Fork(GPTConfig):
        my_number: float = 0.5
        my_switch: bool = False

    monkeypatch.setattr(variants, 'GPTConfig', Fork)
    source, *of_q_and_k, number, switch = variants.uncovered()
    assert "v_residual='opposite'" in source and len(of_q_and_k) == 2
    assert 'my_number=0.5' in number and 'my_switch=True' in switch
    assert 'tests/variants.py' in source and 'tests/reference.py' in source
