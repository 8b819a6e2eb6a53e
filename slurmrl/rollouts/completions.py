"""The tokens of one episode: tokens that the policy wrote, and messages between its turns.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING

import numpy as np

from slurmrl.data.meta import SampledMasks
from slurmrl.errors import UsageError
from slurmrl.rewards.base import FLOAT32_MAX, LIMITS, as_number, shown

if TYPE_CHECKING:
    from slurmrl.rollouts.generation.base import Completion
    from slurmrl.tensors.layout import Array


class Completions:
    """Token ids that the policy wrote in the turns of an episode, and the messages between.

    The policy reads these messages. Token ids are kept as they were sampled.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        """``prompt`` is usually the item's prompt."""
        self.prompt = _checked(prompt)
        if not self.prompt:
            raise UsageError("an episode's prompt needs at least one token")
        self.largest_read = max(self.prompt)
        """The largest token id that the policy did not sample."""
        self.tokens: list[int] = []
        """Tokens after the prompt."""
        self.written: list[bool] = []
        """For each token, whether the policy wrote it."""
        self.logprobs: list[float] = []
        """Log-probability of each token under the sampling distribution; 0 for tokens of messages.
        """
        self.versions: list[str] = []
        """The weight version that sampled each token; "" for tokens of messages."""
        self.masks = SampledMasks()
        """Sampling mask of each token; empty for tokens of messages, and if masks are not recorded.
        """
        self.experts: Array | None = None
        """Experts that processed each token from the prompt to the end of the last turn; None if
        they are not recorded."""
        self.rewards: list[float] = []
        """Reward of a turn, at its last token; 0 elsewhere."""
        self.turns = 0
        self.stopped = False
        """Whether the last turn ended with a stop token or stop string."""
        self.finished = False
        """Whether no limit ended the episode, and its last turn ended with a stop."""
        self.failure = ""
        """Why the episode failed; empty if it did not."""
        self.tool_calls = 0
        self.tool_failures = 0
        """Number of calls of tools, and of calls that failed."""
        self._last_written = -1

    @staticmethod
    def of_turn(prompt: Sequence[int], completion: Completion) -> Completions:
        """Return the completions of an episode that has ended after its first turn."""
        made = Completions(prompt)
        made.wrote(completion)
        made.finished = made.stopped
        return made

    def read(self, tokens: Sequence[int]) -> None:
        """Add tokens that the policy reads before its next turn. It is not trained on them."""
        added = _checked(tokens)
        self.largest_read = max(self.largest_read, *added, 0)
        self._add(added, written=False, logprobs=[0.0] * len(added), versions=[""] * len(added))
        self.masks.skip(len(added))

    def reward(self, value: float) -> None:
        """Add to the reward of the latest turn."""
        if self._last_written < 0:
            raise UsageError(f"reward {shown(value)}: there is no turn yet")
        number = as_number(value)
        total = self.rewards[self._last_written] + (nan if number is None else number)
        if not abs(total) <= FLOAT32_MAX:
            raise UsageError(
                f"reward {shown(value)}: the reward of a turn must be a finite number ({LIMITS})"
            )
        self.rewards[self._last_written] = total

    def wrote(self, completion: Completion) -> None:
        """Add a turn; `Policy` calls this."""
        self._add(
            completion.tokens,
            written=True,
            logprobs=completion.logprobs,
            versions=completion.versions,
        )
        if completion.masks is None:
            self.masks.skip(len(completion.tokens))
        else:
            self.masks.extend(completion.masks)
        self.experts = completion.experts
        self._last_written = len(self.tokens) - 1
        self.stopped = completion.finish == "stop"
        self.turns += 1

    @property
    def sequence(self) -> tuple[int, ...]:
        """All tokens."""
        return (*self.prompt, *self.tokens)

    @property
    def ends_with_turn(self) -> bool:
        return bool(self.written) and self.written[-1]

    def routes(self) -> Array:
        """Return the experts of all tokens as in `data.meta.EXPERTS`; empty without a record."""
        if self.experts is None:
            return np.zeros(0, np.int16)
        missing = len(self.sequence) - len(self.experts)
        padded = np.pad(self.experts, ((0, max(missing, 0)), (0, 0)), constant_values=-1)
        return padded[: len(self.sequence)].reshape(-1)

    def cut(self) -> None:
        """Drop tokens of messages after the last turn of the policy."""
        for column in (self.tokens, self.written, self.logprobs, self.versions, self.rewards):
            del column[self._last_written + 1 :]
        (self.masks,) = self.masks.cut([len(self.tokens)])

    def _add(
        self,
        tokens: Sequence[int],
        *,
        written: bool,
        logprobs: Sequence[float],
        versions: Sequence[str],
    ) -> None:
        self.tokens += tokens
        self.written += [written] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions
        self.rewards += [0.0] * len(tokens)


def _checked(tokens: Sequence[int]) -> tuple[int, ...]:
    checked = tuple(int(token) for token in tokens)
    if checked != tuple(tokens) or any(token < 0 for token in checked):
        raise UsageError(f"token ids are integers from 0 on, not {list(tokens)[:8]}")
    return checked
