"""A custom reward of two modules, which tests change during a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

REWARD = """\
from slurmrl.rewards.base import RewardFunction
from score_of_mine import SCORE

class Mine(RewardFunction):
    def __call__(self, prompts, completions, rows):
        return [SCORE] * len(completions)
"""
NAME = "reward_of_mine:Mine"


def write_reward(folder: Path, score: float) -> None:
    """Write a reward that gives ``score`` to every completion."""
    (folder / "reward_of_mine.py").write_text(REWARD)
    (folder / "score_of_mine.py").write_text(f"SCORE = {score}\n")


def rewards(metrics: list[Mapping[str, Any]]) -> dict[int, float]:
    """Return the mean reward of each step."""
    return {line["step"]: line["reward"] for line in metrics if "reward" in line}
