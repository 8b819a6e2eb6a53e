"""The updates of a step: which items a minibatch has, what its loss is divided by, and what ends
them early.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.actor import RecomputeInterface
from slurmrl.algorithms.policy.objective import mismatch_metrics, mismatch_sums
from slurmrl.algorithms.policy.sections import Updates
from slurmrl.algorithms.policy.updates import LOSS_WEIGHTS, run_updates
from slurmrl.data.sample import SequenceSample
from tests.support.host_waits import host_waits

MakeWorld = Callable[..., Any]
IDS = tuple(f"item{number}" for number in range(8))


class Recorder:
    """An engine that records what it is given."""

    role = "actor"

    def __init__(self) -> None:
        self.context = SimpleNamespace(rank=0)
        self.seen: list[tuple[tuple[str, ...], float]] = []

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def train_batch(
        self, sample: SequenceSample, loss_fn: Any, denominator: float, **_: Any
    ) -> dict[str, float]:
        self.seen.append((sample.ids, denominator))
        mask = sample.tensor("mask")
        return {
            "denominator": denominator,
            "actor/loss": 6.0,
            "actor_loss": 6.0,
            "entropy": 2.0 * float(mask.sum()),
            "vetoed": 0.0,
            "skipped": 0.0,
            "grad_norm": 1.0,
            "lr": 0.1,
        }


def groups(items: list[int]) -> SequenceSample:
    """Groups of two sequences: of 2 and of 3 tokens, of which the first is a prompt.

    The second sequence of item 0 has no response, the one of item 1 has one that does not count.
    """
    rows = [[2, 3]] * len(items)
    written = torch.tensor([[0, 1, 0, item > 0, item > 0] for item in items]).bool().flatten()
    mask = torch.tensor([[0, 1, 0, item > 1, item > 1] for item in items]).bool().flatten()
    data = {"mask": mask, LOSS_WEIGHTS: written.float()}
    return SequenceSample(
        tuple(IDS[item] for item in items), dict.fromkeys(data, rows), data=dict(data)
    )


def updates(items: list[int], *, step: int = 1, seed: int = 1, **settings: Any) -> Any:
    aggregation = settings.pop("aggregation", "tokens")
    engine = Recorder()
    context = CallContext(step, seed, {}, cast(Any, None), cast(Any, None), (), IDS)
    means = run_updates(
        cast(Any, engine),
        groups(items),
        context,
        "mask",
        cast(Any, None),
        Updates(**settings),
        aggregation=aggregation,
    )
    return engine.seen, means


def names(seen: list[tuple[tuple[str, ...], float]]) -> list[set[str]]:
    """The items of each update. (Their sequences are items of their own by then.)"""
    return [{name.partition("#")[0] for name in ids} for ids, _ in seen]


def test_shuffled_minibatches_follow_seed_step_and_epoch() -> None:
    """Each epoch trains on each item once, in minibatches of its own.

    A rank's minibatch is its part of the one of all ranks.
    """
    everything = list(range(8))
    options = {"n_minibatches": 3, "n_epochs": 2, "shuffle_minibatches": True}
    whole, _ = updates(everything, **options)
    orders = [tuple(map(frozenset, names(whole)[start : start + 3])) for start in (0, 3)]
    for change in ({"step": 2}, {"seed": 2}):
        seen, _ = updates(everything, **options, **change)
        orders.append(tuple(map(frozenset, names(seen)[:3])))
    assert len(set(orders)) == 4
    for order in orders:
        assert sorted(map(len, order)) == [2, 3, 3]
        assert frozenset.union(*order) == set(IDS)
    parts = [names(updates(part, **options)[0]) for part in ([0, 3, 4], [1, 2, 5, 6, 7])]
    for all_of_it, found in zip(names(whole), _joined(parts, names(whole)), strict=True):
        assert found == all_of_it


def _joined(parts: list[list[set[str]]], whole: list[set[str]]) -> list[set[str]]:
    """The ranks' items of each update.

    A rank that has none of one is not called with it here, because the recorder knows no other
    ranks.
    """
    found = []
    rest = [list(part) for part in parts]
    for wanted in whole:
        joined: set[str] = set()
        for part in rest:
            if part and part[0] <= wanted:
                joined |= part.pop(0)
        found.append(joined)
    return found


def test_contiguous_minibatches_are_the_same_in_each_epoch() -> None:
    seen, _ = updates(list(range(8)), n_minibatches=2, n_epochs=2)
    first, second = set(IDS[:4]), set(IDS[4:])
    assert names(seen) == [first, second, first, second]


@pytest.mark.parametrize(
    ("aggregation", "denominators"), [("tokens", [2.0, 6.0]), ("sequences", [3.0, 4.0])]
)
def test_denominators_are_tokens_that_count_or_sequences_with_responses(
    aggregation: str, denominators: list[float]
) -> None:
    """Losses are divided by the denominators, other statistics by the numbers of tokens that
    count.
    """
    seen, means = updates([0, 1, 2, 3], n_minibatches=4, aggregation=aggregation)
    assert [denominator for _, denominator in seen] == denominators
    assert means["actor/loss"] == means["actor_loss"] == 12.0 / sum(denominators)
    assert means["entropy"] == 2.0


def test_a_batch_without_a_token_that_counts_makes_no_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says why; the next step goes on."""
    seen, means = updates([])
    assert (seen, means) == ([], {"updates": 0.0, "skipped": 0.0})
    assert "step 1 makes no update of the actor" in caplog.text
    assert "mask_truncated" in caplog.text


