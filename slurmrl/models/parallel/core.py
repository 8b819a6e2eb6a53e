"""Attention over all packed tokens, called with one rank's part of them (Jacobs et al. 2023,
DeepSpeed Ulysses): one all-to-all gives each context rank all tokens of some heads, another one
reverses it.

T packed tokens, N tokens of a context rank, c context ranks, Hq and Hkv heads of a tensor rank, D
head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slurmrl.models.attention import AttentionCore, AttentionSpec
from slurmrl.models.parallel.split import Axis, Split
from slurmrl.tensors.ops.collectives import exchange


class SplitCore:
    """An ``AttentionCore`` around the core for all ``tokens``. It removes the padding of the last
    ranks' parts first."""

    def __init__(self, core: AttentionCore, context: Axis, tokens: int) -> None:
        self._core, self._context, self._tokens = core, context, tokens

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D]."""
        if self._context.size > 1:
            q, k, v = self._by_heads(q, k, v)
        filled = q.shape[0] - self._tokens
        out = self._core(spec, *(x[: self._tokens] for x in (q, k, v)))
        out = F.pad(out, (0, 0, 0, 0, 0, filled))
        return self._by_tokens(out) if self._context.size > 1 else out

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """All tokens of q [·, Hq/c, D], k and v [·, Hkv/c, D]: adjacent query heads and their key
        heads, which are replicated if there are fewer than ranks."""
        size, copies = self._context.size, max(1, self._context.size // k.shape[1])
        parts = [q, k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)]
        parts = [x.view(x.shape[0], size, -1, x.shape[2]).transpose(0, 1) for x in parts]
        heads = [x.shape[2] for x in parts]
        sent = torch.cat(parts, 2).flatten(0, 1)
        return list(exchange(sent, self._context.group).split_with_sizes(heads, 1))

    def _by_tokens(self, x: Tensor) -> Tensor:
        """[·, Hq/c, D] of all tokens -> [N, Hq, D]."""
        parts = exchange(x, self._context.group).view(self._context.size, -1, *x.shape[1:])
        return parts.transpose(0, 1).flatten(1, 2)


def split_core(core: AttentionCore, split: Split, tokens: int) -> AttentionCore:
    """``core`` itself if the rank has all ``tokens`` without padding."""
    if split.context.size == 1 and split.part_tokens(tokens) == tokens:
        return core
    return SplitCore(core, split.context, tokens)
