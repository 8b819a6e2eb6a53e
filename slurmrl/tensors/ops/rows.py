"""Norms, gated products and rotations by the compiled operators for CPUs: one pass over the rows
of float32 tensors each, where torch makes several.

Callers use their torch form where ``fits`` is false. None of these has gradients of its own.

T tokens, n elements of a row, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.tensors.ops.native.load import for_floats


def fits(*tensors: Tensor) -> bool:
    """Whether the operators are there for tensors of these dtypes and devices."""
    return all(for_floats(tensor) is not None for tensor in tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dim [..., n], and
    1 / sqrt(mean(x^2) + eps) [..., 1]."""
    x = x.contiguous()
    out, scales = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))
    for_floats(x).norm.default(x, weight.contiguous(), out, scales, eps, offset)
    return out, scales


def rms_norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """The gradients of x [..., n] and of the weight [n] of `rms_norm`, from that of its result."""
    x, grad, weight = x.contiguous(), grad.contiguous(), weight.contiguous()
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    for_floats(x).norm_gradient.default(grad, x, weight, scales, grad_x, grad_weight, offset)
    return grad_x, grad_weight


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [T, n] each."""
    gate, up = _alike(gate, up)
    product = gate.new_empty(gate.shape)
    for_floats(gate).gated.default(gate, up, product)
    return product


def gated_gradient(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The product silu(gate) * up [T, n], and the gradients of gate and up from the product's, side
    by side [T, 2n]."""
    gate, up = _alike(gate, up)
    rows, columns = gate.shape
    product, gradients = gate.new_empty(rows, columns), gate.new_empty(rows, 2 * columns)
    for_floats(gate).gated_gradient.default(gate, up, grad.contiguous(), product, gradients)
    return product, gradients


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """x [T, H, D] rotated by the angles of each token, or back with a ``sign`` of -1.

    cos, sin [T, 1, D] as in ``tensors.ops.rotary``.
    """
    if x.stride()[1:] != (x.shape[2], 1):
        x = x.contiguous()
    out = x.new_empty(x.shape)
    for_floats(x).rotate.default(x, cos.contiguous(), sin.contiguous(), out, sign)
    return out


def _alike(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Both with contiguous rows that are equally far apart; halves of one tensor are not copied."""
    if gate.stride() != up.stride() or gate.stride(1) != 1:
        return gate.contiguous(), up.contiguous()
    return gate, up
