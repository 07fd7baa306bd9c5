"""README and docs/: the patch is one that is tested, commands parse, numbers are true, and it is short."""

import importlib
import itertools
import math
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import runs
import torch
from conftest import ROOT, read_json
from test_house import PROGRAM, module_name

from configurator import configure
from model import GPT, GPTConfig
from train import TrainConfig

DOCS = {path.name: path for path in (ROOT / 'README.md', *sorted(ROOT.glob('docs/*.md')))}
TEXTS = {name: path.read_text() for name, path in DOCS.items()}
README = TEXTS['README.md']


def test_the_patch_that_it_shows_is_one_that_is_tested():
    """tests/test_extending.py applies it."""
    (patch,) = re.findall(r'```diff\n(.*?)```', README, re.S)
    assert patch == (ROOT / 'tests/patches/source.patch').read_text()


def test_grep_shows_the_one_line_of_resformer():
    """The README's first screen promises it."""
    word = re.search(r'`grep "(.*?)" model.py`', README)[1]
    (line,) = [line for line in (ROOT / 'model.py').read_text().splitlines() if word in line]
    assert 'mixed =' in line.split('#')[0]


def test_it_is_read_in_minutes():
    assert len(README.split()) <= 1300
    assert all(len(text.split()) <= 600 for name, text in TEXTS.items() if name != 'README.md')


def commands_of(path):
    """[words] of each command of ours in a page's code, in a program's first lines or in the Makefile,
    without `python`, or torchrun and its options."""
    text = path.read_text().replace('\\\n', ' ')
    text = re.sub("@echo '(.*)'", r'\1', text)
    # There is no run here to resume, and no file of yours.
    text = re.sub(r'--init_from=(resume|out/\S+)', '--init_from=auto', text)
    for words, stand_in in {'$(RUN)': 'python', 'yours': 'demo'}.items():
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
        ('README.md', 10),
        ('docs/train.md', 6),
        ('docs/data.md', 3),
        ('docs/ideas.md', 2),
        ('docs/use.md', 11),
        ('paper/README.md', 6),
        ('Makefile', 4),
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


MAINS = [module_name(path) for path in PROGRAM if '\ndef main():' in path.read_text()]


@pytest.mark.parametrize('name', MAINS)
def test_each_program_has_help(name):
    program = importlib.import_module(name)
    text = runs.succeed(program.main, '--help')
    assert text.startswith(program.__doc__.strip()[:40])


def test_no_two_comparisons_have_one_name():
    """compare.py refuses to go on with another plan."""
    arms = {}
    pages = (*DOCS.values(), ROOT / 'Makefile', ROOT / 'compare.py')
    for words in itertools.chain(*map(commands_of, pages)):
        flags = dict(word[2:].split('=', 1) for word in words[1:] if word.startswith('--'))
        if words[0] == 'compare.py' and 'arms' in flags:
            name = flags.get('name', Path(words[1]).stem)
            assert arms.setdefault(name, flags['arms']) == flags['arms'], name
    assert len(arms) >= 6


def test_every_setting_of_training_that_it_names_exists():
    of_others = '--contrasts --gpus --judgement --key --mixed_code --peers --print --rates'.split()
    of_training = []
    for code in re.findall('`(--[^`]+)`', ''.join(TEXTS.values())):
        flags = re.findall(r'--[\w-]+=(?:"[^"]*"|[\w.-]+)', code)
        if flags and flags[0].split('=')[0] not in of_others:
            flags = [flag.replace('PATH', 'scratch').replace('"', '') for flag in flags]
            configure(TrainConfig, GPTConfig, argv=['--v_residual=True', *flags])
            of_training += flags
    assert len(of_training) >= 5, of_training


def test_every_file_that_it_names_exists():
    names = 0
    for page, text in TEXTS.items():
        links = re.findall(r'\]\(([^)#:]+)\)|src="([^"]+)"', text)
        for name in map(''.join, links):
            assert (DOCS[page].parent / name).exists(), f'{page}: {name}'
        files = re.findall(r'`((?:\w+/)*[a-z_]+\.(?:py|sh)|\w+/)`', text)
        for name in files:
            assert (ROOT / name).exists(), f'{page}: {name}'
        names += len(links) + len(files)
    assert names >= 55


