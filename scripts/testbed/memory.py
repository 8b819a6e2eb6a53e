"""Memory limits that the kernel enforces: slurmd puts each task into a control group (version 1).

Without these limits, jobs of the test bed may use any amount of memory. Needs root.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/memory")
REPLACED: Mapping[str, str] = {
    "TaskPlugin": "task/cgroup",
    "SelectTypeParameters": "CR_Core_Memory",
}
CONF = f"""\
CgroupPlugin=cgroup/v1
CgroupMountpoint={GROUPS.parent}
ConstrainRAMSpace=yes
MinRAMSpace=1
"""
FILE = "cgroup.conf"


class MemoryLimitError(Exception):
    """Memory cannot be limited on this machine."""


def configure(directory: Path) -> Mapping[str, str]:
    """Return the values of slurm.conf that set limits. Raises MemoryLimitError with the reason."""
    if os.geteuid() != 0 or not (GROUPS / "memory.limit_in_bytes").exists():
        raise MemoryLimitError(f"memory limits need root and control groups in {GROUPS}")
    (directory / FILE).write_text(CONF)
    return REPLACED


def remove(directory: Path, nodes: list[str]) -> None:
    """Remove the groups that slurmd leaves behind, if this bed has limits."""
    if not (directory / FILE).exists():
        return
    for node in nodes:
        for group, _, _ in os.walk(GROUPS / f"slurm_{node}", topdown=False):
            with contextlib.suppress(OSError):  # another test bed's jobs use it
                os.rmdir(group)
