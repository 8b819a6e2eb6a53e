"""The loss of KTO as pure functions of log-probabilities. S answers."""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.algorithms.kto.schema import KTO


def answer_losses(logratios: Tensor, desirable: Tensor, kl: float, kto: KTO) -> Tensor:
    """[S]: lambda_y - v(x, y) (Ethayarajh et al. 2024, eq. 8) from log(p / p_ref) of the answers
    and their labels (bool), both [S]. The value v of a desirable answer is
    lambda_D s(beta (logratio - kl)), that of an undesirable one lambda_U s(beta (kl - logratio)).
    No gradient passes through the reference point ``kl``."""
    sign = torch.where(desirable, 1.0, -1.0).to(logratios.dtype)
    weight = torch.where(desirable, kto.desirable_weight, kto.undesirable_weight)
    value = torch.sigmoid(kto.beta * sign * (logratios - kl))
    return weight.to(logratios.dtype) * (1.0 - value)


def on_their_side(logratios: Tensor, desirable: Tensor, kl: float) -> Tensor:
    """[S], bool: whether the log-ratio of an answer is beyond the reference point ``kl`` on the
    side of its label; a tie is not."""
    return torch.where(desirable, logratios > kl, logratios < kl)


def answer_stats(
    logps: Tensor, logratios: Tensor, desirable: Tensor, kl: float, kto: KTO
) -> dict[str, Tensor]:
    """Sums of the implied rewards and log-probabilities of desirable (``chosen``) and undesirable
    (``rejected``) answers, their numbers, and how many answers are on their side of ``kl``."""
    right = on_their_side(logratios, desirable, kl).sum()
    stats: dict[str, Tensor] = {"right": right.to(logps.dtype)}
    for name, mask in (("chosen", desirable), ("rejected", ~desirable)):
        stats[f"rewards/{name}"] = torch.where(mask, kto.beta * logratios, 0.0).sum()
        stats[f"logps/{name}"] = torch.where(mask, logps, 0.0).sum()
        stats[f"count/{name}"] = mask.sum().to(logps.dtype)
    return stats
