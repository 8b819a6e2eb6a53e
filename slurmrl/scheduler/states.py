"""States of a trial's elements: Slurm's job states, rows of its commands, and their meaning.

Names and meanings of states come from squeue's manual page (JOB STATE CODES) and from
``job_states`` in slurm.h, from Slurm 22.05 on. Slurm may show a flag instead of a base state.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from slurmrl.errors import SchedulerError
from slurmrl.scheduler import parse, reasons
from slurmrl.scheduler.base import JobIds, JobState, TaskState


class SlurmState(NamedTuple):
    state: JobState
    meaning: str


BASE_STATES: dict[str, SlurmState] = {
    "PENDING": SlurmState(JobState.PENDING, "waits for resources"),
    "RUNNING": SlurmState(JobState.RUNNING, "runs"),
    "SUSPENDED": SlurmState(JobState.RUNNING, "suspended, keeps its hosts"),
    "COMPLETED": SlurmState(JobState.COMPLETED, "ended with exit code 0"),
    "CANCELLED": SlurmState(JobState.CANCELLED, "cancelled by a user or an administrator"),
    "FAILED": SlurmState(JobState.FAILED, "ended with an exit code or a signal"),
    "TIMEOUT": SlurmState(JobState.TIMEOUT, "reached its time limit"),
    "NODE_FAIL": SlurmState(JobState.NODE_FAIL, "a host failed"),
    "PREEMPTED": SlurmState(JobState.PREEMPTED, "preempted by another job"),
    "BOOT_FAIL": SlurmState(JobState.NODE_FAIL, "a host did not boot"),
    "DEADLINE": SlurmState(JobState.TIMEOUT, "reached its deadline"),
    "OUT_OF_MEMORY": SlurmState(JobState.OUT_OF_MEMORY, "used more memory than it requested"),
}

FLAGS: dict[str, SlurmState] = {
    "COMPLETING": SlurmState(JobState.RUNNING, "is ending, some hosts are still busy"),
    "CONFIGURING": SlurmState(JobState.PENDING, "its hosts are being prepared"),
    "EXPEDITING": SlurmState(JobState.PENDING, "was requeued and starts again with priority"),
    "LAUNCH_FAILED": SlurmState(JobState.FAILED, "could not be started on its hosts"),
    "POWER_UP_NODE": SlurmState(JobState.PENDING, "has hosts that are powering up"),
    "RECONFIG_FAIL": SlurmState(JobState.FAILED, "its hosts could not be configured"),
    "REQUEUED": SlurmState(JobState.PENDING, "was requeued"),
    "REQUEUE_FED": SlurmState(JobState.PENDING, "is being requeued by the federation"),
    "REQUEUE_HOLD": SlurmState(JobState.PENDING, "was requeued and is held"),
    "RESIZING": SlurmState(JobState.RUNNING, "is changing its size"),
    "RESV_DEL_HOLD": SlurmState(JobState.PENDING, "held: its reservation was deleted"),
    "REVOKED": SlurmState(JobState.CANCELLED, "another cluster of the federation runs it"),
    "SIGNALING": SlurmState(JobState.RUNNING, "is being signaled"),
    "SPECIAL_EXIT": SlurmState(JobState.PENDING, "was requeued in a special state and is held"),
    "STAGE_OUT": SlurmState(JobState.RUNNING, "is copying files out"),
    "STOPPED": SlurmState(JobState.RUNNING, "stopped by a signal, keeps its hosts"),
    "UPDATE_DB": SlurmState(JobState.RUNNING, "waits for an update of the database"),
}

UNKNOWN = SlurmState(JobState.UNKNOWN, "a state that this version of slurmrl does not know")

ENDINGS: dict[str, JobState] = {
    "JobLaunchFailure": JobState.FAILED,
    "NodeDown": JobState.NODE_FAIL,
    "NonZeroExitCode": JobState.FAILED,
    "OutOfMemory": JobState.OUT_OF_MEMORY,
    "RaisedSignal": JobState.FAILED,
    "TimeLimit": JobState.TIMEOUT,
}
"""Mapping from a completing job's reason to its final state, which the flag ``COMPLETING`` hides. A
batch process killed by a signal has the reason ``JobLaunchFailure`` in Slurm 22.05, and
``RaisedSignal`` in newer versions."""


def interpret(raw: str) -> SlurmState:
    """Return the meaning of Slurm's string for a state.

    Examples are ``RUNNING``, ``PENDING,REQUEUED`` and sacct's ``CANCELLED by 1000``. A flag takes
    precedence over its base state, because the flag is more specific.
    """
    words = [word for word in re.split(r"[,+\s]+", raw.upper()) if word]
    for table in (FLAGS, BASE_STATES):
        for word in words:
            if word in table:
                return table[word]
    return UNKNOWN


def ending(raw: str, reason: str) -> JobState | None:
    """Return the final state of a job that is completing, from its reason.

    Return None for another job, and if the reason does not show the final state.
    """
    if "COMPLETING" not in raw.upper():
        return None
    return ENDINGS.get(reason.partition(":")[0])


QUEUE_FIELDS = (
    "ArrayJobID",
    "ArrayTaskID",
    "State",
    "NodeList",
    "Name",
    "exit_code",
    "TimeLeft",
    "StartTime",
    "RestartCnt",
    "Reason",
)
QUEUE_FORMAT = ",".join(f"{name}:|" for name in QUEUE_FIELDS)
"""Fields requested from squeue. squeue does not truncate a field that has a suffix and no size. The
reason is last, because it can contain the separator."""


@dataclass(frozen=True)
class QueueRow:
    """One row of the queue: one element, or all pending elements of an array."""

    job: str
    elements: tuple[int, ...]
    raw: str
    hosts: tuple[str, ...]
    name: str
    reason: str
    exit_code: int | None = None
    signal: int | None = None
    time_left_s: float | None = None
    start: str = ""
    restarts: int = 0


_QUEUED = re.compile(r"\d+\|")
"""Beginning of a row. A row must have as many fields as requested."""


def queue(text: str) -> list[QueueRow]:
    """Parse the rows of ``squeue --noheader --Format=QUEUE_FORMAT``."""
    rows = []
    for line in parse.rows(text, "squeue", _QUEUED.match):
        fields = line.removesuffix("|").split("|", len(QUEUE_FIELDS) - 1)
        if len(fields) != len(QUEUE_FIELDS):
            raise SchedulerError(f"unexpected line from squeue: {line!r}")
        job, index, raw, host_list, name, code, left, start, restarts, reason = fields
        exit_code, number = _exit_status(raw, reason, code)
        rows.append(
            QueueRow(
                job,
                parse.elements(index),
                raw,
                parse.hosts(host_list),
                name,
                parse.said(reason),
                exit_code,
                number,
                parse.duration_s(left),
                parse.said(start),
                int(restarts) if restarts.isdigit() else 0,
            )
        )
    return rows


_CONTROL = re.compile(
    r"JobId=(?P<id>\d+)(?: ArrayJobId=(?P<array>\d+) ArrayTaskId=(?P<index>\S+))?.*?"
    r" JobName=(?P<name>.*) UserId=.*?"
    r" JobState=(?P<state>\S+) Reason=(?P<reason>.*?)(?: FailedNode=\S*)? Dependency=.*?"
    r" Restarts=(?P<restarts>\d+).*? ExitCode=(?P<code>\S+).*?"
    r" RunTime=(?P<ran>\S+) TimeLimit=(?P<limit>\S+).*? StartTime=(?P<start>\S+).*?"
    r" NodeList=(?P<hosts>\S*)"
)
"""Fields in scontrol's order. The order matters, because a job name can contain text such as
``JobState=``."""


def control(text: str) -> list[QueueRow]:
    """Parse the rows of ``scontrol show job --oneliner JOBID``."""
    result = []
    for line in parse.rows(text, "scontrol", re.compile("JobId=").match):
        found = _CONTROL.match(line)
        if not found:
            raise SchedulerError(f"unexpected line from scontrol: {line!r}")
        exit_code, number = _exit_status(found["state"], found["reason"], found["code"])
        ran_s, limit_s = parse.duration_s(found["ran"]), parse.duration_s(found["limit"])
        result.append(
            QueueRow(
                found["array"] or found["id"],
                parse.elements(found["index"] or ""),
                found["state"],
                parse.hosts(parse.said(found["hosts"])),
                found["name"],
                parse.said(found["reason"]),
                exit_code,
                number,
                None if limit_s is None else max(limit_s - (ran_s or 0.0), 0.0),
                parse.said(found["start"]),
                int(found["restarts"]),
            )
        )
    return result


ACCOUNTING_FIELDS = ("JobID", "State", "ExitCode", "NodeList", "JobName", "Start", "Reason")
ACCOUNTING_FORMAT = ",".join(ACCOUNTING_FIELDS)
"""Fields requested from sacct, which prints one line per element (``--allocations``)."""


def accounting(text: str) -> list[QueueRow]:
    """Parse rows of ``sacct --noheader --parsable2 --allocations --format=ACCOUNTING_FORMAT``."""
    result = []
    for line in parse.rows(text, "sacct", re.compile(r"\d+[_+|]").match):
        fields = line.split("|", len(ACCOUNTING_FIELDS) - 1)
        found = re.fullmatch(r"(\d+)(?:_(\d+|\[.*\]))?(?:\+\d+)?", fields[0])
        if len(fields) != len(ACCOUNTING_FIELDS) or not found:
            raise SchedulerError(f"unexpected line from sacct: {line!r}")
        _, raw, code, host_list, name, start, reason = fields
        exit_code, number = _exit_status(raw, reason, code)
        result.append(
            QueueRow(
                found[1],
                parse.elements(found[2] or ""),
                raw,
                () if host_list == "None assigned" else parse.hosts(host_list),
                name,
                parse.said(reason),
                exit_code,
                number,
                start=parse.said(start),
            )
        )
    return result


def _exit_status(raw: str, reason: str, code: str) -> tuple[int | None, int | None]:
    """Return exit code and signal of the batch process; None for both while it runs."""
    ended = not interpret(raw).state.active or ending(raw, reason) is not None
    return parse.exit_status(code) if ended else parse.NO_EXIT


def task_states(rows: Iterable[QueueRow], jobs: JobIds) -> list[TaskState]:
    """Return the states sorted by group (in the order of ``jobs``), array and element.

    Show a job whose row names no element as its first element. Show a group without any row as
    UNKNOWN, because Slurm has forgotten it.
    """
    by_job: dict[str, list[QueueRow]] = {}
    for row in rows:
        by_job.setdefault(row.job, []).append(row)
    result: list[TaskState] = []
    for group, ids in jobs.items():
        tasks = [task for job in ids for task in _tasks(group, by_job.get(job, []))]
        shown = [task for task in tasks if task.element >= 0]
        # A cancelled array has a row without elements. Show it only if there is no other row.
        result += shown or [replace(task, element=0) for task in tasks[:1]]
        if not tasks:
            result.append(forgotten(group, ids[-1] if ids else ""))
    return result


def _tasks(group: str, rows: list[QueueRow]) -> list[TaskState]:
    """Return the elements of one array. If the rows name no element, return number -1."""
    tasks = [_task(group, row, element) for row in rows for element in row.elements]
    if rows and not tasks:
        tasks = [_task(group, rows[0], -1)]
    return sorted(tasks, key=lambda task: task.element)


def _task(group: str, row: QueueRow, element: int) -> TaskState:
    state = interpret(row.raw).state
    return TaskState(
        job_id=f"{row.job}_{max(element, 0)}",
        group=group,
        element=element,
        state=state,
        ending=ending(row.raw, row.reason),
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
    known = interpret(row.raw)
    if known.state is JobState.PENDING:
        return reasons.explain(row.reason) or ("" if row.raw == "PENDING" else known.meaning)
    if (end := ending(row.raw, row.reason)) is not None:
        return f"{_ended(interpret(end), row)}, some hosts are still busy"
    if known.state is JobState.RUNNING:
        return "" if row.raw == "RUNNING" else known.meaning
    return _ended(known, row)


def _ended(known: SlurmState, row: QueueRow) -> str:
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
    reason = "the scheduler no longer knows it"
    return TaskState(job, group, 0, JobState.UNKNOWN, "", reason, (), reason)
