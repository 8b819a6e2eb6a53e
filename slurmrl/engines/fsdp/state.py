"""Saving and loading an engine's shards, moments, step count and random state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slurmrl.engines import random_state
from slurmrl.engines.loading import fill
from slurmrl.errors import UsageError
from slurmrl.models.hf import as_array
from slurmrl.tensors.checkpoint.rank_files import ShardHeader
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint, RoleSnapshot
from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout.layout import Layout, TensorSpec


def snapshot(
    role: str,
    rank: int,
    step: int,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    frozen: str | None,
) -> RoleSnapshot:
    """This rank's part of a checkpoint; ``tensors`` are its chunks, by their names in ``layout``,
    and ``frozen`` is the fingerprint of the weights that adapters belong to.

    The tensors are read when the snapshot is written; the random state is read now.
    """
    entries = (
        TensorEntry(
            shard.name,
            TensorSpec(shard.box.size, layout.tensors[shard.name].dtype),
            partial(as_array, tensors[shard.name]),
        )
        for shard in layout.held_by(rank)
    )
    header = ShardHeader(role, rank, layout.ranks, step)
    return RoleSnapshot(header, (*entries, *random_state.entries()), layout, frozen)


@torch.no_grad()
def load(
    directory: Path,
    role: str,
    rank: int,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    frozen: str | None,
) -> int:
    """Fill this rank's chunks and set its random state. Return the number of optimizer steps.

    If another number of ranks wrote the checkpoint, the random state is seeded from the step and
    the rank. Raises CheckpointError for a checkpoint of another model, UsageError for adapters of
    other weights than those that are ``frozen``.
    """
    checkpoint = RoleCheckpoint(directory, role)
    checkpoint.check(layout.tensors)
    if None not in (checkpoint.frozen, frozen) and checkpoint.frozen != frozen:
        raise UsageError(
            f"{role}.path holds other weights than when the adapters in {directory} were trained: "
            f"their fingerprint is {frozen} now and was {checkpoint.frozen}. Put the folder back "
            "as it was and resume the trial, or begin a new one"
        )
    for shard in layout.held_by(rank):
        fill(tensors[shard.name], checkpoint, shard.name, shard.box)
    random_state.restore(checkpoint, rank, layout.ranks)
    return checkpoint.step
