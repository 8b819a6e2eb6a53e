"""The built-in episodes: one turn, or several with an environment. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from slurmrl.rollouts.base import Environment, EpisodeItem
from slurmrl.rollouts.completions import Completions
from slurmrl.rollouts.policy import Episode, Policy
from slurmrl.rollouts.tools.toolbox import Tools


class SingleTurn(Episode):
    """One turn."""

    async def __call__(self, policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        completions = Completions(item.prompt)
        await policy(completions)
        return completions


class MultiTurn(Episode):
    """Turns that an environment answers, until it or a limit ends the episode.

    A turn that is cut at `rollout.max_new_tokens` ends it too: its text is not whole.
    """

    def __init__(self, environment: Callable[[EpisodeItem, Tools], Environment]) -> None:
        self._environment = environment

    async def __call__(self, policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        environment = self._environment(item, tools)
        completions = Completions(item.prompt)
        while True:
            turn = await policy(completions)
            if not turn.stopped:
                return completions
            reply = await environment.step(turn)
            completions.reward(reply.reward)
            if reply.done:
                return completions
            policy.say(completions, reply.text, reply.role)
