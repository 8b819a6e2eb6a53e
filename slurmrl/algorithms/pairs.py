"""Pairs of sequences: the chosen and the rejected answer to a prompt.

P pairs, S = 2P sequences: those of an item are chosen, rejected, chosen, rejected, … The weights of
an item's pairs add up to one, so each prompt counts alike, however many pairs it has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slurmrl.algorithms.sequences import TOKENS
from slurmrl.data.sample import SequenceSample


class PairValues(NamedTuple):
    """[P] each"""

    chosen: Tensor
    rejected: Tensor


def split_pairs(values: Tensor) -> PairValues:
    """The values [S] of the sequences by pair."""
    return PairValues(values[0::2], values[1::2])


def pair_weights(sample: SequenceSample, like: Tensor) -> Tensor:
    """[P]: 1 / (the number of pairs of the pair's item), on the device and in the dtype of
    ``like``."""
    counts = [len(item) // 2 for item in sample.lengths[TOKENS]]
    return like.new_tensor([1.0 / count for count in counts for _ in range(count)])


def pair_stats(weights: Tensor, scores: PairValues) -> dict[str, Tensor]:
    """Sums over the items: the mean ``accuracies`` (the share of pairs whose chosen answer scores
    higher; a tie counts as wrong) and ``margins`` of each item's pairs, and the mean scores of its
    ``chosen`` and ``rejected`` answers."""
    margins = scores.chosen - scores.rejected
    return {
        "chosen": (weights * scores.chosen).sum(),
        "rejected": (weights * scores.rejected).sum(),
        "margins": (weights * margins).sum(),
        "accuracies": (weights * (margins > 0).to(torch.float32)).sum(),
    }
