"""Completions to which the reward gave no score: their ``rewards`` are NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.algorithms.policy.baselines import Groups
from slurmrl.algorithms.policy.schema import GREEDY
from slurmrl.data.sample import SequenceSample


def only_scored(sample: SequenceSample) -> SequenceSample:
    """The sample, with completions without a score like those in which the policy wrote nothing:
    compared with no others, and in no loss. Such are also all completions of a prompt whose greedy
    completion has no score."""
    rewards = sample.tensor("rewards")
    unscored = rewards.isnan()
    changed: dict[str, Tensor | None] = {"rewards": rewards.nan_to_num()}
    if GREEDY + "rewards" in sample.keys:
        greedy = sample.tensor(GREEDY + "rewards")
        index = Groups.of(sample.sequence_counts("rewards"), greedy.device).index
        unscored = unscored | greedy.isnan()[index]
        changed[GREEDY + "rewards"] = greedy.nan_to_num()
    if not unscored.any():
        return sample
    mask = sample.tensor("prompt_mask")
    lengths = sample.cu_seqlens("prompt_mask").diff().to(mask.device)
    changed["prompt_mask"] = mask | torch.repeat_interleave(unscored.to(mask.device), lengths)
    return SequenceSample(sample.ids, sample.lengths, sample.metadata, {**sample.data, **changed})
