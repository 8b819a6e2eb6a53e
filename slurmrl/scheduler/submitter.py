"""The process that submits a trial, as the trial's files name it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from slurmrl.scheduler.processes import ProcessId, boot_id

SETTLE_S = 150.0
"""Seconds after which a submission without job ids, made on another host, counts as abandoned:
longer than an sbatch may take."""


def myself() -> dict[str, Any]:
    """Return the entries that name this process."""
    me = ProcessId.of(os.getpid())
    assert me is not None, "this process runs"
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": me.pid,
        "start_ticks": me.start_ticks,
    }


def words(entries: Mapping[str, Any]) -> str:
    """Return ``on login1, process 123``."""
    return f"on {entries.get('host')}, process {entries.get('pid')}"


def in_progress(entries: Mapping[str, Any]) -> bool:
    """Return whether another process that wrote these entries may still submit its jobs."""
    pid, ticks = entries.get("pid"), entries.get("start_ticks")
    here = entries.get("boot") == boot_id()
    if here and isinstance(pid, int) and isinstance(ticks, int):
        return pid != os.getpid() and ProcessId(pid, ticks).alive()
    if entries.get("host") == socket.gethostname():
        return False  # before this machine was started again, or by an older slurmrl
    made, known = entries.get("time"), isinstance(entries.get("host"), str)
    return known and isinstance(made, int | float) and abs(time.time() - made) < SETTLE_S
