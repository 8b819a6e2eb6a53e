"""What is known of a batch without its tensors: ids, lengths, metadata. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from slurmrl.data.packing import partition_balanced

Lengths = dict[str, list[list[int]]]


@dataclass(frozen=True)
class SplitSpec:
    """Contiguous, non-empty parts of a batch, as sizes in items."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"parts of a split must not be empty: sizes {self.sizes}")

    @staticmethod
    def of_partitions(partitions: Sequence[tuple[int, int]]) -> SplitSpec:
        """From (start, stop) pairs, which must follow each other from 0."""
        starts = [0, *(stop for _, stop in partitions)]
        if any(start != begin for (start, _), begin in zip(partitions, starts, strict=False)):
            raise ValueError(f"parts of a split must follow each other from 0: {partitions}")
        return SplitSpec(tuple(stop - start for start, stop in partitions))

    @property
    def partitions(self) -> tuple[tuple[int, int], ...]:
        cuts = [0, *accumulate(self.sizes)]
        return tuple(pairwise(cuts))


@dataclass
class SampleMeta:
    """Ids, per-key lengths and metadata of a batch of items.

    An item has one or more sequences per key: ``lengths[key][item]`` lists their lengths.
    ``metadata[key][item]`` is any JSON value.
    """

    ids: tuple[str, ...]
    lengths: Lengths
    metadata: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = tuple(self.ids)
        if len(set(self.ids)) != len(self.ids):
            twice = sorted({name for name in self.ids if self.ids.count(name) > 1}, key=str)
            raise ValueError(f"duplicate sample ids: {twice[:5]}")
        for table in (self.lengths, self.metadata):
            for key, rows in table.items():
                if len(rows) != self.bs:
                    raise ValueError(f"key '{key}' has {len(rows)} items, the batch {self.bs}")

    @property
    def bs(self) -> int:
        """Number of items."""
        return len(self.ids)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.lengths)

    def item_lengths(self, key: str | None = None) -> list[int]:
        """Tokens of each item under ``key`` (default: the main key)."""
        return [sum(inner) for inner in self.lengths[key or self.main_key()]]

    def main_key(self) -> str:
        """The key with the largest total length; the first one of equals."""
        if not self.lengths:
            raise ValueError("a sample without keys has no main key")
        return max(self.lengths, key=lambda key: sum(map(sum, self.lengths[key])))

    def split_spec(self, k: int, key: str | None = None, min_size: int = 1) -> SplitSpec:
        """``k`` contiguous parts of at least ``min_size`` items with balanced tokens of ``key``."""
        cuts = partition_balanced(self.item_lengths(key), k, min_size)
        return SplitSpec.of_partitions(list(pairwise(cuts)))

    def positions(self, ids: Sequence[str]) -> list[int]:
        """Where the items of ``ids`` stand; KeyError for an id that is not here."""
        where = {name: index for index, name in enumerate(self.ids)}
        return [where[name] for name in ids]

    def to_json(self) -> dict[str, Any]:
        return {"ids": list(self.ids), "lengths": self.lengths, "metadata": self.metadata}

    @staticmethod
    def from_json(value: dict[str, Any]) -> SampleMeta:
        return SampleMeta(tuple(value["ids"]), value["lengths"], value["metadata"])
