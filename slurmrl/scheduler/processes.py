"""Processes by an identity that is never reused: pid, start time and boot of the machine.

A process that claims a right for the trial (a submission, an extension) writes its `Claimant`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTLE_S = 150.0
"""Seconds after which a submission without job ids, made on another host, counts as abandoned:
longer than an sbatch may take."""
CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)


@dataclass(frozen=True)
class ProcessId:
    pid: int
    start_ticks: int
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    @staticmethod
    def of(pid: int) -> ProcessId | None:
        """The identity of a process; None if there is none or if it has ended (a zombie)."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = text.rpartition(")")[2].split()  # the name before it can hold anything
        return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))

    def alive(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # If it is our child, reap it.
        return ProcessId.of(self.pid) == self

    def send(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def catches(pid: int, number: int) -> bool:
    """Whether a process has installed a handler for a signal."""
    try:
        found = CAUGHT.search(Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(found and int(found[1], 16) >> (number - 1) & 1)


def boot_id() -> str:
    """Identity of this start of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Claimant:
    """The process that wrote a claim. ``nonce`` tells two claims of one process apart."""

    host: str
    boot: str
    pid: int
    start_ticks: int
    nonce: str

    @staticmethod
    def of_this_process() -> Claimant:
        me = ProcessId.of(os.getpid())
        assert me is not None, "this process runs"
        host, nonce = socket.gethostname(), uuid.uuid4().hex
        return Claimant(host, boot_id(), me.pid, me.start_ticks, nonce)


def is_gone(claim: Mapping[str, Any]) -> bool | None:
    """Return whether the claimant that wrote these entries has ended.

    Return None if this host cannot tell, because the claimant runs on another host.
    """
    pid, ticks = claim.get("pid"), claim.get("start_ticks")
    if claim.get("boot") == boot_id() and isinstance(pid, int) and isinstance(ticks, int):
        return not ProcessId(pid, ticks).alive()
    if claim.get("host") == socket.gethostname():
        return True  # before this machine was started again, or by an older slurmrl
    return None


def may_submit(claim: Mapping[str, Any]) -> bool:
    """Return whether another process that wrote these entries may still submit its jobs."""
    gone = is_gone(claim)
    if gone is not None:
        return not gone and claim.get("pid") != os.getpid()
    made, known = claim.get("time"), isinstance(claim.get("host"), str)
    return known and isinstance(made, int | float) and abs(time.time() - made) < SETTLE_S


def claimant_words(claim: Mapping[str, Any]) -> str:
    """Return ``on login1, process 123``."""
    return f"on {claim.get('host')}, process {claim.get('pid')}"
