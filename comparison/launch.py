"""
Many trainings of train.py, side by side: one thread each on a CPU, one GPU (or --gpus) each elsewhere.

Every training is a process of its own with its output in <folder>/train.log. One that fails leaves
its reason in <folder>/failed.txt, and the others go on. One that is interrupted saves itself, and the
next start resumes it, because each is started with --init_from=auto.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from lib.files import locked, write_whole
from lib.machine import INTERRUPTED, cores, find_device
from lib.rundir import failure_file

ROOT = Path(__file__).parent.parent


@dataclass
class Job:
    """One training: the arguments of train.py, and the folder to which it writes."""

    arguments: list
    folder: Path
    process: subprocess.Popen | None = None
    slot: dict = field(default_factory=dict)  # one of find_slots()
    log_start: int = 0  # where this attempt begins in train.log


def command(arguments, gpus=1, python='python', program='train.py'):
    """The words of a shell command that trains with these arguments."""
    torchrun = ''
    if gpus > 1:
        # standalone: several of them on one machine must not share a port.
        torchrun = f'-m torch.distributed.run --standalone --nproc_per_node={gpus}'
    return [python, *torchrun.split(), program, *arguments]


def shell_line(arguments, device, gpus=1):
    """command() as a line for a shell, with the threads that find_slots() gives: other numbers of them
    round differently. device: where it trains; auto: what this machine has."""
    line = shlex.join(command(arguments, gpus))
    if gpus > 1 or find_device(device).type == 'cuda':
        return line
    return f'OMP_NUM_THREADS=1 {line}'


@contextlib.contextmanager
def ends_when_interrupted(note):
    """Around a program whose trainings save themselves: SIGTERM is as Ctrl-C, and after either, a note
    says how to go on. The exit status is train.py's."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(f'interrupted: {note}', file=sys.stderr)
        sys.exit(INTERRUPTED)


def find_slots(device, jobs=0, gpus=1):
    """The environments of trainings that may run at the same time, [{variable: value}].

    On GPUs, each has `gpus` of them; on a CPU each has one thread. jobs: how many; 0: as many as
    there are GPUs or cores; where there are more trainings than GPUs, several share one. Raises
    ValueError where a training asks for more GPUs than there are.
    """
    found = find_device(device)
    kind = found.type
    visible = visible_gpus() if kind == 'cuda' and found.index is None else []
    if not visible:
        if gpus > 1:
            raise ValueError(f'gpus={gpus}, but torch sees no GPU for device={device}')
        at_a_time = cores() if kind == 'cpu' else 1
        return [{'OMP_NUM_THREADS': '1'}] * (jobs or at_a_time)

    if gpus > len(visible):
        raise ValueError(f'gpus={gpus}, but torch sees {len(visible)} of them')
    slots = []
    for start in range(0, len(visible) - gpus + 1, gpus):
        slots.append({'CUDA_VISIBLE_DEVICES': ','.join(visible[start : start + gpus])})
    return [slots[i % len(slots)] for i in range(jobs or len(slots))]


def visible_gpus():
    """What CUDA_VISIBLE_DEVICES may list, as strings."""
    import torch

    listed = os.environ.get('CUDA_VISIBLE_DEVICES')
    count = torch.cuda.device_count()  # 0 where there is none
    names = listed.split(',') if listed else [str(i) for i in range(count)]
    return names[:count]


