"""Functions that ranks, and one process for comparison, run in the test of several models with
separate layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from slurmrl.algorithms.base import CallContext, Stats
from slurmrl.algorithms.policy.actor import ActorInterface
from slurmrl.algorithms.policy.baselines import CriticInterface
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.config.schema import Logging
from slurmrl.config.schema.roles import Model
from slurmrl.config.schema.rollout import Rollout
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import ENGINES
from slurmrl.engines.base import TrainEngine
from slurmrl.tensors.parallel.groups import build
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


def context(step: int, batch: tuple[str, ...]) -> CallContext:
    """Return the context of PPO's calls: one update per step, with all terms of the losses. Steps
    count from 0.
    """
    ppo = PolicyGradient(
        batch_size=10, n_minibatches=1, gae_lambda=0.95, discount=0.99, entropy_coef=0.01
    )
    rollout, logging = Rollout(max_new_tokens=6), Logging(samples=0)
    config = SimpleNamespace(rollout=rollout, logging=logging, evaluation=None)
    settings: Any = SimpleNamespace(algorithm=ppo, config=config)
    tokenizer: Any = None
    return CallContext(step + 1, 5, {"kl_coef": ppo.kl.coef}, tokenizer, settings, (4,), batch)


def inference(role: str, engine: Any, sample: SequenceSample, about: CallContext) -> SequenceSample:
    """The outputs of a role's model for a batch before any training."""
    if role == "reward":
        values = engine.forward(sample.only(["input_ids"]))["values"]
        last = sample.cu_seqlens("input_ids")[1:].long() - 1
        return SequenceSample.from_default([1] * sample.bs, sample.ids, {"rewards": values[last]})
    if role == "actor":
        outputs = engine.forward(sample.only(["input_ids"]))
        lengths = dict.fromkeys(outputs, sample.lengths["input_ids"])
        return SequenceSample(sample.ids, lengths, data=dict(outputs))
    interface = ActorInterface() if role == "ref" else CriticInterface()
    made = interface.inference(engine, sample, about).sample
    assert made is not None
    return made


@dataclass(frozen=True)
class Step:
    made: dict[str, SequenceSample]
    """The results of each role's inference for this rank's items."""
    stats: dict[str, Stats]
    """Statistics of each role's training."""


def replay(
    engines: Mapping[str, Any],
    rollouts: Sequence[SequenceSample],
    trained: Callable[[str, int], None] = lambda role, number: None,
) -> list[Step]:
    """Run PPO's calls on each rollout, so that the outputs of all models reach the losses. All
    models but the one that computes are offloaded; ``trained`` is called after each update.
    """
    found = []
    for engine in engines.values():
        engine.offload()
    for number, rollout in enumerate(rollouts):
        batch, about = rollout.only(rollout.keys), context(number, rollout.ids)
        made, stats = {}, {}
        for role in ("ref", "reward", "critic", "actor"):
            engine = engines[role]
            engine.onload()
            made[role] = inference(role, engine, batch.take(share(engine)), about)
            engine.offload()
            whole = everyone(engine, made[role])
            batch.update_(whole.take([whole.ids.index(name) for name in batch.ids]))
        for role, interface in (("actor", ActorInterface()), ("critic", CriticInterface())):
            engine = engines[role]
            engine.onload()
            stats[role] = interface.train_step(engine, batch.take(share(engine)), about).stats
            trained(role, number)
            engine.offload()
        found.append(Step(made, stats))
    return found


def share(engine: Any) -> list[int]:
    rank, size = engine.context.dp_rank, engine.context.dp_size
    return list(range(rank, 10, size))


def everyone(engine: Any, own: SequenceSample) -> SequenceSample:
    """Collect the results of all ranks of a model, each item once. Other models of this worker have
    the items on other ranks.
    """
    if not dist.is_initialized():
        return own
    found: list[SequenceSample | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own if engine.context.is_leader else None)
    return SequenceSample.gather([one for one in found if one is not None])


def run(
    settings: Mapping[str, Any], folder: Path, rollouts: Sequence[SequenceSample]
) -> list[Step]:
    """The replay on this rank; the states after each step are saved under its number."""
    install()
    contexts = build(ROLES, rank=dist.get_rank(), device=torch.device("cpu"))
    engines: dict[str, TrainEngine] = {}
    for role in ROLES:
        engines[role.role] = ENGINES.load(role.engine)(
            role.role,
            Model(**{**settings, "architecture": None}),
            head=role.head,
            trained=role.trained,
            context=contexts[role.role],
            seed=role.seed,
            total_steps=len(rollouts),
            source=folder / role.role,
        )

    def saved(role: str, number: int) -> None:
        engines[role].save(folder / str(number))

    return replay(engines, rollouts, saved)
