"""A server that is kept running: started, watched, and started again when it ends or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.config.schema.rollout import Address, ServerKeys
from slurmrl.errors import RunFailedError, SlurmrlError, UsageError
from slurmrl.rollouts.generation.process import ServerProcess, ServerProgram
from slurmrl.run.events import EventWriter

logger = log.get(__name__)

SERVER_ENDED: Final = "server_ended"
"""The event of a server that has ended by itself or was ended because it hung."""
RESTART_S = (0.5, 30.0)
"""First and longest pause before another start."""
PROBE_S = 0.25
"""Between two probes of a server that starts."""
MOST_FAILED_STARTS = 3


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Time limits of a server, in seconds."""

    start_s: float = 600.0
    """From its start to its first sign of life, for what makes it ready, and for each later version
    of its weights."""
    silence_s: float = 60.0
    """Without a sign of life while this process listened, after which it counts as hung."""
    probe_s: float = 5.0
    """Between two probes of a server that serves."""
    stable_s: float = 60.0
    """A server that served for this long, and has answered one of the requests that it got, has
    started well: earlier failures no longer count."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a rank keeps its server."""

    python: str
    """The interpreter of the server's environment."""
    arguments: tuple[str, ...]
    """Further arguments of the server."""
    tokenizer: Path | None
    """None where requests need no text."""
    patience: Patience
    log: Path
    events: EventWriter | None = None
    """Gets an event each time the server ends."""
    context: int = 0
    """Tokens that a prompt and its completion may have together; the server must take as many."""
    memory_bytes: int | None = None
    """Its share of each GPU; None leaves that to its own settings."""
    sleeps: bool = False
    """Whether it frees its GPUs between generations."""
    experts: bool = False
    """Whether it is to record the experts that read each token."""
    stale_cache: bool = False
    """Whether requests in flight over an update keep what older weights have computed."""

    @property
    def text(self) -> bool:
        """Whether requests need a tokenizer on the server."""
        return self.tokenizer is not None


@dataclass(frozen=True, kw_only=True)
class Running:
    """Servers that run already."""

    addresses: tuple[Address, ...]
    weights: Path
    """A folder that they see under the same path, of this trial alone."""
    keys: ServerKeys
    context: int
    """Tokens that a prompt and its completion may have together; a server must take as many."""
    text: bool
    """Whether requests need a tokenizer on the server."""
    patience: Patience
    experts: bool = False
    """Whether they must record the experts that read each token."""


