"""Scalars that change during a run and belong to no model, such as the KL coefficient. Torch-free.

The master keeps the scalars, sends them with each call, updates them from returned statistics, and
commits them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol, Self, TypeVar


class ScalarController(ABC):
    """Controller of scalars, constructed with the algorithm's settings."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm

    @abstractmethod
    def values(self) -> dict[str, float]:
        """Return the scalars for the calls of the next step."""

    @abstractmethod
    def update(self, stats: Mapping[str, float]) -> None:
        """Update the scalars from a finished step's statistics, which are global means."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, as JSON values."""

    @abstractmethod
    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint's state."""


class NoScalars(ScalarController):
    """Controller for algorithms without scalars."""

    def values(self) -> dict[str, float]:
        return {}

    def update(self, stats: Mapping[str, float]) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        pass


class PolicyScalars(ScalarController):
    """Scalars of policy gradients: ``kl_coef`` and, with ``value_norm``, moments of the returns.

    ``kl_coef`` is the KL coefficient. The critic's training reports the moments after each step.
    """

    def __init__(self, algorithm: Any) -> None:
        super().__init__(algorithm)
        self._kl_coef: float = algorithm.kl.coef
        self._normalizes = algorithm.value_norm != "none"
        self._returns = ReturnMoments()

    def values(self) -> dict[str, float]:
        return {"kl_coef": self._kl_coef} | (self._returns.scalars() if self._normalizes else {})

    def update(self, stats: Mapping[str, float]) -> None:
        kl = self.algorithm.kl
        # The KL is not measured if its coefficient is 0, or in a step without scored completions.
        if kl.kind != "fixed" and "kl_sequence" in stats:
            self._kl_coef *= adaptation(
                stats["kl_sequence"], round(stats["completions"]), kl.target, kl.horizon
            )
        if self._normalizes:
            self._returns = ReturnMoments.of(stats)

    def state(self) -> dict[str, float]:
        return self.values()

    def restore(self, state: Mapping[str, float]) -> None:
        self._kl_coef = state["kl_coef"]
        if self._normalizes:
            self._returns = ReturnMoments.of(state)


def adaptation(kl: float, n: int, target: float, horizon: float) -> float:
    """Return the factor by which ``n`` completions change the KL coefficient.

    ``kl`` is the completions' mean KL to the reference, in nats. The rule is proportional control
    in log space (Ziegler et al. 2019, "Fine-tuning language models from human preferences", section
    2.2). A KL above the target raises the coefficient. More than ``horizon`` completions count as
    ``horizon`` completions: with over five times as many, a small KL would make the coefficient
    negative.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return 1.0 + error * min(n / horizon, 1.0)


VALUE_NORM = ("value_norm_weight", "value_norm_mean", "value_norm_square")
"""Names of the fields of `ReturnMoments` among scalars and metrics."""
EPS = 1e-5
"""Number added to the variance, so that equal returns can be normalized."""


class _Values(Protocol):
    """A number or a tensor."""

    def __add__(self, other: float, /) -> Self: ...
    def __sub__(self, other: float, /) -> Self: ...
    def __mul__(self, other: float, /) -> Self: ...
    def __truediv__(self, other: float, /) -> Self: ...


Values = TypeVar("Values", bound=_Values)


@dataclass(frozen=True)
class ReturnMoments:
    """Moments of all returns so far. Without returns, normalization changes nothing."""

    weight: float = 0.0
    """Weight of the data in the moments. ``exponential``: 1 - decay^steps, by which ``mean`` and
    ``square`` are already divided (Adam's bias correction). ``moving``: number of returns."""
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
        """Return the moments after the next batch, which has the weight 1 - ``decay``.

        The method is from van Hasselt et al. 2016, "Learning values across many orders of
        magnitude", without the paper's change of the model's weights.
        """
        return self._joined(decay * self.weight, 1.0 - decay, mean, square)

    def moving(self, mean: float, square: float, count: float) -> ReturnMoments:
        """Return the moments after the next ``count`` returns; all returns have equal weights."""
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
        return dict(zip(VALUE_NORM, (self.weight, self.mean, self.square), strict=True))

    @staticmethod
    def of(scalars: Mapping[str, float]) -> ReturnMoments:
        """Return the moments in ``scalars``, which may have other entries."""
        return ReturnMoments(*(scalars[name] for name in VALUE_NORM))
