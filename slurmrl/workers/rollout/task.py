"""A running rollout task: requests, weights, episodes and results in one asyncio loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from slurmrl import log
from slurmrl.backoff import OUTAGE_S, Backoff
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.rollouts.generation.base import RolloutEngine, WeightVersion
from slurmrl.rollouts.sample_files import SampleGroup
from slurmrl.rollouts.tools import in_thread
from slurmrl.run.channel.message_log import LogReader
from slurmrl.run.channel.wakeups import WakeupAddress, WakeupSocket
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.tensors.weights.format import VersionId
from slurmrl.workers.rollout.session import Key, MasterWakeups, ResultWriter, Row, Session
from slurmrl.workers.rollout.task_generation import Generation, Scoring
from slurmrl.workers.rollout.task_weights import TaskWeights
from slurmrl.workers.rollout_messages import (
    COUNTS_S,
    REQUEST_LOG,
    Confirm,
    Holds,
    Leaving,
    RolloutCounts,
    RolloutResult,
    Unreadable,
    WakeTask,
)

logger = log.get(__name__)

POLL_GROWTH = 1.05
"""Factor of each pause, relative to the previous pause. Polls for requests and for weights use the
same pauses, which therefore grow by a tenth per pair of polls."""
LAST_S = 10.0
"""Seconds that a retiring task reserves at the end for recording its last results."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    interruptible: bool = True
    """Whether items in progress continue with new weights. Otherwise the task finishes all items in
    progress before it loads new weights."""
    most_unwritten: int = 256
    """Maximum number of items that wait to be recorded. Generation pauses at this number."""
    poll_s: tuple[float, float] = (1.0, 1.0)
    """Minimum and maximum pause between two polls for requests, and for weight versions. Pauses
    grow until there are new requests or weights."""
    gather_s: float = 0.5
    """Seconds for which finished items wait for items in progress, to be written into one file."""
    record_s: float = 0.0
    """Minimum time between two records of results."""
    spread_s: float = 0.0
    """Maximum delay of reactions to wake-ups (see `MasterWakeups`)."""
    counts_s: float = COUNTS_S
    """Time between two records of the counts."""