def stopping(world: Any) -> dict[str, float]:
    """An update on completions that the actor finds less likely now."""
    sample = world.rollout(step=1)
    sample.data["logprobs"] = sample.tensor("logprobs") + 0.5
    stats: dict[str, float] = world.train_actor(sample, 1, kl_coef=0.0)
    return stats


def test_updates_stop_where_the_kl_to_the_old_policy_is_too_large(make_world: MakeWorld) -> None:
    """k3 of a log-ratio of -0.5 is exp(-0.5) - 1 + 0.5 = 0.1065."""
    limits = {"n_minibatches": 1, "early_stop_importance_ratio": None}
    for limit, stopped in [(None, False), (0.11, False), (0.1, True)]:
        world = make_world(early_stop_kl=limit, **limits)
        stats = stopping(world)
        assert stats["approx_kl"] == pytest.approx(0.1065, abs=1e-3)
        assert stats["actor_updates"] == (0.0 if stopped else 1.0)
        assert stats.get("early_stop", 0.0) == float(stopped)


def weights(world: Any) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in world.actor._shards.local().values()]


def test_the_actor_waits_while_the_critic_warms_up(make_world: MakeWorld) -> None:
    """Neither weights nor schedule of the actor move in these steps, whose metrics are complete;
    the critic trains.
    """
    world = make_world(critic_warmup_steps=2)
    before = weights(world)
    for step in (1, 2):
        sample = world.rollout(step)
        stats = world.train_actor(sample, step, kl_coef=0.1)
        assert world.train_critic(sample, step, kl_coef=0.1)["critic_updates"] == 2.0
        assert (stats["actor_updates"], stats["early_stop"]) == (0.0, 0.0)
        assert {"actor/loss", "entropy", "mismatch/kl", "kl"} <= set(stats)
    assert world.actor.steps == 0
    assert all(map(torch.equal, before, weights(world)))
    stats = world.train_actor(world.rollout(3), 3, kl_coef=0.1)
    assert (stats["actor_updates"], world.actor.steps) == (2.0, 2)
    assert not all(map(torch.equal, before, weights(world)))


def test_the_first_minibatch_compares_training_with_generation(make_world: MakeWorld) -> None:
    """Before any update, by its own forward pass; later minibatches, of another policy, do not
    count. The largest ratio is that of all micro-batches.
    """
    world = make_world(n_minibatches=2, n_epochs=2)
    world.actor._max_tokens = 40
    sample = world.rollout(step=1)
    logp = world.actor.forward(sample.only(["input_ids"]))["logp"]
    noise = torch.randn(len(logp), generator=torch.Generator().manual_seed(1))
    sample.data["logprobs"] = sample.tensor("logprobs") + 0.1 * noise
    half = sample.cu_seqlens("input_ids")[24]
    mask = ~sample.tensor("prompt_mask")[:half]
    sums = mismatch_sums(logp[:half], sample.tensor("logprobs")[:half], mask)
    expected = mismatch_metrics({n: float(v) for n, v in sums.items()}, float(mask.sum()))
    stats = world.train_actor(sample, 1, kl_coef=0.0)
    found = {name: value for name, value in stats.items() if name.startswith("mismatch/")}
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert expected["mismatch/ratio_max"] > 1.2
    assert 0.98 < expected["mismatch/effective_sample_size"] < 0.995


def test_recomputation_compares_training_with_generation(make_world: MakeWorld) -> None:
    world = make_world()
    sample = world.rollout(step=1)
    sample.data["logprobs"] = sample.tensor("logprobs") - 0.25
    result = RecomputeInterface().inference(world.actor, sample, world.context(1, sample.ids))
    found = {name: total / count for name, (total, count) in result.stats.items()}
    assert found["mismatch/kl_k1"] == pytest.approx(-0.25, abs=1e-4)
    assert found["mismatch/ratio_max"] == pytest.approx(1.284, abs=1e-3)
    assert found["mismatch/effective_sample_size"] == pytest.approx(1.0, abs=1e-4)


