"""Corrections for tokens of another policy, as pure tensor functions.

[T] each, and 0 where ``mask`` is False.

Generation and training compute log-probabilities by different kernels, so the tokens come from
another policy than the trained one. Here are measures of how far apart the two are, importance
weights against the other policy, and M2PO's mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, log

import torch
from torch import Tensor

from slurmrl.algorithms.policy.sections import Correction
from slurmrl.algorithms.sequences import Sequences

LARGEST_BITS = 0x7F800000
"""The bits of float32's infinity. Bits of floats that are not negative have the floats' order."""
LARGEST_LOG = 80.0
"""Larger log-weights count as this one: their exponential would overflow."""
RATIO_MAX = "mismatch_ratio_max"


def correction_weights(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    sequences: Sequences,
    settings: Correction,
) -> Tensor:
    """Return importance weights from the log-probabilities of training and generation.

    ``proximal`` is from the training engine before the update, ``behaviour`` from generation. The
    weights multiply the losses of tokens. Together with the ratio of the objective, they make up
    the decoupled objective (Fu et al. 2025, "AReaL", section 5.2).

    The level is the unit that has a weight:

    - ``token``: each token;
    - ``sequence``: the product over the response;
    - ``geometric``: the geometric mean over the response.

    ``truncate`` moves weights beyond the bounds to the bounds (truncated importance sampling, Yao
    et al. 2025), ``mask`` sets them to 0, and ``weight`` has no bounds. Without a correction, all
    weights are 1. The weights of rejected tokens are 0.
    """
    log_ratio = torch.where(mask, proximal - behaviour, 0.0)
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
    """Return [T] bool: the tokens that are within the bounds of rejection.

    ``log_ratio`` is log r of each token, 0 where ``mask`` is False. Unless single tokens are
    compared, either all tokens of a response are accepted or none.
    """
    low, high = settings.reject_lower, settings.reject_upper
    match settings.reject_by:
        case "ratio":  # its mean and sum are of logarithms
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


def mismatch_sums(training: Tensor, behaviour: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return sums over tokens, and the largest ratio, from which `mismatch_metrics` follow.

    They compare the log-probabilities of the training engine and of generation for the same
    weights.
    """
    log_ratio = torch.where(mask, training - behaviour, 0.0).double()
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

    - ``mismatch/kl``: KL(generation || training) per token, by the never negative estimator k3;
    - ``mismatch/kl_k1``: the same KL as the mean of log(generation / training);
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
    """Return [T] bool: the tokens of ``mask`` that stay.

    The method is algorithm 1 of Zheng et al. 2025, "Prosperity before collapse", arXiv 2510.01161.
    Only tokens whose log-ratio has the sign of their advantage can go; a clip acts on the same
    tokens. The token with the largest square goes, until the mean square of the remaining ones is
    at most ``threshold``. Tokens of equal squares go together, so the mask depends on neither the
    order of tokens nor their distribution over ranks. ``all_reduce_sum`` adds up over ranks;
    collective.
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
