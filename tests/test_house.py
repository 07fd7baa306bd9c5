"""The house: who may import whom, and how long and how dense the code may be."""

import ast
import dataclasses
import graphlib
import io
import re
import sys
import tokenize

import pytest
from conftest import ROOT

from model import GPTConfig

# The packages that a file and all that it imports need as soon as it is imported.
NEEDED = {
    'configurator': set(),
    'comparison.logs': set(),  # a log can be read where there is no torch
    'model': {'torch'},
    'train': {'torch', 'numpy'},
}

# From which folders the files of a folder may import, besides the root and their own. Files of the root
# itself import from folders as named here, and from lib.
FOLDERS = {
    'lib': set(),
    'hub': {'lib'},
    'comparison': {'lib'},
    'paper': {'lib', 'comparison'},
}
FOLDERS_OF_ROOT = {
    'bench': {'hub'},  # the peer that it times is transformers' Llama
    'compare': {'comparison'},
}

# transformers itself runs this file, in a folder where model.py stands beside it.
MODELING = 'hub.modeling_nanoresformer'


def module_name(path):
    return '.'.join(path.relative_to(ROOT).with_suffix('').parts)


PROGRAM = [*ROOT.glob('*.py'), *(p for folder in FOLDERS for p in ROOT.glob(f'{folder}/*.py'))]
TESTS = [*ROOT.glob('tests/*.py')]
TREES = {module_name(path): ast.parse(path.read_text()) for path in PROGRAM}


def imports(nodes, relative=False):
    """The modules that statements import: ours by their names, of packages the first word."""
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert relative or not node.level, 'write imports with the full name'
            for alias in node.names:
                name = f'{node.module}.{alias.name}'
                modules.add(name if name in TREES else node.module)
    return {name if name in TREES else name.partition('.')[0] for name in modules}


def ours(name):
    """Our modules that a module imports, in functions, too."""
    return imports(ast.walk(TREES[name]), relative=name == MODELING) & set(TREES)


# --- imports -------------------------------------------------------------------------------------


def test_no_file_imports_itself_by_way_of_others():
    # A CycleError names the files that import each other.
    graphlib.TopologicalSorter({name: ours(name) for name in TREES}).prepare()


@pytest.mark.parametrize('name', sorted(TREES))
def test_no_import_goes_back_up(name):
    folder = name.rpartition('.')[0]
    allowed = {'', folder, *FOLDERS.get(folder, ())}
    if not folder:
        allowed |= {'lib', *FOLDERS_OF_ROOT.get(name, ())}
    above = {other for other in ours(name) if other.rpartition('.')[0] not in allowed}
    assert not above, f'{name} imports {above}'


@pytest.mark.parametrize('name', NEEDED)
def test_the_core_needs_only_the_packages_that_the_design_allows(name):
    files, packages, waiting = set(), set(), {name}
    while waiting:
        files |= waiting
        modules = set().union(*(imports(TREES[file].body) for file in waiting))
        packages |= modules - set(TREES) - set(sys.stdlib_module_names)
        waiting = modules & set(TREES) - files
    assert packages <= NEEDED[name]


def test_every_package_that_is_imported_is_in_a_file_of_requirements():
    packages = set()
    for name in ('requirements.txt', 'requirements-dev.txt'):
        packages |= set(re.findall(r'^(\w+)==', (ROOT / name).read_text(), re.MULTILINE))
    for name, tree in TREES.items():
        modules = imports(ast.walk(tree), relative=name == MODELING)
        missing = modules - set(TREES) - set(sys.stdlib_module_names) - packages
        assert not missing, f'{name} imports {missing}, which no file of requirements names'


# --- form ----------------------------------------------------------------------------------------


def test_model_reads_from_the_idea_down():
    """A reader of model.py meets tensors above line 160 and ResFormer's mixing above line 185."""
    lines = (ROOT / 'model.py').read_text().splitlines()
    (first,) = (n for n, line in enumerate(lines, 1) if 'self.proj(x)' in line)
    (mixing,) = (n for n, line in enumerate(lines, 1) if line.strip().startswith('mixed = '))
    assert first < 160 and mixing < 185
    assert [n for n, line in enumerate(lines, 1) if 'ResFormer' in line][-1] == mixing
    assert len(dataclasses.fields(GPTConfig)) <= 34


def test_no_method_of_the_forward_path_is_over_20_lines():
    for kind in ('Part', 'Attention', 'MLP', 'Block', 'GPT'):
        (body,) = (n.body for n in TREES['model'].body if getattr(n, 'name', '') == kind)
        for node in body:
            is_method = isinstance(node, ast.FunctionDef) and not node.name.startswith('__')
            if not is_method or node.name in ('generate', 'init_weights'):
                continue
            inner = node.body[1:] if ast.get_docstring(node) else node.body
            length = node.end_lineno - inner[0].lineno + 1
            assert length <= 20, f'{kind}.{node.name} has {length} lines'


def test_a_name_at_the_top_of_a_file_has_one_meaning():
    files = {}
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != 'main':
                files.setdefault(node.name, []).append(name)
    several = {name: where for name, where in files.items() if len(where) > 1}
    assert not several, f'rename until grep "def NAME" has one answer: {several}'


LAYOUT = {
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.COMMENT,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def test_no_function_is_longer_than_90_lines():
    long = []
    for path in PROGRAM + TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 90:
                long.append(f'{path.relative_to(ROOT)}: {node.name}')
    assert not long, 'a function does one thing and fits a screen: ' + ', '.join(long)


def test_the_code_has_at_most_8_and_a_half_tokens_a_line():
    tokens = lines = 0
    for path in PROGRAM + TESTS:
        source = path.read_text()
        lines += len(source.splitlines())
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            tokens += token.type not in LAYOUT
    assert tokens / lines <= 8.5
