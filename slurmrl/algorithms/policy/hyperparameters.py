"""Settings of rewards, advantages, filters, losses and updates: sections of policy gradients."""

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
)
from slurmrl.plan.dataflow import Call, Method, Refill

AboveOne = Annotated[float, Field(gt=1)]


class Updates(Section):
    """Minibatches and epochs over a batch, and what ends them early."""

    n_minibatches: PositiveInt = 4
    """Parts of a batch, of equal numbers of prompts, with one optimizer step each. They are the
    same for every number of ranks."""
    shuffle_minibatches: bool = False
    """Draw the minibatches of each epoch at random, the same for every number of ranks. Default:
    consecutive parts of the batch. Ranks' shares of a consecutive part have about equal numbers of
    tokens; those of a random one have that only on average."""
    n_epochs: PositiveInt = 1
    """Passes over each batch."""
    early_stop_importance_ratio: PositiveFloat | None = 5.0
    """If the mean probability ratio of a minibatch's tokens exceeds this, skip its update of the
    actor and all later ones of the step; null disables this."""
    early_stop_kl: PositiveFloat | None = None
    """The same if the estimate of KL(old || new) per token (the metric `approx_kl`) exceeds this,
    in nats; null disables this."""


class Objective(Section):
    """The actor's loss."""

    objective: Literal["clip", "unclipped", "cispo", "sapo"] = "clip"
    """Loss of a token as a function of its probability ratio. `clip`: PPO's clipped surrogate;
    `unclipped`: ratio times advantage; `cispo`: log-probability times advantage and clipped ratio,
    without a gradient through the ratio; `sapo`: a smooth gate instead of a clip."""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """Probability ratio of new to old policy: of the `token`, or the geometric mean over the
    response (`sequence`, GSPO), or this with the gradient of the token alone (`sequence_token`,
    GSPO-token)."""
    clip_ratio: PositiveFloat = 0.2
    """The ratio is clipped from below at 1 - this; 1 or more sets no lower bound. It is also the
    upper bound's distance from 1 unless `clip_ratio_high` is set."""
    clip_ratio_high: PositiveFloat | None = None
    """The ratio is clipped from above at 1 + this. Default: `clip_ratio`."""
    dual_clip: AboveOne | None = None
    """Tokens with a negative advantage count as if their ratio were at most this. Only with
    `objective: clip`; null disables this."""
    sapo_tau_positive: PositiveFloat = 1.0
    """Temperature of `sapo`'s gate for tokens with a positive advantage: higher ones decay
    faster."""
    sapo_tau_negative: PositiveFloat = 1.05
    """The same for tokens with a negative advantage."""
    m2_threshold: PositiveFloat | None = None
    """Before each update, drop the tokens whose log-ratio has moved furthest in the direction of
    their advantage, until the mean square of the log-ratios that moved so is at most this (M2PO).
    Costs a forward pass for each update; null disables this."""
    aggregation: Literal["tokens", "sequences", "constant"] = "tokens"
    """How the losses of tokens are averaged in a minibatch: over all `tokens`; over each sequence,
    then over `sequences`; or summed over each sequence, divided by a `constant`, then averaged over
    sequences."""
    aggregation_length: PositiveInt | None = None
    """Divisor of `aggregation: constant`, in tokens. Default: the most that the policy may write in
    a completion, `rollout.max_new_tokens` unless episodes have several turns."""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the actor's loss."""

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """The smallest and the largest ratio that is not clipped."""
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
        refuse_unused(self, used, f"objective: {self.objective}")
        constant = self.aggregation == "constant"
        refuse_unused(self, {"aggregation_length": constant}, f"aggregation: {self.aggregation}")
        return self


