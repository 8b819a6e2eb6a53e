"""Matrix products of half-precision matrices with float32 results.

Products of two bfloat16 numbers are exact in float32, so only the sums are rounded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slurmrl.ops.checks import wide


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for matrices of one dtype: float64 for float64 inputs, else float32. No gradients."""
    dtype = wide(a.dtype)
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in place and in the dtype of ``total``, which may be wider. No gradients."""
    if a.is_cuda and a.dtype != total.dtype and _adds_in_place(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.is_cuda and a.dtype != total.dtype:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


@cache
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch release adds half-precision products to a float32 matrix."""
    total, a = torch.zeros((8, 8), device=device), torch.zeros((8, 8), dtype=dtype, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, i] times weight [o, i]: [T, o] in float64 for float64 inputs, else in float32."""
    out: Tensor = _WideLinear.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide_product(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
        grad_weight = (grad.t() @ x.to(grad.dtype)).to(weight.dtype)
        return grad_x, grad_weight
