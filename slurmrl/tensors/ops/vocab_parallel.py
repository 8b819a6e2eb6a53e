"""Log-probabilities and entropies with a vocabulary projection that is split by rows over a group.
Logits are computed one chunk of tokens at a time and never stored.

T packed tokens, h hidden size, V rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slurmrl.tensors.ops.collectives import Group, gathered
from slurmrl.tensors.ops.logprobs import chunk_tokens, gradients, statistics
from slurmrl.tensors.ops.support import Support


@dataclass(frozen=True)
class Rows:
    """The rows of the vocabulary that a rank has: ``each`` of them, fewer on the last rank."""

    group: Group
    each: int

    @property
    def first(self) -> int:
        return self.group.rank() * self.each

    def whole(self, own: Tensor, total: int) -> Tensor:
        """All ranks' columns [S, V], concatenated to [S, total].

        Each row lies in one piece: torch adds up rows of other strides in an order that depends
        on S, so that a token's log-probability would depend on the tokens beside it."""
        padded = own.new_zeros((self.each, own.shape[0]))
        padded[: own.shape[1]] = own.t()
        return gathered(padded, self.group)[:total].t().contiguous()


def vocab_parallel_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: Rows,
    temperature: float = 1.0,
    chunk: int | None = None,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy of softmax(hidden @ whole weight.T / temperature), both [T]
    and the same on all ranks of the group; float64 for float64 inputs, else float32. With a
    ``support`` of the targets, those of its restriction to that.

    hidden [T, h] and targets [T] are the same on all ranks, weight [V, h] is this rank's part.
    The gradient of hidden is partial and must be summed over the group.
    """
    size = chunk or chunk_tokens(weight.shape[0])
    own = None if support is None else support.within(rows.first, weight.shape[0])
    results: tuple[Tensor, Tensor] = _Logprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, rows, temperature, size, own
    )
    return results


class _Logprobs(torch.autograd.Function):
    """Softmax over parts r with normalizers L_r, entropies H_r and shares w_r = exp(L_r - L),
    where L = log sum exp L_r:
    log p = log p_r + log w_r and H = sum_r w_r (H_r - log w_r).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: Rows,
        temperature: float,
        chunk: int,
        support: Support | None,
    ) -> tuple[Tensor, Tensor]:
        own = (targets - rows.first).clamp(0, weight.shape[0] - 1)
        normalizer, entropy, logp = statistics(hidden, weight, own, temperature, chunk, support)
        if targets.shape[0]:
            stacked = torch.stack([normalizer, entropy, logp])[None]
            normalizers, entropies, logps = gathered(stacked, rows.group).unbind(1)
            normalizer = normalizers.logsumexp(0)
            log_shares = normalizers - normalizer
            entropy = (log_shares.exp() * (entropies - log_shares)).sum(0)
            owner = (targets // rows.each)[None]
            logp = (logps + log_shares).gather(0, owner)[0]
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.rows, ctx.temperature, ctx.chunk, ctx.support = rows, temperature, chunk, support
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        own = targets - ctx.rows.first
        per_token = (own, normalizer, entropy, grad_logp, grad_entropy)
        wanted = ctx.needs_input_grad[:2]
        both = gradients(hidden, weight, per_token, ctx.temperature, ctx.chunk, wanted, ctx.support)
        return *both, None, None, None, None, None
