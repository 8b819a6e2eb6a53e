"""Advantages and returns from rewards, log-probabilities and values, as pure tensor functions.

T packed tokens, S sequences, R response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slurmrl.algorithms.policy.responses import Responses, find_responses
from slurmrl.algorithms.policy.schema import OLD_LOGPROBS, PolicyGradient
from slurmrl.data.sample import SequenceSample
from slurmrl.ops.gae import packed_gae

VARIANCE_FLOOR = 1e-8
"""Added to the variance when advantages are whitened, as in TRL."""

SumOverRanks = Callable[[Tensor], Tensor]
"""Adds a tensor up over the data-parallel ranks."""


@dataclass(frozen=True)
class Estimates:
    """Per response token [R] each."""

    responses: Responses
    kl: Tensor
    """log(p/p_ref) of the sampled token."""
    old_values: Tensor
    """The critic's value of the state before the token, when it was sampled."""
    advantages: Tensor
    returns: Tensor


def estimate(sample: SequenceSample, ppo: PolicyGradient, kl_coef: float) -> Estimates:
    """Advantages by GAE. A truncated completion bootstraps from the value of its last state."""
    responses = find_responses(sample.tensor("prompt_mask"), sample.cu_seqlens("input_ids"))
    finished = sample.tensor("finished").bool()
    kl = (old_logprobs(sample) - sample.tensor("ref_logprobs"))[responses.tokens]
    scores = shape_scores(sample.tensor("rewards"), finished, ppo)
    rewards = token_rewards(kl, scores, responses, kl_coef)
    values = sample.tensor("values")[responses.states]
    advantages, returns = packed_gae(
        rewards, values, responses.cu_seqlens, ~finished, ppo.discount, ppo.gae_lambda
    )
    old_values = sample.tensor("values")[responses.tokens - 1]
    return Estimates(responses, kl, old_values, advantages, returns)


def old_logprobs(sample: SequenceSample) -> Tensor:
    """[T] of the policy before the updates: recomputed if the graph has that call, else those of
    generation."""
    return sample.tensor(OLD_LOGPROBS if OLD_LOGPROBS in sample.keys else "logprobs")


def shape_scores(rewards: Tensor, finished: Tensor, ppo: PolicyGradient) -> Tensor:
    """The rule's rewards [S] with bias, scale and clip applied, in this order."""
    scores = (rewards - ppo.reward_bias) * ppo.reward_scaling
    if ppo.reward_clip is not None:
        scores = scores.clamp(-ppo.reward_clip, ppo.reward_clip)
    if ppo.mask_no_eos_with_zero:
        scores = torch.where(finished, scores, torch.zeros_like(scores))
    return scores


def token_rewards(kl: Tensor, scores: Tensor, responses: Responses, kl_coef: float) -> Tensor:
    """[R]: the KL penalty of each response token, plus the score at the last token of its
    completion."""
    rewards = -kl_coef * kl
    rewards[responses.last] += scores[responses.answered].to(rewards.dtype)
    return rewards


def moments(x: Tensor, all_reduce_sum: SumOverRanks) -> tuple[float, float]:
    """Mean and population standard deviation of x over all ranks, in float64; 0 and 0 if empty."""
    wide = x.double()
    total = all_reduce_sum(torch.stack([wide.sum(), wide.new_tensor(float(len(x)))]))
    summed, counted = total.tolist()
    count = max(counted, 1.0)
    mean = summed / count
    squares = all_reduce_sum((wide - mean).square().sum().reshape(1))
    return mean, float((squares / count).sqrt())


def whiten(x: Tensor, mean: float, std: float) -> Tensor:
    """x with mean 0 and standard deviation 1, given its moments over all ranks.

    Advantages that hardly differ stay small: if no completion earned a reward, they are rounding
    errors, which must not be scaled up.
    """
    return (x - mean) / math.sqrt(std**2 + VARIANCE_FLOOR)


def spread_over_tokens(x: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """[T]: the entries of x [R] at their positions, 0 elsewhere."""
    return x.new_zeros(tokens).index_copy(0, positions, x)
