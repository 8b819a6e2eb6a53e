"""SFT's loss as a pure tensor function."""

from __future__ import annotations

from torch import Tensor


def cross_entropy(logp: Tensor, mask: Tensor) -> Tensor:
    """Sum of -log p over the tokens that ``mask`` picks; both are [T] and aligned."""
    return -logp[mask].sum()
