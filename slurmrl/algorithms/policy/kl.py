"""Estimates of the KL divergence to a reference."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def kl_estimate(logp: Tensor, ref_logp: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimates of KL(policy || reference) from tokens of the policy (Schulman 2020, "Approximating
    KL divergence"), with x = log(policy / reference): ``k1`` is x, ``k2`` x^2 / 2, ``k3``
    exp(-x) - 1 + x."""
    x = logp - ref_logp
    if estimator == "k1":
        return x
    if estimator == "k2":
        return 0.5 * x.square()
    return torch.expm1(-x) + x