def test_the_memory_that_it_names_is_what_was_counted():
    rows = read_json(ROOT / 'results/fakegpu/parts_2.13.json')['rows']
    sizes = ('82m', '180m', '468m')
    gib = [math.ceil(rows[f'{size} vanilla, DDP of 8']['step_gib']) for size in sizes]
    said = 'vanilla takes {} GiB of each of eight GPUs at 82M, {} at 180M and {} at 468M'
    assert said.format(*gib) in TEXTS['train.md']
    assert f'it needs {gib[0]} GiB per GPU' in README


def test_the_gpu_hours_that_it_names_are_those_of_its_run():
    settings, config = configure(TrainConfig, GPTConfig, argv=['config/vanilla_82m.py'])
    tokens = settings.max_iters * settings.rows_per_step * config.block_size
    hours = tokens / steps_on_a_gpu()['vanilla']['tok_per_s'] / 3600
    said = f'takes {hours:.0f} H100-hours'
    assert said in README and said in (ROOT / 'runs/82m_8gpu.sh').read_text()


def test_what_it_says_of_the_papers_claims_is_in_their_verdicts():
    """tests/test_results.py computes these from the logs."""
    page = (ROOT / 'results/claims/start/README.md').read_text()
    rows = read_json(ROOT / 'results/claims/start/verdicts.json')['rows']
    numbers = {row['label']: row['numbers'] for row in rows}
    overview, results = (ROOT / 'results/README.md').read_text(), TEXTS['results.md']
    for label in ('ResFormer below vanilla', 'ResFormer below DenseFormer'):
        ends = sorted(abs(numbers[label][name]) for name in ('low_holm', 'high_holm'))
        said = f'{abs(numbers[label]["mean"]):.3f} ({ends[0]:.3f} to {ends[1]:.3f})'
        assert said in overview and said in results, label
        assert said in page.replace('nats per token (95% interval after Holm: ', '(')
    for label, text in {
        'NeuTRENO + ResFormer below ResFormer': 'With NeuTRENO on top it gains {}',
        'ResFormer, learned weights below ResFormer': 'with learned weights {}',
        "all share the first layer's queries above vanilla": 'queries or keys costs {}',
        "all share the first layer's keys above vanilla": ' and {}.',
        'SVFormer, two anchors below SVFormer': 'with one anchor is better than with two by {}',
        'values shared by twos below SVFormer, two anchors': 'two are better than four by {}',
    }.items():
        assert text.format(f'{abs(numbers[label]["mean"]):.3f}') in results, label
    verdicts = Counter(row['verdict'] for row in rows if row['metric'] == 'validation loss')
    agree, against, undecided = (verdicts[x] for x in ('agrees', 'contradicts', 'undecided'))
    said = f'{agree} come out as printed, {against} against it, and {undecided} are undecided'
    assert said in overview and said in results
    assert f'{verdicts.total() - verdicts["untestable"]} were [tested' in README
    assert f': {agree} hold, and {against} are reversed' in README


def test_the_leads_on_a_modern_baseline_are_those_of_the_family():
    page = (ROOT / 'results/family/README.md').read_text()
    row = r'^\| (.*), modern - modern \| -(\S+) \| .* \| -(\S+) to -(\S+) \| \d'
    leads = {name: map(float, numbers) for name, *numbers in re.findall(row, page, re.M)}
    assert set(leads) == {'ResFormer', 'first_token'}
    said = {name: '{0:.3f} ({2:.3f} to {1:.3f})'.format(*n) for name, n in leads.items()}
    for text in (TEXTS['results.md'], (ROOT / 'results/README.md').read_text()):
        assert all(words in text for words in said.values())
    assert f'ResFormer leads by {said["ResFormer"][:5]}.' in README


def cache_bytes(**settings):
    """Of one token, in half precision."""
    model = GPT.without_weights(GPTConfig(**settings))
    return model.new_cache(1, 8, torch.float16).nbytes // 8


