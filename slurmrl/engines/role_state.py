"""Checkpoints of a role on a rank: its random state, and tensors filled from saved boxes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slurmrl.models.hf import as_array
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout import Array, Box, TensorSpec

CPU = "rng/cpu"
CUDA = "rng/cuda"


def random_entries() -> Iterator[TensorEntry]:
    """Yield the current random state."""
    states = {CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[CUDA] = torch.cuda.get_rng_state()
    for name, state in states.items():
        yield TensorEntry(name, TensorSpec(tuple(state.shape), "uint8"), partial(as_array, state))


def restore_random(checkpoint: RoleCheckpoint, rank: int, ranks: int) -> None:
    """Restore this rank's random state.

    If another number of ranks, or ranks without a GPU, wrote the checkpoint, seed from the step and
    the rank instead.
    """
    torch.manual_seed(checkpoint.step * ranks + rank)
    if checkpoint.ranks != ranks:
        return
    torch.set_rng_state(_state(checkpoint, rank, CPU))
    if torch.cuda.is_available() and checkpoint.has_array(rank, CUDA):
        torch.cuda.set_rng_state(_state(checkpoint, rank, CUDA))


def _state(checkpoint: RoleCheckpoint, rank: int, name: str) -> Tensor:
    return torch.from_numpy(np.array(checkpoint.array(rank, name)))


@torch.no_grad()
def fill_saved(target: Tensor, checkpoint: RoleCheckpoint, name: str, box: Box) -> None:
    """Write a box of a tensor into ``target``, a tensor of the box's shape.

    Raises CheckpointError.
    """
    dtype = checkpoint.layout.tensors[name].dtype
    for block, values in checkpoint.blocks(name, box):
        target[block.inside(box)].copy_(_to_torch(values, dtype))


def _to_torch(values: Array, dtype: str) -> Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
