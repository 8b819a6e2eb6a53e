"""Matrix products of half-precision matrices with float32 results, and products of many inputs with
one float32 matrix on a CPU.

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


class PackedMatrix:
    """A copy of a matrix W [o, i] and a bias b [o] in the order in which oneDNN reads them. On AMD
    processors its products take 0.4 to 0.8 times as long as those of MKL, torch's other library."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """They must be `packable`."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._bias = bias

    def product(self, x: Tensor) -> Tensor:
        """x [T, i] -> x W^T + b [T, o]."""
        inputs = (x, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(*inputs, "none", [], "")
        return out

    def added(self, total: Tensor, x: Tensor) -> Tensor:
        """total [T, o] + x W^T + b."""
        inputs = (x, total, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(*inputs, "add")
        return out


def packable(weight: Tensor) -> bool:
    """Whether `PackedMatrix` supports matrices of this dtype on this device."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and _packs()


@cache
def _packs() -> bool:
    """Whether this release of torch has these operators on this host. No public function computes
    float32 products by oneDNN."""
    try:
        packed = PackedMatrix(torch.eye(2))
        return torch.equal(packed.added(torch.eye(2), torch.eye(2)), 2 * torch.eye(2))
    except (AttributeError, RuntimeError):
        return False
