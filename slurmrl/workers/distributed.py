"""The process group of an incarnation, or of a rollout task."""

from __future__ import annotations

import os
import weakref
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from slurmrl.tensors.parallel.device import Accelerator
from slurmrl.workers.messages import Start
from slurmrl.workers.run_store import RunStore

SHORTEST_TIMEOUT = timedelta(minutes=30)
"""Shortest time-out: no call of the master bounds the time in which models are loaded."""
MARGIN = timedelta(minutes=5)


def collective_timeout(step_timeout_s: float) -> timedelta:
    """Return the time-out of one collective. Ranks may wait for each other as long as a call may
    last, and the master's deadline, which reports what was waited for, must come first."""
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
    """Return once all ranks have called this with ``name``. A barrier of NCCL would make a
    communicator of all ranks, which costs memory and time on each GPU and which nothing else
    uses."""
    store.set(f"{name}/{rank}", "")
    store.wait([f"{name}/{other}" for other in range(world_size)])


def host_group(accelerator: Accelerator, timeout: timedelta) -> dist.ProcessGroup | None:
    """All ranks, for tensors in host memory; None is the world's own group. Collective."""
    if accelerator.backend == "gloo":
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group
