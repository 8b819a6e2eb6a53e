"""Attention of single tokens over pages of a key-value cache, and writes to its cells.

T tokens, R rows, N pages of a row, C cells of the cache, Hq query heads, Hkv key and value heads, D
head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slurmrl.ops import paged_check, paged_launch
from slurmrl.ops.native.load import SMALL_ELEMENTS, operators
from slurmrl.ops.paged_reference import reference

BUILT = SMALL_ELEMENTS
"""The compiled form is used for any size: a token's result must not depend on how many others there
are."""


def reads_in_place(cache: Tensor, heads: int, page: int) -> bool:
    """Whether attention of ``heads`` query heads reads a cache [C, Hkv, D] like this one, in pages
    of ``page`` cells, where it lies; the torch form copies it. On a GPU the first call for these
    sizes compiles and tries the kernels, and the host waits for them."""
    return _attends(cache, heads, page) or _compiled(cache) is not None


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
    chunk: int = 1,
) -> Tensor:
    """Each token's attention over the first ``lengths`` cells of its row; with a ``window``, over
    the last ``window`` of them.

    q [T, Hq, D]; keys, values [C, Hkv, D], where page p has the cells p * page and following;
    tables [R, N] int64, the pages of each row; rows, lengths [T] int64; no length exceeds
    ``longest``. Returns [T, Hq, D]. At most about ``chunk`` tokens of a row lie side by side, each
    of which sees one cell more than the one before; this changes the speed only.
    """
    if _attends(keys, q.shape[1], page):
        sizes: dict[str, Any] = {"page": page, "longest": longest, "chunk": chunk}
        inputs = (q, keys, values, tables, rows, lengths)
        return paged_launch.attend(*inputs, **sizes, scale=scale, window=window)
    native = _compiled(q)
    if native is None:
        return reference(q, keys, values, tables, rows, lengths, page, longest, scale, window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    inputs = (q.contiguous(), keys, values, tables, rows, lengths)
    native.paged_attention(*inputs, out, page, scale, window or 0)
    return out


def write_cells(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Put the keys k and values v [T, Hkv, D] of tokens into the cells ``slots`` [T] int64 of a
    cache [C, Hkv, D]. Of several tokens with one slot any may be the last."""
    if paged_launch.supported(keys) and paged_check.writes(keys.device, keys.dtype):
        paged_launch.write(keys, values, slots, k, v)
        return
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)


def _attends(cache: Tensor, heads: int, page: int) -> bool:
    """Whether the Triton kernels compute it."""
    if not paged_launch.supported(cache):
        return False
    sizes = (heads, *cache.shape[1:], page)
    return paged_check.attends(cache.device, cache.dtype, *sizes)


def _compiled(like: Tensor) -> Any | None:
    """The compiled operators for tensors of this dtype and device; None if there are none."""
    if like.dtype != torch.float32 or like.device.type != "cpu":
        return None
    return operators(like.device, BUILT)
