"""Settings of policy gradients, one section class for each part. Torch-free."""

from __future__ import annotations

from slurmrl.algorithms.policy.schema.advantages import KL
from slurmrl.algorithms.policy.schema.objective import Correction, Objective, Updates, Value
from slurmrl.algorithms.policy.schema.policy_gradient import (
    ACTOR_METRICS,
    CRITIC_METRICS,
    OLD_LOGPROBS,
    PolicyGradient,
)

__all__ = [
    "ACTOR_METRICS",
    "CRITIC_METRICS",
    "KL",
    "OLD_LOGPROBS",
    "Correction",
    "Objective",
    "PolicyGradient",
    "Updates",
    "Value",
]
