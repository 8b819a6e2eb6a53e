"""On-policy distillation: the estimate of sampled tokens, and a whole step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.rollout_calls import RolloutInterface
from slurmrl.algorithms.supervised import DistillInterface, distill_loss
from slurmrl.algorithms.supervised_schema import Distill
from slurmrl.config.schema import Config, Dataset, Model, Optimizer, Rollout
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.plan.settings import Settings
from tests.support.decoder_folders import from_hf
from tests.unit.algorithms.conftest import ARCHITECTURE, END, VOCABULARY, alone, take

SIZE = 5


def tokens(logprobs: Tensor, teacher: Tensor) -> SequenceSample:
    """Return a sequence of two tokens for each token of the vocabulary."""
    lengths = [[2]] * SIZE
    mask = torch.tensor([True, False] * SIZE)
    data = {"prompt_mask": mask, "logprobs": spread(logprobs), "teacher_logprobs": spread(teacher)}
    keys = dict.fromkeys(data, lengths)
    return SequenceSample(tuple("abcde"), keys, data=dict(data))


def spread(values: Tensor) -> Tensor:
    """Return tensor values [V] placed at the second token of each sequence."""
    return torch.stack([torch.full_like(values, 9.0), values], dim=1).flatten()


def gradient(
    student: Tensor, teacher: Tensor, sampled: Tensor, options: Distill
) -> tuple[Tensor, float]:
    """Return the expected gradient by the student's logits, and the expected loss."""
    logits = student.clone().requires_grad_()
    sample = tokens(sampled, teacher)
    total = torch.zeros_like(student)
    value = 0.0
    for index in range(SIZE):
        logp = torch.log_softmax(logits, 0)
        outputs = {"logp": spread(logp[[index]]), "entropy": spread(torch.zeros(1))}
        loss, _ = distill_loss(outputs, sample.take([index]), options)
        (own,) = torch.autograd.grad(loss, logits)
        total += sampled[index].exp() * own
        value += float(sampled[index].exp() * loss.detach())
    return total, value


def exact(student: Tensor, teacher: Tensor) -> tuple[Tensor, float]:
    logits = student.clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    kl = (logp.exp() * (logp - teacher)).sum()
    kl.backward()
    assert logits.grad is not None
    return logits.grad, kl.item()


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second, third = torch.randn(3, SIZE, generator=generator, dtype=torch.float64)
    return first, torch.log_softmax(second, 0), torch.log_softmax(0.3 * third, 0)


@pytest.mark.parametrize("cap", [None, 100.0])
def test_estimate_equals_the_gradient_of_the_reverse_kl(cap: float | None) -> None:
    """In expectation over the sampled token, value and gradient equal KL(p || teacher)."""
    student, teacher, _ = distributions()
    options = Distill(batch_size=1, importance_cap=cap)
    found, value = gradient(student, teacher, torch.log_softmax(student, 0), options)
    wanted, kl = exact(student, teacher)
    torch.testing.assert_close(found, wanted)
    assert value == pytest.approx(kl)


def test_importance_weights_correct_for_another_sampling_distribution() -> None:
    """The expectation is the same unless a cap cuts the weights."""
    student, teacher, sampled = distributions()
    wanted, _ = exact(student, teacher)
    for cap in (None, 1e3):
        found, _ = gradient(student, teacher, sampled, Distill(batch_size=1, importance_cap=cap))
        torch.testing.assert_close(found, wanted)
    other, _ = gradient(student, teacher, sampled, Distill(batch_size=1, importance_cap=0.5))
    assert (other - wanted).abs().max() > 1e-3


PROMPTS, GROUP, LONGEST = 6, 4, 6
LEARNING_RATE = 1.0


def logprobs(model: PreTrainedModel, ids: Tensor, prompt: Tensor) -> Tensor:
    """Return the log-probability of each token of a completion."""
    rows = torch.log_softmax(model(ids[None]).logits[0], -1)
    return rows[:-1].gather(1, ids[1:, None])[:, 0][~prompt[1:]]


def distill(model: PreTrainedModel, teacher: PreTrainedModel, sample: SequenceSample) -> None:
    """Make one update with log(p / p_teacher) of the sampled tokens as their cost."""
    sizes = [length for row in sample.lengths["input_ids"] for length in row]
    losses = []
    for ids, prompt in zip(
        sample.tensor("input_ids").split(sizes),
        sample.tensor("prompt_mask").split(sizes),
        strict=True,
    ):
        own = logprobs(model, ids, prompt)
        losses.append((own - logprobs(teacher, ids, prompt)).detach() * own)
    cast(Any, torch.cat(losses).mean()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad


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


def context_of(algorithm: Distill, batch: tuple[str, ...]) -> CallContext:
    config = Config(
        experiment="test",
        total_steps=1,
        algorithm={"name": "distill"},
        actor=Model(architecture=ARCHITECTURE),
        rollout=Rollout(n=GROUP, max_new_tokens=LONGEST),
        dataset=Dataset(type="prompt", path="unused"),
    )
    settings = Settings(config, algorithm, cast(Any, None))
    return CallContext(1, 1, {}, cast(Any, None), settings, (END,), batch)


def weights_of(folder: Path) -> dict[str, Tensor]:
    decoder = from_hf(folder, dtype=torch.float64)
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def test_distillation_step_equals_its_definition(tmp_path: Path) -> None:
    """Both steps from the same completions give the same weights."""
    before, after = tmp_path / "before", tmp_path / "after"
    model, teacher = made_model(before, seed=1), made_model(tmp_path / "teacher", seed=2)
    actor = engine("actor", before)
    context = context_of(Distill(batch_size=PROMPTS), tuple("abcdef"))
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(2, VOCABULARY, (3 * PROMPTS,), generator=generator)
    sample = SequenceSample.from_default([3] * PROMPTS, context.batch, {"prompt_ids": prompts})
    take(sample, RolloutInterface().generate(actor, sample, context))
    interface = DistillInterface()
    take(sample, interface.inference(engine("teacher", tmp_path / "teacher"), sample, context))
    interface.train_step(actor, sample, context)
    distill(model, teacher, sample)
    model.save_pretrained(after)
    old, new = weights_of(before), weights_of(after)
    for name, weight in actor.storages().items():
        moved = (new[name] - old[name]).abs().max().item()
        difference = (weight.double().view_as(new[name]) - new[name]).abs().max().item()
        assert difference < 1e-4 * moved + 1e-6, (name, difference, moved)
