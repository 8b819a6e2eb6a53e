"""Regions of a tensor: boxes within which all elements have the same holders and the same takers.

Torch-free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from slurmrl.errors import LayoutError
from slurmrl.tensors.layout.box import Box, Index
from slurmrl.tensors.layout.holders import Holders
from slurmrl.tensors.layout.layout import Layout, TensorSpec

Boxes = tuple[Box, ...]
Numbers = tuple[int, ...]
Cell = tuple[Numbers, Numbers]
"""Which of the source's boxes and which of the target's boxes contain the elements."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements that ``holders`` have in the source layout and ``takers`` in the target layout.

    Both are global ranks in ascending order. A rank may be among both.
    """

    name: str
    box: Box
    holders: Numbers
    takers: Numbers


@dataclass(frozen=True)
class PlacedLayout:
    """A layout and the global rank of each of its ranks."""

    layout: Layout
    ranks: Numbers

    def boxes(self, holders: Holders) -> dict[Box, list[int]]:
        """The distinct boxes of a tensor with the global ranks that have them."""
        found: dict[Box, set[int]] = {}
        for part in holders.parts:
            found.setdefault(part.box, set()).update(self.ranks[rank] for rank in part.ranks)
        return {box: sorted(ranks) for box, ranks in found.items()}


def regions(source: PlacedLayout, target: PlacedLayout) -> Iterator[Region]:
    """The regions of all tensors of the target, in its order.

    :raises LayoutError: a tensor that the source lacks, has in another shape, or of which no rank
        holds a part.
    """
    made: dict[tuple[Index, Holders, Holders], list[tuple[Box, Numbers, Numbers]]] = {}
    for name, spec in target.layout.tensors.items():
        _check_shape(name, source.layout.tensors.get(name), spec)
        held, taken = source.layout.holders[name], target.layout.holders[name]
        key = spec.shape, held, taken
        if key not in made:
            made[key] = list(_held_alike(spec.shape, source.boxes(held), target.boxes(taken)))
        for box, holders, takers in made[key]:
            if not holders:
                raise LayoutError(f"no rank of the source holds {box} of tensor '{name}'")
            yield Region(name, box, holders, takers)


def _held_alike(
    shape: Index, held: dict[Box, list[int]], taken: dict[Box, list[int]]
) -> Iterator[tuple[Box, Numbers, Numbers]]:
    for box, holders, takers in _cells(shape, tuple(held), tuple(taken)):
        yield box, _ranks(held, holders), _ranks(taken, takers)


def _check_shape(name: str, ours: TensorSpec | None, theirs: TensorSpec) -> None:
    if ours is None:
        raise LayoutError(f"the source has no tensor '{name}'")
    if ours.shape != theirs.shape:
        raise LayoutError(
            f"tensor '{name}' has shape {ours.shape} in the source and {theirs.shape} in the target"
        )


def _ranks(boxes: dict[Box, list[int]], numbers: Numbers) -> Numbers:
    groups = list(boxes.values())
    if len(numbers) == 1:
        return tuple(groups[numbers[0]])
    return tuple(sorted({rank for number in numbers for rank in groups[number]}))


@lru_cache(maxsize=1024)  # layers repeat the same boxes
def _cells(shape: Index, held: Boxes, taken: Boxes) -> tuple[tuple[Box, Numbers, Numbers], ...]:
    """Boxes that cover all taken elements once, with the numbers of the held and of the taken
    boxes that contain each. The edges of all boxes cut the tensor into a grid; neighbours with the
    same numbers are joined."""
    cuts = [
        sorted({edge for box in (*held, *taken) for edge in (box.start[dim], box.stop[dim])})
        for dim in range(len(shape))
    ]
    takers, holders = _cover(cuts, taken), _cover(cuts, held)
    cells: dict[tuple[Index, Index], Cell] = {
        (corner, tuple(index + 1 for index in corner)): (holders.get(corner, ()), numbers)
        for corner, numbers in sorted(takers.items())
    }
    for dim in reversed(range(len(shape))):
        cells = _joined(cells, dim)
    found = []
    for (first, last), (holding, taking) in sorted(cells.items()):
        start = tuple(cuts[dim][index] for dim, index in enumerate(first))
        stop = tuple(cuts[dim][index] for dim, index in enumerate(last))
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        found.append((Box(start, size), holding, taking))
    return tuple(found)


def _cover(cuts: Sequence[Sequence[int]], boxes: Boxes) -> dict[Index, Numbers]:
    """The numbers of the boxes that contain each cell of the grid; cells in no box are left out."""
    found: dict[Index, Numbers] = {}
    for number, box in enumerate(boxes):
        if not box.count:
            continue
        spans = (
            range(bisect_left(edges, first), bisect_left(edges, last))
            for edges, first, last in zip(cuts, box.start, box.stop, strict=True)
        )
        for corner in product(*spans):
            found[corner] = (*found.get(corner, ()), number)
    return found


def _joined(cells: dict[tuple[Index, Index], Cell], dim: int) -> dict[tuple[Index, Index], Cell]:
    """The cells, in which those that follow each other along ``dim`` and agree are one."""
    rows: dict[tuple[Index, Index, Cell], list[tuple[int, int]]] = {}
    for (first, last), cell in sorted(cells.items()):
        key = (_without(first, dim), _without(last, dim), cell)
        runs = rows.setdefault(key, [])
        if runs and runs[-1][1] == first[dim]:
            runs[-1] = (runs[-1][0], last[dim])
        else:
            runs.append((first[dim], last[dim]))
    return {
        (_with(first, dim, begin), _with(last, dim, end)): cell
        for (first, last, cell), runs in rows.items()
        for begin, end in runs
    }


def _without(index: Index, dim: int) -> Index:
    return index[:dim] + index[dim + 1 :]


def _with(index: Index, dim: int, value: int) -> Index:
    return (*index[:dim], value, *index[dim:])
