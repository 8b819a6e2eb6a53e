"""Seconds that jobs wait in the queue, from a distribution or from the output of ``sacct``."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

from slurmrl.config.schema.cluster import time_limit_s
from slurmrl.errors import UsageError
from slurmrl.fsio import inputs

FEWEST: Final = 10
"""Minimum number of similar jobs in a trace. With fewer similar jobs, all jobs count."""
SIMILAR: Final = 2.0
"""Maximum ratio of hosts, and of time limits, between two similar jobs."""
COLUMNS: Final = ("Submit", "Start")
"""The columns that a trace must have."""
COMMAND: Final = "sacct -X -P --format=Submit,Eligible,Start,NNodes,Timelimit"
LONGEST_S: Final = 1e9
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(text: str) -> float:
    """Parse a duration such as ``90s``, ``30m``, ``2h`` or ``1d``. Raises UsageError."""
    unit = _UNITS.get(text[-1:].lower())
    try:
        number = float(text[:-1]) if unit else math.nan
    except ValueError:
        number = math.nan
    if unit is None or not 0 <= number * unit <= LONGEST_S:
        raise UsageError(
            f"'{text}' is not a duration: write a number with s, m, h or d, such as 30m"
        )
    return number * unit


class Waits(Protocol):
    """Source of queue waits, in seconds."""

    def sample(self, rng: random.Random) -> float:
        """Return the seconds that one job waits."""
        ...

    @property
    def words(self) -> str:
        """Description of the source for the report."""
        ...


@dataclass(frozen=True)
class FixedWait:
    """The same wait for every job."""

    seconds: float

    def sample(self, rng: random.Random) -> float:
        return self.seconds

    @property
    def words(self) -> str:
        return f"always {self.seconds:g} s" if self.seconds else "none"


@dataclass(frozen=True)
class ExponentialWait:
    """Waits with an exponential distribution."""

    mean: float

    def sample(self, rng: random.Random) -> float:
        return -math.log1p(-rng.random()) * self.mean

    @property
    def words(self) -> str:
        return f"exponential with a mean of {self.mean:g} s"


@dataclass(frozen=True)
class TracedWait:
    """The wait of a random job of a trace."""

    seconds: tuple[float, ...]
    words: str

    def sample(self, rng: random.Random) -> float:
        return rng.choice(self.seconds)


def given_waits(text: str) -> Waits:
    """Parse ``30m`` (the mean of an exponential distribution) or ``fixed:30m``.

    Raises UsageError.
    """
    kind, colon, value = text.rpartition(":")
    if not colon:
        mean = duration_s(value)
        return ExponentialWait(mean) if mean else FixedWait(0.0)
    if kind != "fixed":
        raise UsageError(f"'{text}' is not a queue wait: write a mean (30m), or fixed:30m")
    return FixedWait(duration_s(value))


@dataclass(frozen=True)
class TracedJob:
    """One job of a trace. Values that the trace lacks are None."""

    wait_s: float
    hosts: int | None
    limit_s: float | None


@dataclass(frozen=True)
class QueueTrace:
    """The jobs in the output of ``sacct``."""

    name: str
    jobs: tuple[TracedJob, ...]

    @staticmethod
    def read(path: Path) -> QueueTrace:
        """Read the output of `COMMAND`. Raises UsageError that names an invalid line."""
        try:
            lines = inputs.read(path).decode("utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise UsageError(f"{path}: not a text file in UTF-8") from None
        header = lines[0].split("|") if lines else []
        if missing := [name for name in COLUMNS if name not in header]:
            raise UsageError(
                f"{path}:1: has no column {' and no column '.join(missing)}: "
                f"write the file with '{COMMAND}'"
            )
        jobs = tuple(_jobs(path, header, lines[1:]))
        if not jobs:
            raise UsageError(f"{path}: no job in the file has started")
        return QueueTrace(str(path), jobs)

    def waits(self, hosts: int, limit_s: float) -> TracedWait:
        """Return the waits of similar jobs, or of all jobs if few are similar.

        Jobs are similar if their numbers of hosts and their time limits are similar.
        """
        near = [job for job in self.jobs if _similar(job, hosts, limit_s)]
        used = near if len(near) >= FEWEST else self.jobs
        kind = "similar" if used is near and len(near) < len(self.jobs) else "all"
        mean = sum(job.wait_s for job in used) / len(used)
        words = f"{self.name}: {kind} {len(used)} of {len(self.jobs)} jobs, mean {mean:.0f} s"
        return TracedWait(tuple(job.wait_s for job in used), words)


def _similar(job: TracedJob, hosts: int, limit_s: float) -> bool:
    pairs = ((job.hosts, hosts), (job.limit_s, limit_s))
    return all(
        theirs is None
        or theirs == ours
        or (theirs > 0 and ours > 0 and 1 / SIMILAR <= theirs / ours <= SIMILAR)
        for theirs, ours in pairs
    )


def _jobs(path: Path, header: Sequence[str], lines: Sequence[str]) -> Iterator[TracedJob]:
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        cells = line.split("|")
        if len(cells) != len(header):
            raise UsageError(f"{path}:{number}: has {len(cells)} columns, the header {len(header)}")
        row = dict(zip(header, cells, strict=True))
        if "." in row.get("JobID", ""):
            continue  # The line describes a job step.
        where = f"{path}:{number}"
        start = _time(row["Start"], where, "Start")
        queued = _time(row["Submit"], where, "Submit")
        if start is None or queued is None:
            continue  # The job has not started.
        eligible = _time(row.get("Eligible", ""), where, "Eligible")
        times = [one for one in (start, queued, eligible) if one is not None]
        if len({one.tzinfo is None for one in times}) > 1:
            raise UsageError(f"{where}: only some of the times in the line have a time zone")
        since = queued if eligible is None else max(queued, eligible)
        yield TracedJob(
            max((start - since).total_seconds(), 0.0),
            _hosts(row, where),
            _limit(row.get("Timelimit", ""), where),
        )


def _time(text: str, where: str, column: str) -> datetime | None:
    """Parse a time; return None if Slurm does not know it. Raises UsageError."""
    if text.strip() in ("", "Unknown", "None", "N/A"):
        return None
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise UsageError(f"{where}: {column} '{text}' is not a time: {error}") from None


def _hosts(row: Mapping[str, str], where: str) -> int | None:
    text = (row.get("NNodes") or row.get("AllocNodes") or "").strip()
    if text and not text.isdecimal():
        raise UsageError(f"{where}: NNodes '{text}' is not a number of hosts")
    return int(text) if text else None


def _limit(text: str, where: str) -> float | None:
    text = text.strip()
    if text in ("", "Partition_Limit"):
        return None
    try:
        return time_limit_s(text)
    except ValueError:
        raise UsageError(f"{where}: Timelimit '{text}' is not a time limit") from None
