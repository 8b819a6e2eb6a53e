"""Sums and means over the sequences of packed tokens. T packed tokens, S sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slurmrl.tensors.ops.upload import upload


@dataclass(frozen=True)
class Sequences:
    """Which tokens form a sequence."""

    index: Tensor
    """[T] the number of each token's sequence."""
    count: int
    """S."""

    @staticmethod
    def of(cu_seqlens: Tensor, device: torch.device) -> Sequences:
        """``cu_seqlens`` [S+1] in host memory; the result is on ``device``."""
        lengths = cu_seqlens.diff().long()
        (index,) = upload([torch.arange(len(lengths)).repeat_interleave(lengths)], device)
        return Sequences(index, len(lengths))

    def sums(self, x: Tensor) -> Tensor:
        """[S]: the sum of x [T] over each sequence."""
        return x.new_zeros(self.count).index_add(0, self.index, x)

    def spread(self, x: Tensor) -> Tensor:
        """[T]: at each token, the entry of x [S] of its sequence."""
        return x[self.index]

    def totals(self, x: Tensor) -> Tensor:
        """[T]: at each token, the sum of x [T] over its sequence."""
        return self.spread(self.sums(x))

    def means(self, x: Tensor, mask: Tensor) -> Tensor:
        """[T]: at each token, the mean of x [T] over the tokens of its sequence that ``mask``
        selects; 0 in a sequence that has none."""
        counts = self.totals(mask.to(x.dtype)).clamp(min=1.0)
        return self.totals(torch.where(mask, x, 0.0)) / counts

    def maxima(self, x: Tensor, mask: Tensor) -> Tensor:
        """[T]: at each token, the largest of x [T] among the tokens of its sequence that ``mask``
        selects; -inf in a sequence that has none."""
        selected = torch.where(mask, x, float("-inf"))
        found = selected.new_full((self.count,), float("-inf"))
        return self.spread(found.scatter_reduce(0, self.index, selected, "amax"))
