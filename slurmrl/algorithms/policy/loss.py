"""The losses of policy gradients as pure tensor functions: sums over tokens, and of statistics.

All inputs are [T] and aligned with each other; ``mask`` marks the tokens that count. The caller
divides by denominators of the whole minibatch (``aggregation.py``). Other tokens contribute zeros,
because selecting by a mask would make the host wait for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slurmrl.algorithms.policy.objective import KLEstimator, kl_estimate, log_ratios, surrogate
from slurmrl.algorithms.policy.schema import Objective
from slurmrl.algorithms.policy.sequences import Sequences


@dataclass(frozen=True)
class PolicyTargets:
    """What the actor is trained on, besides its outputs; [T] each."""

    old_logp: Tensor
    advantages: Tensor
    mask: Tensor
    sequences: Sequences
    weights: Tensor | None = None
    """Of each token's loss; None: all are 1."""
    corrections: Tensor | None = None
    """Importance weights against the policy that generated the tokens; None: all are 1."""
    kept: Tensor | None = None
    """The tokens of ``mask`` whose surrogate counts; None: all of them."""
    ref_logp: Tensor | None = None
    """Log-probabilities of the reference; None: the loss has no KL penalty."""


def policy_loss(
    logp: Tensor,
    entropy: Tensor,
    targets: PolicyTargets,
    settings: Objective,
    *,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
) -> tuple[Tensor, dict[str, Tensor]]:
    """The surrogate, times the importance weights, less ``entropy_coef`` times the entropy, plus
    ``kl_coef`` times the KL to the reference.

    Statistics: ``actor/loss`` (the whole), ``actor_loss`` (the surrogate alone), ``clip_fraction``
    (tokens on which a bound acts), ``importance_ratio``, ``entropy``, and two estimates of
    KL(old || new): ``approx_kl_k1`` is log(old/new), ``approx_kl`` the always positive k3, ratio -
    1 - log(ratio). Further ones follow from the targets: ``kl_loss`` (the estimate),
    ``correction_weight``, ``correction_masked``, ``m2_masked``. ``actor/loss``, ``actor_loss`` and
    ``kl_loss`` are weighted like the loss.
    """
    mask = targets.mask
    tokens = torch.where(mask, logp - targets.old_logp, 0.0)
    log_ratio = log_ratios(logp, targets.old_logp, mask, settings.ratio, targets.sequences)
    gain = torch.where(mask, targets.advantages, 0.0)
    losses, held = surrogate(log_ratio, torch.where(mask, logp, 0.0), gain, settings)
    stats: dict[str, Tensor] = {}
    if targets.corrections is not None:
        losses = losses * targets.corrections
        stats["correction_weight"] = targets.corrections.sum()
        stats["correction_masked"] = (mask & (targets.corrections == 0.0)).sum()
    if targets.kept is not None:
        losses = torch.where(targets.kept, losses, 0.0)
        stats["m2_masked"] = (mask & ~targets.kept).sum()
    loss = _weighted(losses, targets.weights)
    stats["actor_loss"] = loss.detach()
    entropies = torch.where(mask, entropy, 0.0)
    loss = loss - settings.entropy_coef * _weighted(entropies, targets.weights)
    if targets.ref_logp is not None:
        kl = torch.where(mask, kl_estimate(logp, targets.ref_logp, kl_estimator), 0.0)
        penalty = _weighted(kl, targets.weights)
        stats["kl_loss"] = penalty.detach()
        loss = loss + kl_coef * penalty
    stats["actor/loss"] = loss.detach()
    with torch.no_grad():
        stats |= {
            "clip_fraction": (held & mask).sum(),
            "importance_ratio": torch.where(mask, log_ratio.exp(), 0.0).sum(),
            "approx_kl_k1": -tokens.sum(),
            "approx_kl": (tokens.exp() - 1.0 - tokens).sum(),
            "entropy": entropies.sum(),
        }
    return loss, stats


def _weighted(losses: Tensor, weights: Tensor | None) -> Tensor:
    return losses.sum() if weights is None else (losses * weights).sum()


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float | None,
    huber_delta: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the new values; beyond ``huber_delta``, if that is set, linear with
    the same slope there (Huber 1964). With ``value_clip``, the larger of this and of the error of
    the new values clipped to that distance from the old ones.

    Statistics: ``value_loss`` and ``value_clip_fraction``.
    """
    new, old, target = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    losses = _doubled_error(new - target, huber_delta)
    held = torch.zeros_like(losses, dtype=torch.bool)
    if value_clip is not None:
        bounded = old + (new - old).clamp(-value_clip, value_clip)
        clipped = _doubled_error(bounded - target, huber_delta)
        # Where the clamp has no effect, the two losses still differ by rounding.
        held = (clipped > losses) & ((new - old).abs() > value_clip)
        losses = torch.maximum(losses, clipped)
    loss = 0.5 * losses.sum()
    return loss, {"value_loss": loss.detach(), "value_clip_fraction": held.sum()}


def _doubled_error(error: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return error.square()
    inner = error.clamp(-huber_delta, huber_delta)
    return inner * (2.0 * error - inner)
