"""What the pages say: commands parse, and files are there. tests/test_extending.py applies the patch."""

import importlib
import itertools
import re
import shlex
import subprocess
from pathlib import Path

from configurator import configure

import pytest
import runs
from conftest import ROOT
from test_house import PROGRAM, module_name

from model import GPTConfig
from train import TrainConfig

DOCS = {path.name: path for path in (ROOT / 'README.md', *sorted(ROOT.glob('docs/*.md')))}
TEXTS = {name: path.read_text() for name, path in DOCS.items()}
README = TEXTS['README.md']


def test_grep_shows_the_one_line_of_resformer():
    """The README's first screen promises it."""
    word = re.search(r'`grep "(.*?)" model.py`', README)[1]
    (line,) = [line for line in (ROOT / 'model.py').read_text().splitlines() if word in line]
    assert 'mixed =' in line.split('#')[0]


def test_the_example_of_an_idea_is_the_code():
    (example,) = re.findall(r'```python\n(.*?)```', TEXTS['ideas.md'], re.S)
    lines, source = (
        {line for line in text.splitlines() if line.strip() and line.strip()[0] != '#'}
        for text in (example, (ROOT / 'model.py').read_text())
    )
    assert not lines - source
    # It is whole; the code of another idea may refuse this one beside it.
    acts = {line for line in source if re.match(r' *(if config\.)?attn_res\b', line)}
    assert acts and not acts - lines


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
    lines = re.findall(r'^(?:#? ?\$ |\t|)((?:python|torchrun) .*)$', text, re.M)
    of_others = (['pip'], ['pytest'], ['ruff'])
    return [words for words in typed('\n'.join(lines)) if words[1:2] not in of_others]


def typed(code):
    """[arguments of python] of each command that lines of bash run, without torchrun's own options."""
    stand_ins = r"""
        python() { printf '%s\37' "$@"; printf '\36'; }
        torchrun() { while [[ $1 == --* ]]; do shift; done; python "$@"; }
        make() { python make "$@"; }
        nvidia-smi() { seq 8; }
        export -f python torchrun make nvidia-smi
    """
    done = subprocess.run(['bash', '-euc', stand_ins + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [command.split('\37')[:-1] for command in done.stdout.split('\36')[:-1]]


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
        ('README.md', 4),
        ('docs/train.md', 6),
        ('docs/data.md', 3),
        ('docs/ideas.md', 2),
        ('docs/use.md', 9),
        ('Makefile', 3),
        ('train.py', 5),
        ('compare.py', 4),
        ('bench.py', 3),
        ('evaluate.py', 3),
        ('prepare_slimpajama.py', 2),
    ],
)
def test_every_command_that_a_page_names_is_one_that_its_program_takes(name, least, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = commands_of(ROOT / name)
    for words in commands:
        parse(words, monkeypatch)
    assert len(commands) >= least, commands


@pytest.mark.parametrize('script', sorted(ROOT.glob('runs/*.sh')), ids=lambda path: path.name)
def test_every_command_of_a_script_is_one_that_its_program_takes(script, monkeypatch):
    monkeypatch.chdir(ROOT)
    setup, *commands = typed(f'bash {shlex.quote(str(script))}')
    assert setup == ['make', 'setup'] and len(commands) >= 3
    for words in commands:
        parse(words, monkeypatch)


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


def test_every_link_and_every_file_that_pages_name_is_there():
    places = ('*.md', 'docs/*.md', 'hub/*.md', 'paper/*.md', 'results/**/*.md')
    paths = [path for place in places for path in ROOT.glob(place)]
    links = files = 0
    for path in paths:
        text = path.read_text()
        targets = re.findall(r'\]\(([^)#:]+)[^):]*\)|src="([^"]+)"', text)
        links += len(targets)
        missing = [name for name in map(''.join, targets) if not (path.parent / name).exists()]
        if path in DOCS.values():
            names = re.findall(r'`((?:\w+/)*[a-z_]+\.(?:py|sh)|\w+/)`', text)
            files += len(names)
            missing += [name for name in names if not (ROOT / name).exists()]
        assert not missing, path
    assert links >= 100 and files >= 20
