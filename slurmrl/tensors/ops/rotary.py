"""Rotation of query and key heads by position (Su et al. 2021, RoFormer)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slurmrl.tensors.ops import fused, rows


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x [T, H, D] by the angles of each token.

    cos, sin [T, 1, D]: every angle twice, the sines of the first half negated. They get no
    gradient.
    """
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    if fused.fits(x):
        return fused.rotate(x, cos, sin, sign)
    if rows.fits(x):
        return rows.rotate(x, cos, sin, sign)
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin, value=sign)
