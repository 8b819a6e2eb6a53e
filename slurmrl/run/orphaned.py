"""What a task of an elastic group has last seen of trainers that were gone for too long.

The tasks that would follow it need not wait as long again: none starts until the trainers are
back, which is when a new incarnation has begun, or when a link of theirs removes the record.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from slurmrl.fsio import atomic, documents, objects
from slurmrl.fsio.shapes import COUNT, SIZE
from slurmrl.run.history.log import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths


@dataclass(frozen=True, kw_only=True)
class Orphaned:
    """The newest incarnation, and the lease of its first agent."""

    incarnation: Annotated[int, COUNT]
    attempt: Annotated[int, COUNT]
    counter: Annotated[int, SIZE] | None = None
    """Of the last heartbeat; None if there was none."""


def read(run: RunPaths, group: str) -> Orphaned | None:
    """Return the record, if there is one. Raises CorruptFileError, EnvironmentFailure."""
    path = run.orphaned(group)
    try:
        return objects.from_json(Orphaned, documents.read(path), path)
    except FileNotFoundError:
        return None


def write(run: RunPaths, group: str, seen: Orphaned) -> None:
    atomic.replace(run.orphaned(group), json.dumps(objects.to_json(seen)).encode())


def remove(run: RunPaths, group: str) -> None:
    """The trainers are back."""
    atomic.remove(run.orphaned(group))


def holds(run: RunPaths, group: str) -> bool:
    """Return whether tasks of the group have nobody to work for. Raises CorruptFileError,
    EnvironmentFailure."""
    seen = read(run, group)
    return seen is not None and seen.incarnation == fold(History(run.history).read()).incarnation
