"""Sizes of latent attention (MLA; DeepSeek-AI 2024, DeepSeek-V2, section 2.1). Torch-free.

Keys and values of all heads come from one latent vector per token, and queries may come from
another one. Each key also has dims that are rotated and equal in all heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
QUERY_RANK = "q_lora_rank"
KEY_SIZE = "qk_head_dim"
"""Sum of the sizes of a key's parts, which transformers writes and computes."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The sizes of a latent attention block."""

    query_rank: int | None
    """Size of the latent vector of queries; None if they come from hidden states."""
    rank: int
    """Size of the latent vector of keys and values."""
    plain: int
    """Number of a query's and a key's dims without a rotation."""
    rotated: int
    value: int
    interleaved: bool
    """Whether files have the two dims of a rotated pair side by side."""

    @property
    def key(self) -> int:
        """Size of a query and of a key."""
        return self.plain + self.rotated

    @property
    def head(self) -> int:
        """Size of queries, keys and values in attention, which fills up the shorter ones."""
        return max(self.key, self.value)

    @staticmethod
    def from_hf(full: Mapping[str, Any]) -> Latent:
        """Read the sizes of a ``config.json`` object without `problems`."""
        query = full.get(QUERY_RANK)
        rank, plain, rotated, value = (int(full[name]) for name in SIZES)
        return Latent(
            query_rank=None if query is None else int(query),
            rank=rank,
            plain=plain,
            rotated=rotated,
            value=value,
            interleaved=bool(full.get("rope_interleave", True)),
        )


def problems(full: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the sizes of a ``config.json`` object, one message each."""
    sizes = {name: full.get(name) for name in SIZES}
    if full.get(QUERY_RANK) is not None:
        sizes[QUERY_RANK] = full[QUERY_RANK]
    found = [
        f"{n} is {size}, must be at least 1" for n, size in sizes.items() if not (size or 0) > 0
    ]
    if found:
        return found
    rotated, key = (
        int(full["qk_rope_head_dim"]),
        full["qk_nope_head_dim"] + full["qk_rope_head_dim"],
    )
    if rotated % 2:
        found.append(f"qk_rope_head_dim {rotated} is odd; rotary positions need an even one")
    for name, size in (("head_dim", rotated), (KEY_SIZE, key)):
        if full.get(name) not in (None, size):
            found.append(f"{name} is {full[name]!r}, but the sizes of the heads imply {size}")
    heads, kv_heads = full["num_attention_heads"], full.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        found.append(
            f"num_key_value_heads is {kv_heads}, must be num_attention_heads {heads}: latent "
            "attention has a key and a value for every head"
        )
    return found
