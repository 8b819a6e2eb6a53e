"""Sections of the settings of policy gradients: rewards, advantages, filters, losses, updates."""

from __future__ import annotations

from math import inf
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from slurmrl.config.schema.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Unit,
)
from slurmrl.plan.dataflow import Call, Method, Refill

AboveOne = Annotated[float, Field(gt=1)]


class Updates(Section):
    """Minibatches and epochs over a batch, and conditions that end the updates early."""

    n_minibatches: PositiveInt = 4
    """Parts of a batch, with equal numbers of prompts and one optimizer step each. The parts do not
    depend on the number of ranks."""
    shuffle_minibatches: bool = False
    """Select the minibatches of each epoch at random, whatever the number of ranks. `false` uses
    consecutive parts of the batch, and all ranks get about equal numbers of tokens of each part.
    With `true`, the numbers are equal only on average."""
    n_epochs: PositiveInt = 1
    """Passes over each batch."""
    early_stop_importance_ratio: PositiveFloat | None = 5.0
    """Limit of the mean probability ratio of a minibatch's tokens. If a minibatch exceeds the
    limit, the step skips this and all later updates of the actor. `null` disables the limit."""
    early_stop_kl: Annotated[PositiveFloat, Unit("nats")] | None = None
    """Limit of the estimated KL(old || new) per token (the metric `approx_kl`). If a minibatch
    exceeds the limit, the step skips this and all later updates of the actor. `null` disables the
    limit. Example: `0.1`"""


class Objective(Section):
    """The actor's loss."""

    objective: Literal["clip", "unclipped", "cispo", "sapo"] = "clip"
    """Loss of a token as a function of its probability ratio.

    - `clip`: PPO's clipped surrogate.
    - `unclipped`: ratio times advantage.
    - `cispo`: log-probability times advantage and clipped ratio, without a gradient through the
      ratio.
    - `sapo`: a smooth gate instead of a clip."""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """Probability ratio of the new to the old policy.

    - `token`: the token's ratio.
    - `sequence`: the geometric mean over the response (GSPO).
    - `sequence_token`: the value of `sequence`, with the gradient of only this token (GSPO-token).
    """
    clip_ratio: PositiveFloat = 0.2
    """Distance of the ratio's lower bound from 1; at 1 or more there is no lower bound. The upper
    bound has the same distance unless `clip_ratio_high` is set."""
    clip_ratio_high: PositiveFloat | None = None
    """Distance of the ratio's upper bound from 1. Default: the value of `clip_ratio`. Example:
    `0.28`"""
    dual_clip: AboveOne | None = None
    """Upper bound of the ratio of tokens with a negative advantage. Only with `objective: clip`.
    `null` disables this. Example: `3.0`"""
    sapo_tau_positive: PositiveFloat = 1.0
    """Temperature of the gate of `sapo` for tokens with a positive advantage. With a higher
    temperature, the gate falls faster as the ratio moves away from 1."""
    sapo_tau_negative: PositiveFloat = 1.05
    """Temperature of the gate of `sapo` for tokens with a negative advantage."""
    m2_threshold: PositiveFloat | None = None
    """Maximum mean square of the log-ratios that have moved in the direction of their advantage
    (M2PO). Before each update, the tokens that moved furthest are dropped until the others are
    within the maximum. Dropping costs a forward pass. `null` disables this. Example: `0.04`"""
    aggregation: Literal["tokens", "sequences", "constant"] = "tokens"
    """How the losses of tokens are averaged in a minibatch.

    - `tokens`: mean over all tokens.
    - `sequences`: mean over each sequence, then over sequences.
    - `constant`: sum over each sequence, divided by `aggregation_length`, then mean over sequences.
    """
    aggregation_length: Annotated[PositiveInt, Unit("tokens")] | None = None
    """Number that divides the sum over a sequence (`constant`). Default:
    `rollout.max_new_tokens`, or the policy's token limit in an episode. Example: `1024`"""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the actor's loss. Example: `0.001`"""

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """The minimum and the maximum ratio that are not clipped."""
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return 1.0 - self.clip_ratio, 1.0 + high

    @model_validator(mode="after")
    def _objective_uses_its_settings(self) -> Objective:
        clips = self.objective in ("clip", "cispo")
        used = {
            "dual_clip": self.objective == "clip",
            "clip_ratio": clips,
            "clip_ratio_high": clips,
            "sapo_tau_positive": self.objective == "sapo",
            "sapo_tau_negative": self.objective == "sapo",
        }
        reject_unused(self, used, f"objective: {self.objective}")
        constant = self.aggregation == "constant"
        reject_unused(self, {"aggregation_length": constant}, f"aggregation: {self.aggregation}")
        return self


