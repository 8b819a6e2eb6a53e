"""Losses of policy gradients, as pure tensor functions.

All tensors are [T] and aligned with each other. ``mask`` marks the tokens that count. Tokens
outside of the mask contribute zeros, because selecting by a mask would make the host wait for a
GPU. Losses are sums over tokens: the caller divides them by denominators of the whole minibatch
(`updates.item_shares`).

Generation and training compute log-probabilities with different kernels, so the sampling policy
differs slightly from the trained policy. `correction_weights` are importance weights that correct
for the difference, and `mismatch_metrics` measure it. `second_moment_mask` is the mask of M2PO.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, log
from typing import Literal

import torch
from torch import Tensor

from slurmrl.algorithms.policy.hyperparameters import Correction, Objective
from slurmrl.algorithms.policy.schema import REF_LOGPROBS
from slurmrl.algorithms.sequences import Sequences
from slurmrl.data.sample import SequenceSample

LOSS_WEIGHTS = "loss_weights"
"""Key of the weights of the tokens' losses, float [T]; a batch without the key has weights 1."""
MASK = "response_mask"
"""Key of the mask of the tokens whose losses count, bool [T]."""
KLEstimator = Literal["k1", "k2", "k3"]
LARGEST_BITS = 0x7F800000
"""Bits of float32's infinity as an integer. Nonnegative floats are ordered like their bits."""
LARGEST_LOG = 80.0
"""Maximum of a log-weight: the exponential of a larger log-weight would overflow."""
RATIO_MAX = "mismatch_ratio_max"
GATE_LIMIT = 60.0
"""Maximum log-ratio in a soft gate: exponentials of much larger log-ratios would overflow, and the
gate is flat there."""


def log_ratios(
    logp: Tensor, old_logp: Tensor, mask: Tensor, level: str, sequences: Sequences
) -> Tensor:
    """Return the logarithms [T] of the ratios of new to old probability in the objective.

    - ``token``: the ratio of the token itself.
    - ``sequence``: the geometric mean of the ratios of the response's tokens (Zheng et al. 2025,
      "Group sequence policy optimization", eq. 7).
    - ``sequence_token``: the value of ``sequence``, with the gradient of only the token's own
      log-probability (eq. 14 of the same paper).

    If the advantages within a response are equal, ``sequence`` and ``sequence_token`` have the same
    gradient.
    """
    tokens = torch.where(mask, logp - old_logp, 0.0)
    if level == "token":
        return tokens
    mean = torch.where(mask, sequences.means(tokens, mask), 0.0)
    return mean if level == "sequence" else mean.detach() + (tokens - tokens.detach())


