"""Engine that serves requests with a batch of sequences in this process."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationRequest, RolloutEngine, WeightVersion
from slurmrl.rollouts.generation.native.sequence import Sequence

Answer = asyncio.Future[tuple[Completion, ...]]


class RequestBatch(Protocol):
    """Sequences that a model samples together."""

    @property
    def sampled(self) -> int:
        """Total number of sampled tokens."""
        ...

    @property
    def checksum(self) -> int:
        """Checksum of all sampled tokens, in their order."""
        ...

    @property
    def busy(self) -> bool:
        """Whether ``step`` has tokens to process or results to return."""
        ...

    def add(self, request: GenerationRequest) -> list[Sequence]:
        """Queue a request; return its sequences, one for each key.

        Raises UsageError for a request that can never be served.
        """
        ...

    def step(self) -> list[Sequence]:
        """Call the model once; return the sequences that have ended since the last call."""
        ...

    def abort(self, sequences: list[Sequence]) -> None:
        """End sequences that have not ended yet; they keep their tokens."""
        ...

    def renew(self, version: str, *, stale_cache: bool = False) -> None:
        """Continue with new weights. With ``stale_cache``, keep the cache of older weights."""
        ...


@dataclass(frozen=True)
class _Job:
    """A request in flight."""

    sequences: list[Sequence]
    future: Answer


class BatchRollout(RolloutEngine):
    """Serves requests with a batch. Other tasks of the asyncio loop run between two steps."""

    _batch: RequestBatch

    def __init__(self, version: str | None, *, stale_cache: bool) -> None:
        """``version`` is the name of the model's weights; None lets requests wait for an update.

        With ``stale_cache``, requests in flight keep the cache of older weights over an update.
        """
        self._version, self._stale_cache = version, stale_cache
        self._jobs: dict[str, _Job] = {}
        self._task: asyncio.Task[None] | None = None
        self._lost: RunFailedError | None = None
        """Reason why the engine serves no more requests."""
        self._paused = False
        self._fresh = True
        """Whether no token has been sampled since the last update of the weights."""
        self._stepped = asyncio.Event()

    @property
    def version(self) -> str | None:
        return self._version

    def submit(self, request: GenerationRequest) -> Answer:
        future: Answer = asyncio.get_running_loop().create_future()
        try:
            if self._lost is not None:
                raise self._lost
            if request.request_id in self._jobs:
                raise UsageError(f"request {request.request_id} is in flight already")
            sequences = self._batch.add(request)
        except (UsageError, RunFailedError) as error:
            future.set_exception(error)
            return future
        self._jobs[request.request_id] = _Job(sequences, future)
        future.add_done_callback(lambda done: self._forget(request.request_id, done))
        self._answer(request.request_id)
        self._serve()
        return future

    def abort(self, request_id: str) -> None:
        if request_id in self._jobs:
            self._batch.abort(self._jobs[request_id].sequences)
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
            self._read(version.name, version.folder)
        self._batch.renew(version.name, stale_cache=self._stale_cache)
        self._version, self._fresh = version.name, True
        self._serve()

    async def health(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def close(self) -> None:
        if self._lost is None:
            self._fail(RunFailedError("the engine was closed"))
        if self._task is not None:
            self._task.cancel()

    @abstractmethod
    def _read(self, name: str, folder: Path) -> None:
        """Read weights into the model.

        Raises UsageError if the folder is rejected and the model is unchanged. Calls ``_lose`` if
        the model has parts of two versions.
        """

    async def _before_step(self) -> None:
        """Wait for requests that should be part of the next step."""

    def _lose(self, name: str, folder: Path, reason: object) -> RunFailedError:
        """Fail all requests, because weights were read only in part. Return the error."""
        failure = RunFailedError(f"weights {name} could not be read from {folder}: {reason}")
        self._fail(failure)
        return failure

    @property
    def _serving(self) -> bool:
        ready = not self._paused and self._version is not None and self._lost is None
        return ready and self._batch.busy

    def _serve(self) -> None:
        """Start a task that calls the model until all requests are answered."""
        if self._serving and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._check)

    async def _run(self) -> None:
        while self._serving:
            await self._before_step()
            if not self._serving:
                break
            before = self._batch.sampled
            ended = self._batch.step()
            for request_id in {sequence.request.request_id for sequence in ended}:
                self._answer(request_id)
            self._fresh = self._fresh and self._batch.sampled == before
            self._stepped.set()
            await asyncio.sleep(0)
        self._stepped.set()  # no step is left, and `_progress` may still wait

    def _check(self, task: asyncio.Task[None]) -> None:
        """Fail the requests in flight if a call of the model has failed."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RunFailedError | UsageError):
            self._fail(error)
        elif error is not None:
            failure = RunFailedError(f"the model failed: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, failure: RunFailedError | UsageError) -> None:
        """Fail the requests in flight. A RunFailedError also makes the engine unusable."""
        if isinstance(failure, RunFailedError):
            self._lost = failure
        self._stepped.set()
        for request_id, job in list(self._jobs.items()):
            self._drop(request_id)
            if not job.future.done():
                job.future.set_exception(failure)

    async def _progress(self) -> None:
        """Wait until a token has been sampled with the weights of the last update.

        Each update makes requests compute their caches again. Without the wait, frequent updates
        could prevent any progress.
        """
        while self._fresh and self._serving:
            self._serve()
            self._stepped.clear()
            await self._stepped.wait()
        if self._lost is not None:
            raise self._lost

    def _answer(self, request_id: str) -> None:
        """Resolve a request's future if all its sequences have ended."""
        job = self._jobs.get(request_id)
        if job is None or job.future.done():
            return
        if all(sequence.finish is not None for sequence in job.sequences):
            job.future.set_result(tuple(sequence.completion() for sequence in job.sequences))
            del self._jobs[request_id]

    def _forget(self, request_id: str, future: Answer) -> None:
        """Drop a request whose future was cancelled."""
        job = self._jobs.get(request_id)
        if job is not None and job.future is future:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        """Abort the sequences of a request and forget the request."""
        sequences = self._jobs.pop(request_id).sequences
        if self._lost is None:
            self._batch.abort(sequences)
