"""Order of a dataset's items, and their split over ranks and micro-batches. Torch-free.

Order and split are pure functions, so any process can compute them. The order depends on the seed,
the settings and the prepared rows; the split depends on the lengths.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import heappop, heapreplace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.prepared import PreparedRows
from slurmrl.tensors.bins import best_fit

EPOCHS_AT_ONCE = 2
"""Number of epochs whose orders are cached, because unfinished items of the previous epoch may be
taken again."""
CIRCLE: Final = 2**61 - 1
"""Number of places on the circle of `Mixture`; a prime."""
GOLDEN: Final = round(CIRCLE * 0.6180339887498949)
"""Distance between places of consecutive items. The golden ratio spreads places most evenly."""

Arrange = Callable[[list[int], int], list[int]]
"""Function that arranges the shuffled indices of an epoch, given the number of its first item."""


def permutation(seed: int | str, epoch: int, size: int) -> list[int]:
    """Return the order of the indices 0..size-1 in one epoch."""
    order = list(range(size))
    random.Random(f"slurmrl order {seed} {epoch}").shuffle(order)
    return order


class DataOrder:
    """Endless order: epoch after epoch, each in a different order."""

    def __init__(
        self, size: int, seed: int | str, *, shuffle: bool = True, arrange: Arrange | None = None
    ) -> None:
        if size < 1:
            raise ValueError("a dataset without items has no order")
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._arrange = arrange
        self.indices = lru_cache(EPOCHS_AT_ONCE)(self._indices)
        """Function that returns the order of an epoch."""

    def items(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Return the numbered items as (epoch, index)."""
        places = (divmod(number, self.size) for number in numbers)
        return [(epoch, self.indices(epoch)[position]) for epoch, position in places]

    def _indices(self, epoch: int) -> list[int]:
        indices = (
            permutation(self._seed, epoch, self.size) if self._shuffle else list(range(self.size))
        )
        return self._arrange(indices, epoch * self.size) if self._arrange else indices


