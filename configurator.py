"""
Settings = defaults + config files + command line, in this order; the last one wins.

$ python train.py config/resformer_82m.py config/seq_8192.py --batch_size=4 --learning_rate=3e-4

A program describes its settings as dataclasses. The comment after a field is its help text, so a
new field (of GPTConfig, say) is a checked and documented setting at once. A config file is plain
Python that assigns values; to build on another one, `from config.vanilla_82m import *` and change
a line.

A program with several modes, such as `evaluate.py loss` and `evaluate.py tasks`, calls choose().
"""

import ast
import dataclasses
import difflib
import inspect
import math
import os
import re
import runpy
import sys
import types
import typing
from importlib.util import find_spec
from pathlib import Path

# Programs import this before what they need, see pyproject.toml.
if not find_spec('torch'):
    sys.exit('error: there is no torch here: source .venv/bin/activate (made by `make setup`)')

# A thread that waits for another one spins a little, and then sleeps: longer spinning halved a training's
# speed beside busy programs, and none at all takes a third of it where nobody else works (results/speed).
# OpenMP reads this when torch is imported. The second name is GNU's, and there it overrides the first.
if 'OMP_WAIT_POLICY' not in os.environ:
    os.environ['OMP_WAIT_POLICY'] = 'PASSIVE'
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')

HELP = {'--help', '-h'}


def configure(*schemas, argv=None, doc='', plain='', mode='', ignored=(), under=None):
    """Return one instance of each dataclass in `schemas`, set from `argv` (default: the command line).

    An argument is a config file or --key=value. With plain='runs', the former are the tuple field
    `runs` instead, and no file is taken: one of a stranger's pack, among its runs, would be executed.
    doc: what --help prints first.
    mode: the program's first word, if it has one, for --help. ignored: dataclasses of another
    program, whose settings a config file may hold as well; they are left out. under: a function of
    the values that files and options give, whose own values, {name: value}, take the place of the
    defaults.

    Raises ValueError or OSError for a key, type or file that does not fit; a dataclass's own
    __post_init__ may refuse more. --help prints and exits.
    """
    argv = sys.argv[1:] if argv is None else argv
    if HELP & set(argv):
        print(help_text(schemas, doc, plain, mode))
        sys.exit(0)

    hints = hints_of(schemas)
    of_others = hints_of(ignored).keys() - hints.keys()
    words, options = sort_arguments(argv)
    # Before the files: else the VALUE of `--key VALUE` is refused as a missing config file.
    overrides = {}
    for option in options:
        key, equals, text = option[2:].partition('=')
        check_key(key, hints, 'command line')
        if not equals:
            raise ValueError(f'{option} has no value: write --{key}=VALUE')
        overrides[key] = convert(parse(text), hints[key], f'--{key}', text)

    values = {}
    for path in () if plain else words:
        for key, value in read_settings(path, hints).items():
            if key in of_others:
                continue
            check_key(key, hints, path)
            values[key] = convert(value, hints[key], f'{key} in {path}')
    if plain and words:
        overrides[plain] = tuple(words)
    values |= overrides
    if under:
        values = under(values) | values

    instances = []
    for schema in schemas:
        names = typing.get_type_hints(schema).keys() & values.keys()
        instances.append(schema(**{name: values[name] for name in names}))
    return instances


def hints_of(schemas):
    """{setting: its type} of dataclasses."""
    hints = {}
    for schema in schemas:
        hints |= typing.get_type_hints(schema)
    return hints


def sort_arguments(argv):
    """(plain arguments, --key=value options) of a command line."""
    options = [argument for argument in argv if argument.startswith('--')]
    return [argument for argument in argv if argument not in options], options


