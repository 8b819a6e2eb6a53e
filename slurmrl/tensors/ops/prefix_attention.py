"""Causal attention over packed pieces of sequences, some of which continue a prefix that several
share: their tokens attend to the whole prefix, then causally to their own piece.

The two partial attentions are merged by the logarithms of their normalizers (Dao et al. 2022,
FlashAttention, section 3.1). On CPUs only, whose kernel in torch returns these.

T packed tokens, N tokens that continue a prefix, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slurmrl.tensors.ops.attention import Packing
from slurmrl.tensors.ops.checks import wide


@dataclass(frozen=True)
class Prefix:
    """A packed piece that others continue."""

    start: int
    """The place of its first token."""
    length: int
    readers: int
    """The number of tokens in the pieces that continue it."""


@dataclass(frozen=True)
class PrefixPacking:
    """The boundaries of packed pieces, and the prefixes among them."""

    pieces: Packing
    prefixes: Sequence[Prefix]
    """Those of which there are readers."""
    readers: Tensor
    """The places [N] of the tokens that continue the prefixes: all of the first one's, and so
    on."""


@cache
def available() -> bool:
    """Whether this release of torch has the kernel's operators. They are not public."""
    x = torch.ones((1, 1, 2, 2))
    try:
        out, normalizers = _attend(x, x, x, 1.0, causal=False)
        grad, *_ = _gradients(out, x, x, x, out, normalizers, 1.0, causal=False)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return normalizers.shape == (1, 1, 2) and grad.shape == x.shape


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: PrefixPacking, scale: float
) -> Tensor:
    """q [T, H, D]; k, v [T, Hkv, D] on a CPU, where Hkv divides H. Returns [T, H, D].

    Scores are multiplied by ``scale``. Each run of pieces of equal length is one call of the
    kernel, and so are all readers of a prefix.
    """
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out: Tensor = _PrefixAttention.apply(q, k, v, packing, scale)  # type: ignore[no-untyped-call]
    return out


class _PrefixAttention(torch.autograd.Function):
    """The gradients of an attention depend on the other keys only through its result and its
    normalizers. With those of all keys, the gradients of the two partial attentions add up to that
    of the whole."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: PrefixPacking, scale: float
    ) -> Tensor:
        own, readers = _empty_results(q), packing.readers
        for *into, q_run, k_run, v_run in _runs(packing, *own, q, k, v):
            _store(into, _attend(q_run, k_run, v_run, scale, causal=True))
        reading = q[readers]
        seen = _empty_results(reading)
        for (*into, rows), (keys, values) in _prefixes(packing, (*seen, reading), (k, v)):
            _store(into, _attend(rows, keys, values, scale, causal=False))
        merged = _merged(tuple(x[readers] for x in own), seen)
        out, normalizers = (x.index_copy_(0, readers, y) for x, y in zip(own, merged, strict=True))
        ctx.save_for_backward(q, k, v, out, normalizers)
        ctx.packing, ctx.scale = packing, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, normalizers = ctx.saved_tensors
        packing, scale, readers = ctx.packing, ctx.scale, ctx.packing.readers
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        per_query = (grad.contiguous(), q, out, normalizers)
        for *into, grad_run, q_run, out_run, norm_run, k_run, v_run in _runs(
            packing, grad_q, grad_k, grad_v, *per_query, k, v
        ):
            known = (grad_run, q_run, k_run, v_run, out_run, norm_run)
            _store(into, _gradients(*known, scale, causal=True))
        reading = [x[readers] for x in per_query]
        grad_reading = torch.empty_like(reading[1])
        for (into_q, grad_rows, rows, out_rows, norm_rows), (*totals, keys, values) in _prefixes(
            packing, (grad_reading, *reading), (grad_k, grad_v, k, v)
        ):
            known = (grad_rows, rows, keys, values, out_rows, norm_rows)
            of_rows, *of_keys = _gradients(*known, scale, causal=False)
            into_q.copy_(of_rows)
            for total, part in zip(totals, of_keys, strict=True):
                total += part
        return grad_q.index_add_(0, readers, grad_reading), grad_k, grad_v, None, None


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """For the result [T, H, D] and the normalizers [T, H] of queries [T, H, D]."""
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype))


def _merged(own: tuple[Tensor, ...], seen: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The result and the normalizers over two sets of keys from those over each."""
    (a, norm_a), (b, norm_b) = own, seen
    share = (norm_b - norm_a).sigmoid()[..., None]
    both = a.to(share.dtype).lerp(b.to(share.dtype), share)
    return both.to(a.dtype), torch.logaddexp(norm_a, norm_b)


def _runs(packing: PrefixPacking, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views [count, H, length, ...] of each run of pieces of tensors [T, H, ...]."""
    runs = packing.pieces.runs
    sizes = [run.count * run.length for run in runs]
    parts = (x.split_with_sizes(sizes) for x in tensors)
    for run, *part in zip(runs, *parts, strict=True):
        yield tuple(x.view(run.count, run.length, *x.shape[1:]).transpose(1, 2) for x in part)


def _prefixes(
    packing: PrefixPacking, per_reader: Sequence[Tensor], per_key: Sequence[Tensor]
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """For each prefix, views [1, H, readers, ...] of tensors [N, H, ...] and views
    [1, H, length, ...] of tensors [T, H, ...]."""
    sizes = [prefix.readers for prefix in packing.prefixes]
    parts = (x.split_with_sizes(sizes) for x in per_reader)
    for prefix, *part in zip(packing.prefixes, *parts, strict=True):
        keys = (x.narrow(0, prefix.start, prefix.length) for x in per_key)
        yield tuple(_one(x) for x in part), tuple(_one(x) for x in keys)


def _one(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _store(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for place, value in zip(into, values, strict=True):
        place.copy_(value)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The result [S, H, L, D] and normalizers [S, H, L] of q [S, H, L, D], k and v [S, H, K, D]."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    results: tuple[Tensor, Tensor] = kernel(q, k, v, 0.0, causal, scale=scale)
    return results


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    normalizers: Tensor,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    inputs = (grad, q, k, v, out, normalizers, 0.0, causal)
    results: tuple[Tensor, Tensor, Tensor] = kernel(*inputs, scale=scale)
    return results
