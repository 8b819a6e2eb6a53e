"""The attempts of rollout tasks, in the master's process.

A `RolloutAttempt` has a result log and a request log. `AttemptWakeups` exchanges wake-ups about
both logs. `TaskEvents` reports states of attempts. `FailedTasks` ends a trial if all tasks fail at
their start in the same way.
"""

from __future__ import annotations

import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.data.ledger import StoredGroup
from slurmrl.errors import CorruptFileError, EnvironmentFailure, ReportedError
from slurmrl.fsio import documents
from slurmrl.fsio.calls import corrupt
from slurmrl.fsio.documents import FILE_NAME, FieldType
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.run import events, reports
from slurmrl.run.channel.follower import SPARE_LOOKS
from slurmrl.run.channel.message_log import LogPosition, LogReader, LogWriter, Message
from slurmrl.run.channel.wakeups import WakeupAddress, WakeupSocket
from slurmrl.run.events import EventWriter
from slurmrl.run.history.state import Lineage
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Cause, Failure, Identity, RolloutTaskView
from slurmrl.tensors.weights.format import VERSION
from slurmrl.watch import published
from slurmrl.workers.polling import RESULTS_PER_S
from slurmrl.workers.rollout_messages import (
    REQUEST_LOG,
    RESULT_LOG,
    GroupsFinished,
    Holds,
    Joined,
    RolloutCounts,
    RolloutRequest,
    RolloutResult,
    WakeTask,
)

logger = log.get(__name__)

_NAME = re.compile(r"(.+)\.([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """State of an attempt in a commit."""

    name: Annotated[str, FILE_NAME]
    """Name of the attempt's directory, ``<group>.<task>.<attempt>``."""
    agent: Identity | None = None
    version: Annotated[str, VERSION] | None = None
    """Weight version that the attempt has loaded; None without weights."""
    read: LogPosition = field(default_factory=LogPosition)
    """Position in the result log; the commit contains the results before it."""
    last_file: Annotated[str, FILE_NAME] | None = None
    """Newest sample file that the results before `read` name."""
    over: str = ""
    """Reason why the attempt has ended; empty while it runs."""


@dataclass(frozen=True, kw_only=True)
class RolloutsRecord:
    """States of all attempts in a commit."""

    attempts: tuple[AttemptRecord, ...] = ()

    def check(self, where: object) -> None:
        """Check the names of the attempts. Raises CorruptFileError that names ``where``."""
        names = [one.name for one in self.attempts]
        if len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)):
            raise corrupt(where, f"has repeated or invalid names of attempts: {names}")


def rollouts_of(values: Mapping[str, Any], where: object) -> RolloutsRecord:
    """Read the attempts in a commit. Raises CorruptFileError."""
    record = documents.from_json(RolloutsRecord, values, where)
    record.check(where)
    return record


def _are_rollouts(value: Any) -> bool:
    try:
        return isinstance(value, dict) and rollouts_of(value, "") is not None
    except CorruptFileError:
        return False


ATTEMPTS = FieldType("attempts of rollout tasks, each once", _are_rollouts)


