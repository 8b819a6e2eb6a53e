"""The scalars of policy gradients. Torch-free, runs in the master."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmrl.algorithms.kl_control import KLController
from slurmrl.algorithms.policy.value_norm import ReturnMoments


class PolicyScalars(KLController):
    """The KL coefficient, and with ``value_norm`` the moments of the returns, which the critic's
    training reports after each step."""

    def __init__(self, algorithm: Any) -> None:
        super().__init__(algorithm)
        self._normalises = algorithm.value_norm != "none"
        self._returns = ReturnMoments()

    def values(self) -> dict[str, float]:
        return super().values() | (self._returns.scalars() if self._normalises else {})

    def update(self, stats: Mapping[str, float]) -> None:
        super().update(stats)
        if self._normalises:
            self._returns = ReturnMoments.of(stats)

    def state(self) -> dict[str, float]:
        return super().state() | (self._returns.scalars() if self._normalises else {})

    def restore(self, state: Mapping[str, float]) -> None:
        super().restore(state)
        if self._normalises:
            self._returns = ReturnMoments.of(state)
