"""configurator.py: defaults, then files, then the command line; a mistake is named in one line."""

import dataclasses
import os
import re
import runpy
import subprocess
import sys
from dataclasses import asdict, dataclass, field

from configurator import choose, configure, help_text

import pytest
from conftest import ROOT, raises_one_line
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPTConfig
from train import TrainConfig


@dataclass
class Toy:
    rate: float = 0.5  # a float
    steps: int = 10  # an int
    name: str = 'a'  # a string
    on: bool = False  # a switch
    pair: tuple = ()  # a tuple
    # a banner, no field's meaning
    weights: dict = field(default_factory=dict)  # a dict
    maybe: int | None = None  # an int or None


@dataclass
class Other:
    width: int = 3  # another schema's field


def toy(*argv):
    return configure(Toy, argv=list(argv))[0]


@pytest.fixture
def write(here):
    """write(name, text) makes a config file; returns its path relative to the current folder."""

    def write(name, text):
        path = here / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return name

    return write


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'argument, name, value',
    [
        ('--rate=1', 'rate', 1.0),
        ('--steps=2e6', 'steps', 2_000_000),
        ('--on=false', 'on', False),
        ('--name=a=b=c', 'name', 'a=b=c'),
        ('--name=12', 'name', '12'),
        ("--name='quoted = too'", 'name', 'quoted = too'),
        ('--pair=[5]', 'pair', (5,)),
        ('--maybe=None', 'maybe', None),
        ('--maybe=3', 'maybe', 3),
    ],
)
def test_a_value_on_the_command_line_becomes_the_type_of_its_setting(argument, name, value):
    setting = getattr(toy(argument), name)
    assert setting == value and type(setting) is type(value)


COMPUTES = """
import math
from fractions import Fraction
_rows = 64
def double(x):
    return 2 * x
steps = double(_rows) // 8  # 16
rate = math.sqrt(4)
pair = [1, 2]
maybe = None
"""


def test_a_file_may_compute_import_modules_and_define_functions(write):
    write('a.py', COMPUTES)
    assert toy('a.py') == Toy(rate=2.0, steps=16, pair=(1, 2), maybe=None)
    assert type(toy('a.py').rate) is float


# --- which one wins ------------------------------------------------------------------------------


def test_files_win_over_defaults_later_ones_over_earlier_and_the_command_line_over_all(write):
    a = write('a.py', 'steps = 1\nrate = 1.0\nname = "file a"\n')
    b = write('b.py', 'steps = 2\nrate = 2.0\n')
    assert toy(a, b) == Toy(steps=2, rate=2.0, name='file a')
    assert toy('--steps=3', a, b) == Toy(steps=3, rate=2.0, name='file a')


# --- what is refused ------------------------------------------------------------------------------

FILES = {
    'a.py': 'steps = 3\nrat = 1.0\n',
    'numpy.py': 'from numpy import float64\npair = (float64(0.5),)',  # no checkpoint may hold it
    'call.py': 'import os\nname = os.getcwd',  # without its parentheses
    'module.py': 'import random as name',
    'fails.py': 'steps = 1 / 0\n',
    'recipes/tiny.py': '',
}


