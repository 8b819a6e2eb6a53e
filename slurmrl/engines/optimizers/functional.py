"""Further optimizers of torch on local shards, by torch's kernels for lists of tensors.

Weight decay is added to the gradient, as is torch's default.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adamax import adamax
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop

from slurmrl.engines.optimizers.base import ShardOptimizer

MOMENTUM_DECAY: Final = 4e-3
VANISHED: Final = 100
"""Steps after which the product of NAdam's momenta is negligible beside 1: the largest of the
first 100 is 0.51."""


class Functional(ShardOptimizer):
    """Steps with ``_kernel``."""

    _kernel: ClassVar[Callable[..., None]]

    def _update(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: list[list[Tensor]],
        decay: float,
    ) -> None:
        self._kernel(
            parameters,
            gradients,
            *self._state(moments),
            _scalars(self.steps, len(parameters)),
            foreach=True,
            maximize=False,
            lr=self.learning_rate,
            eps=self.options.eps,
            weight_decay=decay,
            **self._settings(),
        )

    def _state(self, moments: list[list[Tensor]]) -> list[list[Tensor]]:
        """The kernel's arguments between gradients and step counts."""
        return moments

    def _settings(self) -> dict[str, float]:
        """The kernel's further arguments."""
        beta1, beta2 = self.options.betas
        return {"beta1": beta1, "beta2": beta2}


def _scalars(value: float, count: int) -> list[Tensor]:
    """One for each parameter, in host memory: kernels read them there."""
    return list(torch.full((count,), float(value), dtype=torch.float64).unbind())


class Adagrad(Functional):
    """Duchi, Hazan & Singer 2011."""

    _kernel = staticmethod(adagrad)

    def _settings(self) -> dict[str, float]:
        return {"lr_decay": 0.0}


class Adadelta(Functional):
    """Zeiler 2012."""

    _kernel = staticmethod(adadelta)

    def _settings(self) -> dict[str, float]:
        return {"rho": self.options.rho}


class RMSprop(Functional):
    """Hinton 2012, lecture 6; not centered. With momentum (Graves 2013) where that is above 0."""

    _kernel = staticmethod(rmsprop)

    def _state(self, moments: list[list[Tensor]]) -> list[list[Tensor]]:
        square_avg, *momentum = moments
        return [square_avg, [], *(momentum or [[]])]

    def _settings(self) -> dict[str, float]:
        options = self.options
        return {"alpha": options.alpha, "momentum": options.momentum, "centered": False}


class Adamax(Functional):
    """Kingma & Ba 2015, section 7.1."""

    _kernel = staticmethod(adamax)


class RAdam(Functional):
    """Liu et al. 2020."""

    _kernel = staticmethod(radam)


class NAdam(Functional):
    """Dozat 2016. torch keeps the product of all momenta; here it is computed from the step."""

    _kernel = staticmethod(nadam)

    def _state(self, moments: list[list[Tensor]]) -> list[list[Tensor]]:
        momenta = (self._momentum(step) for step in range(1, 1 + min(self.steps, VANISHED)))
        return [*moments, _scalars(prod(momenta), len(moments[0]))]

    def _momentum(self, step: int) -> float:
        """The momentum of ``step``, counted from 1."""
        shortfall: float = 0.96 ** (step * MOMENTUM_DECAY)
        return self.options.betas[0] * (1.0 - 0.5 * shortfall)

    def _settings(self) -> dict[str, float]:
        return {**super()._settings(), "momentum_decay": MOMENTUM_DECAY}
