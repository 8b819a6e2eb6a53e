"""Slurm's answers read by pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurmrl.errors import SchedulerError
from slurmrl.scheduler import states
from slurmrl.scheduler.base import JobState, TaskState

QUEUE_FORMAT = "%F|%K|%T|%N|%j|%r"
"""squeue's fields: array's job id, element or elements, state, hosts, name, reason. The reason can
be free text, so it stands last."""


@dataclass(frozen=True)
class QueueRow:
    """One line of squeue: one element, or all pending elements of an array."""

    job: str
    elements: tuple[int, ...]
    raw: str
    hosts: tuple[str, ...]
    name: str
    reason: str


HOSTS_FORMAT = "%N|%T|%G"
"""sinfo's fields, one line for each host and partition: host, state, generic resources."""
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)*?:(\d+)")


@dataclass(frozen=True)
class HostRow:
    """One host of the cluster."""

    name: str
    state: str
    gpus: int


def cluster_hosts(text: str) -> list[HostRow]:
    """The hosts in sinfo's answer, each once. GPUs of several kinds count together."""
    found = {}
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) < 3:
            raise SchedulerError(f"sinfo's line was not understood: {line!r}")
        gpus = sum(int(number) for number in _GPUS.findall(parts[2]))
        found[parts[0]] = HostRow(parts[0], parts[1], gpus)
    return list(found.values())


def job_id(text: str) -> str:
    """The job id in the output of ``sbatch --parsable``: ``41`` or ``41;cluster``."""
    last = text.strip().splitlines()[-1:] or [""]
    found = re.fullmatch(r"(\d+)(;.*)?", last[0].strip())
    if not found:
        raise SchedulerError(f"sbatch did not answer with a job id but with {text.strip()!r}")
    return found[1]


def _ranges(text: str) -> Iterable[str]:
    """``4-6`` -> 4 5 6, ``001-003`` -> 001 002 003, ``0-4:2`` -> 0 2 4; joined by commas."""
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip())
        if not found:
            raise SchedulerError(f"not a range that Slurm prints: {part!r} in {text!r}")
        first, last, step = found[1], found[2] or found[1], int(found[3] or 1)
        for value in range(int(first), int(last) + 1, step):
            yield str(value).zfill(len(first))


def elements(text: str) -> tuple[int, ...]:
    """Array elements as squeue prints them: ``3``, ``[4-9%4]``, ``0,2-6:2``; none for ``N/A`` (no
    array, or what is left of one whose pending elements were cancelled)."""
    ranges = text.strip().strip("[]").partition("%")[0].strip("[]")
    if ranges in ("", "N/A"):
        return ()
    return tuple(int(value) for value in _ranges(ranges))


def element_list(values: Iterable[int]) -> str:
    """Elements in the form that Slurm's commands take: ``0,4-7``."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def hosts(text: str) -> tuple[str, ...]:
    """Host names of a host list such as ``n[0-1,07],gpu-3[1-2]x``."""
    names: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip()):
        expanded = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", entry):
            tails = [plain] if plain else list(_ranges(ranges))
            expanded = [head + tail for head in expanded for tail in tails]
        names += expanded
    return tuple(names)


def queue(text: str) -> list[QueueRow]:
    """The rows of ``squeue --noheader --format=QUEUE_FORMAT``."""
    rows = []
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = line.strip().split("|", 5)
        if len(fields) != 6:
            raise SchedulerError(f"not a line that squeue was asked for: {line!r}")
        job, index, raw, host_list, name, reason = fields
        reason = "" if reason in ("None", "N/A", "(null)") else reason
        rows.append(QueueRow(job, elements(index), raw, hosts(host_list), name, reason))
    return rows


def task_states(rows: Iterable[QueueRow], jobs: Mapping[str, str]) -> list[TaskState]:
    """States by group (in the order of ``jobs``) and element. A job of whose elements nothing is
    said is element 0 in the state of its row; one without any row has been forgotten by Slurm:
    UNKNOWN."""
    by_job: dict[str, list[QueueRow]] = {}
    for row in rows:
        by_job.setdefault(row.job, []).append(row)
    result: list[TaskState] = []
    for group, job in jobs.items():
        found = by_job.get(job, [])
        tasks = [_task(group, row, element) for row in found for element in row.elements]
        if found and not tasks:
            tasks = [_task(group, found[0], 0)]
        result += sorted(tasks, key=lambda task: task.element) or [forgotten(group, job)]
    return result


def _task(group: str, row: QueueRow, element: int) -> TaskState:
    return TaskState(
        job_id=f"{row.job}_{element}",
        group=group,
        element=element,
        state=states.interpret(row.raw).state,
        raw=row.raw,
        reason=row.reason,
        hosts=row.hosts,
    )


def forgotten(group: str, job: str) -> TaskState:
    """The state of a job that its scheduler no longer knows."""
    return TaskState(job, group, 0, JobState.UNKNOWN, "", "the scheduler has forgotten it", ())
