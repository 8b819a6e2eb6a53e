"""M2PO's mask: it drops tokens until the second moment of log-ratios is small."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST_BITS = 0x7F800000
"""The bits of float32's infinity. Bits of floats that are not negative have the floats' order."""


def second_moment_mask(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    threshold: float,
    all_reduce_sum: Callable[[Tensor], Tensor],
) -> Tensor:
    """Bool [T]: the tokens of ``mask`` that stay (Zheng et al. 2025, "Prosperity before collapse",
    arXiv 2510.01161, algorithm 1).

    Only tokens whose log-ratio has the sign of their advantage can go: the same that a clip acts
    on. The one with the largest square goes, until the mean square of those that stay is at most
    ``threshold``. Tokens of equal squares go together, so the mask depends on neither the order of
    tokens nor their distribution over ranks. ``all_reduce_sum`` adds up over ranks; collective.
    """
    moments = log_ratio.float().square()
    moved = mask & (log_ratio * advantages > 0)
    bits = moments.view(torch.int32)
    wide = moments.double()
    # The largest limit, between these, up to which the mean square is small enough.
    small = torch.full((), -1, dtype=torch.int64, device=bits.device)
    large = torch.full((), LARGEST_BITS + 1, dtype=torch.int64, device=bits.device)
    for _ in range(LARGEST_BITS.bit_length()):
        middle = (small + large) // 2
        stays = moved & (bits <= middle)
        sums = torch.stack([torch.where(stays, wide, 0.0).sum(), stays.sum().double()])
        total, count = all_reduce_sum(sums).unbind()
        fits = total <= threshold * count
        small, large = torch.where(fits, middle, small), torch.where(fits, large, middle)
    return mask & ~(moved & (bits > small))
