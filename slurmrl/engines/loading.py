"""Filling tensors of any device from a checkpoint, a bounded block at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.layout.box import Box
from slurmrl.tensors.layout.copy import Array


@torch.no_grad()
def fill(target: Tensor, checkpoint: RoleCheckpoint, name: str, box: Box) -> None:
    """Write a box of a tensor into ``target``, a tensor of the box's shape. Raises
    CheckpointError."""
    dtype = checkpoint.layout.tensors[name].dtype
    for block, values in checkpoint.blocks(name, box):
        target[block.inside(box)].copy_(_to_torch(values, dtype))


def _to_torch(values: Array, dtype: str) -> Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
