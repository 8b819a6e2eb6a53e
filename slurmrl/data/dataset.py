"""Datasets: the prepared rows of a file as samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.meta import SampleMeta
from slurmrl.data.prepared import PreparedRow, PreparedRows
from slurmrl.data.rows import reference
from slurmrl.data.sample import SequenceSample
from slurmrl.data.types import row_type
from slurmrl.data.types.base import RowType, expanded
from slurmrl.data.types.prompt import Prompts
from slurmrl.registry import resolve

Item = tuple[int, int]
"""(epoch, index of a usable row)"""


def make(config: DatasetConfig, prepared: PreparedRows) -> TokenizedDataset:
    """The dataset that a configuration names, from its prepared rows."""
    kind = row_type(config)
    dataset: TokenizedDataset = resolve(kind.dataset)(kind, prepared)
    return dataset


class TokenizedDataset:
    """The usable rows of a file, in its order: those within the length limits. A row's sample id is
    ``<id>@<epoch>``.

    An item has all sequences of its row, under the keys ``input_ids`` and ``prompt_mask`` (bool,
    False on the targets).

    Methods raise CorruptFileError for damaged rows and EnvironmentFailure if they cannot be read.
    """

    token_key: str = "input_ids"
    """The key whose lengths `meta` gives."""

    def __init__(self, kind: RowType, prepared: PreparedRows) -> None:
        self._kind = kind
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
        rules = json.dumps(self._kind.config.rules(), separators=(",", ":"), ensure_ascii=False)
        text = f"{self._prepared.manifest.source} {rules} {self.size}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def meta(self, items: Sequence[Item]) -> SampleMeta:
        """Ids and lengths of items, without reading their tokens."""
        rows = [(epoch, *self._prepared.describe(index)) for epoch, index in items]
        ids = tuple(f"{name}@{epoch}" for epoch, name, _ in rows)
        return SampleMeta(ids, {self.token_key: [lengths for _, _, lengths in rows]})

    def sample(self, items: Sequence[Item]) -> SequenceSample:
        """The items, of which there may be none."""
        rows = [self._prepared.read(index) for _, index in items]
        ids = tuple(f"{row.name}@{epoch}" for row, (epoch, _) in zip(rows, items, strict=True))
        return self._sample(rows, ids)

    def _sample(self, rows: Sequence[PreparedRow], ids: tuple[str, ...]) -> SequenceSample:
        """Rows of the file as a sample."""
        lengths = _lengths(rows)
        mask = [is_context for row in rows for runs in row.runs for is_context in expanded(runs)]
        return SequenceSample(
            ids,
            {"input_ids": lengths, "prompt_mask": lengths},
            data={"input_ids": _joined(rows), "prompt_mask": torch.tensor(mask, dtype=torch.bool)},
        )


class PromptDataset(TokenizedDataset):
    """Key ``prompt_ids``; metadata ``prompt`` (see `Prompts.text`), ``answer`` (the text under
    ``answer_key``, or ""), ``row`` (the whole row, with its answer under ``answer``) and ``line``
    (its number in the file)."""

    token_key = "prompt_ids"

    def _sample(self, rows: Sequence[PreparedRow], ids: tuple[str, ...]) -> SequenceSample:
        kind = self._kind
        assert isinstance(kind, Prompts)
        answers = [reference(kind.config, row.row) for row in rows]
        metadata: dict[str, list[Any]] = {
            "prompt": [kind.text(row.row) for row in rows],
            "answer": answers,
            "line": [row.line for row in rows],
            "row": [
                {**row.row, "answer": answer} for row, answer in zip(rows, answers, strict=True)
            ],
        }
        data: dict[str, torch.Tensor | None] = {"prompt_ids": _joined(rows)}
        return SequenceSample(ids, {"prompt_ids": _lengths(rows)}, metadata, data)


class LabelledDataset(TokenizedDataset):
    """Key ``desirable`` (bool) has the label of each item, whose sequences are its answer and a
    mismatched one (see `types.kto`)."""

    def _sample(self, rows: Sequence[PreparedRow], ids: tuple[str, ...]) -> SequenceSample:
        sample = super()._sample(rows, ids)
        labels = torch.tensor([row.row["desirable"] for row in rows], dtype=torch.bool)
        key = {"desirable": [[1] for _ in rows]}
        sample.update_(SequenceSample(ids, key, data={"desirable": labels}))
        return sample


def _lengths(rows: Sequence[PreparedRow]) -> list[list[int]]:
    return [[sum(runs) for runs in row.runs] for row in rows]


def _joined(rows: Sequence[PreparedRow]) -> torch.Tensor:
    """The tokens of all rows: int64 [T]."""
    empty = np.empty(0, np.int64)
    return torch.from_numpy(np.concatenate([empty, *(row.tokens for row in rows)]))
