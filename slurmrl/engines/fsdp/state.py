"""Saving and loading an engine's shards, moments, step count and random state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slurmrl.checkpoint.shards import RoleCheckpoint, RoleSnapshot, ShardHeader
from slurmrl.checkpoint.tensors import TensorEntry
from slurmrl.engines import random_state
from slurmrl.layout.copy import Array
from slurmrl.layout.layout import Layout, TensorSpec
from slurmrl.models.hf import as_array


def snapshot(
    role: str, rank: int, step: int, layout: Layout, tensors: Mapping[str, Tensor]
) -> RoleSnapshot:
    """This rank's part of a checkpoint; ``tensors`` are its chunks, by their names in ``layout``.

    The tensors are read when the snapshot is written; the random state is read now.
    """
    part = ShardHeader(role, rank, layout.ranks, step, layout.tensors, layout.held_by(rank))
    entries = (
        TensorEntry(
            shard.name,
            TensorSpec(shard.box.size, layout.tensors[shard.name].dtype),
            partial(as_array, tensors[shard.name]),
        )
        for shard in part.shards
    )
    return RoleSnapshot(part, (*entries, *random_state.entries()))


@torch.no_grad()
def load(
    directory: Path, role: str, rank: int, layout: Layout, tensors: Mapping[str, Tensor]
) -> int:
    """Fill this rank's chunks and set its random state. Return the number of optimizer steps.

    If another number of ranks wrote the checkpoint, the random state is seeded from the step and
    the rank. Raises CheckpointError for a checkpoint of another model.
    """
    checkpoint = RoleCheckpoint(directory, role)
    checkpoint.check(layout.tensors)
    for shard in layout.held_by(rank):
        values = checkpoint.read(shard.name, shard.box)
        target = tensors[shard.name]
        target.copy_(_to_torch(values, target.dtype))
    random_state.restore(checkpoint, rank, layout.ranks)
    return checkpoint.step


def _to_torch(values: Array, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
