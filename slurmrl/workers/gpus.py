"""The GPUs of a worker, before it computes."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch

from slurmrl.errors import UsageError
from slurmrl.plan.model import GroupPlan
from slurmrl.tensors.parallel import device, gpu_memory, numa
from slurmrl.tensors.parallel.activity import Activity

Refuse = Callable[[str, int], str | None]
"""By a GPU's name and bytes: why models cannot fit into it; None if they may."""


def take(group: GroupPlan, refuse: Refuse, activity: Activity, *, exclusive: bool) -> None:
    """Wait for this worker's GPUs, on cores near the first one.

    ``exclusive``: see `gpu_memory.wait_until_free`. Raises UsageError for models that cannot fit,
    UnusableGpuError.
    """
    first = torch.cuda.get_device_properties(device.GPU.device)
    numa.bind_to(first, group.cpus_per_worker)
    if reason := refuse(first.name, first.total_memory):
        raise UsageError(f"{socket.gethostname()}: {reason}")
    activity.phase("waiting for free GPU memory")
    for number in range(group.gpus_per_worker):
        gpu_memory.wait_until_free(torch.device("cuda", number), exclusive=exclusive)
