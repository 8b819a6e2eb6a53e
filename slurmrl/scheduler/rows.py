"""Rows of one type from the output of squeue, scontrol and sacct."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurmrl.errors import SchedulerError
from slurmrl.scheduler import parse, states

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
"""Fields requested from squeue. A field with a suffix and no size is never truncated. The reason
can be free text, so it comes last."""


@dataclass(frozen=True)
class QueueRow:
    """One line: one element, or all pending elements of an array."""

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
"""The begin of a row. A job's row that has other fields than were requested is an error."""


def queue(text: str) -> list[QueueRow]:
    """The rows of ``squeue --noheader --Format=QUEUE_FORMAT``."""
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
"""Fields in scontrol's order; what a user chooses (a job's name) can look like any of them."""


def control(text: str) -> list[QueueRow]:
    """The rows of ``scontrol show job --oneliner JOBID``."""
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
"""Fields requested from sacct, as ``--parsable2`` with one line per element (``--allocations``)."""


def accounting(text: str) -> list[QueueRow]:
    """The rows of ``sacct --noheader --parsable2 --allocations --format=ACCOUNTING_FORMAT``."""
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
    """Exit code and signal of the batch process, once it has ended."""
    ended = not states.interpret(raw).state.active or states.ending(raw, reason) is not None
    return parse.exit_status(code) if ended else parse.NO_EXIT
