"""Generation by a decoder whose shards are gathered on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch

from slurmrl.engines.base import GenerateEngine, Served, ServingOptions
from slurmrl.engines.fsdp.sharding import Shards
from slurmrl.engines.hf_rollout import HFRollout
from slurmrl.engines.host import Offload
from slurmrl.models.decoder import Decoder
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.rollouts.generation.native.native_rollout import NativeRollout
from slurmrl.rollouts.generation.native.split_batch import Peers

if TYPE_CHECKING:
    from slurmrl.models.hf_model import HFModel


class GatheredGeneration(GenerateEngine):
    """The generation of the engines that hold the model in `Shards`."""

    _shards: Shards
    _offload: Offload
    _max_tokens: int
    """Tokens of prompts that are read at a time."""

    @contextmanager
    def serving(self, version: str, options: ServingOptions) -> Iterator[Served]:
        """See `GenerateEngine`.

        The weights stay gathered meanwhile, so no rank may call another method. Without turns each
        rank gets an engine.
        """
        self._offload.check()
        with torch.no_grad(), self._shards.gathered() as decoder:
            if not isinstance(decoder, Decoder):
                model = cast("HFModel", decoder)
                yield HFRollout(
                    model,
                    version,
                    self._max_tokens,
                    support=options.support,
                    settled=options.settled,
                )
                return
            rows = options.rows
            peers = self._peers()
            rollout = NativeRollout(
                decoder,
                limits=Limits(
                    rows=rows,
                    step_tokens=max(rows, self._max_tokens),
                    cache_bytes=options.cache_bytes,
                ),
                version=version,
                decode=options.decode,
                own=False,
                peers=peers,
                turns=options.turns,
                support=options.support,
            )
            if peers is not None and options.turns and not peers.is_leader:
                rollout.follow()
                yield None
                return
            try:
                yield rollout
            finally:
                rollout.dismiss()

    def _peers(self) -> Peers | None:
        """The ranks that have the same samples as this one; None if there are no others."""
        context = self.context
        if "data" not in context.groups:
            return None
        return Peers(context.group("data"), context.device)
