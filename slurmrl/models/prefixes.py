"""Packed sequences that share prefixes, which the decoder reads once.

T packed tokens, N distinct ones, S pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from slurmrl.models.attention import AttentionSpec
from slurmrl.models.packed import ranges
from slurmrl.tensors.ops.attention import Packing, Prefix, PrefixPacking, prefix_attention


@dataclass(frozen=True)
class Pieces:
    """The boundaries of packed pieces of sequences.

    A piece is a sequence, a prefix of sequences, or the rest of a sequence. A rest's first token is
    the last one of its prefix, so that every token but the first of a piece follows the one that
    predicts it.
    """

    cu_seqlens: Tensor
    """[S+1] int32, in host memory."""
    prefixes: Tensor
    """The piece [S] that is the prefix of each piece, and -1 for one that is no rest. A prefix is
    no rest itself. Int64, in host memory."""


class Arrangement(NamedTuple):
    """The order in which the layers read the tokens of pieces."""

    order: Tensor
    """[N]: the place of each token that the layers read."""
    back: Tensor
    """[T]: which of those each token is."""
    positions: Tensor
    """[N]: in the whole sequences."""
    core: PrefixCore


class PrefixCore:
    """Causal attention within each sequence, whose prefix others may share."""

    def __init__(self, packing: PrefixPacking) -> None:
        self._packing = packing

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert spec.window is None or spec.window >= self._packing.pieces.max_len, "no windows"
        return prefix_attention(q, k, v, self._packing, spec.scale)


def arranged(pieces: Pieces, max_len: int) -> Arrangement:
    """Arrange the distinct tokens of pieces, the shortest piece first.

    Adjacent pieces of equal length need fewer attention calls. Whole sequences have up to
    ``max_len`` tokens.
    """
    starts, stops = pieces.cu_seqlens[:-1].long(), pieces.cu_seqlens[1:].long()
    prefixes = pieces.prefixes
    rests = (prefixes >= 0).nonzero().squeeze(1)
    firsts = starts.index_add(0, rests, torch.ones_like(rests))  # of the tokens not in the prefix
    lengths = stops - firsts
    by_length = lengths.argsort(stable=True)
    cu_sorted = F.pad(lengths[by_length].cumsum(0), (1, 0))
    own = torch.empty_like(firsts).scatter_(0, by_length, cu_sorted[:-1])
    order = ranges(firsts[by_length], lengths[by_length])
    back = torch.empty(int(pieces.cu_seqlens[-1]), dtype=torch.int64)
    back[order] = torch.arange(order.shape[0])
    back[starts[rests]] = back[stops[prefixes[rests]] - 1]
    before = torch.zeros_like(lengths).index_copy(0, rests, lengths[prefixes[rests]])
    positions = ranges(before[by_length], lengths[by_length])
    by_prefix = rests[prefixes[rests].argsort(stable=True)]
    readers = torch.zeros_like(lengths).index_add(0, prefixes[rests], lengths[rests])
    shared = [
        Prefix(int(own[piece]), int(lengths[piece]), int(readers[piece]))
        for piece in sorted({*prefixes[rests].tolist()})
    ]
    packing = PrefixPacking(
        Packing(cu_sorted.to(torch.int32), max_len),
        shared,
        ranges(own[by_prefix], lengths[by_prefix]),
    )
    return Arrangement(order, back, positions, PrefixCore(packing))
