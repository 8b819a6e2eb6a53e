"""The updates of a step: items of minibatches, denominators of losses, and early ends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.hyperparameters import Updates
from slurmrl.algorithms.policy.objective import LOSS_WEIGHTS
from slurmrl.algorithms.policy.updates import run_updates
from slurmrl.data.sample import SequenceSample
from tests.support.host_waits import host_waits

MakeWorld = Callable[..., Any]
IDS = tuple(f"item{number}" for number in range(8))


class Recorder:
    """An engine that records its inputs."""

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
    """Return groups of two sequences, with 2 and 3 tokens.

    The first token is the prompt. The second sequence of item 0 has no response, and the response
    of item 1's second sequence does not count.
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
    """Return the items of each update. (Their sequences are separate items at that point.)"""
    return [{name.partition("#")[0] for name in ids} for ids, _ in seen]


def test_shuffled_minibatches_follow_seed_step_and_epoch() -> None:
    """A rank's minibatch is its part of the minibatch of all ranks."""
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
    """Return the items of all ranks for each update."""
    found = []
    rest = [list(part) for part in parts]
    for wanted in whole:
        joined: set[str] = set()
        for part in rest:
            if part and part[0] <= wanted:
                joined |= part.pop(0)
        found.append(joined)
    return found


def test_contiguous_minibatches_repeat_in_each_epoch() -> None:
    seen, _ = updates(list(range(8)), n_minibatches=2, n_epochs=2)
    first, second = set(IDS[:4]), set(IDS[4:])
    assert names(seen) == [first, second, first, second]


def test_batch_without_unmasked_tokens_makes_no_update(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the reason, and the next step continues."""
    seen, means = updates([])
    assert (seen, means) == ([], {"updates": 0.0, "skipped": 0.0})
    assert "step 1 makes no update of the actor" in caplog.text
    assert "mask_truncated" in caplog.text


def test_host_waits_do_not_grow_with_all_options(make_world: MakeWorld) -> None:
    """On a GPU, sequence ratios, weights and corrections cause no host waits in a micro-batch."""
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
