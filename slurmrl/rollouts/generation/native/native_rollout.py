"""Requests served by a built-in decoder, or by the ranks of a model that is split."""

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
    """The weights are of another architecture; the old weights are unchanged."""
    BROKEN = 2


class SplitRollout(BatchRollout):
    """Serves requests with a batch, which ``peers`` compute together.

    Each rank makes an engine with the same arguments. The leader's engine serves, and the others
    call ``follow``. Without ``turns``, all ranks serve the same requests.
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
        """``batch`` is the rank's own; ``version``, ``stale_cache``: see `BatchRollout`."""
        super().__init__(version, stale_cache=stale_cache)
        self._batch, self._peers = shared_batch(batch, peers, turns=turns), peers
        if version is not None and (peers is None or peers.is_leader or not turns):
            self._batch.renew(version)

    @abstractmethod
    def _read_own(self, folder: Path) -> None:
        """Read this rank's part of weights.

        Raises UsageError, and changes nothing, if the folder has another architecture.
        """

    def _read(self, name: str, folder: Path) -> None:
        """Read weights.

        If reading breaks off, or succeeds only on some ranks, the decoder has parts of two
        versions, and the engine is lost.
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
        """Check the model once all its ranks have read their parts. They compute together."""

    def _outcomes(self, error: Exception | None) -> set[int]:
        """Return the results of all ranks that read weights; this rank has an error or none."""
        own = ReadOutcome.READ
        if error is not None:
            own = ReadOutcome.REJECTED if isinstance(error, UsageError) else ReadOutcome.BROKEN
        return {own} if self._peers is None else set(self._peers.answers(own))

    async def close(self) -> None:
        self.dismiss()
        await super().close()

    def follow(self) -> None:
        """Compute the requests of the leader's engine, until it is closed or dismisses this rank.

        Raises RuntimeError if the leader has ended.
        """
        assert self._peers is not None, "a rank alone has no leader"
        assert not self._peers.is_leader, "the leader serves requests"

        def read(name: str, folder: Path) -> None:
            with suppress(UsageError):  # the leader's caller gets this error; nothing has changed
                self._read(name, folder)

        FollowerBatch(self._batch, self._peers, read).run()

    def dismiss(self) -> None:
        """Let the other ranks of the model return from ``follow``. This ends all sampling."""
        if isinstance(self._batch, LeaderBatch) and self._lost is None:
            self._batch.end()


class NativeRollout(SplitRollout):
    """Serves requests with a decoder that owns its parameters as plain tensors."""

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
        """``version``, ``stale_cache``: see `BatchRollout`; ``masked``: see `ModelRunner`.

        ``context`` is the most tokens of a sequence (default: ``max_position_embeddings``);
        ``decode`` turns token ids into text, for stop strings. The parameters of a decoder that is
        the engine's ``own`` are moved in memory. ``peers`` are the ranks of a decoder that is
        split: each makes an engine with the same arguments, the leader's serves, and the others
        call ``follow``. Without ``turns``, no request continues an earlier one's sequence, a
        request beyond the model's positions is rejected, and all ``peers`` serve the same requests.
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
        """Total number of tokens that the model has processed, including repeated ones."""
        return self._own.read

    def _read_own(self, folder: Path) -> None:
        read_weights(self._decoder, folder)


@torch.no_grad()
def read_weights(decoder: Decoder, folder: Path) -> None:
    """Fill a decoder, or a tensor rank's part of it, from a Hugging Face folder.

    Raises UsageError, and changes nothing, if the folder has another architecture.
    """
    config, tensor = decoder.config, decoder.split.tensor
    split = TensorSplit(config, tensor.size)
    shapes = stored_shapes(config, decoder.head)
    boxes = {name: split.box(name, shape, tensor.rank) for name, shape in shapes.items()}
    weights = Weights(folder, config, decoder.head)
    for name, values in (dict(decoder.named_parameters()) | decoder.constants()).items():
        if boxes[name].count:
            values.copy_(weights.read(name, boxes[name]))
