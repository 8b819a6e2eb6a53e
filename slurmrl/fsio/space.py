"""Room on the file system of a directory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain
from slurmrl.fsio.primitives import discard, temporary_beside, write_new

LEAST_BYTES = 64 << 20
"""With less than this a run cannot even start: logs, notes and events have to be written."""
PROBE_BYTES = 1 << 20


def free_bytes(directory: Path) -> int | None:
    """What users may still write there, by the file system's own word (quotas are not in it); None
    where it does not say."""
    with suppress(OSError):
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize
    return None


def require(directory: Path, *, calls: SystemCalls = REAL) -> None:
    """Raise EnvironmentFailure where there is too little room to start in a directory, which may
    not exist yet. In one that does a file is written, since only that meets a quota."""
    existing = next(path for path in (directory, *directory.parents) if path.is_dir())
    free = free_bytes(existing)
    if free is not None and free < LEAST_BYTES:
        raise EnvironmentFailure(
            f"the file system of {existing} is full: {free >> 20} MiB are free, a run needs at "
            f"least {LEAST_BYTES >> 20} MiB to start, and room for its checkpoints; nothing was "
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
