"""
Settings = defaults + config files + command line, in this order; the last one wins.

$ python train.py config/resformer_82m.py config/seq_8192.py --batch_size=4 --learning_rate=3e-4

A program describes its settings as dataclasses. The comment behind a field is its help text, so a new field (of
GPTConfig, say) is a checked and documented setting at once. A config file is plain Python that assigns values; to
build on another one, `from config.vanilla_82m import *` and change a line.
"""
import ast
import contextlib
import dataclasses
import difflib
import inspect
import math
import os
import re
import runpy
import sys
import traceback
import types
import typing


def configure(*schemas, argv=None):
    """Return one instance of each dataclass in `schemas`, with values from the files and --key=value pairs in `argv`
    (default: the command line). Raises ValueError or OSError for a key, type or file that does not fit; --help prints
    and exits. A dataclass's own __post_init__ may refuse further."""
    argv = sys.argv[1:] if argv is None else argv
    fields = {f.name: f for schema in schemas for f in dataclasses.fields(schema)}
    hints = {name: hint for schema in schemas for name, hint in typing.get_type_hints(schema).items()}
    if '--help' in argv or '-h' in argv:
        print(help_text(schemas))
        sys.exit(0)

    values = {}
    for argument in argv:
        if not argument.startswith('--'):
            for key, value in read_config(argument).items():
                known(key, fields, argument)
                values[key] = convert(value, hints[key], f'{key} in {argument}')
    for argument in argv:
        if argument.startswith('--'):
            key, equals, text = argument[2:].partition('=')
            known(key, fields, 'command line')
            if not equals:
                raise ValueError(f'{argument} has no value: write --{key}=VALUE')
            values[key] = convert(parse(text), hints[key], f'--{key}', text)
    return [s(**{f.name: values[f.name] for f in dataclasses.fields(s) if f.name in values}) for s in schemas]


def read_config(path):
    """The values a config file assigns: its public names, without modules and functions."""
    if not os.path.isfile(path):
        hint = f'; for a setting, write --{path}' if '=' in path else ''
        raise FileNotFoundError(f'no config file {path!r}{hint}')
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:  # whatever a user's file may raise, it is that file's mistake
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError):
            places.append((error.filename, error.lineno))
        folder = os.path.dirname(os.path.abspath(path))  # with the files that it imports
        where = [f'{os.path.relpath(name)}, line {line}' for name, line in places
                 if name and os.path.isfile(name) and os.path.dirname(os.path.abspath(name)) == folder] or [path]
        message = ' '.join(str(error).splitlines())
        raise ValueError(f'{where[-1]}: {type(error).__name__}: {message}') from error
    return {k: v for k, v in names.items() if not k.startswith('_') and not isinstance(v, types.ModuleType)
            and not callable(v)}


def known(key, fields, where):
    if key not in fields:
        close = difflib.get_close_matches(key, fields, n=1)
        hint = f'; did you mean {close[0]!r}?' if close else '; --help lists them all'
        raise ValueError(f'unknown setting {key!r} ({where}){hint}')


def parse(text):
    """A command-line value: a Python literal where it is one, else the text itself."""
    try:
        return {'true': True, 'false': False}[text] if text in ('true', 'false') else ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # TypeError: {[]: 1}
        return text


def convert(value, hint, where, text=None):
    """`value` as the type `hint`, or ValueError. `text` is what was typed, for settings that are strings."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in allowed:
        return None
    for kind in allowed:
        if kind is str and (text is not None or isinstance(value, str)):
            return value if isinstance(value, str) else text
        if isinstance(value, bool):  # an int to Python, but not to a person
            if kind is bool:
                return value
        elif isinstance(value, float) and not math.isfinite(value):  # 1e999
            break
        elif kind is int and isinstance(value, float) and value.is_integer():  # 2e6
            return int(value)
        elif kind is float and isinstance(value, int) and abs(value) < 1e308:
            return float(value)
        elif kind is tuple and isinstance(value, list):
            return tuple(value)
        elif isinstance(value, kind):
            return value
    names = ' or '.join('None' if k is type(None) else k.__name__ for k in allowed)
    hint = f'; write ({value!r},)' if tuple in allowed and isinstance(value, int | float) else ''
    raise ValueError(f'{where} must be {names}, not {value!r}{hint}')


def help_text(schemas):
    lines = [f'usage: python {os.path.basename(sys.argv[0])} [config/file.py ...] [--key=value ...]']
    for schema in schemas:
        lines += ['', f'{schema.__name__}:']
        meanings = comments(schema)
        for f in dataclasses.fields(schema):
            default = f.default_factory() if f.default is dataclasses.MISSING else f.default
            lines.append(f'  --{f.name}={default!r}'.ljust(42) + f'  {meanings.get(f.name, "")}'.rstrip())
    return '\n'.join(lines)


def comments(schema):
    """{field name: the comment behind it}, from the source of the dataclass and of those it builds on."""
    sources = [inspect.getsource(cls) for cls in reversed(schema.__mro__) if dataclasses.is_dataclass(cls)]
    return dict(re.findall(r'^    (\w+): .*?  # (.+)$', '\n'.join(sources), re.MULTILINE))


@contextlib.contextmanager
def one_line_errors(*kinds, everywhere=False):
    """Turn a user's mistake (an exception of these kinds) into exit status 1 and one line on stderr: from the first
    process of each machine where all make the same, from any process with `everywhere`."""
    try:
        yield
    except kinds as error:
        sys.exit(f'error: {error}' if everywhere or os.environ.get('LOCAL_RANK', '0') == '0' else 1)
