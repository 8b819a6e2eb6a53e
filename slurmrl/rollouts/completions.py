"""A completion: tokens that the policy wrote, and messages between its turns.

Torch-free.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Literal, TypeAlias

import numpy as np

from slurmrl.data.meta import SampledMasks
from slurmrl.errors import UsageError
from slurmrl.rewards.base import FLOAT32_MAX, LIMITS, as_number, shown
from slurmrl.tensors.layout import Array

Finish: TypeAlias = Literal["stop", "length", "aborted"]
"""Reason why a turn ended: a stop token or string, a limit of tokens, or `RolloutEngine.abort`."""


@dataclass
class Completion:
    """Token ids that the policy wrote after a prompt, and messages that it read between its turns.

    An engine answers with one turn; its prompt is in the request. An episode begins with its prompt
    and adds turns and messages.
    """

    prompt: Sequence[int] = ()
    """Token ids of an episode's prompt, usually the item's prompt; empty in an engine's answer."""
    tokens: tuple[int, ...] = ()
    """Tokens after the prompt, including stop tokens."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each token under the sampling distribution: after temperature, top-k and
    top-p. 0 for tokens of messages."""
    versions: tuple[str, ...] = ()
    """The weight version that sampled each token; "" for tokens of messages."""
    finish: Finish | None = None
    """Reason why the last turn ended; None before the first turn."""
    masks: SampledMasks | None = None
    """Sampling mask of each token: the token ids that top-k and top-p kept. Empty for tokens of
    messages. None unless `GenerationOptions.masks` is set."""
    experts: Array | None = None
    """The experts that processed each token from the prompt to the end of the last turn: int16
    [tokens, experts of all blocks]; -1 for the last token, which was not processed. None unless
    `GenerationOptions.experts` is set, and for an aborted request."""
    text: str = ""
    """String of a turn that `Policy` returns, without special tokens and without the stop token. A
    stop string that ended the turn is kept."""
    written: list[bool] = field(init=False)
    """Whether the policy wrote each token."""
    rewards: list[float] = field(init=False)
    """One number per token: a turn's reward at its last token, 0 elsewhere."""
    largest_read: int = field(init=False)
    """Largest token id in the prompt and the messages."""
    turns: int = field(init=False)
    finished: bool = False
    """Whether no limit ended the episode, and its last turn ended with a stop."""
    failure: str = ""
    """Reason why the episode failed; empty if it did not fail."""
    tool_calls: int = 0
    tool_failures: int = 0
    """Number of failed tool calls. ``tool_calls`` is the number of all tool calls."""

    def __post_init__(self) -> None:
        self.prompt = _checked(self.prompt)
        self.largest_read = max(self.prompt, default=0)
        self.written = [True] * len(self.tokens)
        self.rewards = [0.0] * len(self.tokens)
        self.turns = int(self.finish is not None)
        self._last_written = len(self.tokens) - 1

    @property
    def stopped(self) -> bool:
        """Whether the last turn ended with a stop token or stop string."""
        return self.finish == "stop"

    def read(self, tokens: Sequence[int]) -> None:
        """Add tokens that the policy reads before its next turn. Training ignores these tokens."""
        added = _checked(tokens)
        self.largest_read = max(self.largest_read, *added, 0)
        count = len(added)
        self._add(added, written=False, logprobs=(0.0,) * count, versions=("",) * count)
        if self.masks is not None:
            self.masks.skip(count)

    def reward(self, value: float) -> None:
        """Add a number to the reward of the latest turn."""
        if self._last_written < 0:
            raise UsageError(f"reward {shown(value)}: there is no turn yet")
        number = as_number(value)
        total = self.rewards[self._last_written] + (nan if number is None else number)
        if not abs(total) <= FLOAT32_MAX:
            raise UsageError(
                f"reward {shown(value)}: the reward of a turn must be a finite number ({LIMITS})"
            )
        self.rewards[self._last_written] = total

    def wrote(self, turn: Completion) -> None:
        """Add an engine's answer; `Policy` calls this."""
        if turn.masks is not None and self.masks is None:
            self.masks = SampledMasks()
            self.masks.skip(len(self.tokens))
        if turn.masks is not None and self.masks is not None:
            self.masks.extend(turn.masks)
        elif self.masks is not None:
            self.masks.skip(len(turn.tokens))
        self._add(turn.tokens, written=True, logprobs=turn.logprobs, versions=turn.versions)
        self.experts = turn.experts
        self._last_written = len(self.tokens) - 1
        self.finish = turn.finish
        self.turns += 1

    @property
    def sequence(self) -> tuple[int, ...]:
        """All tokens."""
        return (*self.prompt, *self.tokens)

    @property
    def ends_with_turn(self) -> bool:
        return bool(self.written) and self.written[-1]

    def sampled_masks(self) -> SampledMasks:
        """Return the sampling mask of each token; masks are empty if none were recorded."""
        return self.masks or SampledMasks(array("i", [0]) * len(self.tokens))

    def routes(self) -> Array:
        """Return the experts of all tokens as in `data.meta.EXPERTS`; empty without a record."""
        if self.experts is None:
            return np.zeros(0, np.int16)
        missing = len(self.sequence) - len(self.experts)
        padded = np.pad(self.experts, ((0, max(missing, 0)), (0, 0)), constant_values=-1)
        return padded[: len(self.sequence)].reshape(-1)

    def cut(self) -> None:
        """Drop tokens of messages after the last turn of the policy."""
        end = self._last_written + 1
        del self.written[end:], self.rewards[end:]
        self.tokens, self.logprobs = self.tokens[:end], self.logprobs[:end]
        self.versions = self.versions[:end]
        if self.masks is not None:
            (self.masks,) = self.masks.cut([end])

    def _add(
        self,
        tokens: tuple[int, ...],
        *,
        written: bool,
        logprobs: tuple[float, ...],
        versions: tuple[str, ...],
    ) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions
        self.written += [written] * len(tokens)
        self.rewards += [0.0] * len(tokens)


Completions = Completion
"""Name under which users' episodes import the type."""


def joined_masks(completions: Sequence[Completion]) -> SampledMasks:
    """Return the sampling masks of all tokens of the completions, prompts included."""
    masks = SampledMasks()
    for each in completions:
        masks.skip(len(each.prompt))
        masks.extend(each.sampled_masks())
    return masks


def _checked(tokens: Sequence[int]) -> tuple[int, ...]:
    checked = tuple(int(token) for token in tokens)
    if checked != tuple(tokens) or any(token < 0 for token in checked):
        raise UsageError(f"token ids are integers from 0 on, not {list(tokens)[:8]}")
    return checked
