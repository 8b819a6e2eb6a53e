"""Advantages and returns from rewards, log-probabilities and values, as pure tensor functions.

T packed tokens, S sequences, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.baselines import Groups, completion_advantages, deviations, divided
from slurmrl.algorithms.policy.moments import SumOverRanks
from slurmrl.algorithms.policy.objective import kl_estimate
from slurmrl.algorithms.policy.responses import Responses, find_responses
from slurmrl.algorithms.policy.schema import (
    GREEDY,
    OF_COMPLETIONS,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    PolicyGradient,
)
from slurmrl.algorithms.policy.shaping import shape_scores
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.data.sample import SequenceSample
from slurmrl.tensors.ops.gae import packed_gae
from slurmrl.tensors.ops.scan import discounted_returns


@dataclass(frozen=True)
class Estimates:
    """Per response token [R] each."""

    responses: Responses
    kl: Tensor | None
    """log(p/p_ref) of the sampled token; None without a reference model."""
    old_values: Tensor
    """The critic's value of the state before the token, when it was sampled; 0 without a critic."""
    advantages: Tensor
    returns: Tensor
    """The advantage plus the value; without a critic, what the advantage was computed from."""


def estimate(
    sample: SequenceSample, context: CallContext, all_reduce_sum: SumOverRanks
) -> Estimates:
    """Advantages and returns by the setting ``advantage``.

    With a critic, a truncated completion bootstraps from the value of its last state; without one,
    its return ends with its last token. Completions without response tokens (failed episodes) are
    compared with no others.
    """
    settings = cast(PolicyGradient, context.settings.algorithm)
    limit = context.settings.config.rollout.most_written
    responses = find_responses(sample.tensor("prompt_mask"), sample.cu_seqlens("input_ids"))
    finished = sample.tensor("finished").bool()
    lengths = responses.cu_seqlens.diff()
    scores = shape_scores(sample.tensor("rewards"), finished, lengths, settings, limit)
    penalties = _penalties(sample, responses, settings, context.scalars)
    answered = responses.answered
    groups = Groups.of(sample.sequence_counts("input_ids"), scores.device).only(answered)
    totals = (scores.double() - responses.sums(penalties.double()))[answered]
    place = torch.searchsorted(answered, responses.sequence)
    if settings.advantage in OF_COMPLETIONS:
        compared = completion_advantages(totals, groups, settings, all_reduce_sum)
        advantages, returns = (x.to(penalties.dtype)[place] for x in (compared, totals))
    else:
        turns = _turn_rewards(sample, responses, finished, settings)
        rewards = token_rewards(penalties, scores, responses, turns)
        advantages, returns = _of_tokens(sample, responses, rewards, ~finished, settings)
        if (spread := deviations(totals, groups, settings, all_reduce_sum)) is not None:
            advantages = divided(advantages, spread[place], settings).to(penalties.dtype)
    if settings.advantage == "greedy":
        advantages = returns - _greedy_scores(sample, settings, limit)[responses.sequence]
    old_values = _values(sample, responses.tokens - 1, returns)
    kl = _log_ratio_to_reference(sample, responses)
    return Estimates(responses, kl, old_values, advantages, returns)


def _of_tokens(
    sample: SequenceSample,
    responses: Responses,
    rewards: Tensor,
    truncated: Tensor,
    settings: PolicyGradient,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [R] of token ``rewards`` [R]; without a critic both are the discounted
    rewards."""
    if settings.advantage != "gae":
        returns = discounted_returns(rewards, responses.cu_seqlens, settings.discount)
        return returns, returns
    states = sample.tensor("values")[responses.states]
    gamma, lam = settings.discount, settings.gae_lambda
    return packed_gae(rewards, states, responses.cu_seqlens, truncated, gamma, lam)


def _values(sample: SequenceSample, positions: Tensor, like: Tensor) -> Tensor:
    """The critic's values at ``positions``; without a critic, zeros of the dtype of ``like``."""
    if "values" in sample.keys:
        return sample.tensor("values")[positions]
    return torch.zeros_like(positions, dtype=like.dtype)


def _log_ratio_to_reference(sample: SequenceSample, responses: Responses) -> Tensor | None:
    if REF_LOGPROBS not in sample.keys:
        return None
    return (old_logprobs(sample) - sample.tensor(REF_LOGPROBS))[responses.tokens]


def _penalties(
    sample: SequenceSample,
    responses: Responses,
    settings: PolicyGradient,
    scalars: Mapping[str, float],
) -> Tensor:
    """[R]: what the KL to the reference takes from the reward of each token."""
    old = old_logprobs(sample)[responses.tokens]
    if not settings.uses_reference or settings.kl.where != "reward":
        return torch.zeros_like(old)
    reference = sample.tensor(REF_LOGPROBS)[responses.tokens]
    return scalars["kl_coef"] * kl_estimate(old, reference, settings.kl.estimator)


def _turn_rewards(
    sample: SequenceSample, responses: Responses, finished: Tensor, settings: PolicyGradient
) -> Tensor | None:
    """[R]: the part of the score that a token's turn has earned (0 at tokens that end no turn);
    None if completions have one turn each."""
    if TURN_REWARDS not in sample.keys:
        return None
    earned = sample.tensor(TURN_REWARDS)[responses.tokens] * settings.reward_scaling
    if settings.mask_no_eos_with_zero:
        earned = torch.where(finished[responses.sequence], earned, 0.0)
    return earned


def _greedy_scores(sample: SequenceSample, settings: PolicyGradient, limit: int) -> Tensor:
    """[S]: the scores of the prompts' greedy completions, shaped like those of the sampled ones,
    without a KL penalty (Li et al. 2024, "ReMax", algorithm 1)."""
    mask = sample.tensor(GREEDY + "prompt_mask")
    responses = find_responses(mask, sample.cu_seqlens(GREEDY + "prompt_mask"))
    scores = shape_scores(
        sample.tensor(GREEDY + "rewards"),
        sample.tensor(GREEDY + "finished").bool(),
        responses.cu_seqlens.diff(),
        settings,
        limit,
    )
    return scores[Groups.of(sample.sequence_counts("input_ids"), scores.device).index]


def old_logprobs(sample: SequenceSample) -> Tensor:
    """[T] of the policy before the updates: recomputed if the graph has that call, else those of
    generation."""
    return sample.tensor(OLD_LOGPROBS if OLD_LOGPROBS in sample.keys else "logprobs")


def trained_completions(sample: SequenceSample, settings: PolicyGradient) -> Tensor:
    """[S] bool: the completions whose tokens are in the losses."""
    finished = sample.tensor("finished").bool()
    return finished if settings.mask_truncated else torch.ones_like(finished)


def token_rewards(
    penalties: Tensor, scores: Tensor, responses: Responses, turns: Tensor | None = None
) -> Tensor:
    """[R]: the KL penalty of each response token, plus the score at the last token of its
    completion. What ``turns`` [R] have earned of the score is at their last tokens instead, so the
    sum over a completion is the same."""
    rewards = -penalties
    if turns is not None:
        rewards = rewards + turns.to(rewards.dtype)
        scores = scores - responses.sums(turns)
    rewards[responses.last] += scores[responses.answered].to(rewards.dtype)
    return rewards


def spread_over_tokens(x: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """[T]: the entries of x [R] at their positions, 0 elsewhere."""
    return x.new_zeros(tokens).index_copy(0, positions, x)