@dataclass
class RolloutAttempt:
    """One start of a task. Its result log is read from the position in ``record``."""

    paths: RunPaths
    incarnation: int
    record: AttemptRecord
    """State for the next commit. `read` and `take` keep it up to date."""
    polls: Backoff
    """Pauses between two reads of the result log."""
    read_at: float
    """Time of the next read of the result log, by the master's clock."""
    heard_at: float
    """Time at which the master read the last message of the attempt."""
    wakeups: WakeupAddress | None = None
    """Address to which wake-ups about new requests and weights are sent."""
    silent_s: float = 0.0
    """Seconds without a message while the master could read the result log."""
    counts: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    """Reason why the attempt cannot read newer weights; empty without a problem."""
    lag_s: float = 0.0
    """Seconds from any attempt's first load of the newest weights to this attempt's load."""
    is_read: bool = False
    """Whether this master has read the result log to its end."""
    confirmed: bool = False
    """Whether the master has sent the valid leases to the attempt."""
    leaving: bool = False
    """Whether the attempt gets no more leases."""

    def __post_init__(self) -> None:
        self.group, self.task, self.number = parse_name(self.record.name)
        self.label = f"{self.group}/{self.task}"
        path = self.paths.rollout_results(self.group, self.task, self.number)
        self._reader = LogReader(path, start=self.record.read)
        self._read_at = self.heard_at
        self.announces = False
        """Whether a wake-up announced the last message."""
        self._announced = False
        self._spare = SPARE_LOOKS
        self._nonce = uuid.uuid4().hex
        self._log: LogWriter | None = None
        self._outbox: list[Message] = []
        self._unsent = False

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def who(self) -> dict[str, Any]:
        """Fields that identify this attempt in events."""
        return {"task": self.label, "attempt": self.number}

    @property
    def over(self) -> bool:
        return bool(self.record.over)

    def view(self, now: float, leased: int) -> RolloutTaskView:
        """Return the status at the master's time ``now``; ``leased`` is the number of items."""
        agent = self.record.agent
        return RolloutTaskView(
            task=self.label,
            attempt=self.number,
            host=agent.host if agent is not None else "",
            version=self.record.version or "",
            leased=leased,
            silent_s=now - self.heard_at,
            counts=self.counts,
            problem=self.problem,
            leaving=self.leaving,
        )

    def read(self) -> Iterator[RolloutResult]:
        """Yield new results. `take` and the ledger must get all results before the next commit.

        Raises CorruptFileError, EnvironmentFailure.
        """
        news = self._reader.read()
        self.is_read = True
        self.record = replace(self.record, read=self._reader.position)
        for values in news:
            yield RESULT_LOG.from_json(values)

    def announce(self, read_at: float) -> None:
        """Schedule a read at ``read_at`` after a wake-up: the result log has grown.

        Ignore wake-ups of an attempt that often sends them without new messages (`SPARE_LOOKS`).
        """
        if self._spare > 0:
            self._announced = True
            self.read_at = min(self.read_at, read_at)

    def listened(self, now: float, most_s: float) -> None:
        """Update the seconds of silence after the result log was read to its end.

        At most ``most_s`` of the time since the previous read count: the read may have hung.
        """
        news = self.heard_at == now
        silent_s = self.silent_s + min(now - self._read_at, most_s)
        self.silent_s = 0.0 if news else silent_s
        self._read_at = now
        left = self._spare - 1 if self._announced else self._spare + 1
        self._spare = SPARE_LOOKS if news else min(left, SPARE_LOOKS)
        self.announces, self._announced = news and self._announced, False

    def take(self, result: RolloutResult) -> None:
        """Update the attempt's fields from a message of its log. Raises CorruptFileError."""
        match result:
            case Joined():
                agent = result.agent
                if (agent.group, agent.task, agent.attempt) != parse_name(self.name):
                    raise corrupt(
                        self._reader.path, f"is of {agent.label}, attempt {agent.attempt}"
                    )
                self.record = replace(self.record, agent=agent)
            case Holds():
                self.record = replace(self.record, version=result.version)
            case WakeTask():
                self.wakeups = result.wakeups
            case RolloutCounts():
                self.counts, self.problem = result.counts, result.problem
            case GroupsFinished() if result.groups:
                self.record = replace(self.record, last_file=result.groups[-1].file)

    def post(self, *requests: RolloutRequest) -> None:
        """Queue requests for `send`."""
        self._outbox += map(REQUEST_LOG.to_json, requests)

    def send(self) -> bool:
        """Append queued requests to the request log; return whether there were any.

        If the directory rejects them, keep them for the next call and return False. Never append to
        a file that has replaced the log. The task notices the replacement and fails itself.
        """
        if not self._outbox and not self._unsent:
            return False
        try:
            if self._log is None:
                place = self.group, self.task, self.number
                path = self.paths.rollout_requests(*place, self.incarnation)
                self._log = LogWriter(path, nonce=self._nonce)
            batch, self._outbox, self._unsent = self._outbox, [], True
            self._log.append(*batch)
            self._unsent = False
        except (EnvironmentFailure, FileNotFoundError, CorruptFileError) as error:
            logger.warning("cannot send requests to %s, will retry: %s", self.name, error)
        return self._log is not None and not self._unsent


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def parse_name(name: str) -> tuple[str, int, int]:
    """Return group, task and attempt from the name of an attempt's directory."""
    found = _NAME.fullmatch(name)
    assert found is not None, "checked by the caller"
    return found[1], int(found[2]), int(found[3])


