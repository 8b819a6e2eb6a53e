"""The process group of a worker's world, the worker's GPUs, and its current collective.

The ranks find each other through a store in the run directory, which only the user can change.
torch's TCPStore would listen on a port without authentication, so any user of the network could
change the addresses to which ranks connect. The store has one file per key. While the group forms,
each rank writes its keys once and reads the other ranks' keys once.

torch's flight recorder shows the current collective of a rank. The recorder always records the
collectives of NCCL and gloo (TORCH_FR_BUFFER_SIZE entries, 2000 by default). For each group, torch
also keeps the numbers of the newest collective that has begun and the newest collective that has
ended. These numbers are cheap to read. Reading the entries takes milliseconds, so this module reads
them only when a collective does not end.
"""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import GroupName

from slurmrl.backoff import READ_S, Backoff, retry
from slurmrl.errors import UsageError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import explain
from slurmrl.plan.model import GroupPlan
from slurmrl.run.hang import PendingCollective
from slurmrl.tensors.parallel import device, gpu
from slurmrl.tensors.parallel.device import Accelerator
from slurmrl.tensors.parallel.groups import Activity
from slurmrl.workers.messages import Start

SHORTEST_TIMEOUT = timedelta(minutes=30)
"""Minimum time-out. Loading models may take longer than the longest call."""
MARGIN = timedelta(minutes=5)
T = TypeVar("T")
SHORTEST_POLL_S = 0.02
POLL_S_PER_RANK = 0.0005
"""Poll interval per rank. All ranks together list the directory at most 2000 times per second."""
Reject = Callable[[str, int], str | None]
"""Function of a GPU's name and bytes that returns why models cannot fit, or None if they may."""


def collective_timeout(step_timeout_s: float) -> timedelta:
    """Return the time-out of one collective.

    Ranks may wait for each other during the longest call. The time-out is longer than
    ``step_timeout_s``, so that the master's deadline comes first and reports the wait.
    """
    return max(SHORTEST_TIMEOUT, timedelta(seconds=step_timeout_s) + MARGIN)


def join(
    start: Start, rank: int, directory: Path, accelerator: Accelerator, timeout: timedelta
) -> RunStore:
    """Form the process group of all ranks that meet in ``directory``; return its store.

    Args:
        start: message with the number of ranks and the network interface.
        rank: this rank in the world.
        directory: directory that only this world uses.
        accelerator: device and backend of this rank.
        timeout: time-out of one collective.
    """
    if interface := start.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # Without "=", NCCL uses all interfaces whose names begin with this name.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    store = RunStore(directory, start.world_size, timeout)
    dist.init_process_group(
        accelerator.backend, store=store, rank=rank, world_size=start.world_size, timeout=timeout
    )
    # Keep the store's Python object: torch references only the C++ part, which needs the object.
    weakref.finalize(dist.group.WORLD, id, store)
    return store


def wait_for_all(store: RunStore, rank: int, world_size: int, name: str) -> None:
    """Wait until all ranks have called this function with ``name``.

    A barrier of NCCL would need a communicator of all ranks, which costs memory and time on each
    GPU and has no other use.
    """
    store.set(f"{name}/{rank}", "")
    store.wait([f"{name}/{other}" for other in range(world_size)])


