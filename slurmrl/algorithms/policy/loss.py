"""The losses of policy gradients as pure tensor functions: sums over tokens, and of statistics.

All inputs are [T] and aligned with each other; ``mask`` marks the tokens that count. The caller
divides by their number in the whole batch. Other tokens contribute zeros, because selecting by a
mask would make the host wait for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    logp: Tensor,
    entropy: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate objective (Schulman et al. 2017, "Proximal policy optimization
    algorithms", eq. 7), negated, less ``entropy_coef`` times the entropy.

    Statistics: ``actor_loss``, ``clip_fraction`` (tokens whose gradient the clip removed),
    ``importance_ratio``, ``entropy``, and two estimates of KL(old || new): ``approx_kl_k1`` is
    log(old/new), ``approx_kl`` the always positive k3, ratio - 1 - log(ratio).
    """
    log_ratio = torch.where(mask, logp - old_logp, 0.0)
    ratio = log_ratio.exp()
    gain = torch.where(mask, advantages, 0.0)
    plain = -gain * ratio
    clipped = -gain * ratio.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    surrogate = torch.maximum(plain, clipped).sum()
    entropies = torch.where(mask, entropy, 0.0).sum()
    with torch.no_grad():
        stats = {
            "actor_loss": surrogate.detach(),
            "clip_fraction": (clipped > plain).sum(),
            "importance_ratio": torch.where(mask, ratio, 0.0).sum(),
            "approx_kl_k1": -log_ratio.sum(),
            "approx_kl": (ratio - 1.0 - log_ratio).sum(),
            "entropy": entropies.detach(),
        }
    return surrogate - entropy_coef * entropies, stats


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the new values. With ``value_clip``, the larger of this and of the
    error of the new values clipped to that distance from the old ones.

    Statistics: ``value_loss`` and ``value_clip_fraction``.
    """
    new, old, target = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    losses = (new - target).square()
    held = torch.zeros_like(losses, dtype=torch.bool)
    if value_clip is not None:
        clipped = (old + (new - old).clamp(-value_clip, value_clip) - target).square()
        # Where the clamp has no effect, the two losses still differ by rounding.
        held = (clipped > losses) & ((new - old).abs() > value_clip)
        losses = torch.maximum(losses, clipped)
    loss = 0.5 * losses.sum()
    return loss, {"value_loss": loss.detach(), "value_clip_fraction": held.sum()}