def test_corrections_weigh_the_updates_of_recomputed_policies(make_world: MakeWorld) -> None:
    """Where generation gave every token a 2.7 times higher probability, the mask of small weights
    leaves no gradient, and the truncation halves it less.
    """
    made = {}
    for kind, bounds in [
        ("none", {}),
        ("weight", {}),
        ("truncate", {"correction_lower": 0.5}),
        ("mask", {"correction_lower": 0.5}),
    ]:
        world = make_world(n_minibatches=1, correction=kind, **bounds)
        sample = world.rollout(step=1)
        sample.data["old_logprobs"] = sample.tensor("logprobs").clone()
        sample.data["logprobs"] = sample.tensor("logprobs") + 1.0
        sample.lengths["old_logprobs"] = sample.lengths["logprobs"]
        made[kind] = world.train_actor(sample, 1, kl_coef=0.0)
    assert "correction_weight" not in made["none"]
    assert [made[kind]["correction_weight"] for kind in ("weight", "truncate", "mask")] == (
        pytest.approx([0.3679, 0.5, 0.0], abs=1e-3)
    )
    assert made["mask"]["correction_masked"] == 1.0
    norms = {kind: stats["actor_grad_norm"] for kind, stats in made.items()}
    assert norms["weight"] == pytest.approx(0.3679 * norms["none"], rel=1e-3)
    assert norms["truncate"] == pytest.approx(0.5 * norms["none"], rel=1e-3)
    assert norms["mask"] == 0.0


def test_second_moments_are_those_of_the_weights_before_each_update(make_world: MakeWorld) -> None:
    """The first update of a step is on-policy and drops nothing; the later ones have moved."""
    first = make_world(n_minibatches=1, m2_threshold=1e-4, objective="unclipped")
    assert first.train_actor(first.rollout(1), 1, kl_coef=0.0)["m2_masked"] == 0.0
    later = make_world(n_minibatches=4, n_epochs=2, m2_threshold=1e-4, objective="unclipped")
    dropped = later.train_actor(later.rollout(1), 1, kl_coef=0.0)["m2_masked"]
    assert 0.0 < dropped < 0.6


def test_all_options_together_make_the_host_wait_no_more_often(make_world: MakeWorld) -> None:
    """Sequence ratios, weights and corrections make a micro-batch wait for nothing on a GPU."""
    world = make_world(
        n_minibatches=1, ratio="sequence", aggregation="sequences", correction="mask",
        correction_level="geometric",
    )  # fmt: skip
    sample = world.rollout(step=1)
    sample.data["old_logprobs"] = sample.tensor("logprobs").clone()
    sample.lengths["old_logprobs"] = sample.lengths["logprobs"]
    counts = []
    for budget in (10_000, 40):
        world.actor._max_tokens = budget
        on_device = [*world.actor._state().values()]
        on_device += [tensor for tensor in sample.data.values() if tensor is not None]
        with host_waits(on_device) as waits:
            world.train_actor(sample, 1, kl_coef=0.1)
        counts.append(len(waits))
    assert counts[0] == counts[1] > 0


def test_settings_of_the_losses_reach_the_updates(make_world: MakeWorld) -> None:
    """The constant is by default the longest completion, here 6 tokens: of 48 completions, the sum
    over tokens is divided by 6 times 48.
    """
    norms = {}
    for name, options in {
        "tokens": {},
        "sequences": {"aggregation": "sequences"},
        "constant": {"aggregation": "constant"},
        "constant 3": {"aggregation": "constant", "aggregation_length": 3},
        "entropy": {"entropy_coef": 1.0},
        "huber": {"value_huber_delta": 0.01},
    }.items():
        world = make_world(n_minibatches=1, value_clip=None, **options)
        sample = world.rollout(step=1)
        actor = world.train_actor(sample, 1, kl_coef=0.0)["actor_grad_norm"]
        norms[name] = (actor, world.train_critic(sample, 1, kl_coef=0.0)["critic_grad_norm"])
    actors = {norm for name, (norm, _) in norms.items() if name != "huber"}
    assert len(actors) == 5
    assert norms["constant 3"][0] == pytest.approx(2.0 * norms["constant"][0], rel=1e-4)
    tokens = float((~sample.tensor("prompt_mask")).sum())
    whole = norms["tokens"][0] * tokens
    assert norms["constant"][0] * 6 * 48 == pytest.approx(whole, rel=1e-4)
    assert 0.0 < norms["huber"][1] < 0.2 * norms["tokens"][1]
