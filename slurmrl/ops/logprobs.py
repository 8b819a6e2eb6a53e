"""Log-probabilities and entropies of packed tokens, without ever keeping logits [T, V].

T packed tokens, S sequences, h hidden size, V vocabulary. Results are float64 for float64 inputs
and float32 for the other dtypes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slurmrl.ops.checks import wide
from slurmrl.ops.upload import upload

CHUNK_ELEMENTS = 2**22
"""Logits computed at a time where the vocabulary is small (16 MiB in float32)."""
CHUNK_TOKENS = 512
"""Tokens computed at a time at least: fewer would starve the matrix products."""


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy of softmax(hidden @ weight.T / temperature), both [T].

    hidden [T, h], weight [V, h], targets [T]. Both results are differentiable in hidden and
    weight; logits are computed ``chunk`` tokens at a time, again in the backward pass.
    """
    size = chunk or max(CHUNK_TOKENS, CHUNK_ELEMENTS // weight.shape[0])
    results: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, size
    )
    return results


def packed_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, aligned with packed sequences: entry t is log p(x_t | x_<t) and the entropy of
    the distribution that x_t was drawn from; both are 0 at the first token of a sequence.

    hidden [T, h], input_ids [T], cu_seqlens [S+1] in host memory. Returns two [T].
    """
    (rest,) = upload([following_tokens(cu_seqlens)], hidden.device)
    logp, entropy = logprobs_and_entropy(
        hidden.index_select(0, rest - 1), weight, input_ids[rest], temperature, chunk
    )
    zeros = logp.new_zeros(input_ids.shape[0])
    return zeros.index_copy(0, rest, logp), zeros.index_copy(0, rest, entropy)


def packed_logprobs_of_logits(
    logits: Tensor, input_ids: Tensor, cu_seqlens: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same from logits [T, V] of a model that only gives them whole."""
    (rest,) = upload([following_tokens(cu_seqlens)], logits.device)
    logq = (logits.index_select(0, rest - 1).to(wide(logits.dtype)) / temperature).log_softmax(-1)
    logp = logq.gather(-1, input_ids[rest, None]).squeeze(-1)
    entropy = -(logq.exp() * logq).sum(-1)
    zeros = logp.new_zeros(input_ids.shape[0])
    return zeros.index_copy(0, rest, logp), zeros.index_copy(0, rest, entropy)


def following_tokens(cu_seqlens: Tensor) -> Tensor:
    """Indices of all tokens that are not the first of their sequence [T - S]. They are made in
    host memory, as ``cu_seqlens`` is."""
    counts = (cu_seqlens.diff().long() - 1).clamp(min=0)
    before = counts.cumsum(0) - counts
    following = torch.repeat_interleave(cu_seqlens[:-1] + 1 - before, counts)
    return following + torch.arange(following.shape[0], device=cu_seqlens.device)


class _ChunkedLogprobs(torch.autograd.Function):
    """With z = logits / temperature, L = logsumexp(z), p = exp(z - L):
    d logp / dz_j = [j = target] - p_j and dH / dz_j = -p_j (z_j - L + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        normalizer, entropy, logp = statistics(hidden, weight, targets, temperature, chunk)
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, *per_token = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide(weight.dtype)) if wants_weight else None
        for span in spans(hidden.shape[0], ctx.chunk):
            h = hidden[span]
            others = [x[span] for x in (*per_token, grad_logp, grad_entropy)]
            dz = _logit_gradient(h, weight, ctx.temperature, *others).to(h.dtype)
            if grad_hidden is not None:
                torch.mm(dz, weight, out=grad_hidden[span])
            if grad_weight is not None:
                grad_weight += dz.t() @ h
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizer, entropy and log p(target) of softmax(hidden @ weight.T / temperature), each
    [T]."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for span in spans(hidden.shape[0], chunk):
        z = scaled_logits(hidden[span], weight, temperature)
        normalizer = z.logsumexp(-1)
        logq = z.sub_(normalizer[:, None])
        logp = logq.gather(-1, targets[span, None]).squeeze(-1)
        found.append((normalizer, -logq.exp().mul_(logq).sum(-1), logp))
    normalizers, entropies, logps = (torch.cat(parts) for parts in zip(*found, strict=True))
    return normalizers, entropies, logps


def spans(tokens: int, chunk: int) -> list[slice]:
    """Slices of at most ``chunk`` tokens; one empty slice where there are none."""
    return [slice(start, start + chunk) for start in range(0, max(tokens, 1), chunk)]


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """hidden [t, h], weight [V, h] -> logits [t, V] / temperature, in float32 or float64."""
    logits = hidden @ weight.t()
    logits = logits.to(wide(logits.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _logit_gradient(
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    """Gradient with respect to the unscaled logits of one chunk [t, V]."""
    z = scaled_logits(hidden, weight, temperature)
    logq = z.sub_(normalizer[:, None])
    p = logq.exp()
    dz = logq.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logp[:, None]).mul_(p)
    dz.scatter_add_(-1, targets[:, None], grad_logp[:, None])
    return dz.div_(temperature)
