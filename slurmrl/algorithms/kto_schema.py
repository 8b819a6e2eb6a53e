"""Settings of KTO. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from slurmrl.algorithms.schema import (
    AlgorithmSchema,
    compare_call,
    generate_call,
    reference_call,
    reward_calls,
    train_call,
)
from slurmrl.config.schema import Config, NonNegativeFloat, PositiveFloat
from slurmrl.plan.dataflow import Call, Measure, RoleUse

INTERFACE = "slurmrl.algorithms.kto:KTOInterface"
INPUTS = ("input_ids", "prompt_mask", "desirable", "ref_logps")
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
    """`kto`."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference model."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of desirable answers. With many more of one kind than of the other, choose weights
    so that (desirable answers x weight) / (undesirable answers x weight) is between 1 and 4/3."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of undesirable answers."""

    dataset_types: ClassVar[tuple[str, ...]] = ("kto",)
    evaluation_types: ClassVar[tuple[str, ...]] = ("kto", "prompt")

    def sequences_per_item(self, config: Config) -> int:
        """An answer and a mismatched one."""
        return 2

    def roles(self) -> tuple[RoleUse, ...]:
        return (RoleUse("actor", trained=True, head="lm"), RoleUse("ref", trained=False))

    def calls(self, config: Config) -> tuple[Call, ...]:
        return (
            reference_call(),
            train_call(INTERFACE, INPUTS, KTO_METRICS),
        )

    def evaluation_calls(self, config: Config) -> tuple[Call, ...]:
        if config.evaluates_completions:
            return (generate_call(config), *reward_calls(config))
        return (
            reference_call(),
            compare_call(INTERFACE, INPUTS, KTO_METRICS),
        )

    def evaluation_measures(self, config: Config) -> Mapping[str, Measure]:
        if config.evaluates_completions:
            return super().evaluation_measures(config)
        return {
            "loss": Measure.MEAN,
            "rewards/accuracies": Measure.RATE,
            "rewards/chosen": Measure.PART_MEAN,
            "rewards/rejected": Measure.PART_MEAN,
        }
