"""One step on local shards. The state is plain tensors by name and one step count.

All of them work element by element, so that a step does not depend on how parameters are sharded;
those that look at whole matrices (Muon, Adafactor) would. What they keep beside each parameter has
its shape and starts at 0; all else follows from the step count, so that a checkpoint of these is
enough to go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping

import torch
from torch import Tensor

from slurmrl.config.schema.optimizer import Optimizer


class ShardOptimizer(ABC):
    """One step after the other. Decay acts on matrices only, not on norms and biases."""

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
        """Rate of the coming step."""
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
