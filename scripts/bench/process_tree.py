"""CPU time and memory of this process and its descendants, for the programs in this folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
RESET_PEAK = "5"
"""Value that resets the peak memory when written to clear_refs (proc(5))."""


class Usage(NamedTuple):
    cpu_s: float
    """CPU seconds, including processes that have ended and were reaped."""
    resident_kib: int
    peak_kib: int
    """Sum of the peak memory of each process since `reset_peaks`."""


def members() -> list[Path]:
    """Return the folders in /proc of this process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has ended
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return [Path(f"/proc/{pid}") for pid in found]


def usage() -> Usage:
    cpu_s, resident, peak = 0.0, 0, 0
    for entry in members():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            status = (entry / "status").read_text().splitlines()
        except OSError:
            continue
        cpu_s += sum(map(int, fields[11:15])) / TICKS_PER_S
        values = {line.split(":")[0]: line.split()[1] for line in status if line.startswith("Vm")}
        resident += int(values.get("VmRSS", 0))
        peak += int(values.get("VmHWM", 0))
    return Usage(cpu_s, resident, peak)


def reset_peaks() -> None:
    for entry in members():
        try:
            (entry / "clear_refs").write_text(RESET_PEAK)
        except OSError:
            continue
