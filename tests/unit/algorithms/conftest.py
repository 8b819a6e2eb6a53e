"""A small PPO setup in one process: real engines, an artificial vocabulary, a simple reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from slurmrl.algorithms.base import CallContext, CallResult
from slurmrl.algorithms.policy.actor import ActorInterface
from slurmrl.algorithms.policy.advantages import Estimates, estimate
from slurmrl.algorithms.policy.baselines import CriticInterface
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.rollout_calls import RolloutInterface
from slurmrl.algorithms.scalars import PolicyScalars
from slurmrl.config.schema import Config, Dataset, Model, Optimizer, Rollout
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.plan.settings import Settings
from slurmrl.tensors.parallel.groups import ParallelContext
from slurmrl.tensors.parallel.topology import ProcessTopology
from tests.support import trials

VOCABULARY, END, WANTED = 12, 1, 7
ARCHITECTURE = {**trials.ARCHITECTURE, "vocab_size": VOCABULARY, "tie_word_embeddings": False}


@dataclass
class World:
    """The models ``actor``, ``critic`` and ``ref`` start from the same weights."""

    ppo: PolicyGradient
    settings: Settings
    actor: FSDPEngine
    critic: FSDPEngine
    ref: FSDPEngine
    seed: int
    stops: tuple[int, ...] = (END,)

    def context(self, step: int, batch: tuple[str, ...] = (), **scalars: float) -> CallContext:
        tokenizer = cast(Any, None)
        given = PolicyScalars(self.ppo).values() | scalars
        return CallContext(step, self.seed, given, tokenizer, self.settings, self.stops, batch)

    def rollout(
        self, step: int, prompts: int = 48, ref: FSDPEngine | None = None
    ) -> SequenceSample:
        """Return completions with rewards, reference log-probabilities and values."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        ids = torch.randint(2, VOCABULARY, (3 * prompts,), generator=generator)
        names = [f"{step}-{index}" for index in range(prompts)]
        sample = SequenceSample.from_default([3] * prompts, names, {"prompt_ids": ids})
        context = self.context(step)
        take(sample, RolloutInterface().generate(self.actor, sample, context))
        sample.update_(
            SequenceSample.from_default([1] * prompts, names, {"rewards": share_wanted(sample)})
        )
        take(sample, ActorInterface().inference(ref or self.ref, sample, context))
        take(sample, CriticInterface().inference(self.critic, sample, context))
        return sample

    def estimate(self, sample: SequenceSample, kl_coef: float = 0.0) -> Estimates:
        context = self.context(0, sample.ids, kl_coef=kl_coef)
        return estimate(sample, context, self.actor.all_reduce_sum)

    def train_actor(self, sample: SequenceSample, step: int, kl_coef: float) -> dict[str, float]:
        context = self.context(step, sample.ids, kl_coef=kl_coef)
        return means(ActorInterface().train_step(self.actor, sample, context))

    def train_critic(self, sample: SequenceSample, step: int, kl_coef: float) -> dict[str, float]:
        context = self.context(step, sample.ids, kl_coef=kl_coef)
        return means(CriticInterface().train_step(self.critic, sample, context))


def take(sample: SequenceSample, result: CallResult) -> None:
    assert result.sample is not None
    sample.update_(result.sample)


def means(result: CallResult) -> dict[str, float]:
    return {name: total / count for name, (total, count) in result.stats.items()}


def share_wanted(sample: SequenceSample) -> torch.Tensor:
    """Return as reward the share of the wanted token among a completion's tokens."""
    rows = zip(
        sample.tensor("input_ids").split(sample.item_lengths("input_ids")),
        sample.tensor("prompt_mask").split(sample.item_lengths("input_ids")),
        strict=True,
    )
    return torch.stack([(ids[~prompt] == WANTED).float().mean() for ids, prompt in rows])


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world() -> MakeWorld:
    def make(seed: int = 1, *, ref_seed: int | None = None, **options: Any) -> World:
        lr = {"actor": 1e-2, "critic": 3e-3, "ref": 0.0}
        ppo = PolicyGradient(batch_size=48, **{"n_minibatches": 2, **options})
        config = Config(
            experiment="test",
            total_steps=1,
            algorithm={"name": "ppo"},
            actor=Model(architecture=ARCHITECTURE),
            rollout=Rollout(max_new_tokens=6),
            dataset=Dataset(type="prompt", path="unused"),
        )
        engines = {
            role: FSDPEngine(
                role,
                Model(architecture=ARCHITECTURE, optimizer=Optimizer(lr=lr[role])),
                head="value" if role == "critic" else "lm",
                trained=role != "ref",
                context=alone(role),
                seed=seed if role != "ref" or ref_seed is None else ref_seed,
                total_steps=1000,
                source=None,
            )
            for role in lr
        }
        settings = Settings(config, ppo, cast(Any, None))
        return World(ppo, settings, seed=seed, **engines)

    return make


def alone(role: str) -> ParallelContext:
    """A model on one rank, without process groups."""
    topology = ProcessTopology(("dp",), (1,))
    return ParallelContext(role, torch.device("cpu"), 0, (0,), topology, {})
