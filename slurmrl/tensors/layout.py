"""Placement of tensor elements on ranks: boxes, shards, and layouts.

Hugging Face files, checkpoints of any world size and engines are all layouts. Loading, saving,
exporting and reallocating are therefore one operation: intersect the boxes, then copy. Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from slurmrl.errors import LayoutError

if TYPE_CHECKING:  # Only functions that make arrays import numpy; `submit` needs none of them.
    import numpy.typing as npt

Index = tuple[int, ...]
Array: TypeAlias = "npt.NDArray[Any]"
ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}
"""Mapping from torch's name of a dtype to the bytes of an element."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype (torch's name) of a whole tensor."""

    shape: Index
    dtype: str

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Box:
    """Elements ``start <= index < start + size`` of a tensor, compared dim by dim.

    The box of a scalar has no dims and one element.
    """

    start: Index
    size: Index

    @staticmethod
    def whole(shape: Index) -> Box:
        """Return the box of all elements of a tensor of that shape."""
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
        """Return the slices of this box in an array that contains the box ``outer``."""
        ahead = zip(self.start, outer.start, self.size, strict=True)
        return tuple(slice(a - b, a - b + length) for a, b, length in ahead)

    def intersect(self, other: Box) -> Box | None:
        """Return the common elements; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(min(a, b) - c for a, b, c in zip(self.stop, other.stop, start, strict=True))
        return Box(start, size) if all(length > 0 for length in size) else None

    def contains(self, other: Box) -> bool:
        inside = zip(self.start, other.start, other.stop, self.stop, strict=True)
        return all(a <= b and c <= d for a, b, c, d in inside)

    def without(self, hole: Box) -> list[Box]:
        """Return the elements outside ``hole``, a box inside this box, as disjoint boxes."""
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

    For each used part, return its index and the elements taken from it. Also return the elements
    that no part has. All boxes are disjoint.
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
    """Yield the box in row-major order, cut into boxes of at most ``most`` elements."""
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
    """Return part ``index`` of ``parts`` ceil-chunks of dim 0, as in FSDP2. A part may be empty."""
    rows = -(-shape[0] // parts)
    first = min(rows * index, shape[0])
    last = min(first + rows, shape[0])
    return Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))


def flat_range(shape: Index, first: int, last: int) -> Iterator[Box]:
    """Yield elements ``first <= i < last`` of a row-major tensor as boxes, in order.

    There are at most ``2 * dims - 1`` boxes. A distributed optimizer has such flat ranges.
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


def view(flat: Array, offset: int, strides: Index, size: Index) -> Array:
    """Return a strided box of a flat array without a copy.

    Raises LayoutError if the box exceeds the array.
    """
    span = sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))
    if offset < 0 or any(s < 0 for s in strides) or offset + span >= flat.size:
        raise LayoutError(f"a box of size {size} at {offset} exceeds a storage of {flat.size}")
    from numpy.lib.stride_tricks import as_strided

    return as_strided(flat[offset:], shape=size, strides=tuple(s * flat.itemsize for s in strides))


def row_major(size: Index) -> Index:
    """Return the strides, in elements, of a contiguous array of this size."""
    strides: list[int] = []
    step = 1
    for length in reversed(size):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Shard:
    """Box ``box`` of tensor ``name``, in ``storage`` from ``offset`` on with ``strides``.

    ``name`` is the name in the safetensors files. Offsets and strides count elements. Dims keep
    their order, because reading a file transposes its tensors.
    """

    name: str
    box: Box
    storage: str
    offset: int
    strides: Index

    @staticmethod
    def contiguous(name: str, box: Box, storage: str | None = None, offset: int = 0) -> Shard:
        """Return a shard that is row-major in its storage, whose default name is ``name``."""
        return Shard(name, box, storage or name, offset, row_major(box.size))

    def offset_of(self, box: Box) -> int:
        """Return the storage offset of the first element of a box inside this shard's box."""
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


@dataclass(frozen=True, slots=True)
class HeldBox:
    """Box ``box`` of a tensor. Each of ``ranks`` holds the box in a storage.

    The box begins at element ``offset`` and has ``strides``. ``storage`` is relative to the
    tensor's name (see `storage_of`).
    """

    ranks: tuple[int, ...]
    box: Box
    storage: str
    offset: int
    strides: Index

    @staticmethod
    def contiguous(ranks: tuple[int, ...], box: Box) -> HeldBox:
        """Return a box that fills a storage with the tensor's name."""
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
            raise ValueError(f"a box from {start} of size {size} has the strides {strides}")
        if not ranks:
            raise ValueError(f"no rank has the box from {start} of size {size}")
        box = Box(tuple(start), tuple(size))
        return HeldBox(tuple(ranks), box, storage, offset, tuple(strides))


