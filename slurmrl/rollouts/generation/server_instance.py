"""Supervision of one server: its process, if this run starts the server, and its connection.

Only `Instance` supervises servers. An instance starts the process of a server of this run, connects
to the server, watches the server, and starts or connects again after a loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.errors import RunFailedError, SlurmrlError, UsageError
from slurmrl.rollouts.generation.base import WeightVersion
from slurmrl.rollouts.generation.process import (
    EndedStart,
    FailedStarts,
    ServerProcess,
    ServerProgram,
)
from slurmrl.rollouts.generation.server_client import ServerClient

logger = log.get(__name__)
T = TypeVar("T")
Connect = Callable[[], Awaitable[ServerClient]]
"""Function that connects to a server and returns a client without a weight version. The function
raises RunFailedError for a failure, and UsageError if every attempt will fail."""

SERVER_ENDED: Final = "server_ended"
"""Event of a server that has ended by itself, or was killed because it did not answer."""
PAUSE_S = (0.5, 30.0)
"""First and longest pause before another start or connection, in seconds."""
FAREWELL_S = 3.0
"""Seconds in which a failed server may end by itself, so that its log has the reason."""
PROBE_S = 0.25
"""Seconds between two probes of a server that does not answer."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Time limits of a server, in seconds."""

    start_s: float = 600.0
    """Limit of a start, until the server can serve requests, and of each update."""
    silence_s: float = 60.0
    """Limit of the time without an answer, after which the server counts as hung. Time in which
    this process was suspended does not count."""
    probe_s: float = 5.0
    """Interval between two health checks of a ready server."""
    stable_s: float = 60.0
    """Time after which earlier failures of a ready server no longer count, unless it got requests
    and answered none."""


