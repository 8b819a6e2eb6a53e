"""Requests served by a built-in decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slurmrl.models.decoder import Decoder
from slurmrl.models.hf import Weights
from slurmrl.models.inference import join_matrices
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.shapes import parameter_shapes
from slurmrl.rollouts.generation.base import Decode
from slurmrl.rollouts.generation.native.batch import ContinuousBatch
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.rollouts.generation.native.split_batch import SplitRanks
from slurmrl.rollouts.generation.native.split_rollout import SplitRollout


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
        support: bool = True,
    ) -> None:
        """``version``, ``stale_cache``: see `BatchRollout`; ``support``: see `ModelRunner`.

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
        self._own = ContinuousBatch(decoder, limits or Limits(), support=support, **options)
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
    shapes = parameter_shapes(config, decoder.head)
    boxes = {name: split.box(name, shape, tensor.rank) for name, shape in shapes.items()}
    weights = Weights(folder, config, decoder.head)
    for name, parameter in decoder.named_parameters():
        if boxes[name].count:
            parameter.copy_(weights.read(name, boxes[name]))
