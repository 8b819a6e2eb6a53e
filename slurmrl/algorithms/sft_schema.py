"""Settings of SFT. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from slurmrl.algorithms.schema import AlgorithmSchema, generate_call, reward_calls, train_call
from slurmrl.config.schema import Config
from slurmrl.plan.dataflow import Call, Measure, Method, RoleUse

INTERFACE = "slurmrl.algorithms.sft:SFTInterface"


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
        return (train_call(INTERFACE, ("input_ids", "prompt_mask")),)

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        if config.evaluates_completions:
            return (generate_call(config), *reward_calls(config))
        return (
            Call(
                name="actor_loss",
                role="actor",
                method=Method.INFERENCE,
                interface=INTERFACE,
                inputs=("input_ids", "prompt_mask"),
                metrics=("loss",),
            ),
        )

    def evaluation_measures(self, config: Config) -> Mapping[str, Measure]:
        if config.evaluates_completions:
            return super().evaluation_measures(config)
        return {"loss": Measure.LOSS, "perplexity": Measure.PERPLEXITY}
