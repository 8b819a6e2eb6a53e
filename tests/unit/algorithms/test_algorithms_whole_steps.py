"""Whole steps of policy gradients with random settings, on ranks, against loops over single tokens
(tests/support/policy_reference.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.actor import ActorInterface, RecomputeInterface
from slurmrl.algorithms.policy.baselines import CriticInterface
from slurmrl.algorithms.policy.presets import PRESETS
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.scalars import PolicyScalars
from slurmrl.config.schema import Logging, Rollout
from tests.support.policy_batches import VOCABULARY, Batch
from tests.support.policy_reference import Prompt, Reference
from tests.support.policy_updates import ActorStep, CriticStep
from tests.support.tabular_engine import RankThreads, TabularEngine
from tests.unit.algorithms.conftest import means

LIMIT, LR = 6, 0.7
TOLERANCE = 1e-6
STEPS_OF_A_PRESET = 6


def settings_of(name: str, random: Random) -> PolicyGradient:
    """Return the preset with a random valid combination of changed settings."""
    while True:
        values: dict[str, Any] = {
            "n_minibatches": random.choice((1, 2, 3)),
            "n_epochs": random.choice((1, 1, 2)),
            "shuffle_minibatches": random.random() < 0.3,
            "mask_truncated": random.random() < 0.4,
        }
        for setting, choices in CHOICES.items():
            if random.random() < 0.25:
                values[setting] = random.choice(choices)
        if random.random() < 0.3:
            values |= {name: random.choice(choices) for name, choices in REJECTION.items()}
        try:
            made = PolicyGradient(name=cast(Any, name), batch_size=8, **values)
        except ValidationError:
            continue
        if (made.advantage[:5], made.advantage_std) != ("batch", "group"):  # divides by almost 0
            return made


CHOICES: dict[str, Sequence[Any]] = {
    "objective": ("clip", "unclipped", "cispo", "sapo"),
    "ratio": ("token", "sequence", "sequence_token"),
    "clip_ratio": (0.05, 0.3, 1.5),
    "clip_ratio_high": (0.1, 0.4),
    "dual_clip": (1.1, 2.0),
    "m2_threshold": (0.01, 0.1),
    "aggregation": ("tokens", "sequences", "constant"),
    "aggregation_length": (1, 5),
    "entropy_coef": (0.2,),
    "advantage": (
        *("gae", "group", "leave_one_out", "greedy", "batch", "batch_leave_one_out", "none"),
    ),
    "advantage_std": ("none", "group", "batch"),
    "std_unbiased": (False,),
    "std_epsilon": (0.0, 0.1),
    "discount": (0.8,),
    "gae_lambda": (0.7,),
    "normalize_advantages": (True, False),
    "reward_bias": (0.25,),
    "reward_scaling": (-2.0, 0.5),
    "reward_clip": (0.5, None),
    "mask_no_eos_with_zero": (True,),
    "overlong_buffer": (1, 4),
    "overlong_penalty": (0.5,),
    "kl": (
        {"coef": 0.0},
        {"where": "reward", "estimator": "k1"},
        {"where": "reward", "estimator": "k2"},
        {"where": "loss", "estimator": "k2"},
        {"where": "loss", "estimator": "k3"},
    ),
    "early_stop_importance_ratio": (None, 1.02),
    "early_stop_kl": (0.05,),
    "recompute_logprobs": (True,),
    "correction": ("weight", "truncate", "mask"),
    "correction_level": ("token", "sequence", "geometric"),
    "correction_upper": (1.1,),
    "correction_lower": (0.8,),
    "value_clip": (0.1, None),
    "value_huber_delta": (0.3,),
    "value_norm": ("none", "exponential", "moving"),
    "value_norm_decay": (0.9,),
    "critic_warmup_steps": (1,),
}

REJECTION: dict[str, Sequence[Any]] = {
    "reject_by": ("ratio", "k1", "k2", "k3"),
    "reject_over": ("token", "mean", "sum", "max"),
    "reject_upper": (None, 0.05, 1.2),
    "reject_lower": (0.02, 0.8),
}
"""They have no meaning one without the others."""


@dataclass
class RankResult:
    stats: dict[str, float]
    tables: dict[str, torch.Tensor]
    trained_on: dict[str, list[tuple[str, ...]]]


@dataclass
class Case:
    """A step with random settings and data."""

    algorithm: PolicyGradient
    batch: Batch
    rollout: Rollout
    tables: dict[str, torch.Tensor]
    scalars: dict[str, float]
    parts: list[list[int]]
    """The items of each rank."""
    budgets: list[int]

    @staticmethod
    def draw(name: str, seed: int) -> Case:
        random = Random(f"{name} {seed}")
        generator = torch.Generator().manual_seed(seed)
        algorithm = settings_of(name, random)
        rollout = Rollout(max_new_tokens=LIMIT, temperature=random.choice((1.0, 0.7)))
        tables = {
            role: torch.randn(*shape, generator=generator, dtype=torch.float64)
            for role, shape in {"actor": (VOCABULARY, VOCABULARY), "critic": (VOCABULARY,)}.items()
        }
        batch = Batch.draw(algorithm, random, tables["actor"], rollout.temperature, LIMIT)
        size = random.choice((1, 2, 3))
        parts: list[list[int]] = [[] for _ in range(size)]
        for item in range(len(batch.prompts)):
            random.choice(parts).append(item)
        scalars = {"kl_coef": 0.2}
        if algorithm.value_norm != "none" and random.random() < 0.5:
            scalars |= {
                "value_norm_weight": 0.6,
                "value_norm_mean": 0.2,
                "value_norm_square": 0.5,
            }
        given = PolicyScalars(algorithm).values() | scalars
        budgets = [random.choice((4, 12, 1000)) for _ in parts]
        return Case(algorithm, batch, rollout, tables, given, parts, budgets)

    def run(self) -> list[RankResult]:
        ranks = RankThreads(len(self.parts))
        return ranks.run(lambda rank: self._on_rank(ranks, rank))

    def _on_rank(self, ranks: RankThreads, rank: int) -> RankResult:
        config = SimpleNamespace(rollout=self.rollout, logging=Logging(samples=2))
        settings: Any = SimpleNamespace(algorithm=self.algorithm, config=config)
        context = CallContext(1, 1, self.scalars, settings, settings, (), self.batch.sample.ids)
        own = self.batch.sample.take(self.parts[rank])
        engines: dict[str, Any] = {
            role: TabularEngine(role, ranks, rank, table, lr=LR, budget=self.budgets[rank])
            for role, table in self.tables.items()
        }
        stats: dict[str, float] = {}
        if self.recomputes:
            result = RecomputeInterface().inference(engines["actor"], own, context)
            assert result.sample is not None
            own.update_(result.sample)
            stats |= {k: v for k, v in means(result).items() if k.startswith("mismatch/")}
        stats |= means(ActorInterface().train_step(engines["actor"], own, context))
        if self.algorithm.uses_critic:
            stats |= means(CriticInterface().train_step(engines["critic"], own, context))
        return RankResult(
            stats,
            {role: engine.table.detach() for role, engine in engines.items()},
            {role: engine.trained_on for role, engine in engines.items()},
        )

    @property
    def recomputes(self) -> bool:
        return bool(self.algorithm.recompute_logprobs) or self.algorithm.compares

    def reference(self) -> Reference:
        return Reference(
            self.algorithm,
            self.batch.prompts,
            LIMIT,
            self.rollout.temperature,
            self.scalars["kl_coef"],
            self.recomputes,
        )

    def minibatches(self, results: Sequence[RankResult], role: str) -> list[list[Prompt]]:
        """Return the prompts of each started update, over all ranks."""
        updates = zip(*(result.trained_on[role] for result in results), strict=True)
        names = [{name.partition("#")[0] for ids in update for name in ids} for update in updates]
        return [[p for p in self.batch.prompts if p.name in chosen] for chosen in names]


@pytest.mark.parametrize("name", PRESETS)
def test_policy_gradient_steps_equal_loops_over_single_tokens(name: str) -> None:
    """Compares weights and metrics after a step with random settings: minibatches and epochs,
    groups of different sizes, failed episodes, several turns, micro-batches, and ranks without
    items.
    """
    for seed in range(STEPS_OF_A_PRESET):
        check(Case.draw(name, seed), f"{name} {seed}")


def check(case: Case, about: str) -> None:
    results = case.run()
    reference = case.reference()
    warms_up = case.algorithm.critic_warmup_steps >= 1
    table = case.tables["actor"].clone().requires_grad_()
    actor = ActorStep(reference, table, LR, warms_up)
    minibatches = case.minibatches(results, "actor")
    actor.run(minibatches)
    assert actor.made + actor.stopped == len(minibatches), about
    check_order(case, minibatches, stopped=actor.stopped)
    tables, wanted = {"actor": actor.table}, dict(actor.stats)
    if case.algorithm.uses_critic:
        names = ("value_norm_weight", "value_norm_mean", "value_norm_square")
        moments = cast(Any, tuple(case.scalars.get(each, 0.0) for each in names))
        table = case.tables["critic"].clone().requires_grad_()
        critic = CriticStep(reference, table, LR, moments)
        minibatches = case.minibatches(results, "critic")
        critic.run(minibatches)
        check_order(case, minibatches)
        tables["critic"] = critic.table
        wanted |= critic.stats
    for result in results:
        assert not (wrong := differences(result.stats, wanted)), (about, wrong, case.algorithm)
        for role, expected in tables.items():
            error = float((result.tables[role] - expected.detach()).abs().max())
            assert error < TOLERANCE, (about, role, error, case.algorithm)


def differences(found: dict[str, float], wanted: dict[str, float]) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (found.get(name), wanted.get(name)) for name in found | wanted}
    return {
        name: (a, b)
        for name, (a, b) in pairs.items()
        if a is None or b is None or not isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    }


def check_order(
    case: Case, minibatches: Sequence[Sequence[Prompt]], *, stopped: bool = False
) -> None:
    """Check that an epoch trains on each prompt once, in even minibatches."""
    trained = [
        prompt.name
        for prompt in case.batch.prompts
        if any(map(case.reference().trained, prompt.completions))
    ]
    seen = [p.name for minibatch in minibatches for p in minibatch]
    if not stopped:
        counted = [name for name in seen if name in trained]
        assert sorted(counted) == sorted(trained * case.algorithm.n_epochs)
