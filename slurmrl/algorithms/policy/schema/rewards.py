"""Settings that shape the rewards of completions before advantages are computed from them."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from slurmrl.algorithms.policy.schema.objective import refuse_unused
from slurmrl.config.schema.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section


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
