"""Order of a dataset's items. Torch-free.

The order is a pure function of the seed, the settings and the prepared rows, so any process can
compute it.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.packing import longest_first
from slurmrl.data.prepared import PreparedRows

EPOCHS_AT_ONCE = 2
"""Epochs whose orders are kept: unfinished items of the previous epoch may be taken again."""
CIRCLE: Final = 2**61 - 1
"""Places on the circle of `Mixture`; a prime."""
GOLDEN: Final = round(CIRCLE * 0.6180339887498949)
"""The step from one place to the next, after which places are spread most evenly."""

Arrange = Callable[[list[int], int], list[int]]
"""Arranges the shuffled indices of an epoch, which begins at an item's number."""


def permutation(seed: int | str, epoch: int, size: int) -> list[int]:
    """The order of the indices 0..size-1 in one epoch."""
    order = list(range(size))
    random.Random(f"slurmrl order {seed} {epoch}").shuffle(order)
    return order


class ItemOrder(Protocol):
    """The endless sequence of a dataset's items, numbered from 0."""

    size: int
    """Number of items in an epoch."""

    def items(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """The numbered items as (epoch, index)."""


class DataOrder:
    """Epoch after epoch, each in its own order."""

    def __init__(
        self,
        size: int,
        seed: int | str,
        *,
        shuffle: bool = True,
        arrange: Arrange | None = None,
    ) -> None:
        if size < 1:
            raise ValueError("a dataset without items has no order")
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._arrange = arrange
        self._indices_of = lru_cache(EPOCHS_AT_ONCE)(self._make_indices)

    def indices(self, epoch: int) -> list[int]:
        """The order of an epoch."""
        return self._indices_of(epoch)

    def items(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        places = (divmod(number, self.size) for number in numbers)
        return [(epoch, self.indices(epoch)[position]) for epoch, position in places]

    def _make_indices(self, epoch: int) -> list[int]:
        indices = (
            permutation(self._seed, epoch, self.size) if self._shuffle else list(range(self.size))
        )
        return self._arrange(indices, epoch * self.size) if self._arrange else indices


class Mixture:
    """Items of several sources in the ratio of weights, each source in its own order of epochs.

    The indices of a source follow those of the sources before it; epochs are those of the item's
    source.

    Item ``n`` belongs to the source in whose arc of a circle the place ``start + n * step`` lies.
    The golden step keeps every stretch of items close to the ratio, and how many of the first ``n``
    items a source has is known without looking at them.
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
        """How many of the first items have places below ``bound``."""
        whole = _floor_sum(items, CIRCLE, GOLDEN, self._start)
        return whole - (_floor_sum(items, CIRCLE, GOLDEN, self._start + CIRCLE - bound) - items)


def _floor_sum(count: int, divisor: int, factor: int, start: int) -> int:
    """Return the sum of ``(factor * i + start) // divisor`` over i < count, in logarithmic time.

    Whole parts are taken out, and the remainder is counted along the other axis (as in Euclid's
    algorithm).
    """
    total = 0
    while count:
        total += count * (count - 1) // 2 * (factor // divisor) + count * (start // divisor)
        factor, start = factor % divisor, start % divisor
        count, start = divmod(factor * count + start, divisor)
        factor, divisor = divisor, factor
    return total


def make_order(
    sizes: Sequence[int],
    seed: int,
    names: Sequence[str],
    weights: Sequence[float],
    *,
    shuffle: bool = True,
    arrange: Callable[[Sequence[int]], Arrange | None] = lambda sources: None,
) -> ItemOrder:
    """Return the order of sources with these numbers of rows, by name.

    Without weights, the rows are ordered like the rows of one file. ``arrange`` makes the
    arrangement of the rows of some sources.
    """
    if not weights:
        rows = arrange(range(len(sizes)))
        return DataOrder(sum(sizes), seed, shuffle=shuffle, arrange=rows)
    orders = [
        DataOrder(size, f"{seed} {name}", shuffle=shuffle, arrange=arrange([source]))
        for source, (size, name) in enumerate(zip(sizes, names, strict=True))
    ]
    return Mixture(orders, weights, seed)


def order_of(
    config: DatasetConfig, seed: int, batch_size: int, size: int, directories: Sequence[Path]
) -> ItemOrder:
    """The order of a dataset's ``size`` items.

    The prepared rows of its sources are in ``directories``, which are read only if the order
    depends on them.

    Raises CorruptFileError, EnvironmentFailure.
    """
    arranged = config.curriculum_key is not None or config.balanced_batches
    if not (config.weights or arranged):
        return DataOrder(size, seed, shuffle=config.shuffle)
    numbers = [_numbers(config, directory) for directory in directories]

    def arrange(sources: Sequence[int]) -> Arrange | None:
        if not arranged:
            return None
        values = np.concatenate([numbers[source] for source in sources]).tolist()
        return _Arrangement(config, batch_size, values)

    return make_order(
        [len(each) for each in numbers],
        seed,
        [*config.parts],
        config.weights,
        shuffle=config.shuffle,
        arrange=arrange,
    )


class _Arrangement:
    """Arranges the rows of an epoch by their numbers."""

    def __init__(self, config: DatasetConfig, batch_size: int, values: list[float]) -> None:
        self._balanced = config.balanced_batches
        self._batch_size = batch_size
        self._values = values

    def __call__(self, indices: list[int], start: int) -> list[int]:
        if self._balanced:
            return longest_first(indices, self._values, self._batch_size, -start % self._batch_size)
        return sorted(indices, key=self._values.__getitem__)


def _numbers(config: DatasetConfig, directory: Path) -> NDArray[np.float64]:
    """The number of each row by which it is arranged: its difficulty, or its tokens."""
    with closing(PreparedRows(directory)) as rows:
        entries = rows.entries()
        if config.balanced_batches:
            return np.fromiter((entry.tokens for entry in entries), np.float64, len(rows))
        return np.fromiter((entry.difficulty for entry in entries), np.float64, len(rows))