class Instance:
    """One supervised server.

    With a ``program``, this process starts the server, and starts it again after it ends or hangs.
    The server is given up after a UsageError of the first connection, and after several failed
    starts in a row (`FailedStarts`). A server without a program runs elsewhere, and the instance
    connects to it again after each loss.

    ``wanted`` returns the version that the server should have, and whether it should be paused.
    ``came`` and ``went`` are called when the server becomes usable and unusable.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        patience: Patience,
        *,
        program: ServerProgram | None = None,
        wanted: Callable[[], tuple[WeightVersion | None, bool]],
        came: Callable[[Instance], None],
        went: Callable[[Instance], None],
    ) -> None:
        """Begin to supervise the server. The caller must be in a running asyncio loop."""
        self.name = name
        self.engine: ServerClient | None = None
        """The engine; None while the server is unusable."""
        self.sequences = 0
        """Number of completions in progress on the server."""
        self.load = 0
        """Number of tokens that the server may have to compute for these completions."""
        self.error: SlurmrlError | None = None
        """Reason for the last loss of the server."""
        self.given_up: SlurmrlError | None = None
        """Reason why the server was given up; None otherwise."""
        self._connect, self._patience, self._program = connect, patience, program
        self._wanted, self._came, self._went = wanted, came, went
        self._control = asyncio.Lock()
        """Lock that lets only one update or probe run at a time."""
        self._doubted = asyncio.Event()
        self._changed = asyncio.Condition()
        self._needed = asyncio.Event()
        """Event that is cleared while the server must not be started again after its end."""
        self._needed.set()
        self._runs = self._was_used = False
        """Whether there is a process (ready or not), and whether the server has ever been ready."""
        self._asked = self._answered = self._heard = False
        """Whether the newest start has got a request, has answered any, and has answered any since
        the last probe."""
        self._ended: asyncio.Future[None]
        self.tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that is done after the first connection has succeeded or failed."""
        self._task = asyncio.create_task(self._keep(), name=name)
        self._task.add_done_callback(self._broke)

    @property
    def version(self) -> str | None:
        """The weight version with which the server can serve requests now; None for none."""
        return self.engine.version if self.engine and not self._doubted.is_set() else None

    def doubt(self) -> None:
        """Mark the instance as unusable after a request failed, until it answers a health check."""
        self._doubted.set()

    def asked(self) -> None:
        """Record a request: a start that ends without answering any request counts as failed."""
        self._asked = True

    def heard(self) -> None:
        """Count the answer to a request as an answer to a health check.

        A busy server may answer requests but no health checks.
        """
        self._heard = self._answered = True

    async def up(self) -> None:
        """Wait until the server is usable.

        Raises RunFailedError or UsageError when the server is given up.
        """
        await self._until(lambda: self.engine is not None or self.given_up is not None)
        if self.given_up is not None:
            raise self.given_up

    async def update(self, version: WeightVersion) -> None:
        """Load ``version``.

        When this method returns, a server of this run has the version. If a server elsewhere fails,
        it is lost, and gets the version when it is back. Raises UsageError if the server rejects
        the version, and raises as `up` does.
        """

        async def install(engine: ServerClient) -> None:
            if engine.version != version.name:  # equal if a new start has installed it
                await engine.update_weights(version)

        self._needed.set()
        while not await self._steer(install) and self._program is not None:
            await self.up()

    async def pause(self) -> None:
        await self._steer(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self._steer(lambda engine: engine.resume())

    async def sleep(self) -> None:
        """Free the device memory of a server of this run until the next `update`.

        Until then, a server that has ended is not started again. A server that fails to sleep is
        ended. Do nothing for a server elsewhere. Raises UsageError if the server rejects the
        request to sleep, and raises as `up` does.
        """
        if self._program is None:
            return
        self._needed.clear()
        await self._until(lambda: self.engine is not None or self._is_over)
        if self.given_up is not None:
            raise self.given_up
        async with self._control:
            engine = self.engine
            if engine is not None:
                try:
                    await self._finished(engine.sleep())
                except SlurmrlError as error:
                    reason = RunFailedError(f"its memory was not freed: {error}")
                    await self._lose(engine, reason)
                    if not isinstance(error, RunFailedError):
                        raise
        await self._until(lambda: self.engine is not None or self._is_over)

    @property
    def _is_over(self) -> bool:
        return not self._runs or self.given_up is not None

    async def _steer(self, action: Callable[[ServerClient], Awaitable[None]]) -> bool:
        """Return whether the server has executed ``action``. After a failure, the server is lost.

        Raises UsageError if the server rejects the action.
        """
        async with self._control:
            engine = self.engine
            if engine is None:
                return False
            try:
                await self._finished(action(engine))
            except SlurmrlError as error:
                await self._lose(engine, error)
                if not isinstance(error, RunFailedError):
                    raise
                return False
            except asyncio.CancelledError:
                await self._lose(engine, RunFailedError("its update was interrupted"))
                raise
            return True

    async def close(self) -> None:
        """Close the connection, and end a server of this run with all its processes."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self.given_up = self.given_up or RunFailedError(f"{self.name} was closed")
        await self._notify()

    def _broke(self, task: asyncio.Task[None]) -> None:
        """Handle the end of the supervising task: a bug, or the server was given up."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            logger.error("%s is not used any more", self.name, exc_info=bug)
            self.engine, self.error = None, RunFailedError(f"{type(bug).__name__}: {bug}")
            self.given_up = None if self._program is None else self.error
            self._went(self)
        self._tell_tried()

    def _tell_tried(self) -> None:
        if not self.tried.done():
            self.tried.set_result(None)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _keep(self) -> None:
        pauses = Backoff(*PAUSE_S, growth=2.0)
        failed = FailedStarts(self._patience.stable_s)
        while True:
            await self._needed.wait()
            try:
                ending = await self._serve_once(pauses)
            except UsageError as error:
                self.error = error
                if self._program is not None:
                    lost = UsageError(f"{self.name} cannot be used: {error}")
                    return await self._give_up(lost)
            else:
                if self._program is not None:
                    failed.add(ending)
                    await self._tell(self._program, ending, again=not failed.enough)
                    if failed.enough:
                        return await self._give_up(failed.explained(self.name, ending.reason))
            if self._program is None:
                logger.warning("%s cannot be used: %s", self.name, self.error)
                self._tell_tried()
            else:
                logger.warning("%s is started again: %s", self.name, self.error)
            await asyncio.sleep(pauses.next_s())

    async def _give_up(self, error: SlurmrlError) -> None:
        self.error = self.given_up = error
        await self._notify()
        self._went(self)

    async def _tell(self, program: ServerProgram, ending: EndedStart, *, again: bool) -> None:
        """Write an event in a thread, because the shared directory may be slow."""
        if program.events is not None:
            data = {"server": self.name, "reason": ending.reason, "served_s": ending.served_s}
            write = partial(program.events.write, SERVER_ENDED, **data, again=again)
            await asyncio.to_thread(write)

    async def _serve_once(self, pauses: Backoff) -> EndedStart:
        """Serve with one start, or one server elsewhere, until the server is lost.

        Raises UsageError if the server runs but cannot be used.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._asked = self._answered = False
        served_s, ready_at = 0.0, None
        try:
            process = None if self._program is None else ServerProcess(self._program)
        except SlurmrlError as error:
            self.error = error
            return EndedStart(reason=str(error))
        if process is not None:
            loop.add_reader(process.pidfd, _resolve, self._ended)
            self._runs = True
        try:
            while True:
                engine = await self._finished(self._begin())
                ready_at = ready_at or loop.time()
                pauses.reset()
                await self._serve(engine)
                await asyncio.sleep(PAUSE_S[0])
        except SlurmrlError as error:
            if process is not None and isinstance(error, RunFailedError):
                # A server whose engine has failed may still answer with errors before it ends.
                await asyncio.wait([self._ended], timeout=FAREWELL_S)
            by_itself = process is not None and process.ended
            if isinstance(error, UsageError) and not by_itself:
                raise
            self.error = error
            served_s = 0.0 if ready_at is None else loop.time() - ready_at
        finally:
            if process is not None:
                loop.remove_reader(process.pidfd)
                process.close()
            self._runs = False
            await self._notify()
        if process is None:
            return EndedStart(reason=str(self.error))
        reason = process.ending() if by_itself else str(self.error)
        words = await asyncio.to_thread(process.last_words)
        reason = f"{reason}: {words}" if words.error and by_itself else f"{reason}; {words}"
        self.error = RunFailedError(reason)
        return EndedStart(
            reason=reason,
            served_s=served_s,
            asked=self._asked,
            answered=self._answered,
            error=words.kind if by_itself and not words.of_the_host else "",
        )

    async def _begin(self) -> ServerClient:
        """Connect, and install the wanted version, which may change during the installation.

        Raises UsageError if the server was never ready and cannot be used.
        """
        try:
            engine = await self._connect()
        except UsageError as error:
            if not self._was_used:
                raise
            # The server has worked before and may only lack memory for a while: try again.
            raise RunFailedError(str(error)) from error
        try:
            while True:
                version, paused = self._wanted()
                if version is not None and engine.version != version.name:
                    await engine.update_weights(version)
                if paused:
                    await engine.pause()
                if self._wanted() == (version, paused):
                    return engine
                if paused:
                    await engine.resume()
        except BaseException as error:
            await engine.close()
            if isinstance(error, UsageError):  # The server may work after a restart.
                raise RunFailedError(str(error)) from error
            raise

    async def _finished(self, action: Awaitable[T]) -> T:
        """Return the result of an action of the server.

        Raises RunFailedError if the server ends first, or if the action takes longer than
        `Patience.start_s`.
        """
        work = asyncio.ensure_future(action)
        try:
            await _first_of(work, self._ended, timeout_s=self._patience.start_s)
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
        if work.cancelled():
            limit = f"no answer within {self._patience.start_s:g} s"
            raise RunFailedError(f"{self.name} ended" if self._ended.done() else limit)
        return work.result()

    async def _serve(self, engine: ServerClient) -> None:
        """Serve until the server is lost, and raise the reason; return after a rejected action."""
        self.engine, self.error, self._was_used = engine, None, True
        self._doubted.clear()
        await self._notify()
        self._tell_tried()
        self._came(self)
        try:
            while self.engine is engine:
                doubted = asyncio.ensure_future(self._doubted.wait())
                await _first_of(self._ended, doubted, timeout_s=self._patience.probe_s)
                doubted.cancel()
                async with self._control:
                    if self.engine is engine:
                        await self._probe(engine)
        finally:
            if self.engine is engine:  # only if this task was cancelled
                self.engine = None
                await engine.close()
        assert self.error is not None, "it was lost"
        if not isinstance(self.error, UsageError):
            raise self.error

    async def _probe(self, engine: ServerClient) -> None:
        """Wait until the server answers a health check. Without an answer, the server is lost."""
        answer = asyncio.ensure_future(self._answer(engine))
        try:
            await self._listen(answer)
        except SlurmrlError as error:
            await self._lose(engine, error)
        else:
            if self._doubted.is_set():
                self._doubted.clear()
                self._came(self)
        finally:
            answer.cancel()

    async def _answer(self, engine: ServerClient) -> None:
        """Repeat health checks of a server of this run until it answers.

        The caller itself notices the end of the server.
        """
        while True:
            try:
                return await engine.health()
            except SlurmrlError:
                if self._program is None:
                    raise
                await asyncio.sleep(PROBE_S)

    async def _listen(self, answer: asyncio.Future[None]) -> None:
        """Return when the server answers. Raises RunFailedError if the server ends or hangs."""
        loop = asyncio.get_running_loop()
        silent_s = 0.0
        while not answer.done() and not self._ended.done():
            if silent_s >= self._patience.silence_s:
                limit = f"{self._patience.silence_s:g} s"
                raise RunFailedError(f"{self.name} hangs: it has not answered for {limit}")
            self._heard, began = False, loop.time()
            await _first_of(answer, self._ended, timeout_s=PROBE_S)
            # Time in which this process was suspended does not count.
            silent_s += min(loop.time() - began, 2 * PROBE_S)
            if self._heard:
                silent_s = 0.0
        if self._ended.done():
            raise RunFailedError(f"{self.name} ended")
        answer.result()

    async def _lose(self, engine: ServerClient, error: SlurmrlError) -> None:
        logger.warning("%s is lost: %s", self.name, error)
        self.engine, self.error = None, error
        self._doubted.set()
        await engine.close()
        self._went(self)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _first_of(*awaited: asyncio.Future[Any], timeout_s: float) -> None:
    """Wait until one of the futures is done, for at most ``timeout_s``."""
    await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
