"""Snapshot of a run directory: all facts about a trial that do not need its scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from slurmrl.errors import CorruptFileError
from slurmrl.fsio import atomic, calls, documents
from slurmrl.fsio.documents import COUNT, Fields, list_of
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import events, hosts, keys, metrics
from slurmrl.run.events import Event
from slurmrl.run.history.state import Begun, Recent, recent
from slurmrl.run.hosts import BadHost
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS, Failure, Hang, Identity, Warned
from slurmrl.scheduler.submission import (
    DIGITS,
    Submission,
    claimant_words,
    may_submit,
    newest_submission,
)
from slurmrl.watch import published

GLANCE = 3
"""Number of newest incarnations to read for a diagnosis."""
DETAILED = 20
"""Number of newest incarnations to read for the detailed status."""
LINES = 20
"""Number of newest lines of metrics to read for a diagnosis."""
MORE_LINES = 200
"""Number of newest lines to search for the newest evaluation. The detailed status also reads these
lines if LINES are too few."""
FIRST_STARTS = 5
"""Number of first incarnations to search for the time at which training could begin."""
MOST_FAILURES = 100
"""Number of newest failures of rollout tasks to read."""
MOST_METRICS_BYTES = 32 * 1024 * 1024
"""Maximum size of a metrics file whose step times are added up for the detailed status."""


@dataclass(frozen=True)
class Group:
    """A worker group of the plan."""

    name: str
    hosts: Annotated[int, COUNT]
    elastic: bool
    workers_per_host: Annotated[int, COUNT] = 1


PLAN: Fields = {"groups": list_of(documents.shape(Group))}


@dataclass(frozen=True)
class Traces:
    """Evidence of one incarnation from its files. Each part may be empty."""

    begun: Begun
    failure: Failure | None
    """The incarnation's first failure."""
    warned: Warned | None
    """The warning that the incarnation's job will end."""
    hang: Hang | None
    """Description of who waited for whom when silence or a deadline ended the incarnation."""
    attempt: Identity | None
    """The claim of the first agent of the incarnation's job."""
    master: Sequence[Event]
    agent: Sequence[Event]
    """Events of the first agent about this incarnation."""
    supervisor: Sequence[Event]
    """Events of the batch process of the incarnation's job."""


@dataclass(frozen=True)
class TrialSnapshot:
    paths: RunPaths
    now: float
    """Seconds since the epoch by this host's clock, only for display."""
    state: Recent
    submission: Submission | None
    """The newest submission; None for a trial that was created but never submitted."""
    groups: tuple[Group, ...]
    said: Mapping[str, Any]
    """The last status of the current incarnation's master; empty before its first status."""
    attempts: Mapping[tuple[str, int], Identity]
    """Mapping from group and task to the newest attempt, for all tasks that have ever started."""
    task_failures: Mapping[tuple[str, int], tuple[int, Failure]]
    """The newest failures of rollout tasks: mapping from group and task to attempt and reason."""
    incarnations: Sequence[Traces]
    """The newest incarnations, oldest first."""
    lines: Sequence[Mapping[str, Any]]
    """The newest lines of metrics."""
    evaluated: Mapping[str, Any]
    """The line of the newest evaluation; empty if ``lines`` contains it."""
    checkpoint: Mapping[str, Any]
    """The line of the newest evaluation of a checkpoint by `slurmrl eval`; may be empty."""
    avoided: Sequence[BadHost]
    """The hosts that jobs avoid."""
    failed_starts: Sequence[BadHost]
    """The newest starts in a row without an incarnation, oldest first."""
    trained_s: float | None = None
    """Total seconds of the steps that count; None if not requested or if there are too many."""
    first_step_at: float | None = None
    """Time at which the ranks were ready for the first step, by the master's clock."""
    submitting: str = ""
    """The process that now submits the trial, as ``on login1, process 123``; may be empty."""
    free_bytes: int | None = None
    """Free space on the file system of the run directory, measured on this host."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The newest line of metrics, with the values of the newest evaluation."""
        lines = [self.evaluated, *self.lines] if self.evaluated else self.lines
        last = lines[-1]["step"] if lines else -1
        more = [self.checkpoint] if self.checkpoint and self.checkpoint["step"] <= last else []
        return metrics.newest(metrics.with_evaluated(lines, more))

    @property
    def total_steps(self) -> int | None:
        """Total number of steps; None if unknown.

        The master, which knows the dataset's size, reports the number. Before its report, the
        number comes from the newest submission.
        """
        submission = self.submission
        if submission is None:
            return None
        begun = self.incarnations[-1].begun.data if self.incarnations else {}
        total: int | None = self.said.get("total_steps")
        if total is not None and begun.get("submission", submission.number) == submission.number:
            return total
        return submission.total_steps

    @property
    def trial(self) -> str:
        return self.paths.full_name

    @property
    def trainers(self) -> Group | None:
        return next((group for group in self.groups if group.name == TRAINERS), None)

    def lease(self) -> Path | None:
        """Return the lease of the trainers' first agent, which shows if the master is alive."""
        attempt = self.attempts.get((TRAINERS, 0))
        return self.paths.lease(TRAINERS, 0, attempt.attempt) if attempt is not None else None


