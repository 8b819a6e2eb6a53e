"""What generation records about the tokens of a batch. Torch-free.

The support of a token is what top-k and top-p left for its draw: token ids, ascending. An empty
one stands for the whole vocabulary, and for tokens that were not drawn.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SIZES = "support_sizes"
"""Key of a batch: the number of token ids in each token's support."""
IDS = "support_ids"
"""Key of a batch: the token ids of the supports of a sequence, one behind the other."""
EXPERTS = "experts"
"""Key of a batch: the experts of all blocks that read a token, for each token of a sequence, one
behind the other; -1 stands for the router's choice. Nothing for a sequence without a record."""


@dataclass
class SampledSupport:
    """The supports of the tokens of a sequence, in their order."""

    sizes: array[int] = field(default_factory=lambda: array("i"))
    """Token ids of each support."""
    ids: array[int] = field(default_factory=lambda: array("i"))

    def add(self, ids: Sequence[int]) -> None:
        """Add the support of the next token."""
        self.sizes.append(len(ids))
        self.ids.extend(ids)

    def skip(self, tokens: int) -> None:
        """Add tokens without a support."""
        self.sizes.extend([0] * tokens)

    def extend(self, other: SampledSupport) -> None:
        self.sizes += other.sizes
        self.ids += other.ids

    def cut(self, lengths: Iterable[int]) -> list[SampledSupport]:
        """Those of the first tokens, then of the tokens behind them, and so on."""
        parts, token, number = [], 0, 0
        for length in lengths:
            sizes = self.sizes[token : token + length]
            count = sum(sizes)
            parts.append(SampledSupport(sizes, self.ids[number : number + count]))
            token, number = token + length, number + count
        return parts
