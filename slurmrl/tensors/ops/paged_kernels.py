"""Attention of single tokens over pages of a key-value cache, and writes to its cells.

On GPUs, Triton kernels compute attention and writes. This module has their launches and equivalent
functions in pure torch. Before the first use of a kernel, slurmrl compares its results for random
inputs with these functions, because nobody would notice a wrong completion.

Shapes: T tokens, R rows, N pages of a row, C cells of the cache, Hq query heads, Hkv key and value
heads, D head size, M cells that a token may see.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slurmrl import env, log
from slurmrl.tensors.ops.attention import cache_bias, cached_attention
from slurmrl.tensors.ops.elementwise import rotate
from slurmrl.tensors.ops.fused import DTYPES, kernels
from slurmrl.tensors.ops.native.loading import chosen, for_floats

TILE_BYTES = 128
"""Number of bytes of a column of queries that a program processes. The queries belong to adjacent
tokens of a row and to heads that share a key head."""
LEAST_ROWS = 16
"""Minimum number of rows of a matrix that tensor cores multiply."""
MOST_CELLS = 128
"""Maximum number of cells that a program reads at a time."""
BLOCK_BYTES = 16 * 2**10
"""Maximum bytes of keys that a program reads at a time. A multiprocessor can then run several."""
PROGRAMS = 4
"""Sufficient number of programs per multiprocessor. With fewer programs, rows are split."""
MOST_SPLITS = 64
WRITTEN = 1024
"""Number of elements of a token that each program writes."""
LOG2_E = 1.0 / math.log(2.0)

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Maximum difference between results in the test; their absolute values are about 1."""
SHORT, LONG = MOST_CELLS - 3, 2 * MOST_CELLS + 40
"""Lengths of rows in the test. Rows of the first length are not split; the other rows are."""
BOUND = MOST_SPLITS * MOST_CELLS
"""Upper bound of lengths for which rows are split into as many parts as possible."""
CHUNK = 7
WINDOW = 50
GATHERED_CELLS = 2**16
"""Number of cells that the torch function copies at a time."""
MULTIPLE = 8
"""Divisor of the number of cells to read; torch would copy biases of other lengths."""


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
    sinks: Tensor | None = None,
) -> Tensor:
    """Return each token's attention [T, Hq, D] over the first ``lengths`` cells of its row.

    With a ``window``, a token attends only to the last ``window`` of these cells.

    q [T, Hq, D]; keys, values [C, Hkv, D], where page p begins at cell p * page; tables [R, N]
    int64, the pages of each row; rows, lengths [T] int64. No length exceeds ``longest``. Up to
    about ``chunk`` tokens of a row are adjacent, and each attends to one cell more than the
    previous token (for speed only). ``sinks`` [Hq] are additional scores without values.
    """
    if attends(keys, q.shape[1], page):
        sizes: dict[str, Any] = {"page": page, "longest": longest, "chunk": chunk}
        inputs = (q, keys, values, tables, rows, lengths)
        return attend(*inputs, **sizes, scale=scale, window=window, sinks=sinks)
    native = for_floats(q)
    if native is None:
        places = (tables, rows, lengths, page, longest)
        return reference(q, keys, values, *places, scale, window, sinks)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    inputs = (q.contiguous(), keys, values, tables, rows, lengths)
    native.paged_attention.default(*inputs, out, page, scale, window or 0, sinks)
    return out


