"""The contract of a scheduler, its requests and answers, and the environment of jobs and commands.

To add a scheduler, add a file that implements ``Scheduler`` and a line in ``__init__``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from slurmrl.errors import EnvironmentFailure
from slurmrl.run.paths import RunPaths

SHORTEST_S = {"local": 0.5}
"""Mapping from scheduler to the seconds between two queries while states change."""
SHARED_SHORTEST_S = 10.0
"""Seconds between two queries while states change, for a scheduler shared with other users."""
LONGEST_S = {"local": 2.0}
"""Mapping from scheduler to the maximum seconds between two queries."""
SHARED_LONGEST_S = 120.0
"""Maximum seconds between two queries of a scheduler shared with other users."""
GROWTH = 1.5
"""Factor of the interval after a query that found no change."""


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
    """The scheduler does not (or no longer) know the job. The run directory has the outcome."""

    @property
    def active(self) -> bool:
        """Whether the job waits or runs, so that it can still change the trial."""
        return self in (JobState.PENDING, JobState.RUNNING)


@dataclass(frozen=True)
class TaskState:
    """The state of one array element, as the scheduler reports it."""

    job_id: str
    """Name of the element, such as ``41_3``."""
    group: str
    element: int
    state: JobState
    raw: str
    """The scheduler's own name of the state."""
    reason: str
    """The scheduler's reason why the element is pending or how it ended; may be empty."""
    hosts: tuple[str, ...]
    words: str = ""
    """Explanation for users why the element is pending or how it ended; empty while it runs."""
    exit_code: int | None = None
    """Exit code of the batch process; None while it runs and if the code is unknown."""
    signal: int | None = None
    """Number of the signal that ended the batch process; None if no signal ended it."""
    ending: JobState | None = None
    """Final state of a RUNNING element whose batch process has ended while some hosts are still
    busy; None for other elements and if the state is unknown."""
    time_left_s: float | None = None
    """Seconds to the time limit of a running element; None without a limit or if unknown."""
    start: str = ""
    """Actual or expected start, in local time as the scheduler writes it."""
    restarts: int = 0
    """Number of times that the scheduler has requeued the element."""


JobIds = Mapping[str, tuple[str, ...]]
"""Ids of the job arrays of each group, in the order in which the arrays run: first the submitted
array, then the arrays that extended the chain. Element numbers continue from array to array."""


class Continue(StrEnum):
    """The way in which a trial continues if a link ends before the trial does."""

    CHAIN = "chain"
    REQUEUE = "requeue"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """The request for one group of workers: one job array of ``links`` elements."""

    name: str
    hosts: int = 1
    workers_per_host: int = 1
    gpus_per_worker: int = 0
    cpus_per_worker: int = 1
    mem_per_worker: str | None = None
    """Memory in Slurm's notation; None uses the cluster's default."""
    links: int = 8
    """Number of array elements: successive links of a fixed group, tasks of an elastic group."""
    elastic: bool = False
    """Whether the elements are single-host tasks. At most ``at_once`` tasks run at once."""
    at_once: int | None = None
    """Number of tasks of an elastic group that may run at once; None means ``hosts``."""
    spares: int = 0
    """Number of extra hosts in a fixed group's job, which replace lost hosts."""
    command: tuple[str, ...] = ()
    """Command of an element; empty for the batch supervisor of this group."""
    slurm: Mapping[str, Any] | None = None
    """Slurm options of the group's jobs as plain values; None means ``cluster.slurm``."""


@dataclass(frozen=True, kw_only=True)
class SubmissionRequest:
    """The request for one submission of a trial."""

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
    snapshot: int = 1
    """Number of the code snapshot that the jobs run."""

    @property
    def code(self) -> Path:
        """Folder of the code snapshot, the first entry of PYTHONPATH."""
        return self.run.snapshot(self.snapshot)

    def job_name(self, group: str) -> str:
        """Return the job name. By this name, slurmrl finds a job whose id was lost in a crash."""
        return f"slurmrl-{self.uuid[:8]}-{self.number}-{group}"

    def command(self, group: GroupRequest, launcher: str) -> tuple[str, ...]:
        """Return the command that replaces the batch shell of an element."""
        if group.command:
            return group.command
        supervisor = (self.python, "-P", "-m", "slurmrl.workers.supervisor")
        run = ("--run", str(self.run.run), "--submission", str(self.number))
        return (*supervisor, *run, "--group", group.name, "--launcher", launcher)


