"""One rank's part of a model whose computation is split over ranks.

Shapes: T packed tokens, S sequences, c context ranks, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from slurmrl.models.packed import length_order
from slurmrl.tensors.ops.collectives import (
    own_to_partial,
    own_to_whole,
    partial_to_own,
    partial_to_whole,
    whole_to_partial,
)
from slurmrl.tensors.ops.ring_attention import zigzag


@dataclass(frozen=True)
class Axis:
    """A rank's position and group along one axis."""

    rank: int = 0
    size: int = 1
    peers: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        assert self.peers is not None, "an axis of one rank has no collectives"
        return self.peers


@dataclass(frozen=True)
class Split:
    """A rank's place among tensor ranks, which split matrices, and context ranks.

    Context ranks split the packed tokens. With ``sequence``, tensor ranks also split the tokens,
    outside of matrix products. With ``ring``, attention passes keys around the context ranks;
    otherwise these exchange tokens for heads.
    """

    tensor: Axis = Axis()
    context: Axis = Axis()
    sequence: bool = False
    ring: bool = False

    @property
    def whole(self) -> bool:
        """Whether nothing is split."""
        return self.tensor.size == self.context.size == 1

    @property
    def by_sequence(self) -> bool:
        return self.sequence and self.tensor.size > 1

    def without_context(self) -> Split:
        return replace(self, context=Axis(), ring=False)

    # -- tokens ----------------------------------------------------------------------------------

    def part_tokens(self, tokens: int) -> int:
        """Return the number of tokens of each context rank, with the padding of the last ranks."""
        pieces = self.context.size * (self.tensor.size if self.by_sequence else 1)
        return -(-tokens // pieces) * pieces // self.context.size

    def own_range(self, tokens: int) -> tuple[int, int]:
        """Return this context rank's range of packed tokens, without padding."""
        part = self.part_tokens(tokens)
        first = self.context.rank * part
        return min(first, tokens), min(first + part, tokens)

    def packed(self, cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the order of packed tokens in which context ranks have consecutive parts.

        The result is (places in the sample [T], places among sequences sorted by length [T],
        boundaries [S+1] of these sequences), all in host memory.
        """
        order, cu_sorted = length_order(cu_seqlens, tokens)
        if not self.ring:
            return order, torch.arange(tokens), cu_sorted
        places = zigzag(tokens, self.part_tokens(tokens), self.context.size)
        return order[places], places, cu_sorted

    def own_tokens(self, x: Tensor) -> Tensor:
        """Return this context rank's part of x [T], padded with zeros."""
        first, last = self.own_range(x.shape[0])
        missing = self.part_tokens(x.shape[0]) - (last - first)
        return F.pad(x[first:last], (0, missing)) if missing else x[first:last]

    def between(self, x: Tensor) -> Tensor:
        """Return this tensor rank's part of its context rank's tokens between the blocks."""
        return x.chunk(self.tensor.size)[self.tensor.rank] if self.by_sequence else x

    # -- tensors ---------------------------------------------------------------------------------

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of matrices that are split by rows: all tokens [T/c, h].

        The backward pass sums the gradients of the tensor ranks.
        """
        if self.tensor.size == 1:
            return x
        group = self.tensor.group
        return own_to_partial(x, group) if self.sequence else whole_to_partial(x, group)

    def leave(self, x: Tensor) -> Tensor:
        """Return the output of matrices that are split by columns: the sum [T/c, h] over ranks.

        With ``sequence``, return only this rank's tokens of the sum.
        """
        if self.tensor.size == 1:
            return x
        group = self.tensor.group
        return partial_to_own(x, group) if self.sequence else partial_to_whole(x, group)

    def together(self, x: Tensor) -> Tensor:
        """Return all of the context rank's tokens from the tensor ranks' parts between the blocks.

        Each tensor rank must have the whole gradient of the result.
        """
        return own_to_whole(x, self.tensor.group) if self.by_sequence else x

    def over_context(self, x: Tensor) -> Tensor:
        """Return the sum over context ranks."""
        return partial_to_whole(x, self.context.group) if self.context.size > 1 else x


WHOLE = Split()
