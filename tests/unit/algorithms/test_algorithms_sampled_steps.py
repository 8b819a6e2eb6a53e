"""Whole training steps, from sampled completions to updated weights, against loops over tokens in
float64 on a model of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slurmrl.algorithms.base import CallContext, Interface
from slurmrl.algorithms.policy.actor import ActorInterface
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.rollout_calls import RolloutInterface
from slurmrl.algorithms.supervised import DistillInterface
from slurmrl.algorithms.supervised_schema import Distill
from slurmrl.config.schema import Config, Dataset, Model, Optimizer, Rollout
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.plan.settings import Settings
from tests.support.decoder_folders import from_hf
from tests.unit.algorithms.conftest import ARCHITECTURE, END, VOCABULARY, alone, take

PROMPTS, GROUP, LONGEST = 6, 4, 6
LEARNING_RATE = 1.0
"""Of plain gradient descent: the later updates of a step are far from the sampling policy."""
HIGH = 0.5
"""The upper bound of CISPO's weights is 1 + this."""


@dataclass(frozen=True)
class Completion:
    prompt: list[int]
    tokens: list[int]
    reward: float


Step = Callable[[PreTrainedModel, Sequence[Sequence[Completion]]], float]
"""Trains the model on the completions of each prompt; returns the largest probability ratio."""


# -- the reference --------------------------------------------------------------------------------


def logprobs(model: PreTrainedModel, completion: Completion) -> list[Tensor]:
    """Return the log-probability of each token of the completion."""
    ids = torch.tensor([[*completion.prompt, *completion.tokens]])
    rows = torch.log_softmax(model(ids).logits[0], -1)
    first = len(completion.prompt)
    return [rows[first - 1 + place, token] for place, token in enumerate(completion.tokens)]


def descend(model: PreTrainedModel, loss: Tensor) -> None:
    model.zero_grad()
    cast(Any, loss).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad


