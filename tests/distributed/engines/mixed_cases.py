"""What ranks do in the test of several models with layouts of their own in one worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.config.schema.model import Model
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import ENGINES
from slurmrl.engines.base import Engine, Outputs
from slurmrl.parallel.groups import build
from tests.distributed.engines.cases import batch, denominator
from tests.support.megatron_cpu import install


@dataclass(frozen=True)
class Role:
    """A model and its place; a placement of the plan."""

    role: str
    engine: str
    sizes: dict[str, int]
    head: str
    seed: int
    trained: bool = False
    sequence_parallel: bool = False
    virtual_pipeline: int = 1
    expert_sizes: dict[str, int] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(prod(self.sizes.values())))


ROLES = (
    Role("actor", "megatron", {"dp": 2, "tp": 2}, "lm", 7, trained=True, sequence_parallel=True),
    Role("critic", "megatron", {"pp": 2, "dp": 2}, "value", 8, trained=True),
    Role("ref", "fsdp", {"dp": 4}, "lm", 9),
    Role("reward", "fsdp", {"dp": 2, "tp": 2}, "value", 10),
)
STEPS = 2


def recorded(number: int) -> SequenceSample:
    """Rollouts as they were recorded: tokens, and the log-probabilities they were drawn with."""
    sample = batch(number)
    generator = torch.Generator().manual_seed(number)
    behaviour = -3.0 + torch.rand(sample.tensor("input_ids").shape[0], generator=generator)
    sample.update_(
        SequenceSample.from_default(
            [sum(lengths) for lengths in sample.lengths["input_ids"]],
            sample.ids,
            {"logprobs": behaviour},
        )
    )
    return sample


def loss(outputs: Outputs, sample: SequenceSample) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradients of the actor, squared errors of the critic."""
    if "values" in outputs:
        error = (outputs["values"] - sample.tensor("returns")).square()
        return error.sum(), {"error": error.detach().sum()}
    ratio = (outputs["logp"] - sample.tensor("logprobs")).exp()
    weights = sample.tensor("advantages")
    gains = torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights)
    return -gains.sum() - 0.01 * outputs["entropy"].sum(), {"ratio": ratio.detach().sum()}


def share(engine: Engine) -> list[int]:
    rank, size = engine.context.dp_rank, engine.context.dp_size
    return list(range(rank, 10, size))


def run(
    settings: Mapping[str, Any], folder: Path
) -> list[dict[str, tuple[list[int], Outputs, dict[str, float]]]]:
    """Every model's outputs, and the statistics of those that learn, step by step; their state
    after each step is saved."""
    install()
    contexts = build(ROLES, rank=dist.get_rank(), device=torch.device("cpu"))
    engines: dict[str, Engine] = {}
    for role in ROLES:
        engines[role.role] = ENGINES.load(role.engine)(
            role.role,
            Model(**{**settings, "architecture": None}),
            head=role.head,
            trained=role.trained,
            context=contexts[role.role],
            seed=role.seed,
            total_steps=STEPS,
            source=folder / role.role,
        )
    found = []
    for number in range(STEPS):
        results = {}
        for name in ("ref", "reward", "critic", "actor"):
            engine = engines[name]
            items = share(engine)
            engine.onload()
            results[name] = (items, engine.forward(recorded(number).take(items)), {})
            engine.offload()
        for name in ("actor", "critic"):
            engine = engines[name]
            sample = recorded(number).take(share(engine))
            engine.onload()
            stats = engine.train_batch(sample, loss, denominator(sample))
            results[name] = (*results[name][:2], stats)
            engine.save(folder / str(number))
            engine.offload()
        found.append(results)
    return found
