"""The actor's objective per token, as pure tensor functions.

All tensors are [T] and aligned with each other. ``mask`` marks the tokens that count; others
contribute zeros, because selecting by a mask would make the host wait for a GPU.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from slurmrl.algorithms.policy.schema import Objective
from slurmrl.algorithms.policy.sequences import Sequences

KLEstimator = Literal["k1", "k2", "k3"]
GATE_LIMIT = 60.0
"""Largest log-ratio that enters a soft gate: far beyond, its exponential would overflow, and the
gate has been flat for long."""


def log_ratios(
    logp: Tensor, old_logp: Tensor, mask: Tensor, level: str, sequences: Sequences
) -> Tensor:
    """log of the ratio of new to old probability that the objective uses at each token.

    ``token``: of the token itself. ``sequence``: of the whole response, to the power of one over
    its length, so the geometric mean of its tokens' ratios (Zheng et al. 2025, "Group sequence
    policy optimization", eq. 7). ``sequence_token``: the same number, whose gradient is that of the
    token's own log-probability alone (eq. 14 there). With equal advantages within a response both
    have the same gradient.
    """
    tokens = torch.where(mask, logp - old_logp, 0.0)
    if level == "token":
        return tokens
    mean = torch.where(mask, sequences.means(tokens, mask), 0.0)
    return mean if level == "sequence" else mean.detach() + (tokens - tokens.detach())


def surrogate(
    log_ratio: Tensor, logp: Tensor, advantages: Tensor, settings: Objective
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether a bound acts on it. Inputs are 0 where tokens do not
    count."""
    match settings.objective:
        case "clip":
            return _clipped(log_ratio, advantages, settings)
        case "cispo":
            return _detached(log_ratio, logp, advantages, settings)
        case "sapo":
            return _gated(log_ratio, advantages, settings)
    losses = -advantages * log_ratio.exp()
    return losses, torch.zeros_like(losses, dtype=torch.bool)


def _clipped(log_ratio: Tensor, advantages: Tensor, settings: Objective) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic clip (Schulman et al. 2017, eq. 7) with bounds of its own on either side
    (Yu et al. 2025, "DAPO", eq. 10). ``dual_clip`` bounds the loss of tokens with negative
    advantages (Ye et al. 2020, "Mastering complex control in MOBA games")."""
    low, high = settings.ratio_bounds
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(low, high)
    losses = torch.maximum(plain, clipped)
    held = clipped > plain
    if settings.dual_clip is not None:
        most = torch.where(advantages < 0, -advantages * settings.dual_clip, float("inf"))
        held = held | (most < losses)
        losses = torch.minimum(losses, most)
    return losses, held


def _detached(
    log_ratio: Tensor, logp: Tensor, advantages: Tensor, settings: Objective
) -> tuple[Tensor, Tensor]:
    """The log-probability weighted by the clipped ratio, through which no gradient flows: every
    token keeps a gradient (MiniMax 2025, "MiniMax-M1", eq. 4 and 5)."""
    low, high = settings.ratio_bounds
    ratio = log_ratio.detach().exp()
    held = (ratio < low) | (ratio > high)
    return -advantages * ratio.clamp(low, high) * logp, held


def _gated(log_ratio: Tensor, advantages: Tensor, settings: Objective) -> tuple[Tensor, Tensor]:
    """A sigmoid of the ratio instead of a clip, whose slope is 1 at a ratio of 1 and falls off on
    both sides, faster with a larger temperature (Gao et al. 2025, "Soft adaptive policy
    optimization", arXiv 2511.20347)."""
    ratio = log_ratio.clamp(max=GATE_LIMIT).exp()
    positive, negative = settings.sapo_tau_positive, settings.sapo_tau_negative
    tau = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
    losses = -advantages * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return losses, torch.zeros_like(losses, dtype=torch.bool)


def kl_estimate(logp: Tensor, ref_logp: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimates of KL(policy || reference) from tokens of the policy (Schulman 2020, "Approximating
    KL divergence"), with x = log(policy / reference). All have the right mean (k2 nearly so). As
    terms of a loss they differ by their gradients, in the mean over tokens of the policy:

    - ``k1``, x: zero. It belongs into the reward, not into the loss.
    - ``k2``, x^2 / 2: that of KL(policy || reference).
    - ``k3``, exp(-x) - 1 + x: that of KL(reference || policy).
    """
    x = logp - ref_logp
    if estimator == "k1":
        return x
    if estimator == "k2":
        return 0.5 * x.square()
    return torch.expm1(-x) + x
