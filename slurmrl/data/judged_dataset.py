"""Datasets with judged answers: items of several sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slurmrl.data.dataset import TokenizedDataset, joined
from slurmrl.data.prepared import PreparedRow
from slurmrl.data.sample import SequenceSample


class PreferenceDataset(TokenizedDataset):
    """Keys ``input_ids`` and ``prompt_mask`` (bool, True on the prompt). The sequences of an item
    are those of its pairs, each with the whole prompt: chosen, rejected, chosen, rejected, …"""

    token_key = "input_ids"

    def _sample(self, rows: Sequence[PreparedRow], ids: Sequence[str]) -> SequenceSample:
        lengths: list[list[int]] = [row.row["lengths"] for row in rows]
        mask = [
            place < row.prompt
            for row, own in zip(rows, lengths, strict=True)
            for length in own
            for place in range(length)
        ]
        data = {
            "input_ids": joined(rows),
            "prompt_mask": torch.tensor(mask, dtype=torch.bool),
        }
        return SequenceSample(tuple(ids), dict.fromkeys(data, lengths), data=dict(data))


class LabelledDataset(PreferenceDataset):
    """An item's sequences are its answer and a mismatched one (see `judged_rows`), both with the
    whole prompt. Key ``desirable`` (bool, one for each item) is its label."""

    def _sample(self, rows: Sequence[PreparedRow], ids: Sequence[str]) -> SequenceSample:
        sample = super()._sample(rows, ids)
        labels = torch.tensor([row.row["desirable"] for row in rows], dtype=torch.bool)
        key = {"desirable": [[1] for _ in rows]}
        sample.update_(SequenceSample(sample.ids, key, data={"desirable": labels}))
        return sample