def host_group(accelerator: Accelerator, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a gloo group for tensors in host memory; None for the world's group. Collective."""
    if accelerator.backend == "gloo":
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


class RunStore(Store):
    """The store of one world, in ``directory``. The ranks create the directory.

    torch calls these methods from C++ to form groups of gloo and NCCL. The store must exist as long
    as the groups.
    """

    def __init__(self, directory: Path, world_size: int, timeout: timedelta) -> None:
        """``timeout`` is the time-out of `get` and the default time-out of `wait`."""
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
        """Wait until a rank has set a key; return its value.

        Raises DistStoreError after the time-out, EnvironmentFailure if the directory fails.
        """
        self.wait([key])
        path = self._directory / _file_name(key)
        return _retry("read", lambda: atomic.read_needed(path))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set.

        List the directory, because an NFS client may report a file as missing for a minute after a
        failed lookup.
        """
        names = {_file_name(key) for key in keys}
        if not names <= self._seen:
            self._seen.update(_retry("list", self._names))
        return names <= self._seen

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raises DistStoreError after the time-out."""
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
        """Return this store for torch's NCCL monitor thread; it has no connection to copy."""
        return self

    def _names(self) -> list[str]:
        try:
            return atomic.list_names(self._directory)
        except FileNotFoundError as error:
            raise explain(error, "list", self._directory) from error


def _retry(what: str, action: Callable[[], T]) -> T:
    return retry(f"{what} the files in which ranks exchange addresses", action, timeout_s=READ_S)


def _file_name(key: str) -> str:
    """Return a file name for a key. Keys may be long and contain any characters."""
    return sha256(key.encode()).hexdigest()


def take_gpus(group: GroupPlan, reject: Reject, activity: Activity, *, exclusive: bool) -> None:
    """Bind this process to CPU cores near its first GPU and wait for free memory on all its GPUs.

    ``exclusive``: see `device.wait_until_free`. Raises UsageError for models that cannot fit, and
    UnusableGpuError.
    """
    first = torch.cuda.get_device_properties(device.GPU.device)
    gpu.bind_cpus_near(first, group.cpus_per_worker)
    if reason := reject(first.name, first.total_memory):
        raise UsageError(f"{socket.gethostname()}: {reason}")
    activity.phase("waiting for free GPU memory")
    for number in range(group.gpus_per_worker):
        device.wait_until_free(torch.device("cuda", number), exclusive=exclusive)


SHOWN = 40
"""Number of newest collectives that a rank adds to its stacks."""
Dump = Callable[[bool, bool], bytes]
"""Function that returns the flight recorder as JSON. Arguments: whether to include collectives, and
whether to include only active ones."""
Place = tuple[str, str]
"""torch's number of a group, and the number of a collective in this group."""


class _Entry(NamedTuple):
    """A collective in the flight recorder."""

    name: str
    number: int | None
    """Number of the collective in its group."""
    group: str
    began: float
    """Start by the clock of `time.time`."""


class Collectives:
    """Finds collectives that do not end. Only one thread may call this, periodically."""

    def __init__(self) -> None:
        self._pending: set[Place] = set()
        """Collectives that were pending at the last call."""
        self._looked_up: dict[Place, _Entry | None] = {}
        """Entries of collectives that were pending at the last two calls."""

    def waiting(self) -> PendingCollective | None:
        """Return the oldest collective that is pending now and was pending at the last call.

        Return None without such a collective, or if torch reports none.
        """
        pending = _pending(_dump(entries=False))
        stuck = pending & self._pending
        self._pending = pending
        self._looked_up = {place: self._looked_up[place] for place in stuck & set(self._looked_up)}
        if new := stuck - set(self._looked_up):
            entries = _dump(entries=True).get("entries", [])
            for place in new:
                self._looked_up[place] = _entry(entries, place)
        entries = [entry for entry in self._looked_up.values() if entry is not None]
        if not entries:
            return None
        oldest = min(entries, key=attrgetter("began"))
        since_s = max(time.time() - oldest.began, 0.0)
        ranks = tuple(_ranks(oldest.group))
        return PendingCollective(
            name=oldest.name, number=oldest.number, group=oldest.group, ranks=ranks, since_s=since_s
        )

    def recorded(self) -> str:
        """Return the newest collectives as lines, the newest last."""
        lines = []
        for entry in _dump(entries=True).get("entries", [])[-SHOWN:]:
            known = _parse(entry)
            state = "ended" if entry.get("retired") else entry.get("state", "")
            sizes = ", ".join(map(str, entry.get("input_sizes", [])))
            collective = f"{known.name} #{known.number} of group {known.group}"
            lines.append(f"  {collective}, {sizes}: {state}\n")
        head = f"Newest {len(lines)} collectives of torch's flight recorder, the newest last:\n"
        return head + "".join(lines) if lines else ""


def _dump(*, entries: bool) -> dict[str, Any]:
    """Return the flight recorder's content for this rank's backend; empty if it is unavailable."""
    if not dist.is_initialized():
        return {}
    kind = "nccl" if dist.get_backend() == "nccl" else "fr"
    dump: Dump | None = getattr(c10d, f"_dump_{kind}_trace_json", None)
    if dump is None:
        return {}
    try:
        content = json.loads(dump(entries, False))
    except (RuntimeError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _pending(content: Mapping[str, Any]) -> set[Place]:
    """Return the newest collective of each group, if it has not ended."""
    groups: Mapping[str, Mapping[str, str]] = content.get("pg_status", {})
    return {
        (group, numbers.get("last_enqueued_collective", ""))
        for group, numbers in groups.items()
        if numbers.get("last_enqueued_collective") != numbers.get("last_completed_collective")
    }


def _entry(entries: Sequence[Mapping[str, Any]], place: Place) -> _Entry | None:
    """Return the first pending collective of a group. Later collectives wait for it."""
    group = place[0]
    for entry in entries:
        if str(entry.get("pg_id")) == group and not entry.get("retired"):
            return _parse(entry)
    return None


def _parse(entry: Mapping[str, Any]) -> _Entry:
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    return _Entry(
        str(entry.get("profiling_name", "?")).rpartition(":")[2],
        number if isinstance(number, int) else None,
        str((entry.get("process_group") or ["?"])[0]),
        float(entry.get("time_created_ns", 0)) / 1e9,
    )


def _ranks(group: str) -> list[int]:
    """Return the ranks of the group with this name; empty if torch does not know it."""
    try:
        return list(dist.get_process_group_ranks(c10d._resolve_process_group(GroupName(group))))
    except (RuntimeError, ValueError, KeyError):
        return []
