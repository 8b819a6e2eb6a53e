"""Training with records of generation: the sampling mask of each token, and the experts that
processed it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slurmrl.algorithms.policy.actor import ActorInterface, RecomputeInterface
from slurmrl.algorithms.policy.schema import OLD_LOGPROBS, REF_LOGPROBS, PolicyGradient
from slurmrl.algorithms.rollout_calls import StoredInterface
from slurmrl.config.schema import Config
from slurmrl.data.meta import EXPERTS, IDS, SIZES, SampledMasks
from slurmrl.data.sample import SequenceSample
from slurmrl.rollouts.completions import Completion, Completions
from slurmrl.rollouts.sample_files import SampleGroup
from tests.unit.algorithms.test_algorithms_episodes import SEVERAL, context_of, generated
from tests.unit.engines.test_engines_waits import ARCHITECTURE, engine

MakeWorld = Callable[..., Any]
RESTRICTED = {"top_k": 5, "top_p": 0.8, "temperature": 0.6}


def restricted(config: Config, **more: Any) -> Config:
    rollout = config.rollout.model_copy(update={**RESTRICTED, **more})
    return config.model_copy(update={"rollout": rollout})


def restrict(world: Any) -> None:
    world.settings = replace(world.settings, config=restricted(world.settings.config))


@pytest.mark.parametrize("options", [{}, {"m2_threshold": 0.04}, {"correction": "truncate"}])
def test_models_apply_the_recorded_sampling_masks(
    options: dict[str, Any], make_world: MakeWorld
) -> None:
    """Ratios are 1 and divergences 0 before the first update. Without masks, they differ."""
    world = make_world(**options)
    restrict(world)
    sample = world.rollout(step=1)
    drawn = ~sample.tensor("prompt_mask")
    assert torch.equal(sample.tensor(SIZES) > 0, drawn)
    assert sample.tensor(SIZES).max() <= 5
    recompute = RecomputeInterface().inference(world.actor, sample, world.context(1, sample.ids))
    assert recompute.sample is not None
    for found in (recompute.sample.tensor(OLD_LOGPROBS), sample.tensor(REF_LOGPROBS)):
        assert (found - sample.tensor("logprobs"))[drawn].abs().max() < 1e-5
    whole = sample.only(key for key in sample.keys if key not in (SIZES, IDS))
    different = ActorInterface().inference(world.ref, whole, world.context(1, sample.ids)).sample
    assert different is not None
    distance = different.tensor(REF_LOGPROBS) - sample.tensor("logprobs")
    assert distance[drawn].mean() < -0.1
    if options.get("correction"):
        sample.update_(recompute.sample)
    stats = world.train_actor(sample, 1, kl_coef=0.1)
    assert abs(stats["kl"]) < 1e-6
    if not options.get("correction"):
        assert abs(stats["mismatch/kl"]) < 1e-6  # (before the first update)
        assert stats["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    if "m2_threshold" in options:
        assert stats["m2_masked"] < 0.5


def test_update_changes_probabilities_within_sampling_masks(make_world: MakeWorld) -> None:
    """Logits outside the mask of a token have no effect."""
    world = make_world()
    restrict(world)
    sample = world.rollout(step=1, prompts=4)

    def loss(outputs: dict[str, torch.Tensor], part: SequenceSample) -> Any:
        return -outputs["logp"].sum(), {}

    alone = sample.only(["input_ids", SIZES, IDS])
    single = SampledMasks()
    for size, token in zip(
        sample.tensor(SIZES).tolist(), sample.tensor("input_ids").tolist(), strict=True
    ):
        single.add([token] if size else [])
    only = SequenceSample(sample.ids, dict(alone.lengths), data=dict(alone.data))
    only.lengths[IDS] = [[int(n)] for n in _sums(sample)]
    only.data[SIZES] = torch.tensor(single.sizes, dtype=torch.int32)
    only.data[IDS] = torch.tensor(single.ids, dtype=torch.int32)
    prompts = sample.tensor("prompt_mask")
    certain = world.actor.forward(only)["logp"]
    assert not certain[~prompts].any(), "a token that is alone in its mask is certain"
    before = world.actor.forward(alone, temperature=0.6)["logp"][~prompts].sum()
    world.actor.train_batch(alone, loss, 1.0, temperature=0.6)
    after = world.actor.forward(alone, temperature=0.6)["logp"][~prompts].sum()
    assert after > before


def _sums(sample: SequenceSample) -> list[int]:
    drawn = (sample.tensor(SIZES) > 0).long()
    return [int(part.sum()) for part in drawn.split(sample.item_lengths("input_ids"))]


def test_sampling_masks_cover_turns_but_not_messages(make_world: MakeWorld) -> None:
    world = make_world()
    context = context_of(world, SEVERAL, n=3, **RESTRICTED)
    sample, _ = generated(world, context, ["a", "bb"])
    read = sample.tensor("prompt_mask")
    assert torch.equal(sample.tensor(SIZES) == 0, read)
    found = RecomputeInterface().inference(world.actor, sample, context)
    assert found.sample is not None
    distance = found.sample.tensor(OLD_LOGPROBS) - sample.tensor("logprobs")
    assert distance[~read].abs().max() < 1e-5


EXPERTS_OF_TWO = {
    "model_type": "qwen3_moe",
    "vocab_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "initializer_range": 0.2,
}


@pytest.mark.parametrize("turns", [False, True])
def test_actor_trains_with_experts_recorded_in_generation(
    turns: bool, make_world: MakeWorld
) -> None:
    world = make_world()
    world.actor = engine(architecture={**ARCHITECTURE, **EXPERTS_OF_TWO, "vocab_size": 80})
    rollout = {"n": 2, "replay_experts": True}
    context = context_of(world, SEVERAL if turns else {}, **rollout)
    sample, _ = generated(world, context, ["a", "bb", "ccc"])
    sizes = [size for row in sample.lengths[EXPERTS] for size in row]
    assert sizes == [4 * size for row in sample.lengths["input_ids"] for size in row]

    def recomputed(keys: list[str]) -> torch.Tensor:
        needed = sample.only([*keys, "prompt_mask", "logprobs"])
        result = RecomputeInterface().inference(world.actor, needed, context)
        assert result.sample is not None
        return result.sample.tensor(OLD_LOGPROBS)

    drawn = ~sample.tensor("prompt_mask")
    both = ["input_ids", EXPERTS]
    assert (recomputed(both) - sample.tensor("logprobs"))[drawn].abs().max() < 1e-5
    with torch.no_grad():
        for block in world.actor._shards.decoder._sparse_blocks:
            block.gate.weight[[0, 1]] = block.gate.weight[[1, 0]]
    free = recomputed(["input_ids"])
    assert (recomputed(both) - free)[drawn].abs().max() > 1e-3
    sample.data[EXPERTS] = torch.full_like(sample.tensor(EXPERTS), -1)
    assert torch.equal(recomputed(both), free)


def completion(tokens: tuple[int, ...], masks: SampledMasks | None) -> Completion:
    return Completion(
        tokens=tokens,
        logprobs=(-1.0,) * len(tokens),
        versions=("1.1",) * len(tokens),
        finish="stop",
        masks=masks,
    )


def test_rollout_task_files_keep_sampling_masks(make_world: MakeWorld) -> None:
    """Covers a message between turns, and an engine without masks."""
    world = make_world()
    restrict(world)
    turns, other = Completions([2, 3]), Completions([4])
    first, second = SampledMasks(), SampledMasks()
    first.add([5, 9])
    second.add([1, 6])
    second.add([7])
    turns.wrote(completion((9,), first))
    turns.read([8, 8])
    turns.wrote(completion((6, 7), second))
    turns.read([8])
    turns.cut()
    other.wrote(completion((5,), None))
    group = SampleGroup.from_bytes(SampleGroup.of(0, "1.0", [turns, other], "1.1").to_bytes())
    for ids, problem in (
        ((5, 9, -1, 6, 7), "negative"),
        ((5, 8, 1, 6, 7), "missing in its sampling mask"),
    ):
        damaged = SampledMasks(array("i", [0, 0, 2, 0, 0, 2, 1, 0, 0]), array("i", ids))
        with pytest.raises(ValueError, match=problem):
            replace(group, masks=damaged)
    context = replace(world.context(1), stored=lambda _: group)
    result = StoredInterface().generate(None, _named("a", "b"), context)
    made = result.sample
    assert made is not None
    sizes = [0, 0, 2, 0, 0, 2, 1, 0, 0]
    assert made.tensor(SIZES).tolist() == sizes * 2
    assert made.tensor(IDS).tolist() == [5, 9, 1, 6, 7] * 2
    assert made.lengths[IDS] == [[5, 0]] * 2
    assert made.take([1]).tensor(IDS).tolist() == [5, 9, 1, 6, 7]


def test_rollout_task_files_keep_recorded_experts(make_world: MakeWorld) -> None:
    """Covers a completion with a message after its last turn, and a failed episode."""
    world = make_world()
    config = world.settings.config
    rollout = config.rollout.model_copy(update={"replay_experts": True})
    config = config.model_copy(update={"rollout": rollout})
    world.settings = replace(world.settings, config=config)
    one, failed = Completions([2, 3]), Completions([4])
    rows = np.arange(12, dtype=np.int16).reshape(3, 4)
    one.wrote(replace(completion((9,), None), experts=rows))
    one.read([8])
    one.cut()
    failed.failure = "why"
    group = SampleGroup.of(0, "1.0", [one, failed], "1.1")
    with pytest.raises(ValueError, match="expert numbers"):
        replace(group, experts=group.routes()[0][:-1])
    found = SampleGroup.from_bytes(group.to_bytes())
    context = replace(world.context(1), stored=lambda _: found)
    made = StoredInterface().generate(None, _named("a"), context).sample
    assert made is not None
    assert made.tensor(EXPERTS).tolist() == rows.flatten().tolist()
    assert made.lengths[EXPERTS] == [[12, 0]]


def _named(*ids: str) -> SequenceSample:
    return SequenceSample.from_default([1] * len(ids), ids, {"prompt_ids": torch.ones(len(ids))})


def test_only_calls_that_need_records_read_them(make_world: MakeWorld) -> None:
    """The critic reads no log-probabilities, and a reference has separate experts."""
    world = make_world(recompute_logprobs=True, kl={"coef": 0.1})
    config = restricted(world.settings.config)

    def users(algorithm: PolicyGradient, config: Config) -> set[str]:
        return {
            call.name
            for call in algorithm.calls(config)
            if {SIZES, IDS, EXPERTS} & {*call.inputs, *call.outputs}
        }

    assert users(world.ppo, config) == {"actor_gen", "actor_inf", "ref_inf", "actor_train"}
    assert not users(world.ppo, world.settings.config)
    assert not users(world.ppo, restricted(config, greedy=True))
    for call in world.ppo.evaluation_calls(config):
        assert SIZES not in call.outputs
    routed = restricted(world.settings.config, top_k=None, replay_experts=True)
    assert users(world.ppo, routed) == {"actor_gen", "actor_inf", "actor_train"}

    class Own(PolicyGradient):
        pass

    class Replaying(PolicyGradient):
        replays = True

    assert not users(Own(batch_size=4), config)
    assert users(Replaying(batch_size=4), config)
