"""The README's promises: its patch is one that is tested, its commands parse, its numbers are true."""

import importlib
import itertools
import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from configurator import configure
from model import GPT, GPTConfig
from train import TrainConfig

README = (ROOT / 'README.md').read_text()


def test_the_patch_that_it_shows_is_one_that_is_tested():
    """tests/test_extending.py applies it."""
    (patch,) = re.findall(r'```diff\n(.*?)```', README, re.S)
    assert patch == (ROOT / 'tests/patches/source.patch').read_text()


def test_grep_shows_the_one_line_of_resformer():
    """The README's first screen promises it."""
    word = re.search(r'`grep "(.*?)" model.py`', README)[1]
    (line,) = [line for line in (ROOT / 'model.py').read_text().splitlines() if word in line]
    assert 'source' in line.split('#')[0]


def commands_of(path):
    """[words] of each command of ours in a page's code, in a program's first lines or in the Makefile,
    without `python`, or torchrun and its options."""
    text = path.read_text().replace('\\\n', ' ')
    # There is no run here to resume, and no file of yours.
    stand_ins = {'$(RUN)': 'python', 'yours': 'demo', '--init_from=resume': '--init_from=auto'}
    for words, stand_in in stand_ins.items():
        text = text.replace(words, stand_in)
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
        ('paper/README.md', 6),
        ('Makefile', 3),
        ('train.py', 5),
        ('compare.py', 4),
        ('bench.py', 3),
        ('evaluate.py', 3),
        ('prepare_slimpajama.py', 2),
        ('comparison/pack.py', 1),
    ],
)
def test_every_command_that_a_page_names_is_one_that_its_program_takes(name, least, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = commands_of(ROOT / name)
    for words in commands:
        parse(words, monkeypatch)
    assert len(commands) >= least, commands


def test_no_two_comparisons_have_one_name():
    """compare.py refuses to go on with another plan."""
    arms = {}
    pages = (ROOT / name for name in ('README.md', 'Makefile', 'compare.py'))
    for words in itertools.chain(*map(commands_of, pages)):
        flags = dict(word[2:].split('=', 1) for word in words[1:] if word.startswith('--'))
        if words[0] == 'compare.py' and 'arms' in flags:
            name = flags.get('name', Path(words[1]).stem)
            assert arms.setdefault(name, flags['arms']) == flags['arms'], name
    assert len(arms) >= 6


def test_every_setting_of_training_that_it_names_exists():
    of_others = ('--contrasts', '--gpus', '--key', '--peers', '--rates')
    flags = re.findall(r'`(--[\w-]+=(?:"[^"]*"|[\w.-]+))`', README)
    flags = [flag for flag in flags if not flag.startswith(of_others)]
    for flag in flags:
        flag = flag.replace('PATH', 'scratch').replace('"', '')
        configure(TrainConfig, GPTConfig, argv=['--v_residual=True', flag])
    assert len(flags) >= 5, flags


def test_every_file_that_it_names_exists():
    links = re.findall(r'\]\(([^)#:]+)\)|src="([^"]+)"|`((?:\w+/)?\w+\.py|\w+/)`', README)
    for name in map(''.join, links):
        assert (ROOT / name).exists(), name
    assert len(links) >= 20


def test_the_memory_that_it_names_is_what_was_counted():
    rows = json.loads((ROOT / 'results/fakegpu/torch_2.13.json').read_text())['rows']
    gib = [math.ceil(rows[f'{size}m vanilla']['step_gib']) for size in (82, 180, 468)]
    assert (
        'vanilla takes {} GiB of each GPU at 82M, {} at 180M and {} at 468M'.format(*gib) in README
    )


def test_the_gpu_hours_that_it_names_are_those_of_its_run():
    settings, config = configure(TrainConfig, GPTConfig, argv=['config/vanilla_82m.py'])
    with torch.device('meta'):
        flops = GPT(config).flops_per_token(config.block_size)
    tokens = settings.max_iters * settings.rows_per_step * config.block_size
    hours = tokens * flops / (0.45 * 989e12) / 3600
    assert f'{hours:.2f} GPU-hours if an H100 reaches 45% of 989 TFLOP/s' in README


def test_the_differences_that_it_prints_are_those_of_the_claims():
    """tests/test_results.py computes that page's table from the logs."""
    page = (ROOT / 'results/claims/README.md').read_text()
    row = r'^\| (.+ - .+) \| \d \| .* \| \**[+-]([\d.]+) ± ([\d.]+)\** \| .* \|$'
    table = {name: numbers for name, *numbers in re.findall(row, page, re.M)}
    for text in (README, (ROOT / 'results/README.md').read_text()):
        for name in ('SVFormer - vanilla', 'ResFormer - vanilla', 'ResFormer - NeuTRENO'):
            mean, half = map(float, table[name])
            assert f'{mean:.3f} ± {half:.3f}' in text, name


def cache_bytes(**settings):
    """Of one token, in half precision."""
    with torch.device('meta'):
        cache = GPT(GPTConfig(**settings)).new_cache(1, 8, torch.float16)
    return cache.nbytes // 8


def test_the_cache_sizes_are_what_new_cache_allocates():
    page = (ROOT / 'results/scale/README.md').read_text()
    rows = re.findall(r'^\| ([^|]+) \| (?:`(.*?)`)? ?\| ([\d,]+) \| ([\d,]+) \|$', page, re.M)
    assert len(rows) == 8
    for _, settings, *sizes in rows:
        for size, shape in zip(sizes, ({}, dict(n_layer=24, n_head=16, n_embd=1024)), strict=True):
            options = eval(f'dict({settings})', {'n_head': shape.get('n_head', 8)})
            assert f'{cache_bytes(**shape, **options):,}' == size, settings

    said = re.search('Per token at 82M, in half precision: (.*)', README)[1]
    assert re.findall(r'\d+,\d+', said) == [rows[i][2] for i in (0, 1, 2, 5)]
