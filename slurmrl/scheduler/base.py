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
"""Minimum seconds between two queries, while states change, by scheduler."""
SHARED_SHORTEST_S = 10.0
"""Minimum seconds between two queries of a scheduler that has other users."""
LONGEST_S = {"local": 2.0}
SHARED_LONGEST_S = 120.0
GROWTH = 1.5


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
    """The scheduler does not (or no longer) know the job; the run directory has its outcome."""

    @property
    def active(self) -> bool:
        """Whether the job waits or runs, so that it can still change the trial."""
        return self in (JobState.PENDING, JobState.RUNNING)


@dataclass(frozen=True)
class TaskState:
    """The state of one array element, as the scheduler reports it."""

    job_id: str
    """Name of the element, ``41_3``."""
    group: str
    element: int
    state: JobState
    raw: str
    """The scheduler's own word for the state."""
    reason: str
    """Reason why it is pending or how it ended, in the scheduler's words; may be empty."""
    hosts: tuple[str, ...]
    words: str = ""
    """Reason why it is pending, with advice, or the way it ended; empty while it runs."""
    exit_code: int | None = None
    """Exit code of the batch process, if it has ended and the code is known."""
    signal: int | None = None
    """The signal that ended it, if any."""
    ending: JobState | None = None
    """Final state, if known, of a RUNNING element that has ended except that some hosts are still
    busy."""
    time_left_s: float | None = None
    """Seconds to the time limit of a running element; None: no limit, or unknown."""
    start: str = ""
    """Actual or expected start: local time as the scheduler writes it."""
    restarts: int = 0
    """Number of times that the scheduler has requeued the element."""


JobIds = Mapping[str, tuple[str, ...]]
"""Group -> ids of its job arrays in the order in which they run: the submitted one, then those that
extended the chain. The numbers of elements continue from array to array."""


class Continue(StrEnum):
    """Policy for a link that ends before its trial does."""

    CHAIN = "chain"
    REQUEUE = "requeue"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One group of workers: one job array of ``links`` elements."""

    name: str
    hosts: int = 1
    workers_per_host: int = 1
    gpus_per_worker: int = 0
    cpus_per_worker: int = 1
    mem_per_worker: str | None = None
    """Memory in Slurm's notation; None leaves it to the cluster."""
    links: int = 8
    """Array elements: successive links of a fixed group, tasks of an elastic one."""
    elastic: bool = False
    """Whether the elements are single-host tasks, of which ``at_once`` may run at once."""
    at_once: int | None = None
    """Tasks of an elastic group that may run at once; None: ``hosts``."""
    spares: int = 0
    """Extra hosts of a fixed group's job, which replace lost ones."""
    command: tuple[str, ...] = ()
    """Command of an element; empty: the batch supervisor of this group."""
    slurm: Mapping[str, Any] | None = None
    """The options of its jobs as plain values; None: the options of ``cluster.slurm``."""


@dataclass(frozen=True, kw_only=True)
class SubmissionRequest:
    """One submission of a trial."""

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
        """Name by which slurmrl finds the job if a crash has lost its id."""
        return f"slurmrl-{self.uuid[:8]}-{self.number}-{group}"

    def command(self, group: GroupRequest, launcher: str) -> tuple[str, ...]:
        """Return the command that replaces the batch shell of an element."""
        if group.command:
            return group.command
        supervisor = (self.python, "-m", "slurmrl.workers.supervisor")
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
        """Submit every group.

        Return the job ids, which it also writes to the run directory. A chain that exceeds a limit
        of the cluster is shortened, with a warning. Raises SchedulerError, after cancelling the
        groups submitted so far.
        """

    @abstractmethod
    def extend(self, run: RunPaths, number: int, group: str, *, by: str) -> str:
        """Add elements to a group, which run after its current elements; return the job id.

        ``by`` identifies the caller. Raises UsageError if this scheduler cannot extend a group or
        another process is extending it, SchedulerError if the scheduler rejects the request.
        """

    @abstractmethod
    def recover(self, run: RunPaths, number: int) -> dict[str, tuple[str, ...]]:
        """Return the job ids of a submission, even if it crashed before it wrote them.

        Groups without a job are left out, and all groups if the run directory is a copy of the one
        whose jobs they are.
        """

    @abstractmethod
    def query(self, jobs: JobIds) -> list[TaskState]:
        """Return the states of all elements of all jobs from one query, by group and element."""

    @abstractmethod
    def cancel(self, jobs: JobIds, *, spare: str = "") -> None:
        """End all elements except ``spare`` (``41_3``).

        Pending elements never start; running ones get TERM, then KILL. Jobs that have ended are no
        error.
        """

    @abstractmethod
    def interrupt(self, jobs: JobIds) -> None:
        """Signal running elements to stop after a step (USR2); no further link starts.

        A link without a handler for the signal may miss it.
        """

    @abstractmethod
    def kill(self, jobs: JobIds) -> None:
        """End everything at once with KILL."""


class SchedulerPoll:
    """The last answer of the scheduler and the time of the next query.

    The next query is due soon after a change, and later the longer nothing changes. No thread runs
    between the calls.
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
        """Return the states of these jobs.

        Return the last answer, or a new one if it is due or the jobs differ.

        Raises SchedulerError if the query fails, and extends the pause. Until the pause is over,
        calls for jobs without an earlier answer also raise SchedulerError.
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
    """Return the fields that count as a change: all except times."""
    return {(t.group, t.job_id): (t.raw, t.reason, t.restarts) for t in tasks}


EXPORTED = ("HOME", "USER", "LANG", "PATH", "LD_LIBRARY_PATH")
"""Variables that a job inherits. Set-up lines define all others, so that no secret of the login
shell gets into a job's environment.

Slurm's own ``--export=HOME,USER,…`` does not do that: it makes each start of a job run the user's
login shell on the compute node (1.2 s on the test bed) and adds whatever that exports. So sbatch
runs in this environment, and the script uses ``--export=ALL``."""

FABRIC_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_")
"""Prefixes of other variables that a job inherits: settings of NCCL, which are no secrets. Other
launchers pass them on too."""

LOCAL_EXPORTED = (*EXPORTED, "CUDA_VISIBLE_DEVICES", "TMPDIR")
"""Variables that a link of the local scheduler inherits; on compute nodes, Slurm sets the others.
"""

NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Variable that is set when Python runs a snapshot: the snapshot stays unchanged, and hosts that
start together do not all write the same files to a shared directory. A snapshot has the bytecode of
this package; a process compiles only the user's own modules at its start."""

OPTION_PREFIXES = ("SBATCH_", "SCANCEL_", "SLURM_", "SQUEUE_")
"""Variables that change options of Slurm's commands, or belong to the job in which we may run."""


def job_environment(
    environ: Mapping[str, str], inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment for sbatch, which passes all of it to the job.

    ``inherited`` are variables of an earlier job; set-up lines may have changed them in
    ``environ``.
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
    return kept | {"SLURM_BITSTR_LEN": "0"}  # do not shorten lists of pending elements


def _chosen(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    kept = {name: environ[name] for name in names if name in environ}
    return kept | {name: text for name, text in environ.items() if name.startswith(FABRIC_PREFIXES)}
