"""Indices of packed tokens, made in host memory from ``cu_seqlens`` in host memory.

Shapes: T packed tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the position [T] int64 of each packed token within its sequence."""
    starts = cu_seqlens[:-1].long()
    spread = torch.repeat_interleave(starts, cu_seqlens.diff().long(), output_size=tokens)
    return torch.arange(tokens, device=cu_seqlens.device) - spread


def packed_rows(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the index [T] int64 of the sequence of each packed token."""
    lengths = cu_seqlens.diff().long()
    rows = torch.arange(lengths.shape[0], device=cu_seqlens.device)
    return torch.repeat_interleave(rows, lengths, output_size=tokens)


def length_order(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the token order [T] that sorts sequences by length, and the sorted cu_seqlens."""
    lengths = cu_seqlens.diff().long()
    by_length = lengths.argsort(stable=True)
    sorted_lengths = lengths[by_length]
    cu_sorted = torch.zeros_like(cu_seqlens)
    cu_sorted[1:] = sorted_lengths.cumsum(0)
    return ranges(cu_seqlens[:-1].long()[by_length], sorted_lengths, tokens), cu_sorted


def predictions(cu_sorted: Tensor, places: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Find the tokens from ``first`` to ``last`` that are not the last token of their sequence.

    ``places`` [T] are the places of the tokens among sequences with boundaries ``cu_sorted`` [S+1].
    The result is (distances of these tokens from ``first``, indices of the following tokens).
    """
    tokens = places.shape[0]
    follows = torch.zeros(tokens + 1, dtype=torch.bool, device="cpu")
    follows[1:tokens] = True
    follows[cu_sorted.long()] = False
    own = places[first:last]
    before = follows[own + 1].nonzero().squeeze(1)
    return before, inverse(places)[own[before] + 1]


def ranges(starts: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """Return the concatenated ranges start, start + 1, … with ``starts`` and ``lengths``.

    ``total`` is the sum of ``lengths`` if the caller knows it.
    """
    first = starts - (lengths.cumsum(0) - lengths)
    offsets = torch.repeat_interleave(first, lengths, output_size=total)
    return torch.arange(offsets.shape[0], device=starts.device) + offsets


def inverse(order: Tensor) -> Tensor:
    """Return the permutation [T] that undoes the permutation ``order``."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)
