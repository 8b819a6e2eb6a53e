"""The device and the communication backend of this process, and the wait for free GPU memory.

A process with tens of gigabytes of pinned memory takes up to a minute to exit. The process frees
its GPU memory only at the end, so the next worker waits.
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
"""Variable that fixes the order in which cuBLAS sums. Without this variable, torch's deterministic
mode rejects matrix products."""
COMPILER_DETERMINISTIC = "TORCHINDUCTOR_DETERMINISTIC", "1"
"""Variable for `torch.compile` in the user's code; torch's compiler reads it during import."""


logger = log.get(__name__)
WAIT_S: Final = 120.0
"""Maximum wait for memory that another process uses, in seconds."""
LOOK_S: Final = 0.5
GIB: Final = 2**30
OWN_BYTES: Final = 2 * GIB
"""Upper bound of the CUDA context of a process that has not allocated anything."""
BUSY: Final = (2, 46)
"""Error codes if CUDA cannot make a context: cudaErrorMemoryAllocation,
cudaErrorDevicesUnavailable."""


@dataclass(frozen=True)
class Accelerator:
    """A device of tensors, and the backend that moves them between ranks."""

    device: torch.device
    backend: str
    """Backend of torch.distributed: nccl or gloo."""


CPU = Accelerator(torch.device("cpu"), "gloo")
GPU = Accelerator(torch.device("cuda", 0), "nccl")
"""Device of a worker with a GPU. The worker sees only its own devices, so the index is 0."""


def choose(gpus: int) -> Accelerator:
    """Return the device of a worker with ``gpus`` GPUs in the plan.

    Without GPUs in the plan, the device is the CPU, even on a host with GPUs.

    Raises UsageError for a CPU build of torch, because all hosts run the same environment and
    another start would also fail. Raises UnusableGpuError, with torch's reason, if the driver or a
    device is missing, perhaps only on this host.
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
    """Return the exception for a GPU that cannot be used.

    The message does not name a host or a device, so that a problem gives the same message on two
    hosts (see `workers.master.futility`).
    """
    reason = " ".join(str(error).split())
    build = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    return UnusableGpuError(f"{reason} [{build}, driver {gpu.driver_version() or 'not loaded'}]")


def pending_error() -> RuntimeError | None:
    """Return the error of this process's GPU; None if there is none.

    CUDA reports the error from every call, but libraries translate it, for example to
    ``CUBLAS_STATUS_EXECUTION_FAILED``. The function does not wait for kernels.
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

    The UUID is needed, because an index may mean another GPU in another container. The function
    works even if the GPU has failed.
    """
    number = f"GPU {env.VISIBLE_DEVICES.get()}".rstrip()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return number
    try:
        known = torch.cuda.get_device_properties(GPU.device)  # `choose` has cached the result.
    except RuntimeError:
        return number
    return f"{number} ({known.name}, GPU-{known.uuid})"


def set_up(accelerator: Accelerator, *, threads: int, deterministic: bool) -> None:
    """Fix this process's thread count, device and kernel choice before the first computation.

    With ``deterministic``, torch rejects operations whose results vary between runs, which costs
    speed on GPUs. Attention of cuDNN is off. On Hopper, torch would prefer cuDNN for decoding, and
    cuDNN compiles a plan for each new length of the cache.
    """
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # If the module is not loaded, the call would import it, which takes a second.
    if "torch._inductor.config" in sys.modules:
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

    Each step needs tensors of the same sizes, and page faults would take 5 % of a small model's
    step time on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # Only glibc has this function.
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def wait_until_free(
    device: torch.device,
    *,
    exclusive: bool,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until other processes use at most `OWN_BYTES` or 5 % of the GPU's memory.

    After `WAIT_S`, log a warning and return. If the scheduler gave the GPU only to this job
    (``exclusive``), raise UnusableGpuError instead, which names the processes.
    """
    if torch.cuda.get_device_properties(device).is_integrated:
        return  # The GPU shares the host's memory.
    deadline = clock() + WAIT_S
    warned = False
    while (held := _held(device)) is not None:
        if clock() >= deadline:
            problem = f"{held} after {WAIT_S:.0f} s; {_holders(device)}"
            if exclusive:
                raise UnusableGpuError(problem)
            logger.warning("%s; the GPU is shared, so slurmrl uses it anyway", problem)
            return
        if not warned:
            warned = True
            logger.warning("waiting up to %.0f s: %s; %s", WAIT_S, held, _holders(device))
        sleep(LOOK_S)


def _held(device: torch.device) -> str | None:
    """Return a description of the memory that other processes use; None if it is little."""
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
