"""States of a trial's elements, from the rows of Slurm's output."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace

from slurmrl.scheduler import reasons, states
from slurmrl.scheduler.base import JobIds, JobState, TaskState
from slurmrl.scheduler.rows import QueueRow


def task_states(rows: Iterable[QueueRow], jobs: JobIds) -> list[TaskState]:
    """Return the states by group (in the order of ``jobs``), array and element. A job whose row
    names no element appears as its first element. A group without any row is UNKNOWN: Slurm has
    forgotten it."""
    by_job: dict[str, list[QueueRow]] = {}
    for row in rows:
        by_job.setdefault(row.job, []).append(row)
    result: list[TaskState] = []
    for group, ids in jobs.items():
        tasks = [task for job in ids for task in _tasks(group, by_job.get(job, []))]
        shown = [task for task in tasks if task.element >= 0]
        # What is left of an array whose pending elements were cancelled tells only if nothing does.
        result += shown or [replace(task, element=0) for task in tasks[:1]]
        if not tasks:
            result.append(forgotten(group, ids[-1] if ids else ""))
    return result


def _tasks(group: str, rows: list[QueueRow]) -> list[TaskState]:
    """Return the elements of one array; a single one numbered -1 if its rows name none."""
    tasks = [_task(group, row, element) for row in rows for element in row.elements]
    if rows and not tasks:
        tasks = [_task(group, rows[0], -1)]
    return sorted(tasks, key=lambda task: task.element)


def _task(group: str, row: QueueRow, element: int) -> TaskState:
    state = states.interpret(row.raw).state
    return TaskState(
        job_id=f"{row.job}_{max(element, 0)}",
        group=group,
        element=element,
        state=state,
        ending=states.ending(row.raw, row.reason),
        raw=row.raw,
        reason=row.reason,
        hosts=row.hosts,
        words=words(row),
        exit_code=row.exit_code,
        signal=row.signal,
        time_left_s=row.time_left_s if state is JobState.RUNNING else None,
        start=row.start,
        restarts=row.restarts,
    )


def words(row: QueueRow) -> str:
    """Explain why an element is pending, or how it ended."""
    known = states.interpret(row.raw)
    if known.state is JobState.PENDING:
        return reasons.explain(row.reason) or ("" if row.raw == "PENDING" else known.meaning)
    if (ending := states.ending(row.raw, row.reason)) is not None:
        return f"{_ended(states.interpret(ending), row)}, some hosts are still busy"
    if known.state is JobState.RUNNING:
        return "" if row.raw == "RUNNING" else known.meaning
    return _ended(known, row)


def _ended(known: states.SlurmState, row: QueueRow) -> str:
    if known.state is not JobState.FAILED:
        return known.meaning
    if row.signal is not None:
        return f"was ended by signal {row.signal}{_signal_name(row.signal)}"
    return f"ended with exit code {row.exit_code}" if row.exit_code else known.meaning


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


def forgotten(group: str, job: str) -> TaskState:
    """Return the state of a job that its scheduler no longer knows."""
    reason = "the scheduler has forgotten it"
    return TaskState(job, group, 0, JobState.UNKNOWN, "", reason, (), reason)
