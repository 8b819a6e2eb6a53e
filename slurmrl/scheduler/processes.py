"""Processes of this machine by an identity that is never reused: pid, start time and boot."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

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
            os.waitpid(self.pid, os.WNOHANG)  # if it is a child of ours, let it go
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
