"""The attention block: projections, optional q/k norms, rotation. An ``AttentionCore`` computes the
attention itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from slurmrl.models.config import ModelConfig
from slurmrl.models.norm import RMSNorm
from slurmrl.models.parallel.linear import Linear, RowLinear
from slurmrl.models.parallel.split import WHOLE, Split
from slurmrl.models.rotary import Rotation
from slurmrl.tensors.ops.attention import Packing, packed_attention
from slurmrl.tensors.ops.rotary import rotate


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
        """q [T, Hq, D], k and v [T, Hkv, D] of one layer -> [T, Hq, D]."""
        ...


class PackedCore:
    """Causal attention within each packed sequence."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, self._packing, spec.scale, spec.window)


class Attention(nn.Module):
    """Self-attention with grouped key and value heads. Each tensor rank has some of the heads.
    If there are fewer key and value heads than tensor ranks, each is copied on several ranks."""

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
        """x [T, h] -> [T, h], for the tokens that this rank has between the blocks."""
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
