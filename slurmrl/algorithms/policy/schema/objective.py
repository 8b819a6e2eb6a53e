"""Settings of the losses and of the updates that minimise them."""

from __future__ import annotations

from slurmrl.config.schema.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section


class Updates(Section):
    """Minibatches and epochs over a batch, and what ends them early."""

    n_minibatches: PositiveInt = 4
    """Consecutive parts of a batch, of equal numbers of prompts, with one optimizer step each. They
    are the same for every number of ranks."""
    n_epochs: PositiveInt = 1
    """Passes over each batch."""
    early_stop_importance_ratio: PositiveFloat | None = 5.0
    """If the mean probability ratio of a minibatch's tokens exceeds this, skip its update of the
    actor and all later ones of the step; null disables this."""


class Objective(Section):
    """The actor's loss."""

    clip_ratio: PositiveFloat = 0.2
    """The probability ratio of a token is clipped to the range from 1 - this to 1 + this."""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the actor's loss."""


class Value(Section):
    """The critic's loss."""

    value_clip: PositiveFloat | None = 0.2
    """New values are clipped to this distance from the old ones; null does not clip."""


class Correction(Section):
    """Differences between the engines of generation and of training."""

    recompute_logprobs: bool | None = None
    """Compute the old log-probabilities of a batch with the training engine before it is trained
    on, instead of using those of generation. Default: true if the actor computes in bfloat16, in
    which the kernels of generation and training round differently; false in float32."""
