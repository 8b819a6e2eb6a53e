"""Functions that ranks run in the test of ring attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from slurmrl.models.recompute import keeping_products
from slurmrl.tensors.ops import ring_attention as ring_attention_module
from slurmrl.tensors.ops.ring_attention import ring_attention, zigzag


@dataclass(frozen=True)
class Case:
    """Inputs of a test. All ranks make the same inputs and use their own tokens."""

    lengths: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    size: int = 8
    scale: float = 0.4
    window: int | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def bounds(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    def inputs(self) -> list[Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D], and the weights [T, Hq, D] of the result."""
        generator = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.bounds[-1], number, self.size) for number in heads]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]

    def extra(self) -> list[Tensor]:
        """The sinks [Hq], if there are any."""
        return [torch.linspace(-1, 3, self.heads, dtype=self.dtype)] if self.sinks else []


@contextmanager
def counted_rows() -> Iterator[list[int]]:
    """The rows that this rank sends in each exchange."""
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counting(out: Tensor, rows: Tensor, *args: Any, **options: Any) -> Any:
        sent.append(rows.shape[0])
        return exchange(out, rows, *args, **options)

    dist.all_to_all_single = counting
    try:
        yield sent
    finally:
        dist.all_to_all_single = exchange


def places_of(seen: tuple[int, int], queries: int, keys: int) -> Tensor:
    """Return the keys [L, K] that a query attends to in flash-attn, where the last query and the
    last key align.
    """
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)[None, :]
    before, after = (queries + keys if each < 0 else each for each in seen)
    return (distance <= before) & (-distance <= after)


def scores_of(q: Tensor, k: Tensor, scale: float, seen: tuple[int, int]) -> Tensor:
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    return scores.masked_fill(~places_of(seen, q.shape[0], k.shape[0]), -torch.inf)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """A kernel with the arguments of torch's for GPUs, written out."""
    longest_q, longest_k, dropout, causal, debug = rest
    seen = (options["window_size_left"], options["window_size_right"])
    assert (dropout, causal, debug) == (0.0, seen == (-1, 0), False)
    assert (longest_q, longest_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    out, norms, group = torch.empty_like(q), q.new_empty(q.shape[:2]), q.shape[1] // k.shape[1]
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        keys, values = (x[c:d].repeat_interleave(group, 1) for x in (k, v))
        scores = scores_of(q[a:b], keys, options["scale"], seen)
        norms[a:b] = scores.logsumexp(-1).T
        out[a:b] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values)
    return out, norms.T.contiguous(), None, None, None  # type: ignore[return-value]


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    norms: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *_: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    seen = (options["window_size_left"], options["window_size_right"])
    found, group = [torch.zeros_like(x) for x in (q, k, v)], q.shape[1] // k.shape[1]
    assert norms.shape == (q.shape[1], q.shape[0])
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        keys, values = (x[c:d].repeat_interleave(group, 1) for x in (k, v))
        shares = (scores_of(q[a:b], keys, options["scale"], seen) - norms[:, a:b, None]).exp()
        mean = (grad[a:b] * out[a:b]).sum(-1).T[..., None]
        of_shares = torch.einsum("ihd,jhd->hij", grad[a:b], values)
        of_scores = (of_shares - mean) * shares * options["scale"]
        found[0][a:b] = torch.einsum("hij,jhd->ihd", of_scores, keys)
        for into, above, below in ((1, of_scores, q), (2, shares, grad)):
            every = torch.einsum("hij,ihd->jhd", above, below[a:b])
            found[into][c:d] = every.unflatten(1, (-1, group)).sum(2)
    return tuple(found)


def attend_with_flash(case: Case) -> tuple[list[Tensor], list[int]]:
    """Like `attend`, but with torch's flash attention for GPUs."""
    with (
        mock.patch.object(ring_attention_module, "flash_fits", lambda q: q.shape[0] > 0),
        mock.patch.object(torch.ops.aten, "_flash_attention_forward", flash_forward),
        mock.patch.object(torch.ops.aten, "_flash_attention_backward", flash_backward),
    ):
        return attend(case)


def attend_checkpointed(case: Case) -> tuple[list[Tensor], list[int]]:
    """Like `attend`, but within selective checkpointing."""
    return attend(case, keeping_products)


def attend(case: Case, call: Callable[..., Any] | None = None) -> tuple[list[Tensor], list[int]]:
    """Return this rank's result and gradients in zeros [T, ...], and the rows that it sent."""
    group, tokens = dist.group.WORLD, case.bounds[-1]
    assert group is not None
    part = -(-tokens // group.size())
    first = min(group.rank() * part, tokens)
    order = zigzag(tokens, part, group.size())[first : first + part]
    *own, weights = (x[order] for x in case.inputs())
    extra = [x.requires_grad_() for x in case.extra()]
    leaves = [x.requires_grad_() for x in own]
    with counted_rows() as sent:
        options = (case.bounds, part, group, case.scale, case.window)
        if call is None:
            out = ring_attention(*leaves, *options, *extra)
        else:
            out = call(lambda q, k, v: ring_attention(q, k, v, *options, *extra) * 1.0, *leaves)
        (out * weights).sum().backward()  # type: ignore[no-untyped-call]
    found = []
    for x in (out.detach(), *(leaf.grad for leaf in leaves)):
        assert x is not None
        found.append(x.new_zeros((tokens, *x.shape[1:])).index_copy(0, order, x))
    found += [leaf.grad for leaf in extra if leaf.grad is not None]
    return found, sent


def exact(case: Case) -> list[Tensor]:
    """The result and the gradients in float64, from the whole matrix of scores."""
    *own, weights = (x.double() for x in case.inputs())
    leaves = [x.requires_grad_() for x in own]
    q, k, v = leaves
    shared = case.heads // case.kv_heads
    keys, values = (x.repeat_interleave(shared, 1).transpose(0, 1) for x in (k, v))
    rows = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    places = torch.arange(case.bounds[-1])
    distance = places[:, None] - places[None, :]
    seen = (rows[:, None] == rows[None, :]) & (distance >= 0)
    if case.window is not None:
        seen &= distance < case.window
    scores = (q.transpose(0, 1) @ keys.mT * case.scale).masked_fill(~seen, -torch.inf)
    for sinks in case.extra():
        leaves.append(sinks.double().requires_grad_())
        scores = torch.cat((scores, leaves[-1][:, None, None].expand(-1, len(places), 1)), -1)
    weighted = F.softmax(scores, -1)[..., : len(places)] @ values
    out = weighted.transpose(0, 1)
    (out * weights).sum().backward()  # type: ignore[no-untyped-call]
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