AT_ONCE = 15
"""Maximum number of logs that the master reads at once. This takes at most 0.1 s."""


class AttemptWakeups:
    """Receives wake-ups of attempts that have recorded results, and sends wake-ups to attempts.

    Without a socket, there are no wake-ups.
    """

    def __init__(self, wakeups: WakeupSocket | None = None) -> None:
        self._wakeups = wakeups

    @property
    def address(self) -> WakeupAddress | None:
        return None if self._wakeups is None else self._wakeups.address

    @property
    def descriptors(self) -> Collection[int]:
        """Descriptor that is readable when there are wake-ups to `receive`."""
        return () if self._wakeups is None else (self._wakeups.fileno(),)

    def receive(self, attempts: Iterable[RolloutAttempt], now: float) -> None:
        """Schedule reads of the result logs of attempts that have sent wake-ups.

        Read `AT_ONCE` logs at once, then `RESULTS_PER_S` logs per second.
        """
        if self._wakeups is None:
            return
        received = self._wakeups.receive()
        if not received.sources and not received.overflowed:
            return
        announced = [
            one
            for one in attempts
            if one.wakeups and (received.overflowed or one.wakeups.source in received.sources)
        ]
        for number, attempt in enumerate(announced):
            attempt.announce(now + max(0, number - AT_ONCE) / RESULTS_PER_S)

    def wake(self, attempts: Iterable[RolloutAttempt]) -> None:
        """Send wake-ups about new requests or weights to attempts."""
        if self._wakeups is not None:
            self._wakeups.wake([one.wakeups for one in attempts if one.wakeups is not None])


STATE: Final = "rollout_task"
"""Kind of the events about states of attempts."""
JOINED: Final = "joined"
LEFT: Final = "left"
LOST: Final = "lost"


class TaskEvents:
    """Reports each state of an attempt once, as an event.

    A new master reads some messages again that an earlier master has reported.
    """

    def __init__(
        self, paths: RunPaths, writer: EventWriter, lineage: Lineage, incarnation: int
    ) -> None:
        """``incarnation`` is the number of this master's incarnation, the newest in ``lineage``."""
        self._writer = writer
        base = max(lineage.last_steps.keys() - {incarnation}, default=1)
        self._told = {
            tuple(str(event.get(name)) for name in ("task", "attempt", "state"))
            for earlier in range(base, incarnation)
            for event in _states(paths, earlier)
        }

    def joined(self, attempt: RolloutAttempt, host: str) -> None:
        self._tell(attempt, JOINED, host=host)

    def ended(self, attempt: RolloutAttempt, state: str, reason: str, items: int) -> None:
        """Report the end of an attempt, whose ``items`` items are queued again."""
        self._tell(attempt, state, reason=reason, items=items)

    def silent(self, attempt: RolloutAttempt, items: int) -> None:
        """Report that other attempts get the ``items`` items of a silent attempt."""
        logger.warning("%s is silent; its %d items are queued again", attempt.name, items)
        said = {"silent_s": attempt.silent_s, "items": items}
        self._writer.write("task_silent", **attempt.who, **said)

    def unreadable(self, attempt: RolloutAttempt, version: str, reason: str) -> None:
        """Report that an attempt cannot read a version of the weights."""
        logger.warning("%s cannot read weight version %s", attempt.name, version)
        what = {"version": version, "reason": reason}
        self._writer.write("weights_unreadable", **attempt.who, **what)

    def damaged(self, sample: StoredGroup, reason: str) -> None:
        """Report that the item of a damaged sample is generated again."""
        group, task, attempt = parse_name(sample.task)
        logger.warning("a task will generate item %d again: %s", sample.item, reason)
        self._writer.write(
            "samples_damaged",
            task=f"{group}/{task}",
            attempt=attempt,
            item=sample.item,
            file=sample.file,
            reason=reason,
        )

    def _tell(self, attempt: RolloutAttempt, state: str, **more: object) -> None:
        told = attempt.label, str(attempt.number), state
        if told not in self._told:
            self._told.add(told)
            self._writer.write(STATE, state=state, **attempt.who, **more)


