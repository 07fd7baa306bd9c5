"""
Where a process runs: its device and precision, the other processes beside it, and the signals it gets.

Nothing here knows of a program's settings: train.py, sample.py, evaluate.py and bench.py all start
with a Machine.
"""

import contextlib
import datetime
import os
import re
import signal
import sys
import time

import torch
import torch.distributed as dist

from lib.files import first_line, of_torchrun

# Exit status after a signal or lost output: the run was saved and can be resumed (EX_TEMPFAIL).
INTERRUPTED = 75

DTYPES = ('auto', 'float16', 'bfloat16', 'float32')
ATTENTION = ('auto', 'flash', 'cudnn')

# Dense half-precision tensor FLOP/s of one GPU, from the data sheets.
PEAK_FLOPS = {
    'B200': 2250e12,
    'H[12]00 NVL': 835e12,
    'H200': 989e12,
    'H100 PCIe': 756e12,
    'H100': 989e12,
    'A100': 312e12,
    'L40S': 362e12,
    'RTX 4090': 165e12,
    'RTX 3090': 71e12,
    'V100': 125e12,
    'T4': 65e12,
}


class Machine:
    """This process's rank, device and precision. Under torchrun, join() the other processes.

    device: auto, cuda, cuda:1, cpu or mps; auto is a GPU where there is one. Under torchrun, each
    process has a GPU of its own.
    dtype: auto, float16, bfloat16 or float32; auto is float16 on CUDA, else float32.
    tf32: on CUDA, let float32 products round their factors to TF32. Faster, but not for measurements.
    attention: on CUDA, the kernel of scaled_dot_product_attention where there is a choice; auto is
    torch's own (cuDNN's on an H100 or H200, flash on an A100). flash leaves out cuDNN's, which plans
    anew for each shape that it meets; cudnn leaves out flash.

    Raises ValueError for a device, dtype or kernel that is unknown, for a device that is not here,
    and for bfloat16 on a GPU that lacks it.
    """

    def __init__(self, device='auto', dtype='auto', tf32=False, attention='auto'):
        self.distributed = bool(os.environ.get('RANK'))  # under torchrun
        self.rank = of_torchrun('RANK')
        self.local_rank = of_torchrun('LOCAL_RANK')
        self.world_size = of_torchrun('WORLD_SIZE', 1)
        self.is_first = self.rank == 0

        self.device = find_device(device)
        self.kind = self.device.type
        if self.kind not in kinds_here():
            seen = ' and '.join(kinds_here())
            raise ValueError(f'device={device}: torch {torch.__version__} sees {seen} here')
        if self.kind == 'cuda':
            # torchrun's processes each have their own.
            if self.distributed or self.device.index is None:
                self.device = torch.device('cuda', self.local_rank)
            # Under torchrun that of the machine's last process, so that all of them refuse alike.
            last = max(self.device.index, of_torchrun('LOCAL_WORLD_SIZE', 1) - 1)
            gpus = torch.cuda.device_count()
            if last >= gpus:
                raise ValueError(f'device=cuda:{last}: torch sees {gpus} GPUs here, from cuda:0 on')
        for name, value, allowed in (('dtype', dtype, DTYPES), ('attention', attention, ATTENTION)):
            if value not in allowed:
                raise ValueError(f'{name}={value!r} is not one of {", ".join(map(repr, allowed))}')
        if dtype == 'auto':
            dtype = 'float16' if self.kind == 'cuda' else 'float32'
        self.dtype = dtype
        self.attention = attention

        if self.kind == 'cuda':
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision('high' if tf32 else 'highest')
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
            if dtype == 'bfloat16' and not has_bfloat16:
                raise ValueError(f'{self.name()} has no bfloat16; use --dtype=float16')
        self.choose_kernels()

    def warn(self, message):
        """Say it on stderr, on the first process only. Where nobody reads that, it is lost."""
        if self.is_first:
            with contextlib.suppress(OSError):
                print(message, file=sys.stderr)

    def choose_kernels(self):
        """Let the whole process attend with this Machine's kernels: the last one made decides."""
        if self.kind == 'cuda':
            torch.backends.cuda.enable_cudnn_sdp(self.attention != 'flash')
            torch.backends.cuda.enable_flash_sdp(self.attention != 'cudnn')
            # The compiler's cache on disk would hand out code that was compiled for other kernels.
            torch.compiler.config.cache_key_tag = f'attention={self.attention}'

    def join(self, backend='auto'):
        """Join the other processes, if this is one of several.

        backend: of torch.distributed; auto is nccl on CUDA, else gloo. Refuse settings before: if one
        process leaves, the others fail while they join.
        """
        if not self.distributed:
            return
        if backend == 'auto':
            backend = 'nccl' if self.kind == 'cuda' else 'gloo'
        dist.init_process_group(
            backend,
            device_id=self.device if backend == 'nccl' else None,
            timeout=datetime.timedelta(hours=1),  # one process alone verifies the dataset
        )

    def close(self):
        """Leave the other processes."""
        if self.distributed:
            dist.destroy_process_group()

    def moment(self):
        """When the device has done what it was given so far, for seconds_between()."""
        if self.kind != 'cuda':
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, began, ended):
        """The seconds between two moments, of which the second one is waited for."""
        if self.kind != 'cuda':
            return ended - began
        ended.synchronize()
        return began.elapsed_time(ended) / 1000

    def autocast(self):
        if self.dtype == 'float32':
            return contextlib.nullcontext()
        return torch.autocast(self.kind, dtype=getattr(torch, self.dtype))

    def scaler(self):
        return torch.amp.GradScaler(self.kind, enabled=self.dtype == 'float16')

    def sum(self, tensor):
        """The sum over all processes, in place."""
        if self.distributed:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag):
        """Whether any process has this flag set."""
        if not self.distributed:
            return flag
        return self.sum(torch.tensor(int(flag), device=self.device)).item() > 0

    def gather(self, value):
        """What each process gives. All wait for the last one."""
        if not self.distributed:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def together(self):
        """A context that stops all processes with the first error of any, so that none waits for one
        that has left."""
        error = None
        try:
            yield
        except (ValueError, OSError, FloatingPointError) as caught:
            error = caught
        errors = [error for error in self.gather(error) if error]
        if errors:
            raise errors[0] if self.is_first else SystemExit(1)  # one line is enough

    def name(self):
        """The GPU's name, or the kind of device."""
        if self.kind == 'cuda':
            return torch.cuda.get_device_name(self.device)
        return self.kind

    def attention_kernel(self, n_head, kv_heads, head_size, length):
        """The kernel that torch chooses for causal attention of this shape; None without CUDA."""
        if self.kind != 'cuda':
            return None
        if self.dtype == 'float32':
            kv_heads = n_head  # attend() of model.py repeats them
        shape = 1, n_head, length, head_size
        q = torch.empty(shape, dtype=getattr(torch, self.dtype), device=self.device)
        k = q[:, :kv_heads].contiguous()
        choice = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=kv_heads != n_head)
        return {0: 'math', 1: 'flash', 2: 'efficient', 3: 'cudnn'}.get(choice, 'unknown')

    def peak_flops(self):
        """Dense half-precision FLOP/s of one GPU; None where that is unknown or does not apply."""
        name = self.name()
        # MIG, Laptop, ...: a slice of a GPU, or not the one it sounds like.
        if self.dtype == 'float32' or re.search('MIG|Laptop|Ti$|D$', name):
            return None
        for pattern, flops in PEAK_FLOPS.items():
            if re.search(rf'\b{pattern}\b', name):
                return flops


