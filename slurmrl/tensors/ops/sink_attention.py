"""Causal attention over packed sequences, with sinks.

A sink is a trained score of a query head that joins the softmax of every query and has no value
(OpenAI 2025, gpt-oss). Kernels compute attention and normalizers without sinks, and
`partial_attention.with_sinks` adds the sinks.

Shapes: T packed tokens, Hq query heads, Hkv key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slurmrl.tensors.ops.attention import Packing, packed_attention
from slurmrl.tensors.ops.partial_attention import sink_gradient, with_sinks
from slurmrl.tensors.ops.ring_attention import Results, library, own_gradients, own_results, setup


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `packed_attention` [T, Hq, D], with ``sinks`` [Hq] if there are any.

    Selective activation checkpointing keeps the result.
    """
    if sinks is None:
        return packed_attention(q, k, v, packing, scale, window)
    bounds = packing.cu_seqlens.tolist()
    out, _ = torch.ops.slurmrl.sink_attention(
        q, k, v, sinks, bounds, packing.max_len, scale, window
    )
    result: Tensor = out
    return result


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    bounds: Sequence[int],
    longest: int,
    scale: float,
    window: int | None,
) -> Results:
    packing = _packing(bounds, longest)
    out, normalizers = with_sinks(own_results(q, k, v, packing, scale, window), sinks)
    return out.to(q.dtype), normalizers


def _packing(bounds: Sequence[int], longest: int) -> Packing:
    return Packing(torch.tensor(bounds, dtype=torch.int32, device="cpu"), longest)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    bounds, longest, scale, window = ctx.rest
    nothing = (None,) * len(ctx.rest)
    if grad is None:
        return (None, None, None, None, *nothing)
    q, k, v, sinks, out, normalizers = ctx.saved_tensors
    known = (grad.contiguous(), q, out, normalizers)
    of_q, of_pairs = own_gradients(known, k, v, _packing(bounds, longest), scale, window)
    of_k, of_v = of_pairs.to(k.dtype).chunk(2, 1)
    return (of_q.to(q.dtype), of_k, of_v, sink_gradient(known, sinks), *nothing)


library.define(  # type: ignore[no-untyped-call]
    "sink_attention(Tensor q, Tensor k, Tensor v, Tensor sinks, int[] bounds, int longest, "
    "float scale, int? window) -> (Tensor, Tensor)"
)
library.impl("sink_attention", _forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_autograd(
    "slurmrl::sink_attention", _backward, setup_context=setup, lib=library
)
