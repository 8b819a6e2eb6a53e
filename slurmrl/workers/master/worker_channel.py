"""The master's channel to the trainers: one log to write, one log per agent to read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from slurmrl import log
from slurmrl.backoff import retry
from slurmrl.channel.bell import Bell, BellAddress
from slurmrl.channel.follower import Follower
from slurmrl.channel.log import LogReader, LogWriter
from slurmrl.errors import EnvironmentFailure, WaitTimeoutError
from slurmrl.fsio import documents, objects
from slurmrl.monitor.reports import Failure, Identity
from slurmrl.paths import RunPaths
from slurmrl.plan.model import Plan
from slurmrl.workers import messages
from slurmrl.workers.failure import failed
from slurmrl.workers.messages import Message
from slurmrl.worlds import TRAINERS

logger = log.get(__name__)


STACKS_POLL_S = 0.05
REST_S = 0.2
"""Longest pause between two reads of the logs while the master rests."""


@dataclass
class Mailbox:
    """Messages from the agents' logs that were not taken yet."""

    ready: dict[int, Message] = field(default_factory=dict)
    """READY by rank."""
    preparing: int = 0
    """Number of PREPARING messages."""
    done: dict[int, dict[int, Message]] = field(default_factory=dict)
    """DONE by message number, then by rank."""
    saved: dict[int, dict[int, Message]] = field(default_factory=dict)
    """SAVED by the number of its SAVE, then by rank."""
    agents: dict[str, Identity] = field(default_factory=dict)
    """HELLO by ``group/task``."""
    warning: str | None = None
    """The signal that warned that the job will end soon."""

    def put(self, message: Message) -> None:
        kind = message["type"]
        if kind == messages.READY:
            self.ready[message["rank"]] = message
        elif kind == messages.PREPARING:
            self.preparing += 1
        elif kind == messages.DONE:
            self.done.setdefault(message["seq"], {})[message["rank"]] = message
        elif kind == messages.SAVED:
            self.saved.setdefault(message["seq"], {})[message["rank"]] = message
        elif kind == messages.HELLO:
            agent = objects.from_json(Identity, message, "a log of an agent")
            self.agents[agent.label] = agent
        elif kind == messages.WARNING:
            self.warning = message["signal"]
        elif kind == messages.FAILED:
            raise failed(objects.from_json(Failure, message["failure"], "a log of an agent"))


