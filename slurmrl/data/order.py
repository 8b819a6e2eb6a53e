"""Order of a dataset's items and the cursor in it. Torch-free.

The order is a pure function of the seed. The master commits the cursor, from which any process can
compute the next items.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass


def permutation(seed: int, epoch: int, size: int) -> list[int]:
    """The order of the indices 0..size-1 in one epoch."""
    order = list(range(size))
    random.Random(f"slurmrl order {seed} {epoch}").shuffle(order)
    return order


@dataclass(frozen=True, order=True)
class Cursor:
    """Items before ``position`` of ``epoch``, and all earlier epochs, are consumed."""

    epoch: int = 0
    position: int = 0

    def to_json(self) -> list[int]:
        return [self.epoch, self.position]

    @staticmethod
    def from_json(value: list[int]) -> Cursor:
        return Cursor(*value)


class DataOrder:
    """The endless sequence of a dataset's items: epoch after epoch, each in its own order."""

    def __init__(self, size: int, seed: int, *, shuffle: bool = True) -> None:
        if size < 1:
            raise ValueError("a dataset without items has no order")
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._indices: list[int] = []

    def indices(self, epoch: int) -> list[int]:
        """The order of an epoch; the last one computed is cached."""
        if epoch != self._epoch:
            size = self.size
            self._indices = (
                permutation(self._seed, epoch, size) if self._shuffle else list(range(size))
            )
            self._epoch = epoch
        return self._indices

    def take(self, cursor: Cursor, n: int) -> tuple[list[tuple[int, int]], Cursor]:
        """The next ``n`` items as (epoch, index), across epochs if necessary, and the cursor after
        them."""
        end = self.advance(cursor, n)
        items = [
            (epoch, index)
            for epoch, start, stop in self.ranges(cursor, end)
            for index in self.indices(epoch)[start:stop]
        ]
        return items, end

    def advance(self, cursor: Cursor, n: int) -> Cursor:
        """The cursor after ``n`` more items."""
        epochs, position = divmod(cursor.position + n, self.size)
        return Cursor(cursor.epoch + epochs, position)

    def ranges(self, start: Cursor, stop: Cursor) -> list[list[int]]:
        """The ranges between two cursors: [epoch, first position, position after the last]."""
        ranges = []
        for epoch in range(start.epoch, stop.epoch + 1):
            first = start.position if epoch == start.epoch else 0
            end = stop.position if epoch == stop.epoch else self.size
            if first < end:
                ranges.append([epoch, first, end])
        return ranges


def merge_ranges(ranges: Iterable[list[int]]) -> list[list[int]]:
    """Sort the ranges and join adjacent ones. Raises ValueError if two overlap: an item would have
    been consumed twice."""
    merged: list[list[int]] = []
    for epoch, start, stop in sorted(ranges):
        if merged and merged[-1][0] == epoch and start <= merged[-1][2]:
            if start < merged[-1][2]:
                raise ValueError(f"epoch {epoch}: positions {start}.. were consumed twice")
            merged[-1][2] = stop
        else:
            merged.append([epoch, start, stop])
    return merged
