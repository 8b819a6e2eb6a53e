"""Engine for one running server of any kind (`dialect.py`)."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from slurmrl.backoff import Backoff
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import (
    ABORTED,
    GenerationRequest,
    RolloutEngine,
    WeightVersion,
)
from slurmrl.rollouts.generation.dialect import Dialect
from slurmrl.rollouts.generation.fitness import check_context


@dataclass
class _InFlight:
    """A request in flight. ``samplings`` maps the name of each completion to its task."""

    future: asyncio.Future[tuple[Completion, ...]]
    samplings: dict[str, asyncio.Task[Completion]] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    """Names of completions that were sent to the server."""
    aborting: asyncio.Task[None] | None = None


class ServerClient(RolloutEngine):
    """Serves requests with one running server.

    Each completion is a separate HTTP request, because each has a separate random stream. The
    completions of a request share the prompt in the server's cache.
    """

    def __init__(self, dialect: Dialect, context: int, *, concurrency: int = 256) -> None:
        """``context`` is the result of ``dialect.connect``.

        ``concurrency`` is the maximum number of HTTP requests at a time.
        """
        self._dialect = dialect
        self._context = context
        self._free = asyncio.Semaphore(concurrency)
        self._jobs: dict[str, _InFlight] = {}
        self._numbers = itertools.count()
        self._version: str | None = None
        self._held: set[str] = set()
        """Names of the versions that this client has installed."""
        self._installed = asyncio.Event()
        """Set while the server has a version. Requests wait for this event."""
        self.paused = False
        """Whether `update_weights` leaves the server paused."""
        self.asleep = False
        """Whether the server's device memory may be partly or completely freed."""
        self._control = asyncio.Lock()
        """Lock of pauses, resumptions and updates of weights."""
        self._updated = self._update_s = 0.0
        """Time at which the last update ended, and its duration."""
        self._lost: RunFailedError | None = None

    @classmethod
    async def connect(
        cls, dialect: Dialect, *, concurrency: int = 256, least: int = 0
    ) -> ServerClient:
        """Return the engine of a server that answers now. The engine has no weight version yet.

        Raises UsageError if the server accepts fewer than ``least`` tokens of a prompt and its
        completion. Closes the dialect on any error.
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
        # The server may still sample for a cancelled request with this id: use a new number.
        number = next(self._numbers)
        for index, key in enumerate(request.keys):
            name = f"{request.request_id}-{number}-{index}"
            sampling = replace(request, request_id=name, keys=(key,))
            job.samplings[name] = task = asyncio.create_task(self._sample(job, sampling))
            task.add_done_callback(lambda _: self._settle(request.request_id))
        future.add_done_callback(lambda _: self._forget(request.request_id))
        return future

    async def _sample(self, job: _InFlight, sampling: GenerationRequest) -> Completion:
        async with self._free:
            await self._installed.wait()
            job.sent.add(sampling.request_id)
            completion = await self._dialect.sample(sampling)
        where = f"{sampling.request_id}: {self._dialect.where}"
        if others := set(completion.versions) - self._held:
            raise RunFailedError(
                f"{where} has sampled with weights {min(others)}, which "
                "this run has not installed: the server was restarted, or another run uses it"
            )
        if not all(map(math.isfinite, completion.logprobs)):
            raise RunFailedError(
                f"{where} has sampled tokens with log-probabilities "
                "that are not finite numbers; have the weights diverged?"
            )
        if completion.finish == "aborted" and job.aborting is None:
            raise RunFailedError(
                f"{sampling.request_id}: the server aborted the request, "
                "perhaps because it shuts down"
            )
        return completion

    def _refusal(self, request: GenerationRequest) -> UsageError | None:
        """Return the error for a request that can never be served; None for other requests."""
        name, prompt = f"request {request.request_id}", len(request.prompt)
        if request.request_id in self._jobs:
            return UsageError(f"{name} is in flight already")
        if not prompt or not request.keys:
            return UsageError(f"{name}: the prompt and the keys must not be empty")
        if prompt >= self._context:
            return UsageError(
                f"{name}: a prompt of {prompt} tokens leaves no room for a completion: the server "
                f"accepts {self._context} tokens in total"
            )
        return None

    def abort(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.aborting is None:
            job.aborting = asyncio.create_task(self._abort(job))

    async def _abort(self, job: _InFlight) -> None:
        """Repeat the aborts until all completions of a request have ended.

        A server ignores an abort that it receives before the completion's request.
        """
        backoff = Backoff(0.02, 1.0)
        while unfinished := {name: task for name, task in job.samplings.items() if not task.done()}:
            for name, task in unfinished.items():
                if name not in job.sent:
                    task.cancel()
                    continue
                with suppress(RunFailedError):  # the loop repeats a failed abort
                    await self._dialect.abort(name)
            await asyncio.wait(unfinished.values(), timeout=backoff.next_s())

    def _settle(self, request_id: str) -> None:
        """Resolve a request's future if all its completions have ended or one has failed."""
        job = self._jobs.get(request_id)
        if job is None or job.future.done():
            return
        ended = [task for task in job.samplings.values() if task.done()]
        errors = (task.exception() for task in ended if not task.cancelled())
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            job.future.set_exception(error)
        elif len(ended) == len(job.samplings):
            results = (ABORTED if task.cancelled() else task.result() for task in ended)
            job.future.set_result(tuple(results))

    def _forget(self, request_id: str) -> None:
        """Cancel the remaining completions of a request that was answered, failed or cancelled.

        A server stops sampling a completion when its connection is closed.
        """
        job = self._jobs.pop(request_id)
        for task in (*job.samplings.values(), *([job.aborting] if job.aborting else [])):
            task.cancel()

    async def pause(self) -> None:
        async with self._control:
            self.paused = True
            if not self.asleep:
                await self._dialect.pause()

    async def resume(self) -> None:
        async with self._control:
            self.paused = False
            if not self.asleep:
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

        There must be no requests in flight.
        """
        assert not self._jobs, "a server sleeps only without requests"
        async with self._control:
            self._version = None
            self._installed.clear()
            self.asleep = True
            await self._dialect.sleep()

    async def _let_run(self) -> None:
        """Wait until the server has run for as long as its last update took.

        Between frequent updates, the server therefore has time to compute caches and to sample.
        """
        if self._jobs and not self.paused:
            await asyncio.sleep(self._updated + self._update_s - time.monotonic())

    async def health(self) -> None:
        if self._lost is not None:
            raise self._lost
        async with self._control:  # a server that loads weights answers no other request
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
