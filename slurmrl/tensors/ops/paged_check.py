"""Whether the kernels for pages are right on a device: the first use of each kind is compared with
the torch form, since a wrong completion would be noticed by nobody."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from slurmrl import env, log
from slurmrl.errors import EnvironmentFailure
from slurmrl.tensors.ops import paged_launch
from slurmrl.tensors.ops.native.load import Choice
from slurmrl.tensors.ops.paged_reference import reference

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Largest difference of results that are about 1."""
SHORT, LONG = paged_launch.MOST_CELLS - 3, 2 * paged_launch.MOST_CELLS + 40
"""Lengths of rows that are not split, and of rows that are."""
BOUND = paged_launch.MOST_SPLITS * paged_launch.MOST_CELLS
"""A bound of lengths with which rows are split as far as possible."""
CHUNK = 7
WINDOW = 50


class Sizes(NamedTuple):
    """What kernels are compiled for."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    page: int


def attends(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int, page: int
) -> bool:
    """Whether attention by kernels can be used for these sizes.

    Raises EnvironmentFailure with SLURMRL_OPS=native if it cannot.
    """
    sizes = Sizes(device, dtype, heads, kv_heads, size, page)
    return _chosen(lambda: _attention_failure(sizes), device)


def writes(device: torch.device, dtype: torch.dtype) -> bool:
    """The same for writes of keys and values."""
    return _chosen(lambda: _write_failure(device, dtype), device)


def _chosen(failure: Callable[[], str], device: torch.device) -> bool:
    choice = Choice(env.OPS.get())
    if choice is Choice.TORCH:
        return False
    reason = failure()
    if reason and choice is Choice.NATIVE:
        raise EnvironmentFailure(f"kernels for pages cannot be used on {device}: {reason}")
    return not reason


@cache
def _attention_failure(sizes: Sizes) -> str:
    """Why attention cannot be used; empty if it can. Warns once."""
    return _tried(
        lambda: _wrong_attention(sizes),
        f"Attention over pages copies the key-value cache, which is slower, with {sizes.heads} "
        f"query and {sizes.kv_heads} key heads of {sizes.size} in {sizes.dtype} on {sizes.device}",
    )


@cache
def _write_failure(device: torch.device, dtype: torch.dtype) -> str:
    return _tried(
        lambda: _wrong_writes(device, dtype),
        f"Keys and values are written by pure torch in {dtype} on {device}",
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
    """What is wrong with the kernels' results, by a computation on the host: single tokens and
    chunks, rows that are split and that are not, with and without a window."""
    for longest, bound, chunk, window in (
        (LONG, BOUND, 1, None),
        (SHORT, SHORT, 1, WINDOW),
        (LONG, LONG, CHUNK, None),
        (SHORT, SHORT, CHUNK, WINDOW),
    ):
        inputs = example(sizes, longest, chunk)
        page, scale = sizes.page, sizes.size**-0.5
        bounds: dict[str, Any] = {"page": page, "longest": bound, "chunk": chunk}
        there = tuple(x.to(sizes.device) for x in inputs)
        found = paged_launch.attend(*there, **bounds, scale=scale, window=window).float().cpu()
        exact = tuple(x.float() if x.is_floating_point() else x for x in inputs)
        settings: tuple[Any, ...] = (page, longest, scale, window)
        wanted = reference(*exact, *settings)
        error = float((found - wanted).abs().max())
        if not error <= TOLERANCE[sizes.dtype]:
            return (
                f"for up to {longest} cells, chunks of {chunk} and a window of {window} its "
                f"results differ from torch's by {error:.3g}"
            )
    return ""


def example(sizes: Sizes, longest: int, chunk: int) -> tuple[Any, ...]:
    """q, keys, values, tables, rows and lengths of random tokens, in host memory: single ones of
    several rows, and ``chunk`` of one row."""
    _, dtype, heads, kv_heads, size, page = sizes
    draw = torch.Generator().manual_seed(longest + chunk)
    single = (1, page, page + 1, longest)
    behind = tuple(range(longest - chunk + 1, longest + 1)) if chunk > 1 else ()
    lengths = torch.tensor((*single, *behind))
    rows = torch.tensor((*range(len(single)), *[len(single)] * len(behind)))
    pages = -(-longest // page)
    tables = torch.randperm((len(single) + 1) * pages, generator=draw).view(-1, pages)
    cells = (tables.numel() * page, kv_heads, size)
    shapes = ((len(rows), heads, size), cells, cells)
    q, keys, values = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    return q, keys, values, tables, rows, lengths


@torch.no_grad()
def _wrong_writes(device: torch.device, dtype: torch.dtype) -> str:
    both = torch.randn((5, 4, 24), generator=torch.Generator().manual_seed(1)).to(dtype)
    slots, cells = torch.tensor([7, 0, 3, 8, 4]), torch.zeros((9, 2, 24), dtype=dtype)
    keys, values = cells.to(device, copy=True), cells.to(device, copy=True)
    there = both.to(device)
    paged_launch.write(keys, values, slots.to(device), there[:, :2], there[:, 2:])
    for found, wanted in ((keys, both[:, :2]), (values, both[:, 2:])):
        if not torch.equal(found.cpu(), cells.index_copy(0, slots, wanted)):
            return "it writes other numbers than torch"
    return ""
