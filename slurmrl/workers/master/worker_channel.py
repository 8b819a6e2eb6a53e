"""The master's channel to the trainers: one log to write, one log per agent to read.

`AgentRegistry` lists the trainers' agents, even agents that have claimed a task but sent no
message. `StackRequests` forwards users' requests for stacks from the name store to the agents.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from slurmrl import log
from slurmrl.backoff import Interval, retry
from slurmrl.errors import CorruptFileError, EnvironmentFailure, ReportedError, WaitTimeoutError
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.model import Plan
from slurmrl.run import keys
from slurmrl.run.channel.follower import Follower
from slurmrl.run.channel.message_log import LogReader, LogWriter, Message
from slurmrl.run.channel.wakeups import LOOK_S, WakeupAddress, WakeupSocket
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS, Cause, Failure, Identity, Warned
from slurmrl.watch import published
from slurmrl.workers.failure import publish_loss
from slurmrl.workers.messages import (
    AGENT_LOG,
    CONTROL_LOG,
    CollectStacks,
    Done,
    FromAgent,
    Hello,
    Order,
    Over,
    Preparing,
    Ready,
    Saved,
    Stacked,
    WakeMaster,
)
from slurmrl.workers.polling import GONE_S

logger = log.get(__name__)
T = TypeVar("T")

STACKS_POLL_S = 0.05
REST_S = 0.2
"""Maximum pause between two reads of the logs while the master rests."""


@dataclass
class Mailbox:
    """Messages from the agents' logs that the master has not used yet."""

    ready: dict[int, Ready] = field(default_factory=dict)
    """Mapping from rank to `Ready` message."""
    preparing: int = 0
    """Number of `Preparing` messages so far."""
    done: dict[int, dict[int, Done]] = field(default_factory=dict)
    """Mapping from an order's number to the `Done` message of each rank."""
    saved: dict[int, dict[int, Saved]] = field(default_factory=dict)
    """Mapping from an order's number to the `Saved` message of each rank."""
    agents: dict[str, Identity] = field(default_factory=dict)
    """Mapping from ``group/task`` to agent, for agents that have sent `Hello`."""
    warning: str | None = None
    """Signal that warns of the job's end; None without a warning."""

    def put(self, message: FromAgent) -> None:
        """Store a message in the field for its type. Raises ReportedError for a failure."""
        match message:
            case Ready():
                self.ready[message.rank] = message
            case Preparing():
                self.preparing += 1
            case Done():
                self.done.setdefault(message.seq, {})[message.rank] = message
            case Saved():
                self.saved.setdefault(message.seq, {})[message.rank] = message
            case Hello():
                self.agents[message.agent.label] = message.agent
            case Warned():
                self.warning = message.signal
            case Failure():
                raise ReportedError(message)


