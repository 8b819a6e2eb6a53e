"""1 for a completion that equals the answer, else 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slurmrl.rewards.base import RewardFunction


class ExactMatch(RewardFunction):
    """White space around either text does not count."""

    needs_answers: ClassVar[bool] = True

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        return [
            float(completion.strip() == str(row["answer"]).strip())
            for completion, row in zip(completions, rows, strict=True)
        ]
