"""1 for a completion whose final answer is mathematically equal to the reference, else 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurmrl.rewards.base import RewardFunction
from slurmrl.rewards.judges import JudgePool


class MathReward(RewardFunction):
    """Judged by math-verify, in processes of its own.

    :param timeout_s: a completion that takes longer scores 0 and counts as ``reward_unjudged``,
        as does one that crashes its judge twice.
    :param processes: judges that work side by side.
    :param marker: the final answer is the rest of the line behind its last occurrence (GSM8K's
        ``#### 72``); a text without it is searched as a whole.
    """

    def __init__(self, *, timeout_s: float = 5.0, processes: int = 1, marker: str = "####") -> None:
        self._marker = marker
        self._pool = JudgePool(processes, timeout_s)
        self._unjudged = 0
        self._judged = 0

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        verdicts = self._pool.judge(
            [
                {
                    "reference": final_answer(str(row["answer"]), self._marker),
                    "completion": final_answer(completion, self._marker),
                }
                for completion, row in zip(completions, rows, strict=True)
            ]
        )
        self._judged = len(verdicts)
        self._unjudged = sum(verdict is None for verdict in verdicts)
        return [float(verdict or False) for verdict in verdicts]

    def stats(self) -> dict[str, tuple[float, float]]:
        return {"reward_unjudged": (float(self._unjudged), float(self._judged))}

    def close(self) -> None:
        self._pool.close()


def final_answer(text: str, marker: str) -> str:
    """The rest of the line behind the last marker; the whole text where there is none."""
    _, found, rest = text.rpartition(marker)
    return rest.split("\n", 1)[0].strip() if found else text
