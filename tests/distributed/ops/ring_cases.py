"""What ranks do in the test of ring attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from slurmrl.tensors.ops.ring_attention import ring_attention
from slurmrl.tensors.ops.ring_schedule import zigzag


@dataclass(frozen=True)
class Case:
    """All ranks make the same inputs and take their own tokens."""

    lengths: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    size: int = 8
    scale: float = 0.4
    window: int | None = None
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


def attend(case: Case) -> tuple[list[Tensor], list[int]]:
    """This rank's result and gradients, each put in its place of zeros [T, ...]; rows it sent."""
    group, tokens = dist.group.WORLD, case.bounds[-1]
    assert group is not None
    part = -(-tokens // group.size())
    first = min(group.rank() * part, tokens)
    order = zigzag(tokens, part, group.size())[first : first + part]
    *own, weights = (x[order] for x in case.inputs())
    leaves = [x.requires_grad_() for x in own]
    with counted_rows() as sent:
        out = ring_attention(*leaves, case.bounds, part, group, case.scale, case.window)
        (out * weights).sum().backward()  # type: ignore[no-untyped-call]
    found = []
    for x in (out.detach(), *(leaf.grad for leaf in leaves)):
        assert x is not None
        found.append(x.new_zeros((tokens, *x.shape[1:])).index_copy(0, order, x))
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
    out = (F.softmax(scores, -1) @ values).transpose(0, 1)
    (out * weights).sum().backward()  # type: ignore[no-untyped-call]
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
