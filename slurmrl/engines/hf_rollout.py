"""Requests served by a model of transformers.

Its cache belongs to a batch of rows (`HFBatch`). Between two checks of the batch, the loop's other
tasks run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from slurmrl.engines.hf_batch import HFBatch
from slurmrl.errors import CorruptFileError, RunFailedError, UsageError
from slurmrl.rollouts.generation.base import (
    Completion,
    Decode,
    GenerationRequest,
    RolloutEngine,
    WeightVersion,
)
from slurmrl.rollouts.generation.native.sequence import Sequence

if TYPE_CHECKING:
    from slurmrl.models.hf_model import HFModel

Answer = asyncio.Future[tuple[Completion, ...]]


async def _at_once() -> None:
    await asyncio.sleep(0)


@dataclass(frozen=True)
class _RequestInFlight:
    """A request in flight."""

    rows: list[Sequence]
    future: Answer


class HFRollout(RolloutEngine):
    """Serves requests in rounds, or continuously.

    A round computes the requests that wait at its beginning. With ``joins`` requests join those
    that are being computed as soon as there is room.
    """

    def __init__(
        self,
        model: HFModel,
        version: str | None,
        prefill_tokens: int,
        *,
        rows: int | None = None,
        decode: Decode | None = None,
        support: bool = True,
        settled: Callable[[], Awaitable[None]] | None = None,
        joins: bool = False,
        stale_cache: bool = False,
    ) -> None:
        """``rows``: most completions at a time; None for no limit.

        ``version`` names the model's weights; without it requests wait for ``update_weights``.
        ``decode``, ``support``, ``settled``: see `ServingOptions`. Rounds begin after ``settled``
        returns. ``stale_cache``: see `NativeRollout`.
        """
        self._model, self._version, self._rows = model, version, rows
        self._decode, self._joins, self._stale_cache = decode, joins, stale_cache
        self._settled = settled or _at_once
        self._batch = HFBatch(model, prefill_tokens, decode, support=support)
        self._jobs: dict[str, _RequestInFlight] = {}
        self._waiting: list[Sequence] = []
        self._arrivals = count()
        self._task: asyncio.Task[None] | None = None
        self._lost: RunFailedError | None = None
        """Reason why it serves no more requests."""
        self._paused = False
        self._fresh = True
        """Whether no token was sampled since the last update of the weights."""
        self._stepped = asyncio.Event()

    @property
    def version(self) -> str | None:
        return self._version

    def submit(self, request: GenerationRequest) -> Answer:
        future: Answer = asyncio.get_running_loop().create_future()
        try:
            self._check(request)
        except (UsageError, RunFailedError) as error:
            future.set_exception(error)
            return future
        limit = len(request.prompt) + request.options.max_new_tokens
        rows = [
            Sequence((request.priority, next(self._arrivals)), request, key, limit)
            for key in request.keys
        ]
        self._jobs[request.request_id] = _RequestInFlight(rows, future)
        self._waiting += rows
        future.add_done_callback(lambda done: self._forget(request.request_id, done))
        self._serve()
        return future

    def abort(self, request_id: str) -> None:
        if request_id in self._jobs:
            self._end(self._jobs[request_id])
            self._answer(request_id)

    async def pause(self) -> None:
        await self._progress()
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._serve()

    async def update_weights(self, version: WeightVersion) -> None:
        await self._progress()
        if version.folder is not None:
            self._read(version)
        if not self._stale_cache:
            self._batch.renew()
        self._version, self._fresh = version.name, True
        self._serve()

    def _read(self, version: WeightVersion) -> None:
        """Read weights.

        If reading breaks off, the model has parts of two versions, and the engine is lost.
        """
        from slurmrl.models.hf_reading import read_weights  # transformers takes seconds to import

        assert version.folder is not None, "see the caller"
        try:
            read_weights(self._model, version.folder)
        except (OSError, CorruptFileError) as error:
            failure = RunFailedError(
                f"weights {version.name} could not be read from {version.folder}: {error}"
            )
            self._fail(failure)
            raise failure from error

    async def health(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def close(self) -> None:
        if self._lost is None:
            self._fail(RunFailedError("the engine was closed"))
        if self._task is not None:
            self._task.cancel()

    def _check(self, request: GenerationRequest) -> None:
        """Raise UsageError if a request can never be served, RunFailedError if none can."""
        if self._lost is not None:
            raise self._lost
        options = request.options
        faults = {
            "has an empty prompt": not request.prompt,
            "asks for no completion": not request.keys,
            "is in flight already": request.request_id in self._jobs,
            "has stop strings, but the engine has no tokenizer": bool(
                options.stop_strings and self._decode is None
            ),
        }
        for fault, holds in faults.items():
            if holds:
                raise UsageError(f"request {request.request_id} {fault}")
        if options.experts and not self._model.routers.blocks:
            raise UsageError(f"request {request.request_id}: the model has no experts to record")
        self._model.check_length(len(request.prompt) + options.max_new_tokens)

    @property
    def _serving(self) -> bool:
        busy = bool(self._waiting) or self._batch.living > 0
        return busy and not self._paused and self._version is not None and self._lost is None

    def _serve(self) -> None:
        """Have a task that calls the model while there is something to sample."""
        if self._serving and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._check_task)

    async def _run(self) -> None:
        while self._serving:
            if not self._batch.living:
                await self._settled()
            if self._serving:
                self._step()
                self._stepped.set()
                await asyncio.sleep(0)
        self._stepped.set()  # there may be nothing to sample any more

    def _step(self) -> None:
        """Let rows join, and sample some tokens."""
        assert self._version is not None, "it serves"
        living = self._batch.living
        if self._waiting and (self._joins or not living):
            self._waiting.sort(key=lambda row: (row.rank[0], row.request.request_id))
            free = len(self._waiting) if self._rows is None else self._rows - living
            if free > 0:
                rows, self._waiting = self._waiting[:free], self._waiting[free:]
                self._batch.add(rows)
        for request_id in {row.request.request_id for row in self._batch.step(self._version)}:
            self._answer(request_id)
        self._fresh = False

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """Fail the requests in flight if the model's calls have failed."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RunFailedError | UsageError):
            self._fail(error)
        elif error is not None:
            failure = RunFailedError(f"the model failed: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, failure: RunFailedError | UsageError) -> None:
        if isinstance(failure, RunFailedError):
            self._lost = failure
        self._stepped.set()
        for job in list(self._jobs.values()):
            self._end(job)
            if not job.future.done():
                job.future.set_exception(failure)

    async def _progress(self) -> None:
        """Wait until a token was sampled with the weights of the last update.

        Without the wait, updates that come faster than the cache can be read again would stop all
        requests.
        """
        while self._fresh and self._serving:
            self._serve()
            self._stepped.clear()
            await self._stepped.wait()
        if self._lost is not None:
            raise self._lost

    def _answer(self, request_id: str) -> None:
        """Give a request its completions if all have ended."""
        job = self._jobs.get(request_id)
        if job is None or job.future.done():
            return
        if all(row.finish is not None for row in job.rows):
            job.future.set_result(tuple(row.completion() for row in job.rows))
            del self._jobs[request_id]

    def _forget(self, request_id: str, future: Answer) -> None:
        """End a request whose future was cancelled or has failed."""
        job = self._jobs.get(request_id)
        if job is not None and job.future is future:
            self._end(self._jobs.pop(request_id))

    def _end(self, job: _RequestInFlight) -> None:
        """End the rows that have not ended; they keep their tokens."""
        for row in job.rows:
            row.finish = row.finish or "aborted"
        self._waiting = [row for row in self._waiting if row.finish is None]
