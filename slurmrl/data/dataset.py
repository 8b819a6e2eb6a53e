"""Datasets: the prepared rows of a file as samples."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.encoder import expanded
from slurmrl.data.meta import SampleMeta
from slurmrl.data.prepared import PreparedRow, PreparedRows
from slurmrl.data.rows import reference
from slurmrl.data.sample import SequenceSample
from slurmrl.data.types import RowType, type_of_rows
from slurmrl.data.types.prompt import Prompts
from slurmrl.registry import resolve
from slurmrl.tensors.pictures import METADATA

Item = tuple[int, int]
"""(epoch, index of a usable row)"""


def make(config: DatasetConfig, prepared: Sequence[PreparedRows]) -> SampleRows:
    """Return the dataset of a configuration, made from the prepared rows of its sources."""
    parts: list[TokenizedDataset] = []
    for (name, part), rows in zip(config.parts.items(), prepared, strict=True):
        kind = type_of_rows(part)
        parts.append(resolve(kind.dataset)(kind, rows, name))
    return MixedDataset(config, parts) if config.sources else parts[0]


class SampleRows(Protocol):
    """A dataset as a rank uses it."""

    @property
    def size(self) -> int:
        """Number of usable rows."""

    @property
    def left_out(self) -> int:
        """Number of rows that were too long."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the files, the dataset's settings and the number of usable rows."""

    @property
    def directories(self) -> tuple[str, ...]:
        """Names of the directories of the prepared rows."""

    def meta(self, items: Sequence[Item]) -> SampleMeta:
        """Return ids and lengths of items, without reading their tokens."""

    def sample(self, items: Sequence[Item]) -> SequenceSample:
        """Return a sample of the items, which may be empty."""


class TokenizedDataset:
    """The usable rows of a file, which are within the length limits, in the file's order.

    A row's sample id is ``<id>@<epoch>``; with several sources, ``<name>/`` precedes it.

    An item has all sequences of its row, under the keys ``input_ids`` and ``prompt_mask`` (bool,
    False on the targets).

    Methods raise CorruptFileError for damaged rows and EnvironmentFailure if rows cannot be read.
    """

    token_key: str = "input_ids"
    """The key whose lengths `meta` returns."""

    def __init__(self, kind: RowType, prepared: PreparedRows, name: str = "") -> None:
        """``name`` is the name of the source; ids begin with it."""
        self._kind = kind
        self._prepared = prepared
        self._prefix = f"{name}/" if name else ""

    @property
    def directories(self) -> tuple[str, ...]:
        return (self._prepared.name,)

    @property
    def size(self) -> int:
        return len(self._prepared)

    @property
    def left_out(self) -> int:
        return self._prepared.manifest.left_out

    @property
    def fingerprint(self) -> str:
        rules = json.dumps(self._kind.config.rules(), separators=(",", ":"), ensure_ascii=False)
        text = f"{self._prepared.manifest.source} {rules} {self.size}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def meta(self, items: Sequence[Item]) -> SampleMeta:
        rows = [(epoch, *self._prepared.describe(index)) for epoch, index in items]
        ids = tuple(f"{self._prefix}{name}@{epoch}" for epoch, name, _ in rows)
        return SampleMeta(ids, {self.token_key: [lengths for _, _, lengths in rows]})

    def sample(self, items: Sequence[Item]) -> SequenceSample:
        rows = [self._prepared.read(index) for _, index in items]
        names = [f"{self._prefix}{row.name}" for row in rows]
        ids = [f"{name}@{epoch}" for name, (epoch, _) in zip(names, items, strict=True)]
        return self._sample(rows, tuple(ids))

    def _pictures(self, rows: Sequence[PreparedRow]) -> dict[str, list[Any]]:
        """Return the rows' pictures as metadata; {} in a dataset without images."""
        known = self._prepared.manifest.pictures
        return {METADATA: [row.pictures for row in rows]} if known else {}

    def _sample(self, rows: Sequence[PreparedRow], ids: tuple[str, ...]) -> SequenceSample:
        """Return rows of the file as a sample."""
        lengths = _lengths(rows)
        mask = [is_context for row in rows for runs in row.runs for is_context in expanded(runs)]
        return SequenceSample(
            ids,
            {"input_ids": lengths, "prompt_mask": lengths},
            self._pictures(rows),
            data={"input_ids": _joined(rows), "prompt_mask": torch.tensor(mask, dtype=torch.bool)},
        )


