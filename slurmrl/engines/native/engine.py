"""The native engine: whole copies of a model, split over tensor ranks only, for generation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from slurmrl.config.schema.model import Model
from slurmrl.engines.fsdp.generation import GatheredGeneration
from slurmrl.engines.fsdp.parameters import (
    constant_specs,
    new_model,
    split_of,
    tensor_split,
    whole_shapes,
)
from slurmrl.engines.fsdp.placing import Placing
from slurmrl.engines.fsdp.sharding import ShardPlan, Shards
from slurmrl.engines.host import Offload
from slurmrl.engines.initial_weights import model_config
from slurmrl.models.config import Head
from slurmrl.tensors.layout import Layout
from slurmrl.tensors.parallel.groups import ParallelContext


class NativeEngine(GatheredGeneration):
    """A frozen copy of a model on each data-parallel rank of ``context``, in ``model.dtype``.

    Its weights come from moves: those of a built-in decoder are undefined before the first one.
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
            tensor_split(self.config, split),
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
        """Free the weights without a copy: after ``onload`` they are zero, until the next move."""
        self._offload.take((), self.storages().values())

    def onload(self) -> None:
        self._offload.give()
