"""The contract of optimizers on local shards. The state is tensors by name and one step count.

All optimizers work element by element, so a step does not depend on how parameters are sharded.
(Optimizers of whole matrices, such as Muon and Adafactor, would.) Moments have the shape of their
parameter and start at 0. Everything else follows from the step count, so these suffice to resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping

import torch
from torch import Tensor

from slurmrl.config.schema.optimizer import Optimizer


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
        """One step; ``moments`` in the order of ``names``."""