class PromptDataset(TokenizedDataset):
    """Dataset of prompts, with the token key ``prompt_ids``.

    The metadata are ``prompt`` (see `Prompts.text`), ``answer`` (the string under ``answer_key``,
    or ""), ``row`` (the whole row, with its answer under ``answer``) and ``line`` (the row's number
    in the file).
    """

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
            **self._pictures(rows),
        }
        data: dict[str, torch.Tensor | None] = {"prompt_ids": _joined(rows)}
        return SequenceSample(ids, {"prompt_ids": _lengths(rows)}, metadata, data)


class LabelledDataset(TokenizedDataset):
    """Dataset whose key ``desirable`` (bool) has the label of each item.

    The sequences of an item are its answer and a mismatched answer (see `types.preference`).
    """

    def _sample(self, rows: Sequence[PreparedRow], ids: tuple[str, ...]) -> SequenceSample:
        sample = super()._sample(rows, ids)
        labels = torch.tensor([row.row["desirable"] for row in rows], dtype=torch.bool)
        key = {"desirable": [[1] for _ in rows]}
        sample.update_(SequenceSample(ids, key, data={"desirable": labels}))
        return sample


class MixedDataset:
    """The rows of several sources, one source after the other."""

    def __init__(self, config: DatasetConfig, parts: Sequence[TokenizedDataset]) -> None:
        self._names = [*config.sources]
        self._weights = config.weights
        self._parts = parts
        self._first = [0, *accumulate(part.size for part in parts)]

    @property
    def directories(self) -> tuple[str, ...]:
        return tuple(name for part in self._parts for name in part.directories)

    @property
    def size(self) -> int:
        return self._first[-1]

    @property
    def left_out(self) -> int:
        return sum(part.left_out for part in self._parts)

    @property
    def fingerprint(self) -> str:
        parts = [part.fingerprint for part in self._parts]
        text = json.dumps([self._names, self._weights, parts])
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def meta(self, items: Sequence[Item]) -> SampleMeta:
        metas = [part.meta(own) for part, own in self._by_part(items)]
        key = self._parts[0].token_key
        ids = [name for meta in metas for name in meta.ids]
        lengths = [row for meta in metas for row in meta.lengths[key]]
        places = self._places(items)
        return SampleMeta(
            tuple(ids[place] for place in places), {key: [lengths[place] for place in places]}
        )

    def sample(self, items: Sequence[Item]) -> SequenceSample:
        parts = [part.sample(own) for part, own in self._by_part(items)]
        return SequenceSample.gather(parts).take(self._places(items))

    def _part_of(self, item: Item) -> int:
        return bisect_right(self._first, item[1]) - 1

    def _by_part(self, items: Sequence[Item]) -> list[tuple[TokenizedDataset, list[Item]]]:
        """Return each source with its items; indices count from 0 in each source."""
        own: list[list[Item]] = [[] for _ in self._parts]
        for epoch, index in items:
            part = self._part_of((epoch, index))
            own[part].append((epoch, index - self._first[part]))
        return list(zip(self._parts, own, strict=True))

    def _places(self, items: Sequence[Item]) -> list[int]:
        """Return the place of each item when items are concatenated source by source."""
        order = sorted(range(len(items)), key=lambda place: self._part_of(items[place]))
        places = [0] * len(items)
        for position, place in enumerate(order):
            places[place] = position
        return places


def _lengths(rows: Sequence[PreparedRow]) -> list[list[int]]:
    return [[sum(runs) for runs in row.runs] for row in rows]


def _joined(rows: Sequence[PreparedRow]) -> torch.Tensor:
    """Return the tokens of all rows: int64 [T]."""
    empty = np.empty(0, np.int64)
    return torch.from_numpy(np.concatenate([empty, *(row.tokens for row in rows)]))
