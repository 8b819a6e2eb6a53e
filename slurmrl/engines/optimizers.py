"""Optimizers of all engines, which update the shards of a rank.

All optimizers work element by element, so a step does not depend on how parameters are sharded.
(Steps of Muon or Adafactor use whole matrices, and would depend on the sharding.) Moments have the
shape of their parameter and start at 0. Moments and step count suffice to resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from slurmrl.config.schema.roles import Kind, Optimizer


class ShardOptimizer(ABC):
    """An optimizer of one rank's shards. Decay acts on matrices only, not on norms and biases."""

    def __init__(
        self,
        options: Optimizer,
        total_steps: int,
        parameters: Mapping[str, Tensor],
        matrices: Container[str],
    ) -> None:
        """``matrices`` are the names of the parameters that decay."""
        self.options = options
        self.matrices = matrices
        self.names = options.moments
        self.total_steps = total_steps
        self.steps = 0
        self.moments: dict[str, dict[str, Tensor]] = {
            moment: {name: torch.zeros_like(p) for name, p in parameters.items()}
            for moment in self.names
        }

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.options.learning_rate(self.steps, self.total_steps)

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Update the parameters in place."""
        names = [name for name, p in parameters.items() if p.numel() and name in gradients]
        for decay, chosen in (
            (self.options.weight_decay, [n for n in names if n in self.matrices]),
            (0.0, [n for n in names if n not in self.matrices]),
        ):
            if chosen:
                self._update(
                    [parameters[name] for name in chosen],
                    [gradients[name] for name in chosen],
                    [[self.moments[moment][name] for name in chosen] for moment in self.names],
                    decay,
                )
        self.steps += 1

    @abstractmethod
    def _update(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: list[list[Tensor]],
        decay: float,
    ) -> None:
        """Update parameters and moments in place; ``moments`` are in the order of ``names``."""


class AdamW(ShardOptimizer):
    """AdamW (Loshchilov & Hutter 2019): decay is decoupled from the gradient."""

    _kernel: ClassVar[Callable[..., None]] = staticmethod(adamw)

    def _update(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: list[list[Tensor]],
        decay: float,
    ) -> None:
        first, second = moments
        device = parameters[0].device
        steps = torch.full((len(parameters),), float(self.steps), device=device)
        self._kernel(
            parameters,
            gradients,
            first,
            second,
            [],
            list(steps.unbind()),
            fused=True,
            amsgrad=False,
            beta1=self.options.betas[0],
            beta2=self.options.betas[1],
            lr=self.learning_rate,
            weight_decay=decay,
            eps=self.options.eps,
            maximize=False,
        )


class Adam(AdamW):
    """Adam (Kingma & Ba 2015): decay is a part of the gradient."""

    _kernel = staticmethod(adam)


class SGD(ShardOptimizer):
    """Gradient descent, with momentum (Polyak 1964) if set. Decay is decoupled."""

    def _update(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: list[list[Tensor]],
        decay: float,
    ) -> None:
        if decay:
            torch._foreach_mul_(parameters, 1.0 - self.learning_rate * decay)
        for velocity in moments:
            torch._foreach_mul_(velocity, self.options.momentum)
            torch._foreach_add_(velocity, gradients)
            gradients = velocity
        torch._foreach_add_(parameters, gradients, alpha=-self.learning_rate)


OPTIMIZERS: Final[Mapping[Kind, type[ShardOptimizer]]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD}
"""Mapping from names in configurations to optimizers."""