class Value(Section):
    """The critic's loss."""

    value_clip: PositiveFloat | None = 0.2
    """Maximum distance of new values from old values; `null` does not clip. With `value_norm`, the
    distance is in units of the normalized values."""
    value_huber_delta: PositiveFloat | None = None
    """Error of a value above which the loss grows linearly instead of quadratically (Huber loss).
    `null` keeps the squared error. With `value_norm`, the error is in units of the normalized
    values. Example: `1.0`"""
    value_norm: Literal["none", "exponential", "moving"] = "none"
    """Normalization of the returns that the critic predicts: minus their running mean, divided by
    their running standard deviation. The running moments are part of every checkpoint.

    - `none`: no normalization.
    - `exponential`: recent steps count more.
    - `moving`: all returns so far count equally."""
    value_norm_decay: Annotated[float, Field(gt=0, lt=1)] = 0.99995
    """Decay of the `exponential` moments per step."""
    critic_warmup_steps: NonNegativeInt = 0
    """Steps at the start of the run in which only the critic is trained. The schedule of the
    actor's learning rate begins after these steps and ends with the run. Example: `10`"""

    @model_validator(mode="after")
    def _value_norm_uses_its_settings(self) -> Value:
        exponential = self.value_norm == "exponential"
        reject_unused(self, {"value_norm_decay": exponential}, f"value_norm: {self.value_norm}")
        return self


