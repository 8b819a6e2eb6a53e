"""Completions: engines that generate tokens, and episodes with environments and tools.

The configuration names a user's own episode, environment or tool as ``package.module:name``
(docs/rollouts.md). To add a built-in episode, environment or tool, add a class and a line in a
table below. Torch-free.
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
