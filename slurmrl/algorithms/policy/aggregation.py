"""How the losses of tokens form the loss of a minibatch: weights of tokens, and denominators.

The engine divides the sum of weighted losses by the sum of denominators, both over all
micro-batches and ranks, so the result depends on neither.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.algorithms.policy.sequences import Sequences
from slurmrl.data.sample import SequenceSample

LOSS_WEIGHTS = "loss_weights"
"""Key of the tokens' weights, where they are not all 1."""


def token_weights(
    mask: Tensor, sequences: Sequences, aggregation: str, length: float
) -> Tensor | None:
    """The weight of each token's loss; None if all weights are 1. ``mask`` is True on all response
    tokens.

    - ``tokens``: all tokens count alike (Yu et al. 2025, "DAPO", eq. 8).
    - ``sequences``: the mean over sequences of the means over their tokens (Shao et al. 2024,
      "DeepSeekMath", eq. 3).
    - ``constant``: the mean over sequences of sums over tokens, divided by ``length`` (Dr. GRPO:
      Liu et al. 2025, "Understanding R1-Zero-like training").
    """
    if aggregation == "tokens":
        return None
    counted = mask.float()
    if aggregation == "constant":
        return counted / length
    return counted / sequences.totals(counted).clamp(min=1.0)


def item_shares(sample: SequenceSample, mask_key: str, aggregation: str) -> Tensor:
    """[items, 2] float64: what each item adds to the denominator, and its number of tokens that
    count. To the denominator, ``tokens`` adds the latter. The other aggregations add the number of
    sequences with response tokens, also of those whose tokens do not count: their loss is 0."""
    mask = sample.tensor(mask_key)
    tokens = Sequences.of(sample.cu_seqlens(mask_key), mask.device)
    counts = torch.tensor([0, *(len(rows) for rows in sample.lengths[mask_key])])
    sequences = Sequences.of(counts.cumsum(0), mask.device)
    lengths = tokens.sums(mask.double())
    added = lengths
    if aggregation != "tokens":
        added = (tokens.sums(sample.tensor(LOSS_WEIGHTS)) > 0).double()
    return torch.stack([sequences.sums(added), sequences.sums(lengths)], dim=1)
