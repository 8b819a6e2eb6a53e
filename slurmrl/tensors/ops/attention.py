"""Causal attention over packed sequences, without padding and without a T x T mask.

`flash_varlen_attention` is flash-attn's kernel if it is installed, else torch's own kernel; both
need a GPU and half precision. `prefix_attention` is for sequences that share prefixes. A prefix is
processed once. The normalizers merge the attention over prefix and suffix.

Shapes: T packed tokens, S sequences, Hq query heads, Hkv key and value heads, D head size.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slurmrl import log
from slurmrl.errors import UsageError
from slurmrl.tensors.ops.arguments import upload, wide
from slurmrl.tensors.ops.partial_attention import attend, gradients, merged

logger = log.get(__name__)
HALF = (torch.bfloat16, torch.float16)
HEAD_MULTIPLE = 8
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
BLOCK = 256
"""Number of queries per call of sliding-window attention."""


@dataclass(frozen=True)
class Run:
    """Consecutive sequences of one length."""

    count: int
    length: int


class Packing:
    """The boundaries of packed sequences."""

    def __init__(self, cu_seqlens: Tensor, max_len: int) -> None:
        """Use boundaries ``cu_seqlens`` [S+1] int32 in host memory; ``max_len`` is a maximum."""
        self.cu_seqlens = cu_seqlens
        self.max_len = max_len
        self._copies: dict[torch.device, Tensor] = {}

    def cu_seqlens_on(self, device: torch.device) -> Tensor:
        """Return ``cu_seqlens`` on a device, with at most one copy to it."""
        if device not in self._copies:
            (copy,) = upload([self.cu_seqlens.long()], device)
            self._copies[device] = copy.to(torch.int32)
        return self._copies[device]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Groups of adjacent sequences of equal length."""
        lengths = self.cu_seqlens.diff().tolist()
        groups = ((length, len(list(group))) for length, group in groupby(lengths) if length)
        return tuple(Run(count, length) for length, count in groups)

    def batches(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield views [count, H, length, ...] of each run of tensors [T, H, ...]."""
        sizes = [run.count * run.length for run in self.runs]
        parts = (x.split_with_sizes(sizes) for x in tensors)
        for run, *part in zip(self.runs, *parts, strict=True):
            yield tuple(x.view(run.count, run.length, *x.shape[1:]).transpose(1, 2) for x in part)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None = None
) -> Tensor:
    """Return the causal softmax attention [T, Hq, D] within each sequence.

    With a ``window``, a query attends to the last ``window`` tokens, its own included.

    q [T, Hq, D]; k, v [T, Hkv, D], where Hkv divides Hq. Scores are multiplied by ``scale``. In
    half precision on a GPU, there is one flash-attention call. Otherwise, there is one batched call
    for each run of equal lengths, so callers should sort sequences by length. Raises UsageError if
    the packing has a different number of tokens than q.
    """
    if flash_fits(q):
        cu_seqlens = packing.cu_seqlens_on(q.device)
        return flash_varlen_attention(q, k, v, cu_seqlens, packing.max_len, scale, window)
    sizes = [run.count * run.length for run in packing.runs]
    if sum(sizes) != q.shape[0]:
        raise UsageError(f"{q.shape[0]} packed tokens, but cu_seqlens ends at {sum(sizes)}")
    if not sizes:
        return q + k.sum() + v.sum()  # Give every projection a zero gradient.
    # Split once, because the gradient of each slice would be a tensor of all T tokens.
    qs, ks, vs = (x.split_with_sizes(sizes) for x in (q, k, v))
    parts = zip(qs, ks, vs, packing.runs, strict=True)
    return torch.cat([_batched(*part, scale, window) for part in parts])


def _batched(q: Tensor, k: Tensor, v: Tensor, run: Run, scale: float, window: int | None) -> Tensor:
    def batch(x: Tensor) -> Tensor:
        return x.view(run.count, run.length, *x.shape[1:]).transpose(1, 2)

    if q.is_cuda and q.shape[1] != k.shape[1]:
        # Only the memory-efficient kernel avoids the matrix of scores in float32. This kernel does
        # not support grouped key heads.
        k, v = for_each_query_head(q, k, v)
    shared = q.shape[1] != k.shape[1]
    if window is not None and window < run.length:
        out = _blocked(batch(q), batch(k), batch(v), scale, window)
    else:
        out = F.scaled_dot_product_attention(
            batch(q), batch(k), batch(v), is_causal=True, scale=scale, enable_gqa=shared
        )
    return out.transpose(1, 2).flatten(0, 1)


def for_each_query_head(q: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return keys and values [K, Hkv, D], repeated for the heads of the queries: [K, Hq, D]."""
    return tuple(
        x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)
        for x in tensors
    )


