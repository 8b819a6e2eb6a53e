"""The calls of PPO's and SFT's steps run on a GPU with all tensors on the right device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.actor import ActorInterface, RecomputeInterface
from slurmrl.algorithms.policy.baselines import CriticInterface
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.rollout_calls import RolloutInterface
from slurmrl.algorithms.scalars import PolicyScalars
from slurmrl.algorithms.supervised import SFTInterface
from slurmrl.config.schema import Config, Dataset, Model
from slurmrl.data.sample import SequenceSample
from slurmrl.plan.settings import Settings
from tests.null_gpu import cases
from tests.null_gpu.values import SmallValues

PROMPTS = (7, 20, 12, 33, 20, 5, 9, 31)
NEW_TOKENS = 20
pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core warns of its own settings


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    with cases.first_of(1), SmallValues():
        yield


def call_context() -> CallContext:
    """Return the context of a PPO step in which every setting that adds GPU work has a value."""
    names = tuple(f"item{index}" for index in range(len(PROMPTS)))
    ppo = PolicyGradient(
        batch_size=len(PROMPTS),
        n_minibatches=2,
        n_epochs=2,
        entropy_coef=0.01,
        early_stop_importance_ratio=10.0,
        early_stop_kl=1000.0,
        recompute_logprobs=True,
        shuffle_minibatches=True,
        ratio="sequence",
        dual_clip=3.0,
        aggregation="sequences",
        m2_threshold=0.04,
        correction="mask",
        correction_level="geometric",
        value_huber_delta=1.0,
        value_norm="moving",
    )
    config = Config(
        experiment="test",
        total_steps=1,
        algorithm={"name": "ppo"},
        actor=Model(architecture=cases.TINY),
        rollout={"max_new_tokens": NEW_TOKENS, "min_new_tokens": 2, "top_p": 0.9, "top_k": 50},
        dataset=Dataset(type="prompt", path="unused"),
    )
    settings = Settings(config, ppo, cast(Any, None))
    scalars = PolicyScalars(ppo).values()
    # All logits are 0, so top-k leaves the lowest ids: no completion draws the stop token.
    return CallContext(1, 1, scalars, cast(Any, None), settings, (60,), names)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_ppo_step_makes_the_expected_gpu_calls(experts: bool) -> None:
    """Generation, inference of reference and critic, recomputation, training of both."""
    architecture = cases.TINY_EXPERTS if experts else cases.TINY
    context = call_context()
    actor = cases.engine(architecture)
    critic = cases.engine(architecture, head="value")
    reference = cases.engine(architecture, trained=False)
    lengths = {"prompt_ids": [[length] for length in PROMPTS]}
    prompts = SequenceSample(
        context.batch, lengths, data={"prompt_ids": torch.arange(sum(PROMPTS)) % 100}
    )
    sample = RolloutInterface().generate(actor, prompts, context).sample
    assert sample is not None
    assert sum(sample.item_lengths("input_ids")) == sum(PROMPTS) + NEW_TOKENS * len(PROMPTS)
    rewards: dict[str, Any] = {"rewards": torch.arange(float(len(PROMPTS)))}
    sample.update_(SequenceSample.from_default([1] * len(PROMPTS), context.batch, rewards))
    for interface, engine in (
        (ActorInterface(), reference),
        (CriticInterface(), critic),
        (RecomputeInterface(), actor),
    ):
        found = interface.inference(engine, sample, context).sample
        assert found is not None
        sample.update_(found)
    for trainer, engine in ((ActorInterface(), actor), (CriticInterface(), critic)):
        stats = trainer.train_step(engine, sample, context).stats
        assert stats[f"{'actor' if engine is actor else 'critic'}_updates"][0] == 4.0


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_ppo_training_step_runs_with_every_engine(engine: str) -> None:
    context = call_context()
    sample = cases.batch([2 * length for length in PROMPTS])
    sample.update_(
        SequenceSample.from_default(
            [2 * length for length in PROMPTS],
            context.batch,
            {"old_logprobs": sample.tensor("logprobs")},
        )
    )
    for head, interface in (("lm", ActorInterface()), ("value", CriticInterface())):
        made = cases.engine(cases.TINY_EXPERTS, name=engine, head=cast(Any, head))
        assert interface.train_step(made, sample, context).stats


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_sft_step_and_evaluation_make_the_expected_gpu_calls(engine: str) -> None:
    context = replace(call_context(), step=11)  # it has no tokenizer to show what is trained on
    sample = cases.batch(PROMPTS)
    made = cases.engine(cases.TINY, name=engine)
    assert SFTInterface().train_step(made, sample, context).stats["skipped"] == (0.0, 1.0)
    assert SFTInterface().inference(made, sample, context).stats["loss"][1] > 0
