"""Records of host failures, and of the hosts that a trial's jobs avoid, in ``hosts/``.

``start.SLOTS.START.HOST.json``: a start failed before an incarnation began, when the history had
SLOTS records. ``lost.INCARNATION.HOST.json``: an incarnation failed because of the host itself.
``avoid.HOST.json``: jobs avoid it. Batch scripts make the first and the last (`run.leave`),
so each file is created whole and never changed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from slurmrl.errors import UsageError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.shapes import SECONDS, TEXT
from slurmrl.run.history.log import History
from slurmrl.run.paths import RunPaths

LOSSES = 2
"""Number of incarnations failed because of one host, after which jobs avoid it."""
LONGEST_WHY = 400

FIELDS = {"host": TEXT, "why": TEXT, "start": TEXT, "time": SECONDS}

_HOST = re.compile(r"[\w.-]{1,200}", re.ASCII)
_AVOID = re.compile(r"avoid\.(?P<host>[\w.-]+)\.json", re.ASCII)
_LOST = re.compile(r"lost\.(?P<incarnation>\d+)\.(?P<host>[\w.-]+)\.json", re.ASCII)
_START = re.compile(
    r"start\.(?P<slots>\d+)\.(?P<start>\d+\.\d+)\.(?P<host>[\w.-]*)\.json", re.ASCII
)


@dataclass(frozen=True)
class BadHost:
    """A host and its failure."""

    host: str
    """Empty where the host is unknown."""
    why: str
    start: str = ""
    """The job that found the failure, ``JOBID.RESTARTCOUNT``."""


def avoided(run: RunPaths) -> list[BadHost]:
    """Return the hosts that jobs of the trial avoid, by name. Raises CorruptFileError."""
    return [_read(run, file) for file in _names(run) if _AVOID.fullmatch(file)]


def failed_starts(run: RunPaths, start: str | None = None) -> list[BadHost]:
    """Return the failed starts of the trial, or those of one start of a job."""
    return [
        _read(run, file)
        for file in _names(run)
        if (found := _START.fullmatch(file)) and start in (None, found["start"])
    ]


def newest_failed_starts(run: RunPaths) -> list[BadHost]:
    """Return the failed starts since the history last grew, oldest first."""
    found = [(match, file) for file in _names(run) if (match := _START.fullmatch(file))]
    slots = History(run.history).count() if found else 0
    now = [
        ([int(part) for part in match["start"].split(".")], file)
        for match, file in found
        if int(match["slots"]) == slots
    ]
    return [_read(run, file) for _, file in sorted(now)]


def record_start(run: RunPaths, slots: int, start: str, host: str, why: str) -> None:
    """Record a start of a job that failed because of a host before an incarnation began.

    ``start`` is ``JOBID.RESTARTCOUNT``. Batch scripts write the same record.
    """
    _create(run, f"start.{slots}.{start}.{host}.json", host, why, start)


def blame(run: RunPaths, host: str, incarnation: int, why: str) -> bool:
    """Record that an incarnation failed because of a host; return whether to avoid the host now."""
    if not _HOST.fullmatch(host):
        return False
    _create(run, f"lost.{incarnation}.{host}.json", host, why)
    lost = {
        m["incarnation"] for f in _names(run) if (m := _LOST.fullmatch(f)) and m["host"] == host
    }
    return len(lost) >= LOSSES


def blamed(run: RunPaths) -> dict[str, int]:
    """Return the hosts because of which incarnations failed, each with the newest of these."""
    newest: dict[str, int] = {}
    for file in _names(run):
        if match := _LOST.fullmatch(file):
            host = match["host"]
            newest[host] = max(newest.get(host, 0), int(match["incarnation"]))
    return newest


def avoid(run: RunPaths, host: str, why: str) -> None:
    _create(run, f"avoid.{host}.json", host, why)


def chosen(run: RunPaths, wanted: Iterable[str]) -> list[str]:
    """Return the avoided hosts of these names (``all``: every one).

    Raises UsageError for others.
    """
    known = [bad.host for bad in avoided(run)]
    names = list(dict.fromkeys(wanted))
    unknown = [host for host in names if host not in (*known, "all")]
    if unknown:
        choices = f"excluded hosts: {', '.join(known)}" if known else "no host is excluded"
        raise UsageError(f"{', '.join(unknown)}: not excluded from this trial's jobs; {choices}")
    return known if "all" in names else names


def include(run: RunPaths, names: Collection[str]) -> None:
    """Delete the records of these hosts."""
    for file in _names(run):
        found = _AVOID.fullmatch(file) or _LOST.fullmatch(file) or _START.fullmatch(file)
        if found and found["host"] in names:
            atomic.remove(run.hosts / file)


def _create(run: RunPaths, name: str, host: str, why: str, start: str = "") -> None:
    atomic.make_private_directory(run.hosts)
    text = {"host": host, "why": why[-LONGEST_WHY:], "start": start, "time": int(time.time())}
    atomic.exclusive_create(run.hosts / name, json.dumps(text).encode())


def _read(run: RunPaths, name: str) -> BadHost:
    values = documents.read(run.hosts / name, FIELDS, ("host", "why"))
    return BadHost(values["host"], values["why"][:LONGEST_WHY], values.get("start") or "")


def _names(run: RunPaths) -> list[str]:
    try:
        return sorted(atomic.list_names(run.hosts))
    except FileNotFoundError:
        return []
