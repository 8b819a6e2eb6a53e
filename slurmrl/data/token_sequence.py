"""The tokens of a row's sequences, and which of them are trained on. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple


class TokenSequence(NamedTuple):
    """The tokens of one sequence, and which of them are targets (trained on)."""

    tokens: Sequence[int]
    runs: Sequence[int]
    """Lengths of alternate runs of tokens: context, targets, context, …"""

    @staticmethod
    def of(prompt: Sequence[int], answer: Sequence[int]) -> TokenSequence:
        return TokenSequence([*prompt, *answer], [len(prompt), len(answer)])

    @staticmethod
    def masked(tokens: Sequence[int], targets: Sequence[bool]) -> TokenSequence:
        """``targets`` says of each token whether it is one."""
        runs = [] if targets and not targets[0] else [0]
        runs += [len(list(run)) for _, run in groupby(targets)]
        return TokenSequence(tokens, runs)

    @property
    def context(self) -> Sequence[int]:
        """The tokens before the first target."""
        return self.tokens[: self.runs[0]]

    def after(self, context: Sequence[int]) -> TokenSequence:
        """The sequence with another context before its first target."""
        tokens = [*context, *self.tokens[self.runs[0] :]]
        return TokenSequence(tokens, [len(context), *self.runs[1:]])

    def cut(self, most: int | None) -> TokenSequence:
        """At most the first tokens; None: all."""
        if most is None or len(self.tokens) <= most:
            return self
        ends = [min(end, most) for end in accumulate(self.runs)]
        return TokenSequence(
            self.tokens[:most], [stop - start for start, stop in pairwise([0, *ends])]
        )


RowTokens = Sequence[TokenSequence]
"""The sequences of one row."""


def expanded(runs: Sequence[int]) -> list[bool]:
    """True for each token of a context run, False for each target (see `TokenSequence`)."""
    pieces = ([place % 2 == 0] * length for place, length in enumerate(runs))
    return list(chain.from_iterable(pieces))
