"""Types that a trial's processes publish: identities, and reports about ends of incarnations.

The first failure of an incarnation counts. Reports of older versions of slurmrl may lack fields.
`workers.failure` writes the reports; `watch.published` reads them.

A world is a set of processes that share one process group and fail together; its ranks are 0..n-1.
The group of the trainers is one world on all of its hosts. In every other group, each task is a
separate world.

`Ending` is the end of an incarnation, read from the reports. With the ending, the master decides
whether to start again (`workers.master.futility`). `watch.incarnation_rows` shows the ending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Final

from slurmrl.display.terminal import exit_words, first_line, plain
from slurmrl.fsio.documents import COUNT, FILE_NAME, NUMBER, SECONDS, SIZE

TRAINERS: Final = "trainer"
"""The group of the trainers, and the name of their world. The incarnation ends with this world."""

MASTER: Final = "master"
"""Name of the master's output files, in place of a group's name. The number in the name of its log
is the number of the trainers' first agent, which starts the master."""


def group_of(world: str) -> str:
    return world.partition("/")[0]


def world_of(group: str, task: int) -> str:
    """Return the name of a task's world, such as ``trainer`` or ``rollout/3``."""
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
    """Code raised an exception. If a rank raised it, as usual, ``rank``, ``call`` and ``step`` are
    known."""
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
    """A GPU failed (see `tensors.parallel.gpu`). The host is treated like a lost host."""
    MASTER = "master"
    """The master ended unexpectedly."""
    ENVIRONMENT = "environment"
    """The machine, the cluster or the shared directory failed."""


@dataclass(frozen=True)
class Identity:
    """The identity of an agent: its task, its attempt at the task, its host and its job."""

    group: Annotated[str, FILE_NAME]
    task: Annotated[int, COUNT]
    """Host index in a fixed group; array index in an elastic group."""
    attempt: Annotated[int, COUNT]
    """Number of earlier starts of this task."""
    host: Annotated[str, FILE_NAME]
    job: str
    """The round of the agent as ``JOBID.RESTARTCOUNT.ROUND``."""
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
        """Name of the world of the agent's workers."""
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
    """Reason why the report cannot be read. All other fields then have their defaults."""


@dataclass(frozen=True, kw_only=True)
class Failure(Report):
    """Reason why an incarnation failed."""

    cause: str = ""
    """A `Cause`, or a cause of another slurmrl version; empty in reports of very old versions."""
    reason: str = ""
    """The reason in one sentence."""
    host: str | None = None
    """Host of the failed process; empty if no host caused the failure."""
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
    """Whether the GPU's hardware is certainly the reason."""
    damaged: str = ""
    """Directory of a damaged checkpoint."""
    absent: str = ""
    """Path of an input that does not exist, although its directory can be read."""
    agent: str = ""
    """Name of the agent that hangs."""
    echo: bool = False
    """Whether the failure looks like a consequence of another rank's end."""
    final: bool = False
    """Whether this is a user error, after which no other incarnation starts."""


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
    """An attempt at a task that the master believes to be alive."""

    task: str
    """``rollout/3``"""
    attempt: Annotated[int, COUNT]
    host: str = ""
    """Host of the task; empty until the task has joined."""
    version: str = ""
    """The weight version that the task uses; empty if it has none yet."""
    leased: Annotated[int, SIZE] = 0
    """Number of items on which the task works."""
    silent_s: Annotated[float, SECONDS] = 0.0
    """Seconds since the last message of the task."""
    counts: Mapping[str, Annotated[float, NUMBER]] = field(default_factory=dict)
    """Counters since the attempt began."""
    problem: str = ""
    """Reason why the task cannot take newer weights; empty if it can."""
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
    """Number of finished groups that wait for a step, by staleness (age of the oldest weights in
    steps)."""
    trained: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    """Number of groups that steps have trained on, by their staleness at that step."""
    dropped: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    """Number of dropped groups (never trained on) since the trial began, by reason."""
    refused: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    """Number of rejected results, by reason."""
    damaged: Annotated[int, SIZE] = 0
    """Number of groups with unreadable samples. Such groups are generated again."""
    aborted: Annotated[int, SIZE] = 0
    """Number of items that the master withdrew because their samples would have been too stale."""
    given_back: Annotated[int, SIZE] = 0
    """Number of items that tasks returned unfinished."""
    lost: Annotated[int, SIZE] = 0
    """Number of unfinished items of tasks that were lost or have exited."""
    tasks: tuple[RolloutTaskView, ...] = ()


HOST_LOSSES = (Cause.LOST_HOST, Cause.GPU_FAULT)
"""Failures after which a job continues without the host."""
HANGS = (Cause.HUNG, Cause.DEADLINE)
"""Failures for which agents collect stacks, to explain who waited for whom."""
RAISED = (Cause.EXCEPTION, Cause.MASTER)
"""Failures raised by code of a worker or the master. Such failures would probably recur."""
OWN_FAULTS = (*RAISED, *HANGS, Cause.GPU_FAULT, Cause.OOM)
"""Failures that explain an end better than a warning to the same job."""
UNFAULTED = ("preemption", "interrupt")
"""Warnings of ends that the trial did not cause. Such ends do not count as failed starts."""
MOST_WORDS = 200
"""Maximum length of the failure of a rollout task, in characters."""


