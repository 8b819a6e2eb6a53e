"""Counts of the null GPU (tests/null_gpu/library): launches, copies, host waits and their call
sites.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LIBRARY = "libcuda.so.1"
OWN = re.compile(r"(?:^|.*/)((?:slurmrl|megatron|transformers)/)")
"""Whose lines are call sites of host waits."""
SITE_DEPTH = 2


def present() -> bool:
    """Return whether this process was started with the null GPU."""
    return hasattr(ctypes.CDLL(None), "null_gpu_counter")


def counts() -> Counter[str]:
    """Return the counts so far, by the names in library/device.h."""
    library = _library()
    names = library.null_gpu_counter_names().decode().split()
    return Counter({name: library.null_gpu_counter(index) for index, name in enumerate(names)})


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count launches, copies and waits inside the block. The counter is filled at its end."""
    before, found = counts(), Counter[str]()
    try:
        yield found
    finally:
        after = counts()
        found.update({name: after[name] - before[name] for name in after})


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Collect the host waits inside the block by their lines: ``file:line < caller's
    file:line``.
    """
    sites = Counter[str]()
    hook = ctypes.CFUNCTYPE(None)(lambda: sites.update([_site()]))
    _library().null_gpu_at_waits(hook)
    try:
        yield sites
    finally:
        _library().null_gpu_at_waits(None)


def _site() -> str:
    """Return the innermost lines of these packages on the stack of the waiting thread."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(lines) < SITE_DEPTH:
        if line := _line(frame):
            lines.append(line)
        frame = frame.f_back
    return " < ".join(lines) or "elsewhere"


def own_line(frame: FrameType | None) -> str:
    """Return the innermost line of these packages from this frame on, or an empty string."""
    while frame is not None:
        if line := _line(frame):
            return line
        frame = frame.f_back
    return ""


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename.rpartition("/site-packages/")[2]
    package = OWN.search(path)
    return f"{path[package.start(1) :]}:{frame.f_lineno}" if package else ""


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(LIBRARY)
    library.null_gpu_counter.restype = ctypes.c_long
    library.null_gpu_counter_names.restype = ctypes.c_char_p
    return library
