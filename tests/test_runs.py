"""runs/*.sh without a GPU and without training: what they would call."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from test_readme import parse

# In place of each program: notes what it is called with.
STUB = f"""#!{sys.executable} -S
import json, os, sys
with open(os.environ['CALLS'], 'a') as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + '\\n')
"""


@pytest.mark.parametrize('script', sorted(ROOT.glob('runs/*.sh')), ids=lambda path: path.name)
def test_every_command_is_one_that_its_program_takes(script, tmp_path, monkeypatch):
    (tmp_path / 'runs').mkdir()
    copy = shutil.copy(script, tmp_path / 'runs')
    programs = tmp_path / '.venv/bin'  # first in the script's PATH
    programs.mkdir(parents=True)
    for name in ('make', 'python', 'torchrun'):
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    subprocess.run(['bash', '-n', copy], check=True)
    environment = {'PATH': os.environ['PATH'], 'CALLS': str(tmp_path / 'calls')}
    subprocess.run(['bash', copy], env=environment, check=True)

    setup, *commands = map(json.loads, (tmp_path / 'calls').read_text().splitlines())
    assert setup == ['make', 'setup'] and len(commands) >= 3
    monkeypatch.chdir(ROOT)
    for _, *words in commands:
        while words[0].startswith('--'):
            words.pop(0)  # torchrun's own
        parse(words, monkeypatch)
