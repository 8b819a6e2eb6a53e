"""Settings of reward models. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from slurmrl.algorithms.schema import AlgorithmSchema, compare_call, sequences_of_pairs, train_call
from slurmrl.config.schema import Config, NonNegativeFloat
from slurmrl.plan.dataflow import Call, Measure, RoleUse

INTERFACE = "slurmrl.algorithms.reward_model:RewardModelInterface"
INTERFACES = (INTERFACE, "slurmrl.algorithms.reward_model.interface:RewardModelInterface")
"""Its names in plans: today's, and that of older releases."""
INPUTS = ("input_ids", "prompt_mask")
SCORE_METRICS = ("accuracy", "margin", "score_chosen", "score_rejected")


class RewardModel(AlgorithmSchema):
    """Training of a reward model: the actor learns to score answers from pairs of answers.

    The actor gets a scalar head. The score of an answer is the head's value at the token that ends
    the answer's turn. Evaluation on held-out pairs computes loss, accuracy and margin.
    """

    name: Literal["reward_model"] = "reward_model"
    """`reward_model`."""
    center_coef: NonNegativeFloat = 0.0
    """Coefficient of (chosen + rejected)^2 of a pair's scores, which keeps their mean at 0."""

    dataset_types: ClassVar[tuple[str, ...]] = ("preference",)
    evaluation_types: ClassVar[tuple[str, ...]] = ("preference",)

    def sequences_per_item(self, config: Config) -> int:
        return sequences_of_pairs(config)

    def roles(self) -> tuple[RoleUse, ...]:
        return (RoleUse("actor", trained=True, head="value"),)

    def calls(self, config: Config) -> tuple[Call, ...]:
        return (train_call(INTERFACE, INPUTS, SCORE_METRICS),)

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        return (compare_call(INTERFACE, INPUTS, SCORE_METRICS),)

    def evaluation_measures(self, config: Config) -> Mapping[str, Measure]:
        return {"accuracy": Measure.RATE, "margin": Measure.MEAN}
