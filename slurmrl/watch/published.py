"""Typed readers of the entries that processes publish in the name store.

A trial continues without reports that are damaged (see `reports.Report`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from slurmrl.errors import CorruptFileError, NameNotFoundError
from slurmrl.fsio import documents
from slurmrl.fsio.calls import corrupt
from slurmrl.fsio.documents import COUNT, SECONDS, TEXT, Dataclass, Fields, each, list_of, table
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.hang import GroupProgress
from slurmrl.run.reports import (
    Failure,
    Hang,
    Identity,
    LostHost,
    Report,
    RolloutsView,
    StacksRequest,
    Warned,
)

Said = Mapping[str, Any]
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
    "doing": list_of(documents.shape(GroupProgress)),
    "rollouts": documents.shape(RolloutsView),
    "tasks": each(table({"host": TEXT, "attempt": COUNT, "lease_age_s": SECONDS}, ("host",))),
}
_PLACE = re.compile(r"/([0-9]{1,9})\.([0-9]{1,9})")
D = TypeVar("D", bound=Dataclass)
R = TypeVar("R", bound=Report)


def failure(names: NameStore, incarnation: int) -> Failure | None:
    """Return the first failure of an incarnation."""
    return _report(names, keys.failure(incarnation), Failure)


def warned(names: NameStore, incarnation: int) -> Warned | None:
    """Return the warning that the job of an incarnation will end."""
    return _report(names, keys.warned(incarnation), Warned)


def hang(names: NameStore, incarnation: int) -> Hang | None:
    """Return the waits between ranks when silence or a deadline ended an incarnation."""
    return _report(names, keys.hang(incarnation), Hang)


def lost(names: NameStore, host: str) -> LostHost | None:
    """Return the incarnation and the job that stopped using a host."""
    return _report(names, keys.lost(host), LostHost)


def status(names: NameStore) -> Said:
    """Return the last status that the newest master published; empty if missing or damaged."""
    key = keys.status()
    try:
        said = documents.parse(names.get(key), f"the name {key}", STATUS)
    except (NameNotFoundError, CorruptFileError):
        return {}
    return {name: value for name, value in said.items() if value is not None}


def doing(status: Said) -> list[GroupProgress]:
    """Return the activity of the ranks according to a status."""
    return [
        documents.from_json(GroupProgress, one, keys.status()) for one in status.get("doing", [])
    ]


def rollouts(status: Said) -> RolloutsView | None:
    """Return the rollout tasks according to a status; None if the trial has none."""
    said = status.get("rollouts")
    return None if said is None else documents.from_json(RolloutsView, said, keys.status())


def attempt(names: NameStore, group: str, task: int, number: int) -> Identity | None:
    """Return the claim of one attempt of a task. Raises CorruptFileError."""
    key = keys.attempt(group, task, number)
    identity = _entry(names, key, Identity)
    if identity is not None and identity.attempt != number:
        raise corrupt(key, f"does not hold the claim of attempt {number}")
    return identity


def attempt_failure(names: NameStore, group: str, task: int, number: int) -> Failure | None:
    """Return the failure of an attempt at a rollout task; None if it has not failed."""
    return _report(names, keys.attempt_failure(group, task, number), Failure)


def failed_attempts(names: NameStore, group: str) -> list[tuple[int, int]]:
    """Return task and number of each attempt whose failure the group has published, in order."""
    root = keys.attempt_failures(group)
    found = map(_PLACE.fullmatch, (key.removeprefix(root) for key in names.find_subtree(root)))
    return sorted((int(place[1]), int(place[2])) for place in found if place is not None)


def attempt_numbers(names: NameStore, group: str, task: int) -> list[int]:
    """Return the numbers of a task's attempts, the newest first."""
    ends = (key.rpartition("/")[2] for key in names.find_subtree(keys.attempts(group, task)))
    return sorted((int(end) for end in ends if end.isdecimal()), reverse=True)


def newest_claim(names: NameStore, group: str, task: int, job: str) -> Identity | None:
    """Return a task's newest claim in a round, or in any round of one start of a job.

    ``job`` is ``JOBID.RESTART.ROUND`` or ``JOBID.RESTART``. Return None without a claim. Skip
    damaged claims. Raises EnvironmentFailure.
    """
    for number in attempt_numbers(names, group, task):
        with suppress(CorruptFileError):
            claim = attempt(names, group, task, number)
            if claim is not None and f"{claim.job}.".startswith(f"{job}."):
                return claim
    return None


def attempts(names: NameStore) -> list[Identity]:
    """Return the claims of all attempts. Raises CorruptFileError."""
    where = f"a name below {keys.ATTEMPTS}"
    return [_parse(text, where, Identity) for text in names.get_subtree(keys.ATTEMPTS)]


def stacks_request(names: NameStore, incarnation: int, number: int) -> StacksRequest | None:
    """Return a user's request for stacks; None if there is none. Raises CorruptFileError."""
    return _entry(names, keys.stacks(incarnation, number), StacksRequest)


def _parse(text: str, where: str, kind: type[D]) -> D:
    return documents.from_json(kind, documents.parse(text, where), where)


def _entry(names: NameStore, key: str, kind: type[D]) -> D | None:
    """Return the entry of a key; None if there is none. Raises CorruptFileError."""
    try:
        return _parse(names.get(key), f"the name {key}", kind)
    except NameNotFoundError:
        return None


def _report(names: NameStore, key: str, kind: type[R]) -> R | None:
    """Return a report; None if there is none. A damaged report only has ``damage``."""
    try:
        return _entry(names, key, kind)
    except CorruptFileError:
        return kind(damage=f"the name {key} is damaged; the trial continues without it")
