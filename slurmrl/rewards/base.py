"""The contract of reward functions, and the simple ones: exact match, scores of a reward model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, ClassVar

from slurmrl.errors import UsageError
from slurmrl.rewards.scores import as_number, shown


class RewardFunction(ABC):
    """A reward. It is constructed with the configuration's ``reward.options`` as keywords."""

    cores: int = 1
    """CPU cores of the rank; set before the first call."""
    needs_answers: ClassVar[bool] = False
    """Whether every row must have a reference answer."""

    @abstractmethod
    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        """Return one score per completion.

        A row is a line of the dataset, with its answer (a string) under ``answer``.
        """

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the reason why each row cannot be scored, "" if it can.

        It is called at submission, so it must not import torch.
        """
        return [""] * len(rows)

    def stats(self) -> dict[str, tuple[float, float]]:
        """Additional metrics of the latest call: name to (sum, count)."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Release processes; the function is not called again."""


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
