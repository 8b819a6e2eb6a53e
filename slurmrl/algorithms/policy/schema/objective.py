"""Settings of the losses and of the updates that minimise them."""

from __future__ import annotations

from math import inf
from typing import Annotated, Literal

from pydantic import Field, model_validator

from slurmrl.config.schema.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

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
    `value_norm`, in units of the normalised values."""
    value_huber_delta: PositiveFloat | None = None
    """Errors of values beyond this grow linearly instead of quadratically (Huber loss); null keeps
    the squared error. With `value_norm`, in units of the normalised values."""
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
    policy that drew them; else true in bfloat16, in which the kernels of generation and training
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
    that drew them, with r the recomputed old probability over that of generation. `ratio`: r. `k1`:
    -log r, `k2`: (log r)^2 / 2, `k3`: r - 1 - log r, estimates of KL(generation, training). Null
    rejects none."""
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
    """Raise ValueError for settings that differ from their defaults and that ``chosen`` does not
    use."""
    fields = type(section).model_fields
    unused = [
        name
        for name, is_used in used.items()
        if not is_used and getattr(section, name) != fields[name].default
    ]
    if unused:
        raise ValueError(f"{', '.join(unused)} is not allowed with {chosen}, which does not use it")
