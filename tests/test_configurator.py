"""configurator.py: defaults, then files, then the command line; a mistake is a ValueError or OSError that names it."""

import ast
import dataclasses
import string
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configurator import comments, configure, help_text, one_line_errors
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


def refusal(*argv, schema=Toy):
    with pytest.raises((ValueError, OSError)) as caught:
        configure(schema, argv=list(argv))
    message = str(caught.value)
    assert message and '\n' not in message
    return message


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(name, text) makes a config file; returns its path relative to the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return name

    return write


# values


@pytest.mark.parametrize(
    'argument, name, value',
    [
        ('--rate=1', 'rate', 1.0),
        ('--rate=-3e-4', 'rate', -3e-4),
        ('--rate=.5', 'rate', 0.5),
        ('--rate=-0', 'rate', 0.0),
        ('--steps=2e6', 'steps', 2_000_000),
        ('--steps=-7', 'steps', -7),
        ('--steps=1_000', 'steps', 1000),
        ('--on=True', 'on', True),
        ('--on=False', 'on', False),
        ('--on=true', 'on', True),
        ('--on=false', 'on', False),
        ('--name=a=b=c', 'name', 'a=b=c'),
        ('--name=', 'name', ''),
        ('--name=12', 'name', '12'),
        ('--name=None', 'name', 'None'),
        ('--name=True', 'name', 'True'),
        ("--name='quoted = too'", 'name', 'quoted = too'),
        ('--name=-1', 'name', '-1'),
        ('--name=out/a run (2)', 'name', 'out/a run (2)'),
        ('--name=--rate=1', 'name', '--rate=1'),
        ('--pair=(1, 2.5)', 'pair', (1, 2.5)),
        ('--pair=1,2', 'pair', (1, 2)),
        ('--pair=[5]', 'pair', (5,)),
        ('--pair=()', 'pair', ()),
        ('--weights={}', 'weights', {}),
        ('--maybe=None', 'maybe', None),
        ("--weights={'Book': 0.5, 'C4': -1}", 'weights', {'Book': 0.5, 'C4': -1}),
        ('--maybe=3', 'maybe', 3),
    ],
)
def test_a_value_on_the_command_line_becomes_the_type_of_its_setting(argument, name, value):
    found = getattr(toy(argument), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    'argument, words',
    [
        ('--steps=4.5', ['--steps', 'int', '4.5']),
        ('--steps=True', ['--steps', 'int', 'True']),
        ('--steps=ten', ['--steps', 'int', "'ten'"]),
        ('--steps=1e999', ['--steps', 'int']),
        ('--steps=', ['--steps', 'int']),
        ('--steps=None', ['--steps', 'int', 'None']),
        ('--steps=(1,)', ['--steps', 'int']),
        ('--rate=fast', ['--rate', 'float', "'fast'"]),
        ('--rate=True', ['--rate', 'float']),
        ('--rate=1' + 400 * '0', ['--rate', 'float']),
        ('--rate=-1e999', ['--rate', 'float']),
        ('--on=1', ['--on', 'bool', '1']),
        ('--on=yes', ['--on', 'bool', "'yes'"]),
        ('--pair=5', ['--pair', 'tuple', '(5,)']),
        ('--pair={}', ['--pair', 'tuple']),
        ('--weights=(1, 2)', ['--weights', 'dict']),
        ('--weights={[]: 1}', ['--weights', 'dict']),
        ('--maybe=4.5', ['--maybe', 'int or None', '4.5']),
    ],
)
def test_a_value_of_another_type_is_refused_with_setting_type_and_value(argument, words):
    message = refusal(argument)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    'line, words',
    [
        ('steps = 4.5', ['steps', 'int', '4.5']),
        ('steps = True', ['steps', 'int', 'True']),
        ('on = 1', ['on', 'bool']),
        ('name = 3', ['name', 'str', '3']),
        ('rate = "x"', ['rate', 'float']),
        ('rate = None', ['rate', 'float']),
    ],
)
def test_a_value_of_another_type_in_a_file_is_refused_with_the_file(write, line, words):
    message = refusal(write('a.py', line))
    for word in ['a.py', *words]:
        assert word in message


def test_a_file_may_compute_import_modules_and_define_functions(write):
    write(
        'a.py',
        'import math\nfrom fractions import Fraction\n_rows = 64\ndef double(x):\n    return 2 * x\n'
        'steps = double(_rows) // 8  # 16\nrate = math.sqrt(4)\npair = [1, 2]\nmaybe = None\n',
    )
    assert toy('a.py') == Toy(rate=2.0, steps=16, pair=(1, 2), maybe=None)
    assert type(toy('a.py').rate) is float


