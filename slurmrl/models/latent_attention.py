"""Latent attention (MLA; DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

Attention reads the keys and values of all heads, as in other families. Caches store these keys and
values, not the latent vectors.

Shapes: T packed tokens, H heads of a tensor rank, D head size in attention, h hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slurmrl.models.architecture import ModelConfig
from slurmrl.models.family_rules import Latent
from slurmrl.models.layer_parts import AttentionCore, AttentionSpec, RMSNorm, Rotation
from slurmrl.models.parallel.linear import Linear, RowLinear
from slurmrl.models.parallel.split import WHOLE, Split
from slurmrl.tensors.ops.elementwise import rotate

NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors. As in transformers, they ignore ``rms_norm_eps``."""


class LatentAttention(nn.Module):
    """Self-attention with keys and values, and optionally queries, from latent vectors.

    Each tensor rank has some of the heads and computes all latent vectors.
    """

    def __init__(self, config: ModelConfig, layer: int, split: Split = WHOLE) -> None:
        super().__init__()
        assert config.latent is not None
        self.split, self.latent = split, config.latent
        self.spec = AttentionSpec(layer, config.score_scale, config.windows[layer])
        hidden, latent = config.hidden_size, config.latent
        heads = config.num_heads // split.tensor.size
        if latent.query_rank is None:
            self.q_proj = Linear(hidden, heads * latent.key, bias=False)
        else:
            self.q_a_proj = Linear(hidden, latent.query_rank, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(latent.query_rank, NORM_EPS)
            self.q_b_proj = Linear(latent.query_rank, heads * latent.key, bias=False)
        both = latent.rank + latent.rotated
        self.kv_a_proj_with_mqa = Linear(hidden, both, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, NORM_EPS)
        self.kv_b_proj = Linear(latent.rank, heads * (latent.plain + latent.value), bias=False)
        self.o_proj = RowLinear(heads * latent.value, hidden, bias=config.o_bias, split=split)

    def forward(self, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
        """Map ``x`` [T, h] to [T, h], where T tokens are on this rank between the blocks."""
        assert rotation is not None
        x, latent = self.split.enter(x), self.latent
        if latent.query_rank is None:
            queries = self.q_proj(x)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        both = self.kv_a_proj_with_mqa(x)
        vectors, turned = both.split_with_sizes((latent.rank, latent.rotated), -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(vectors))
        q, k, v = heads_of(latent, queries, expanded, turned)
        out = core(self.spec, rotate(q, *rotation), rotate(k, *rotation), v)
        mixed: Tensor = self.o_proj(out[..., : latent.value].flatten(1))
        return mixed


def heads_of(
    latent: Latent, queries: Tensor, expanded: Tensor, turned: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [T, H, D], whose first ``rotated`` dims are to be rotated.

    ``queries`` are [T, H * key], ``expanded`` keys and values [T, H * (plain + value)], and
    ``turned`` the rotated part of keys [T, rotated]. The last dims are padded with zeros; only the
    first ``latent.value`` dims of the result of attention count.
    """
    per_head = torch.unflatten(queries, -1, (-1, latent.key))
    plain, rotated = per_head.split_with_sizes((latent.plain, latent.rotated), -1)
    per_head = torch.unflatten(expanded, -1, (-1, latent.plain + latent.value))
    keys, values = per_head.split_with_sizes((latent.plain, latent.value), -1)
    shared = _halves(latent, turned).unsqueeze(1).expand(-1, keys.shape[1], -1)
    missing = (0, latent.head - latent.key)
    return (
        F.pad(torch.cat((_halves(latent, rotated), plain), -1), missing),
        F.pad(torch.cat((shared, keys), -1), missing),
        F.pad(values, (0, latent.head - latent.value)),
    )


def _halves(latent: Latent, x: Tensor) -> Tensor:
    """Return ``x`` [..., rotated] with the second dims of rotated pairs after all first dims."""
    if not latent.interleaved:
        return x
    return torch.unflatten(x, -1, (-1, 2)).transpose(-1, -2).flatten(-2)
