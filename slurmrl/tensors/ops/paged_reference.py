"""Attention over pages of a key-value cache in torch.

T tokens, R rows, N pages of a row, C cells of the cache, Hq query heads, Hkv key and value heads, D
head size, M cells that a token may see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.tensors.ops.attention import cache_bias, cached_attention

GATHERED_CELLS = 2**16
"""Cells that are copied at a time."""
MULTIPLE = 8
"""A multiple of this many cells is read: torch's kernels copy biases of other lengths."""


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rows: Tensor,
    lengths: Tensor,
    page: int,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """``paged_attention.paged_attention`` in torch: copies each token's cells."""
    seen = min(-(-longest // MULTIPLE) * MULTIPLE, tables.shape[1] * page)
    pages = tables[:, : -(-seen // page)]
    places = torch.arange(page, device=tables.device)
    cells = (pages[:, :, None] * page + places).flatten(1)[:, :seen]
    each = max(1, GATHERED_CELLS // seen)
    parts = []
    for first in range(0, q.shape[0], each):
        part = slice(first, first + each)
        own = cells[rows[part]]
        bias = cache_bias(lengths[part], seen, window, q.dtype)
        k, v = (x[own].transpose(1, 2) for x in (keys, values))
        parts.append(cached_attention(q[part], k, v, bias, scale))
    return torch.cat(parts)
