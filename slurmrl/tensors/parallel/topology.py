"""Coordinates and ranks of a grid of processes in row-major order: the last axis varies fastest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

JOINT: Final = {"shard": ("dp", "cp"), "data": ("pp", "cp", "tp")}
"""Axes of each group that spans several axes. The ranks of ``shard`` share each parameter's rows;
the ranks of ``data`` have the same samples."""


class ProcessTopology:
    """Ranks 0 … world_size-1 on a grid with, for example, the axes ``("pp", "dp", "tp")``.

    All methods raise ValueError for invalid sizes, axes, ranks or coordinates.
    """

    def __init__(self, axes: Sequence[str], sizes: Sequence[int]) -> None:
        if len(axes) != len(sizes) or len(set(axes)) != len(axes):
            raise ValueError(f"axes {tuple(axes)} and sizes {tuple(sizes)} differ in number")
        if any(size < 1 for size in sizes):
            raise ValueError(f"sizes {tuple(sizes)} of axes {tuple(axes)} must all be at least 1")
        self.axes = tuple(axes)
        self.sizes = tuple(sizes)
        self._strides = tuple(math.prod(sizes[index + 1 :]) for index in range(len(sizes)))

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        return self.sizes[self._index(axis)]

    def rank(self, **coordinates: int) -> int:
        """Return the rank at the coordinates. The coordinate of every axis must be given."""
        if set(coordinates) != set(self.axes):
            raise ValueError(f"expected coordinates {self.axes}, got {tuple(coordinates)}")
        rank = 0
        for axis, size, stride in zip(self.axes, self.sizes, self._strides, strict=True):
            if not 0 <= coordinates[axis] < size:
                raise ValueError(f"{axis}={coordinates[axis]} is outside 0 … {size - 1}")
            rank += coordinates[axis] * stride
        return rank

    def coordinates(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0 … {self.world_size - 1}")
        return {
            axis: rank // stride % size
            for axis, size, stride in zip(self.axes, self.sizes, self._strides, strict=True)
        }

    def coordinate(self, rank: int, axis: str) -> int:
        return self.coordinates(rank)[self.axes[self._index(axis)]]

    def peers(self, rank: int, axis: str) -> list[int]:
        """Return ``rank`` and the ranks that differ from it only along ``axis``, in order."""
        coordinates = self.coordinates(rank)
        return [self.rank(**{**coordinates, axis: position}) for position in range(self.size(axis))]

    def blocks(self, axes: Sequence[str]) -> list[list[int]]:
        """Return the ranks of every group that spans these axes, in rank order.

        Axes that the grid does not have are ignored. Each rank is in one group.
        """
        along = [axis for axis in axes if axis in self.axes]
        firsts = self.filter(**dict.fromkeys(along, 0))
        fixed = [axis for axis in self.axes if axis not in along]
        return [
            self.filter(**{axis: self.coordinate(first, axis) for axis in fixed})
            for first in firsts
        ]

    def filter(self, **coordinates: int) -> list[int]:
        """Return the ranks with these coordinates along some axes, in order."""
        for axis, position in coordinates.items():
            if not 0 <= position < self.size(axis):
                raise ValueError(f"{axis}={position} is outside 0 … {self.size(axis) - 1}")
        choices = [
            (coordinates[axis],) if axis in coordinates else range(size)
            for axis, size in zip(self.axes, self.sizes, strict=True)
        ]
        return [
            sum(position * stride for position, stride in zip(point, self._strides, strict=True))
            for point in itertools.product(*choices)
        ]

    def _index(self, axis: str) -> int:
        if axis not in self.axes:
            raise ValueError(f"unknown axis '{axis}'; known: {', '.join(self.axes)}")
        return self.axes.index(axis)

    def __repr__(self) -> str:
        return f"ProcessTopology(axes={self.axes}, sizes={self.sizes})"


class ModelRanks(Protocol):
    """The ranks of a model in its plan.

    ``ranks[i]`` is the world rank of the model's rank i, in row-major order of the axes in
    ``sizes``.
    """

    @property
    def role(self) -> str: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...


@runtime_checkable
class Folded(ModelRanks, Protocol):
    """The ranks of a model with megatron's layout."""

    @property
    def engine(self) -> str: ...
    @property
    def expert_sizes(self) -> Mapping[str, int]: ...
    @property
    def virtual_pipeline(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...


def expert_topology(model: ModelRanks) -> ProcessTopology | None:
    """Return the separate grid of the experts; None if the plan has none."""
    if not isinstance(model, Folded) or not model.expert_sizes:
        return None
    return ProcessTopology(tuple(model.expert_sizes), tuple(model.expert_sizes.values()))


def topology_of(model: ModelRanks) -> ProcessTopology:
    """Return the grid of a model: ``dp`` and its axes of several ranks, in the plan's order.

    Raises ValueError if the product of the sizes is not the number of ranks.
    """
    sizes = {"dp": 1, **model.sizes} if "dp" not in model.sizes else model.sizes
    axes = [axis for axis, size in sizes.items() if size > 1 or axis == "dp"]
    topology = ProcessTopology(axes, [sizes[axis] for axis in axes])
    if topology.world_size != len(model.ranks):
        raise ValueError(
            f"{model.role}: sizes {dict(model.sizes)} need {topology.world_size} ranks, "
            f"the plan gives {len(model.ranks)}"
        )
    return topology


def exchanges_heads(heads: int, kv_heads: int, tensor_ranks: int, context_ranks: int) -> bool:
    """Return whether context ranks exchange tokens for heads in attention.

    If the ranks cannot divide the heads of a tensor rank equally, they pass keys and values around
    a ring instead.
    """
    own, own_kv = heads // tensor_ranks, max(1, kv_heads // tensor_ranks)
    if own % context_ranks:
        return False
    return own_kv % context_ranks == 0 or context_ranks % own_kv == 0
