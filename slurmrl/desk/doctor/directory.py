"""Checks of the shared directory on one host: its owner, latencies, free space and quota."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmrl import child
from slurmrl.desk.doctor import Check, failed, ok, warning
from slurmrl.env import user_name
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic, calls
from slurmrl.fsio.calls import REAL, explain, opened, read_all, write_new

ASK = "ask.json"
"""Name of the request's file in the folder of the job."""
CONTENT = "content"
ROUNDS = 8
BLOCK = b"x" * 4096
SLOW_S = 0.2
"""Median seconds of an operation above which starts and commits of a run become slow."""
SLOW_ADVICE = (
    "the file server is slow or busy: runs work, but start and commit slowly; try another file "
    "system, and keep cluster.heartbeat_s well above these times"
)
GIB = 2**30
LEAST_BYTES = GIB
FEW_BYTES = 20 * GIB
FEW_INODES = 100_000
NEARLY = 0.95
QUOTA_TIMEOUT_S = 10.0
QUOTA_BYTES = 2**20
NUMBERS = (1, 2, 3, 5, 6, 7)


def content(folder: Path, request: dict[str, Any]) -> Check:
    """Check that this host reads the login node's file. Raises OSError."""
    digest = hashlib.sha256(atomic.read(folder / CONTENT)).hexdigest()
    if digest != request["content"]:
        advice = "the hosts do not share one directory, or a host reads stale data"
        return failed("same directory", "its content differs from the login node's file", advice)
    return ok("same directory", "reads the login node's file")


def owner(folder: Path) -> Check:
    """Check owner and mode of a folder and of new files in it. Raises EnvironmentFailure."""
    warnings = atomic.check_ownership(folder)
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
            f"a new file of user {os.geteuid()} with mode 0600 belongs to user {status.st_uid} "
            f"with mode {mode:04o}",
            "the file system maps users or modes (root squash, idmap, ACLs): choose another --root",
        )
    if warnings:
        advice = "if this is not intended, choose another --root or change the folder's mode"
        return warning("ownership", "; ".join(warnings), advice)
    return ok("ownership", f"yours, mode 0700; umask {_umask():04o}")


def latency(folder: Path) -> Check:
    """Measure the latencies of the file operations that the protocols use, in a few rounds."""
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
            raise EnvironmentFailure(
                f"the data read from {path} differs from the data written to it"
            )


def _umask() -> int:
    mask = os.umask(calls.PRIVATE_UMASK)
    os.umask(mask)
    return mask


def seconds(value: float) -> str:
    if value < 1e-4:
        return "<0.1 ms"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"


def space(folder: Path) -> Check:
    """Check the free space. Raises OSError for a folder that does not answer."""
    system = os.statvfs(folder)
    free, size = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    measured = f"{_size(free)} free of {_size(size)}"
    advice = "delete old runs or choose another --root; a commit needs room for one more checkpoint"
    if free < LEAST_BYTES:
        return failed("disk space", measured, advice, free_bytes=float(free))
    if free < FEW_BYTES:
        return warning("disk space", measured, advice, free_bytes=float(free))
    return ok("disk space", measured, free_bytes=float(free))


def inodes(folder: Path) -> Check:
    """Check the free inodes. Raises OSError for a folder that does not answer."""
    system = os.statvfs(folder)
    if system.f_files == 0:
        return ok("inodes", "not counted by this file system")
    measured = f"{system.f_favail} free of {system.f_files}"
    if system.f_favail < FEW_INODES:
        advice = "delete old runs: each run has several thousand small files"
        return warning("inodes", measured, advice, free=float(system.f_favail))
    return ok("inodes", measured, free=float(system.f_favail))


@dataclass(frozen=True)
class Quota:
    """One line of quota(1) or lfs-quota(1); a limit of 0 means no limit."""

    filesystem: str
    used_kib: int
    limit_kib: int
    files: int
    files_limit: int

    @property
    def used(self) -> float:
        """Used share of the limit on bytes or files, whichever is larger, from 0 to 1."""
        shares = ((self.used_kib, self.limit_kib), (self.files, self.files_limit))
        return max((used / limit for used, limit in shares if limit), default=0.0)

    def __str__(self) -> str:
        parts = []
        if self.limit_kib:
            parts.append(f"{_size(self.used_kib * 1024)} of {_size(self.limit_kib * 1024)}")
        if self.files_limit:
            parts.append(f"{self.files} of {self.files_limit} files")
        return f"{self.filesystem}: {', '.join(parts) or 'no limit'}"


def parse_quota(text: str) -> list[Quota]:
    """Return the quotas in the output of ``quota -w -p`` or ``lfs quota``.

    A line has the file system, used KiB, quota, limit, grace, used files, quota, limit, grace. The
    smaller number of quota and limit counts.
    """
    quotas = []
    for line in text.splitlines():
        words = [word.rstrip("*") for word in line.split()]
        if len(words) < 8 or not all(words[place].isdigit() for place in NUMBERS):
            continue
        used, soft, hard, files, soft_files, hard_files = (int(words[place]) for place in NUMBERS)
        limits = _lower(soft, hard), _lower(soft_files, hard_files)
        quotas.append(Quota(words[0], used, limits[0], files, limits[1]))
    return quotas


def quota(folder: Path) -> Check:
    """Check the user's quota with the installed tools."""
    commands = {
        "quota": ["quota", "-w", "-p"],
        "lfs": ["lfs", "quota", "-q", "-u", user_name(), str(folder)],
    }
    tools = [name for name in commands if shutil.which(name)]
    quotas = [one for name in tools for one in parse_quota(_output(commands[name]))]
    if not quotas:
        report = "report" if len(tools) > 1 else "reports"
        named = " and ".join(tools)
        return ok("quota", f"{named} {report} no quota" if tools else "no quota tool found")
    worst = max(quotas, key=lambda quota: quota.used)
    measured = "; ".join(map(str, quotas))
    if worst.used >= NEARLY:
        advice = "delete old runs, or choose another --root; a full quota stops commits"
        return warning("quota", measured, advice, used=worst.used)
    return ok("quota", measured, used=worst.used)


def _output(command: Sequence[str]) -> str:
    try:
        done = child.run(command, QUOTA_TIMEOUT_S, kept_bytes=QUOTA_BYTES)
    except OSError:
        return ""
    return done.output.decode(errors="replace")


def _lower(soft: int, hard: int) -> int:
    return min((limit for limit in (soft, hard) if limit), default=0)


def _size(count: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
