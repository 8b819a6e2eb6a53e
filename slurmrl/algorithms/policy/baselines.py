"""Advantages of whole completions: their returns compared with those of others.

S sequences; all statistics are computed in float64. A group has the completions of one prompt,
which are always on the same rank, so that only statistics over the batch need other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slurmrl.algorithms.policy.moments import SumOverRanks, moments
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.policy.schema.sections import OF_GROUPS, WITHOUT_OWN
from slurmrl.tensors.ops.upload import upload


@dataclass(frozen=True)
class Groups:
    """The group of each of S sequences."""

    index: Tensor
    """[S] the number of the group."""
    sizes: Tensor
    """[S] the number of sequences in that group."""
    count: int
    """The number of groups."""

    @staticmethod
    def of(counts: Sequence[int], device: torch.device) -> Groups:
        """``counts`` [items] are the numbers of sequences of the groups in order."""
        rows = torch.tensor(counts, dtype=torch.int64)
        index = torch.arange(len(rows)).repeat_interleave(rows)
        index, sizes = upload((index, rows[index]), device)
        return Groups(index, sizes, len(rows))

    def only(self, places: Tensor) -> Groups:
        """The groups of the sequences at ``places`` alone; some may be empty."""
        index = self.index[places]
        sizes = index.new_zeros(self.count).index_add(0, index, torch.ones_like(index))
        return Groups(index, sizes[index], self.count)

    def sums(self, x: Tensor) -> Tensor:
        """[S]: for each sequence, the sum of x [S] over its group."""
        totals = x.new_zeros(self.count).index_add(0, self.index, x)
        return totals[self.index]

    def means(self, x: Tensor) -> Tensor:
        """[S]: for each sequence, the mean of x [S] over its group; of equal entries, that number:
        the mean of what is left of them corrects the first one's rounding."""
        means = self.sums(x) / self.sizes
        return means + self.sums(x - means) / self.sizes


def completion_advantages(
    returns: Tensor, groups: Groups, settings: PolicyGradient, all_reduce_sum: SumOverRanks
) -> Tensor:
    """[S] float64, from the returns [S] of completions, less a baseline, divided by a deviation.

    - ``group``: x_i - mean(x_1 … x_n) (Shao et al. 2024, "DeepSeekMath", section 4.1.2);
    - ``leave_one_out``: x_i - mean of the others (Kool et al. 2019, "Buy 4 REINFORCE samples, get a
      baseline for free!"), which is n / (n - 1) times the former;
    - ``batch``: x_i - mean over all completions of the batch;
    - ``batch_leave_one_out``: x_i - mean over the others of the batch.
    """
    wide = returns.double()
    if settings.advantage in OF_GROUPS:
        sizes = groups.sizes.double()
        centred = wide - groups.means(wide)
    else:
        sizes = all_reduce_sum(wide.new_tensor(float(len(wide))))
        centred = wide - moments(wide, all_reduce_sum)[0]
    if settings.advantage in WITHOUT_OWN:
        centred = centred * sizes / (sizes - 1.0).clamp(min=1.0)
    return divided(centred, deviations(wide, groups, settings, all_reduce_sum), settings)


def deviations(
    returns: Tensor, groups: Groups, settings: PolicyGradient, all_reduce_sum: SumOverRanks
) -> Tensor | None:
    """[S] float64: the standard deviation of the returns [S] by which the setting
    ``advantage_std`` divides; None if by none. Without a baseline, it is that from 0 (the root of
    the mean square): returns that are alike would be divided by about 0."""
    wide, unbiased = returns.double(), settings.std_unbiased
    about_zero = settings.advantage == "none"
    match settings.advantage_std:
        case "group":
            centred = wide if about_zero else wide - groups.means(wide)
            degrees = groups.sizes - (1.0 if unbiased else 0.0)
            return (groups.sums(centred.square()) / degrees.clamp(min=1.0)).sqrt()
        case "batch":
            _, std = moments(wide, all_reduce_sum, unbiased=unbiased, about_zero=about_zero)
            return torch.full_like(wide, std)
    return None


def divided(advantages: Tensor, deviations: Tensor | None, settings: PolicyGradient) -> Tensor:
    """The advantages divided by the deviations and ``std_epsilon``; 0 where both are 0."""
    if deviations is None:
        return advantages
    divisor = deviations + settings.std_epsilon
    return torch.where(divisor > 0, advantages / divisor, 0.0)
