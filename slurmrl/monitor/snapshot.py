"""One look at a run directory: everything about a trial that does not need its scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmrl import keys
from slurmrl.errors import NameNotFoundError
from slurmrl.fsio import atomic, documents
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
            request = documents.read(path)
        except FileNotFoundError:
            continue  # its submitter has not come as far, or never will
        with documents.expecting(path):
            return Submission(
                number,
                str(request["scheduler"]),
                int(request["total_steps"]),
                float(request["heartbeat_s"]),
            )
    return None


def submission_numbers(paths: RunPaths) -> list[int]:
    """Numbers that are taken."""
    try:
        names = atomic.list_names(paths.submissions)
    except FileNotFoundError:
        return []
    return [int(name) for name in names if name.isascii() and name.isdigit()]


def _groups(paths: RunPaths) -> tuple[Group, ...]:
    try:
        plan = documents.read(paths.plan)
    except FileNotFoundError:
        return ()
    with documents.expecting(paths.plan):
        return tuple(
            Group(str(group["name"]), int(group["hosts"]), bool(group["elastic"]))
            for group in plan["groups"]
        )


def _said(names: NameStore, incarnation: int) -> Mapping[str, Any]:
    try:
        said = documents.parse(names.get(keys.status()), keys.status())
    except NameNotFoundError:
        return {}
    return said if said.get("incarnation") == incarnation else {}


def _attempts(
    names: NameStore, groups: tuple[Group, ...]
) -> dict[tuple[str, int], Mapping[str, Any]]:
    newest: dict[tuple[str, int], Mapping[str, Any]] = {}
    for group in groups:
        for text in names.get_subtree(keys.group_attempts(group.name)):
            where = keys.group_attempts(group.name)
            attempt = documents.parse(text, where)
            with documents.expecting(where):
                key = (group.name, int(attempt["task"]))
                if key not in newest or attempt["attempt"] > newest[key]["attempt"]:
                    newest[key] = attempt
    return newest
