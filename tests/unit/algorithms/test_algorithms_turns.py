"""Completions of several turns: between the policy's tokens are tokens that it has only read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.actor import RecomputeInterface
from slurmrl.algorithms.policy.advantages import Estimates, estimate
from slurmrl.algorithms.policy.presets import PRESETS
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.config.schema import Rollout
from slurmrl.data.sample import SequenceSample

MakeWorld = Callable[..., Any]
WRITTEN, READ = True, False
LIMIT = 16

pieces = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3)
"""(tokens read, tokens written) of each turn; the first ones read are the prompt."""
groups = st.lists(st.lists(pieces, min_size=2, max_size=2), min_size=1, max_size=3)


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


@settings(deadline=None)
@given(groups, st.floats(0.5, 1), st.floats(0, 1), st.integers(0, 99), st.booleans())
def test_advantages_step_from_turn_to_turn(
    rows: list[list[list[tuple[int, int]]]], discount: float, lam: float, seed: int, masks: bool
) -> None:
    """Each token that the policy wrote is one step, whose next state is the one before the next
    token that it writes. A turn's reward comes with its last token, scaled like the score, and the
    sum of a completion's rewards is its score.
    """
    kl_coef, scale = 0.3, 2.0
    ppo = PolicyGradient(
        batch_size=8,
        discount=discount,
        gae_lambda=lam,
        reward_scaling=scale,
        reward_bias=0.25,
        reward_clip=1.5,
        mask_no_eos_with_zero=masks,
    )
    sample = batch(rows, seed)
    found = estimates_of(sample, ppo, kl_coef)
    advantages: list[float] = []
    for one in sequences(sample):
        own = [t for t, is_read in enumerate(one["prompt_mask"]) if not is_read]
        finished = one["finished"][0]
        score = min(max((one["rewards"][0] - 0.25) * scale, -1.5), 1.5)
        counts = finished or not masks
        score = score if counts else 0.0
        rewards = [one["turn_rewards"][t] * scale if counts else 0.0 for t in own]
        rewards[-1] += score - sum(rewards)
        assert sum(rewards) == pytest.approx(score)
        penalties = [kl_coef * (one["logprobs"][t] - one["ref_logprobs"][t]) for t in own]
        after = [one["values"][t - 1] for t in own[1:]]
        after.append(0.0 if finished else one["values"][len(one["values"]) - 1])
        carry, reverse = 0.0, []
        for k in reversed(range(len(own))):
            delta = rewards[k] - penalties[k] + discount * after[k] - one["values"][own[k] - 1]
            carry = delta + discount * lam * carry
            reverse.append(carry)
        advantages += reversed(reverse)
    wanted = torch.tensor(advantages, dtype=torch.float64)
    torch.testing.assert_close(found.advantages, wanted)


@pytest.mark.parametrize("advantage", ["group", "leave_one_out", "batch"])
def test_failed_episodes_are_compared_with_none(advantage: str) -> None:
    """A completion without a token of the policy moves no baseline and no deviation."""
    rows = [[[(2, 2), (1, 3)]] * 3, [[(2, 1)]] * 3]
    options = {"advantage": advantage, "advantage_std": "batch", "kl": {"coef": 0.0}}
    ppo = PolicyGradient(batch_size=2, reward_clip=None, **options)
    sample = batch(rows, 1, failed=[1])
    rewards = sample.tensor("rewards")
    rewards[1] = 1e6
    found = estimates_of(sample, ppo).advantages
    values = rewards.tolist()
    answered = [[values[0], values[2]], values[3:]]
    together = [value for group in answered for value in group]
    deviation = float(torch.tensor(together).double().std()) + ppo.std_epsilon
    wanted = []
    for group, lengths in zip(answered, [[5, 5], [1, 1, 1]], strict=True):
        for place, (value, length) in enumerate(zip(group, lengths, strict=True)):
            others = group[:place] + group[place + 1 :]
            base = {"group": group, "leave_one_out": others, "batch": together}[advantage]
            wanted += [(value - sum(base) / len(base)) / deviation] * length
    assert found.tolist() == pytest.approx(wanted)


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


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["tokens", "sequences", "constant"])
def test_the_loss_of_turns_token_by_token(
    ratio: str, aggregation: str, make_world: MakeWorld
) -> None:
    """The loss, the KL and the numbers that are reported, from loops over the policy's tokens."""
    world = make_world(name="grpo", n_minibatches=1, ratio=ratio, aggregation=aggregation)
    sample = floats(batch(ROWS, 5))
    estimates = world.estimate(sample)
    logp = world.actor.forward(sample.only(["input_ids"]))["logp"]
    sample.data["logprobs"] = logp + 0.1 * sample.tensor("logprobs")
    stats = world.train_actor(sample, 1, kl_coef=0.04)
    advantages = iter(estimates.advantages.tolist())
    cuts = sample.cu_seqlens("input_ids").tolist()
    losses, kls, differences = [], [], []
    for start, stop in pairwise(cuts):
        own = [t for t in range(start, stop) if not sample.tensor("prompt_mask")[t]]
        gaps = [float(logp[t] - sample.tensor("logprobs")[t]) for t in own]
        level = [sum(gaps) / len(gaps)] * len(gaps) if ratio == "sequence" else gaps
        gains = [next(advantages) for _ in own]
        losses.append(
            [
                -min(exp(x) * a, min(max(exp(x), 0.8), 1.2) * a)
                for x, a in zip(level, gains, strict=True)
            ]
        )
        apart = [float(logp[t] - sample.tensor("ref_logprobs")[t]) for t in own]
        kls.append([exp(-x) - 1 + x for x in apart])
        differences += gaps

    def aggregated(rows: list[list[float]]) -> float:
        match aggregation:
            case "tokens":
                return sum(map(sum, rows)) / sum(map(len, rows))
            case "sequences":
                return sum(sum(row) / len(row) for row in rows) / len(rows)
        return sum(map(sum, rows)) / world.settings.config.rollout.max_new_tokens / len(rows)

    assert stats["actor_loss"] == pytest.approx(aggregated(losses), rel=1e-4, abs=1e-6)
    assert stats["kl_loss"] == pytest.approx(aggregated(kls), rel=1e-4)
    count = len(differences)
    assert stats["mismatch/kl_k1"] == pytest.approx(-sum(differences) / count, rel=1e-3, abs=1e-6)
    assert stats["approx_kl_k1"] == pytest.approx(-sum(differences) / count, rel=1e-3, abs=1e-6)


def test_recomputed_log_probabilities_are_compared_on_own_tokens(make_world: MakeWorld) -> None:
    world = make_world()
    sample = floats(batch(ROWS, 7))
    plain, other = (
        RecomputeInterface().inference(world.actor, each, world.context(1, each.ids)).stats
        for each in (sample, poisoned(sample))
    )
    for name, (mean, count) in plain.items():
        assert other[name] == pytest.approx((mean, count))


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
