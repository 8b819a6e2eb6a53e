"""Settings of filters: which prompts and completions a step trains on, and how it replaces
prompts."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from slurmrl.algorithms.policy.schema.objective import refuse_unused
from slurmrl.config.schema.base import Fraction, PositiveInt, Section
from slurmrl.graph.call import Call, Method, Refill

ZERO_VARIANCE = "zero_variance"
TRUNCATED = "truncated"


class Filters(Section):
    """Prompts that are dropped after their completions were judged, and what replaces them.
    Completions that leave the losses."""

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
        interface="slurmrl.algorithms.policy.filters:FilterInterface",
        inputs=("prompt_mask", "rewards", "finished"),
        metrics=(
            *(f"filter/{name}" for name in (ZERO_VARIANCE, TRUNCATED)),
            *(f"filter/{name}" for name in ("rounds", "accepted", "surplus")),
        ),
    )
