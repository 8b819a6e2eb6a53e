"""Datasets: rows of a JSONL file as tokenised samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.records import MOST_PROBLEMS, Records, read_records
from slurmrl.data.sample import SequenceSample
from slurmrl.data.template import fill
from slurmrl.data.tokenizer import text_ids
from slurmrl.errors import ConfigError, Problem
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


def make(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Read and check the dataset that a configuration names."""
    dataset: Dataset = DATASETS.load(config.type)(config, tokenizer)
    return dataset


class Dataset(ABC):
    """Rows that a run can use, in the file's order; longer ones than allowed are left out.

    :raises ConfigError: rows without the keys that the type needs, with empty prompts, or ids
        that are there twice; each problem names its line.
    """

    needed: ClassVar[tuple[str, ...]]
    """Names (``prompt``, ``answer``) whose keys every row must have."""

    def __init__(self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._names = {"prompt": config.prompt_key, "answer": config.answer_key}
        self._records = read_records(Path(config.path), config.id_key)
        self._check_rows(self._records)
        self._rows = self._usable()
        if not self._rows:
            message = "every row is longer than max_prompt_tokens or max_tokens allows"
            raise ConfigError((Problem(config.path, "dataset", message),))

    @property
    def size(self) -> int:
        """Number of usable rows."""
        return len(self._rows)

    @property
    def left_out(self) -> int:
        """Number of rows that were too long."""
        return len(self._records.rows) - self.size

    @property
    def fingerprint(self) -> str:
        """Changes when the file, or what is made of it, changes."""
        settings = self._config.model_dump_json(exclude={"path", "shuffle"})
        text = f"{self._records.fingerprint} {settings} {self.size}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def sample(self, indices: Sequence[int], epoch: int) -> SequenceSample:
        """The rows at ``indices`` (0..size-1); a row's sample id is ``<id>@<epoch>``."""
        rows = [self._rows[index] for index in indices]
        ids = [f"{self._records.ids[row]}@{epoch}" for row in rows]
        return self._sample(rows, ids)

    @abstractmethod
    def _sample(self, rows: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """Rows of the file as a sample."""

    def _answer_ids(self, rows: Sequence[int]) -> list[list[int]]:
        """Tokens of the answers that the samples hold; none here."""
        return [[] for _ in rows]

    def _row(self, row: int) -> Mapping[str, Any]:
        return self._records.rows[row]

    def _texts(self, template: str, rows: Sequence[int]) -> list[str]:
        return [fill(template, self._row(row), self._names) for row in rows]

    def _prompt_texts(self, rows: Sequence[int]) -> list[str]:
        return self._texts(self._config.prompt_template, rows)

    def _prompt_ids(self, rows: Sequence[int]) -> list[list[int]]:
        return text_ids(self._tokenizer, self._prompt_texts(rows), begin=True)

    def _usable(self) -> list[int]:
        """Rows that are short enough. Nothing is tokenised where nothing is limited."""
        rows = range(len(self._records.rows))
        most_prompt, most = self._config.max_prompt_tokens, self._config.max_tokens
        if most_prompt is None and most is None:
            return list(rows)
        pairs = zip(rows, self._prompt_ids(rows), self._answer_ids(rows), strict=True)
        return [
            row
            for row, prompt, answer in pairs
            if (most_prompt is None or len(prompt) <= most_prompt)
            and (most is None or len(prompt) + len(answer) <= most)
        ]

    def _check_rows(self, records: Records) -> None:
        keys = [self._names[name] for name in self.needed]
        problems = [
            Problem(f"{self._config.path}:{line}", key, message)
            for line, row in zip(records.lines, records.rows, strict=True)
            for key in keys
            if (message := _wrong(row, key))
        ]
        if problems:
            raise ConfigError(tuple(problems[:MOST_PROBLEMS]))


def _wrong(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        return f"missing; the line has {', '.join(row) or 'no keys'}"
    return "" if str(row[key]).strip() else "must not be empty"
