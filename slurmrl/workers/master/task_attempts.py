"""An attempt of a rollout task as the master sees it: its result log and the log of requests."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.channel import frame
from slurmrl.channel.bell import BellAddress
from slurmrl.channel.follower import SPARE_LOOKS
from slurmrl.channel.log import LogPosition, LogReader, LogWriter
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import objects
from slurmrl.fsio.failures import corrupt
from slurmrl.fsio.shapes import FILE_NAME, FieldType
from slurmrl.monitor.reports import Identity
from slurmrl.monitor.rollouts import RolloutTaskView
from slurmrl.paths import RunPaths
from slurmrl.weights.version import VERSION
from slurmrl.workers.rollout_messages import (
    REQUEST_LOG,
    RESULT_LOG,
    GroupsFinished,
    Hears,
    Holds,
    Joined,
    RolloutCounts,
    RolloutRequest,
    RolloutResult,
)

logger = log.get(__name__)

_NAME = re.compile(r"(.+)\.([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """An attempt in a commit."""

    name: Annotated[str, FILE_NAME]
    """Of its directory: ``<group>.<task>.<attempt>``."""
    agent: Identity | None = None
    version: Annotated[str, VERSION] | None = None
    """The weights that it holds."""
    read: LogPosition = field(default_factory=LogPosition)
    """The results before this place of its log are in the commit."""
    last_file: Annotated[str, FILE_NAME] | None = None
    """The newest file of samples that these results name."""
    over: str = ""
    """Why nothing that it does counts any more."""


@dataclass(frozen=True, kw_only=True)
class RolloutsRecord:
    """The attempts in a commit."""

    attempts: tuple[AttemptRecord, ...] = ()

    def check(self, where: object) -> None:
        """Raises CorruptFileError that names ``where``."""
        names = [one.name for one in self.attempts]
        if len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)):
            raise corrupt(where, f"has attempts of tasks named {names}")


def rollouts_of(values: Mapping[str, Any], where: object) -> RolloutsRecord:
    """Read the attempts in a commit. Raises CorruptFileError."""
    record = objects.from_json(RolloutsRecord, values, where)
    record.check(where)
    return record


def _are_rollouts(value: Any) -> bool:
    try:
        return isinstance(value, dict) and rollouts_of(value, "") is not None
    except CorruptFileError:
        return False


ROLLOUTS = FieldType("attempts of rollout tasks, each once", _are_rollouts)


@dataclass
class RolloutAttempt:
    """One start of a task. It begins with an empty log, or where a commit has stopped."""

    paths: RunPaths
    incarnation: int
    record: AttemptRecord
    """What a commit of now holds. `read` and `take` keep it up to date."""
    polls: Backoff
    """The pauses between two reads of its log."""
    read_at: float
    """When its log is to be read next, by the master's clock."""
    heard_at: float
    """When its last message was read, by the same clock."""
    bell: BellAddress | None = None
    """Where to ring when there is something for it."""
    silent_s: float = 0.0
    """How long it has said nothing while its log could be read."""
    counts: Mapping[str, float] = field(default_factory=dict)
    lag_s: float = 0.0
    """How much later than the first one it took the newest weights."""
    is_read: bool = False
    """Whether its log was read to the end by this master."""
    confirmed: bool = False
    """Whether it was told which leases hold."""
    leaving: bool = False
    """Whether it gets no more leases."""

    def __post_init__(self) -> None:
        self.group, self.task, self.number = parse_name(self.record.name)
        self.label = f"{self.group}/{self.task}"
        path = self.paths.rollout_results(self.group, self.task, self.number)
        self._reader = LogReader(path, start=self.record.read)
        self._read_at = self.heard_at
        self.rings = False
        """Whether its last news was announced by a ring."""
        self._rung = False
        self._spare = SPARE_LOOKS
        self._nonce = uuid.uuid4().hex
        self._log: LogWriter | None = None
        self._outbox: list[frame.Message] = []
        self._unsent = False

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def who(self) -> dict[str, Any]:
        """Its name in events."""
        return {"task": self.label, "attempt": self.number}

    @property
    def over(self) -> bool:
        return bool(self.record.over)

    def view(self, now: float, leased: int) -> RolloutTaskView:
        """What the status tells, at a time of the master's clock, with the number of its items."""
        agent = self.record.agent
        return RolloutTaskView(
            task=self.label,
            attempt=self.number,
            host=agent.host if agent is not None else "",
            version=self.record.version or "",
            leased=leased,
            silent_s=now - self.heard_at,
            counts=self.counts,
            leaving=self.leaving,
        )

    def read(self) -> Iterator[RolloutResult]:
        """Yield the new results, which `take` and the ledger must all get before the next commit.
        Raises CorruptFileError, EnvironmentFailure."""
        news = self._reader.read()
        self.is_read = True
        self.record = replace(self.record, read=self._reader.position)
        for values in news:
            yield RESULT_LOG.from_json(values)

    def rang(self, read_at: float) -> None:
        """It says that its log has grown, which is to be read then. Rings without news bring reads
        forward less and less (see `channel.follower`)."""
        if self._spare > 0:
            self._rung = True
            self.read_at = min(self.read_at, read_at)

    def listened(self, now: float, most_s: float) -> None:
        """Its log was read to the end, which is due every ``most_s``. A read that hung says
        nothing about the time before."""
        news = self.heard_at == now
        silent_s = self.silent_s + min(now - self._read_at, most_s)
        self.silent_s = 0.0 if news else silent_s
        self._read_at = now
        left = self._spare - 1 if self._rung else self._spare + 1
        self._spare = SPARE_LOOKS if news else min(left, SPARE_LOOKS)
        self.rings, self._rung = news and self._rung, False

    def take(self, result: RolloutResult) -> None:
        """Keep what a result says about the task itself. Raises CorruptFileError."""
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
            case Hears():
                self.bell = result.bell
            case RolloutCounts():
                self.counts = result.counts
            case GroupsFinished() if result.groups:
                self.record = replace(self.record, last_file=result.groups[-1].file)

    def post(self, *requests: RolloutRequest) -> None:
        """Queue requests for `send`."""
        self._outbox += map(REQUEST_LOG.to_json, requests)

    def send(self) -> bool:
        """Append the queued requests to the log; what the directory does not take stays queued.
        Return whether anything was appended."""
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
        except (EnvironmentFailure, FileNotFoundError) as error:
            logger.warning("cannot ask %s, will retry: %s", self.name, error)
        return self._log is not None and not self._unsent


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def parse_name(name: str) -> tuple[str, int, int]:
    """Group, task and attempt of the name of a directory."""
    found = _NAME.fullmatch(name)
    assert found is not None, "checked by the caller"
    return found[1], int(found[2]), int(found[3])
