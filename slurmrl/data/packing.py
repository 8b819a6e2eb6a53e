"""Splitting lengths into parts of about equal total. Pure Python, deterministic, torch-free."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from heapq import heapreplace
from itertools import accumulate, pairwise


def balanced_partition(lengths: Sequence[int], k: int) -> list[list[int]]:
    """Indices in ``k`` parts of about equal total length: the longest first, each to the part
    that holds least (LPT: the largest part is at most 4/3 - 1/3k of the optimum, Graham 1969).

    Every part is sorted; none is empty when there are at least ``k`` lengths.
    """
    if k < 1:
        raise ValueError(f"cannot make {k} parts")
    parts: list[list[int]] = [[] for _ in range(k)]
    heap = [(0, 0, part) for part in range(k)]
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        load, count, part = heap[0]
        parts[part].append(index)
        heapreplace(heap, (load + lengths[index], count + 1, part))
    for items in parts:
        items.sort()
    return parts


def microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in few parts of at most ``max_tokens`` each; a longer sequence stands alone.

    Best fit decreasing (at most 11/9 of the optimal number of parts, plus one; Johnson 1974).
    Parts are sorted, and ordered by their first index.
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
    """Like ``microbatches``, of items with sequences of these ``lengths`` that are padded to the
    longest of their part: its sequences times the longest are at most ``max_tokens``.

    Parts are filled one after the other, the longest items first. Where each has one sequence
    there is no way with fewer parts.
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


def even_sizes(n: int, k: int) -> list[int]:
    """``n`` items in ``k`` contiguous parts whose sizes differ by at most one."""
    return [n // k + (part < n % k) for part in range(k)]


def partition_balanced(nums: Sequence[int], k: int, min_size: int = 1) -> list[int]:
    """Cut points 0 = c_0 < ... < c_k = n of ``k`` contiguous parts of at least ``min_size``
    items each, such that the largest minus the smallest sum is as small as it can be.

    Windows [low, low + spread) of allowed sums are swept upwards; whenever a partition fits into
    one, the spread shrinks to what was found. No window can succeed that does not hold the
    smallest possible largest sum and the largest possible smallest one.

    :raises ValueError: more parts than items allow, or a negative number.
    """
    n = len(nums)
    if k < 1 or min_size < 1 or n < k * min_size:
        raise ValueError(f"cannot split {n} items into {k} parts of at least {min_size}")
    if min(nums) < 0:
        raise ValueError("lengths must not be negative")
    prefix = [0, *accumulate(nums)]
    smallest_max, largest_min = _smallest_max(prefix, k), _largest_min(prefix, k)
    best = [0, *accumulate(even_sizes(n, k))]
    spread = _spread(prefix, best)
    low = max(0, smallest_max - spread + 1)
    while spread and low <= largest_min:
        found, excluded = _fit(prefix, k, min_size, low, low + spread - 1)
        if found:
            best, spread = found, _spread(prefix, found)
            low = max(low, smallest_max - spread + 1)
        else:
            low = max(low + 1, excluded - spread + 1)
    return best


def _smallest_max(prefix: list[int], k: int) -> int:
    """The smallest bound that ``k`` contiguous parts can keep."""
    low, high = -(-prefix[-1] // k), prefix[-1]
    while low < high:
        bound = (low + high) // 2
        end = 0
        for _ in range(k):
            end = bisect_right(prefix, prefix[end] + bound) - 1
        low, high = (low, bound) if end == len(prefix) - 1 else (bound + 1, high)
    return low


def _largest_min(prefix: list[int], k: int) -> int:
    """The largest sum that each of ``k`` contiguous parts can reach."""
    low, high = 0, prefix[-1] // k
    while low < high:
        bound = (low + high + 1) // 2
        end = 0
        for _ in range(k):
            end = bisect_left(prefix, prefix[min(end, len(prefix) - 1)] + bound)
        low, high = (bound, high) if end < len(prefix) else (low, bound - 1)
    return low


def _spread(prefix: list[int], cuts: list[int]) -> int:
    sums = [prefix[stop] - prefix[start] for start, stop in pairwise(cuts)]
    return max(sums) - min(sums)


def _fit(
    prefix: list[int], k: int, min_size: int, low: int, high: int
) -> tuple[list[int] | None, int]:
    """Cut points with every sum in low..high, or None; and the smallest bound above ``high``
    that would let a new state in (no window below it can change the answer)."""
    n, total = len(prefix) - 1, prefix[-1]
    excluded = total + 1
    layers: list[dict[int, int]] = [{0: -1}]
    for left in range(k - 1, -1, -1):
        layer: dict[int, int] = {}
        last = min(n - left * min_size, bisect_right(prefix, total - left * low) - 1)
        first_end = n if left == 0 else bisect_left(prefix, total - left * high)
        if left and first_end > 0:
            excluded = min(excluded, -(-(total - prefix[first_end - 1]) // left))
        for start in layers[-1]:
            base = prefix[start]
            begin = max(start + min_size, bisect_left(prefix, base + low), first_end)
            behind = min(last + 1, bisect_right(prefix, base + high))
            for stop in range(begin, behind):
                layer.setdefault(stop, start)
            if behind <= last:
                excluded = min(excluded, prefix[max(begin, behind)] - base)
        layers.append(layer)
    if n not in layers[k]:
        return None, excluded
    cuts = [n]
    for layer in reversed(layers[1:]):
        cuts.append(layer[cuts[-1]])
    return cuts[::-1], excluded
