"""The mixture-of-experts block: each token passes the few experts that its router prefers.

T tokens, K experts of a token, E experts, h hidden size, i inner size of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slurmrl.models.config import ModelConfig
from slurmrl.models.mlp import ACTIVATIONS
from slurmrl.ops.experts import grouped_linear


class Experts(nn.Module):
    """The gated feed-forward blocks of all experts, their matrices stacked."""

    def __init__(self, experts: int, hidden: int, inner: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [M, h] sorted by expert, counts [E] tokens of each -> [M, h]."""
        gate = self.activation(grouped_linear(x, self.gate_proj, counts))
        return grouped_linear(
            gate * grouped_linear(x, self.up_proj, counts), self.down_proj, counts
        )


class SparseMLP(nn.Module):
    """A router and its experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.gate = nn.Linear(config.hidden_size, moe.experts, bias=False)
        self.experts = Experts(moe.experts, config.hidden_size, moe.inner, config.activation)
        self.per_token = moe.per_token
        self.normalized = moe.normalized
        self.balance = 0.0
        """Weight of this block's load-balancing loss in the coming backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """x [T, h] -> [T, h]."""
        probabilities = self.gate(x).float().softmax(-1)
        weights, chosen = probabilities.topk(self.per_token)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        counts = torch.bincount(chosen.flatten(), minlength=probabilities.shape[1])
        if self.balance and torch.is_grad_enabled() and x.shape[0]:
            weights = _with_loss(weights, balance_loss(probabilities, counts) * self.balance)
        order = chosen.flatten().argsort(stable=True)
        passed = self.experts(x.index_select(0, order // self.per_token), counts)
        parts: Tensor = passed.index_select(0, order.argsort())
        parts = parts.view(x.shape[0], self.per_token, -1)
        mixed: Tensor = (parts * weights.to(x.dtype).unsqueeze(-1)).sum(1)
        return mixed


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """E times the sum over experts of (share of tokens) x (mean probability), from the router's
    probabilities [T, E] and the tokens of each expert [E] (Fedus et al. 2021, Switch
    Transformers, equations 4 to 6)."""
    tokens, experts = probabilities.shape
    return probabilities.mean(0) @ counts.float() * (experts / tokens)


def _with_loss(values: Tensor, loss: Tensor) -> Tensor:
    """``values``, whose backward pass adds the gradient of ``loss`` to that of the model's."""
    out: Tensor = _WithLoss.apply(values, loss)  # type: ignore[no-untyped-call]
    return out


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = loss.shape, loss.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(ctx.shape, dtype=ctx.dtype)
