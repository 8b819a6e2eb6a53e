"""The simple rules: equality with the answer, and the scores of a reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, ClassVar

from slurmrl.errors import UsageError
from slurmrl.rewards.base import RewardFunction
from slurmrl.rewards.scores import as_number, shown


class ExactMatch(RewardFunction):
    """Reward 1 for a completion that equals the answer up to white space around it, else 0."""

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


class ModelReward:
    """``(score - bias) * scale`` with the scores of the role ``reward_model``.

    :param scale: factor of each score.
    :param bias: subtracted from each score before scaling.
    """

    def __init__(self, *, scale: float = 1.0, bias: float = 0.0) -> None:
        self._scale = _number("scale", scale)
        self._bias = _number("bias", bias)

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        *,
        model_scores: Sequence[float],
    ) -> list[float]:
        return [(score - self._bias) * self._scale for score in model_scores]


def _number(name: str, value: Any) -> float:
    number = None if isinstance(value, bool) else as_number(value)
    if number is None or not isfinite(number):
        raise UsageError(f"{name} must be a finite number, but is {shown(value)}")
    return number
