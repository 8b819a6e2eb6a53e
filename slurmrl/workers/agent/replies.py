"""What an agent sends to the master: its log, and the master's bell.

The master needs the answers of all ranks before it acts on any. A host whose workers answer one
after the other therefore sends all their answers in one write, and not one write each.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from slurmrl import log
from slurmrl.errors import EnvironmentFailure
from slurmrl.run.channel.bell import Bell, BellAddress
from slurmrl.run.channel.log import LogWriter
from slurmrl.workers.messages import AGENT_LOG, Answer, FromAgent, Preparing, Ready

logger = log.get(__name__)

HOLD_S = 1.0
"""Longest time that an answer waits for those of slower workers: then the master learns which ranks
have answered, which `slurmrl status` and the message about a deadline show."""


class Answers:
    """Holds back answers until the last of ``workers`` has given the same one."""

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._clock = clock
        self._held: list[Answer] = []
        self._given: Counter[tuple[type[Answer], int]] = Counter()
        """How many workers have given an answer, by its type and the message that it answers."""
        self._until = math.inf

    def take(self, received: Sequence[Answer]) -> list[Answer]:
        """Hold answers; return all held ones if it is time to send them."""
        if received and not self._held:
            self._until = self._clock() + HOLD_S
        self._held += received
        complete = [self._completes(answer) for answer in received]
        return self.release() if any(complete) or self.wait_s() <= 0 else []

    def release(self) -> list[Answer]:
        """Return the answers that are held, and hold them no longer."""
        held, self._held, self._until = self._held, [], math.inf
        return held

    def wait_s(self) -> float:
        """Return how long until `take` returns the answers that are held."""
        return max(self._until - self._clock(), 0.0)

    def _completes(self, answer: Answer) -> bool:
        if isinstance(answer, Preparing):
            return True
        given = type(answer), 0 if isinstance(answer, Ready) else answer.seq
        self._given[given] += 1
        if self._given[given] < self._workers:
            return False
        del self._given[given]
        return True


class Replies:
    """The agent's log of one incarnation. With a ``bell``, which it owns, it rings the master's
    bell after each write."""

    def __init__(self, writer: LogWriter, workers: int, bell: Bell | None = None) -> None:
        self.answers = Answers(workers)
        self.bell = bell
        self._writer = writer
        self._unsent = False
        """Whether the writer holds messages that the directory has not taken yet."""
        self._masters_bell: BellAddress | None = None

    def send(self, *news: FromAgent) -> None:
        """Send messages. Those that the directory does not take now are sent first the next
        time."""
        if not (news or self._unsent):
            return
        self._unsent = True
        try:
            self._writer.append(*map(AGENT_LOG.to_json, news))
        except EnvironmentFailure as error:
            logger.warning("cannot send to the master, will retry: %s", error)
            return
        self._unsent = False
        if self.bell is not None and self._masters_bell is not None:
            self.bell.ring([self._masters_bell])

    def ring_at(self, address: BellAddress) -> None:
        """Ring the master's bell from now on."""
        self._masters_bell = address

    def close(self) -> None:
        if self.bell is not None:
            self.bell.close()
