"""Functions that ranks run in the tests of transformers' models on tensor ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.models.parallel.split import Axis
from tests.distributed.engines.cases import Setup, batch, denominator, loss, make
from tests.support.families import tiny

ATTENTION = re.compile(r"attn|attention")
LENGTHS = (5, 9, 2)
ROUNDING = 5e-7
"""Largest difference of two gradients that is rounding. Some gradients are nothing else: routers
that choose one expert, whose weight is then 1."""


def made(family: str) -> HFModel:
    config = HFConfig.from_hf({**tiny(family), "initializer_range": 0.1})
    return HFModel(config, "lm", source=None, seed=3, dtype=torch.float32)


def computed(model: HFModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probabilities of a batch, and the gradients of their weighted sum."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(32, (sum(LENGTHS),), generator=generator)
    cu_seqlens = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    logp, entropy = model.logprobs(model(ids, cu_seqlens, max(LENGTHS)), ids, cu_seqlens, 0.8)
    weights = torch.randn(len(ids), generator=generator)
    torch.autograd.backward((weights * logp).sum() + entropy.sum())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logp.detach(), gradients


def differences(families: Sequence[str]) -> list[tuple[str, float, float, bool]]:
    """Return the largest absolute difference of log-probabilities from the whole model, the largest
    relative difference of gradients, and whether the ranks share attention.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = Axis(rank, size, dist.new_group(list(range(size))))
    found = []
    for family in families:
        wanted, whole = computed(made(family))
        model = made(family)
        model.split(axis)
        split = model.tensor
        assert split is not None
        logp, own = computed(model)
        assert own.keys() == whole.keys()
        worst = 0.0
        for name, gradient in own.items():
            if split.sums(name):
                dist.all_reduce(gradient)
            part = whole[name][split.box(name, split.whole[name], rank).slices]
            scale = float(whole[name].abs().max()) or 1.0
            apart = torch.nan_to_num((gradient - part).abs(), inf).max().item()
            worst = max(worst, (apart - ROUNDING) / scale)
        both = torch.tensor([float((logp - wanted).abs().max()), worst])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        shared = any(ATTENTION.search(name) for name in split.dims)
        found.append((family, float(both[0]), float(both[1]), shared))
    return found


def copies_after_training(setup: Setup, *, deterministic: bool) -> dict[str, Tensor]:
    """Return the replicated weights of this rank after a step in which each rank's gradients differ
    slightly.
    """
    engine: Any = make(setup)
    shards, split = engine._shards, engine._placing.tensor
    exact = shards.take_gradients

    def rounded() -> dict[str, Tensor]:
        return {name: each * (1 + 1e-3 * dist.get_rank()) for name, each in exact().items()}

    shards.take_gradients = rounded
    torch.use_deterministic_algorithms(deterministic)
    try:
        engine.train_batch(batch(), loss, denominator(batch()))
    finally:
        torch.use_deterministic_algorithms(False)
    weights = shards.local().items()
    return {name: values for name, values in weights if split.copies(name) == split.ranks}