class Mixture:
    """Items of several sources in the ratio of weights, each source in its own order of epochs.

    The indices of a source follow the indices of the sources before it; epochs count per source.

    Item ``n`` belongs to the source in whose arc of a circle the place ``start + n * step`` lies.
    The golden step keeps every range of items close to the ratio. The number of a source's items
    among the first ``n`` can be computed without visiting them.
    """

    def __init__(self, orders: Sequence[DataOrder], weights: Sequence[float], seed: int) -> None:
        self.size = sum(order.size for order in orders)
        self._orders = orders
        self._first = list(accumulate((order.size for order in orders), initial=0))
        total = sum(weights)
        inner = [int(CIRCLE * (share / total)) for share in accumulate(weights)]
        self._bounds = [0, *inner[:-1], CIRCLE]
        self._start = random.Random(f"slurmrl mixture {seed}").randrange(CIRCLE)

    def items(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        return [self._item(number) for number in numbers]

    def _item(self, number: int) -> tuple[int, int]:
        place = (self._start + number * GOLDEN) % CIRCLE
        source = bisect_right(self._bounds, place) - 1
        below, above = self._bounds[source : source + 2]
        before = self._count_below(above, number) - self._count_below(below, number)
        ((epoch, index),) = self._orders[source].items([before])
        return epoch, self._first[source] + index

    def _count_below(self, bound: int, items: int) -> int:
        """Return how many of the first ``items`` items have places below ``bound``."""
        whole = _floor_sum(items, CIRCLE, GOLDEN, self._start)
        return whole - (_floor_sum(items, CIRCLE, GOLDEN, self._start + CIRCLE - bound) - items)


def _floor_sum(count: int, divisor: int, factor: int, start: int) -> int:
    """Return the sum of ``(factor * i + start) // divisor`` over i < count, in logarithmic time.

    Each round removes the whole multiples of the divisor and exchanges the axes of the remaining
    sum, as in Euclid's algorithm.
    """
    total = 0
    while count:
        total += count * (count - 1) // 2 * (factor // divisor) + count * (start // divisor)
        factor, start = factor % divisor, start % divisor
        count, start = divmod(factor * count + start, divisor)
        factor, divisor = divisor, factor
    return total


ItemOrder = DataOrder | Mixture
"""The endless sequence of a dataset's items, numbered from 0."""


def order_of(
    config: DatasetConfig, seed: int, batch_size: int, size: int, directories: Sequence[Path]
) -> ItemOrder:
    """Return the order of a dataset's ``size`` items.

    ``directories`` contain the prepared rows of the sources, which are read only if the order
    depends on them. Without weights, the rows of all sources are ordered like the rows of one file.

    Raises CorruptFileError, EnvironmentFailure.
    """
    arranged = config.curriculum_key is not None or config.balanced_batches
    if not (config.weights or arranged):
        return DataOrder(size, seed, shuffle=config.shuffle)
    numbers = [_numbers(config, directory) for directory in directories]

    def order(numbers: Sequence[NDArray[np.float64]], seed: int | str) -> DataOrder:
        values = np.concatenate(numbers).tolist()
        arrange = partial(_arrange, config, batch_size, values) if arranged else None
        return DataOrder(len(values), seed, shuffle=config.shuffle, arrange=arrange)

    if not config.weights:
        return order(numbers, seed)
    parts = zip(config.parts, numbers, strict=True)
    return Mixture([order([own], f"{seed} {name}") for name, own in parts], config.weights, seed)


def _arrange(
    config: DatasetConfig, batch_size: int, values: list[float], indices: list[int], start: int
) -> list[int]:
    """Arrange the indices of an epoch, which begins with item ``start``, by the rows' values."""
    if config.balanced_batches:
        return longest_first(indices, values, batch_size, -start % batch_size)
    return sorted(indices, key=values.__getitem__)


def _numbers(config: DatasetConfig, directory: Path) -> NDArray[np.float64]:
    """Return the number of each row that determines the order: difficulty or token count."""
    with closing(PreparedRows(directory)) as rows:
        entries = rows.entries()
        if config.balanced_batches:
            return np.fromiter((entry.tokens for entry in entries), np.float64, len(rows))
        return np.fromiter((entry.difficulty for entry in entries), np.float64, len(rows))


def balanced_partition(lengths: Sequence[int], k: int, sections: int = 1) -> list[list[int]]:
    """Partition the indices into ``k`` parts of about equal total length in each section.

    There are ``sections`` consecutive sections. Sequences go, the longest first, into the part with
    the smallest total of the section (LPT: the largest part of a section is at most 4/3 - 1/3k of
    the optimum, Graham 1969). A tie goes to the part with fewer sequences of the section, then to
    the part with the smaller total so far.

    Every part is sorted; none is empty in a section of at least ``k`` lengths.
    """
    parts: list[list[int]] = [[] for _ in range(k)]
    totals = [0] * k
    for start, stop in pairwise(accumulate(even_sizes(len(lengths), sections), initial=0)):
        heap = sorted((0, 0, totals[part], part) for part in range(k))
        for index in sorted(range(start, stop), key=lengths.__getitem__, reverse=True):
            load, count, total, part = heap[0]
            parts[part].append(index)
            totals[part] += lengths[index]
            heapreplace(heap, (load + lengths[index], count + 1, total, part))
    for items in parts:
        items.sort()
    return parts


def even_partition(lengths: Sequence[int], k: int, sections: int = 1) -> list[list[int]]:
    """Partition the indices into ``k`` parts of equal size and about equal total length.

    In each of ``sections`` consecutive sections, and therefore among all indices, the sizes of two
    parts differ by at most one. Within that limit, total lengths are about equal: sequences go, the
    longest first, into the part with the smallest total of the section that has room.

    Every part is sorted.
    """
    parts: list[list[int]] = [[] for _ in range(k)]
    loads = [0] * k
    for start, stop in pairwise(accumulate(even_sizes(len(lengths), sections), initial=0)):
        fewest = sorted(range(k), key=lambda part: (len(parts[part]), loads[part]))
        sizes = even_sizes(stop - start, k)  # larger parts first
        room = dict(zip(fewest, sizes, strict=True))
        heap = [(0, part) for part in range(k) if room[part]]
        for index in sorted(range(start, stop), key=lengths.__getitem__, reverse=True):
            held, part = heap[0]
            parts[part].append(index)
            loads[part] += lengths[index]
            room[part] -= 1
            if room[part]:
                heapreplace(heap, (held + lengths[index], part))
            else:
                heappop(heap)
    for items in parts:
        items.sort()
    return parts


def longest_first(
    order: Sequence[int], lengths: Sequence[float], batch: int, first: int
) -> list[int]:
    """Reorder indices into batches of about equal total length, the largest total first.

    Sequences go, the longest first, into the batch with the smallest total for its size that has
    room (LPT). Within a batch the order is kept.

    If ``first`` is not 0, the first batch has ``first`` items, which complete an unfinished batch.
    This batch stays the first, and an incomplete last batch stays the last.
    """
    first = min(first, len(order))
    whole, rest = divmod(len(order) - first, batch)
    sizes = [first, *[batch] * whole, rest]
    parts: list[list[int]] = [[] for _ in sizes]
    heap = [(0.0, part) for part, size in enumerate(sizes) if size]
    totals = [0.0] * len(sizes)
    for place in sorted(range(len(order)), key=lambda at: lengths[order[at]], reverse=True):
        _, part = heap[0]
        parts[part].append(place)
        totals[part] += lengths[order[place]]
        if len(parts[part]) < sizes[part]:
            heapreplace(heap, (totals[part] / sizes[part], part))
        else:
            heappop(heap)
    middle = sorted(range(1, whole + 1), key=totals.__getitem__, reverse=True)
    return [order[place] for part in (0, *middle, whole + 1) for place in sorted(parts[part])]


def row_microbatches(
    lengths: Sequence[Sequence[int]], max_tokens: int, *, packed: bool
) -> list[list[int]]:
    """Partition items into parts; sequences are padded to the longest sequence of their part.

    ``lengths`` lists the lengths of each item's sequences. With ``packed``, a row holds several
    sequences (`best_fit`), otherwise one. In a part, the number of rows times their width is at
    most ``max_tokens``; an item with more tokens gets a separate part.

    Parts are filled one after the other, the longest items first. If each item has one sequence and
    rows are not packed, the number of parts is minimal.
    """
    longest = [max(item, default=0) for item in lengths]
    order = sorted(range(len(lengths)), key=longest.__getitem__, reverse=True)
    parts: list[list[int]] = []
    while order:
        width = longest[order[0]]

        def too_many(count: int, first: Sequence[int] = order, width: int = width) -> bool:
            held = [length for index in first[:count] for length in lengths[index]]
            if not packed:
                return len(held) * width > max_tokens
            return sum(held) > max_tokens or len(best_fit(held, width)) * width > max_tokens

        taken = 1 + bisect_left(range(2, len(order) + 1), True, key=too_many)
        parts.append(sorted(order[:taken]))
        order = order[taken:]
    return sorted(parts)


def even_sizes(n: int, k: int) -> list[int]:
    """Return the sizes, which differ by at most one, of ``k`` contiguous parts of ``n`` items."""
    return [n // k + (part < n % k) for part in range(k)]


@dataclass(frozen=True)
class Spread:
    """The items of a batch on which each data-parallel rank of a layout works."""

    parts: tuple[tuple[int, ...], ...]
    """Indices of items in the batch, ascending, of each data-parallel rank."""
    members: tuple[tuple[int, ...], ...]
    """Global ranks that work on each part. The first rank of a part sends and receives for the
    others."""

    def part_of(self, rank: int) -> int | None:
        """Return the number of a global rank's part; None for a rank outside the layout."""
        for number, ranks in enumerate(self.members):
            if rank in ranks:
                return number
        return None

    def speaks(self, rank: int) -> bool:
        return any(rank == ranks[0] for ranks in self.members)


@dataclass(frozen=True)
class Delivery:
    """Items that the first rank of one part gets from the first rank of another part."""

    sender: int
    receiver: int
    items: tuple[int, ...]


def deliveries(source: Spread, target: Spread) -> Iterator[Delivery]:
    """Yield all deliveries, in an order that is the same on every rank.

    Sender and receiver may be the same rank. A part without items gets a delivery without items,
    from which it learns the types of the keys.
    """
    speakers = [members[0] for members in source.members]
    for needs, members in zip(target.parts, target.members, strict=True):
        receiver = members[0]
        if not needs:
            yield Delivery(receiver if receiver in speakers else speakers[0], receiver, ())
            continue
        wanted = set(needs)
        for part, sender in zip(source.parts, speakers, strict=True):
            items = tuple(item for item in part if item in wanted)
            if items:
                yield Delivery(sender, receiver, items)


def joined(spreads: Sequence[Spread], items: Sequence[tuple[int, int]]) -> Spread:
    """Return the spread of a batch whose items come from other batches and stay on their ranks.

    The batches have ``spreads`` of one layout. ``items`` are (number of the batch, place in it).
    """
    parts: list[list[int]] = [[] for _ in spreads[0].parts]
    owners = [
        {place: part for part, places in enumerate(spread.parts) for place in places}
        for spread in spreads
    ]
    for item, (batch, place) in enumerate(items):
        parts[owners[batch][place]].append(item)
    return Spread(tuple(map(tuple, parts)), spreads[0].members)
