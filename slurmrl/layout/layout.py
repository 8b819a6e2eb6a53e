"""Layouts: all tensors of a model and the shards of them that each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from slurmrl.errors import LayoutError
from slurmrl.layout.box import Box, Index
from slurmrl.layout.shard import Shard

ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}
"""Bytes of one element by dtype name (torch's names)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype name of a whole tensor."""

    shape: Index
    dtype: str

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """``shards[rank]`` are the shards that the rank holds; replicas are allowed."""

    tensors: Mapping[str, TensorSpec]
    shards: tuple[tuple[Shard, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.shards)

    def by_name(self) -> dict[str, list[tuple[int, Shard]]]:
        """(rank, shard) pairs of each tensor, in rank order."""
        holders: dict[str, list[tuple[int, Shard]]] = {name: [] for name in self.tensors}
        for rank, shard in self.all_shards():
            holders[shard.name].append((rank, shard))
        return holders

    def all_shards(self) -> Iterator[tuple[int, Shard]]:
        for rank, shards in enumerate(self.shards):
            for shard in shards:
                yield rank, shard

    def to_json(self) -> dict[str, Any]:
        """Plain values; ranks with the same shards, which replicas have, share an entry."""
        numbers: dict[tuple[Shard, ...], int] = {}
        ranks = [numbers.setdefault(shards, len(numbers)) for shards in self.shards]
        return {
            "tensors": {name: [spec.shape, spec.dtype] for name, spec in self.tensors.items()},
            "shards": [[shard.to_json() for shard in shards] for shards in numbers],
            "ranks": ranks,
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Layout:
        held = [tuple(map(Shard.from_json, shards)) for shards in values["shards"]]
        return Layout(
            {
                name: TensorSpec(tuple(shape), dtype)
                for name, (shape, dtype) in values["tensors"].items()
            },
            tuple(held[number] for number in values["ranks"]),
        )

    def check(self) -> None:
        """Check that every shard lies inside its tensor and that every element is held by a rank.

        Raises LayoutError naming the tensor and the box.
        """
        for rank, shard in self.all_shards():
            spec = self.tensors.get(shard.name)
            if spec is None:
                raise LayoutError(f"rank {rank} holds a shard of unknown tensor '{shard.name}'")
            if not Box.whole(spec.shape).contains(shard.box):
                raise LayoutError(
                    f"rank {rank}: {shard.box} lies outside '{shard.name}' of shape {spec.shape}"
                )
        for name, holders in self.by_name().items():
            missing = uncovered(Box.whole(self.tensors[name].shape), [p.box for _, p in holders])
            if missing:
                raise LayoutError(f"no rank holds {missing[0]} of tensor '{name}'")


def uncovered(box: Box, parts: list[Box]) -> list[Box]:
    """The part of ``box`` that none of ``parts`` covers, as disjoint boxes."""
    rest = [box] if box.count else []
    for part in parts:
        remaining: list[Box] = []
        for open_box in rest:
            common = open_box.intersect(part)
            remaining += [open_box] if common is None else open_box.without(common)
        rest = remaining
    return rest
