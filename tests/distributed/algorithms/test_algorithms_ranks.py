"""A PPO step on two ranks has the metrics and updates of one rank."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.actor import ActorInterface, RecomputeInterface
from slurmrl.algorithms.policy.baselines import CriticInterface
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.scalars import PolicyScalars
from slurmrl.config.schema import Config, Dataset, Model, Optimizer
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import ENGINES
from slurmrl.engines.base import TrainEngine
from slurmrl.plan.model import ModelPlan
from slurmrl.plan.settings import Settings
from slurmrl.tensors.parallel.groups import build
from tests.pool import RankPool
from tests.support import megatron_cpu

HERE = "tests.distributed.algorithms.test_algorithms_ranks"
ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 12,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
PARTS = {1: [list(range(8))], 2: [[0, 1, 2, 5, 6, 7], [3, 4]], 3: [[0, 1, 2], [3, 4, 5, 6, 7], []]}
PAIRS = {1: [[0, 1, 2, 3]], 2: [[0, 1, 3], [2]]}
"""Items of each rank: uneven on purpose."""

OPTIONS: dict[str, Any] = {
    "n_minibatches": 3,
    "n_epochs": 2,
    "shuffle_minibatches": True,
    "m2_threshold": 0.002,
    "recompute_logprobs": True,
    "correction": "mask",
    "correction_level": "geometric",
    "correction_upper": 1.05,
    "correction_lower": 0.7,
    "value_norm": "moving",
}
"""Options whose results depend on all tokens of a minibatch, and minibatches of their own in each
epoch."""


def rollout() -> SequenceSample:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3 + index % 4) for index in range(8)]
    lengths = [prompt + response for prompt, response in shapes]
    total = sum(lengths)
    mask = [own for p, r in shapes for own in [True] * p + [False] * r]
    return SequenceSample.from_default(
        lengths,
        [str(index) for index in range(8)],
        {
            "input_ids": torch.randint(0, 12, (total,), generator=generator),
            "prompt_mask": torch.tensor(mask),
            "logprobs": -2.5 + 0.1 * torch.randn(total, generator=generator),
            "ref_logprobs": -2.5 + 0.1 * torch.randn(total, generator=generator),
            "values": torch.randn(total, generator=generator),
        },
        per_sequence={
            "rewards": torch.randn(8, generator=generator),
            "finished": torch.tensor([True, False] * 4),
        },
    )


def pairs() -> SequenceSample:
    """Return the same sequences as groups of two."""
    whole = rollout()
    lengths = {
        key: [[*rows[item], *rows[item + 1]] for item in range(0, 8, 2)]
        for key, rows in whole.lengths.items()
    }
    return SequenceSample(whole.ids[::2], lengths, data=whole.data)


def train(
    size: int, engine: str = "fsdp", *, grouped: bool = False, **options: Any
) -> tuple[dict[str, float], torch.Tensor]:
    """Return the statistics of one actor and one critic step, and the actor's outputs
    afterwards.
    """
    whole, parts = (pairs(), PAIRS) if grouped else (rollout(), PARTS)
    if engine == "megatron":
        megatron_cpu.install()
    model = Model(
        architecture=ARCHITECTURE,
        optimizer=Optimizer(lr=1e-3, eps=1e-3),
        max_tokens_per_microbatch=11,
    )
    ppo = PolicyGradient(batch_size=8, **options)
    config = Config(
        experiment="test",
        total_steps=1,
        algorithm={"name": "ppo"},
        actor=model,
        dataset=Dataset(type="prompt", path="unused"),
    )
    settings = Settings(config, ppo, cast(Any, None))
    about = ((), whole.ids)  # a step without generation
    scalars = PolicyScalars(ppo).values()
    context = CallContext(1, 1, scalars, cast(Any, None), settings, *about)
    heads = {"actor": "lm", "critic": "value"}
    plans = [
        ModelPlan(
            role=role,
            backend=f"{engine}:d{size}",
            engine=engine,
            sizes={"dp": size},
            ranks=tuple(range(size)),
            trained=True,
            head=cast(Any, head),
        )
        for role, head in heads.items()
    ]
    rank = dist.get_rank()
    contexts = build(plans, rank=rank, device=torch.device("cpu"))
    own = whole.take(parts[size][rank])
    stats: dict[str, float] = {}
    engines: dict[str, TrainEngine] = {}
    for plan, interface in zip(plans, (ActorInterface(), CriticInterface()), strict=True):
        engines[plan.role] = ENGINES.load(engine)(
            plan.role,
            model,
            head=plan.head,
            trained=True,
            context=contexts[plan.role],
            seed=1,
            total_steps=10,
            source=None,
        )
        if ppo.recompute_logprobs and plan.role == "actor":
            stats |= recompute(engines["actor"], own, context)
        result = interface.train_step(engines[plan.role], own, context)
        stats |= {name: total / count for name, (total, count) in result.stats.items()}
    after = engines["actor"].forward(rollout().only(["input_ids"]))["logp"]
    return stats, after


def recompute(engine: TrainEngine, own: SequenceSample, context: CallContext) -> dict[str, float]:
    """Add the recomputed log-probabilities. Return the statistics, added up as the master does."""
    result = RecomputeInterface().inference(engine, own, context)
    assert result.sample is not None
    own.update_(result.sample)
    found = {}
    for name, values in result.stats.items():
        total, count = engine.all_reduce_sum(torch.tensor(values, dtype=torch.float64)).tolist()
        found[name] = total / count
    return found


@pytest.mark.parametrize(
    ("size", "engine", "options"),
    [
        (2, "fsdp", {"n_minibatches": 1}),
        (3, "fsdp", {"n_minibatches": 1, "recompute_logprobs": True}),
        (2, "fsdp", {"n_minibatches": 4}),
        (3, "fsdp", {"n_minibatches": 3}),
        (2, "megatron", {"n_minibatches": 3, "n_epochs": 2}),
        (3, "fsdp", OPTIONS | {"aggregation": "sequences", "ratio": "sequence"}),
        (2, "megatron", OPTIONS | {"aggregation": "constant", "objective": "cispo"}),
    ],
)
def test_step_on_several_ranks_equals_step_on_one_rank(
    ranks: RankPool, size: int, engine: str, options: dict[str, Any]
) -> None:
    """A minibatch has the same items on any number of ranks. Here, some ranks have no
    item of one.
    """
    (wanted, after_one), *_ = ranks(1, f"{HERE}:train", 1, engine, **options)
    results = ranks(size, f"{HERE}:train", size, engine, **options)
    for stats, after in results:
        assert stats == results[0][0]
        assert stats == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(after, after_one, rtol=1e-5, atol=1e-5)
    assert wanted["actor_updates"] == options["n_minibatches"] * options.get("n_epochs", 1)
    assert wanted["advantages_std"] > 0.1
    if "m2_threshold" in options:
        assert 0.0 < wanted["m2_masked"] < 1.0
        assert 0.0 < wanted["correction_masked"] < 1.0


@pytest.mark.parametrize(
    ("size", "engine", "options"),
    [
        (1, "fsdp", {"n_minibatches": 2, "n_epochs": 2}),
        (2, "fsdp", {"n_minibatches": 2, "recompute_logprobs": True}),
        (2, "megatron", {"n_minibatches": 2}),
    ],
)
def test_completion_groups_on_one_rank_train_like_separate_prompts(
    ranks: RankPool, size: int, engine: str, options: dict[str, int]
) -> None:
    """Two completions of each of four prompts give the update of eight prompts, on any number of
    ranks, although a group exceeds the token budget of a micro-batch.
    """
    (wanted, after_one), *_ = ranks(1, f"{HERE}:train", 1, engine, **options)
    results = ranks(size, f"{HERE}:train", size, engine, grouped=True, **options)
    assert wanted["completions"] == 8
    for stats, after in results:
        assert stats == results[0][0]
        assert stats == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(after, after_one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("std", ["group", "batch"])
def test_group_advantages_do_not_depend_on_the_number_of_ranks(ranks: RankPool, std: str) -> None:
    """A group stays on one rank, and statistics of the batch are those of all ranks.

    The KL penalty in the loss has the same weight on any number of ranks.
    """
    options: dict[str, Any] = {
        "n_minibatches": 2,
        "advantage": "group",
        "advantage_std": std,
        "normalize_advantages": False,
        "kl": {"where": "loss", "estimator": "k3"},
    }
    (wanted, after_one), *_ = ranks(1, f"{HERE}:train", 1, grouped=True, **options)
    results = ranks(2, f"{HERE}:train", 2, grouped=True, **options)
    assert wanted["kl_loss"] > 0.01
    for stats, after in results:
        assert stats == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(after, after_one, rtol=1e-5, atol=1e-5)
