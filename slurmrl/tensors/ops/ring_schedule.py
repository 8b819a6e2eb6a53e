"""Which keys each rank sends and needs in ring attention, and which calls it makes.

The packed tokens are cut into 2 R chunks; rank r has the r-th and the r-th last one (zigzag). All
ranks then have about as many pairs of queries and keys. Only one sequence crosses a boundary of two
chunks. The keys of a chunk that a later chunk sees are therefore its last ones, and all queries
that see them follow them.

R ranks, T packed tokens, S sequences.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from slurmrl.tensors.ops.attention import Packing


class KeyBlock(NamedTuple):
    """Queries of this rank, and keys in a tensor of keys, all before the queries."""

    queries: slice
    keys: slice
    offset: int
    """The distance of the first query from the first key."""


class Hop(NamedTuple):
    """A step of the ring: keys go to one rank while keys of another one come."""

    taker: int
    sent: tuple[slice, ...]
    """Rows of this rank's keys."""
    giver: int
    received: int
    """The number of rows."""
    parts: tuple[KeyBlock, ...]


@dataclass(frozen=True)
class RingSchedule:
    """The calls and transfers of one rank."""

    own: Packing
    """The parts of sequences within this rank's chunks."""
    parts: tuple[KeyBlock, ...]
    """Calls of the queries of this rank's second chunk with the keys of its first one."""
    hops: tuple[Hop, ...]


def chunks(tokens: int, part: int, ranks: int) -> list[range]:
    """Return the places in the packed tokens of each of 2 * ``ranks`` chunks.

    Each rank has up to ``part`` of the ``tokens``; the last ranks have fewer.
    """
    held = [min(max(tokens - rank * part, 0), part) for rank in range(ranks)]
    sizes = [-(-count // 2) for count in held] + [count // 2 for count in reversed(held)]
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def zigzag(tokens: int, part: int, ranks: int) -> Tensor:
    """Return the order [T] in which the first rank's tokens come first, then the second's."""
    every = chunks(tokens, part, ranks)
    pairs = zip(every[:ranks], reversed(every[ranks:]), strict=True)
    return torch.cat([torch.arange(x.start, x.stop) for pair in pairs for x in pair])


@lru_cache(maxsize=8)
def schedule(
    bounds: tuple[int, ...], part: int, ranks: int, rank: int, window: int | None
) -> RingSchedule:
    """Return the calls and transfers of a rank, for sequences at ``bounds``."""
    every = chunks(bounds[-1], part, ranks)

    def needed(by: int, of: int) -> list[range]:
        """Return the keys that rank ``by`` needs: the last of each chunk of rank ``of``."""
        return [_keys(bounds, every, by, chunk, window) for chunk in _chunks_of(of, ranks)]

    hops = []
    for distance in range(1, ranks):
        pairs = [(by, (by - distance) % ranks) for by in range(ranks)]
        if not any(len(keys) for by, of in pairs for keys in needed(by, of)):
            continue
        giver, taker = (rank - distance) % ranks, (rank + distance) % ranks
        wanted = needed(rank, giver)
        parts = _parts(bounds, every, rank, giver, wanted, window)
        rows = zip(_rows_of(every, rank), needed(taker, rank), strict=True)
        sent = tuple(slice(stop - len(keys), stop) for (_, stop), keys in rows)
        hops.append(Hop(taker, sent, giver, sum(map(len, wanted)), parts))
    first, second = (every[chunk] for chunk in _chunks_of(rank, ranks))
    own = [range(first.start, first.stop), range(second.start, second.start)]
    return RingSchedule(
        _own_packing(bounds, (first, second)),
        _parts(bounds, every, rank, rank, own, window),
        tuple(hops),
    )


def _chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def _rows_of(every: Sequence[range], rank: int) -> list[tuple[int, int]]:
    """The rows of a rank's first and second chunk in its tensors."""
    first, second = (len(every[chunk]) for chunk in _chunks_of(rank, len(every) // 2))
    return [(0, first), (first, first + second)]


def _seen(
    bounds: Sequence[int], queries: range, keys: range, window: int | None
) -> tuple[range, range]:
    """The places of the queries of a chunk that see keys of an earlier chunk, and of these keys."""
    nothing = range(0)
    if not queries or not keys:
        return nothing, nothing
    sequence = bisect_right(bounds, queries.start)
    start, stop = max(keys.start, bounds[sequence - 1]), min(queries.stop, bounds[sequence])
    if window is not None:
        start = max(start, queries.start - window + 1)
        stop = min(stop, keys.stop + window - 1)
    if start >= keys.stop:
        return nothing, nothing
    return range(queries.start, stop), range(start, keys.stop)


def _keys(
    bounds: Sequence[int], every: Sequence[range], by: int, chunk: int, window: int | None
) -> range:
    """The last keys of a chunk that a rank needs."""
    seen = [
        _seen(bounds, every[own], every[chunk], window)[1]
        for own in _chunks_of(by, len(every) // 2)
        if own > chunk
    ]
    return max(seen, key=len, default=range(0))


def _parts(
    bounds: Sequence[int],
    every: Sequence[range],
    rank: int,
    giver: int,
    held: Sequence[range],
    window: int | None,
) -> tuple[KeyBlock, ...]:
    """The calls of a rank for the keys of another one, of which it has ``held``."""
    ranks, found = len(every) // 2, []
    for own, (row, _) in zip(_chunks_of(rank, ranks), _rows_of(every, rank), strict=True):
        before = 0
        for chunk, keys in zip(_chunks_of(giver, ranks), held, strict=True):
            queries, seen = _seen(bounds, every[own], every[chunk], window)
            if own > chunk and queries:
                start = before + seen.start - keys.start
                rows = slice(row, row + len(queries))
                places = slice(start, start + len(seen))
                found.append(KeyBlock(rows, places, queries.start - seen.start))
            before += len(keys)
    return tuple(found)


def _own_packing(bounds: Sequence[int], own: Sequence[range]) -> Packing:
    """The boundaries, within a rank's chunks, of sequences and chunks."""
    lengths = []
    for chunk in own:
        inner = bounds[bisect_right(bounds, chunk.start) : bisect_left(bounds, chunk.stop)]
        places = [chunk.start, *inner, chunk.stop]
        lengths += [stop - start for start, stop in pairwise(places) if stop > start]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
    return Packing(ends, max(lengths, default=0))
