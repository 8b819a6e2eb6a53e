"""Products with low-rank matrices, with dropout of the input.

T tokens, i inputs, o outputs, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slurmrl.tensors.ops.splitmix import mix, shift

LEVELS = 2**16
"""The probability of dropout is a multiple of one over this."""
PER_DRAW = 4
"""Inputs that share 64 random bits."""
BLOCK = 2**22
"""Inputs that are drawn for at a time."""


@dataclass(frozen=True)
class Dropout:
    """Which inputs of a product are zero, as a pure function of the ``keys`` [T] int64 of the
    tokens, the ``salt`` of the matrix, and the column of the whole matrix."""

    keys: Tensor
    salt: int
    rate: float
    first: int = 0
    """The column of the whole matrix that the first input belongs to."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, i] with some elements zero and the others divided by the probability to stay."""
        dropped = round(self.rate * LEVELS)
        out = torch.empty_like(x)
        rows = max(1, BLOCK // max(x.shape[1], 1))
        for begin in range(0, x.shape[0], rows):
            span = slice(begin, begin + rows)
            kept = self._levels(self.keys[span], x.shape[1]) >= dropped
            out[span] = x[span] * kept * (LEVELS / (LEVELS - dropped))
        return out

    def _levels(self, keys: Tensor, inputs: int) -> Tensor:
        """A number in 0 .. LEVELS - 1 for each input: int64 [t, i]."""
        begin, end = self.first // PER_DRAW, -(-(self.first + inputs) // PER_DRAW)
        draws = torch.arange(begin, end, device=keys.device)
        bits = mix(mix(keys ^ self.salt)[:, None] ^ draws)
        parts = torch.stack([shift(bits, 16 * n) & (LEVELS - 1) for n in range(PER_DRAW)], -1)
        offset = self.first - begin * PER_DRAW
        return parts.flatten(1)[:, offset : offset + inputs]


def low_rank_linear(
    x: Tensor, a: Tensor, b: Tensor, scale: float, dropout: Dropout | None = None
) -> Tensor:
    """scale * dropout(x) A^T B^T: x [T, i], a [r, i], b [o, r] of one dtype -> [T, o]. Only x and
    [T, r] are kept for the backward pass, which draws the dropout again."""
    out: Tensor = _LowRankLinear.apply(x, a, b, scale, dropout)  # type: ignore[no-untyped-call]
    return out


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float, dropout: Dropout | None
    ) -> Tensor:
        inner = F.linear(x if dropout is None else dropout(x), a)
        ctx.save_for_backward(x, a, b, inner)
        ctx.scale, ctx.dropout = scale, dropout
        return F.linear(inner * scale, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        x, a, b, inner = ctx.saved_tensors
        grad_inner = (grad @ b) * ctx.scale
        grad_b = grad.t() @ (inner * ctx.scale)
        grad_a = grad_inner.t() @ (x if ctx.dropout is None else ctx.dropout(x))
        grad_x = grad_inner @ a if ctx.needs_input_grad[0] else None
        if grad_x is not None and ctx.dropout is not None:
            grad_x = ctx.dropout(grad_x)
        return grad_x, grad_a, grad_b, None, None
