"""Norms, gated products and rotary embeddings in one pass over tensors (torch makes several).

GPUs use the kernels of `fused`. CPUs use compiled operators for float32, the functions ``cpu_...``.
Compiled operators have no gradients and need tensors for which ``cpu_fits`` is true. All other
tensors use torch.

Shapes: T tokens, n elements of a row, i inner units, H heads, D head size, R rotated dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slurmrl.tensors.ops import fused
from slurmrl.tensors.ops.arguments import wide
from slurmrl.tensors.ops.native.loading import for_floats
from slurmrl.tensors.ops.products import linear, product

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its derivative."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    """Function from (gradient of the value, input) to the gradient of the input."""


_GELU_TANH = Activation(
    partial(F.gelu, approximate="tanh"), partial(aten.gelu_backward, approximate="tanh")
)
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation(F.silu, aten.silu_backward),
    "gelu": Activation(F.gelu, aten.gelu_backward),
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "relu": Activation(F.relu, partial(aten.threshold_backward, threshold=0)),
}
"""Mapping from names in configs to activations."""
COMPILED = "silu"
"""Activation that has a compiled operator on CPUs."""


def cpu_fits(*tensors: Tensor) -> bool:
    """Return whether the compiled operators support these tensors."""
    return all(for_floats(tensor) is not None for tensor in tensors)


def cpu_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return x r (offset + weight) and r = 1 / sqrt(mean(x^2) + eps).

    The mean is over the last dim [..., n]; r is [..., 1].
    """
    x = x.contiguous()
    out, scales = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))
    for_floats(x).norm.default(x, weight.contiguous(), out, scales, eps, offset)
    return out, scales


def cpu_rms_norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [..., n] and of the weight [n] of `rms_norm`."""
    x, grad, weight = x.contiguous(), grad.contiguous(), weight.contiguous()
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    for_floats(x).norm_gradient.default(grad, x, weight, scales, grad_x, grad_weight, offset)
    return grad_x, grad_weight


def cpu_gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, all [T, n]."""
    gate, up = fused.alike(gate, up)
    product = gate.new_empty(gate.shape)
    for_floats(gate).gated.default(gate, up, product)
    return product


def cpu_gated_gradient(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up [T, n], and the gradients of gate and up [T, 2n] side by side.

    ``grad`` [T, n] is the gradient of the product.
    """
    gate, up = fused.alike(gate, up)
    rows, columns = gate.shape
    product, gradients = gate.new_empty(rows, columns), gate.new_empty(rows, 2 * columns)
    for_floats(gate).gated_gradient.default(gate, up, grad.contiguous(), product, gradients)
    return product, gradients


def cpu_rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Return `rotate` of x [T, H, D] with cos, sin [T, 1, D]; a ``sign`` of -1 rotates back."""
    if x.stride()[1:] != (x.shape[2], 1):
        x = x.contiguous()
    out = x.new_empty(x.shape)
    for_floats(x).rotate.default(x, cos.contiguous(), sin.contiguous(), out, sign)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dim.

    The formula is from Zhang and Sennrich (2019). x [..., n], weight [n]. Sums are float64 if x is
    float64, else float32. In half precision, torch's kernel on GPUs rounds only the result. On
    other devices, the computation without an offset also rounds before it multiplies by the weight.
    """
    if x.is_cuda and not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps, offset)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    """A root-mean-square norm with its gradients.

    With n = x r, r = 1 / rms(x), and w the sum of weight and offset: dx = r (g w - n mean(g w n)),
    dw = sum(g n).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.offset = offset
        if cpu_fits(x, weight):
            out, scale = cpu_rms_norm(x, weight, eps, offset)
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
        if cpu_fits(x, weight):
            return *cpu_rms_norm_gradient(grad, x, weight, scale, ctx.offset), None, None
        grad, factor = grad.to(scale.dtype), weight.to(scale.dtype)
        if ctx.offset:
            factor = factor + ctx.offset
        normed = x.to(scale.dtype) * scale
        along = grad * normed
        grad_weight = along.flatten(0, -2).sum(0)
        mean = (along @ factor).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * factor).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dims of x [T, H, D] by each token's angles.

    cos, sin [T, 1, R] have every angle twice; the sines of the first half are negated. The angles
    get no gradient. Dims after the first R do not change.
    """
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), -1)
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    """A rotation, whose gradient is the inverse rotation."""

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
    if cpu_fits(x):
        return cpu_rotate(x, cos, sin, sign)
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin, value=sign)


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up, all [T, i]; the backward pass needs only gate and up."""
    out: Tensor = _GatedProduct.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return out


def gated_halves(x: Tensor, activation: str) -> Tensor:
    """Return `gated_product` of the halves of x [T, 2i]. The gradient of x is one tensor."""
    out: Tensor = _GatedHalves.apply(x, activation)  # type: ignore[no-untyped-call]
    return out


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """Return [T, h]: activation(gate) * up for gate, up [T, i], times weight [h, i].

    The backward pass computes the product again, so only gate, up and weight are kept.
    """
    out: Tensor = _GatedLinear.apply(gate, up, weight, activation)  # type: ignore[no-untyped-call]
    return out


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _product(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        _, gradients = _gradients(gate, up, grad, ctx.activation)
        grad_gate, grad_up = gradients.chunk(2, -1)
        return grad_gate, grad_up, None


class _GatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        gate, up = x.chunk(2, -1)
        return _product(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        return _gradients(gate, up, grad, ctx.activation)[1], None


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation = activation
        return linear(_product(gate, up, activation), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        gate, up, weight = ctx.saved_tensors
        inner, gradients = _gradients(gate, up, product(grad, weight), ctx.activation)
        grad_gate, grad_up = gradients.chunk(2, -1)
        grad_weight = product(grad.t(), inner) if ctx.needs_input_grad[2] else None
        return grad_gate, grad_up, grad_weight, None


def _product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if fused.fits(gate):
        return fused.gated_product(gate, up, activation)
    if activation == COMPILED and cpu_fits(gate):
        return cpu_gated_product(gate, up)
    return ACTIVATIONS[activation].value(gate) * up


def _gradients(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the product [T, i], and the gradients of gate and up [T, 2i] side by side.

    ``grad`` [T, i] is the gradient of the product.
    """
    if fused.fits(gate):
        return fused.gated_gradient(gate, up, grad, activation)
    if activation == COMPILED and cpu_fits(gate):
        return cpu_gated_gradient(gate, up, grad)
    function = ACTIVATIONS[activation]
    value = function.value(gate)
    return value * up, torch.cat((function.gradient(grad * up, gate), grad * value), -1)
