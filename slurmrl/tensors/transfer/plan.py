"""The plan of a move: senders, receivers, boxes, chains and the order of transfers. Torch-free.

If several ranks hold elements that a rank needs, the sender is a holder on its host, else the
holder that has sent the fewest bytes so far. If several ranks need elements, they form a chain,
host by host. Each link of the chain carries every byte once, and every rank except the last passes
the data on. Nothing is sent to a rank that already has it.

The transfers of one chain are cut into segments. Time is divided into slots. In each slot, a
segment moves one link further along its chain. The data of a rank in one slot fits into its staging
budget. All ranks compute the same plan from the same arguments, so they agree without messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from slurmrl.errors import LayoutError
from slurmrl.tensors.layout import ITEM_BYTES, Box, Holders, Index, Layout, TensorSpec

SEGMENTS_PER_BUDGET = 4
"""Number of segments of maximum size that fit into the staging budget. A rank can pass on this many
chains at once."""
LONGEST_CHAIN = 32
"""Maximum number of ranks on other hosts that one holder serves if there are other holders. The
last rank of a chain waits this many slots."""
LOOK_AHEAD = 16
"""Number of slots that a search for free staging bytes examines at a time."""
ALONE = 256 << 10
"""Minimum bytes of a box that gets a separate message, which can be sent and received in place.
Smaller boxes share a message."""
MESSAGE = 16 << 20
"""Maximum bytes of a message. malloc reuses memory of this size. Larger blocks would get new pages
each time, and their first use takes longer than the transfer (see `tensors/parallel/device.py`)."""
Ranks = tuple[int, ...]


Boxes = tuple[Box, ...]
Numbers = tuple[int, ...]
Cell = tuple[Numbers, Numbers]
"""Indices of the source's boxes and of the target's boxes that contain the elements."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements that ``holders`` have in the source layout and ``takers`` need in the target layout.

    ``holders`` and ``takers`` are global ranks in ascending order. A rank may be in both.
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
        """Return the distinct boxes of a tensor, each with the global ranks that have it."""
        found: dict[Box, set[int]] = {}
        for part in holders.parts:
            found.setdefault(part.box, set()).update(self.ranks[rank] for rank in part.ranks)
        return {box: sorted(ranks) for box, ranks in found.items()}


@dataclass(frozen=True, slots=True)
class Cargo:
    """A box of a tensor, whose elements are sent in row-major order as ``dtype``."""

    name: str
    box: Box
    dtype: str

    @property
    def bytes(self) -> int:
        return self.box.count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Segment:
    """Cargo that moves along ``chain`` in one buffer, over link n in slot ``slot + n``."""

    chain: Ranks
    cargo: tuple[Cargo, ...]
    slot: int

    @property
    def bytes(self) -> int:
        return sum(cargo.bytes for cargo in self.cargo)

    def messages(self) -> Iterator[tuple[Cargo, ...]]:
        """Yield the cargo of each message, which is the same at both ends of a link."""
        shared: list[Cargo] = []
        used = 0
        for item in self.cargo:
            if item.bytes >= ALONE:
                yield from ((part,) for part in parts(item, MESSAGE))
                continue
            if used + item.bytes > MESSAGE:
                yield tuple(shared)
                shared, used = [], 0
            shared.append(item)
            used += item.bytes
        if shared:
            yield tuple(shared)


