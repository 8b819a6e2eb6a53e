"""Splitting lengths into parts of about equal total, and items over ranks.

Pure Python, deterministic, torch-free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace
from itertools import accumulate, pairwise


def balanced_partition(lengths: Sequence[int], k: int, sections: int = 1) -> list[list[int]]:
    """Partition the indices into ``k`` parts of about equal total length in each section.

    There are ``sections`` consecutive sections. The longest sequence comes first, and each goes
    into the part with the smallest total of the section (LPT: the largest part of a section is at
    most 4/3 - 1/3k of the optimum, Graham 1969). A tie goes to the part with fewer sequences of the
    section, then to the part with the smaller total so far.

    Every part is sorted; none is empty in a section of at least ``k`` lengths.
    """
    _check_parts(k, sections)
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
    parts differ by at most one. Within that limit, total lengths are about equal: the longest
    sequence comes first, and each goes into the part with the smallest total of the section that
    has room.

    Every part is sorted.
    """
    _check_parts(k, sections)
    parts: list[list[int]] = [[] for _ in range(k)]
    loads = [0] * k
    for start, stop in pairwise(accumulate(even_sizes(len(lengths), sections), initial=0)):
        fewest = sorted(range(k), key=lambda part: (len(parts[part]), loads[part]))
        sizes = even_sizes(stop - start, k)  # the larger ones come first
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

    The longest sequence comes first, and each goes into the batch with the smallest total for its
    size that has room (LPT). Within a batch the order is kept.

    The first batch has ``first`` items, which complete a batch that began before, unless ``first``
    is 0. It stays the first one, and an incomplete last batch stays the last.
    """
    _check_parts(batch, 1)
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


def microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Partition the indices into few parts of at most ``max_tokens`` each.

    A longer sequence gets a separate part. The algorithm is best fit decreasing (at most 11/9 of
    the optimal number of parts, plus one; Johnson 1974). Parts are sorted, and ordered by their
    first index.
    """
    _check_budget(max_tokens)
    parts: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        at = bisect_left(room, (lengths[index], -1))
        if at == len(room):
            left, part = max_tokens, len(parts)
            parts.append([])
        else:
            left, part = room.pop(at)
        parts[part].append(index)
        insort(room, (left - lengths[index], part))
    for items in parts:
        items.sort()
    return sorted(parts)


def padded_microbatches(lengths: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Partition items whose sequences are padded to the longest sequence of their part.

    ``lengths`` lists the lengths of each item's sequences. In a part, the number of sequences times
    the longest length is at most ``max_tokens``; see ``microbatches``.

    Parts are filled one after the other, the longest items first. If each item has one sequence,
    fewer parts are impossible.
    """
    _check_budget(max_tokens)
    longest = [max(item, default=0) for item in lengths]
    parts: list[list[int]] = []
    rows = width = 0
    for index in sorted(range(len(lengths)), key=longest.__getitem__, reverse=True):
        if not parts or (rows + len(lengths[index])) * width > max_tokens:
            parts.append([])
            rows, width = 0, longest[index]
        parts[-1].append(index)
        rows += len(lengths[index])
    for items in parts:
        items.sort()
    return sorted(parts)


def _check_budget(max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")


def _check_parts(k: int, sections: int) -> None:
    if k < 1 or sections < 1:
        raise ValueError(f"cannot make {k} parts of {sections} sections")


def even_sizes(n: int, k: int) -> list[int]:
    """``n`` items in ``k`` contiguous parts whose sizes differ by at most one."""
    return [n // k + (part < n % k) for part in range(k)]


@dataclass(frozen=True)
class Spread:
    """The items of a batch that each data-parallel rank of a layout works on."""

    parts: tuple[tuple[int, ...], ...]
    """Indices of items in the batch, ascending, of each data-parallel rank."""
    members: tuple[tuple[int, ...], ...]
    """Global ranks that work on each part. The first one speaks for them."""

    def part_of(self, rank: int) -> int | None:
        """The number of a global rank's part; None for a rank outside the layout."""
        for number, ranks in enumerate(self.members):
            if rank in ranks:
                return number
        return None

    def speaks(self, rank: int) -> bool:
        return any(rank == ranks[0] for ranks in self.members)


@dataclass(frozen=True)
class Delivery:
    """Items that the speaker of one part gets from the speaker of another."""

    sender: int
    receiver: int
    items: tuple[int, ...]


def deliveries(source: Spread, target: Spread) -> Iterator[Delivery]:
    """All deliveries, in an order that every rank computes alike.

    Some stay on one rank. A part without items gets a delivery without items, which tells it the
    types of the keys.
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
    """Return the spread of a batch whose items come from other batches and stay where they are.

    These batches have ``spreads`` of one layout. ``items`` are (number of the batch, place in it).
    """
    parts: list[list[int]] = [[] for _ in spreads[0].parts]
    owners = [
        {place: part for part, places in enumerate(spread.parts) for place in places}
        for spread in spreads
    ]
    for item, (batch, place) in enumerate(items):
        parts[owners[batch][place]].append(item)
    return Spread(tuple(map(tuple, parts)), spreads[0].members)
