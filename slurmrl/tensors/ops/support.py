"""Distributions that are restricted to the tokens that generation could draw.

T tokens, t tokens of a chunk, V vocabulary, N token ids of all supports.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

OUTSIDE = -1e30
"""Logit, divided by the temperature, of a token outside a support. Its probability is 0, and as it
is finite, so are products with it."""


@dataclass(frozen=True, eq=False)
class Support:
    """The supports of T tokens: what each was drawn from."""

    restricted: Tensor
    """[T] bool: False stands for the whole vocabulary."""
    sizes: Tensor
    """[T] int64: token ids of each support, among those that this rank has."""
    ids: Tensor
    """[N] int64, those of a token one behind the other."""

    @staticmethod
    def of(sizes: Tensor, ids: Tensor) -> Support:
        """From the sizes [T] and token ids [N] of any integer type; a size of 0 stands for the
        whole vocabulary."""
        return Support(sizes > 0, sizes.long(), ids.long())

    def at(self, places: Tensor) -> Support:
        """The supports of the tokens at ``places``, each at most once."""
        sizes, starts = self.sizes[places], (self.sizes.cumsum(0) - self.sizes)[places]
        offsets = torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes)
        index = offsets + torch.arange(offsets.shape[0], device=offsets.device)
        return Support(self.restricted[places], sizes, self.ids[index])

    def padded(self, tokens: int) -> Support:
        """With more tokens, of the whole vocabulary, behind them."""
        more = self.sizes.new_zeros(tokens)
        return Support(
            torch.cat((self.restricted, more > 0)), torch.cat((self.sizes, more)), self.ids
        )

    def within(self, first: int, rows: int) -> Support:
        """The same with the ids first..first+rows-1 of the vocabulary only, as 0..rows-1."""
        tokens = torch.arange(self.sizes.shape[0], device=self.sizes.device)
        inside = (self.ids >= first) & (self.ids < first + rows)
        holders = torch.repeat_interleave(tokens, self.sizes)[inside]
        sizes = torch.zeros_like(self.sizes).index_add_(0, holders, torch.ones_like(holders))
        return Support(self.restricted, sizes, self.ids[inside] - first)

    def restrict_(self, logits: Tensor, first: int, temperature: float) -> Tensor:
        """Set the logits [t, V] of tokens first..first+t-1 to `OUTSIDE` outside of the supports."""
        count = logits.shape[0]
        begin, end = self._ends[first], self._ends[first + count]
        rows = torch.repeat_interleave(
            torch.arange(count, device=logits.device),
            self.sizes[first : first + count],
            output_size=end - begin,
        )
        inside = (rows, self.ids[begin:end])
        kept = logits[inside]
        logits.masked_fill_(self.restricted[first : first + count, None], OUTSIDE * temperature)
        return logits.index_put_(inside, kept)

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(self.sizes.tolist())]
