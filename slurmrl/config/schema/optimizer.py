"""The optimizer of a model role: its settings, schedule and state."""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field, Strict, field_validator

from slurmrl.config.schema.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

Beta = Annotated[float, Field(ge=0, lt=1)]
Kind = Literal["adamw", "adam", "sgd"]

MOMENTS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum",),
}
"""State of each optimizer for a parameter, by the names in checkpoints."""

USERS: Final[Mapping[str, tuple[Kind, ...]]] = {
    "betas": ("adamw", "adam"),
    "momentum": ("sgd",),
    "eps": ("adamw", "adam"),
}
"""Settings that only some optimizers use."""

_WHOLE: Final = "it needs whole matrices, and a rank holds only a part of each"
LEFT_OUT: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("adamax", "nadam", "radam", "rmsprop", "adagrad", "adadelta"), "it is no longer supported"
    ),
    "muon": _WHOLE,
    "adafactor": _WHOLE,
    "lbfgs": "it computes the loss several times a step",
    "sparseadam": "it is for sparse gradients, which no model here has",
    "rprop": "it is for gradients of a whole dataset and has neither schedule nor decay",
    "asgd": "its purpose is averaged weights, which are neither used nor exported",
}
"""torch's optimizers that are not supported, in lower case, with the reason."""


class Optimizer(Section):
    """The optimizer and its schedule. A role that is not trained ignores it. The defaults suit
    fine-tuning with `adamw`. torch's own learning rate is 0.001, its `betas` are 0.9 and 0.999."""

    name: Kind = "adamw"
    """Optimizer of torch.optim. Options that are not listed here have torch's defaults. `sgd` is
    plain gradient descent, with momentum if `momentum` is above 0."""
    lr: NonNegativeFloat = 1e-5
    """Learning rate after warm-up."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.95)
    """Decay rates of the first and second moments of `adamw` and `adam`."""
    momentum: Beta = 0.0
    """Momentum factor of `sgd`; 0 disables momentum."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment, to keep the denominator above 0. `sgd` does
    not use it."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices (not of norms and biases) per step: `adamw` and `sgd` shrink weights
    by this times the learning rate, `adam` adds this times the weights to the gradient."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from the end of warm-up to the end of the schedule."""
    schedule_steps: PositiveInt | None = None
    """Length of the schedule in optimizer steps, including warm-up. Default: the whole run, so that
    the schedule changes with `total_steps`."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the schedule and after it, as a fraction of `lr`."""
    gradient_clip: PositiveFloat | None = 1.0
    """Maximum norm of the whole gradient; null disables clipping."""

    @field_validator("name", mode="before")
    @classmethod
    def _left_out(cls, name: Any) -> Any:
        reason = LEFT_OUT.get(name.lower()) if isinstance(name, str) else None
        if reason is not None:
            raise ValueError(f"{reason}; allowed: {', '.join(get_args(Kind))}")
        return name

    def learning_rate(self, step: int, run_steps: int) -> float:
        """Rate of optimizer step ``step`` (from 0) in a run of ``run_steps``: warm-up rises
        linearly and ends at ``lr``; then constant, linear or half a cosine down to
        ``lr * min_lr_ratio`` at the schedule's last step, where it stays."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        falling_steps = max(1, self.last_step(run_steps) - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / falling_steps)
        left = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + cos(pi * progress))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left)

    def last_step(self, run_steps: int) -> int:
        """The optimizer step (from 0) at which the schedule ends."""
        return (self.schedule_steps or run_steps) - 1

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the state tensors of each parameter, which have its shape."""
        return tuple(kept for kept in MOMENTS[self.name] if kept != "momentum" or self.momentum)

    @property
    def unused(self) -> tuple[str, ...]:
        """Settings that differ from their defaults and that this optimizer does not use."""
        fields = type(self).model_fields
        return tuple(
            name
            for name, users in USERS.items()
            if self.name not in users and getattr(self, name) != fields[name].default
        )
