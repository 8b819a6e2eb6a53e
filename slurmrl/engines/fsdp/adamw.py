"""AdamW on local shards. The state is plain tensors by name and one step count."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from slurmrl.config.schema.model import Optimizer
from slurmrl.engines.schedule import learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")
CLIP_EPS = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


class AdamW:
    """Loshchilov & Hutter 2019; decay acts on matrices only, not on norms and biases."""

    def __init__(
        self, options: Optimizer, total_steps: int, parameters: Mapping[str, Tensor]
    ) -> None:
        self.options = options
        self.total_steps = total_steps
        self.steps = 0
        self.moments: dict[str, dict[str, Tensor]] = {
            moment: {name: torch.zeros_like(p) for name, p in parameters.items()}
            for moment in MOMENTS
        }

    @property
    def learning_rate(self) -> float:
        """Rate of the coming step."""
        return learning_rate(self.options, self.steps, self.total_steps)

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Update the parameters in place."""
        names = [name for name, p in parameters.items() if p.numel() and name in gradients]
        for decay, chosen in (
            (self.options.weight_decay, [n for n in names if parameters[n].dim() > 1]),
            (0.0, [n for n in names if parameters[n].dim() <= 1]),
        ):
            if chosen:
                self._update(chosen, parameters, gradients, decay)
        self.steps += 1

    def _update(
        self,
        names: list[str],
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        decay: float,
    ) -> None:
        first, second = (self.moments[moment] for moment in MOMENTS)
        device = parameters[names[0]].device
        steps = torch.full((len(names),), float(self.steps), device=device)
        adamw(
            [parameters[name] for name in names],
            [gradients[name] for name in names],
            [first[name] for name in names],
            [second[name] for name in names],
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

    def move(self, device: torch.device) -> None:
        for tensors in self.moments.values():
            for name, tensor in tensors.items():
                tensors[name] = tensor.to(device)


@torch.no_grad()
def global_norm(gradients: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> float:
    """The 2-norm of gradients whose chunks lie on the ranks of ``group``, exactly: squares are
    added in float64."""
    norms = torch._foreach_norm(list(gradients.values()))
    total = torch.stack(norms).double().square().sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    return float(total.sqrt())


@torch.no_grad()
def clip(gradients: Mapping[str, Tensor], norm: float, limit: float | None) -> None:
    """Scale gradients in place so that their global norm is at most ``limit``."""
    if limit is not None and norm > limit:
        torch._foreach_mul_(list(gradients.values()), limit / (norm + CLIP_EPS))
