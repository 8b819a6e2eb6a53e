"""Order of a dataset's items. Torch-free.

The order is a pure function of the seed, so any process can compute it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import lru_cache

EPOCHS_AT_ONCE = 2
"""Epochs whose orders are kept: unfinished items of the previous epoch may be taken again."""


def permutation(seed: int, epoch: int, size: int) -> list[int]:
    """The order of the indices 0..size-1 in one epoch."""
    order = list(range(size))
    random.Random(f"slurmrl order {seed} {epoch}").shuffle(order)
    return order


class DataOrder:
    """The endless sequence of a dataset's items, numbered from 0: epoch after epoch, each in its
    own order."""

    def __init__(self, size: int, seed: int, *, shuffle: bool = True) -> None:
        if size < 1:
            raise ValueError("a dataset without items has no order")
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._indices_of = lru_cache(EPOCHS_AT_ONCE)(self._make_indices)

    def indices(self, epoch: int) -> list[int]:
        """The order of an epoch."""
        return self._indices_of(epoch)

    def items(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """The numbered items as (epoch, index)."""
        places = (divmod(number, self.size) for number in numbers)
        return [(epoch, self.indices(epoch)[position]) for epoch, position in places]

    def _make_indices(self, epoch: int) -> list[int]:
        return (
            permutation(self._seed, epoch, self.size) if self._shuffle else list(range(self.size))
        )