def cispo(model: PreTrainedModel, groups: Sequence[Sequence[Completion]]) -> float:
    """Make two epochs over two minibatches of prompts by equations 4 and 5 without a lower bound,
    averaged over the tokens of a minibatch.
    """
    largest = 0.0
    with torch.no_grad():
        old = [[[float(x) for x in logprobs(model, c)] for c in group] for group in groups]
    for first in (0, PROMPTS // 2) * 2:
        gains = []
        for group, was in list(zip(groups, old, strict=True))[first : first + PROMPTS // 2]:
            rewards = [c.reward for c in group]
            for completion, before in zip(group, was, strict=True):
                advantage = (completion.reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
                for logp, previous in zip(logprobs(model, completion), before, strict=True):
                    ratio = (logp.detach() - previous).exp()
                    largest = max(largest, float(ratio))
                    gains.append(ratio.clamp(max=1 + HIGH) * advantage * logp)
        descend(model, -torch.stack(gains).mean())
    return largest


def distillation(teacher: PreTrainedModel) -> Step:
    """Make one update with log(p / p_teacher) of the sampled tokens as their cost."""

    def step(model: PreTrainedModel, groups: Sequence[Sequence[Completion]]) -> float:
        losses = []
        for completion in [c for group in groups for c in group]:
            with torch.no_grad():
                targets = logprobs(teacher, completion)
            for logp, target in zip(logprobs(model, completion), targets, strict=True):
                losses.append((logp - target).detach() * logp)
        descend(model, torch.stack(losses).mean())
        return 1.0

    return step


# -- steps of slurmrl -----------------------------------------------------------------------------


def made_model(folder: Path, seed: int) -> PreTrainedModel:
    """Return a model of transformers with weights in float64. ``folder`` has them in float32."""
    torch.manual_seed(seed)
    made = dict(ARCHITECTURE)
    config = AutoConfig.for_model(made.pop("model_type"), **made)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)  # far from a uniform distribution
    model.save_pretrained(folder)
    return cast(PreTrainedModel, model.double().eval())


def engine(role: str, source: Path) -> FSDPEngine:
    optimizer = Optimizer(name="sgd", lr=LEARNING_RATE, gradient_clip=None)
    return FSDPEngine(
        role,
        Model(path=str(source), optimizer=optimizer, max_tokens_per_microbatch=50),
        head="lm",
        trained=role == "actor",
        context=alone(role),
        seed=1,
        total_steps=100,
        source=source,
    )


def context_of(algorithm: Any, batch: tuple[str, ...]) -> CallContext:
    config = Config(
        experiment="test",
        total_steps=1,
        algorithm={"name": "ppo"},
        actor=Model(architecture=ARCHITECTURE),
        rollout=Rollout(n=GROUP, max_new_tokens=LONGEST),
        dataset=Dataset(type="prompt", path="unused"),
    )
    settings = Settings(config, algorithm, cast(Any, None))
    return CallContext(1, 1, {"kl_coef": 0.0}, cast(Any, None), settings, (END,), batch)


def completed(actor: FSDPEngine, context: CallContext) -> SequenceSample:
    """Return completions whose rewards differ within every group."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(2, VOCABULARY, (3 * PROMPTS,), generator=generator)
    sample = SequenceSample.from_default([3] * PROMPTS, context.batch, {"prompt_ids": prompts})
    take(sample, RolloutInterface().generate(actor, sample, context))
    rewards = (torch.arange(PROMPTS * GROUP) * 5 % 7).float() / 2
    lengths = {"rewards": [[1] * GROUP] * PROMPTS}
    sample.update_(SequenceSample(sample.ids, lengths, data={"rewards": rewards}))
    return sample


def completions_of(sample: SequenceSample) -> list[list[Completion]]:
    """The groups of the sample."""
    rows = sample.lengths["input_ids"]
    sizes = [length for row in rows for length in row]
    pieces = zip(
        sample.tensor("input_ids").split(sizes),
        sample.tensor("prompt_mask").split(sizes),
        sample.tensor("rewards").tolist(),
        strict=True,
    )
    flat = [
        Completion(ids[prompt].tolist(), ids[~prompt].tolist(), reward)
        for ids, prompt, reward in pieces
    ]
    return [flat[place : place + GROUP] for place in range(0, len(flat), GROUP)]


def test_cispo_step_equals_its_paper(tmp_path: Path) -> None:
    """Covers advantages, weights, their bound, averages and minibatches. All weights are equal
    after four updates, the last of which is far from the sampling policy.
    """
    settings = {"name": "cispo", "n_minibatches": 2, "n_epochs": 2, "clip_ratio_high": HIGH}
    algorithm = PolicyGradient.model_validate({"batch_size": PROMPTS, **settings})
    check(ActorInterface(), algorithm, cispo, tmp_path)


def test_distillation_step_equals_its_definition(tmp_path: Path) -> None:
    teacher = made_model(tmp_path / "teacher", seed=2)
    step = distillation(teacher)
    check(DistillInterface(), Distill(batch_size=PROMPTS), step, tmp_path, teacher=True)


def check(
    interface: Interface, algorithm: Any, step: Step, folder: Path, *, teacher: bool = False
) -> None:
    """Check that both steps from the same completions give the same weights."""
    model = made_model(folder / "before", seed=1)
    actor = engine("actor", folder / "before")
    context = context_of(algorithm, tuple("abcdef"))
    sample = completed(actor, context)
    if teacher:
        take(sample, interface.inference(engine("teacher", folder / "teacher"), sample, context))
    interface.train_step(actor, sample, context)
    largest = step(model, completions_of(sample))
    assert teacher or largest > 2 * (1 + HIGH), "no bound acts"
    model.save_pretrained(folder / "after")
    before, after = (weights_of(folder / name) for name in ("before", "after"))
    for name, weight in actor.storages().items():
        moved = (after[name] - before[name]).abs().max().item()
        difference = (weight.double().view_as(after[name]) - after[name]).abs().max().item()
        assert difference < 1e-4 * moved + 1e-6, (name, difference, moved)


def weights_of(folder: Path) -> dict[str, Tensor]:
    decoder = from_hf(folder, dtype=torch.float64)
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}
