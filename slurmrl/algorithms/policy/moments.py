"""Mean and standard deviation over all data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

VARIANCE_FLOOR = 1e-8
"""Added to the variance when advantages are whitened, as in TRL."""

SumOverRanks = Callable[[Tensor], Tensor]
"""Adds a tensor up over the data-parallel ranks."""


def moments(
    x: Tensor,
    all_reduce_sum: SumOverRanks,
    *,
    unbiased: bool = False,
    about_zero: bool = False,
) -> tuple[float, float]:
    """Mean and standard deviation of x over all ranks, in float64; 0 and 0 if empty. ``unbiased``
    divides by the number of entries less one. ``about_zero``: the deviation from 0, not from the
    mean.

    Of equal entries the mean is that number and the deviation 0, on any layout: the mean of what
    is left of them corrects the first one's rounding.
    """
    wide = x.double()
    total, counted = all_reduce_sum(torch.stack([wide.sum(), wide.new_tensor(float(len(x)))]))
    count = counted.clamp(min=1.0)
    mean = total / count
    mean = mean + all_reduce_sum((wide - mean).sum()) / count
    centred = wide if about_zero else wide - mean
    squares = all_reduce_sum(centred.square().sum())
    degrees = (count - 1.0).clamp(min=1.0) if unbiased else count
    found = torch.stack([mean, (squares / degrees).sqrt()])
    mean_of_all, deviation = found.tolist()  # the host waits for a GPU only here
    return mean_of_all, deviation


def whiten(x: Tensor, mean: float, std: float) -> Tensor:
    """x with mean 0 and standard deviation 1, given its moments over all ranks.

    Advantages that hardly differ stay small: if no completion earned a reward, they are rounding
    errors, which must not be scaled up.
    """
    return (x - mean) / math.sqrt(std**2 + VARIANCE_FLOOR)
