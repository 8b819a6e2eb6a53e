"""Attention of single tokens over pages of a key-value cache, and writes to its cells.

T tokens, R rows, N pages of a row, C cells of the cache, Hq query heads, Hkv key and value heads, D
head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slurmrl.tensors.ops import paged_kernels
from slurmrl.tensors.ops.elementwise import rotate
from slurmrl.tensors.ops.native.load import for_floats
from slurmrl.tensors.ops.paged_kernels import reference


def reads_in_place(cache: Tensor, heads: int, page: int) -> bool:
    """Return whether attention reads a cache [C, Hkv, D] like this one where it lies.

    The attention has ``heads`` query heads, and the cache has pages of ``page`` cells. The torch
    form copies the cache instead. On a GPU the first call for these sizes compiles and tries the
    kernels, and the host waits for them.
    """
    return _attends(cache, heads, page) or for_floats(cache) is not None


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
    """Return each token's attention [T, Hq, D] over the first ``lengths`` cells of its row.

    With a ``window``, a token attends only to the last ``window`` of these cells.

    q [T, Hq, D]; keys, values [C, Hkv, D], where page p has the cells from p * page on;
    tables [R, N] int64, the pages of each row; rows, lengths [T] int64; no length exceeds
    ``longest``. At most about ``chunk`` tokens of a row lie side by side, each of which sees one
    cell more than the previous token; this changes only the speed.
    """
    if _attends(keys, q.shape[1], page):
        sizes: dict[str, Any] = {"page": page, "longest": longest, "chunk": chunk}
        inputs = (q, keys, values, tables, rows, lengths)
        return paged_kernels.attend(*inputs, **sizes, scale=scale, window=window)
    native = for_floats(q)
    if native is None:
        return reference(q, keys, values, tables, rows, lengths, page, longest, scale, window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    inputs = (q.contiguous(), keys, values, tables, rows, lengths)
    native.paged_attention.default(*inputs, out, page, scale, window or 0)
    return out


def write_cells(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Put the keys k and values v [T, Hkv, D] of tokens into a cache [C, Hkv, D].

    ``slots`` [T] int64 are the tokens' cells. If several tokens have one slot, any of them may be
    the last.
    """
    if paged_kernels.supported(keys) and paged_kernels.writes(keys.device, keys.dtype):
        paged_kernels.write(keys, values, slots, k, v)
        return
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)


def attend_heads(
    heads: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
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
    """`paged_attention` of tokens whose keys and values are not in the cache yet.

    heads [T, Hq + 2 Hkv, D]: the queries, the key and the value of each token; queries and keys are
    rotated by ``rotation`` (see `tensors.ops.elementwise.rotate`). Keys and values are written into
    the cells ``slots`` [T] int64.
    """
    native = for_floats(heads)
    count, size = heads.shape[1] - 2 * keys.shape[1], heads.shape[2]
    if native is not None:
        out = heads.new_empty((heads.shape[0], count, size))
        cos, sin = rotation or (None, None)
        where = (keys, values, slots, tables, rows, lengths, out)
        native.decode.default(heads.contiguous(), cos, sin, *where, page, scale, window or 0)
        return out
    q, k, v = heads.split_with_sizes([count, *[keys.shape[1]] * 2], 1)
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    write_cells(keys, values, slots, k, v)
    sizes: dict[str, Any] = {"page": page, "longest": longest, "chunk": chunk}
    return paged_attention(
        *(q, keys, values, tables, rows, lengths), **sizes, scale=scale, window=window
    )


def _attends(cache: Tensor, heads: int, page: int) -> bool:
    """Whether the Triton kernels compute it."""
    if not paged_kernels.supported(cache):
        return False
    sizes = (heads, *cache.shape[1:], page)
    return paged_kernels.attends(cache.device, cache.dtype, *sizes)
