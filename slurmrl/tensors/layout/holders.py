"""Holders: the ranks that hold each box of a tensor.

Tensors that the ranks hold alike share one `Holders`, as the layers of a model do, and a weight and
its moments. So a layout of thousands of ranks and tensors stays small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from slurmrl.errors import LayoutError
from slurmrl.tensors.layout.box import Box, Index, cover
from slurmrl.tensors.layout.shard import Shard, row_major


@dataclass(frozen=True, slots=True)
class HeldBox:
    """Box ``box``, which each of ``ranks`` holds in a storage, from element ``offset`` with
    ``strides``. ``storage`` is relative to the tensor's name, see `storage_of`."""

    ranks: tuple[int, ...]
    box: Box
    storage: str
    offset: int
    strides: Index

    @staticmethod
    def contiguous(ranks: tuple[int, ...], box: Box) -> HeldBox:
        """A part that fills a storage with the tensor's own name."""
        return HeldBox(ranks, box, "", 0, row_major(box.size))

    def shard(self, name: str) -> Shard:
        return Shard(name, self.box, storage_of(name, self.storage), self.offset, self.strides)

    def to_json(self) -> list[Any]:
        box = self.box
        return [self.ranks, box.start, box.size, self.storage, self.offset, self.strides]

    @staticmethod
    def from_json(values: list[Any]) -> HeldBox:
        ranks, start, size, storage, offset, strides = values
        if not len(start) == len(size) == len(strides):
            raise ValueError(f"a box from {start} of size {size} with strides {strides}")
        if not ranks:
            raise ValueError(f"a box from {start} of size {size} on no rank")
        box = Box(tuple(start), tuple(size))
        return HeldBox(tuple(ranks), box, storage, offset, tuple(strides))


@dataclass(frozen=True, eq=False)
class Holders:
    """The parts of a tensor on all ranks; hashed by identity."""

    parts: tuple[HeldBox, ...]

    @cached_property
    def by_rank(self) -> Mapping[int, tuple[HeldBox, ...]]:
        found: dict[int, list[HeldBox]] = defaultdict(list)
        for part in self.parts:
            for rank in part.ranks:
                found[rank].append(part)
        return {rank: tuple(parts) for rank, parts in found.items()}


Source = tuple[HeldBox, Box]
"""A part of a tensor, and the elements that are taken from it."""


@lru_cache(maxsize=1024)  # layers repeat the same boxes
def sources(holders: Holders, box: Box) -> tuple[Source, ...]:
    """The parts that make up a box, each with the elements to take from it. Raises LayoutError if
    an element is missing."""
    taken, rest = cover(box, (part.box for part in holders.parts))
    if rest:
        raise LayoutError(f"no rank holds {rest[0]}")
    return tuple((holders.parts[number], common) for number, common in taken)


def storage_of(name: str, relative: str) -> str:
    """The storage of a tensor: ``""`` stands for its own name, ``/s`` for ``s``, and any other for
    itself after the prefix of the tensor's name (``exp_avg/`` of moments)."""
    if relative.startswith("/"):
        return relative[1:]
    return _prefix(name) + relative if relative else name


def relative_storage(name: str, storage: str) -> str:
    """The inverse of `storage_of`."""
    if storage == name:
        return ""
    prefix = _prefix(name)
    relative = storage.removeprefix(prefix)
    if not storage.startswith(prefix) or relative.startswith("/") or not relative:
        return f"/{storage}"
    return relative


def _prefix(name: str) -> str:
    return name[: name.rfind("/") + 1]
