"""The log files of a trial's newest attempts, and their parts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurmrl.errors import UnknownNameError
from slurmrl.name_resolve.file import FileNameStore
from slurmrl.registry import near
from slurmrl.run.history.recent import begin_of
from slurmrl.run.paths import RunPaths
from slurmrl.run.worlds import MASTER, TRAINERS
from slurmrl.watch import published

AGENT_LOG = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.log")
HEAD = re.compile(
    rb"^--- slurmrl: part ([0-9]{1,9}) of this output"
    rb"(?: without its first ([0-9]{1,18}) bytes)?;.*\n",
    re.M,
)
HEAD_BYTES = 64 * 1024
"""A head lies within these bytes: other processes may write to a new part before its head is."""


@dataclass(frozen=True)
class LogFile:
    label: str
    """``trainer/0``"""
    path: Path


class Part(NamedTuple):
    """A part of a process's output: long files are rotated, and the newest two parts are kept (see
    `workers.agent.agent_host`)."""

    number: int
    skipped: int
    """Bytes at its start that were dropped."""
    head_bytes: int


def head(number: int, skipped: int) -> bytes:
    """Return the line that says which part this is."""
    without = f" without its first {skipped} bytes" if skipped else ""
    kept = "of earlier parts at most the last is kept (logging.output_mib)"
    return f"--- slurmrl: part {number} of this output{without}; {kept} ---\n".encode()


def part(data: bytes) -> Part:
    """Parse the first bytes of a file; without a head it is the first part."""
    found = HEAD.search(data[:HEAD_BYTES])
    if found is None:
        return Part(1, 0, 0)
    return Part(int(found[1]), int(found[2] or 0), len(found[0]) if found.start() == 0 else 0)


Attempts = Mapping[tuple[str, int], int]
"""Attempt by group and task."""


def newest(
    paths: RunPaths,
    group: str | None = None,
    task: int | None = None,
    *,
    attempts: Attempts | None = None,
) -> list[LogFile]:
    """Return the log of each task's newest attempt, or of those in ``attempts``, by group and task,
    and the newest output of the trainers' batch process. For another group in which no agent has
    started, return that of its batch process.

    Raises UnknownNameError for a group or a task without logs if there are others.
    """
    groups = sorted(folder.name for folder in paths.logs.glob("*") if folder.is_dir())
    if group is not None:
        groups = [_known("group", group, groups)] if groups else []
    files = {name: _of_group(paths, name, attempts) for name in groups}
    if task is not None and any(files.values()):
        known = sorted({label.rpartition("/")[2] for of in files.values() for label in of})
        _known("task", str(task), known)
    return [
        LogFile(label, path)
        for of in files.values()
        for label, path in of.items()
        if task is None or label.endswith(f"/{task}")
    ]


def serving(paths: RunPaths, incarnation: int) -> Attempts:
    """Return the attempts that served an incarnation: those of the job in which it began, and the
    master's, whose log is numbered like that of the first agent. Their logs may cover other
    incarnations of that job as well. Raises UnknownNameError."""
    begin = begin_of(paths.history, incarnation)
    if begin is None:
        raise UnknownNameError(f"incarnation {incarnation} has not begun; see slurmrl status")
    found = {}
    with FileNameStore(paths.names) as names:
        for attempt in published.attempts(names):
            if attempt.job == begin.data.get("job"):
                found[attempt.group, attempt.task] = attempt.attempt
    if (TRAINERS, 0) in found:
        found[MASTER, 0] = found[TRAINERS, 0]
    return found


def _of_group(paths: RunPaths, group: str, only: Attempts | None) -> dict[str, Path]:
    attempts: dict[int, int] = {}
    folder = paths.logs / group
    names = [entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    for name in names:
        match = AGENT_LOG.fullmatch(name)
        if match:
            task, attempt = int(match[1]), int(match[2])
            if only is not None and only.get((group, task)) != attempt:
                continue
            attempts[task] = max(attempt, attempts.get(task, 0))
    found = {f"{group}/{t}": paths.log(group, t, a) for t, a in sorted(attempts.items())}
    if only is not None or (found and group != TRAINERS):
        return found
    stats = [(folder / name, (folder / name).stat()) for name in names if name.endswith(".out")]
    written = [(stat.st_mtime_ns, path) for path, stat in stats if stat.st_size]
    return {**found, **({f"{group}/batch": max(written)[1]} if written else {})}


def _known(kind: str, name: str, known: list[str]) -> str:
    if name not in known:
        raise UnknownNameError(f"no logs of {kind} '{name}'; {near(name, known)}")
    return name
