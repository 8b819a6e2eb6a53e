"""Prompts to complete."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from slurmrl.data.dataset import TokenizedDataset
from slurmrl.data.sample import SequenceSample


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
