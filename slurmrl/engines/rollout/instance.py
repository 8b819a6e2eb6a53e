"""One instance of `instances.Instances`: an engine that comes, is updated, is lost, and returns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.engines.rollout.base import RolloutEngine, WeightVersion
from slurmrl.errors import RunFailedError, SlurmrlError

logger = log.get(__name__)

Connect = Callable[[], Awaitable[RolloutEngine]]
"""Makes a new engine, without a weight version, once the instance can be used. It raises
RunFailedError if that failed, and UsageError if it will always fail."""


@dataclass(frozen=True, kw_only=True)
class InstanceLimits:
    """Of each instance; times in seconds."""

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
    """One instance. ``wanted`` returns the version that it is to hold and whether it is to be
    paused; ``came`` and ``went`` are called when it can be used and when that is over."""

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
        """A request to it failed: it is not usable until it has answered a question after its
        health."""
        self._doubted.set()

    async def update(self, version: WeightVersion) -> None:
        """Have it hold ``version``. If that fails it is lost, and holds the version that is wanted
        when it comes back. Raises UsageError if the version cannot be held."""
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
        """Connect, and install what is wanted, which may change meanwhile."""
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
