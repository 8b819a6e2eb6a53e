"""The placement of each parameter's parts on the ranks of a model.

Tensor ranks split a dim that depends on the parameter. Data- and context-parallel ranks split each
of these parts into ceil-chunks of dim 0, as FSDP2 does, or hold copies of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from slurmrl.errors import UsageError
from slurmrl.layout.box import Box, Index, chunk
from slurmrl.layout.layout import Layout, TensorSpec
from slurmrl.layout.shard import Shard
from slurmrl.models.config import ModelConfig
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.parallel.boxes import TensorSplit, refusals
from slurmrl.models.parallel.split import Axis, Split
from slurmrl.parallel.groups import JOINT, ParallelContext


@dataclass(frozen=True)
class Placing:
    """The shapes of a model's whole parameters and their placement. ``tensor`` is None for one
    tensor rank."""

    shapes: Mapping[str, Index]
    dtype: str
    context: ParallelContext
    tensor: TensorSplit | None
    constants: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Tensors of the model that are not parameters; whole on every rank."""
    sharded: bool = True
    """Whether data- and context-parallel ranks have chunks; otherwise each has the whole part."""

    @cached_property
    def _chunks(self) -> dict[int, tuple[int, int]]:
        """The number of chunks that each rank's group makes of a part, and which one it has."""
        if not self.sharded:
            return dict.fromkeys(range(self.context.size), (1, 0))
        return {
            rank: (len(members), index)
            for members in self.context.topology.blocks(JOINT["shard"])
            for index, rank in enumerate(members)
        }

    @cached_property
    def _tensor_ranks(self) -> list[int]:
        topology = self.context.topology
        return [topology.coordinates(rank).get("tp", 0) for rank in range(topology.world_size)]

    def whole_box(self, name: str, rank: int) -> Box:
        """The part of a parameter on a rank's tensor rank."""
        shape = self.shapes[name]
        if self.tensor is None:
            return Box.whole(shape)
        return self.tensor.box(name, shape, self._tensor_ranks[rank])

    def box(self, name: str, rank: int) -> Box:
        """The part of a parameter that a rank stores; may be empty."""
        whole = self.whole_box(name, rank)
        part = chunk(whole.size, *self._chunks[rank])
        return Box((whole.start[0] + part.start[0], *whole.start[1:]), part.size)

    def own_boxes(self) -> dict[str, Box]:
        """The boxes that this rank stores."""
        return {name: self.box(name, self.context.rank) for name in self.shapes}

    def copies(self, name: str) -> int:
        """The number of tensor ranks that store each element."""
        return 1 if self.tensor is None else self.tensor.copies(name)

    def layout(self, prefixes: Sequence[str] = ("",), *, copies: bool = True) -> Layout:
        """The layout of every parameter, once for each prefix of its name, and of the constants.
        Without ``copies`` only the first rank that stores an element lists it."""
        tensors = {
            prefix + name: TensorSpec(shape, self.dtype)
            for prefix in prefixes
            for name, shape in self.shapes.items()
        }
        constants = tuple(
            Shard.contiguous(name, Box.whole(spec.shape)) for name, spec in self.constants.items()
        )
        return Layout(
            {**tensors, **self.constants},
            tuple(
                tuple(
                    Shard.contiguous(prefix + name, box)
                    for prefix in prefixes
                    for name in self.shapes
                    if (copies or self._tensor_ranks[rank] % self.copies(name) == 0)
                    and (box := self.box(name, rank)).count
                )
                + (constants if copies or rank == 0 else ())
                for rank in range(self.context.size)
            ),
        )


def split_of(
    role: str, config: ModelConfig | HFConfig, context: ParallelContext, *, sequence: bool
) -> Split:
    """This rank's split. Raises UsageError if the model cannot be split that way."""
    for axis in ("pp", "ep"):
        if context.axis_size(axis) > 1:
            raise UsageError(f"{role}: the fsdp engine does not split along {axis}")
    tensor, across = _axis(context, "tp"), _axis(context, "cp")
    if isinstance(config, HFConfig):
        only_data = ["a model of transformers supports data parallelism only (d)"]
        problems = only_data if tensor.size * across.size > 1 else []
    else:
        problems = list(refusals(config, tensor.size, across.size))
    if problems:
        raise UsageError(f"{role}: " + "; ".join(problems))
    return Split(tensor, across, sequence)


def tensor_split(config: ModelConfig | HFConfig, split: Split) -> TensorSplit | None:
    if isinstance(config, HFConfig) or split.tensor.size == 1:
        return None
    return TensorSplit(config, split.tensor.size, split.sequence)


def _axis(context: ParallelContext, name: str) -> Axis:
    if context.axis_size(name) == 1:
        return Axis()
    return Axis(context.axis_rank(name), context.axis_size(name), context.group(name))
