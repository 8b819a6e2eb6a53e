"""Causal attention over packed sequences: no padding, and never a T x T mask.

T packed tokens, S sequences, Hq query heads, Hkv key and value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from slurmrl.errors import UsageError
from slurmrl.tensors.ops import flash
from slurmrl.tensors.ops.upload import upload

BLOCK = 256
"""Queries of a sliding window that are computed in one call."""


@dataclass(frozen=True)
class Run:
    """Consecutive sequences of one length."""

    count: int
    length: int


class Packing:
    """The boundaries of packed sequences."""

    def __init__(self, cu_seqlens: Tensor, max_len: int) -> None:
        """cu_seqlens [S+1] int32, in host memory."""
        self.cu_seqlens = cu_seqlens
        self.max_len = max_len
        self._copies: dict[torch.device, Tensor] = {}

    def cu_seqlens_on(self, device: torch.device) -> Tensor:
        """``cu_seqlens`` on the tokens' device, copied once."""
        if device not in self._copies:
            (copy,) = upload([self.cu_seqlens.long()], device)
            self._copies[device] = copy.to(torch.int32)
        return self._copies[device]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Adjacent sequences of equal length."""
        lengths = self.cu_seqlens.diff().tolist()
        groups = ((length, len(list(group))) for length, group in groupby(lengths) if length)
        return tuple(Run(count, length) for length, count in groups)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal softmax attention within each sequence; with a ``window``, over the last ``window``
    tokens, the query's own included.

    q [T, Hq, D]; k, v [T, Hkv, D], where Hkv divides Hq. Returns [T, Hq, D].
    Scores are multiplied by ``scale``. In half precision on a GPU this is one flash-attention call.
    Otherwise each run of equal lengths is one batched call, so order sequences by length (there are
    at most sqrt(2T) different lengths).
    """
    if flash.fits(q):
        cu_seqlens = packing.cu_seqlens_on(q.device)
        return flash.varlen_attention(q, k, v, cu_seqlens, packing.max_len, scale, window)
    sizes = [run.count * run.length for run in packing.runs]
    if sum(sizes) != q.shape[0]:
        raise UsageError(f"{q.shape[0]} packed tokens, but cu_seqlens ends at {sum(sizes)}")
    if not sizes:
        return q + k.sum() + v.sum()  # zero, but every projection gets its (zero) gradient
    # One split, not slices: the gradient of each slice would be a tensor of all T tokens.
    qs, ks, vs = (x.split_with_sizes(sizes) for x in (q, k, v))
    parts = zip(qs, ks, vs, packing.runs, strict=True)
    return torch.cat([_batched(*part, scale, window) for part in parts])


def _batched(q: Tensor, k: Tensor, v: Tensor, run: Run, scale: float, window: int | None) -> Tensor:
    def batch(x: Tensor) -> Tensor:
        return x.view(run.count, run.length, *x.shape[1:]).transpose(1, 2)

    if q.is_cuda and q.shape[1] != k.shape[1]:
        # In float32 only the memory-efficient kernel avoids the matrix of scores, and it does not
        # support grouped key heads.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    shared = q.shape[1] != k.shape[1]
    if window is not None and window < run.length:
        out = _blocked(batch(q), batch(k), batch(v), scale, window)
    else:
        out = F.scaled_dot_product_attention(
            batch(q), batch(k), batch(v), is_causal=True, scale=scale, enable_gqa=shared
        )
    return out.transpose(1, 2).flatten(0, 1)


def _blocked(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Sliding-window attention over one run's q [S, Hq, L, D] and k, v [S, Hkv, L, D]: one block of
    queries at a time, with only the keys in their windows."""
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


def cached_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention of one new token per row over that row's cached keys.

    q [S, Hq, D]; k, v [S, Hkv, M, D]; bias [S, M] from ``cache_bias``. Returns [S, Hq, D]. Query
    heads that share a key head are rows of one product, so keys are never repeated.
    """
    rows, kv_heads, _, size = k.shape
    out = F.scaled_dot_product_attention(
        q.reshape(rows, kv_heads, -1, size), k, v, attn_mask=bias[:, None, None, :], scale=scale
    )
    return out.reshape(rows, -1, size)


def cache_bias(lengths: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of each row's cached ``keys`` [S, M]: 0 for the first
    ``lengths`` [S] of them, or the last ``window`` of these, and minus infinity for the others."""
    places = torch.arange(keys, device=lengths.device)
    unseen = places >= lengths[:, None]
    if window is not None and window < keys:
        unseen |= places < lengths[:, None] - window
    zeros = torch.zeros(unseen.shape, dtype=dtype, device=lengths.device)
    return zeros.masked_fill_(unseen, float("-inf"))
