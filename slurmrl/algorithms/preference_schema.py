"""Settings of algorithms that learn from preferences: DPO, KTO and reward models. Torch-free."""

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

DPO_INTERFACE = "slurmrl.algorithms.pairs:DPOInterface"
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

    DPO needs no reward model and no generation. Evaluation on held-out pairs computes loss, margins
    and accuracies. Evaluation on held-out prompts generates completions and scores them with the
    reward.
    """

    name: Literal["dpo"] = "dpo"
    """Name of the algorithm."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of a pair.

    - `sigmoid`: the loss of the DPO paper.
    - `ipo`: regresses the margin to 1 / (2 beta).
    - `hinge`: is 0 once beta times the margin exceeds 1."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference model; with `hinge`, the inverse of the margin."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """With `sigmoid`: probability that a label is wrong (conservative DPO). Example: `0.1`"""
    length_normalized: bool = False
    """Divide the log-ratio of each answer by its number of tokens before the loss, so that pairs of
    long answers count no more than pairs of short answers."""
    sft_coef: NonNegativeFloat = 0.0
    """Coefficient of the chosen answer's cross entropy (mean over its tokens) in the loss of a
    pair. This term keeps chosen answers likely. Example: `0.1`"""
    reference_free: bool = False
    """Use no reference model; all answers then count as equally likely under the reference."""

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
        train = train_call(DPO_INTERFACE, self._inputs, PAIR_METRICS)
        return (*self._reference_calls(), train)

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        if config.evaluates_completions:
            return (generate_call(config), *reward_calls(config))
        compare = compare_call(DPO_INTERFACE, self._inputs, PAIR_METRICS)
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


KTO_INTERFACE = "slurmrl.algorithms.kto:KTOInterface"
KTO_INPUTS = ("input_ids", "prompt_mask", "desirable", "ref_logps")
KTO_METRICS = (
    "kl",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


class KTO(AlgorithmSchema):
    """Kahneman-Tversky optimization: the actor learns from single labeled answers.

    The labels are desirable and undesirable. Evaluation on held-out labeled answers computes loss,
    rewards and accuracies. Evaluation on held-out prompts generates completions and scores them
    with the reward.
    """

    name: Literal["kto"] = "kto"
    """Name of the algorithm."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference model."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of desirable answers. If one kind of answer is much more frequent, choose weights so
    that (desirable answers x weight) / (undesirable answers x weight) is between 1 and 4/3."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of undesirable answers."""

    dataset_types: ClassVar[tuple[str, ...]] = ("kto",)
    evaluation_types: ClassVar[tuple[str, ...]] = ("kto", "prompt")

    def sequences_per_item(self, config: Config) -> int:
        """Return 2: each item has its own answer and a mismatched answer."""
        return 2

    def roles(self) -> tuple[RoleUse, ...]:
        return (RoleUse("actor", trained=True, head="lm"), RoleUse("ref", trained=False))

    def calls(self, config: Config) -> tuple[Call, ...]:
        return (reference_call(), train_call(KTO_INTERFACE, KTO_INPUTS, KTO_METRICS))

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        if config.evaluates_completions:
            return (generate_call(config), *reward_calls(config))
        return (reference_call(), compare_call(KTO_INTERFACE, KTO_INPUTS, KTO_METRICS))

    def evaluation_measures(self, config: Config) -> Mapping[str, Measure]:
        if config.evaluates_completions:
            return super().evaluation_measures(config)
        return {
            "loss": Measure.MEAN,
            "rewards/accuracies": Measure.RATE,
            "rewards/chosen": Measure.PART_MEAN,
            "rewards/rejected": Measure.PART_MEAN,
        }


REWARD_MODEL_INTERFACE = "slurmrl.algorithms.reward_model:RewardModelInterface"
REWARD_MODELS = (
    REWARD_MODEL_INTERFACE,
    "slurmrl.algorithms.reward_model.interface:RewardModelInterface",
)
"""Names of the interface in plans of this release and of older releases."""
REWARD_MODEL_INPUTS = ("input_ids", "prompt_mask")
SCORE_METRICS = ("accuracy", "margin", "score_chosen", "score_rejected")


class RewardModel(AlgorithmSchema):
    """Training of a reward model: the actor learns to score answers from pairs of answers.

    The actor gets a scalar head. The score of an answer is the head's value at the token that ends
    the answer's turn. Evaluation on held-out pairs computes loss, accuracy and margin.
    """

    name: Literal["reward_model"] = "reward_model"
    """Name of the algorithm."""
    center_coef: NonNegativeFloat = 0.0
    """Coefficient of (chosen + rejected)^2 of a pair's scores, which keeps the mean of the scores
    at 0. Example: `0.01`"""

    dataset_types: ClassVar[tuple[str, ...]] = ("preference",)
    evaluation_types: ClassVar[tuple[str, ...]] = ("preference",)

    def sequences_per_item(self, config: Config) -> int:
        return sequences_of_pairs(config)

    def roles(self) -> tuple[RoleUse, ...]:
        return (RoleUse("actor", trained=True, head="value"),)

    def calls(self, config: Config) -> tuple[Call, ...]:
        return (train_call(REWARD_MODEL_INTERFACE, REWARD_MODEL_INPUTS, SCORE_METRICS),)

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        return (compare_call(REWARD_MODEL_INTERFACE, REWARD_MODEL_INPUTS, SCORE_METRICS),)

    def evaluation_measures(self, config: Config) -> Mapping[str, Measure]:
        return {"accuracy": Measure.RATE, "margin": Measure.MEAN}
