"""Experts with biases and clamped gates (OpenAI 2025, gpt-oss).

M tokens sorted by expert, E experts, h hidden size, i inner size of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from slurmrl.models.architecture import Clamp
from slurmrl.tensors.ops.products import grouped_linear


class ClampedExperts(nn.Module):
    """The feed-forward blocks of all experts, with stacked matrices.

    A gate is followed by its other half. Each tensor rank has a share of every expert's inner
    units, and one rank adds the biases of their outputs.
    """

    def __init__(
        self, experts: int, hidden: int, inner: int, clamp: Clamp, *, adds_bias: bool = True
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden))
        self.clamp, self.adds_bias = clamp, adds_bias

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``x`` [M, h], sorted by expert, to [M, h]; ``counts`` [E] are tokens per expert."""
        experts = torch.arange(counts.shape[0], device=counts.device)
        experts = torch.repeat_interleave(experts, counts, output_size=x.shape[0])
        halves = grouped_linear(x, self.gate_up_proj, counts) + self.gate_up_proj_bias[experts]
        out = grouped_linear(clamped_product(halves, self.clamp), self.down_proj, counts)
        bias = self.down_proj_bias[experts]
        return out + (bias if self.adds_bias else bias * 0)


def clamped_product(x: Tensor, clamp: Clamp) -> Tensor:
    """Return the gated products [M, i] of ``x`` [M, 2i], gates and other halves alternately.

    Only ``x`` is kept for the backward pass.
    """
    out: Tensor = _ClampedProduct.apply(x, clamp)  # type: ignore[no-untyped-call]
    return out


class _ClampedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clamp: Clamp) -> Tensor:
        ctx.save_for_backward(x)
        ctx.clamp = clamp
        gate, up = _halves(x, clamp)
        return (up + 1) * (gate * (gate * clamp.alpha).sigmoid())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        alpha, limit = ctx.clamp
        gate, up = _halves(x, ctx.clamp)
        share = (gate * alpha).sigmoid()
        of_gate = grad * (up + 1) * share * (1 + alpha * gate * (1 - share))
        of_up = grad * gate * share
        inside = torch.stack((x[..., 0::2] <= limit, x[..., 1::2].abs() <= limit), -1)
        return (torch.stack((of_gate, of_up), -1) * inside).flatten(-2), None


def _halves(x: Tensor, clamp: Clamp) -> tuple[Tensor, Tensor]:
    return x[..., 0::2].clamp(max=clamp.limit), x[..., 1::2].clamp(-clamp.limit, clamp.limit)
