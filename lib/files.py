"""Files that are written whole or not at all, folders to which one process at a time writes, and mistakes
that are one line."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

# The version of the format of data/<dataset>/meta.json and of the token files beside it.
# prepare_slimpajama.py, which imports no torch, writes them, and lib/data.py reads them.
DATASET_FORMAT = 1

# Validation tokens of a domain: on fewer, its loss is largely chance.
ENOUGH = 10_000


def is_plain(name):
    """Whether a name can stand in a file's name, a terminal, a table, a page and a picture."""
    return name.isprintable() and not set(name) & set('/\\|$<>')


def printable(text):
    """A text as one line, all of whose characters can be seen: where a stranger's file has a line end or
    an escape code, a report would otherwise say what the file says."""
    return ''.join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def is_domain(name):
    """Whether a domain can be called so: `mean` stands beside the domains in logs and results."""
    return is_plain(name) and name != 'mean'


def caution_about(splits):
    """What must be known of a dataset, {split: {domain: its entry in meta.json}}, some of whose domains
    have fewer validation tokens than ENOUGH, or none; None where each has enough."""
    validation = splits['validation']
    untested = dict.fromkeys(splits['train'], {'tokens': 0})
    tokens = {name: each['tokens'] for name, each in {**untested, **validation}.items()}
    few = [f'{name} ({number:,})' for name, number in tokens.items() if number < ENOUGH]
    if few:
        share = f'Each domain that has any is {1 / len(validation):.0%} of the loss by which runs are judged.'
        return f'Fewer than {ENOUGH:,} validation tokens: {", ".join(few)}. {share}'


@contextlib.contextmanager
def whole_file(path):
    """A binary file to write, which becomes `path` at the end: completely or not at all, even when the
    power fails.

    The temporary file beside it always has the same name, `<name>.tmp`, so that one that a killed
    process left is overwritten the next time. Only one process at a time may write to a path: see
    locked().
    """
    path = Path(path)
    temporary = path.with_name(f'{path.name}.tmp')
    try:
        with open(temporary, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        # A full disk should not hold half a file as well.
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def named(path):
    """Let the error of a write that fails name its file: that of a full disk does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_whole(path, data):
    """Write str or bytes to `path` as whole_file() does. Its folder is made if it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with named(path), whole_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def as_json(value):
    """A value as it comes back from a JSON file: lists for tuples, None for what is not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def json_text(value):
    """A value as JSON for people to read, too."""
    return json.dumps(value, indent=1) + '\n'


def write_json(path, value):
    write_whole(path, json_text(value))


def sync_folder(folder):
    """Put a folder's names on the disk: a rename may otherwise be lost when the power fails."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # old SMB, VirtualBox and FUSE know it of files alone
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(folder, activity, setting='--out_dir', shared=False):
    """Hold a folder, or a file, during a `with` block, at most until this process ends, however it ends. Several
    processes may hold one that is shared.

    If another process holds it, raises OSError: `another process is {activity} {folder}; choose
    another {setting}`. A file system without locks gets a warning. On NFS, Linux keeps the lock of a
    folder within a machine: processes of another one are not seen.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        message = f'another process is {activity} {folder}; choose another {setting}'
        raise OSError(message) from None
    except OSError as error:
        # Some network file systems have no locks.
        warning = f'warning: cannot lock {folder} ({error}); let no other process write to it'
        print(warning, file=sys.stderr)

    try:
        yield
    finally:
        os.close(handle)


def sha256_of(path):
    """The hexadecimal sha256 of a file."""
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


# --- mistakes, in one line -----------------------------------------------------------------------


@contextlib.contextmanager
def unreadable(problem, advice=''):
    """Turn whatever contents of a file that are not as they should be raise into a ValueError of one
    line: what is wrong with which file, the error, and what to do."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # The message of a KeyError is nothing but the key.
        reason = f'{type(error).__name__}: {error}'
        raise ValueError(f'{problem} ({reason}){advice and "; "}{advice}') from error


def first_line(error):
    """The first line of an exception's message, or the name of its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def one_line_errors(everywhere=False, interrupts=True):
    """Turn a mistake of the user's, a package that is missing, or a run that diverged, into one line on
    stderr and exit status 1.

    Where all processes make the same mistake, only the first of each machine prints it; with
    `everywhere`, each one does. interrupts: Ctrl-C is status 130, without a word. A closed pipe is the
    status of SIGPIPE in a shell, 141, without a word.
    """
    if hasattr(sys.stdout, 'reconfigure'):  # it may be an io.StringIO
        # A terminal that knows ASCII only shows a question mark for every other character.
        sys.stdout.reconfigure(errors='replace')
    try:
        try:
            yield
        except ModuleNotFoundError as error:
            # A module that a package here lacks is a mistake in an import, such as a config's.
            if error.name and find_spec(error.name.partition('.')[0]):
                raise
            raise OSError(f'{error} (packages: pip install -r requirements-dev.txt)') from error
        finally:
            if sys.stdout:  # None where it was closed from the start
                sys.stdout.flush()
    except BrokenPipeError:  # nobody reads it any more, as after `| head`
        mute(sys.stdout)
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        if not interrupts:
            raise
        sys.exit(130)
    except (ValueError, OSError, FloatingPointError) as error:
        message = printable(f'error: {error}')
        # Also where this process is silent: torchrun names the one that ends first.
        repeat_below(message)
        sys.exit(message if everywhere or of_torchrun('LOCAL_RANK') == 0 else 1)


def of_torchrun(name, default=0):
    """RANK, LOCAL_RANK, WORLD_SIZE or LOCAL_WORLD_SIZE. A process without a RANK is alone, whatever else a
    scheduler has set; some set these to nothing."""
    value = os.environ.get(name) if os.environ.get('RANK') else ''
    return int(value or default)


def repeat_below(message):
    """Under torchrun, let its summary, which follows its own traceback, end with a message."""
    path = os.environ.get('TORCHELASTIC_ERROR_FILE')
    if path:
        facts = {'py_callstack': message, 'timestamp': int(time.time())}
        Path(path).write_text(json.dumps({'message': {'extraInfo': facts}}))


def mute(stream):
    """Let what is written to a stream from now on go nowhere, what is buffered included."""
    with open(os.devnull, 'w') as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
