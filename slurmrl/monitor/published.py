"""Typed readers of what processes publish in the name store.

A trial continues without reports that are damaged (see `reports.Report`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from slurmrl import keys
from slurmrl.errors import CorruptFileError, NameNotFoundError
from slurmrl.fsio import documents, objects
from slurmrl.fsio.failures import corrupt
from slurmrl.fsio.shapes import (
    COUNT,
    FILE_NAME,
    INTEGER,
    SECONDS,
    TEXT,
    Fields,
    FieldType,
    each,
    list_of,
    table,
)
from slurmrl.monitor.reports import Failure, Hang, LostHost, Report, Warned
from slurmrl.name_resolve.base import NameStore

Said = Mapping[str, Any]
SPANS = re.compile(r"(\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*)?")

ATTEMPT: Fields = {
    "group": FILE_NAME,
    "task": COUNT,
    "attempt": COUNT,
    "host": FILE_NAME,
    "job": TEXT,
    "job_id": TEXT,
}
_DOES: Fields = {
    "world": TEXT,
    "call": TEXT,
    "step": INTEGER,
    "phase": TEXT,
    "part": COUNT,
    "parts": COUNT,
    "since_s": SECONDS,
    "silent_s": SECONDS,
    "frame": TEXT,
}
_IN: Fields = {"name": TEXT, "number": INTEGER, "group": TEXT, "since_s": SECONDS}
_SPANS = FieldType("ranks such as 0-2,5", lambda v: isinstance(v, str) and bool(SPANS.fullmatch(v)))
_GROUP: Fields = {**_DOES, "ranks": _SPANS, "collective": table({**_IN, "ranks": _SPANS})}
_ROW: Fields = {**_DOES, "rank": COUNT, "collective": table({**_IN, "ranks": list_of(COUNT)})}
DOING = list_of(table(_GROUP, ("ranks",)))
"""Groups of ranks (see `monitor.hang`)."""
NOTE: Fields = {"incarnation": COUNT, "doing": list_of(table(_ROW, ("rank",)))}
"""The note that an agent writes after the counter of its lease."""
REQUEST: Fields = {"ranks": list_of(COUNT)}
STATUS: Fields = {
    "incarnation": COUNT,
    "step": COUNT,
    "total_steps": COUNT,
    "phase": TEXT,
    "time": SECONDS,
    "metrics": table({"step": COUNT}),
    "checkpoint": table({"step": COUNT, "age_s": SECONDS}, ("step", "age_s")),
    "checkpoint_failed": table({"step": COUNT, "reason": TEXT}),
    "waiting": table(
        {"for": list_of(COUNT), "what": TEXT, "since_s": SECONDS}, ("what", "since_s")
    ),
    "doing": DOING,
    "tasks": each(table({"host": TEXT, "attempt": COUNT, "lease_age_s": SECONDS}, ("host",))),
}
R = TypeVar("R", bound=Report)


def failure(names: NameStore, incarnation: int) -> Failure | None:
    """Return the first failure of an incarnation."""
    return _report(names, keys.failure(incarnation), Failure)


def warned(names: NameStore, incarnation: int) -> Warned | None:
    """Return the warning that the job of an incarnation will end."""
    return _report(names, keys.warned(incarnation), Warned)


def hang(names: NameStore, incarnation: int) -> Hang | None:
    """Return who waited for whom when silence or a deadline ended an incarnation."""
    return _report(names, keys.hang(incarnation), Hang)


def lost(names: NameStore, host: str) -> LostHost | None:
    """Return the incarnation and the job that gave up a host."""
    return _report(names, keys.lost(host), LostHost)


def status(names: NameStore) -> Said:
    """Return the last status that the newest master published; empty if there is none, or if it is
    damaged."""
    key = keys.status()
    try:
        said = documents.parse(names.get(key), f"the name {key}", STATUS)
    except (NameNotFoundError, CorruptFileError):
        return {}
    return {name: value for name, value in said.items() if value is not None}


def attempt(names: NameStore, group: str, task: int, number: int) -> Said:
    """Return the claim of one attempt of a task."""
    key = keys.attempt(group, task, number)
    try:
        said = documents.parse(names.get(key), f"the name {key}", ATTEMPT)
    except NameNotFoundError:
        return {}
    if said and said.get("attempt") != number:
        raise corrupt(key, f"does not hold the claim of attempt {number}")
    return said


def attempts(names: NameStore) -> list[Said]:
    """Return the claims of all attempts."""
    texts = names.get_subtree(keys.ATTEMPTS)
    where = f"a name below {keys.ATTEMPTS}"
    return [documents.parse(text, where, ATTEMPT, ATTEMPT) for text in texts]


def _report(names: NameStore, key: str, kind: type[R]) -> R | None:
    """Return None if there is no report."""
    where = f"the name {key}"
    try:
        return objects.from_json(kind, documents.parse(names.get(key), where), where)
    except NameNotFoundError:
        return None
    except CorruptFileError:
        return kind(damage=f"{where} is damaged; the trial continues without it")
