"""Custom episodes, environments and tools, named ``module:name`` in configurations."""

from __future__ import annotations

from slurmrl.rollouts.base import Environment, EpisodeItem, PolicyTurn, Reply
from slurmrl.rollouts.completions import Completions
from slurmrl.rollouts.policy import Policy
from slurmrl.rollouts.tools import Tools


async def once(policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
    completions = Completions(item.prompt)
    await policy(completions)
    return completions


async def several(
    policy: Policy, item: EpisodeItem, tools: Tools, *, turns: int = 3, message: str = "12"
) -> Completions:
    """An episode of several turns. The first turn fails if the id contains x."""
    if "x" in item.sample_id:
        raise ValueError("x marks the failure")
    completions = Completions(item.prompt)
    for number in range(turns):
        if number:
            policy.say(completions, message * (number + item.index))
        await policy(completions, max_new_tokens=2 + len(item.sample_id) % 3)
        completions.reward(0.25 * number)
    return completions


class Countdown(Environment):
    """An environment that ends after ``turns`` turns. The reward of a turn is its number."""

    def __init__(self, item: EpisodeItem, tools: Tools, *, turns: int = 2) -> None:
        super().__init__(item, tools)
        self._turns, self._made = turns, 0

    async def step(self, turn: PolicyTurn) -> Reply:
        self._made += 1
        return Reply(text="1", reward=float(self._made), done=self._made == self._turns)


class Adder:
    def __init__(self, *, more: int = 0) -> None:
        self._more = more
        self.closed = False

    def __call__(self, a: int, b: int) -> int:
        return a + b + self._more

    def close(self) -> None:
        self.closed = True


not_callable = 3
