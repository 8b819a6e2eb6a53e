"""The master's line to all ranks: one log to write, one log per agent to read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slurmrl import log
from slurmrl.channel.follower import Follower
from slurmrl.channel.log import LogReader, LogWriter
from slurmrl.errors import RunFailedError, WaitTimeoutError
from slurmrl.paths import RunPaths
from slurmrl.plan.model import Plan
from slurmrl.workers import messages
from slurmrl.workers.messages import Message
from slurmrl.workers.patience import patiently

logger = log.get(__name__)


@dataclass
class Mailbox:
    """What the agents' logs have said so far and nobody took yet."""

    ready: dict[int, Message] = field(default_factory=dict)
    """READY by rank."""
    done: dict[int, dict[int, Message]] = field(default_factory=dict)
    """DONE by message number, then by rank."""
    agents: dict[str, Message] = field(default_factory=dict)
    """HELLO by ``group/task``."""
    warning: str | None = None
    """The signal that said the job will end soon."""

    def put(self, message: Message) -> None:
        kind = message["type"]
        if kind == messages.READY:
            self.ready[message["rank"]] = message
        elif kind == messages.DONE:
            self.done.setdefault(message["seq"], {})[message["rank"]] = message
        elif kind == messages.HELLO:
            self.agents[f"{message['group']}/{message['task']}"] = message
        elif kind == messages.WARNING:
            self.warning = message["signal"]
        elif kind == messages.ERROR:
            raise RunFailedError(f"rank {message['rank']}: {message['exception']}")


class Workforce:
    """Posts messages to all ranks and collects their answers.

    ``longest_poll_s`` bounds the pauses between looks at the agents' logs (see `Follower`).
    """

    def __init__(
        self,
        paths: RunPaths,
        plan: Plan,
        incarnation: int,
        while_waiting: Callable[[], None],
        *,
        longest_poll_s: float = 0.05,
    ) -> None:
        self.plan = plan
        self.mailbox = Mailbox()
        self._log = LogWriter(paths.master_log(incarnation))
        readers = [
            LogReader(paths.agent_log(incarnation, group.name, task))
            for group in plan.groups
            for task in range(group.hosts)
        ]
        self._agents = Follower(readers, paths.control, longest_poll_s=longest_poll_s)
        self._while_waiting = while_waiting
        self._numbers = itertools.count()

    @property
    def ranks(self) -> range:
        return range(self.plan.world_size)

    @property
    def warned(self) -> bool:
        return self.mailbox.warning is not None

    def post(self, *batch: Message) -> list[int]:
        """Append messages in execution order; returns their numbers. Goes on trying while the
        directory does not answer."""
        numbered = [{**message, "seq": next(self._numbers)} for message in batch]
        patiently("post to the ranks", self._queue(*numbered))
        return [message["seq"] for message in numbered]

    def _queue(self, *batch: Message) -> Callable[[], None]:
        """What appends the batch, and on later calls what is still queued of it."""
        batches = iter([batch])
        return lambda: self._log.append(*next(batches, ()))

    def wait_ready(self, timeout_s: float) -> dict[int, Message]:
        """READY of every rank."""
        ready = self.mailbox.ready
        self._wait("to be ready", lambda: set(self.ranks) - ready.keys(), timeout_s)
        return ready

    def collect(self, number: int, what: str, timeout_s: float) -> dict[int, Message]:
        """DONE of every rank for message ``number``."""
        done = self.mailbox.done.setdefault(number, {})
        self._wait(f"to finish {what}", lambda: set(self.ranks) - done.keys(), timeout_s)
        return self.mailbox.done.pop(number)

    def poll(self) -> bool:
        """Take in what is new; True if anything was."""
        news = self._agents.read()
        for message in news:
            self.mailbox.put(message)
        return bool(news)

    def _wait(self, what: str, missing: Callable[[], set[int]], timeout_s: float) -> None:
        """Time in which the directory does not answer does not count."""
        left_s = timeout_s
        looked_at = time.monotonic()
        while missing():
            if self.poll():
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

    def _describe(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {rank}{self._where(rank)}" for rank in sorted(ranks))

    def _where(self, rank: int) -> str:
        for group in self.plan.groups:
            agent = self.mailbox.agents.get(f"{group.name}/{rank // group.workers_per_host}")
            if agent is not None:
                return f" ({agent['host']}, job {agent['job_id']})"
        return " (its agent has not reported)"
