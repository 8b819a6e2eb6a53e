"""Datasets: the prepared rows of a JSONL file as samples."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import torch

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.meta import SampleMeta
from slurmrl.data.prepared import PreparedRow, PreparedRows
from slurmrl.data.rows import RowTexts
from slurmrl.data.sample import SequenceSample
from slurmrl.registry import Registry

DATASETS = Registry(
    "dataset type",
    {
        "prompt": "slurmrl.data.dataset:PromptDataset",
        "prompt_answer": "slurmrl.data.dataset:PromptAnswerDataset",
        "preference": "slurmrl.data.judged_dataset:PreferenceDataset",
        "kto": "slurmrl.data.judged_dataset:LabelledDataset",
    },
)
Item = tuple[int, int]
"""(epoch, index of a usable row)"""


def make(config: DatasetConfig, prepared: PreparedRows) -> TokenizedDataset:
    """The dataset that a configuration names, from its prepared rows."""
    dataset: TokenizedDataset = DATASETS.load(config.type)(config, prepared)
    return dataset


class TokenizedDataset(ABC):
    """The usable rows of a file, in its order: those within the length limits. A row's sample id is
    ``<id>@<epoch>``.

    Methods raise CorruptFileError for damaged rows and EnvironmentFailure if they cannot be read.
    """

    token_key: str
    """The key whose lengths `meta` gives."""

    def __init__(self, config: DatasetConfig, prepared: PreparedRows) -> None:
        self._config = config
        self._texts = RowTexts(config)
        self._prepared = prepared

    @property
    def size(self) -> int:
        """Number of usable rows."""
        return len(self._prepared)

    @property
    def left_out(self) -> int:
        """Number of rows that were too long."""
        return self._prepared.manifest.left_out

    @property
    def fingerprint(self) -> str:
        """Changes if the file, the dataset's settings or the number of usable rows changes."""
        settings = json.dumps(self._config.rules(), separators=(",", ":"), ensure_ascii=False)
        text = f"{self._prepared.manifest.source} {settings} {self.size}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def meta(self, items: Sequence[Item]) -> SampleMeta:
        """Ids and lengths of items, without reading their tokens."""
        rows = [(epoch, *self._prepared.describe(index)) for epoch, index in items]
        ids = tuple(f"{name}@{epoch}" for epoch, name, _ in rows)
        return SampleMeta(ids, {self.token_key: [[tokens] for _, _, tokens in rows]})

    def sample(self, items: Sequence[Item]) -> SequenceSample:
        """The items, of which there may be none."""
        rows = [self._prepared.read(index) for _, index in items]
        ids = [f"{row.name}@{epoch}" for row, (epoch, _) in zip(rows, items, strict=True)]
        return self._sample(rows, ids)

    @abstractmethod
    def _sample(self, rows: Sequence[PreparedRow], ids: Sequence[str]) -> SequenceSample:
        """Rows of the file as a sample."""


class PromptDataset(TokenizedDataset):
    """Key ``prompt_ids``; metadata ``prompt`` (text), ``answer`` (the row's text under
    ``answer_key``, or ""), ``row`` (the whole row, with its answer under ``answer``) and ``line``
    (its number in the file)."""

    token_key = "prompt_ids"

    def _sample(self, rows: Sequence[PreparedRow], ids: Sequence[str]) -> SequenceSample:
        lines = [row.row for row in rows]
        answers = self._texts.answers(lines)
        metadata: dict[str, list[Any]] = {
            "prompt": self._texts.prompts(lines),
            "answer": answers,
            "line": [row.line for row in rows],
            "row": [
                {**line, "answer": answer} for line, answer in zip(lines, answers, strict=True)
            ],
        }
        lengths = [len(row.tokens) for row in rows]
        return SequenceSample.from_default(lengths, ids, {"prompt_ids": joined(rows)}, metadata)


class PromptAnswerDataset(TokenizedDataset):
    """Keys ``input_ids`` (prompt, answer, end-of-text token) and ``prompt_mask`` (bool, True on
    the prompt). Prompt and answer are tokenised separately, so that a prompt has the same tokens as
    in generation."""

    token_key = "input_ids"

    def _sample(self, rows: Sequence[PreparedRow], ids: Sequence[str]) -> SequenceSample:
        lengths = [len(row.tokens) for row in rows]
        mask = chain.from_iterable(
            [True] * row.prompt + [False] * (length - row.prompt)
            for row, length in zip(rows, lengths, strict=True)
        )
        data = {
            "input_ids": joined(rows),
            "prompt_mask": torch.tensor(list(mask), dtype=torch.bool),
        }
        return SequenceSample.from_default(lengths, ids, data)


def joined(rows: Sequence[PreparedRow]) -> torch.Tensor:
    """The tokens of all rows: int64 [T]."""
    empty = np.empty(0, np.int64)
    return torch.from_numpy(np.concatenate([empty, *(row.tokens for row in rows)]))
