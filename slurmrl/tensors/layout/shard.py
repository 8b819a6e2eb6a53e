"""Shards: the box of a checkpoint tensor that a strided box of local storage holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurmrl.tensors.layout.box import Box, Index


def row_major(size: Index) -> Index:
    """Strides in elements of a contiguous array of that size."""
    strides: list[int] = []
    step = 1
    for length in reversed(size):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Shard:
    """Box ``box`` of tensor ``name`` lies in ``storage`` from element ``offset`` with ``strides``.

    ``name`` is the name in the safetensors files. Offsets and strides count elements; transposes
    are made at import, so dims keep their order.
    """

    name: str
    box: Box
    storage: str
    offset: int
    strides: Index

    @staticmethod
    def contiguous(name: str, box: Box, storage: str | None = None, offset: int = 0) -> Shard:
        """A shard that fills its own storage in row-major order."""
        return Shard(name, box, storage or name, offset, row_major(box.size))

    def offset_of(self, box: Box) -> int:
        """Storage offset of the first element of a box inside this shard's box."""
        ahead = zip(box.start, self.box.start, self.strides, strict=True)
        return self.offset + sum((a - b) * stride for a, b, stride in ahead)

    def to_json(self) -> list[Any]:
        return [
            self.name,
            list(self.box.start),
            list(self.box.size),
            self.storage,
            self.offset,
            list(self.strides),
        ]

    @staticmethod
    def from_json(values: list[Any]) -> Shard:
        name, start, size, storage, offset, strides = values
        return Shard(name, Box(tuple(start), tuple(size)), storage, offset, tuple(strides))
