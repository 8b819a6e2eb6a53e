"""Episodes in generation with a real engine: tokens, masks, rewards, failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.algorithms.base import CallContext, CallResult
from slurmrl.algorithms.offline_schema import Generate
from slurmrl.algorithms.policy.actor import RecomputeInterface
from slurmrl.algorithms.policy.baselines import GreedyRewardInterface, GreedyRolloutInterface
from slurmrl.algorithms.rollout_calls import RolloutInterface
from slurmrl.algorithms.rule_reward import RuleRewardInterface
from slurmrl.config.schema import EpisodeSettings, Logging, Reward
from slurmrl.data.sample import SequenceSample
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.errors import RewardError

MakeWorld = Callable[..., Any]
TOKENIZER = Path(__file__).parents[3] / "examples" / "addition" / "tokenizer"
OWN = "tests.support.own_episodes"
SEVERAL = {"name": f"{OWN}:several", "options": {"turns": 3}}


def prompts(ids: list[str]) -> SequenceSample:
    count = len(ids)
    metadata = {
        "prompt": ["1+2="] * count,
        "answer": ["3"] * count,
        "row": [{"answer": "3"}] * count,
        "line": list(range(1, count + 1)),
    }
    tokens = torch.tensor([2, 3, 4] * count)
    return SequenceSample(
        tuple(ids), {"prompt_ids": [[3]] * count}, metadata, {"prompt_ids": tokens}
    )


def context_of(world: Any, episode: dict[str, Any], **rollout: Any) -> CallContext:
    context = world.context(step=3)
    config = context.settings.config
    settings = config.rollout.model_copy(update={"episode": EpisodeSettings(**episode), **rollout})
    config = config.model_copy(
        update={
            "rollout": settings,
            "reward": Reward(name="exact_match"),
            "logging": Logging(samples=8),
        }
    )
    tokenizer = load_tokenizer(TOKENIZER)
    return replace(context, tokenizer=tokenizer, settings=replace(context.settings, config=config))


def generated(
    world: Any, context: CallContext, ids: list[str]
) -> tuple[SequenceSample, CallResult]:
    sample = prompts(ids)
    result = RolloutInterface().generate(world.actor, sample, context)
    assert result.sample is not None
    sample.update_(result.sample)
    return sample, result


@pytest.mark.parametrize("n", [1, 3])
def test_one_turn_episode_equals_a_completion(n: int, make_world: MakeWorld) -> None:
    """Log-probabilities differ only by rounding."""
    world = make_world()
    episode, _ = generated(world, context_of(world, {"name": f"{OWN}:once"}, n=n), ["a", "b"])
    plain, _ = generated(world, context_of(world, {}, n=n), ["a", "b"])
    for key in ("input_ids", "prompt_mask", "finished"):
        assert torch.equal(episode.tensor(key), plain.tensor(key)), key
        assert episode.lengths[key] == plain.lengths[key]
    torch.testing.assert_close(episode.tensor("logprobs"), plain.tensor("logprobs"))
    assert not episode.tensor("turn_rewards").any()


def test_logprobs_are_over_the_vocabulary_without_recorded_masks(make_world: MakeWorld) -> None:
    world = make_world()
    found = []
    for episode in ({"name": f"{OWN}:once"}, {}):
        context = context_of(world, episode, n=3, top_k=2)
        offline = replace(context.settings, algorithm=Generate(name="generate", batch_size=2))
        found.append(generated(world, replace(context, settings=offline), ["a", "b"])[0])
    assert torch.equal(*(each.tensor("input_ids") for each in found))
    torch.testing.assert_close(*(each.tensor("logprobs") for each in found))


def test_episode_logprobs_equal_whole_sequence_logprobs(make_world: MakeWorld) -> None:
    world = make_world()
    sample, result = generated(world, context_of(world, SEVERAL, n=4), ["a", "bb", "ccc"])
    read = sample.tensor("prompt_mask")
    found = RecomputeInterface().inference(world.actor, sample, world.context(3, sample.ids))
    assert found.sample is not None
    own = found.sample.tensor("old_logprobs")[~read]
    torch.testing.assert_close(own, sample.tensor("logprobs")[~read], atol=1e-5, rtol=1e-4)
    assert not sample.tensor("logprobs")[read].any()
    messages = sum(2 * (number + index) for number in (1, 2) for index in range(4)) * 3
    assert int(read.sum()) == 3 * 12 + messages
    means = {name: total / count for name, (total, count) in result.stats.items()}
    assert means["context_length"] == messages / 12
    assert means["response_length"] == int((~read).sum()) / 12
    assert (means["turns"], means["prompt_length"], means["episode_failed"]) == (3.0, 3.0, 0.0)


def test_episode_does_not_depend_on_other_episodes(make_world: MakeWorld) -> None:
    world = make_world()
    every, _ = generated(world, context_of(world, SEVERAL, n=2), ["a", "bb", "ccc", "dddd"])
    few, _ = generated(world, context_of(world, {**SEVERAL, "concurrency": 1}, n=2), ["dddd", "bb"])
    for name in few.ids:
        a, b = (each.take([each.ids.index(name)]) for each in (every, few))
        for key in ("input_ids", "prompt_mask", "finished", "turn_rewards"):
            assert torch.equal(a.tensor(key), b.tensor(key))
        torch.testing.assert_close(a.tensor("logprobs"), b.tensor("logprobs"))


def judged(world: Any, context: CallContext, sample: SequenceSample) -> CallResult:
    return RuleRewardInterface().inference(None, sample, context)


def test_failed_episode_keeps_its_prompt_and_has_no_reward(make_world: MakeWorld) -> None:
    """Later calls get only its prompt."""
    world = make_world()
    context = context_of(world, SEVERAL)
    sample, result = generated(world, context, ["a", "x", "b"])
    failed = sample.take([1])
    assert failed.tensor("input_ids").tolist() == [2, 3, 4]
    assert failed.tensor("prompt_mask").all()
    assert result.stats["episode_failed"] == (1.0, 3.0)
    rewards = judged(world, context, sample)
    assert rewards.sample is not None
    assert rewards.sample.tensor("rewards").tolist() == [0.75, 0.0, 0.75]


def test_reward_is_score_of_last_turn_plus_turn_rewards(make_world: MakeWorld) -> None:
    """The table of samples shows the turns and the messages between them."""
    world = make_world()
    context = context_of(world, SEVERAL)
    tokenizer = context.tokenizer
    answer = tokenizer("7", add_special_tokens=False).input_ids
    first = tokenizer("5", add_special_tokens=False).input_ids
    ids = [2, 3, *first, 1, *answer, *answer, *answer, 1]
    read = [True, True, False, False, True, True, False, False]
    sample = SequenceSample(
        ("a",),
        {
            **{key: [[8]] for key in ("input_ids", "prompt_mask", "turn_rewards")},
            "finished": [[1]],
        },
        {"prompt": ["q"], "answer": ["7"], "row": [{"answer": "7"}], "line": [1]},
        {
            "input_ids": torch.tensor(ids),
            "prompt_mask": torch.tensor(read),
            "turn_rewards": torch.tensor([0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.25]),
            "finished": torch.tensor([True]),
        },
    )
    result = judged(world, context, sample)
    assert result.sample is not None
    assert result.sample.tensor("rewards").tolist() == [1.75]
    (row,) = result.texts
    assert row["completion"] == "7"
    assert row["turns"] == [
        {"wrote": "5<eos>", "reward": 0.5},
        {"read": "77"},
        {"wrote": "7<eos>", "reward": 0.25},
    ]


def test_turn_reward_outside_float32_is_an_error(make_world: MakeWorld) -> None:
    """The reward would be infinite on the ranks."""
    world = make_world()
    sample = SequenceSample(
        ("a",),
        {
            **{key: [[4]] for key in ("input_ids", "prompt_mask", "turn_rewards")},
            "finished": [[1]],
        },
        {"prompt": ["q"], "answer": ["7"], "row": [{"answer": "7"}], "line": [1]},
        {
            "input_ids": torch.tensor([2, 3, 1, 1]),
            "prompt_mask": torch.tensor([True, False, True, False]),
            "turn_rewards": torch.tensor([0.0, 3e38, 0.0, 3e38]),
            "finished": torch.tensor([True]),
        },
    )
    with pytest.raises(
        RewardError, match=r":1 \(sample a\) is 6e\+38 = 0 \+ 6e\+38 \(rewards of turns\)"
    ):
        judged(world, context_of(world, SEVERAL), sample)


def test_environment_rewards_suffice_without_reward_function(make_world: MakeWorld) -> None:
    world = make_world()
    environment = {"name": f"{OWN}:Countdown", "options": {"turns": 2}}
    context = context_of(world, {"name": "multi_turn", "environment": environment})
    config = context.settings.config.model_copy(update={"reward": None})
    context = replace(context, settings=replace(context.settings, config=config))
    sample, _ = generated(world, context, [f"p{number}" for number in range(12)])
    result = judged(world, context, sample)
    assert result.sample is not None
    rewards = result.sample.tensor("rewards").tolist()
    ends = sample.tensor("finished").tolist()
    assert {reward for reward, ended in zip(rewards, ends, strict=True) if ended} == {3.0}
    assert all(reward in (0.0, 1.0) for reward, end in zip(rewards, ends, strict=True) if not end)


def test_greedy_baseline_runs_the_same_episode(make_world: MakeWorld) -> None:
    world = make_world(name="remax", kl={"coef": 0.0})
    context = context_of(world, SEVERAL, n=2)
    sample = prompts(["a", "b"])
    result = GreedyRolloutInterface().generate(world.actor, sample, context)
    assert result.sample is not None
    assert result.sample.sequence_counts("greedy_input_ids") == [1, 1]
    sample.update_(result.sample)
    rewards = GreedyRewardInterface().inference(None, sample, context).sample
    assert rewards is not None
    assert rewards.tensor("greedy_rewards").tolist() == [0.75, 0.75]
