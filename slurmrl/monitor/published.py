"""Typed readers of what processes publish in the name store.

A key that was not published reads as an empty object. A damaged failure, warning, hang, status or
lost host reads as an object with nothing but `DAMAGE`: a trial continues without them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slurmrl import keys
from slurmrl.errors import CorruptFileError, NameNotFoundError
from slurmrl.fsio import documents
from slurmrl.fsio.failures import corrupt
from slurmrl.fsio.shapes import (
    COUNT,
    FLAG,
    INTEGER,
    SECONDS,
    TEXT,
    Fields,
    FieldType,
    each,
    list_of,
    table,
)
from slurmrl.name_resolve.base import NameStore

Said = Mapping[str, Any]
SPANS = re.compile(r"(\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*)?")

ATTEMPT: Fields = {
    "group": TEXT,
    "task": COUNT,
    "attempt": COUNT,
    "host": TEXT,
    "job": TEXT,
    "job_id": TEXT,
}
FAILURE: Fields = {
    "cause": TEXT,
    "reason": TEXT,
    "host": TEXT,
    "rank": COUNT,
    "call": TEXT,
    "step": INTEGER,
    "exception": TEXT,
    "traceback": TEXT,
    "damaged": TEXT,
    "absent": TEXT,
    "final": FLAG,
    "echo": FLAG,
    "gpu": TEXT,
    "certain": FLAG,
    "agent": TEXT,
}
_DOES: Fields = {
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
HANG: Fields = {"text": TEXT, "files": list_of(TEXT)}
REQUEST: Fields = {"ranks": list_of(COUNT)}
WARNED: Fields = {"signal": TEXT, "cause": TEXT, "time_left_s": SECONDS}
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
LOST: Fields = {"incarnation": COUNT, "job": TEXT}
DAMAGE = "damage"
"""Field of a damaged entry: which one it is."""


def failure(names: NameStore, incarnation: int) -> Said:
    """Return the first failure of an incarnation (see `workers.failure`)."""
    return _said(names, keys.failure(incarnation), FAILURE)


def warned(names: NameStore, incarnation: int) -> Said:
    """Return the warning that the job of an incarnation will end."""
    return _said(names, keys.warned(incarnation), WARNED)


def hang(names: NameStore, incarnation: int) -> Said:
    """Return who waited for whom when silence or a deadline ended an incarnation."""
    return _said(names, keys.hang(incarnation), HANG)


def status(names: NameStore) -> Said:
    """Return the last status that the newest master published."""
    return _said(names, keys.status(), STATUS)


def lost(names: NameStore, host: str) -> Said:
    """Return the incarnation and the job that gave up a host."""
    return _said(names, keys.lost(host), LOST)


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


def _said(names: NameStore, key: str, fields: Fields) -> Said:
    try:
        said = documents.parse(names.get(key), f"the name {key}", fields)
        return {name: value for name, value in said.items() if value is not None}
    except NameNotFoundError:
        return {}
    except CorruptFileError:
        return {DAMAGE: f"the name {key} is damaged; the trial continues without it"}
