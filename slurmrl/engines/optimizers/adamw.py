"""AdamW and Adam on local shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from slurmrl.engines.optimizers.base import ShardOptimizer


class AdamW(ShardOptimizer):
    """Loshchilov & Hutter 2019."""

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
    """Kingma & Ba 2015; decay is a part of the gradient."""

    _kernel = staticmethod(adam)
