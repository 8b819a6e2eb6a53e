"""Publications of a trial's processes: their identities, and reports about ends of incarnations.

The first failure of an incarnation counts. Reports may come from older versions of slurmrl and lack
fields. See `watch.published` for the readers and `workers.failure` for the writers.

A world is a set of processes that share one process group and fail together; its ranks are 0..n-1.
The group of the trainers is one world on all of its hosts. In every other group, each task is a
separate world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final

from slurmrl.fsio.documents import COUNT, FILE_NAME, NUMBER, SECONDS, SIZE

TRAINERS: Final = "trainer"
"""The group of the trainers, and the name of their world. When it ends, the incarnation ends."""

MASTER: Final = "master"
"""Name under which the master's output is filed, as if it were a group. Its log has the number of
the agent that starts it: the trainers' first agent."""


def group_of(world: str) -> str:
    return world.partition("/")[0]


def world_of(group: str, task: int) -> str:
    """Return the name of a task's world: ``trainer``, or ``rollout/3``."""
    return group if group == TRAINERS else f"{group}/{task}"


@dataclass(frozen=True)
class RankId:
    """A rank of a world."""

    world: str
    rank: int

    def __str__(self) -> str:
        """``rank 3`` of the trainers, ``rank 0 of rollout/3`` elsewhere."""
        return f"rank {self.rank}" + ("" if self.world == TRAINERS else f" of {self.world}")


class Cause(StrEnum):
    EXCEPTION = "exception"
    """Code raised an exception. It is usually the code of a rank; then ``rank``, ``call`` and
    ``step`` are known."""
    DIED = "died"
    """A worker ended unexpectedly."""
    OOM = "oom"
    """A process was killed, or an allocation failed, for lack of memory."""
    HUNG = "hung"
    """A process sent no heartbeat and was killed."""
    DEADLINE = "deadline"
    """Ranks were alive but did not finish in time."""
    LOST_HOST = "lost_host"
    """An agent stopped renewing its lease."""
    GPU_FAULT = "gpu_fault"
    """A GPU failed (see `tensors.parallel.gpu`); its host is treated like a lost one."""
    MASTER = "master"
    """The master ended unexpectedly."""
    ENVIRONMENT = "environment"
    """The machine, the cluster or the shared directory failed."""


@dataclass(frozen=True)
class Identity:
    """An agent: its task, its attempt at that task, its host and its job."""

    group: Annotated[str, FILE_NAME]
    task: Annotated[int, COUNT]
    """Host index in a fixed group, array index in an elastic one."""
    attempt: Annotated[int, COUNT]
    """Number of earlier starts of this task."""
    host: Annotated[str, FILE_NAME]
    job: str
    """The round of agents that this one belongs to: job id, Slurm's restart count, round."""
    job_id: str
    """The job as Slurm's commands name it; ``123_4`` for an array element."""
    pid: int = 0

    @property
    def label(self) -> str:
        return f"{self.group}/{self.task}"

    @property
    def trains(self) -> bool:
        """Whether this is an agent of the trainers."""
        return self.group == TRAINERS

    @property
    def world(self) -> str:
        """The world that its workers belong to."""
        return world_of(self.group, self.task)


