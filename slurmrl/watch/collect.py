"""The status of many trials at once.

This costs one look at each run directory, one query per scheduler and one wait for all heartbeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from slurmrl.errors import EnvironmentFailure, SlurmrlError
from slurmrl.run.lease import read_counter
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobIds, JobState, TaskState
from slurmrl.watch import overview
from slurmrl.watch.snapshot import GLANCE, STORY, TrialSnapshot, read
from slurmrl.watch.status import assemble

HEARTBEATS = 1.5
"""Heartbeat intervals to wait for a lease to move."""


class QueryableScheduler(Protocol):
    """The part of a scheduler that the status needs."""

    def recover(self, run: RunPaths, number: int) -> dict[str, tuple[str, ...]]: ...

    def query(self, jobs: JobIds) -> list[TaskState]: ...


SchedulerFactory = Callable[[str], QueryableScheduler]


class SchedulerAnswer:
    """The scheduler's answer about one trial."""

    def __init__(self) -> None:
        self.tasks: list[TaskState] = []
        self.problem: str | None = None

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
    """Return the documented object of each trial (see ``status``); ``detailed`` ones cover more
    incarnations. A run directory that cannot be read is passed to ``unreadable`` and left out;
    without that it raises."""
    snapshots = _read_all(trials, STORY if detailed else GLANCE, unreadable)
    found = ask(snapshots, schedulers)
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
    """Return what a list shows of each trial: `overview` of the ended ones that have a current one,
    the whole object of the others."""
    found = {paths: row for paths in trials if (row := overview.read(paths)) is not None}
    others = [paths for paths in trials if paths not in found]
    rows = {row["trial"]: row for row in collect(others, schedulers, unreadable=unreadable)}
    rows |= {row["trial"]: row for row in found.values()}
    names = (f"{paths.experiment}/{paths.trial}" for paths in trials)
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
    """Query each scheduler once for all trials that have not ended. ``problem`` holds the error of
    one that does not answer."""
    found = {snapshot.trial: SchedulerAnswer() for snapshot in snapshots}
    by_kind: dict[str, list[TrialSnapshot]] = {}
    for snapshot in snapshots:
        if snapshot.state.end is None and snapshot.submission is not None:
            by_kind.setdefault(snapshot.submission.scheduler, []).append(snapshot)
    for kind, asked in by_kind.items():
        try:
            for snapshot, task in _query(schedulers(kind), asked):
                found[snapshot.trial].tasks.append(task)
        except EnvironmentFailure as error:
            for snapshot in asked:
                found[snapshot.trial].problem = str(error)
    return found


def _query(
    scheduler: QueryableScheduler, snapshots: Sequence[TrialSnapshot]
) -> list[tuple[TrialSnapshot, TaskState]]:
    jobs: dict[str, tuple[str, ...]] = {}
    owners: dict[str, tuple[TrialSnapshot, str]] = {}
    for snapshot in snapshots:
        assert snapshot.submission is not None
        recovered = scheduler.recover(snapshot.paths, snapshot.submission.number)
        for group, ids in recovered.items():
            key = f"{snapshot.trial}:{group}"  # groups of several trials in one query
            jobs[key], owners[key] = ids, (snapshot, group)
    answers = []
    for task in scheduler.query(jobs):
        snapshot, group = owners[task.group]
        answers.append((snapshot, replace(task, group=group)))
    return answers


def moving(
    snapshots: Sequence[TrialSnapshot],
    *,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> set[str]:
    """Return the trials whose master's lease moves within HEARTBEATS heartbeat intervals."""
    waiting: dict[str, tuple[Path, int | None]] = {}
    heartbeats_s = [0.0]
    for snapshot in snapshots:
        lease = snapshot.lease()
        if lease is not None and snapshot.submission is not None:
            waiting[snapshot.trial] = (lease, read_counter(lease))
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
    return read_counter(lease) not in (first, None)
