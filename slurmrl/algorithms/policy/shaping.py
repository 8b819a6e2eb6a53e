"""Scores of completions from their rewards, as pure tensor functions. S sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.algorithms.policy.schema import PolicyGradient


def shape_scores(
    rewards: Tensor,
    finished: Tensor,
    lengths: Tensor,
    settings: PolicyGradient,
    limit: int,
) -> Tensor:
    """The scores [S] of completions with these rewards, of ``lengths`` response tokens out of at
    most ``limit``: the penalty for the length, bias, scale and clip applied, in this order.
    ``finished`` [S] says which ended by themselves."""
    if settings.overlong_buffer is not None:
        penalty = overlong_penalty(lengths, limit, settings.overlong_buffer)
        rewards = rewards + settings.overlong_penalty * penalty.to(rewards.dtype)
    scores = (rewards - settings.reward_bias) * settings.reward_scaling
    if settings.reward_clip is not None:
        scores = scores.clamp(-settings.reward_clip, settings.reward_clip)
    if settings.mask_no_eos_with_zero:
        scores = torch.where(finished, scores, torch.zeros_like(scores))
    return scores


def overlong_penalty(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """The soft penalty for long completions, from 0 to -1 (Yu et al. 2025, "DAPO", eq. 13): 0 up to
    ``limit - buffer`` tokens, falling linearly to -1 at ``limit``."""
    return ((limit - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)
