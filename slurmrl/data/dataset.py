"""Datasets: rows of a JSONL file as tokenised samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.rows import DatasetRows
from slurmrl.data.sample import SequenceSample
from slurmrl.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATASETS = Registry(
    "dataset type",
    {
        "prompt": "slurmrl.data.dataset:PromptDataset",
        "prompt_answer": "slurmrl.data.dataset:PromptAnswerDataset",
    },
)


def make(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> TokenizedDataset:
    """Read and check the dataset that a configuration names."""
    dataset: TokenizedDataset = DATASETS.load(config.type)(config, tokenizer)
    return dataset


class TokenizedDataset(ABC):
    """The usable rows of a file, in its order. Rows above the length limits are left out.

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
        """Changes if the file, the dataset's settings or the number of usable rows changes."""
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


class PromptDataset(TokenizedDataset):
    """Key ``prompt_ids``; metadata ``prompt`` (text), ``answer`` (the row's text under
    ``answer_key``, or ""), ``row`` (the whole row, with its answer under ``answer``) and ``line``
    (its number in the file)."""

    def _sample(self, rows: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        prompts = self._lines.prompt_ids(self._tokenizer, rows)
        tokens = torch.tensor(list(chain.from_iterable(prompts)), dtype=torch.int64)
        answers = self._lines.answers(rows)
        metadata: dict[str, list[Any]] = {
            "prompt": self._lines.prompts(rows),
            "answer": answers,
            "line": [self._lines.records.lines[row] for row in rows],
            "row": [
                {**self._lines.records.rows[row], "answer": answer}
                for row, answer in zip(rows, answers, strict=True)
            ],
        }
        return SequenceSample.from_default(
            [len(prompt) for prompt in prompts], ids, {"prompt_ids": tokens}, metadata
        )


class PromptAnswerDataset(TokenizedDataset):
    """Keys ``input_ids`` (prompt, answer, end-of-text token) and ``prompt_mask`` (bool, True on
    the prompt). Prompt and answer are tokenised separately, so that a prompt has the same tokens as
    in generation."""

    def _sample(self, rows: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        prompts = self._lines.prompt_ids(self._tokenizer, rows)
        answers = self._lines.answer_ids(self._tokenizer, rows)
        pairs = list(zip(prompts, answers, strict=True))
        tokens = list(chain.from_iterable(prompt + answer for prompt, answer in pairs))
        mask = list(
            chain.from_iterable(
                [True] * len(prompt) + [False] * len(answer) for prompt, answer in pairs
            )
        )
        data = {
            "input_ids": torch.tensor(tokens, dtype=torch.int64),
            "prompt_mask": torch.tensor(mask, dtype=torch.bool),
        }
        return SequenceSample.from_default([len(p) + len(a) for p, a in pairs], ids, data)
