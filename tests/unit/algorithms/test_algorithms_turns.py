"""Completions of several turns: between the policy's tokens are tokens that it has only read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.advantages import Estimates, estimate
from slurmrl.algorithms.policy.presets import PRESETS
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.config.schema import Rollout
from slurmrl.data.sample import SequenceSample

MakeWorld = Callable[..., Any]
WRITTEN, READ = True, False
LIMIT = 16


def layout(turns: Sequence[tuple[int, int]]) -> list[bool]:
    return [bit for read, wrote in turns for bit in [READ] * read + [WRITTEN] * wrote]


def batch(
    rows: Sequence[Sequence[Sequence[tuple[int, int]]]], seed: int, failed: Sequence[int] = ()
) -> SequenceSample:
    """Groups of completions with random numbers and rewards at the last token of each turn.

    The completions with the numbers ``failed`` have a prompt only.
    """
    generator = torch.Generator().manual_seed(seed)
    written = [layout(turns) for row in rows for turns in row]
    for number in failed:
        written[number] = [READ] * 2
    bits = [bit for row in written for bit in row]
    ends = [
        row[t] and (t + 1 == len(row) or not row[t + 1]) for row in written for t in range(len(row))
    ]

    def noise(n: int) -> torch.Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    mask = torch.tensor(bits)
    data = {
        "input_ids": torch.randint(2, 12, (len(bits),), generator=generator),
        "prompt_mask": ~mask,
        "turn_rewards": torch.where(torch.tensor(ends), noise(len(bits)), 0.0),
        **{key: noise(len(bits)) for key in ("logprobs", "ref_logprobs", "values")},
    }
    lengths = iter(map(len, written))
    return SequenceSample.grouped(
        [[next(lengths) for _ in row] for row in rows],
        [f"p{index}" for index in range(len(rows))],
        data,
        per_sequence={
            "rewards": noise(len(written)),
            "finished": torch.rand(len(written), generator=generator) < 0.5,
        },
    )


def estimates_of(
    sample: SequenceSample, algorithm: PolicyGradient, kl_coef: float = 0.0
) -> Estimates:
    config = SimpleNamespace(rollout=Rollout(max_new_tokens=LIMIT))
    both: Any = SimpleNamespace(algorithm=algorithm, config=config)
    context = CallContext(1, 1, {"kl_coef": kl_coef}, both, both, (), sample.ids)
    return estimate(sample, context, lambda x: x)


def sequences(sample: SequenceSample) -> list[dict[str, list[Any]]]:
    """Each sequence's values by key."""
    alone = sample.sequences()
    return [
        {key: alone.take([place]).tensor(key).tolist() for key in alone.keys}
        for place in range(alone.bs)
    ]


@pytest.mark.parametrize("advantage", ["group", "leave_one_out", "batch"])
def test_more_groups_than_completions_that_did_not_fail(advantage: str) -> None:
    """The only completion of the last prompt is compared with itself alone."""
    ppo = PolicyGradient(batch_size=3, advantage=advantage, kl={"coef": 0.0})  # type: ignore[arg-type]
    sample = batch([[[(2, 1)]] * 2] * 3, 1, failed=[0, 1, 2, 3, 5])
    assert estimates_of(sample, ppo).advantages.tolist() == [0.0]


def poisoned(sample: SequenceSample) -> SequenceSample:
    """Other numbers on every token that the policy has read; values only where no state that
    counts is.
    """
    read = sample.tensor("prompt_mask")
    before_own = torch.cat([~read[1:], torch.tensor([True])])
    data = dict(sample.data)
    for key in ("logprobs", "ref_logprobs", "old_logprobs"):
        if key in data:
            data[key] = torch.where(read, sample.tensor(key) + 5.0, sample.tensor(key))
    values = sample.tensor("values")
    data["values"] = torch.where(read & ~before_own, values - 7.0, values)
    return SequenceSample(sample.ids, sample.lengths, sample.metadata, data)


ROWS = [[[(2, 3), (4, 1), (1, 2)], [(2, 1)], [(2, 2), (3, 4)], [(2, 4), (1, 1)]]] * 4


def floats(sample: SequenceSample) -> SequenceSample:
    data = {
        key: tensor.float() if tensor is not None and tensor.is_floating_point() else tensor
        for key, tensor in sample.data.items()
    }
    return SequenceSample(sample.ids, sample.lengths, sample.metadata, data)


@pytest.mark.parametrize("name", [*PRESETS, "corrected"])
def test_what_the_policy_has_read_is_not_trained_on(name: str, make_world: MakeWorld) -> None:
    """Log-probabilities of tokens between turns reach no loss, advantage, metric or gradient."""
    options: dict[str, Any] = {"name": name}
    if name == "corrected":
        options = {
            "name": "grpo", "correction": "truncate", "correction_level": "sequence",
        }  # fmt: skip
    if name == "remax":
        options = {"name": name, "advantage": "none"}
    results = []
    for change in (lambda sample: sample, poisoned):
        world = make_world(**{"n_minibatches": 2, "n_epochs": 2, **options})
        sample = floats(batch(ROWS, 3))
        if name == "corrected":
            sample.data["old_logprobs"] = sample.tensor("logprobs") * 0.9
            sample.lengths["old_logprobs"] = sample.lengths["logprobs"]
        sample = change(sample)
        stats = world.train_actor(sample, 1, kl_coef=0.1)
        if world.ppo.uses_critic:
            stats |= world.train_critic(sample, 1, kl_coef=0.1)
        results.append(stats)
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    assert results[0]["completions"] == 16.0


def test_a_long_completion_is_one_of_which_the_policy_wrote_much() -> None:
    """The penalty for the length counts the policy's tokens, up to what it may write in an
    episode.
    """
    ppo = PolicyGradient(
        name="grpo", batch_size=1, kl={"coef": 0.0}, overlong_buffer=4, advantage_std="none"
    )
    rows = [[[(2, 1), (9, 1)], [(2, 7), (1, 7)]]]
    sample = batch(rows, 1)
    sample.data["rewards"] = torch.zeros(2, dtype=torch.float64)
    found = estimates_of(sample, ppo).advantages
    assert found[0] == pytest.approx(0.25)
    assert found[-1] == pytest.approx(-0.25)


@pytest.mark.parametrize("advantage", ["gae", "none", "group", "batch"])
def test_turns_without_rewards_change_no_bit(advantage: str) -> None:
    """A batch whose turns earn nothing has the advantages of one without that key."""
    of_completions = advantage in ("group", "batch")
    ppo = PolicyGradient(
        batch_size=4, advantage=advantage, advantage_std="batch" if of_completions else "none"
    )
    sample = floats(batch(ROWS, 9))
    sample.data["turn_rewards"] = torch.zeros_like(sample.tensor("turn_rewards"))
    plain = sample.only([key for key in sample.keys if key != "turn_rewards"])
    for name in ("advantages", "returns"):
        both = (getattr(estimates_of(each, ppo, 0.1), name) for each in (sample, plain))
        assert torch.equal(*both)
