"""The norm of gradients whose chunks are on many ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

CLIP_EPS = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


@torch.no_grad()
def global_norm(
    gradients: Mapping[str, Tensor],
    groups: Sequence[dist.ProcessGroup] = (),
    copies: Callable[[str], int] = lambda name: 1,
    device: torch.device | None = None,
) -> float:
    """The 2-norm of gradients whose chunks are on the ranks of ``groups`` (the axes of a grid).

    Each parameter has ``copies`` copies. Squares are summed in float64, over the ranks on
    ``device`` (None: the device of the gradients)."""
    norms = torch._foreach_norm(list(gradients.values()))
    squares = torch.stack(norms).double().square()
    times = [copies(name) for name in gradients]
    if any(count > 1 for count in times):
        squares = squares / torch.tensor(times, dtype=torch.float64, device=squares.device)
    total = squares.sum().to(device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return float(total.sqrt())


@torch.no_grad()
def clip(gradients: Mapping[str, Tensor], norm: float, limit: float | None) -> None:
    """Scale gradients in place so that their global norm is at most ``limit``."""
    if limit is not None and norm > limit:
        torch._foreach_mul_(list(gradients.values()), limit / (norm + CLIP_EPS))
