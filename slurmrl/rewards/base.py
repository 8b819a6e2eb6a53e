"""The contract of reward functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


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