class Scheduler(ABC):
    """Starts the groups of a trial as chains of links.

    ``jobs`` maps a group to its job ids, as ``submit`` or ``recover`` returned them.
    """

    @abstractmethod
    def check(self) -> None:
        """Raise EnvironmentFailure, with the reason, if this scheduler cannot be used."""

    @abstractmethod
    def scripts(self, request: SubmissionRequest) -> dict[str, str]:
        """Return the batch script of each group.

        Needs no scheduler. Raises UsageError for values that cannot be written into a script.
        """

    @abstractmethod
    def submit(self, request: SubmissionRequest) -> dict[str, tuple[str, ...]]:
        """Submit every group, write the job ids to the run directory and return them.

        Shorten a chain that exceeds a limit of the cluster, with a warning. Raises SchedulerError
        after cancelling the groups submitted so far.
        """

    @abstractmethod
    def extend(self, run: RunPaths, number: int, group: str, *, by: str) -> str:
        """Add elements that run after the group's current elements; return the new job id.

        ``by`` identifies the caller. Raises UsageError if this scheduler cannot extend groups or
        another process is extending this group, SchedulerError if the scheduler rejects the
        request.
        """

    @abstractmethod
    def recover(self, run: RunPaths, number: int) -> dict[str, tuple[str, ...]]:
        """Return the job ids of a submission, even if it crashed before it wrote them.

        Omit groups without a job. Return no groups if the run directory is a copy, because the jobs
        belong to the original directory.
        """

    @abstractmethod
    def query(self, jobs: JobIds) -> list[TaskState]:
        """Return the states of all elements, sorted by group and element, from one query."""

    @abstractmethod
    def cancel(self, jobs: JobIds, *, spare: str = "") -> None:
        """End all elements except ``spare`` (``41_3``).

        Pending elements never start. Running elements receive TERM, then KILL. Ignore jobs that
        have ended.
        """

    @abstractmethod
    def interrupt(self, jobs: JobIds) -> None:
        """Signal running elements to stop after a step (USR2). No further link of the chain starts.

        A link without a handler for the signal may miss it.
        """

    @abstractmethod
    def kill(self, jobs: JobIds) -> None:
        """End all elements at once with KILL."""


class SchedulerPoll:
    """The last answer of the scheduler and the time of the next query.

    The next query is due soon after a change. Without changes, the interval grows.
    """

    def __init__(
        self, kind: str, scheduler: Scheduler, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._shortest_s = SHORTEST_S.get(kind, SHARED_SHORTEST_S)
        self._longest_s = LONGEST_S.get(kind, SHARED_LONGEST_S)
        self._pause_s = self._shortest_s
        self._due = 0.0
        self._asked: dict[str, tuple[str, ...]] | None = None
        self._answer: list[TaskState] = []
        self._failure: EnvironmentFailure | None = None
        """Reason why the last query failed; None if it succeeded."""

    @property
    def pause_s(self) -> float:
        """Seconds until the next query is due; 0 if it is due now."""
        return max(self._due - self._clock(), 0.0) if self._asked is not None else 0.0

    def query(self, jobs: JobIds) -> list[TaskState]:
        """Return the states of these jobs from the last answer, or query if a query is due.

        A query is also due if the jobs differ from the last call's jobs. Raises SchedulerError and
        extends the pause if the query fails. During the pause, calls for jobs without an earlier
        answer raise the same error.
        """
        if self._asked == dict(jobs) and self.pause_s > 0:
            if self._failure is not None:
                raise self._failure
            return self._answer
        changed = self._asked != dict(jobs)
        self._asked = dict(jobs)
        try:
            answer = self._scheduler.query(jobs)
            changed = changed or _shape(answer) != _shape(self._answer)
            self._answer, self._failure = answer, None
        except EnvironmentFailure as error:
            self._failure = error if changed or self._failure is not None else None
            raise
        finally:
            grown_s = min(self._pause_s * GROWTH, self._longest_s)
            self._pause_s = self._shortest_s if changed else grown_s
            self._due = self._clock() + self._pause_s
        return self._answer


def _shape(tasks: list[TaskState]) -> Mapping[tuple[str, str], tuple[str, str, int]]:
    """Return the fields whose changes count: all fields except times."""
    return {(t.group, t.job_id): (t.raw, t.reason, t.restarts) for t in tasks}


EXPORTED = ("HOME", "USER", "LANG", "PATH", "LD_LIBRARY_PATH")
"""Variables that a job inherits.

Set-up lines define all other variables, so that no secret of the login shell gets into a job's
environment. With ``--export=HOME,USER,…``, Slurm would run the user's login shell on the compute
node at each start of a job. A login shell takes seconds and would add all its exported variables.
Therefore sbatch itself runs with only these variables, and the script uses ``--export=ALL``."""

FABRIC_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_")
"""Prefixes of other variables that a job inherits. NCCL's settings are not secret."""

LOCAL_EXPORTED = (*EXPORTED, "CUDA_VISIBLE_DEVICES", "TMPDIR")
"""Variables that a link of the local scheduler inherits. On compute nodes, Slurm sets the devices
and the temporary folder."""

NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Variable that keeps Python from writing bytecode into a code snapshot, whose files must not
change. A snapshot already has the bytecode of this package, so a process compiles only the user's
own modules at its start."""

OPTION_PREFIXES = ("SBATCH_", "SCANCEL_", "SLURM_", "SQUEUE_")
"""Prefixes of variables that set options of Slurm's commands or describe the job of this process.
"""


def job_environment(
    environ: Mapping[str, str], inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment for sbatch, which passes all variables to the job.

    ``inherited`` has the variables at the time of the submission. (Set-up lines may have changed
    them in ``environ``.) If ``inherited`` is None, ``environ`` has them.
    """
    return _chosen(environ, ("SLURM_CONF",)) | inherited_environment(inherited or environ)


def inherited_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return _chosen(environ, EXPORTED)


def snapshot_environment(code: Path) -> dict[str, str]:
    """Return the variables of a process that runs the snapshot ``code``."""
    return {"PYTHONPATH": str(code), NO_BYTECODE: "1"}


def local_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return _chosen(environ, LOCAL_EXPORTED)


def command_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's other commands, without variables that set options."""
    kept = {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not name.startswith(OPTION_PREFIXES)
    }
    return kept | {"SLURM_BITSTR_LEN": "0"}  # 0 keeps lists of elements complete


def _chosen(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    kept = {name: environ[name] for name in names if name in environ}
    return kept | {name: text for name, text in environ.items() if name.startswith(FABRIC_PREFIXES)}
