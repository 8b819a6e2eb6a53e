"""A client of one running server of any kind (`dialect.py`), and its connection over failures.

`ServerClient` is the engine of a server that answers now. `Instance` connects to an engine, watches
it, and connects again when it is lost.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable
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
from slurmrl.rollouts.generation.dialect import Dialect, Draw
from slurmrl.rollouts.generation.fitness import check_context
from slurmrl.tensors.ops.splitmix import start

logger = log.get(__name__)
Connect = Callable[[], Awaitable[RolloutEngine]]
"""Makes a new engine, without a weight version, once the instance can be used. It raises
RunFailedError if that failed, and UsageError if it will always fail."""


@dataclass
class _InFlight:
    """A request in flight. ``draws`` are by the name of each completion on the server."""

    future: asyncio.Future[tuple[Completion, ...]]
    draws: dict[str, asyncio.Task[Completion]] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    """The draws that the server may know."""
    aborting: asyncio.Task[None] | None = None


class ServerClient(RolloutEngine):
    """One running server.

    The completions of a request are drawn by one HTTP request each, because each has a random
    stream of its own; they share the prompt in the server's cache.
    """

    def __init__(self, dialect: Dialect, context: int, *, concurrency: int = 256) -> None:
        """``context`` is the result of ``dialect.connect``.

        ``concurrency`` is the number of completions that are requested at a time.
        """
        self._dialect = dialect
        self._context = context
        self._free = asyncio.Semaphore(concurrency)
        self._jobs: dict[str, _InFlight] = {}
        self._numbers = itertools.count()
        self._version: str | None = None
        self._held: set[str] = set()
        """The versions that were installed here."""
        self._installed = asyncio.Event()
        """Set while there is a version; requests wait for it."""
        self.paused = False
        """Whether `update_weights` leaves the server paused."""
        self.asleep = False
        """Whether its device memory may be free, wholly or in part."""
        self._control = asyncio.Lock()
        """Pausing, resuming and updates of weights, one at a time."""
        self._updated = self._update_s = 0.0
        """When the last update ended, and how long it took."""
        self._lost: RunFailedError | None = None

    @classmethod
    async def connect(
        cls, dialect: Dialect, *, concurrency: int = 256, least: int = 0
    ) -> ServerClient:
        """The engine of a server that answers now.

        It has no weight version yet, whatever the server holds. Raises UsageError if the server
        takes fewer than ``least`` tokens of a prompt and its completion. Closes the dialect if that
        fails.
        """
        try:
            context = await dialect.connect()
            check_context(dialect.where, context, least)
            return cls(dialect, context, concurrency=concurrency)
        except BaseException:
            await dialect.close()
            raise

    @property
    def version(self) -> str | None:
        return self._version

    def submit(self, request: GenerationRequest) -> asyncio.Future[tuple[Completion, ...]]:
        future: asyncio.Future[tuple[Completion, ...]]
        future = asyncio.get_running_loop().create_future()
        problem = self._lost or self._refusal(request)
        if problem is not None:
            future.set_exception(problem)
            return future
        job = self._jobs[request.request_id] = _InFlight(future)
        number = next(self._numbers)  # the server may still draw for a request that was cancelled
        for index, key in enumerate(request.keys):
            draw = Draw(
                name=f"{request.request_id}-{number}-{index}",
                prompt=request.prompt,
                seed=start(request.seed, request.step, key) & (2**63 - 1),
                options=request.options,
                priority=request.priority,
            )
            task = asyncio.create_task(self._draw(job, draw))
            job.draws[draw.name] = task
            task.add_done_callback(lambda _: self._settle(request.request_id))
        future.add_done_callback(lambda _: self._forget(request.request_id))
        return future

    async def _draw(self, job: _InFlight, draw: Draw) -> Completion:
        async with self._free:
            await self._installed.wait()
            job.sent.add(draw.name)
            completion = await self._dialect.draw(draw)
        if others := set(completion.versions) - self._held:
            raise RunFailedError(
                f"{draw.name}: {self._dialect.where} has drawn with weights {min(others)}, which "
                "this run has not installed: it was started again, or another run uses it"
            )
        if not all(map(math.isfinite, completion.logprobs)):
            raise RunFailedError(
                f"{draw.name}: {self._dialect.where} has drawn tokens with log-probabilities that "
                "are not finite numbers; have the weights diverged?"
            )
        if completion.finish == "aborted" and job.aborting is None:
            raise RunFailedError(
                f"{draw.name}: the server aborted the request, as one that ends does"
            )
        return completion

    def _refusal(self, request: GenerationRequest) -> UsageError | None:
        """Why a request can never be served."""
        name, prompt = f"request {request.request_id}", len(request.prompt)
        if request.request_id in self._jobs:
            return UsageError(f"{name} is in flight already")
        if not prompt or not request.keys:
            return UsageError(f"{name}: the prompt and the keys must not be empty")
        if prompt >= self._context:
            return UsageError(
                f"{name}: a prompt of {prompt} tokens leaves no room for a completion: the server "
                f"takes {self._context} tokens in all"
            )
        return None

    def abort(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.aborting is None:
            job.aborting = asyncio.create_task(self._abort(job))

    async def _abort(self, job: _InFlight) -> None:
        """Abort until all requests of a job have ended.

        The server may read the order to abort a request before it has read the request.
        """
        backoff = Backoff(0.02, 1.0)
        while unfinished := {name: task for name, task in job.draws.items() if not task.done()}:
            for name, task in unfinished.items():
                if name not in job.sent:
                    task.cancel()
                    continue
                with suppress(RunFailedError):  # its draws fail as well, or end later
                    await self._dialect.abort(name)
            await asyncio.wait(unfinished.values(), timeout=backoff.next_s())

    def _settle(self, request_id: str) -> None:
        """Answer a request whose draws have all ended, or of which one has failed."""
        job = self._jobs.get(request_id)
        if job is None or job.future.done():
            return
        ended = [task for task in job.draws.values() if task.done()]
        errors = (task.exception() for task in ended if not task.cancelled())
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            job.future.set_exception(error)
        elif len(ended) == len(job.draws):
            results = (ABORTED if task.cancelled() else task.result() for task in ended)
            job.future.set_result(tuple(results))

    def _forget(self, request_id: str) -> None:
        """End what is left of a request that was answered, failed or cancelled.

        A server stops drawing for a connection that was closed.
        """
        job = self._jobs.pop(request_id)
        for task in (*job.draws.values(), *([job.aborting] if job.aborting else [])):
            task.cancel()

    async def pause(self) -> None:
        async with self._control:
            self.paused = True
            await self._dialect.pause()

    async def resume(self) -> None:
        async with self._control:
            self.paused = False
            await self._dialect.resume()

    async def update_weights(self, version: WeightVersion) -> None:
        async with self._control:
            self._version = None
            self._installed.clear()
            if self.asleep:
                await self._dialect.wake()
                self.asleep = False
            await self._let_run()
            began = time.monotonic()
            await self._dialect.pause()
            self._held.add(version.name)
            await self._dialect.load(version)
            if not self.paused:
                await self._dialect.resume()
            self._version = version.name
            self._updated, self._update_s = time.monotonic(), time.monotonic() - began
            self._installed.set()

    async def sleep(self) -> None:
        """Free the server's device memory until the next `update_weights`.

        There must be no request.
        """
        assert not self._jobs, "a server sleeps once its requests are answered"
        async with self._control:
            self._version = None
            self._installed.clear()
            self.asleep = True
            await self._dialect.sleep()

    async def _let_run(self) -> None:
        """Wait until the server has run for as long as its last update took.

        Updates in quick succession then leave it time to compute caches again and to sample.
        """
        if self._jobs and not self.paused:
            await asyncio.sleep(self._updated + self._update_s - time.monotonic())

    async def health(self) -> None:
        if self._lost is not None:
            raise self._lost
        async with self._control:  # a server answers nothing else while it loads weights
            await self._dialect.health()
            if self._version is not None:
                await self._dialect.check_version(self._version)

    async def close(self) -> None:
        if self._lost is None:
            self._lost = RunFailedError("the engine of this server was closed")
        for job in list(self._jobs.values()):
            if not job.future.done():
                job.future.set_exception(self._lost)
        await self._dialect.close()


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
