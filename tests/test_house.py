"""The house: who may import whom, and that a name has one meaning."""

import ast
import graphlib
import re
import sys

import pytest
from conftest import ROOT

# The packages that a file and all that it imports need as soon as it is imported.
NEEDED = {
    'configurator': set(),
    'lib.logs': set(),  # a log can be read where there is no torch
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


# --- names ---------------------------------------------------------------------------------------


def test_a_name_at_the_top_of_a_file_has_one_meaning():
    files = {}
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != 'main':
                files.setdefault(node.name, []).append(name)
    several = {name: where for name, where in files.items() if len(where) > 1}
    assert not several, f'rename until grep "def NAME" has one answer: {several}'
