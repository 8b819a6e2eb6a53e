"""Settings of policy gradients, one section class for each part. Torch-free."""

from __future__ import annotations

from slurmrl.algorithms.policy.schema.policy_gradient import (
    ACTOR_METRICS,
    CRITIC_METRICS,
    GREEDY,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    PolicyGradient,
)
from slurmrl.algorithms.policy.schema.sections import (
    KL,
    OF_COMPLETIONS,
    Correction,
    Objective,
    Updates,
    Value,
)

__all__ = [
    "ACTOR_METRICS",
    "CRITIC_METRICS",
    "GREEDY",
    "KL",
    "OF_COMPLETIONS",
    "OLD_LOGPROBS",
    "REF_LOGPROBS",
    "Correction",
    "Objective",
    "PolicyGradient",
    "Updates",
    "Value",
]
