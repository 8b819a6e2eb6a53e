"""Indices that are made in host memory and used on a model's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OnHost:
    """A tensor that stays in host memory when it is passed to a sharded module: FSDP copies plain
    tensors among the arguments to the GPU, and the host waits for it."""

    tensor: Tensor


def upload(indices: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """1-D int64 tensors in host memory -> the same on ``device``.

    A GPU gets all of them in one copy from pinned memory, and the host does not wait for it.
    """
    if device.type != "cuda":
        return tuple(index.to(device) for index in indices)
    sizes = [index.shape[0] for index in indices]
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    torch.cat(list(indices), out=packed)
    return packed.to(device, non_blocking=True).split_with_sizes(sizes)
