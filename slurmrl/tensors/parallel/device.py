"""The device and the communication backend of this process, and the wait for its memory.

The exit of a process with tens of gigabytes of pinned memory takes up to a minute, and only then is
its GPU memory free. The next worker waits for it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from slurmrl import env, log
from slurmrl.errors import UnusableGpuError, UsageError
from slurmrl.tensors.parallel import gpu

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Setting without which cuBLAS may sum in another order in each run, and torch rejects matrix
products."""
COMPILER_DETERMINISTIC = "TORCHINDUCTOR_DETERMINISTIC", "1"
"""Setting for `torch.compile` in the user's code, if torch's compiler is not imported yet."""


logger = log.get(__name__)
WAIT_S: Final = 120.0
"""Maximum wait for memory that another process uses."""
LOOK_S: Final = 0.5
GIB: Final = 2**30
OWN_BYTES: Final = 2 * GIB
"""Bytes that exceed the CUDA context of a process that has not allocated anything."""
BUSY: Final = (2, 46)
"""Errors if not even a context can be made: cudaErrorMemoryAllocation, cudaErrorDevicesUnavailable.
"""


@dataclass(frozen=True)
class Accelerator:
    """Devices of tensors and backends that move them between ranks."""

    device: torch.device
    backend: str
    """Backend of torch.distributed: nccl or gloo."""


CPU = Accelerator(torch.device("cpu"), "gloo")
GPU = Accelerator(torch.device("cuda", 0), "nccl")
"""A worker sees only the devices of its attempt, so its GPU is always the first."""


def choose(gpus: int) -> Accelerator:
    """Return the device of a worker with ``gpus`` GPUs in the plan.

    Without GPUs in the plan it is the CPU, even on a machine with GPUs; otherwise it is never the
    CPU.

    Raises UsageError for a CPU build of torch: all hosts run the environment that submitted, so no
    other start would do better. Raises UnusableGpuError, with torch's reason, if something else is
    missing (driver, device), perhaps only on this host.
    """
    if gpus == 0:
        return CPU
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise UsageError(
            f"torch {torch.__version__} is built for CPUs only, and the workers need GPUs: install "
            "a CUDA build ('scripts/setup --torch cuda', or see pytorch.org/get-started), or set "
            "cluster.gpus_per_worker: 0"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.get_device_properties(GPU.device)
    except (RuntimeError, AssertionError) as error:
        raise _unusable(error) from error
    return GPU


def _unusable(error: BaseException) -> UnusableGpuError:
    """Return the error.

    Its message names no host and no device, so that the same problem on two hosts gives the same
    message (see `workers.master.futility`).
    """
    reason = " ".join(str(error).split())
    build = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    return UnusableGpuError(f"{reason} [{build}, driver {gpu.driver_version() or 'not loaded'}]")


def pending_error() -> RuntimeError | None:
    """Return the error of this process's GPU, if any.

    CUDA reports it from every call, but libraries translate it
    (``CUBLAS_STATUS_EXECUTION_FAILED``). This waits for no kernel.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:
        return error
    return None


def describe_gpu() -> str:
    """Return the name and UUID of this process's GPU: ``GPU 3 (NVIDIA H100, GPU-1f…)``.

    The UUID is needed because an index may mean another GPU in another container. This works even
    for a failed GPU.
    """
    number = f"GPU {env.VISIBLE_DEVICES.get()}".rstrip()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return number
    try:
        known = torch.cuda.get_device_properties(GPU.device)  # cached by `choose`
    except RuntimeError:
        return number
    return f"{number} ({known.name}, GPU-{known.uuid})"


def set_up(accelerator: Accelerator, *, threads: int, deterministic: bool) -> None:
    """Fix this process's thread count, device and kernel choice before the first computation.

    With ``deterministic`` torch refuses operations whose results vary between runs, which costs
    speed on GPUs. cuDNN attention is off: on Hopper torch prefers it for decoding, and it compiles
    a plan for each new length of the cache.
    """
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    if "torch._inductor.config" in sys.modules:  # otherwise this imports it, which takes a second
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        os.environ.setdefault(*CUBLAS_WORKSPACE)
        os.environ.setdefault(*COMPILER_DETERMINISTIC)
    if accelerator.device.type == "cuda":
        torch.cuda.set_device(accelerator.device)
    else:
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Let malloc keep up to 1 GiB of freed memory.

    Each step needs the same tensors again, and page faults would take 5 % of a small model's step
    time on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only glibc has this function
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def wait_until_free(
    device: torch.device,
    *,
    exclusive: bool,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until other processes use no memory of the GPU, up to `OWN_BYTES` or 5 %.

    After `WAIT_S`, raise UnusableGpuError, which names the processes, if the scheduler gave the GPU
    only to this job (``exclusive``); otherwise log the fact and return.
    """
    if torch.cuda.get_device_properties(device).is_integrated:
        return  # its memory is host memory
    deadline = clock() + WAIT_S
    warned = False
    while (held := _held(device)) is not None:
        if clock() >= deadline:
            problem = f"{held} after {WAIT_S:.0f} s; {_holders(device)}"
            if exclusive:
                raise UnusableGpuError(problem)
            logger.warning("%s; it is shared", problem)
            return
        if not warned:
            warned = True
            logger.warning("waiting up to %.0f s: %s; %s", WAIT_S, held, _holders(device))
        sleep(LOOK_S)


def _held(device: torch.device) -> str | None:
    """Describe the memory that other processes use; None if it is little."""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        busy = isinstance(error, torch.OutOfMemoryError) or getattr(error, "error_code", 0) in BUSY
        if not busy:
            raise
        return f"the GPU has no memory left for a CUDA context ({' '.join(str(error).split())})"
    own = max(OWN_BYTES, total // 20) + torch.cuda.memory_reserved(device)
    if total - free <= own:
        return None
    return f"{(total - free) / GIB:.1f} of the GPU's {total / GIB:.1f} GiB are in use"


def _holders(device: torch.device) -> str:
    uuid = torch.cuda.get_device_properties(device).uuid
    found = ", ".join(gpu.processes_on(f"GPU-{uuid}"))
    return f"processes on it: {found}" if found else "nvidia-smi shows no process on it"
