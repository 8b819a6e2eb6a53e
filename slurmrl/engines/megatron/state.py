"""What a rank holds of a model: parameters and optimizer state by their shards, for checkpoints,
moves and offloading."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from slurmrl.engines import random_state
from slurmrl.engines.host import HostCopies
from slurmrl.engines.initial_weights import BoxReader
from slurmrl.engines.loading import fill as fill_box
from slurmrl.engines.megatron.optimizer import ShardedOptimizer
from slurmrl.engines.megatron.parts import Parts, part_of_flat
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.hf import as_array
from slurmrl.models.shapes import parameter_shapes
from slurmrl.tensors.checkpoint.rank_files import ShardHeader
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint, RoleSnapshot
from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout.box import Index
from slurmrl.tensors.layout.layout import Layout, TensorSpec
from slurmrl.tensors.layout.shard import Shard
from slurmrl.tensors.parallel.groups import ParallelContext

Held = dict[str, tuple[Tensor, list[Shard]]]
"""Flat tensors by storage, and the shards in each."""


class ModelState:
    """The tensors of this rank. They are views of the model's own, so they change with it.

    :param chunks: the model chunks; of a trained model, inside megatron's gradient buffers.
    :param optimizer: None if the model is frozen.
    """

    def __init__(
        self,
        config: ModelConfig,
        head: Head,
        context: ParallelContext,
        parts: Parts,
        chunks: Sequence[Any],
        optimizer: ShardedOptimizer | None,
    ) -> None:
        self._shapes = parameter_shapes(config, head)
        self._context = context
        self._parts = parts
        self._chunks = chunks
        self._optimizer = optimizer

    def weights(self) -> Held:
        """The parameters and the shards in them."""
        return {
            name: (parameter.detach().view(-1), self._parts[name])
            for name, parameter in self._parameters().items()
        }

    def shards(self, *, moments: bool = True) -> Held:
        """The float32 weights that this rank updates, and their moments."""
        if self._optimizer is None:
            return {}
        names = {parameter: name for name, parameter in self._parameters().items()}
        held: Held = {}
        for shard in self._optimizer.shards():
            storage = names[shard.parameter]
            own = list(part_of_flat(self._parts[storage], shard.first, shard.last))
            held[storage] = (shard.weight, own)
            for moment, values in shard.moments.items() if moments else ():
                held[f"{moment}/{storage}"] = (values, [_of_moment(moment, p) for p in own])
        return held

    def tensors(self) -> list[Tensor]:
        """All of them. (A float32 shard has the name of the bfloat16 weight that it is copied
        to.)"""
        return [tensor for tensor, _ in (*self.weights().values(), *self.shards().values())]

    def gradients(self) -> list[Tensor]:
        """The buffers of the gradients."""
        return [
            buffer.grad_data
            for chunk in self._chunks
            if isinstance(chunk, DistributedDataParallel)
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    @torch.no_grad()
    def fill(self, read: BoxReader) -> None:
        """Write the values of all weights; padding becomes zero."""
        held = [*self.weights().values(), *self.shards(moments=False).values()]
        for target, shard in _targets(held):
            target.copy_(read(shard.name, shard.box).reshape(-1))

    def load(self, checkpoint: RoleCheckpoint) -> None:
        """Fill weights and moments from a checkpoint; padding becomes zero."""
        checkpoint.check(self._specs)
        for target, shard in _targets([*self.weights().values(), *self.shards().values()]):
            fill_box(target.view(shard.box.size), checkpoint, shard.name, shard.box)

    def snapshot(self, role: str, step: int, host: HostCopies | None) -> RoleSnapshot:
        """This rank's part of a checkpoint: tensors are copied to the ``host`` now, or else read
        when it is written. The random state is that of now. Collective."""
        held = {name: tensor for name, (tensor, _) in self.shards().items()}
        if host is not None:
            held = dict(host.copy(held))
        arrays = (
            TensorEntry(name, TensorSpec(tuple(tensor.shape), "float32"), partial(as_array, tensor))
            for name, tensor in held.items()
        )
        header = ShardHeader(role, self._context.rank, self._context.size, step)
        return RoleSnapshot(header, (*arrays, *random_state.entries()), self._saved_layout)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """By storage."""
        return {
            f"{index}.{name}": parameter
            for index, chunk in enumerate(self._chunks)
            for name, parameter in getattr(chunk, "module", chunk).named_parameters()
        }

    @property
    def _prefixes(self) -> tuple[str, ...]:
        """Of the names of weights and moments in a checkpoint."""
        assert self._optimizer is not None
        return ("", *(f"{moment}/" for moment in self._optimizer.moments))

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        """Weights and moments of a checkpoint."""
        shapes = self._shapes.items()
        return {p + n: TensorSpec(s, "float32") for p in self._prefixes for n, s in shapes}

    @cached_property
    def _saved_layout(self) -> Layout | None:
        held = self.shards(moments=False)
        return saved_layout(self._context, self._shapes, self._prefixes, held)


def _of_moment(moment: str, shard: Shard) -> Shard:
    return Shard(
        f"{moment}/{shard.name}",
        shard.box,
        f"{moment}/{shard.storage}",
        shard.offset,
        shard.strides,
    )


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
