"""Median, least and most of measured values, for the programs beside it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple


class Spread(NamedTuple):
    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Iterable[float], digits: int | None = None) -> Spread:
        """``digits`` after the point; None rounds nothing."""
        known = list(values)
        found = (statistics.median(known), min(known), max(known))
        return Spread(*(value if digits is None else round(value, digits) for value in found))

    def text(self, form: str = ".2f") -> str:
        """Return ``1.25 (1.19 to 1.40)``; ``form`` formats one value."""
        return f"{self.median:{form}} ({self.least:{form}} to {self.most:{form}})"
