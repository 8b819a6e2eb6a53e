"""Running mean and standard deviation of returns, by which a critic's targets are normalised.
Torch-free: the master keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Protocol, Self, TypeVar

EPS = 1e-5
"""Added to the variance, so that equal returns can be normalised."""


class _Values(Protocol):
    """A number or a tensor."""

    def __add__(self, other: float, /) -> Self: ...
    def __sub__(self, other: float, /) -> Self: ...
    def __mul__(self, other: float, /) -> Self: ...
    def __truediv__(self, other: float, /) -> Self: ...


Values = TypeVar("Values", bound=_Values)


@dataclass(frozen=True)
class ReturnMoments:
    """Moments of all returns so far. Before the first ones, normalisation changes nothing."""

    weight: float = 0.0
    """Of what the moments were computed from: exponential: 1 - decay^steps, by which they are
    divided already (as Adam corrects its bias); moving: the number of returns."""
    mean: float = 0.0
    square: float = 0.0
    """Mean of the squares."""

    @property
    def std(self) -> float:
        if self.weight == 0.0:
            return 1.0
        return sqrt(max(self.square - self.mean**2, 0.0) + EPS)

    def normalized(self, x: Values) -> Values:
        return (x - self.mean) / self.std

    def denormalized(self, x: Values) -> Values:
        return x * self.std + self.mean

    def exponential(self, mean: float, square: float, decay: float) -> ReturnMoments:
        """After a further batch, with the weight 1 - ``decay`` (van Hasselt et al. 2016, "Learning
        values across many orders of magnitude", without the change of weights)."""
        return self._joined(decay * self.weight, 1.0 - decay, mean, square)

    def moving(self, mean: float, square: float, count: float) -> ReturnMoments:
        """After ``count`` further returns; all returns weigh alike."""
        return self._joined(self.weight, count, mean, square)

    def _joined(self, old: float, new: float, mean: float, square: float) -> ReturnMoments:
        weight = old + new
        if weight == 0.0:
            return self
        share = new / weight
        return ReturnMoments(
            weight,
            self.mean + share * (mean - self.mean),
            self.square + share * (square - self.square),
        )

    def scalars(self) -> dict[str, float]:
        return {
            "value_norm_weight": self.weight,
            "value_norm_mean": self.mean,
            "value_norm_square": self.square,
        }

    @staticmethod
    def of(scalars: Mapping[str, float]) -> ReturnMoments:
        """From `scalars`, among others."""
        names = ("value_norm_weight", "value_norm_mean", "value_norm_square")
        return ReturnMoments(*(scalars[name] for name in names))
