"""Room in the root of the runs: bytes, inodes, quotas."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmrl.desk.doctor.check import Check, failed, ok, warning
from slurmrl.env import user_name

GIB = 2**30
LEAST_BYTES = GIB
FEW_BYTES = 20 * GIB
FEW_INODES = 100_000
NEARLY = 0.95
QUOTA_TIMEOUT_S = 10.0
NUMBERS = (1, 2, 3, 5, 6, 7)


def space(folder: Path) -> Check:
    """Raises OSError for a folder that does not answer."""
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
    """Raises OSError for a folder that does not answer."""
    system = os.statvfs(folder)
    if system.f_files == 0:
        return ok("inodes", "the file system does not count them")
    measured = f"{system.f_favail} free of {system.f_files}"
    if system.f_favail < FEW_INODES:
        advice = "delete old runs: each one keeps some thousand small files"
        return warning("inodes", measured, advice, free=float(system.f_favail))
    return ok("inodes", measured, free=float(system.f_favail))


@dataclass(frozen=True)
class Quota:
    """One line of quota(1) or lfs-quota(1); a limit of 0 is none."""

    filesystem: str
    used_kib: int
    limit_kib: int
    files: int
    files_limit: int

    @property
    def used(self) -> float:
        """The larger share of the two limits that is used."""
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
    """Return the lines with numbers in the output of ``quota -w -p`` or ``lfs quota``.

    A line has the file system, KiB used, quota, limit, grace, files used, quota, limit, grace. The
    lower of quota and limit counts.
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
    """The user's quota, from the tools that are installed."""
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
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=QUOTA_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _lower(soft: int, hard: int) -> int:
    return min((limit for limit in (soft, hard) if limit), default=0)


def _size(count: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