class Correction(Section):
    """Corrections for differences between the policies of generation and of training."""

    recompute_logprobs: bool | None = None
    """Compute the old log-probabilities of a batch with the training engine before training,
    instead of using generation's values. Default: true with a `correction`. Otherwise false if
    completions may be stale (`rollout.tasks.max_staleness`), and true if `actor.dtype` is bfloat16
    or differs from generation's precision."""
    correction: Literal["none", "weight", "truncate", "mask"] | None = None
    """Importance weights of the losses of tokens. A weight is the recomputed old probability
    divided by the probability at generation.

    - `none`: no weights.
    - `weight`: weights without bounds (the decoupled objective).
    - `truncate`: a weight beyond a bound becomes the bound.
    - `mask`: a weight beyond a bound becomes 0.

    Default: `truncate` if old log-probabilities are recomputed and completions may be stale or
    differ in precision from `actor.dtype`; else `none`. Example: `truncate`"""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Tokens that share an importance weight.

    - `token`: each token has its own weight.
    - `sequence`: all tokens of a response. The weight is the product over these tokens.
    - `geometric`: all tokens of a response. The weight is the geometric mean over these tokens."""
    correction_upper: PositiveFloat = 2.0
    """Upper bound of the importance weight with `correction: truncate` or `mask`."""
    correction_lower: NonNegativeFloat = 0.0
    """Lower bound of the importance weight with `correction: truncate` or `mask`."""

    reject_by: Literal["ratio", "k1", "k2", "k3"] | None = None
    """Leave tokens out of the actor's loss if the policy before the updates differs too much from
    the policy that sampled them. This key selects the measure of the difference; `null` keeps all
    tokens. With r, the recomputed old probability divided by the probability at generation:

    - `ratio`: r.
    - `k1`: -log r.
    - `k2`: (log r)^2 / 2.
    - `k3`: r - 1 - log r.

    `k1`, `k2` and `k3` estimate KL(generation, training)."""
    reject_over: Literal["token", "mean", "sum", "max"] = "token"
    """Value that must be within the bounds.

    - `token`: the value of each token. Only the token is left out.
    - `mean`, `sum`, `max`: this statistic over a response. All tokens of the response are left out.
      With `reject_by: ratio`, the mean and the sum use log r."""
    reject_upper: PositiveFloat | None = None
    """Largest value that is not rejected. `null` sets no bound. Example: `2.0`"""
    reject_lower: float | None = None
    """Smallest value that is not rejected. `null` sets no bound. Example: `0.5`"""

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """The minimum and the maximum importance weight."""
        bounded = self.correction in ("truncate", "mask")
        return (self.correction_lower, self.correction_upper) if bounded else (0.0, inf)

    @property
    def corrects(self) -> bool:
        """Whether importance weights multiply the losses."""
        return self.correction not in (None, "none")

    @property
    def compares(self) -> bool:
        """Whether a token's loss depends on both recomputed and generation's log-probabilities."""
        return self.corrects or self.reject_by is not None

    @model_validator(mode="after")
    def _correction_is_possible(self) -> Correction:
        bounded = self.correction in ("truncate", "mask")
        used = {
            "correction_level": self.corrects,
            "correction_upper": bounded,
            "correction_lower": bounded,
        }
        reject_unused(self, used, f"correction: {self.correction or 'none'}")
        if self.correction_lower > self.correction_upper:
            raise ValueError(
                f"correction_lower {self.correction_lower} exceeds correction_upper "
                f"{self.correction_upper}"
            )
        if self.compares and self.recompute_logprobs is False:
            chosen = f"correction: {self.correction}"
            chosen = chosen if self.corrects else f"reject_by: {self.reject_by}"
            raise ValueError(
                f"{chosen} is not allowed with recompute_logprobs: false, because it compares "
                "recomputed log-probabilities; remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _rejection_has_bounds(self) -> Correction:
        names = ("reject_over", "reject_upper", "reject_lower")
        reject_unused(self, dict.fromkeys(names, self.reject_by is not None), "no reject_by")
        lower, upper = self.reject_lower, self.reject_upper
        if self.reject_by is not None and lower is None and upper is None:
            raise ValueError(
                f"reject_by: {self.reject_by} is not allowed without a bound; set reject_upper or "
                "reject_lower"
            )
        if lower is not None and upper is not None and lower > upper:
            raise ValueError(f"reject_lower {lower} exceeds reject_upper {upper}")
        if self.reject_by == "ratio" and lower is not None and lower < 0:
            raise ValueError(
                f"reject_lower {lower} is not allowed with reject_by: ratio; use 0 or more"
            )
        return self


def reject_unused(section: Section, used: dict[str, bool], chosen: str) -> None:
    """Raise ValueError for settings with non-default values that ``chosen`` ignores."""
    fields = type(section).model_fields
    unused = [
        name
        for name, is_used in used.items()
        if not is_used and getattr(section, name) != fields[name].default
    ]
    if unused:
        raise ValueError(f"{', '.join(unused)} is not allowed with {chosen}, which does not use it")


OF_COMPLETIONS: Final = ("group", "leave_one_out", "batch", "batch_leave_one_out")
"""Estimators that give all tokens of a completion the same advantage."""
OF_GROUPS: Final = ("group", "leave_one_out")
"""Estimators that compare the completions of one prompt."""
WITHOUT_OWN: Final = ("leave_one_out", "batch_leave_one_out")
"""Estimators whose baseline leaves out the completion itself."""
DIVIDED: Final = (*OF_COMPLETIONS, "none")
"""Estimators whose advantages may be divided by a deviation."""


class Advantages(Section):
    """Advantages, computed from scores."""

    advantage: Literal[
        "gae", "group", "leave_one_out", "greedy", "batch", "batch_leave_one_out", "none"
    ] = "gae"
    """Baseline that is subtracted from a completion's return. `gae`, `greedy` and `none` have one
    return per token, the others one per completion.

    - `gae`: the values of a critic.
    - `group`: the mean over the prompt's completions.
    - `leave_one_out`: the mean over the prompt's other completions.
    - `greedy`: the score of a greedy completion of the prompt, which costs another generation.
    - `batch`: the mean over all completions of the batch.
    - `batch_leave_one_out`: the mean over the other completions of the batch.
    - `none`: no baseline."""
    advantage_std: Literal["none", "group", "batch"] = "none"
    """Standard deviation by which advantages are divided. Not allowed with `gae` and `greedy`. With
    `advantage: none`, the deviation is from 0: the root of the mean square.

    - `none`: no division.
    - `group`: the deviation of the returns of the prompt's completions.
    - `batch`: the deviation of the returns of all completions."""
    std_unbiased: bool = True
    """Divide the sum of squares in `advantage_std` by the number of completions minus one. `false`
    divides by their number."""
    std_epsilon: NonNegativeFloat = 1e-6
    """Number added to the standard deviation of `advantage_std`."""
    discount: Fraction = 1.0
    """Discount per token (gamma). Must be 1 if the baseline has one return per completion."""
    gae_lambda: Fraction = 1.0
    """Weight of longer returns in the advantages (lambda). Only with `advantage: gae`. Example:
    `0.95`"""
    normalize_advantages: bool = True
    """Normalize the advantages to mean 0 and standard deviation 1 over all response tokens of the
    batch. The variance is the sum of squares divided by the number of tokens, plus 1e-8."""

    @model_validator(mode="after")
    def _advantage_uses_its_settings(self) -> Advantages:
        of_completions = self.advantage in OF_COMPLETIONS
        chosen = f"advantage: {self.advantage}"
        if self.advantage_std != "none" and self.advantage not in DIVIDED:
            raise ValueError(
                f"advantage_std: {self.advantage_std} is not allowed with {chosen}; "
                f"allowed with advantage: {', '.join(DIVIDED)}"
            )
        divides = dict.fromkeys(("std_unbiased", "std_epsilon"), self.advantage_std != "none")
        reject_unused(self, divides, "advantage_std: none")
        if self.discount != 1.0 and of_completions:
            raise ValueError(
                f"discount {self.discount} is not allowed with {chosen}, which has one return per "
                "completion; use 1.0"
            )
        if self.gae_lambda != 1.0 and self.advantage != "gae":
            raise ValueError(
                f"gae_lambda {self.gae_lambda} is not allowed with {chosen}, which has no values; "
                "allowed with advantage: gae"
            )
        return self


ZERO_VARIANCE = "zero_variance"
TRUNCATED = "truncated"


class Filters(Section):
    """Filters of scored prompts and completions, and the replacement of dropped prompts."""

    zero_variance: Literal["keep", "drop"] = "keep"
    """`drop`: do not train on prompts whose completions all have the same score (the reward after
    shaping), so that no completion has an advantage over another. With `mask_truncated`, also drop
    prompts whose completions are all truncated. Failed episodes do not count. Requires `rollout.n`
    of at least 2. Example: `drop`"""
    max_truncated: Fraction | None = None
    """Maximum share of a prompt's completions without stop token or stop string. Prompts with a
    larger share are dropped. Failed episodes do not count. `null` keeps all prompts. Example:
    `0.5`"""
    mask_truncated: bool = False
    """Leave the tokens of completions without a stop token or stop string out of the losses. The
    rewards of such completions still count in baselines and standard deviations."""
    filter_rounds: PositiveInt = 10
    """Maximum number of rounds of generation in a step, until the filters leave enough prompts for
    a batch. 1 replaces no prompt. With rollout tasks, a step scores at most this number times
    `batch_size` prompts."""
    filter_candidates: Annotated[PositiveInt, Unit("prompts")] | None = None
    """Number of prompts in a round. If more prompts are accepted than fit the batch, the next step
    samples the surplus again. Rollout tasks ignore this number, because they score prompts as they
    finish. Default: the value of `batch_size`. Example: `128`"""
    short_batch: Literal["train", "error"] = "train"
    """Reaction if prompts are missing after the last round. `train` trains on the prompts that are
    left, or not at all if none is left. `error` ends the trial with an error."""

    @model_validator(mode="after")
    def _some_truncated_completion_is_left(self) -> Filters:
        if self.mask_truncated and self.max_truncated == 0.0:
            raise ValueError(
                "mask_truncated: true is not allowed with max_truncated 0.0, which drops every "
                "prompt that has a truncated completion; remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _filter_settings_need_a_filter(self) -> Filters:
        names = ("filter_rounds", "filter_candidates", "short_batch")
        chosen = "zero_variance: keep and no max_truncated"
        reject_unused(self, dict.fromkeys(names, self.filters), chosen)
        return self

    @property
    def filters(self) -> bool:
        """Whether any prompt may be dropped."""
        return self.zero_variance == "drop" or self.max_truncated is not None

    def refill(self) -> Refill:
        return Refill(
            rounds=self.filter_rounds,
            candidates=self.filter_candidates,
            complete=self.short_batch == "error",
        )


def filter_call() -> Call:
    """Return the call that filters prompts by the scores of their completions."""
    return Call(
        name="prompt_filter",
        role=None,
        method=Method.FILTER,
        interface="slurmrl.algorithms.policy.advantages:FilterInterface",
        inputs=("prompt_mask", "rewards", "finished"),
        metrics=(
            *(f"filter/{name}" for name in (ZERO_VARIANCE, TRUNCATED)),
            *(f"filter/{name}" for name in ("rounds", "accepted", "surplus")),
        ),
    )


class KL(Section):
    """The KL penalty for moving away from the reference model."""

    where: Literal["reward", "loss"] = "reward"
    """`reward` subtracts the penalty from the reward of each token. `loss` adds the penalty to the
    actor's loss."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of KL(policy || reference) from a sampled token, with x = log(p/p_ref).

    - `k1`: x.
    - `k2`: x^2 / 2.
    - `k3`: exp(-x) - 1 + x, which is never negative."""
    kind: Literal["fixed", "adaptive"] = "fixed"
    """`fixed` keeps the coefficient. `adaptive` adjusts the coefficient so that the measured KL
    approaches `target`."""
    coef: NonNegativeFloat = 0.1
    """Initial coefficient: penalty per token for each nat of KL. With 0 there is no penalty and no
    reference model. Required with other keys of `kl` if the preset's coefficient is 0. Example:
    `0.001`"""
    target: Annotated[PositiveFloat, Unit("nats")] = 6.0
    """With `adaptive`: target of the mean KL per completion."""
    horizon: Annotated[PositiveFloat, Unit("completions")] = 10000.0
    """With `adaptive`: number of completions in which the coefficient changes by at most 20 %. A
    step with more completions also changes the coefficient by at most 20 %."""

    @model_validator(mode="after")
    def _is_possible(self) -> KL:
        if self.kind == "adaptive" and self.coef == 0:
            raise ValueError(
                "coef 0 is not allowed with kind: adaptive, which multiplies it; use more than 0"
            )
        steered = dict.fromkeys(("target", "horizon"), self.kind == "adaptive")
        reject_unused(self, steered, f"kind: {self.kind}")
        if self.where == "loss" and self.estimator == "k1" and self.coef > 0:
            raise ValueError(
                "estimator: k1 is not allowed with where: loss: its gradient is 0 in the mean over "
                "sampled tokens; allowed: k2, k3"
            )
        return self


class RewardShaping(Section):
    """Scores, computed from the rewards of completions."""

    reward_bias: float = 0.0
    """Number that is subtracted from each reward before scaling. Example: `0.5`"""
    reward_scaling: float = 1.0
    """Factor of each reward before clipping. 0 is not allowed: it would make all rewards equal."""
    reward_clip: PositiveFloat | None = 20.0
    """Maximum magnitude of a reward; larger rewards are clipped. `null` does not clip."""
    mask_no_eos_with_zero: bool = False
    """Give completions without a stop token or stop string the reward 0 instead of the reward
    function's score."""
    overlong_buffer: Annotated[PositiveInt, Unit("tokens")] | None = None
    """Number of tokens before the maximum length where the reward of a completion begins to fall.
    The reward falls linearly, by `overlong_penalty` at the maximum length. The penalty precedes
    bias, scaling and clipping. The maximum length is `rollout.max_new_tokens`, or the policy's
    token limit in an episode. `null` disables this. Example: `512`"""
    overlong_penalty: PositiveFloat = 1.0
    """Maximum penalty for the length of a completion."""
    kl: KL = KL()

    @field_validator("reward_scaling")
    @classmethod
    def _keeps_rewards_apart(cls, value: float) -> float:
        if value == 0:
            raise ValueError("all rewards would be equal; use another number")
        return value

    @model_validator(mode="after")
    def _scores_truncated_completions_once(self) -> RewardShaping:
        if self.overlong_buffer is not None and self.mask_no_eos_with_zero:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} is not allowed with "
                "mask_no_eos_with_zero: true: a reward of 0 would replace the penalty of a "
                "truncated completion; remove one of the two"
            )
        if self.overlong_buffer is None and self.overlong_penalty != 1.0:
            raise ValueError(
                f"overlong_penalty {self.overlong_penalty} is not allowed without overlong_buffer, "
                "the number of tokens in which it grows"
            )
        return self
