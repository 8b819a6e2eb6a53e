"""The native engine with the interface of request engines, in one asyncio loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from slurmrl.errors import CorruptFileError, RunFailedError, UsageError
from slurmrl.models.decoder import Decoder
from slurmrl.models.hf import Weights
from slurmrl.models.inference import join_matrices
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.shapes import parameter_shapes
from slurmrl.rollouts.generation.base import (
    Completion,
    Decode,
    GenerationRequest,
    RolloutEngine,
    WeightVersion,
)
from slurmrl.rollouts.generation.native.batch import ContinuousBatch
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.rollouts.generation.native.sequence import Sequence
from slurmrl.rollouts.generation.native.split_batch import (
    ComparedBatch,
    FollowerBatch,
    LeaderBatch,
    SplitRanks,
)

Completions = tuple[Completion, ...]


class ReadOutcome(IntEnum):
    """How a rank has read new weights."""

    READ = 0
    REFUSED = 1
    """They are of another architecture; the old ones are unchanged."""
    BROKEN = 2


@dataclass(frozen=True)
class _Job:
    """A request in flight."""

    sequences: list[Sequence]
    future: asyncio.Future[Completions]


class NativeRollout(RolloutEngine):
    """Serves requests with a decoder that owns its parameters as plain tensors.

    Between two calls of the model it lets the loop's other tasks run.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        limits: Limits | None = None,
        version: str | None = None,
        context: int | None = None,
        decode: Decode | None = None,
        own: bool = True,
        peers: SplitRanks | None = None,
        stale_cache: bool = False,
        turns: bool = True,
        support: bool = True,
    ) -> None:
        """``version`` names the decoder's weights; without it requests wait for ``update_weights``.

        ``context`` is the most tokens of a sequence (default: ``max_position_embeddings``);
        ``decode`` turns token ids into text, for stop strings. The parameters of a decoder that is
        the engine's ``own`` are moved in memory. ``peers`` are the ranks of a decoder that is
        split: each makes an engine with the same arguments, the leader's serves, and the others
        call ``follow``. ``stale_cache``: requests in flight keep the cache of older weights over
        an update. Without ``turns``, no request continues an earlier one's sequence, a request
        beyond the model's positions is rejected, and all ``peers`` serve the same requests.
        ``support``: see ``ModelRunner``.
        """
        assert peers is not None or decoder.split.whole, "ranks of a split decoder compute together"
        if own:
            join_matrices(decoder)
        if context is None and turns:
            context = decoder.config.max_positions
        options: dict[str, Any] = {"context": context, "decode": decode, "turns": turns}
        self._batch = _batch(decoder, limits or Limits(), peers, support=support, **options)
        self._peers = peers
        self._decoder = decoder
        self._jobs: dict[str, _Job] = {}
        self._task: asyncio.Task[None] | None = None
        self._lost: RunFailedError | None = None
        self._paused = False
        self._stale_cache = stale_cache
        self._version = version
        self._fresh = True
        """Whether no token was sampled since the last update of the weights."""
        self._stepped = asyncio.Event()
        if version is not None and (peers is None or peers.is_leader or not turns):
            self._batch.renew(version)

    @property
    def version(self) -> str | None:
        return self._version

    @property
    def read(self) -> int:
        """Tokens that the model has read in all, those that were read again included."""
        return self._batch.read

    def submit(self, request: GenerationRequest) -> asyncio.Future[Completions]:
        future: asyncio.Future[Completions] = asyncio.get_running_loop().create_future()
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

    def _read(self, name: str, folder: Path) -> None:
        """Read weights.

        If reading breaks off, or succeeds on some ranks only, the decoder has parts of two
        versions, and the engine is lost.
        """
        if isinstance(self._batch, LeaderBatch):
            self._batch.read_weights(name, folder)
        error: UsageError | OSError | CorruptFileError | None = None
        try:
            read_weights(self._decoder, folder)
        except (UsageError, OSError, CorruptFileError) as raised:
            error = raised
        outcomes = self._outcomes(error)
        if outcomes == {ReadOutcome.READ}:
            return
        if error is not None and outcomes == {ReadOutcome.REFUSED}:
            raise error
        reason = error or "other ranks of the model failed"
        failure = RunFailedError(f"weights {name} could not be read from {folder}: {reason}")
        self._fail(failure)
        raise failure from error

    def _outcomes(self, error: Exception | None) -> set[int]:
        """Return how all ranks have read weights; this one with an error or none."""
        own = ReadOutcome.READ
        if error is not None:
            own = ReadOutcome.REFUSED if isinstance(error, UsageError) else ReadOutcome.BROKEN
        return {own} if self._peers is None else set(self._peers.answers(own))

    async def health(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def close(self) -> None:
        self.dismiss()
        if self._lost is None:
            self._fail(RunFailedError("the native engine was closed"))
        if self._task is not None:
            self._task.cancel()

    def follow(self) -> None:
        """Compute the requests of the leader's engine, until it is closed or dismisses this rank.

        Raises RuntimeError if the leader is gone.
        """
        assert self._peers is not None, "a rank alone has no leader"
        assert not self._peers.is_leader, "the leader serves requests"

        def read(name: str, folder: Path) -> None:
            with suppress(UsageError):  # the leader's caller gets it; nothing has changed
                self._read(name, folder)

        FollowerBatch(self._batch, self._peers, read).run()

    def dismiss(self) -> None:
        """Let the other ranks of the model return from ``follow``. Nothing is sampled any more."""
        if isinstance(self._batch, LeaderBatch) and self._lost is None:
            self._batch.end()

    @property
    def _serving(self) -> bool:
        return (
            self._batch.busy
            and not self._paused
            and self._version is not None
            and self._lost is None
        )

    def _serve(self) -> None:
        """Have a task that calls the model while there is something to sample."""
        if self._serving and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._check)

    async def _run(self) -> None:
        while self._serving:
            before = self._batch.sampled
            ended = self._batch.step()
            for request_id in {sequence.request.request_id for sequence in ended}:
                self._answer(request_id)
            self._fresh = self._fresh and self._batch.sampled == before
            self._stepped.set()
            await asyncio.sleep(0)
        self._stepped.set()  # there may be nothing to sample any more

    def _check(self, task: asyncio.Task[None]) -> None:
        """Fail requests in flight if the model's calls have failed."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RunFailedError):
            self._fail(error)
        elif error is not None:
            failure = RunFailedError(f"the native engine failed: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, failure: RunFailedError) -> None:
        self._lost = failure
        self._stepped.set()
        for job in list(self._jobs.values()):
            if not job.future.done():
                job.future.set_exception(failure)

    async def _progress(self) -> None:
        """Wait until a token was sampled with the weights of the last update.

        Without the wait, updates that come faster than prompts can be prefilled again would stop
        all requests.
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
        if all(sequence.finish is not None for sequence in job.sequences):
            job.future.set_result(tuple(sequence.completion() for sequence in job.sequences))
            del self._jobs[request_id]

    def _forget(self, request_id: str, future: asyncio.Future[Completions]) -> None:
        """End a request whose future was cancelled."""
        if future.cancelled() and request_id in self._jobs:
            self._batch.abort(self._jobs.pop(request_id).sequences)


def _batch(
    decoder: Decoder, limits: Limits, peers: SplitRanks | None, *, turns: bool, **options: Any
) -> ContinuousBatch:
    """The batch of a rank."""
    if peers is None:
        return ContinuousBatch(decoder, limits, turns=turns, **options)
    if not turns:
        return ComparedBatch(decoder, limits, peers, turns=turns, **options)
    if peers.is_leader:
        return LeaderBatch(decoder, limits, peers, turns=turns, **options)
    return ContinuousBatch(decoder, limits, turns=turns, **options)


@torch.no_grad()
def read_weights(decoder: Decoder, folder: Path) -> None:
    """Fill a decoder, or a tensor rank's part of it, from a Hugging Face folder.

    Raises UsageError, and changes nothing, if the folder holds another architecture.
    """
    config, tensor = decoder.config, decoder.split.tensor
    split = TensorSplit(config, tensor.size)
    shapes = parameter_shapes(config, decoder.head)
    boxes = {name: split.box(name, shape, tensor.rank) for name, shape in shapes.items()}
    weights = Weights(folder, config, decoder.head)
    for name, parameter in decoder.named_parameters():
        if boxes[name].count:
            parameter.copy_(weights.read(name, boxes[name]))
