"""The KL coefficient, fixed or adaptive. Torch-free, runs in the master."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from slurmrl.algorithms.scalars import ScalarController


class KLControl(ABC):
    """Holds the coefficient ``coef``."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    @abstractmethod
    def update(self, kl: float, n: int) -> None:
        """Update from ``n`` completions with a mean KL of ``kl`` nats to the reference."""


class FixedKL(KLControl):
    def update(self, kl: float, n: int) -> None:
        pass


class AdaptiveKL(KLControl):
    """Proportional control in log space (Ziegler et al. 2019, "Fine-tuning language models from
    human preferences", section 2.2): too large a KL raises the coefficient. A step of more than
    ``horizon`` completions counts as that many: beyond five times as many, a small KL would make
    the coefficient negative."""

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        super().__init__(coef)
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, n: int) -> None:
        error = min(max(kl / self._target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * min(n / self._horizon, 1.0)


class KLController(ScalarController):
    """The scalars of policy gradients: ``kl_coef``, updated from the metrics ``kl_sequence`` and
    ``completions``."""

    def __init__(self, algorithm: Any) -> None:
        super().__init__(algorithm)
        kl = algorithm.kl
        self._control: KLControl = (
            FixedKL(kl.coef) if kl.kind == "fixed" else AdaptiveKL(kl.coef, kl.target, kl.horizon)
        )

    def values(self) -> dict[str, float]:
        return {"kl_coef": self._control.coef}

    def update(self, stats: Mapping[str, float]) -> None:
        if self._control.coef > 0:  # otherwise nothing measures the KL
            self._control.update(stats["kl_sequence"], round(stats["completions"]))

    def state(self) -> dict[str, float]:
        return {"kl_coef": self._control.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        self._control.coef = state["kl_coef"]