def read(paths: RunPaths, incarnations: int = GLANCE) -> TrialSnapshot:
    """Read a run directory and the traces of its newest incarnations.

    The number of files read does not depend on the age of the trial. Raises EnvironmentFailure, and
    CorruptFileError for any damaged file except the plan.
    """
    submission = newest_submission(paths)
    state = recent(paths.history, incarnations=incarnations, exports=_exported(paths))
    try:
        groups = read_groups(paths)
    except CorruptFileError:
        groups = ()  # only the tables of tasks need the plan
    names = NameStore(paths.names)
    said = _said(names, state.incarnation)
    attempts = _attempts(names, groups)
    task_failures = _task_failures(names, groups)
    leaders = _leaders(names, attempts, incarnations)
    traces = [_traces(paths, names, begun, leaders) for begun in state.begun]
    lines = metrics.read_latest(paths.metrics, LINES)
    if incarnations > GLANCE and _are_too_few(lines, state):
        lines = metrics.read_latest(paths.metrics, MORE_LINES)
    return TrialSnapshot(
        paths,
        time.time(),
        state,
        submission,
        groups,
        said,
        attempts,
        task_failures,
        traces,
        lines,
        {}
        if any(map(metrics.evaluates, lines))
        else metrics.read_evaluation(paths.metrics, MORE_LINES),
        metrics.newest_evaluated(paths),
        hosts.avoided(paths),
        hosts.newest_failed_starts(paths),
        *(_times(paths, state.incarnation) if incarnations > GLANCE else (None, None)),
        _submitting(paths, submission),
        calls.free_bytes(paths.run),
    )


def _are_too_few(lines: Sequence[Mapping[str, Any]], state: Recent) -> bool:
    """Return whether the detailed status may count steps before these lines.

    The status counts the steps after the last commit, and steps in a row without an update.
    """
    if len(lines) < LINES:
        return False
    committed = state.last_commit.step if state.last_commit is not None else 0
    skipped = any(value for name, value in lines[0].items() if name.endswith("skipped"))
    return lines[0]["step"] > committed or skipped


def _times(paths: RunPaths, incarnations: int) -> tuple[float | None, float | None]:
    """Return the total seconds of all steps, and the time at which the first step could begin."""
    first = None
    for number in range(1, min(incarnations, FIRST_STARTS) + 1):
        ready = [e for e in events.read_ends(paths, f"master.{number}") if e["kind"] == "ready"]
        if ready:
            first = float(ready[0]["time"])
            break
    try:
        size = paths.metrics.stat().st_size
    except FileNotFoundError:
        return None, first
    if size > MOST_METRICS_BYTES:
        return None, first
    return sum(metrics.read_values(paths.metrics, metrics.STEP_S)), first


def _exported(paths: RunPaths) -> bool:
    try:
        return bool(atomic.list_names(paths.exports))
    except FileNotFoundError:
        return False