def surrogate(
    log_ratio: Tensor, logp: Tensor, advantages: Tensor, settings: Objective
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token [T], and whether a bound acts on the token (bool [T]).

    The inputs are 0 at tokens that do not count.
    """
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
    """Return losses with PPO's pessimistic clip (Schulman et al. 2017, eq. 7).

    Each side has a separate bound (Yu et al. 2025, "DAPO", eq. 10). ``dual_clip`` bounds the loss
    of tokens with negative advantages (Ye et al. 2020, "Mastering complex control in MOBA games").
    """
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
    """Return losses in which the clipped ratio weights the log-probability.

    No gradient flows through the ratio, so every token keeps a gradient (MiniMax 2025,
    "MiniMax-M1", eq. 4 and 5).
    """
    low, high = settings.ratio_bounds
    ratio = log_ratio.detach().exp()
    held = (ratio < low) | (ratio > high)
    return -advantages * ratio.clamp(low, high) * logp, held


def _gated(log_ratio: Tensor, advantages: Tensor, settings: Objective) -> tuple[Tensor, Tensor]:
    """Return losses with a sigmoid of the ratio instead of a clip.

    The slope of the gate is 1 at a ratio of 1 and falls off on both sides; a larger temperature
    makes it fall faster (Gao et al. 2025, "Soft adaptive policy optimization", arXiv 2511.20347).
    """
    ratio = log_ratio.clamp(max=GATE_LIMIT).exp()
    positive, negative = settings.sapo_tau_positive, settings.sapo_tau_negative
    tau = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
    losses = -advantages * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return losses, torch.zeros_like(losses, dtype=torch.bool)


def kl_estimate(logp: Tensor, ref_logp: Tensor, estimator: KLEstimator) -> Tensor:
    """Return estimates of KL(policy || reference) from tokens of the policy.

    Let x be log(policy / reference). The estimators k1 and k3 are unbiased, and k2 has a small bias
    (Schulman 2020, "Approximating KL divergence"). As terms of a loss, the estimators have
    different mean gradients over tokens of the policy:

    - ``k1``, x: zero. ``k1`` belongs in the reward, not in the loss.
    - ``k2``, x^2 / 2: the gradient of KL(policy || reference).
    - ``k3``, exp(-x) - 1 + x: the gradient of KL(reference || policy).
    """
    x = logp - ref_logp
    if estimator == "k1":
        return x
    if estimator == "k2":
        return 0.5 * x.square()
    return torch.expm1(-x) + x


def policy_loss(
    outputs: Mapping[str, Tensor],
    batch: SequenceSample,
    settings: Objective,
    *,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    compares: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy's loss and its statistics.

    The loss is the surrogate times the importance weights, minus ``entropy_coef`` times the
    entropy, plus ``kl_coef`` times the KL to the reference. ``outputs`` are logp and entropy [T] of
    the actor. ``batch`` has ``logprobs`` (of the policy before the updates), ``advantages`` and
    `MASK`. ``batch`` may also have

    - `LOSS_WEIGHTS`: the weight of each token's loss; the default is 1;
    - ``corrections``: importance weights that correct for the policy that generated the tokens;
    - ``kept``: a mask of the tokens whose surrogate counts;
    - `REF_LOGPROBS`: the reference's log-probabilities, which add the KL penalty.

    The statistics are

    - ``actor/loss``: the whole loss;
    - ``actor_loss``: only the surrogate;
    - ``clip_fraction``: tokens on which a bound acts;
    - ``importance_ratio`` and ``entropy``;
    - ``approx_kl_k1``: log(old / new), an estimate of KL(old || new);
    - ``approx_kl``: the nonnegative estimate k3, ratio - 1 - log(ratio).

    Depending on the batch, there are also ``kl_loss`` (the estimate of the KL),
    ``correction_weight``, ``correction_masked`` and ``m2_masked``. ``actor/loss``, ``actor_loss``
    and ``kl_loss`` are weighted like the loss. With ``compares``, ``logprobs`` are from generation,
    and the statistics include `mismatch_sums` of the outputs.
    """
    logp, mask, old = outputs["logp"], batch.tensor(MASK), batch.tensor("logprobs")
    weights = batch.data.get(LOSS_WEIGHTS)
    tokens = torch.where(mask, logp - old, 0.0)
    sequences = Sequences.of(batch.cu_seqlens("input_ids"), mask.device)
    log_ratio = log_ratios(logp, old, mask, settings.ratio, sequences)
    gain = torch.where(mask, batch.tensor("advantages"), 0.0)
    losses, held = surrogate(log_ratio, torch.where(mask, logp, 0.0), gain, settings)
    stats: dict[str, Tensor] = {}
    if (corrections := batch.data.get("corrections")) is not None:
        losses = losses * corrections
        stats["correction_weight"] = corrections.sum()
        stats["correction_masked"] = (mask & (corrections == 0.0)).sum()
    if (kept := batch.data.get("kept")) is not None:
        losses = torch.where(kept, losses, 0.0)
        stats["m2_masked"] = (mask & ~kept).sum()
    loss = _weighted(losses, weights)
    stats["actor_loss"] = loss.detach()
    entropies = torch.where(mask, outputs["entropy"], 0.0)
    loss = loss - settings.entropy_coef * _weighted(entropies, weights)
    if (reference := batch.data.get(REF_LOGPROBS)) is not None:
        kl = torch.where(mask, kl_estimate(logp, reference, kl_estimator), 0.0)
        penalty = _weighted(kl, weights)
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
    if compares:
        stats |= mismatch_sums(logp.detach(), old, mask)
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
    """Return half the squared error of the new values, and the statistics.

    If ``huber_delta`` is set, the loss of larger errors is linear (Huber 1964). ``value_clip`` is
    the maximum distance of clipped new values from the old values; the larger of the clipped and
    the unclipped error counts.

    Statistics: ``value_loss`` and ``value_clip_fraction``.
    """
    new, old, target = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    losses = _doubled_error(new - target, huber_delta)
    held = torch.zeros_like(losses, dtype=torch.bool)
    if value_clip is not None:
        bounded = old + (new - old).clamp(-value_clip, value_clip)
        clipped = _doubled_error(bounded - target, huber_delta)
        # Rounding changes losses even where the clamp has no effect, so compare changes too.
        held = (clipped > losses) & ((new - old).abs() > value_clip)
        losses = torch.maximum(losses, clipped)
    loss = 0.5 * losses.sum()
    return loss, {"value_loss": loss.detach(), "value_clip_fraction": held.sum()}


def _doubled_error(error: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return error.square()
    inner = error.clamp(-huber_delta, huber_delta)
    return inner * (2.0 * error - inner)


def correction_weights(
    proximal: Tensor, behavior: Tensor, mask: Tensor, sequences: Sequences, settings: Correction
) -> Tensor:
    """Return importance weights from the log-probabilities of training and generation.

    ``proximal`` is from the training engine before the update, and ``behavior`` is from generation.
    The weights multiply the losses of tokens. Weights and ratios together form the decoupled
    objective (Fu et al. 2025, "AReaL", section 5.2).

    The level is the unit that has a weight:

    - ``token``: each token;
    - ``sequence``: the product over the response;
    - ``geometric``: the geometric mean over the response.

    ``truncate`` moves weights beyond the bounds to the bounds (truncated importance sampling, Yao
    et al. 2025), ``mask`` sets them to 0, and ``weight`` has no bounds. Without a correction, all
    weights are 1. The weights of rejected tokens are 0.
    """
    log_ratio = torch.where(mask, proximal - behavior, 0.0)
    counts = mask
    if settings.reject_by is not None:
        counts = mask & accepted(log_ratio, mask, sequences, settings)
    if not settings.corrects:
        return counts.to(log_ratio.dtype)
    log_weights = log_ratio
    if settings.correction_level == "sequence":
        log_weights = sequences.totals(log_ratio)
    elif settings.correction_level == "geometric":
        log_weights = sequences.means(log_ratio, mask)
    low, high = (_log(bound) for bound in settings.correction_bounds)
    if settings.correction == "truncate":
        log_weights = log_weights.clamp(low, high)
    weights = log_weights.clamp(max=LARGEST_LOG).exp()
    if settings.correction == "mask":
        counts = counts & (log_weights >= low) & (log_weights <= high)
    return torch.where(counts, weights, 0.0)


def accepted(log_ratio: Tensor, mask: Tensor, sequences: Sequences, settings: Correction) -> Tensor:
    """Return which tokens are within the bounds of rejection (bool [T]).

    ``log_ratio`` is log r of each token, 0 where ``mask`` is False. Unless ``reject_over`` is
    ``token``, either all tokens of a response are accepted or none.
    """
    low, high = settings.reject_lower, settings.reject_upper
    match settings.reject_by:
        case "ratio":  # Compute means and sums of ratios from logarithms.
            values = log_ratio
            low, high = (None if bound is None else _log(bound) for bound in (low, high))
        case "k1":
            values = -log_ratio
        case "k2":
            values = 0.5 * log_ratio.square()
        case _:
            values = torch.expm1(log_ratio) - log_ratio
    match settings.reject_over:
        case "mean":
            values = sequences.means(values, mask)
        case "sum":
            values = sequences.totals(values)
        case "max":
            values = sequences.maxima(values, mask)
    above = -inf if low is None else low
    return (values >= above) & (values <= (inf if high is None else high))


def mismatch_sums(training: Tensor, behavior: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the sums over tokens and the largest ratio that `mismatch_metrics` needs.

    ``training`` and ``behavior`` [T] are log-probabilities of the training engine and of generation
    for the same weights.
    """
    log_ratio = torch.where(mask, training - behavior, 0.0).double()
    ratio = log_ratio.exp()
    counted = torch.where(mask, ratio, 0.0)
    return {
        "mismatch_log": -log_ratio.sum(),
        "mismatch_ratio": counted.sum(),
        "mismatch_square": counted.square().sum(),
        RATIO_MAX: counted.max() if len(counted) else counted.sum(),
    }


def mismatch_metrics(sums: Mapping[str, float], tokens: float) -> dict[str, float]:
    """Return the metrics of the mismatch of training and generation; empty for no tokens.

    - ``mismatch/kl``: KL(generation || training) per token, by the nonnegative estimator k3;
    - ``mismatch/kl_k1``: this KL as the mean of log(generation / training);
    - ``mismatch/ratio_max``: the largest ratio of training to generation of a token;
    - ``mismatch/effective_sample_size``: the effective sample size of tokens weighted by their
      ratios (Kong 1992), as a share of their number; 1 if all ratios are equal.
    """
    if not tokens:
        return {}
    ratio, square = sums["mismatch_ratio"], sums["mismatch_square"]
    k1 = sums["mismatch_log"] / tokens
    return {
        "mismatch/kl": ratio / tokens - 1.0 + k1,
        "mismatch/kl_k1": k1,
        "mismatch/ratio_max": sums[RATIO_MAX],
        "mismatch/effective_sample_size": ratio**2 / (tokens * square) if square > 0 else 0.0,
    }


def _log(bound: float) -> float:
    return log(bound) if bound > 0 else -inf


def second_moment_mask(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    threshold: float,
    all_reduce_sum: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return which tokens of ``mask`` M2PO keeps (bool [T]). Collective.

    The method is algorithm 1 of Zheng et al. 2025, "Prosperity before collapse", arXiv 2510.01161.
    Only tokens whose log-ratio has the sign of their advantage can be dropped, as by a clip. Tokens
    with the largest squares are dropped until the mean square of the others is at most
    ``threshold``. Tokens with equal squares are dropped together, so the mask does not depend on
    the order of tokens or their distribution over ranks. ``all_reduce_sum`` sums over ranks.
    """
    moments = log_ratio.float().square()
    moved = mask & (log_ratio * advantages > 0)
    bits = moments.view(torch.int32)
    wide = moments.double()
    # Find, between ``small`` and ``large``, the largest limit whose mean square is small enough.
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