@dataclass(frozen=True)
class JobTag:
    """The name of a round of agents, as ``JOBID.RESTARTCOUNT.ROUND``; empty if unknown."""

    text: str = ""

    @classmethod
    def of(cls, begin: Mapping[str, Any]) -> JobTag:
        """Return the tag of the round that the data of a BEGIN record names."""
        return cls(str(begin.get("job") or ""))

    @property
    def job(self) -> str:
        return self.text.partition(".")[0]

    @property
    def start(self) -> str:
        """Start of the job, as ``JOBID.RESTARTCOUNT``."""
        return ".".join(self.text.split(".")[:2])

    @property
    def restarts(self) -> int | None:
        """Number of times that Slurm has requeued the job; None if unknown."""
        count = self.start.partition(".")[2]
        return int(count) if count.isdecimal() else None

    def is_requeued_as(self, after: JobTag) -> bool:
        """Return whether ``after`` is a later start of the same job."""
        return self.job == after.job and self.start != after.start


@dataclass(frozen=True)
class Ending:
    """The reported facts about the end of an incarnation."""

    incarnation: int
    job: JobTag = JobTag()
    failure: Failure = field(default_factory=Failure)
    """The incarnation's first failure; `Failure()` if nothing was reported."""
    warned: Warned | None = None
    """The warning that the incarnation's job would end."""
    hang: Hang | None = None
    requeued: bool = False
    """Whether Slurm has since requeued the job, or ended the job together with its host."""
    repeated: bool = False
    """Whether the failure is a GPU fault that also occurred on other hosts."""
    shared_loss: bool = False
    """Whether the next incarnation in the same start of the job was lost with its host. If so, this
    incarnation was lost for the same reason."""

    @property
    def cause(self) -> str:
        return cause_of(self.failure)

    @property
    def what(self) -> str:
        """The first failure, without the rank; empty if there was no failure.

        The rank is omitted, because it is random which of several ranks fails first.
        """
        failure = self.failure
        what = failure.exception or failure.reason or failure.damage
        if not what:
            return "" if failure == Failure() else "unknown"
        return f"{failure.call}: {what}" if self._names_rank else what

    @property
    def reason(self) -> str:
        """The first failure, with the rank."""
        return f"rank {self.failure.rank}, {self.what}" if self._names_rank else self.what

    @property
    def _names_rank(self) -> bool:
        return self.failure.rank is not None and bool(self.failure.call)

    @property
    def warning(self) -> str:
        """The cause of the warning; empty without a warning."""
        return self.warned.cause if self.warned is not None else ""

    @property
    def hang_words(self) -> str:
        """One line that explains the waits between ranks.

        Do not compare such lines, because their times differ between incarnations.
        """
        return first_line(self.hang.text) if self.hang is not None else ""

    @property
    def is_own_fault(self) -> bool:
        """Whether the failure explains the end better than a warning."""
        return self.cause in OWN_FAULTS

    @property
    def lost(self) -> bool:
        """Whether the incarnation was lost together with a host."""
        taken = self.requeued and (not self.reason or self.failure.echo)
        remedied = self.cause in HOST_LOSSES and not self.repeated
        return taken or self.shared_loss or remedied

    @property
    def counts(self) -> bool:
        """Whether the ending counts as a failed start.

        False if Slurm took the job away, or if the incarnation could not read the checkpoint from
        which it resumed.
        """
        return not (self.lost or self.warning in UNFAULTED or self.failure.damaged)

    @property
    def damages(self) -> str:
        """Description of damaged reports about this end; empty if all are readable."""
        reports: tuple[Report | None, ...] = (self.failure, self.warned, self.hang)
        damages = (report.damage for report in reports if report is not None)
        return "".join(f"; {damage}" for damage in damages if damage)


def cause_of(failure: Failure) -> str:
    """Return the cause of a failure; derive it if a very old version did not report the cause.

    Return an empty string if nothing was reported.
    """
    if failure.cause:
        return failure.cause
    if failure.exception or failure.traceback:
        return Cause.EXCEPTION
    return "unknown" if failure.reason else ""


def failure_words(failure: Failure) -> str:
    """Return the failure on one line."""
    reason = first_line(failure.exception or failure.reason)
    host = f" on {failure.host}" if failure.host else ""
    worker = f"a process{host}" if failure.rank is None else f"rank {failure.rank}{host}"
    match cause_of(failure):
        case Cause.DIED if failure.rank is None and reason:
            return reason  # this message already names the fork server and the failed import
        case Cause.DIED:
            code = failure.exit_code
            return f"{worker} died: {reason if code is None else exit_words(code)}"
        case Cause.OOM:
            return f"{worker} was killed: out of memory"
        case Cause.HUNG:
            return f"{worker} hung{_silence(failure, reason)}{_where(failure)}"
        case Cause.LOST_HOST:
            return f"host {failure.host or '(unknown)'} lost"
        case Cause.GPU_FAULT:
            return f"{worker}: {plain(failure.gpu) or 'its GPU'} failed: {reason}"
        case Cause.EXCEPTION if failure.rank is not None:
            return f"{worker}: {reason}{_where(failure)}"
        case Cause.DEADLINE:
            return f"too slow: {reason}"
        case Cause.ENVIRONMENT:
            return f"cannot continue{host}: {reason}"
        case cause:
            return reason or cause


def attempt_failure_words(failure: Failure) -> str:
    """Return the failure of an attempt at a rollout task, without the host, on one short line."""
    words = failure_words(replace(failure, host="")) + failure.damage
    return words if len(words) <= MOST_WORDS else f"{words[: MOST_WORDS - 1]}…"


def _silence(failure: Failure, reason: str) -> str:
    """Return a phrase about a process's seconds of silence, or ``reason`` if they are unknown."""
    if failure.silent_s is not None:
        return f": no heartbeat for {failure.silent_s:g} s"
    return f": {reason}" if reason else ""


def _where(failure: Failure) -> str:
    """Return the place of a failure, such as ``, train_step of step 4``; empty if unknown."""
    step = "" if failure.step is None else f"step {failure.step}"
    place = " of ".join(part for part in (failure.call, step) if part)
    return f", {place}" if place else ""
