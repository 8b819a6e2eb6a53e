"""The mixture-of-experts block: each token passes the few experts that its router prefers.

T tokens, K experts of a token, E experts, h hidden size, i inner size of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurmrl.models.config import ModelConfig
from slurmrl.models.mlp import ACTIVATIONS
from slurmrl.models.parallel.split import WHOLE, Split
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
    """A router and its experts. Each tensor rank has some of every expert's inner units; the
    router is on all of them."""

    def __init__(self, config: ModelConfig, split: Split = WHOLE) -> None:
        super().__init__()
        self.split = split
        moe = config.moe
        assert moe is not None
        self.gate = nn.Linear(config.hidden_size, moe.experts, bias=False)
        inner = moe.inner // split.tensor.size
        self.experts = Experts(moe.experts, config.hidden_size, inner, config.activation)
        self.per_token = moe.per_token
        self.normalized = moe.normalized
        self.balance = 0.0
        """Weight of this block's load-balancing loss in the coming backward pass."""
        self.tokens: int | None = None
        """How many of the coming call's tokens are real, where some only fill up its part."""

    def forward(self, x: Tensor) -> Tensor:
        """x [T, h] -> [T, h]."""
        x = self.split.enter(x)
        probabilities = self.gate(x).float().softmax(-1)
        weights, chosen = probabilities.topk(self.per_token)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        counts = tokens_of_experts(chosen, probabilities.shape[1])
        if self.balance and torch.is_grad_enabled() and x.shape[0]:
            weights = _with_loss(weights, self._balance_loss(probabilities, chosen))
        order = chosen.flatten().argsort(stable=True)
        passed = self.experts(x.index_select(0, order // self.per_token), counts)
        parts: Tensor = passed.index_select(0, order.argsort())
        parts = parts.view(x.shape[0], self.per_token, -1)
        return self.split.leave((parts * weights.to(x.dtype).unsqueeze(-1)).sum(1))

    def _balance_loss(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """This rank's part of the loss: all ranks' gradients of the router are added up."""
        probabilities, chosen = probabilities[: self.tokens], chosen[: self.tokens]
        counts = tokens_of_experts(chosen, probabilities.shape[1])
        tokens = probabilities.shape[0]
        if self.split.context.size > 1:
            both = torch.cat([counts, counts.new_tensor([tokens])])
            dist.all_reduce(both, group=self.split.context.group)
            counts, tokens = both[:-1], int(both[-1])
        loss = balance_loss(probabilities, counts, tokens)
        return loss * (self.balance / self.split.tensor.size)


def tokens_of_experts(chosen: Tensor, experts: int) -> Tensor:
    """chosen [T, K] -> tokens of each expert [E]; unlike bincount it does not wait for the GPU."""
    each = chosen.flatten()
    return each.new_zeros(experts).scatter_add_(0, each, torch.ones_like(each))


def balance_loss(probabilities: Tensor, counts: Tensor, tokens: int | None = None) -> Tensor:
    """E times the sum over experts of (share of tokens) x (mean probability), from the router's
    probabilities [T, E] and the tokens of each expert [E] (Fedus et al. 2021, Switch
    Transformers, equations 4 to 6). ``tokens`` are those that were counted, where they are more
    than those whose probabilities are given."""
    experts = probabilities.shape[1]
    tokens = probabilities.shape[0] if tokens is None else tokens
    return probabilities.sum(0) @ counts.float() * (experts / max(tokens, 1) ** 2)


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
