"""Generation by a model whose shards are gathered on each rank, and the native engine.

The native engine only generates. Each group of tensor ranks has a copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from slurmrl.config.schema.roles import Model
from slurmrl.engines.base import GenerateEngine, Served, ServingOptions
from slurmrl.engines.fsdp.parameters import (
    constant_specs,
    new_model,
    split_of,
    tensor_split,
    whole_shapes,
)
from slurmrl.engines.fsdp.sharding import ShardPlan, Shards
from slurmrl.engines.hf_batch import HFRollout
from slurmrl.engines.host import Offload
from slurmrl.engines.planned import Placing
from slurmrl.engines.role_weights import model_config
from slurmrl.models.architecture import Head
from slurmrl.models.base import PackedModel
from slurmrl.models.decoder import Decoder
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.rollouts.generation.native.native_rollout import NativeRollout, SplitRollout
from slurmrl.rollouts.generation.native.split_batch import SplitRanks
from slurmrl.tensors.layout import Layout
from slurmrl.tensors.parallel.groups import ParallelContext

if TYPE_CHECKING:
    from slurmrl.models.hf_model import HFModel


class GatheredGeneration(GenerateEngine):
    """Generation by engines whose model is in `Shards`."""

    _shards: Shards
    _offload: Offload
    _max_tokens: int
    """Maximum number of prompt tokens that are processed at a time."""

    @contextmanager
    def serving(self, version: str, options: ServingOptions) -> Iterator[Served]:
        """Serve requests as `GenerateEngine.serving` does, with gathered weights.

        A rank must leave before it calls another method of the engine. Without turns, each rank
        gets an engine.
        """
        self._offload.check()
        with torch.no_grad(), self._shards.gathered() as decoder:
            group = self.context.groups.get("data")
            peers = None if group is None else SplitRanks(group, self.context.device)
            rollout = self._rollout(decoder, version, options, peers)
            if peers is not None and options.turns and not peers.is_leader:
                rollout.follow()
                yield None
                return
            try:
                yield rollout
            finally:
                rollout.dismiss()

    def _rollout(
        self,
        decoder: PackedModel,
        version: str,
        options: ServingOptions,
        peers: SplitRanks | None,
    ) -> SplitRollout:
        """Return this rank's engine of a model with gathered weights."""
        if not isinstance(decoder, Decoder):
            return HFRollout(
                cast("HFModel", decoder),
                version,
                self._max_tokens,
                rows=options.rows if options.turns else None,
                decode=options.decode,
                masked=options.masked,
                settled=options.settled,
                peers=peers,
                turns=options.turns,
            )
        rows = options.rows
        return NativeRollout(
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
            masked=options.masked,
        )


class NativeEngine(GatheredGeneration):
    """A frozen copy of a model on each data-parallel rank of ``context``, in ``model.dtype``.

    The weights come from moves: a built-in decoder has undefined weights before the first move.
    ``source``, ``seed`` and the other arguments are as for ``FSDPEngine``.
    """

    def __init__(
        self,
        role: str,
        model: Model,
        *,
        head: Head,
        trained: bool,
        context: ParallelContext,
        seed: int,
        total_steps: int,
        source: Path | None,
    ) -> None:
        assert not trained, "the plan trains no model on this engine"
        self.role = role
        self.head = head
        self.context = context
        self.config = model_config(role, model, source)
        self._max_tokens = model.max_tokens_per_microbatch
        split = split_of(role, self.config, context, sequence=False)
        decoder = new_model(self.config, head, split, source=source, seed=seed, dtype=model.dtype)
        decoder.requires_grad_(False)
        self._placing = Placing(
            whole_shapes(decoder),
            model.dtype,
            context.topology,
            context.rank,
            tensor_split(decoder, split),
            constant_specs(decoder, trained=False),
            sharded=False,
        )
        plan = ShardPlan(wrapped=False, small=True, mixed=False)
        self._shards = Shards(decoder, plan, context)
        self._offload = Offload(role)

    def layout(self) -> Layout:
        return self._placing.layout()

    def storages(self) -> Mapping[str, Tensor]:
        self._offload.check()
        return self._shards.local() | self._shards.decoder.constants()

    def offload(self) -> None:
        """Free the weights without a copy. After ``onload``, weights are zero until a move."""
        self._offload.take((), self.storages().values())

    def onload(self) -> None:
        self._offload.give()
