"""Which files hold what a trial's processes write now."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmrl.errors import UnknownNameError
from slurmrl.history.recent import begin_of
from slurmrl.monitor import published
from slurmrl.name_resolve import make
from slurmrl.paths import RunPaths
from slurmrl.registry import near

AGENT_LOG = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.log")


@dataclass(frozen=True)
class LogFile:
    label: str
    """``trainer/0``"""
    path: Path


Attempts = Mapping[tuple[str, int], int]
"""Attempt by group and task."""


def newest(
    paths: RunPaths,
    group: str | None = None,
    task: int | None = None,
    *,
    attempts: Attempts | None = None,
) -> list[LogFile]:
    """The newest attempt's file of each task, by group and task, or those of ``attempts``; for a
    group in which no agent has started, the newest output of a batch process.

    Raises UnknownNameError for a group or a task that wrote nothing while others did.
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
    """The attempts that served an incarnation: those of the job in which it began. Their files can
    hold others of that job as well. Raises UnknownNameError."""
    begin = begin_of(paths.history, incarnation)
    if begin is None:
        raise UnknownNameError(f"incarnation {incarnation} has not begun; see slurmrl status")
    found = {}
    with make("file", directory=paths.names) as names:
        for attempt in published.attempts(names):
            if attempt["job"] == begin.data.get("job"):
                found[attempt["group"], attempt["task"]] = attempt["attempt"]
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
    if attempts:
        return {f"{group}/{t}": paths.log(group, t, a) for t, a in sorted(attempts.items())}
    if only is not None:
        return {}
    stats = [(folder / name, (folder / name).stat()) for name in names if name.endswith(".out")]
    written = [(stat.st_mtime_ns, path) for path, stat in stats if stat.st_size]
    return {f"{group}/batch": max(written)[1]} if written else {}


def _known(kind: str, name: str, known: list[str]) -> str:
    if name not in known:
        raise UnknownNameError(f"no logs of {kind} '{name}'; {near(name, known)}")
    return name
