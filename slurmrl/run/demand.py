"""Reasons to start fewer jobs of a submission: wanted tasks, missing trainers, a stop.

- A group has as many tasks as planned, unless a user has set another number (``slurmrl scale``).
That number applies until the user sets another one or the plan changes.
- If the trainers are absent for too long, a task of an elastic group records this. No later task
starts until the trainers are back: until a new incarnation has begun, or one of the trainers' links
removes the record.
- A user stops a submission (``slurmrl stop``): its trainers commit, and no other job starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from slurmrl.fsio import atomic, documents
from slurmrl.fsio.documents import COUNT, SIZE, Fields
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths

_FIELDS: Fields = {"tasks": COUNT, "planned": COUNT}


def wanted_tasks(run: RunPaths, group: str, planned: int) -> int:
    """Return the wanted number of tasks; ``planned`` is the number in the plan.

    Raises CorruptFileError, EnvironmentFailure.
    """
    try:
        found = documents.read(run.scale(group), _FIELDS, _FIELDS)
    except FileNotFoundError:
        return planned
    tasks: int = found["tasks"]
    return tasks if found["planned"] == planned else planned


def set_wanted_tasks(run: RunPaths, group: str, tasks: int, planned: int) -> None:
    """Set the number of tasks; 0 pauses the group."""
    data = {"tasks": tasks, "planned": planned}
    atomic.replace(run.scale(group), json.dumps(data).encode())


@dataclass(frozen=True, kw_only=True)
class Orphaned:
    """Record of absent trainers: the newest incarnation and the lease of its first agent."""

    incarnation: Annotated[int, COUNT]
    attempt: Annotated[int, COUNT]
    counter: Annotated[int, SIZE] | None = None
    """Counter of the last heartbeat; None if there was none."""


def read_orphaned(run: RunPaths, group: str) -> Orphaned | None:
    """Return the record, if there is one. Raises CorruptFileError, EnvironmentFailure."""
    path = run.orphaned(group)
    try:
        return documents.from_json(Orphaned, documents.read(path), path)
    except FileNotFoundError:
        return None


def write_orphaned(run: RunPaths, group: str, seen: Orphaned) -> None:
    atomic.replace(run.orphaned(group), json.dumps(documents.to_json(seen)).encode())


def remove_orphaned(run: RunPaths, group: str) -> None:
    """Remove the record, because the trainers are back."""
    atomic.remove(run.orphaned(group))


def is_orphaned(run: RunPaths, group: str) -> bool:
    """Return whether tasks of the group have no trainers to work for.

    Raises CorruptFileError, EnvironmentFailure.
    """
    seen = read_orphaned(run, group)
    return seen is not None and seen.incarnation == fold(History(run.history).read()).incarnation


def request_stop(run: RunPaths, number: int, by: str) -> None:
    """Record that the user ``by`` wants the submission to stop. Raises EnvironmentFailure."""
    atomic.replace(run.submission_stop(number), by.encode())


def withdraw_stop(run: RunPaths, number: int) -> None:
    """Remove the request. Raises EnvironmentFailure."""
    atomic.remove(run.submission_stop(number))


def stop_requested_by(run: RunPaths, number: int) -> str:
    """Return the user who wants the submission to stop; empty without a request.

    Raises CorruptFileError, EnvironmentFailure.
    """
    try:
        return atomic.read(run.submission_stop(number)).decode(errors="replace") or "a user"
    except FileNotFoundError:
        return ""
