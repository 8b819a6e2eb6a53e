"""Low-rank adapters of a trained role."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, field_validator

from slurmrl.config.schema.base import PositiveFloat, PositiveInt, Section, Sequence

ALL_LINEAR: Final = "all-linear"
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder's layer, by their names in the files."""


class Lora(Section):
    """Train low-rank adapters instead of the weights (LoRA, Hu et al. 2021): a target's weight W
    becomes W + scale * B A, where A has `rank` rows and B has `rank` columns. W is frozen, in the
    role's `dtype`. Only A and B, in float32, are trained and committed; of a critic, the value head
    too. fsdp with the built-in decoder only (docs/lora.md)."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """The scale is alpha / rank."""
    targets: Literal["all-linear"] | Sequence[str] = ALL_LINEAR
    """The linear layers with an adapter: a list of `q_proj`, `k_proj`, `v_proj`, `o_proj`,
    `gate_proj`, `up_proj` and `down_proj`, or `all-linear` for all that the model has."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which each input of A is zero in training, rounded to a multiple of 1/65536.
    The draws depend on the seed, the step, and the token's sample and position, not on the layout.
    Keep it at 0 for policy gradients: dropout changes their probability ratios."""
    rslora: bool = False
    """Whether the scale is alpha / sqrt(rank) (Kalajdzievski 2023), which suits large ranks."""

    @field_validator("targets")
    @classmethod
    def _known(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(targets, str):
            return targets
        rule = f"allowed: '{ALL_LINEAR}', or a list of {', '.join(TARGETS)}"
        unknown = [name for name in targets if name not in TARGETS]
        if unknown:
            raise ValueError(f"'{unknown[0]}' is not allowed; {rule}")
        if not targets or len(set(targets)) < len(targets):
            raise ValueError(f"an empty list or a name twice is not allowed; {rule}")
        return targets

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def adapts(self, name: str) -> bool:
        """Whether a linear layer, by the last part of its name, has an adapter."""
        return name in (TARGETS if self.targets == ALL_LINEAR else self.targets)
