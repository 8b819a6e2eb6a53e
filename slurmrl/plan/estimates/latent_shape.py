"""Sizes of latent attention (MLA), from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

SIZES: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
QUERY_RANK: Final = "q_lora_rank"
LARGEST: Final = 10**9
"""Largest valid size; the check of weights reports larger sizes as errors."""


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """The sizes of an attention block that computes keys and values from a latent vector."""

    hidden: int
    heads: int
    query_rank: int
    """Size of the latent vector of queries; 0 if queries come from hidden states."""
    rank: int
    """Size of the latent vector of keys and values."""
    plain: int
    rotated: int
    value: int

    @property
    def key(self) -> int:
        """Size of a query and of a key."""
        return self.plain + self.rotated

    @property
    def head(self) -> int:
        """Size of queries, keys and values in attention, which pads the shorter vectors."""
        return max(self.key, self.value)

    @property
    def cached(self) -> int:
        """Number of elements per token and layer in the cache of each tensor rank of a server."""
        return self.rank + self.rotated

    @property
    def norms(self) -> int:
        """Number of elements of the norms of latent vectors."""
        return self.query_rank + self.rank

    def matrices(self, ranks: int) -> dict[str, tuple[float, float]]:
        """Return a mapping from each matrix to its two sides on one of ``ranks`` tensor ranks.

        Tensor ranks split only the second side.
        """
        heads, found = self.heads / ranks, {}
        if self.query_rank:
            found["q_a_proj"] = (float(self.hidden), float(self.query_rank))
            found["q_b_proj"] = (float(self.query_rank), heads * self.key)
        else:
            found["q_proj"] = (float(self.hidden), heads * self.key)
        found["kv_a_proj_with_mqa"] = (float(self.hidden), float(self.cached))
        found["kv_b_proj"] = (float(self.rank), heads * (self.plain + self.value))
        found["o_proj"] = (float(self.hidden), heads * self.value)
        return found

    def elements(self, ranks: int) -> float:
        """Return the number of elements of the matrices on one of ``ranks`` tensor ranks."""
        return sum(rows * columns for rows, columns in self.matrices(ranks).values())


def latent_shape(full: Mapping[str, Any], hidden: int, heads: int) -> LatentShape | None:
    """Return the sizes in a ``config.json`` object; None for a model without latent attention."""
    rank, plain, rotated, value = (size_in(full, name) for name in SIZES)
    if not (rank and plain and rotated and value):
        return None
    return LatentShape(
        hidden=hidden,
        heads=heads,
        query_rank=size_in(full, QUERY_RANK),
        rank=rank,
        plain=plain,
        rotated=rotated,
        value=value,
    )


def size_in(full: Mapping[str, Any], name: str) -> int:
    """Return the size in a field of a ``config.json`` object; 0 for other values."""
    value = full.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST:
        return value
    return 0