def launch(jobs, slots, gpus, tick):
    """Train until no job is left.

    jobs: a function that gives those still to be trained, most urgent first. It is called again
    after each training, because the next may depend on its result; none is tried twice.
    tick(running): called each second with the jobs under way.

    Returns the folders of the jobs that were started. Ctrl-C (KeyboardInterrupt) lets every training save
    itself, and is raised again.
    """
    running, attempts, free = [], set(), list(slots)

    def untried():
        return [job for job in jobs() if job.folder not in attempts]

    queue, held = untried(), set()
    try:
        while queue or running:
            # Others may train in some folders, such as what a killed compare.py has left. When they leave,
            # it may be decided anew what is to be trained.
            was_held, held = held, {job.folder for job in queue if is_held(job.folder)}
            for folder in held - was_held:
                print(
                    f'\nnote: waiting for another process that trains in {folder}', file=sys.stderr
                )
            if was_held - held:
                queue = untried()
                continue
            for job in [job for job in queue if job.folder not in held][: len(free)]:
                queue.remove(job)
                attempts.add(job.folder)
                # The GPU on which the fewest are: there may be more slots than GPUs.
                job.slot = min(free, key=[other.slot for other in running].count)
                free.remove(job.slot)
                running.append(job)  # first, so that it is stopped whenever Ctrl-C comes
                start(job, gpus)
            time.sleep(SECONDS)
            ended = [job for job in running if job.process.poll() is not None]
            for job in ended:
                running.remove(job)
                free.append(job.slot)
                record(job)
            if ended or not running:
                queue = untried()
            tick(running)
        return attempts
    except BaseException:
        stop(running)
        raise


SECONDS = 1.0  # between two looks at the trainings


def is_held(folder):
    """Whether another process is training in a folder, such as one that a killed compare.py has left."""
    try:
        with locked(folder, 'training in') if folder.exists() else contextlib.nullcontext():
            return False
    except OSError:
        return True


# Where a cluster says which process of which job this one is. A training is a job of its own.
OF_ANOTHER_JOB = re.compile('(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_|TORCHELASTIC_|PET_')


def start(job, gpus):
    environment = {name: os.environ[name] for name in os.environ if not OF_ANOTHER_JOB.match(name)}
    job.folder.mkdir(parents=True, exist_ok=True)
    failure_file(job.folder).unlink(missing_ok=True)
    # A file, because a training that writes to a pipe would die with this process. A session of
    # its own, so that Ctrl-C in a terminal reaches it once, from here.
    with open(job.folder / 'train.log', 'a') as log:
        job.log_start = log.tell()
        job.process = subprocess.Popen(
            command(job.arguments, gpus, sys.executable, str(ROOT / 'train.py')),
            env=environment | job.slot,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(running):
    """Let each training save itself, and wait for it."""
    started = [job for job in running if job.process]
    for job in started:
        job.process.terminate()
    for job in started:
        job.process.wait()
        record(job)


def record(job):
    """Write down why a training failed; an interrupted one has not failed."""
    status = job.process.returncode
    if status in (0, INTERRUPTED, -signal.SIGTERM):
        return
    if status < 0:
        memory = ', perhaps for lack of memory' if status == -signal.SIGKILL else ''
        reason = f'killed by {signal.Signals(-status).name}{memory}'
    else:
        reason = message_of(job) or f'exit status {status} without a message'
        if 'SignalException' in reason:  # torchrun was interrupted
            return
    free = shutil.disk_usage(job.folder).free
    if free < FULL:
        reason += f'; its disk has {free:,} bytes left'
    try:
        write_whole(failure_file(job.folder), reason + '\n')
    except OSError as error:  # a full disk; the other trainings go on
        print(f'\n{job.folder.name}: {reason} ({error})', file=sys.stderr)


FULL = 2**20  # bytes; with fewer left, a disk is worth a word


def message_of(job):
    """What a training says of its end: its error, or the last line of a traceback; '' without any."""
    output = (job.folder / 'train.log').read_bytes()[job.log_start :]
    lines = output.decode(errors='replace').strip().splitlines()
    for pattern in MESSAGES:
        found = [match[1] for line in lines if (match := re.match(pattern, line))]
        if found:
            return found[-1][:300]
    return ''


# Where a training says why it ended: its own error; in torchrun's summary below, the signal of the process
# that died first, which is the last one there; what Python says of an error, but torchrun's own.
MESSAGES = (
    r'error: (.*)',
    r'.*: (Signal \d+ \(\w+\)) received by PID',
    r'(?:\[rank\d+\]: )?((?!.*ChildFailed)[\w.]+(?:Error|Exception|Exit)\b.*)',
)


# --- progress -------------------------------------------------------------------------------------


def last_step(folder):
    """The last step that a run's log tells of; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in reversed((folder / 'log.jsonl').read_bytes().splitlines()):
            with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
                return int(json.loads(line)['step'])
    return 0
