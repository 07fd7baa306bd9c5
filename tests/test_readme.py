"""The README's promises: its patches apply, its configs and flags exist, its numbers are true."""

import importlib
import json
import math
import re
import shlex
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
    assert 'residual_gate' in refusal and 'residual_map' in refusal
    assert out.count('finished at step 2') == 2


def test_grep_shows_the_one_line_of_resformer():
    """The README's first screen promises it."""
    word = re.search(r'`grep "(.*?)" model.py`', README)[1]
    (line,) = [line for line in (ROOT / 'model.py').read_text().splitlines() if word in line]
    assert 'weight * source' in line.split('#')[0]


def commands_of(path):
    """[words] of each command of ours in a page's code, in a program's first lines or in the Makefile,
    without `python`, or torchrun and its options."""
    text = path.read_text().replace('\\\n', ' ')
    text = text.replace('$(RUN)', 'python').replace('$(DEMO)', 'out/demo').replace('yours', 'demo')
    if path.suffix == '.md':
        text = '\n'.join(re.split(r'^```.*$', text, flags=re.M)[1::2])  # between fences
    commands = []
    for line in re.findall(r'^(?:#? ?\$ |\t|)((?:python|torchrun) .*)$', text, re.M):
        launcher, *words = shlex.split(line, comments=True)
        while launcher == 'torchrun' and words[0].startswith('--'):
            words.pop(0)
        if not words[0].startswith('tests/') and words[1:2] not in (['pip'], ['pytest'], ['ruff']):
            commands.append(words)
    return commands


class Parsed(BaseException):
    """A program has read its command line."""


def parse(words, monkeypatch):
    """Let a program read its command line, and do nothing more."""
    if words[0] == '-m':
        words = words[1:]
    program = importlib.import_module(words[0].removesuffix('.py').replace('/', '.'))

    def only(read):
        def read_and_stop(*args, **options):
            read(*args, **options)
            raise Parsed

        return read_and_stop

    with monkeypatch.context() as patch:
        for name in {'configure', 'choose'} & set(vars(program)):
            patch.setattr(program, name, only(getattr(program, name)))
        patch.setattr('sys.argv', words)
        with pytest.raises(SystemExit if '--help' in words else Parsed):
            program.main()


@pytest.mark.parametrize(
    'name, least',
    [
        ('README.md', 14),
        ('paper/README.md', 10),
        ('Makefile', 3),
        ('train.py', 5),
        ('compare.py', 4),
        ('bench.py', 3),
        ('evaluate.py', 3),
        ('prepare_slimpajama.py', 2),
        ('config/claims.py', 2),
    ],
)
def test_every_command_that_a_page_names_is_one_that_its_program_takes(name, least, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = commands_of(ROOT / name)
    for words in commands:
        parse(words, monkeypatch)
    assert len(commands) >= least, commands


def test_every_config_and_flag_of_training_that_it_names_exists():
    for name in re.findall(r'config/(\w+\.py)', README):
        assert (ROOT / 'config' / name).exists() or name == 'yours.py', name
    of_others = ('--gpus', '--key', '--max-', '--peers', '--rates', '--rdzv_')
    flags = re.findall(r'`(--[\w-]+=(?:"[^"]*"|[\w.-]+))`', README)
    flags = [flag for flag in flags if not flag.startswith(of_others)]
    for flag in flags:
        flag = flag.replace('PATH', 'scratch').replace('"', '')
        configure(TrainConfig, GPTConfig, argv=['--v_residual=True', flag])
    assert len(flags) >= 6, flags


def test_the_memory_that_it_names_is_what_was_counted():
    rows = json.loads((ROOT / 'results/fakegpu/torch_2.13.json').read_text())['rows']
    sizes = {'82M': '82m vanilla', '180M': '180m vanilla', '468M': '468m vanilla'}
    gib = {size: math.ceil(rows[name]['step_gib']) for size, name in sizes.items()}
    said = f'{gib["82M"]} GiB of each GPU at 82M, {gib["180M"]} at 180M and {gib["468M"]} at 468M'
    assert f'vanilla takes {said}' in README


def test_the_differences_that_it_prints_are_those_of_the_claims():
    """tests/test_results.py computes that page's table from the logs."""
    page = (ROOT / 'results/claims/README.md').read_text()
    rows = re.findall(
        r'^\| (.+ - .+) \| \d \| .* \| \**([+-][\d.]+) ± ([\d.]+)\** \| .* \|$', page, re.M
    )
    table = {name: (abs(float(mean)), float(half)) for name, mean, half in rows}
    overview = (ROOT / 'results/README.md').read_text()
    for name in (
        'SVFormer - vanilla',
        'SVFormer - ResFormer',
        'ResFormer - vanilla',
        'ResFormer - NeuTRENO',
        'ResFormer, learned weights - ResFormer',
    ):
        for text in (README, overview):
            numbers = re.findall(r'(\d\.\d+) ± (\d\.\d+)', text)
            # The table itself is rounded: to a half of its last digit.
            assert any(
                float(mean) == pytest.approx(table[name][0], abs=0.00056)
                and float(half) == pytest.approx(table[name][1], abs=0.00056)
                for mean, half in numbers
            ), name


def test_every_program_and_page_that_it_names_exists():
    for name in re.findall(r'python (\w+\.py)', README):
        assert (ROOT / name).exists(), name
    for module in re.findall(r'python -m (paper\.\w+|hub\.\w+)', README):
        assert (ROOT / f'{module.replace(".", "/")}.py').exists(), module
    for target in re.findall(r'\]\(([^)#:]+)\)|src="([^"]+)"', README):
        name = ''.join(target)
        assert (ROOT / name).exists(), name


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
