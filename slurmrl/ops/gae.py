"""Generalised advantage estimation over packed sequences, as whole-tensor operations."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each step: A_t = sum_i (gamma lam)^i delta_{t+i} with
    delta_t = r_t + gamma V_{t+1} - V_t, and returns A_t + V_t (Schulman et al. 2016,
    "High-dimensional continuous control using generalized advantage estimation", eq. 16).

    :param rewards: [T], the S sequences' steps one after the other.
    :param values: [T+S], one more per sequence: the value of the state before each step, then of
        the state behind the last one.
    :param cu_seqlens: [S+1], cumulative numbers of steps.
    :param bootstrap: bool [S]; where it is False the sequence ended, and the last state's value
        counts as 0.
    :return: advantages and returns, [T] each.
    """
    lengths = cu_seqlens[1:].long() - cu_seqlens[:-1].long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=rewards.device), lengths)
    step = torch.arange(len(rewards), device=rewards.device)
    before = values[step + sequence]
    behind = values[step + sequence + 1]
    left = cu_seqlens[1:].long()[sequence] - step
    behind = torch.where((left > 1) | bootstrap[sequence], behind, torch.zeros_like(behind))
    delta = rewards + gamma * behind - before
    advantages = _discounted_sums(delta, left, gamma * lam)
    return advantages, advantages + before


def _discounted_sums(delta: Tensor, left: Tensor, factor: float) -> Tensor:
    """sum_i factor^i delta[t+i] up to the end of t's sequence, by doubling the number of terms:
    log2(longest) passes over all tokens. ``left[t]`` counts the steps from t to that end."""
    sums = delta
    span = 1
    longest = int(left.max()) if len(left) else 0
    while span < longest and factor**span > 0.0:
        further = torch.where(left[:-span] > span, sums[span:], torch.zeros_like(sums[span:]))
        sums = torch.cat([sums[:-span] + factor**span * further, sums[-span:]])
        span *= 2
    return sums
