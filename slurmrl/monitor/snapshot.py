"""One look at a run directory: everything about a trial that does not need its scheduler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmrl import keys
from slurmrl.errors import CorruptFileError, NameNotFoundError
from slurmrl.fsio import atomic
from slurmrl.history.log import History
from slurmrl.history.state import TrialState, fold
from slurmrl.monitor import metrics
from slurmrl.name_resolve import make
from slurmrl.name_resolve.base import NameStore
from slurmrl.paths import RunPaths


@dataclass(frozen=True)
class Submission:
    """What ``request.json`` says about one submission."""

    number: int
    scheduler: str
    total_steps: int
    heartbeat_s: float


@dataclass(frozen=True)
class Group:
    """What the plan says about one group."""

    name: str
    hosts: int
    elastic: bool


@dataclass(frozen=True)
class Snapshot:
    paths: RunPaths
    state: TrialState
    submission: Submission | None
    """The newest one; None for a trial that was made but never submitted."""
    groups: tuple[Group, ...]
    said: Mapping[str, Any]
    """What the master of the current incarnation said last; empty if it said nothing yet."""
    attempts: Mapping[tuple[str, int], Mapping[str, Any]]
    """The newest attempt of each task that was ever started, by group and task."""
    metrics: Mapping[str, Any]

    @property
    def trial(self) -> str:
        return f"{self.paths.experiment}/{self.paths.trial}"

    def lease(self) -> Path | None:
        """Heartbeat that the master's life shows in: that of the first group's first agent."""
        if not self.groups:
            return None
        group = self.groups[0].name
        attempt = self.attempts.get((group, 0))
        return self.paths.lease(group, 0, attempt["attempt"]) if attempt else None


def read(paths: RunPaths) -> Snapshot:
    """Look at a run directory. Raises CorruptFileError for files that are not ours."""
    state = fold(History(paths.history).read())
    groups = _groups(paths)
    with make("file", directory=paths.names) as names:
        said = _said(names, state.incarnation)
        attempts = _attempts(names, groups)
    return Snapshot(
        paths,
        state,
        newest_submission(paths),
        groups,
        said,
        attempts,
        metrics.latest(paths.metrics),
    )


def newest_submission(paths: RunPaths) -> Submission | None:
    for number in sorted(submission_numbers(paths), reverse=True):
        path = paths.submission_request(number)
        try:
            request = _json(path)
        except FileNotFoundError:
            continue  # its submitter has not come as far, or never will
        return Submission(
            number, request["scheduler"], request["total_steps"], request["heartbeat_s"]
        )
    return None


def submission_numbers(paths: RunPaths) -> list[int]:
    """Numbers that are taken."""
    try:
        return [int(name) for name in atomic.list_names(paths.submissions) if name.isdigit()]
    except FileNotFoundError:
        return []


def _groups(paths: RunPaths) -> tuple[Group, ...]:
    try:
        plan = _json(paths.plan)
    except FileNotFoundError:
        return ()
    return tuple(Group(group["name"], group["hosts"], group["elastic"]) for group in plan["groups"])


def _said(names: NameStore, incarnation: int) -> Mapping[str, Any]:
    try:
        said = json.loads(names.get(keys.status()))
    except NameNotFoundError:
        return {}
    return said if said["incarnation"] == incarnation else {}


def _attempts(
    names: NameStore, groups: tuple[Group, ...]
) -> dict[tuple[str, int], Mapping[str, Any]]:
    newest: dict[tuple[str, int], Mapping[str, Any]] = {}
    for group in groups:
        for text in names.get_subtree(keys.group_attempts(group.name)):
            attempt = json.loads(text)
            key = (group.name, attempt["task"])
            if key not in newest or attempt["attempt"] > newest[key]["attempt"]:
                newest[key] = attempt
    return newest


def _json(path: Path) -> Any:
    try:
        return json.loads(atomic.read(path))
    except ValueError as error:
        raise CorruptFileError(f"{path}: {error}") from error
