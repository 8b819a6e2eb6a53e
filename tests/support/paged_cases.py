"""Attention over paged key-value caches: inputs, and results in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PAGE = 16


def case(
    lengths: Sequence[int],
    rows: Sequence[int],
    heads: int,
    kv_heads: int,
    size: int,
    unread: float = torch.nan,
) -> tuple[Any, ...]:
    """Return q, keys, values, tables, rows and lengths. Pages are in random order. ``unread``: the
    value of cells that no row reads.
    """
    draw = torch.Generator().manual_seed(sum(lengths) + size)
    width = -(-max(lengths) // PAGE) + 1
    count = max(rows) + 1
    tables = torch.randperm(count * width + 3, generator=draw)[: count * width].view(count, width)
    keys, values = torch.full((2, (count * width + 3) * PAGE, kv_heads, size), unread)
    for row in range(count):
        stored = max((n for n, own in zip(lengths, rows, strict=True) if own == row), default=0)
        cells = [int(tables[row, c // PAGE]) * PAGE + c % PAGE for c in range(stored)]
        for slab in (keys, values):
            slab[cells] = torch.randn((stored, kv_heads, size), generator=draw)
    q = torch.randn((len(lengths), heads, size), generator=draw)
    return q, keys, values, tables, torch.tensor(rows), torch.tensor(lengths)


def exact(inputs: tuple[Any, ...], scale: float, window: int | None) -> Tensor:
    """Return softmax attention in float64, token by token; zeros for a token that sees nothing."""
    q, keys, values, tables, rows, lengths = (
        x.double() if x.is_floating_point() else x for x in inputs
    )
    out = torch.zeros_like(q)
    group = q.shape[1] // keys.shape[1]
    for token, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        places = torch.arange(0 if window is None else max(0, length - window), length)
        cells = tables[row, places // PAGE] * PAGE + places % PAGE
        k, v = (x[cells].repeat_interleave(group, 1) for x in (keys, values))
        weights = (torch.einsum("hd,chd->hc", q[token], k) * scale).softmax(-1)
        out[token] = torch.einsum("hc,chd->hd", weights, v)
    return out
