"""Lists of trials: the status of many trials, and the file ``overview.json`` of finished trials.

`collect` reads each run directory once, queries each scheduler once, and waits once for all
heartbeats.

``overview.json`` only saves work. The file has the fields of a finished trial that a list shows,
the number of history records, and the size of the metrics when the file was written. Records are
never removed, so the file is current if both numbers are unchanged. Otherwise, or without the file,
a reader reads the whole trial.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from slurmrl import log
from slurmrl.errors import CorruptFileError, EnvironmentFailure, SchedulerError, SlurmrlError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.documents import INTEGER, NUMBER, SECONDS, SIZE, TEXT, Fields, one_of, table
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import recent
from slurmrl.run.lease import read_counter
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobIds, JobState, TaskState
from slurmrl.scheduler.submission import scheduler_of
from slurmrl.watch import incarnation_rows
from slurmrl.watch.diagnosis import with_findings
from slurmrl.watch.snapshot import DETAILED, GLANCE, TrialSnapshot, read
from slurmrl.watch.status import ENDS, assemble

logger = log.get(__name__)

HEARTBEATS = 1.5
"""Number of heartbeat intervals to wait for a renewal of a lease."""
KEPT: Fields = {
    "state": one_of(*ENDS.values()),
    "step": INTEGER,
    "total_steps": INTEGER,
    "metrics": table({}),
    "checkpoint": table({"step": INTEGER}, ("step",)),
    "reason": TEXT,
    "submitted": SECONDS,
    "skipped": table({"steps": INTEGER, "model": TEXT}, ("steps", "model")),
    "unjudged": table({"steps": INTEGER, "share": NUMBER}, ("steps", "share")),
}
"""Fields of the status object (see `status`) that the findings of ended trials need."""
FIELDS: Fields = {"records": SIZE, "metrics_bytes": SIZE, **KEPT}
REQUIRED = ("records", "metrics_bytes", "state", "step", "metrics")


class QueryableScheduler(Protocol):
    """The part of a scheduler that the status needs."""

    def recover(self, run: RunPaths, number: int) -> dict[str, tuple[str, ...]]: ...

    def query(self, jobs: JobIds) -> list[TaskState]: ...


SchedulerFactory = Callable[[str], QueryableScheduler]


class SchedulerAnswer:
    """The scheduler's answer about one trial."""

    def __init__(self) -> None:
        self.tasks: list[TaskState] = []
        self.past: list[TaskState] = []
        """Tasks of jobs that show only the ends of earlier incarnations."""
        self.problem: str | None = None
        """Error of a scheduler that does not answer."""
        self.damage: CorruptFileError | None = None
        """Damage of the file that names the trial's jobs."""

    @property
    def maybe_running(self) -> bool:
        unsure = (JobState.RUNNING, JobState.UNKNOWN)
        return self.problem is not None or any(task.state in unsure for task in self.tasks)