def find_device(name):
    """torch's device of that name; of auto, the best that there is. ValueError for an unknown name."""
    if name != 'auto':
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise ValueError(f'device={name}: {first_line(error)}') from error
    return torch.device(kinds_here()[0])


def kinds_here():
    """The kinds of device that torch sees here, of those that programs use, the best one first."""
    sees = {
        'cuda': torch.cuda.is_available(),
        'mps': torch.backends.mps.is_available(),
        'cpu': True,
    }
    return [kind for kind, is_here in sees.items() if is_here]


def cores():
    """The cores that this process may use: a scheduler often gives it a few of the machine's. A limit on
    CPU time, such as docker's --cpus, is not seen."""
    if hasattr(os, 'sched_getaffinity'):  # not on a Mac
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def advise_on_memory(advice):
    """Turn running out of memory, and the lack of a compiler, into an OSError of one line, with advice."""
    try:
        yield
    except RuntimeError as error:
        if re.search(r'\bC(\+\+)? compiler', first_line(error)):
            advice = '(install one, or give --compile=False)'
        elif not is_out_of_memory(error):
            raise
        raise OSError(f'{first_line(error)} {advice}') from error


def is_out_of_memory(error):
    """Whether memory ran out: a GPU's, or a CPU's, for which torch has no type of error."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


class Signals:
    """Notes in `stop` that SIGTERM, SIGINT or SIGHUP came; the training loop finishes its step, saves
    and stops.

    closing: a contextlib.ExitStack at whose end the signals have their effects of before.
    """

    def __init__(self, closing):
        self.stop = False
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            closing.callback(signal.signal, number, signal.signal(number, self.receive))

    def receive(self, number, frame):
        self.stop = True
