"""Prompts to complete."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import torch

from slurmrl.data.dataset import Dataset
from slurmrl.data.sample import SequenceSample


class PromptDataset(Dataset):
    """Key ``prompt_ids``; metadata ``prompt`` (text), ``answer`` (the row's text under
    ``answer_key``, or "") and ``row`` (the whole row, with its answer under ``answer``)."""

    needed: ClassVar[tuple[str, ...]] = ("prompt",)

    def _sample(self, rows: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        prompts = self._prompt_ids(rows)
        tokens = torch.tensor(list(chain.from_iterable(prompts)), dtype=torch.int64)
        answers = [str(self._row(row).get(self._config.answer_key, "")) for row in rows]
        metadata: dict[str, list[Any]] = {
            "prompt": self._prompt_texts(rows),
            "answer": answers,
            "row": [
                {**self._row(row), "answer": answer}
                for row, answer in zip(rows, answers, strict=True)
            ],
        }
        return SequenceSample.from_default(
            [len(prompt) for prompt in prompts], ids, {"prompt_ids": tokens}, metadata
        )
