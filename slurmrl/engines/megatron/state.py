"""Parameters and optimizer state by their shards: filling them, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.checkpoint.rank_files import ShardHeader
from slurmrl.checkpoint.shards import RoleCheckpoint, RoleSnapshot
from slurmrl.checkpoint.tensors import TensorEntry
from slurmrl.engines import random_state
from slurmrl.engines.initial_weights import BoxReader
from slurmrl.engines.loading import fill as fill_box
from slurmrl.layout.box import Index
from slurmrl.layout.layout import Layout, TensorSpec
from slurmrl.layout.shard import Shard
from slurmrl.models.hf import as_array
from slurmrl.parallel.groups import ParallelContext

Held = dict[str, tuple[Tensor, list[Shard]]]
"""Flat tensors by storage, and the shards in each."""


@torch.no_grad()
def fill(held: Iterable[tuple[Tensor, list[Shard]]], read: BoxReader) -> None:
    """Write the values of all shards; padding becomes zero."""
    for target, shard in _targets(held):
        target.copy_(read(shard.name, shard.box).reshape(-1))


def load(held: Iterable[tuple[Tensor, list[Shard]]], checkpoint: RoleCheckpoint) -> None:
    """Fill all shards from a checkpoint; padding becomes zero."""
    for target, shard in _targets(held):
        fill_box(target.view(shard.box.size), checkpoint, shard.name, shard.box)


def _targets(held: Iterable[tuple[Tensor, list[Shard]]]) -> Iterator[tuple[Tensor, Shard]]:
    """Each shard with its place, flat, after the padding of its tensor is zero."""
    for tensor, shards in held:
        if sum(shard.box.count for shard in shards) < tensor.numel():
            tensor.zero_()
        for shard in shards:
            yield tensor[shard.offset : shard.offset + shard.box.count], shard


def saved_layout(
    context: ParallelContext,
    shapes: Mapping[str, Index],
    prefixes: Sequence[str],
    held: Held,
) -> Layout | None:
    """The layout of a checkpoint, on the model's first rank; None on the others. Collective.

    ``held`` are the weights that this rank updates; moments are held like them. Only megatron knows
    how its buffers cut the weights, on each rank for that rank.
    """
    own = [shard.to_json() for _, shards in held.values() for shard in shards]
    texts = _gathered(json.dumps([context.rank, own]).encode(), context)
    if texts is None:
        return None
    rows = dict(map(json.loads, texts))
    weights = Layout.of(
        {name: TensorSpec(shape, "float32") for name, shape in shapes.items()},
        [[Shard.from_json(values) for values in rows[rank]] for rank in range(context.size)],
    )
    return Layout(
        {prefix + name: spec for prefix in prefixes for name, spec in weights.tensors.items()},
        {prefix + name: each for prefix in prefixes for name, each in weights.holders.items()},
        context.size,
    )


def _gathered(content: bytes, context: ParallelContext) -> list[bytes] | None:
    """The contents of all ranks of the model, on its first rank."""
    group, device = context.group("all"), context.device
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in context.ranks]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group=group)
    counts = [int(size) for size in sizes]
    own = torch.zeros(max(counts), dtype=torch.uint8)
    own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    found = [own.to(device, copy=True) for _ in counts] if context.rank == 0 else None
    dist.gather(own.to(device), found, dst=context.ranks[0], group=group)
    if found is None:
        return None
    return [bytes(t[:n].cpu().numpy()) for t, n in zip(found, counts, strict=True)]


def snapshot(
    role: str, rank: int, ranks: int, step: int, held: Held, layout: Layout | None
) -> RoleSnapshot:
    """This rank's part of a checkpoint. The tensors are read when it is written, the random state
    now."""
    arrays = (
        TensorEntry(name, TensorSpec(tuple(tensor.shape), "float32"), partial(as_array, tensor))
        for name, (tensor, _) in held.items()
    )
    header = ShardHeader(role, rank, ranks, step)
    return RoleSnapshot(header, (*arrays, *random_state.entries()), layout)