def test_the_cache_sizes_are_what_new_cache_allocates():
    page = (ROOT / 'results/scale/README.md').read_text()
    rows = re.findall(r'^\| ([^|]+) \| (?:`(.*?)`)? ?\| ([\d,]+) \| ([\d,]+) \|$', page, re.M)
    assert len(rows) == 8
    for _, settings, *sizes in rows:
        for size, shape in zip(sizes, ({}, dict(n_layer=24, n_head=16, n_embd=1024)), strict=True):
            options = eval(f'dict({settings})', {'n_head': shape.get('n_head', 8)})
            assert f'{cache_bytes(**shape, **options):,}' == size, settings

    said = re.search('Per token at 82M, in half precision: (.*)', TEXTS['use.md'])[1]
    assert re.findall(r'\d+,\d+', said) == [rows[i][2] for i in (0, 1, 2, 5)]


def test_its_table_of_results_is_that_of_the_pages():
    """Losses as results/start has them, which tests/test_results.py computes; the rest at 82M."""
    page = (ROOT / 'results/start/README.md').read_text()
    means = dict(re.findall(r'^\| ([\w, ]+) \| (\d\.\d{4}) \| 0', page, re.M))
    row = r'^\| (.*?) \| (\S+) \| \S+ to \S+ \| (\S+ to \S+) \| .* \| (\w+) \|$'
    contrasts = re.findall(row, page, re.M)
    contrasts = {name: rest for name, *rest in contrasts}
    steps = steps_on_a_gpu()
    rows = re.findall(r'^\| (vanilla|ResFormer|SVFormer) \| (.*) \|$', README, re.M)
    for name, cells in rows:
        *losses, parameters, cache, time = cells.split(' | ')
        for loss, norm in zip(losses, ('', ', norm'), strict=True):
            expected = f'{float(means[name + norm]):.3f}'
            if name != 'vanilla':
                mean, interval, verdict = contrasts[f'{name}{norm} - vanilla{norm}']
                expected = f'{float(mean):+.3f}'
                expected = f'**{expected}**' if verdict == 'better' else expected
                ends = (f'{float(end):+.3f}' for end in interval.split(' to '))
                expected += ' ({} to {})'.format(*ends)
            assert loss == expected, name + norm
        variant = {'ResFormer': {'v_residual': True}, 'SVFormer': {'share_v': True}}.get(name, {})
        assert cache == f'{cache_bytes(**variant):,}'
        if name == 'vanilla':
            assert parameters == f'{count("vanilla") / 1e6:.0f}M' and time == '1.00'
        else:
            assert parameters == more_parameters(name.lower())
            assert time == f'{1 / steps[name.lower()]["x vanilla"]:.2f}'
    assert len(rows) == 3


def steps_on_a_gpu():
    """{row: its numbers} of the bench at 82M on a GPU."""
    rows = read_json(ROOT / 'results/speed/82m_gpu.json')['rows']
    return {row['name']: row for row in rows}


def count(name):
    """Parameters of config/NAME_82m.py."""
    _, config = configure(TrainConfig, GPTConfig, argv=[f'config/{name}_82m.py'])
    return sum(p.numel() for p in GPT.without_weights(config).parameters())


def more_parameters(name):
    more = count(name) - count('vanilla')
    return f'{more / 1e6:+.2f}M' if more else '+0'


def test_its_table_of_the_family_has_the_losses_of_its_page_and_counts_parameters():
    page = (ROOT / 'results/family/README.md').read_text()
    row = r'^\| (\w+) \| (\S+) \| (\S+) to (\S+) \| \S+ \| (\w+) \|$'
    verdicts = {name: rest for name, *rest in re.findall(row, page, re.M)}
    rows = re.findall(r'^\| `(\w+)` \| .* \| (?:(\S+) )?\| (\S+) \|$', README, re.M)
    for name, loss, parameters in rows:
        expected = ''
        if name in verdicts:
            mean, low, high, verdict = verdicts[name]
            expected = f'{float(mean):+.3f}'
            expected = expected if verdict == 'undecided' else f'**{expected}**'
            assert f'± {(float(high) - float(low)) / 2:.3f}' in README
        assert loss == expected, name
        assert parameters == more_parameters(name), name
    assert len(rows) >= 13 and sum(bool(loss) for _, loss, _ in rows) == 9
