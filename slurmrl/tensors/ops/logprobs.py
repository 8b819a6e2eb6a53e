"""Log-probabilities and entropies of packed tokens, without storing logits [T, V].

Tensor ranks may share the rows of the vocabulary; each computes the statistics of its rows. Logits
and results are float64 for float64 inputs, else float32.

Shapes: T packed tokens, t tokens of a chunk, S sequences, h hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slurmrl.tensors.ops import fused
from slurmrl.tensors.ops.arguments import upload, wide
from slurmrl.tensors.ops.collectives import Group, gathered
from slurmrl.tensors.ops.products import add_product, product, wide_product
from slurmrl.tensors.ops.sampling import SamplingMasks

CHUNK_ELEMENTS = 2**22
"""Number of logits per chunk for a small vocabulary (16 MiB in float32)."""
CHUNK_TOKENS = 1024
"""Minimum tokens per chunk. Each chunk reads and writes the gradient of the whole weight."""


def chunk_tokens(vocabulary: int) -> int:
    """Return the number of tokens per chunk."""
    return max(CHUNK_TOKENS, CHUNK_ELEMENTS // vocabulary)


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    masks: SamplingMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and entropy of softmax(hidden @ weight.T / temperature), both [T].

    With ``masks`` of the targets, the distributions are restricted to the masks.

    hidden [T, h], weight [V, h], targets [T]. Both results are differentiable in hidden and weight.
    Logits are computed for ``chunk`` tokens at a time, and again in the backward pass.
    """
    size = chunk or chunk_tokens(weight.shape[0])
    results: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, size, masks
    )
    return results


def packed_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    masks: SamplingMasks | None = None,
    compute: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``logprobs_and_entropy`` aligned with packed sequences, both [T].

    Entry t is log p(x_t | x_<t) and the entropy of the distribution from which x_t was sampled.
    Both results are 0 at the first token of a sequence.

    hidden [T, h], input_ids [T], cu_seqlens [S+1] in host memory, masks of the T tokens.
    ``compute`` replaces `logprobs_and_entropy`.
    """
    (rest,) = upload([following_tokens(cu_seqlens)], hidden.device)
    logp, entropy = (compute or logprobs_and_entropy)(
        hidden.index_select(0, rest - 1),
        weight,
        input_ids[rest],
        temperature=temperature,
        chunk=chunk,
        masks=None if masks is None else masks.at(rest),
    )
    zeros = logp.new_zeros(input_ids.shape[0])
    return zeros.index_copy(0, rest, logp), zeros.index_copy(0, rest, entropy)


def packed_logprobs_of_logits(
    logits: Tensor,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    temperature: float = 1.0,
    masks: SamplingMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `packed_logprobs_and_entropy` of logits [T, V], for models that return logits."""
    (rest,) = upload([following_tokens(cu_seqlens)], logits.device)
    scaled = logits.index_select(0, rest - 1).to(wide(logits.dtype)) / temperature
    if masks is not None:
        scaled = masks.at(rest).restrict_(scaled, 0, 1.0)
    logq = scaled.log_softmax(-1)
    logp = logq.gather(-1, input_ids[rest, None]).squeeze(-1)
    entropy = -(logq.exp() * logq).sum(-1)
    zeros = logp.new_zeros(input_ids.shape[0])
    return zeros.index_copy(0, rest, logp), zeros.index_copy(0, rest, entropy)


def following_tokens(cu_seqlens: Tensor) -> Tensor:
    """Return the indices [T - S] of all tokens that are not the first of their sequence.

    ``cu_seqlens`` and the result are in host memory.
    """
    counts = (cu_seqlens.diff().long() - 1).clamp(min=0)
    before = counts.cumsum(0) - counts
    following = torch.repeat_interleave(cu_seqlens[:-1] + 1 - before, counts)
    return following + torch.arange(following.shape[0], device=cu_seqlens.device)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        masks: SamplingMasks | None,
    ) -> tuple[Tensor, Tensor]:
        normalizer, entropy, logp = statistics(hidden, weight, targets, temperature, chunk, masks)
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.temperature, ctx.chunk, ctx.masks = temperature, chunk, masks
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, *per_token = ctx.saved_tensors
        return (
            *gradients(
                hidden,
                weight,
                (*per_token, grad_logp, grad_entropy),
                ctx.temperature,
                ctx.chunk,
                ctx.needs_input_grad[:2],
                ctx.masks,
            ),
            None,
            None,
            None,
            None,
        )


def statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    masks: SamplingMasks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalizer, the entropy and log p(target), each [T].

    The distributions are softmax(hidden @ weight.T / temperature), restricted to ``masks``.
    """
    parts = [
        _statistics(
            _logits(hidden, weight, span, temperature, masks), targets[span], 1.0 / temperature
        )
        for span in spans(hidden.shape[0], chunk)
    ]
    normalizer, entropy, logp = (torch.cat(of_spans) for of_spans in zip(*parts, strict=True))
    return normalizer, entropy, logp


def gradients(
    hidden: Tensor,
    weight: Tensor,
    per_token: tuple[Tensor, ...],
    temperature: float,
    chunk: int,
    wanted: tuple[bool, bool] = (True, True),
    masks: SamplingMasks | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden and weight that are ``wanted``.

    ``per_token`` has targets, normalizers and entropies of the whole vocabulary, and the gradients
    of log p(target) and of the entropy, each [T]. A target out of range belongs to another rank.
    """
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = torch.zeros_like(weight, dtype=wide(weight.dtype)) if wanted[1] else None
    for span in spans(hidden.shape[0], chunk):
        h = hidden[span]
        of_span = tuple(x[span] for x in per_token)
        logits = _logits(hidden, weight, span, temperature, masks)
        dz = _logit_gradient(logits, of_span, 1.0 / temperature, h.dtype)
        del logits
        if grad_hidden is not None:
            product(dz, weight, out=grad_hidden[span])
        if grad_weight is not None:
            add_product(grad_weight, dz.t(), h)
        del dz  # Free the gradients before the next logits are computed.
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _logits(
    hidden: Tensor, weight: Tensor, span: slice, temperature: float, masks: SamplingMasks | None
) -> Tensor:
    """Return the logits [t, V] of a chunk, restricted to ``masks``."""
    logits = wide_product(hidden[span], weight.t())
    return logits if masks is None else masks.restrict_(logits, span.start, temperature)


def spans(tokens: int, chunk: int) -> list[slice]:
    """Return slices of at most ``chunk`` tokens; one empty slice if there are no tokens."""
    return [slice(start, start + chunk) for start in range(0, max(tokens, 1), chunk)]


def _statistics(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalizer, entropy and log p(target), each [t], and overwrite logits [t, V]."""
    if fused.fits(logits):
        return fused.softmax_statistics(logits, targets, scale)
    z = logits if scale == 1.0 else logits.mul_(scale)
    normalizer = z.logsumexp(-1)
    logq = z.sub_(normalizer[:, None])
    logp = logq.gather(-1, targets[:, None]).squeeze(-1)
    return normalizer, -logq.exp().mul_(logq).sum(-1), logp


def _logit_gradient(
    logits: Tensor, per_token: tuple[Tensor, ...], scale: float, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of a chunk of logits [t, V] in ``dtype``, and overwrite the logits.

    With z = scale * logits, L = logsumexp(z), p = exp(z - L):
    d logp / dz_j = [j = target] - p_j and dH / dz_j = -p_j (z_j - L + H).
    """
    if fused.fits(logits):
        return fused.logit_gradient(logits, per_token, scale, dtype)
    targets, normalizer, entropy, grad_logp, grad_entropy = per_token
    z = logits if scale == 1.0 else logits.mul_(scale)
    logq = z.sub_(normalizer[:, None])
    p = logq.exp()
    dz = logq.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logp[:, None]).mul_(p)
    here = (targets >= 0) & (targets < dz.shape[1])
    dz.scatter_add_(-1, (targets * here)[:, None], (grad_logp * here)[:, None])
    return (dz if scale == 1.0 else dz.mul_(scale)).to(dtype)


@dataclass(frozen=True)
class Rows:
    """The rows of the vocabulary on a rank: ``each``, or fewer on the last rank."""

    group: Group
    each: int

    @property
    def first(self) -> int:
        return self.group.rank() * self.each

    def whole(self, own: Tensor, total: int) -> Tensor:
        """Return all ranks' columns ``own`` [S, V], concatenated to [S, total].

        Each row is contiguous. torch sums rows with other strides in an order that depends on S, so
        a token's log-probability would depend on other tokens.
        """
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
    masks: SamplingMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and entropy, both [T], with a vocabulary split over ranks.

    The distributions are softmax(hidden @ whole weight.T / temperature). With ``masks`` of the
    targets, the distributions are restricted to the masks. Results are equal on all ranks of the
    group.

    hidden [T, h] and targets [T] are equal on all ranks; weight [V, h] is this rank's part. The
    gradient of hidden is partial and must be summed over the group.
    """
    size = chunk or chunk_tokens(weight.shape[0])
    own = None if masks is None else masks.within(rows.first, weight.shape[0])
    results: tuple[Tensor, Tensor] = _Logprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, rows, temperature, size, own
    )
    return results


class _Logprobs(torch.autograd.Function):
    """A softmax over a split vocabulary.

    Part r has the normalizer L_r, the entropy H_r and the share w_r = exp(L_r - L), where L = log
    sum exp L_r. Then log p = log p_r + log w_r and H = sum_r w_r (H_r - log w_r).
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
        masks: SamplingMasks | None,
    ) -> tuple[Tensor, Tensor]:
        own = (targets - rows.first).clamp(0, weight.shape[0] - 1)
        normalizer, entropy, logp = statistics(hidden, weight, own, temperature, chunk, masks)
        if targets.shape[0]:
            stacked = torch.stack([normalizer, entropy, logp])[None]
            normalizers, entropies, logps = gathered(stacked, rows.group).unbind(1)
            normalizer = normalizers.logsumexp(0)
            log_shares = normalizers - normalizer
            entropy = (log_shares.exp() * (entropies - log_shares)).sum(0)
            owner = (targets // rows.each)[None]
            logp = (logps + log_shares).gather(0, owner)[0]
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.rows, ctx.temperature, ctx.chunk, ctx.masks = rows, temperature, chunk, masks
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
        both = gradients(hidden, weight, per_token, ctx.temperature, ctx.chunk, wanted, ctx.masks)
        return *both, None, None, None, None, None