class Value(Section):
    """The critic's loss."""

    value_clip: PositiveFloat | None = 0.2
    """New values are clipped to this distance from the old ones; null does not clip. With
    `value_norm`, in units of the normalized values."""
    value_huber_delta: PositiveFloat | None = None
    """Errors of values beyond this grow linearly instead of quadratically (Huber loss); null keeps
    the squared error. With `value_norm`, in units of the normalized values."""
    value_norm: Literal["none", "exponential", "moving"] = "none"
    """The critic predicts returns less their running mean, divided by their running standard
    deviation. `exponential`: recent steps count more; `moving`: all returns so far count alike. The
    running moments are part of every checkpoint."""
    value_norm_decay: Annotated[float, Field(gt=0, lt=1)] = 0.99995
    """Decay of the `exponential` moments per step."""
    critic_warmup_steps: NonNegativeInt = 0
    """Steps at the start of the run in which only the critic is trained. The actor's learning rate
    schedule begins after them and ends with the run."""

    @model_validator(mode="after")
    def _value_norm_uses_its_settings(self) -> Value:
        exponential = self.value_norm == "exponential"
        refuse_unused(self, {"value_norm_decay": exponential}, f"value_norm: {self.value_norm}")
        return self


class Correction(Section):
    """Differences between the policies of generation and of training."""

    recompute_logprobs: bool | None = None
    """Compute the old log-probabilities of a batch with the training engine before it is trained
    on, instead of using those of generation. Default: true with a `correction`; false if
    completions may be stale (`rollout.tasks.max_staleness`), whose ratios have to compare with the
    policy that sampled them; else true in bfloat16, in which the kernels of generation and training
    round differently, and if generation has another precision than `actor.dtype`; false in
    float32."""
    correction: Literal["none", "weight", "truncate", "mask"] | None = None
    """Importance weights of recomputed old probabilities over those of generation, which multiply
    the losses of tokens. `weight`: without bounds (the decoupled objective); `truncate`: moved to
    the nearer bound; `mask`: 0 beyond the bounds. Default: `truncate` if old log-probabilities are
    recomputed and completions may be stale or have another precision than `actor.dtype`; else
    `none`."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """What a weight belongs to: each `token`; the whole response, as the product over its tokens
    (`sequence`) or as their `geometric` mean."""
    correction_upper: PositiveFloat = 2.0
    """Largest weight of `truncate` and `mask`."""
    correction_lower: NonNegativeFloat = 0.0
    """Smallest weight of `truncate` and `mask`."""

    reject_by: Literal["ratio", "k1", "k2", "k3"] | None = None
    """Leave tokens out of the actor's loss by how far the policy before the updates is from the one
    that sampled them, with r the recomputed old probability over that of generation. `ratio`: r.
    `k1`: -log r, `k2`: (log r)^2 / 2, `k3`: r - 1 - log r, estimates of KL(generation, training).
    Null rejects none."""
    reject_over: Literal["token", "mean", "sum", "max"] = "token"
    """What has to be within the bounds: the value of each `token`, which is left out alone; or the
    `mean`, `sum` or `max` over a response, all of whose tokens are left out. Mean and sum of
    `ratio` are those of log r."""
    reject_upper: PositiveFloat | None = None
    """Largest value that is not rejected; null sets no bound."""
    reject_lower: float | None = None
    """Smallest value that is not rejected; null sets no bound."""

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """The smallest and the largest weight."""
        bounded = self.correction in ("truncate", "mask")
        return (self.correction_lower, self.correction_upper) if bounded else (0.0, inf)

    @property
    def corrects(self) -> bool:
        """Whether importance weights multiply the losses."""
        return self.correction not in (None, "none")

    @property
    def compares(self) -> bool:
        """Whether a token's loss depends on recomputed and on generation's log-probabilities."""
        return self.corrects or self.reject_by is not None

    @model_validator(mode="after")
    def _correction_is_possible(self) -> Correction:
        bounded = self.correction in ("truncate", "mask")
        used = {
            "correction_level": self.corrects,
            "correction_upper": bounded,
            "correction_lower": bounded,
        }
        refuse_unused(self, used, f"correction: {self.correction or 'none'}")
        if self.correction_lower > self.correction_upper:
            raise ValueError(
                f"correction_lower {self.correction_lower} exceeds correction_upper "
                f"{self.correction_upper}"
            )
        if self.compares and self.recompute_logprobs is False:
            chosen = f"correction: {self.correction}"
            chosen = chosen if self.corrects else f"reject_by: {self.reject_by}"
            raise ValueError(
                f"{chosen} is not allowed with recompute_logprobs: false: it compares recomputed "
                "log-probabilities with those of generation; remove one"
            )
        return self

    @model_validator(mode="after")
    def _rejection_has_bounds(self) -> Correction:
        names = ("reject_over", "reject_upper", "reject_lower")
        refuse_unused(self, dict.fromkeys(names, self.reject_by is not None), "no reject_by")
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


def refuse_unused(section: Section, used: dict[str, bool], chosen: str) -> None:
    """Raise ValueError for settings that differ from their defaults but that ``chosen`` ignores."""
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
"""Estimators whose mean leaves out the completion itself."""
DIVIDED: Final = (*OF_COMPLETIONS, "none")
"""Estimators whose advantages may be divided by a deviation."""


class Advantages(Section):
    """From scores to advantages."""

    advantage: Literal[
        "gae", "group", "leave_one_out", "greedy", "batch", "batch_leave_one_out", "none"
    ] = "gae"
    """What a completion's return is compared with. `gae`: the values of a critic. `group`: the mean
    over the prompt's completions. `leave_one_out`: the mean over the prompt's other completions.
    `greedy`: the score of a greedy completion of the prompt, which costs another generation.
    `batch`: the mean over all completions of the batch. `batch_leave_one_out`: the mean over the
    other completions of the batch. `none`: nothing. `gae`, `greedy` and `none` have one return per
    token, the others one per completion."""
    advantage_std: Literal["none", "group", "batch"] = "none"
    """Divide by the standard deviation of the returns of the prompt's completions (`group`) or of
    all completions (`batch`). With `advantage: none` it is the deviation from 0, the root of the
    mean square. Not with `gae` and `greedy`."""
    std_unbiased: bool = True
    """That standard deviation divides by the number of completions less one (true) or by their
    number (false)."""
    std_epsilon: NonNegativeFloat = 1e-6
    """Added to that standard deviation."""
    discount: Fraction = 1.0
    """Discount per token (gamma). Must be 1 where a completion has one return."""
    gae_lambda: Fraction = 1.0
    """Weight of longer returns in the advantages (lambda). Only with `advantage: gae`."""
    normalize_advantages: bool = True
    """Normalize the advantages to mean 0 and standard deviation 1 over all response tokens of the
    batch. (Population variance; 1e-8 is added to it.)"""

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
        refuse_unused(self, divides, "advantage_std: none")
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
    """Prompts that are dropped after their completions were judged, and what replaces them.

    Completions that leave the losses.
    """

    zero_variance: Literal["keep", "drop"] = "keep"
    """`drop`: do not train on prompts whose completions all have the same score (the reward after
    shaping), so that none has an advantage over another; with `mask_truncated`, nor on those whose
    completions are all truncated. Failed episodes do not count. Requires `rollout.n` of at least
    2."""
    max_truncated: Fraction | None = None
    """Do not train on prompts of which more than this share of completions has no stop token (or
    stop string); null keeps them. Failed episodes do not count."""
    mask_truncated: bool = False
    """Leave the tokens of completions without a stop token (or stop string) out of the losses.
    Their rewards still count in the baselines and deviations of the others."""
    filter_rounds: PositiveInt = 10
    """Rounds of generation in a step until enough prompts for a batch are left. 1 replaces no
    prompt. With rollout tasks, a step judges at most so many times `batch_size`."""
    filter_candidates: PositiveInt | None = None
    """Prompts of a round. What exceeds a full batch is generated again in the next step. Ignored
    with rollout tasks: a round judges groups that are finished. Default: `batch_size`."""
    short_batch: Literal["train", "error"] = "train"
    """When prompts are missing after the last round: train on those that there are (on nothing, if
    there are none), or end the trial with an error."""

    @model_validator(mode="after")
    def _some_truncated_completion_is_left(self) -> Filters:
        if self.mask_truncated and self.max_truncated == 0.0:
            raise ValueError(
                "mask_truncated: true is not allowed with max_truncated 0.0, which drops every "
                "prompt that has a truncated completion; remove one"
            )
        return self

    @model_validator(mode="after")
    def _filter_settings_need_a_filter(self) -> Filters:
        names = ("filter_rounds", "filter_candidates", "short_batch")
        chosen = "zero_variance: keep and no max_truncated"
        refuse_unused(self, dict.fromkeys(names, self.filters), chosen)
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
    """Choose prompts by what their completions earned."""
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
    """`reward` subtracts the penalty from the reward of each token; `loss` adds it to the actor's
    loss."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of KL(policy || reference) from a sampled token, with x = log(p/p_ref). `k1`: x;
    `k2`: x^2 / 2; `k3`: exp(-x) - 1 + x, which is never negative."""
    kind: Literal["fixed", "adaptive"] = "fixed"
    """`fixed` keeps the coefficient; `adaptive` steers the measured KL to `target`."""
    coef: NonNegativeFloat = 0.1
    """Initial coefficient: penalty per token for each nat of KL. With 0 there is no penalty and no
    reference model. Required with other settings of `kl` for a preset whose coefficient is 0."""
    target: PositiveFloat = 6.0
    """Adaptive: target of the mean KL per completion, in nats."""
    horizon: PositiveFloat = 10000.0
    """Adaptive: completions over which the coefficient moves by up to 20 %. A step moves it by no
    more than that."""

    @model_validator(mode="after")
    def _is_possible(self) -> KL:
        if self.kind == "adaptive" and self.coef == 0:
            raise ValueError(
                "coef 0 is not allowed with kind: adaptive, which multiplies it; use more than 0"
            )
        steered = dict.fromkeys(("target", "horizon"), self.kind == "adaptive")
        refuse_unused(self, steered, f"kind: {self.kind}")
        if self.where == "loss" and self.estimator == "k1" and self.coef > 0:
            raise ValueError(
                "estimator: k1 is not allowed with where: loss: its gradient is 0 in the mean over "
                "sampled tokens; allowed: k2, k3"
            )
        return self


class RewardShaping(Section):
    """From the reward of a completion to its score."""

    reward_bias: float = 0.0
    """Subtracted from each reward, before scaling."""
    reward_scaling: float = 1.0
    """Factor of each reward, before clipping; not 0, which would make all rewards equal."""
    reward_clip: PositiveFloat | None = 20.0
    """Rewards are clipped to this magnitude; null does not clip."""
    mask_no_eos_with_zero: bool = False
    """Give completions without a stop token (or stop string) the reward 0 instead of the reward
    function's score."""
    overlong_buffer: PositiveInt | None = None
    """Tokens before the longest completion (`rollout.max_new_tokens`, or what the policy may write
    in an episode) in which a completion's reward falls linearly, by `overlong_penalty` at the end
    (before bias, scaling and clipping). Null disables this."""
    overlong_penalty: PositiveFloat = 1.0
    """Largest penalty for the length of a completion."""
    kl: KL = KL()

    @field_validator("reward_scaling")
    @classmethod
    def _keeps_rewards_apart(cls, value: float) -> float:
        if value == 0:
            raise ValueError("all rewards would be equal; use another number")
        return value

    @model_validator(mode="after")
    def _judges_truncated_completions_once(self) -> RewardShaping:
        if self.overlong_buffer is not None and self.mask_no_eos_with_zero:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} is not allowed with "
                "mask_no_eos_with_zero: true: the penalty of a truncated completion would be "
                "replaced by 0; remove one"
            )
        if self.overlong_buffer is None and self.overlong_penalty != 1.0:
            raise ValueError(
                f"overlong_penalty {self.overlong_penalty} is not allowed without overlong_buffer, "
                "the number of tokens in which it grows"
            )
        return self
