"""The rows of the dataset, as the trainers have prepared them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from slurmrl.backoff import READ_S, retry
from slurmrl.config.schema import Dataset
from slurmrl.data import dataset, preparation
from slurmrl.data.dataset import SampleRows
from slurmrl.data.prepared import PreparedRows
from slurmrl.data.sample import SequenceSample
from slurmrl.workers.rollout_messages import RequestedItem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TaskRows:
    """Reads rows for any number of threads. Opened at the first row: trainers that ask for one have
    prepared all of them."""

    def __init__(self, folder: Path, config: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
        """``folder``: of the run's prepared data."""
        self._folder, self._config, self._tokenizer = folder, config, tokenizer
        self._opening = threading.Lock()
        self._opened: SampleRows | None = None

    def sample(self, row: RequestedItem) -> SequenceSample:
        """The row as a sample of one item. Raises CorruptFileError, and EnvironmentFailure if it
        cannot be read for `READ_S`."""
        return retry("read the dataset", lambda: self._read(row), timeout_s=READ_S)

    def _read(self, row: RequestedItem) -> SequenceSample:
        with self._opening:
            if self._opened is None:
                self._opened = dataset.make(
                    self._config,
                    [
                        PreparedRows(preparation.find(self._folder, part, self._tokenizer))
                        for part in self._config.parts.values()
                    ],
                )
        return self._opened.sample([(row.epoch, row.index)])
