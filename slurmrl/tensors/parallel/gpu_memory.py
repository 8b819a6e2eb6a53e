"""The memory of this process's GPU that others hold.

The exit of a process with tens of gigabytes of pinned memory takes up to a minute, and only then is
its GPU memory free. The next worker waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from slurmrl import log
from slurmrl.errors import UnusableGpuError
from slurmrl.tensors.parallel import driver

logger = log.get(__name__)

WAIT_S: Final = 120.0
"""Longest wait for memory that another process holds."""
LOOK_S: Final = 0.5
GIB: Final = 2**30
OWN_BYTES: Final = 2 * GIB
"""More than the CUDA context of this process takes, before it has allocated anything."""
BUSY: Final = (2, 46)
"""cudaErrorMemoryAllocation, cudaErrorDevicesUnavailable: not even a context could be made."""


def wait_until_free(
    device: torch.device,
    *,
    exclusive: bool,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once other processes hold no memory of the GPU, to within `OWN_BYTES` or 5 %.

    After `WAIT_S`: raises UnusableGpuError, which names the processes, if the scheduler gave the
    GPU to this job alone (``exclusive``); otherwise logs that and returns.
    """
    if torch.cuda.get_device_properties(device).is_integrated:
        return  # its memory is that of the host
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
    """Return how much memory others hold, in words; None if it is little."""
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
    found = ", ".join(driver.processes_on(f"GPU-{uuid}"))
    return f"processes on it: {found}" if found else "nvidia-smi shows no process on it"
