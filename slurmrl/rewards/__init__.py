"""Reward functions: rules that score completions.

To add a rule, add a subclass of `base.RewardFunction` and a line to the table below. The
configuration names a user's own function or class as ``package.module:name`` (docs/rewards.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from slurmrl.registry import Registry
from slurmrl.rewards.checked_reward import CheckedReward

REWARDS = Registry(
    "reward",
    {
        "code": "slurmrl.rewards.code:CodeReward",
        "exact_match": "slurmrl.rewards.base:ExactMatch",
        "math": "slurmrl.rewards.math:MathReward",
        "model": "slurmrl.rewards.base:ModelReward",
    },
)


def make(name: str, options: Mapping[str, Any], *, cores: int | None = None) -> CheckedReward:
    """Make the function for a name in the table or for ``module:name``.

    :param cores: number of CPU cores that the function may use; default: the cores of this process.

    :raises UsageError: an unknown name, an object that is not a reward, or options that it rejects.
    :raises UnreadableInputError: the module cannot be imported.
    """
    return CheckedReward(name, REWARDS.find(name), options, cores or len(os.sched_getaffinity(0)))
