"""Layouts: all tensors of a model and the pieces of them that each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from slurmrl.errors import LayoutError
from slurmrl.layout.box import Box, Index
from slurmrl.layout.piece import Piece

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
    """``pieces[rank]`` are the pieces that the rank holds; replicas are allowed."""

    tensors: Mapping[str, TensorSpec]
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.pieces)

    def by_name(self) -> dict[str, list[tuple[int, Piece]]]:
        """(rank, piece) pairs of each tensor, in rank order."""
        found: dict[str, list[tuple[int, Piece]]] = {name: [] for name in self.tensors}
        for rank, piece in self.all_pieces():
            found[piece.name].append((rank, piece))
        return found

    def all_pieces(self) -> Iterator[tuple[int, Piece]]:
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                yield rank, piece

    def check(self) -> None:
        """Every piece lies inside its tensor, and every element lies somewhere.

        Raises LayoutError naming the tensor and the box.
        """
        for rank, piece in self.all_pieces():
            spec = self.tensors.get(piece.name)
            if spec is None:
                raise LayoutError(f"rank {rank} holds a piece of unknown tensor '{piece.name}'")
            if not Box.whole(spec.shape).contains(piece.box):
                raise LayoutError(
                    f"rank {rank}: {piece.box} lies outside '{piece.name}' of shape {spec.shape}"
                )
        for name, holders in self.by_name().items():
            missing = uncovered(Box.whole(self.tensors[name].shape), [p.box for _, p in holders])
            if missing:
                raise LayoutError(f"no rank holds {missing[0]} of tensor '{name}'")


def uncovered(box: Box, parts: list[Box]) -> list[Box]:
    """What of ``box`` none of ``parts`` holds, as disjoint boxes."""
    rest = [box] if box.count else []
    for part in parts:
        remaining: list[Box] = []
        for open_box in rest:
            common = open_box.intersect(part)
            remaining += [open_box] if common is None else open_box.without(common)
        rest = remaining
    return rest
