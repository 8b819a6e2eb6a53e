"""The device and the communication backend of this process."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass

import torch

from slurmrl import env
from slurmrl.errors import UnusableGpuError, UsageError
from slurmrl.tensors.parallel.driver import driver_version

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Without it cuBLAS may add in another order in each run, and torch refuses matrix products."""
COMPILER_DETERMINISTIC = "TORCHINDUCTOR_DETERMINISTIC", "1"
"""For a `torch.compile` of the user's code, where torch's compiler is not imported yet."""


@dataclass(frozen=True)
class Accelerator:
    """Where tensors live and what moves them between ranks."""

    device: torch.device
    backend: str
    """Backend of torch.distributed: nccl or gloo."""


CPU = Accelerator(torch.device("cpu"), "gloo")
GPU = Accelerator(torch.device("cuda", 0), "nccl")
"""A worker sees the devices of its attempt only, so its own GPU is always the first."""


def choose(gpus: int) -> Accelerator:
    """Return the device of a worker with ``gpus`` GPUs in the plan. Without any it is the CPU, even
    on a machine with GPUs; with one it is never the CPU.

    Raises UsageError for a CPU build of torch: all hosts run the environment that submitted, so no
    other start would do better. Whatever else is missing (driver, device) may be missing on this
    host only: UnusableGpuError, with torch's own reason.
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
    """Return the error. Its text names no host and no device, so that the same lack on two hosts
    reads the same (see `workers.master.judgement`)."""
    reason = " ".join(str(error).split())
    build = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    return UnusableGpuError(f"{reason} [{build}, driver {driver_version() or 'not loaded'}]")


def pending_error() -> RuntimeError | None:
    """Return the error that this process's GPU has run into, if any. CUDA reports it from every
    call, but libraries translate it (``CUBLAS_STATUS_EXECUTION_FAILED``). This waits for no
    kernel."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:
        return error
    return None


def describe_gpu() -> str:
    """Return the name and UUID of this process's GPU, ``GPU 3 (NVIDIA H100, GPU-1f…)``: the index
    alone means another one in another container. Works on a GPU that failed."""
    number = f"GPU {env.VISIBLE_DEVICES.get()}".rstrip()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return number
    try:
        known = torch.cuda.get_device_properties(GPU.device)  # kept since `choose`
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
    if "torch._inductor.config" in sys.modules:  # else that imports it, which takes a second
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
    """Let malloc keep up to 1 GiB of freed memory. Each step needs the same tensors again, and
    faulting their pages in takes a twentieth of a small model's step time on a CPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc; elsewhere memory is managed as it is
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
