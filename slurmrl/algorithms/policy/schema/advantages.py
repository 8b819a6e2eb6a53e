"""Settings of the advantages."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import model_validator

from slurmrl.algorithms.policy.schema.objective import refuse_unused
from slurmrl.config.schema.base import Fraction, NonNegativeFloat, Section

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
    """Normalise the advantages to mean 0 and standard deviation 1 over all response tokens of the
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
