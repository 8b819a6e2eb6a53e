"""Datasets: rows of a JSONL file as tokenised samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.rows import DatasetRows
from slurmrl.data.sample import SequenceSample
from slurmrl.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATASETS = Registry(
    "dataset type",
    {
        "prompt": "slurmrl.data.prompt:PromptDataset",
        "prompt_answer": "slurmrl.data.prompt_answer:PromptAnswerDataset",
    },
)


def make(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> TokenizedDataset:
    """Read and check the dataset that a configuration names."""
    dataset: TokenizedDataset = DATASETS.load(config.type)(config, tokenizer)
    return dataset


class TokenizedDataset(ABC):
    """Rows that a run can use, in the file's order; longer ones than allowed are left out.

    :raises ConfigError: see `DatasetRows`.
    """

    def __init__(self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._lines = DatasetRows(config)
        self._rows = self._lines.usable(tokenizer)

    @property
    def size(self) -> int:
        """Number of usable rows."""
        return len(self._rows)

    @property
    def left_out(self) -> int:
        """Number of rows that were too long."""
        return len(self._lines) - self.size

    @property
    def fingerprint(self) -> str:
        """Changes when the file, or what is made of it, changes."""
        settings = self._config.model_dump_json(exclude={"path", "shuffle"})
        text = f"{self._lines.records.fingerprint} {settings} {self.size}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def sample(self, indices: Sequence[int], epoch: int) -> SequenceSample:
        """The rows at ``indices`` (0..size-1); a row's sample id is ``<id>@<epoch>``."""
        rows = [self._rows[index] for index in indices]
        ids = [f"{self._lines.records.ids[row]}@{epoch}" for row in rows]
        return self._sample(rows, ids)

    @abstractmethod
    def _sample(self, rows: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """Rows of the file as a sample."""