@dataclass(frozen=True)
class MovePlan:
    """All transfers of a move, which are the same on every rank."""

    local: Mapping[int, tuple[Cargo, ...]]
    """Mapping from a rank to the cargo that it copies from source storages to target storages."""
    segments: tuple[Segment, ...]
    budget: int
    """Staging budget of a rank, in bytes."""

    @property
    def slots(self) -> int:
        return max((s.slot + len(s.chain) - 1 for s in self.segments), default=0)

    def links(self) -> dict[tuple[int, int], int]:
        """Return the bytes from each sender to each receiver."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for segment in self.segments:
            for link in pairwise(segment.chain):
                found[link] += segment.bytes
        return dict(found)

    def staging(self) -> dict[int, int]:
        """Return the maximum bytes that each rank stages in one slot."""
        used: dict[tuple[int, int], int] = defaultdict(int)
        for segment in self.segments:
            for number, link in enumerate(pairwise(segment.chain)):
                for rank in link:
                    used[rank, segment.slot + number] += segment.bytes
        most: dict[int, int] = defaultdict(int)
        for (rank, _), count in used.items():
            most[rank] = max(most[rank], count)
        return dict(most)


def plan_move(
    source: PlacedLayout, target: PlacedLayout, *, hosts: Mapping[int, int], budget: int
) -> MovePlan:
    """Return the plan that fills every box of the target layout.

    ``hosts`` gives the host of each global rank, and ``budget`` the staging bytes of a rank. Raises
    LayoutError as `regions` does, and if the budget is smaller than one element.
    """
    local: dict[int, list[Cargo]] = defaultdict(list)
    streams: dict[Ranks, list[Cargo]] = defaultdict(list)
    load: dict[int, int] = defaultdict(int)
    for region in regions(source, target):
        specs = (layout.layout.tensors[region.name] for layout in (source, target))
        cargo = Cargo(region.name, region.box, wire_dtype(region.name, *specs))
        holders = set(region.holders)
        for rank in region.takers:
            if rank in holders:
                local[rank].append(cargo)
        for chain in _chains(region, hosts, load):
            streams[chain].append(cargo)
            for rank in chain[:-1]:
                load[rank] += cargo.bytes
    limit = budget // SEGMENTS_PER_BUDGET
    cut = [
        (chain, tuple(_segments(cargo, limit)))
        for chain, cargo in sorted(streams.items(), key=lambda entry: entry[0])
    ]
    return MovePlan(
        {rank: tuple(cargo) for rank, cargo in sorted(local.items())},
        tuple(_scheduled(cut, budget)),
        budget,
    )


def wire_dtype(name: str, source: TensorSpec, target: TensorSpec) -> str:
    """Return the narrower dtype; elements are sent in it. Raises LayoutError for integers."""
    if source.dtype == target.dtype:
        return source.dtype
    if "int" in source.dtype or "int" in target.dtype:
        raise LayoutError(
            f"tensor '{name}' is {source.dtype} in the source and {target.dtype} in the target"
        )
    return min(source.dtype, target.dtype, key=ITEM_BYTES.__getitem__)


def _chains(region: Region, hosts: Mapping[int, int], load: Mapping[int, int]) -> Iterator[Ranks]:
    """Yield chains, each from one holder, to all ranks that need a region's elements."""
    lacking = [rank for rank in region.takers if rank not in region.holders]
    if not lacking:
        return
    holders: dict[int, list[int]] = defaultdict(list)
    for rank in region.holders:
        holders[hosts[rank]].append(rank)
    far: list[int] = []
    near: dict[int, list[int]] = defaultdict(list)
    for rank in lacking:
        if hosts[rank] in holders:
            near[hosts[rank]].append(rank)
        else:
            far.append(rank)
    for host, takers in near.items():
        yield (_least_loaded(holders[host], load), *takers)
    by_host = sorted(far, key=lambda rank: (hosts[rank], rank))
    chains = min(len(region.holders), -(-len(far) // LONGEST_CHAIN))
    free = set(region.holders)
    for number in range(chains):
        first, last = (len(far) * n // chains for n in (number, number + 1))
        sender = _least_loaded(free, load)
        free.remove(sender)
        yield (sender, *by_host[first:last])


def _least_loaded(ranks: Iterable[int], load: Mapping[int, int]) -> int:
    return min(ranks, key=lambda rank: (load.get(rank, 0), rank))


def _segments(cargo: Sequence[Cargo], limit: int) -> Iterator[tuple[Cargo, ...]]:
    """Yield the cargo of a chain in buffers of at most ``limit`` bytes.

    Wide elements come first, so that all elements of a buffer are aligned.
    """
    packed: list[Cargo] = []
    used = 0
    for whole in sorted(cargo, key=lambda item: -ITEM_BYTES[item.dtype]):
        for part in parts(whole, limit):
            if used + part.bytes > limit:
                yield tuple(packed)
                packed, used = [], 0
            packed.append(part)
            used += part.bytes
    yield tuple(packed)


def parts(cargo: Cargo, limit: int) -> Iterator[Cargo]:
    """Yield cargo in parts of at most ``limit`` bytes, cut along its first dims."""
    if cargo.bytes <= limit:
        yield cargo
        return
    most = limit // ITEM_BYTES[cargo.dtype]
    if most < 1:
        raise LayoutError(f"a staging budget of {limit * SEGMENTS_PER_BUDGET} bytes is too small")
    start, size = cargo.box.start, cargo.box.size
    dim = next(dim for dim, length in enumerate(size) if length > 1)
    inner = cargo.box.count // size[dim]
    each = max(1, most // inner)
    for first in range(0, size[dim], each):
        box = Box(
            (*start[:dim], start[dim] + first, *start[dim + 1 :]),
            (*size[:dim], min(each, size[dim] - first), *size[dim + 1 :]),
        )
        yield from parts(Cargo(cargo.name, box, cargo.dtype), limit)


def _scheduled(
    cut: Sequence[tuple[Ranks, tuple[tuple[Cargo, ...], ...]]], budget: int
) -> Iterator[Segment]:
    """Yield the segments in the order of their slots.

    Each segment gets the first slot in which it fits into the budgets of all its ranks.
    """
    numbers = {rank: n for n, rank in enumerate(sorted({r for chain, _ in cut for r in chain}))}
    places = [np.array([numbers[rank] for rank in chain]) for chain, _ in cut]
    room = _Room(len(numbers), budget)
    made: list[Segment] = []
    last = [0] * len(cut)
    for turn in range(max((len(segments) for _, segments in cut), default=0)):
        # Chains take turns, so that all of them start early.
        for number, (chain, segments) in enumerate(cut):
            if turn < len(segments):
                cargo = segments[turn]
                count = sum(item.bytes for item in cargo)
                last[number] = room.take(places[number], count, after=last[number])
                made.append(Segment(chain, cargo, last[number]))
    yield from sorted(made, key=lambda segment: segment.slot)


class _Room:
    """The remaining staging bytes of each rank in each slot."""

    def __init__(self, ranks: int, budget: int) -> None:
        self._budget = budget
        self._left = np.full((2 * LOOK_AHEAD, ranks), budget, dtype=np.int64)

    def take(self, chain: npt.NDArray[np.intp], count: int, *, after: int) -> int:
        """Reserve ``count`` bytes at both ends of each link of a chain, in successive slots.

        Return the first slot, which is ``after`` or later.
        """
        links = np.arange(len(chain) - 1)
        slot = after
        while True:
            self._extend(slot + LOOK_AHEAD + len(links))
            rows = slot + links + np.arange(LOOK_AHEAD)[:, None]
            left = np.minimum(self._left[rows, chain[:-1]], self._left[rows, chain[1:]])
            fits = np.flatnonzero((left >= count).all(axis=1))
            if len(fits):
                slot += int(fits[0])
                break
            slot += LOOK_AHEAD
        self._left[slot + links, chain[:-1]] -= count
        self._left[slot + links, chain[1:]] -= count
        return slot

    def _extend(self, slots: int) -> None:
        while len(self._left) < slots:
            self._left = np.concatenate([self._left, np.full_like(self._left, self._budget)])


def regions(source: PlacedLayout, target: PlacedLayout) -> Iterator[Region]:
    """Yield the regions of all tensors of the target, in its order.

    Raises LayoutError for a tensor that the source lacks or has in another shape, or if no rank
    holds a part of it.
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


@lru_cache(maxsize=1024)  # Many layers have the same boxes.
def _cells(shape: Index, held: Boxes, taken: Boxes) -> tuple[tuple[Box, Numbers, Numbers], ...]:
    """Return disjoint boxes that cover all taken elements.

    Each box comes with the indices of the held and of the taken boxes that contain it. The edges of
    all boxes cut the tensor into a grid; neighbors with equal indices are joined.
    """
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
    """Return the indices of the boxes that contain a cell, for each covered cell of the grid."""
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
    """Join neighboring cells along ``dim`` that have equal indices."""
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
