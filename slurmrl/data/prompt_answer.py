"""Prompts with their answers, to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from slurmrl.data.dataset import TokenizedDataset
from slurmrl.data.sample import SequenceSample


class PromptAnswerDataset(TokenizedDataset):
    """Keys ``input_ids`` (prompt, answer, end-of-text token) and ``prompt_mask`` (bool, True on
    the prompt). Prompt and answer are tokenised apart, so that a prompt's tokens are those that
    generation will see."""

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
