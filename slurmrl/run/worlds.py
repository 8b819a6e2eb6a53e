"""Worlds: processes that share one process group and one fate, with ranks 0..n-1 of their own.

The group of the trainers is one world on all of its hosts. In every other group each task is a
world of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TRAINERS: Final = "trainer"
"""The group of the trainers, and the name of their world. Its end is the end of an incarnation."""

MASTER: Final = "master"
"""The name of the master among the groups, for its output. Its log is numbered like that of the
agent that starts it: the trainers' first."""


def group_of(world: str) -> str:
    return world.partition("/")[0]


def world_of(group: str, task: int) -> str:
    """Return the name of a task's world: ``trainer``, or ``rollout/3``."""
    return group if group == TRAINERS else f"{group}/{task}"


@dataclass(frozen=True)
class RankId:
    """A rank of a world."""

    world: str
    rank: int

    def __str__(self) -> str:
        """``rank 3`` of the trainers, ``rank 0 of rollout/3`` elsewhere."""
        return f"rank {self.rank}" + ("" if self.world == TRAINERS else f" of {self.world}")
