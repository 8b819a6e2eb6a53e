"""Attention over a part of the keys, with the normalizers that merge such parts.

A normalizer is the logarithm of the sum of a query's exponentiated scores. The gradients of a part
depend on other keys only through the result and the normalizers. If the result and the normalizers
cover all keys, the gradients of the parts add up to the gradient of the whole attention.

Shapes: S sequences, H heads, L queries, K keys, D head size, T packed tokens, Hq query heads, Hkv
key and value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from slurmrl.tensors.ops.arguments import wide

BLOCK_QUERIES: Final = 256
BLOCK_SCORES: Final = 2**24
"""Maximum number of scores that `band_attention` has in memory, unless a single query has more."""


class Band(NamedTuple):
    """The keys to which queries attend, by distance (the query's place minus the key's place)."""

    offset: int
    """Distance of the first query from the first key."""
    window: int | None
    """Upper bound of distances, exclusive; None for no bound. The lower bound is 0."""

    def cuts(self, queries: int) -> bool:
        """Return whether the window hides a key from any of the queries."""
        return self.window is not None and self.offset + queries > self.window


def merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the result [..., D] and the normalizers [...] over two sets of keys."""
    (out_a, norm_a), (out_b, norm_b) = a, b
    share = (norm_b - norm_a).sigmoid()[..., None]
    both = out_a.to(share.dtype).lerp(out_b.to(share.dtype), share)
    return both.to(out_a.dtype), torch.logaddexp(norm_a, norm_b)


def with_sinks(parts: tuple[Tensor, Tensor], sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result [T, H, D] and the normalizers [T, H] with additional scores ``sinks`` [H].

    A sink joins the softmax of all queries of its head, and has no value.
    """
    out, normalizers = parts
    scores = sinks.to(normalizers.dtype)
    return out * (normalizers - scores).sigmoid()[..., None], torch.logaddexp(normalizers, scores)


def sink_gradient(known: tuple[Tensor, ...], sinks: Tensor) -> Tensor:
    """Return the gradient of ``sinks`` [H].

    ``known`` has the result's gradient [T, H, D], the queries, the result and the normalizers [T,
    H]; the result and the normalizers include the sinks.
    """
    grad, _, out, normalizers = known
    weights = (sinks.to(normalizers.dtype) - normalizers).exp()
    along = (grad.to(normalizers.dtype) * out).sum(-1)
    return -(weights * along).sum(0).to(sinks.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the result [S, H, L, D] and the normalizers [S, H, L] of torch's kernel for CPUs.

    q [S, H, L, D]; k, v [S, H, K, D].
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    results: tuple[Tensor, Tensor] = kernel(q, k, v, 0.0, causal, scale=scale)
    return results


def gradients(
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
    """Return the gradients of q, k and v for `attend`."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    inputs = (grad, q, k, v, out, normalizers, 0.0, causal)
    results: tuple[Tensor, Tensor, Tensor] = kernel(*inputs, scale=scale)
    return results


def band_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    """Return the result [S, H, L, D] and the normalizers [S, H, L] within a band of keys.

    q [S, H, L, D]; k, v [S, H, K, D]. Each query attends to at least one key. Matrix products over
    blocks of queries compute in float32 at least.
    """
    out, normalizers = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide(q.dtype))
    for rows, columns, scores in _blocks(q, k, scale, band):
        norm = scores.logsumexp(-1)
        normalizers[:, :, rows] = norm
        shares = (scores - norm[..., None]).exp_()
        out[:, :, rows] = (shares @ v[:, :, columns].to(shares.dtype)).to(out.dtype)
    return out, normalizers


def band_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    normalizers: Tensor,
    scale: float,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for `band_attention`, in float32 at least."""
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=wide(x.dtype)) for x in (q, k, v))
    for rows, columns, scores in _blocks(q, k, scale, band):
        shares = (scores - normalizers[:, :, rows, None]).exp_()
        above = grad[:, :, rows].to(shares.dtype)
        keys, values = (x[:, :, columns].to(shares.dtype) for x in (k, v))
        grad_v[:, :, columns] += shares.transpose(-1, -2) @ above
        mean = (above * out[:, :, rows]).sum(-1, keepdim=True)
        of_scores = (above @ values.transpose(-1, -2) - mean) * shares * scale
        grad_q[:, :, rows] = of_scores @ keys
        grad_k[:, :, columns] += of_scores.transpose(-1, -2) @ q[:, :, rows].to(shares.dtype)
    return grad_q, grad_k, grad_v


def _blocks(
    q: Tensor, k: Tensor, scale: float, band: Band
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (queries, keys, scores) of each block. Scores outside the band are minus infinity."""
    (count, heads, queries, _), keys = q.shape, k.shape[2]
    size = max(1, min(BLOCK_QUERIES, BLOCK_SCORES // max(count * heads * keys, 1)))
    dtype = wide(q.dtype)
    for first in range(0, queries, size):
        stop = min(first + size, queries)
        last = min(keys, stop + band.offset)
        start = 0 if band.window is None else max(0, first + band.offset - band.window + 1)
        scores = (q[:, :, first:stop].to(dtype) * scale) @ k[:, :, start:last].to(dtype).mT
        distance = (
            torch.arange(first + band.offset, stop + band.offset, device=q.device)[:, None]
            - torch.arange(start, last, device=q.device)[None, :]
        )
        hidden = distance < 0
        if band.window is not None:
            hidden |= distance >= band.window
        yield slice(first, stop), slice(start, last), scores.masked_fill_(hidden, -torch.inf)


class Ragged(NamedTuple):
    """Packed sequences for flash attention, with different numbers of queries and keys.

    The last query and the last key of a sequence have the same place.
    """

    cu_queries: Tensor
    """[S+1] int32: boundaries of the sequences' queries."""
    cu_keys: Tensor
    """[S+1] int32: boundaries of the sequences' keys."""
    most_queries: int
    """Maximum number of queries of a sequence."""
    most_keys: int
    """Maximum number of keys of a sequence."""
    before: int
    """Number of keys before its place that a query sees; -1 for all."""
    after: int
    """Number of keys after its place that a query sees; -1 for all."""

    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Return the boundaries and maximum lengths as arguments of kernels."""
        return self[:4]

    @property
    def causal(self) -> bool:
        """Whether a query sees all keys up to its place."""
        return (self.before, self.after) == (-1, 0)

    def windows(self) -> dict[str, int]:
        """Return the named arguments of kernels for the keys that a query sees."""
        return {"window_size_left": self.before, "window_size_right": self.after}


def flash(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scale: float) -> tuple[Tensor, Tensor]:
    """Return the result [T, Hq, D] and the normalizers [T, Hq] of torch's flash attention on GPUs.

    q [T, Hq, D]; k, v [K, Hkv, D].
    """
    out, normalizers, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k.contiguous(), v.contiguous(), *ragged.lengths(), 0.0, ragged.causal, False),
        scale=scale,
        **ragged.windows(),
    )
    return out, normalizers.transpose(0, 1).contiguous()


def flash_gradients(
    known: tuple[Tensor, ...], k: Tensor, v: Tensor, ragged: Ragged, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for `flash`.

    ``known`` has the result's gradient, q, the result and the normalizers.
    """
    grad, q, out, normalizers = known
    random = torch.empty(2, dtype=torch.uint64, device=q.device)  # There is no dropout.
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(grad, q, k.contiguous(), v.contiguous(), out, normalizers.transpose(0, 1).contiguous()),
        *(*ragged.lengths(), 0.0, ragged.causal, random, torch.empty(0, device=q.device)),
        scale=scale,
        **ragged.windows(),
    )
    return found