class ServerSupervisor:
    """Keeps a server running.

    ``probe`` returns if the server answers, and ``prepare`` makes a started one ready for requests
    (it installs weights); both raise SlurmrlError otherwise. After a UsageError of ``prepare``, or
    starts that ended with the same error without an answer (`FailedStarts`), there is no further
    one. Made in a running asyncio loop.
    """

    def __init__(
        self,
        program: ServerProgram,
        *,
        probe: Callable[[], Awaitable[None]],
        prepare: Callable[[], Awaitable[None]],
        patience: Patience,
    ) -> None:
        self.name = program.name
        self._program = program
        self._probe, self._prepare = probe, prepare
        self._patience = patience
        self._changed = asyncio.Condition()
        self._starts = 0
        self._up: int | None = None
        """The number of the start that is ready."""
        self._lost: SlurmrlError | None = None
        """Why there will be no further start."""
        self._doubted = asyncio.Event()
        self._heard = False
        self._asked = self._answered = False
        """Whether the newest start got requests, and has answered one."""
        self._busy = 0
        self._needed = asyncio.Event()
        self._needed.set()
        self._runs = False
        """Whether there is a process, ready or not."""
        self._dropped: RunFailedError | None = None
        """Why the start that is ready is to end."""
        self._task = asyncio.create_task(self._keep(), name=program.name)

    async def up(self) -> int:
        """Wait until the server is ready; return the number of its start.

        Raises RunFailedError once it is given up or closed, UsageError if no start of it can be
        used.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._up is not None or self._lost is not None)
        if self._lost is not None:
            raise self._lost
        assert self._up is not None
        return self._up

    async def settle(self, start: int) -> None:
        """Wait until a start whose request failed has answered a probe, or another start is ready.

        Raises as ``up`` does.
        """
        if self._up == start:
            self._doubted.set()
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._up != start or not self._doubted.is_set()
                )
        await self.up()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While entered, silence of the server is expected."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def asked(self) -> None:
        """Expect the answer to a request: a start that ends without any has failed."""
        self._asked = True

    def heard(self) -> None:
        """Count the answer to a request as a sign of life.

        Between such answers, a server with much to do may not come to answer a probe.
        """
        self._heard = self._answered = True

    async def rest(self) -> int | None:
        """Start the server no more until `want`.

        Returns the number of the start that is ready, or None if the server has ended. Raises as
        ``up`` does.
        """
        self._needed.clear()
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._up is not None or not self._runs or self._lost is not None
            )
        if self._lost is not None:
            raise self._lost
        return self._up

    def want(self) -> None:
        """Undo `rest`."""
        self._needed.set()

    async def end(self, start: int, error: RunFailedError) -> None:
        """Return once this start has ended, because of ``error``."""
        if self._up == start:
            self._dropped = error
            self._doubted.set()
            async with self._changed:
                await self._changed.wait_for(lambda: self._up != start)

    async def close(self) -> None:
        """End the server with all of its processes."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._now(None, lost=RunFailedError(f"{self.name} was closed"))

    async def _keep(self) -> None:
        backoff = Backoff(*RESTART_S, growth=2.0)
        failed = FailedStarts(self._patience.stable_s)
        while True:
            await self._needed.wait()
            try:
                ending = await self._serve()
            except UsageError as error:
                lost = f"{self.name} cannot be used: {error}"
                return await self._now(None, lost=UsageError(lost))
            failed.add(ending)
            await self._tell(ending, again=not failed.enough)
            if failed.enough:
                return await self._now(None, lost=self._given_up(failed, ending.reason))
            if failed.count == 1:
                backoff.reset()
            logger.warning("%s is started again: %s", self.name, ending.reason)
            await asyncio.sleep(backoff.next_s())

    async def _tell(self, ending: EndedStart, *, again: bool) -> None:
        """Write the event; the directory may take its time."""
        if self._program.events is not None:
            data = {"server": self.name, "reason": ending.reason, "served_s": ending.served_s}
            write = partial(self._program.events.write, SERVER_ENDED, **data, again=again)
            await asyncio.to_thread(write)

    def _given_up(self, failed: FailedStarts, reason: str) -> SlurmrlError:
        if failed.hopeless:
            return UsageError(
                f"{self.name} cannot be used: its last {MOST_FAILED_STARTS} starts have ended with "
                f"the same error, before they answered a request: {reason}"
            )
        return RunFailedError(f"{self.name} failed {failed.count} times in a row: {reason}")

    async def _serve(self) -> EndedStart:
        """One start. Raises UsageError if it runs but cannot be used."""
        loop = asyncio.get_running_loop()
        ready_at: float | None = None
        self._asked = self._answered = False
        try:
            process = ServerProcess(self._program)
        except SlurmrlError as error:
            return EndedStart(reason=str(error))
        ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(process.pidfd, _resolve, ended)
        self._runs = True
        try:
            await self._begin(ended)
            self._starts += 1
            self._dropped = None
            ready_at = loop.time()
            await self._now(self._starts)
            await self._watch(ended)
            reason, by_itself = process.ending(), True
        except SlurmrlError as error:
            by_itself = process.ended
            if isinstance(error, UsageError) and not by_itself:
                raise
            reason = process.ending() if by_itself else str(error)
        finally:
            loop.remove_reader(process.pidfd)
            process.close()
            self._runs = False
            served_s = 0.0 if ready_at is None else loop.time() - ready_at
            await self._now(None)
        words = await asyncio.to_thread(process.last_words)
        return EndedStart(
            reason=f"{reason}: {words}" if words.error and by_itself else f"{reason}; {words}",
            served_s=served_s,
            asked=self._asked,
            answered=self._answered,
            error=words.kind if by_itself and not words.of_the_host else "",
        )

    async def _begin(self, ended: asyncio.Future[None]) -> None:
        """Return once the server is ready. Raises SlurmrlError if it ends or takes too long."""
        work = asyncio.ensure_future(self._get_ready())
        try:
            await _first_of(work, ended, timeout_s=self._patience.start_s)
            if ended.done():
                raise RunFailedError(f"{self.name} ended before it was ready")
            if not work.done():
                raise RunFailedError(f"{self.name} was not ready in {self._patience.start_s:g} s")
            work.result()
        finally:
            work.cancel()

    async def _get_ready(self) -> None:
        await self._answer()
        await self._prepare()

    async def _answer(self) -> None:
        """Probe the server until it answers."""
        while True:
            try:
                return await self._probe()
            except SlurmrlError:
                await asyncio.sleep(PROBE_S)

    async def _watch(self, ended: asyncio.Future[None]) -> None:
        """Return once the server has ended. Raises RunFailedError if it hangs."""
        while not ended.done():
            doubted = asyncio.ensure_future(self._doubted.wait())
            await _first_of(ended, doubted, timeout_s=self._patience.probe_s)
            doubted.cancel()
            if self._dropped is not None:
                raise self._dropped
            answer = asyncio.ensure_future(self._answer())
            try:
                await self._listen(answer, ended)
            finally:
                answer.cancel()

    async def _listen(self, answer: asyncio.Future[None], ended: asyncio.Future[None]) -> None:
        """Return once the server answers or has ended. Raises RunFailedError if it hangs."""
        loop = asyncio.get_running_loop()
        silent_s = 0.0
        while not answer.done() and not ended.done():
            if silent_s >= self._patience.silence_s:
                limit = f"{self._patience.silence_s:g} s"
                raise RunFailedError(f"{self.name} hangs: it has not answered for {limit}")
            self._heard, began = False, loop.time()
            await _first_of(answer, ended, timeout_s=PROBE_S)
            # a process that was stopped, or got no CPU, has not listened for longer than that
            silent_s += min(loop.time() - began, 2 * PROBE_S)
            if self._busy or self._heard:
                silent_s = 0.0
        if answer.done():
            answer.result()
            async with self._changed:
                self._doubted.clear()
                self._changed.notify_all()

    async def _now(self, up: int | None, *, lost: SlurmrlError | None = None) -> None:
        async with self._changed:
            self._up = up
            self._lost = self._lost or lost
            self._doubted.clear()
            self._changed.notify_all()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _first_of(*awaited: asyncio.Future[Any], timeout_s: float) -> None:
    """Wait until one of them is done, for ``timeout_s`` at most."""
    await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True, kw_only=True)
