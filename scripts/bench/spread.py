"""Median, minimum and maximum of measured values, for the other programs in this folder."""

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
        """Return median, minimum and maximum with ``digits`` after the point; None means no
        rounding.
        """
        known = list(values)
        found = (statistics.median(known), min(known), max(known))
        return Spread(*(value if digits is None else round(value, digits) for value in found))

    def text(self, form: str = ".2f") -> str:
        """Return ``1.25 (1.19 to 1.40)``; ``form`` formats one value."""
        return f"{self.median:{form}} ({self.least:{form}} to {self.most:{form}})"