def _blocked(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Return sliding-window attention over one run's q [S, Hq, L, D] and k, v [S, Hkv, L, D].

    Compute one block of queries at a time, with only the keys in their windows.
    """
    outputs, shared, length = [], q.shape[1] != k.shape[1], q.shape[2]
    starts = range(0, length, BLOCK)
    sizes = [min(BLOCK, length - start) for start in starts]
    for start, block in zip(starts, q.split_with_sizes(sizes, dim=2), strict=True):
        stop, first = start + block.shape[2], max(0, start - window + 1)
        distance = (
            torch.arange(start, stop, device=q.device)[:, None]
            - torch.arange(first, stop, device=q.device)[None, :]
        )
        outputs.append(
            F.scaled_dot_product_attention(
                block,
                k[:, :, first:stop],
                v[:, :, first:stop],
                attn_mask=(distance >= 0) & (distance < window),
                scale=scale,
                enable_gqa=shared,
            )
        )
    return torch.cat(outputs, dim=2)


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention [S, Hq, D] of one new token per row over the row's cached keys.

    q [S, Hq, D]; k, v [S, Hkv, M, D]; bias [S, M] from `cache_bias`; ``sinks`` [Hq] are scores
    without a value. Query heads that share a key head are rows of one product, so keys are not
    repeated.
    """
    rows, kv_heads, _, size = k.shape
    if sinks is not None:
        dtype = wide(q.dtype)
        scores = (q.reshape(rows, kv_heads, -1, size).to(dtype) * scale) @ k.to(dtype).mT
        scores = (scores + bias[:, None, None, :]).flatten(1, 2)
        extra = sinks.to(dtype)[None, :, None].expand(rows, -1, -1)
        weights = torch.cat((scores, extra), -1).softmax(-1)[..., :-1]
        shape = (rows, kv_heads, -1, k.shape[2])
        return (weights.view(shape) @ v.to(dtype)).flatten(1, 2).to(q.dtype)
    out = F.scaled_dot_product_attention(
        q.reshape(rows, kv_heads, -1, size), k, v, attn_mask=bias[:, None, None, :], scale=scale
    )
    return out.reshape(rows, -1, size)


def cache_bias(lengths: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the terms [S, M] to add to the scores of each row's M cached ``keys``.

    A term is 0 for the first ``lengths`` [S] keys, or for the last ``window`` of them, and minus
    infinity for all other keys.
    """
    places = torch.arange(keys, device=lengths.device)
    unseen = places >= lengths[:, None]
    if window is not None and window < keys:
        unseen |= places < lengths[:, None] - window
    zeros = torch.zeros(unseen.shape, dtype=dtype, device=lengths.device)
    return zeros.masked_fill_(unseen, float("-inf"))


def flash_fits(q: Tensor) -> bool:
    """Return whether flash attention supports these queries [T, Hq, D]."""
    tokens, _, size = q.shape
    return (
        tokens > 0
        and q.is_cuda
        and q.dtype in HALF
        and size % HEAD_MULTIPLE == 0
        and size <= MAX_HEAD_DIM
        and torch.cuda.get_device_capability(q.device) >= MIN_CAPABILITY
    )


def flash_varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Return causal attention [T, Hq, D] within each sequence, over the last ``window`` tokens.

    q [T, Hq, D]; k, v [T, Hkv, D]; cu_seqlens [S+1] int32. With ``window`` None, all earlier tokens
    count.
    """
    seen = (-1 if window is None else window - 1, 0)
    kernel = _flash_attn if _has_flash_attn() else _torch
    return kernel(q, k, v, cu_seqlens, longest, scale, seen)


def register_flash() -> None:
    """Register the kernels' operators with torch, by importing them."""
    _has_flash_attn()
    importlib.import_module("torch.nn.attention.varlen")


@cache
def _has_flash_attn() -> bool:
    """Return whether flash-attn is installed and has its varlen function (not in all releases)."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:
        return hasattr(importlib.import_module("flash_attn"), "flash_attn_varlen_func")
    except ImportError as error:
        logger.warning(
            "slurmrl uses torch's attention kernel, because flash-attn was built for another "
            "release of torch or CUDA: %s",
            error,
        )
        return False


def _flash_attn(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float, seen: tuple[int, int]
) -> Tensor:
    kernel = importlib.import_module("flash_attn").flash_attn_varlen_func
    out: Tensor = kernel(
        *(q, k, v, cu, cu, longest, longest),
        softmax_scale=scale,
        causal=True,
        window_size=seen,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


def _torch(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float, seen: tuple[int, int]
) -> Tensor:
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # torch 2.11 supports grouped key heads without this argument.
    options = {"enable_gqa": q.shape[1] != k.shape[1]} if _has_enable_gqa(varlen_attn) else {}
    out: Tensor = varlen_attn(
        q, k, v, cu, cu, longest, longest, scale=scale, window_size=seen, **options
    )
    return out


@cache
def _has_enable_gqa(function: Callable[..., Tensor]) -> bool:
    return "enable_gqa" in inspect.signature(function).parameters


@dataclass(frozen=True)
class Prefix:
    """A packed piece of ``length`` tokens that other pieces continue."""

    start: int
    """Place of the first token."""
    length: int
    readers: int
    """Number of tokens in the pieces that continue the prefix."""


@dataclass(frozen=True)
class PrefixPacking:
    """The boundaries of packed pieces, and the prefixes among them."""

    pieces: Packing
    prefixes: Sequence[Prefix]
    """Prefixes that other pieces continue."""
    readers: Tensor
    """[N]: places of the tokens that continue the prefixes, prefix by prefix."""


@cache
def prefix_attention_works() -> bool:
    """Return whether this release of torch has the kernel's operators, which are private."""
    x = torch.ones((1, 1, 2, 2))
    try:
        out, normalizers = attend(x, x, x, 1.0, causal=False)
        grad, *_ = gradients(out, x, x, x, out, normalizers, 1.0, causal=False)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return normalizers.shape == (1, 1, 2) and grad.shape == x.shape


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: PrefixPacking, scale: float
) -> Tensor:
    """Return the attention [T, Hq, D] of pieces that share prefixes.

    q [T, Hq, D] and k, v [T, Hkv, D] are on a CPU; Hkv divides Hq. Scores are multiplied by
    ``scale``. There is one call of the kernel for each run of pieces of equal length, and one for
    all tokens that continue a prefix.
    """
    k, v = for_each_query_head(q, k, v)
    out: Tensor = _PrefixAttention.apply(q, k, v, packing, scale)  # type: ignore[no-untyped-call]
    return out


class _PrefixAttention(torch.autograd.Function):
    """Attention over the keys of a piece, merged with the attention over its prefix."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: PrefixPacking, scale: float
    ) -> Tensor:
        own, readers = empty_results(q), packing.readers
        for *into, q_run, k_run, v_run in packing.pieces.batches(*own, q, k, v):
            store(into, attend(q_run, k_run, v_run, scale, causal=True))
        reading = q[readers]
        seen = empty_results(reading)
        for (*into, rows), (keys, values) in _prefixes(packing, (*seen, reading), (k, v)):
            store(into, attend(rows, keys, values, scale, causal=False))
        both = merged((own[0][readers], own[1][readers]), seen)
        out, normalizers = (x.index_copy_(0, readers, y) for x, y in zip(own, both, strict=True))
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
        for *into, grad_run, q_run, out_run, norm_run, k_run, v_run in packing.pieces.batches(
            grad_q, grad_k, grad_v, *per_query, k, v
        ):
            known = (grad_run, q_run, k_run, v_run, out_run, norm_run)
            store(into, gradients(*known, scale, causal=True))
        reading = [x[readers] for x in per_query]
        grad_reading = torch.empty_like(reading[1])
        for (into_q, grad_rows, rows, out_rows, norm_rows), (*totals, keys, values) in _prefixes(
            packing, (grad_reading, *reading), (grad_k, grad_v, k, v)
        ):
            known = (grad_rows, rows, keys, values, out_rows, norm_rows)
            of_rows, *of_keys = gradients(*known, scale, causal=False)
            into_q.copy_(of_rows)
            for total, part in zip(totals, of_keys, strict=True):
                total += part
        return grad_q.index_add_(0, readers, grad_reading), grad_k, grad_v, None, None


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the result [T, H, D] and normalizers [T, H] of queries [T, H, D]."""
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype))


def _prefixes(
    packing: PrefixPacking, per_reader: Sequence[Tensor], per_key: Sequence[Tensor]
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Yield two groups of views for each prefix.

    The first group has views [1, H, readers, ...] of ``per_reader`` tensors [N, H, ...]. The second
    group has views [1, H, length, ...] of ``per_key`` tensors [T, H, ...].
    """
    sizes = [prefix.readers for prefix in packing.prefixes]
    parts = (x.split_with_sizes(sizes) for x in per_reader)
    for prefix, *part in zip(packing.prefixes, *parts, strict=True):
        keys = (x.narrow(0, prefix.start, prefix.length) for x in per_key)
        yield tuple(_one(x) for x in part), tuple(_one(x) for x in keys)


def _one(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def store(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into the tensor at its place in ``into``."""
    for place, value in zip(into, values, strict=True):
        place.copy_(value)