def collect(
    trials: Sequence[RunPaths],
    schedulers: SchedulerFactory,
    *,
    detailed: bool = False,
    unreadable: Callable[[RunPaths, SlurmrlError], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """Return the status object of each trial (see `watch.status`).

    ``detailed`` objects cover more incarnations. A run directory that cannot be read is passed to
    ``unreadable`` and omitted. Without ``unreadable``, the error is raised.
    """
    snapshots = _read_all(trials, DETAILED if detailed else GLANCE, unreadable)
    found = ask(snapshots, schedulers)
    for snapshot in tuple(snapshots):
        if (damage := found[snapshot.trial].damage) is not None:
            if unreadable is None:
                raise damage
            unreadable(snapshot.paths, damage)
            snapshots.remove(snapshot)
    watched = [
        snapshot
        for snapshot in snapshots
        if snapshot.state.end is None and found[snapshot.trial].maybe_running
    ]
    alive = moving(watched, sleep=sleep, clock=clock)
    return [
        assemble(
            snapshot,
            found[snapshot.trial].tasks,
            past=found[snapshot.trial].past,
            alive=snapshot.trial in alive,
            problem=found[snapshot.trial].problem,
        )
        for snapshot in snapshots
    ]


def glance(
    trials: Sequence[RunPaths],
    schedulers: SchedulerFactory,
    *,
    unreadable: Callable[[RunPaths, SlurmrlError], None],
) -> list[dict[str, Any]]:
    """Return the row of each trial for a list.

    The row is the overview of an ended trial with a current ``overview.json``, else the whole
    status object.
    """
    found = {paths: row for paths in trials if (row := read_overview(paths)) is not None}
    others = [paths for paths in trials if paths not in found]
    rows = {row["trial"]: row for row in collect(others, schedulers, unreadable=unreadable)}
    rows |= {row["trial"]: row for row in found.values()}
    names = (paths.full_name for paths in trials)
    return [rows[name] for name in names if name in rows]


def _read_all(
    trials: Sequence[RunPaths],
    incarnations: int,
    unreadable: Callable[[RunPaths, SlurmrlError], None] | None,
) -> list[TrialSnapshot]:
    snapshots = []
    for paths in trials:
        try:
            snapshots.append(read(paths, incarnations))
        except SlurmrlError as error:
            if unreadable is None:
                raise
            unreadable(paths, error)
    return snapshots


def ask(
    snapshots: Sequence[TrialSnapshot], schedulers: SchedulerFactory
) -> dict[str, SchedulerAnswer]:
    """Query each scheduler once, for jobs that may run and for the ends of earlier incarnations.

    If a scheduler does not answer about jobs that may run, ``problem`` is the error.
    """
    found = {snapshot.trial: SchedulerAnswer() for snapshot in snapshots}
    by_kind: dict[str, list[tuple[TrialSnapshot, int]]] = {}
    for snapshot in snapshots:
        for kind, number in _submissions(snapshot):
            by_kind.setdefault(kind, []).append((snapshot, number))
    for kind, asked in by_kind.items():
        try:
            for snapshot, number, task in _query(schedulers(kind), asked, found):
                answer = found[snapshot.trial]
                (answer.tasks if _may_run(snapshot, number) else answer.past).append(task)
        except EnvironmentFailure as error:
            for snapshot, number in asked:
                if _may_run(snapshot, number):
                    found[snapshot.trial].problem = str(error)
    return found


def _submissions(snapshot: TrialSnapshot) -> Iterator[tuple[str, int]]:
    """Yield the scheduler and the number of each submission whose jobs the status needs.

    These are the newest submission, unless the trial has ended, and each submission with an
    incarnation whose end is not clear from the run directory.
    """
    newest = snapshot.submission
    if newest is None:
        return
    if snapshot.state.end is None:
        yield newest.scheduler, newest.number
    unclear = (one for one in snapshot.incarnations if incarnation_rows.is_unclear(one))
    for number in {one.begun.data.get("submission") for one in unclear}:
        if isinstance(number, int) and not _may_run(snapshot, number):
            with suppress(FileNotFoundError, CorruptFileError, EnvironmentFailure):
                yield scheduler_of(snapshot.paths, number), number


def _may_run(snapshot: TrialSnapshot, number: int) -> bool:
    newest = snapshot.submission
    return snapshot.state.end is None and newest is not None and newest.number == number


def _query(
    scheduler: QueryableScheduler,
    asked: Sequence[tuple[TrialSnapshot, int]],
    found: Mapping[str, SchedulerAnswer],
) -> list[tuple[TrialSnapshot, int, TaskState]]:
    """Query a scheduler. Record in ``found`` the trials whose files do not name their jobs."""
    jobs: dict[str, tuple[str, ...]] = {}
    owners: dict[str, tuple[TrialSnapshot, int, str]] = {}
    for snapshot, number in asked:
        try:
            recovered = scheduler.recover(snapshot.paths, number)
        except (CorruptFileError, EnvironmentFailure) as error:
            if isinstance(error, SchedulerError):
                raise
            if not _may_run(snapshot, number):
                continue  # the status then lacks only the cause of an earlier end
            if isinstance(error, CorruptFileError):
                found[snapshot.trial].damage = error
            else:
                found[snapshot.trial].problem = str(error)
            continue
        for group, ids in recovered.items():
            key = f"{snapshot.trial}:{number}:{group}"  # one query covers groups of several trials
            jobs[key], owners[key] = ids, (snapshot, number, group)
    answers = []
    for task in scheduler.query(jobs):
        snapshot, number, group = owners[task.group]
        answers.append((snapshot, number, replace(task, group=group)))
    return answers


def moving(
    snapshots: Sequence[TrialSnapshot],
    *,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> set[str]:
    """Return the trials whose master renews its lease within HEARTBEATS heartbeat intervals."""
    waiting: dict[str, tuple[Path, int | None]] = {}
    heartbeats_s = [0.0]
    for snapshot in snapshots:
        lease = snapshot.lease()
        if lease is not None and snapshot.submission is not None:
            waiting[snapshot.trial] = (lease, _counter(lease))
            heartbeats_s.append(snapshot.submission.heartbeat_s)
    deadline = clock() + HEARTBEATS * max(heartbeats_s)
    alive: set[str] = set()
    while waiting and clock() < deadline:
        sleep(0.05)
        moved = {trial for trial, (lease, first) in waiting.items() if _moved(lease, first)}
        alive |= moved
        waiting = {trial: seen for trial, seen in waiting.items() if trial not in moved}
    return alive


def _moved(lease: Path, first: int | None) -> bool:
    return _counter(lease) not in (first, None)


def _counter(lease: Path) -> int | None:
    """Return the counter of a lease; None if the path is no regular file."""
    try:
        return read_counter(lease)
    except CorruptFileError:
        return None


def keep_overview(paths: RunPaths) -> None:
    """Write ``overview.json`` if the trial has ended and the file is missing or stale.

    A failure is only logged, because readers can read the whole trial instead.
    """
    try:
        if recent(paths.history, exports=False).end is None or read_overview(paths) is not None:
            return
        made_from = _made_from(paths)  # Count first: newer records make the file stale.
        trial = read(paths)
        if trial.state.end is not None:
            status = assemble(trial, [])
            values = {**made_from, **{name: status[name] for name in KEPT}}
            atomic.replace(paths.overview, json.dumps(values).encode())
    except SlurmrlError as error:
        logger.info("cannot write %s: %s", paths.overview, error)


def read_overview(paths: RunPaths) -> dict[str, Any] | None:
    """Return the overview of an ended trial: the fields `KEPT`, the trial's name and the findings.

    Return None if the file is missing, stale, damaged or unreadable.
    """
    with suppress(FileNotFoundError, CorruptFileError, EnvironmentFailure):
        kept = documents.read(paths.overview, FIELDS, REQUIRED)
        if all(kept[name] == value for name, value in _made_from(paths).items()):
            return _overview_status(paths, kept)
    return None


def _made_from(paths: RunPaths) -> dict[str, int]:
    try:
        metrics_bytes = paths.metrics.stat().st_size
    except FileNotFoundError:
        metrics_bytes = 0
    except OSError as error:
        raise EnvironmentFailure(f"{paths.metrics}: {error.strerror}") from error
    return {"records": History(paths.history).count(), "metrics_bytes": metrics_bytes}


def _overview_status(paths: RunPaths, kept: dict[str, Any]) -> dict[str, Any]:
    checkpoint = kept.get("checkpoint")
    status: dict[str, Any] = {name: kept.get(name) for name in KEPT}
    status["trial"] = paths.full_name
    status["checkpoint"] = checkpoint and {"step": checkpoint["step"], "age_s": None}
    return with_findings(status)
