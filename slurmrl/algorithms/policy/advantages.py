"""Advantages and returns from rewards, log-probabilities and values, and filters of prompts.

Except the filter, the functions are pure tensor functions.

There are T packed tokens, S sequences and R response tokens. A sequence is a prompt of at least one
token and its response, which may have several turns with messages between them. The tokens of
messages are part of the states, not of the response: the step from the last token of a turn leads
to the state before the first token of the next turn. The state before token t consists of the
tokens up to t - 1, so its value is at position t - 1 of the critic's aligned values.

Statistics of whole completions are computed in float64. A group contains the completions of one
prompt, which are always on the same rank. Only statistics over the batch need communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.policy.hyperparameters import (
    OF_COMPLETIONS,
    OF_GROUPS,
    TRUNCATED,
    WITHOUT_OWN,
    ZERO_VARIANCE,
    Filters,
)
from slurmrl.algorithms.policy.objective import kl_estimate
from slurmrl.algorithms.policy.schema import GREEDY, OLD_LOGPROBS, REF_LOGPROBS, PolicyGradient
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.data.sample import SequenceSample
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.scan import discounted_returns, packed_gae

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


VARIANCE_FLOOR = 1e-8
"""Number added to the variance when advantages are whitened, as in TRL."""
SumOverRanks = Callable[[Tensor], Tensor]
"""Function that sums a tensor over the data-parallel ranks."""


@dataclass(frozen=True)
class Responses:
    tokens: Tensor
    """[R] positions of the response tokens in [T]."""
    states: Tensor
    """[R+S] positions of the states: for each sequence, the states before its response tokens, then
    the state after its last token."""
    sequence: Tensor
    """[R] number of the sequence of each response token."""
    cu_seqlens: Tensor
    """[S+1] cumulative numbers of response tokens."""
    last: Tensor
    """[S'] positions in [R] of the last tokens of the S' sequences with response tokens."""
    answered: Tensor
    """[S'] numbers of the sequences that have response tokens."""

    def sums(self, x: Tensor) -> Tensor:
        """Return the sums [S] of x [R] over each sequence."""
        return x.new_zeros(len(self.cu_seqlens) - 1).index_add(0, self.sequence, x)


@dataclass(frozen=True)
class Estimates:
    """Estimates for each response token; each field has shape [R]."""

    responses: Responses
    kl: Tensor | None
    """log(p/p_ref) of the sampled token; None without a reference model."""
    old_values: Tensor
    """Value of the state before the token, by the critic before the updates; 0 without a critic."""
    advantages: Tensor
    returns: Tensor
    """With a critic, the advantage plus the old value; otherwise, the return from which the
    advantage is computed."""


def estimate(
    sample: SequenceSample, context: CallContext, all_reduce_sum: SumOverRanks
) -> Estimates:
    """Return advantages and returns according to the setting ``advantage``.

    With a critic, the return of a truncated completion includes the value of its last state.
    Without a critic, the return includes only rewards up to the last token. Completions without
    response tokens (failed episodes) are ignored in all comparisons.
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


def only_scored(sample: SequenceSample) -> SequenceSample:
    """Exclude completions without a score from all comparisons and losses.

    Mark all tokens of these completions as prompt. If the greedy completion of a prompt has no
    score, exclude all completions of the prompt.
    """
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


def find_responses(prompt_mask: Tensor, cu_seqlens: Tensor) -> Responses:
    """Return the indices of the response tokens of each sequence.

    ``prompt_mask`` bool [T] is True on tokens that the policy did not write: prompts, and messages
    between turns. ``cu_seqlens`` [S+1] over the T tokens is in host memory. The host computes the
    indices, so it waits once for the mask.
    """
    tokens = (~prompt_mask.cpu()).nonzero().squeeze(1)
    ends = cu_seqlens[1:].long()
    sequence = torch.bucketize(tokens, ends, right=True)
    counts = torch.bincount(sequence, minlength=len(ends))
    cu_responses = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    states = tokens.new_empty(len(tokens) + len(ends))
    order = torch.arange(len(tokens))
    states[order + sequence] = tokens - 1
    behind = cu_responses[1:] + torch.arange(len(ends))
    states[behind] = ends - 1
    answered = counts.nonzero().squeeze(1)
    indices = (tokens, states, sequence, cu_responses, cu_responses[1:][answered] - 1, answered)
    return Responses(*upload(indices, prompt_mask.device))


def shape_scores(
    rewards: Tensor, finished: Tensor, lengths: Tensor, settings: PolicyGradient, limit: int
) -> Tensor:
    """Return the scores [S]: rewards with length penalty, bias, scale and clip, in this order.

    ``lengths`` are the numbers of response tokens of the completions, at most ``limit``.
    ``finished`` [S] says which completions ended by themselves.
    """
    if settings.overlong_buffer is not None:
        penalty = overlong_penalty(lengths, limit, settings.overlong_buffer)
        rewards = rewards + settings.overlong_penalty * penalty.to(rewards.dtype)
    scores = (rewards - settings.reward_bias) * settings.reward_scaling
    if settings.reward_clip is not None:
        scores = scores.clamp(-settings.reward_clip, settings.reward_clip)
    if settings.mask_no_eos_with_zero:
        scores = torch.where(finished, scores, torch.zeros_like(scores))
    return scores


def overlong_penalty(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """Return the soft penalty for long completions, from 0 to -1.

    The penalty is 0 up to ``limit - buffer`` tokens and falls linearly to -1 at ``limit`` tokens
    (Yu et al. 2025, "DAPO", eq. 13).
    """
    return ((limit - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)


def _of_tokens(
    sample: SequenceSample,
    responses: Responses,
    rewards: Tensor,
    truncated: Tensor,
    settings: PolicyGradient,
) -> tuple[Tensor, Tensor]:
    """Return the advantages and the returns [R] of token ``rewards`` [R].

    Without a critic, both results are the discounted rewards.
    """
    if settings.advantage != "gae":
        returns = discounted_returns(rewards, responses.cu_seqlens, settings.discount)
        return returns, returns
    states = sample.tensor("values")[responses.states]
    gamma, lam = settings.discount, settings.gae_lambda
    return packed_gae(rewards, states, responses.cu_seqlens, truncated, gamma, lam)


def _values(sample: SequenceSample, positions: Tensor, like: Tensor) -> Tensor:
    """Return the critic's values at ``positions``; without a critic, zeros like ``like``."""
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
    """Return the KL penalty [R] that is subtracted from the reward of each token."""
    old = old_logprobs(sample)[responses.tokens]
    if not settings.uses_reference or settings.kl.where != "reward":
        return torch.zeros_like(old)
    reference = sample.tensor(REF_LOGPROBS)[responses.tokens]
    return scalars["kl_coef"] * kl_estimate(old, reference, settings.kl.estimator)


def _turn_rewards(
    sample: SequenceSample, responses: Responses, finished: Tensor, settings: PolicyGradient
) -> Tensor | None:
    """Return the rewards [R] of turns: at a turn's last token, the reward that the turn has earned.

    The result is 0 at other tokens. Return None if completions have one turn each.
    """
    if TURN_REWARDS not in sample.keys:
        return None
    earned = sample.tensor(TURN_REWARDS)[responses.tokens] * settings.reward_scaling
    if settings.mask_no_eos_with_zero:
        earned = torch.where(finished[responses.sequence], earned, 0.0)
    return earned


def _greedy_scores(sample: SequenceSample, settings: PolicyGradient, limit: int) -> Tensor:
    """Return, for each sequence [S], the score of its prompt's greedy completion.

    The scores are shaped like the scores of sampled completions, without a KL penalty (Li et al.
    2024, "ReMax", algorithm 1).
    """
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


@dataclass(frozen=True)
class Groups:
    """The group of each of S sequences."""

    index: Tensor
    """[S] number of the group of each sequence."""
    sizes: Tensor
    """[S] number of sequences in the group of each sequence."""
    count: int
    """Number of groups."""

    @staticmethod
    def of(counts: Sequence[int], device: torch.device) -> Groups:
        """Make the groups from the numbers of their sequences, in order."""
        rows = torch.tensor(counts, dtype=torch.int64)
        index = torch.arange(len(rows)).repeat_interleave(rows)
        index, sizes = upload((index, rows[index]), device)
        return Groups(index, sizes, len(rows))

    def only(self, places: Tensor) -> Groups:
        """Return the groups of only the sequences at ``places``; some groups may be empty."""
        index = self.index[places]
        sizes = index.new_zeros(self.count).index_add(0, index, torch.ones_like(index))
        return Groups(index, sizes[index], self.count)

    def sums(self, x: Tensor) -> Tensor:
        """Return, for each sequence [S], the sum of x [S] over its group."""
        totals = x.new_zeros(self.count).index_add(0, self.index, x)
        return totals[self.index]

    def means(self, x: Tensor) -> Tensor:
        """Return, for each sequence [S], the mean of x [S] over its group.

        The mean of equal entries is exactly their value: adding the mean deviation from the rounded
        mean corrects the rounding.
        """
        means = self.sums(x) / self.sizes
        return means + self.sums(x - means) / self.sizes


def moments(
    x: Tensor, all_reduce_sum: SumOverRanks, *, unbiased: bool = False, about_zero: bool = False
) -> tuple[float, float]:
    """Return mean and standard deviation of x over all ranks, in float64; 0 and 0 if empty.

    ``unbiased`` divides by the number of entries minus one. ``about_zero`` takes the deviation from
    0 instead of from the mean.

    For equal entries, the mean is exactly their value and the deviation is 0 on any layout: adding
    the mean deviation from the rounded mean corrects the rounding.
    """
    wide = x.double()
    total, counted = all_reduce_sum(torch.stack([wide.sum(), wide.new_tensor(float(len(x)))]))
    count = counted.clamp(min=1.0)
    mean = total / count
    mean = mean + all_reduce_sum((wide - mean).sum()) / count
    centered = wide if about_zero else wide - mean
    squares = all_reduce_sum(centered.square().sum())
    degrees = (count - 1.0).clamp(min=1.0) if unbiased else count
    found = torch.stack([mean, (squares / degrees).sqrt()])
    mean_of_all, deviation = found.tolist()  # The host waits for a GPU only here.
    return mean_of_all, deviation


def completion_advantages(
    returns: Tensor, groups: Groups, settings: PolicyGradient, all_reduce_sum: SumOverRanks
) -> Tensor:
    """Return ``returns`` [S] of completions minus a baseline, divided by a deviation, in float64.

    - ``group``: x_i - mean(x_1 … x_n) (Shao et al. 2024, "DeepSeekMath", section 4.1.2);
    - ``leave_one_out``: x_i - mean of the others (Kool et al. 2019, "Buy 4 REINFORCE samples, get a
      baseline for free!"), which is n / (n - 1) times ``group``;
    - ``batch``: x_i - mean over all completions of the batch;
    - ``batch_leave_one_out``: x_i - mean over the others of the batch.
    """
    wide = returns.double()
    if settings.advantage in OF_GROUPS:
        sizes = groups.sizes.double()
        centered = wide - groups.means(wide)
    else:
        sizes = all_reduce_sum(wide.new_tensor(float(len(wide))))
        centered = wide - moments(wide, all_reduce_sum)[0]
    if settings.advantage in WITHOUT_OWN:
        centered = centered * sizes / (sizes - 1.0).clamp(min=1.0)
    return divided(centered, deviations(wide, groups, settings, all_reduce_sum), settings)


def deviations(
    returns: Tensor, groups: Groups, settings: PolicyGradient, all_reduce_sum: SumOverRanks
) -> Tensor | None:
    """Return the deviations [S] float64 of ``returns`` [S]; None if ``advantage_std`` is ``none``.

    Without a baseline, the deviation is from 0 (the root of the mean square): equal returns would
    have a deviation of about 0 from their mean.
    """
    wide, unbiased = returns.double(), settings.std_unbiased
    about_zero = settings.advantage == "none"
    match settings.advantage_std:
        case "group":
            centered = wide if about_zero else wide - groups.means(wide)
            degrees = groups.sizes - (1.0 if unbiased else 0.0)
            return (groups.sums(centered.square()) / degrees.clamp(min=1.0)).sqrt()
        case "batch":
            _, std = moments(wide, all_reduce_sum, unbiased=unbiased, about_zero=about_zero)
            return torch.full_like(wide, std)
    return None


def divided(advantages: Tensor, deviations: Tensor | None, settings: PolicyGradient) -> Tensor:
    """Return the advantages divided by the deviations and ``std_epsilon``; 0 where both are 0."""
    if deviations is None:
        return advantages
    divisor = deviations + settings.std_epsilon
    return torch.where(divisor > 0, advantages / divisor, 0.0)


def whiten(x: Tensor, mean: float, std: float) -> Tensor:
    """Return x with mean 0 and standard deviation 1, given its moments over all ranks.

    If advantages are almost equal, the results stay small. If all rewards are 0, advantages are
    rounding errors, which must not be scaled up.
    """
    return (x - mean) / math.sqrt(std**2 + VARIANCE_FLOOR)


def old_logprobs(sample: SequenceSample) -> Tensor:
    """Return the log-probabilities [T] of the policy before the updates.

    Return the training engine's values if a call has recomputed them, else generation's values.
    """
    return sample.tensor(OLD_LOGPROBS if OLD_LOGPROBS in sample.keys else "logprobs")


def trained_completions(sample: SequenceSample, settings: PolicyGradient) -> Tensor:
    """Return which completions are in the losses (bool [S])."""
    finished = sample.tensor("finished").bool()
    return finished if settings.mask_truncated else torch.ones_like(finished)


def token_rewards(
    penalties: Tensor, scores: Tensor, responses: Responses, turns: Tensor | None = None
) -> Tensor:
    """Return the rewards [R] of response tokens: scores at last tokens, minus KL penalties.

    The last token of a completion gets its score minus the rewards in ``turns`` [R], which the last
    tokens of turns get. The sum over a completion does not depend on ``turns``.
    """
    rewards = -penalties
    if turns is not None:
        rewards = rewards + turns.to(rewards.dtype)
        scores = scores - responses.sums(turns)
    rewards[responses.last] += scores[responses.answered].to(rewards.dtype)
    return rewards


def spread_over_tokens(x: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """Return x [R] as a tensor [T] with the entries at their positions and 0 elsewhere."""
    return x.new_zeros(tokens).index_copy(0, positions, x)


class FilterInterface(Interface):
    def filter(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Drop prompts by the settings of the algorithm.

        Report the share of prompts that each filter drops. If a prompt has several reasons, the
        first reason counts. The filters ignore completions without a score and failed episodes.
        """
        sample = only_scored(sample)
        settings = cast(PolicyGradient, context.settings.algorithm)
        limit = context.settings.config.rollout.most_written
        responses = find_responses(sample.tensor("prompt_mask"), sample.cu_seqlens("prompt_mask"))
        lengths = responses.cu_seqlens.diff()
        finished = sample.tensor("finished").bool()
        scores = shape_scores(sample.tensor("rewards"), finished, lengths, settings, limit)
        rows = list(zip(scores.tolist(), finished.tolist(), lengths.tolist(), strict=True))
        cuts = accumulate(sample.sequence_counts("rewards"), initial=0)
        dropped = {}
        for name, (start, stop) in zip(sample.ids, pairwise(cuts), strict=True):
            ended = [(score, end) for score, end, length in rows[start:stop] if length]
            if why := reason([score for score, _ in ended], [end for _, end in ended], settings):
                dropped[name] = why
        reasons = list(dropped.values())
        return CallResult(
            dropped=dropped,
            stats={
                f"filter/{why}": (float(reasons.count(why)), float(sample.bs))
                for why in (TRUNCATED, ZERO_VARIANCE)
            },
        )


def reason(scores: Sequence[float], finished: Sequence[bool], settings: Filters) -> str | None:
    """Return why a prompt is dropped; None if it is kept.

    ``scores`` and ``finished`` have an entry for each completion; ``finished`` means that the
    completion ended with a stop token or stop string. A prompt without completions has no variance.
    """
    truncated = len(finished) - sum(finished)
    if settings.max_truncated is not None and truncated > settings.max_truncated * len(finished):
        return TRUNCATED
    if settings.zero_variance == "drop":
        if settings.mask_truncated and truncated == len(finished) > 0:
            return TRUNCATED
        if len(set(scores)) < 2:
            return ZERO_VARIANCE
    return None
