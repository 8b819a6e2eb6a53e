"""Bin packing of sequence lengths. Torch-free, so that the plan of a batch needs no tensors."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Partition the indices into few bins of at most ``size`` tokens each.

    A longer sequence gets a separate bin. The algorithm is best fit decreasing (at most 11/9 of the
    optimal number of bins, plus one; Johnson 1974). The indices of a bin ascend, and bins are in
    the order of their first index.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        at = bisect_left(room, (lengths[index], -1))
        if at == len(room):
            left, place = size, len(bins)
            bins.append([])
        else:
            left, place = room.pop(at)
        bins[place].append(index)
        insort(room, (left - lengths[index], place))
    for items in bins:
        items.sort()
    return sorted(bins)
