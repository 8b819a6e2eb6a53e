"""Layouts: all tensors of a model and the parts of them that each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from slurmrl.errors import LayoutError
from slurmrl.tensors.layout.box import Box, Index, cover
from slurmrl.tensors.layout.holders import HeldBox, Holders, relative_storage
from slurmrl.tensors.layout.shard import Shard

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


@dataclass(frozen=True, eq=False)
class Layout:
    """All tensors, and for each the holders of its parts among ranks 0 to ``ranks - 1``; replicas
    are allowed."""

    tensors: Mapping[str, TensorSpec]
    holders: Mapping[str, Holders]
    ranks: int

    @staticmethod
    def of(tensors: Mapping[str, TensorSpec], shards: Sequence[Sequence[Shard]]) -> Layout:
        """The layout in which each rank r holds ``shards[r]``. Raises LayoutError for an unknown
        tensor."""
        rows: dict[int, list[int]] = {}
        for rank, row in enumerate(shards):
            rows.setdefault(id(row), []).append(rank)  # replicas may share one row
        ranks: dict[str, dict[HeldBox, list[int]]] = {name: {} for name in tensors}
        for alike in rows.values():
            for shard in shards[alike[0]]:
                if shard.name not in ranks:
                    raise LayoutError(
                        f"rank {alike[0]} holds a shard of unknown tensor '{shard.name}'"
                    )
                storage = relative_storage(shard.name, shard.storage)
                part = HeldBox((), shard.box, storage, shard.offset, shard.strides)
                ranks[shard.name].setdefault(part, []).extend(alike)
        shared: dict[tuple[HeldBox, ...], Holders] = {}
        holders = {}
        for name, parts in ranks.items():
            held = tuple(replace(part, ranks=tuple(sorted({*by}))) for part, by in parts.items())
            holders[name] = shared.setdefault(held, Holders(held))
        return Layout(tensors, holders, len(shards))

    def held_by(self, rank: int) -> tuple[Shard, ...]:
        """The shards of a rank, in the order of the tensors."""
        return tuple(
            part.shard(name)
            for name, holders in self.holders.items()
            for part in holders.by_rank.get(rank, ())
        )

    def by_name(self) -> dict[str, list[tuple[int, Shard]]]:
        """(rank, shard) pairs of each tensor, in rank order."""
        holders: dict[str, list[tuple[int, Shard]]] = {name: [] for name in self.tensors}
        for rank, shard in self.all_shards():
            holders[shard.name].append((rank, shard))
        return holders

    def all_shards(self) -> Iterator[tuple[int, Shard]]:
        for rank in range(self.ranks):
            for shard in self.held_by(rank):
                yield rank, shard

    def to_json(self) -> dict[str, Any]:
        """Plain values, in which tensors that are held alike share an entry too."""
        numbers = {holders: n for n, holders in enumerate(dict.fromkeys(self.holders.values()))}
        return {
            "ranks": self.ranks,
            "tensors": {
                name: [spec.shape, spec.dtype, numbers[self.holders[name]]]
                for name, spec in self.tensors.items()
            },
            "holders": [[part.to_json() for part in holders.parts] for holders in numbers],
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Layout:
        """Raises LookupError, TypeError or ValueError for values that `to_json` does not make."""
        ranks = values["ranks"]
        made = [Holders(tuple(map(HeldBox.from_json, parts))) for parts in values["holders"]]
        if any(not 0 <= r < ranks for all_ in made for part in all_.parts for r in part.ranks):
            raise ValueError(f"a rank beyond the {ranks} ranks")
        dims = [{len(part.box.size) for part in each.parts} for each in made]
        tensors, holders = {}, {}
        for name, (shape, dtype, number) in values["tensors"].items():
            tensors[name] = TensorSpec(tuple(shape), dtype)
            holders[name] = made[number]
            if not dims[number] <= {len(shape)}:
                raise ValueError(f"a box of other dims than '{name}' of shape {shape}")
        return Layout(tensors, holders, ranks)

    def check(self) -> None:
        """Check that every part lies inside its tensor and that every element is held by a rank.

        Raises LayoutError naming the tensor and the box.
        """
        for name, holders in self.holders.items():
            whole = Box.whole(self.tensors[name].shape)
            for part in holders.parts:
                if not whole.contains(part.box):
                    raise LayoutError(
                        f"rank {part.ranks[0]}: {part.box} lies outside '{name}' of shape "
                        f"{whole.size}"
                    )
            _, missing = cover(whole, (part.box for part in holders.parts))
            if missing:
                raise LayoutError(f"no rank holds {missing[0]} of tensor '{name}'")