# which key, and which one wins


@pytest.mark.parametrize(
    'argument, hint',
    [
        ('--step=1', "'steps'"),
        ('--nmae=x', "'name'"),
        ('--wieghts={}', "'weights'"),
        ('--zzzzzzzz=1', '--help'),
        ('--=1', '--help'),
        ('--', '--help'),
    ],
)
def test_an_unknown_key_on_the_command_line_gets_a_suggestion(argument, hint):
    message = refusal(argument)
    assert 'unknown setting' in message and hint in message


def test_an_unknown_key_in_a_file_gets_a_suggestion_and_the_file(write):
    message = refusal(write('a.py', 'steps = 3\nrat = 1.0\n'))
    assert 'a.py' in message and "'rat'" in message and "did you mean 'rate'?" in message


def test_a_file_wins_over_defaults_a_later_file_over_an_earlier_and_the_command_line_over_all(
    write,
):
    a, b = (
        write('a.py', 'steps = 1\nrate = 1.0\nname = "file a"\n'),
        write('b.py', 'steps = 2\nrate = 2.0\n'),
    )
    assert toy(a, b) == Toy(steps=2, rate=2.0, name='file a')
    assert toy(b, a) == Toy(steps=1, rate=1.0, name='file a')
    for argv in ((a, b, '--steps=3'), (a, '--steps=3', b), ('--steps=3', a, b)):
        assert toy(*argv) == Toy(steps=3, rate=2.0, name='file a'), argv
    assert toy('--steps=3', a, '--steps=4').steps == 4


def test_a_key_without_a_value_says_how_to_give_one():
    assert '--on=VALUE' in refusal('--on')


def test_a_setting_without_its_dashes_is_not_taken_for_a_missing_file_without_a_hint():
    assert '--steps=3' in refusal('steps=3')


def test_several_schemas_share_one_command_line_and_each_gets_its_own_fields():
    first, second = configure(Toy, Other, argv=['--width=5', '--steps=6'])
    assert first == Toy(steps=6) and second == Other(width=5)


def test_a_schema_may_refuse_further():
    message = refusal('--n_embd=30', '--n_head=4', schema=GPTConfig)
    assert 'n_embd=30' in message and 'n_head=4' in message


