"""Reward functions: rules that judge completions.

A new rule = one file beside ``exact_match.py`` plus one line below; a user's own rule is named
``package.module:Class`` in the configuration and needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurmrl.errors import UsageError
from slurmrl.registry import Registry, resolve

if TYPE_CHECKING:
    from slurmrl.rewards.base import RewardFunction

REWARDS = Registry(
    "reward",
    {
        "exact_match": "slurmrl.rewards.exact_match:ExactMatch",
        "math": "slurmrl.rewards.math:MathReward",
    },
)


def make(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """The reward function of a name of the table, or of ``module:Class``.

    :raises UsageError: an unknown name, or options that the rule does not take.
    """
    kind = resolve(name) if ":" in name else REWARDS.load(name)
    try:
        function: RewardFunction = kind(**options)
    except TypeError as error:
        raise UsageError(f"reward '{name}' with options {dict(options)}: {error}") from error
    return function
