"""How many tasks of an elastic group may run at a time: as planned, unless a user has set another
number (``slurmrl scale``), which holds until they set another one or the plan changes."""

from __future__ import annotations

import json

from slurmrl.fsio import atomic, documents
from slurmrl.fsio.shapes import COUNT, Fields
from slurmrl.run.paths import RunPaths

_FIELDS: Fields = {"tasks": COUNT, "planned": COUNT}


def wanted(run: RunPaths, group: str, planned: int) -> int:
    """Return the number of tasks; ``planned`` is the plan's. Raises CorruptFileError,
    EnvironmentFailure."""
    try:
        found = documents.read(run.scale(group), _FIELDS, _FIELDS)
    except FileNotFoundError:
        return planned
    tasks: int = found["tasks"]
    return tasks if found["planned"] == planned else planned


def write(run: RunPaths, group: str, tasks: int, planned: int) -> None:
    """Set the number of tasks; 0 pauses the group."""
    data = {"tasks": tasks, "planned": planned}
    atomic.replace(run.scale(group), json.dumps(data).encode())