def choose(modes, doc, argv=None, plain='', ignored=()):
    """Configure a program whose first word is a mode: (mode, [one instance of each of its schemas]).

    modes: {mode: its schemas}. A first word that names no mode belongs to the mode '', where `modes`
    has one. Where it has none, `doc` is printed, and the program exits: with status 0 after --help,
    else 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    word = argv[0] if argv else ''
    mode = word if word in modes else ''
    if mode not in modes:
        print((doc or '').strip())
        sys.exit(0 if word in HELP else 2)
    if mode:
        argv = argv[1:]
    schemas = modes[mode]
    return mode, configure(*schemas, argv=argv, doc=doc, plain=plain, mode=mode, ignored=ignored)


def read_settings(path, fields=()):
    """The values that a config file assigns: its public names, without modules and functions.

    A function that has the name of one of these fields is there to be refused: somebody forgot the
    parentheses of a call.
    """
    if not os.path.isfile(path):
        near = difflib.get_close_matches(path, map(str, Path(path).parent.glob('*.py')), n=1)
        hint = f'; did you mean {near[0]}?' if near else ''
        if '=' in path:
            hint = f'; for a setting, write --{path.lstrip("-")}'
        raise FileNotFoundError(f'no config file {path!r}{hint}')
    settings = {}
    for name, value in runpy.run_path(path).items():
        is_helper = isinstance(value, types.ModuleType) or callable(value)
        if name in fields or not (is_helper or name.startswith('_')):
            settings[name] = value
    return settings


def check_key(key, fields, where):
    if key in fields:
        return
    close = difflib.get_close_matches(key, fields, n=1)
    hint = f'did you mean {close[0]!r}?' if close else '--help lists them all'
    raise ValueError(f'unknown setting {key!r} ({where}); {hint}')


def parse(text):
    """A command-line value: a Python literal where it is one, else the text itself."""
    if text in ('true', 'false'):
        return text == 'true'
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # TypeError: {[]: 1}
        return text


def convert(value, hint, where, text=None):
    """`value` as the type `hint`, or ValueError. text: what was typed, for settings that are strings."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    # What a tuple[int, ...] holds is its dataclass's business.
    kinds = [typing.get_origin(kind) or kind for kind in kinds]
    for kind in kinds:
        if fits(value, kind):
            return kind(value) if kind in (int, float, tuple) else value
    if str in kinds and text is not None:
        return text

    names = ' or '.join('None' if kind is type(None) else kind.__name__ for kind in kinds)
    advice = f'; write ({value!r},)' if tuple in kinds and isinstance(value, int | float) else ''
    raise ValueError(f'{where} must be {names}, not {value!r}{advice}')


def fits(value, kind):
    """Whether a value can be taken as a `kind`: 2e6 is an int, 3 a float, a list a tuple."""
    if isinstance(value, bool):  # an int to Python, but not to a person
        return kind is bool
    if isinstance(value, float) and not math.isfinite(value):  # 1e999
        return False
    if kind is int and isinstance(value, float):
        return value.is_integer()
    if kind in (int, float) and isinstance(value, int):
        return abs(value) < 1e308
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    # A checkpoint with numbers of NumPy could not be read again.
    return isinstance(value, kind) and (kind not in (tuple, dict) or parse(repr(value)) == value)


def help_text(schemas, doc='', plain='', mode=''):
    module = sys.modules['__main__'].__spec__  # of python -m
    program = f'-m {module.name}' if module else os.path.basename(sys.argv[0])
    words = ['usage: python', program, mode, f'[{plain or "config/file.py"} ...]']
    words.append('[--key=value ...]')
    lines = [(doc or '').strip(), '', ' '.join(filter(None, words))]  # None: python -OO
    for schema in schemas:
        lines += ['', f'{schema.__name__}:']
        meanings = comments(schema)
        for field in dataclasses.fields(schema):
            default = field.default
            if default is dataclasses.MISSING:
                default = field.default_factory()
            setting = f'  --{field.name}={default!r}'
            lines.append(f'{setting:42}  {meanings.get(field.name, "")}'.rstrip())
    return '\n'.join(lines).strip()


def comments(schema):
    """{field name: the comment after it}, from the source of the dataclass and of its bases."""
    classes = [cls for cls in reversed(schema.__mro__) if dataclasses.is_dataclass(cls)]
    source = '\n'.join(inspect.getsource(cls) for cls in classes)
    return dict(re.findall(r'^    (\w+): .*?  # (.+)$', source, re.MULTILINE))
