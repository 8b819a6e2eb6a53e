"""Several instances of an engine behind one: routing, and what happens when one of them is lost."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.errors import RunFailedError, SlurmrlError, UsageError
from slurmrl.rollouts.generation.base import (
    ABORTED,
    Completion,
    GenerationRequest,
    RolloutEngine,
    WeightVersion,
)
from slurmrl.rollouts.generation.prefixes import PrefixIndex

MOST_ATTEMPTS = 8
"""How many instances a request may lose before it fails: it may be what they die of."""

Completions = tuple[Completion, ...]


@dataclass(order=True)
class _Waiting:
    """A request, in the order in which requests are sent."""

    priority: int
    order: int
    request: GenerationRequest = field(compare=False)
    future: asyncio.Future[Completions] = field(compare=False)
    attempts: int = field(compare=False, default=0)
    at: int | None = field(compare=False, default=None)
    """The instance that works on it."""
    answer: asyncio.Future[Completions] | None = field(compare=False, default=None)
    aborted: bool = field(compare=False, default=False)

    @property
    def cost(self) -> int:
        """Tokens that an instance may have to compute for it."""
        request = self.request
        return len(request.prompt) + len(request.keys) * request.options.max_new_tokens


class Instances(RolloutEngine):
    """Sends each request to one of several instances.

    An instance gets requests only while it holds the last weight version. A request goes where its
    prefix is, unless that instance has much more to do than another. When an instance is lost, its
    requests are issued again; the draws of a request do not depend on where it is served. While no
    instance can be used requests wait, ``patience_s`` at most.
    """

    def __init__(
        self,
        connects: Mapping[str, Connect],
        *,
        limits: InstanceLimits | None = None,
        patience_s: float = 900.0,
    ) -> None:
        """``connects``: how to reach each instance, by its name in messages.

        Made in a running asyncio loop.
        """
        self._limits = limits or InstanceLimits()
        self._wanted: WeightVersion | None = None
        self._paused = False
        self._patience_s = patience_s
        self._jobs: dict[str, _Waiting] = {}
        self._queue: list[_Waiting] = []
        self._order = itertools.count()
        self._prefixes = PrefixIndex()
        self._closed = False
        self._usable = asyncio.Event()
        """Set once an instance could be used."""
        self._giving_up: asyncio.TimerHandle | None = None
        self._instances = [
            Instance(
                name, connect, self._limits, wanted=self._state, came=self._came, went=self._went
            )
            for name, connect in connects.items()
        ]
        self._expect_instances()

    async def start(self, *, wait_s: float = 0.0) -> None:
        """Return once an instance can be used.

        Closes all of them and raises UsageError if one will never be usable, RunFailedError if all
        have failed at their first attempt and none can be used within ``wait_s``.
        """
        await asyncio.wait([instance.tried for instance in self._instances])
        errors = [instance.error for instance in self._instances if instance.error is not None]
        unusable = next((error for error in errors if isinstance(error, UsageError)), None)
        try:
            if unusable is not None:
                raise unusable
            async with asyncio.timeout(wait_s):
                await self._usable.wait()
        except TimeoutError as error:
            await self.close()
            raise RunFailedError(f"no server can be used: {self._reasons()}") from error
        except UsageError:
            await self.close()
            raise

    @property
    def version(self) -> str | None:
        return None if self._wanted is None else self._wanted.name

    def submit(self, request: GenerationRequest) -> asyncio.Future[Completions]:
        future: asyncio.Future[Completions] = asyncio.get_running_loop().create_future()
        if self._closed:
            future.set_exception(RunFailedError("the engine was closed"))
        elif request.request_id in self._jobs:
            future.set_exception(UsageError(f"request {request.request_id} is in flight already"))
        else:
            job = _Waiting(request.priority, next(self._order), request, future)
            self._jobs[request.request_id] = job
            future.add_done_callback(lambda _: self._forget(job))
            heapq.heappush(self._queue, job)
            self._dispatch()
        return future

    def abort(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is None:
            return
        job.aborted = True
        if job.at is None:
            self._answer_aborted(job)
        elif (engine := self._instances[job.at].engine) is not None:
            engine.abort(request_id)

    async def pause(self) -> None:
        self._paused = True
        await asyncio.gather(*(instance.pause() for instance in self._instances))

    async def resume(self) -> None:
        self._paused = False
        await asyncio.gather(*(instance.resume() for instance in self._instances))
        self._dispatch()

    async def update_weights(self, version: WeightVersion) -> None:
        """Have all instances hold ``version``.

        Those that fail are lost, and load it before they get another request. Raises UsageError if
        one refuses it and none takes it; then the last one stays.
        """
        before, self._wanted = self._wanted, version
        updates = (instance.update(version) for instance in self._instances)
        results = await asyncio.gather(*updates, return_exceptions=True)
        errors = [error for error in results if isinstance(error, BaseException)]
        refused = all(isinstance(error, UsageError) for error in errors)
        taken = any(instance.version == version.name for instance in self._instances)
        if errors and not (refused and taken):
            self._wanted = before
            raise errors[0]
        self._prefixes = PrefixIndex()  # caches do not outlive weights
        self._dispatch()

    async def health(self) -> None:
        if not any(instance.engine for instance in self._instances):
            raise RunFailedError(f"no instance can be used: {self._reasons()}")

    async def close(self) -> None:
        self._closed = True
        self._fail_all("the engine was closed")
        if self._giving_up is not None:
            self._giving_up.cancel()
        await asyncio.gather(*(instance.close() for instance in self._instances))

    def _state(self) -> tuple[WeightVersion | None, bool]:
        return self._wanted, self._paused

    def _came(self, instance: Instance) -> None:
        self._usable.set()
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        self._dispatch()

    def _went(self, instance: Instance) -> None:
        self._prefixes.forget(self._instances.index(instance))
        self._expect_instances()

    def _expect_instances(self) -> None:
        """From now on, let requests wait at most ``patience_s`` while no instance can be used."""
        if self._giving_up is None and not any(i.engine for i in self._instances):
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(self._patience_s, self._give_up)

    def _give_up(self) -> None:
        self._giving_up = None
        self._fail_all(f"no instance could be used for {self._patience_s:g} s: {self._reasons()}")
        self._expect_instances()

    def _reasons(self) -> str:
        return "; ".join(f"{each.name}: {each.error or 'starting'}" for each in self._instances)

    def _fail_all(self, message: str) -> None:
        for job in list(self._jobs.values()):
            if not job.future.done():
                job.future.set_exception(RunFailedError(message))

    def _forget(self, job: _Waiting) -> None:
        """A request was answered, has failed or was cancelled."""
        del self._jobs[job.request.request_id]
        if job.answer is not None:
            job.answer.cancel()

    def _answer_aborted(self, job: _Waiting) -> None:
        if not job.future.done():
            job.future.set_result((ABORTED,) * len(job.request.keys))

    def _dispatch(self) -> None:
        """Send what waits to instances with room."""
        while self._queue and (ready := self._ready()):
            job = heapq.heappop(self._queue)
            if not job.future.done():
                self._send(job, self._choose(job, ready))

    def _ready(self) -> list[int]:
        """Instances that hold the version and have room."""
        return [
            index
            for index, instance in enumerate(self._instances)
            if instance.version is not None
            and instance.version == self.version
            and instance.sequences < self._limits.concurrency
        ]

    def _choose(self, job: _Waiting, ready: list[int]) -> int:
        """Return the instance that has most of the request's prefix.

        Instances whose load is much higher than the lowest load are not considered.
        """
        load = {index: self._instances[index].load for index in ready}
        least = min(load.values())
        matches = self._prefixes.matches(job.request.prompt)
        near = [index for index in ready if load[index] <= 2 * least + job.cost]
        return max(near, key=lambda index: (matches.get(index, 0), -load[index]))

    def _send(self, job: _Waiting, index: int) -> None:
        instance = self._instances[index]
        assert instance.engine is not None
        instance.sequences += len(job.request.keys)
        instance.load += job.cost
        self._prefixes.remember(job.request.prompt, index)
        job.at = index
        job.attempts += 1
        job.answer = instance.engine.submit(job.request)
        job.answer.add_done_callback(lambda answer: self._ended(job, index, answer))

    def _ended(self, job: _Waiting, index: int, answer: asyncio.Future[Completions]) -> None:
        instance = self._instances[index]
        instance.sequences -= len(job.request.keys)
        instance.load -= job.cost
        job.at = job.answer = None
        error = None if answer.cancelled() else answer.exception()
        if job.future.done() or answer.cancelled():
            pass
        elif error is None:
            self._remember(job, index, answer.result())
            job.future.set_result(answer.result())
        elif not isinstance(error, RunFailedError) or job.attempts >= MOST_ATTEMPTS:
            job.future.set_exception(error)
        else:
            instance.doubt()
            self._issue_again(job)
        self._dispatch()

    def _issue_again(self, job: _Waiting) -> None:
        if job.aborted:
            self._answer_aborted(job)
        else:
            heapq.heappush(self._queue, job)

    def _remember(self, job: _Waiting, index: int, completions: Completions) -> None:
        """The next turn of an episode begins with a completion of this one."""
        if self._instances[index].engine is not None:
            for completion in completions:
                self._prefixes.remember(job.request.prompt + completion.tokens, index)


logger = log.get(__name__)

Connect = Callable[[], Awaitable[RolloutEngine]]
"""Makes a new engine, without a weight version, once the instance can be used. It raises
RunFailedError if that failed, and UsageError if it will always fail."""


@dataclass(frozen=True, kw_only=True)
class InstanceLimits:
    """Limits of each instance; times in seconds."""

    concurrency: int = 256
    """Completions that it draws at a time. A request is sent whole, so that a few more are
    possible."""
    probe_every_s: float = 10.0
    """Between two questions after its health."""
    silence_s: float = 60.0
    """It counts as hung if it has not answered one for this long."""
    control_s: float = 1800.0
    """It counts as hung if it has not paused, resumed or taken new weights for this long."""
    reconnect_s: tuple[float, float] = (0.5, 30.0)
    """First and longest pause before it is connected to again."""


class Instance:
    """One instance.

    ``wanted`` returns the version that it is to hold and whether it is to be paused; ``came`` and
    ``went`` are called when it can be used and when that is over.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        limits: InstanceLimits,
        *,
        wanted: Callable[[], tuple[WeightVersion | None, bool]],
        came: Callable[[Instance], None],
        went: Callable[[Instance], None],
    ) -> None:
        self.name = name
        self.engine: RolloutEngine | None = None
        """None while there is none."""
        self.sequences = 0
        """Completions that it draws."""
        self.load = 0
        """Tokens that it may have to compute for them."""
        self.error: SlurmrlError | None = None
        """Why it was lost last."""
        self._connect, self._limits = connect, limits
        self._wanted, self._came, self._went = wanted, came, went
        self._control = asyncio.Lock()
        self._doubted = asyncio.Event()
        self.tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done after the first attempt to connect."""
        self._task = asyncio.create_task(self._keep(), name=name)
        self._task.add_done_callback(self._broke)

    @property
    def version(self) -> str | None:
        """The weight version with which it can serve a request now."""
        return self.engine.version if self.engine and not self._doubted.is_set() else None

    def doubt(self) -> None:
        """Mark the instance as unusable after a request failed, until it answers a health check."""
        self._doubted.set()

    async def update(self, version: WeightVersion) -> None:
        """Have it hold ``version``.

        If that fails it is lost, and holds the version that is wanted when it comes back. Raises
        UsageError if the version cannot be held.
        """
        await self._steer(lambda engine: engine.update_weights(version))

    async def pause(self) -> None:
        await self._steer(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self._steer(lambda engine: engine.resume())

    async def _steer(self, action: Callable[[RolloutEngine], Awaitable[None]]) -> None:
        async with self._control:
            engine = self.engine
            if engine is None:
                return
            try:
                await within(self._limits.control_s, action(engine))
            except SlurmrlError as error:
                await self._lose(engine, error)
                if not isinstance(error, RunFailedError):
                    raise
            except asyncio.CancelledError:
                await self._lose(engine, RunFailedError("its update was interrupted"))
                raise

    async def close(self) -> None:
        """Close the engine; the instance does not come back."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def _broke(self, task: asyncio.Task[None]) -> None:
        """The task ends by itself only because of a bug."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            logger.error("%s is not used any more", self.name, exc_info=bug)
            self.engine, self.error = None, RunFailedError(f"{type(bug).__name__}: {bug}")
            self._went(self)
        self._tell_tried()

    def _tell_tried(self) -> None:
        if not self.tried.done():
            self.tried.set_result(None)

    async def _keep(self) -> None:
        backoff = Backoff(*self._limits.reconnect_s, growth=2.0)
        while True:
            try:
                engine = await self._begin()
            except SlurmrlError as error:
                self.error = error
                logger.warning("%s cannot be used: %s", self.name, error)
                self._tell_tried()
            else:
                self._tell_tried()
                backoff.reset()
                await self._serve(engine)
            await asyncio.sleep(backoff.next_s())

    async def _begin(self) -> RolloutEngine:
        """Connect, and install what is wanted, which may change while this runs."""
        engine = await self._connect()
        try:
            while True:
                version, paused = self._wanted()
                if version is not None and engine.version != version.name:
                    await within(self._limits.control_s, engine.update_weights(version))
                if paused:
                    await within(self._limits.control_s, engine.pause())
                if self._wanted() == (version, paused):
                    return engine
                if paused:
                    await within(self._limits.control_s, engine.resume())
        except BaseException:
            await engine.close()
            raise

    async def _serve(self, engine: RolloutEngine) -> None:
        """Until the engine is lost."""
        self.engine, self.error = engine, None
        self._doubted.clear()
        self._came(self)
        try:
            while self.engine is engine:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._limits.probe_every_s):
                        await self._doubted.wait()
                async with self._control:
                    if self.engine is engine:
                        await self._probe(engine)
        finally:
            if self.engine is engine:  # cancelled
                self.engine = None
                await engine.close()

    async def _probe(self, engine: RolloutEngine) -> None:
        try:
            await within(self._limits.silence_s, engine.health())
        except SlurmrlError as error:
            await self._lose(engine, error)
        else:
            if self._doubted.is_set():
                self._doubted.clear()
                self._came(self)

    async def _lose(self, engine: RolloutEngine, error: SlurmrlError) -> None:
        logger.warning("%s is lost: %s", self.name, error)
        self.engine, self.error = None, error
        self._doubted.set()
        await engine.close()
        self._went(self)


async def within(limit_s: float, action: Awaitable[None]) -> None:
    """Raises RunFailedError if the action has not ended after ``limit_s``."""
    try:
        async with asyncio.timeout(limit_s):  # wait_for of Python 3.11 can lose a cancellation
            await action
    except TimeoutError as error:
        raise RunFailedError(f"no answer within {limit_s:g} s") from error
