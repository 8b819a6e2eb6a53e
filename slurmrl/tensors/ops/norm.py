"""Root-mean-square norm: torch's fused kernel on GPUs, one compiled pass on CPUs in float32, else
few passes in both directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slurmrl.tensors.ops import rows
from slurmrl.tensors.ops.checks import wide


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dim (Zhang and Sennrich 2019).

    x [..., n], weight [n]. Computed in float32, or in float64 if x is. torch's kernel rounds only
    the result. The other form rounds before it multiplies by the weight, unless there is an offset,
    compared to which the weight is small.
    """
    if x.is_cuda and not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps, offset)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    """With n = x r, r = 1 / rms(x) and w the weight and its offset:
    dx = r (g w - n mean(g w n)), dw = sum(g n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.offset = offset
        if rows.fits(x, weight):
            out, scale = rows.rms_norm(x, weight, eps, offset)
            ctx.save_for_backward(x, weight, scale)
            return out
        exact = x.to(wide(x.dtype))
        mean_square = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_() / x.shape[-1]
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed: Tensor = exact * scale
        if offset:
            return normed.mul_(weight.to(exact.dtype) + offset).to(x.dtype)
        return normed.to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        if rows.fits(x, weight):
            return *rows.rms_norm_gradient(grad, x, weight, scale, ctx.offset), None, None
        grad, factor = grad.to(scale.dtype), weight.to(scale.dtype)
        if ctx.offset:
            factor = factor + ctx.offset
        normed = x.to(scale.dtype) * scale
        along = grad * normed
        grad_weight = along.flatten(0, -2).sum(0)
        mean = (along @ factor).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * factor).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None