def _states(paths: RunPaths, incarnation: int) -> list[events.Event]:
    """Return the events about states of attempts in an incarnation; none after a read error."""
    try:
        return events.read_kind(paths, f"master.{incarnation}", STATE)
    except (CorruptFileError, EnvironmentFailure) as error:
        logger.warning("cannot read events; states of rollout tasks may repeat: %s", error)
        return []


STARTS: Final = 2
"""Number of equal failures per allowed task after which the trial fails."""
FEWEST: Final = 3
"""Minimum number of equal failures after which the trial fails."""
OF_ONE_HOST: Final = 4
"""Factor of `STARTS` and `FEWEST` if all failures were on one host, which may be the cause."""
_NUMBER = re.compile(r"\d+")


class FailedTasks:
    """Counts failures of attempts that never had weights, as long as no attempt has weights."""

    def __init__(self, paths: RunPaths, *, inside: bool) -> None:
        """Ignore failures before this call.

        With ``inside``, tasks run in the trainers' job, where each restarts on the same GPUs.
        """
        self._names = NameStore(paths.names)
        self._inside = inside
        self._failures: dict[tuple[int, int], Failure] = {}
        """Mapping from task and attempt to failure."""
        self._known: set[tuple[int, int]] | None = None

    def look(
        self, attempts: Collection[RolloutAttempt], lives: Callable[[RolloutAttempt], bool]
    ) -> None:
        """Read new failures. Forget all failures if a living attempt has weights."""
        worked = {(one.task, one.number) for one in attempts if one.record.version}
        try:
            self._read_new(worked)
        except (EnvironmentFailure, CorruptFileError) as error:
            logger.warning("cannot look for failures of rollout tasks, will retry: %s", error)
        if any(one.record.version for one in attempts if not one.over and lives(one)):
            self._failures.clear()

    def _read_new(self, worked: Collection[tuple[int, int]]) -> None:
        found = set(published.failed_attempts(self._names, ROLLOUTS))
        if self._known is None:
            self._known = found
        for task, number in sorted(found - self._known):
            failure = published.attempt_failure(self._names, ROLLOUTS, task, number)
            self._known.add((task, number))
            if failure is not None and (task, number) not in worked:
                self._failures[task, number] = failure

    def evaluate(
        self,
        living: Iterable[RolloutAttempt],
        lives: Callable[[RolloutAttempt], bool],
        allowed: int,
    ) -> None:
        """Raise ReportedError if all tasks are likely to fail at their start in the same way.

        Require enough equal failures for the ``allowed`` tasks that may run at a time. In addition,
        each starting attempt must be on a host where an attempt has failed. In the trainers' job,
        its task must have failed.
        """
        alike: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for place, failure in self._failures.items():
            alike[_NUMBER.sub("", reports.attempt_failure_words(failure))].append(place)
        places = max(alike.values(), key=len, default=[])
        hosts = {self._failures[place].host for place in places}
        enough = max(STARTS * allowed, FEWEST)
        if not self._inside and len(hosts) == 1:
            enough *= OF_ONE_HOST
        if not allowed or len(places) < enough:
            return
        if any(self._may_work(one) for one in living if lives(one)):
            return
        last = self._failures[places[-1]]
        where = f"{ROLLOUTS}/{places[-1][0]}" + (f" on {last.host}" if last.host else "")
        reason = (
            f"{len(places)} rollout tasks failed in the same way at their start, and none works; "
            f"the last failure ({where}): {reports.attempt_failure_words(last)}"
        )
        raise ReportedError(Failure(cause=Cause.ENVIRONMENT, reason=reason, host="", final=True))

    def _may_work(self, attempt: RolloutAttempt) -> bool:
        """Return whether an attempt may succeed, because it runs elsewhere than failed attempts."""
        if self._inside:
            return all(task != attempt.task for task, _ in self._failures)
        try:
            claim = published.attempt(self._names, ROLLOUTS, attempt.task, attempt.number)
        except (EnvironmentFailure, CorruptFileError):
            return True
        return claim is None or claim.host not in {one.host for one in self._failures.values()}
