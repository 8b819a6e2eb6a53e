"""A game: the policy guesses a number, and learns whether the secret one is higher or lower."""

from __future__ import annotations

import re
from hashlib import blake2b

from slurmrl.errors import UsageError
from slurmrl.rollouts.base import Environment, EpisodeItem, PolicyTurn, Reply
from slurmrl.rollouts.tools.toolbox import Tools

NUMBER = re.compile(r"-?\d+")


class GuessNumber(Environment):
    """The last number of a turn is the guess. The turn that finds the secret earns 1.

    :param low: smallest secret.
    :param high: largest secret.

    The secret is the row's answer; of a row without one it follows from the sample's id, so that
    all completions of a prompt have the same.
    """

    def __init__(self, item: EpisodeItem, tools: Tools, *, low: int = 1, high: int = 100) -> None:
        super().__init__(item, tools)
        if low > high:
            raise UsageError(f"low {low} exceeds high {high}")
        self._low, self._high = low, high
        if item.answer and not NUMBER.fullmatch(item.answer.strip()):
            raise UsageError(f"the answer {item.answer!r} is not an integer to guess")
        draw = int.from_bytes(blake2b(item.sample_id.encode(), digest_size=8).digest(), "big")
        self._secret = int(item.answer) if item.answer else low + draw % (high - low + 1)

    async def step(self, turn: PolicyTurn) -> Reply:
        guesses = NUMBER.findall(turn.text)
        if not guesses:
            return Reply(text=f"Say a number from {self._low} to {self._high}.")
        if len(guesses[-1]) > 20:
            return Reply(text="lower")
        guess = int(guesses[-1])
        if guess == self._secret:
            return Reply(reward=1.0, done=True)
        return Reply(text="higher" if guess < self._secret else "lower")