@pytest.mark.parametrize(
    'argv, words',
    [
        (['--steps=4.5'], ['--steps', 'int', '4.5']),
        (['--steps=True'], ['--steps', 'int', 'True']),
        (['--steps=1e999'], ['--steps', 'int']),
        (['--rate=fast'], ['--rate', 'float', "'fast'"]),
        (['--rate=1' + 400 * '0'], ['--rate', 'float']),
        (['--on=yes'], ['--on', 'bool', "'yes'"]),
        (['--pair=5'], ['--pair', 'tuple', '(5,)']),
        (['--weights={[]: 1}'], ['--weights', 'dict']),
        (['--maybe=4.5'], ['--maybe', 'int or None', '4.5']),
        (['numpy.py'], ['pair in numpy.py must be tuple', 'float64(0.5)']),
        (['call.py'], ['name in call.py must be str, not <']),
        (['module.py'], ['name in module.py must be str, not <']),
        # keys, and what is taken for none
        (['--wieghts={}'], ["unknown setting 'wieghts'", "'weights'"]),
        (['--'], ['unknown setting', '--help']),
        (['a.py'], ["'rat'", 'a.py', "did you mean 'rate'?"]),
        (['--rate', '3e-4'], ['--rate has no value: write --rate=VALUE']),
        (['fails.py', '--rate', '3e-4'], ['--rate has no value: write --rate=VALUE']),
        (['steps=3'], ['write --steps=3']),
        (['-steps=3'], ['write --steps=3']),
        (['no.py'], ["'no.py'"]),
        (['recipes/tinny.py'], ['did you mean recipes/tiny.py?']),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_that_names_it(write, argv, words):
    for name, text in FILES.items():
        write(name, text)
    with raises_one_line(*words):
        toy(*argv)


# --- plain arguments and modes -------------------------------------------------------------------


@dataclass
class Runs:
    runs: tuple = ()  # folders
    window: int = 5  # steps


def test_plain_arguments_go_into_the_field_that_takes_them():
    words = ['out/a', 'no.py', '--window=7', 'b=1']
    assert configure(Runs, argv=words, plain='runs') == [Runs(('out/a', 'no.py', 'b=1'), 7)]
    # Without any, the option may give them.
    assert configure(Runs, argv=['--runs=("x",)'], plain='runs') == [Runs(('x',))]


DOC = """
Say one of two words.

$ python program.py one
"""
MODES = {'one': (Toy,), 'two': (Runs, Other)}


def test_the_first_word_chooses_the_mode_and_its_schemas_or_the_mode_without_a_name():
    assert choose(MODES, DOC, ['one', '--steps=3']) == ('one', [Toy(steps=3)])
    two = choose(MODES, DOC, ['two', 'one', '--width=4'], plain='runs')
    assert two == ('two', [Runs(('one',)), Other(4)])
    modes = {'': (Toy,), 'two': (Other,)}
    assert choose(modes, DOC, []) == ('', [Toy()])
    assert choose(modes, DOC, ['--steps=3']) == ('', [Toy(steps=3)])


@pytest.mark.parametrize(
    'argv, status',
    [([], 2), (['three'], 2), (['--help'], 0)],
)
def test_without_a_mode_the_programs_own_words_are_printed(argv, status, capsys):
    with pytest.raises(SystemExit) as exit:
        choose(MODES, DOC, argv)
    assert exit.value.code == status and capsys.readouterr().out == DOC.strip() + '\n'


def test_help_of_a_mode_is_that_of_its_schemas(capsys):
    with pytest.raises(SystemExit) as exit:
        choose(MODES, DOC, ['one', '-h'])
    text = capsys.readouterr().out
    assert not exit.value.code and '--steps=10' in text and '--window' not in text
    assert text.startswith(DOC.lstrip())
    assert re.search(r'^usage: python \S+( \S+)? one \[config/file.py ', text, re.M)


# --- config files ---------------------------------------------------------------------------------


def test_a_config_builds_on_another_and_changes_a_line(write, monkeypatch, tmp_path):
    write('recipes/base.py', 'steps = 1\nrate = 2\nweights = {"A": 1}\n')
    derived = write('recipes/derived.py', 'from recipes.base import *\nrate = rate / 4\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert toy(derived) == Toy(steps=1, rate=0.5, weights={'A': 1})


def test_a_package_of_others_named_config_does_not_hide_ours(tmp_path):
    (tmp_path / 'config').mkdir()
    (tmp_path / 'config' / '__init__.py').touch()
    done = program('train.py', 'config/svformer_82m.py', '--dataset=nope', PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and 'no prepared dataset in data/nope' in done.stderr


# --- help -----------------------------------------------------------------------------------------


def program(name, *words, flags=(), **environment):
    """What a program in the project's folder does with these words, in a Python of its own."""
    command = [sys.executable, *flags, name, *words]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_help_needs_no_docstrings():
    done = program('prepare_slimpajama.py', '--help', flags=['-OO'])
    assert done.returncode == 0 and '--source=' in done.stdout and not done.stderr


def test_without_its_packages_a_program_says_in_one_line_what_to_do():
    """-S leaves out what is installed, as outside the environment."""
    for name in ('train.py', 'sample.py', 'prepare_slimpajama.py', 'compare.py'):
        done = program(name, flags=['-S'])
        assert done.returncode == 1 and done.stderr.count('\n') == 1
        assert 'source .venv/bin/activate' in done.stderr


@pytest.mark.parametrize('schema', [TrainConfig, GPTConfig])
def test_help_lists_every_setting_with_its_default_and_a_meaning(schema):
    text = help_text([schema])
    for name, default in asdict(schema()).items():
        assert re.search(rf'^  --{name}={re.escape(repr(default))}  +\S..', text, re.M), name


# --- fuzz -----------------------------------------------------------------------------------------

NAMES = st.sampled_from([field.name for field in dataclasses.fields(Toy)])
VALUES = st.one_of(
    st.text(max_size=40),
    st.text(alphabet='[](){},:-+"\'\\ 0129.eExojTrueNon#=', max_size=40),
)
ARGUMENT = st.one_of(
    st.text(max_size=30),
    st.text(max_size=30).map('--{}'.format),
    st.builds('--{}={}'.format, NAMES, VALUES),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(ARGUMENT, max_size=4))
def test_configure_raises_nothing_but_value_errors_and_os_errors(argv):
    try:
        configure(Toy, argv=argv)
    except (ValueError, OSError):
        pass
    except SystemExit as exit:
        assert not exit.code and {'-h', '--help'} & set(argv)


def test_a_thread_that_waits_soon_sleeps_unless_the_user_says_otherwise(monkeypatch):
    passive, active = ({'OMP_WAIT_POLICY': policy} for policy in ('PASSIVE', 'ACTIVE'))
    ours, theirs = ({'GOMP_SPINCOUNT': count} for count in ('10000', '5'))
    for typed, expected in (({}, passive | ours), (active, active), (theirs, passive | theirs)):
        monkeypatch.setattr(os, 'environ', environment := dict(typed))
        runpy.run_path(f'{ROOT}/configurator.py')
        assert environment == expected
