"""Matrix products of half-precision matrices with float32 results, and products of many inputs with
one float32 matrix on a CPU.

Products of two bfloat16 numbers are exact in float32, so only the sums are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slurmrl.tensors.ops.checks import wide
from slurmrl.tensors.ops.native.load import for_floats

PANEL: Final = 32
"""Outputs that lie together in a packed matrix."""


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


@dataclass(frozen=True)
class PackedMatrix:
    """A copy of a matrix W [o, i] and a bias b [o] in the order in which the compiled products of
    CPUs read them. Their results for a row depend on that row alone, not on the number of rows."""

    packed: Tensor
    """[⌈o / 32⌉, i, 32]: 32 outputs side by side, zeros behind the last one."""
    bias: Tensor | None
    outer: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
        """They must be `packable`."""
        outer, inner = weight.shape
        packed = weight.new_empty((-(-outer // PANEL), inner, PANEL))
        for_floats(weight).pack.default(weight.detach().contiguous(), packed)
        return cls(packed, bias, outer)

    def product(self, x: Tensor) -> Tensor:
        """x [T, i] -> x W^T + b [T, o]."""
        return self._computed(x, None)

    def added(self, total: Tensor, x: Tensor) -> Tensor:
        """total [T, o] + x W^T + b."""
        return self._computed(x, total.contiguous())

    def _computed(self, x: Tensor, total: Tensor | None) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty((x.shape[0], self.outer))
        for_floats(x).product.default(x, self.packed, self.bias, total, out)
        return out


def packable(weight: Tensor) -> bool:
    """Whether `PackedMatrix` supports matrices of this dtype on this device."""
    return for_floats(weight) is not None
