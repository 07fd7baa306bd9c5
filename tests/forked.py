"""compare.py as a process whose trainings are forks of it, which have nothing to import."""

import multiprocessing
import os
import runpy
import signal
import sys
from types import SimpleNamespace

from conftest import ROOT

from comparison import launch


def run_program(path, words):
    """A program as from the command line; compare.py forks its trainings."""
    sys.argv = [path, *words]
    launch.subprocess = SimpleNamespace(Popen=Training, STDOUT=None)
    runpy.run_path(str(ROOT / path), run_name='__main__')


class Training:
    """What compare.py asks of a subprocess.Popen."""

    def __init__(self, words, env, stdout, **options):
        multiprocessing.current_process().daemon = False  # it may have children
        args = (words[2:], env, stdout.fileno())
        self.process = multiprocessing.get_context('fork').Process(target=train, args=args)
        self.process.start()
        self.terminate, self.wait = self.process.terminate, self.process.join

    def poll(self):
        return self.process.exitcode

    returncode = property(poll)


def train(words, env, log):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(env)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run_program('train.py', words)