class EndedStart:
    """Why and how a start was over."""

    reason: str
    served_s: float = 0.0
    """Seconds for which it was ready."""
    asked: bool = False
    """Whether it got requests."""
    answered: bool = False
    """Whether it has answered one."""
    error: str = ""
    """What its log says if the server ended by itself, in words that do not change from start to
    start; empty if a server on another host may not meet it."""

    def good(self, stable_s: float) -> bool:
        """Whether it was ready for ``stable_s``, and answered if it had requests."""
        return self.served_s >= stable_s and (self.answered or not self.asked)


class FailedStarts:
    """Counts starts that failed in a row."""

    def __init__(self, stable_s: float) -> None:
        """``stable_s``: after which a start that was ready counts as good."""
        self._stable_s = stable_s
        self._error = ""
        self._alike = 0
        self.count = 0

    def add(self, ending: EndedStart) -> None:
        self.count = 1 if ending.good(self._stable_s) else self.count + 1
        same = bool(ending.error) and not ending.answered
        self._alike = self._alike + 1 if same and ending.error == self._error else int(same)
        self._error = ending.error

    @property
    def enough(self) -> bool:
        """Whether the server is not to be started again now."""
        return self.hopeless or self.count >= MOST_FAILED_STARTS

    @property
    def hopeless(self) -> bool:
        """Whether another start would probably end with the same error as the last starts.

        They all ended with the same error before they answered a request.
        """
        return self._alike >= MOST_FAILED_STARTS
