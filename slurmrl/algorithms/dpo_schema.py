"""Settings of DPO. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from slurmrl.algorithms.schema import (
    AlgorithmSchema,
    compare_call,
    generate_call,
    reference_call,
    reward_calls,
    sequences_of_pairs,
    train_call,
)
from slurmrl.config.schema import Config, NonNegativeFloat, PositiveFloat
from slurmrl.plan.dataflow import Call, Measure, RoleUse

INTERFACE = "slurmrl.algorithms.dpo:DPOInterface"
PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


class DPO(AlgorithmSchema):
    """Direct preference optimization: the actor learns from pairs of answers.

    It needs no reward model and no generation. Evaluation on held-out pairs computes loss, margins
    and accuracies. Evaluation on held-out prompts generates completions and scores them with the
    reward.
    """

    name: Literal["dpo"] = "dpo"
    """`dpo`."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """`sigmoid` is the loss of the DPO paper, `ipo` regresses the margin to 1 / (2 beta), `hinge`
    stops once beta times the margin exceeds 1."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference model (for `hinge`, the inverse of the margin)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """For `sigmoid`: probability that a label is wrong (conservative DPO)."""
    length_normalized: bool = False
    """Divide the log-ratio of each answer by the number of its tokens before the loss: pairs of
    long answers count no more than those of short ones."""
    sft_coef: NonNegativeFloat = 0.0
    """Coefficient of the cross entropy of the chosen answer, the mean over its tokens, in the loss
    of a pair: it keeps chosen answers likely."""
    reference_free: bool = False
    """Leave the reference model out, as if it gave all answers the same probability."""

    dataset_types: ClassVar[tuple[str, ...]] = ("preference",)
    evaluation_types: ClassVar[tuple[str, ...]] = ("preference", "prompt")

    @model_validator(mode="after")
    def _smooths_labels(self) -> DPO:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(
                f"label_smoothing {self.label_smoothing} has no meaning for loss '{self.loss}': "
                "set it to 0 or use loss sigmoid"
            )
        return self

    def sequences_per_item(self, config: Config) -> int:
        return sequences_of_pairs(config)

    def roles(self) -> tuple[RoleUse, ...]:
        actor = RoleUse("actor", trained=True, head="lm")
        return (actor,) if self.reference_free else (actor, RoleUse("ref", trained=False))

    def why_unused(self, role: str) -> str:
        if role == "ref":
            return "algorithm.reference_free is true"
        return super().why_unused(role)

    def calls(self, config: Config) -> tuple[Call, ...]:
        train = train_call(INTERFACE, self._inputs, PAIR_METRICS)
        return (*self._reference_calls(), train)

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        if config.evaluates_completions:
            return (generate_call(config), *reward_calls(config))
        compare = compare_call(INTERFACE, self._inputs, PAIR_METRICS)
        return (*self._reference_calls(), compare)

    def evaluation_measures(self, config: Config) -> Mapping[str, Measure]:
        if config.evaluates_completions:
            return super().evaluation_measures(config)
        return {"rewards/accuracies": Measure.RATE, "rewards/margins": Measure.MEAN}

    @property
    def _inputs(self) -> tuple[str, ...]:
        own = ("input_ids", "prompt_mask")
        return own if self.reference_free else (*own, "ref_logps")

    def _reference_calls(self) -> tuple[Call, ...]:
        return () if self.reference_free else (reference_call(),)
