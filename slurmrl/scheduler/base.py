"""The contract of a scheduler: what is submitted, what is asked, what is answered.

A new kind of scheduler is one file that implements ``Scheduler`` and one line in ``__init__``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slurmrl.paths import RunPaths


class JobState(StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNKNOWN = "UNKNOWN"
    """The scheduler does not know the job (any more): judge from the run directory."""

    @property
    def active(self) -> bool:
        """The job waits or runs: it can still change the trial."""
        return self in (JobState.PENDING, JobState.RUNNING)


@dataclass(frozen=True)
class TaskState:
    """What the scheduler says about one array element."""

    job_id: str
    """Name of the element, ``41_3``."""
    group: str
    element: int
    state: JobState
    raw: str
    """The scheduler's own word for the state."""
    reason: str
    """Why it pends or how it ended, in the scheduler's words; may be empty."""
    hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One group of workers: one job array of ``links`` elements."""

    name: str
    hosts: int = 1
    workers_per_host: int = 1
    gpus_per_worker: int = 0
    cpus_per_worker: int = 1
    links: int = 8
    """Array elements: successive links of a fixed group, tasks of an elastic one."""
    elastic: bool = False
    """Elements are single-host tasks of which ``hosts`` run at once."""
    command: tuple[str, ...] = ()
    """What an element executes; empty: the batch supervisor of this group."""


@dataclass(frozen=True, kw_only=True)
class SubmissionRequest:
    """One act of submitting a trial."""

    number: int
    uuid: str
    trial: str
    """``experiment/trial``, for messages."""
    run: RunPaths
    python: str
    """Interpreter that runs the trial."""
    groups: tuple[GroupRequest, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    """The ``cluster`` section of the configuration as plain values."""

    def job_name(self, group: str) -> str:
        """Name under which the job is found again when its id was lost in a crash."""
        return f"slurmrl-{self.uuid[:8]}-{self.number}-{group}"

    def command(self, group: GroupRequest, launcher: str) -> tuple[str, ...]:
        """What an element of the group executes in place of its batch shell."""
        if group.command:
            return group.command
        supervisor = (self.python, "-m", "slurmrl.workers.supervisor")
        run = ("--run", str(self.run.run), "--submission", str(self.number))
        return (*supervisor, *run, "--group", group.name, "--launcher", launcher)


class Scheduler(ABC):
    """Starts the groups of a trial as chains of links. ``jobs`` maps a group to its job id, as
    ``submit`` or ``recover`` returned it."""

    @abstractmethod
    def check(self) -> None:
        """Raise EnvironmentFailure, with the reason, where this scheduler cannot be used."""

    @abstractmethod
    def scripts(self, request: SubmissionRequest) -> dict[str, str]:
        """The batch script of each group. Needs no scheduler. Raises UsageError for values that
        cannot be written into a script."""

    @abstractmethod
    def submit(self, request: SubmissionRequest) -> dict[str, str]:
        """Submit every group; returns group -> job id, which it also writes to the run directory.
        Raises SchedulerError; what was submitted before is cancelled."""

    @abstractmethod
    def recover(self, run: RunPaths, number: int) -> dict[str, str]:
        """Job ids of a submission, also of one that crashed before it wrote them down; groups that
        never got a job are left out."""

    @abstractmethod
    def query(self, jobs: Mapping[str, str]) -> list[TaskState]:
        """State of all elements of all jobs, in one question; by group, then element."""

    @abstractmethod
    def cancel(self, jobs: Mapping[str, str], *, after: int = -1) -> None:
        """End the elements whose index is above ``after``: pending ones never start, running ones
        get TERM, then KILL. Jobs that have ended are no error."""

    @abstractmethod
    def interrupt(self, jobs: Mapping[str, str]) -> None:
        """Ask running elements to stop at a step (USR2); no further link starts. A link that has no
        handler for the signal yet may miss it."""

    @abstractmethod
    def kill(self, jobs: Mapping[str, str]) -> None:
        """End everything at once with KILL."""
