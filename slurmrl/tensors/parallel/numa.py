"""CPU affinity of a worker: the CPUs of its GPU's NUMA node.

Host memory is allocated on the node of the thread that first writes it, so copies between GPU and
host then stay on that node, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")
ADDRESS: Final = ("domain", "bus", "device")


def bind_to(gpu: object, least: int, sysfs: Path = SYSFS) -> frozenset[int] | None:
    """Bind all threads of this process, and those that they start, to the CPUs next to a GPU.

    ``gpu`` is torch's properties of it. Returns the CPUs; None if nothing changes: the CPUs are
    unknown, this process may use fewer than ``least`` of them, or it may use no others.
    """
    allowed = os.sched_getaffinity(0)
    near = frozenset(allowed & _local_cpus(gpu, sysfs))
    if len(near) < least or near == allowed:
        return None
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), near)
    return near


def _local_cpus(gpu: object, sysfs: Path) -> set[int]:
    """Return the CPUs next to a GPU; empty where the kernel does not tell."""
    try:
        domain, bus, device = (getattr(gpu, f"pci_{part}_id") for part in ADDRESS)
        address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
        text = (sysfs / "bus/pci/devices" / address / "local_cpulist").read_text()
        return set(_cpus(text))
    except (AttributeError, OSError, ValueError):  # an older torch has no addresses
        return set()


def _cpus(text: str) -> Iterator[int]:
    """Parse a list of CPUs as the kernel prints it: ``0-3,8``."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
