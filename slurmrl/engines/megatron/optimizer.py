"""Wrap our optimizers in megatron-core's distributed optimizer; describe their state as shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from slurmrl.config.schema.model import Optimizer
from slurmrl.engines.optimizers import OPTIMIZERS, ShardOptimizer


@dataclass(frozen=True)
class OptimizerShard:
    """This rank's elements ``first`` to ``last`` of a parameter, and their moments."""

    parameter: nn.Parameter
    first: int
    last: int
    weight: Tensor
    """float32"""
    moments: dict[str, Tensor]


class Inner:
    """The inner optimizer of megatron's class: one of ours, on megatron's shards."""

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
    """Each rank of a parameter's copies updates a part of it.

    megatron's own factory is not used: it gathers objects over the whole process world.
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
        """Update the parameters from the gradients that megatron has reduced. Skips the update if
        the gradient is not finite or the step is ``vetoed``."""
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
        """All shards of this rank, in a fixed order."""
        for optimizer, inner in zip(self._all.chained_optimizers, self._inner, strict=True):
            for name, whole in inner.wholes.items():
                part = optimizer._get_model_param_range_map(whole)["param"]
                weight = inner.shards[name].detach()
                yield OptimizerShard(whole, part.start, part.end, weight, inner.moments(name))

    def continue_from(self, steps: int) -> None:
        """Set the step count to that of the loaded moments."""
        for inner in self._inner:
            inner.ours.steps = steps


def _optimizer(
    config: OptimizerConfig,
    chunks: Sequence[DistributedDataParallel],
    groups: ProcessGroupCollection,
    *,
    experts: bool,
) -> DistributedOptimizer:
    """Return megatron's class around a placeholder, which the caller replaces. (For its own
    checkpoints, which are not used, megatron's class accepts AdamW only.)"""
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
    """Parameters of which this rank has a shard, and the float32 shard."""
    for wholes, mains in (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    ):
        for whole_group, main_group in zip(wholes, mains, strict=True):
            yield from zip(whole_group, main_group, strict=True)
