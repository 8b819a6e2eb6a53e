"""The share of a training's update that remains when weights are rounded to a narrower type.
Torch-free.

A narrower type has few values near a weight, so an update smaller than half their distance
disappears: bfloat16 changes a weight by 0.4 % or not at all. With ``s`` the weights before the
update, ``t`` those after it, and ``r`` the rounding, the share is

    <r(t) - r(s), t - s> / <t - s, t - s>

which is 1 without rounding and 0 if all rounded weights stay as they were. It predicts the share of
the gain: to first order a loss changes along the update. Differences of rounding that are unrelated
to the update cancel out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from slurmrl.tensors.checkpoint.precision import BLOCK, narrowed, widened
from slurmrl.tensors.layout.copy import Array

ENOUGH: Final = 0.9
"""Smaller shares are warned of."""


@dataclass(frozen=True)
class Survival:
    """Sums over weights. Those of several tensors or ranks add up."""

    kept: float = 0.0
    """<r(t) - r(s), t - s>"""
    whole: float = 0.0
    """<t - s, t - s>"""

    def __add__(self, other: Survival) -> Survival:
        return Survival(self.kept + other.kept, self.whole + other.whole)

    @property
    def share(self) -> float | None:
        """From 0 to 1; None without an update."""
        if not self.whole:
            return None
        return min(max(self.kept / self.whole, 0.0), 1.0)


def survival(start: Array, trained: Array, dtype: str) -> Survival:
    """Measure the update from ``start`` to ``trained``, both float32 of one shape, in ``dtype``."""
    before, after = start.reshape(-1), trained.reshape(-1)
    total = Survival()
    for begin in range(0, after.size, BLOCK):
        block = slice(begin, begin + BLOCK)
        update = after[block].astype("f8") - before[block]
        rounded = _rounded(after[block], dtype) - _rounded(before[block], dtype)
        total += Survival(float(rounded @ update), float(update @ update))
    return total


def _rounded(values: Array, dtype: str) -> Array:
    return widened(narrowed(values, dtype), dtype).astype("f8")
