"""Sums of the gradients of parameters that are copied on several tensor ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.parallel.split import Axis


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
    """Sum all gradients in one collective; each of ``count`` sets of ranks uses its own row."""
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    rows = flat.new_zeros((count, flat.shape[0]), device=device)
    rows[row] = flat
    dist.all_reduce(rows, group=tensor.group)
    parts = rows[row].split_with_sizes([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
