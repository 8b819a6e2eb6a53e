"""Settings of rewards, their KL penalty, and advantages."""

from __future__ import annotations

from typing import Literal

from slurmrl.config.schema.base import Fraction, NonNegativeFloat, PositiveFloat, Section


class KL(Section):
    """The KL penalty for moving away from the reference model."""

    kind: Literal["fixed", "adaptive"] = "fixed"
    """`fixed` keeps the coefficient; `adaptive` steers the measured KL to `target`."""
    coef: NonNegativeFloat = 0.1
    """Initial coefficient: penalty per token for each nat of log(p/p_ref)."""
    target: PositiveFloat = 6.0
    """Adaptive: target of the mean KL per completion, in nats."""
    horizon: PositiveFloat = 10000.0
    """Adaptive: completions over which the coefficient moves by up to 20 %."""


class Advantages(Section):
    """From rewards to advantages."""

    reward_bias: float = 0.0
    """Subtracted from each reward, before scaling."""
    reward_scaling: float = 1.0
    """Factor of each reward, before clipping."""
    reward_clip: PositiveFloat | None = 20.0
    """Rewards are clipped to this magnitude; null does not clip."""
    mask_no_eos_with_zero: bool = False
    """Give completions without a stop token the reward 0 instead of the reward function's score."""
    kl: KL = KL()
    discount: Fraction = 1.0
    """Discount per token (gamma)."""
    gae_lambda: Fraction = 1.0
    """Weight of longer returns in the advantages (lambda)."""
    normalize_advantages: bool = True
    """Normalise the advantages to mean 0 and standard deviation 1 over all response tokens of the
    batch."""
