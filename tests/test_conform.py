"""hub/conform.py: our own model passes, and each mistake in it is found and named."""

import importlib.util
import subprocess

import numpy as np
import pytest
from conftest import ROOT
from ports import Ours

from hub import conform

CASES = conform.read_fixture()
PATCHES = sorted(path.stem for path in (ROOT / 'tests/patches').glob('mistake_*.patch'))
# What the kit says of the mistakes that it finds by a rule, and where these are.
LEARNED = ('resformer-learned', 'key-residual', 'first-token')
RULES = {
    'cached': ('unlike the same model without its cache', ('vanilla', 'resformer-cross')),
    'needless_cache': ('a cache where none is needed', ('svformer', 'owner-map', 'half-heads')),
    'unread': ('nothing reads', LEARNED),
    'no_gradient': ('no gradient', LEARNED),
}


def patched(name, folder):
    """A port made of a copy of model.py with a patch of tests/patches."""
    (folder / 'model.py').write_text((ROOT / 'model.py').read_text())
    patch = ROOT / f'tests/patches/{name}.patch'
    done = subprocess.run(['git', 'apply', patch], cwd=folder, capture_output=True, text=True)
    assert not done.returncode, f'renew {patch}, for it no longer applies: {done.stderr}'
    spec = importlib.util.spec_from_file_location('patched_model', folder / 'model.py')
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return type('Patched', (Ours,), {'module': changed})


def check(port, variant, capsys, level='model'):
    """How many checks fail, and what the kit says."""
    failures = conform.check_port(
        conform.OBSERVE[level], port, variant, CASES[level][variant]
    )
    return failures, capsys.readouterr().out


@pytest.mark.parametrize('variant', CASES['model'])
def test_our_model_passes_every_check(variant, capsys):
    failures, said = check(Ours, variant, capsys)
    assert failures == 0 and 'not checked' not in said, said


@pytest.mark.parametrize('name', PATCHES)
def test_each_mistake_is_named(name, tmp_path, capsys):
    port = patched(name, tmp_path)
    mistake = name.removeprefix('mistake_')
    if mistake in RULES:
        words, variants = RULES[mistake]
    else:
        mistake = mistake.replace('_', ' ')
        words = conform.MISTAKES[mistake]
        variants = [v for v, case in CASES['model'].items() if mistake in case.mistakes]
    assert variants
    for variant in variants:
        failures, said = check(port, variant, capsys)
        assert failures and words in said and 'unknown' not in said, said
