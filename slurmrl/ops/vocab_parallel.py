"""Log-probabilities and entropies where each rank of a group holds some rows of the vocabulary
projection. Logits are made a chunk of tokens at a time and are never kept.

T packed tokens, h hidden size, V rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slurmrl.ops.checks import wide
from slurmrl.ops.collectives import Group, gathered
from slurmrl.ops.logprobs import CHUNK_ELEMENTS, CHUNK_TOKENS, scaled_logits, spans, statistics


@dataclass(frozen=True)
class Rows:
    """Which rows of the vocabulary a rank has: those of ceil-chunks, ``each`` of them on all
    ranks but perhaps the last."""

    group: Group
    each: int

    @property
    def first(self) -> int:
        return self.group.rank() * self.each

    def whole(self, own: Tensor, total: int) -> Tensor:
        """Columns [S, V] of all ranks side by side [S, total]."""
        padded = own.new_zeros((self.each, own.shape[0]))
        padded[: own.shape[1]] = own.t()
        return gathered(padded, self.group)[:total].t()


def vocab_parallel_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: Rows,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy of softmax(hidden @ whole weight.T / temperature), both [T]
    and the same on all ranks of the group; float64 for float64 inputs, else float32.

    hidden [T, h] and targets [T] are the same on all ranks, weight [V, h] is this rank's part.
    The gradient of hidden is partial: to be added up over the group.
    """
    size = chunk or max(CHUNK_TOKENS, CHUNK_ELEMENTS // weight.shape[0])
    results: tuple[Tensor, Tensor] = _Logprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, rows, temperature, size
    )
    return results


class _Logprobs(torch.autograd.Function):
    """Softmax over parts r with normalizers L_r, entropies H_r and shares w_r = exp(L_r - L),
    where L = log sum exp L_r:
    log p = log p_r + log w_r and H = sum_r w_r (H_r - log w_r).
    With z = logits / temperature: d log p / dz_j = [j = target] - p_j and
    dH / dz_j = -p_j (log p_j + H).
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
    ) -> tuple[Tensor, Tensor]:
        own = (targets - rows.first).clamp(0, weight.shape[0] - 1)
        normalizer, entropy, logp = statistics(hidden, weight, own, temperature, chunk)
        if targets.shape[0]:
            stacked = torch.stack([normalizer, entropy, logp])[None]
            normalizers, entropies, logps = gathered(stacked, rows.group).unbind(1)
            normalizer = normalizers.logsumexp(0)
            log_shares = normalizers - normalizer
            entropy = (log_shares.exp() * (entropies - log_shares)).sum(0)
            owner = (targets // rows.each)[None]
            logp = (logps + log_shares).gather(0, owner)[0]
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.rows, ctx.temperature, ctx.chunk = rows, temperature, chunk
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        place = targets - ctx.rows.first
        here = (place >= 0) & (place < weight.shape[0])
        place, at_target = place * here, grad_logp * here
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide(weight.dtype))
        for span in spans(hidden.shape[0], ctx.chunk):
            h = hidden[span]
            logq = scaled_logits(h, weight, ctx.temperature).sub_(normalizer[span, None])
            p = logq.exp()
            dz = logq.add_(entropy[span, None]).mul_(-grad_entropy[span, None])
            dz.sub_(grad_logp[span, None]).mul_(p)
            dz.scatter_add_(-1, place[span, None], at_target[span, None])
            dz = dz.div_(ctx.temperature).to(h.dtype)
            torch.mm(dz, weight, out=grad_hidden[span])
            grad_weight += dz.t() @ h
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None
