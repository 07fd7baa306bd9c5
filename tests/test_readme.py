"""The README's promises: its patches apply, its configs and flags exist, its numbers are true."""

import re
import shutil
import subprocess

import pytest
import torch
from conftest import ROOT, write_dataset
from runs import TINY, TRAIN, VALIDATION, finish, start

from configurator import configure
from model import GPT, GPTConfig
from train import TrainConfig

README = (ROOT / 'README.md').read_text()
PATCHES = re.findall(r'```diff\n(.*?)```', README, re.S)

# What a reader would try after both patches, in one process.
TRIAL = """
import torch
from model import GPT, GPTConfig, wire

shape = dict(n_layer=6, n_head=4, n_embd=32, block_size=16, vocab_size=61, v_residual=True)
mirror = GPTConfig(**shape, residual_from='mirror')
print([w.sources['v'] for w in wire(mirror)])

idx = torch.randint(61, (2, 11))
for more in (dict(), dict(residual_from='all', residual_learned=True), dict(residual_lambda=(2.0, 1.0))):
    plain, gated = (GPT(GPTConfig(**shape, **more, residual_gate=gate)) for gate in (False, True))
    print(torch.equal(plain(idx)[0], gated(idx)[0]))
    gated(idx, idx)[1].backward()
    print(all(p.grad.count_nonzero() for name, p in gated.named_parameters()))
try:
    GPTConfig(**shape, residual_map='cross', residual_gate=True)
except ValueError as error:
    print(error)

import sys, train
for name, flag in (('mirror', '--residual_from=mirror'), ('gate', '--residual_gate=True')):
    sys.argv = ['train.py', *OPTIONS, '--v_residual=True', flag, f'--out_dir=out/{name}']
    train.main()
"""


def test_the_patches_apply_start_as_promised_and_train(tmp_path):
    for path in ROOT.glob('*.py'):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / 'hub', tmp_path / 'hub')
    write_dataset(tmp_path / 'data' / 'tiny', {'train': TRAIN, 'validation': VALIDATION})
    assert len(PATCHES) == 2
    for patch in PATCHES:
        done = subprocess.run(
            ['git', 'apply', '-'], cwd=tmp_path, input=patch, capture_output=True, text=True
        )
        assert not done.returncode, (
            f'a patch of the README does not apply: {done.stderr} If you have changed these lines of '
            'model.py in a fork, delete this test there; otherwise, renew the patch.'
        )

    settings = {**TINY, 'n_layer': 4, 'max_iters': 2, 'save_steps': ()}
    options = [f'--{name}={value}' for name, value in settings.items()]
    program = tmp_path / 'trial.py'
    program.write_text(f'import os\nos.chdir({str(tmp_path)!r})\nOPTIONS = {options}\n{TRIAL}')
    status, out, err = finish(start(program))
    assert status == 0, err
    sources, *starts_as_without_and_learns, refusal = out.splitlines()[:8]
    assert sources == "[[], [], [], [('v', 2)], [('v', 1)], [('v', 0)]]"
    assert starts_as_without_and_learns == ['True'] * 6
    assert refusal == "residual_gate does nothing with residual_map='cross'; drop one"
    assert out.count('finished at step 2') == 2


def test_every_config_and_flag_that_it_names_exists():
    for name in re.findall(r'config/(\w+\.py)', README):
        assert (ROOT / 'config' / name).exists() or name == 'yours.py', name
    for flag in re.findall(r'(--(?:learning_rate|init_from|activation_\w+)=[\w.-]+)', README):
        configure(TrainConfig, GPTConfig, argv=[flag.replace('PATH', 'scratch')])


def test_every_program_and_page_that_it_names_exists():
    for name in re.findall(r'python (\w+\.py)', README):
        assert (ROOT / name).exists(), name
    for module in re.findall(r'python -m (paper\.\w+|hub\.\w+)', README):
        assert (ROOT / f'{module.replace(".", "/")}.py').exists(), module
    for target in re.findall(r'\]\(([^)#:]+)\)|src="([^"]+)"', README):
        name = ''.join(target)
        assert (ROOT / name).exists(), name


def test_every_test_that_a_page_names_exists():
    tests = set()
    for path in (ROOT / 'tests').glob('test_*.py'):
        tests.add(path.stem)
        tests.update(re.findall(r'^def (test_\w+)', path.read_text(), re.M))
    for page in (ROOT / 'README.md', *ROOT.glob('results/*/README.md'), ROOT / 'paper/README.md'):
        for name in re.findall(r'`(?:tests/)?(test_\w+?)(?:\.py|\.\.\.)?`', page.read_text()):
            assert any(test.startswith(name) for test in tests), f'{page}: {name}'


def cache_bytes(**settings):
    """Of one token, in half precision."""
    with torch.device('meta'):
        cache = GPT(GPTConfig(**settings)).new_cache(1, 8, torch.float16)
    return cache.nbytes // 8


@pytest.mark.parametrize(
    'words, settings',
    [
        ('vanilla and ResFormer {} bytes', {}),
        ('vanilla and ResFormer {} bytes', dict(v_residual=True)),
        ('SVFormer {}', dict(share_v=True)),
        ('GQA and CLA {}', dict(n_kv_head=4)),
        (
            'GQA and CLA {}',
            dict(share_k=True, share_v=True, share_k_every=2, share_v_every=2),
        ),
        ('SVFormer with a quarter of the KV heads {}', dict(share_v=True, n_kv_head=2)),
    ],
    ids=str,
)
def test_the_cache_sizes_are_what_new_cache_allocates(words, settings):
    assert words.format(f'{cache_bytes(**settings):,}') in README


def test_the_cache_table_of_the_scale_page_is_what_new_cache_allocates():
    page = (ROOT / 'results/scale/README.md').read_text()
    rows = re.findall(r'^\| [^|]+ \| (?:`(.*?)`)? ?\| ([\d,]+) \| ([\d,]+) \|$', page, re.M)
    assert len(rows) == 8
    for settings, *sizes in rows:
        for size, shape in zip(sizes, ({}, dict(n_layer=24, n_head=16, n_embd=1024)), strict=True):
            options = eval(f'dict({settings})', {'n_head': shape.get('n_head', 8)})
            assert f'{cache_bytes(**shape, **options):,}' == size, settings
