"""The order that a dataset's settings ask for, made from its prepared rows. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.order import Arrange, DataOrder, ItemOrder, make_order
from slurmrl.data.packing import longest_first
from slurmrl.data.prepared import PreparedRows


def order_of(
    config: DatasetConfig, seed: int, batch_size: int, size: int, directories: Sequence[Path]
) -> ItemOrder:
    """The order of a dataset's ``size`` items. The prepared rows of its sources are in
    ``directories``, which are read only if the order depends on them.

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
