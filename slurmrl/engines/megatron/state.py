"""Parameters and optimizer state by their shards: filling them, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from slurmrl.checkpoint.shards import RoleCheckpoint, RoleSnapshot, ShardHeader
from slurmrl.checkpoint.tensors import TensorEntry
from slurmrl.engines import random_state
from slurmrl.engines.initial_weights import BoxReader
from slurmrl.layout.box import Box
from slurmrl.layout.layout import TensorSpec
from slurmrl.layout.shard import Shard
from slurmrl.models.hf import as_array

Held = dict[str, tuple[Tensor, list[Shard]]]
"""Flat tensors by storage, and the shards in each."""


@torch.no_grad()
def fill(held: Iterable[tuple[Tensor, list[Shard]]], read: BoxReader) -> None:
    """Write the values of all shards; padding becomes zero."""
    for tensor, shards in held:
        if sum(shard.box.count for shard in shards) < tensor.numel():
            tensor.zero_()
        for shard in shards:
            target = tensor[shard.offset : shard.offset + shard.box.count]
            target.copy_(read(shard.name, shard.box).reshape(-1))


def snapshot(
    role: str, rank: int, ranks: int, step: int, specs: Mapping[str, TensorSpec], held: Held
) -> RoleSnapshot:
    """This rank's part of a checkpoint. The tensors are read when it is written, the random state
    now."""
    shards = tuple(shard for _, own in held.values() for shard in own)
    arrays = (
        TensorEntry(name, TensorSpec(tuple(tensor.shape), "float32"), partial(as_array, tensor))
        for name, (tensor, _) in held.items()
    )
    return RoleSnapshot(
        ShardHeader(role, rank, ranks, step, specs, shards), (*arrays, *random_state.entries())
    )


def reader(checkpoint: RoleCheckpoint) -> BoxReader:
    """Values of a checkpoint's tensors, which are float32."""

    def read(name: str, box: Box) -> Tensor:
        return torch.from_numpy(checkpoint.read(name, box))

    return read