def test_a_new_field_is_a_setting_at_once(tmp_path, monkeypatch):
    (tmp_path / 'new_idea.py').write_text(
        'from dataclasses import dataclass\nfrom model import GPTConfig\n\n\n'
        '@dataclass\nclass NewConfig(GPTConfig):\n'
        '    my_idea: float = 0.0  # what it does\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    from new_idea import NewConfig

    assert configure(NewConfig, argv=['--my_idea=2', '--n_layer=3'])[0] == NewConfig(
        my_idea=2.0, n_layer=3
    )
    assert 'my_idea' in refusal('--my_idae=2', schema=NewConfig)
    assert '--my_idea=0.0' in help_text([NewConfig]) and 'what it does' in help_text([NewConfig])


# config files


def test_a_config_builds_on_another_and_changes_a_line(write, monkeypatch, tmp_path):
    write('recipes/base.py', 'steps = 1\nrate = 2\nweights = {"A": 1}\n')
    derived = write('recipes/derived.py', 'from recipes.base import *\nrate = rate / 4\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert toy(derived) == Toy(steps=1, rate=0.5, weights={'A': 1})
    assert toy(derived, '--rate=3').rate == 3.0


@pytest.mark.parametrize(
    'text, line, words',
    [
        ('steps = 1\nrate = (\n', 2, ['SyntaxError']),
        ('steps = 1\n  rate = 2\n', 2, ['IndentationError']),
        ('steps = 1\n\nrate = 1 / 0\n', 3, ['ZeroDivisionError']),
        ('def f():\n    return undefined\n\n\nsteps = f()\n', 2, ['NameError', 'undefined']),
        ('import json\nsteps = json.loads("{")\n', 2, ['JSONDecodeError']),
        ('steps = 1\nimport no_such_module\n', 2, ['no_such_module']),
        ('import ast\nsteps = 1\nrate = ast.literal_eval("(1")\n', 3, ['SyntaxError']),
        ('import sys\nsys.exit(3)\n', 2, ['SystemExit']),
        ('raise ValueError("two\\nlines")\n', 1, ['two lines']),
    ],
)
def test_a_config_that_fails_is_reported_with_file_and_line(write, text, line, words):
    message = refusal(write('bad.py', text))
    assert message.startswith(f'bad.py, line {line}: ')
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    'text, line', [('steps = 1\nrate = = 2\n', 2), ('steps = 1\n\nrate = 1 / 0\n', 3)]
)
def test_a_mistake_in_an_imported_config_is_reported_there(
    write, monkeypatch, tmp_path, text, line
):
    monkeypatch.syspath_prepend(tmp_path)
    folder = f'parts{line}'  # a module of one name is imported once
    write(f'{folder}/base.py', text)
    message = refusal(
        write(
            f'{folder}/derived.py', f'# a comment\n# another\n\n\n\nfrom {folder}.base import *\n'
        )
    )
    assert message.startswith(f'{folder}/base.py, line {line}: ')


def test_a_config_that_is_missing_binary_or_a_folder_is_reported(write, tmp_path):
    assert "'no.py'" in refusal('no.py')
    (tmp_path / 'binary.py').write_bytes(bytes(range(256)))
    assert 'binary.py' in refusal('binary.py')
    (tmp_path / 'folder').mkdir()
    assert "'folder'" in refusal('folder')


# help


@pytest.mark.parametrize('argv', [['--help'], ['-h'], ['--steps=3', '--help', '--unknown=1']])
def test_help_prints_and_exits_with_success(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        configure(Toy, argv=argv)
    assert not exit.value.code and '--steps=10' in capsys.readouterr().out


@pytest.mark.parametrize('schema', [TrainConfig, GPTConfig, Toy])
def test_help_lists_every_setting_with_its_default_and_a_meaning(schema):
    lines = {
        line.split('=')[0].strip(): line
        for line in help_text([schema]).splitlines()
        if line.startswith('  --')
    }
    meanings = comments(schema)
    assert set(meanings) == {f.name for f in dataclasses.fields(schema)}
    for f in dataclasses.fields(schema):
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        line = lines['--' + f.name]
        assert f'--{f.name}={default!r}' in line and len(meanings[f.name]) > 2
        assert line.endswith(f'  {meanings[f.name]}')


def test_a_meaning_is_the_comment_on_the_fields_own_line():
    assert comments(Toy) == {
        'rate': 'a float',
        'steps': 'an int',
        'name': 'a string',
        'on': 'a switch',
        'pair': 'a tuple',
        'weights': 'a dict',
        'maybe': 'an int or None',
    }
    assert comments(TrainConfig)['seed'] == 'of the initial weights, the data order and dropout'


def test_the_command_line_is_the_default(monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['train.py', '--steps=4'])
    assert configure(Toy)[0].steps == 4


# errors


def test_one_line_errors_exits_with_one_line_from_the_first_process_only(monkeypatch):
    for rank, code in ((None, 'error: no such thing'), ('0', 'error: no such thing'), ('1', 1)):
        monkeypatch.delenv('RANK', raising=False)
        monkeypatch.delenv('LOCAL_RANK', raising=False)
        if rank is not None:
            monkeypatch.setenv('RANK', rank)
            monkeypatch.setenv('LOCAL_RANK', rank)
        with pytest.raises(SystemExit) as exit, one_line_errors(ValueError):
            raise ValueError('no such thing')
        assert exit.value.code == code


def test_one_line_errors_lets_a_programs_own_mistakes_through():
    with pytest.raises(KeyError), one_line_errors(ValueError, OSError):
        raise KeyError('a bug')


# fuzz

ARGUMENT = st.one_of(
    st.text(max_size=30),
    st.text(max_size=30).map('--{}'.format),
    st.builds(
        '--{}={}'.format,
        st.sampled_from([f.name for f in dataclasses.fields(Toy)]),
        st.one_of(
            st.text(max_size=40),
            st.text(alphabet='[](){},:-+"\'\\ 0129.eExojTrueNon#=', max_size=40),
            st.text(alphabet=string.printable, max_size=40),
        ),
    ),
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


FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALAR = st.one_of(st.integers(), FINITE, st.booleans(), st.none(), st.text(max_size=10))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(),
    FINITE,
    st.text(max_size=20),
    st.lists(SCALAR, max_size=4).map(tuple),
    st.dictionaries(st.text(max_size=8), SCALAR, max_size=4),
)
def test_what_is_written_as_python_comes_back_the_same(steps, rate, name, pair, weights):
    expected = Toy(steps=steps, rate=rate, name=name, pair=pair, weights=weights)
    assert (
        toy(*(f'--{f.name}={getattr(expected, f.name)!r}' for f in dataclasses.fields(Toy)))
        == expected
    )


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20))
def test_any_text_is_a_string_setting_as_typed_unless_it_is_quoted(text):
    found = toy(f'--name={text}').name
    assert found == text or found == ast.literal_eval(text.strip())
