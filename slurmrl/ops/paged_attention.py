"""Attention of single tokens over pages of a key-value cache.

T tokens, R rows, N pages of a row, C cells of the cache, Hq query heads, Hkv key and value heads, D
head size, M cells that a token may see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slurmrl.ops.attention import cache_bias, cached_attention
from slurmrl.ops.native.load import SMALL_ELEMENTS, operators

GATHERED_CELLS = 2**16
"""Cells that the torch form copies at a time."""
BUILT = SMALL_ELEMENTS
"""The compiled form is used for any size: a token's result must not depend on how many others there
are."""
MULTIPLE = 8
"""The torch form reads a multiple of this many cells: its kernels copy biases of other lengths."""


def reads_in_place(cache: Tensor) -> bool:
    """Whether attention reads a cache like this one where it lies; the torch form copies it."""
    return _compiled(cache) is not None


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    page: int,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Each token's attention over the first ``lengths`` cells of its row; with a ``window``, over
    the last ``window`` of them.

    q [T, Hq, D]; keys, values [C, Hkv, D], where page p has the cells p * page and following;
    tables [R, N] int64, the pages of each row; rows, lengths [T] int64; no length exceeds
    ``longest``. Returns [T, Hq, D].
    """
    native = _compiled(q)
    if native is None:
        return reference(q, keys, values, tables, rows, lengths, page, longest, scale, window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    inputs = (q.contiguous(), keys, values, tables, rows, lengths)
    native.paged_attention(*inputs, out, page, scale, window or 0)
    return out


def _compiled(like: Tensor) -> Any | None:
    """The compiled operators for tensors of this dtype and device; None if there are none."""
    if like.dtype != torch.float32 or like.device.type != "cpu":
        return None
    return operators(like.device, BUILT)


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
    """``paged_attention`` in torch: copies each token's cells."""
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
