"""The device and the communication backend of this process."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Without it cuBLAS may add in another order in each run, and torch refuses matrix products."""


@dataclass(frozen=True)
class Accelerator:
    """Where tensors live and what moves them between ranks."""

    device: torch.device
    backend: str
    """Backend of torch.distributed: nccl or gloo."""


def choose() -> Accelerator:
    """The first visible GPU with NCCL, else the CPU with gloo.

    A worker sees the devices of its attempt only, so its own GPU is always the first.
    """
    if torch.cuda.is_available():
        return Accelerator(torch.device("cuda", 0), "nccl")
    return Accelerator(torch.device("cpu"), "gloo")


def set_up(accelerator: Accelerator, *, threads: int, deterministic: bool) -> None:
    """Fix this process's thread count, device and kernel choice before the first computation.

    With ``deterministic`` torch refuses operations whose results vary between runs, which costs
    speed on GPUs. cuDNN attention is off: on Hopper torch prefers it for decoding, and it compiles
    a plan for each new length of the cache.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        os.environ.setdefault(*CUBLAS_WORKSPACE)
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
