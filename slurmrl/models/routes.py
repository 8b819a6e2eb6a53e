"""The experts of tokens as generation has chosen them, recorded and replayed.

T tokens, L blocks with experts, K experts of a token in each, C cells of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from slurmrl.models.parallel.split import Split

UNKNOWN = -1
"""Stands for the experts of a token that were not recorded: the router chooses."""


class Routes(Protocol):
    """What blocks do about the experts of the next calls."""

    def chosen(self, block: int, own: Tensor) -> Tensor:
        """The experts [T, K] that a block takes where its router prefers ``own`` [T, K]."""
        ...


class Recorded:
    """Keeps what the routers choose."""

    def __init__(self, cells: Sequence[Tensor], slots: Tensor) -> None:
        """``cells``: [C, K] int16 of each block; ``slots`` [T]: the cells of the next call's
        tokens, behind which there may be padding."""
        self._cells, self._slots = cells, slots

    def chosen(self, block: int, own: Tensor) -> Tensor:
        tokens = own[: self._slots.shape[0]].to(torch.int16)
        self._cells[block].index_copy_(0, self._slots, tokens)
        return own


class Replayed:
    """Gives the recorded experts of packed sequences."""

    def __init__(self, experts: Tensor) -> None:
        """experts [T, L, K], or `UNKNOWN`, in the order of the sample."""
        self._experts = experts.long()
        self._own = self._experts

    def arrange(self, order: Tensor, split: Split) -> None:
        """The blocks see this rank's part of the packed tokens in ``order`` [T]."""
        tokens = order.shape[0]
        first, last = split.own_range(tokens)
        own = self._experts[order[first:last]]
        missing = split.part_tokens(tokens) - (last - first)
        padding = own.new_full((missing, *own.shape[1:]), UNKNOWN)
        self._own = torch.cat((own, padding)) if missing else own

    def chosen(self, block: int, own: Tensor) -> Tensor:
        recorded = self._own[:, block]
        return torch.where(recorded == UNKNOWN, own, recorded)
