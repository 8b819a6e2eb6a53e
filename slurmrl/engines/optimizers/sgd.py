"""Stochastic gradient descent on local shards."""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.engines.optimizers.base import ShardOptimizer


class SGD(ShardOptimizer):
    """With momentum (Polyak 1964) where ``momentum`` is above 0; decay is decoupled, as AdamW's."""

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
