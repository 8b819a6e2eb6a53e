"""Types that episodes and environments exchange. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmrl.rollouts.completions import Completion

if TYPE_CHECKING:
    from slurmrl.rollouts.tools import Tools


@dataclass(frozen=True, kw_only=True)
class EpisodeItem:
    """The prompt of an episode. Each of a prompt's ``rollout.n`` completions is an episode."""

    sample_id: str
    """Id of the row, with the epoch: ``17@0``."""
    index: int
    """Index of the episode's completion among the completions of the prompt, from 0."""
    prompt: tuple[int, ...]
    """Token ids."""
    text: str
    """The prompt without the chat template; for a conversation, its last message."""
    answer: str
    """The row's reference answer; "" for none."""
    row: Mapping[str, Any]
    """The line of the dataset."""
    step: int
    evaluation: bool
    pictures: str = ""
    """Path of the prompt's prepared pictures (`tensors.pictures`); "" for none."""


PolicyTurn = Completion
"""Turn that an environment answers, with ``text``, ``tokens``, ``finish`` and ``stopped``."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An environment's answer to a turn."""

    text: str = ""
    """Message that the policy reads before its next turn."""
    role: str = "user"
    """Role of the message in the chat template."""
    reward: float = 0.0
    """Reward of the turn."""
    done: bool = False
    """Whether the episode has ended; the policy then reads no message."""


class Environment(ABC):
    """The environment of one `multi_turn` episode, which answers the policy's turns.

    The configuration's options are the keyword arguments of its constructor.
    """

    def __init__(self, item: EpisodeItem, tools: Tools) -> None:
        self.item, self.tools = item, tools

    @abstractmethod
    async def step(self, turn: PolicyTurn) -> Reply:
        """Answer a turn of the policy."""
