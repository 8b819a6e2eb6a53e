"""One server that generates: its process, if this run starts it, and the connection to it.

Only `Instance` supervises servers. It starts the process of a server of this run, connects to the
server, watches it, and starts again when the server is lost.
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
"""Return a new client without a weight version. It raises RunFailedError if that failed, and
UsageError if it will always fail."""

SERVER_ENDED: Final = "server_ended"
"""Event of a server that has ended by itself, or was killed because it hung."""
PAUSE_S = (0.5, 30.0)
"""First and longest pause before another start or connection."""
FAREWELL_S = 3.0
"""Time that a failed server gets to end by itself, so that its log has the reason."""
PROBE_S = 0.25
"""Time between two probes of a server that does not answer."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Time limits of a server, in seconds."""

    start_s: float = 600.0
    """Limit of a start until the server can serve requests, and of each later update."""
    silence_s: float = 60.0
    """Silence after which the server counts as hung; only time in which this process could listen
    counts."""
    probe_s: float = 5.0
    """Interval between two probes of a server that serves."""
    stable_s: float = 60.0
    """Time of service after which earlier failures no longer count, if the server has answered a
    request or got none."""


class Instance:
    """One server.

    With a ``program``, this process starts the server and starts it again when it ends or hangs.
    There is no further start after a UsageError of the first connection, and after starts that
    failed in a row (`FailedStarts`). A server without a program runs elsewhere; the instance
    connects to it repeatedly.

    ``wanted`` returns the version that the server should have and whether it should be paused.
    ``came`` and ``went`` are called when it becomes usable and unusable.
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
        """Return the caller must be in a running asyncio loop."""
        self.name = name
        self.engine: ServerClient | None = None
        """The engine; None while the server is unusable."""
        self.sequences = 0
        """Number of completions in progress on the server."""
        self.load = 0
        """Number of tokens that the server may have to compute for these completions."""
        self.error: SlurmrlError | None = None
        """Reason of the last loss."""
        self.given_up: SlurmrlError | None = None
        """Reason why there will be no further start."""
        self._connect, self._patience, self._program = connect, patience, program
        self._wanted, self._came, self._went = wanted, came, went
        self._control = asyncio.Lock()
        """Lock of updates and probes, one at a time."""
        self._doubted = asyncio.Event()
        self._changed = asyncio.Condition()
        self._needed = asyncio.Event()
        """Cleared while a server that ends must not be started again."""
        self._needed.set()
        self._runs = self._was_used = False
        """Whether there is a process, even if it is not ready; whether the server was ever ready.
        """
        self._asked = self._answered = self._heard = False
        """Whether the newest start got requests, has answered one, and has just done so."""
        self._ended: asyncio.Future[None]
        self.tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the server is usable or was given up, or the first connection has failed."""
        self._task = asyncio.create_task(self._keep(), name=name)
        self._task.add_done_callback(self._broke)

    @property
    def version(self) -> str | None:
        """The weight version with which it can serve a request now."""
        return self.engine.version if self.engine and not self._doubted.is_set() else None

    def doubt(self) -> None:
        """Mark the instance as unusable after a request failed, until it answers a health check."""
        self._doubted.set()

    def asked(self) -> None:
        """Note a request, because a start that ends without answering any has failed."""
        self._asked = True

    def heard(self) -> None:
        """Count the answer to a request as a sign of life.

        Between such answers, a busy server may not have time to answer a health check.
        """
        self._heard = self._answered = True

    async def up(self) -> None:
        """Wait until the server is usable.

        Raises RunFailedError when it is given up, UsageError if no start of it can be usable.
        """
        await self._until(lambda: self.engine is not None or self.given_up is not None)
        if self.given_up is not None:
            raise self.given_up

    async def update(self, version: WeightVersion) -> None:
        """Load ``version``.

        A server of this run has the version when this returns. A server elsewhere that fails is
        lost, and gets the wanted version when it is back. Raises UsageError if the server rejects
        the version, and as `up` does.
        """

        async def install(engine: ServerClient) -> None:
            if engine.version != version.name:  # a new start installs the version itself
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

        Until then, a server that has ended is not started again. One that fails to sleep is ended.
        No-op for a server elsewhere. Raises UsageError if the server refuses to sleep, and as `up`
        does.
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
        """Return whether the server has executed ``action``. It is lost if that fails.

        Raises UsageError if the server refuses the action.
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
        """Close the connection, and end a server of this run with all of its processes."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self.given_up = self.given_up or RunFailedError(f"{self.name} was closed")
        await self._notify()

    def _broke(self, task: asyncio.Task[None]) -> None:
        """Handle the end of the task: it ends only by a bug, or after the server was given up."""
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
        """Write the event in a thread, because the directory may be slow."""
        if program.events is not None:
            data = {"server": self.name, "reason": ending.reason, "served_s": ending.served_s}
            write = partial(program.events.write, SERVER_ENDED, **data, again=again)
            await asyncio.to_thread(write)

    async def _serve_once(self, pauses: Backoff) -> EndedStart:
        """Serve with one start, or one connection to a server elsewhere, until it is lost.

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
                # A server whose engine has failed may answer with errors before it ends.
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
        """Connect, and install the wanted version, which may change while this runs.

        Raises UsageError if the server was never used and cannot be.
        """
        try:
            engine = await self._connect()
        except UsageError as error:
            if not self._was_used:
                raise
            # Not a user error: the server has worked, and may only lack memory for a while.
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
            if isinstance(error, UsageError):  # an earlier start may have had these weights
                raise RunFailedError(str(error)) from error
            raise

    async def _finished(self, action: Awaitable[T]) -> T:
        """Return the result of an action of the server.

        Raises RunFailedError if the server ends before, or the action takes longer than a start
        may take.
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
        """Return when the server has rejected an action. Raise the reason if it was lost."""
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
            if self.engine is engine:  # cancelled
                self.engine = None
                await engine.close()
        assert self.error is not None, "it was lost"
        if not isinstance(self.error, UsageError):
            raise self.error

    async def _probe(self, engine: ServerClient) -> None:
        """Wait until the server has answered; count it as lost if it does not."""
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
        """Probe a server of this run until it answers: its end is detected without an answer."""
        while True:
            try:
                return await engine.health()
            except SlurmrlError:
                if self._program is None:
                    raise
                await asyncio.sleep(PROBE_S)

    async def _listen(self, answer: asyncio.Future[None]) -> None:
        """Return once the server answers. Raises RunFailedError if it has ended or hangs."""
        loop = asyncio.get_running_loop()
        silent_s = 0.0
        while not answer.done() and not self._ended.done():
            if silent_s >= self._patience.silence_s:
                limit = f"{self._patience.silence_s:g} s"
                raise RunFailedError(f"{self.name} hangs: it has not answered for {limit}")
            self._heard, began = False, loop.time()
            await _first_of(answer, self._ended, timeout_s=PROBE_S)
            # only time counts in which this process could listen
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
