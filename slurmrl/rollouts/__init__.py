"""Episodes: how the policy's turns, and the messages between them, become completions.

An episode, an environment or a tool of a user's own is named ``package.module:name`` in the
configuration (docs/rollouts.md); a built-in one is a class and a line below. Torch-free.
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
        "calculator": "slurmrl.rollouts.tools.calculator:Calculator",
        "python": "slurmrl.rollouts.tools.python:PythonTool",
    },
)
WITHOUT_REWARD = ("tools",)
"""Environments whose turns earn nothing, so that the configuration needs a reward."""
