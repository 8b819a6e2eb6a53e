"""Prompts with their answers, to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

import torch

from slurmrl.data.dataset import Dataset
from slurmrl.data.sample import SequenceSample
from slurmrl.data.tokenizer import end_id, text_ids


class PromptAnswerDataset(Dataset):
    """Keys ``input_ids`` (prompt, answer, end-of-text token) and ``prompt_mask`` (bool, True on
    the prompt). Prompt and answer are tokenised apart, so that a prompt's tokens are those that
    generation will see."""

    needed: ClassVar[tuple[str, ...]] = ("prompt", "answer")

    def _sample(self, rows: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        pairs = list(zip(self._prompt_ids(rows), self._answer_ids(rows), strict=True))
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

    def _answer_ids(self, rows: Sequence[int]) -> list[list[int]]:
        end = end_id(self._tokenizer)
        texts = self._texts(self._config.answer_template, rows)
        return [[*ids, end] for ids in text_ids(self._tokenizer, texts, begin=False)]
