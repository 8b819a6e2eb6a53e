"""The process group of an incarnation, or of a rollout task."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from slurmrl.parallel.device import Accelerator
from slurmrl.workers.messages import Start

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
    listener: int | None,
    accelerator: Accelerator,
    timeout: timedelta,
) -> Store:
    """Connect to the store that rank 0 serves, and form the process group; return the store.

    Args:
        start: names the store, the number of ranks and the network interface.
        listener: file descriptor of the store's listening socket, bound by the agent; on rank 0
            only.
        timeout: of one collective.
    """
    host, _, port = start.store.rpartition(":")
    if interface := start.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # a bare name is a prefix
    store = TCPStore(
        host,
        int(port),
        start.world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    dist.init_process_group(
        accelerator.backend,
        store=store,
        rank=rank,
        world_size=start.world_size,
        timeout=timeout,
    )
    return store


def wait_for_all(store: Store, name: str, world_size: int, timeout: timedelta) -> None:
    """Return once all ranks have called this with ``name``. A barrier of NCCL would make a
    communicator of all ranks, which costs memory and time on each GPU and which nothing else
    uses."""
    done = f"{name}/all"
    if store.add(name, 1) == world_size:
        store.set(done, "")
    store.wait([done], timeout)


def host_group(accelerator: Accelerator, timeout: timedelta) -> dist.ProcessGroup | None:
    """All ranks, for tensors in host memory; None is the world's own group. Collective."""
    if accelerator.backend == "gloo":
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group
