"""Engines that serve requests with a model in this process, perhaps split over several ranks."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from slurmrl.errors import CorruptFileError, UsageError
from slurmrl.models.decoder import Decoder
from slurmrl.models.hf import Weights
from slurmrl.models.inference import join_matrices
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.shapes import stored_shapes
from slurmrl.rollouts.generation.base import Decode
from slurmrl.rollouts.generation.batch_rollout import BatchRollout, RequestBatch
from slurmrl.rollouts.generation.native.batch import ContinuousBatch
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.rollouts.generation.native.split_batch import (
    FollowerBatch,
    LeaderBatch,
    SplitRanks,
    shared_batch,
)


class ReadOutcome(IntEnum):
    """The result of reading new weights on a rank."""

    READ = 0
    REJECTED = 1
    """The folder's architecture is not the model's, and the old weights are unchanged."""
    BROKEN = 2


class SplitRollout(BatchRollout):
    """Serves requests with a model that may be split over ``peers``.

    Each rank makes an engine with the same arguments. The leader serves requests, and the other
    ranks call ``follow``. Without ``turns``, all ranks serve the same requests.
    """

    def __init__(
        self,
        batch: RequestBatch,
        version: str | None,
        *,
        stale_cache: bool,
        peers: SplitRanks | None,
        turns: bool,
    ) -> None:
        """``batch`` is this rank's batch. `BatchRollout` describes the other arguments."""
        super().__init__(version, stale_cache=stale_cache)
        self._batch, self._peers = shared_batch(batch, peers, turns=turns), peers
        if version is not None and (peers is None or peers.is_leader or not turns):
            self._batch.renew(version)

    @abstractmethod
    def _read_own(self, folder: Path) -> None:
        """Read this rank's part of the weights.

        Raises UsageError, without any change, if the folder's architecture is not the model's.
        """

    def _read(self, name: str, folder: Path) -> None:
        """Read weights on all ranks.

        If reading fails halfway or on some ranks, the model has parts of two versions, and the
        engine is lost.
        """
        if isinstance(self._batch, LeaderBatch):
            self._batch.read_weights(name, folder)
        error: UsageError | OSError | CorruptFileError | None = None
        try:
            self._read_own(folder)
        except (UsageError, OSError, CorruptFileError) as raised:
            error = raised
        outcomes = self._outcomes(error)
        if outcomes == {ReadOutcome.READ}:
            self._check_own()
            return
        if error is not None and outcomes == {ReadOutcome.REJECTED}:
            raise error
        reason = error or "other ranks of the model failed"
        raise self._lose(name, folder, reason) from error

    def _check_own(self) -> None:
        """Check the model after all ranks have read their parts. Collective."""

    def _outcomes(self, error: Exception | None) -> set[int]:
        """Return the `ReadOutcome` of all ranks. ``error`` is the error of this rank."""
        own = ReadOutcome.READ
        if error is not None:
            own = ReadOutcome.REJECTED if isinstance(error, UsageError) else ReadOutcome.BROKEN
        return {own} if self._peers is None else set(self._peers.answers(own))

    async def close(self) -> None:
        self.dismiss()
        await super().close()

    def follow(self) -> None:
        """Repeat the calls of the leader's engine until the leader closes or calls `dismiss`.

        Raises RuntimeError if the leader has ended.
        """
        assert self._peers is not None, "a rank alone has no leader"
        assert not self._peers.is_leader, "the leader serves requests"

        def read(name: str, folder: Path) -> None:
            with suppress(UsageError):  # the leader raises this error too
                self._read(name, folder)

        FollowerBatch(self._batch, self._peers, read).run()

    def dismiss(self) -> None:
        """Let the other ranks of the model return from ``follow``. This ends all sampling."""
        if isinstance(self._batch, LeaderBatch) and self._lost is None:
            self._batch.end()


class NativeRollout(SplitRollout):
    """Serves requests with a built-in decoder, whose parameters are plain tensors."""

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
        masked: bool = True,
    ) -> None:
        """`BatchRollout`, `SplitRollout` and `ModelRunner` describe most arguments.

        ``context`` is the maximum number of tokens of a sequence (default:
        ``max_position_embeddings``). ``decode`` turns token ids into a string, for stop strings.
        ``own``: only this engine uses the decoder, so its parameters may be moved in memory.
        Without ``turns``, requests do not continue sequences of earlier requests, and a request
        that may exceed the model's positions is rejected.
        """
        assert peers is not None or decoder.split.whole, "ranks of a split decoder compute together"
        if own:
            join_matrices(decoder)
        if context is None and turns:
            context = decoder.config.max_positions
        options: dict[str, Any] = {"context": context, "decode": decode, "turns": turns}
        self._own = ContinuousBatch(decoder, limits or Limits(), masked=masked, **options)
        self._decoder = decoder
        super().__init__(self._own, version, stale_cache=stale_cache, peers=peers, turns=turns)

    @property
    def read(self) -> int:
        """Number of tokens that the model has processed; a repeated token counts again."""
        return self._own.read

    def _read_own(self, folder: Path) -> None:
        read_weights(self._decoder, folder)


@torch.no_grad()
def read_weights(decoder: Decoder, folder: Path) -> None:
    """Read a decoder's weights, or a tensor rank's part of them, from a Hugging Face folder.

    Raises UsageError, without any change, if the folder's architecture is not the decoder's.
    """
    config, tensor = decoder.config, decoder.split.tensor
    split = TensorSplit(config, tensor.size)
    shapes = stored_shapes(config, decoder.head)
    boxes = {name: split.box(name, shape, tensor.rank) for name, shape in shapes.items()}
    weights = Weights(folder, config, decoder.head)
    for name, values in (dict(decoder.named_parameters()) | decoder.constants()).items():
        if boxes[name].count:
            values.copy_(weights.read(name, boxes[name]))
