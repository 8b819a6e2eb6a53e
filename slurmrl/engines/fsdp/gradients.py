"""Gradients that are sharded over ranks: sums over copies, the global norm, clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.parallel.split import Axis

CLIP_EPS = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


@torch.no_grad()
def sum_copies(
    gradients: Mapping[str, Tensor], split: TensorSplit, tensor: Axis, device: torch.device
) -> None:
    """Sum, in place, the partial gradients of parameters that are on several tensor ranks.
    Collective over these ranks, on ``device``; all of them have gradients of the same names."""
    names = [name for name in gradients if split.sums(name)]
    everywhere = [gradients[name] for name in names if split.copies(name) == split.ranks]
    _sum(everywhere, tensor, device, count=1, row=0)
    on_some = [gradients[name] for name in names if split.copies(name) < split.ranks]
    heads = split.ranks // split.head_copies
    _sum(on_some, tensor, device, count=heads, row=split.head_of(tensor.rank))


def _sum(
    gradients: Sequence[Tensor], tensor: Axis, device: torch.device, *, count: int, row: int
) -> None:
    """Sum the gradients in one collective, in which each of ``count`` sets of ranks has a row."""
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    rows = flat.new_zeros((count, flat.shape[0]), device=device)
    rows[row] = flat
    dist.all_reduce(rows, group=tensor.group)
    parts = rows[row].split_with_sizes([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


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
