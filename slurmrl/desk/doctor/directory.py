"""The shared directory as one host sees it: who owns it, and how long its operations take."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmrl.desk.doctor.check import Check, failed, ok, warning
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic, ownership, umask
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.failures import explain
from slurmrl.fsio.primitives import opened, read_all, write_new

ASK = "ask.json"
"""The job's request, in its folder."""
CONTENT = "content"
ROUNDS = 8
BLOCK = b"x" * 4096
SLOW_S = 0.2
"""Median of one operation above which starts and commits of a run become slow."""
SLOW_ADVICE = (
    "the file server is slow or busy: runs work, but start and commit slowly; try another file "
    "system, and keep cluster.heartbeat_s well above this"
)


def content(folder: Path, request: dict[str, Any]) -> Check:
    """Whether this host reads what the login node wrote. Raises OSError."""
    digest = hashlib.sha256(atomic.read(folder / CONTENT)).hexdigest()
    if digest != request["content"]:
        advice = "the hosts do not share one directory, or its client caches wrongly"
        return failed("same directory", "content differs from what the login node wrote", advice)
    return ok("same directory", "reads what the login node wrote")


def owner(folder: Path) -> Check:
    """``folder`` is one that we made. Raises EnvironmentFailure where others could change it."""
    warnings = ownership.check(folder)
    path = folder / f"owner.{uuid.uuid4().hex}"
    try:
        write_new(path, b"", False, REAL)
        status = path.stat()
        path.unlink()
    except OSError as error:
        raise explain(error, "make a file in", folder) from error
    mode = status.st_mode & 0o777
    if status.st_uid != os.geteuid() or mode != 0o600:
        return failed(
            "ownership",
            f"a file made by {os.geteuid()} with mode 0600 belongs to {status.st_uid}, {mode:04o}",
            "the file system maps users or modes (root squash, idmap, ACLs): use another one",
        )
    if warnings:
        advice = "if this is not intended, choose another --root or change the folder's mode"
        return warning("ownership", "; ".join(warnings), advice)
    return ok("ownership", f"ours, mode 0700; umask {_umask():04o}")


def latency(folder: Path) -> Check:
    """Latencies of the file operations that the protocols use; medians of a few rounds."""
    rounds = [_round(folder / f"latency.{uuid.uuid4().hex}") for _ in range(ROUNDS)]
    times = {name: [one[name] for one in rounds] for name in rounds[0]}
    medians = {name: statistics.median(spans) for name, spans in times.items()}
    longest = max(map(max, times.values()))
    shown = ", ".join(f"{name} {seconds(median)}" for name, median in medians.items())
    measured = f"{shown} (medians; longest {seconds(longest)})"
    values = {f"{name.replace('+', '_')}_s": median for name, median in medians.items()}
    if max(medians.values()) > SLOW_S:
        return warning("directory", measured, SLOW_ADVICE, **values, longest_s=longest)
    return ok("directory", measured, **values, longest_s=longest)


def _round(path: Path) -> dict[str, float]:
    linked, moved = path.with_suffix(".linked"), path.with_suffix(".moved")
    operations: dict[str, Callable[[], None]] = {
        "create+fsync": lambda: write_new(path, BLOCK, True, REAL),
        "read": lambda: _read(path),
        "link": lambda: REAL.link(path, linked),
        "rename": lambda: REAL.rename(path, moved),
    }
    times = {}
    for name, operation in operations.items():
        began = time.perf_counter()
        try:
            operation()
        except OSError as error:
            raise EnvironmentFailure(f"{name} failed: {error.strerror or error}") from error
        times[name] = time.perf_counter() - began
    REAL.unlink(linked)
    REAL.unlink(moved)
    return times


def _read(path: Path) -> None:
    with opened(path, os.O_RDONLY, REAL) as descriptor:
        if read_all(descriptor, REAL, 2 * len(BLOCK)) != BLOCK:
            raise EnvironmentFailure(f"{path} does not hold what was written into it")


def _umask() -> int:
    mask = os.umask(umask.PRIVATE_UMASK)
    os.umask(mask)
    return mask


def seconds(value: float) -> str:
    if value < 1e-4:
        return "<0.1 ms"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"
