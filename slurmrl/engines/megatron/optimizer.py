"""megatron-core's distributed optimizer over AdamW, and its shards as pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from slurmrl.config.schema.model import Optimizer
from slurmrl.engines.schedule import learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """This rank's elements ``first`` to ``last`` of a parameter, and their moments."""

    parameter: nn.Parameter
    first: int
    last: int
    weight: Tensor
    """float32"""
    moments: dict[str, Tensor]


class ShardedAdamW:
    """Decay acts on matrices only. Each rank of a parameter's copies updates a part of it.

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
        self.total_steps = total_steps
        self.steps = 0
        config = OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
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
        for optimizer in made:
            _start(optimizer.optimizer)

    @property
    def learning_rate(self) -> float:
        """Rate of the coming step."""
        return learning_rate(self.options, self.steps, self.total_steps)

    def step(self) -> dict[str, float]:
        """Update the parameters from the gradients that megatron has reduced; leaves them as they
        are where the gradient is not finite."""
        self._all.prepare_grads()
        norm = float(self._all.get_grad_norm())
        stats = {"grad_norm": norm, "lr": self.learning_rate}
        if not isfinite(norm):
            return {**stats, "skipped": 1.0}
        for group in self._all.param_groups:
            group["lr"] = self.learning_rate
        limit = self.options.gradient_clip
        if limit is not None:
            for optimizer in self._all.chained_optimizers:
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), limit, norm)
        self._all.step_with_ready_grads()
        self.steps += 1
        return {**stats, "skipped": 0.0}

    def shards(self) -> Iterator[Shard]:
        """All shards of this rank, in a fixed order."""
        for optimizer in self._all.chained_optimizers:
            for whole, main in _pairs(optimizer):
                found = optimizer._get_model_param_range_map(whole)["param"]
                state = optimizer.optimizer.state[main]
                moments = {name: state[name] for name in MOMENTS}
                yield Shard(whole, found.start, found.end, main.detach(), moments)

    def continue_from(self, steps: int) -> None:
        """The moments are those of after ``steps`` steps."""
        self.steps = steps
        for optimizer in self._all.chained_optimizers:
            _set_steps(optimizer.optimizer, steps)


def _optimizer(
    config: OptimizerConfig,
    chunks: Sequence[DistributedDataParallel],
    groups: ProcessGroupCollection,
    *,
    experts: bool,
) -> DistributedOptimizer:
    parameters = [p for chunk in chunks for p in _parameters(chunk, experts=experts)]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], **_group(1.0, experts)},
            {
                "params": [p for p in parameters if p.dim() <= 1],
                "weight_decay": 0.0,
                **_group(0.0, experts),
            },
        ],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )
    buffers = [chunk.expert_parallel_buffers if experts else chunk.buffers for chunk in chunks]
    optimizer = DistributedOptimizer(
        adam,
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


def _group(decay: float, experts: bool) -> dict[str, Any]:
    """What megatron looks up in a group of parameters."""
    return {"wd_mult": decay, "lr_mult": 1.0, "is_expert_parallel": experts}


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


def _start(adam: torch.optim.Optimizer) -> None:
    """Moments from the start, so that a model that has made no step can be saved."""
    for group in adam.param_groups:
        for main in group["params"]:
            adam.state[main].update(
                step=torch.zeros(()), **{name: torch.zeros_like(main) for name in MOMENTS}
            )


def _set_steps(adam: torch.optim.Optimizer, steps: int) -> None:
    for state in adam.state.values():
        state["step"].fill_(float(steps))