class WorkerChannel:
    """Posts messages to all ranks of the trainers and collects their answers.

    ``longest_poll_s`` bounds the pauses between looks at the agents' logs (see `Follower`). With a
    ``bell``, agents ring it, and theirs are rung, when there is something to read.
    """

    def __init__(
        self,
        paths: RunPaths,
        plan: Plan,
        incarnation: int,
        while_waiting: Callable[[], None],
        *,
        longest_poll_s: float = 0.05,
        bell: Bell | None = None,
    ) -> None:
        self.plan = plan
        self.mailbox = Mailbox()
        self._log = LogWriter(paths.master_log(incarnation))
        self._agents = Follower(
            [
                LogReader(paths.agent_log(incarnation, TRAINERS, task))
                for task in range(plan.trainers.hosts)
            ],
            paths.control,
            longest_poll_s=longest_poll_s,
            bell=bell,
        )
        self._bell = bell
        self._bells: dict[int, BellAddress] = {}
        """The agents' bells by task."""
        self._while_waiting = while_waiting
        self._numbers = itertools.count()
        self._waits: tuple[str, Callable[[], set[int]], float] | None = None
        """What `_wait` waits for, from which ranks, and since when."""
        if bell is not None:
            self._append({"type": messages.BELL, **objects.to_json(bell.address)})

    @property
    def ranks(self) -> range:
        return range(self.plan.trainers.world_size)

    @property
    def warned(self) -> bool:
        return self.mailbox.warning is not None

    def post(self, *batch: Message) -> list[int]:
        """Append messages in execution order; return their numbers. Retries while the directory
        does not answer."""
        numbered = [{**message, "seq": next(self._numbers)} for message in batch]
        self._append(*numbered)
        return [message["seq"] for message in numbered]

    def _append(self, *batch: Message) -> None:
        retry("post to the ranks", self._queue(*batch))
        self._ring()

    def _queue(self, *batch: Message) -> Callable[[], None]:
        """Return a function that appends the batch, and on later calls what is still queued."""
        batches = iter([batch])
        return lambda: self._log.append(*next(batches, ()))

    def end(self, stacks: str | None = None) -> None:
        """Tell the agents that this incarnation is over; if that fails, they find out later by
        themselves. ``stacks``: the reason for which they take stacks first."""
        why = {} if stacks is None else {"stacks": stacks}
        try:
            self._log.append({"type": messages.OVER, **why})
            self._ring()
        except EnvironmentFailure as error:
            logger.warning("cannot tell the agents that the incarnation is over: %s", error)

    def collect_stacks(self, timeout_s: float) -> list[Message]:
        """Return STACKED of all agents that have said hello, or of those that answer in time."""
        stacked: dict[str, Message] = {}
        deadline = time.monotonic() + timeout_s
        while self.mailbox.agents.keys() - stacked and time.monotonic() < deadline:
            for message in self._agents.read():
                if message["type"] == messages.STACKED and message["number"] == 0:
                    stacked[f"{message['group']}/{message['task']}"] = message
            time.sleep(STACKS_POLL_S)
        return [message for _, message in sorted(stacked.items())]

    def wait_ready(self, timeout_s: float) -> dict[int, Message]:
        """Wait for READY of every rank. The time-out starts again with each PREPARING."""
        ready = self.mailbox.ready

        def missing() -> set[int]:
            return set(self.ranks) - ready.keys()

        self._wait("to be ready", missing, timeout_s, lambda: self.mailbox.preparing)
        return ready

    def collect(self, number: int, what: str, timeout_s: float) -> dict[int, Message]:
        """Wait for DONE of every rank for message ``number``."""
        done = self.mailbox.done.setdefault(number, {})
        self._wait(f"to finish {what}", lambda: set(self.ranks) - done.keys(), timeout_s)
        return self.mailbox.done.pop(number)

    def saved(self, number: int) -> dict[int, Message] | None:
        """Return every rank's merged DONE and SAVED for SAVE ``number``; None until all have sent
        both."""
        if self._unsaved(number):
            return None
        done, saved = self.mailbox.done.pop(number), self.mailbox.saved.pop(number)
        return {rank: {**done[rank], **saved[rank]} for rank in self.ranks}

    def wait_saved(self, number: int, what: str, timeout_s: float) -> None:
        """Wait until `saved` returns an answer."""
        self._wait(f"to finish {what}", lambda: self._unsaved(number), timeout_s)

    def _unsaved(self, number: int) -> set[int]:
        done, saved = self.mailbox.done.get(number, {}), self.mailbox.saved.get(number, {})
        return set(self.ranks) - (done.keys() & saved.keys())

    def rest(self, seconds: float) -> None:
        """Pause before another attempt; errors of ranks are raised meanwhile."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            if not self._take(self._agents.read()):
                self._while_waiting()
                time.sleep(min(left_s, REST_S))

    def _take(self, news: list[Message]) -> bool:
        """Sort messages into the mailbox; return whether there were any."""
        for message in news:
            with documents.expecting("a log of an agent"):
                self.mailbox.put(message)
                if message["type"] == messages.HELLO and message.get("bell") is not None:
                    self._meet(message["task"], message["bell"])
        return bool(news)

    def _meet(self, task: int, bell: Message) -> None:
        """Ring this agent from now on, and know its rings by where they come from."""
        address = objects.from_json(BellAddress, bell, "the bell in a log of an agent")
        self._bells[task] = address
        self._agents.listen_for(address.source, task)

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.ring(self._bells.values())

    def waiting(self) -> dict[str, Any] | None:
        """Return which ranks are waited for, for what and since when; None if none are."""
        if self._waits is None:
            return None
        what, missing, since = self._waits
        return {"for": sorted(missing()), "what": what, "since_s": time.monotonic() - since}

    def _wait(
        self,
        what: str,
        missing: Callable[[], set[int]],
        timeout_s: float,
        news: Callable[[], int] = lambda: 0,
    ) -> None:
        """Wait; time in which the directory does not answer does not count. The time-out starts
        again whenever ``news`` returns another number."""
        left_s, known = timeout_s, news()
        looked_at = time.monotonic()
        self._waits = what, missing, looked_at
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
            self._agents.wait()
        self._waits = None

    def _describe(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {rank}{self._where(rank)}" for rank in sorted(ranks))

    def _where(self, rank: int) -> str:
        task = rank // self.plan.trainers.workers_per_host
        agent = self.mailbox.agents.get(f"{TRAINERS}/{task}")
        if agent is None:
            return " (its agent has not reported)"
        return f" ({agent.host}, job {agent.job_id})"
