"""The gated feed-forward part (Shazeer 2020, GLU variants) with few activations kept.

T tokens, i inner units, h hidden size.
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

from slurmrl.tensors.ops import fused, rows

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its derivative."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the value, input) -> gradient of the input."""


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
"""By the names of configs."""
COMPILED = "silu"
"""The activation of which CPUs have a compiled form."""


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, [T, i] each. Only gate and up are kept for the backward pass."""
    out: Tensor = _GatedProduct.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return out


def gated_halves(x: Tensor, activation: str) -> Tensor:
    """``gated_product`` of the halves of x [T, 2i], whose gradient is one tensor."""
    out: Tensor = _GatedHalves.apply(x, activation)  # type: ignore[no-untyped-call]
    return out


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """(activation(gate) * up) times weight: gate, up [T, i], weight [h, i] -> [T, h].

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
        return F.linear(_product(gate, up, activation), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        gate, up, weight = ctx.saved_tensors
        product, gradients = _gradients(gate, up, grad @ weight, ctx.activation)
        grad_gate, grad_up = gradients.chunk(2, -1)
        grad_weight = grad.t() @ product if ctx.needs_input_grad[2] else None
        return grad_gate, grad_up, grad_weight, None


def _product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if fused.fits(gate):
        return fused.gated_product(gate, up, activation)
    if activation == COMPILED and rows.fits(gate):
        return rows.gated_product(gate, up)
    return ACTIVATIONS[activation].value(gate) * up


def _gradients(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The product [T, i], and the gradients of gate and up from the product's, side by side
    [T, 2i]."""
    if fused.fits(gate):
        return fused.gated_gradient(gate, up, grad, activation)
    if activation == COMPILED and rows.fits(gate):
        return rows.gated_gradient(gate, up, grad)
    function = ACTIVATIONS[activation]
    value = function.value(gate)
    return value * up, torch.cat((function.gradient(grad * up, gate), grad * value), -1)
