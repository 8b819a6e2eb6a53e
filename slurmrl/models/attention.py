"""The attention block: projections, optional q/k norms, rotation.

An ``AttentionCore`` computes the attention itself.

With context ranks, attention is over all packed tokens, called with one rank's part of them (Jacobs
et al. 2023, DeepSpeed Ulysses): one all-to-all gives each context rank all tokens of some heads,
another one reverses it. N tokens of a context rank, c context ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slurmrl.models.config import ModelConfig
from slurmrl.models.feed_forward import RMSNorm
from slurmrl.models.parallel.linear import Linear, RowLinear
from slurmrl.models.parallel.split import WHOLE, Axis, Split
from slurmrl.models.rotary import Rotation
from slurmrl.tensors.ops.attention import Packing, packed_attention
from slurmrl.tensors.ops.collectives import exchange
from slurmrl.tensors.ops.elementwise import rotate


@dataclass(frozen=True)
class AttentionSpec:
    """The settings of a layer that a core needs."""

    layer: int
    scale: float
    """Factor of the scores."""
    window: int | None
    """Number of tokens that a token attends to, itself included; None for all."""


class AttentionCore(Protocol):
    """Attention over packed sequences, or over cached keys and values."""

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return one layer's attention [T, Hq, D] for q [T, Hq, D], k and v [T, Hkv, D]."""
        ...


class PackedCore:
    """Causal attention within each packed sequence."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, self._packing, spec.scale, spec.window)


class Attention(nn.Module):
    """Self-attention with grouped key and value heads.

    Each tensor rank has some of the heads. If there are fewer key and value heads than tensor
    ranks, each is copied on several ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        scale: float | None = None,
        split: Split = WHOLE,
    ) -> None:
        """``scale`` defaults to 1 / sqrt(head_dim)."""
        super().__init__()
        self.split = split
        self.head_dim = config.head_dim
        scale = config.head_dim**-0.5 if scale is None else scale
        self.spec = AttentionSpec(layer, scale, config.windows[layer])
        hidden, q = config.hidden_size, config.num_heads // split.tensor.size * config.head_dim
        kv = kv_heads(config, split) * config.head_dim
        self.q_proj = Linear(hidden, q, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, kv, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, kv, bias=config.qkv_bias)
        self.o_proj = RowLinear(q, hidden, bias=config.o_bias, split=split)
        if config.qk_norm:
            self.q_norm: nn.Module = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm: nn.Module = RMSNorm(config.head_dim, config.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
        """Map ``x`` [T, h] to [T, h]; T counts the tokens that this rank has between the blocks."""
        x = self.split.enter(x)
        heads = (-1, self.head_dim)
        q = self.q_norm(self.q_proj(x).unflatten(-1, heads))
        k = self.k_norm(self.k_proj(x).unflatten(-1, heads))
        v = self.v_proj(x).unflatten(-1, heads)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        mixed: Tensor = self.o_proj(core(self.spec, q, k, v).flatten(1))
        return mixed


def kv_heads(config: ModelConfig, split: Split) -> int:
    """Key and value heads of a tensor rank."""
    return max(1, config.num_kv_heads // split.tensor.size)


class SplitCore:
    """An ``AttentionCore`` around the core for all ``tokens``.

    It removes the padding of the last ranks' parts first.
    """

    def __init__(self, core: AttentionCore, context: Axis, tokens: int) -> None:
        self._core, self._context, self._tokens = core, context, tokens

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention [N, Hq, D] for q [N, Hq, D], k and v [N, Hkv, D]."""
        if self._context.size > 1:
            q, k, v = self._by_heads(q, k, v)
        filled = q.shape[0] - self._tokens
        out = self._core(spec, *(x[: self._tokens] for x in (q, k, v)))
        out = F.pad(out, (0, 0, 0, 0, 0, filled))
        return self._by_tokens(out) if self._context.size > 1 else out

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return this rank's heads of all tokens: q [·, Hq/c, D], k and v [·, Hkv/c, D].

        They are adjacent query heads and their key heads. Key heads are replicated if there are
        fewer than ranks.
        """
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