@dataclass(frozen=True)
class StacksRequest:
    """A user's request for the stacks of ranks of the trainers."""

    ranks: tuple[Annotated[int, COUNT], ...] | None = None
    """The ranks; None for all ranks and the master."""
    time: Annotated[float, SECONDS] | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Base class of publications about an incarnation."""

    damage: str = ""
    """Reason why the report cannot be read; all other fields then have their defaults."""


@dataclass(frozen=True, kw_only=True)
class Failure(Report):
    """Reason why an incarnation failed."""

    cause: str = ""
    """A `Cause`, or a cause of another version; empty in reports of very old versions."""
    reason: str = ""
    """The reason in one sentence."""
    host: str | None = None
    """Host on which it happened; empty if no host caused it."""
    world: str = TRAINERS
    """The world of the rank."""
    rank: Annotated[int, COUNT] | None = None
    call: str = ""
    step: int | None = None
    exception: str = ""
    """Type and message of the exception that a rank raised."""
    traceback: str = ""
    exit_code: int | None = None
    """Exit code of the process that ended, negative for a signal."""
    silent_s: Annotated[float, SECONDS] | None = None
    """Seconds without a heartbeat, for a process that was killed because of this silence."""
    gpu: str = ""
    """The GPU that failed."""
    certain: bool = False
    """Whether only the GPU's hardware can be the reason."""
    damaged: str = ""
    """Directory of a damaged checkpoint."""
    absent: str = ""
    """Path of an input that does not exist, although its directory can be read."""
    agent: str = ""
    """The agent that hangs."""
    echo: bool = False
    """Whether the failure looks like a consequence of another rank's end."""
    final: bool = False
    """Whether it is a user error, after which no other incarnation starts."""


@dataclass(frozen=True, kw_only=True)
class Warned(Report):
    """The warning that the job of an incarnation will end."""

    signal: str = ""
    cause: str = ""
    """``time_limit``, ``preemption``, ``interrupt`` (of a local run) or ``unknown``."""
    time_left_s: Annotated[float, SECONDS] | None = None
    """Seconds until the time limit, if known."""


@dataclass(frozen=True, kw_only=True)
class Hang(Report):
    """Description of who waited for whom when silence or a deadline ended an incarnation."""

    text: str = ""
    files: tuple[str, ...] = ()
    """Files that hold the stacks."""


@dataclass(frozen=True, kw_only=True)
class LostHost(Report):
    """A host that a start of a job no longer uses."""

    incarnation: Annotated[int, COUNT] = 0
    """The incarnation that stopped using the host."""
    job: str = ""
    """``JOBID.RESTARTCOUNT.ROUND``"""


@dataclass(frozen=True, kw_only=True)
class RolloutTaskView:
    """An attempt at a task that is alive as far as the master knows."""

    task: str
    """``rollout/3``"""
    attempt: Annotated[int, COUNT]
    host: str = ""
    """Host of the task; empty until the task has joined."""
    version: str = ""
    """The weight version that it uses; empty if it has none yet."""
    leased: Annotated[int, SIZE] = 0
    """Number of items on which it works."""
    silent_s: Annotated[float, SECONDS] = 0.0
    """Seconds since its last message."""
    counts: Mapping[str, Annotated[float, NUMBER]] = field(default_factory=dict)
    """Counters since the attempt began."""
    problem: str = ""
    """Reason why it cannot take newer weights; empty if it can."""
    leaving: bool = False

    @property
    def state(self) -> str:
        if not self.host:
            return "starting"
        if self.leaving:
            return "leaving"
        if not self.version:
            return "no weights"
        return "works" if self.leased else "idle"


@dataclass(frozen=True, kw_only=True)
class RolloutsView:
    """The rollout tasks of a run. Counters start with the incarnation."""

    wanted: Annotated[int, SIZE] = 0
    """Number of tasks that may run at a time."""
    waits_for: str = ""
    """Reason why the trainers wait; empty if the batch of the next step exists or is in progress.
    """
    finished: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    """Number of finished groups that wait for a step, by staleness in steps (age of the oldest
    weights)."""
    trained: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    """Number of groups that steps have trained on, by their staleness at that step."""
    dropped: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    """Number of dropped groups, which are never trained on, by reason, since the trial began."""
    refused: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    """Number of rejected results, by reason."""
    damaged: Annotated[int, SIZE] = 0
    """Number of groups whose samples could not be read; they are generated again."""
    aborted: Annotated[int, SIZE] = 0
    """Number of items that the master withdrew because their samples would have been too stale."""
    given_back: Annotated[int, SIZE] = 0
    """Number of items that tasks returned unfinished."""
    lost: Annotated[int, SIZE] = 0
    """Number of items of tasks that were lost or left."""
    tasks: tuple[RolloutTaskView, ...] = ()
