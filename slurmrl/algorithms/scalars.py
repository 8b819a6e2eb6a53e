"""Numbers that change during a run and belong to no model: they live once, in the master, go out
with each call, are updated from returned statistics, and are committed. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class ScalarController(ABC):
    """Constructed with the algorithm's settings."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm

    @abstractmethod
    def values(self) -> dict[str, float]:
        """The scalars for the next step's calls."""

    @abstractmethod
    def update(self, stats: Mapping[str, float]) -> None:
        """Learn from a finished step's statistics (global means, by metric name)."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """What a checkpoint must hold; JSON."""

    @abstractmethod
    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint's state."""


class NoScalars(ScalarController):
    """For algorithms without any."""

    def values(self) -> dict[str, float]:
        return {}

    def update(self, stats: Mapping[str, float]) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        pass
