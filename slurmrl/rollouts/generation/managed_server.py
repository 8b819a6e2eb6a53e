"""The engine of a server that is started again whenever it ends or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from slurmrl import log
from slurmrl.config.schema.rollout import Address
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.rollouts.generation.base import (
    ABORTED,
    Completion,
    GenerationRequest,
    RolloutEngine,
    WeightVersion,
)
from slurmrl.rollouts.generation.dialect import Dialect
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.process import ServerProgram
from slurmrl.rollouts.generation.server_client import ServerClient, within
from slurmrl.rollouts.generation.server_supervisor import Patience, ServerSupervisor

logger = log.get(__name__)

MOST_FAULTS = 3
"""Failures of a request at a server that answers probes all the same."""


@dataclass
class _Order:
    """A request and where it is."""

    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    engine: ServerClient | None = None
    """The start of the server that works on it."""


class ManagedServer(RolloutEngine):
    """One server of ours.

    What it was working on when it ended is drawn again by the next start, once that holds the
    weights that were installed last.
    """

    def __init__(
        self,
        program: ServerProgram,
        address: Address,
        speak: Callable[[HttpClient], Dialect],
        *,
        patience: Patience,
        context: int = 0,
    ) -> None:
        """The caller must be in a running asyncio loop.

        ``speak`` makes the dialect of the server. ``context`` is the number of tokens of a prompt
        and its completion that the server must take.
        """
        self._address, self._speak = address, speak
        self._context = context
        self._patience = patience
        self._prober = speak(HttpClient(address, patience_s=0.0))
        self._wanted: WeightVersion | None = None
        self._paused = self._rests = False
        self._engine: ServerClient | None = None
        self._orders: dict[str, _Order] = {}
        self._control = asyncio.Lock()
        self._server = ServerSupervisor(
            program, probe=self._prober.health, prepare=self._prepare, patience=patience
        )

    @property
    def version(self) -> str | None:
        return None if self._engine is None else self._engine.version

    async def up(self) -> None:
        """Return once the server is ready.

        Raises RunFailedError if it is given up, UsageError if it cannot be used.
        """
        await self._server.up()

    async def _prepare(self) -> None:
        """Make a new start ready for requests.

        Raises UsageError if neither it nor an earlier one can be used.
        """
        dialect = self._speak(HttpClient(self._address))
        try:
            engine = await ServerClient.connect(dialect, least=self._context)
        except UsageError as error:  # after one that could be used, memory is short for a while
            if self._engine is None:
                raise
            raise RunFailedError(str(error)) from error
        if self._wanted is not None:
            try:
                await engine.update_weights(self._wanted)
            except UsageError as error:  # another start may load them: an earlier one has perhaps
                raise RunFailedError(str(error)) from error
        if self._paused:
            await engine.pause()
        before, self._engine = self._engine, engine
        if before is not None:
            await before.close()

    async def _current(self) -> tuple[int, ServerClient]:
        start = await self._server.up()
        assert self._engine is not None, "a server is up once it was prepared"
        return start, self._engine

    def submit(self, request: GenerationRequest) -> asyncio.Future[tuple[Completion, ...]]:
        name = request.request_id
        if name in self._orders:
            raise UsageError(f"request {name} is in flight already")
        order = self._orders[name] = _Order()
        task = asyncio.create_task(self._complete(request, order))
        task.add_done_callback(lambda _: self._orders.pop(name))
        return task

    async def _complete(self, request: GenerationRequest, order: _Order) -> tuple[Completion, ...]:
        """Give a request to one start of the server after the other, until one has answered."""
        faults = 0
        while await self._up_before(order.aborted):
            start, order.engine = await self._current()
            self._server.asked()
            try:
                completions = await order.engine.submit(request)
            except RunFailedError as error:
                order.engine = None
                if order.aborted.is_set():
                    break
                logger.warning("%s is requested again: %s", request.request_id, error)
                await self._server.settle(start)
                faults += await self._server.up() == start
                if faults == MOST_FAULTS:
                    raise
            else:
                self._server.heard()
                return completions
        return (ABORTED,) * len(request.keys)

    async def _up_before(self, aborted: asyncio.Event) -> bool:
        """Whether the server is ready before the request is aborted."""
        waits = [asyncio.ensure_future(wait) for wait in (self._server.up(), aborted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[0].done() and bool(waits[0].result())
        finally:
            for wait in waits:
                wait.cancel()

    def abort(self, request_id: str) -> None:
        order = self._orders.get(request_id)
        if order is not None:
            order.aborted.set()
            if order.engine is not None:
                order.engine.abort(request_id)

    async def pause(self) -> None:
        async with self._control:
            self._paused = True
            if not self._rests:
                await self._reach(ServerClient.pause)

    async def resume(self) -> None:
        async with self._control:
            self._paused = False
            if not self._rests:
                await self._reach(ServerClient.resume)

    async def update_weights(self, version: WeightVersion) -> None:
        """As in the contract.

        Raises UsageError if the server refuses the version; it then serves the one before, or is
        closed if it refuses that as well.
        """
        async with self._control:
            before, self._wanted = self._wanted, version
            self._rests = False
            self._server.want()
            try:
                await self._reach(partial(_install, version=version, paused=self._paused))
            except UsageError:
                self._wanted = before
                if before is not None:
                    await self._restore(before)
                raise

    async def sleep(self) -> None:
        """Free the server's device memory until the next `update_weights`.

        Until then, a server that has ended is not started again. One that fails to sleep is ended.
        Raises UsageError if it refuses to sleep.
        """
        async with self._control:
            self._wanted, self._rests = None, True
            start = await self._server.rest()
            if start is None:
                return
            assert self._engine is not None, "a server is up once it was prepared"
            try:
                with self._server.busy():
                    await self._engine.sleep()
            except RunFailedError as error:
                reason = RunFailedError(f"its memory was not freed: {error}")
                await self._server.end(start, reason)

    async def _restore(self, version: WeightVersion) -> None:
        """Serve a version again after another one was refused, perhaps in the middle."""
        try:
            await self._reach(partial(_install, version=version, paused=self._paused))
        except UsageError:
            await self.close()
            raise

    async def _reach(self, act: Callable[[ServerClient], Awaitable[None]]) -> None:
        """Act on the server, and again on its next start if this start ends or hangs.

        A start hangs if the action takes longer than a start may take to become ready, and the
        start then answers no probe.
        """
        while True:
            start, engine = await self._current()
            try:
                with self._server.busy():
                    return await within(self._patience.start_s, act(engine))
            except RunFailedError as error:
                if engine.asleep:  # it may answer probes all the same
                    await self._server.end(start, RunFailedError(f"it did not wake: {error}"))
                    continue
                await self._server.settle(start)
                if await self._server.up() == start:
                    raise

    async def health(self) -> None:
        _, engine = await self._current()
        await engine.health()

    async def close(self) -> None:
        await self._server.close()
        if self._engine is not None:
            await self._engine.close()
        await self._prober.close()


async def _install(engine: ServerClient, version: WeightVersion, *, paused: bool) -> None:
    engine.paused = paused  # it may have changed while the server slept
    if engine.version != version.name:  # a start installs the version itself
        await engine.update_weights(version)
