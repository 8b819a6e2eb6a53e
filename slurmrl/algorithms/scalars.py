"""Scalars that change during a run and belong to no model. Torch-free.

They live in the master, are sent with each call, are updated from returned statistics, and are
committed.
"""

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
        """Update from a finished step's statistics (global means, by metric name)."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """The state for a checkpoint; JSON."""

    @abstractmethod
    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint's state."""


class NoScalars(ScalarController):
    """For algorithms without scalars."""

    def values(self) -> dict[str, float]:
        return {}

    def update(self, stats: Mapping[str, float]) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        pass
