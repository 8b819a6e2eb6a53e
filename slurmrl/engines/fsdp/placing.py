"""The placement of each parameter's parts on the ranks of a model.

Tensor ranks split a dim that depends on the parameter. Data- and context-parallel ranks split each
of these parts into ceil-chunks of dim 0, as FSDP2 does, or hold copies of it. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from slurmrl.models.parallel.boxes import SharedParameters
from slurmrl.tensors.layout import Box, HeldBox, Holders, Index, Layout, TensorSpec, chunk
from slurmrl.tensors.parallel.topology import JOINT, ProcessTopology


@dataclass(frozen=True)
class Placing:
    """The shapes of a model's whole parameters and their placement.

    ``tensor`` is None for one tensor rank.
    """

    shapes: Mapping[str, Index]
    dtype: str
    topology: ProcessTopology
    rank: int
    """This rank, for its own boxes."""
    tensor: SharedParameters | None
    constants: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Tensors of the model that are not parameters; whole on every rank."""
    still: frozenset[str] = frozenset()
    """Parameters of a trained model that no step changes: the optimizer has no state for them."""
    sharded: bool = True
    """Whether data- and context-parallel ranks have chunks; otherwise each has the whole part."""

    @cached_property
    def _chunks(self) -> dict[int, tuple[int, int]]:
        """The number of chunks that each rank's group makes of a part, and which one it has."""
        if not self.sharded:
            return dict.fromkeys(range(self.topology.world_size), (1, 0))
        return {
            rank: (len(members), index)
            for members in self.topology.blocks(JOINT["shard"])
            for index, rank in enumerate(members)
        }

    @cached_property
    def _tensor_ranks(self) -> list[int]:
        topology = self.topology
        return [topology.coordinates(rank).get("tp", 0) for rank in range(topology.world_size)]

    def _part(self, name: str, tensor_rank: int) -> Box:
        shape = self.shapes[name]
        return (
            Box.whole(shape) if self.tensor is None else self.tensor.box(name, shape, tensor_rank)
        )

    def _chunk(self, whole: Box, rank: int) -> Box:
        """The part of a tensor rank's box that a rank stores; may be empty."""
        part = chunk(whole.size, *self._chunks[rank])
        return Box((whole.start[0] + part.start[0], *whole.start[1:]), part.size)

    def own_boxes(self) -> dict[str, Box]:
        """The boxes that this rank stores."""
        rank = self.rank
        tensor_rank = self._tensor_ranks[rank]
        return {name: self._chunk(self._part(name, tensor_rank), rank) for name in self.shapes}

    def copies(self, name: str) -> int:
        """The number of tensor ranks that store each element."""
        return 1 if self.tensor is None else self.tensor.copies(name)

    def layout(self, prefixes: Sequence[str] = ("",), *, copies: bool = True) -> Layout:
        """The layout of every parameter, once for each prefix of its name, and of the constants.

        Parameters that no step changes have only the empty prefix.

        Without ``copies`` only the first rank that stores an element lists it.
        """
        own = self._holders(copies=copies)
        ranks = tuple(range(self.topology.world_size if copies else 1))
        constants = {
            name: Holders((HeldBox.contiguous(ranks, Box.whole(spec.shape)),))
            for name, spec in self.constants.items()
        }
        names = {
            prefix + name: name
            for prefix in prefixes
            for name in self.shapes
            if not prefix or name not in self.still
        }
        return Layout(
            {
                **{full: TensorSpec(self.shapes[name], self.dtype) for full, name in names.items()},
                **self.constants,
            },
            {**{full: own[name] for full, name in names.items()}, **constants},
            self.topology.world_size,
        )

    def _holders(self, *, copies: bool) -> dict[str, Holders]:
        """The holders of each parameter, shared by those that the tensor ranks split alike."""
        tensor_ranks = range(1 if self.tensor is None else self.tensor.ranks)
        made: dict[tuple[tuple[Box, ...], int], Holders] = {}
        found = {}
        for name in self.shapes:
            wholes = tuple(self._part(name, tensor_rank) for tensor_rank in tensor_ranks)
            every = 1 if copies else self.copies(name)
            if (wholes, every) not in made:
                made[wholes, every] = self._spread(wholes, every)
            found[name] = made[wholes, every]
        return found

    def _spread(self, wholes: Sequence[Box], every: int) -> Holders:
        """The chunks of each tensor rank's box; of ``every`` equal boxes, only the first's."""
        ranks: dict[Box, list[int]] = {}
        for rank, tensor_rank in enumerate(self._tensor_ranks):
            box = self._chunk(wholes[tensor_rank], rank)
            if tensor_rank % every == 0 and box.count:
                ranks.setdefault(box, []).append(rank)
        return Holders(tuple(HeldBox.contiguous(tuple(by), box) for box, by in ranks.items()))
