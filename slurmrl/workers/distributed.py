"""The process group of a worker's world, and the worker's GPUs.

The ranks find each other in a store in the run directory. torch's own TCPStore listens on a port
without a key: any user of the network could write the addresses to which ranks connect, and what
else they read from it. The run directory belongs to the user. One file per key: a rank writes its
keys once and reads those of the others once, while the group forms.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from slurmrl.backoff import READ_S, Backoff, retry
from slurmrl.errors import UsageError
from slurmrl.fsio import atomic
from slurmrl.fsio.failures import explain
from slurmrl.plan.model import GroupPlan
from slurmrl.tensors.parallel import device, gpu
from slurmrl.tensors.parallel.device import Accelerator
from slurmrl.tensors.parallel.groups import Activity
from slurmrl.workers.messages import Start

SHORTEST_TIMEOUT = timedelta(minutes=30)
"""Shortest time-out: no call of the master bounds the time in which models are loaded."""
MARGIN = timedelta(minutes=5)
T = TypeVar("T")
SHORTEST_POLL_S = 0.02
POLL_S_PER_RANK = 0.0005
"""Together, waiting ranks list the directory at most 2000 times a second."""
Refuse = Callable[[str, int], str | None]
"""By a GPU's name and bytes: why models cannot fit into it; None if they may."""


def collective_timeout(step_timeout_s: float) -> timedelta:
    """Return the time-out of one collective.

    Ranks may wait for each other as long as a call may last, and the master's deadline, which
    reports what was waited for, must come first.
    """
    return max(SHORTEST_TIMEOUT, timedelta(seconds=step_timeout_s) + MARGIN)


def join(
    start: Start,
    rank: int,
    directory: Path,
    accelerator: Accelerator,
    timeout: timedelta,
) -> RunStore:
    """Form the process group of all ranks that meet in ``directory``; return its store.

    Args:
        start: names the number of ranks and the network interface.
        directory: of this world alone.
        timeout: of one collective.
    """
    if interface := start.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # a bare name is a prefix
    store = RunStore(directory, start.world_size, timeout)
    dist.init_process_group(
        accelerator.backend,
        store=store,
        rank=rank,
        world_size=start.world_size,
        timeout=timeout,
    )
    # torch holds only the C++ half of the store, which fails without this half.
    weakref.finalize(dist.group.WORLD, id, store)
    return store


def wait_for_all(store: RunStore, rank: int, world_size: int, name: str) -> None:
    """Return once all ranks have called this with ``name``.

    A barrier of NCCL would make a communicator of all ranks, which costs memory and time on each
    GPU and which nothing else uses.
    """
    store.set(f"{name}/{rank}", "")
    store.wait([f"{name}/{other}" for other in range(world_size)])


def host_group(accelerator: Accelerator, timeout: timedelta) -> dist.ProcessGroup | None:
    """All ranks, for tensors in host memory; None is the world's own group. Collective."""
    if accelerator.backend == "gloo":
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


class RunStore(Store):
    """The store of one world in ``directory``, which its ranks create.

    torch calls it from C++, and needs no other methods to form groups of gloo and NCCL. It must
    live as long as the groups, and so must every store that `clone` returns.
    """

    def __init__(self, directory: Path, world_size: int, timeout: timedelta) -> None:
        """``timeout``: of `get`, and of `wait` where the caller names none."""
        super().__init__()
        atomic.make_private_directory(directory)
        self._directory = directory
        self._longest_poll_s = max(SHORTEST_POLL_S, POLL_S_PER_RANK * world_size)
        self._timeout = timeout
        self._seen: set[str] = set()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        path = self._directory / _file_name(key)
        _retry("write", lambda: atomic.replace(path, data, durable=False))

    def get(self, key: str) -> bytes:
        """Return the value of a key once a rank has set it.

        Raises DistStoreError after the time-out, EnvironmentFailure if the directory does not
        answer.
        """
        self.wait([key])
        path = self._directory / _file_name(key)
        return _retry("read", lambda: atomic.read_needed(path))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set.

        The directory is listed, because an NFS client may believe for a minute that a file that it
        has looked for is missing.
        """
        names = {_file_name(key) for key in keys}
        if not names <= self._seen:
            self._seen.update(_retry("list", self._names))
        return names <= self._seen

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are set. Raises DistStoreError after the time-out."""
        within = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + within.total_seconds()
        backoff = Backoff(last_s=self._longest_poll_s)
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(
                    f"timed out waiting {within.total_seconds():.0f} s for {', '.join(keys)} in "
                    f"{self._directory}"
                )
            backoff.sleep()

    def clone(self) -> RunStore:
        """Return this store itself, which holds no connection, for torch's NCCL monitor thread."""
        return self

    def _names(self) -> list[str]:
        try:
            return atomic.list_names(self._directory)
        except FileNotFoundError as error:
            raise explain(error, "list", self._directory) from error


def _retry(what: str, action: Callable[[], T]) -> T:
    return retry(f"{what} what the ranks tell each other", action, timeout_s=READ_S)


def _file_name(key: str) -> str:
    """Return a name for a key of any length and with any characters."""
    return sha256(key.encode()).hexdigest()


def take_gpus(group: GroupPlan, refuse: Refuse, activity: Activity, *, exclusive: bool) -> None:
    """Wait for this worker's GPUs, on cores near the first one.

    ``exclusive``: see `device.wait_until_free`. Raises UsageError for models that cannot fit,
    UnusableGpuError.
    """
    first = torch.cuda.get_device_properties(device.GPU.device)
    gpu.bind_cpus_near(first, group.cpus_per_worker)
    if reason := refuse(first.name, first.total_memory):
        raise UsageError(f"{socket.gethostname()}: {reason}")
    activity.phase("waiting for free GPU memory")
    for number in range(group.gpus_per_worker):
        device.wait_until_free(torch.device("cuda", number), exclusive=exclusive)
