"""Episodes: how the policy's turns, and the messages between them, become completions.

The configuration names a user's own episode, environment or tool ``package.module:name``
(docs/rollouts.md). A built-in one is a class and a line in a table below. Torch-free.
"""

from __future__ import annotations

from slurmrl.registry import Registry

EPISODES = Registry(
    "episode",
    {
        "single_turn": "slurmrl.rollouts.episodes:SingleTurn",
        "multi_turn": "slurmrl.rollouts.episodes:MultiTurn",
        "verifiers": "slurmrl.rollouts.environments:VerifiersEpisode",
    },
)
ENVIRONMENTS = Registry(
    "environment",
    {
        "guess_number": "slurmrl.rollouts.environments:GuessNumber",
        "tools": "slurmrl.rollouts.environments:ToolCalls",
    },
)
TOOLS = Registry(
    "tool",
    {
        "calculator": "slurmrl.rollouts.tools.shipped:Calculator",
        "python": "slurmrl.rollouts.tools.shipped:PythonTool",
    },
)
WITHOUT_REWARD = ("tools",)
"""Environments whose turns earn no rewards, so that the configuration needs a reward."""
