"""Launches of the Triton kernels for key-value caches in pages.

T tokens, R rows, N pages of a row, C cells of the cache, Hq query heads, Hkv key and value heads, D
head size.
"""

from __future__ import annotations

import importlib
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slurmrl import env
from slurmrl.tensors.ops.fused import DTYPES

TILE_BYTES = 128
"""Bytes of the elements at one place of all queries, of adjacent tokens of a row and heads that
share a key head, that a program computes."""
LEAST_ROWS = 16
"""Least side of a matrix that tensor cores multiply."""
MOST_CELLS = 128
"""Most cells that a program reads at a time."""
BLOCK_BYTES = 16 * 2**10
"""Keys that a program reads at a time, so that several programs fit on a multiprocessor."""
PROGRAMS = 4
"""Programs for each multiprocessor, from which on rows are not split further."""
MOST_SPLITS = 64
WRITTEN = 1024
"""Elements of a token that a program writes."""
LOG2_E = 1.0 / math.log(2.0)


def supported(like: Tensor) -> bool:
    """Whether there are kernels for tensors of this dtype and device."""
    return like.dtype in DTYPES and (like.is_cuda or env.TRITON_INTERPRET.get())


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    page: int,
    longest: int,
    chunk: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """See ``paged_attention.paged_attention``. Nothing waits for the device, and what is launched
    depends on shapes and numbers only, not on the tensors' content."""
    if q.stride(1) != q.shape[2] or q.stride(2) != 1:
        q = q.contiguous()
    tensors = (q, keys, values, tables.contiguous(), rows.contiguous(), lengths.contiguous())
    out: Tensor = _attend(*tensors, page, longest, chunk, scale, window or 0)
    return out


@torch.library.custom_op("slurmrl::paged_attention", mutates_args=())
def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rows: Tensor,
    lengths: Tensor,
    page: int,
    longest: int,
    chunk: int,
    scale: float,
    window: int,
) -> Tensor:
    (tokens, all_heads, size), kv_heads = q.shape, keys.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    group = all_heads // kv_heads
    heads = _power(group)
    width = q.element_size()
    tile = max(1, TILE_BYTES // width // heads) if chunk > 1 else 1
    heads = max(heads, LEAST_ROWS // tile)
    columns = max(LEAST_ROWS, _power(size))
    seen = min(longest, window) if window else longest
    splits = _splits(-(-tokens // tile) * kv_heads, seen, q.device)
    parts = norms = out
    if splits > 1:
        parts = torch.empty((tokens, all_heads, splits, size), dtype=torch.float32, device=q.device)
        norms = torch.empty((tokens, all_heads, splits), dtype=torch.float32, device=q.device)
    kernels = _kernels()
    kernels.attend[(tokens, kv_heads, splits)](
        *(q, keys, values, tables, rows, lengths, out, parts, norms),
        *(tokens, q.stride(0), tables.shape[1], scale * LOG2_E, window),
        page=page,
        group=group,
        size=size,
        windowed=window > 0,
        split=splits > 1,
        tile=tile,
        heads=heads,
        columns=columns,
        block=_block(columns * width),
        interpreted=env.TRITON_INTERPRET.get(),
        num_warps=2 * width,
        num_stages=2,
    )
    if splits > 1:
        kernels.merge[(tokens * all_heads,)](
            parts, norms, out, size, splits=splits, columns=columns, num_warps=4
        )
    return out


def write(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """See ``paged_attention.write_cells``."""
    width = keys.shape[1] * keys.shape[2]
    k, v = (_rows(x) for x in (k, v))
    _write(keys, values, slots.contiguous(), k, v, width)


@torch.library.custom_op("slurmrl::write_cells", mutates_args=("keys", "values"))
def _write(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor, width: int) -> None:
    if not k.shape[0]:
        return
    grid = (k.shape[0], -(-width // WRITTEN))
    strides = (k.stride(0), v.stride(0))
    _kernels().write[grid](k, v, slots, keys, values, width, *strides, block=WRITTEN)


def _rows(x: Tensor) -> Tensor:
    """x [T, Hkv, D] with each token's elements side by side; a part of a wider tensor is not
    copied."""
    side_by_side = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if side_by_side else x.contiguous()


def _block(bytes_per_cell: int) -> int:
    """Cells that a program reads at a time."""
    return max(LEAST_ROWS, min(MOST_CELLS, _power(BLOCK_BYTES // bytes_per_cell)))


def _splits(programs: int, longest: int, device: torch.device) -> int:
    """Parts into which the cells of each token are divided, a power of 2: enough for all
    multiprocessors, but not for less than a block each."""
    wanted = -(-PROGRAMS * _multiprocessors(device) // programs)
    most = min(MOST_SPLITS, max(1, longest // MOST_CELLS))
    return 1 << (min(wanted, most).bit_length() - 1)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _power(number: int) -> int:
    """The least power of 2 that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


def _kernels() -> Any:
    """The module of the kernels, which imports Triton."""
    return importlib.import_module("slurmrl.tensors.ops.triton_paged")
