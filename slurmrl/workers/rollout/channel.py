"""What a rollout task sends to the masters: samples and the result log of its attempt, of which its
worker is the only writer, and its doorbell in the asyncio loop (see `run.channel.bell`)."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from slurmrl import log
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.rollouts.sample_files import SampleWriter
from slurmrl.rollouts.sample_group import SampleGroup
from slurmrl.run.channel.bell import LOOK_S, Bell, BellAddress
from slurmrl.run.channel.log import LogWriter
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.workers.rollout_messages import RESULT_LOG, GroupsFinished, Joined, RolloutResult

logger = log.get(__name__)


class ResultWriter:
    """Records results in the order in which they are given."""

    def __init__(self, paths: RunPaths, agent: Identity, *, calls: SystemCalls = REAL) -> None:
        """Raises EnvironmentFailure, FileExistsError if the attempt has a log already."""
        place = agent.group, agent.task, agent.attempt
        self._samples = SampleWriter(paths.rollout_samples(*place), calls=calls)
        self._log = LogWriter(paths.rollout_results(*place), calls=calls, durable=True)
        self.settled = True
        """Whether all messages are on disk; others wait for the next call of `record`."""
        self._append(Joined(agent=agent))

    def record(self, messages: Sequence[RolloutResult], groups: Sequence[SampleGroup]) -> None:
        """Record messages, then groups in one file.

        Raises EnvironmentFailure: the messages are recorded by the next call, whatever it is given;
        the groups are to be given again.
        """
        if messages or not self.settled:
            self._append(*messages)
        if not groups:
            return
        stored = self._samples.write(groups)
        try:
            self._append(GroupsFinished(groups=stored))
        except EnvironmentFailure as error:
            logger.warning("%d groups are recorded later: %s", len(groups), error)

    def _append(self, *messages: RolloutResult) -> None:
        self.settled = False
        self._log.append(*map(RESULT_LOG.to_json, messages))
        self.settled = True


class TaskBell:
    """Hears the master ring, and rings there. Without a ``bell`` nothing is ever heard."""

    def __init__(self, bell: Bell | None, spread_s: float) -> None:
        """A ring is heeded half of ``spread_s`` to ``spread_s`` seconds later: the master may have
        rung at a thousand tasks. Further rings are ignored meanwhile."""
        self._bell, self._spread_s = bell, spread_s
        self._random = random.Random()
        self._master: BellAddress | None = None
        self._next = asyncio.Event()
        self.heard = 0
        """How often rings of the master have come; those within `LOOK_S` count as one."""
        self._counted_at = -math.inf
        """When one was counted last, by the monotonic clock."""
        self._late: asyncio.TimerHandle | None = None
        """Counts those that came too early to be counted at once."""

    @property
    def address(self) -> BellAddress | None:
        return None if self._bell is None else self._bell.address

    def ring_at(self, master: BellAddress | None) -> None:
        """Heed this bell's owner and ring there from now on; None: nowhere."""
        self._master = master

    def ring(self) -> None:
        """Say that results are recorded."""
        if self._bell is not None and self._master is not None:
            self._bell.ring([self._master])

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Listen."""
        if self._bell is None:
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(self._bell.fileno(), self._hear)
        try:
            yield
        finally:
            loop.remove_reader(self._bell.fileno())
            self._bell.close()
            if self._late is not None:
                self._late.cancel()

    async def rest(self, heard: int, seconds: float) -> None:
        """Wait until the master has rung more often than ``heard``, or for a time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.heard == heard:
                    await self._next.wait()
                await asyncio.sleep(self._spread_s * self._random.uniform(0.5, 1.0))

    def _hear(self) -> None:
        assert self._bell is not None, "it is listened to"
        sources = self._bell.hear().sources
        if self._master is None or self._master.source not in sources or self._late is not None:
            return
        early_s = self._counted_at + LOOK_S - time.monotonic()
        if early_s > 0:
            self._late = asyncio.get_running_loop().call_later(early_s, self._count)
        else:
            self._count()

    def _count(self) -> None:
        self._late, self._counted_at = None, time.monotonic()
        self.heard += 1
        self._next.set()
        self._next = asyncio.Event()