def _traces(paths: RunPaths, names: NameStore, begun: Begun, leaders: Sequence[Identity]) -> Traces:
    job = begun.data.get("job")
    attempt = next((one for one in leaders if job and one.job == job), None)
    return Traces(
        begun,
        published.failure(names, begun.number),
        published.warned(names, begun.number),
        published.hang(names, begun.number),
        attempt,
        events.read_ends(paths, f"master.{begun.number}"),
        [] if attempt is None else _agent(paths, attempt, begun.number),
        [] if attempt is None else _supervisor(paths, attempt),
    )


def _agent(paths: RunPaths, attempt: Identity, incarnation: int) -> list[Event]:
    """Return the agent's events of one incarnation.

    An event that names no incarnation belongs to the incarnation of the previous event.
    """
    writer = f"agent.{attempt.group}.{attempt.task}.{attempt.attempt}"
    found, named = [], None
    for event in events.read_ends(paths, writer):
        named = event.get("incarnation", named)
        if named == incarnation:
            found.append(event)
    return found


def _supervisor(paths: RunPaths, attempt: Identity) -> list[Event]:
    """Return the events of the batch process of an agent's job."""
    start = ".".join(attempt.job.split(".")[:2])
    return events.read_ends(paths, f"supervisor.{attempt.group}.{start}")


def _submitting(paths: RunPaths, submission: Submission | None) -> str:
    """Return the process that now submits the trial; empty if there is none."""
    made = paths.identity
    if submission is not None:
        made = paths.submission_request(submission.number)
        if paths.submission_jobs(submission.number).exists():
            return ""
    try:
        entries = documents.read(made)
    except FileNotFoundError:
        return ""
    return claimant_words(entries) if may_submit(entries) else ""


def read_groups(paths: RunPaths) -> tuple[Group, ...]:
    try:
        plan = documents.read(paths.plan, PLAN, PLAN)
    except FileNotFoundError:
        return ()
    return tuple(documents.from_json(Group, group, paths.plan) for group in plan["groups"])


def _said(names: NameStore, incarnation: int) -> Mapping[str, Any]:
    said = published.status(names)
    return said if said.get("incarnation") == incarnation else {}


def _attempts(names: NameStore, groups: tuple[Group, ...]) -> dict[tuple[str, int], Identity]:
    """Return the newest attempt of each task, without reading the claims of earlier attempts."""
    newest: dict[tuple[str, int], int] = {}
    for group in groups:
        for task, number in _numbers(names, group.name):
            newest[group.name, task] = max(number, newest.get((group.name, task), 0))
    return {
        (group, task): _attempt(names, group, task, number)
        for (group, task), number in sorted(newest.items())
    }


def _task_failures(
    names: NameStore, groups: tuple[Group, ...]
) -> dict[tuple[str, int], tuple[int, Failure]]:
    found: dict[tuple[str, int], tuple[int, Failure]] = {}
    for group in (one.name for one in groups if one.name != TRAINERS):
        for task, number in published.failed_attempts(names, group)[-MOST_FAILURES:]:
            failure = published.attempt_failure(names, group, task, number)
            if failure is not None:
                found[group, task] = number, failure
    return found


def _numbers(names: NameStore, group: str) -> Iterator[tuple[int, int]]:
    """Yield the task and the attempt of each claim."""
    root = keys.group_attempts(group)
    for key in names.find_subtree(root):
        task, _, number = key.removeprefix(f"{root}/").partition("/")
        if DIGITS.fullmatch(task) and DIGITS.fullmatch(number):
            yield int(task), int(number)


def _attempt(names: NameStore, group: str, task: int, number: int) -> Identity:
    """Return a claim, with empty host and job if a stale cache hides the content of its key."""
    hidden = Identity(group, task, number, host="", job="", job_id="")
    return published.attempt(names, group, task, number) or hidden


def _leaders(
    names: NameStore, attempts: Mapping[tuple[str, int], Identity], count: int
) -> list[Identity]:
    """Return the ``count`` newest attempts of the trainers' task 0, newest first.

    Each incarnation began in the job of one of these attempts.
    """
    newest = attempts.get((TRAINERS, 0))
    if newest is None:
        return []
    numbers = range(newest.attempt, max(-1, newest.attempt - count), -1)
    return [_attempt(names, TRAINERS, 0, number) for number in numbers]