class WorkerChannel:
    """Posts messages to all ranks of the trainers and collects their answers.

    ``longest_poll_s`` is the maximum pause between reads of the agents' logs (see `Follower`). With
    ``wakeups``, master and agents send each other wake-ups about new messages.
    """

    def __init__(
        self,
        paths: RunPaths,
        plan: Plan,
        incarnation: int,
        while_waiting: Callable[[], None],
        *,
        longest_poll_s: float = 0.05,
        wakeups: WakeupSocket | None = None,
        wakers: Collection[int] = (),
    ) -> None:
        """``wakers`` are descriptors that are readable if ``while_waiting`` has work to do."""
        self.plan = plan
        self.mailbox = Mailbox()
        self._path = paths.master_log(incarnation)
        self._log = LogWriter(self._path)
        self._agents = Follower(
            [
                LogReader(paths.agent_log(incarnation, TRAINERS, task))
                for task in range(plan.trainers.hosts)
            ],
            paths.control,
            longest_poll_s=longest_poll_s,
            wakeups=wakeups,
        )
        self._wakeups = wakeups
        self._wake_at: dict[int, WakeupAddress] = {}
        """Mapping from task to its agent's address for wake-ups."""
        self._while_waiting, self._wakers = while_waiting, wakers
        self._woken_at = 0.0
        """End of the last pause that wake-ups could interrupt."""
        self._numbers = itertools.count()
        self._waits: tuple[Callable[[], str], Callable[[], set[int]], float] | None = None
        """Description, missing ranks and start of the current wait; None without a wait."""
        if wakeups is not None:
            self._append(WakeMaster(wakeups=wakeups.address))

    @property
    def ranks(self) -> range:
        return range(self.plan.trainers.world_size)

    @property
    def warned(self) -> bool:
        return self.mailbox.warning is not None

    def post(self, *batch: Order) -> list[int]:
        """Append orders, the first to execute first; return their numbers.

        Retries while the directory does not answer. Raises ReportedError if the log was removed.
        """
        numbered = [replace(order, seq=next(self._numbers)) for order in batch]
        self._append(*numbered)
        return [order.seq for order in numbered]

    def _append(self, *batch: Order) -> None:
        queue, gone_since = self._queue(*batch), math.inf

        def post() -> None:
            nonlocal gone_since
            try:
                queue()
            except EnvironmentFailure as error:
                now = time.monotonic()
                removed = isinstance(error.__cause__, FileNotFoundError)
                gone_since = min(gone_since, now) if removed else math.inf
                if now - gone_since < GONE_S:
                    raise
                reason = f"{self._path} was removed while the trial ran"
                failure = Failure(cause=Cause.ENVIRONMENT, reason=reason, host="")
                raise ReportedError(failure) from error

        retry("post to the ranks", post)
        self._wake()

    def _queue(self, *batch: Order) -> Callable[[], None]:
        """Return a function that appends the batch. Repeated calls append only missing orders."""
        batches = iter([[CONTROL_LOG.to_json(order) for order in batch]])
        return lambda: self._log.append(*next(batches, ()))

    def end(self, stacks: str = "") -> None:
        """Tell the agents that this incarnation has ended. Otherwise, they detect the end later.

        ``stacks`` is the reason for which they first collect stacks; empty to collect none.
        """
        try:
            self._log.append(CONTROL_LOG.to_json(Over(stacks=stacks)))
            self._wake()
        except (EnvironmentFailure, CorruptFileError) as error:
            logger.warning("cannot tell the agents that the incarnation is over: %s", error)

    def collect_stacks(self, timeout_s: float) -> list[Stacked]:
        """Return the reports on stacks from agents that answer within ``timeout_s``."""
        stacked: dict[str, Stacked] = {}
        deadline = time.monotonic() + timeout_s
        while self.mailbox.agents.keys() - stacked and time.monotonic() < deadline:
            for message in map(AGENT_LOG.from_json, self._agents.read()):
                if isinstance(message, Stacked) and message.number == 0:
                    stacked[f"{message.group}/{message.task}"] = message
            time.sleep(STACKS_POLL_S)
        return [message for _, message in sorted(stacked.items())]

    def wait_ready(self, timeout_s: float) -> dict[int, Ready]:
        """Wait until every rank is ready. The time-out starts again with each `Preparing`."""
        ready = self.mailbox.ready

        def missing() -> set[int]:
            return set(self.ranks) - ready.keys()

        self._wait("to be ready", missing, timeout_s, lambda: self.mailbox.preparing)
        return ready

    def collect(self, number: int, what: str, timeout_s: float) -> dict[int, Done]:
        """Wait until every rank has executed order ``number``; return the answers by rank."""
        done = self.mailbox.done.setdefault(number, {})
        self._wait(f"to finish {what}", lambda: set(self.ranks) - done.keys(), timeout_s)
        return self.mailbox.done.pop(number)

    def saved(self, number: int) -> list[tuple[Done, Saved]] | None:
        """Return every rank's answers to the `Save` or `WriteVersion` with this number.

        Return None until all ranks have sent `Done` and `Saved`.
        """
        if self._unsaved(number):
            return None
        done, saved = self.mailbox.done.pop(number), self.mailbox.saved.pop(number)
        return [(done[rank], saved[rank]) for rank in self.ranks]

    def wait_saved(self, number: int, what: str, timeout_s: float) -> None:
        """Wait until `saved` returns an answer."""
        self._wait(f"to finish {what}", lambda: self._unsaved(number), timeout_s)

    def _unsaved(self, number: int) -> set[int]:
        done, saved = self.mailbox.done.get(number, {}), self.mailbox.saved.get(number, {})
        return set(self.ranks) - (done.keys() & saved.keys())

    def rest(self, seconds: float) -> None:
        """Pause before another attempt. Raises ReportedError if a rank fails during the pause."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            if not self._take(self._agents.read()):
                self._while_waiting()
                time.sleep(min(left_s, REST_S))

    def wait_for(self, take: Callable[[], T | None], what: Callable[[], str]) -> T | None:
        """Call ``take`` until it returns a value; return None if the job will end.

        ``what`` returns a description of the wait. Raises ReportedError if a rank fails.
        """
        since = time.monotonic()
        while (found := take()) is None and not self.warned:
            self._waits = what, set, since
            if self._take(self._agents.read_due()):
                continue
            self._while_waiting()
            if (found := take()) is not None:
                break
            self._pause(REST_S)
        self._waits = None
        return found

    def _take(self, news: list[Message]) -> bool:
        """Sort new messages into the mailbox. Return whether there were any."""
        for message in map(AGENT_LOG.from_json, news):
            self.mailbox.put(message)
            if isinstance(message, Hello) and message.wakeups is not None:
                self._meet(message.agent.task, message.wakeups)
        return bool(news)

    def _meet(self, task: int, wakeups: WakeupAddress) -> None:
        """Send wake-ups to an agent's address, and read its log after wake-ups from the address."""
        self._wake_at[task] = wakeups
        self._agents.listen_for(wakeups.source, task)

    def _wake(self) -> None:
        if self._wakeups is not None:
            self._wakeups.wake(self._wake_at.values())

    def waiting(self) -> dict[str, Any] | None:
        """Return ranks, description and duration of the master's current wait, or None."""
        if self._waits is None:
            return None
        what, missing, since = self._waits
        return {"for": sorted(missing()), "what": what(), "since_s": time.monotonic() - since}

    def _wait(
        self,
        what: str,
        missing: Callable[[], set[int]],
        timeout_s: float,
        news: Callable[[], int] = lambda: 0,
    ) -> None:
        """Wait until no rank is ``missing``. Raises WaitTimeoutError after ``timeout_s``.

        The time-out starts again whenever ``news`` returns a new number. Time during which the
        directory does not answer does not count.
        """
        left_s, known = timeout_s, news()
        looked_at = time.monotonic()
        self._waits = (lambda: what), missing, looked_at
        while missing():
            if self._take(self._agents.read_due()):
                if news() != known:
                    left_s, known, looked_at = timeout_s, news(), time.monotonic()
                continue
            now = time.monotonic()
            left_s -= now - looked_at if self._agents.answers else 0.0
            looked_at = now
            if left_s < 0:
                raise WaitTimeoutError(
                    f"waited {timeout_s:.0f} s for {self._describe(missing())} {what}"
                )
            self._while_waiting()
            self._pause(REST_S if self._wakers else math.inf)
        self._waits = None

    def _pause(self, most_s: float) -> None:
        """Wait until there may be work, at most ``most_s``.

        Wake-ups end a wait at most once per `LOOK_S`, however many arrive.
        """
        early_s = self._woken_at + LOOK_S - time.monotonic()
        if self._wakers and early_s > 0:
            self._agents.wait(most_s=min(most_s, early_s))
        else:
            self._agents.wait(self._wakers, most_s)
            self._woken_at = time.monotonic()

    def _describe(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {rank}{self._where(rank)}" for rank in sorted(ranks))

    def _where(self, rank: int) -> str:
        task = rank // self.plan.trainers.workers_per_host
        agent = self.mailbox.agents.get(f"{TRAINERS}/{task}")
        if agent is None:
            return " (its agent has not reported)"
        return f" ({agent.host}, job {agent.job_id})"


class AgentRegistry(ChainMap[str, Identity]):
    """The known agents by ``group/task``.

    ``heard`` contains the agents that have sent `Hello`. The name store has all claims, even of
    agents that died before `Hello`. Read the store every ``look_s`` while agents are missing.
    """

    def __init__(
        self,
        names: NameStore,
        plan: Plan,
        heard: MutableMapping[str, Identity],
        *,
        incarnation: int,
        job: str,
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._claimed: dict[str, Identity] = {}
        super().__init__(heard, self._claimed)
        self._names = names
        self._hosts = plan.trainers.hosts
        self._incarnation = incarnation
        self._job = job
        self._looks = Interval(look_s, clock, after_s=look_s)

    def look(self) -> None:
        """Look for claims of agents that have not sent `Hello`, when due."""
        if not self._looks.due():
            return
        missing = {task for task in range(self._hosts) if f"{TRAINERS}/{task}" not in self}
        if missing:
            self._take_claims(missing)

    def _take_claims(self, tasks: set[int]) -> None:
        root = keys.group_attempts(TRAINERS)
        try:
            claims = self._names.find_subtree(root)
            for task, attempt in _newest(claims, root).items():
                if task in tasks:
                    claim = published.attempt(self._names, TRAINERS, task, attempt)
                    if claim is not None and claim.job == self._job:
                        self._claimed[claim.label] = claim
        except (EnvironmentFailure, CorruptFileError) as error:
            logger.warning("cannot look for agents, will retry: %s", error)

    def report_lost(self, labels: list[str]) -> None:
        """End the incarnation if an agent of the trainers is lost. Raises ReportedError.

        Publish that its host is lost. An agent on the master's host only hangs, because this
        process is still running there.
        """
        ours = f"{TRAINERS}/0"
        watched = {f"{TRAINERS}/{task}" for task in range(self._hosts)}
        for label in watched.intersection(labels) - {ours}:
            self._give_up(label, self[label].host)
        if ours in labels:
            reason = f"the agent {ours} hangs: it no longer renews its lease, but its host is alive"
            raise ReportedError(Failure(cause=Cause.HUNG, reason=reason, agent=ours))

    def _give_up(self, label: str, host: str) -> None:
        publish_loss(self._names, host, self._incarnation, self._job)
        reason = f"host {host} is lost: its agent {label} no longer renews its lease"
        raise ReportedError(Failure(cause=Cause.LOST_HOST, reason=reason, host=host))


def _newest(claims: list[str], root: str) -> dict[int, int]:
    """Return the number of the newest claimed attempt for each task."""
    newest: dict[int, int] = {}
    for key in claims:
        task, _, attempt = key.removeprefix(f"{root}/").partition("/")
        if task.isdecimal() and attempt.isdecimal():
            newest[int(task)] = max(newest.get(int(task), -1), int(attempt))
    return newest


class StackRequests:
    """Forwards users' requests for stacks to the agents, which answer with files.

    The requests of an incarnation have consecutive numbers in the name store. A user's command adds
    the next number exclusively, so no request is lost or answered twice. Looking for the next
    request costs one failed open.
    """

    def __init__(
        self,
        names: NameStore,
        incarnation: int,
        post: Callable[[Order], object],
        *,
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = names
        self._incarnation = incarnation
        self._post = post
        self._looks = Interval(look_s, clock, after_s=look_s)
        self._number = 1

    def look(self) -> None:
        """Look for the next request, when due, and forward it."""
        if not self._looks.due():
            return
        try:
            request = published.stacks_request(self._names, self._incarnation, self._number)
        except CorruptFileError as error:
            logger.warning("skipping a request for stacks: %s", error)
            self._number += 1
            return
        except EnvironmentFailure as error:
            logger.warning("cannot look for requests for stacks, will retry: %s", error)
            return
        if request is None:
            return
        number, self._number = self._number, self._number + 1
        logger.info("stacks requested (request %d)", number)
        self._post(CollectStacks(number=number, ranks=request.ranks))
