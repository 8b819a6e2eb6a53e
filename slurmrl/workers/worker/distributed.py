"""Joining the incarnation's process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from slurmrl.parallel.device import Accelerator
from slurmrl.workers.messages import Message

TIMEOUT = timedelta(minutes=30)
"""For one collective; the master's own deadline for a call is a setting."""


def join(start: Message, rank: int, listener: int | None, accelerator: Accelerator) -> None:
    """Connect to the store that rank 0 serves, and form the process group.

    Args:
        start: holds ``store`` (host:port), ``world_size`` and ``interface``, the network interface
            that the ranks talk over.
        listener: file descriptor of the store's listening socket, which the agent has bound; on
            rank 0 only.
    """
    host, _, port = start["store"].rpartition(":")
    if start["interface"]:
        os.environ["GLOO_SOCKET_IFNAME"] = start["interface"]
        os.environ["NCCL_SOCKET_IFNAME"] = start["interface"]
    store = TCPStore(
        host,
        int(port),
        start["world_size"],
        is_master=rank == 0,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    dist.init_process_group(
        accelerator.backend,
        store=store,
        rank=rank,
        world_size=start["world_size"],
        timeout=TIMEOUT,
    )
