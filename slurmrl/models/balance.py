"""The load-balancing loss of experts over all tokens of an optimizer step (Fedus et al. 2021,
Switch Transformers, equations 4 to 6).

Where n_e of N tokens choose expert e, and P_e is the mean probability that they give it, the loss
of a block is E times the sum over its E experts of (n_e / N) * P_e. The counts are constants of its
gradient, so each token's part of it follows from the token's own probabilities and the counts of
the whole batch. A batch is split into micro-batches and over ranks, so its tokens are counted
first: a forward pass of all micro-batches without gradients, then a sum over the ranks, then the
training passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Pass = Literal["other", "count", "train"]


class Balance:
    """The loss of all blocks of a model on this rank, each block's scaled by ``weight``."""

    def __init__(self, experts: int, per_token: int, weight: float) -> None:
        self.weight = weight
        self.now: Pass = "other"
        """The purpose of the next passes; ``other`` if their tokens are not part of the batch."""
        self._experts, self._per_token = experts, per_token
        self._blocks = 0
        self._counts = torch.zeros(0, device="cpu")
        self._tokens: list[int] = []

    def join(self) -> int:
        """Register a block; return its number."""
        self._blocks += 1
        return self._blocks - 1

    def begin(self, device: torch.device) -> None:
        """Reset the counts for a new batch."""
        shape = (self._blocks, self._experts)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)

    def sum_counts(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Sum the counts over all ranks after the counting passes. Collective over the ``groups``
        along which tokens are spread."""
        for group in groups if self._blocks else ():
            dist.all_reduce(self._counts, group=group)
        self._tokens = [chosen // self._per_token for chosen in self._counts.sum(-1).tolist()]

    def follow(self, block: int, values: Tensor, probabilities: Tensor, counts: Tensor) -> Tensor:
        """Return ``values`` with the gradient of the loss attached.

        A block calls it with its router's ``probabilities`` [T, E] for tokens of the batch, the
        ``counts`` [E] of those that chose each expert, and ``values`` on which its output
        depends."""
        if self.now == "count":
            self._counts[block] += counts
        elif self.now == "train" and torch.is_grad_enabled() and probabilities.shape[0]:
            loss = balance_loss(probabilities, self._counts[block], self._tokens[block])
            return _with_loss(values, loss * self.weight)
        return values


def tokens_of_experts(chosen: Tensor, experts: int) -> Tensor:
    """chosen [T, K] -> tokens of each expert [E]; unlike bincount it does not wait for the GPU."""
    each = chosen.flatten()
    return each.new_zeros(experts).scatter_add_(0, each, torch.ones_like(each))


def balance_loss(probabilities: Tensor, counts: Tensor, tokens: int | None = None) -> Tensor:
    """The contribution of tokens with ``probabilities`` [T, E] to the loss of a block whose
    ``tokens`` (default: these T) chose its experts ``counts`` [E] times."""
    experts = probabilities.shape[1]
    tokens = probabilities.shape[0] if tokens is None else tokens
    return probabilities.sum(0) @ counts.to(probabilities.dtype) * (experts / max(tokens, 1) ** 2)


def _with_loss(values: Tensor, loss: Tensor) -> Tensor:
    """Return ``values`` such that their backward pass adds the gradient of ``loss``."""
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