Source = tuple[HeldBox, Box]
"""A part of a tensor, and the elements that a reader takes from it."""


@dataclass(frozen=True, eq=False)
class Holders:
    """The parts of a tensor on all ranks. Objects are hashed by identity."""

    parts: tuple[HeldBox, ...]

    @cached_property
    def by_rank(self) -> Mapping[int, tuple[HeldBox, ...]]:
        found: dict[int, list[HeldBox]] = defaultdict(list)
        for part in self.parts:
            for rank in part.ranks:
                found[rank].append(part)
        return {rank: tuple(parts) for rank, parts in found.items()}


@lru_cache(maxsize=1024)  # Many layers have the same boxes.
def sources(holders: Holders, box: Box) -> tuple[Source, ...]:
    """Return the parts that make up a box, each with the elements to take from it.

    Raises LayoutError if an element is missing.
    """
    taken, rest = cover(box, (part.box for part in holders.parts))
    if rest:
        raise LayoutError(f"no rank holds {rest[0]}")
    return tuple((holders.parts[number], common) for number, common in taken)


def storage_of(name: str, relative: str) -> str:
    """Return the name of a tensor's storage from its ``relative`` form.

    ``""`` is the tensor's own name, and ``/s`` is ``s``. Any other form follows the prefix of the
    tensor's name, such as ``exp_avg/`` of a moment.
    """
    if relative.startswith("/"):
        return relative[1:]
    return _prefix(name) + relative if relative else name


def relative_storage(name: str, storage: str) -> str:
    """Return the relative form of a storage's name, inverting `storage_of`."""
    if storage == name:
        return ""
    prefix = _prefix(name)
    relative = storage.removeprefix(prefix)
    if not storage.startswith(prefix) or relative.startswith("/") or not relative:
        return f"/{storage}"
    return relative


def _prefix(name: str) -> str:
    return name[: name.rfind("/") + 1]


@dataclass(frozen=True, eq=False)
class Layout:
    """All tensors, and the holders of their parts among ranks 0 to ``ranks - 1``.

    Several ranks may hold an element.
    """

    tensors: Mapping[str, TensorSpec]
    holders: Mapping[str, Holders]
    ranks: int

    @staticmethod
    def of(tensors: Mapping[str, TensorSpec], shards: Sequence[Sequence[Shard]]) -> Layout:
        """Return the layout in which each rank r holds ``shards[r]``.

        Raises LayoutError for an unknown tensor.
        """
        rows: dict[int, list[int]] = {}
        for rank, row in enumerate(shards):
            rows.setdefault(id(row), []).append(rank)  # Replicas may share one list of shards.
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
        """Return the shards of a rank, in the order of the tensors."""
        return tuple(
            part.shard(name)
            for name, holders in self.holders.items()
            for part in holders.by_rank.get(rank, ())
        )

    def all_shards(self) -> Iterator[tuple[int, Shard]]:
        for rank in range(self.ranks):
            for shard in self.held_by(rank):
                yield rank, shard

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. Tensors with equal holders share an entry."""
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
        """Return a layout from `to_json`. Raises LookupError, TypeError, ValueError if invalid."""
        ranks = values["ranks"]
        made = [Holders(tuple(map(HeldBox.from_json, parts))) for parts in values["holders"]]
        if any(not 0 <= r < ranks for all_ in made for part in all_.parts for r in part.ranks):
            raise ValueError(f"a rank is beyond the {ranks} ranks")
        dims = [{len(part.box.size) for part in each.parts} for each in made]
        tensors, holders = {}, {}
        for name, (shape, dtype, number) in values["tensors"].items():
            tensors[name] = TensorSpec(tuple(shape), dtype)
            holders[name] = made[number]
            if not dims[number] <= {len(shape)}:
                raise ValueError(f"a box has another number of dims than '{name}' of shape {shape}")
        return Layout(tensors, holders, ranks)

    def check(self) -> None:
        """Raise LayoutError if a part exceeds its tensor or no rank holds an element."""
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