def write_cells(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write the keys k and values v [T, Hkv, D] of tokens into a cache [C, Hkv, D].

    ``slots`` [T] int64 are the tokens' cells. If several tokens have one cell, any of them may
    remain in it.
    """
    if supported(keys) and writes(keys.device, keys.dtype):
        write(keys, values, slots, k, v)
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
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `paged_attention` of tokens, after writing their keys and values into the cache.

    ``heads`` [T, Hq + 2 Hkv, D] has the queries, keys and values of each token. Queries and keys
    are rotated by ``rotation`` (see `elementwise.rotate`). ``slots`` [T] int64 are the tokens'
    cells.
    """
    native = for_floats(heads)
    count, size = heads.shape[1] - 2 * keys.shape[1], heads.shape[2]
    if native is not None and (rotation is None or rotation[0].shape[-1] == size):
        out = heads.new_empty((heads.shape[0], count, size))
        cos, sin = rotation or (None, None)
        where = (keys, values, slots, tables, rows, lengths, out)
        native.decode.default(heads.contiguous(), cos, sin, *where, page, scale, window or 0, sinks)
        return out
    q, k, v = heads.split_with_sizes([count, *[keys.shape[1]] * 2], 1)
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    write_cells(keys, values, slots, k, v)
    sizes: dict[str, Any] = {"page": page, "longest": longest, "chunk": chunk}
    return paged_attention(
        *(q, keys, values, tables, rows, lengths), **sizes, scale=scale, window=window, sinks=sinks
    )


def supported(like: Tensor) -> bool:
    """Return whether there are kernels for tensors of this dtype and device."""
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
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `paged_attention` from the kernels.

    The host does not wait for the device. The launches depend only on shapes and numbers, not on
    the tensors' content.
    """
    if q.stride(1) != q.shape[2] or q.stride(2) != 1:
        q = q.contiguous()
    tensors = (q, keys, values, tables.contiguous(), rows.contiguous(), lengths.contiguous())
    powers = None if sinks is None else (sinks.float() * LOG2_E).contiguous()
    out: Tensor = _attend(*tensors, page, longest, chunk, scale, window or 0, powers)
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
    sinks: Tensor | None,
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
    kernels().attend[(tokens, kv_heads, splits)](
        *(q, keys, values, tables, rows, lengths, sinks, out, parts, norms),
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
        kernels().merge[(tokens * all_heads,)](
            parts, norms, out, size, splits=splits, columns=columns, num_warps=4
        )
    return out


def write(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Compute `write_cells` with the kernel."""
    width = keys.shape[1] * keys.shape[2]
    k, v = (_rows(x) for x in (k, v))
    _write(keys, values, slots.contiguous(), k, v, width)


@torch.library.custom_op("slurmrl::write_cells", mutates_args=("keys", "values"))
def _write(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor, width: int) -> None:
    if not k.shape[0]:
        return
    grid = (k.shape[0], -(-width // WRITTEN))
    strides = (k.stride(0), v.stride(0))
    kernels().write[grid](k, v, slots, keys, values, width, *strides, block=WRITTEN)


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` [T, Hkv, D] with adjacent elements in each token. Do not copy a wider tensor."""
    side_by_side = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if side_by_side else x.contiguous()


def _block(bytes_per_cell: int) -> int:
    """Return the number of cells that a program reads at a time."""
    return max(LEAST_ROWS, min(MOST_CELLS, _power(BLOCK_BYTES // bytes_per_cell)))


def _splits(programs: int, longest: int, device: torch.device) -> int:
    """Return the number of parts, a power of 2, into which each token's cells are divided.

    There are enough parts for all multiprocessors, but each part has at least a block.
    """
    wanted = -(-PROGRAMS * _multiprocessors(device) // programs)
    most = min(MOST_SPLITS, max(1, longest // MOST_CELLS))
    return 1 << (min(wanted, most).bit_length() - 1)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter runs on the CPU.
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _power(number: int) -> int:
    """Return the smallest power of 2 that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


class Sizes(NamedTuple):
    """Properties for which kernels are compiled."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    page: int


def attends(cache: Tensor, heads: int, page: int) -> bool:
    """Return whether kernels compute attention of ``heads`` query heads over a cache [C, Hkv, D].

    The first call for these sizes compiles and tries the kernels, and the host waits. Raises
    EnvironmentFailure with SLURMRL_OPS=native if the kernels cannot be used.
    """
    if not supported(cache):
        return False
    _, kv_heads, size = cache.shape
    sizes = Sizes(cache.device, cache.dtype, heads, kv_heads, size, page)
    return chosen(lambda: _attention_failure(sizes), f"kernels for pages on {cache.device}")


def writes(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels write keys and values. Raises as `attends`."""
    return chosen(lambda: _write_failure(device, dtype), f"kernels for pages on {device}")


@cache
def _attention_failure(sizes: Sizes) -> str:
    """Return why the attention kernel cannot be used; "" if it can. Log a warning once."""
    return _tried(
        lambda: _wrong_attention(sizes),
        f"Attention over pages copies the key-value cache, which is slower, with {sizes.heads} "
        f"query and {sizes.kv_heads} key heads of {sizes.size} in {sizes.dtype} on {sizes.device}",
    )


@cache
def _write_failure(device: torch.device, dtype: torch.dtype) -> str:
    return _tried(
        lambda: _wrong_writes(device, dtype),
        f"Pure torch writes keys and values, which is slower, in {dtype} on {device}",
    )


def _tried(wrong: Callable[[], str], consequence: str) -> str:
    try:
        reason = wrong()
    except Exception as error:  # noqa: BLE001 - Triton, compilers and drivers raise any type
        reason = f"{type(error).__name__}: {error}"
    if reason:
        log.get(__name__).warning("%s. The kernel cannot be used: %s", consequence, reason)
    return reason


@torch.no_grad()
def _wrong_attention(sizes: Sizes) -> str:
    """Return the difference of the kernels' results from a computation on the host; "" if none.

    The test covers single tokens and chunks, split and unsplit rows, windows and sinks.
    """
    sinks = torch.linspace(-2, 4, sizes.heads)
    for longest, bound, chunk, window, extra in (
        (LONG, BOUND, 1, None, None),
        (SHORT, SHORT, 1, WINDOW, None),
        (LONG, LONG, CHUNK, None, None),
        (SHORT, SHORT, CHUNK, WINDOW, None),
        (LONG, BOUND, CHUNK, WINDOW, sinks),
        (SHORT, SHORT, 1, None, sinks),
    ):
        inputs = example(sizes, longest, chunk)
        page, scale = sizes.page, sizes.size**-0.5
        bounds: dict[str, Any] = {"page": page, "longest": bound, "chunk": chunk}
        there = tuple(x.to(sizes.device) for x in inputs)
        own = None if extra is None else extra.to(sizes.device)
        found = attend(*there, **bounds, scale=scale, window=window, sinks=own).float().cpu()
        exact = tuple(x.float() if x.is_floating_point() else x for x in inputs)
        settings: tuple[Any, ...] = (page, longest, scale, window, extra)
        wanted = reference(*exact, *settings)
        error = float((found - wanted).abs().max())
        if not error <= TOLERANCE[sizes.dtype]:
            return (
                f"for up to {longest} cells, chunks of {chunk} and a window of {window}"
                f"{'' if extra is None else ' with sinks'} its results differ from torch's by "
                f"{error:.3g}"
            )
    return ""


def example(sizes: Sizes, longest: int, chunk: int) -> tuple[Any, ...]:
    """Return random q, keys, values, tables, rows and lengths in host memory.

    There are single tokens of several rows, and ``chunk`` tokens of one row.
    """
    _, dtype, heads, kv_heads, size, page = sizes
    generator = torch.Generator().manual_seed(longest + chunk)
    single = (1, page, page + 1, longest)
    behind = tuple(range(longest - chunk + 1, longest + 1)) if chunk > 1 else ()
    lengths = torch.tensor((*single, *behind))
    rows = torch.tensor((*range(len(single)), *[len(single)] * len(behind)))
    pages = -(-longest // page)
    tables = torch.randperm((len(single) + 1) * pages, generator=generator).view(-1, pages)
    cells = (tables.numel() * page, kv_heads, size)
    shapes = ((len(rows), heads, size), cells, cells)
    q, keys, values = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, keys, values, tables, rows, lengths


@torch.no_grad()
def _wrong_writes(device: torch.device, dtype: torch.dtype) -> str:
    both = torch.randn((5, 4, 24), generator=torch.Generator().manual_seed(1)).to(dtype)
    slots, cells = torch.tensor([7, 0, 3, 8, 4]), torch.zeros((9, 2, 24), dtype=dtype)
    keys, values = cells.to(device, copy=True), cells.to(device, copy=True)
    there = both.to(device)
    write(keys, values, slots.to(device), there[:, :2], there[:, 2:])
    for found, wanted in ((keys, both[:, :2]), (values, both[:, 2:])):
        if not torch.equal(found.cpu(), cells.index_copy(0, slots, wanted)):
            return "the kernel writes other numbers than torch"
    return ""


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
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `paged_attention` in torch, which copies each token's pages."""
    seen = min(-(-longest // MULTIPLE) * MULTIPLE, tables.shape[1] * page)
    pages = tables[:, : -(-seen // page)]
    slabs = [x[: len(x) // page * page].view(-1, page, *x.shape[1:]) for x in (keys, values)]
    each = max(1, GATHERED_CELLS // seen)
    parts = []
    for first in range(0, q.shape[0], each):
        part = slice(first, first + each)
        own = pages[rows[part]]
        bias = cache_bias(lengths[part], seen, window, q.dtype)
        k, v = (_cells(slab, own)[:, :seen].transpose(1, 2) for slab in slabs)
        parts.append(cached_attention(q[part], k, v, bias, scale, sinks))
    return torch.cat(parts)


def _cells(slab: Tensor, pages: Tensor) -> Tensor:
    """Return copies [T, M, Hkv, D] of pages [T, N] of a slab [pages, page, Hkv, D].

    (``index_select`` copies a page at once; indexing copies number by number.)
    """
    return slab.index_select(0, pages.flatten()).view(len(pages), -1, *slab.shape[2:])