class TaskAtWork:
    """A task that serves the newest incarnation until it retires. Make it in an asyncio loop."""

    def __init__(
        self,
        paths: RunPaths,
        agent: Identity,
        engine: RolloutEngine,
        weights: TaskWeights,
        generation: Generation,
        options: TaskOptions,
        *,
        scoring: Scoring | None = None,
        wakeups: WakeupSocket | None = None,
        calls: SystemCalls = REAL,
    ) -> None:
        """Create the attempt's result log. Raises EnvironmentFailure.

        With ``scoring`` None, the trainers score all samples. `run` closes ``wakeups`` at its end.
        """
        self._paths, self._agent = paths, agent
        self._engine, self._weights = engine, weights
        self._generation, self._scoring = generation, scoring
        self._options, self._calls = options, calls
        self._polls = Backoff(*options.poll_s, growth=POLL_GROWTH)
        self._problem = ""
        """Reason why the last poll could not read weights; empty after a success."""
        self._wakeups = MasterWakeups(wakeups, options.spread_s)
        self._results = ResultWriter(paths, agent, calls=calls)
        self._session = Session(
            most_begun=generation.items_at_a_time, most_unwritten=options.most_unwritten
        )
        self._changed = asyncio.Condition()
        self._changes = 0
        """Number of calls of `_tell`."""
        self._making: dict[Key, asyncio.Task[None]] = {}
        """Asyncio tasks of the items in progress."""
        self._ending: set[asyncio.Task[None]] = set()
        """Asyncio tasks of aborted items that are still in the engine."""
        self._messages: list[RolloutResult] = []
        """Messages that the task has not recorded yet."""
        self._began_s = self._recorded_s = time.monotonic()

    async def serve(self, incarnation: int) -> None:
        """From now on, handle the requests of a new incarnation."""
        self._session.serve(incarnation)
        await self._tell()

    async def retire(self, reason: str, within_s: float) -> None:
        """Take no more requests. `run` returns within ``within_s`` if the directory answers."""
        last_s = min(LAST_S, within_s / 2)
        self._session.retire(reason, within_s - last_s, time.monotonic())
        await self._tell()

    async def run(self) -> None:
        """Run until the task has retired.

        Raises RunFailedError and UsageError of the engine, EpisodeError, and CorruptFileError for
        damaged requests or rows.
        """
        try:
            with self._wakeups.listening():
                await self._run()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            followers = [
                group.create_task(each)
                for each in (
                    self._follow_requests(),
                    self._follow_weights(),
                    self._make_items(group),
                    self._count(),
                )
            ]
            await self._record_results()
            for follower in followers:
                follower.cancel()

    # -- incoming ----------------------------------------------------------------------------

    async def _follow_requests(self) -> None:
        reading: int | None = None
        while True:
            await self._until(lambda: self._session.incarnation is not None)
            if self._session.incarnation != reading:
                reading = self._session.incarnation
                assert reading is not None, "the task waited for an incarnation"
                place = self._agent.group, self._agent.task, self._agent.attempt
                path = self._paths.rollout_requests(*place, reading)
                reader = LogReader(path, calls=self._calls)
            heard = self._wakeups.heard
            await self._take(reader, reading)
            await self._wakeups.rest(heard, self._polls.next_s())

    async def _take(self, reader: LogReader, incarnation: int | None) -> None:
        try:
            found = await in_thread(reader.read)
        except EnvironmentFailure as error:
            logger.warning("cannot read requests, will retry: %s", error)
            return
        if found and self._session.incarnation == incarnation:
            self._polls.reset()
            for request in map(REQUEST_LOG.from_json, found):
                self._session.take(request, time.monotonic())
                if isinstance(request, Confirm):
                    self._generation.check_stops(request.stop_token_ids)
                    self._meet(request.wakeups)
            await self._tell()

    def _meet(self, master: WakeupAddress | None) -> None:
        """Exchange addresses for wake-ups with the master of this incarnation."""
        self._wakeups.wake_at(master)
        if master is not None and self._wakeups.address is not None:
            self._messages.append(WakeTask(wakeups=self._wakeups.address))

    async def _follow_weights(self) -> None:
        outage = Backoff(*OUTAGE_S)
        while True:
            version: WeightVersion | None = None
            heard = self._wakeups.heard
            try:
                version = await in_thread(self._weights.newer)
                self._problem = ""
                outage.reset()
            except EnvironmentFailure as error:
                logger.warning("cannot read weight versions, will retry: %s", error)
                self._problem = str(error)
                await asyncio.sleep(outage.next_s())
            await self._tell_unreadable()
            if version is None:
                await self._wakeups.rest(heard, self._polls.next_s())
            else:
                self._polls.reset()
                await self._install(version)

    async def _tell_unreadable(self) -> None:
        unreadable = self._weights.unreadable
        if unreadable:
            self._messages += [
                Unreadable(version=version.name, reason=why) for version, why in unreadable
            ]
            unreadable.clear()
            await self._tell()

    async def _install(self, version: WeightVersion) -> None:
        """Switch to a version: at once if interruptible, else when no item is in progress."""
        if not self._options.interruptible:
            self._session.paused = True
            await self._until(lambda: self._session.idle)
        await self._engine.update_weights(version)
        self._weights.drop_others(version)
        self._messages.append(Holds(version=version.name))
        self._session.held = VersionId.parse(version.name)
        self._session.paused = False
        await self._tell()

    # -- outgoing ----------------------------------------------------------------------------

    async def _make_items(self, group: asyncio.TaskGroup) -> None:
        while True:
            seen, now = self._changes, time.monotonic()
            self._session.expire(now)
            for key in self._session.aborted():
                self._abort(self._making.pop(key, None))
            for key, row in self._session.begin().items():
                self._making[key] = group.create_task(self._make(key, row))
            retirement = self._session.retirement
            left_s = None if retirement is None else retirement.until - now
            await self._news(seen, left_s)

    def _abort(self, task: asyncio.Task[None] | None) -> None:
        if task is None:  # The item's asyncio task has not started or has ended.
            return
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _make(self, key: Key, row: Row) -> None:
        if self._ending:  # The engine may still have requests of the same row.
            await asyncio.wait(set(self._ending))
        held = self._session.held
        assert held is not None, "items begin only after weights are loaded"
        group = await self._generation.group(key, row, held.name)
        self._session.sampled(key, group)
        if self._scoring is not None:
            await self._tell()  # Generation may now begin another item.
            group = await self._scoring.scored(row, group)
        self._making.pop(key)
        self._session.finish(key, group)
        await self._tell()

    async def _record_results(self) -> None:
        """Record results until the task has retired."""
        backoff = Backoff(*OUTAGE_S)
        while not self._session.over:
            await self._until(self._has_results)
            await self._gather()
            groups = self._session.to_record()
            messages = [*self._messages, *self._session.to_give_back()]
            self._messages.clear()
            if await self._recorded(messages, groups, backoff):
                self._session.recorded()
            else:
                self._session.unrecorded()
            await self._tell()
        assert self._session.retirement is not None, "a task ends when it has retired"
        leaving = Leaving(reason=self._session.retirement.reason)
        await self._recorded([*self._messages, self._counts(), leaving], [], backoff)
        while not self._results.settled:
            await self._recorded([], [], backoff)

    async def _gather(self) -> None:
        """Wait for more results, to record them together. A retiring task waits less."""
        rest_s = self._recorded_s + self._options.record_s - time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, rest_s)):
                await self._until(lambda: self._session.retirement is not None)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.gather_s):
                await self._until(lambda: bool(self._messages or not self._making))

    def _has_results(self) -> bool:
        waiting = self._messages or not self._results.settled
        return bool(waiting or self._session.answers or self._session.over)

    async def _recorded(
        self, messages: Sequence[RolloutResult], groups: Sequence[SampleGroup], backoff: Backoff
    ) -> bool:
        """Record messages and groups. Return False if the caller must pass the groups again."""
        try:
            await in_thread(lambda: self._results.record(messages, groups))
        except EnvironmentFailure as error:
            logger.warning("cannot record results, will retry: %s", error)
            await asyncio.sleep(backoff.next_s())
            return False
        backoff.reset()
        self._recorded_s = time.monotonic()
        self._wakeups.wake()
        return True

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(self._options.counts_s)
            self._messages.append(self._counts())
            await self._tell()

    def _counts(self) -> RolloutCounts:
        seconds = time.monotonic() - self._began_s
        counts = {**self._generation.counts, "seconds": seconds}
        return RolloutCounts(counts=counts, problem=self._problem)

    # -- parts -------------------------------------------------------------------------------

    async def _tell(self) -> None:
        """Wake all coroutines that wait for a change."""
        self._changes += 1
        async with self._changed:
            self._changed.notify_all()

    async def _news(self, seen: int, within_s: float | None) -> None:
        """Wake other coroutines, and wait until `_changes` is not ``seen``, at most ``within_s``.

        The wait has no limit if ``within_s`` is None or not positive.
        """
        limit_s = None if within_s is None or within_s <= 0 else within_s
        async with self._changed:
            self._changed.notify_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._changed.wait_for(lambda: self._changes != seen)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)
