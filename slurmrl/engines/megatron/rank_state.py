"""Parameters and optimizer state of a rank by shard, for checkpoints, moves and offloading.

megatron-core's distributed optimizer wraps slurmrl's optimizers.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from slurmrl.config.schema.roles import Optimizer
from slurmrl.engines.host import HostCopies
from slurmrl.engines.megatron.parts import Parts, part_of_flat
from slurmrl.engines.optimizers import OPTIMIZERS, ShardOptimizer
from slurmrl.engines.role_weights import BoxReader, fill_saved, random_entries
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.hf import as_array
from slurmrl.models.shapes import constant_specs, parameter_shapes
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint, RoleSnapshot, ShardHeader
from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout import Layout, Shard, TensorSpec
from slurmrl.tensors.parallel.groups import ParallelContext

Held = dict[str, tuple[Tensor, list[Shard]]]
"""Mapping from a storage to its flat tensor and the shards in the tensor."""


class ModelState:
    """This rank's tensors, as views of the tensors of a model and its optimizer.

    ``chunks`` are the model chunks, which megatron's gradient buffers wrap if the model is trained.
    ``optimizer`` is None if the model is frozen.
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
        self._constant_specs = constant_specs(config)
        self._context = context
        self._parts = parts
        self._chunks = chunks
        self._optimizer = optimizer

    def weights(self) -> Held:
        """Return the parameters and constants, and the shards in them."""
        parameters = {
            name: (parameter.detach().view(-1), self._parts[name])
            for name, parameter in self._parameters().items()
        }
        return parameters | self._constants()

    def shards(self, *, moments: bool = True) -> Held:
        """Return the float32 weights that this rank updates, and their moments."""
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
        """Return all weights, updated float32 weights and moments."""
        # Do not merge the mappings: a float32 weight and its bfloat16 copy have the same name.
        return [tensor for tensor, _ in (*self.weights().values(), *self.shards().values())]

    def gradients(self) -> list[Tensor]:
        """Return the gradient buffers."""
        return [
            buffer.grad_data
            for chunk in self._chunks
            if isinstance(chunk, DistributedDataParallel)
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    @torch.no_grad()
    def fill(self, read: BoxReader) -> None:
        """Fill all weights with values of ``read``; padding becomes zero."""
        held = [*self.weights().values(), *self.shards(moments=False).values()]
        for target, shard in _targets(held):
            target.copy_(read(shard.name, shard.box).reshape(-1))

    def load(self, checkpoint: RoleCheckpoint) -> None:
        """Fill weights and moments from a checkpoint; padding becomes zero."""
        checkpoint.check(self._specs)
        for target, shard in _targets([*self.weights().values(), *self.shards().values()]):
            fill_saved(target.view(shard.box.size), checkpoint, shard.name, shard.box)

    def snapshot(self, role: str, step: int, host: HostCopies | None) -> RoleSnapshot:
        """Return this rank's part of a checkpoint. Collective.

        With ``host``, tensors are copied to this host memory now. Otherwise, tensors are read when
        the snapshot is written. The random state is always read now.
        """
        held = {name: tensor for name, (tensor, _) in self._saved().items()}
        if host is not None:
            held = dict(host.copy(held))
        arrays = (
            TensorEntry(name, TensorSpec(tuple(tensor.shape), "float32"), partial(as_array, tensor))
            for name, tensor in held.items()
        )
        header = ShardHeader(role, self._context.rank, self._context.size, step)
        return RoleSnapshot(header, (*arrays, *random_entries()), self._saved_layout)

    def _saved(self, *, moments: bool = True) -> Held:
        """Return the tensors of a checkpoint."""
        return self.shards(moments=moments) | self._constants()

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the names of their storages."""
        return {
            f"{index}.{name}": parameter
            for index, chunk in enumerate(self._chunks)
            for name, parameter in getattr(chunk, "module", chunk).named_parameters()
        }

    def _constants(self) -> Held:
        """Return the tensors that no step changes."""
        held = {
            f"{index}.{name}": values
            for index, chunk in enumerate(self._chunks)
            for name, values in getattr(chunk, "module", chunk).named_buffers()
        }
        return {n: (values, self._parts[n]) for n, values in held.items() if n in self._parts}

    @property
    def _prefixes(self) -> tuple[str, ...]:
        """Prefixes of the names of weights and moments in a checkpoint."""
        assert self._optimizer is not None
        return ("", *(f"{moment}/" for moment in self._optimizer.moments))

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        """Specs of the weights, moments and constants of a checkpoint."""
        shapes = self._shapes.items()
        specs = {p + n: TensorSpec(s, "float32") for p in self._prefixes for n, s in shapes}
        return specs | self._constant_specs

    @cached_property
    def _saved_layout(self) -> Layout | None:
        held = self._saved(moments=False)
        specs = {name: TensorSpec(shape, "float32") for name, shape in self._shapes.items()}
        return saved_layout(
            self._context, specs | self._constant_specs, self._prefixes, held, self._constant_specs
        )


def _of_moment(moment: str, shard: Shard) -> Shard:
    return Shard(
        f"{moment}/{shard.name}",
        shard.box,
        f"{moment}/{shard.storage}",
        shard.offset,
        shard.strides,
    )


def _targets(held: Iterable[tuple[Tensor, list[Shard]]]) -> Iterator[tuple[Tensor, Shard]]:
    """Yield each shard with its flat part of the tensor; set the tensor's padding to zero."""
    for tensor, shards in held:
        if sum(shard.box.count for shard in shards) < tensor.numel():
            tensor.zero_()
        for shard in shards:
            yield tensor[shard.offset : shard.offset + shard.box.count], shard


def saved_layout(
    context: ParallelContext,
    specs: Mapping[str, TensorSpec],
    prefixes: Sequence[str],
    held: Held,
    constants: Container[str] = (),
) -> Layout | None:
    """Return the layout of a checkpoint on the model's first rank; None on other ranks. Collective.

    ``held`` are the weights that this rank updates and the ``constants``. Moments are placed like
    their weights; constants have no moments. Ranks exchange their shards, because only megatron on
    each rank knows how its buffers divide the weights.
    """
    own = [shard.to_json() for _, shards in held.values() for shard in shards]
    texts = _gathered(json.dumps([context.rank, own]).encode(), context)
    if texts is None:
        return None
    rows = dict(map(json.loads, texts))
    weights = Layout.of(
        specs,
        [[Shard.from_json(values) for values in rows[rank]] for rank in range(context.size)],
    )
    names = {
        prefix + name: name
        for prefix in prefixes
        for name in specs
        if not prefix or name not in constants
    }
    return Layout(
        {full: weights.tensors[name] for full, name in names.items()},
        {full: weights.holders[name] for full, name in names.items()},
        context.size,
    )


def _gathered(content: bytes, context: ParallelContext) -> list[bytes] | None:
    """Return the contents of all ranks on the model's first rank; None on other ranks."""
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


@dataclass(frozen=True)
class OptimizerShard:
    """This rank's elements ``first`` to ``last`` of a parameter, and their moments."""

    parameter: nn.Parameter
    first: int
    last: int
    weight: Tensor
    """The elements in float32."""
    moments: dict[str, Tensor]


class Inner:
    """Inner optimizer of megatron's class: it runs a slurmrl optimizer on megatron's shards."""

    def __init__(
        self, distributed: DistributedOptimizer, options: Optimizer, total_steps: int
    ) -> None:
        self.param_groups = distributed.optimizer.param_groups
        pairs = {str(number): pair for number, pair in enumerate(_pairs(distributed))}
        self.wholes = {name: whole for name, (whole, _) in pairs.items()}
        self.shards = {name: shard for name, (_, shard) in pairs.items()}
        kind = OPTIMIZERS[options.name]
        matrices = {name for name, whole in self.wholes.items() if whole.dim() > 1}
        self.ours: ShardOptimizer = kind(options, total_steps, self.shards, matrices)

    def step(self) -> None:
        all_gradients = {name: shard.grad for name, shard in self.shards.items()}
        gradients = {name: grad for name, grad in all_gradients.items() if grad is not None}
        self.ours.step(self.shards, gradients)

    def moments(self, name: str) -> dict[str, Tensor]:
        return {moment: values[name] for moment, values in self.ours.moments.items()}


class ShardedOptimizer:
    """Optimizer that divides each parameter's update over the ranks with a copy.

    megatron's own factory is not used, because it gathers objects over the whole process world.
    """

    def __init__(
        self,
        options: Optimizer,
        total_steps: int,
        chunks: Sequence[DistributedDataParallel],
        groups: ProcessGroupCollection,
        dtype: str,
    ) -> None:
        self.options = options
        config = OptimizerConfig(
            bf16=dtype == "bfloat16",
            params_dtype=getattr(torch, dtype),
            use_distributed_optimizer=True,
            clip_grad=options.gradient_clip or 0.0,
        )
        made = [
            _optimizer(config, chunks, groups, experts=experts)
            for experts in (False, True)
            if any(_parameters(chunk, experts=experts) for chunk in chunks)
        ]
        self._all = ChainedOptimizer(made)
        self._inner = [Inner(optimizer, options, total_steps) for optimizer in made]
        for optimizer, inner in zip(made, self._inner, strict=True):
            optimizer.optimizer = inner

    @property
    def steps(self) -> int:
        """Number of optimizer steps taken."""
        return self._inner[0].ours.steps

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments of each parameter."""
        return self._inner[0].ours.names

    def step(self, *, vetoed: bool) -> dict[str, float]:
        """Update the parameters from the gradients that megatron has reduced.

        Skip the update if the gradient is not finite or the step is ``vetoed``.
        """
        self._all.prepare_grads()
        norm = float(self._all.get_grad_norm())
        rate = self._inner[0].ours.learning_rate
        stats = {"grad_norm": norm, "lr": rate, "vetoed": float(vetoed)}
        if vetoed or not isfinite(norm):
            return {**stats, "skipped": float(not isfinite(norm))}
        limit = self.options.gradient_clip
        if limit is not None:
            for optimizer in self._all.chained_optimizers:
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), limit, norm)
        self._all.step_with_ready_grads()
        return {**stats, "skipped": 0.0}

    def shards(self) -> Iterator[OptimizerShard]:
        """Yield all shards of this rank in a fixed order."""
        for optimizer, inner in zip(self._all.chained_optimizers, self._inner, strict=True):
            for name, whole in inner.wholes.items():
                part = optimizer._get_model_param_range_map(whole)["param"]
                weight = inner.shards[name].detach()
                yield OptimizerShard(whole, part.start, part.end, weight, inner.moments(name))

    def continue_from(self, steps: int) -> None:
        """Set the step count to the count of the loaded moments."""
        for inner in self._inner:
            inner.ours.steps = steps


def _optimizer(
    config: OptimizerConfig,
    chunks: Sequence[DistributedDataParallel],
    groups: ProcessGroupCollection,
    *,
    experts: bool,
) -> DistributedOptimizer:
    """Return megatron's optimizer around a placeholder, which the caller replaces.

    (The placeholder is AdamW, because the constructor accepts no other optimizer.)
    """
    parameters = [p for chunk in chunks for p in _parameters(chunk, experts=experts)]
    group = {"params": parameters, "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": experts}
    buffers = [chunk.expert_parallel_buffers if experts else chunk.buffers for chunk in chunks]
    optimizer = DistributedOptimizer(
        torch.optim.AdamW([group]),
        config,
        None,
        None,
        model_chunks=list(chunks),
        per_model_buffers=dict(enumerate(buffers)),
        data_parallel_group=groups.expt_dp if experts else groups.dp_cp,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )
    optimizer.grad_stats_parallel_group = groups.intra_dist_opt
    optimizer.tp_group = groups.tp
    return optimizer


def _parameters(chunk: DistributedDataParallel, *, experts: bool) -> list[nn.Parameter]:
    return [p for p in chunk.parameters() if getattr(p, "allreduce", True) is not experts]


def _pairs(optimizer: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter of which this rank has a shard, with its float32 shard."""
    for wholes, mains in (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    ):
        for whole_group, main_group in zip(wholes, mains, strict=True):
            yield from zip(whole_group, main_group, strict=True)
