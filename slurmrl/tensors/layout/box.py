"""N-dimensional boxes of a tensor's elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Elements ``start <= index < start + size`` of a tensor, one entry per dim.

    The box of a scalar has no dims and one element.
    """

    start: Index
    size: Index

    @staticmethod
    def whole(shape: Index) -> Box:
        """The box of all elements of a tensor of that shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> Index:
        return tuple(start + size for start, size in zip(self.start, self.size, strict=True))

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """The slices of this box in an array that holds ``outer``."""
        ahead = zip(self.start, outer.start, self.size, strict=True)
        return tuple(slice(a - b, a - b + length) for a, b, length in ahead)

    def intersect(self, other: Box) -> Box | None:
        """The common elements; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(min(a, b) - c for a, b, c in zip(self.stop, other.stop, start, strict=True))
        return Box(start, size) if all(length > 0 for length in size) else None

    def contains(self, other: Box) -> bool:
        inside = zip(self.start, other.start, other.stop, self.stop, strict=True)
        return all(a <= b and c <= d for a, b, c, d in inside)

    def without(self, hole: Box) -> list[Box]:
        """The elements outside ``hole`` (a box inside this one) as disjoint boxes."""
        rest: list[Box] = []
        start, size = list(self.start), list(self.size)
        for dim, (low, high) in enumerate(zip(hole.start, hole.stop, strict=True)):
            for first, last in ((start[dim], low), (high, start[dim] + size[dim])):
                if first < last:
                    rest.append(
                        Box(
                            (*start[:dim], first, *start[dim + 1 :]),
                            (*size[:dim], last - first, *size[dim + 1 :]),
                        )
                    )
            start[dim], size[dim] = low, high - low
        return rest


def cover(box: Box, parts: Iterable[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Take each element of ``box`` from the first part that has it.

    Returns the number of each part used with the elements taken from it, and the elements that no
    part has, all as disjoint boxes.
    """
    taken: list[tuple[int, Box]] = []
    rest = [box] if box.count else []
    for number, part in enumerate(parts):
        if not rest:
            break
        remaining: list[Box] = []
        for open_box in rest:
            common = open_box.intersect(part)
            if common is None:
                remaining.append(open_box)
            else:
                taken.append((number, common))
                remaining += open_box.without(common)
        rest = remaining
    return taken, rest


def blocks(box: Box, most: int) -> Iterator[Box]:
    """The box in row-major order, cut into boxes of at most ``most`` elements."""
    if box.count <= most:
        if box.count:
            yield box
        return
    dim = next(dim for dim, length in enumerate(box.size) if length > 1)
    rows = max(1, most * box.size[dim] // box.count)
    ahead, behind = box.start[:dim], box.start[dim + 1 :]
    for first in range(0, box.size[dim], rows):
        length = min(rows, box.size[dim] - first)
        start = (*ahead, box.start[dim] + first, *behind)
        yield from blocks(Box(start, (*box.size[:dim], length, *box.size[dim + 1 :])), most)


def chunk(shape: Index, parts: int, index: int) -> Box:
    """Part ``index`` of ceil-chunks of dim 0, as FSDP2 shards a parameter; may be empty."""
    rows = -(-shape[0] // parts)
    first = min(rows * index, shape[0])
    last = min(first + rows, shape[0])
    return Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))


def flat_range(shape: Index, first: int, last: int) -> Iterator[Box]:
    """Row-major elements ``first <= i < last`` of a tensor as boxes, in order.

    A flat range of a distributed optimizer becomes shards in this way; at most
    ``2 * dims - 1`` boxes.
    """
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    row, last_row = first // inner, last // inner
    if first % inner:
        end = min(last - row * inner, inner)
        yield from _in_row(row, flat_range(shape[1:], first % inner, end))
        row += 1
    if row < last_row:
        zeros = (0,) * (len(shape) - 1)
        yield Box((row, *zeros), (last_row - row, *shape[1:]))
    if last_row >= row and last % inner:
        yield from _in_row(last_row, flat_range(shape[1:], 0, last % inner))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((row, *box.start), (1, *box.size))
