"""Settings of SFT and on-policy distillation. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from slurmrl.algorithms.schema import AlgorithmSchema, generate_call, reward_calls, train_call
from slurmrl.config.schema import Config, PositiveFloat
from slurmrl.plan.dataflow import Call, Measure, Method, RoleUse

SUPERVISED = "slurmrl.algorithms.supervised:SFTInterface"


class SFT(AlgorithmSchema):
    """Supervised fine-tuning: cross entropy of the answers' tokens, given the prompts.

    In conversations, all turns of the assistant are answers.

    Evaluation on held-out prompts generates completions and scores them with the reward. Evaluation
    on held-out prompt-answer pairs or conversations computes the loss.
    """

    name: Literal["sft"] = "sft"
    """Name of the algorithm."""

    dataset_types: ClassVar[tuple[str, ...]] = ("prompt_answer", "messages")
    evaluation_types: ClassVar[tuple[str, ...]] = ("prompt", "prompt_answer", "messages")

    def roles(self) -> tuple[RoleUse, ...]:
        return (RoleUse("actor", trained=True, head="lm"),)

    def calls(self, config: Config) -> tuple[Call, ...]:
        return (train_call(SUPERVISED, ("input_ids", "prompt_mask")),)

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        if config.evaluates_completions:
            return (generate_call(config), *reward_calls(config))
        return (
            Call(
                name="actor_loss",
                role="actor",
                method=Method.INFERENCE,
                interface=SUPERVISED,
                inputs=("input_ids", "prompt_mask"),
                metrics=("loss",),
            ),
        )

    def evaluation_measures(self, config: Config) -> Mapping[str, Measure]:
        if config.evaluates_completions:
            return super().evaluation_measures(config)
        return {"loss": Measure.LOSS, "perplexity": Measure.PERPLEXITY}


DISTILLED = "slurmrl.algorithms.supervised:DistillInterface"
DISTILL_METRICS = ("entropy", "importance_ratio")


class Distill(AlgorithmSchema):
    """On-policy distillation: a teacher scores the tokens of the actor's completions.

    The actor learns from the teacher's log-probabilities of these tokens. Evaluation on held-out
    prompts measures the divergence from the teacher. If the configuration has a reward, evaluation
    also scores the completions.
    """

    name: Literal["distill"] = "distill"
    """Name of the algorithm."""
    importance_cap: PositiveFloat | None = 2.0
    """Upper bound of a token's importance weight p(training) / p(generation), which corrects for
    differences between the two engines. `null` sets no bound."""

    dataset_types: ClassVar[tuple[str, ...]] = ("prompt",)
    trains_on_samples: ClassVar[bool] = True

    def roles(self) -> tuple[RoleUse, ...]:
        return (RoleUse("actor", trained=True, head="lm"), RoleUse("teacher", trained=False))

    def calls(self, config: Config) -> tuple[Call, ...]:
        train = train_call(
            DISTILLED, ("input_ids", "prompt_mask", "logprobs", "teacher_logprobs"), DISTILL_METRICS
        )
        return (generate_call(config), teacher_call(), train)

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        scoring = () if config.reward is None else reward_calls(config)
        return (generate_call(config), *scoring, teacher_call())


def teacher_call() -> Call:
    """Return the teacher's log-probabilities of the actor's tokens."""
    return Call(
        name="teacher_inf",
        role="teacher",
        method=Method.INFERENCE,
        interface=DISTILLED,
        inputs=("input_ids", "prompt_mask", "logprobs"),
        outputs=("teacher_logprobs",),
        metrics=("reverse_kl", "teacher_logprob"),
    )
