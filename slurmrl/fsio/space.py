"""Free space on the file system of a directory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain
from slurmrl.fsio.primitives import discard, temporary_beside, write_new

LEAST_BYTES = 64 << 20
"""Minimum to start a run, which writes logs and events at once."""
PROBE_BYTES = 1 << 20


def free_bytes(directory: Path) -> int | None:
    """Return the free space for users as statvfs reports it (without quotas); None if unknown."""
    with suppress(OSError):
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize
    return None


def require(directory: Path, *, calls: SystemCalls = REAL) -> None:
    """Raise EnvironmentFailure if a directory, which need not exist yet, lacks the space to start.

    A probe file is written if it exists, because only a write reveals an exhausted quota.
    """
    existing = next(path for path in (directory, *directory.parents) if path.is_dir())
    free = free_bytes(existing)
    if free is not None and free < LEAST_BYTES:
        raise EnvironmentFailure(
            f"the file system of {existing} is full: {free >> 20} MiB are free, but a run needs at "
            f"least {LEAST_BYTES >> 20} MiB to start, and space for its checkpoints; nothing was "
            "submitted"
        )
    if existing != directory:
        return
    probe = temporary_beside(directory / "probe")
    try:
        write_new(probe, os.urandom(PROBE_BYTES), True, calls)
    except OSError as error:
        reason = explain(error, "write into", directory)
        raise EnvironmentFailure(f"{reason}; nothing was submitted") from error
    finally:
        discard(probe, calls)
